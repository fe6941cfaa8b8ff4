"""Meshes: Auto, Explicit and mixed axes, and what is communicated there"""

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from hlo import Collective
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rms_norm_cases import SPECS, Batch, Case, put

FORWARD, BOTH = {"forward": 1}, {"backward": 1, "forward": 1}
SPLIT_FORWARD = {"apply": 1, "row_statistics": 1}
SPLIT_BOTH = {"backward_apply": 1, "row_dots": 1, "row_statistics": 1}  # y is not asked for
N, FLOAT = 16 * 4, 4  # bytes of scale and of its gradient; of a number
ON = pytest.mark.parametrize("kind", ["auto", "explicit"])


@pytest.fixture
def mesh(kind, request):
    chosen = request.getfixturevalue(f"{kind}_mesh")
    with jax.set_mesh(chosen):
        yield chosen


def place(mesh, a, *spec):
    return jax.device_put(a, NamedSharding(mesh, P(*spec)))


def reduced(*sizes):
    return [Collective("all-reduce", size) for size in sorted(sizes)]


def communicates(fn, *args, **jit):
    return hlo.collectives(jax.jit(fn, **jit).lower(*args).compile())


# Collectives of the forward and the backward: where rows are split, scale's gradient alone, over
# exactly the axes that they use; where features are, one number a row each way.
COMMUNICATED = {
    "rows": ([], reduced(N)),
    "rows over both axes": ([], reduced(N)),
    "rows in two dimensions": ([], reduced(N)),
    "features": (reduced(4 * FLOAT), reduced(2 * 4 * FLOAT, N // 2)),
    "features over both axes": (reduced(16 * FLOAT), reduced(2 * 16 * FLOAT)),
    "replicated": ([], []),
}
CENTRED = {  # a layer norm gathers two numbers of each part of a row
    "rows in two dimensions": ([], reduced(2 * N)),
    "features": ([Collective("all-gather", 2 * 4 * 2 * FLOAT)], None),
    "features over both axes": ([Collective("all-gather", 8 * 16 * 2 * FLOAT)], None),
}
EVERY = [
    *(("residual_rms_norm", None, "auto", name) for name in SPECS),
    *(("residual_rms_norm", None, "explicit", name) for name in ("rows", "features")),
    ("rms_norm", None, "explicit", "features"),
    *(("residual_rms_norm", None, "mixed", name) for name in ("rows", "features")),
    *(("residual_rms_norm", "float32", *one) for one in half(["auto", "explicit"], [*CENTRED])),
    *(("residual_layer_norm", "float32", *one) for one in half(["auto", "explicit"], [*CENTRED])),
    ("residual_layer_norm", "float32", "explicit", "features over both axes"),
]


@pytest.mark.parametrize("op, bias, kind, layout", EVERY, ids=str)
def test_layouts(op, bias, kind, layout, mesh, serve):
    """every way to split x: y is split as x is, and no more is communicated than must be"""
    case, spec = Case(op, bias=bias), SPECS[layout]
    stored = P(spec[2]) if len(spec) == 3 else P()
    args = [place(mesh, a, *(spec if a.ndim == 3 else stored)) for a in case.args]
    cts = [place(mesh, ct, *spec) for ct in case.cts]
    split = layout.startswith("features")
    title = f"{kind.capitalize()} axes: {layout}"
    calls = SPLIT_FORWARD if split else FORWARD
    text, out = serve(case, case, *args, expected=case.values(), calls=calls, title=title)
    assert all(y.sharding.is_equivalent_to(args[0].sharding, y.ndim) for y in out)
    if kind == "explicit":
        assert jax.eval_shape(case, *args)[0].sharding.spec == P(*spec)
    calls = SPLIT_BOTH if split else BOTH
    backward, grads = serve(
        case, case.grad, *args, *cts, expected=case.gradients(), calls=calls, title=title
    )
    forward, both = (CENTRED if "layer" in op else COMMUNICATED)[layout]
    assert hlo.collectives(text) == forward
    if bias is None or op == "residual_layer_norm" and both is not None:
        assert hlo.collectives(backward) == both
    else:  # a bias adds its gradient to scale's
        kinds = [c.kind for c in hlo.collectives(backward)]
        assert kinds.count("all-gather") <= 1 and len(kinds) <= 3


@ON
@pytest.mark.parametrize("stored", [P("data"), P(("data", "model"))], ids=str)
def test_sharded_scale(case, serve, mesh, stored):
    """a scale stored sharded (FSDP): it is gathered, and its gradient summed, and nothing else"""
    args, cts = put(mesh, case, SPECS["rows"], stored)
    text, _ = serve(case, case, *args, expected=case.values())
    assert hlo.collectives(text) == [Collective("all-gather", N)]
    like = tuple(a.sharding for a in args)
    expected = case.gradients()
    text, grads = serve(
        case, case.grad, *args, *cts, expected=expected, calls=BOTH, out_shardings=like
    )
    assert sum(c.kind == "all-gather" for c in hlo.collectives(text)) == 1
    assert len(hlo.collectives(text)) == 2 and grads[-1].sharding.spec == stored


@ON
def test_split_features_with_a_replicated_scale_gather_only_its_gradient(case, mesh):
    args, cts = put(mesh, case, SPECS["features"])
    assert communicates(case, *args) == reduced(4 * FLOAT)
    gather = [Collective("all-gather", N)]
    assert communicates(case.grad, *args, *cts) == gather + reduced(2 * 4 * FLOAT, N // 2)


# ---------------------------------------------------------------- operands of other kinds


@pytest.mark.parametrize("layout", ["rows in two dimensions", "features"])
def test_constraint_inside_is_enough(auto_mesh, layout, serve):
    """Auto axes, where nothing but `with_sharding_constraint` says how x is split"""
    case = Case("residual_rms_norm")
    split = lambda a: jax.lax.with_sharding_constraint(a, SPECS[layout])
    fn = lambda x, r, scale: [split(y) for y in case(split(x), split(r), scale)]
    calls = SPLIT_FORWARD if layout.startswith("features") else FORWARD
    with jax.set_mesh(auto_mesh):
        text, _ = serve(case, fn, *case.args, expected=case.values(), calls=calls)
    assert hlo.collectives(text) == COMMUNICATED[layout][0]


@pytest.mark.parametrize("split", [0, 1])
def test_explicit_operands_of_no_mesh(serve, explicit_mesh, split):
    """Explicit axes, and x or a residual on no mesh yet"""
    case = Case("residual_rms_norm")
    args = list(map(jnp.asarray, case.args))
    args[split] = place(explicit_mesh, args[split], "data")
    with jax.set_mesh(explicit_mesh):
        fn = lambda one: case(*args[:split], one, *args[split + 1 :])
        _, out = serve(case, fn, args[split], expected=case.values())
    assert jax.typeof(out[0]).sharding.spec == P("data", None, None)


@ON
@pytest.mark.parametrize("axis", [0, (1, 2)], ids=str)
def test_normalised_axes_of_a_split_array(serve, mesh, kind, axis):
    """`axis` other than the last, of a split array"""
    case = Case("residual_rms_norm", (8, 4, 16), axis=axis)
    for spec in (P("data", "model", None), P(None, "model", "data")):
        args, _ = put(mesh, case, spec)
        calls = SPLIT_BOTH if any(spec[a] for a in case.axes) else BOTH
        cts = [place(mesh, ct, *spec) for ct in case.cts]
        serve(case, case.grad, *args, *cts, expected=case.gradients(), calls=calls)


@pytest.mark.parametrize("shape", [(7, 2, 16), (8, 2, 15), (9, 3, 5)], ids=str)
def test_dimension_that_the_mesh_does_not_divide_is_counted_once(serve, auto_mesh, shape):
    """Auto axes that do not divide x: padding, made ones here, reaches no sum"""
    case = Case("residual_rms_norm", shape)
    place = lambda a: jax.lax.with_sharding_constraint(a, P("data", None, "model"))
    split = lambda a: jnp.where(place(a) == 0, 1, place(a))
    fn = lambda x, r, scale, *cts: case.grad(split(x), split(r), scale, *map(split, cts))
    calls = BOTH if shape[2] % 2 else SPLIT_BOTH
    with jax.set_mesh(auto_mesh):
        serve(case, fn, *case.args, *case.cts, expected=case.gradients(), calls=calls)


def test_reshape_that_splits_a_mesh_axis_does_not_communicate(serve, eight_devices):
    """a reshape that splits a mesh axis in two: tokens as batch and sequence"""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    case = Case("rms_norm", (4, 16, 24))
    x, ct = (place(mesh, a.reshape(64, 24), "data") for a in (case.args[0], case.cts[0]))

    def fn(x, scale, ct):
        dx, dscale = case.grad(x.reshape(4, 16, 24), scale, ct.reshape(4, 16, 24))
        return dx.reshape(64, 24), dscale

    expected = [g.map(lambda a: a.reshape(-1, 24).squeeze()) for g in case.gradients()]
    text, _ = serve(case, fn, x, case.args[1], ct, expected=expected, calls=BOTH)
    assert hlo.collectives(text) == reduced(24 * FLOAT)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    case = Case("rms_norm", (3, 4, 16))
    x = place(mesh, case.args[0].reshape(3, 64), None, "model")
    grad = lambda x, scale: case.grad(x.reshape(3, 4, 16), scale)
    serve(case, grad, x, case.args[1], expected=case.gradients(), calls=SPLIT_BOTH)


def test_devices_in_another_order(serve, eight_devices):
    """a mesh of devices in an order of its own"""
    devices = np.array(eight_devices)[[5, 2, 7, 0, 1, 6, 3, 4]].reshape(2, 4)
    mesh, case = Mesh(devices, ("model", "data")), Case("rms_norm")
    args, cts = put(mesh, case, SPECS["features"])
    serve(case, case.grad, *args, *cts, expected=case.gradients(), calls=SPLIT_BOTH)


# ---------------------------------------------------------------- with transformations


@ON
def test_transformations(case, serve, mesh):
    """`jvp`, `scan`, `checkpoint` on a mesh"""
    args, cts = put(mesh, case, SPECS["features"])
    tangents, _ = put(mesh, case.replace(args=case.tangents), SPECS["features"])

    def fn(one, two, tangents, cts):
        pushed = jax.jvp(case, tuple(one), tuple(tangents))[1]
        step = lambda _, ct: (None, jax.grad(jax.checkpoint(case.loss), case.argnums)(*two, *ct))
        grads = jax.lax.scan(step, None, [ct[None] for ct in cts])[1]
        return pushed, jax.tree.map(lambda a: a[0], grads)

    expected = [*case.pushed(), *case.gradients()]
    # The tangent is the definition's, in plain HLO.
    serve(case, fn, args, args, tangents, cts, expected=expected, calls=SPLIT_BOTH, plain=True)


@ON
@pytest.mark.parametrize("at", [0, 1])
def test_gradients_of_each_example(serve, mesh, kind, at):
    """`vmap(grad)` on a mesh, and with `spmd_axis_name`: nothing is communicated"""
    batch = Batch("rms_norm", (0, None), size=4)
    spec = [None, None, None, None]
    spec[at] = "data"
    args = place(mesh, batch.args[0], *spec), batch.args[1], place(mesh, batch.cts[0], *spec)
    name = {"spmd_axis_name": "data"} if kind == "auto" and at == 0 else {}
    fn = jax.vmap(batch.case.grad, (0, None, 0), **name)
    expected = batch.each("gradients")
    text, _ = serve(batch.case, fn, *args, expected=expected, calls=BOTH, plain=True)
    if at == 0:  # the examples' gradients belong to the device that has them
        assert hlo.collectives(text) == []
