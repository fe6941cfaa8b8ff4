"""Whether a module computes an RMSNorm, found from values and not from names.

The module's call is traced on a copy, and the trace is evaluated by NumPy on probe inputs: nothing
is compiled, no device is touched, and no state of the module can change. From what comes out follow
eps, the scale's offset and the order of casts; they are then verified against float64.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ..native.dtypes import FLOATING, NARROW, holds
from ..native.jaxpr import inner, results_of
from .rms_norm.op import Cast

# Root mean squares of the probe rows: the mean square is far below eps, about as large, and above.
_MAGNITUDES = (1e-10, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
_EQUATIONS = 400  # of the longest trace that is evaluated
# Of which a trace has more or fewer where an axis has length 1.
_SHAPING = {"broadcast_in_dim", "expand_dims", "reshape", "squeeze"}
_AXES = "axes", "axis", "dimension", "dimension_numbers", "permutation"  # of an operation


Trace = Any  # a jax.extend.core.ClosedJaxpr, which type checkers do not find there


class Different(Exception):
    """A module does not compute an RMSNorm; the message says how it differs."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A module that may be an RMSNorm."""

    # Computes a copy of the module for (arrays of its parameters, x, changed attributes).
    call: Callable[[list[Any], Any, Mapping[str, float]], Any]
    scale: str | None  # the attribute that holds its only parameter; None if it has none
    # Of the parameter, whose last axis is the features; the others are of stacked layers.
    shape: tuple[int, ...]
    dtype: str  # of the parameter
    attributes: Mapping[str, Any]  # the module's Python numbers, by attribute
    ranks: tuple[int, ...]  # of probe inputs, until one is recognised

    def trace(self, x: tuple[int, ...], x_dtype: str, dtype: str, **changed: float) -> Trace:
        """Returns the call's trace for an x of a shape and dtype and a parameter of `dtype`.

        Raises:
          Different: if the call fails, or returns anything but one array like x.
        """
        parameters = [] if self.scale is None else [jax.ShapeDtypeStruct((x[-1],), dtype)]
        call = lambda parameters, x: self.call(parameters, x, changed)
        traced = trace(call, parameters, jax.ShapeDtypeStruct(x, x_dtype))
        check(traced, x)
        return traced


@dataclasses.dataclass(frozen=True)
class Formula:
    """`x / sqrt(mean(x²) + eps) · (scale_offset + scale)`, over the last axis."""

    scale: str | None  # the attribute that holds the scale; None if there is none
    eps: float | str  # its value, or the attribute that holds it
    scale_offset: float  # as for `normfuse.rms_norm`

    def eps_of(self, module: Any) -> Any:
        """Returns the eps of a module."""
        return getattr(module, self.eps) if isinstance(self.eps, str) else self.eps


@dataclasses.dataclass(frozen=True)
class Casts:
    """The dtypes of an RMSNorm, for given ones of x and scale."""

    # x, scale: what each is rounded to before the statistics; None where it is used as it is.
    x: str | None
    scale: str | None
    cast: Cast  # as for `normfuse.rms_norm`
    out: str  # the result's
    error: float  # the largest relative difference to the formula with these casts in float64


def trace(call: Callable[..., Any], parameters: list[Any], x: Any) -> Trace:
    """Returns the trace of `call(parameters, x)`.

    Raises:
      Different: if the call fails, or returns anything but one array.
    """
    try:
        traced: Trace = jax.make_jaxpr(call)(parameters, x)
    except Different:
        raise
    except Exception as error:  # the module's own, of any type
        first = (str(error).strip() or "no message").splitlines()[0][:120]
        raise Different(
            f"its call fails for x of shape {x.shape}: {type(error).__name__}: {first}"
        ) from None
    if traced.effects:
        raise Different("its call has side effects")
    if len(traced.out_avals) != 1:
        raise Different(f"it returns {len(traced.out_avals)} arrays")
    if traced.out_avals[0].dtype.name not in FLOATING:
        raise Different(f"it returns {traced.out_avals[0].dtype.name}")
    return traced


