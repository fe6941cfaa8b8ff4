"""A norm that writes codes, and FP8 products elsewhere in the program that read them.

    n = norm(x [+ residual]) · (scale + offset) [+ bias]        y_i = n · W_i

`fuse` writes these in place of a norm, and of the products. n is never in memory: one pass writes
its codes in both layouts, with the scale that follows from the norm's bound (`quantization.norm`),
and all products read them. The gradient of n goes through the norm's own backward, which reads x
(or x + residual) and one or two float32 a row.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import Array

from ...native.implementation import Order
from ..core.derivative import Function, differentiable
from ..core.op import (
    Batching,
    Derivative,
    Op,
    all_there,
    equally_varying,
    jvp_along,
    on_unused_results,
)
from ..norm import op as rms_norm
from ..norm.spec import Norm
from ..quantization import norm as quantized_norm
from ..quantization.norm import Normalised, NormCodes
from ..quantization.quantize import Codes
from .fp8 import FORMAT, Marked, derived


def encode(norm: Norm, args: Sequence[Any], order: Order) -> tuple[list[Array], Normalised]:
    """Normalises `args`, which are x, residual, scale and bias, for products elsewhere.

    Returns:
      `([y][, h], codes)`: y and h = x + residual as the norm itself returns them, and codes of y
      from the pass that writes h. A program that uses y for its derivative alone does not compute
      it, and one without the gradient of a kernel does not write qt.
    """
    spec = NormCodes(norm, Codes(FORMAT, True, True, norm.op))
    codes = quantized_norm.quantize(spec, *jax.lax.stop_gradient(tuple(args)), order=order)
    return list(_normalised(norm, order, tuple(args), codes.h, (codes.mean, codes.rstd))), codes


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _normalised(
    norm: Norm, order: Order, args: tuple[Any, ...], h: Array, statistics: tuple[Any, Array]
) -> tuple[Array, ...]:
    """Returns y, and h where it is a result, for statistics that are there."""
    del statistics
    alone = replace(norm, with_mean=False, with_rstd=False)
    y, *_ = rms_norm.forward(alone, *args, order=order)
    return (y,) if args[1] is None else (y, h)


@functools.partial(_normalised.defjvp, symbolic_zeros=True)
def _(norm, order, primals, tangents):
    (args, h, statistics), (dargs, *_) = primals, tangents
    results = _normalised(norm, order, args, h, statistics)
    there, codes = [a for a in args if a is not None], Codes(op=norm.op)
    kept = [v if v is None else derived(codes, v, *there)[0] for v in (h, *statistics)]
    alone = replace(norm, with_mean=False, with_rstd=False)
    return results, tuple(rms_norm.tangents_of(alone, args, dargs, results, kept, order))


@dataclasses.dataclass(frozen=True)
class Encoded(Function):
    """A call of a function that `mark_input` marked, of an x whose codes are there."""

    marked: Marked
    has_qt: bool = True
    vmaps: tuple[tuple[int | None, ...], ...] = ()  # each with the operands' dims, outermost first


def multiply_encoded(marked: Marked, x: Array, y: Any, operands: Sequence[Array]) -> list[Array]:
    """Returns the results of a marked function for x, whose codes are those of y, and operands."""
    x, *codes = equally_varying(x, y.q, y.scale, y.qt)
    return encoded(Encoded(marked), x, *codes, *operands)


def _define_encoded(spec: Encoded, *leaves: Array) -> list[Array]:
    """`(x, q, scale[, qt], *operands) -> results` of the function, which has its derivative."""
    if spec.vmaps:
        inner = functools.partial(_define_encoded, replace(spec, vmaps=spec.vmaps[1:]))
        return jax.vmap(inner, spec.vmaps[0])(*leaves)
    x, q, scale, *others = leaves
    qt = others.pop(0) if spec.has_qt else None
    marked = spec.marked
    _, *operands = jax.tree.unflatten(marked.tree, [x, *others])
    return list(differentiable(marked.spec, (x, q, qt, scale), *operands))


def _batch_encoded(op: Op, args: Any, dims: Any, *, spec: Encoded, order: Order) -> Any:
    results = op(replace(spec, vmaps=(tuple(dims), *spec.vmaps)), *args, order=order)
    return results, [0] * len(results)


def _push_encoded(primals: Any, tangents: Any, *, spec: Encoded, order: Order) -> Any:
    """The function's own derivative, for what moves."""
    del order
    return jvp_along(functools.partial(_define_encoded, spec), primals, tangents)


def _drop_qt(_: list[bool], eqn: Any) -> Any:
    """Dead code: without a derivative nobody reads qt, and the norm need not write it."""
    spec, reads = eqn.params["spec"], [True] * len(eqn.invars)
    if spec.has_qt:
        reads[3] = False
        vmaps = tuple((*dims[:3], *dims[4:]) for dims in spec.vmaps)
        invars = [v for v, read in zip(eqn.invars, reads) if read]
        changed = {"spec": replace(spec, has_qt=False, vmaps=vmaps), "tree": all_there(invars)}
        params = {**eqn.params, **changed}
        eqn = eqn.replace(invars=invars, params=params)
    return reads, eqn


encoded = Op(
    "fp8_encoded",
    _define_encoded,
    batching=Batching(rule=_batch_encoded),
    derivative=Derivative(jvp=_push_encoded),
)
on_unused_results(encoded.primitive, _drop_qt)
