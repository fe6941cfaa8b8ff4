"""Values and gradients of the RMSNorm ops over sizes, dtypes, axes and layouts."""

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

from normfuse import rms_norm, rms_norm_with_rstd

pytestmark = pytest.mark.optimized

OPS = ("rms_norm", "residual_rms_norm", "rms_norm_with_rstd")
SMALL = (1, 2, 3, 7, 8, 17, 33, 64, 97, 130)
LARGE = (760, 1128, 4095, 4097, 8192)
HUGE = (131072, 1048576)


@pytest.mark.parametrize("n", SMALL)
def test_small_odd_and_even_lengths(n):
    check_both(Case("rms_norm", (199, n), seed=n))


@pytest.mark.parametrize("n", LARGE)
def test_lengths_around_powers_of_two(n):
    check_both(Case("residual_rms_norm", (3, n), x="bfloat16", residual="float32", seed=n))


@pytest.mark.parametrize("n", HUGE)
def test_huge_lengths(n):
    check_both(Case("rms_norm", (2, n), x="bfloat16", seed=n))


@pytest.mark.parametrize("op, rows", half(OPS, [(0,), (1,), (199,), (2, 0, 3), ()]), ids=str)
def test_numbers_of_rows(op, rows):
    """No row at all, one, many, and an x that is one row without a dimension for it."""
    check_both(Case(op, (*rows, 24)))


@pytest.mark.parametrize("op", OPS)
def test_zero_features(op):
    """Nothing to normalise: empty results, and gradients of zero where there is one."""
    case = Case(op, (3, 0))
    out, grads = both(case)(case.args, case.cts)
    assert out[0].shape == (3, 0)
    assert [g.shape for g in grads] == [a.shape for a in case.args]


@pytest.mark.parametrize("op, mix", half(OPS, MIXES[::3]), ids=str)
def test_mixes_of_dtypes(op, mix):
    """Results have the dtype that was asked for, gradients their operand's."""
    x, scale, dtype = mix
    case = Case(op, (5, 24), x=x, residual=scale or "float16", scale=scale, dtype=dtype)
    out, grads = both(case)(case.args, case.cts)
    case.check(out, case.values())
    case.check(grads, case.gradients())
    assert out[0].dtype == dtype
    assert [g.dtype for g in grads] == [a.dtype for a in case.args]


@pytest.mark.parametrize("op, mix", half(OPS, WIDE[::2]), ids=str)
def test_float64_is_computed_in_float64(op, mix):
    x, scale, dtype = mix
    with jax.enable_x64(True):
        case = Case(op, (5, 24), x=x, residual=scale, scale=scale, dtype=dtype)
        assert case.compute == "float64"
        check_both(case)


def test_dtype_float64_without_64_bit_types_is_float32_with_jax_warning():
    """As astype does, and without a wrong type that outlives the setting."""
    x = jnp.ones((2, 4))
    with pytest.warns(UserWarning, match="float64"):
        assert rms_norm(x, dtype=jnp.float64).dtype == jnp.float32
    with jax.enable_x64(True):
        assert rms_norm(x, dtype=jnp.float64).dtype == jnp.float64


def test_default_result_dtypes():
    """y has x's; the residual sum is promoted; rstd is what was computed in."""
    case = Case("residual_rms_norm", (4, 8), x="bfloat16", residual="float32")
    x, residual, scale = case.args
    assert rms_norm(x, scale).dtype == jnp.bfloat16
    assert [a.dtype for a in rms_norm(x, scale, residual=residual)] == [jnp.bfloat16, jnp.float32]
    assert [a.dtype for a in rms_norm_with_rstd(x, scale)] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize("op, axis", half(OPS[:2], AXES), ids=str)
def test_axes(op, axis):
    check_both(Case(op, (3, 4, 5, 6), axis=axis, scale_offset=0.5))


