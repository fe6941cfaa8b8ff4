"""FP8 codes and scales against the NumPy reference, bit for bit, and products of them."""

import functools

import fp8_layers
import fp8_reference
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from normfuse.layers.core.activations import SCALARS
from normfuse.layers.quantization import gated
from normfuse.layers.quantization.quantize import (
    Codes,
    Quantized,
    define_amax,
    define_cast,
    define_quantize,
    fits,
)
from normfuse.native.implementation import Order

pytestmark = pytest.mark.optimized

INPUTS = [np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("float16")]
FORMATS = [fp8_reference.E4M3, fp8_reference.E5M2]
SHAPES = [(0, 16), (16, 0), (1, 37), (65, 130), (128, 256)]
NATIVE = Order(("native",), strict=True)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


def check(x: np.ndarray, dtype: np.dtype, found: Quantized, bound=None) -> None:
    """Codes and scale are those of the reference."""
    q, scale = fp8_reference.quantize(x, dtype, bound)
    np.testing.assert_array_equal(bits(found.scale), bits(scale))
    if found.q is not None:
        np.testing.assert_array_equal(bits(found.q), bits(q))
    if found.qt is not None:
        np.testing.assert_array_equal(bits(found.qt), bits(q.T))


@functools.partial(jax.jit, static_argnums=1)
def native(x, dtype: np.dtype, bound=None) -> Quantized:
    return fp8_layers.quantize(x, dtype, bound=bound, order=NATIVE)


@functools.partial(jax.jit, static_argnums=1)
def by_definition(x, dtype: np.dtype) -> Quantized:
    q, qt, scale = define_quantize(Codes(dtype.name), x)
    return Quantized(q, qt, scale[0])


def every_number(dtype: np.dtype) -> np.ndarray:
    """Every number of 16 bits, or float32s with every exponent and many mantissas."""
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256)
    tops = np.arange(1 << 12, dtype=np.uint32) << 20
    ends = np.array([0, 1, 0x7FFFF, 0x80000, 0x80001, 0xFFFFF], np.uint32)
    return (tops[:, None] | ends).view(np.float32)


def arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    normal = rng.standard_normal((96, 80), np.float32)
    outlier, hole, nan = normal.copy(), normal.copy(), normal.copy()
    outlier[:, 7] *= 1000
    hole[3], hole[:, 5] = 0, 1
    nan[2, 3], nan[90, 79], nan[0, 0] = np.nan, np.inf, -np.inf
    return {
        "normal": normal,
        "outlier": outlier,
        "zero and constant rows": hole,
        "zero": np.zeros((32, 16), np.float32),
        "not finite": nan,
        "nothing finite": np.full((17, 16), np.nan, np.float32),
        "subnormal": normal * np.float32(1e-41),
        "tiny": normal * np.float32(1e-30),
        "huge": normal / np.abs(normal).max() * np.float32(3.3e38),
        "largest": np.full((16, 16), np.finfo(np.float32).max),
        "1.75": np.array([[1.75, 1.7500001, -1.7499999, 0.0009765625]], np.float32),
        "above 1.75": np.array([[1.76, 0.5, -1.7500001, -0.0]], np.float32),
    }


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("given", INPUTS, ids=str)
def test_codes_are_those_of_the_reference(given, dtype, rng):
    for shape in SHAPES:
        x = rng.standard_normal(shape).astype(given)
        check(x, dtype, native(x, dtype))
        check(x, dtype, by_definition(x, dtype))


@pytest.mark.parametrize("name", arrays(np.random.default_rng(0)))
def test_unusual_arrays_have_the_codes_of_the_reference(name, rng):
    for given in INPUTS:
        with np.errstate(all="ignore"):
            x = arrays(rng)[name].astype(given)
        for dtype in FORMATS:
            found = native(x, dtype)
            check(x, dtype, found)
            if given == np.float32:
                check(x, dtype, by_definition(x, dtype))
            assert np.all(np.isnan(np.asarray(found.q, np.float32)) == ~np.isfinite(x.astype("f8")))
            assert np.isfinite(found.scale)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("given", INPUTS, ids=str)
