"""RMSNorm's kernels on CUDA: choosing a layout and launching.

Each function takes a `Target`, then the operands and params of the kernel of the same name in
`normfuse.native.rms_norm`; arrays are viewed as (outer, n, inner). Contiguous rows (inner == 1)
move through memory once. Rows that no block, or cluster of blocks, can hold take two launches: one
for the sums over rows, one for the rest.
"""

from typing import Any

import jax
import jax.numpy as jnp

from . import (
    cuda_backward_layout,
    cuda_few_rows,
    cuda_forward_layout,
    cuda_layout,
)
from .cuda_common import TYPES, column_sum, compute_dtype, type_macros
from .cuda_layout import RowLayout
from .device import Target
from .launch import launch

_MAX_GRID = 2**31 - 1
_MAX_PARTIAL_BYTES = 64 << 20


def forward(
    target: Target, x, *rest, eps, scale_offset, out_dtype, has_residual, has_scale, with_rstd
):
    """`(x[, residual][, scale]) -> (y[, h][, rstd])`, h = x + residual."""
    operands = _named(rest, X=x, RESIDUAL=has_residual, SCALE=has_scale)
    call = _Call(target, "forward", operands, _compute_dtype(operands, out_dtype))
    call.result("Y", x.shape, out_dtype)
    if has_residual:
        call.result("H", x.shape, jnp.promote_types(x.dtype, rest[0].dtype))
    if with_rstd:
        call.result("RSTD", call.row_shape, call.compute)
    done = _forward(call, eps, scale_offset)
    if done is not None:
        return done

    h = x
    if has_residual:
        h = (x.astype(call.compute) + rest[0].astype(call.compute)).astype(call.results["H"].dtype)
    (sums,) = row_sums(target, h, compute=call.compute)
    rstd = jax.lax.rsqrt(sums / x.shape[1] + eps)
    scale = rest[has_residual:]
    (y,) = apply(
        target, h, *scale, rstd, scale_offset=scale_offset, out_dtype=out_dtype, has_scale=has_scale
    )
    return [y, *([h] if has_residual else []), *([rstd] if with_rstd else [])]


def row_sums(target: Target, x, *, compute=None) -> Any:
    """`x -> Σ x²`, one value a row."""
    call = _Call(target, "row_sums", {"X": x}, compute or _compute_dtype({"X": x}))
    call.result("SUMS", call.row_shape, call.compute)
    return _forward(call)


def apply(target: Target, x, *rest, scale_offset, out_dtype, has_scale) -> Any:
    """`(x[, scale], rstd) -> y`, for an rstd that is already known."""
    operands = _named(rest, X=x, SCALE=has_scale, RSTD=True)
    call = _Call(target, "apply", operands, _compute_dtype(operands, out_dtype))
    call.result("Y", x.shape, out_dtype)
    return _forward(call, scale_offset=scale_offset)


def backward(target: Target, dy, x, *rest, scale_offset, has_residual, has_scale, with_dscale):
    """`(dy, x[, scale], rstd[, dh]) -> (dx[, dscale])`."""
    operands = _named(rest, DY=dy, X=x, SCALE=has_scale, RSTD=True, DH=has_residual)
    call = _Call(target, "backward", operands, _compute_dtype(operands))
    call.result("DX", x.shape, x.dtype)
    if with_dscale:
        done = _backward_at_once(call, scale_offset)
        if done is not None:
            return done
    done = _backward(call, scale_offset, with_dscale=with_dscale)
    if done is not None:
        return done

    flags = {"scale_offset": scale_offset, "has_scale": has_scale}
    (dots,) = row_dots(target, dy, x, *rest[:has_scale], compute=call.compute, **flags)
    flags |= {"has_residual": has_residual, "with_dscale": with_dscale}
    return backward_apply(target, dy, x, *rest, dots, count=x.shape[1], **flags)


def pullback(target: Target, dy, x, *rest, scale_offset, has_scale, with_dscale, with_value):
    """`(dy, x[, scale], rstd) -> (dx[, dscale][, value])`; one of them has the place of dy."""
    operands = _named(rest, DY=dy, X=x, SCALE=has_scale, RSTD=True)
    options: dict[str, Any] = {"with_dscale": with_dscale, "with_value": with_value}
    options["in_place"] = {"DY": "VALUE" if with_value else "DX"}
    call = _Call(target, "backward", operands, _compute_dtype(operands))
    call.result("DX", x.shape, x.dtype)
    done = _backward(call, scale_offset, **options)
    if done is not None:
        return done

    flags = {"scale_offset": scale_offset, "has_scale": has_scale}
    (dots,) = row_dots(target, dy, x, *rest[:has_scale], compute=call.compute, **flags)
    call = _Call(target, "backward_apply", operands | {"DOTS": dots}, call.compute)
    call.result("DX", x.shape, x.dtype)
    return _backward(call, scale_offset, x.shape[1], **options)


def row_dots(target: Target, dy, x, *rest, scale_offset, has_scale, compute=None) -> Any:
    """`(dy, x[, scale]) -> Σ dy · w · x`, one value a row."""
    operands = _named(rest, DY=dy, X=x, SCALE=has_scale)
    call = _Call(target, "row_dots", operands, compute or _compute_dtype(operands))
    call.result("DOTS", call.row_shape, call.compute)
    return _backward(call, scale_offset)


