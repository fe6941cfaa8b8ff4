"""Integers of a program as affine functions of positions, and masks that compare such.

Proved from the equations (iota, sums, comparisons), so that a causal mask of any length is never
computed to be recognised.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .program import COMPARED, Program


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

    def extremes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns its least and its greatest value over an array's positions."""
        ends = [sorted((0, c * (n - 1))) for c, n in zip(self.coefficients, shape)]
        return (
            self.constant + sum(low for low, _ in ends),
            self.constant + sum(high for _, high in ends),
        )


def affine(program: Program, v: int, depth: int = 24) -> Affine | None:
    """Returns an array of integers as an affine function of its positions; None of others."""
    aval, made = program.avals[v], program.maker.get(v)
    if not jnp.issubdtype(aval.dtype, jnp.integer) or depth == 0 or 0 in aval.shape:
        return None
    if (number := program.number(v)) is not None:
        return Affine((0,) * aval.ndim, int(number))
    if made is None:
        return _constant_affine(program, v)
    found = _affine_of(program, made, aval, depth - 1)
    if found is None:
        return _constant_affine(program, v)
    low, high = found.extremes(aval.shape)
    limits = np.iinfo(aval.dtype)
    return found if limits.min <= low and high <= limits.max else None  # integers that wrap


def _affine_of(program: Program, made: Any, aval: Any, depth: int) -> Affine | None:
    p, back = made.params, lambda i: affine(program, made.ins[i], depth)
    match made.name:
        case "iota":
            return Affine(tuple(int(d == p["dimension"]) for d in range(aval.ndim)), 0)
        case "add" | "sub":
            a, b = (_widened(back(i), aval.ndim) for i in (0, 1))
            return a + b.times(1 if made.name == "add" else -1) if a and b else None
        case "mul":
            for i in (0, 1):
                if (n := program.number(made.ins[i])) is not None and (a := back(1 - i)):
                    return _widened(a.times(int(n)), aval.ndim)
            return None
        case "neg":
            return a.times(-1) if (a := back(0)) else None
        case "rev":
            if (a := back(0)) is None:
                return None
            flipped = [(d, c) for d, c in enumerate(a.coefficients) if d in p["dimensions"]]
            turned = tuple(-c if d in p["dimensions"] else c for d, c in enumerate(a.coefficients))
            return Affine(turned, a.constant + sum(c * (aval.shape[d] - 1) for d, c in flipped))
        case "convert_element_type" | "copy" | "stop_gradient" | "sharding_constraint":
            return back(0)
        case "pvary" | "pcast":
            return back(0)
        case "broadcast_in_dim" | "transpose" | "reshape" | "squeeze" | "expand_dims" | "slice":
            given = program.avals[made.ins[0]].shape
            return _moved(made, a, given, aval) if (a := back(0)) else None
        case "select_n" if len(made.ins) == 3:  # JAX wraps negative indices by a select
            which = decided(program, made.ins[0], depth)
            return None if which is None else _widened(back(1 + which), aval.ndim)
    return None


def _widened(a: Affine | None, ndim: int) -> Affine | None:
    """Returns a scalar's function as one of an array it is combined with."""
    if a is None or len(a.coefficients) == ndim:
        return a
    return Affine((0,) * ndim, a.constant) if not a.coefficients else None


def _constant_affine(program: Program, v: int) -> Affine | None:
    """Of an array that was computed outside: by looking at it."""
    x = program.const(v)
    if x is None or x.size == 0:
        return None
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


@dataclasses.dataclass(frozen=True)
class Region:
    """Where a mask of some shape is true: wherever all of `above` are at least 0."""

    above: tuple[Affine, ...] = ()


def region(program: Program, v: int, depth: int = 24) -> Region | None:
    """Returns where an array of booleans is true, as an intersection of half-spaces; else None."""
    aval, made = program.avals[v], program.maker.get(v)
    if aval.dtype != jnp.bool_ or depth == 0 or 0 in aval.shape:
        return None
    if (number := program.number(v)) is not None:
        return Region() if number else Region((Affine((0,) * aval.ndim, -1),))
    if made is None:
        return _constant_region(program, v)
    back = lambda i: region(program, made.ins[i], depth - 1)
    match made.name:
        case "ge" | "gt" | "le" | "lt" | "eq":
            a, b = (_widened(affine(program, v), aval.ndim) for v in made.ins)
            if a is None or b is None:
                return _compared(program, made, depth - 1)
            one = Affine((0,) * aval.ndim, -1 if made.name in ("gt", "lt") else 0)
            up, down = a + b.times(-1) + one, b + a.times(-1) + one
            return Region(
                (up, down) if made.name == "eq" else (up,) if made.name[0] == "g" else (down,)
            )
        case "and":
            a, b = back(0), back(1)
            return Region((*a.above, *b.above)) if a and b else None
        case "ne":
            return _compared(program, made, depth - 1)
        case "not":
            return (a := back(0)) and _complement(a)
        case "copy" | "stop_gradient" | "sharding_constraint" | "pvary" | "pcast":
            return back(0)
        case "select_n" if len(made.ins) == 3:  # jnp.tril of booleans
            which, no, yes = (
                back(i) if program.avals[made.ins[i]].ndim == aval.ndim else None for i in range(3)
            )
            no_number = program.number(made.ins[1])
            if which and yes and no_number == 0:
                return Region((*which.above, *yes.above))
            yes_number = program.number(made.ins[2])
            if which and no and yes_number == 0 and len(which.above) == 1:
                return Region((which.above[0].times(-1) + Affine((0,) * aval.ndim, -1), *no.above))
            return None
        case "convert_element_type":
            two = two_valued(program, made.ins[0])
            if two is None or (two[1] != 0) == (two[2] != 0):
                return None
            found = region(program, two[0], depth - 1)
            return found if two[2] or found is None else _complement(found)
        case "broadcast_in_dim" | "transpose" | "reshape" | "squeeze" | "expand_dims" | "slice":
            a = back(0)
            given = program.avals[made.ins[0]].shape
            if a is None:
                return None
            moved = [m for one in a.above if (m := _moved(made, one, given, aval)) is not None]
            return Region(tuple(moved)) if len(moved) == len(a.above) else None
    return None


