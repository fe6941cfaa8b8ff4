"""Dense layers with `quantization="fp8"` against the recipe of docs/quantization.md in NumPy."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from fp8_recipe import Near, check, check_all, exact, product, pulled, recipe, rows, unit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import accumulate_gradients, dense, fuse, gated_dense, gated_product, rms_norm
from normfuse.native import implementation

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
ROWS, IN, OUT = (8, 6), 32, 48
fp8 = functools.partial(dense, quantization="fp8")

# ---------------------------------------------------------------- the layers

LAYERS = {"dense": dense, "gated_dense": gated_dense, "gated_product": gated_product}


@functools.partial(fuse, quantization="fp8")
def of_norm(x, scale, *kernels, implementation=None):
    """A layer of one or two kernels and of a norm, which writes the codes that it reads."""
    layer = dense if len(kernels) == 1 else gated_dense
    n = rms_norm(x, scale, implementation=implementation)
    return layer(n, *kernels, quantization="fp8", implementation=implementation)


def draw(rng, *shape, dtype=f32, over=1.0):
    return jnp.asarray(rng.standard_normal(shape) / over, dtype)


def operands(rng, layer="dense", dtype=f32, kernel_dtype=None, bias=True):
    """The layer's operands, and a gradient of its result."""
    kernel = lambda: draw(rng, IN, OUT, dtype=kernel_dtype or dtype, over=np.sqrt(IN))
    args = [draw(rng, *ROWS, IN, dtype=dtype)]
    args += [draw(rng, *ROWS, IN, dtype=dtype)] * (layer == "gated_product")
    args += [1 + draw(rng, IN, over=8)] * (layer == "norm")
    args += [kernel() for _ in range(1 + layer.endswith("gated_dense"))]
    if bias and layer == "dense":
        args.append(draw(rng, OUT, dtype=kernel_dtype or dtype))
    return args, draw(rng, *ROWS, OUT, dtype=dtype)


def both_ways(layer=fp8):
    """(args, dy) -> (y, the gradients of all of args)."""

    def run(args, dy):
        y, pull = jax.vjp(layer, *args)
        return y, list(pull(dy))

    return run