def test_every_number_is_rounded_as_in_the_reference(given, dtype):
    """With bounds that place the numbers everywhere in the format, and beyond it."""
    x = every_number(given)
    for bound in (448.0, 1.0, 3e-5, 1e20, 0.0):
        found = native(x, dtype, jnp.float32(bound))
        check(x, dtype, found, bound)


def test_either_layout_is_made_alone(rng):
    x = rng.standard_normal((48, 33)).astype(np.float32)
    q = fp8_layers.quantize(jnp.asarray(x), transpose=False)
    qt = fp8_layers.quantize(jnp.asarray(x), plain=False)
    assert q.qt is None and qt.q is None
    check(x, fp8_reference.E4M3, q)
    check(x, fp8_reference.E4M3, qt)


def test_a_bound_is_the_largest_of_what_is_given(rng):
    x = rng.standard_normal((32, 16)).astype(np.float32)
    bounds = jnp.asarray([[1.0, -77.0], [3.0, 0.0]])
    check(x, fp8_reference.E4M3, fp8_layers.quantize(jnp.asarray(x), bound=bounds), 77.0)


@pytest.mark.parametrize("bound", [np.nan, np.inf, -np.inf])
def test_a_bound_that_is_not_finite_gives_nan_everywhere(bound):
    x = jnp.ones((16, 16))
    found = fp8_layers.quantize(x, bound=jnp.asarray([1.0, bound]))
    assert np.isnan(found.scale) and np.isnan(np.asarray(found.q, np.float32)).all()
    q, qt, scale = define_cast(Codes(), x, jnp.asarray([1.0, bound], jnp.float32))
    np.testing.assert_array_equal(bits(q), bits(found.q))
    assert np.isnan(scale).all()


@pytest.mark.parametrize("given", INPUTS, ids=str)
def test_amax_is_that_of_the_finite_elements(given, rng):
    for x in [every_number(given), rng.standard_normal((3, 5, 7)), np.zeros((0,)), np.ones(())]:
        x = x.astype(given)
        for found in (fp8_layers.amax(jnp.asarray(x), order=NATIVE), define_amax(x)[0]):
            np.testing.assert_array_equal(bits(found).ravel(), bits(fp8_reference.amax(x)))


def test_amax_of_many_tasks_is_the_same_at_any_place(rng):
    x = rng.standard_normal(200_001, np.float32)
    for place in (0, 65_535, 65_536, 200_000):
        y = x.copy()
        y[place] = -100.5
        assert fp8_layers.amax(jnp.asarray(y)) == 100.5


def test_shapes_that_fp8_takes():
    assert fits(16, 4096, 14336)
    assert not fits(16, 4095) and not fits(8, 16)
    assert not fits(0, 16)


# ---------------------------------------------------------------- activations


def draw(rng, count, shape=(48, 80), dtype="bfloat16"):
    return [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(count)]


def as_codes(x, found):
    """Checks codes and scale of a given array; returns what they mean."""
    q, scale = found
    expected, of = fp8_reference.quantize(np.asarray(x))
    assert scale == of
    np.testing.assert_array_equal(q, bits(expected))
    return jnp.asarray(expected.astype("f4") * of)


@pytest.mark.parametrize("has_up", [True, False])
@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
def test_activations_are_quantized_from_float32(name, has_up, rng):
    """To the codes of the reference, of the float32 that plain JAX computes."""
    function, arrays = SCALARS[name], draw(rng, 1 + has_up)
    a, *up = (x.astype(jnp.float32) for x in arrays)
    h = function(a) * up[0] if up else function(a)
    q, scale, *kept, of_a, of_up, of_h = gated.hidden(
        gated.Gated(function, has_up=has_up), *arrays, order=NATIVE
    )
    np.testing.assert_allclose(of_h, jnp.max(jnp.abs(h)), rtol=1e-6)
    meant = [as_codes(x, kept[2 * i : 2 * i + 2]) for i, x in enumerate(arrays)]
    # Limits of what codes say, at most a seventh beyond the maxima.
    for limit, now, before in zip(
        (of_a, of_up), (function(meant[0]), *meant[1:]), (function(a), *up)
    ):
        before = jnp.max(jnp.abs(before))
        assert jnp.max(jnp.abs(now)) <= limit
        assert (
            before < limit < before + 0.08 * gated.SLOPES[name] * max(before, jnp.max(jnp.abs(a)))
        )
    assert has_up or of_up == 1
    expected, of = fp8_reference.quantize(np.asarray(h), bound=of_h)
    assert scale == of
    wide = lambda codes: np.asarray(codes).view(fp8_reference.E4M3).astype(np.float32)
    np.testing.assert_allclose(wide(q), wide(expected), rtol=0.125, atol=2**-9)  # one step apart
    assert np.mean(np.asarray(q) != bits(expected)) < 1e-3


