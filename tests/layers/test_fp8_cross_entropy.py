"""linear_cross_entropy with a gradient in FP8: the recipe, the loss's bits, transformations."""

import functools

import cross_entropy_reference as reference
import fp8_reference
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import wide

from normfuse import accumulate_gradients, linear_cross_entropy
from normfuse.layers.cross_entropy import op, softmax
from normfuse.layers.cross_entropy.softmax import Softmax
from normfuse.layers.quantization.quantize import Codes
from normfuse.native import implementation

f32, bf16 = jnp.float32, jnp.bfloat16
ROWS, N, VOCABULARY, IGNORE = 96, 32, 1024, -100
fp8 = functools.partial(linear_cross_entropy, quantization="fp8")


def draw(rng, dtype=bf16, contract=0, kernel_dtype=f32, size=1.0, rows=ROWS):
    x = jnp.asarray(rng.standard_normal((rows, N)), dtype)
    shape = (N, VOCABULARY) if contract == 0 else (VOCABULARY, N)
    kernel = jnp.asarray(size * rng.standard_normal(shape) / np.sqrt(N), kernel_dtype)
    return x, kernel, jnp.asarray(rng.integers(0, VOCABULARY, rows))


def both_ways(loss, *args, **options):
    run = lambda x, kernel: loss(x, kernel, *args, **options)
    return jax.jit(jax.value_and_grad(run, (0, 1)))


def distance(found, expected):
    found, expected = wide(found), wide(expected)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def recipe(x, w, labels, a, b, softcap=None):
    """dx and dw of docs/quantization.md in NumPy, for w of (n, vocab), and the softmax itself.

    They are those of the gradient before it is rounded, and the root mean square distance from them
    of what is rounded at random, by the two codes around each number.
    """
    exact = reference.Softmax(wide(x) @ wide(w), np.asarray(labels), softcap)
    a, b = np.float32(a(exact)), np.float32(b)
    scale = np.float32(2.0**-14) * max(np.abs(a / exact.sum.astype(np.float32)).max(), abs(b).max())
    g = exact.gradient(a, b) / scale
    step = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(g), 1e-30))) - 2, -16)
    above = g - step * np.floor(g / step)
    variance = above * (step - above)
    decoded = lambda array: np.multiply(*map(np.float64, fp8_reference.quantize(np.asarray(array))))
    x, w = decoded(x).T, decoded(w).T
    off = variance @ w**2, x**2 @ variance
    both = scale * (g @ w), scale * (x @ g)
    return [(d, scale * np.sqrt(v.sum()) / np.linalg.norm(d)) for d, v in zip(both, off)]


CASES = {
    "bfloat16": (bf16, f32, {}),
    "bfloat16 kernel, tied": (bf16, bf16, {"contract": 1}),
    "float32": (f32, f32, {"z_loss": 0.01, "softcap": 5.0}),
    "float16": (jnp.float16, f32, {"contract": 1, "z_loss": 0.01}),
    "plain HLO": (bf16, f32, {"implementation": "xla"}),
}


@pytest.mark.parametrize("case, reduction", half(CASES, ["mean", "none"]))
def test_gradients_are_those_of_the_recipe_and_the_loss_is_unchanged(rng, case, reduction):
    """The error is that of codes at random, no less; the loss is equal in all bits."""
    dtype, kernel_dtype, options = CASES[case]
    contract = options.get("contract", 0)
    x, kernel, labels = draw(rng, dtype, contract, kernel_dtype)
    factors = rng.uniform(0.1, 2, ROWS).astype(np.float32)
    if reduction == "mean":
        given = {"weights": jnp.asarray(factors), **options}
        loss, counts = linear_cross_entropy, factors / factors.sum()
        factors = counts if dtype != jnp.float16 else factors  # in float16 the divisor comes later
    else:
        given, counts = options | {"reduction": "none"}, factors
        loss = lambda *a, **o: jnp.vdot(linear_cross_entropy(*a, **o), jnp.asarray(factors))
    value, (dx, dw) = both_ways(loss, labels, quantization="fp8", **given)(x, kernel)
    plain, (gx, gw) = both_ways(loss, labels, **given)(x, kernel)
    assert value == plain and dx.dtype == x.dtype and dw.dtype == kernel_dtype

    w = kernel.astype(dtype)
    along = lambda s: factors * (1 + 2 * options.get("z_loss", 0) * s.lse)
    turn = np.transpose if contract else np.asarray
    expected = recipe(x, turn(w), labels, along, factors, options.get("softcap"))
    ratio = counts[0] / factors[0]
    for found, (wanted, off) in zip((dx, turn(dw)), expected):
        rounded = float(jnp.finfo(dtype).eps)  # logits, and results
        assert 0.8 * off < distance(found, ratio * wanted) < 1.2 * off + rounded
    for found, exact in (dx, gx), (dw, gw):  # e5m2's error and e4m3's, together .08
        assert 0.01 < distance(found, exact) < 0.09


