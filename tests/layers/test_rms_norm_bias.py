"""The bias of the RMSNorms: values, gradients, contexts and meshes."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from hlo import Collective
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from rms_norm_cases import MIXES, Batch, Case, both, check_both

from normfuse import rms_norm

OPS = ("rms_norm", "rms_norm_with_rstd", "residual_rms_norm")
BiasCase = functools.partial(Case, bias="float32")
calls = hlo.calls


@pytest.mark.optimized
@pytest.mark.parametrize("op, implementation", half(OPS, ["native", "pallas", "xla"]))
def test_values_and_gradients(op, implementation):
    """Of "xla" the gradient is JAX's own, which rounds its parts to the dtype of x."""
    dtype = "float32" if implementation == "xla" else "bfloat16"
    case = BiasCase(op, (199, 17), x=dtype, residual=dtype, scale_offset=0.5)
    check_both(case, implementation=implementation)


@pytest.mark.parametrize("shape", [(2, 131072), (0, 24), (24,)], ids=str)
def test_lengths(shape):
    check_both(BiasCase("residual_rms_norm", shape), implementation="native")


@pytest.mark.parametrize("x, scale, dtype", MIXES[::9])
def test_each_gradient_has_the_dtype_of_its_operand(x, scale, dtype):
    case = Case("rms_norm", (5, 24), x=x, scale=scale, dtype=dtype, bias=dtype)
    out, grads = both(case)(case.args, case.cts)
    case.check(out, case.values())
    case.check(grads, case.gradients())
    assert [g.dtype for g in grads] == [a.dtype for a in case.args]


@pytest.mark.parametrize("axis, scale", [(0, None), ((0, 2), "float32")], ids=str)
def test_axes(axis, scale):
    check_both(BiasCase("rms_norm", (3, 4, 5), axis=axis, scale=scale))


def test_cast_before_rounds_what_the_bias_is_added_to():
    case = Case("rms_norm", (5, 64), x="bfloat16", bias="bfloat16", cast="before", dtype="float32")
    x, scale, bias = case.args
    alone = rms_norm(x, cast="before", implementation="native")
    want = np.asarray(alone, np.float32) * scale + np.asarray(bias, np.float32)
    got = case(*case.args, implementation="native")[0]
    np.testing.assert_allclose(
        got, want, rtol=1e-6, atol=1e-6
    )  # a product and a sum, perhaps fused


def test_one_kernel_each_way_and_nothing_that_nobody_uses():
    case = BiasCase("rms_norm", (5, 24))
    of = lambda argnums: jax.jit(jax.grad(case.loss, argnums)).lower(*case.args).compile()
    assert calls(of((0, 1, 2))) == {"backward": 1, "forward": 1}
    if jax.default_backend() != "cpu":
        return  # a kernel on a GPU has other results: sums over each block's rows
    assert hlo.results(of((0, 1, 2))) == [3, 2]  # backward, forward
    assert hlo.results(of((0, 1))) == [2, 2]
    assert hlo.results(of(0)) == [1, 2]


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_second_order(mode):
    with jax.enable_x64(True):
        options = {name: "float64" for name in ("x", "residual", "scale", "bias")}
        case = Case("residual_rms_norm", (2, 5), scale_offset=0.5, eps=0.1, **options)
        check_grads(case, case.args, order=2, modes=[mode], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_axes", [(0, 0, None), (None, 0, 0)])
def test_vmap(in_axes):
    batch = Batch("rms_norm", in_axes, bias="float32")
    fn = jax.jit(jax.vmap(batch.case, in_axes))
    batch.case.check(fn(*batch.args), batch.each("values"))
    loss = lambda *args: jnp.sum(jax.vmap(batch.case.loss, (*in_axes, 0))(*args, *batch.cts))
    grads = jax.jit(jax.grad(loss, (0, 1, 2)))
    batch.case.check(grads(*batch.args), batch.together())


@pytest.mark.parametrize(
    "kind, spec",
    [
        (AxisType.Auto, P("data", "model", None)),
        (AxisType.Explicit, P("data", None, "model")),
    ],
    ids=str,
)
def test_meshes(eight_devices, kind, spec):
    """Both sums in one all-reduce; a split row exchanges one number each way besides."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    case = BiasCase("residual_rms_norm")
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    own = P(spec[2])
    with jax.set_mesh(mesh):
        args = [put(a, spec if a.ndim == 3 else own) for a in case.args]
        cts = [put(ct, spec) for ct in case.cts]
        case.check(jax.jit(case)(*args), case.values())
        compiled = jax.jit(case.grad).lower(*args, *cts).compile()
        case.check(compiled(*args, *cts), case.gradients())
    if spec[2] is None:
        assert hlo.collectives(compiled) == [Collective("all-reduce", 2 * 16 * 4)]
        assert calls(compiled) == {"backward": 1, "forward": 1}
    else:
        kernels = {"backward_apply": 1, "row_dots": 1, "row_statistics": 1}
        assert calls(compiled) in (kernels, kernels | {"apply": 1})
