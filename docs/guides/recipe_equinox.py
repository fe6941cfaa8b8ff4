"""A whole training step in Equinox: a Llama-like model, and everything around it.

Run it: `python docs/guides/recipe_equinox.py`. It needs the extra `train`, and emulates
four devices; on four GPUs the same code runs unchanged. CI checks every statement below. In
nnx: docs/guides/recipe_nnx.py.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # without four GPUs

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import accumulate_gradients, fuse

LAYERS, DIM, HEADS, HIDDEN, VOCAB, PADDING = 2, 64, 4, 128, 2048, -1


# 1. The model, for one sequence, as anybody would write it: without normfuse.
class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    norm2: eqx.nn.RMSNorm
    linears: dict[str, eqx.nn.Linear]
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.norm1, self.norm2 = (eqx.nn.RMSNorm(DIM, use_bias=False) for _ in range(2))
        sizes = dict.fromkeys("qkvo", (DIM, DIM))
        sizes |= {"gate": (DIM, HIDDEN), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
        keys = dict(zip(sizes, jax.random.split(key, len(sizes))))
        make = lambda name: eqx.nn.Linear(*sizes[name], use_bias=False, key=keys[name])
        self.linears = {name: make(name) for name in sizes}
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        call = lambda name, x: jax.vmap(self.linears[name])(x)
        keys = [None, None] if key is None else jax.random.split(key)
        y = jax.vmap(self.norm1)(x)
        q, k, v = (call(name, y).reshape(len(y), HEADS, -1) for name in "qkv")
        scores = jnp.einsum("qhd,khd->hqk", rotated(q), rotated(k)) * q.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        y = jnp.einsum("hqk,khd->qhd", weights, v).reshape(x.shape)
        x = x + self.dropout(call("o", y), key=keys[0], inference=key is None)
        y = jax.vmap(self.norm2)(x)
        y = call("down", jax.nn.silu(call("gate", y)) * call("up", y))
        return x + self.dropout(y, key=keys[1], inference=key is None)


def rotated(x):
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(len(x))[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    c, s = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Block  # each array with an axis of layers
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, DIM, key=keys[0])
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(keys[1], LAYERS))
        self.norm = eqx.nn.RMSNorm(DIM, use_bias=False)
        self.head = eqx.nn.Linear(DIM, VOCAB, use_bias=False, key=keys[2])

    def __call__(self, tokens, key=None):
        """Logits of a batch of sequences; without a key there is no dropout."""
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def layer(x, given):
            arrays, i = given
            x = jax.lax.with_sharding_constraint(x, P("fsdp"))  # rows: docs/guides/parallelism.md
            block = eqx.combine(arrays, static)
            if key is None:
                return jax.vmap(lambda x: block(x, None))(x), None
            keys = jax.random.split(jax.random.fold_in(key, i), len(x))
            return jax.vmap(block)(x, keys), None

        x = jax.vmap(jax.vmap(self.embed))(tokens)
        x, _ = jax.lax.scan(layer, x, (arrays, jnp.arange(LAYERS)))
        return jax.vmap(jax.vmap(lambda x: self.head(self.norm(x))))(x)


# 2. The loss: labels that are padding count nothing. Each microbatch has a key, as its state.
def loss(model, batch, key):
    tokens, labels = batch
    key, own = jax.random.split(key)
    counted = labels != PADDING
    logits = model(tokens, own).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, labels, 0))
    return jnp.sum(losses * counted) / jnp.sum(counted), key


# 3. The step: one line for `fuse`, FP8 in all products but the head's, and microbatches.
reports = []
fused = fuse(loss, quantization="fp8", report=reports.append)
optimizer = optax.adamw(3e-3)


@eqx.filter_jit
def step(model, moments, key, batches):
    (value, key), gradients = accumulate_gradients(fused, model, batches, state=key)
    updates, moments = optimizer.update(gradients, moments, eqx.filter(model, eqx.is_array))
    return value, eqx.apply_updates(model, updates), moments, key


# 4. FSDP: each device holds a quarter of the parameters and of the optimizer's state.
def placed(array):
    if not eqx.is_array(array):
        return array
    is_kernel = array.ndim >= 2 and array.shape[-2] >= DIM
    spec = P(*[None] * (array.ndim - 2), "fsdp", None) if is_kernel else P()
    return jax.device_put(array, NamedSharding(mesh, spec))


def create():
    model = Model(jax.random.key(0))
    moments = optimizer.init(eqx.filter(model, eqx.is_array))
    return jax.tree.map(placed, (model, moments, jax.random.key(1)))


mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
text = jnp.arange(8 * 33).reshape(8, 33) * 7 % 101  # eight sequences, two microbatches
labels = text[:, 1:].at[:, -5:].set(PADDING)
batches = jax.tree.map(lambda a: a.reshape(2, 4, 32), (text[:, :-1], labels))
batches = jax.device_put(batches, NamedSharding(mesh, P(None, "fsdp")))
losses, state = [], create()
with jax.set_mesh(mesh):
    for i in range(20):
        value, *state = step(*state, batches)
        losses.append(float(value))
        print(f"step {i + 1}: loss {losses[-1]:.3f}")
print(reports[-1])
assert losses[-1] < 0.3 * losses[0]
assert {"attention", "norm", "mlp", "product", "loss"} <= {row.domain for row in reports[-1].fused}
quantized = [row for row in reports[-1].fused if "fp8" in row.served]
assert {"mlp", "product", "loss"} == {row.domain for row in quantized}
assert state[0].blocks.linears["down"].weight.sharding.spec[1] == "fsdp"


# 5. Save and restore with Orbax: model, moments and key.
def is_key(array):
    return eqx.is_array(array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def arrays(state):
    """Plain arrays: Orbax writes neither random keys nor functions."""
    plain = lambda a: jax.random.key_data(a) if is_key(a) else a
    return [plain(a) for a in jax.tree.leaves(state) if eqx.is_array(a)]


def whole(state, found):
    """Returns the state with the arrays that were found."""
    found = iter(found)
    take = lambda a: jax.random.wrap_key_data(next(found)) if is_key(a) else next(found)
    return jax.tree.map(lambda a: take(a) if eqx.is_array(a) else a, state)


checkpointer = ocp.StandardCheckpointer()
with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
    checkpointer.save(Path(folder, "20"), arrays(state))
    checkpointer.wait_until_finished()
    after, *_ = step(*state, batches)
    fresh = create()
    state = whole(fresh, checkpointer.restore(Path(folder, "20"), arrays(fresh)))
    value, *state = step(*state, batches)
    assert float(value) == float(after)  # the same masks of dropout, to the bit


# 6. Generation, without dropout: append the likeliest token, one at a time.
@eqx.filter_jit
def next_tokens(model, tokens, last):
    return jnp.argmax(model(tokens)[:, last], -1)


tokens = jnp.zeros((4, 32), int).at[:, :16].set(text[:4, :16])
with jax.set_mesh(mesh):
    for last in map(jnp.asarray, range(15, 27)):
        tokens = tokens.at[:, last + 1].set(next_tokens(state[0], tokens, last))
assert jnp.mean(tokens[:, 16:28] == text[:4, 16:28]) > 0.9  # it has learned the text
print("continued:", tokens[0, 16:28].tolist())
