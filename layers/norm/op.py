"""RMSNorm and LayerNorm: functions, definition, kernels, sharding and derivative.

With w = scale + scale_offset, all sums in float32 (float64 where an operand is float64):

    y = x̂ · w + bias            x̂ = (x − mean) · rstd
    rstd = 1 / sqrt(mean((x − mean)²) + eps)
    dx = rstd · (g − mean(g) − x̂ · mean(g · x̂))      g = dy · w
    dscale = Σ_rows dy · x̂      dbias = Σ_rows dy

RMSNorm is the same with 0 for mean(x) and mean(g): a norm that is not `centred`.

`cast="before"` rounds x̂ to the dtype of x in y; the derivative is as if it did not round.

The variance is the mean of squared differences, never a difference of means, which loses all where
the mean is large. The mean that the backward is given is rounded to the type of the sums; the
forward also takes what that rounding has lost.

References: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467; Ba, Kiros
and Hinton, "Layer Normalization", arXiv:1607.06450.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...native.implementation import Implementation, Order
from ..core.arguments import dimensions, finite, floating, floating_dtype, order_of
from ..core.derivative import Function, linear
from ..core.op import (
    Batching,
    Derivative,
    Loose,
    Op,
    Placement,
    Split,
    jvp_along,
    match,
    moves,
    vary,
    varying_axes,
)
from . import kernels
from .cuda import combined
from .spec import (
    OPERANDS,
    PARAMETERS,
    RESULTS,
    STATISTICS,
    Norm,
    add,
    against,
    centred_of,
    define_backward,
    define_forward,
    forward_results,
    gradients_of_parameters,
    results_of,
    rstd_of,
)

Cast = Literal["after", "before"]
"""When x̂ is rounded: after it is multiplied by scale, or before as well."""


def rms_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    cast: Cast = "after",
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Any:
    """Divides x by its root mean square over `axis`, multiplies by `scale` and adds `bias`.

        y = x / sqrt(mean(x²) + eps) · (scale + scale_offset) + bias

    With a residual it normalises x + residual, the step between two blocks of a transformer, and
    also returns the sum: one pass over the activations in each direction.

    Computed in float32 (float64 if an operand or `dtype` is float64); the gradients of scale and
    bias are summed in that type and returned in their own. Rows may be split over any mesh axes
    without communication; where a normalised axis is split, one value a row is summed over the
    devices. The gradients of parameters cross the devices that have rows of the same parameters.

    Args:
      x: any shape; float64, float32, bfloat16 or float16.
      scale: the shape of x's normalised axes, in increasing order of axis; any of those dtypes.
        Where these are x's last axes, scale may have more dimensions before them, which broadcast
        against x as in NumPy: (heads, features) is a scale for each head of x (..., heads,
        features), and (batch, 1, features), `scale[:, None]`, one for each example of x (batch,
        tokens, features), as in AdaLN. Where these are not x's first dimensions kernels transpose
        x first; Pallas kernels take one scale for all rows.
      bias: as scale; the two broadcast against each other.
      residual: added to x; x's shape and any of those dtypes. The sum is rounded to the dtype that
        x and residual promote to before it is normalised.
      eps: added to the mean square; finite, at least 0.
      axis: the normalised axis, or several.
      scale_offset: added to scale; 1 where checkpoints store scale − 1, and in DiT's `modulate`.
      cast: "after" rounds once, the result, to `dtype`. "before" rounds x / sqrt(mean(x²) + eps)
        to x's dtype (the sum's, with a residual) before it is multiplied, as Hugging Face's Llama
        does: the same bits, but where another order of the mean's sum moves a value past a tie.
        This rounding has no derivative.
      dtype: of y; x's where None.
      implementation: None, "native", "pallas" or "xla", or several to try in order; see
        `normfuse info` for what serves here.

    Returns:
      y, an array of x's shape and sharding; with a residual `(y, x + residual)`.

    Raises:
      TypeError: for integer or complex operands, or an eps that is not a number.
      ValueError: for a scale, bias or residual that does not fit, an axis out of range, an eps that
        is negative or not finite, or an unknown cast or implementation.
      NotImplementedError: if `implementation` asks for what cannot serve; an ExceptionGroup of
        them where it names several.

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    >>> import jax.numpy as jnp
    >>> from normfuse import rms_norm
    >>> x = jnp.array([3.0, 4.0])
    >>> [round(value, 3) for value in rms_norm(x, jnp.array([1.0, 2.0])).tolist()]
    [0.849, 2.263]
    >>> y, new_residual = rms_norm(x, residual=x)
    >>> [round(value, 3) for value in y.tolist()], new_residual.tolist()
    ([0.849, 1.131], [6.0, 8.0])
    """
    options = Options(eps, axis, scale_offset, dtype, implementation, cast)
    results = _apply("rms_norm", x, residual, scale, bias, options)
    return results[0] if residual is None else tuple(results[:2])


def rms_norm_with_rstd(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    cast: Cast = "after",
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """`rms_norm`, and the reciprocal root mean square it multiplied by.

        rstd = 1 / sqrt(mean(x²) + eps)        y = x · rstd · (scale + scale_offset) + bias

    Takes and raises what `rms_norm` does without a residual.

    Returns:
      `(y, rstd)`: rstd has the shape of x without the normalised axes, float32 (or float64).

    >>> import jax.numpy as jnp
    >>> from normfuse import rms_norm_with_rstd
    >>> y, rstd = rms_norm_with_rstd(jnp.array([[3.0, 4.0], [6.0, 8.0]]), eps=0.0)
    >>> [round(value, 3) for value in rstd.tolist()]
    [0.283, 0.141]
    """
    options = Options(eps, axis, scale_offset, dtype, implementation, cast)
    y, _, _, rstd = _apply("rms_norm_with_rstd", x, None, scale, bias, options)
    return y, rstd


def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Any:
    """Subtracts the mean of x over `axis`, divides by the standard deviation, scales and shifts.

        y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) · (scale + scale_offset) + bias

    Takes, returns and raises what `rms_norm` does, in as many passes; two values a row are
    exchanged where a normalised axis is split. The mean is computed first, so that a mean much
    larger than the deviation costs no digits of it.

    References:
      Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450; Peebles and Xie, "Scalable
      Diffusion Models with Transformers", arXiv:2212.09748 (AdaLN).

    >>> import jax.numpy as jnp
    >>> from normfuse import layer_norm
    >>> y = layer_norm(jnp.array([3.0, 5.0]), jnp.array([1.0, 2.0]), jnp.array([0.0, 1.0]))
    >>> [round(value, 3) for value in y.tolist()]
    [-1.0, 3.0]
    >>> x, scale = jnp.array([[[3.0, 5.0]], [[5.0, 1.0]]]), jnp.array([[0.0, 0.0], [1.0, 1.0]])
    >>> y = layer_norm(x, scale[:, None], scale_offset=1.0)       # a scale of each example
    >>> [round(value, 3) for value in y.ravel().tolist()]
    [-1.0, 1.0, 2.0, -2.0]
    """
    options = Options(eps, axis, scale_offset, dtype, implementation, centred=True)
    results = _apply("layer_norm", x, residual, scale, bias, options)
    return results[0] if residual is None else tuple(results[:2])


# ---------------------------------------------------------------- checks and the call


class Options(NamedTuple):
    """The options of a norm, as its caller gave them."""

    eps: Any
    axis: Any
    scale_offset: Any
    dtype: Any
    implementation: Implementation
    cast: Any = "after"
    centred: bool = False


def _apply(op: str, x: Any, residual: Any, scale: Any, bias: Any, options: Options) -> list[Any]:
    """Returns y, x + residual or None, mean and rstd; or raises one clear error."""
    order, x = order_of(op, options.implementation), floating(op, "x", x)
    axes, cast, offset = dimensions(op, x, options.axis), options.cast, options.scale_offset
    arrays = {"scale": scale, "bias": bias}
    arrays = {name: floating(op, name, a) for name, a in arrays.items() if a is not None}
    residual = residual if residual is None else floating(op, "residual", residual)
    out_dtype = floating_dtype(op, options.dtype, x.dtype)
    eps, offset = finite(op, "eps", options.eps, least=0), finite(op, "scale_offset", offset)
    if not isinstance(cast, str) or cast not in get_args(Cast):
        raise ValueError(f"{op}: cast must be 'after' or 'before', got {cast!r}")
    heads, parameters = _aligned(op, x, axes, options.axis, arrays)
    if heads and scale is None:  # kernels find the owner of a row by its scale
        parameters["scale"], offset = jnp.zeros_like(parameters["bias"]), 1.0
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual must have x's shape {x.shape}, got {residual.shape}; "
            "broadcast it first with jnp.broadcast_to"
        )
    operands: list[Any] = [x, residual, parameters.get("scale"), parameters.get("bias")]
    dtypes = {out_dtype, *[a.dtype.name for a in operands if a is not None]}
    norm = Norm(
        op=op,
        axes=axes,
        heads=heads,
        eps=eps,
        scale_offset=offset,
        out_dtype=out_dtype,
        compute="float64" if "float64" in dtypes else "float32",
        cast_before=cast == "before",
        centred=options.centred,
        with_mean=options.centred,
        with_rstd=True,
    )
    lead = vary(x, varying_axes(*operands))
    if residual is not None and not any(jax.typeof(x).sharding.spec):
        lead = match(lead, residual, range(x.ndim))
    dims, _ = dims_of("forward", norm, *[None if a is None else a.ndim for a in operands])
    operands = [None if a is None else match(a, lead, d) for a, d in zip(operands, dims)]
    operands[0] = lead
    if order is None:
        return define_forward(norm, *operands)
    return forward(norm, *operands, order=order)


def _aligned(
    op: str, x: Array, axes: tuple[int, ...], axis: Any, arrays: dict[str, Array]
) -> tuple[tuple[int, ...], dict[str, Array]]:
    """Returns the dimensions of x before `axes` along which parameters differ, and the parameters
    with these dimensions and `axes` alone.

    Raises:
      ValueError: for a parameter that does not broadcast against x.
    """
    size, first, heads = tuple(x.shape[a] for a in axes), axes[0], set()
    most = first if axes == tuple(range(first, x.ndim)) else 0  # dimensions before the axes
    for name, value in arrays.items():
        count = value.ndim - len(axes)
        own, of_x = value.shape[: max(0, count)], x.shape[first - count : first]
        fits = 0 <= count <= most and value.shape[count:] == size
        if not (fits and all(n in (1, m) for n, m in zip(own, of_x))):
            before = ", and any dimensions before it must broadcast against x's" if most else ""
            raise ValueError(
                f"{op}: {name} must have the shape of x's normalised axes, {size}{before}; got "
                f"{value.shape} for x of shape {x.shape} and axis={axis}"
                + _remedy(name, value, x, size)
            )
        heads |= {first - count + i for i, n in enumerate(own) if n != 1}
    dims, parameters = tuple(sorted(heads)), {}
    shape = *[x.shape[d] for d in dims], *size
    for name, value in arrays.items():
        if value.shape != shape:
            start = x.ndim - value.ndim
            value = jnp.squeeze(value, [d - start for d in range(start, first) if d not in heads])
            value = jnp.broadcast_to(value, shape)
        parameters[name] = value
    return dims, parameters


def _remedy(name: str, value: Array, x: Array, size: tuple[int, ...]) -> str:
    """Returns the cure for a parameter that broadcasts, but not as ours do; or ""."""
    count = value.ndim - len(size)
    if 0 < count < x.ndim - len(size) and value.shape == (*x.shape[:count], *size):
        index = ", ".join([":"] * count + ["None"] * (x.ndim - value.ndim))
        return f"; write {name}[{index}] for one of each example"
    if count <= 0 and all(n in (1, m) for n, m in zip(value.shape[::-1], size[::-1])):
        return f"; write jnp.broadcast_to({name}, {size})"
    return ""


# ---------------------------------------------------------------- one device's share


def _parts(norm: Norm, ndim: int) -> list[tuple[int, ...]]:
    """Returns the dimensions of x that each dimension of what kernels see is made of."""
    rows = tuple([d for d in range(ndim) if d not in (*norm.heads, *norm.axes)])
    return [*[norm.heads] * bool(norm.heads), rows, norm.axes]


def seen(norm: Norm, name: str, array: Array) -> Array:
    """Returns the array of this name as kernels see it.

    That is (rows, n), (rows,) or (n,), or where scales differ (examples, tokens, n), (examples,
    tokens) or (examples, n): a reshape, which costs nothing, where x's dimensions are in this
    order, and otherwise a transpose before it.
    """
    if name in PARAMETERS:
        shape = [math.prod(array.shape[: len(norm.heads)])] * bool(norm.heads)
        return array.reshape(*shape, -1)
    if name in STATISTICS:
        return seen(norm, "X", jnp.expand_dims(array, norm.axes)).squeeze(-1)
    parts = _parts(norm, array.ndim)
    sizes = [math.prod([array.shape[d] for d in dims]) for dims in parts]
    return array.transpose([d for dims in parts for d in dims]).reshape(sizes)


def restored(norm: Norm, name: str, array: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `seen`, for x of this shape."""
    if name in PARAMETERS:
        return array.reshape([shape[a] for a in (*norm.heads, *norm.axes)])
    if name in STATISTICS:
        shape = tuple(1 if i in norm.axes else n for i, n in enumerate(shape))
        return restored(norm, "X", array, shape).squeeze(norm.axes)
    order = [d for dims in _parts(norm, len(shape)) for d in dims]
    return array.reshape([shape[d] for d in order]).transpose(np.argsort(order))


