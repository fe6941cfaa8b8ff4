"""Norms in a program: x · (mean x² + eps)^-½ and its kind, however they are written.

Each value that derives from an array x gets a `Part`: x itself, its squares, sums of either over an
axis, a power of such a sum, x times such a power. One rule for each primitive computes a result's
Part from those of its operands. What ends as x times the power -½ of the mean of its squares (of x
without its mean) is a norm; vectors that it is multiplied by, and that are added, belong to it, as
do the two arrays that x is the sum of.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ...native.dtypes import NARROW
from ..norm import layer_norm, op, rms_norm
from .constants import ARITHMETIC
from .labels import (
    MOVED,
    Dims,
    Labels,
    arrange,
    atoms,
    expanded,
    fresh,
    meet,
    moved,
    peel,
    shape_of,
)
from .program import Equation, Program
from .sites import Left, Read, Site, at_ends, called


@dataclasses.dataclass(frozen=True)
class Vector:
    """w + b of an array w that lacks rows of x."""

    value: int
    dims: Dims
    b: float = 0.0


@dataclasses.dataclass(frozen=True)
class Part:
    """A value made of an array x.

    Attributes:
      kind: "x"; "square" of it; "sum" of it; "square of sum"; "stat", (a · Σ x² + b)^p; "norm", x
        times a stat; "line", (a · x + b · mean) times a stat.
      centred: x is without its mean, or the squares are.
      axis: what was summed over, perhaps split since: `along` has the parts.
      slack: how far a may be from the number that the program's constants stand for, relative.
      stat: of a norm or a line.
      scale, bias: of a norm or a line; a stat may be multiplied by a scale first.
      rounded: the dtype that a norm was rounded to before it was multiplied by its scale.
    """

    x: int
    dims: Dims
    kind: str = "x"
    centred: bool = False
    axis: frozenset[Any] = frozenset()
    a: float = 1.0
    b: float = 0.0
    p: float = 1.0
    slack: float = 0.0
    stat: "Part | None" = None
    scale: Vector | None = None
    bias: Vector | None = None
    rounded: Any = None
    value: int = -1  # the sum behind a stat

    @property
    def along(self) -> frozenset[Any]:
        return frozenset(atoms([self.axis]))


class Norms:
    """The Parts of a program's values."""

    def __init__(self, program: Program):
        self.program = program
        self.of: dict[int, Part] = {}

    def part(self, v: int) -> Part | None:
        """Returns a value's Part; of one that no rule knows, that it is an array of its own."""
        if v not in self.of:
            aval = self.program.avals[v]
            if not jnp.issubdtype(aval.dtype, jnp.floating) or not aval.shape or not aval.size:
                return None
            self.of[v] = Part(v, fresh(aval.shape))
        return self.of[v]

    def read(self, made: Equation) -> None:
        """Finds the Part of an equation's result."""
        found, (out,) = RULES[made.name](self, made, *map(self.part, made.ins)), made.outs
        if found is not None and shape_of(found.dims) == self.program.avals[out].shape:
            self.of[out] = found

    def made_of(self, v: int) -> tuple[int, ...]:
        """Returns the sum of squares that a norm is made of."""
        stat = self.of[v].stat
        return () if stat is None else (stat.value,)

    def vector(self, v: int, dims: Dims) -> Vector:
        """Returns an array as w + b, with w as far back as it is only laid out anew."""
        g, b = self.program, 0.0

        def behind(v: int, made: Equation) -> int | None:
            nonlocal b
            if made.name != "add":
                floats = jnp.issubdtype(g.avals[made.ins[0]].dtype, jnp.floating)
                return made.ins[0] if floats else None
            if g.avals[v].dtype.itemsize < 4:  # 1 + w is rounded to bfloat16 there
                return None
            for w, other in (made.ins, made.ins[::-1]):
                n = g.number(other)
                if n is not None and g.number(w) is None and g.avals[w].shape == g.avals[v].shape:
                    b += n
                    return w
            return None

        v, dims = peel(g, v, dims, behind, "add")
        return Vector(v, dims, b)


# ---------------------------------------------------------------- one rule for each primitive


def _same(a: Part, b: Part) -> bool:
    return (
        a.x == b.x
        and a.kind == b.kind == "x"
        and a.centred == b.centred
        and a.along == b.along
        and meet(a.dims, b.dims) == expanded(a.dims)
    )


