"""What simpler models reach on the held-out text: the lines a loss curve is judged by."""

import zlib

import numpy as np

from .data import Text

_CHUNK = 1 << 22


def references(text: Text) -> dict[str, float]:
    """Gives bits per byte on the held-out text of three models of bytes.

    `unigram` knows how often each byte occurs in the training text, `bigram` how often it follows
    each other byte (both with one added to every count); `zlib` is the held-out text compressed by
    itself at level 9.
    """
    counts = np.bincount(text.raw_train, minlength=256) + 1.0
    unigram = -np.log2(counts / counts.sum())[text.raw_held_out].mean()
    pairs = np.ones(256 * 256)
    for start in range(0, len(text.raw_train) - 1, _CHUNK):
        chunk = text.raw_train[start : start + _CHUNK + 1]
        pairs += np.bincount(_pairs(chunk), minlength=256 * 256)
    table = pairs.reshape(256, 256)
    bits = -np.log2(table / table.sum(axis=1, keepdims=True)).ravel()
    bigram = bits[_pairs(text.raw_held_out)].mean()
    packed = len(zlib.compress(text.raw_held_out.tobytes(), 9))
    return {
        "unigram": float(unigram),
        "bigram": float(bigram),
        "zlib": 8 * packed / len(text.raw_held_out),
    }


def _pairs(tokens: np.ndarray) -> np.ndarray:
    return tokens[:-1].astype(np.int64) * 256 + tokens[1:]
