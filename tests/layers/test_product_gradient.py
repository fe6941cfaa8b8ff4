"""The backward of gated_product as one operation: every context, and its fallbacks.

It is one operation for operands of 16 bits, here on plain HLO: `product_gradient.kernel` has the
kernel's values. The same in float32 are `test_fused_dense.py`'s.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import gated_product
from normfuse.layers.dense import product_gradient
from normfuse.layers.dense.gated import apply_product
from normfuse.native import implementation

pytestmark = pytest.mark.optimized

f32, bf16 = jnp.float32, jnp.bfloat16
ROWS, HIDDEN, OUT = (4, 6), 16, 24
# Results of the two are rounded to bfloat16 at the same places, after sums in other orders.
COARSE = 8 * 2.0**-8

plain = functools.partial(gated_product, implementation="xla")


def operands(rng, rows=ROWS, gated=True, kernel=bf16):
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), bf16)
    gate, up = draw(*rows, HIDDEN), draw(*rows, HIDDEN)
    return gate, up if gated else None, (draw(HIDDEN, OUT) / 4).astype(kernel)


def loss(op):
    return lambda *args: jnp.sum(jnp.sin(op(*args).astype(f32)))


def assert_close(got, want, tolerance=COARSE):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(v).astype(np.float64) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-30, np.abs(b).max()))


def one_operation(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("normfuse_activated_product_gradient")


@pytest.mark.parametrize(
    "gated, wanted, recompute", half([True, False], [(0,), (2,), (0, 2)], [True, False]), ids=str
)
def test_gradients_are_those_of_plain_jax(rng, gated, wanted, recompute):
    args = operands(rng, gated=gated, kernel=f32)
    ours = functools.partial(gated_product, recompute=recompute)
    grads = [jax.grad(loss(op), wanted) for op in (ours, plain)]
    assert one_operation(grads[0], *args) == (0 in wanted)
    assert_close(*(jax.jit(g)(*args) for g in grads))


@pytest.mark.parametrize("mode", ["fwd-rev", "rev-rev"])
def test_derivatives_of_the_gradient(rng, mode):
    args = operands(rng, rows=(3,))
    tangents = tuple(jnp.asarray(rng.standard_normal(a.shape), bf16) for a in args)
    every = (0, 1, 2)

    def of(op):
        if mode == "fwd-rev":
            return jax.jvp(jax.grad(loss(op), every), args, tangents)[1]
        return jax.grad(
            lambda *a: sum(
                jnp.vdot(g.astype(f32), t.astype(f32))
                for g, t in zip(jax.grad(loss(op), every)(*a), tangents)
            ),
            every,
        )(*args)

    # second derivatives pass two more products
    assert_close(*(jax.jit(lambda op=op: of(op))() for op in (gated_product, plain)), 2 * COARSE)


def test_it_is_linear_in_the_gradient_of_the_result(rng):
    gate, up, kernel = operands(rng, rows=(3,))
    dy = jnp.asarray(rng.standard_normal((3, OUT)), bf16)

    def pull(op, dy):
        return jax.vjp(lambda *a: op(*a, kernel), gate, up)[1](dy)

    # the barrier before the backward has no transpose: the operation alone
    (eqn,) = [
        e
        for e in jax.make_jaxpr(functools.partial(pull, gated_product))(dy).eqns
        if e.primitive is product_gradient.gradient.primitive
    ]
    apply = lambda dy: eqn.primitive.bind(dy, kernel, gate, up, **eqn.params)
    want = jax.linear_transpose(functools.partial(pull, plain), dy)((gate, up))
    assert_close(jax.linear_transpose(apply, dy)([gate, up]), want)


def test_several_output_axes_and_a_kernel_stored_the_other_way(rng):
    gate, up, kernel = operands(rng)
    several = kernel.reshape(HIDDEN, 4, 6)
    assert_close(
        *(jax.grad(loss(op), (0, 1, 2))(gate, up, several) for op in (gated_product, plain))
    )
    options = {"activation": "silu", "dtype": bf16, "contract": 1}
    apply = lambda implementation: (
        lambda g, u, k: apply_product(g, u, k, None, implementation=implementation, **options)
    )
    grads = [jax.grad(loss(apply(i)), (0, 1, 2)) for i in (None, "xla")]
    assert one_operation(grads[0], gate, up, kernel.T) == 1
    assert_close(*(g(gate, up, kernel.T) for g in grads))


# ---------------------------------------------------------------- meshes

SPLITS = {  # gate and up, the kernel
    "rows": (P("data"), P()),
    "tensor": (P("data", None, "tensor"), P("tensor")),
    "fsdp": (P(("data", "tensor")), P(None, "data")),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("split", SPLITS)
def test_meshes(rng, eight_devices, split, axis_type):
    del eight_devices
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    args, (large, small) = operands(rng, rows=(8, 4)), SPLITS[split]
    options = {}
    if axis_type == AxisType.Explicit and split == "tensor":
        options["out_sharding"] = P("data")
    op = functools.partial(gated_product, **options)
    with jax.set_mesh(mesh):
        places = [NamedSharding(mesh, s) for s in (large, large, small)]
        sharded = [jax.device_put(a, s) for a, s in zip(args, places)]
        got = jax.jit(jax.grad(loss(op), (0, 1, 2)), out_shardings=tuple(places))(*sharded)
    assert_close(got, jax.grad(loss(plain), (0, 1, 2))(*args))


# ---------------------------------------------------------------- implementations


def test_pallas_is_refused_where_it_cannot_serve(rng, caplog, monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    args = operands(rng)
    fused = functools.partial(gated_product, implementation="pallas")
    with pytest.raises(NotImplementedError, match="gated_product: .*'pallas' cannot serve here"):
        jax.jit(jax.grad(loss(fused), (0, 1, 2)))(*args)
    either = functools.partial(gated_product, implementation=("pallas", "xla"))
    with caplog.at_level("INFO", "normfuse"):
        got = jax.jit(jax.grad(loss(either), (0, 1, 2)))(*args)
    assert "gated_product is served by plain HLO" in caplog.text
    assert_close(got, jax.grad(loss(plain), (0, 1, 2))(*args))


def test_pallas_is_refused_for_other_dtypes_and_on_meshes(rng, eight_devices):
    del eight_devices
    fused = functools.partial(gated_product, implementation="pallas")
    args = operands(rng, rows=(8,))
    wide = [a.astype(f32) for a in args]
    with pytest.raises(NotImplementedError, match="16 bits"):
        jax.jit(jax.grad(loss(fused)))(*wide)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    places = [NamedSharding(mesh, s) for s in (P("data"), P("data"), P())]
    sharded = [jax.device_put(a, s) for a, s in zip(args, places)]
    with pytest.raises(NotImplementedError, match="split over a mesh"):
        jax.jit(jax.grad(loss(fused)))(*sharded)


def fused_kernels(rows, wrap=lambda op: op, **options):
    """How many are in the program for CUDA, of a shape for which one is faster."""
    gate = jax.ShapeDtypeStruct((rows, 14336), bf16)
    grad = jax.grad(loss(wrap(functools.partial(gated_product, **options))), (0, 1, 2))
    args = gate, gate, jax.ShapeDtypeStruct((14336, 4096), bf16)
    text = jax.jit(grad).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu")


def test_nothing_asked_for_is_fused_in_programs_for_one_device(arch, eight_devices):
    del eight_devices
    arch("sm_90")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("data"), P("data"), P()), "out_specs": P("data")}
    mapped = lambda op: jax.shard_map(op, mesh=mesh, **specs)
    assert fused_kernels(2048) == 1
    assert fused_kernels(2048, implementation="native") == 0
    assert fused_kernels(2048, implementation=("native", "xla")) == 0
    assert fused_kernels(8 * 2048, mapped) == 0
    assert fused_kernels(8 * 2048, mapped, implementation="pallas") == 1


def test_exports_have_no_fused_kernel_unasked(arch):
    arch("sm_90")
    from jax import export

    gate = jax.ShapeDtypeStruct((2048, 14336), bf16)
    grad = jax.jit(jax.grad(loss(gated_product), (0, 1, 2)))
    args = gate, gate, jax.ShapeDtypeStruct((14336, 4096), bf16)
    checks = [export.DisabledSafetyCheck.custom_call("normfuse_launch")]
    made = export.export(grad, platforms=["cuda"], disabled_checks=checks)(*args)
    assert "@mosaic_gpu" not in made.mlir_module()
