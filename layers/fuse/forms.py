"""Forms and rows: what a value is in terms of the scores of one product.

A `Form` is a linear function of scores, or its exponential, combined with masks, biases, one-hot
arrays and weights. A `Row` is an element in rows of it that see nothing. All elements of such a row
are masked, so they are one number, and what the program computes of them is computed here as the
program does, in its dtypes: exp(c - c) / n is 1 / n, 0 / 0 is NaN, exp(c - (c + log n)) is 1 where
c absorbs the logarithm. A gradient that comes back is a number or NaN; a select sets it to 0, a
division by 0 makes NaN even of 0, and so on, down to the scores. What is not known that way is
"mixed", and then proves nothing.
"""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np

from .constants import ARITHMETIC, ELEMENTWISE
from .labels import MOVED, UNCHANGED, Dims, Label, Labels, expand, expanded
from .program import Equation


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask, by which scores are replaced by a number, or have it added.

    Attributes:
      value, dims: the booleans.
      keep: what they are where the scores stay.
      fill: the number. It has gone through what the scores went through.
      added: it is added to the scores, which then count in a row without any other.
      changed: a bias was added after it: a row of fills is not uniform.
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
class Weight:
    """A factor of losses: an array, or a mask that selects them (`select`)."""

    value: int
    dims: Dims
    select: bool = False
    keep: bool = True


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
      summed: what labels it was summed over.
      mixed: the product with v, of an exponential.
      safe: a maximum was subtracted before the exponential, which cannot overflow then.
      weights: what losses were multiplied by, before they were summed.
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
    weights: tuple[Weight, ...] = ()
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
    def is_scores(self) -> bool:
        plain = not (self.exp or self.terms or self.hot or self.mixed or self.weights)
        return plain and self.along == 1 and not self.summed

    @property
    def is_maximum(self) -> bool:
        return (
            not self.exp
            and not self.along
            and bool(self.terms)
            and all(t.kind in MAXIMA for t, _ in self.terms)
        )

    @property
    def is_attention(self) -> bool:
        if self.mixed is None or not self.exp or self.stopped:
            return False
        lse = Term("lse", self.base, frozenset(expand(self.mixed.axis)))
        return self.terms == {(lse, -1.0)}

    @property
    def is_loss(self) -> bool:
        """Tells if it is log-sum-exps and picked elements alone, of the same scores and axis."""
        if self.exp or self.along or self.hot or self.mixed or not self.terms:
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


# ---------------------------------------------------------------- rows that see nothing

ABSORBING = 1e16
"""Scores beside a number as large are rounded away in float64, too."""
ZERO, NUMBER, NAN = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Row:
    """An element of a row that sees nothing.

    Attributes:
      value: a number of the program's dtype; "finite": any, as scores without a mask are;
        "shifted": such scores plus one number; "mixed": not known.
      each: a masked element is that in every row, whatever else is in it.
      back: what reaches the scores of a gradient that is ZERO, a NUMBER, or NAN here.
    """

    value: Any = "finite"
    each: bool = True
    back: tuple[int, ...] = (ZERO, NUMBER, NAN)

    @property
    def kind(self) -> str:
        return _kind(self.value)

    @property
    def number(self) -> float | None:
        return None if isinstance(self.value, str) else float(self.value)


def _kind(value: Any) -> str:
    return value if isinstance(value, str) else "number"


MIXED = Row("mixed", False, (NAN, NAN, NAN))
_LAYOUT = *MOVED, *UNCHANGED, "slice", "dot_general", "reduce_max", "reduce_sum", "gather"


def keys(form: Any) -> frozenset[Any]:
    """Returns what a form's masks hide, whatever they write there."""
    return frozenset([(m.value, expanded(m.dims), m.keep) for m in form.base.masks])


def row_of(forms: Any, made: Equation, form: Any, applied: frozenset[Any]) -> Row:
    """Returns what an equation makes of rows that see nothing.

    Args:
      forms: the Forms and Rows of its operands.
      made: the equation, whose result has the Form `form`.
      applied: the masks that it applies.
    """
    out = forms.program.avals[made.outs[0]]
    if made.name == "custom_jvp_call":  # JAX's own softmax y; its derivative: y · (dx - Σ y · dx)
        row, below = forms.rows[forms.program.shadows[made.outs[0]]], forms.rows.get(made.ins[0])
        return MIXED if below is None else replace(row, back=_times(below.back, row.value))
    if made.name == "dot_general" and form.mixed is None:
        return Row()
    masks, rows = keys(form), []
    of = [forms.of.get(v) for v in made.ins]
    of = [f if f and f.base.dot is form.base.dot else None for f in of]  # or a bias
    for v, own in zip(made.ins, of):
        if own and own.dropout != form.dropout:
            return forms.rows[v]  # before the dropout
    for v, own in zip(made.ins, of, strict=True):
        number = forms.program.number(v)
        if own is None:
            row = Row("finite" if number is None else np.asarray(number, out.dtype))
        else:
            # Rows that see nothing by the result's masks see nothing by more masks, too.
            row, hidden = forms.rows[v], keys(own)
            if not applied and not hidden >= masks:
                row = replace(row, value="mixed" if hidden else "finite", each=False)
        rows.append(row)
    own = [f is not None for f in of]
    with np.errstate(all="ignore"):
        if applied:
            (i,) = [i for i, is_own in enumerate(own) if is_own]
            before = keys(forms.of[made.ins[i]])
            if made.name in ("add", "sub"):
                first, *more = form.base.masks
                if before or more or rows[i].kind != "finite":
                    return MIXED
                shifted = abs(first.fill) < ABSORBING
                fill = "shifted" if shifted else np.asarray(first.fill, out.dtype)
                return replace(rows[i], value=fill)
            return _masked(made, rows, i, before, applied, out.dtype)
        if made.name in _LAYOUT:
            row = rows[1 - form.mixed.side if made.name == "dot_general" else 0]
            value = row.value
            if row.number is not None:
                count = forms.program.avals[made.ins[0]].size // max(out.size, 1)
                value = np.asarray(value * (count if made.name == "reduce_sum" else 1))
                value = value.astype(out.dtype)
            bad = made.name == "reduce_max" and _is_bad(value)
            back = (row.back[NAN],) * 3 if bad else row.back
            return Row(value, row.each and not made.name.startswith("reduce"), back)
        return _elementwise(made, rows, own, bool(masks), out.dtype)


