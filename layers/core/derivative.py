"""First derivatives: an operation writes its definition, its forward and its backward.

The tangent is that of the definition, an operation of its own, linear in the tangents, in plain
HLO; its transpose is the backward. So reverse mode runs the backward wherever JAX transposes (grad,
linearize, scan, remat, vmap), while forward mode costs what the definition costs.

A function of several operations, `call`ed, is a frozen dataclass of all that is known when it is
traced:

    op, order                             the function the user called, and the kernels to try
    forward(operands, moves) -> results, kept
    tangents(*tangents) -> flat list      a tangent for each of `moves`, zeros as they are
    tangent(kept, tangents) -> tangents of the results
    gradients(cts, kept, likes) -> gradients
    rows(kept) -> places or None          of a batch dimension; see `Tangent`
    with_batch() -> function              of rows with one more dimension, the first
    before()                              if there is one: called where the tangent is lowered

`kept` is a tree of arrays, None for what is not there; so are tangents that do not move, gradients
of results that nobody uses and, among `likes`, the types of tangents without a gradient.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jax.sharding import NamedSharding

from ...native.implementation import BEST, Order
from .op import Op, jvp_along


def moves(tangent: Any) -> bool:
    """Returns whether there is a tangent, in a rule with symbolic zeros."""
    return tangent is not None and not isinstance(tangent, SymbolicZero | ad.Zero)


# ---------------------------------------------------------------- functions of several operations


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def call(function: Any, *operands: Any) -> tuple[Array, ...]:
    """Returns the results of a function, with its derivative."""
    return tuple(function.forward(operands, None)[0])


@functools.partial(call.defjvp, symbolic_zeros=True)
def _(function, primals, tangents):
    flat = function.tangents(*tangents)
    results, kept = function.forward(primals, tuple(map(moves, flat)))
    return tuple(results), tuple(linear(function, kept, flat, results))


def linear(function: Any, kept: Any, tangents: Sequence[Any], results: Sequence[Any]) -> Any:
    """Returns the tangents of the results, which give their types, at what the forward kept."""
    moving = [t for t in tangents if moves(t)]
    if not moving:
        return [jnp.zeros_like(r) for r in results]
    leaves, tree = jax.tree.flatten(kept)
    types = tuple(jax.typeof(r) for r in results)
    return tangent(Tangent(function, tree, tuple(map(moves, tangents)), types), *leaves, *moving)


# ---------------------------------------------------------------- single operations


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An `Op` at its operands; kept are these, and what else its backward reads."""

    differentiated: Op
    backward: Callable[..., list[Any]]
    spec: Any
    order: Order

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.spec.op

    def rows(self, kept: Any) -> None:
        """Batches of the operation itself are its own rule's."""

    def tangent(self, kept: Any, tangents: Sequence[Any]) -> Sequence[Array]:
        """Returns the tangent of the definition."""
        plain = functools.partial(self.differentiated.plain, self.spec)
        return jvp_along(plain, kept[0], tangents)[1]

    def gradients(self, cts: Any, kept: Any, likes: Sequence[Any]) -> list[Any]:
        """Returns the backward's gradients, of the types of the operands."""
        wanted = [like is not None for like in likes]
        found = self.backward(self.spec, cts, *kept, wanted, order=self.order)
        return [None if t is None else g.astype(t.dtype) for g, t in zip(found, likes, strict=True)]


def operation(
    op: Op, backward: Callable[..., list[Any]], spec: Any, order: Order = BEST
) -> Callable[..., list[Array]]:
    """Returns `(operands, tangents, results, more=()) -> tangents of the results` of an operation.

    `backward(spec, cts, operands, more, wanted, order) -> gradients`, one for each of the operands;
    those that are not wanted may be None. `more` are results or others that it reads.
    """
    function = _Operation(op, backward, spec, order)

    def tangents_of(operands: Any, tangents: Any, results: Any, more: Any = ()) -> Any:
        return linear(function, (list(operands), list(more)), tangents, results)

    return tangents_of


def define(op: Op, backward: Callable[..., list[Any]]) -> None:
    """Gives an operation a derivative that reads its operands alone; see `operation`."""

    def jvp(primals: Any, tangents: Any, *, spec: Any, order: Order) -> Any:
        results = op(spec, *primals, order=order)
        return results, operation(op, backward, spec, order)(primals, tangents, results)

    ad.primitive_jvps[op.primitive] = jvp


