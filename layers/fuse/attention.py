"""Attention in a program: exp(s - lse) · v, however it is written, by one fused operation."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .forms import Form, Scores
from .indices import affine, band_of, complement, region, two_valued
from .labels import Dims, Label, Labels, arrange, atoms, expand, size
from .program import LARGEST_CONSTANT, Equation, Program, is_precise
from .scores import Operands, ScoreForms, conjuncts
from .sites import Left, Read, Site, called, said
from .unseen import kind_of

MASKED = -1e4
"""A mask writes this or less into scores that it takes away. exp(-1e4) is 0 in float32."""
LARGEST_BIAS = 1e4
"""A larger number added to scores rounds them away in float32."""


Part = tuple[int, Dims, bool]
"""A mask, or a part of one: a value, its labels, and what it is where scores stay."""


@dataclasses.dataclass
class Seen:
    """The keys that queries see, and what is added to their scores.

    Attributes:
      groups: the labels of the scores' batch, queries, heads and keys.
      dtype: what the attention is computed in.
      options: of `attend`.
      masks, biases: what is known at run time only; `fixed` a constant mask.
      lengths: (value, labels, number to add) of how many queries and how many keys there are.
      segments: (value, labels) of the queries' segments and of the keys'.
      kept: masks of the probabilities that dropout keeps.
    """

    groups: tuple[Any, ...]
    dtype: Any
    options: dict[str, Any]
    masks: list[Part] = dataclasses.field(default_factory=list)
    biases: list[tuple[int, Dims, float]] = dataclasses.field(default_factory=list)
    fixed: Any = None
    lengths: tuple[list[Any], list[Any]] = dataclasses.field(default_factory=lambda: ([], []))
    segments: list[tuple[int, Dims]] = dataclasses.field(default_factory=list)
    kept: tuple[Part, ...] = ()

    @property
    def at_run_time(self) -> bool:
        """Tells if it is known at run time only what queries see."""
        return bool(self.masks or any(self.lengths) or self.segments)

    def arrays(self, read: Read) -> dict[str, Any]:
        """Returns arrays of `normfuse.attention`, by their names."""
        batch, queries, heads, keys = self.groups
        place = lambda x, dims: arrange(x, dims, (batch, heads, queries, keys), full=False)
        masks = [place(read(m), dims) == keep for m, dims, keep in self.masks]
        if self.fixed is not None:
            masks.append(jnp.asarray(self.fixed)[None, None])
        biases = [times(place(read(b), dims), factor) for b, dims, factor in self.biases]
        add = lambda a, b: a.astype(self.dtype) + b  # biases of 16 bits are added in wider dtypes
        kept = [place(read(m), dims) == keep for m, dims, keep in self.kept]
        given = {"bias": (add, biases), "mask": (jnp.logical_and, masks)}
        given["dropout_mask"] = jnp.logical_and, kept
        found = {name: functools.reduce(join, xs) for name, (join, xs) in given.items() if xs}
        lengths = []
        for each, n in zip(self.lengths, map(size, (queries, keys))):
            counts = [_count(arrange(read(l), dims, (batch,)), more, n) for l, dims, more in each]
            lengths.append(functools.reduce(jnp.minimum, counts) if counts else None)
        if any(self.lengths):
            found["lengths"] = tuple(lengths)
        if self.segments:
            placed = zip(self.segments, (queries, keys))
            ids = tuple(arrange(read(x), dims, (batch, of)) for (x, dims), of in placed)
            found["segment_ids"] = ids
        return found


def _count(x: Any, more: int, n: int) -> Any:
    """Returns integers plus a number, from 0 to n."""
    least = 0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else -n - abs(more)
    return jnp.clip(jnp.clip(x, least, n + abs(more)).astype(jnp.int32) + more, 0, n)


def site_of(forms: ScoreForms, value: int, form: Form) -> Site:
    """Returns what computes a value that is an attention's result.

    Raises:
      Left: where it has to stay as it is, with the reason.
    """
    g, mixed, base = forms.program, form.mixed, form.base
    assert mixed is not None
    if not form.safe:
        raise Left("its exponentials are of scores without their maximum subtracted, and overflow")
    if is_precise(mixed.product, wide=True):
        raise Left("its second product asks for a higher precision")
    found = Operands(forms, base, frozenset(mixed.axis), scale=True)
    v, v_dims, factor, v_dtype = forms.peel(mixed.product.ins[mixed.side], mixed.dims, True)
    groups, shared, values = _labels_of(form, found, v_dims)
    (batch, queries, heads), keys, width = groups, found.axis, found.contract
    dtype = _dtype([found.x[3], found.w[3], v_dtype], _narrowest(forms, value, mixed.product))
    scale = found.factor * found.x[2] * found.w[2]
    if scale <= 0:
        raise Left("scores are multiplied by a number that is not positive")
    lengths = f"{size(queries)}" + (f"/{size(keys)}" if size(keys) != size(queries) else "")
    count = f"{size(heads)}" + (f"/{size(shared)}" if size(shared) != size(heads) else "")
    options = {"scale": scale, "softcap": found.softcap, "rows": None}
    seen = Seen((*groups, keys), dtype, options)
    if form.dropout is not None:
        seen.kept, c = form.dropout.masks, form.dropout.factor
        if seen.kept and c >= 1:
            options["dropout_rate"] = 1 - 1 / c
        else:
            factor *= c
    sees = _sort_masks(forms, form, seen)
    _sort_rows(forms, value, form, seen, sees, _sort_biases(forms, base, seen))
    parts = {
        "causal": options["causal"],
        f"window {options['window']}": options["window"],
        "constant mask": seen.fixed is not None,
        "lengths": any(seen.lengths),
        "segments": seen.segments,
        "run-time mask": seen.masks,
        "bias": seen.biases,
        f"softcap {found.softcap}": found.softcap,
        "dropout": seen.kept,
    }
    operands = [
        (*found.x[:2], (batch, queries, heads, width)),
        (*found.w[:2], (batch, keys, shared, width)),
        (v, v_dims, (batch, keys, shared, values)),
    ]

    def compute(read: Read) -> Sequence[Any]:
        q, k, v = (arrange(read(u), dims, to).astype(dtype) for u, dims, to in operands)
        y = called(attend, q, k, v, seen.arrays(read), **options)
        labels = [(l,) for l in atoms((batch, queries, heads, values))]
        y = arrange(y.reshape([l.size for (l,) in labels]), tuple(labels), form.dims)
        return [times(y, factor).astype(g.avals[value].dtype)]

    given = *seen.masks, *seen.biases, *seen.kept, *seen.segments, *seen.lengths[0]
    reads = [u for u, *_ in (*operands, *given, *seen.lengths[1])]
    types = {u: jax.ShapeDtypeStruct(g.avals[u].shape, g.avals[u].dtype) for u in reads}
    given = jax.eval_shape(lambda given: seen.arrays(given.__getitem__), types)
    shapes = [tuple(map(size, to)) for _, _, to in operands]
    kernel = _kernel((*shapes[:2], dtype), tuple(sorted(given.items())), tuple(options.items()))
    return Site(
        outs=(value,),
        reads=tuple(dict.fromkeys(reads)),
        dead=(base.dot.outs[0],),
        what=f"attention {size(batch)} x {lengths}, {count} heads of {size(width)}, {dtype.name}",
        served=f"attention: {'; '.join(filter(None, (said(parts), kernel)))}",
        compute=compute,
    )


def _labels_of(form: Form, found: Operands, v_dims: Dims) -> tuple[Any, list[Label], Labels]:
    """Returns an attention's batch, queries and heads; the heads that keys have; values' width."""
    assert form.mixed is not None
    keys, width = found.axis, found.contract
    qa, ka, va = atoms(found.x[1]), atoms(found.w[1]), atoms(v_dims)
    scores = {*atoms(found.sides[0]), *atoms(found.sides[1])}
    values = tuple(a for a in atoms(form.mixed.dims) if a not in scores)
    own = {*keys, *width, *values}
    of_each = (qa, width, (*keys, *values)), (ka, (*keys, *width), values), (va, keys, width)
    if any(l.free for l in own) or any(
        not {*wanted} <= {*have} or {*others} & {*have} for have, wanted, others in of_each
    ):
        raise Left("its dimensions are not those of queries, keys and values")
    stored = [a for a in dict.fromkeys((*qa, *ka, *va)) if a in (*ka, *va) and a not in own]
    alone = [a for a in qa if a not in stored and a not in width]
    if {*atoms(form.dims)} != {*stored, *alone, *values}:
        raise Left("the result is not of all rows and heads")
    queries = _queries_of(form.base, found, alone)
    if not queries or size(queries) < 2 or size(keys) < 1:
        raise Left("one query")
    batch, heads = _batch_and_heads(form.base, found, stored, qa[qa.index(queries[0]) :])
    groups = batch, queries, [*heads, *[a for a in alone if a not in queries]]
    if size(width) != size(values):
        raise Left(f"heads of {size(width)} for scores and of {size(values)} for values")
    return groups, heads, values


@functools.lru_cache(maxsize=256)
def _kernel(qk: Any, given: Any, options: Any) -> str:
    """Returns the words of what computes an attention; raises Left where it would be slower."""
    from ..attention import blocks_pay, served_by

    *shapes, dtype = qk
    q, k = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    others = {n: x for n, x in options if n not in ("rows", "infinite")}
    kernel = served_by(q, k, k, **dict(given), **others)
    if kernel.startswith("blocks") and not blocks_pay(q, k):
        raise Left(f"it is slower in {kernel}")
    return kernel


def _queries_of(base: Scores, found: Operands, alone: list[Label]) -> list[Label]:
    """Returns the labels of queries among those that only queries have: the others are heads."""
    masked = {a for m in base.masks for a in atoms(m.dims)}
    biased = {a for _, dims, _ in base.biases for a in atoms(dims)}
    queries = [a for a in alone if a in masked] or [a for a in alone if a in biased]
    if not queries or len(queries) == len(alone) > 1:
        by_size = lambda a: (a.size == size(found.axis), a.size)
        queries = sorted(queries or alone, key=by_size)[-1:]
    return queries


def _batch_and_heads(base: Scores, found: Operands, stored: list[Label], after: Labels) -> Any:
    """Sorts the labels that keys have. Which are which does not change what is computed."""
    # A product with a parameter makes heads and their features as one dimension.
    together = [a for d in (*found.x[1], *found.w[1]) if {*d} & {*found.contract} for a in d]
    heads = [a for a in stored if a in together]
    heads = heads or [a for a in stored if a in after] or stored[1:][-1:]
    batch = [a for a in stored if a not in heads]
    every = [m.dims for m in base.masks] + [dims for _, dims, _ in base.biases]
    differ = {a for dims in every for a in atoms(dims)}
    if differ & {*batch}:  # masks differ along some: others are heads
        heads = heads + [a for a in batch if a not in differ]
        batch = [a for a in batch if a in differ]
    return batch, heads


def _narrowest(forms: ScoreForms, value: int, product: Equation) -> Any:
    """Returns the narrowest dtype between what a product multiplies and a value made of it."""
    g = forms.program
    dtypes = [jnp.promote_types(*[g.avals[u].dtype for u in product.ins])]
    while value != product.outs[0]:
        dtypes.append(g.avals[value].dtype)
        above = [u for u in g.maker[value].ins if (f := forms.of.get(u)) and f.mixed]
        value = above[0] if above else product.outs[0]
    return min(dtypes, key=lambda d: d.itemsize)


def _dtype(dtypes: Sequence[Any], result: Any) -> Any:
    """Returns what an attention is computed in: the widest dtype that an operand has.

    Operands that are cast to a wider dtype, in which the `result` stays, are computed with in that.
    """
    if len({d for d in dtypes if d.itemsize == 2}) > 1:
        raise Left("operands of bfloat16 and of float16")
    wide = [result] if result.itemsize > 2 else []
    return np.dtype(functools.reduce(jnp.promote_types, [*dtypes, *wide]))


def _sort_masks(forms: ScoreForms, form: Form, seen: Seen) -> bool:
    """Sorts masks into what is proved of them and what is known at run time only.

    Returns True if all queries are proved to see a key.
    """
    g, base, (_, queries, _, keys) = forms.program, form.base, seen.groups
    reach = base.scale if base.inner is not None else 0.0  # bound on scores with a soft cap
    low, high, fixed = -math.inf, math.inf, []  # seen: low <= query - key <= high
    for m in base.masks:
        if m.fill + reach > MASKED:
            raise Left(f"a mask writes {m.fill:g} into the scores, which is not out of their reach")
    whole = replace(form, dims=(*seen.groups,))
    each = [(conjuncts(forms, whole, m.value, m.dims, m.keep), m) for m in base.masks]
    parts = [part for found, m in each for part in found or [(m.value, m.dims, m.keep)]]
    for part in dict.fromkeys(parts):
        if (band := _band(g, part, queries, keys)) is not None:
            low, high = max(low, band[0]), min(high, band[1])
        elif (plane := _plane(g, part, queries, keys)) is not None:
            fixed.append(plane)
        elif not _sort_integers(forms, part, seen):
            seen.masks.append(part)
    low, high, sees = _sort_constants(low, high, fixed, seen)
    places = zip(seen.segments, (tuple(queries), keys))
    ids = {(v, tuple([0 if expand(d) == of else d for d in dims])) for (v, dims), of in places}
    is_square = size(queries) == size(keys)
    # Each query sees the key at its place.
    itself = len(ids) == 1 and is_square and low <= 0 <= high
    hides_more = seen.fixed is not None or seen.masks or any(seen.lengths)
    return sees and (itself and not hides_more or not seen.at_run_time)


def _sort_constants(low: float, high: float, fixed: list[Any], seen: Seen) -> Any:
    """Takes constant masks over; returns low <= query - key <= high, and if all queries see."""
    t, s = size(seen.groups[1]), size(seen.groups[3])
    is_option = lambda low, high: low == 0 <= high and t <= s or low <= -(s - 1) and high >= t - 1
    sees = True
    if fixed or not is_option(low, high):
        if t * s > LARGEST_CONSTANT:
            raise Left("its constant mask is too large to be an operand")
        behind = np.arange(t)[:, None] - np.arange(s)
        keep = functools.reduce(np.logical_and, fixed, (low <= behind) & (behind <= high))
        low, high = band_of(keep) or (math.inf, t)
        sees = bool(keep.any(-1).all())
        seen.fixed = None if is_option(low, high) else keep
    causal, width = low == 0 and t <= s, int(min(high, t - 1)) + 1
    seen.options |= {"causal": causal, "window": width if causal and width < t else None}
    return low, high, sees


def _sort_rows(
    forms: ScoreForms, value: int, form: Form, seen: Seen, sees: bool, infinite: set[int]
) -> None:
    """Finds out what rows are that see nothing: `rows` of `attend`."""
    keys, rows = size(seen.groups[3]), None
    if infinite or not sees:
        rows = kind_of(forms, value, form, keys, sees, infinite)
    if seen.kept and isinstance(rows, float) and rows:  # NaN, or the weight of each value
        if rows == rows and rows != 1 / keys:
            raise Left("dropout of rows that see nothing, whose weights are no mean")
        rows = "written" if rows == rows else rows
    if rows in ("absorbed", "shifted") and not infinite and not seen.at_run_time:
        raise Left("a constant mask that is added, and rows that see nothing")
    if rows == "absorbed" and (form.base.inner is not None or seen.dtype == jnp.float16):
        raise Left("a number that rounds scores away, which have a soft cap or are float16")
    seen.options |= {"rows": rows, "infinite": bool(infinite)}


def _sort_biases(forms: ScoreForms, base: Scores, seen: Seen) -> set[int]:
    """Takes over biases that differ along the softmax's axis; returns those that may be -inf."""
    g, keys, infinite = forms.program, seen.groups[3], set()
    for bias, dims, factor in base.biases:
        if base.masks and g.depends(bias, base.dot.outs):  # a mean, say, of what a mask writes
            raise Left("what is added to masked scores is made of scores")
        two, known = two_valued(g, bias), g.const(bias)
        finite = np.isfinite(two.numbers if two else np.nan if known is None else known).all()
        if finite and not set(atoms(dims)) & set(keys):
            continue  # the same along the softmax's axis: no effect, but for infinities
        of_scores = forms.of.get(bias)
        if of_scores and of_scores.along and (of_scores.exp or of_scores.terms):
            raise Left("what is added to the scores is a product of the same softmax")
        if not jnp.issubdtype(g.avals[bias].dtype, jnp.floating):
            raise Left("what is added to the scores are integers")
        infinite |= set() if finite else {bias}
        sizes = [n * factor for n in two.numbers] if two else []
        if known is not None and known.size:  # each query's largest: a mask may be lower
            along = tuple(i for i, d in enumerate(dims) if set(expand(d)) & set(keys))
            sizes += [*np.max(np.asarray(known, np.float64) * factor, axis=along).reshape(-1)]
        if any(abs(n) > LARGEST_BIAS for n in sizes):
            raise Left("what is added to the scores is too large a number for their softmax")
        if seen.dtype.itemsize == 2 and (g.avals[bias].dtype != seen.dtype or factor != 1):
            raise Left(f"a bias of {g.avals[bias].dtype.name}, wider than its operands")
        seen.biases.append((bias, dims, factor))
    return infinite


