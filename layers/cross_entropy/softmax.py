"""The softmax of a chunk of logits: its statistics, and its gradient in their place.

    c = softcap · tanh(z / softcap) (or z)    most = max_j c_j    sum = Σ_j exp(c_j - most)
    picked = Σ_j t_j · c_j, with t_j = (1 - smoothing) · [j = label] + share
    spread = Σ_j exp(c_j - most) · (c_j - most), for entropies, log sum - spread / sum
    g_j = ((a - d · (c_j - most)) · exp(c_j - most) - b · t_j) · dc_j/dz_j

With these lse = most + log sum, and its gradient is that with a = 1 / sum. lse itself is rounded:
where a row's logits share an offset, exp(c_j - lse) is wrong by that rounding, which grows with the
offset, and the differences from `most` are not.

Kernels see one device's part of the vocabulary: labels are counted from its first column, and one
that lies elsewhere matches none. With one part the statistics and the gradient are one kernel.

In FP8 the gradient is written as e5m2 codes in both layouts, g ≈ scale · q. As |g_j| ≤ |a| + |b| +
|d| / e, the scale needs no pass over the logits: it is 2^-14 times the largest factor of a row. If
that is a row's weight, the label's -b has an exact code, and so has a word's share of 2^-30. Codes
are rounded up or down at random: to nearest, a share that occurs again and again would have the
same error each time, and be learnt with it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import CUDA_TYPES, compute_dtype
from ...native.implementation import Unsupported
from ...native.kernel import Kernel
from ...native.launch import Target, cuda_compute_dtype, launch
from ..quantization.quantize import COLUMNS, E5M2, Codes, cast_layout, code_types, tile_macros


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The static description of the softmax."""

    softcap: float | None = None  # bound on |c|, if any
    dtype: str = "bfloat16"  # the gradient's dtype
    smoothing: float = 0.0  # how much of the label's target is shared by all words
    share: float = 0.0  # a word's: smoothing / the whole vocabulary's words
    op: str = "linear_cross_entropy"  # the function the user called
    entropy: bool = False  # statistics have the spread, and gradients read d
    codes: Codes | None = None  # those of the gradient in FP8, if it is in FP8
    # The statistics' kernel adds up as the one that also writes the gradient does.
    as_with_gradient: bool = False


# ---------------------------------------------------------------- definition, in plain JAX


def capped(spec: Softmax, z: Array) -> Array:
    """Returns c of logits z, in float32 or wider."""
    z = z.astype(compute_dtype(z.dtype))
    return z if spec.softcap is None else spec.softcap * jnp.tanh(z / spec.softcap)


IGNORED = -(2**30)
"""The label of a row that costs nothing: its gradient is 0, whatever its logits are. -1 is only no
word."""


def _is_label(z: Array, labels: Array) -> Array:
    """Compares rather than gathers: with a split vocabulary no logits move."""
    return jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) == labels[..., None]


def _spreads(c: Array, most: Array) -> tuple[Array, Array]:
    """Returns exp(c - most), and that times c - most: 0 where it is 0, as for a bias of -inf."""
    moved = c - most[..., None]
    return (shares := jnp.exp(moved)), shares * jnp.where(shares == 0, 0, moved)


def define_statistics(spec: Softmax, z: Array, labels: Array) -> list[Array]:
    """`(z (*rows, vocab), labels (*rows)) -> (most, sum, picked[, spread])`, `(*rows)` each."""
    c = capped(spec, z)
    picked = jnp.sum(jnp.where(_is_label(z, labels), c, 0), axis=-1)
    if spec.smoothing:
        picked = (1 - spec.smoothing) * picked + spec.share * jnp.sum(c, axis=-1)
    # lse does not depend on what is subtracted, so its derivative does not either. It is finite, or
    # -inf - -inf would be NaN.
    largest = float(jnp.finfo(c.dtype).max)
    most = jnp.clip(jax.lax.stop_gradient(jnp.max(c, axis=-1)), -largest, largest)
    total, spread = (jnp.sum(each, axis=-1) for each in _spreads(c, most))
    return [most, total, picked, *[spread] * spec.entropy]


