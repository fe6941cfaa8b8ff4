"""Runs every kernel once in each of its variants, and compares it with its definition.

Small on purpose: made to be run under `compute-sanitizer` (memcheck, racecheck).

    compute-sanitizer --report-api-errors no python benchmarks/every_kernel.py
    python benchmarks/every_kernel.py --only norms --features 130
"""

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normfuse.layers.core.activations import SCALARS
from normfuse.layers.cross_entropy import softmax
from normfuse.layers.dense import epilogue
from normfuse.layers.dense.epilogue import Epilogue
from normfuse.layers.norm import kernels as uncoded
from normfuse.layers.norm.spec import OPERANDS, PARAMETERS, STATISTICS, Norm
from normfuse.layers.quantization import gated, quantize
from normfuse.layers.quantization import norm as coded_norm
from normfuse.layers.quantization.quantize import Codes
from normfuse.native.implementation import NATIVE
from normfuse.native.kernel import Kernel

Example = tuple[Kernel, Any, list[jax.ShapeDtypeStruct | None]]

BF16, F32 = "bfloat16", "float32"
# One row a thread group, a block or several blocks; odd sizes go through the scalar path.
LENGTHS = (1, 3, 64, 130, 1000, 1024, 4096, 5120, 7168, 8192, 12288, 16384, 32768, 65537)
CENTRED = (3, 130, 1024, 8192, 32768, 65537)
CODED = ((64, 33), (77, 48), (512, 48), (2048, 48), (4096, 33), (8192, 48), (14336, 48))
LOGITS = (7, 1000, 32000, 128256)
ACTIVATIONS = ("silu", "gelu")


