"""The norms and their derivatives in float64 numpy, and how far from them a computation may be.

The formulas are written for the normalised row x̂ = x · rstd.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Expected:
    """A value, and the size that its error is proportional to.

    `size` is the sum of the magnitudes of the terms that make up each element, which cancellation
    leaves behind; `length` is how many terms the longest sum on the way has; `rounded` is the sum
    of magnitudes that are rounded to the result's dtype on the way, the value's own where None.
    """

    value: Array
    size: Array
    length: int = 1
    rounded: Array | None = None

    def tolerance(self, result: np.dtype, compute: np.dtype) -> Array:
        """The error allowed in a `result` computed in `compute`.

        One rounding to the result's dtype, of half its epsilon. In the compute type, a sum of n
        terms is off by about √n roundings of Σ|terms| (a random walk; n of them at the very worst),
        and eight more roundings stand for the square, the mean, the reciprocal square root (up to
        two units in XLA), the products and the final difference. Results below the smallest
        normal number may be flushed to zero.
        """
        rounded = np.abs(self.value) if self.rounded is None else self.rounded
        rounding = rounded * float(jnp.finfo(result).eps) / 2
        arithmetic = self.size * (8 + np.sqrt(self.length)) * float(jnp.finfo(compute).eps) / 2
        return rounding + arithmetic + float(jnp.finfo(result).smallest_normal)

    def map(self, fn: Callable[[Array], Array]) -> "Expected":
        """The same after a rearrangement: a transpose, a slice, a stack."""
        rounded = None if self.rounded is None else fn(self.rounded)
        return Expected(fn(self.value), fn(self.size), self.length, rounded)


def assert_close(actual, expected: Expected, compute="float32", slack: float = 1.0) -> None:
    """`actual` within `slack` times the derived tolerance."""
    dtype, got = np.asarray(actual).dtype, np.asarray(actual).astype(np.float64)
    value = expected.value
    if got.shape != value.shape:
        raise AssertionError(f"shape {got.shape}, expected {value.shape}")
    error = np.abs(got - value)
    limit = slack * expected.tolerance(dtype, np.dtype(compute))
    if not np.all(error <= limit):
        worst = np.unravel_index(np.argmax(np.nan_to_num(error / limit, nan=np.inf)), got.shape)
        raise AssertionError(
            f"at {tuple(map(int, worst))} of {got.shape} {dtype}: got {got[worst]:.9g}, expected "
            f"{value[worst]:.9g}; off by {error[worst]:.3g}, allowed "
            f"{np.broadcast_to(limit, got.shape)[worst]:.3g}; {np.sum(~(error <= limit))} of "
            f"{got.size} elements are off"
        )


def wide(array) -> Array:
    """The array in float64."""
    return np.asarray(array).astype(np.float64)


def dims(x: Array, axes: int | Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The normalised dimensions and the others."""
    axes = tuple(sorted(a % x.ndim for a in np.atleast_1d(axes)))
    return axes, tuple(i for i in range(x.ndim) if i not in axes)


def add(x, residual) -> Array:
    """The sum in the promoted dtype of the two, correctly rounded: exact, not to a tolerance."""
    dtype = jnp.promote_types(x.dtype, residual.dtype)
    return (wide(x) + wide(residual)).astype(dtype)


# ---------------------------------------------------------------- formulas


def normalise(x, scale, *, eps=1e-6, axes=-1, scale_offset=0.0) -> tuple[Array, Array]:
    """`(y, rstd)`."""
    x = wide(x)
    axes, rows = dims(x, axes)
    rstd = 1 / np.sqrt((x * x).mean(axes) + eps)
    return x * np.expand_dims(rstd, axes) * _weight(scale, scale_offset, rows), rstd


def round_before_weight(x, scale, *, eps=1e-6, axes=-1, out="float32") -> tuple[Array, Array]:
    """y with x̂ rounded to the dtype of x first, and where it is known to the last bit.

    That is all but where 16 roundings in float32 move x̂ past a tie: about one element in 2¹² of
    bfloat16, in 2⁹ of float16.
    """
    normal = normalise(x, None, eps=eps, axes=axes)[0]
    near = [(normal * (1 + e * 2**-20)).astype(x.dtype) for e in (-1, 0, 1)]
    weight = _weight(scale, 0.0, dims(x, axes)[1]).astype(np.float32)
    y = (near[1].astype(np.float32) * weight).astype(jnp.dtype(out))
    return y, (near[0] == near[1]) & (near[1] == near[2])


