"""Values and gradients of the norms over sizes, dtypes, axes and layouts."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from combinations import half
from reference import assert_close
from rms_norm_cases import AXES, MIXES, WIDE, Case, both, check_both

from normfuse import layer_norm, rms_norm, rms_norm_with_rstd

pytestmark = pytest.mark.optimized

OPS = ["rms_norm", "residual_rms_norm", "rms_norm_with_rstd", "residual_layer_norm"]
RMS = OPS[:3]


def of(op, shape=(5, 24), **options):
    """A case of any norm; layer norms have a bias."""
    bias = {"bias": "float32"} if "layer_norm" in op else {}
    return Case(op, shape, **{**bias, **options})


def mixed(op, mix, bias=False):
    x, scale, dtype = mix
    options = {"bias": dtype or x} if bias or "layer_norm" in op else {}
    return Case(op, (5, 24), x=x, residual=scale or "float16", scale=scale, dtype=dtype, **options)


BIASED = functools.partial(of, bias="float32")
LENGTHS = (1, 2, 3, 7, 8, 17, 33, 64, 97, 130)
GROUPS = {  # cases of one program
    "short rows": [of("rms_norm", (199, n), seed=n) for n in LENGTHS],
    "lengths around powers of two": [
        of("residual_rms_norm", (3, n), x="bfloat16", residual="float32")
        for n in (760, 1128, 4095, 4097, 8192)
    ],
    "huge rows": [
        *(of("rms_norm", (2, n), x="bfloat16") for n in (131072, 1048576)),
        *(BIASED(op, (2, 131072)) for op in ("residual_rms_norm", "layer_norm")),
    ],
    "strided rows": [
        of(op, shape, axis=1)
        for op, shape in half(OPS, [(5, 7, 3), (5, 300, 16), (0, 7, 3), (2, 30, 1100)])
    ]
    + [of("rms_norm", (2, 65536, 3), axis=1), of("rms_norm", (700, 96, 1), axis=1)],
    "rows of layer norms": [
        of(op, shape, x="bfloat16")
        for op, shape in half(["layer_norm", OPS[3]], [(199, 17), (3, 1128), (0, 24), (24,)])
    ],
    # no row at all, one, many, and an x that is one row without a dimension for it
    "numbers of rows": [
        of(op, (*rows, 24)) for op, rows in half(OPS, [(0,), (1,), (199,), (2, 0, 3), ()])
    ],
    "a bias": [BIASED(op, (199, 17), x="bfloat16", residual="bfloat16") for op in RMS],
    "mixes of dtypes": [mixed(*one) for one in half(OPS, MIXES[::3])],
    "mixes of dtypes, a bias": [mixed("rms_norm", mix, bias=True) for mix in MIXES[::9]],
    "axes": [
        *(of(op, (3, 4, 5, 6), axis=axis, scale_offset=0.5) for op, axis in half(OPS, AXES)),
        *(
            BIASED("rms_norm", (3, 4, 5), axis=a, scale=s)
            for a, s in ((0, None), ((0, 2), "float32"))
        ),
    ],
    # without a scale there is nothing that an offset is added to
    "scale and offset": [
        of(op, scale=scale, scale_offset=offset)
        for op in OPS[1:]
        for scale, offset in ((None, 0.0), (None, 1.0), ("float32", 1.0))
    ],
    "without scale or bias": [
        Case("layer_norm", shape, scale=scale, bias=bias, axis=axis)
        for shape, axis in (((5, 24), -1), ((3, 20, 6), 1))
        for scale, bias in ((None, None), ("float32", None), (None, "float32"))
    ],
    "eps": [of("rms_norm", eps=eps) for eps in (0.0, 1e-30, 1e-6, 1.0, 100)],
    # rstd³ does not fit float32 here; every result does
    "tiny and large rows": [
        case.replace(args=(case.args[0] * np.float32(magnitude), case.args[1]))
        for case in [of("rms_norm", eps=0.0)]
        for magnitude in (1e-15, 1e15)
    ],
}


@pytest.mark.parametrize("group", GROUPS)
def test_values_and_gradients(group):
    check_both(*GROUPS[group], implementation="native")


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_other_implementations(implementation):
    """The gradient of "xla" is JAX's own, which rounds its parts to the dtype of x."""
    dtype = "float32" if implementation == "xla" else "bfloat16"
    options = {"x": dtype, "residual": dtype, "scale_offset": 0.5}
    cases = [BIASED(op, shape, **options) for op in OPS for shape in ((199, 17), (3, 1128))]
    cases += [
        case for name in ("without scale or bias", "scale and offset") for case in GROUPS[name]
    ]
    cases += [of("residual_layer_norm", (0, 24))] * (implementation == "xla")
    check_both(*cases, implementation=implementation)


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        cases = [mixed(op, mix) for op, mix in half(OPS, WIDE[::2])]
        assert {case.compute for case in cases} == {"float64"}
        check_both(*cases)


