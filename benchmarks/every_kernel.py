"""Runs every RMSNorm kernel once in each of its variants, and compares it with its definition.

Small on purpose: made to be run under `compute-sanitizer` (memcheck, racecheck).

    compute-sanitizer --tool memcheck python benchmarks/every_kernel.py
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from normfuse.layers.rms_norm import op
from normfuse.layers.rms_norm.spec import Norm
from normfuse.native.implementation import NATIVE

DTYPES = [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16")]
# One row a thread group, a block or several blocks; odd sizes go through the scalar path.
SHAPES = [
    (n, 1) for n in (1, 3, 64, 130, 1000, 1024, 4096, 5120, 7168, 8192, 12288, 16384, 32768, 65537)
] + [
    (7, 3),
    (64, 130),
]


def array(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def same(kernel, norm, operands) -> float:
    """The largest error of `kernel` against its definition, relative to the largest value."""
    given = jax.jit(lambda *a: kernel(norm, *a, order=NATIVE))(*operands)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = kernel.definition(norm, *[np.asarray(a) for a in operands])
    worst = 0.0
    for got, want in zip(given, wanted, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error = np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30)
        unit = float(jnp.finfo(given[0].dtype).eps)
        # Roundings of the result, and sums in another order over a row or over all rows.
        limit = 2 * unit + 8 * np.finfo(np.float32).eps * math.sqrt(max(a.size for a in operands))
        if not error <= limit:
            raise SystemExit(f"{kernel.name} {norm}: error {error:.2e}, at most {limit:.2e}")
        worst = max(worst, error)
    return worst


def main() -> None:
    rng, worst, runs = np.random.default_rng(0), 0.0, 0
    # scale, residual, and whether rstd or dscale is asked for; the dtypes take turns
    flags = [(False, False, True), (True, False, True), (True, True, True), (True, True, False)]
    turns = itertools.cycle(DTYPES)
    for (n, inner), (scaled, added, extra) in itertools.product(SHAPES, flags):
        dtype, other = next(turns)
        outer = 5 if n > 8192 else 37
        x, dy = array(rng, (outer, n, inner), dtype), array(rng, (outer, n, inner), dtype)
        residual = [array(rng, x.shape, other)] * added
        scale = [array(rng, (n,), other)] * scaled
        rstd = jnp.asarray(rng.uniform(0.5, 2, (outer, inner)), jnp.float32)
        flag = {"scale_offset": 0.5, "has_scale": scaled}
        out = {"out_dtype": dtype if extra else other}
        grads = {"has_residual": added, "with_dscale": extra and scaled, **flag}
        dh = [array(rng, x.shape, dtype)] * added
        cases = [
            (op.forward_kernel, [x, *residual, *scale],
             {"eps": 1e-5, "has_residual": added, "with_rstd": extra, **out, **flag}),
            (op.backward_kernel, [dy, x, *scale, rstd, *dh], grads),
            (op.backward_apply_kernel, [dy, x, *scale, rstd, *dh, rstd],
             {"count": float(n), **grads}),
            (op.apply_kernel, [x, *scale, rstd], {**out, **flag}),
            (op.row_dots_kernel, [dy, x, *scale], flag),
            (op.row_sums_kernel, [x], {}),
            (op.pullback_kernel, [dy, x, *scale, rstd],
             {"with_dscale": extra and scaled, "with_value": extra, **flag}),
        ]  # fmt: skip
        for kernel, operands, params in cases[: 3 if added else None]:
            worst, runs = max(worst, same(kernel, Norm(**params), operands)), runs + 1
    print(f"{runs} kernels right on {jax.devices()[0].device_kind}; largest error {worst:.1e}")


if __name__ == "__main__":
    main()
