"""FP8 codes of an activation and of its gradients, from products, in one pass each.

    h = activation(a) · up
    da = dh · up · activation'(a)   dup = dh · activation(a)

The forward reads a and up and writes codes of h, a and up. The backward reads dh and the codes of a
and up: from these it computes h again, whose transpose it writes with da and dup. Without `up` it
is 1, and there is no dup. Values are float32 until they are encoded.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...native.dtypes import CUDA_TYPES
from ...native.implementation import Order
from ...native.kernel import Body, Kernel
from ...native.launch import Target, launch
from ..core.activations import Scalar, with_activation
from ..core.op import Batching, Derivative, Dims, Op, Placement, Split, batch_at
from .quantize import (
    E4M3,
    CastLayout,
    Codes,
    as_bytes,
    code_types,
    cpu_amax,
    cpu_cast,
    decoded,
    define_amax,
    define_cast,
    launch_amax,
    no_second_derivative,
    scale_of,
    tile_macros,
)
from .quantize import amax_kernel as matrix_amax_kernel


@dataclasses.dataclass(frozen=True)
class Gated:
    """The static description of a quantized activation, or of its gradients."""

    function: Scalar  # the activation
    op: str = "gated_product"  # the function the user called
    # The activation is multiplied by a second array; kernels see that from their operands.
    has_up: bool = True


def gradient_bounds(
    dh: jax.Array, activation: jax.Array, up: jax.Array, slope: float
) -> tuple[jax.Array, jax.Array]:
    """Bounds of |da| and |dup|: max|dh| · max|up| · slope and max|dh| · max|activation(a)|.

    Args:
      dh: max|dh|.
      activation, up: the other two, of what codes say: `limit`.
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


def limit(maximum: jax.Array, scale: jax.Array, slope: float = 1.0) -> jax.Array:
    """A bound of |f| of what e4m3 codes say, whose arguments have `maximum` for their largest |f|.

    A code is off by at most half the distance between the largest ones, 16 times their scale.
    """
    return maximum + jnp.float32(16 * slope) * scale


# ---------------------------------------------------------------- definitions

_BOTH, _AS_IT_LIES, _TRANSPOSED = Codes(), Codes(has_qt=False), Codes(has_q=False)


def define_h(spec: Gated, *arrays: jax.Array) -> list[jax.Array]:
    """`(a[, up]) -> (h, activation(a))`, float32."""
    a, *up = [array.astype(jnp.float32) for array in arrays]
    value = spec.function(a)
    return [value * up[0] if up else value, value]


def define_gradients(spec: Gated, dh: jax.Array, a: jax.Array, *up: jax.Array) -> list[jax.Array]:
    """`(dh, a[, up]) -> (da[, dup])`, float32."""
    dh, *arrays = [array.astype(jnp.float32) for array in (dh, a, *up)]
    value, pull = jax.vjp(spec.function, arrays[0])
    (da,) = pull(dh * arrays[1] if up else dh)
    return [da, dh * value] if up else [da]


def _meant(codes: Sequence[jax.Array], scales: Iterable[jax.Array]) -> list[jax.Array]:
    return [decoded(q).astype(jnp.float32) * scale for q, scale in zip(codes, scales, strict=True)]


def _again(cast: Body, spec: Gated, *arrays: jax.Array, bound: jax.Array) -> list[jax.Array]:
    """`(qt, scale)` of h, computed again from what codes say, with the bound of the first h.

    Beyond the largest code's number it is that number: h was not larger, so that is closer.
    """
    h = define_h(spec, *arrays)[0]
    largest = (E4M3.largest * scale_of(bound, E4M3)).reshape(())
    h = jnp.where(jnp.abs(h) < jnp.inf, jnp.clip(h, -largest, largest), h)
    return list(cast(_TRANSPOSED, h, bound))


def _maxima(amax: Body, spec: Gated, *arrays: jax.Array) -> list[jax.Array]:
    h, value = define_h(spec, *arrays)
    return [amax(_BOTH, array)[0] for array in (h, *arrays, *[value] * (len(arrays) > 1))]


def _forward(cast: Body, spec: Gated, *operands: jax.Array) -> list[jax.Array]:
    *arrays, bounds = operands
    every = define_h(spec, *arrays)[0], *arrays
    pairs = [cast(_AS_IT_LIES, x, bounds[i : i + 1]) for i, x in enumerate(every)]
    return [r for pair in pairs for r in pair]