@pytest.mark.parametrize("op", OPS)
def test_zero_features(op):
    """Nothing to normalise: empty results, and gradients of zero where there is one."""
    case = of(op, (3, 0))
    ((out, grads),) = both(case)((case.args, case.cts))
    assert out[0].shape == (3, 0)
    assert [g.shape for g in grads] == [a.shape for a in case.args]


def test_default_result_dtypes():
    """y has x's; the residual sum is promoted; rstd is what was computed in."""
    x, residual, scale = Case("residual_rms_norm", (4, 8), x="bfloat16").args
    assert rms_norm(x, scale).dtype == jnp.bfloat16
    assert [a.dtype for a in rms_norm(x, scale, residual=residual)] == [jnp.bfloat16, jnp.float32]
    assert [a.dtype for a in rms_norm_with_rstd(x, scale)] == [jnp.bfloat16, jnp.float32]
    with pytest.warns(UserWarning, match="float64"):  # JAX's own, as of astype
        assert rms_norm(x, dtype=jnp.float64).dtype == jnp.float32
    with jax.enable_x64(True):  # nor does a wrong type outlive the setting
        assert rms_norm(x, dtype=jnp.float64).dtype == jnp.float64


@pytest.mark.parametrize("axis", [3, (2, 3), (1, 2, 3)], ids=str)
def test_last_axes_are_not_transposed(axis):
    """Kernels see (rows, n): the last axes are a reshape, which is free."""
    case = Case("rms_norm", (3, 4, 5, 6), axis=axis)
    text = hlo.text(both(case).lower((case.args, case.cts)).compile())
    assert hlo.calls(text) == {"backward": 1, "forward": 1}
    assert hlo.count(text, "transpose") == hlo.count(text, "copy") == 0


# ---------------------------------------------------------------- roundings


def llama(x, scale, eps=1e-6, axis=-1):
    """The order of Hugging Face's LlamaRMSNorm."""
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, axis, keepdims=True) + eps)
    others = [a for a in range(x.ndim) if a != axis % x.ndim]
    return jnp.expand_dims(scale, others) * h.astype(x.dtype)


@pytest.mark.parametrize(
    "x, scale, axis, implementation",
    [
        ("bfloat16", "bfloat16", -1, "native"),
        ("bfloat16", "float32", 1, "native"),
        ("float16", "float16", -1, "pallas"),
        ("bfloat16", "bfloat16", -1, "xla"),
    ],
)
def test_cast_before_has_the_bits_of_llama(x, scale, axis, implementation):
    case = Case("rms_norm", (6, 40, 24), x=x, scale=scale, axis=axis)
    h, scale = map(jnp.asarray, case.args)
    options = {"dtype": jnp.promote_types(x, scale.dtype), "implementation": implementation}
    exact, known = reference.round_before_weight(*case.args, axes=axis, out=options["dtype"])
    norm = functools.partial(rms_norm, axis=axis, **options)

    @jax.jit
    def run(h, scale):
        loss = lambda cast: lambda h, s: jnp.sum(jnp.sin(h) * norm(h, s, cast=cast))
        before = functools.partial(norm, cast="before")
        same = [llama(h, scale, axis=axis), before(h, scale)]
        same += [jax.vmap(before)(h[None], scale[None])[0]]  # each example's own scale
        same += [before(h, scale, residual=jnp.zeros_like(h))[0]]  # the sum that is stored
        return (
            same,
            norm(h, scale),
            [jax.grad(loss(c), (0, 1))(h, scale) for c in ("after", "before")],
        )

    same, after, gradients = run(h, scale)
    assert known.mean() > 0.98 and np.mean(np.asarray(after != same[0])) > 0.1
    for y in map(np.asarray, same):
        assert y.dtype == exact.dtype and y[known].tobytes() == exact[known].tobytes()
    # The rounding has no derivative: each term of dscale is off by half an epsilon of x at most.
    for a, b in zip(*gradients):
        a, b, eps = *(np.asarray(g, np.float64) for g in (a, b)), float(jnp.finfo(x).eps)
        np.testing.assert_allclose(a, b, rtol=eps, atol=eps * np.abs(a).max())


