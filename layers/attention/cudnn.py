"""Attention by cuDNN, through `jax.nn.dot_product_attention`, for one device.

JAX differentiates its call with a forward and a backward kernel, and passes the log-sum-exps from
one to the other. Here each runs in an operation of its own, so the program of JAX's derivative is
cut between them: nothing is computed twice, and the log-sum-exps stay float32. They stand for the
rows' largest scores, with 0 for the logs of their sums.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...native.dtypes import NARROW
from ...native.implementation import Unsupported
from ...native.jax_private import packed_attention
from ...native.jaxpr import evaluate, results_of
from .spec import Dimensions, Dims, Numbers, Spec, numbers, spread

# cuDNN takes masks and biases for all queries and keys, so they are made for the call where the
# user's are smaller. From so many on, blocks serve: their memory is linear.
_MOST_MADE = 2**28

# JAX replaces hidden scores by this number: cuDNN subtracts larger ones wrongly.
_HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}


def forward(capability: int, spec: Spec, *operands: Array) -> list[Array]:
    """Returns the results of `blocks.forward`; raises Unsupported if cuDNN cannot serve."""
    return _served(capability, _forward, Spec.forward_dims, spec, operands)


def gradients(capability: int, spec: Spec, *operands: Array) -> list[Array]:
    """Returns the results of `blocks.gradients`; raises Unsupported if cuDNN cannot serve."""
    return _served(capability, _gradients, Spec.gradients_dims, spec, operands)


def kind(capability: int, spec: Spec, avals: Sequence[Any]) -> str:
    """Returns what `forward` calls for operands of these types; raises Unsupported if nothing."""
    jax.eval_shape(functools.partial(forward, capability, spec), *avals)
    return "cuDNN"


class _Refused(Unsupported):
    """A reason, and the words for it in a report."""

    def __init__(self, brief: str, reason: str):
        super().__init__(reason)
        self.brief = brief


def _served(
    capability: int,
    run: Callable[..., list[Array]],
    dims_of: Callable[..., Dims],
    spec: Spec,
    operands: Sequence[Array],
) -> list[Array]:
    """Returns `run(spec, call, *operands)` for the simplest call, of even lengths."""
    dims = dims_of(spec, operands[0].ndim)

    def even(spec: Spec, *operands: Array) -> list[Array]:
        q, k, _, *others = operands
        _require(capability, spec, q, k, others[: len(spec.extras)])
        return _simplest(capability, spec, functools.partial(run, spec), operands, dims)

    return _of_even_length(even, spec, dims, operands)


def _of_even_length(
    function: Callable[..., list[Array]], spec: Spec, dims: Dims, operands: Sequence[Array]
) -> list[Array]:
    """Returns `function(spec, *operands)`, with another row or key where their number is odd.

    JAX refuses odd lengths in training, such as that of tokens without the last one. `causal`, or
    else the mask, hides the new key from all other rows, and the new row's gradient is 0.
    """
    q, k = operands[:2]
    d = numbers(q.ndim)
    sizes = {d.length: q.shape[-4], d.keys: k.shape[-3]}
    if spec.causal:
        hidden = sizes[d.length] == sizes[d.keys]
    else:
        hidden = d.keys in spec.dims.get("mask", ()) and 1 not in sizes.values()
    is_odd = hidden and any(n % 2 for n in sizes.values())
    if is_odd:
        more = functools.partial(_with_another, spec, {n: size % 2 for n, size in sizes.items()}, d)
        operands = [more(i, a, n) for i, (a, n) in enumerate(zip(operands, dims[0]))]
    try:
        results = function(spec, *operands)
    except RuntimeError as error:  # NotImplementedError too
        raise Unsupported(f"JAX has no cuDNN for this ({error})") from None
    if is_odd:
        less = lambda a, dims: a[tuple(slice(sizes.get(n)) for n in dims)]
        results = [less(a, n) for a, n in zip(results, dims[1])]
    return results


def _with_another(
    spec: Spec, more: dict[int, int], d: Numbers, i: int, array: Array, dims: Dimensions
) -> Array:
    """Returns operand i with another row or key.

    An operand that is causal, hides nothing or has contiguous segments keeps that property, which
    decides about the simplest kernel.
    """
    pad = functools.partial(jnp.pad, array)
    widths = lambda *of: [(0, more[n] if n in of else 0) for n in dims]
    name = dict(enumerate(spec.dims, 3)).get(i)
    if name == "mask":
        array = pad(widths(d.keys), constant_values=spec.causal)
        return jnp.pad(array, widths(d.length), constant_values=True)
    if name in ("segments", "key segments"):
        return pad(widths(d.length, d.keys), mode="edge")
    return pad(widths(d.length, d.keys))


def _forward(spec: Spec, call: "_Call", q: Array, k: Array, v: Array, *_: Array) -> list[Array]:
    if not spec.statistics:
        out = call.attend(*call.flat(q, k, v), *call.operands)
        return [call.only_seen(out, 0).reshape(q.shape)]
    out, lse = _run_forward(call, call.flat(q, k, v))
    lse = call.of_rows(lse)
    if (some := call.rows_that_see) is not None:
        lse = jnp.where(some, lse, jnp.inf)
    out, lse = call.only_seen(out, 0), lse.reshape([q.shape[n] for n in numbers(q.ndim).rows])
    return [out.reshape(q.shape), lse, jnp.zeros_like(lse)][: 1 + spec.statistics]


def _gradients(
    spec: Spec, call: "_Call", q: Array, k: Array, v: Array, *others: Array
) -> list[Array]:
    *_, out, most, log_sum, dout = others
    *qkv, flat_out, flat_dout = call.flat(q, k, v, out, dout)
    # A row adds nothing to any gradient with a gradient of 0, and weights that are finite.
    lse = jnp.where(most == jnp.inf, 0, most + log_sum)
    lse = call.of_kernel(lse.reshape(len(flat_out), -1, q.shape[-4]))
    found = _run_backward(call, qkv, flat_out, lse, call.only_seen(flat_dout, 0))
    results = [g.reshape(a.shape) for g, a in zip(found, (q, k, v))]
    return results + ([call.whole_bias(found[3])] if spec.dbias else [])


# ---------------------------------------------------------------- supported arguments


_INDEXED = 2**31  # elements of an array; the gradients of more were wrong on an H100, cuDNN 9


def _require(capability: int, spec: Spec, q: Array, k: Array, extras: Sequence[Array]) -> None:
    """Raises Unsupported, with the reason, for operands that cuDNN does not take."""
    length, keys, width = q.shape[-4], k.shape[-3], q.shape[-1]
    if spec.softcap is not None:
        raise _Refused("a softcap", "cuDNN has no softcap")
    if {"dropout", "lengths", "key lengths"} & {*spec.dims}:
        raise _Refused("dropout or lengths", "cuDNN is not asked for dropout and lengths yet")
    if q.dtype.name not in NARROW:
        raise _Refused(q.dtype.name, f"cuDNN takes {' and '.join(NARROW)}, not {q.dtype.name}")
    most = 256 if capability >= 90 else 128
    if width % 8 or width > most:
        reason = f"cuDNN takes heads of a multiple of 8 up to {most}, not {width}"
        raise _Refused(f"heads of {width}", reason)
    if 0 in (*q.shape, *k.shape) or 1 in (length, keys):
        raise _Refused("one query or key", "cuDNN takes two queries and keys or more")
    if spec.causal and length != keys:
        reason = "with causal, cuDNN takes as many keys as queries"
        raise _Refused(f"causal, {length} queries and {keys} keys", reason)
    if max(q.size, k.size) >= _INDEXED:
        raise _Refused("2**31 elements", "cuDNN takes fewer than 2**31 elements of an array")
    if not spec.extras:
        return
    if length % 2 or keys % 2:
        reason = "with a bias, a mask or segments, cuDNN takes even lengths"
        raise _Refused("an odd length", reason)
    if "bias" in spec.dims and extras[0].dtype != q.dtype:
        raise _Refused(
            f"a bias of {extras[0].dtype.name}",
            f"cuDNN would round the bias from {extras[0].dtype.name} to {q.dtype.name}; cast it "
            "if that is enough",
        )
    given = sum(a.size for a in extras)
    call = lambda *extras: _Call(spec, q, k, extras).operands
    made = sum(a.size for a in jax.eval_shape(call, *extras))
    if made > max(_MOST_MADE, given):
        reason = "cuDNN would need a mask or a bias of all scores in memory"
        raise _Refused("a mask of all scores", reason)


_Run = Callable[..., list[Array]]  # takes a call and the operands of `forward` or `gradients`


def _simplest(
    capability: int, spec: Spec, run: _Run, operands: Sequence[Array], dims: Dims
) -> list[Array]:
    """Returns `run(call, *operands)` for the simplest call that computes the same.

    A mask is an array of scores to read, and cuDNN skips nothing for it. When the program runs, a
    kernel without a mask serves if the mask is that of `causal`, if it hides nothing, if it leaves
    each sequence its first keys, or rows and keys, or if equal segment ids are contiguous.
    """
    q, k, _, *others = operands
    extras = others[: len(spec.extras)]
    whole = lambda *operands: run(_Call(spec, q, k, extras), *operands)
    if "segments" in spec.dims:
        return _packed(capability, spec, run, whole, operands, dims)
    if "mask" not in spec.dims:
        return whole(*operands)
    # Of a constant XLA would compute all that follows while it compiles: 100 s for 2048 x 2048.
    extras[-1] = lax.optimization_barrier(extras[-1])
    d, simple, along = numbers(q.ndim), replace(spec, extras=spec.extras[:-1]), {*spec.dims["mask"]}
    square = {d.length, d.keys} <= along and q.shape[-4] == k.shape[-3]
    seen = spread(extras[-1], spec.dims["mask"], d.scores)
    if spec.causal and d.length in along:
        seen &= reached(spec, q.shape[-4], k.shape[-3])
    padding = None
    if spec.window is None and d.keys in along and not {d.heads, d.group} & along:
        padding = _Padding(q, k, seen, of_rows=d.length in along)
    flags, branches = [], []
    for causal in sorted({spec.causal, spec.causal or square}, reverse=True):
        kind = replace(simple, causal=causal)
        near = jnp.ones((1, 1), bool)
        if causal and d.length in along:
            near = reached(kind, q.shape[-4], k.shape[-3])
        for given in [None] if padding is None else [None, padding]:
            call = functools.partial(_Call, kind, q, k, extras[:-1], given)
            flags.append(jnp.all(seen == near) if given is None else given.fits(near))
            branches.append(lambda *operands, call=call: run(call(), *operands))
    first = jnp.argmax(jnp.stack([*flags, jnp.ones((), bool)]))
    return lax.switch(first, [*branches, whole], *operands)


class _Padding:
    """The rows and keys that a mask leaves to each sequence, if these are its first.

    Attributes:
      rows, keys: their numbers, `(batch,)`.
    """

    def __init__(self, q: Array, k: Array, seen: Array, *, of_rows: bool):
        batch, length, keys = q.shape[:-4], q.shape[-4], k.shape[-3]
        count = jnp.sum(jnp.any(seen, -2, keepdims=True), -1, keepdims=True)
        rows = jnp.full_like(count, length)
        self._seen, self._inside = seen, jnp.arange(keys) < count
        if of_rows:
            rows = jnp.sum(jnp.any(seen, -1, keepdims=True), -2, keepdims=True)
            self._inside &= jnp.arange(length)[:, None] < rows
        each = lambda n: jnp.broadcast_to(n.reshape(n.shape[: len(batch)]), batch).reshape(-1)
        self.rows, self.keys = each(rows).astype(jnp.int32), each(count).astype(jnp.int32)

    def fits(self, near: Array) -> Array:
        """Tells if the mask is that of these numbers, of the keys that are `near` each row."""
        return jnp.all(self._seen == self._inside & near) & jnp.all(self.keys > 0)


# ---------------------------------------------------------------- segments


_PACKED = 2**32  # bytes that cuDNN's backward may take in addition to its operands


def _packed(
    capability: int,
    spec: Spec,
    run: _Run,
    whole: Callable[..., list[Array]],
    operands: Sequence[Array],
    dims: Dims,
) -> list[Array]:
    """Returns `run` with packed segments, or `whole()` if there are too many.

    Their number is known when the program runs. cuDNN's kernels start blocks, and keep sums, for
    the largest number allowed, each as long as the sequence. So at most one per 512 tokens is
    allowed, and sequences and heads are computed in parts whose sums fit.
    """
    q, k, *others = operands
    d, sizes = numbers(q.ndim), dict(zip(numbers(q.ndim).q, q.shape))
    length, of = sizes[d.length], {n for dims in spec.dims.values() for n in dims}
    if (
        capability < 90
        or length != k.shape[-3]
        or spec.window is not None
        or len(spec.extras) > 2  # a bias or a mask, too
        or not of <= {*d.batch, d.length, d.keys}
    ):
        return whole(*operands)
    # float32 sums of dq, and dk and dv of each head
    segment = 8 * length * sizes[d.heads] * sizes[d.group] * sizes[d.width]
    first = math.prod(sizes[n] for n in d.batch[1:])
    least = segment * first // sizes[d.heads]  # if each sequence had one segment
    limit = min(max(length // 512, 2), _PACKED // max(least, 1))
    if limit < 2:
        return whole(*operands)

    def packed(*operands: Array) -> list[Array]:
        q, _, _, *others = operands
        segments = _Segments(spec, q, others)
        return run(_PackedCall(spec, q, segments, limit), *operands)

    left = segment * first * sizes[d.batch[0]] * limit
    for n in (d.batch[0], d.heads):
        size = sizes[n]
        counts = [c for c in range(1, size + 1) if size % c == 0]
        count = next((c for c in counts if left <= c * _PACKED), size)
        left //= count
        packed = functools.partial(_in_parts, packed, n, count, dims)
    try:
        jax.eval_shape(packed, *operands)
    except (RuntimeError, TypeError):  # this GPU, cuDNN or JAX has no packed layout
        return whole(*operands)
    segments = _Segments(spec, q, others[1:])
    fits = segments.in_rows & (segments.most <= limit)
    return lax.cond(fits, packed, whole, *operands)


def _in_parts(
    function: Callable[..., list[Array]], n: int, count: int, dims: Dims, *operands: Array
) -> list[Array]:
    """Returns `function(*operands)`, computed in `count` parts of dimension n, one by one."""
    if count == 1:
        return function(*operands)

    def split(array: Array, i: int) -> Array:
        shape = array.shape
        return jnp.moveaxis(array.reshape(*shape[:i], count, -1, *shape[i + 1 :]), i, 0)

    def joined(array: Array, i: int) -> Array:
        array = jnp.moveaxis(array, 0, i)
        return array.reshape(*array.shape[:i], -1, *array.shape[i + 2 :])

    def part(given: list[Array]) -> list[Array]:
        some = iter(given)
        return function(*[next(some) if n in of else a for a, of in zip(operands, dims[0])])

    given = [split(a, [*of].index(n)) for a, of in zip(operands, dims[0]) if n in of]
    results = lax.map(part, given)
    return [joined(a, [*of].index(n)) for a, of in zip(results, dims[1], strict=True)]


class _Segments:
    """The places at which the segments of each sequence begin.

    Attributes:
      ids: `(batch, length)`.
      in_rows: whether queries and keys have the same ids, and equal ones are contiguous.
      first: whether a token is the first of its segment.
      most: the largest number of segments in a sequence.
    """

    def __init__(self, spec: Spec, q: Array, extras: Sequence[Array]):
        d, sizes = numbers(q.ndim), dict(zip(numbers(q.ndim).q, q.shape))
        shape = [sizes[n] for n in (*d.batch, d.length)]
        rename = lambda dims: tuple(d.length if n == d.keys else n for n in dims)
        self.ids, others = (
            jnp.broadcast_to(spread(a, rename(dims), (*d.batch, d.length)), shape).reshape(
                -1, shape[-1]
            )
            for a, dims in zip(extras, spec.dims.values())
        )
        before, after = self.ids[:, :-1], self.ids[:, 1:]
        new = jnp.ones((len(self.ids), 1), bool)
        self.first = jnp.concatenate([new, before != after], axis=1)
        self.most = jnp.max(jnp.sum(self.first, axis=1))
        # Ids that grow, except for padding at the end with a smaller one.
        falls = jnp.sum(after < before, axis=1)
        ends = self.ids[:, 0] > self.ids[:, -1]
        in_rows = (falls == 0) | (falls == 1) & ends
        self.in_rows = jnp.all(in_rows) & jnp.all(self.ids == others)


# ---------------------------------------------------------------- a call


class _Call:
    """A call of `jax.nn.dot_product_attention`, with batch and heads in one dimension each.

    Its operands besides q, k and v are none, a mask, or a bias that includes the mask:
    `(batch or 1, heads or 1, length, key length)`. A mask alone has no gradient to compute.
    """

    def __init__(
        self,
        spec: Spec,
        q: Array,
        k: Array,
        extras: Sequence[Array],
        padding: _Padding | None = None,
    ):
        self._spec, self._d, given = spec, numbers(q.ndim), spec.named(extras)
        self._padding = padding
        self._sizes = dict(zip(self._d.q, q.shape)) | {self._d.keys: k.shape[-3]}
        self.has_bias, mask = "bias" in given, None
        if "mask" in given:
            mask = self._whole(given["mask"], spec.dims["mask"])
        if "segments" in given:
            names = "segments", "key segments"
            ids = [spread(given[name], spec.dims[name], self._d.scores) for name in names]
            dims = tuple(n for n in self._d.scores if any(n in spec.dims[name] for name in names))
            equal = (ids[0] == ids[1]).reshape([self._sizes[n] for n in dims])
            equal = self._whole(equal, dims)
            mask = equal if mask is None else mask & equal
        self.operands, self._seen = [] if mask is None else [mask], mask
        if self.has_bias:
            bias = self._whole(given["bias"], spec.dims["bias"])
            # XLA would compute with constants while it compiles, for minutes, if it knew these.
            known = [jnp.asarray(n, bias.dtype) for n in (-jnp.inf, _HIDDEN[bias.dtype.name])]
            least, hidden = lax.optimization_barrier(known)
            finite = bias != least  # or NaN
            self._seen = finite if mask is None else mask & finite
            bias = jnp.maximum(bias, hidden)
            self.operands = [bias if mask is None else jnp.where(mask, bias, hidden)]

    def of_rows(self, lse: Array) -> Array:
        """Returns the log-sum-exps of all rows, `(batch, heads, length)`, from the kernel's."""
        return lse

    def of_kernel(self, lse: Array) -> Array:
        """Returns the backward kernel's operand for the log-sum-exps of all rows."""
        return lse

    def _whole(self, array: Array, dims: Dimensions) -> Array:
        d, sizes = self._d, self._sizes
        shape, joined = [], []
        for parts in (d.batch, (d.heads, d.group)):
            whole = [sizes[n] for n in parts] if set(parts) & set(dims) else [1] * len(parts)
            shape += whole
            joined.append(math.prod(whole))
        lengths = sizes[d.length], sizes[d.keys]
        return jnp.broadcast_to(spread(array, dims, d.scores), (*shape, *lengths)).reshape(
            *joined, *lengths
        )

    def whole_bias(self, dbias: Array) -> Array:
        """Returns the gradient of the bias as it was given, in float32."""
        dims = self._spec.dims["bias"]
        like = jnp.zeros([self._sizes[n] for n in dims], jnp.float32)
        whole, pull = jax.vjp(lambda a: self._whole(a, dims), like)
        dbias = dbias.astype(jnp.float32)
        # A mask in the bias may have differed along dimensions that the bias has not.
        more = [i for i, (m, n) in enumerate(zip(whole.shape, dbias.shape)) if m != n]
        return pull(jnp.sum(dbias, more, keepdims=True))[0]

    def flat(self, *arrays: Array) -> list[Array]:
        """Returns arrays like q as `(batch, length, heads, width)`, and k and v likewise."""
        n = len(self._d.batch)
        each = lambda a: a.reshape(math.prod(a.shape[:n]), a.shape[n], -1, a.shape[-1])
        return [each(a) for a in arrays]

    def only_seen(self, x: Array, fill: float) -> Array:
        """Returns x, `(batch, length, heads, width)`, with `fill` in rows that see nothing.

        cuDNN gives these rows the mean of all values.
        """
        some = self.rows_that_see
        return x if some is None else jnp.where(jnp.moveaxis(some, 1, 2)[..., None], x, fill)

    @functools.cached_property
    def rows_that_see(self) -> Array | None:
        """`(batch or 1, heads or 1, length)`; None where every row sees a key."""
        length, keys = self._sizes[self._d.length], self._sizes[self._d.keys]
        padding, some = self._padding, None
        if padding is not None:
            some = (jnp.arange(length) < padding.rows[:, None])[:, None]
        if (seen := self._seen) is None:
            return some
        if self._spec.causal:
            seen &= jnp.expand_dims(reached(self._spec, length, keys), range(seen.ndim - 2))
        if padding is not None:
            seen &= (jnp.arange(keys) < padding.keys[:, None])[:, None, None]
        seen = jnp.any(seen, axis=-1)
        return seen if some is None else some & seen

    def attend(self, q: Array, k: Array, v: Array, *operands: Array) -> Array:
        """The call itself."""
        window = self._spec.window
        operand = next(iter(operands), None)
        padding = self._padding
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=operand if self.has_bias else None,
            mask=None if self.has_bias else operand,
            scale=self._spec.scale,
            is_causal=self._spec.causal,
            local_window_size=None if window is None else (window - 1, 0),
            query_seq_lengths=None if padding is None else padding.rows,
            key_value_seq_lengths=None if padding is None else padding.keys,
            implementation="cudnn",
        )


