"""Evaluates traced programs by NumPy, equation by equation.

XLA takes longer to compile one small operation than NumPy takes to run all equations of a test.
Primitives without a rule here, those of normfuse among them, run as in an eager call.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from normfuse.native import jax_private

RULES = {}  # of a primitive's name: a function of the equation's parameters and operands


def evaluated(function):
    """The function, traced and then evaluated by NumPy; its results are arrays of JAX."""

    def call(*args):
        traced, arrays = of_arrays(function, *args)
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(arrays)
        results = map(_typed, evaluate(closed, *arrays), closed.jaxpr.outvars)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def of_arrays(function, *args):
    """Returns the function of a list of the arrays in its arguments, and that list."""
    leaves, tree = jax.tree.flatten(args)
    are = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

    def call(arrays):
        arrays = iter(arrays)
        whole = [next(arrays) if is_array else x for is_array, x in zip(are, leaves)]
        return function(*jax.tree.unflatten(tree, whole))

    return call, [x for x, is_array in zip(leaves, are) if is_array]


def evaluate(closed, *args):
    """Returns the results of a jaxpr: arrays of NumPy where a rule made them."""
    values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args]))
    read = lambda var: var.val if isinstance(var, Literal) else values[var]
    with np.errstate(all="ignore"):
        for eqn in closed.jaxpr.eqns:
            values.update(zip(eqn.outvars, _results(eqn, [*map(read, eqn.invars)]), strict=True))
    return [*map(read, closed.jaxpr.outvars)]


def _results(eqn, operands):
    rule = RULES.get(eqn.primitive.name)
    kinds = [var.aval.dtype for var in (*eqn.invars, *eqn.outvars) if hasattr(var.aval, "dtype")]
    if rule is None or any(jnp.issubdtype(kind, jax.dtypes.extended) for kind in kinds):
        return _bound(eqn, operands)
    if rule in CALLS:
        return rule(eqn.params, *operands)
    results = rule(eqn.params, *map(np.asarray, operands))
    if results is NotImplemented:
        return _bound(eqn, operands)
    results = results if eqn.primitive.multiple_results else [results]
    return [_in_aval(y, var.aval) for y, var in zip(results, eqn.outvars, strict=True)]


def _bound(eqn, operands):
    operands = [_typed(x, var) for x, var in zip(operands, eqn.invars)]
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def _in_aval(y, aval):
    y = np.asarray(y)
    assert y.shape == aval.shape, (y.shape, aval)
    return y if y.dtype == aval.dtype else y.astype(aval.dtype)


def _typed(x, var):
    """An array of JAX with the type of a variable: Python's numbers keep their weak types."""
    if isinstance(x, jax.Array) or not hasattr(var.aval, "weak_type"):
        return x
    x = jnp.asarray(x, var.aval.dtype)
    if not var.aval.weak_type:
        return x
    return lax.convert_element_type_p.bind(
        x, new_dtype=var.aval.dtype, weak_type=True, sharding=None
    )


def rule(*names):
    def add(function):
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


# ---------------------------------------------------------------- programs within programs

CALLS = set()


def call(*names):
    def add(function):
        CALLS.add(function)
        return rule(*names)(function)

    return add


@call("jit", "pjit", "closed_call", "core_call")
def _(params, *operands):
    return evaluate(params.get("jaxpr") or params["call_jaxpr"], *operands)


@call("checkpoint", "remat", "remat2")
def _(params, *operands):
    return evaluate(ClosedJaxpr(params["jaxpr"], ()), *operands)


@call("custom_jvp_call", "custom_vjp_call")
def _(params, *operands):
    return evaluate(params.get("call_jaxpr") or params["fun_jaxpr"], *operands)


@call("cond")
def _(params, index, *operands):
    branches = params["branches"]
    return evaluate(branches[int(np.clip(int(index), 0, len(branches) - 1))], *operands)


@call("while")
def _(params, *operands):
    ends, body = params["cond_nconsts"], params["body_nconsts"]
    of_end, of_body, carry = np.split(np.arange(len(operands)), [ends, ends + body])
    of_end, of_body, carry = ([operands[i] for i in part] for part in (of_end, of_body, carry))
    while bool(evaluate(params["cond_jaxpr"], *of_end, *carry)[0]):
        carry = evaluate(params["body_jaxpr"], *of_body, *carry)
    return carry


