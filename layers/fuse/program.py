"""A traced function as one list of equations, that can be evaluated with parts of it replaced.

Jitted functions are taken apart, equal equations are merged, and values that depend on constants
alone can be asked for as NumPy arrays. Values are numbers: indices into `avals`. The bodies of
loops, branches, remat and shard_map are programs of their own.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Var  # pyright: ignore[reportPrivateImportUsage]

from ...native import jax_private
from ...native.jaxpr import JIT, REMAT, line_of, rebuilt, results_of
from ...native.kernel import bound
from ..dense import epilogue
from ..dense.matmul import product_p, shared
from .closure import UNKNOWN, Closure, key_of
from .constants import RULES, SAME_ELEMENTS, Known, evaluated, known, slack, uniform
from .sites import Read, Site, SiteFailed, Theirs, explained, fitted, plain_type

CALLS = "custom_jvp_call", "custom_vjp_call", epilogue.forward.primitive.name
LARGEST_CONSTANT = 1 << 22  # elements of a constant array that is worth computing to read it


Facts = Generator[tuple[Any, int], Any, Any]
"""How a domain finds a value's fact: it yields (domain, value) and is sent the fact of each."""


@dataclasses.dataclass(eq=False)
class Equation:
    """An equation whose operands and results are numbers of values.

    Attributes:
      name, params: its primitive's.
      ins: its operands as rules read them, all of the result's shape where it is element-wise.
      operands: those that it is evaluated with, which JAX may broadcast.
      scope: the named scopes around it, those of the jitted functions that it was taken out of too.
      calls: the equations that call these functions, the outermost first.
    """

    eqn: Any
    name: str
    params: Mapping[str, Any]
    index: int
    ins: list[int]
    operands: list[int]
    scope: Any
    outs: list[int] = dataclasses.field(default_factory=list)
    calls: tuple[Any, ...] = ()


