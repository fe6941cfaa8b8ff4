"""The CUDA kernels of the quantizer: run on the CPU by an emulator, and compiled for every GPU."""

import dataclasses
import re

import fp8_reference
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cuda_emulator import Emulator

from normfuse.layers.core.activations import SCALARS
from normfuse.layers.norm import cuda as rms_norm
from normfuse.layers.norm.spec import Norm
from normfuse.layers.quantization import gated, norm, quantize
from normfuse.layers.quantization.norm import NormCodes
from normfuse.layers.quantization.quantize import CastLayout, Codes
from normfuse.native import compiler
from normfuse.native.compiler import Source
from normfuse.native.launch import Target, named_target

pytest.importorskip("cuda.bindings", reason="the kernels' headers come with cuda-bindings")

BF16 = np.dtype(ml_dtypes.bfloat16)
SMALL = CastLayout(width=8, height=8, batch=4, group=2)  # tiles of 128 x 64


@pytest.fixture
def emulated(emulator_folder, monkeypatch):
    """`emulated(layout, shift=0)`: a target whose kernels are emulated, and the launches made."""

    def make(layout=SMALL, shift=0):
        emulator = Emulator(emulator_folder, shift)
        monkeypatch.setattr(quantize, "launch", emulator.launch)
        monkeypatch.setattr(quantize, "cast_layout", lambda *_: layout)
        for name in ("AMAX_BLOCKS", "AMAX_UNROLL"):
            monkeypatch.setattr(quantize, name, 2)
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
    check(x, dtype, quantize.cuda_quantize(target, Codes(dtype.name), x))
    assert [launch["kernel"] for launch in launches] == ["quantize_amax", "quantize_cast"]
    assert launches[1]["macros"]["VECTORS"] == (shape[0] % 16 == shape[1] % 16 == 0)


def test_cuda_unaligned_arrays(emulated, rng):
    target, _ = emulated(shift=1)
    x = unusual(rng, (48, 32), BF16)
    check(x, fp8_reference.E4M3, quantize.cuda_quantize(target, Codes(), x))


@pytest.mark.parametrize("bound", [448.0, 1.0, 0.0, 1e-30, np.nan, np.inf])
def test_cuda_bounds_are_taken(emulated, rng, bound):
    """Also ones that do not hold: NaN, never the largest number."""
    target, _ = emulated()
    x = unusual(rng, (32, 32), np.dtype("float32"))
    maxima = np.array([0.0, -bound], np.float32)  # only magnitudes count
    check(
        x,
        fp8_reference.E4M3,
        quantize.cuda_cast(target, Codes(), x, maxima),
        bound,
    )


@pytest.mark.parametrize("given", ["float32", BF16, "float16"], ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 8191, 70_001])
def test_cuda_amax_is_that_of_the_reference(emulated, rng, given, size):
    for shift in (0, 1):
        target, launches = emulated(shift=shift)
        x = unusual(rng, (size,), np.dtype(given))
        found = np.asarray(quantize.cuda_maxima(target, x))
        assert found.max() == fp8_reference.amax(x)
        assert len(found) == launches[0]["grid"][0] <= 6


@pytest.mark.parametrize("shift", [0, 1])
def test_cuda_amax_is_found_at_any_place(emulated, shift):
    target, _ = emulated(shift=shift)
    for place in (0, 6, 8, 4095, 8191, 8192, 8198):
        x = np.zeros(8199, BF16)
        x[place] = -3
        assert np.asarray(quantize.cuda_maxima(target, x)).max() == 3


# ---------------------------------------------------------------- activations

SWIGLU = gated.Gated(SCALARS["silu"])


def draw(rng, shape, *dtypes):
    return [rng.standard_normal(shape).astype(dtype) for dtype in dtypes]