def are_examples(norm: Norm) -> bool:
    """Returns True if scale has x's first dimensions, with others of x between them and `axes`."""
    count = len(norm.heads)
    return norm.heads == tuple(range(count)) and norm.axes[0] > count > 0


def local(norm: Norm, **changes: Any) -> Norm:
    """The norm as kernels see it."""
    axes, heads = ((2,), (0,)) if norm.heads else ((1,), ())
    return replace(norm, axes=axes, heads=heads, **changes)


def seen_by(kernel: str, norm: Norm, operands: Sequence[Any]) -> list[Any]:
    pairs = zip(OPERANDS[kernel], operands, strict=True)
    return [None if a is None else seen(norm, name, a) for name, a in pairs]


def restored_of(
    kernel: str, norm: Norm, values: Sequence[Any], shape: tuple[int, ...]
) -> list[Any]:
    pairs = zip(RESULTS[kernel], values, strict=True)
    return [None if a is None else restored(norm, name, a, shape) for name, a in pairs]


def forward_body(norm: Norm, split: Split, *operands: Any, order: Order) -> list[Any]:
    here, shape = seen_by("forward", norm, operands), operands[0].shape
    if split.over(norm.axes):
        values = _forward_over_devices(norm, split, *here, order=order)
    else:
        values = kernels.forward_kernel(local(norm), *here, order=order)
    return restored_of("forward", norm, values, shape)


