"""Flax Linen modules on normfuse's operations: drop-ins for Linen's layers, and fused ones.

The classes keep Linen's names, because Linen names parameters, and seeds them, by class name.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.linen import dtypes
from jax import Array

from ..native.implementation import Implementation
from . import modules
from .core.arguments import (
    Quantization,
    check_quantization,
    dimensions_of,
    floating,
    unserved,
)
from .dense.dense import apply as apply_dense
from .dense.epilogue import Activation
from .dense.gated import mlp as gated_mlp
from .rms_norm import rms_norm

_KERNEL = nn.linear.default_kernel_init
_option: Any = functools.partial(dataclasses.field, kw_only=True)


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm` computed by `normfuse.rms_norm`.

    Takes everything `nn.RMSNorm` does and has the same parameters, initial values and result dtype.
    As there, x and scale are used as they are and only the result is rounded to `dtype` (None: what
    they promote to); nothing is widened in memory.

    Flax's own code serves where an option asks for what the operation does not do: `mask`,
    `axis_name`, `feature_axes` that differ from `reduction_axes`, `force_float32_reductions=False`,
    an `epsilon` that is an array, and inputs that are integer or complex. (`use_fast_variance` has
    no effect on an RMSNorm.)

    Attributes:
      implementation: as for `normfuse.rms_norm`; keyword only. The rest are `nn.RMSNorm`'s.

    Raises:
      ValueError: for an epsilon that is negative or not finite.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import RMSNorm
    >>> norm = RMSNorm()
    >>> params = norm.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> norm.apply(params, jnp.full((2, 4), 3.0)).round(5)[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """

    implementation: Implementation = _option(default=None)

    def __post_init__(self):
        modules.check_eps("nn.RMSNorm", "epsilon", self.epsilon)
        self.implementation = modules.check_options(self.implementation)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalises x over `reduction_axes`; `mask` is Flax's."""
        x = jnp.asarray(x)
        axes = dimensions_of("nn.RMSNorm", x, self.reduction_axes)
        if reason := self._unserved(x, axes, mask):
            call = lambda: super(RMSNorm, self).__call__(x, mask=mask)
            return modules.by_framework("nn.RMSNorm", reason, self, call)
        scale = None
        if self.use_scale:
            shape = [x.shape[i] for i in axes]
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
        options = {"eps": self.epsilon, "axis": axes, "implementation": self.implementation}
        return rms_norm(x, scale, dtype=dtype, **options)

    @nn.nowrap
    def _unserved(self, x: Array, axes: tuple[int, ...], mask: Array | None) -> str:
        """Returns the option that only Flax serves, or ""."""
        features = axes if not self.use_scale else dimensions_of("nn.RMSNorm", x, self.feature_axes)
        reasons = {
            "a mask": mask is not None,
            "an axis_name": self.axis_name is not None,
            "feature_axes that differ from reduction_axes": features != axes,
            "force_float32_reductions=False": not self.force_float32_reductions,
            "an epsilon that is an array": isinstance(self.epsilon, Array),
        }
        return unserved(reasons, x.dtype, self.param_dtype if self.use_scale else None, self.dtype)