_TURNED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def _sort_integers(forms: ScoreForms, part: Part, seen: Seen) -> bool:
    """Takes over a mask of lengths, position < length, or of segments, id == id; tells if it is."""
    (v, dims, keep), g, (batch, queries, _, keys) = part, forms.program, seen.groups
    made, name = g.made(v)
    if name not in _OPPOSITE or any(g.avals[u].dtype not in _COUNTING for u in made.ins):
        return False
    name = name if keep else _OPPOSITE[name]
    if any(g.avals[u].shape != g.avals[v].shape for u in made.ins):
        return False
    sides = [forms.peel(u, dims)[:2] for u in made.ins]
    own = [{*atoms(d)} for _, d in sides]
    if name == "eq" and not seen.segments:
        for first, second in ((0, 1), (1, 0)):
            pairs = (own[first], {*queries}), (own[second], {*keys})
            if all(of <= labels <= {*batch} | of for labels, of in pairs):
                seen.segments = [sides[first], sides[second]]
                return True
    for i, order in enumerate((name, _TURNED.get(name))):
        at, (length, length_dims) = affine(g, made.ins[i]), sides[1 - i]
        if at is None or order not in ("lt", "le") or not own[1 - i] <= {*batch}:
            continue
        steps = [(expand(d), c) for d, c in zip(dims, at.coefficients) if c]
        for each, of in zip(seen.lengths, (tuple(queries), tuple(keys))):
            if steps == [(of, 1)] and abs(at.constant) <= size(of):
                each.append((length, length_dims, (order == "le") - at.constant))
                return True
    return False


