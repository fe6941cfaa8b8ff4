"""Rows of attention that see nothing: one of them, evaluated by the function's own equations.

Masks, and biases of -inf, may hide all keys of a row. Its weights are then whatever rounding makes
of the numbers in their place: exp(c - c) / n is 1 / n, 0 / 0 is NaN, exp(c - (c + log n)) is 1
where c absorbs the logarithm. So the equations are cut to one row (`rows.py`), and NumPy evaluates
them and their derivative, as JAX has it, in the program's dtypes, of numbers drawn at random.
`kind_of` returns the kind of row that all of these are.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...native.jaxpr import JIT, evaluate
from .constants import ELEMENTWISE, RULES, Known
from .forms import Form
from .labels import fresh
from .plan import Plan
from .rows import Chunk
from .scores import ScoreForms
from .sites import Left

ABSORBING = 1e16
"""Scores beside a number as large are rounded away in float64, too."""
LARGEST_STEP = 16
"""A sum with scores that are rounded to multiples of more than this has nothing left of them."""

Hides = Mapping[int, Any]
"""By the number of a mask, the keys that it hides; one that is not there hides none."""


def kind_of(
    forms: ScoreForms, value: int, form: Form, keys: int, sees: bool, infinite: Set[int]
) -> Any:
    """Returns what an attention's rows are that see nothing: `rows` of `attention.attend`.

    Args:
      value: the attention's result, with its Form.
      keys: their number.
      sees: masks leave a key to all rows.
      infinite: the biases that may be -inf.

    Raises:
      Left: where they are of no kind that is served.
    """
    row = _Row(forms, value, form, keys, infinite)
    try:
        key = sees, row.key()
        if key not in forms.unseen:  # once for all layers
            forms.unseen[key] = _found(row, form, sees)
        return forms.unseen[key]
    except TypeError:  # parameters that cannot be hashed
        return _found(row, form, sees)


def _found(row: "_Row", form: Form, sees: bool) -> Any:
    finite = [m for m in form.base.masks if m.fill > -math.inf]
    added = max([-m.fill for m in finite if m.added], default=0.0)
    step = added * _eps(jnp.promote_types(row.dtype, jnp.float32))
    absorbs = added >= ABSORBING or row.infinite and step >= LARGEST_STEP
    # Scores like a number that is written show that it replaces them. Sums with a number that is
    # added are exact where scores are multiples of its rounding.
    unit = max(1.0, 4 * added * _eps(row.dtype)) if added and not absorbs else 0.0
    centres = {0.0} if added else {0.0, *[sign * m.fill for m in finite for sign in (-1, 1)]}
    found = []
    for hides, off in row.patterns(sees):
        hidden = np.any([~row.every, *hides.values()], 0)
        for centre in sorted(centres):
            given = row.drawn(hides, off, centre, unit)
            found.append((row.computed(given), given, hidden, off))
    number = next((row.weight(got) for got, _, hidden, _ in found if hidden.all()), 0.0)
    for kind in (number, "written", "absorbed" if absorbs else "shifted"):
        if all([row.agrees(kind, *one) for one in found]):
            return kind
    raise Left("its rows that see nothing are neither one number, nor a softmax, with gradients")


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


class _Row:
    """The equations between scores and an attention's result, of one row.

    Masks that they read have the numbers of a plan: one of queries and of keys has two.

    Attributes:
      dtype: the scores'.
      every: all keys.
      infinite: the biases that may be -inf.
    """

    def __init__(self, forms: ScoreForms, value: int, form: Form, keys: int, infinite: Set[int]):
        program, mixed, dropout, masks = forms.program, form.mixed, form.dropout, form.base.masks
        assert mixed is not None
        self._base, self._keys, self.infinite = form.base, keys, infinite
        self.every, self._random = np.ones(keys, bool), np.random.default_rng(0)
        self._scores, self._values = form.base.dot.outs[0], mixed.product.ins[mixed.side]
        self.dtype = program.avals[self._scores].dtype
        self._factor, kept = (dropout.factor, dropout.masks) if dropout else (1.0, ())
        self._keep = {v: keep for v, _, keep in kept} | {m.value: m.keep for m in masks}
        self._biases = {v: factor for v, _, factor in form.base.biases}
        moving = {self._scores, self._values, *self._biases}
        self._plan = plan = Plan(program, lambda v, rows: v not in moving and v not in self._keep)
        plan.need([(value, rows := fresh(program.avals[value].shape))])
        one = Chunk(defaultdict(lambda: 1), defaultdict(int))
        self._run = lambda given: plan.run(given, one)[plan.slot(value, rows) or 0]
        part = lambda v, rows: (one.shape(rows, program.avals[v].shape), program.avals[v].dtype)
        self._types = {i: part(v, rows) for v, rows, i in plan.reads}
        self._moving = {v: i for v, _, i in plan.reads if v in moving}
        self._masks = [i for v, _, i in plan.reads if v in {m.value for m in masks}]
        read = [v for v, *_ in plan.reads]
        if (
            not {self._scores, self._values, *[m.value for m in masks]} <= {*read}
            or not {*read} <= moving | self._keep.keys()
            or len([v for v in read if v in moving]) > len(self._moving)  # in two layouts
            or any(m.keep != self._keep[m.value] for m in masks)  # a mask and its complement
            or not {math.prod(shape) for shape, _ in self._types.values()} <= {1, keys}
        ):
            raise Left("rows that may see nothing are made of more than scores, masks and biases")

    def key(self) -> Any:
        """Returns what tells its equations, and what they read, from those of other rows."""
        steps = [(s.equation, *i, *o) for _, s, i, o in self._plan.order]
        steps = [(e.name, *e.params.items(), *slots) for e, *slots in steps]
        consts = {i: np.asarray(x).tolist() for i, x in self._plan.consts.items()}
        base, of = self._base, {i: v for v, _, i in self._plan.reads}
        roles = [
            (i, v == self._scores, self._keep.get(v), self._biases.get(v), v in self.infinite)
            for i, v in of.items()
        ]
        fills = [(m.fill, m.added) for m in base.masks]
        more = self._types, self._masks, fills, base.scale, base.inner, self._factor
        return tuple(steps), str((consts, roles, *more))

    @functools.cached_property
    def _program(self) -> Any:
        """The value and its derivative, as JAX has it."""

        def both(*arrays: Any) -> Any:
            given = dict(zip(self._types, arrays))
            moving = self._moving.values()
            run = lambda *some: self._run(given | dict(zip(moving, some)))
            y, pull = jax.vjp(run, *[given[i] for i in moving])
            return y, *pull(jnp.ones_like(y))

        types = [jax.ShapeDtypeStruct(*each) for each in self._types.values()]
        return jax.make_jaxpr(both)(*types)

    @functools.cached_property
    def _eps(self) -> float:
        dtypes = [v.aval.dtype for eqn in self._program.eqns for v in eqn.outvars]
        return max([_eps(d) for d in dtypes if jnp.issubdtype(d, jnp.floating)])

    def _of_keys(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Returns an array of keys in the shape of an array of the row; the first for one key."""
        return x[: math.prod(shape)].reshape(shape)

    def patterns(self, sees: bool) -> Iterator[tuple[Hides, Any]]:
        """Yields what masks hide, and where biases are -inf, in rows that may see nothing."""
        every, place = self.every, np.arange(self._keys)
        whole = [i for i in self._masks if math.prod(self._types[i][0]) == self._keys]
        shared = lambda count: {i: place % count == n for n, i in enumerate(whole)}
        if not sees:
            yield dict.fromkeys(self._masks, every), ~every
            yield from (({i: every}, ~every) for i in self._masks)
            if len(whole) > 1:
                yield shared(len(whole)), ~every
        if self.infinite:
            yield {}, every
            if self._keys > len(whole) > 0:
                off = place % (len(whole) + 1) == len(whole)
                yield shared(len(whole) + 1), off
                yield shared(len(whole) + 1), every
                yield from (({i: ~off}, off) for i in whole)
            if not sees:
                yield dict.fromkeys(self._masks, every), place % 2 == 1

    def drawn(self, hides: Hides, off: Any, centre: float, unit: float) -> dict[int, Any]:
        """Returns a row's arrays; scores about a number, or with biases multiples of a unit."""
        base, arrays = self._base, {}
        factors = {self._scores: base.scale * (base.inner or 1.0), **self._biases}
        for v, _, i in self._plan.reads:
            shape, dtype = self._types[i]
            x = self._random.uniform(-0.45, 0.45, shape)
            if v in self._keep:
                x = self._of_keys(hides.get(i, ~self.every), shape) ^ self._keep[v]
            elif v in factors:
                most = float(jnp.finfo(dtype).max) / 16
                x = np.rint(4 * x) * unit if unit else x + centre * (v == self._scores)
                x = np.clip(x / factors[v], -most, most)
            if v in self.infinite and (x.size > 1 or off.all()):
                x = np.where(self._of_keys(off, shape), -np.inf, x)
            arrays[i] = x.astype(dtype)
        return arrays

    def computed(self, given: Mapping[int, Any]) -> dict[int, Any]:
        """Returns a row's value, as -1, and the gradients of its arrays."""
        with np.errstate(all="ignore"):
            found = evaluate(self._program, [*given.values()], _computed)
        return dict(zip([-1, *self._moving], [_flat(x) for x in found]))

    def weight(self, got: Mapping[int, Any]) -> float:
        """Returns the first value's weight, without dropout; a mean without its rounding."""
        found, mean = float(got[self._values][0]) / self._factor, 1 / self._keys
        return mean if abs(found - mean) <= 4 * self._eps * mean else found

    def agrees(self, kind: Any, got: Any, given: Any, hidden: Any, off: Any) -> bool:
        """Tells if a row is of a kind, with its gradients."""
        x, base = {v: _flat(given[i]) for v, i in self._moving.items()}, self._base
        s, v, inner = x[self._scores], x[self._values], base.inner or 0.0
        capped = np.tanh(inner * s) if inner else s
        slope = base.scale * inner * (1 - capped**2) if inner else base.scale
        e = base.scale * capped + sum(f * x[b] for b, f in self._biases.items() if b in x)
        moves = kind in ("shifted", "absorbed")
        with np.errstate(all="ignore"):
            if isinstance(kind, str):
                e = np.where(~off if moves else hidden, e if kind == "shifted" else 0, -np.inf)
                w = np.exp(e - e.max())
                w *= self._factor / w.sum()
            else:
                w = np.full(self._keys, kind * self._factor if hidden.all() else np.nan)
        if np.isnan(w).all() and off.any():  # of a NaN, gradients are too, and those of more keys
            return bool(np.isnan(got[-1]).all())
        y = w @ v
        moved = w * (v - y / self._factor) if moves else np.zeros(self._keys)
        want = {b: moved * f for b, f in self._biases.items()}
        want |= {-1: y, self._values: w, self._scores: moved * slope}
        for name, x in got.items():
            wanted = want[name] if len(x) == self._keys else want[name].sum(keepdims=True)
            near = np.abs(x - wanted) <= 16 * self._eps * max(np.abs(w).max(), np.abs(wanted).max())
            same = near if moves or name in (-1, self._values) else x == wanted
            if not (same | np.isnan(x) & np.isnan(wanted)).all():
                return False
        return True


