"""`compare`: errors of a function and of `fuse` of it, against the program in a wider dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import normfuse
from normfuse.layers import compare as module
from normfuse.layers import nnx as ours_nnx
from normfuse.layers.fuse import losses

bf16, f32 = jnp.bfloat16, jnp.float32


@pytest.fixture(autouse=True)
def small_vocabularies(monkeypatch):
    monkeypatch.setattr(losses, "SMALLEST", 8)


def draw(seed, *shape, dtype=f32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def cross_entropy(params, x, labels, scale=1.0):
    logits = scale * x @ params["kernel"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -picked.mean()


def arguments(dtype=f32):
    return {"kernel": draw(0, 8, 32, dtype=dtype)}, draw(1, 5, 8, dtype=dtype), jnp.arange(5)


def errors(found):
    return {row.name: (row.theirs, row.ours) for row in found.rows}


def test_table():
    found = normfuse.compare(cross_entropy, *arguments(), 0.5)
    assert [*errors(found)] == ["value", "d params['kernel']", "d x"]
    assert all(0 < e < 1e-6 for pair in errors(found).values() for e in pair)
    assert [row.domain for row in found.report.fused] == ["loss"]
    lines = str(found).splitlines()
    assert lines[0].split() == ["theirs", "ours"]
    value = found.rows[0]
    assert lines[1].split() == ["value", f"{value.theirs:.1e}", f"{value.ours:.1e}"]
    assert lines[-1] == "beside the same program in float64; replaced: 1 of 1 loss"


def test_errors_are_relative_to_the_norm_of_a_float32_reference():
    params, x, labels = arguments(bf16)
    found = normfuse.compare(cross_entropy, params, x, labels)
    assert found.reference == "the same program in float32"
    gradients = jax.jit(jax.grad(cross_entropy, (0, 1)))
    theirs = gradients(params, x, labels)
    with jax.enable_x64(True):
        wide = [jax.tree.map(lambda leaf: leaf.astype(jnp.float64), one) for one in (params, x)]
        exact = gradients(*wide, labels)
    host = lambda tree: [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    pairs = zip(host(theirs), host(exact), strict=True)
    want = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]
    np.testing.assert_allclose([row.theirs for row in found.rows[1:]], want, rtol=1e-3)
    assert min(want) > 1e-4


def test_what_the_function_itself_casts_is_wide_in_the_reference():
    """Else its own roundings would count as exact, and only those of `fuse` as errors."""

    def loss(x, w):
        @jax.checkpoint
        def body(carry, row):
            carry = jnp.tanh(carry @ w.astype(bf16) + row)
            return carry, lax.cond(carry[0] > 0, lambda c: 2 * c, lambda c: c, carry)

        last, rows = lax.scan(body, jnp.ones(8, bf16), x.astype(bf16))
        powers = lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] * s[0], s[1] + 1), (x[0], 0))[0]
        return rows.astype(f32).sum() + last.sum() + lax.stop_gradient(powers).sum()

    x, w = draw(0, 4, 8), draw(1, 8, 8)
    for row in normfuse.compare(loss, x, w).rows:
        assert 1e-4 < row.theirs < 3e-2, row


def test_derivatives_that_functions_define_themselves_hold_in_the_reference():
    @jax.custom_vjp
    def rounded(x, n):  # its derivative is 3, and not 0
        return jnp.round(x * n) / n

    rounded.defvjp(lambda x, n: (rounded(x, n), None), lambda _, g: (3 * g, None))

    @jax.custom_jvp
    def bounded(x, which):
        return jnp.where(which, jnp.clip(x, -1, 1), x).astype(bf16)

    bounded.defjvp(lambda p, t: (bounded(*p), 5 * t[0].astype(bf16)))

    def loss(x, w):
        return (rounded(x, 4) * w).sum() + (bounded(x, jnp.arange(8) < 4) * w).sum()

    found = errors(normfuse.compare(loss, draw(0, 8), draw(1, 8, dtype=bf16)))
    assert all(theirs < 1e-2 for theirs, _ in found.values()), found


def test_it_sees_what_is_wrong(monkeypatch):
    """`ours` comes from `fuse`, with the options given, and is compared with the right values."""
    asked = {}

    def wrong(function, *, report, **options):
        asked.update(options)
        inner = normfuse.fuse(function, report=report)
        return lambda *args: 1.5 * inner(*args)

    monkeypatch.setattr(module, "fuse", wrong)
    found = normfuse.compare(cross_entropy, *arguments(), quantization="fp8", skip=["norm"])
    assert asked == {"quantization": "fp8", "skip": ("norm",)}
    for theirs, ours in errors(found).values():
        assert theirs < 1e-6 and ours == pytest.approx(0.5, abs=1e-5)


def test_results_that_are_not_finite():
    """Equal infinities and NaNs are no errors; one where the reference has a number is."""
    assert module._error([np.inf, np.nan, 3.0], [np.inf, np.nan, 4.0]) == 0.25
    assert np.isnan(module._error([np.nan, 1.0], [1.0, 1.0]))
    assert module._error([np.inf, 1.0], [1.0, 1.0]) == np.inf
    assert module._error([0.0], [0.0]) == 0 and module._error([1e-9], [0.0]) == np.inf
    # Nothing is compared if the reference has no number.
    assert np.isnan(module._error(np.nan, np.nan)) and np.isnan(module._error([np.inf], [np.inf]))
    assert module._error([], []) == 0


class Noisy(nnx.Module):
    """A model whose calls draw dropout and move running statistics."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.batch, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.norm, self.head = (
            nnx.RMSNorm(8, rngs=rngs),
            nnx.Linear(8, 32, use_bias=False, rngs=rngs),
        )

    def __call__(self, x):
        return self.head(self.norm(self.drop(self.batch(self.first(x)))))