def near(found, exact, bound, dtype, of=None) -> None:
    """Codes are those of a number within 1e-5 (of `of`) of the exact one, in both layouts."""
    q, *qt, scale = (np.asarray(r) for r in found)
    assert scale == fp8_reference.scale(bound, dtype)
    for turned in qt:
        np.testing.assert_array_equal(q.view(np.uint8), turned.view(np.uint8).T)
    ends = [exact + e * (np.abs(exact) if of is None else of) for e in (-1e-5, 1e-5)]
    low, high = (fp8_reference.quantize(end, dtype, bound)[0].astype(np.float32) for end in ends)
    wide, lost = q.astype(np.float32), np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(wide), lost)
    assert np.all((np.minimum(low, high) <= wide) & (wide <= np.maximum(low, high)) | lost)


@pytest.fixture
def activated(emulated, monkeypatch):
    """`activated(shift=0)`: a target whose kernels are emulated, those of activations too."""

    def make(shift=0):
        target, launches = emulated(shift=shift)
        monkeypatch.setattr(gated, "launch", quantize.launch)
        return target, launches

    return make


@pytest.mark.parametrize(
    "has_up, given, shape",
    [
        (True, BF16, (144, 80)),
        (True, np.dtype("float32"), (33, 50)),
        (False, np.dtype("float32"), (144, 80)),
        (False, BF16, (33, 50)),
    ],
    ids=str,
)
def test_cuda_activation_is_quantized_as_it_is_made(activated, rng, has_up, given, shape):
    target, launches = activated()
    arrays = draw(rng, shape, *[given] * (1 + has_up))
    h, value = (np.asarray(r) for r in gated.define_h(SWIGLU, *arrays))
    maxima = np.concatenate(gated.cuda_amax(target, SWIGLU, *arrays))
    wanted = [np.abs(m.astype("f4")).max() for m in (h, *arrays, *[value] * has_up)]
    np.testing.assert_allclose(maxima, wanted, rtol=1e-5)
    bounds = maxima[: 2 + has_up]
    found = gated.cuda_forward(target, SWIGLU, *arrays, bounds)
    near(found[:2], h.astype("f8"), bounds[0], fp8_reference.E4M3)
    for i, array in enumerate(arrays):
        check_lying(array, found[2 * i + 2 :][:2])
    assert len(launches) == 2


