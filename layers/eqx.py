"""Equinox modules on normfuse's operations: drop-in layers, fused ones, and `swap`."""

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..native.implementation import Implementation
from . import modules, named
from .core.arguments import Quantization, options_of, unserved
from .dense.dense import apply as apply_dense
from .dense.epilogue import Activation, finish
from .dense.gated import apply_product as apply_gated_product
from .dense.gated import mlp as gated_mlp
from .layer_norm import layer_norm
from .recognize import Candidate, Different
from .recognize_mlp import GatedCandidate, GatedFormula
from .rms_norm import rms_norm
from .swap import (
    SERVED,
    Framework,
    Report,
    Row,
    Rules,
    Service,
    base_of,
    check_concrete,
    check_model,
    check_rule,
    check_rules,
    conclude,
    configuration,
    parameter_of,
    recognised,
    recognised_mlp,
    rule_of,
    service_of,
    subclass,
)

M = TypeVar("M")
_NOT_GIVEN: Any = object()


class RMSNorm(eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm` computed by `normfuse.rms_norm`.

    Takes what `eqx.nn.RMSNorm` does and has the same leaves, initial values and result: always x's
    dtype, computed in float32 (float64). For one example, of exactly `shape`; batch it with
    `jax.vmap`, any number of times, and the kernel sees one batch.

    Equinox's own code serves for complex x, an `eps` that is an array, and `shape=()`. Integer x,
    which Equinox turns into zeros, is refused.

    Args:
      shape: of the input.
      eps: added to the mean square.
      use_weight, use_bias: whether to multiply by a weight, and to add a bias.
      dtype: of the weight and the bias.
      implementation: as for `normfuse.rms_norm`.

    Raises:
      ValueError: for an eps that is negative or not finite; when called, for an x not of `shape`.
      TypeError: for an eps that is not a number; when called, for integer x.
      NotImplementedError: when called, if `implementation` asks for what cannot serve.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.eqx import RMSNorm
    >>> jax.vmap(RMSNorm(4))(jnp.full((2, 4), 3.0)).shape
    (2, 4)
    """

    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        implementation: Implementation = None,
    ):
        modules.check_eps("eqx.nn.RMSNorm", "eps", eps)
        super().__init__(shape, eps, use_weight, use_bias, dtype)
        self.implementation = modules.check_options(implementation)

    def __call__(self, x: Array, state: Any = _NOT_GIVEN, *, key: Any = None) -> Any:
        """Normalises all of x; `state` is passed through, `key` is ignored."""
        call = lambda x: super(RMSNorm, self).__call__(x, key=key)
        return _normalised("eqx.nn.RMSNorm", rms_norm, self, x, state, call)


class LayerNorm(eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm` computed by `normfuse.layer_norm`.

    Takes what `eqx.nn.LayerNorm` does and has the same leaves, initial values and result: always
    x's dtype, computed in float32 (float64), weight and bias in the same pass. For one example, of
    exactly `shape`; batch it with `jax.vmap`, any number of times, and the kernel sees one batch.
    Equinox's own code serves what `RMSNorm` leaves to it; integer x is refused.

    Args:
      shape: of the input.
      eps: added to the variance.
      use_weight, use_bias: whether to multiply by a weight, and to add a bias.
      dtype: of the weight and the bias.
      elementwise_affine: Equinox's deprecated way to set both of `use_weight` and `use_bias`.
      implementation: as for `normfuse.layer_norm`.

    Raises:
      ValueError: for an eps that is negative or not finite; when called, for an x not of `shape`.
      TypeError: for an eps that is not a number; when called, for integer x.
      NotImplementedError: when called, if `implementation` asks for what cannot serve.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.eqx import LayerNorm
    >>> jax.vmap(LayerNorm(4))(jnp.full((2, 4), 3.0)).shape
    (2, 4)
    """

    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        elementwise_affine: bool | None = None,
        implementation: Implementation = None,
    ):
        modules.check_eps("eqx.nn.LayerNorm", "eps", eps)
        affine = {"elementwise_affine": elementwise_affine}
        super().__init__(shape, eps, use_weight, use_bias, dtype, **affine)
        self.implementation = modules.check_options(implementation)

    def __call__(self, x: Array, state: Any = _NOT_GIVEN, *, key: Any = None) -> Any:
        """Normalises all of x; `state` is passed through, `key` is ignored."""
        call = lambda x: super(LayerNorm, self).__call__(x, key=key)
        return _normalised("eqx.nn.LayerNorm", layer_norm, self, x, state, call)


def _normalised(
    name: str,
    norm: Callable[..., Array],
    layer: Any,
    x: Any,
    state: Any,
    call: Callable[[Array], Array],
) -> Any:
    """Computes a norm by `norm`, or by Equinox where an option asks for what it does not do."""
    x = _floating(name, x, layer.shape)
    if reason := _norm_unserved(layer, x):
        y = modules.by_framework(name, reason, layer, lambda: call(x))
    else:
        options = {"axis": tuple(range(x.ndim)), "implementation": layer.implementation}
        y = norm(x, *_norm_parameters(layer), eps=layer.eps, **options)
    return y if state is _NOT_GIVEN else (y, state)


def _norm_unserved(layer: Any, x: Array) -> str:
    """Returns what of a norm only Equinox serves, or ""."""
    reasons = {"shape=()": x.ndim == 0, "an eps that is an array": isinstance(layer.eps, Array)}
    return unserved(reasons, x.dtype, *[a.dtype for a in _norm_parameters(layer) if a is not None])


def _norm_parameters(layer: Any) -> tuple[Array | None, Array | None]:
    """Weight and bias."""
    return layer.weight if layer.use_weight else None, layer.bias if layer.use_bias else None


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
      dtype: of the weight and the bias.
      key: for the initial values.
      activation, implementation, quantization: as for `normfuse.dense`.

    Raises:
      ValueError: for an unknown activation or quantization; when called, for an x not of shape
        `(in_features,)`, or a quantization beside what only Equinox serves.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.eqx import Linear
    >>> linear = Linear(3, 4, activation="silu", key=jax.random.key(0))
    >>> jax.vmap(linear)(jnp.ones((2, 3))).shape
    (2, 4)
    """

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
        if reason := self._unserved(x):
            call = lambda: super(Linear, self).__call__(x, key=key)
            return modules.dense_by_framework("eqx.nn.Linear", reason, self, call)
        x = _checked("eqx.nn.Linear", "linear", x, self.weight.shape[1:])
        dtype = jnp.result_type(self.weight, x)
        options = options_of("eqx.nn.Linear", self, dtype)
        return apply_dense(x, self.weight, self.bias, contract=1, **options)

    def _unserved(self, x: Array) -> str:
        """Returns what only Equinox serves, or ""."""
        if option := _own_option(self):
            return option
        if self.bias is None and x.ndim > 1 and x.shape[-2] == self.weight.shape[1]:
            return "a matrix"
        if reason := unserved({}, x.dtype, self.weight.dtype):
            return reason
        dtype = jnp.result_type(self.weight, x)
        if self.bias is not None and jnp.result_type(dtype, self.bias) != dtype:
            return f"a bias in {self.bias.dtype}, wider than {dtype}"
        return ""


def _own_option(linear: Any) -> str:
    """Returns the option of a Linear that only Equinox serves, or ""."""
    scalar = "scalar" in (linear.in_features, linear.out_features)
    return '"scalar" features' if scalar else ""


def _checked(layer: str, name: str, x: Any, shape: tuple[int, ...]) -> Array:
    """Returns x as an array of `shape`; ValueError otherwise."""
    x = jnp.asarray(x)
    if x.shape != shape:
        raise ValueError(
            f"{layer}: x must have shape {shape}, got {x.shape}; for a batch call "
            f"jax.vmap({name})(x)"
        )
    return x


def _floating(layer: str, x: Any, shape: tuple[int, ...]) -> Array:
    """Returns a norm's x as an array of `shape`; TypeError for an integer one."""
    x = _checked(layer, "norm", x, shape)
    if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool:
        raise TypeError(
            f"{layer}: x must be floating, got {x.dtype}; cast it first, for example "
            "x.astype(jnp.float32)"
        )
    return x


# ---------------------------------------------------------------- layers of several operations


class NormDense(_Options):
    """`RMSNorm` into `Linear`, the normalised input computed again in the backward.

    `norm` and `linear` are modules of their own: leaves and initial values are those of the two in
    a row, which serve where either has become something else. For one example, of shape
    `(in_features,)`; batch it with `jax.vmap`.

    Args:
      in_features, out_features: the lengths of the input and of the output.
      eps: the norm's.
      use_bias: whether to add a bias after the product.
      dtype: of the parameters.
      key: for the initial values.
      activation, recompute, implementation, quantization: as for `normfuse.norm_dense`.

    Raises:
      ValueError: for an unknown activation or quantization, or a bad eps; when called, for an x not
        of shape `(in_features,)`.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse.layers.eqx import NormDense
    >>> jax.vmap(NormDense(3, 4, key=jax.random.key(0)))(jnp.ones((2, 3))).shape
    (2, 4)
    """

    norm: RMSNorm
    linear: Linear
    recompute: bool = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: Array,
        activation: Activation = None,
        recompute: bool = True,
        implementation: Implementation = None,
        quantization: Quantization = None,
    ):
        modules.set_options(self, "NormDense", activation, implementation, quantization)
        self.norm = RMSNorm(in_features, eps, use_bias=False, dtype=dtype)
        self.linear = Linear(
            in_features, out_features, use_bias, dtype, key=key, quantization=quantization
        )
        self.recompute = recompute

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """Normalises x and multiplies it by the weight; `key` is ignored."""
        x, norm, linear = jnp.asarray(x), self.norm, self.linear
        if reason := modules.replaced(norm, RMSNorm) or modules.replaced(linear, Linear):
            return modules.unfused_norm_dense(self, x, reason)
        x = _checked("NormDense", "layer", x, linear.weight.shape[1:])
        if norm.use_bias and norm.bias is not None:
            return modules.unfused_norm_dense(self, x, "a norm with a bias")
        if reason := _norm_unserved(norm, x) or linear._unserved(x):
            return modules.unfused_norm_dense(self, x, reason)
        scale = norm.weight if norm.use_weight else None
        dtype, options = jnp.result_type(linear.weight, x), {"eps": norm.eps, "contract": 1}
        return modules.norm_dense(self, x, scale, linear.weight, linear.bias, dtype, **options)