class _PackedCall(_Call):
    """A call with at most `limit` segments of each sequence, by cuDNN's packed layout.

    Its kernels count the segments of all sequences in a row, and have the statistics of each
    segment's rows from the segment's own first row on: `(batch · limit, heads, length)`.
    """

    def __init__(self, spec: Spec, q: Array, segments: _Segments, limit: int):
        super().__init__(replace(spec, extras=()), q, q, ())
        self.limit, self._segments = limit, segments
        (batch, length), first = segments.ids.shape, segments.first
        place = jnp.cumsum(first, axis=1) - 1  # number of a token's segment in its sequence
        count, token = place[:, -1:] + 1, jnp.arange(length)
        starts = jnp.full((batch, limit + 1), -1, jnp.int32)
        at = jnp.arange(batch)[:, None], jnp.where(first, place, limit + 1)
        starts = starts.at[at].set(jnp.broadcast_to(token, first.shape), mode="drop")
        number = jnp.arange(limit)
        ends = jnp.where(number + 1 < count, starts[:, 1:], length)
        lengths = jnp.where(number < count, ends - starts[:, :-1], -1)
        self.operands = [lengths, starts]
        self._number = place + jnp.cumsum(count, axis=0) - count
        self._within = token - lax.cummax(jnp.where(first, token, 0), axis=1)

    @functools.cached_property
    def rows_that_see(self) -> None:
        return None

    def attend(self, q: Array, k: Array, v: Array, *operands: Array) -> Array:
        scale, causal = self._spec.scale, self._spec.causal
        return packed_attention(q, k, v, *operands, scale=scale, causal=causal)

    def of_rows(self, lse: Array) -> Array:
        heads = jnp.arange(lse.shape[1])[None, :, None]
        return lse[self._number[:, None], heads, self._within[:, None]]

    def of_kernel(self, lse: Array) -> Array:
        batch, heads, length = lse.shape
        flat = jnp.moveaxis(lse, 1, 0).reshape(heads, -1)
        count, all_rows = batch * self.limit, batch * length
        (starts,) = jnp.nonzero(self._segments.first.reshape(-1), size=count, fill_value=all_rows)
        rows = jnp.minimum(starts[:, None] + jnp.arange(length), all_rows - 1)
        return jnp.moveaxis(flat[:, rows], 0, 1)


