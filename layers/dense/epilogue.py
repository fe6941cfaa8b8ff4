"""What follows a dense layer's product: bias, activation and gate, forward to backward.

    y = activation(z + bias) · up

`up` is the second product of a gated layer; it has all dimensions of z, the bias its last ones. On
CUDA the forward is one pass, and so are all gradients together; on CPUs and elsewhere both are
plain JAX, which XLA fuses into one loop itself. Forward mode and higher orders are plain HLO.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from ...native.compiler import Source, kernel_source
from ...native.dtypes import CUDA_TYPES, compute_dtype, rounded
from ...native.implementation import BEST, Order, Unsupported, native_or_best
from ...native.kernel import Kernel
from ...native.launch import Target, column_sum, cuda_compute_dtype, launch, type_macros
from ..core.op import Dims, Loose, Op, Split, match, vary, varying_axes

# ---------------------------------------------------------------- activations

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A function of one number, and its derivative, in plain JAX and as source text for kernels.

    Attributes:
      name: the C++ function's; its derivative's is `name_derivative`. Not that of a function of
        CUDA's own (`tanh`), which the text could then not call.
      source: the definition, `template <typename T> __device__ T name(T x, T parameter, ...)`, for
        T float and double. It may call CUDA's math functions and those of `kernels/scalar.cuh`.
      derivative: the same of `name_derivative`; "" for a function without one, which cannot be
        part of a backward kernel.
      function: the function in plain JAX: what it means, and what is differentiated in forward
        mode and to higher orders.
      parameters: (name, value) of what follows x; constants of the compiled kernel.
    """

    name: str
    source: str
    derivative: str
    function: Callable[[Array], Array] = dataclasses.field(repr=False)
    parameters: tuple[tuple[str, float], ...] = ()

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"Scalar: name must be a C++ identifier, got {self.name!r}")

    def __call__(self, x: Array) -> Array:
        """The function in plain JAX."""
        return self.function(x)

    def code(self, alias: str = "activation") -> str:
        """Returns C++ text of `alias(x)` and, with a derivative, of `alias_derivative(x)`."""
        values = "".join(f", T({value!r})" for _, value in self.parameters)
        parts = [self.source, _alias(alias, self.name, values)]
        if self.derivative:
            name = f"{self.name}_derivative"
            parts += [self.derivative, _alias(f"{alias}_derivative", name, values)]
        return "\n".join(part.strip() for part in parts) + "\n"


def _alias(alias: str, name: str, values: str) -> str:
    return (
        f"template <typename T>\n__device__ inline T {alias}(T x) {{ return {name}(x{values}); }}"
    )


def _scalar(name: str, function, value: str, derivative: str, **parameters: float) -> Scalar:
    """Returns a Scalar of two function bodies."""
    takes = "".join(f", T {parameter}" for parameter in parameters)
    text = lambda name, body: (
        f"template <typename T>\n__device__ inline T {name}(T x{takes}) {{\n  {body}\n}}"
    )
    return Scalar(
        name,
        text(name, value),
        text(f"{name}_derivative", derivative),
        function,
        tuple(parameters.items()),
    )


def squared_relu(x: Array) -> Array:
    """`max(x, 0)²` (So et al., arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


def quick_gelu(x: Array) -> Array:
    """`x · sigmoid(1.702 x)`, the approximation of GELU that CLIP was trained with."""
    return x * jax.nn.sigmoid(1.702 * x)


def gelu(x: Array) -> Array:
    """`x · Φ(x)` with the normal distribution's Φ (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: Array) -> Array:
    """The usual approximation of `gelu`, `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`."""
    return jax.nn.gelu(x, approximate=True)


_SWISH = "return sigmoid_of(k * x) + k * x * sigmoid_slope(k * x);"  # of x · sigmoid(k x)
# gelu_tanh(x) = x · sigmoid(2u), u = √(2/π) (x + 0.044715 x³): fewer operations than tanh takes.
_TWO_U = "const T u = T(1.5957691216057308) * (x + T(0.044715) * x * x * x);"

