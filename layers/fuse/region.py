"""Losses of large logits by the user's own equations, a chunk of rows at a time.

A region begins at wide products, the logits, and ends where values are no longer wide: a number for
each row, or a total. The equations between, and those of others that are as wide, are computed for
a chunk of rows after the other: with its gradients where one total alone is differentiated, else in
the backward once more.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import ad
from jax.sharding import PartitionSpec as P

from ...native.dtypes import NARROW
from ...native.implementation import Order
from ..core.derivative import tangents_of
from ..core.op import (
    Batching,
    Derivative,
    Dims,
    Op,
    Placement,
    Split,
    equally_varying,
    in_places,
    moves,
    vary,
    varying_axes,
)
from ..core.sharding import axes_of, without
from ..core.sharding import whole as split_by
from ..cross_entropy.chunks import CHUNK_BYTES, chunk_rows
from ..cross_entropy.linear import match_spec
from .labels import Label, Labels, expand
from .plan import Plan
from .rows import LAYOUT, Chunk, Rows, Summed, latest
from .words import words_of

_PARTS, _FEW = 8, 16  # chunks of rows, but not of fewer than these

# ---------------------------------------------------------------- regions


@dataclasses.dataclass(frozen=True)
class Part:
    """An array that counts rows: its rows are the first dimensions where a region takes it.

    Attributes:
      slot: where the plan keeps it.
      atoms: its labels, in the region's order.
    """

    slot: int
    rows: Rows
    aval: Any
    atoms: Labels

    def _dims(self, chunk: Chunk) -> tuple[list[int], list[int], tuple[int, ...]]:
        """Returns the sizes of all labels and other dimensions as they are laid out, their order
        with rows first, and the shape."""
        sizes: list[int] = []
        of_rows: dict[Label, int] = {}
        others: list[int] = []
        words = words_of(self.rows)
        for labels, n in zip(latest(self.rows), self.aval.shape):
            of_rows |= {l: len(sizes) + i for i, l in enumerate(labels) if l not in words}
            others += [] if {*labels} - words else [len(sizes)]
            sizes += [chunk.sizes[l] for l in labels] if labels else [n]
        return (
            sizes,
            [*[of_rows[l] for l in self.atoms], *others],
            chunk.shape(self.rows, self.aval.shape),
        )

    def first(self, x: Any, chunk: Chunk) -> Any:
        """Returns an array with its rows first."""
        sizes, order, _ = self._dims(chunk)
        return jnp.transpose(jnp.reshape(x, sizes), order)

    def back(self, x: Any, chunk: Chunk) -> Any:
        """Returns an array with rows first as it is laid out."""
        sizes, order, shape = self._dims(chunk)
        undo = sorted(range(len(order)), key=order.__getitem__)
        return jnp.reshape(jnp.transpose(x, undo), shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Equations that are computed for chunks of rows.

    Attributes:
      atoms: the labels of the rows.
      words: those of words, which devices may share.
      total: the end whose gradients are computed with the ends; None for none.
      summed: the slot of what chunks add up to it, and the steps from there: it is a multiple, by
        numbers that are known at run time, which may divide by 0.
      width: bytes of a row's logits.
    """

    plan: Plan
    atoms: Labels
    words: Labels
    reads: tuple[Part, ...]
    ends: tuple[Part, ...]
    total: int | None
    summed: tuple[Any, Sequence[tuple[Any, ...]]]
    width: int

    def __repr__(self) -> str:
        """Returns what names the region in every process, but for functions with own rules."""
        place = {l: i for i, l in enumerate(self.atoms + self.words)}
        of_rows = lambda every: [[[place[l] for l in expand(d)] for d in rows] for rows in every]
        steps = [
            (s.equation.name, str(s.equation.eqn), of_rows([*s.ins, *s.outs]), *slots)
            + ((id(s.call),) if s.call and s.equation.name != LAYOUT else ())
            for _, s, *slots in self.plan.order
        ]
        arrays = [(p.slot, of_rows([p.rows]), p.aval.str_short()) for p in self.reads + self.ends]
        sizes = [l.size for l in self.atoms + self.words]
        text = f"{sizes}{steps}{arrays}{self.plan.consts}{self.width}{self.total}{self.summed[0]}"
        return f"Region({hashlib.sha256(text.encode()).hexdigest()})"

    @property
    def whole(self) -> Chunk:
        """All rows."""
        every = self.atoms + self.words
        return Chunk({l: l.size for l in every}, dict.fromkeys(every, 0))

    @functools.cached_property
    def kernels(self) -> list[bool]:
        """Tells which operands are narrow, without rows, and multiplied alone."""
        slots = self.plan.multiplied()
        return [p.aval.dtype.name in NARROW and not p.atoms and p.slot in slots for p in self.reads]

    def run(self, chunk: Chunk, *operands: Any) -> tuple[list[Any], list[Any]]:
        """Returns the ends of a chunk, with rows first, as its operands are; and what they are of
        all rows, where a total is still to be multiplied."""
        back = lambda p, x: x if isinstance(x, Summed) else p.back(x, chunk)
        given = {p.slot: back(p, x) for p, x in zip(self.reads, operands, strict=True)}
        env = self.plan.run(given, chunk)
        ends = [p.first(env[p.slot], chunk) for p in self.ends]
        slot = self.summed[0]
        return ends, [env[slot] if slot and i == self.total else y for i, y in enumerate(ends)]

    def multiplied(self, total: Any, *operands: Any) -> Any:
        """Returns the total of all chunks as the end that it is."""
        slot, steps = self.summed
        given = {p.slot: x for p, x in zip(self.reads, operands) if not p.atoms}
        env = self.plan.run({slot: total, **given}, self.whole, steps)
        return env[self.ends[self.total or 0].slot]


