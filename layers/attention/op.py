"""Attention and its derivatives as operations on arrays of any placement.

Batch and heads may be split over any axes of a mesh, and so may the query heads that share a head
of keys: their devices then add up the gradients of keys and values. Lengths and widths are whole.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from ...native.implementation import Order, Unsupported, report
from ...native.kernel import Body, Kernel, lower
from ..core.derivative import tangents_of
from ..core.op import (
    Batching,
    Derivative,
    Op,
    Placement,
    Split,
    batch_at,
    jvp_along,
    match,
    where_lowered,
)
from . import blocks
from .spec import Dimensions, Spec, numbers

CUDNN = Order(("cudnn",), strict=True)
CUDNN_OR_BLOCKS = Order(("cudnn",), strict=False)
BLOCKS = Order(("xla",), strict=False)

NAMES = "attention", "attention_lse", "attention_lse"
"""Names of the forward's results that the backward keeps, for `jax.checkpoint`'s policies."""


# ---------------------------------------------------------------- one device's share


class _Share(Kernel):
    """Attention, or its gradients, on one device: by cuDNN, or in blocks of plain JAX."""

    def __init__(self, name: str, definition: Body, function: str):
        self._function = function  # its name in `cudnn`
        super().__init__(name, definition, {})

    def _lower(
        self, platform: str | None, ctx: Any, *values: Any, spec: Spec, order: Order, tree: Any
    ) -> Any:
        del tree  # all are there
        if order.names != BLOCKS.names:
            try:
                return lower(self._by_cudnn(platform, ctx, spec), ctx, *values)
            except Unsupported as error:
                where = "/".join(ctx.module_context.platforms)
                if order.strict:
                    raise _refusal(spec, f"on {where}, {error}") from None
                if platform == "cuda":
                    report(spec.op, f"on {where}, {error}", names=("cudnn",), by="blocks")
        definition = functools.partial(self.definition, spec, gpu=platform in ("cuda", "rocm"))
        return lower(definition, ctx, *values)

    def _by_cudnn(self, platform: str | None, ctx: Any, spec: Spec) -> Body:
        if platform != "cuda":
            raise Unsupported("there is no cuDNN")
        from ...native.launch import target_for  # only a CUDA lowering needs the CUDA engine
        from . import cudnn

        return functools.partial(getattr(cudnn, self._function), target_for(ctx).capability, spec)


def _refusal(spec: Spec, reason: str) -> NotImplementedError:
    return NotImplementedError(
        f"{spec.op}: implementation='cudnn' cannot serve here: {reason}. Use implementation=None "
        "to let blocks of plain JAX serve what cuDNN cannot."
    )


def _refuse_plain(ctx: Any, spec: Spec, order: Order) -> Order:
    if order.strict and (reason := where_lowered(ctx, ctx.avals_in[0]).plain):
        raise _refusal(spec, reason)
    return order


_forward = _Share("attention_share", blocks.forward, "forward")
_gradients = _Share("attention_gradients_share", blocks.gradients, "gradients")


def _gradients_body(spec: Spec, split: Split, *operands: Array, order: Order) -> list[Array]:
    dq, dk, dv, *dbias = _gradients(spec, *operands, order=order)
    d = numbers(operands[0].ndim)
    dk, dv = split.psum(dk, [d.group]), split.psum(dv, [d.group])
    absent = [n for n in d.rows if n not in spec.dims.get("bias", ())]
    return [dq, dk, dv, *[split.psum(b, absent) for b in dbias]]


# ---------------------------------------------------------------- batching


def _batch(
    op: Op, args: Sequence[Array], batched: Sequence[int | None], *, spec: Spec, order: Order
) -> tuple[list[Array], list[int]]:
    """A batch dimension is one more of batch, the first; a bias or mask without it stays without.

    But each example has its own gradient of the bias, which then has it too.
    """
    size = next(a.shape[b] for a, b in zip(args, batched) if b is not None)
    old, _ = op.placement.dims(spec, args[0].ndim - (batched[0] is not None), 0)  # pyright: ignore
    extras = range(3, 3 + len(spec.extras))
    moved, dims = [], []
    for i, (array, at) in enumerate(zip(args, batched)):
        has = at is not None or i not in extras or (spec.dbias and i == 3)
        moved.append(batch_at(array, at, 0, size) if has else array)
        dims.append((*[0] * has, *[n + 1 for n in old[i]]))
    spec = replace(spec, extras=tuple((name, dims[3 + i]) for i, name in enumerate(spec.dims)))
    placed = [match(a, moved[0], n) for a, n in zip(moved, dims)]
    results = op(spec, *placed, order=order)
    return results, [0] * len(results)


# ---------------------------------------------------------------- derivatives
# The backward runs in blocks. The tangent and second derivatives are the formula's, with all scores
# in memory, where out and the statistics are functions of the other operands.


def _backward(
    spec: Spec, cts: Any, operands: Any, results: Any, wanted: Any, *, order: Order
) -> list[Any]:
    """Returns the gradients of q, k, v and the bias; None of the other extras."""
    dbias = "bias" in spec.dims and wanted[3]
    found = gradients(replace(spec, dbias=dbias), *operands, *results, *cts, order=order)
    return found + [None] * (len(operands) - len(found))


def _forward_jvp(primals: Any, tangents: Any, *, spec: Spec, order: Order) -> Any:
    results = attention(replace(spec, statistics=2), *primals, order=order)
    saved = [checkpoint_name(r, name) for r, name in zip(results, NAMES)]
    count = 3 + ("bias" in spec.dims)  # masks and segments have no tangents
    moving = [*tangents[:count], *[None] * (len(tangents) - count)]
    dout = tangents_of(attention, _backward, spec, primals, moving, saved[:1], saved, order=order)
    zeros = [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in saved[1:]]
    count = 1 + spec.statistics
    return saved[:count], [*dout, *zeros][:count]


def _gradients_jvp(primals: Any, tangents: Any, *, spec: Spec, order: Order) -> Any:
    first = 3 + len(spec.extras)
    without = lambda arrays: [*arrays[:first], *arrays[first + 3 :]]  # out and the statistics
    formula = functools.partial(blocks.square_gradients, spec)
    _, dresults = jvp_along(formula, without(primals), without(tangents))
    return gradients(spec, *primals, order=order), dresults


# ---------------------------------------------------------------- operations


def _undivided(spec: Spec, q_ndim: int, k_ndim: int) -> Dimensions:
    d = numbers(q_ndim)
    return d.length, d.width, d.keys


_op = functools.partial(Op, batching=Batching(rule=_batch), before=_refuse_plain)
_placed = functools.partial(Placement, leads=(0, 1), undivided=_undivided)
attention = _op(
    "attention",
    blocks.forward,
    _placed(
        Spec.forward_dims,
        lambda spec, split, *operands, order: _forward(spec, *operands, order=order),
    ),
    derivative=Derivative(
        jvp=_forward_jvp, formula=lambda spec, *operands: [blocks.square(spec, *operands)[0]]
    ),
    without_last=lambda s: replace(s, statistics=s.statistics - 1) if s.statistics else None,
)
gradients = _op(
    "attention_gradients",
    blocks.gradients,
    _placed(Spec.gradients_dims, _gradients_body),
    derivative=Derivative(jvp=_gradients_jvp),
)
