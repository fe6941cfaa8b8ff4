"""Activations in a program: values as polynomials of one array and of functions of it.

    gelu_tanh(g) = ½ g + ½ g tanh(.79788 g + .035677 g³)

Each value is a sum of products of atoms: the array g itself, or tanh, logistic, erf or maximum with
0 of such a polynomial. Two spellings of one function have one polynomial, and with that one
derivative, but for their constants: each coefficient has the distance to the numbers that the
program's constants stand for (`Program.slack`), and is a formula's only within that.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from .constants import ARITHMETIC
from .program import Equation, Program

Atom = tuple[str, Any]  # a function's name and the polynomial that it is of; ("g", None)
Monomial = tuple[tuple[Atom, int], ...]  # atoms with their powers, in order
Coefficient = tuple[float, float]  # a number, and how far it may be from what it stands for
Terms = tuple[tuple[Monomial, Coefficient], ...]
_DEGREE = 8
_LARGEST = 32  # terms and atoms of a polynomial, and of those within it


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """Σ coefficient · Π atom^power, of one array."""

    of: int
    terms: Terms

    @staticmethod
    def sum_of(of: int, terms: Mapping[Monomial, Coefficient]) -> "Polynomial":
        kept = {m: c for m, c in terms.items() if c[0]}
        return Polynomial(of, tuple(sorted(kept.items(), key=repr)))

    def plus(self, other: "Polynomial", factor: float = 1.0) -> "Polynomial":
        total = dict(self.terms)
        for m, (d, e) in other.terms:
            c, own = total.get(m, (0.0, 0.0))
            total[m] = c + factor * d, own + abs(factor) * e
        return Polynomial.sum_of(self.of, total)

    def times(self, other: "Polynomial") -> "Polynomial | None":
        if len(self.terms) * len(other.terms) > 64:
            return None
        total: dict[Monomial, Coefficient] = {}
        for m, (c, c_slack) in self.terms:
            for n, (d, d_slack) in other.terms:
                powers = dict(m)
                for atom, power in n:
                    powers[atom] = powers.get(atom, 0) + power
                if sum(powers.values()) > _DEGREE:
                    return None
                key = tuple(sorted(powers.items(), key=repr))
                sum_, slack = total.get(key, (0.0, 0.0))
                total[key] = sum_ + c * d, slack + abs(c) * d_slack + abs(d) * c_slack
        return Polynomial.sum_of(self.of, total)

    def function(self, name: str) -> "Polynomial":
        """Returns tanh, logistic, erf or max0 of it. Odd functions have one sign."""
        inner, sign = self.terms, 1.0
        if name in ("tanh", "erf") and inner and inner[0][1][0] < 0:
            inner, sign = tuple((m, (-c, e)) for m, (c, e) in inner), -1.0
        return Polynomial(self.of, (((((name, inner), 1),), (sign, 0.0)),))


def _size(terms: Terms | None) -> int:
    """Returns how many atoms there are in a polynomial, and in those within it."""
    return sum(1 + _size(inner) for monomial, _ in terms or () for (_, inner), _ in monomial)


_G: Monomial = ((("g", None), 1),)


def variable(v: int) -> Polynomial:
    return Polynomial(v, ((_G, (1.0, 0.0)),))


def number(of: int, n: float, slack: float = 0.0) -> Polynomial:
    return Polynomial(of, (((), (n, abs(n) * slack)),))


class Activations:
    """The polynomials of a program's values."""

    def __init__(self, program: Program):
        self.program = program
        self.of: dict[int, Polynomial] = {}

    def polynomial(self, v: int) -> Polynomial | None:
        """Returns a value's polynomial; of one that no rule knows, that it is a variable."""
        aval = self.program.avals[v]
        if not jnp.issubdtype(aval.dtype, jnp.floating) or not aval.shape:
            return None
        return self.of.get(v) or variable(v)

    def read(self, made: Equation) -> None:
        """Finds the polynomial of an equation's result."""
        found, (out,), avals = self._read(made), made.outs, self.program.avals
        if found is None or _size(found.terms) > _LARGEST:
            return
        if avals[found.of].shape == avals[out].shape:
            self.of[out] = found

    def _read(self, made: Equation) -> Polynomial | None:
        g, name = self.program, made.name
        if (shadow := g.shadows.get(made.outs[0])) is not None:
            return self.of.get(shadow)
        if name == "max" and made not in g.shadowing:
            return None  # its derivative at 0 is not that of jax.nn.relu
        ins = made.ins[:1] if name == "pow" else made.ins
        numbers = [g.number(v) for v in ins]
        arrays: list[Any] = [self.polynomial(v) for v, n in zip(ins, numbers) if n is None]
        of = {p and p.of for p in arrays}
        if len(of) != 1 or None in of or not all(math.isfinite(n or 0) for n in numbers):
            return None
        p, each = arrays[0], iter(arrays)
        constant = lambda n, u: number(p.of, n, g.slack(u))
        operands = [next(each) if n is None else constant(n, u) for n, u in zip(numbers, ins)]
        a, b = operands[0], operands[-1]
        match name:
            case "add" | "sub":
                return a.plus(b, 1.0 if name == "add" else -1.0)
            case "mul" if 0 not in numbers:
                return a.times(b)
            case "div" if numbers[1]:
                return a.times(constant(1 / numbers[1], ins[1]))
            case "max" if 0 in numbers:
                return p.function("max0")
            case "tanh" | "logistic" | "erf":
                return p.function(name)
            case "erfc":
                return number(p.of, 1.0).plus(p.function("erf"), -1.0)
            case "neg":
                return number(p.of, 0.0).plus(p, -1.0)
            case "integer_pow" | "square" | "pow":
                power = g.number(made.ins[1]) if name == "pow" else made.params.get("y", 2)
                square = p.times(p) if power in (2, 3) else None
                return square if power == 2 or square is None else square.times(p)
            case "convert_element_type" | "copy" | "pcast" | "pvary":
                return p
        return None

    def name(self, v: int) -> tuple[str, int] | None:
        """Returns the name of the activation that a value is, and of what array; None of others."""
        p = self.of.get(v)
        if p is None or p.of == v:
            return None
        return next(((n, p.of) for n, t in known().items() if _stands_for(p.terms, t)), None)

    def gated(self, v: int) -> tuple[str, int, int | None] | None:
        """Returns (activation, gate, up) of activation(gate) · up, or of one without an up."""
        if (named := self.name(v)) is not None:
            return None if named[0] in ("sigmoid", "tanh") else (*named, None)
        g = self.program
        v = self._narrower(g.shadows.get(v, v), anew=True)
        made, name = g.made(v)
        for a, b in (made.ins, made.ins[::-1]) if name == "mul" else ():
            if g.avals[a].shape == g.avals[b].shape and (named := self.name(self._narrower(a))):
                return *named, self._narrower(b)
        return None

    def _narrower(self, v: int, anew: bool = False) -> int:
        """Goes back through casts of floats to a wider dtype, or to any."""

        def passes(made: Equation) -> bool:
            given, to = (self.program.avals[u].dtype for u in (made.ins[0], made.outs[0]))
            is_cast = made.name == "convert_element_type" and jnp.issubdtype(given, jnp.floating)
            return is_cast and (anew or given.itemsize <= to.itemsize)

        return self.program.root(v, passes)


