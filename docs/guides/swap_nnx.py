"""Swap the layers of a Flax nnx model.

Run it: `python docs/guides/swap_nnx.py`. CI checks every statement below.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import normfuse
from normfuse.layers.nnx import swap, unswap


# 1. Your model, with Flax's own layers.
class Block(nnx.Module):
    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


x = jax.random.normal(jax.random.key(0), (8, 64))
model = Block(64, rngs=nnx.Rngs(0))
before = model(x)
parameters = nnx.state(model)

# 2. One call, in place. The parameters are the same objects, so optimizers, checkpoints and tied
#    layers keep working.
swap(model)
assert type(model.norm).__module__ == "normfuse.layers.nnx"
assert jax.tree.all(jax.tree.map(jnp.array_equal, nnx.state(model), parameters))
np.testing.assert_allclose(model(x), before, rtol=1e-5, atol=1e-6)

# 3. Train as before; gradients of the norm come from the native backward kernel.
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x, y):
    loss, gradient = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, gradient)
    return loss


losses = [float(step(model, optimizer, x, jnp.sin(x))) for _ in range(20)]
assert losses[-1] < 0.7 * losses[0]

# 4. Choose the implementation. "native" never falls back: where no kernel can serve, it raises and
#    says why. `normfuse info` prints what None would choose on this machine.
swap(model, implementation="native")
assert model.norm.implementation == "native"
model(x)

# 5. In new models, use the same constructors; Linear also takes an activation.
up = normfuse.layers.nnx.Linear(64, 256, activation="silu", rngs=nnx.Rngs(1))
theirs = nnx.Linear(64, 256, rngs=nnx.Rngs(1))
np.testing.assert_allclose(up(x), nnx.silu(theirs(x)), rtol=1e-5, atol=1e-6)

# 6. And back.
assert type(unswap(model).norm) is nnx.RMSNorm
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
