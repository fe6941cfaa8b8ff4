"""LayerNorm, forward to backward: the functions, their definition, kernels, sharding, derivative.

With w = scale + scale_offset, all sums in float32 (float64 where an operand is float64):

    x̂ = (x − mean) · rstd       rstd = 1 / sqrt(mean((x − mean)²) + eps)
    y = x̂ · w + bias
    dx = rstd · (g − mean(g) − x̂ · mean(g · x̂))      g = dy · w
    dscale = Σ_rows dy · x̂      dbias = Σ_rows dy

The variance is the mean of squared differences, never a difference of means, which loses all where
the mean is large. Checks, placement, layouts of rows and the derivative's rules are RMSNorm's.

References: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from ...native.dtypes import compute_dtype
from ...native.implementation import Implementation, Order
from ...native.kernel import Kernel
from ..core.op import Op, Split
from ..rms_norm import op as rms_norm
from ..rms_norm.op import along_rows, bias_of, dtype_of, plus, rows_of, weight_of
from ..rms_norm.spec import Norm
from . import cuda

# ---------------------------------------------------------------- the functions


def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Array:
    """Subtracts the mean of x over `axis`, divides by the standard deviation, scales and shifts.

        y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) · (scale + scale_offset) + bias

    Computed in float32 (float64 if an operand or `dtype` is float64), the mean first, so that a
    mean much larger than the deviation costs no digits of it; the gradients of scale and bias are
    summed in that type and returned in their own. Rows may be split over any mesh axes without
    communication; where a normalised axis is split, two values a row are exchanged.

    Args:
      x: any shape; float64, float32, bfloat16 or float16.
      scale, bias: the shape of x's normalised axes, in increasing order of axis; any of those
        dtypes.
      eps: added to the variance; finite, at least 0.
      axis: the normalised axis, or several.
      scale_offset: added to scale; 1 for checkpoints that store scale − 1.
      dtype: of the result; x's where None.
      implementation: None, "native", "pallas" or "xla", or several to try in order; see
        `normfuse info` for what serves here.

    Returns:
      An array of x's shape and sharding.

    Raises:
      TypeError: for integer or complex operands, or an eps that is not a number.
      ValueError: for a scale or bias that does not fit, an axis out of range, an eps that is
        negative or not finite, or an unknown implementation.
      NotImplementedError: if `implementation` asks for what cannot serve; an ExceptionGroup of
        them where it names several.

    References:
      Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.

    >>> import jax.numpy as jnp
    >>> from normfuse import layer_norm
    >>> y = layer_norm(jnp.array([3.0, 5.0]), jnp.array([1.0, 2.0]), jnp.array([0.0, 1.0]))
    >>> [round(value, 3) for value in y.tolist()]
    [-1.0, 3.0]
    """
    options = eps, axis, scale_offset, dtype
    norm, x, *parameters = _check("layer_norm", x, scale, bias, *options)
    return rms_norm.call(forward, norm, x, [], parameters, implementation)[0]


def add_layer_norm(
    x: Array,
    residual: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """Adds a residual to x and normalises the sum, in one pass over the activations.

        new_residual = x + residual        y = layer_norm(new_residual, scale, bias)

    The backward adds the residual's own gradient in the kernel. Takes and raises what `layer_norm`
    does, and ValueError where residual's shape is not x's.

    Args:
      residual: x's shape; float64, float32, bfloat16 or float16.

    Returns:
      `(y, new_residual)`: y has `dtype` (x's where None); new_residual has the promoted dtype of x
      and residual, and is what is normalised, after rounding to that dtype.

    >>> import jax.numpy as jnp
    >>> from normfuse import add_layer_norm
    >>> y, h = add_layer_norm(jnp.array([1.0, 1.0]), jnp.array([2.0, 4.0]))
    >>> [round(value, 3) for value in y.tolist()], h.tolist()
    ([-1.0, 1.0], [3.0, 5.0])
    """
    options = eps, axis, scale_offset, dtype
    norm, x, *parameters = _check("add_layer_norm", x, scale, bias, *options)
    residual = rms_norm.check_residual("add_layer_norm", x, residual)
    norm = replace(norm, has_residual=True)
    y, h, *_ = rms_norm.call(forward, norm, x, [residual], parameters, implementation)
    return y, h


def adaptive_layer_norm(
    x: Array,
    scale: Array,
    shift: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 1.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Array:
    """LayerNorm over the last axis with a scale and a shift of each example: AdaLN.

        x̂[b, t] = (x[b, t] − mean(x[b, t])) / sqrt(mean((x[b, t] − mean(x[b, t]))²) + eps)
        y[b, t] = x̂[b, t] · (scale[b] + scale_offset) + shift[b]

    In DiT, PixArt, Stable Diffusion 3 and Flux, a LayerNorm without parameters and `modulate`. On
    GPUs one pass over the activations in each direction, which also sums the gradients of each
    example's scale and shift over its tokens. Computed in float32 (float64 if an operand or `dtype`
    is float64); any dimensions of x but the last may be split over mesh axes, and those sums cross
    the devices that have tokens of one example. Pallas does not serve it.

    Args:
      x: `(*examples, *tokens, features)`; float64, float32, bfloat16 or float16.
      scale: `(*examples, features)`, of one or more leading dimensions of x; any of those dtypes.
      shift: the shape of scale, or None.
      scale_offset: added to scale: 1 as DiT's `modulate` does.
      eps, dtype, implementation: as for `layer_norm`.

    Returns:
      An array of x's shape and sharding.

    Raises:
      TypeError, ValueError, NotImplementedError: as `layer_norm`.

    References:
      Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748.

    >>> import jax.numpy as jnp
    >>> from normfuse import adaptive_layer_norm
    >>> x, scale = jnp.array([[[3.0, 5.0]], [[5.0, 1.0]]]), jnp.array([[0.0, 0.0], [1.0, 1.0]])
    >>> y = adaptive_layer_norm(x, scale, jnp.array([[0.0, 1.0], [0.0, 0.0]]))
    >>> [round(value, 3) for value in y.ravel().tolist()]
    [-1.0, 2.0, 2.0, -2.0]
    """
    options = eps, scale_offset, dtype
    norm, x, own = rms_norm.check_examples("adaptive_layer_norm", x, scale, shift, *options)
    norm = replace(norm, centred=True, with_mean=True)
    return rms_norm.call(forward, norm, x, [], own, implementation)[0]


def _check(op: str, *given: Any) -> tuple[Norm, Array, Array | None, Array | None]:
    """Returns what is known of the norm, and the operands as arrays; or raises one clear error."""
    norm, x, scale, bias = rms_norm.check(op, *given)
    return replace(norm, centred=True, with_mean=True), x, scale, bias


# ---------------------------------------------------------------- definitions, in plain JAX
# Every kernel is held to these. Scale and bias have the shape of the normalised axes, in increasing
# order, after that of the examples; `mean`, `rstd`, `squares`, `sums` and `dots` have that of all
# but the normalised axes of x.


def define_forward(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """`(x[, residual][, scale][, bias]) -> (y[, h][, mean][, rstd])`, h = x + residual."""
    dtype, others = dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    h = []
    if norm.has_residual:
        x = rms_norm.add(x, others.pop(0), dtype)
        h.append(x)
    mean, squares = _statistics(norm, x.astype(dtype))
    rstd = rstd_of(norm, squares, math.prod(x.shape[a] for a in norm.axes))
    parameters, bias = others[: norm.has_scale], others[norm.has_scale :]
    y = define_apply(norm, x, *parameters, *bias, mean, rstd)
    return [*y, *h, *[mean] * norm.with_mean, *[rstd] * norm.with_rstd]


def _statistics(norm: Norm, wide: Array) -> list[Array]:
    mean = jnp.mean(wide, norm.axes)
    centred = wide - along_rows(norm, mean)
    return [mean, jnp.sum(centred * centred, norm.axes)]


def rstd_of(norm: Norm, squares: Array, count: int) -> Array:
    """Returns 1 / the standard deviation of `count` elements a row."""
    size = jnp.asarray(count, squares.dtype)
    return jax.lax.rsqrt(squares / size + jnp.asarray(norm.eps, squares.dtype))


def define_row_statistics(norm: Norm, x: Array) -> list[Array]:
    """`x -> (mean, Σ (x − mean)²)`, one value a row each."""
    return _statistics(norm, x.astype(compute_dtype(x.dtype)))


def _normal(norm: Norm, x: Array, others: list[Array], dtype: jnp.dtype) -> tuple[Array, Array]:
    """Takes mean and rstd off `others`; returns x̂, and rstd against x."""
    mean, rstd = (along_rows(norm, others.pop(0).astype(dtype)) for _ in range(2))
    return (x.astype(dtype) - mean) * rstd, rstd


def define_apply(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """`(x[, scale][, bias], mean, rstd) -> y`, for statistics that are already known."""
    dtype, others = dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    w, bias = weight_of(norm, others, x, dtype), bias_of(norm, others, x, dtype)
    return [plus(_normal(norm, x, others, dtype)[0] * w, bias).astype(norm.out_dtype)]


def define_row_dots(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale], mean) -> (Σ dy · w, Σ dy · w · (x − mean))`, one value a row each."""
    dtype, others = dtype_of(dy, x, *rest), list(rest)
    g = dy.astype(dtype) * weight_of(norm, others, x, dtype)
    centred = x.astype(dtype) - along_rows(norm, others.pop(0).astype(dtype))
    return [jnp.sum(g, norm.axes), jnp.sum(g * centred, norm.axes)]


