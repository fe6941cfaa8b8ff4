"""Gated dense layers, and a norm before them: values, what they keep, every context of JAX's."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, gated_dense, gated_product, rms_norm
from normfuse.layers.dense.epilogue import SCALARS

pytestmark = pytest.mark.optimized

f32, bf16 = jnp.float32, jnp.bfloat16
ROWS, IN, OUT = (3, 5), 16, 24
EPS = 1e-6


def f64(array):
    return np.asarray(array).astype(np.float64)


def silu(z):
    return z / (1 + np.exp(-z))


def normalised(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def gated_norm(x, scale, *kernels, implementation=None):
    """A gated layer of the norm."""
    n = rms_norm(x, scale, implementation=implementation)
    return gated_dense(n, *kernels, implementation=implementation)


# name -> (op, shapes of what follows x, the same in NumPy)
OPS = {
    "a norm, gated_dense": (
        gated_norm,
        [(IN,), (IN, OUT), (IN, OUT)],
        lambda x, s, g, u: silu(normalised(x, s) @ g) * (normalised(x, s) @ u),
    ),
    "gated_dense": (
        gated_dense,
        [(IN, OUT), (IN, OUT)],
        lambda x, g, u: silu(x @ g) * (x @ u),
    ),
    "gated_product, kept": (
        lambda x, g, u, d, **o: gated_product(dense(x, g), dense(x, u), d, recompute=False, **o),
        [(IN, OUT), (IN, OUT), (OUT, IN)],
        lambda x, g, u, d: (silu(x @ g) * (x @ u)) @ d,
    ),
    "gated_product": (
        lambda x, g, u, d, **o: gated_product(dense(x, g), dense(x, u), d, **o),
        [(IN, OUT), (IN, OUT), (OUT, IN)],
        lambda x, g, u, d: (silu(x @ g) * (x @ u)) @ d,
    ),
}
op_names = pytest.mark.parametrize("name", OPS)


def operands(rng, name, rows=ROWS, x=f32, params=f32):
    """x, then the parameters; a scale is around 1."""
    arrays = [jnp.asarray(rng.standard_normal((*rows, IN)), x)]
    for shape in OPS[name][1]:
        values = rng.standard_normal(shape)
        values = 1 + values / 8 if shape == (IN,) else values / np.sqrt(shape[0])
        arrays.append(jnp.asarray(values, params))
    return arrays


def loss(op):
    return lambda *args: jnp.sum(jnp.sin(op(*args).astype(f32)))


def every(args):
    return tuple(range(len(args)))


def assert_close(got, want, tolerance):
    """Relative to the largest of each array."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = f64(a), f64(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-30, np.abs(b).max()))


# A chain of two products and a norm, of 16 to 24 terms: some tens of float32 roundings.
TIGHT = 64 * 2.0**-23
# bfloat16 results are rounded at the product, the activation and the next product.
COARSE = 8 * 2.0**-8


# ---------------------------------------------------------------- values


@op_names
def test_values_match_float64(rng, name):
    op, _, reference = OPS[name]
    for x, tolerance in ((f32, TIGHT), (bf16, COARSE)):
        args = operands(rng, name, x=x)
        y = op(*args)
        assert y.dtype == x
        assert_close(y, reference(*map(f64, args)), tolerance)


@op_names
def test_gradients_match_differences_in_float64(rng, name):
    op, _, reference = OPS[name]
    args = operands(rng, name)
    got = jax.jit(jax.grad(loss(op), every(args)))(*args)
    wide = [f64(a) for a in args]
    scalar = lambda arrays: np.sin(reference(*arrays)).sum()
    for i, gradient in enumerate(got):
        direction = rng.standard_normal(wide[i].shape)
        shifted = lambda h, i=i, d=direction: [*wide[:i], wide[i] + h * d, *wide[i + 1 :]]
        slope = (scalar(shifted(1e-6)) - scalar(shifted(-1e-6))) / 2e-6
        # Differences are good to 1e-9; a float32 sum of up to 400 products of order 1 to this.
        assert abs((f64(gradient) * direction).sum() - slope) < 400 * 2.0**-23 * 8


@op_names
def test_parameters_in_float32_get_unrounded_gradients(rng, name):
    args = operands(rng, name, x=bf16)
    op, plain = OPS[name][0], functools.partial(OPS[name][0], implementation="xla")
    got, want = (jax.jit(jax.grad(loss(f), every(args)))(*args) for f in (op, plain))
    assert [g.dtype for g in got] == [a.dtype for a in args]
    assert_close(got, want, COARSE)
    assert np.any(f64(got[-1]) != f64(got[-1].astype(bf16)))


