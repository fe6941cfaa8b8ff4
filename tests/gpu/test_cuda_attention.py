"""Attention by cuDNN on an NVIDIA GPU, against the blocks of other devices in float32."""

import functools

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


@pytest.mark.parametrize("name", [*CASES, *ODD, "many segments, in parts"])
def test_values_and_gradients(name, monkeypatch):
    options = (CASES | ODD)[name.removesuffix(", in parts")]
    length = 867 if name in ODD else LENGTH
    if name.endswith("parts"):  # parts hold both sequences and both heads of keys
        monkeypatch.setattr(cudnn, "_PACKED", 2**26)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, length, heads, 64) for heads in (8, 2, 2, 8)]
    *operands, dout = (jax.random.normal(k, s, bf16) for k, s in zip(keys, shapes))

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, dout, *operands):
        call = functools.partial(attention, **options, implementation=implementation)
        out, pull = jax.vjp(call, *operands)
        return out, *pull(dout)

    got = run("cudnn", dout, *operands)
    want = run("xla", *(a.astype(jnp.float32) for a in (dout, *operands)))
    for a, b in zip(got, want, strict=True):
        # Scores, weights and results are rounded to 2^-8.
        assert jnp.linalg.norm(a.astype(jnp.float32) - b) < 2**-6 * jnp.linalg.norm(b)
