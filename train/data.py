"""Batches of a text's tokens.

Which windows of the text are in a step's batch depends on the seed and the step only. So a loader
has no state to save: a run resumed at step k asks for batch k, whatever the number of processes
before and after.
"""

from collections.abc import Iterator

import grain
import numpy as np


class Windows(grain.sources.RandomAccessDataSource):
    """Consecutive windows of `seq_len` tokens, each with the token that follows it."""

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns `(seq_len + 1,)` int32 tokens."""
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
    windows = Windows(tokens, seq_len)
    passes = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    wanted = passes.slice(slice(first * batch_size, steps * batch_size)).batch(batch_size)
    return iter(wanted.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))
