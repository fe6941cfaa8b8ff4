"""The transformer's sharding on a mesh with axes "data", "fsdp" and "tensor".

The model names no mesh: it passes its activations through `constrain`, which does nothing without
one. Parameters are placed by name. "tensor" shards each kernel's columns or rows so that a block
needs one reduction after attention and one after the MLP; "fsdp" stores the other dimension in
pieces that are gathered just before use.

References:
  Shoeybi et al., Megatron-LM, arXiv:1909.08053; Korthikanti et al., Reducing Activation
  Recomputation in Large Transformer Models (sequence parallelism), arXiv:2205.05198;
  Rajbhandari et al., ZeRO, arXiv:1910.02054; Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

import dataclasses
import functools
import math
from collections.abc import Container, Mapping

import jax
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ..layers.core.sharding import axes_of, without
from .config import TransformerConfig
from .parameters import name_of

AXES = ("data", "fsdp", "tensor")
BATCH = AXES[:2]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The specs of every parameter and activation. A mesh may lack any of the axes.

    Attributes:
      embedding: `(vocab, dim)`.
      head: `(dim, vocab)`, the output projection where embeddings are not tied.
      column: `(dim, features)` of the query, key, value, gate and up projections.
      column_bias: `(features,)` of those.
      row: `(features, dim)` of the attention's output and the MLP's down projection.
      scale: `(n,)` of the norms.
      tokens: `(batch, seq)`.
      residual: `(batch, seq, dim)` between blocks.
      block_input: `(batch, seq, dim)`, normalised, before the column projections.
      heads: `(batch, seq, heads, head_dim)`.
      hidden: `(batch, seq, mlp_dim)`.
      logits: `(batch, seq, vocab)`.
    """

    embedding: P = P("tensor", "fsdp")
    head: P = P("fsdp", "tensor")
    column: P = P("fsdp", "tensor")
    column_bias: P = P("tensor")
    row: P = P("tensor", "fsdp")
    scale: P = P(None)
    tokens: P = P(BATCH, None)
    residual: P = P(BATCH, None, None)
    block_input: P = P(BATCH, None, None)
    heads: P = P(BATCH, None, "tensor", None)
    hidden: P = P(BATCH, None, "tensor")
    logits: P = P(BATCH, None, "tensor")

    @classmethod
    def sequence_parallel(cls, *, by_rows: bool = False) -> "Sharding":
        """Returns specs that split the tokens between blocks over "tensor", too.

        Each block then gathers its input and scatters the sum of its output instead of an
        all-reduce: the same bytes on the wire, and norms and residuals take 1/tensor of the memory.

        Args:
          by_rows: split the batch instead of the sequence. For a mesh of "tensor" alone, which must
            divide the batch. Pieces of a sequence lie scattered in the gathered array, so GPUs
            transpose them; whole sequences are contiguous.
        """
        return cls(
            residual=P((*BATCH, "tensor"), None, None) if by_rows else P(BATCH, "tensor", None)
        )

    def parameter(self, name: str) -> P:
        """Returns the spec of a parameter by its canonical name (`normfuse.models.parameters`)."""
        match name.split("."):
            case [*_, "scale"]:
                return self.scale
            case [*_, "embed", "embedding"]:
                return self.embedding
            case [*_, "head", "kernel"]:
                return self.head
            case [*_, "q" | "k" | "v" | "gate" | "up", "kernel"]:
                return self.column
            case [*_, "q" | "k" | "v", "bias"]:
                return self.column_bias
            case [*_, "o" | "down", "kernel"]:
                return self.row
        raise KeyError(f"no sharding is known for the parameter {name!r}")

    def of_leaf(self, path: tuple) -> P:
        """Returns the spec of a leaf by its path in either framework's tree of parameters."""
        name, transposed = name_of(path)
        spec = self.parameter(name)
        return P(*reversed(spec)) if transposed else spec

    def without(self, axis: str) -> "Sharding":
        """Returns the same sharding without `axis` in its specs."""
        drop = lambda spec: on_mesh(spec, [name for name in AXES if name != axis])
        specs = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        dropped = {name: drop(spec) for name, spec in specs.items() if isinstance(spec, P)}
        return dataclasses.replace(self, **dropped)


def constrain(x: Array, spec: P) -> Array:
    """Constrains `x` to `spec` on the mesh in context; without a mesh, returns `x`.

    Axes drop out of the spec if the mesh lacks them, a `shard_map` has taken them over, or they do
    not divide the array (one prompt, or the single token of a decoding step).
    """
    auto = _auto_axes()
    if math.prod(auto.values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, _fitting(spec, x.shape, tuple(auto.items())))


