"""The CUDA kernels of the quantizer: run on the CPU by an emulator, and compiled for every GPU."""

import dataclasses
import re

import fp8_reference
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cuda_emulator import Emulator

from normfuse.layers.dense.epilogue import SCALARS
from normfuse.layers.quantization import gated, kernels
from normfuse.layers.quantization.kernels import AmaxLayout, CastLayout
from normfuse.native import compiler
from normfuse.native.launch import Target, named_target

pytest.importorskip("cuda.bindings", reason="the kernels' headers come with cuda-bindings")

BF16 = np.dtype(ml_dtypes.bfloat16)
SMALL = CastLayout(width=8, height=8, batch=4, group=2)  # tiles of 128 x 64
FLAGS = {"has_q": True, "has_qt": True}
NEWEST = pytest.mark.newest  # the oldest compiler compiles the same for other architectures
NEWER = [pytest.param(arch, marks=NEWEST) for arch in ("sm_89", "sm_100", "sm_120")]


@pytest.fixture
def emulated(emulator_folder, monkeypatch):
    """`emulated(layout, shift=0)`: a target whose kernels are emulated, and the launches made."""

    def make(layout=SMALL, shift=0):
        emulator = Emulator(emulator_folder, shift)
        monkeypatch.setattr(kernels, "launch", emulator.launch)
        choose = lambda *_, after_amax: dataclasses.replace(layout, backwards=after_amax)
        monkeypatch.setattr(kernels, "cast_layout", choose)
        monkeypatch.setattr(kernels, "amax_layout", lambda *_: AmaxLayout(2, 2))
        return Target("sm_90", multiprocessors=3), emulator.launches

    return make


def unusual(rng, shape, dtype):
    """Normal numbers with a few that are not finite, subnormal, or much larger."""
    x = rng.standard_normal(shape).astype(np.float32)
    flat = x.reshape(-1)
    some = rng.permutation(flat.size)[: min(9, flat.size)]
    values = [np.nan, np.inf, -np.inf, 300, -0.0, 1e-42, -1e-3, 2e-5, -np.nan]
    flat[some] = values[: some.size]
    return x.astype(dtype)


def check(x, dtype, results, bound=None):
    *codes, scale = (np.asarray(r) for r in results)
    q, expected = fp8_reference.quantize(x, dtype, bound)
    assert scale.tobytes() == expected.tobytes()
    for found, want in zip(codes, (q, np.ascontiguousarray(q.T))[-len(codes) :]):
        np.testing.assert_array_equal(found.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(
    ("shape", "given", "dtype"),
    [
        ((128, 64), BF16, fp8_reference.E4M3),  # one tile
        ((272, 208), BF16, fp8_reference.E4M3),  # the last tiles are not full
        ((160, 96), "float32", fp8_reference.E5M2),
        ((16, 16), "float16", fp8_reference.E5M2),
        ((131, 77), BF16, fp8_reference.E4M3),  # one element at a time
        ((1, 300), "float32", fp8_reference.E4M3),
    ],
    ids=str,
)
def test_cuda_codes_are_those_of_the_reference(emulated, rng, shape, given, dtype):
    target, launches = emulated()
    x = unusual(rng, shape, np.dtype(given))
    check(x, dtype, kernels.cuda_quantize(target, x, dtype=dtype.name, **FLAGS))
    assert [launch["kernel"] for launch in launches] == ["quantize_amax", "quantize_cast"]
    assert launches[1]["macros"]["VECTORS"] == (shape[0] % 16 == shape[1] % 16 == 0)


@pytest.mark.parametrize("has_q", [True, False])
def test_cuda_layouts_are_made_alone(emulated, rng, has_q):
    target, _ = emulated()
    x = rng.standard_normal((144, 80)).astype(BF16)
    flags = {"has_q": has_q, "has_qt": not has_q}
    results = kernels.cuda_quantize(target, x, dtype="float8_e4m3fn", **flags)
    q, scale = fp8_reference.quantize(x)
    assert results[1] == scale and results[0].shape == ((144, 80) if has_q else (80, 144))
    np.testing.assert_array_equal(
        np.asarray(results[0]).view(np.uint8), (q if has_q else q.T).view(np.uint8)
    )


@pytest.mark.parametrize("layout", [CastLayout(), CastLayout(8, 16, 16), CastLayout(32, 8, 2)])
def test_cuda_tiles_of_other_sizes(emulated, rng, layout):
    target, _ = emulated(layout)
    x = unusual(rng, (400, 272), BF16)
    check(x, fp8_reference.E4M3, kernels.cuda_quantize(target, x, dtype="float8_e4m3fn", **FLAGS))


def test_cuda_unaligned_arrays(emulated, rng):
    target, _ = emulated(shift=1)
    x = unusual(rng, (48, 32), BF16)
    check(x, fp8_reference.E4M3, kernels.cuda_quantize(target, x, dtype="float8_e4m3fn", **FLAGS))


@pytest.mark.parametrize("bound", [448.0, 1.0, 0.0, 1e-30, np.nan, np.inf])
def test_cuda_bounds_are_taken(emulated, rng, bound):
    """Also ones that do not hold: NaN, never the largest number."""
    target, _ = emulated()
    x = unusual(rng, (32, 32), np.dtype("float32"))
    maxima = np.array([0.0, -bound], np.float32)  # of which the magnitude counts
    check(
        x,
        fp8_reference.E4M3,
        kernels.cuda_cast(target, x, maxima, dtype="float8_e4m3fn", **FLAGS),
        bound,
    )


@pytest.mark.parametrize("given", ["float32", BF16, "float16"], ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 8191, 70_001])
def test_cuda_amax_is_that_of_the_reference(emulated, rng, given, size):
    for shift in (0, 1):
        target, launches = emulated(shift=shift)
        x = unusual(rng, (size,), np.dtype(given))
        found = np.asarray(kernels.cuda_maxima(target, x))
        assert found.max() == fp8_reference.amax(x)
        assert len(found) == launches[0]["grid"][0] <= 6


