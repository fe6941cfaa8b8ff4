"""Element-wise operations from C++ source, compiled when they are first used."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..native.elementwise import compute_dtype
from ..native.elementwise_code import DTYPES
from ..native.elementwise_signature import resolve
from ..native.scalar import Scalar
from . import elementwise_derivative
from .elementwise_build import build, scalar_of
from .elementwise_op import call, op
from .implementation import Implementation, choose, requested

elementwise_derivative.register()
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
        options = {"placed": placed, "bound": bound, "out": out}

        def native(strict):
            return call(self._function, operands, strict=strict, **options)

        def xla(strict):
            del strict
            order = tuple(range(len(operands)))
            options_ = options | {"axes": (), "order": order, "function": self._function}
            return op.plain(*operands, **options_)

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
