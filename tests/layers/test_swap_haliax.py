"""`swap` on haliax's modules, whose arrays have named axes."""

import pickle
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse.layers.eqx import swap, unswap

with warnings.catch_warnings():  # haliax uses names that JAX has deprecated
    warnings.simplefilter("ignore")
    import haliax as hax

f32, bf16 = jnp.float32, jnp.bfloat16
Embed, Heads, Head = hax.Axis("embed", 32), hax.Axis("heads", 2), hax.Axis("head", 16)
Batch, Position = hax.Axis("batch", 3), hax.Axis("position", 4)


@pytest.fixture(autouse=True)
def theirs_runs(monkeypatch):
    """haliax's own products use a name that the newest JAX has removed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if not hasattr(jax.core, "is_constant_dim"):
            monkeypatch.setattr(
                jax.core, "is_constant_dim", lambda d: isinstance(d, int), raising=False
            )
        yield


class Block(eqx.Module):
    norm: hax.nn.RmsNorm
    q: hax.nn.Linear
    o: hax.nn.Linear

    @staticmethod
    def init(key, *, out_first=True, use_bias=False):
        a, b = jax.random.split(key)
        options = {"out_first": out_first, "use_bias": use_bias}
        norm = hax.nn.RmsNorm.init(Embed, eps=1e-5, use_bias=False)
        q = hax.nn.Linear.init(Embed, (Heads, Head), key=a, **options)
        o = hax.nn.Linear.init((Heads, Head), Embed, key=b, **options)
        weight = hax.random.uniform(key, Embed) + 0.5
        return Block(eqx.tree_at(lambda n: n.weight, norm, weight), q, o)

    def __call__(self, x):
        return x + self.o(hax.sin(self.q(self.norm(x))))


def inputs(rng, axes=(Batch, Position, Embed), dtype=f32):
    return hax.named(jnp.asarray(rng.standard_normal([a.size for a in axes]), dtype), axes)


def loss(model, x):
    return hax.mean(hax.sin(model(x))).scalar().astype(f32)


def ops(call, *args):
    text = str(eqx.filter_make_jaxpr(call)(*args)[0])
    return text.count("normfuse_rms_norm["), text.count("dot_general[")


def assert_close(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (np.abs(b).max() + 1e-3))


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("out_first", [True, False])
def test_a_named_block(rng, out_first, dtype):
    theirs = Block.init(jax.random.key(0), out_first=out_first, use_bias=dtype == f32)
    theirs = jax.tree.map(lambda p: p.astype(dtype), theirs)
    reports = []
    model = swap(theirs, report=reports.append)
    assert [row.served for row in reports[0].rows] == [
        "rms_norm",
        "normfuse dense",
        "normfuse dense",
    ]
    assert isinstance(model.q, hax.nn.Linear) and isinstance(model.norm, hax.nn.RmsNorm)
    x = inputs(rng, dtype=dtype)
    y, want = model(x), theirs(x)
    assert y.axes == want.axes and y.dtype == want.dtype
    f = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    # float32: sums of 32 terms or 12 rows; bfloat16: some ten roundings of what is summed
    tolerance = 2e-5 if dtype == f32 else 16 * 2**-8
    assert_close((y, f(model, x)), (want, f(theirs, x)), tolerance)
    assert ops(model, x) == (1, 2) and ops(theirs, x)[0] == 0
    back = unswap(model)
    assert jax.tree.structure(back) == jax.tree.structure(theirs)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(theirs)))
    again = pickle.loads(pickle.dumps(model.norm))
    assert type(again) is type(model.norm)


def test_axes_in_other_orders(rng):
    theirs = Block.init(jax.random.key(0))
    model = swap(theirs)
    x = inputs(rng, (Embed, Position))
    assert model.norm(x).axes == theirs.norm(x).axes == (Embed, Position)
    assert_close(model.norm(x), theirs.norm(x), 1e-6)
    assert ops(model.norm, x)[0] == 1
    assert model.q(x).axes == theirs.q(x).axes  # by haliax: the summed axis is not the last
    assert_close(model.q(x), theirs.q(x), 1e-5)
    with pytest.raises(ValueError, match=r"quantization='fp8' does not go with axes"):
        swap(theirs, quantization="fp8").q(x)
    with pytest.raises(ValueError, match="is not in"):
        model.norm(inputs(rng, (Batch, Position)))


def test_stacked_blocks_under_scan_and_vmap(rng):
    Layers = hax.Axis("layers", 3)
    keys = jax.random.split(jax.random.key(0), 3)
    stack = hax.nn.Stacked.init(Layers, Block)(keys)
    x = inputs(rng)
    model = swap(stack)
    assert_close(model.fold(x), stack.fold(x), 1e-5)
    assert ops(model.fold, x) == (1, 2)
    block, theirs = swap(Block.init(keys[0])), Block.init(keys[0])
    mapped = lambda m: hax.vmap(lambda x: m(x), Batch)(x)
    assert mapped(block).axes == mapped(theirs).axes
    assert_close(mapped(block), mapped(theirs), 1e-5)


def test_a_norm_of_ones_own_and_what_is_none(rng):
    class Own(eqx.Module):
        w: hax.NamedArray
        eps: float = eqx.field(static=True, default=1e-3)

        def __call__(self, x):
            wide = x.astype(f32)
            y = wide * hax.rsqrt(hax.mean(hax.square(wide), self.w.axes[0]) + self.eps)
            return (y * (1 + self.w)).astype(x.dtype)

    reports, x = [], inputs(rng, dtype=bf16)
    own, biased = Own(hax.zeros(Embed)), hax.nn.RmsNorm.init(Embed)
    layers = [own, biased, hax.nn.LayerNorm.init(Embed, use_bias=False)]
    model = swap(layers, report=reports.append)
    assert [row.served for row in reports[0].rows] == ["rms_norm", "", ""]
    assert "2 arrays: bias, weight" in reports[0].rows[1].reason
    assert "subtracts the mean" in reports[0].rows[2].reason
    assert_close(model[0](x), own(x), 2 * 2**-8)  # a rounding each
    assert model[1] is biased


def test_fp8_and_filtered_trees(rng):
    theirs = Block.init(jax.random.key(0))
    model = swap(theirs, quantization="fp8")
    x = inputs(rng, dtype=f32)
    got, want = model(x), theirs(x)
    error = float(jnp.linalg.norm((got - want).array) / jnp.linalg.norm((want - x).array))
    assert 1e-3 < error < 4 * 2**-4  # two products of two e4m3 operands each
    assert swap(model) is model
    empty = lambda m: eqx.filter(m, lambda leaf: False)
    swapped = swap(theirs)
    assert jax.tree.structure(swap(empty(theirs))) == jax.tree.structure(empty(swapped))