def _mul(g: Norms, made: Equation, a: Part | None, b: Part | None) -> Part | None:
    for one, other in (a, made.ins[1]), (b, made.ins[0]):
        if one is not None and (n := g.program.number(other)) is not None:
            return _times(one, n, g.program.slack(other))
    if a is None or b is None:
        return None
    if a == b or _same(a, b):
        return _squared(a)
    if (norm := _normalised(g, a, b) or _normalised(g, b, a)) is not None:
        return norm  # x of one row could be a scale of its statistic, too
    for one, two, other in (a, b, made.ins[1]), (b, a, made.ins[0]):
        if (scaled := _scaled(g, one, other) or _regrouped(g, one, two)) is not None:
            return scaled
    return None


def _regrouped(g: Norms, one: Part, two: Part) -> Part | None:
    """one · (p · q) as (one · p) · q, where one and p are x and its stat: q is the scale, or x."""
    made = g.program.maker.get(two.x)
    if two.kind != "x" or two.centred or made is None or made.name != "mul":
        return None
    if expanded(two.dims) != expanded(g.of[two.x].dims):
        return None  # laid out anew
    for v, other in (made.ins, made.ins[::-1]):
        p = g.part(v)
        norm = p and (_normalised(g, one, p) or _normalised(g, p, one))
        if norm is not None and (scaled := _scaled(g, norm, other)) is not None:
            return scaled
    return None


def _scaled(g: Norms, norm: Part, other: int) -> Part | None:
    """A norm, or the statistic or a line that becomes one, times a number or a vector."""
    is_one = norm.kind in ("norm", "line") or norm.kind == "stat" and norm.p < 0
    if not is_one or norm.scale is not None or norm.bias is not None:
        return None
    if (n := g.program.number(other)) is not None:
        return _times(norm, n, g.program.slack(other))
    if norm.kind != "norm":  # repeated to x's shape, by the time a vector is multiplied by it
        dims = meet(norm.dims, g.of[norm.x].dims)
        norm = replace(norm, dims=norm.dims if dims is None else dims)
    vector = _vector_of(g, norm, other)
    return vector and replace(norm, scale=vector)


def _squared(a: Part) -> Part | None:
    if a.kind == "sum":
        return replace(a, kind="square of sum", a=a.a * a.a, slack=2 * a.slack)
    return replace(a, kind="square") if a.kind == "x" else None


def _vector_of(g: Norms, norm: Part, other: int) -> Vector | None:
    """An array that a norm is multiplied by or that is added to it; None if it has all rows."""
    shape, sizes = g.program.avals[other].shape, shape_of(norm.dims)
    if len(shape) != len(sizes) or any(n not in (1, m) for n, m in zip(shape, sizes)):
        return None
    found = g.vector(other, expanded(norm.dims))
    have, rows = set(atoms(found.dims)), set(atoms(norm.dims)) - norm.along
    if not have <= rows | norm.along or not norm.along <= have or rows and rows <= have:
        return None
    return found


def _times(a: Part, n: float, slack: float) -> Part | None:
    """Returns a · n, for a constant n with a `Program.slack`."""
    if n == 1:
        return a
    if not math.isfinite(n) or n <= 0:
        return None
    if a.kind == "norm" and a.bias is None and a.stat:
        return (stat := _times(a.stat, n, slack)) and replace(a, stat=stat)
    if a.kind not in ("sum", "square of sum", "square", "stat") or abs(a.p) not in (0.5, 1):
        return None
    inner = n ** (1 / a.p)  # n · s^p is (n^(1/p) · s)^p
    return replace(a, a=a.a * inner, b=a.b * inner, slack=a.slack + slack / abs(a.p))


def _normalised(g: Norms, x: Part, stat: Part) -> Part | None:
    """x, or its mean, times a power of the sum of its squares, which a scale may be in."""
    if stat.kind != "stat" or x.x != stat.x or stat.p >= 0:
        return None
    if x.kind == "sum" or x.kind == "x" and stat.centred and not x.centred:
        return _line(g, x, stat)
    if x.kind != "x" or x.centred != stat.centred:
        return None
    if x.centred and x.along != stat.along:
        return None
    dims = meet(x.dims, stat.dims)
    if dims is None or dims != expanded(x.dims):
        return None
    alone = replace(stat, scale=None)
    return replace(x, kind="norm", stat=alone, axis=stat.axis, dims=dims, scale=stat.scale)


# ---------------------------------------------------------------- lines
# Keras writes x·r·γ + (β − mean·r·γ), with r the root of 1 / (variance + eps): a sum of two lines.