def test_cast_before_rounds_what_the_bias_is_added_to():
    case = Case("rms_norm", (5, 64), x="bfloat16", bias="bfloat16", cast="before", dtype="float32")
    x, scale, bias = case.args
    alone = rms_norm(x, cast="before", implementation="native")
    want = np.asarray(alone, np.float32) * scale + np.asarray(bias, np.float32)
    got = case(*case.args, implementation="native")[0]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)  # perhaps fused


def test_sum_is_rounded_before_it_is_normalised():
    """y belongs to the new residual that is returned, not to a wider sum nobody sees."""
    case = Case("residual_rms_norm", (64, 256), x="bfloat16", residual="bfloat16", scale=None)
    y, h = case(*case.args, dtype="float32")
    np.testing.assert_array_equal(np.asarray(h), case.h)
    assert_close(y, case.values()[0])
    wider = case.args[0].astype(np.float64) + case.args[1].astype(np.float64)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(y, reference.forward(wider)[0])


def test_zero_rows_with_eps_zero_are_what_the_formula_says():
    """0 · ∞: NaN, as in the frameworks' layers; with an eps, 0."""
    x = jnp.zeros((2, 8))
    assert np.isnan(rms_norm(x, eps=0.0)).all()
    assert (rms_norm(x) == 0).all()


# ---------------------------------------------------------------- means


@pytest.mark.parametrize(
    "shape, axis, implementation",
    [
        ((7, 1000), -1, "native"),
        ((2, 300, 5), 1, "native"),
        ((2, 70000), -1, "native"),
        ((2, 300, 5), 1, "xla"),
        ((2, 8000), -1, "pallas"),
    ],
)
def test_a_large_mean_costs_no_digits_of_the_deviation(shape, axis, implementation):
    """mean² · eps is 6 here, and the variance 1: a difference of means would be noise."""
    fill = lambda values: values + (1e4 if values.ndim == len(shape) else 0)
    case = of("layer_norm", shape, axis=axis, fill=fill)
    check_both(case.replace(cts=(case.cts[0] - 1e4,)), implementation=implementation)
    # and the tolerance would see it: E[x²] − E[x]² in float32 is outside
    x = case.args[0]
    mean = np.mean(x, axis, keepdims=True)
    square = np.mean(x * x, axis, keepdims=True) - mean**2
    naive = (x - mean) / np.sqrt(np.maximum(square, 0) + 1e-6)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(naive.astype(np.float32), reference.layer_forward(x, axes=case.axes))


@pytest.mark.parametrize("implementation", ["native", "pallas", "xla"])
@pytest.mark.parametrize("axis", [1, 0])
def test_a_mean_that_float32_does_not_have(implementation, axis):
    """The mean of whole numbers near 2²⁴ is rounded to one of them; y is as if it were not."""
    x = np.float32([[15999990, 15999991, 15999992, 15999993], [1, 2, 4, 8]])
    want = reference.layer_normal(x, 1)[0]
    norm = functools.partial(layer_norm, axis=axis, implementation=implementation)
    got = np.asarray(jax.jit(norm)(jnp.asarray(x if axis == 1 else x.T)))
    # differences and their squares are exact, the rest is rounded some ten times
    tolerance = 10 * np.finfo("float32").eps
    np.testing.assert_allclose(got if axis == 1 else got.T, want, rtol=tolerance)


# ---------------------------------------------------------------- layouts

LAYOUTS = {
    "sliced rows": lambda a: a[1::2],
    "strided features": lambda a: a[:, ::3],
    "reversed": lambda a: a[::-1, ::-1],
    "transposed": lambda a: a.T,
    "offset by one element": lambda a: a.reshape(-1)[1 : 1 + 30 * 20].reshape(30, 20),
    "broadcast": lambda a: jnp.broadcast_to(a[:1], (4, a.shape[1])),
}


