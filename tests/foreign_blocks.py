"""A norm and linear layers after it, as in other people's models."""

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