# ---------------------------------------------------------------- operations


@dataclasses.dataclass(frozen=True)
class Spec:
    """A region, or its gradients: operations of its operands, these then of cotangents, too.

    The dimensions of an operation are numbered: those of vmaps, of rows, of words, then all others.

    Attributes:
      moved: the ends that have a derivative, or a cotangent.
      vmaps: for each vmap, the outermost first, which operands have its dimension.
      wanted: the operands whose gradients are wanted; None for the region itself.
      once: the gradients are those of the one end that is `moved`, and follow all ends.
    """

    region: Region
    moved: tuple[bool, ...]
    vmaps: tuple[tuple[bool, ...], ...] = ()
    wanted: tuple[bool, ...] | None = None
    once: bool = False
    op: str = "fuse"

    @property
    def rows(self) -> range:
        """The numbers of all dimensions of rows."""
        return range(len(self.vmaps) + len(self.region.atoms))

    @property
    def words(self) -> dict[Label, int]:
        """The numbers of all dimensions of words."""
        return dict(zip(self.region.words, itertools.count(len(self.rows))))

    def _select(self, reads: Sequence[Any], ends: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns what is told of the operands and of the results."""
        if self.wanted is None:
            return [*reads], [*ends]
        gradients = itertools.compress(reads, self.wanted)
        if self.once:
            return [*reads], [*ends, *gradients]
        return [*reads, *itertools.compress(ends, self.moved)], [*gradients]

    def arrays(self) -> tuple[list[Any], list[Any]]:
        """Returns (the numbers of rows, those of other dimensions) of operands and results.

        Dimensions that are of no words have no number, but None.
        """

        def numbered(part: Part, has: Sequence[bool]) -> tuple[tuple[int, ...], list[int | None]]:
            atoms = [len(self.vmaps) + self.region.atoms.index(l) for l in part.atoms]
            others = [
                self.words[labels[0]] if labels else None
                for labels in part.rows
                if not labels or words_of([labels])
            ]
            return (*itertools.compress(itertools.count(), has), *atoms), others

        has = [[of[i] for of in self.vmaps] for i in range(len(self.region.reads))]
        reads = [*map(numbered, self.region.reads, has)]
        return self._select(
            reads, [numbered(p, [True] * len(self.vmaps)) for p in self.region.ends]
        )

    def dtypes(self) -> list[Any]:
        """Returns the dtypes of the results."""
        of = lambda parts: [p.aval.dtype for p in parts]
        return self._select(of(self.region.reads), of(self.region.ends))[1]

    def function(self, chunk: Chunk) -> Callable[..., list[Any]]:
        """Returns the function of a chunk's operands, whose gradients of kernels are float32."""
        run = self._mapped(functools.partial(self.region.run, chunk))
        if (wanted := self.wanted) is None:
            return lambda *operands: run(*operands)[1]
        kernels = [*itertools.compress(self.region.kernels, wanted)]

        def pulled(*operands: Any) -> list[Any]:
            reads, cts = operands[: len(wanted)], [*operands[len(wanted) :]]
            some = [*itertools.compress(reads, wanted)]

            def moving(*along: Any) -> Any:
                pairs = zip(along, some, kernels)
                given = in_places([Summed(a, d) if k else d for d, a, k in pairs], wanted)
                ends, values = run(*[a if d is None else d for d, a in zip(given, reads)])
                return [*itertools.compress(ends, self.moved)], values

            zeros = lambda a: jnp.zeros_like(a, jnp.float32)
            along = [zeros(a) if k else a for a, k in zip(some, kernels)]
            totals, pull, values = jax.vjp(moving, *along, has_aux=True)
            if self.once:
                cts = [vary(jnp.ones_like(t), varying_axes(t)) for t in totals]
            return [*(values if self.once else ()), *pull(cts)]

        return pulled

    def _mapped(self, function: Callable[..., Any], *more: int) -> Callable[..., Any]:
        """Returns a function of operands, after `more`, for what vmaps give."""
        for has in self.vmaps[::-1]:
            function = jax.vmap(function, (*more, *[0 if h else None for h in has]))
        return function

    def finished(self, results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Returns the results of all chunks: with the total as the end that it is, in dtypes."""
        results, total = [*results], self.region.total
        if total is not None and self.region.summed[1] and (self.once or self.wanted is None):
            multiplied = self._mapped(self.region.multiplied, 0)
            results[total] = multiplied(results[total], *operands)
        return [y.astype(dtype) for y, dtype in zip(results, self.dtypes(), strict=True)]


def _dims(spec: Spec, *ndims: int) -> Dims:
    del ndims
    counter = itertools.count(len(spec.rows) + len(spec.words))
    number = lambda arrays: [
        (*rows, *[next(counter) if d is None else d for d in others]) for rows, others in arrays
    ]
    arrays, results = spec.arrays()
    operands = number(arrays)
    gradients = [*itertools.compress(operands, spec.wanted or ())]
    return operands, [*number(results[: len(results) - len(gradients)]), *gradients]


def _undivided(spec: Spec, *ndims: int) -> tuple[int, ...]:
    every = {d for dims in _dims(spec, *ndims)[0] for d in dims}
    return tuple(sorted(every - {*spec.rows, *spec.words.values()}))


def _define(spec: Spec, *operands: Array) -> list[Array]:
    """The equations as they stand."""
    return spec.finished(spec.function(spec.region.whole)(*operands), operands)


def on_cpu() -> bool:
    """Tells if programs run on CPUs, where a chunk costs little beside its products."""
    return jax.default_backend() == "cpu"


def _sizes(spec: Spec, shape: Sequence[int], shared: bool = False) -> tuple[int, ...]:
    """Returns how many rows of each dimension a chunk has: of one a part, of those before it 1.

    GPUs have few chunks: the gradient of the kernel from each is one more pass over the sum of all.
    Where devices share words, chunks are of one size, if some such size divides the rows: what the
    rest exchanges would be more collectives.
    """
    total, sizes = math.prod(shape), []
    most = max(1, CHUNK_BYTES // spec.region.width)
    if on_cpu():
        most = min(most, max(-(-total // _PARTS), min(_FEW, -(-total // 2))))
    for i, n in enumerate(shape):
        inner = math.prod(shape[i + 1 :])
        if n > 1 and most >= inner:
            few = chunk_rows(n, 1, 1, most // inner)
            equal = [m for m in range(few, few // 2, -1) if n % m == 0] if shared else []
            return (*sizes, *[*equal, few][:1], *shape[i + 1 :])
        sizes.append(1)
    return tuple(sizes)


def _body(spec: Spec, split: Split, *operands: Array, order: Order) -> list[Array]:
    """One device's rows, in chunks."""
    del order
    reads, results = spec.arrays()
    local = {
        d: n for (rows, more), x in zip(reads, operands) for d, n in zip((*rows, *more), x.shape)
    }
    shape = [local[d] for d in spec.rows]
    ahead = [lax.axis_index(a) * n if a else 0 for a, n in zip(split.axes, shape)]
    at = lambda starts, rows, others: [*[starts[d] for d in rows], *[np.int32(0)] * others]
    axes = dict(zip(spec.words, split.axes[len(shape) :]))
    words = {l: local[d] for l, d in spec.words.items()}
    sizes, before = _sizes(spec, shape, any(axes.values())), len(spec.vmaps)
    first_words = {l: lax.axis_index(axes[l]) * n if axes.get(l) else 0 for l, n in words.items()}

    def chunk(starts: Sequence[Any], sizes: Sequence[int]) -> list[Array]:
        parts = []
        for (rows, _), x in zip(reads, operands, strict=True):
            part = *[sizes[d] for d in rows], *x.shape[len(rows) :]
            parts.append(lax.dynamic_slice(x, at(starts, rows, x.ndim - len(rows)), part))
        firsts = [first + start for first, start in zip(ahead, starts)]
        atoms = spec.region.atoms
        counts = words | dict(zip(atoms, sizes[before:]))
        places = first_words | dict(zip(atoms, firsts[before:]))
        return spec.function(Chunk(counts, places, axes))(*parts)

    # Results without all dimensions of rows are added up, in float32 at least.
    types = jax.eval_shape(lambda: chunk([np.int32(0)] * len(shape), sizes))
    adds = [len(rows) < len(shape) for rows, _ in results]
    sums = [
        jnp.promote_types(t.dtype, jnp.float32)
        if add and jnp.issubdtype(t.dtype, jnp.inexact)
        else t.dtype
        for t, add in zip(types, adds)
    ]
    whole = [
        (*[shape[d] for d in rows], *t.shape[len(rows) :]) for (rows, _), t in zip(results, types)
    ]

    def step(sizes: Sequence[int], into: list[Array], starts: Any) -> tuple[list[Array], None]:
        done = []
        for (rows, _), y, part, add in zip(results, into, chunk(starts, sizes), adds):
            where = at(starts, rows, y.ndim - len(rows))
            if add:
                part = lax.dynamic_slice(y, where, part.shape) + part.astype(y.dtype)
            done.append(lax.dynamic_update_slice(y, part, where))
        return done, None

    found = [*map(jnp.zeros, whole, sums)]
    for few, firsts in _grids(shape, sizes):
        found, _ = lax.scan(functools.partial(step, few), found, jnp.asarray(firsts, jnp.int32))
    summed = [[d for d in spec.rows if d not in rows] for rows, _ in results]
    return spec.finished([split.psum(y, d) for y, d in zip(found, summed)], operands)


def _grids(
    shape: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[Sequence[int], np.ndarray]]:
    """Yields the sizes of chunks and where each begins: the whole ones, then those of the rest."""
    counts = np.array(shape) // sizes
    grid = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), -1).reshape(-1, len(shape))
    yield sizes, grid * sizes
    rest = np.array(shape) - counts * sizes
    for d in map(int, np.flatnonzero(rest)):  # one at most
        last = grid[grid[:, d] == 0] * sizes
        last[:, d] = counts[d] * sizes[d]
        yield [int(rest[d]) if i == d else n for i, n in enumerate(sizes)], last


