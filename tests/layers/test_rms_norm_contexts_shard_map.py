"""Manual axes: `shard_map` and `pmap`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import Expected
from rms_norm_cases import Batch, Case, stack, total

pytestmark = pytest.mark.oldest

FORWARD, BOTH = {"forward": 1}, {"backward": 1, "forward": 1}
SPLIT_FORWARD = {"apply": 1, "row_statistics": 1}
SPLIT_BOTH = {"backward_apply": 1, "row_dots": 1, "row_statistics": 1}
CHECKS = pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "unchecked"])
ROWS = P(("data", "model"))


def in_specs(case, rows):
    """Rows split, scale in common."""
    return (*[rows] * (len(case.args) - 1), P())


@CHECKS
def test_full(case, serve, auto_mesh, check_vma):
    """`shard_map` over every axis"""
    specs = in_specs(case, ROWS)
    fn = jax.shard_map(case, mesh=auto_mesh, in_specs=specs, out_specs=ROWS, check_vma=check_vma)
    serve(case, fn, *case.args, expected=case.values())


@CHECKS
def test_grad_of_full(case, serve, auto_mesh, check_vma):
    """`grad` of a `shard_map` over every axis"""
    specs = (*in_specs(case, ROWS), *[ROWS] * len(case.cts))
    local = lambda *args: case.loss(*args)[None]
    mapped = jax.shard_map(
        local, mesh=auto_mesh, in_specs=specs, out_specs=ROWS, check_vma=check_vma
    )
    fn = jax.grad(lambda *args: mapped(*args).sum(), case.argnums)
    serve(case, fn, *case.args, *case.cts, expected=case.gradients(), calls=BOTH)


def test_grad_in_full_checked(case, serve, auto_mesh):
    """`grad` inside `shard_map`, check_vma on: the sum over devices is JAX's"""
    specs = (*in_specs(case, ROWS), *[ROWS] * len(case.cts))
    fn = jax.shard_map(case.grad, mesh=auto_mesh, in_specs=specs, out_specs=in_specs(case, ROWS))
    serve(case, fn, *case.args, *case.cts, expected=case.gradients(), calls=BOTH)


def test_grad_in_full_unchecked(case, serve, auto_mesh):
    """`grad` inside `shard_map`, check_vma off: the sum over devices is the caller's"""

    def local(*args):
        *big, dscale = case.grad(*args)
        return *big, jax.lax.psum(dscale, ("data", "model"))

    specs = (*in_specs(case, ROWS), *[ROWS] * len(case.cts))
    out = in_specs(case, ROWS)
    fn = jax.shard_map(local, mesh=auto_mesh, in_specs=specs, out_specs=out, check_vma=False)
    serve(case, fn, *case.args, *case.cts, expected=case.gradients(), calls=BOTH)


@CHECKS
def test_scale_of_each_device(serve, auto_mesh, check_vma):
    """`shard_map`, a scale of each device's own and x in common"""
    case = Batch("residual_rms_norm", (None, None, 0), size=8)
    x, residual, scales = case.args
    local = lambda x, r, s: case.case(x, r, s[0])[0][None]
    specs = {"in_specs": (P(), P(), ROWS), "out_specs": ROWS, "check_vma": check_vma}
    fn = jax.shard_map(local, mesh=auto_mesh, **specs)
    serve(case.case, fn, x, residual, scales, expected=case.each("values")[:1])


def test_gradients_with_a_scale_of_each_device(serve, auto_mesh):
    """`grad` inside `shard_map`, operands that vary over different axes"""
    batch = Batch("residual_rms_norm", (None, 0, 0), size=8)
    x, residual, scales = batch.args

    def local(x, residual, scale, *cts):
        loss = lambda x, r, s: batch.case.loss(x, r[0, 0], s[0], *[ct[0, 0] for ct in cts])
        return jax.grad(loss, (0, 1, 2))(x, residual, scale)

    # the residual of a device is chosen by "data" alone, its scale by "model" alone
    chosen = residual[::2].reshape(4, 1, 8, 2, 16), scales[:2]
    cts = [ct.reshape(4, 2, 8, 2, 16) for ct in batch.cts]
    examples = [
        batch.case.replace(
            args=(x, chosen[0][i, 0], chosen[1][j]), cts=tuple(ct[i, j] for ct in cts)
        ).gradients()
        for i in range(4)
        for j in range(2)
    ]
    dx, dresidual, dscale = (stack(column) for column in zip(*examples))
    by_data = dresidual.map(lambda a: a.reshape(4, 2, 8, 2, 16).sum(1, keepdims=True))
    by_model = dscale.map(lambda a: a.reshape(4, 2, 16).sum(0))
    every = P("data", "model")
    specs = (P(), P("data"), P("model"), *[every] * len(cts))
    fn = jax.shard_map(
        local, mesh=auto_mesh, in_specs=specs, out_specs=(P(), P("data"), P("model"))
    )
    expected = [total(dx), by_data, by_model]
    serve(batch.case, fn, x, *chosen, *cts, expected=expected, calls=BOTH)


