"""FP8 codes of RMSNorm, in the pass that normalises, with a scale from its parameters alone.

    y = h · rstd · w        h = x (+ residual)        w = scale + scale_offset
    |y| ≤ √n · max|w|, because Σ (h · rstd)² ≤ n

No pass looks for a maximum, a row's codes do not depend on other rows, and y itself is never
written. Parameters decide the scale, so that it is the same on all devices.
"""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...native import jax_private
from ...native.implementation import BEST, Order
from ...native.kernel import Kernel
from ...native.launch import Target, launch, type_macros
from ..core.op import Dims, Loose, Op, Split, batch_at, match
from ..norm import op as rms_norm
from ..norm.cuda import MAX_CLUSTER, REGISTERS, round_up
from ..norm.op import apply_kernel, forward_kernel, row_statistics_kernel
from ..norm.spec import Norm
from . import kernels
from .definition import define_cast
from .kernels import COLUMNS, INPUTS, CastLayout, Codes
from .op import as_bytes

_LEAST_THREADS, _MOST_THREADS = 128, 512  # of a block


@dataclasses.dataclass(frozen=True)
class NormCodes:
    """All that is known of a quantized RMSNorm over the last axis when it is traced."""

    # The norm, which has rstd as a result; y has no dtype, as it is encoded from float32.
    norm: Norm
    codes: Codes = Codes()  # what is made of y
    plain: bool = False  # whether the norm is plain HLO, and the quantizer's kernel encodes it

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.norm.op


def serves(*arrays: Array | jax.ShapeDtypeStruct | None) -> bool:
    """Returns whether the norm of these operands is computed in float32, from which codes are."""
    return all(a is None or jnp.dtype(a.dtype).name in INPUTS for a in arrays)


# ---------------------------------------------------------------- definitions, on (rows, n)


def _bound(norm: Norm, scale: list[Array], features: int) -> Array:
    """What no |y| exceeds, (1,) float32: the same bits on every platform."""
    root = np.sqrt(np.float32(features))
    if not scale:
        return jnp.full(1, root)
    weight = scale[0].astype(jnp.float32) + jnp.float32(norm.scale_offset)
    return root * jnp.max(jnp.abs(weight), keepdims=True)


def _norm_and_cast(normalise: Any, cast: Any, spec: NormCodes, *operands: Array) -> list[Array]:
    """Normalises into float32 (y, then what else there is), and encodes y."""
    *given, bound = operands
    y, *others = normalise(replace(spec.norm, out_dtype="float32", axes=(1,)), *given)
    return [*cast(y, bound, **spec.codes.flags), *others]


# By kernel, of a function that encodes:
# `(x[, residual][, scale], bound) -> ([q,] [qt,] scale (1,)[, h], rstd)`
# `(h[, scale], rstd, bound) -> ([q,] [qt,] scale (1,))`
_DEFINITIONS = {
    "quantize_rms_norm": functools.partial(_norm_and_cast, rms_norm.define_forward),
    "quantize_rms_norm_apply": functools.partial(_norm_and_cast, rms_norm.define_apply),
}


# ---------------------------------------------------------------- kernels


_NARROW = 32  # threads along a row's part: with more than one each, more blocks share the row


class _Blocks(NamedTuple):
    """What a block of 16 rows or more should have."""

    threads: int  # enough of them, where four rows of threads are as many
    registers: int  # of a thread


_ALONE, _ADDED = _Blocks(256, 96), _Blocks(128, 128)  # beside a residual
_LEAST_REGISTERS = 72  # of a thread, with which neither spills