def check(traced: Trace, shape: tuple[int, ...]) -> None:
    """Raises Different unless a trace computes one array of a shape from its inputs alone."""
    (out,) = traced.out_avals
    if out.shape != shape:
        raise Different(f"it turns shape {shape} into {out.shape}")
    names = [equation.primitive.name for equation in equations(traced.jaxpr)]
    if len(names) > _EQUATIONS:
        raise Different(f"it computes {len(names)} operations")
    if random := next((n for n in names if n.startswith(("random_", "threefry"))), ""):
        raise Different(f"it draws random numbers ({random})")
    if placed := next((n for n in names if n in _PLACING), ""):
        raise Different(f"it communicates or constrains sharding ({placed})")
    if "name" in names:
        raise Different("it names arrays for policies of jax.checkpoint (checkpoint_name)")
    if own := next(_own_derivatives(traced.jaxpr), ""):
        raise Different(f"its derivative is not that of what it computes ({own})")


def check_smooth(traced: Trace, but: Container[str] = ()) -> None:
    """Raises Different if a trace has a piecewise operation, whose other pieces no probe may meet.

    Args:
      traced: of a module that computes the formula for the probes.
      but: operations that the formula itself may have.
    """
    names = [equation.primitive.name for equation in equations(traced.jaxpr)]
    if piecewise := next((n for n in names if n in _PIECEWISE and n not in but), ""):
        raise Different(f"it may compute something else for other values ({piecewise})")


def formula(candidate: Candidate) -> tuple[Formula, int, int]:
    """Returns what a module computes, and the rank and the features of x for which it was found.

    Raises:
      Different: if it is not an RMSNorm over the last axis.
    """
    sizes = list(candidate.shape[-1:])
    if not sizes:  # the features are what an attribute says, or any number
        ints = {v for v in candidate.attributes.values() if type(v) is int and 2 <= v <= 65536}
        sizes = [64, *sorted(ints - {64})]
    first = None
    for size in sizes:
        for rank in candidate.ranks:
            try:
                return _formula(candidate, size, rank), rank, size
            except Different as error:
                called = "its call fails" not in str(error)
                if first is None or (called and "its call fails" in str(first)):
                    first = error
    assert first is not None
    if len(candidate.shape) > 1 and "its call fails" in str(first):
        raise Different(f"{candidate.scale} is not a vector: {candidate.shape}")
    raise first


