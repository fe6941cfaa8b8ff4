"""Labels: what the dimensions of arrays mean, through reshapes, transposes and broadcasts.

An array's `Dims` are a tuple of labels for each of its dimensions. A dimension of size 1 has none.
A reshape that splits a dimension splits its label, for all arrays that have it; one that merges
dimensions puts their labels in a row. What a broadcast makes is free: values are the same along it,
and it becomes whatever it meets.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .sites import Left


class Label:
    """A dimension, or a factor of one that a reshape has split.

    Attributes:
      free: values are the same along it.
      cut: `(label, first)` where it is a slice of another.
      parts: what it was split into, the slower first; None.
    """

    __slots__ = "cut", "free", "parts", "size"

    def __init__(self, size: int, free: bool = False, cut: "tuple[Label, int] | None" = None):
        self.size, self.free, self.cut = size, free, cut
        self.parts: tuple[Label, Label] | None = None


UNCHANGED = "convert_element_type", "copy", "name", "sharding_constraint", "pvary", "pcast"
"""Equations whose results have their operand's dimensions, and its values but for a cast."""
MOVED = "broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"
"""Equations whose results have their operand's values in other dimensions."""
LAID_OUT = frozenset((*MOVED, *UNCHANGED, "copy_p", "reduce_precision", "reshard", "stop_gradient"))
"""All whose results are their one operand, but for a cast, its gradient or where it lies."""

Labels = tuple[Label, ...]
Dims = tuple[Labels, ...]


def expand(labels: Iterable[Label]) -> Labels:
    """Returns labels, with their parts in place of those that were split."""
    labels = tuple(labels)
    for label in labels:
        if label.parts:
            return tuple(a for l in labels for a in (expand(l.parts) if l.parts else (l,)))
    return labels  # nearly always


def atoms(dims: Iterable[Iterable[Label]]) -> Labels:
    """Returns the labels of all dimensions in a row."""
    return expand([label for labels in dims for label in labels])


def expanded(dims: Iterable[Iterable[Label]]) -> Dims:
    """Returns an array's labels, with their parts in place of those that were split."""
    # `expand` is called where there is anything to split: a reader steps into few functions.
    return tuple([expand(d) if any([l.parts for l in d]) else tuple(d) for d in dims])


def size(labels: Iterable[Label]) -> int:
    return math.prod([l.size for l in labels])


def shape_of(dims: Iterable[Iterable[Label]]) -> tuple[int, ...]:
    """Returns the shape of an array with these labels."""
    return tuple([math.prod([l.size for l in labels]) for labels in dims])


def fresh(shape: Sequence[int], free: bool = False) -> Dims:
    """Returns new labels for the dimensions of a shape."""
    return tuple([(Label(n, free),) if n != 1 else () for n in shape])