def push(x, scale, dx, dscale, *, eps=1e-6, axes=-1, scale_offset=0.0) -> Array:
    """The tangent of y."""
    x, dx = wide(x), wide(dx)
    axes, rows = dims(x, axes)
    rstd = np.expand_dims(normalise(x, None, eps=eps, axes=axes)[1], axes)
    w = _weight(scale, scale_offset, rows)
    dw = 0.0 if dscale is None else np.expand_dims(wide(dscale), rows)
    normal = x * rstd
    along = (normal * dx).mean(axes, keepdims=True)
    return w * rstd * (dx - normal * along) + normal * dw


def pull(dy, x, scale, dh=None, *, eps=1e-6, axes=-1, scale_offset=0.0) -> tuple[Array, Array]:
    """`(dx, dscale)`; dh, the gradient of x that does not come through y, is added to dx."""
    dy, x = wide(dy), wide(x)
    axes, rows = dims(x, axes)
    rstd = np.expand_dims(normalise(x, None, eps=eps, axes=axes)[1], axes)
    g, normal = dy * _weight(scale, scale_offset, rows), x * rstd
    dx = rstd * (g - normal * (normal * g).mean(axes, keepdims=True))
    return dx + (0 if dh is None else wide(dh)), (dy * normal).sum(rows)


def _weight(scale, offset, rows):
    return np.ones(()) if scale is None else np.expand_dims(wide(scale) + offset, rows)


# ---------------------------------------------------------------- expectations


def forward(x, scale=None, **options) -> tuple[Expected, Expected]:
    """y and rstd."""
    y, rstd = normalise(x, scale, **options)
    n = x.size // max(rstd.size, 1)
    offset = options.get("scale_offset", 0.0)
    if scale is not None and offset:  # scale + offset may cancel: one rounding of the larger
        parts = np.abs(wide(scale)) + abs(offset)
        size = np.abs(normalise(x, parts, **{**options, "scale_offset": 0.0})[0])
    else:
        size = np.abs(y)
    return Expected(y, size, n), Expected(rstd, rstd, n)


