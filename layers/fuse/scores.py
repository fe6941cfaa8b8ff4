"""Scores: values as Forms of one product's scores, by the algebra of softmaxes and of losses.

Each value that derives from a product s gets a `Form`:

    value = along · s + Σ coefficient · term,    or the exponential of that,

with terms that are constant along an axis of s: its maximum, its log-sum-exp, one picked element.
One rule for each primitive computes a result's Form from those of its operands. A softmax is then
whatever ends as exp(s - lse), a cross-entropy whatever ends as lse - pick, however it was written.
What no rule knows has no Form, and stays as it is.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from .forms import MAXIMA, Dropout, Form, Mask, Mixed, Scores, Term, plus, scaled
from .indices import counted, is_zero, two_valued
from .labels import (
    MOVED,
    UNCHANGED,
    Dims,
    Label,
    Labels,
    atoms,
    expand,
    fresh,
    meet,
    moved,
    peel,
    shape_of,
)
from .program import Equation, Program, is_precise
from .sites import Left, Site, at_ends


class ScoreForms:
    """The Forms of a program's values."""

    def __init__(self, program: Program):
        self.program = program
        self.of: dict[int, Form] = {}
        self.unseen: dict[Any, Any] = {}  # rows that see nothing, by their equations
        self.sides: dict[Equation, list[Dims]] = {}  # the labels of a product's operands
        self.made: set[int] = set()  # computed by sites of other domains
        self.wanted: set[int] = set()  # read by them

    def read(self, equation: Equation) -> None:
        rule, forms = RULES[equation.name], [self.of.get(v) for v in equation.ins]
        if not any(forms) and rule not in (_dot, _call):
            return
        form = rule(self, equation, *forms)
        out = self.program.avals[equation.outs[0]]
        if form is not None and shape_of(form.dims) == out.shape:
            self.of[equation.outs[0]] = form

    def ends(self, kind: str, site_of: Any) -> Iterator[Site | tuple[int, str]]:
        """Yields what `at_ends` does of the Forms that have the property `kind`."""
        forms = {v: form for v, form in self.of.items() if getattr(form, kind)}
        chains = {v: ((m := form.mixed) and m.product,) for v, form in forms.items()}
        return at_ends(self.program, chains, lambda v: site_of(self, v, self.of[v]), self.wanted)

    def made_of(self, v: int) -> tuple[int, ...]:
        """Returns the product that a value is made of."""
        return (next(iter(self.of[v].terms))[0].base.dot.outs[0],)

    def peel(self, v: int, dims: Dims, scale: bool = False):
        """Goes back from a value to what it was reshaped, cast and broadcast from.

        Returns:
          That value, its labels, the number it is multiplied by (only with `scale`), and the
          narrowest dtype on the way.
        """
        g, factor, dtype = self.program, 1.0, self.program.avals[v].dtype

        def behind(v: int, made: Equation) -> int | None:
            nonlocal factor, dtype
            if v in self.made or (form := self.of.get(v)) is not None and form.is_attention:
                return None  # it is replaced as it is
            source = made.ins[0]
            if made.name == "convert_element_type":
                given = g.avals[source].dtype
                kinds = [jnp.issubdtype(d, jnp.floating) for d in (given, dtype)]
                if kinds[0] != kinds[1] or not kinds[0] and given != g.avals[v].dtype:
                    return None
                dtype = min(given, dtype, key=lambda d: d.itemsize)
            elif made.name in ("mul", "div"):
                i = 1 if g.number(made.ins[1]) is not None or made.name == "div" else 0
                c, source = g.number(made.ins[i]), made.ins[1 - i]
                if not c or not math.isfinite(c) or g.avals[source].shape != g.avals[v].shape:
                    return None
                factor *= c if made.name == "mul" else 1 / c
            return source

        return *peel(g, v, dims, behind, *("mul", "div") * scale), factor, dtype