def in_context(spec: P) -> P | None:
    """Returns `spec` with the axes of the mesh in context; None if there is nothing to place."""
    auto = _auto_axes()
    return None if math.prod(auto.values()) == 1 else on_mesh(spec, auto)


def axes_of_words(sharding: Sharding, rows: int, words: int) -> tuple[str, ...]:
    """Returns the axes of the mesh in context that split the vocabulary when rows are looked up.

    These are "tensor" and, if it splits a table of more words than there are rows to look up,
    "fsdp": then the rows that are found move between its devices. Otherwise the table does.
    """
    mesh = _auto_axes()
    split = on_mesh(sharding.embedding, mesh)
    return axes_of((stored(split, mesh) if rows < words else split)[0])


def _auto_axes() -> dict[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Auto}


def on_mesh(spec: P, axes: Container[str]) -> P:
    """Returns `spec` with only those of its axes that are in `axes`."""
    return P(*[without(entry, {a for a in axes_of(entry) if a not in axes}) for entry in spec])


@functools.cache
def _fitting(spec: P, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> P:
    """Returns `spec` with the axes of these sizes that, from the first on, divide an array."""
    entries = []
    for size, entry in zip(shape, on_mesh(spec, dict(sizes)), strict=False):
        kept: tuple[str, ...] = ()
        for name in axes_of(entry):
            if size % math.prod(dict(sizes)[axis] for axis in (*kept, name)):
                break
            kept += (name,)
        entries.append(kept or None)
    return P(*entries)


def stored(spec: P, mesh_shape: Mapping[str, int]) -> P:
    """Returns a parameter's spec on a mesh, with "fsdp" moved to its first dimension.

    Pieces along another dimension lie scattered in the whole array: GPUs would transpose each when
    it is gathered, and its gradient before it is reduced. On a mesh with "tensor" the spec stays,
    since XLA would gather a dimension that both split over both.
    """
    spec = on_mesh(spec, mesh_shape)
    if "fsdp" not in spec or mesh_shape.get("tensor", 1) > 1:
        return spec
    return P("fsdp", *(None for _ in spec[1:]))


def validate(
    config: TransformerConfig,
    mesh_shape: Mapping[str, int],
    sharding: Sharding | None = None,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
) -> None:
    """Checks that every dimension divides over its mesh axes, before anything is compiled.

    Args:
      config: the model.
      mesh_shape: size of each mesh axis, as `mesh.shape`; a missing axis counts as 1.
      sharding: the specs to check; `Sharding()` when None.
      batch_size: sequences per step over all devices; not checked when None.
      seq_len: tokens per sequence; not checked when None.

    Raises:
      ValueError: naming the dimension, the mesh axis, their sizes and the sizes that would fit; or
        an unknown axis of the mesh.
    """
    sharding = sharding or Sharding()
    unknown = [name for name in mesh_shape if name not in AXES]
    if unknown:
        known = ", ".join(map(repr, AXES))
        raise ValueError(f"mesh axis {unknown[0]!r} is unknown to the transformer; it has {known}.")
    dimensions = [
        ("num_heads", config.num_heads, sharding.heads[2]),
        ("num_kv_heads", config.num_kv_heads, sharding.heads[2]),
        ("mlp_dim", config.mlp_dim, sharding.hidden[2]),
        ("vocab_size", config.vocab_size, sharding.embedding[0]),
        ("dim", config.dim, sharding.column[0]),
        ("batch_size", batch_size, sharding.tokens[0]),
        ("batch_size", batch_size, sharding.residual[0]),
        ("seq_len", seq_len, sharding.residual[1]),
    ]
    if mesh_shape.get("tensor", 1) == 1:  # any dimension of a kernel may be a parameter's first
        heads = {n: getattr(config, n) * config.head_dim for n in ("num_heads", "num_kv_heads")}
        features = {"vocab_size": config.vocab_size, "mlp_dim": config.mlp_dim}
        features |= {f"{name} * head_dim": size for name, size in heads.items()}
        dimensions += [(name, size, sharding.column[0]) for name, size in features.items()]
    for name, size, entry in dimensions:
        axes = axes_of(entry)
        parts = math.prod(mesh_shape.get(axis, 1) for axis in axes)
        if size is not None and size % parts:
            where = " x ".join(f"{a!r} of size {mesh_shape[a]}" for a in axes if a in mesh_shape)
            fitting = " or ".join(str(n) for n in range(1, parts) if size % n == 0)
            raise ValueError(
                f"{name}={size} cannot be split over mesh axis {where}: it must be a multiple of "
                f"{parts}. Change {name}, or make the axis {fitting}."
            )
