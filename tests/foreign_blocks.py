"""A norm and linear layers after it, as in other people's models."""

import functools

import flax.linen as nn
import foreign_norms
import jax
import jax.numpy as jnp
from flax import nnx


def _linear(n: int, m: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(n, m, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)


class Projections(nnx.Module):
    """A norm of its own class into three Linears, as before attention."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.norm = foreign_norms.DivideByRms(dim, rngs=rngs)
        self.q, self.k, self.v = (_linear(dim, dim, rngs) for _ in range(3))

    def __call__(self, x):
        y = self.norm(x)
        return self.q(y), self.k(y), self.v(y)


class Mlp(nnx.Module):
    """A norm and three Linears, the activation between them in jnp."""

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs):
        self.norm = foreign_norms.DivideByRms(dim, rngs=rngs)
        self.gate, self.up = _linear(dim, hidden, rngs), _linear(dim, hidden, rngs)
        self.down = _linear(hidden, dim, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x)
        return self.down(nnx.silu(self.gate(y)) * self.up(y))


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """By einsums, as most write it."""
    scores = jnp.einsum("bqhc,bkhc->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
    return jnp.einsum("bhqk,bkhc->bqhc", nn.softmax(scores).astype(v.dtype), v)


class VitBlock(nn.Module):
    """A block of a ViT, or with a condition of a DiT: adaptive LayerNorms, and an MLP with gelu."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array | None = None) -> jax.Array:
        dim, plain = x.shape[-1], condition is None
        dense = functools.partial(nn.Dense, dtype=jnp.bfloat16)
        norm = lambda: nn.LayerNorm(use_scale=plain, use_bias=plain, dtype=jnp.bfloat16)
        modulate, gates = (lambda y: y), [1, 1]
        if condition is not None:
            parts = jnp.split(dense(6 * dim)(nn.silu(condition))[:, None], 6, axis=-1)
            rest, gates = iter(parts[:4]), parts[4:]
            modulate = lambda y: y * (1 + next(rest)) + next(rest)
        y = modulate(norm()(x))
        q, k, v = (dense(dim)(y).reshape(*x.shape[:2], self.heads, -1) for _ in range(3))
        x = x + gates[0] * dense(dim)(_attention(q, k, v).reshape(x.shape))
        y = modulate(norm()(x))
        return x + gates[1] * dense(dim)(nn.gelu(dense(4 * dim)(y)))
