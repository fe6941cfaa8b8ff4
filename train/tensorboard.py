"""TensorBoard events, beside metrics.jsonl."""

from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_s": "speed/tokens_per_s",
    "val_loss": "validation/loss",
    "val_bits_per_byte": "validation/bits_per_byte",
}


class TensorBoard:
    """Writes a run's figures as TensorBoard scalars.

    Args:
      folder: of the events; a resumed run's later ones hide the earlier of the same steps.
      from_step: the step a resumed run continues from.
    """

    def __init__(self, folder: Path, from_step: int | None):
        purge = None if from_step is None else from_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, entry: dict[str, Any]):
        for name, tag in _NAMES.items():
            if entry.get(name) is not None:
                self._writer.add_scalar(tag, entry[name], entry["step"])

    def sync(self):
        self._writer.flush()

    def close(self):
        self._writer.close()