def _batch_rows(op: Op, args: Any, dims: Any, *, spec: Spec, order: Order) -> Any:
    """A batch dimension becomes one more of rows."""
    has = tuple([d is not None for d in dims])
    moved = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims)]
    results = op(replace(spec, vmaps=(has, *spec.vmaps)), *moved, order=order)
    return results, [0] * len(results)


def _batch_gradients(op: Op, args: Any, dims: Any, *, spec: Spec, order: Order) -> Any:
    del op
    alone = Split(((),) * len(spec.rows), ())
    one = functools.partial(_body, spec, alone, order=order)
    results = jax.vmap(one, tuple(dims))(*args)
    return list(results), [0] * len(results)


def _backward(
    spec: Spec, cts: Any, operands: Any, more: Any, wanted: Any, *, order: Order
) -> list[Any]:
    del more
    every = in_places(cts, spec.moved)
    moved = tuple([ct is not None for ct in every])
    along = replace(spec, wanted=tuple(wanted), moved=moved)
    found = gradients(along, *operands, *[ct for ct in every if ct is not None], order=order)
    return in_places(found, wanted)


def _jvp(primals: Any, tangents: Any, *, spec: Spec, order: Order) -> Any:
    moving = [t if moves(t) else None for t in tangents]
    wanted, later = tuple([t is not None for t in moving]), [*spec.moved]
    found: dict[int, Any] = {}
    total = spec.region.total
    if total is not None and later[total] and any(wanted) and not spec.vmaps:
        # The tangent is linear in those of the operands, with the gradients that are there.
        later[total] = False
        only = tuple([i == total for i in range(len(later))])
        alone = replace(spec, wanted=wanted, moved=only, once=True)
        both = gradients(alone, *primals, order=order)
        results, each = both[: len(later)], both[len(later) :]
        sums = [jnp.promote_types(g.dtype, jnp.float32) for g in each]
        along = zip(each, [t for t in moving if t is not None], sums)
        parts = [jnp.sum(g.astype(dtype) * t.astype(dtype)).real for g, t, dtype in along]
        found[total] = functools.reduce(jnp.add, parts).astype(results[total].dtype)
    else:
        results = rows(spec, *primals, order=order)
    if any(later):
        rest, some = replace(spec, moved=tuple(later)), [*itertools.compress(results, later)]
        moved = tangents_of(rows, _backward, rest, primals, moving, some, order=order)
        found |= zip(itertools.compress(itertools.count(), later), moved)
    zero = lambda r: ad.Zero(jax.typeof(r).to_tangent_aval())
    return results, [found[i] if i in found else zero(r) for i, r in enumerate(results)]