@pytest.mark.parametrize("jitted", [True, False])
def test_layouts(jitted):
    """Operands that are views of others, inside a program and as arrays of their own."""
    whole = jnp.asarray(np.random.default_rng(0).standard_normal((31, 37)), jnp.float32)
    norm = functools.partial(rms_norm, implementation="native")
    every = lambda whole: [norm(take(whole)) for take in LAYOUTS.values()]
    case = Case("rms_norm", (1, 1), scale=None)
    for take, y in zip(LAYOUTS.values(), (jax.jit(every) if jitted else every)(whole)):
        case.check(y, case.replace(args=(np.asarray(take(whole)),)).values())


def test_numpy_views_and_lists():
    x = np.random.default_rng(0).standard_normal((6, 20)).astype(np.float32)
    for view in (x[::2, 1::3], x.T):
        np.testing.assert_array_equal(rms_norm(view), rms_norm(jnp.asarray(view.copy())))
    np.testing.assert_array_equal(rms_norm([[3.0, 4.0]]), rms_norm(jnp.array([[3.0, 4.0]])))


# ---------------------------------------------------------------- contamination and determinism


@pytest.mark.parametrize("shape, axis", [((9, 33), 1), ((33, 9), 0)], ids=str)
@pytest.mark.parametrize("op", OPS[1:])
def test_poison_stays_in_its_row(op, shape, axis):
    """Bit for bit, in both directions; gradients of parameters alone sum over rows."""
    cases = [of(op, shape, axis=axis, x=dtype, residual=dtype) for dtype in ("float32", "bfloat16")]
    run = both(*cases)
    clean = run(*[(case.args, case.cts) for case in cases])
    for poison in (np.nan, np.inf, -np.inf):
        poisoned = []
        for case in cases:
            x = case.args[0].copy()
            np.moveaxis(x, axis, 1)[4, 7] = poison
            poisoned.append(((x, *case.args[1:]), case.cts))
        for case, (out, grads), (clean_out, clean_grads) in zip(cases, run(*poisoned), clean):
            of_rows = (*out, *grads[: 1 + case.has_residual])
            for got, want in zip(of_rows, (*clean_out, *clean_grads)):
                got, want = (
                    np.moveaxis(np.asarray(a), axis if a.ndim > 1 else 0, -1) for a in (got, want)
                )
                rows = np.arange(9) != 4
                assert got[rows].tobytes() == want[rows].tobytes()
            y = np.moveaxis(np.asarray(out[0], np.float32), axis, 1)[4]
            assert np.isnan(y).all() if np.isnan(poison) else np.isnan(y).any()


def test_results_are_the_same_every_time():
    case = Case("residual_rms_norm", (1999, 130), x="bfloat16")
    run, operands = both(case), (case.args, case.cts)
    bits = lambda: [np.asarray(a).tobytes() for a in jax.tree.leaves(run(operands))]
    first = bits()
    assert all(bits() == first for _ in range(5))


# ---------------------------------------------------------------- what nobody uses


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels on GPUs have other results")
@pytest.mark.parametrize(
    "op, bias, results",
    [
        ("rms_norm", None, [[1], [1, 2], [2, 2]]),
        ("residual_rms_norm", None, [[2], [1, 3], [1, 3]]),
        ("rms_norm", "float32", [[1], [1, 2], [2, 2], [3, 2]]),
        ("layer_norm", "float32", [[1], [1, 3], [2, 3], [3, 3]]),
    ],
)
def test_what_nobody_uses_is_not_computed(op, bias, results):
    """Neither statistics without a derivative nor gradients of frozen parameters."""
    case = Case(op, (5, 24), bias=bias)
    fns = [case, jax.grad(case.loss, 0), jax.grad(case.loss, (0, 1)), case.grad][: len(results)]
    found = [hlo.results(jax.jit(f).lower(*case.args).compile()) for f in fns]
    assert found == results  # the backward, the forward
    # also where the gradient is computed by the transformation and thrown away by the caller
    dx = jax.jit(lambda *args: case.grad(*args)[0]).lower(*case.args).compile()
    assert hlo.results(dx) == results[1]
