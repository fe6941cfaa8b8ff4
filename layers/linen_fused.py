"""Flax Linen modules of more than one operation; import them from `normfuse.layers.linen`."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from . import gated, norm_dense
from .activations import Activation
from .arguments import floating
from .dropin import check_eps, check_options
from .implementation import Implementation

_KERNEL = nn.linear.default_kernel_init


class NormDense(nn.Module):
    """RMSNorm into a dense layer, the normalised input computed again in the backward.

    Its parameters are its own, `scale`, `kernel` and `bias`: made by the initialisers of
    `nn.RMSNorm` and `nn.Dense`, not with their keys, and not named as in the two in a row.

    Attributes:
      features: the length of the output's last axis.
      use_bias, dtype, param_dtype, kernel_init, bias_init: `nn.Dense`'s.
      epsilon: the norm's.
      activation: as for `normfuse.dense`: None, a name or a pure function; keyword only.
      recompute, implementation: as for `normfuse.norm_dense`; keyword only.

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
    activation: Activation = dataclasses.field(default=None, kw_only=True)
    recompute: bool = dataclasses.field(default=True, kw_only=True)
    implementation: Implementation = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        check_eps("NormDense", "epsilon", self.epsilon)
        self.implementation = check_options(self.implementation, self.activation)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Normalises the last axis of `inputs` and multiplies it by the kernel."""
        x = jnp.asarray(inputs)
        if x.ndim == 0:
            raise ValueError("NormDense: inputs must be (*rows, features), got a scalar")
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
        return norm_dense.apply(
            floating("NormDense", "inputs", x),
            scale,
            kernel,
            bias,
            self.activation,
            jnp.dtype(compute).name,
            eps=self.epsilon,
            recompute=self.recompute,
            implementation=self.implementation,
        )


class GatedMLP(nn.Module):
    """A gated MLP, SwiGLU by default: `down(activation(gate(x)) · up(x))`.

    The gated activation is computed again in the backward by the pass that computes its gradients.
    Its parameters are its own: the kernels `gate`, `up` and `down`, made by the initialiser of
    `nn.Dense`, and with `use_bias` `gate_bias`, `up_bias` and `down_bias`.

    Attributes:
      hidden_features: the length of what is between; the output is as long as the input.
      use_bias: whether the three products have biases.
      dtype, param_dtype, kernel_init, bias_init: `nn.Dense`'s.
      activation: of the gate: a name or a pure function; keyword only.
      implementation: as for `normfuse.gated_product`; keyword only.

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
    activation: Activation = dataclasses.field(default="silu", kw_only=True)
    implementation: Implementation = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        self.implementation = check_options(self.implementation, self.activation)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the MLP to the last axis of `inputs`."""
        x = jnp.asarray(inputs)
        if x.ndim == 0:
            raise ValueError("GatedMLP: inputs must be (*rows, features), got a scalar")
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
        return gated.mlp(
            x,
            kernels,
            biases,
            activation=self.activation,
            dtype=dtype,
            implementation=self.implementation,
        )