def _stands_for(terms: Terms | None, formula: Terms | None) -> bool:
    """Tells if a program's polynomial is a formula's, as the program's constants round it."""
    if terms is None or formula is None:
        return terms is formula
    return len(terms) == len(formula) and all(
        sum(_is_term(m, c, own, want) for own, want in formula) == 1 for m, c in terms
    )


def _is_term(m: Monomial, c: Coefficient, own: Monomial, want: Coefficient) -> bool:
    if abs(c[0] - want[0]) > c[1] + ARITHMETIC * abs(want[0]) or len(m) != len(own):
        return False
    return all(
        any(n == name and p == power and _stands_for(t, inner) for (name, inner), power in own)
        for (n, t), p in m
    )


@functools.cache
def known() -> dict[str, Terms]:
    """The polynomials of the activations that operations have names for."""
    g: Any = variable(0)
    cube = g.times(g).times(g)
    inner = g.plus(cube, 0.044715).times(number(0, math.sqrt(2 / math.pi)))
    half = g.times(number(0, 0.5))
    relu = g.function("max0")
    found = {
        "gelu": half.plus(half.times(g.times(number(0, math.sqrt(0.5))).function("erf"))),
        "gelu_tanh": half.plus(half.times(inner.function("tanh"))),
        "relu": relu,
        "sigmoid": g.function("logistic"),
        "silu": g.times(g.function("logistic")),
        "squared_relu": relu.times(relu),
        "tanh": g.function("tanh"),
    }
    return {name: p.terms for name, p in found.items()}


READ = frozenset(
    "add convert_element_type copy custom_jvp_call div erf erfc integer_pow logistic max mul neg "
    "normfuse_epilogue pcast pow pvary square sub tanh".split()
)
