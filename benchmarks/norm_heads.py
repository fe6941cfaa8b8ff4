"""rms_norm with a weight of each head (QK-norm), with one for all, a copy, and XLA.

    python -m benchmarks.norm_heads

Times are as in benchmarks/rms_norm.py: device times of all kernels of a call, inputs that are in no
cache. The fraction is the time in which the device would copy the bytes that must move over the
time taken.
"""

import jax
import jax.numpy as jnp

from benchmarks.device_time import Copies, microseconds, sets_for
from normfuse.layers.norm import op
from normfuse.layers.norm.spec import Norm
from normfuse.native.implementation import Order

HEADS = [(64, 32), (128, 32), (256, 32), (128, 8), (128, 40)]
ELEMENTS = 1 << 27  # elements of x, as in benchmarks/rms_norm.py
NATIVE = Order(("native",), strict=True)


def operands(heads: int, n: int, count: int) -> list[tuple]:
    """`count` sets of (x, scale, dy, rstd)."""
    outer = ELEMENTS // (heads * n)

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, 4)
        x, dy = (jax.random.normal(k, (outer, heads, n), jnp.bfloat16) for k in keys[:2])
        scale = 1 + 0.1 * jax.random.normal(keys[2], (heads, n))
        return x, scale, dy, jax.random.uniform(keys[3], (outer, heads), minval=0.5)

    return [draw(jax.random.key(i)) for i in range(count)]


def contestants() -> dict[str, dict]:
    """library -> mode -> function of operands."""
    forward = Norm(eps=1e-6, out_dtype="bfloat16", has_scale=True, axes=(2,), heads=(1,))
    backward = Norm(has_scale=True, with_dscale=True, axes=(2,), heads=(1,))

    def one_scale(kernel, norm, *arrays):
        """The same rows with the first head's weight for all."""
        alone = [a[0] if a.shape[0] != arrays[0].shape[0] else a for a in arrays]
        flat = [a.reshape(-1, *a.shape[2:], 1) if a.ndim > 1 else a for a in alone]
        return kernel(Norm(**{**vars(norm), "axes": (1,), "heads": ()}), *flat, order=NATIVE)

    return {
        "heads": {
            "forward": lambda x, w, *_: op.forward_kernel(forward, x, w, order=NATIVE),
            "backward": lambda x, w, dy, r: op.backward_kernel(backward, dy, x, w, r, order=NATIVE),
        },
        "one weight": {
            "forward": lambda x, w, *_: one_scale(op.forward_kernel, forward, x, w),
            "backward": lambda x, w, dy, r: one_scale(op.backward_kernel, backward, dy, x, w, r),
        },
        "XLA": {
            "forward": lambda x, w, *_: op.define_forward(forward, x, w),
            "backward": lambda x, w, dy, r: op.define_backward(backward, dy, x, w, r),
        },
    }


def main() -> None:
    copies = Copies()
    kind = jax.devices()[0].device_kind
    print(f"{kind}, JAX {jax.__version__}, copy {copies.rate / 1e6:.2f} TB/s")
    for n, heads in HEADS:
        sets = operands(heads, n, sets_for(6 * ELEMENTS))
        size = sets[0][0].nbytes
        for mode, arrays in (("forward", 2), ("backward", 3)):
            line = f"{heads:>3} heads of {n:<4} {mode:<9}"
            for name, contestant in contestants().items():
                us = microseconds(contestant[mode], sets)
                line += f"  {name} {us:7.1f} us {arrays * size / copies.rate / us:.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