@call("scan")
def _(params, *operands):
    consts, carries = jax_private.scan_counts(params, len(operands))
    fixed, carry = operands[:consts], operands[consts : consts + carries]
    rows = operands[consts + carries :]
    steps = range(params["length"])
    found = []
    for i in reversed(steps) if params["reverse"] else steps:
        results = evaluate(params["jaxpr"], *fixed, *carry, *(x[i] for x in rows))
        carry = results[:carries]
        found.append(results[carries:])
    if params["reverse"]:
        found.reverse()
    avals = params["jaxpr"].out_avals[carries:]
    stacked = [
        np.stack([np.asarray(row[j]) for row in found])
        if found
        else np.zeros((0, *a.shape), a.dtype)
        for j, a in enumerate(avals)
    ]
    return [*carry, *stacked]


# ---------------------------------------------------------------- element by element

ALIKE = (  # NumPy's name, or JAX's and NumPy's
    *("exp", "exp2", "log", "log1p", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh", "sqrt"),
    *("cbrt", "square", "floor", "ceil", "sign", "real", "imag", "conj"),
    *("neg negative", "abs absolute", "is_finite isfinite", "not invert", "asin arcsin"),
    *("acos arccos", "atan arctan", "asinh arcsinh", "acosh arccosh", "atanh arctanh"),
    *("add", "add_any add", "sub subtract", "mul multiply", "max maximum", "min minimum"),
    *("atan2 arctan2", "nextafter", "pow power", "eq equal", "ne not_equal", "lt less"),
    *("le less_equal", "gt greater", "ge greater_equal", "and bitwise_and", "or bitwise_or"),
    *("xor bitwise_xor",),
)


def _alike(function):
    def rule(params, *operands):
        return function(*operands)

    return rule


for words in ALIKE:
    theirs, *own = words.split()
    RULES[theirs] = _alike(getattr(np, *own or [theirs]))

for name, function in {
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
    "logistic": lambda x: np.reciprocal(1 + np.exp(-x)),
    "erf": lambda x: _in_float(scipy.special.erf, x),
    "erfc": lambda x: _in_float(scipy.special.erfc, x),
    "clamp": lambda least, x, most: np.minimum(np.maximum(x, least), most),
    **dict.fromkeys(["copy", "copy_p", "name", "stop_gradient"], lambda x: x),
}.items():
    RULES[name] = _alike(function)


def _in_float(function, x):
    """The function in float32 at least."""
    return function(x.astype(np.result_type(x.dtype, np.float32))).astype(x.dtype)


@rule("select_n")
def _(params, which, *cases):
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.select([which == i for i in range(len(cases))], cases)


@rule("optimization_barrier")
def _(params, *operands):
    return operands


@rule("div")
def _(params, x, y):
    return x / y if _is_float(x) else NotImplemented


@rule("rem")
def _(params, x, y):
    return np.fmod(x, y) if _is_float(x) else NotImplemented


@rule("integer_pow")
def _(params, x):
    return np.power(x, x.dtype.type(params["y"])) if _is_float(x) else NotImplemented


@rule("round")
def _(params, x):
    return np.rint(x) if int(params["rounding_method"]) else NotImplemented


@rule("convert_element_type")
def _(params, x):
    if _is_float(x) and not jnp.issubdtype(params["new_dtype"], jnp.inexact):
        return NotImplemented  # NumPy does not saturate
    return x.astype(params["new_dtype"])


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


# ---------------------------------------------------------------- shapes


@rule("iota")
def _(params):
    shape, along = params["shape"], params["dimension"]
    line = np.arange(shape[along]).astype(params["dtype"])
    return np.broadcast_to(np.expand_dims(line, _others(len(shape), along)), shape)


@rule("broadcast_in_dim")
def _(params, x):
    shape = params["shape"]
    return np.broadcast_to(
        np.expand_dims(x, _others(len(shape), *params["broadcast_dimensions"])), shape
    )


def _others(rank, *dims):
    return tuple(i for i in range(rank) if i not in dims)


@rule("reshape")
def _(params, x):
    return NotImplemented if params["dimensions"] else x.reshape(params["new_sizes"])


def _laid_out(function, parameter):
    def rule(params, x):
        return function(x, params[parameter])

    return rule


for name, function, parameter in (
    ("squeeze", np.squeeze, "dimensions"),
    ("expand_dims", np.expand_dims, "dimensions"),
    ("transpose", np.transpose, "permutation"),
    ("rev", np.flip, "dimensions"),
):
    RULES[name] = _laid_out(function, parameter)


@rule("concatenate")
def _(params, *parts):
    return np.concatenate(parts, params["dimension"])


@rule("split")
def _(params, x):
    return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])


