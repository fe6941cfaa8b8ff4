"""Every public operation where JAX refuses implicit promotion of ranks and of dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import (
    attention,
    dense,
    elementwise,
    fuse,
    gated_dense,
    gated_product,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rms_norm_with_rstd,
)
from normfuse.models import PRESETS
from normfuse.models.attention import KeyValue, attend, rope_table, rotate
from normfuse.models.sharding import Sharding
from normfuse.models.transformer import embed

f16, bf16, f32 = jnp.float16, jnp.bfloat16, jnp.float32
ones = jnp.ones
LABELS = jnp.arange(16)
MASK, IDS = ones((2, 1, 8, 8), bool), ones((2, 8), jnp.int32)
NORMS = {"rms_norm": rms_norm, "layer_norm": layer_norm}
gated = elementwise(
    "template <class T> T gated(T x, T g, float limit) { return (x < limit ? x : T(limit)) * g; }",
    derivative={"x": "x < limit ? g : T(0)", "g": "x < limit ? x : limit", "limit": "T(1)"},
    limit=1.0,
)


def of_norms(x, scale, residual):
    for name, op in NORMS.items():
        yield name, lambda x, s, op=op: op(x, s), (x, scale)
        yield f"{name} each", lambda x, s, op=op: op(x, s), (x[None], scale[None, None])
        yield f"{name} bias", lambda x, s, op=op: op(x, s, bias=s, scale_offset=1.0), (x, scale)
        yield f"{name} dtype", lambda x, s, op=op: op(x, s, dtype=f32), (x, scale)
        for r in (x, residual):
            call = lambda x, s, r, op=op: op(x, s, residual=r)
            yield f"{name} residual {r.dtype}", call, (x, scale, r)
        xla = lambda x, s, r, op=op: op(x, s, residual=r, implementation="xla")
        yield f"{name} xla", xla, (x, scale, x)
    yield "rms_norm before", lambda x, s: rms_norm(x, s, cast="before"), (x, scale)
    yield "rms_norm_with_rstd", rms_norm_with_rstd, (x, scale)


def of_layers(x, kernel, bias, quantization):
    options, name = {"quantization": quantization}, f" {kernel.dtype} {quantization}"
    for act in (None, "gelu"):
        call = lambda x, k, b, act=act: dense(x, k, b, activation=act, **options)
        yield f"dense {act}{name}", call, (x, kernel, bias)
    yield f"gated_dense{name}", lambda x, k: gated_dense(x, k, k, **options), (x, kernel)
    call = lambda x, k, b: gated_product(x, x, k, b, **options)
    yield f"gated_product{name}", call, (x, kernel, bias)
    call = lambda x, k: linear_cross_entropy(x, k, LABELS, **options)
    yield f"linear_cross_entropy{name}", call, (x, kernel)
    more = options | {"ignore": 3, "softcap": 30.0, "z_loss": 1e-3}
    call = lambda x, k, w: linear_cross_entropy(x, k, LABELS, weights=w, **more)
    yield f"linear_cross_entropy, weights{name}", call, (x, kernel, ones(16))


def of_attention(q, k):
    for length in (7,):  # no whole blocks
        kinds = {
            "": {},
            "causal": {"causal": True},
            "window": {"causal": True, "window": 3, "softcap": 20.0},
            "mask": {"causal": True, "mask": MASK[..., :length, :length]},
            "bias": {"bias": ones((4, length, length))},
            "segments": {"causal": True, "segment_ids": IDS[:, :length]},
        }
        for name, options in kinds.items():
            call = lambda q, k, options=options: attention(q, k, k, **options)
            yield f"attention {name} {length}", call, (q[:, :length], k[:, :length])
    config = dataclasses.replace(PRESETS["tiny"], head_dim=16)
    for start in (0, np.arange(2)):
        call = lambda q, start=start: rotate(q, rope_table(config, start, 8))
        yield f"rope {np.ndim(start)}", call, (q,)
        call = lambda q, k, start=start: attend(q, k, k, KeyValue(k, k), start, "auto", window=3)[0]
        yield f"cached {np.ndim(start)}", call, (q, k)


def of_fuse(x, kernel, quantization):
    def loss(x, k):
        return -jnp.mean(jax.nn.log_softmax((x @ k).astype(f32))[jnp.arange(16), LABELS])

    def check(report):
        assert not report.left and report.fused, report

    yield f"fuse {quantization}", fuse(loss, quantization=quantization, report=check), (x, kernel)


def table():
    x = ones((16, 16), f16)
    yield from of_norms(x, ones(16), x.astype(f32))
    yield from of_layers(x, x, ones(16), None)
    yield from of_layers(x.astype(bf16), ones((16, 16)), ones(16), "fp8")
    yield from of_attention(ones((2, 8, 4, 16), f16), ones((2, 8, 2, 16), f16))
    for quantization in (None, "fp8"):
        yield from of_fuse(x, ones((16, 2048), f16), quantization)
    yield "elementwise", lambda x, g: gated(x, g, limit=jnp.float32(2.0)), (x, x[0])
    yield "embed", lambda table: embed(IDS, table, "float16", Sharding()), (x,)


def loss(call):
    return lambda *args: sum(jnp.sum(r.astype(f32)) for r in jax.tree.leaves(call(*args)))


@pytest.mark.parametrize("call, args", [pytest.param(*row[1:], id=row[0]) for row in table()])
def test_every_op_under_strict_settings(call, args):
    """Its values, gradients, tangents and both of a batch, as in a program of one's own."""
    every = tuple(range(len(args)))

    def run(*args):
        gradient = jax.grad(loss(call), every)
        batch = [jnp.stack([a, a]) for a in args]
        tangents = jax.jvp(call, args, args)
        return call(*args), gradient(*args), tangents, jax.vmap(gradient)(*batch)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.jit(run).lower(*args)
        with jax.debug_nans(True):
            call(*args)