def _masked(
    made: Equation, rows: list[Row], i: int, before: frozenset, applied: frozenset, dtype: Any
) -> Row:
    """A mask writes a number, multiplies by 0, or adds a number.

    Rows that see nothing are those of all masks together, so what the one before has left in them
    is the same number, or this mask alone hides them.
    """
    row, selected = rows[i], made.name == "select_n"
    fill = np.asarray(rows[3 - i].value if selected else 0, dtype)
    z, _, n = row.back
    back, value = (z, z, z) if selected else (z, z, n), fill
    if not selected and row.number is not None:
        value = row.value * fill
    alone = applied >= before  # no other mask hides a part of them
    if not alone:
        back = tuple(map(max, zip(back, row.back)))
    if not (alone and (selected or before == applied or not _is_bad(row.value))):
        same = row.number is not None and row.number == float(value)
        if not (same and (row.each or applied <= before)):
            value = "mixed"
    return Row(value, selected or row.each or not before, back)


def _is_bad(value: Any) -> bool:
    return value == "mixed" if isinstance(value, str) else not np.isfinite(float(value))


def _times(back: Any, factor: Any) -> Any:
    """Returns what becomes of a gradient that is multiplied by a number first."""
    z, _, n = back
    if _is_bad(factor):
        return n, n, n
    return (z, z, n) if not isinstance(factor, str) and factor == 0 else back


def _elementwise(made: Equation, rows: list[Row], own: list[bool], masked: bool, dtype: Any) -> Row:
    name = {"add_any": "add"}.get(made.name, made.name)
    values = [r.value for r in rows]
    if name == "max":  # with -inf
        return rows[own.index(True)]
    if name == "select_n":  # logsumexp: rows of infinities have the maximum 0
        row = rows[own.index(True)]
        if row.number is None:
            return row
        number = np.isfinite(row.value)
        value = row.value if number else values[own.index(False, 1)]
        return Row(np.asarray(value, dtype), False, row.back if number else (ZERO,) * 3)
    value, numbers = "mixed", [v for v in values if not isinstance(v, str)]
    kinds = {_kind(v) for v, is_own in zip(values, own) if is_own or not isinstance(v, str)}
    if len(numbers) == len(values):
        value = _computed(made, name, values).astype(dtype)
    elif "mixed" not in kinds:
        large = [v for v in numbers if not abs(float(v)) < ABSORBING]
        if name in ("add", "sub") and large:  # it absorbs the other
            plain = [np.asarray(0, dtype) if isinstance(v, str) else v for v in values]
            value = _computed(made, name, plain).astype(dtype)
        elif any(map(_is_bad, numbers)):
            pass
        elif "shifted" in kinds:
            value = "mixed" if "finite" in kinds else "shifted"
        elif not masked and not (name == "div" and 0 in map(float, numbers)):
            value = "finite"
    back = (ZERO,) * 3
    for i, row in enumerate(rows):
        if own[i]:
            one = _times(row.back, _slope(name, values, value, i))
            back = tuple(map(max, zip(back, one)))
    if name == "stop_gradient":
        back = (ZERO,) * 3
    each = all(r.each for r, is_own in zip(rows, own) if is_own)
    return Row(value, each, back)


def _computed(made: Equation, name: str, values: list[Any]) -> Any:
    if name == "integer_pow":
        return np.asarray(values[0] ** made.params["y"])
    if name == "stop_gradient":
        return np.asarray(values[0])
    return np.asarray(ELEMENTWISE[name][0](*values))


def _slope(name: str, values: list[Any], value: Any, i: int) -> Any:
    """The derivative by an operand, or anything finite where it does not matter what."""
    match name:
        case "exp" | "integer_pow":
            return value
        case "log":
            return 1 / values[0] if not isinstance(values[0], str) else values[0]
        case "mul":
            return values[1 - i]
        case "div":
            if any(isinstance(v, str) for v in values):
                by_zero = not isinstance(values[1], str) and values[1] == 0
                return "mixed" if by_zero or any(map(_is_bad, values)) else "finite"
            return 1 / values[1] if i == 0 else values[0] / values[1] ** 2
    return "finite"
