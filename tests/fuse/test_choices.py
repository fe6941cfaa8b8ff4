"""Products by whose result something chooses keep their bits in FP8, and no others do.

Also those of `dense` and the layers: what `fuse` knows of a foreign product it knows of these.
"""

import functools

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_cases import draws
from jax import lax

from normfuse import dense, gated_dense
from normfuse.layers.fuse import losses

R, W, X = 32, 32, 16
f32 = jnp.float32
sigmoid = jax.nn.sigmoid
EXPERTS = np.asarray(draws((X, W))[0])
CODES = draws((24, X))[0]
KEY = np.asarray([0, 7], np.uint32)


def of_best(scores):
    """The mean of two experts."""
    values, index = lax.top_k(scores, 2)
    return (jnp.asarray(EXPERTS)[index] * values[..., None]).sum(-2)


def distances(z, codes):
    return (codes**2).sum(-1) - 2 * z @ codes.T  # but for the squares of z


@jax.custom_jvp
def of_user(z):
    return sigmoid(z)


of_user.defjvp(lambda primals, tangents: (of_user(*primals), tangents[0]))


@jax.custom_vjp
def of_user_backwards(z):
    return sigmoid(z)


of_user_backwards.defvjp(lambda z: (of_user_backwards(z), None), lambda _, g: (g,))