def define_gradient(
    spec: Softmax, z: Array, labels: Array, most: Array, a: Array, b: Array, *d: Array
) -> list[Array]:
    """`(z, labels, most, a, b[, d]) -> (g,)`; rows whose a, b and d are zero have zeros."""
    c = capped(spec, z)
    each = lambda row: row[..., None]
    target = jnp.where(_is_label(z, labels), each(b * (1 - spec.smoothing)), 0)
    target = target + each(b * spec.share) if spec.smoothing else target
    shares, spreads = _spreads(c, most)
    g = each(a) * shares - target
    g = g - each(d[0]) * spreads if d else g
    if spec.softcap is not None:
        g = g * (1 - jnp.square(c / spec.softcap))
    # Zeros that are finite already keep their derivatives with respect to the factors.
    return [jnp.where(each(unused(a, b, *d)) & ~jnp.isfinite(g), 0, g).astype(spec.dtype)]


def unused(*factors: Array) -> Array:
    """Returns which rows have no gradient: all their factors in it are zero."""
    return functools.reduce(jnp.logical_and, [r == 0 for r in factors])


def define_both(spec: Softmax, z: Array, labels: Array, weights: Array) -> list[Array]:
    """`(z, labels, weights (*rows)) -> (g, most, sum, picked)`: of Σ weights · loss."""
    most, total, picked = define_statistics(spec, z, labels)
    a = divided(weights, total, labels)
    (g,) = define_gradient(spec, z, labels, most, a, weights)
    return [g, most, total, picked]


def _scaled(*factors: Array) -> tuple[list[Array], Array]:
    """Returns the factors by the scale of the gradient's codes, and that; see the file's head.

    Rows with a factor that is not finite have no say: their codes are NaN.
    """
    size = functools.reduce(jnp.maximum, map(jnp.abs, factors)).astype(jnp.float32)
    largest = jnp.max(jnp.where(jnp.isfinite(size), size, 0), initial=0)
    scale = jnp.maximum(largest * 2.0**-14, 2.0**-100)
    return [r.astype(jnp.float32) / scale for r in factors], scale.reshape(1)


def _mixed(x: Array) -> Array:
    """Returns uint32 each of whose bits depends on all bits of x: MurmurHash3's last step."""
    for by, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35):
        x = (x ^ x >> by) * jnp.uint32(factor)
    return x ^ x >> 16


def _seeds(labels: Array, most: Array, a: Array) -> Array:
    """Returns random bits for each row, from its place and numbers: there is no state, and no key.

    a changes with all logits of the row, so that another step has other bits.
    """
    seeds = jax.lax.iota(jnp.uint32, labels.shape[0])
    for numbers in labels, most.astype(jnp.float32), a.astype(jnp.float32):
        seeds = _mixed(seeds ^ jax.lax.bitcast_convert_type(numbers, jnp.uint32))
    return seeds


def _encode_at_random(g: Array, seeds: Array) -> Array:
    """Returns e5m2 codes of float32 numbers whose mean is the number; NaN beyond the format.

    A code is the upper byte of a float16 number: eight random bits are added to it, and cut off.
    Zeros and numbers that have a code keep them.
    """
    column = jax.lax.broadcasted_iota(jnp.uint32, g.shape, 1)
    random = _mixed(seeds[:, None] ^ column >> 2) >> column % 4 * 8 & 0xFF
    halves = jax.lax.bitcast_convert_type(g.astype(jnp.float16), jnp.uint16)
    cut = (halves + random.astype(jnp.uint16) >> 8).astype(jnp.uint8)
    q = jnp.where(jnp.abs(g) <= E5M2.largest, cut, jnp.uint8(0x7F))
    return jax.lax.bitcast_convert_type(q, jnp.dtype(E5M2.dtype))