def _forward_over_devices(
    norm: Norm, split: Split, x: Array, residual: Any, scale: Any, bias: Any, order: Order
) -> list[Any]:
    """Each device has a part of every row: one exchange between two kernels."""
    h = x if residual is None else add(norm, x, residual)
    mean, rstd = statistics_over_devices(norm, split, h, order)
    (y,) = kernels.apply_kernel(local(norm), h, scale, bias, mean, rstd, order=order)
    return [y, *forward_results(norm, residual, h, mean, rstd)]


def statistics_over_devices(
    norm: Norm, split: Split, h: Array, order: Order
) -> tuple[Array | None, Array]:
    """Returns mean and rstd of rows of which each device has a part, as kernels see them."""
    mean, squares = kernels.row_statistics_kernel(local(norm), h, order=order)
    if mean is None:
        squares = split.psum(squares, norm.axes)
    else:
        own = jnp.stack([mean, squares])
        means, parts = jnp.moveaxis(jax.lax.all_gather(own, split.over(norm.axes)), 1, 0)
        mean, squares = combined(means, parts, jnp.asarray(h.shape[-1], squares.dtype))
    return mean, rstd_of(norm, squares, split.count(norm.axes))


def backward_body(norm: Norm, split: Split, *operands: Any, order: Order) -> list[Any]:
    """Returns dx, and those of dscale and dbias that are asked for."""
    here, x = seen_by("backward", norm, operands), operands[1]
    if split.over(norm.axes):
        values = _backward_over_devices(norm, split, here, order)
    else:
        values = kernels.backward_kernel(local(norm), *here, order=order)
    dx, *more = restored_of("backward", norm, values, x.shape)
    # dscale and dbias are summed over exactly the mesh axes that the rows use
    rows = _parts(norm, x.ndim)[-2]
    return [dx, *[None if d is None else split.psum(d, rows) for d in more]]


