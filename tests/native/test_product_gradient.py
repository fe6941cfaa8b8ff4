"""A product with an activation's gradient in its epilogue: values, and lowered programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import Expected, assert_close, clamped_swiglu, wide

from normfuse.layers.dense import product_gradient
from normfuse.layers.dense.epilogue import GATED, SCALARS, Epilogue, scalar_of
from normfuse.layers.dense.matmul import Product
from normfuse.layers.dense.product_gradient import Gradient
from normfuse.native import implementation, launch
from normfuse.native.implementation import Order, Unsupported
from normfuse.native.pallas import portable
from normfuse.native.pallas.lowering import Target

HOPPER = Target("cuda", cores=3, capability=90)
PALLAS = Order(("pallas",), strict=True)


def gradient_of(name="silu", gated=True, with_value=True, contract=1):
    """What is known of the gradient; `contract` is w's axis that is summed over."""
    flags = {"has_up": gated, "with_value": with_value, "axes": (), "out_dtype": "bfloat16"}
    product = Product.of(2, 2, contract=1 - contract)  # the axis that the forward sums over
    return Gradient(Epilogue(function=scalar_of(name), **flags), product)


def serve(target, spec, *arrays):
    from normfuse.layers.dense import pallas_gradient

    return pallas_gradient.run(target, spec, *arrays)