class GatedMLP(_Options):
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
      activation, implementation: as for `normfuse.gated_product`.
      quantization: of all three products, as for `normfuse.dense`.

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
        modules.set_options(self, "GatedMLP", *options, gated=True)
        gate, up, down = jax.random.split(key, 3)
        make = lambda n, m, key: Linear(n, m, use_bias, dtype, key=key, quantization=quantization)
        self.gate = make(in_features, hidden_features, gate)
        self.up = make(in_features, hidden_features, up)
        self.down = make(hidden_features, in_features, down)

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """Applies the MLP to x; `key` is ignored."""
        return _apply_gated(self, x)


def _apply_gated(mlp: Any, x: Array) -> Array:
    """Applies a GatedMLP, or what has its layers and options."""
    linears = modules.layers_of(mlp)

    def as_made(linear: Any) -> bool:
        """Whether a part may be computed together with the others."""
        if modules.replaced(linear, Linear) or linear.quantization != mlp.quantization:
            return False
        return not linear._unserved(jnp.asarray(x))

    if not modules.replaced(mlp.gate, Linear) and isinstance(mlp.gate.in_features, int):
        x = _checked("GatedMLP", "mlp", x, mlp.gate.weight.shape[1:])
    if mlp.quantization and all(map(as_made, linears.values())):
        kernels = {name: linear.weight for name, linear in linears.items()}
        biases = {n: linear.bias for n, linear in linears.items() if linear.bias is not None}
        options = options_of("GatedMLP", mlp, jnp.result_type(x, *kernels.values()))
        return gated_mlp(x, kernels, biases, contract=1, **options)
    gate, up, down = mlp.gate(x), mlp.up(x), mlp.down
    if reason := modules.replaced(down, Linear) or down._unserved(gate):
        call = lambda: down(finish(gate, None, mlp.activation, gate.dtype, up))
        return modules.by_framework("GatedMLP", reason, mlp, call, down)
    options = options_of("GatedMLP", mlp, jnp.result_type(down.weight, gate))
    return apply_gated_product(gate, up, down.weight, down.bias, contract=1, **options)


