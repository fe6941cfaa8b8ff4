"""First derivatives: the tangent of an operation, whose transpose is its backward.

An operation writes its definition f and its backward b, with b(x, dy) = Jᵀ dy for the Jacobian J of
f at x. JAX wants a rule for tangents, dy = J dx, and derives reverse mode from it: it transposes
what is linear in dx. So

    dy = tangent(kept, dx)             J dx, of the definition, an operation of its own in plain HLO
    dx = gradients(dy, kept)           its transpose, Jᵀ dy: the backward, on kernels

Reverse mode runs the backward wherever JAX transposes (grad, linearize, scan, remat, vmap), while
forward mode costs what the definition costs. `kept` are the operands and what else the backward
reads. Second derivatives are those of the two.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad
from jax.sharding import NamedSharding

from ...native.implementation import BEST, Order
from .op import Batching, Derivative, Op, jvp_along, moves


class Function:
    """A function of several operations, which `differentiable` and `linear` call.

    A frozen dataclass of all that is known when it is traced: `op`, the function the user called,
    and `order`, the kernels to try, among it. `kept` is a tree of arrays, None for what is not
    there; so are tangents that do not move, gradients of results that nobody uses and, among
    `likes`, the types of tangents without one.
    """

    def forward(self, operands: Any, moved: Any) -> tuple[Sequence[Array], Any]:
        """Returns the results, and what the derivative keeps for the tangents that move."""
        raise NotImplementedError

    def tangents(self, *tangents: Any) -> Sequence[Any]:
        """Returns a tangent for each of `moves`, given one for each operand."""
        raise NotImplementedError

    def tangent(self, kept: Any, tangents: Sequence[Any]) -> Sequence[Array]:
        """Returns the tangents of the results."""
        raise NotImplementedError

    def gradients(self, cts: Any, kept: Any, likes: Sequence[Any]) -> Sequence[Any]:
        """Returns a gradient for each of `likes`."""
        raise NotImplementedError

    def rows(self, kept: Any) -> Any:
        """Returns the places of a batch dimension, see `Tangent`; None: it is batched by vmap."""
        del kept

    def with_batch(self) -> "Function":
        """Returns the function of rows with one more dimension, the first."""
        raise NotImplementedError

    def with_kernels(self, kept: Any, tangents: Sequence[Any]) -> "Function | None":
        """Returns the function where those that are True have one more dimension, the first.

        None, the default, where vmap has to batch it.
        """
        del kept, tangents


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def differentiable(function: Function, *operands: Any) -> tuple[Array, ...]:
    """Returns the results of a function, with its derivative."""
    return tuple(function.forward(operands, None)[0])


@functools.partial(differentiable.defjvp, symbolic_zeros=True)
def _(function, primals, tangents):
    flat = function.tangents(*tangents)
    results, kept = function.forward(primals, tuple(map(moves, flat)))
    return tuple(results), tuple(linear(function, kept, flat, results))


def linear(function: Function, kept: Any, tangents: Sequence[Any], results: Sequence[Any]) -> Any:
    """Returns the tangents of the results, which give their types, at what the forward kept."""
    moving = [t for t in tangents if moves(t)]
    if not moving:
        return [jnp.zeros_like(r) for r in results]
    leaves, tree = jax.tree.flatten(kept)
    types = tuple(jax.typeof(r) for r in results)
    return tangent(Tangent(function, tree, tuple(map(moves, tangents)), types), *leaves, *moving)


@dataclasses.dataclass(frozen=True)
class _Operation(Function):
    """An `Op` at its operands; kept are these, and what else its backward reads."""

    differentiated: Op
    backward: Callable[..., list[Any]]
    spec: Any
    order: Order

    def rows(self, kept: Any) -> None:
        """Batches of the operation itself are its own rule's."""

    def tangent(self, kept: Any, tangents: Sequence[Any]) -> Sequence[Array]:
        """Returns the tangent of the definition, unless the operation has one of its own."""
        derivative = self.differentiated.derivative
        if derivative.tangent:
            return derivative.tangent(self.spec, kept[0], tangents, order=self.order)
        formula = derivative.formula or self.differentiated.plain
        along = [t if t is None else t.astype(a.dtype) for t, a in zip(tangents, kept[0])]
        return jvp_along(lambda *a: list(formula(self.spec, *a)), kept[0], along)[1]

    def gradients(self, cts: Any, kept: Any, likes: Sequence[Any]) -> list[Any]:
        """Returns the backward's gradients, of the types of the operands."""
        wanted = [like is not None for like in likes]
        gradients = self.backward(self.spec, cts, *kept, wanted, order=self.order)
        return [
            None if t is None else g.astype(t.dtype) for g, t in zip(gradients, likes, strict=True)
        ]


