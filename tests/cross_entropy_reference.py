"""The loss of a linear layer and its gradients in float64 NumPy, and how far one may be from them.

Formulas: Σ_i w_i (lse_i - c_i,label + z_loss · lse_i²) with c = softcap · tanh(z / softcap).
"""

import dataclasses

import numpy as np
from reference import Expected, wide


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Of given logits, (rows, vocab) float64."""

    z: np.ndarray
    labels: np.ndarray
    softcap: float | None = None

    @property
    def c(self) -> np.ndarray:
        return self.z if self.softcap is None else self.softcap * np.tanh(self.z / self.softcap)

    @property
    def slope(self) -> np.ndarray:
        return np.ones(()) if self.softcap is None else 1 - (self.c / self.softcap) ** 2

    @property
    def lse(self) -> np.ndarray:
        most = self.c.max(-1)
        return most + np.log(np.exp(self.c - most[:, None]).sum(-1))

    @property
    def one_hot(self) -> np.ndarray:
        return np.arange(self.z.shape[-1]) == self.labels[:, None]

    @property
    def picked(self) -> np.ndarray:
        return (self.c * self.one_hot).sum(-1)

    def gradient(self, a, b, lse=None) -> np.ndarray:
        """Of Σ a · lse - b · picked, with respect to z."""
        p = np.exp(self.c - (self.lse if lse is None else wide(lse))[:, None])
        return (wide(a)[:, None] * p - wide(b)[:, None] * self.one_hot) * self.slope


def statistics(softmax: Softmax) -> tuple[Expected, Expected]:
    """lse and the picked logit of given logits.

    The exponentials are off by their arguments' roundings, which a sum of them passes on; log and
    tanh add a few roundings of numbers as large as the logits.
    """
    n = softmax.z.shape[-1]
    size = np.abs(softmax.c).max(-1) + 1 + np.abs(softmax.lse)
    return Expected(softmax.lse, size, n), Expected(softmax.picked, np.abs(softmax.picked) * 2)


def gradient(softmax: Softmax, a, b, lse=None, n: int = 1) -> Expected:
    """The gradient of given logits.

    An exponential of magnitude p is off by p times its argument's error, and 1 - (c / softcap)² by
    that of the square.
    """
    p = np.exp(softmax.c - softmax.lse[:, None])
    spread = 1 + np.abs(softmax.c) + np.abs(softmax.lse)[:, None]
    size = np.abs(wide(a))[:, None] * p * spread + np.abs(wide(b))[:, None] * softmax.one_hot
    return Expected(softmax.gradient(a, b, lse), size * (1 + (softmax.softcap is not None)), n)
