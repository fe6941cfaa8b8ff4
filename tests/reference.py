"""RMSNorm and its derivatives in float64 numpy, and how far from them a computation may be.

The formulas are written for the normalised row x̂ = x · rstd, and take complex arrays, so that a
derivative of any of them is the imaginary part of a complex step: exact to float64.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Expected:
    """A value, and what its error is proportional to.

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
    """float64, or complex as it is."""
    array = np.asarray(array)
    return array if np.iscomplexobj(array) else array.astype(np.float64)


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


def complex_step(fn: Callable[[Array], Array], at, direction) -> Array:
    """The derivative of analytic `fn` along `direction`, without cancellation."""
    return fn(wide(at) + 1e-30j * wide(direction)).imag / 1e-30


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


def _magnitude(scale, options, rows):
    offset = abs(options.get("scale_offset", 0.0))
    return np.ones(()) if scale is None else np.expand_dims(np.abs(wide(scale)) + offset, rows)