def _gradient(cast: Body, spec: Gated, *operands: jax.Array) -> list[jax.Array]:
    dh, *codes, scales, bounds = operands
    arrays = _meant(codes, scales)
    gradients = define_gradients(spec, dh, *arrays)
    triples = [cast(_BOTH, d, bounds[i : i + 1]) for i, d in enumerate(gradients)]
    last = _again(cast, spec, *arrays, bound=bounds[-1:])
    return [r for results in (*triples, last) for r in results]


# ---------------------------------------------------------------- kernels


def layout(target: Target, *, gradient: bool, has_up: bool) -> CastLayout:
    """The layout that was the fastest: forward on an H100, backward on an H200."""
    if gradient and has_up:
        if target.capability == 90:
            return CastLayout(batch=4, min_blocks=3, group=2)
        return CastLayout(batch=2, min_blocks=4)
    if gradient:
        return CastLayout(batch=4, min_blocks=4, group=4)
    return CastLayout(width=32, batch=2, min_blocks=2, group=1)


def _macros(x: jax.Array, has_up: bool) -> dict[str, str | int]:
    return {
        "X_TYPE": CUDA_TYPES[x.dtype.name],
        "HAS_UP": int(has_up),
        "APPROXIMATE": int(x.dtype.itemsize == 2),
    }


def cuda_amax(target: Target, spec: Gated, *arrays: jax.Array) -> list[jax.Array]:
    source, count = with_activation("quantize_gated_amax.cu", spec.function), 2 * len(arrays)
    kernel, macros = (source, "quantize_gated_amax"), _macros(arrays[0], len(arrays) > 1)
    maxima = launch_amax(target, *kernel, arrays, macros, count=(count,), unroll=2)
    largest = jnp.max(maxima, axis=1, keepdims=True)
    return [largest[i] for i in range(count)]


def _cuda(gradient: bool, target: Target, spec: Gated, *operands: jax.Array) -> list[jax.Array]:
    # One array holds all numbers: a kernel makes them.
    arrays, numbers = operands[: -1 - gradient], jnp.concatenate(operands[-1 - gradient :])
    wide, has_up = arrays[0], len(arrays) == 2 + gradient
    chosen = layout(target, gradient=gradient, has_up=has_up)
    rows, columns = wide.shape
    results = code_types(_BOTH if gradient else _AS_IT_LIES, rows, columns)
    results *= 2 - gradient + has_up
    results += code_types(_TRANSPOSED, rows, columns) if gradient else []
    macros = _macros(wide, has_up) | {"GRADIENT": int(gradient)}
    return launch(
        with_activation("quantize_gated.cu", spec.function),
        "quantize_gated",
        [*arrays, numbers],
        results,
        target=target,
        macros=macros | tile_macros(chosen, _BOTH, rows, columns),
        grid=chosen.blocks(rows, columns),
        block=chosen.width * chosen.height,
        shared=chosen.shared * (2 + has_up) if gradient else 0,
        ints=(rows, columns, chosen.group),
    )


cuda_forward = functools.partial(_cuda, False)
cuda_gradient = functools.partial(_cuda, True)


def _kernel(name: str, body: Body, define: Body, cpu: Body, cuda: Body) -> Kernel:
    """Returns a kernel that is a body by the matrices' kernels, but for CUDA."""
    by = functools.partial
    return Kernel(name, by(body, define), {"cpu": by(body, cpu), "cuda": cuda})


amax_kernel = _kernel(
    "quantize_gated_amax", _maxima, lambda codes, x: define_amax(x), cpu_amax, cuda_amax
)
"""`(a[, up]) -> (h, a[, up, activation(a)])`, the maximum of each."""
forward_kernel = _kernel("quantize_gated", _forward, define_cast, cpu_cast, cuda_forward)
"""`(a[, up], bounds) -> (q, scale)` of h, a and up, each with its own of the first bounds."""
gradient_kernel = _kernel(
    "quantize_gated_gradient", _gradient, define_cast, cpu_cast, cuda_gradient
)
"""`(dh, a[, up], scales, bounds) -> (q, qt, scale)` of da and dup, and `(qt, scale)` of h.

a and up are bytes with these scales; the bounds are of da, dup and h.
"""


# ---------------------------------------------------------------- operations on global arrays


