"""Element-wise operations from C++ source, compiled when they are first used."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...native.implementation import BEST, Implementation, Order
from ..core.arguments import array_of, choose, requested
from .code import DTYPES, Pairs
from .function import Plain, Primal, Slope, called, key_of
from .lexer import last_heads, normal, returns
from .op import Loop, by_jax, call, compute_dtype
from .signature import Signature, check_self_contained, find, resolve

MOST = 8  # inputs


def elementwise(
    source: str,
    *,
    name: str | None = None,
    derivative: Mapping[str, Any] | Callable[..., Any] | None = None,
    definition: Callable[..., Any] | None = None,
    dtype: Any = None,
    implementation: Implementation = None,
    **scalars: Any,
) -> "Elementwise":
    """Makes a JAX operation of a scalar function in C++.

        y[i] = f(x₁[i], …, xₙ[i]; scalars)

    The function is compiled when the op is first lowered for given dtypes, by NVRTC for NVIDIA GPUs
    and by the system's C++ compiler for CPUs, and kept on disk (`normfuse cache`). Inputs broadcast
    as in NumPy; none is expanded in memory where another has the result's shape. float16 and
    bfloat16 are computed in float32 and rounded once.

    Args:
      source: C++ that defines the function, after everything that it calls; only the compiler's
        own headers may be included. Parameters named in `scalars` are run-time scalars, the others
        inputs, 1 to 8. It returns one result. Types are template parameters (inputs of type T are
        promoted together), bool, integers, float and double.
      name: the function's name; the last function if None.
      derivative: makes the op differentiable. A mapping from parameters (inputs or scalars) to the
        derivative with respect to each: C++ text of an expression in the function's parameters, or
        of statements that return it. Or the whole function in plain JAX, which JAX then
        differentiates. None: JAX differentiates `definition`, as it does for second derivatives
        where the first are C++.
      definition: the function in plain JAX, `definition(*inputs, **scalars)`, which serves where
        C++ cannot (TPUs, AMD GPUs, CPUs without a compiler); half precision comes as float32.
      dtype: the result's; None: as in the C++.
      implementation: None, "native" or "xla" (the definition), or several to try in order.
      **scalars: the run-time scalars and their defaults. A call may change them, also to traced
        values, without compiling anything.

    Returns:
      An `Elementwise`: call it with the inputs.

    Raises:
      TypeError, ValueError: for a source, derivative or scalar that does not fit.

    Calls raise TypeError for the wrong number of inputs, unknown scalars and unsupported dtypes,
    and `normfuse.CompileError` with the compiler's log if the source does not compile.
    Differentiating raises TypeError where no derivative was given.

    >>> import jax, jax.numpy as jnp, normfuse
    >>> softcap = normfuse.elementwise(
    ...     "template <class T> T softcap(T x, T cap) { return cap * tanh(x / cap); }",
    ...     derivative={"x": "const T t = tanh(x / cap); return 1 - t * t;"},
    ...     cap=30.0,
    ... )
    >>> softcap(jnp.array([0.0, 100.0]), cap=2.0)
    Array([0., 2.], dtype=float32)
    >>> jax.grad(softcap)(0.0)
    Array(1., dtype=float32, weak_type=True)
    """
    return Elementwise(source, name, derivative, definition, dtype, implementation, scalars)


class Elementwise:
    """A scalar function in C++ as a JAX operation; made by `elementwise`, which describes it.

    Attributes:
      name: the function's.
      source: the C++ text.
      inputs: the names of the inputs.
      scalars: the run-time scalars and their defaults.
    """

    def __init__(
        self,
        source: str,
        name: str | None,
        derivative: Any,
        definition: Plain | None,
        dtype: Any,
        implementation: Implementation,
        scalars: dict[str, Any],
    ):
        self._made_of = source, name, derivative, definition, dtype, implementation, scalars
        self.source, self.scalars, self._implementation = source, scalars, implementation
        self._signature = signature = find(source, name)
        self.name = self.__name__ = signature.name
        self._function = build(signature, normal(source), scalars, derivative, definition)
        self.inputs = tuple(name for name in self._signature.parameters if name not in scalars)
        self._dtype = self._stated(dtype)
        self.__doc__ = f"{self.name}({', '.join(self._signature.parameters)}), in C++."
        for scalar, value in scalars.items():
            self._scalar(scalar, value, ())
        self._identity = self._function, self._dtype, repr((implementation, scalars))

    def __reduce__(self) -> Any:
        return Elementwise, self._made_of

    def __eq__(self, other: Any) -> bool:
        """Ops of the same texts, Python functions and options are equal."""
        return isinstance(other, Elementwise) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        scalars = "".join(f", {k}={v!r}" for k, v in self.scalars.items())
        return f"<elementwise {self.name}({', '.join(self.inputs)}{scalars})>"

    def __call__(self, *inputs: Any, **scalars: Any) -> Any:
        """The function of the inputs, broadcast together.

        Raises:
          TypeError: for the wrong number of inputs, an unknown scalar, a dtype that does not fit.
          ValueError: for shapes that do not broadcast.
          CompileError: if the source does not compile.
          NotImplementedError: where neither C++ nor a definition can serve.
        """
        if len(inputs) != len(self.inputs):
            raise TypeError(
                f"{self.name} takes {len(self.inputs)} input{'s' * (len(self.inputs) > 1)} "
                f"({', '.join(self.inputs)}), got {len(inputs)}"
            )
        for scalar in scalars:
            if scalar not in self.scalars:
                have = ", ".join(self.scalars) or "none"
                raise TypeError(f"{self.name} has no scalar {scalar!r}; it has {have}")
        signature = self._signature
        arrays = {name: self._array(name, value) for name, value in zip(self.inputs, inputs)}
        bound = self._bound(arrays)
        shape = self._broadcast(arrays)
        values, operands, placed = self.scalars | scalars, [], []
        for name, type_ in signature.parameters.items():
            if name in arrays:
                operand, have = _aligned(arrays[name], shape)
                if getattr(operand, "weak_type", False):  # a Python number takes the others' dtype
                    dtype = resolve(type_, dict(bound))
                    operand = operand.astype(jax.dtypes.canonicalize_dtype(dtype))
            else:
                operand, have = self._scalar(name, values[name], bound), ()
            operands.append(operand)
            placed.append(have)
        out = jax.dtypes.canonicalize_dtype(self._dtype or resolve(signature.result, dict(bound)))
        return self._serve(Loop(self._function, tuple(placed), bound, (out.name,)), operands)[0]

    def _serve(self, loop: Loop, operands: list[Array]) -> list[Array]:
        native = lambda order: call(loop, operands, Order(("native",), order.strict))
        if not requested(self._implementation):
            return native(BEST)
        serve, definition = {"native": native}, self._function.definition
        if definition is not None:
            serve["xla"] = lambda order: by_jax(definition, loop, *operands)
        return choose(self.name, self._implementation, serve)

    def _array(self, argument: str, value: Any) -> Array:
        array = array_of(self.name, argument, value)
        if array.dtype.name not in DTYPES:
            raise TypeError(
                f"{self.name}: {argument} must have one of the dtypes {', '.join(DTYPES)}; got "
                f"{array.dtype.name}; cast it first, for example {argument}.astype(jnp.float32)"
            )
        return array

    def _bound(self, arrays: dict[str, Array]) -> Pairs:
        """Returns the dtype of each template parameter; checks that other inputs fit theirs."""
        groups: dict[str, list[Array]] = {t: [] for t in self._signature.template}
        for name, array in arrays.items():
            type_ = self._signature.parameters[name]
            if type_ in groups:
                groups[type_].append(array)
            elif _kind(array.dtype) > _kind(resolve(type_, {})):
                raise TypeError(
                    f"{self.name}: {name} is declared {type_}, got {array.dtype}; cast it first"
                )
        return tuple((type_, jnp.result_type(*group).name) for type_, group in groups.items())

    def _broadcast(self, arrays: dict[str, Array]) -> tuple[int, ...]:
        try:
            return jnp.broadcast_shapes(*(a.shape for a in arrays.values()))
        except ValueError:
            shapes = ", ".join(f"{name} {a.shape}" for name, a in arrays.items())
            raise ValueError(f"{self.name}: inputs do not broadcast: {shapes}") from None

    def _stated(self, dtype: Any) -> str | None:
        try:
            name = None if dtype is None else jnp.dtype(dtype).name
        except TypeError:
            name = ascii(dtype)
        if name not in (None, *DTYPES):
            raise TypeError(
                f"{self.name}: dtype must be None or one of {', '.join(DTYPES)}, got {dtype!r}"
            )
        return name

    def _scalar(self, name: str, value: Any, bound: Pairs) -> Any:
        """Returns a run-time scalar as an array of no dimensions, in the type it is computed in."""
        type_ = self._signature.parameters[name]
        is_number = np.isscalar(value) or isinstance(value, np.ndarray | Array)
        if not is_number or isinstance(value, str | bytes) or np.ndim(value) != 0:
            raise TypeError(f"{self.name}: scalar {name} must be a number, got {value!r}")
        if type_ in self._signature.template and not bound:
            return None  # a default, before the dtype is known
        dtype = compute_dtype(type_, bound)
        if _kind(getattr(value, "dtype", type(value))) > _kind(dtype):
            raise TypeError(
                f"{self.name}: scalar {name} is declared {type_}, here {dtype.name}; got {value!r}"
            )
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        if dtype.kind in "iu" and not isinstance(value, Array):
            if not jnp.iinfo(dtype).min <= np.asarray(value).item() <= jnp.iinfo(dtype).max:
                raise OverflowError(
                    f"{self.name}: scalar {name} is declared {type_}, here {dtype.name}; got "
                    f"{value!r} (64 bits need jax_enable_x64)"
                )
        return jnp.asarray(value, dtype)


def _kind(dtype: Any) -> int:
    """Returns the place of a dtype's kind in the order in which one converts to the next."""
    dtype = jnp.dtype(dtype)
    return "biufc".index("f" if jnp.issubdtype(dtype, jnp.floating) else dtype.kind)