# ---------------------------------------------------------------- what is kept


def kept(op, args):
    _, pull = jax.vjp(op, *args)
    once = {id(a): a.shape for a in jax.tree.leaves(pull) if a.shape[:2] == ROWS}
    return sorted(once.values())


def test_what_can_be_made_again_is_not_kept():
    hidden = (*ROWS, OUT)
    gate = jnp.ones(hidden, bf16)
    assert kept(gated_product, (gate, gate, jnp.ones((OUT, IN), bf16))) == [hidden, hidden]
    assert kept(gated_product, (gate, None, jnp.ones((OUT, IN), bf16))) == [hidden]
    keeping = functools.partial(gated_product, recompute=False)
    assert kept(keeping, (gate, gate, jnp.ones((OUT, IN), bf16))) == [hidden] * 3


def test_a_frozen_kernel_costs_no_product_and_no_recomputation():
    gate, kernel = jnp.ones((*ROWS, OUT)), jnp.ones((OUT, IN))
    program = lambda argument: str(jax.make_jaxpr(jax.grad(loss(of), argument))(gate, kernel))
    of = lambda gate, kernel: gated_product(gate, None, kernel)
    assert program(0).count("dot_general[") == program(1).count("dot_general[") == 2
    # The activation, of which the gradient is one pass; and once more, for the kernel's gradient.
    assert [program(i).count("normfuse_epilogue[") for i in (0, 1)] == [1, 2]


# ---------------------------------------------------------------- differentiation, vmap, scan


@pytest.mark.parametrize("name, mode", half(OPS, ["jvp", "fwd-rev", "rev-rev"]))
def test_forward_mode_and_second_order(rng, name, mode):
    args = operands(rng, name, rows=(3,))
    tangents = tuple(jnp.asarray(rng.standard_normal(a.shape), f32) for a in args)
    modes = {
        "jvp": lambda f: jax.jvp(f, tuple(args), tangents)[1],
        "fwd-rev": lambda f: jax.jvp(jax.grad(f, every(args)), tuple(args), tangents)[1],
        "rev-rev": lambda f: jax.grad(
            lambda *a: sum(map(jnp.vdot, jax.grad(f, every(args))(*a), tangents)), every(args)
        )(*args),
    }
    ours, plain = OPS[name][0], functools.partial(OPS[name][0], implementation="xla")
    got, want = (jax.jit(lambda f=f: modes[mode](loss(f)))() for f in (ours, plain))
    assert_close(got, want, 4 * TIGHT)


@pytest.mark.parametrize("name", [*OPS][::2])
def test_vmap_of_grad_and_grad_of_vmap(rng, name):
    args = operands(rng, name, rows=(4, 3))
    axes = (1, *[None] * (len(args) - 1))
    ours, plain = OPS[name][0], functools.partial(OPS[name][0], implementation="xla")
    each = lambda f: jax.jit(jax.vmap(jax.grad(loss(f), every(args)), axes))(*args)
    assert_close(each(ours), each(plain), TIGHT)
    total = lambda f: lambda *a: jnp.sum(jax.vmap(loss(f), axes)(*a))
    mixed = lambda f: jax.jit(jax.grad(total(f), every(args)))(*args)
    assert_close(mixed(ours), mixed(plain), TIGHT)
    stacked = [jnp.stack([a, -a, a / 2]) for a in args]  # parameters of each example's own
    own = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(jax.vmap(loss(f))(*a)), 1))(*stacked)
    assert_close(own(ours), own(plain), TIGHT)


# ---------------------------------------------------------------- meshes


def on_mesh(axis_type):
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)


def plain_mlp(x, scale, gate, up):
    wide = x.astype(f32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)
    n = (wide * rstd * scale).astype(x.dtype)
    return jax.nn.silu(n @ gate) * (n @ up)


SPLITS = {  # x, the scale, both kernels
    "rows": (P("data"), P(), P()),
    "columns": (P("data"), P(), P(None, "tensor")),
    "fsdp": (P(("data", "tensor")), P("data"), P("data")),
    "features": (P("data", None, "tensor"), P("tensor"), P("tensor")),
}


