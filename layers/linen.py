"""Flax Linen modules on normfuse's operations: drop-ins for Linen's layers, and fused ones.

The classes keep Linen's names, because Linen names parameters, and seeds them, by class name.
"""

import contextlib
import contextvars
import dataclasses
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import dtypes
from jax import Array

from ..native.implementation import Implementation
from . import modules
from .core.arguments import Quantization, dimensions_of, floating, options_of, unserved
from .dense.dense import apply as apply_dense
from .dense.epilogue import Activation, finish
from .dense.gated import mlp as gated_mlp
from .layer_norm import layer_norm
from .recognize import Candidate, Different
from .rms_norm import rms_norm
from .swap import (
    Framework,
    Report,
    Row,
    Rules,
    check_model,
    check_rule,
    check_rules,
    codes_of,
    conclude,
    configuration,
    functions_of,
    parameter_of,
    recognised,
    rule_of,
    service_of,
)

M = TypeVar("M", bound=nn.Module)
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
      TypeError: for an epsilon that is not a number.
      NotImplementedError: when called, if `implementation` asks for what cannot serve, such as
        "native" beside a mask.

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
        call = lambda: super(RMSNorm, self).__call__(x, mask=mask)
        options = {"implementation": self.implementation, "make": self.param}
        return _normalised("nn.RMSNorm", rms_norm, self, jnp.asarray(x), mask, call, **options)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` computed by `normfuse.layer_norm`.

    Takes everything `nn.LayerNorm` does and has the same parameters, initial values and result
    dtype. As there, x, scale and bias are used as they are and only the result is rounded to
    `dtype` (None: what they promote to); nothing is widened in memory. The variance is always that
    of `use_fast_variance=False`: the mean of squared differences to the mean, whatever the option
    says. Flax's default, a difference of two means, loses its digits where the mean is large.

    Flax's own code serves what `RMSNorm` leaves to it.

    Attributes:
      implementation: as for `normfuse.layer_norm`; keyword only. The rest are `nn.LayerNorm`'s.

    Raises:
      ValueError: for an epsilon that is negative or not finite.
      TypeError: for an epsilon that is not a number.
      NotImplementedError: when called, if `implementation` asks for what cannot serve, such as
        "native" beside a mask.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import LayerNorm
    >>> norm = LayerNorm()
    >>> params = norm.init(jax.random.key(0), jnp.ones((1, 2)))
    >>> norm.apply(params, jnp.array([[3.0, 5.0]])).round(5)[0]
    Array([-1.,  1.], dtype=float32)
    """

    implementation: Implementation = _option(default=None)

    def __post_init__(self):
        modules.check_eps("nn.LayerNorm", "epsilon", self.epsilon)
        self.implementation = modules.check_options(self.implementation)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalises x over `reduction_axes`; `mask` is Flax's."""
        call = lambda: super(LayerNorm, self).__call__(x, mask=mask)
        options = {"implementation": self.implementation, "make": self.param}
        return _normalised("nn.LayerNorm", layer_norm, self, jnp.asarray(x), mask, call, **options)


def _normalised(
    name: str,
    norm: Callable[..., Array],
    layer: Any,
    x: Array,
    mask: Array | None,
    call: Callable[[], Array],
    *,
    implementation: Implementation,
    make: Callable[..., Array],
) -> Array:
    """Computes a norm by `norm`, or by Flax where an option asks for what it does not do.

    `make` makes a parameter, or finds it, as `Module.param` does.
    """
    axes = dimensions_of(name, x, layer.reduction_axes)
    uses = {"scale": layer.use_scale, "bias": getattr(layer, "use_bias", False)}
    features = dimensions_of(name, x, layer.feature_axes) if any(uses.values()) else axes
    reasons = {
        "a mask": mask is not None,
        "an axis_name": layer.axis_name is not None,
        "feature_axes that differ from reduction_axes": features != axes,
        "force_float32_reductions=False": not layer.force_float32_reductions,
        "an epsilon that is an array": isinstance(layer.epsilon, Array),
    }
    own = layer.param_dtype if any(uses.values()) else None
    if reason := unserved(reasons, x.dtype, own, layer.dtype):
        chosen = types.SimpleNamespace(implementation=implementation)
        return modules.by_framework(name, reason, chosen, call)
    shape = [x.shape[i] for i in axes]
    init = lambda key: (key, getattr(layer, f"{key}_init"), shape, layer.param_dtype)
    given = {key: make(*init(key)) for key, used in uses.items() if used}
    dtype = dtypes.canonicalize_dtype(x, *given.values(), dtype=layer.dtype)
    options = {"eps": layer.epsilon, "axis": axes, "implementation": implementation}
    return norm(x, **given, dtype=dtype, **options)


@dataclasses.dataclass(kw_only=True)
class _Linear:
    """The options of our linear layers, and their check."""

    activation: Activation = None
    implementation: Implementation = None
    quantization: Quantization = None

    def __post_init__(self):
        ours = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__)
        options = self.activation, self.quantization, f"nn.{ours}" if hasattr(nn, ours) else ours
        self.implementation = modules.check_options(
            self.implementation, *options, gated=isinstance(self, GatedMLP)
        )
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]


class Dense(_Linear, nn.Dense):
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
        if reason := _unserved(self, inputs):
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
        return apply_dense(inputs, kernel, bias, **options_of("nn.Dense", self, dtype))


class DenseGeneral(_Linear, nn.DenseGeneral):
    """`flax.linen.DenseGeneral` computed by `normfuse.dense`, with an optional activation.

    Takes everything `nn.DenseGeneral` does and has the same parameters, initial values and result
    dtype. A product over the last axes of the input is one matrix product: axes are merged and
    split, and nothing is moved. Flax's own product serves over other axes, with `batch_dims`, where
    axes to be merged are split on an Explicit mesh, for the options that `Dense` leaves to it, and
    while the parameters are made.

    Attributes:
      activation, implementation, quantization: as for `normfuse.dense`; keyword only. The rest are
        `nn.DenseGeneral`'s.

    Raises:
      ValueError: for an unknown activation or quantization, or a quantization beside what only Flax
        serves.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import DenseGeneral
    >>> layer = DenseGeneral((2, 4), activation="gelu")
    >>> layer.apply(layer.init(jax.random.key(0), jnp.ones((5, 3))), jnp.ones((5, 3))).shape
    (5, 2, 4)
    """

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Multiplies `axis` of the inputs by the kernel."""
        inputs = jnp.asarray(inputs)
        call = lambda: super(DenseGeneral, self).__call__(inputs)
        found = _matrix_product(self, inputs.ndim)
        return _contract("nn.DenseGeneral", self, self, inputs, found, call)


class Einsum(_Linear, nn.Einsum):
    """`flax.linen.Einsum` computed by `normfuse.dense`, with an optional activation.

    Takes everything `nn.Einsum` does and has the same parameters, initial values and result dtype.
    An equation that is one matrix product of the input and the kernel as they are stored
    (`"BTD,DNH->BTNH"`, `"BTNH,NHD->BTD"`, `"...D,VD->...V"`) is computed as one: axes are merged
    and split, and nothing is moved. Flax's own product serves for other equations, where axes to be
    merged are split on an Explicit mesh, for the options that `Dense` leaves to it, and while the
    parameters are made.

    Attributes:
      activation, implementation, quantization: as for `normfuse.dense`; keyword only. The rest are
        `nn.Einsum`'s.

    Raises:
      ValueError: for an unknown activation or quantization, or a quantization beside what only Flax
        serves.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import Einsum
    >>> layer = Einsum((3, 2, 4), "TD,DNH->TNH", use_bias=False)
    >>> layer.apply(layer.init(jax.random.key(0), jnp.ones((5, 3))), jnp.ones((5, 3))).shape
    (5, 2, 4)
    """

    @nn.compact
    def __call__(self, inputs: Array, einsum_str: str | None = None) -> Array:
        """Multiplies the inputs by the kernel; `einsum_str` is Flax's."""
        inputs = jnp.asarray(inputs)
        call = lambda: super(Einsum, self).__call__(inputs, einsum_str)
        found = modules.product_of_einsum(einsum_str or self.einsum_str or "")
        return _contract("nn.Einsum", self, self, inputs, found, call)


def _matrix_product(module: Any, ndim: int) -> modules.MatrixProduct | str:
    """Returns the matrix product that a module is for an x of `ndim` axes, or why none."""
    if isinstance(module, nn.DenseGeneral):
        axes = (module.axis,) if isinstance(module.axis, int) else tuple(module.axis)
        return modules.product_over(axes, ndim, bool(module.batch_dims))
    if isinstance(module, nn.Einsum):
        return modules.product_of_einsum(module.einsum_str or "")
    return modules.MatrixProduct(1)


def _contract(
    name: str,
    module: Any,
    given: Any,
    inputs: Array,
    found: modules.MatrixProduct | str,
    call: Callable[[], Array],
) -> Array:
    """Computes a DenseGeneral or an Einsum by `normfuse.dense`, or by Flax where it must serve.

    `given` has the activation, implementation and quantization.
    """
    if module.is_initializing() or not module.has_variable("params", "kernel"):
        y = call()
        return finish(y, None, given.activation, y.dtype)
    read = lambda parameter: nn.unbox(module.get_variable("params", parameter))
    kernel, bias = read("kernel"), read("bias") if module.use_bias else None
    reason = _unserved(module, inputs)
    if not reason and not isinstance(found, str):
        reason = found.misfit(inputs, kernel)
    if isinstance(found, str) or reason:
        return modules.dense_by_framework(name, reason or str(found), given, call)
    dtype = dtypes.canonicalize_dtype(inputs, kernel, bias, dtype=module.dtype)
    return found.apply(inputs, kernel, bias, **options_of(name, given, dtype))


def _own_option(module: Any) -> str:
    """Returns the option of a linear layer that only Flax serves, or ""."""
    own = {getattr(module, option, None) for option in ("dot_general", "dot_general_cls")}
    reasons = {
        "a precision": module.precision is not None,
        "a dot_general of its own": own != {None},
        "a preferred_element_type": getattr(module, "preferred_element_type", None) is not None,
        "a promote_dtype of its own": module.promote_dtype is not dtypes.promote_dtype,
    }
    return unserved(reasons)


def _unserved(module: Any, inputs: Array) -> str:
    """Returns what of a linear layer and its inputs only Flax serves, or ""."""
    return _own_option(module) or unserved({}, inputs.dtype, module.param_dtype, module.dtype)


def _rows(layer: str, inputs: Any) -> Array:
    """Returns the inputs as an array with features; ValueError otherwise."""
    x = jnp.asarray(inputs)
    if x.ndim == 0:
        raise ValueError(f"{layer}: inputs must be (*rows, features), got a scalar")
    return x


class NormDense(_Linear, nn.Module):
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
      ValueError: for an unknown activation or quantization, a bad epsilon, or an input without
        features.

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
    recompute: bool = _option(default=True)

    def __post_init__(self):
        modules.check_eps("NormDense", "epsilon", self.epsilon)
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


class GatedMLP(_Linear, nn.Module):
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


# ---------------------------------------------------------------- other people's models


@dataclasses.dataclass(frozen=True)
class _Options:
    """What a swapped model was swapped with, and what became of its modules."""

    implementation: Implementation
    quantization: Quantization
    rules: tuple[tuple[type, Any], ...]
    report: Callable[[Report], Any] | None
    rows: dict[str, Row] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def dense(self) -> Any:
        """The options of a dense layer."""
        options = {"implementation": None, "activation": None, "quantization": self.quantization}
        return types.SimpleNamespace(**options)


# Part of the key of JAX's caches: what nn.jit traced outside a swapped model is not used inside it.
_serving = jax.make_user_context(None)
# The modules that their own code computes now.
_running: contextvars.ContextVar[tuple[nn.Module, ...]] = contextvars.ContextVar(
    "normfuse_running", default=()
)
_ORIGINAL: dict[type, type] = {}  # each swapped class, and the one it was made of


def swap(
    model: M,
    *,
    implementation: Implementation = None,
    quantization: Quantization = None,
    rules: Rules | None = None,
    report: Callable[[Report], Any] | None = None,
) -> M:
    """Returns `model` so that normfuse computes its norms and its dense layers when applied.

    Linen makes modules inside calls, so they are found there: while `apply` or a method of the
    returned model runs, each module's `__call__` is intercepted. (A part that is called by itself,
    as by `model.bind(variables).part(x)`, computes as it did.) `nn.LayerNorm` is computed by
    `normfuse.layer_norm`, `nn.Dense`, `nn.DenseGeneral` and `nn.Einsum` by `normfuse.dense`, except
    products that need a transposition. A module with one vector of parameters, or none, is probed:
    where it computes an RMSNorm over the last axis, whatever its names, epsilon, offset and casts
    are, `normfuse.rms_norm` computes it. A gated MLP is not looked for, as nnx's `swap` does: its
    layers do not exist before its call, and are served one by one. Initialisation is the model's
    own.

    The returned model is a subclass of its own class, with the same fields, variables and names of
    variables, under `nn.jit`, `nn.scan`, `nn.remat`, `nn.tabulate` and `capture_intermediates`,
    and as a part of other modules. `model` stays as it was.

    Args:
      model: a module, not bound.
      implementation: of the norms, as for `normfuse.rms_norm`. Dense layers multiply by XLA.
      quantization: of the dense layers, as for `normfuse.dense`, but of those with an option that
        only Flax serves (`precision`, a `dot_general`), as the report says.
      rules: by class, a function of (bound module, x) that computes what its modules do, or None
        for modules to leave alone. Subclasses follow the rule of their nearest base class.
      report: called with a `Report` of each module, what serves it, or why not, whenever a method
        that is not initialising has met other modules than before: `report=print`.

    Returns:
      A new model, for the same variables.

    Raises:
      ValueError: for a bound model; when applied, for a rule that computes anything else than the
        class.
      TypeError: for anything but a module, for rules that do not map classes to functions, and for
        a report that is no function.

    Warns:
      UserWarning: when applied, if nothing is served.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> from normfuse.layers.linen import swap
    >>> model = swap(nn.Sequential([nn.RMSNorm(), nn.Dense(2)]))
    >>> x = jnp.ones((3, 4))
    >>> model.apply(model.init(jax.random.key(0), x), x).shape
    (3, 2)
    """
    _check_module(model, "swap")
    if model.scope is not None:
        raise ValueError(
            f"swap: {type(model).__name__} is bound to variables; swap it before init or bind"
        )
    implementation = modules.check_options(implementation, quantization=quantization)
    options = _Options(
        implementation, quantization, tuple(check_rules(rules, report).items()), report
    )
    return _as(model, _swapped(_original(model), options))


def unswap(model: M) -> M:
    """Returns `model` as it was before `swap`, as a new model for the same variables.

    Args:
      model: what `swap` returned.

    Raises:
      TypeError: for anything but a linen Module.
    """
    _check_module(model, "unswap")
    return _as(model, _original(model))


def _check_module(model: Any, function: str) -> None:
    check_model(model, "linen", function)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a linen Module, got {type(model).__name__}")


def _original(model: nn.Module) -> type:
    """Returns the class that a module has, or had before `swap`."""
    return _ORIGINAL.get(type(model), type(model))


def _as(model: Any, cls: type) -> Any:
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init}
    return cls(**(fields | {"parent": None}))


def _swapped(base: type, options: _Options) -> type:
    """Returns the subclass of `base` whose methods run with `options`."""

    def serve(method):
        @nn.nowrap  # the method itself is Linen's to wrap: its names, scopes and intermediates stay
        @functools.wraps(method)
        def served(self, *args, **kwargs):
            with _served(options, base):
                return method(self, *args, **kwargs)

        return served

    @nn.nowrap
    @functools.wraps(base.apply)
    def apply(self, *args, **kwargs):  # `method` may be a function of the class, or any other
        with _served(options, base):
            return base.apply(self, *args, **kwargs)

    def reduce(self, protocol):
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return _restore, (base, kept | {"parent": None}, options)

    body = {name: serve(method) for name, method in _methods(base)} | {"apply": apply}
    about = {"__module__": base.__module__, "__qualname__": f"{base.__qualname__}[normfuse]"}
    about |= {"__doc__": base.__doc__, "__reduce_ex__": nn.nowrap(reduce)}
    cls = type(base)(base.__name__, (base,), body | about)
    _ORIGINAL[cls] = base
    return cls


def _restore(base: type, fields: dict[str, Any], options: _Options) -> Any:
    """Makes a swapped module again from its pickle."""
    return _swapped(base, options)(**fields)


def _methods(base: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the methods that a module's class and its bases define, but Linen's own."""
    for name in dir(base):
        method = inspect.getattr_static(base, name)
        if name == "setup" or not inspect.isfunction(method) or hasattr(method, "nowrap"):
            continue
        if name != "__call__" and (name.startswith("_") or name in vars(nn.Module)):
            continue
        yield name, method


@contextlib.contextmanager
def _served(options: _Options, base: type) -> Iterator[None]:
    """Computes modules with `options` within a block; the report comes after the outermost."""
    if _serving.value == options:
        yield
        return
    before = dict(options.rows)
    with _serving(options), nn.intercept_methods(functools.partial(_intercept, options)):
        yield
    if options.rows != before:
        rows = list(options.rows.values())
        conclude(rows, options.report, base.__name__, warn=True)


def _intercept(
    options: _Options, call: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
    """Computes a call of a module's method, as Linen's interceptors do."""
    module = context.module

    def own() -> Any:
        token = _running.set((*_running.get(), module))
        try:
            return call(*args, **kwargs)
        finally:
            _running.reset(token)

    if any(module is one for one in _running.get()):  # the `super().__call__` of its own code
        return call(*args, **kwargs)
    if context.method_name != "__call__" or _serving.value != options or module.scope is None:
        return own()
    if module.is_initializing():
        return own()
    row, compute = _chosen(module, options)
    if row is not None and compute is not None and call is not context.orig_method:
        reason = "an interceptor within the model takes its calls"
        row, compute = Row(row.path, row.layer, reason=reason), None
    if row is not None:
        options.rows[row.path] = row
    return own() if compute is None else compute(module, args, kwargs, own)


def _chosen(module: nn.Module, options: _Options) -> tuple[Row | None, Callable[..., Any] | None]:
    """Returns what to report of a module, and what computes it, where either is something.

    Raises:
      ValueError: for a rule that does not fit.
    """
    base, given = _original(module), options.quantization
    row = functools.partial(Row, ".".join(module.path), base.__name__)
    ruled, rule = rule_of(dict(options.rules), base)
    if ruled and rule is None:
        return row(reason="a rule leaves it alone"), None
    if rule is not None:
        service = service_of(base, rule, options.implementation, FRAMEWORK)
        key = *FRAMEWORK.configuration(module), *map(jnp.shape, jax.tree.leaves(module.variables))
        if key not in service.verified:
            path, (parameters, call) = ".".join(module.path), _copies(module, base)
            service.verified[key] = check_rule(
                path, module, rule, parameters, call, FRAMEWORK.ranks
            )
        return row(service.name, error=str(service.verified[key])), service.compute
    if base in (RMSNorm, LayerNorm, Dense, DenseGeneral, Einsum, NormDense, GatedMLP):
        return row(f"normfuse {base.__name__}"), None
    if base is nn.LayerNorm:
        return row("normfuse LayerNorm"), functools.partial(_layer_norm, options)
    if base in _PRODUCTS:
        if isinstance(why := _matrix_product(module, 16), str):
            return row(reason=why), None
        if option := _own_option(module):
            options = dataclasses.replace(options, quantization=None)
        served = modules.served_by(base, given, option)
        return row(served), functools.partial(_product, options)
    variables = module.variables
    own = [value for value in variables.get("params", {}).values() if not isinstance(value, dict)]
    if not own and variables.get("params"):
        return None, None
    try:
        candidate = _candidate(module, base)
        service = recognised(module, base, candidate, options.implementation, FRAMEWORK)
        return row(service.name, error=service.error(module)), service.compute
    except Different as different:
        return row(reason=str(different)), None


def _layer_norm(
    options: _Options, module: nn.LayerNorm, args: Any, kwargs: Any, own: Callable[[], Any]
) -> Any:
    """Computes an `nn.LayerNorm` as `LayerNorm` does."""
    chosen, name = options.implementation, "nn.LayerNorm"
    if len(args) != 1 or {*kwargs} - {"mask"}:
        layer = types.SimpleNamespace(implementation=chosen)
        return modules.by_framework(name, "named arguments", layer, own)
    x = jnp.asarray(args[0])
    if not _holds(module, x):
        return own()
    given = module, x, kwargs.get("mask"), own
    make = lambda name, *_: FRAMEWORK.read(module, name)
    return _normalised(name, layer_norm, *given, implementation=chosen, make=make)


_PRODUCTS = (nn.Dense, nn.DenseGeneral, nn.Einsum)


def _product(options: _Options, module: Any, args: Any, kwargs: Any, own: Callable[[], Any]) -> Any:
    """Computes an `nn.Dense`, `nn.DenseGeneral` or `nn.Einsum` as ours do."""
    name = f"nn.{_original(module).__name__}"
    if len(args) != 1 or kwargs:
        return modules.dense_by_framework(name, "named arguments", options.dense, own)
    inputs = jnp.asarray(args[0])
    if not _holds(module, inputs):
        return own()
    found = _matrix_product(module, inputs.ndim)
    return _contract(name, module, options.dense, inputs, found, own)


def _holds(module: Any, x: Array) -> bool:
    """Whether a module's variables have the parameters that it declares for an x.

    Where they have not, Flax's own code says which are missing, or have another shape.
    """
    try:
        shapes = _declared(module, x)
    except IndexError:  # x has no such axis
        return False
    held = {name: _parameter(module, name) for name in shapes}
    fits = lambda name, shape: shape is None or np.shape(held[name]) == shape
    return all(held[name] is not None and fits(name, shape) for name, shape in shapes.items())


def _declared(module: Any, x: Array) -> dict[str, tuple[int, ...] | None]:
    """Returns the shapes of a module's parameters for an x; None where only Flax knows it."""
    several = lambda value: (value,) if isinstance(value, int) else tuple(value)
    along = lambda axes: tuple(x.shape[axis] for axis in several(axes))
    if isinstance(module, nn.LayerNorm):
        uses = {"scale": module.use_scale, "bias": module.use_bias}
        return {name: along(module.feature_axes) for name, used in uses.items() if used}
    if isinstance(module, nn.Einsum):
        kernel, bias = tuple(module.shape), None
    else:
        bias = several(module.features)
        kernel = (*along(getattr(module, "axis", -1)), *bias)
    return {"kernel": kernel, "bias": bias} if module.use_bias else {"kernel": kernel}


def _candidate(module: Any, base: type) -> Candidate:
    """Returns a bound module as a candidate.

    Raises:
      Different: if it cannot be an RMSNorm.
    """
    variables = dict(module.variables)
    parameters = nn.unbox(variables.pop("params", {}))
    if held := [name for name, values in variables.items() if values]:
        raise Different(f"it holds {', '.join(sorted(held))}")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise Different("it holds other modules")
    is_array = lambda value: isinstance(value, jax.Array | np.ndarray)
    fields = _fields(module)
    if asked := next(_asked_of_scope(base), ""):
        raise Different(f"its code reads self.{asked}, which a probe cannot know")
    if arrays := [name for name in fields if any(map(is_array, jax.tree.leaves(fields[name])))]:
        raise Different(f"it holds arrays in {', '.join(arrays)}")
    # Only their shapes and dtypes are read: inside a call they may well be traced.
    shapes = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in jax.tree.leaves(parameters)]
    _, call = _copies(module, base)

    def compute(values, x, changed):
        return call(base.__call__, values, x, changed)

    numbers = {n: v for n, v in fields.items() if isinstance(v, int | float)}
    return Candidate(compute, *parameter_of(parameters, shapes), numbers, FRAMEWORK.ranks)


# What a bound module has of its surroundings, and a copy that is probed has not.
_SURROUNDINGS = {"has_rng", "is_mutable_collection", "make_rng", "name", "parent", "path", "scope"}


def _asked_of_scope(base: type) -> Iterator[str]:
    """Yields what the methods of a class read of their module's surroundings."""
    for name, function in functions_of(base):
        if name.startswith("__") and name != "__call__":  # a dataclass's own read all its fields
            continue
        own = function.__code__.co_varnames[:1]
        for code in codes_of(function.__code__):
            for loaded, read in itertools.pairwise(dis.get_instructions(code)):
                at = loaded.argval[-1:] if isinstance(loaded.argval, tuple) else (loaded.argval,)
                if at == own and read.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    if read.argval in _SURROUNDINGS:
                        yield read.argval


def _copies(module: Any, base: type) -> tuple[list[Any], Callable[..., Any]]:
    """Returns a bound module's arrays, and a function that calls a copy of it with others."""
    leaves, structure = jax.tree.flatten(nn.unbox(dict(module.variables)))
    unbound = base(**_fields(module), parent=None)

    def call(function, values, x, changed=types.MappingProxyType({})):
        with _serving(None), _without_interceptors():  # the copy computes as its class does
            copy = unbound.clone(**changed) if changed else unbound
            variables = jax.tree.unflatten(structure, values)
            y, after = nn.apply(function, copy, mutable=True)(variables, x)
        after = jax.tree.leaves(after)
        if len(after) != len(values) or any(a is not b for a, b in zip(after, values)):
            raise Different("its call changes its variables")
        return y

    return leaves, call


@contextlib.contextmanager
def _without_interceptors() -> Iterator[None]:
    """Hides all interceptors within a block; theirs would take a probe for a call."""
    # Flax's private matter: where it is elsewhere, they see probes.
    stack = getattr(getattr(nn.module, "_global_interceptor_stack", None), "_storage", [])
    kept = stack.copy()
    stack.clear()
    try:
        yield
    finally:
        stack[:] = kept


def _fields(module: nn.Module) -> dict[str, Any]:
    fields = [f.name for f in dataclasses.fields(module) if f.init]
    return {name: getattr(module, name) for name in fields if name not in ("parent", "name")}


def _parameter(module: nn.Module, name: str) -> Any:
    return nn.unbox(module.get_variable("params", name))


FRAMEWORK = Framework(
    home=__name__,
    read=_parameter,
    held=_parameter,
    candidate=_candidate,
    configuration=lambda module: configuration(_fields(module)),
)