def operands(m, k, n, gated, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    return draw(m, k), draw(n, k), *[draw(m, n) for _ in range(1 + gated)]


def silu(z):
    """The function and its derivative, which is at most 1.1 and changes by at most 0.5 |dz|."""
    s = 1 / (1 + np.exp(-z))
    return z * s, s * (1 + z * (1 - s))


def expected(dy, w, z, *up):
    dy, w, z, *up = map(wide, (dy, w, z, *up))
    up, terms = up[0] if up else np.ones_like(z), dy.shape[1]
    dh, size, (y, slope) = dy @ w.T, np.abs(dy) @ np.abs(w).T, silu(z)
    yield Expected(dh * up * slope, 1.1 * size * np.abs(up), terms)
    yield Expected(dh * y, size * np.abs(y), terms)
    yield Expected(y * up, np.abs(y * up), 4)


@pytest.fixture
def interpreted(monkeypatch):
    """The Hopper kernel with its barriers and copies, on a CPU."""
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("this JAX cannot interpret Mosaic GPU kernels")
    from normfuse.layers.dense import pallas_gradient

    params = plgpu.InterpretGPUParams(detect_races=True)  # raises an error for a race
    run = functools.partial(pallas_gradient.multiply, interpret=params)
    monkeypatch.setattr(pallas_gradient, "multiply", run)
    return pallas_gradient


# Rows and columns beyond the last tile, blocks with several tiles, and a slot's every use.
@pytest.mark.parametrize(
    "stages, staging, contract, gated",
    [(4, 2, 0, True), (4, 2, 1, True), (3, 5, 1, True), (4, 2, 0, False)],
)
def test_values_match_float64(interpreted, monkeypatch, stages, staging, contract, gated):
    shape = functools.partial(interpreted.Shape, stages, staging)
    monkeypatch.setattr(interpreted, "Shape", shape)
    arrays = operands(264, 192, 576, gated, "float16" if gated else "bfloat16")
    dy, w, *rest = arrays
    run = jax.jit(functools.partial(serve, HOPPER, gradient_of(gated=gated, contract=contract)))
    got = run(dy, w if contract else w.T, *rest)
    dz, dup, value = expected(*arrays)
    for one, want in zip(got, [dz, *[dup] * gated, value], strict=True):
        assert one.dtype == arrays[0].dtype
        assert_close(one, want)


def test_without_the_value(interpreted):
    del interpreted
    arrays = operands(128, 64, 256, True)
    spec = gradient_of("relu", with_value=False)
    dz, dup = jax.jit(functools.partial(serve, HOPPER, spec))(*arrays)
    dy, w, z, up = map(wide, arrays)
    dh, size = dy @ w.T, np.abs(dy) @ np.abs(w).T
    assert_close(dz, Expected(dh * up * (z > 0), size * np.abs(up), 64))
    assert_close(dup, Expected(dh * np.maximum(z, 0), size * np.abs(z), 64))


def test_a_function_of_both(interpreted):
    del interpreted
    dy, w, z, up = operands(128, 64, 256, True, "float16")
    arrays = dy, w, 4 * z, 4 * up  # on both sides of the limit
    got = jax.jit(functools.partial(serve, HOPPER, gradient_of("clamped_swiglu")))(*arrays)
    dy, w, z, up = map(wide, arrays)
    y, of_z, of_up = clamped_swiglu(z, up)
    dh, size = dy @ w.T, np.abs(dy) @ np.abs(w).T
    assert_close(got[0], Expected(dh * of_z, 1.1 * size * (np.abs(up) + 1), 64))
    assert_close(got[1], Expected(dh * of_up, size * np.abs(z), 64))
    assert_close(got[2], Expected(y, (np.abs(up) + 1) * np.abs(z), 4))


@pytest.mark.parametrize("name", SCALARS)
def test_derivatives_on_what_every_backend_has(name):
    x = jnp.concatenate([jnp.linspace(-12, 12, 2001), jnp.array([0.0, 1e-4, -1e-4])])

    def both(x):
        return list(jax.jvp(function, (x,), (jnp.full_like(x, 1.25),)))

    function = portable.differentiable(SCALARS[name])
    # a few roundings; where 1 − tanh² cancels one of 1, times x and its slope of up to 60 here
    made = portable.portable(both, exact=True)
    assert "tanh" not in str(jax.make_jaxpr(made)(x)) or name in ("elu", "mish")
    exact = jax.jvp(SCALARS[name], (x,), (jnp.full_like(x, 1.25),))
    for got, want in zip(made(x), exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=120 * 2.0**-24)


# ---------------------------------------------------------------- lowering


def lowered(arrays, order, platform="cuda", contract=1, name="gelu_tanh"):
    spec = gradient_of(name, gated=len(arrays) > 3, contract=contract)
    fn = functools.partial(product_gradient.kernel, spec, order=order)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    return jax.jit(fn).trace(*types).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype, contract", [("bfloat16", 1), ("float16", 1), ("bfloat16", 0)])
def test_it_lowers_to_one_kernel_in_place_of_its_operands(arch, dtype, contract):
    arch("sm_90")
    dy, w, *rest = operands(128, 64, 256, True, dtype)
    text = lowered([dy, w if contract else w.T, *rest], PALLAS, contract=contract)
    (call,) = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    assert "stablehlo.dot_general" not in text
    for operand, result in ((2, 0), (3, 1)):  # z and up are read where their gradients go
        place = f"output_tuple_indices = [{result}], operand_index = {operand},"
        assert place in call


def test_it_lowers_for_every_activation(arch):
    arch("sm_90")
    types = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((128, 64), (256, 64), (128, 256))]
    for name in {*SCALARS, *GATED} - {"swish"}:
        arrays = [*types, types[-1]] if name in GATED else types
        assert "@mosaic_gpu" in lowered(arrays, PALLAS, name=name), name
    with jax.enable_x64(True):
        assert "@mosaic_gpu" in lowered(types, PALLAS, name="gelu")


