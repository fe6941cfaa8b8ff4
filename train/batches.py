"""Batches of training text: which windows are in a step's batch depends on seed and step only.

Nothing of a loader's state needs saving: a run resumed at step k asks for batch k, whatever the
number of processes that read it before and after.
"""

from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding


class Windows(grain.sources.RandomAccessDataSource):
    """Consecutive windows of `seq_len` tokens, each with the token that follows it."""

    def __init__(self, tokens: np.ndarray, seq_len: int):
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        """Gives `(seq_len + 1,)` int32 tokens."""
        start = int(index) * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].astype(np.int32)


def batches(
    tokens: np.ndarray, *, seq_len: int, batch_size: int, seed: int, first: int, steps: int
) -> Iterator[np.ndarray]:
    """Yields the batches of steps `first` (from 0) to `steps - 1`, read ahead in threads.

    Every pass over the text has its own order; a batch may span two passes.

    Yields: `(batch_size, seq_len + 1)` int32: inputs are all but the last column, targets all but
      the first.
    """
    passes = grain.MapDataset.source(Windows(tokens, seq_len)).seed(seed).shuffle().repeat()
    wanted = passes.slice(slice(first * batch_size, steps * batch_size)).batch(batch_size)
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(wanted.to_iter_dataset(read))


def on_devices(batch: np.ndarray, sharding: NamedSharding) -> Array:
    """Starts moving a batch to the mesh; each process sends only the rows its devices hold."""
    return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])