def casts(
    candidate: Candidate, found: Formula, rank: int, size: int, x_dtype: str, dtype: str
) -> Casts:
    """Returns the order of casts for a rank, features and dtype of x and a dtype of the parameter.

    Raises:
      Different: if the module does not compute the formula for them.
    """
    value = candidate.attributes.get(found.eps) if isinstance(found.eps, str) else found.eps
    if value is None:
        raise Different(f"its {found.eps} is no Python number any more")
    if not value >= 0:
        raise Different(f"its eps is {value}")
    # A class may have another eps for other dtypes and sizes: rows whose mean square is about eps.
    small = max(math.sqrt(value), math.sqrt(float(jnp.finfo(jnp.float32).tiny)))
    magnitudes = np.array([0.37, 0.9, 1.7, 5.3, 0.3 * small, small, 0.01])
    shape = probe_shape(len(magnitudes), size, rank)
    traced = candidate.trace(shape, x_dtype, dtype)
    x = _rows(shape, magnitudes)
    kind = np.arange(len(x)) % len(magnitudes)
    is_usual, is_near_eps, has_outlier = kind < 4, (kind == 4) | (kind == 5), kind == 6
    x[has_outlier, 0] = 0.02 * math.sqrt(size)  # which is nearly all of the row
    x = x.astype(x_dtype)
    scale = _scale(size, 1, dtype)
    y = _call(traced, scale, x, rank)
    out, best = traced.out_avals[0].dtype.name, None
    xs, scales = (None, *_narrower(x_dtype)), (None, *(_narrower(dtype) if found.scale else ()))
    for cast, x_cast, scale_cast in itertools.product(get_args(Cast), xs, scales):
        normal = (x_cast or x_dtype) if cast == "before" else None
        if normal is not None and normal not in NARROW:  # x̂ is computed in float32
            continue
        exact = _exact(_cast(x, x_cast), _cast(scale, scale_cast), found, value, normal)
        size_of = np.maximum(np.abs(exact), 1e-300)
        error = np.abs(y.astype(np.float64) - _cast(exact, out)) / size_of
        usual = error[is_usual]
        # Each element of theirs may be rounded more often; the mean tells the casts apart.
        if best is None or usual.mean() < 0.9 * best[0]:
            near_eps, most = float(error[is_near_eps].max()), float(error[~is_near_eps].max())
            best = usual.mean(), Casts(x_cast, scale_cast, cast, out, most), near_eps
    assert best is not None
    allowed = tolerance_of(traced, size)
    if not best[1].error <= allowed:
        raise Different(
            f"for {x_dtype} it differs from an RMSNorm by {best[1].error:.2g} of the value, where "
            f"rounding explains {allowed:.2g}"
        )
    # Squares may have been rounded to few digits there; another eps differs by more.
    if not best[2] <= max(allowed, 0.1):
        raise Different(
            f"for {x_dtype} and {size} features it has another eps than {value:.6g}: where the "
            f"mean square of x is about that, it differs by {best[2]:.2g} of the value"
        )
    return best[1]


def check_shape(candidate: Candidate, shape: tuple[int, ...], x_dtype: str, dtype: str) -> None:
    """Raises Different if a call for an x of a shape computes anything else than for the probe."""
    probe = probe_shape(4, shape[-1], len(shape))
    check_steps(*(candidate.trace(x, x_dtype, dtype) for x in (probe, shape)))


def check_steps(known: Trace, given: Trace) -> None:
    """Raises Different unless two traces, for x of two shapes, compute the same of each element."""
    steps = []
    for traced in (known, given):
        found = [e for e in equations(traced.jaxpr) if e.primitive.name not in _SHAPING]
        over = [[str(equation.params.get(name)) for name in _AXES] for equation in found]
        names = [equation.primitive.name for equation in found]
        steps.append((names, over, _literals(traced.jaxpr)))
    if steps[0] != steps[1]:
        was, now = known.in_avals[-1].shape, given.in_avals[-1].shape
        raise Different(f"for an x of shape {now} it computes something else than for {was}")


