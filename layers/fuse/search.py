"""Finds the regions of losses of large logits, and of attention with many scores; see `region`."""

import contextlib
import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any

from .labels import Label, expand
from .losses import SMALLEST
from .plan import Plan, before_factors, needed_beside, only_end, read_by_rules
from .program import Equation, Program
from .region import Part, Region, computed, on_cpu
from .rows import Combined, Rows, labels_of, latest, traced_back
from .sites import Left, Site
from .words import Words, without_words, words_of

WIDER = 4  # how many times larger logits are than what is no longer wide
LARGEST_SCORES = {"cpu": 2**28, "others": 2**32}
"""Bytes of scores, from which on what takes more products is cut: attention that no kernel serves,
and on GPUs losses of pairs both ways. On an H200 these take 1.4 to 2.1 times as long."""


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
        of_words = [n for d, n in enumerate(shape) if d not in of_rows and n > 1]
        self._vocabularies = {n: Words(n) for n in of_words if not self.of_queries}
        if self.words < SMALLEST or not self._is_searched(len(batch)):
            raise _NoLogits
        while of_rows:
            own = tuple([(Label(n),) if d in of_rows else () for d, n in enumerate(shape)])
            self.sources: dict[int, Rows] = {self.logits: self._with_words(self.logits, own)}
            self._search()
            self.atoms = labels_of(latest(own))
            combined = {d for d in of_rows if self.combined & {*labels_of((own[d],))}}
            if not combined or combined == of_rows:
                return
            of_rows -= combined  # other rows are cut alone
            self.words = width() if self.of_queries else self.words
        raise _NoLogits

    of_queries = False

    def _with_words(self, v: int, rows: Rows) -> Rows:
        """Returns a product's rows with labels of its words, the same for all of their number."""
        left, out = {**self._vocabularies}, []
        for labels, n in zip(without_words(rows), self.program.avals[v].shape):
            words = None if labels else left.pop(n, None)
            out.append((words,) if words else labels)
        return tuple(out)

    def _is_searched(self, batches: int) -> bool:
        """Tells if a product with so many dimensions of a batch may make logits."""
        return not batches

    def is_wide(self, v: int, rows: Rows) -> bool:
        sizes = zip(without_words(rows), self.program.avals[v].shape)
        return WIDER * math.prod([n for labels, n in sizes if not labels]) > self.words

    def _lifts(self, v: int, rows: Rows) -> bool:
        """Tells if a value that does not depend on the logits is computed in chunks, too."""
        if v in self.given or not self.is_wide(v, rows) or not labels_of(rows):
            return False
        if self.program.made(v)[1] == "dot_general":
            self.sources[v] = self._with_words(v, rows)
            raise _Again
        return True

    @property
    def serves(self) -> bool:
        return bool(self.ends) and not self.left

    @property
    def is_known(self) -> bool:
        """Tells if its equations are those of losses, not of layers."""
        is_loss = self.names & _OF_LOSSES and (self.ends or "reduce_sum" in self.names)
        return bool(is_loss or self.names & _OF_HINGES and self.serves)

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
            live = needed_beside(self.program, narrow)
            self.left = [v for v in self.wide if v in live]
            self.ends, self.total, self.factors = [v for v in narrow if v in live], None, []
            followed = sorted(plan.rows.keys() - plan.lost.keys() - {*self.wide})
            live = needed_beside(self.program, followed)
            later = [v for v in followed if v in live]
            if (end := self._total(later)) is not None:
                self.summed, self.factors = before_factors(self.program, plan.sums, end)
                self.total = end
                numbers = {u for e in self.factors for u in e.ins} - plan.sums.keys()
                if numbers & (plan.rows.keys() | plan.lost.keys()):
                    self.total, self.factors = self.summed, []  # these are known later
                self.ends = [*dict.fromkeys(self.total if v == end else v for v in later)]
            try:
                plan.need([(v, without_words(plan.rows[v])) for v in self.ends])
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
            if self.program.avals[one].shape or self.program.avals[one].dtype.kind == "c":
                return None  # each of several totals has a gradient of its own
            return one if one in self.plan.sums else None
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
            own, slot = labels_of(rows), plan.slot(v, rows)
            own = sorted(own, key=place.__getitem__)
            assert slot is not None
            return Part(slot, rows, program.avals[v], tuple(own))

        for v in ends:
            if {*labels_of(plan.rows[v]), *expand(plan.sums.get(v, ()))} != {*atoms}:
                raise Left("a value at its end is not of all rows")
        first = lambda read: (-len(labels_of(read[1])), read[0] not in self.product.ins)
        reads = sorted(plan.reads, key=first)
        parts = tuple([part(v, rows) for v, rows, _ in reads])
        lines = {v: program.line(v) for v in ends}  # the report names the first
        ends = sorted(ends, key=lambda v: "unknown" in lines[v])
        made = [part(v, without_words(plan.rows[v])) for v in ends]
        total = None if self.total is None else ends.index(self.total)
        factors = {e.index for e in self.factors}
        steps = [one for one in plan.order if one[0] in factors]
        summed = plan.slot(self.summed, plan.rows[self.summed]) if self.factors else None, steps
        shared = {l for p in parts for l in words_of(p.rows)}
        words = tuple([l for l in self._vocabularies.values() if l in shared])
        region = Region(plan, atoms, words, parts, tuple(made), total, summed, 4 * self.words)
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
            compute=functools.partial(computed, region, [v for v, *_ in reads]),
        )


