"""Norms with a bias, a gate, or scale and shift of each example; a copy, and XLA.

    python -m benchmarks.norm_variants
    python -m benchmarks.norm_variants --variants examples AdaLN

Times are as in benchmarks/rms_norm.py: device times of all kernels of a call, inputs that are in no
cache. The fraction is the time in which the device would copy the bytes that must move over the
time taken. "both" is a program with forward and gradients: what XLA shares between the two counts
for it.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks.device_time import Copies, microseconds, sets_for
from normfuse import gated_rms_norm, layer_norm, rms_norm

BATCH, TOKENS = 16, 1024
FEATURES = (1024, 2048, 4096, 8192)

# name -> (the op, whether z is an operand, whether each example has parameters, arrays as large as
# x that must move forward and backward)
VARIANTS = {
    "bias": (rms_norm, False, False, (2, 3)),
    "gate after": (functools.partial(gated_rms_norm, gate="after"), True, False, (3, 5)),
    "gate before": (functools.partial(gated_rms_norm, gate="before"), True, False, (3, 5)),
    "examples": (functools.partial(rms_norm, scale_offset=1.0), False, True, (2, 3)),
    "AdaLN": (functools.partial(layer_norm, scale_offset=1.0), False, True, (2, 3)),
}


def operands(variant: str, n: int, count: int) -> list[tuple]:
    """`count` sets of the op's operands and dy."""
    _, gated, per_example, _ = VARIANTS[variant]
    own = (BATCH, 1, n) if per_example else (n,)

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, 5)
        x, z, dy = (jax.random.normal(k, (BATCH, TOKENS, n), jnp.bfloat16) for k in keys[:3])
        scale, shift = (0.1 * jax.random.normal(k, own) for k in keys[3:])
        return (x, z, 1 + scale, dy) if gated else (x, scale, shift, dy)

    return [draw(jax.random.key(i)) for i in range(count)]


def modes(variant: str, implementation: str) -> dict:
    """mode -> function of operands and dy."""
    op = functools.partial(VARIANTS[variant][0], implementation=implementation)

    def both(*operands_and_dy):
        y, pull = jax.vjp(op, *operands_and_dy[:-1])
        return y, pull(operands_and_dy[-1])

    return {"forward": lambda *operands_and_dy: op(*operands_and_dy[:-1]), "both": both}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.norm_variants")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    arguments = parser.parse_args()
    copies = Copies()
    kind = jax.devices()[0].device_kind
    print(f"{kind}, JAX {jax.__version__}, copy {copies.rate / 1e6:.2f} TB/s")
    for variant in arguments.variants:
        forward, backward = VARIANTS[variant][-1]
        for n in FEATURES:
            sets = operands(variant, n, sets_for(6 * BATCH * TOKENS * n))
            size = sets[0][0].nbytes
            for mode, arrays in (("forward", forward), ("both", forward + backward)):
                line = f"{variant:<12} {n:>5} {mode:<8}"
                for name in ("native", "xla"):
                    us = microseconds(modes(variant, name)[mode], sets)
                    line += f"  {name} {us:7.1f} us {arrays * size / copies.rate / us:.3f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