def regroup(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Returns the labels of an array reshaped to `shape`; None if its dimensions cut across."""
    if 0 in shape:
        return None
    left, out = list(atoms(dims)), []
    for n in shape:
        group: list[Label] = []
        while n > 1:
            if not left:
                return None
            label = left.pop(0)
            if n % label.size:
                if label.size % n or label.cut:
                    return None
                label.parts = Label(n, label.free), Label(label.size // n, label.free)
                label, rest = label.parts
                left.insert(0, rest)
            group.append(label)
            n //= label.size
        out.append(tuple(group))
    return None if left else tuple(out)


def meet(a: Dims, b: Dims) -> Dims | None:
    """Returns the labels of two arrays combined element by element; None where they differ.

    A free label meets any of its size; of two dimensions one may have size 1.
    """
    if len(a) != len(b):
        return None
    out = []
    for x, y in zip(map(expand, a), map(expand, b)):
        if x != y:
            if not all(l.free for l in y):
                x, y = y, x
            if not all(l.free for l in y) or y and size(x) != size(y):
                return None
        out.append(x)
    return tuple(out)


def moved(made: Any, dims: Dims, given: Sequence[int], shape: Sequence[int]) -> Dims | None:
    """Returns the labels of an equation's result that lays its operand out anew; None of others.

    Args:
      made: the equation.
      dims, given: the labels and the shape of its operand.
      shape: that of its result.
    """
    p = made.params
    if made.name == "transpose":
        return tuple(dims[i] for i in p["permutation"])
    if made.name == "broadcast_in_dim":
        at = dict(zip(map(int, p["broadcast_dimensions"]), range(len(dims))))
        at = {j: dims[i] for j, i in at.items() if given[i] == shape[j]}
        return tuple([at[j] if j in at else fresh([n], free=True)[0] for j, n in enumerate(shape)])
    return _regrouped(made, dims, shape)


def _regrouped(made: Any, dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Returns the labels of `shape`, which a reshape gives its operand or its result."""
    if made.name in ("reshape", "squeeze", "expand_dims"):
        transposes = made.name == "reshape" and made.params["dimensions"] is not None
        return None if transposes else regroup(dims, shape)
    return dims if made.name in UNCHANGED else None


def moved_back(made: Any, dims: Dims, given: Sequence[int], shape: Sequence[int]) -> Dims | None:
    """Returns the labels of an equation's operand from those of its result; None if unknown."""
    p = made.params
    if made.name == "transpose":
        return tuple(dims[p["permutation"].index(i)] for i in range(len(dims)))
    if made.name == "broadcast_in_dim":
        return tuple(
            dims[int(j)] if n != 1 or shape[int(j)] == 1 else ()
            for j, n in zip(p["broadcast_dimensions"], given)
        )
    return _regrouped(made, dims, given)


def peel(
    program: Any, v: int, dims: Dims, behind: Callable[[int, Any], int | None], *also: str
) -> tuple[int, Dims]:
    """Goes back from a value to what it was laid out anew from; returns that and its labels.

    Args:
      dims: the value's labels.
      behind: returns the operand to go back to, given a value and what makes it; or None.
      also: other equations to go through, to operands of their results' dimensions.
    """
    avals = program.avals
    dims = tuple([d if n != 1 else () for d, n in zip(dims, avals[v].shape, strict=True)])
    while (made := program.maker.get(v)) is not None and made.ins:
        if made.name not in also and made.name not in MOVED and made.name not in UNCHANGED:
            break
        if (source := behind(v, made)) is None:
            break
        if made.name in MOVED:
            back = moved_back(made, dims, avals[source].shape, avals[v].shape)
            if back is None:
                break
            dims = back
        v = source
    return v, expanded(dims)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Says what cannot be laid out anew on Explicit axes: no user has called that reshape."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":  # JAX has no public name for it
            raise
        raise Left("it would join dimensions that Explicit axes split") from error


@_said()
def arrange(x: Any, dims: Dims, groups: Sequence[Iterable[Label]], full: bool = True) -> Any:
    """Returns x with one dimension for each group of labels.

    What x lacks is broadcast, or of size 1 where `full` is false.
    """
    xp = np if isinstance(x, np.ndarray) else jnp
    have, groups = atoms(dims), [expand(g) for g in groups]
    if set(have) - {l for g in groups for l in g}:
        raise ValueError("labels of the array are in no group")
    if xp.shape(x) != shape_of([[l] for l in have]):
        x = xp.reshape(x, [l.size for l in have])
    order = [have.index(l) for g in groups for l in g if l in have]
    if order != sorted(order):
        x = xp.transpose(x, order)
    some = [full or any(l in have for l in g) for g in groups]
    if all(l in have for g in groups for l in g):
        return xp.reshape(x, [size(g) for g in groups])
    x = xp.reshape(x, [l.size if l in have else 1 for g in groups for l in g])
    x = xp.broadcast_to(x, [l.size if s else 1 for g, s in zip(groups, some) for l in g])
    return xp.reshape(x, [size(g) if s else 1 for g, s in zip(groups, some)])