@pytest.mark.parametrize(
    "name, size, dtype, reason",
    [
        ("sm_80", (128, 64, 256), "bfloat16", "compute capability 9.0"),
        ("sm_90", (128, 64, 256), "float32", "bfloat16 alone, or of float16"),
        ("sm_90", (120, 64, 256), "bfloat16", "at least 128 rows.*these are 120, 256 and 64"),
        ("sm_90", (128, 64, 200), "bfloat16", "these are 128, 200 and 64"),
        ("sm_90", (128, 60, 256), "bfloat16", "these are 128, 256 and 60"),
    ],
)
def test_what_it_does_not_take(arch, name, size, dtype, reason):
    arch(name)
    arrays = operands(*size, True, dtype)
    with pytest.raises(NotImplementedError, match=f"'pallas' cannot serve here.*{reason}"):
        lowered(arrays, PALLAS)
    text = lowered(arrays, Order(("pallas", "native"), strict=True))
    assert text.count("stablehlo.dot_general") == 1 and "normfuse_launch" in text


# ---------------------------------------------------------------- defaults

H200 = launch.Target("sm_90", 132)


@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize(
    "target, size, dtype, faster",
    [
        (H200, (16384, 4096, 14336), "bfloat16", True),
        (H200, (2048, 4096, 14336), "bfloat16", True),
        (H200, (16384, 4096, 14336), "float16", False),  # not measured
        (H200, (16384, 4096, 14336), "float32", False),
        (H200, (1024, 4096, 14336), "bfloat16", False),  # 448 tiles: 3.4 rounds take 4
        (H200, (16384, 16384, 14336), "bfloat16", False),  # a slower product costs more
        (H200, (16380, 4096, 14336), "bfloat16", False),  # the kernel does not take it
        (launch.Target("sm_80", 108), (16384, 4096, 14336), "bfloat16", False),
        (launch.Target("compute_90", 132), (16384, 4096, 14336), "bfloat16", False),  # or later
    ],
)
def test_the_rule(target, size, dtype, faster, contract):
    m, k, n = size
    w = (n, k) if contract else (k, n)
    types = [jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), w, (m, n))]
    spec = gradient_of(gated=False, contract=contract)
    assert product_gradient.fused_is_faster(target, spec, *types) == faster


def test_nothing_asked_for_is_one_kernel_where_that_is_faster(arch):
    arch("sm_90")
    types = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2048, 4096), (14336, 4096))]
    types.append(jax.ShapeDtypeStruct((2048, 14336), "bfloat16"))
    best = Order((), strict=False)
    assert "@mosaic_gpu" in lowered(types, best)
    for text in (lowered(types, Order(("native",), strict=True)), lowered([*types], best, "rocm")):
        assert "@mosaic_gpu" not in text and text.count("stablehlo.dot_general") == 1
    few = [
        jax.ShapeDtypeStruct((256, t.shape[1]), t.dtype) if t.shape[0] == 2048 else t for t in types
    ]
    assert "@mosaic_gpu" not in lowered(few, best)


def test_where_pallas_fails_unasked_a_gemm_and_a_pass_serve(arch, monkeypatch, caplog):
    from normfuse.layers.dense import pallas_gradient

    def other(*args, **options):
        raise TypeError("load() got an unexpected keyword argument")

    arch("sm_90")
    monkeypatch.setattr(pallas_gradient, "multiply", other)
    monkeypatch.setattr(implementation, "_substituted", {})
    types = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2048, 4096), (14336, 4096))]
    types.append(jax.ShapeDtypeStruct((2048, 14336), "bfloat16"))
    with caplog.at_level("INFO", "normfuse"):
        text = lowered(types, Order((), strict=False))
    assert "@mosaic_gpu" not in text and text.count("stablehlo.dot_general") == 1
    assert "dense is served by native: on cuda, Pallas failed with TypeE" in caplog.text
    with pytest.raises(TypeError, match="unexpected keyword"):
        lowered(types, PALLAS)


def test_other_platforms_have_none():
    with pytest.raises(Unsupported, match="compute capability 9.0"):
        serve(Target("tpu"), gradient_of(gated=False), *operands(128, 64, 256, False))
    arrays = operands(128, 64, 256, True)
    assert "custom_call" not in lowered(arrays, Order((), strict=False), "rocm")