# ---------------------------------------------------------------- other people's models

_NORMS = {eqx.nn.RMSNorm: RMSNorm, eqx.nn.LayerNorm: LayerNorm}
_OURS = _NORMS | {eqx.nn.Linear: Linear}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


def swap(
    model: M,
    *,
    implementation: Implementation = None,
    quantization: Quantization = None,
    rules: Rules | None = None,
    report: Callable[[Report], Any] | None = None,
) -> M:
    """Returns `model` with normfuse's layers for its norms and every `eqx.nn.Linear`.

    Every `eqx.nn.RMSNorm`, `eqx.nn.LayerNorm` and `eqx.nn.Linear` becomes normfuse's class. A
    module of any other class that has one vector of parameters, or none, is probed: where it
    computes an RMSNorm over the last axis, whatever its names, eps, offset and casts are, it
    becomes a subclass of its own class that `normfuse.rms_norm` computes. Probing traces a copy,
    evaluates it with NumPy and verifies the result in float64; calls it has not verified (other
    arguments, shapes, dtypes) are verified when they first occur, or computed by the class's own
    code. A module of three linear layers is probed likewise: where it computes
    `down(activation(gate(x)) · up(x))`, and holds nothing else, `normfuse.gated_product` computes
    it, which keeps less for the backward. haliax's norms are found likewise, and every
    `haliax.nn.Linear` is computed by `normfuse.dense`.

    Leaves, static fields and everything else are kept, as the same objects; a layer or module that
    occurs twice is still one object that occurs twice, and `eqx.nn.Shared` still ties what it tied.
    All that is not recognised stays.

    `model` may be any pytree. An optimiser's state holds copies of the model's structure, and Optax
    compares structures: swap it too, after the model and with the same arguments, and training goes
    on.

    Args:
      model: a module, or any pytree with modules in it.
      implementation: of the norms, as for `normfuse.rms_norm`; of those that are normfuse's
        already, too, unless it is None. Linear layers multiply by XLA, as they did, and MLPs
        that are found are computed by the best that can serve.
      quantization: of every Linear, NormDense and GatedMLP, as for `normfuse.dense`; of those that
        are normfuse's already, too, unless it is None. A Linear with "scalar" features stays
        without, and the report says so. A model's last layer, which makes logits, is better left
        out: swap the parts before it.
      rules: by class, a function of (module, x) that computes what its modules do, or None for
        modules to leave alone. Subclasses follow the rule of their nearest base class.
      report: called with a `Report` of each module, what serves it, or why not: `report=print`.

    Returns:
      A new model, with the same arrays; `model` stays as it was.

    Raises:
      ValueError: for a rule that computes anything else than the class.
      TypeError: for a class, a module of another framework, rules that do not map classes to
        functions, or a report that is no function.

    Warns:
      UserWarning: if nothing in a module is served (of another pytree the report says so), or
        modules could not be probed because they are traced.

    >>> import equinox as eqx, jax
    >>> from normfuse.layers.eqx import swap, unswap
    >>> mlp = swap(eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0)))
    >>> type(mlp.layers[0]).__module__
    'normfuse.layers.eqx'
    >>> eqx.tree_equal(unswap(mlp), eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0)))
    Array(True, dtype=bool)
    """
    implementation = modules.check_options(implementation, quantization=quantization)
    rules, rows = check_rules(rules, report), []
    check_model(model, "eqx")

    def ours(layer: Any, path: str) -> Any:
        if not isinstance(layer, eqx.Module):
            return layer
        row, new = _chosen(layer, path, implementation, quantization, rules)
        rows.extend([row] if row else [])
        return new

    def quantized(layer: Any, path: str) -> Any:
        if type(layer) in (NormDense, GatedMLP):
            return modules.converted(layer, type(layer), quantization=quantization)
        return layer

    new = _replace(model, ours, {})  # and what is in a NormDense or GatedMLP before it itself
    conclude(rows, report, type(model).__name__, warn=isinstance(model, eqx.Module))
    return new if quantization is None else _replace(new, quantized, {})


