"""Flax NNX modules on normfuse's operations: drop-in layers, fused ones, and `swap`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Required, TypedDict, TypeVar, Unpack

import jax
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
from .accumulate_nnx import accumulate_gradients as accumulate_gradients
from .core.activations import Activation
from .core.arguments import Quantization, dimensions_of, options_of, unserved
from .core.op import placed
from .dense.dense import apply as apply_dense
from .dense.epilogue import finish
from .dense.gated import apply_product as apply_gated_product
from .dense.gated import mlp as gated_mlp
from .fuse.model import call_of, missing, swapped
from .fuse_nnx import compare as compare
from .fuse_nnx import fuse as fuse
from .norm import layer_norm, rms_norm

M = TypeVar("M")


# The arguments of Flax's constructors, which editors cannot see through `**kwargs: Any`.
class _Layer(TypedDict, total=False):
    dtype: Any
    param_dtype: Any
    promote_dtype: Any
    rngs: Required[nnx.Rngs]


class _RMSNorm(_Layer, total=False):
    epsilon: float
    use_scale: bool
    scale_init: Any
    reduction_axes: int | Sequence[int]
    feature_axes: int | Sequence[int]
    axis_name: str | None
    axis_index_groups: Any
    use_fast_variance: bool
    scale_metadata: Mapping[str, Any]


class _LayerNorm(_RMSNorm, total=False):
    use_bias: bool
    bias_init: Any
    bias_metadata: Mapping[str, Any]


class _Product(_Layer, total=False):
    precision: Any
    kernel_init: Any
    bias_init: Any
    preferred_element_type: Any
    kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]


class _Linear(_Product, total=False):
    use_bias: bool
    dot_general: Any


class _Norm:
    """A norm of Flax's, computed by ours where that has its options."""

    __slots__ = ()  # `swap` sets the class of Flax's layers
    implementation: Implementation
    _name: str
    _norm: Callable[..., Array]

    def __call__(self: Any, x: Array, mask: Array | None = None) -> Array:
        """Normalises x over `reduction_axes`; `mask` is Flax's."""
        x, name = jnp.asarray(x), self._name
        axes = dimensions_of(name, x, self.reduction_axes)
        parameters = {"scale": self.scale, "bias": getattr(self, "bias", None)}
        given = {key: p[...] for key, p in parameters.items() if p is not None}
        features = dimensions_of(name, x, self.feature_axes) if given else axes
        reasons = {
            "a mask": mask is not None,
            "an axis_name": self.axis_name is not None,
            "a promote_dtype of its own": self.promote_dtype is not dtypes.promote_dtype,
            "feature_axes that differ from reduction_axes": features != axes,
            "an epsilon that is an array": isinstance(self.epsilon, Array),
        }
        own = [p.dtype for p in given.values()]
        if reason := unserved(reasons, x.dtype, *own, self.dtype):
            flax: Any = super()
            return modules.by_framework(name, reason, self, lambda: flax.__call__(x, mask=mask))
        dtype = dtypes.canonicalize_dtype(x, *given.values(), dtype=self.dtype)
        shape = tuple(x.shape[i] for i in axes)
        for parameter in given.values():
            if parameter.size != math.prod(shape):
                raise ValueError(
                    f"{name}: x must have num_features={parameter.size} features on axis "
                    f"{self.feature_axes}, got shape {x.shape}"
                )
        given = {key: rounded(p.reshape(shape), dtype) for key, p in given.items()}
        options = {"eps": self.epsilon, "axis": axes, "implementation": self.implementation}
        return self._norm(narrowed(x, dtype), **given, dtype=dtype, **options)


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

    def __init__(
        self,
        num_features: int,
        *,
        implementation: Implementation = None,
        **kwargs: Unpack[_RMSNorm],
    ):
        modules.check_eps("nnx.RMSNorm", "epsilon", kwargs.get("epsilon", 1e-6))
        super().__init__(num_features, **kwargs)
        self.implementation = modules.check_options(implementation)


