"""RMSNorm, forward to backward: the functions, their definition, kernels, sharding and derivative.

With w = scale + scale_offset, all sums in float32 (float64 where an operand is float64):

    y = x · rstd · w            rstd = 1 / sqrt(mean(x²) + eps)
    dx = rstd · g − x · rstd³ · mean(g · x)      g = dy · w
    dscale = Σ_rows dy · x · rstd

References: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.interpreters import ad

from ...native import registry
from ...native.dtypes import compute_dtype
from ...native.implementation import Implementation, Order, order_of
from ...native.kernel import Kernel, result_types
from ...native.launch import call_host
from ..core.arguments import dimensions, finite, floating, floating_dtype
from ..core.op import Dims, Loose, Op, Split, match, vary, varying_axes
from . import cuda
from .spec import Norm

# ---------------------------------------------------------------- the functions


def rms_norm(
    x: Array,
    scale: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Array:
    """Divides x by its root mean square over `axis` and multiplies by `scale`.

        y = x / sqrt(mean(x²) + eps) · (scale + scale_offset)

    Computed in float32 (float64 if an operand or `dtype` is float64); the gradient of scale is
    summed in that type and returned in scale's own. Rows may be split over any mesh axes without
    communication; where a normalised axis is split, one value a row is summed over the devices.

    Args:
      x: any shape; float64, float32, bfloat16 or float16.
      scale: the shape of x's normalised axes, in increasing order of axis; any of those dtypes.
      eps: added to the mean square; finite, at least 0.
      axis: the normalised axis, or several.
      scale_offset: added to scale; 1 for checkpoints that store scale − 1.
      dtype: of the result; x's where None.
      implementation: None, "native", "pallas" or "xla", or several to try in order; see
        `normfuse info` for what serves here.

    Returns:
      An array of x's shape and sharding.

    Raises:
      TypeError: for integer or complex operands, or an eps that is not a number.
      ValueError: for a scale that does not fit, an axis out of range, or an eps that is not finite
        or negative.
      NotImplementedError: if `implementation` asks for what cannot serve; an ExceptionGroup of
        them where it names several.

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    >>> import jax.numpy as jnp
    >>> from normfuse import rms_norm
    >>> y = rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0]))
    >>> [round(value, 3) for value in y.tolist()]
    [0.849, 2.263]
    """
    norm, x, scale = _check("rms_norm", x, scale, eps, axis, scale_offset, dtype)
    return _call(norm, x, [], scale, implementation)[0]


def rms_norm_with_rstd(
    x: Array,
    scale: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """`rms_norm`, and the reciprocal root mean square it multiplied by.

    Takes and raises what `rms_norm` does.

    Returns:
      `(y, rstd)`: rstd has the shape of x without the normalised axes, float32 (or float64).
    """
    norm, x, scale = _check("rms_norm_with_rstd", x, scale, eps, axis, scale_offset, dtype)
    y, rstd = _call(norm, x, [], scale, implementation)
    return y, rstd


def add_rms_norm(
    x: Array,
    residual: Array,
    scale: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """Adds a residual to x and normalises the sum: the step between two blocks of a transformer.

        new_residual = x + residual        y = rms_norm(new_residual, scale)

    One pass over the activations in each direction: the backward adds the residual's own gradient
    in the kernel. Takes and raises what `rms_norm` does, and ValueError where residual's shape is
    not x's.

    Returns:
      `(y, new_residual)`: y has `dtype` (x's where None); new_residual has the promoted dtype of x
      and residual, and is what is normalised, after rounding to that dtype.

    >>> import jax.numpy as jnp
    >>> from normfuse import add_rms_norm
    >>> y, h = add_rms_norm(jnp.array([1.0, 1.0]), jnp.array([2.0, 3.0]))
    >>> [round(value, 3) for value in y.tolist()], h.tolist()
    ([0.849, 1.131], [3.0, 4.0])
    """
    norm, x, scale = _check("add_rms_norm", x, scale, eps, axis, scale_offset, dtype)
    residual = floating("add_rms_norm", "residual", residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm: residual must have x's shape {x.shape}, got {residual.shape}; "
            "broadcast it first with jnp.broadcast_to"
        )
    norm = replace(norm, has_residual=True)
    y, new_residual, _ = _call(norm, x, [residual], scale, implementation)
    return y, new_residual


def _call(
    norm: Norm, x: Array, residual: list[Array], scale: Array | None, implementation: Implementation
) -> list[Array]:
    lead = vary(x, varying_axes(x, *residual, scale))
    if residual and not any(jax.typeof(x).sharding.spec):
        lead = match(lead, residual[0], range(x.ndim))
    operands = [lead, *[match(a, lead, range(x.ndim)) for a in residual]]
    if scale is not None:
        operands.append(match(scale, lead, norm.axes))
    order = order_of(implementation)
    return (
        forward.plain(norm, *operands) if order is None else forward(norm, *operands, order=order)
    )


def _check(
    op: str, x: Any, scale: Any, eps: Any, axis: Any, scale_offset: Any, dtype: Any
) -> tuple[Norm, Array, Array | None]:
    """Returns what is known of the norm, and the operands as arrays; or raises one clear error."""
    x = floating(op, "x", x)
    axes = dimensions(op, x, axis)
    if scale is not None:
        scale = floating(op, "scale", scale)
        wanted = tuple(x.shape[a] for a in axes)
        if scale.shape != wanted:
            raise ValueError(
                f"{op}: scale must have the shape of x's normalised axes, {wanted} for x of shape "
                f"{x.shape} and axis={axis}; got {scale.shape}"
            )
    norm = Norm(
        op=op,
        axes=axes,
        eps=finite(op, "eps", eps, least=0),
        scale_offset=finite(op, "scale_offset", scale_offset),
        out_dtype=floating_dtype(op, dtype, x.dtype),
        has_scale=scale is not None,
        with_rstd=True,
    )
    return norm, x, scale


# ---------------------------------------------------------------- definitions, in plain JAX
# Every kernel is held to these. `scale` has the shape of the normalised axes, in increasing order;
# `rstd`, `sums` and `dots` have that of the other dimensions of x.


def _rows(norm: Norm, x: Any) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i not in norm.axes)


def _along_rows(norm: Norm, value: Array) -> Array:
    """Broadcasts one value a row against x."""
    return jnp.expand_dims(value, norm.axes)


def _weight(norm: Norm, operands: list[Array], x: Array, dtype: jnp.dtype) -> Array:
    """Takes scale off `operands`; returns scale + scale_offset against x, or 1 if there is none."""
    if not norm.has_scale:
        return jnp.ones((), dtype)
    scale = operands.pop(0).astype(dtype) + jnp.asarray(norm.scale_offset, dtype)
    return jnp.expand_dims(scale, _rows(norm, x))


def _dtype_of(*operands: Array, out: Any = None) -> jnp.dtype:
    return compute_dtype(*(a.dtype for a in operands), out)


def define_forward(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """`(x[, residual][, scale]) -> (y[, h][, rstd])`, h = x + residual being what is normalised."""
    dtype, others = _dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    h = []
    if norm.has_residual:
        x = _sum(x, others.pop(0), dtype)
        h.append(x)
    wide = x.astype(dtype)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, norm.axes) + jnp.asarray(norm.eps, dtype))
    w = _weight(norm, others, x, dtype)
    y = (wide * _along_rows(norm, rstd) * w).astype(norm.out_dtype)
    return [y, *h, *[rstd] * norm.with_rstd]


def _sum(x: Array, residual: Array, dtype: jnp.dtype) -> Array:
    """Returns x + residual in the dtype they promote to, added in `dtype`."""
    return (x.astype(dtype) + residual.astype(dtype)).astype(
        jnp.promote_types(x.dtype, residual.dtype)
    )


def define_row_sums(norm: Norm, x: Array) -> list[Array]:
    """`x -> Σ x²`, one value a row."""
    wide = x.astype(compute_dtype(x.dtype))
    return [jnp.sum(wide * wide, norm.axes)]


def define_apply(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """`(x[, scale], rstd) -> y`, for an rstd that is already known."""
    dtype, others = _dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    w = _weight(norm, others, x, dtype)
    rstd = _along_rows(norm, others.pop(0).astype(dtype))
    return [(x.astype(dtype) * rstd * w).astype(norm.out_dtype)]


def define_row_dots(norm: Norm, dy: Array, x: Array, *scale: Array) -> list[Array]:
    """`(dy, x[, scale]) -> Σ dy · w · x`, one value a row."""
    dtype = _dtype_of(dy, x, *scale)
    w = _weight(norm, list(scale), x, dtype)
    return [jnp.sum(dy.astype(dtype) * w * x.astype(dtype), norm.axes)]


def define_backward_apply(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale], rstd[, dh], dots) -> (dx[, dscale])`, for known sums over each row."""
    dtype, others = _dtype_of(dy, x, *rest), list(rest)
    w = _weight(norm, others, x, dtype)
    rstd = _along_rows(norm, others.pop(0).astype(dtype))
    dh = others.pop(0).astype(dtype) if norm.has_residual else jnp.zeros((), dtype)
    mean = _along_rows(norm, others.pop(0).astype(dtype)) / jnp.asarray(norm.count, dtype)
    dy, normal = dy.astype(dtype), x.astype(dtype) * rstd
    # x · rstd³ · mean in an order that rstd³ cannot overflow or vanish in
    dx = (rstd * (dy * w - normal * (rstd * mean)) + dh).astype(x.dtype)
    return [dx, *[jnp.sum(dy * normal, _rows(norm, x)) for _ in range(norm.with_dscale)]]


def define_backward(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale], rstd[, dh]) -> (dx[, dscale][, value])`.

    dh is the residual's own gradient; the value is y again, in dy's dtype.
    """
    (dots,) = define_row_dots(norm, dy, x, *rest[: norm.has_scale])
    known = replace(norm, count=math.prod(x.shape[a] for a in norm.axes))
    results = define_backward_apply(known, dy, x, *rest, dots)
    if norm.with_value:
        results += define_apply(replace(norm, out_dtype=dy.dtype.name), x, *rest)
    return results


def define_tangent(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """The tangents of y and h: `(h[, scale], rstd[, dh][, dscale]) -> (dy[, dh])`.

    h is a result only with a residual, and only moves if dh does.
    """
    dtype, others = _dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    w = _weight(norm, others, x, dtype)
    rstd = _along_rows(norm, others.pop(0).astype(dtype))
    normal, dy, dh = x.astype(dtype) * rstd, jnp.zeros((), dtype), []
    if norm.moves[0]:
        dx = others.pop(0)
        dh = [dx] * norm.has_residual
        mean = jnp.mean(normal * dx.astype(dtype), norm.axes, keepdims=True)
        dy = w * rstd * (dx.astype(dtype) - normal * mean)
    if norm.moves[1]:
        dy = dy + normal * jnp.expand_dims(others.pop(0).astype(dtype), _rows(norm, x))
    return [dy.astype(norm.out_dtype), *dh]


# ---------------------------------------------------------------- kernels, on (outer, n, inner)
# `forward` and `backward` do the whole work where a device holds whole rows. Where rows are split
# over devices, `row_sums` then `apply`, and `row_dots` then `backward_apply`, do it around one sum
# over the devices.

# Elements of x up to which XLA's forward is left alone on a GPU, where no derivative asks for rstd
# and there is more than a row: as fast as ours, it is free to join the product that follows. A
# chain of 24 × (norm + product) on 64 rows of 1024 took 125 µs, and 159 with our launches
# (benchmarks/results).
PLAIN_ELEMENTS = 1 << 16


def _plain_forward_on_cuda(norm: Norm, x: Any, *_: Any) -> bool:
    return not norm.with_rstd and x.shape[0] > 1 and x.size <= PLAIN_ELEMENTS


def _cpu(name: str, definition: Callable[..., Any], *attributes: str) -> Callable[..., Any]:
    """Returns the body that calls a C++ handler with these attributes of the norm."""

    def call(norm: Norm, *operands: Array, aliases: Any = None) -> list[Array]:
        types = result_types(definition, norm, tuple((a.shape, a.dtype) for a in operands))
        values = {name: getattr(norm, name) for name in attributes}
        values = {k: np.float64(v) if isinstance(v, float) else v for k, v in values.items()}
        return call_host(f"normfuse_{name}", operands, types, aliases=aliases, **values)

    return call


def _pullback_on_cpu(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """x is normalised again by a call of its own, and dx takes dy's place."""
    again, alone = replace(norm, out_dtype=dy.dtype.name), replace(norm, with_value=False)
    value = apply_kernel.bodies["cpu"](again, x, *rest) if norm.with_value else []
    aliases = {0: 0} if dy.dtype == x.dtype else None
    return [*backward_kernel.bodies["cpu"](alone, dy, x, *rest, aliases=aliases), *value]


def _kernel(
    name: str,
    definition: Callable[..., Any],
    on_cuda: Callable[..., Any],
    *attributes: str,
    on_cpu: Callable[..., Any] | None = None,
    on_pallas: str = "",
    **options: Any,
) -> Kernel:
    """Returns a kernel whose C++ handler has the norm's `attributes`, unless `on_cpu` is given.

    The Pallas kernel is that of the same name, or `on_pallas`.
    """

    def pallas(target: Any, norm: Norm, *operands: Array) -> list[Array]:
        from . import pallas  # imported when it is first used

        return pallas.KERNELS[on_pallas or name](target, norm, *operands)

    full = f"rms_norm_{name}"
    cpu = on_cpu or _cpu(full, definition, *attributes)
    return Kernel(full, definition, {"cpu": cpu, "cuda": on_cuda, "pallas": pallas}, **options)


registry.register()
_WEIGHT = ("scale_offset", "has_scale")
_GRADIENT = (*_WEIGHT, "has_residual", "with_dscale")
forward_kernel = _kernel(
    "forward",
    define_forward,
    cuda.forward,
    *("eps", *_WEIGHT, "has_residual", "with_rstd"),
    plain_on_cuda=_plain_forward_on_cuda,
)
row_sums_kernel = _kernel("row_sums", define_row_sums, cuda.row_sums)
apply_kernel = _kernel("apply", define_apply, cuda.apply, *_WEIGHT)
backward_kernel = _kernel("backward", define_backward, cuda.backward, *_GRADIENT)
row_dots_kernel = _kernel("row_dots", define_row_dots, cuda.row_dots, *_WEIGHT)
backward_apply_kernel = _kernel(
    "backward_apply", define_backward_apply, cuda.backward_apply, "count", *_GRADIENT
)
pullback_kernel = _kernel(
    "pullback", define_backward, cuda.pullback, on_cpu=_pullback_on_cpu, on_pallas="backward"
)
KERNELS = (
    forward_kernel,
    row_sums_kernel,
    apply_kernel,
    backward_kernel,
    row_dots_kernel,
    backward_apply_kernel,
    pullback_kernel,
)


def examples(
    n: int, x: str, scale: str, out: str, *, rows: int, scale_offset: float = 0.0
) -> Iterator[tuple[Kernel, Norm, list[jax.ShapeDtypeStruct]]]:
    """Yields every kernel on rows of `n` as the functions call it: (kernel, norm, operand types).

    Args:
      n: the length of a row.
      x, scale, out: dtypes of x, scale and y (and dy).
      rows: how many.
      scale_offset: as for `rms_norm`.
    """
    compute = compute_dtype(x, scale, out)
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    large, dy = struct((rows, n, 1), x), struct((rows, n, 1), out)
    row, w = struct((rows, 1), compute), struct((n,), scale)
    base = Norm(eps=1e-6, scale_offset=scale_offset, out_dtype=out)
    for weight in ([w], []):
        norm = replace(base, has_scale=bool(weight))
        if not weight:
            norm = replace(norm, scale_offset=0.0)
        yield apply_kernel, norm, [large, *weight, row]
        yield row_dots_kernel, norm, [dy, large, *weight]
        for residual, flag in (([], False), ([large], True), ([], True)):
            given = replace(norm, has_residual=bool(residual))
            yield (
                forward_kernel,
                replace(given, with_rstd=flag or bool(residual)),
                [large, *residual, *weight],
            )
            gradient = replace(given, with_dscale=flag and bool(weight))
            yield backward_kernel, gradient, [dy, large, *weight, row, *residual]
            known = replace(gradient, count=float(n))
            yield backward_apply_kernel, known, [dy, large, *weight, row, *residual, row]
        yield forward_kernel, replace(norm, has_residual=True), [large, large, *weight]
        for value in (False, True):
            for dscale in {False, bool(weight)}:
                spec = replace(norm, with_dscale=dscale, with_value=value)
                yield pullback_kernel, spec, [dy, large, *weight, row]
    yield row_sums_kernel, base, [large]


# ---------------------------------------------------------------- one device's share


def _canonical(norm: Norm, array: Array) -> Array:
    """Returns the array with its `axes` together, as kernels see it: (outer, n, inner).

    A reshape where the axes are neighbours, which costs nothing; otherwise a transpose before it.
    """
    axes, first = norm.axes, norm.axes[0]
    if axes != tuple(range(first, first + len(axes))):
        array = jnp.moveaxis(array, axes, range(first, first + len(axes)))
    shape = array.shape
    sizes = [math.prod(s) for s in (shape[:first], shape[first : first + len(axes)])]
    return array.reshape(*sizes, math.prod(shape[first + len(axes) :]))


def _restore(norm: Norm, array: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_canonical`."""
    axes, first = norm.axes, norm.axes[0]
    block = tuple(range(first, first + len(axes)))
    others = [n for i, n in enumerate(shape) if i not in axes]
    array = array.reshape(*others[:first], *[shape[a] for a in axes], *others[first:])
    return array if axes == block else jnp.moveaxis(array, block, axes)


def _row_values(norm: Norm, array: Array) -> Array:
    """Returns a row statistic as kernels see it: (outer, inner)."""
    return array.reshape(math.prod(array.shape[: norm.axes[0]]), -1)


def _forward_body(norm: Norm, split: Split, x: Array, *rest: Array, order: Order) -> list[Array]:
    if x.size == 0:
        return define_forward(norm, x, *rest)
    rows_shape = tuple(n for i, n in enumerate(x.shape) if i not in norm.axes)
    large = [_canonical(norm, a) for a in (x, *rest[: norm.has_residual])]
    scale = [a.reshape(-1) for a in rest[norm.has_residual :]]
    local = replace(norm, axes=(1,))
    if split.over(norm.axes):
        results = _forward_over_devices(norm, split, large, scale, order)
    else:
        results = forward_kernel(local, *large, *scale, order=order)
    return [
        _restore(norm, a, x.shape) if i <= norm.has_residual else a.reshape(rows_shape)
        for i, a in enumerate(results)
    ]


def _forward_over_devices(
    norm: Norm, split: Split, large: list[Array], scale: list[Array], order: Order
) -> list[Array]:
    """Each device has a part of every row: one sum over the devices between two kernels."""
    local, dtype = replace(norm, axes=(1,)), _dtype_of(*large, *scale, out=norm.out_dtype)
    h = _sum(large[0], large[1], dtype) if norm.has_residual else large[0]
    wide = h.astype(dtype) if dtype == jnp.float64 else h  # row_sums sees no scale, no dtype of y
    sums = split.psum(row_sums_kernel(local, wide, order=order)[0], norm.axes)
    rstd = jax.lax.rsqrt(sums / split.count(norm.axes) + jnp.asarray(norm.eps, sums.dtype))
    y = apply_kernel(local, h, *scale, rstd, order=order)
    return [*y, *[h] * norm.has_residual, *[rstd] * norm.with_rstd]


def _apply_body(norm: Norm, split: Split, x: Array, *rest: Array, order: Order) -> list[Array]:
    """Needs nothing of other devices: rstd is of the whole row."""
    del split
    if x.size == 0:
        return define_apply(norm, x, *rest)
    *scale, rstd = rest
    operands = [_canonical(norm, x), *[a.reshape(-1) for a in scale], _row_values(norm, rstd)]
    (y,) = apply_kernel(replace(norm, axes=(1,)), *operands, order=order)
    return [_restore(norm, y, x.shape)]


def _backward_body(
    norm: Norm, split: Split, dy: Array, x: Array, *rest: Array, order: Order
) -> list[Array]:
    return _gradients(backward_kernel, norm, split, dy, x, rest, order)


def _pullback_body(
    norm: Norm, split: Split, dy: Array, x: Array, *rest: Array, order: Order
) -> list[Array]:
    if x.size and not split.over(norm.axes):
        return _gradients(pullback_kernel, norm, split, dy, x, rest, order)
    alone = replace(norm, with_value=False)
    results = _gradients(backward_kernel, alone, split, dy, x, rest, order)
    if norm.with_value:
        again = replace(norm, out_dtype=dy.dtype.name)
        results += _apply_body(again, split, x, *rest, order=order)
    return results


def _gradients(
    kernel: Kernel,
    norm: Norm,
    split: Split,
    dy: Array,
    x: Array,
    rest: tuple[Array, ...],
    order: Order,
) -> list[Array]:
    """dx, and if asked for dscale and the value, by `kernel` where a device has whole rows."""
    rows = [i for i in range(len(split.shape)) if i not in norm.axes]
    if x.size == 0:
        dx, *dscale = define_backward(norm, dy, x, *rest)
        return [dx, *[split.psum(d, rows) for d in dscale]]
    scale, (rstd, *dh) = [a.reshape(-1) for a in rest[: norm.has_scale]], rest[norm.has_scale :]
    large = [_canonical(norm, a) for a in (dy, x)]
    operands = [*large, *scale, _row_values(norm, rstd), *[_canonical(norm, a) for a in dh]]
    local = replace(norm, axes=(1,))
    if split.over(norm.axes):
        (dots,) = row_dots_kernel(local, *large, *scale, order=order)
        local = replace(local, count=float(split.count(norm.axes)))
        dots = split.psum(dots, norm.axes)
        dx, *more = backward_apply_kernel(local, *operands, dots, order=order)
    else:
        dx, *more = kernel(local, *operands, order=order)
    value = [_restore(norm, more.pop(), x.shape)] if norm.with_value else []
    shape = tuple(x.shape[a] for a in norm.axes)
    # dscale is summed over exactly the mesh axes that the rows use
    dscale = [split.psum(d, rows).reshape(shape) for d in more]
    return [_restore(norm, dx, x.shape), *dscale, *value]


# ---------------------------------------------------------------- sharding
# Operands and results by the dimensions of x they have: all of them, the rows, or the axes.


def _dims(norm: Norm, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...], Loose]:
    rows = tuple(i for i in range(ndim) if i not in norm.axes)
    return tuple(range(ndim)), rows, Loose(norm.axes)


def _forward_dims(norm: Norm, ndim: int) -> Dims:
    x, rows, scale = _dims(norm, ndim)
    more = [x] * norm.has_residual
    return (x, *more, *[scale] * norm.has_scale), (x, *more, *[rows] * norm.with_rstd)


def _backward_dims(norm: Norm, ndim: int) -> Dims:
    x, rows, scale = _dims(norm, ndim)
    return (
        (x, x, *[scale] * norm.has_scale, rows, *[x] * norm.has_residual),
        (x, *[scale] * norm.with_dscale, *[x] * norm.with_value),
    )


def _apply_dims(norm: Norm, ndim: int) -> Dims:
    x, rows, scale = _dims(norm, ndim)
    return (x, *[scale] * norm.has_scale, rows), (x,)


def _tangent_dims(norm: Norm, ndim: int) -> Dims:
    x, rows, scale = _dims(norm, ndim)
    moving = [*[x] * norm.moves[0], *[scale] * norm.moves[1]]
    results = (x, *[x] * (norm.has_residual and norm.moves[0]))
    return (x, *[scale] * norm.has_scale, rows, *moving), results


def _batched(norm: Norm, at: int) -> Norm:
    return replace(norm, axes=tuple(a + (a >= at) for a in norm.axes))


# ---------------------------------------------------------------- vmap over a parameter


def _forward_unfused(norm: Norm, x: Array, *rest: Array, order: Order) -> list[Array]:
    """Normalises on kernels, and multiplies by a scale of each example's own in plain JAX."""
    dtype = _dtype_of(x, *rest, out=norm.out_dtype)
    *operands, scale = rest if norm.has_scale else (*rest, None)
    alone = replace(norm, has_scale=False, scale_offset=0.0, out_dtype=dtype.name)
    y, *others = forward(alone, x, *operands, order=order)
    if scale is not None:
        weight = scale.astype(dtype) + jnp.asarray(norm.scale_offset, dtype)
        y = y * jnp.expand_dims(weight, _rows(norm, x))
    return [y.astype(norm.out_dtype), *others]