# ---------------------------------------------------------------- one rule for each primitive


def _dot(g: ScoreForms, made: Equation, *forms: Form | None) -> Form | None:
    """Scores, a product of probabilities with values, or picked scores."""
    if not all([jnp.issubdtype(g.program.avals[v].dtype, jnp.floating) for v in made.ins]):
        return None
    for side, form in enumerate(forms):
        if form and (form.soft or form.dropout):
            return _mixed(g, made, side, form)
    if (picked := _picked(g, made, forms)) is not None:
        return picked
    return Form(Scores(made), _product_dims(g, made, 0, fresh(g.program.avals[made.ins[0]].shape)))


def _mixed(g: ScoreForms, made: Equation, side: int, form: Form) -> Form | None:
    """A product of probabilities, which are its operand `side`."""
    summed, batch = (dims[side] for dims in made.params["dimension_numbers"])
    if any(l.free for i in (*summed, *batch) for l in expand(form.dims[i])):
        return None
    out = _product_dims(g, made, side, form.dims)
    axis = atoms(form.dims[i] for i in summed)
    return replace(form, dims=out, mixed=Mixed(made, 1 - side, g.sides[made][1 - side], axis))


def _product_dims(g: ScoreForms, made: Equation, side: int, dims: Dims) -> Dims:
    """Returns a product's labels, given those of its operand `side`; and keeps both operands'."""
    contract, batch = made.params["dimension_numbers"]
    other = fresh(g.program.avals[made.ins[1 - side]].shape)
    pairs = zip((*contract[side], *batch[side]), (*contract[1 - side], *batch[1 - side]))
    to = {b: dims[a] for a, b in pairs}
    other = tuple([to.get(i, d) for i, d in enumerate(other)])
    sides = g.sides[made] = [other, dims] if side else [dims, other]
    rest = [d for j in (0, 1) for i, d in enumerate(sides[j]) if i not in (*contract[j], *batch[j])]
    return (*[sides[0][i] for i in batch[0]], *rest)


def _picked(g: ScoreForms, made: Equation, forms: Any) -> Form | None:
    """Σ one-hot · scores, as a product over the axis of rows that both have."""
    contract, batch = made.params["dimension_numbers"]
    for i, form in enumerate(forms):
        if form is None or not form.is_linear or not form.along:
            continue
        own, other = contract[i], made.ins[1 - i]
        if len(own) != 1 or len(own) + len(batch[i]) != len(form.dims):
            continue
        to = dict(zip((*contract[1 - i], *batch[1 - i]), (*own, *batch[i])))
        if len(to) != g.program.avals[other].ndim:
            continue
        dims = tuple(form.dims[to[d]] for d in range(len(to)))
        pred, at, *_ = g.peel(other, dims)
        inner = g.program.maker.get(pred)
        if inner is None or inner.name != "convert_element_type":
            continue
        hot = one_hot(g, replace(form, dims=dims), inner.ins[0], at)
        axis = frozenset(expand(form.dims[own[0]]))
        if hot is None or hot.hot[1] != axis or any(t.axis != axis for t, _ in form.terms):
            continue
        term = Term("pick", form.base, axis, hot.hot[0], "all 0" if form.terms else "0")
        terms = plus(form.terms, frozenset({(term, form.along)}))
        return replace(form, dims=tuple(form.dims[d] for d in batch[i]), along=0.0, terms=terms)
    return None


def _layout(g: ScoreForms, made: Equation, form: Form | None, *_: Any) -> Form | None:
    """Rules of what changes an array's dimensions or its dtype, or nothing."""
    if form is None:
        return None
    given, out = g.program.avals[made.ins[0]], g.program.avals[made.outs[0]]
    if made.name in ("name", "sharding_constraint"):
        # On a result they say what becomes of an array that is made still.
        return None if form.is_attention or form.is_loss else form
    if made.name == "slice":
        return _sliced(made, form, given)
    if made.name == "convert_element_type" and not jnp.issubdtype(out.dtype, jnp.floating):
        return None
    dims = moved(made, form.dims, given.shape, out.shape)
    return None if dims is None else replace(form, dims=dims)


