"""From tokens to vectors and back to logits, shared by the Flax and the Equinox transformer."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from normfuse.models.sharding import Sharding, constrain


def embed(tokens: Array, table: Array, dtype: str, sharding: Sharding) -> Array:
    """Looks each token's vector up.

    Args:
      tokens: `(batch, seq)` integers. One outside the vocabulary gives NaN, not a neighbour's
        vector.
      table: `(vocab, dim)`.
      dtype: of the result.
    Returns: `(batch, seq, dim)`.
    """
    vocab_axis = sharding.embedding[0]
    table = constrain(table, P(vocab_axis, None))  # each device looks up its part of the vocabulary
    tokens = constrain(tokens, sharding.tokens)
    x = jnp.take(table, tokens, axis=0, mode="fill").astype(dtype)
    # Summed over the parts of the vocabulary before it is split along the sequence.
    return constrain(constrain(x, sharding.block_input), sharding.residual)


@jax.custom_vjp
def unembed(x: Array, table: Array) -> Array:
    """Scores every token of the vocabulary: `logits = x @ table.T`.

    The products take operands of the dtype of `x` and are summed in float32, which is also the
    logits' dtype (float64 for float64). The backward's two GEMMs likewise: the float32 cotangent
    is rounded to the dtype of `x` first, or they would run at float32's speed, an eighth of
    bfloat16's; the table's gradient keeps its float32 sums.

    Args:
      x: `(batch, seq, dim)`.
      table: `(vocab, dim)`.
    Returns: `(batch, seq, vocab)`.
    """
    return _product("bsd,vd->bsv", x, table.astype(x.dtype))


def _unembed_forward(x, table):
    return unembed(x, table), (x, table)


def _unembed_backward(residuals, dlogits):
    x, table = residuals
    dlogits = dlogits.astype(x.dtype)
    dx = jnp.einsum("bsv,vd->bsd", dlogits, table.astype(x.dtype))
    return dx, _product("bsv,bsd->vd", dlogits, x).astype(table.dtype)


def _product(equation: str, a: Array, b: Array) -> Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(equation, a, b, preferred_element_type=wide)


unembed.defvjp(_unembed_forward, _unembed_backward)
