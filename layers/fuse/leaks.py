"""Values that a call leaves in Python objects while it is traced: found, computed, and put back.

They belong to the trace, and outlive it. Python's garbage collector knows who holds such a value,
whatever kind of object that is and wherever it hangs. It takes its time, so it is asked only where
something refers to the trace after its end: a weak reference tells, and the number of references,
since rules of derivatives in the program refer to the trace that they were given to.
"""

import collections
import contextvars
import functools
import gc
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from ...native import jax_private
from ...native.jaxpr import held_by_rules
from .closure import attributes
from .program import Program

Place = tuple[Callable[[Any], Any], Any]
"""What writes into an object, and what stands there: a value of the trace, or a tuple of some."""
_DESCRIPTORS = types.MemberDescriptorType, types.GetSetDescriptorType


class Leaks:
    """The values of a trace that objects hold after its end.

    Args:
      closed: the traced program.
      trace: a weak reference to its trace.

    Attributes:
      program: the same, with these values after its results.
      refused: what holds one of them and cannot be changed, or "".
      in_rules: rules of derivatives in the program hold some of its values, which nothing replaces.
    """

    def __init__(self, closed: Any, trace: Any):
        self.program, self.refused, self.in_rules = closed, "", False
        self._tuples: dict[int, tuple[Any, ...]] = {}  # those that hold values, by their ids
        self._places: list[Place] = []
        self._atoms: dict[int, Any] = {}  # the values' variables in the program, by their ids
        if trace() is None:
            return
        rules = held_by_rules(closed)
        tracers = [x for x in rules.values() if isinstance(x, Tracer)]
        self.in_rules = any(jax_private.is_of(trace(), x) for x in tracers)
        if not self.in_rules and not _is_held_elsewhere(trace(), rules):
            return
        for generation in (1, 2):  # cycles that nothing holds
            gc.collect(generation)
            if trace() is None:
                return
        if tracers := jax_private.tracers_of(trace()):
            frozen = gc.get_freeze_count()
            gc.unfreeze()  # it does not see frozen objects, such as modules in a server
            self._search(tracers)
            self._add_results({id(t): t.val for t in tracers})
            if frozen:
                gc.freeze()

    def __len__(self) -> int:
        return len(self._atoms)

    def put(self, values: Sequence[Any]) -> None:
        """Writes values, those of the program's last results, in their places."""
        known = dict(zip(self._atoms, values, strict=True))

        def current(x: Any) -> Any:
            if id(x) in self._tuples and id(x) not in known:
                known[id(x)] = tuple.__new__(type(x), map(current, x))
            return known.get(id(x), x)

        places, self._places = self._places, []
        for write, x in places:
            write(current(x))

    def put_alone(self, arrays: Sequence[Any], effects: bool) -> None:
        """Writes them where the program's results are not wanted: nothing else of it runs.

        Values that take `effects` are left out, unless these may happen.
        """
        if self._places:
            graph = Program(self.program)
            wanted = graph.results[len(graph.results) - len(self) :]
            taking = {equation for equation in graph.equations if equation.eqn.effects}
            made = [v for equation in taking for v in equation.outs]
            if effects or not any(graph.depends(v, made) for v in wanted):
                env = graph.given | dict(zip(graph.inputs, arrays, strict=True))
                self.put(graph.evaluate(env, wanted, {}, taking))

    def _search(self, tracers: list[Any]) -> None:
        """Finds the places of tracers, and of the tuples that hold them."""
        wanted, held = {id(t): t for t in tracers}, set()
        level: list[Any] = [*tracers]
        ours = {id(each) for each in (tracers, wanted, level, self._tuples)}
        while level:
            holders = gc.get_referrers(*level)
            ours.add(id(holders))
            level.clear()
            for holder in [x for x in holders if id(x) not in ours]:
                held.update(map(id, gc.get_referents(holder)))
                if type(holder) is types.FrameType or id(holder) in wanted:
                    continue
                if issubclass(type(holder), tuple):
                    wanted[id(holder)] = self._tuples[id(holder)] = holder
                    level.append(holder)
                elif places := [*_places(holder, wanted)]:
                    self._places += places
                else:
                    self.refused = self.refused or _described(holder)
        if not held.issuperset(map(id, tracers)):
            self.refused = self.refused or "an object that Python's garbage collector cannot see"

    def _add_results(self, atoms: Mapping[int, Any]) -> None:
        """Lets the program return the values in places, in the order in which it computes them."""
        jaxpr, found = self.program.jaxpr, {id(x) for _, x in self._places}
        found |= {id(x) for each in self._tuples.values() for x in each}
        made = [*jaxpr.constvars, *jaxpr.invars, *[v for e in jaxpr.eqns for v in e.outvars]]
        order = {id(v): i for i, v in enumerate(made)}  # literals have none
        place = lambda i: order.get(id(atoms[i]), -1)
        self._atoms = {i: atoms[i] for i in sorted(found & atoms.keys(), key=place)}
        outvars = [*jaxpr.outvars, *self._atoms.values()]
        jaxpr = jaxpr.replace(outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())
        self.program = ClosedJaxpr(jaxpr, self.program.consts)


def _places(holder: Any, wanted: Mapping[int, Any]) -> Iterator[Place]:
    """Yields the places in an object where it holds what is wanted, and can be changed."""
    bound, kind = functools.partial, type(holder)
    if issubclass(kind, dict):
        write: Any = bound(dict.__setitem__, holder)
        if "__module__" in holder:  # a class's, which has to learn of a change
            owners = [x for x in gc.get_referrers(holder) if issubclass(type(x), type)]
            write = bound(type.__setattr__, owners[0]) if owners else write
        pairs: Any = [(bound(write, key), x) for key, x in dict.items(holder)]
    elif issubclass(kind, list | collections.deque):
        pairs = [(bound(kind.__setitem__, holder, i), x) for i, x in enumerate(holder)]
    elif kind.__name__.startswith("hamt"):
        pairs = [(variable.set, x) for variable, x in contextvars.copy_context().items()]
    else:
        pairs = [(write, x) for _, x, write in attributes(holder, _DESCRIPTORS)]
    for write, x in pairs:
        if id(x) in wanted:
            with suppress(AttributeError, TypeError):  # it is read-only
                write(x)
                yield write, x


def _is_held_elsewhere(x: Any, holders: Mapping[int, Any]) -> bool:
    """Tells if there are more references to an object than those of `holders` and its values."""
    nothing_holds = object()
    count = sys.getrefcount(x) - sys.getrefcount(nothing_holds)
    held = gc.get_referents(holders, *holders.values())
    return count != sum(map(operator.is_, held, itertools.repeat(x)))


def _described(x: Any) -> str:
    """Returns the kind and the name of an object."""
    with suppress(Exception):
        return f"the {type(x).__qualname__} {x.__qualname__}"
    return f"an object of type {type(x).__qualname__}"
