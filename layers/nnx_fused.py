"""Flax NNX modules of more than one operation; import them from `normfuse.layers.nnx`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from . import gated, norm_dense
from .activations import Activation, finish
from .dropin import (
    another,
    by_framework,
    check_eps,
    check_options,
    dimensions_of,
    in_a_row,
)
from .implementation import Implementation
from .nnx import Linear, RMSNorm
from .producers import placed
from .rounding import narrowed, rounded


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
        if reason := another(self.norm, RMSNorm) or another(self.linear, Linear):
            return in_a_row(self, x, reason)
        scale = None if self.norm.scale is None else self.norm.scale[...]
        kernel, bias = _parameters(self.linear)
        if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
            raise ValueError(
                f"NormDense: x must have in_features={kernel.shape[0]} as the last axis, got shape "
                f"{x.shape}"
            )
        last = (x.ndim - 1,)
        if dimensions_of("NormDense", x, self.norm.reduction_axes) != last:
            return in_a_row(self, x, "other axes that are normalised")
        unserved = self.norm._unserved(x, scale, last, None)
        if reason := unserved or self.linear._unserved(x, kernel, bias):
            return in_a_row(self, x, reason)
        dtype = dtypes.canonicalize_dtype(x, scale, kernel, bias, dtype=self.dtype)
        return norm_dense.apply(
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

        if reason := another(self.down, Linear):
            return by_framework("GatedMLP", reason, self.implementation, call)
        kernel, bias = _parameters(self.down)
        if reason := self.down._unserved(gate, kernel, bias):
            return by_framework("GatedMLP", reason, self.implementation, call)
        return gated.apply_product(
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