def _formula(candidate: Candidate, size: int, rank: int) -> Formula:
    shape = probe_shape(len(_MAGNITUDES) + 1, size, rank)
    traced = candidate.trace(shape, "float32", "float32")
    # Without its roundings to 16 bits, behind which a soft cap or another factor could hide.
    call = functools.partial(_call, traced, rank=rank, wide=True)
    x = _rows(shape, np.array(_MAGNITUDES)).astype(np.float32)
    x[-1] = 0
    scales = [_scale(size, seed, "float32") for seed in (1, 2)]
    ys = [call(scale, x).astype(np.float64) for scale in scales]
    tolerance = tolerance_of(traced, size, wide=True)
    large = len(_MAGNITUDES) - 1
    wide, mean_square = x.astype(np.float64), np.mean(x.astype(np.float64) ** 2, 1)

    if any(np.any(y[-1] != 0) and np.all(np.isfinite(y[-1])) for y in ys):
        raise Different("it adds to the normalised x: zeros do not stay zeros")
    weights = [y[large] * np.sqrt(mean_square[large]) / wide[large] for y in ys]
    if not np.all(np.isfinite(weights)):
        raise Different("it returns values that are not finite")
    second = [y[large - 1] * np.sqrt(mean_square[large - 1]) / wide[large - 1] for y in ys]
    if not np.allclose(weights, second, rtol=4 * tolerance, atol=4 * tolerance):
        centred = wide - wide.mean(1, keepdims=True)
        again = [ys[0][i] * centred[i].std() / centred[i] for i in (large, large - 1)]
        if np.allclose(*again, rtol=1e-3, atol=1e-3):
            raise Different("it subtracts the mean, as a LayerNorm does")
        raise Different("it is not x over its root mean square, row by row of the last axis")

    # The weight is slope · scale + offset.
    slope, offset = 0.0, float(np.mean(weights))
    if candidate.scale is not None:
        slope, offset = np.polyfit(np.ravel(scales), np.ravel(weights), 1)
    elif np.any(np.abs(np.ravel(weights) - 1) > 4 * tolerance):
        raise Different(f"it multiplies the normalised x by {offset:.6g}")
    constants = [*_literals(traced.jaxpr), *_numbers(candidate.attributes).values()]
    near = [c for c in (0.0, 1.0, *constants) if abs(c - offset) <= 4 * tolerance]
    offset = near[0] if near else offset
    line = slope * np.ravel(scales) + offset
    if np.any(np.abs(np.ravel(weights) - line) > 4 * tolerance * (1 + np.abs(line))):
        raise Different("its weight is not the parameter plus a constant")
    if candidate.scale is not None and abs(slope - 1) > 4 * tolerance:
        raise Different(
            f"its weight is {slope:.6g} times the parameter: not the mean of the squares"
            if abs(slope - 1 / np.sqrt(size)) < 1e-3
            else f"its weight is {slope:.6g} times the parameter"
        )
    offset = 0.0 if candidate.scale is None else offset

    weight = np.ravel(scales)[:size] + offset if candidate.scale else 1.0
    with np.errstate(divide="ignore"):  # in float16 the smallest row may become zeros
        ratio = np.median(np.abs(weight * wide[0] / ys[0][0]))
    eps = max(float(ratio**2 - mean_square[0]), 0.0)
    if not np.isfinite(eps):
        raise Different("it is not an RMSNorm where x is small")
    if eps < 1e-3 * mean_square[0]:  # none, or one that only zeros show
        eps = 0.0
        if all(np.all(np.isfinite(y[-1])) for y in ys):
            tiny = float(jnp.finfo(jnp.float32).tiny)
            eps = max([c for c in constants if tiny <= c < 1e-3 * mean_square[0]], default=0.0)
            if not eps:
                raise Different("zeros stay zeros, and no eps is found that keeps them finite")
    attribute, eps = _named_eps(candidate, traced, constants, eps, 4 * tolerance)
    found = Formula(candidate.scale, eps, offset)
    for scale, y in zip(scales, ys):
        exact = _exact(x[:-1], scale, found, eps)
        error = float(np.max(np.abs(y[:-1] - exact) / np.abs(exact)))
        if not error <= 2 * tolerance:
            at = int(np.argmax(np.max(np.abs(y[:-1] - exact) / np.abs(exact), 1)))
            raise Different(
                f"where the mean square of x is {mean_square[at]:.1g} it differs by {error:.2g} of "
                f"the value from an RMSNorm with eps={eps:.6g}"
            )
    check_smooth(traced)
    return dataclasses.replace(found, eps=attribute or eps)


def _named_eps(
    candidate: Candidate, traced: Trace, constants: list[float], eps: float, noise: float
) -> tuple[str, float]:
    """Returns the attribute that holds eps ("" if none does), and its exact value."""
    near = lambda value: abs(value - eps) <= max(noise, 1e-4) * eps
    for name, value in _numbers(candidate.attributes).items():
        if eps and near(value):
            shape = traced.in_avals[-1].shape
            changed = candidate.trace(shape, "float32", "float32", **{name: 4 * value})
            if sorted(_literals(changed.jaxpr)) != sorted(_literals(traced.jaxpr)):
                return name, value
    return "", min([c for c in constants if near(c)] or [eps], key=lambda c: abs(c - eps))


