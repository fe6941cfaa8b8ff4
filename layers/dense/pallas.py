"""The dense layer in one Pallas kernel, y = activation(x · w + bias): TPUs, CPUs, and most GPUs.

On Hopper, for 16-bit operands, `pallas_hopper` serves.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from ...native.implementation import Unsupported
from ...native.pallas import lowering, portable
from ...native.pallas.lowering import Target
from ...native.pallas.tiles import cdiv, power_of_two, result_type


def serve(
    target: Target,
    x: jax.Array,
    w: jax.Array,
    *bias: jax.Array,
    function: Callable[[jax.Array], jax.Array] | None,
    precision: str | None,
    keep: bool,
) -> list[jax.Array]:
    """`(x (m, k), w (k, n)[, bias (n,)]) -> y`, and z = x · w + bias too where `keep`.

    Sums, bias and activation are in float32 (float64 for float64); y and z are rounded to x's
    dtype.

    Raises:
      Unsupported: for dtypes or activations that the platform's kernels do not take.
    """
    lowering.require_dtypes(target, x.dtype)
    if x.dtype == jnp.float64 and target.gpu:
        raise Unsupported("no Pallas matrix product takes float64 on a GPU")
    compute = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    hopper = target.capability == 90 and x.dtype.itemsize == 2
    if function is not None:
        function = portable.portable(function, short=hopper and x.dtype == jnp.bfloat16)

    def epilogue(sums, *bias):
        z = sums + bias[0] if bias else sums
        y = z if function is None else function(z)
        return [y, z] if keep else [y]

    options = {"epilogue": epilogue, "precision": precision, "compute": compute, "keep": keep}
    wide = [b.astype(compute) for b in bias]
    if hopper:
        from . import pallas_hopper

        return pallas_hopper.run(target, x, w, wide, **options)
    return (on_triton if target.gpu else on_blocks)(target, x, w, wide, **options)


# ---------------------------------------------------------------- pipelined blocks: TPUs, CPUs

_M, _N, _K = 512, 512, 512  # float32: 1 MiB each of x, w, the sums and y, most of them twice


def on_blocks(
    target: Target,
    x: jax.Array,
    w: jax.Array,
    bias: list[jax.Array],
    *,
    epilogue: Callable[..., Any],
    precision: str | None,
    compute: jax.typing.DTypeLike,
    keep: bool,
) -> list[jax.Array]:
    """The product as pipelined blocks: for TPUs, and interpreted on CPUs."""
    (m, k), n = x.shape, w.shape[1]
    tm, tn, tk = (min(size, tile) for size, tile in zip((m, n, k), (_M, _N, _K)))
    steps = cdiv(k, tk)

    def kernel(x_ref, w_ref, *refs):
        sums = refs[-1]
        step = pl.program_id(2)
        pl.when(step == 0)(lambda: _clear(sums))
        x, w = x_ref[...], w_ref[...]
        if k % tk:  # what is beyond the end is anything, infinities too: zero on both sides
            x = _before(x, k - step * tk, 1)
            w = _before(w, k - step * tk, 0)
        dims = (((1,), (0,)), ((), ()))
        sums[...] += jax.lax.dot_general(
            x, w, dims, precision=precision, preferred_element_type=compute
        )

        @pl.when(step == steps - 1)
        def _():
            results = epilogue(sums[...], *[ref[...] for ref in refs[: len(bias)]])
            for ref, value in zip(refs[len(bias) : -1], results):
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
        out_specs=[out] * (1 + keep),
        out_shape=[result_type((m, n), x.dtype)] * (1 + keep),
        scratch_shapes=[pltpu.VMEM((tm, tn), compute)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=target.interpret,
        name="pallas_dense",
    )(x, w, *[b[None] for b in bias])


def _clear(ref):
    ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _before(value, end, axis):
    inside = jax.lax.broadcasted_iota(jnp.int32, value.shape, axis) < end
    return jnp.where(inside, value, jnp.zeros((), value.dtype))


# ---------------------------------------------------------------- Triton: GPUs, but for Hopper

_GROUP = 8  # tiles down before the next across: neighbours in time share w in the cache


def on_triton(
    target: Target,
    x: jax.Array,
    w: jax.Array,
    bias: list[jax.Array],
    *,
    epilogue: Callable[..., Any],
    precision: str | None,
    compute: jax.typing.DTypeLike,
    keep: bool,
) -> list[jax.Array]:
    """The product as Triton programs: for GPUs other than Hopper, and for float32."""
    (m, k), n = x.shape, w.shape[1]
    if max(m * k, k * n, m * n) >= 2**31:
        raise Unsupported("Triton kernels index with 32 bits, and an operand has 2^31 elements")
    narrow = x.dtype.itemsize == 2
    tile = [min(max(16, power_of_two(size)), most) for size, most in zip((m, n), (128, 128))]
    tk = min(max(16, power_of_two(k)), 64 if narrow else 32)
    kernel = functools.partial(
        _triton_kernel,
        shape=(m, n, k),
        tile=(*tile, tk),
        epilogue=epilogue,
        precision=precision,
        compute=compute,
        biases=len(bias),
    )
    return pl.pallas_call(
        kernel,
        grid=(cdiv(m, tile[0]) * cdiv(n, tile[1]),),
        out_shape=[result_type((m, n), x.dtype)] * (1 + keep),
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=3),
        interpret=target.interpret,
        name="pallas_dense",
    )(x, w, *bias)


def _triton_kernel(x_ref, w_ref, *refs, shape, tile, epilogue, precision, compute, biases):
    (m, n, k), (tm, tn, tk) = shape, tile
    i, j = _place(pl.program_id(0), cdiv(m, tm), cdiv(n, tn))
    down, across = i * tm + jnp.arange(tm) < m, j * tn + jnp.arange(tn) < n
    rows, columns = pl.ds(i * tm, tm), pl.ds(j * tn, tn)

    def step(s, sums):
        inside, some = s * tk + jnp.arange(tk) < k, pl.ds(s * tk, tk)
        x = _load(x_ref.at[rows, some], down[:, None] & inside[None, :])
        w = _load(w_ref.at[some, columns], inside[:, None] & across[None, :])
        return sums + jax.lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=compute
        )

    sums = jax.lax.fori_loop(0, cdiv(k, tk), step, jnp.zeros((tm, tn), compute))
    bias = [_load(ref.at[columns], across)[None, :] for ref in refs[:biases]]
    for ref, value in zip(refs[biases:], epilogue(sums, *bias)):
        mask = down[:, None] & across[None, :]
        pltriton.store(ref.at[rows, columns], value.astype(ref.dtype), mask=mask)


def _place(index, down, across):
    """The tile of a program: groups of `_GROUP` rows of tiles, each from left to right."""
    group = index // (_GROUP * across)
    first = group * _GROUP
    height = jnp.minimum(down - first, _GROUP)
    inside = index % (_GROUP * across)
    return first + inside % height, inside // height


def _load(ref, mask):
    return pltriton.load(ref, mask=mask, other=0.0)