def codes_of(z, labels):
    """The codes of the gradient of logits, and the numbers that they are to be, in float64."""
    spec = Softmax(codes=Codes("float8_e5m2", has_qt=False))
    z, labels, b = jnp.asarray(z, f32), jnp.asarray(labels), jnp.ones(len(z))
    most, total, _ = softmax.define_statistics(spec, z, labels)
    q, scale = jax.jit(softmax.define_codes, static_argnums=0)(spec, z, labels, most, b / total, b)
    exact = reference.Softmax(wide(z), np.asarray(labels)).gradient(b, b)
    return wide(q), exact / np.float64(scale)


@pytest.mark.parametrize("spread", [0, 1, 4])
def test_the_mean_of_codes_is_the_number(rng, spread):
    """Over rows that have everything in common, and over the words of one logit (spread 0).

    A bit at random has a variance of at most 1/4: a mean of n is hardly six deviations, 3 / √n,
    away. float16 has a step of 2^-8 of the code's. To nearest, a number may be off by half a step.
    """
    rows, vocabulary = 1024, 1040
    z = np.tile(spread * rng.standard_normal(vocabulary), (rows, 1))
    q, exact = codes_of(z, np.full(rows, z[0].argmax()))
    step = 2.0 ** np.maximum(np.floor(np.log2(np.abs(exact))) - 2, -16)
    off = (q - exact) / step
    assert np.abs(off).max() < 1 + 2.0**-8
    assert np.abs(off.mean(0)).max() < 3 / np.sqrt(rows) + 2.0**-8
    if spread == 0:
        assert np.abs(off[:, 1:].mean(1)).max() < 3 / np.sqrt(vocabulary - 1) + 2.0**-8


def test_codes_are_rounded_alike_again_and_otherwise_once_the_row_has_changed(rng):
    z, labels = rng.standard_normal((32, 1040)), rng.integers(0, 1040, 32)
    q, _ = codes_of(z, labels)
    np.testing.assert_array_equal(q, codes_of(z, labels)[0])
    z[:16, 7] += 1e-3  # the sums of these rows, in a thousandth of what a code's step is
    changed = (q != codes_of(z, labels)[0]).mean(1)
    assert not changed[16:].any() and changed[:16].min() > 0.2


@pytest.mark.parametrize("by, reduction", half(["weight", "label"], ["mean", "sum", "none"]))
def test_a_row_that_does_not_count_may_be_anything(rng, reduction, by):
    """It has no say in the scales either; one of weight 0 is finite, as 0 times NaN is not."""
    x, kernel, labels = draw(rng, f32)
    bad = jnp.arange(ROWS) % 3 == 1
    weights = jnp.where(bad & (by == "weight"), 0.0, 1.5)
    labels = labels if by == "weight" else jnp.where(bad, IGNORE, labels)
    options = {"reduction": reduction, "ignore": IGNORE, "weights": weights, "chunk_rows": 32}
    run = both_ways(lambda *a, **o: jnp.sum(fp8(*a, **o)), labels, **options)
    expected = run(x, kernel)
    for row in np.inf, np.nan, 1e30, -1e4:
        found = run(jnp.where(bad[:, None], row, x), kernel)
        if by == "label" or np.isfinite(row):
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        else:
            assert np.isnan(found[0]) and np.isnan(found[1][1]).all()