class Queries(Search):
    """The region between the scores of an attention and their product with its values.

    Batch, heads and queries are its rows. The products are those of `jax.checkpoint`.
    """

    of_queries, chunks = True, "chunks of queries"
    what = "attention {rows} rows x {words} keys, heads of {summed}, {dtype}"

    def _is_searched(self, batches: int) -> bool:
        return batches > 0 and _is_large(self.program, self.logits)

    def _is_layer(self, product: Equation, followed: set[int]) -> bool:
        """Tells if a product ends the region: that of weights and values, which are read."""
        self.given |= {*product.ins} - followed
        sizes = [self.program.avals[v].size for v in (*product.outs, self.logits)]
        return WIDER * sizes[0] <= sizes[1]


def found(
    program: Program, live: set[int], wanted: set[int], quantization: Any
) -> Iterator[Site | tuple[int, str]]:
    """Yields the regions of a program; a value and the reason where one is left.

    Args:
      live: the values that it needs without losses' sites.
      wanted: those that it needs beside all other sites.
    """
    live = read_by_rules(program, live)
    served: set[int] = set()
    for product in program.equations:
        if product.name != "dot_general" or product in program.shadowing:
            continue
        if not {*product.outs} <= wanted - served:
            continue
        searches = _searched(program, live, product)
        both = _both_ways(program, searches)
        for one in [one for one in searches[: 1 + both] if one.is_known]:
            try:
                if not one.ends or one.left and not both:
                    raise Left(one.why or "its logits are read as a whole")
                if both and not on_cpu() and not _is_large(program, one.logits):
                    raise Left("cut along rows and along columns it takes longer")
                yield one.site(quantization)
                served |= {*one.sources}
            except Left as why:
                yield product.outs[0], str(why)


def _searched(program: Program, live: set[int], product: Equation) -> list[Search]:
    """Returns the search along a product's rows that serves, else those along either operand's."""
    searches: list[Search] = []
    kind = Queries if any(product.params["dimension_numbers"][1]) else Search
    for right in (True, False):
        with contextlib.suppress(_NoLogits, Left):
            searches.append(one := kind(program, live, product, right))
            if one.serves:
                return [one]
    return searches if kind is Search else []  # else the attention's own row says why


def _is_large(program: Program, scores: int) -> bool:
    aval = program.avals[scores]
    return aval.size * aval.dtype.itemsize > LARGEST_SCORES["cpu" if on_cpu() else "others"]


def _both_ways(program: Program, searches: Sequence[Search]) -> bool:
    """Tells if a product's rows and its columns are cut, each for the values at their ends.

    So it is in the contrastive losses of pairs; the product is computed for each.
    """
    if len(searches) < 2:
        return False
    first, second = searches
    second.ends = [v for v in second.ends if v not in first.ends]
    live = needed_beside(program, [*first.ends, *second.ends])
    return bool(second.ends) and not live & {*first.wide, *second.wide}


def _names(eqn: Any) -> set[str]:
    """Returns the names of an equation, and of those of the programs that it calls."""
    inner = eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr")
    return {eqn.primitive.name}.union(*map(_names, inner.eqns if inner else ()))


_OF_LOSSES = frozenset("exp exp2 log log1p logistic argmax argmin top_k sort".split())
_OF_HINGES = frozenset(("gather", "reduce_max"))  # of layers, too, where logits are needed
_HIDDEN = 64  # how many times larger logits are than a product of them
