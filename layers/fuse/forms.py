"""Forms: values as linear functions of the scores of one product, or their exponentials.

They are combined with masks, biases, one-hot arrays and weights.
"""

import dataclasses
import functools
import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from .constants import ARITHMETIC
from .indices import counted, two_valued
from .labels import Dims, Label, Labels, atoms, expand, shape_of
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

    @property
    def soft(self) -> bool:
        """Tells if it is an exponential of the scores along their axis."""
        return self.exp and self.along == 1 and not self.mixed and not self.hot

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


# ---------------------------------------------------------------- masks, biases, one-hots, weights
# Each rule returns the Form of the result, or None where it is not proved.


def times(g: Any, form: Form, other: int) -> Form | None:
    """A form times an array: of a mask, a one-hot array, or the weights of losses."""
    if form.mixed or not _fits(g, other, form.dims):
        return None
    two = two_valued(g.program, other, form.dims) if form.along else None
    if form.along and form.exp:
        is_mask = two and two.numbers == (0, 1) and two.no.exact and two.yes.exact
        return _masked(g, form, two.mask, two.dims, True, -math.inf) if two and is_mask else None
    if form.exp or form.summed:
        return None
    if form.along and not form.hot:
        if two is not None:
            hot = one_hot(g, form, two.mask, two.dims)
            return hot and replace(hot, hot=(*hot.hot[:2], *two.numbers))
    elif form.hot or form.is_loss:
        return _weighted(g, form, other)
    made = g.program.maker.get(other)
    if made is not None and made.name == "mul" and form.along:  # a one-hot array with weights
        for a, b in (made.ins, made.ins[::-1]):
            first = times(g, form, a)
            if first is not None and first.hot:
                return times(g, first, b)
    return None


def _fits(g: Any, v: int, dims: Dims) -> bool:
    """Tells if an array has dimensions of these labels, or 1 in the place of some."""
    shape, sizes = g.program.avals[v].shape, shape_of(dims)
    return len(shape) == len(sizes) and all(n in (1, m) for n, m in zip(shape, sizes))


def _weighted(
    g: Any, form: Form, other: int, select: bool = False, keep: bool = True
) -> Form | None:
    v, dims, *_ = g.peel(other, form.dims)
    rows = set(atoms(form.dims)) - (form.hot[1] if form.hot else set())
    if any(l.free for l in rows) or not set(atoms(dims)) <= rows or len(form.weights) > 1:
        return None
    return replace(form, weights=(*form.weights, Weight(v, dims, select, keep)))


def biased(g: Any, form: Form, other: int, sign: float) -> Form | None:
    """scores + other: a bias, or a mask that was written as 0 and a large negative number."""
    if not _fits(g, other, form.dims):
        return None
    v, dims, factor, _ = g.peel(other, form.dims, scale=True)
    made = g.program.maker.get(v)
    if made is not None and made.name in ("add", "sub") and factor == 1:  # several at once
        if all(_fits(g, u, dims) and g.program.number(u) is None for u in made.ins):
            first = _added(g, form, made.ins[0], dims, sign)
            second = sign if made.name == "add" else -sign
            return first and _added(g, first, made.ins[1], dims, second)
    return _added(g, form, other, form.dims, sign)


def _added(g: Any, form: Form, other: int, dims: Dims, sign: float) -> Form | None:
    """scores + an array with these labels."""
    if (two := two_valued(g.program, other, dims)) is not None:
        no, yes = (sign * x for x in two.numbers)
        if max(no, yes) == 0 and min(no, yes) < 0:
            return _masked(g, form, two.mask, two.dims, yes == 0, min(no, yes), added=True)
    v, dims, factor, _ = g.peel(other, dims, scale=True)
    masks = tuple(replace(m, changed=True) for m in form.base.masks)
    biases = (*form.base.biases, (v, dims, factor * sign))
    added = form.base.added | {g.program.avals[other].dtype}
    return replace(form, base=replace(form.base, biases=biases, masks=masks, added=added))


