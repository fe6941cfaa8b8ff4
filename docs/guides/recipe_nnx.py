"""A whole training step in nnx: a Llama-like model, and everything around it.

Run it: `python docs/guides/recipe_nnx.py`. It needs the extra `train`, and emulates
four devices; on four GPUs the same code runs unchanged. CI checks every statement below. In
Equinox: docs/guides/recipe_equinox.py.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # without four GPUs

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import accumulate_gradients
from normfuse.layers.nnx import fuse

LAYERS, DIM, HEADS, HIDDEN, VOCAB, PADDING = 2, 64, 4, 128, 2048, -1


# 1. The model, as anybody would write it: without normfuse.
class Block(nnx.Module):
    def __init__(self, rngs):
        linear = lambda n, m: nnx.Linear(n, m, use_bias=False, rngs=rngs)
        self.norm1, self.norm2 = nnx.RMSNorm(DIM, rngs=rngs), nnx.RMSNorm(DIM, rngs=rngs)
        self.q, self.k, self.v, self.o = (linear(DIM, DIM) for _ in range(4))
        self.gate, self.up, self.down = (
            linear(DIM, HIDDEN),
            linear(DIM, HIDDEN),
            linear(HIDDEN, DIM),
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = jax.lax.with_sharding_constraint(x, P("fsdp"))  # rows: docs/guides/parallelism.md
        y = self.norm1(x)
        q, k, v = (f(y).reshape(*y.shape[:2], HEADS, -1) for f in (self.q, self.k, self.v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)) * q.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + self.dropout(self.o(y))
        y = self.norm2(x)
        return x + self.dropout(self.down(nnx.silu(self.gate(y)) * self.up(y)))


def rotated(x):
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    c, s = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        create = nnx.vmap(lambda key: Block(nnx.Rngs(key)), in_axes=0, out_axes=0)
        self.blocks = create(jax.random.split(rngs.params(), LAYERS))
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        forward = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(self.norm(forward(self.embed(tokens), self.blocks)))


# 2. The loss: labels that are padding count nothing.
def loss(model, batch):
    tokens, labels = batch
    counted = labels != PADDING
    logits = model(tokens).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, labels, 0))
    return jnp.sum(losses * counted) / jnp.sum(counted)


# 3. The step: one line for `fuse`, FP8 in all products but the head's, and microbatches.
reports = []
fused = fuse(loss, quantization="fp8", report=reports.append)


@nnx.jit
def step(model, optimizer, batches):
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # the rest: dropout's keys

    def microbatch(params, batch, rest):
        model = nnx.merge(graph, params, rest, copy=True)
        return fused(model, batch), nnx.state(model, nnx.Not(nnx.Param))

    (value, rest), gradients = accumulate_gradients(microbatch, params, batches, state=rest)
    nnx.update(model, rest)
    optimizer.update(model, gradients)
    return value


# 4. FSDP: each device holds a quarter of the parameters and of the optimizer's state.
def spec(array):
    is_kernel = array.ndim >= 2 and array.shape[-2] >= DIM
    return P(*[None] * (array.ndim - 2), "fsdp", None) if is_kernel else P()


mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def create():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    for part in (model, optimizer):
        place = lambda a: jax.device_put(a, NamedSharding(mesh, spec(a)))
        nnx.update(part, jax.tree.map(place, nnx.state(part)))
    return model, optimizer


text = jnp.arange(8 * 33).reshape(8, 33) * 7 % 101  # eight sequences, two microbatches
labels = text[:, 1:].at[:, -5:].set(PADDING)
batches = jax.tree.map(lambda a: a.reshape(2, 4, 32), (text[:, :-1], labels))
batches = jax.device_put(batches, NamedSharding(mesh, P(None, "fsdp")))
with jax.set_mesh(mesh):
    model, optimizer = create()
    losses = []
    for i in range(20):
        losses.append(float(step(model, optimizer, batches)))
        print(f"step {i + 1}: loss {losses[-1]:.3f}")
print(reports[-1])
assert losses[-1] < 0.3 * losses[0]
assert {"attention", "norm", "mlp", "product", "loss"} <= {row.domain for row in reports[-1].fused}
quantized = [row for row in reports[-1].fused if "fp8" in row.served]
assert {"mlp", "product", "loss"} == {row.domain for row in quantized}
assert model.blocks.down.kernel[...].sharding.spec[1] == "fsdp"


# 5. Save and restore with Orbax: model and optimizer, with the state of their random numbers.
def is_key(array):
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def arrays(*parts):
    """Plain arrays: Orbax writes no random keys."""
    plain = lambda a: jax.random.key_data(a) if is_key(a) else a
    return jax.tree.map(plain, nnx.to_pure_dict(nnx.state(parts)))


def put(found, *parts):
    state = nnx.state(parts)
    whole = lambda a, b: jax.random.wrap_key_data(b) if is_key(a) else b
    nnx.replace_by_pure_dict(state, jax.tree.map(whole, nnx.to_pure_dict(state), found))
    nnx.update(parts, state)


checkpointer = ocp.StandardCheckpointer()
with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
    checkpointer.save(Path(folder, "20"), arrays(model, optimizer))
    checkpointer.wait_until_finished()
    after = float(step(model, optimizer, batches))
    model, optimizer = create()
    put(checkpointer.restore(Path(folder, "20"), arrays(model, optimizer)), model, optimizer)
    assert float(step(model, optimizer, batches)) == after  # the same masks of dropout, to the bit


# 6. Generation, without dropout: append the likeliest token, one at a time.
@nnx.jit
def next_tokens(model, tokens, last):
    return jnp.argmax(model(tokens)[:, last], -1)


model.eval()
tokens = jnp.zeros((4, 32), int).at[:, :16].set(text[:4, :16])
with jax.set_mesh(mesh):
    for last in range(15, 27):
        tokens = tokens.at[:, last + 1].set(next_tokens(model, tokens, last))
model.train()
assert jnp.mean(tokens[:, 16:28] == text[:4, 16:28]) > 0.9  # it has learned the text
print("continued:", tokens[0, 16:28].tolist())
