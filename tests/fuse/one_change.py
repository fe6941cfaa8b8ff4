"""Programs that differ from a spelling by one constant, axis, cast or stop_gradient.

    python tests/fuse/one_change.py [KIND …]      every change of every spelling

A change makes another function, which `fuse` may serve or leave, and has to keep: in float64, where
nothing is rounding. MLPs, which are not served in float64, are compared in float32.
"""

import dataclasses
from collections.abc import Callable, Iterator

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from normfuse.native.jaxpr import evaluate, results_of

KINDS = "constant", "axis", "cast", "stop_gradient"
JITS = "jit", "pjit", "closed_call"


def evaluated(closed, operands, change):
    """Evaluates a program; `change(eqn, operands, bind)` computes each equation's results."""

    def rule(eqn, given):
        if eqn.primitive.name in JITS:
            return evaluated(eqn.params["jaxpr"], given, change)
        return change(eqn, given)

    return evaluate(closed, operands, rule)


def bind(eqn, given, **params):
    return results_of(eqn.replace(params=eqn.params | params) if params else eqn, given)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the equation that is evaluated as the n-th."""

    kind: str
    place: int
    which: int  # the operand, or another axis
    name: str


def is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def is_constant(v, x) -> bool:
    """Tells if an operand is a number of the program, or an array of one."""
    x = x if isinstance(x, np.ndarray | np.generic | int | float) else None
    return hasattr(v, "val") or x is not None


def axes_of(eqn, which: int):
    """Returns an equation's parameters with one axis moved to another of the same size."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.invars and eqn.invars[0].aval.shape
    if name.startswith("reduce_") and "axes" in params:
        (first, *rest) = params["axes"]
        if which not in params["axes"] and shape[which] == shape[first]:
            return {"axes": tuple(sorted((which, *rest)))}
    if name == "iota" and which != params["dimension"]:
        size = params["shape"]
        if size[which] == size[params["dimension"]]:
            return {"dimension": which}
    if name == "transpose":
        p = list(params["permutation"])
        i, j = which % len(p), (which + 1) % len(p)
        if i != j and shape[p[i]] == shape[p[j]] and shape[p[i]] > 1:
            p[i], p[j] = p[j], p[i]
            return {"permutation": tuple(p)}
    if name == "broadcast_in_dim" and shape:
        out, dims = params["shape"], list(params["broadcast_dimensions"])
        if (
            which not in dims
            and out[which] == out[dims[-1]]
            and [*dims[:-1], which] == sorted([*dims[:-1], which])
        ):
            return {"broadcast_dimensions": (*dims[:-1], which)}
    return None


def changes(closed) -> Iterator[Change]:
    """Yields the changes of a program."""
    found: list[Change] = []
    place = 0

    def visit(eqn, given):
        nonlocal place
        name, place = eqn.primitive.name, place + 1
        for i, v in enumerate(eqn.invars):
            if is_constant(v, given[i]) and not v.aval.ndim and v.aval.dtype != bool:
                found.append(Change("constant", place, i, name))
            elif hasattr(v, "aval") and is_float(v.aval) and not hasattr(v, "val"):
                found.append(Change("stop_gradient", place, i, name))
        if name == "integer_pow":
            found.append(Change("constant", place, 0, name))
        for axis in range(eqn.outvars[0].aval.ndim + 1):
            if axis < max([v.aval.ndim for v in (*eqn.invars, *eqn.outvars)]) and axes_of(
                eqn, axis
            ):
                found.append(Change("axis", place, axis, name))
        if len(eqn.outvars) == 1 and is_float(eqn.outvars[0].aval):
            found.append(Change("cast", place, 0, name))
        return bind(eqn, given)

    jax.eval_shape(lambda *operands: evaluated(closed, operands, visit), *closed.in_avals)
    return iter(found)


