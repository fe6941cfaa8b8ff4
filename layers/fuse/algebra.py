"""Polynomials: values of a program in terms of one array, compared with definitions.

A `Polynomial` is a sum of products of atoms: the array, functions and powers of polynomials, and
what else a domain knows. Two spellings of one function have one polynomial, and with that one
derivative, but for their constants: each coefficient has the distance to the numbers that the
program's constants stand for (`Program.slack`), and is a definition's only within that.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .constants import ARITHMETIC

Atom = tuple[str, Any]  # a name, and what it is of: of functions and of powers, terms
Monomial = frozenset[tuple[Atom, float]]  # atoms with their powers
Coefficient = tuple[float, float]  # a number, and how far it may be from what it stands for
Terms = frozenset[tuple[Monomial, Coefficient]]
_DEGREE = 8
_MOST_TERMS = 64
_ONE: Monomial = frozenset()


class Polynomial(NamedTuple):
    """Σ coefficient · Π atom^power."""

    terms: Terms

    @staticmethod
    def of(terms: Mapping[Monomial, Coefficient]) -> "Polynomial":
        return Polynomial(frozenset([(m, c) for m, c in terms.items() if c[0]]))

    @property
    def names(self) -> set[str]:
        """The names of its atoms."""
        return {name for m, _ in self.terms for (name, _), _ in m}

    def plus(self, other: "Polynomial", factor: float = 1.0) -> "Polynomial":
        total = dict(self.terms)
        for m, (d, e) in other.terms:
            c, own = total.get(m, (0.0, 0.0))
            total[m] = c + factor * d, own + abs(factor) * e
        return Polynomial.of(total)

    def times(self, other: "Polynomial") -> "Polynomial | None":
        if len(self.terms) * len(other.terms) > _MOST_TERMS:
            return None
        total: dict[Monomial, Coefficient] = {}
        for m, (c, c_slack) in self.terms:
            for n, (d, d_slack) in other.terms:
                powers = dict(m)
                for a, power in n:
                    powers[a] = powers.get(a, 0) + power
                if (key := _monomial(powers)) is None:
                    return None
                sum_, slack = total.get(key, (0.0, 0.0))
                total[key] = sum_ + c * d, slack + abs(c) * d_slack + abs(d) * c_slack
        return Polynomial.of(total)

    def power(self, q: float) -> "Polynomial | None":
        """Returns a power: a product, a number's or a root's own, or an atom."""
        if q in (2, 3):
            square = self.times(self)
            return square if q == 2 or square is None else square.times(self)
        for m, (c, slack) in self.terms if len(self.terms) == 1 else ():
            if (c > 0 or q == int(q)) and all([name == "power" for (name, _), _ in m]):
                key, slack = _monomial({a: p * q for a, p in m}), abs(q) * slack / abs(c)
                return None if key is None else Polynomial.of({key: (c**q, slack * abs(c**q))})
        return atom("power", self.terms, q)

    def coefficient(self, of: "Polynomial") -> Coefficient:
        """Returns the coefficient of another polynomial's only product of atoms."""
        ((m, _),) = of.terms
        return dict(self.terms).get(m, (0.0, 0.0))

    def function(self, name: str) -> "Polynomial":
        """Returns tanh, logistic, erf or maximum with 0 of it. Odd functions have one sign."""
        if name in ("tanh", "erf") and sum(c for _, (c, _) in self.terms) < 0:
            return ZERO.plus(atom(name, ZERO.plus(self, -1.0).terms), -1.0)
        return atom(name, self.terms)

    def stands_for(self, definition: "Polynomial") -> bool:
        """Tells if it is a definition's, as the program's constants round it."""
        return _stand_for(self.terms, definition.terms)


@functools.lru_cache(maxsize=1024)  # layers are alike
def computed(name: str, exponent: Any, *operands: Polynomial) -> Polynomial | None:
    """Returns the result of an element-wise equation; None where it is no polynomial.

    Args:
      exponent: an `integer_pow`'s.
    """
    if name == "integer_pow":
        return operands[0].power(exponent)
    if name not in RULES or name in ("mul", "div") and ZERO in operands:  # NaN times 0 is not 0
        return None
    return RULES[name](*operands)


def atom(name: str, of: Any = None, power: float = 1) -> Polynomial:
    return Polynomial(frozenset([(frozenset([((name, of), power)]), (1.0, 0.0))]))


@functools.lru_cache(maxsize=1024)
def number(n: float, slack: float = 0.0) -> Polynomial:
    """Returns a constant, with the relative distance to what it stands for."""
    return Polynomial.of({_ONE: (n, abs(n) * slack)})


ZERO, ONE = number(0.0), number(1.0)


@functools.lru_cache(maxsize=1024)
def size(terms: Terms | None) -> int:
    """Returns how many atoms there are in a polynomial, and in those within it."""
    return sum([1 + size(inner) for monomial, _ in terms or () for (_, inner), _ in monomial])


def _monomial(powers: Mapping[Atom, float]) -> Monomial | None:
    """Returns a product of atoms; None of a large one, and of a root's even power.

    √p squared is |p|, and its derivative at 0 is NaN.
    """
    for (name, _), p in powers.items():
        if name == "power" and p >= 0 and p == int(p):
            return None
    return None if sum(powers.values()) > _DEGREE else frozenset(powers.items())


@functools.lru_cache(maxsize=1024)
def _stand_for(terms: Any, definition: Any) -> bool:
    if not isinstance(terms, frozenset) or not isinstance(definition, frozenset):
        return terms == definition
    return len(terms) == len(definition) and all(
        sum(_is_term(m, c, own, want) for own, want in definition) == 1 for m, c in terms
    )


def _is_term(m: Monomial, c: Coefficient, own: Monomial, want: Coefficient) -> bool:
    is_near = abs(c[0] - want[0]) <= c[1] + want[1] + ARITHMETIC * abs(want[0])  # no NaN is
    return (
        is_near
        and len(m) == len(own)
        and all(
            any(n == name and p == power and _stand_for(t, inner) for (name, inner), power in own)
            for (n, t), p in m
        )
    )


RULES: dict[str, Callable[..., Polynomial | None]] = {
    "add": Polynomial.plus,
    "add_any": Polynomial.plus,
    "div": lambda a, b: (inverse := b.power(-1)) and a.times(inverse),
    "erf": lambda a: a.function("erf"),
    "erfc": lambda a: number(1.0).plus(a.function("erf"), -1.0),
    "logistic": lambda a: a.function("logistic"),
    "max": lambda a, b: (a if b == ZERO else b).function("max0") if ZERO in (a, b) else None,
    "mul": Polynomial.times,
    "neg": lambda a: ZERO.plus(a, -1.0),
    "pow": lambda a, b: None if b.names else a.power(b.coefficient(ONE)[0]),
    "rsqrt": lambda a: a.power(-0.5),
    "sqrt": lambda a: a.power(0.5),
    "square": lambda a: a.power(2),
    "sub": lambda a, b: a.plus(b, -1.0),
    "tanh": lambda a: a.function("tanh"),
} | dict.fromkeys(("convert_element_type", "copy", "pcast", "pvary"), lambda a: a)