_COUNTING = jnp.int32, jnp.int64, jnp.uint32


def _band(g: Program, part: Part, queries: list, keys: Labels):
    """(low, high) where a mask is proved to keep low <= query - key <= high; None of others."""
    v, dims, keep = part
    found = region(g, v)
    if found is not None and not keep:
        found = complement(found)
    if found is None:
        return None
    low, high = -math.inf, math.inf
    roles: list[Any] = [labels if len(labels) == 1 else None for labels in (tuple(queries), keys)]
    for one in found:
        slopes = [0, 0]
        for labels, c in zip(dims, one.coefficients):
            if c == 0:
                continue
            if expand(labels) not in roles:
                return None
            slopes[roles.index(expand(labels))] = c
        match slopes:
            case [0, 0] if one.constant < 0:
                return 1, 0  # nothing is seen
            case [0, 0]:
                pass
            case [1, -1]:
                low = max(low, -one.constant)
            case [-1, 1]:
                high = min(high, one.constant)
            case _:
                return None
    return low, high


def _plane(g: Program, part: Part, queries: list, keys: Labels) -> Any:
    """Returns for queries and keys if a constant mask keeps scores; None if heads differ."""
    v, dims, keep = part
    if size(queries) * size(keys) > LARGEST_CONSTANT or (x := g.const(v)) is None:
        return None
    others = [a for a in atoms(dims) if a not in (*queries, *keys)]
    x = arrange(np.asarray(x == keep), dims, (others, queries, keys))
    return x[0] if (x == x[:1]).all() else None