def unswap(model: M) -> M:
    """Returns `model` with the classes that its layers had: the inverse of `swap`.

    Args:
      model: what `swap` returned, or a pytree that holds it.

    Returns:
      A new model, with the same arrays.

    Raises:
      TypeError: for a class, or a module of another framework.
      ValueError: for a Linear with an activation, which `eqx.nn.Linear` cannot express.
    """

    check_model(model, "eqx", "unswap")

    def theirs(layer: Any, path: str) -> Any:
        if type(layer) is Linear:
            modules.check_unswapped(layer, "eqx.nn.Linear", "make it a Linear without one")
        if type(layer) in SERVED:
            return modules.converted(layer, SERVED[type(layer)].base)
        return modules.converted(layer, _THEIRS[type(layer)]) if type(layer) in _THEIRS else layer

    return _replace(model, theirs, {})


def _chosen(
    layer: eqx.Module,
    path: str,
    implementation: Implementation,
    quantization: Quantization,
    rules: Rules,
) -> tuple[Row | None, Any]:
    """Returns what to report of a module, if anything, and what it becomes.

    Raises:
      ValueError: for a rule that does not fit.
    """
    base = base_of(layer)
    row = functools.partial(Row, path, base.__name__)
    ruled, rule = rule_of(rules, base)
    if ruled and rule is None:
        return row(reason="a rule leaves it alone"), layer
    if rule is not None:
        error = check_rule(path, layer, rule, *_copies(layer, base), FRAMEWORK.ranks)
        service = service_of(base, rule, implementation, FRAMEWORK)
        return _served(row, layer, service, error)
    for theirs, ours in _NORMS.items():
        if base in (theirs, ours):
            if base is theirs or implementation is not None:
                layer = modules.converted(layer, ours, implementation=implementation)
            return row(f"normfuse {ours.__name__}"), layer
    if base in (Linear, eqx.nn.Linear):
        option = _own_option(layer)
        served = modules.served_by(Linear, quantization, option)
        quantization = None if option else quantization
        if base is eqx.nn.Linear:
            added = {"activation": None, "implementation": None, "quantization": quantization}
            layer = modules.converted(layer, Linear, **added)
        elif quantization is not None:
            layer = modules.converted(layer, Linear, quantization=quantization)
        return row(served), layer
    if base in (NormDense, GatedMLP):
        return row(f"normfuse {base.__name__}"), layer
    if named.is_linear(base):
        if type(layer) not in SERVED or quantization is not None:
            service = service_of(base, named.Linear(quantization), None, FRAMEWORK)
            layer = modules.converted(layer, subclass(service))
        return row(SERVED[type(layer)].name), layer
    if type(layer) in SERVED:
        service = SERVED[type(layer)]
        mlp = isinstance(service.how, GatedFormula)
        if implementation not in (None, service.implementation) and not mlp:
            service = service_of(base, service.how, implementation, FRAMEWORK)
            layer = modules.converted(layer, subclass(service))
        return row(service.name, error=service.error(layer)), layer
    if how := _known_formula(layer, path, _arrays_alone):
        return _served(row, layer, service_of(base, how, implementation, FRAMEWORK))
    arrays, parts = _contents(layer)
    try:
        service = recognised_mlp(layer, base, FRAMEWORK)
        if service is None:
            if not arrays and (parts or not callable(layer)):
                return None, layer
            check_concrete(arrays.values())
            service = recognised(layer, base, _candidate(layer, base), implementation, FRAMEWORK)
        subclass(service)
    except Different as different:
        if how := _known_formula(layer, path, _is_filtered):
            return _served(row, layer, service_of(base, how, implementation, FRAMEWORK))
        return row(reason=str(different)), layer
    known = _known.setdefault(_structure(layer), {})
    known.pop(path, None)  # the last that was recognised is the last
    known[path] = _kinds(layer), service.how
    return _served(row, layer, service, service.error(layer))