@pytest.mark.optimized
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(
    "layer, dtypes",
    [
        ("dense", (bf16, f32)),
        ("dense", (f16, f16)),
        ("gated_dense", (f32, f32)),
        ("gated_product", (bf16, bf16)),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_recipe(layer, dtypes, implementation, rng):
    args, dy = operands(rng, layer, *dtypes)
    options = {"quantization": "fp8", "activation": "silu", "implementation": implementation}
    run = jax.jit(both_ways(functools.partial(LAYERS[layer], **options)))
    y, gradients = run(args, dy)
    assert y.dtype == dtypes[0] and y.shape == dy.shape
    assert [(g.shape, g.dtype) for g in gradients] == [(a.shape, a.dtype) for a in args]
    check_all([y, gradients], recipe(layer, args, dy))


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_gradients_are_nearer_to_the_recipe_than_to_plain_products(dtype, rng):
    """Without an activation nothing on the way is rounded, and each code is known."""
    for layer in ("dense", "gated_product"):
        args, dy = operands(rng, layer, dtype, bias=False)
        options = {"activation": "silu"} if layer == "gated_product" else {}
        run = both_ways(functools.partial(LAYERS[layer], quantization="fp8", **options))
        y, gradients = jax.jit(run)(args, dy)
        expected = recipe(layer, args, dy, activation=None)
        check_all([y, gradients], expected)
        plain = jax.jit(both_ways(functools.partial(LAYERS[layer], **options)))(args, dy)
        for got, near, wide in zip(gradients, expected[1], plain[1], strict=True):
            if layer == "gated_product" and dtype == bf16:
                continue  # its hidden array is rounded, and may have other codes
            limit = np.linalg.norm(near.slack)
            assert np.linalg.norm(wide - jnp.reshape(got, wide.shape)) > 2 * limit


@pytest.mark.parametrize("rows", [(), (3,), (2, 0)], ids=str)
def test_any_number_of_rows(rows, rng):
    x, kernel, dy = draw(rng, *rows, IN), draw(rng, IN, OUT), draw(rng, *rows, OUT)
    y, gradients = jax.jit(both_ways())([x, kernel], dy)
    assert y.shape == dy.shape and gradients[0].shape == x.shape
    check_all([y, gradients], recipe("dense", [x, kernel], dy, activation=None))


def test_a_kernel_of_several_output_axes_is_one_matrix(rng):
    args, dy = operands(rng)
    flat = jax.jit(both_ways())(args, dy)
    split = lambda x, kernel, bias: fp8(x, kernel.reshape(IN, 3, 16), bias.reshape(3, 16))
    y, gradients = jax.jit(both_ways(split))(args, dy.reshape(*ROWS, 3, 16))
    np.testing.assert_array_equal(y.reshape(*ROWS, OUT), flat[0])
    for a, b in zip(gradients, flat[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 48), (32, 3, 8)], ids=str)
def test_a_kernel_that_does_not_fit_multiplies_in_the_compute_dtype(shape, rng):
    fits = shape == (32, 3, 8)  # 24 outputs are no multiple of 16 either
    x, kernel = draw(rng, 16, shape[0]), draw(rng, *shape)
    assert not (fits and np.prod(shape[1:]) % 16 == 0)
    dy = draw(rng, 16, *shape[1:])
    for a, b in zip(
        jax.tree.leaves(jax.jit(both_ways())([x, kernel], dy)),
        jax.tree.leaves(jax.jit(both_ways(dense))([x, kernel], dy)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_zeros_and_what_is_not_finite(rng):
    (x, kernel, _), _ = operands(rng, bias=True)
    assert not np.any(fp8(jnp.zeros_like(x), kernel))
    assert not np.any(fp8(x, jnp.zeros_like(kernel)))
    y = np.array(fp8(x.at[1, 2, 3].set(jnp.inf), kernel))
    assert np.isnan(y[1, 2]).all()
    y[1, 2] = 0
    without = np.array(fp8(x.at[1, 2, 3].set(0), kernel))
    without[1, 2] = 0
    np.testing.assert_array_equal(y, without)


# ---------------------------------------------------------------- transformations


@pytest.mark.parametrize("moves, dtype", half([(0,), (1,), (0, 1)], [f32, bf16]), ids=str)
def test_tangents_are_those_of_dequantized_operands(moves, dtype, rng):
    (x, kernel), _ = operands(rng, dtype=dtype, bias=False)
    tangents = {0: draw(rng, *ROWS, IN, dtype=dtype), 1: draw(rng, IN, OUT, dtype=dtype)}
    f = lambda *moving: fp8(*(dict(zip((0, 1), (x, kernel))) | dict(zip(moves, moving))).values())
    y, dy = jax.jit(lambda *args: jax.jvp(f, tuple((x, kernel)[i] for i in moves), args))(
        *[tangents[i] for i in moves]
    )
    check(y, product(rows(x), kernel, dtype))
    terms = {
        0: rows(tangents[0]) @ exact(kernel).quantized(),
        1: rows(x).quantized() @ exact(tangents[1]),
    }
    check(
        dy, functools.reduce(Near.__add__, [terms[i].rounded(dtype) for i in moves]).rounded(dtype)
    )


@pytest.mark.parametrize("small", [0, 1])
def test_vmap_shares_the_scale_of_rows_and_not_that_of_kernels(small, rng):
    """An example that is 2¹⁴ times smaller keeps its bits only if its scale is its own."""
    (x, kernel), _ = operands(rng, bias=False)
    factors = np.float32([1, 2.0**-14])
    args = [x, kernel]
    args[small] = jnp.stack([args[small] * f for f in factors])
    axes = (0, None) if small == 0 else (None, 0)
    y = jax.jit(jax.vmap(fp8, axes))(*args)
    if small == 0:
        check(y, product(rows(args[0]), kernel, f32))
        assert jnp.linalg.norm(y[1] - y[0] * factors[1]) > 0.1 * jnp.linalg.norm(y[1])
    else:
        np.testing.assert_array_equal(y[1], y[0] * factors[1])


def test_each_operand_is_quantized_once(rng):
    """x, the kernel and dy; a frozen kernel or input costs nothing more."""
    (x, kernel), dy = operands(rng, bias=False)
    compiled = jax.jit(both_ways()).lower([x, kernel], dy).compile()
    assert hlo.calls(compiled, "quantize_") == {"amax": 3, "cast": 3}
    frozen = lambda x, dy: jax.vjp(lambda x: fp8(x, kernel), x)[1](dy)
    text = jax.jit(frozen).lower(x, dy).as_text()
    assert text.count("dot_general") == 1  # the result is not used
    forward = jax.jit(fp8).lower(x, kernel).compile()
    assert hlo.calls(forward, "quantize_") == {"amax": 2, "cast": 2}
    args, dy = operands(rng, "norm")
    compiled = jax.jit(both_ways(of_norm)).lower([*args, args[-1] + 1], dy).compile()
    calls = hlo.calls(compiled, "quantize_")
    assert (calls["amax"], calls["cast"]) == (4, 5)  # the norm has a bound


def test_main_gradients_are_sums_in_float32(rng):
    """Gradients of bfloat16 kernels, in products that write float32."""
    xs, dy = draw(rng, 4, 16, IN, dtype=bf16), draw(rng, 16, OUT, dtype=bf16)
    kernel = draw(rng, IN, OUT, dtype=bf16)
    loss = lambda kernel, x: jnp.sum(fp8(x, kernel).astype(f32) * dy.astype(f32))
    _, got = jax.jit(lambda kernel: accumulate_gradients(loss, kernel, xs))(kernel)
    assert got.dtype == f32
    each = [pulled(rows(x), kernel.astype(f32), rows(dy), bf16)[1] for x in xs]
    total = functools.reduce(Near.__add__, each)
    check(4 * got, total)  # the mean
    rounded = np.abs(np.asarray(got, np.float64)) * unit(bf16)
    assert 4 * np.linalg.norm(rounded) > 10 * np.linalg.norm(total.slack)


# ---------------------------------------------------------------- norms


def test_the_backward_of_a_norm_keeps_codes(rng):
    """Codes of the normalised x and of the kernel, x itself, and a float32 a row."""
    args, _ = operands(rng, "norm", bf16, bf16)
    layer = jax.jit(of_norm)
    kept = lambda f, *args: sorted(
        (a.size, a.dtype.name) for a in jax.tree.leaves(jax.vjp(f, *args)[1])
    )
    x, rows, kernel = args[0].size, args[0].size // IN, IN * OUT
    large = [(x, "uint8"), (x, "bfloat16"), (kernel, "uint8"), (IN, "float32"), (rows, "float32")]
    assert [one for one in kept(layer, *args) if one[0] > 1] == sorted(large)
    of_kernel = lambda kernel: layer(*args[:2], kernel)
    assert [one for one in kept(of_kernel, args[2]) if one[0] > 1] == [(x, "uint8")]


# ---------------------------------------------------------------- meshes

SPLITS = [  # x, kernel, result
    (P("data"), P(), P("data")),
    (P("data"), P(None, "tensor"), P("data", None, "tensor")),
    (P("data"), P("data", "tensor"), P("data", None, "tensor")),
    (P("data", None, "tensor"), P("tensor"), P("data")),
    # its gradient is scattered and summed
    (P(("data", "tensor")), P("data"), P(("data", "tensor"))),
]


def on_mesh(kind):
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)


def sharded(rng, kind, x_spec, kernel_spec, out_spec):
    """(the program of a layer both ways, its operands, the recipe)."""
    (x, kernel, bias), dy = operands(rng)
    expected = recipe("dense", (x, kernel, bias), dy, activation=None)
    layer = fp8
    if kind == AxisType.Explicit and x_spec == P("data", None, "tensor") and kernel_spec:
        layer = functools.partial(fp8, out_sharding=out_spec)
    mesh = on_mesh(kind)
    bias_spec = P(out_spec[2]) if len(out_spec) > 2 else P()
    with jax.set_mesh(mesh):
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        args = [place(*pair) for pair in ((x, x_spec), (kernel, kernel_spec), (bias, bias_spec))]
        dy = place(dy, out_spec)
        return jax.jit(both_ways(layer)).lower(args, dy).compile(), (args, dy), expected


@pytest.mark.parametrize("specs, kind", half(SPLITS, [AxisType.Auto, AxisType.Explicit]), ids=str)
def test_a_mesh_gives_the_result_of_one_device(specs, kind, rng, eight_devices):
    del eight_devices
    compiled, given, expected = sharded(rng, kind, *specs)
    found = compiled(*given)
    check_all(found, expected)
    if kind == AxisType.Explicit:
        for a, like in zip(found[1], given[0], strict=True):
            assert a.sharding.is_equivalent_to(like.sharding, a.ndim)


@pytest.mark.parametrize(
    "kind, specs, kernels, sums",
    [
        # the kernel's and the bias's gradients
        (AxisType.Explicit, SPLITS[0], 0, IN * OUT + OUT),
        # and dx's
        (AxisType.Auto, SPLITS[1], 1, (IN * OUT + OUT) // 2 + 48 * IN // 4),
    ],
    ids=["data", "data and tensor"],
)
def test_a_maximum_is_one_number_to_reduce(kind, specs, kernels, sums, rng, eight_devices):
    """Nothing is gathered; x, dy and a kernel that is split each have one maximum over devices."""
    del eight_devices
    compiled, _, _ = sharded(rng, kind, *specs)
    reduced = {("all-reduce", "f32"): 2 + sums, ("all-reduce", "s32"): kernels}
    assert hlo.communicated(compiled) == {key: size for key, size in reduced.items() if size}
    assert hlo.calls(compiled, "quantize_") == {"amax": 3, "cast": 3}


def test_under_shard_map_each_device_has_its_own_scale(rng, eight_devices):
    """The call is that of a device's own rows; nothing is reduced but gradients."""
    del eight_devices
    (x, kernel, bias), dy = operands(rng)
    x, dy = (a * 4.0 ** jnp.arange(8).reshape(8, 1, 1) for a in (x, dy))
    wrapped = jax.shard_map(
        fp8,
        mesh=on_mesh(AxisType.Auto),
        in_specs=(P(("data", "tensor")), P(), P()),
        out_specs=P(("data", "tensor")),
    )
    compiled = jax.jit(both_ways(wrapped)).lower([x, kernel, bias], dy).compile()
    y, gradients = compiled([x, kernel, bias], dy)
    parts = [recipe("dense", (x[i : i + 1], kernel, bias), dy[i : i + 1], None) for i in range(8)]
    for i, (near, (dx, *_)) in enumerate(parts):
        check(y[i : i + 1], near)
        check(gradients[0][i : i + 1], dx)
    for k in (1, 2):
        check(gradients[k], functools.reduce(Near.__add__, [part[1][k] for part in parts]))
    assert hlo.communicated(compiled) == {("all-reduce", "f32"): IN * OUT + OUT}


# ---------------------------------------------------------------- errors

X, K = jnp.ones((4, 32)), jnp.ones((32, 16))
CALLS = {
    "dense": lambda x=X, k=K, **o: dense(x, k, **o),
    "gated_dense": lambda x=X, k=K, **o: gated_dense(x, k, k, **o),
    "gated_product": lambda x=X, k=K, **o: gated_product(x, x, k, **o),
}


@pytest.mark.parametrize("op", CALLS)
def test_bad_input_is_one_clear_error(op):
    call = CALLS[op]
    for value in ("int8", "FP8", True, 8, ["fp8"], np.ones(2)):
        with pytest.raises(ValueError, match=f"^{op}: quantization must be None or 'fp8', got "):
            jax.eval_shape(lambda value=value: call(quantization=value))
    with pytest.raises(NotImplementedError, match=f"^{op}.*'pallas'"):
        jax.eval_shape(lambda: call(quantization="fp8", implementation="pallas"))
    with jax.enable_x64(True):
        wide = jnp.ones((4, 32), "float64"), jnp.ones((32, 16), "float64")
        message = f"^{op}: quantization='fp8' takes float32, bfloat16 and float16, got float64"
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(lambda: call(*wide, quantization="fp8"))
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(lambda: call(quantization="fp8", dtype="float64"))
    with pytest.raises(TypeError, match=f"^{op}: .* got int32"):
        jax.eval_shape(lambda: call(k=jnp.ones((32, 16), jnp.int32), quantization="fp8"))


def test_a_gpu_without_fp8_is_said(rng, monkeypatch, caplog):
    pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    monkeypatch.setattr(implementation, "_plain", {})
    args, dy = operands(rng, dtype=bf16)

    def lower(arch, order):
        monkeypatch.setenv("NORMFUSE_CUDA_ARCH", arch)
        jax.clear_caches()
        layer = functools.partial(fp8, implementation=order)
        jax.jit(both_ways(layer)).trace(args, dy).lower(lowering_platforms=("cuda",))

    reason = "compute capability 8.0 has no FP8 product"
    with pytest.raises(NotImplementedError, match=f"implementation='native' .*{reason}"):
        lower("sm_80", "native")
    with caplog.at_level("INFO", "normfuse"):
        for _ in range(2):
            lower("sm_80", None)
    (record,) = [r for r in caplog.records if reason in r.getMessage()]
    assert any(reason in why for _, why in implementation.fallbacks())
    lower("sm_90", "native")
    jax.clear_caches()
