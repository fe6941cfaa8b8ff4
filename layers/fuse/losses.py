"""Losses in a program: numbers of each row of logits, and what is added up of them, without logits.

A loss begins with log-sum-exps and picked elements of logits, one for each row. What follows are
the function's own equations, of few numbers. Where they lead row by row to one total that is
differentiated, they are a part of the operation, which computes its gradients at once.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...native.jaxpr import JIT, evaluate, results_of
from ..core.op import equally_varying
from ..cross_entropy.linear import Options, best_words, loss_of_rows, match_spec
from ..cross_entropy.op import Total, aligned_words
from ..quantization.quantize import fits
from .attention import MASKED, times
from .constants import ARITHMETIC
from .forms import Form, Scores, Term
from .labels import Labels, arrange, atoms, expand, size
from .plan import Plan, before_factors, needed_beside, only_end, read_by_rules
from .products import unfit
from .program import Program
from .rows import Chunk, Rows, latest
from .scores import Operands, ScoreForms
from .sites import Left, Read, Site, called, said

SMALLEST = 1024
"""Fewer classes than these are no vocabulary: their logits are small, and stay."""
_ARGMAX = ", argmax"
_SELECTING = "select_n", "clamp"


class Logits:
    """The logits that losses are of: x · kernel, what is added to them and what replaces them.

    Args:
      counted: the labels of the losses' rows.

    Attributes:
      of: their product: x is cut to `rows` and multiplied by `factor`, and the kernel is
        `transposed` where it is stored (vocabulary, features).
      hidden: the words whose logits a mask replaces, and the number that it writes; None.
      reads: what they are computed from.
      why: why gradients are not in FP8, if these are asked for; "".

    Raises:
      Left: where they have to stay as they are, with the reason.
    """

    def __init__(
        self, forms: ScoreForms, base: Scores, axis: Any, counted: Labels, quantization: Any
    ):
        g, found = forms.program, Operands(forms, base, axis, scale=False)
        words, contract = found.axis, found.contract
        self.of, self.vocabulary = found, size(words)
        if self.vocabulary < SMALLEST:
            raise Left(f"{self.vocabulary} classes only")
        self.hidden = _hidden(g, base, words)
        # On a mesh devices would have to exchange what `_unread` reads.
        self.hides_numbers = bool(self.hidden) and g.avals[found.w[0]].sharding.mesh.empty
        order, have = atoms(found.w[1]), {*atoms(found.x[1])}
        self.transposed = order == (*words, *contract)
        kernel_to = (words, contract) if self.transposed else (contract, words)
        if order != (*kernel_to[0], *kernel_to[1]) or any(l.free for l in order):
            raise Left("its kernel is not one of the vocabulary's words and the features")
        if {*atoms(found.sides[found.right])} != {*order} or have & {*order} != {*contract}:
            raise Left("its product is not of rows and the kernel")
        whole = [a for a in atoms(found.sides[found.left]) if a not in contract]
        cuts = {l.cut[0]: l for l in counted if l.cut}
        self.rows = tuple(cuts.get(a, a) for a in whole)
        if {*counted} != {*self.rows} or any(l.free for l in self.rows):
            raise Left("it is not of all rows")
        self.to = [*[[a] for a in whole], contract], kernel_to
        self.dtype, logits, self.factor = _dtypes(g, found)
        self.logits_dtype = jnp.promote_types(logits, self.dtype)
        self.why = _unfit(g, found, self.dtype) if quantization else ""
        self.quantization = None if self.why else quantization
        self.reads = [v for v, *_ in (found.x, found.w, *base.biases)]
        self.reads += [m.value for m in base.masks]
        sizes = size(whole), size(contract), self.vocabulary
        self.what = "loss {} x {} -> {}, {}".format(*sizes, self.dtype.name)

    def bias(self, read: Read) -> Any:
        """Returns what is added to the logits, one number a word; None for nothing."""
        wide = jnp.promote_types(self.logits_dtype, jnp.float32)
        added = [(times(read(v), factor, wide), dims) for v, dims, factor in self.of.base.biases]
        for m in self.of.base.masks:
            if m.added:
                added.append((jnp.where(read(m.value) == m.keep, 0, wide.type(m.fill)), m.dims))
        of_words = [arrange(x, dims, [self.of.axis]) for x, dims in added]
        bias = functools.reduce(lambda a, b: a.astype(wide) + b, of_words) if of_words else None
        if self.hidden is None:
            return bias
        # A finite logit whose exponential is 0 beside others
        least = wide.type(float(jnp.finfo(self.logits_dtype).min) / 2)
        return jnp.where(self.hidden[0], least, wide.type(0) if bias is None else bias)

    def is_hidden(self, words: Any) -> Any:
        """Tells which words' logits a mask replaces."""
        assert self.hidden is not None
        of_words, sharding = jnp.asarray(self.hidden[0]), jax.typeof(words).sharding
        if not sharding.mesh.explicit_axes:
            return of_words.at[words].get()
        return match_spec(of_words, words, jax.P(None)).at[words].get(out_sharding=sharding)

    def _seen(self, kernel: Any) -> Any:
        """Returns the kernel with 0 for words whose logits a mask replaces."""
        if self.hidden is None:
            return kernel
        hidden = np.expand_dims(self.hidden[0], int(self.transposed))
        return jnp.where(hidden, 0, kernel)

    def factors(self, read: Read) -> tuple[Any, Any]:
        """Returns x, `(*rows, n)`, and the kernel."""
        x, kernel = (
            arrange(read(v), dims, to) for (v, dims, *_), to in zip((self.of.x, self.of.w), self.to)
        )
        for i, a in enumerate(self.rows):
            if a.cut:
                x = jax.lax.slice_in_dim(x, a.cut[1], a.cut[1] + a.size, axis=i)
        x = x.astype(self.dtype)
        if self.factor != 1:  # exact, or rounded as the logits would be
            x = x * jnp.asarray(self.factor, self.dtype)
        return x, kernel

    def operands(self, read: Read, entropy: bool = False) -> tuple[list[Any], Any]:
        """Returns x, the kernel and the bias of an operation, and its spec."""
        (x, kernel), bias = self.factors(read), self.bias(read)
        spec = Options(
            contract=int(self.transposed),
            softcap=self.of.softcap,
            with_entropy=entropy,
            logits_dtype=self.logits_dtype,
            quantization=self.quantization,
        ).spec(x, kernel, bias)
        return [x, self._seen(kernel), bias], spec

    def summed(self, read: Read) -> Any:
        """Returns the sum of each row's logits: x times the sum of the kernel's words."""
        (x, kernel), bias = self.factors(read), self.bias(read)
        wide = jnp.promote_types(self.dtype, jnp.float32)
        words = jnp.sum(kernel.astype(self.dtype).astype(wide), int(not self.transposed))
        totals = jnp.sum(x.astype(wide) * words, -1)
        return totals if bias is None else totals + jnp.sum(bias.astype(wide))

    def place(self, x: Any, dims: Any) -> Any:
        """Returns an array of rows, `(*rows)`."""
        return arrange(x, dims, [[a] for a in self.rows])

    def site(self, values: Sequence[int], reads: Any, more: str, served: str, compute: Any) -> Site:
        """Returns the site of values that are computed from them."""
        dead, reads = (self.of.base.dot.outs[0],), tuple(dict.fromkeys(reads))
        return Site(tuple(values), reads, self.what + more, served, dead=dead, compute=compute)


