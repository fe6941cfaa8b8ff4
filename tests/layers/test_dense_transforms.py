"""The dense op under JAX's transformations and on meshes, against plain jnp."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense

f32, bf16 = jnp.float32, jnp.bfloat16


def f64(array):
    return np.asarray(array).astype(np.float64)


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


def operands(rng, x=f32, rows=(5, 3), n=48, out=20):
    return (
        jnp.asarray(rng.standard_normal((*rows, n)), x),
        jnp.asarray(rng.standard_normal((n, out)) / 7, f32),
        jnp.asarray(rng.standard_normal(out), f32),
    )


def loss(x, kernel, bias=None, **options):
    return jnp.sum(jnp.sin(dense(x, kernel, bias, **options).astype(f32)))


def plain(x, kernel, bias, activation=lambda z: z):
    return activation(x @ kernel.astype(x.dtype) + bias.astype(x.dtype))


# ---------------------------------------------------------------- differentiation


@pytest.mark.xfail(
    jax.config.values.get("jax_remat3", False),
    reason="JAX_REMAT3 asks policies about no part of a custom_jvp",
)
def test_remat_policies_see_the_product(rng):
    args = operands(rng)

    def products(policy):
        f = jax.checkpoint(functools.partial(loss, activation="tanh"), policy=policy)
        return str(jax.make_jaxpr(jax.grad(f, (0, 1)))(*args)).count("dot_general[")

    policies = jax.checkpoint_policies
    assert products(policies.nothing_saveable) == products(policies.dots_saveable) + 1


def test_default_matmul_precision_reaches_the_backward(rng):
    args = operands(rng)

    @jax.jit
    def gradients(*args):
        with jax.default_matmul_precision("highest"):
            _, vjp = jax.vjp(dense, *args)
        return vjp(jnp.ones((5, 3, 20)))

    text = gradients.lower(*args).as_text()
    assert text.count("dot_general") == text.count("precision = [HIGHEST, HIGHEST]") == 2


# ---------------------------------------------------------------- meshes

SPLITS = [  # x, kernel
    (P("data"), P()),
    (P("data"), P("data")),
    (P("data"), P(None, "data")),
    (P("data"), P(None, "tensor")),
    (P("data"), P("data", "tensor")),
    (P("data", None, "tensor"), P()),
    (P("data", None, "tensor"), P(None, "tensor")),
    (P("data", None, "tensor"), P("tensor")),
    (P(("data", "tensor")), P("data", "tensor")),
]


def on_mesh(axis_type):
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)


def split_loss(f):
    return lambda *args: jnp.sum(jnp.sin(f(*args).astype(f32)))


@pytest.mark.parametrize("x_spec, kernel_spec", SPLITS, ids=str)
def test_auto_mesh_has_the_collectives_of_plain_jax(rng, eight_devices, x_spec, kernel_spec):
    del eight_devices
    mesh = on_mesh(AxisType.Auto)
    args = operands(rng, bf16, rows=(8, 4), n=16, out=32)
    ours = functools.partial(dense, activation="gelu_tanh")
    theirs = lambda *args: jax.nn.gelu(plain(*args))
    want = jax.jit(jax.grad(split_loss(ours), (0, 1, 2)))(*args)
    like = tuple(NamedSharding(mesh, spec) for spec in (x_spec, kernel_spec, P()))
    args = [jax.device_put(a, sharding) for a, sharding in zip(args, like)]
    compiled, expected = (
        jax.jit(jax.grad(split_loss(f), (0, 1, 2)), out_shardings=like).lower(*args).compile()
        for f in (ours, theirs)
    )
    for a, b in zip(compiled(*args), want, strict=True):
        np.testing.assert_allclose(f64(a), f64(b), rtol=2 * eps(bf16), atol=16 * eps(bf16))
    kinds = lambda compiled: [c.kind for c in hlo.collectives(compiled)]
    assert kinds(compiled) == kinds(expected)


def test_explicit_mesh_with_out_sharding(rng, eight_devices):
    del eight_devices
    args = operands(rng, rows=(8, 4), n=16, out=32)
    mesh = on_mesh(AxisType.Explicit)
    want = dense(*args)
    with jax.set_mesh(mesh):
        specs = (P("data", None, "tensor"), P("tensor"), P())
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)]
        f = jax.jit(functools.partial(dense, out_sharding=P("data", None, None)))
        np.testing.assert_allclose(f(*args), want, rtol=0, atol=1e-5)
        assert [c.kind for c in hlo.collectives(f.lower(*args).compile())] == ["all-reduce"]
        batched = jax.vmap(functools.partial(dense, out_sharding=P(None, None)), (0, None, None))
        total = lambda f: lambda *a: jnp.sum(f(*a) ** 2)
        for a, b in zip(
            jax.jit(jax.grad(total(batched), (0, 1, 2)))(*args),
            jax.jit(jax.grad(total(f), (0, 1, 2)))(*args),
            strict=True,
        ):
            np.testing.assert_allclose(f64(a), f64(b), rtol=0, atol=1e-3)


def test_partly_manual_shard_map(rng, eight_devices):
    del eight_devices
    x, kernel, bias = operands(rng, rows=(8, 4), n=16, out=32)
    specs = {"in_specs": (P("data"), P(), P()), "out_specs": P("data")}
    sharded = jax.shard_map(dense, mesh=on_mesh(AxisType.Auto), axis_names={"data"}, **specs)
    got = jax.jit(jax.grad(split_loss(sharded), (0, 1, 2)))(x, kernel, bias)
    want = jax.grad(split_loss(dense), (0, 1, 2))(x, kernel, bias)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(f64(a), f64(b), rtol=0, atol=1e-4)