@pytest.mark.parametrize("split", SPLITS)
def test_auto_mesh_has_the_collectives_of_plain_jax(rng, eight_devices, split):
    del eight_devices
    mesh, specs = on_mesh(AxisType.Auto), SPLITS[split]
    args = operands(rng, "a norm, gated_dense", rows=(8, 4))
    places = tuple(NamedSharding(mesh, s) for s in (*specs, specs[2]))
    sharded = jax.device_put(tuple(args), places)
    compiled, plain = (
        jax.jit(jax.grad(loss(f), every(args)), out_shardings=places).lower(*sharded).compile()
        for f in (gated_norm, plain_mlp)
    )
    assert_close(compiled(*sharded), jax.grad(loss(plain_mlp), every(args))(*args), TIGHT)
    bytes_of = lambda c, kind: sum(o.bytes for o in hlo.collectives(c) if o.kind == kind)
    for kind in ("all-gather", "all-to-all", "collective-permute"):
        assert bytes_of(compiled, kind) <= bytes_of(plain, kind), kind
    # Split features: a sum of squares and one of products, a float a row each, forward and back.
    rows = 4 * 8 * 4 // 4 if split == "features" else 0
    assert bytes_of(compiled, "all-reduce") <= bytes_of(plain, "all-reduce") + 2 * rows


@pytest.mark.parametrize("split, kind", [(0, AxisType.Auto), (1, AxisType.Explicit)])
def test_gate_and_up_may_lie_differently(rng, eight_devices, kind, split):
    """One is whole everywhere, the other is not."""
    del eight_devices
    x, *_ = operands(rng, "gated_dense")
    kernels = [jnp.asarray(rng.standard_normal((IN, 4)), f32) for _ in range(2)]
    specs = [P(None, "tensor") if i == split else P() for i in (0, 1)]
    mesh = on_mesh(kind)

    def run(x, *kernels, implementation=None):
        one = functools.partial(gated_dense, implementation=implementation)
        if kind == AxisType.Explicit:
            return one(x, *kernels)
        options = {"mesh": mesh, "in_specs": (P(), *specs), "out_specs": P(None, None, "tensor")}
        return jax.shard_map(one, **options)(x, *kernels)

    if kind == AxisType.Auto:  # each device multiplies its columns of one and all of the other
        parts = mesh.shape["tensor"]
        kernels[split] = jnp.tile(kernels[split], parts)
    with jax.set_mesh(mesh):
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        args = [place(a, spec) for a, spec in zip((x, *kernels), (P(), *specs))]
        gradient = lambda name: jax.jit(
            jax.grad(loss(functools.partial(run, implementation=name)), every(args))
        )(*args)
        got, want = gradient(None), gradient("xla")
        assert [jax.typeof(g) for g in got] == [jax.typeof(w) for w in want]
        assert_close(got, want, TIGHT)


# ---------------------------------------------------------------- implementations, bad input


def test_native_never_falls_back_silently(rng):
    args = operands(rng, "gated_dense")
    with pytest.raises(NotImplementedError, match="gated_dense: .*'native' cannot serve.*one loop"):
        gated_dense(*args, implementation="native")
    with pytest.raises(NotImplementedError, match="gated_dense has no 'native' implementation"):
        gated_dense(*args, activation=jnp.square, implementation="native")


def test_activations_that_kernels_do_not_know(rng):
    x, gate, up = operands(rng, "gated_dense")
    square = gated_dense(x, gate, up, activation=jnp.square)
    assert_close(square, (f64(x) @ f64(gate)) ** 2 * (f64(x) @ f64(up)), TIGHT)
    scalar = gated_dense(x, gate, up, activation=SCALARS["silu"])
    np.testing.assert_array_equal(scalar, gated_dense(x, gate, up))
    product = lambda a: gated_product(dense(x, gate), dense(x, up), gate.T, activation=a)
    assert_close(product(jnp.square), f64(square) @ f64(gate).T, TIGHT)


X, K = jnp.ones((2, 3)), jnp.ones((3, 4))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: gated_dense(X, K, K[:, :2]), ValueError, r"kernel_up must .* \(3, 4\), got"),
        (lambda: gated_dense(X, K, K, activation=None), ValueError, "activation must .* got None"),
        (lambda: gated_dense(X, K.T, K.T), ValueError, r"kernel_gate's first axis .*kernel_gate.T"),
        (lambda: gated_product(X, X[:1], K), ValueError, r"up must have gate's shape \(2, 3\)"),
        (lambda: gated_product(X, X, K.T), ValueError, "kernel's first axis must .* gate's last"),
        (lambda: gated_product(X, X, K, activation=None), ValueError, "activation must be a name"),
    ],
)
def test_bad_input_is_one_clear_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