# ---------------------------------------------------------------- the tangent


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The tangent of a function. Its operands are what was kept, then the tangents that there are.

    A batch of rows becomes one more dimension of them where `function.rows` gives each operand's
    place for it, -1 for those that must not have it, as a prefix of `(kept, tangents)`. Otherwise
    it is one of `vmaps`, the outermost first: operands that are marked have one more dimension, the
    first.
    """

    function: Any
    kept: Any  # the structure of what was kept
    moves: tuple[bool, ...]
    results: tuple[Any, ...] = ()  # their types, where they are known
    vmaps: tuple[tuple[bool, ...], ...] = ()

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.function.op

    def read(self, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns what was kept, and a tangent or None for each of `moves`."""
        count = self.kept.num_leaves
        moving = iter(operands[count:])
        return self.kept.unflatten(operands[:count]), [
            next(moving) if m else None for m in self.moves
        ]

    def places(self) -> list[int] | None:
        """Returns the place of a batch dimension of rows in each operand; -1 for none."""
        kept = self.kept.unflatten([0] * self.kept.num_leaves)
        if self.vmaps or (rows := self.function.rows(kept)) is None:
            return None
        kept = jax.tree.broadcast(rows[0], kept)
        return [*jax.tree.leaves(kept), *[p for p, moved in zip(rows[1], self.moves) if moved]]


def _define(spec: Tangent, *operands: Array) -> list[Array]:
    if spec.vmaps:
        return _vmapped(_define, spec)(*operands)
    return list(spec.function.tangent(*spec.read(operands)))


def _vmapped(function: Callable[..., Any], spec: Tangent, *lead: int) -> Callable[..., Any]:
    """Returns `function` of a tangent's operands in the outermost of its vmaps."""
    axes = [0 if has else None for has in spec.vmaps[0]]
    one = functools.partial(function, replace(spec, vmaps=spec.vmaps[1:]))
    return jax.vmap(one, (*lead, *axes))


def _batch(op: Op, operands: Any, dims: Any, *, spec: Tangent, order: Order) -> Any:
    places = spec.places()
    if places is not None and all((d is None) == (p < 0) for d, p in zip(dims, places)):
        spec = replace(spec, function=spec.function.with_batch(), results=())
    else:
        has = tuple(d is not None for d in dims)
        places, spec = [0] * len(dims), replace(spec, vmaps=(has, *spec.vmaps), results=())
    moved = [a if d is None else jnp.moveaxis(a, d, p) for a, d, p in zip(operands, dims, places)]
    results = op(spec, *moved, order=order)
    return results, [0] * len(results)


def _gradients(spec: Tangent, cts: Any, kept: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """Returns the gradient of each tangent that there is."""
    if not spec.vmaps:
        found = spec.function.gradients(cts, *spec.read([*kept, *likes]))
        return [gradient for gradient, moved in zip(found, spec.moves) if moved]
    of_kept, of_tangents = spec.vmaps[0][: len(kept)], spec.vmaps[0][len(kept) :]
    types = [t if t is None or not h else _unstacked(t) for t, h in zip(likes, of_tangents)]
    one = lambda spec, cts, *kept: _gradients(spec, cts, kept, types)
    found = _vmapped(one, replace(spec, vmaps=(of_kept, *spec.vmaps[1:])), 0)(cts, *kept)
    summed = [f if f is None or h else jnp.sum(f, 0) for f, h in zip(found, of_tangents)]
    return [f if f is None else f.astype(like.dtype) for f, like in zip(summed, likes)]


def _unstacked(aval: Any) -> Any:
    """Returns the type of one of the arrays that are stacked."""
    sharding = NamedSharding(aval.sharding.mesh, jax.P(*aval.sharding.spec[1:]))
    return aval.update(shape=aval.shape[1:], sharding=sharding)


def _transpose(cts: Any, *operands: Any, spec: Tangent, order: Order) -> list[Any]:
    del order
    cts = tuple(None if type(ct) is ad.Zero else ct for ct in cts)
    if all(ct is None for ct in cts):
        return [None] * len(operands)
    count = spec.kept.num_leaves
    likes = [t.aval if ad.is_undefined_primal(t) else None for t in operands[count:]]
    return [None] * count + _gradients(spec, cts, operands[:count], likes)


def _before(ctx: Any, spec: Tangent, order: Order) -> Order:
    del ctx
    if before := getattr(spec.function, "before", None):
        before()
    return order


tangent = Op(
    "tangent",
    _define,
    batch=_batch,
    transpose=_transpose,
    types=lambda spec: spec.results,
    before=_before,
)