def _flat(x: Any) -> Any:
    return np.asarray(x, np.float64).reshape(-1)


# ---------------------------------------------------------------- equations in NumPy


def _computed(eqn: Any, given: list[Any]) -> list[Any]:
    """Returns the results of an equation as NumPy has them."""
    name, params = eqn.primitive.name, eqn.params
    if name in JIT:
        return evaluate(params["jaxpr"], given, _computed)
    (out,), arrays = eqn.outvars, [np.asarray(x, v.aval.dtype) for x, v in zip(given, eqn.invars)]
    if name in ELEMENTWISE:
        y = ELEMENTWISE[name][0](*arrays)
    elif name in _RULES:
        y = _RULES[name](params, *[_wide(x) for x in arrays])
    elif name in RULES and (found := RULES[name](params, out.aval, *map(Known, arrays))):
        y = found.x
    else:
        raise Left(f"rows that may see nothing are computed by {name}")
    return [np.asarray(y).astype(out.aval.dtype)]


def _wide(x: Any) -> Any:
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _product(p: Mapping[str, Any], a: Any, b: Any) -> Any:
    (contracted, batch), names = p["dimension_numbers"], "abcdefghijklmnopqrstuvwxyz"
    own = [[*names[: a.ndim]], [*names[a.ndim : a.ndim + b.ndim]]]
    for i, j in (*zip(*contracted), *zip(*batch)):
        own[1][j] = own[0][i]
    gone = {own[0][i] for i in (*contracted[0], *batch[0])}
    out = [own[0][i] for i in batch[0]] + [n for n in own[0] + own[1] if n not in gone]
    return np.einsum(f"{''.join(own[0])},{''.join(own[1])}->{''.join(out)}", a, b)


_reduced = lambda reduce: lambda p, x: reduce(x, axis=tuple(map(int, p["axes"])))
_RULES = {
    "add_any": lambda p, a, b: a + b,
    "dot_general": _product,
    "integer_pow": lambda p, x: x ** p["y"],
    "name": lambda p, x: x,
    "reduce_and": _reduced(np.all),
    "reduce_max": _reduced(np.max),
    "reduce_or": _reduced(np.any),
    "reduce_sum": _reduced(np.sum),
    "tanh": lambda p, x: np.tanh(x),
}