class LayerNorm(_Norm, nnx.LayerNorm):
    """`flax.nnx.LayerNorm` computed by `normfuse.layer_norm`.

    Takes everything `nnx.LayerNorm` does and has the same parameters, initial values, state and
    result dtype. As there, x, scale and bias are rounded to `dtype` (None: their promoted dtype)
    before the statistics, which are in float32; unlike there, nothing is widened in memory and the
    gradients of float32 parameters are not rounded. The variance is always that of
    `use_fast_variance=False`: the mean of squared differences to the mean, whatever the option
    says. Flax's default, a difference of two means, loses its digits where the mean is large.

    Flax's own code serves what `RMSNorm` leaves to it; `implementation` and errors are as there.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import LayerNorm
    >>> norm = LayerNorm(2, rngs=nnx.Rngs(0))
    >>> norm(jnp.array([[3.0, 5.0]])).round(5)[0]
    Array([-1.,  1.], dtype=float32)
    """

    _name, _norm = "nnx.LayerNorm", staticmethod(layer_norm)

    def __init__(
        self,
        num_features: int,
        *,
        implementation: Implementation = None,
        **kwargs: Unpack[_LayerNorm],
    ):
        modules.check_eps("nnx.LayerNorm", "epsilon", kwargs.get("epsilon", 1e-6))
        super().__init__(num_features, **kwargs)
        self.implementation = modules.check_options(implementation)


class _Options:
    __slots__ = ()
    activation: Activation
    implementation: Implementation
    quantization: Quantization


class Linear(nnx.Linear, _Options):
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
      ValueError: for a size that the initialiser cannot serve, or an unknown activation or
        quantization; when called, for an input without `in_features` features, or a quantization
        with an option that only Flax serves.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import Linear
    >>> Linear(3, 4, activation="silu", rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = None,
        implementation: Implementation = None,
        quantization: Quantization = None,
        **kwargs: Unpack[_Linear],
    ):
        modules.set_options(self, "nnx.Linear", activation, implementation, quantization)
        try:
            super().__init__(in_features, out_features, **kwargs)
        except ZeroDivisionError:
            raise ValueError(
                "nnx.Linear: in_features and out_features must be at least 1 for this kernel_init, "
                f"got {in_features} and {out_features}"
            ) from None

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Multiplies the last axis of `inputs` by the kernel; `out_sharding` is Flax's."""
        inputs = jnp.asarray(inputs)
        kernel, bias = _parameters(self)
        _check_features("nnx.Linear: inputs", inputs, kernel)
        if reason := _unserved(self, inputs):
            call = lambda: super(Linear, self).__call__(inputs, out_sharding=out_sharding)
            return modules.dense_by_framework("nnx.Linear", reason, self, call)
        dtype = dtypes.canonicalize_dtype(inputs, kernel, bias, dtype=self.dtype)
        options = options_of("nnx.Linear", self, dtype)
        return apply_dense(inputs, kernel, bias, out_sharding=out_sharding, **options)


def _unserved(layer: Any, inputs: Array) -> str:
    """Returns the part of a linear layer and its inputs that only Flax serves, or ""."""
    kernel, bias = _parameters(layer)
    own = kernel.dtype, bias if bias is None else bias.dtype, layer.dtype
    products = {getattr(layer, name, None) for name in ("dot_general", "dot_general_cls")}
    reasons = {
        "a precision": layer.precision is not None,
        "a preferred_element_type": layer.preferred_element_type is not None,
        "a dot_general of its own": not products <= {None, jax.lax.dot_general},
        "a promote_dtype of its own": layer.promote_dtype is not dtypes.promote_dtype,
    }
    return unserved(reasons, inputs.dtype, *own)


# ---------------------------------------------------------------- layers of several operations