def noisy_loss(model, x, labels, name="mine"):
    log_p = jax.nn.log_softmax(model(x))
    return -jnp.take_along_axis(log_p, labels[:, None], 1).mean(), model.batch.mean[...]


def test_nnx_models_that_a_call_changes():
    model = Noisy(nnx.Rngs(0))
    before = [*map(np.asarray, map(_data, jax.tree.leaves(nnx.state(model))))]
    found = ours_nnx.compare(noisy_loss, model, draw(1, 5, 8), jnp.arange(5), "mine")
    assert found.reference == "the same program in float64"
    names = [*errors(found)]
    assert names[:2] == ["result[0]", "result[1]"] and names[-1] == "d x", names
    assert {"d model['first']['kernel']", "d model['batch']['scale']"} < {*names}
    for name in ("result[0]", "result[1]", "d model['head']['kernel']", "d x"):
        assert 0 < max(errors(found)[name]) < 2e-6, str(found)
    assert {row.domain for row in found.report.fused} == {"norm", "loss"}, str(found.report)
    after = map(_data, jax.tree.leaves(nnx.state(model)))
    assert all(map(np.array_equal, before, after))
    skipped = ours_nnx.compare(noisy_loss, model, draw(1, 5, 8), jnp.arange(5), skip="loss")
    assert {row.domain for row in skipped.report.fused} == {"norm"}


def _data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_bad_arguments():
    with pytest.raises(TypeError, match="compare: the function returns no floating-point scalar"):
        normfuse.compare(lambda x: (x, 3, x.astype(int).sum()), jnp.ones(3))
    with pytest.raises(TypeError, match="compare: function must be a function"):
        normfuse.compare(3, jnp.ones(3))
    with pytest.raises(TypeError, match="compare: skip must be a word, .* got 3"):
        normfuse.compare(cross_entropy, *arguments(), skip=3)
    with pytest.raises(ValueError, match="compare: quantization must be None or 'fp8'"):
        normfuse.compare(jnp.sum, jnp.ones(3), quantization="int8")