@rule("pad")
def _(params, x, fill):
    low, high, between = zip(*params["padding_config"]) if x.ndim else ((), (), ())
    if min((*low, *high), default=0) < 0:
        return NotImplemented
    inner = [max(0, n + (n - 1) * step) for n, step in zip(x.shape, between)]
    whole = np.full([a + n + b for a, n, b in zip(low, inner, high)], fill, x.dtype)
    whole[tuple(slice(a, a + n, step + 1) for a, n, step in zip(low, inner, between))] = x
    return whole


@rule("slice")
def _(params, x):
    strides = params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


@rule("dynamic_slice")
def _(params, x, *starts):
    return x[_window(x, params["slice_sizes"], starts)]


@rule("dynamic_update_slice")
def _(params, x, part, *starts):
    x = x.copy()
    x[_window(x, part.shape, starts)] = part
    return x


def _window(x, sizes, starts):
    """Starts count from the beginning alone, and move until the window is within the array."""
    starts = [min(max(int(i), 0), n - size) for i, n, size in zip(starts, x.shape, sizes)]
    return tuple(slice(i, i + size) for i, size in zip(starts, sizes))


# ---------------------------------------------------------------- sums and products


def _reduced(function):
    def rule(params, x):
        wide = x.astype(np.float32) if x.dtype.itemsize == 2 and _is_float(x) else x
        return function(wide, tuple(params["axes"])).astype(x.dtype)

    return rule


for name, function in {
    "reduce_sum": lambda x, axes: np.sum(x, axes, x.dtype),
    "reduce_prod": lambda x, axes: np.prod(x, axes, x.dtype),
    "reduce_and": np.bitwise_and.reduce,
    "reduce_or": np.bitwise_or.reduce,
    "reduce_xor": np.bitwise_xor.reduce,
}.items():
    RULES[name] = _reduced(function)


def _extreme(function):
    def rule(params, x):
        if not x.size:
            return NotImplemented
        return function(x, axis=params["axes"][0] if "index_dtype" in params else params["axes"])

    return rule


for name, function in {"reduce_max": np.max, "reduce_min": np.min, "argmax": np.argmax}.items():
    RULES[name] = _extreme(function)
RULES["argmin"] = _extreme(np.argmin)


@rule("cumsum")
def _(params, x):
    axis = params["axis"]
    turn = lambda x: np.flip(x, axis) if params["reverse"] else x
    wide = x.astype(np.float32) if x.dtype.itemsize == 2 and _is_float(x) else x
    return turn(np.cumsum(turn(wide), axis, wide.dtype))


@rule("dot_general")
def _(params, a, b):
    """Adds in float32 at least, as XLA does, or in the type that the program prefers."""
    (of_a, of_b), (batch_a, batch_b) = params["dimension_numbers"]
    wanted = params["preferred_element_type"] or a.dtype
    least = np.float32 if jnp.issubdtype(wanted, jnp.floating) else wanted
    kind = jnp.promote_types(jnp.promote_types(wanted, least), jnp.promote_types(a.dtype, b.dtype))
    left = [*batch_a, *(i for i in range(a.ndim) if i not in (*of_a, *batch_a)), *of_a]
    right = [*batch_b, *of_b, *(i for i in range(b.ndim) if i not in (*of_b, *batch_b))]
    batch, summed = len(batch_a), len(of_a)
    a, b = a.transpose(left).astype(kind), b.transpose(right).astype(kind)
    shape = (*a.shape[: a.ndim - summed], *b.shape[batch + summed :])
    leading, length = a.shape[:batch], int(np.prod(a.shape[a.ndim - summed :]))
    rows, columns = (
        int(np.prod(x)) for x in (a.shape[batch : a.ndim - summed], b.shape[batch + summed :])
    )
    product = a.reshape(*leading, rows, length) @ b.reshape(*leading, length, columns)
    return product.reshape(shape).astype(wanted)
