"""The CPU handlers at their edges: rounding, NaN, long sums, shared memory, wrong operands."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest

from normfuse.native import registry

EPS = 1e-6
SCALED = {"scale_offset": 0.0, "has_scale": True}
UNSCALED = {"scale_offset": 0.0, "has_scale": False}
BOTH = {"has_residual": True, "with_dscale": True}


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def forward(call, x, scale):
    outer, n, inner = x.shape
    results = [(x.shape, "float32"), ((outer, inner), "float32")]
    return call(
        "forward", [x, scale], results, **SCALED, eps=EPS, has_residual=False, with_rstd=True
    )


def backward(call, dy, x, scale, rstd, dh):
    results = [(x.shape, "float32"), (scale.shape, "float32")]
    return call("backward", [dy, x, scale, rstd, dh], results, **SCALED, **BOTH)


@pytest.mark.parametrize("shape", [(7, 300, 1), (3, 70000, 1), (4, 300, 9)], ids=str)
def test_two_steps_give_what_one_gives(shape, call, rng):
    outer, n, inner = shape
    x, dy, dh = (normal(rng, *shape) for _ in range(3))
    scale, line = normal(rng, n), ((outer, inner), "float32")
    y, rstd = forward(call, x, scale)
    (sums,) = call("row_statistics", [x], [line])
    # a square root and a division in float32 here, in float64 there: three roundings
    np.testing.assert_allclose(1 / np.sqrt(sums / n + EPS), rstd, rtol=4e-7)
    (applied,) = call("apply", [x, scale, rstd], [(shape, "float32")], **SCALED)
    np.testing.assert_array_equal(applied, y)

    dx, dscale = backward(call, dy, x, scale, rstd, dh)
    (dots,) = call("row_dots", [dy, x, scale], [line], **SCALED)
    results = [(shape, "float32"), ((n,), "float32")]

    def from_dots(dots, count):
        operands = [dy, x, scale, rstd, dh, dots]
        return call("backward_apply", operands, results, **SCALED, **BOTH, count=float(count))

    # `dots` was rounded to float32 on its way: half an ulp, and at most as much in
    # each of the three operations that follow
    r = rstd[:, None]
    terms = np.abs(x * r**3 * dots[:, None] / n) + np.abs(dy * r * scale[:, None]) + np.abs(dh)
    again = from_dots(dots, n)
    assert np.all(np.abs(again[0] - dx) <= 2 * np.finfo(np.float32).eps * terms)
    np.testing.assert_array_equal(again[1], dscale)
    # rows over two devices: twice the features
    np.testing.assert_array_equal(from_dots(2 * dots, 2 * n)[0], again[0])


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


@pytest.mark.parametrize("shape", [(9, 130, 1), (2, 70000, 1), (3, 130, 5)], ids=str)
def test_optional_results_do_not_change_the_others(shape, call, rng):
    x, dy, scale = normal(rng, *shape), normal(rng, *shape), normal(rng, shape[1])
    y, rstd = forward(call, x, scale)
    flags = {"eps": EPS, "has_residual": False, "with_rstd": False}
    (alone,) = call("forward", [x, scale], [(shape, "float32")], **SCALED, **flags)
    np.testing.assert_array_equal(alone, y)
    dx, _ = backward(call, dy, x, scale, rstd, x)
    flags = {"has_residual": True, "with_dscale": False}
    operands = [dy, x, scale, rstd, x]
    (alone,) = call("backward", operands, [(shape, "float32")], **SCALED, **flags)
    np.testing.assert_array_equal(alone, dx)


@pytest.mark.parametrize("shape", [(9, 300, 1), (3, 40000, 1), (3, 300, 4)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_row(shape, bad, call, rng):
    outer, n, inner = shape
    x, dy, dh = (normal(rng, *shape) for _ in range(3))
    scale = normal(rng, n)
    line, at = (1, slice(None), inner - 1), (1, n // 2, inner - 1)
    others = np.ones(shape, bool)
    others[line] = False

    def run(x, dy):
        y, rstd = forward(call, x, scale)
        return y, *backward(call, dy, x, scale, rstd, dh)

    y, dx, dscale = run(x, dy)
    poisoned = x.copy()
    poisoned[at] = bad
    y_too, dx_too, _ = run(poisoned, dy)
    assert np.isnan(y_too[at]) and np.isnan(dx_too[at])
    assert np.isnan(y_too[line]).all() == np.isnan(bad)  # with infinity, rstd is 0
    np.testing.assert_array_equal(y_too[others], y[others])
    np.testing.assert_array_equal(dx_too[others], dx[others])

    poisoned = dy.copy()
    poisoned[at] = bad
    _, dx_too, dscale_too = run(x, poisoned)
    assert not np.isfinite(dx_too[line]).any()
    np.testing.assert_array_equal(dx_too[others], dx[others])
    assert not np.isfinite(dscale_too[n // 2])
    np.testing.assert_array_equal(np.delete(dscale_too, n // 2), np.delete(dscale, n // 2))


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
    x, other, rstd = normal(rng, *shape), normal(rng, *shape), np.ones((40, inner), np.float32)
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


@pytest.mark.parametrize(
    ("kernel", "operands", "results", "flags", "message"),
    [
        (
            "forward",
            [X, SCALE[:7]],
            [X, LINE],
            {**SCALED, **FORWARD},
            r"forward: scale must have shape \(8,\); got \(7,\)",
        ),
        (
            "forward",
            [X, SCALE],
            [X[:3], LINE],
            {**SCALED, **FORWARD},
            r"forward: y must have shape \(4, 8, 1\); got \(3, 8, 1\)",
        ),
        (
            "forward",
            [X[0], SCALE],
            [X, LINE],
            {**SCALED, **FORWARD},
            r"x must have shape \(outer, n, inner\); got \(8, 1\)",
        ),
        (
            "forward",
            [X.astype(np.int32), SCALE],
            [X, LINE],
            {**SCALED, **FORWARD},
            "x must be float64, float32, bfloat16 or float16; got XLA data type 4",
        ),
        (
            "forward",
            [X.astype(np.float64), SCALE],
            [X, LINE],
            {**SCALED, **FORWARD},
            "rstd must be float64, the type these dtypes are computed in; got float32",
        ),
        (
            "forward",
            [X, SCALE, SCALE],
            [X, LINE],
            {**SCALED, **FORWARD},
            "expected 2 operands and 2 results for these attributes; got 3 and 2",
        ),
        ("apply", [X, SCALE], [X], SCALED, "apply: the operand rstd is missing: got 2"),
        ("row_statistics", [X[:, :0]], [LINE], {}, "row_statistics: x must have n >= 1; got n = 0"),
        (
            "row_dots",
            [X, X[:, :7], SCALE],
            [LINE],
            SCALED,
            r"row_dots: x must have shape \(4, 8, 1\); got \(4, 7, 1\)",
        ),
        (
            "backward",
            [X, X, SCALE, LINE, X],
            [X, SCALE.astype(np.float16)],
            {**SCALED, **BOTH},
            "backward: dscale must be float32, .* got float16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_wrong_operands_are_named(kernel, operands, results, flags, message, call):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(kernel, operands, [(a.shape, a.dtype) for a in results], **flags)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(call):
    """9 GB; the last row tells whether offsets are 64 bits wide."""
    x = np.zeros((2049, 1 << 20, 1), ml_dtypes.bfloat16)
    x[-1] = 2
    (sums,) = call("row_statistics", [x], [((2049, 1), "float32")])
    np.testing.assert_array_equal(sums.ravel(), [0] * 2048 + [4 << 20])


def test_layer_norm_takes_parameters_of_heads(call, rng):
    """Each head's rows and sums are as if it were alone."""
    x, dy = rng.standard_normal((2, 6, 40, 1), np.float32)
    own = rng.standard_normal((2, 3, 40), np.float32)
    flags = {"centred": True, "has_scale": True, "scale_offset": 0.0, "has_residual": False}
    both = {"with_dscale": True, "with_dbias": True}

    def run(x, dy, scale, bias):
        like, line = (x.shape, "float32"), ((len(x), 1), "float32")
        known = {"has_bias": True, "with_mean": True, "with_rstd": True, "eps": EPS}
        y, mean, rstd = call("forward", [x, scale, bias], [like, line, line], **flags, **known)
        results = [like, *[(scale.shape, "float32")] * 2]
        return y, *call("backward", [dy, x, scale, mean, rstd], results, **flags, **both)

    y, dx, *sums = run(x, dy, *own)
    for head in range(3):
        *rows, dscale, dbias = run(x[head::3], dy[head::3], *own[:, head])
        for got, want in zip((y[head::3], dx[head::3]), rows, strict=True):
            np.testing.assert_array_equal(got, want)
        for got, want in zip(sums, (dscale, dbias), strict=True):
            np.testing.assert_allclose(got[head], want, rtol=1e-6)


