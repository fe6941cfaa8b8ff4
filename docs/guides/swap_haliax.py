"""Swap the layers of a haliax model, as Levanter's are.

Run it: `python docs/guides/swap_haliax.py`, after `pip install --pre haliax`: releases before 1.4
have no RmsNorm. haliax 1.4.dev453's own Linear fails with JAX 0.12, which removed a name it uses; a
swapped one does not call it.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from normfuse.layers.eqx import swap, unswap

# 1. A block of haliax's modules: arrays have named axes, in any order.
Embed, Heads, Head = hax.make_axes(embed=64, heads=4, head=16)
Batch, Position = hax.make_axes(batch=2, position=8)


class Block(eqx.Module):
    norm: hax.nn.RmsNorm
    inner: hax.nn.Linear
    outer: hax.nn.Linear

    @staticmethod
    def init(key):
        a, b = jax.random.split(key)
        linear = hax.nn.Linear.init
        return Block(
            hax.nn.RmsNorm.init(Embed, use_bias=False),
            linear(Embed, (Heads, Head), key=a, use_bias=False, out_first=True),
            linear((Heads, Head), Embed, key=b, use_bias=False, out_first=False),
        )

    def __call__(self, x):
        return x + self.outer(hax.nn.silu(self.inner(self.norm(x))))


# 2. `swap` is Equinox's. A norm is found by what it computes, so your own class will do as well;
#    its weight must be its only array. A Linear multiplies by `normfuse.dense` where the input's
#    last axes are its `In`; haliax's own code serves otherwise.
theirs = Block.init(jax.random.key(0))
model = swap(theirs, report=print)
# module  class    served by, or why not  verified error
# norm    RmsNorm  rms_norm               float32 1e-07, bfloat16 0.004
# inner   Linear   normfuse dense
# outer   Linear   normfuse dense
# 3 of 3 modules are served by normfuse
assert isinstance(model.norm, hax.nn.RmsNorm) and isinstance(model.inner, hax.nn.Linear)

# 3. The same values, with the same axes.
x = hax.random.normal(jax.random.key(1), (Batch, Position, Embed))
y = model(x)
assert y.axes == (Batch, Position, Embed)
normal = x.array / jnp.sqrt(jnp.mean(x.array**2, -1, keepdims=True) + model.norm.eps)
hidden = jax.nn.silu(jnp.einsum("bpe,hde->bphd", normal, theirs.inner.weight.array))
want = x.array + jnp.einsum("bphd,hde->bpe", hidden, theirs.outer.weight.array)
np.testing.assert_allclose(y.array, want, rtol=1e-4, atol=1e-5)

# 4. Train as before; an optimizer's state that exists already is swapped likewise.
optimizer = optax.adam(1e-2)
state = swap(optimizer.init(eqx.filter(theirs, eqx.is_array)))


@eqx.filter_jit
def step(model, state):
    def loss_of(model):
        return hax.mean(hax.square(model(x) - hax.sin(x))).scalar()

    loss, gradient = eqx.filter_value_and_grad(loss_of)(model)
    updates, state = optimizer.update(gradient, state)
    return eqx.apply_updates(model, updates), state, loss


losses = []
for _ in range(10):
    model, state, loss = step(model, state)
    losses.append(float(loss))
assert losses[-1] < 0.7 * losses[0]

# 5. Layers stacked along an axis are swapped as a whole, and so is a model in FP8.
Layers = hax.Axis("layers", 3)
stack = swap(hax.nn.Stacked.init(Layers, Block)(jax.random.split(jax.random.key(2), 3)))
assert stack.fold(x).axes == x.axes
assert swap(theirs, quantization="fp8")(x).axes == x.axes

# 6. And back.
assert jax.tree.structure(unswap(model)) == jax.tree.structure(theirs)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
