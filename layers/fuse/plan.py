"""The equations that compute values for a chunk of rows, and the programs within them."""

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from ...native.jaxpr import JIT, REMAT, results_of
from ..core.op import jvp_along
from .labels import Label
from .program import Equation as Made
from .program import Program
from .rows import (
    Chunk,
    Equation,
    Rows,
    Step,
    computed,
    inferred,
    latest,
    of_layout,
    spread_over,
    traced_back,
)
from .sites import Left, Site
from .words import spread, without_words, words_of

_MULTIPLES = "mul", "div", "neg", "convert_element_type", "reshape", "squeeze"
_OWN = "custom_jvp_call", "custom_vjp_call"
Rule = Callable[[], "Flow"]


def _counting(x: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields each column of an array of indices that counts a dimension, and that dimension."""
    *sizes, columns = x.shape
    for c in range(columns):
        for d, size in enumerate(sizes):
            shape = [size if i == d else 1 for i in range(len(sizes))]
            if (x[..., c] == np.arange(size).reshape(shape)).all():
                yield c, d
                break


class Plan:
    """The equations that compute values for a chunk of rows.

    Args:
      lifts: tells which values and rows are computed in the chunk, of those that do not depend on
        `rows`.
      of_rule: it is of a derivative rule, which may call its own function.

    Attributes:
      rows: the rows of values that are known; set those to begin with.
      sums: the rows that were added up to a value, or to values that it is linear in.
      lost: values that depend on rows in another way, and why.
      reads: (value, rows) of what is not computed, in the order of their slots.
    """

    def __init__(self, program: Program, lifts: Callable[[int, Rows], bool], of_rule: bool = False):
        self.program, self.lifts, self.of_rule = program, lifts, of_rule
        self.rows: dict[int, Rows] = {}
        self.sums: dict[int, frozenset[Label]] = {}
        self.lost: dict[int, Left] = {}
        self.steps: dict[Made, Step] = {}
        self.slots: dict[int, list[tuple[Rows, int]]] = {}
        self.consts: dict[int, Any] = {}  # by slot
        self.reads: list[tuple[int, Rows, int]] = []
        self.order: list[tuple[float, Step, Any, Any]] = []  # (index, step, slots)
        self._count = 0

    def seen(self, made: Made) -> Equation:
        """Returns an equation as the rules read it."""
        avals = self.program.avals
        given, results = ([avals[v].shape for v in vs] for vs in (made.ins, made.outs))
        counts = {}
        if made.name == "gather":
            rows = without_words(self.rows.get(made.ins[0], ()))
            at = made.params["dimension_numbers"].start_index_map
            of_all = lambda c, d: rows[at[c]] and given[0][at[c]] == given[1][d]
            counts = {c: d for c, d in self._counts(made) if rows and of_all(c, d)}
        return Equation(made.eqn, made.name, made.params, tuple(given), tuple(results), counts)

    def _counts(self, gather: Made) -> Iterator[tuple[int, int]]:
        """Yields a column of indices and the dimension that it counts, as in `x[arange, y]`."""
        program, at = self.program, 0
        made: Any
        made, name = program.made(gather.ins[1])
        last = len(program.avals[gather.ins[1]].shape) - 1
        joined = name == "concatenate" and made.params["dimension"] == last
        for v in made.ins if joined else [gather.ins[1]]:
            if (x := program.const(v)) is not None:
                yield from [(at + c, d) for c, d in _counting(x)]
            at += program.avals[v].shape[last]

    def advance(self, made: Made) -> Step | None:
        """Finds the rows of an equation's results; None if it is lost."""
        lost = next((self.lost[v] for v in made.ins if v in self.lost), None)
        summed = frozenset[Label]().union(*[self.sums.get(v, ()) for v in made.ins])
        if summed and not self.is_linear(made, self.sums):
            lost = lost or Left("it reads a total")
        if lost is None:
            try:
                step = self._forwards(self.seen(made), [self.rows.get(v) for v in made.ins])
                self.steps[made] = step
                self.rows |= zip(made.outs, step.outs)
                if summed := summed | step.summed:
                    self.sums |= dict.fromkeys(made.outs, summed)
                return step
            except Left as why:
                lost = why
        self.lost |= dict.fromkeys(made.outs, lost)
        return None

    def _forwards(self, e: Equation, known: Sequence[Rows | None]) -> Step:
        """Returns an equation's step, whose words are whole where no rule knows them."""
        try:
            return step_of(e, known, None, self.of_rule)
        except Left:
            if not any(words_of(rows or ()) for rows in known):
                raise
            return self._forwards(e, [rows and without_words(rows) for rows in known])

    def _backwards(self, made: Made, rows: Rows) -> Step | None:
        """Returns the step of an equation whose results have these rows; None where none knows."""
        with contextlib.suppress(Left):
            return step_of(self.seen(made), [None] * len(made.ins), rows, self.of_rule)
        return None

    def is_linear(self, made: Made, values: Container[int]) -> bool:
        """Tells if an equation of values makes of their sum the sum of what it makes of each."""
        totals = [v in values for v in made.ins]
        zeros = [t or self.program.number(v) == 0 for t, v in zip(totals, made.ins)]
        if made.name in ("add", "add_any", "sub"):
            return all(zeros)
        if made.name == "select_n":
            return not totals[0] and all(zeros[1:])
        if made.name in ("mul", "div"):
            return totals == [True, False] or made.name == "mul" and totals == [False, True]
        if made.name == "convert_element_type":  # chunks are not rounded
            dtypes = [self.program.avals[v].dtype for v in (*made.ins, *made.outs)]
            return jnp.promote_types(*dtypes) == dtypes[1] and jnp.issubdtype(dtypes[1], np.inexact)
        return made.name in ("neg", "reduce_sum", "copy", "name", "squeeze", "reshape")

    def slot(self, v: int, rows: Rows) -> int | None:
        """Returns where a value's part is kept; None for one that is not planned yet."""
        rows = latest(rows)
        return next((slot for known, slot in self.slots.get(v, ()) if latest(known) == rows), None)

    def _new(self, v: int, rows: Rows) -> int:
        self._count += 1
        self.slots.setdefault(v, []).append((rows, self._count))
        return self._count

    def need(self, wanted: Sequence[tuple[int, Rows]]) -> None:
        """Plans the equations of values.

        Raises:
          Left: for a value that does not have these rows.
        """
        stack, planned = [*wanted], []
        while stack:
            v, rows = stack.pop()
            if self.slot(v, rows) is not None:
                continue
            made, x = self.program.maker.get(v), self.program.given.get(v)
            if v in self.lost:
                raise self.lost[v]
            step, own = self._source(v, made, rows)
            if latest(own) != latest(rows):
                index, layout = made.index if made else -1, of_layout(latest(own), latest(rows))
                planned.append((index + 0.5, layout, [(v, own)], [self._new(v, rows)]))
                stack.append((v, own))
            elif step is not None and made is not None:
                slots = [self._new(u, r) for u, r in zip(made.outs, step.outs)]
                reads = [*zip(made.ins, step.ins)]
                planned.append((made.index, step, reads, slots))
                stack += reads
            elif x is not None and not self.program.avals[v].ndim and not isinstance(x, Tracer):
                self.consts[self._new(v, rows)] = x
            else:
                self.reads.append((v, rows, self._new(v, rows)))
        for index, step, reads, outs in planned:
            self.order.append((index, step, [self.slot(*read) for read in reads], outs))
        self.order.sort(key=lambda one: one[0])

    def _source(self, v: int, made: Made | None, rows: Rows) -> tuple[Step | None, Rows]:
        """Returns the step that computes a value, if one does, and the rows that it gives it.

        These may differ from the rows that are wanted in the words that devices share.
        """
        whole, own = without_words(latest(rows)), self.rows.get(v)
        if own is None:
            if made is None or not self.lifts(v, rows):
                return None, rows
            if (step := self._backwards(made, rows)) is None and words_of(rows):
                step = self._backwards(made, whole)
                return step, rows if step is None else whole
            return step, rows
        if without_words(latest(own)) != whole:
            raise Left("its rows are read in two layouts")
        if made is None or made not in self.steps:
            return None, own
        if latest(own) != latest(rows) and words_of(rows):  # a broadcast makes the part itself
            if (step := self._backwards(made, rows)) is not None:
                return step, rows
        return self.steps[made], own

    def multiplied(self) -> set[int]:
        """Returns the slots that nothing but products without batches read."""
        of_products: set[int] = set()
        others: set[int] = set()
        for _, step, ins, _ in self.order:
            e = step.equation
            alone = e.name == "dot_general" and not any(e.params["dimension_numbers"][1])
            (of_products if alone else others).update(ins)
        return of_products - others

    def run(
        self, given: Mapping[int, Any], chunk: Chunk, order: Iterable[Any] | None = None
    ) -> dict[int, Any]:
        """Returns the values of a chunk by their slots, given those that steps of `order` read."""
        env: dict[Any, Any] = {**self.consts, **given}

        def read(step: Step, slot: int, rows: Rows) -> Any:
            axes = spread_over(step, rows, chunk)
            if not axes or (slot, axes) in env:  # spread once for all readers
                return env[(slot, axes) if axes else slot]
            return env.setdefault((slot, axes), spread(env[slot], axes))

        for _, step, ins, outs in self.order if order is None else order:
            parts = [read(step, *one) for one in zip(ins, step.ins)]
            env |= zip(outs, computed(step, parts, chunk), strict=True)
        return env


def needed_beside(program: Program, values: Iterable[int], reads: Iterable[int] = ()) -> set[int]:
    """Returns the values that are needed where something else computes `values`, from `reads`."""
    other = Site((), tuple(reads), "", "", compute=lambda read: ())
    return program.needed(program.results, {}, dict.fromkeys(values, other))


def read_by_rules(program: Program, live: set[int]) -> set[int]:
    """Returns what is live, and the explicit broadcasts that rules read and nothing evaluates."""
    return live.union(*[e.ins for e in program.equations if live & {*e.outs}])


def only_end(program: Program, ends: Container[int]) -> int:
    """Returns the end that the first result depends on: the loss's, not of what is returned beside.

    Raises:
      Left: where it depends on several.
    """
    floats = lambda vs: {v for v in vs if jnp.issubdtype(program.avals[v].dtype, jnp.inexact)}
    for result in program.results:
        reached, stack, seen = set(), [*floats([result])], {result}
        while stack:
            v = stack.pop()
            made, name = program.made(v)
            if v in ends:
                reached.add(v)
            elif made is not None and name != "stop_gradient":
                stack += floats(made.operands) - seen
                seen.update(made.operands)
        if len(reached) == 1:
            return reached.pop()
        if reached:
            break
    raise Left("a loss of several ends")


def before_factors(
    program: Program, sums: Container[int], total: int, constants: bool = False
) -> tuple[int, list[Made]]:
    """Returns the sum that a total is a multiple of, by numbers that are known at run time, and the
    equations in between.

    These multiply the sum of all chunks, as in the program: a 0 that divides chunks makes NaN of
    infinities of both signs, or of a chunk that is 0. With `constants` so do all others.
    """
    v, passed, count, first = total, [], 0, total
    while (made := program.maker.get(v)) is not None and made.name in _MULTIPLES:
        own = [u for u in made.ins if u in sums]
        if len(own) != 1:
            break
        (v,) = own
        passed.append(made)
        if constants or any(not program.number(u) for u in made.ins if u != v):
            first, count = v, len(passed)
    return first, passed[:count][::-1]


# ---------------------------------------------------------------- programs within equations


class Flow:
    """A program within an equation, for a chunk of the rows of its operands.

    Args:
      known: the rows of its operands, None where these follow from the others.
      wanted: those of its results, None where they follow from the operands.

    Raises:
      Left: where its results are not computed row by row.
    """

    def __init__(
        self,
        closed: Any,
        known: Sequence[Rows | None],
        wanted: Sequence[Rows | None],
        of_rule: bool = False,
    ):
        self.program = program = Program(closed)
        self.plan = plan = Plan(program, lambda v, rows: True, of_rule)
        plan.rows |= {v: r for v, r in zip(program.inputs, known) if r is not None and any(r)}
        for made in program.equations:
            if made not in program.shadowing and any(v in plan.rows for v in made.ins):
                plan.advance(made)
        self.outs: list[Rows] = []
        for v, asked in zip(program.results, wanted):
            if v in plan.lost:
                raise plan.lost[v]
            rows = plan.rows.get(v, asked)
            rows = ((),) * program.avals[v].ndim if rows is None else rows
            if asked is not None:
                if without_words(latest(rows)) != without_words(latest(asked)):
                    raise Left("its result has other rows")
                rows = asked
            self.outs.append(rows)
        plan.need([*zip(program.results, self.outs)])
        found = {v: rows for v, rows, _ in plan.reads}
        asked = [
            found[v] != r for v, r in zip(program.inputs, known) if r is not None and v in found
        ]
        if len(found) < len(plan.reads) or any(asked):
            raise Left("its rows are read in two layouts")
        if any(v not in program.inputs and any(rows) for v, rows in found.items()):
            raise Left("it closes over rows")
        whole = lambda v: ((),) * program.avals[v].ndim
        every: Any = [
            found.get(v, whole(v)) if rows is None else rows
            for v, rows in zip(program.inputs, known)
        ]
        self.ins: list[Rows] = every

    def is_sum(self, i: int) -> bool:
        """Tells if the results of chunks are to be added up."""
        v = self.program.results[i]
        return v in self.plan.sums or self.program.number(v) == 0

    def __call__(self, given: Sequence[Any], chunk: Chunk) -> list[Any]:
        env = dict(zip(self.program.inputs, given)) | self.program.given
        read = {slot: env[v] for v, _, slot in self.plan.reads}
        env = self.plan.run(read, chunk)
        slots = [self.plan.slot(v, rows) for v, rows in zip(self.program.results, self.outs)]
        return [env[slot] for slot in slots if slot is not None]


def _inner(e: Equation) -> tuple[Any, int]:
    """Returns the program that an equation calls, and how many operands are not the program's."""
    if e.eqn.effects or e.name == "custom_vjp_call" and e.params["symbolic_zeros"]:
        return None, 0  # its rule may ask what gradients are taken by
    if e.name in _OWN:
        return e.params.get("call_jaxpr"), 0
    if e.name in REMAT and not e.params["differentiated"]:
        return ClosedJaxpr(e.params["jaxpr"], ()), 0
    if e.name in JIT:
        return e.params["jaxpr"], 0
    by_xla = e.params.get("branches_platforms") == (("mosaic",), None)  # as in `jnp.diagonal`
    return (e.params["branches"][-1], 1) if by_xla else (None, 0)


def step_of(e: Equation, known: Sequence[Rows | None], made: Rows | None, of_rule: bool) -> Step:
    """Returns an equation, which may call a program, from the rows of its operands or results."""
    closed, skipped = _inner(e)
    if closed is None:
        return inferred(e, known) if made is None else traced_back(e, made)
    primal = Flow(closed, known[skipped:], [made] * len(e.made), of_rule)
    ins, outs = (*[()] * skipped, *primal.ins), tuple(primal.outs)
    if any(primal.is_sum(i) and any(map(any, ins)) for i in range(len(outs))):
        raise Left("it adds up rows")
    call: Any = lambda given, chunk: primal(given[skipped:], chunk)
    if e.name in REMAT:
        call = lambda given, chunk: jax.checkpoint(lambda *a: primal(a, chunk))(*given)
    if e.name in _OWN:
        if len(_floating(_types(e)[1])) < len(outs):
            raise Left("a function with a derivative of its own has results that are no floats")
        of, with_rule = (_jvp, _with_jvp) if e.name == "custom_jvp_call" else (_vjp, _with_vjp)
        rule = functools.cache(functools.partial(of, e, primal))
        if not of_rule:
            rule()
        call = functools.partial(with_rule, e, primal, rule)
    return Step(e, ins, outs, call=call)


def _floating(avals: Sequence[Any]) -> list[int]:
    return [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]


def _types(e: Equation) -> tuple[list[Any], list[Any]]:
    """Returns the types of an equation's operands and results."""

    def struct(v: Any) -> Any:
        of = v.aval.sharding  # that of what it calls, where it is part of types
        explicit = of if of.mesh.explicit_axes else None
        return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=explicit)

    return [*map(struct, e.eqn.invars)], [*map(struct, e.eqn.outvars)]


