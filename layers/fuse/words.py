"""Equations of a vocabulary that devices share, each of which has a part of its words.

A value without a label of words is whole, and the same on all of these devices; so is its gradient.
Along words it is computed of sums over devices (`add_up`), and where it meets a part of the words,
the gradients that come back are added up over devices, once for all readers (`spread`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .labels import Label

Axes = tuple[str, ...]


class Words(Label):
    """The words of a vocabulary, which devices may share; no reshape splits it."""

    __slots__ = ()


def words_of(labels: Any) -> frozenset[Label]:
    """Returns the labels of words among those of all dimensions."""
    return frozenset([l for each in labels for l in each if isinstance(l, Words)])


def without_words(rows: Any) -> tuple[tuple[Label, ...], ...]:
    """Returns rows without labels of words."""
    return tuple([tuple([l for l in each if not isinstance(l, Words)]) for each in rows])


# ---------------------------------------------------------------- linear functions over devices


def _linear(name: str, run: Callable[..., Any]) -> Primitive:
    """Returns an operation on an array, whose axes and other options do not depend on its shape."""
    one = Primitive(f"normfuse_{name}")
    one.def_abstract_eval(lambda x, **params: x)
    mlir.register_lowering(one, mlir.lower_fun(run, multiple_results=False))
    batching.primitive_batchers[one] = lambda args, dims, **params: (
        one.bind(*args, **params),
        dims[0],
    )
    return one


_sum = _linear("sum_of_words", lambda x, axes: lax.psum(x, axes))
_spread = _linear("spread_over_words", lambda x, axes: x)
ad.deflinear2(_sum, lambda ct, x, axes: [_spread.bind(ct, axes=axes)])
ad.deflinear2(_spread, lambda ct, x, axes: [_sum.bind(ct, axes=axes)])


def add_up(x: Any, axes: Axes) -> Any:
    """Returns the sum over devices."""
    return _sum.bind(x, axes=axes) if axes else x


def spread(x: Any, axes: Axes) -> Any:
    """Returns an array, or several, whose gradients are added up over devices."""
    return jax.tree.map(lambda a: _spread.bind(a, axes=axes), x) if axes else x


def part(x: Any, axes: Axes, dim: int, first: Any, size: int) -> Any:
    """Returns a device's part of a whole array."""
    return lax.dynamic_slice_in_dim(spread(x, axes), first, size, dim) if axes else x


def gathered(x: Any, axes: Axes, dim: int) -> Any:
    """Returns the whole array of devices' parts."""
    if not axes or x.dtype == bool:
        return gathered(x.astype(jnp.int8), axes, dim).astype(bool) if axes else x
    shape, size = list(x.shape), x.shape[dim]
    shape[dim] *= lax.axis_size(axes)
    zeros, first = jnp.zeros(shape, x.dtype), lax.axis_index(axes) * size
    return add_up(lax.dynamic_update_slice_in_dim(zeros, x, first, dim), axes)


# ---------------------------------------------------------------- rules

SUMS = "reduce_sum", "dot_general"
_LARGEST = {
    "reduce_max": lax.pmax,
    "reduce_or": lax.pmax,
    "reduce_min": lax.pmin,
    "reduce_and": lax.pmin,
}
_FIRST = "argmax", "argmin"
COMBINED = frozenset((*SUMS, *_LARGEST, *_FIRST, "gather"))
"""Equations that combine words as devices can: each its part, then a few numbers of each."""


def combined(
    name: str, params: dict[str, Any], bind: Any, given: list[Any], axes: Axes, dim: int, first: Any
) -> list[Any]:
    """Returns the results of an equation that combines words.

    Args:
      bind: `(*operands) -> results`.
      axes: those over which devices share the words, dimension `dim` of the first operand.
      first: the device's first word.
    """
    if name in SUMS:
        return [add_up(bind(*given)[0], axes)]
    if name in _LARGEST:
        return [_largest(_LARGEST[name], lambda x: bind(x)[0], given[0], axes, params["axes"])]
    if name == "gather":
        return [_picked(params, bind, given, axes, dim, first)]
    (x,) = given
    # The first of equal ones is of the first device that has it.
    words = jnp.expand_dims(bind(x)[0], dim)
    best = gathered(jnp.take_along_axis(x, words, dim), axes, dim)
    words = gathered(words + first.astype(words.dtype), axes, dim)
    places = jnp.expand_dims(bind(best)[0], dim)
    return [jnp.squeeze(jnp.take_along_axis(words, places, dim), dim)]


def _largest(of_all: Any, bind: Any, x: Any, axes: Axes, dims: Sequence[int]) -> Any:
    """Returns the largest or the least element, whose gradient all of these share as in JAX."""
    if x.dtype == bool:
        return of_all(bind(x).astype(jnp.int32), axes).astype(bool)
    best = jax.custom_jvp(lambda x: of_all(bind(x), axes))

    @best.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        y = best(x)
        at = (x == jnp.expand_dims(y, dims)).astype(t.dtype)
        total = lambda a: add_up(jnp.sum(a, dims), axes)
        return y, total(at * t) / total(at)

    return best(x)


def _picked(
    params: dict[str, Any], bind: Any, given: list[Any], axes: Axes, dim: int, first: Any
) -> Any:
    """Returns picked elements: of the device that has the word, or to which one outside is next."""
    x, at = given
    size, column = x.shape[dim], params["dimension_numbers"].start_index_map.index(dim)
    last, info = size * lax.axis_size(axes) - 1, jnp.iinfo(at.dtype)
    words = jnp.clip(at[..., column], max(info.min, -1), min(info.max, last + 1))
    words = words.astype(jnp.int32) - first
    own = (words >= 0) | (first == 0)
    own &= (words < size) | (first + size > last)
    at = at.astype(jnp.int32).at[..., column].set(jnp.where(own, words, 0))
    found = bind(x, at)[0]
    dims = [d for d in range(found.ndim) if d not in params["dimension_numbers"].offset_dims]
    own = lax.broadcast_in_dim(own, found.shape, dims)
    return add_up(jnp.where(own, found, 0), axes)
