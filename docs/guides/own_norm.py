"""Your own norm class, or gated MLP: `swap` finds it by what it computes.

Run it: `python docs/guides/own_norm.py`. CI checks every statement below.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import normfuse.layers.eqx
import normfuse.layers.linen
from normfuse import rms_norm
from normfuse.layers.nnx import swap, unswap


# 1. Most models define their own RMSNorm. Names, eps, casts and 1 + scale differ.
class RMSNorm(nnx.Module):
    def __init__(self, dim: int, *, norm_eps: float = 1e-5):
        self.w, self.norm_eps = nnx.Param(jnp.zeros(dim)), norm_eps

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        rms = jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.norm_eps)
        return ((1 + self.w[...]) * wide / rms).astype(x.dtype)


class Block(nnx.Module):
    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(dim)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


# 2. One call finds them. A module with one vector of parameters, or none, is traced on a copy, and
#    the trace evaluated with NumPy on a few rows: eps, offset and order of casts follow from the
#    values and are verified in float64. It takes some milliseconds for each class, and no state
#    moves. `report=` gets a table of what serves each module, or why not.
model = nnx.List([Block(64, rngs=nnx.Rngs(0)), nnx.GroupNorm(64, rngs=nnx.Rngs(1))])
x = jax.random.normal(jax.random.key(0), (8, 64), jnp.bfloat16)
before = model[0](x)
swap(model, report=print)
# module  class      served by, or why not              verified error
# 0.down  Linear     normfuse Linear
# 0.norm  RMSNorm    rms_norm                           float32 2e-07, bfloat16 0
# 0.up    Linear     normfuse Linear
# 1       GroupNorm  not: it has 2 arrays: bias, scale
# 3 of 4 modules are served by normfuse
np.testing.assert_allclose(model[0](x), before, rtol=0.02, atol=0.02)

# 3. The module has become a subclass of its own class: the same object, fields and state. A call
#    that was not verified (another argument, another rank) is verified when it first occurs, or
#    computed by the class's own code.
assert isinstance(model[0].norm, RMSNorm) and type(model[0].norm) is not RMSNorm
assert "normfuse_rms_norm" in str(jax.make_jaxpr(lambda x: model[0].norm(x))(x))
assert type(unswap(model)[0].norm) is RMSNorm


# 4. What is not recognised stays. If you know better, write a rule: a function of (module, x). It
#    is compared with the class on probe inputs, and an error says where they differ. None leaves a
#    class alone. (A rule with a name, not a lambda, can be pickled with its model.)
class BiasedNorm(RMSNorm):
    def __init__(self, dim: int):
        super().__init__(dim)
        self.bias = nnx.Param(jnp.ones(dim))

    def __call__(self, x):
        return super().__call__(x) + self.bias[...].astype(x.dtype)


def biased(norm, x):
    y = rms_norm(x, norm.w[...], eps=norm.norm_eps, scale_offset=1.0)
    return y + norm.bias[...].astype(x.dtype)


norms = nnx.List([BiasedNorm(64), RMSNorm(64)])
swap(norms, rules={BiasedNorm: biased}, report=print)
assert "normfuse_rms_norm" in str(jax.make_jaxpr(lambda x: norms[0](x))(x))

try:
    swap(nnx.List([BiasedNorm(64)]), rules={BiasedNorm: lambda norm, x: rms_norm(x, norm.w[...])})
except ValueError as error:
    print(error)  # ... it differs from the class by 0.54 of the largest value ...


# 5. A gated MLP written as three linear layers is found likewise: which layer gates, and with which
#    activation, follows from values. The layers stay what they are, and their parameters theirs;
#    less is kept for the backward, and in FP8 all that lies between the products is one pass.
class SwiGLU(nnx.Module):
    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        linear = lambda n, m: nnx.Linear(n, m, use_bias=False, rngs=rngs)
        self.w1, self.w2, self.w3 = linear(dim, 3 * dim), linear(3 * dim, dim), linear(dim, 3 * dim)

    def __call__(self, x):
        return self.w2(nnx.silu(self.w1(x)) * self.w3(x))


mlp = SwiGLU(64, rngs=nnx.Rngs(0))
before = mlp(x)
swap(mlp, report=print)  # SwiGLU: gated_product, silu
assert "op='gated_product'" in str(jax.make_jaxpr(lambda x: mlp(x))(x))
np.testing.assert_allclose(mlp(x), before, rtol=1e-5, atol=1e-5)


# 6. The same in Equinox. An optimizer's state has the model's structure: swap it too.
class EqxNorm(eqx.Module):
    weight: jax.Array
    eps: float = eqx.field(static=True, default=1e-6)

    def __call__(self, x):  # one vector
        return self.weight * x * jax.lax.rsqrt(jnp.mean(x**2) + self.eps)


theirs = EqxNorm(jnp.ones(64))
ours = normfuse.layers.eqx.swap(theirs)
wide = x.astype(jnp.float32)
np.testing.assert_allclose(jax.vmap(ours)(wide), jax.vmap(theirs)(wide), rtol=1e-5)


# 7. Linen makes modules inside calls, so a swapped Linen model looks for them there. The report
#    comes when the model is first applied.
class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + nn.Dense(64)(nn.RMSNorm()(x))
        return x


linen = normfuse.layers.linen.swap(LinenModel(), report=print)
variables = linen.init(jax.random.key(0), wide)
np.testing.assert_allclose(
    linen.apply(variables, wide), LinenModel().apply(variables, wide), rtol=1e-5, atol=1e-5
)
