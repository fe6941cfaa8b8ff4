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

DERIVATIVES = {
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "fwd-rev": jax.hessian,
    "rev-rev": lambda f, n: jax.jacrev(jax.jacrev(f, n), n),
    "fwd-fwd": lambda f, n: jax.jacfwd(jax.jacfwd(f, n), n),
    "rev-fwd": lambda f, n: jax.jacrev(jax.jacfwd(f, n), n),
}


@pytest.mark.parametrize(
    "derivative, dtype",
    [*[(name, f32) for name in DERIVATIVES], ("fwd-rev", bf16), ("rev-fwd", bf16)],
)
def test_derivatives_of_any_order_and_mode(rng, derivative, dtype):
    derivative = DERIVATIVES[derivative]
    args = operands(rng, rows=(3,), n=4, out=2)
    ours = lambda *a: jnp.sum(dense(*a, activation="tanh", dtype=dtype).astype(f32) ** 2)
    theirs = lambda *a: jnp.sum(plain(*a, activation=jnp.tanh) ** 2)
    got = jax.tree.leaves(jax.jit(derivative(ours, (0, 1, 2)))(*args))
    want = jax.tree.leaves(derivative(theirs, (0, 1, 2))(*args))
    for a, b in zip(got, want, strict=True):
        # Some tens of operations, each rounded to the dtype, on values of order 4.
        np.testing.assert_allclose(f64(a), f64(b), rtol=0, atol=32 * eps(dtype) * 4)


def test_linearize_and_linear_transpose(rng):
    x, kernel, bias = operands(rng)
    y, tangent = jax.linearize(lambda k: dense(x, k, bias), kernel)
    np.testing.assert_allclose(tangent(kernel), f64(x) @ f64(kernel), rtol=0, atol=1e-4)
    (dx,) = jax.linear_transpose(lambda x: dense(x, kernel), x)(y)
    np.testing.assert_allclose(f64(dx), f64(y) @ f64(kernel).T, rtol=0, atol=1e-4)


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


def test_frozen_kernel_costs_no_product(rng):
    x, kernel, _ = operands(rng)
    assert jax.jit(jax.grad(loss)).lower(x, kernel).as_text().count("dot_general") == 2  # y and dx


def test_default_matmul_precision_reaches_the_backward(rng):
    args = operands(rng)

    @jax.jit
    def gradients(*args):
        with jax.default_matmul_precision("highest"):
            _, vjp = jax.vjp(dense, *args)
        return vjp(jnp.ones((5, 3, 20)))

    text = gradients.lower(*args).as_text()
    assert text.count("dot_general") == text.count("precision = [HIGHEST, HIGHEST]") == 2


# ---------------------------------------------------------------- vmap, scan, remat, export


@pytest.mark.parametrize(
    "axes, activation",
    [
        ((0, None, None), "silu"),
        ((1, None, 0), None),
        ((None, 0, None), None),
        ((-1, 1, 1), "silu"),
        ((None, -1, 0), "silu"),
        ((2, 2, None), None),
    ],
)
def test_vmap_over_any_axis_and_its_gradients(rng, axes, activation):
    args = operands(rng, bf16, rows=(3,), n=8, out=5)
    batched = [
        a if axis is None else jnp.stack([a, -a, 2 * a, a], axis if axis >= 0 else a.ndim)
        for a, axis in zip(args, axes)
    ]
    example = lambda i: [
        a if axis is None else jnp.take(a, i, axis) for a, axis in zip(batched, axes)
    ]
    f = jax.value_and_grad(functools.partial(loss, activation=activation), (0, 1, 2))
    got = jax.jit(jax.vmap(f, axes))(*batched)  # every example's own gradients of what they share
    jitted = jax.jit(f)
    want = jax.tree.map(lambda *v: jnp.stack(v), *[jitted(*example(i)) for i in range(4)])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        # y is rounded to bfloat16, which rounding another order of summation may flip.
        np.testing.assert_allclose(f64(a), f64(b), rtol=4 * eps(bf16), atol=8 * eps(bf16))
    total = lambda *a: jnp.sum(jax.vmap(functools.partial(loss, activation=activation), axes)(*a))
    got = jax.jit(jax.grad(total, (0, 1, 2)))(*batched)
    for a, b, axis, arg in zip(got, want[1], axes, args):
        b = f64(b).sum(0) if axis is None else np.moveaxis(f64(b), 0, axis)
        assert a.dtype == arg.dtype
        np.testing.assert_allclose(f64(a), b, rtol=4 * eps(bf16), atol=32 * eps(bf16))


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


@pytest.mark.parametrize("x_spec, kernel_spec", SPLITS[1::2], ids=str)
def test_explicit_mesh(rng, eight_devices, x_spec, kernel_spec):
    del eight_devices
    args = operands(rng, bf16, rows=(8, 4), n=16, out=32)
    gradients = jax.jit(jax.grad(functools.partial(loss, activation="gelu_tanh"), (0, 1, 2)))
    want = gradients(*args)
    mesh = on_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        specs = (x_spec, kernel_spec, P("data"))
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)]
        if (x_spec, kernel_spec) == (P("data", None, "tensor"), P("tensor")):
            with pytest.raises(Exception, match="out_sharding"):  # plain JAX asks for it too
                gradients(*args)
            return
        got = gradients(*args)
    for a, b, arg in zip(got, want, args, strict=True):
        np.testing.assert_allclose(f64(a), f64(b), rtol=2 * eps(bf16), atol=16 * eps(bf16))
        assert jax.typeof(a).sharding.spec == jax.typeof(arg).sharding.spec


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


@pytest.mark.parametrize("at", [0, 1, 2, -1])
def test_pallas_layers_of_a_batch_that_lies_anywhere(rng, at):
    """There are as many examples as features: a batch in their place would have the same shape."""
    x = jnp.asarray(rng.standard_normal((8, 8, 8)), f32)
    kernel = jnp.asarray(rng.standard_normal((8, 5)), f32)

    def run(implementation):
        one = functools.partial(dense, activation="silu", implementation=implementation)
        each = jax.vmap(lambda x: one(x, kernel), at)
        return each(x), jax.grad(lambda x: jnp.sum(jnp.sin(each(x))))(x)

    for got, want in zip(run("pallas"), run("xla")):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
