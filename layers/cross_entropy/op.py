"""The product of a linear layer and its softmax in chunks of rows, for any placement.

One chunk's logits at a time are in memory, and with its gradient the kernel's gradient is added to
the sum in float32, by the product that computes it:

    z = x · kernel (+ bias)   g = dloss/dz   dx = g · kernelᵀ   dkernel += xᵀ · g   dbias += Σ g

Rows may be split over any axes of a mesh: the kernel's gradients are then added once, at the end.
So may the vocabulary: a device finds the maximum and the sum of exponentials of its part, and
devices exchange three numbers a row before the gradient of x.

In FP8 both products of g are of codes: of g in e5m2 (`softmax`), of x and the kernel in e4m3, each
with its own scale: for a device's part of the kernel, and for a chunk's rows. Definitions, and with
them second derivatives, are those of the compute dtype.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...native.dtypes import compute_dtype
from ...native.implementation import Order, report
from ...native.kernel import Kernel
from ..core.derivative import tangents_of
from ..core.op import (
    Batching,
    Derivative,
    Dims,
    Op,
    Placement,
    Split,
    all_there,
    batch_at,
    match,
    on_unused_results,
)
from ..dense.fp8 import CAPABILITY, FORMAT, Contraction, define_product, require_fp8
from ..quantization.quantize import E5M2, MULTIPLE, Codes, fits, quantize_kernel
from . import chunks, softmax
from .softmax import Softmax

_LAST = 2**31 - 1  # no word
_FEW_WORDS = 1024  # fewer are not worth a copy of the kernel


@dataclasses.dataclass(frozen=True)
class Total:
    """A sum over rows of a function of their log-sum-exps and costs, lse - picked.

    Attributes:
      each: `(lse, cost, labels, *data (*rows)) -> each row's addend (*rows)`, of a row's own
        numbers. It is a part of keys, and its repr of names that all processes share.
      data: how many arrays it reads beside.
      linear: an addend is the cost, or where a label is no word the log-sum-exp, times what does
        not depend on either.
      selects: rows may have no part in the sum, and are to have no gradient whatever comes back.
    """

    each: Callable[..., Array]
    data: int
    linear: bool = False
    selects: bool = False

    def slopes(self, rows: Sequence[Array], labels: Array, ct: Array, *data: Array) -> Any:
        """Returns the derivatives by lse and by cost, given these and the addends' cotangents."""
        each, pull = jax.vjp(lambda *rows: self.each(*rows, labels, *data), *rows)
        return pull(ct.astype(each.dtype))

    def factors(self, found: Sequence[Array], labels: Array, *more: Array) -> Any:
        """Returns a and b of the softmax's gradient, given the statistics."""
        of_lse, b = self.slopes(softmax.of_rows(*found), labels, *more)
        return softmax.divided(of_lse + b, found[1], labels), b


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static description of the loss."""

    softmax: Softmax = Softmax()
    contract: int = 0  # the kernel's summed axis: 0 for `(n, vocab)`, 1 for `(vocab, n)`
    logits: str = "bfloat16"  # the dtype of the logits
    precision: str | None = None  # the products' precision
    chunk: int | None = None  # rows of a chunk; None for the best
    plain: bool = False  # plain HLO rather than the softmax's kernels
    wanted: tuple[bool, bool] = (True, True)  # gradients to compute: of x, of the kernel
    ignores: bool = False  # rows may be ignored, and then x may be NaN
    total: Total | None = None  # what `loss_gradients` differentiates
    bias: bool | None = None  # True if its gradient is wanted; None without a bias
    groups: int = 0  # leading dimensions of x with a kernel's gradient each
    dkernel: str | None = None  # the dtype that the caller rounds the kernel's gradient to, if any
    quantized: bool = False  # the gradient's products are of FP8 codes, where the kernel fits

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.softmax.op


# ---------------------------------------------------------------- definition, in plain JAX


def logits(spec: Spec, x: Array, w: Array, bias: Array | None = None) -> Array:
    """Returns x's last axis times the kernel, plus the bias: `(*rows, vocab)`."""
    dims = (((x.ndim - 1,), (spec.contract,)), ((), ()))
    z = lax.dot_general(
        x, w, dims, precision=spec.precision, preferred_element_type=jnp.dtype(spec.logits)
    )
    return z if bias is None else z + bias[(None,) * (z.ndim - 1)]  # cuBLAS adds it


