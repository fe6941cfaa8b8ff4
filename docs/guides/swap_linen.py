"""Swap the layers of a Flax Linen model.

Run it: `python docs/guides/swap_linen.py`. CI checks every statement below.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import normfuse.layers.linen
from normfuse.layers.linen import swap, unswap


# 1. Your model. Linen makes its modules inside calls, under transformations too.
class Norm(nn.Module):
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.zeros_init(), x.shape[-1:])
        rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + self.eps)
        return x * rstd * (1 + scale)


class Block(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.silu(nn.Dense(self.hidden)(Norm()(x)))
        return x + nn.Dense(x.shape[-1])(y), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(Block, prevent_cse=False), length=3, **axes)(128)(x, None)
        return nn.RMSNorm()(x)


x = jax.random.normal(jax.random.key(0), (8, 64))
theirs = Model()
variables = theirs.init(jax.random.key(1), x)

# 2. `swap` returns a model of the same fields, whose calls look for norms and dense layers. The
#    variables are the model's own: checkpoints and optimizer states need no change.
model = swap(theirs, report=print)
assert isinstance(model, Model)
assert jax.tree.structure(model.init(jax.random.key(1), x)) == jax.tree.structure(variables)

# 3. The report comes with the first call, when the modules are made.
y = model.apply(variables, x)
# module                             class    served by, or why not  verified error
# ScanCheckpointBlock_0.Norm_0       Norm     rms_norm               float32 2e-07, bfloat16 0.008
# ScanCheckpointBlock_*.Dense_* (2)  Dense    normfuse Dense
# RMSNorm_0                          RMSNorm  rms_norm               float32 2e-07, bfloat16 1e-07
# 4 of 4 modules are served by normfuse
np.testing.assert_allclose(y, theirs.apply(variables, x), rtol=1e-4, atol=1e-5)
assert "normfuse_rms_norm" in str(jax.make_jaxpr(model.apply)(variables, x))

# 4. Train as before.
optimizer = optax.adam(1e-2)
state = optimizer.init(variables)


@jax.jit
def step(variables, state):
    loss_of = lambda v: jnp.mean((model.apply(v, x) - jnp.sin(x)) ** 2)
    loss, gradient = jax.value_and_grad(loss_of)(variables)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(variables, updates), state, loss


losses = []
for _ in range(20):
    variables, state, loss = step(variables, state)
    losses.append(float(loss))
assert losses[-1] < 0.7 * losses[0]

# 5. Rules, FP8 and the implementation as in the other frameworks; `unswap` gives the model back.
#    The trained variables are those of either.
assert type(unswap(model)) is Model
fp8 = swap(theirs, quantization="fp8").apply(variables, x)
np.testing.assert_allclose(fp8, unswap(model).apply(variables, x), atol=0.5)
assert float(jnp.mean(jnp.abs(fp8 - model.apply(variables, x)))) > 0  # it is another product

# 6. In new models, use the same names; Dense also takes an activation.
up = normfuse.layers.linen.Dense(256, activation="silu")
kernel = up.init(jax.random.key(2), x)
plain = nn.silu(nn.Dense(256).apply(kernel, x))
np.testing.assert_allclose(up.apply(kernel, x), plain, rtol=1e-5, atol=1e-6)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
