"""Flax Linen modules: `nn.RMSNorm` and `nn.Dense` on normfuse's operations.

The classes keep Linen's names, because Linen names parameters, and seeds them, by class name.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from . import dense as dense_op
from .activations import Activation, finish
from .dropin import (
    by_framework,
    check_eps,
    check_options,
    dimensions_of,
    unserved_dtype,
)
from .implementation import Implementation, choose
from .rms_norm import rms_norm

if TYPE_CHECKING:
    from .linen_fused import GatedMLP as GatedMLP
    from .linen_fused import NormDense as NormDense


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
        return dense_op.apply(
            inputs,
            kernel,
            bias,
            activation=self.activation,
            dtype=dtypes.canonicalize_dtype(inputs, kernel, bias, dtype=self.dtype),
            implementation=self.implementation,
        )

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

    def _unserved(self, inputs) -> str:
        """The option that only Flax serves, or ""."""
        if self.precision is not None:
            return "a precision"
        if self.dot_general is not None or self.dot_general_cls is not None:
            return "a dot_general of its own"
        if self.promote_dtype is not dtypes.promote_dtype:
            return "a promote_dtype of its own"
        return unserved_dtype(inputs.dtype, self.param_dtype, self.dtype)


def __getattr__(name: str) -> Any:
    if name in ("GatedMLP", "NormDense"):  # which import this module
        from . import linen_fused

        return getattr(linen_fused, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
