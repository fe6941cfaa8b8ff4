"""Batches of a text's tokens, and how documents are packed into their rows.

Every token but a document's last is an input, every one but its first a target, and all rows hold
equally many such pairs. So no token is predicted from another document, every place of a row has a
target, and a document that does not fit continues in the next row, without the tokens before.

Which windows of the text are in a step's batch depends on the seed and the step only. So a loader
has no state to save: a run resumed at step k asks for batch k, whatever the number of processes
before and after.
"""

from collections.abc import Iterator

import grain
import numpy as np


class Windows(grain.sources.RandomAccessDataSource):
    """Consecutive windows of `seq_len` tokens, each with the token that follows it.

    `documents`, the number of tokens of each, packs them: then a window is `seq_len` inputs, the
    targets that follow them in their documents, and the number of each one's document.
    """

    def __init__(
        self, tokens: np.ndarray, seq_len: int, documents: np.ndarray | None = None
    ) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self._ends = None if documents is None else np.cumsum(with_target(documents))

    def _count(self) -> int:
        """The number of targets."""
        if self._ends is None:
            return len(self._tokens) - 1
        return int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        return self._count() // self._seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns `(seq_len + 1,)` int32 tokens; `(3, seq_len)` of documents (`step.parts_of`)."""
        start = int(index) * self._seq_len
        if self._ends is None:
            return self._tokens[start : start + self._seq_len + 1].astype(np.int32)
        pairs = np.arange(start, start + self._seq_len)
        document = np.searchsorted(self._ends, pairs, side="right")
        at = pairs + document  # every document before has had a token that is no input
        rows = self._tokens[at], self._tokens[at + 1], document - document[0]
        return np.stack([row.astype(np.int32) for row in rows])


def with_target(documents: np.ndarray) -> np.ndarray:
    """Returns the number of (input, target) pairs of each document: its tokens less one."""
    return documents[documents > 0] - 1


def batches(
    tokens: np.ndarray,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    first: int,
    steps: int,
    documents: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Yields the batches of steps `first` (from 0) to `steps - 1`, read ahead in threads.

    Every pass over the text has its own order; a batch may span two passes.

    Yields: `(batch_size, seq_len + 1)` int32: inputs are all but the last column, targets all but
      the first. With `documents`, the number of tokens of each, `(batch_size, 3, seq_len)`: inputs,
      targets and segment ids.
    """
    windows = Windows(tokens, seq_len, documents)
    passes = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    wanted = passes.slice(slice(first * batch_size, steps * batch_size)).batch(batch_size)
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(wanted.to_iter_dataset(read))
