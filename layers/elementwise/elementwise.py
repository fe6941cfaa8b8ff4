"""Element-wise operations from C++ source, compiled when they are first used."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...native.implementation import (
    Implementation,
    Order,
    choose,
    requested,
)
from ..dense.epilogue import Scalar
from .code import DTYPES
from .function import Primal, called, key_of
from .op import Loop, call, compute_dtype
from .op import elementwise as op
from .signature import Signature, find, functions, resolve

MOST = 8  # inputs, and outputs
_KINDS = "biufc"  # in the order in which one converts to the next


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
      source: C++ that defines the function, and before it whatever it calls. Parameters named in
        `scalars` are run-time scalars, `T&` is written to, and the others are inputs, 1 to 8. One
        result is returned; several, up to 8, are what a void function writes to its references.
        Types are template parameters (inputs of type T are promoted together), bool, integers,
        float, double, complex<float>, complex<double>; for results also real_t<T> and complex<T>.
      name: which function; the last where None.
      derivative: what makes the op differentiable. A mapping from parameters (inputs or scalars) to
        the derivative with respect to each: C++ text of an expression in the function's parameters
        (or of statements that return it), an elementwise op of the same parameters, or a function
        in plain JAX; a tuple of them where there are several results. Or the whole function in
        plain JAX, which JAX then differentiates. Where None, `definition` is.
      definition: the function in plain JAX, `definition(*inputs, **scalars)`, which serves where
        C++ cannot (TPUs, AMD GPUs, CPUs without a compiler); half precision comes as float32.
      dtype: of the result, or a tuple for several; what the C++ says where None.
      implementation: None, "native" or "xla" (the definition), or several to try in order.
      **scalars: the run-time scalars and their defaults. A call may change them, also to traced
        values, without compiling anything.

    Returns:
      An `Elementwise`: call it with the inputs.

    Raises:
      TypeError, ValueError: for a source, derivative or scalar that does not fit.

    Calls raise TypeError for the wrong number of inputs, unknown scalars and unsupported dtypes,
    and `normfuse.CompileError` with the compiler's log where the source does not compile.
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
    return Elementwise(
        source, name, derivative, definition, dtype, implementation, tuple(scalars.items())
    )


class Elementwise:
    """A scalar function in C++ as a JAX operation; made by `elementwise`, which describes it.

    Attributes:
      name: the function's.
      source: the C++ text.
      inputs: the names of the inputs.
      scalars: the run-time scalars and their defaults.
      outputs: how many results there are.
    """

    def __init__(self, source, name, derivative, definition, dtype, implementation, scalars):
        self.source, self.scalars = source, dict(scalars)
        self._signature, self._function = build(
            source, name, tuple(self.scalars), derivative, definition, MOST
        )
        self.name = self.__name__ = self._signature.name
        self._operands = [p for p in self._signature.parameters if not p.output]
        self.inputs = tuple(p.name for p in self._operands if p.name not in self.scalars)
        self.outputs = len(self._function.results)
        self._implementation = implementation
        self._dtype = self._stated(dtype)
        self.__doc__ = f"{self.name}({', '.join(p.name for p in self._operands)}), in C++."
        for scalar, value in self.scalars.items():
            self._scalar(scalar, value, {})

    def __repr__(self) -> str:
        scalars = "".join(f", {k}={v!r}" for k, v in self.scalars.items())
        return f"<elementwise {self.name}({', '.join(self.inputs)}{scalars})>"

    def __call__(self, *inputs: Any, **scalars: Any) -> Any:
        """The function of the inputs, broadcast together; an array, or a tuple of several.

        Raises:
          TypeError: for the wrong number of inputs, an unknown scalar, a dtype that does not fit.
          ValueError: for shapes that do not broadcast.
          CompileError: if the source does not compile.
          NotImplementedError: where neither C++ nor a definition can serve.
        """
        self._check(inputs, scalars)
        arrays = dict(zip(self.inputs, map(self._array, self.inputs, inputs)))
        bound = self._bound(arrays)
        shape = self._broadcast(arrays)
        out = self._results(bound)
        values = self.scalars | scalars
        operands, placed = [], []
        for parameter in self._operands:
            if parameter.name in arrays:
                operand, have = _aligned(arrays[parameter.name], shape)
                if getattr(operand, "weak_type", False):  # a Python number takes the others' dtype
                    wanted = resolve(parameter.type, dict(bound))
                    operand = operand.astype(jax.dtypes.canonicalize_dtype(wanted))
            else:
                operand, have = (
                    self._scalar(parameter.name, values[parameter.name], dict(bound)),
                    (),
                )
            operands.append(operand)
            placed.append(have)
        results = self._serve(operands, tuple(placed), bound, out)
        return results[0] if self._signature.result else tuple(results)

    @functools.cached_property
    def scalar(self) -> Scalar | None:
        """The function as kernels of other ops take it, with its scalars' defaults; None unless it
        is `template <class T> T name(T x, scalars)`."""
        return scalar_of(self._signature, self._function, self.source, self.scalars, self)

    def _serve(self, operands, placed, bound, out):
        def native(strict):
            options = {"bound": bound, "out": out, "order": Order(("native",), strict)}
            return call(self._function, operands, placed, **options)

        def xla(strict):
            del strict
            sequence = tuple(range(len(operands)))
            return op.plain(Loop(self._function, placed, bound, out, sequence), *operands)

        if not requested(self._implementation):
            return native(False)
        serve = {"native": native}
        if self._function.definition is not None:
            serve["xla"] = xla
        return choose(self.name, self._implementation, serve)

    def _check(self, inputs, scalars):
        if len(inputs) != len(self.inputs):
            raise TypeError(
                f"{self.name} takes {len(self.inputs)} input{'s' * (len(self.inputs) > 1)} "
                f"({', '.join(self.inputs)}), got {len(inputs)}"
            )
        for scalar in scalars:
            if scalar not in self.scalars:
                have = ", ".join(self.scalars) or "none"
                raise TypeError(f"{self.name} has no scalar {scalar!r}; it has {have}")

    def _array(self, argument, value):
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError):
            raise TypeError(f"{self.name}: {argument} must be an array, got {value!r}") from None
        if array.dtype.name not in DTYPES:
            raise TypeError(
                f"{self.name}: {argument} must have one of the dtypes {', '.join(DTYPES)}; got "
                f"{array.dtype.name}; cast it first, for example {argument}.astype(jnp.float32)"
            )
        return array

    def _bound(self, arrays):
        """The dtype of each template parameter, and that the other inputs fit theirs."""
        groups: dict[str, list] = {}
        for parameter in self._operands:
            if parameter.name not in arrays:
                continue
            array = arrays[parameter.name]
            if parameter.type in self._signature.template:
                groups.setdefault(parameter.type, []).append(array)
                continue
            wanted = np.dtype(resolve(parameter.type, {}))
            if _KINDS.index(_kind(array.dtype)) > _KINDS.index(wanted.kind):
                raise TypeError(
                    f"{self.name}: {parameter.name} is declared {parameter.type}, got "
                    f"{array.dtype.name}; cast it first"
                )
        return tuple((t, jnp.result_type(*groups[t]).name) for t in self._signature.template)

    def _broadcast(self, arrays):
        try:
            return jnp.broadcast_shapes(*(a.shape for a in arrays.values()))
        except ValueError:
            shapes = ", ".join(f"{name} {a.shape}" for name, a in arrays.items())
            raise ValueError(f"{self.name}: inputs do not broadcast: {shapes}") from None

    def _results(self, bound):
        if self._dtype is not None:
            return tuple(jax.dtypes.canonicalize_dtype(t).name for t in self._dtype)
        types = [resolve(t, dict(bound)) for t, _ in self._function.results]
        for type_, (text, _) in zip(types, self._function.results, strict=True):
            if type_ is None:
                raise TypeError(
                    f"{self.name} returns {text}, which {dict(bound)} does not make a number"
                )
        return tuple(jax.dtypes.canonicalize_dtype(t).name for t in types)

    def _stated(self, dtype):
        if dtype is None:
            return None
        given = tuple(dtype) if isinstance(dtype, (tuple, list)) else (dtype,) * self.outputs
        try:
            names = tuple(jnp.dtype(one).name for one in given)
        except TypeError:
            raise TypeError(f"{self.name}: dtype must be a dtype, got {dtype!r}") from None
        if len(names) != self.outputs or not set(names) <= set(DTYPES):
            raise TypeError(
                f"{self.name}: dtype must be one of {', '.join(DTYPES)} for each of {self.outputs} "
                f"results, got {dtype!r}"
            )
        return names

    def _scalar(self, name, value: Any, bound):
        """A run-time scalar as an array of no dimensions, in the type it is computed in."""
        type_ = next(p.type for p in self._operands if p.name == name)
        is_number = np.isscalar(value) or isinstance(value, (np.ndarray, jax.Array))
        if not is_number or isinstance(value, str) or np.ndim(value) != 0:
            raise TypeError(f"{self.name}: scalar {name} must be a number, got {value!r}")
        if type_ in self._signature.template and type_ not in bound:
            return None  # a default, before the dtype is known
        dtype = compute_dtype(type_, tuple(bound.items()))
        given = _KINDS.index(_kind(jnp.asarray(value).dtype))
        if given > _KINDS.index(_kind(dtype)):
            raise TypeError(
                f"{self.name}: scalar {name} is declared {type_}, here {dtype.name}; got {value!r}"
            )
        return jnp.asarray(value, jax.dtypes.canonicalize_dtype(dtype))


def _kind(dtype) -> str:
    return "f" if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype).kind


def _aligned(array, shape):
    """(the array without dimensions along which it is repeated, the dimensions it has)."""
    first = len(shape) - array.ndim
    repeated = [i for i, n in enumerate(array.shape) if n == 1 and shape[first + i] != 1]
    have = tuple(first + i for i in range(array.ndim) if i not in repeated)
    return (jax.lax.squeeze(array, repeated) if repeated else array), have


# ---------------------------------------------------------------- reading what the user gave


def build(
    source: str,
    name: str | None,
    scalars: Sequence[str],
    derivative: Any,
    definition: Callable[..., Any] | None,
    most: int,
) -> tuple[Signature, Primal]:
    """The signature and the function, or one clear error."""
    signature = find(source, name)
    operands = [p for p in signature.parameters if not p.output]
    _check_parameters(signature, operands, scalars, most)
    if definition is not None and not callable(definition):
        raise TypeError(
            f"{signature.name}: definition must be a function in plain JAX, got {definition!r}"
        )
    plain = definition and _positional(definition, signature, scalars)
    differentiable, partials = None, ()
    if isinstance(derivative, Mapping):
        partials = tuple(_partials(signature, operands, scalars, source, derivative, plain))
    elif derivative is None:
        differentiable = plain
    elif callable(derivative):
        differentiable = _positional(derivative, signature, scalars)
    else:
        raise TypeError(
            f"{signature.name}: derivative must be a mapping from parameters to derivatives, or a "
            f"function in plain JAX; got {derivative!r}"
        )
    functions = [definition, derivative if callable(derivative) else None]
    functions += [one for _, one in partials if callable(one)]
    texts = [source, signature.name, tuple(scalars)]
    texts += [[p.key for p in one] for _, one in partials if isinstance(one, tuple)]
    return signature, _primal(
        signature,
        ((f"<elementwise {signature.name}>", source),),
        operands,
        plain,
        key_of(texts, *functions),
        partials,
        differentiable,
    )


def scalar_of(signature, function: Primal, source: str, scalars, operation) -> Scalar | None:
    """The function as a `Scalar`, whose parameters are the run-time scalars' defaults; None where
    it is not `template <class T> T name(T x, scalars)`."""
    takes = signature.parameters
    inputs = [p for p in takes if not p.output and p.name not in scalars]
    kinds = {p.type for p in inputs} | {signature.result}
    if len(inputs) != 1 or takes[0] != inputs[0] or kinds != set(signature.template):
        return None
    partial = dict(function.partials).get(0)
    text, name = "", f"{signature.name}_derivative"
    if isinstance(partial, tuple):
        *before, (_, source_of) = [p for p in partial[0].pieces if p[0] != "<normfuse>"]
        if before:  # an expression, between a head and an end
            own = "\n".join(piece for _, piece in partial[0].pieces[1:])
            text = _device(own).replace(partial[0].name, name, 1)
        else:
            declared = ", ".join(f"{p.type} {p.name}" for p in takes)
            gives = ", ".join(p.name for p in takes)
            text = (
                f"{_device(source_of)}\ntemplate <class {inputs[0].type}> __device__ inline "
                f"{signature.result} {name}({declared}) {{ return {partial[0].name}({gives}); }}"
            )
    return Scalar(
        signature.name,
        _device(source),
        text,
        operation,
        tuple((p.name, float(scalars[p.name])) for p in takes[1:]),
    )


def _device(source: str) -> str:
    """Every function of the text as one of the device's."""
    for one in reversed(list(functions(source))):
        source = f"{source[: one.head]} __device__ inline{source[one.head :]}"
    return source