def _matrices(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [a.reshape(-1, a.shape[-1]) for a in arrays]


def _results(spec: Gated, *, gradient: bool) -> tuple[str, ...]:
    """Names a kernel's results: codes as they lie, transposed codes, scales."""
    count = 1 + spec.has_up
    if gradient:
        return ("q", "qt", "scale") * count + ("qt", "scale")
    return ("q", "scale") * (1 + count)


def _restored(results: Sequence[jax.Array], names: Sequence[str], like: Any) -> list[jax.Array]:
    """Results for matrices, as they are for arrays of like's shape."""
    *rows, columns = like.shape
    shapes = {"q": like.shape, "qt": (columns, *rows), "scale": ()}
    shaped = [r.reshape(shapes[name]) for r, name in zip(results, names, strict=True)]
    return [r if name == "scale" else as_bytes(r) for r, name in zip(shaped, names)]


def _dims(names: Sequence[str], ndim: int) -> list[tuple[int, ...]]:
    *rows, last = every = tuple(range(ndim))
    return [{"q": every, "qt": (last, *rows), "scale": ()}[name] for name in names]


def _hidden(spec: Gated, split: Split, *arrays: jax.Array, order: Order) -> list[jax.Array]:
    own = amax_kernel(spec, *_matrices(arrays), order=order)
    maxima = [split.pmax(maximum, range(arrays[0].ndim)) for maximum in own]
    h, *of_arrays = maxima[: 2 + spec.has_up]
    results = forward_kernel(spec, *_matrices(arrays), jnp.concatenate(maxima), order=order)
    results = _restored(results, _results(spec, gradient=False), arrays[0])
    scales, value = results[3::2], maxima[-1] if spec.has_up else h
    limits = [limit(value, scales[0], SLOPES[spec.function.name])]
    limits += [limit(of_arrays[1], scales[1]) if spec.has_up else jnp.ones_like(h)]
    return [*results, *(bound.reshape(()) for bound in (*limits, h))]


def _hidden_dims(spec: Gated, ndim: int, *_: int) -> Dims:
    names = *_results(spec, gradient=False), *["scale"] * 3
    return _dims(["q"] * (1 + spec.has_up), ndim), _dims(names, ndim)


def _hidden_gradients(
    spec: Gated, split: Split, dh: jax.Array, *kept: jax.Array, order: Order
) -> list[jax.Array]:
    (maximum,) = matrix_amax_kernel(Codes(op=spec.op), *_matrices([dh]), order=order)
    maximum = split.pmax(maximum, range(dh.ndim))
    *pairs, activation, up, h = kept
    slope = SLOPES[spec.function.name]
    bounds = gradient_bounds(maximum.reshape(()), activation, up, slope)[: 1 + spec.has_up]
    operands = *_matrices([dh, *pairs[::2]]), jnp.stack(pairs[1::2]), jnp.stack([*bounds, h])
    results = gradient_kernel(spec, *operands, order=order)
    return _restored(results, _results(spec, gradient=True), dh)


def _gradient_dims(spec: Gated, ndim: int, *_: int) -> Dims:
    names = "q", *("q", "scale") * (1 + spec.has_up), *["scale"] * 3
    return _dims(names, ndim), _dims(_results(spec, gradient=True), ndim)


def hidden_codes(spec: Gated, *kept: jax.Array) -> list[jax.Array]:
    """`(qt, scale)` of h by what `hidden` left for the backward, in plain JAX."""
    *pairs, _, _, h = kept
    arrays = _meant(pairs[::2], pairs[1::2])
    codes = _again(define_cast, spec, *_matrices(arrays), bound=h.reshape(1))
    return _restored(codes, ("qt", "scale"), arrays[0])


def _batch_rows(op: Op, args: Any, dims: Any, *, spec: Gated, order: Order) -> Any:
    """A batch dimension becomes one of rows: all its examples share a scale."""
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    if any(d is not None and a.ndim == 1 for a, d in zip(args, dims)):  # each has its maxima
        results = jax.vmap(functools.partial(op.plain, spec), tuple(dims))(*args)
        return results, [0] * len(results)
    moved = [batch_at(a, d, 0, size) if a.ndim else a for a, d in zip(args, dims)]
    assert op.placement is not None
    _, outputs = op.placement.dims(spec, moved[0].ndim)
    return op(spec, *moved, order=order), [out.index(0) if out else None for out in outputs]


hidden_gradients = Op(
    "quantize_hidden_gradients",
    None,
    Placement(_gradient_dims, _hidden_gradients),
    Batching(rule=_batch_rows),
    Derivative(jvp=no_second_derivative),
)
"""`(dh, *kept) -> (q, qt, scale)` of da and, with `up`, of dup, and `(qt, scale)` of h.

`kept` is what `hidden` returned after the codes of h and their scale.
"""
hidden = Op(
    "quantize_hidden",
    None,
    Placement(_hidden_dims, _hidden),
    Batching(rule=_batch_rows),
    Derivative(jvp=no_second_derivative),
)
"""`(a[, up]) -> (q, scale)` of h, a and up, by the maxima of all devices, and three limits.

These are of |activation| and |up| (1 without one) by what their codes say, and of |h|.
"""