def decided(program: Program, v: int, depth: int = 24) -> bool | None:
    """Returns what a mask is everywhere, where that is proved; else None."""
    found, shape = region(program, v, depth), program.avals[v].shape
    if found is None:
        return None
    extremes = [one.extremes(shape) for one in found.above]
    if all(low >= 0 for low, _ in extremes):
        return True
    return False if any(high < 0 for _, high in extremes) else None


def two_valued(program: Program, v: int, depth: int = 24) -> tuple[int, float, float] | None:
    """(mask, the number where it is false, and where it is true) of numbers that a mask makes."""
    made = program.maker.get(v)
    if made is None or depth == 0 or not made.ins:
        return None
    if made.name == "convert_element_type":
        if program.avals[made.ins[0]].dtype == jnp.bool_:
            return made.ins[0], 0.0, 1.0
        return two_valued(program, made.ins[0], depth - 1)
    if made.name == "select_n" and len(made.ins) == 3:
        no, yes = (program.number(u) for u in made.ins[1:])
        same = program.avals[made.ins[0]].shape == program.avals[v].shape
        if no is not None and yes is not None and same:
            return made.ins[0], no, yes
    return None


def _compared(program: Program, made: Any, depth: int) -> Region | None:
    """Of a comparison of numbers that a mask makes with one number."""
    number = program.number(made.ins[1])
    two = None if number is None else two_valued(program, made.ins[0])
    if two is None or program.avals[two[0]].shape != program.avals[made.outs[0]].shape:
        return None
    no, yes = (COMPARED[made.name](x, number) for x in two[1:])
    found = region(program, two[0], depth) if no != yes else None
    return found if yes or found is None else _complement(found)


def _complement(found: Region) -> Region | None:
    if len(found.above) != 1:
        return None
    (one,) = found.above
    return Region((one.times(-1) + Affine((0,) * len(one.coefficients), -1),))


def _constant_region(program: Program, v: int) -> Region | None:
    """Of an array that was computed outside: where it is a band along two dimensions."""
    x = program.const(v)
    if x is None or x.dtype != np.bool_:
        return None
    dims = [d for d, n in enumerate(x.shape) if n != 1]
    if len(dims) != 2 or not x.any():
        return None
    t, s = (x.shape[d] for d in dims)
    behind, keep = np.arange(t)[:, None] - np.arange(s), x.reshape(t, s)
    low, high = int(behind.min(where=keep, initial=t)), int(behind.max(where=keep, initial=-s))
    if not (keep == ((low <= behind) & (behind <= high))).all():
        return None
    along = lambda sign: tuple(
        sign if d == dims[0] else -sign if d == dims[1] else 0 for d in range(x.ndim)
    )
    above = []
    if low > -(s - 1):
        above.append(Affine(along(1), -low))
    if high < t - 1:
        above.append(Affine(along(-1), high))
    return Region(tuple(above))


def _moved(made: Any, a: Affine, given: Sequence[int], aval: Any) -> Affine | None:
    p = made.params
    match made.name:
        case "transpose":
            return Affine(tuple(a.coefficients[i] for i in p["permutation"]), a.constant)
        case "broadcast_in_dim":
            out = [0] * aval.ndim
            for i, d in enumerate(map(int, p["broadcast_dimensions"])):
                out[d] = a.coefficients[i] if given[i] != 1 else 0
            return Affine(tuple(out), a.constant)
        case "slice":
            steps = p["strides"] or (1,) * aval.ndim
            first = sum(c * s for c, s in zip(a.coefficients, p["start_indices"]))
            return Affine(tuple(c * s for c, s in zip(a.coefficients, steps)), a.constant + first)
        case _:
            if [n for n in given if n != 1] != [n for n in aval.shape if n != 1]:
                return None
            if p.get("dimensions") is not None and made.name == "reshape":
                return None
            left = iter([c for c, n in zip(a.coefficients, given) if n != 1])
            return Affine(tuple(next(left) if n != 1 else 0 for n in aval.shape), a.constant)