class GatedMLP(nnx.Module, _Options):
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
        return self.apply(x)

    def apply(self, x: Array, hidden_sharding: jax.P | None = None) -> Array:
        """The MLP with its hidden arrays placed as `normfuse.gated_product` says."""
        linears = modules.layers_of(self)
        if not modules.replaced(self.up, Linear):
            x = jnp.asarray(x)
            _check_features("GatedMLP: x", x, self.up.kernel[...])
        if not self._is_quantized(jnp.asarray(x)):
            gate, *up = (linears[name](x) for name in linears if name != "down")
            return self.combine(gate, up[0] if up else None, hidden_sharding)
        kernels = {name: linear.kernel[...] for name, linear in linears.items()}
        biases = {n: linear.bias[...] for n, linear in linears.items() if linear.bias is not None}
        given = x, *kernels.values(), *biases.values()
        dtype = dtypes.canonicalize_dtype(*given, dtype=self.up.dtype)
        options = options_of("GatedMLP", self, dtype)
        return gated_mlp(x, kernels, biases, hidden_sharding=hidden_sharding, **options)

    def _is_quantized(self, x: Array) -> bool:
        """Returns True if all parts, as they were made, may be computed together in FP8."""
        linears = [*modules.layers_of(self).values()]

        def as_made(linear: Any) -> bool:
            if modules.replaced(linear, Linear) or linear.quantization != self.quantization:
                return False
            return linear.dtype == linears[0].dtype and not _unserved(linear, x)

        return self.quantization is not None and all(map(as_made, linears))

    def combine(self, gate: Array, up: Array | None, hidden_sharding: jax.P | None = None) -> Array:
        """The MLP after its first two products, placed as `normfuse.gated_product` says."""
        down = self.down

        def call():
            hidden = finish(gate, None, self.activation, gate.dtype, up)
            return down(placed(hidden, hidden_sharding))

        if reason := modules.replaced(down, Linear) or _unserved(down, gate):
            return modules.by_framework("GatedMLP", reason, self, call, down)
        kernel, bias = _parameters(down)
        dtype = dtypes.canonicalize_dtype(gate, kernel, bias, dtype=down.dtype)
        options = options_of("GatedMLP", self, dtype)
        given = gate, up, kernel, bias
        return apply_gated_product(*given, hidden_sharding=hidden_sharding, **options)


def _parameters(linear: nnx.Linear) -> tuple[Array, Array | None]:
    return linear.kernel[...], None if linear.bias is None else linear.bias[...]


def _check_features(argument: str, x: Array, kernel: Array) -> None:
    if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"{argument} must have in_features={kernel.shape[0]} as the last axis, got shape "
            f"{x.shape}"
        )


# ---------------------------------------------------------------- other people's models


def swap(
    model: M,
    *,
    quantization: Quantization = None,
    skip: Any = (),
    report: Callable[[Any], Any] | None = None,
) -> M:
    """Returns `model` as a module whose own call `fuse` serves.

    Its class is a subclass of the model's, and it holds the same Variables and parts: parameters,
    paths, tied layers, optimizer state and checkpoints are the model's, and `model` itself stays as
    it was. `swapped(x)` is `fuse(lambda model, x: model(x))(model, x)`; other methods are its own.
    In training fuse the loss instead: `fuse` then finds its softmax too.

    Args:
      model: an `nnx.Module` with a `__call__`.
      quantization, skip, report: as for `normfuse.fuse`; `report` is called whenever a call is
        traced.

    Returns:
      A new module. Equal options make equal classes, so that `nnx.jit` traces once.

    Raises:
      TypeError: for a class, a module of another framework, or one without a `__call__`.
      ValueError: for an unknown quantization.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import swap
    >>> model = nnx.RMSNorm(16, rngs=nnx.Rngs(0))
    >>> swapped = swap(model, report=lambda report: print(report.fused[0].served))
    >>> nnx.jit(swapped)(jnp.ones((2, 16))).shape
    rms_norm
    (2, 16)
    >>> swapped.scale is model.scale
    True
    """
    return swapped(model, "nnx", call_of("nnx", "__call__", fuse, quantization, skip, report))


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
