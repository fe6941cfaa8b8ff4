"""Integers of a program as affine functions of positions, and masks that compare such.

Proved from the equations (iota, sums, comparisons), so that a causal mask of any length is never
computed to be recognised. What each value is, is a fact of the program: found once, in linear time.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .constants import COMPARED, Known, evaluated
from .labels import MOVED, expand, fresh, moved, moved_back, size
from .program import Facts, Program

DEEPEST = 64
"""How many equations are followed from an array of two numbers to its mask."""

_PASSED = "copy", "stop_gradient", "sharding_constraint", "pvary", "pcast"
_MOVES = *MOVED, "slice"


@dataclasses.dataclass(frozen=True)
class Affine:
    """Σ coefficients[d] · (position along dimension d) + constant, of an array's elements."""

    coefficients: tuple[int, ...]
    constant: int

    def __add__(self, other: "Affine") -> "Affine":
        sums = tuple(a + b for a, b in zip(self.coefficients, other.coefficients, strict=True))
        return Affine(sums, self.constant + other.constant)

    def times(self, n: int) -> "Affine":
        return Affine(tuple(n * c for c in self.coefficients), n * self.constant)

    @classmethod
    def number(cls, n: int, ndim: int) -> "Affine":
        return cls((0,) * ndim, n)

    def extremes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns its least and its greatest value over an array's positions."""
        ends = [sorted((0, c * (n - 1))) for c, n in zip(self.coefficients, shape)]
        low, high = map(sum, zip(*ends)) if ends else (0, 0)
        return self.constant + low, self.constant + high


def affine(program: Program, v: int) -> Affine | None:
    """Returns an array of integers as an affine function of its positions; None of others."""
    return program.fact(_affine, v)


def counted(program: Program, v: int) -> int | None:
    """Returns the dimension along which an array counts 0, 1, 2, …; None of others."""
    found = affine(program, v)
    steps = [d for d, c in enumerate(found.coefficients) if c] if found else []
    known = found and not found.constant and len(steps) == 1 and sum(found.coefficients) == 1
    return steps[0] if known else None


def is_zero(program: Program, v: int) -> bool:
    found = affine(program, v)
    return found is not None and not found.constant and not any(found.coefficients)


def _affine(program: Program, v: int) -> Facts:
    aval, made = program.avals[v], program.maker.get(v)
    if not jnp.issubdtype(aval.dtype, jnp.integer) or 0 in aval.shape:
        return None
    if (number := program.uniform(v)) is not None:
        return Affine.number(int(number.x), aval.ndim)
    found = None if made is None else (yield from _affine_of(program, made, aval))
    found = found or _constant_affine(program, v)
    if found is None:
        return None
    # Each equation is of exact integers as long as none of its results wraps.
    low, high = found.extremes(aval.shape)
    limits = jnp.iinfo(aval.dtype)
    return found if limits.min <= low and high <= limits.max else None


def _affine_of(program: Program, made: Any, aval: Any) -> Facts:
    """Returns an equation's result from its operands', as if integers had no end."""
    p, ins = made.params, made.ins
    match made.name:
        case "iota":
            return Affine(tuple(int(d == p["dimension"]) for d in range(aval.ndim)), 0)
        case "add" | "sub":  # operands have one shape, or are scalars
            a = _widened((yield _affine, ins[0]), aval.ndim)
            b = _widened((yield _affine, ins[1]), aval.ndim) if a else None
            return a + b.times(1 if made.name == "add" else -1) if a and b else None
        case "mul":  # by one number: a product of two positions is no function of this kind
            for i in (0, 1):
                n = program.uniform(ins[i])
                if n is not None and (a := (yield _affine, ins[1 - i])):
                    return _widened(a.times(int(n.x)), aval.ndim)
            return None
        case "neg":
            return a.times(-1) if (a := (yield _affine, ins[0])) else None
        case "convert_element_type":  # integers that do not fit wrap
            return (yield _affine, ins[0])
        case name if name in _PASSED:
            return (yield _affine, ins[0])
        case name if name in _MOVES:
            a, given = (yield _affine, ins[0]), program.avals[ins[0]].shape
            return _moved(made, a, given, aval) if a else None
        case "select_n" if len(ins) == 3:  # the mask is the same everywhere
            yield _region, ins[0]  # found without recursion
            which = decided(program, ins[0])
            return None if which is None else _widened((yield _affine, ins[1 + which]), aval.ndim)
    return None


