"""From tokens to vectors and back to logits, shared by the Flax and the Equinox transformer."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from .sharding import Sharding, constrain


def embed(tokens: Array, table: Array, dtype: str, sharding: Sharding) -> Array:
    """Looks each token's vector up.

    Args:
      tokens: `(batch, seq)` integers. One outside the vocabulary gives NaN, not a neighbour's
        vector.
      table: `(vocab, dim)`.
      dtype: of the result.
    Returns: `(batch, seq, dim)`.
    """
    return _look_up(constrain(tokens, sharding.tokens), table, dtype, sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _look_up(tokens: Array, table: Array, dtype: str, sharding: Sharding) -> Array:
    """The rows of the table, rounded before they are moved between devices, not after.

    In bfloat16 the table's pieces (FSDP) and the sum over the vocabulary's parts then take half the
    bytes. The gradient sums a token's occurrences in the table's own dtype.
    """
    # Each device looks up its part of the vocabulary.
    parts = constrain(table.astype(dtype), P(sharding.embedding[0], None))
    x = jnp.take(parts, tokens, axis=0, mode="clip")
    # Summed over the parts before it is split along the sequence. Nothing may come between: XLA
    # makes one reduce-scatter of a sum and the slice of it.
    x = constrain(constrain(x, sharding.block_input), sharding.residual)
    known = (tokens >= 0) & (tokens < table.shape[0])
    return jnp.where(known[..., None], x, jnp.nan)


def _look_up_forward(tokens, table, dtype, sharding):
    return _look_up(tokens, table, dtype, sharding), (tokens, table)


def _look_up_backward(dtype, sharding, residuals, dx):
    del dtype
    tokens, table = residuals
    place = lambda dtable: constrain(dtable, P(sharding.embedding[0], None))
    dx = constrain(dx, sharding.block_input).astype(table.dtype)
    blank = place(jnp.zeros(table.shape, table.dtype))
    return None, place(blank.at[tokens].add(dx, mode="drop"))


_look_up.defvjp(_look_up_forward, _look_up_backward)


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
    operand = table.astype(x.dtype)  # once: an FSDP table is gathered once for both ways
    return _product("bsd,vd->bsv", x, operand), (x, table, operand)


def _unembed_backward(residuals, dlogits):
    x, table, operand = residuals
    dlogits = dlogits.astype(x.dtype)
    dx = jnp.einsum("bsv,vd->bsd", dlogits, operand)
    return dx, _product("bsv,bsd->vd", dlogits, x).astype(table.dtype)


def _product(equation: str, a: Array, b: Array) -> Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(equation, a, b, preferred_element_type=wide)


unembed.defvjp(_unembed_forward, _unembed_backward)