def _jvp(e: Equation, primal: Flow) -> Flow:
    """Returns the rule of a function's derivative: results and tangents."""
    given, made = _types(e)
    along = _floating(given)

    def both(primals: Any, tangents: Any) -> Any:
        found = dict(zip(along, tangents))
        every = [found.get(i) for i in range(len(primals))]
        return jvp_along(lambda *a: results_of(e.eqn, a), primals, every)

    rows = [*primal.ins, *[primal.ins[i] for i in along]]
    program = jax.make_jaxpr(both)(given, [given[i] for i in along])
    return Flow(program, rows, [*primal.outs, *primal.outs], of_rule=True)


def _with_jvp(e: Equation, primal: Flow, rule: Rule, given: Any, chunk: Chunk) -> list[Any]:
    """Returns the results of a function with a rule of its derivative, for a chunk."""
    own, along = jax.custom_jvp(lambda *a: primal(a, chunk)), _floating(_types(e)[0])

    @own.defjvp
    def _(primals, tangents):
        found = rule()([*primals, *[tangents[i] for i in along]], chunk)
        return found[: len(e.made)], found[len(e.made) :]

    return own(*given)


def _vjp(e: Equation, primal: Flow) -> Flow:
    """Returns the rule of a function's gradients: its results, and these."""
    given, made = _types(e)
    along = _floating(given)

    def both(primals: Any, cts: Any) -> Any:
        def moved(*moving: Any) -> Any:
            found = dict(zip(along, moving))
            return results_of(e.eqn, [found.get(i, a) for i, a in enumerate(primals)])

        results, pull = jax.vjp(moved, *[primals[i] for i in along])
        return results, pull(cts)

    rows, program = [primal.ins[i] for i in along], jax.make_jaxpr(both)(given, made)
    rule = Flow(program, [*primal.ins, *primal.outs], [*primal.outs, *rows], of_rule=True)
    alone = [not any(without_words(r)) for r in rows]
    if any(each and not rule.is_sum(i) for i, each in enumerate(alone, len(made))):
        raise Left("a gradient of its own is no sum over rows")
    return rule


def _with_vjp(e: Equation, primal: Flow, rule: Rule, given: Any, chunk: Chunk) -> list[Any]:
    """Returns the results of a function with a rule of its gradients, for a chunk."""
    own, along = jax.custom_vjp(lambda *a: primal(a, chunk)), _floating(_types(e)[0])

    def forward(*given: Any) -> Any:  # the results' own derivative is that of the rule
        zeros = map(jnp.zeros_like, primal(given, chunk))
        return rule()([*given, *zeros], chunk)[: len(e.made)], given

    def backward(kept: Any, cts: Any) -> Any:
        found = dict(zip(along, rule()([*kept, *cts], chunk)[len(e.made) :]))
        return tuple([found.get(i) for i in range(len(kept))])

    own.defvjp(forward, backward)
    return own(*given)
