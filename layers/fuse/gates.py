"""Gated activations that dropout follows, so that no product can take them: one pass each way.

`activation(gate) · up` keeps gate and up alone for its backward, in place of what its derivative
reads of each equation.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...native.implementation import choose
from ..dense.epilogue import finish, finish_natively, scalar_of
from .activations import Activations
from .probabilities import is_random
from .program import Equation, Program
from .sites import Site, called

_OP = "gated_product"


@dataclasses.dataclass(eq=False)
class Gate(Site):
    """activation(gate) · up, where there is an up."""

    activation: str
    dtype: Any

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        operands = map(read, self.reads)
        return [called(gated, *operands, activation=self.activation, dtype=self.dtype)]


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
        if made.name in ("mul", "div") and program.number(made.ins[1]) is not None:
            v = made.ins[0]
        elif made.name == "convert_element_type" and jnp.issubdtype(
            program.avals[made.ins[0]].dtype, jnp.floating
        ):
            v = made.ins[0]
        else:
            break
    return v


def _site(program: Program, activations: Activations, equation: Equation) -> Gate | None:
    pred, no, yes = equation.ins
    if program.number(no) != 0 or not is_random(program, pred):
        return None
    hidden = _source(program, yes)
    made, up = program.maker.get(program.shadows.get(hidden, hidden)), None
    if (named := activations.name(hidden)) is None and made is not None and made.name == "mul":
        for a, other in (made.ins, made.ins[::-1]):
            if (named := activations.name(a)) is not None:
                up = other
                break
    out = program.avals[hidden]
    if named is None or out.ndim < 2 or up is None and named[0] in ("sigmoid", "tanh"):
        return None
    reads = (named[1],) if up is None else (named[1], up)
    given = [program.avals[v] for v in reads]
    if any(a.shape != out.shape or a.dtype != out.dtype for a in given) or out.dtype.itemsize > 4:
        return None
    rows = out.size // out.shape[-1]
    return Gate(
        outs=(hidden,),
        reads=reads,
        dead=(),
        what=f"mlp {rows} x {out.shape[-1]}, {named[0]}, {out.dtype.name}",
        served="activation(gate) · up alone: dropout comes before the product",
        activation=named[0],
        dtype=out.dtype,
    )


def found(program: Program, activations: Activations) -> Iterator[Site]:
    """Yields the gated activations that dropout follows."""
    for equation in program.equations:
        if equation.name == "select_n" and len(equation.ins) == 3:
            if equation not in program.shadowing and (
                site := _site(program, activations, equation)
            ):
                yield site
