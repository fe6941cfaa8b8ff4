"""linear_cross_entropy: values, gradients, transformations, and the number of products."""

import functools
import re

import cross_entropy_reference as reference
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from reference import wide

from normfuse import linear_cross_entropy
from normfuse.layers.cross_entropy.chunks import chunk_rows

f32, bf16 = jnp.float32, jnp.bfloat16
SHAPE, N, VOCABULARY, IGNORE = (3, 14), 24, 57, -100


def draw(rng, dtype=f32, kernel_dtype=None, contract=0, shape=SHAPE, ignored=5):
    """x, kernel and labels; logits of up to about 6."""
    x = jnp.asarray(rng.standard_normal((*shape, N)), dtype)
    stored = (N, VOCABULARY) if contract == 0 else (VOCABULARY, N)
    kernel = jnp.asarray(rng.standard_normal(stored) / 2, kernel_dtype or dtype)
    labels = rng.integers(0, VOCABULARY, shape)
    labels.reshape(-1)[rng.choice(labels.size, ignored, replace=False)] = IGNORE
    return x, kernel, jnp.asarray(labels)


def plain(x, kernel, labels, *, bias=0.0, weights=None, softcap=None, z_loss=0.0, reduction="mean"):
    """In plain JAX, with labels ignored; for derivatives that have no formula here."""
    z = x @ kernel + bias
    c = z if softcap is None else softcap * jnp.tanh(z / softcap)
    lse = jax.nn.logsumexp(c, axis=-1)
    picked = jnp.take_along_axis(c, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    counts = labels != IGNORE
    weights = counts if weights is None else jnp.where(counts, weights, 0)
    each = weights * jnp.where(counts, lse - picked + z_loss * lse**2, 0)
    if reduction == "none":
        return each
    total = jnp.sum(weights)
    return jnp.sum(each) / (jnp.where(total == 0, 1, total) if reduction == "mean" else 1)


ours = functools.partial(linear_cross_entropy, ignore=IGNORE)


def layer(x, kernel, labels, counts, *, contract=0, logits=None, bias=None, **options):
    """The reference, with the counts of its rows."""
    half = lambda dtype: float(jnp.finfo(dtype).eps) / 2
    compute = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    w = wide(kernel.astype(x.dtype))
    return reference.Layer(
        x=wide(x).reshape(-1, N),
        w=w if contract == 0 else w.T,
        labels=np.asarray(labels).reshape(-1),
        counts=np.asarray(counts, np.float64).reshape(-1),
        softcap=options.get("softcap"),
        z_loss=options.get("z_loss", 0.0),
        bias=0.0 if bias is None else wide(bias),
        smoothing=options.get("label_smoothing", 0.0),
        dtype=half(x.dtype),
        logits=half(logits or x.dtype),
        sums=half(compute),
    )


def assert_within(found, expected, error, dtype):
    """`found` within the error and a rounding to its own dtype."""
    assert found.dtype == dtype
    limit = error + np.abs(expected) * float(jnp.finfo(dtype).eps) / 2
    off = np.abs(np.asarray(found, np.float64) - expected)
    assert (off <= limit + float(jnp.finfo(dtype).smallest_normal)).all(), (off / limit).max()


CASES = {  # dtypes of x and of the rest, the reduction, operands beside x and the kernel, options
    "float32 in chunks": (
        *(f32, f32, "sum", "weights"),
        {"chunk_rows": 8, "softcap": 3.0, "z_loss": 0.1},
    ),
    "float32, tied": (
        *(f32, f32, "none", "weights"),
        {"contract": 1, "chunk_rows": 21, "z_loss": 0.1},
    ),
    "bfloat16": (bf16, bf16, "none", "bias", {"chunk_rows": 10}),
    "bfloat16, one chunk": (bf16, bf16, "mean", "bias", {}),
    "bfloat16, f32 kernel": (bf16, f32, "mean", "weights", {"softcap": 5.0, "contract": 1}),
    "float16": (jnp.float16, f32, "mean", "weights", {"z_loss": 0.01}),
    "float16 logits": (
        *(jnp.float16, f32, "sum", ""),
        {"z_loss": 0.01, "logits_dtype": jnp.float16},
    ),
    "float64": (
        *(jnp.float64, jnp.float64, "mean", "bias, weights"),
        {"softcap": 9.0, "chunk_rows": 40},
    ),
    "smoothed": (
        *(f32, f32, "sum", "bias"),
        {"chunk_rows": 8, "softcap": 3.0, "label_smoothing": 0.25},
    ),
    "bfloat16, smoothed": (bf16, f32, "none", "", {"z_loss": 0.1, "label_smoothing": 1.0}),
}


@pytest.mark.optimized
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_float64(rng, case):
    """In the weights too: their gradient is each row's loss, less the mean of "mean"."""
    dtype, kernel_dtype, reduction, operands, options = CASES[case]
    with jax.enable_x64(dtype == jnp.float64):
        contract = options.get("contract", 0)
        x, kernel, labels = draw(rng, dtype, kernel_dtype, contract)
        compute = jnp.float64 if dtype == jnp.float64 else f32
        more = {}
        if "bias" in operands:
            more["bias"] = jnp.asarray(rng.standard_normal(VOCABULARY), kernel_dtype)
        if "weights" in operands:
            given = jnp.asarray(rng.uniform(0.5, 2, SHAPE), compute)
            more["weights"] = given.at[1, :4].set(0)
        cotangents = jnp.asarray(rng.standard_normal(SHAPE), compute)
        used = np.asarray(labels) != IGNORE
        weights = used * wide(more.get("weights", jnp.ones(())))
        scale = used * (wide(cotangents) if reduction == "none" else 1)
        scale = scale / (weights.sum() if reduction == "mean" else 1)
        default = f32 if dtype == jnp.float16 else dtype
        exact = layer(
            *(x, kernel, labels, weights * scale),
            **{"logits": default, "bias": more.get("bias")}
            | {name.removesuffix("_dtype"): value for name, value in options.items()},
        )

        @jax.jit
        def run(x, kernel, more):
            loss = lambda x, k, more: ours(x, k, labels, reduction=reduction, **more, **options)
            value, pull = jax.vjp(loss, x, kernel, more)
            return value, *pull(cotangents if reduction == "none" else jnp.ones_like(value))

        value, dx, dkernel, found = run(x, kernel, more)
    each, error = exact.rows()
    if reduction == "none":
        factors = weights.ravel()
        assert_within(value.reshape(-1), each * factors, error * factors, compute)
    else:
        assert_within(value, *exact.total(), compute)
    (gx, ex), (gw, ew), bias = exact.gradients()
    assert_within(dx.reshape(-1, N), gx, ex, dtype)
    turn = np.transpose if contract else np.asarray
    assert_within(dkernel, turn(gw), turn(ew), kernel_dtype)
    if "bias" in found:
        assert_within(found["bias"], *bias, kernel_dtype)
    if "weights" in found:
        mean, scale = np.array(exact.total()) * (reduction == "mean"), scale.ravel()
        # The differences, and of "mean" the divisor's own: a sum of as many terms as rows.
        error = error + mean[1] + 8 * float(jnp.finfo(compute).eps) * (np.abs(each) + abs(mean[0]))
        expected = scale * (each - mean[0])
        assert_within(found["weights"].reshape(-1), expected, np.abs(scale) * error, compute)


@pytest.mark.parametrize(
    "low, reduction, quantization", half([-jnp.inf, -1e9], ["mean", "none"], [None, "fp8"])
)
def test_a_masked_vocabulary_is_that_of_the_other_words(rng, low, reduction, quantization):
    """Its padding has gradients of exactly 0, and changes no other bit but of scales in FP8."""
    words, n = 48, 32
    x, kernel = (jnp.asarray(rng.standard_normal(s), bf16) for s in ((16, n), (n, 64)))
    labels = jnp.asarray(rng.integers(0, words, 16))
    bias = jnp.where(jnp.arange(64) < words, 0, low)

    def run(kernel, bias):
        options = {"bias": bias, "reduction": reduction, "quantization": quantization}
        loss = lambda x, k: jnp.sum(linear_cross_entropy(x, k, labels, **options))
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, kernel)

    value, (dx, dkernel) = run(kernel, bias)
    expected, (ex, ek) = run(kernel.at[:, words:].set(0)[:, :words], bias[:words])
    assert not dkernel[:, words:].any()
    # JAX 0.10.2 keeps float32 logits of one product, and rounds those of the other to bfloat16
    bits = 2e-6, 2**-8
    if jax.__version_info__ < (0, 11):
        bits = 2**-8, 2**-5
    tolerance = 0.15 if quantization else bits[1]  # codes of 2 bits, rounded at random
    np.testing.assert_allclose(value, expected, rtol=bits[0])
    for f, e in (dx, ex), (dkernel[:, :words], ek):
        np.testing.assert_allclose(wide(f), wide(e), 0, tolerance * np.abs(wide(e)).max())


