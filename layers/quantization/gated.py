"""FP8 codes of an activation and of its gradients, from raw products, in one pass each.

    h = activation(a) · up          a = a_scale · raw_a, up = up_scale · raw_up
    da = dh · up · activation'(a)   dup = dh · activation(a)

Products leave their scales to these kernels, which multiply as they read. Without `up` it is 1, and
there is no dup. Values are float32 until they are encoded.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ...native.compiler import Source, kernel_source
from ...native.dtypes import CUDA_TYPES
from ...native.implementation import Order, Unsupported
from ...native.kernel import Kernel
from ...native.launch import Target, launch
from ..core.op import Dims, Op, Split, batch_at
from . import kernels
from .definition import define_amax, define_cast
from .kernels import AMAX_THREADS, AmaxLayout, CastLayout, Codes
from .op import as_bytes

if TYPE_CHECKING:  # the layers of `dense` import this module
    from ..dense.epilogue import Scalar

_AMAX_LAYOUT = AmaxLayout(unroll=2)


@dataclasses.dataclass(frozen=True)
class Gated:
    """The static description of a quantized activation, or of its gradients."""

    function: "Scalar"  # the activation
    codes: Codes = Codes()  # results for h and for each gradient
    op: str = "gated_product"  # the function the user called
    # The activation is multiplied by a second array; kernels see that from their operands.
    has_up: bool = True

    @property
    def flags(self) -> dict[str, Any]:
        """Keywords of definitions and bodies."""
        return {"function": self.function, **self.codes.flags}


def gradient_bounds(
    dh: jax.Array, activation: jax.Array, up: jax.Array, slope: float
) -> tuple[jax.Array, jax.Array]:
    """Bounds of |da| and |dup|: max|dh| · max|up| · slope and max|dh| · max|activation(a)|.

    Args:
      dh: max|dh|, dh's scale included.
      activation, up: the other two, found in the forward pass.
      slope: a bound on |activation'| (`SLOPES`).
    """
    return dh * up * jnp.float32(slope), dh * activation


# Bounds on |activation'|, rounded up; squared_relu has none.
SLOPES = {
    "elu": 1.0,
    "gelu": 1.13,
    "gelu_tanh": 1.13,
    "leaky_relu": 1.0,
    "mish": 1.09,
    "quick_gelu": 1.1,
    "relu": 1.0,
    "sigmoid": 0.25,
    "silu": 1.1,
    "softplus": 1.0,
    "hyperbolic_tangent": 1.0,
}


# ---------------------------------------------------------------- definitions


def _scaled(operands) -> list[jax.Array]:
    *raw, scales = operands
    return [array.astype(jnp.float32) * scales[i] for i, array in enumerate(raw)]


def define_h(*operands: jax.Array, function: "Scalar") -> list[jax.Array]:
    """`(raw_a[, raw_up], scales) -> (h, activation(a)[, up])`, float32."""
    a, *up = _scaled(operands)
    value = function(a)
    return [value * up[0], value, up[0]] if up else [value, value]


def define_gradients(*operands: jax.Array, function: "Scalar") -> list[jax.Array]:
    """`(raw_dh, raw_a[, raw_up], scales) -> (da[, dup])`, float32."""
    dh, a, *up = _scaled(operands)
    value, pull = jax.vjp(function, a)
    (da,) = pull(dh * up[0] if up else dh)
    return [da, dh * value] if up else [da]


def _amax_by(amax):
    def maxima(*operands, function, **_):
        h, value, *up = define_h(*operands, function=function)
        return [amax(array)[0] for array in ([h, value, *up] if up else [h])]

    return maxima


def _forward_by(cast):
    def forward(*operands, function, **flags):
        *raw, scales, bounds = operands
        h = define_h(*raw, scales, function=function)[0]
        return list(cast(h, bounds[0], **flags))

    return forward


def _gradient_by(cast):
    def gradient(*operands, function, **flags):
        *raw, scales, bounds = operands
        found = define_gradients(*raw, scales, function=function)
        return [r for d, bound in zip(found, bounds, strict=True) for r in cast(d, bound, **flags)]

    return gradient


# ---------------------------------------------------------------- kernels


def layout(target: Target, *, gradient: bool, has_up: bool) -> CastLayout:
    """The layout with the best number of rows loaded together, measured on an H200."""
    if gradient and has_up:
        if target.capability == 90:
            return CastLayout(batch=4, min_blocks=3, group=2)
        return CastLayout(batch=2, min_blocks=4)
    return CastLayout(batch=4, min_blocks=4, group=4)


@functools.cache
def _source(name: str, function: "Scalar") -> Source:
    file = kernel_source(name)
    text = f'#include "scalar.cuh"\n{function.code()}#line 1 "{file.name}"\n{file.text}'
    return dataclasses.replace(file, text=text)


def _macros(x: jax.Array, has_up: bool) -> dict[str, str | int]:
    return {
        "X_TYPE": CUDA_TYPES[x.dtype.name],
        "HAS_UP": int(has_up),
        "APPROXIMATE": int(x.dtype.itemsize == 2),
    }


def cuda_amax(target: Target, *operands: jax.Array, function: "Scalar", **_) -> list[jax.Array]:
    """`define_maxima` on a GPU."""
    *raw, scales = operands
    size, has_up = raw[0].size, len(raw) == 2
    blocks = _AMAX_LAYOUT.blocks(size, raw[0].dtype.itemsize, target)
    (maxima,) = launch(
        _source("quantize_gated_amax.cu", function),
        "quantize_gated_amax",
        operands,
        [jax.ShapeDtypeStruct((3 if has_up else 1, blocks), jnp.float32)],
        target=target,
        macros=_macros(raw[0], has_up) | {"THREADS": AMAX_THREADS, "UNROLL": _AMAX_LAYOUT.unroll},
        grid=blocks,
        block=AMAX_THREADS,
        ints=(size,),
    )
    largest = jnp.max(maxima, axis=1, keepdims=True)
    return [largest[i] for i in range(3 if has_up else 1)]


def _cuda(gradient: bool, target: Target, *operands: jax.Array, function: "Scalar", **flags):
    if gradient and not function.derivative:
        raise Unsupported(f"the activation {function.name} has no derivative in C++")
    *raw, scales, bounds = operands
    has_up = len(raw) == 2 + gradient
    if raw[0].size == 0:
        return (define_gradient if gradient else define_forward)(
            *operands, function=function, **flags
        )
    chosen = layout(target, gradient=gradient, has_up=has_up)
    rows, columns = raw[0].shape
    results = kernels.code_types(rows, columns, **flags) * bounds.shape[0]
    macros = _macros(raw[0], has_up) | kernels.tile_macros(chosen, rows, columns, **flags)
    return launch(
        _source("quantize_gated.cu", function),
        "quantize_gated",
        operands,
        results,
        target=target,
        macros=macros | {"GRADIENT": int(gradient)},
        grid=chosen.blocks(rows, columns),
        block=chosen.width * chosen.height,
        shared=chosen.shared * bounds.shape[0] if flags["has_qt"] else 0,
        ints=(rows, columns, bounds.shape[1], chosen.group, chosen.backwards),
    )


cuda_forward = functools.partial(_cuda, False)
cuda_gradient = functools.partial(_cuda, True)
define_forward, define_gradient = _forward_by(define_cast), _gradient_by(define_cast)


define_maxima = _amax_by(define_amax)
amax_kernel = kernels.by_flags(
    "quantize_gated_amax", define_maxima, _amax_by(kernels.cpu_amax), cuda_amax
)
forward_kernel = kernels.by_flags(
    "quantize_gated", define_forward, _forward_by(kernels.cpu_cast), cuda_forward
)
gradient_kernel = kernels.by_flags(
    "quantize_gated_gradient", define_gradient, _gradient_by(kernels.cpu_cast), cuda_gradient
)


def examples(
    n: int, dtype: str, *, rows: int, function: "Scalar"
) -> Iterator[tuple[Kernel, Gated, list[jax.ShapeDtypeStruct]]]:
    """Yields the kernels as layers call them, of rows of `n`: (kernel, spec, operand types)."""
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    a, spec = jax.ShapeDtypeStruct((rows, n), dtype), Gated(function)
    yield amax_kernel, spec, [a, a, struct(2)]
    yield forward_kernel, spec, [a, a, struct(2), struct(1, 1)]
    yield gradient_kernel, spec, [a, a, a, struct(3), struct(2, 1)]


# ---------------------------------------------------------------- operations on global arrays


class Hidden(NamedTuple):
    """The codes of h = activation(a) · up, and the maxima that its gradients' bounds need."""

    q: jax.Array  # uint8, of a's shape
    qt: jax.Array  # the same with the last dimension first
    scale: jax.Array  # (), float32, a power of two
    activation: jax.Array  # the largest finite |activation(a)|, () float32
    up: jax.Array  # the largest finite |up|, likewise; 1 without one