def _backward_unfused(norm: Norm, dy: Array, x: Array, *rest: Array, order: Order) -> list[Array]:
    """dx on kernels, with dy scaled by each example's own scale; dscale as a sum in plain JAX."""
    dtype, rows = _dtype_of(dy, x, *rest), _rows(norm, x)
    scale, (rstd, *dh) = rest[: norm.has_scale], rest[norm.has_scale :]
    wide = g = dy.astype(dtype)
    if norm.has_scale:
        weight = scale[0].astype(dtype) + jnp.asarray(norm.scale_offset, dtype)
        g = g * jnp.expand_dims(weight, rows)
    alone = replace(norm, has_scale=False, scale_offset=0.0, with_dscale=False, with_value=False)
    results = backward(alone, g, x, rstd, *dh, order=order)
    if norm.with_dscale:
        normal = x.astype(dtype) * _along_rows(norm, rstd)
        results.append(jnp.sum(wide * normal, rows))
    if norm.with_value:
        results += define_apply(replace(norm, out_dtype=dy.dtype.name), x, *rest)
    return results


# ---------------------------------------------------------------- derivative
# The tangent is an operation of its own, linear in the tangents, in plain HLO; its transpose is the
# native backward. So reverse mode runs kernels wherever JAX transposes (grad, linearize, scan,
# remat, vmap), while forward mode and higher orders are JAX's own derivatives of the definitions.