def tangents_of(
    op: Op,
    backward: Callable[..., list[Any]],
    spec: Any,
    operands: Sequence[Array],
    tangents: Sequence[Any],
    results: Sequence[Array],
    more: Sequence[Array] = (),
    order: Order = BEST,
) -> list[Array]:
    """Returns the tangents of an operation's results.

    `backward(spec, cts, operands, more, wanted, order) -> gradients`, one for each of the operands;
    those that are not wanted may be None. `more` are results or others that it reads.
    """
    function = _Operation(op, backward, spec, order)
    return linear(function, (list(operands), list(more)), tangents, results)


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The tangent of a function. Its operands are what was kept, then the tangents that there are.

    A batch of rows becomes one more dimension of them where `function.rows` gives each operand's
    place for it, -1 for those that must not have it, as a prefix of `(kept, tangents)`. Otherwise
    it is one of `vmaps`, the outermost first: operands that are marked have one more dimension, the
    first.
    """

    function: Function
    kept: Any  # the structure of what was kept
    moves: tuple[bool, ...]
    results: tuple[Any, ...] = ()  # their types, where they are known
    vmaps: tuple[tuple[bool, ...], ...] = ()

    def read(self, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns the kept arrays, and a tangent or None for each of `moves`."""
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


def _define_tangent(spec: Tangent, *operands: Array) -> list[Array]:
    if spec.vmaps:
        return _vmapped(_define_tangent, spec)(*operands)
    return list(spec.function.tangent(*spec.read(operands)))


def _vmapped(function: Callable[..., Any], spec: Tangent, *lead: int) -> Callable[..., Any]:
    """Returns `function` of a tangent's operands in the outermost of its vmaps."""
    axes = [0 if has else None for has in spec.vmaps[0]]
    one = functools.partial(function, replace(spec, vmaps=spec.vmaps[1:]))
    return jax.vmap(one, (*lead, *axes))


def _batch_tangent(op: Op, operands: Any, dims: Any, *, spec: Tangent, order: Order) -> Any:
    places, has = spec.places(), tuple(d is not None for d in dims)
    if places is not None and all(h == (p >= 0) for h, p in zip(has, places)):
        spec = replace(spec, function=spec.function.with_batch(), results=())
    else:
        places = [0] * len(dims)
        if not spec.vmaps and (function := spec.function.with_kernels(*spec.read(has))):
            spec = replace(spec, function=function, results=())
        else:
            spec = replace(spec, vmaps=(has, *spec.vmaps), results=())
    moved = [a if d is None else jnp.moveaxis(a, d, p) for a, d, p in zip(operands, dims, places)]
    results = op(spec, *moved, order=order)
    return results, [0] * len(results)


def _gradients(spec: Tangent, cts: Any, kept: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """Returns the gradient of each tangent that there is."""
    if not spec.vmaps:
        gradients = spec.function.gradients(cts, *spec.read([*kept, *likes]))
        return [gradient for gradient, moved in zip(gradients, spec.moves) if moved]
    of_kept, of_tangents = spec.vmaps[0][: len(kept)], spec.vmaps[0][len(kept) :]
    types = [t if t is None or not h else _unstacked(t) for t, h in zip(likes, of_tangents)]
    one = lambda spec, cts, *kept: _gradients(spec, cts, kept, types)
    gradients = _vmapped(one, replace(spec, vmaps=(of_kept, *spec.vmaps[1:])), 0)(cts, *kept)
    summed = [f if f is None or h else jnp.sum(f, 0) for f, h in zip(gradients, of_tangents)]
    return [f if f is None else f.astype(like.dtype) for f, like in zip(summed, likes)]


def _unstacked(aval: Any) -> Any:
    sharding = NamedSharding(aval.sharding.mesh, jax.P(*aval.sharding.spec[1:]))
    return aval.update(shape=aval.shape[1:], sharding=sharding)


def _transpose_tangent(cts: Any, *operands: Any, spec: Tangent, order: Order) -> list[Any]:
    del order
    cts = tuple(None if type(ct) is ad.Zero else ct for ct in cts)
    if all(ct is None for ct in cts):
        return [None] * len(operands)
    count = spec.kept.num_leaves
    likes = [t.aval if ad.is_undefined_primal(t) else None for t in operands[count:]]
    return [None] * count + _gradients(spec, cts, operands[:count], likes)


tangent = Op(
    "tangent",
    _define_tangent,
    batching=Batching(rule=_batch_tangent),
    derivative=Derivative(transpose=_transpose_tangent),
    types=lambda spec, *_: spec.results,
)
