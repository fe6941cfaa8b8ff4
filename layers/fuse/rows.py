"""Equations that are computed row by row: which dimension of an operand each of a result's is.

An array's `Rows` have labels (`labels.py`) for each dimension that counts rows, none for others.
`LINKS` has a rule for each primitive. From it `inferred` finds the rows of an equation's results,
`traced_back` those of its operands, and `computed` evaluates it for a chunk of the rows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .labels import Label, Labels, expand, regroup
from .sites import Left
from .words import COMBINED, SUMS, Axes, combined, gathered, part, without_words, words_of

Rows = tuple[Labels, ...]
"""For each dimension of an array the labels of the rows that it counts; () for another one."""
Link = tuple[int | None, ...] | None
"""The dimension of each operand that a result's dimension is, None for one that has no part in it;
None alone where elements along the dimension are made of several along an operand's."""


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """An equation as the rules read it, with the shapes of its operands and results.

    Attributes:
      counts: by column of a gather's indices, the dimension of the indices that the column counts,
        as the first does in `x[arange, labels]`.
    """

    eqn: Any
    name: str
    params: Mapping[str, Any]
    given: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]
    counts: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation that is computed for chunks of rows.

    Attributes:
      ins, outs: the rows of its operands and results, and words that devices may share.
      summed: the rows that it adds up.
      words: those that it combines.
      call: computes an equation that has programs of its own.
    """

    equation: Equation
    ins: tuple[Rows, ...]
    outs: tuple[Rows, ...]
    summed: frozenset[Label] = frozenset()
    words: frozenset[Label] = frozenset()
    call: Callable[[Sequence[Any], "Chunk"], list[Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some of the rows: for each label how many, and which is the first.

    Attributes:
      axes: for each label of words the mesh axes that share them.
    """

    sizes: Mapping[Label, int]
    firsts: Mapping[Label, Any]
    axes: Mapping[Label, Axes] = dataclasses.field(default_factory=dict)

    def sharing(self, words: Iterable[Label]) -> Axes:
        """Returns the mesh axes over which devices share words."""
        return tuple(dict.fromkeys([a for label in words for a in self.axes.get(label, ())]))

    def shape(self, rows: Rows, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the chunk's part of an array."""
        part = lambda labels: math.prod([self.sizes[label] for label in expand(labels)])
        return tuple([part(labels) if labels else n for labels, n in zip(rows, shape)])

    def places(self, labels: Labels) -> Any:
        """Returns the place of each of the chunk's rows among all."""
        place: Any = jnp.zeros((), jnp.int32)
        for label in expand(labels):
            own = self.firsts[label] + jnp.arange(self.sizes[label], dtype=jnp.int32)
            place = place[..., None] * label.size + own
        return place.reshape(-1)


class Combined(Left):
    """An equation combines rows, in another way than that sums of chunks could be added up."""

    def __init__(self, why: str, labels: frozenset[Label] = frozenset()):
        super().__init__(why)
        self.labels = labels


def labels_of(rows: Rows) -> Labels:
    """Returns the labels of an array's rows in the order of its dimensions."""
    return expand([label for labels in without_words(rows) for label in labels])


def latest(rows: Rows) -> Rows:
    """Returns rows with parts in place of labels that were split since."""
    return tuple(map(expand, rows))


# ---------------------------------------------------------------- rules


def _each(e: Equation) -> Sequence[Link]:
    """Returns the links of what is computed element by element; JAX may broadcast operands."""
    out = e.made[0]

    def link(d: int, shape: tuple[int, ...]) -> int | None:
        i = d - len(out) + len(shape)
        return i if i >= 0 and shape[i] == out[d] else None

    return [tuple([link(d, shape) for shape in e.given]) for d in range(len(out))]


def _broadcast(e: Equation) -> Sequence[Link]:
    (shape, *_), out = e.given, e.made[0]
    dims = map(int, e.params["broadcast_dimensions"])
    at = {d: i for i, d in enumerate(dims) if shape[i] == out[d]}
    return [(at.get(d),) for d in range(len(out))]


def _reduced(e: Equation) -> Sequence[Link]:
    axes = {*map(int, e.params["axes"])}
    return [(i,) for i in range(len(e.given[0])) if i not in axes]


def _along(name: str) -> Callable[[Equation], Sequence[Link]]:
    """Returns the rule of what combines elements along the one dimension that it names."""

    def links(e: Equation) -> Sequence[Link]:
        ndim = len(e.given[0])
        axis = int(e.params.get(name, ndim - 1)) % ndim
        return [None if d == axis else (d,) * len(e.given) for d in range(ndim)]

    return links


def _stacked(e: Equation) -> Sequence[Link]:
    axis, dims = e.params["axis"], range(len(e.made[0]))
    return [None if d == axis else (d - (d > axis),) * len(e.given) for d in dims]


def _unstacked(e: Equation) -> Sequence[Link]:
    return [(d + (d >= e.params["axis"]),) for d in range(len(e.made[0]))]


def _padded(e: Equation) -> Sequence[Link]:
    return [None if any(c) else (d, None) for d, c in enumerate(e.params["padding_config"])]


def _sliced(e: Equation) -> Sequence[Link]:
    """Returns the links of a slice, also of one that begins where numbers say."""
    more = [None] * (len(e.given) - 1)
    whole = [n == m for n, m in zip(e.given[0], e.made[0])]
    return [(d, *more) if same else None for d, same in enumerate(whole)]


def _reversed(e: Equation) -> Sequence[Link]:
    return [None if d in e.params["dimensions"] else (d,) for d in range(len(e.made[0]))]


def _product(e: Equation) -> Sequence[Link]:
    contracted, (lb, rb) = e.params["dimension_numbers"]
    lhs, rhs = [
        [i for i in range(len(shape)) if i not in (*summed, *batch)]
        for shape, summed, batch in zip(e.given, contracted, (lb, rb))
    ]
    return [*zip(lb, rb), *[(i, None) for i in lhs], *[(None, i) for i in rhs]]


def _gathered(e: Equation) -> Sequence[Link]:
    """Returns the links of a gather: of its indices, and of dimensions that it takes as a whole."""
    g, sizes = e.params["dimension_numbers"], e.params["slice_sizes"]
    at = dict(zip(g.start_indices_batching_dims, g.operand_batching_dims))
    gone = *g.collapsed_slice_dims, *g.operand_batching_dims
    kept = iter([i for i in range(len(sizes)) if i not in gone])
    at |= {i: g.start_index_map[c] for c, i in e.counts.items() if g.start_index_map[c] in gone}
    rows, links = iter(range(len(e.given[1]))), []
    for d in range(len(e.made[0])):
        if d in g.offset_dims:
            i = next(kept)
            links.append((i, None) if sizes[i] == e.given[0][i] else None)
        else:
            i = next(rows)
            links.append((at.get(i), i))
    return links


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz convert_element_type
copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite
le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not
one_minus_square or pcast population_count pow pvary reduce_precision rem round rsqrt select_n
sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
stop_gradient sub tan tanh xor
""".split()
_ON_DEVICES = "sharding_constraint", "pvary", "pcast"  # nothing to a chunk on one device
_RESHAPES = "reshape", "squeeze", "expand_dims"
LAYOUT = "layout"  # no equation of the program: of words that are whole to parts, or back
_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin"
LINKS: Mapping[str, Callable[[Equation], Sequence[Link]]] = {
    **dict.fromkeys(_ELEMENTWISE, _each),
    **dict.fromkeys(_REDUCTIONS.split(), _reduced),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp split top_k".split(), _along("axis")
    ),
    **dict.fromkeys(["concatenate", "sort"], _along("dimension")),
    **dict.fromkeys(["slice", "dynamic_slice"], _sliced),
    "broadcast_in_dim": _broadcast,
    "iota": lambda e: [()] * len(e.made[0]),
    "transpose": lambda e: [(int(i),) for i in e.params["permutation"]],
    "pad": _padded,
    "stack": _stacked,
    "unstack": _unstacked,
    "rev": _reversed,
    "dot_general": _product,
    "gather": _gathered,
}


# ---------------------------------------------------------------- the rows of operands and results


def _reshaped(e: Equation, rows: Rows, shape: Sequence[int], to: Sequence[int]) -> Rows:
    """Returns the rows of an array that is reshaped."""
    if e.params.get("dimensions") is not None and e.name == "reshape":
        raise Left("a reshape that transposes")
    others, words = [Label(n) for n in shape], words_of(rows)
    dims = [
        (() if l.size == 1 else labels if labels and not words & {*labels} else (l,))
        for labels, l in zip(latest(rows), others)
    ]
    pairs = zip(rows, others)
    of_words: dict[Labels, Labels] = {(l,): labels for labels, l in pairs if words & {*labels}}
    if (found := regroup(tuple(dims), to)) is None:
        raise Combined("a reshape that cuts across rows")
    no_rows, out = {*expand(others)}, []
    for labels in map(expand, found):
        if labels in of_words:
            out.append(of_words.pop(labels))
            continue
        counted = [label not in no_rows for label in labels]
        if any(counted) and not all(counted):
            raise Combined("a reshape of rows and others into one dimension")
        out.append(labels if any(counted) else ())
    if of_words:
        raise Left("a reshape of words")
    return tuple(out)


def inferred(e: Equation, known: Sequence[Rows | None]) -> Step:
    """Returns an equation of rows from those of its operands, None for those that are not known.

    Raises:
      Left: where it is not computed row by row.
    """
    known = [rows if rows is None else latest(rows) for rows in known]
    if e.name in _RESHAPES:
        made = _reshaped(e, known[0] or (), e.given[0], e.made[0])
        return Step(e, (latest(known[0] or ()),), (made,))
    if e.name not in LINKS:
        raise Left("no rule")
    ins: list[list[Labels]] = [
        [*rows] if rows else [()] * len(shape) for rows, shape in zip(known, e.given)
    ]

    def met(places: Sequence[tuple[int, int]]) -> Labels:
        """Returns the labels of a dimension that is one of each of these operands."""
        found = {ins[k][i] for k, i in places if known[k] is not None}
        if words_of(found):  # devices take their part of a whole value
            found.discard(())
        if len(found) > 1:
            raise Combined("it combines different rows", frozenset(sum(found, ())))
        labels = found.pop() if found else ()
        for k, i in places:
            ins[k][i] = labels
        return labels

    links = [
        [(k, i) for k, i in enumerate(link or ()) if i is not None] for link in LINKS[e.name](e)
    ]
    out = tuple(map(met, links))
    if e.name == "dot_general":
        for i, j in zip(*e.params["dimension_numbers"][0]):
            met([(0, i), (1, j)])
    used = {place for places in links for place in places}
    rest = [l for k, rows in enumerate(ins) for i, l in enumerate(rows) if (k, i) not in used]
    # Of pairs of words devices would have those alone of which both are their own.
    rest += [l for i, l in enumerate(out) if words_of([l]) and l in out[:i]]
    words = words_of(rest)
    summed = frozenset(expand(sum(rest, ()))) - words
    if summed and e.name not in SUMS:
        raise Combined("it combines rows", summed)
    if words and (words_of(out) or len(words) > 1 or not _combines(e, ins, words)):
        raise Left("it combines words")
    return Step(e, tuple(map(tuple, ins)), tuple([out for _ in e.made]), summed, words)


def _combines(e: Equation, ins: Sequence[Sequence[Labels]], words: frozenset[Label]) -> bool:
    """Tells if an equation combines words as devices can that share them."""
    if e.name != "gather":
        return e.name in COMBINED
    if math.prod(e.made[0]) > math.prod(e.given[0]) // 2:  # cheaper from whole words
        return False
    one = e.params["dimension_numbers"].collapsed_slice_dims
    return {i for i, labels in enumerate(ins[0]) if words & {*labels}} <= {*one}


def traced_back(e: Equation, made: Rows) -> Step:
    """Returns an equation of rows, from those of its results.

    Raises:
      Left: where these are not computed row by row.
    """
    made = latest(made)
    outs = tuple([made for _ in e.made])
    if e.name in _RESHAPES:
        given = _reshaped(e, made, e.made[0], e.given[0])
        return Step(e, (given,), tuple(map(latest, outs)))
    if not any(made):
        return Step(e, tuple([((),) * len(shape) for shape in e.given]), outs)
    if e.name not in LINKS:
        raise Left("no rule")
    ins: list[list[Labels]] = [[()] * len(shape) for shape in e.given]
    for link, labels in zip(LINKS[e.name](e), made):
        if link is None and labels:
            raise Combined("it combines rows")
        for k, i in enumerate(link or ()):
            if i is not None and e.given[k][i] != 1:
                ins[k][i] = labels
    return Step(e, tuple(map(tuple, ins)), outs)


# ---------------------------------------------------------------- evaluation


class Summed(NamedTuple):
    """An operand of products alone, whose gradient is that of zeros in the dtype of its sums."""

    value: Any
    zeros: Any


def _multiplied(e: Equation, given: Sequence[Any]) -> Any:
    """Returns a product of which one operand is `Summed`."""
    side = int(isinstance(given[1], Summed))
    of_other, own = (e.params["dimension_numbers"][0][i] for i in (1 - side, side))

    def bound(other: Any, kernel: Any) -> Any:
        return e.eqn.primitive.bind(*((other, kernel) if side else (kernel, other)), **e.params)

    def gradient(other: Any, ct: Any, zeros: Any) -> Any:
        """Returns JAX's own gradients, summed in the dtype of the zeros."""
        free = [i for i in range(other.ndim) if i not in of_other]
        first = 0 if side else ct.ndim - len(free)
        dims = ([*range(first, first + len(free))], free), ((), ())
        found = jax.lax.dot_general(ct, other, dims, e.params["precision"], zeros.dtype)
        kept = [i for i in range(zeros.ndim) if i not in own]
        order = [*kept, *[own[of_other.index(i)] for i in sorted(of_other)]]
        return jnp.transpose(found, sorted(range(len(order)), key=order.__getitem__))

    def backward(kept: Any, ct: Any) -> Any:
        other, kernel, zeros = kept
        (found,) = jax.vjp(lambda other: bound(other, kernel), other)[1](ct)
        return found, jnp.zeros_like(kernel), gradient(other, ct, zeros)

    product = jax.custom_vjp(lambda other, kernel, zeros: bound(other, kernel))
    product.defvjp(lambda *operands: (bound(*operands[:2]), operands), backward)
    return product(given[1 - side], *given[side])


def computed(step: Step, given: Sequence[Any], chunk: Chunk) -> list[Any]:
    """Returns the results of an equation for a chunk of rows, given its operands' parts."""
    e = step.equation
    if step.call is not None:
        return step.call(given, chunk)
    if e.name in _ON_DEVICES:
        return [*given]
    shape = chunk.shape(step.outs[0], e.made[0])
    params = dict(e.params)
    params |= dict.fromkeys(params.keys() & {"sharding", "out_sharding"})
    if e.name == "iota" and (labels := step.outs[0][d := params["dimension"]]):
        places = chunk.places(labels).astype(params["dtype"])
        return [jax.lax.broadcast_in_dim(places, shape, [d])]
    if e.name in ("broadcast_in_dim", "iota"):
        params["shape"] = shape
    elif e.name == "reshape":
        params["new_sizes"] = shape
    elif e.name == "slice":
        ends = zip(params["limit_indices"], step.ins[0], given[0].shape)
        params["limit_indices"] = tuple([n if rows else end for end, rows, n in ends])
    elif e.name in ("dynamic_slice", "gather"):
        sizes = zip(params["slice_sizes"], e.given[0], step.ins[0], given[0].shape)
        whole = [n if rows and one == all_ else one for one, all_, rows, n in sizes]
        params["slice_sizes"] = tuple(whole)
    given = [*given]
    for column, d in e.counts.items():
        if step.ins[0][params["dimension_numbers"].start_index_map[column]]:
            rows = jax.lax.broadcasted_iota(given[1].dtype, given[1].shape[:-1], d)
            given[1] = given[1].at[..., column].set(rows)

    def bind(*given: Any) -> list[Any]:
        if any(isinstance(x, Summed) for x in given):
            return [_multiplied(dataclasses.replace(e, params=params), given)]
        results = e.eqn.primitive.bind(*given, **e.eqn.primitive.get_bind_params(params))
        return list(results) if e.eqn.primitive.multiple_results else [results]

    if not (axes := chunk.sharing(step.words)):
        return bind(*given)
    (label,) = step.words
    dim = step.ins[0].index((label,))
    return combined(e.name, params, bind, given, axes, dim, chunk.firsts[label])


def spread_over(step: Step, rows: Rows, chunk: Chunk) -> Axes:
    """Returns the mesh axes over which gradients of an operand of these rows are added up."""
    if step.call is not None or not chunk.axes:
        return ()
    meets = frozenset[Label]().union(*map(words_of, (*step.ins, *step.outs)))
    return chunk.sharing(meets - words_of(rows))


def of_layout(found: Rows, wanted: Rows) -> Step:
    """Returns the step from a value to the same with other words whole, or in parts."""

    def call(given: Sequence[Any], chunk: Chunk) -> list[Any]:
        (x,) = given
        for dim, (own, to) in enumerate(zip(found, wanted)):
            for label in words_of([own]) ^ words_of([to]):
                axes = chunk.sharing([label])
                if own:
                    x = gathered(x, axes, dim)
                else:
                    x = part(x, axes, dim, chunk.firsts[label], chunk.sizes[label])
        return [x]

    return Step(Equation(None, LAYOUT, {}, (), ()), (found,), (wanted,), call=call)
