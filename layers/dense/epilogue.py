"""The epilogue of a dense layer's product: bias, activation and gate, with derivatives.

    y = activation(z + bias) · up

`up` is the second product of a gated layer; it has all dimensions of z, the bias its last ones. On
CUDA the forward is one pass, and so are all gradients together; on CPUs and elsewhere both are
plain JAX, which XLA fuses into one loop itself. Forward mode and higher orders are plain HLO.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from .matmul import equally_varying

# ---------------------------------------------------------------- activations

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A function of one number, and its derivative, in plain JAX and as source text for kernels."""

    # The C++ function's name, other than those of CUDA's functions (`tanh`), which `source` could
    # not call then.
    name: str
    # The definition, `template <typename T> __device__ T name(T x, T parameter, ...)`, for T float
    # and double. It may call CUDA's math functions and those of `kernels/scalar.cuh`.
    source: str
    derivative: str  # likewise `name_derivative`; "" for none, and so no backward kernel
    # The definition in JAX, which forward mode and higher orders differentiate.
    function: Callable[..., Array] = dataclasses.field(repr=False)
    parameters: tuple[tuple[str, float], ...] = ()  # (name, value) of the constants that follow x

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"Scalar: name must be a C++ identifier, got {self.name!r}")

    def __call__(self, x: Array) -> Array:
        """The function in plain JAX."""
        return self.function(x)

    def code(self, alias: str = "activation") -> str:
        """Returns C++ text of `alias(x)` and, with a derivative, of `alias_derivative(x)`."""
        values = ", ".join(["x", *(f"T({value!r})" for _, value in self.parameters)])
        parts = []
        for end, text in {"": self.source, "_derivative": self.derivative}.items():
            if text:
                call = f"return {self.name}{end}({values});"
                head = f"template <typename T>\n__device__ inline T {alias}{end}(T x)"
                parts += [text.strip(), f"{head} {{ {call} }}"]
        return "\n".join(parts) + "\n"


def _text(name: str, body: str, takes: Iterable[str]) -> str:
    """Returns C++ of a function, given its body or the expression that it returns."""
    body = body if "return" in body else f"return {body};"
    given = ", ".join(f"T {parameter}" for parameter in takes)
    return f"template <typename T>\n__device__ inline T {name}({given}) {{\n  {body}\n}}"


def _scalar(name: str, function, value: str, derivative: str, **parameters: float) -> Scalar:
    """Returns a Scalar from two function bodies, or the expressions that they return."""
    takes = ["x", *parameters]
    sources = _text(name, value, takes), _text(f"{name}_derivative", derivative, takes)
    return Scalar(name, *sources, function, tuple(parameters.items()))


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


_SWISH = "sigmoid_of(k * x) + k * x * sigmoid_slope(k * x)"  # derivative of x · sigmoid(k x)
# gelu_tanh(x) = x · sigmoid(2u), u = √(2/π) (x + 0.044715 x³): fewer operations than tanh takes.
_TWO_U = "const T u = T(1.5957691216057308) * (x + T(0.044715) * x * x * x);"

SCALARS: dict[str, Scalar] = {
    scalar.name: scalar
    for scalar in (
        _scalar("elu", jax.nn.elu, "x > T(0) ? x : T(expm1(x))", "x > T(0) ? T(1) : T(exp(x))"),
        _scalar(
            "gelu",
            gelu,
            "T(0.5) * x * T(erfc(T(-0.70710678118654752) * x))",
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
            "x >= T(0) ? x : slope * x",
            "x >= T(0) ? T(1) : slope",
            slope=0.01,
        ),
        _scalar(
            "mish",
            jax.nn.mish,
            "x * T(tanh(softplus_of(x)))",
            "const T t = T(tanh(softplus_of(x)));\n"
            "  return t + x * (T(1) - t * t) * sigmoid_of(x);",
        ),
        _scalar("quick_gelu", quick_gelu, "x * sigmoid_of(k * x)", _SWISH, k=1.702),
        _scalar("relu", jax.nn.relu, "x > T(0) ? x : T(0)", "x > T(0) ? T(1) : T(0)"),
        _scalar("sigmoid", jax.nn.sigmoid, "sigmoid_of(x)", "sigmoid_slope(x)"),
        _scalar("silu", jax.nn.silu, "x * sigmoid_of(k * x)", _SWISH, k=1.0),
        _scalar("softplus", jax.nn.softplus, "softplus_of(x)", "sigmoid_of(x)"),
        _scalar(
            "squared_relu", squared_relu, "x > T(0) ? x * x : T(0)", "x > T(0) ? T(2) * x : T(0)"
        ),
        _scalar(
            "hyperbolic_tangent",
            jnp.tanh,
            "T(tanh(x))",
            "const T t = T(tanh(x)); return T(1) - t * t;",
        ),
    )
}
"""The activations that kernels know, by name. "gelu" is the exact one."""
SCALARS["swish"] = SCALARS["silu"]
SCALARS["tanh"] = SCALARS.pop("hyperbolic_tangent")