class Loss:
    """A number for each row, of log-sum-exps and picked elements of logits.

    Attributes:
      value: it in the program.
      labels: a pick's (value, labels, order), None for log-sum-exps alone.
      outside: what one outside the vocabulary gives.
      lse, pick, sum, entropy: what these are multiplied by, the sum of all logits of a row.
      form: the value's; it has what is summed over.

    Raises:
      Left: where the value has to stay as it is, with the reason.
    """

    def __init__(self, forms: ScoreForms, value: int, form: Form, *, quantization: Any):
        g, (first, _) = forms.program, next(iter(form.terms))
        if g.is_within(value):
            raise Left("a function with a derivative of the user's own computes it")
        if not any(t.kind in ("lse", "mean") for t, _ in form.terms):
            raise Left("an element of the logits, and no log-sum-exp")
        counted = (*atoms(form.dims), *form.summed)
        self.logits = Logits(forms, first.base, first.axis, counted, quantization)
        lse, pick, total, mean = (
            sum(f for t, f in form.terms if t.kind == k) for k in ("lse", "pick", "total", "mean")
        )
        # A mean is the log-sum-exp less the entropy.
        self.lse, self.pick, self.sum, self.entropy = lse + mean, pick, total, -mean
        picked = [t for t, _ in form.terms if t.kind == "pick"]
        self.labels, self.outside = (picked[0].labels, picked[0].outside) if picked else (None, "")
        self.has_outside = self.outside not in ("", "clip")
        self.clips = self.outside.endswith(("clip", "drop"))
        self.picked = self.labels and (self.labels, self.clips)  # which words
        self.value, self.form, self.aval = value, form, g.avals[value]
        self._check()
        self.reads = self.logits.reads + ([self.labels[0]] if self.labels else [])
        self.has_more = bool(total or mean or self.logits.hides_numbers)
        is_either = self.logits.hidden is not None and self.labels is not None
        self.types = [jnp.promote_types(self.logits.dtype, jnp.float32)] * self.has_more
        self.types += [jnp.dtype(bool)] * (is_either + self.has_outside)

    def _check(self) -> None:
        """Raises Left for what no operation computes of such logits."""
        logits, hidden, labels = self.logits, self.logits.hidden, self.labels
        if self.outside == "all 0":
            rest = abs(self.lse + self.pick + self.sum * logits.vocabulary)
            if rest > ARITHMETIC * (abs(self.lse) + abs(self.pick)):
                raise Left("a one-hot product of log-probabilities with other log-sum-exps")
        if self.entropy and hidden and hidden[1] == -math.inf:
            raise Left("an entropy of logits that are -inf, which is NaN")
        if self.sum and (logits.of.base.inner is not None or hidden):
            raise Left("smoothed labels of logits with a soft cap or a mask that replaces them")
        if labels is not None and not {*atoms(labels[1])} <= {*logits.rows}:
            raise Left("its labels differ along more than its rows")
        if labels is not None and expand(labels[2]) != logits.of.axis:
            raise Left("its labels count words in another order than the kernel's")

    @property
    def is_cost(self) -> bool:
        """Tells if its slopes are known before the logits are, see `Total.linear`."""
        cross = self.lse == -self.pick and self.outside != "drop"
        return cross and not (self.form.stopped or self.logits.hidden)

    def data(self, read: Read, entropies: Any = None) -> list[Any]:
        """Returns what it is computed from beside the logits, `(*rows)` each, of `types`."""
        given = [self._more(read, entropies)] if self.has_more else []
        if self.has_outside or self.logits.hidden is not None:
            _, inside, hidden = self.picks(read)
            given += [hidden] * (hidden is not None) + [inside] * self.has_outside
        return given

    def of_rows(self, lse: Any, loss: Any, *data: Any) -> Any:
        """Returns the number of each row, given log-sum-exps, losses and `data`.

        A factor of 0 is left out where log-sum-exps cancel: 0 times infinity is NaN.
        """
        given, times = iter(data), lambda c, value: c * value if c else jnp.zeros_like(value)
        more = next(given) if self.has_more else 0
        alone = base = y = times(self.lse, lse)
        if self.labels is not None:
            if self.logits.hidden is not None:
                loss = jnp.where(next(given), lse - self.logits.hidden[1], loss)
            base = times(self.lse + self.pick, lse)
            y = base - self.pick * loss
        if self.has_outside:
            inside = next(given)
            y = jnp.where(inside, y, self._outside(inside, alone, base, lse, loss))
        y = y + more
        return jax.lax.stop_gradient(y) if self.form.stopped else y

    def _outside(self, inside: Any, alone: Any, base: Any, lse: Any, loss: Any) -> Any:
        """Returns the numbers of rows whose labels are outside."""
        kept = self.pick * jax.lax.stop_gradient(loss)
        match self.outside:
            case "0":
                return alone
            case "all 0":
                rest = -self.sum * self.logits.vocabulary
                return rest * lse if self.sum else jnp.zeros_like(lse)
            case "drop":
                return alone + self.pick * jax.lax.stop_gradient(lse) - kept
            case "all drop":
                return base - kept
        # The root of -1: no constant, for jax.debug_nans, nor 0 / 0, of which XLA of JAX 0.10 makes
        # 0 beside a constant weight.
        nan = jnp.sqrt(inside.astype(jnp.float32) - 1)
        return (base if self.outside == "all nan" else alone) + nan

    def added_up(self, y: Any) -> Any:
        """Returns its value in the program, given each row's number."""
        rows, summed = self.logits.rows, self.form.summed
        y = jnp.sum(y, [i for i, a in enumerate(rows) if a in summed])
        left = tuple((a,) for a in rows if a not in summed)
        return arrange(y, left, self.form.dims).astype(self.aval.dtype)

    def picks(self, read: Read) -> tuple[Any, Any, Any]:
        """Returns the word that each label picks, -1 for none; which labels are in the vocabulary;
        and which of words whose logits a mask replaces."""
        if self.labels is None:
            return self.logits.place(jnp.zeros((), jnp.int32), ()), None, None
        most = self.logits.vocabulary
        labels = self.logits.place(read(self.labels[0]), self.labels[1])
        if jnp.iinfo(labels.dtype).max < most:
            labels = labels.astype(jnp.int32)
        elif jnp.issubdtype(labels.dtype, jnp.unsignedinteger):  # it has no -1
            labels = jnp.minimum(labels, most).astype(jnp.int32)
        inside, within = (labels >= 0) & (labels < most), jnp.clip(labels, 0, most - 1)
        words, hidden = within if self.clips else jnp.where(inside, labels, -1), None
        if self.logits.hidden is not None:  # their cost is added later
            hidden = self.logits.is_hidden(within) & (inside | self.clips)
            words = jnp.where(hidden, int(np.argmin(self.logits.hidden[0])), words)
        return words.astype(jnp.int32), inside, hidden

    def _more(self, read: Read, entropies: Any) -> Any:
        """Returns what is added to each row's number beside log-sum-exps and picks."""
        logits, more = self.logits, []
        if self.sum:
            more.append(self.sum * logits.summed(read))
        if self.entropy:
            kept, bias = 1, logits.bias(read)
            if bias is not None and logits.of.softcap is None:  # theirs: 0 times a logit of -inf
                kept = jnp.where(jnp.any(bias == -jnp.inf), jnp.nan, 1)
            more.append(self.entropy * entropies * kept)
        if logits.hidden and logits.hides_numbers:
            words = int(not logits.transposed)
            more.append(called(_unread, *logits.factors(read), logits.hidden[0], words=words))
        return functools.reduce(jnp.add, more).astype(self.types[0])

    def best(self, read: Read) -> Sequence[Any]:
        """Returns the words of the largest logits, for an accuracy beside a loss."""
        operands, spec = self.logits.operands(read)
        words, rows = best_words(*operands, spec=spec), tuple((a,) for a in self.logits.rows)
        return [arrange(words, rows, self.form.dims).astype(self.aval.dtype)]


