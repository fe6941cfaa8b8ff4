"""`compare`: how exact a function is with `fuse` and without, beside a wider reference."""

import contextlib
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..native.jaxpr import JIT, KERNELS, REMAT, evaluate, results_of
from .fuse.closure import is_array
from .fuse.fuse import Quantization, Skip, check, fuse, skip_of
from .fuse.sites import Report, aligned


@dataclasses.dataclass(frozen=True)
class Difference:
    """Errors of one result, or of the gradient by one argument.

    Attributes:
      name: "value", "result" and its place, or "d" and the argument's name and place.
      theirs: the relative error of the function as it is; NaN where the reference has no number.
      ours: that of the fused function.
      is_zero: it is a gradient that is zero but for rounding, beside that of the largest.
    """

    name: str
    theirs: float
    ours: float
    is_zero: bool = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`; its printed form is a table.

    Attributes:
      rows: one for each floating-point result, then one for each gradient.
      reference: what the reference is.
      report: what was replaced.
    """

    rows: tuple[Difference, ...]
    reference: str
    report: Report

    def __str__(self) -> str:
        table = [("", "theirs", "ours")]
        for row in self.rows:
            shown = lambda error, row=row: "~0" if row.is_zero else f"{error:.1e}"
            table.append((row.name, shown(row.theirs), shown(row.ours)))
        replaced = str(self.report).splitlines()[-1]
        return "\n".join([*aligned(table), f"beside {self.reference}; replaced: {replaced}"])


def compare(
    loss: Callable[..., Any],
    *arguments: Any,
    quantization: Quantization = None,
    skip: Skip = (),
) -> Comparison:
    """Compares a loss and its gradients with those of `fuse(loss)`.

    For each result y of either function, and each gradient y of the loss, it gives the relative
    error ‖y − r‖ / ‖r‖ (Euclidean norms). The reference r is of the same program in which every
    floating-point number is a float32; a float64 if the program has none narrower than float32.
    `fuse` has done no harm where both errors are of one size. A gradient that is zero but for
    rounding has large ones, which are printed as `~0`. Where r has no finite element, and y is
    equal to it, there is nothing to compare: the error is NaN.

    What the program itself casts is wide in the reference, too; kernels, callbacks, shard_map and
    functions with a derivative of their own keep their dtypes there. The function is traced three
    times, and differentiated as often.

    Args:
      loss: a function that `fuse` takes. Its first floating-point scalar is what is differentiated;
        all its other floating-point results are compared as well.
      arguments: its arguments, pytrees. The gradients are by all floating-point arrays in them.
      quantization: as in `fuse`.
      skip: as in `fuse`.

    Returns:
      A `Comparison`; `print` shows the table.

    Raises:
      TypeError: if loss is no function, or returns no floating-point scalar.
      ValueError: for an unknown quantization.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse import compare
    >>> def loss(x, kernel, labels):
    ...     log_p = jax.nn.log_softmax(x @ kernel)
    ...     return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))
    >>> both = jax.random.normal(jax.random.key(0), (2060, 4))
    >>> found = compare(loss, both[:12], both[12:].T, jnp.arange(12))
    >>> [row.name for row in found.rows], found.reference
    (['value', 'd x', 'd kernel'], 'the same program in float64')
    >>> all(row.ours < 1e-5 for row in found.rows)
    True
    """
    check("compare", loss, quantization, None)
    return compared(loss, arguments, fuse, quantization, skip)


def compared(
    loss: Callable[..., Any],
    arguments: Sequence[Any],
    fuse: Callable[..., Any],
    quantization: Quantization,
    skip: Skip,
) -> Comparison:
    """Compares a loss with `fuse(loss)`, for any framework's `fuse`; see `compare`."""
    skip = skip_of("compare", skip)
    paths, tree = jax.tree_util.tree_flatten_with_path(tuple(arguments))
    leaves = [leaf for _, leaf in paths]
    arrays = [i for i, x in enumerate(leaves) if is_array(x)]
    floats = [i for i in arrays if _is_float(leaves[i])]
    others = [i for i in arrays if i not in floats]
    names: list[str] = []

    def of_arrays(function: Callable[..., Any]) -> Callable[..., list[Any]]:
        """Returns the floating-point results as a function of the arrays in the arguments."""

        def call(*given: Any) -> list[Any]:
            whole = list(leaves)
            for i, x in zip([*floats, *others], given, strict=True):
                whole[i] = x
            results = function(*jax.tree.unflatten(tree, whole))
            floating = jax.tree_util.tree_flatten_with_path(results)[0]
            floating = [(p, y) for p, y in floating if is_array(y) and _is_float(y)]
            names[:] = ["result" + jax.tree_util.keystr(p) if p else "value" for p, _ in floating]
            return [y for _, y in floating]

        return call

    given = [jnp.asarray(leaves[i]) for i in floats]
    rest = [jnp.asarray(leaves[i]) for i in others]
    closed = jax.make_jaxpr(of_arrays(loss))(*given, *rest)
    scalars = [i for i, aval in enumerate(closed.out_avals) if getattr(aval, "shape", None) == ()]
    if not scalars:
        raise TypeError("compare: the function returns no floating-point scalar to differentiate")
    reports: list[Report] = []
    fused = fuse(loss, quantization=quantization, skip=skip, report=reports.append)
    theirs = _with_gradients(of_arrays(loss), given, rest, scalars[0])
    ours = _with_gradients(of_arrays(fused), given, rest, scalars[0])
    exact, reference = _reference(closed, given, rest, scalars[0])
    names += [f"d {_place(loss, paths[i][0])}" for i in floats]
    rows = _differences(names, [*zip(theirs, ours, exact, strict=True)], len(floats))
    return Comparison(tuple(rows), reference, reports[-1])


def _differences(names: list[str], each: list[Any], gradients: int) -> list[Difference]:
    """Returns the errors of (theirs, ours, exact), the last of which are gradients."""
    sizes = [max(map(_size, three)) for three in each]
    errors = [(_error(theirs, exact), _error(ours, exact)) for theirs, ours, exact in each]
    # A gradient is zero but for rounding if it is no larger than others' errors in the function.
    least = 8 * max([e * size for (e, _), size in zip(errors, sizes) if e < 0.1], default=0.0)
    zero = [i >= len(sizes) - gradients and size <= least for i, size in enumerate(sizes)]
    zero = [is_small and max(two) > 0.1 for is_small, two in zip(zero, errors)]
    return [Difference(name, *two, z) for name, two, z in zip(names, errors, zero, strict=True)]


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _place(function: Any, path: Any) -> str:
    """Returns an argument's name, with a leaf's place in it."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # functions written in C
        parameters = []
    named = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    i = path[0].idx
    name = named[i] if i < len(named) else jax.tree_util.keystr(path[:1])
    return name + jax.tree_util.keystr(path[1:])


def _with_gradients(
    call: Callable[..., list[Any]], chosen: list[Any], rest: list[Any], scalar: int
) -> list[Any]:
    """Returns a function's results, and the gradients of one of them, on the host."""

    def first(chosen: list[Any], rest: list[Any]) -> tuple[Any, list[Any]]:
        results = call(*chosen, *rest)
        return results[scalar], results

    both = jax.jit(jax.value_and_grad(first, has_aux=True))
    (_, results), gradients = both(chosen, rest)
    return jax.device_get([*results, *gradients])


def _size(y: Any) -> float:
    y = np.asarray(y).astype(np.float64)
    return float(np.linalg.norm(np.where(np.isfinite(y), y, np.inf).ravel()))


def _error(y: Any, exact: Any) -> float:
    y, exact = (np.asarray(x).astype(np.float64) for x in (y, exact))
    same = (y == exact) | np.isnan(y) & np.isnan(exact)
    if same.size and same.all() and not np.isfinite(exact).any():
        return math.nan
    with np.errstate(invalid="ignore"):
        difference = np.linalg.norm(np.where(same, 0, y - exact).ravel())
    size = np.linalg.norm(np.where(np.isfinite(exact), exact, 0).ravel())
    return float(difference / size) if size else float(difference and np.inf)


# ---------------------------------------------------------------- the reference


def _reference(
    closed: Any, chosen: list[Any], rest: list[Any], scalar: int
) -> tuple[list[Any], str]:
    """Returns a program's results and gradients in a wider dtype, and its name for the table."""
    narrow = re.search(r"\b(bf16|f16|f8_\w+)\[", str(closed))
    dtype = jnp.dtype(jnp.float32 if narrow else jnp.float64)
    call = lambda *operands: _widened(closed, dtype, operands)
    with contextlib.nullcontext() if narrow else jax.enable_x64(True):
        cast = [lax.convert_element_type(x, dtype) for x in chosen]
        return _with_gradients(call, cast, rest, scalar), f"the same program in {dtype.name}"


def _widened(closed: Any, dtype: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates a program with every floating-point number of one dtype."""
    cast = lambda x: lax.convert_element_type(x, dtype) if _is_float(jax.typeof(x)) else x
    read = lambda v, x: cast(np.asarray(x, v.aval.dtype) if hasattr(v, "val") else x)
    step = lambda eqn, inputs: _wide_results(eqn, dtype, [*map(read, eqn.invars, inputs)])
    rule = lambda eqn, inputs: [*map(cast, step(eqn, inputs))]
    results = evaluate(closed, [*map(cast, operands)], rule)
    return [*map(read, getattr(closed, "jaxpr", closed).outvars, results)]


_OWN_DTYPE = "bitcast_convert_type", "custom_jvp_call", "custom_vjp_call", "shard_map", *KERNELS


def _wide_results(eqn: Any, dtype: Any, operands: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in (*JIT, *REMAT):
        return _widened(params["jaxpr"], dtype, operands)
    if name == "reduce_precision":
        return operands
    if name in _OWN_DTYPE or name.startswith("normfuse") or "callback" in name:
        return _as_it_is(eqn, *operands)
    for key, value in params.items():
        if key in ("dtype", "new_dtype", "preferred_element_type") and value is not None:
            params[key] = dtype if jnp.issubdtype(value, jnp.floating) else value
        elif key == "precision":
            params[key] = (lax.Precision.HIGHEST,) * 2
        elif hasattr(value, "jaxpr"):
            params[key] = _wide_body(value, dtype)
        elif isinstance(value, tuple) and any(hasattr(one, "jaxpr") for one in value):
            params[key] = tuple(_wide_body(one, dtype) for one in value)
    try:
        return results_of(eqn.replace(params=params), operands)
    except Exception:  # it has no rule for this dtype
        return _as_it_is(eqn, *operands)


def _wide_body(closed: Any, dtype: Any) -> Any:
    avals = [a.update(dtype=dtype) if _is_float(a) else a for a in closed.in_avals]
    return jax.make_jaxpr(lambda *operands: _widened(closed, dtype, operands))(*avals)


def _as_it_is(eqn: Any, *operands: Any) -> list[Any]:
    """Evaluates an equation in the dtypes that it has."""
    avals = [v.aval for v in eqn.invars]
    cast = lambda x, a: lax.convert_element_type(x, a.dtype) if _is_float(a) else x
    return results_of(eqn, [cast(x, a) for x, a in zip(operands, avals, strict=True)])
