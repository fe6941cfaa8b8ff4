"""What the RMSNorm ops communicate, counted in the compiled programs: no more than they must."""

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
from reference import assert_close
from rms_norm_cases import SPECS, Batch, Case, put

from normfuse import rms_norm

ON = pytest.mark.parametrize("kind", ["auto", "explicit"])
ROWS = [name for name in SPECS if name.startswith("rows")]
N = 16 * 4  # bytes of scale, and of its gradient, in float32
FLOAT = 4


@pytest.fixture
def mesh(kind, auto_mesh, explicit_mesh):
    chosen = {"auto": auto_mesh, "explicit": explicit_mesh}[kind]
    with jax.set_mesh(chosen):
        yield chosen


def communicates(fn, *args, **jit):
    return hlo.collectives(jax.jit(fn, **jit).lower(*args).compile())


def reduced(*sizes):
    return [Collective("all-reduce", size) for size in sorted(sizes)]


# ---------------------------------------------------------------- rows


@ON
@pytest.mark.parametrize("layout", ROWS)
def test_split_rows_do_not_communicate_forward(case, mesh, layout):
    args, _ = put(mesh, case, SPECS[layout])
    assert communicates(case, *args) == []


@ON
@pytest.mark.parametrize("layout", ROWS)
def test_split_rows_sum_the_gradient_of_scale_once(case, mesh, layout):
    """Over exactly the axes that the rows use, whatever else the mesh has."""
    args, cts = put(mesh, case, SPECS[layout])
    assert communicates(case.grad, *args, *cts) == reduced(N)


@ON
def test_narrow_scale_has_its_gradient_summed_wide(mesh):
    """Across devices too: float32 sums, rounded to bfloat16 once."""
    case = Case("rms_norm", x="bfloat16", scale="bfloat16")
    args, cts = put(mesh, case, SPECS["rows"])
    assert communicates(case.grad, *args, *cts) == reduced(N)


@ON
def test_gradients_of_each_example_do_not_communicate(mesh):
    """A batch over the devices: its examples' gradients belong to the device that has them."""
    batch = Batch("rms_norm", (0, None), size=4)
    place = lambda a: jax.device_put(a, NamedSharding(mesh, P("data", None, None, None)))
    fn = jax.vmap(batch.case.grad, (0, None, 0))
    assert communicates(fn, place(batch.args[0]), batch.args[1], place(batch.cts[0])) == []