def _sliced(made: Equation, form: Form, given: Any) -> Form | None:
    p = made.params
    if p["strides"] or form.exp or form.hot:
        return None
    dims = []
    for d, start, limit, n in zip(form.dims, p["start_indices"], p["limit_indices"], given.shape):
        if limit - start != n:
            d = expand(d)
            if len(d) != 1 or d[0].free or d[0].cut or limit - start < 2:
                return None
            d = (Label(limit - start, cut=(d[0], start)),)
        dims.append(d)
    return replace(form, dims=tuple(dims))


def _combine(g: ScoreForms, made: Equation, fa: Form | None, fb: Form | None) -> Form | None:
    """add, sub, mul and div: of two forms, or of one and an array or a number."""
    product = made.name in ("mul", "div")
    if made.name == "mul" and (averaged := _averaged(g, *made.ins)) is not None:
        return averaged
    if fa and fb and fa.along and fb.along and not product:  # the smaller product is a bias
        sizes = [g.program.avals[f.base.dot.outs[0]].size for f in (fa, fb)]
        fa, fb = (fa, None) if sizes[0] >= sizes[1] else (None, fb)
    if fa and fb:
        return _joined(fa, fb, -1.0 if made.name in ("sub", "div") else 1.0, product)
    form, other = (fa, made.ins[1]) if fa else (fb, made.ins[0])
    if form is None or form.dims and g.program.avals[made.outs[0]].ndim != len(form.dims):
        return None
    return (_multiplied if product else _shifted)(g, made.name, form, other, form is fa)


def _joined(fa: Form, fb: Form, sign: float, product: bool) -> Form | None:
    """Returns the sum or difference of two forms, or product or quotient of two exponentials."""
    if fa.stopped != fb.stopped or fa.summed != fb.summed or fa.hot or fb.hot:
        return None
    if not fa.exp == fb.exp == product or fa.along and fb.along:
        return None
    if (fb.mixed or fb.along and product) and sign < 0:
        return None
    if (dims := meet(fa.dims, fb.dims)) is None:
        return None
    along, terms = fa.along + sign * fb.along, plus(fa.terms, fb.terms, sign)
    return replace(fa if fa.along else fb, dims=dims, along=along, terms=terms)


def _shifted(g: ScoreForms, name: str, form: Form, other: int, first: bool) -> Form | None:
    """A form plus an array, less it, or the array less the form."""
    sign = -1.0 if name == "sub" else 1.0
    if g.program.number(other) == 0:
        return form if first or sign > 0 else scaled(form, -1.0)
    # Where the scores are stopped, a bias of theirs would have no gradient.
    plain = form.along == 1 and not (form.exp or form.terms or form.hot or form.stopped)
    return biased(g, form, other, sign) if plain and (first or sign > 0) else None


def _multiplied(g: ScoreForms, name: str, form: Form, other: int, first: bool) -> Form | None:
    """A form times an array, divided by it, or 1 divided by the form."""
    number = g.program.number(other)
    if name == "div" and not first:
        is_inverse = number == 1 and form.exp and not form.along
        return replace(form, terms=plus(frozenset(), form.terms, -1.0)) if is_inverse else None
    if number and (form.is_softmax or not form.exp):
        number = number if name == "mul" else 1 / number
        return dropped(g, form, number) if form.exp else scaled(form, number)
    return times(g, form, other) if number is None and name == "mul" else None