def _check_parameters(signature, operands, scalars, most):
    where, names = f"elementwise: {signature}", [p.name for p in operands]
    for scalar in scalars:
        if scalar not in names:
            raise TypeError(f"{where} has no parameter called {scalar!r}, which is given a default")
    inputs = [p for p in operands if p.name not in scalars]
    outputs = [p for p in signature.parameters if p.output]
    if not 1 <= len(inputs) <= most or len(outputs) > most:
        raise ValueError(
            f"{where} has {len(inputs)} inputs and {len(outputs) or 1} outputs; from 1 to {most} "
            "of each are possible"
        )
    for parameter in inputs:
        if "<" in parameter.type and signature.template:
            if resolve(parameter.type, {}) is None:
                raise ValueError(
                    f"{where}: input {parameter.name} has type `{parameter.type}`, from which "
                    f"{signature.template[0]} does not follow; declare it `{signature.template[0]}`"
                )
    for type_ in signature.template:
        if type_ not in {p.type for p in inputs}:
            raise ValueError(f"{where}: no input has type {type_}, so what it is does not follow")


def _primal(signature, pieces, operands, plain, key, partials=(), differentiable=None) -> Primal:
    results = [p for p in signature.parameters if p.output]
    variables = {p.name: f"normfuse_a{i}" for i, p in enumerate(operands)}
    if signature.result:
        types = [signature.result]
        values = [variables[p.name] for p in operands]
        body = f"normfuse_y0 = {called(signature.name, signature.template, values)};"
    else:
        types = [p.type for p in results]
        variables |= {p.name: f"normfuse_y{i}" for i, p in enumerate(results)}
        values = [variables[p.name] for p in signature.parameters]
        body = f"{called(signature.name, signature.template, values)};"
    return Primal(
        signature.name,
        pieces,
        tuple((p.type, variables[p.name]) for p in operands),
        tuple((type_, f"normfuse_y{i}") for i, type_ in enumerate(types)),
        signature.template,
        body,
        plain,
        key,
        tuple(p.name for p in operands),
        partials,
        differentiable,
    )