def _line(g: Norms, x: Part, stat: Part) -> Part | None:
    """x or ± its mean over the axis of the variance, times the statistic."""
    n = math.prod(l.size for l in x.axis)
    if not stat.centred or x.kind == "sum" and not _is_one(abs(x.a) * n, x.slack):
        return None
    if x.kind == "sum" and x.along != stat.along:
        return None
    dims = meet(x.dims, stat.dims)
    if dims is None or meet(dims, g.of[x.x].dims) is None:
        return None
    a, b = (0.0, math.copysign(1.0, x.a)) if x.kind == "sum" else (1.0, 0.0)
    found = Part(x.x, dims, "line", True, stat.axis, a, b, scale=stat.scale)
    return replace(found, stat=replace(stat, scale=None))


def _sum_of_lines(g: Norms, one: Part | None, two: Part | None) -> Part | None:
    """A norm, where the mean is subtracted from x; one of the two may have the bias."""
    if one is None or two is None or one.kind != "line" or two.kind != "line":
        return None
    assert one.stat is not None and two.stat is not None
    bias, same = one.bias or two.bias, replace(two.stat, dims=one.stat.dims) == one.stat
    if not same or one.scale != two.scale or one.bias and two.bias:
        return None
    a, b, dims = one.a + two.a, one.b + two.b, meet(one.dims, two.dims)
    if (a, b) != (1, -1) or dims is None or meet(dims, g.of[one.x].dims) != dims:
        return None
    return replace(one, kind="norm", a=1.0, b=0.0, dims=dims, bias=bias)


def _neg(g: Norms, made: Equation, a: Part | None) -> Part | None:
    if a is None or a.kind not in ("sum", "line") or a.bias is not None:
        return None
    return replace(a, a=-a.a, b=-a.b)


def _div(g: Norms, made: Equation, a: Part | None, b: Part | None) -> Part | None:
    n = g.program.number(made.ins[1])
    if n is not None:
        return _times(a, 1 / n, g.program.slack(made.ins[1])) if a is not None and n else None
    if b is None or b.kind != "stat" or b.p <= 0:
        return None
    inverse = replace(b, p=-b.p)
    if (n := g.program.number(made.ins[0])) is not None:
        return _times(inverse, n, g.program.slack(made.ins[0]))
    return a and (_normalised(g, a, inverse) or _regrouped(g, inverse, a))


def _add(g: Norms, made: Equation, a: Part | None, b: Part | None) -> Part | None:
    if (norm := _sum_of_lines(g, a, b)) is not None:
        return norm
    for one, other in ((a, made.ins[1]), (b, made.ins[0])):
        if one is None:
            continue
        n = g.program.number(other)
        if n is not None:
            if n == 0:
                return one
            inner = one.kind == "square" or one.kind == "stat" and one.p == 1
            return replace(one, b=one.b + n) if inner else None
        if one.kind in ("norm", "line") and one.bias is None:
            return (bias := _vector_of(g, one, other)) and replace(one, bias=bias)
    return None


def _sub(g: Norms, made: Equation, a: Part | None, b: Part | None) -> Part | None:
    if a is not None and g.program.number(made.ins[1]) == 0:
        return a
    if b is not None and b.kind == "line" and b.bias is None:  # of a bias, or of x's line
        less = replace(b, a=-b.a, b=-b.b)
        bias = _vector_of(g, less, made.ins[0])
        return _sum_of_lines(g, a, less) or bias and replace(less, bias=bias)
    if a is None or b is None or a.x != b.x:
        return None
    n = math.prod(l.size for l in b.axis)
    if a.kind == "x" and not a.centred and b.kind == "sum" and _is_one(b.a * n, b.slack):
        if meet(a.dims, b.dims) == expanded(a.dims):
            return replace(a, centred=True, axis=b.axis)
    if a.kind == "stat" and b.kind == "square of sum" and not a.centred and a.along == b.along:
        means = _is_one(a.a * n, a.slack) and _is_one(b.a * n * n, b.slack)
        if a.p == 1 and a.b == 0 and means:
            dims = meet(a.dims, b.dims)
            return None if dims is None else replace(a, centred=True, dims=dims)
    return None


def _is_one(a: float, slack: float) -> bool:
    """Tells if a product of the program's constants stands for 1."""
    return abs(a - 1) <= slack + ARITHMETIC


_POWERS = {"square": 2, "sqrt": 0.5, "rsqrt": -0.5}