def _averaged(g: ScoreForms, a: int, b: int) -> Form | None:
    """p · (along · s + terms), where p is the softmax of s, or less that."""
    for v, other in ((a, b), (b, a)):
        maker, name = g.program.made(v)
        p, form = g.of.get(maker.ins[0] if name == "neg" else v), g.of.get(other)
        if not (p and form and p.soft and p.base == form.base and p.stopped == form.stopped):
            continue
        dims, axes = meet(p.dims, form.dims), {t.axis for t, _ in (*p.terms, *form.terms)}
        if not form.along or not form.is_linear or dims is None or len(axes) != 1:
            continue
        (axis,) = axes
        if p.terms == {(Term("lse", p.base, axis), -1.0)}:
            return replace(form, dims=dims, hot=(None, axis, 0.0, -1.0 if name == "neg" else 1.0))
    return None


def _reduce(g: ScoreForms, made: Equation, form: Form | None) -> Form | None:
    """Proves max (s + c) = max s + c and Σ exp(s + c) = exp(lse s + c) with derivatives, where c is
    constant along the axis that is reduced, the terms' own."""
    if form is None or form.mixed or form.dropout:
        return None
    axes = tuple(map(int, made.params["axes"]))
    axis = frozenset(atoms([form.dims[i] for i in axes]))
    dims = tuple([d for i, d in enumerate(form.dims) if i not in axes])
    new = functools.partial(replace, form, dims=dims)
    if not axis:
        return new()
    if any([l.free for l in axis]):
        return None
    same = all(t.axis == axis for t, _ in form.terms)
    if made.name == "reduce_max":
        if form.exp or form.along != 1 or not same or form.hot:
            return None
        term = Term("max", form.base, axis)
        return new(along=0.0, terms=plus(form.terms, frozenset({(term, 1.0)})))
    if form.soft and same:
        term = Term("lse", form.base, axis)
        return new(along=0.0, terms=plus(form.terms, frozenset({(term, 1.0)})))
    if form.hot and form.hot[1] <= axis and not form.exp:  # and over rows, at once
        picked = form.hot[1]
        if any(t.axis != picked for t, _ in form.terms):
            return None
        labels, _, no, yes = form.hot
        outside = "all 0" if form.terms else "0"
        term = Term("pick", form.base, picked, labels, outside)
        term = term if labels else Term("mean", form.base, picked)
        terms = plus(frozenset({(term, (yes - no) * form.along)}), form.terms, yes - no)
        if no:
            total, count = Term("total", form.base, picked), math.prod(l.size for l in picked)
            terms = plus(terms, frozenset({(total, no * form.along)}))
            terms = plus(terms, form.terms, no * count)
        return new(along=0.0, hot=None, terms=terms, summed=form.summed | (axis - picked))
    return None


def _gather(g: ScoreForms, made: Equation, form: Form | None, _: Any) -> Form | None:
    """`take_along_axis(x, labels)` and `x[rows, labels]`; or what takes a dimension of 1 away."""
    if form is None:
        return None
    d, sizes = made.params["dimension_numbers"], made.params["slice_sizes"]
    shape, out = (g.program.avals[v].shape for v in (made.ins[0], made.outs[0]))
    if sizes == shape and not d.operand_batching_dims:
        return _dropped(g, made, form, len(out))
    if not form.is_linear or not form.along or form.summed or any(s != 1 for s in sizes):
        return None
    picked, outside = _picking(g.program, made, form), _outside(made, form)
    if picked is None or outside is None:
        return None
    i, column, rows = picked
    own, axis = iter(rows), frozenset(expand(form.dims[i]))
    dims = tuple(() if j in d.offset_dims else next(own) for j in range(len(out)))
    have = {*atoms(dims)}
    if not axis or have & axis or have | axis != {*atoms(form.dims)} or shape_of(dims) != out:
        return None
    if any(t.axis != axis for t, _ in form.terms):
        return None
    v, at, *_ = g.peel(column, (*rows, ()))
    term = Term("pick", form.base, axis, (v, at, expand(form.dims[i])), outside)
    terms = plus(form.terms, frozenset({(term, form.along)}))
    return replace(form, dims=dims, along=0.0, terms=terms)