def _aligned(array: Array, shape: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """Returns the array without dimensions along which it is repeated, and those it has."""
    first = len(shape) - array.ndim
    repeated = [i for i, n in enumerate(array.shape) if n == 1 and shape[first + i] != 1]
    have = tuple(first + i for i in range(array.ndim) if i not in repeated)
    return (jax.lax.squeeze(array, repeated) if repeated else array), have


# ---------------------------------------------------------------- reading what the user gave


def build(
    signature: Signature,
    source: str,
    scalars: Collection[str],
    derivative: Any,
    definition: Plain | None,
) -> Primal:
    """Returns the function, or raises one clear error."""
    name = signature.name
    _check_parameters(signature, scalars)
    if definition is not None and not callable(definition):
        raise TypeError(f"{name}: definition must be a function in plain JAX, got {definition!r}")
    plain = definition and _positional(definition, signature, scalars)
    differentiable, partials = None, ()
    if isinstance(derivative, Mapping):
        partials = tuple(_partials(signature, derivative))
    elif derivative is None:
        differentiable = plain
    elif callable(derivative):
        differentiable = _positional(derivative, signature, scalars)
    else:
        raise TypeError(
            f"{name}: derivative must be a mapping from parameters to derivatives, or a function "
            f"in plain JAX; got {derivative!r}"
        )
    functions = [definition, derivative if callable(derivative) else None]
    takes = tuple(
        (type_, f"normfuse_a{i}") for i, type_ in enumerate(signature.parameters.values())
    )
    return Primal(
        name=name,
        pieces=((f"<elementwise {name}>", source),),
        operands=takes,
        results=((signature.result, "normfuse_y0"),),
        template=signature.template,
        body=f"normfuse_y0 = {called(name, signature.template, [a for _, a in takes])};",
        definition=plain,
        key=key_of([source, name, tuple(scalars), partials], *functions),
        names=tuple(signature.parameters),
        partials=partials,
        differentiable=differentiable,
    )


def _check_parameters(signature: Signature, scalars: Collection[str]) -> None:
    where = f"elementwise: {signature}"
    for scalar in scalars:
        if scalar not in signature.parameters:
            raise TypeError(f"{where} has no parameter called {scalar!r}, which is given a default")
    inputs = [type_ for name, type_ in signature.parameters.items() if name not in scalars]
    if not 1 <= len(inputs) <= MOST:
        raise ValueError(f"{where} has {len(inputs)} inputs; from 1 to {MOST} are possible")
    for type_ in signature.template:
        if type_ not in inputs:
            raise ValueError(f"{where}: no input has type {type_}, so what it is does not follow")


def _partials(signature: Signature, derivative: Mapping[str, Any]) -> Iterator[tuple[int, Slope]]:
    """Yields (operand, its derivative) as `Primal.partials` has them."""
    names = list(signature.parameters)
    for name, text in derivative.items():
        if name not in names:
            raise ValueError(
                f"{signature.name}: derivative has {name!r}, which is no parameter of {signature}"
            )
        yield names.index(name), _slope(signature, name, text)


def _slope(signature: Signature, name: str, text: Any) -> Slope:
    where = f"{signature.name}: derivative[{name!r}]"
    if not isinstance(text, str):
        raise TypeError(
            f"{where} must be C++ text, got {text!r}; for derivatives in plain JAX pass "
            "derivative=, the whole function in plain JAX"
        )
    check_self_contained(where, text)
    last_heads(where, text := normal(text))
    slope = f"{signature.name}_d_{name}"
    takes = ", ".join(f"{type_} {one}" for one, type_ in signature.parameters.items())
    types = ", ".join(f"class {t}" for t in signature.template)
    head = f"template <{types}> " * bool(types) + f"{signature.result} {slope}({takes}) {{"
    before, after = ([], "}") if returns(text) else ([("<normfuse>", "return")], ";}")
    pieces = (
        ("<normfuse>", head),
        *before,
        (f"<derivative of {signature.name} with respect to {name}>", text),
        ("<normfuse>", after),
    )
    return Slope(slope, pieces)


def _positional(function: Plain, signature: Signature, scalars: Collection[str]) -> Plain:
    """Returns the user's function of inputs and keyword scalars as one of all operands in order."""

    @functools.wraps(function)
    def plain(*arrays: Array) -> list[Array]:
        named = dict(zip(signature.parameters, arrays, strict=True))
        inputs = [named[name] for name in named if name not in scalars]
        return [function(*inputs, **{name: named[name] for name in scalars})]

    return plain