Activation = str | Callable[..., Array] | None


"""The functions of gate and up that kernels know, by name."""


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    name: scalar.function for name, scalar in sorted(SCALARS.items())
}
"""By name. "gelu" is the exact one, of the error function; "gelu_tanh" its usual approximation."""


def resolve(activation: Activation, op: str = "") -> Callable[[Array], Array] | None:
    """Returns the function that `activation` names or is; None for none. Errors name `op`.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything but None, a name or a callable.
    """
    prefix = op and f"{op}: "
    if activation is not None and not callable(activation) and not isinstance(activation, str):
        raise TypeError(
            f"{prefix}activation must be None, a name or a function, got "
            f"{type(activation).__name__}"
        )
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(
            f"{prefix}activation must be one of {names}, or a function, got {activation!r}"
        )
    return ACTIVATIONS[activation] if isinstance(activation, str) else activation


def scalar_of(activation: Activation) -> Scalar | None:
    """Returns the `Scalar` of `activation`; None for a function that is plain JAX alone.

    A function that comes with its C++ has it as an attribute `scalar`.
    """
    if isinstance(activation, str):
        return SCALARS[activation]
    return activation if isinstance(activation, Scalar) else getattr(activation, "scalar", None)


# ---------------------------------------------------------------- the epilogue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The static description of an epilogue, or of a derivative of it."""

    op: str = "dense"  # the function the user called
    function: Scalar  # the activation
    axes: tuple[int, ...] = (1,)  # the bias's dimensions of z; kernels see (rows, columns)
    has_up: bool = False
    has_bias: bool = False
    out_dtype: str = ""  # y's dtype
    with_dbias: bool = False  # a backward also returns the bias's gradient,
    with_value: bool = False  # and y once more
    moves: tuple[bool, bool, bool] = (False, False, False)  # have z, up, bias a tangent?


# ---------------------------------------------------------------- definitions, in plain JAX


def _inputs(spec: Epilogue, operands: Any, dtype: jnp.dtype) -> list[Array]:
    """`[z + bias]` or `[z + bias, up]`, in `dtype`."""
    z, *rest = [a.astype(dtype) for a in operands]
    bias = jnp.zeros((), dtype)
    if spec.has_bias:
        bias = jnp.expand_dims(rest[-1], _rows(spec, z.ndim))
    return [z + bias, *rest[: spec.has_up]]


def _value(spec: Epilogue) -> Callable[..., Array]:
    """Returns y of `_inputs`."""
    function = spec.function
    return (lambda x, up: function(x) * up) if spec.has_up else function


def _rows(spec: Epilogue, ndim: int) -> list[int]:
    return [d for d in range(ndim) if d not in spec.axes]


def define_forward(spec: Epilogue, *operands: Array) -> list[Array]:
    """`(z[, up][, bias]) -> (y,)`."""
    dtype = compute_dtype(*(a.dtype for a in operands), spec.out_dtype)
    return [_value(spec)(*_inputs(spec, operands, dtype)).astype(spec.out_dtype)]


def define_backward(spec: Epilogue, dy: Array, *operands: Array) -> list[Array]:
    """`(dy, z[, up][, bias]) -> (dz[, dup][, dbias][, value])`; value is y, in dy's dtype."""
    dtype = compute_dtype(dy.dtype, *(a.dtype for a in operands))
    y, pull = jax.vjp(_value(spec), *_inputs(spec, operands, dtype))
    gradients = pull(dy.astype(dtype))
    results = [d.astype(a.dtype) for d, a in zip(gradients, operands)]
    if spec.with_dbias:
        results.append(jnp.sum(gradients[0], _rows(spec, dy.ndim)))
    if spec.with_value:
        results.append(y.astype(dy.dtype))
    return results


