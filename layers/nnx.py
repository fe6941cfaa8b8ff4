"""Flax NNX modules on normfuse's operations: drop-in layers, fused ones, and `swap`."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

try:
    from flax import nnx
    from flax.nnx.nn import dtypes
except ModuleNotFoundError as error:
    error.add_note("pip install 'normfuse[flax]'")
    raise

from ..native.dtypes import narrowed, rounded
from ..native.implementation import Implementation
from . import modules
from .core.activations import Activation
from .core.arguments import Quantization, dimensions_of, options_of, unserved, unserved_of_flax
from .dense.dense import apply as apply_dense
from .fuse_nnx import compare as compare
from .fuse_nnx import fuse as fuse
from .norm import layer_norm, rms_norm
from .swap import swap as swap


class _Norm:
    """A norm of Flax's, computed by ours where that has its options."""

    __slots__ = ()  # `swap` sets the class of Flax's layers
    implementation: Implementation
    _name: str
    _norm: Callable[..., Array]

    def __init__(
        self: Any, num_features: int, *, implementation: Implementation = None, **kwargs: Any
    ):
        modules.check_eps(self._name, "epsilon", kwargs.get("epsilon", 1e-6))
        flax_norm: Any = super()
        flax_norm.__init__(num_features, **kwargs)
        self.implementation = modules.check_options(implementation)

    def __call__(self: Any, x: Array, mask: Array | None = None) -> Array:
        """Normalises x over `reduction_axes`; `mask` is Flax's."""
        x, name = jnp.asarray(x), self._name
        axes = dimensions_of(name, x, self.reduction_axes)
        parameters = {"scale": self.scale, "bias": getattr(self, "bias", None)}
        arrays = {key: p[...] for key, p in parameters.items() if p is not None}
        features = dimensions_of(name, x, self.feature_axes) if arrays else axes
        reasons = {
            "a mask": mask is not None,
            "an axis_name": self.axis_name is not None,
            "a promote_dtype of its own": self.promote_dtype is not dtypes.promote_dtype,
            "feature_axes that differ from reduction_axes": features != axes,
            "an epsilon that is an array": isinstance(self.epsilon, Array),
        }
        own = [p.dtype for p in arrays.values()]
        if reason := unserved(reasons, x.dtype, *own, self.dtype):
            flax: Any = super()
            return modules.by_framework(name, reason, self, lambda: flax.__call__(x, mask=mask))
        dtype = dtypes.canonicalize_dtype(x, *arrays.values(), dtype=self.dtype)
        shape = tuple(x.shape[i] for i in axes)
        for parameter in arrays.values():
            if parameter.size != math.prod(shape):
                raise ValueError(
                    f"{name}: x must have num_features={parameter.size} features on axis "
                    f"{self.feature_axes}, got shape {x.shape}"
                )
        arrays = {key: rounded(p.reshape(shape), dtype) for key, p in arrays.items()}
        options = {"eps": self.epsilon, "axis": axes, "implementation": self.implementation}
        return self._norm(narrowed(x, dtype), **arrays, dtype=dtype, **options)


class RMSNorm(_Norm, nnx.RMSNorm):
    """`flax.nnx.RMSNorm` computed by `normfuse.rms_norm`.

    Takes everything `nnx.RMSNorm` does and has the same parameters, initial values, state and
    result dtype. As there, x and scale are rounded to `dtype` (None: their promoted dtype) before
    the statistics, which are in float32; unlike there, nothing is widened in memory and the
    gradient of a float32 scale is not rounded.

    Flax's own code serves options that the operation lacks: `mask`,
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
      TypeError: for an epsilon that is not a number.
      NotImplementedError: when called, if the `implementation` asked for cannot serve, such as
        "native" with a mask.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import RMSNorm
    >>> norm = RMSNorm(4, rngs=nnx.Rngs(0))
    >>> norm(jnp.full((2, 4), 3.0)).round(5)[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """

    _name, _norm = "nnx.RMSNorm", staticmethod(rms_norm)
    __init__ = _Norm.__init__  # nnx reads the signature of the class's own


class LayerNorm(_Norm, nnx.LayerNorm):
    """`flax.nnx.LayerNorm` computed by `normfuse.layer_norm`.

    Takes everything `nnx.LayerNorm` does and has the same parameters, initial values, state and
    result dtype. As there, x, scale and bias are rounded to `dtype` (None: their promoted dtype)
    before the statistics, which are in float32; unlike there, nothing is widened in memory and the
    gradients of float32 parameters are not rounded. The variance is always that of
    `use_fast_variance=False`: the mean of squared differences to the mean, whatever the option
    says. Flax's default, a difference of two means, loses its digits where the mean is large.

    Flax's own code serves what `RMSNorm` leaves to it; `implementation` and errors are as there.
    """

    _name, _norm = "nnx.LayerNorm", staticmethod(layer_norm)
    __init__ = _Norm.__init__