def _gradients(spec: Spec, x: Array, w: Array, g: Array, *factors: Array) -> list[Array]:
    """Returns dx, in x's dtype, dkernel and dbias, in float32 or wider, if wanted.

    The factors are the rows' in g, which is zero where all of them are.
    """
    if spec.ignores and spec.wanted[1]:  # 0 times NaN would be NaN
        x = jnp.where(softmax.unused(*factors)[..., None] & ~jnp.isfinite(x), 0, x)
    found, summed = [], (g.ndim - 1,)
    if spec.wanted[0]:
        dims = ((summed, (1 - spec.contract,)), ((), ()))
        found.append(lax.dot_general(g, w, dims, precision=spec.precision))
    if spec.wanted[1]:
        groups = tuple(range(spec.groups))
        rows = tuple(range(spec.groups, x.ndim - 1))
        first, second = (x, g) if spec.contract == 0 else (g, x)
        dims, sums = ((rows, rows), (groups, groups)), compute_dtype(x.dtype)
        dtype = jnp.dtype(spec.dkernel or sums)
        options = {"precision": spec.precision, "preferred_element_type": dtype}
        # XLA drops this cast and the caller's back.
        found.append(lax.dot_general(first, second, dims, **options).astype(sums))
    if spec.bias:
        rows = tuple(range(spec.groups, g.ndim - 1))
        found.append(jnp.sum(g, rows, dtype=compute_dtype(x.dtype)))
    return found


def define_statistics(spec: Spec, x: Array, w: Array, labels: Array, *bias: Array) -> list[Array]:
    """`(x (*rows, n), w, labels (*rows)[, bias]) -> statistics of softmax`, `(*rows)` each."""
    return softmax.define_statistics(spec.softmax, logits(spec, x, w, *bias), labels)


def define_loss_gradients(
    spec: Spec, x: Array, w: Array, labels: Array, *more: Array
) -> list[Array]:
    """`(x, w, labels, ct, *data (*rows)[, bias]) -> (most, sum, picked[, dx][, dw][, dbias])`."""
    total, data, bias = _of_total(spec, more)
    z = logits(spec, x, w, *bias)
    found = softmax.define_statistics(spec.softmax, z, labels)
    factors = total.factors(found, labels, *data)
    (g,) = softmax.define_gradient(spec.softmax, z, labels, found[0], *factors)
    return [*found, *_gradients(spec, x, w, g, *factors)]


def _of_total(
    spec: Spec, more: Sequence[Array]
) -> tuple[Total, Sequence[Array], tuple[Array, ...]]:
    """Returns the total, its cotangent and data, and the bias, if there is one."""
    assert spec.total is not None
    count = 1 + spec.total.data
    return spec.total, more[:count], tuple(more[count:])


def define_gradients(
    spec: Spec, x: Array, w: Array, labels: Array, most: Array, *more: Array
) -> list[Array]:
    """`(x, w, labels, most, a, b[, d][, bias]) -> ([dx][, dw][, dbias])`."""
    factors, bias = _factors(spec, more)
    z = logits(spec, x, w, *bias)
    (g,) = softmax.define_gradient(spec.softmax, z, labels, most, *factors)
    return _gradients(spec, x, w, g, *factors)


def _factors(spec: Spec, more: Sequence[Array]) -> tuple[Sequence[Array], tuple[Array, ...]]:
    """Returns the factors of rows in a gradient, and the bias, if there is one."""
    count = 2 + spec.softmax.entropy
    return more[:count], tuple(more[count:])


def define_argmax(spec: Spec, x: Array, w: Array, *bias: Array) -> list[Array]:
    """`(x (*rows, n), w[, bias]) -> (words,)`, int32: the first of equal ones; NaN is largest."""
    c = softmax.capped(spec.softmax, logits(spec, x, w, *bias))
    return [lax.argmax(c, x.ndim - 1, jnp.int32)]


# ---------------------------------------------------------------- one device's share


