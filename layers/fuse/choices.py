"""Choices: what a program decides by a value, so that rounding it takes other experts, say.

A product whose result chooses stays as it is. One search, from the results back to the operands,
finds every value that chooses:

- Sorts, arguments of maxima, comparisons and casts to integers choose by their operands; tests for
  NaN and infinities do not. An activation that is written by a comparison keeps its product, too.
- All that computes an array from elements or sums of its operands is followed, and so are calls,
  scans, branches, and users' own derivatives: an operand chooses if a result does.
- Products with parameters end the search: their results are asked by themselves. Else a token that
  is chosen from logits would hold every layer before them. So do convolutions and kernels of
  attention. A product of two arrays that are computed is followed, as scores that choose the keys
  of a sparse attention; what attends goes through another product.
- What no list here has cannot be followed, and counts as a choice.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from ...native.jaxpr import bodies
from .constants import COMPARED
from .labels import LAID_OUT
from .parameters import ends_choices
from .program import Equation, Program, inner_programs

Reasons = list[str | None]

_CHOOSE = frozenset(
    "approx_top_k argmax argmin ceil floor nextafter rem round sign sort top_k".split()
)
_ENDS = frozenset(
    "conv_general_dilated debug_callback debug_print dot_product_attention_fwd "
    "dot_product_attention_fwd_wrapper is_finite ragged_dot ragged_dot_general".split()
)
_MULTIPLY = "attention", "cross_entropy", "product", "tangent"
"""Operations of ours with one of these in their names end it likewise."""
_FOLLOWED = LAID_OUT | frozenset(
    "abs acos acosh add add_any all_gather all_gather_invariant all_gather_reduced all_to_all "
    "asin asinh atan atan2 atanh cbrt clamp complex concatenate conj cos cosh cumlogsumexp cummax "
    "cummin cumprod cumsum digamma div dot_general dynamic_slice dynamic_update_slice erf erf_inv "
    "erfc exp exp2 expm1 fft gather imag integer_pow lgamma log log1p logistic max mesh_cast min "
    "mul neg optimization_barrier pad pbroadcast pmax pmin pow ppermute psum psum2 psum_invariant "
    "psum_scatter real reduce_max reduce_min reduce_prod reduce_scatter reduce_sum reduce_window "
    "reduce_window_max reduce_window_min reduce_window_sum rev rsqrt scatter scatter-add "
    "scatter-max scatter-min scatter-mul scatter_add scatter_max scatter_min scatter_mul "
    "select_and_scatter_add select_n sin sinh slice split sqrt square stack sub tan tanh tile "
    "unstack".split()
)


def chosen(program: Program) -> Mapping[int, str]:
    """Returns the values of a program that choose, with a sentence that says what chooses."""
    if program.chosen is None:
        root = program
        while root.outer is not None:
            root = root.outer
        _read(root, [None] * len(root.results))
    if program.chosen is None:  # within a call that is not followed
        _read(program, [_unknown("a call")] * len(program.results))
    return program.chosen or {}


def _read(g: Program, results: Reasons) -> Reasons:
    """Returns why each operand of a program chooses, given why its results do."""
    found = {v: why for v, why in zip(g.results, results) if why}
    is_floating = lambda v: jnp.issubdtype(g.avals[v].dtype, jnp.inexact)
    for equation in reversed(g.equations):
        name, outs = equation.name, equation.outs
        unread = name in _FOLLOWED and found.keys().isdisjoint(outs)
        if unread and (name != "convert_element_type" or is_floating(outs[0])):
            continue  # nearly always
        if name in _ENDS or equation in g.shadowing or not any(map(is_floating, equation.ins)):
            continue
        for v, why in _through(g, equation, [*map(found.get, outs)]):
            if why and is_floating(v):
                found.setdefault(v, why)
    g.chosen = found
    return [found.get(v) for v in g.inputs]


def _through(g: Program, equation: Equation, outs: Reasons) -> Iterator[tuple[int, str | None]]:
    """Yields the operands of an equation, and why they choose."""
    name, ins = equation.name, equation.ins
    why = next(filter(None, outs), None)
    ours = name.startswith("normfuse_")
    is_infinite = lambda v: not math.isfinite(g.number(v) or 0)
    if ours and any(part in name for part in _MULTIPLY):
        return
    if name == "dot_general" and ends_choices(g, equation):
        return
    if name in COMPARED and (ins[0] == ins[1] or any(map(is_infinite, ins))):
        return
    if name in _CHOOSE or name in COMPARED:
        why = f"{name} chooses by its result"
    elif name == "convert_element_type":
        dtype = g.avals[equation.outs[0]].dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            why = f"a cast to {dtype.name} chooses by its result"
    elif name == "pallas_call" and _multiplies(equation.eqn):
        return
    elif name not in _FOLLOWED and not ours:
        if name != "pallas_call" and any(True for _ in bodies(equation.eqn)):
            yield from _around(g, equation, outs)
            return
        why = _unknown(name)
    yield from ((v, why) for v in ins)


def _unknown(name: str) -> str:
    return f"its result goes to {name}, which is not followed"


def _multiplies(eqn: Any) -> bool:
    return any(
        inner.primitive.name == "dot_general" or _multiplies(inner)
        for _, _, body in bodies(eqn)
        for inner in getattr(body, "jaxpr", body).eqns
    )


def _around(g: Program, equation: Equation, outs: Reasons) -> Iterator[tuple[int, str | None]]:
    """Yields the operands of a call, a loop or branches, and why they choose."""
    name, ins, params = equation.name, equation.ins, equation.params
    if name == "while":  # as of attention by blocks
        count, told = params["cond_nconsts"], _read(Program(params["cond_jaxpr"]), [None])
        outs = [a or b for a, b in zip(outs, told[count:])]
        yield from zip(ins, told[:count])
    inside = [*inner_programs(name, params, ins)]
    for key, place, body in () if inside else bodies(equation.eqn):
        closed = body if hasattr(body, "consts") else ClosedJaxpr(body, ())
        inside.append((key, place, closed, [(v, True) for v in ins]))
    known = g.bodies.get(equation, {})
    for key, place, closed, operands in inside:
        body = known.get((key, place)) or Program(closed)
        if (len(body.inputs), len(body.results)) != (len(operands), len(outs)):
            yield from ((v, _unknown(name)) for v in ins)
            continue
        carried = [i for i, (v, _) in enumerate(operands) if v < 0]
        again, found = list(outs), _read(body, outs)
        while any(found[i] and not why for i, why in zip(carried, again)):
            again[: len(carried)] = [why or found[i] for i, why in zip(carried, again)]
            found = _read(body, again)
        why = dict(enumerate(found)) | dict(zip(carried, again))
        yield from ((max(v, ~v), why[i]) for i, (v, _) in enumerate(operands))