@pytest.mark.parametrize("has_up", [True, False])
def test_gradients_of_activations_stay_within_their_bounds(has_up, rng):
    """They are those at what the codes say, and so is the transpose of h."""
    for name in ("silu", "gelu_tanh"):
        function, spec = SCALARS[name], gated.Gated(SCALARS[name], has_up=has_up)
        dh, *arrays = draw(rng, 2 + has_up)
        _, _, *kept = gated.hidden(spec, *arrays, order=NATIVE)
        found = gated.hidden_gradients(spec, dh, *kept, order=NATIVE)
        meant = [as_codes(x, kept[2 * i : 2 * i + 2]) for i, x in enumerate(arrays)]
        exact = gated.define_gradients(gated.Gated(function), dh, *meant)
        limits = kept[-3:-1]
        bounds = gated.gradient_bounds(jnp.max(jnp.abs(dh)), *limits, gated.SLOPES[name])
        for i, (d, bound) in enumerate(zip(exact, bounds)):
            q, qt, scale = found[3 * i : 3 * i + 3]
            assert jnp.max(jnp.abs(d)) <= bound
            assert scale == fp8_reference.scale(bound, fp8_reference.E4M3)
            gap = np.asarray(q).view(fp8_reference.E4M3).astype("f8") * float(scale) - d
            assert np.linalg.norm(gap) < 0.03 * np.linalg.norm(d)
            np.testing.assert_array_equal(q, qt.T)
        h = np.asarray(gated.define_h(gated.Gated(function), *meant)[0])
        most = 448 * fp8_reference.scale(kept[-1], fp8_reference.E4M3)
        q, _ = fp8_reference.quantize(np.clip(h, -most, most), bound=kept[-1])
        assert np.mean(bits(q).T != np.asarray(found[-2])) < 1e-3
        for a, b in zip(gated.hidden_codes(spec, *kept), found[-2:]):
            assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3


@pytest.mark.parametrize(("name", "sign"), [("silu", 1), ("silu", -1), ("relu", 1)])
def test_one_element_is_within_its_limits_whatever_its_code(name, sign):
    """Also one whose square is the largest number of its scale, and whose code is beyond it."""
    spec = gated.Gated(SCALARS[name])
    for value in (1.75**0.5 * 8 - 1e-4, 14.49, 15.49, 8.51, 7.26, 248.0, 1e4):
        a, up = (jnp.full((1, 1), v, jnp.float32) for v in (sign * value, value))
        q, _, *kept = gated.hidden(spec, a, up, order=NATIVE)
        found = gated.hidden_gradients(spec, -up, *kept, order=NATIVE)
        for codes in (q, *found[:-1]):
            if codes.dtype == jnp.uint8:
                assert np.isfinite(np.asarray(codes).view(fp8_reference.E4M3).astype("f4")).all()


@pytest.mark.parametrize("name", gated.SLOPES)
def test_no_slope_is_steeper(name):
    function = SCALARS.get(name, SCALARS["tanh"])
    x = jnp.linspace(-20, 20, 40_001)
    steepest = jnp.max(jnp.abs(jax.vmap(jax.grad(function))(x)))
    assert gated.SLOPES[name] / 1.01 <= steepest <= gated.SLOPES[name]