def _picking(program: Program, made: Equation, form: Form) -> tuple[int, int, list[Labels]] | None:
    """Returns the dimension along which a gather picks, its column of indices, and rows' labels.

    Other columns of indices count rows, as the first does in `x[rows, labels]`.
    """
    d, index = made.params["dimension_numbers"], made.ins[1]
    shape, (*lengths, _) = (program.avals[v].shape for v in made.ins)
    batches = zip(d.operand_batching_dims, d.start_indices_batching_dims)
    rows: dict[int, Labels] = {j: form.dims[i] for i, j in batches}
    maker, name = program.made(index)
    stacked = name == "concatenate" and maker.params["dimension"] == len(lengths)
    if not stacked and len(d.start_index_map) != 1:
        return None
    columns = dict(zip(d.start_index_map, maker.ins if stacked else [index], strict=True))
    if any(program.avals[c].shape[-1] != 1 for c in columns.values()):
        return None
    for i, column in [*columns.items()]:
        if len(columns) == 1:
            break
        j = counted(program, column)
        if j is not None and lengths[j : j + 1] == [shape[i]] and j not in rows:
            rows[j] = form.dims[i]
            del columns[i]
        elif shape[i] == 1 and is_zero(program, column):
            del columns[i]
    if len(columns) != 1 or any(n != 1 and j not in rows for j, n in enumerate(lengths)):
        return None
    return *columns.popitem(), [rows.get(j, ()) for j in range(len(lengths))]


def _outside(made: Equation, form: Form) -> str | None:
    """Returns `Term.outside` of a gather; None for one that says nothing else."""
    mode, fill = str(made.params["mode"]), made.params.get("fill_value")
    if "CLIP" in mode:
        return "clip"
    if "PROMISE" in mode:  # XLA clips what is promised, and drops its gradient
        outside = "drop"
    elif "FILL" in mode and (fill is None or fill != fill):
        outside = "nan"
    else:
        return None
    others = {t.kind: f for t, f in form.terms}
    if "lse" not in others:
        return outside
    return f"all {outside}" if others == {"lse": -form.along} else None


def _dropped(g: ScoreForms, made: Equation, form: Form, ndim: int) -> Form | None:
    """A gather of a whole array, which only takes dimensions of size 1 away."""
    d = made.params["dimension_numbers"]
    if not is_zero(g.program, made.ins[1]):
        return None
    kept = iter([x for i, x in enumerate(form.dims) if i not in d.collapsed_slice_dims])
    offsets = set(d.offset_dims)
    return replace(form, dims=tuple(next(kept) if i in offsets else () for i in range(ndim)))


def _call(g: ScoreForms, made: Equation, *_: Any) -> Form | None:
    """A function of JAX with a derivative of its own: what its equations say."""
    shadow = g.program.shadows.get(made.outs[0])
    return None if shadow is None else g.of.get(shadow)


def _unary(g: ScoreForms, made: Equation, form: Form | None, *_: Any) -> Form | None:
    """Functions of one operand; under `stop_gradient` maxima are other terms."""
    if form is None or form.mixed or form.hot or form.dropout:
        return None
    s = form.base
    match made.name:
        case "exp" if not form.exp and form.along in (0.0, 1.0) and not form.summed:
            if form.along and any(t.kind in MAXIMA and f != -1 for t, f in form.terms):
                return None  # 0.7 of a maximum: rows that see nothing are 0 / 0
            bound = {*MAXIMA, "lse"} & {t.kind for t, f in form.terms if f < 0}
            return replace(form, exp=True, safe=bool(bound) or not form.along)
        case "log" if form.exp and not form.summed:
            return replace(form, exp=False)
        case "neg" if not form.exp:
            return scaled(form, -1.0)
        case "abs" if form.exp:
            return form
        case "stop_gradient" if form.is_maximum:
            stopped = [frozenset([(replace(t, kind="stopped"), f)]) for t, f in form.terms]
            return replace(form, terms=functools.reduce(plus, stopped))
        case "stop_gradient" if form.along:
            return replace(form, stopped=True)
        case "integer_pow" if made.params["y"] == -1 and form.exp and not form.along:
            return replace(form, terms=plus(frozenset(), form.terms, -1.0))
        case "tanh" if form.along == 1 and not form.exp and not form.terms:
            if s == Scores(s.dot, s.scale):
                return replace(form, base=Scores(s.dot, 1.0, s.scale))
    return None