# ---------------------------------------------------------------- serving


def times(x: Any, factor: float, least: Any = jnp.float32) -> Any:
    """Returns x times a number, in the dtype `least` or a wider one."""
    return x if factor == 1 else x.astype(jnp.promote_types(x.dtype, least)) * factor


FAINT = 2.0**-40


@jax.custom_jvp
def _faint(x: Any, where: Any) -> Any:
    """x · FAINT in some places, so that the scores that it makes are nothing beside rounding.

    The derivative is divided by FAINT: with two such factors, the product's is that of x itself.
    """
    return jnp.where(where, x * FAINT, x)


@_faint.defjvp
def _(primals: Any, tangents: Any) -> Any:
    x, where = primals
    return _faint(x, where), jnp.where(where, tangents[0] / FAINT, tangents[0])


def attend(q, k, v, given, *, rows, infinite, causal, window, **scores):
    """`normfuse.attention`, with rows that see nothing as the user's own code has them.

    There is no branch: a GPU waits for the host where a program chooses. Such rows have a closed
    form, or they are those of a second attention, whose lengths are 0 where there are none.

    Args:
      given: arrays of `normfuse.attention`, by their names.
      rows: rows that see nothing; None where there are none, or it does not matter. A number is the
        weight of each value. "shifted" rows see all keys, whose scores have one number added.
        In "absorbed" rows that number has rounded the scores away, but not their derivative. In
        "written" rows it replaces the scores of the keys that masks hide.
      infinite: a bias may be -inf at all keys that a row sees, which is then as if it saw nothing;
        but NaN where masks leave it no other keys.
      scores: options of `normfuse.attention`.
    """
    from ..attention import attention

    options = scores | {"causal": causal, "window": window}
    if not infinite and rows in (None, 0):
        return attention(q, k, v, **given, **options)
    bias, keys = given.get("bias"), k.shape[1]
    # Of constants alone XLA would compute what follows while it compiles, for minutes.
    barred = lax.optimization_barrier((given.get("mask"), jnp.float32(-jnp.inf)))
    given = given | ({} if barred[0] is None else {"mask": barred[0]})
    seen = _seen(q.shape[1], keys, given, causal, window)
    of_rows = lambda x: jnp.any(x, -1, keepdims=True).swapaxes(1, 2)
    is_finite = lambda x: x > barred[1].astype(x.dtype)
    sees = of_rows(seen)
    some = of_rows(seen & is_finite(bias)) if infinite else sees
    wide, groups = jnp.promote_types(v.dtype, jnp.float32), q.shape[2] // k.shape[2]
    every = {name: x for name, x in given.items() if name in ("bias", "dropout_mask")}

    if isinstance(rows, str) and bias is None and seen.shape[1:3] == (1, 1):
        # Whole sequences see nothing: then they see all keys, and no second attention is needed.
        if rows == "absorbed":
            q, k = _faint(q, ~some), _faint(k, ~some)
        elif rows == "written":
            q = jnp.where(some, q, 0)
        if "mask" in given:
            given["mask"] = given["mask"] | ~some
        if "lengths" in given:
            given["lengths"] = None, jnp.where(some[:, 0, 0, 0], given["lengths"][1], keys)
        return attention(q, k, v, **given, **options)

    def rest(q, k, v, every):
        """Computes the rows without a key that masks and biases leave them."""
        if rows == "absorbed":
            q, k = _faint(q, True), _faint(k, True)
            if bias is not None:
                nothing = every["bias"] - lax.stop_gradient(every["bias"])
                every = every | {"bias": jnp.where(is_finite(every["bias"]), nothing, -jnp.inf)}
        elif rows == "written":
            q, k = jnp.zeros_like(q), jnp.zeros_like(k)
            every = {"mask": hidden} | {n: x for n, x in every.items() if n != "bias"}
        wanted = jnp.any(jnp.broadcast_to(~some, (len(q), *some.shape[1:])), (1, 2, 3))
        return attention(q, k, v, **every, lengths=jnp.where(wanted, keys, 0), **scores)

    y, nothing = attention(q, k, v, **given, **options), sees & ~some  # NaN
    if isinstance(rows, str):
        hidden = ~seen | ~jnp.any(seen, -1, keepdims=True)
        if infinite:
            nothing = ~some & ~of_rows(hidden if rows == "written" else is_finite(bias))
            some |= nothing
        y = jnp.where(some, y, jax.checkpoint(rest)(q, k, v, every))
    elif rows:
        share = jnp.where(sees, 0, jnp.asarray(rows, wide))  # NaN only where it has to be
        total = jnp.repeat(jnp.sum(v.astype(wide), 1, keepdims=True), groups, 2)
        y = jnp.where(sees, y, (share * total).astype(y.dtype))
    return y * jnp.where(nothing, jnp.nan, 1).astype(y.dtype) if infinite else y


