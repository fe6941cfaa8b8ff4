"""The norms' kernels on CUDA: what they are given, and launching.

Rows of contiguous elements move through memory once. Those that no block, or cluster of blocks, can
hold take two launches: one for the statistics of each slice of a row, one for the rest.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...native.dtypes import CUDA_TYPES, FLOATING, promoted
from ...native.implementation import Unsupported
from ...native.launch import Target, column_sum, launch, type_macros
from .layouts import (
    WARP,
    RowLayout,
    Rows,
    backward_layout,
    forward_layout,
    one_launch_layout,
    power_of_two,
    round_up,
)
from .spec import OPERANDS, PARAMETERS, RESULTS, STATISTICS, Norm, forward_results, results_of

_MAX_GRID = 2**31 - 1
_MAX_PARTIAL_BYTES = 64 << 20


# Elements of x up to which XLA's forward is left alone on a GPU, where no derivative asks for rstd
# and there is more than a row: as fast as ours, it is free to join the product that follows.
# Chains of 24 × (norm + product) on 64 rows of 1024 took 1.11 and 1.16 times as long with our
# launches (benchmarks/results/tried_and_lost.md).
PLAIN_ELEMENTS = 1 << 16


def is_plain_faster(norm: Norm, x: Any, *_: Any) -> bool:
    return not (norm.centred or norm.with_rstd) and x.shape[0] > 1 and x.size <= PLAIN_ELEMENTS


def combined(means: Any, squares: Any, counts: Any) -> tuple[jax.Array, jax.Array]:
    """Mean and squared differences of rows, from those of their parts along the first dimension.

    `counts` are the elements of each part, against `means`. References: Chan, Golub and LeVeque,
    "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    counts = jnp.broadcast_to(counts, means.shape)
    mean = jnp.sum(counts * means, 0) / jnp.sum(counts, 0)
    return mean, jnp.sum(squares + counts * (means - mean) ** 2, 0)


# ---------------------------------------------------------------- bodies
# Operands and results are those of the definitions.


def forward(
    target: Target, norm: Norm, x: Any, residual: Any = None, scale: Any = None, bias: Any = None
) -> list[Any]:
    call = Call(target, norm, "forward", (x, residual, scale, bias))
    results = _forward(call)
    if results is not None:
        return results
    h = x
    if residual is not None:
        h = (x.astype(call.compute) + residual.astype(call.compute)).astype(call.types["H"].dtype)
    mean, squares = row_statistics(target, norm, h)
    rstd = jax.lax.rsqrt(squares / call.features + norm.eps)
    (y,) = apply(target, norm, h, scale, bias, mean, rstd)
    return [y, *forward_results(norm, residual, h, mean, rstd)]


def row_statistics(target: Target, norm: Norm, x: Any) -> list[Any]:
    call = Call(target, norm, "row_statistics", (x,))
    means, squares = _found(_forward(call))
    slices = squares.shape[-1] if squares.shape != call.row_shape else 1
    if means is None or slices == 1:
        return [means, call.over_slices(squares)]
    assert call.layout is not None and call.layout.slices == slices
    counts = np.full((slices, 1), call.layout.tile)  # the last slice may be shorter
    counts[-1] = call.features - (slices - 1) * call.layout.tile
    parts = combined(means.T, squares.T, counts.astype(call.compute))
    return [part.reshape(call.row_shape) for part in parts]


def apply(target: Target, norm: Norm, *operands: Any) -> list[jax.Array]:
    return _found(_forward(Call(target, norm, "apply", operands)))


def backward(
    target: Target, norm: Norm, dy: Any, x: Any, scale: Any, mean: Any, rstd: Any, dh: Any = None
) -> list[Any]:
    operands = dy, x, scale, mean, rstd, dh
    call = Call(target, norm, "backward", operands)
    results = _backward_in_one_launch(call)
    results = _backward(call, call.features) if results is None else results
    if results is not None:
        return results
    sums = row_dots(target, norm, dy, x, scale, mean)
    return backward_apply(target, replace(norm, count=float(call.features)), *operands, *sums)


def row_dots(target: Target, norm: Norm, *operands: Any) -> list[Any]:
    call = Call(target, norm, "row_dots", operands)
    parts = _found(_backward(call, call.features))
    return [None if sums is None else call.over_slices(sums) for sums in parts]


def backward_apply(target: Target, norm: Norm, *operands: Any) -> list[jax.Array]:
    return _found(_backward(Call(target, norm, "backward_apply", operands), norm.count))


def _found(results: list[Any] | None) -> list[Any]:
    """Returns the results of a kernel that splits a row over blocks, which takes every length."""
    assert results is not None
    return results


# ---------------------------------------------------------------- launches


