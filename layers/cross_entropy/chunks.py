"""Chunks of rows: how many rows one has, and a function of one chunk after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

CHUNK_BYTES = 2**29
"""Bytes of a chunk's logits. Larger chunks add to the sum of the kernel's gradient less often."""
CODED_CHUNK_BYTES = 7 * 2**27
"""The same of logits and the codes of their gradient, which are there at one time in FP8."""
_MULTIPLE = 128  # rows of a GEMM's tile
_SYMBOLIC_WORDS = 1 << 17  # a vocabulary's whose size is not known yet


def chunk_rows(rows: int, vocabulary: int, itemsize: int, bytes: int = CHUNK_BYTES) -> int:
    """Returns the rows of a chunk of so many bytes: as equal as multiples of 128 allow.

    Of symbolic sizes, which are known when the program runs, it is a number all the same.
    """
    vocabulary = vocabulary if isinstance(vocabulary, int) else _SYMBOLIC_WORDS
    most = max(bytes // max(vocabulary * itemsize, 1), 1)
    unit = min(_MULTIPLE, most)
    if not isinstance(rows, int):
        return most // unit * unit
    if rows <= most:
        return rows
    chunks = -(-rows // (most // unit * unit))
    return -(-rows // (chunks * unit)) * unit


def _bits(kind: str, arrays: Sequence[Array]) -> list[Array]:
    """Returns the arrays as "int" or "float" of the same bits."""
    return [lax.bitcast_convert_type(a, f"{kind}{8 * a.dtype.itemsize}") for a in arrays]


def in_chunks(
    chunk: Callable[..., tuple[list[Array], list[Array]]], arrays: Sequence[Array], size: int
) -> list[Array]:
    """Returns `chunk`'s results for all rows, `size` at a time: rows, then sums.

    `chunk` is `(sums or None, *arrays) -> (rows' results, sums)` for a part of the rows, the first
    dimension of each of the arrays.
    """
    rows = arrays[0].shape[0]
    # The remainder comes first: sums begin with it, rather than with zeros to be written and read.
    first = rows % size or size if isinstance(rows, int) else rows % size
    take = lambda start, count: [lax.dynamic_slice_in_dim(a, start, count) for a in arrays]
    put = lambda into, part, start: lax.dynamic_update_slice_in_dim(into, part, start, 0)
    if not isinstance(rows, int):  # symbolic: nobody knows yet that a slice is no larger
        at = lambda start, count: start + jnp.arange(count)
        take = lambda start, count: [jnp.take(a, at(start, count), 0, mode="clip") for a in arrays]
        put = lambda into, part, start: into.at[at(start, part.shape[0])].set(part, mode="drop")
    results, sums = chunk(None, *take(0, first))
    if isinstance(rows, int) and first == rows:
        return [*results, *sums]
    every = [put(jnp.zeros((rows, *r.shape[1:]), r.dtype), r, 0) for r in results]

    def step(carry: Any, start: Array) -> tuple[Any, None]:
        every, sums = carry
        results, sums = chunk(_bits("float", sums), *take(start, size))
        return ([put(e, r, start) for e, r in zip(every, results)], _bits("int", sums)), None

    carry = every, _bits("int", sums)
    if isinstance(rows, int):
        (every, sums), _ = lax.scan(step, carry, first + size * jnp.arange((rows - first) // size))
    else:  # a scan has a step at least
        following = lambda i, carry: step(carry, first + size * i)[0]
        every, sums = lax.fori_loop(0, jnp.asarray(rows // size), following, carry)
    return [*every, *_bits("float", sums)]