def define_backward_apply(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale], mean, rstd[, dh], sums, dots) -> (dx[, dscale][, dbias])`.

    `sums` and `dots` are what `define_row_dots` gives of the whole row.
    """
    dtype, others = dtype_of(dy, x, *rest), list(rest)
    w = weight_of(norm, others, x, dtype)
    normal, rstd = _normal(norm, x, others, dtype)
    dh = others.pop(0).astype(dtype) if norm.has_residual else jnp.zeros((), dtype)
    of_g, of_dots = (
        along_rows(norm, a.astype(dtype)) / jnp.asarray(norm.count, dtype) for a in others
    )
    dy = dy.astype(dtype)
    dx = (rstd * (dy * w - of_g - normal * (rstd * of_dots)) + dh).astype(x.dtype)
    rows = rows_of(norm, x)
    dscale = [jnp.sum(dy * normal, rows) for _ in range(norm.with_dscale)]
    return [dx, *dscale, *[jnp.sum(dy, rows) for _ in range(norm.with_dbias)]]


def define_backward(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale], mean, rstd[, dh]) -> (dx[, dscale][, dbias])`; dh: the residual's own."""
    sums = define_row_dots(norm, dy, x, *rest[: norm.has_scale + 1])
    known = replace(norm, count=math.prod(x.shape[a] for a in norm.axes))
    return define_backward_apply(known, dy, x, *rest, *sums)