def _forward_jvp(primals: Any, tangents: Any, *, spec: Norm, order: Order) -> Any:
    """The tangent takes the sum h = x + residual, so its transpose, the backward kernel, adds the
    residual's gradient itself."""
    x, *rest = primals
    dx, *drest = tangents
    y, *h, rstd = forward(replace(spec, with_rstd=True), *primals, order=order)
    if spec.has_residual:
        dx = ad.add_tangents(_cast(dx, h[0].dtype), _cast(drest.pop(0), h[0].dtype))
        rest.pop(0)
    here = h[0] if h else x
    given = [type(t) is not ad.Zero for t in (dx, *drest)]
    moving = [t for t in (dx, *drest) if type(t) is not ad.Zero]
    norm = replace(spec, with_rstd=False, moves=(given[0], any(given[1:])))
    dy, *dh = tangent(norm, here, *rest, rstd, *moving, order=order)
    results, dresults = [y, *h], [dy, *(dh or [dx] * len(h))]
    if spec.with_rstd:
        results.append(rstd)
        dresults.append(_rstd_tangent(spec, here, rstd, dx))
    return results, dresults


def _rstd_tangent(norm: Norm, x: Array, rstd: Array, dx: Any) -> Any:
    if type(dx) is ad.Zero:
        return ad.Zero(jax.typeof(rstd).to_tangent_aval())
    normal = x.astype(rstd.dtype) * _along_rows(norm, rstd)
    return -rstd * (rstd * jnp.mean(normal * dx.astype(rstd.dtype), norm.axes))