def define_codes(
    spec: Softmax, z: Array, labels: Array, most: Array, a: Array, b: Array, *d: Array
) -> list[Array]:
    """`(z (rows, vocab), labels, most, a, b[, d]) -> ([q,] [qt,] scale (1,))` of the gradient."""
    assert spec.codes is not None
    of_rows, scale = _scaled(a, b, *d)
    wide = dataclasses.replace(spec, dtype="float32")
    (g,) = define_gradient(wide, z, labels, most, *of_rows)
    q = _encode_at_random(g, _seeds(labels, most, a))
    return [*[q] * spec.codes.has_q, *[q.T] * spec.codes.has_qt, scale]


def of_rows(most: Array, total: Array, picked: Array, *spread: Array) -> list[Array]:
    """Returns lse, lse - picked without lse's rounding, which may be larger, and entropies."""
    log = jnp.log(total)
    return [most + log, (most - picked) + log, *[log - s / total for s in spread]]


def divided(slope: Array, total: Array, labels: Array) -> Array:
    """Returns `define_gradient`'s a of lse's cotangent, NaN where 0 times the softmax is.

    An ignored row has 0 there.
    """
    bad = (slope == 0) & ~((total > 0) & jnp.isfinite(total))
    return slope / jnp.where(bad, (labels <= IGNORED).astype(total.dtype), total)


# ---------------------------------------------------------------- CUDA

_MOST_SLICES = 8  # every device with clusters allows so many in one
_MOST_THREADS = 1024
_SLICE_THREADS = 256  # more are divided over blocks
_STREAMING_THREADS = 128
_RESIDENT_THREADS = 1024  # threads of a multiprocessor
_RESIDENT_THREADS_ON_HOPPER = 1280  # a few bytes spill, and cost less than idle threads