class Linear(nnx.Linear):
    """`flax.nnx.Linear` computed by `normfuse.dense`, with an optional activation.

    Takes everything `nnx.Linear` does and has the same parameters, initial values, state and result
    dtype; without an activation the outputs are the same, bit for bit. Gradients of float32
    parameters are not rounded to `dtype` on their way.

    Flax's own product serves options that the operation lacks: `precision`,
    `preferred_element_type`, a `dot_general` or `promote_dtype` of your own, and inputs that are
    integer or complex.

    Args:
      in_features, out_features: the lengths of the input's last axis and of the output's.
      activation, implementation, quantization: as for `normfuse.dense`.
      **kwargs: `nnx.Linear`'s.

    Raises:
      ValueError: for an unknown activation or quantization; when called, for an input without
        `in_features` features, or a quantization with an option that only Flax serves.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import Linear
    >>> Linear(3, 4, activation="silu", rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    _name = "nnx.Linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = None,
        implementation: Implementation = None,
        quantization: Quantization = None,
        **kwargs: Any,
    ):
        modules.set_options(self, "nnx.Linear", activation, implementation, quantization)
        super().__init__(in_features, out_features, **kwargs)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Multiplies the last axis of `inputs` by the kernel; `out_sharding` is Flax's."""
        inputs = jnp.asarray(inputs)
        _check_features("nnx.Linear: inputs", inputs, self)
        call = lambda: super(Linear, self).__call__(inputs, out_sharding=out_sharding)
        if reason := self.unserved(inputs):
            return modules.linear_by_framework(self._name, reason, self, call)
        kernel, bias = self.operands()
        options = options_of(self._name, self, self.compute_dtype(inputs, kernel, bias))
        return apply_dense(inputs, kernel, bias, out_sharding=out_sharding, **options)

    def operands(self) -> tuple[Array, Array | None]:
        """Returns the kernel and the bias."""
        return self.kernel[...], None if self.bias is None else self.bias[...]

    def unserved(self, x: Array) -> str:
        """Returns the part of the layer and its input that only Flax serves, or ""."""
        own = [a.dtype for a in self.operands() if a is not None]
        return unserved_of_flax(self, dtypes.promote_dtype, x.dtype, *own)

    def compute_dtype(self, *arrays: Array | None) -> Any:
        """Returns the layer's dtype, or what the arrays promote to."""
        return dtypes.canonicalize_dtype(*arrays, dtype=self.dtype)


# ---------------------------------------------------------------- layers of several operations


class GatedMLP(nnx.Module):
    """A gated MLP, SwiGLU by default: `down(activation(gate(x)) · up(x))`.

    The gated activation is computed again in the backward by the pass that computes its gradients.
    `gate`, `up` and `down` are `Linear`s with their parameters, initial values and checkpoints;
    a module in the place of one, or with an option that only Flax serves, is called as it is.

    Args:
      in_features: the length of the input's last axis, and of the output's.
      hidden_features: the length of the hidden axis.
      activation, implementation: as for `normfuse.gated_product`.
      quantization: for all three products, as for `normfuse.dense`.
      use_bias: whether the three have biases.
      rngs: for the initial values.
      **kwargs: `nnx.Linear`'s, for all three.

    Raises:
      ValueError: for an unknown activation or quantization; when called, for an input without
        `in_features` features, or a quantization with an option that only Flax serves.

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
        quantization: Quantization = None,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        options = activation, implementation, quantization
        modules.set_options(self, "GatedMLP", *options)
        kwargs |= {"use_bias": use_bias, "quantization": quantization, "rngs": rngs}
        make = lambda n, m: Linear(n, m, **kwargs)
        self.gate = make(in_features, hidden_features)
        self.up = make(in_features, hidden_features)
        self.down = make(hidden_features, in_features)

    def __call__(self, x: Array) -> Array:
        """Applies the MLP to the last axis of x."""
        x = jnp.asarray(x)
        if type(self.up) is Linear:
            _check_features("GatedMLP: x", x, self.up)
        return modules.gated_mlp(self, x, Linear)


def _check_features(argument: str, x: Array, layer: Linear) -> None:
    features = layer.kernel.shape[0]
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(
            f"{argument} must have in_features={features} as the last axis, got shape {x.shape}"
        )