def test_float16_has_logits_beyond_its_range(rng):
    """The product computes them in float32: the other words' gradient was NaN."""
    x, kernel, labels = draw(rng, jnp.float16, ignored=0)
    x, kernel = 150 * x, 150 * kernel
    assert jnp.abs(x.astype(f32) @ kernel.astype(f32)).max() > 65504
    exact = layer(x, kernel, labels, np.full(SHAPE, 1 / labels.size), logits=f32)
    value, (dx, dkernel) = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, kernel, labels)
    assert_within(value, *exact.total(), f32)
    (gx, ex), (gw, ew), _ = exact.gradients()
    assert_within(dx.reshape(-1, N), gx, ex, jnp.float16)
    assert_within(dkernel, gw, ew, jnp.float16)


def test_one_chunk_rounds_the_kernels_gradient_as_several_do(rng):
    """Once, to the kernel's dtype, though the product's operands are coarser."""
    x, kernel, labels = draw(rng, bf16, jnp.float16)
    run = jax.jit(jax.grad(ours, 1), static_argnames="chunk_rows")
    one, several = (run(x, kernel, labels, chunk_rows=rows) for rows in (None, 10))
    assert one.dtype == several.dtype == jnp.float16
    # Sums in float32 of two orders, rounded: neighbours at most, or float16's least.
    np.testing.assert_allclose(wide(one), wide(several), rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_log_sum_exps_and_entropies(rng, reduction):
    x, kernel, labels = draw(rng)
    exact = layer(x, kernel, labels, np.ones(SHAPE))

    def both(x, kernel):
        options = {"reduction": reduction, "with_lse": True, "chunk_rows": 10}
        options["bias"] = jnp.zeros(VOCABULARY + 1).at[-1].set(-jnp.inf)  # a word without a share
        kernel = jnp.pad(kernel, ((0, 0), (0, 1)), constant_values=1)
        loss, lse = ours(x, kernel, labels, **options)
        again, _, entropy = ours(x, kernel, labels, with_entropy=True, **options)
        return jnp.sum(loss + again) + jnp.sum(lse**2 + entropy**2), lse

    def expected(x, kernel):
        lse = jax.nn.logsumexp(x @ kernel, axis=-1)
        log_p = jax.nn.log_softmax(x @ kernel)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        return 2 * plain(x, kernel, labels, reduction="sum") + jnp.sum(lse**2 + entropy**2)

    (_, lse), found = jax.jit(jax.value_and_grad(both, (0, 1), has_aux=True))(x, kernel)
    np.testing.assert_allclose(lse.reshape(-1), exact.softmax.lse, rtol=1e-6)
    for f, e in zip(found, jax.jit(jax.grad(expected, (0, 1)))(x, kernel), strict=True):
        np.testing.assert_allclose(f, e, rtol=2e-5, atol=2e-4)  # terms of up to 2 · lse ≈ 10


@pytest.mark.parametrize("implementation, reduction", [(None, "mean"), ("xla", "none")])
def test_an_offset_of_a_rows_logits_costs_no_accuracy(rng, implementation, reduction):
    """Loss and gradients are of the differences. The offset's logits are exact, so these are too.

    With lse rounded the softmax was off by 6e-5 at an offset of 30, and by 4 times itself at 10000.
    """
    x = np.round(4 * rng.standard_normal((12, N))) / 4
    kernel = np.round(4 * rng.standard_normal((N, VOCABULARY))) / 4
    labels = jnp.asarray(rng.integers(0, VOCABULARY, 12))
    cotangents = jnp.asarray(rng.standard_normal(12), f32)

    @jax.jit
    def run(x, kernel):
        def loss(x, kernel):
            options = {"reduction": reduction, "implementation": implementation, "chunk_rows": 5}
            return jnp.vdot(ours(x, kernel, labels, **options), cotangents)

        return jax.value_and_grad(loss, (0, 1))(x, kernel)

    # One more feature, of 1, whose kernel is the offset.
    rows = lambda x: jnp.asarray(np.pad(x, ((0, 0), (0, 1)), constant_values=1), f32)
    words = lambda w, offset: jnp.asarray(np.pad(w, ((0, 1), (0, 0)), constant_values=offset), f32)
    if reduction == "mean":
        cotangents = jnp.ones(())
    value, (dx, dkernel) = run(rows(x), words(kernel, 0))
    for offset in 30, 1000, 10000, -100000:
        found, (fx, fkernel) = run(rows(x), words(kernel, offset))
        np.testing.assert_allclose(found, value, 1e-6)
        np.testing.assert_allclose(fx[:, :N], dx[:, :N], 1e-5, 1e-6 * float(jnp.abs(dx).max()))
        np.testing.assert_allclose(fkernel, dkernel, 1e-5, 1e-6 * float(jnp.abs(dkernel).max()))


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_labels_ignored_cost_nothing(rng, reduction):
    x, kernel, labels = draw(rng)
    loss = lambda x, k: jnp.sum(ours(x, k, jnp.full_like(labels, IGNORE), reduction=reduction))
    value, gradients = jax.value_and_grad(loss, (0, 1))(x, kernel)
    assert value == 0 and not any(g.any() for g in gradients)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 2**31 - 1])