ROUTERS = {  # functions of x, the router's kernel and a vector
    "top_k": lambda x, w, b: of_best(x @ w),
    "norm": lambda x, w, b: of_best((s := x @ w) / jnp.linalg.norm(s, axis=-1, keepdims=True)),
    "keys of a sparse attention": lambda x, w, b: lax.top_k(
        jnp.einsum("btd,bsd->bts", *[(x @ w).reshape(2, R // 2, X)] * 2), 2
    )[0],
    "keys of one example": lambda x, w, b: lax.top_k((s := jnp.sin(x @ w)) @ s.T, 2)[1],
    "sums by constants": lambda x, w, b: lax.top_k(jnp.tri(R, dtype=f32) @ (x @ w), 2)[1],
    "neighbours of a graph": lambda x, w, b: lax.top_k(x[:, :R] @ (x @ w), 2)[1],
    "sums by ones": lambda x, w, b: jnp.argmax((x @ w) ** 2 @ jnp.ones((X, 1)) - 20 * b, -1),
    "argsort": lambda x, w, b: jnp.asarray(EXPERTS)[jnp.argsort(sigmoid(x @ w))[:, -1]],
    "one-hot": lambda x, w, b: jax.nn.one_hot(jnp.argmax(x @ w + b, -1), X) @ EXPERTS,
    "threshold": lambda x, w, b: jnp.where(sigmoid(x @ w) > 0.5, 1.0, 0.0) @ EXPERTS,
    "of a complex number": lambda x, w, b: lax.top_k(jnp.real((x @ w) * (1 + 1j)), 2)[1],
    "times a threshold": lambda x, w, b: ((x @ w) * (x @ w > 0.7)) @ EXPERTS,
    "categorical": lambda x, w, b: jnp.asarray(EXPERTS)[jax.random.categorical(KEY, x @ w / 0.7)],
    "cond": lambda x, w, b: lax.cond((x @ w).mean() > 0, jnp.sin, jnp.cos, x),
    "integers": lambda x, w, b: (X * sigmoid(x @ w)).astype(jnp.int32).astype(f32),
    "round": lambda x, w, b: jnp.round(4 * sigmoid(x @ w)),
    "scan": lambda x, w, b: lax.scan(
        lambda c, x: (c, of_best(sigmoid(x @ w) + b)), 0.0, x.reshape(2, R // 2, W)
    )[1],
    "out of a scan": lambda x, w, b: of_best(
        b + lax.scan(lambda c, x: (c, x @ w), 0.0, x.reshape(2, R // 2, W))[1]
    ),
    "chosen in the next turn": lambda x, w, b: lax.scan(
        lambda c, _: ((c[1], sigmoid(x @ w), of_best(c[0])), None),
        (jnp.zeros((R, X)), jnp.zeros((R, X)), jnp.zeros((R, W))),
        None,
        length=4,
    )[0][2],
    "while": lambda x, w, b: lax.while_loop(
        lambda c: c[0].sum() < 900, lambda c: (c[0] + 1, c[1] + 1), (sigmoid(x @ w), x)
    )[1],
    "remat": lambda x, w, b: of_best(jax.checkpoint(lambda x: jnp.sin(x) @ w)(x) + b),
    "branches": lambda x, w, b: lax.cond(b[0] > 0, of_best, lambda z: z @ EXPERTS, x @ w),
    "custom_jvp": lambda x, w, b: of_best(of_user(x @ w)),
    "custom_vjp": lambda x, w, b: of_best(of_user_backwards(x @ w)),
    "of this library": lambda x, w, b: of_best(dense(x, w)),
    "of this library, activated": lambda x, w, b: of_best(dense(x, w, b, activation="sigmoid")),
    "of this library, gated": lambda x, w, b: of_best(gated_dense(x, w, w)),
    "a codebook": lambda x, w, b: CODES[jnp.argmin(distances(x @ w, CODES), -1)],
    "a codebook, its indices alone": lambda x, w, b: jnp.argmin(distances(x @ w, CODES), -1),
    "a codebook, by cosines": lambda x, w, b: (
        jax.nn.one_hot(jnp.argmax(x @ w @ CODES.T, -1), len(CODES)) @ CODES
    ),
    "a codebook that is a parameter": lambda x, w, b: w[jnp.argmax(jnp.sin(x @ w) @ w.T, -1)],
    "an unknown operation": lambda x, w, b: jnp.linalg.qr(x @ w)[0],
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_choice_keeps_the_product(name):
    args = draws((R, W), (W, X), (X,))
    fused = fuse_cases.Fused(ROUTERS[name], quantization="fp8", serves=False)
    got, want = (jax.jit(f)(*args) for f in (fused, ROUTERS[name]))
    rows = [row for row in fused.rows if row.domain in ("product", "mlp")]
    assert not any(f"-> {X}," in row.served or f"-> {X}," in row.what for row in rows), fused
    assert not any("fp8" in row.served and f"x {W} " in row.what for row in rows), fused
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if "float" in a.dtype.name:  # equal but for the order of sums
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(a, b)


PLAIN = {
    name: getattr(jax.nn, name)
    for name in "gelu hard_silu log_sigmoid mish relu relu6 silu soft_sign softplus "
    "squareplus".split()
} | {
    "rotated as complex numbers": lambda z: jnp.abs(lax.complex(z, z) * jnp.exp(1j)),
    "NaN to 0": jnp.nan_to_num,
    "a loop that counts": lambda z: lax.while_loop(
        lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, jnp.sin(carry[1])), (0, z)
    )[1],
    "dropout": lambda z: jnp.where(jax.random.bernoulli(KEY, 0.9, z.shape), z / 0.9, 0),
    "of a user's own derivative": of_user_backwards,
    "a linear recurrence": lambda z: lax.scan(lambda c, x: (0.9 * c + x, c), z[0], z)[1],
    "added at indices": lambda z: jnp.zeros((8, W)).at[np.arange(R) % 8].add(z),
    "a head": lambda z: jnp.argmax(jnp.sin(z) @ EXPERTS.T + EXPERTS[:, 0], -1).astype(f32),
    "attention, then logits": lambda z: jnp.argmax(
        jax.nn.dot_product_attention(*[z.reshape(1, R, 4, 8)] * 3).reshape(R, W) @ EXPERTS.T, -1
    ).astype(f32),
}


@pytest.mark.parametrize("name", PLAIN)
def test_no_choice_leaves_it_in_fp8(name):
    """Also where what follows tests for NaN, and where a later product chooses."""
    function = lambda x, w: jnp.sin(PLAIN[name](x @ w))
    fused = fuse_cases.Fused(function, quantization="fp8")
    jax.eval_shape(fused, *draws((R, W), (W, W)))
    assert [row.served for row in fused.rows if row.domain == "product"][:1] == ["dense, fp8"], (
        fused
    )


def test_a_computed_kernel_ends_the_search():
    function = lambda m, x: jnp.argmax(jnp.sin(x @ m[0]) @ (m[1] + m[2] @ m[1]), -1)
    fused = fuse_cases.Fused(function, quantization="fp8")
    jax.eval_shape(fused, draws(*[(W, W)] * 3), *draws((R, W)))
    assert "dense, fp8" in [row.served for row in fused.rows], fused


# ---------------------------------------------------------------- products of ours


LABELS = np.arange(R) % 24


def cross_entropy(logits):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(f32)), LABELS[:, None], 1)
    return -picked.mean()


OURS = {  # the same function of theirs and of ours: kinds of sites
    "a loss": lambda product, x, w: cross_entropy(product(x, w)),
    "a loss, scaled": lambda product, x, w: cross_entropy(product(x, w) / 0.7),
    "a loss, vmapped": lambda product, x, w: cross_entropy(
        jax.vmap(lambda x: product(x, w))(x.reshape(4, R // 4, W)).reshape(R, -1)
    ),
    "a loss in bfloat16": lambda product, x, w: cross_entropy(
        product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    ),
    "an mlp": lambda product, x, w: jnp.sin(product(jax.nn.silu(product(x, w)), w.T)),
    "a gated mlp": lambda product, x, w: jnp.sin(
        product(jax.nn.silu(product(x, w)) * product(x + 1, w), w.T)
    ),
    "logits that argmax reads": lambda product, x, w: (
        cross_entropy(y := product(x, w)),
        jnp.argmax(y, -1),
    ),
}


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("name", OURS)
def test_ours_is_what_theirs_is(name, quantization, monkeypatch):
    monkeypatch.setattr(losses, "SMALLEST", 16)
    args, rows = draws((R, W), (W, 48), scale=0.5), []
    for product in (jnp.matmul, dense):
        function = functools.partial(OURS[name], product)
        fused = fuse_cases.Fused(function, quantization=quantization)
        got, want = (jax.jit(f)(*args) for f in (fused, function))
        if "mlp" not in name:  # values are theirs in FP8, too
            for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)
        rows.append([(row.what, row.served, row.reason.split(" at ")[0]) for row in fused.rows])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_activations_of_ours_are_those_of_an_mlp(quantization):
    def function(x, a, b, w, bias):
        y = dense(gated_dense(x, a, b), w)
        return jnp.sin(dense(dense(y, a, bias, activation="gelu"), w))

    args = draws((R, W), (W, 48), (W, 48), (48, W), (48,), scale=0.3)
    served, fused = fuse_cases.compare(
        function, args, quantization=quantization, rounding=quantization and 2.0
    )
    assert served["mlp"] == 2, fused


def test_a_maximum_after_a_relu_keeps_its_derivative():
    """Equal equations within `jax.nn.relu` and outside have other derivatives at 0."""

    def function(x, w):
        return jax.nn.relu(x) @ w, jnp.maximum(x, 0) @ w

    served, fused = fuse_cases.compare(function, [jnp.zeros((R, W)), *draws((W, X))])
    assert served == {"mlp": 1}, fused


def t5x():
    """The loss of T5X and MaxText, whose backward is not the derivative of its forward."""

    @jax.custom_vjp
    def loss(logits, targets):
        lse = jax.scipy.special.logsumexp(logits, -1, keepdims=True)
        return -jnp.sum(targets * (logits - lse), -1) + 1e-4 * lse[..., 0] ** 2

    def forward(logits, targets):
        most = logits.max(-1, keepdims=True)
        exp = jnp.exp(logits - most)
        total = exp.sum(-1, keepdims=True)
        log_z = (jnp.log(total) + most)[..., 0]
        value = -jnp.sum(targets * (logits - most - jnp.log(total)), -1) + 1e-4 * log_z**2
        return value, (exp / total, targets, log_z)

    def backward(kept, g):
        p, targets, log_z = kept
        return g[:, None] * ((1 + 2e-4 * log_z)[:, None] * p - targets), None

    loss.defvjp(forward, backward)
    return loss


@pytest.mark.parametrize("product", [jnp.matmul, dense])
@pytest.mark.parametrize("cast", [f32, jnp.bfloat16])
def test_logits_of_a_users_own_derivative_keep_their_bits(product, cast):
    loss = t5x()

    def function(x, w):
        hot = jax.nn.one_hot(LABELS, 48)
        return loss(product(x.astype(cast), w.astype(cast)).astype(f32), hot).mean()

    args = draws((R, W), (W, 48), scale=0.5)
    fused = fuse_cases.Fused(function, quantization="fp8", serves=False)
    for got, want in zip(
        *(jax.jit(jax.value_and_grad(f, (0, 1)))(*args) for f in (fused, function))
    ):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    reasons = {row.domain: row.reason for row in fused.rows}
    assert reasons["product"] == "a softmax or a loss reads its result", fused
    assert "a derivative of the user's own" in reasons.get("loss", ""), fused
