"""Compares errors of our layers with those of the framework's own."""

import jax.numpy as jnp
import numpy as np
from reference import Expected, wide


def assert_no_worse(ours, theirs, exact: Expected) -> None:
    """`ours` has the dtype of `theirs`, and an error that is not larger.

    Both round once to that dtype, so the errors of both go up to half an ulp of the largest value,
    whichever elements happen to be near a tie; and the order of a float32 sum of n terms moves the
    result by √n roundings or so.
    """
    assert ours.dtype == theirs.dtype
    eps = float(jnp.finfo(ours.dtype).eps)
    order = (8 + np.sqrt(exact.length)) * float(jnp.finfo(jnp.float32).eps) / 2
    tie = np.max(np.abs(exact.value), initial=0) * eps / 2
    allowed = max(error(theirs, exact), tie) + np.max(exact.size, initial=0) * order
    assert error(ours, exact) <= allowed, (error(ours, exact), error(theirs, exact), allowed)
    assert ours.shape == theirs.shape


def error(array, exact: Expected) -> float:
    """The largest error of an array."""
    return float(np.max(np.abs(wide(array) - exact.value), initial=0))


def assert_nearer(array, right: Expected, wrong: Expected) -> None:
    """`array` was computed by the order of casts of `right`, and not by that of `wrong`.

    On average over the elements: the roundings that the two do not share are of the size of the one
    they do.
    """
    mean = lambda exact: float(np.mean(np.abs(wide(array) - exact.value)))
    assert mean(right) < 0.8 * mean(wrong), (mean(right), mean(wrong))
