"""The dense layer in one Pallas kernel, y = activation(x · w + bias): TPUs and CPUs.

On Hopper `pallas_hopper` serves, for 16-bit operands. Other GPUs have no such kernel.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...native.dtypes import compute_dtype
from ...native.implementation import Unsupported
from ...native.pallas import lowering, portable
from ...native.pallas.lowering import Target
from ...native.pallas.tiles import before, cdiv, clear, result_type


def serve(
    target: Target,
    x: Array,
    w: Array,
    *bias: Array,
    function: Callable[[Array], Array] | None,
    precision: str | None,
    keep: bool,
) -> list[Array]:
    """`(x (m, k), w (k, n)[, bias (n,)]) -> y`; with `keep` also z = x · w + bias.

    Sums, bias and activation are in float32 (float64 for float64); y and z are rounded to x's
    dtype.

    Raises:
      Unsupported: for GPUs and dtypes that no kernel takes.
    """
    lowering.require_dtypes(target, x.dtype)
    hopper = target.capability == 90 and x.dtype.itemsize == 2
    if target.gpu and not hopper:
        raise Unsupported(
            "on GPUs the Pallas matrix product needs compute capability 9.0 and operands of "
            "bfloat16 or float16"
        )

    def finish(sums, *bias):
        z = sums + bias[0] if bias else sums
        y = z if function is None else function(z)
        return [y, z] if keep else [y]

    epilogue = portable.portable(finish, short=hopper and x.dtype == jnp.bfloat16)
    wide = [b.astype(compute_dtype(x.dtype)) for b in bias]
    if hopper:  # 16-bit operands are multiplied exactly, and summed in float32
        from . import pallas_hopper

        return pallas_hopper.run(target, x, w, wide, epilogue, 1 + keep)
    return _on_blocks(target, x, w, wide, epilogue, 1 + keep, precision)


_M, _N, _K = 512, 512, 512  # float32: 1 MiB each of x, w, the sums and y, most of them twice


def _on_blocks(
    target: Target,
    x: Array,
    w: Array,
    bias: list[Array],
    epilogue: Callable[..., list[Array]],
    results: int,
    precision: str | None,
) -> Any:
    (m, k), n, compute = x.shape, w.shape[1], compute_dtype(x.dtype)
    tm, tn, tk = (min(size, tile) for size, tile in zip((m, n, k), (_M, _N, _K)))
    steps = cdiv(k, tk)

    def kernel(x_ref, w_ref, *refs):
        sums = refs[-1]
        step = pl.program_id(2)
        pl.when(step == 0)(lambda: clear(sums))
        x, w = x_ref[...], w_ref[...]
        if k % tk:  # beyond the end lies anything, even infinities: set both sides to zero
            x, w = before(x, k - step * tk, 1), before(w, k - step * tk, 0)
        sums[...] += jax.lax.dot(x, w, precision=precision, preferred_element_type=compute)

        @pl.when(step == steps - 1)
        def _():
            values = epilogue(sums[...], *[ref[...] for ref in refs[: len(bias)]])
            for ref, value in zip(refs[len(bias) : -1], values):
                ref[...] = value.astype(ref.dtype)

    out = pl.BlockSpec((tm, tn), lambda i, j, s: (i, j))
    return pl.pallas_call(
        kernel,
        grid=(cdiv(m, tm), cdiv(n, tn), steps),
        in_specs=[
            pl.BlockSpec((tm, tk), lambda i, j, s: (i, s)),
            pl.BlockSpec((tk, tn), lambda i, j, s: (s, j)),
            *[pl.BlockSpec((1, tn), lambda i, j, s: (0, j))] * len(bias),
        ],
        out_specs=[out] * results,
        out_shape=[result_type((m, n), x.dtype)] * results,
        scratch_shapes=[pltpu.VMEM((tm, tn), compute)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=target.interpret,
        name="pallas_dense",
    )(x, w, *[b[None] for b in bias])
