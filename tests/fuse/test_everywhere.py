"""`fuse` wherever JAX is: transformations, meshes, effects, and users' mistakes."""

import contextlib
import re
import traceback

import equinox as eqx
import fuse_cases
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from fuse_cases import Fused, draw, rms
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, fuse
from normfuse.layers import nnx as ours_nnx
from normfuse.layers.fuse import products

B, T, H, D, V = 4, 8, 2, 8, 48
E = H * D
f32, bf16 = jnp.float32, jnp.bfloat16
integers = optax.softmax_cross_entropy_with_integer_labels


def attention(x, w):
    q, k, v = jnp.split((x @ w).reshape(*x.shape[:-1], H, 3 * D), 3, -1)
    s = jnp.einsum("...thd,...shd->...hts", q, k) / D**0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9)
    y = jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(s, axis=-1), v)
    return y.reshape(x.shape)


def block(x, p):
    with jax.named_scope("attend"):
        x = x + attention(rms(x, p["a"]), p["qkv"]) @ p["o"]
    with jax.named_scope("feed"):
        h = rms(x, p["b"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def loss(params, x, y):
    return integers(block(x, params["block"]) @ params["head"], y).mean()


def parameters(*more):
    shapes = {"a": (E,), "b": (E,), "qkv": (E, 3 * E), "o": (E, E)}
    shapes |= {"gate": (E, 2 * E), "up": (E, 2 * E), "down": (2 * E, E)}
    made = {
        name: draw(i, *more, *shape, scale=0.3) + (len(shape) == 1)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {"block": made, "head": draw(9, *more, E, V, scale=0.3)}


def labels(*more):
    return jnp.asarray(np.random.default_rng(3).integers(0, V, (*more, B, T)))


@pytest.fixture
def args():
    return parameters(), draw(10, B, T, E), labels()


def assert_same(got, want, rounding=None):
    """Trees of arrays that differ by float32's rounding; other leaves are equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    rounding = rounding or fuse_cases.tolerance(64)
    pairs = [*zip(jax.tree.leaves(got), jax.tree.leaves(want))]
    floats = [(a, b) for a, b in pairs if fuse_cases.is_float(b)]
    floor = fuse_cases.floor_of([b for _, b in floats])
    errors = fuse_cases.errors(*zip(*floats), floor) if floats else []
    assert all(error <= rounding for error in errors), errors
    for a, b in pairs:
        assert type(a) is type(b) or isinstance(a, jax.Array) and isinstance(b, jax.Array), (a, b)
        if not fuse_cases.is_float(b):
            assert np.array_equal(a, b) if isinstance(b, jax.Array | np.ndarray) else a == b
        else:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


def assert_served(fused, **expected):
    served = fused.served()
    assert {name: served.get(name, 0) for name in expected} == expected, str(fused)


# ---------------------------------------------------------------- transformations of the function


def steps(f):
    def train(p, x, y):
        def step(p, _):
            value, slope = jax.value_and_grad(f)(p, x, y)
            return jax.tree.map(lambda a, b: a - 0.05 * b, p, slope), value

        return lax.scan(step, p, None, length=2)

    return train


def custom(f):
    @jax.custom_vjp
    def changed(p, x, y):
        return f(p, x, y)

    def forward(p, x, y):
        value, pull = jax.vjp(lambda p, x: f(p, x, y), p, x)
        return value, pull

    changed.defvjp(forward, lambda pull, g: (*pull(2 * g), None))
    return lambda p, x, y: jax.grad(changed, (0, 1))(p, x, y)


def forwards(f):
    return lambda p, x, y: jax.jvp(lambda x: f(p, x, y), (x,), (jnp.cos(x),))


TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "gradients of examples": lambda f: jax.vmap(
        jax.grad(lambda p, x, y: f(p, x[None], y[None])), (None, 0, 0)
    ),
    "forward mode": forwards,
    "steps in a scan": steps,
    "pmap": lambda f: lambda p, x, y: jax.pmap(f, in_axes=(None, 0, 0))(p, x[None], y[None]),
    "hessian": lambda f: lambda p, x, y: jax.hessian(lambda a: f(p, a * x, y))(jnp.float32(0.5)),
    "remat with a policy": lambda f: jax.grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "custom_vjp": custom,
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_of_it(name, args):
    transform, fused = TRANSFORMATIONS[name], Fused(loss)
    got, want = (jax.jit(transform(f))(*args) for f in (fused, loss))
    assert_same(got, want)
    assert_served(fused, attention=1, loss=1)


# ---------------------------------------------------------------- programs within the function


def scanned(wrap=lambda f: f):
    def model(params, x, y):
        step = wrap(lambda x, p: (block(x, p), None))
        x, _ = lax.scan(step, x, params["block"])
        return integers(x @ params["head"][0], y).mean()

    return model


NAMES = jax.checkpoint_policies.save_only_these_names("mixed")


def named_remat(params, x, y):
    def layer(x, p):
        h = checkpoint_name(attention(rms(x, p["a"]), p["qkv"]), "mixed")
        return x + h @ p["o"]

    h = jax.checkpoint(layer, policy=NAMES)(x, params["block"])
    return integers(h @ params["head"], y).mean()


def within_switch(params, x, y):
    branches = [lambda x, p: x, lambda x, p: attention(x, p["qkv"]), block]
    h = lax.switch(jnp.int32(x[0, 0, 0] > -1e6) + 1, branches, x, params["block"])
    return integers(h @ params["head"], y).mean()


def within_while(params, x, y):
    body = lambda state: (state[0] + 1, block(state[1], params["block"]))
    _, h = lax.while_loop(lambda state: state[0] < 2, body, (0, lax.stop_gradient(x)))
    return integers(lax.stop_gradient(h) @ params["head"], y).mean()


def within_custom_vjp(params, x, y):
    @jax.custom_vjp
    def layer(x, p):
        return block(x, p)

    layer.defvjp(lambda x, p: (block(x, p), p), lambda p, g: (g, jax.tree.map(jnp.zeros_like, p)))
    return integers(layer(x, params["block"]) @ params["head"], y).mean()


def barriers(params, x, y):
    x, p = lax.optimization_barrier((x, params["block"]))
    h = lax.optimization_barrier(block(x, p))
    return integers(h @ params["head"], y).mean()


WITHIN = {  # function, stacked layers, attentions that must be served
    "scan with remat": (scanned(jax.checkpoint), True, 1),
    "switch": (within_switch, False, 2),
    "while": (within_while, False, None),
    "custom_vjp": (within_custom_vjp, False, 0),
    "barriers": (barriers, False, 1),
}


@pytest.mark.parametrize("name", WITHIN)
def test_programs_within(name, args):
    function, stacked, attentions = WITHIN[name]
    params = parameters(2) if stacked else args[0]
    fused = Fused(function)
    both = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(params, *args[1:])
    assert_same(both(fused), both(function), rounding=3 * fuse_cases.tolerance(64))
    assert_served(fused, loss=1)
    if attentions is not None:
        assert_served(fused, attention=attentions)


def test_names_of_a_policy_stay(args):
    """A value that a policy saves by its name has this name in the new program, too."""
    fused = Fused(named_remat)
    program = jax.make_jaxpr(jax.grad(fused))(*args)
    assert "name=mixed" in str(program)
    assert_served(fused, attention=1)


def test_rows_tell_batch_from_heads():
    """Heads are those that a product makes with their features as one dimension."""
    attend = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))
    fused = Fused(jax.vmap(lambda x: attend(x, x, x, mask=jnp.tril(jnp.ones((32, 32), bool)))))
    jax.eval_shape(fused, draw(0, 2, 32, 64))
    assert [row.what for row in fused.rows] == ["attention 2 x 32, 4 heads of 16, float32"]


# ---------------------------------------------------------------- meshes


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request, eight_devices):
    kind = getattr(AxisType, request.param)
    return jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=eight_devices[:4])


def placed(mesh, args, split):
    params, x, y = args
    spec = lambda p: P("data") if split and p.ndim == 2 else P()
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    return jax.tree.map(lambda p: put(p, spec(p)), params), put(x, P("data")), put(y, P("data"))


def simple_loss(params, x, y):
    """Attention and loss without reshapes that Explicit meshes refuse."""
    p = params["block"]
    h = rms(x, p["a"])
    q, k, v = (h @ p["qkv"][:, i * E : (i + 1) * E] for i in range(3))
    s = jnp.einsum("btd,bsd->bts", q, k) / E**0.5
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e9)
    x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(s, axis=-1), v) @ p["o"]
    h = rms(x, p["b"])
    x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    z = jnp.where(jnp.arange(V) < V - 3, x @ params["head"], -1e9)
    hot = jax.nn.one_hot(jnp.minimum(y, V - 4), V)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(z) * hot, -1))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_meshes(mesh, args, split):
    """The same values, and no collective that the function did not need."""
    if split and mesh.axis_types[0] == AxisType.Explicit:
        pytest.skip("such products are ambiguous on an Explicit mesh, without fuse, too")
    with jax.set_mesh(mesh):
        args = placed(mesh, args, split)
        fused = Fused(simple_loss)
        programs = {}
        for name, function in (("plain", simple_loss), ("fused", fused)):
            programs[name] = jax.jit(jax.value_and_grad(function)).lower(*args).compile()
        want, got = (programs[name](*args) for name in ("plain", "fused"))
        assert_same(jax.device_get(got), jax.device_get(want))
        assert_served(fused, attention=1, loss=1)
        count = {name: hlo.collectives(program) for name, program in programs.items()}
        assert len(count["fused"]) <= len(count["plain"]), count
        moved = {name: sum(c.bytes for c in found) for name, found in count.items()}
        assert moved["fused"] <= moved["plain"], count


def placed_rows(subscripts, x, w):
    """A product whose features are split, with its result as the function places it."""
    return jnp.sin(jnp.einsum(subscripts, x, w, out_sharding=P("d")))


def loss_of_rows(x, w, v):
    """JAX reads the rows in Auto axes, where it compares with 0, as the loss does in Explicit."""
    labels = jax.lax.stop_gradient(x[..., 0] > 0).astype(jnp.int32)
    rows = v.at[labels].get(out_sharding=P("d", None, None))
    logits = jnp.einsum("bte,ev->btv", x + rows, w, out_sharding=P("d", None, None))
    return (jax.nn.logsumexp(logits, -1) - (jax.nn.one_hot(labels, F) * logits).sum(-1)).mean()


F = 2 * E
TENSOR_PARALLEL = {  # function, and sites without and with FP8
    "rows": (lambda x, w, v: placed_rows("btf,fe->bte", jnp.tanh(x @ w), v), ({}, {"product": 2})),
    "an mlp": (
        lambda x, w, v: placed_rows("btf,fe->bte", jax.nn.silu(x @ w), v),
        ({"mlp": 1}, {"product": 1, "mlp": 1}),
    ),
    "of ours": (
        lambda x, w, v: jnp.sin(dense(jnp.tanh(dense(x, w)), v, out_sharding=P("d", None, None))),
        ({}, {"product": 2}),
    ),
    "a loss beside a lookup": (loss_of_rows, ({"loss": 1}, {"loss": 1})),
}


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_products_keep_the_sharding_that_they_are_given(name, eight_devices):
    """On Explicit axes, where a product of features that are split has to be told its own."""
    function, expected = TENSOR_PARALLEL[name]
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("d", "t"), kinds, devices=eight_devices[:4])
    with jax.set_mesh(mesh):
        arrays = fuse_cases.draws((2, 32, E), (E, F), (F, E), scale=0.3)
        specs = P("d"), P(None, "t"), P("t")
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs)]
        both = lambda f: jax.jit(jax.value_and_grad(lambda *a: f(*a).sum(), (0, 1, 2)))(*args)
        want = both(function)
        for quantization, sites in zip((None, "fp8"), expected):
            fused = Fused(function, quantization=quantization, serves=False)
            got = both(fused)
            assert fused.served() == sites, fused
            for a, b in zip(got[1], want[1], strict=True):
                assert a.sharding == b.sharding
                error = np.linalg.norm(a - b) / np.linalg.norm(b)
                assert error < (0.3 if quantization else 1e-5)


TWO_WAYS = {  # placements of the kernels gate and up, of down, and of x
    "both axes": (P("d", "t"), P("t", "d"), P("d")),
    "rows": (P(("d", "t")), P(("d", "t")), P(("d", "t"))),
}


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("name", TWO_WAYS)
def test_kernels_that_two_axes_split_move_no_more(name, quantization, eight_devices):
    """A norm and a gated MLP, twice; in FP8 codes are gathered."""
    wide, narrow, rows = TWO_WAYS[name]
    mesh = jax.make_mesh(
        (2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=eight_devices[:4]
    )

    def model_loss(p, x):
        for _ in range(2):
            h = rms(x, p["scale"])
            x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return jnp.mean(jnp.sin(x))

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    shapes = {"scale": ((64,), P()), "gate": ((64, 256), wide), "up": ((64, 256), wide)}
    shapes["down"] = (256, 64), narrow
    params = {n: struct(*given) for n, given in shapes.items()}
    fused, moved = Fused(model_loss, quantization=quantization), []
    for function in (model_loss, fused):
        program = jax.jit(jax.value_and_grad(function)).lower(params, struct((8, 32, 64), rows))
        moved.append(sum(c.bytes for c in hlo.collectives(program.compile())))
    assert_served(fused, norm=2, mlp=2)
    assert moved[1] <= moved[0] * (1 if quantization is None else 0.95)


@pytest.mark.parametrize("at, quantization", [("gate and up", "fp8"), ("hidden", None)])
def test_hidden_arrays_stay_where_constraints_place_them(at, quantization, eight_devices):
    """Nothing else says so: kernels and x are whole on each device."""
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=eight_devices[:2])
    place = lambda a: lax.with_sharding_constraint(a, NamedSharding(mesh, P(None, None, "t")))

    def model_loss(p, x):
        gate, up = x @ p["gate"], x @ p["up"]
        if at == "gate and up":
            gate, up = place(gate), place(up)
        hidden = jax.nn.silu(gate) * up
        return jnp.mean(jnp.sin((place(hidden) if at == "hidden" else hidden) @ p["down"]))

    whole = NamedSharding(mesh, P())
    array = lambda i, *shape: jax.device_put(draw(i, *shape, scale=0.2), whole)
    params = {"gate": array(0, 64, 512), "up": array(1, 64, 512), "down": array(2, 512, 64)}
    x, fused = array(3, 8, 16, 64), Fused(model_loss, quantization=quantization)
    program = jax.jit(jax.value_and_grad(fused)).lower(params, x).compile()
    got, want = program(params, x), jax.jit(jax.value_and_grad(model_loss))(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        off = np.linalg.norm(np.float64(a) - np.float64(b)) / np.linalg.norm(np.float64(b))
        assert off < (0.08 if quantization else 1e-5)
    assert_served(fused, mlp=1)
    assert all(row.domain == "mlp" for row in fused.rows if not quantization or row.served)
    text = program.as_text()
    assert re.search(r"\[(8,16|128),256\]", text) and not re.search(r"\[(8,16|128),512\]", text)


def test_shard_map(mesh, args):
    outside = mesh.axis_types[0] == AxisType.Auto

    def local(f):
        def run(params, x, y):
            return lax.psum(f(params, x, y), "data")

        specs = (P(), P("data"), P("data"))
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P())

    args = placed(mesh, args, False)
    fused = Fused(local(loss) if outside else loss)
    function = fused if outside else local(fused)
    both = lambda f: jax.jit(jax.value_and_grad(f))(*args)
    assert_same(both(function), both(local(loss)))
    if not outside:
        assert_served(fused, attention=1, loss=1)


HEADS = {  # axes, words, how the kernel is placed, and if the gradient is in FP8
    "whole": ((), 64, P(), True),
    "few words, no multiple of 16": ((), 40, P(), False),
    "words that are no multiple of 16": ((), 1030, P(), True),
    "words of each device": ((AxisType.Explicit,), 64, P(None, "t"), True),
    "words of each device, no multiple of 16": ((AxisType.Explicit,), 48, P(None, "t"), False),
    "partly manual": ((AxisType.Auto, AxisType.Auto), 64, P(), False),
}


@pytest.mark.parametrize("name", HEADS)
def test_rows_of_losses_say_what_is_compiled(name, eight_devices):
    """The gradient is "in fp8" where the program multiplies codes."""
    kinds, words, spec, quantized = HEADS[name]
    mesh = jax.make_mesh((2,) * len(kinds), ("t", "d")[: len(kinds)], kinds)
    x, w, y = draw(0, 32, 64), draw(1, 64, words), jnp.arange(32) % words
    fused = Fused(
        lambda x, w: -jnp.sum(jax.nn.one_hot(y, words) * jax.nn.log_softmax(x @ w)),
        quantization="fp8",
    )
    function = jax.grad(fused, (0, 1))
    if name == "partly manual":
        parts = {"in_specs": (P("t"), P()), "out_specs": (P("t"), P()), "axis_names": {"t"}}
        y = y[:16]
        local = lambda x, w: (lambda dx, dw: (dx, lax.psum(dw, "t")))(
            *jax.grad(fused, (0, 1))(x, w)
        )
        function = jax.shard_map(local, mesh=mesh, check_vma=False, **parts)
    with jax.set_mesh(mesh) if kinds else contextlib.nullcontext():
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P()), (w, spec))]
        text = jax.jit(function).lower(*(args if kinds else (x, w))).compile().as_text()
    (loss,) = [row for row in fused.rows if row.domain == "loss"]
    assert ("gradient in fp8" in loss.served) == quantized == ("f8e5m2" in text), loss


def test_rows_of_products_say_what_is_compiled(eight_devices):
    """A norm with codes and an MLP multiply codes on a mesh that is partly manual, too."""
    mesh = jax.make_mesh((2, 2), ("t", "d"), (AxisType.Auto,) * 2)
    kernels = fuse_cases.draws((64,), (64, 128), (64, 128), (128, 64), scale=0.3)

    def mlp(x, scale, gate, up, down):
        h = rms(x, scale)
        return jnp.sin((jax.nn.silu(h @ gate) * (h @ up)) @ down)

    fused = Fused(mlp, quantization="fp8")
    parts = {"in_specs": (P("t"), *[P()] * 4), "out_specs": P("t"), "axis_names": {"t"}}
    function = jax.shard_map(fused, mesh=mesh, **parts)
    text = jax.jit(function).lower(draw(9, 64, 64), *kernels).compile().as_text()
    assert_served(fused, norm=1, mlp=1, codes=1)
    assert "f8e4m3" in text and all("fp8" in r.served for r in fused.rows if r.domain == "mlp")


def test_constraints_stay(mesh, args):
    if mesh.axis_types[0] == AxisType.Explicit:
        pytest.skip("constraints are for Auto axes")
    sharding = NamedSharding(mesh, P("data"))

    def constrained(params, x, y):
        h = lax.with_sharding_constraint(block(x, params["block"]), sharding)
        return integers(h @ params["head"], y).mean(), h

    fused = Fused(constrained)
    got, want = jax.jit(fused)(*args), jax.jit(constrained)(*args)
    assert_same(jax.device_get(got), jax.device_get(want))
    assert got[1].sharding.is_equivalent_to(want[1].sharding, 3)


# ---------------------------------------------------------------- effects, randomness, state


def test_effects_and_their_order(args):
    seen = []

    def told(params, x, y):
        tell = lambda name: io_callback(lambda v: seen.append(name), None, x[0, 0, 0], ordered=True)
        tell("before")
        h = block(x, params["block"])
        tell("between")
        value = integers(h @ params["head"], y).mean()
        tell("after")
        return value

    found = []
    fused = Fused(told)
    for function in (told, fused):
        value = jax.jit(function)(*args)
        jax.effects_barrier()
        found.append((value, [*seen]))
        seen.clear()
    assert found[0][1] == ["before", "between", "after"]
    assert found[1][1] == found[0][1]
    assert_same(found[1][0], found[0][0])
    assert_served(fused, attention=1, loss=1)


# ---------------------------------------------------------------- JAX's other tools


def test_export_of_symbolic_dimensions(args):
    params, x, y = args
    (b,) = jax.export.symbolic_shape("b")
    shapes = (
        jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params),
        jax.ShapeDtypeStruct((b, T, E), x.dtype),
        jax.ShapeDtypeStruct((b, T), y.dtype),
    )
    names = re.findall(r"custom_call @(normfuse_\w+)", jax.jit(Fused(loss)).lower(*args).as_text())
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in {*names}]
    exported = jax.export.export(jax.jit(Fused(loss)), disabled_checks=checks)(*shapes)
    for n in (1, 3):
        assert_same(exported.call(params, x[:n], y[:n]), jax.jit(loss)(params, x[:n], y[:n]))


def test_disable_jit(args):
    want = jax.jit(loss)(*args)
    with jax.disable_jit():
        assert_same(Fused(loss)(*args), want)


def test_float64():
    with jax.enable_x64(True):
        wide = lambda tree: fuse_cases.cast(tree, jnp.float64)
        args = wide(parameters()), wide(draw(10, B, T, E)), labels()
        fused = Fused(loss)
        both = lambda f: jax.jit(jax.value_and_grad(f))(*args)
        got, want = both(fused), both(loss)
        assert_same(got, want, rounding=fuse_cases.tolerance(64, jnp.float64))


@pytest.mark.parametrize("shape", [(0, T), (B, 0), (1, 1)])
def test_empty_arrays(shape):
    params, x = parameters(), draw(0, *shape, E)
    y = jnp.zeros(shape, jnp.int32)

    def rows(params, x, y):
        each = integers(block(x, params["block"]) @ params["head"], y)
        return each.sum(), each

    both = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))(params, x, y)
    assert_same(both(Fused(rows, serves=0 not in shape)), both(rows))


def test_traced_once(args):
    fused = Fused(loss)
    step = jax.jit(jax.grad(fused))
    for _ in range(3):
        step.lower(*args)
    assert len(fused.reports) == 1


def test_names_of_scopes_stay(args):
    """Profiles name the remaining equations by the user's scopes."""

    def scoped(params, x, y):
        with jax.named_scope("mine"):
            h = jnp.sin(block(x, params["block"]))
        return integers(h @ params["head"], y).mean()

    fused = Fused(scoped)
    text = jax.jit(fused).lower(*args).as_text(debug_info=True)
    assert "mine/sin" in text
    where = [row.where for row in fused.rows if row.what.startswith("attention")]
    assert where and all("mine" in w and "attend" in w for w in where), where
    assert all("test_everywhere.py" in w for w in where), where


# ---------------------------------------------------------------- arguments and results


def test_arguments_of_other_kinds():
    """Integers, booleans, complex numbers, keys and dtypes of little use pass through."""

    def mixed(q, more):
        y = jax.nn.softmax(q @ q.T / 3) @ q
        return y, {name: value for name, value in more.items()}, more["c"] * 2, ~more["b"]

    more = {
        "b": jnp.array([True, False]),
        "c": jnp.array([1 + 2j]),
        "i": jnp.arange(3, dtype=jnp.uint8),
        "k": jax.random.key(0),
        "h": jnp.ones(2, jnp.float8_e4m3fn),
    }
    q = draw(0, T, D)
    got, want = jax.jit(Fused(mixed))(q, more), jax.jit(mixed)(q, more)
    assert (got[1].pop("k") == want[1].pop("k")).all()
    got[1].pop("h"), want[1].pop("h")
    assert_same(got, want)


def test_twice(args):
    """fuse(fuse(f)) is fuse(f), to the bit."""
    once = Fused(loss)
    twice = Fused(Fused(loss), serves=False)  # the inner one has served it
    got, want = (jax.jit(jax.value_and_grad(f))(*args) for f in (twice, once))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_fused_inside_fused(args):
    layer = Fused(block)

    def model(params, x, y):
        return integers(layer(x, params["block"]) @ params["head"], y).mean()

    outer = Fused(model)
    both = lambda f: jax.jit(jax.value_and_grad(f))(*args)
    assert_same(both(outer), both(loss))
    assert_served(layer, attention=1)
    assert_served(outer, loss=1)


def test_nothing_is_stale():
    """Each trace reads the function as it is then."""
    settings = {"scale": 0.5}
    function = lambda q: jax.nn.softmax(q @ q.T * settings["scale"], axis=-1) @ q
    fused, q = Fused(function), draw(0, T, D)
    for scale in (0.5, 2.0, 0.01):
        settings["scale"] = scale
        assert_same(fused(q), jax.jit(lambda q: function(q))(q))


# ---------------------------------------------------------------- users' mistakes


@pytest.mark.parametrize("wrong", [3, None, True, [3], ["loss", None]], ids=str)
def test_a_skip_that_names_nothing(wrong):
    message = r"skip must be a word, several words or a function of a row, got"
    for op, call in {
        "fuse": lambda: fuse(loss, skip=wrong),
        "fuse ": lambda: ours_nnx.fuse(loss, skip=wrong),
        "swap": lambda: ours_nnx.swap(nnx.RMSNorm(4, rngs=nnx.Rngs(0)), skip=wrong),
    }.items():
        with pytest.raises(TypeError, match=f"^{op.strip()}: {message}"):
            call()


def test_an_error_of_the_function(args):
    def broken(params, x, y):
        value = loss(params, x, y)
        raise KeyError("mine")
        return value

    with pytest.raises(KeyError, match="mine") as caught:
        Fused(broken)(*args)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "broken" and frames[-1].line == 'raise KeyError("mine")'
    assert caught.value.__cause__ is None


def test_what_cannot_be_read_is_said(args, monkeypatch):
    """Though something else serves the value that the program ends with."""

    def fails(*_):
        raise IndexError("no such dimension")

    monkeypatch.setattr(products, "found", fails)
    fused = Fused(loss, reads=False)
    jax.eval_shape(fused, *args)
    rows = [(row.domain, row.reason) for row in fused.reports[-1].left]
    assert ("mlp", "it could not be read: IndexError: no such dimension") in rows
    assert fused.served()["loss"] == 1


def test_gradients_within(args):
    """A function that takes gradients itself is left there, and told what to do."""
    step = lambda params, x, y: jax.value_and_grad(loss)(params, x, y)
    fused = Fused(step, serves=False)
    assert_same(jax.jit(fused)(*args), jax.jit(step)(*args))
    with pytest.warns(UserWarning, match="fuse the loss that you differentiate"):
        jax.eval_shape(fuse(step), *args)
    assert "fuse the loss that you differentiate" in str(fused)


SKIPS = {"attention": "attend", "loss": lambda row: row.what.startswith("loss")}


@pytest.mark.parametrize("domain", SKIPS)
def test_skip(domain, args):
    fused = Fused(loss, skip=SKIPS[domain])
    assert_same(jax.jit(fused)(*args), jax.jit(loss)(*args))
    assert_served(fused, **{"attention": 1, "loss": 1} | {domain: 0})
    assert ["skip" in row.reason for row in fused.rows if row.domain == domain] == [True]


def test_skip_that_matches_nothing(args):
    """The warning lists names that are near."""
    with pytest.warns(UserWarning, match=r"(?s)skip.*atend.*attend"):
        jax.eval_shape(fuse(loss, skip="atend", report=lambda report: None), *args)


def test_a_skip_that_fails(args):
    """An error of the user's own predicate is the user's."""

    def skip(row):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        Fused(loss, skip=skip)(*args)


def test_the_table(args):
    fused = Fused(loss)
    jax.eval_shape(fused, *args)
    for row in fused.rows:
        assert row.where and row.what and bool(row.served) != bool(row.reason)
    text = str(fused)
    for row in fused.rows:
        assert row.what.split()[0] in text and (row.served or row.reason) in text
    assert max(map(len, text.splitlines())) < 240
