"""Element-wise functions as operations on global arrays: broadcasting, sharding and vmap.

Operands that lack dimensions of the result are not expanded in memory: `placed` says which they
have, and a dimension that vmap adds is one more that an operand may lack.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from ..native import elementwise as native
from ..native.elementwise import Dims, Types, result_shape
from ..native.elementwise_code import Function
from .op import Op, match, vary
from .partition import Loose, Split


def call(
    function: Function,
    operands: Sequence[jax.Array],
    placed: Dims,
    *,
    bound: Types,
    out: tuple[str, ...],
    strict: bool,
) -> list[jax.Array]:
    """Applies `function` to operands that have the dimensions `placed` of the result."""
    shape = result_shape(operands, placed)
    whole = [k for k, have in enumerate(placed) if len(have) == len(shape)]
    if not whole:  # each lacks a dimension: the largest is expanded
        operands, largest = list(operands), max(operands, key=lambda a: a.size)
        k = next(k for k, a in enumerate(operands) if a is largest)
        expanded = native.spread(largest, placed[k], len(shape))
        operands[k], whole = jnp.broadcast_to(expanded, shape), [k]
        placed = (*placed[:k], tuple(range(len(shape))), *placed[k + 1 :])
    split = [k for k in whole if any(jax.typeof(operands[k]).sharding.spec)]
    lead = (split or whole)[0]
    order = (lead, *[k for k in range(len(placed)) if k != lead])
    varying = [jax.typeof(a).manual_axis_type.varying for a in operands]
    first = vary(operands[lead], frozenset().union(*varying))
    bound_operands = [first, *[match(operands[k], first, placed[k]) for k in order[1:]]]
    return op(
        *bound_operands,
        axes=(),
        strict=strict,
        function=function,
        placed=placed,
        order=order,
        bound=bound,
        out=out,
    )


def restored(operands, order):
    """The operands in the function's order."""
    found = dict(zip(order, operands, strict=True))
    return [found[k] for k in range(len(order))]


def _definition(*operands, axes, function, placed, order, bound, out):
    del axes
    return native.definition(
        *restored(operands, order), function=function, placed=placed, bound=bound, out=out
    )


def _dims(ndim, *, placed, order, out, **_):
    whole = tuple(range(ndim))
    inputs = [
        placed[k] if i == 0 or placed[k] == whole else Loose(placed[k]) for i, k in enumerate(order)
    ]
    return tuple(inputs), (whole,) * len(out)


def _body(split: Split, *operands, axes, order, **params):
    del split, axes
    return native.kernel(*restored(operands, order), **params)


class _Elementwise(Op):
    """An Op whose function may have no definition in plain JAX."""

    def plain(self, *operands, strict=False, **params):
        """The definition; without one the kernel on whole arrays, which XLA gathers for it."""
        if params["function"].definition is not None:
            return super().plain(*operands, strict=strict, **params)
        whole = Split.none(result_shape(restored(operands, params["order"]), params["placed"]))
        return _body(whole, *operands, strict=strict, **params)

    def _lower(self, ctx, *values, **params):
        named = ("function", "placed", "bound", "out")
        avals = restored(ctx.avals_in, params["order"])
        native.compile_for(ctx, avals, **{name: params[name] for name in named})
        return super()._lower(ctx, *values, **params)


op = _Elementwise("elementwise", _definition, _dims, _body)


def _batch(args, batched, *, function, placed, order, bound, out, strict, axes):
    """The batch dimension is one more of the result's; operands without it lack it."""
    del axes
    operands, batched = restored(args, order), restored(batched, order)
    ndim = max(map(len, placed))
    at = next((b for b, have in zip(batched, placed) if b is not None and len(have) == ndim), 0)
    moved, new = [], []
    for operand, b, have in zip(operands, batched, placed):
        shifted = tuple(d + (d >= at) for d in have)
        if b is not None:
            place = sum(d < at for d in have)
            operand = jnp.moveaxis(operand, b, place)
            shifted = (*shifted[:place], at, *shifted[place:])
        moved.append(operand)
        new.append(shifted)
    results = call(function, moved, tuple(new), bound=bound, out=out, strict=strict)
    return results, [at] * len(results)


batching.primitive_batchers[op.primitive] = _batch
