"""Attention by cuDNN on an NVIDIA GPU, against the blocks of other devices in float32."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import attention
from normfuse.layers.attention import cudnn

pytestmark = pytest.mark.gpu

bf16 = jnp.bfloat16
LENGTH = 4096


def ids(*rows):
    """Segment ids of sequences, from (id, tokens) of each segment."""
    return jnp.asarray([np.repeat(*zip(*row)) for row in rows])


def first(*counts):
    """A mask of the first tokens of each sequence, `(batch, LENGTH)`."""
    return jnp.arange(LENGTH) < jnp.asarray(counts)[:, None]


KEYS, SEES = first(1000, 4001)[:, None, None], jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
BIAS = (-jnp.abs(jnp.arange(LENGTH) - 999) / 99).astype(bf16)
CASES = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 100},
    "mask that is causal": {"mask": jnp.tril(jnp.ones((LENGTH, LENGTH), bool))},
    "mask": {"mask": jnp.arange(LENGTH)[:, None] % 7 != jnp.arange(LENGTH) % 5},
    "padding": {"mask": KEYS},
    "padding, causal": {"mask": KEYS, "causal": True},
    "padding of keys and queries": {"mask": KEYS & first(700, 4096)[:, None, :, None]},
    "padding in a causal mask": {"mask": KEYS & SEES},
    "padding in a causal mask, and of queries": {"mask": KEYS & KEYS.swapaxes(2, 3) & SEES},
    "padding beside a bias": {"mask": KEYS & SEES, "bias": BIAS},
    "padding at the start": {"mask": ~KEYS},
    "a sequence without a key": {"mask": first(1000, 0)[:, None, None]},
    "few segments": {"segment_ids": ids([(1, 2000), (2, 2096)], [(4, 4096)])},
    "many segments": {
        "segment_ids": ids(
            [(n, 512) for n in range(8)], [(1, 1), (2, 300), (5, 700), (6, 3000), (0, 95)]
        )
    },
    "too many segments": {"segment_ids": ids([(n, 128) for n in range(32)], [(1, 4096)])},
    "segments apart": {"segment_ids": ids([(1, 1300), (2, 1300), (1, 1496)], [(1, 4096)])},
    "other segments of keys": {
        "segment_ids": (ids([(1, 4096)], [(2, 4096)]), ids([(1, 4096)], [(2, 96), (3, 4000)]))
    },
}
CASES |= {
    f"{name}, causal": case | {"causal": True} for name, case in CASES.items() if "segment" in name
}


ODD = {  # 867 queries and keys, as π0 has
    "odd, mask": {"mask": jnp.arange(867)[:, None] % 7 != jnp.arange(867) % 5},
    "odd, mask that is causal": {"mask": jnp.tril(jnp.ones((867, 867), bool))},
    "odd, padding": {"mask": (jnp.arange(867) < 700)[None, None, None]},
    "odd, causal": {"causal": True},
    "odd, causal, segments": {"causal": True, "segment_ids": ids([(0, 867)], [(0, 400), (1, 467)])},
}


SHORT = 640
SOME = (jnp.arange(SHORT) < jnp.asarray([640, 333, 0])[:, None])[:, None, None]  # padding
KEPT = {
    heads: jax.random.bernoulli(jax.random.key(heads), 0.9, (3, heads, SHORT, SHORT))
    for heads in (1, 8)
}
DROPOUT = {"dropout_mask": KEPT[1][:1].at[:, :, 3].set(False), "dropout_rate": 0.1}  # a row of none
EACH = {"dropout_mask": KEPT[8], "dropout_rate": 0.1}
LEARNED = jax.random.normal(jax.random.key(9), (8, SHORT, SHORT), bf16)
FEW = jnp.asarray([640, 333, 0])
SHORTER = {  # three sequences of 640
    "lengths": {"lengths": FEW},
    "lengths, causal": {"lengths": FEW, "causal": True},
    "lengths, window": {"lengths": FEW, "causal": True, "window": 100},
    "padding, window": {"mask": SOME, "causal": True, "window": 100},
    "a mask, window": {"mask": ~SOME, "causal": True, "window": 100},
    "a bias, window": {"bias": LEARNED, "causal": True, "window": 100},
    "lengths of queries and keys": {"lengths": (jnp.asarray([640, 9, 0]), FEW)},
    "lengths beside a bias": {"lengths": FEW, "bias": LEARNED},
    "padding beside a learned bias": {"mask": SOME, "bias": LEARNED},
    "padding beside a learned bias, causal": {"mask": SOME, "bias": LEARNED, "causal": True},
    "padding of queries and keys beside one": {"mask": SOME & SOME.swapaxes(2, 3), "bias": LEARNED},
    "a mask beside a learned bias": {"mask": ~SOME, "bias": LEARNED},
    "padding and lengths": {"mask": SOME, "lengths": jnp.asarray([500, 640, 640])},
    "dropout": DROPOUT,
    "dropout, causal": DROPOUT | {"causal": True},
    "dropout of each head, causal": EACH | {"causal": True},
    "dropout, window": DROPOUT | {"causal": True, "window": 100},
    "dropout, padding": DROPOUT | {"mask": SOME},
    "dropout of each head, padding, causal": EACH | {"mask": SOME, "causal": True},
    "dropout, a mask": DROPOUT | {"mask": ~SOME},
    "dropout, lengths": DROPOUT | {"lengths": FEW},
    "dropout, a learned bias": DROPOUT | {"bias": LEARNED},
    "dropout, a learned bias, padding": DROPOUT | {"bias": LEARNED, "mask": SOME},
    "dropout, segments": DROPOUT | {"segment_ids": ids(*[[(1, 300), (2, 340)]] * 3)},
    "dropout of nine in ten": {"dropout_mask": ~KEPT[8], "dropout_rate": 0.9},
}
IMAGES = {  # tokens of an image and one for its class: length, width, options
    "197 tokens": (197, 64, {}),
    "257 tokens, heads of 80": (257, 80, {}),
    "577 tokens": (577, 64, {}),
    "577 tokens, a bias": (577, 64, {"bias": LEARNED[:, :577, :577]}),
    "577 tokens, dropout": (
        577,
        64,
        {"dropout_mask": KEPT[8][..., :577, :577], "dropout_rate": 0.1},
    ),
    "577 tokens, segments": (577, 64, {"segment_ids": ids(*[[(1, 300), (2, 277)]] * 3)}),
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """What a kernel does not write is NaN: most of the free memory was."""
    stats = jax.local_devices()[0].memory_stats()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # each sees the whole GPU as free
    free = (stats["bytes_limit"] - stats["bytes_in_use"]) / workers
    size = 2**28
    pieces = [jnp.full((size,), jnp.nan, bf16) for _ in range(int(0.7 * free) // (2 * size))]
    jax.block_until_ready(pieces)


def check(options, batch, length, width):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, length, heads, width) for heads in (8, 2, 2, 8)]
    *operands, dout = (jax.random.normal(k, s, bf16) for k, s in zip(keys, shapes))
    arrays = {n: a for n, a in options.items() if not isinstance(a, bool | int | float)}
    fixed = {n: a for n, a in options.items() if n not in arrays}
    bias = [arrays.pop("bias")] if "bias" in arrays else []

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, arrays, dout, *operands):
        def call(q, k, v, *bias):
            more = dict(zip(["bias"], bias)) | arrays | fixed
            return attention(q, k, v, **more, implementation=implementation)

        out, pull = jax.vjp(call, *operands)
        return out, *pull(dout)

    got = run("cudnn", arrays, dout, *operands, *bias)
    want = run("xla", arrays, *(a.astype(jnp.float32) for a in (dout, *operands, *bias)))
    for a, b in zip(got, want, strict=True):
        # Scores, weights and results are rounded to 2^-8.
        assert jnp.linalg.norm(a.astype(jnp.float32) - b) < 2**-6 * jnp.linalg.norm(b)


@pytest.mark.parametrize("name", [*CASES, *ODD, "many segments, in parts"])
def test_values_and_gradients(name, monkeypatch):
    if name.endswith("parts"):  # parts hold both sequences and both heads of keys
        monkeypatch.setattr(cudnn, "_PACKED", 2**26)
    options = (CASES | ODD)[name.removesuffix(", in parts")]
    check(options, 2, 867 if name in ODD else LENGTH, 64)


@pytest.mark.parametrize("name", SHORTER)
def test_lengths_and_dropout(name):
    check(SHORTER[name], 3, SHORT, 64)


@pytest.mark.parametrize("name", IMAGES)
def test_odd_lengths(name):
    length, width, options = IMAGES[name]
    check(options, 3, length, width)