def _seen(length: int, keys: int, given: Any, causal: bool, window: int | None) -> Any:
    """Returns the keys that queries see, `(batch, heads, length, keys)` or 1 in place of these."""
    parts = [jnp.ones((1, 1, 1, keys), bool)]
    if causal:
        behind = jnp.arange(length)[:, None] - jnp.arange(keys)
        parts.append(((behind >= 0) & (behind < (window or keys)))[None, None])
    if "mask" in given:
        parts.append(given["mask"])
    rows, count = given.get("lengths", (None, None))
    if rows is not None:
        parts.append(jnp.arange(length)[:, None] < rows[:, None, None, None])
    if count is not None:
        parts.append(jnp.arange(keys) < count[:, None, None, None])
    if "segment_ids" in given:
        ids, others = given["segment_ids"]
        parts.append((ids[:, :, None] == others[:, None])[:, None])
    return functools.reduce(jnp.logical_and, parts)


def found(forms: ScoreForms) -> Iterator[Site | tuple[int, str]]:
    """Yields the sites of attention in a program; a value and the reason where one is left."""
    yield from forms.ends("is_attention", site_of)
    g, whole = forms.program, {f.base.dot for f in forms.of.values() if f.is_attention}
    soft = {f.base.dot: v for v, f in forms.of.items() if f.is_softmax}
    for dot, v in soft.items():
        is_batched = any(dot.params["dimension_numbers"][1])  # no logits, and no router's
        if is_batched and dot not in whole and (readers := g.readers.get(v)):
            names = dict.fromkeys(map(g.described, readers))
            yield v, f"its probabilities are read by {', '.join(names)}"