def _widened(a: Affine | None, ndim: int) -> Affine | None:
    """Returns a scalar's function as one of an array it is combined with."""
    if a is None or len(a.coefficients) == ndim:
        return a
    return None if a.coefficients else Affine.number(a.constant, ndim)


def _constant_affine(program: Program, v: int) -> Affine | None:
    """Reads the function off a constant array; every element is compared with it."""
    x = program.const(v)
    if x is None or x.size == 0 or max(int(x.max()), -int(x.min())) >= 1 << 62:
        return None  # int64 would wrap
    first, steps = int(x.flat[0]), []
    for d in range(x.ndim):
        along = x[tuple(slice(0, 2) if e == d else 0 for e in range(x.ndim))]
        steps.append(int(along[1]) - int(along[0]) if len(along) > 1 else 0)
    want = np.full((1,) * x.ndim, first, np.int64)
    for d, step in enumerate(steps):
        shape = [x.shape[d] if e == d else 1 for e in range(x.ndim)]
        want = want + step * np.arange(x.shape[d], dtype=np.int64).reshape(shape)
    return Affine(tuple(steps), first) if (x.astype(np.int64) == want).all() else None


# ---------------------------------------------------------------- masks


Region = tuple[Affine, ...]
"""The positions at which a mask is true: wherever all of these are at least 0."""


_LARGEST = 64
"""Half-spaces of a region: one that many more masks cut is not followed."""


def region(program: Program, v: int) -> Region | None:
    """Returns where an array of booleans is true, as an intersection of half-spaces; else None."""
    return program.fact(_region, v)


def _region(program: Program, v: int) -> Facts:
    aval = program.avals[v]
    if aval.dtype != jnp.bool_ or 0 in aval.shape:
        return None
    everywhere = lambda true: () if true else (Affine.number(-1, aval.ndim),)
    if (number := program.uniform(v)) is not None:
        return everywhere(number.x)
    made = program.maker.get(v)
    if made is None:
        return _constant_region(program, v)
    two = two_valued(program, v)
    if two is not None and two.mask != v:  # it is another mask, or its complement, or a constant
        no, yes = bool(two.no.x), bool(two.yes.x)
        if no == yes:
            return everywhere(yes)
        found = yield _region, two.mask
        return found if yes or found is None else complement(found)
    found = yield from _region_of(program, made, aval)
    return None if found is None or len(found) > _LARGEST else tuple(dict.fromkeys(found))


def _region_of(program: Program, made: Any, aval: Any) -> Facts:
    ins = made.ins
    match made.name:
        case "ge" | "gt" | "le" | "lt" | "eq":  # integers: a > b is a >= b + 1
            a, b = (yield _affine, ins[0]), (yield _affine, ins[1])
            a, b = _widened(a, aval.ndim), _widened(b, aval.ndim)
            if a is None or b is None:
                return None
            one = Affine.number(-1 if made.name in ("gt", "lt") else 0, aval.ndim)
            up, down = a + b.times(-1) + one, b + a.times(-1) + one
            return (up, down) if made.name == "eq" else (up,) if made.name[0] == "g" else (down,)
        case "and":  # both intersections
            a, b = (yield _region, ins[0]), (yield _region, ins[1])
            return None if a is None or b is None else (*a, *b)
        case "select_n" if len(ins) == 3:  # jnp.tril: with False on one side, an "and"
            which = yield _region, ins[0]
            if program.avals[ins[0]].ndim != aval.ndim or which is None:
                return None
            sides = (which, 2, 1), (complement(which), 1, 2)
            for where, one, other in sides:
                if where is not None and program.number(ins[other]) == 0:
                    more = yield _region, ins[one]
                    return None if more is None else (*where, *more)
            return None
        case name if name in _MOVES:  # each half-space by itself
            found, given = (yield _region, ins[0]), program.avals[ins[0]].shape
            if found is None:
                return None
            each = tuple(m for one in found if (m := _moved(made, one, given, aval)) is not None)
            return each if len(each) == len(found) else None
    return None


def decided(program: Program, v: int) -> bool | None:
    """Returns what a mask is everywhere, where that is proved; else None.

    An affine function has its least and its greatest value at corners of the array.
    """
    found, shape = region(program, v), program.avals[v].shape
    if found is None:
        return None
    extremes = [one.extremes(shape) for one in found]
    if all(low >= 0 for low, _ in extremes):
        return True
    return False if any(high < 0 for _, high in extremes) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Two:
    """An array of two numbers: `yes` where a mask is true, and `no` elsewhere.

    Attributes:
      mask, dims: the booleans, and the labels of their dimensions.
    """

    mask: int
    dims: Any
    no: Known
    yes: Known

    @property
    def numbers(self) -> tuple[float, float]:
        return float(self.no.x), float(self.yes.x)