def struct(shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def norm_kernels(n, dtype, scale, centred=False) -> Iterator[Example]:
    """RMSNorm's kernels, or LayerNorm's, on rows of n, with every set of operands and results."""
    rows = 5 if n > 8192 else 37
    types = dict.fromkeys(STATISTICS, struct((rows,), F32))
    types |= dict.fromkeys(PARAMETERS, struct((n,), scale))
    types |= dict.fromkeys(("X", "RESIDUAL", "DH", "DY"), struct((rows, n), dtype))
    op = "layer_norm" if centred else "rms_norm"
    base = Norm(op=op, centred=centred, eps=1e-6, out_dtype=dtype, compute=F32)
    of_centred = set() if centred else {"MEAN", "SUMS"}
    calls = [(uncoded.row_statistics_kernel, base, frozenset())]
    for has_scale, has_bias in ((False, False), (True, False), *[(True, True)] * centred):
        has = {"SCALE": has_scale, "BIAS": has_bias}
        absent = of_centred | {name for name, there in has.items() if not there}
        norm = replace(base, scale_offset=0.5 * has_scale)
        calls.append((uncoded.apply_kernel, norm, frozenset(absent)))
        calls.append((uncoded.row_dots_kernel, norm, frozenset(absent)))
        for residual, flag in itertools.product((False, True), repeat=2):
            lacks = frozenset(absent if residual else absent | {"RESIDUAL", "DH"})
            asked = replace(norm, with_mean=flag and centred, with_rstd=flag)
            calls.append((uncoded.forward_kernel, asked, lacks))
            asked = {"with_dscale": flag and has_scale, "with_dbias": flag and has_bias}
            calls.append((uncoded.backward_kernel, replace(norm, **asked), lacks))
            asked["count"] = float(n)
            calls.append((uncoded.backward_apply_kernel, replace(norm, **asked), lacks))
    for kernel, norm, absent in dict.fromkeys(calls):
        names = OPERANDS[kernel.name.removeprefix("norm_")]
        yield kernel, norm, [None if name in absent else types[name] for name in names]


def norms(lengths) -> Iterator[Example]:
    turns = itertools.cycle([(BF16, F32), (F32, BF16), ("float16", "float16")])
    for n, (dtype, scale) in zip(lengths or LENGTHS, turns):
        yield from norm_kernels(n, dtype, scale)
    for n in lengths or CENTRED:
        yield from norm_kernels(n, BF16, F32, centred=True)


def coded(lengths) -> Iterator[tuple[int, int]]:
    """Features and rows: tiles that are whole, and others."""
    return itertools.product(lengths, (48, 33)) if lengths else iter(CODED)


def casts(lengths) -> Iterator[Example]:
    for (n, rows), dtype in itertools.product(coded(lengths), (BF16, F32)):
        x = struct((rows, n), dtype)
        yield quantize.amax_kernel, Codes(), [x]
        for has_q, has_qt in (True, False), (False, True), (True, True):
            yield quantize.cast_kernel, Codes(has_q=has_q, has_qt=has_qt), [x, struct((1,), F32)]
            yield quantize.quantize_kernel, Codes(has_q=has_q, has_qt=has_qt), [x]


def norm_codes(lengths) -> Iterator[Example]:
    every = itertools.product(coded(lengths), ((False, 0), (True, 0), (True, 3)))
    for ((n, rows), (centred, examples)), has_qt in itertools.product(every, (True, False)):
        lead = (examples, 16) if examples else (rows,)
        x, bound = struct((*lead, n), BF16), struct((1,), F32)
        scale = struct((*lead[:-1], n), F32)
        bias = scale if centred else None
        own = {"axes": (2,), "heads": (0,)} if examples else {}
        norm = Norm(eps=1e-6, centred=centred, with_mean=centred, with_rstd=True, **own)
        spec = coded_norm.NormCodes(norm, Codes(has_qt=has_qt))
        for residual in (None, x):
            yield coded_norm.codes_kernel, spec, [x, residual, scale, bias, bound]


def gated_codes(lengths) -> Iterator[Example]:
    for (n, rows), name in itertools.product(coded(lengths), ACTIVATIONS):
        a, q, spec = struct((rows, n), BF16), struct((rows, n), "uint8"), gated.Gated(SCALARS[name])
        floats = [struct((count,), F32) for count in range(5)]
        yield gated.amax_kernel, spec, [a, a]
        yield gated.forward_kernel, spec, [a, a, floats[4]]
        yield gated.gradient_kernel, spec, [a, q, q, floats[2], floats[3]]


def activations(lengths) -> Iterator[Example]:
    for n, dtype, name in itertools.product(lengths or (64, 130, 4096), (BF16, F32), ACTIVATIONS):
        z, spec = struct((37, n), dtype), Epilogue(function=SCALARS[name], out_dtype=dtype)
        for up, bias in (None, None), (z, None), (None, struct((n,), F32)):
            given = replace(spec, axes=(1,) if bias else ())
            yield epilogue.forward_kernel, given, [z, up, bias]
            for flag in False, True:
                asked = {"with_dbias" if bias else "with_value": flag}
                yield epilogue.backward_kernel, replace(given, **asked), [z, z, up, bias]


def losses(lengths) -> Iterator[Example]:
    for n, dtype, softcap in itertools.product(lengths or LOGITS, (BF16, F32), (None, 30.0)):
        spec = softmax.Softmax(softcap=softcap, dtype=dtype)
        z, labels, row = struct((9, n), dtype), struct((9,), "int32"), struct((9,), F32)
        yield softmax.statistics, spec, [z, labels]
        yield softmax.gradient, spec, [z, labels, row, row, row]
        yield softmax.both, spec, [z, labels, row]


EVERY = norms, casts, norm_codes, gated_codes, activations, losses
PARTS = {part.__name__: part for part in EVERY}


def draw(rng, of: jax.ShapeDtypeStruct, features: int) -> jax.Array:
    """Draws an operand of this type: codes, a label, a bound, a statistic or numbers."""
    if of.dtype == jnp.uint8:  # codes of numbers to 2
        return jnp.asarray(rng.integers(0, 64, of.shape), of.dtype)
    if jnp.issubdtype(of.dtype, jnp.integer):
        return jnp.asarray(rng.integers(-1, features + 1, of.shape), of.dtype)
    if of.shape in ((1,), (3,), (4,)):  # bounds of what codes are of
        return jnp.full(of.shape, 1000, of.dtype)
    if of.dtype == F32 and features not in of.shape:
        return jnp.asarray(rng.uniform(0.5, 2, of.shape), of.dtype)
    return jnp.asarray(rng.standard_normal(of.shape), of.dtype)


def error_of(kernel: Kernel, spec: Any, operands: list[jax.Array]) -> float:
    """The largest error against the definition, relative to the largest value."""
    given = jax.jit(lambda *a: kernel(spec, *a, order=NATIVE))(*operands)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = kernel.definition(spec, *jax.tree.map(np.asarray, operands))
    worst, given = 0.0, jax.tree.leaves(given)
    for got, want in zip(given, jax.tree.leaves(wanted), strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error = np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30)
        unit = float(jnp.finfo(given[0].dtype).eps)
        # Roundings of the result, and sums in another order over a row or over all rows.
        most = max(a.size for a in jax.tree.leaves(operands))
        limit = 2 * unit + 8 * np.finfo(np.float32).eps * math.sqrt(most)
        if not error <= limit:
            raise SystemExit(f"{kernel.name} {spec}: error {error:.2e}, at most {limit:.2e}")
        worst = max(worst, error)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--features", type=int, nargs="+", help="lengths of the rows")
    arguments = parser.parse_args()
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    rng, device = np.random.default_rng(0), jax.devices()[0].device_kind
    for part in arguments.only:
        worst, runs = 0.0, Counter()
        for kernel, spec, structs in PARTS[part](arguments.features):
            if platform not in kernel.bodies:
                continue
            features = structs[0].shape[-1] if structs[0].ndim == 2 else structs[0].shape[1]
            operands = [None if of is None else draw(rng, of, features) for of in structs]
            worst = max(worst, error_of(kernel, spec, operands))
            runs[kernel.name] += 1
        counts = ", ".join(f"{name} {count}" for name, count in runs.items())
        print(f"{part} on {device}: {counts or 'none'}; largest error {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