def _maximum(g: ScoreForms, made: Equation, fa: Form | None, fb: Form | None) -> Form | None:
    """The maximum of a row's maximum and -inf."""
    if fa and fb:
        return None
    form, other = (fa, made.ins[1]) if fa else (fb, made.ins[0])
    return form if form and form.is_maximum and g.program.number(other) == -math.inf else None


# ---------------------------------------------------------------- masks, biases, one-hots
# Each rule returns the Form of the result, or None where it is not proved.


def times(g: Any, form: Form, other: int) -> Form | None:
    """A form times an array of two numbers: of a mask, or a one-hot array."""
    if not form.along or form.mixed or form.hot or not _fits(g, other, form.dims):
        return None
    if (two := two_valued(g.program, other, form.dims)) is None:
        return None
    if not form.exp:
        hot = None if form.summed else one_hot(g, form, two.mask, two.dims)
        return hot and replace(hot, hot=(*hot.hot[:2], *two.numbers))
    if two.numbers.count(0) != 1:
        return None
    keep, factor = two.numbers[0] == 0, sum(two.numbers)
    if form.is_softmax or factor != 1 or not keep or not (two.no.exact and two.yes.exact):
        return dropped(g, form, factor, two.mask, two.dims, keep)
    return _masked(g, form, two.mask, two.dims, True, -math.inf)


def _fits(g: Any, v: int, dims: Dims) -> bool:
    """Tells if an array has dimensions of these labels, or 1 in the place of some."""
    shape, sizes = g.program.avals[v].shape, shape_of(dims)
    return len(shape) == len(sizes) and all(n in (1, m) for n, m in zip(shape, sizes))


def dropped(
    g: Any, form: Form, factor: float, pred: int | None = None, dims: Dims = (), keep: bool = True
) -> Form | None:
    """Probabilities times a number, or times that and 0 by a mask; not other exponentials.

    A mask that has hidden the scores hides what is 0 already.
    """
    if not form.is_softmax or not math.isfinite(factor):
        return None
    before = form.dropout or Dropout()
    if pred is None:
        return replace(form, dropout=replace(before, factor=before.factor * factor))
    if (parts := conjuncts(g, form, pred, dims, keep)) is None:
        return None
    hidden = {(m.value, m.dims, m.keep) for m in form.base.masks if m.fill == -math.inf}
    if factor == 1 and hidden >= {*parts}:
        return form
    masks = tuple(dict.fromkeys((*before.masks, *parts)))
    return replace(form, dropout=Dropout(before.factor * factor, masks))


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
    if form.along != 1 or form.terms and not form.exp:
        return None
    # Each part by itself: one of them may be constant. A row's fill is the same for all.
    if (parts := conjuncts(g, form, pred, dims, keep, split=not added)) is None:
        return None
    masks = dict.fromkeys((*form.base.masks, *[Mask(*part, fill, added) for part in parts]))
    return replace(form, base=replace(form.base, masks=tuple(masks)))