def reached(spec: Spec, length: int, keys: int) -> Array:
    """Returns the keys that `causal` and `window` leave to each query."""
    behind = jnp.arange(length)[:, None] - jnp.arange(keys)[None]
    return behind >= 0 if spec.window is None else (behind >= 0) & (behind < spec.window)


# ---------------------------------------------------------------- the two kernels


def _run_forward(call: _Call, qkv: Sequence[Array]) -> list[Array]:
    """Returns out, `(batch, length, heads, width)`, and its lse, `(batch, heads, length)`."""
    found: list[Array] = []

    def rule(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if found:  # the rest is of the backward
            return [None] * len(eqn.outvars)
        results = results_of(eqn, operands)
        if _is_forward_kernel(eqn):
            found.extend(results)
        return results

    _evaluate(call, qkv, qkv[0], rule)
    return found


def _run_backward(
    call: _Call, qkv: Sequence[Array], out: Array, lse: Array, dout: Array
) -> list[Array]:
    """Returns the gradients of q, k, v and the bias."""
    known = lambda eqn, operands: (
        [out, lse] if _is_forward_kernel(eqn) else results_of(eqn, operands)
    )
    return _evaluate(call, qkv, dout, known)


def _evaluate(call: _Call, qkv: Sequence[Array], dout: Array, rule: Any) -> list[Array]:
    """Returns the gradients by JAX's derivative of a call, evaluated by `rule`."""
    count = len(qkv) + call.has_bias

    def derivative(dout: Array, *operands: Array) -> Sequence[Array]:
        fixed = operands[count:]
        return jax.vjp(lambda *moving: call.attend(*moving, *fixed), *operands[:count])[1](dout)

    operands = [dout, *qkv, *call.operands]
    program = jax.make_jaxpr(derivative)(*operands)
    if not any(map(_is_forward_kernel, program.jaxpr.eqns)):
        raise Unsupported("this version of JAX has another program for cuDNN's attention")
    return evaluate(program, operands, rule)


def _is_forward_kernel(eqn: Any) -> bool:
    return eqn.primitive.name.startswith("dot_product_attention_fwd") and len(eqn.outvars) == 2