def _drop_gradient(spec: Spec) -> Spec | None:
    """Returns the operation without its last gradient; None where it has none."""
    if not spec.once or not any(spec.wanted or ()):
        return None
    last = max(itertools.compress(itertools.count(), spec.wanted or ()))
    return replace(spec, wanted=tuple([w and i < last for i, w in enumerate(spec.wanted or ())]))


_placement = Placement(
    _dims, _body, leads=lambda spec: tuple(range(len(spec.arrays()[0]))), undivided=_undivided
)
rows = Op(
    "rows",
    _define,
    _placement,
    Batching(rule=_batch_rows),
    Derivative(_jvp, formula=lambda spec, *a: [*itertools.compress(_define(spec, *a), spec.moved)]),
)
gradients = Op(
    "rows_gradients",
    _define,
    _placement,
    Batching(rule=_batch_gradients),
    without_last=_drop_gradient,
)


def _matched(spec: Spec, given: list[Any]) -> list[Any]:
    """Returns operands on Explicit axes with rows, then words, split as the first that has them."""
    if not jax.typeof(given[0]).sharding.mesh.explicit_axes:
        return given
    entries: dict[int, Any] = {}
    numbers = [(*rows, *others) for rows, others in spec.arrays()[0]]
    for dims, a in zip(numbers, given):
        taken = {name for entry in entries.values() for name in axes_of(entry)}
        of_dims = zip(dims, split_by(jax.typeof(a).sharding.spec, a.ndim))
        entries = {d: without(e, taken) for d, e in of_dims if d is not None} | entries
    wanted = [P(*[None if d is None else entries[d] for d in dims]) for dims in numbers]
    return [match_spec(a, given[0], to) for a, to in zip(given, wanted)]


def computed(region: Region, reads: Sequence[int], read: Callable[[int], Any]) -> list[Any]:
    """Returns the ends of a region."""
    moved = tuple([jnp.issubdtype(p.aval.dtype, jnp.inexact) for p in region.ends])
    whole, spec = region.whole, Spec(region, moved)
    given = [p.first(jnp.asarray(read(v)), whole) for p, v in zip(region.reads, reads)]
    given = _matched(spec, equally_varying(*given))
    return [p.back(y, whole) for p, y in zip(region.ends, rows(spec, *given))]
