"""Norms in a program: x · (mean x² + eps)^-½ and its kind, however they are written.

Each value that derives from an array x gets a `Form`: a polynomial in x, the sums of x and of its
squares over an axis, roots of such sums, and vectors. One that has x and a root is a norm if it is
the definition's polynomial: scale and bias are the vectors in it. The two arrays that x is the sum
of belong to it, too.
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
from .algebra import ONE, ZERO, Polynomial, atom, computed, number
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
    size,
)
from .program import Equation, Program
from .sites import Left, Read, Site, at_ends, called


@dataclasses.dataclass(frozen=True)
class Vector:
    """w + b of an array w that lacks rows of x."""

    value: int
    dims: Dims
    b: float = 0.0


X, SUM, SQUARES = atom("x"), atom("sum", 1), atom("sum", 2)
"""An array, its sum over an axis, and that of its squares."""


def powers(m: Any, name: str) -> float:
    """Returns how many factors with this name a product of atoms has."""
    return sum([p for (n, _), p in m if n == name])


def moment(n: int, centred: bool) -> Polynomial:
    """Returns the mean of n squares, or their variance."""
    return ZERO.plus(SQUARES, 1 / n).plus(atom("sum", 1, 2), -centred / n**2)


@dataclasses.dataclass(frozen=True)
class Form:
    """A value made of an array x.

    Attributes:
      p: the polynomial, of `X`, `SUM`, `SQUARES`, powers of what these make, and Vectors.
      axis: what was summed over, perhaps split since: `along` has the parts.
      squares: the value that is the last sum of squares.
      rounded: the dtype that a norm was rounded to before it was multiplied by its scale.
    """

    x: int
    dims: Dims
    p: Polynomial = X
    axis: frozenset[Any] = frozenset()
    squares: int = -1
    rounded: Any = None

    @property
    def along(self) -> frozenset[Any]:
        return frozenset(atoms([self.axis]))

    def has(self, name: str) -> bool:
        return name in self.p.names

    @property
    def is_norm(self) -> bool:
        """Tells if it is x times a statistic, and perhaps more."""
        return self.p.names >= {"x", "power"}


@functools.lru_cache(maxsize=1024)  # layers are alike
def sum_of(p: Polynomial, n: int) -> Polynomial | None:
    """Returns the sum of a polynomial over n elements; None where x has a higher power."""
    total = ZERO
    for m, c in p.terms:
        k = powers(m, "x")
        rest = frozenset([factor for factor in m if factor[0][0] != "x"])
        term = Polynomial.of({rest: c}).times(atom("sum", k) if k else number(n))
        if term is None or k > 2:
            return None
        total = total.plus(term)
    return total


@functools.lru_cache(maxsize=1024)
def is_known(p: Polynomial, n: int) -> bool:
    """Tells if a polynomial may be a part of a norm over n elements, and no array of its own.

    It has one root, of squares, and one x at most, or is squares, sums, or x without its mean.
    """
    of_x = [powers(m, "x") for m, _ in p.terms]
    if "power" in p.names:
        roots = {a for m, _ in p.terms for a, _ in m if a[0] == "power"}
        inner = {a for _, t in roots for m, _ in t for a, _ in m}
        return len(roots) == 1 and sum(of_x) <= 1 and inner - {("sum", 1)} == {("sum", 2)}
    return max(of_x, default=0) in (0, 2) or p.stands_for(X.plus(SUM, -1 / n))


class Norms:
    """The Forms of a program's values."""

    def __init__(self, program: Program):
        self.program = program
        self.of: dict[int, Form] = {}

    def form(self, v: int) -> Form | None:
        """Returns a value's Form; of one that no rule knows, that it is an array of its own."""
        if v not in self.of:
            aval = self.program.avals[v]
            if not jnp.issubdtype(aval.dtype, jnp.floating) or not aval.shape or 0 in aval.shape:
                return None
            self.of[v] = Form(v, fresh(aval.shape))
        return self.of[v]

    def read(self, made: Equation) -> None:
        """Finds the Form of an equation's result."""
        found, (out,) = RULES[made.name](self, made, *map(self.form, made.ins)), made.outs
        if found is not None and shape_of(found.dims) == self.program.avals[out].shape:
            self.of[out] = found

    def made_of(self, v: int) -> tuple[int, ...]:
        """Returns the sum of squares that a norm is made of."""
        return (self.of[v].squares,)

    def as_of(self, one: Form, v: int, own: Form | None) -> Form | None:
        """Returns a value as a Form of the array that another is of; None where it is none."""
        if own is not None and own.x == one.x:
            return own
        if (found := self._factor(one, v)) is not None or one.p == X or not one.has("power"):
            return found
        made, name = self.program.made(v)
        # x · scale, by a statistic
        for u, factor in (made.ins, made.ins[::-1]) if name == "mul" else ():
            part, scale = self.form(u), self._factor(one, factor)
            if part is not None and part.x == one.x and scale is not None:
                p = part.p.times(scale.p)
                return p and replace(part, p=p)
        return None

    def _factor(self, one: Form, v: int) -> Form | None:
        """Returns a number, or a vector that lacks rows of a norm, as a Form of its array."""
        if (n := self.program.number(v)) is not None:
            return replace(one, p=number(n, self.program.slack(v)))
        if one.p == X or not one.has("power"):
            return None
        dims = meet(one.dims, self.of[one.x].dims)  # a statistic's are repeated to x's shape
        one = one if dims is None else replace(one, dims=dims)
        vector = self._vector_of(one, v)
        return vector and replace(one, p=atom("vector", vector))

    def _vector_of(self, norm: Form, other: int) -> Vector | None:
        """Returns what a norm is multiplied by or what is added to it; None if it has all rows."""
        shape, sizes = self.program.avals[other].shape, shape_of(norm.dims)
        if len(shape) != len(sizes) or any(n not in (1, m) for n, m in zip(shape, sizes)):
            return None
        found = self.vector(other, expanded(norm.dims))
        have, rows = set(atoms(found.dims)), set(atoms(norm.dims)) - norm.along
        if not have <= rows | norm.along or not norm.along <= have or rows and rows <= have:
            return None
        return found

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