def _backward_over_devices(
    norm: Norm, split: Split, operands: list[Any], order: Order
) -> list[Any]:
    """Each device has a part of every row: one sum over the devices between two kernels."""
    here, (dy, x, scale, mean, *_) = local(norm, count=float(split.count(norm.axes))), operands
    sums, dots = kernels.row_dots_kernel(here, dy, x, scale, mean, order=order)
    own = [a for a in (sums, dots) if a is not None]
    *sums, dots = split.psum(jnp.stack(own), norm.axes)
    return kernels.backward_apply_kernel(here, *operands, *(sums or [None]), dots, order=order)


# ---------------------------------------------------------------- sharding


@functools.lru_cache(maxsize=1024)
def dims_of(kernel: str, norm: Norm, *ndims: int | None) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the dimensions of x that a kernel's operands and results have; None without one."""
    names = {name: n for name, n in zip(OPERANDS[kernel], ndims) if n is not None}
    every = tuple(range(names["X"]))
    rows = tuple([i for i in every if i not in norm.axes])
    dims: dict[str, Any] = dict.fromkeys(STATISTICS, rows)
    dims |= dict.fromkeys(PARAMETERS, Loose((*norm.heads, *norm.axes)))
    results = results_of(kernel, norm, names)
    return (
        tuple([dims.get(name, every) if name in names else None for name in OPERANDS[kernel]]),
        tuple([dims.get(name, every) if name in results else None for name in RESULTS[kernel]]),
    )


