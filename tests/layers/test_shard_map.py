"""Manual axes: `shard_map` and `pmap`"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from rms_norm_cases import Batch, put, total

FORWARD, BOTH = {"forward": 1}, {"backward": 1, "forward": 1}
SPLIT_BOTH = {"backward_apply": 1, "row_dots": 1, "row_statistics": 1}
CHECKS = pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "unchecked"])
ROWS = P(("data", "model"))


def in_specs(case, rows, cts=False):
    """Rows split, scale in common."""
    return (*[rows] * (len(case.args) - 1), P(), *[rows] * len(case.cts) * cts)


@CHECKS
def test_grad_of_full(case, serve, auto_mesh, check_vma):
    """`shard_map` over every axis, and `grad` of it"""
    mapped = lambda f, specs: jax.shard_map(
        f, mesh=auto_mesh, in_specs=specs, out_specs=ROWS, check_vma=check_vma
    )
    loss = mapped(lambda *args: case.loss(*args)[None], in_specs(case, ROWS, cts=True))
    grads = jax.grad(lambda *args: loss(*args).sum(), case.argnums)
    values = mapped(case, in_specs(case, ROWS))
    fn = lambda one, two, cts: (values(*one), grads(*two, *cts))
    expected, calls = [*case.values(), *case.gradients()], {"backward": 1, "forward": 2}
    serve(case, fn, case.args, case.args, case.cts, expected=expected, calls=calls)


@CHECKS
def test_grad_in_full(case, serve, auto_mesh, check_vma):
    """`grad` inside `shard_map`: scale's sum over devices is JAX's, or unchecked the caller's"""

    def local(*args):
        *large, dscale = case.grad(*args)
        return *large, dscale if check_vma else jax.lax.psum(dscale, ("data", "model"))

    specs, out = in_specs(case, ROWS, cts=True), in_specs(case, ROWS)
    options = {"in_specs": specs, "out_specs": out, "check_vma": check_vma}
    fn = jax.shard_map(local, mesh=auto_mesh, **options)
    serve(case, fn, *case.args, *case.cts, expected=case.gradients(), calls=BOTH)


@CHECKS
def test_scale_of_each_device(serve, auto_mesh, check_vma):
    """`shard_map`, a scale of each device's own and x in common, and its gradients"""
    batch = Batch("residual_rms_norm", (None, None, 0), size=8)
    x, residual, scales = batch.args

    def local(x, residual, scale, *cts):
        loss = lambda x, r, s: batch.case.loss(x, r, s[0], *[ct[0] for ct in cts])
        dx, _, dscale = jax.grad(loss, (0, 1, 2))(x, residual, scale)
        return dx if check_vma else jax.lax.psum(dx, ("data", "model")), dscale

    options = {"in_specs": (P(), P(), ROWS, ROWS, ROWS), "out_specs": (P(), ROWS)}
    fn = jax.shard_map(local, mesh=auto_mesh, check_vma=check_vma, **options)
    dx, _, dscale = batch.each("gradients")
    args = x, residual, scales, *batch.cts
    serve(batch.case, fn, *args, expected=[total(dx), dscale], calls=BOTH)


@CHECKS
def test_partial(case, serve, auto_mesh, check_vma):
    """`shard_map` over some of Auto axes"""
    rows, norm = P("data"), functools.partial
    options = {"in_specs": in_specs(case, rows), "out_specs": rows, "axis_names": {"data"}}
    mapped = functools.partial(jax.shard_map, mesh=auto_mesh, check_vma=check_vma, **options)
    serve(case, mapped(case), *case.args, expected=case.values(), calls={})
    for implementation in ("native", "pallas"):
        message = f"'{implementation}' cannot serve here: shard_map is man.* over every axis"
        with pytest.raises(NotImplementedError, match=message):
            jax.jit(mapped(norm(case, implementation=implementation))).lower(*case.args)


@pytest.mark.parametrize("layout", ["rows", "features"])
def test_partial_explicit(case, serve, explicit_mesh, layout):
    """`grad` inside a `shard_map` over some of Explicit axes"""
    spec = P("data", None, "model" if layout == "features" else None)
    args, cts = put(explicit_mesh, case, spec)
    specs, out = in_specs(case, P("data"), cts=True), in_specs(case, P("data"))
    calls = SPLIT_BOTH if layout == "features" else BOTH
    with jax.set_mesh(explicit_mesh):
        fn = jax.shard_map(case.grad, in_specs=specs, out_specs=out, axis_names={"data"})
        serve(case, fn, *args, *cts, expected=case.gradients(), calls=calls)


def test_nested(case, serve, auto_mesh):
    """`shard_map` in `shard_map`, together over every axis"""

    def over(name, f, **options):
        specs = {"in_specs": in_specs(case, P(name)), "out_specs": P(name)}
        return jax.shard_map(f, axis_names={name}, **specs, **options)

    with jax.set_mesh(auto_mesh):
        outer = over("data", over("model", case), mesh=auto_mesh)
        serve(case, outer, *case.args, expected=case.values())


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
    serve(batch.case, fn, *args, expected=expected, calls=BOTH, plain=True)


def test_pmap(serve, eight_devices):
    """`pmap`"""
    batch = Batch("rms_norm", (0, None), size=8)
    strict = functools.partial(batch.case.grad, implementation="native")
    run = jax.pmap(strict, in_axes=(0, None, 0))
    batch.case.check(run(*map(jnp.asarray, (*batch.args, *batch.cts))), batch.each("gradients"))
    serve.record("native")