def tangent(x, scale, dx, dscale=None, **options) -> Expected:
    """The tangent of y."""
    y = push(x, scale, dx, dscale, **options)
    rstd = normalise(x, None, **{**options, "scale_offset": 0.0})[1]
    axes, rows = dims(np.asarray(x), options.get("axes", -1))
    normal, rstd = np.abs(wide(x)) * np.expand_dims(rstd, axes), np.expand_dims(rstd, axes)
    dx, w = np.abs(wide(dx)), _magnitude(scale, options, rows)
    dw = 0.0 if dscale is None else np.abs(np.expand_dims(wide(dscale), rows))
    size = w * rstd * (dx + normal * (normal * dx).mean(axes, keepdims=True)) + normal * dw
    return Expected(y, size, x.size // max(rstd.size, 1))


def backward(dy, x, scale=None, dh=None, **options) -> tuple[Expected, Expected]:
    """dx and dscale."""
    dx, dscale = pull(dy, x, scale, dh, **options)
    axes, rows = dims(np.asarray(x), options.get("axes", -1))
    rstd = np.expand_dims(normalise(x, None, **{**options, "scale_offset": 0.0})[1], axes)
    dy, normal = np.abs(wide(dy)), np.abs(wide(x)) * rstd
    g = dy * _magnitude(scale, options, rows)
    size = rstd * (g + normal * (normal * g).mean(axes, keepdims=True))
    size = size + (0 if dh is None else np.abs(wide(dh)))
    n = x.size // max(rstd.size, 1)
    # each term of dscale has an rstd, itself a sum of n terms
    return Expected(dx, size, n), Expected(dscale, (dy * normal).sum(rows), rstd.size + n)


def plus(expected: Expected, bias, axes) -> Expected:
    """The expectation with a bias of the shape of the axes added, or as it is for None."""
    if bias is None:
        return expected
    shift = np.expand_dims(wide(bias), dims(expected.value, axes)[1])
    return Expected(expected.value + shift, expected.size + np.abs(shift), expected.length)


def sum_of_rows(dy, axes) -> Expected:
    """dbias."""
    dy, rows = wide(dy), dims(dy, axes)[1]
    terms = dy.size // max(1, dy.sum(rows).size)
    return Expected(dy.sum(rows), np.abs(dy).sum(rows), terms)


def _magnitude(scale, options, rows):
    offset = abs(options.get("scale_offset", 0.0))
    return np.ones(()) if scale is None else np.expand_dims(np.abs(wide(scale)) + offset, rows)


# ---------------------------------------------------------------- LayerNorm
# x̂ = (x − mean) · rstd. Both x and the mean are rounded: what is left of their difference has an
# error of eps · (|x| + mean|x|), which is therefore the size of (x − mean) in every tolerance. A
# variance that was a difference of means would have one of eps · mean², far beyond it.


def layer_normal(x, axes, eps=1e-6) -> tuple[Array, Array, Array]:
    """x̂, rstd and mean, the last two against x."""
    mean = wide(x).mean(axes, keepdims=True)
    centred = wide(x) - mean
    rstd = 1 / np.sqrt((centred * centred).mean(axes, keepdims=True) + eps)
    return centred * rstd, rstd, mean


def _layer(x, scale, *, eps=1e-6, axes=-1, scale_offset=0.0):
    """x̂, rstd, w, the magnitudes of x̂ and of w, elements of a row, the axes and the rows."""
    axes, rows = dims(np.asarray(x), axes)
    normal, rstd, _ = layer_normal(x, axes, eps)
    magnitude = (np.abs(wide(x)) + np.abs(wide(x)).mean(axes, keepdims=True)) * rstd
    larger = _magnitude(scale, {"scale_offset": scale_offset}, rows)
    n = x.size // max(rstd.size, 1)
    return normal, rstd, _weight(scale, scale_offset, rows), magnitude, larger, n, axes, rows


def layer_forward(x, scale=None, bias=None, **options) -> Expected:
    """y."""
    normal, _, w, magnitude, larger, n, _, rows = _layer(x, scale, **options)
    b = 0.0 if bias is None else np.expand_dims(wide(bias), rows)
    return Expected(normal * w + b, magnitude * larger + np.abs(b), n)


def layer_pull(dy, x, scale, **options) -> tuple[Array, Array, Array]:
    """`(dx, dscale, dbias)`, without what reaches x by another way."""
    normal, rstd, w, _, _, _, axes, rows = _layer(x, scale, **options)
    dy, mean = wide(dy), lambda a: a.mean(axes, keepdims=True)
    g = dy * w
    dx = rstd * (g - mean(g) - normal * mean(g * normal))
    return dx, (dy * normal).sum(rows), dy.sum(rows)


def layer_backward(dy, x, scale=None, dh=None, **options) -> tuple[Expected, Expected, Expected]:
    """dx, dscale and dbias."""
    _, rstd, _, magnitude, larger, n, axes, rows = _layer(x, scale, **options)
    dx, dscale, dbias = layer_pull(dy, x, scale, **options)
    dh = np.zeros(()) if dh is None else wide(dh)
    dy, mean = np.abs(wide(dy)), lambda a: a.mean(axes, keepdims=True)
    g = dy * larger
    size = rstd * (g + mean(g) + magnitude * mean(g * magnitude)) + np.abs(dh)
    terms = rstd.size + n  # each term of dscale has an rstd, itself a sum of n terms
    return (
        Expected(dx + dh, size, n),
        Expected(dscale, (dy * magnitude).sum(rows), terms),
        Expected(dbias, dy.sum(rows), terms),
    )


def layer_tangent(x, scale, dx, dscale=None, dbias=None, **options) -> Expected:
    """The tangent of y."""
    normal, rstd, w, magnitude, larger, n, axes, rows = _layer(x, scale, **options)
    dx, mean = wide(dx), lambda a: a.mean(axes, keepdims=True)
    of = lambda d: np.zeros(()) if d is None else np.expand_dims(wide(d), rows)
    along = dx - mean(dx) - normal * mean(normal * dx)
    size = np.abs(dx) + mean(np.abs(dx)) + magnitude * mean(magnitude * np.abs(dx))
    value = w * rstd * along + normal * of(dscale) + of(dbias)
    size = larger * rstd * size + magnitude * np.abs(of(dscale)) + np.abs(of(dbias))
    return Expected(value, size, n)
