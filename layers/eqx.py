"""Equinox modules on normfuse's operations: drop-in layers, fused ones, and `swap`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    error.add_note("pip install 'normfuse[equinox]'")
    raise

from ..native.implementation import Implementation
from . import modules
from .core.activations import Activation
from .core.arguments import Quantization, options_of, unserved
from .dense.dense import apply as apply_dense
from .norm import layer_norm, rms_norm
from .swap import swap as swap

_NOT_GIVEN: Any = object()


class _Norm(eqx.Module):
    """A norm of Equinox's, computed by ours where that has its options."""

    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self: Any,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        implementation: Implementation = None,
        **kwargs: Any,
    ):
        modules.check_eps(f"eqx.nn.{self._kind}", "eps", eps)
        equinox: Any = super()
        equinox.__init__(shape, eps, use_weight, use_bias, dtype, **kwargs)
        self.implementation = modules.check_options(implementation)

    def __call__(self: Any, x: Array, state: Any = _NOT_GIVEN, *, key: Any = None) -> Any:
        """Normalises all of x; `state` is passed through, `key` is ignored."""
        name = f"eqx.nn.{self._kind}"
        x = _checked(name, "norm", x, self.shape)
        if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool:
            raise TypeError(
                f"{name}: x must be floating, got {x.dtype}; cast it first, for example "
                "x.astype(jnp.float32)"
            )
        reasons = {"shape=()": x.ndim == 0, "an eps that is an array": isinstance(self.eps, Array)}
        weight = self.weight if self.use_weight else None
        bias = self.bias if self.use_bias else None
        own = [a.dtype for a in (weight, bias) if a is not None]
        if reason := unserved(reasons, x.dtype, *own):
            equinox: Any = super()
            y = modules.by_framework(name, reason, self, lambda: equinox.__call__(x, key=key))
        else:
            options = {"axis": tuple(range(x.ndim)), "implementation": self.implementation}
            y = self._norm(x, weight, bias, eps=self.eps, **options)
        return y if state is _NOT_GIVEN else (y, state)


