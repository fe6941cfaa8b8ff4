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
    dropout_rate: float = 0.0
    # Operands after q, k and v: "bias", "mask", "segments" and "key segments", "lengths", "key
    # lengths" and "dropout", as far as there are any, in this order, with their dimensions in the
    # order of `scores`.
    extras: tuple[tuple[str, Dimensions], ...] = ()
    dbias: bool = False  # the bias has a gradient, of its dimensions
    # Number of results a row has besides the output: its largest score, the log of its sum.
    statistics: int = 2
    op: str = "attention"  # the function the user called

    @property
    def dims(self) -> dict[str, Dimensions]:
        """The dimensions of the operands after q, k and v, by their names."""
        return dict(self.extras)

    def named(self, arrays: Sequence[Array]) -> dict[str, Array]:
        return dict(zip(self.dims, arrays, strict=True))

    def forward_dims(self, q_ndim: int, *_: int) -> Dims:
        """The dimensions of the forward's operands, q, k, v and extras, and of its results."""
        d = numbers(q_ndim)
        return (d.q, d.kv, d.kv, *self.dims.values()), (d.q, d.rows, d.rows)[: 1 + self.statistics]

    def gradients_dims(self, q_ndim: int, *_: int) -> Dims:
        """The same of the gradients', which also take out, statistics and out's gradient."""
        d = numbers(q_ndim)
        extras = [*self.dims.values()]
        operands = d.q, d.kv, d.kv, *extras, d.q, d.rows, d.rows, d.q
        return operands, (d.q, d.kv, d.kv, *extras[: self.dbias])


def spread(array: Array, dims: Dimensions, over: Dimensions) -> Array:
    """Returns the array, of dimensions `dims`, with all dimensions `over`: of size 1 if new."""
    sizes = dict(zip(dims, array.shape))
    return array.reshape([sizes.get(d, 1) for d in over])