def test_a_label_outside_the_vocabulary_gives_nan(rng, wrong):
    x, kernel, labels = draw(rng)
    labels = labels.at[1, 2].set(wrong)
    each = ours(x, kernel, labels, reduction="none")
    assert np.isnan(each[1, 2]) and np.isnan(each).sum() == 1
    value, dx = jax.value_and_grad(ours)(x, kernel, labels)
    assert np.isnan(value) and np.isnan(dx[1, 2]).all()
    with pytest.raises(ValueError, match=f"be from 0 to 56.*, or ignore=-100; .*{wrong}"):
        ours(x, kernel, np.asarray(labels))
    ignored, known = np.array([0, wrong + 2**40, 1, 2]), np.array([0, IGNORE, 1, 2])
    found = linear_cross_entropy(x[0, :4], kernel, ignored, ignore=wrong + 2**40)
    assert found == ours(x[0, :4], kernel, known)  # of an array of 64 bits


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_labels_of_any_integer_dtype(rng, dtype):
    x, kernel, labels = draw(rng, ignored=0)
    with jax.enable_x64(dtype == "int64"):
        found = ours(x, kernel, jnp.asarray(np.asarray(labels), dtype))
        assert found == ours(x, kernel, labels)
        if dtype != "uint8":
            most = jnp.full_like(labels, np.iinfo(dtype).max, dtype)
            assert np.isnan(ours(x, kernel, most))


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_row_that_does_not_count_may_be_anything(rng, reduction):
    """Its x and its logits may be infinite or NaN: the others' loss and gradients are finite."""
    x, kernel, labels = draw(rng, ignored=0, shape=(10,))
    bad = jnp.arange(10) % 3 == 1
    weights, ignored = jnp.full(10, 1.5), jnp.where(bad, IGNORE, labels)

    @jax.jit
    def run(x, kernel, weights, labels):
        def loss(x, kernel, weights):
            options = {"reduction": reduction, "z_loss": 0.1, "chunk_rows": 4}
            return jnp.sum(ours(x, kernel, labels, weights=weights, **options))

        return jax.value_and_grad(loss, (0, 1, 2))(x, kernel, weights)

    expected = run(x, kernel, weights, ignored)
    nothing = run(x, kernel, jnp.where(bad, 0.0, 1.5), labels)
    for found, e in zip(jax.tree.leaves(nothing)[:3], jax.tree.leaves(expected)):
        np.testing.assert_allclose(found, e, 1e-6, 1e-7)
    for row in np.inf, np.nan, 1e38, 1e36:  # x; the logits alone; the square of lse alone
        spoiled = jnp.where(bad[:, None], row, x)
        found = run(spoiled, kernel, weights, ignored)
        for f, e in zip(jax.tree.leaves(found)[:3], jax.tree.leaves(expected), strict=False):
            np.testing.assert_array_equal(f, e)
        np.testing.assert_array_equal(found[1][2][~bad], expected[1][2][~bad])
        assert np.isfinite(found[1][2]).all()
        # A weight of 0 is a factor as any: 0 times NaN.
        value, (dx, dkernel, _) = run(spoiled, kernel, jnp.where(bad, 0.0, 1.5), labels)
        assert np.isnan(value) and np.isfinite(dx[~bad]).all()
        assert row == 1e36 or np.isnan(dx[bad]).all() and np.isnan(dkernel).all()
    wrong = ignored.at[0].set(VOCABULARY)
    value = ours(x, kernel, wrong, weights=0 * weights, reduction=reduction)
    assert np.isnan(value if reduction != "none" else value[0])