SCALARS: dict[str, Scalar] = {
    scalar.name: scalar
    for scalar in (
        _scalar(
            "elu",
            jax.nn.elu,
            "return x > T(0) ? x : T(expm1(x));",
            "return x > T(0) ? T(1) : T(exp(x));",
        ),
        _scalar(
            "gelu",
            gelu,
            "return T(0.5) * x * T(erfc(T(-0.70710678118654752) * x));",
            "const T density = T(0.39894228040143268) * T(exp(T(-0.5) * x * x));\n"
            "  return T(0.5) * T(erfc(T(-0.70710678118654752) * x)) + x * density;",
        ),
        _scalar(
            "gelu_tanh",
            gelu_tanh,
            f"{_TWO_U}\n  return x * sigmoid_of(u);",
            f"{_TWO_U}\n  const T du = T(1.5957691216057308) * (T(1) + T(0.134145) * x * x);\n"
            "  return sigmoid_of(u) + x * du * sigmoid_slope(u);",
        ),
        _scalar(
            "leaky_relu",
            jax.nn.leaky_relu,
            "return x >= T(0) ? x : slope * x;",
            "return x >= T(0) ? T(1) : slope;",
            slope=0.01,
        ),
        _scalar(
            "mish",
            jax.nn.mish,
            "return x * T(tanh(softplus_of(x)));",
            "const T t = T(tanh(softplus_of(x)));\n"
            "  return t + x * (T(1) - t * t) * sigmoid_of(x);",
        ),
        _scalar("quick_gelu", quick_gelu, "return x * sigmoid_of(k * x);", _SWISH, k=1.702),
        _scalar(
            "relu", jax.nn.relu, "return x > T(0) ? x : T(0);", "return x > T(0) ? T(1) : T(0);"
        ),
        _scalar("sigmoid", jax.nn.sigmoid, "return sigmoid_of(x);", "return sigmoid_slope(x);"),
        _scalar("silu", jax.nn.silu, "return x * sigmoid_of(k * x);", _SWISH, k=1.0),
        _scalar("softplus", jax.nn.softplus, "return softplus_of(x);", "return sigmoid_of(x);"),
        _scalar(
            "squared_relu",
            squared_relu,
            "return x > T(0) ? x * x : T(0);",
            "return x > T(0) ? T(2) * x : T(0);",
        ),
        _scalar(
            "hyperbolic_tangent",
            jnp.tanh,
            "return T(tanh(x));",
            "const T t = T(tanh(x)); return T(1) - t * t;",
        ),
    )
}
"""The activations that kernels know, by name. "gelu" is the exact one."""
SCALARS["swish"] = SCALARS["silu"]
SCALARS["tanh"] = SCALARS.pop("hyperbolic_tangent")


Activation = str | Callable[[Array], Array] | None


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    name: scalar.function for name, scalar in sorted(SCALARS.items())
}
"""By name. "gelu" is the exact one, of the error function; "gelu_tanh" its usual approximation."""


def resolve(activation: Activation, op: str = "") -> Callable[[Array], Array] | None:
    """Returns the function that `activation` names or is; None for none.

    Args:
      activation: as the user gave it.
      op: what it was given to, for errors.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything but None, a name or a callable.
    """
    if activation is None or callable(activation):
        return activation
    prefix = op and f"{op}: "
    if not isinstance(activation, str):
        raise TypeError(
            f"{prefix}activation must be None, a name or a function, got "
            f"{type(activation).__name__}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{prefix}activation must be one of {', '.join(map(repr, ACTIVATIONS))}, or a "
            f"function, got {activation!r}"
        )
    return ACTIVATIONS[activation]


def scalar_of(activation: Activation) -> Scalar | None:
    """Returns what kernels know of `activation`; None for a function that is plain JAX alone.

    A function that has its C++ with it says so by an attribute `scalar`.
    """
    if isinstance(activation, str):
        return SCALARS[activation]
    return activation if isinstance(activation, Scalar) else getattr(activation, "scalar", None)


# ---------------------------------------------------------------- the epilogue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
    """All that is known of an epilogue, or of a derivative of it, when it is traced.

    Attributes:
      op: the function the user called.
      function: the activation.
      axes: the bias's dimensions of z; kernels see arrays as (rows, columns).
      has_up, has_bias: whether there are these operands.
      out_dtype: of y.
      with_dbias, with_value: whether a backward returns the bias's gradient, and y once more.
      moves: which of z, up and bias have a tangent.
    """

    op: str = "dense"
    function: Scalar
    axes: tuple[int, ...] = (1,)
    has_up: bool = False
    has_bias: bool = False
    out_dtype: str = ""
    with_dbias: bool = False
    with_value: bool = False
    moves: tuple[bool, bool, bool] = (False, False, False)


