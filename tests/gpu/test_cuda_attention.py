"""Attention by cuDNN on an NVIDIA GPU, beside the blocks that other devices run, in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import attention

pytestmark = pytest.mark.gpu

bf16 = jnp.bfloat16
LENGTH = 1024


def ids(*rows):
    """Segment ids of sequences, from (id, tokens) of each segment."""
    return jnp.asarray([np.repeat(*zip(*row)) for row in rows])


CASES = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 100},
    "mask that is causal": {"mask": jnp.tril(jnp.ones((LENGTH, LENGTH), bool))},
    "mask": {"mask": jnp.arange(LENGTH)[:, None] % 7 != jnp.arange(LENGTH) % 5},
    "few segments": {"segment_ids": ids([(1, 500), (2, 524)], [(4, 1024)])},
    "many segments": {
        "segment_ids": ids([(n, 64) for n in range(16)], [(1, 1), (2, 300), (5, 700), (0, 23)])
    },
    "too many segments": {"segment_ids": ids([(n, 32) for n in range(32)], [(1, 1024)])},
    "segments apart": {"segment_ids": ids([(1, 300), (2, 300), (1, 424)], [(1, 1024)])},
    "other segments of keys": {
        "segment_ids": (ids([(1, 1024)], [(2, 1024)]), ids([(1, 1024)], [(2, 500), (3, 524)]))
    },
}
CASES |= {
    f"{name}, causal": case | {"causal": True} for name, case in CASES.items() if "segment" in name
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    options = CASES[name]
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, LENGTH, heads, 64) for heads in (8, 2, 2, 8)]
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