def _cast(tangent: Any, dtype: Any) -> Any:
    """Returns the tangent in `dtype`; a symbolic zero stays one."""
    if type(tangent) is ad.Zero:
        return ad.Zero(tangent.aval.update(dtype=dtype))
    return tangent.astype(dtype)


def _transpose_tangent(cts: Any, x: Any, *rest: Any, spec: Norm, order: Order) -> list[Any]:
    constants, linear = rest[: spec.has_scale + 1], rest[spec.has_scale + 1 :]
    nothing = [None] * (1 + len(constants))
    dy, *dh = cts
    dh = [ct for ct in dh if type(ct) is not ad.Zero]
    if type(dy) is ad.Zero:
        return nothing + [*dh, *[None] * (len(linear) - len(dh))]
    norm = replace(spec, has_residual=bool(dh), with_dscale=spec.moves[1], moves=(False, False))
    results = backward(norm, dy, x, *constants, *dh, order=order)
    results = [r for r, moved in zip(results, spec.moves) if moved]
    return nothing + [
        r.astype(t.aval.dtype) if ad.is_undefined_primal(t) else None
        for r, t in zip(results, linear, strict=True)
    ]


def _transpose_backward(
    cts: Any, dy: Any, x: Any, *rest: Any, spec: Norm, order: Order
) -> list[Any]:
    constants, dh = rest[: spec.has_scale + 1], rest[spec.has_scale + 1 :]
    given = [type(ct) is not ad.Zero for ct in cts]
    out: list[Any] = [None] * (2 + len(constants) + len(dh))
    if dh and ad.is_undefined_primal(dh[0]) and given[0]:
        out[-1] = cts[0].astype(dh[0].aval.dtype)
    if ad.is_undefined_primal(dy) and any(given):
        moving = [ct for ct in cts if type(ct) is not ad.Zero]
        norm = replace(
            spec,
            has_residual=False,
            with_dscale=False,
            moves=(given[0], any(given[1:])),
            out_dtype=dy.aval.dtype.name,
        )
        out[0] = tangent(norm, x, *constants, *moving, order=order)[0]
    return out