def _served(row: Any, layer: eqx.Module, service: Service, error: str = "") -> tuple[Row, Any]:
    return row(service.name, error=error), modules.converted(layer, subclass(service))


# Of each class and configuration that was recognised: what its leaves were and the formula, by path
# in the model. An optimizer's state has modules with other things in their fields, or nothing.
_known: dict[Any, dict[str, tuple[tuple[int, ...], Any]]] = {}


def _known_formula(
    layer: eqx.Module, path: str, less: Callable[[tuple[int, ...], tuple[int, ...]], bool]
) -> Any:
    """Returns the formula of the known module that a layer is a filtered copy of, or None.

    Of several, that whose path in its model is the end of the copy's in an optimizer's state; else
    that recognised last.
    """
    kinds, known = _kinds(layer), _known.get(_structure(layer), {})
    found = {at: how for at, (whole, how) in known.items() if less(kinds, whole)}
    ends = [at for at in found if at and (path == at or path.endswith(f".{at}"))]
    return found[max(ends, key=len)] if ends else next(reversed(found.values()), None)


def _is_filtered(kinds: tuple[int, ...], known: tuple[int, ...]) -> bool:
    """Whether some leaves of the known module are something less, or None, and none is more."""
    return kinds != known and len(kinds) == len(known) and all(map(operator.le, kinds, known))