def _joined(a: Form | None, b: Form | None) -> Form | None:
    """Returns what two Forms of one array have in common; None where they do not combine."""
    if a is None or b is None or a.x != b.x:
        return None
    if a.axis != b.axis and a.axis and b.axis and a.along != b.along:
        return None
    if (dims := meet(a.dims, b.dims)) is None:
        return None
    if dims != a.dims and len({*(labels := atoms(dims))}) < len(labels):  # x and its transpose
        return None
    axis, squares, rounded = a.axis or b.axis, max(a.squares, b.squares), a.rounded or b.rounded
    return replace(a, dims=dims, axis=axis, squares=squares, rounded=rounded)


def _elementwise(g: Norms, made: Equation, *forms: Form | None) -> Form | None:
    for i, one in enumerate(forms):
        pairs = enumerate(zip(made.ins, forms))
        every = [one if j == i else one and g.as_of(one, v, own) for j, (v, own) in pairs]
        common = every[0] and every[-1] and functools.reduce(_joined, every)
        p = common and computed(made.name, made.params.get("y"), *[f.p for f in every if f])
        n = size(common.axis) if common and common.axis else 1
        if common and p and (p == common.p or is_known(p, n)):
            return replace(common, p=p)
    return None


def _maximum(g: Norms, made: Equation, *forms: Form | None) -> Form | None:
    """A variance that must not be negative."""
    for one, other in zip(forms, made.ins[::-1]):
        if one is not None and g.program.number(other) == 0:
            n, (c, slack) = size(one.axis), one.p.coefficient(SQUARES)
            factor = number(c * n, slack / c) if c > 0 else ZERO
            return one if one.p.stands_for(moment(n, True).times(factor) or ZERO) else None
    return None


def _summed(a: Form, axes: Sequence[Any], value: int) -> Form | None:
    """Returns the sum of x, of squares, or of a statistic, over axes."""
    places = {*map(int, axes)}
    axis = frozenset(atoms([a.dims[i] for i in places]))
    dims = tuple([d for i, d in enumerate(a.dims) if i not in places])
    if not axis or any([l.free for l in axis]) or a.has("power") or a.axis and a.along != axis:
        return None
    if (total := sum_of(a.p, size(axis))) is None:
        return None
    squares = value if total.coefficient(SQUARES)[0] else a.squares
    return replace(a, p=total, axis=axis, dims=dims, squares=squares)


def _dot(g: Norms, made: Equation, a: Form | None, b: Form | None) -> Form | None:
    """Σ x², as a product of x with itself; a scale, as a product that sums over nothing."""
    contract, batch = made.params["dimension_numbers"]
    if not contract[0]:
        return _scaled_by_product(g, made, batch, a, b)
    if a is None or b is None or a.x != b.x or contract[0] != contract[1] or batch[0] != batch[1]:
        return None
    order = *batch[0], *contract[0]
    common, p = _joined(a, b), a.p.times(b.p)
    if common is None or p is None or len(order) != len(a.dims):
        return None
    dims = tuple([common.dims[i] for i in order])
    return _summed(replace(common, p=p, dims=dims), range(len(batch[0]), len(order)), made.outs[0])