def _masked(
    g: Any,
    form: Form,
    pred: int,
    dims: Dims,
    keep: bool,
    fill: float,
    added: bool = False,
) -> Form | None:
    """scores where a mask has the value `keep`, `fill` elsewhere; of exponentials 0 there."""
    if g.program.avals[pred].ndim == 0 or len(dims) != g.program.avals[pred].ndim:
        return None
    if form.along != 1 or form.terms and not form.exp:
        return None
    v, dims, *_ = g.peel(pred, dims)
    if not set(atoms(dims)) <= set(atoms(form.dims)):
        return None
    again = functools.partial(_masked, g, fill=fill, added=added)
    two = two_valued(g.program, v, dims)
    if two is not None and two.mask != v and (yes := bool(two.yes.x)) != bool(two.no.x):
        return again(form, two.mask, two.dims, yes == keep)
    made, name = g.program.made(v)
    whole = lambda u: g.program.avals[u].shape == g.program.avals[v].shape
    if name == ("and" if keep else "or") and all(map(whole, made.ins)):
        # Each part by itself: one of them may be constant. A row's fill is the same for all.
        if not added:
            first = again(form, made.ins[0], dims, keep)
            return first and again(first, made.ins[1], dims, keep)
    g.applied.append((v, dims, keep))
    mask, masks = Mask(v, dims, keep, fill, added), form.base.masks
    if mask in masks:
        return form
    return replace(form, base=replace(form.base, masks=(*masks, mask)))


def one_hot(g: Any, form: Form, pred: int, dims: Dims, selects: bool = False) -> Form | None:
    """scores where `labels == iota`, 0 elsewhere: by a select, or times 0, which is NaN of -inf."""
    made = g.program.maker.get(pred)
    if made is None or made.name != "eq" or form.weights:
        return None
    dtype = g.program.avals[form.base.dot.outs[0]].dtype
    if not selects and any(m.fill < float(jnp.finfo(dtype).min) for m in form.base.masks):
        return None
    for labels, count in (made.ins, made.ins[::-1]):
        if g.program.avals[labels].ndim != len(dims) or g.program.avals[count].ndim != len(dims):
            continue
        v, at, *_ = g.peel(labels, dims)
        axis = tuple(l for l in atoms(form.dims) if l not in atoms(at))
        along = counted(g.program, count)
        integers = jnp.issubdtype(g.program.avals[v].dtype, jnp.integer)
        if along is not None and integers and expand(dims[along]) == axis:
            return replace(form, hot=((v, at, axis), frozenset(axis), 0.0, 1.0))
    return None


def select(g: Any, made: Equation, _: Any, no: Form | None, yes: Form | None, *more: Any):
    """A form or a number: `rows.py` proves what is left of a row that has the number alone."""
    if more or g.program.avals[made.ins[0]].dtype != jnp.bool_ or no and yes:
        return None
    for form, other, keep in ((yes, made.ins[1], True), (no, made.ins[2], False)):
        if form is None or form.mixed or form.hot:
            continue
        c = g.program.number(other)
        if c is None:
            continue
        pred = g.program.maker.get(made.ins[0])
        if keep and form.is_maximum and pred is not None and pred.name == "is_finite":
            if g.of.get(pred.ins[0]) == form:  # logsumexp: rows of infinities
                return form
        if form.along == 1 and not form.exp and c < 0:
            return _masked(g, form, made.ins[0], form.dims, keep, c)
        if form.along and form.exp and c == 0:
            return _masked(g, form, made.ins[0], form.dims, keep, -math.inf)
        if form.along and not form.exp and c == 0 and keep:
            return one_hot(g, form, made.ins[0], form.dims, selects=True)
        if form.is_loss and not form.summed and c == 0 and g.program.avals[made.ins[0]].ndim:
            return _weighted(g, form, made.ins[0], select=True, keep=keep)
    return None