def _arrays_alone(kinds: tuple[int, ...], known: tuple[int, ...]) -> bool:
    """Whether all arrays are there, and nothing else, as `eqx.filter(module, is_array)` has it."""
    return kinds != known and kinds == tuple(kind if kind == _ARRAY else 0 for kind in known)


_ARRAY = 3


def _kinds(layer: eqx.Module) -> tuple[int, ...]:
    """3 for each leaf that is an array, 2 for numbers, 1 for others (an activation), 0 for None."""

    def kind(leaf: Any) -> int:
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            return _ARRAY
        return 2 if eqx.is_array_like(leaf) else int(leaf is not None)

    return tuple(map(kind, jax.tree.leaves(layer, is_leaf=lambda leaf: leaf is None)))


def _structure(layer: eqx.Module) -> tuple[Any, ...]:
    """The class of a module and its static fields, as a key."""
    static = {f.name for f in dataclasses.fields(layer) if f.metadata.get("static", False)}
    base = base_of(layer)
    return base, tuple(item for item in configuration(vars(layer)) if item[0] in static)


def _contents(layer: eqx.Module) -> tuple[dict[str, Any], list[str]]:
    """Returns the arrays that a module holds itself, and the fields that hold other modules."""
    arrays, parts = {}, []
    for field in dataclasses.fields(layer):
        value = named.array_of(vars(layer).get(field.name))
        static = field.metadata.get("static", False)
        if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct) and not static:
            arrays[field.name] = value
        elif any(map(_is_part, jax.tree.leaves(value, is_leaf=_is_part))):
            parts.append(field.name)
    return arrays, parts


def _is_part(value: Any) -> bool:
    array = isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return array or isinstance(value, eqx.Module)


def _candidate(layer: Any, base: type) -> Candidate:
    """Returns a module as a candidate.

    Raises:
      Different: if it cannot be an RMSNorm.
    """
    if not callable(layer):
        raise Different("it has no __call__")
    arrays, parts = _contents(layer)  # pyright: ignore[reportArgumentType]
    if parts:
        raise Different(f"it holds other modules or arrays in {', '.join(parts)}")
    parameters, call = _copies(layer, base)
    axis = named.axis_of(layer)

    def compute(values, x, changed):
        if axis is None:
            return call(base.__call__, values, x, changed)
        function = lambda copy, x: base.__call__(_unstacked(copy, axis), x)  # pyright: ignore
        return named.call_of_norm(axis, lambda x: call(function, values, x, changed), x)

    numbers = {n: v for n, v in vars(layer).items() if isinstance(v, int | float)}
    return Candidate(compute, *parameter_of(arrays, parameters), numbers, FRAMEWORK.ranks)


def _unstacked(copy: Any, axis: Any) -> Any:
    """Returns a haliax norm of one layer, where its parameters are those of several."""
    arrays = {n: value for n, value in vars(copy).items() if named.is_named(value)}
    one = {name: type(value)(value.array, (axis,)) for name, value in arrays.items()}
    return modules.converted(copy, type(copy), **one)


def _copies(layer: Any, base: type) -> tuple[list[Any], Callable[..., Any]]:
    """Returns a module's arrays, and a function that calls a copy of it with others."""
    is_array = lambda leaf: isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    leaves, structure = jax.tree.flatten(modules.converted(layer, base))
    at = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def call(function, values, x, changed=types.MappingProxyType({})):
        filled = list(leaves)
        for i, value in zip(at, values):
            filled[i] = value
        copy = jax.tree.unflatten(structure, filled)
        for name, value in changed.items():
            object.__setattr__(copy, name, value)
        return function(copy, x)

    return [leaves[i] for i in at], call


