"""Every operation exports with symbolic dimensions, forward and backward, and computes the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import normfuse as ours
from normfuse.native import _ext

LOSS, ATTENTION = ours.linear_cross_entropy, ours.attention
SAME = "template <class T> T scaled(T x, T y) { return x * y; }"
ROWS = "b,16"
KERNEL, BATCH = "16,32", "b,t,16"
LABELLED = [ROWS, KERNEL, "b"]
QKV = ["b,t,2,16", "b,s,1,16", "b,s,1,16"]
SELF = ["b,t,2,16", "b,t,1,16", "b,t,1,16"]


def some(function, **options):
    return functools.partial(function, **options)


def summed(kernel, batches):
    return ours.accumulate_gradients(lambda k, x: ours.dense(x, k).sum(), kernel, batches)


def plain_loss(x, kernel, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(x @ kernel), labels[:, None], 1)
    return -picked.mean()


def of_groups(x, kernel, labels):
    one = lambda x, labels: jax.grad(LOSS, 1)(x, kernel, labels, chunk_rows=4)
    return jax.vmap(one)(x, labels)


TABLE = {  # name -> (function, shapes; integers where a shape is in brackets)
    "rms_norm": (ours.rms_norm, [BATCH, "16"]),
    "rms_norm, features": (ours.rms_norm, ["b,n", "n"]),
    "rms_norm_with_rstd": (ours.rms_norm_with_rstd, [BATCH, "16"]),
    "rms_norm, residual": (lambda x, r, s: ours.rms_norm(x, s, residual=r), [BATCH, BATCH, "16"]),
    "layer_norm": (ours.layer_norm, [BATCH, "16", "16"]),
    "dense": (some(ours.dense, activation="gelu"), ["b,n", "n,m", "m"]),
    "dense, fp8": (some(ours.dense, quantization="fp8"), [BATCH, KERNEL]),
    "gated_dense": (ours.gated_dense, [BATCH, KERNEL, KERNEL]),
    "gated_dense, fp8": (some(ours.gated_dense, quantization="fp8"), [BATCH, KERNEL, KERNEL]),
    "gated_product": (ours.gated_product, [BATCH, BATCH, KERNEL]),
    "gated_product, fp8": (some(ours.gated_product, quantization="fp8"), [BATCH, BATCH, KERNEL]),
    "loss": (LOSS, LABELLED),
    "loss, of each row": (some(LOSS, reduction="none"), [BATCH, KERNEL, "b,t"]),
    "loss, in chunks": (
        some(LOSS, chunk_rows=4, with_lse=True, with_entropy=True, softcap=5.0, z_loss=0.1),
        LABELLED,
    ),
    "loss, with a remainder": (some(LOSS, chunk_rows=3, label_smoothing=0.1), LABELLED),
    "loss, vocabulary": (LOSS, ["b,n", "n,v", "b"]),
    "loss, fp8": (some(LOSS, quantization="fp8"), LABELLED),
    "loss, groups": (of_groups, [BATCH, KERNEL, "b,t"]),
    "attention": (ATTENTION, QKV),
    "attention, causal": (some(ATTENTION, causal=True), SELF),
    "attention, window": (some(ATTENTION, causal=True, window=3, softcap=5.0), SELF),
    "attention, bias": (lambda *a: ATTENTION(*a[:3], bias=a[3]), [*SELF, "b,1,t,t"]),
    "attention, segments": (lambda *a: ATTENTION(*a[:3], segment_ids=a[3]), [*SELF, "b,t"]),
    "elementwise": (ours.elementwise(SAME, definition=jnp.multiply), ["b,t", "t"]),
    "accumulate_gradients": (summed, [KERNEL, "2,b,16"]),
    "fuse": (ours.fuse(plain_loss, report=lambda report: None), [ROWS, "16,2048", "b"]),
}
SIZES = {"b": 8, "t": 6, "s": 7, "n": 16, "m": 32, "v": 40}
LABELS = {("b",): 2, ("b", "t"): 2}


@pytest.mark.parametrize("name", TABLE)
def test_export_with_symbolic_dimensions(name, rng):
    function, shapes = TABLE[name]
    scope, args, types = export.SymbolicScope(), [], []
    for i, shape in enumerate(shapes):
        size = [SIZES.get(n) or int(n) for n in shape.split(",")]
        if i == LABELS.get((*shape.split(","),)) or name.endswith("segments") and i == 3:
            args.append(jnp.asarray(np.sort(rng.integers(0, 16, size)), jnp.int32))
        else:
            args.append(jnp.asarray(rng.standard_normal(size) / 2, jnp.float32))
        symbolic = export.symbolic_shape(shape, scope=scope)
        types.append(jax.ShapeDtypeStruct(symbolic, args[-1].dtype))
    along = [i for i, a in enumerate(args) if a.dtype == jnp.float32]

    def both_ways(*args):
        total = lambda *args: sum(jnp.sum(a**2) for a in jax.tree.leaves(function(*args)))
        return function(*args), jax.grad(total, along)(*args)

    targets = {t for each in _ext.registrations().values() for t in each["targets"]}
    checks = [*map(export.DisabledSafetyCheck.custom_call, sorted(targets))]
    exported = export.export(jax.jit(both_ways), disabled_checks=checks)(*types)
    got = export.deserialize(exported.serialize()).call(*args)
    want = jax.jit(both_ways)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Sums of other chunks: some roundings of float32; in FP8 the same codes, and their scales.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))
