"""Attention in a program: exp(s - lse) · v, however it is written, by one fused operation."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .dropout import changed
from .forms import Form, Mask, Scores
from .indices import region, two_valued
from .labels import Dims, Labels, arrange, atoms, expand, size
from .program import LARGEST_CONSTANT, Program
from .rows import ABSORBING, NUMBER, Row
from .scores import Operands, ScoreForms
from .sites import Left, Site, called

MASKED = -1e4
"""A mask writes this or less into scores that it takes away. exp(-1e4) is 0 in float32."""
LARGEST_BIAS = 1e4
"""A larger number added to scores rounds them away in float32."""


@dataclasses.dataclass(eq=False)
class Attention(Site):
    """softmax(scores) · v of a program, as `normfuse.attention` of (batch, length, heads, width).

    Attributes:
      q, k, v: (value, labels) of the operands, and `to` the groups of labels that they are
        arranged to; v's is multiplied by `factor`.
      masks, biases: what is known at run time only; `fixed` a constant mask.
      added: the number that the mask adds to scores, where it does not replace them.
      empty: the weight of each value in rows that see nothing: NaN, 0, 1 over their number, …;
        None where there are none, or where it is that of other rows.
      hidden: the number that masks write or, ("added", number), add, where a bias may be -inf; -inf
        without a mask, too. None without such a bias.
    """

    parts: "Parts"
    aval: Any
    dims: Dims

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        p = self.parts
        q, k, v = (
            arrange(read(value), dims, to).astype(p.dtype)
            for (value, dims), to in zip(p.operands, p.to)
        )
        batch, queries, heads, keys = p.groups
        place = lambda x, dims: arrange(x, dims, (batch, heads, queries, keys), full=False)
        masks = [place(read(m.value), m.dims) == m.keep for m in p.masks]
        if p.fixed is not None:
            masks.append(jnp.asarray(p.fixed)[None, None])
        biases = [_times(place(read(b), dims), factor) for b, dims, factor in p.biases]
        y = called(
            attend,
            q,
            k,
            v,
            functools.reduce(jnp.add, biases) if biases else None,
            functools.reduce(jnp.logical_and, masks) if masks else None,
            causal=p.causal,
            window=p.window,
            softcap=p.softcap,
            scale=p.scale,
            empty=p.empty,
            added=p.added,
            hidden=p.hidden,
        )
        labels = [(l,) for l in atoms(p.out)]
        y = arrange(y.reshape([l.size for (l,) in labels]), tuple(labels), self.dims)
        if p.factor != 1:
            y = y.astype(jnp.promote_types(y.dtype, jnp.float32)) * p.factor
        return [y.astype(self.aval.dtype)]


@dataclasses.dataclass
class Parts:
    """The operands and options of an attention: see `Attention`."""

    operands: list[tuple[int, Dims]]
    to: tuple[Any, ...]
    groups: tuple[Any, ...]
    out: tuple[Any, ...]
    dtype: Any
    scale: float
    factor: float
    softcap: float | None
    masks: list[Mask] = dataclasses.field(default_factory=list)
    added: float | None = None
    biases: list[tuple[int, Dims, float]] = dataclasses.field(default_factory=list)
    causal: bool = False
    window: int | None = None
    fixed: Any = None
    empty: float | None = None
    hidden: Any = None


def site_of(forms: ScoreForms, value: int, form: Form) -> Attention:
    """Returns what computes a value that is an attention's result.

    Raises:
      Left: where it has to stay as it is, with the reason.
    """
    g, mixed, base = forms.program, form.mixed, form.base
    assert mixed is not None
    if not form.safe:
        raise Left("its exponentials are of scores without their maximum subtracted, and overflow")
    found = Operands(forms, base, frozenset(mixed.axis), scale=True)
    keys, width = found.axis, found.contract
    v, v_dims, factor, v_dtype = forms.peel(mixed.product.ins[mixed.side], mixed.dims, True)
    qa, ka, va = atoms(found.x[1]), atoms(found.w[1]), atoms(v_dims)
    scores = {*atoms(found.sides[0]), *atoms(found.sides[1])}
    values = tuple(a for a in atoms(mixed.dims) if a not in scores)
    if any(l.free for l in (*keys, *width, *values)):
        raise Left("an operand is broadcast along the softmax's axis or along the features")
    if not set(keys) <= set(ka) or not set(keys) <= set(va) or set(keys) & set(qa):
        raise Left("keys and values do not have the softmax's axis as a dimension of their own")
    if not set(width) <= set(qa) or not set(width) <= set(ka) or set(width) & set(va):
        raise Left("queries and keys do not have the product's features as dimensions of their own")
    if set(values) & {*qa, *ka}:
        raise Left("the values' features are a dimension of queries or keys")
    own = {*keys, *width, *values}
    stored = [a for a in dict.fromkeys((*qa, *ka, *va)) if a in (*ka, *va) and a not in own]
    alone = [a for a in qa if a not in stored and a not in width]
    every = {*stored, *alone, *values}
    if set(atoms(form.dims)) != every:
        raise Left("the result is not of all rows and heads")
    groups = _groups(base, found, alone, stored, qa)
    batch, queries, heads = groups
    if not queries or size(queries) == 1:
        raise Left("one query")
    shared = [a for a in heads if a in stored]
    dtype = _dtype([found.x[3], found.w[3], v_dtype])
    if size(width) != size(values):
        raise Left(f"heads of {size(width)} for scores and of {size(values)} for values")
    if base.capped:
        raise Left("a bias before the soft cap")
    inner, scale = base.inner, base.scale * found.x[2] * found.w[2]
    softcap = None
    if inner is not None:  # scale · tanh(inner · q·k): cap = scale, so that cap / inner is 1
        softcap, scale = base.scale, base.scale * inner * found.x[2] * found.w[2]
        if softcap <= 0:
            raise Left("a soft cap that is not positive")
    if scale <= 0:
        raise Left("scores are multiplied by a number that is not positive")
    parts = Parts(
        operands=[found.x[:2], found.w[:2], (v, v_dims)],
        to=(
            (batch, queries, heads, width),
            (batch, keys, shared, width),
            (batch, keys, shared, values),
        ),
        groups=(batch, queries, heads, keys),
        out=(batch, queries, heads, values),
        dtype=dtype,
        scale=scale,
        factor=factor,
        softcap=softcap,
    )
    _sort_masks(g, forms, form, forms.rows[value], parts)
    reads = [value for value, _ in parts.operands]
    reads += [m.value for m in parts.masks] + [b for b, *_ in parts.biases]
    lengths = f"{size(queries)}" + (f"/{size(keys)}" if size(keys) != size(queries) else "")
    count = f"{size(heads)}" + (f"/{size(shared)}" if size(shared) != size(heads) else "")
    what = f"attention {size(batch)} x {lengths}, {count} heads of {size(width)}, {dtype.name}"
    return Attention(
        outs=(value,),
        reads=tuple(dict.fromkeys(reads)),
        dead=(base.dot.outs[0],),
        what=what,
        served=f"attention: {_summary(parts)}",
        parts=parts,
        aval=g.avals[value],
        dims=form.dims,
    )


def _groups(base: Any, found: Operands, alone: list, stored: list, qa: Labels):
    """Sorts labels into batch, queries and heads; heads that share keys are the inner ones.

    Heads that only queries have are a group's. Which of the labels that all operands have are
    batch and which heads does not change what is computed.
    """
    seen = [{*atoms(dims)} for _, dims, *_ in base.biases] + [{*atoms(m.dims)} for m in base.masks]
    masked = [{*atoms(m.dims)} for m in base.masks]
    queries = [a for a in alone if any(a in m for m in masked)]
    queries = queries or [a for a in alone if any(a in s for s in seen)]
    if not queries or len(queries) == len(alone) > 1:
        by_size = lambda a: (a.size == size(found.axis), a.size)
        queries = sorted(queries or alone, key=by_size)[-1:]
    group = [a for a in alone if a not in queries]
    after = qa[qa.index(queries[0]) :] if queries else qa
    # A product with a parameter makes heads and their features as one dimension.
    together = [a for d in (*found.x[1], *found.w[1]) if {*d} & {*found.contract} for a in d]
    heads = [a for a in stored if a in together]
    heads = heads or [a for a in stored if a in after] or stored[1:][-1:]
    batch = [a for a in stored if a not in heads]
    in_some = lambda a: any(a in s for s in seen)
    if len(batch) > 1 and any(map(in_some, batch)):  # masks differ along some: others are heads
        heads = heads + [a for a in batch if not in_some(a)]
        batch = [a for a in batch if in_some(a)]
    return batch, queries, [*heads, *group]


def _dtype(dtypes: Sequence[Any]) -> Any:
    """Returns what an attention is computed in: the widest dtype that an operand has."""
    widest = functools.reduce(jnp.promote_types, dtypes)
    if len({d for d in dtypes if d.itemsize == 2}) > 1:
        raise Left("operands of bfloat16 and of float16")
    return np.dtype(widest)


def _sort_masks(g: Program, forms: ScoreForms, form: Form, row: Row, parts: Parts) -> None:
    """Sorts masks and biases into what is proved of them and what is known at run time only."""
    base = form.base
    batch, queries, heads, keys = parts.groups
    reach = base.scale if base.inner is not None else 0.0  # bound on scores with a soft cap
    for m in base.masks:
        if m.fill + reach > MASKED:
            raise Left(f"a mask writes {m.fill:g} into the scores, which is not out of their reach")
    low, high, fixed, run_time = -math.inf, math.inf, [], []  # seen: low <= query - key <= high
    for m in base.masks:
        band = _band(g, forms, m, queries, keys)
        if band is not None:
            low, high = max(low, band[0]), min(high, band[1])
        elif (plane := _plane(g, m, queries, keys)) is not None:
            fixed.append(plane)
        else:
            run_time.append(m)
    t, s = size(queries), size(keys)
    low, high = max(low, -(s - 1)), min(high, t - 1)
    if low <= -(s - 1) and high >= t - 1:
        whole = True
    else:
        whole = False
        if low == 0 and t <= s:
            parts.causal, parts.window = True, (None if high >= t - 1 else int(high) + 1)
        elif t * s <= LARGEST_CONSTANT:
            behind = np.arange(t)[:, None] - np.arange(s)
            fixed.append((low <= behind) & (behind <= high))
        else:
            raise Left("its constant mask is too large to be an operand")
    sees = whole or parts.causal
    if fixed:
        together = functools.reduce(np.logical_and, fixed)
        behind = np.arange(t)[:, None] - np.arange(s)
        if parts.causal:
            together = together & (behind >= 0) & (behind <= high)
        parts.causal, parts.window, parts.fixed = classified(together)
        sees = bool(together.any(-1).all())
    if row.number is not None and np.asarray(1 / s, row.value.dtype) == row.value:
        row = replace(row, value=np.float64(1 / s))  # a mean, without the rounding
    _sort_empty(form, row, parts, run_time, sees)
    _sort_biases(g, forms, base, row, parts)


def _sort_biases(g: Program, forms: ScoreForms, base: Scores, row: Row, parts: Parts) -> None:
    """Takes over the biases that differ along the softmax's axis, if it can compute them."""
    keys = parts.groups[3]
    changed = any(m.changed for m in base.masks)
    for bias, dims, factor in base.biases:
        if changed and g.depends(bias, base.dot.outs):  # a mean, say, of what a mask writes
            raise Left("what is added to masked scores is made of scores")
        two, known = two_valued(g, bias), g.const(bias)
        finite = np.isfinite(two.numbers if two else np.nan if known is None else known).all()
        if finite and not set(atoms(dims)) & set(keys):
            continue  # the same along the softmax's axis: no effect, but for infinities
        if bias in forms.of and forms.of[bias].along and not _is_plain(forms, bias):
            raise Left("what is added to the scores is a product of the same softmax")
        if not jnp.issubdtype(g.avals[bias].dtype, jnp.floating):
            raise Left("what is added to the scores are integers")
        if not finite:
            parts.hidden = _hidden(base.masks, row, 1 / size(keys))
        sizes = [n * factor for n in two.numbers] if two else []
        if known is not None and known.size:  # each query's largest: a mask may be lower
            along = tuple(i for i, d in enumerate(dims) if set(expand(d)) & set(keys))
            sizes += [*np.max(np.asarray(known, np.float64) * factor, axis=along).reshape(-1)]
        if any(abs(n) > LARGEST_BIAS for n in sizes):
            raise Left("what is added to the scores is too large a number for their softmax")
        if parts.dtype.itemsize == 2 and (g.avals[bias].dtype != parts.dtype or factor != 1):
            raise Left(f"a bias of {g.avals[bias].dtype.name}, wider than its operands")
        parts.biases.append((bias, dims, factor))