# ---------------------------------------------------------------- operations

tangent = Op(
    "rms_norm_tangent",
    define_tangent,
    dims=_tangent_dims,
    batched=_batched,
    transpose=_transpose_tangent,
)
backward = Op(
    "rms_norm_gradient",
    define_backward,
    dims=_backward_dims,
    body=_backward_body,
    leads=(1,),
    unfused=_backward_unfused,
    batched=_batched,
    transpose=_transpose_backward,
    without_last=lambda norm: replace(norm, with_dscale=False) if norm.with_dscale else None,
)
forward = Op(
    "rms_norm",
    define_forward,
    dims=_forward_dims,
    body=_forward_body,
    unfused=_forward_unfused,
    batched=_batched,
    jvp=_forward_jvp,
    backward=backward,
    without_last=lambda norm: replace(norm, with_rstd=False) if norm.with_rstd else None,
)
apply = Op("rms_norm_apply", define_apply, dims=_apply_dims, body=_apply_body, batched=_batched)
"""`(x[, scale], rstd) -> (y,)`: the forward once more, where rstd is known."""

pullback = Op(
    "rms_norm_pullback",
    define_backward,
    dims=_backward_dims,
    body=_pullback_body,
    leads=(1,),
    unfused=_backward_unfused,
    batched=_batched,
)
"""`(dy, x[, scale], rstd) -> (dx[, dscale][, value])`: `backward` for a layer that takes y.

Where with_value the pass also writes y, x normalised again, in dy's dtype. One of the results takes
dy's place in memory, which costs a copy if dy is needed afterwards: it is made for a dy that the
layer itself has made.
"""