@dataclasses.dataclass(frozen=True)
class Layout:
    """How threads share a row; `kernels/softmax.cu` and `row.cuh` explain each number."""

    vector: int
    threads: int
    batch: int = 8
    slices: int = 1
    min_blocks: int = 1

    def chunks(self, vocabulary: int) -> int:
        """Returns the vectors of a thread: whole batches."""
        step = self.vector * self.threads * self.slices * self.batch
        return -(-vocabulary // step) * self.batch


def layout(vocabulary: int, itemsize: int, target: Target, *, twice: bool = True) -> Layout:
    """Returns threads that hold a row in their registers, in one cluster if need be.

    If that is impossible they read it twice: a row is used `twice`, for its statistics and its
    gradient. Sizes are from measurements on an H200 (benchmarks/results).
    """
    vector = math.gcd(vocabulary, 16 // itemsize)
    batch = 8  # 32 registers, or fewer
    threads = -(-vocabulary // (vector * batch))  # they hold a row
    if not twice:
        each = min(_STREAMING_THREADS, -(-threads // 32) * 32)
        return Layout(vector, each, batch, 1, _RESIDENT_THREADS // _STREAMING_THREADS)
    slices = 1
    while slices < _MOST_SLICES and threads > _SLICE_THREADS * slices and target.clusters:
        slices *= 2
    each = max(32, -(-threads // (32 * slices)) * 32)
    if each > _MOST_THREADS:  # the row is read twice
        return Layout(vector, _MOST_THREADS, batch, 1, 1)
    while slices > 1 and (slices - 1) * each * vector * batch >= vocabulary:
        slices //= 2  # the last would have nothing
    resident = _RESIDENT_THREADS_ON_HOPPER if target.capability == 90 else _RESIDENT_THREADS
    return Layout(vector, each, batch, slices, max(1, resident // each))


def _macros(spec: Softmax, z: Array) -> dict[str, Any]:
    return {
        "Z_TYPE": CUDA_TYPES[z.dtype.name],
        "SOFTCAP": int(spec.softcap is not None),
        "SMOOTHING": int(spec.smoothing > 0),
        "APPROXIMATE": int(z.dtype.itemsize == 2),
    }


def _numbers(spec: Softmax) -> tuple[float, ...]:
    return spec.softcap or 0.0, 1 - spec.smoothing, spec.share


def _on_cuda(kernel: str, *, has_g: bool, has_lse: bool) -> Callable[..., list[Array]]:
    """Returns a kernel's launch; the gradient overwrites logits of its dtype."""

    def run(target: Target, spec: Softmax, z: Array, *of_rows: Array) -> list[Array]:
        rows, vocabulary = z.shape
        compute = cuda_compute_dtype([z.dtype, jnp.dtype(spec.dtype)])
        twice = has_g or spec.as_with_gradient
        chosen = layout(vocabulary, z.dtype.itemsize, target, twice=twice)
        macros = {
            "KERNEL": kernel,
            "COMPUTE_TYPE": CUDA_TYPES[compute.name],
            "STATISTICS": int(has_lse),
            "GRADIENT": int(has_g),
            **_macros(spec, z),
            "FEATURES": vocabulary,
            "VECTOR": chosen.vector,
            "CHUNKS": chosen.chunks(vocabulary),
            "BATCH": chosen.batch,
            "ROW_THREADS": chosen.threads,
            "BLOCK_ROWS": 1,
            "SLICES": chosen.slices,
            "CLUSTER": chosen.slices,
            "MIN_BLOCKS": chosen.min_blocks,
            "IGNORED": f"({IGNORED})",
        }
        if has_g:
            macros["G_TYPE"] = CUDA_TYPES[spec.dtype]
        values = 3 if spec.smoothing else 2
        slots = 2 * values * chosen.slices * -(-chosen.threads // 32)  # two sets of numbers
        numbers = _numbers(spec)
        g = jax.ShapeDtypeStruct(z.shape, jnp.dtype(spec.dtype))
        statistic = jax.ShapeDtypeStruct((rows,), compute_dtype(z.dtype))
        return launch(
            "softmax.cu",
            kernel,
            [z, *of_rows],
            [g] * has_g + [statistic] * 3 * has_lse,
            target=target,
            macros=macros,
            grid=(rows, chosen.slices),
            block=chosen.threads,
            cluster=(1, chosen.slices),
            shared=16 * (chosen.slices > 1) + slots * compute.itemsize if has_lse else 0,
            ints=(rows,),
            floats=numbers if compute.itemsize == 4 else (),
            doubles=numbers if compute.itemsize == 8 else (),
            aliases={0: 0} if has_g and spec.dtype == z.dtype.name else None,
        )

    return run


def cuda_codes(
    target: Target, spec: Softmax, z: Array, labels: Array, most: Array, a: Array, b: Array
) -> list[Array]:
    """`define_codes` on a GPU."""
    assert spec.codes is not None
    if z.dtype == jnp.float64:
        raise Unsupported("logits of float64 have no FP8 codes")
    rows, vocabulary = z.shape
    chosen = cast_layout(rows, vocabulary, z.dtype.itemsize, target)
    of_rows, scale = _scaled(a, b)
    codes = launch(
        "quantize_softmax.cu",
        "quantize_softmax",
        [z, labels, most, *of_rows, _seeds(labels, most, a)],
        code_types(spec.codes, rows, vocabulary)[:-1],
        target=target,
        macros={
            "COMPUTE_TYPE": "float",
            **_macros(spec, z),
            "VECTOR": COLUMNS,
        }
        | tile_macros(chosen, spec.codes, rows, vocabulary),
        grid=chosen.blocks(rows, vocabulary),
        block=chosen.width * chosen.height,
        shared=chosen.shared if spec.codes.has_qt else 0,
        ints=(rows, vocabulary, chosen.group),
        floats=_numbers(spec),
    )
    return [*codes, scale]


# ---------------------------------------------------------------- kernels

cuda_statistics = _on_cuda("softmax_statistics", has_g=False, has_lse=True)
cuda_gradient = _on_cuda("softmax_gradient", has_g=True, has_lse=False)
cuda_both = _on_cuda("softmax_statistics_and_gradient", has_g=True, has_lse=True)
statistics = Kernel("softmax_statistics", define_statistics, {"cuda": cuda_statistics})
gradient = Kernel("softmax_gradient", define_gradient, {"cuda": cuda_gradient})
both = Kernel("softmax_statistics_and_gradient", define_both, {"cuda": cuda_both})
codes = Kernel("quantize_softmax", define_codes, {"cuda": cuda_codes})