def two_valued(program: Program, v: int, dims: Any = None, depth: int = DEEPEST) -> Two | None:
    """Returns the mask and the numbers of an array that one mask makes; None of others.

    It is followed through casts, comparisons and arithmetic with one number, which are applied to
    both numbers in their dtypes. A mask itself has the numbers False and True.

    Args:
      dims: labels of the array's dimensions, to follow it to a mask of other dimensions.
    """
    made, aval = program.maker.get(v), program.avals[v]
    if dims is not None:
        dims = tuple(expand(d) if n != 1 else () for d, n in zip(dims, aval.shape, strict=True))
    found = _two_of(program, made, aval, dims, depth - 1) if made and depth else None
    if found is None and aval.dtype == jnp.bool_:
        return Two(v, dims, *_BOOLEANS)
    return found


_BOOLEANS = Known(np.asarray(False)), Known(np.asarray(True))
_OF_ONE = frozenset("add convert_element_type div max min mul not select_n sub".split()) | {
    *COMPARED
}


def _two_of(program: Program, made: Any, aval: Any, dims: Any, depth: int) -> Two | None:
    numbers = [program.uniform(u) for u in made.ins]
    varying = [i for i, number in enumerate(numbers) if number is None]
    if len(varying) != 1:
        return None
    (i,) = varying
    given = program.avals[made.ins[i]]
    computes = made.name in _OF_ONE
    if computes or made.name in _PASSED:
        if given.shape != aval.shape:
            return None
    elif dims is None or (dims := moved_back(made, dims, given.shape, aval.shape)) is None:
        return None
    two = two_valued(program, made.ins[i], dims, depth)
    if two is None or not computes:
        return two

    def result(x: Known) -> Known | None:
        return evaluated(made.name, made.params, aval, [*numbers[:i], x, *numbers[i + 1 :]])

    no, yes = result(two.no), result(two.yes)
    return Two(two.mask, two.dims, no, yes) if no is not None and yes is not None else None


def complement(found: Region) -> Region | None:
    """Returns where one half-space is not; None for an intersection of several."""
    if len(found) != 1:
        return None
    return (found[0].times(-1) + Affine.number(-1, len(found[0].coefficients)),)


def band_of(keep: Any) -> tuple[int, int] | None:
    """Returns (low, high) of a matrix that is true where low <= row - column <= high; else None."""
    t, s = keep.shape
    behind = np.arange(t)[:, None] - np.arange(s)
    low, high = int(behind.min(where=keep, initial=t)), int(behind.max(where=keep, initial=-s))
    return (low, high) if (keep == ((low <= behind) & (behind <= high))).all() else None


def _constant_region(program: Program, v: int) -> Region | None:
    """Reads a band along two dimensions off a constant array."""
    x = program.const(v)
    if x is None or x.dtype != np.bool_:
        return None
    dims = [d for d, n in enumerate(x.shape) if n != 1]
    band = band_of(x.squeeze()) if len(dims) == 2 and x.any() else None
    if band is None:
        return None
    (low, high), (t, s) = band, x.squeeze().shape
    down = tuple({dims[0]: 1, dims[1]: -1}.get(d, 0) for d in range(x.ndim))
    ends = (Affine(down, -low), low > 1 - s), (Affine(down, -high).times(-1), high < t - 1)
    return tuple(end for end, cuts in ends if cuts)


def _moved(made: Any, a: Affine, given: Sequence[int], aval: Any) -> Affine | None:
    """Returns the function of an array laid out anew; None where it is none of its positions."""
    p = made.params
    if made.name == "slice":  # position i is the operand's first + i · stride
        steps = p["strides"] or (1,) * aval.ndim
        first = sum(c * s for c, s in zip(a.coefficients, p["start_indices"]))
        return Affine(tuple(c * s for c, s in zip(a.coefficients, steps)), a.constant + first)
    before = fresh(given)
    after = moved(made, before, given, aval.shape)
    if after is None:
        return None
    steps = {}  # by label; a reshape that has split one counts its second part by 1
    for labels, c in zip(before, a.coefficients):
        count = size(labels)
        for label in expand(labels):
            count //= label.size
            steps[label] = c * count
    out = []
    for labels in after:
        own, count = [steps.get(l, 0) for l in labels], size(labels)
        for label, c in zip(labels, own):
            count //= label.size
            if c != own[-1] * count:
                return None
        out.append(own[-1] if own else 0)
    return Affine(tuple(out), a.constant)