def backward_apply(
    target: Target, dy, x, *rest, count, scale_offset, has_residual, has_scale, with_dscale
):
    """`(dy, x[, scale], rstd[, dh], dots) -> (dx[, dscale])`, for known sums over each row."""
    operands = _named(rest, DY=dy, X=x, SCALE=has_scale, RSTD=True, DH=has_residual, DOTS=True)
    call = _Call(target, "backward_apply", operands, _compute_dtype(operands))
    call.result("DX", x.shape, x.dtype)
    return _backward(call, scale_offset, count, with_dscale=with_dscale)


class _Call:
    """One launch: operands and results by their names in the kernel, in their order there."""

    def __init__(self, target: Target, kernel: str, operands: dict[str, Any], compute: jnp.dtype):
        self.target = target
        self.kernel = kernel
        self.compute = compute
        self.operands = {
            name: array.astype(compute) if name in ("RSTD", "DOTS") else array
            for name, array in operands.items()
        }
        self.results: dict[str, jax.ShapeDtypeStruct] = {}
        self.in_place: dict[str, str] = {}  # operand -> result that takes its place
        self.outer, self.features, self.inner = operands["X"].shape
        self.row_shape = (self.outer, self.inner)
        self.whole_rows = kernel in ("forward", "backward")  # not one of their halves

    def result(self, name: str, shape: tuple[int, ...], dtype) -> None:
        self.results[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def more_gradients(self, blocks: tuple[int, int], with_dscale: bool, with_value: bool) -> None:
        """The backward kernel's results after dx: dscale of each block, and x normalised again."""
        if with_dscale:
            self.result("PARTIAL", blocks, self.compute)
        if with_value:
            self.result("VALUE", self.operands["X"].shape, self.operands["DY"].dtype)

    def empty(self) -> list[jax.Array]:
        return [jnp.zeros(r.shape, r.dtype) for r in self.results.values()]

    def moving_bytes(self) -> list[int]:
        """The item sizes of what is as large as x."""
        large = self.operands["X"].shape
        arrays = [*self.operands.values(), *self.results.values()]
        return [a.dtype.itemsize for a in arrays if a.shape == large]

    def flags(self, scale_offset: float) -> dict[str, bool]:
        """The macros that say which operands there are."""
        given = self.operands
        return {
            "HAS_RESIDUAL": "RESIDUAL" in given or "DH" in given,
            "HAS_SCALE": "SCALE" in given,
            "HAS_OFFSET": scale_offset != 0,
        }

    def rows(self, source: str, macros, scalars, layout: RowLayout, grid: int, shared: int):
        """Launches a kernel for contiguous rows."""
        results = dict(self.results)
        sums = [name for name in ("SUMS", "DOTS") if name in results]
        for name in sums:  # one for each slice of a row
            results[name] = jax.ShapeDtypeStruct((self.outer, layout.slices), self.compute)
        done = self._launch(
            source,
            macros | layout.macros(cluster=self.whole_rows),
            results,
            grid=(grid, layout.slices),
            block=layout.threads,
            cluster=(1, layout.slices if self.whole_rows else 1),
            shared=shared,
            ints=(self.outer,),
            **scalars,
        )
        return [jnp.sum(done[0], axis=1, keepdims=True)] if sums and layout.slices > 1 else done

    def strided(self, source: str, macros, scalars, grid: int):
        """Launches a kernel for rows whose elements are `inner` apart."""
        width, height = cuda_layout.strided_block(self.features, self.inner)
        return self._launch(
            source,
            macros | {"FEATURES": self.features, "BLOCK_X": width, "BLOCK_Y": height},
            self.results,
            grid=min(grid, self.outer * -(-self.inner // width)),
            block=width * height,
            shared=width * height * self.compute.itemsize,
            ints=(self.outer, self.inner),
            **scalars,
        )

    def whole(self, source: str, macros, scalars, **sizes):
        """Launches a kernel whose blocks have whole rows, or whole columns."""
        return self._launch(source, macros, self.results, ints=(self.outer,), **sizes, **scalars)

    def _launch(self, source: str, macros, results, **sizes):
        types = type_macros(self.operands) | type_macros(results)
        types |= {"KERNEL": f"rms_norm_{self.kernel}", "COMPUTE_TYPE": TYPES[self.compute.name]}
        return launch(
            source,
            types["KERNEL"],
            list(self.operands.values()),
            list(results.values()),
            target=self.target,
            macros=types | {name: int(value) for name, value in macros.items()},
            aliases=self._aliases(results),
            **sizes,
        )

    def _aliases(self, results) -> dict[int, int]:
        """`in_place` by position, where the two are as large."""
        return {
            list(self.operands).index(operand): list(results).index(result)
            for operand, result in self.in_place.items()
            if self.operands[operand].dtype == results[result].dtype
        }


def _forward(call: _Call, eps=0.0, scale_offset=0.0) -> list[jax.Array] | None:
    """Launches a kernel of rms_norm_forward.cu; None where its rows are too long to be held."""
    if 0 in call.row_shape:
        return call.empty()
    macros = {
        "STATISTICS": "RSTD" not in call.operands,
        "NORMALIZE": "Y" in call.results,
        "WITH_RSTD": "RSTD" in call.results,
        **call.flags(scale_offset),
    }
    scalars = _scalars(call.compute, eps, scale_offset)
    if call.inner != 1:
        return call.strided("rms_norm_forward_strided.cu", macros, scalars, _MAX_GRID)
    layout = cuda_forward_layout.layout_for(
        call.features,
        max(call.moving_bytes()),
        call.target,
        rows=call.outer,
        compute=call.compute,
        residual="RESIDUAL" in call.operands,
        whole_rows=call.whole_rows,
    )
    if layout is None:
        return None
    macros |= {"HOLD": layout.hold, "THREAD_ROWS": layout.thread_rows}
    grid = min(layout.blocks_for(call.outer), _MAX_GRID)
    shared = layout.sum_bytes(call.compute, cluster=call.whole_rows) if macros["STATISTICS"] else 0
    return call.rows("rms_norm_forward.cu", macros, scalars, layout, grid, shared)


def _backward(
    call: _Call, scale_offset, count=None, *, with_dscale=False, with_value=False, in_place=None
) -> list[jax.Array] | None:
    """Launches a kernel of rms_norm_backward.cu, and for dscale the sum over its blocks."""
    n = call.features
    call.in_place = in_place or {}
    if 0 in call.row_shape:
        dscale = [jnp.zeros(n, call.compute)] if with_dscale else []
        return call.empty() + dscale + ([call.operands["DY"]] if with_value else [])
    macros = {
        "DOTS": "DOTS" not in call.operands,
        "GRADIENT": "DX" in call.results,
        "WITH_DSCALE": with_dscale,
        "WITH_VALUE": with_value,
        **call.flags(scale_offset),
    }
    scalars = _scalars(call.compute, scale_offset, n if count is None else count)
    most = max(1, _MAX_PARTIAL_BYTES // (n * call.compute.itemsize)) if with_dscale else _MAX_GRID
    if call.inner != 1:
        grid = min(most, cuda_layout.strided_blocks(call.outer, n, call.inner, call.target))
        call.more_gradients((grid, n), with_dscale, with_value)
        done = call.strided("rms_norm_backward_strided.cu", macros, scalars, grid)
    else:
        read = [call.operands[k].dtype.itemsize for k in ("DY", "X", "DH") if k in call.operands]
        layout = cuda_backward_layout.layout_for(
            n,
            max(call.moving_bytes()),
            call.target,
            rows=call.outer,
            read_bytes=sum(read),
            compute=call.compute,
            residual="DH" in call.operands,
            whole_rows=call.whole_rows,
            value=with_value,
        )
        if layout is None:
            return None
        grid = layout.persistent_blocks(call.target, cluster=call.whole_rows)
        grid = min(layout.blocks_for(call.outer), grid, most)
        depth, shared = layout.pipeline(
            call.target, sum(read), call.compute, cluster=call.whole_rows
        )
        macros |= {"STAGES": depth, "SHARED_BYTES": shared, "HOLD": layout.hold}
        call.more_gradients((grid, n), with_dscale, with_value)
        done = call.rows("rms_norm_backward.cu", macros, scalars, layout, grid, shared)
    if with_dscale:
        partial = done[1]
        done[1] = partial[0] if grid == 1 else column_sum(launch, call.target, partial)
    return done


def _backward_at_once(call: _Call, scale_offset) -> list[jax.Array] | None:
    """Launches the kernel of rms_norm_backward_at_once.cu, where rows are few and contiguous."""
    if call.inner != 1 or 0 in call.row_shape:
        return None
    read = sum(call.operands[name].dtype.itemsize for name in ("DY", "X"))
    layout = cuda_few_rows.at_once(
        call.features,
        max(call.moving_bytes()),
        call.target,
        rows=call.outer,
        read_bytes=read,
        residual="DH" in call.operands,
    )
    if layout is None:
        return None
    call.result("DSCALE", (call.features,), call.compute)
    return call.whole(
        "rms_norm_backward_at_once.cu",
        layout.macros() | call.flags(scale_offset),
        _scalars(call.compute, scale_offset, call.features),
        grid=layout.blocks_for(call.outer),
        block=layout.rows.threads,
        shared=layout.shared(call.compute),
    )


def _named(rest, **present) -> dict[str, Any]:
    """Names the operands: each is given, or taken from `rest` if True, or absent if False."""
    left = list(rest)
    named = {}
    for name, value in present.items():
        if value is True:
            named[name] = left.pop(0)
        elif value is not False:
            named[name] = value
    return named


def _compute_dtype(operands: dict[str, Any], *more) -> jnp.dtype:
    return compute_dtype([*(a.dtype for a in operands.values()), *map(jnp.dtype, more)])


def _scalars(compute: jnp.dtype, *values: float) -> dict[str, tuple[float, ...]]:
    return {"doubles" if compute == jnp.float64 else "floats": values}
