import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from normfuse.models.attention import KeyValue, attend, rope_table, rotate


def _expected(q, k, v, start=0, window=99):
    """Each query's softmax over the keys in its window up to its own position, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        group = h * k.shape[2] // q.shape[2]
        seen = slice(max(start + t + 1 - window, 0), start + t + 1)
        scores = k[b, seen, group] @ q[b, t, h] * 8**-0.5
        shares = np.exp(scores - scores.max())
        out[b, t, h] = shares / shares.sum() @ v[b, seen, group]
    return out


def _random(rng, kv_heads, dtype, batch=2, seq=7, heads=4, width=8):
    q = rng.standard_normal((batch, seq, heads, width))
    k, v = rng.standard_normal((2, batch, seq, kv_heads, width))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "unit"), [("float32", 2**-24), ("bfloat16", 2**-9)])
def test_attention_matches_reference(rng, kv_heads, dtype, unit, jit):
    q, k, v = _random(rng, kv_heads, dtype)
    out, cache = jit(lambda *x: attend(*x, None, 0, "auto"))(q, k, v)
    assert cache is None and out.dtype == dtype
    # Rounded: the score (of some units), its exponential, the share, the product and the result.
    error = np.abs(np.asarray(out, np.float64) - _expected(q, k, v)).max()
    assert error < 8 * unit * np.abs(np.asarray(v, np.float64)).max()


@pytest.mark.parametrize("options", [{}, {"window": 4}], ids=str)
def test_attention_grows_with_a_cache(rng, jit, options):
    q, k, v = _random(rng, 2, "float32")
    expected = _expected(q, k, v, **options)
    limit = 16 * 2**-24 * np.abs(np.asarray(v)).max()  # twice the limit above
    whole, _ = jit(lambda *x: attend(*x, None, 0, "auto", **options))(q, k, v)
    assert np.abs(whole - expected).max() < limit
    blank = jnp.full((2, 10, 2, 8), jnp.nan)  # never filled, so never to be seen
    cache = KeyValue(jnp.zeros_like(blank), jnp.zeros_like(blank))
    pieces, start = [], 0
    step = jit(lambda *x: attend(*x, "auto", **options))
    for length in 4, 1, 2:
        part = slice(start, start + length)
        out, cache = step(q[:, part], k[:, part], v[:, part], cache, start)
        pieces.append(out)
        start += length
    got = np.concatenate(pieces, axis=1)
    assert np.abs(got - expected).max() < limit
    np.testing.assert_array_equal(cache.keys[:, :start], k)


def test_rotation_keeps_lengths_and_depends_on_distance_only(small, rng, jit):
    x, y = rng.standard_normal((2, 1, 1, 1, small.head_dim)).astype(np.float32)
    turned = jit(lambda x, position: rotate(x, rope_table(small, position, 1)))
    products = [np.vdot(turned(x, at + 5), turned(y, at)) for at in (0, 1, 40)]
    # Angles of up to 45 radians carry errors of 45 * 2^-24 each.
    limit = 4 * 45 * 2**-24 * np.linalg.norm(x) * np.linalg.norm(y)
    assert max(products) - min(products) < limit
    assert abs(products[0] - np.vdot(x, y)) > 100 * limit
    assert np.linalg.norm(turned(x, 40)) == pytest.approx(np.linalg.norm(x), rel=1e-6)


def test_rope_table_matches_complex_powers(small, scaling):
    for config in small, dataclasses.replace(small, rope_scaling=scaling, rope_theta=500.0):
        table = rope_table(config, 3, 20)
        half = config.head_dim // 2
        frequencies = config.rope_theta ** -(np.arange(half) / half)
        if config.rope_scaling is not None:
            turns = 16 * frequencies / (2 * np.pi)
            share = np.clip((turns - 0.03) / (2.0 - 0.03), 0, 1)
            assert share[0] == 1 and share[-1] == 0 and 0 < share[1] < 1
            frequencies = frequencies * (share + (1 - share) / 4.0)
        angles = np.arange(3, 23)[:, None] * frequencies
        assert np.abs(np.asarray(table.cos) - np.cos(angles)).max() < 23 * 2**-23
        assert np.abs(np.asarray(table.sin) - np.sin(angles)).max() < 23 * 2**-23
