"""Parts of a batch in one program, half a layer apart: one multiplies while another communicates.

A tensor-parallel layer gathers its input and scatters its output, and has nothing to do meanwhile.
Parts of a batch do not depend on each other, so XLA can schedule the products of one beside what
another communicates (Wang et al., Domino, arXiv:2409.15241). By itself it brings all parts to the
end of a layer at once, where each waits. Here they are tied to each other at the places that a
model marks with `pause`, each part one place behind the part before: when the first has normalised
what it is to gather, the second has made the first products of its layer, and has others to go.
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
    """Marks a pytree of arrays, which it returns: here another part has its turn.

    Mark by turns what is to be gathered, and what the first products with it have given. Within
    what is rematerialised, scanned or jitted by itself a mark means nothing, nor does it outside
    of `side_by_side`.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, _PAUSE), x)


def side_by_side(function: Callable[[Any], T], parts: Sequence[Any]) -> list[T]:
    """`[function(part) for part in parts]`, in the order described above.

    The results are those of the parts by themselves, and so are derivatives.

    Args:
      function: traced once for all parts; it may close over traced values.
      parts: pytrees of arrays, of the same shapes and dtypes.

    Raises:
      ValueError: the parts differ in structure, shape or dtype.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    kinds = [jax.tree.map(jax.typeof, part) for part in parts]
    for at, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"parts[{at}] is {kind} and parts[0] {kinds[0]}: side by side go parts of the same "
                "structure, shapes and dtypes. Cut the batch into equal ones."
            )
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(parts[0])
    courses = [_course(traced, jax.tree.leaves(part)) for part in parts]
    waiting: dict[int, Any] = {}  # what a part has marked last
    results: dict[int, list] = {}
    begun = 0
    while len(results) < len(parts):
        begun = min(begun + 1, len(parts))
        for at in (i for i in range(begun) if i not in results):
            try:
                waiting[at] = courses[at].send(waiting.pop(at, None))
            except StopIteration as end:
                results[at] = end.value
        if len(waiting) > 1:
            waiting = jax.lax.optimization_barrier(waiting)
    tree = jax.tree.structure(shapes)
    return [jax.tree.unflatten(tree, results[at]) for at in range(len(parts))]


def _course(traced: Any, operands: Sequence[jax.Array]) -> Generator[list, list, list]:
    """Evaluates a jaxpr with constants; yields what is marked, and goes on with what it is sent.

    Returns: its results.
    """
    jaxpr = traced.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *operands], strict=True))
    marks = lambda eqn: eqn.params.get("name") == _PAUSE
    for marked, eqns in itertools.groupby(jaxpr.eqns, marks):
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