class Program:
    """The equations of a traced function.

    Args:
      closed: its ClosedJaxpr.
      known: for each operand its value, where that is a constant, else None.
      origins: for each operand which argument of the user's function it is a part of, where no
        equation has changed it; None for others.
      depends: for each operand what arguments it is computed from; its own origin by default.
      names: the origins of arrays that the function closes over, by their keys.
      within: the names of the equations that this is a body of.
    """

    calls: Sequence[str] = CALLS
    """The names of calls whose equations are read."""

    def __init__(
        self,
        closed: Any,
        known: Sequence[Any] = (),
        origins: Sequence[Any] = (),
        depends: Sequence[frozenset[Any]] = (),
        within: str = "",
        names: Closure | None = None,
    ):
        jaxpr = closed.jaxpr
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.maker: dict[int, Any] = {}  # the Equation that makes each value
        self.given: dict[int, Any] = {}  # values of constants and literals, tracers among them
        self.bodies: dict[Equation, dict[Any, Program]] = {}  # by parameter and place
        self.within = within
        self.outer: Program | None = None  # whose equation this is a body of
        self.chosen: Mapping[int, str] | None = None  # by `choices`, once it is asked
        self.sites: dict[int, Site] = {}
        # Equations within calls are read, not evaluated: `shadowing`. What makes a call's result
        # within is its shadow where the derivatives are equal but for rounding.
        self.shadows: dict[int, int] = {}
        self.shadowing: set[Equation] = set()
        self._calls: list[Any] = []  # of jitted functions, around what is read now
        self._shadow = 0  # the call that is read now, from 1; 0 for none
        self._consts: dict[int, Any] = {}
        self.facts: dict[tuple[Any, Any], Any] = {}  # by domain and value
        self._same: dict[Any, Any] = {}
        self.inputs = [self._new(v.aval) for v in jaxpr.invars]
        self.origins = {v: o for v, o in zip(self.inputs, origins) if o is not None}
        self._consts |= {v: c for v, c in zip(self.inputs, known) if c is not None}
        depends = depends or [frozenset() if o is None else frozenset([o]) for o in origins]
        self.made_of: dict[int, frozenset[Any]] = dict(zip(self.inputs, depends))
        self.names: Any = names or {}
        self.results = self._add(jaxpr, closed.consts, self.inputs, None)
        self.readers: dict[int, list[Equation]] = {}
        for equation in self.equations:
            for v in dict.fromkeys(equation.ins):  # a call reads what its equations within do
                if equation not in self.shadowing or self.maker.get(v) in self.shadowing:
                    self.readers.setdefault(v, []).append(equation)

    # ---------------------------------------------------------------- reading

    def inlines(self, eqn: Any) -> bool:
        """Tells if a jitted function may be taken apart, and evaluated as a part of its caller."""
        given = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in given)

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _literal(self, x: Any) -> int:
        traced, aval = isinstance(x, Tracer), jax.typeof(x)
        key = id(x)
        if not traced and aval.ndim == 0 and isinstance(x, np.generic | np.ndarray | int | float):
            key = type(x), aval, np.asarray(x, aval.dtype).tobytes()  # the mesh is aval's
        if key not in self._same:
            v = self._same[key] = self._new(aval)
            self.given[v] = x
            if aval.ndim or jnp.issubdtype(aval.dtype, jax.dtypes.extended):  # no mere number
                self.origins[v] = self.names.get(key_of(x), UNKNOWN)
                self.made_of[v] = frozenset([self.origins[v]])
            if isinstance(aval, ShapedArray) and not traced:  # what a Ref holds changes
                self._consts[v] = lambda: known(np.asarray(x, aval.dtype))
        return self._same[key]

    def _add(self, jaxpr: Any, consts: Sequence[Any], ins: Sequence[int], scope: Any) -> list[int]:
        """Takes a program's equations over; returns the values that are its results."""
        env = dict(zip(jaxpr.invars, ins, strict=True))
        env |= {v: self._literal(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        for eqn in jaxpr.eqns:
            operands = [self._literal(a.val) if hasattr(a, "val") else env[a] for a in eqn.invars]
            within = eqn.source_info.name_stack
            if scope is not None:
                within = scope + within if within.stack else scope
            if eqn.primitive.name in JIT and self.inlines(eqn):
                inner = eqn.params["jaxpr"]
                self._calls.append(eqn)
                outs = self._add(inner.jaxpr, inner.consts, operands, within)
                self._calls.pop()
            else:
                outs = self._equation(eqn, operands, within)
            env |= zip(eqn.outvars, outs, strict=True)
        return [self._literal(a.val) if hasattr(a, "val") else env[a] for a in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[int], scope: Any) -> list[int]:
        """Adds an equation; returns its results, which may be operands or an equal equation's."""
        if (same := self._same_as(eqn, ins)) is not None:
            return same
        name, params = eqn.primitive.name, eqn.params
        if name == "convert_element_type" and any(map(_is_narrow, (*eqn.invars, *eqn.outvars))):
            name = "reduce_precision"
        operands, ins = ins, self._broadcast(eqn, name, ins, scope)
        equation = Equation(eqn, name, params, len(self.equations), ins, operands, scope)
        equation.calls = (*self._calls,)
        if not eqn.effects and name not in _NEVER_MERGED:
            with contextlib.suppress(TypeError):  # parameters that cannot be hashed
                key = self._shadow, eqn.primitive.name, *operands, frozenset(eqn.params.items())
                if (outs := self._same.get(key)) is not None:
                    return outs
                self._same[key] = equation.outs
        equation.outs += [self._new(v.aval) for v in eqn.outvars]
        inside, kind = inside_of(eqn) if name in self.calls else (None, "")
        if inside is not None and kind != "product":
            outs = self._add_within(inside, equation)
            self.shadows |= zip(equation.outs, outs) if kind == "same" else ()
        equation.index = len(self.equations)
        self.equations.append(equation)
        if self._shadow:
            self.shadowing.add(equation)
        arguments = frozenset().union(*[self.made_of.get(v, ()) for v in ins])
        self.made_of |= dict.fromkeys(equation.outs, arguments)
        self.maker |= dict.fromkeys(equation.outs, equation)
        if name in RULES and self._consts.keys() >= {*ins}:
            self._consts[equation.outs[0]] = equation
        if kind == "product":
            self._add_within(inside, equation)
            self.equations[-1].outs[:] = equation.outs
        if name in _WITH_BODIES and not self._shadow:
            self._add_bodies(equation, arguments)
        return equation.outs

    def _same_as(self, eqn: Any, ins: list[int]) -> list[int] | None:
        """Returns the operands that are an equation's results; None where it computes some."""
        name, out = eqn.primitive.name, plain_type(eqn.outvars[0].aval) if eqn.outvars else None
        passed: list[int] = []
        if name == "select_n" and len(ins) == 3:  # by a constant, as in jnp.var
            which = self.number(ins[0])
            passed = [ins[1 + bool(which)]] if which in (0, 1) else []
        elif name == "mul":  # by 1
            passed = [v for v, other in (ins, ins[::-1]) if self.number(other) == 1]
        elif self._shadow and name in _OF_OUR_PRODUCTS:
            return ins
        return next(([v] for v in passed if plain_type(self.avals[v]) == out), None)

    def _add_bodies(self, equation: Equation, arguments: frozenset[Any]) -> None:
        """Reads the bodies of a loop, a branch, remat or shard_map, with what is known around."""
        name = equation.name
        for key, place, closed, kept in inner_programs(name, equation.params, equation.ins):
            known = [
                functools.partial(self.known, v) if always and v in self._consts else None
                for v, always in kept
            ]
            origins = [self.origin(v) for v, _ in kept]
            depends = [self.made_of.get(v, frozenset()) if v >= 0 else arguments for v, _ in kept]
            within = f"{self.within} in {name}"
            body = type(self)(closed, known, origins, depends, within, self.names)
            body.outer = self
            self.bodies.setdefault(equation, {})[key, place] = body

    def _add_within(self, closed: Any, call: Equation) -> list[int]:
        """Adds the equations within a call, which are read and not evaluated."""
        around, self._shadow = self._shadow, len(self.equations) + 1
        try:
            return self._add(closed.jaxpr, closed.consts, call.ins, call.scope)
        finally:
            self._shadow = around

    def is_within(self, v: int) -> bool:
        """Tells if a value is made within a call, which nothing outside can read."""
        return self.maker.get(v) in self.shadowing

    def _broadcast(self, eqn: Any, name: str, ins: list[int], scope: Any) -> list[int]:
        """Returns an element-wise equation's operands, each of its result's shape.

        JAX broadcasts scalars and dimensions of size 1 within such equations. No rule has to know:
        it reads an equation of its own that does so, which is evaluated where a site needs it.
        Scalars that are constants stay as they are, because a number has no dimensions to mistake.
        """
        if name not in _BROADCASTING:
            return ins
        out = eqn.outvars[0].aval
        whole = list(ins)
        for i, v in enumerate(ins):
            aval = self.avals[v]
            if aval.shape == out.shape or not aval.ndim and self.number(v) is not None:
                continue
            dims = tuple(range(out.ndim - aval.ndim, out.ndim))
            params = dict(shape=out.shape, broadcast_dimensions=dims, sharding=None)
            result = Var(out.update(dtype=aval.dtype, weak_type=aval.weak_type))
            explicit = eqn.replace(
                primitive=jax.lax.broadcast_in_dim_p,
                params=params,
                invars=[eqn.invars[i]],
                outvars=[result],
            )
            (whole[i],) = self._equation(explicit, [v], scope)
        return whole

    # ---------------------------------------------------------------- facts

    def fact(self, domain: Callable[["Program", int], Facts], v: int) -> Any:
        """Returns what a domain finds of a value, which is kept: each is asked once.

        The domains of the values that it is made of are asked first, without recursion: programs
        are longer than Python's stack, and values are read in more places than one.
        """
        facts, key = self.facts, (domain, v)
        if key in facts:
            return facts[key]
        stack, answer = [(key, domain(self, v))], None
        while stack:
            key, steps = stack[-1]
            try:
                asked = steps.send(answer)
            except StopIteration as done:
                answer = facts[key] = done.value
                stack.pop()
                continue
            if asked not in facts:
                stack.append((asked, asked[0](self, asked[1])))
            answer = facts.get(asked)
        return answer

    # ---------------------------------------------------------------- constants

    def known(self, v: int) -> Known | None:
        """A value that depends on constants alone, in its dtype; None for others."""
        return self.fact(_constant, v) if v in self._consts else None

    def const(self, v: int) -> Any:
        """A value that depends on constants alone, as a NumPy array; None for others."""
        found = self.known(v)
        return None if found is None else found.x

    def slack(self, v: int) -> float:
        """Returns the relative distance to a constant of the real numbers that it stands for: those
        that the narrowest dtype on its way rounds to it."""
        dtypes = [self.avals[v].dtype]
        while (made := self.maker.get(v)) is not None and made.name in SAME_ELEMENTS:
            v = made.ins[0]
            dtypes.append(self.avals[v].dtype)
        x = self.number(v)
        return max([slack(x, dtype) for dtype in dtypes]) if x else 0.0

    def uniform(self, v: int) -> Known | None:
        """The number that all elements of a constant are, in its dtype; None for others."""
        return self.fact(_uniform, v)

    def number(self, v: int) -> float | None:
        """The number that all elements of a constant are; None for others, and where no float is
        that number."""
        found = self.uniform(v)
        x = None if found is None else float(found.x)
        return x if found is not None and x == found.x.item() else None

    def made(self, v: int) -> tuple[Any, str]:
        """Returns the equation that makes a value, and its name; (None, "") of operands."""
        equation = self.maker.get(v)
        return equation, "" if equation is None else equation.name

    def origin(self, v: int) -> Any:
        """Returns the argument that a value is a part of, cast, cut, joined to others or laid out
        anew; else None."""
        return self.fact(_origin, v) if v >= 0 else None

    def root(self, v: int, passes: Callable[[Equation], bool]) -> int:
        """Goes back by first operands, as long as the equations pass."""
        while (made := self.maker.get(v)) is not None and made.ins and passes(made):
            v = made.ins[0]
        return v

    def is_scaled(self, made: Equation) -> bool:
        """Tells if an equation multiplies or divides by a number."""
        return made.name in ("mul", "div") and self.number(made.ins[1]) is not None

    # ---------------------------------------------------------------- evaluation

    def needed(self, wanted: Iterable[int], given: Mapping[int, Any], sites: Mapping[int, Site]):
        """Returns the values that have to be computed for those that are wanted."""
        live = set(wanted)
        for equation in reversed(self.equations):
            made = [v for v in equation.outs if self.maker[v] is equation]  # not by its call
            taken = [v for v in made if v in live and v not in given]
            if not taken and not equation.eqn.effects:
                continue
            for v in taken:
                if v in sites:
                    live.update(sites[v].reads)
            if equation.eqn.effects or not sites.keys() >= {*taken}:
                live.update(equation.operands)
        return live

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Returns the program's results, its sites computed by what replaces them."""
        env = self.given | dict(zip(self.inputs, operands, strict=True))
        done: set[Equation] = set()  # equations with effects: these happen once
        while True:
            try:
                return self.evaluate(env, self.results, self.sites, done)
            except SiteFailed:  # the user's own equations compute it
                self.sites = {v: site for v, site in self.sites.items() if not site.failed}

    def evaluate(
        self,
        env: dict[int, Any],
        wanted: Sequence[int],
        sites: Mapping[int, Site],
        done: set[Equation] | None = None,
    ) -> list[Any]:
        """Computes values from those in `env`, which gets what is computed."""
        done = set() if done is None else done
        live = self.needed(wanted, env, sites)
        for equation in self.equations:
            effects = equation.eqn.effects and equation not in done
            missing = [v for v in equation.outs if v in live and v not in env and v not in sites]
            if effects or missing:
                self._demand(equation.operands, env, sites)
                env |= zip(equation.outs, self._bind(equation, [env[v] for v in equation.operands]))
                done.add(equation)
        self._demand(wanted, env, sites)
        return [env[v] for v in wanted]

    def _demand(self, values: Iterable[int], env: dict[int, Any], sites: Mapping[int, Site]):
        """Computes sites where they are first read, and what they read."""
        stack = [v for v in values if v not in env]
        while stack:
            v = stack[-1]
            if v in env:
                stack.pop()
                continue
            site, made = sites.get(v), self.maker[v]
            missing = [r for r in (site.reads if site else made.operands) if r not in env]
            if missing:
                stack += missing
            elif site:
                env |= zip(site.outs, self._emit(site, env), strict=True)
            else:
                env |= zip(made.outs, self._bind(made, [env[r] for r in made.operands]))

    def _emit(self, site: Site, env: dict[int, Any]) -> list[Any]:
        made = self.maker[site.outs[0]]
        try:
            with self._around(made):
                results = site.compute(self._reader(site, env))
                pairs = zip(site.outs, results, strict=True)
                return [fitted(y, self.avals[v]) for v, y in pairs]
        except Exception as error:
            site.failed = explained(error)
            raise SiteFailed(error) from error

    def _reader(self, site: Site, env: dict[int, Any]) -> Read:
        """Returns how a site reads values: one that several share by a copy for each of them."""
        v = site.shares
        if v is None:
            return env.__getitem__
        if ~v not in env:  # no value has such a number
            count = len({each for each in self.sites.values() if each.shares == v})
            env[~v] = shared(env[v], count)
        own = env[~v].pop()
        return lambda u: own if u == v else env[u]

    @contextlib.contextmanager
    def _around(self, equation: Equation) -> Iterator[None]:
        """The line and the scopes of an equation, for profiles and for errors."""
        info = equation.eqn.source_info
        with jax_private.source(info.traceback, equation.scope), equation.eqn.ctx.manager:
            yield

    def _bind(self, equation: Equation, given: list[Any]) -> list[Any]:
        with self._around(equation):
            bodies = self.bodies.get(equation, {})
            replaced = lambda body: any(each.sites for each in body.all_programs())
            if runs := {at: body.run for at, body in bodies.items() if replaced(body)}:
                return rebuilt(equation.eqn, given, runs)
            try:
                return results_of(equation.eqn, given)
            except Exception as error:
                raise Theirs(error) from error

    def all_programs(self) -> Iterator["Program"]:
        """Yields this program and those of all bodies within it, but for what nothing reads."""
        yield self
        live = self.needed(self.results, {}, self.sites) if self.bodies else set()
        for equation, bodies in self.bodies.items():
            for body in bodies.values() if equation.eqn.effects or {*equation.outs} & live else ():
                yield from body.all_programs()

    def depends(self, v: int, on: Iterable[int]) -> bool:
        """Tells if a value is computed from others."""
        on = set(on)
        first = min((self.maker[o].index for o in on if o in self.maker), default=0)
        stack, seen = [v], set()
        while stack:
            v = stack.pop()
            if v in on:
                return True
            made = self.maker.get(v)
            if made is not None and made.index >= first and made not in seen:
                seen.add(made)
                stack += made.ins
        return False

    def is_random(self, v: int) -> bool:
        """Tells if a value is made of random numbers."""
        return self.fact(_random, v)

    def line(self, v: int) -> str:
        """Returns the named scopes and the user's line of what makes a value."""
        if (made := self.maker.get(v)) is None:
            return "its arguments"
        scopes = str(made.scope) if made.scope is not None else ""
        return f"{scopes} {line_of(made.eqn, *made.calls[::-1])}".strip()

    def described(self, equation: Equation) -> str:
        where = line_of(equation.eqn, *equation.calls[::-1])
        return f"{equation.params.get('name') or equation.name} at {where}"


# ---------------------------------------------------------------- domains


def _constant(g: Program, v: int) -> Facts:
    x: Any = g._consts.get(v)
    if x is None or g.avals[v].size > LARGEST_CONSTANT:
        return None
    if not isinstance(x, Equation):  # of outside
        try:
            return x()
        except Exception:  # an array of several hosts, say
            return None
    operands = []
    for u in x.ins:
        operands.append((yield _constant, u))
        if operands[-1] is None:
            return None
    return evaluated(x.name, x.params, g.avals[v], operands)


def _uniform(g: Program, v: int) -> Facts:
    made = g.maker.get(v)
    if made is None:
        x = (yield _constant, v) if v in g.given and v in g._consts else None  # from outside
        return None if x is None else x.uniform
    numbers, out = [], g.avals[v]
    for u in made.ins if len(made.outs) == 1 else ():
        numbers.append((yield _uniform, u))
        if numbers[-1] is None:
            return None
    if not numbers or not out.size:
        return None
    return uniform(made.name, made.params, out, numbers)


def _origin(g: Program, v: int) -> Facts:
    made, name = g.made(v)
    if made is not None and made.ins and (name in _PEELED or g.is_scaled(made)):
        return (yield _origin, made.ins[0])
    if made is not None and name in ("concatenate", "stack"):
        joined = None
        for u in reversed(made.ins):
            if (joined := (yield _origin, u)) is None:
                break
        return joined
    return g.origins.get(v) if jnp.issubdtype(g.avals[v].dtype, jnp.floating) else None


def _random(g: Program, v: int) -> Facts:
    made, name = g.made(v)
    if made is None or name in _RANDOM:
        return made is not None
    for u in made.ins:
        if (yield _random, u):
            return True
    return False


# ---------------------------------------------------------------- calls with own derivatives


def inside_of(eqn: Any) -> tuple[Any, str]:
    """Returns the program within a call that has its own derivative, or None, and what it says.

    "product": one of ours, whose last equation is a `dot_general`. That is added as another maker
    of the call's own result, so that whatever reads products takes it for any other.
    "same": a function of JAX, or an activation of ours, whose derivative is the equations'.
    "border": a user's, whose derivative is its own. Nothing is replaced in it, but what reads its
    operands within, such as the softmax of logits, is known.
    """
    name, params = eqn.primitive.name, eqn.params
    ours = name == epilogue.forward.primitive.name
    avals = tuple(v.aval for v in eqn.invars)
    closed = _defined(params["spec"], params["tree"], avals) if ours else params.get("call_jaxpr")
    if eqn.effects or closed is None or len(closed.jaxpr.invars) != len(avals):
        return None, ""
    eqns = closed.jaxpr.eqns
    if ours:
        return closed, "same"
    names = {inner.primitive.name for inner in eqns}
    if product_p.name in names and eqns[-1].primitive.name == "dot_general":
        return closed, "product"
    if any(name.startswith("normfuse_") for name in names):
        return None, ""
    own = name == "custom_jvp_call" and is_jaxs_own(eqn)
    return closed, "same" if own else "border"


@functools.lru_cache(maxsize=256)
def _defined(spec: Any, tree: Any, avals: tuple[Any, ...]) -> Any:
    """Returns the definition of an activation of ours; None on Explicit axes."""
    if any(aval.sharding.mesh.explicit_axes for aval in avals):
        return None
    return jax.make_jaxpr(bound(epilogue.define_forward, spec, tree=tree))(*avals)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A `custom_jvp_call`, equal to others of the same body and derivative."""

    eqn: Any = dataclasses.field(compare=False)
    body: Any
    derivative: Any
    avals: tuple[Any, ...]


def is_jaxs_own(eqn: Any) -> bool:
    """Tells if a function with a derivative of its own is one that JAX has, such as `softmax`.

    Names prove nothing: its program and that of its derivative have to be equal to JAX's. Then its
    equations say what it is, and their derivative is its derivative but for rounding.
    """
    avals = tuple(v.aval for v in eqn.invars)
    if len(eqn.outvars) != 1 or not avals or not jnp.issubdtype(avals[0].dtype, jnp.floating):
        return False
    body, derivative = eqn.params["call_jaxpr"], jax_private.derivative_of(eqn)
    is_jitted = [e.primitive.name in JIT for e in body.eqns] == [True]
    inner = body.eqns[0].params["jaxpr"] if is_jitted else body
    names = {e.primitive.name for e in inner.eqns}
    if names != {"max"} and not names >= {"exp", "div"}:  # functions within each other are long
        return False
    if not is_jitted or derivative is None:
        return _is_jaxs_own(eqn, avals)
    # JAX has one program of a jitted function and these types, as in 400 layers with a relu.
    return _is_known(_Call(eqn, inner, derivative, avals))


@functools.lru_cache(maxsize=64)
def _is_known(call: _Call) -> bool:
    return _is_jaxs_own(call.eqn, call.avals)


def _is_jaxs_own(eqn: Any, avals: Sequence[Any]) -> bool:
    bind = lambda *xs: eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(eqn.params))

    def text(function: Any) -> str:
        x = jax.ShapeDtypeStruct(avals[0].shape, avals[0].dtype)
        others = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals[1:]]
        both = lambda x, dx, *more: jax.jvp(lambda x: function(x, *more), (x,), (dx,))
        try:
            called = jax.make_jaxpr(function)(x, *others).eqns[-1].params["call_jaxpr"]
            return f"{called}{jax.make_jaxpr(both)(x, x, *others)}"
        except Exception:  # it takes other operands
            return ""

    body = eqn.params["call_jaxpr"].jaxpr
    axes = next((tuple(map(int, e.params["axes"])) for e in body.eqns if "axes" in e.params), ())
    softmax = lambda axis: lambda x, *more: jax.nn.softmax(x, axis, *more)
    batches: list[Any] = [jax.vmap] * len(avals[0].shape)
    first: Any = jax.nn.relu
    relus = itertools.accumulate([first, *batches], lambda relu, vmap: vmap(relu))
    candidates = map(softmax, (axes, axes[0])) if axes else relus if len(body.eqns) == 1 else ()
    theirs = text(bind)
    return bool(theirs) and theirs in map(text, candidates)


# ---------------------------------------------------------------- equations

_PEELED = frozenset(
    "broadcast_in_dim convert_element_type copy dynamic_slice expand_dims name normfuse_kernel "
    "pcast pvary reduce_precision reshape sharding_constraint slice squeeze stop_gradient "
    "transpose".split()
)
_RANDOM = "random_bits", "rng_bit_generator", "threefry2x32"
_WITH_BODIES = ("while", "scan", "cond", "shard_map", *JIT, *REMAT)
_BROADCASTING = frozenset(
    "add add_any and atan2 complex div eq ge gt le lt max min mul ne nextafter or pow rem "
    "shift_left shift_right_arithmetic shift_right_logical sub xor".split()
)
_OF_OUR_PRODUCTS = product_p.name, "reshard"  # around their operands; operations gather kernels
_NEVER_MERGED = ("optimization_barrier", "rng_uniform", *_WITH_BODIES)


def is_precise(product: Equation, wide: bool = False) -> bool:
    """Tells if a product asks for a precision or an algorithm; if `wide`, beyond 16 bits alone."""
    if wide and all(v.aval.dtype.itemsize <= 2 for v in product.eqn.invars):
        return False
    asked = product.params["precision"]
    each = asked if isinstance(asked, tuple) else (asked,)
    return any(one not in (None, jax.lax.Precision.DEFAULT) for one in each)


def _is_narrow(v: Any) -> bool:
    """Tells if a float has 8 bits at most: a cast to it quantizes, and is no mere rounding."""
    return jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.dtype.itemsize == 1


def inner_programs(
    name: str, params: Mapping[str, Any], ins: Sequence[int]
) -> Iterator[tuple[str, int, Any, list[Any]]]:
    """Yields (parameter, place, program, operands) of the bodies in which parts may be replaced.

    Each operand is (value, whether it has that value all the time); a loop's slices have not, yet
    they are parts of that value. What a loop carries, first this value, is (~value, False). What a
    gradient computes again is none.
    """
    whole = [(v, True) for v in ins]
    if name == "scan":
        count, carried = jax_private.scan_counts(params, len(ins))
        first, parts = ins[count : count + carried], [(v, False) for v in ins[count + carried :]]
        operands = [*whole[:count], *[(~v, False) for v in first], *parts]
        yield "jaxpr", 0, params["jaxpr"], operands
    elif name == "while":
        first, count = params["cond_nconsts"], params["body_nconsts"]
        carried = [(~v, False) for v in ins[first + count :]]
        yield "body_jaxpr", 0, params["body_jaxpr"], [*whole[first : first + count], *carried]
    elif name == "cond":
        for i, branch in enumerate(params["branches"]):
            yield "branches", i, branch, whole[1:]
    elif name in REMAT and not params["differentiated"]:
        yield "jaxpr", 0, ClosedJaxpr(params["jaxpr"], ()), whole
    elif name == "shard_map":
        yield "jaxpr", 0, ClosedJaxpr(params["jaxpr"], ()), [(v, False) for v in ins]
    elif name in JIT:
        yield "jaxpr", 0, params["jaxpr"], whole