def check_lying(x, found):
    q, scale = (np.asarray(r) for r in found)
    want, expected = fp8_reference.quantize(x)
    assert scale == expected
    np.testing.assert_array_equal(q.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("has_up", [True, False])
@pytest.mark.parametrize("shape", [(272, 144), (33, 50)], ids=str)
def test_cuda_gradients_are_quantized_as_they_are_made(activated, rng, has_up, shape):
    """From all codes there are; h, computed once more, stays within its first codes' numbers."""
    target, launches = activated()
    arrays = draw(rng, shape, *[BF16] * (1 + has_up))
    (dh,) = draw(rng, shape, BF16)
    pairs = [fp8_reference.quantize(x) for x in arrays]
    codes, scales = [q.view(np.uint8) for q, _ in pairs], np.array([s for _, s in pairs], "f4")
    codes[-1] = np.resize(np.arange(256, dtype=np.uint8), shape)
    meant = [q.view(fp8_reference.E4M3).astype(np.float32) * s for q, s in zip(codes, scales)]
    with np.errstate(invalid="ignore"):
        exact = [np.asarray(d) for d in gated.define_gradients(SWIGLU, dh, *meant)]
        h = np.asarray(gated.define_h(SWIGLU, *meant)[0])
    limit = 1.75 * 2 ** np.floor(np.log2(np.nanmax(np.abs(h)) / 1.95))  # a largest code's number
    bounds = np.array([*[np.nanmax(np.abs(d)) for d in exact], limit], np.float32)
    found = gated.cuda_gradient(target, SWIGLU, dh, *codes, scales, bounds)
    for i, (d, bound) in enumerate(zip(exact, bounds)):
        near(found[3 * i : 3 * i + 3], d.astype("f8"), bound.item(), fp8_reference.E4M3)
    assert np.nanmax(np.abs(h)) > 1.05 * limit
    *_, ht, scale = map(np.asarray, found)
    near([ht.T, scale], np.clip(h.astype("f8"), -limit, limit), limit, fp8_reference.E4M3)
    assert launches[0]["macros"]["VECTORS"] == (shape == (272, 144))


@pytest.mark.parametrize("shift", [0, 1])
def test_cuda_activation_of_what_is_not_finite_is_not(activated, rng, shift):
    target, _ = activated(shift)
    a, up, dh = draw(rng, (32, 32), BF16, BF16, BF16)
    a[3, 4], up[5, 6], up[7, 8], dh[9, 10] = np.nan, np.inf, -np.inf, np.inf
    maxima = np.concatenate(gated.cuda_amax(target, SWIGLU, a, up))
    assert np.isfinite(maxima).all()
    results = gated.cuda_forward(target, SWIGLU, a, up, maxima[:3])
    q, qa, qup = (np.asarray(r) for r in results[::2])
    lost = np.zeros((32, 32), bool)
    lost[[3, 5, 7], [4, 6, 8]] = True
    isnan = lambda codes: np.isnan(np.asarray(codes).astype(np.float32))
    np.testing.assert_array_equal(isnan(q), lost)
    scales, codes = np.concatenate(results[3::2]), [c.view(np.uint8) for c in (qa, qup)]
    bounds = np.array([20, 20, maxima[0]], np.float32)
    da, _, _, dup, _, _, ht, _ = gated.cuda_gradient(target, SWIGLU, dh, *codes, scales, bounds)
    np.testing.assert_array_equal(isnan(ht), lost.T)
    lost[9, 10] = True
    np.testing.assert_array_equal(isnan(da), lost)
    lost[[5, 7], [6, 8]] = False
    np.testing.assert_array_equal(isnan(dup), lost)


# ---------------------------------------------------------------- norms


@pytest.fixture
def normalised(emulated, monkeypatch):
    """`normalised(layout, shift=0)`: a runner of the kernel as layers call it, and the launches."""

    def make(layout, shift=0):
        target, launches = emulated(shift=shift)
        monkeypatch.setattr(norm, "launch", quantize.launch)
        monkeypatch.setattr(rms_norm, "launch", quantize.launch)
        monkeypatch.setattr(norm, "layout", lambda *_, **__: layout)

        def run(x, residual=None, scale=None, offset=0.0, bias=None, centred=False, **codes):
            flags = {"centred": centred, "with_mean": centred, "with_rstd": True}
            spec = Norm(axes=(1,), eps=1e-6, scale_offset=offset, **flags)
            if np.ndim(scale) == 2:  # each example has its own
                spec = dataclasses.replace(spec, axes=(2,), heads=(0,))
            shape = (len(scale), -1, x.shape[1]) if spec.heads else x.shape
            placed = lambda a: a if a is None or a.size != x.size else a.reshape(shape)
            given = placed(x), placed(residual), scale, bias
            bound = norm._bound(spec, scale, bias, x.shape[1])
            found = norm.cuda_codes(target, NormCodes(spec, Codes(**codes)), *given, bound)
            *coded, h, mean, rstd = [None if r is None else np.asarray(r) for r in found]
            h = None if h is None else h.reshape(x.shape)
            rows = [None if a is None else a.reshape(-1) for a in (mean, rstd)]
            return [*coded, h, *rows], np.asarray(bound).item()

        return run, launches

    return make


def against(parameter, rows):
    """A parameter, or those of each example, in float64 against rows."""
    wide = np.atleast_2d(np.asarray(parameter, np.float64))
    return np.repeat(wide, rows // len(wide), 0)


def exact_norm(h, scale, offset, bias=None, centred=False):
    """(y, the size of y's terms, [mean,] rstd) in float64, of rows as they are stored."""
    wide = np.asarray(h, np.float64)
    mean = np.mean(wide, 1) if centred else np.zeros(len(wide))
    apart = wide - mean[:, None]
    with np.errstate(invalid="ignore"):
        rstd = 1 / np.sqrt(np.mean(apart * apart, 1) + 1e-6)
        y = apart * rstd[:, None]
    w = 1 if scale is None else against(scale, len(wide)) + offset
    shift = 0 if bias is None else against(bias, len(wide))
    rounded = unit(mean * rstd)[:, None]  # the mean's rounding, in units of y
    terms = np.abs(y * w) + np.abs(shift) + rounded * np.abs(w) / 1e-5
    return y * w + shift, terms, *[mean] * centred, rstd


def unit(values):
    """How far float32 numbers may be from the exact ones."""
    return np.abs(values) * 2.0**-24


CLUSTER = CastLayout(32, 2, 2)  # blocks of 32 rows and 256 columns
WARPS = CastLayout(64, 1, 4, group=1)  # blocks of 16 rows and 512 columns, by two warps
NARROW = CastLayout(16, 8, 2, group=1)


@pytest.mark.parametrize(
    ("shape", "layout", "given", "options"),
    [
        ((48, 784), CLUSTER, BF16, {}),  # a row in four blocks; the last rows are not all there
        ((33, 411), CLUSTER, BF16, {"offset": 1.0}),  # one element at a time
        ((32, 528), WARPS, BF16, {"residual": BF16}),  # two blocks, the second almost empty
        ((21, 77), NARROW, "float16", {"residual": "float16", "scale": "bfloat16"}),
        ((16, 128), NARROW, BF16, {"scale": None}),
        ((48, 272), CLUSTER, "float32", {"residual": BF16}),  # two slots of shared memory a row
        ((48, 272), CLUSTER, BF16, {"residual": "float32"}),
        ((48, 192), None, BF16, {"residual": "float32"}),  # sums of rows before, and then codes
        ((7, 50), None, BF16, {"scale": None}),
        # LayerNorms; biases; scales of each example.
        ((48, 784), CLUSTER, BF16, {"centred": True, "bias": "float32"}),
        ((33, 411), CLUSTER, "float32", {"centred": True, "bias": "bfloat16", "offset": 1.0}),
        ((48, 272), CLUSTER, BF16, {"centred": True, "residual": "float32", "bias": "float32"}),
        ((48, 192), None, "float32", {"centred": True, "bias": "float32"}),
        ((96, 144), NARROW, BF16, {"centred": True, "bias": "float32", "examples": 2}),
        ((96, 784), CLUSTER, BF16, {"centred": True, "bias": BF16, "examples": 3, "offset": 1.0}),
        ((64, 77), WARPS, "float32", {"examples": 4, "residual": BF16}),
        ((64, 77), None, BF16, {"examples": 2, "centred": True, "bias": "float32"}),
        ((66, 80), NARROW, BF16, {"examples": 2, "bias": "float32"}),  # 33 rows of an example
    ],
    ids=str,
)
def test_cuda_norm_is_quantized_as_it_is_made(normalised, rng, shape, layout, given, options):
    run, launches = normalised(layout)
    draw = lambda *shape, dtype: rng.standard_normal(shape).astype(np.dtype(dtype))
    options = {"scale": "float32", "residual": None, "offset": 0.0, "bias": None} | options
    centred, examples = options.get("centred", False), options.get("examples", 0)
    x = draw(*shape, dtype=given) * np.exp(draw(shape[0], 1, dtype="float32")).astype(given)
    x += (centred * 100 * draw(shape[0], 1, dtype="float32")).astype(given)
    x[3] = 7 * centred
    lead = (examples,) if examples else ()
    of_columns = lambda name: options[name] and draw(*lead, shape[1], dtype=options[name])
    residual = options["residual"] and draw(*shape, dtype=options["residual"])
    scale, bias = of_columns("scale"), of_columns("bias")
    of = {"bias": bias, "centred": centred}
    found, bound = run(x, residual, scale, options["offset"], **of)
    q, qt, code_scale, h, mean, rstd = found
    stored = x
    if residual is not None:
        stored = h
        wide = x.astype(np.float32) + residual.astype(np.float32)
        assert stored.dtype == np.promote_types(x.dtype, residual.dtype)
        np.testing.assert_array_equal(stored, wide.astype(stored.dtype))
    y, terms, *exact_mean, exact_rstd = exact_norm(stored, scale, options["offset"], **of)
    near([q, qt, code_scale], y, bound, fp8_reference.E4M3, terms)
    # Squares of differences to a row's first element are larger by the square of its own difference
    # to the mean, and so is the rounding of their sum.
    first = (np.float64(stored[:, 0]) - exact_mean[0]) * exact_rstd if centred else 0
    assert np.all(np.abs(rstd - exact_rstd) <= 1e-6 * exact_rstd * (1 + np.square(first)))
    assert (mean is not None) == centred and (h is None) == (residual is None)
    for exact in exact_mean:
        np.testing.assert_allclose(mean, exact, rtol=1e-6)
    apart = not layout or shape[0] % 16 and examples
    assert len(launches) == (2 if apart else 1)
    if not apart:
        across = -(-shape[1] // (8 * layout.width))
        assert launches[0]["macros"]["CLUSTER"] == across


def test_cuda_norm_writes_the_layouts_that_are_asked_for(normalised, rng):
    x, scale = rng.standard_normal((48, 320)).astype(BF16), np.ones(320, np.float32)
    for shift in (0, 1):
        run, _ = normalised(CLUSTER, shift)
        (q, qt, *_), _ = run(x, None, scale)
        (alone, *_), _ = run(x, None, scale, has_qt=False)
        (_, turned, *_), _ = run(x, None, scale, has_q=False)
        assert alone.tobytes() == q.tobytes() and turned.tobytes() == qt.tobytes()


@pytest.mark.parametrize("layout", [CLUSTER, None], ids=["one pass", "two"])
@pytest.mark.parametrize("centred", [False, True])
def test_cuda_norm_of_what_is_not_finite_is_not(normalised, rng, layout, centred):
    """In its own row alone; a bound that is not finite leaves nothing finite."""
    run, _ = normalised(layout)
    x, scale = rng.standard_normal((32, 272)).astype(BF16), np.ones(272, np.float32)
    clean, _ = run(x, None, scale, centred=centred)
    x[3, 4], x[5, 260], x[7, 8] = np.nan, np.inf, -np.inf
    (q, qt, *_), _ = run(x, None, scale, centred=centred)
    lost = np.isnan(q.astype(np.float32))
    assert not centred or lost[[5, 7]].all()  # their mean is not finite
    assert lost[3].all() and lost[5, 260] and lost[7, 8]
    np.testing.assert_array_equal(lost, np.isnan(qt.astype(np.float32)).T)
    others = np.setdiff1d(np.arange(32), (3, 5, 7))
    assert q[others].tobytes() == clean[0][others].tobytes()
    for huge in (np.float32(3e38), np.float32(np.inf), np.float32(np.nan)):
        scale[9] = huge  # sqrt(272) times it is beyond float32
        (q, _, code_scale, *_), _ = run(x, None, scale)
        assert np.isnan(code_scale).all() and np.isnan(q.astype(np.float32)).all()


# ---------------------------------------------------------------- compiling


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_cuda_quantizers_compile(monkeypatch, arch):
    """Each as layers call it: without a warning, and on Hopper without spilling registers."""
    logs = {}
    # Code is read for Hopper alone.
    options = ["--ptxas-options=-v" if arch == "sm_90" else "--Ofast-compile=max"]

    def launch(source, kernel, operands, results, *, target, macros, shared=0, **_):
        assert shared <= target.shared_memory
        file = source if isinstance(source, Source) else compiler.kernel_source(source)
        if (key := (file.name, *macros.items())) not in logs:
            logs[key] = compiler.compile_image(file, macros, target.arch, *options)[1]
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(quantize, "launch", launch)
    monkeypatch.setattr(gated, "launch", launch)
    dtypes = ("bfloat16", "float32", "float16") if arch == "sm_90" else ("bfloat16",)
    target, floats = named_target(arch), jnp.zeros
    for x in [jnp.zeros((64, 64), of) for of in dtypes]:
        for has_q, has_qt in ((True, False), (False, True), (True, True)):
            quantize.cuda_quantize(target, Codes(has_q=has_q, has_qt=has_qt), x)
    a, q = jnp.zeros((64, 64), BF16), jnp.zeros((64, 64), "uint8")
    gated.cuda_amax(target, SWIGLU, a, a)
    gated.cuda_forward(target, SWIGLU, a, a, floats(4))
    gated.cuda_gradient(target, SWIGLU, a, q, q, floats(2), floats(3))
    assert len(logs) >= 7
    for kernel, log in logs.items():
        assert "warning" not in log, (kernel, log)
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
        assert spilled <= (8 if "gated" in kernel[0] else 0), (kernel, log)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_cuda_norm_quantizer_compiles(monkeypatch, arch):
    """One that holds rows, by a cluster where there are any; on Hopper also with a residual."""
    logs = {}

    def launch(source, kernel, operands, results, *, target, macros, shared=0, cluster=1, **_):
        assert shared <= target.shared_memory and cluster == (8 if target.clusters else 1)
        file = compiler.kernel_source(source)
        log = compiler.compile_image(file, macros, target.arch, "--ptxas-options=-v")[1]
        logs[macros["HAS_RESIDUAL"], macros["CENTRED"], macros["PER_EXAMPLE"]] = log
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(norm, "launch", launch)
    bound, own = jnp.ones(1), {"axes": (2,), "heads": (0,)}
    for centred, examples in ((False, False), (True, False), (True, True)):
        x = jnp.zeros((4, 16, 4096) if examples else (64, 4096), BF16)
        scale = jnp.zeros((4, 4096) if examples else 4096)
        bias = scale if centred else None
        for residual in (None, x) if arch == "sm_90" and not examples else (None,):
            flags = {"centred": centred, "with_mean": centred, "with_rstd": True}
            spec = NormCodes(Norm(eps=1e-6, **flags, **(own if examples else {})))
            norm.cuda_codes(named_target(arch), spec, x, residual, scale, bias, bound)
    assert len(logs) == (5 if arch == "sm_90" else 3)
    for (residual, *_), log in logs.items():
        assert "warning" not in log, log
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
        assert spilled <= (256 if residual else 0), log  # most of it where nothing is aligned


@pytest.mark.parametrize(
    ("arch", "itemsize", "most"),
    [("sm_80", 2, 4096), ("sm_80", 4, 2560), ("sm_90", 2, 32768), ("sm_90", 4, 28672)]
    + [("sm_120", 2, 24576), ("sm_120", 4, 12288)],
)
@pytest.mark.parametrize(("has_residual", "registers"), [(False, 96), (True, 128)])
def test_cuda_norms_of_every_length_have_a_layout_or_two_launches(
    arch, itemsize, most, has_residual, registers
):
    """Whole clusters, of a power of two blocks, that hold the row and no more than that."""
    target = named_target(arch)
    for n in range(1, most + 2000, 13):
        layout = norm.layout(n, itemsize, target, has_residual=has_residual)
        if n > most or (arch == "sm_120" and layout is None):  # a width that is no power of two
            assert layout is None
            continue
        blocks, threads = -(-n // (8 * layout.width)), layout.width * layout.height
        assert blocks in ((1, 2, 4, 8) if target.clusters else (1,))
        assert layout.width % 32 == 0 or layout.width in (8, 16)
        assert 64 <= threads <= 512
        assert threads * layout.min_blocks * (72 if layout.min_blocks == 2 else registers) <= 65536
        assert layout.min_blocks * (layout.held(itemsize) + 1024) <= target.shared_memory + 1024
    assert norm.layout(most, itemsize, target, has_residual=has_residual)


def test_cuda_hopper_rounds_by_its_own_instruction():
    """And other GPUs by integers, which is what the emulator runs."""
    macros = {"X_TYPE": "float", "E5M2": 0, "HAS_Q": 1, "HAS_QT": 1, "VECTORS": 1}
    macros |= {"BLOCK_X": 8, "BLOCK_Y": 8, "BATCH": 4, "MIN_BLOCKS": 1}
    source = compiler.kernel_source("quantize_cast.cu")
    for arch, has in (("compute_90", True), ("compute_80", False)):
        text = compiler.compile_image(source, macros, arch)[0].data
        assert (b"cvt.rn.satfinite.e4m3x2.f32" in text) == has