def define_tangent(spec: Epilogue, *operands: Array) -> list[Array]:
    """`(z[, up][, bias][, dz][, dup][, dbias]) -> (dy,)`."""
    z, count = operands[0], 1 + spec.has_up + spec.has_bias
    dtype = compute_dtype(*(a.dtype for a in operands[:count]), spec.out_dtype)
    given = iter(operands[count:])
    dz, dup, dbias = (next(given).astype(dtype) if moved else None for moved in spec.moves)
    shift = jnp.zeros(z.shape, dtype) if dz is None else dz
    if dbias is not None:
        shift = shift + jnp.expand_dims(dbias, _rows(spec, z.ndim))
    at, moving = _inputs(spec, operands[:count], dtype), [shift, *[dup] * (dup is not None)]
    fixed = at[len(moving) :]
    moved = lambda *moving: _value(spec)(*moving, *fixed)
    _, dy = jax.jvp(moved, at[: len(moving)], moving)
    return [dy.astype(spec.out_dtype)]


# ---------------------------------------------------------------- kernels, on (rows, columns)
# or on arrays of any shape where there is no bias. The activation's text becomes part of the
# kernel's.


_MAX_GRID_Y = 65535


@dataclasses.dataclass(frozen=True)
class Layout:
    """How threads share an array, seen as (rows, columns)."""

    rows: int
    columns: int
    vector: int  # elements that move together; divides `columns`
    width: int  # threads of a block along columns, each with a vector,
    height: int  # and along rows
    grid_y: int  # blocks along the rows, which they go through with a stride
    unroll: int  # rows of a thread whose loads overlap
    min_blocks: int  # blocks that a multiprocessor's registers must be enough for

    @property
    def tiles(self) -> int:
        """Blocks along the columns."""
        return -(-self.columns // (self.width * self.vector))


def flat_layout(size: int, itemsize: int, kernel: str, arrays: int) -> Layout:
    """Without a bias an array has no columns: it is a row, or several that a thread takes together.

    Their number, and that of threads to a multiprocessor, are from measurements on an H200.
    `itemsize` is the widest element's; the "forward" or "backward" reads and writes `arrays`.
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
    return _launch(target, "forward", spec, operands, results)


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
    return _launch(target, "backward", spec, operands, results)


def _launch(
    target: Target, kernel: str, spec: Epilogue, operands: dict[str, Any], results: dict[str, Any]
) -> list[Array]:
    dtypes = [a.dtype for a in (*operands.values(), *filter(None, results.values()))]
    compute = cuda_compute_dtype(dtypes)
    itemsize = max(d.itemsize for d in dtypes)
    if "BIAS" in operands:
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
        "HAS_UP": int("UP_TYPE" in macros),
        "HAS_BIAS": int("BIAS" in operands),
        "WITH_DBIAS": int("PARTIAL" in results),
        "WITH_VALUE": int("VALUE" in results),
        "VECTOR": layout.vector,
        "BLOCK_X": layout.width,
        "BLOCK_Y": layout.height,
        "UNROLL": layout.unroll,
        "MIN_BLOCKS": layout.min_blocks,
    }
    places = {"DZ": "Z", "DUP": "UP", "VALUE": "DY"}
    # The rows of a block add their bias gradients in shared memory.
    shared = layout.width * layout.height * layout.vector * compute.itemsize
    done = launch(
        _source(spec.function),
        f"epilogue_{kernel}",
        list(operands.values()),
        list(results.values()),
        target=target,
        grid=(layout.tiles, layout.grid_y),
        block=layout.width * layout.height,
        macros=macros,
        shared=shared if "PARTIAL" in results else 0,
        ints=(layout.rows, layout.columns),
        aliases={  # each gradient overwrites its array, which is no longer read
            list(operands).index(places[name]): i
            for i, (name, result) in enumerate(results.items())
            if name in places and result.dtype == operands[places[name]].dtype
        },
    )
    named = dict(zip(results, done, strict=True))
    if "PARTIAL" in named:
        named["PARTIAL"] = column_sum(launch, target, named["PARTIAL"])
    return list(named.values())


def _source(function: Scalar) -> Source:
    file = kernel_source("epilogue.cu")
    text = f'#include "scalar.cuh"\n{function.code()}#line 1 "{file.name}"\n{file.text}'
    return dataclasses.replace(file, text=text)


forward_kernel = Kernel("epilogue_forward", define_forward, {"cuda": forward_on_cuda})
backward_kernel = Kernel("epilogue_backward", define_backward, {"cuda": backward_on_cuda})


def examples(
    n: int, dtype: str, *, rows: int, activations: Sequence[str] | None = None
) -> Iterator[tuple[Kernel, Epilogue, list[jax.ShapeDtypeStruct]]]:
    """Yields every kernel on rows of `n` as dense layers call it: (kernel, spec, operand types)."""
    z = jax.ShapeDtypeStruct((rows, n), jnp.dtype(dtype))
    b = jax.ShapeDtypeStruct((n,), compute_dtype(dtype))
    chosen = map(scalar_of, SCALARS if activations is None else activations)
    for function in {scalar.name: scalar for scalar in chosen if scalar}.values():
        for up, bias in (([], []), ([z], []), ([], [b])):
            flags = {"has_up": bool(up), "has_bias": bool(bias), "axes": (1,) if bias else ()}
            spec = Epilogue(function=function, out_dtype=dtype, **flags)
            yield forward_kernel, spec, [z, *up, *bias]
            for dbias in {False, bool(bias)}:
                for value in (False, True) if not bias else (False,):
                    gradient = replace(spec, with_dbias=dbias, with_value=value)
                    yield backward_kernel, gradient, [z, z, *up, *bias]


# ---------------------------------------------------------------- one device's share


def _flattened(spec: Epilogue, large: Sequence[Array], rest: Sequence[Array]) -> list[Any]:
    """Returns the spec and operands of a kernel: (rows, columns), the columns being `axes`.

    Without a bias arrays stay as they are.
    """
    large, bias = [*large, *rest[: spec.has_up]], rest[spec.has_up :]
    if not spec.axes:
        return [spec, *large]
    last = range(large[0].ndim - len(spec.axes), large[0].ndim)
    moved = [jnp.moveaxis(a, spec.axes, last) for a in large]
    flat = [a.reshape(math.prod(a.shape[: last.start]), -1) for a in moved]
    return [replace(spec, axes=(1,)), *flat, *[b.reshape(-1) for b in bias]]


def _restored(spec: Epilogue, array: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_flattened`, for an array as large as z."""
    if not spec.axes:
        return array
    others = [n for d, n in enumerate(shape) if d not in spec.axes]
    array = array.reshape(*others, *[shape[d] for d in spec.axes])
    return jnp.moveaxis(array, range(len(others), len(shape)), spec.axes)


def _forward_body(
    spec: Epilogue, split: Split, z: Array, *rest: Array, order: Order
) -> list[Array]:
    del split
    if z.size == 0:
        return define_forward(spec, z, *rest)
    (y,) = forward_kernel(*_flattened(spec, [z], rest), order=order)
    return [_restored(spec, y, z.shape)]


def _backward_body(
    spec: Epilogue, split: Split, dy: Array, z: Array, *rest: Array, order: Order
) -> list[Array]:
    if z.size == 0:
        results = define_backward(spec, dy, z, *rest)
    else:
        results = backward_kernel(*_flattened(spec, [dy, z], rest), order=order)
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


# ---------------------------------------------------------------- functions for layers


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
    operands = [z] if up is None else _alike(z, up)
    if bias is not None:
        operands[0] = z = vary(z, varying_axes(bias))
        dims = tuple(range(z.ndim - bias.ndim, z.ndim))
        operands.append(rounded(match(bias, z, dims), z.dtype))
        spec = replace(spec, axes=dims)
    return forward(spec, *operands, order=native_or_best(strict))[0]


def _alike(z: Array, up: Array) -> list[Array]:
    """Returns both with one type: they may vary, or be split, over different axes of a mesh."""
    z, up = equally_varying(z, up)
    is_split = lambda a: any(jax.typeof(a).sharding.spec)
    dims = range(z.ndim)
    return [match(z, up, dims), up] if is_split(up) and not is_split(z) else [z, match(up, z, dims)]


def finish_tangent(
    function: Scalar, z: Array, dz: Array, *dbias: Array, dtype: jax.typing.DTypeLike
) -> Array:
    """Returns the tangent of `function(z + bias)` where z has the bias already.

    Its transpose is one pass for both gradients, on kernels where they serve. `dbias` is the bias's
    tangent, of z's last dimensions, if it has one.
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
    if up is not None:
        wide = compute_dtype(dtype)
        gate = lambda y, up: finish(y, bias, activation, wide) * up.astype(wide)
        gated = lambda y, up: gate(y, up).astype(dtype)
        return jax.checkpoint(gated, prevent_cse=False)(y, up)
    function = resolve(activation)
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