def _unread(x: Any, kernel: Any, hidden: Any, *, words: int) -> Any:
    """Returns 0 for each row of x, whose gradient is that of logits that a mask replaces.

    That is 0 times the kernel's words and 0 times x: NaN of what is not finite.
    """
    read = jnp.sum(jnp.where(jnp.expand_dims(hidden, 1 - words), kernel, 0) * 0, words)
    return jnp.where(False, jnp.sum(x * read.astype(x.dtype), -1), 0).astype(jnp.float32)


def _in_rows(losses: Sequence[Loss], read: Read) -> Sequence[Any]:
    """Returns the values of several losses of one product, whose rows are computed once."""
    entropy = any(loss.entropy for loss in losses)
    operands, spec = losses[0].logits.operands(read, entropy)
    found: dict[Any, Any] = {}
    for loss in sorted(losses, key=lambda loss: loss.labels is None):
        if loss.picked not in found:
            found[loss.picked] = loss_of_rows(*operands, loss.picks(read)[0], spec=spec)
            found.setdefault(None, found[loss.picked])  # log-sum-exps come with any losses
    rows = [(loss, *found[loss.picked][:2], loss.data(read, found[None][-1])) for loss in losses]
    return [loss.added_up(loss.of_rows(lse, cost, *data)) for loss, lse, cost, data in rows]


