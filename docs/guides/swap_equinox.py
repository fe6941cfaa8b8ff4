"""Swap the layers of an Equinox model.

Run it: `python docs/guides/swap_equinox.py`. CI checks every statement below.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from normfuse.layers.eqx import swap, unswap


# 1. Your model, with Equinox's own layers: one vector in, one out.
class Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, dim: int, *, key: jax.Array):
        up, down = jax.random.split(key)
        self.norm = eqx.nn.RMSNorm(dim)
        self.up = eqx.nn.Linear(dim, 4 * dim, key=up)
        self.down = eqx.nn.Linear(4 * dim, dim, key=down)

    def __call__(self, x):
        return x + self.down(jax.nn.silu(self.up(self.norm(x))))


x = jax.random.normal(jax.random.key(0), (8, 64))
model = Block(64, key=jax.random.key(1))
before = jax.vmap(model)(x)

# 2. `swap` returns a new model with the same leaves. (Equinox's modules are immutable; the old one
#    stays as it is.) An existing optimizer state holds the model's structure: swap it too.
model = swap(model)
assert type(model.norm).__module__ == "normfuse.layers.eqx"
np.testing.assert_allclose(jax.vmap(model)(x), before, rtol=1e-5, atol=1e-6)

# 3. Train as before. Under vmap, once or several times, the kernels see one large batch.
optimizer = optax.adamw(1e-2)
state = optimizer.init(eqx.filter(model, eqx.is_array))


@eqx.filter_jit
def step(model, state, x, y):
    loss, gradient = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
    updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


losses = []
for _ in range(20):
    model, state, loss = step(model, state, x, jnp.sin(x))
    losses.append(float(loss))
assert losses[-1] < 0.7 * losses[0]

# 4. Per-example gradients are as exact as their sum.
loss_of = lambda m, x: jnp.sum(m(x) ** 2)
each = jax.vmap(eqx.filter_grad(loss_of), in_axes=(None, 0))(model, x)
whole = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(x) ** 2))(model)
np.testing.assert_allclose(each.norm.weight.sum(0), whole.norm.weight, rtol=1e-4, atol=1e-5)

# 5. Choose the implementation ("native" never falls back), and go back.
jax.vmap(swap(unswap(model), implementation="native"))(x)
assert type(unswap(model).norm) is eqx.nn.RMSNorm
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
