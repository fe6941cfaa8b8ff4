"""A training step of a small nnx model on a CPU: Flax's layers, ours in their place, and `fuse`.

    python benchmarks/cpu_step.py

All run by turns, so that a busy machine slows all; a line gives the median time of each and the
median of its neighbours' ratios (above 1: faster than Flax's layers).
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from normfuse.layers import nnx as ours

DIM, HIDDEN, HEADS, LAYERS, VOCAB, BATCH, LENGTH = 128, 512, 4, 2, 1024, 8, 128


class Block(nnx.Module):
    def __init__(self, linear, norm, dtype, rngs):
        make = lambda n, m: linear(n, m, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm1, self.norm2 = (norm(DIM, dtype=dtype, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v, self.o = (make(DIM, DIM) for _ in range(4))
        self.gate, self.up, self.down = make(DIM, HIDDEN), make(DIM, HIDDEN), make(HIDDEN, DIM)

    def __call__(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).reshape(*y.shape[:2], HEADS, -1) for f in (self.q, self.k, self.v))
        x += self.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Model(nnx.Module):
    def __init__(self, linear, norm, dtype):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, DIM, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(linear, norm, dtype, rngs) for _ in range(LAYERS)])
        self.norm = norm(DIM, dtype=dtype, rngs=rngs)
        self.head = linear(DIM, VOCAB, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss(model, tokens):
    logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_step(linear, norm, loss, dtype):
    model = Model(linear, norm, dtype)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        value, gradients = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, gradients)
        return value

    return nnx.cached_partial(step, model, optimizer)


CONTESTANTS = {
    "Flax": (nnx.Linear, nnx.RMSNorm, loss),
    "our Linear": (ours.Linear, nnx.RMSNorm, loss),
    "our Linear and RMSNorm": (ours.Linear, ours.RMSNorm, loss),
    "fuse(loss)": (nnx.Linear, nnx.RMSNorm, ours.fuse(loss)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    repeats = parser.parse_args().repeats
    tokens = jax.random.randint(jax.random.key(0), (BATCH, LENGTH + 1), 0, VOCAB)
    for dtype in ("bfloat16", "float32"):
        steps = {name: make_step(*given, dtype) for name, given in CONTESTANTS.items()}
        times = {name: [] for name in steps}
        for turn in range(repeats + 2):
            for name, step in steps.items():
                start = time.perf_counter()
                jax.block_until_ready(step(tokens))
                if turn > 1:
                    times[name].append(1e3 * (time.perf_counter() - start))
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(times["Flax"], own, strict=True))
            print(f"{dtype:>8} {name:24} {statistics.median(own):8.1f} ms {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
