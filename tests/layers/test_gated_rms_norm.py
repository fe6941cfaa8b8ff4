"""Gated RMSNorm: values and gradients against float64, contexts, meshes and bad inputs."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from combinations import half
from hlo import Collective
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from reference import assert_close

from normfuse import gated_rms_norm

KINDS = [(gate, act) for gate in ("after", "before") for act in ("silu", "sigmoid")]


def drawn(shape, own=None, x="float32", z="float32", scale="float32", dtype=None, seed=0):
    """x, z and scale, and dy."""
    rng = np.random.default_rng(seed)
    draw = lambda shape, d: rng.standard_normal(shape).astype(jnp.dtype(d))
    args = [draw(shape, x), 2 * draw(shape, z), draw(own or shape[-1:], scale)]
    return args, draw(shape, dtype or x)


def grads_of(fn, args, dy):
    """The result and the gradients of every operand."""

    @jax.jit
    def run(args, dy):
        y, pull = jax.vjp(fn, *args)
        return y, pull(dy)

    return run(tuple(args), dy)


def check(fn, args, dy, gate, activation, slack=1.0, **options):
    """`fn`'s result and gradients, each within its tolerance."""
    y, grads = grads_of(fn, args, dy)
    want = reference.gated(dy, *args, gate=gate, activation=activation, **options)
    compute = "float64" if np.float64 in [a.dtype for a in (*args, dy)] else "float32"
    for got, expected in zip((y, *grads), want, strict=True):
        assert_close(got, expected, compute, slack)
    assert [g.dtype for g in grads] == [a.dtype for a in args]
    return y


@pytest.mark.optimized
@pytest.mark.parametrize("kind, implementation", half(KINDS, ["native", "xla"]), ids=str)
def test_values_and_gradients(kind, implementation):
    """Of "xla" the gradient is JAX's own, which rounds its parts to the dtype of x."""
    gate, activation = kind
    dtype = "float32" if implementation == "xla" else "bfloat16"
    args, dy = drawn((37, 24), x=dtype, z=dtype)
    options = {"gate": gate, "activation": activation}
    fn = functools.partial(gated_rms_norm, **options, implementation=implementation)
    check(fn, args, dy, **options)


@pytest.mark.parametrize(
    "gate, x, z, scale, dtype",
    [
        ("after", "bfloat16", "float32", "bfloat16", "float32"),
        ("before", "float32", "float16", "float32", "bfloat16"),
        ("after", "float64", "float32", "float32", "float32"),
    ],
)
def test_mixes_of_dtypes(gate, x, z, scale, dtype):
    with jax.enable_x64("float64" in (x, z)):
        args, dy = drawn((5, 24), x=x, z=z, scale=scale, dtype=dtype)
        fn = functools.partial(gated_rms_norm, gate=gate, dtype=dtype, implementation="native")
        assert check(fn, args, dy, gate, "silu").dtype == dtype


@pytest.mark.parametrize("gate", ["after", "before"])
def test_heads_and_groups(gate):
    """Groups are rows of their own, whose scale is a part of the whole one."""
    (x, z, scale), dy = drawn((5, 24), (3, 8))
    fn = functools.partial(gated_rms_norm, gate=gate, scale_offset=1.0, implementation="native")
    parts = [a.reshape(5, 3, 8) for a in (x, z)]
    heads, of_heads = grads_of(fn, [*parts, scale], dy.reshape(5, 3, 8))
    grouped = functools.partial(fn, group_size=8)
    groups, of_groups = grads_of(grouped, [x, z, scale.reshape(24)], dy)
    for one, other in zip((heads, *of_heads), (groups, *of_groups)):
        np.testing.assert_array_equal(one.reshape(other.shape), other)
    for i in range(3):
        alone = [parts[0][:, i], parts[1][:, i], scale[i]]
        want = reference.gated(dy.reshape(5, 3, 8)[:, i], *alone, gate=gate, scale_offset=1.0)
        got = heads[:, i], of_heads[0][:, i], of_heads[1][:, i], of_heads[2][i]
        for a, expected in zip(got, want, strict=True):
            assert_close(a, expected)


