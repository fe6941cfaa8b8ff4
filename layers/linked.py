"""Runs a traced function with the main gradients of its parameters linked to its products.

`main_gradient.mark_p` stands in a program wherever a dense layer multiplies with a narrow kernel.
Here such a kernel is followed from a parameter to its products: through transposes, reshapes and
slices, and into functions that are jitted, rematerialised or scanned. Where it cannot be followed
(loops that carry it, conditionals, functions with derivatives of their own) the product runs as it
is, and the gradient is the kernel's own, rounded.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from ..native.equation import results_of, value_of
from .main_gradient import mark_p

_FOLLOWED = (  # of the first operand's elements, whatever their dtype
    "copy",
    "dynamic_slice",
    "reshape",
    "reshard",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
)
Link = jax.Array | None


def uses(jaxpr: Any, dtype: jax.typing.DTypeLike) -> bool:
    """Whether anything that a program takes or computes, or a part of it does, has this dtype."""
    has = lambda var: getattr(var.aval, "dtype", None) == dtype
    return any(map(has, jaxpr.invars)) or any(
        any(map(has, eqn.outvars)) or any(uses(inner, dtype) for inner in _inner(eqn))
        for eqn in jaxpr.eqns
    )


def _inner(eqn):
    """The programs within an operation."""
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def run_linked(
    jaxpr: Any, operands: Sequence[jax.Array], links: Sequence[Link]
) -> tuple[list[jax.Array], list[Link]]:
    """Evaluates a jaxpr with constants (`jax.make_jaxpr`'s result, or a `jit`'s).

    Args:
      operands: for its arguments.
      links: for each, zeros of its shape that are to have its main gradient, or None.
    Returns: its results, and the zeros that belong to them where they are parameters still.
    """
    return _run(jaxpr.jaxpr, jaxpr.consts, operands, links)


def _run(jaxpr, consts, operands, links):
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    linked: dict[Any, Link] = {}
    for var, value, link in zip(jaxpr.invars, operands, links, strict=True):
        values[var], linked[var] = value, link
    link_of = lambda atom: None if hasattr(atom, "val") else linked.get(atom)
    for eqn in jaxpr.eqns:
        given = [value_of(v, values) for v in eqn.invars]
        zeros = [link_of(v) for v in eqn.invars]
        with eqn.ctx.manager:
            results, more = _step(eqn, given, zeros)
        for var, result, link in zip(eqn.outvars, results, more, strict=True):
            values[var], linked[var] = result, link
    return [value_of(v, values) for v in jaxpr.outvars], [link_of(v) for v in jaxpr.outvars]


def _step(eqn, given, zeros):
    """The results of one operation, and their links."""
    name = eqn.primitive.name
    if all(z is None for z in zeros):
        return results_of(eqn, given), [None] * len(eqn.outvars)
    if eqn.primitive is mark_p:
        return [lax.stop_gradient(given[0]), zeros[0]], [None, None]
    if name in _FOLLOWED and zeros[0] is not None:
        return results_of(eqn, given), results_of(eqn, [zeros[0], *given[1:]])
    if name == "name":  # of what remat keeps: not the zeros
        return results_of(eqn, given), zeros
    if name in ("jit", "pjit"):
        return run_linked(eqn.params["jaxpr"], given, zeros)
    if name in ("remat2", "checkpoint"):
        return _checkpoint(eqn, given, zeros), [None] * len(eqn.outvars)
    if name == "scan":
        return _scan(eqn, given, zeros), [None] * len(eqn.outvars)
    return results_of(eqn, given), [None] * len(eqn.outvars)


def _checkpoint(eqn, given, zeros):
    jaxpr = eqn.params["jaxpr"]
    body = lambda given, zeros: _run(jaxpr, getattr(jaxpr, "consts", ()), given, zeros)[0]
    options = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
    return jax.checkpoint(body, **options)(given, zeros)


def _scan(eqn, given, zeros):
    """Constants and slices stay linked; what is carried is not."""
    body = eqn.params["jaxpr"]
    inner, outer = body.jaxpr, eqn
    ndim = lambda atom: len(atom.aval.shape)
    is_sliced = [ndim(v) > ndim(w) for v, w in zip(outer.invars, inner.invars, strict=True)]
    carries = sum(ndim(v) == ndim(w) for v, w in zip(outer.outvars, inner.outvars, strict=True))
    sliced = len(is_sliced) - sum(is_sliced)  # where they begin
    first = sliced - carries

    def step(carry, slices):
        operands = [*given[:first], *carry, *slices[0]]
        links = [*zeros[:first], *[None] * carries, *slices[1]]
        results, _ = run_linked(body, operands, links)
        return results[:carries], results[carries:]

    carry, stacked = jax.lax.scan(
        step,
        given[first:sliced],
        (given[sliced:], zeros[sliced:]),
        **{key: eqn.params[key] for key in ("length", "reverse", "unroll")},
    )
    return [*carry, *stacked]