def _scaled_by_product(g: Norms, made: Equation, batch: Any, *forms: Form | None) -> Form | None:
    """MaxText's `einsum("...k,k->...k", norm, scale)`."""
    for i, norm in enumerate(forms):
        if norm is None or not norm.is_norm or norm.has("vector"):
            continue
        if g.program.avals[made.ins[1 - i]].ndim != len(batch[i]):
            continue
        order = sorted(range(len(batch[i])), key=lambda j: batch[1 - i][j])  # of the vector's
        vector = g.vector(made.ins[1 - i], tuple(norm.dims[batch[i][j]] for j in order))
        p = norm.p.times(atom("vector", vector))
        if p is not None and set(atoms(vector.dims)) == norm.along:
            rest = [d for j, d in enumerate(norm.dims) if j not in batch[i]]
            return replace(norm, p=p, dims=(*[norm.dims[j] for j in batch[i]], *rest))
    return None


def _layout(g: Norms, made: Equation, a: Form | None, *_: Any) -> Form | None:
    given, out = g.program.avals[made.ins[0]], g.program.avals[made.outs[0]]
    if a is None or (dims := moved(made, a.dims, given.shape, out.shape)) is None:
        return None
    repeats = made.name == "broadcast_in_dim" and any([l.free for l in atoms(dims)])
    return None if repeats and a.has("x") else replace(a, dims=dims)


def _convert(g: Norms, made: Equation, a: Form | None) -> Form | None:
    given, to = (g.program.avals[v].dtype for v in (made.ins[0], made.outs[0]))
    if a is None or jnp.finfo(to).bits > jnp.finfo(given).bits or to == given:
        return a  # the same values
    if a.is_norm:
        return a if a.has("vector") else replace(a, rounded=to)
    return None if a.has("x") else a  # rounded, it is another array


LAYOUT = (*MOVED, "copy", "pcast", "pvary")
RULES: dict[str, Any] = {
    # A statistic that remat may keep; other values that it may keep are arrays of their own.
    "name": lambda g, made, a: None if a is None or a.has("x") else a,
    "max": _maximum,
    "dot_general": _dot,
    "convert_element_type": _convert,
    "reduce_sum": lambda g, made, a: a and _summed(a, made.params["axes"], made.outs[0]),
}
RULES |= dict.fromkeys(LAYOUT, _layout)
RULES |= dict.fromkeys(
    "add add_any div integer_pow mul neg pow rsqrt sqrt square sub".split(), _elementwise
)


# ---------------------------------------------------------------- sites

RESIDUAL = ", with a residual"  # in what the report says of a norm


@dataclasses.dataclass(frozen=True)
class Norm:
    """(x · (mean of its squares + eps)^-½) · scale + bias, of x less its mean where `centred`.

    Attributes:
      rounds: it is rounded before it is multiplied by its scale.
    """

    eps: float
    centred: bool
    scale: Vector | None
    bias: Vector | None
    rounds: bool = False


def norm_of(form: Form) -> Norm:
    """Returns the norm whose definition has a Form's polynomial.

    Raises:
      Left: where there is none.
    """
    n, terms = size(form.axis), form.p.terms
    ((with_x, (c, slack)),) = [(m, c) for m, c in terms if powers(m, "x")]
    factors = {name: (of, p) for (name, of), p in with_x}
    (inner, power), (scale, _) = factors["power"], factors.get("vector", (None, 1))
    alone = [of for m, _ in terms if len(m) == 1 for (name, of), _ in m if name == "vector"]
    bias = alone[0] if alone else None
    if power != -0.5:
        raise Left(f"it is multiplied by the power {power:g} of a sum of squares")
    if c <= 0:
        raise Left("it is multiplied by a negative number")
    # c · x · s^-½ is x · (s / c²)^-½.
    statistic: Any = Polynomial(inner).times(number(1 / c / c, 2 * slack / c))
    (squares, _), (eps, _) = map(statistic.coefficient, (SQUARES, ONE))
    centred = any(powers(m, "sum") == 2 for m, _ in inner)
    if not statistic.stands_for(moment(n, centred).plus(number(eps))):
        raise Left(f"{squares * n:g} times the mean of squares")
    if eps < 0:
        raise Left("a negative eps")
    root = Polynomial.of({frozenset([(("power", inner), power)]): (c, slack)})
    y: Any = (X.plus(SUM, -1 / n) if centred else X).times(root)
    y = y if scale is None else y.times(atom("vector", scale))
    if not form.p.stands_for(y if bias is None else y.plus(atom("vector", bias))):
        raise Left("its mean and that of its squares are not of one array")
    return Norm(eps, centred, scale, bias)


