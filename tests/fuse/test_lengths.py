"""Masks that a program makes of lengths and of segments: these are what attention is given."""

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from fuse_cases import Fused, domain, draws

B, T, H, D = 3, 12, 2, 8
LENGTHS = jnp.array([0, 5, T + 2])
IDS = jnp.array([[1] * 4 + [2] * 8, [1] * 12, [1, 2, 3] * 4])
LEAST = jnp.finfo(jnp.float32).min
POSITION = jnp.arange(T)
CAUSAL = jnp.tril(jnp.ones((T, T), bool))


def attention(mask, q, k, v, n, ids):
    s = mask(jnp.einsum("bthd,bshd->bhts", q, k) * 0.35, n, ids)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def shown(n, keep=None):
    return (POSITION < n[:, None] if keep is None else keep)[:, None, None]


def both(keep):
    return keep[:, None, :, None] & keep[:, None, None]


SPELLINGS = {
    "position < length": lambda s, n, i: jnp.where(shown(n), s, -1e9),
    "length > position": lambda s, n, i: jnp.where(shown(n, n[:, None] > POSITION), s, -1e9),
    "position <= last": lambda s, n, i: jnp.where(shown(n, POSITION <= n[:, None] - 1), s, -1e9),
    "one more": lambda s, n, i: jnp.where(shown(n, POSITION + 3 <= n[:, None]), s, -1e9),
    "not >=": lambda s, n, i: jnp.where(~shown(n, POSITION >= n[:, None]), s, LEAST),
    "hidden": lambda s, n, i: jnp.where(shown(n, POSITION >= n[:, None]), -1e9, s),
    "-inf": lambda s, n, i: jnp.where(shown(jnp.maximum(n, 1)), s, -jnp.inf),
    "added": lambda s, n, i: s + jnp.where(shown(n), 0.0, LEAST),
    "1e4 added": lambda s, n, i: s + (1.0 - shown(n).astype(s.dtype)) * -1e4,
    "causal, too": lambda s, n, i: jnp.where(shown(n) & CAUSAL, s, -1e9),
    "causal, too, added": lambda s, n, i: s + jnp.where(shown(n) & CAUSAL, 0, LEAST),
    "rows, too": lambda s, n, i: jnp.where(both(POSITION < n[:, None]), s, -1e9),
    "Flax's mask": lambda s, n, i: jnp.where(
        nn.make_attention_mask(POSITION < n[:, None], POSITION < n[:, None]) > 0, s, LEAST
    ),
    "uint32": lambda s, n, i: jnp.where(
        shown(n, POSITION.astype("uint32") < n[:, None].astype("uint32")), s, -1e9
    ),
    "vmapped": lambda s, n, i: jax.vmap(lambda s, n: jnp.where(POSITION < n, s, -1e9))(s, n),
}
SEGMENTS = {
    "equal ids": lambda s, n, i: jnp.where((i[:, :, None] == i[:, None])[:, None], s, -1e9),
    "equal ids, causal": lambda s, n, i: jnp.where(
        (i[:, None] == i[:, :, None])[:, None] & CAUSAL, s, LEAST
    ),
    "equal ids, added": lambda s, n, i: (
        s + jnp.where((i[:, :, None] == i[:, None])[:, None] & CAUSAL, 0, LEAST)
    ),
    "not unequal": lambda s, n, i: jnp.where((i[:, :, None] != i[:, None])[:, None], -1e9, s),
    "ids and lengths": lambda s, n, i: jnp.where(
        (i[:, :, None] == i[:, None])[:, None] & shown(n), s, -1e9
    ),
    "Flax's ids": lambda s, n, i: jnp.where(
        nn.make_attention_mask(i, i, jnp.equal).astype(bool), s, LEAST
    ),
}
OTHERS = {  # a mask that is none of lengths
    "the end": lambda s, n, i: jnp.where(shown(n, POSITION > n[:, None]), s, -1e9),
    "every second": lambda s, n, i: jnp.where(shown(n, 2 * POSITION < n[:, None]), s, -1e9),
    "of each query": lambda s, n, i: jnp.where((POSITION < i[..., None])[:, None], s, -1e9),
    "ids of the transposed": lambda s, n, i: jnp.where(
        (i[:, :, None] == jnp.roll(i, 1, 0)[:, None])[:, None] & CAUSAL, s, -1e9
    ),
    "ids below": lambda s, n, i: jnp.where((i[:, :, None] >= i[:, None])[:, None], s, -1e9),
}


def compare(mask, rounding):
    args = [*draws(*((B, T, H, D),) * 3, scale=0.7), LENGTHS, IDS]
    function = lambda *args: attention(mask, *args)
    fused = Fused(function)
    want, got = fuse_cases.run(function, fused, args=args, jit=False)["float32"]
    for a, b in zip(got[:2], want[:2]):
        assert max(fuse_cases.errors(a, b, fuse_cases.floor_of(b))) < rounding
    (row,) = [row for row in fused.rows if domain(row) == "attention"]
    assert row.served, str(fused)
    return row.served.split(";")[0]


@pytest.mark.parametrize("name", [*SPELLINGS, *SEGMENTS, *OTHERS])
def test_a_mask_is_given_as_what_it_is_made_of(name):
    spelling = next(each[name] for each in (SPELLINGS, SEGMENTS, OTHERS) if name in each)
    with jax.numpy_dtype_promotion("standard"), np.errstate(all="raise"):
        served = compare(spelling, 2e-3 if "1e4" in name else 1e-5)  # 3 digits beside 1e4
    named = {word: word in served for word in ("lengths", "segments", "run-time mask")}
    segments = name in SEGMENTS or name == "ids of the transposed"
    assert named["segments"] == segments, served
    assert named["lengths"] == (name in SPELLINGS or name == "ids and lengths"), served
    assert named["run-time mask"] == (name in OTHERS and not segments), served