def batched(norm: Norm, at: int) -> Norm:
    moved = lambda dims: tuple(d + (d >= at) for d in dims)
    return replace(norm, axes=moved(norm.axes), heads=moved(norm.heads))


# ---------------------------------------------------------------- vmap over a parameter


def _bare(norm: Norm, **changes: Any) -> Norm:
    """The norm of an x without parameters."""
    return replace(norm, heads=(), scale_offset=0.0, **changes)


def _forward_unfused(
    norm: Norm, x: Array, residual: Any, scale: Any, bias: Any, *, order: Order
) -> list[Any]:
    """Normalises on kernels; applies scale and bias of each example's own in plain JAX."""
    wide = against("forward", norm, (x, residual, scale, bias))
    bare = _bare(norm, out_dtype=norm.compute)
    y, *others = forward(bare, x, residual, None, None, order=order)
    y = y * wide["W"]
    return [(y if bias is None else y + wide["BIAS"]).astype(norm.out_dtype), *others]


def _backward_unfused(norm: Norm, *operands: Any, order: Order) -> list[Any]:
    """dx on kernels, with dy scaled by each example's own scale; the sums in plain JAX."""
    wide, (_, x, _, *others) = against("backward", norm, operands), operands
    bare = _bare(norm, with_dscale=False, with_dbias=False)
    dx, *_ = backward(bare, wide["DY"] * wide["W"], x, None, *others, order=order)
    return [dx, *gradients_of_parameters(norm, wide, centred_of(wide) * wide["RSTD"])]


# ---------------------------------------------------------------- derivative


