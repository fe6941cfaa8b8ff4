"""A transformer of one layer, and the meshes it is trained on."""

import math

import jax
from jax.sharding import AxisType, Mesh

from normfuse.models.config import TransformerConfig
from normfuse.models.sharding import AXES

CONFIG = TransformerConfig(
    vocab_size=64,
    dim=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    max_seq_len=32,
    tie_embeddings=True,
)


def first_devices(*sizes: int) -> Mesh:
    """A mesh of as many devices as the three axes ask for; there may be more."""
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, kinds, devices=jax.devices()[: math.prod(sizes)])
