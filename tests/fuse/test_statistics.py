"""`fuse` of losses beside which a function reads best words or entropies of the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import fuse
from normfuse.layers.cross_entropy import chunks
from normfuse.layers.cross_entropy.linear import Options, best_words

ROWS, N, V = (2, 6), 8, 16


def operands(dtype="float32"):
    """x whose rows are NaN, of equal logits, and random; a kernel with equal words; labels."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (*ROWS, N), dtype).at[0, 0].set(jnp.nan).at[0, 1].set(0)
    kernel = jax.random.normal(keys[1], (N, V), dtype)
    return (
        x,
        kernel.at[:, V // 2 :].set(kernel[:, : V // 2]),
        jax.random.randint(keys[2], ROWS, 0, V),
    )


def step(logits, counted=lambda z, y: z.argmax(-1)):
    """A loss of rows that are not NaN, and a statistic of the logits."""

    def function(x, kernel, y):
        z = logits(x, kernel)
        each = optax.softmax_cross_entropy_with_integer_labels(z, y)
        return jnp.where(jnp.arange(ROWS[1]) > 0, each, 0).sum(), counted(z, y)

    return function


CASES = {
    "words": step(lambda x, w: x @ w),
    "accuracy": step(lambda x, w: x @ w, lambda z, y: (jnp.argmax(z, -1) == y).mean()),
    "soft cap": step(lambda x, w: 2 * jnp.tanh(x @ w / 2)),
    "bias": step(lambda x, w: x @ w + jnp.arange(V, dtype=w.dtype) % 3),
    "words hidden": step(lambda x, w: x @ w + jnp.where(jnp.arange(V) < V - 2, 0, -1e9)),
    "other rows": step(lambda x, w: x @ w, lambda z, y: z.argmax(-1).T),
    "float32 of bfloat16": step(lambda x, w: (x @ w).astype("float32")),
    "words first": step(lambda x, w: jnp.einsum("btd,dv->btv", x, w), lambda z, y: z.argmax(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_best_words_need_no_logits(name):
    x, kernel, y = operands("bfloat16" if "bfloat16" in name else "float32")
    reports = []
    fused = fuse(CASES[name], report=reports.append)
    grad = lambda f: jax.jit(jax.value_and_grad(f, 1, has_aux=True))(x, kernel, y)[0]
    (loss, words), (theirs, wanted) = grad(fused), grad(CASES[name])
    np.testing.assert_array_equal(words, wanted)
    # Older JAX rounds bfloat16's logits before they are widened.
    np.testing.assert_allclose(loss, theirs, rtol=1e-6 if x.dtype == jnp.float32 else 2.0**-8)
    assert [row.served.split(":")[0] for row in reports[-1].rows] == ["linear_cross_entropy"] * 2
    text = str(jax.make_jaxpr(fused)(x, kernel, y))
    assert "cross_entropy_argmax" in text and "dot_general" not in text


LEFT = {
    "no loss": lambda x, w, y: (x @ w).argmax(-1),
    "the loss is left": step(lambda x, w: x @ w, lambda z, y: (z.argmax(-1), z)),
    "log-probabilities": step(lambda x, w: x @ w, lambda z, y: jax.nn.log_softmax(z).argmax(-1)),
    "over rows": step(lambda x, w: x @ w, lambda z, y: z.argmax(1)),
    "negative": step(lambda x, w: x @ w, lambda z, y: (-z).argmax(-1)),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_statistics_keep_the_logits(name):
    x, kernel, y = operands()
    fused = fuse(LEFT[name], report=lambda report: None)
    assert "argmax" not in str(jax.make_jaxpr(fused)(x, kernel, y)).replace(" argmax[", "")
    jax.tree.map(
        np.testing.assert_array_equal, fused(x, kernel, y)[1:], LEFT[name](x, kernel, y)[1:]
    )


softmax, log_softmax, stop = jax.nn.softmax, jax.nn.log_softmax, jax.lax.stop_gradient
integers = optax.softmax_cross_entropy_with_integer_labels
SOME = jnp.arange(V) < V - 2


def entropy(z):
    return -jnp.sum(jnp.exp(log_softmax(z)) * log_softmax(z), -1)


ENTROPIES = {
    "exp log p": lambda z, b: entropy(z),
    "negative p": lambda z, b: jnp.sum(-softmax(z) * log_softmax(z), -1),
    "lse less mean": lambda z, b: jax.nn.logsumexp(z, -1) - jnp.sum(softmax(z) * z, -1),
    "mean alone": lambda z, b: (z * softmax(z)).sum(-1),
    "log of p": lambda z, b: -(softmax(z) * jnp.log(softmax(z))).mean(-1),
    "optax": lambda z, b: optax.softmax_cross_entropy(z, softmax(z)),
    "temperature": lambda z, b: entropy(z / 0.5),
    "soft cap": lambda z, b: entropy(3 * jnp.tanh(z / 3)),
    "bias": lambda z, b: entropy(z + b),
    "weighted": lambda z, b: entropy(z) * b[:6],
    "selected": lambda z, b: jnp.where(jnp.arange(6) % 2, entropy(z), 0).sum(),
    "words hidden": lambda z, b: entropy(jnp.where(SOME, z, -1e9)),
    "words added": lambda z, b: entropy(z + jnp.where(SOME, 0, -1e9)),
    "offset": lambda z, b: entropy(z + 3000.0 * jnp.ones(V)),
    "stopped": lambda z, b: entropy(stop(z)) * b[:6],
    "stopped, with it": lambda z, b: entropy(z) * stop(entropy(z)),
}
LOOKALIKES = {
    "p log p where p is not 0": lambda z, b: jax.scipy.special.entr(softmax(z)).sum(-1),
    "of another temperature": lambda z, b: -jnp.sum(softmax(z / 0.7) * log_softmax(z), -1),
    "p stopped": lambda z, b: -jnp.sum(stop(softmax(z)) * log_softmax(z), -1),
    "log p stopped": lambda z, b: -jnp.sum(softmax(z) * stop(log_softmax(z)), -1),
    "a bias added to stopped": lambda z, b: entropy(stop(z) + b),
    "-inf": lambda z, b: entropy(jnp.where(SOME, z, -jnp.inf)),
    "over rows": lambda z, b: -jnp.sum(softmax(z) * log_softmax(z), -2),
    "p by rows": lambda z, b: -jnp.sum(softmax(z, 1) * log_softmax(z), -1),
    "p squared": lambda z, b: jnp.sum(softmax(z) ** 2 * log_softmax(z), -1),
    "log p squared": lambda z, b: jnp.sum(softmax(z) * log_softmax(z) ** 2, -1),
    "rows of others": lambda z, b: -jnp.sum(softmax(z) * log_softmax(z[::-1]), -1),
}


@pytest.mark.parametrize("name", [*ENTROPIES, *LOOKALIKES])
def test_entropies_need_no_logits(name):
    """As a part of the loss, and as a result beside it; no further from float64 than theirs."""
    of_rows = (ENTROPIES | LOOKALIKES)[name]

    def function(x, kernel, b, y):
        z = (x @ kernel).astype(b.dtype)
        each = of_rows(z, b)
        return integers(z, y).sum() + jnp.sin(each).sum(), stop(each)

    x, kernel, y = operands()
    args = [x.at[0, 0].set(1), kernel / 2, jnp.linspace(-1, 2, V)]
    fused = fuse(function, report=(reports := []).append)
    grad = lambda f: jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))
    leaves = lambda f, args: map(np.asarray, jax.tree.leaves(grad(f)(*args, y)))
    found, theirs = leaves(fused, args), leaves(function, args)
    with jax.enable_x64(True):
        exact = [*leaves(function, [a.astype("float64") for a in args])]
    for f, t, e in zip(found, theirs, exact, strict=True):
        if np.isfinite(e).all():
            off, size = np.abs(t - e).max(), np.abs(e).max()
            np.testing.assert_allclose(f, e, rtol=0, atol=off + 2.0**-20 * size)
        else:
            np.testing.assert_allclose(f, t, rtol=1e-5)
    text = str(jax.make_jaxpr(fused)(*args, y))
    assert ("dot_general" in text) == (name in LOOKALIKES), str(reports[-1])


def test_an_entropy_with_a_bias_of_minus_infinity_is_nan_as_theirs():
    x, kernel, _ = operands()
    function = lambda x, bias: entropy(x @ kernel + bias)
    args = x, jnp.zeros(V).at[1].set(-jnp.inf)
    assert np.isnan([fuse(function)(*args), function(*args)]).all()


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(None, "b"), P(None, ("a", "b"))])
def test_a_split_vocabulary_has_the_first_of_the_best(eight_devices, types, spec, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 5 * V)  # five rows a chunk
    x, kernel, _ = operands()
    mesh = jax.make_mesh((2, 4), ("a", "b"), (types, types), devices=eight_devices)
    rows = P() if "a" in spec[1] else P("a")
    bias = jnp.zeros(V).at[1].set(-jnp.inf)
    best = lambda *operands: best_words(*operands, spec=Options().spec(*operands))
    with jax.set_mesh(mesh):
        split = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, rows), (kernel, spec)))
        words = jax.jit(best)(*split, jax.device_put(bias, NamedSharding(mesh, P())))
    np.testing.assert_array_equal(words, jnp.argmax(x @ kernel + bias, -1))