@CHECKS
def test_partial(case, serve, auto_mesh, check_vma):
    """`shard_map` over some of Auto axes"""
    kwargs = {"axis_names": {"data"}, "check_vma": check_vma, "mesh": auto_mesh}
    rows = P("data")
    fn = jax.shard_map(case, in_specs=in_specs(case, rows), out_specs=rows, **kwargs)
    serve(case, fn, *case.args, expected=case.values(), calls={})
    strict = functools.partial(case, implementation="native")
    fn = jax.shard_map(strict, in_specs=in_specs(case, rows), out_specs=rows, **kwargs)
    with pytest.raises(NotImplementedError, match="manual over every axis"):
        jax.jit(fn).lower(*case.args)


def test_grad_in_partial(case, serve, auto_mesh):
    """`grad` inside a `shard_map` over some of Auto axes"""
    specs = (*in_specs(case, P("data")), *[P("data")] * len(case.cts))
    out = in_specs(case, P("data"))
    fn = jax.shard_map(
        case.grad, mesh=auto_mesh, in_specs=specs, out_specs=out, axis_names={"data"}
    )
    serve(case, fn, *case.args, *case.cts, expected=case.gradients(), calls={})


@CHECKS
def test_partial_of_size_one(case, serve, eight_devices, check_vma):
    """`shard_map` over all axes but one of one device"""
    mesh = jax.make_mesh((8, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    kwargs = {"axis_names": {"data"}, "check_vma": check_vma, "mesh": mesh}
    fn = jax.shard_map(case, in_specs=in_specs(case, P("data")), out_specs=P("data"), **kwargs)
    serve(case, fn, *case.args, expected=case.values())


@CHECKS
@pytest.mark.parametrize("features", [False, True], ids=["rows", "features"])
def test_partial_explicit(case, serve, explicit_mesh, check_vma, features):
    """`shard_map` over some of Explicit axes"""
    specs, out = in_specs(case, P("data")), P("data")
    with jax.set_mesh(explicit_mesh):
        spec = P("data", None, "model") if features else P("data", None, None)
        place = lambda a: jax.device_put(a, NamedSharding(explicit_mesh, spec))
        args = [place(a) for a in case.args[:-1]] + [jnp.asarray(case.args[-1])]
        kwargs = {"axis_names": {"data"}, "check_vma": check_vma}
        fn = jax.shard_map(case, in_specs=specs, out_specs=out, **kwargs)
        calls = SPLIT_FORWARD if features else FORWARD
        serve(case, fn, *args, expected=case.values(), calls=calls)


@pytest.mark.parametrize("features", [False, True], ids=["rows", "features"])
def test_grad_in_partial_explicit(case, serve, explicit_mesh, features):
    """`grad` inside a `shard_map` over some of Explicit axes"""
    specs, out = (
        (*in_specs(case, P("data")), *[P("data")] * len(case.cts)),
        in_specs(case, P("data")),
    )
    with jax.set_mesh(explicit_mesh):
        spec = P("data", None, "model") if features else P("data", None, None)
        place = lambda a: jax.device_put(a, NamedSharding(explicit_mesh, spec))
        args = [place(a) for a in case.args[:-1]] + [jnp.asarray(case.args[-1])]
        fn = jax.shard_map(case.grad, in_specs=specs, out_specs=out, axis_names={"data"})
        calls = SPLIT_BOTH if features else BOTH
        cts = map(place, case.cts)
        serve(case, fn, *args, *cts, expected=case.gradients(), calls=calls)


def test_scale_that_varies_in_partial_explicit(serve, explicit_mesh):
    """`shard_map` over some of Explicit axes, a scale of each device's own"""
    batch = Batch("rms_norm", (None, 0), size=4)
    x, scales = batch.args
    with jax.set_mesh(explicit_mesh):
        local = lambda x, scale: batch.case(x, scale[0])[0][None]
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        fn = jax.shard_map(local, axis_names={"data"}, **specs)
        scales = jax.device_put(scales, NamedSharding(explicit_mesh, P("data", None)))
        serve(batch.case, fn, jnp.asarray(x), scales, expected=batch.each("values"))


def test_nested(case, serve, auto_mesh):
    """`shard_map` in `shard_map`, together over every axis"""
    inner = jax.shard_map(
        case, in_specs=in_specs(case, P("model")), out_specs=P("model"), axis_names={"model"}
    )
    outer = jax.shard_map(
        inner,
        mesh=auto_mesh,
        in_specs=in_specs(case, P("data")),
        out_specs=P("data"),
        axis_names={"data"},
    )
    with jax.set_mesh(auto_mesh):
        serve(case, outer, *case.args, expected=case.values())


def test_features_in_hand(serve, auto_mesh):
    """`shard_map` over the features: each device normalises what it holds"""
    case = Case("rms_norm", (8, 2, 64))
    specs = {
        "in_specs": (P("data", None, "model"), P("model")),
        "out_specs": P("data", None, "model"),
    }
    fn = jax.shard_map(case, mesh=auto_mesh, **specs)
    x, scale = case.args
    halves = [case.replace(args=(x[..., h], scale[h])) for h in (slice(0, 32), slice(32, 64))]
    parts = [h.values()[0] for h in halves]
    expected = Expected(
        *(np.concatenate([getattr(p, k) for p in parts], -1) for k in ("value", "size")), 32
    )
    serve(case, fn, *case.args, expected=[expected])


@CHECKS
def test_transformations_inside(serve, auto_mesh, check_vma):
    """`vmap(grad)`, `scan` and `checkpoint` inside `shard_map`"""
    batch = Batch("rms_norm", (0, None), size=8)
    each = jax.vmap(jax.grad(jax.checkpoint(batch.case.loss), (0, 1)), (0, None, 0))

    def local(x, scale, ct):
        if check_vma:  # or JAX sums the gradients over the devices
            scale = jax.lax.pcast(scale, ("data", "model"), to="varying")
        return jax.lax.scan(lambda _, xs: (None, each(xs[0], scale, xs[1])), None, (x, ct))[1]

    x, scale = batch.args
    over = P(None, ("data", "model"))
    kwargs = {"mesh": auto_mesh, "check_vma": check_vma}
    fn = jax.shard_map(local, in_specs=(over, P(), over), out_specs=over, **kwargs)
    expected = [g.map(lambda a: a[None]) for g in batch.each("gradients")]
    args = x[None], scale, batch.cts[0][None]
    serve.partly(batch.case, fn, *args, expected=expected, calls=BOTH)


def test_vmap_with_spmd_axis_name_of_shard_map(serve, auto_mesh):
    """`vmap(shard_map)` with `spmd_axis_name`"""
    batch = Batch("rms_norm", (0, None), size=4)
    specs = {
        "in_specs": (P("model"), P()),
        "out_specs": P("model"),
        "axis_names": {"model", "data"},
    }
    fn = jax.shard_map(batch.case, mesh=auto_mesh, **specs)
    mapped = jax.vmap(fn, (0, None), spmd_axis_name="data")
    serve(batch.case, mapped, *batch.args, expected=batch.each("values"))


def test_pmap(serve, eight_devices):
    """`pmap`"""
    batch = Batch("rms_norm", (0, None), size=8)
    fn = jax.pmap(batch.case.grad, in_axes=(0, None, 0))
    batch.case.check(fn(*batch.args, *batch.cts), batch.each("gradients"))
    strict = functools.partial(batch.case.grad, implementation="native")
    batch.case.check(
        jax.pmap(strict, in_axes=(0, None, 0))(*batch.args, *batch.cts), batch.each("gradients")
    )
    serve.record("native")
