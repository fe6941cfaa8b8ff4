"""Kernels over a matrix's tiles: what one does with its tile, apart from how tiles are scheduled.

A `Body` is a function of values in registers, in the compute type:

    (tiles (rows, n), columns (1, n), rows (rows, 1)) -> results, one for each `Out`

`blocks` runs it on TPUs and, interpreted, on CPUs; `triton` on GPUs. Elements beyond the matrix are
zero where they are summed, whatever they are elsewhere.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

Body = Callable[[Sequence[jax.Array], Sequence[jax.Array], Sequence[jax.Array]], Sequence]


@dataclasses.dataclass(frozen=True)
class Out:
    """A result of a kernel.

    Attributes:
      kind: "tile" of the matrix's shape; "row": one value a row, known from one tile; "row sum"
        and "column sum": summed over all the tiles of a row or a column.
      dtype: of the result; sums are kept in the compute type.
    """

    kind: str
    dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel and its operands.

    Attributes:
      name: what the kernel is called in profiles.
      body: what is done with a tile.
      tiles: operands of the matrix's shape (m, n).
      columns: operands of shape (n,).
      rows: operands of shape (m,).
      outs: the results.
      compute: the dtype that values have in the body.
      whole: whether the body needs whole rows.
    """

    name: str
    body: Body
    tiles: Sequence[jax.Array]
    columns: Sequence[jax.Array]
    rows: Sequence[jax.Array]
    outs: Sequence[Out]
    compute: jnp.dtype
    whole: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.tiles[0].shape
        return m, n

    @property
    def kinds(self) -> set[str]:
        return {out.kind for out in self.outs}


def result_type(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> ShapedArray:
    """The type of a kernel's result. A `ShapeDtypeStruct` would have to say over which mesh axes it
    varies wherever shard_map checks that, in words that differ among JAX's versions."""
    return ShapedArray(tuple(shape), jnp.dtype(dtype))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
