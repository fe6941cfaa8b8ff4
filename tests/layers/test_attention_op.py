"""attention: values, gradients, transformations, meshes, and which blocks and kernels serve."""

import functools
import itertools
import re
from dataclasses import replace

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import wide

import normfuse
from normfuse import attention
from normfuse.layers.attention import blocks, blocks_pay, calls, cudnn, op, served_by, serving
from normfuse.layers.attention.spec import Spec, numbers
from normfuse.native.jax_private import described_cudnn

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
_block = blocks._block


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Several blocks of each length here; for users there are several from 128 tokens on."""
    jax.clear_caches()
    blocks._block = lambda length, keys, *_: (min(length, 16), min(keys, 24))
    yield
    blocks._block = _block
    jax.clear_caches()


# ---------------------------------------------------------------- the formula in float64


class Reference:
    """out and the gradients of q, k, v and the bias in float64, and how far off they may be.

    Scores are off by a random walk of roundings in the compute dtype, and p by as much relative to
    itself. p, the gradient of the scores and all results are rounded to the dtype of q once.
    With `exact_products` only the bias's addition rounds scores, and it does so here too.
    """

    def __init__(
        self,
        q,
        k,
        v,
        dout,
        *,
        scale=None,
        softcap=None,
        bias=None,
        exact_products=False,
        dropout_mask=None,
        dropout_rate=0.0,
        **seen,
    ):
        half = lambda dtype: float(jnp.finfo(dtype).eps) / 2
        h, c = half(q.dtype), half(f32 if q.dtype != jnp.float64 else jnp.float64)
        walk = lambda n: c * (8 + np.sqrt(n))
        heads, kv_heads = q.shape[2], k.shape[2]
        group, width = heads // kv_heads, q.shape[3]
        keep = 1 - dropout_rate
        kept = 1.0 if dropout_mask is None else np.asarray(dropout_mask) / keep
        self.bias = bias
        q, k, v, dout = (np.moveaxis(wide(a), 2, 1) for a in (q, k, v, dout))
        k, v = (np.repeat(a, group, 1) for a in (k, v))
        turned = lambda a: np.swapaxes(a, -1, -2)
        joined = lambda a: a.reshape(len(a), kv_heads, group, *a.shape[2:]).sum(2)
        scale = 1 / np.sqrt(width) if scale is None else scale
        length, keys = q.shape[2], k.shape[2]

        s, off = scale * q @ turned(k), walk(width) * abs(scale) * abs(q) @ turned(abs(k))
        slope = 1.0
        if softcap is not None:
            bounded = np.tanh(s / softcap)
            s, slope, off = softcap * bounded, 1 - bounded**2, off + 8 * c * softcap
        if bias is not None:
            s = s + wide(bias)
            off = off + c * abs(s)
        if exact_products:
            s = wide(s.astype(np.float32))
            off = 8 * c * abs(s - np.max(s, -1, keepdims=True))
        s = np.where(self.seen(length, keys, **seen), s, -np.inf)
        most = np.max(s, -1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(most == -np.inf, 0, most))
        total = p.sum(-1, keepdims=True)
        p = p / np.where(total == 0, 1, total)
        off_p = p * (off + (p * off).sum(-1, keepdims=True) + walk(keys) + 8 * c)
        dropped, off_dropped = p * kept, kept * (off_p + h * p)
        out = dropped @ v
        off_out = (off_dropped + walk(keys) * dropped) @ abs(v) + h * abs(out)

        dp, along = kept * (dout @ turned(v)), (out * dout).sum(-1, keepdims=True)
        ds = p * (dp - along)
        off_dp = kept * walk(width) * (abs(dout) @ turned(abs(v)))
        off_along = (off_out * abs(dout)).sum(-1, keepdims=True) * (1 + walk(width) / h)
        off_ds = off_p * (abs(dp) + abs(along)) + p * (off_dp + off_along)
        dx = ds * slope * scale
        off_dx = abs(scale) * off_ds + abs(dx) * (h + 8 * c) + abs(ds * scale) * (off + 8 * c)
        sums = walk(keys) * abs(dx)
        dq, off_dq = dx @ k, (off_dx + sums) @ abs(k)
        sums = walk(length * group)
        dk, off_dk = turned(dx) @ q, turned(off_dx + sums * abs(dx)) @ abs(q)
        dv, off_dv = turned(dropped) @ dout, turned(off_dropped + sums * dropped) @ abs(dout)
        heads_last = lambda a: np.moveaxis(a, 1, 2)
        self.results = [
            (heads_last(out), heads_last(off_out)),
            (heads_last(dq), heads_last(off_dq) + h * abs(heads_last(dq))),
        ]
        for d, off_d in (dk, off_dk), (dv, off_dv):
            d, off_d = heads_last(joined(d)), heads_last(joined(off_d))
            self.results.append((d, off_d + h * abs(d)))
        if bias is not None:
            shape = (*[1] * (4 - bias.ndim), *bias.shape)
            axes = tuple(i for i, n in enumerate(shape) if n == 1)
            found, error = (a.sum(axes).reshape(bias.shape) for a in (ds, off_ds))
            rounding = half(bias.dtype) * abs(found) + walk(ds.size // bias.size) * abs(ds).sum(
                axes
            ).reshape(bias.shape)
            self.results.append((found, error + rounding))

    @staticmethod
    def seen(length, keys, *, mask=None, causal=False, window=None, segment_ids=None, lengths=None):
        behind = np.arange(length)[:, None] - np.arange(keys)
        seen = np.ones((1, 1, length, keys), bool)
        if causal:
            seen = seen & (behind >= 0)
        if window is not None:
            seen = seen & (behind < window)
        if mask is not None:
            seen = seen & np.asarray(mask)
        if segment_ids is not None:
            pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
            ids, others = map(np.asarray, pair)
            seen = seen & (ids[:, None, :, None] == others[:, None, None])
        if lengths is not None:
            rows, first = lengths if isinstance(lengths, tuple) else (length, lengths)
            first, rows = (np.reshape(n, (-1, 1, 1, 1)) for n in (first, rows))
            seen = seen & (np.arange(keys) < first) & (np.arange(length)[:, None] < rows)
        return seen

    def check(self, found):
        for (expected, error), a in zip(self.results, found, strict=True):
            assert a.shape == expected.shape
            floor = float(jnp.finfo(a.dtype).smallest_normal)
            off = np.abs(np.asarray(a, np.float64) - expected)
            assert (off <= error + floor).all(), (off / (error + floor)).max()


def draw(rng, dtype=f32, length=41, keys=None, heads=4, kv_heads=2, width=8, batch=2):
    """q, k, v and out's gradient."""
    keys = length if keys is None else keys
    sizes = zip((length, keys, keys), (heads, kv_heads, kv_heads))
    shapes = [(batch, n, h, width) for n, h in sizes]
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in (*shapes, shapes[0])]


def both(q, k, v, dout, bias=None, **options):
    """out and the gradients of q, k, v and the bias."""
    moving = [q, k, v] if bias is None else [q, k, v, bias]
    names = "mask", "segment_ids", "lengths", "dropout_mask"
    return _both(dout, moving, {n: options.pop(n, None) for n in names}, **options)


