"""Parameters: which operand of a product is a kernel.

`products` computes these products in FP8, and `choices` ends its search there. The evidence, in
this order:

1. A parameter is what a derivative is being taken by, as far as tracers tell.
2. A model holds more matrices than a batch.
3. A kernel `(in, *out)` is contracted along its first dimension, activations along their last one.
   A kernel has fewer dimensions than activations, and is the second operand.

Integers, constants and arrays that the function closes over by themselves, unless a derivative is
being taken by them, are data.
"""

import contextlib
from typing import Any

from .closure import Origin
from .labels import LAID_OUT
from .program import Equation, Program
from .sites import Left


def kernel_side(g: Program, made: Equation) -> int:
    """Returns which operand of a product is the parameter.

    It is a part of an argument, or of a tree of arrays that the function closes over, and the other
    operand depends on something else.

    Raises:
      Left: where none is, with the reason; without one where both are computed.
    """
    origins = [g.origin(v) for v in made.ins]
    made_of = [g.made_of.get(v, frozenset()) for v in made.ins]
    may_be = [i for i, o in enumerate(origins) if o is not None and not o.is_data]
    if not may_be:
        data = [i for i, o in enumerate(origins) if o is not None and made_of[1 - i] - {o}]
        raise Left(origins[max(data, key=lambda i: _looks(g, made, i))].as_data if data else "")
    if len(may_be) == 1:
        (which,) = may_be
        _check_other(g, made, which, origins, made_of[1 - which])
    else:
        evidence = lambda i: (origins[i].differentiated, origins[i].matrices)
        # What vmap has computed is contracted along its first dimension, too; both are given here.
        looks = lambda i: (_is_first_contracted(g, made, i), _looks(g, made, i))
        which = max(may_be, key=lambda i: (*evidence(i), *looks(i)))
        are_matrices = max(g.avals[v].ndim for v in made.ins) < 3
        if origins[0] == origins[1] and (_batch(made) or are_matrices):
            raise Left(_OF_ITSELF if origins[0].alone else "a product of two parameters")
    if _batch(made):
        _check_batched(origins[which], made_of[1 - which])
    return which


_OF_ITSELF = "a product of an array with what is made of it"


def _batch(made: Equation) -> tuple[Any, ...]:
    """Returns the batch dimensions of both operands; () where there are none."""
    batch = made.params["dimension_numbers"][1]
    return batch if batch[0] else ()


def _is_first_contracted(g: Program, made: Equation, i: int) -> bool:
    """Tells if an operand is contracted along its first dimension, and not along its last one."""
    contract, batch = (each[i] for each in made.params["dimension_numbers"])
    own = [d for d in range(g.avals[made.ins[i]].ndim) if d not in batch]
    return bool(own) and own[0] in contract and own[-1] not in contract


def _looks(g: Program, made: Equation, i: int) -> tuple[int, int]:
    """Returns how much an operand looks like a kernel, where nothing else is known."""
    return len(made.params["dimension_numbers"][1][i]) - g.avals[made.ins[i]].ndim, i


def _check_other(
    g: Program, made: Equation, which: int, origins: list[Any], others: frozenset[Origin]
) -> None:
    """Raises Left where an operand is no parameter, given what the other one is made of."""
    own, strength = origins[which], lambda o: (not o.alone, o.matrices)
    if not others:
        raise Left("a product with constants")
    if others == {own}:
        of_model = "a product of a parameter with what is made of parameters alone"
        raise Left(_OF_ITSELF if own.alone else of_model)
    if own.is_doubtful and all(o.closed_over and o.is_data for o in others):
        raise Left((origins[1 - which] or min(others, key=lambda o: str(o.name))).as_data)
    looks_less = _looks(g, made, which) < _looks(g, made, 1 - which)
    strongest = max(map(strength, [o for o in others if not o.is_data]), default=(False, 0))
    if own not in others and looks_less and strength(own) <= strongest:
        raise Left("its kernel is made of parameters")
    is_model = own.differentiated and not own.alone
    if own in others and own.matrices == 1 and not is_model and (looks_less or strongest[1] > 1):
        raise Left(_OF_ITSELF)


def _check_batched(own: Origin, others: frozenset[Origin]) -> None:
    """Raises Left where an operand may be the keys or values of an attention.

    An argument that is an array by itself may be; so may a part of a batch, which holds fewer
    matrices than the model that the other operand is made of.
    """
    if own.alone:
        raise Left(f"{own.as_data}: kernels with a batch dimension are parts of a tree")
    if not own.differentiated and own.matrices < max(o.matrices for o in others | {own}):
        raise Left(own.as_data)


# ---------------------------------------------------------------- choices


def ends_choices(g: Program, made: Equation) -> bool:
    """Tells if what chooses by a product's result does not choose by its operands.

    So it is with logits and their head, however that lies, and with a kernel that is computed from
    parameters. A codebook is none: what it is multiplied by is as near to one row as to the next.
    An array by itself before what is computed is none: a graph's adjacency, as a rule.
    """
    for i in (1, 0):
        v = made.ins[i]
        root = g.root(v, _is_part)
        if root not in g.maker:
            known = False
            with contextlib.suppress(Left):
                known = kernel_side(g, made) == i
            unknown = g.number(v) is None and (i == 1 or not g.made_of.get(v))
            if (known or unknown) and not _is_codebook(g, made, root):
                return True
        elif not _batch(made) and _of_parameters(g, v, made.ins[1 - i]):
            return True
    return False


def _is_part(made: Equation) -> bool:
    return made.name in _PARTS


def _of_parameters(g: Program, v: int, other: int) -> bool:
    """Tells if a kernel is computed from parameters alone, as low-rank updates are."""
    own, others = (g.made_of.get(u, frozenset()) for u in (v, other))
    if not own or any(o.is_data for o in own):
        return False
    if own.isdisjoint(others):
        return len(own) == 1
    most, of_all = (max(o.matrices for o in each) for each in (own, others))
    return own < others and 1 < most == of_all


def _is_codebook(g: Program, made: Equation, root: int) -> bool:
    """Tells if what a product chooses reads the rows of its kernel, or is a distance to them.

    Then the array, laid out anew or cast, is an operand beside what is made of the result: a lookup
    by its indices, a product with its one-hot rows. Distances add the squares of one that is data.
    """
    origin, after = g.origin(root), {*made.outs}
    own = frozenset() if origin is None or not origin.is_data else {origin}

    def is_again(u: int) -> bool:
        u = g.root(u, _is_part)
        return u == root or bool(own) and u in g.maker and g.made_of[u] == own

    for equation in g.equations[made.index + 1 :]:
        if after.isdisjoint(equation.ins):
            continue
        if any(u not in after and is_again(u) for u in equation.ins):
            return True
        after.update(equation.outs)
    return False


_PARTS = LAID_OUT | {"slice", "dynamic_slice"}