def _computed(
    norms: Norms, value: int, norm: Norm, added: Sequence[int], rows: Any, examples: int, read: Read
) -> Sequence[Any]:
    """Returns a norm, with the addition before it where there is one, by one of our operations.

    Args:
      norms, value, norm: what is computed.
      added: its operands, one or the two that are added; all have x's labels.
      rows: the labels of the dimensions that x is arranged to, before those of its features.
      examples: how many leading dimensions scale and shift differ along.
      read: reads a value.
    """
    g, form = norms.program, norms.of[value]
    x_dims = norms.of[form.x].dims
    features = tuple(l for l in atoms(x_dims) if l in form.along)
    aval, to = g.avals[value], (*rows, features)

    def vector(own: Vector | None, offset: float) -> Any:
        if own is None:
            return None
        w = arrange(read(own.value), own.dims, [*rows[:examples], features])
        w = jnp.expand_dims(w, range(examples, len(rows))) if examples else w
        # They computed it in float32 or wider.
        return w.astype(jnp.promote_types(w.dtype, jnp.float32)) + offset if offset else w

    x, *residual = [arrange(read(v), x_dims, to) for v in added]
    options: dict[str, Any] = {"eps": norm.eps, "dtype": aval.dtype}
    options["scale_offset"] = norm.scale.b if norm.scale is not None else 0.0
    if norm.rounds:
        options["cast"] = "before"
    if residual:
        options["residual"] = residual[0]
    vectors = vector(norm.scale, 0.0), vector(norm.bias, norm.bias.b if norm.bias else 0.0)
    results = called(layer_norm if norm.centred else rms_norm, x, *vectors, **options)
    y, *h = results if residual else [results]
    outs = arrange(y, to, form.dims), *[arrange(each, to, x_dims) for each in h]
    return [y.astype(g.avals[v].dtype) for y, v in zip(outs, (value, form.x))]


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
    g, form = norms.program, norms.of[value]
    norm, x_aval, aval = norm_of(form), g.avals[form.x], g.avals[value]
    n = size(form.axis)
    have, labels = atoms(form.dims), atoms(norms.of[form.x].dims)
    if {*have} != {*labels} or len(have) != len(labels):
        raise Left("its result is not laid out as x")
    if not form.along <= {*labels}:
        raise Left("its axis is no axis of x")
    if x_aval.dtype == jnp.float64 != aval.dtype:
        raise Left("float64 is rounded")
    vectors = [v for v in (norm.scale, norm.bias) if v is not None]
    rows, examples = _rows_of(form, vectors)
    if form.rounded is not None and norm.scale is not None:
        if form.rounded != aval.dtype:
            raise Left("it is rounded before its scale, to another dtype than its result's")
        norm = replace(norm, rounds=not (norm.centred or norm.bias or examples))
    added = (form.x,) if form.x in taken else _added(g, form.x)
    outs = (value,) if len(added) == 1 else (value, form.x)
    name = "layer_norm" if norm.centred else "rms_norm"
    owner = ", with examples" if examples else ""
    count = math.prod(x_aval.shape) // n
    return Site(
        outs=outs,
        reads=tuple(dict.fromkeys([*added, *[v.value for v in vectors]])),
        dead=(form.squares,),
        what=f"norm {count} x {n}, {x_aval.dtype.name}",
        served=f"{name}{RESIDUAL if added[1:] else ''}{owner}",
        compute=functools.partial(_computed, norms, value, norm, added, rows, examples),
    )


def _rows_of(form: Form, vectors: Sequence[Vector]) -> tuple[list[Labels], int]:
    """Returns the labels of a norm's rows, and how many of them are examples.

    Scale and shift differ between examples, which come first, and not between the rows of one.
    """
    rows = [tuple(l for l in d if l not in form.along) for d in expanded(form.dims)]
    rows, own = [r for r in rows if r], {frozenset(atoms(v.dims)) - form.along for v in vectors}
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

    chains = {v: form.x for v, form in norms.of.items() if form.p != X and form.is_norm}
    yield from at_ends(norms.program, chains, site, wanted)
    for made in norms.program.equations:
        if made.eqn.primitive is op.forward.primitive and made.ins[0] not in taken:
            if (one := joined(norms.program, made)) is not None:
                taken.update(one.outs)
                yield one
