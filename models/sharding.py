"""How the transformer lies on a mesh with axes "data", "fsdp" and "tensor".

The model names no mesh: it passes its activations through `constrain`, which does nothing where
there is none. Parameters are placed by name. One axis shards each kernel's columns or rows over
"tensor" so that a block needs one reduction after attention and one after the MLP; "fsdp" stores
the other dimension in pieces that are gathered just before use.

References:
  Shoeybi et al., Megatron-LM, arXiv:1909.08053; Korthikanti et al., Reducing Activation
  Recomputation in Large Transformer Models (sequence parallelism), arXiv:2205.05198;
  Rajbhandari et al., ZeRO, arXiv:1910.02054.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ..layers.core.sharding import axes_of
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
      keep_gathered: where blocks are computed again in the backward (`remat`), kernels that "fsdp"
        devices gathered for the forward are kept for it (`normfuse.models.gathered`).
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
    keep_gathered: bool = False

    @classmethod
    def sequence_parallel(cls, *, by_rows: bool = False) -> "Sharding":
        """Splits the tokens between blocks over "tensor": a part of each sequence on each device.

        Each block then gathers its input and scatters the sum of its output, where it otherwise
        all-reduces: the same bytes on the wire, and norms and residuals take 1/tensor of the
        memory.

        Args:
          by_rows: split the batch instead, which then has a multiple of "tensor" sequences, on a
            mesh of "tensor" alone. Parts of sequences lie scattered in what is gathered, and GPUs
            transpose them; whole sequences they do not.
        """
        return cls(
            residual=P((*BATCH, "tensor"), None, None) if by_rows else P(BATCH, "tensor", None)
        )

    def parameter(self, name: str) -> P:
        """Gives the spec of a parameter by its canonical name (`normfuse.models.parameters`)."""
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
        """Gives the spec of a leaf by its path in either framework's tree of parameters."""
        name, transposed = name_of(path)
        spec = self.parameter(name)
        return P(*reversed(spec)) if transposed else spec

    def without(self, axis: str) -> "Sharding":
        """The same where `axis` is no axis of the mesh."""
        drop = lambda spec: on_mesh(spec, [name for name in AXES if name != axis])
        specs = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        dropped = {name: drop(spec) for name, spec in specs.items() if isinstance(spec, P)}
        return dataclasses.replace(self, **dropped)


def constrain(x: Array, spec: P) -> Array:
    """Asks for `x` to lie as `spec` says on the mesh in context; without one, returns `x`.

    Axes that the mesh lacks or that a `shard_map` has taken over drop out of the spec, and those
    that do not divide the array, as one prompt or the single token that is decoded.
    """
    here = in_context(spec)
    if here is None:
        return x
    sizes = _axes_in_context(AxisType.Auto)
    fits = [_dividing(*each, sizes) for each in zip(x.shape, here, strict=False)]
    return jax.lax.with_sharding_constraint(x, P(*fits))


def in_context(spec: P) -> P | None:
    """What is left of `spec` on the mesh in context; None where nothing is to be placed."""
    auto = _axes_in_context(AxisType.Auto)
    return None if math.prod(auto.values()) == 1 else on_mesh(spec, auto)


def is_split(axis: str) -> bool:
    """Whether arrays may be placed over several devices along `axis` of the mesh in context."""
    return _axes_in_context(AxisType.Auto).get(axis, 1) > 1


def with_auto_axes(function: Callable[..., Array], spec: P) -> Callable[..., Array]:
    """Lets `function` leave placement to XLA where the mesh in context has Explicit axes.

    Its result then has `spec` as its type; on other meshes, and without one, it is `function`.
    """
    explicit = _axes_in_context(AxisType.Explicit)
    if not explicit:
        return function
    out = on_mesh(spec, explicit)
    auto: Any = jax.sharding.auto_axes  # by its types, it may return a decorator
    return auto(function, axes=tuple(explicit), out_sharding=out)


def _axes_in_context(kind: AxisType) -> dict[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, its_kind in kinds if its_kind == kind}


def on_mesh(spec: P, axes) -> P:
    """Drops from `spec` the axes that are not among `axes`."""
    entries = []
    for entry in spec:
        kept = tuple(name for name in axes_of(entry) if name in axes)
        entries.append(kept if len(kept) > 1 else kept[0] if kept else None)
    return P(*entries)


def _dividing(size: int, entry, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The first axes of a spec's entry that together divide a dimension."""
    kept: tuple[str, ...] = ()
    for name in axes_of(entry):
        if size % math.prod(sizes[axis] for axis in (*kept, name)):
            break
        kept += (name,)
    return kept or None


def divides(spec: P, shape: tuple[int, ...], mesh_shape: Mapping[str, int]) -> bool:
    """Whether every entry of a spec divides its dimension."""
    parts = (math.prod(mesh_shape[name] for name in axes_of(entry)) for entry in spec)
    return all(size % part == 0 for size, part in zip(shape, parts, strict=False))


def stored(spec: P, mesh_shape: Mapping[str, int]) -> P:
    """Where a parameter lies on a mesh: "fsdp" on its first dimension if "tensor" is on none.

    Pieces of another dimension lie scattered in the whole: GPUs would transpose each when it is
    gathered, and its gradient before that is reduced. With "tensor" on the mesh too, XLA gathers
    a dimension that both split over both.
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
):
    """Checks that every dimension divides over its mesh axes, before anything is compiled.

    Args:
      config: the model.
      mesh_shape: size of each mesh axis, as `mesh.shape`; a missing axis counts as 1.
      sharding: the specs that will be used; `Sharding()` when None.
      batch_size: sequences per step over all devices, if they are to be checked too.
      seq_len: tokens per sequence, likewise.

    Raises:
      ValueError: naming the dimension, its size, the mesh axis, its size, and what would fit; or
        an axis of the mesh that the specs do not know.
    """
    sharding = sharding or Sharding()
    unknown = [name for name in mesh_shape if name not in AXES]
    if unknown:
        raise ValueError(
            f"mesh axis {unknown[0]!r} is unknown to the transformer; "
            f"its axes are 'data', 'fsdp' and 'tensor'."
        )
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
            raise ValueError(
                f"{name}={size} cannot be split over mesh axis {where}: it must be a multiple of "
                f"{parts}. Change {name}, or make the axis {_fitting(size, parts)}."
            )


def _fitting(size: int, parts: int) -> str:
    return " or ".join(str(n) for n in range(1, parts) if size % n == 0)