OPTIONS = "causal", "window", "softcap", "scale", "dtype", "implementation", "dropout_rate"


@functools.partial(jax.jit, static_argnames=OPTIONS)
def _both(dout, moving, arrays, **options):
    function = lambda q, k, v, bias=None: attention(q, k, v, bias=bias, **arrays, **options)
    out, pull = jax.vjp(function, *moving)
    return out, *pull(dout)


def options_of(rng, names, length, keys, dtype, batch=2, heads=4):
    """The options by name; a mask hides row 3, which then sees nothing, and much else."""
    found = {}
    for name in names:
        if name == "bias":
            bias = rng.standard_normal((1, heads, length, keys))
            found[name] = jnp.asarray(bias, dtype if dtype != f16 else f32)
        if name == "key bias":
            found["bias"] = jnp.asarray(rng.standard_normal((batch, 1, 1, keys)), f32)
        if name == "mask":
            mask = rng.random((batch, 1, length, keys)) < 0.5
            mask[:, :, 3] = False
            found[name] = jnp.asarray(mask)
        if name == "padding":
            found["mask"] = jnp.arange(keys) < jnp.array([keys, keys // 3])[:, None, None, None]
        if name == "causal":
            found[name] = True
        if name == "window":
            found |= {"causal": True, "window": 10}  # reaches one key of a block: row 32 key 23
        if name == "segments":
            ids = np.sort(rng.integers(0, 4, (batch, max(length, keys))), axis=1)
            ids = jnp.asarray(ids, jnp.int32)
            found["segment_ids"] = (
                ids[:, :length] if length == keys else (ids[:, :length], ids[:, :keys])
            )
        if name == "lengths":
            found[name] = jnp.asarray([length, length // 2]), jnp.asarray([keys // 3, keys + 5])
        if name == "key lengths":
            found["lengths"] = jnp.asarray([keys // 3, 0])
        if name.startswith("dropout"):  # row 1 keeps nothing
            shape = (1, 1) if name == "dropout of all" else (batch, heads)
            kept = rng.random((*shape, length, keys)) < 0.7
            kept[:, :, 1] = False
            found |= {"dropout_mask": jnp.asarray(kept), "dropout_rate": 0.3}
        if name == "softcap":
            found[name] = 2.0
        if name == "scale":
            found[name] = -0.6
    return found


CASES = [
    ("bias", "", "causal", "", "", "", "bfloat16"),
    ("bias", "padding", "window", "segments", "softcap", "scale", "float16"),
    ("", "mask", "", "segments", "", "", "float32"),
    ("key bias", "padding", "", "", "softcap", "", "bfloat16"),
    ("key bias", "", "window", "segments", "", "scale", "float32"),
    ("bias", "mask", "window", "segments", "softcap", "", "float64"),
    ("bias", "padding", "causal", "dropout", "", "", "bfloat16"),
    ("key bias", "mask", "", "dropout of all", "softcap", "scale", "float64"),
    ("", "", "window", "segments", "dropout", "lengths", "float32"),
    ("bias", "", "causal", "key lengths", "", "", "float16"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(filter(None, case)))
def test_values_and_gradients_are_those_of_float64(rng, case):
    *names, dtype = case
    with jax.enable_x64(dtype == "float64"):
        operands = draw(rng, jnp.dtype(dtype))
        options = options_of(rng, names, 41, 41, jnp.dtype(dtype))
        found = both(*operands, **options)
    Reference(*operands, **options).check(found)


@pytest.mark.parametrize(
    "length, keys, names",
    [
        (1, 50, ["bias"]),
        (50, 1, ["segments", "window"]),
        (70, 33, ["segments", "window", "bias"]),
    ],
)
def test_lengths(rng, length, keys, names):
    operands = draw(rng, length=length, keys=keys)
    options = options_of(rng, names, length, keys, f32)
    Reference(*operands, **options).check(both(*operands, **options))


@pytest.mark.optimized
def test_length_2049_in_the_blocks_of_users(rng, monkeypatch):
    monkeypatch.setattr(blocks, "_block", _block)
    operands = draw(rng, bf16, length=2049, heads=2, kv_heads=1, batch=1)
    options = {"causal": True, "window": 700}
    Reference(*operands, **options).check(both(*operands, **options))


def test_heads_that_all_share_keys(rng):
    operands = draw(rng, heads=3, kv_heads=1)
    Reference(*operands, causal=True).check(both(*operands, causal=True))


@pytest.mark.parametrize("offset", [30, -1e6, 1e9])
def test_rows_far_from_0_have_exact_derivatives(rng, offset):
    """p is that of the rounded scores, though the log of a row's sum is lost beside its scores."""
    draw_8ths = lambda *shape: rng.integers(-8, 9, shape) / 8  # products are exact in any order
    q, k, v = (jnp.asarray(draw_8ths(2, 41, heads, 8), f32) for heads in (4, 2, 2))
    dout = jnp.asarray(rng.standard_normal(q.shape), f32)
    bias = jnp.where(jnp.arange(41)[:, None] % 3 == 0, 0.0, offset)
    reference = Reference(q, k, v, dout, bias=bias, scale=1.0, exact_products=True)
    reference.results.pop()  # the bias's gradient
    along = [jnp.asarray(rng.standard_normal(a.shape), f32) for a in (q, k, v)]
    reference.check(both(q, k, v, dout, bias, scale=1.0)[:4])
    moved = _tangent((q, k, v), tuple(along), bias)
    gradients = list(zip(reference.results[1:], along))
    expected = sum(np.sum(gradient * wide(t)) for (gradient, _), t in gradients)
    error = sum(np.sum(off * abs(wide(t))) for (_, off), t in gradients)
    assert abs(np.sum(wide(moved) * wide(dout)) - expected) <= error


@jax.jit
def _tangent(operands, along, bias):
    return jax.jvp(lambda *qkv: attention(*qkv, bias=bias, scale=1.0), operands, along)[1]


def test_rows_that_see_nothing_give_0_and_no_gradient(rng):
    q, k, v, dout = draw(rng)
    mask = jnp.ones((2, 1, 41, 41), bool).at[0, 0, 5:20].set(False)
    bias = jnp.zeros((41, 41)).at[30].set(-jnp.inf)
    out, dq, dk, dv, dbias = both(q, k, v, dout, bias, mask=mask)
    assert not out[0, 5:20].any() and not dq[0, 5:20].any()
    assert not out[:, 30].any() and not dq[:, 30].any() and not dbias[30].any()
    assert all(jnp.isfinite(a).all() for a in (out, dq, dk, dv, dbias))
    for a in both(q, k, v, dout, bias, mask=jnp.zeros_like(mask)):
        assert not a.any()


def test_empty_arrays():
    for batch, length, keys in (0, 3, 3), (2, 0, 3), (2, 3, 0):
        q, k = jnp.ones((batch, length, 4, 8)), jnp.ones((batch, keys, 2, 8))
        bias = jnp.ones((batch, 1, length, keys))
        out, dq, dk, dv, dbias = both(q, k, k, q, bias)
        assert out.shape == q.shape and dk.shape == k.shape and dbias.shape == bias.shape
        assert not any(a.any() for a in (out, dq, dk, dv))


def test_dtype_is_that_of_the_products_and_the_result(rng):
    q, k, v, dout = draw(rng)
    out, dq, dk, dv = both(q, k, v, dout.astype(bf16), dtype=bf16)
    narrow = both(*[a.astype(bf16) for a in (q, k, v, dout)])
    assert out.dtype == bf16 and dq.dtype == dk.dtype == dv.dtype == f32
    for a, b in zip((out, dq, dk, dv), narrow):
        np.testing.assert_array_equal(a, b.astype(a.dtype))


# ---------------------------------------------------------------- derivatives and transformations


def plain(q, k, v, bias, *, mask, softcap, lengths, dropout_mask, dropout_rate):
    """In plain JAX, for derivatives that have no formula here."""
    k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
    s = jnp.einsum("bthw,bshw->bhts", q, k) / np.sqrt(q.shape[-1])
    s = softcap * jnp.tanh(s / softcap) + bias
    mask = mask & (jnp.arange(k.shape[1]) < lengths[:, None, None, None])
    p = jax.nn.softmax(jnp.where(mask, s, -1e30)) * dropout_mask / (1 - dropout_rate)
    return jnp.einsum("bhts,bshw->bthw", jnp.where(mask.any(-1, keepdims=True), p, 0), v)


@pytest.fixture
def functions(rng):
    """Ours and plain JAX's as functions of (q, k, v, bias), these, and tangents of them."""
    operands = draw(rng, length=33)
    options = options_of(rng, ("bias", "mask", "key lengths", "dropout", "softcap"), 33, 33, f32)
    bias = options.pop("bias")
    ours = lambda q, k, v, bias: attention(q, k, v, bias=bias, **options)
    theirs = functools.partial(plain, **options)
    at = [*operands[:3], bias]
    along = [jnp.asarray(rng.standard_normal(a.shape), f32) for a in at]
    return ours, theirs, at, along


def close(found, expected, tolerance=2e-5):
    """Sums in another order, of at most 33 terms and a few products."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance * np.abs(b).max())


def test_forward_mode(functions):
    ours, theirs, at, along = functions

    def one(f, i):  # a tangent of one operand alone
        return jax.jvp(lambda a: f(*at[:i], a, *at[i + 1 :]), [at[i]], [along[i]])

    run = lambda f: jax.jit(lambda: [jax.jvp(f, at, along), *[one(f, i) for i in range(4)]])()
    close(run(ours), run(theirs))


def test_second_derivatives(functions):
    ours, theirs, at, along = functions

    def run(f):
        gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2, 3))
        inner = lambda *a: sum(jnp.sum(g * t) for g, t in zip(gradient(*a), along))
        forward_over_reverse = jax.jvp(gradient, at, along)
        reverse_over_reverse = jax.grad(inner, (0, 1, 2, 3))(*at)
        twice = jax.jvp(lambda *a: jax.jvp(f, a, tuple(along))[1], at, along)[1]
        return forward_over_reverse, reverse_over_reverse, twice

    close(jax.jit(lambda: run(ours))(), jax.jit(lambda: run(theirs))())


@pytest.mark.parametrize("axes", [(None, None, None, 0), (1, 2, 0, None)], ids=str)
def test_vmap(functions, axes):
    """As the examples one by one."""
    ours, _, at, _ = functions
    stack = lambda a, axis: a if axis is None else jnp.stack([a, -a, a / 2], axis)
    stacked = [stack(a, axis) for a, axis in zip(at, axes)]
    every = jax.vmap(ours, axes)
    loss = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a)))

    @jax.jit
    def run(*a):
        return (
            *jax.jvp(every, a, a),
            jax.grad(loss(every), (0, 1, 2, 3))(*a),
            jax.vmap(jax.grad(loss(ours), (0, 3)), axes)(*a),
        )

    @jax.jit
    def one(*a):
        return *jax.jvp(ours, a, a), jax.grad(loss(ours), (0, 1, 2, 3))(*a)

    take = lambda a, axis, i: a if axis is None else jnp.take(a, i, axis)
    examples = [one(*[take(a, axis, i) for a, axis in zip(stacked, axes)]) for i in range(3)]
    out, moved, gradients = (list(parts) for parts in zip(*examples))
    gradients = [jnp.stack(g) for g in zip(*gradients)]
    whole = [g.sum(0) if n is None else jnp.moveaxis(g, 0, n) for g, n in zip(gradients, axes)]
    expected = jnp.stack(out), jnp.stack(moved), tuple(whole), (gradients[0], gradients[3])
    close(run(*stacked), expected)


def test_remat_keeps_what_a_policy_names(functions):
    ours, _, at, _ = functions
    for names, forwards in ((), 2), (("attention", "attention_lse"), 1):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(lambda *a: jnp.sin(ours(*a)), policy=policy)
        gradient = jax.grad(lambda *a, layer=layer: jnp.sum(layer(*a)), (0, 1, 2, 3))
        program = str(jax.make_jaxpr(gradient)(*at))
        assert len(re.findall(r"normfuse_attention\[", program)) == forwards


def test_export_of_any_length(rng):
    q, k, v, _ = draw(rng)
    b, t = jax.export.symbolic_shape("b, t")
    shapes = [jax.ShapeDtypeStruct((b, t, *a.shape[2:]), f32) for a in (q, k, v)]
    function = functools.partial(attention, causal=True)
    exported = jax.export.export(jax.jit(function))(*shapes)
    close(exported.call(q, k, v), function(q, k, v))


def test_log_sum_exps_are_not_computed_where_nobody_uses_them(rng):
    q, k, v, _ = draw(rng)
    text = jax.jit(attention).lower(q, k, v).as_text()
    assert (
        "stablehlo.log" not in text
        and "stablehlo.log"
        in jax.jit(jax.grad(lambda q: attention(q, k, v).sum())).lower(q).as_text()
    )


# ---------------------------------------------------------------- meshes


def sharded_case(rng, heads, kv_heads):
    q, k, v, dout = draw(rng, heads=heads, kv_heads=kv_heads, batch=4, length=20)
    bias = jnp.asarray(rng.standard_normal((1, heads, 20, 20)), f32)
    mask = jnp.asarray(rng.random((4, 1, 20, 20)) < 0.7)
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (4, 20)), axis=1), jnp.int32)
    return q, k, v, bias, dout, mask, ids


def sharded(q, k, v, bias, dout, mask, ids):
    """out and the gradients of q, k and v; with the bias's they would communicate that."""
    function = lambda q, k, v: attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        segment_ids=ids,
        lengths=20 - ids[:, -1],
        dropout_mask=mask[..., ::-1],
        dropout_rate=0.3,
        causal=True,
        softcap=3.0,
    )
    out, pull = jax.vjp(function, q, k, v)
    return out, *pull(dout)


MESHES = {  # q's axes of batch and heads, and how many heads of keys
    "batch": (("x", "y"), None, 4),
    "heads": (None, ("x", "y"), 4),
    "heads that share keys": (None, ("x", "y"), 1),
    "batch and heads that share keys": ("x", "y", 1),
}
KINDS = [AxisType.Auto, AxisType.Explicit]


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


@pytest.mark.parametrize("name, kind", half(MESHES, KINDS), ids=str)
def test_batch_and_heads_are_split_without_communication(eight_devices, rng, name, kind):
    batch, heads, kv_heads = MESHES[name]
    case = sharded_case(rng, 8, kv_heads)
    shared = heads if kv_heads == 4 else None
    rows, keys = P(batch, None, heads), P(batch, None, shared)
    specs = [rows, keys, keys, P(None, heads), rows, P(batch), P(batch)]
    mesh = mesh_of(kind)
    places = [NamedSharding(mesh, spec) for spec in specs]
    auto = {"out_shardings": tuple(places[:1] + places[:3])} if kind == AxisType.Auto else {}
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(*pair) for pair in zip(case, places)]
        compiled = jax.jit(sharded, **auto).lower(*arrays).compile()
        found = compiled(*arrays)
    close(found, jax.jit(sharded)(*case))
    for a, place in zip(found, places[:1] + places[:3]):
        assert a.sharding.is_equivalent_to(place, a.ndim)
    # Devices that share a head of keys add up its gradients.
    added = 2 * 4 * 20 * 8 // (2 if batch else 1) if heads and kv_heads == 1 else 0
    assert hlo.communicated(compiled) == ({("all-reduce", "f32"): added} if added else {})


def test_keys_that_are_stored_otherwise(eight_devices, rng):
    """Heads over more devices than there are heads of keys, and k and v in parts of their own."""
    case = sharded_case(rng, 8, 2)
    specs = [P(None, None, ("x", "y")), P("y"), P(None, "x"), P(), P(), P("x"), P(None, "y")]
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(case, specs)]
        found = jax.jit(sharded)(*arrays)
    close(found, jax.jit(sharded)(*case))


def test_the_gradient_of_a_bias_is_added_up(eight_devices, rng):
    q, k, v, bias, dout, mask, _ = sharded_case(rng, 8, 4)
    gradient = jax.grad(
        lambda q, k, v, dout, mask, bias: jnp.sum(attention(q, k, v, bias=bias, mask=mask) * dout),
        5,
    )
    expected = jax.jit(gradient)(q, k, v, dout, mask, bias)
    for kind in KINDS:
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh):
            put = lambda a, spec, mesh=mesh: jax.device_put(a, NamedSharding(mesh, spec))
            rows = P("x", None, "y")
            operands = [*[put(a, rows) for a in (q, k, v, dout)], put(mask, P("x"))]
            found = jax.jit(gradient)(*operands, put(bias, P(None, "y")))
        close(found, expected)


def test_in_shard_map(eight_devices, rng):
    case = sharded_case(rng, 8, 4)
    rows, keys = P("x", None, "y"), P("x", None, "y")
    specs = (rows, keys, keys, P(None, "y"), rows, P("x"), P("x"))
    run = jax.shard_map(sharded, mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=rows)
    compiled = jax.jit(run).lower(*case).compile()
    close(compiled(*case), jax.jit(sharded)(*case))
    assert not hlo.communicated(compiled)


def test_keys_that_do_not_vary_in_shard_map(eight_devices, rng):
    q, k, v, _ = draw(rng, batch=4)
    q = jnp.concatenate([q] * 2)
    loss = lambda q, k, v: jnp.sum(jnp.sin(attention(q, k, v, causal=True)))

    @functools.partial(
        jax.shard_map, mesh=mesh_of(AxisType.Auto), in_specs=(P("x"), P(), P()), out_specs=P()
    )
    def run(q, k, v):
        return jax.grad(lambda k: jax.lax.pmean(loss(q, k, v), "x"))(k)

    expected = sum(jax.grad(loss, 1)(part, k, v) for part in (q[:4], q[4:])) / 2
    close(jax.jit(run)(q, k, v), expected)


# ---------------------------------------------------------------- blocks


@pytest.mark.optimized
def test_memory_is_linear_in_the_length(monkeypatch):
    """No temporary of the forward and backward is of length times length."""
    monkeypatch.setattr(blocks, "_block", _block)
    memory = []
    for length in 4096, 8192:
        q, k = (jax.ShapeDtypeStruct((1, length, heads, 16), f32) for heads in (2, 1))
        loss = lambda q, k, v: jnp.sum(attention(q, k, v, causal=True) ** 2)
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k).compile()
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        assert memory[-1] < length * length
    assert memory[1] < 2.1 * memory[0]


def test_blocks_that_are_hidden_are_skipped(rng):
    """NaN in a block of values spreads to the rows that see a key of the block, and no further."""
    q, k, v, _ = draw(rng, length=96)
    spoilt = v.at[:, 48:72].set(jnp.nan)  # blocks have 16 queries and 24 keys
    rows = jnp.arange(96)
    mask = jnp.asarray((rows[:, None] // 48 == rows // 48)[None, None])
    cases = [
        ({"causal": True, "window": 8}, (rows < 48) | (rows >= 80)),
        ({"mask": mask}, rows < 48),
        ({"segment_ids": jnp.tile(rows // 48, (2, 1))}, rows < 48),
    ]
    for options, clean in cases:
        function = jax.jit(functools.partial(attention, **options))
        found = function(q, k, spoilt)
        close(found[:, clean], function(q, k, v)[:, clean])
        assert jnp.isnan(found[:, 48:72]).all()
    first = jax.jit(
        functools.partial(attention, lengths=(jnp.asarray([96, 9]), jnp.asarray([48, 5])))
    )
    close(first(q, k, spoilt), first(q, k, v))


# ---------------------------------------------------------------- on GPUs


def served(function, *operands):
    """The kernels of cuDNN in the program for an NVIDIA GPU, and whether there are blocks."""
    with described_cudnn(91_400):
        text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return sorted(re.findall(r"__cudnn\$fmha(\w+)", text)), "stablehlo.while" in text


def of_gpu(dtype=bf16, length=64, keys=None, width=64, bias=None, mask=None, **options):
    shapes = [(2, n, h, width) for n, h in ((length, 4), (keys or length, 2), (keys or length, 2))]
    operands = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    extras = {"bias": (bias, dtype), "mask": (mask, bool)}
    extras = {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in extras.items() if s is not None}
    count = 3 + (bias is not None)

    def gradients(*operands):
        function = lambda *moving: attention(
            *(moving + operands[count:])[:3],
            **dict(zip(extras, (moving + operands[count:])[3:])),
            **options,
        )
        loss = lambda *moving: jnp.sum(function(*moving).astype(f32))
        return jax.grad(loss, tuple(range(count)))(*operands[:count])

    return served(gradients, *operands, *extras.values())


PLAIN = ["Softmax", "SoftmaxBackward"]
MASKED = ["ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"]
PADDED = MASKED + PLAIN  # a mask may hide nothing but padding
SQUARE = MASKED + PLAIN * 2  # the same for the mask of `causal`
# All keys, then those that are kept; these, then the dropped ones.
DROPPED = ["Softmax", "ScaleBiasSoftmax", *["ScaleBiasSoftmaxBackward"] * 2]
IDS = jnp.zeros((2, 64), int)
ON_GPU = {
    "plain": ({}, PLAIN),
    "float16": ({"dtype": f16}, PLAIN),
    "causal": ({"causal": True, "window": 9, "scale": 0.3}, PLAIN),
    "odd": ({"length": 63, "causal": True}, PLAIN),
    "odd masked": ({"length": 63, "causal": True, "mask": (63, 63)}, PADDED),
    "odd mask": ({"length": 63, "mask": (2, 1, 63, 63)}, SQUARE),
    "odd padding": ({"length": 63, "mask": (2, 1, 1, 63)}, PADDED),
    "odd keys": ({"length": 64, "keys": 31, "mask": (64, 31), "bias": (4, 64, 31)}, MASKED * 2),
    "odd rows' mask": ({"length": 63, "mask": (63, 1)}, MASKED),
    "odd bias": ({"length": 63, "bias": (63, 63)}, MASKED),
    "odd, of images": ({"length": 257, "width": 80}, PLAIN),
    "odd segments": ({"length": 63, "segment_ids": jnp.zeros((2, 63), int)}, MASKED),
    "one query": ({"length": 1, "keys": 63, "mask": (63,)}, "blocks"),
    "other keys": ({"keys": 32}, PLAIN),
    "bias": ({"bias": (4, 64, 64)}, MASKED),
    "key bias": ({"bias": (64,), "causal": True}, MASKED),
    "mask": ({"mask": (2, 1, 64, 64)}, SQUARE),
    "mask of heads": ({"mask": (4, 1, 64)}, MASKED + PLAIN),
    "window": ({"causal": True, "window": 9, "mask": (2, 1, 64, 64)}, PADDED),
    "lengths": ({"lengths": jnp.zeros((2,), int)}, PLAIN),
    "lengths, causal": ({"lengths": (IDS[:, 0], IDS[:, 0]), "causal": True}, PLAIN),
    "lengths and mask": ({"lengths": IDS[:, 0], "mask": (2, 1, 1, 64)}, MASKED),
    "dropout": ({"dropout_mask": jnp.ones((64, 64), bool)}, DROPPED),
    "dropout, padding": (
        {"dropout_mask": jnp.ones((4, 64, 64), bool), "mask": (2, 1, 1, 64), "causal": True},
        DROPPED + ["ScaleBiasSoftmax", "ScaleBiasSoftmax"] + ["ScaleBiasSoftmaxBackward"] * 2,
    ),
    "padding": ({"mask": (2, 1, 1, 64)}, PADDED),
    "segments": ({"segment_ids": jnp.zeros((2, 64), int)}, MASKED),
    "float32": ({"dtype": f32}, "blocks"),
    "softcap": ({"softcap": 50.0}, "blocks"),
    "width 256": ({"width": 256}, "blocks"),
    "width 60": ({"width": 60}, "blocks"),
    "causal, other keys": ({"keys": 32, "causal": True}, "blocks"),
    "asked for": ({"implementation": "xla"}, "blocks"),
}


ON_HOPPER = {  # segments in rows are packed, by kernels for few of them and for many
    "segments": ({"segment_ids": IDS}, MASKED + PLAIN),
    "many segments": (
        {"segment_ids": jnp.zeros((2, 2048), int), "causal": True, "length": 2048},
        MASKED + PLAIN,
    ),
    "segments, window": ({"segment_ids": IDS, "causal": True, "window": 9}, MASKED),
    "segments, bias": ({"segment_ids": IDS, "bias": (64, 64)}, MASKED),
    "width 256": ({"width": 256, "causal": True}, PLAIN),
}


@pytest.mark.parametrize("name", [*ON_GPU, *(f"{name}, Hopper" for name in ON_HOPPER)])
def test_what_serves_on_gpus(name, monkeypatch):
    if name.endswith(", Hopper"):
        monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_90")
    monkeypatch.setattr(cudnn, "_CHOICE", 2)
    options, expected = (ON_GPU | {f"{n}, Hopper": case for n, case in ON_HOPPER.items()})[name]
    found = of_gpu(**options)
    assert found == (([], True) if expected == "blocks" else (sorted(expected), False))


def test_few_scores_are_one_block_on_gpus(monkeypatch):
    """A loop would add up the gradients of keys in memory, and read its end from the device."""
    monkeypatch.setattr(blocks, "_block", _block)
    assert of_gpu(dtype=f32, mask=(64,)) == ([], False)
    assert _block(577, 577, 32 * 16, True) == (577, 577)
    rows, keys = _block(2048, 2048, 128, True)
    assert 256 <= rows == keys < 2048


def test_blocks_pay_where_probabilities_are_large(monkeypatch):
    like = lambda *shape: jax.ShapeDtypeStruct(shape, f32)
    short, long = like(8, 256, 16, 64), like(8, 1024, 16, 64)
    assert blocks_pay(short, short) and blocks_pay(long, long)  # on a CPU
    monkeypatch.setattr(serving, "_capability", lambda: 90)
    assert not blocks_pay(short, short) and blocks_pay(long, long)


def test_dropout_of_each_head_takes_cudnn():
    """The user has a mask of all scores, so there may be others as large."""
    q, kept = (
        jax.ShapeDtypeStruct(s, d)
        for s, d in (((8, 2048, 20, 64), bf16), ((8, 20, 2048, 2048), bool))
    )
    assert "cuDNN, twice: dropout" in served_by(q, q, q, dropout_mask=kept, dropout_rate=0.1)


@pytest.mark.parametrize("keys", [510, 512])
def test_short_masks_are_masks_alone(keys):
    """A kernel that is not wanted would take longer than the mask."""
    assert of_gpu(keys=keys, mask=(keys,)) == (sorted(MASKED if keys == 510 else PADDED), False)


def test_transformations_on_gpus(monkeypatch):
    """One call of cuDNN for a batch of batches; forward mode in plain JAX, beside its primal."""
    monkeypatch.setattr(cudnn, "_CHOICE", 2)
    q, k = (jax.ShapeDtypeStruct((3, 2, 64, heads, 64), bf16) for heads in (4, 2))
    mask = jax.ShapeDtypeStruct((2, 1, 1, 64), bool)
    call = lambda q, k, v, mask: attention(q, k, v, mask=mask)
    loss = lambda q, k, v, mask: jnp.sum(jax.vmap(call, (0, 0, 0, None))(q, k, v, mask).astype(f32))
    gradient = jax.grad(loss, (0, 1, 2))
    assert served(gradient, q, k, k, mask) == (sorted(PADDED), False)
    layer = jax.checkpoint(lambda x, k, mask: x + jax.vmap(call, (0, 0, 0, None))(x, k, k, mask))
    steps = lambda q, k, mask: jax.lax.scan(lambda x, _: (layer(x, k, mask), None), q, length=3)[0]
    kernels, _ = served(jax.grad(lambda *a: jnp.sum(steps(*a).astype(f32))), q, k, mask)
    assert kernels == sorted([*PADDED, "ScaleBiasSoftmax", "Softmax"])  # recomputed once
    moved = lambda q, k, mask: jax.jvp(lambda q: loss(q, k, k, mask), (q,), (q,))
    assert served(moved, q, k, mask) == (["ScaleBiasSoftmax", "Softmax"], False)
    twice = lambda q, k, mask: jax.jvp(lambda q: gradient(q, k, k, mask)[0], (q,), (q,))[1]
    served(twice, q, k, mask)  # the formula, which nothing refuses


ODD = {  # lengths of queries and keys, and options
    "causal and mask": (9, 9, ["causal", "mask", "segments"]),
    "padding": (9, 9, ["padding", "softcap"]),
    "keys": (8, 13, ["mask"]),
    "no mask": (9, 9, ["bias"]),
    "lengths": (8, 13, ["lengths", "dropout"]),
    "segments": (9, 9, ["segments", "key lengths"]),
}


@pytest.mark.parametrize("name", ODD)
def test_another_row_and_key_of_odd_lengths_change_nothing(name, rng, monkeypatch):
    """With another row and key, by blocks instead of cuDNN, values and gradients are the same."""
    length, keys, names = ODD[name]
    operands, even = draw(rng, length=length, keys=keys), []
    options = options_of(rng, names, length, keys, f32)

    def padded(function, dims):
        def whole(spec, *arrays):
            even.append((arrays[0].shape[-4], arrays[1].shape[-3]))
            return function(spec, *arrays)

        return lambda spec, *arrays, gpu=False: cudnn._of_even_length(
            whole, spec, dims(spec, arrays[0].ndim), arrays
        )

    expected = both(*operands, **options)
    monkeypatch.setattr(op._forward, "definition", padded(blocks.forward, Spec.forward_dims))
    monkeypatch.setattr(op._gradients, "definition", padded(blocks.gradients, Spec.gradients_dims))
    jax.clear_caches()
    close(both(*operands, **options), expected)
    jax.clear_caches()
    assert {*even} == {(length + length % 2, keys + keys % 2)}


@pytest.mark.parametrize("length", [64, 1022, 2048])
def test_packed_segments_stay_within_their_memory(length, monkeypatch):
    """That of two segments is the least, whatever the length: else the mask serves."""
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_90")
    ids = jnp.zeros((2, length), int)
    least = 2 * 8 * length * 2 * 64  # float32 sums of two segments' dq, dk, dv of a head of keys
    for size, kernels in (least, MASKED + PLAIN), (least - 1, MASKED):
        monkeypatch.setattr(cudnn, "_PACKED", size)
        assert of_gpu(segment_ids=ids, length=length, causal=True) == (
            sorted(kernels),
            size == least,
        )


FIRST = lambda *counts, size=8: np.arange(size) < np.asarray(counts)[:, None]
LOWER = np.tril(np.ones((8, 8), bool))
PADDING = {  # mask, and (rows, keys) of each sequence, of causal attention, or of all keys
    "keys": (FIRST(3, 8)[:, None], None, ([8, 8], [3, 8])),
    "keys for all": (FIRST(5), None, ([8, 8], [5, 5])),
    "no key": (FIRST(3, 0)[:, None], None, ([8, 8], [3, 0])),
    "keys at the end": (~FIRST(3, 5)[:, None], None, None),
    "a hole": (FIRST(3, 8)[:, None] ^ FIRST(2)[:, None], None, None),
    "keys and rows": (FIRST(3, 8)[:, None] & FIRST(5, 8)[..., None], None, ([5, 8], [3, 8])),
    "a row more": (FIRST(3, 8)[:, None] | FIRST(1, 1)[..., None], None, None),
    "causal": (LOWER, ([8, 8], [8, 8]), None),
    "causal, keys": (LOWER & FIRST(3, 7)[:, None], ([8, 8], [3, 7]), None),
    "causal, rows": (LOWER & FIRST(3, 7)[..., None], ([3, 7], [3, 7]), None),
    "causal, both": (
        LOWER & (FIRST(3, 7)[:, None] & FIRST(6, 8)[..., None]),
        ([6, 8], [3, 7]),
        None,
    ),
    "causal, the first key away": (LOWER & ~FIRST(1)[:, None], None, None),
    "a row of causal is whole": (LOWER | FIRST(1)[..., None], None, None),
    "all": (np.ones((8, 8), bool), None, ([8, 8], [8, 8])),
}


@pytest.mark.parametrize("name", PADDING)
def test_padding_is_what_a_mask_leaves_of_each_sequence(name, rng, monkeypatch):
    """JAX's attention of these lengths is that of the mask, whose kernel serves other masks."""
    mask, *expected = PADDING[name]
    mask = jnp.asarray(mask[(None,) * (3 - mask.ndim)][:, None])
    theirs = jax.nn.dot_product_attention
    on_cpu = lambda *a, **options: theirs(*a, **options | {"implementation": "xla"})
    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    q, k, v, _ = draw(rng, length=8, keys=8)
    q = q.reshape(*q.shape[:2], 2, 2, -1)
    d, extent = numbers(q.ndim), mask.shape[-2] > 1
    batch = d.batch if len(mask) > 1 else ()
    dims = (*batch, *([d.length] if extent else []), d.keys)
    array = mask.reshape([n for n in mask.shape if n > 1])
    spec = Spec(scale=0.7, extras=(("mask", dims),))

    @jax.jit
    def run(q, k, v, array):
        found = []
        for flag, call in cudnn._without_mask(spec, q, k, {"mask": array}):
            out = call.only_seen(call.attend(*call.flat(q, k, v), *call.operands), 0)
            found.append((flag, jnp.asarray(call._spec.causal), call._lengths, out))
        return found

    want = attention(q.reshape(*q.shape[:2], 4, -1), k, v, mask=mask, scale=0.7)
    chosen = [found for found in run(q, k, v, array) if found[0]]
    assert len(chosen) == (expected != [None, None])
    for _, causal, lengths, out in chosen:
        close(out, want)
        assert bool(causal) == (expected[0] is not None)
        assert [n.tolist() for n in lengths] == [*(expected[0] or expected[1])]


# ---------------------------------------------------------------- cuDNN's kernels, emulated


def emulated_scores(call, q, k):
    """The scores of a call of cuDNN, and which of its sequences it computes anything for."""
    group = q.shape[2] // k.shape[2]
    s = jnp.einsum("bthw,bshw->bhts", q, jnp.repeat(k, group, 2)) * call._spec.scale
    for operand in call.operands:
        s += operand if call.has_bias else jnp.where(operand, 0, -(2.0**41))
    length, keys = s.shape[2:]
    if call._spec.causal:
        assert call._window is None or not call.operands
        near = calls.reached(replace(call._spec, window=call._window), length, keys)
        s = jnp.where(near, s, -jnp.inf)
    given = call.kernel_lengths()
    rows, first = ([length], [keys]) if given[0] is None else given
    rows, first = (jnp.reshape(jnp.asarray(n), (-1, 1, 1, 1)) for n in (rows, first))
    inside = (jnp.arange(length)[:, None] < rows) & (jnp.arange(keys) < first)
    return jnp.where(inside, s, -jnp.inf), (rows > 0) & (first > 0)


def emulated_forward(call, qkv):
    """out and lse; NaN for what the kernel does not write."""
    q, k, v = qkv
    s, done = emulated_scores(call, q, k)
    lse = jnp.where(done[..., 0], jax.nn.logsumexp(s, -1), jnp.nan)
    v = jnp.repeat(v, q.shape[2] // k.shape[2], 2)
    return [jnp.einsum("bhts,bshw->bthw", jnp.exp(s - lse[..., None]), v), lse]


def emulated_backward(call, qkv, out, lse, dout):
    q, k, v = qkv
    group, scale = q.shape[2] // k.shape[2], call._spec.scale
    s, done = emulated_scores(call, q, k)
    p = jnp.where(jnp.isfinite(s), jnp.exp(s - lse[..., None]), 0)
    ds = jnp.einsum("bthw,bshw->bhts", dout, jnp.repeat(v, group, 2))
    ds = p * (ds - jnp.moveaxis(jnp.sum(out * dout, -1), 1, 2)[..., None])
    joined = lambda a: a.reshape(*a.shape[:2], -1, group, a.shape[-1]).sum(3)
    found = [
        scale * jnp.einsum("bhts,bshw->bthw", ds, jnp.repeat(k, group, 2)),
        scale * joined(jnp.einsum("bhts,bthw->bshw", ds, q)),
        joined(jnp.einsum("bhts,bthw->bshw", p, dout)),
    ]
    found = [jnp.where(done, a, jnp.nan) for a in found]
    if call.has_bias:
        absent = [i for i, n in enumerate(call.operands[0].shape) if n == 1]
        ds = jnp.where(jnp.all(done), ds, jnp.nan)
        found.append(jnp.sum(ds, axis=tuple(absent), keepdims=True))
    return found


BY_CUDNN = [
    ["padding"],
    ["mask"],
    ["causal", "padding", "bias"],
    ["mask", "bias", "dropout"],
    ["padding", "dropout of all"],
    ["padding", "lengths", "key bias"],
    ["key lengths", "dropout"],
    ["window", "mask", "dropout"],
    ["window", "padding"],
    ["window", "key lengths"],
    ["causal", "dropout of all"],
    ["segments", "lengths"],
    ["lengths", "causal"],
]


@pytest.mark.parametrize("names", BY_CUDNN, ids=", ".join)
def test_what_kernels_do_not_write_is_not_read(names, rng, monkeypatch):
    """As the formula in float64, where kernels of length 0 leave NaN, and for odd lengths."""
    monkeypatch.setattr(cudnn, "_CHOICE", 2)
    monkeypatch.setattr(cudnn, "NARROW", ("float32",))
    monkeypatch.setitem(calls._HIDDEN, "float32", -(2.0**41))
    monkeypatch.setattr(cudnn, "run_forward", emulated_forward)
    monkeypatch.setattr(cudnn, "run_backward", emulated_backward)
    for share, function in (op._forward, cudnn.forward), (op._gradients, cudnn.gradients):
        by_cudnn = lambda spec, *a, gpu=False, function=function: function(80, spec, *a)
        monkeypatch.setattr(share, "definition", by_cudnn)
    jax.clear_caches()
    length = 41 + BY_CUDNN.index(names) % 2
    operands = draw(rng, length=length)
    options = options_of(rng, names, length, length, f32)
    Reference(*operands, **options).check(both(*operands, **options))
    jax.clear_caches()


PACKED = {  # ids, and whether equal ones are contiguous
    "documents": ([[3, 3, 3, 5, 5, 9, 9, 9], [0, 0, 1, 1, 1, 1, 1, 1]], True),
    "apart": ([[1, 1, 2, 2, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]], False),
    "ends as it began": ([[1, 2, 2, 2, 2, 2, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]], False),
}


@pytest.mark.parametrize("name", PACKED)
def test_segments_are_counted_as_cudnn_counts_them(name, rng):
    """All in a row, each with the statistics of its rows from its own first row on."""
    ids, in_rows = PACKED[name]
    ids = jnp.asarray(ids)
    (batch, length), limit, heads = ids.shape, 4, 2
    q = jnp.zeros((batch, length, heads, 1, 8), bf16)
    d = numbers(q.ndim)
    spec = Spec(
        scale=1.0, causal=True, extras=(("segments", (0, d.length)), ("key segments", (0, d.keys)))
    )
    segments = cudnn._Segments(spec, q, (ids, ids))
    assert bool(segments.in_rows) == in_rows
    assert not cudnn._Segments(spec, q, (ids, ids[::-1])).in_rows
    with jax.enable_x64(True):
        assert cudnn._Segments(spec, q, [jnp.int64(ids) << 32] * 2).in_rows == in_rows
    call = cudnn._PackedCall(spec, q, segments, limit)
    lengths, starts = map(np.asarray, call.operands)
    if not in_rows:  # nothing to do
        assert (lengths == -1).all() and (starts == -1).all()
        return
    lse = rng.standard_normal((batch, heads, length)).astype(np.float32)
    kernel = np.zeros((batch * limit, heads, length), np.float32)
    number = 0
    for row, of_row in enumerate(np.asarray(ids)):
        runs = [len([*run]) for _, run in itertools.groupby(of_row)]
        ends = np.cumsum(runs)
        filled = lambda values, size: [*values, *[-1] * (size - len(values))]
        assert lengths[row].tolist() == filled(runs, limit)
        assert starts[row].tolist() == filled((ends - runs).tolist(), limit + 1)
        for end, size in zip(ends, runs):
            kernel[number, :, :size] = lse[row, :, end - size : end]
            number += 1
    np.testing.assert_array_equal(call.of_rows(jnp.asarray(kernel)), lse)
    given = np.asarray(call.of_kernel(jnp.asarray(lse)))
    assert np.isfinite(given).all() and given.shape == kernel.shape
    np.testing.assert_array_equal(given[kernel != 0], kernel[kernel != 0])
    assert int(segments.most) == max(len([*itertools.groupby(row)]) for row in np.asarray(ids))


def test_cudnn_is_asked_for_the_same_window_and_bias(rng, monkeypatch):
    """JAX counts the keys before and after each query: its own code computes the same."""
    theirs, asked = jax.nn.dot_product_attention, []

    def compute(*arrays, implementation, **options):
        asked.append(implementation)
        return theirs(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", compute)
    q, k, v, _ = draw(rng)
    spec = Spec(scale=0.7, causal=True, window=4)
    found = calls.Call(spec, q[..., None, :], k, {}).attend(q, k, v)
    close(found, attention(q, k, v, scale=0.7, causal=True, window=4))
    q, k, v, _ = draw(rng, bf16)
    bias = jnp.zeros((41, 41), bf16).at[0].set(jnp.finfo(bf16).min).at[1].set(-jnp.inf)
    bias = bias.at[2].set(jnp.nan)  # the least number hides nothing from a row that it is added to
    spec = Spec(scale=0.7, extras=(("bias", (numbers(5).length, numbers(5).keys)),))
    call = calls.Call(spec, q[..., None, :], k, {"bias": bias})
    found = call.only_seen(call.attend(q, k, v, *call.operands), 0)
    np.testing.assert_allclose(found, attention(q, k, v, bias=bias, scale=0.7), atol=0.03)
    assert asked == ["cudnn"] * 2


def test_what_cudnn_cannot_serve_is_reported(rng):
    of_gpu(dtype=f32)
    reasons = [reason for op, reason in normfuse.fallbacks() if op == "attention"]
    assert any("float32: cuDNN takes bfloat16 and float16" in reason for reason in reasons)
    with pytest.raises(NotImplementedError, match="implementation='cudnn' cannot serve.*float32"):
        of_gpu(dtype=f32, implementation="cudnn")
    q, k, v, _ = draw(rng, bf16)
    with pytest.raises(NotImplementedError, match="on cpu, there is no cuDNN"):
        attention(q, k, v, implementation="cudnn")
    either = attention(q, k, v, implementation=("cudnn", "xla"))
    np.testing.assert_array_equal(either, attention(q, k, v))


def test_what_serves_is_said():
    """served_by's words, on a machine without a GPU."""
    like = lambda *shape, dtype=bf16: jax.ShapeDtypeStruct(shape, dtype)
    q, k = like(2, 64, 4, 64), like(2, 64, 2, 64)
    assert served_by(q, k, k) == "blocks: on cpu (on GPUs cuDNN)"
    on_gpu = lambda q=q, **o: served_by(q, k, k, **o)[len("blocks: on cpu (on GPUs ") : -1]
    image, kept = like(2, 197, 4, 64), like(64, 64, dtype=bool)
    assert served_by(image, image, image).endswith("on GPUs cuDNN, with lengths)")
    assert on_gpu(lengths=like(2, dtype=int)) == "cuDNN, with lengths"
    assert on_gpu(dropout_mask=kept, dropout_rate=0.1) == "cuDNN, twice: dropout"
    assert on_gpu(mask=kept) == "cuDNN, with a mask"
    ids = like(2, 64, dtype=int)
    assert on_gpu(segment_ids=ids) == "cuDNN, with packed segments or a mask"
    long = like(2, 512, 4, 64), like(2, 512, 2, 64)
    masked = served_by(*long, long[1], mask=like(2, 1, 1, 512, dtype=bool))
    assert masked.endswith("on GPUs cuDNN, with lengths or a mask)")
    assert served_by(q, k, k, implementation="xla") == "blocks: asked for"
    odd = like(2, 64, 4, 60)
    assert served_by(odd, odd, odd) == "blocks: on cpu (on GPUs blocks: heads of 60)"
    assert "blocks: a softcap" in served_by(q, k, k, softcap=3.0)


# ---------------------------------------------------------------- bad arguments

X = np.ones((2, 6, 4, 8), np.float32)
BAD = {  # (error, what it says), and what is wrong
    "heads": (ValueError, "multiple of k's; got 4 and 3", {"k": X[:, :, :3], "v": X[:, :, :3]}),
    "no heads": (ValueError, "multiple", {"k": X[:, :, :0], "v": X[:, :, :0]}),
    "v": (ValueError, "v must have k's shape", {"v": X[:, :5]}),
    "width": (ValueError, "batch and width", {"k": X[..., :4], "v": X[..., :4]}),
    "batch": (ValueError, "batch and width", {"k": X[:1], "v": X[:1]}),
    "rank": (ValueError, "q must be .batch, length, heads, width", {"q": X[0]}),
    "integers": (TypeError, "q must be one of", {"q": X.astype(int)}),
    "window": (ValueError, "window=3 needs causal=True", {"window": 3}),
    "no window": (ValueError, "at least 1", {"window": 0, "causal": True}),
    "window's type": (TypeError, "window must be an integer", {"window": 1.5}),
    "causal": (TypeError, "causal must be True or False", {"causal": X, "window": 3}),
    "float mask": (TypeError, "mask must be bool.*as bias", {"mask": X[0, :, 0, 0] * 0}),
    "mask": (ValueError, "mask must broadcast to .*6, 6", {"mask": np.ones((5, 6), bool)}),
    "bias": (ValueError, "bias must broadcast", {"bias": np.ones((3, 1, 6, 6), np.float32)}),
    "bias's dtype": (TypeError, "bias must be one of", {"bias": np.ones((6, 6), int)}),
    "segments": (ValueError, "must be .batch, length., .2, 6.", {"segment_ids": IDS[:, :5]}),
    "segments' dtype": (TypeError, "must be integers", {"segment_ids": X[:, :, 0, 0]}),
    "pair": (ValueError, "be a pair", {"segment_ids": IDS[:, :6], "k": X[:, :5], "v": X[:, :5]}),
    "softcap": (ValueError, "softcap must be positive", {"softcap": -1.0}),
    "scale": (TypeError, "scale must be a Python number", {"scale": "1"}),
    "dtype": (TypeError, "dtype must be one of", {"dtype": int}),
    "dropout": (TypeError, "dropout_mask must be bool.*kept", {"dropout_mask": X[0, 0, 0, 0]}),
    "dropout's shape": (
        ValueError,
        "dropout_mask must broadcast",
        {"dropout_mask": np.ones((5, 6), bool)},
    ),
    "dropout's rate": (
        ValueError,
        "dropout_rate=1.0 must be at least 0 and less than 1",
        {"dropout_mask": np.ones((6, 6), bool), "dropout_rate": 1.0},
    ),
    "a negative rate": (ValueError, "dropout_rate=-0.1 must be at least 0", {"dropout_rate": -0.1}),
    "no dropout mask": (ValueError, "needs a dropout_mask; draw it", {"dropout_rate": 0.1}),
    "lengths": (ValueError, "lengths must be .batch,., .2,.; got", {"lengths": np.ones(3, int)}),
    "lengths' dtype": (TypeError, "lengths must be integers", {"lengths": np.ones(2)}),
    "three lengths": (ValueError, "lengths must be", {"lengths": [np.ones(2, int)] * 3}),
    "implementation": (
        ValueError,
        "must name one of 'cudnn', 'xla', got",
        {"implementation": "flash"},
    ),
    "native": (
        NotImplementedError,
        "one of 'cudnn', 'xla', got 'nat",
        {"implementation": "native"},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    error, message, wrong = BAD[name]
    arguments = {"q": X, "k": X, "v": X} | wrong
    with pytest.raises(error, match=message) as caught:
        attention(**arguments)
    assert "\n" not in str(caught.value)


def test_the_environment_chooses(rng, monkeypatch):
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", "native")
    assert of_gpu() == (PLAIN, False)
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", "xla")
    assert of_gpu() == ([], True)
