"""Dropout: gated activations before it are one pass, and attention around it has a reason to stay.

No product can take a gated activation that dropout follows. Alone, `activation(gate) · up` is one
pass each way, and keeps gate and up for its backward in place of what each equation's derivative
reads.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...native.implementation import choose
from ..dense.epilogue import finish, finish_natively, scalar_of
from .activations import Activations
from .program import Equation, Program
from .scores import ScoreForms
from .sites import Site, called, of_equations

_OP = "gated_product"
_CHANGING = "mul", "div", "select_n", "add", "sub"
_RANDOM = "random_bits", "rng_bit_generator", "threefry2x32"


# ---------------------------------------------------------------- gated activations


def gated(gate: Array, up: Array | None = None, *, activation: str, dtype: Any) -> Array:
    """Returns activation(gate) · up, computed in float32 and rounded once."""
    serve = {"xla": lambda strict: finish(gate, None, activation, dtype, up)}
    if scalar_of(activation) is not None:
        serve["native"] = lambda strict: finish_natively(
            _OP, gate, up, None, activation, dtype, strict=strict
        )
    return choose(_OP, None, serve)


def _source(program: Program, v: int) -> int:
    """Goes back from what dropout selects to what it scales."""
    while (made := program.maker.get(v)) is not None:
        scaled = made.name in ("mul", "div") and program.number(made.ins[1]) is not None
        floats = made.ins and jnp.issubdtype(program.avals[made.ins[0]].dtype, jnp.floating)
        if not scaled and not (made.name == "convert_element_type" and floats):
            break
        v = made.ins[0]
    return v


def _site(program: Program, activations: Activations, equation: Equation) -> Site | None:
    pred, no, *yes = equation.ins
    if len(yes) != 1 or program.number(no) != 0 or not is_random(program, pred):
        return None
    hidden = _source(program, yes[0])
    if (parts := activations.gated(hidden)) is None:
        return None
    activation, *reads = parts
    reads, out = tuple(v for v in reads if v is not None), program.avals[hidden]
    given = [program.avals[v] for v in reads]
    if out.ndim < 2 or out.dtype.itemsize > 4:
        return None
    if any(a.shape != out.shape or a.dtype != out.dtype for a in given):
        return None
    rows = out.size // out.shape[-1]
    compute = lambda read: [
        called(gated, *map(read, reads), activation=activation, dtype=out.dtype)
    ]
    return Site(
        outs=(hidden,),
        reads=reads,
        dead=(),
        what=f"mlp {rows} x {out.shape[-1]}, {activation}, {out.dtype.name}",
        served="activation(gate) · up alone: dropout comes before the product",
        compute=compute,
    )


def found(program: Program, activations: Activations) -> Iterator[Site]:
    """Yields the gated activations that dropout follows."""
    site_of = functools.partial(_site, program, activations)
    return of_equations(program, ["select_n"], site_of)


# ---------------------------------------------------------------- attention


def changed(forms: ScoreForms) -> Iterator[tuple[int, str]]:
    """Yields probabilities that reach a product as something else, and what changes them."""
    g = forms.program
    done = {form.base.dot for form in forms.of.values() if form.is_attention}
    for v, form in forms.of.items():
        terms = [(t.kind, t.base, factor) for t, factor in form.terms]
        if not form.soft or terms != [("lse", form.base, -1)] or form.base.dot in done:
            continue
        operands = zip(form.base.dot.ins, forms.sides[form.base.dot])
        roots = [forms.peel(u, dims)[0] for u, dims in operands]
        if any(u not in g.maker and g.avals[u].ndim <= 2 for u in roots):
            continue  # logits of a kernel, or a router's
        if (why := _before_a_product(g, v)) is not None:
            done.add(form.base.dot)
            yield v, f"its probabilities are changed ({why})"


def _before_a_product(program: Program, v: int) -> str | None:
    """Returns what changes a value before a product reads it; None if none does."""
    names, seen, stack = {}, {v}, [v]
    size, reached = program.avals[v].size, False
    while stack:
        for reader in program.readers.get(stack.pop(), ()):
            reached |= reader.name == "dot_general"
            names[reader.name] = reader
            for out in reader.outs:
                if out not in seen and program.avals[out].size == size:
                    seen.add(out)
                    stack.append(out)
    if not reached:
        return None
    changing = [e for name, e in names.items() if name in _CHANGING]
    if any(is_random(program, u) for e in changing for u in e.ins if u not in seen):
        return "dropout"
    return ", ".join(name for name in names if name in _CHANGING) or None


def is_random(program: Program, v: int) -> bool:
    """Tells if a value is made of random numbers."""
    stack, seen = [v], set()
    while stack:
        made = program.maker.get(stack.pop())
        if made is not None and made not in seen:
            if made.name in _RANDOM:
                return True
            seen.add(made)
            stack += made.ins
    return False