def test_cuda_amax_is_found_at_any_place(emulated):
    target, _ = emulated()
    for place in (0, 6, 8, 4095, 8191, 8192, 8198):
        x = np.zeros(8199, BF16)
        x[place] = -3
        assert np.asarray(kernels.cuda_maxima(target, x)).max() == 3


def test_cuda_empty_matrices_have_a_scale(emulated):
    target, _ = emulated()
    for shape in ((0, 16), (16, 0)):
        x = np.zeros(shape, BF16)
        check(
            x, fp8_reference.E4M3, kernels.cuda_quantize(target, x, dtype="float8_e4m3fn", **FLAGS)
        )


# ---------------------------------------------------------------- activations

SILU = SCALARS["silu"]


def products(rng, shape, dtype, count):
    """Raw products, and the scales that they lack."""
    raw = [(8 * rng.standard_normal(shape)).astype(dtype) for _ in range(count)]
    return raw, np.array([0.25, 0.125, 0.5][:count], np.float32)


def near(found, exact, bound, dtype) -> None:
    """Codes are those of a number within 1e-5 of the exact one, in both layouts."""
    q, qt, scale = (np.asarray(r) for r in found)
    assert scale == fp8_reference.scale(bound, dtype)
    np.testing.assert_array_equal(q.view(np.uint8), qt.view(np.uint8).T)
    ends = [exact * (1 + e) for e in (-1e-5, 1e-5)]
    low, high = (fp8_reference.quantize(end, dtype, bound)[0].astype(np.float32) for end in ends)
    wide = q.astype(np.float32)
    assert np.all((np.minimum(low, high) <= wide) & (wide <= np.maximum(low, high)))


@pytest.mark.parametrize("has_up", [True, False])
@pytest.mark.parametrize("given", [BF16, np.dtype("float32")], ids=str)
@pytest.mark.parametrize("shape", [(144, 80), (33, 50)], ids=str)
def test_cuda_activation_is_quantized_as_it_is_made(
    emulated, monkeypatch, rng, has_up, given, shape
):
    target, launches = emulated()
    monkeypatch.setattr(gated, "launch", kernels.launch)
    raw, scales = products(rng, shape, given, 1 + has_up)
    h, *parts = (np.asarray(r) for r in gated.define_h(*raw, scales, function=SILU))
    maxima = [np.asarray(m) for m in gated.cuda_amax(target, *raw, scales, function=SILU)]
    wanted = [h, *parts] if has_up else [h]
    np.testing.assert_allclose(np.ravel(maxima), [np.abs(p).max() for p in wanted], rtol=1e-5)
    bounds = np.asarray(maxima[0]).reshape(1, 1)
    flags = FLAGS | {"dtype": "float8_e4m3fn", "function": SILU}
    found = gated.cuda_forward(target, *raw, scales, bounds, **flags)
    near(found, h.astype("f8"), bounds.item(), fp8_reference.E4M3)
    assert len(launches) == 2


@pytest.mark.parametrize("has_up", [True, False])
@pytest.mark.parametrize("shape", [(272, 144), (33, 50)], ids=str)
def test_cuda_gradients_are_quantized_as_they_are_made(emulated, monkeypatch, rng, has_up, shape):
    target, _ = emulated()
    monkeypatch.setattr(gated, "launch", kernels.launch)
    raw, scales = products(rng, shape, BF16, 2 + has_up)
    exact = [np.asarray(d) for d in gated.define_gradients(*raw, scales, function=SILU)]
    bounds = np.array([[100.0], [77.0]], np.float32)[: 1 + has_up]
    flags = FLAGS | {"dtype": "float8_e5m2", "function": SILU}
    found = gated.cuda_gradient(target, *raw, scales, bounds, **flags)
    assert len(found) == 3 * len(exact)
    for i, (d, bound) in enumerate(zip(exact, bounds)):
        near(found[3 * i : 3 * i + 3], d.astype("f8"), bound.item(), fp8_reference.E5M2)