# ---------------------------------------------------------------- probe inputs and references


def probe_shape(rows: int, size: int, rank: int) -> tuple[int, ...]:
    """Returns the shape of a probe input of at least `rows` rows; for rank 1, of one row.

    Several rows lie along its first axes too: a sum over an axis of length 1 would not show.
    """
    if rank == 1:
        return (size,)
    first = [2 if i < 4 else 1 for i in range(rank - 2)]  # or high ranks would take many rows
    return (*first, max(2, -(-rows // math.prod(first))), size)


def _rows(shape: tuple[int, ...], magnitudes: np.ndarray) -> np.ndarray:
    """The rows of a probe, or several for rank 1: each of a root mean square, again and again.

    Their elements are away from zero, and their mean is not zero.
    """
    rows = len(magnitudes) + 1 if len(shape) == 1 else math.prod(shape[:-1])
    rng = np.random.default_rng(0)
    sign = np.where(rng.random((rows, shape[-1])) < 0.7, 1.0, -1.0)
    x = sign * (0.5 + rng.random((rows, shape[-1])))
    x = x / np.sqrt(np.mean(x * x, 1, keepdims=True))
    return x * np.resize(magnitudes, (rows, 1))


def _scale(size: int, seed: int, dtype: str) -> np.ndarray:
    """Parameters of both signs, away from 0 and, for `1 + scale`, from -1."""
    rng = np.random.default_rng(seed)
    sign = np.where(rng.random(size) < 0.5, -1.0, 1.0)
    return (sign * (0.25 + 0.5 * rng.random(size))).astype(dtype)


def _call(
    traced: Trace, scale: np.ndarray, x: np.ndarray, rank: int, wide: bool = False
) -> np.ndarray:
    run = functools.partial(evaluate, traced, *[scale] * (len(traced.in_avals) > 1), wide=wide)
    if rank == 1:
        return np.stack([run(row) for row in x])
    return run(x.reshape(traced.in_avals[-1].shape)).reshape(x.shape)


def _exact(
    x: np.ndarray, scale: np.ndarray, found: Formula, eps: float, normal_dtype: str | None = None
) -> np.ndarray:
    wide = x.astype(np.float64)
    normal = _cast(wide / np.sqrt(np.mean(wide * wide, 1, keepdims=True) + eps), normal_dtype)
    weight = 1.0 if found.scale is None else scale.astype(np.float64) + found.scale_offset
    return normal * weight


def _cast(x: np.ndarray, dtype: str | None) -> np.ndarray:
    return x if dtype is None else x.astype(dtype).astype(np.float64)


def _narrower(dtype: str) -> list[str]:
    return [d for d in ("float32", "bfloat16", "float16") if d != dtype and not holds(d, dtype)]


def tolerance_of(traced: Trace, size: int, wide: bool = False) -> float:
    """The relative error that rounding explains: a sum's, and four of the narrowest result.

    `wide` as for `evaluate`.
    """
    eps = roundings(traced)
    long = [e for e in eps if e < 1e-3] or [float(np.finfo(np.float32).eps)]
    return 4 * max(long if wide else eps) + (8 + np.sqrt(size)) * max(long) / 2


def roundings(traced: Trace) -> list[float]:
    """Returns the eps of each floating dtype in a trace."""
    avals: list[Any] = [v.aval for e in equations(traced.jaxpr) for v in e.outvars]
    made = {aval.dtype.name for aval in avals if hasattr(aval, "dtype")}
    return [float(jnp.finfo(dtype).eps) for dtype in made & set(FLOATING)] or [0.0]


def _numbers(attributes: Mapping[str, Any]) -> dict[str, float]:
    real = lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool)
    return {name: float(value) for name, value in attributes.items() if real(value)}


def _literals(jaxpr: core.Jaxpr) -> list[float]:
    """The numbers in a trace, with as many digits as their dtypes hold."""
    found = []
    for equation in equations(jaxpr):
        for atom in list[Any](equation.invars):
            if np.shape(getattr(atom, "val", (0,))) == ():
                value = np.asarray(atom.val)
                if value.dtype.kind not in "fiu":
                    value = value.astype(np.float32)
                found.append(float(str(value)))
    return found


# ---------------------------------------------------------------- evaluation by NumPy

_PLACING = {"sharding_constraint", "reshard", "mesh_cast", "psum", "all_gather", "shard_map"}
_PIECEWISE = {"min", "max", "clamp", "select_n", "cond", "while", "sign", "floor", "ceil", "round"}
_PIECEWISE |= {"eq", "ne", "lt", "le", "gt", "ge", "is_finite"}


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of values in float64: the caller rounds its result once."""
    return lambda *args, **params: function(*(a.astype(np.float64) for a in args), **params)


def _broadcast(x: np.ndarray, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    unit = np.ones(len(shape), int)
    for dimension, size in zip(broadcast_dimensions, x.shape):
        unit[dimension] = size
    return np.broadcast_to(x.reshape(unit), shape)


# Operations that norms are written with; all others are evaluated by JAX, which compiles them.
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": _wide(lambda x, **_: 1 / np.sqrt(x)),
    "pow": _wide(np.power),
    "exp": _wide(lambda x, **_: np.exp(x)),
    "logistic": _wide(lambda x, **_: 1 / (1 + np.exp(-x))),
    "tanh": _wide(lambda x, **_: np.tanh(x)),
    "integer_pow": _wide(lambda x, y: x**y),
    "convert_element_type": lambda x, new_dtype, **_: x.astype(new_dtype),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, dimensions: x.squeeze(dimensions),
    "transpose": lambda x, permutation: x.transpose(permutation),
    "reduce_sum": _wide(lambda x, axes, **_: x.sum(tuple(axes))),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "optimization_barrier"), lambda x: x),
}


def evaluate(traced: Trace, *args: np.ndarray, wide: bool = False) -> np.ndarray:
    """Returns the only result of a trace, each operation rounded to its own dtype.

    With `wide` what has 16 bits is computed in float32, but for what JAX must evaluate.
    """
    try:
        with np.errstate(all="ignore"):
            return _run(traced.jaxpr, traced.consts, args, wide)[0]
    except Exception as error:  # of an operation that JAX evaluates
        raise Different(f"it cannot be evaluated here: {error}") from None


def _run(jaxpr: core.Jaxpr, consts: Any, args: Any, wide: bool = False) -> list[np.ndarray]:
    env: dict[core.Var, np.ndarray] = {}
    dtype_of = lambda aval: np.float32 if wide and aval.dtype.name in NARROW else aval.dtype

    def read(atom: Any) -> np.ndarray:
        return np.asarray(atom.val, dtype_of(atom.aval)) if hasattr(atom, "val") else env[atom]

    env.update(zip(jaxpr.constvars, map(np.asarray, consts)))
    env.update(zip(jaxpr.invars, args))
    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        name, called = equation.primitive.name, _called(equation)
        if called is not None:
            results = _run(*called, values, wide)
        elif (function := _NUMPY.get(name)) and len(equation.outvars) == 1:
            # NumPy's functions take none of an element-wise operation's parameters.
            params = {} if isinstance(function, np.ufunc) else equation.params
            if name == "convert_element_type":
                params = {"new_dtype": dtype_of(equation.outvars[0].aval)}
            results = [function(*values, **params)]
        else:
            if wide:
                dtypes = [atom.aval.dtype for atom in list[Any](equation.invars)]
                values = [v.astype(dtype) for v, dtype in zip(values, dtypes)]
            results = _by_jax(equation, values)
        for var, value in zip(equation.outvars, results):
            env[var] = np.asarray(value).astype(dtype_of(var.aval), copy=False)
    return [read(atom) for atom in jaxpr.outvars]


def _by_jax(equation: core.JaxprEqn, values: list[np.ndarray]) -> list[Any]:
    """Evaluates one operation on the CPU, or where JAX has none, on the default device.

    A thread of its own is in no trace and on no mesh, whose devices may only be described.
    """

    def bind() -> Any:
        try:
            host = jax.default_device(jax.local_devices(backend="cpu")[0])
        except RuntimeError:
            host = contextlib.nullcontext()
        with x64, host:
            return equation.primitive.bind(*map(jnp.asarray, values), **equation.params)

    x64 = jax.enable_x64(jax.config.jax_enable_x64)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        results = thread.submit(bind).result()
    return results if equation.primitive.multiple_results else [results]


def _called(equation: core.JaxprEqn) -> tuple[core.Jaxpr, Any] | None:
    """Returns the jaxpr and the constants that an equation calls once; None for anything else."""
    if equation.primitive.name not in _CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if (called := equation.params.get(name)) is not None:
            return (called.jaxpr, called.consts) if hasattr(called, "consts") else (called, ())
    return None


_CUSTOM = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_CALLS = _CUSTOM | {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the operations of a trace, those of what it calls in place of the call."""
    for equation in jaxpr.eqns:
        if (called := _called(equation)) is not None:
            yield from equations(called[0])
        else:
            yield equation


def _own_derivatives(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yields the operations whose derivative is not that of what they compute."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "stop_gradient" or name in _CUSTOM and not _is_derivative(equation):
            yield name
        for program in inner(equation):
            yield from _own_derivatives(program)


def _is_derivative(equation: core.JaxprEqn) -> bool:
    """Whether a custom derivative, as JAX's relu has one, is that of its function's operations."""
    called = _called(equation)
    assert called is not None
    avals, rng = [v.aval for v in list[Any](equation.invars)], np.random.default_rng(0)
    drawn = [rng.standard_normal(a.shape) for a in avals]
    closed: Any = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
    theirs, own = lambda *values: results_of(equation, values), core.jaxpr_as_fun(closed(*called))
    try:
        programs = [_gradients(function, avals) for function in (theirs, own)]
        given, wanted = (
            any(e.primitive.name in _PIECEWISE for e in equations(p.jaxpr)) for p in programs
        )
        if given and not wanted:
            return False
        # Of values and cotangents of several sizes: a rule may limit large ones.
        for size, weight in ((1.0, 1.0), (1e3, 1.0), (1.0, 1e4), (1e-3, 1e-4)):
            values = [(size * v).astype(a.dtype) for v, a in zip(drawn, avals)]
            with np.errstate(all="ignore"):
                found = [_run(p.jaxpr, p.consts, [np.float32(weight), *values]) for p in programs]
            if not all(map(_are_close, *found)):
                return False
    except Exception:  # of operations without a derivative, as kernels are
        return False
    return True


def _are_close(given: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether gradients are the same, where they are finite: squares of narrow ones may not be."""
    at = np.isfinite(wanted.astype(np.float64))
    a, b = given.astype(np.float64)[at], wanted.astype(np.float64)[at]
    eps = float(jnp.finfo(wanted.dtype).eps)
    return np.allclose(a, b, rtol=0, atol=max(1e-3, 16 * eps) * np.max(np.abs(b), initial=0))


def _gradients(function: Callable[..., Any], avals: list[Any]) -> Trace:
    """Returns the trace of `(weight, *values)` -> the gradients of what a function returns, each
    element with a weight of its own, of at most `weight`."""
    is_floating = lambda a: a.dtype.name in FLOATING

    def gradients(weight, *values):
        results, pull = jax.vjp(lambda *v: list(filter(is_floating, function(*v))), *values)
        weights = [weight * np.cos(np.arange(y.size)).reshape(y.shape) for y in results]
        weights = [w.astype(y.dtype) for w, y in zip(weights, results)]
        return list(filter(is_floating, pull(weights)))

    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return jax.make_jaxpr(gradients)(np.float32(1), *like)