@pytest.mark.parametrize("axis", [0, 1, (1, 2), (0, 1)], ids=str)
def test_axis_that_is_not_last_is_not_transposed(axis):
    """Kernels see (outer, n, inner): neighbouring axes anywhere are a reshape, which is free."""
    case = Case("rms_norm", (3, 4, 5, 6), axis=axis)
    text = hlo.text(both(case).lower(case.args, case.cts).compile())
    assert hlo.calls(text) == {"backward": 1, "forward": 1}
    assert hlo.count(text, "transpose") == hlo.count(text, "copy") == 0


@pytest.mark.parametrize("scale, offset", [(None, 0.0), (None, 1.0), ("float32", 1.0)])
@pytest.mark.parametrize("op", OPS[1:])
def test_scale_and_scale_offset(op, scale, offset):
    """Without a scale there is nothing that an offset is added to."""
    check_both(Case(op, (5, 24), scale=scale, scale_offset=offset))


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-6, 1.0, 100])
def test_eps(eps):
    check_both(Case("rms_norm", (5, 24), eps=eps))


@pytest.mark.parametrize("magnitude", [1e-15, 1e15])
def test_tiny_and_large_rows(magnitude):
    """rstd³ does not fit float32 here; every result does."""
    case = Case("rms_norm", (5, 24), fill=lambda v: v, eps=0.0)
    case = case.replace(args=(case.args[0] * np.float32(magnitude), case.args[1]))
    check_both(case, implementation="native")


def llama(x, scale, eps=1e-6, axis=-1):
    """The order of Hugging Face's LlamaRMSNorm."""
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, axis, keepdims=True) + eps)
    return jnp.expand_dims(scale, [a for a in range(x.ndim) if a != axis % x.ndim]) * h.astype(
        x.dtype
    )


def same_bits(got, want, known):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got[known].tobytes() == want[known].tobytes()


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
    want = llama(h, scale, axis=axis)
    exact, known = reference.round_before_weight(*case.args, axes=axis, out=want.dtype)
    assert known.mean() > 0.98
    same_bits(want, exact, known)
    norm = functools.partial(rms_norm, axis=axis, **options)
    before = lambda h, scale: norm(h, scale, cast="before")
    same_bits(jax.jit(before)(h, scale), want, known)
    assert np.mean(np.asarray(norm(h, scale) != want)) > 0.1  # "after" is another number
    # also of each example's own scale, and of the sum that is stored
    same_bits(jax.vmap(before)(h[None], scale[None])[0], want, known)
    y, _ = rms_norm(h, scale, residual=jnp.zeros_like(h), axis=axis, cast="before", **options)
    same_bits(y, want, known)
    # The rounding has no derivative: each term of dscale is off by half an epsilon of x at most.
    loss = lambda cast: lambda h, scale: jnp.sum(jnp.sin(h) * norm(h, scale, cast=cast))
    for a, b in zip(*(jax.grad(loss(cast), (0, 1))(h, scale) for cast in ("after", "before"))):
        a, b, eps = *(np.asarray(g, np.float64) for g in (a, b)), float(jnp.finfo(x).eps)
        np.testing.assert_allclose(a, b, rtol=eps, atol=eps * np.abs(a).max())


@pytest.mark.parametrize(
    "op, dtypes, implementation",
    half(
        ["rms_norm", "layer_norm"],
        [("bfloat16", "float32"), ("float32", "bfloat16")],
        ["native", "pallas", "xla"],
    ),
)
def test_residual_dtype_is_that_of_the_sum(op, dtypes, implementation):
    x, out = dtypes
    case = Case(f"residual_{op}", (9, 40), x=x, residual=x, residual_dtype=out)
    args, dy, dh = case.args, case.cts[0], case.cts[1].astype(jnp.dtype(out))
    norm = functools.partial(case, implementation=implementation)
    (y, h), pullback = jax.vjp(jax.jit(norm), *args)
    exact = reference.wide(args[0]) + reference.wide(args[1])
    # x and residual add exactly in float32, or in bfloat16 round once
    assert y.dtype == x and h.dtype == out
    np.testing.assert_array_equal(h, exact.astype(np.float32).astype(jnp.dtype(out)))
    h = np.asarray(h)
    found = dy, h, args[2], dh
    if op == "layer_norm":
        assert_close(y, reference.layer_forward(h, args[2]))
        of_dx, of_dscale, _ = reference.layer_backward(*found)
    else:
        assert_close(y, reference.forward(h, args[2])[0])
        of_dx, of_dscale = reference.backward(*found)
    dx, dresidual, dscale = pullback((jnp.asarray(dy), jnp.asarray(dh)))
    assert dx.dtype == dresidual.dtype == x
    # rounded to the dtype of the sum, in plain JAX with its two addends, and then to that of x
    rounded = 2 * np.abs(of_dx.value) + 2 * np.abs(reference.wide(dh))
    of_dx = reference.Expected(of_dx.value, of_dx.size, of_dx.length, rounded)
    assert_close(np.asarray(dx).astype(jnp.bfloat16), of_dx)
    assert_close(dscale, of_dscale)


