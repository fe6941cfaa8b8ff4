"""Attention that stays because its probabilities are changed before their product with values."""

from collections.abc import Iterator

from .program import Program
from .scores import ScoreForms

_CHANGING = "mul", "div", "select_n", "add", "sub"
_RANDOM = "random_bits", "rng_bit_generator", "threefry2x32"


def changed(forms: ScoreForms) -> Iterator[tuple[int, str]]:
    """Yields probabilities that reach a product as something else, and what changes them."""
    g = forms.program
    done = {form.base.dot for form in forms.of.values() if form.is_attention}
    for v, form in forms.of.items():
        terms = [*form.terms]
        if not form.soft or len(terms) != 1 or form.base.dot in done or v not in g.readers:
            continue
        ((term, factor),) = terms
        if factor != -1 or term.kind != "lse" or term.base != form.base:
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
    selects = [e.ins[0] for name, e in names.items() if name == "select_n"]
    random = any(program.maker.get(u) and is_random(program, u) for u in selects)
    if random:
        return "dropout"
    return ", ".join(name for name in names if name in _CHANGING) or None


def is_random(program: Program, v: int) -> bool:
    """Returns whether a value is made of random numbers."""
    stack, seen = [v], set()
    while stack:
        made = program.maker.get(stack.pop())
        if made is not None and made not in seen:
            if made.name in _RANDOM:
                return True
            seen.add(made)
            stack += made.ins
    return False
