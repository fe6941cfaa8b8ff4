"""Flax Linen modules on normfuse's operations: drop-ins for Linen's layers, and fused ones.

The classes keep Linen's names, because Linen names parameters, and seeds them, by class name.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

try:
    import flax.linen as nn
    from flax.linen import dtypes
except ModuleNotFoundError as error:
    error.add_note("pip install 'normfuse[flax]'")
    raise

from ..native.implementation import Implementation
from . import modules
from .core.activations import Activation
from .core.arguments import Quantization, dimensions_of, options_of, unserved, unserved_of_flax
from .dense.dense import apply as apply_dense
from .dense.gated import mlp as gated_mlp
from .norm import layer_norm, rms_norm
from .swap import swap as swap

_KERNEL = nn.linear.default_kernel_init
_option: Any = functools.partial(dataclasses.field, kw_only=True)


class _Norm(nn.Module):
    """A norm of Linen's, computed by ours where that has its options."""

    implementation: Implementation = _option(default=None)

    def __post_init__(self: Any):
        modules.check_eps(f"nn.{self._kind}", "epsilon", self.epsilon)
        self.implementation = modules.check_options(self.implementation)
        super().__post_init__()

    @nn.compact
    def __call__(self: Any, x: Array, *, mask: Array | None = None) -> Array:
        """Normalises x over `reduction_axes`; `mask` is Flax's."""
        x, name = jnp.asarray(x), f"nn.{self._kind}"
        axes = dimensions_of(name, x, self.reduction_axes)
        uses = {"scale": self.use_scale, "bias": getattr(self, "use_bias", False)}
        features = dimensions_of(name, x, self.feature_axes) if any(uses.values()) else axes
        reasons = {
            "a mask": mask is not None,
            "an axis_name": self.axis_name is not None,
            "feature_axes that differ from reduction_axes": features != axes,
            "force_float32_reductions=False": not self.force_float32_reductions,
            "an epsilon that is an array": isinstance(self.epsilon, Array),
        }
        own = self.param_dtype if any(uses.values()) else None
        if reason := unserved(reasons, x.dtype, own, self.dtype):
            flax: Any = super()
            return modules.by_framework(name, reason, self, lambda: flax.__call__(x, mask=mask))
        shape = [x.shape[i] for i in axes]
        init = lambda key: (getattr(self, f"{key}_init"), shape, self.param_dtype)
        parameters = {key: self.param(key, *init(key)) for key, used in uses.items() if used}
        dtype = dtypes.canonicalize_dtype(x, *parameters.values(), dtype=self.dtype)
        options = {"eps": self.epsilon, "axis": axes, "implementation": self.implementation}
        return self._norm(x, **parameters, dtype=dtype, **options)


class RMSNorm(_Norm, nn.RMSNorm):
    """`flax.linen.RMSNorm` computed by `normfuse.rms_norm`.

    Takes everything `nn.RMSNorm` does and has the same parameters, initial values and result dtype.
    As there, x and scale are used as they are and only the result is rounded to `dtype` (None: what
    they promote to); nothing is widened in memory.

    Flax's own code serves options that the operation lacks: `mask`,
    `axis_name`, `feature_axes` that differ from `reduction_axes`, `force_float32_reductions=False`,
    an `epsilon` that is an array, and inputs that are integer or complex. (`use_fast_variance` has
    no effect on an RMSNorm.)

    Attributes:
      implementation: as for `normfuse.rms_norm`; keyword only. The rest are `nn.RMSNorm`'s.

    Raises:
      ValueError: for an epsilon that is negative or not finite.
      TypeError: for an epsilon that is not a number.
      NotImplementedError: when called, if the `implementation` asked for cannot serve, such as
        "native" with a mask.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import RMSNorm
    >>> norm = RMSNorm()
    >>> params = norm.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> norm.apply(params, jnp.full((2, 4), 3.0)).round(5)[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """

    _kind, _norm = "RMSNorm", staticmethod(rms_norm)


class LayerNorm(_Norm, nn.LayerNorm):
    """`flax.linen.LayerNorm` computed by `normfuse.layer_norm`.

    Takes everything `nn.LayerNorm` does and has the same parameters, initial values and result
    dtype. As there, x, scale and bias are used as they are and only the result is rounded to
    `dtype` (None: their promoted dtype); nothing is widened in memory. The variance is always that
    of `use_fast_variance=False`: the mean of squared differences to the mean, whatever the option
    says. Flax's default, a difference of two means, loses its digits where the mean is large.

    Flax's own code serves what `RMSNorm` leaves to it; `implementation` and errors are as there.
    """

    _kind, _norm = "LayerNorm", staticmethod(layer_norm)


