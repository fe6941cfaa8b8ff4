"""Flax NNX modules on normfuse's operations: drop-in layers, fused ones, and `swap`."""

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from ..native.dtypes import narrowed, rounded
from ..native.implementation import Implementation, choose
from .core.arguments import dimensions_of, unserved_dtype
from .core.op import placed
from .dense.dense import apply as apply_dense
from .dense.epilogue import Activation, finish
from .dense.gated import apply_product as apply_gated_product
from .dense.norm_dense import apply as apply_norm_dense
from .modules import by_framework, check_eps, check_options, replaced, unfused_norm_dense
from .rms_norm import rms_norm

M = TypeVar("M")


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` computed by `normfuse.rms_norm`.

    Takes everything `nnx.RMSNorm` does and has the same parameters, initial values, state and
    result dtype. As there, x and scale are rounded to `dtype` (None: what they promote to) before
    the statistics, which are in float32; unlike there, nothing is widened in memory and the
    gradient of a float32 scale is not rounded.

    Flax's own code serves where an option asks for what the operation does not do: `mask`,
    `axis_name`, a `promote_dtype` of your own, `feature_axes` that differ from `reduction_axes`,
    an `epsilon` that is an array, and inputs that are integer or complex. (`use_fast_variance` has
    no effect on an RMSNorm.)

    Args:
      num_features: the length of the normalised axis.
      implementation: as for `normfuse.rms_norm`.
      **kwargs: `nnx.RMSNorm`'s.

    Raises:
      ValueError: for an epsilon that is negative or not finite; when called, for an x that does not
        have `num_features` features.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import RMSNorm
    >>> norm = RMSNorm(4, rngs=nnx.Rngs(0))
    >>> norm(jnp.full((2, 4), 3.0)).round(5)[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """

    implementation: Implementation

    def __init__(self, num_features: int, *, implementation: Implementation = None, **kwargs: Any):
        check_eps("nnx.RMSNorm", "epsilon", kwargs.get("epsilon", 1e-6))
        super().__init__(num_features, **kwargs)
        self.implementation = check_options(implementation)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalises x over `reduction_axes`; `mask` is Flax's."""
        x = jnp.asarray(x)
        axes = dimensions_of("nnx.RMSNorm", x, self.reduction_axes)
        scale = None if self.scale is None else self.scale[...]
        if reason := self._unserved(x, scale, axes, mask):
            call = lambda: super(RMSNorm, self).__call__(x, mask=mask)
            return by_framework("nnx.RMSNorm", reason, self.implementation, call)
        dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
        if scale is not None:
            scale = rounded(self._shaped(scale, x, axes), dtype)
        return rms_norm(
            narrowed(x, dtype),
            scale,
            eps=self.epsilon,
            axis=axes,
            dtype=dtype,
            implementation=self.implementation,
        )

    def _unserved(self, x, scale, axes, mask) -> str:
        """The option that only Flax serves, or ""."""
        if mask is not None:
            return "a mask"
        if self.axis_name is not None:
            return "an axis_name"
        if self.promote_dtype is not dtypes.promote_dtype:
            return "a promote_dtype of its own"
        if scale is not None and axes != dimensions_of("nnx.RMSNorm", x, self.feature_axes):
            return "feature_axes that differ from reduction_axes"
        if isinstance(self.epsilon, jax.Array):
            return "an epsilon that is an array"
        return unserved_dtype(x.dtype, None if scale is None else scale.dtype, self.dtype)

    def _shaped(self, scale, x, axes):
        shape = tuple(x.shape[i] for i in axes)
        if scale.size != math.prod(shape):
            raise ValueError(
                f"nnx.RMSNorm: x must have num_features={scale.size} features on axis "
                f"{self.feature_axes}, got shape {x.shape}"
            )
        return scale.reshape(shape)


class Linear(nnx.Linear):
    """`flax.nnx.Linear` computed by `normfuse.dense`, with an optional activation.

    Takes everything `nnx.Linear` does and has the same parameters, initial values, state and result
    dtype; without an activation the outputs are the same, bit for bit. Gradients of float32
    parameters are not rounded to `dtype` on their way.

    Flax's own product serves where an option asks for what the operation does not do: `precision`,
    `preferred_element_type`, a `dot_general` or `promote_dtype` of your own, and inputs that are
    integer or complex.

    Args:
      in_features: the length of the input's last axis.
      out_features: the length of the output's.
      activation: as for `normfuse.dense`: None, a name or a pure function.
      implementation: as for `normfuse.dense`.
      **kwargs: `nnx.Linear`'s.

    Raises:
      ValueError: for a size that the initialiser cannot serve, or an unknown activation; when
        called, for an input without `in_features` features.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import Linear
    >>> Linear(3, 4, activation="silu", rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    activation: Activation
    implementation: Implementation

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = None,
        implementation: Implementation = None,
        **kwargs: Any,
    ):
        implementation = check_options(implementation, activation)
        try:
            super().__init__(in_features, out_features, **kwargs)
        except ZeroDivisionError:
            raise ValueError(
                "nnx.Linear: in_features and out_features must be at least 1 for this kernel_init, "
                f"got {in_features} and {out_features}"
            ) from None
        self.activation = activation
        self.implementation = implementation

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Multiplies the last axis of `inputs` by the kernel; `out_sharding` is Flax's."""
        inputs = jnp.asarray(inputs)
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        if inputs.ndim == 0 or inputs.shape[-1] != kernel.shape[0]:
            raise ValueError(
                f"nnx.Linear: inputs must have in_features={kernel.shape[0]} as the last axis, got "
                f"shape {inputs.shape}"
            )
        if reason := self._unserved(inputs, kernel, bias):
            call = lambda: super(Linear, self).__call__(inputs, out_sharding=out_sharding)
            y = choose(f"nnx.Linear with {reason}", self.implementation, {"xla": lambda _: call()})
            return y if self.activation is None else finish(y, None, self.activation, y.dtype)
        return apply_dense(
            inputs,
            kernel,
            bias,
            activation=self.activation,
            dtype=dtypes.canonicalize_dtype(inputs, kernel, bias, dtype=self.dtype),
            implementation=self.implementation,
            out_sharding=out_sharding,
        )

    def _unserved(self, inputs, kernel, bias) -> str:
        """The option that only Flax serves, or ""."""
        if self.precision is not None:
            return "a precision"
        if self.preferred_element_type is not None:
            return "a preferred_element_type"
        if self.dot_general is not jax.lax.dot_general:
            return "a dot_general of its own"
        if self.promote_dtype is not dtypes.promote_dtype:
            return "a promote_dtype of its own"
        bias_dtype = None if bias is None else bias.dtype
        return unserved_dtype(inputs.dtype, kernel.dtype, bias_dtype, self.dtype)


# ---------------------------------------------------------------- layers of several operations


class NormDense(nnx.Module):
    """`RMSNorm` into `Linear`, the normalised input computed again in the backward.

    `norm` and `linear` are modules of their own, so parameters, initial values and checkpoints are
    those of the two in a row. The two in a row serve where either is of another type, as after
    model surgery, or has an option that only Flax serves (`precision`, a `dot_general`, ...).

    Args:
      in_features: the length of the input's last axis.
      out_features: the length of the output's.
      epsilon: the norm's.
      activation: as for `normfuse.dense`: None, a name or a pure function.
      recompute: as for `normfuse.norm_dense`.
      dtype: of the computation and the result; None for what input and parameters promote to.
      implementation: as for `normfuse.norm_dense`.
      rngs: for the initial values.
      **kwargs: `nnx.Linear`'s, `param_dtype` for both.

    Raises:
      ValueError: for an unknown activation or a bad epsilon; when called, for an input without
        `in_features` features.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import NormDense
    >>> NormDense(3, 4, activation="silu", rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        epsilon: float = 1e-6,
        activation: Activation = None,
        recompute: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        check_eps("NormDense", "epsilon", epsilon)
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm = RMSNorm(in_features, epsilon=epsilon, **shared)
        self.linear = Linear(in_features, out_features, **shared, **kwargs)
        self.activation, self.recompute, self.dtype = activation, recompute, dtype
        self.implementation = check_options(implementation, activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis of x and multiplies it by the kernel."""
        x = jnp.asarray(x)
        if reason := replaced(self.norm, RMSNorm) or replaced(self.linear, Linear):
            return unfused_norm_dense(self, x, reason)
        scale = None if self.norm.scale is None else self.norm.scale[...]
        kernel, bias = _parameters(self.linear)
        if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
            raise ValueError(
                f"NormDense: x must have in_features={kernel.shape[0]} as the last axis, got shape "
                f"{x.shape}"
            )
        last = (x.ndim - 1,)
        if dimensions_of("NormDense", x, self.norm.reduction_axes) != last:
            return unfused_norm_dense(self, x, "other axes that are normalised")
        unserved = self.norm._unserved(x, scale, last, None)
        if reason := unserved or self.linear._unserved(x, kernel, bias):
            return unfused_norm_dense(self, x, reason)
        dtype = dtypes.canonicalize_dtype(x, scale, kernel, bias, dtype=self.dtype)
        return apply_norm_dense(
            narrowed(x, dtype),
            None if scale is None else rounded(scale, dtype),
            kernel,
            bias,
            self.activation,
            jnp.dtype(dtype).name,
            eps=self.norm.epsilon,
            recompute=self.recompute,
            implementation=self.implementation,
        )


class GatedMLP(nnx.Module):
    """A gated MLP, SwiGLU by default: `down(activation(gate(x)) · up(x))`.

    The gated activation is computed again in the backward by the pass that computes its gradients.
    `gate`, `up` and `down` are `Linear`s with parameters, initial values and checkpoints as ever;
    what has taken the place of one, or has an option that only Flax serves, is called as it is.

    Args:
      in_features: the length of the input's last axis, and of the output's.
      hidden_features: the length of what is between.
      activation: of the gate: a name or a pure function, as for `normfuse.gated_product`.
      use_bias: whether the three have biases.
      implementation: as for `normfuse.gated_product`.
      rngs: for the initial values.
      **kwargs: `nnx.Linear`'s, for all three.

    Raises:
      ValueError: for an unknown activation; when called, for an input without `in_features`
        features.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import GatedMLP
    >>> GatedMLP(4, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 4))).shape
    (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: Activation = "silu",
        use_bias: bool = False,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        self.implementation = check_options(implementation, activation)
        self.activation = activation
        make = lambda n, m: Linear(n, m, use_bias=use_bias, rngs=rngs, **kwargs)
        self.gate = make(in_features, hidden_features)
        self.up = make(in_features, hidden_features)
        self.down = make(hidden_features, in_features)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the MLP to the last axis of x."""
        return self.combine(self.gate(x), self.up(x))

    def combine(
        self, gate: jax.Array, up: jax.Array, hidden_sharding: jax.P | None = None
    ) -> jax.Array:
        """The MLP after its first two products, placed as `normfuse.gated_product` says."""

        def call():
            hidden = finish(gate, None, self.activation, gate.dtype, up)
            return self.down(placed(hidden, hidden_sharding))

        if reason := replaced(self.down, Linear):
            return by_framework("GatedMLP", reason, self.implementation, call)
        kernel, bias = _parameters(self.down)
        if reason := self.down._unserved(gate, kernel, bias):
            return by_framework("GatedMLP", reason, self.implementation, call)
        return apply_gated_product(
            gate,
            up,
            kernel,
            bias,
            self.activation,
            dtype=dtypes.canonicalize_dtype(gate, kernel, bias, dtype=self.down.dtype),
            implementation=self.implementation,
            hidden_sharding=hidden_sharding,
        )


def _parameters(linear: Linear) -> tuple[jax.Array, jax.Array | None]:
    return linear.kernel[...], None if linear.bias is None else linear.bias[...]


# ---------------------------------------------------------------- other people's models

_OURS = {nnx.RMSNorm: RMSNorm, nnx.Linear: Linear}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


def swap(model: M, *, implementation: Implementation = None) -> M:
    """Turns every `nnx.RMSNorm` and `nnx.Linear` in `model` into normfuse's, in place.

    The layers stay the same objects with the same Variables: parameters, metadata, tied layers,
    optimizer state and checkpoints are untouched. Subclasses of Flax's layers are left alone.
    Graph definitions (`nnx.graphdef`, `nnx.split`) taken before describe the model as it was.

    Args:
      model: a module, or any container of modules that NNX knows.
      implementation: of the RMSNorm layers, as for `normfuse.rms_norm`; of those that are
        normfuse's already, too, unless it is None. Linear layers multiply by XLA, as they did.

    Returns:
      `model` itself.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import swap, unswap
    >>> model = nnx.Sequential(nnx.RMSNorm(4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
    >>> type(swap(model).layers[0]).__module__
    'normfuse.layers.nnx'
    >>> type(unswap(model).layers[0]).__module__
    'flax.nnx.nn.normalization'
    """
    implementation = check_options(implementation)
    for module in _layers(model, _OURS):
        object.__setattr__(module, "__class__", _OURS[type(module)])  # Flax notes what it sets
        module.implementation = implementation if isinstance(module, RMSNorm) else None
        if isinstance(module, Linear):
            module.activation = None
    if implementation is not None:
        for module in _layers(model, {RMSNorm}):
            module.implementation = implementation
    return model


def unswap(model: M) -> M:
    """Turns normfuse's layers in `model` back into Flax's, in place.

    Raises:
      ValueError: for a Linear with an activation, which `nnx.Linear` cannot express; nothing is
        changed then.
    """
    layers = list(_layers(model, _THEIRS))
    for module in layers:
        if getattr(module, "activation", None) is not None:
            raise ValueError(
                f"unswap: a Linear of {module.in_features} by {module.out_features} features has "
                f"activation={module.activation!r}, which nnx.Linear cannot express; set it to "
                "None and apply it to the output"
            )
    for module in layers:
        object.__setattr__(module, "__class__", _THEIRS[type(module)])
        _forget(module, ("activation", "implementation"))
    return model


def _forget(module: nnx.Module, names: tuple[str, ...]) -> None:
    """Removes attributes, and Flax's note of which attributes are static with them.

    The note is Flax's private matter; without it only `nnx.graphdef` would tell the module from one
    that never had them.
    """
    for name in names:
        vars(module).pop(name, None)
    note = vars(module).get("_pytree__nodes")
    if note is not None:
        kept = {name: is_data for name, is_data in note.items() if name not in names}
        object.__setattr__(module, "_pytree__nodes", type(note)(kept))


def _layers(model, classes) -> Iterator[Any]:
    nodes = [node for _, node in nnx.iter_graph(model) if type(node) in classes]
    return iter({id(node): node for node in nodes}.values())