def test_weights_that_add_up_to_nothing(rng):
    x, kernel, labels = draw(rng, shape=(4,), ignored=0)
    loss = lambda x, w: ours(x, kernel, labels, weights=w)
    run = functools.partial(jax.jit(jax.value_and_grad(loss, (0, 1))), x)
    value, gradients = run(jnp.zeros(4))
    assert value == 0 and not gradients[0].any() and np.isfinite(gradients[1]).all()
    value, gradients = run(jnp.array([1.0, -1.0, 2.0, -2.0]))
    assert not np.isfinite(value) and not np.isfinite(gradients[0]).any()


# ---------------------------------------------------------------- transformations


def close(found, expected, rtol=1e-5, atol=1e-5, what=""):
    check = lambda f, e: np.testing.assert_allclose(f, e, rtol, atol, err_msg=what)
    jax.tree.map(check, found, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_scan_and_remat(rng, reduction):
    x, kernel, labels = draw(rng)
    bias = jnp.asarray(rng.standard_normal((3, VOCABULARY)), f32)
    weights = jnp.asarray(rng.uniform(-0.5, 2, SHAPE), f32).at[1, :4].set(0)
    kernels = jnp.stack([kernel, 2 * kernel, -kernel])  # an ensemble
    options = {"softcap": 4.0, "z_loss": 0.1, "reduction": reduction}

    @functools.partial(jax.jit, static_argnums=0)
    def every(fn):
        loss = lambda x, k, b, w, labels: jnp.sum(fn(x, k, labels, bias=b, weights=w, **options))
        grad, x_alone = jax.value_and_grad(loss, (0, 1, 2, 3)), jax.grad(loss)
        bias_alone, weights_alone = jax.grad(loss, 2), jax.grad(loss, 3)
        first = x[0], kernel, bias[0], weights[0], labels[0]
        rows = lambda x, k, b, w: jnp.sum(jax.vmap(loss, (0, None, None, 0, 0))(x, k, b, w, labels))
        step = lambda a: jax.grad(jax.checkpoint(loss), (0, 1))(a[0], kernel, bias[0], *a[1:])
        return {
            "each": jax.vmap(grad, (0, None, None, 0, 0))(x, kernel, bias[0], weights, labels),
            "all": jax.grad(rows, (0, 1, 2, 3))(x, kernel, bias[0], weights),
            "ensemble": jax.vmap(grad)(x, kernels, bias, weights, labels),
            "biases": jax.vmap(bias_alone, (None, None, 0, None, None))(
                *first[:2], bias, *first[3:]
            ),
            "weights": jax.vmap(weights_alone, (None, None, None, 0, None))(
                *first[:3], weights, labels[0]
            ),
            "labels": jax.vmap(x_alone, (None, None, None, None, 0))(*first[:4], labels),
            "scan of remat": jax.lax.map(step, (x, weights, labels)),
        }

    found, expected = every(functools.partial(ours, chunk_rows=5)), every(plain)
    for what, value in expected.items():
        close(found[what], value, what=what)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_forward_mode_and_second_derivatives(rng, reduction):
    """A weight of 0 has the derivatives of any other."""
    x, kernel, labels = draw(rng, shape=(6,), ignored=1)
    bias = jnp.asarray(rng.standard_normal(VOCABULARY), f32)
    weights = jnp.asarray(rng.uniform(0.5, 2, 6), f32).at[jnp.array([1, 4])].set(0)
    operands = x, kernel, bias, weights
    tangents = tuple(jnp.asarray(rng.standard_normal(a.shape), f32) for a in operands)

    @functools.partial(jax.jit, static_argnums=0)
    def every(fn):
        loss = lambda x, k, b, w: jnp.sum(
            fn(x, k, labels, bias=b, weights=w, reduction=reduction, z_loss=0.1) ** 2
        )
        gradient = jax.grad(loss, (0, 1, 2, 3))
        along = lambda *operands: sum(map(jnp.vdot, gradient(*operands), tangents))
        return {
            "tangent": jax.jvp(loss, operands, tangents),
            "along the bias": jax.jvp(
                lambda b: loss(x, kernel, b, weights), (bias,), tangents[2:3]
            ),
            "along weights": jax.jvp(lambda w: loss(*operands[:3], w), (weights,), tangents[3:]),
            "reverse over reverse": jax.grad(along, (0, 1, 2, 3))(*operands),
            "forward over reverse": jax.jvp(gradient, operands, tangents)[1],
        }

    found, expected = every(functools.partial(ours, chunk_rows=4)), every(plain)
    for what, value in expected.items():
        for f, e in zip(jax.tree.leaves(found[what]), jax.tree.leaves(value), strict=True):
            close(f, e, 1e-4, 1e-3 * float(jnp.abs(e).max()), what)


# ---------------------------------------------------------------- operations and residuals


def products(fn, *args):
    """How many products with the kernel a compiled function has, chunks counted once."""
    text = jax.jit(fn).lower(*args).as_text()
    return len(re.findall(r"stablehlo\.dot_general", text))


def test_products_are_those_that_must_be(rng):
    """One in evaluation; three with gradients, four where the cotangent comes later."""
    x, kernel, labels = draw(rng)
    loss = lambda **o: lambda x, kernel: jnp.sum(ours(x, kernel, labels, **o))
    grad = lambda argnums=(0, 1), **o: jax.grad(loss(**o), argnums)
    assert products(loss(), x, kernel) == products(loss(reduction="none"), x, kernel) == 1
    assert products(grad(), x, kernel) == 3
    assert products(grad(0), x, kernel) == products(grad(1), x, kernel) == 2
    assert products(grad(reduction="none"), x, kernel) == 4
    weights = jnp.ones(SHAPE)
    weighted = lambda x, k, w: ours(x, k, labels, weights=w)
    assert products(jax.grad(weighted, (0, 1, 2)), x, kernel, weights) == 3
    assert products(jax.value_and_grad(weighted, 2), x, kernel, weights) == 1
    value = jax.jit(lambda x, kernel: jax.value_and_grad(loss())(x, kernel)[0])
    assert hlo.count(value.lower(x, kernel).compile(), "dot") == 1  # the gradient is not used
    kept = jax.jit(jax.grad(jax.checkpoint(loss()))).lower(x, kernel).compile()
    assert hlo.count(kept, "dot") == 2  # the first forward pass is not needed, x's alone after it


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_are_never_in_memory_as_a_whole(reduction):
    rows, n, vocabulary = 4096, 16, 2048
    struct = jax.ShapeDtypeStruct
    operands = struct((rows, n), f32), struct((n, vocabulary), f32), struct((rows,), jnp.int32)
    loss = lambda x, k, labels: jnp.mean(
        linear_cross_entropy(x, k, labels, reduction=reduction, chunk_rows=128)
    )
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*operands).compile()
    # Logits and gradient of one chunk, and of one the exponentials too; x twice, a kernel.
    limit = 4 * (4 * 128 * vocabulary + 2 * rows * n + 2 * n * vocabulary + 8 * rows)
    assert program.memory_analysis().temp_size_in_bytes <= limit < 4 * rows * vocabulary / 4


