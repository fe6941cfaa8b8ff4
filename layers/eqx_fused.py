"""Equinox modules of more than one operation; import them from `normfuse.layers.eqx`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from . import gated, norm_dense
from .activations import Activation, finish
from .dropin import another, by_framework, check_options, in_a_row
from .eqx import Linear, RMSNorm
from .implementation import Implementation


class NormDense(eqx.Module):
    """`RMSNorm` into `Linear`, the normalised input computed again in the backward.

    `norm` and `linear` are modules of their own: leaves and initial values are those of the two in
    a row, which serve where either has become something else. For one example, of shape
    `(in_features,)`; batch it with `jax.vmap`.

    Args:
      in_features: the input's length.
      out_features: the output's.
      eps: the norm's.
      use_bias: whether to add a bias after the product.
      dtype: of the parameters.
      key: for the initial values.
      activation: as for `normfuse.dense`: None, a name or a pure function.
      recompute: as for `normfuse.norm_dense`.
      implementation: as for `normfuse.norm_dense`.

    Raises:
      ValueError: for an unknown activation or a bad eps; when called, for an x not of shape
        `(in_features,)`.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.eqx import NormDense
    >>> jax.vmap(NormDense(3, 4, key=jax.random.key(0)))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    norm: RMSNorm
    linear: Linear
    activation: Activation = eqx.field(static=True)
    recompute: bool = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: jax.Array,
        activation: Activation = None,
        recompute: bool = True,
        implementation: Implementation = None,
    ):
        self.implementation = check_options(implementation, activation)
        self.norm = RMSNorm(in_features, eps, use_bias=False, dtype=dtype)
        self.linear = Linear(in_features, out_features, use_bias, dtype, key=key)
        self.activation, self.recompute = activation, recompute

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """Normalises x and multiplies it by the weight; `key` is ignored."""
        x = jnp.asarray(x)
        if reason := another(self.norm, RMSNorm) or another(self.linear, Linear):
            return in_a_row(self, x, reason)
        weight = self.linear.weight
        if x.shape != weight.shape[1:]:
            raise ValueError(
                f"NormDense: x must have shape {weight.shape[1:]}, got {x.shape}; for a batch call "
                "jax.vmap(layer)(x)"
            )
        if self.norm.use_bias and self.norm.bias is not None:
            return in_a_row(self, x, "a norm with a bias")
        if reason := self.norm._unserved(x) or self.linear._unserved(x):
            return in_a_row(self, x, reason)
        return norm_dense.apply(
            x,
            self.norm.weight if self.norm.use_weight else None,
            weight,
            self.linear.bias,
            self.activation,
            jnp.result_type(weight, x).name,
            eps=self.norm.eps,
            contract=1,
            recompute=self.recompute,
            implementation=self.implementation,
        )


class GatedMLP(eqx.Module):
    """A gated MLP, SwiGLU by default: `down(activation(gate(x)) · up(x))`.

    The gated activation is computed again in the backward by the pass that computes its gradients.
    What has taken the place of one of its three layers is called as it is. For one example, of
    shape `(in_features,)`; batch it with `jax.vmap`.

    Args:
      in_features: the input's length, and the output's.
      hidden_features: the length of what is between.
      use_bias: whether the three layers have biases.
      dtype: of the parameters.
      key: for the initial values.
      activation: of the gate: a name or a pure function.
      implementation: as for `normfuse.gated_product`.

    Raises:
      ValueError: for an unknown activation; when called, for an x not of shape `(in_features,)`.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.eqx import GatedMLP
    >>> jax.vmap(GatedMLP(4, 8, key=jax.random.key(0)))(jnp.ones((2, 4))).shape
    (2, 4)
    """

    gate: Linear
    up: Linear
    down: Linear
    activation: Activation = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        use_bias: bool = False,
        dtype: Any = None,
        *,
        key: jax.Array,
        activation: Activation = "silu",
        implementation: Implementation = None,
    ):
        self.implementation = check_options(implementation, activation)
        self.activation = activation
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear(in_features, hidden_features, use_bias, dtype, key=gate)
        self.up = Linear(in_features, hidden_features, use_bias, dtype, key=up)
        self.down = Linear(hidden_features, in_features, use_bias, dtype, key=down)

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """Applies the MLP to x; `key` is ignored."""
        gate, up = self.gate(x), self.up(x)
        if reason := another(self.down, Linear) or self.down._unserved(gate):
            call = lambda: self.down(finish(gate, None, self.activation, gate.dtype, up))
            return by_framework("GatedMLP", reason, self.implementation, call)
        return gated.apply_product(
            gate,
            up,
            self.down.weight,
            self.down.bias,
            self.activation,
            dtype=jnp.result_type(self.down.weight, gate),
            implementation=self.implementation,
            contract=1,
        )