def layout(
    columns: int, itemsize: int, target: Target, *, has_residual: bool = False
) -> CastLayout | None:
    """How blocks share rows in one pass; None where the sums over rows take a pass of their own.

    A row is held by one block or, from compute capability 9.0, by a cluster of up to eight. None
    for rows that shared memory cannot hold so. Measured in bfloat16 on an H200
    (benchmarks/results).
    """
    vectors, most = -(-columns // 8), MAX_CLUSTER if target.clusters else 1
    wanted = _ADDED if has_residual else _ALONE
    width = {b: _width(-(-vectors // b)) for b in (8, 4, 2, 1) if b <= most}
    fits = [b for b in width if -(-vectors // width[b]) == b and 2 * vectors > b * _NARROW]
    blocks = (fits or [1])[0]
    # Of 16 rows each: two where they fit, so that runs of qt have 32 bytes, or more of few threads.
    for height in (8, 4, 2, 1):
        chosen = CastLayout(width[blocks], height, 4, group=1)
        threads, shared = chosen.width * height, shared_bytes(chosen, blocks, itemsize)
        enough = max(_LEAST_THREADS, min(wanted.threads, 4 * chosen.width), 2 * chosen.width)
        if threads <= min(enough, _MOST_THREADS) and shared <= target.shared_memory:
            room = target.blocks_with(shared)
            fit = min(REGISTERS // wanted.registers // threads, room)
            # Two, if with fewer registers: of one all threads wait for its memory together.
            two = min(2, REGISTERS // _LEAST_REGISTERS // threads, room)
            return replace(chosen, min_blocks=max(1, two, fit))
    return None


def _width(vectors: int) -> int:
    """Threads along a row: whole warps, or a part of one."""
    return max(8, 1 << (vectors - 1).bit_length()) if vectors <= 32 else round_up(vectors, 32)


def shared_bytes(chosen: CastLayout, blocks: int, itemsize: int, scale: int = 0) -> int:
    """Bytes of shared memory of one of `blocks` that share a row, as HeldRows and RowStatistics.

    `scale` is the size of its elements if shared memory holds it.
    """
    rows, warps = 16 * chosen.height, -(-chosen.width // 32)
    exchanged = 16 + 4 * (rows // blocks) * (blocks - 1) if blocks > 1 else 0
    held = chosen.held(itemsize) + COLUMNS * chosen.width * scale
    return held + 4 * rows * warps + exchanged


def apply_layout() -> CastLayout:
    """Of the pass that is given the rows' statistics."""
    return CastLayout(batch=4, min_blocks=4)


def _launch(
    target: Target, spec: NormCodes, chosen: CastLayout, operands: dict[str, Array], eps: float
) -> list[Array]:
    """Launches quantize_rms_norm.cu for operands by their names there."""
    norm, flags, x = spec.norm, spec.codes.flags, operands["X"]
    rows, columns = x.shape
    statistics = "RSTD" not in operands
    blocks = -(-columns // (8 * chosen.width)) if statistics else 1  # of a row
    results = kernels.code_types(rows, columns, **flags)
    names = "X", "RESIDUAL", "SCALE"
    types: dict[str, Any] = {name: operands[name] for name in names if name in operands}
    if "RESIDUAL" in operands:
        h = jnp.promote_types(x.dtype, operands["RESIDUAL"].dtype)
        types["H"] = jax.ShapeDtypeStruct(x.shape, h)
        results.append(types["H"])
    results += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * statistics
    name = "quantize_rms_norm" + ("" if statistics else "_apply")
    shared, shares_scale = chosen.shared * flags["has_qt"], False
    if statistics:
        held = functools.partial(shared_bytes, chosen, blocks, types.get("H", x).dtype.itemsize)
        scale = operands["SCALE"].dtype.itemsize if norm.has_scale else 0
        # Where that leaves no place for a block, threads ask the cache for the scale.
        shares_scale = norm.has_scale and target.blocks_with(held(scale)) >= chosen.min_blocks
        shared = held(scale * shares_scale)
    return launch(
        "quantize_rms_norm.cu",
        name,
        list(operands.values()),
        results,
        target=target,
        macros=kernels.tile_macros(chosen, rows, columns, **flags)
        | type_macros(types)
        | {
            "KERNEL": name,
            "STATISTICS": int(statistics),
            "CLUSTER": blocks,
            "HAS_RESIDUAL": int("RESIDUAL" in operands),
            "HAS_SCALE": int(norm.has_scale),
            "SHARED_SCALE": int(shares_scale),
            "HAS_OFFSET": int(norm.has_scale and norm.scale_offset != 0),
        },
        grid=chosen.blocks(rows, columns),
        block=chosen.width * chosen.height,
        cluster=blocks,
        shared=shared,
        ints=(rows, columns, chosen.group),
        floats=(eps, norm.scale_offset, 1 / columns),
    )


def cuda_codes(target: Target, spec: NormCodes, *operands: Array) -> list[Array]:
    """The norm and its codes on a GPU: one launch, or one for sums over rows before it."""
    names = ["X", *["RESIDUAL"] * spec.norm.has_residual, *["SCALE"] * spec.norm.has_scale, "BOUND"]
    given, norm = dict(zip(names, operands, strict=True)), spec.norm
    x = given["X"]
    stored = jnp.promote_types(x.dtype, given.get("RESIDUAL", x).dtype)
    chosen = layout(x.shape[1], stored.itemsize, target, has_residual=norm.has_residual)
    if chosen:
        return _launch(target, spec, chosen, given, norm.eps)
    h = x
    if norm.has_residual:
        h = rms_norm.add(x, given.pop("RESIDUAL"), jnp.dtype("float32"))
    (sums,) = row_statistics_kernel.bodies["cuda"](target, norm, h[..., None])
    rstd = jax.lax.rsqrt(sums.reshape(-1) / h.shape[1] + jnp.float32(norm.eps))
    scale = [given["SCALE"]] if norm.has_scale else []
    codes = cuda_apply(target, spec, h, *scale, rstd, given["BOUND"])
    return [*codes, *[h] * norm.has_residual, rstd]


def cuda_apply(target: Target, spec: NormCodes, *operands: Array) -> list[Array]:
    """The same for rows whose rstd is known."""
    names = ["X", *["SCALE"] * spec.norm.has_scale, "RSTD", "BOUND"]
    return _launch(target, spec, apply_layout(), dict(zip(names, operands, strict=True)), 0.0)


def _on_cpu(kernel: Kernel, large: int, norm: Norm, *operands: Array) -> list[Array]:
    """The norm's C++ kernel on rows, the first `large` of whose operands are as large as x."""
    rows = {*range(large), *([len(operands) - 1] if kernel is apply_kernel else [])}
    given = [a[..., None] if i in rows else a for i, a in enumerate(operands)]
    return [a[..., 0] for a in kernel.bodies["cpu"](norm, *given)]


def _kernel(name: str, kernel: Kernel, cuda: Any) -> Kernel:
    """Returns a kernel that is, on the CPU, the norm's and then the quantizer's in C++."""

    def cpu(spec: NormCodes, *operands: Array) -> list[Array]:
        large = 1 + (spec.norm.has_residual and kernel is forward_kernel)
        normalise = functools.partial(_on_cpu, kernel, large)
        return _norm_and_cast(normalise, kernels.cpu_cast, spec, *operands)

    definition = functools.partial(_DEFINITIONS[name], define_cast)
    return Kernel(name, definition, {"cpu": cpu, "cuda": cuda})


codes_kernel = _kernel("quantize_rms_norm", forward_kernel, cuda_codes)
apply_codes_kernel = _kernel("quantize_rms_norm_apply", apply_kernel, cuda_apply)


def examples(
    n: int, dtype: str, scale: str, *, rows: int, scale_offset: float = 0.0
) -> Iterator[tuple[Kernel, NormCodes, list[jax.ShapeDtypeStruct]]]:
    """Yields the kernels as layers call them, of rows of `n`: (kernel, spec, operand types)."""
    x, row, bound = (
        jax.ShapeDtypeStruct(shape, jnp.dtype(of))
        for shape, of in (((rows, n), dtype), ((rows,), "float32"), ((1,), "float32"))
    )
    for weight in ([jax.ShapeDtypeStruct((n,), jnp.dtype(scale))], []):
        offset = scale_offset if weight else 0.0
        norm = Norm(eps=1e-6, scale_offset=offset, has_scale=bool(weight), with_rstd=True)
        for has_qt in (True, False):  # with a gradient of the kernel, or without
            codes = Codes(has_qt=has_qt)
            yield apply_codes_kernel, NormCodes(norm, codes), [x, *weight, row, bound]
            for residual in ([], [x]) if weight else ([],):
                spec = NormCodes(replace(norm, has_residual=bool(residual)), codes)
                yield codes_kernel, spec, [x, *residual, *weight, bound]


# ---------------------------------------------------------------- the operation on global arrays


def _restored(spec: NormCodes, x: Array, results: Any) -> list[Array]:
    """The results for an array of any number of dimensions; codes as bytes."""
    *rows, n = x.shape
    shapes = [x.shape] * spec.codes.has_q + [(n, *rows)] * spec.codes.has_qt
    codes = [as_bytes(c.reshape(s)) for c, s in zip(results, shapes)]
    scale, *others = results[len(codes) :]
    shapes = [x.shape] * spec.norm.has_residual + [tuple(rows)]
    return [*codes, scale.reshape(()), *[a.reshape(s) for a, s in zip(others, shapes)]]


def _matrices(spec: NormCodes, operands: Any) -> list[Array]:
    large = 1 + spec.norm.has_residual
    return [a.reshape(-1, a.shape[-1]) if i < large else a for i, a in enumerate(operands)]


def _define(spec: NormCodes, *operands: Array) -> list[Array]:
    """`(x[, residual][, scale]) -> ([q,] [qt,] scale ()[, h], rstd)` in plain JAX."""
    given, x = _matrices(spec, operands), operands[0]
    bound = _bound(spec.norm, given[len(given) - spec.norm.has_scale :], x.shape[-1])
    return _restored(spec, x, codes_kernel.definition(spec, *given, bound))


def _body(spec: NormCodes, split: Split, *operands: Array, order: Order) -> list[Array]:
    x, norm = operands[0], spec.norm
    if x.size == 0:
        return _define(spec, *operands)
    given, last = _matrices(spec, operands), (x.ndim - 1,)
    scale = given[len(given) - norm.has_scale :]
    bound = split.pmax(_bound(norm, scale, split.count(last)), last)
    call = lambda kernel, *args: kernel(spec, *args, order=order)
    if spec.plain:
        cast = lambda y, bound, **_: kernels.cast(spec.codes, y, bound, order=order)
        call = lambda kernel, *args: _DEFINITIONS[kernel.name](cast, spec, *args)
    if not split.over(last):
        return _restored(spec, x, call(codes_kernel, *given, bound))
    h = rms_norm.add(given[0], given[1], jnp.dtype("float32")) if norm.has_residual else given[0]
    sums = split.psum(
        row_statistics_kernel(replace(norm, axes=(1,)), h[..., None], order=order)[0], last
    )
    rstd = jax.lax.rsqrt(sums.reshape(-1) / split.count(last) + jnp.float32(norm.eps))
    codes = call(apply_codes_kernel, h, *scale, rstd, bound)
    return _restored(spec, x, [*codes, *[h] * norm.has_residual, rstd])


def _dims(spec: NormCodes, ndim: int) -> Dims:
    *rows, last = every = tuple(range(ndim))
    norm, codes = spec.norm, spec.codes
    inputs = [every] * (1 + norm.has_residual) + [Loose((last,))] * norm.has_scale
    outputs = [every] * codes.has_q + [(last, *rows)] * codes.has_qt + [()]
    return inputs, [*outputs, *[every] * norm.has_residual, tuple(rows)]


def _batch(op: Op, args: Any, dims: Any, *, spec: NormCodes, order: Order) -> Any:
    """A batch dimension is one more of rows; examples with scales of their own are quantized so."""
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    large = 1 + spec.norm.has_residual
    if any(d is not None for d in dims[large:]):
        results = jax.vmap(lambda *one: op.plain(spec, *one), tuple(dims), axis_size=size)(*args)
        return results, [0] * len(results)
    moved = [batch_at(a, d, 0, size) for a, d in zip(args[:large], dims)]
    moved = [match(a, moved[0], range(a.ndim)) for a in moved]
    _, outputs = _dims(spec, moved[0].ndim)
    results = op(spec, *moved, *args[large:], order=order)
    return results, [out.index(0) if out else None for out in outputs]


def _drop_qt(used: list[bool], *live_and_eqn: Any) -> Any:
    """Dead code: qt is not written when nobody reads it, as in a forward alone."""
    eqn = live_and_eqn[-1]
    if not any(used):
        return [False] * len(eqn.invars), None
    spec = eqn.params["spec"]
    if spec.codes.has_q and spec.codes.has_qt and not used[1]:
        params = {**eqn.params, "spec": replace(spec, codes=replace(spec.codes, has_qt=False))}
        eqn = eqn.replace(outvars=[eqn.outvars[0], *eqn.outvars[2:]], params=params)
    return [True] * len(eqn.invars), eqn


_rules = {"batch": _batch, "jvp": kernels.no_second_derivative}
op = Op("quantize_rms_norm_array", _define, dims=_dims, body=_body, **_rules)
jax_private.on_unused_results(op.primitive, _drop_qt)


class Normalised(NamedTuple):
    """`y ≈ scale · decoded(q)`, and what the norm's gradient needs."""

    # q, qt, scale: as in `op.Quantized`.
    q: Any
    qt: Any
    scale: Array
    h: Array  # what was normalised: x, or x + residual
    rstd: Array  # one float32 a row


def quantize(spec: NormCodes, *operands: Array, order: Order = BEST) -> Normalised:
    """Returns the codes of the norm of `(x[, residual][, scale])`."""
    *found, rstd = op(spec, *operands, order=order)
    h = found.pop() if spec.norm.has_residual else operands[0]
    *codes, scale = found
    q, qt = codes[0] if spec.codes.has_q else None, codes[-1] if spec.codes.has_qt else None
    return Normalised(q, qt, scale, h, rstd)
