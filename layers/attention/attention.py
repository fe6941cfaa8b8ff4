"""The public function: its arguments, and the placement of its operands."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...native.implementation import BEST, Implementation, Order
from ..core.arguments import (
    array_of,
    checked_softcap,
    finite,
    flag,
    floating,
    floating_dtype,
    integer,
    requested,
)
from ..core.op import match, reshard_like, vary, varying_axes
from ..core.sharding import axes_of, whole
from . import op as ops
from .op import BLOCKS, CUDNN, CUDNN_OR_BLOCKS
from .spec import Spec, numbers

_OP = "attention"


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: int | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    lengths: Array | tuple[Array, Array] | None = None,
    dropout_mask: Array | None = None,
    dropout_rate: float = 0.0,
    softcap: float | None = None,
    scale: float | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Array:
    """Attention, without an array of length times key length.

        s_ij = softcap · tanh(scale · q_i · k_j / softcap) + bias_ij
        out_i = Σ_j p_ij · d_ij · v_j     p_i = softmax of s_i over the keys that query i sees
        d_ij = dropout_mask_ij / (1 - dropout_rate); 1 without a dropout_mask

    cuDNN computes it on NVIDIA GPUs where it can: in bfloat16 and float16, with heads of a multiple
    of 8 up to 128, or up to 256 from Hopper GPUs on, without `softcap`. Everywhere else it is
    computed in blocks of queries and keys. Both keep two numbers for each row and head besides
    `out` for the backward, and compute the scores again there. Blocks that `causal`, `window`,
    `mask`, `segment_ids` or `lengths` hide as a whole are skipped. `lengths` are what cuDNN skips,
    and dropout takes two of its calls each way. From 512 keys on, a mask that is causal when the
    program runs takes cuDNN's causal kernel, and one that hides the end of each sequence, padding,
    its lengths: all kernels that may serve run, those that are not wanted on no tokens, so that no
    host waits. Segments of 512 tokens on average take its packed kernel on Hopper GPUs if equal ids
    are contiguous, as ids that grow are, with smaller ones for padding at the end. That needs up to
    4 GiB of temporaries.

    Scores, softmax and sums are float32, float64 for float64. A query that sees no key gives 0, and
    has gradients of 0. Keys and values must be finite where no query sees them too: 0 · NaN is NaN.

    Batch and heads may be split over any axes of a mesh, without communication unless several
    devices share a head of keys: they add up its gradients. Lengths are gathered.

    Args:
      q: `(batch, length, heads, width)`; float64, float32, bfloat16 or float16, as k and v.
      k: `(batch, key length, kv heads, width)`; heads must be a multiple of kv heads, and the query
        heads `i · heads / kv heads` and on see head i of the keys.
      v: the shape of k.
      bias: added to the scores, broadcast to `(batch, heads, length, key length)`; a float dtype.
      mask: bool, True for keys that a query sees; broadcast to the same shape.
      causal: query i sees keys j ≤ i.
      window: with causal, query i sees keys i - window < j ≤ i.
      segment_ids: `(batch, length)` integers; a query sees keys of its own segment. If the
        lengths differ, a pair: the queries' and the keys', `(batch, key length)`.
      lengths: `(batch,)` integers; a query sees the first so many keys of its sequence. A pair: the
        queries', of which later ones see nothing, and the keys'.
      dropout_mask: bool, True for probabilities that are kept; broadcast like `mask`. Draw it with
        `jax.random.bernoulli(key, 1 - rate, shape)`, of shape `(1, 1, length, key length)` for one
        mask of all sequences and heads. A row whose keys are all dropped gives 0.
      dropout_rate: what is kept is divided by 1 - dropout_rate; at least 0, less than 1.
      softcap: bounds the scores; None for no bound.
      scale: the factor of the scores; None: 1 / √width.
      dtype: the dtype of the products' operands and of the result; None: q's.
      implementation: None, "cudnn", "xla" (blocks), or both in order.

    Returns:
      `(batch, length, heads, width)` in `dtype`. Gradients are computed in blocks too; forward mode
      and second derivatives have the scores in memory. A policy of `jax.checkpoint` that saves the
      names "attention" and "attention_lse" keeps what the backward needs.

    Raises:
      TypeError: for q, k, v or a bias that are not floating, a mask or dropout mask that is not
        bool, segment ids or lengths that are not integers, or options of a wrong type.
      ValueError: for shapes that do not fit, a window without causal or below 1, a dropout rate
        without a mask or outside [0, 1), a softcap that is not positive, or an unknown
        implementation.
      NotImplementedError: if `implementation` is "cudnn" and cuDNN cannot serve.

    References:
      Vaswani et al., arXiv:1706.03762; Dao, FlashAttention-2, arXiv:2307.08691; Ainslie et al.,
      GQA, arXiv:2305.13245; Gemma Team, Gemma 2, arXiv:2408.00118 (softcap).

    >>> import jax.numpy as jnp
    >>> from normfuse import attention
    >>> q, k = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
    >>> v = jnp.arange(3.0)[:, None, None] * k
    >>> attention(q, k, v, causal=True)[0, :, 0, 0].tolist()  # means of 0, of 0 and 1, of all
    [0.0, 0.5, 1.0]
    """
    q, k, v = floating(_OP, "q", q), floating(_OP, "k", k), floating(_OP, "v", v)
    _check_shapes(q, k, v)
    order = _order(implementation)
    name = floating_dtype(_OP, dtype, q.dtype)
    q, k, v = q.astype(name), k.astype(name), v.astype(name)
    causal = flag(_OP, "causal", causal)
    window = None if window is None else min(integer(_OP, "window", window, 1), 2**31 - 1)
    if window is not None and not causal:
        raise ValueError(f"{_OP}: window={window} needs causal=True; for other shapes pass a mask")
    spec = Spec(
        scale=1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else finite(_OP, "scale", scale),
        causal=causal,
        window=window,
        softcap=checked_softcap(_OP, softcap),
        precision=jax.config.jax_default_matmul_precision,
        dropout_rate=_rate(dropout_rate, dropout_mask),
    )
    batch, length, heads, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    scores, extras = (batch, heads, length, keys), {}
    if bias is not None:
        bias = floating(_OP, "bias", bias)
        extras["bias"] = _four("bias", bias, scores)
    if mask is not None:
        extras["mask"] = _four("mask", _bool("mask", mask), scores)
    if segment_ids is not None:
        ids, others = _segments(segment_ids, (batch, length), (batch, keys))
        extras |= {"segments": ids[:, None, :, None], "key segments": others[:, None, None]}
    if lengths is not None:
        is_pair = isinstance(lengths, tuple | list) and len(lengths) == 2
        pair = lengths if is_pair else (None, lengths)
        for name, given in zip(("lengths", "key lengths"), pair):
            if given is not None:
                extras[name] = _integers("lengths", given, (batch,), "batch,")[:, None, None, None]
    if dropout_mask is not None:
        extras["dropout"] = _four("dropout_mask", _bool("dropout_mask", dropout_mask), scores)
    q, k, v, *arrays = _operands(q, k, v, *extras.values())
    spec = replace(spec, extras=tuple((n, dims) for n, (_, dims) in zip(extras, arrays)))
    out, *_ = ops.attention(spec, q, k, v, *[array for array, _ in arrays], order=order)
    return _joined(out)


# ---------------------------------------------------------------- arguments


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"{_OP}: q must be (batch, length, heads, width), k (batch, key length, kv heads, "
            f"width); got shapes {q.shape} and {k.shape}"
        )
    if v.shape != k.shape:
        raise ValueError(f"{_OP}: v must have k's shape, {k.shape}; got {v.shape}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"{_OP}: q and k must agree in batch and width; got shapes {q.shape} and {k.shape}"
        )
    if q.shape[2] % max(k.shape[2], 1) or (k.shape[2] == 0 and q.shape[2]):
        raise ValueError(
            f"{_OP}: the heads of q must be a multiple of k's; got {q.shape[2]} and {k.shape[2]}"
        )


def _four(argument: str, array: Array, shape: tuple[int, ...]) -> Array:
    """Returns the array with four dimensions, each 1 or that of `shape`."""
    padded = (*[1] * (4 - array.ndim), *array.shape)
    if array.ndim > 4 or any(n not in (1, full) for n, full in zip(padded, shape)):
        raise ValueError(
            f"{_OP}: {argument} must broadcast to (batch, heads, length, key length), {shape}; got "
            f"shape {array.shape}"
        )
    return array if array.ndim == 4 else jnp.expand_dims(array, tuple(range(4 - array.ndim)))


def _bool(argument: str, mask: Any) -> Array:
    mask = array_of(_OP, argument, mask)
    if mask.dtype != bool:
        raise TypeError(
            f"{_OP}: {argument} must be bool, True where a key is seen or kept; got "
            f"{mask.dtype.name}. Pass 0 and 1 as {argument}.astype(bool), and numbers to add to "
            "the scores as bias"
        )
    return mask


def _rate(rate: Any, mask: Any) -> float:
    """Returns the dropout's rate as a number in [0, 1), of a mask that there is."""
    number = finite(_OP, "dropout_rate", rate)
    if not 0 <= number < 1:
        raise ValueError(
            f"{_OP}: dropout_rate={rate} must be at least 0 and less than 1: the part of the "
            "probabilities that dropout_mask drops"
        )
    if number and mask is None:
        raise ValueError(
            f"{_OP}: dropout_rate={rate} needs a dropout_mask; draw it with "
            "jax.random.bernoulli(key, 1 - dropout_rate, shape)"
        )
    return number


