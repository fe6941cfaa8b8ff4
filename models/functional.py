"""The transformer of either framework as pure functions, for training loops."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..layers.core.arguments import requested
from ..layers.fuse import fuse
from . import parameters
from .attention import Cache
from .config import TransformerConfig
from .sharding import Sharding, stored

Framework = Literal["nnx", "eqx"]
Params = Any  # nnx: nested dictionaries of arrays; eqx: the model, a pytree of arrays
_Structure = tuple[Params, Callable[[Params], Any]]  # `abstract` and `model` of `Functional`


@dataclass(frozen=True)
class Functional:
    """The transformer as functions of its parameters, the same for Flax nnx and Equinox.

    Compared and hashed by framework, configuration and sharding, so that it can be a static
    argument of `jax.jit`.

    Attributes:
      framework: "nnx" or "eqx".
      config: shape and precision.
      sharding: the specs of parameters and activations on a mesh.
      abstract: the parameters' shapes and dtypes, in the structure of `init`'s result.
      model: returns the framework's own `Transformer` with the given parameters.
      decoder: the same with every product in the compute dtype.
    """

    framework: Framework
    config: TransformerConfig
    sharding: Sharding
    abstract: Params = field(compare=False, repr=False)
    model: Callable[[Params], Any] = field(compare=False, repr=False)
    decoder: Callable[[Params], Any] = field(compare=False, repr=False)

    def init(self, key: Array) -> Params:
        """Draws initial parameters, for each key the same values in both frameworks.

        To draw each device's shard of a large model on that device:
        `jax.jit(f.init, out_shardings=f.shardings(f.abstract, mesh))(key)`.
        """
        return self.from_dict(parameters.initial_parameters(self.config, key))

    def __call__(self, params: Params, tokens: Array, segment_ids: Array | None = None) -> Array:
        """Returns the logits, as `apply`."""
        return self.apply(params, tokens, segment_ids)

    def apply(self, params: Params, tokens: Array, segment_ids: Array | None = None) -> Array:
        """Maps `(batch, seq)` integers to `(batch, seq, vocab)` float32 logits, as the model does.

        With `segment_ids`, integers of the same shape, tokens attend only to those of equal ids.
        """
        return self._fused(lambda model, *inputs: model(*inputs))(params, tokens, segment_ids)

    def loss(
        self,
        params: Params,
        tokens: Array,
        targets: Array,
        segment_ids: Array | None = None,
        **options: Any,
    ) -> Array:
        """Returns the cross-entropy of the next tokens in nats, float32.

        The logits are computed in chunks (`normfuse.linear_cross_entropy`), in the compute dtype
        unless `logits_dtype` says otherwise.

        Args:
          params: the parameters.
          tokens: `(batch, seq)` integers.
          targets: the tokens that follow, of the same shape.
          segment_ids: integers of the same shape, as documents packed in rows have: tokens attend
            only to those of equal ids.
          **options: `reduction`, `logits_dtype` and others of `linear_cross_entropy`.

        Raises:
          TypeError: if tokens are no integers.
          ValueError: if they have another shape, or are more than `max_seq_len`.
        """
        run = self._fused(lambda model, *inputs: model.loss(*inputs, **options))
        return run(params, tokens, targets, segment_ids)

    def decode(self, params: Params, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Scores `(batch, seq)` tokens that follow those in the cache, and adds them to it."""
        run = lambda params, *inputs: self.decoder(params).decode(*inputs)
        if not self._plain():
            run = fuse(run, report=lambda _: None)
        return run(params, tokens, cache)

    def _plain(self) -> bool:
        """Returns True if the configuration asks for plain JAX."""
        return requested(self.config.implementation)[:1] == ["xla"]

    def _fused(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of parameters from one of the model, after `fuse`."""
        run = lambda params, *inputs: call(self.model(params), *inputs)
        if self._plain():
            return run
        return fuse(run, quantization=self.config.quantization, report=lambda _: None)

    def shardings(self, params: Any, mesh: Mesh) -> Any:
        """Returns a `NamedSharding` for every parameter, in the structure of `params`.

        Args:
          params: parameters, abstract or not; also gradients, or an optimizer's state that holds
            such trees. Scalars are replicated.
          mesh: its axes are among "data", "fsdp" and "tensor"; `models.sharding.validate` says
            whether they divide the model.
        """

        def place(path: tuple, leaf: Any) -> NamedSharding:
            wanted = self.sharding.of_leaf(path) if leaf.ndim else P()
            return NamedSharding(mesh, stored(wanted, mesh.shape))

        return jax.tree.map_with_path(place, params)

    def to_dict(self, params: Params) -> dict[str, Array]:
        """Returns the parameters under their canonical names, in Flax's layout."""
        return parameters.to_dict(params)

    def from_dict(self, values: Mapping[str, Array]) -> Params:
        """Returns parameters with these values: canonical names to arrays in Flax's layout."""
        return parameters.from_dict(self.abstract, values)


def build(
    framework: Framework, config: TransformerConfig, sharding: Sharding | None = None
) -> Functional:
    """Builds the transformer in a framework, without allocating anything.

    Args:
      framework: "nnx" or "eqx".
      config: shape and precision.
      sharding: the specs of parameters and activations on a mesh; `Sharding()` when None.

    Raises:
      ValueError: for another framework.
    """
    sharding = sharding or Sharding()
    if framework not in get_args(Framework):
        listed = ", ".join(map(repr, get_args(Framework)))
        raise ValueError(f"framework={framework!r} must be one of {listed}.")
    structure = {"nnx": _of_nnx, "eqx": _of_eqx}[framework]
    abstract, model = structure(config, sharding)
    decoder = model
    if config.quantization is not None:
        _, decoder = structure(replace(config, quantization=None), sharding)
    return Functional(framework, config, sharding, abstract, model, decoder)


def _of_nnx(config: TransformerConfig, sharding: Sharding) -> _Structure:
    from flax import nnx

    from .nnx import Transformer

    make = lambda: Transformer(config, sharding, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.to_pure_dict(state), lambda params: nnx.merge(graphdef, params)


def _of_eqx(config: TransformerConfig, sharding: Sharding) -> _Structure:
    from .eqx import Transformer

    make = lambda key: Transformer(config, sharding, key=key)
    abstract = jax.eval_shape(make, jax.random.key(0))
    tree = jax.tree.structure(abstract)
    # Parameters hold the sharding that they were made with, as static data. This may differ.
    return abstract, lambda params: jax.tree.unflatten(tree, jax.tree.leaves(params))