def test_rows_of_a_chunk():
    """Equal multiples of 128 of at most 512 MiB, or what there is room for."""
    assert chunk_rows(16384, 128256, 2) == 2048
    assert chunk_rows(16384, 32000, 2) == 8192
    assert chunk_rows(1000, 128256, 2) == 1000
    assert chunk_rows(2100, 128256, 2) == 1152
    assert chunk_rows(16384, 128256, 4) == 1024
    assert chunk_rows(7, 2**30, 2) == 1
    for rows in range(1, 5000, 333):
        size = chunk_rows(rows, 200_000, 4)
        assert 0 < size <= rows and size * 200_000 * 4 <= 2**29


# ---------------------------------------------------------------- bad inputs


X, KERNEL, LABELS = jnp.ones((4, 3)), jnp.ones((3, 7)), jnp.zeros(4, jnp.int32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"labels": LABELS.astype(f32)}, TypeError, "labels must be integers, got float32"),
        ({"labels": LABELS[:3]}, ValueError, r"shape of x's rows, \(4,\); got \(3,\)"),
        ({"labels": np.array([0, 1, 7, 2])}, ValueError, "from 0 to 6, .*vocabulary; got 7"),
        ({"labels": [0, 1, -1, 2]}, ValueError, "from 0 to 6, .*vocabulary; got -1"),
        ({"labels": "many"}, TypeError, "labels must be an array, got 'many'"),
        ({"weights": jnp.ones(3)}, ValueError, r"weights .* x's rows, \(4,\); got \(3,\)"),
        ({"weights": 1j * jnp.ones(4)}, TypeError, "weights must be real .*got complex64"),
        ({"bias": jnp.ones(6)}, ValueError, r"bias must have the shape \(7,\).*got \(6,\)"),
        ({"bias": jnp.ones(7, int)}, TypeError, "bias must be one of .*got int32"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be at most 1, got 1.5"),
        ({"kernel": KERNEL.T}, ValueError, r"got kernel of shape \(7, 3\).*pass contract=1"),
        ({"kernel": KERNEL, "contract": 1}, ValueError, "pass contract=0 if it is stored"),
        ({"kernel": jnp.ones((5, 7))}, ValueError, r"x's last axis of 3 for n; .*\(5, 7\)"),
        ({"kernel": jnp.ones((3, 7, 2))}, ValueError, r"kernel must be \(n, vocab\), got shape"),
        ({"kernel": jnp.ones((3, 0))}, ValueError, "kernel has no words"),
        ({"kernel": jnp.ones((3, 7), int)}, TypeError, "kernel must be one of .*got int32"),
        ({"x": jnp.ones(())}, ValueError, "x must be .* got a scalar"),
        ({"contract": 2}, ValueError, "contract must be 0, .* or 1, .*got 2"),
        ({"softcap": -5.0}, ValueError, "softcap must be positive, or None .*got -5.0"),
        ({"softcap": 1e300}, ValueError, r"softcap must be at most 1e\+31, got 1e\+300"),
        ({"softcap": 1e-300}, ValueError, "softcap must be at least 1e-31, got 1e-300"),
        ({"z_loss": 1e38}, ValueError, r"z_loss must be at most 1e\+31, got 1e\+38"),
        ({"z_loss": -0.1}, ValueError, "z_loss must be at least 0, got -0.1"),
        ({"reduction": "average"}, ValueError, "one of 'mean', 'sum', 'none', got 'average'"),
        ({"ignore": 0.5}, TypeError, "ignore must be an integer, got 0.5"),
        ({"logits_dtype": bf16}, ValueError, "hold the values of dtype, float32; got bfloat16"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be at least 1, got 0"),
        ({"implementation": "pallas"}, NotImplementedError, "has no 'pallas' implementation"),
    ],
)
def test_mistakes_are_one_clear_error(change, error, message):
    arguments = {"x": X, "kernel": KERNEL, "labels": LABELS} | change
    with pytest.raises(error, match=message) as found:
        linear_cross_entropy(**arguments)
    assert "\n" not in str(found.value) and str(found.value).startswith(
        ("linear_cross_entropy", "implementation")
    )


