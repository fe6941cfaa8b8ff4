"""The NNX modules under NNX's transformations: what a scan over layers communicates."""

import hlo
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.layers.nnx import Linear, RMSNorm


class Fsdp(nnx.Module):
    def __init__(self, dim, hidden, quantization, rngs):
        options = {"quantization": quantization, "use_bias": False, "rngs": rngs}
        self.norm = RMSNorm(dim, rngs=rngs)
        self.up = Linear(dim, hidden, **options)
        self.down = Linear(hidden, dim, **options)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


@pytest.mark.parametrize("quantization, split", [(None, -2), ("fp8", -1)])
def test_a_scan_with_fsdp_communicates_kernels_alone(eight_devices, quantization, split):
    """Its body constrains the carry: rows keep their sharding, in FP8 too.

    Otherwise XLA may split the carry as the parameters are, in plain jnp as well.
    """
    layers, dim, hidden = 3, 32, 48

    @nnx.vmap(in_axes=0, out_axes=0)
    def create(key):
        return Fsdp(dim, hidden, quantization, nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, block):
        return block(jax.lax.with_sharding_constraint(x, P("fsdp")))

    graph, state = nnx.split(create(jax.random.split(jax.random.key(0), layers)))
    of_kernels = P(None, "fsdp", None) if split == -2 else P(None, None, "fsdp")
    spec = lambda a: of_kernels if a.ndim == 3 else P()
    head = jnp.ones((dim, 16))

    def loss(given, x):
        state, head = given
        return jnp.mean((forward(x, nnx.merge(graph, state)) @ head) ** 2)

    def step(given, x):
        value, gradient = jax.value_and_grad(loss)(given, x)
        return value, jax.tree.map(jnp.subtract, given, gradient)

    mesh = jax.make_mesh((4,), ("fsdp",), (AxisType.Auto,), devices=eight_devices[:4])
    with jax.set_mesh(mesh):
        put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        given = jax.tree.map(lambda a: put(a, spec(a)), state), put(head, P())
        x = put(jnp.ones((8, 6, dim)), P("fsdp"))
        found = hlo.communicated(jax.jit(step).lower(given, x).compile())
    kernels, maxima = 2 * dim * hidden, 4 if quantization else 0  # x and dy, twice
    codes = "u8" if quantization else "f32"
    summed = (
        kernels + dim + head.size + 1 + maxima
    )  # with the gradients of scale and head, the loss
    expected = {("all-gather", codes): 2 * kernels, ("all-reduce", "f32"): summed}
    assert found == expected | ({("all-reduce", "s32"): 2} if quantization else {})