# ---------------------------------------------------------------- definitions, in plain JAX


def _up_and_bias(spec: Epilogue, operands: Any, ndim: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """(up or 1, bias or 0) in `dtype`, against the whole array."""
    up = operands[0].astype(dtype) if spec.has_up else jnp.ones((), dtype)
    bias = jnp.zeros((), dtype)
    if spec.has_bias:
        bias = jnp.expand_dims(operands[-1].astype(dtype), _rows(spec, ndim))
    return up, bias


def _rows(spec: Epilogue, ndim: int) -> list[int]:
    return [d for d in range(ndim) if d not in spec.axes]


def define_forward(spec: Epilogue, z: Array, *rest: Array) -> list[Array]:
    """`(z[, up][, bias]) -> (y,)`."""
    dtype = compute_dtype(z.dtype, *(a.dtype for a in rest), spec.out_dtype)
    up, bias = _up_and_bias(spec, rest, z.ndim, dtype)
    y = spec.function(z.astype(dtype) + bias)
    return [(y * up if spec.has_up else y).astype(spec.out_dtype)]


def define_backward(spec: Epilogue, dy: Array, z: Array, *rest: Array) -> list[Array]:
    """`(dy, z[, up][, bias]) -> (dz[, dup][, dbias][, value])`; value is y, in dy's dtype."""
    dtype = compute_dtype(dy.dtype, z.dtype, *(a.dtype for a in rest))
    up, bias = _up_and_bias(spec, rest, z.ndim, dtype)
    wide = dy.astype(dtype)
    y, pull = jax.vjp(spec.function, z.astype(dtype) + bias)
    (dz,) = pull(wide * up if spec.has_up else wide)
    results = [dz.astype(z.dtype)]
    if spec.has_up:
        results.append((wide * y).astype(rest[0].dtype))
    if spec.with_dbias:
        results.append(jnp.sum(dz, _rows(spec, z.ndim)))
    if spec.with_value:
        results.append((y * up if spec.has_up else y).astype(dy.dtype))
    return results


def define_tangent(spec: Epilogue, z: Array, *rest: Array) -> list[Array]:
    """`(z[, up][, bias][, dz][, dup][, dbias]) -> (dy,)`."""
    dtype = compute_dtype(z.dtype, *(a.dtype for a in rest), spec.out_dtype)
    count = spec.has_up + spec.has_bias
    up, bias = _up_and_bias(spec, rest[:count], z.ndim, dtype)
    given = iter(rest[count:])
    dz, dup, dbias = (next(given).astype(dtype) if moved else None for moved in spec.moves)
    shift = jnp.zeros(z.shape, dtype) if dz is None else dz
    if dbias is not None:
        shift = shift + jnp.expand_dims(dbias, _rows(spec, z.ndim))
    y, dy = jax.jvp(spec.function, (z.astype(dtype) + bias,), (shift,))
    if spec.has_up:
        dy = dy * up
    if dup is not None:
        dy = dy + y * dup
    return [dy.astype(spec.out_dtype)]


# ---------------------------------------------------------------- kernels, on (rows, columns)
# or on arrays of any shape where there is no bias. The activation's text becomes part of the
# kernel's.


_MAX_GRID_Y = 65535


@dataclasses.dataclass(frozen=True)
class Layout:
    """How threads share an array, seen as (rows, columns).

    Attributes:
      rows, columns: of the array.
      vector: elements that move together; divides `columns`.
      width, height: threads of a block along columns (each with a vector) and rows.
      grid_y: blocks along the rows, which they go through with a stride.
      unroll: rows of a thread that are on their way together.
      min_blocks: blocks that a multiprocessor's registers must be enough for.
    """

    rows: int
    columns: int
    vector: int
    width: int
    height: int
    grid_y: int
    unroll: int
    min_blocks: int

    @property
    def tiles(self) -> int:
        """Blocks along the columns."""
        return -(-self.columns // (self.width * self.vector))


def flat_layout(size: int, itemsize: int, kernel: str, arrays: int) -> Layout:
    """Without a bias an array has no columns: it is a row, or several that a thread takes together.

    How many, and how many threads to a multiprocessor, is from measurements on an H200.

    Args:
      itemsize: bytes of the widest element.
      kernel: "forward" or "backward".
      arrays: how many are read and written.
    """
    vector = math.gcd(size, 16 // itemsize)
    chosen = {("forward", 2): (2, 8), ("forward", 3): (1, 8)}
    chosen |= {("backward", 3): (4, 4), ("backward", 5): (2, 4)}
    unroll, blocks = chosen.get((kernel, arrays), (1, 4))
    if size % (unroll * vector):
        unroll = 1
    return Layout(unroll, size // unroll, vector, 256, 1, 1, unroll, blocks)


def column_layout(rows: int, columns: int, itemsize: int, target: Target) -> Layout:
    """With a bias a thread keeps its columns, and blocks go through the rows."""
    vector = math.gcd(columns, 16 // itemsize)
    width = min(32, 1 << (columns // vector - 1).bit_length())
    layout = Layout(rows, columns, vector, width, 256 // width, 1, 1, 2)
    blocks = -(-8 * target.multiprocessors // layout.tiles)
    grid_y = min(-(-rows // layout.height), blocks, _MAX_GRID_Y)
    return dataclasses.replace(layout, grid_y=grid_y)


def forward_on_cuda(target: Target, spec: Epilogue, z: Any, *rest: Any) -> list[Array]:
    """`(z[, up][, bias]) -> (y,)`."""
    names = ["Z"] + ["UP"] * spec.has_up + ["BIAS"] * spec.has_bias
    operands = dict(zip(names, (z, *rest), strict=True))
    results = {"Y": jax.ShapeDtypeStruct(z.shape, jnp.dtype(spec.out_dtype))}
    return _launch(target, "forward", spec.function, operands, results)


def backward_on_cuda(target: Target, spec: Epilogue, dy: Any, z: Any, *rest: Any) -> list[Array]:
    """`(dy, z[, up][, bias]) -> (dz[, dup][, dbias][, value])`."""
    if not spec.function.derivative:
        raise Unsupported(f"the activation {spec.function.name} has no derivative in C++")
    names = ["DY", "Z"] + ["UP"] * spec.has_up + ["BIAS"] * spec.has_bias
    operands = dict(zip(names, (dy, z, *rest), strict=True))
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    results: dict[str, Any] = {"DZ": like(z)}
    if spec.has_up:
        results["DUP"] = like(operands["UP"])
    if spec.with_dbias:
        results["PARTIAL"] = None
    if spec.with_value:
        results["VALUE"] = like(dy)
    return _launch(target, "backward", spec.function, operands, results)


def _launch(
    target: Target, kernel: str, function: Scalar, operands: dict[str, Any], results: dict[str, Any]
) -> list[Array]:
    dtypes = [a.dtype for a in (*operands.values(), *filter(None, results.values()))]
    compute = cuda_compute_dtype(dtypes)
    itemsize = max(d.itemsize for d in dtypes)
    if "BIAS" in operands:  # (rows, columns)
        rows, columns = operands["Z"].shape
        layout = column_layout(rows, columns, itemsize, target)
    else:
        layout = flat_layout(operands["Z"].size, itemsize, kernel, len(dtypes))
    if "PARTIAL" in results:
        results["PARTIAL"] = jax.ShapeDtypeStruct((layout.grid_y, layout.columns), compute)
    macros = type_macros(operands) | type_macros(results)
    macros |= {
        "KERNEL": f"epilogue_{kernel}",
        "COMPUTE_TYPE": CUDA_TYPES[compute.name],
        "APPROXIMATE": int(itemsize == 2),
        "GRADIENT": int(kernel == "backward"),
        "HAS_UP": int("UP" in operands),
        "HAS_BIAS": int("BIAS" in operands),
        "WITH_DBIAS": int("PARTIAL" in results),
        "WITH_VALUE": int("VALUE" in results),
        "VECTOR": layout.vector,
        "BLOCK_X": layout.width,
        "BLOCK_Y": layout.height,
        "UNROLL": layout.unroll,
        "MIN_BLOCKS": layout.min_blocks,
    }
    done = launch(
        _source(function),
        f"epilogue_{kernel}",
        list(operands.values()),
        list(results.values()),
        target=target,
        grid=(layout.tiles, layout.grid_y),
        block=layout.width * layout.height,
        macros=macros,
        shared=_shared(layout, compute) if "PARTIAL" in results else 0,
        ints=(layout.rows, layout.columns),
        aliases=_in_place(operands, results),
    )
    named = dict(zip(results, done, strict=True))
    if "PARTIAL" in named:
        named["PARTIAL"] = column_sum(launch, target, named["PARTIAL"])
    return list(named.values())


def _shared(layout: Layout, compute: jnp.dtype) -> int:
    """Bytes in which the rows of a block add their bias gradients."""
    return layout.width * layout.height * layout.vector * compute.itemsize


def _in_place(operands: dict[str, Any], results: dict[str, Any]) -> dict[int, int]:
    """Gradients take the place of what they are the gradients of, which is read no more."""
    places = {"DZ": "Z", "DUP": "UP", "VALUE": "DY"}
    return {
        list(operands).index(places[name]): i
        for i, (name, result) in enumerate(results.items())
        if name in places and result.dtype == operands[places[name]].dtype
    }


def _source(function: Scalar) -> Source:
    file = kernel_source("epilogue.cu")
    text = f'#include "scalar.cuh"\n{function.code()}#line 1 "{file.name}"\n{file.text}'
    return dataclasses.replace(file, text=text)


forward_kernel = Kernel("epilogue_forward", define_forward, {"cuda": forward_on_cuda})
backward_kernel = Kernel("epilogue_backward", define_backward, {"cuda": backward_on_cuda})
KERNELS = (forward_kernel, backward_kernel)
# One for each layout that arrays without a bias have: by how often 2 divides their size.
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def examples(
    n: int, dtype: str, *, rows: int, activations: Sequence[str] | None = None
) -> Iterator[tuple[Kernel, Epilogue, list[jax.ShapeDtypeStruct]]]:
    """Yields every kernel on rows of `n` as dense layers call it: (kernel, spec, operand types)."""
    z = jax.ShapeDtypeStruct((rows, n), jnp.dtype(dtype))
    b = jax.ShapeDtypeStruct((n,), compute_dtype(dtype))
    chosen = SCALARS.values() if activations is None else [SCALARS[name] for name in activations]
    for function in {scalar.name: scalar for scalar in chosen}.values():
        for up, bias in (([], []), ([z], []), ([], [b])):
            flags = {"has_up": bool(up), "has_bias": bool(bias), "axes": (1,) if bias else ()}
            spec = Epilogue(function=function, out_dtype=dtype, **flags)
            yield forward_kernel, spec, [z, *up, *bias]
            for dbias in {False, bool(bias)}:
                for value in (False, True) if not bias else (False,):
                    gradient = replace(spec, with_dbias=dbias, with_value=value)
                    yield backward_kernel, gradient, [z, z, *up, *bias]


# ---------------------------------------------------------------- one device's share


def _flat(spec: Epilogue, array: Array) -> Array:
    """Returns (rows, columns), the columns being `axes`; the array itself without a bias."""
    axes = spec.axes
    if not axes:
        return array
    ndim, count = array.ndim, len(axes)
    last = tuple(range(ndim - count, ndim))
    if axes != last:
        array = jnp.moveaxis(array, axes, last)
    return array.reshape(math.prod(array.shape[: ndim - count]), -1)


def _restored(spec: Epilogue, array: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_flat`."""
    axes = spec.axes
    if not axes:
        return array
    ndim, count = len(shape), len(axes)
    last = tuple(range(ndim - count, ndim))
    others = [n for d, n in enumerate(shape) if d not in axes]
    array = array.reshape(*others, *[shape[d] for d in axes])
    return array if axes == last else jnp.moveaxis(array, last, axes)


def _local(spec: Epilogue) -> Epilogue:
    return replace(spec, axes=(1,) if spec.axes else ())


def _forward_body(
    spec: Epilogue, split: Split, z: Array, *rest: Array, order: Order
) -> list[Array]:
    del split
    if z.size == 0:
        return define_forward(spec, z, *rest)
    large = [_flat(spec, a) for a in (z, *rest[: spec.has_up])]
    bias = [a.reshape(-1) for a in rest[spec.has_up :]]
    (y,) = forward_kernel(_local(spec), *large, *bias, order=order)
    return [_restored(spec, y, z.shape)]


def _backward_body(
    spec: Epilogue, split: Split, dy: Array, z: Array, *rest: Array, order: Order
) -> list[Array]:
    if z.size == 0:
        results = define_backward(spec, dy, z, *rest)
    else:
        large = [_flat(spec, a) for a in (dy, z, *rest[: spec.has_up])]
        bias = [a.reshape(-1) for a in rest[spec.has_up :]]
        results = backward_kernel(_local(spec), *large, *bias, order=order)
        shape = [z.shape[d] for d in spec.axes]
        results = [
            r.reshape(shape) if r.ndim == 1 and spec.axes else _restored(spec, r, z.shape)
            for r in results
        ]
    if spec.with_dbias:  # over exactly the mesh axes that the rows use
        at = 1 + spec.has_up
        results[at] = split.psum(results[at], _rows(spec, len(split.shape)))
    return results


# ---------------------------------------------------------------- sharding


def _operands(spec: Epilogue, ndim: int) -> tuple[tuple[int, ...], ...]:
    z = tuple(range(ndim))
    return (z, *[z] * spec.has_up, *[Loose(spec.axes)] * spec.has_bias)


def _forward_dims(spec: Epilogue, ndim: int) -> Dims:
    return _operands(spec, ndim), (tuple(range(ndim)),)


def _backward_dims(spec: Epilogue, ndim: int) -> Dims:
    z = tuple(range(ndim))
    more = [*[z] * spec.has_up, *[Loose(spec.axes)] * spec.with_dbias, *[z] * spec.with_value]
    return (z, *_operands(spec, ndim)), (z, *more)


def _tangent_dims(spec: Epilogue, ndim: int) -> Dims:
    z = tuple(range(ndim))
    tangents = [dims for dims, moved in zip((z, z, Loose(spec.axes)), spec.moves) if moved]
    return (*_operands(spec, ndim), *tangents), (z,)


def _batched(spec: Epilogue, at: int) -> Epilogue:
    return replace(spec, axes=tuple(a + (a >= at) for a in spec.axes))


# ---------------------------------------------------------------- derivative


def _forward_jvp(primals: Any, tangents: Any, *, spec: Epilogue, order: Order) -> Any:
    (y,) = forward(spec, *primals, order=order)
    moving = [t for t in tangents if type(t) is not ad.Zero]
    if not moving:
        return [y], [ad.Zero(jax.typeof(y).to_tangent_aval())]
    moved = iter(type(t) is not ad.Zero for t in tangents)
    moves = next(moved), spec.has_up and next(moved), spec.has_bias and next(moved)
    return [y], tangent(replace(spec, moves=moves), *primals, *moving, order=order)


def _transpose_tangent(cts: Any, z: Any, *rest: Any, spec: Epilogue, order: Order) -> list[Any]:
    count = spec.has_up + spec.has_bias
    constants, linear = rest[:count], rest[count:]
    nothing = [None] * (1 + count)
    (dy,) = cts
    if type(dy) is ad.Zero:
        return nothing + [None] * len(linear)
    flags = {"with_dbias": spec.moves[2], "moves": (False,) * 3}
    results = backward(replace(spec, **flags), dy, z, *constants, order=order)
    dz, dup, dbias = results[0], results[1] if spec.has_up else None, results[-1]
    wanted: list[Any] = [d for d, moved in zip((dz, dup, dbias), spec.moves) if moved]
    return nothing + [
        d.astype(operand.aval.dtype) if ad.is_undefined_primal(operand) else None
        for d, operand in zip(wanted, linear, strict=True)
    ]


def _transpose_backward(
    cts: Any, dy: Any, z: Any, *constants: Any, spec: Epilogue, order: Order
) -> list[Any]:
    """The gradients are linear in dy; the value does not depend on it."""
    out: list[Any] = [None] * (2 + len(constants))
    cts = iter(cts[: len(cts) - spec.with_value])
    dz = next(cts)
    given = [dz, next(cts) if spec.has_up else None, next(cts) if spec.with_dbias else None]
    given = [None if type(ct) is ad.Zero else ct for ct in given]
    moving = [ct for ct in given if ct is not None]
    if ad.is_undefined_primal(dy) and moving:
        flags = {"with_dbias": False, "with_value": False, "out_dtype": dy.aval.dtype.name}
        moves = tuple(ct is not None for ct in given)
        linear = replace(spec, moves=moves, **flags)
        out[0] = tangent(linear, z, *constants, *moving, order=order)[0]
    return out


# ---------------------------------------------------------------- operations

tangent = Op(
    "epilogue_tangent",
    define_tangent,
    dims=_tangent_dims,
    batched=_batched,
    transpose=_transpose_tangent,
)
backward = Op(
    "epilogue_gradient",
    define_backward,
    dims=_backward_dims,
    body=_backward_body,
    leads=(1,),
    batched=_batched,
    transpose=_transpose_backward,
)
forward = Op(
    "epilogue",
    define_forward,
    dims=_forward_dims,
    body=_forward_body,
    batched=_batched,
    jvp=_forward_jvp,
    backward=backward,
)


# ---------------------------------------------------------------- what layers call


def finish_natively(
    op: str,
    z: Array,
    up: Array | None,
    bias: Array | None,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    *,
    strict: bool,
) -> Array:
    """`activation(z + bias) · up` on kernels, in one pass in each direction.

    Raises:
      NotImplementedError: if there is nothing to do or no kernel knows the activation.
    """
    function = scalar_of(activation)
    if function is None:
        what = "no activation" if activation is None else "an activation that is plain JAX"
        raise NotImplementedError(f"{op}: implementation='native' has no kernel for {what}")
    spec = Epilogue(
        op=op,
        function=function,
        axes=(),
        has_up=up is not None,
        has_bias=bias is not None,
        out_dtype=jnp.dtype(dtype).name,
    )
    operands = [z] if up is None else [z, up]
    if bias is not None:
        operands[0] = z = vary(z, varying_axes(bias))
        dims = tuple(range(z.ndim - bias.ndim, z.ndim))
        operands.append(rounded(match(bias, z, dims), z.dtype))
        spec = replace(spec, axes=dims)
    return forward(spec, *operands, order=native_or_best(strict))[0]


def finish_tangent(
    function: Scalar, z: Array, dz: Array, *dbias: Array, dtype: jax.typing.DTypeLike
) -> Array:
    """Returns the tangent of `function(z + bias)` where z has the bias already.

    Its transpose is one pass for both gradients, on kernels where they serve. Where the bias moves
    `dbias` is its tangent, of z's last dimensions.
    """
    spec = Epilogue(
        function=function,
        axes=(),
        has_bias=bool(dbias),
        out_dtype=jnp.dtype(dtype).name,
        moves=(True, False, bool(dbias)),
    )
    moving = [dz]
    for d in dbias:
        spec = replace(spec, axes=tuple(range(z.ndim - d.ndim, z.ndim)))
        moving.append(match(d.astype(compute_dtype(z.dtype)), z, spec.axes))
    shift = [jnp.zeros_like(d) for d in moving[1:]]
    return tangent(spec, z, *shift, *moving, order=BEST)[0]


def finish(
    y: Array,
    bias: Array | None,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    up: Array | None = None,
) -> Array:
    """`activation(y + bias) · up`: one pass in float32 (or wider), rounded once, to `dtype`.

    The activation's derivative is recomputed from y: nothing of y's size is kept in float32.
    """
    function = resolve(activation)
    if up is not None:
        wide = compute_dtype(dtype)
        gate = lambda y, up: finish(y, bias, activation, wide) * up.astype(wide)
        gated = lambda y, up: gate(y, up).astype(dtype)
        return jax.checkpoint(gated, prevent_cse=False)(y, up)
    if bias is None and function is None:
        return y.astype(dtype)
    compute = dtype if jnp.issubdtype(dtype, jnp.complexfloating) else compute_dtype(dtype)

    def epilogue(y, *bias):
        z = y.astype(compute)
        for b in bias:
            z = z + b.astype(compute)
        if function is None:
            return z.astype(dtype)
        result = function(z)
        if jnp.shape(result) != z.shape:
            raise ValueError(
                f"activation must keep the shape of its input, {z.shape}; {activation!r} returned "
                f"{jnp.shape(result)}"
            )
        return result.astype(dtype)

    if function is not None:
        epilogue = jax.checkpoint(epilogue, prevent_cse=False)
    if bias is None:
        return epilogue(y)
    rows = y.ndim - bias.ndim
    bias = rounded(match(bias, y, range(rows, y.ndim)), y.dtype)
    return epilogue(y, jnp.expand_dims(bias, range(rows)))
