"""Losses in a program: log-sum-exps and picked elements of logits, without the logits."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cross_entropy.linear import all_logits, best_words, loss_of_rows, match_spec
from ..cross_entropy.op import aligned_words
from ..cross_entropy.softmax import UNSELECTED
from ..quantization.quantize import fits
from .attention import MASKED, times
from .constants import ARITHMETIC
from .forms import Form, Scores, Term
from .indices import two_valued
from .labels import Labels, arrange, atoms, expand, size
from .products import unfit
from .program import Program
from .scores import Operands, ScoreForms
from .sites import Left, Read, Site, called, said

SMALLEST = 1024
"""Fewer classes than these are no vocabulary: their logits are small, and stay."""
_ARGMAX = ", argmax"


class Loss(Site):
    """A sum of log-sum-exps and picked elements of x · kernel, by `linear_cross_entropy`.

    Attributes:
      of: the logits' product: x is cut to `rows` and multiplied by `factor`, and the kernel is
        `transposed` where it is stored (vocabulary, features).
      labels: a pick's (value, labels, order), None for log-sum-exps alone.
      outside: what one outside the vocabulary gives.
      lse, pick, sum, entropy: what these are multiplied by, the sum of all logits of a row.
      form: the value's; it has what is summed over, and the weights.
      hidden: the words whose logits a mask replaces, and the number that it writes; None.
      explicit: its kernel is on a mesh of Explicit axes.
      certain: no row's weight is beside a mask and may not be finite, which differs before the mask
        and after it.

    Raises:
      Left: where the value has to stay as it is, with the reason.
    """

    def __init__(self, forms: ScoreForms, value: int, form: Form, *, quantization: Any):
        g, (first, _) = forms.program, next(iter(form.terms))
        if g.is_within(value):
            raise Left("a function with a derivative of the user's own computes it")
        base = first.base
        found = self.of = Operands(forms, base, first.axis, scale=False)
        words, contract = found.axis, found.contract
        self.vocabulary = size(words)
        if not any(t.kind in ("lse", "mean") for t, _ in form.terms):
            raise Left("an element of the logits, and no log-sum-exp")
        if self.vocabulary < SMALLEST:
            raise Left(f"{self.vocabulary} classes only")
        hidden = self.hidden = _hidden(g, base, words)
        order, have = atoms(found.w[1]), set(atoms(found.x[1]))
        self.transposed = order == (*words, *contract)
        kernel_to = (words, contract) if self.transposed else (contract, words)
        if order != (*kernel_to[0], *kernel_to[1]) or any(l.free for l in order):
            raise Left("its kernel is not one of the vocabulary's words and the features")
        if {*atoms(found.sides[found.right])} != {*order} or have & {*order} != {*contract}:
            raise Left("its product is not of rows and the kernel")
        whole = [a for a in atoms(found.sides[found.left]) if a not in contract]
        cuts = {l.cut[0]: l for l in (*atoms(form.dims), *form.summed) if l.cut}
        rows = self.rows = tuple(cuts.get(a, a) for a in whole)
        if {*atoms(form.dims), *form.summed} != {*rows} or any(l.free for l in rows):
            raise Left("it is not of all rows")
        lse, pick, total, mean = (
            sum(f for t, f in form.terms if t.kind == k) for k in ("lse", "pick", "total", "mean")
        )
        lse += mean  # a mean is the log-sum-exp less the entropy
        self.lse, self.pick, self.sum, self.entropy = lse, pick, total, -mean
        picked = [t for t, _ in form.terms if t.kind == "pick"]
        labels, self.outside = (picked[0].labels, picked[0].outside) if picked else (None, "")
        if self.outside == "all 0" and (
            abs(lse + pick + total * size(words)) > ARITHMETIC * (abs(lse) + abs(pick))
        ):
            raise Left("a one-hot product of log-probabilities with other log-sum-exps")
        if mean and hidden and hidden[1] == -math.inf:
            raise Left("an entropy of logits that are -inf, which is NaN")
        if total and (base.inner is not None or hidden):
            raise Left("smoothed labels of logits with a soft cap or a mask that replaces them")
        if labels is not None and not set(atoms(labels[1])) <= set(rows):
            raise Left("its labels differ along more than its rows")
        if labels is not None and expand(labels[2]) != words:
            raise Left("its labels count words in another order than the kernel's")
        softcap, factor = found.softcap, found.factor
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
        why = ""
        if quantization:
            kernel = g.avals[base.dot.ins[found.right]]
            count = aligned_words(size(words), softcap)
            why = unfit(base.dot, dtype, size(contract), count)
            why = why or _unfit_here(kernel, size(words), softcap)
        pairs = found.x, found.w, *([labels] if labels else []), *base.biases
        reads = [v for v, *_ in pairs] + [a.value for a in (*base.masks, *form.weights)]
        self.form, self.labels, self.factor = form, labels, factor
        factors = {w.value for w in form.weights if not w.select}
        masked = len(factors) < len(form.weights)
        self.certain = not masked or all(_is_finite(g, v) for v in factors)
        self.dtype, self.logits_dtype = dtype, jnp.promote_types(logits, dtype)
        self.explicit = bool(g.avals[found.w[0]].sharding.mesh.explicit_axes)
        self.aval, self.to = g.avals[value], ([*[[a] for a in whole], contract], kernel_to)
        self.quantization = None if why else quantization
        parts = {
            "sum": self.total,
            "a row each": not self.total,
            f"softcap {softcap}": softcap,
            "bias": base.biases,
            "masked words": base.masks,
            "log-sum-exps": lse and not picked,
            "entropies": mean,
            "label smoothing": total,
            "weighted": form.weights,
            "gradient in fp8": self.quantization,
            f"gradient not in fp8 ({why})": why,
        }
        super().__init__(
            outs=(value,),
            reads=tuple(dict.fromkeys(reads)),
            dead=(base.dot.outs[0],),
            what=f"loss {size(whole)} x {size(contract)} -> {size(words)}, {dtype.name}",
            served=f"linear_cross_entropy: {said(parts)}",
            compute=lambda read: [self.computed(read, {}, self.total)],
        )

    @property
    def total(self) -> bool:
        """Tells if it is a multiple of the sum of all rows' cross-entropies."""
        cross = self.lse == -self.pick and self.hidden is None and self.certain
        others = self.sum or self.entropy or self.form.stopped
        if "drop" in self.outside:  # reads two words of the kernel
            others = others or self.explicit
        return cross and not others and self.form.summed >= set(self.rows)

    def computed(self, read: Read, shared: dict[Any, Any], total: bool) -> Any:
        """Returns the value; `shared` has the losses and log-sum-exps of rows, once computed."""
        place = lambda v, dims: arrange(v, dims, [[a] for a in self.rows])
        factors = [(w, place(read(w.value), w.dims)) for w in self.form.weights]
        if total:
            return self._total(read, place, factors)
        if self.labels not in shared:
            entropy = bool(shared.get("entropy", self.entropy))
            options = {"reduction": "none", "with_lse": True, "with_entropy": entropy}
            words = None if self.labels is None else self._word_of(read, place)
            shared[self.labels] = self._call(read, words, **options)
            shared.setdefault(None, shared[self.labels])  # log-sum-exps come with any losses
        loss, lse, *entropy = shared[self.labels]
        y = self._combined(read, place, loss, lse)
        if self.sum:
            y = y + self.sum * self._totals(read)
        if self.entropy:
            bias, kept = self._bias(read), 1
            if bias is not None and self.of.softcap is None:  # theirs: 0 times a logit of -inf
                kept = jnp.where(jnp.any(bias == -jnp.inf), jnp.nan, 1)
            y = y + self.entropy * entropy[0] * kept
        x, kernel = self._operands(read)
        if self.hidden is not None and jax.typeof(kernel).sharding.mesh.empty:
            # On a mesh devices would have to exchange it.
            y = y + called(_unread, x, kernel, self.hidden[0], words=int(not self.transposed))
        y = jax.lax.stop_gradient(y) if self.form.stopped else y
        for w, value in factors:
            y = jnp.where(value == w.keep, y, 0) if w.select else y * value
        y = jnp.sum(y, [i for i, a in enumerate(self.rows) if a in self.form.summed])
        left = tuple((a,) for a in self.rows if a not in self.form.summed)
        return arrange(y, left, self.form.dims).astype(self.aval.dtype)

    def _combined(self, read: Read, place: Any, loss: Any, lse: Any) -> Any:
        """Returns the rows' log-sum-exps and picked logits, lse - loss, times their factors.

        A factor of 0 is left out where log-sum-exps cancel: 0 times infinity is NaN.
        """
        times = lambda c, value: c * value if c else jnp.zeros_like(value)
        if self.labels is None:
            return times(self.lse, lse)
        if self.hidden is not None:
            loss = jnp.where(self._is_hidden(read, place), lse - self.hidden[1], loss)
        base, alone = times(self.lse + self.pick, lse), times(self.lse, lse)
        y = base - self.pick * loss
        match self.outside:
            case "clip":
                return y
            case "all 0":
                outside = times(-self.sum * self.vocabulary, lse)
            case "all nan":
                outside = base + jnp.nan
            case "all drop":
                outside = base - self.pick * jax.lax.stop_gradient(loss)
            case "0":
                outside = alone
            case "nan":
                outside = alone + jnp.nan
            case _:
                outside = alone + self.pick * jax.lax.stop_gradient(lse - loss)
        return jnp.where(self._inside(read, place), y, outside)

    def _total(self, read: Read, place: Any, factors: Any) -> Any:
        """Returns the sum of all rows' losses, whose gradients are computed with it."""
        kept = [value == w.keep for w, value in factors if w.select]
        selected = functools.reduce(jnp.logical_and, kept) if kept else None
        weights = [value for w, value in factors if not w.select]
        wide = lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32))
        weights = functools.reduce(lambda a, b: wide(a) * b, weights) if weights else None
        words, counted, late = self._word_of(read, place), selected, None
        if self.outside not in ("", "clip"):
            inside = self._inside(read, place)
            words = jnp.where(inside, words, -1)
            if self.outside.startswith("all"):  # labels outside have no part in the gradient
                counted = inside if selected is None else selected & inside
            if not self.outside.endswith("0"):
                late = ~inside if selected is None else selected & ~inside
        if counted is not None:
            words = jnp.where(counted, words, UNSELECTED)
        whole = self.outside == "all drop"  # the loss of labels outside
        options = {"reduction": "sum", "with_lse": whole, "weights": weights}
        found = self._call(read, words, counted, **options)
        y, lse = found if whole else (found, None)
        if late is not None:  # but one in the value
            more = jax.lax.stop_gradient(self._outside(read, place, lse))
            more = jnp.where(late, more if weights is None else wide(weights) * more, 0)
            y = y + jnp.sum(more)
        y = self.lse * y
        if selected is not None:  # no rows have no gradient, also where 0 divides their sum
            # Counted in float32, so that devices add it up with the loss, or with a mean's.
            count = jnp.sum(selected, dtype=jnp.float32)
            y = jnp.where(count > 0, y, jax.lax.stop_gradient(y))
        return y.astype(self.aval.dtype).reshape(self.aval.shape)

    def _outside(self, read: Read, place: Any, lse: Any) -> Any:
        """Returns the part of each row's loss that has no gradient, if its label is outside."""
        if self.outside.endswith("nan"):
            # The root of -1: no constant, for jax.debug_nans, nor 0 / 0, of which XLA of JAX 0.10
            # makes 0 beside a constant weight.
            return jnp.sqrt(self._inside(read, place).astype(jnp.float32) - 1)
        # A label is clipped to the first word, or to the last.
        x, kernel = self._operands(read)
        axis, step, of_words = int(not self.transposed), self.vocabulary - 1, self._logits(read)
        ends = jax.lax.slice_in_dim(kernel, 0, None, step, axis)
        if (bias := of_words["bias"]) is not None:
            of_words["bias"] = bias[::step]
        z = all_logits(x, ends, **of_words)
        picked = jnp.where(self._words(read, place) < 0, z[..., 0], z[..., -1])
        return -picked if lse is None else lse - picked

    def _words(self, read: Any, place: Any) -> Any:
        """The labels, in a dtype that has -1 and the size of the vocabulary."""
        assert self.labels is not None
        labels = place(read(self.labels[0]), self.labels[1])
        if jnp.iinfo(labels.dtype).max < self.vocabulary:
            return labels.astype(jnp.int32)
        if jnp.issubdtype(labels.dtype, jnp.unsignedinteger):
            return jnp.minimum(labels, self.vocabulary).astype(jnp.int32)
        return labels

    def _inside(self, read: Any, place: Any) -> Any:
        labels = self._words(read, place)
        return (labels >= 0) & (labels < self.vocabulary)

    def _is_hidden(self, read: Any, place: Any) -> Any:
        """Tells which labels are of words whose logits a mask replaces."""
        assert self.hidden is not None
        labels = self._words(read, place)
        within = jnp.clip(labels, 0, self.vocabulary - 1)
        of_words, sharding = jnp.asarray(self.hidden[0]), jax.typeof(within).sharding
        explicit = sharding if sharding.mesh.explicit_axes else None
        if explicit is not None:
            of_words = match_spec(of_words, within, jax.P(None))
        hidden = of_words.at[within].get(out_sharding=explicit)
        return hidden if self.outside.endswith(("clip", "drop")) else hidden & (labels == within)

    def _bias(self, read: Any) -> Any:
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

    def _seen(self, kernel: Any) -> Any:
        """Returns the kernel with 0 for words whose logits a mask replaces."""
        if self.hidden is None:
            return kernel
        hidden = np.expand_dims(self.hidden[0], int(self.transposed))
        return jnp.where(hidden, 0, kernel)

    def _operands(self, read: Any) -> tuple[Any, Any]:
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

    def _logits(self, read: Any) -> dict[str, Any]:
        """Returns what makes the logits of x · kernel."""
        options = {"contract": int(self.transposed), "softcap": self.of.softcap}
        return options | {"bias": self._bias(read), "logits_dtype": self.logits_dtype}

    def _totals(self, read: Any) -> Any:
        """Σ of a row's logits: x times the sum of the kernel's words."""
        x, kernel = self._operands(read)
        wide = jnp.promote_types(self.dtype, jnp.float32)
        words = jnp.sum(kernel.astype(self.dtype).astype(wide), int(not self.transposed))
        totals, bias = jnp.sum(x.astype(wide) * words, -1), self._bias(read)
        return totals if bias is None else totals + jnp.sum(bias.astype(wide))

    def _word_of(self, read: Any, place: Any) -> Any:
        """Returns the word that each label picks, -1 for none."""
        labels = self._words(read, place)
        if self.outside.endswith(("clip", "drop")):
            words = jnp.clip(labels, 0, self.vocabulary - 1)
        else:
            words = jnp.where(self._inside(read, place), labels, -1)
        if self.hidden:  # their cost is added later
            words = jnp.where(self._is_hidden(read, place), int(np.argmin(self.hidden[0])), words)
        return words.astype(jnp.int32)

    def _call(self, read: Any, words: Any, selected: Any = None, **options: Any) -> Any:
        x, kernel = self._operands(read)
        if words is None:
            words = jnp.zeros(x.shape[:-1], jnp.int32)
        mask = jnp.ones(x.shape[:-1], bool) if selected is None else selected
        weighted = selected is not None or options.get("weights") is not None
        given: dict[str, Any] = options | self._logits(read) | {"quantization": self.quantization}
        return loss_of_rows(x, self._seen(kernel), words, mask, weighted=weighted, **given)

    def best(self, read: Read) -> Sequence[Any]:
        """Returns the words of the largest logits, for an accuracy beside a loss."""
        x, kernel = self._operands(read)
        words = best_words(x, self._seen(kernel), **self._logits(read))
        rows = tuple((a,) for a in self.rows)
        return [arrange(words, rows, self.form.dims).astype(self.aval.dtype)]