def define_tangent(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """The tangents of y and h: `(h[, scale], mean, rstd[, dh][, dscale][, dbias]) -> (dy[, dh])`.

    h is a result only with a residual, and only moves if dh does.
    """
    dtype, others = dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    w, rows = weight_of(norm, others, x, dtype), rows_of(norm, x)
    normal, rstd = _normal(norm, x, others, dtype)
    dy, dh = jnp.zeros(x.shape, dtype), []
    if norm.moves[0]:
        dx = others.pop(0)
        dh, wide = [dx] * norm.has_residual, dx.astype(dtype)
        mean = lambda value: jnp.mean(value, norm.axes, keepdims=True)
        dy = w * rstd * (wide - mean(wide) - normal * mean(normal * wide))
    if norm.moves[1]:
        dy = dy + normal * jnp.expand_dims(others.pop(0).astype(dtype), rows)
    if norm.moves[2]:
        dy = dy + jnp.expand_dims(others.pop(0).astype(dtype), rows)
    return [dy.astype(norm.out_dtype), *dh]


# ---------------------------------------------------------------- kernels, on (outer, n, inner)
# `forward` and `backward` do the whole work where a device holds whole rows. Where rows are split
# over devices, `row_statistics` then `apply`, and `row_dots` then `backward_apply`, do it around
# one exchange.


def _kernel(
    name: str, definition: Callable[..., Any], on_cuda: Callable[..., Any], *attributes: str
) -> Kernel:
    """Returns a kernel whose C++ handler has the norm's `attributes`."""

    def pallas(target: Any, norm: Norm, *operands: Array) -> list[Array]:
        from . import pallas  # imported when it is first used

        return pallas.KERNELS[name](target, norm, *operands)

    full = f"layer_norm_{name}"
    cpu = rms_norm.cpu_body(full, definition, *attributes)
    return Kernel(full, definition, {"cpu": cpu, "cuda": on_cuda, "pallas": pallas})


_WEIGHT = ("scale_offset", "has_scale")
_GRADIENT = (*_WEIGHT, "has_residual", "with_dscale", "with_dbias")
forward_kernel = _kernel(
    "forward",
    define_forward,
    cuda.forward,
    *("eps", *_WEIGHT, "has_bias", "has_residual", "with_mean", "with_rstd"),
)
row_statistics_kernel = _kernel("row_statistics", define_row_statistics, cuda.row_statistics)
apply_kernel = _kernel("apply", define_apply, cuda.apply, *_WEIGHT, "has_bias")
backward_kernel = _kernel("backward", define_backward, cuda.backward, *_GRADIENT)
row_dots_kernel = _kernel("row_dots", define_row_dots, cuda.row_dots, *_WEIGHT)
backward_apply_kernel = _kernel(
    "backward_apply", define_backward_apply, cuda.backward_apply, "count", *_GRADIENT
)
KERNELS = (
    forward_kernel,
    row_statistics_kernel,
    apply_kernel,
    backward_kernel,
    row_dots_kernel,
    backward_apply_kernel,
)


def examples(
    n: int, x: str, scale: str, out: str, *, rows: int, scale_offset: float = 0.0
) -> Iterator[tuple[Kernel, Norm, list[jax.ShapeDtypeStruct]]]:
    """Yields every kernel on rows of `n` as the functions call it: (kernel, norm, operand types).

    With scale and bias, with a scale alone and with neither; the arguments are those of RMSNorm's
    examples, a bias has scale's dtype.
    """
    compute = compute_dtype(x, scale, out)
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    large, dy = struct((rows, n, 1), x), struct((rows, n, 1), out)
    row, w = struct((rows, 1), compute), struct((n,), scale)
    base = Norm(op="layer_norm", centred=True, eps=1e-6, out_dtype=out)
    for parameters in ([w, w], [w], []):
        weight, bias = parameters[:1], parameters[1:]
        norm = replace(base, has_scale=bool(weight), has_bias=bool(bias))
        norm = replace(norm, scale_offset=scale_offset if weight else 0.0)
        yield apply_kernel, norm, [large, *parameters, row, row]
        if not bias:
            yield row_dots_kernel, norm, [dy, large, *weight, row]
        for residual, flag in (([], False), ([large], True), ([], True), ([large], False)):
            given = replace(norm, has_residual=bool(residual))
            known = replace(given, with_mean=flag, with_rstd=flag)
            yield forward_kernel, known, [large, *residual, *parameters]
            sums = {"with_dscale": flag and bool(weight), "with_dbias": flag and bool(bias)}
            gradient = replace(given, has_bias=False, **sums)
            if not flag and bias:  # the same as without a bias
                continue
            yield backward_kernel, gradient, [dy, large, *weight, row, row, *residual]
            apart = replace(gradient, count=float(n))
            operands = [dy, large, *weight, row, row, *residual, row, row]
            yield backward_apply_kernel, apart, operands
    yield row_statistics_kernel, base, [large]


# ---------------------------------------------------------------- one device's share


def _forward_over_devices(
    norm: Norm, split: Split, large: list[Array], parameters: list[Array], order: Order
) -> list[Array]:
    """Each device has a part of every row: their statistics are gathered between two kernels."""
    local = rms_norm.local(norm)
    dtype = dtype_of(*large, *parameters, out=norm.out_dtype)
    h = rms_norm.add(large[0], large[1], dtype) if norm.has_residual else large[0]
    wide = h.astype(dtype) if dtype == jnp.float64 else h  # it sees no parameter, no dtype of y
    own = jnp.stack(row_statistics_kernel(local, wide, order=order))
    means, squares = jnp.moveaxis(jax.lax.all_gather(own, split.over(norm.axes)), 1, 0)
    mean, squares = cuda.combined(means, squares, jnp.asarray(h.shape[local.axes[0]], dtype))
    rstd = rstd_of(norm, squares, split.count(norm.axes))
    y = apply_kernel(local, h, *parameters, mean, rstd, order=order)
    known = [*[mean] * norm.with_mean, *[rstd] * norm.with_rstd]
    return [*y, *[h] * norm.has_residual, *known]


def _backward_over_devices(
    norm: Norm, split: Split, operands: list[Array], order: Order
) -> list[Array]:
    """Each device has a part of every row: one sum over the devices between two kernels."""
    local = rms_norm.local(norm, count=float(split.count(norm.axes)))
    own = row_dots_kernel(local, *operands[: 3 + norm.has_scale], order=order)
    sums = split.psum(jnp.stack(own), norm.axes)
    return backward_apply_kernel(local, *operands, *sums, order=order)


# ---------------------------------------------------------------- vmap over a parameter


def _forward_unfused(norm: Norm, x: Array, *rest: Array, order: Order) -> list[Array]:
    """Normalises on kernels; applies scale and bias of each example's own in plain JAX."""
    dtype = dtype_of(x, *rest, out=norm.out_dtype)
    residual, parameters = rest[: norm.has_residual], list(rest[norm.has_residual :])
    alone = replace(norm, has_scale=False, has_bias=False, heads=(), scale_offset=0.0)
    y, *others = forward(replace(alone, out_dtype=dtype.name), x, *residual, order=order)
    w, bias = weight_of(norm, parameters, x, dtype), bias_of(norm, parameters, x, dtype)
    return [plus(y * w, bias).astype(norm.out_dtype), *others]


def _backward_unfused(norm: Norm, dy: Array, x: Array, *rest: Array, order: Order) -> list[Array]:
    """dx on kernels, with dy scaled by each example's own scale; the sums in plain JAX."""
    dtype, others, rows = dtype_of(dy, x, *rest), list(rest), rows_of(norm, x)
    wide = dy.astype(dtype)
    g = wide * weight_of(norm, others, x, dtype)
    alone = replace(norm, has_scale=False, heads=(), scale_offset=0.0)
    alone = replace(alone, with_dscale=False, with_dbias=False)
    results = backward(alone, g, x, *others, order=order)
    if norm.with_dscale:
        results.append(jnp.sum(wide * _normal(norm, x, others, dtype)[0], rows))
    return results + [jnp.sum(wide, rows)] * norm.with_dbias


# ---------------------------------------------------------------- derivative
# As RMSNorm's: the tangent is plain HLO and linear, its transpose is the native backward.


def _forward_jvp(primals: Any, tangents: Any, *, spec: Norm, order: Order) -> Any:
    return rms_norm.push(forward, tangent, _tangents, primals, tangents, spec, order)


def _tangents(norm: Norm, x: Array, mean: Array, rstd: Array, dx: Any) -> list[Any]:
    """The tangents of mean and rstd."""
    if type(dx) is ad.Zero:
        return [ad.Zero(jax.typeof(a).to_tangent_aval()) for a in (mean, rstd)]
    wide, (normal, _) = dx.astype(rstd.dtype), _normal(norm, x, [mean, rstd], rstd.dtype)
    along = jnp.mean(normal * wide, norm.axes)
    return [jnp.mean(wide, norm.axes), -rstd * (rstd * along)]


def _transpose_tangent(cts: Any, *operands: Any, spec: Norm, order: Order) -> list[Any]:
    return rms_norm.pull(backward, cts, *operands, spec=spec, order=order)


def _transpose_backward(cts: Any, *operands: Any, spec: Norm, order: Order) -> list[Any]:
    return rms_norm.pull_again(tangent, cts, *operands, spec=spec, order=order)


# ---------------------------------------------------------------- operations

tangent = Op(
    "layer_norm_tangent",
    define_tangent,
    dims=rms_norm.tangent_dims,
    batched=rms_norm.batched,
    transpose=_transpose_tangent,
)
backward = Op(
    "layer_norm_gradient",
    define_backward,
    dims=rms_norm.backward_dims,
    body=functools.partial(rms_norm.gradients_on, backward_kernel, _backward_over_devices),
    leads=(1,),
    unfused=_backward_unfused,
    batched=rms_norm.batched,
    transpose=_transpose_backward,
    without_last=lambda norm: rms_norm.without(norm, "with_dbias", "with_dscale"),
)
forward = Op(
    "layer_norm",
    define_forward,
    dims=rms_norm.forward_dims,
    body=functools.partial(rms_norm.forward_on, forward_kernel, _forward_over_devices),
    unfused=_forward_unfused,
    batched=rms_norm.batched,
    jvp=_forward_jvp,
    backward=backward,
    without_last=lambda norm: rms_norm.without(norm, "with_rstd", "with_mean"),
)