@ON
@pytest.mark.parametrize("split", [None, "model"])
def test_split_heads_do_not_communicate(mesh, split):
    """Each device has the scale of its heads; its gradient is summed over the rows' axis alone."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((8, 2, 16)).astype(np.float32) for _ in range(2))
    scale = rng.standard_normal((2, 16)).astype(np.float32)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    args = place(x, "data", split, None), place(scale, split, None), place(dy, "data", split, None)
    assert communicates(rms_norm, *args[:2]) == []
    grad = jax.grad(lambda x, scale, dy: jnp.sum(rms_norm(x, scale) * dy), (0, 1))
    assert communicates(grad, *args) == reduced(2 * N // (2 if split else 1))
    y, dx, dscale = map(np.asarray, (rms_norm(*args[:2]), *grad(*args)))
    for head in range(2):
        of_dx, of_dscale = reference.backward(dy[:, head], x[:, head], scale[head])
        assert_close(y[:, head], reference.forward(x[:, head], scale[head])[0])
        assert_close(dx[:, head], of_dx)
        assert_close(dscale[head], of_dscale)


# ---------------------------------------------------------------- features


@ON
@pytest.mark.parametrize("layout, rows", [("features", 2 * 2), ("features over both axes", 8 * 2)])
def test_split_features_sum_one_float_a_row_forward(case, mesh, layout, rows):
    args, _ = put(mesh, case, SPECS[layout], P(SPECS[layout][2]))
    compiled = jax.jit(case).lower(*args).compile()
    assert hlo.collectives(compiled) == reduced(rows * FLOAT)
    assert hlo.calls(compiled) == {"apply": 1, "row_statistics": 1}


@ON
@pytest.mark.parametrize("layout, rows", [("features", 2 * 2), ("features over both axes", 8 * 2)])
def test_split_features_sum_one_more_float_a_row_backward(case, mesh, layout, rows):
    """Its twin; XLA makes one message of the two. dscale is summed where rows are split too."""
    args, cts = put(mesh, case, SPECS[layout], P(SPECS[layout][2]))
    compiled = jax.jit(case.grad).lower(*args, *cts).compile()
    dscale = [N // 2] * (layout == "features")
    assert hlo.collectives(compiled) == reduced(2 * rows * FLOAT, *dscale)
    assert hlo.calls(compiled) == {"backward_apply": 1, "row_dots": 1, "row_statistics": 1}


@ON
def test_split_features_with_a_replicated_scale_gather_only_its_gradient(case, mesh):
    args, cts = put(mesh, case, SPECS["features"])
    assert communicates(case, *args) == reduced(4 * FLOAT)
    gather = [Collective("all-gather", N)]
    assert communicates(case.grad, *args, *cts) == gather + reduced(2 * 4 * FLOAT, N // 2)


# ---------------------------------------------------------------- how scale is stored


@ON
@pytest.mark.parametrize("stored", [P("data"), P("model"), P(("data", "model"))], ids=str)
def test_sharded_scale_is_gathered_and_nothing_else(mesh, stored):
    """FSDP: activations are not dragged onto the axes that scale is stored over."""
    case = Case("residual_rms_norm")
    args, _ = put(mesh, case, SPECS["rows"], stored)
    assert communicates(case, *args) == [Collective("all-gather", N)]


@ON
def test_gradient_of_a_sharded_scale(case, mesh):
    """The gather of the forward, and one sum; each device keeps its part of it."""
    args, cts = put(mesh, case, SPECS["rows"], P("data"))
    fn = jax.jit(case.grad, out_shardings=tuple(a.sharding for a in args))
    compiled = fn.lower(*args, *cts).compile()
    gathered, summed = hlo.collectives(compiled)
    assert gathered == Collective("all-gather", N)
    assert summed in (Collective("all-reduce", N), Collective("reduce-scatter", N // 4))
    case.check(compiled(*args, *cts), case.gradients())


# ---------------------------------------------------------------- against plain JAX and bare FFI


@pytest.mark.parametrize(
    "kind, layout, stored", half(["auto", "explicit"], SPECS, [P(), P("model")]), ids=str
)
def test_no_more_than_plain_jax(mesh, layout, stored):
    """The same formula in jnp, partitioned by XLA, moves at least as much in each direction.

    Gradients are stored as the operands are, as in training.
    """
    case = Case("rms_norm")
    args, cts = put(mesh, case, SPECS[layout], stored)
    plain = functools.partial(case.grad, implementation="xla")
    like = tuple(a.sharding for a in args)
    ours, twin = (communicates(f, *args, *cts, out_shardings=like) for f in (case.grad, plain))
    assert sum(c.bytes for c in ours) <= sum(c.bytes for c in twin) and len(ours) <= len(twin)


def test_bare_ffi_call_gathers_and_the_op_does_not(eight_devices):
    """Why there is an op around the kernel: XLA knows nothing of a custom call."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.ones((64, 128, 1), np.float32), NamedSharding(mesh, P("data")))
    bare = jax.ffi.ffi_call("normfuse_norm_forward", [jax.ShapeDtypeStruct(x.shape, x.dtype)])
    flags = {"centred": False, "has_residual": False, "has_scale": False, "has_bias": False}
    flags |= {"cast_before": False, "with_mean": False, "with_rstd": False}
    call = lambda x: bare(x, eps=np.float64(1e-6), scale_offset=np.float64(0), **flags)[0]
    assert communicates(call, x) == [Collective("all-gather", x.nbytes)]
    assert communicates(functools.partial(rms_norm, axis=1), x) == []
    np.testing.assert_allclose(jax.jit(call)(x), rms_norm(x, axis=1), rtol=1e-6)


