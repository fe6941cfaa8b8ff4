"""FP8 codes of a norm, in the pass that normalises, with a scale from its parameters alone.

    y = x̂ · w + bias        h = x (+ residual)        w = scale + scale_offset
    |y| ≤ max(√n · |w| + |bias|), because Σ x̂² ≤ n

x̂ is h · rstd, or of a centred norm (h − mean) · rstd; scale and bias may be those of each example.

No pass looks for a maximum, a row's codes do not depend on other rows, and y itself is never
written. Parameters decide the scale, so that it is the same on all devices.
"""

import dataclasses
import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import promoted
from ...native.implementation import BEST, Order
from ...native.kernel import Kernel
from ...native.launch import Target, launch, type_macros
from ..core.op import (
    Batching,
    Derivative,
    Dims,
    Op,
    Placement,
    Split,
    batch_at,
    in_places,
    match,
    on_unused_results,
)
from ..norm import op as rms_norm
from ..norm.kernels import forward_kernel
from ..norm.layouts import MAX_CLUSTER, REGISTERS, threads_for
from ..norm.spec import Norm, operands_of
from .quantize import (
    COLUMNS,
    INPUTS,
    CastLayout,
    Codes,
    as_bytes,
    cast_kernel,
    code_types,
    cpu_cast,
    cuda_cast,
    define_cast,
    no_second_derivative,
    tile_macros,
)

_LEAST_THREADS, _MOST_THREADS = 128, 512  # a block's
_ROWS = 16  # a thread's


@dataclasses.dataclass(frozen=True)
class NormCodes:
    """The static description of a quantized norm over the last axis."""

    # The norm, which has its statistics as results; y has no dtype, as it is encoded from float32.
    norm: Norm
    codes: Codes = Codes()  # y's

    @property
    def op(self) -> str:
        return self.norm.op


def serves(*arrays: Array | jax.ShapeDtypeStruct | None) -> bool:
    """Returns whether the norm of these operands is computed in float32, as codes need."""
    return all(a is None or jnp.dtype(a.dtype).name in INPUTS for a in arrays)


def shares_rows(norm: Norm, shape: Any) -> bool:
    """Returns whether every 16 rows of such an array have one scale and bias, as threads do."""
    return not norm.heads or math.prod(shape[len(norm.heads) : -1]) % _ROWS == 0


# ---------------------------------------------------------------- definitions
# Arrays have the layout of the norm's own kernels, except codes, which are (rows, n).


def _bound(norm: Norm, scale: Array | None, bias: Array | None, features: int) -> Array:
    """A bound on |y|, (1,) float32: the same bits on every platform."""
    bound = jnp.sqrt(jnp.float32(features))
    if scale is not None:
        bound = bound * jnp.abs(scale.astype(jnp.float32) + jnp.float32(norm.scale_offset))
    if bias is not None:
        bound = bound + jnp.abs(bias.astype(jnp.float32))
    return jnp.max(bound).reshape(1)


def _norm_and_cast(normalise: Any, cast: Any, spec: NormCodes, *operands: Any) -> list[Any]:
    """Normalises into float32 (y, then the other results), and encodes y."""
    *arrays, bound = operands
    y, *others = normalise(replace(spec.norm, out_dtype="float32"), *arrays)
    codes = cast(spec.codes, y.reshape(-1, y.shape[-1]), bound)
    return [*in_places(codes, spec.codes.results), *others]


# ---------------------------------------------------------------- kernels


_NARROW = 32  # threads along a row's part: with more than one each, more blocks share the row
_LEAST_REGISTERS = 72  # a thread's; neither spills with these