def of_heads(x, scale, dy, dh, **options):
    """y, dx and dscale of a norm of each head, in its own float64."""
    heads = range(x.shape[1])
    forward = [reference.forward(x[:, h], scale[h], **options)[0] for h in heads]
    backward = [reference.backward(dy[:, h], x[:, h], scale[h], dh[:, h], **options) for h in heads]
    return list(zip(forward, *zip(*backward), strict=True))


@pytest.mark.parametrize(
    "shape, x, scale, implementation",
    [
        ((700, 3, 64), "bfloat16", "float32", "native"),  # in several blocks
        ((5, 12, 65), "float32", "bfloat16", "native"),
        ((2, 4, 40000), "float16", "float32", "native"),  # in segments
        ((5, 12, 65), "float32", "bfloat16", "xla"),
    ],
)
def test_a_scale_of_each_head(rng, shape, x, scale, implementation):
    x, residual, dy, dh = (rng.standard_normal(shape).astype(jnp.dtype(x)) for _ in range(4))
    scale = rng.standard_normal(shape[1:]).astype(jnp.dtype(scale))
    options = {"eps": 1e-3, "scale_offset": 0.5}
    norm = functools.partial(rms_norm, implementation=implementation, **options)
    norm = lambda x, r, scale, norm=norm: norm(x, scale, residual=r)
    (y, h), pullback = jax.vjp(jax.jit(norm), x, residual, scale)
    dx, _, dscale = pullback((jnp.asarray(dy), jnp.asarray(dh)))
    assert dx.dtype == x.dtype and dscale.dtype == scale.dtype
    each = of_heads(np.asarray(h), scale, dy, dh, **options)
    for head, (of_y, of_dx, of_dscale) in enumerate(each):
        assert_close(y[:, head], of_y)
        assert_close(dx[:, head], of_dx)
        assert_close(dscale[head], of_dscale)


def test_zero_rows_with_eps_zero_are_what_the_formula_says():
    """0 · ∞: NaN, as in the frameworks' layers; with an eps, 0."""
    x = jnp.zeros((2, 8))
    assert np.isnan(rms_norm(x, eps=0.0)).all()
    assert (rms_norm(x) == 0).all()


# ---------------------------------------------------------------- layouts

LAYOUTS = {
    "sliced rows": lambda a: a[1::2],
    "sliced features": lambda a: a[:, 3:],
    "strided features": lambda a: a[:, ::3],
    "reversed": lambda a: a[::-1, ::-1],
    "transposed": lambda a: a.T,
    "offset by one element": lambda a: a.reshape(-1)[1 : 1 + 30 * 20].reshape(30, 20),
    "broadcast": lambda a: jnp.broadcast_to(a[:1], (4, a.shape[1])),
}


@pytest.mark.parametrize("jitted, layout", half([True, False], LAYOUTS))
def test_layouts(jitted, layout):
    """Operands that are views of others, inside a program and as arrays of their own."""
    take = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((31, 37)).astype(np.float32)
    fn = lambda whole: rms_norm(take(whole), implementation="native")
    y = (jax.jit(fn) if jitted else fn)(jnp.asarray(whole))
    case = Case("rms_norm", (1, 1), scale=None)
    case.check(y, case.replace(args=(np.asarray(take(jnp.asarray(whole))),)).values())