def _matrices(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [a.reshape(-1, a.shape[-1]) for a in arrays]


def _codes_of(codes: Sequence[jax.Array], like: jax.Array) -> list[jax.Array]:
    """`(q, qt, scale)` of a matrix, reshaped for an array of like's shape."""
    q, qt, scale = codes
    *rows, columns = like.shape
    codes = [as_bytes(q.reshape(like.shape)), as_bytes(qt.reshape(columns, *rows))]
    return [*codes, scale.reshape(())]


def _scales(count: int) -> jax.Array:
    return jnp.ones(count, jnp.float32)  # the arrays of layers carry their scales already


def _define_hidden(spec: Gated, *arrays: jax.Array) -> list[jax.Array]:
    matrices, scales = _matrices(arrays), _scales(len(arrays))
    h, *rest = define_maxima(*matrices, scales, function=spec.function)
    codes = define_forward(*matrices, scales, h[None], **spec.flags)
    return [*_codes_of(codes, arrays[0]), *_maxima(h, rest)]


def _hidden(spec: Gated, split: Split, *arrays: jax.Array, order: Order) -> list[jax.Array]:
    if arrays[0].size == 0:
        return _define_hidden(spec, *arrays)
    matrices, scales = _matrices(arrays), _scales(len(arrays))
    found = amax_kernel(spec, *matrices, scales, order=order)
    h, *rest = [split.pmax(maximum, range(arrays[0].ndim)) for maximum in found]
    codes = forward_kernel(spec, *matrices, scales, h[None], order=order)
    return [*_codes_of(codes, arrays[0]), *_maxima(h, rest)]


def _maxima(h: jax.Array, rest: Sequence[jax.Array]) -> list[jax.Array]:
    value, up = rest or (h, jnp.ones_like(h))
    return [value.reshape(()), up.reshape(())]


def _hidden_dims(spec: Gated, ndim: int) -> Dims:
    *rows, last = every = tuple(range(ndim))
    return (every,) * (1 + spec.has_up), (every, (last, *rows), (), (), ())


def _define_hidden_gradients(spec: Gated, dh: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    return _gradients_by(spec, define_gradient, *define_amax(dh), dh, *rest)


def _hidden_gradients(
    spec: Gated, split: Split, dh: jax.Array, *rest: jax.Array, order: Order
) -> list[jax.Array]:
    if dh.size == 0:
        return _define_hidden_gradients(spec, dh, *rest)
    (maximum,) = kernels.amax(spec.codes, _matrices([dh])[0], order=order)
    maximum = split.pmax(maximum, range(dh.ndim))
    kernel = lambda *operands, **flags: gradient_kernel(spec, *operands, order=order)
    return _gradients_by(spec, kernel, maximum, dh, *rest)


def _gradients_by(spec: Gated, kernel, maximum, dh, *rest) -> list[jax.Array]:
    *arrays, activation, up = rest
    matrices, scales = _matrices([dh, *arrays]), _scales(1 + len(arrays))
    slope = SLOPES[spec.function.name]
    bounds = gradient_bounds(maximum, activation.reshape(1), up.reshape(1), slope)[: len(arrays)]
    results = kernel(*matrices, scales, jnp.stack(bounds), **spec.flags)
    triples = [results[i : i + 3] for i in range(0, len(results), 3)]
    return [r for triple in triples for r in _codes_of(triple, dh)]


def _gradient_dims(spec: Gated, ndim: int) -> Dims:
    *rows, last = every = tuple(range(ndim))
    count = 1 + spec.has_up
    return (*[every] * (1 + count), (), ()), (every, (last, *rows), ()) * count


def _batch_rows(op: Op, args: Any, dims: Any, *, spec: Gated, order: Order) -> Any:
    """A batch dimension becomes one of rows: all its examples share a scale."""
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    if any(d is not None and a.ndim == 1 for a, d in zip(args, dims)):  # each has its maxima
        results = jax.vmap(functools.partial(op.plain, spec), tuple(dims))(*args)
        return results, [0] * len(results)
    moved = [batch_at(a, d, 0, size) if a.ndim else a for a, d in zip(args, dims)]
    assert op.dims is not None
    _, outputs = op.dims(spec, moved[0].ndim)
    return op(spec, *moved, order=order), [out.index(0) if out else None for out in outputs]


hidden_gradients = Op(
    "quantize_hidden_gradients",
    _define_hidden_gradients,
    dims=_gradient_dims,
    body=_hidden_gradients,
    batch=_batch_rows,
    jvp=kernels.no_second_derivative,
)
"""`(dh, a[, up], activation, up) -> (q, qt, scale)` of da and, with `up`, of dup.

The last two operands are the maxima that `hidden` returned.
"""
hidden = Op(
    "quantize_hidden",
    _define_hidden,
    dims=_hidden_dims,
    body=_hidden,
    batch=_batch_rows,
    jvp=kernels.no_second_derivative,
    backward=hidden_gradients,
)
"""`(a[, up]) -> Hidden`, its codes with the largest |h| of all devices as the bound."""