def _hidden(masks: Sequence[Mask], row: Row, mean: float) -> Any:
    """Returns the one number that masks write or add, as `Attention.hidden` says it."""
    found = {("added", m.fill) if m.added and m.fill > -math.inf else m.fill for m in masks}
    if len(found) > 1 or any(m.changed and m.fill > -math.inf and not m.added for m in masks):
        raise Left("a bias that may be -inf, and masks of several numbers")
    number = found.pop() if found else -math.inf
    if isinstance(number, tuple) and abs(number[1]) >= ABSORBING and row.number != mean:
        raise Left("a bias that may be -inf, and a mask beside which a log-sum-exp is nothing")
    return number


def _is_plain(forms: ScoreForms, v: int) -> bool:
    """Tells if a value is a product itself, with nothing done to it."""
    form = forms.of[v]
    return not form.exp and not form.terms


def _sort_empty(form: Form, row: Row, parts: Parts, run_time: list[Mask], sees: bool) -> None:
    """Finds out what rows are that see nothing, where there may be such rows."""
    masks, parts.masks = form.base.masks, run_time
    if sees and not run_time:
        return
    if row.kind == "mixed":
        raise Left("what its rows are that see nothing is not one number")
    if row.kind == "shifted" or any(m.added for m in masks):
        first = next(iter(masks))
        if len(masks) > 1 or not sees or first.fill == -math.inf:
            raise Left("a mask that is added, and others, in rows that may see nothing")
        parts.added = first.fill
    elif row.back[NUMBER] or any(m.changed for m in masks):
        raise Left("rows that may see nothing have a gradient, or one that is NaN")
    if row.number is not None:
        parts.empty = row.number


