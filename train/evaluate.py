"""Validation: the loss on the held-out text."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.functional import Functional, Params
from ..models.sharding import BATCH
from .data import Windows
from .mesh import batch_sharding, on_devices
from .metrics import NATS_PER_BIT


class Validation(NamedTuple):
    loss: float  # mean, in nats per token
    bits_per_byte: float  # the same by the text's mean: compares models with different tokens

    def __str__(self) -> str:
        return f"loss {self.loss:.4f} nats/token, {self.bits_per_byte:.3f} bits/byte"

    def entry(self, step: int) -> dict[str, Any]:
        """Returns the line of metrics.jsonl for a validation after `step`."""
        return {"step": step, "val_loss": self.loss, "val_bits_per_byte": self.bits_per_byte}


class Evaluator:
    """Measures the mean loss over windows of `seq_len` tokens, spread evenly over a text.

    `batch_size` windows are computed at once; they must divide over the mesh.
    """

    def __init__(
        self,
        model: Functional,
        mesh: Mesh,
        tokens: np.ndarray,
        *,
        seq_len: int,
        batch_size: int,
        tokens_per_byte: float = 1.0,
    ) -> None:
        self._windows = Windows(tokens, seq_len)
        self._seq_len, self._batch_size = seq_len, batch_size
        self._tokens_per_byte = tokens_per_byte
        self._rows = batch_sharding(mesh)
        self._weights = NamedSharding(mesh, P(BATCH))

        def loss_sum(params: Params, tokens: Array, weights: Array) -> Array:
            options = {"reduction": "none", "logits_dtype": jnp.float32}
            losses = model.loss(params, tokens[:, :-1], tokens[:, 1:], **options)
            return jnp.sum(losses.mean(axis=1) * weights)

        self._loss_sum = jax.jit(loss_sum)

    def __call__(
        self, params: Params, tokens: int, stopping: Callable[[], bool] = lambda: False
    ) -> Validation | None:
        """Measures the loss over about `tokens` tokens; None if `stopping` before that."""
        count = min(max(tokens // self._seq_len, 1), len(self._windows))
        chosen = np.unique(np.linspace(0, len(self._windows) - 1, count).round().astype(int))
        sums = []
        for rows, weights in self._batches(chosen):
            if stopping():
                return None
            tokens_here = on_devices(rows, self._rows)
            sums.append(self._loss_sum(params, tokens_here, on_devices(weights, self._weights)))
        loss = float(np.sum([float(s) for s in sums]) / len(chosen))
        return Validation(loss, loss / NATS_PER_BIT * self._tokens_per_byte)

    def _batches(self, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields whole batches of windows; windows of weight zero fill up the last."""
        for start in range(0, len(chosen), self._batch_size):
            indices = chosen[start : start + self._batch_size]
            weights = np.zeros(self._batch_size, np.float32)
            weights[: len(indices)] = 1
            filled = np.resize(indices, self._batch_size)
            yield np.stack([self._windows[i] for i in filled]), weights