def _power(g: Norms, made: Equation, a: Part | None, *_: Any) -> Part | None:
    y = made.params.get("y", _POWERS.get(made.name))
    if made.name == "pow":
        y = g.program.number(made.ins[1])
    if a is None or y is None:
        return None
    if a.scale is not None:
        return None
    if a.kind == "stat":  # √s squared is |s|, and its derivative at 0 is NaN
        return replace(a, p=a.p * y) if a.p == 1 or a.p * y != 1 else None
    return _squared(a) if y == 2 else None


def _maximum(g: Norms, made: Equation, a: Part | None, b: Part | None) -> Part | None:
    """A variance that must not be negative."""
    for one, other in ((a, made.ins[1]), (b, made.ins[0])):
        if one is not None and one.kind == "stat" and one.centred and one.b == 0 and one.p == 1:
            if g.program.number(other) == 0:
                return one
    return None


def _sum(g: Norms, made: Equation, a: Part | None) -> Part | None:
    if a is None or a.kind not in ("x", "square"):
        return None
    axes = tuple(map(int, made.params["axes"]))
    axis = frozenset(atoms([a.dims[i] for i in axes]))
    dims = tuple([d for i, d in enumerate(a.dims) if i not in axes])
    if not axis or any([l.free for l in axis]):
        return None
    if a.kind == "x":
        return None if a.centred else replace(a, kind="sum", axis=axis, dims=dims)
    if a.centred and a.along != axis:
        return None
    b = a.b * math.prod(l.size for l in axis)  # eps within the sum
    return replace(a, kind="stat", axis=axis, dims=dims, b=b, value=made.outs[0])


def _dot(g: Norms, made: Equation, a: Part | None, b: Part | None) -> Part | None:
    """Σ x², as a product of x with itself; a scale, as a product that sums over nothing."""
    contract, batch = made.params["dimension_numbers"]
    if not contract[0]:
        return _scaled_by_product(g, made, batch, a, b)
    if a is None or b is None or not _same(a, b):
        return None
    if contract[0] != contract[1] or batch[0] != batch[1]:
        return None
    if len(contract[0]) + len(batch[0]) != len(a.dims):
        return None
    axis = frozenset(atoms(a.dims[i] for i in contract[0]))
    if not axis or a.centred and a.along != axis:
        return None
    dims = tuple(a.dims[i] for i in batch[0])
    return replace(a, kind="stat", axis=axis, dims=dims, value=made.outs[0])


def _scaled_by_product(g: Norms, made: Equation, batch: Any, *parts: Part | None) -> Part | None:
    """MaxText's `einsum("...k,k->...k", norm, scale)`."""
    for i, norm in enumerate(parts):
        if norm is None or norm.kind != "norm" or norm.scale is not None or norm.bias is not None:
            continue
        if g.program.avals[made.ins[1 - i]].ndim != len(batch[i]):
            continue
        order = sorted(range(len(batch[i])), key=lambda j: batch[1 - i][j])  # of the vector's
        vector = g.vector(made.ins[1 - i], tuple(norm.dims[batch[i][j]] for j in order))
        if set(atoms(vector.dims)) == norm.along:
            rest = [d for j, d in enumerate(norm.dims) if j not in batch[i]]
            return replace(norm, scale=vector, dims=(*[norm.dims[j] for j in batch[i]], *rest))
    return None


def _layout(g: Norms, made: Equation, a: Part | None, *_: Any) -> Part | None:
    if a is None:
        return None
    given, out = g.program.avals[made.ins[0]], g.program.avals[made.outs[0]]
    dims = moved(made, a.dims, given.shape, out.shape)
    if dims is None or a.kind in ("x", "norm") and any([l.free for l in atoms(dims)]):
        return None
    return replace(a, dims=dims)


def _convert(g: Norms, made: Equation, a: Part | None) -> Part | None:
    if a is None:
        return None
    given, to = (g.program.avals[v].dtype for v in (made.ins[0], made.outs[0]))
    if not jnp.issubdtype(given, jnp.floating):
        return None
    if jnp.finfo(to).bits > jnp.finfo(given).bits or to == given:
        return a  # the same values
    if a.kind == "norm":
        return replace(a, rounded=to) if a.scale is None and a.bias is None else a
    return None if a.kind in ("x", "square") else a  # rounded, it is another array


def _named(g: Norms, made: Equation, a: Part | None) -> Part | None:
    """A statistic that remat may keep; other values that it may keep are arrays of their own."""
    return a if a is not None and a.kind in ("sum", "stat", "square of sum") else None


