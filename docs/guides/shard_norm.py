"""A norm on eight devices without all-gather.

JAX's tutorial on foreign functions normalises x of shape (32, 512, 512) over its last two axes, and
notes that with a bare `jax.ffi.ffi_call` XLA gathers all of x on every device, because it does not
know how the function partitions. `rms_norm` tells it. This is the same example with a scale,
forward and backward.

Run it: `python docs/guides/shard_norm.py`. It emulates eight devices.
"""

import os
import re

# Set before JAX is imported. On a machine with eight devices leave this out.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

from normfuse import rms_norm

mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
by_batch = jax.NamedSharding(mesh, jax.P("batch"))

keys = jax.random.split(jax.random.key(0), 2)
x = jax.device_put(jax.random.normal(keys[0], (32, 512, 512), jnp.bfloat16), by_batch)
scale = jax.random.normal(keys[1], (512, 512))


@jax.jit
def norm(x, scale):
    return rms_norm(x, scale, axis=(-2, -1), implementation="native")


@jax.jit
def gradients(x, scale):
    return jax.grad(lambda x, scale: norm(x, scale).astype(jnp.float32).sum(), (0, 1))(x, scale)


def collectives(fn, *args) -> list[str]:
    """The communication in the compiled program."""
    text = fn.lower(*args).compile().as_text()
    return re.findall(r" (all-gather|all-reduce|all-to-all|reduce-scatter)(?:-start)?\(", text)


# 1. Forward: every device normalises its four arrays, and y stays where x is.
assert collectives(norm, x, scale) == []
assert norm(x, scale).sharding.is_equivalent_to(by_batch, x.ndim)

# 2. Backward: the gradient of the scale is a sum over all arrays and so over devices: one
#    all-reduce.
assert collectives(gradients, x, scale) == ["all-reduce"]
dx, dscale = gradients(x, scale)
assert dx.sharding.is_equivalent_to(by_batch, x.ndim) and dscale.shape == scale.shape

print("forward:", collectives(norm, x, scale), " backward:", collectives(gradients, x, scale))