def _unread(x: Any, kernel: Any, hidden: Any, *, words: int) -> Any:
    """Returns 0 for each row of x, whose gradient is that of logits that a mask replaces.

    That is 0 times the kernel's words and 0 times x: NaN of what is not finite.
    """
    read = jnp.sum(jnp.where(jnp.expand_dims(hidden, 1 - words), kernel, 0) * 0, words)
    return jnp.where(False, jnp.sum(x * read.astype(x.dtype), -1), 0).astype(jnp.float32)


def _together(losses: Sequence[Loss], read: Read) -> Sequence[Any]:
    """Returns the values of several losses of one product, which are computed once."""
    shared: dict[Any, Any] = {"entropy": any(loss.entropy for loss in losses)}
    labelled_first = sorted(losses, key=lambda loss: loss.labels is None)
    values = {loss: loss.computed(read, shared, False) for loss in labelled_first}
    return [values[loss] for loss in losses]


def joined(program: Program, sites: list[Site]) -> list[Site]:
    """Returns sites with those of one product's losses as one, and best words beside them alone."""
    lost = {site.dead for site in sites if isinstance(site, Loss)}
    sites = [s for s in sites if not s.what.endswith(_ARGMAX) or s.dead in lost]
    groups: dict[Any, list[Loss]] = {}
    for site in sites:
        if isinstance(site, Loss):
            groups.setdefault((site.of.base, site.of.axis, site.rows), []).append(site)
    for group in groups.values():
        first, outs = group[0], tuple(v for site in group for v in site.outs)
        reads = tuple(dict.fromkeys(r for site in group for r in site.reads))
        if len(group) > 1 and not any(program.depends(r, outs) for r in reads):
            served = first.served.replace(": sum", ": a row each")
            compute = functools.partial(_together, group)
            one = Site(outs, reads, first.what, served, dead=first.dead, compute=compute)
            sites = [*[site for site in sites if site not in group], one]
    return sites