class Call:
    """One launch: operands and results by their names in the kernel, in their order there."""

    def __init__(self, target: Target, norm: Norm, kernel: str, operands: Any):
        arrays = {k: a for k, a in zip(OPERANDS[kernel], operands) if a is not None}
        results = results_of(kernel, norm, arrays)
        for array in arrays.values():
            if array.dtype.name not in FLOATING:
                raise Unsupported(f"no CUDA kernel of norms takes {array.dtype.name}")
        self.target, self.norm, self.kernel = target, norm, kernel
        self.name = f"{'layer_norm' if norm.centred else 'rms_norm'}_{kernel}"
        self.compute = compute = jnp.dtype(norm.compute)
        self.operands = {k: a.astype(compute) if k in STATISTICS else a for k, a in arrays.items()}
        x = arrays["X"]
        *self.row_shape, self.features = x.shape
        self.row_shape = tuple(self.row_shape)
        self.rows = math.prod(self.row_shape)
        self.examples = x.shape[0] if norm.heads and "SCALE" in arrays else 0
        self.whole = kernel in ("forward", "backward")  # not one of their halves
        self.layout: RowLayout | None = None
        dtype = {"Y": norm.out_dtype, "DX": x.dtype}
        if "H" in results:
            dtype["H"] = promoted(x.dtype, arrays["RESIDUAL"].dtype)
        large = [name for name in results if name in dtype]
        self.types = {k: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype[k])) for k in large}
        row = jax.ShapeDtypeStruct(self.row_shape, compute)
        self.types |= {name: row for name in results if name in STATISTICS}
        self.gradients = [name for name in results if name in PARAMETERS]

    @functools.cached_property
    def seen(self) -> Rows:
        small = {*STATISTICS, *PARAMETERS}
        arrays = self.operands | self.types
        sizes = {k: a.dtype.itemsize for k, a in arrays.items() if k not in small}
        return Rows(
            features=self.features,
            itemsize=max(sizes.values()),
            target=self.target,
            rows=self.rows,
            compute=self.compute,
            residual=bool({"RESIDUAL", "DH"} & set(arrays)),
            whole=self.whole,
            centred=self.norm.centred,
            gradients=len(self.gradients),
            parameters=len(self.gradients) + ("SCALE" in arrays),
            bias="BIAS" in arrays or "DBIAS" in self.gradients,
            read_bytes=sum([sizes.get(name, 0) for name in self.operands]),
        )

    def placed(self, results: dict[str, jax.Array]) -> list[Any]:
        return [results.get(name) for name in RESULTS[self.kernel]]

    def over_slices(self, sums: jax.Array) -> jax.Array:
        """Returns sums over each row, from those over its slices."""
        return sums if sums.shape == self.row_shape else jnp.sum(sums, 1).reshape(self.row_shape)

    def launch(
        self, source: str, macros: dict[str, Any], layout: RowLayout, **sizes: Any
    ) -> dict[str, jax.Array]:
        """Returns a kernel's results by name; `macros` are those of one source alone."""
        self.layout, threads = layout, layout.threads
        results, arrays = dict(self.types), self.operands
        if not self.whole and layout.slices > 1:  # a statistic for each slice of a row
            struct = jax.ShapeDtypeStruct((self.rows, layout.slices), self.compute)
            results |= {name: struct for name in results if name in STATISTICS}
        cluster = layout.slices if self.whole else 1  # slices of a row that add up their sums
        macros = {
            "FEATURES": layout.features,
            "VECTOR": layout.vector,
            "CHUNKS": layout.chunks,
            "ROW_THREADS": layout.row_threads,
            "BLOCK_ROWS": layout.block_rows,
            "SLICES": layout.slices,
            "CLUSTER": cluster,
            "MIN_BLOCKS": layout.min_blocks,
            **macros,
            "CENTRED": self.norm.centred,
            "HAS_RESIDUAL": "RESIDUAL" in arrays or "DH" in arrays,
            "HAS_SCALE": "SCALE" in arrays,
            "HAS_OFFSET": "SCALE" in arrays and self.norm.scale_offset != 0,
            "PER_EXAMPLE": self.examples > 0,
        }
        types = {"KERNEL": self.name, "COMPUTE_TYPE": CUDA_TYPES[self.compute.name]}
        types |= type_macros(arrays) | type_macros(results)
        done = launch(
            source,
            self.name,
            list(arrays.values()),
            list(results.values()),
            target=self.target,
            macros=types | {name: int(value) for name, value in macros.items()},
            block=threads,
            cluster=(1, cluster),
            ints=(self.rows, *([self.rows // self.examples] if self.examples else [])),
            **sizes,
        )
        return dict(zip(results, done, strict=True))

    def scalars(self, *values: float) -> dict[str, tuple[float, ...]]:
        return {"doubles" if self.compute == jnp.float64 else "floats": values}


def _forward(call: Call) -> list[Any] | None:
    """Launches norm_forward.cu; None where its rows are too long to be held."""
    norm, normalise = call.norm, "Y" in call.types
    layout = forward_layout(call.seen)
    if layout is None:
        return None
    owners = call.examples or 1
    if call.examples:  # rows of a thread are of one example
        thread_rows = min(layout.thread_rows, power_of_two(call.rows // owners))
        layout = replace(layout, thread_rows=thread_rows, ahead=False)
    rows = owners * round_up(call.rows // owners, layout.thread_rows)  # blocks see so many
    grid = min(layout.blocks_for(rows), _MAX_GRID)
    if layout.persistent:
        grid = min(grid, layout.persistent_blocks(call.target, cluster=call.whole))
    statistics = "RSTD" not in call.operands
    shared = layout.sum_bytes(call.compute, cluster=call.whole) if statistics else 0
    if layout.ahead:
        shared = layout.ahead_bytes(call.operands["X"].dtype.itemsize, call.compute)
    macros = {
        "STATISTICS": statistics,
        "NORMALIZE": normalise,
        "CAST_BEFORE": normalise and norm.cast_before,
        "HAS_BIAS": "BIAS" in call.operands,
        "WITH_MEAN": "MEAN" in call.types,
        "WITH_RSTD": "RSTD" in call.types,
        "HOLD": layout.hold,
        "THREAD_ROWS": layout.thread_rows,
        "AHEAD": layout.ahead,
    }
    scalars = call.scalars(norm.eps, norm.scale_offset)
    grid = grid, layout.slices
    sizes = {"grid": grid, "shared": shared}
    return call.placed(call.launch("norm_forward.cu", macros, layout, **sizes, **scalars))


def _backward(call: Call, count: float) -> list[Any] | None:
    """Launches norm_backward.cu, and the sum over its blocks for dscale and dbias; None where its
    rows are too long to be held. `count` is of the features of whole rows."""
    n, owners, columns = call.features, call.examples or 1, len(call.gradients)
    layout = backward_layout(call.seen)
    if layout is None:
        return None
    grid = layout.persistent_blocks(call.target, cluster=call.whole)
    grid = min(layout.blocks_for(call.rows), grid)
    if columns:
        grid = min(grid, max(1, _MAX_PARTIAL_BYTES // (columns * n * call.compute.itemsize)))
    if call.examples:  # rows of a block are of one example
        blocks = layout.blocks_for(call.rows // owners)
        grid = owners * max(1, min(blocks, grid // owners))
    if columns:
        call.types["PARTIAL"] = jax.ShapeDtypeStruct((grid, columns * n), call.compute)
    depth, shared = layout.pipeline(call.seen)
    gradient = "DX" in call.types
    macros = {
        "DOTS": "DOTS" not in call.operands,
        "GRADIENT": gradient,
        "WITH_DSCALE": "DSCALE" in call.gradients,
        "WITH_DBIAS": "DBIAS" in call.gradients,
        "STAGES": depth,
        "SHARED_BYTES": shared,
        "HOLD": layout.hold,
        "SHARE_WEIGHT": layout.share,
    }
    scalars = call.scalars(call.norm.scale_offset, count)
    sizes = {"grid": (grid, layout.slices), "shared": shared}
    results = call.launch("norm_backward.cu", macros, layout, **sizes, **scalars)
    if not columns:
        return call.placed(results)
    partial = results.pop("PARTIAL").reshape(-1, owners * columns * n)
    sums = partial[0] if len(partial) == 1 else column_sum(launch, call.target, partial)
    if columns > 1 and owners > 1:  # those of an example are one after another
        sums = sums.reshape(owners, columns, n).swapaxes(0, 1)
    shape = (owners, n) if call.examples else (n,)
    parts = [one.reshape(shape) for one in jnp.split(sums.reshape(-1), columns)]
    return call.placed(results | dict(zip(call.gradients, parts, strict=True)))


def _backward_in_one_launch(call: Call) -> list[Any] | None:
    """Launches rms_norm_backward_in_one_launch.cu, where rows are few."""
    if call.gradients != ["DSCALE"] or call.norm.centred or call.examples:
        return None
    read = sum([call.operands[name].dtype.itemsize for name in ("DY", "X")])
    chosen = one_launch_layout(replace(call.seen, read_bytes=read))
    if chosen is None:
        return None
    (layout, lanes), n = chosen, call.features
    columns = lanes * layout.vector  # a block makes dscale of these
    call.types["DSCALE"] = jax.ShapeDtypeStruct((n,), call.compute)
    macros = {"LANES": lanes, "COLUMN_BLOCKS": -(-n // columns)}
    # the sums along a row, or those over rows of each warp
    tile = layout.threads // WARP * columns * call.compute.itemsize
    shared = max(tile, layout.sum_bytes(call.compute, cluster=False))
    sizes = {"grid": macros["COLUMN_BLOCKS"] + layout.blocks_for(call.rows), "shared": shared}
    scalars = call.scalars(call.norm.scale_offset, n)
    source = "rms_norm_backward_in_one_launch.cu"
    return call.placed(call.launch(source, macros, layout, **sizes, **scalars))
