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

    Marks alternate: an array that is gathered next, and the results of the first products with it.
    They have no effect outside of `side_by_side`, nor inside a function that is itself
    rematerialised, scanned or jitted.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, _PAUSE), x)


def side_by_side(function: Callable[[Any], T], parts: Sequence[Any]) -> list[T]:
    """Returns `[function(part) for part in parts]`, interleaved; the parts are alike."""
    if len(parts) == 1:
        return [function(parts[0])]
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(parts[0])
    running = {i: _evaluation(traced, jax.tree.leaves(part)) for i, part in enumerate(parts)}
    marked: dict[int, Any] = {}  # the arrays that each part marked last
    results: dict[int, Any] = {}
    for begun in itertools.count(1):
        for i in [i for i in running if i < begun]:
            try:
                marked[i] = running[i].send(marked.pop(i, None))
            except StopIteration as end:
                results[i] = jax.tree.unflatten(jax.tree.structure(shapes), end.value)
                del running[i]
        if not running:
            return [results[i] for i in range(len(parts))]
        marked = jax.lax.optimization_barrier(marked) if len(marked) > 1 else marked
    raise AssertionError


def _evaluation(traced: Any, operands: Sequence[jax.Array]) -> Generator[list, list, list]:
    """Yields the arrays of each mark, goes on with those that it is sent, and returns results."""
    jaxpr = traced.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *operands], strict=True))
    for marks, eqns in itertools.groupby(jaxpr.eqns, lambda e: e.params.get("name") == _PAUSE):
        if marks:
            names = [(eqn.invars[0], eqn.outvars[0]) for eqn in eqns]
            sent = yield [value_of(before, values) for before, _ in names]
            values |= zip((after for _, after in names), sent, strict=True)
            continue
        for eqn in eqns:
            with eqn.ctx.manager:
                results = results_of(eqn, [value_of(atom, values) for atom in eqn.invars])
            values |= zip(eqn.outvars, results, strict=True)
    return [value_of(atom, values) for atom in jaxpr.outvars]
