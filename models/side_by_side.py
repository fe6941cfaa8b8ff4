"""Interleaved parts of a batch: the matrix products of one overlap the communication of another.

A tensor-parallel layer gathers its input and scatters its output, and waits for both. Parts of a
batch do not depend on each other, so XLA can schedule the products of one during the communication
of another (Wang et al., Domino, arXiv:2409.15241). By itself it brings all parts to the end of a
layer at once, where each waits. `side_by_side` therefore ties them together with optimization
barriers at the places that a model marks with `pause`, each part one place behind the part before:
when one part has normalised what it gathers next, the other has its layer's first products done and
has more to compute.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from ..native.jaxpr import results_of, value_of

T = TypeVar("T")
_PAUSE = "normfuse_pause"


def pause(x: T) -> T:
    """Returns a pytree of arrays, marked as a place where the parts of a batch interleave.

    Mark alternately an array that is gathered next, and the results of the first products with it.
    Marks have no effect outside of `side_by_side`, nor inside a function that is itself
    rematerialised, scanned or jitted.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, _PAUSE), x)


def side_by_side(function: Callable[[Any], T], parts: Sequence[Any]) -> list[T]:
    """Returns `[function(part) for part in parts]`, interleaved at the places marked by `pause`.

    Results and derivatives are those of each part by itself.

    Args:
      function: traced once for all parts; it may close over traced values.
      parts: pytrees of arrays, of the same shapes and dtypes.

    Raises:
      ValueError: if the parts differ in structure, shape or dtype.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    kinds = [jax.tree.map(jax.typeof, part) for part in parts]
    for at, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"parts[{at}] is {kind}, but parts[0] is {kinds[0]}: parts must have the same "
                "structure, shapes and dtypes. Cut the batch into equal parts."
            )
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(parts[0])
    evaluations = [_evaluate(traced, jax.tree.leaves(part)) for part in parts]
    marked: dict[int, Any] = {}  # the arrays that each part marked last
    results: dict[int, list] = {}
    begun = 0
    while len(results) < len(parts):
        begun = min(begun + 1, len(parts))
        for at in (i for i in range(begun) if i not in results):
            try:
                marked[at] = evaluations[at].send(marked.pop(at, None))
            except StopIteration as end:
                results[at] = end.value
        if len(marked) > 1:
            marked = jax.lax.optimization_barrier(marked)
    tree = jax.tree.structure(shapes)
    return [jax.tree.unflatten(tree, results[at]) for at in range(len(parts))]


def _evaluate(traced: Any, operands: Sequence[jax.Array]) -> Generator[list, list, list]:
    """Evaluates a closed jaxpr and returns its results.

    Yields the arrays of each mark, and continues with those that it is sent.
    """
    jaxpr = traced.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *operands], strict=True))
    is_mark = lambda eqn: eqn.params.get("name") == _PAUSE
    for marked, eqns in itertools.groupby(jaxpr.eqns, is_mark):
        if marked:
            names = [(eqn.invars[0], eqn.outvars[0]) for eqn in eqns]
            sent = yield [value_of(made, values) for made, _ in names]
            values |= zip((after for _, after in names), sent, strict=True)
            continue
        for eqn in eqns:
            given = [value_of(atom, values) for atom in eqn.invars]
            with eqn.ctx.manager:
                values |= zip(eqn.outvars, results_of(eqn, given), strict=True)
    return [value_of(atom, values) for atom in jaxpr.outvars]