def changed(closed, change: Change) -> Callable:
    """Returns the program with a change, as a function of its operands."""

    def function(*operands):
        place = 0

        def step(eqn, given):
            nonlocal place
            place += 1
            if place != change.place:
                return bind(eqn, given)
            given, i = list(given), change.which
            match change.kind:
                case "constant" if eqn.primitive.name == "integer_pow":
                    return bind(eqn, given, y=eqn.params["y"] + 1)
                case "constant":
                    given[i] = another(np.asarray(given[i], eqn.invars[i].aval.dtype))
                case "axis":
                    return bind(eqn, given, **axes_of(eqn, i))
                case "cast":
                    (y,) = bind(eqn, given)
                    return [lax.convert_element_type(lax.convert_element_type(y, int), y.dtype)]
                case "stop_gradient":
                    given[i] = lax.stop_gradient(given[i])
            return bind(eqn, given)

        return evaluated(closed, operands, step)

    return function


def another(x):
    """Returns a number near a constant, of its dtype."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return np.asarray(x + 1, x.dtype)
    if not np.isfinite(x) or abs(x) > 1e30:  # a mask's fill
        return np.asarray(-1e5, x.dtype)
    return np.asarray(x * 1.001 if x else 0.001, x.dtype)


def rounds(closed) -> bool:
    """Tells if a program computes in float32, whatever its operands are."""
    found = []

    def visit(eqn, given):
        found.extend(v.aval for v in eqn.outvars if is_float(v.aval))
        return bind(eqn, given)

    jax.eval_shape(lambda *operands: evaluated(closed, operands, visit), *closed.in_avals)
    return any(aval.dtype != jnp.float64 for aval in found)


def program_of(case, dtype):
    function, args = case.make()
    leaves, tree = jax.tree.flatten(fuse_cases.cast(args, dtype))
    flat = lambda *leaves: function(*jax.tree.unflatten(tree, leaves))
    return jax.make_jaxpr(flat)(*leaves), leaves


def wrong(closed, leaves, change: Change, tolerance: float) -> str | None:
    """Returns how `fuse` changes a changed program; "" if it keeps it, None if it leaves it."""
    function = changed(closed, change)
    fused = fuse_cases.Fused(function)
    try:
        program = jax.make_jaxpr(function)(*leaves)
    except Exception:
        return None  # no program
    jax.make_jaxpr(fused)(*leaves)
    if not fused.served():
        return None
    theirs = fuse_cases.both_ways(fuse_cases.jaxpr_as_fun(program), leaves)
    ours = fuse_cases.both_ways(fused, leaves)
    try:
        for name, a, b in zip(("values", "gradients"), ours[:2], theirs[:2]):
            if name == "gradients" and not all(np.isfinite(y).all() for y in theirs[0]):
                break  # a label outside the vocabulary: of a loss that is NaN they may be anything
            difference = max(fuse_cases.errors(a, b, fuse_cases.floor_of(b)), default=0)
            if difference > tolerance:
                return f"{name} differ by {difference:.1e}: {fused.served()}"
        for a, b in zip(ours[2], theirs[2], strict=True):
            np.testing.assert_array_equal(a, b)
    except AssertionError as error:
        return f"{str(error).strip().splitlines()[0]}: {fused.served()}"
    return ""


def results(case, kinds=KINDS) -> Iterator[tuple[Change, str | None]]:
    """Yields each change of a spelling and what `wrong` says of it."""
    narrow = "mlp" in case.expected
    with jax.enable_x64(not narrow):
        try:
            closed, leaves = program_of(case, jnp.float32 if narrow else jnp.float64)
        except Exception:
            return  # it insists on other dtypes
        tolerance = 3e-5 if narrow or rounds(closed) else 1e-9
        for change in changes(closed):
            if change.kind in kinds:
                yield change, wrong(closed, leaves, change, tolerance)


def main(kinds) -> int:
    import collections
    import time

    from fuse.test_spellings import case as cases

    counts, began = collections.Counter(), time.time()
    for case in cases:
        for change, said in results(case, kinds or KINDS):
            counts[change.kind, "left" if said is None else "wrong" if said else "kept"] += 1
            if said:
                print(f"{case.name}: {change}: {said}", flush=True)
    print(dict(counts), f"{time.time() - began:.0f} s")
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
