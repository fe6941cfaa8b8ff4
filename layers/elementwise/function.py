"""A user's scalar function, and the tangents and gradients that follow from it, for kernels.

With f(a) the function and dₖ its derivative with respect to operand k, which the user gave:

    tangent   (a, ȧ) -> Σₖ dₖ(a) · ȧₖ     for each result
    gradient  (a, ȳ) -> Σⱼ dₖⱼ(a) · ȳⱼ    for each operand

Both are functions of scalars like f itself, and each is the other's transpose.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .code import Function

Plain = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Primal(Function):
    """The function itself.

    Attributes:
      names: of the operands, as the user called them.
      partials: (operand, its derivative) where there is one: a Primal of one result for each
        result, or a function in plain JAX that returns one array for each.
      differentiable: the function in plain JAX where that is what JAX differentiates; else None.
    """

    names: tuple[str, ...] = ()
    partials: tuple[tuple[int, Any], ...] = ()
    differentiable: Plain | None = None

    def partial(self, k: int) -> Any:
        """The derivative with respect to operand k.

        Raises:
          TypeError: if the user gave none.
        """
        found = dict(self.partials)
        if k not in found:
            name = self.names[k]
            raise TypeError(
                f"{self.name} has no derivative with respect to {name}. Pass elementwise "
                f"derivative={{{name!r}: ...}} (C++ text, an elementwise op or a function in plain "
                "JAX), or derivative=, the whole function in plain JAX"
            )
        return found[k]

    def tangent(self, moving: tuple[int, ...], outputs: tuple[int, ...]) -> "Linear":
        """`(*operands, *tangents of moving) -> tangents of outputs`."""
        return self._linear(moving, outputs, False)

    def gradient(self, wanted: tuple[int, ...], outputs: tuple[int, ...]) -> "Linear":
        """`(*operands, *cotangents of outputs) -> cotangents of wanted`."""
        return self._linear(wanted, outputs, True)

    @functools.cache  # noqa: B019 (a function lives as long as the process)
    def _linear(self, operands, outputs, transposed) -> "Linear":
        sources, targets = (outputs, operands) if transposed else (operands, outputs)
        slope = lambda s, t: self._slope(*((t, s) if transposed else (s, t)))
        base = len(self.operands)
        types = [self.operands, self.results]
        more = tuple(
            (types[transposed][s][0], f"normfuse_a{base + i}") for i, s in enumerate(sources)
        )
        results = tuple(
            (types[not transposed][t][0], f"normfuse_y{i}") for i, t in enumerate(targets)
        )
        body = " ".join(
            f"normfuse_y{i} = "
            + " + ".join(f"{slope(s, t)} * normfuse_a{base + n}" for n, s in enumerate(sources))
            + ";"
            for i, t in enumerate(targets)
        )
        pieces: tuple[tuple[str, str], ...] = ()
        for k in operands:
            for j in outputs:
                one = self.partial(k)[j]
                pieces += (("<normfuse>", f"namespace d{k}_{j} {{"), *one.pieces)
                pieces += (("<normfuse>", "}"),)
        kind = "gradient" if transposed else "tangent"
        return Linear(
            f"{self.name}_{kind}",
            pieces,
            self.operands + more,
            results,
            self.template,
            body,
            self._plain_linear(operands, outputs, transposed),
            f"{kind}{operands}{outputs} of {self.key}",
            self,
            operands,
            outputs,
            transposed,
        )

    def _slope(self, k: int, j: int) -> str:
        """C++ that calls the derivative of result j with respect to operand k."""
        one = self.partial(k)[j]
        return f"d{k}_{j}::{called(one.name, self.template, [v for _, v in self.operands])}"

    def _plain_linear(self, moving, outputs, transposed) -> Plain | None:
        """The tangent or gradient by JAX's derivative of the definition."""
        definition, base = self.definition, len(self.operands)
        if definition is None:
            return None

        def plain(*arrays):
            operands, linear = arrays[:base], arrays[base:]

            def of(*moved):
                full = list(operands)
                for k, one in zip(moving, moved, strict=True):
                    full[k] = one
                results = definition(*full)
                return [results[j] for j in outputs]

            at = [operands[k] for k in moving]
            if not transposed:
                return jax.jvp(of, tuple(at), tuple(linear))[1]
            at = [jnp.broadcast_to(one, linear[0].shape) for one in at]
            results, pull = jax.vjp(of, *at)
            return pull([c.astype(r.dtype) for c, r in zip(linear, results, strict=True)])

        return plain


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Linear(Function):
    """A tangent (or, `transposed`, a gradient) of `base`, linear in the operands after base's.

    `moving` and `outputs` are base's operands and results that it is about.
    """

    base: Primal
    moving: tuple[int, ...]
    outputs: tuple[int, ...]
    transposed: bool

    def only(self, kept: Sequence[int]) -> "Linear":
        """The same of fewer linear operands, by their positions among these."""
        if self.transposed:
            return self.base.gradient(self.moving, tuple(self.outputs[i] for i in kept))
        return self.base.tangent(tuple(self.moving[i] for i in kept), self.outputs)

    def transpose(self, linear: Sequence[int], results: Sequence[int]) -> "Linear":
        """The transpose: from cotangents of `results` to those of the linear operands `linear`."""
        if self.transposed:
            return self.base.tangent(
                tuple(self.moving[j] for j in results), tuple(self.outputs[i] for i in linear)
            )
        return self.base.gradient(
            tuple(self.moving[i] for i in linear), tuple(self.outputs[j] for j in results)
        )


def called(name: str, template: Sequence[str], arguments: Sequence[str]) -> str:
    """C++ text of a call."""
    given = f"<{', '.join(template)}>" if template else ""
    return f"{name}{given}({', '.join(arguments)})"


_definitions: dict[str, list[Any]] = {}


def key_of(texts: Sequence[Any], *functions: Any) -> str:
    """A name for a function: the same in every process for the same texts, and different for
    different Python functions, which are counted in the order in which they come."""
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    names = []
    for one in functions:
        if one is None:
            continue
        name = f"{digest}:{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '')}"
        seen = _definitions.setdefault(name, [])
        if one not in seen:
            seen.append(one)
        names.append(f"{name}#{seen.index(one)}")
    return f"<{' '.join([digest, *names])}>"