class RMSNorm(_Norm, eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm` computed by `normfuse.rms_norm`.

    Takes what `eqx.nn.RMSNorm` does and has the same leaves, initial values and result: always x's
    dtype, computed in float32 (float64). For one example, of exactly `shape`; batch it with
    `jax.vmap`, any number of times, and the kernel sees one batch.

    Equinox's own code serves for complex x, an `eps` that is an array, and `shape=()`. Integer x,
    which Equinox turns into zeros, is refused.

    Args:
      shape: the input's.
      eps: added to the mean square.
      use_weight, use_bias: whether to multiply by a weight, and to add a bias.
      dtype: the weight's and the bias's.
      implementation: as for `normfuse.rms_norm`.

    Raises:
      ValueError: for an eps that is negative or not finite; when called, for an x not of `shape`.
      TypeError: for an eps that is not a number; when called, for integer x.
      NotImplementedError: when called, if the `implementation` asked for cannot serve.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.eqx import RMSNorm
    >>> jax.vmap(RMSNorm(4))(jnp.full((2, 4), 3.0)).shape
    (2, 4)
    """

    _kind, _norm = "RMSNorm", staticmethod(rms_norm)


class LayerNorm(_Norm, eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm` computed by `normfuse.layer_norm`.

    Takes what `eqx.nn.LayerNorm` does and has the same leaves, initial values and result: always
    x's dtype, computed in float32 (float64), weight and bias in the same pass. For one example, of
    exactly `shape`; batch it with `jax.vmap`, any number of times, and the kernel sees one batch.
    Equinox's own code serves what `RMSNorm` leaves to it; `implementation` and errors are as there,
    and `elementwise_affine` is Equinox's deprecated way to set both `use_weight` and `use_bias`.
    """

    _kind, _norm = "LayerNorm", staticmethod(layer_norm)


class _Options(eqx.Module):
    activation: Activation = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True)
    quantization: Quantization = eqx.field(static=True)


class Linear(eqx.nn.Linear, _Options):
    """`equinox.nn.Linear` computed by `normfuse.dense`, with an optional activation.

    Takes what `eqx.nn.Linear` does and has the same leaves, initial values and result dtype (what x
    and the weight promote to). For one example, of shape `(in_features,)`; batch it with
    `jax.vmap`, any number of times. The gradient of a float32 weight is never rounded.

    Equinox's own code serves for `"scalar"` features, a bias wider than x and weight, integer and
    complex x and, without a bias, for a matrix x, whose columns it multiplies.

    Args:
      in_features, out_features: the lengths of the input and of the output, or "scalar".
      use_bias: whether to add a bias.
      dtype: the weight's and the bias's.
      key: for the initial values.
      activation, implementation, quantization: as for `normfuse.dense`.

    Raises:
      ValueError: for an unknown activation or quantization; when called, for an x not of shape
        `(in_features,)`, or a quantization where only Equinox serves.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.eqx import Linear
    >>> linear = Linear(3, 4, activation="silu", key=jax.random.key(0))
    >>> jax.vmap(linear)(jnp.ones((2, 3))).shape
    (2, 4)
    """

    _name, contract = "eqx.nn.Linear", 1

    def __init__(
        self,
        in_features: int | Literal["scalar"],
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: Array,
        activation: Activation = None,
        implementation: Implementation = None,
        quantization: Quantization = None,
    ):
        super().__init__(in_features, out_features, use_bias, dtype, key=key)
        modules.set_options(self, "eqx.nn.Linear", activation, implementation, quantization)

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """Multiplies x by the weight; `key` is ignored."""
        x = jnp.asarray(x)
        if not self.unserved(x):
            x = _checked(self._name, "linear", x, self.weight.shape[1:])
        return self.multiply(x, lambda: super(Linear, self).__call__(x, key=key))

    def multiply(self, x: Array, call: Callable[[], Array]) -> Array:
        """Returns the layer of x; `call` is Equinox's own product."""
        if reason := self.unserved(x):
            return modules.linear_by_framework(self._name, reason, self, call)
        options = options_of(self._name, self, self.compute_dtype(x, self.weight))
        return apply_dense(x, self.weight, self.bias, contract=1, **options)

    def operands(self) -> tuple[Array, Array | None]:
        """Returns the weight and the bias."""
        return self.weight, self.bias

    def unserved(self, x: Array) -> str:
        """Returns the part of the layer and its input that only Equinox serves, or ""."""
        if "scalar" in (self.in_features, self.out_features):
            return '"scalar" features'
        if self.bias is None and x.ndim > 1 and x.shape[-2] == self.weight.shape[1]:
            return "a matrix"
        if reason := unserved({}, x.dtype, self.weight.dtype):
            return reason
        dtype = self.compute_dtype(x, self.weight)
        if self.bias is not None and jnp.result_type(dtype, self.bias) != dtype:
            return f"a bias in {self.bias.dtype}, wider than {dtype}"
        return ""

    def compute_dtype(self, *arrays: Array | None) -> Any:
        """Returns the dtype that the arrays promote to."""
        return jnp.result_type(*(a for a in arrays if a is not None))


def _checked(layer: str, name: str, x: Any, shape: tuple[int, ...]) -> Array:
    """Returns x as an array of `shape`; ValueError otherwise."""
    x = jnp.asarray(x)
    if x.shape != shape:
        raise ValueError(
            f"{layer}: x must have shape {shape}, got {x.shape}; for a batch call "
            f"jax.vmap({name})(x)"
        )
    return x


# ---------------------------------------------------------------- layers of several operations


class GatedMLP(_Options):
    """A gated MLP, SwiGLU by default: `down(activation(gate(x)) · up(x))`.

    The gated activation is computed again in the backward by the pass that computes its gradients.
    A module in the place of one of its three layers is called as it is. For one example, of
    shape `(in_features,)`; batch it with `jax.vmap`.

    Args:
      in_features: the input's length, and the output's.
      hidden_features: the length of the hidden axis.
      use_bias: whether the three layers have biases.
      dtype: the parameters'.
      key: for the initial values.
      activation, implementation: as for `normfuse.gated_product`.
      quantization: for all three products, as for `normfuse.dense`.

    Raises:
      ValueError: for an unknown activation or quantization; when called, for an x not of shape
        `(in_features,)`.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.eqx import GatedMLP
    >>> jax.vmap(GatedMLP(4, 8, key=jax.random.key(0)))(jnp.ones((2, 4))).shape
    (2, 4)
    """

    gate: Linear
    up: Linear
    down: Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        use_bias: bool = False,
        dtype: Any = None,
        *,
        key: Array,
        activation: Activation = "silu",
        implementation: Implementation = None,
        quantization: Quantization = None,
    ):
        options = activation, implementation, quantization
        modules.set_options(self, "GatedMLP", *options)
        gate, up, down = jax.random.split(key, 3)
        make = lambda n, m, key: Linear(n, m, use_bias, dtype, key=key, quantization=quantization)
        self.gate = make(in_features, hidden_features, gate)
        self.up = make(in_features, hidden_features, up)
        self.down = make(hidden_features, in_features, down)

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """Applies the MLP to x; `key` is ignored."""
        x = jnp.asarray(x)
        if type(self.gate) is Linear and isinstance(self.gate.in_features, int):
            x = _checked("GatedMLP", "mlp", x, self.gate.weight.shape[1:])
        return modules.gated_mlp(self, x, Linear)
