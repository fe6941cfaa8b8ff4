"""A user's scalar function, and the tangents and gradients that follow from it, for kernels.

With f(a) the function and dₖ its derivative with respect to operand k, which the user gave:

    tangent   (a, ȧ) -> Σₖ dₖ(a) · ȧₖ
    gradient  (a, ȳ) -> dₖ(a) · ȳ      for each operand

Both are functions of scalars like f itself.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .code import Function, Pairs

Array = jax.Array
Plain = Callable[..., Any]
Numbers = tuple[int, ...]


class Slope(NamedTuple):
    """The derivative with respect to one operand: a function's name and its text."""

    name: str
    pieces: Pairs


Partials = tuple[tuple[int, Slope], ...]  # (operand, the derivative with respect to it)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Primal(Function):
    """The function itself."""

    names: tuple[str, ...] = ()  # the user's names for the operands
    partials: Partials = ()
    differentiable: Plain | None = None  # the function, where JAX is to differentiate it

    def partial(self, k: int) -> Slope:
        """Returns the derivative with respect to operand k; TypeError if the user gave none."""
        slopes = dict(self.partials)
        if k not in slopes:
            name = self.names[k]
            raise TypeError(
                f"{self.name} has no derivative with respect to {name}. Pass elementwise "
                f"derivative={{{name!r}: ...}} (C++ text), or derivative=, the whole function in "
                "plain JAX"
            )
        return slopes[k]

    @functools.cache  # noqa: B019 (a function lives as long as the process)
    def derived(self, kind: str, moving: Numbers) -> Function:
        """Returns the "tangent", `(*operands, *tangents of moving) -> tangent`, or the "gradient",
        `(*operands, cotangent) -> cotangents of moving`."""
        base, is_gradient = len(self.operands), kind == "gradient"
        of_moving, of_result = [self.operands[k][0] for k in moving], [self.results[0][0]]
        taken, returned = (of_result, of_moving) if is_gradient else (of_moving, of_result)
        pieces, values = [*self.pieces], [variable for _, variable in self.operands]
        for k in moving:
            pieces += [("<normfuse>", f"namespace d{k} {{"), *self.partial(k).pieces]
            pieces += [("<normfuse>", "}")]
        calls = [f"d{k}::{called(self.partial(k).name, self.template, values)}" for k in moving]
        terms = [f"{d} * normfuse_a{base + i * (not is_gradient)}" for i, d in enumerate(calls)]
        sums = terms if is_gradient else [" + ".join(terms)]
        plain = self.definition and functools.partial(_by_jax, self.definition, kind, base, moving)
        return Function(
            name=f"{self.name}_{kind}",
            pieces=tuple(pieces),
            operands=(*self.operands, *((t, f"normfuse_a{base + i}") for i, t in enumerate(taken))),
            results=tuple((t, f"normfuse_y{i}") for i, t in enumerate(returned)),
            template=self.template,
            body=" ".join(f"normfuse_y{i} = {sum_};" for i, sum_ in enumerate(sums)),
            definition=plain,
            key=f"{kind}{moving} of {self.key}",
        )


def _by_jax(plain: Plain, kind: str, base: int, moving: Numbers, *operands: Array) -> Any:
    """The tangent or gradient of `plain`, linear in the operands from `base` on, by JAX."""
    shape = jnp.broadcast_shapes(*(a.shape for a in operands))
    linear = tuple(jnp.broadcast_to(a, shape) for a in operands[base:])
    operands = operands[:base]

    def of(*moved: Array) -> Any:
        changed = dict(zip(moving, moved, strict=True))
        return plain(*[changed.get(k, operand) for k, operand in enumerate(operands)])

    at = tuple(jnp.broadcast_to(operands[k], shape) for k in moving)
    if kind == "tangent":
        return jax.jvp(of, at, linear)[1]
    (result,), pull = jax.vjp(of, *at)
    return pull([linear[0].astype(result.dtype)])


def called(name: str, template: Sequence[str], arguments: Sequence[str]) -> str:
    types = f"<{', '.join(template)}>" if template else ""
    return f"{name}{types}({', '.join(arguments)})"


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