def _band(g: Program, forms: ScoreForms, m: Mask, queries: list, keys: Labels):
    """(low, high) where a mask is proved to keep low <= query - key <= high; None of others."""
    found = region(g, m.value)
    if found is None:
        return None
    above = found.above
    if not m.keep:
        if len(above) != 1:
            return None
        one = above[0]
        above = (type(one)(tuple(-c for c in one.coefficients), -one.constant - 1),)
    low, high = -math.inf, math.inf
    for one in above:
        steps = [(m.dims[i], c) for i, c in enumerate(one.coefficients) if c]
        of = {"query": 0, "key": 0}
        for labels, c in steps:
            labels = expand(labels)
            role = "query" if list(labels) == list(queries) else "key" if labels == keys else ""
            if not role or len(labels) != 1:
                return None
            of[role] += c
        if not steps:
            if one.constant < 0:
                return 1, 0  # nothing is seen
            continue
        if of["query"] == 1 and of["key"] == -1:
            low = max(low, -one.constant)
        elif of["query"] == -1 and of["key"] == 1:
            high = min(high, one.constant)
        else:
            return None
    return low, high


def _plane(g: Program, m: Mask, queries: list, keys: Labels) -> Any:
    """Returns for queries and keys if a constant mask keeps scores; None if heads differ."""
    if size(queries) * size(keys) > LARGEST_CONSTANT or (x := g.const(m.value)) is None:
        return None
    others = [a for a in atoms(m.dims) if a not in (*queries, *keys)]
    x = arrange(np.asarray(x == m.keep), m.dims, (others, queries, keys))
    return x[0] if (x == x[:1]).all() else None