def test_wrong_labels_and_factors_that_are_all_zero(rng):
    x, kernel, labels = draw(rng)
    wrong = labels.at[5].set(VOCABULARY)
    value, (dx, dw) = both_ways(fp8, wrong)(x, kernel)
    assert np.isnan(value) and np.isnan(wide(dx[5])).all() and np.isnan(dw).all()
    assert np.isfinite(wide(dx[:5])).all()  # its NaN is no part of the others' scale
    nothing = both_ways(fp8, labels, weights=jnp.zeros(ROWS))(x, kernel)
    assert not any(np.any(a) for a in jax.tree.leaves(nothing))
    tiny = both_ways(fp8, labels, weights=jnp.full(ROWS, 1e-20), reduction="sum")(x, kernel)
    plain = both_ways(linear_cross_entropy, labels, reduction="sum")(x, kernel)
    assert 0.01 < distance(tiny[1][1] * 1e20, plain[1][1]) < 0.09


def test_the_gradient_of_entropies(rng):
    """It is added before the codes, and the entropies stay as they are."""
    x, kernel, labels = draw(rng)

    def both(loss):
        options = {"reduction": "none", "with_entropy": True, "chunk_rows": 32}
        run = lambda x, kernel: jnp.sum(sum(loss(x, kernel, labels, **options)))
        return jax.jit(jax.value_and_grad(run, (0, 1)))(x, kernel)

    (value, found), (plain, expected) = both(fp8), both(linear_cross_entropy)
    assert value == plain
    assert all(0.01 < distance(f, e) < 0.09 for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_transformations(rng, reduction):
    """Rows of other chunks have other scales: each form's gradients are off by the codes alone."""
    x, kernel, labels = draw(rng, f32)
    x, labels = x.reshape(3, 32, N), labels.reshape(3, 32)
    kernels = jnp.stack([kernel, kernel / 2, -kernel])

    def every(quantization):
        options = {"reduction": reduction, "quantization": quantization, "chunk_rows": 16}
        loss = lambda x, k, labels: jnp.sum(linear_cross_entropy(x, k, labels, **options))
        both = jax.value_and_grad
        batch = lambda k, b: loss(b[0], k, b[1])
        return {
            "of each": jax.vmap(both(loss, (0, 1)), (0, None, 0))(x, kernel, labels),
            "kernels": jax.vmap(both(loss, (0, 1)))(x, kernels, labels),
            "scan": jax.lax.map(
                lambda a: both(jax.checkpoint(loss), (0, 1))(a[0], kernel, a[1]), (x, labels)
            ),
            "microbatches": accumulate_gradients(batch, kernel, (x, labels)),
        }

    found, plain = (jax.jit(every, static_argnums=0)(q) for q in ("fp8", None))
    for what, (value, gradients) in found.items():
        np.testing.assert_array_equal(value, plain[what][0], what)
        for f, e in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain[what][1]), strict=True):
            assert 0.01 < distance(f, e) < 0.06, what


def test_second_derivatives_are_those_of_the_unquantized_loss(rng):
    x, kernel, labels = draw(rng, f32)
    along = jnp.asarray(rng.standard_normal(x.shape), f32)

    def second(loss):
        cost = lambda x: jnp.sum(loss(x, kernel, labels, reduction="none", chunk_rows=32))
        return jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(cost)(x), along)))(x)

    assert distance(second(fp8), second(linear_cross_entropy)) < 1e-5


