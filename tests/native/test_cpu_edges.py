"""The CPU handlers at their edges: rounding, long sums, shared memory, wrong operands."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest

EPS = 1e-6
SCALED = {"scale_offset": 0.0, "has_scale": True}
UNSCALED = {"scale_offset": 0.0, "has_scale": False}
BOTH = {"has_residual": True, "with_dscale": True}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_to_nearest_even_and_keeps_nan(dtype, call):
    """`apply` with rstd 1 and no scale is a conversion."""

    def convert(values, to):
        operands = [
            values.reshape(1, -1, 1),
            np.ones((1, 1), np.result_type(values.dtype, np.float32)),
        ]
        results = [((1, values.size, 1), to)]
        (converted,) = call("apply", operands, results, **UNSCALED)
        return converted.ravel()

    every = np.arange(65536, dtype=np.uint16).view(ml_dtypes.finfo(dtype).dtype)
    with np.errstate(invalid="ignore"):  # NumPy's warning when it converts a signalling NaN
        normal = ~(np.abs(every.astype(np.float32)) < ml_dtypes.finfo(dtype).smallest_normal)
        every = every[normal | (dtype == "float16")]  # bfloat16's subnormals are float32's: flushed
        wide = every.astype(np.float32)
    np.testing.assert_array_equal(convert(every, "float32"), wide)
    # The first would round up to -0, the second loses all the bits that make it a NaN.
    nan = np.array([0x7FFFFFFF, 0x7F800001, 0xFFC00000], np.uint32).view(np.float32)
    assert np.isnan(convert(nan, dtype)).all()
    # Midpoints of neighbours are ties; their own neighbours are not.
    finite = np.sort(wide[np.isfinite(wide)]).astype(np.float64)
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    for values in (middle, *(np.nextafter(middle, np.float32(s * np.inf)) for s in (1, -1))):
        np.testing.assert_array_equal(convert(values, dtype), values.astype(every.dtype))
    # From float64 in one step: just above a tie, where float32 first would give the tie.
    ulp = float(ml_dtypes.finfo(dtype).eps)
    assert convert(np.array([1 + ulp / 2 + 2.0**-40]), dtype) == 1 + ulp
    assert convert(np.array([-1 - ulp / 2 - 2.0**-40]), dtype) == -1 - ulp


def test_long_sums_are_accurate(call, rng):
    """Positive terms, so that a plain float32 running sum would be off by hundreds of ulps."""
    ulp = np.finfo(np.float32).eps
    x = 1 + rng.random((1, 1 << 20, 1), dtype=np.float32)
    for shape in (x.shape, (1, 1 << 18, 4)):
        (sums,) = call("row_statistics", [x.reshape(shape)], [((1, shape[2]), "float32")])
        np.testing.assert_allclose(sums, np.sum(np.float64(x.reshape(shape)) ** 2, 1), rtol=4 * ulp)
    rows, rstd = x.reshape(-1, 4, 1), np.ones((1 << 18, 1), np.float32)
    flags = {"has_residual": False, "with_dscale": True}
    results = [(rows.shape, "float32"), ((4,), "float32")]
    _, dscale = call("backward", [rows, rows, rstd], results, **UNSCALED, **flags)
    np.testing.assert_allclose(dscale, np.sum(np.float64(rows) ** 2, (0, 2)), rtol=8 * ulp)


@pytest.mark.parametrize("inner", [1, 3])
def test_results_may_take_the_operands_memory(inner, call, rng):
    shape = (40, 700, inner)
    x, other, rstd = (
        rng.standard_normal(shape, np.float32),
        rng.standard_normal(shape, np.float32),
        np.ones((40, inner), np.float32),
    )
    cases = [
        ("forward", [x, other], 2, {"eps": EPS, "has_residual": True, "with_rstd": False}, (0, 1)),
        ("apply", [x, rstd], 1, {}, (0,)),
        (
            "backward",
            [other, x, rstd, x],
            1,
            {"has_residual": True, "with_dscale": False},
            (0, 1, 3),
        ),
    ]
    for kernel, operands, count, flags, donors in cases:
        results = [(shape, "float32")] * count
        expected = call(kernel, operands, results, **UNSCALED, **flags)
        for donor, result in itertools.product(donors, range(count)):
            actual = call(kernel, operands, results, {donor: result}, **UNSCALED, **flags)
            np.testing.assert_array_equal(actual, expected)


X, SCALE, LINE = np.ones((4, 8, 1), np.float32), np.ones(8, np.float32), np.ones((4, 1), np.float32)
FORWARD = {"eps": EPS, "has_residual": False, "with_rstd": True}


WRONG = [  # operands and results of a call, and what is said
    ("forward", [X, SCALE[:7]], [X, LINE], r"forward: scale must have shape \(8,\); got \(7,\)"),
    ("forward", [X, SCALE], [X[:3], LINE], r"y must have shape \(4, 8, 1\); got \(3, 8, 1\)"),
    ("forward", [X[0], SCALE], [X, LINE], r"x must have shape \(outer, n, inner\); got \(8, 1\)"),
    ("forward", [X.astype(np.int32), SCALE], [X, LINE], "bfloat16 or float16; got XLA data type 4"),
    ("forward", [X.astype(np.float64), SCALE], [X, LINE], "rstd must be float64, .* got float32"),
    ("forward", [X, SCALE, SCALE], [X, LINE], "expected 2 operands and 2 results .* got 3 and 2"),
    ("apply", [X, SCALE], [X], "apply: the operand rstd is missing: got 2"),
    ("row_statistics", [X[:, :0]], [LINE], "row_statistics: x must have n >= 1; got n = 0"),
    ("row_dots", [X, X[:, :7], SCALE], [LINE], r"row_dots: x must have .*\); got \(4, 7, 1\)"),
    (
        "backward",
        [X, X, SCALE, LINE, X],
        [X, SCALE.astype(np.float16)],
        "backward: dscale must be float32, .* got float16",
    ),
]
FLAGS = {"forward": SCALED | FORWARD, "backward": SCALED | BOTH, "row_statistics": {}}


@pytest.mark.parametrize(("kernel", "operands", "results", "message"), WRONG)
def test_wrong_operands_are_named(kernel, operands, results, message, call):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        types = [(a.shape, a.dtype) for a in results]
        call(kernel, operands, types, **FLAGS.get(kernel, SCALED))


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(call):
    """9 GB; the last row tells whether offsets are 64 bits wide."""
    x = np.zeros((2049, 1 << 20, 1), ml_dtypes.bfloat16)
    x[-1] = 2
    (sums,) = call("row_statistics", [x], [((2049, 1), "float32")])
    np.testing.assert_array_equal(sums.ravel(), [0] * 2048 + [4 << 20])
