"""Meshes: Auto, Explicit and mixed axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rms_norm_cases import SPECS, Batch, Case, put

pytestmark = pytest.mark.oldest

FORWARD, BOTH = {"forward": 1}, {"backward": 1, "forward": 1}
SPLIT_FORWARD = {"apply": 1, "row_statistics": 1}
SPLIT_BOTH = {
    "backward_apply": 1,
    "row_dots": 1,
    "row_statistics": 1,
}  # y is not asked for: no apply
EVERY_LAYOUT = pytest.mark.parametrize(
    "op, layout", [*(("residual_rms_norm", name) for name in SPECS), ("rms_norm", "features")]
)


def split_features(spec):
    return len(spec) == 3 and spec[2] is not None


def check_forward_and_grad(case, serve, args, cts, spec, **kwargs):
    """Both directions, native, and y is split as x is."""
    split = split_features(spec)
    calls = SPLIT_FORWARD if split else FORWARD
    _, out = serve(case, case, *args, expected=case.values(), calls=calls, **kwargs)
    assert all(y.sharding.is_equivalent_to(args[0].sharding, y.ndim) for y in jax.tree.leaves(out))
    calls = SPLIT_BOTH if split else BOTH
    serve(case, case.grad, *args, *cts, expected=case.gradients(), calls=calls, **kwargs)


# ---------------------------------------------------------------- Auto axes


@EVERY_LAYOUT
def test_auto(op, serve, auto_mesh, layout):
    """Auto axes"""
    case = Case(op)
    args, cts = put(auto_mesh, case, SPECS[layout])
    check_forward_and_grad(case, serve, args, cts, SPECS[layout])


def test_auto_with_set_mesh_and_constraints(case, serve, auto_mesh):
    """Auto axes under `set_mesh`, with `with_sharding_constraint`"""
    spec = P("data", None, "model")

    def fn(*args):
        x, *rest = args
        return case(jax.lax.with_sharding_constraint(x, spec), *rest)

    with jax.set_mesh(auto_mesh):
        serve(case, fn, *case.args, expected=case.values(), calls=SPLIT_FORWARD)


def test_auto_in_and_out_shardings(case, serve, auto_mesh):
    """`in_shardings` and `out_shardings`"""
    rows, whole = NamedSharding(auto_mesh, P("data")), NamedSharding(auto_mesh, P())
    shardings = (*[rows] * (len(case.args) - 1), whole)
    kwargs = {"in_shardings": shardings, "out_shardings": rows}
    _, out = serve(case, case, *case.args, expected=case.values(), **kwargs)
    assert jax.tree.leaves(out)[0].sharding.is_equivalent_to(rows, 3)


@pytest.mark.parametrize("layout", ["rows", "features"])
def test_auto_eager(case, serve, auto_mesh, layout):
    """without `jit`, on Auto axes: the sharding is kept"""
    args, cts = put(auto_mesh, case, SPECS[layout])
    out, pullback = jax.vjp(functools.partial(case, implementation="native"), *args)
    case.check(out, case.values())
    case.check(pullback(tuple(cts)), case.gradients())
    assert all(y.sharding.is_equivalent_to(args[0].sharding, y.ndim) for y in out)
    serve.record("native")


def test_sharded_scale(case, serve, auto_mesh):
    """a scale stored sharded (FSDP)"""
    for stored in (P("data"), P(("data", "model"))):
        args, cts = put(auto_mesh, case, SPECS["rows"], stored)
        check_forward_and_grad(case, serve, args, cts, SPECS["rows"])


@pytest.mark.parametrize("shape", [(7, 2, 16), (8, 2, 15), (3, 5, 7)], ids=str)
def test_dimensions_that_the_mesh_does_not_divide(case, serve, auto_mesh, shape):
    """Auto axes that do not divide x"""
    odd = Case(case.op, shape)
    with jax.set_mesh(auto_mesh):
        split = lambda a: jax.lax.with_sharding_constraint(a, P("data", None, "model"))
        fn = lambda *args: odd.grad(split(args[0]), *args[1:])
        calls = BOTH if shape[2] % 2 else SPLIT_BOTH
        serve(odd, fn, *odd.args, expected=odd.gradients(), calls=calls)


@pytest.mark.parametrize("axis", [0, 1, (0, 2), (1, 2)], ids=str)
def test_normalised_axes_of_a_split_array(serve, auto_mesh, axis):
    """Auto axes and `axis` other than the last"""
    case = Case("residual_rms_norm", (8, 4, 16), axis=axis)
    for spec in (P("data", "model", None), P(None, "model", "data")):
        *big, scale = case.args
        args = [jax.device_put(a, NamedSharding(auto_mesh, spec)) for a in big] + [scale]
        split = any(spec[a] for a in case.axes)
        calls = SPLIT_BOTH if split else BOTH
        serve(case, case.grad, *args, expected=case.gradients(), calls=calls)


def test_sub_axis_reshape(serve, auto_mesh):
    """a reshape that splits a mesh axis in two"""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    case = Case("rms_norm", (4, 16, 24))
    x = jax.device_put(case.args[0].reshape(64, 24), NamedSharding(mesh, P("data")))
    grad = lambda x, scale: case.grad(x.reshape(4, 16, 24), scale)
    serve(case, grad, x, case.args[1], expected=case.gradients(), calls=BOTH)


def test_sub_axis_reshape_of_features(serve, eight_devices):
    """a reshape that splits the mesh axis of the features"""
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    case = Case("rms_norm", (3, 4, 16))
    x = jax.device_put(case.args[0].reshape(3, 64), NamedSharding(mesh, P(None, "model")))
    grad = lambda x, scale: case.grad(x.reshape(3, 4, 16), scale)
    serve(case, grad, x, case.args[1], expected=case.gradients(), calls=SPLIT_BOTH)


def test_devices_in_another_order(serve, eight_devices):
    """a mesh of devices in an order of its own"""
    devices = np.array(eight_devices)[[5, 2, 7, 0, 1, 6, 3, 4]].reshape(2, 4)
    mesh, case = Mesh(devices, ("model", "data")), Case("rms_norm")
    args, cts = put(mesh, case, SPECS["features"])
    check_forward_and_grad(case, serve, args, cts, SPECS["features"])


@pytest.mark.parametrize("shape, names", [((1, 8), ("data", "model")), ((1,), ("data",))])
def test_axes_of_one_device(serve, eight_devices, shape, names):
    """mesh axes of size one"""
    case = Case("rms_norm")
    mesh = Mesh(np.array(eight_devices)[: np.prod(shape)].reshape(shape), names)
    args, cts = put(mesh, case, P("data"))
    serve(case, case.grad, *args, *cts, expected=case.gradients(), calls=BOTH)


def test_ranks_in_one_program(serve, auto_mesh):
    """the op on arrays of several ranks in one program"""
    flat, deep = Case("rms_norm", (8, 6), axis=1), Case("rms_norm", (8, 6, 4), axis=1)
    args = [*put(auto_mesh, flat, P("data"))[0], *put(auto_mesh, deep, P("data"))[0]]
    fn = lambda a, b, c, d: (flat(a, b), deep(c, d))
    expected = [*flat.values(), *deep.values()]
    serve(flat, fn, *args, expected=expected, calls={"forward": 2})


@pytest.mark.parametrize(
    "dtypes", [("float32", "float64", None), ("float32", "float32", "float64")]
)
@pytest.mark.parametrize("layout", ["rows", "features"])
def test_float64_on_a_mesh(serve, auto_mesh, layout, dtypes):
    """float64 on a mesh"""
    x, scale, dtype = dtypes
    with jax.enable_x64(True):
        case = Case("residual_rms_norm", x=x, scale=scale, dtype=dtype)
        args, cts = put(auto_mesh, case, SPECS[layout])
        check_forward_and_grad(case, serve, args, cts, SPECS[layout])


# ---------------------------------------------------------------- Explicit axes


@EVERY_LAYOUT
def test_explicit(op, serve, explicit_mesh, layout):
    """Explicit axes"""
    case = Case(op)
    spec = SPECS[layout]
    args, cts = put(explicit_mesh, case, spec)
    with jax.set_mesh(explicit_mesh):
        check_forward_and_grad(case, serve, args, cts, spec)
        (y, *_) = jax.eval_shape(case, *args)
    assert y.sharding.spec == P(*spec, *[None] * (3 - len(spec)))


def test_explicit_eager(case, serve, explicit_mesh):
    """without `jit`, on Explicit axes, with and without `set_mesh`"""
    args, cts = put(explicit_mesh, case, SPECS["features"])
    case.check(case(*args, implementation="native"), case.values())
    with jax.set_mesh(explicit_mesh):
        out, pullback = jax.vjp(functools.partial(case, implementation="native"), *args)
        case.check(pullback(tuple(cts)), case.gradients())
    assert all(jax.typeof(y).sharding.spec == SPECS["features"] for y in out)
    serve.record("native")


def test_explicit_with_operands_of_no_mesh(case, serve, explicit_mesh):
    """Explicit axes, and operands that are on no mesh yet"""
    x = jax.device_put(case.args[0], NamedSharding(explicit_mesh, SPECS["features"]))
    case.check(case(x, *case.args[1:], implementation="native"), case.values())
    _, out = serve(case, case, x, *case.args[1:], expected=case.values(), calls=SPLIT_FORWARD)
    assert jax.typeof(out[0]).sharding.spec == SPECS["features"]


def test_explicit_residual_alone_is_split(serve, explicit_mesh):
    """Explicit axes, x on no mesh and a residual that is split"""
    case = Case("residual_rms_norm")
    residual = jax.device_put(case.args[1], NamedSharding(explicit_mesh, P("data")))
    with jax.set_mesh(explicit_mesh):
        fn = lambda residual: case(jnp.asarray(case.args[0]), residual, case.args[2])
        _, out = serve(case, fn, residual, expected=case.values())
    assert jax.typeof(out[0]).sharding.spec == P("data", None, None)


@pytest.mark.parametrize(
    "stored, implementation", half([P("data"), P("model"), P(("data", "model"))], [None, "xla"])
)
def test_explicit_sharded_scale(case, serve, explicit_mesh, stored, implementation):
    """Explicit axes, scale stored sharded (FSDP)"""
    args, cts = put(explicit_mesh, case, P("data", None, None), stored)
    native = implementation is None
    with jax.set_mesh(explicit_mesh):
        fn = functools.partial(case.grad, implementation=implementation)
        run = serve if native else functools.partial(serve.partly)
        _, grads = run(
            case, fn, *args, *cts, expected=case.gradients(), calls=BOTH if native else {}
        )
    assert jax.typeof(grads[-1]).sharding.spec == stored


def test_mixed(case, serve, mixed_mesh):
    """Explicit and Auto axes mixed"""
    with jax.set_mesh(mixed_mesh):
        args, cts = put(mixed_mesh, case, P("data", None, None))
        check_forward_and_grad(case, serve, args, cts, P("data", None, None))
        args, cts = put(mixed_mesh, case, P("data", None, "model"))
        check_forward_and_grad(case, serve, args, cts, P("data", None, "model"))


def test_auto_axes(case, serve, explicit_mesh):
    """`auto_axes` inside Explicit axes"""
    with jax.set_mesh(explicit_mesh):
        args, cts = put(explicit_mesh, case, P("data", None, None))
        out = tuple([P("data", None, None)] * (len(args) - 1) + [P(None)])
        fn = jax.sharding.auto_axes(case.grad, out_sharding=out)
        serve(case, fn, *args, *cts, expected=case.gradients(), calls=BOTH)


def test_explicit_axes(case, serve, auto_mesh):
    """`explicit_axes` inside Auto axes"""
    with jax.set_mesh(auto_mesh):
        args, cts = put(auto_mesh, case, P("data", None, None))
        rows = [P("data", None, None)] * (len(args) - 1)
        specs = tuple([*rows, P(None), *[P("data", None, None)] * len(cts)])
        fn = jax.sharding.explicit_axes(case.grad, in_sharding=specs)
        serve(case, fn, *args, *cts, expected=case.gradients(), calls=BOTH)


# ---------------------------------------------------------------- with transformations


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_derivatives_on_a_mesh(case, serve, auto_mesh, explicit_mesh, explicit):
    """`jvp`, `scan`, `checkpoint` and `vmap(grad)` on Auto and Explicit axes"""
    mesh = explicit_mesh if explicit else auto_mesh
    with jax.set_mesh(mesh):
        args, cts = put(mesh, case, SPECS["features"])
        tangents, _ = put(mesh, case.replace(args=case.tangents), SPECS["features"])
        push = lambda args, tangents: jax.jvp(case, args, tangents)[1]
        run = functools.partial(serve.partly, case)
        run(push, args, tangents, expected=case.pushed(), calls={"row_statistics": 1})
        twice = jax.grad(jax.checkpoint(case.loss), case.argnums)
        run(twice, *args, *cts, expected=case.gradients(), calls=SPLIT_BOTH)

        def loop(args, cts):
            grads = jax.lax.scan(lambda _, ct: (None, case.grad(*args, *ct)), None, cts)[1]
            return jax.tree.map(lambda a: a[0], grads)

        cts = [ct[None] for ct in cts]
        run(loop, args, cts, expected=case.gradients(), calls=SPLIT_BOTH)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_gradients_of_each_example_on_a_mesh(serve, auto_mesh, explicit_mesh, explicit):
    """`vmap(grad)` on Auto and Explicit axes"""
    mesh = explicit_mesh if explicit else auto_mesh
    batch = Batch("rms_norm", (0, None), size=4)
    with jax.set_mesh(mesh):
        for spec in (P("data", None, None, None), P(None, "data", None, None)):
            place = lambda a, spec=spec: jax.device_put(a, NamedSharding(mesh, spec))
            fn = jax.vmap(batch.case.grad, (0, None, 0))
            args = place(batch.args[0]), batch.args[1], place(batch.cts[0])
            expected = batch.each("gradients")
            serve.partly(batch.case, fn, *args, expected=expected, calls=BOTH)
