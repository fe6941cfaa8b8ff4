"""Attention by cuDNN, through `jax.nn.dot_product_attention`, for one device.

The log-sum-exps of its kernels stand for the rows' largest scores, with 0 for the logs of their
sums.

Where a mask decides when the program runs which kernel serves, all that may serve run, those that
are not wanted on sequences of length 0: they take some microseconds, and write nothing. A
`lax.cond` would make the host wait for the device.

Dropout has two calls each way. With P the softmax, M the mask of what is kept, r the rate and
δ = Σ dout · out:

    out = out' · exp(lse' - lse) / (1 - r)      out', lse' of the kept keys alone, lse of all
    ds = P · (M / (1 - r) · dP - δ)             of kept keys, by lse + log(1 - r) and (1 - r) · out
                                                of dropped ones, by lse, out and values of 0
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
from .calls import Call, reached, run_backward, run_forward
from .spec import Dimensions, Dims, Numbers, Spec, numbers, spread

# cuDNN takes masks and biases for all queries and keys, so they are made for the call where the
# user's are smaller. From so many on, blocks serve: their memory is linear.
_MOST_MADE = 2**28

# With fewer keys a mask takes less time than a kernel that is not wanted.
_CHOICE = 512


def forward(capability: int, spec: Spec, *operands: Array) -> list[Array]:
    """Returns the results of `blocks.forward`; raises Unsupported if cuDNN cannot serve."""
    return _served(capability, _forward, Spec.forward_dims, spec, operands)


def gradients(capability: int, spec: Spec, *operands: Array) -> list[Array]:
    """Returns the results of `blocks.gradients`; raises Unsupported if cuDNN cannot serve."""
    return _served(capability, _gradients, Spec.gradients_dims, spec, operands)


def kind(capability: int, spec: Spec, avals: Sequence[Any]) -> str:
    """The kernels that `forward` calls for operands of these types; Unsupported if none."""
    names: list[str] = []

    def run(spec: Spec, call: Call, *operands: Array) -> list[Array]:
        names.insert(0, call.name)
        return _forward(spec, call, *operands)

    served = functools.partial(_served, capability, run, Spec.forward_dims, spec)
    jax.eval_shape(lambda *operands: served(operands), *avals)
    if "dropout" in spec.dims:
        return "cuDNN, twice: dropout"
    return "cuDNN" + ", with " * any(names) + " or ".join(dict.fromkeys(filter(None, names)))


def _served(
    capability: int,
    run: Callable[..., list[Array]],
    dims_of: Callable[..., Dims],
    spec: Spec,
    operands: Sequence[Array],
) -> list[Array]:
    """Returns `run(spec, call, *operands)` by the calls that may serve, of even lengths."""

    def even(spec: Spec, *operands: Array) -> list[Array]:
        q, k, _, *others = operands
        dims = dims_of(spec, q.ndim)
        extras = spec.named(others[: len(spec.extras)])
        _require(capability, spec, q, k, extras)
        return _chosen(capability, spec, functools.partial(run, spec), extras, operands, dims)

    return _of_even_length(even, spec, dims_of(spec, operands[0].ndim), operands)


def _of_even_length(
    function: Callable[..., list[Array]], spec: Spec, dims: Dims, operands: Sequence[Array]
) -> list[Array]:
    """Returns `function(spec, *operands)`, with another row or key where their number is odd.

    JAX refuses odd lengths beside a bias, and cuDNN is slow with them. `causal`, or else the mask,
    or else a length hides the new key from all other rows, and the new row's gradient is 0.
    """
    q, k = operands[:2]
    d = numbers(q.ndim)
    sizes = {d.length: q.shape[-4], d.keys: k.shape[-3]}
    is_odd = not {0, 1} & {*sizes.values()} and any(n % 2 for n in sizes.values())
    is_odd = is_odd and (not spec.causal or sizes[d.length] == sizes[d.keys])
    if is_odd:
        more = functools.partial(_with_another, spec, {n: size % 2 for n, size in sizes.items()}, d)
        operands = [more(i, a, n) for i, (a, n) in enumerate(zip(operands, dims[0]))]
        if not spec.causal and d.keys not in spec.dims.get("mask", ()):
            end, names = 3 + len(spec.extras), [*spec.dims]
            if "key lengths" in names:
                i = 3 + names.index("key lengths")
                operands[i] = jnp.minimum(operands[i], sizes[d.keys])
            else:
                operands.insert(end, jnp.int32(sizes[d.keys]))
                spec = replace(spec, extras=(*spec.extras, ("key lengths", ())))
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


def _forward(spec: Spec, call: Call, q: Array, k: Array, v: Array, *_: Array) -> list[Array]:
    flat = call.flat(q, k, v)
    if not spec.statistics and not call.parts:
        out = call.attend(*flat, *call.operands)
        return [call.only_seen(out, 0).reshape(q.shape)]
    out, lse = run_forward(call, flat)
    if call.parts:
        out, of_kept = run_forward(call.parts[0], flat)
        part = jnp.exp(of_kept - lse) / (1 - spec.dropout_rate)
        out = (out * jnp.moveaxis(part, 1, 2)[..., None]).astype(out.dtype)
    lse = call.of_rows(lse)
    if (some := call.rows_that_see) is not None:
        lse = jnp.where(some, lse, jnp.inf)
    out, lse = call.only_seen(out, 0), lse.reshape([q.shape[n] for n in numbers(q.ndim).rows])
    return [out.reshape(q.shape), lse, jnp.zeros_like(lse)][: 1 + spec.statistics]


def _gradients(spec: Spec, call: Call, q: Array, k: Array, v: Array, *others: Array) -> list[Array]:
    *_, out, most, log_sum, dout = others
    *qkv, flat_out, flat_dout = call.flat(q, k, v, out, dout)
    # A row that sees nothing adds nothing to any gradient: its gradient and its weights are 0.
    lse = jnp.where(most == jnp.inf, _EMPTY, most + log_sum)
    lse = call.of_kernel(lse.reshape(len(flat_out), -1, q.shape[-4]))
    dout = call.only_seen(flat_dout, 0)
    if call.parts:
        (kept, dropped), keep = call.parts, 1 - spec.dropout_rate
        whole = (flat_out.astype(lse.dtype) * keep).astype(dout.dtype)
        found = run_backward(kept, qkv, whole, lse + math.log(keep), dout)
        qkv[2] = jnp.zeros_like(qkv[2])
        of_dropped = run_backward(dropped, qkv, flat_out, lse, dout)
        found = [a if i == 2 else a + b for i, (a, b) in enumerate(zip(found, of_dropped))]
    else:
        found = run_backward(call, qkv, flat_out, lse, dout)
    results = [g.reshape(a.shape) for g, a in zip(found, (q, k, v))]
    return results + ([call.whole_bias(found[3])] if spec.dbias else [])


# ---------------------------------------------------------------- supported arguments


_EMPTY = 2.0**100  # a log-sum-exp beside which every score's exponential is 0
_INDEXED = 2**31  # elements of an array; the gradients of more were wrong on an H100, cuDNN 9


def _require(capability: int, spec: Spec, q: Array, k: Array, extras: dict[str, Array]) -> None:
    """Raises Unsupported for operands that cuDNN does not take: "the operand: the reason"."""
    length, keys, width = q.shape[-4], k.shape[-3], q.shape[-1]
    if spec.softcap is not None:
        raise Unsupported("a softcap: cuDNN has none")
    if q.dtype.name not in NARROW:
        raise Unsupported(f"{q.dtype.name}: cuDNN takes {' and '.join(NARROW)}")
    most = 256 if capability >= 90 else 128
    if width % 8 or width > most:
        raise Unsupported(f"heads of {width}: cuDNN takes a multiple of 8 up to {most}")
    if 0 in (*q.shape, *k.shape) or 1 in (length, keys):
        raise Unsupported("one query or key: cuDNN takes two or more")
    if spec.causal and length != keys:
        raise Unsupported(f"{length} queries of {keys} keys: with causal cuDNN takes as many")
    if max(q.size, k.size) >= _INDEXED:
        raise Unsupported("an array of 2**31 elements: cuDNN takes fewer")
    if "bias" in extras and (dtype := extras["bias"].dtype) != q.dtype:
        raise Unsupported(
            f"a bias of {dtype.name}: cuDNN would round it to {q.dtype.name}; cast it if that is "
            "enough"
        )

    def operands(extras: dict[str, Array]) -> list[list[Array]]:
        call = Call(spec, q, k, extras)
        return [one.operands for one in (call, *call.parts)]

    made = max((a.size for a in jax.tree.leaves(jax.eval_shape(operands, extras))), default=0)
    if made > max(_MOST_MADE, sum(a.size for a in extras.values())):
        raise Unsupported("a mask or bias of all scores: cuDNN would need it in memory")


_Run = Callable[..., list[Array]]  # takes a call and the operands of `forward` or `gradients`


def _chosen(
    capability: int,
    spec: Spec,
    run: _Run,
    extras: dict[str, Array],
    operands: Sequence[Array],
    dims: Dims,
) -> list[Array]:
    """Returns `run(call, *operands)` for the simplest call that computes the same.

    A mask is an array of scores to read, and cuDNN skips nothing for it. When the program runs, a
    kernel without a mask serves if the mask is that of `causal`, if it hides nothing, if it leaves
    each sequence its first keys, or rows and keys, or if equal segment ids are contiguous.
    """
    q, k = operands[:2]
    # XLA would compute all that follows from constants as it compiles: 100 s for 2048 x 2048.
    if "mask" in extras:
        extras["mask"] = lax.optimization_barrier(extras["mask"])
    if "dropout" in extras:
        # All that the forward's kernels read would be kept for the backward's, which make it again
        # of a mask that depends on out's gradient: XLA drops barriers before it orders a program.
        last = operands[-1]
        one = lax.slice(last, [0] * last.ndim, [1] * last.ndim).reshape(())
        never = one.astype(jnp.float32) > jnp.inf
        extras["dropout"] = lax.optimization_barrier(extras["dropout"]) & ~never
    ways, calls = [], []
    if "segments" in extras:
        ways = _packed(capability, spec, run, extras, operands, dims)
    elif "mask" in extras and k.shape[-3] >= _CHOICE and not {"lengths", "key lengths"} & {*extras}:
        calls = _without_mask(spec, q, k, extras)
        ways = [(flag, functools.partial(run, call, *operands)) for flag, call in calls]
    wanted = ~functools.reduce(jnp.logical_or, [flag for flag, _ in ways]) if ways else None
    whole = Call(spec, q, k, extras, wanted=wanted)
    for _, call in calls:  # the same if it serves, and XLA makes its operands once
        call.rows_that_see = whole.rows_that_see
    found = run(whole, *operands)
    for flag, way in reversed(ways):
        # No sum: a kernel that was not wanted has not written its results.
        found = [jnp.where(flag, a, b) for a, b in zip(way(), found, strict=True)]
    return found


def _without_mask(
    spec: Spec, q: Array, k: Array, extras: dict[str, Array]
) -> list[tuple[Array, Call]]:
    """Returns calls without the mask, each with a flag that tells if it has the mask's results.

    One flag at most is set.
    """
    d, others = numbers(q.ndim), {n: a for n, a in extras.items() if n != "mask"}
    simple = replace(spec, extras=tuple((n, spec.dims[n]) for n in others))
    along, length, keys = {*spec.dims["mask"]}, q.shape[-4], k.shape[-3]
    seen = spread(extras["mask"], spec.dims["mask"], d.scores)
    square = {d.length, d.keys} <= along and length == keys
    if spec.causal and d.length in along:
        seen &= reached(spec, length, keys)
    padding = None
    if d.keys in along and not {d.heads, d.group} & along:
        padding = _Padding(q, k, seen, of_rows=d.length in along)
    calls, before = [], jnp.zeros((), bool)
    for causal in sorted({spec.causal, spec.causal or square}, reverse=True):
        kind = replace(simple, causal=causal)
        near = jnp.ones((1, 1), bool)
        if causal and d.length in along:
            near = reached(kind, length, keys)
        fits = jnp.all(seen == near) if padding is None else padding.fits(near)
        fits, before = fits & ~before, before | fits
        lengths = None if padding is None else (padding.rows, padding.keys)
        calls.append((fits, Call(kind, q, k, others, lengths, fits)))
    return calls


class _Padding:
    """The rows and keys that a mask leaves to each sequence, if these are its first."""

    rows: Array  # their number, `(batch,)`
    keys: Array

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
        """True where the mask is that of these numbers, of the keys that are `near` each row."""
        return jnp.all(self._seen == self._inside & near)


# ---------------------------------------------------------------- segments


_PACKED = 2**32  # bytes that cuDNN's backward may take in addition to its operands


def _packed(
    capability: int,
    spec: Spec,
    run: _Run,
    extras: dict[str, Array],
    operands: Sequence[Array],
    dims: Dims,
) -> list[tuple[Array, Callable[[], list[Array]]]]:
    """Returns `run` with packed segments and a flag, whether there are few; else nothing.

    Their number is known when the program runs. cuDNN's kernels start blocks, and keep sums, for
    the largest number allowed, each as long as the sequence. So at most one per 512 tokens is
    allowed, and sequences and heads are computed in parts whose sums fit.
    """
    q, k = operands[:2]
    d, sizes = numbers(q.ndim), dict(zip(numbers(q.ndim).q, q.shape))
    length, of = sizes[d.length], {n for dims in spec.dims.values() for n in dims}
    if (
        capability < 90
        or length != k.shape[-3]
        or spec.window is not None
        or len(spec.extras) > 2  # a bias or a mask, too
        or not of <= {*d.batch, d.length, d.keys}
    ):
        return []
    # float32 sums of dq, and dk and dv of each head
    segment = 8 * length * sizes[d.heads] * sizes[d.group] * sizes[d.width]
    first = math.prod(sizes[n] for n in d.batch[1:])
    least = segment * first // sizes[d.heads]  # if each sequence had one segment
    limit = min(max(length // 512, 2), _PACKED // max(least, 1))
    if limit < 2:
        return []

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
        return []
    segments = _Segments(spec, q, [*extras.values()])
    return [(segments.fit(limit), functools.partial(packed, *operands))]


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
    """The places at which the segments of each sequence begin."""

    ids: Array  # `(batch, length)`
    in_rows: Array  # queries and keys have the same ids, and equal ones are contiguous
    first: Array  # a token is the first of its segment
    most: Array  # the largest number of segments in a sequence

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

    def fit(self, limit: int) -> Array:
        """True where a packed call of `limit` segments has their results."""
        return self.in_rows & (self.most <= limit)


class _PackedCall(Call):
    """A call with at most `limit` segments of each sequence, by cuDNN's packed layout.

    Its kernels count the segments of all sequences in a row, and have the statistics of each
    segment's rows from the segment's own first row on: `(batch · limit, heads, length)`.
    """

    def __init__(self, spec: Spec, q: Array, segments: _Segments, limit: int):
        super().__init__(replace(spec, extras=()), q, q, {})
        self.limit, self._segments, self.name = limit, segments, "packed segments"
        (batch, length), first = segments.ids.shape, segments.first
        place = jnp.cumsum(first, axis=1) - 1  # number of a token's segment in its sequence
        count, token = place[:, -1:] + 1, jnp.arange(length)
        starts = jnp.full((batch, limit + 1), -1, jnp.int32)
        at = jnp.arange(batch)[:, None], jnp.where(first, place, limit + 1)
        starts = starts.at[at].set(jnp.broadcast_to(token, first.shape), mode="drop")
        number = jnp.arange(limit)
        ends = jnp.where(number + 1 < count, starts[:, 1:], length)
        lengths = jnp.where(number < count, ends - starts[:, :-1], -1)
        fit = segments.fit(limit)  # else there is nothing to do
        self.operands = [jnp.where(fit, a, -1) for a in (lengths, starts)]
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