def test_calls_of_the_quantizer_with_wrong_counts_name_it():
    """Not only XLA's decoder, which names neither the handler nor its arguments."""
    registry.register()
    x, maxima, one = X[0].astype(np.float32), np.ones(1, np.float32), ((1,), "float32")
    codes = x.shape, "float8_e4m3fn"
    flags = {"has_q": True, "has_qt": False}
    cast = "normfuse_quantize_cast"
    for target, operands, results, options in [
        ("normfuse_quantize_amax", [], [one], {}),
        ("normfuse_quantize_amax", [x, x], [one], {}),
        ("normfuse_quantize_amax", [x], [], {}),
        ("normfuse_quantize_amax", [x], [one, one], {}),
        ("normfuse_quantize_amax", [x], [((1,), "int32")], {}),
        (cast, [x], [codes, one], flags),
        (cast, [x, maxima, maxima], [codes, one], flags),
        (cast, [x, maxima], [one], flags),
        (cast, [x, maxima], [codes, codes, one], flags),
        (cast, [x, maxima.astype(np.int32)], [codes, one], flags),
        (cast, [x, maxima], [codes, ((1,), "int32")], flags),
    ]:
        types = [jax.ShapeDtypeStruct(*r) for r in results]
        call = jax.ffi.ffi_call(target, types, has_side_effect=True)  # run without results too
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{target}: "):
            jax.block_until_ready(jax.jit(lambda *a: call(*a, **options))(*operands))  # noqa: B023