RULES: dict[str, Any] = {
    "name": _named,
    "max": _maximum,
    "dot_general": _dot,
    "convert_element_type": _convert,
}
RULES |= {"mul": _mul, "div": _div, "add": _add, "add_any": _add, "sub": _sub, "reduce_sum": _sum}
RULES["neg"] = _neg
RULES |= dict.fromkeys(("integer_pow", "pow", "square", "sqrt", "rsqrt"), _power)
LAYOUT = (*MOVED, "copy", "pcast", "pvary")
RULES |= dict.fromkeys(LAYOUT, _layout)


# ---------------------------------------------------------------- sites

RESIDUAL = ", with a residual"  # in what the report says of a norm


def _computed(
    norms: Norms, value: int, part: Part, added: Sequence[int], rows: Any, examples: int, read: Read
) -> Sequence[Any]:
    """Returns a norm, with the addition before it where there is one, by one of our operations.

    Args:
      norms, value, part: what is computed.
      added: its operands, one or the two that are added; all have x's labels.
      rows: the labels of the dimensions that x is arranged to, before those of its features.
      examples: how many leading dimensions scale and shift differ along.
      read: reads a value.
    """
    g, x_dims = norms.program, norms.of[part.x].dims
    features = tuple(l for l in atoms(x_dims) if l in part.along)
    aval, to = g.avals[value], (*rows, features)

    def vector(own: Vector | None, offset: float) -> Any:
        if own is None:
            return None
        w = arrange(read(own.value), own.dims, [*rows[:examples], features])
        w = jnp.expand_dims(w, range(examples, len(rows))) if examples else w
        # They computed it in float32 or wider.
        return w.astype(jnp.promote_types(w.dtype, jnp.float32)) + offset if offset else w

    x, *residual = [arrange(read(v), x_dims, to) for v in added]
    options: dict[str, Any] = {"eps": part.stat.b, "dtype": aval.dtype} if part.stat else {}
    options["scale_offset"] = part.scale.b if part.scale is not None else 0.0
    if part.rounded is not None and part.scale is not None and not part.centred:
        options["cast"] = "before"
    if residual:
        options["residual"] = residual[0]
    vectors = vector(part.scale, 0.0), vector(part.bias, part.bias.b if part.bias else 0.0)
    results = called(layer_norm if part.centred else rms_norm, x, *vectors, **options)
    y, *h = results if residual else [results]
    outs = arrange(y, to, part.dims), *[arrange(each, to, x_dims) for each in h]
    return [y.astype(g.avals[v].dtype) for y, v in zip(outs, (value, part.x))]


def joined(g: Program, made: Equation) -> Site | None:
    """Returns what computes a norm of ours and the addition before it; None without one."""
    spec, operands = made.params["spec"], made.params["tree"].unflatten(made.ins)
    x, residual, *parameters = operands
    if residual is not None or spec.heads or len(added := _added(g, x)) == 1:
        return None
    aval = g.avals[x]
    n = math.prod(aval.shape[a] for a in spec.axes)
    every = *added, *parameters
    reads = tuple([v for v in every if v is not None])

    def compute(read: Read) -> Sequence[Any]:
        arrays = [None if v is None else read(v) for v in every]
        y, h, *statistics = op.forward(spec, *arrays, order=made.params["order"])
        return [y, *[a for a in statistics if a is not None], h]

    what = f"norm {aval.size // max(n, 1)} x {n}, {aval.dtype.name}"
    return Site((*made.outs, x), reads, what, f"{spec.op}{RESIDUAL}", compute=compute)


def site_of(norms: Norms, value: int, taken: set[int]) -> Site:
    """Returns what computes a norm's result, with the sum before it unless that is `taken`.

    Raises:
      Left: where it has to stay as it is, with the reason.
    """
    g, part = norms.program, norms.of[value]
    stat, x_aval, aval = part.stat, g.avals[part.x], g.avals[value]
    assert stat is not None
    n = math.prod(l.size for l in part.along)
    _check_statistic(stat, n)
    _check_layout(part, atoms(norms.of[part.x].dims))
    if x_aval.dtype == jnp.float64 != aval.dtype:
        raise Left("float64 is rounded")
    vectors = [v for v in (part.scale, part.bias) if v is not None]
    rows, examples = _rows_of(part, vectors)
    if part.rounded is not None and part.scale is not None:
        if part.rounded != aval.dtype:
            raise Left("it is rounded before its scale, to another dtype than its result's")
        if part.centred or part.bias is not None or examples:
            part = replace(part, rounded=None)
    added = (part.x,) if part.x in taken else _added(g, part.x)
    outs = (value,) if len(added) == 1 else (value, part.x)
    name = "layer_norm" if part.centred else "rms_norm"
    owner = ", with examples" if examples else ""
    count = math.prod(x_aval.shape) // n
    return Site(
        outs=outs,
        reads=tuple(dict.fromkeys([*added, *[v.value for v in vectors]])),
        dead=(stat.value,),
        what=f"norm {count} x {n}, {x_aval.dtype.name}",
        served=f"{name}{RESIDUAL if added[1:] else ''}{owner}",
        compute=functools.partial(_computed, norms, value, part, added, rows, examples),
    )


