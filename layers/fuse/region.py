"""Losses of large logits by the user's own equations, a chunk of rows at a time.

A region begins at wide products, the logits, and ends where values are no longer wide: a number for
each row, or a total. The equations between, and those of others that are as wide, are computed for
a chunk of rows after the other; in the backward once more, with each chunk's gradients.
"""

import contextlib
import dataclasses
import functools
import hashlib
import heapq
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
    match,
    moves,
    vary,
    varying_axes,
)
from ..cross_entropy.op import CHUNK_BYTES
from .labels import Label, Labels, expand
from .plan import Plan, only_end
from .program import Equation, Program
from .rows import Chunk, Combined, Rows, Summed, labels_of, latest, traced_back
from .sites import Left, Site

SMALLEST = 1024
"""Fewer columns than these are not wide."""
WIDER = 4  # how many times larger logits are than what is no longer wide
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
        for labels, n in zip(latest(self.rows), self.aval.shape):
            of_rows |= {l: len(sizes) + i for i, l in enumerate(labels)}
            others += [] if labels else [len(sizes)]
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
      total: the end whose gradients are computed with the ends; None for none.
      width: bytes of a row's logits.
    """

    plan: Plan
    atoms: Labels
    reads: tuple[Part, ...]
    ends: tuple[Part, ...]
    total: int | None
    width: int

    def __repr__(self) -> str:
        """Returns what names the region in every process, but for functions with own rules."""
        place = {l: i for i, l in enumerate(self.atoms)}
        of_rows = lambda every: [[[place[l] for l in expand(d)] for d in rows] for rows in every]
        steps = [
            (s.equation.eqn.primitive.name, str(s.equation.eqn), of_rows([*s.ins, *s.outs]), *slots)
            + (() if s.call is None else (id(s.call),))
            for _, s, *slots in self.plan.order
        ]
        arrays = [(p.slot, of_rows([p.rows]), p.aval.str_short()) for p in self.reads + self.ends]
        sizes = [l.size for l in self.atoms]
        text = f"{sizes}{steps}{arrays}{self.plan.consts}{self.width}{self.total}"
        return f"Region({hashlib.sha256(text.encode()).hexdigest()})"

    @property
    def whole(self) -> Chunk:
        """All rows."""
        return Chunk({l: l.size for l in self.atoms}, dict.fromkeys(self.atoms, 0))

    @functools.cached_property
    def kernels(self) -> list[bool]:
        """Tells which operands are narrow, without rows, and multiplied alone."""
        slots = self.plan.multiplied()
        return [p.aval.dtype.name in NARROW and not p.atoms and p.slot in slots for p in self.reads]

    def run(self, chunk: Chunk, *operands: Any) -> list[Any]:
        """Returns the ends of a chunk, with rows first, as its operands are."""
        back = lambda p, x: x if isinstance(x, Summed) else p.back(x, chunk)
        given = {p.slot: back(p, x) for p, x in zip(self.reads, operands, strict=True)}
        env = self.plan.run(given, chunk)
        return [p.first(env[p.slot], chunk) for p in self.ends]


# ---------------------------------------------------------------- operations


@dataclasses.dataclass(frozen=True)
class Spec:
    """A region, or its gradients: operations of its operands, these then of cotangents, too.

    The dimensions of an operation are numbered: those of vmaps, those of rows, then all others.

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

    def _select(self, reads: Sequence[Any], ends: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns what is told of the operands and of the results."""
        if self.wanted is None:
            return [*reads], [*ends]
        gradients = itertools.compress(reads, self.wanted)
        if self.once:
            return [*reads], [*ends, *gradients]
        return [*reads, *itertools.compress(ends, self.moved)], [*gradients]

    def arrays(self) -> tuple[list[Any], list[Any]]:
        """Returns (the numbers of rows, the count of other dimensions) of operands and results."""

        def numbered(part: Part, has: Sequence[bool]) -> tuple[tuple[int, ...], int]:
            atoms = [len(self.vmaps) + self.region.atoms.index(l) for l in part.atoms]
            others = sum(not labels for labels in part.rows)
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
        run: Callable[..., list[Any]] = functools.partial(self.region.run, chunk)
        for has in self.vmaps[::-1]:
            run = jax.vmap(run, [0 if h else None for h in has])
        if (wanted := self.wanted) is None:
            return run
        kernels = [*itertools.compress(self.region.kernels, wanted)]

        def pulled(*operands: Any) -> list[Any]:
            reads, cts = operands[: len(wanted)], [*operands[len(wanted) :]]
            some = [*itertools.compress(reads, wanted)]

            def moving(*along: Any) -> Any:
                pairs = zip(along, some, kernels)
                given = in_places([Summed(a, d) if k else d for d, a, k in pairs], wanted)
                ends = run(*[a if d is None else d for d, a in zip(given, reads)])
                return [*itertools.compress(ends, self.moved)], ends

            zeros = lambda a: jnp.zeros_like(a, jnp.float32)
            along = [zeros(a) if k else a for a, k in zip(some, kernels)]
            totals, pull, ends = jax.vjp(moving, *along, has_aux=True)
            if self.once:
                cts = [vary(jnp.ones_like(t), varying_axes(t)) for t in totals]
            return [*(ends if self.once else ()), *pull(cts)]

        return pulled


def _dims(spec: Spec, *ndims: int) -> Dims:
    del ndims
    counter = itertools.count(len(spec.rows))
    number = lambda arrays: [(*rows, *itertools.islice(counter, n)) for rows, n in arrays]
    arrays, results = spec.arrays()
    operands = number(arrays)
    gradients = [*itertools.compress(operands, spec.wanted or ())]
    return operands, [*number(results[: len(results) - len(gradients)]), *gradients]


def _undivided(spec: Spec, *ndims: int) -> tuple[int, ...]:
    every = {d for dims in _dims(spec, *ndims)[0] for d in dims}
    return tuple(sorted(every - {*spec.rows}))


def _define(spec: Spec, *operands: Array) -> list[Array]:
    """The equations as they stand."""
    results = spec.function(spec.region.whole)(*operands)
    return [y.astype(dtype) for y, dtype in zip(results, spec.dtypes(), strict=True)]


def _sizes(spec: Spec, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns how many rows of each dimension a chunk has: of one a part, of those before it 1."""
    total, sizes = math.prod(shape), []
    most = max(-(-total // _PARTS), min(_FEW, -(-total // 2)))
    most = max(1, min(most, CHUNK_BYTES // spec.region.width))
    for i, n in enumerate(shape):
        inner = math.prod(shape[i + 1 :])
        if n > 1 and most >= inner:
            return (*sizes, min(n, most // inner), *shape[i + 1 :])
        sizes.append(1)
    return tuple(sizes)


def _body(spec: Spec, split: Split, *operands: Array, order: Order) -> list[Array]:
    """One device's rows, in chunks."""
    del order
    reads, results = spec.arrays()
    local = {d: n for (rows, _), x in zip(reads, operands) for d, n in zip(rows, x.shape)}
    shape = [local[d] for d in spec.rows]
    sizes, before = _sizes(spec, shape), len(spec.vmaps)
    ahead = [lax.axis_index(a) * n if a else 0 for a, n in zip(split.axes, shape)]
    at = lambda starts, rows, others: [*[starts[d] for d in rows], *[np.int32(0)] * others]

    def chunk(starts: Sequence[Any], sizes: Sequence[int]) -> list[Array]:
        parts = []
        for (rows, others), x in zip(reads, operands, strict=True):
            part = *[sizes[d] for d in rows], *x.shape[len(rows) :]
            parts.append(lax.dynamic_slice(x, at(starts, rows, others), part))
        firsts = [first + start for first, start in zip(ahead, starts)]
        atoms = spec.region.atoms
        counted = dict(zip(atoms, sizes[before:])), dict(zip(atoms, firsts[before:]))
        return spec.function(Chunk(*counted))(*parts)

    # Results without all dimensions of rows are added up, in float32 at least.
    types = jax.eval_shape(lambda: chunk([np.int32(0)] * len(shape), sizes))
    adds = [len(rows) < len(shape) for rows, _ in results]
    sums = [
        jnp.promote_types(t.dtype, jnp.float32)
        if add and jnp.issubdtype(t.dtype, jnp.floating)
        else t.dtype
        for t, add in zip(types, adds)
    ]
    whole = [
        (*[shape[d] for d in rows], *t.shape[len(rows) :]) for (rows, _), t in zip(results, types)
    ]

    def step(sizes: Sequence[int], into: list[Array], starts: Any) -> tuple[list[Array], None]:
        done = []
        for (rows, others), y, part, add in zip(results, into, chunk(starts, sizes), adds):
            where = at(starts, rows, others)
            if add:
                part = lax.dynamic_slice(y, where, part.shape) + part.astype(y.dtype)
            done.append(lax.dynamic_update_slice(y, part, where))
        return done, None

    found = [*map(jnp.zeros, whole, sums)]
    for few, firsts in _grids(shape, sizes):
        found, _ = lax.scan(functools.partial(step, few), found, jnp.asarray(firsts, jnp.int32))
    summed = [[d for d in spec.rows if d not in rows] for rows, _ in results]
    return [split.psum(y, d).astype(t) for y, d, t in zip(found, summed, spec.dtypes())]


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
        parts = [jnp.sum(g.astype(dtype) * t.astype(dtype)) for g, t, dtype in along]
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


# ---------------------------------------------------------------- finding regions


class _Again(Exception):
    """A region has one more product."""


class _NoLogits(Exception):
    """A product is none of rows and a vocabulary."""


class Search:
    """The region that begins at a product.

    Args:
      program: theirs.
      live: the values that the program needs.
      product: of rows and words; `right` tells if the words are its right operand's.

    Attributes:
      ends: the values at its ends that something else reads.
      left: the values that are as wide, and still needed.

    Raises:
      _NoLogits: for a product that makes no logits.
    """

    def __init__(self, program: Program, live: set[int], product: Equation, right: bool):
        self.program, self.live, self.product = program, live, product
        (self.logits,) = product.outs
        ((lc, _), (batch, _)) = product.params["dimension_numbers"]
        shape, rows = program.avals[self.logits].shape, program.avals[product.ins[0]].ndim - len(lc)
        of_rows = {*range(rows)} if right else {*range(len(batch)), *range(rows, len(shape))}
        of_rows = {d for d in of_rows if shape[d] > 1}
        width = lambda: math.prod([n for d, n in enumerate(shape) if d not in of_rows])
        self.words = width()
        if self.words < SMALLEST or not self._is_searched(len(batch)):
            raise _NoLogits
        while of_rows:
            own = [(Label(n),) if d in of_rows else () for d, n in enumerate(shape)]
            self.sources: dict[int, Rows] = {self.logits: tuple(own)}
            self._search()
            self.atoms = labels_of(latest(tuple(own)))
            combined = {d for d in of_rows if self.combined & {*labels_of((own[d],))}}
            if not combined or combined == of_rows:
                return
            of_rows -= combined  # other rows are cut alone
            self.words = width() if self.of_queries else self.words
        raise _NoLogits

    of_queries = False

    def _is_searched(self, batches: int) -> bool:
        """Tells if a product with so many dimensions of a batch may make logits."""
        return not batches

    def is_wide(self, v: int, rows: Rows) -> bool:
        sizes = zip(rows, self.program.avals[v].shape)
        return WIDER * math.prod([n for labels, n in sizes if not labels]) > self.words

    def _lifts(self, v: int, rows: Rows) -> bool:
        """Tells if a value that does not depend on the logits is computed in chunks, too."""
        if v in self.given or not self.is_wide(v, rows) or not any(rows):
            return False
        if self.program.made(v)[1] == "dot_general":
            self.sources[v] = rows
            raise _Again
        return True

    why, chunks = "", "chunks"
    what = "loss {rows} x {summed} -> {words}, {dtype}"

    def _search(self) -> None:
        """Follows the logits, and other products that are as wide."""
        while True:
            self.plan = plan = Plan(self.program, self._lifts)
            self.combined: set[Label] = set()
            self.names: set[str] = set()
            self.given = {v for source in self.sources for v in self.program.maker[source].ins}
            for v, rows in self.sources.items():
                made = self.program.maker[v]
                plan.steps[made] = traced_back(plan.seen(made), rows)
                plan.rows[v] = rows
            narrow, self.wide = self._follow()
            live, self.ends = _without(self.program, narrow)
            self.left = [v for v in self.wide if v in live]
            followed = plan.rows.keys() - plan.lost.keys() - {*self.wide}
            _, later = _without(self.program, sorted(followed))
            if (total := self._total(later)) is not None:
                self.ends = later
            self.total = total
            try:
                plan.need([(v, plan.rows[v]) for v in self.ends])
                return
            except _Again:
                continue

    def _is_layer(self, product: Equation, followed: set[int]) -> bool:
        """Tells if a product of wide values is that of one more layer: these are no logits."""
        del followed
        contracted = zip(product.ins, product.params["dimension_numbers"][0])
        shapes = [(self.program.avals[v].shape, dims) for v, dims in contracted]
        summed = math.prod([shapes[0][0][i] for i in shapes[0][1]])
        sizes = [self.program.avals[v].size for v in (*product.outs, self.logits)]
        return WIDER * summed >= self.words and _HIDDEN * sizes[0] > sizes[1]

    def _total(self, ends: Sequence[int]) -> int | None:
        """Returns the end whose gradients are computed with it; None for none."""
        if "scan" in self.program.within or "while" in self.program.within:
            return None  # each turn would keep a gradient of the kernel's size
        with contextlib.suppress(Left):
            one = only_end(self.program, ends)
            return one if one in self.plan.sums and not any(self.plan.rows[one]) else None
        return None

    def _follow(self) -> tuple[list[int], list[int]]:
        """Returns the values that are no longer wide, and those that are."""
        plan, program = self.plan, self.program
        narrow, wide, queue, seen = [], [*self.sources], [], set()
        followed = {*wide}

        def push(values: Sequence[int]) -> None:
            for reader in [r for v in values for r in program.readers.get(v, ())]:
                if reader not in seen and reader not in program.shadowing:
                    seen.add(reader)
                    heapq.heappush(queue, (reader.index, len(seen), reader))

        push(wide)
        while queue:
            made = heapq.heappop(queue)[-1]
            if not self.live & {*made.outs}:
                continue
            is_wide = bool(followed & {*made.ins})
            last = made.name == "dot_general" and is_wide and self._is_layer(made, followed)
            if last and not self.of_queries:
                raise _NoLogits
            self.names |= _names(made.eqn) if is_wide else set()
            step = plan.advance(made)
            if step is not None:
                for v in made.outs:
                    if not self.is_wide(v, plan.rows[v]):
                        narrow += [v] if is_wide else []
                    elif step.summed:
                        plan.lost[v] = Combined("it adds up rows", step.summed)
                        self.combined |= step.summed
                    else:
                        wide.append(v)
                        followed.add(v)
            elif is_wide:
                why = plan.lost[made.outs[0]]
                self.combined |= why.labels if isinstance(why, Combined) else set()
                self.why = self.why or f"{program.described(made)}: {why}"
            push(() if last else made.outs)
        return narrow, wide

    def site(self, quantization: Any) -> Site:
        """Returns the region's site.

        Raises:
          Left: where it has to stay, with the reason.
        """
        plan, program, atoms, ends = self.plan, self.program, self.atoms, self.ends
        place = {l: i for i, l in enumerate(atoms)}

        def part(v: int, rows: Rows) -> Part:
            own, slot = sorted(labels_of(latest(rows)), key=place.__getitem__), plan.slot(v, rows)
            assert slot is not None
            return Part(slot, rows, program.avals[v], tuple(own))

        for v in ends:
            if {*labels_of(latest(plan.rows[v])), *expand(plan.sums.get(v, ()))} != {*atoms}:
                raise Left("a value at its end is not of all rows")
        sharding = program.avals[self.logits].sharding
        if sharding.mesh.explicit_axes:
            spec = zip(sharding.spec, self.sources[self.logits])
            if any(entry is not None and not labels for entry, labels in spec):
                raise Left("its words are split over a mesh")
        first = lambda read: (-len(labels_of(latest(read[1]))), read[0] not in self.product.ins)
        reads = sorted(plan.reads, key=first)
        parts = tuple([part(v, rows) for v, rows, _ in reads])
        lines = {v: program.line(v) for v in ends}  # the report names the first
        ends = sorted(ends, key=lambda v: "unknown" in lines[v])
        made = [part(v, plan.rows[v]) for v in ends]
        total = None if self.total is None else ends.index(self.total)
        region = Region(plan, atoms, parts, tuple(made), total, 4 * self.words)
        count = math.prod([l.size for l in atoms])
        x = program.avals[self.product.ins[0]]
        (contracted, _), _ = self.product.params["dimension_numbers"]
        summed = math.prod([x.shape[i] for i in contracted])
        when = "in the backward again" if total is None else "gradients at once"
        more = ", not in fp8 (its equations are the function's own)" if quantization else ""
        return Site(
            outs=tuple(ends),
            reads=tuple([v for v, *_ in reads]),
            dead=tuple(self.sources),
            what=self.what.format(rows=count, summed=summed, words=self.words, dtype=x.dtype.name),
            served=f"rows: its own equations in {self.chunks}, {when}{more}",
            compute=functools.partial(_computed, region, [v for v, *_ in reads]),
        )


def _computed(region: Region, reads: Sequence[int], read: Callable[[int], Any]) -> list[Any]:
    """Returns the ends of a region."""
    moved = tuple([jnp.issubdtype(p.aval.dtype, jnp.floating) for p in region.ends])
    whole, spec = region.whole, Spec(region, moved)
    given = [p.first(jnp.asarray(read(v)), whole) for p, v in zip(region.reads, reads)]
    given = equally_varying(*given)
    numbers = [(*rows, *[len(spec.rows) + 1] * others) for rows, others in spec.arrays()[0]]
    given = [match(a, given[0], dims) for a, dims in zip(given, numbers)]
    return [p.back(y, whole) for p, y in zip(region.ends, rows(spec, *given))]


def found(
    program: Program, live: set[int], wanted: set[int], quantization: Any
) -> Iterator[Site | tuple[int, str]]:
    """Yields the regions of a program; a value and the reason where one is left.

    Args:
      live: the values that it needs without losses' sites.
      wanted: those that it needs beside all other sites.
    """
    from .queries import Queries  # which is a search

    # Rules also read explicit broadcasts of operands, which nothing evaluates.
    live = live.union(*[e.ins for e in program.equations if live & {*e.outs}])
    served: set[int] = set()
    for product in program.equations:
        if product.name != "dot_general" or product in program.shadowing:
            continue
        if not {*product.outs} <= wanted - served:
            continue
        searches: list[Search] = []
        kind = Queries if any(product.params["dimension_numbers"][1]) else Search
        for right in (True, False):
            try:
                searches.append(one := kind(program, live, product, right))
            except (_NoLogits, Left):
                continue
            if one.ends and not one.left:
                searches = [one]
                break
        if kind is Queries:  # else the attention's own row says why
            searches = [one for one in searches if one.ends and not one.left]
        both = _both_ways(program, searches)
        for one in searches[: 1 + both]:
            is_loss = one.names & _OF_LOSSES and (one.ends or "reduce_sum" in one.names)
            is_hinge = one.names & _OF_HINGES and one.ends and not one.left
            if not is_loss and not is_hinge:
                continue
            try:
                if not one.ends or one.left and not both:
                    raise Left(one.why or "its logits are read as a whole")
                yield one.site(quantization)
                served |= {*one.sources}
            except Left as why:
                yield product.outs[0], str(why)


def _both_ways(program: Program, searches: Sequence[Search]) -> bool:
    """Tells if a product's rows and its columns are cut, each for the values at their ends.

    So it is in the contrastive losses of pairs; the product is computed for each.
    """
    if len(searches) < 2:
        return False
    first, second = searches
    second.ends = [v for v in second.ends if v not in first.ends]
    live, _ = _without(program, [*first.ends, *second.ends])
    return bool(second.ends) and not live & {*first.wide, *second.wide}


def _without(program: Program, values: Sequence[int]) -> tuple[set[int], list[int]]:
    """Returns what is needed where something else computes values, and those of them that are."""
    fake = Site((), (), "", "", compute=lambda read: ())
    live = program.needed(program.results, {}, dict.fromkeys(values, fake))
    return live, [v for v in values if v in live]


def _names(eqn: Any) -> set[str]:
    """Returns the names of an equation, and of those of the programs that it calls."""
    inner = eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr")
    return {eqn.primitive.name}.union(*map(_names, inner.eqns if inner else ()))


_OF_LOSSES = frozenset("exp exp2 log log1p logistic argmax argmin top_k sort".split())
_OF_HINGES = frozenset(("gather", "reduce_max"))  # of layers, too, where logits are needed
_HIDDEN = 64  # how many times larger logits are than a product of them
