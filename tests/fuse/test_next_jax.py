"""JAX's next custom_jvp, custom_vjp and remat, by its flags: same fusion, same values.

`.ci/release flags` runs the tests of contexts, of `fuse` and of accumulation with them too.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import fuse
from normfuse.native import jaxpr

FLAGS = ("custom_jvp3", "custom_vjp3", "remat3")
ROWS, DIM, HIDDEN, CLASSES = 16, 32, 64, 2048


@contextlib.contextmanager
def flags(text):
    """Turns the named flags on; skips where JAX has them no longer, or not all of them yet.

    Before custom_jvp3 came the others were unfinished: the scan's had no effects.
    """
    names = [f"jax_{name}" for name in text.split()]
    if missing := {*names, "jax_custom_jvp3"} - set(jax.config.values):
        pytest.skip(f"JAX {jax.__version__} lacks {', '.join(sorted(missing))}")
    before = {name: jax.config.values[name] for name in names}
    try:
        for name in names:
            jax.config.update(name, True)
        jax.clear_caches()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.clear_caches()


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)
    mlp = {"gate": draw(2, DIM, HIDDEN), "up": draw(2, DIM, HIDDEN), "down": draw(2, HIDDEN, DIM)}
    params = {"layers": mlp | {"scale": jnp.ones((2, DIM))}, "head": draw(DIM, CLASSES)}
    return params, draw(ROWS, DIM)


def layer(x, p):
    """A norm, attention of it with itself, and an MLP with jax.nn.silu, a custom_jvp's function."""
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]
    q = y.reshape(1, ROWS, 2, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, q) * q.shape[-1] ** -0.5
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q)
    y = y + mixed.reshape(y.shape)
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None


def remat(params, x):
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    log_p = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(log_p, jnp.arange(ROWS)[:, None], 1))


def found(loss, quantization):
    """Returns what `fuse` finds, without lines, and the value and gradients."""
    reports = []
    fused = fuse(loss, quantization=quantization, report=reports.append)
    results = jax.jit(jax.value_and_grad(fused))(*arguments())
    return sorted((row.domain, row.what, row.served) for row in reports[-1].fused), results


def test_fuse_finds_the_same():
    """`fuse` and FP8 in a scan over layers that are computed again, with all flags."""
    wanted, values = found(remat, "fp8")
    with flags(" ".join(FLAGS)):
        rows, results = found(remat, "fp8")
    assert rows == wanted and {"attention", "loss", "mlp"} <= {domain for domain, *_ in rows}
    # The same operations: XLA may fuse them in another way, and round some tens differently.
    check = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    jax.tree.map(check, results, jax.tree.map(np.asarray, values))


def test_names_of_what_the_next_primitives_replace():
    """Nothing is known of somebody else's class that is called as JAX's."""

    class RematTraced:
        params = {}

    eqn = jax.make_jaxpr(jnp.sin)(1.0).eqns[0]
    assert jaxpr.name_of(eqn) == "sin" and jaxpr.params_of(eqn) is eqn.params
    other = eqn.replace(params={"_prim": RematTraced()})
    assert jaxpr.name_of(other) == "sin" and jaxpr.params_of(other) is other.params