def _check_statistic(stat: Part, n: int) -> None:
    """Raises Left unless a statistic is (mean of n squares + eps)^-½."""
    if stat.p != -0.5:
        raise Left(f"it is multiplied by the power {stat.p:g} of a sum of squares")
    if not _is_one(stat.a * n, stat.slack):
        raise Left(f"{stat.a * n:g} times the mean of squares")
    if stat.b < 0:
        raise Left("a negative eps")


def _check_layout(part: Part, labels: Labels) -> None:
    """Raises Left unless a norm has each label of x once, those that it is over among them."""
    have = atoms(part.dims)
    if {*have} != {*labels} or len(have) != len(labels):
        raise Left("its result is not laid out as x")
    if not part.along <= {*labels}:
        raise Left("its axis is no axis of x")


def _rows_of(part: Part, vectors: Sequence[Vector]) -> tuple[list[Labels], int]:
    """Returns the labels of a norm's rows, and how many of them are examples.

    Scale and shift differ between examples, which come first, and not between the rows of one.
    """
    rows = [tuple(l for l in d if l not in part.along) for d in expanded(part.dims)]
    rows, own = [r for r in rows if r], {frozenset(atoms(v.dims)) - part.along for v in vectors}
    if not any(own):
        return rows, 0
    if len(own) > 1:
        raise Left("its scale and its shift differ along different dimensions")
    (which,), split = own, [l for r in rows for l in r]
    examples = len(which)
    if {*split[:examples]} != which or examples == len(split):
        raise Left("its scale differs along dimensions that are not the first")
    return [(l,) for l in split], examples


def _added(g: Program, x: int) -> tuple[int, ...]:
    """The two arrays that x is the sum of, or x itself."""
    made = g.maker.get(x)
    if made is None or made.name not in ("add", "add_any"):
        return (x,)
    aval, kinds = g.avals[x], [(g.avals[v].shape, g.avals[v].dtype) for v in made.ins]
    numbers = any(g.number(v) is not None for v in made.ins)
    if {*kinds} != {(aval.shape, aval.dtype)} or numbers or aval.dtype == jnp.float64:
        return (x,)
    a, b = made.ins
    # Kernels widen what they read. The sum's dtype is that of the other operand.
    narrow = _narrow(g, a)
    return (narrow, b) if narrow != a else (a, _narrow(g, b))


def _narrow(g: Program, v: int) -> int:
    """The bfloat16 or float16 array that a sum alone reads widened, or the operand itself."""
    made = g.maker.get(v)
    if made is None or made.name != "convert_element_type" or v in g.results:
        return v
    is_narrow = g.avals[made.ins[0]].dtype.name in NARROW
    return made.ins[0] if is_narrow and len(g.readers[v]) == 1 else v


def found(norms: Norms) -> Iterator[Site | tuple[int, str]]:
    """Yields the sites of norms in a program; a value and the reason where one is left."""
    taken: set[int] = set()
    wanted: set[int] = set()

    def site(value: int) -> Site:
        made = norms.program.maker[value]
        if made.name in LAYOUT and norms.program.made(made.ins[0])[1] != "dot_general":
            raise Left  # it only lays a norm's result out anew
        site = site_of(norms, value, taken)
        taken.update(site.outs)
        wanted.update(site.reads)
        return site

    chains = {v: part.x for v, part in norms.of.items() if part.kind == "norm"}
    yield from at_ends(norms.program, chains, site, wanted)
    for made in norms.program.equations:
        if made.eqn.primitive is op.forward.primitive and made.ins[0] not in taken:
            if (one := joined(norms.program, made)) is not None:
                taken.update(one.outs)
                yield one
