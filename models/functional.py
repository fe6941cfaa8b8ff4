"""One interface to the transformer in either framework, in pure functions: what a trainer needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import parameters
from .attention import Cache
from .config import TransformerConfig
from .sharding import Sharding, divides, stored, with_auto_axes

Framework = Literal["nnx", "eqx"]
Params = Any  # nnx: nested dictionaries of arrays; eqx: the model, a pytree of arrays


@dataclass(frozen=True)
class Functional:
    """The transformer as functions of its parameters, the same for Flax nnx and Equinox.

    Two of the same framework, configuration and sharding are equal, and hash so: they can be static
    arguments of `jax.jit`.

    Attributes:
      framework: "nnx" or "eqx".
      config: shape and precision.
      sharding: where parameters and activations lie on a mesh.
      abstract: the parameters' shapes and dtypes, in the structure of `init`'s result.
    """

    framework: Framework
    config: TransformerConfig
    sharding: Sharding
    abstract: Params = field(compare=False, repr=False)
    _model: Any = field(compare=False, repr=False)  # params -> the framework's model

    def init(self, key: Array) -> Params:
        """Makes new parameters; a key gives the same values in both frameworks.

        To make a large model where it belongs, a shard on each device:
        `jax.jit(f.init, out_shardings=f.shardings(f.abstract, mesh))(key)`.
        """
        return self.from_dict(parameters.initial_parameters(self.config, key))

    def apply(self, params: Params, tokens: Array) -> Array:
        """Maps `(batch, seq)` integers to `(batch, seq, vocab)` float32 logits.

        On a mesh of Explicit axes the logits are typed as `sharding.logits`.

        Raises:
          ValueError: if there are more tokens than `max_seq_len`.
        """
        self._check_length(tokens.shape[1])
        run = lambda params, tokens: self._model(params)(tokens)
        return with_auto_axes(run, self.sharding.logits)(params, tokens)

    def decode(self, params: Params, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Scores `(batch, seq)` tokens that follow those in the cache, and adds them to it."""
        return self._model(params).decode(tokens, cache)

    def model(self, params: Params) -> Any:
        """Gives the framework's own `Transformer` with these parameters."""
        return self._model(params)

    def names(self, params: Params) -> Params:
        """Gives each parameter's canonical name, in the structure of `params`."""
        return parameters.names(params)

    def shardings(self, params: Any, mesh: Mesh, sharding: Sharding | None = None) -> Any:
        """Gives a `NamedSharding` for every parameter, in the structure of `params`.

        Args:
          params: parameters, abstract or not; also gradients, or an optimizer's state that holds
            such trees. Scalars are replicated.
          mesh: its axes are among "data", "fsdp" and "tensor".
          sharding: other specs than the model's own.

        Raises:
          ValueError: naming a parameter that the mesh does not divide.
        """
        sharding = sharding or self.sharding

        def place(path, leaf):
            spec = stored(sharding.of_leaf(path) if leaf.ndim else P(), mesh.shape)
            if not divides(spec, leaf.shape, mesh.shape):
                name, shape = parameters.name_of(path)[0], leaf.shape
                raise ValueError(
                    f"{name} of shape {shape} cannot be split as {spec} over the mesh "
                    f"{dict(mesh.shape)}: make each axis divide its dimension, or give a "
                    "`Sharding` without it. `normfuse.models.sharding.validate` says what fits."
                )
            return NamedSharding(mesh, spec)

        return jax.tree.map_with_path(place, params)

    def to_dict(self, params: Params) -> dict[str, Array]:
        """Collects the parameters under their canonical names, in Flax's layout."""
        return parameters.to_dict(params)

    def from_dict(self, values: Mapping[str, Array]) -> Params:
        """Makes parameters of values under their canonical names, in Flax's layout."""
        return parameters.from_dict(self.abstract, values)

    def _check_length(self, seq: int):
        limit = self.config.max_seq_len
        if seq > limit:
            raise ValueError(f"tokens hold {seq} positions; max_seq_len={limit} allows no more.")


def build(
    framework: Framework, config: TransformerConfig, sharding: Sharding | None = None
) -> Functional:
    """Builds the transformer in a framework, without allocating anything.

    Args:
      framework: "nnx" or "eqx".
      config: shape and precision.
      sharding: where parameters and activations lie on a mesh; `Sharding()` when None.

    Raises:
      ValueError: for another framework.
    """
    builders = {"nnx": _build_nnx, "eqx": _build_eqx}
    if framework not in builders:
        listed = ", ".join(map(repr, get_args(Framework)))
        raise ValueError(f"framework={framework!r} must be one of {listed}.")
    sharding = sharding or Sharding()
    abstract, model = builders[framework](config, sharding)
    return Functional(framework, config, sharding, abstract, model)


def _build_nnx(config: TransformerConfig, sharding: Sharding):
    from flax import nnx

    from .nnx import Transformer

    abstract = nnx.eval_shape(lambda: Transformer(config, sharding, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    return nnx.to_pure_dict(state), lambda params: nnx.merge(graphdef, params)


def _build_eqx(config: TransformerConfig, sharding: Sharding):
    from .eqx import Transformer

    make = lambda key: Transformer(config, sharding, key=key)
    return jax.eval_shape(make, jax.random.key(0)), lambda params: params
