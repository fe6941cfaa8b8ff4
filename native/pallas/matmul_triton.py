"""The matrix product as Triton programs: for GPUs other than Hopper, and for float32."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..fallback import Unsupported
from .tiles import cdiv, power_of_two, result_type

_GROUP = 8  # tiles down before the next across: neighbours in time share w in the cache


def run(target, x, w, bias, *, epilogue, precision, compute, keep):
    """See `matmul.serve`."""
    (m, k), n = x.shape, w.shape[1]
    if max(m * k, k * n, m * n) >= 2**31:
        raise Unsupported("Triton kernels index with 32 bits, and an operand has 2^31 elements")
    narrow = x.dtype.itemsize == 2
    tile = [min(max(16, power_of_two(size)), most) for size, most in zip((m, n), (128, 128))]
    tk = min(max(16, power_of_two(k)), 64 if narrow else 32)
    kernel = functools.partial(
        _kernel,
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


def _kernel(x_ref, w_ref, *refs, shape, tile, epilogue, precision, compute, biases):
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