class Dense(nn.Dense):
    """`flax.linen.Dense` computed by `normfuse.dense`, with an optional activation.

    Takes everything `nn.Dense` does and has the same parameters, initial values and result dtype;
    without an activation the outputs are the same, bit for bit. Gradients of float32 parameters are
    not rounded to `dtype` on their way.

    Flax's own product serves where an option asks for what the operation does not do: `precision`,
    a `dot_general`, `dot_general_cls` or `promote_dtype` of your own, and inputs that are integer
    or complex.

    Attributes:
      activation, implementation, quantization: as for `normfuse.dense`; keyword only. The rest are
        `nn.Dense`'s.

    Raises:
      ValueError: for an unknown activation; when initialised, for an input without features.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import Dense
    >>> mlp = Dense(4, activation="gelu")
    >>> mlp.apply(mlp.init(jax.random.key(0), jnp.ones((2, 3))), jnp.ones((2, 3))).shape
    (2, 4)
    """

    activation: Activation = _option(default=None)
    implementation: Implementation = _option(default=None)
    quantization: Quantization = _option(default=None)

    def __post_init__(self):
        self.implementation = modules.check_options(
            self.implementation, self.activation, self.quantization, "nn.Dense"
        )
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Multiplies the last axis of `inputs` by the kernel."""
        inputs = jnp.asarray(inputs)
        if reason := self._unserved(inputs):
            call = lambda: super(Dense, self).__call__(inputs)
            return modules.dense_by_framework("nn.Dense", reason, self, call)
        inputs = _rows("nn.Dense", inputs)
        shape = (inputs.shape[-1], self.features)
        try:
            kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        except ZeroDivisionError:
            raise ValueError(
                "nn.Dense: the kernel must have at least one element for this kernel_init, got "
                f"shape {shape} for inputs of shape {inputs.shape}"
            ) from None
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        dtype = dtypes.canonicalize_dtype(inputs, kernel, bias, dtype=self.dtype)
        check_quantization("nn.Dense", self.quantization, dtype)
        options = {"activation": self.activation, "implementation": self.implementation}
        options["quantization"] = self.quantization
        return apply_dense(inputs, kernel, bias, dtype=dtype, **options)

    @nn.nowrap
    def _unserved(self, inputs: Array) -> str:
        """Returns the option that only Flax serves, or ""."""
        reasons = {
            "a precision": self.precision is not None,
            "a dot_general of its own": {self.dot_general, self.dot_general_cls} != {None},
            "a promote_dtype of its own": self.promote_dtype is not dtypes.promote_dtype,
        }
        return unserved(reasons, inputs.dtype, self.param_dtype, self.dtype)


def _rows(layer: str, inputs: Any) -> Array:
    """Returns the inputs as an array with features; ValueError otherwise."""
    x = jnp.asarray(inputs)
    if x.ndim == 0:
        raise ValueError(f"{layer}: inputs must be (*rows, features), got a scalar")
    return x


class NormDense(nn.Module):
    """RMSNorm into a dense layer, the normalised input computed again in the backward.

    Its parameters are its own, `scale`, `kernel` and `bias`: made by the initialisers of
    `nn.RMSNorm` and `nn.Dense`, not with their keys, and not named as in the two in a row.

    Attributes:
      features: the length of the output's last axis.
      use_bias, dtype, param_dtype, kernel_init, bias_init: `nn.Dense`'s.
      epsilon: the norm's.
      activation, recompute, implementation, quantization: as for `normfuse.norm_dense`; keyword
        only.

    Raises:
      ValueError: for an unknown activation, a bad epsilon, or an input without features.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import NormDense
    >>> layer = NormDense(4, activation="gelu")
    >>> layer.apply(layer.init(jax.random.key(0), jnp.ones((2, 3))), jnp.ones((2, 3))).shape
    (2, 4)
    """

    features: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = _KERNEL
    bias_init: Any = nn.initializers.zeros_init()
    epsilon: float = 1e-6
    activation: Activation = _option(default=None)
    recompute: bool = _option(default=True)
    implementation: Implementation = _option(default=None)
    quantization: Quantization = _option(default=None)

    def __post_init__(self):
        modules.check_eps("NormDense", "epsilon", self.epsilon)
        self.implementation = modules.check_options(
            self.implementation, self.activation, self.quantization, "NormDense"
        )
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Normalises the last axis of `inputs` and multiplies it by the kernel."""
        x = _rows("NormDense", inputs)
        width, dtype = x.shape[-1], self.param_dtype
        scale = self.param("scale", nn.initializers.ones_init(), (width,), dtype)
        kernel = self.param("kernel", self.kernel_init, (width, self.features), dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), dtype)
        compute = dtypes.canonicalize_dtype(x, scale, kernel, bias, dtype=self.dtype)
        if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool:  # as Flax's layers take them
            x = x.astype(compute)
        floating("NormDense", "kernel", kernel)
        x = floating("NormDense", "inputs", x)
        return modules.norm_dense(self, x, scale, kernel, bias, compute, eps=self.epsilon)


class GatedMLP(nn.Module):
    """A gated MLP, SwiGLU by default: `down(activation(gate(x)) · up(x))`.

    The gated activation is computed again in the backward by the pass that computes its gradients.
    Its parameters are its own: the kernels `gate`, `up` and `down`, made by the initialiser of
    `nn.Dense`, and with `use_bias` `gate_bias`, `up_bias` and `down_bias`.

    Attributes:
      hidden_features: the length of what is between; the output is as long as the input.
      use_bias: whether the three products have biases.
      dtype, param_dtype, kernel_init, bias_init: `nn.Dense`'s.
      activation, implementation: as for `normfuse.gated_product`; keyword only.
      quantization: of all three products, as for `normfuse.dense`; keyword only.

    Raises:
      ValueError: for an unknown activation, or an input without features.

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
    implementation: Implementation = _option(default=None)
    quantization: Quantization = _option(default=None)

    def __post_init__(self):
        self.implementation = modules.check_options(
            self.implementation, self.activation, self.quantization, "GatedMLP"
        )
        super().__post_init__()

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
        check_quantization("GatedMLP", self.quantization, dtype)
        options = {"activation": self.activation, "implementation": self.implementation}
        options["quantization"] = self.quantization
        return gated_mlp(x, kernels, biases, dtype=dtype, **options)