@dataclasses.dataclass(kw_only=True)
class _Linear:
    """The options of our linear layers, and their check."""

    activation: Activation = None
    implementation: Implementation = None
    quantization: Quantization = None

    def __post_init__(self):
        ours = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__)
        options = self.activation, self.quantization, f"nn.{ours}" if hasattr(nn, ours) else ours
        self.implementation = modules.check_options(self.implementation, *options)
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]


class Dense(_Linear, nn.Dense):
    """`flax.linen.Dense` computed by `normfuse.dense`, with an optional activation.

    Takes everything `nn.Dense` does and has the same parameters, initial values and result dtype;
    without an activation the outputs are the same, bit for bit. Gradients of float32 parameters are
    not rounded to `dtype` on their way.

    Flax's own product serves options that the operation lacks: `precision`,
    a `dot_general`, `dot_general_cls` or `promote_dtype` of your own, and inputs that are integer
    or complex.

    Attributes:
      activation, implementation, quantization: as for `normfuse.dense`; keyword only. The rest are
        `nn.Dense`'s.

    Raises:
      ValueError: for an unknown activation or quantization; when initialised, for an input without
        features.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import Dense
    >>> mlp = Dense(4, activation="gelu")
    >>> mlp.apply(mlp.init(jax.random.key(0), jnp.ones((2, 3))), jnp.ones((2, 3))).shape
    (2, 4)
    """

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Multiplies the last axis of `inputs` by the kernel."""
        inputs = jnp.asarray(inputs)
        own = inputs.dtype, self.param_dtype
        if reason := unserved_of_flax(self, dtypes.promote_dtype, *own):
            call = lambda: super(Dense, self).__call__(inputs)
            return modules.linear_by_framework("nn.Dense", reason, self, call)
        inputs = _rows("nn.Dense", inputs)
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        dtype = dtypes.canonicalize_dtype(inputs, kernel, bias, dtype=self.dtype)
        return apply_dense(inputs, kernel, bias, **options_of("nn.Dense", self, dtype))


def _rows(layer: str, inputs: Any) -> Array:
    """Returns the inputs as an array with features; ValueError otherwise."""
    x = jnp.asarray(inputs)
    if x.ndim == 0:
        raise ValueError(f"{layer}: inputs must be (*rows, features), got a scalar")
    return x


class GatedMLP(_Linear, nn.Module):
    """A gated MLP, SwiGLU by default: `down(activation(gate(x)) · up(x))`.

    The gated activation is computed again in the backward by the pass that computes its gradients.
    Its parameters are its own: the kernels `gate`, `up` and `down`, made by the initialiser of
    `nn.Dense`, and with `use_bias` `gate_bias`, `up_bias` and `down_bias`.

    Attributes:
      hidden_features: the length of the hidden axis; the output is as long as the input.
      use_bias: whether the three products have biases.
      dtype, param_dtype, kernel_init, bias_init: `nn.Dense`'s.
      activation, implementation: as for `normfuse.gated_product`; keyword only.
      quantization: for all three products, as for `normfuse.dense`; keyword only.

    Raises:
      ValueError: for an unknown activation or quantization, or an input without features.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import GatedMLP
    >>> mlp = GatedMLP(8)
    >>> mlp.apply(mlp.init(jax.random.key(0), jnp.ones((2, 4))), jnp.ones((2, 4))).shape
    (2, 4)
    """

    hidden_features: int
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = _KERNEL
    bias_init: Any = nn.initializers.zeros_init()
    activation: Activation = _option(default="silu")

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Applies the MLP to the last axis of `inputs`."""
        x = _rows("GatedMLP", inputs)
        width, hidden = x.shape[-1], self.hidden_features
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        kernels = {
            name: self.param(name, self.kernel_init, shape, self.param_dtype)
            for name, shape in shapes.items()
        }
        biases = {
            name: self.param(f"{name}_bias", self.bias_init, shape[1:], self.param_dtype)
            for name, shape in shapes.items()
            if self.use_bias
        }
        dtype = dtypes.canonicalize_dtype(x, *kernels.values(), *biases.values(), dtype=self.dtype)
        return gated_mlp(x, kernels, biases, **options_of("GatedMLP", self, dtype))
