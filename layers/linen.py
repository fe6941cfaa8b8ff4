"""Flax Linen modules on normfuse's operations: drop-ins for Linen's layers, and fused ones.

The classes keep Linen's names, because Linen names parameters, and seeds them, by class name.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from ..native.implementation import Implementation, choose
from .core.arguments import dimensions_of, floating, unserved_dtype
from .dense.dense import apply as apply_dense
from .dense.epilogue import Activation, finish
from .dense.gated import mlp as gated_mlp
from .dense.norm_dense import apply as apply_norm_dense
from .modules import by_framework, check_eps, check_options
from .rms_norm import rms_norm

_KERNEL = nn.linear.default_kernel_init


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

    implementation: Implementation = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        check_eps("nn.RMSNorm", "epsilon", self.epsilon)
        self.implementation = check_options(self.implementation)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises x over `reduction_axes`; `mask` is Flax's."""
        x = jnp.asarray(x)
        axes = dimensions_of("nn.RMSNorm", x, self.reduction_axes)
        if reason := self._unserved(x, axes, mask):
            call = lambda: super(RMSNorm, self).__call__(x, mask=mask)
            return by_framework("nn.RMSNorm", reason, self.implementation, call)
        scale = None
        if self.use_scale:
            shape = [x.shape[i] for i in axes]
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        return rms_norm(
            x,
            scale,
            eps=self.epsilon,
            axis=axes,
            dtype=dtypes.canonicalize_dtype(x, scale, dtype=self.dtype),
            implementation=self.implementation,
        )

    @nn.nowrap
    def _unserved(self, x, axes, mask) -> str:
        """The option that only Flax serves, or ""."""
        if mask is not None:
            return "a mask"
        if self.axis_name is not None:
            return "an axis_name"
        if self.use_scale and axes != dimensions_of("nn.RMSNorm", x, self.feature_axes):
            return "feature_axes that differ from reduction_axes"
        if not self.force_float32_reductions:
            return "force_float32_reductions=False"
        if isinstance(self.epsilon, jax.Array):
            return "an epsilon that is an array"
        param_dtype = self.param_dtype if self.use_scale else None
        return unserved_dtype(x.dtype, param_dtype, self.dtype)


class Dense(nn.Dense):
    """`flax.linen.Dense` computed by `normfuse.dense`, with an optional activation.

    Takes everything `nn.Dense` does and has the same parameters, initial values and result dtype;
    without an activation the outputs are the same, bit for bit. Gradients of float32 parameters are
    not rounded to `dtype` on their way.

    Flax's own product serves where an option asks for what the operation does not do: `precision`,
    a `dot_general`, `dot_general_cls` or `promote_dtype` of your own, and inputs that are integer
    or complex.

    Attributes:
      activation: as for `normfuse.dense`: None, a name or a pure function; keyword only.
      implementation: as for `normfuse.dense`; keyword only. The rest are `nn.Dense`'s.

    Raises:
      ValueError: for an unknown activation; when initialised, for an input without features.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import Dense
    >>> mlp = Dense(4, activation="gelu")
    >>> mlp.apply(mlp.init(jax.random.key(0), jnp.ones((2, 3))), jnp.ones((2, 3))).shape
    (2, 4)
    """

    activation: Activation = dataclasses.field(default=None, kw_only=True)
    implementation: Implementation = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        self.implementation = check_options(self.implementation, self.activation)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Multiplies the last axis of `inputs` by the kernel."""
        inputs = jnp.asarray(inputs)
        if reason := self._unserved(inputs):
            call = lambda: super(Dense, self).__call__(inputs)
            y = choose(f"nn.Dense with {reason}", self.implementation, {"xla": lambda _: call()})
            return y if self.activation is None else finish(y, None, self.activation, y.dtype)
        kernel = self._kernel(inputs)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return apply_dense(
            inputs,
            kernel,
            bias,
            activation=self.activation,
            dtype=dtypes.canonicalize_dtype(inputs, kernel, bias, dtype=self.dtype),
            implementation=self.implementation,
        )

    @nn.nowrap
    def _kernel(self, inputs) -> Any:
        if inputs.ndim == 0:
            raise ValueError("nn.Dense: inputs must be (*rows, features), got a scalar")
        shape = (inputs.shape[-1], self.features)
        try:
            return self.param("kernel", self.kernel_init, shape, self.param_dtype)
        except ZeroDivisionError:
            raise ValueError(
                "nn.Dense: the kernel must have at least one element for this kernel_init, got "
                f"shape {shape} for inputs of shape {inputs.shape}"
            ) from None

    @nn.nowrap
    def _unserved(self, inputs) -> str:
        """The option that only Flax serves, or ""."""
        if self.precision is not None:
            return "a precision"
        if self.dot_general is not None or self.dot_general_cls is not None:
            return "a dot_general of its own"
        if self.promote_dtype is not dtypes.promote_dtype:
            return "a promote_dtype of its own"
        return unserved_dtype(inputs.dtype, self.param_dtype, self.dtype)


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
        return apply_norm_dense(
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
        return gated_mlp(
            x,
            kernels,
            biases,
            activation=self.activation,
            dtype=dtype,
            implementation=self.implementation,
        )
