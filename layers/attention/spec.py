"""The static description of an attention, and the numbers of its dimensions.

The operations take heads in two dimensions, so that each may be split over a mesh:

    q (*batch, length, kv heads, group, width)    k, v (*batch, key length, kv heads, width)

q's dimensions are numbered first, then comes the key length. Operands that are broadcast along a
dimension (a bias, a mask, segment ids) do not have it.
"""

import dataclasses
from collections.abc import Sequence

from jax import Array

Dimensions = tuple[int, ...]
Dims = tuple[Sequence[Dimensions], Sequence[Dimensions]]


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of the dimensions, for a number of batch dimensions."""

    batch: Dimensions
    length: int
    heads: int  # heads of keys and values
    group: int  # query heads that share one of them
    width: int
    keys: int  # key length

    @property
    def q(self) -> Dimensions:
        return *self.batch, self.length, self.heads, self.group, self.width

    @property
    def kv(self) -> Dimensions:
        return *self.batch, self.keys, self.heads, self.width

    @property
    def rows(self) -> Dimensions:
        return *self.batch, self.heads, self.group, self.length

    @property
    def scores(self) -> Dimensions:
        return *self.rows, self.keys


def numbers(q_ndim: int) -> Numbers:
    """Returns the numbers of the dimensions for a q of `q_ndim`."""
    n = q_ndim - 4
    return Numbers(tuple(range(n)), n, n + 1, n + 2, n + 3, n + 4)


@dataclasses.dataclass(frozen=True)
class Spec:
    """An attention without its arrays."""

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    precision: str | None = None  # the products' precision
    # The dimensions of each operand that exists, in the order of `scores`.
    bias: Dimensions | None = None
    mask: Dimensions | None = None
    segments: tuple[Dimensions, Dimensions] | None = None  # dimensions for queries, for keys
    dbias: bool = False  # the bias has a gradient, of its dimensions
    # Number of results a row has besides the output: its largest score, the log of its sum.
    statistics: int = 2
    op: str = "attention"  # the function the user called

    @property
    def extras(self) -> tuple[Dimensions, ...]:
        """The dimensions of all operands after q, k and v: bias, mask and segments."""
        given = self.bias, self.mask, *(self.segments or ())
        return tuple(dims for dims in given if dims is not None)

    def forward_dims(self, q_ndim: int, *_: int) -> Dims:
        """The dimensions of the forward's operands, q, k, v and extras, and of its results."""
        d = numbers(q_ndim)
        return (d.q, d.kv, d.kv, *self.extras), (d.q, d.rows, d.rows)[: 1 + self.statistics]

    def gradients_dims(self, q_ndim: int, *_: int) -> Dims:
        """The same of the gradients', which also take out, statistics and out's gradient."""
        d = numbers(q_ndim)
        operands = d.q, d.kv, d.kv, *self.extras, d.q, d.rows, d.rows, d.q
        return operands, (d.q, d.kv, d.kv, *self.extras[: self.dbias])

    def with_extras(self, dims: Sequence[Dimensions]) -> "Spec":
        """Returns the spec with these dimensions of the extras."""
        found = iter(dims)
        bias = None if self.bias is None else next(found)
        mask = None if self.mask is None else next(found)
        segments = None if self.segments is None else (next(found), next(found))
        return dataclasses.replace(self, bias=bias, mask=mask, segments=segments)


@dataclasses.dataclass(frozen=True)
class Extras:
    """The operands after q, k and v."""

    bias: Array | None
    mask: Array | None
    segments: tuple[Array, Array] | None

    @classmethod
    def of(cls, spec: Spec, arrays: Sequence[Array]) -> "Extras":
        found = iter(arrays)
        bias = None if spec.bias is None else next(found)
        mask = None if spec.mask is None else next(found)
        return cls(bias, mask, None if spec.segments is None else (next(found), next(found)))


def spread(array: Array, dims: Dimensions, over: Dimensions) -> Array:
    """Returns the array, of dimensions `dims`, with all dimensions `over`: of size 1 if new."""
    sizes = dict(zip(dims, array.shape))
    return array.reshape([sizes.get(d, 1) for d in over])