def _partials(signature, operands, scalars, source, derivative, plain):
    names = [p.name for p in operands]
    outputs = [p for p in signature.parameters if p.output]
    types = [p.type for p in outputs] or [signature.result]
    for name, given in derivative.items():
        if name not in names:
            raise ValueError(
                f"{signature.name}: derivative has {name!r}, which is no parameter of {signature}"
            )
        k = names.index(name)
        if callable(given) and not hasattr(given, "_function"):
            yield k, _positional(given, signature, scalars)
            continue
        several = given if isinstance(given, (tuple, list)) else (given,)
        if len(several) != len(types):
            raise ValueError(
                f"{signature.name}: derivative[{name!r}] must have one entry for each of "
                f"{len(types)} results, got {len(several)}"
            )
        yield (
            k,
            tuple(
                _partial(signature, operands, source, name, k, j, one, type_, plain)
                for j, (one, type_) in enumerate(zip(several, types, strict=True))
            ),
        )


def _partial(signature, operands, source, name, k, j, given, type_, plain) -> Primal:
    """The derivative of result j with respect to operand k."""
    if hasattr(given, "_function"):
        other = given._function
        same = (other.names, [t for t, _ in other.operands], other.template)
        if same != (
            tuple(p.name for p in operands),
            [p.type for p in operands],
            signature.template,
        ):
            raise ValueError(
                f"{signature.name}: derivative[{name!r}] must take the same parameters, "
                f"({', '.join(p.name for p in operands)}); got {given!r}"
            )
        return other
    if not isinstance(given, str):
        raise TypeError(
            f"{signature.name}: derivative[{name!r}] must be C++ text, an elementwise op or a "
            f"function in plain JAX; got {given!r}"
        )
    template = ", ".join(f"class {t}" for t in signature.template)
    own = f"{signature.name}_d_{name}" + (f"_{j}" if j else "")
    takes = ", ".join(f"{p.type} {p.name}" for p in operands)
    head = f"template <{template}> " * bool(template) + f"{type_} {own}({takes}) {{"
    words = given if "return" in given else f"return\n{given}\n;"
    file = f"<derivative of {signature.name} with respect to {name}>"
    pieces = [(f"<elementwise {signature.name}>", source), ("<normfuse>", head)]
    if words is not given:
        pieces.append(("<normfuse>", "return"))
    pieces += [(file, given), ("<normfuse>", "}" if words is given else ";}")]
    slope = plain and functools.partial(_slope, plain, k, j)
    made = Signature(own, signature.template, tuple(operands), type_, 0, 0, 0)
    key = key_of([source, own, given], plain)
    return _primal(made, tuple(pieces), operands, slope, key, (), slope)


def _slope(plain, k, j, *operands):
    """The derivative of the definition, by JAX."""
    import jax
    import jax.numpy as jnp

    shape = jnp.broadcast_shapes(*(a.shape for a in operands))
    x = jnp.broadcast_to(operands[k], shape)
    of = lambda x: plain(*operands[:k], x, *operands[k + 1 :])[j]
    return [jax.jvp(of, (x,), (jnp.ones_like(x),))[1]]


def _positional(function, signature, scalars):
    """The user's function of inputs and keyword scalars as one of all operands in order."""
    operands = [p.name for p in signature.parameters if not p.output]
    single = bool(signature.result)

    @functools.wraps(function)
    def plain(*arrays):
        found = dict(zip(operands, arrays, strict=True))
        inputs = [found[name] for name in operands if name not in scalars]
        results = function(*inputs, **{name: found[name] for name in scalars})
        return [results] if single else list(results)

    return plain
