"""LayerNorm: values, gradients, contexts and meshes, on RMSNorm's tables."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from combinations import half
from hlo import Collective
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from rms_norm_cases import (
    AXES,
    MIXES,
    REPLICATED,
    SPECS,
    WIDE,
    Batch,
    Case,
    both,
    check_both,
)

from normfuse import layer_norm

OPS = ("layer_norm", "residual_layer_norm")
LayerCase = functools.partial(Case, bias="float32")
BOTH = {"backward": 1, "forward": 1}
calls = hlo.calls


def serve(case, fn, *args, expected, kernels):
    """Compiles `fn(*args)`: its results must be `expected`, by exactly these kernels."""
    compiled = jax.jit(fn).lower(*args).compile()
    case.check(compiled(*args), expected)
    assert calls(compiled) == kernels


@pytest.fixture
def case() -> Case:
    return LayerCase("residual_layer_norm")


# ---------------------------------------------------------------- values and gradients


@pytest.mark.optimized
@pytest.mark.parametrize(
    "op, how",
    half(
        OPS,
        [
            *((shape, "native") for shape in ((199, 17), (3, 1128), (2, 131072), (0, 24), (24,))),
            *((shape, "pallas") for shape in ((199, 17), (3, 1128))),
            *((shape, "xla") for shape in ((199, 17), (0, 24))),
        ],
    ),
    ids=str,
)
def test_lengths(op, how):
    """Of "xla" the gradient is JAX's own, which rounds its parts to the dtype of x."""
    shape, implementation = how
    dtype = "float32" if implementation == "xla" else "bfloat16"
    check_both(LayerCase(op, shape, x=dtype), implementation=implementation)


@pytest.mark.parametrize("op, mix", half(OPS, [*MIXES[::4], *WIDE[::4]]), ids=str)
def test_mixes_of_dtypes(op, mix):
    x, scale, dtype = mix
    with jax.enable_x64("float64" in (x, scale, dtype)):
        options = {"x": x, "scale": scale, "dtype": dtype, "residual": x, "bias": dtype}
        case = Case(op, (5, 24), **options)
        out, grads = both(case)(case.args, case.cts)
        case.check(out, case.values())
        case.check(grads, case.gradients())
        assert out[0].dtype == dtype
        assert [g.dtype for g in grads] == [a.dtype for a in case.args]


@pytest.mark.parametrize("axis", AXES[1::3], ids=str)
def test_axes(axis):
    check_both(LayerCase("residual_layer_norm", (3, 4, 5, 6), axis=axis, scale_offset=0.5))


@pytest.mark.parametrize(
    "where, implementation, own",
    half(
        [((5, 24), -1), ((3, 20, 6), 1)],
        ["native", "pallas"],
        [(None, None), ("float32", None), (None, "float32")],
    ),
    ids=str,
)
def test_without_scale_or_bias(where, implementation, own):
    (shape, axis), (scale, bias) = where, own
    case = Case("layer_norm", shape, scale=scale, bias=bias, axis=axis)
    check_both(case, implementation=implementation)


@pytest.mark.parametrize(
    "shape, axis, implementation",
    [
        ((7, 1000), -1, "native"),
        ((2, 300, 5), 1, "native"),
        ((2, 70000), -1, "native"),
        ((2, 300, 5), 1, "xla"),
        ((2, 70000), -1, "pallas"),
    ],
)
def test_a_large_mean_costs_no_digits_of_the_deviation(shape, axis, implementation):
    """mean² · eps is 6 here, and the variance 1: a difference of means would be noise."""
    fill = lambda values: values + (1e4 if values.ndim == len(shape) else 0)
    case = LayerCase("layer_norm", shape, axis=axis, fill=fill)
    check_both(case.replace(cts=(case.cts[0] - 1e4,)), implementation=implementation)
    # and the tolerance would see it: E[x²] − E[x]² in float32 is outside
    x = case.args[0]
    square = np.mean(x * x, axis, keepdims=True) - np.mean(x, axis, keepdims=True) ** 2
    naive = (x - np.mean(x, axis, keepdims=True)) / np.sqrt(np.maximum(square, 0) + 1e-6)
    with pytest.raises(AssertionError, match="allowed"):
        alone = reference.layer_forward(x, axes=case.axes)
        reference.assert_close(naive.astype(np.float32), alone)


@pytest.mark.parametrize("implementation", ["native", "pallas", "xla"])
@pytest.mark.parametrize("axis", [1, 0])
def test_a_mean_that_float32_does_not_have(implementation, axis):
    """The mean of whole numbers near 2²⁴ is rounded to one of them; y is as if it were not."""
    x = np.float32([[15999990, 15999991, 15999992, 15999993], [1, 2, 4, 8]])
    want = reference.layer_normal(x, 1)[0]
    x = jnp.asarray(x if axis == 1 else x.T)
    norm = functools.partial(layer_norm, axis=axis, implementation=implementation)
    got = np.asarray(jax.jit(norm)(x))
    # differences and their squares are exact, the rest is rounded some ten times
    tolerance = 10 * np.finfo("float32").eps
    np.testing.assert_allclose(got if axis == 1 else got.T, want, rtol=tolerance)


