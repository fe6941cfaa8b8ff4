"""Activations in a program: values as polynomials of one array and of functions of it.

    gelu_tanh(g) = ½ g + ½ g tanh(.79788 g + .035677 g³)

Each value is a sum of products of atoms: the array g itself, or tanh, logistic, erf or maximum with
0 of such a polynomial. Two spellings of one function have one polynomial, and with that one
derivative, but for their constants.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp

from .algebra import RULES, Polynomial, atom, computed, number, size
from .program import Equation, Program

_LARGEST = 32
"""Atoms of a polynomial, and of those within it."""
_GIVEN = atom("g")


class Activations:
    """The polynomials of a program's values, and the arrays that they are of."""

    def __init__(self, program: Program):
        self.program = program
        self.of: dict[int, tuple[int, Polynomial]] = {}

    def read(self, made: Equation) -> None:
        """Finds the polynomial of an equation's result."""
        g, (out,) = self.program, made.outs
        if (shadow := g.shadows.get(out)) is not None:
            if shadow in self.of:
                self.of[out] = self.of[shadow]
            return
        if made.name == "max" and made not in g.shadowing:
            return  # its derivative at 0 is not that of jax.nn.relu
        arrays, operands = set(), []
        for v in made.ins:
            if (n := g.number(v)) is None:
                of, p = self.of.get(v, (v, _GIVEN))
                arrays |= {of}
            else:
                p = number(n, g.slack(v))
            operands += [p]
        if len(arrays) != 1:
            return
        (v,), aval = arrays, g.avals[out]
        found = computed(made.name, made.params.get("y"), *operands)
        if found is None or aval.shape != g.avals[v].shape or not aval.shape:
            return
        if size(found.terms) <= _LARGEST and jnp.issubdtype(g.avals[v].dtype, jnp.floating):
            self.of[out] = v, found

    def name(self, v: int) -> tuple[str, int] | None:
        """Returns the name of the activation that a value is, and of what array; None of others."""
        if v not in self.of:
            return None
        of, own = self.of[v]
        return next(((name, of) for name, p in known().items() if own.stands_for(p)), None)

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


@functools.cache
def known() -> dict[str, Polynomial]:
    """The activations that operations have names for."""
    g: Any = _GIVEN
    inner = g.plus(g.power(3), 0.044715).times(number(math.sqrt(2 / math.pi)))
    half = g.times(number(0.5))
    relu = g.function("max0")
    return {
        "gelu": half.plus(half.times(g.times(number(math.sqrt(0.5))).function("erf"))),
        "gelu_tanh": half.plus(half.times(inner.function("tanh"))),
        "relu": relu,
        "sigmoid": g.function("logistic"),
        "silu": g.times(g.function("logistic")),
        "squared_relu": relu.times(relu),
        "tanh": g.function("tanh"),
    }


READ = {*RULES, "custom_jvp_call", "integer_pow", "normfuse_epilogue"} - {"rsqrt", "sqrt"}