def _linears(layer: Any) -> dict[str, eqx.nn.Linear]:
    linear = lambda value: type(value) in (eqx.nn.Linear, Linear)
    features = lambda value: "scalar" not in (value.in_features, value.out_features)
    return {n: v for n, v in vars(layer).items() if linear(v) and features(v)}


def _mlp(layer: Any, base: type) -> GatedCandidate:
    """Returns a module of three linear layers as a candidate.

    Raises:
      Different: if it cannot be a gated MLP.
    """
    linears, (arrays, parts) = _linears(layer), _contents(layer)
    if others := sorted({*arrays, *parts} - linears.keys()):
        raise Different(f"beside three linear layers it holds {', '.join(others)}")
    if any(getattr(linear, "activation", None) is not None for linear in linears.values()):
        raise Different("a linear layer has an activation")
    theirs = {n: modules.converted(linear, eqx.nn.Linear) for n, linear in linears.items()}
    parameters = {"weight": "kernel", "bias": "bias"}
    held = [
        (name, field, getattr(linear, field))
        for name, linear in theirs.items()
        for field in ("weight", "bias")[: 1 + linear.use_bias]
    ]
    if any(not isinstance(array, jax.Array | jax.ShapeDtypeStruct) for *_, array in held):
        raise Different("its layers hold no arrays")

    def call(values, x, wide):
        del wide
        copies = {name: modules.converted(linear, eqx.nn.Linear) for name, linear in theirs.items()}
        for (name, field, _), value in zip(held, values):
            object.__setattr__(copies[name], field, value)
        copy = modules.converted(layer, base, **copies)
        return base.__call__(copy, x)  # pyright: ignore[reportCallIssue]

    sizes: Any = {n: (linear.in_features, linear.out_features) for n, linear in linears.items()}
    named = tuple((name, parameters[field], array.dtype.name) for name, field, array in held)
    return GatedCandidate(call, named, sizes, 1, FRAMEWORK.ranks)


def _apply_mlp(how: GatedFormula, layer: Any, x: Array) -> Array:
    parts = {name: getattr(layer, getattr(how, name)) for name in ("gate", "up", "down")}
    quantization = getattr(parts["down"], "quantization", None)
    options = {"implementation": None, "quantization": quantization}
    mlp = types.SimpleNamespace(**parts, activation=how.activation, **options)
    call = functools.partial(_apply_gated, mlp)
    for _ in range(x.ndim - 1):
        call = jax.vmap(call)
    return call(x)


FRAMEWORK = Framework(
    home=__name__,
    read=lambda layer, name: named.array_of(getattr(layer, name)),
    unwrap=named.unwrapped,
    held=getattr,
    candidate=_candidate,
    ranks=(1, 2, 3),
    linears=_linears,
    mlp=_mlp,
    apply_mlp=_apply_mlp,
)


def _replace(
    node: Any,
    convert: Callable[[Any, str], Any],
    done: dict[int, tuple[Any, Any]],
    path: tuple[Any, ...] = (),
) -> Any:
    """`node` with its layers converted; what holds none is returned as it is.

    `done` keeps each node beside its result: an id is a node's only while that node is alive.
    """
    if id(node) in done:
        return done[id(node)][1]
    new = convert(node, jax.tree_util.keystr(path, simple=True, separator="."))
    if new is node or _is_mlp(node) or _is_mlp(new):
        top = new
        below = lambda child: child is not top
        children, structure = jax.tree_util.tree_flatten_with_path(top, is_leaf=below)
        if not (len(children) == 1 and children[0][1] is top):
            replaced = [_replace(child, convert, done, path + key) for key, child in children]
            if any(a is not b for (_, a), b in zip(children, replaced)):
                new = jax.tree.unflatten(structure, replaced)
    done[id(node)] = (node, new)
    return new


def _is_mlp(node: Any) -> bool:
    return type(node) in SERVED and isinstance(SERVED[type(node)].how, GatedFormula)