def test_no_rows():
    loss = lambda x, k: linear_cross_entropy(x, k, LABELS[:0])
    value, (dx, dkernel) = jax.value_and_grad(loss, (0, 1))(X[:0], KERNEL)
    assert value == 0 and dx.shape == (0, 3) and not dkernel.any()


# ---------------------------------------------------------------- implementations


def test_native_is_refused_where_no_kernel_serves():
    with pytest.raises(NotImplementedError, match="'native' cannot .*: on cpu, XLA already"):
        linear_cross_entropy(X, KERNEL, LABELS, implementation="native")
    found = linear_cross_entropy(X, KERNEL, LABELS, implementation=("native", "xla"))
    np.testing.assert_allclose(found, np.log(7), rtol=1e-6)


def test_cuda_programs_have_one_kernel_a_chunk(rng, arch):
    pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    arch("sm_90")
    x, kernel, labels = draw(rng, bf16)

    def calls(fn):
        lowered = jax.jit(fn).trace(x, kernel).lower(lowering_platforms=("cuda",))
        return re.findall(r'kernel = "(\w+)"', lowered.as_text())

    loss = lambda **o: lambda x, k: jnp.sum(ours(x, k, labels, **o))
    assert calls(loss(implementation="native")) == ["softmax_statistics"]
    assert calls(jax.grad(loss(), (0, 1))) == ["softmax_statistics_and_gradient"]
    later = calls(jax.grad(loss(reduction="none"), (0, 1)))
    assert later == ["softmax_statistics", "softmax_gradient"]
    assert calls(jax.grad(loss(implementation="xla"))) == []