def test_cuda_activation_of_what_is_not_finite_is_not(emulated, monkeypatch, rng):
    target, _ = emulated()
    monkeypatch.setattr(gated, "launch", kernels.launch)
    (a, up), scales = products(rng, (32, 32), BF16, 2)
    a[3, 4], up[5, 6], up[7, 8] = np.nan, np.inf, -np.inf
    maxima = gated.cuda_amax(target, a, up, scales, function=SILU)
    assert np.isfinite(np.asarray(maxima)).all()
    flags = FLAGS | {"dtype": "float8_e4m3fn", "function": SILU}
    bounds = np.asarray(maxima[0]).reshape(1, 1)
    q, qt, _ = gated.cuda_forward(target, a, up, scales, bounds, **flags)
    lost = np.zeros((32, 32), bool)
    lost[[3, 5, 7], [4, 6, 8]] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(q, np.float32)), lost)
    np.testing.assert_array_equal(np.isnan(np.asarray(qt, np.float32)), lost.T)


# ---------------------------------------------------------------- compiling


@pytest.fixture
def compiled(monkeypatch):
    """`compiled(arch, x, dtype)`: the assembler's log of each kernel."""
    logs = {}

    def launch(source, kernel, operands, results, *, target, macros, shared=0, **_):
        assert shared <= target.shared_memory
        verbose = ["--ptxas-options=-v"] * (not target.portable)
        file = compiler.kernel_source(source)
        logs[kernel] = compiler.compile_with_log(file, macros, target.arch, *verbose)[1]
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(kernels, "launch", launch)

    def run(arch, x, dtype):
        logs.clear()
        kernels.cuda_quantize(named_target(arch), jnp.zeros((64, 64), x), dtype=dtype, **FLAGS)
        return dict(logs)

    return run


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "compute_80", *NEWER])
def test_cuda_quantizer_compiles(compiled, arch):
    for kernel, log in compiled(arch, "bfloat16", "float8_e4m3fn").items():
        assert "warning" not in log, (kernel, log)


@pytest.mark.newest  # the oldest assembler compiles the kernels of the test above
@pytest.mark.parametrize("x", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_cuda_quantizer_spills_no_registers_on_hopper(compiled, x, dtype):
    for kernel, log in compiled("sm_90", x, dtype).items():
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
        assert spilled == 0, (kernel, log)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", pytest.param("sm_100", marks=NEWEST)])
def test_cuda_gated_quantizer_compiles(compiled, monkeypatch, arch):
    logs = {}

    def launch(source, kernel, operands, results, *, target, macros, shared=0, **_):
        assert shared <= target.shared_memory
        log = compiler.compile_with_log(source, macros, target.arch, "--ptxas-options=-v")[1]
        logs[kernel, macros.get("GRADIENT", 0), macros["HAS_UP"]] = log
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(gated, "launch", launch)
    x, target = jnp.zeros((64, 64), BF16), named_target(arch)
    flags = FLAGS | {"dtype": "float8_e4m3fn", "function": SILU}
    for up in ([x], []) if arch == "sm_90" else ([x],):  # a part of the text with `up`
        scales, bounds = jnp.ones(1 + len(up)), jnp.ones((1, 1))
        gated.cuda_amax(target, x, *up, scales, function=SILU)
        gated.cuda_forward(target, x, *up, scales, bounds, **flags)
        scales, bounds = jnp.ones(2 + len(up)), jnp.ones((1 + len(up), 1))
        gated.cuda_gradient(target, x, x, *up, scales, bounds, **flags)
    assert len(logs) == (6 if arch == "sm_90" else 3)
    for kernel, log in logs.items():
        assert "warning" not in log, (kernel, log)
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
        assert arch != "sm_90" or spilled <= 8, (kernel, log)


def test_cuda_hopper_rounds_by_its_own_instruction():
    """And other GPUs by integers, which is what the emulator runs."""
    macros = {"X_TYPE": "float", "E5M2": 0, "HAS_Q": 1, "HAS_QT": 1, "VECTORS": 1}
    macros |= {"BLOCK_X": 8, "BLOCK_Y": 8, "BATCH": 4, "MIN_BLOCKS": 1}
    source = compiler.kernel_source("quantize_cast.cu")
    for arch, has in (("compute_90", True), ("compute_80", False)):
        text = compiler.compile_image(source, macros, arch).data
        assert (b"cvt.rn.satfinite.e4m3x2.f32" in text) == has