def classified(keep: Any) -> tuple[bool, int | None, Any]:
    """(causal, window, mask) of a constant mask; None for the mask where the others say it."""
    t, s = keep.shape
    behind = np.arange(t)[:, None] - np.arange(s)
    width = int(behind.max(where=keep, initial=0)) + 1
    if keep.all():
        return False, None, None
    if t <= s and (keep == (behind >= 0)).all():
        return True, None, None
    if t <= s and (keep == ((behind >= 0) & (behind < width))).all():
        return True, width, None
    return False, None, keep


def _summary(p: Parts) -> str:
    said = {
        "causal": p.causal,
        f"window {p.window}": p.window,
        "constant mask": p.fixed is not None,
        "run-time mask": p.masks,
        "bias": p.biases,
        f"softcap {p.softcap}": p.softcap,
    }
    return ", ".join(name for name, is_so in said.items() if is_so) or "no mask"


# ---------------------------------------------------------------- serving


def _times(bias: Any, factor: float) -> Any:
    wide = jnp.promote_types(bias.dtype, jnp.float32)
    return bias if factor == 1 else bias.astype(wide) * factor


@jax.custom_jvp
def _spoiled(x: Any, wrong: Any) -> Any:
    """x, with gradients that are NaN where something is wrong."""
    del wrong
    return x


@_spoiled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    x, wrong = primals
    return x, tangents[0] * jnp.where(wrong, jnp.nan, 1).astype(x.dtype)


