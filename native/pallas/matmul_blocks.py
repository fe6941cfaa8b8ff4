"""The matrix product as pipelined blocks: for TPUs, and interpreted on CPUs."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tiles import cdiv, result_type

_M, _N, _K = 512, 512, 512  # float32: 1 MiB each of x, w, the sums and y, most of them twice


def run(target, x, w, bias, *, epilogue, precision, compute, keep):
    """See `matmul.serve`."""
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