def conjuncts(
    g: Any, form: Form, pred: int, dims: Dims, keep: bool, split: bool = True
) -> list[tuple[int, Dims, bool]] | None:
    """Returns (value, labels, boolean) of masks: one has the value `keep` where all have theirs."""
    avals, parts, found = g.program.avals, [(pred, dims, keep)], []
    for v, dims, keep in parts:
        if avals[v].ndim == 0 or len(dims) != avals[v].ndim or len(parts) > _MOST_PARTS:
            return None
        v, dims, *_ = g.peel(v, dims)
        if not set(atoms(dims)) <= set(atoms(form.dims)):
            return None
        two, (made, name) = two_valued(g.program, v, dims), g.program.made(v)
        more = []
        if two is not None and two.mask != v and (yes := bool(two.yes.x)) != bool(two.no.x):
            more = [(two.mask, two.dims, yes == keep)]
        elif name == ("and" if keep else "or") and split:
            more = [(u, dims, keep) for u in made.ins if avals[u].shape == avals[v].shape]
            more = more if len(more) == len(made.ins) else []
        parts += [one for one in more if one not in parts]
        found += [] if more else [(v, dims, keep)]
    return found


_MOST_PARTS = 64
"""Conjuncts of a mask: one of more stays."""


def one_hot(g: Any, form: Form, pred: int, dims: Dims, selects: bool = False) -> Form | None:
    """scores where `labels == iota`, 0 elsewhere: by a select, or times 0, which is NaN of -inf."""
    made = g.program.maker.get(pred)
    if made is None or made.name != "eq":
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
    """A form or a number: `unseen.py` finds out what becomes of a row that has the number alone."""
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
            if form.is_softmax:
                return dropped(g, form, 1.0, made.ins[0], form.dims, keep)
            return _masked(g, form, made.ins[0], form.dims, keep, -math.inf)
        if form.along and not form.exp and c == 0 and keep:
            return one_hot(g, form, made.ins[0], form.dims, selects=True)
    return None


RULES = {
    "custom_jvp_call": _call,
    "dot_general": _dot,
    "select_n": select,
    "gather": _gather,
    "max": _maximum,
}
for _rule, _names in (
    (_layout, (*MOVED, *UNCHANGED, "slice")),
    (_combine, "add sub mul div add_any".split()),
    (_reduce, ("reduce_max", "reduce_sum")),
    (_unary, "exp log neg abs stop_gradient integer_pow tanh".split()),
):
    RULES |= dict.fromkeys(_names, _rule)


# ---------------------------------------------------------------- the operands of a site's product


class Operands:
    """The product of a site's scores, sorted into what has the softmax's axis and what has not.

    Attributes:
      base: the scores.
      axis, contract: labels of the softmax's axis, and of what the product sums over.
      left, right: which operand is which.
      x, w: (value, labels, factor, narrowest dtype) of what they were made of; without `scale` the
        factor is 1.
      softcap, factor: scores are factor · x·w, or softcap · tanh(factor · x·w / softcap).
    """

    def __init__(self, forms: ScoreForms, base: Scores, axis: frozenset[Label], scale: bool):
        self.base, self.softcap, self.factor = base, None, base.scale
        if base.inner is not None:  # scale · tanh(inner · x·w)
            self.softcap, self.factor = base.scale, base.scale * base.inner
            if base.scale <= 0:
                raise Left("a soft cap that is not positive")
        self.sides = forms.sides[base.dot]
        wanted = set(expand(axis))
        on = [i for i in (0, 1) if wanted <= set(atoms(self.sides[i]))]
        if len(on) != 1:
            raise Left("the softmax is not over rows of one operand of the scores' product")
        self.right, self.left = on[0], 1 - on[0]
        self.x, self.w = (
            forms.peel(base.dot.ins[i], self.sides[i], scale) for i in (self.left, self.right)
        )
        wanted = expand(axis)  # what a reshape on the way has split
        self.axis = tuple(a for a in atoms(self.sides[self.right]) if a in wanted)
        numbers = base.dot.params["dimension_numbers"][0][self.left]
        self.contract = atoms(self.sides[self.left][i] for i in numbers)
        if is_precise(base.dot, wide=True):
            raise Left("the product asks for a higher precision")