def test_numpy_views_and_lists():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 20)).astype(np.float32)
    for view in (x[::2, 1::3], x.T, np.asfortranarray(x)):
        np.testing.assert_array_equal(rms_norm(view), rms_norm(jnp.asarray(view.copy())))
    np.testing.assert_array_equal(rms_norm([[3.0, 4.0]]), rms_norm(jnp.array([[3.0, 4.0]])))


# ---------------------------------------------------------------- contamination and determinism


@pytest.mark.parametrize(
    "op, dtype, poison", half(OPS[1:], ["float32", "bfloat16"], [np.nan, np.inf, -np.inf])
)
def test_poison_stays_in_its_row(op, dtype, poison):
    """Bit for bit, in both directions; dscale alone sums over rows."""
    case = Case(op, (9, 33), x=dtype, residual=dtype)
    run = both(case)
    clean_out, clean_grads = run(case.args, case.cts)
    x = case.args[0].copy()
    x[4, 7] = poison
    out, grads = run((x, *case.args[1:]), case.cts)
    rows = np.arange(9) != 4
    for got, clean in zip((*out, *grads[:-1]), (*clean_out, *clean_grads[:-1])):
        assert np.asarray(got[rows]).tobytes() == np.asarray(clean[rows]).tobytes()
    assert np.isnan(np.asarray(out[0][4], np.float32)).any()
    if np.isnan(poison):
        assert np.isnan(np.asarray(out[0][4], np.float32)).all()


def test_results_are_the_same_every_time():
    case = Case("residual_rms_norm", (1999, 130), x="bfloat16")
    run = both(case)
    first = jax.tree.leaves(run(case.args, case.cts))
    for _ in range(5):
        again = jax.tree.leaves(run(case.args, case.cts))
        assert [np.asarray(a).tobytes() for a in first] == [np.asarray(a).tobytes() for a in again]


# ---------------------------------------------------------------- dead code


def test_unused_rstd_is_not_computed():
    """The call has one result, whichever of the functions was used."""
    case = Case("rms_norm", (5, 24))
    used = jax.jit(lambda *args: rms_norm_with_rstd(*args))
    unused = jax.jit(lambda *args: rms_norm_with_rstd(*args)[0])
    plain = jax.jit(rms_norm)
    results = [hlo.results(f.lower(*case.args).compile()) for f in (used, unused, plain)]
    assert results == [[2], [1], [1]]


def test_frozen_scale_has_no_dscale():
    """Where nobody asks for the gradient of scale the backward has one result."""
    case = Case("rms_norm", (5, 24))
    of = lambda argnums: jax.jit(jax.grad(case.loss, argnums)).lower(*case.args).compile()
    assert hlo.results(of(0)) == [1, 2]  # backward, forward
    assert hlo.results(of((0, 1))) == [2, 2]


def test_frozen_scale_of_a_larger_gradient_has_no_dscale():
    """Also where dscale is computed by the transformation and thrown away by the caller."""
    case = Case("residual_rms_norm", (5, 24))
    dx = jax.jit(lambda *args: case.grad(*args)[0]).lower(*case.args).compile()
    assert hlo.results(dx) == [1, 3]


def test_rstd_is_float32_and_right_for_any_x():
    case = Case("rms_norm_with_rstd", (5, 24), x="float16", scale=None)
    _, rstd = rms_norm_with_rstd(*case.args)
    assert rstd.dtype == jnp.float32
    assert_close(rstd, case.values()[1])


def test_sum_is_rounded_before_it_is_normalised():
    """y belongs to the new residual that is returned, not to a wider sum nobody sees."""
    case = Case("residual_rms_norm", (64, 256), x="bfloat16", residual="bfloat16", scale=None)
    y, h = case(*case.args, dtype="float32")
    np.testing.assert_array_equal(np.asarray(h), case.h)
    wider = case.args[0].astype(np.float64) + case.args[1].astype(np.float64)
    assert_close(y, case.values()[0])
    other, _ = reference.forward(wider)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(y, other)