def _is_finite(g: Program, v: int) -> bool:
    """Tells if an array is proved finite: it has two such numbers, or is cast from integers."""
    two, (made, name) = two_valued(g, v), g.made(v)
    if two:
        return bool(np.isfinite(two.numbers).all())
    counts = name == "convert_element_type" and g.avals[v].dtype != jnp.float16
    return counts and not jnp.issubdtype(g.avals[made.ins[0]].dtype, jnp.floating)


def _unfit_here(kernel: Any, words: int, softcap: float | None) -> str:
    """Returns why no device can multiply FP8 codes of its part of a kernel, as far as types say."""
    mesh = kernel.sharding.mesh
    if mesh.manual_axes and len(mesh.manual_axes) < len(mesh.axis_names):
        return "its mesh is partly manual"
    part = kernel.sharding.shard_shape(kernel.shape) if mesh.explicit_axes else ()
    count = lambda n, of: aligned_words(n, softcap) if of == words else n
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
    yield from forms.ends("is_loss", functools.partial(Loss, quantization=quantization))
    for equation in forms.program.equations:
        form = forms.of.get(equation.ins[0]) if equation.name == "argmax" else None
        if form is not None and form.is_scores:
            (axis,) = equation.params["axes"]
            dims = (*form.dims[:axis], *form.dims[axis + 1 :])
            term = Term("lse", form.base, frozenset(expand(form.dims[axis])))
            of_lse = dataclasses.replace(form, dims=dims, along=0.0, terms=frozenset({(term, 1.0)}))
            with contextlib.suppress(Left):  # the row of its loss says why
                of = Loss(forms, equation.outs[0], of_lse, quantization=None)
                if of.of.axis != expand(form.dims[axis]):
                    continue
                served = "linear_cross_entropy: argmax, by a product of its own"
                yield Site(
                    of.outs, of.reads, of.what + _ARGMAX, served, dead=of.dead, compute=of.best
                )