@dataclasses.dataclass(frozen=True)
class NormFunction(Function):
    """A norm as a function of h, which is x or x + residual, of scale and of bias.

    Kept are `(h, scale, mean, rstd)`; results are y, h if `with_h`, and statistics.
    """

    norm: Norm
    order: Order
    with_h: bool

    def rows(self, kept: Any) -> Any:
        return (0, -1, 0, 0), [0, -1, -1]

    def with_batch(self) -> "NormFunction":
        return replace(self, norm=batched(self.norm, 0))

    def tangent(self, kept: Any, tangents: Sequence[Any]) -> list[Array]:
        """The tangent of the definition, which does not depend on the bias."""
        (h, scale, *_), (dh, dscale, dbias) = kept, tangents
        bias = None if dbias is None else jnp.zeros_like(dbias)
        define = functools.partial(define_forward, self.norm)
        dy, _, *more = jvp_along(define, (h, None, scale, bias), (dh, None, dscale, dbias))[1]
        own = [jnp.zeros_like(h) if dh is None else dh] * self.with_h
        return [dy, *own, *[d for d in more if d is not None]]

    def gradients(self, cts: Any, kept: Any, likes: Sequence[Any]) -> list[Any]:
        """The gradients of h, scale and bias: y's by the backward, statistics' in plain JAX."""
        (h, scale, mean, rstd), norm, (dy, *more) = kept, self.norm, cts
        dh = more.pop(0) if self.with_h else None
        gradients = [dh, None, None]
        if dy is not None:
            dscale, dbias = (like is not None for like in likes[1:])
            asked = replace(_without_statistics(norm), with_dscale=dscale, with_dbias=dbias)
            gradients = backward(asked, dy, h, scale, mean, rstd, dh, order=self.order)
        if any([ct is not None for ct in more]):
            of_h = lambda h: [a for a in define_forward(_bare(norm), h)[1:] if a is not None]
            values, pull = jax.vjp(of_h, h)
            zeros = map(jnp.zeros_like, values)
            (along,) = pull([zero if ct is None else ct for zero, ct in zip(zeros, more)])
            gradients[0] = along if gradients[0] is None else gradients[0] + along
        return [
            g if g is None or like is None else g.astype(like.dtype)
            for g, like in zip(gradients, likes)
        ]


def _without_statistics(norm: Norm) -> Norm:
    return replace(norm, with_mean=False, with_rstd=False)


def tangents_of(
    norm: Norm,
    args: Sequence[Any],
    dargs: Sequence[Any],
    results: Sequence[Any],
    kept: Sequence[Any],
    order: Order,
) -> list[Any]:
    """Returns the tangents of a norm's results, from those of x, residual, scale and bias.

    `kept` are h = x (+ residual), mean and rstd. The tangent takes h, so that its transpose, the
    backward kernel, adds the gradient of h itself.
    """
    (_, residual, scale, _), (h, mean, rstd) = args, kept
    dx, dresidual, dscale, dbias = dargs
    if residual is not None:
        parts = [t.astype(h.dtype) for t in (dx, dresidual) if moves(t)]
        dx = functools.reduce(jnp.add, parts) if parts else None
    function = NormFunction(norm, order, residual is not None)
    flat, tree = jax.tree.flatten(list(results))
    return tree.unflatten(linear(function, (h, scale, mean, rstd), (dx, dscale, dbias), flat))


def _forward_jvp(primals: Any, tangents: Any, *, spec: Norm, order: Order) -> Any:
    known = replace(spec, with_mean=spec.centred, with_rstd=True)
    y, h, mean, rstd = forward(known, *primals, order=order)
    results = [y, h, mean if spec.with_mean else None, rstd if spec.with_rstd else None]
    kept = primals[0] if h is None else h, mean, rstd
    return results, tangents_of(spec, primals, tangents, results, kept, order)


def without(norm: Norm, *flags: str) -> Norm | None:
    """The norm without the first of these results that it has."""
    flag = next((flag for flag in flags if getattr(norm, flag)), None)
    return None if flag is None else replace(norm, **{flag: False})


# ---------------------------------------------------------------- operations

backward = Op(
    "norm_gradient",
    define_backward,
    Placement(functools.partial(dims_of, "backward"), backward_body, leads=(1,)),
    Batching(batched, unfused=_backward_unfused),
    Derivative(linear=True),
    without_last=lambda norm: without(norm, "with_dbias", "with_dscale"),
)
forward = Op(
    "norm",
    define_forward,
    Placement(functools.partial(dims_of, "forward"), forward_body),
    Batching(batched, unfused=_forward_unfused),
    Derivative(jvp=_forward_jvp),
    without_last=lambda norm: without(norm, "with_rstd", "with_mean"),
)