def attend(q, k, v, bias, mask, *, hidden, **options):
    """`normfuse.attention`, with rows that see nothing as the user's own code has them.

    A bias of -inf at all keys that a row sees leaves it those that a mask hides by a number.
    """
    if hidden is None:
        return _attend(q, k, v, bias, mask, **options)
    from ..attention import attention

    visible = _visible(q, k, mask, options["causal"], options["window"])
    finite = bias > -jnp.inf
    rows = lambda x: jnp.any(x, -1).swapaxes(1, 2)[..., None]
    some = rows(visible & finite)
    if hidden == -jnp.inf:
        y = _attend(q, k, v, bias, mask, **options)
        return y * jnp.where(rows(visible) & ~some, jnp.nan, 1).astype(y.dtype)
    own: dict[str, Any] = {"implementation": "xla"}
    own |= {name: options[name] for name in ("softcap", "scale")}
    wide = jnp.promote_types(v.dtype, jnp.float32)

    def general(q, k, v, bias, mask):
        if isinstance(hidden, tuple):
            whole = bias.astype(wide) + jnp.where(visible, 0, jnp.asarray(hidden[1], wide))
            y = attention(q, k, v, bias=whole, **own)
            return y * jnp.where(rows(finite), 1, jnp.nan).astype(y.dtype)
        y = _attend(q, k, v, bias, mask, **options)
        lost = rows(visible) & ~some
        y = y * jnp.where(lost & ~rows(~visible), jnp.nan, 1).astype(y.dtype)
        other = attention(jnp.zeros_like(q), k, v, mask=~visible, **own)
        return jnp.where(lost & rows(~visible), other, y)

    specific = functools.partial(_attend, **options)
    sees = jnp.all(some if isinstance(hidden, tuple) else some | ~rows(visible))
    return jax.lax.cond(sees, specific, jax.checkpoint(general), q, k, v, bias, mask)


def _visible(q: Any, k: Any, mask: Any, causal: bool, window: int | None) -> Any:
    """Tells for each score if no mask hides it, in 4 dimensions; of size 1 if all are the same."""
    seen = jnp.ones((1, 1, 1, k.shape[1]), bool) if mask is None else mask
    if not causal:
        return seen
    behind = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    return seen & ((behind >= 0) if window is None else (behind >= 0) & (behind < window))


def _attend(q, k, v, bias, mask, *, causal, window, softcap, scale, empty, added):
    """Computes attention without a bias that is -inf for all keys that a row sees."""
    from ..attention import attention

    options = dict(causal=causal, window=window, softcap=softcap, scale=scale)
    plain = functools.partial(attention, bias=bias, mask=mask, **options)
    if mask is None or empty in (None, 0) and added is None:
        return plain(q, k, v)
    seen = _visible(q, k, mask, causal, window)
    some = jnp.any(seen, -1)  # (batch, heads, queries), of size 1 where the mask has it
    if added is not None and abs(added) < ABSORBING:
        # A number that all scores of a row have added changes nothing: such a row sees all keys.
        return attention(q, k, v, bias=bias, mask=mask | ~some[..., None], **options)
    rows = some.swapaxes(1, 2)[..., None]
    wide = jnp.promote_types(v.dtype, jnp.float32)
    if added is not None:  # it absorbs them
        assert empty is not None

        def general(q, k, v, bias, mask):
            number = jnp.where(mask, 0, jnp.asarray(added, wide))
            whole = number if bias is None else bias.astype(wide) + number
            y = attention(q, k, v, bias=whole, implementation="xla", **options)
            return y * jnp.where(rows, 1, empty * k.shape[1]).astype(y.dtype)

        specific = lambda q, k, v, bias, mask: attention(q, k, v, bias=bias, mask=mask, **options)
        return jax.lax.cond(jnp.all(some), specific, jax.checkpoint(general), q, k, v, bias, mask)
    if empty != empty:
        # The softmax of such a row is NaN for all keys. The mask stops its gradient to the scores,
        # and nothing the one to the values.
        head = jnp.any(~jnp.broadcast_to(rows, (*q.shape[:-1], 1)), 1, keepdims=True)
        head = jnp.any(head.reshape(*head.shape[:2], k.shape[2], -1), -1)[..., None]
        return jnp.where(rows, plain(q, k, _spoiled(v, head)), jnp.nan)
    assert empty is not None
    every = empty * jnp.sum(v.astype(wide), 1, keepdims=True)
    y = plain(q, k, v)
    return jnp.where(rows, y, jnp.repeat(every.astype(y.dtype), q.shape[2] // k.shape[2], 2))


def found(forms: ScoreForms) -> Iterator[Site | tuple[int, str]]:
    """Yields the sites of attention in a program; a value and the reason where one is left."""
    yield from forms.ends("is_attention", site_of)
    yield from changed(forms)
