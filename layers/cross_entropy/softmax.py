"""The softmax of a chunk of logits: its statistics, and the gradient in the logits' place.

    c = softcap · tanh(z / softcap) (or z)        lse = log Σ_j exp(c_j)        picked = c_label
    g_j = (a · exp(c_j - lse) - b · [j = label]) · dc_j/dz_j

Kernels see one device's part of the vocabulary: labels are counted from its first column, and one
that lies elsewhere matches none. With one part the statistics and the gradient are one kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import compute_dtype
from ...native.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Softmax:
    """All that is known of the softmax when it is traced.

    Attributes:
      softcap: what bounds |c|; None without a bound.
      z_loss: what lse² is multiplied by in the loss.
      dtype: of the gradient.
      op: the function the user called.
    """

    softcap: float | None = None
    z_loss: float = 0.0
    dtype: str = "bfloat16"
    op: str = "linear_cross_entropy"


# ---------------------------------------------------------------- definition, in plain JAX


def _capped(spec: Softmax, z: Array) -> Array:
    z = z.astype(compute_dtype(z.dtype))
    return z if spec.softcap is None else spec.softcap * jnp.tanh(z / spec.softcap)


def _is_label(z: Array, labels: Array) -> Array:
    """By comparing, not by gathering: where the vocabulary is split no logits move."""
    return jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) == labels[..., None]


def define_statistics(spec: Softmax, z: Array, labels: Array) -> list[Array]:
    """`(z (*rows, vocab), labels (*rows)) -> (lse, picked)`, `(*rows)` each."""
    c = _capped(spec, z)
    picked = jnp.sum(jnp.where(_is_label(z, labels), c, 0), axis=-1)
    return [jax.nn.logsumexp(c, axis=-1), picked]


def define_gradient(
    spec: Softmax, z: Array, labels: Array, lse: Array, a: Array, b: Array
) -> list[Array]:
    """`(z, labels, lse, a, b) -> (g,)`; rows whose a and b are zero have zeros."""
    c = _capped(spec, z)
    each = lambda row: row[..., None]
    g = each(a) * jnp.exp(c - each(lse)) - jnp.where(_is_label(z, labels), each(b), 0)
    if spec.softcap is not None:
        g = g * (1 - jnp.square(c / spec.softcap))
    return [jnp.where(each((a == 0) & (b == 0)), 0, g).astype(spec.dtype)]


def define_both(spec: Softmax, z: Array, labels: Array, weights: Array) -> list[Array]:
    """`(z, labels, weights (*rows)) -> (g, lse, picked)`: of Σ weights · (loss + z-loss)."""
    lse, picked = define_statistics(spec, z, labels)
    (g,) = define_gradient(spec, z, labels, lse, weights * lse_slope(spec, lse), weights)
    return [g, lse, picked]


def lse_slope(spec: Softmax, lse: Array) -> Array:
    """Returns the derivative of lse + z_loss · lse²."""
    return 1 + 2 * spec.z_loss * lse


statistics = Kernel("softmax_statistics", define_statistics, {})
gradient = Kernel("softmax_gradient", define_gradient, {})
both = Kernel("softmax_statistics_and_gradient", define_both, {})