def _segments(
    segment_ids: Any, rows: tuple[int, int], keys: tuple[int, int]
) -> tuple[Array, Array]:
    pair = isinstance(segment_ids, tuple | list) and len(segment_ids) == 2
    given = tuple(segment_ids) if pair else (segment_ids, segment_ids)
    if not pair and rows != keys:
        raise ValueError(
            f"{_OP}: segment_ids must be a pair, of queries and of keys, where the lengths differ: "
            f"{rows[1]} and {keys[1]}"
        )
    ids = _integers("segment_ids", given[0], rows, "batch, length")
    return ids, _integers("segment_ids", given[1], keys, "batch, key length")


def _integers(argument: str, array: Any, shape: tuple[int, ...], said: str) -> Array:
    array = array_of(_OP, argument, array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{_OP}: {argument} must be integers, got {array.dtype.name}")
    if array.shape != shape:
        raise ValueError(f"{_OP}: {argument} must be ({said}), {shape}; got shape {array.shape}")
    return array


def _order(implementation: Implementation) -> Order:
    if implementation is None:  # only "xla" of NORMFUSE_IMPLEMENTATION's names is ours
        return BLOCKS if requested(None)[:1] == ["xla"] else BEST
    names = requested(implementation, argument=f"{_OP}: implementation", known=("cudnn", "xla"))
    by_cudnn = CUDNN_OR_BLOCKS if "xla" in names else CUDNN
    return BLOCKS if names[0] == "xla" else by_cudnn


# ---------------------------------------------------------------- operands that go together


def _operands(q: Array, k: Array, v: Array, *extras: Array) -> list[Any]:
    """Returns q, k, v in the operation's layout, and `(array, its dimensions)` of each extra.

    Where shardings are part of the types, q's batch and heads decide for all.
    """
    axes = varying_axes(q, k, v, *extras)
    q, k, v, *given = (vary(a, axes) for a in (q, k, v, *extras))
    lead = next((a for a in (q, k, v, *given) if _is_explicit(a)), None)
    if lead is not None and not _is_explicit(q):
        q = reshard_like(q, lead, P(None, None, None, None))
    batch, length, all_heads, width = q.shape
    heads = k.shape[2]
    group = all_heads // max(heads, 1)
    rows, of_heads, of_group = _split(q, heads, group)
    every = (*of_heads, *of_group) or None
    heads_entry, group_entry = of_heads or None, of_group or None
    q = _reshaped(
        q,
        q,
        P(rows, None, every, None),
        (batch, length, heads, group, width),
        P(rows, None, heads_entry, group_entry, None),
    )
    d = numbers(q.ndim)
    arrays: list[Any] = [q, *(match(a, q, d.kv) for a in (k, v))]
    for extra in given:
        many, several = extra.shape[0] != 1, extra.shape[1] != 1
        before = P(rows if many else None, every if several else None, None, None)
        sizes = extra.shape[0], *((heads, group) if several else (1, 1)), *extra.shape[2:]
        kept = [(n, dim) for n, dim in zip(sizes, d.scores, strict=True) if n != 1]
        entries = {d.batch[0]: rows, d.heads: heads_entry, d.group: group_entry}
        after = P(*[entries.get(dim) for _, dim in kept])
        array = _reshaped(extra, q, before, tuple(n for n, _ in kept), after)
        arrays.append((array, tuple(dim for _, dim in kept)))
    return arrays


def _joined(out: Array) -> Array:
    """Returns the operation's result as `(batch, length, heads, width)`."""
    batch, length, heads, group, width = out.shape
    spec = P(*whole(jax.typeof(out).sharding.spec, 5))
    every = (*axes_of(spec[2]), *axes_of(spec[3])) or None
    return _reshaped(
        out, out, spec, (batch, length, heads * group, width), P(spec[0], None, every, None)
    )


def _is_explicit(array: Array) -> bool:
    return bool(jax.typeof(array).sharding.mesh.explicit_axes)


def _split(q: Array, heads: int, group: int) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """Returns the Explicit axes that split the batch, the heads of keys, and the heads of each."""
    if not _is_explicit(q):
        return None, (), ()
    sharding = jax.typeof(q).sharding
    sizes, entries = dict(sharding.mesh.shape), whole(sharding.spec, 4)
    of_heads, of_group, parts, members = [], [], 1, 1
    for axis in axes_of(entries[2]):
        # The first axes split the heads of keys, others the heads that share one if it is alone
        # on its device. Neither can use the remaining axes, which are gathered.
        if not of_group and heads % (parts * sizes[axis]) == 0:
            of_heads.append(axis)
            parts *= sizes[axis]
        elif heads == parts and group % (members * sizes[axis]) == 0:
            of_group.append(axis)
            members *= sizes[axis]
        else:
            break
    return entries[0], tuple(of_heads), tuple(of_group)


def _reshaped(array: Array, lead: Array, before: P, shape: tuple[int, ...], after: P) -> Array:
    """Returns the array reshaped; on lead's Explicit mesh placed as `before`, then as `after`."""
    if not _is_explicit(lead):
        return array.reshape(shape)
    if not _is_explicit(array) or P(*whole(jax.typeof(array).sharding.spec, array.ndim)) != before:
        array = reshard_like(array, lead, before)
    return _reshape_to(array, lead, shape, after)


@functools.partial(jax.jit, static_argnames=("shape", "spec"), keep_unused=True, inline=True)
def _reshape_to(array: Array, lead: Array, shape: tuple[int, ...], spec: P) -> Array:
    sharding = NamedSharding(jax.typeof(lead).sharding.mesh, spec)  # type: ignore[arg-type]
    return jax.lax.reshape(array, shape, out_sharding=sharding)
