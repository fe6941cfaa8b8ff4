"""A user's scalar function, and the tangents and gradients that follow from it, for kernels.

With f(a) the function and dₖ its derivative with respect to operand k, which the user gave:

    tangent   (a, ȧ) -> Σₖ dₖ(a) · ȧₖ     for each result
    gradient  (a, ȳ) -> Σⱼ dₖⱼ(a) · ȳⱼ    for each operand

Both are functions of scalars like f itself, and each is the other's transpose.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .code import Function, Pairs

Array = jax.Array
Plain = Callable[..., Any]
Numbers = tuple[int, ...]


class Slope(NamedTuple):
    """The derivative of one result with respect to one operand: a function's name and its text."""

    name: str
    pieces: Pairs


Partials = tuple[tuple[int, tuple[Slope, ...]], ...]  # (operand, its derivative) of each result


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Primal(Function):
    """The function itself."""

    names: tuple[str, ...] = ()  # the user's names for the operands
    partials: Partials = ()
    differentiable: Plain | None = None  # the function, where JAX is to differentiate it

    def partial(self, k: int) -> tuple[Slope, ...]:
        """Returns the derivative with respect to operand k; TypeError if the user gave none."""
        found = dict(self.partials)
        if k not in found:
            name = self.names[k]
            raise TypeError(
                f"{self.name} has no derivative with respect to {name}. Pass elementwise "
                f"derivative={{{name!r}: ...}} (C++ text), or derivative=, the whole function in "
                "plain JAX"
            )
        return found[k]

    def tangent(self, moving: Iterable[int], outputs: Iterable[int]) -> "Linear":
        """Returns `(*operands, *tangents of moving) -> tangents of outputs`."""
        return self._linear(tuple(moving), tuple(outputs), False)

    def gradient(self, wanted: Iterable[int], outputs: Iterable[int]) -> "Linear":
        """Returns `(*operands, *cotangents of outputs) -> cotangents of wanted`."""
        return self._linear(tuple(wanted), tuple(outputs), True)

    @functools.cache  # noqa: B019 (a function lives as long as the process)
    def _linear(self, moving: Numbers, outputs: Numbers, transposed: bool) -> "Linear":
        of_moving = [self.operands[k][0] for k in moving]
        of_outputs = [self.results[j][0] for j in outputs]
        taken, given = (of_outputs, of_moving) if transposed else (of_moving, of_outputs)
        base, pieces, body = len(self.operands), [], ""
        for k, j in itertools.product(moving, outputs):
            own = self.partial(k)[j].pieces
            pieces += [("<normfuse>", f"namespace d{k}_{j} {{"), *own, ("<normfuse>", "}")]
        terms = [[self._slope(k, j) for k in moving] for j in outputs]
        for i, row in enumerate(zip(*terms) if transposed else terms):
            sum_ = " + ".join(f"{d} * normfuse_a{base + n}" for n, d in enumerate(row))
            body += f"normfuse_y{i} = {sum_}; "
        operands = self.operands + tuple((t, f"normfuse_a{base + i}") for i, t in enumerate(taken))
        results = tuple((t, f"normfuse_y{i}") for i, t in enumerate(given))
        plain = self.definition
        plain = plain and functools.partial(_by_jax, plain, base, moving, outputs, transposed)
        kind = "gradient" if transposed else "tangent"
        name, key = f"{self.name}_{kind}", f"{kind}{moving}{outputs} of {self.key}"
        text = name, tuple(pieces), operands, results, self.template, body, plain, key
        return Linear(*text, self, moving, outputs, transposed)

    def _slope(self, k: int, j: int) -> str:
        """Returns C++ that calls the derivative of result j with respect to operand k."""
        one = self.partial(k)[j]
        return f"d{k}_{j}::{called(one.name, self.template, [v for _, v in self.operands])}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Linear(Function):
    """A tangent (or, `transposed`, a gradient) of `base`, linear in the operands after base's.

    `moving` and `outputs` are the operands and results of base that it relates.
    """

    base: Primal
    moving: Numbers
    outputs: Numbers
    transposed: bool

    def only(self, kept: Iterable[int]) -> "Linear":
        """Returns the same of fewer linear operands, by their positions among these."""
        if self.transposed:
            return self.base.gradient(self.moving, (self.outputs[i] for i in kept))
        return self.base.tangent((self.moving[i] for i in kept), self.outputs)

    def transpose(self, linear: Iterable[int], results: Iterable[int]) -> "Linear":
        """Returns the transpose: from cotangents of `results` to those of operands `linear`."""
        moving, outputs = (results, linear) if self.transposed else (linear, results)
        to = self.base.tangent if self.transposed else self.base.gradient
        return to((self.moving[i] for i in moving), (self.outputs[j] for j in outputs))


def of_some(
    plain: Plain, operands: Sequence[Any], moving: Sequence[int]
) -> tuple[Plain, tuple[Any, ...]]:
    """Returns `plain` as a function of the operands `moving` alone, and these operands."""

    def of(*moved: Any) -> Any:
        changed = dict(zip(moving, moved, strict=True))
        return plain(*[changed.get(k, operand) for k, operand in enumerate(operands)])

    return of, tuple(operands[k] for k in moving)


def _by_jax(
    plain: Plain, base: int, moving: Numbers, outputs: Numbers, transposed: bool, *operands: Array
) -> Any:
    """The tangent or gradient of `plain`, linear in the operands from `base` on, by JAX."""
    of, at = of_some(plain, operands[:base], moving)
    chosen = lambda *moved: [of(*moved)[j] for j in outputs]
    shape = jnp.broadcast_shapes(*(a.shape for a in operands))
    at, linear = (tuple(jnp.broadcast_to(a, shape) for a in some) for some in (at, operands[base:]))
    if not transposed:
        return jax.jvp(chosen, at, linear)[1]
    results, pull = jax.vjp(chosen, *at)
    return pull([c.astype(r.dtype) for c, r in zip(linear, results, strict=True)])


def called(name: str, template: Sequence[str], arguments: Sequence[str]) -> str:
    """Returns C++ text of a call."""
    given = f"<{', '.join(template)}>" if template else ""
    return f"{name}{given}({', '.join(arguments)})"


_definitions: dict[str, list[Any]] = {}


def key_of(texts: Sequence[Any], *functions: Any) -> str:
    """Returns a name for a function: the same in every process for the same texts, and different
    for different Python functions, which are counted in the order in which they come."""
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    names = [digest]
    for one in functions:
        if one is not None:
            name = f"{digest}:{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '')}"
            seen = _definitions.setdefault(name, [])
            if one not in seen:
                seen.append(one)
            names.append(f"{name}#{seen.index(one)}")
    return f"<{' '.join(names)}>"
