"""The reference is held to a derivation of its own: complex steps and the adjoint identity."""

import numpy as np
import pytest
import reference
from reference import Expected, assert_close

OPTIONS = [{}, {"axes": 1, "scale_offset": 1.0}, {"axes": (0, 2), "eps": 0.1}]


def operands(options, rng):
    x = rng.standard_normal((4, 5, 6))
    axes, _ = reference.dims(x, options.get("axes", -1))
    scale = rng.standard_normal([x.shape[a] for a in axes])
    return x, scale, rng.standard_normal(x.shape), rng.standard_normal(scale.shape)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_have_mean_square_one(options, rng):
    x, *_ = operands(options, rng)
    y, rstd = reference.normalise(x, None, **{**options, "eps": 0.0, "scale_offset": 0.0})
    np.testing.assert_allclose((y * y).mean(options.get("axes", -1)), np.ones(rstd.shape))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tangent_is_a_complex_step(options, rng):
    x, scale, dx, dscale = operands(options, rng)
    step = lambda fn, at, d: reference.complex_step(fn, at, d)
    along_x = step(lambda x: reference.normalise(x, scale, **options)[0], x, dx)
    along_scale = step(lambda s: reference.normalise(x, s, **options)[0], scale, dscale)
    got = reference.push(x, scale, dx, dscale, **options)
    np.testing.assert_allclose(got, along_x + along_scale, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward_is_the_adjoint_of_the_tangent(options, rng):
    x, scale, dx, dscale = operands(options, rng)
    dy = rng.standard_normal(x.shape)
    gx, gscale = reference.pull(dy, x, scale, **options)
    left = (dy * reference.push(x, scale, dx, dscale, **options)).sum()
    np.testing.assert_allclose(left, (gx * dx).sum() + (gscale * dscale).sum(), rtol=1e-12)


def test_tolerance_grows_with_the_dtype_and_the_length():
    one = Expected(np.ones(3), np.ones(3), 1)
    assert one.tolerance("bfloat16", "float32")[0] == pytest.approx(2.0**-8, rel=1e-3)
    assert one.tolerance("float32", "float32")[0] == pytest.approx(10 * 2.0**-24, rel=1e-3)
    long = Expected(np.ones(3), np.ones(3), 10000)
    assert long.tolerance("float64", "float64")[0] == pytest.approx(109 * 2.0**-53, rel=1e-3)


@pytest.mark.parametrize("wrong", [1.01, np.nan, np.inf])
def test_a_wrong_element_is_found(wrong):
    expected = Expected(np.ones((2, 3)), np.ones((2, 3)), 3)
    got = np.ones((2, 3), np.float32)
    assert_close(got, expected)
    got[1, 2] = wrong
    with pytest.raises(AssertionError, match=r"at \(1, 2\) of \(2, 3\) float32.*1 of 6"):
        assert_close(got, expected)


def test_a_missing_dimension_is_found():
    with pytest.raises(AssertionError):
        assert_close(np.ones((3,), np.float32), Expected(np.ones((2, 3)), np.ones((2, 3))))
    with pytest.raises(AssertionError):
        assert_close(np.ones((2, 3), np.float32), Expected(np.ones((3,)), np.ones((3,))))
