"""Runs every kernel once in each of its variants, and compares it with its definition.

Small on purpose: made to be run under `compute-sanitizer` (memcheck, racecheck). The kernels and
their operands are those that the operations' own files list; RMSNorm's have other types too.

    compute-sanitizer --report-api-errors no python benchmarks/every_kernel.py
    python benchmarks/every_kernel.py --only layer_norm --features 130
    python benchmarks/every_kernel.py --only rms_norm --share 0 3   # every third, from the first
"""

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normfuse.layers.core.activations import SCALARS
from normfuse.layers.cross_entropy import softmax
from normfuse.layers.dense import epilogue
from normfuse.layers.norm import kernels as norms
from normfuse.layers.quantization import gated, quantize
from normfuse.layers.quantization import norm as coded_norm
from normfuse.native.implementation import NATIVE
from normfuse.native.kernel import Kernel

Example = tuple[Kernel, Any, list[jax.ShapeDtypeStruct]]

BF16, F32 = "bfloat16", "float32"
# One row a thread group, a block or several blocks; odd sizes go through the scalar path.
LENGTHS = (1, 3, 64, 130, 1000, 1024, 4096, 5120, 7168, 8192, 12288, 16384, 32768, 65537)
CENTRED = (3, 130, 1024, 8192, 32768, 65537)
CODED = ((64, 33), (77, 48), (512, 48), (2048, 48), (4096, 33), (8192, 48), (14336, 48))
LOGITS = (7, 1000, 32000, 128256)
ACTIVATIONS = ("silu", "gelu")


def rows_of(n: int) -> int:
    return 5 if n > 8192 else 37


def struct(shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def rms_norms(lengths) -> Iterator[Example]:
    turns = itertools.cycle([(BF16, F32), (F32, BF16), ("float16", "float16")])
    for n, (dtype, scale) in zip(lengths or LENGTHS, turns):
        yield from norms.examples(n, dtype, scale, dtype, rows=rows_of(n), scale_offset=0.5)


def layer_norms(lengths) -> Iterator[Example]:
    for n in lengths or CENTRED:
        yield from norms.examples(
            n, BF16, F32, BF16, rows=rows_of(n), scale_offset=0.5, centred=True
        )


def coded(lengths) -> Iterator[tuple[int, int]]:
    """Features and rows: tiles that are whole, and others."""
    return itertools.product(lengths, (48, 33)) if lengths else iter(CODED)


def casts(lengths) -> Iterator[Example]:
    for (n, rows), dtype in itertools.product(coded(lengths), (BF16, F32)):
        yield from quantize.examples(n, dtype, rows=rows)


def norm_codes(lengths) -> Iterator[Example]:
    for n, rows in coded(lengths):
        yield from coded_norm.examples(n, BF16, F32, rows=rows)
        yield from coded_norm.examples(n, BF16, F32, rows=rows, centred=True)
        yield from coded_norm.examples(n, BF16, F32, rows=48, centred=True, examples=3)


def gated_codes(lengths) -> Iterator[Example]:
    for (n, rows), name in itertools.product(coded(lengths), ACTIVATIONS):
        yield from gated.examples(n, BF16, rows=rows, function=SCALARS[name])


def activations(lengths) -> Iterator[Example]:
    for n in lengths or (64, 130, 4096):
        for dtype in (BF16, F32):
            yield from epilogue.examples(n, dtype, rows=37, activations=ACTIVATIONS)


def losses(lengths) -> Iterator[Example]:
    for n, dtype in itertools.product(lengths or LOGITS, (BF16, F32)):
        yield from softmax.examples(n, dtype, rows=9)


PARTS = {
    "rms_norm": rms_norms,
    "layer_norm": layer_norms,
    "casts": casts,
    "norm_codes": norm_codes,
    "gated_codes": gated_codes,
    "activations": activations,
    "losses": losses,
}


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
        wanted = kernel.definition(spec, *[np.asarray(a) for a in operands])
    worst = 0.0
    for got, want in zip(given, wanted, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error = np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30)
        unit = float(jnp.finfo(given[0].dtype).eps)
        # Roundings of the result, and sums in another order over a row or over all rows.
        limit = 2 * unit + 8 * np.finfo(np.float32).eps * math.sqrt(max(a.size for a in operands))
        if not error <= limit:
            raise SystemExit(f"{kernel.name} {spec}: error {error:.2e}, at most {limit:.2e}")
        worst = max(worst, error)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--features", type=int, nargs="+", help="lengths of the rows")
    parser.add_argument(
        "--share", type=int, nargs=2, default=(0, 1), metavar=("I", "OF"), help="of each part"
    )
    arguments = parser.parse_args()
    first, shares = arguments.share
    if not 0 <= first < shares:
        parser.error(f"--share {first} {shares}: shares count from 0")
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    rng, device = np.random.default_rng(0), jax.devices()[0].device_kind
    for part in arguments.only:
        worst, runs = 0.0, Counter()
        examples = PARTS[part](arguments.features)
        for kernel, spec, structs in itertools.islice(examples, first, None, shares):
            if platform not in kernel.bodies:
                continue
            features = structs[0].shape[-1] if structs[0].ndim == 2 else structs[0].shape[1]
            operands = [draw(rng, of, features) for of in structs]
            worst = max(worst, error_of(kernel, spec, operands))
            runs[kernel.name] += 1
        counts = ", ".join(f"{name} {count}" for name, count in runs.items())
        print(f"{part} on {device}: {counts or 'none'}; largest error {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