# ---------------------------------------------------------------- totals


@dataclasses.dataclass(frozen=True)
class Addend:
    """A program of a row's numbers, which computes its addend to a total: a `Total.each`.

    Attributes:
      text: tells programs apart, in every process but for functions with own rules.
      calls: these functions, which `text` has the addresses of.
    """

    program: Any = dataclasses.field(compare=False, repr=False)
    text: str
    calls: tuple[Any, ...] = dataclasses.field(repr=False)

    def __call__(self, lse: Any, cost: Any, labels: Any, *data: Any) -> Any:
        del labels
        return _of_every_row(self, lse.ndim)(lse, cost, *data)


@functools.lru_cache(maxsize=256)
def _of_every_row(addend: Addend, ndim: int) -> Any:
    """Returns a function of rows, which JAX traces once."""

    def bound(eqn: Any, given: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name in JIT:
            return evaluate(eqn.params["jaxpr"], given, bound, in_place=True)
        return results_of(eqn, equally_varying(*given))  # traced without manual axes

    one: Any = lambda *numbers: evaluate(addend.program, numbers, bound, in_place=True)[0]
    return jax.jit(functools.reduce(lambda f, _: jax.vmap(f), range(ndim), one))


class Totals:
    """The total that the losses of one product lead to.

    Args:
      live: the values that the program needs where the losses' values are given.

    Attributes:
      value: the total.
      reads: what it is computed from beside losses, see `Plan`.

    Raises:
      Left: where there is none, or more.
    """

    def __init__(self, program: Program, losses: Sequence[Loss], live: set[int]):
        self.program, self.losses = program, losses
        self.plan = plan = Plan(program, lambda v, rows: False)
        costs = self._follow(live)
        logits = losses[0].logits
        if {*expand(plan.sums.get(self.value, ()))} != {*expand(logits.rows)}:
            raise Left("no total of all rows")
        plan.need([(self.value, plan.rows[self.value])])
        self.used = [loss for loss in losses if loss.value in plan.slots]
        self.reads = self._reads_of_rows()
        picked = {loss.picked for loss in losses if loss.picked is not None}
        if len(picked) > 1 or any(loss.entropy for loss in losses):
            raise Left("its rows have more than a log-sum-exp and a label")
        wide = jnp.promote_types(logits.logits_dtype, jnp.float32)
        types = [wide, wide, *[t for loss in self.used for t in loss.types]]
        types += [program.avals[v].dtype for v, *_ in self.reads]
        try:
            own = jax.make_jaxpr(self._of_row)(*[jax.ShapeDtypeStruct((), t) for t in types])
        except (TypeError, ValueError) as error:  # of shapes
            raise Left("its equations are not of one row") from error
        steps = [step for _, step, *_ in plan.order]
        calls = tuple([step.call for step in steps if step.call is not None])
        text = f"{own}{own.consts}{[*map(id, calls)]}"
        addend = Addend(own, hashlib.sha256(text.encode()).hexdigest(), calls)
        selects = bool(calls) or any(step.equation.name in _SELECTING for step in steps)
        if self.value not in program.results:  # it may come back as NaN
            selects |= any(loss.has_outside for loss in self.used)
        self.total = Total(addend, len(types) - 2, self.value in costs, selects)

    def _follow(self, live: set[int]) -> set[int]:
        """Finds the total; returns the values that are linear in costs, see `Total.linear`."""
        program, plan, values = self.program, self.plan, {l.value: l for l in self.losses}
        costs = {v for v, loss in values.items() if loss.is_cost}
        moving = {v for v, loss in values.items() if not loss.form.stopped}
        plan.rows |= {v: loss.form.dims for v, loss in values.items()}
        plan.sums |= {v: loss.form.summed for v, loss in values.items() if loss.form.summed}
        readers = [e for e in program.equations if e not in program.shadowing and live & {*e.outs}]
        for made in readers:
            own = {v for v in made.ins if v in plan.rows}
            if not {*made.outs} & values.keys() and (own or plan.lost.keys() & {*made.ins}):
                if plan.advance(made) is not None and own <= costs and plan.is_linear(made, costs):
                    costs.update(made.outs)
                moving.update(made.outs if own & moving and made.name != "stop_gradient" else ())
        outside = [v for e in readers if e not in plan.steps for v in e.operands]
        end = only_end(program, plan.rows.keys() & {*program.results, *outside})
        # In float16 gradients of a mean would be too small.
        narrow = self.losses[0].logits.dtype == jnp.float16
        self.value, _ = before_factors(program, plan.sums, end, constants=narrow)
        if self.value not in moving:  # 0 times NaN would be a gradient
            raise Left("a total without a gradient")
        return costs

    def _reads_of_rows(self) -> list[tuple[int, Rows, int]]:
        """Returns what the total reads beside losses: a number for each row, or for all."""
        values = {loss.value for loss in self.losses}
        reads = [read for read in self.plan.reads if read[0] not in values]
        for v, rows, _ in reads:
            aval = self.program.avals[v]
            each = math.prod([n for n, labels in zip(aval.shape, rows) if not labels])
            if each != 1 or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                raise Left("it reads more than a number for each row")
        return reads

    def _of_row(self, lse: Any, cost: Any, *data: Any) -> Any:
        """Returns what a row adds to the total, given its numbers."""
        plan, given = self.plan, iter(data)
        slot = lambda v: plan.slots[v][0][1]
        env = {}
        for loss in self.used:
            y = loss.of_rows(lse, cost, *[next(given) for _ in loss.types])
            env[slot(loss.value)] = jnp.reshape(y.astype(loss.aval.dtype), (1,) * loss.aval.ndim)
        for v, _, at in self.reads:
            env[at] = jnp.reshape(next(given), (1,) * self.program.avals[v].ndim)
        alone = Chunk(dict.fromkeys(expand(self.losses[0].logits.rows), 1), {})
        total = jnp.reshape(plan.run(env, alone)[slot(self.value)], ())
        return total.astype(jnp.promote_types(total.dtype, jnp.float32))

    def computed(self, beside: Sequence[Loss], read: Read) -> list[Any]:
        """Returns the total, and the values of losses that others read."""
        losses = self.losses
        first = next((loss for loss in losses if loss.labels is not None), losses[0])
        own = {loss: loss.data(read) for loss in dict.fromkeys([*self.used, *beside])}
        place = lambda x, rows: first.logits.place(x, latest(rows))
        data = [a for loss in self.used for a in own[loss]]
        data += [place(read(v), rows) for v, rows, _ in self.reads]
        operands, spec = first.logits.operands(read)
        spec = dataclasses.replace(spec, total=self.total)
        words, with_rows = first.picks(read)[0], bool(beside)
        y, *rows = loss_of_rows(*operands, words, *data, spec=spec, with_rows=with_rows)
        aval = self.program.avals[self.value]
        values = [loss.added_up(loss.of_rows(*rows, *own[loss])) for loss in beside]
        return [y.astype(aval.dtype).reshape(aval.shape), *values]


# ---------------------------------------------------------------- sites


def _site(program: Program, losses: Sequence[Loss]) -> Site:
    """Returns the site of losses of one product."""
    first, values = losses[0], [loss.value for loss in losses]
    of = first.logits.of
    reads = [r for loss in losses for r in loss.reads]
    try:
        live = needed_beside(program, values, reads)
        totals = Totals(program, losses, read_by_rules(program, live))
        reads += [v for v, *_ in totals.reads]
        live = needed_beside(program, [totals.value], reads)
        beside = [loss for loss in losses if loss.value in live and loss.value != totals.value]
        values = [totals.value, *[loss.value for loss in beside]]
        compute = functools.partial(totals.computed, beside)
    except Left:
        totals, compute = None, functools.partial(_in_rows, losses)
    some = lambda name: any(getattr(loss, name) for loss in losses)
    parts = {
        "sum": totals,
        "a row each": not totals,
        f"softcap {of.softcap}": of.softcap,
        "bias": of.base.biases,
        "masked words": of.base.masks,
        "log-sum-exps": not some("pick") and some("lse"),
        "entropies": some("entropy"),
        "label smoothing": some("sum"),
        "gradient in fp8": first.logits.quantization,
        f"gradient not in fp8 ({first.logits.why})": first.logits.why,
    }
    served = f"linear_cross_entropy: {said(parts)}"
    return first.logits.site(values, reads, "", served, compute)


def _dtypes(g: Program, found: Operands) -> tuple[Any, Any, float]:
    """Returns the dtypes of a product's operands and of its logits, and the logits' factor."""
    base, factor = found.base, found.factor
    dtype, logits = jnp.promote_types(found.x[3], found.w[3]), g.avals[base.dot.outs[0]].dtype
    known = dtype in (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16)
    if not known or logits == jnp.float64 != dtype:
        raise Left(f"operands of {dtype} for logits of {logits}")
    if abs(factor - 1) <= 2 * jnp.finfo(logits).eps * (logits.itemsize > 2):
        factor = 1.0  # cap · (1 / cap), as its dtype rounds it
    # The bias is added in the widest of these.
    logits = functools.reduce(jnp.promote_types, [logits, *base.added])
    if math.frexp(factor)[0] != 0.5 and dtype.itemsize < logits.itemsize:
        why = f"its logits are multiplied by {factor:g}, which {dtype} operands would round"
        raise Left(why)
    return dtype, logits, factor


def _unfit(g: Program, found: Operands, dtype: Any) -> str:
    """Returns why no device can multiply FP8 codes of its part of a kernel, as far as types say."""
    kernel, words = g.avals[found.base.dot.ins[found.right]], size(found.axis)
    count = lambda n, of=words: aligned_words(n, found.softcap) if of == words else n
    if why := unfit(found.base.dot, dtype, size(found.contract), count(words)):
        return why
    mesh = kernel.sharding.mesh
    if mesh.manual_axes and len(mesh.manual_axes) < len(mesh.axis_names):
        return "its mesh is partly manual"
    part = kernel.sharding.shard_shape(kernel.shape) if mesh.explicit_axes else ()
    if part and not fits(*map(count, part, kernel.shape)):
        return f"a device's part of its kernel, {part}, is no multiple of 16"
    return ""


def _hidden(g: Program, base: Scores, words: Labels) -> tuple[np.ndarray, float] | None:
    """Returns the words whose logits a mask replaces, and the number that it writes there.

    Raises:
      Left: for what differs along rows, or is not known when the program is traced.
    """
    if base.inner is not None and (base.biases or base.masks):
        raise Left("logits with a soft cap and then a bias or a mask")
    every = [*[dims for _, dims, _ in base.biases], *[m.dims for m in base.masks]]
    if not {*atoms(d for dims in every for d in dims)} <= {*words}:
        raise Left("the logits have a bias or a mask that differs along rows")
    if any(not jnp.issubdtype(g.avals[v].dtype, jnp.floating) for v, *_ in base.biases):
        raise Left("what is added to the logits are integers")
    if all(m.added for m in base.masks):
        return None
    mask, *more = base.masks
    if more or mask.changed or mask.fill > MASKED:
        raise Left("the logits have several masks, one that others are added to, or a small one")
    constant = g.const(mask.value)
    if constant is None or atoms(mask.dims) != words:
        raise Left("the mask that replaces logits is not a constant")
    hidden = constant.reshape(-1) != mask.keep
    if hidden.all():
        raise Left("a mask replaces all logits")
    return hidden, mask.fill


def found(forms: ScoreForms, quantization: Any) -> Iterator[Site | tuple[int, str]]:
    """Yields the sites of losses in a program; a value and the reason where one is left."""
    program, groups = forms.program, {}
    for one in forms.ends("is_loss", functools.partial(Loss, quantization=quantization)):
        if isinstance(one, Loss):
            key = one.logits.of.base, one.logits.of.axis, one.logits.rows
            groups.setdefault(key, []).append(one)
        else:
            yield one
    live = needed_beside(program, ())
    for group in groups.values():
        group = [loss for loss in group if loss.value in live]
        values = [loss.value for loss in group]
        tied = any(program.depends(r, values) for loss in group for r in loss.reads)
        for some in [[loss] for loss in group] if tied or not group else [group]:
            yield _site(program, some)
    for equation in program.equations:
        form = forms.of.get(equation.ins[0]) if equation.name == "argmax" else None
        if form is not None and form.is_scores:
            (axis,) = equation.params["axes"]
            dims = (*form.dims[:axis], *form.dims[axis + 1 :])
            term = Term("lse", form.base, frozenset(expand(form.dims[axis])))
            of_lse = dataclasses.replace(form, dims=dims, along=0.0, terms=frozenset({(term, 1.0)}))
            with contextlib.suppress(Left):  # the row of its loss says why
                of = Loss(forms, equation.outs[0], of_lse, quantization=None)
                if of.logits.of.axis != expand(form.dims[axis]):
                    continue
                served = "linear_cross_entropy: argmax, by a product of its own"
                yield of.logits.site([of.value], of.reads, _ARGMAX, served, of.best)


def with_losses(sites: Sequence[Site]) -> list[Site]:
    """Returns sites with best words only beside losses of their logits."""
    lost = {s.dead for s in sites if s.what.startswith("loss") and not s.what.endswith(_ARGMAX)}
    return [s for s in sites if not s.what.endswith(_ARGMAX) or s.dead in lost]