def test_what_cannot_be_in_fp8_is_not_and_says_so(rng, monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    x, kernel, labels = draw(rng)
    x, kernel, labels = x[:, :24], kernel[:24, :1000], labels % 1000
    found, plain = (both_ways(f, labels)(x, kernel) for f in (fp8, linear_cross_entropy))
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    ((op, why),) = implementation.fallbacks()
    assert op == "linear_cross_entropy" and "shape (24, 1000)" in why
    x, kernel, labels = draw(rng)
    with pytest.raises(ValueError, match="quantization must be None or 'fp8', got 'int8'"):
        linear_cross_entropy(x, kernel, labels, quantization="int8")
    with pytest.raises(TypeError, match="float64"), jax.enable_x64(True):
        fp8(x.astype(jnp.float64), kernel, labels)


@pytest.mark.parametrize("reduction, wanted", [("sum", (0, 1)), ("none", 0), ("sum", 1)])
def test_any_number_of_rows_is_in_fp8(rng, monkeypatch, reduction, wanted):
    """Rows of zeros after them change no scale: gradients are those of whole chunks."""
    monkeypatch.setattr(implementation, "_plain", {})
    x, kernel, labels = draw(rng)

    def gradients(rows, count, **options):
        weights = (jnp.arange(rows) < count).astype(f32)
        each = lambda x, k: jnp.sum(
            fp8(x, k, labels[:rows], weights=weights, reduction=reduction, **options)
        )
        run = jax.jit(jax.grad(each, wanted))
        text = run.lower(x[:rows], kernel).as_text()
        codes = f"96x{VOCABULARY}xf8E5M2", f"{VOCABULARY}x96xf8E5M2"  # rows of whole tiles
        assert options or any(f"tensor<{each}>" in text for each in codes)
        return jax.tree.leaves(run(x[:rows], kernel))

    padded, whole = gradients(90, 90), gradients(96, 90)
    for one, other in zip(padded, whole, strict=True):
        # Codes and scales are equal; the order of sums may differ.
        assert distance(one, other[:90] if len(other) == 96 else other) < 1e-6
    for chunk in (80, 37):  # 10 rows, then 80; 16, then 37 twice
        in_chunks = gradients(90, 90, chunk_rows=chunk)
        for one, other in zip(in_chunks, padded, strict=True):
            assert distance(one, other) < 0.09  # other scales round otherwise
    assert not implementation.fallbacks()


MESHES = {  # shape, axes, x's rows, the kernel
    "data": ((8,), ("data",), P("data"), P()),
    "FSDP": ((8,), ("fsdp",), P("fsdp"), P("fsdp", None)),
    "all": ((2, 2, 2), ("data", "fsdp", "tensor"), P(("data", "fsdp")), P("fsdp", "tensor")),
}


@pytest.mark.parametrize("name, kind", half(MESHES, [AxisType.Auto, AxisType.Explicit]), ids=str)
def test_meshes_need_no_more_than_without(eight_devices, rng, name, kind):
    """Each device has its own scales: the loss keeps its bits, and nothing more is communicated."""
    shape, names, rows, stored = MESHES[name]
    arrays = draw(rng, f32, rows=128)  # 16 on each of eight devices
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
    places = [NamedSharding(mesh, spec) for spec in (rows, stored, rows)]
    auto = {"out_shardings": (None, tuple(places[:2]))} if kind == AxisType.Auto else {}

    def run(loss):
        placed = [jax.device_put(*pair) for pair in zip(arrays, places)]
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1)), **auto).lower(*placed).compile()
        return compiled(*placed), hlo.communicated(compiled)

    with jax.set_mesh(mesh):
        ((value, gradients), seen), ((plain, exact), expected) = run(fp8), run(linear_cross_entropy)
    assert value == plain and seen == expected
    for found, wanted, place in zip(gradients, exact, places):
        assert found.sharding.is_equivalent_to(place, found.ndim)
        assert 0.01 < distance(found, wanted) < 0.06


@pytest.mark.parametrize("has_q, has_qt", [(True, True), (False, True)])
def test_a_chunk_is_as_many_rows_as_logits_and_codes_make_896_mib(has_q, has_qt):
    rows, n, words = 16384, 8, 128256
    x, kernel = jax.ShapeDtypeStruct((rows, n), bf16), jax.ShapeDtypeStruct((words, n), bf16)
    codes = Codes("float8_e5m2", has_q, has_qt)
    sizes = [op._size(op.Spec(Softmax(codes=c), contract=1), x, kernel) for c in (None, codes)]
    assert sizes == [2048, 1664 if has_q else 2432]  # equal, as far as multiples of 128 allow
    assert sizes[1] * words * (2 + has_q + has_qt) <= 896 * 2**20