def test_constant_rows_are_the_bias():
    """Sums of up to 2^12 bfloat16 numbers that are equal are exact in float32, and so is the mean.

    (XLA divides by multiplying with a rounded reciprocal.)
    """
    x = np.broadcast_to(np.float32([[3.0], [-0.1], [1e30]]), (3, 1000)).astype(jnp.bfloat16)
    bias = np.arange(1000, dtype=np.float32)
    y = layer_norm(x, bias + 1, bias, dtype="float32", implementation="native")
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (3, 1000)))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("shape, axis", [((9, 33), 1), ((33, 9), 0)], ids=str)
def test_poison_stays_in_its_row(shape, axis, poison):
    case = LayerCase("residual_layer_norm", shape, axis=axis)
    run = both(case)
    clean = jax.tree.leaves(run(case.args, case.cts))
    x = case.args[0].copy()
    np.moveaxis(x, axis, 1)[4, 7] = poison
    got = jax.tree.leaves(run((x, *case.args[1:]), case.cts))
    rows = np.arange(9) != 4
    for one, other in zip(got[:4], clean[:4]):  # y, h, dx and the residual's gradient
        one, other = (np.moveaxis(np.asarray(a), axis, 1) for a in (one, other))
        assert one[rows].tobytes() == other[rows].tobytes()
    assert np.isnan(np.moveaxis(np.asarray(got[0]), axis, 1)[4]).all()


def test_what_nobody_uses_is_not_computed():
    """Neither statistics without a derivative nor gradients of frozen parameters."""
    if jax.default_backend() != "cpu":
        pytest.skip("about CPUs: kernels on GPUs have sums over each block's rows as results")
    case = LayerCase("layer_norm", (5, 24))
    of = lambda argnums: jax.jit(jax.grad(case.loss, argnums)).lower(*case.args).compile()
    assert hlo.results(jax.jit(case).lower(*case.args).compile()) == [1]
    assert hlo.results(of(0)) == [1, 3]  # backward, forward
    assert hlo.results(of((0, 1))) == [2, 3]
    assert hlo.results(of((0, 1, 2))) == [3, 3]


# ---------------------------------------------------------------- contexts


def test_grad(case):
    serve(case, case.grad, *case.args, expected=case.gradients(), kernels=BOTH)


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_second_order(mode):
    with jax.enable_x64(True):
        options = {name: "float64" for name in ("x", "residual", "scale", "bias")}
        case = Case("residual_layer_norm", (2, 5), scale_offset=0.5, eps=0.1, **options)
        check_grads(case, case.args, order=2, modes=[mode], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_axes", [(1, None, None), (None, 0, 0)])
def test_vmap(in_axes):
    batch = Batch("layer_norm", in_axes, bias="float32")
    fn = jax.jit(jax.vmap(batch.case, in_axes))
    batch.case.check(fn(*batch.args), batch.each("values"))
    loss = lambda *args: jnp.sum(jax.vmap(batch.case.loss, (*in_axes, 0))(*args, *batch.cts))
    grads = jax.jit(jax.grad(loss, (0, 1, 2)))
    batch.case.check(grads(*batch.args), batch.together())
    assert set(calls(grads.lower(*batch.args).compile())) == {"backward", "forward"}


# ---------------------------------------------------------------- meshes


@pytest.fixture(params=["auto", "explicit"])
def mesh(request, auto_mesh, explicit_mesh):
    chosen = {"auto": auto_mesh, "explicit": explicit_mesh}[request.param]
    with jax.set_mesh(chosen):
        yield chosen


N, FLOAT = 16 * 4, 4  # bytes of scale; of a number


def placed(mesh, case, spec, own=REPLICATED):
    """The operands and cotangents on a mesh; scale and bias as `own` says."""
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    large = 1 + case.has_residual
    args = [put(a, spec if i < large else own) for i, a in enumerate(case.args)]
    return args, [put(ct, spec) for ct in case.cts]


def test_split_rows_communicate_for_the_parameters_alone(case, mesh):
    args, cts = placed(mesh, case, SPECS["rows in two dimensions"])
    forward = jax.jit(case).lower(*args).compile()
    assert hlo.collectives(forward) == []
    backward = jax.jit(case.grad).lower(*args, *cts).compile()
    assert hlo.collectives(backward) == [Collective("all-reduce", 2 * N)]  # dscale and dbias
    case.check(backward(*args, *cts), case.gradients())


@pytest.mark.parametrize("layout, parts", [("features", 2), ("features over both axes", 8)])
def test_split_features_exchange_two_numbers_a_row_each_way(case, mesh, layout, parts):
    args, cts = placed(mesh, case, SPECS[layout], P(SPECS[layout][2]))
    rows = 16 // (8 // parts)
    forward = jax.jit(case).lower(*args).compile()
    assert hlo.collectives(forward) == [Collective("all-gather", parts * 2 * rows * FLOAT)]
    assert calls(forward) == {"apply": 1, "row_statistics": 1}
    case.check(forward(*args), case.values())
    backward = jax.jit(case.grad).lower(*args, *cts).compile()
    case.check(backward(*args, *cts), case.gradients())
    kernels = {"backward_apply": 1, "row_dots": 1, "row_statistics": 1}
    assert calls(backward) == kernels
    kinds = [c.kind for c in hlo.collectives(backward)]
    assert kinds.count("all-gather") == 1 and len(kinds) <= 3