def layout(
    columns: int,
    itemsize: int,
    target: Target,
    *,
    has_residual: bool = False,
    centred: bool = False,
) -> CastLayout | None:
    """How blocks share rows in one pass; None for rows that shared memory cannot hold.

    A row is held by one block or, from compute capability 9.0, by a cluster of up to eight.
    Measured in bfloat16 on an H200 (benchmarks/results).
    """
    vectors, most = -(-columns // 8), MAX_CLUSTER if target.clusters else 1
    # Threads of a block that are enough, if four rows of them are as many, and registers of each.
    wanted, registers = (128, 128) if has_residual else (256, 96)
    width = {b: max(8, threads_for(-(-vectors // b), 1)) for b in (8, 4, 2, 1) if b <= most}
    fits = [b for b in width if -(-vectors // width[b]) == b and 2 * vectors > b * _NARROW]
    blocks = (fits or [1])[0]
    # Blocks of 16 rows a thread: two threads high if they fit, so that runs of qt have 32 bytes,
    # and higher if rows have few threads.
    for height in (8, 4, 2, 1):
        chosen = CastLayout(width[blocks], height, 4)
        threads = chosen.width * height
        shared = shared_bytes(chosen, blocks, itemsize, centred=centred)
        enough = max(_LEAST_THREADS, min(wanted, 4 * chosen.width), 2 * chosen.width)
        if threads <= min(enough, _MOST_THREADS) and shared <= target.shared_memory:
            room = target.blocks_with(shared)
            fit = min(REGISTERS // registers // threads, room)
            # Two blocks, even with fewer registers: a block's threads wait for memory together.
            two = min(2, REGISTERS // _LEAST_REGISTERS // threads, room)
            return replace(chosen, min_blocks=max(1, two, fit))
    return None


def shared_bytes(
    chosen: CastLayout, blocks: int, itemsize: int, parameters: int = 0, *, centred: bool = False
) -> int:
    """Bytes of shared memory of one of `blocks` that share a row, as HeldRows and RowStatistics.

    `parameters` are the bytes of a column's scale and bias if shared memory holds them.
    """
    rows, warps = 16 * chosen.height, -(-chosen.width // 32)
    arriving = (1 + centred) * (rows // blocks) * (blocks - 1)
    exchanged = 16 + 4 * arriving if blocks > 1 else 0
    held = chosen.held(itemsize) + COLUMNS * chosen.width * parameters
    return held + 4 * (3 if centred else 1) * rows * warps + exchanged


def _launch(
    target: Target, spec: NormCodes, chosen: CastLayout, operands: dict[str, Array]
) -> list[Any]:
    """Launches quantize_norm.cu for operands by their names there; returns `codes_kernel`'s."""
    norm, codes, x = spec.norm, spec.codes, operands["X"]
    *row_shape, columns = x.shape
    rows, blocks = math.prod(row_shape), -(-columns // (8 * chosen.width))  # that share a row
    results = code_types(codes, rows, columns)
    parameters = {k: operands[k] for k in ("SCALE", "BIAS") if k in operands}
    types: dict[str, Any] = {k: operands[k] for k in ("X", "RESIDUAL") if k in operands}
    types |= parameters
    if "RESIDUAL" in operands:
        h = promoted(x.dtype, operands["RESIDUAL"].dtype)
        types["H"] = jax.ShapeDtypeStruct(x.shape, h)
        results.append(types["H"])
    results += [jax.ShapeDtypeStruct(row_shape, jnp.float32)] * (1 + norm.centred)
    itemsize = types.get("H", x).dtype.itemsize
    held = functools.partial(shared_bytes, chosen, blocks, itemsize, centred=norm.centred)
    width = sum(a.dtype.itemsize for a in parameters.values())
    # Shared memory holds scale and bias if enough blocks still fit; else the cache does.
    shares = width > 0 and target.blocks_with(held(width)) >= chosen.min_blocks
    shares &= not norm.heads
    tokens = [x.shape[1]] if norm.heads and parameters else []
    done = launch(
        "quantize_norm.cu",
        "quantize_norm",
        list(operands.values()),
        results,
        target=target,
        macros=tile_macros(chosen, codes, rows, columns)
        | type_macros(types)
        | {
            "CENTRED": int(norm.centred),
            "CLUSTER": blocks,
            "HAS_RESIDUAL": int("RESIDUAL" in operands),
            "HAS_SCALE": int("SCALE" in operands),
            "HAS_BIAS": int("BIAS" in operands),
            "PER_EXAMPLE": len(tokens),
            "SHARED_PARAMETERS": int(shares),
            "HAS_OFFSET": int("SCALE" in operands and norm.scale_offset != 0),
        },
        grid=chosen.blocks(rows, columns),
        block=chosen.width * chosen.height,
        cluster=blocks,
        shared=held(width * shares),
        ints=(rows, columns, *tokens),
        floats=(norm.eps, norm.scale_offset, 1 / columns),
    )
    return in_places(done, (*codes.results, "H" in types, norm.centred, True))


def cuda_codes(target: Target, spec: NormCodes, *operands: Any) -> list[Any]:
    """The norm and its codes on a GPU: one launch, or the norm's and then the quantizer's."""
    norm, named = spec.norm, operands_of("forward", operands[:-1])
    x, kind = named["X"], {"has_residual": "RESIDUAL" in named, "centred": norm.centred}
    stored = promoted(x.dtype, named.get("RESIDUAL", x).dtype)
    chosen = layout(x.shape[-1], stored.itemsize, target, **kind)
    if chosen and shares_rows(norm, x.shape):
        return _launch(target, spec, chosen, named | {"BOUND": operands[-1]})
    normalise = functools.partial(forward_kernel.bodies["cuda"], target)
    return _norm_and_cast(normalise, functools.partial(cuda_cast, target), spec, *operands)


codes_kernel = Kernel(
    "quantize_norm",
    functools.partial(_norm_and_cast, forward_kernel.definition, define_cast),
    {
        "cpu": functools.partial(_norm_and_cast, forward_kernel.bodies["cpu"], cpu_cast),
        "cuda": cuda_codes,
    },
)
"""`(x, residual, scale, bias, bound) -> (q, qt, code scale (1,), h, mean, rstd)`."""


# ---------------------------------------------------------------- the operation on global arrays


def _body(spec: NormCodes, split: Split, *operands: Any, order: Order) -> list[Any]:
    """Returns codes of any number of dimensions as bytes, their scale (), h, mean and rstd."""
    norm, (x, _, scale, bias) = spec.norm, operands
    bound = _bound(norm, scale, bias, split.count(norm.axes))
    bound = split.pmax(bound, (*norm.heads, *norm.axes))
    if split.over(norm.axes):
        normalise = lambda norm, *arrays: rms_norm.forward_body(norm, split, *arrays, order=order)
        cast = functools.partial(cast_kernel, order=order)
        results = _norm_and_cast(normalise, cast, spec, *operands, bound)
    else:
        here = rms_norm.seen_by("forward", norm, operands)
        local = replace(spec, norm=rms_norm.local(norm))
        results = codes_kernel(local, *here, bound, order=order)
    *rows, n = x.shape
    q, qt, code_scale, h, mean, rstd = results
    reshaped = lambda a, *shape: None if a is None else a.reshape(shape)
    as_codes = lambda a, *shape: None if a is None else as_bytes(a.reshape(shape))
    statistics = reshaped(mean, *rows), reshaped(rstd, *rows)
    codes = as_codes(q, *x.shape), as_codes(qt, n, *rows), code_scale.reshape(())
    return [*codes, reshaped(h, *x.shape), *statistics]


def _dims(spec: NormCodes, *ndims: int | None) -> Dims:
    inputs, (every, *others) = rms_norm.dims_of("forward", spec.norm, *ndims)
    *rows, last = every
    codes = every if spec.codes.has_q else None, (last, *rows) if spec.codes.has_qt else None
    return inputs, [*codes, (), *others]


def _batch(op: Op, args: Any, dims: Any, *, spec: NormCodes, order: Order) -> Any:
    """A batch dimension becomes one of rows, behind those of examples if these have scales.

    Arrays vmapped over scales have one code scale each.
    """
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    (x, residual, *parameters), at = args, len(spec.norm.heads)
    if any(d is not None for d in dims[2:]):
        results = jax.vmap(lambda *one: op.plain(spec, *one), tuple(dims), axis_size=size)(*args)
        return results, [0] * len(results)
    x = batch_at(x, dims[0], at, size)
    if residual is not None:
        residual = match(batch_at(residual, dims[1], at, size), x, range(x.ndim))
    spec = replace(spec, norm=rms_norm.batched(spec.norm, at))
    operands = x, residual, *parameters
    assert op.placement is not None
    _, outputs = op.placement.dims_of(spec, operands)
    return op(spec, *operands, order=order), [out.index(at) if out else None for out in outputs]


def _drop_qt(used: list[bool], eqn: Any) -> Any:
    """Dead code: qt is not written if nobody reads it, as in a forward alone."""
    spec = eqn.params["spec"]
    if spec.codes.has_q and spec.codes.has_qt and not used[1]:
        params = {**eqn.params, "spec": replace(spec, codes=replace(spec.codes, has_qt=False))}
        eqn = eqn.replace(outvars=[eqn.outvars[0], *eqn.outvars[2:]], params=params)
    return [True] * len(eqn.invars), eqn


op = Op(
    "quantize_norm_array",
    None,
    Placement(_dims, _body),
    Batching(rule=_batch),
    Derivative(jvp=no_second_derivative),
)
on_unused_results(op.primitive, _drop_qt)


class Normalised(NamedTuple):
    """`y ≈ scale · decoded(q)`, and the arrays that the norm's gradient needs."""

    # q, qt, scale: as in `Quantized`.
    q: Any
    qt: Any
    scale: Array
    h: Array  # the norm's input: x, or x + residual
    mean: Any  # each row's, float32, as rstd; None where the norm is not centred
    rstd: Array


def quantize(
    spec: NormCodes,
    x: Array,
    residual: Array | None = None,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    order: Order = BEST,
) -> Normalised:
    """Returns the codes of a norm, and what its gradient needs."""
    norm = replace(spec.norm, cast_before=False, with_mean=spec.norm.centred, with_rstd=True)
    results = op(replace(spec, norm=norm), x, residual, scale, bias, order=order)
    q, qt, code_scale, h, mean, rstd = results
    return Normalised(q, qt, code_scale, x if h is None else h, mean, rstd)