def _kernel(
    spec: Spec, kernel: Any, order: Order, static: Any = None
) -> Callable[..., Sequence[Array]]:
    if static is None:
        static = spec.softmax
        if static.entropy and not spec.plain:
            report(spec.op, "its kernels have no entropies", strict=order.strict, names=order.names)
            spec = replace(spec, plain=True)
    if spec.plain:
        return functools.partial(kernel.definition, static)
    return functools.partial(kernel, static, order=order)


def _quantized(
    spec: Spec, split: Split, x: Array, w: Array, order: Order
) -> tuple[Spec, list[Array]]:
    """Returns the spec of what the gradient's products can be here, and the kernel's codes.

    These are (n, vocab), with their scale; none where nothing is quantized.
    """
    if not spec.quantized or not any(spec.wanted):
        return spec, []
    if not fits(*w.shape):
        why = f"a kernel of shape {w.shape} has a dimension that is no multiple of 16"
        why = f"{why}, so the gradient multiplies in the compute dtype"
        report(spec.op, why, by="unquantized products")
        return spec, []
    codes = Codes(E5M2.dtype, *spec.wanted, spec.op)
    alone = not _part(spec, split, x, w).axes and spec.total is not None and spec.total.linear
    own = replace(spec, softmax=replace(spec.softmax, codes=codes, as_with_gradient=alone))
    if not spec.wanted[0]:
        return own, []
    of_w = Codes(FORMAT, spec.contract == 0, spec.contract == 1, spec.op)
    return own, list(_kernel(spec, quantize_kernel, order, of_w)(w))


def _padded(array: Array, axis: int) -> Array:
    """Returns rows, or codes of them, with rows of zeros up to a multiple of 16 for FP8 products.

    These add nothing to the gradients, and leave every scale as it is.
    """
    more = -array.shape[axis] % MULTIPLE
    return jnp.pad(array, [(0, more * (i == axis)) for i in range(2)]) if more else array


# A scale of the loss is no power of two, and is rounded to the dtype of the sums.
_multiply = functools.partial(define_product, given=False)


def _cuda_addend(target: Any, dot: Contraction, *operands: Array) -> list[Array]:
    """A product that cuBLAS adds to a sum in place.

    XLA's autotuner takes the product with its addition, as Triton might compute them. Where cuBLAS
    is faster, it adds FP8's out of place, and a loop copies the sum back: 1 GB for each chunk.
    Triton does not know this algorithm, the same as the default of cuBLAS. From JAX 0.12 it cannot
    be compiled for GPUs that are only described, and the integers of `chunks.in_chunks` are enough.
    """
    if jax.__version_info__ >= (0, 12) or target.capability < CAPABILITY:
        return _multiply(dot, *operands)
    fast = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    precision = jax.config.jax_default_matmul_precision or fast
    return _multiply(dot, *operands, precision=precision)


_addend = Kernel("fp8_addend", _multiply, {"cuda": _cuda_addend})


def _gradients_of_codes(
    spec: Spec, order: Order, x: Array, w: Sequence[Array], g: Sequence[Array], *factors: Array
) -> list[Array]:
    """`_gradients` of a chunk's codes, with the kernel's codes and scale."""
    *codes, scale = g
    wide, found = x.dtype.name, []
    of, rows = functools.partial(Contraction, spec.op), x.shape[0]
    if spec.wanted[0]:
        kernel, by = w
        dot = of("rv", "nv", "rn", wide, wide)
        q = _padded(codes[0], 0)
        (dx,) = _multiply(dot, q, kernel, scale.reshape(()), by.reshape(()))
        found.append(dx[:rows])
    if spec.wanted[1]:
        x = jnp.where(softmax.unused(*factors)[..., None], 0, x)  # these have no say in its scale
        of_x = Codes(FORMAT, False, True, spec.op)
        xt, by = _kernel(spec, quantize_kernel, order, of_x)(_padded(x, 0))
        sums = compute_dtype(x.dtype)
        dtype = jnp.dtype(spec.dkernel or sums).name
        operands = [("nr", xt), ("vr", _padded(codes[-1], 1))]
        (a, first), (b, second) = operands if spec.contract == 0 else operands[::-1]
        dot = of(a, b, a[0] + b[0], dtype, wide)
        (dw,) = _kernel(spec, _addend, order, dot)(first, second, scale.reshape(()), by.reshape(()))
        found.append(dw.astype(sums))
    if spec.bias:
        sums = compute_dtype(x.dtype)
        found.append(jnp.sum(codes[-1], int(spec.wanted[1]), dtype=sums) * scale.astype(sums))
    return found


