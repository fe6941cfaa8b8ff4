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
from typing import Any, Literal, get_args

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
    Dims,
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
from .cuda import combined
from .kernels import (
    apply_kernel,
    backward_apply_kernel,
    backward_kernel,
    forward_kernel,
    row_dots_kernel,
    row_statistics_kernel,
)
from .spec import (
    PARAMETERS,
    STATISTICS,
    Norm,
    add,
    against,
    centred_of,
    define_backward,
    define_forward,
    rows_of,
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
    options = eps, axis, scale_offset, dtype, implementation, cast
    results = _apply("rms_norm", x, scale, bias, *options, residual)
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
    options = eps, axis, scale_offset, dtype, implementation, cast
    y, rstd = _apply("rms_norm_with_rstd", x, scale, bias, *options)
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
    options = eps, axis, scale_offset, dtype, implementation, "after"
    results = _apply("layer_norm", x, scale, bias, *options, residual, centred=True)
    return results[0] if residual is None else tuple(results[:2])


# ---------------------------------------------------------------- checks and the call


def _apply(
    op: str,
    x: Any,
    scale: Any,
    bias: Any,
    eps: Any,
    axis: Any,
    scale_offset: Any,
    dtype: Any,
    implementation: Implementation,
    cast: Any,
    residual: Any = None,
    *,
    centred: bool = False,
) -> list[Array]:
    """Returns y, x + residual if there is one, and the statistics; or raises one clear error."""
    order, x = order_of(op, implementation), floating(op, "x", x)
    axes = dimensions(op, x, axis)
    given = {"scale": scale, "bias": bias}
    given = {name: floating(op, name, a) for name, a in given.items() if a is not None}
    more = [] if residual is None else [floating(op, "residual", residual)]
    out_dtype = floating_dtype(op, dtype, x.dtype)
    eps, offset = finite(op, "eps", eps, least=0), finite(op, "scale_offset", scale_offset)
    if not isinstance(cast, str) or cast not in get_args(Cast):
        raise ValueError(f"{op}: cast must be 'after' or 'before', got {cast!r}")
    heads, parameters = _aligned(op, x, axes, axis, given)
    if heads and scale is None:  # kernels find the owner of a row by its scale
        parameters, offset = [jnp.zeros_like(parameters[0]), *parameters], 1.0
    if more and more[0].shape != x.shape:
        raise ValueError(
            f"{op}: residual must have x's shape {x.shape}, got {more[0].shape}; "
            "broadcast it first with jnp.broadcast_to"
        )
    others = [*more, *parameters]
    dtypes = {out_dtype, *[a.dtype.name for a in (x, *others)]}
    norm = Norm(
        op=op,
        axes=axes,
        heads=heads,
        eps=eps,
        scale_offset=offset,
        out_dtype=out_dtype,
        compute="float64" if "float64" in dtypes else "float32",
        has_residual=bool(more),
        has_scale=scale is not None or bool(heads),
        has_bias=bias is not None,
        cast_before=cast == "before",
        centred=centred,
        with_mean=centred,
        with_rstd=True,
    )
    lead = vary(x, varying_axes(x, *others))
    if more and not any(jax.typeof(x).sharding.spec):
        lead = match(lead, more[0], range(x.ndim))
    (_, *dims), _ = dims_of("forward", norm, x.ndim)
    operands = [lead, *[match(a, lead, d) for a, d in zip(others, dims, strict=True)]]
    if order is None:
        return define_forward(norm, *operands)
    return forward(norm, *operands, order=order)


def _aligned(
    op: str, x: Array, axes: tuple[int, ...], axis: Any, given: dict[str, Array]
) -> tuple[tuple[int, ...], list[Array]]:
    """Returns the dimensions of x before `axes` along which parameters differ, and the parameters
    with these dimensions and `axes` alone.

    Raises:
      ValueError: for a parameter that does not broadcast against x.
    """
    size, first, heads = tuple(x.shape[a] for a in axes), axes[0], set()
    most = first if axes == tuple(range(first, x.ndim)) else 0  # dimensions before the axes
    for name, value in given.items():
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
    dims, parameters = tuple(sorted(heads)), []
    shape = *[x.shape[d] for d in dims], *size
    for value in given.values():
        if value.shape != shape:
            start = x.ndim - value.ndim
            value = jnp.squeeze(value, [d - start for d in range(start, first) if d not in heads])
            value = jnp.broadcast_to(value, shape)
        parameters.append(value)
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


def forward_body(norm: Norm, split: Split, x: Array, *rest: Array, order: Order) -> list[Array]:
    names, results = norm.names("forward")
    operands = [seen(norm, name, a) for name, a in zip(names, (x, *rest))]
    if split.over(norm.axes):
        values = _forward_over_devices(norm, split, operands, order)
    else:
        values = forward_kernel(local(norm), *operands, order=order)
    return [restored(norm, name, a, x.shape) for name, a in zip(results, values)]


def _forward_over_devices(
    norm: Norm, split: Split, operands: list[Array], order: Order
) -> list[Array]:
    """Each device has a part of every row: one exchange between two kernels."""
    h, *parameters = operands
    if norm.has_residual:
        h = add(norm, h, parameters.pop(0))
    *mean, rstd = statistics_over_devices(norm, split, h, order)
    y = apply_kernel(local(norm), h, *parameters, *mean, rstd, order=order)
    return [*y, *[h] * norm.has_residual, *mean * norm.with_mean, *[rstd] * norm.with_rstd]


def statistics_over_devices(norm: Norm, split: Split, h: Array, order: Order) -> list[Array]:
    """Returns `[mean,] rstd` of rows of which each device has a part, as kernels see them."""
    *mean, squares = row_statistics_kernel(local(norm), h, order=order)
    if norm.centred:
        own = jnp.stack([*mean, squares])
        means, parts = jnp.moveaxis(jax.lax.all_gather(own, split.over(norm.axes)), 1, 0)
        of_all, squares = combined(means, parts, jnp.asarray(h.shape[-1], squares.dtype))
        mean = [of_all]
    else:
        squares = split.psum(squares, norm.axes)
    return [*mean, rstd_of(norm, squares, split.count(norm.axes))]


def backward_body(
    norm: Norm,
    split: Split,
    dy: Array,
    x: Array,
    *rest: Array,
    order: Order,
) -> list[Array]:
    """dx, then what was asked for of dscale and dbias."""
    names, results = norm.names("backward")
    operands = [seen(norm, name, a) for name, a in zip(names, (dy, x, *rest))]
    if split.over(norm.axes):
        values = _backward_over_devices(norm, split, operands, order)
    else:
        values = backward_kernel(local(norm), *operands, order=order)
    dx, *more = [restored(norm, name, a, x.shape) for name, a in zip(results, values)]
    # dscale and dbias are summed over exactly the mesh axes that the rows use
    return [dx, *[split.psum(d, _parts(norm, x.ndim)[-2]) for d in more]]


def _backward_over_devices(
    norm: Norm, split: Split, operands: list[Array], order: Order
) -> list[Array]:
    """Each device has a part of every row: one sum over the devices between two kernels."""
    here = local(norm, count=float(split.count(norm.axes)))
    own = row_dots_kernel(here, *operands[: 2 + norm.has_scale + norm.centred], order=order)
    sums = split.psum(jnp.stack(own), norm.axes)
    return backward_apply_kernel(here, *operands, *sums, order=order)


# ---------------------------------------------------------------- sharding


@functools.lru_cache(maxsize=1024)
def dims_of(kernel: str, norm: Norm, ndim: int) -> Dims:
    """Returns the dimensions of x that operands and results of a kernel have, by their names."""
    rows = tuple([i for i in range(ndim) if i not in norm.axes])
    loose = Loose((*norm.heads, *norm.axes))
    of = dict.fromkeys(STATISTICS, rows) | dict.fromkeys(PARAMETERS, loose)
    operands, results = norm.names(kernel)
    of |= {name: tuple(range(ndim)) for name in (*operands, *results) if name not in of}
    return tuple([of[name] for name in operands]), tuple([of[name] for name in results])


def batched(norm: Norm, at: int) -> Norm:
    """The norm of an x with one more dimension, at `at`."""
    moved = lambda dims: tuple(d + (d >= at) for d in dims)
    return replace(norm, axes=moved(norm.axes), heads=moved(norm.heads))


# ---------------------------------------------------------------- vmap over a parameter


def _bare(norm: Norm, **changes: Any) -> Norm:
    """The norm without parameters."""
    return replace(norm, has_scale=False, has_bias=False, heads=(), scale_offset=0.0, **changes)


def _forward_unfused(norm: Norm, *operands: Array, order: Order) -> list[Array]:
    """Normalises on kernels; applies scale and bias of each example's own in plain JAX."""
    wide, large = against("forward", norm, operands), operands[: 1 + norm.has_residual]
    y, *others = forward(_bare(norm, out_dtype=norm.compute), *large, order=order)
    y = y * wide["W"]
    return [(y + wide["BIAS"] if norm.has_bias else y).astype(norm.out_dtype), *others]


def _backward_unfused(norm: Norm, dy: Array, x: Array, *rest: Array, order: Order) -> list[Array]:
    """dx on kernels, with dy scaled by each example's own scale; the sums in plain JAX."""
    wide, rows = against("backward", norm, (dy, x, *rest)), rows_of(norm, x)
    bare = _bare(norm, with_dscale=False, with_dbias=False)
    results = backward(bare, wide["DY"] * wide["W"], x, *rest[norm.has_scale :], order=order)
    if norm.with_dscale:
        results.append(jnp.sum(wide["DY"] * centred_of(wide) * wide["RSTD"], rows))
    return results + [jnp.sum(wide["DY"], rows)] * norm.with_dbias


# ---------------------------------------------------------------- derivative


@dataclasses.dataclass(frozen=True)
class NormFunction(Function):
    """A norm as a function (`core.op`) of h, which is x or x + residual, of scale and of bias.

    Kept are `(h, scale or None, statistics)`; results are y, h with a residual, and statistics.
    """

    norm: Norm
    order: Order

    def rows(self, kept: Any) -> Any:
        """Parameters have none."""
        return (0, -1, 0), [0, -1, -1]

    def with_batch(self) -> "NormFunction":
        """Returns the same of rows with one more dimension, the first."""
        return replace(self, norm=batched(self.norm, 0))

    def tangent(self, kept: Any, tangents: Sequence[Any]) -> list[Array]:
        """Returns that of the definition, which does not depend on the bias."""
        (h, scale, _), (dh, dscale, dbias) = kept, tangents
        norm = replace(self.norm, has_residual=False, has_bias=dbias is not None)
        bias = None if dbias is None else jnp.zeros_like(dbias)
        pairs = (h, dh), (scale, dscale), (bias, dbias)
        operands, moving = zip(*[pair for pair in pairs if pair[0] is not None])
        dy, *more = jvp_along(functools.partial(define_forward, norm), operands, moving)[1]
        own = [jnp.zeros_like(h) if dh is None else dh] * self.norm.has_residual
        return [dy, *own, *more]

    def gradients(self, cts: Any, kept: Any, likes: Sequence[Any]) -> list[Any]:
        """Returns those of h, scale and bias: y's by the backward, statistics' in plain JAX."""
        (h, scale, statistics), norm, (dy, *more) = kept, self.norm, cts
        dh = more.pop(0) if norm.has_residual else None
        found = [dh, None, None]
        if dy is not None:
            asked = [like is not None for like in likes[1:]]
            flags = {"has_residual": dh is not None, "has_bias": False, "with_mean": False}
            flags |= {"with_rstd": False, "with_dscale": asked[0], "with_dbias": asked[1]}
            operands = [a for a in (h, scale, *statistics, dh) if a is not None]
            given = backward(replace(norm, **flags), dy, *operands, order=self.order)
            found = [given.pop(0) if each else None for each in (True, *asked)]
        if any([ct is not None for ct in more]):
            bare = _bare(norm, has_residual=False)
            values, pull = jax.vjp(lambda h: define_forward(bare, h)[1:], h)
            zeros = map(jnp.zeros_like, values)
            (along,) = pull([zero if ct is None else ct for zero, ct in zip(zeros, more)])
            found[0] = along if found[0] is None else found[0] + along
        return [
            g if g is None or like is None else g.astype(like.dtype)
            for g, like in zip(found, likes)
        ]


def tangents_of(
    norm: Norm,
    args: Sequence[Array],
    dargs: Sequence[Any],
    results: Sequence[Array],
    kept: tuple[Array, Sequence[Array]],
    order: Order,
) -> list[Array]:
    """Returns the tangents of a norm's results, from those of (x[, residual][, scale][, bias]).

    `kept` are h = x (+ residual) and the statistics. The tangent takes h, so that its transpose,
    the backward kernel, adds the gradient of h itself.
    """
    (h, statistics), large, dh = kept, 1 + norm.has_residual, dargs[0]
    if norm.has_residual:
        parts = [t.astype(h.dtype) for t in dargs[:large] if moves(t)]
        dh = functools.reduce(jnp.add, parts) if parts else None
    scale, dscale = (args[large], dargs[large]) if norm.has_scale else (None, None)
    tangents = dh, dscale, dargs[-1] if norm.has_bias else None
    return linear(NormFunction(norm, order), (h, scale, list(statistics)), tangents, results)


def _forward_jvp(primals: Any, tangents: Any, *, spec: Norm, order: Order) -> Any:
    known = replace(spec, with_mean=spec.centred, with_rstd=True)
    y, *more = forward(known, *primals, order=order)
    h, statistics = more[: spec.has_residual], more[spec.has_residual :]
    wanted = [*[spec.with_mean] * spec.centred, spec.with_rstd]
    results = [y, *h, *[value for value, want in zip(statistics, wanted) if want]]
    kept = (*h, primals[0])[0], statistics
    return results, tangents_of(spec, primals, tangents, results, kept, order)


def without(norm: Norm, *flags: str) -> Norm | None:
    """The norm without the first of these results that it has."""
    found = next((flag for flag in flags if getattr(norm, flag)), None)
    return None if found is None else replace(norm, **{found: False})


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