@pytest.mark.parametrize("gate", ["after", "before"])
def test_as_mamba_and_qwen_write_them(gate):
    """The formulas of their reference implementations, in float32."""
    (x, z, weight), _ = drawn((2, 5, 24))
    silu = lambda v: v * jax.nn.sigmoid(v)
    h = x * silu(z) if gate == "before" else x
    rows = h.reshape(2, 5, 2, 12) if gate == "before" else h
    normal = rows * jax.lax.rsqrt(jnp.mean(rows**2, -1, keepdims=True) + 1e-5)
    want = weight * normal.reshape(x.shape) * (1 if gate == "before" else silu(z))
    options = {"gate": gate, "eps": 1e-5, "group_size": 12 if gate == "before" else None}
    np.testing.assert_allclose(gated_rms_norm(x, z, weight, **options), want, 1e-5, 1e-6)


@pytest.mark.parametrize("gate", ["after", "before"])
def test_no_scale_no_rows_one_row(gate):
    fn = functools.partial(gated_rms_norm, gate=gate, implementation="native")
    (x, z, _), dy = drawn((5, 24))
    for shape in ((5, 24), (0, 24), (24,)):
        cut = lambda a, shape=shape: a[: shape[0]] if len(shape) == 2 else a[0]
        y, (dx, dz) = grads_of(fn, [cut(x), cut(z)], cut(dy))
        assert y.shape == dx.shape == dz.shape == shape
        if x.size:
            want = reference.gated(cut(dy), cut(x), cut(z), None, gate=gate)[:3]
            for got, expected in zip((y, dx, dz), want, strict=True):
                assert_close(got, expected)


@pytest.mark.parametrize("gate", ["after", "before"])
@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_first_and_second_order(gate, mode):
    with jax.enable_x64(True):
        args, _ = drawn((2, 5), x="float64", z="float64", scale="float64")
        fn = functools.partial(gated_rms_norm, gate=gate, eps=0.1, scale_offset=0.5)
        for argnums in ((0, 1, 2), (0,), (1,), (2,)):
            chosen = [args[i] for i in argnums]

            def some(*given, argnums=argnums):
                full = list(args)
                for i, a in zip(argnums, given):
                    full[i] = a
                return fn(*full)

            order = 2 if len(argnums) == 3 else 1
            check_grads(some, chosen, order=order, modes=[mode], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind, spec, gate",
    half(
        [AxisType.Auto, AxisType.Explicit],
        [P("data", "model", None), P("data", None, "model")],
        ["after", "before"],
    ),
    ids=str,
)
def test_meshes(eight_devices, kind, spec, gate):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    args, dy = drawn((8, 2, 16))
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    fn = functools.partial(gated_rms_norm, gate=gate, implementation="native")
    with jax.set_mesh(mesh):
        placed = [put(args[0], spec), put(args[1], spec), put(args[2], P(spec[2]))]
        ct = put(dy, spec)
        check(fn, placed, ct, gate, "silu")
        assert spec[2] or hlo.collectives(jax.jit(fn).lower(*placed).compile()) == []
        both = jax.jit(lambda args, dy: jax.vjp(fn, *args)[1](dy))
        found = hlo.collectives(both.lower(tuple(placed), ct).compile())
    if spec[2] is None:
        assert found == [Collective("all-reduce", 16 * 4)]


def test_bad_input_is_named():
    x = jnp.ones((4, 6))
    for given, error, words in [
        ({"z": jnp.ones(6)}, ValueError, r"z must have x's shape \(4, 6\), got \(6,\)"),
        ({"z": jnp.ones((4, 6), int)}, TypeError, "z must be one of .*int32"),
        ({"gate": "between"}, ValueError, "gate must be one of .*'between'"),
        ({"activation": "relu"}, ValueError, "activation must be one of .*'relu'"),
        ({"group_size": 4}, ValueError, "group_size must .* the 6 features of x, got 4"),
        ({"group_size": 3, "scale": jnp.ones((2, 3))}, ValueError, r"scale must .*\(6,\)"),
        ({"scale": jnp.ones(5)}, ValueError, r"scale must have the shape .*got \(5,\)"),
        ({"eps": -1.0}, ValueError, "eps must be at least 0"),
    ]:
        with pytest.raises(error, match=f"^gated_rms_norm: {words}"):
            gated_rms_norm(**{"x": x, "z": x, **given})