@dataclasses.dataclass(frozen=True)
class _Part:
    """A device's part of the vocabulary."""

    axes: tuple[str, ...]
    size: int

    def local(self, labels: Array) -> Array:
        """Returns labels counted from the first column here; -1 or less for those of others."""
        if not self.axes:
            return labels
        labels = labels - lax.axis_index(self.axes) * self.size
        return jnp.where(labels < self.size, labels, -1)

    def whole(self, most: Array, total: Array, picked: Array, *spread: Array) -> list[Array]:
        """Returns the statistics over all parts."""
        if not self.axes:
            return [most, total, picked, *spread]
        top = lax.pmax(most, self.axes)
        share = jnp.exp(most - top)
        moved = jnp.where(share == 0, 0, most - top)
        shifted = [share * (s + moved * total) for s in spread]
        return [top, *lax.psum((share * total, picked, *shifted), self.axes)]


def _part(spec: Spec, split: Split, x: Array, w: Array) -> _Part:
    return _Part(split.over([x.ndim + 1]), w.shape[1 - spec.contract])


def aligned_words(words: int, softcap: float | None, smoothing: float = 0.0) -> int:
    """Returns how many words a device computes with, of so many: a multiple of 16, if it can.

    Products of other sizes are slower, and in FP8 there are none. Words that no row has are kept
    out by a bias of -inf, which a soft cap would bring back, and label smoothing adds to the loss.
    """
    few = not isinstance(words, int) or words < _FEW_WORDS
    return words if few or softcap is not None or smoothing else -(-words // MULTIPLE) * MULTIPLE


def _aligned(spec: Spec, w: Array, bias: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    """Returns the kernel and the bias of `aligned_words`."""
    words = w.shape[1 - spec.contract]
    if not (more := aligned_words(words, spec.softmax.softcap, spec.softmax.smoothing) - words):
        return w, bias
    w = jnp.pad(w, [(0, more * (axis != spec.contract)) for axis in range(2)])
    of_words = bias[0] if bias else jnp.zeros(words, spec.logits)
    return w, (jnp.pad(of_words, (0, more), constant_values=-jnp.inf),)


def _of_words(spec: Spec, found: Sequence[Array], words: int) -> list[Array]:
    """Returns results with the gradients of the kernel and of the bias, the last, as `_aligned`
    was given these."""
    count = len(found) - spec.wanted[1] - bool(spec.bias)
    axes = [1 - spec.contract] * spec.wanted[1] + [0] * bool(spec.bias)
    cut = [lax.slice_in_dim(g, 0, words, axis=axis) for g, axis in zip(found[count:], axes)]
    return [*found[:count], *cut]


def _size(spec: Spec, x: Array, w: Array, more: int = 0) -> int:
    rows, codes, itemsize = x.shape[0], spec.softmax.codes, jnp.dtype(spec.logits).itemsize
    bytes = (chunks.CODED_CHUNK_BYTES if codes else chunks.CHUNK_BYTES) + more
    itemsize += codes.has_q + codes.has_qt if codes else 0
    best = chunks.chunk_rows(rows, w.shape[1 - spec.contract], itemsize, bytes)
    return min(rows, spec.chunk or best) if isinstance(rows, int) else spec.chunk or best


def _parts(spec: Spec, split: Split, lead: int, x: Array, w: Array) -> tuple[Spec, int]:
    """Returns the spec of a chunk of x, which had `lead` dimensions, and its rows.

    One chunk gets the kernel's gradient from one product, which rounds it for the caller; those of
    several chunks or devices are added up in float32. One chunk may therefore use that memory.
    """
    several = replace(spec, dkernel=None)
    if spec.dkernel is None or split.over(range(spec.groups, lead - 1)):
        return several, _size(spec, x, w)
    if (size := _size(spec, x, w, w.size * compute_dtype(x.dtype).itemsize)) == x.shape[0]:
        return spec, size
    return several, _size(spec, x, w)


def _statistics_body(
    spec: Spec, split: Split, x: Array, w: Array, labels: Array, *bias: Array, order: Order
) -> list[Array]:
    part, run = _part(spec, split, x, w), _kernel(spec, softmax.statistics, order)
    w, bias = _aligned(spec, w, bias)

    def chunk(sums, x, labels):
        del sums
        return list(run(logits(spec, x, w, *bias), labels)), []

    flat, shape = x.reshape(labels.size, x.shape[-1]), labels.shape
    arrays = [flat, part.local(labels).reshape(-1)]
    found = chunks.in_chunks(chunk, arrays, _size(spec, flat, w))
    return [r.reshape(shape) for r in part.whole(*found)]


def _argmax_body(
    spec: Spec, split: Split, x: Array, w: Array, *bias: Array, order: Order
) -> list[Array]:
    del order  # XLA reads a chunk once
    part = _part(spec, split, x, w)
    w, bias = _aligned(spec, w, bias)

    def chunk(sums, x):
        del sums
        c = softmax.capped(spec.softmax, logits(spec, x, w, *bias))
        word = lax.argmax(c, 1, jnp.int32)
        if not part.axes:
            return [word], []
        best = jnp.take_along_axis(c, word[:, None], 1)[:, 0]
        # The first word wins among devices that have the row's best, or a NaN if there is one.
        rank = jnp.isnan(best).astype(jnp.int32)
        best = jnp.where(rank, 0, best)
        top = lax.pmax(rank, part.axes)
        best = jnp.where(rank == top, best, -jnp.inf)
        chosen = (rank == top) & (best == lax.pmax(best, part.axes))
        word = jnp.where(chosen, word + lax.axis_index(part.axes) * part.size, _LAST)
        return [lax.pmin(word, part.axes)], []

    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    (words,) = chunks.in_chunks(chunk, [flat], _size(spec, flat, w))
    return [words.reshape(x.shape[:-1])]


def _added(
    spec: Spec, order: Order, sums: Any, x: Array, w: Any, g: Sequence[Array], *factors: Array
) -> tuple[list[Array], list[Array]]:
    """Returns `([dx], [sums of dw, dbias])` with a chunk's gradients; w has the kernel's codes."""
    spec = replace(spec, groups=0)
    if spec.softmax.codes:
        found = _gradients_of_codes(spec, order, x, w[1:], g, *factors)
    else:
        found = _gradients(spec, x, w[0], *g, *factors)
    dx, dw = found[: spec.wanted[0]], found[spec.wanted[0] :]
    return dx, dw if sums is None else [s + d for s, d in zip(sums, dw)]


def _each_group(
    spec: Spec, split: Split, run: Callable[..., list[Array]], x: Array, *rows: Array, results: int
) -> list[Array]:
    """Returns `run`'s results for each group: rows' (`results` of them), and gradients, if wanted.

    Those of parameters are added up over devices that have other rows, dx over other words.
    """
    groups, n = x.shape[: spec.groups], x.shape[-1]
    count, shape = math.prod(groups), x.shape[:-1]
    each = math.prod(shape) // count
    flat = [x.reshape(count, each, n), *[a.reshape(count, each) for a in rows]]
    if count == 1:
        found = [r[None] for r in run(*[a[0] for a in flat])]
    else:
        found = lax.map(lambda arrays: run(*arrays), flat)
    done = [r.reshape(shape) for r in found[:results]]
    rest = iter(found[results:])
    if spec.wanted[0]:
        done.append(split.psum(next(rest).reshape(x.shape), [x.ndim + 1]))
    for of_parameter in rest:
        one = of_parameter.reshape(*groups, *of_parameter.shape[1:])
        done.append(split.psum(one, range(spec.groups, x.ndim - 1)))
    return done


def _gradient(spec: Spec, order: Order) -> Callable[..., Sequence[Array]]:
    """Returns the kernel of the softmax's gradient, or of its codes and their scale."""
    return _kernel(spec, softmax.codes if spec.softmax.codes else softmax.gradient, order)


def _loss_gradients_body(
    spec: Spec, split: Split, x: Array, w: Array, labels: Array, *more: Array, order: Order
) -> list[Array]:
    total, data, bias = _of_total(spec, more)
    part = _part(spec, split, x, w)
    w, bias = _aligned(spec, w, bias)
    spec, codes = _quantized(spec, split, x, w, order)

    def chunk(spec, sums, x, labels, *data):
        z = logits(spec, x, w, *bias)
        if total.linear and not (part.axes or spec.softmax.codes):
            zeros = jnp.zeros(labels.shape, compute_dtype(z.dtype))
            of_lse, b = total.slopes((zeros, zeros), labels, *data)  # known before the logits
            factors = [of_lse + b]
            *g, most, every, picked = _kernel(spec, softmax.both, order)(z, labels, *factors)
            found = most, every, picked
        else:
            found = part.whole(*_kernel(spec, softmax.statistics, order)(z, labels))
            factors = total.factors(found, labels, *data)
            g = _gradient(spec, order)(z, labels, found[0], *factors)
        dx, dw = _added(spec, order, sums, x, [w, *codes], g, *factors)
        return [*found, *dx], dw

    def run(*arrays):
        own, size = _parts(spec, split, x.ndim, arrays[0], w)
        return _of_words(
            spec, chunks.in_chunks(functools.partial(chunk, own), arrays, size), part.size
        )

    return _each_group(spec, split, run, x, part.local(labels), *data, results=3)


def _gradients_body(
    spec: Spec, split: Split, x: Array, w: Array, labels: Array, *rows: Array, order: Order
) -> list[Array]:
    part = _part(spec, split, x, w)
    factors, bias = _factors(spec, rows[1:])
    w, bias = _aligned(spec, w, bias)
    spec, codes = _quantized(spec, split, x, w, order)

    def chunk(sums, x, *rows):
        g = _gradient(spec, order)(logits(spec, x, w, *bias), *rows)
        return _added(spec, order, sums, x, [w, *codes], g, *rows[2:])

    def run(*arrays):
        return _of_words(
            spec, chunks.in_chunks(chunk, arrays, _size(spec, arrays[0], w)), part.size
        )

    return _each_group(spec, split, run, x, part.local(labels), rows[0], *factors, results=0)


# ---------------------------------------------------------------- sharding and batching


def _dims(operands: str, results: str) -> Callable[[Spec, int, int], Dims]:
    """Returns `Op.dims` of an operation, a letter for each of its arrays.

    These are x, w (the kernel), r (a number for each row), e (one for its entropy, if wanted), d
    (the data of a total), b (the bias, if there is one) and g (the gradients of x, the kernel and
    the bias, as far as they are wanted).
    """

    def dims(spec: Spec, x_ndim: int, *_: int) -> Dims:
        # The kernel's summed dimension is not x's: as FSDP stores it, it would drive x's.
        x, n, v = tuple(range(x_ndim)), x_ndim, x_ndim + 1
        w = (n, v) if spec.contract == 0 else (v, n)
        found: dict[str, list[Any]] = {"x": [x], "w": [w], "r": [x[:-1]]}
        found["e"] = [x[:-1]] * spec.softmax.entropy
        found["d"] = [x[:-1]] * (spec.total.data if spec.total else 0)
        found["b"] = [(v,)] * (spec.bias is not None)
        groups = range(spec.groups)
        of_parameters = [(*groups, *w)] * spec.wanted[1] + [(*groups, v)] * bool(spec.bias)
        found["g"] = [x] * spec.wanted[0] + of_parameters
        each = lambda text: tuple(dims for letter in text for dims in found[letter])
        return each(operands), each(results)

    return dims


def batch_rows(
    op: Op, args: Any, dims: Any, *, spec: Any, order: Order, rows: Sequence[int] = (0, 2)
) -> Any:
    """A batch dimension becomes a dimension of rows, which the operands numbered `rows` have."""
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    if any(d is not None for i, d in enumerate(dims) if i not in rows):
        return one_by_one(op, args, dims, spec, order)
    x = batch_at(args[0], dims[0], 0, size)
    moved = list(args)
    for i in rows:
        array = batch_at(args[i], dims[i], 0, size)
        moved[i] = match(array, x, range(array.ndim))
    results = op(spec, *moved, order=order)
    return results, [0] * len(results)


def one_by_one(op: Op, args: Any, dims: Any, spec: Any, order: Order) -> Any:
    """Examples that have kernels of their own take turns."""
    own = [jnp.moveaxis(a, d, 0) for a, d in zip(args, dims) if d is not None]

    def one(own):
        given = iter(own)
        return op(spec, *[a if d is None else next(given) for a, d in zip(args, dims)], order=order)

    results = lax.map(one, own)
    return results, [0] * len(results)


def _batch_groups(op: Op, args: Any, dims: Any, *, spec: Spec, order: Order) -> Any:
    """A batch dimension becomes one of groups, with a kernel's gradient each."""
    rows = 0, *range(2, len(args) - (spec.bias is not None))
    in_turns = any(d is not None for i, d in enumerate(dims) if i not in rows)
    spec = spec if in_turns else replace(spec, groups=spec.groups + 1)
    return batch_rows(op, args, dims, spec=spec, order=order, rows=rows)


# ---------------------------------------------------------------- operations


_chunked = functools.partial(Placement, leads=(0, 1), undivided=lambda spec, x, w: (x - 1, x))
_of_gradients = functools.partial(
    Op,
    batching=Batching(rule=_batch_groups),
    before=lambda ctx, spec, order: require_fp8(ctx, spec, order) if spec.quantized else order,
)
statistics = Op(
    "cross_entropy_statistics",
    define_statistics,
    _chunked(_dims("xwrb", "rrre"), _statistics_body),
    Batching(rule=batch_rows),
    Derivative(
        formula=lambda spec, *operands: softmax.of_rows(*define_statistics(spec, *operands))
    ),
)
argmax = Op(
    "cross_entropy_argmax",
    define_argmax,
    _chunked(_dims("xwb", "r"), _argmax_body),
    Batching(rule=functools.partial(batch_rows, rows=(0,))),
)
loss_gradients = _of_gradients(
    "cross_entropy_loss_gradients",
    define_loss_gradients,
    _chunked(_dims("xwrrdb", "rrrg"), _loss_gradients_body),
)
gradients = _of_gradients(
    "cross_entropy_gradients",
    define_gradients,
    _chunked(_dims("xwrrrreb", "g"), _gradients_body),
)


def lse_tangents(
    spec: Spec,
    operands: Sequence[Array],
    found: Sequence[Array],
    moving: Sequence[Any],
    order: Order,
) -> list[Array]:
    """Returns the tangents of `softmax.of_rows`, at operands whose `statistics` were found.

    `moving` are those of x, the kernel and the bias.
    """
    tangents = [*moving[:2], None, *moving[2:]]  # labels have none
    most, total, _, *spread = found
    results, rows = (most, most, *spread), (most, total, *spread)
    return tangents_of(statistics, _backward, spec, operands, tangents, results, rows, order)


def _backward(
    spec: Spec, cts: Any, operands: Any, rows: Any, wanted: Any, *, order: Order
) -> list[Any]:
    (x, w, labels, *bias), (most, total, *spread) = operands, rows
    dlse, dcost = [jnp.zeros_like(most) if ct is None else ct for ct in cts[:2]]
    of_bias = wanted[3] if bias else None
    along = [ct for ct in cts[2:] if ct is not None]  # entropies that have a gradient
    of_rows = replace(spec.softmax, entropy=bool(along))
    spec = replace(spec, softmax=of_rows, wanted=(wanted[0], wanted[1]), bias=of_bias, total=None)
    divided = functools.partial(softmax.divided, total=total, labels=labels)
    dlse = sum([ct * divided(spread[0]) for ct in along], dlse + dcost)
    factors = [divided(dlse), dcost, *map(divided, along)]
    found = iter(gradients(spec, x, w, labels, most, *factors, *bias, order=order))
    return [next(found) if wants else None for wants in wanted]


def _without_gradients(used: list[bool], eqn: Any) -> Any:
    """Dead code: where nobody uses a gradient the statistics alone are computed."""
    if any(used[3:]):
        return [True] * len(eqn.invars), eqn
    data = 1 + eqn.params["spec"].total.data
    invars = [*eqn.invars[:3], *eqn.invars[3 + data :]]
    spec = replace(eqn.params["spec"], total=None)
    params = {**eqn.params, "spec": spec, "tree": all_there(invars)}
    eqn = eqn.replace(
        primitive=statistics.primitive, invars=invars, outvars=eqn.outvars[:3], params=params
    )
    return [True] * 3 + [False] * data + [True] * len(invars[3:]), eqn


on_unused_results(loss_gradients.primitive, _without_gradients)