@pytest.mark.parametrize("kind, shape", [("auto", (8,)), ("explicit", (2, 4))], ids=str)
def test_example_of_jax_own_tutorial(kind, eight_devices, shape):
    """(32, 512, 512) in bfloat16 over eight devices, normalised over its last two dimensions.

    With a bare `ffi_call` that example gathers x. Here: nothing forward, and one sum of scale's
    size backward.
    """
    axis = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
    names = ("batch", "other")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(axis,) * len(shape))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 512, 512)).astype(jnp.bfloat16)
    scale = rng.standard_normal((512, 512)).astype(jnp.float32)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P(names, None, None)))
        norm = functools.partial(rms_norm, axis=(-2, -1))
        forward = jax.jit(norm).lower(split, scale).compile()
        assert (hlo.collectives(forward), hlo.calls(forward)) == ([], {"forward": 1})
        loss = lambda x, scale: jnp.sum(norm(x, scale).astype(jnp.float32))
        backward = jax.jit(jax.grad(loss, (0, 1))).lower(split, scale).compile()
        assert hlo.collectives(backward) == reduced(512 * 512 * 4)
        y = forward(split, scale)
        assert y.sharding.is_equivalent_to(split.sharding, 3)
        dx, dscale = (np.asarray(g) for g in backward(split, scale))
    row = np.s_[::16]
    reference.assert_close(np.asarray(y)[row], reference.forward(x[row], scale, axes=(1, 2))[0])
    ones = np.ones_like(x)
    expected = reference.backward(ones[row], x[row], scale, axes=(1, 2))[0]
    reference.assert_close(dx[row], expected)
    part = np.s_[..., :64]  # a part of dscale, whose every element needs every row
    rstd = reference.forward(x, None, axes=(1, 2))[1].value[:, None, None]
    terms = (reference.wide(x) * rstd)[part]
    sums = reference.Expected(terms.sum(0), np.abs(terms).sum(0), x[0].size)
    reference.assert_close(dscale[part], sums)


# ---------------------------------------------------------------- reshapes, constraints, odd sizes


def test_reshape_that_splits_a_mesh_axis_does_not_communicate(eight_devices):
    """Tokens in one dimension, reshaped to (batch, sequence): part of the axis in each."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    case = Case("rms_norm", (4, 16, 24))
    place = lambda a: jax.device_put(a.reshape(64, 24), NamedSharding(mesh, P("data")))
    x, ct, scale = place(case.args[0]), place(case.cts[0]), case.args[1]
    forward = lambda x, scale: case(x.reshape(4, 16, 24), scale)[0].reshape(64, 24)
    assert communicates(forward, x, scale) == []

    def backward(x, scale, ct):
        dx, dscale = case.grad(x.reshape(4, 16, 24), scale, ct.reshape(4, 16, 24))
        return dx.reshape(64, 24), dscale

    assert communicates(backward, x, scale, ct) == reduced(24 * FLOAT)


@pytest.mark.parametrize("layout", SPECS)
def test_constraint_inside_is_enough(auto_mesh, layout):
    """Where nothing but a constraint in the program says how x is split."""
    case = Case("residual_rms_norm")
    with jax.set_mesh(auto_mesh):
        split = lambda a: jax.lax.with_sharding_constraint(a, SPECS[layout])
        fn = lambda x, *rest: [split(y) for y in case(split(x), *map(split, rest[:-1]), rest[-1])]
        expected = {"features": reduced(16), "features over both axes": reduced(64)}
        assert communicates(fn, *case.args) == expected.get(layout, [])


def test_gradient_split_otherwise_moves_alone(auto_mesh):
    """x's split decides: a cotangent that comes otherwise is brought to it, x stays."""
    case = Case("rms_norm", (8, 16, 16))
    place = lambda a, spec: jax.device_put(a, NamedSharding(auto_mesh, spec))
    x, ct = place(case.args[0], P("data")), place(case.cts[0], P(None, "data"))
    fn = jax.jit(case.grad, out_shardings=(x.sharding, None))
    compiled = fn.lower(x, case.args[1], ct).compile()
    (moved,) = [c for c in hlo.collectives(compiled) if c.kind != "all-reduce"]
    assert moved.kind in ("all-to-all", "all-gather") and moved.bytes <= ct.nbytes
    case.check(compiled(x, case.args[1], ct), case.gradients())


@pytest.mark.parametrize("shape", [(7, 2, 16), (8, 2, 15), (9, 3, 5)], ids=str)
def test_dimension_that_the_mesh_does_not_divide_is_counted_once(auto_mesh, shape):
    """XLA pads it, and padding must not reach a sum: zeros, which become ones here."""
    case = Case("residual_rms_norm", shape)
    with jax.set_mesh(auto_mesh):
        place = lambda a: jax.lax.with_sharding_constraint(a, P("data", None, "model"))
        split = lambda a: jnp.where(place(a) == 0, 1, place(a))
        fn = lambda x, r, scale, *cts: case.grad(split(x), split(r), scale, *map(split, cts))
        case.check(jax.jit(fn)(*case.args, *case.cts), case.gradients())
