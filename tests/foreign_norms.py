"""RMSNorms, and layers that are none, written as other projects write theirs."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

f32 = jnp.float32


# ---------------------------------------------------------------- nnx


class DivideByRms(nnx.Module):
    """The weight before the division, the statistics in float32."""

    def __init__(self, dim, *, norm_eps=1e-6, rngs):
        self.w = nnx.Param(nnx.initializers.ones_init()(rngs.params(), (dim,)))
        self.norm_eps = norm_eps

    @jax.named_scope("rms_norm")
    def __call__(self, x):
        rms = jnp.sqrt(jnp.mean(jnp.astype(x, f32) ** 2, axis=-1, keepdims=True) + self.norm_eps)
        return jnp.astype(self.w[...] * x / rms, x.dtype)


class OnePlusScale(nnx.Module):
    """An eps in the code, 1 + scale, and all in the dtype of x."""

    def __init__(self, dim, *, rngs):
        self.scale = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (dim,)))

    def __call__(self, x):
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normal = x * jax.lax.rsqrt(variance + 1e-6)
        return normal * (1 + jnp.expand_dims(self.scale[...], range(x.ndim - 1)))


class RoundBeforeWeight(nnx.Module):
    """The normalised x in the dtype of x, then the weight."""

    def __init__(self, dim, *, eps=1e-5, rngs):
        del rngs
        self.weight = nnx.Param(jnp.linspace(0.5, 1.5, dim))
        self.variance_epsilon = eps

    def __call__(self, hidden_states):
        x = hidden_states.astype(f32)
        variance = jnp.power(x, 2).mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(variance + self.variance_epsilon)
        return self.weight[...] * x.astype(hidden_states.dtype)


class SumOverN(nnx.Module):
    """The mean as a sum, and a dtype of its own, which x and scale are rounded to."""

    def __init__(self, dim, *, dtype=jnp.bfloat16, rngs):
        self.dim, self.epsilon, self.dtype = dim, 1e-3, dtype
        self.scale = nnx.Param(1 + 0.1 * rngs.params.normal((dim,)))

    def __call__(self, x):
        x, scale = x.astype(self.dtype), self.scale[...].astype(self.dtype)
        wide = x.astype(f32)
        rstd = 1 / jnp.sqrt(jnp.sum(wide * wide, -1, keepdims=True) / self.dim + self.epsilon)
        return (wide * rstd * scale).astype(self.dtype)


class WithoutWeight(nnx.Module):
    def __init__(self, dim):
        self.dim, self.eps = dim, 1e-5

    def __call__(self, x):
        assert x.shape[-1] == self.dim
        squares = jnp.einsum("...d,...d->...", x, x)[..., None]
        return x * jax.lax.rsqrt(squares / self.dim + self.eps)


class Float32Out(nnx.Module):
    """Always float32, an optional argument."""

    def __init__(self, dim, *, rngs):
        del rngs
        self.weight, self.epsilon = nnx.Param(jnp.linspace(0.5, 1.5, dim)), 1e-6

    def __call__(self, x, out_sharding=None):
        assert out_sharding is None
        x = x.astype(f32)
        return (
            x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + self.epsilon) * self.weight[...]
        )


NNX = {
    "divides by the rms": lambda n: DivideByRms(n, rngs=nnx.Rngs(0)),
    "1 + scale": lambda n: OnePlusScale(n, rngs=nnx.Rngs(0)),
    "rounds before the weight": lambda n: RoundBeforeWeight(n, rngs=nnx.Rngs(0)),
    "a dtype of its own": lambda n: SumOverN(n, rngs=nnx.Rngs(0)),
    "a sum over n": lambda n: SumOverN(n, dtype=f32, rngs=nnx.Rngs(0)),
    "no weight": WithoutWeight,
    "float32 out": lambda n: Float32Out(n, rngs=nnx.Rngs(0)),
}


# ---------------------------------------------------------------- Equinox


class WholeInput(eqx.Module):
    """The mean over all of x, and an eps that is a leaf."""

    weight: jax.Array
    eps: float

    def __init__(self, dim, eps=1e-6):
        self.weight, self.eps = jnp.linspace(0.5, 1.5, dim), eps

    def _norm(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, keepdims=True) + self.eps)

    def __call__(self, x):
        return self._norm(x.astype(f32)).astype(x.dtype) * self.weight


class StaticEps(eqx.Module):
    weight: jax.Array | None
    eps: float = eqx.field(static=True)

    def __init__(self, dim, eps=1e-5, use_weight=True):
        self.weight, self.eps = jnp.linspace(0.5, 1.5, dim) if use_weight else None, eps

    def __call__(self, x, *, key=None):
        del key
        wide = x.astype(f32)
        y = wide / jnp.sqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return (y if self.weight is None else y * self.weight).astype(x.dtype)


EQX = {
    "over the whole input": WholeInput,
    "a static eps": StaticEps,
    "weight None": lambda n: StaticEps(n, use_weight=False),
}


# ---------------------------------------------------------------- Linen


class LinenNorm(nn.Module):
    epsilon: float = 1e-6
    param_dtype: jnp.dtype = f32

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.1)
        scale = self.param("scale", init, (x.shape[-1],), self.param_dtype)
        variance = jnp.mean(jnp.square(x.astype(f32)), -1, keepdims=True)
        return (x * jax.lax.rsqrt(variance + self.epsilon) * (1 + scale)).astype(x.dtype)


# ---------------------------------------------------------------- what is no RMSNorm


class Scaled(nnx.Module):
    """A vector of parameters, and a function of it and x."""

    def __init__(self, function, dim=8, **variables):
        self.function, self.weight = function, nnx.Param(jnp.ones(dim))
        for name, variable in variables.items():
            setattr(self, name, variable)

    def __call__(self, x):
        return self.function(self, x)


def normal(x, eps=1e-6, axis=-1):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + eps)


def groups(m, x):
    parts = x.reshape(*x.shape[:-1], 2, -1)
    return normal(parts).reshape(x.shape) * m.weight[...]


def running(m, x):
    m.seen[...] = m.seen[...] + 1
    return normal(x) * m.weight[...]


def dropped(m, x):
    keep = jax.random.bernoulli(m.rngs.dropout(), 0.5, x.shape)
    return jnp.where(keep, normal(x) * m.weight[...], 0)


def clipped(m, x):
    root = jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))
    return x / jnp.maximum(root, 1e-4) * m.weight[...]


def outside(m, x):
    return x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + 1e-6) * m.weight[...]


def detached(m, x):
    return x * jax.lax.stop_gradient(jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))


@jax.custom_vjp
def straight_through(m, x):
    return normal(x)


straight_through.defvjp(
    lambda m, x: (normal(x), m), lambda m, g: (jax.tree.map(jnp.zeros_like, m), g)
)


def counting(m, x):
    m.calls = m.calls + 1
    return normal(x) * m.weight[...]


def listing(m, x):
    m.calls.append(x.shape)
    return normal(x) * m.weight[...]


def centred(m, x):
    return normal(x - x.mean(-1, keepdims=True)) * m.weight[...]


W = lambda m: m.weight[...]
NO_NORM = {  # name: (module, why it stays)
    "scale and bias": (lambda: nnx.GroupNorm(8, 2, rngs=nnx.Rngs(0)), "2 arrays: bias, scale"),
    "LayerNorm without bias": (
        lambda: type("Centred", (nnx.LayerNorm,), {})(8, use_bias=False, rngs=nnx.Rngs(0)),
        "subtracts the mean",
    ),
    "centred": (lambda: Scaled(centred), "subtracts the mean"),
    "L2": (
        lambda: Scaled(lambda m, x: x / jnp.linalg.norm(x, axis=-1, keepdims=True) * W(m)),
        "0.353553 times the parameter: not the mean",
    ),
    "groups": (lambda: Scaled(groups), "not x over its root mean square"),
    "GroupNorm": (lambda: nnx.GroupNorm(8, 2, rngs=nnx.Rngs(0)), "2 arrays"),
    "bias in the code": (lambda: Scaled(lambda m, x: normal(x) * W(m) + 0.5), "zeros do not stay"),
    "a bias": (
        lambda: Scaled(lambda m, x: normal(x) + m.bias[...], bias=nnx.Param(jnp.zeros(8))),
        "2 arrays: bias, weight",
    ),
    "over rows": (lambda: Scaled(lambda m, x: normal(x, axis=0) * W(m)), "row by row"),
    "over a batch": (lambda: Scaled(lambda m, x: normal(x, axis=(0, -1)) * W(m)), "row by row"),
    "stops gradients": (
        lambda: Scaled(lambda m, x: detached(m, x) * W(m)),
        "its derivative is not",
    ),
    "another derivative": (
        lambda: Scaled(lambda m, x: straight_through(0.0, x) * W(m)),
        "its derivative is not that of what it computes (custom_vjp_call)",
    ),
    "a counter": (lambda: Scaled(counting, calls=0), "changes its attributes"),
    "a list": (lambda: Scaled(listing, calls=nnx.static([])), "changes its attributes"),
    "twice": (lambda: Scaled(lambda m, x: 2 * normal(x) * W(m)), "2 times the parameter"),
    "squared": (lambda: Scaled(lambda m, x: normal(x) * W(m) ** 2), "plus a constant"),
    "the weight's magnitude": (
        lambda: Scaled(lambda m, x: normal(x) * jnp.abs(W(m))),
        "plus a constant",
    ),
    "a positive weight": (
        lambda: Scaled(lambda m, x: normal(x) * jax.nn.relu(W(m))),
        "plus a constant",
    ),
    "a limited weight": (
        lambda: Scaled(lambda m, x: normal(x) * jnp.clip(W(m), -9, 9)),
        "may compute something else for other values",
    ),
    "a limited x": (
        lambda: Scaled(lambda m, x: normal(jnp.clip(x, -6e4, 6e4)) * W(m)),
        "may compute something else for other values",
    ),
    "large rows as they are": (
        lambda: Scaled(lambda m, x: jnp.where(jnp.abs(x) > 1e6, x, normal(x) * W(m))),
        "may compute something else for other values (gt)",
    ),
    "the weight alone": (lambda: Scaled(lambda m, x: x * W(m)), "not x over its root mean square"),
    "eps outside": (lambda: Scaled(outside), "differs by"),
    "a floor": (lambda: Scaled(clipped), "differs by"),
    "state": (lambda: Scaled(running, seen=nnx.BatchStat(jnp.zeros(()))), "2 arrays"),
    "dropout": (lambda: Scaled(dropped, rngs=nnx.Rngs(dropout=0)), "modules or arrays in rngs"),
    "integers": (lambda: Scaled(lambda m, x: normal(x).astype(jnp.int32)), "returns int32"),
    "a pair": (lambda: Scaled(lambda m, x: (normal(x) * W(m), x)), "returns 2 arrays"),
    "another shape": (lambda: Scaled(lambda m, x: x[..., :4]), "turns shape"),
    "an effect": (lambda: Scaled(lambda m, x: jax.debug.print("") or normal(x)), "side effects"),
    "two arguments": (lambda: Scaled(lambda m, x: m.function(x)), "its call fails"),
    "an integer array": (lambda: Scaled(normal, weight=nnx.Param(jnp.arange(8))), "is int32"),
    "Embed": (lambda: nnx.Embed(3, 8, rngs=nnx.Rngs(0)), "embedding is not a vector: (3, 8)"),
    "Dropout": (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), "modules or arrays in rngs"),
    "Conv": (lambda: nnx.Conv(3, 4, 3, rngs=nnx.Rngs(0)), "2 arrays: bias, kernel"),
}
