"""Kernels over a matrix's tiles: what one does with its tile, apart from how tiles are scheduled.

A `Body` is a function of values in registers, in the compute type:

    (tiles (rows, n), columns (1, n), rows (rows, 1)) -> results, one for each `Out`

`blocks` runs it on TPUs and, interpreted, on CPUs. Elements beyond the matrix are
zero where they are summed, whatever they are elsewhere.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

Arrays = Sequence[jax.Array]
Body = Callable[[Arrays, Arrays, Arrays], Sequence]
Ref = Any  # a reference to memory within a kernel


@dataclasses.dataclass(frozen=True)
class Out:
    """A result of a kernel.

    Its kind is "tile", of the matrix's shape; "row", one value a row, known from one tile; or "row
    sum" or "column sum", over all the tiles of a row or a column, kept in the compute type.
    """

    kind: str
    dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel and its operands."""

    name: str  # in profiles
    body: Body
    tiles: Arrays  # (m, n) each
    columns: Arrays  # (n,) each
    rows: Arrays  # (m,) each
    outs: Sequence[Out]
    compute: jnp.dtype  # dtype of values in the body
    whole: bool = False  # the body needs whole rows

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.tiles[0].shape
        return m, n

    @property
    def kinds(self) -> set[str]:
        return {out.kind for out in self.outs}


def result_type(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> ShapedArray:
    """Returns the type of a kernel's result. A `ShapeDtypeStruct` would have to say over which mesh
    axes it varies wherever shard_map checks that, in words that differ among JAX's versions."""
    return ShapedArray(tuple(shape), jnp.dtype(dtype))


def clear(ref: Ref) -> None:
    """Writes zeros."""
    ref[...] = jnp.zeros(ref.shape, ref.dtype)


def before(value: jax.Array, end: Any, axis: int) -> jax.Array:
    """Returns `value` with zeros from index `end` of an axis on."""
    inside = jax.lax.broadcasted_iota(jnp.int32, value.shape, axis) < end
    return jnp.where(inside, value, jnp.zeros((), value.dtype))


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)
