"""The loss of a linear layer and its gradients in float64 NumPy, and how far one may be from them.

Formulas: Σ_i w_i (lse_i - Σ_j t_ij c_ij + z_loss · lse_i²) with c = softcap · tanh(z / softcap)
and targets t = (1 - smoothing) · [j = label] + smoothing / vocabulary.
"""

import dataclasses

import numpy as np
from reference import Expected, wide


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The softmax of logits, (rows, vocab) float64."""

    z: np.ndarray
    labels: np.ndarray
    softcap: float | None = None
    smoothing: float = 0.0

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
    def target(self) -> np.ndarray:
        one_hot = np.arange(self.z.shape[-1]) == self.labels[:, None]
        return (1 - self.smoothing) * one_hot + self.smoothing / self.z.shape[-1]

    @property
    def picked(self) -> np.ndarray:
        return (self.c * self.target).sum(-1)

    @property
    def most(self) -> np.ndarray:
        return self.c.max(-1)

    @property
    def sum(self) -> np.ndarray:
        return np.exp(self.c - self.most[:, None]).sum(-1)

    def gradient(self, a, b) -> np.ndarray:
        """The gradient of Σ a · lse - b · picked by z."""
        p = np.exp(self.c - self.lse[:, None])
        return (wide(a)[:, None] * p - wide(b)[:, None] * self.target) * self.slope


def _spread(softmax: Softmax, binary: bool) -> np.ndarray:
    """exp(c - most) has the argument's error, and 1 for its own.

    It is the rounding of the difference, and those of c where there is a softcap (tanh and what is
    around it are a few), or where powers are `binary`: of c · log2 e.
    """
    most, capped = softmax.most[:, None], softmax.softcap is not None
    return 1 + most - softmax.c + (binary + 2 * capped) * (np.abs(softmax.c) + np.abs(most))


def statistics(softmax: Softmax, binary: bool = False) -> tuple[Expected, Expected, Expected]:
    """The maximum, the sum of exponentials of differences to it, and the picked logit."""
    n, capped = softmax.z.shape[-1], softmax.softcap is not None
    size = lambda value: np.abs(value) * 2 * capped
    picked = (np.abs(softmax.c) * softmax.target).sum(-1)
    terms = n if softmax.smoothing else 1
    powers = np.exp(softmax.c - softmax.most[:, None]) * _spread(softmax, binary)
    return (
        Expected(softmax.most, size(softmax.most)),
        Expected(softmax.sum, powers.sum(-1), n),
        Expected(softmax.picked, size(picked) + picked * bool(softmax.smoothing), terms),
    )


def gradient(softmax: Softmax, a, b, n: int = 1, binary: bool = False) -> Expected:
    """The gradient of given logits, of Σ a · lse - b · picked.

    An exponential of magnitude p is off by p times its argument's error, as the sum of them is, and
    1 - (c / softcap)² by that of the square.
    """
    p, capped = np.exp(softmax.c - softmax.lse[:, None]), softmax.softcap is not None
    spread = _spread(softmax, binary)
    spread = spread + (p * spread).sum(-1, keepdims=True)
    size = np.abs(wide(a))[:, None] * p * spread + np.abs(wide(b))[:, None] * softmax.target
    return Expected(softmax.gradient(a, b), size * (1 + capped), n)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The loss of x (rows, n) times w (n, vocab) plus a bias, its gradients, and their errors.

    Attributes:
      counts: for each row what multiplies its loss.
      dtype, logits: epsilons: half of that of the operands, and of the logits as rounded.
      sums: half the epsilon of sums.
    """

    x: np.ndarray
    w: np.ndarray
    labels: np.ndarray
    counts: np.ndarray
    softcap: float | None
    z_loss: float
    dtype: float
    logits: float
    sums: float
    bias: np.ndarray | float = 0.0
    smoothing: float = 0.0

    @property
    def softmax(self) -> Softmax:
        z = self.x @ self.w + self.bias
        return Softmax(z, self.labels, self.softcap, self.smoothing)

    def _arithmetic(self, terms: int) -> float:
        return (8 + np.sqrt(terms)) * self.sums

    @property
    def dc(self) -> np.ndarray:
        """How far capped logits may be off: |dc/dz| is at most 1."""
        s, sizes = self.softmax, np.abs(self.x) @ np.abs(self.w)
        dz = self.logits * np.abs(s.z) + self._arithmetic(self.x.shape[1]) * sizes
        if np.ndim(self.bias):  # the product, the bias and their sum are rounded
            dz += self.logits * (np.abs(s.z - self.bias) + np.abs(self.bias))
        return dz + 8 * self.sums * np.abs(s.c)

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Each row's loss, not weighted, and its error: lse moves no more than the logits do."""
        s, off = self.softmax, self.dc.max(-1)
        each = s.lse - s.picked + self.z_loss * s.lse**2
        size = np.abs(s.lse) + (np.abs(s.c) * s.target).sum(-1) + self.z_loss * s.lse**2
        error = (2 + 2 * self.z_loss * np.abs(s.lse)) * off
        return each, error + self._arithmetic(self.w.shape[1]) * (1 + size)

    def total(self) -> tuple[float, float]:
        each, error = self.rows()
        size = np.abs(self.counts * each).sum() * self._arithmetic(len(each))
        return (self.counts * each).sum(), (np.abs(self.counts) * error).sum() + size

    def gradients(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """dx, dw and dbias, and their errors before they are rounded to their own dtypes."""
        s, off = self.softmax, self.dc
        p = np.exp(s.c - s.lse[:, None])
        a = (self.counts * (1 + 2 * self.z_loss * s.lse))[:, None]
        g = s.gradient(self.counts * (1 + 2 * self.z_loss * s.lse), self.counts)
        most = off.max(-1, keepdims=True)
        spread = 8 * self.sums * (1 + np.abs(s.c) + np.abs(s.lse)[:, None])
        dg = np.abs(a) * p * np.expm1(2 * most + spread)
        dg += np.abs(self.counts)[:, None] * 2 * self.z_loss * most * p
        if self.softcap is not None:
            outer = np.abs(a) * p + np.abs(self.counts)[:, None] * s.target
            dg += outer * (2 * np.abs(s.c) * off / self.softcap**2 + 8 * self.sums)
        dg += self.dtype * np.abs(g)
        w, x, size = np.abs(self.w), np.abs(self.x), np.abs(g)
        dx = dg @ w.T + self._arithmetic(g.shape[1]) * (size @ w.T)
        dw = x.T @ dg + self._arithmetic(len(g)) * (x.T @ size)
        dbias = dg.sum(0) + self._arithmetic(len(g)) * size.sum(0)
        return [(g @ self.w.T, dx), (self.x.T @ g, dw), (g.sum(0), dbias)]
