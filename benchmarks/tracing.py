"""What `fuse` adds to the time in which a gradient is traced, of 48 layers.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --folder build/foreign    # and of two public models

Seconds are the process's own, the best of several turns, each of which begins without what JAX
keeps from others. "matching" is reading the traced program and proving what is replaced; the ratio
is that of tracing the gradient of `fuse(loss)` to that of the loss. Arrays are abstract: sizes cost
nothing, but products of few rows, or of a size that is no multiple of 16, are left in FP8.
"""

import argparse
import gc
import importlib
import pathlib
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import normfuse

ROWS, LENGTH, DIM, HEADS, VOCABULARY = 2, 128, 256, 4, 1024
BF16 = jnp.bfloat16

Loss = Callable[[list[Any]], jax.Array]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(losses)


# ---------------------------------------------------------------- a Llama in jnp, with nnx Linears


def rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class RmsNorm(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(DIM))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
        return (y * self.scale[...]).astype(x.dtype)


class LlamaLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        linear = lambda n, m: nnx.Linear(n, m, use_bias=False, dtype=BF16, rngs=rngs)
        self.norms = nnx.List([RmsNorm(), RmsNorm()])
        self.qkvo = nnx.List([linear(DIM, DIM) for _ in range(4)])
        self.gate, self.up, self.down = (
            linear(DIM, 4 * DIM),
            linear(DIM, 4 * DIM),
            linear(4 * DIM, DIM),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = self.norms
        y = first(x)
        q, k, v = (one(y).reshape(*x.shape[:2], HEADS, -1) for one in list(self.qkvo)[:3])
        q, k = rotated(q), rotated(k)
        scores = jnp.einsum("bqhc,bkhc->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1).astype(BF16)
        x = x + self.qkvo[3](jnp.einsum("bhqk,bkhc->bqhc", weights, v).reshape(x.shape))
        y = second(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    def __init__(self, layers: int):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, DIM, dtype=BF16, rngs=rngs)
        self.layers = nnx.List([LlamaLayer(rngs) for _ in range(layers)])
        self.norm = RmsNorm()
        self.head = nnx.Linear(DIM, VOCABULARY, use_bias=False, dtype=BF16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# ---------------------------------------------------------------- a GPT-2 in Equinox


def in_bfloat16(linear: eqx.nn.Linear, x: jax.Array) -> jax.Array:
    assert linear.bias is not None
    return jax.vmap(lambda x: linear.weight.astype(BF16) @ x)(x) + linear.bias.astype(BF16)


class Gpt2Layer(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        self.norms = [eqx.nn.LayerNorm(DIM), eqx.nn.LayerNorm(DIM)]
        self.qkv = eqx.nn.Linear(DIM, 3 * DIM, key=key)
        self.out = eqx.nn.Linear(DIM, DIM, key=key)
        self.up = eqx.nn.Linear(DIM, 4 * DIM, key=key)
        self.down = eqx.nn.Linear(4 * DIM, DIM, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = self.norms
        y = in_bfloat16(self.qkv, jax.vmap(first)(x).astype(BF16))
        q, k, v = (a.reshape(len(x), HEADS, -1) for a in jnp.split(y, 3, -1))
        scores = jnp.einsum("qhc,khc->hqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1).astype(BF16)
        y = jnp.einsum("hqk,khc->qhc", weights, v).reshape(x.shape)
        x = x + in_bfloat16(self.out, y)
        y = jax.vmap(second)(x).astype(BF16)
        return x + in_bfloat16(self.down, jax.nn.gelu(in_bfloat16(self.up, y)))


class Gpt2(eqx.Module):
    embedding: jax.Array
    positions: jax.Array
    layers: list[Gpt2Layer]
    norm: eqx.nn.LayerNorm

    def __init__(self, layers: int):
        self.embedding = jnp.ones((VOCABULARY, DIM))
        self.positions = jnp.ones((LENGTH, DIM))
        self.layers = [Gpt2Layer(key) for key in jax.random.split(jax.random.key(0), layers)]
        self.norm = eqx.nn.LayerNorm(DIM)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = (self.embedding[tokens] + self.positions).astype(BF16)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.norm)(x).astype(BF16) @ self.embedding.T.astype(BF16)


# ---------------------------------------------------------------- a DiT in Linen


class DitLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        dense = lambda n: nn.Dense(n, dtype=BF16)
        norm = lambda y: nn.LayerNorm(use_scale=False, use_bias=False, dtype=BF16)(y)
        parts = jnp.split(dense(6 * DIM)(nn.silu(condition))[:, None], 6, axis=-1)
        y = norm(x) * (1 + parts[0]) + parts[1]
        q, k, v = (dense(DIM)(y).reshape(*x.shape[:2], HEADS, -1) for _ in range(3))
        scores = jnp.einsum("bqhc,bkhc->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
        y = jnp.einsum("bhqk,bkhc->bqhc", nn.softmax(scores).astype(BF16), v)
        x = x + parts[2] * dense(DIM)(y.reshape(x.shape))
        y = norm(x) * (1 + parts[3]) + parts[4]
        return x + parts[5] * dense(DIM)(nn.gelu(dense(4 * DIM)(y)))


class Dit(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = DitLayer()(x, condition)
        return nn.Dense(DIM, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x))


# ---------------------------------------------------------------- a Llama of functions


def jnp_llama(parameters: Any, tokens: jax.Array) -> jax.Array:
    def norm(x, scale):
        y = x.astype(jnp.float32)
        y = y / jnp.sqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
        return y.astype(x.dtype) * scale.astype(x.dtype)

    x = parameters["embedding"].astype(BF16)[tokens]
    for p in parameters["layers"]:
        p = jax.tree.map(lambda w: w.astype(BF16), p)
        y = norm(x, p["norm"])
        q, k, v = (jnp.einsum("bld,dhc->blhc", y, p[name]) for name in "qkv")
        q, k = rotated(q), rotated(k)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("blhc,hcd->bld", y, p["o"])
        y = norm(x, p["mlp norm"])
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return norm(x, parameters["norm"]) @ parameters["head"].astype(BF16)


def jnp_parameters(layers: int) -> Any:
    heads = DIM, HEADS, DIM // HEADS
    of_layer = {"norm": (DIM,), "mlp norm": (DIM,), "q": heads, "k": heads, "v": heads}
    of_layer |= {"o": (*heads[1:], DIM), "gate": (DIM, 4 * DIM), "up": (DIM, 4 * DIM)}
    of_layer |= {"down": (4 * DIM, DIM)}
    shapes = {"embedding": (VOCABULARY, DIM), "norm": (DIM,), "head": (DIM, VOCABULARY)}
    make = lambda of: {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in of.items()}
    return make(shapes) | {"layers": [make(of_layer) for _ in range(layers)]}


# ---------------------------------------------------------------- what is traced


def programs(layers: int, folder: pathlib.Path | None) -> dict[str, Callable[[], Any]]:
    """Returns for each name what makes (abstract parameters, the loss of them and a batch, batch).

    Making it costs what tracing its initialisation does.
    """
    words = (jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32),) * 2

    def of_nnx(make, forward=lambda m, x: m(x)):
        graph, state, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
        loss = lambda state, rest, x, y: cross_entropy(forward(nnx.merge(graph, state, rest), x), y)
        return state, loss, (rest, *words)

    def of_eqx(make, forward):
        model = eqx.filter_eval_shape(make)
        is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)
        arrays, static = eqx.partition(model, is_array)
        loss = lambda arrays, x, y: cross_entropy(forward(eqx.combine(arrays, static), x), y)
        return arrays, loss, words

    def of_linen():
        model, x = Dit(layers), jax.ShapeDtypeStruct((ROWS, LENGTH, DIM), BF16)
        condition = jax.ShapeDtypeStruct((ROWS, DIM), BF16)
        variables = jax.eval_shape(model.init, jax.random.key(0), x, condition)
        loss = lambda p, x, c: jnp.mean(jnp.square(model.apply(p, x, c).astype(jnp.float32)))
        return variables, loss, (x, condition)

    def of_functions():
        loss = lambda p, x, y: cross_entropy(jnp_llama(p, x), y)
        return jnp_parameters(layers), loss, words

    found = {
        "Llama, nnx": lambda: of_nnx(lambda: Llama(layers)),
        "Llama, functions": of_functions,
        "GPT-2, Equinox": lambda: of_eqx(lambda: Gpt2(layers), lambda m, x: jax.vmap(m)(x)),
        "DiT, Linen": of_linen,
    }
    if folder is not None:
        import foreign_zoo

        foreign_zoo.look_in([folder])

        def of_zoo(name):
            case = foreign_zoo.MODELS[name]
            sizes = {case.layers: layers, case.vocabulary: VOCABULARY}
            sizes |= {case.length: LENGTH} if case.length else {}
            made = lambda: case.make(**sizes)
            forward = []
            make = lambda: forward.append((m := made()).forward) or m.model
            if "DantinoX" in name:
                return of_nnx(make, lambda m, x: forward[0](m, x))
            return of_eqx(make, lambda m, x: forward[0](m, x))

        names = [n for n in foreign_zoo.MODELS if "DantinoX" in n or "eqx-zoo" in n]
        found |= {name: lambda name=name: of_zoo(name) for name in names}
    return found


def traced(loss: Loss, parameters: Any, batch: Any, warm: bool) -> float:
    """Returns the seconds in which a gradient is traced."""
    if not warm:
        jax.clear_caches()
    gc.collect()
    gradient = jax.jit(jax.value_and_grad(lambda *args: loss(*args)))  # another one to JAX
    began = time.process_time()
    gradient.trace(parameters, *batch)
    return time.process_time() - began


_matching: list[float] = []


def _timed(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = function(*args, **kwargs)
        _matching.append(time.process_time() - began)
        return result

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, help="where public models are installed")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", help="programs that have this in their names")
    parser.add_argument("--warm", action="store_true", help="with what JAX keeps from other turns")
    options = parser.parse_args()
    inside = importlib.import_module("normfuse.layers.fuse.fuse")
    for name in ("Program", "plan"):
        setattr(inside, name, _timed(getattr(inside, name)))
    print("program, layers: matching bf16, fp8 (s); tracing theirs, fuse, fuse fp8 (s); ratios")
    for name, make in programs(options.layers, options.folder).items():
        if options.only not in name:
            continue
        parameters, loss, batch = make()
        versions = {"theirs": loss}
        for each in (None, "fp8"):
            versions[str(each)] = normfuse.fuse(loss, quantization=each, report=lambda _: None)
        times: dict[str, list[float]] = {each: [] for each in versions}
        matched: dict[str, list[float]] = {each: [] for each in versions}
        for turn in range(options.turns + 1):
            for each, function in versions.items():
                _matching.clear()
                took = traced(function, parameters, batch, options.warm)
                if turn:  # imports and the like are behind
                    times[each].append(took)
                    matched[each].append(sum(_matching))
        least = {each: min(found) for each, found in times.items()}
        plain, bf16, fp8 = least.values()
        print(
            f"{name}, {options.layers}: {min(matched['None']):.3f}, {min(matched['fp8']):.3f}; "
            f"{plain:.3f}, {bf16:.3f}, {fp8:.3f}; {bf16 / plain:.2f}, {fp8 / plain:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
