"""Forms: what a value is in terms of the scores of one product.

A `Form` is a linear function of scores, or its exponential, combined with masks, biases and one-hot
arrays.
"""

import dataclasses
import math
from dataclasses import replace
from typing import Any

from .constants import ARITHMETIC
from .labels import Dims, Label, Labels, expand
from .program import Equation


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask, by which scores are replaced by a number, or have it added.

    Attributes:
      value, dims: the booleans.
      keep: what they are where the scores stay.
      fill: the number. It has gone through what the scores went through.
      added: it is added to the scores, which then count in a row without any other.
      changed: a bias was added after it, also to what it writes.
    """

    value: int
    dims: Dims
    keep: bool
    fill: float
    added: bool = False
    changed: bool = False


@dataclasses.dataclass(frozen=True)
class Scores:
    """scale · lhs·rhs, or scale · tanh(inner · lhs·rhs); plus biases; masked.

    Attributes:
      dot: the product.
      biases: (value, labels, factor) of what is added.
      added: the dtypes that biases are added in.
    """

    dot: Equation
    scale: float = 1.0
    inner: float | None = None
    biases: tuple[tuple[int, Dims, float], ...] = ()
    masks: tuple[Mask, ...] = ()
    added: frozenset[Any] = frozenset()


@dataclasses.dataclass(frozen=True)
class Term:
    """A function of scores that is constant along an axis: "max", "lse", "pick", "total" or "mean".

    The mean is of the scores by their own softmax, of entropies.
    A maximum under `stop_gradient` is "stopped", another term: the two differ in their gradients.

    Attributes:
      labels: (value, labels) of the positions of a pick, and the axis' labels in their order.
      outside: what such a position gives where it is outside the axis: "0", "clip", "nan", or
        "drop", which clips and has no gradient; with "all", the log-sum-exp is picked with it, as
        of log-probabilities.
    """

    kind: str
    base: Scores
    axis: frozenset[Label]
    labels: tuple[int, Dims, Labels] | None = None
    outside: str = ""


Terms = frozenset[tuple[Term, float]]


MAXIMA = "max", "stopped"


@dataclasses.dataclass(frozen=True)
class Mixed:
    """exp(scores + terms) · v."""

    product: Equation
    side: int  # v's side of the product
    dims: Dims  # v's
    axis: Labels


@dataclasses.dataclass(frozen=True)
class Dropout:
    """A factor of probabilities: a number where all masks keep them, 0 elsewhere.

    Attributes:
      masks: (value, labels, which of its booleans keeps) of each.
    """

    factor: float = 1.0
    masks: tuple[tuple[int, Dims, bool], ...] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """along · scores + terms, or its exponential.

    Attributes:
      hot: it is multiplied by an array of two numbers, a one-hot array: a term's `labels`, the
        axis, the number elsewhere, and there. No labels: by the scores' softmax along the axis,
        times the last number.
      summed: what labels beside its axis an array with one-hot factors was summed over.
      mixed: the product with v, of an exponential.
      safe: a maximum was subtracted before the exponential, which cannot overflow then.
      stopped: the scores went through `stop_gradient`.
      dropout: what probabilities were multiplied by before their product with v.
    """

    base: Scores
    dims: Dims
    along: float = 1.0
    terms: Terms = frozenset()
    exp: bool = False
    hot: Any = None
    summed: frozenset[Label] = frozenset()
    mixed: Mixed | None = None
    safe: bool = False
    stopped: bool = False
    dropout: Dropout | None = None

    @property
    def soft(self) -> bool:
        """Tells if it is an exponential of the scores along their axis."""
        return self.exp and self.along == 1 and not (self.mixed or self.hot or self.dropout)

    @property
    def is_softmax(self) -> bool:
        """Tells if it is probabilities, with dropout or without."""
        own = {(Term("lse", self.base, t.axis), -1.0) for t, _ in self.terms}
        plain = self.exp and self.along == 1 and not self.mixed and len(own) == 1
        return plain and self.terms == own

    @property
    def is_linear(self) -> bool:
        """Tells if it is a linear function of scores and terms, and nothing more."""
        return not (self.exp or self.hot or self.mixed)

    @property
    def is_scores(self) -> bool:
        return self.is_linear and self.along == 1 and not (self.terms or self.summed)

    @property
    def is_maximum(self) -> bool:
        only = all(t.kind in MAXIMA for t, _ in self.terms)
        return not (self.exp or self.along) and bool(self.terms) and only

    @property
    def is_attention(self) -> bool:
        if self.mixed is None or not self.exp or self.stopped:
            return False
        lse = Term("lse", self.base, frozenset(expand(self.mixed.axis)))
        return self.terms == {(lse, -1.0)}

    @property
    def is_loss(self) -> bool:
        """Tells if it is log-sum-exps and picked elements alone, of the same scores and axis."""
        if not self.is_linear or self.along or not self.terms:
            return False
        places = {(t.base, t.axis) for t, _ in self.terms}
        labels = {(t.labels, t.outside) for t, _ in self.terms if t.kind == "pick"}
        return (
            len(places) == 1
            and len(labels) <= 1
            and all(t.kind not in MAXIMA for t, _ in self.terms)
        )


def plus(a: Terms, b: Terms, factor: float = 1.0) -> Terms:
    """Returns a + factor · b; what cancels is gone, but for a pick that may be NaN."""
    total, largest = dict(a), {t: abs(f) for t, f in a}
    for term, f in b:
        total[term] = total.get(term, 0.0) + factor * f
        largest[term] = max(largest.get(term, 0.0), abs(factor * f))
    stays = lambda t, f: abs(f) > ARITHMETIC * largest[t] or t.outside.endswith("nan")
    return frozenset((t, f) for t, f in total.items() if stays(t, f))


def scaled(form: Form, c: float) -> Form | None:
    """Returns a form times a number."""
    if form.exp or c == 0 or not math.isfinite(c):
        return None
    s = form.base
    if form.along == 1 and not form.terms and not form.hot and c > 0:
        biases = tuple((v, dims, f * c) for v, dims, f in s.biases)
        masks = tuple(replace(m, fill=m.fill * c) for m in s.masks)
        return replace(form, base=replace(s, scale=s.scale * c, biases=biases, masks=masks))
    return replace(form, along=form.along * c, terms=plus(frozenset(), form.terms, c))
