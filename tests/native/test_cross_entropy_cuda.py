"""The softmax of linear_cross_entropy on CUDA: run by the emulator, and compiled for real."""

import dataclasses
import functools
import re

import cross_entropy_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_emulator import Emulator
from reference import assert_close, wide

from normfuse.layers.cross_entropy import softmax
from normfuse.layers.cross_entropy.softmax import Layout, Softmax
from normfuse.layers.quantization.quantize import E5M2, CastLayout, Codes
from normfuse.native import compiler
from normfuse.native.launch import named_target

pytest.importorskip("cuda.bindings", reason="the kernels' headers come with cuda-bindings")

SM90 = named_target("sm_90")
LAYOUTS = {  # words, and threads on a row of them
    "in one block's registers": (1000, Layout(8, 64, batch=2)),
    "in a cluster's registers": (1000, Layout(8, 32, batch=1, slices=4)),
    "read twice": (1000, Layout(8, 32, batch=2)),
    "one at a time": (999, Layout(1, 64, batch=4)),
    "few words": (7, Layout(1, 32, batch=16)),
}


@pytest.fixture
def emulated(emulator_folder, monkeypatch):
    def make(layout, shift=0):
        emulator = Emulator(emulator_folder, shift)
        monkeypatch.setattr(softmax, "launch", emulator.launch)
        monkeypatch.setattr(softmax, "layout", lambda *_, **__: layout)
        return emulator

    with jax.enable_x64(True):
        yield make


@pytest.mark.parametrize(
    "layout, z_dtype, dtype, softcap, shift, smoothing",
    [
        ("in one block's registers", "bfloat16", "bfloat16", None, 0, 0),
        ("in one block's registers", "float64", "float64", 3.0, 0, 0),
        ("in a cluster's registers", "float16", "float16", 3.0, 0, 0.1),
        ("in a cluster's registers", "float32", "bfloat16", None, 1, 0),  # not in place, unaligned
        ("read twice", "bfloat16", "bfloat16", 3.0, 0, 0),
        ("read twice", "float32", "float32", None, 0, 0.25),
        ("one at a time", "bfloat16", "bfloat16", None, 1, 0),
        ("few words", "float32", "bfloat16", 3.0, 0, 1.0),
    ],
)
def test_softmax_matches_float64(emulated, rng, layout, z_dtype, dtype, softcap, shift, smoothing):
    vocabulary, layout = LAYOUTS[layout]
    emulator = emulated(layout, shift)
    z = jnp.asarray(4 * rng.standard_normal((5, vocabulary)), z_dtype)
    labels = np.array([0, vocabulary - 1, 3, -1, vocabulary], np.int32)  # the last are elsewhere
    compute = "float64" if z_dtype == "float64" else "float32"
    weights = np.array([1, 0.25, 0, 2, 1], compute)
    share = smoothing / vocabulary
    spec = Softmax(softcap, dtype=dtype, smoothing=smoothing, share=share)
    exact = reference.Softmax(wide(z), labels, softcap, smoothing)

    binary = z.dtype.itemsize == 2  # powers of two
    found = softmax.cuda_statistics(SM90, spec, z, labels)
    for result, expected in zip(found, reference.statistics(exact, binary), strict=True):
        assert result.dtype == compute
        assert_close(result, expected, compute)

    g, *again = softmax.cuda_both(SM90, spec, z, labels, weights)
    assert [a.tobytes() for a in again] == [f.tobytes() for f in found]
    gradient = functools.partial(reference.gradient, exact, n=vocabulary, binary=binary)
    assert g.dtype == dtype
    assert_close(g, gradient(weights, weights), compute)
    assert not g[2].any()  # its weight is 0

    a, b = (rng.standard_normal(5).astype(compute) for _ in range(2))
    most, total, _ = found
    (g,) = softmax.cuda_gradient(SM90, spec, z, labels, most, a / total, b)
    assert_close(g, gradient(a, b), compute)
    in_place = {0: 0} if z_dtype == dtype else {}
    assert [launch["aliases"] for launch in emulator.launches] == [{}, in_place, in_place]


@pytest.mark.parametrize("offset", [30, -1e6])
@pytest.mark.parametrize("layout", ["in a cluster's registers", "read twice"])
def test_an_offset_of_all_logits_changes_nothing(emulated, rng, layout, offset):
    """Softmax and loss are those of the differences, which are exact in float32 here."""
    vocabulary, layout = LAYOUTS[layout]
    emulated(layout)
    z = np.round(8 * rng.standard_normal((3, vocabulary))) / 8
    labels, weights = np.array([5, 0, vocabulary - 1], np.int32), np.ones(3, np.float32)
    spec = Softmax(dtype="float32")
    run = lambda z: softmax.cuda_both(SM90, spec, np.asarray(z, np.float32), labels, weights)
    (g, most, total, picked), plain = run(z + offset), run(z)
    np.testing.assert_array_equal(g, plain[0])
    np.testing.assert_array_equal(total, plain[2])
    np.testing.assert_array_equal(most - picked, plain[1] - plain[3])


def test_logits_that_are_not_finite(emulated):
    """Plain JAX does so: an infinite maximum and NaN give NaN, -inf is a word without a share."""
    emulated(Layout(8, 32, batch=1, slices=2))
    z = np.zeros((4, 512), np.float32)
    z[0, 5], z[1, 300], z[2, :200] = np.inf, np.nan, -np.inf
    labels, weights = np.full(4, 400, np.int32), np.ones(4, np.float32)
    spec = Softmax(dtype="float32")
    g, most, total, picked = softmax.cuda_both(SM90, spec, z, labels, weights)
    lse = most + np.log(total)
    assert np.isnan(lse[:2]).all() and np.isnan(g[:2]).any(axis=1).all()
    np.testing.assert_allclose(lse[2:], np.log([312, 512]), rtol=1e-6)
    assert not g[2, :200].any() and np.isfinite(g[2:]).all() and not picked[2:].any()
    # 0 times NaN is NaN, but in rows that are ignored.
    g, *_ = softmax.cuda_both(SM90, spec, z, labels, 0 * weights)
    assert np.isnan(g[:2]).any(axis=1).all() and not g[2:].any()
    ignored = np.full(4, softmax.IGNORED, np.int32)
    g, *_ = softmax.cuda_both(SM90, spec, z, ignored, 0 * weights)
    assert not g.any()


@pytest.mark.parametrize(
    "shape, z_dtype, softcap, has_q, has_qt, shift",
    [
        ((272, 208), "bfloat16", None, True, True, 0),  # the last tiles are not full
        ((128, 64), "float32", 3.0, True, True, 0),
        ((37, 77), "float16", 3.0, True, True, 0),  # one element at a time
        ((48, 96), "bfloat16", None, True, False, 1),
        ((48, 96), "bfloat16", 3.0, False, True, 0),
    ],
)
def test_codes_are_those_of_the_gradient(
    emulated, monkeypatch, rng, shape, z_dtype, softcap, has_q, has_qt, shift
):
    """In both layouts: the gradient in float64 to a step of its code, and to rounding. The codes
    are the definition's, but where numbers of 10 bits differ by rounding and 8 more bits by chance.
    """
    emulator = emulated(LAYOUTS["read twice"][1], shift)
    monkeypatch.setattr(softmax, "cast_layout", lambda *_: CastLayout(8, 8, 4, group=2))
    z = jnp.asarray(4 * rng.standard_normal(shape), z_dtype)
    labels = rng.integers(-1, shape[1] + 1, shape[0]).astype(np.int32)
    weights = rng.uniform(-1, 2, shape[0]).astype(np.float32)
    weights[3:5], weights[7] = 0, 1e-3
    smoothing = 0.25 if softcap and has_q else 0.0
    target = {"smoothing": smoothing, "share": smoothing / shape[1]}
    spec = Softmax(softcap, codes=Codes("float8_e5m2", has_q, has_qt), **target)
    exact = reference.Softmax(wide(z), labels, softcap, smoothing)
    most, total = (s.astype(np.float32) for s in (exact.most, exact.sum))
    a, b = weights / total, weights[::-1].copy()
    a[11] = np.nan
    *codes, scale = map(np.asarray, softmax.cuda_codes(SM90, spec, z, labels, most, a, b))
    assert scale == np.float32(2.0**-14) * np.delete(np.abs([a, b]), 11, 1).max()
    if has_q and has_qt:
        np.testing.assert_array_equal(codes[0].view(np.uint8), codes[1].T.view(np.uint8))
    q = codes[0] if has_q else codes[0].T
    assert q.shape == shape and np.isnan(q[11].astype(float)).all()
    expected = reference.gradient(exact, weights, b, shape[1], binary=z.dtype.itemsize == 2)
    expected = dataclasses.replace(expected, value=expected.value / scale)
    found, off = q.astype(np.float64), expected.size / scale
    # Steps of the codes, and of float16 numbers before.
    off = 2.0**-20 * off + 1.001 * np.maximum(np.abs(expected.value) * 2.0**-2, 2.0**-16)
    rows = np.arange(shape[0]) != 11
    assert (np.abs(found - expected.value)[rows] <= off[rows]).all()
    assert emulator.launches[-1]["kernel"] == "quantize_softmax"
    *defined, _ = softmax.define_codes(spec, *map(jnp.asarray, (z, labels, most, a, b)))
    for code, wanted in zip(codes, defined, strict=True):
        assert (code.view(np.uint8) != np.asarray(wanted).view(np.uint8)).mean() < 1e-3


def test_codes_of_rows_without_a_gradient_are_zero_and_the_labels_exact(emulated):
    """Whatever their logits are; and a label's share that is nothing yet has the code of -1."""
    emulated(LAYOUTS["read twice"][1])
    z = np.zeros((16, 1024), np.float32)
    z[0, 5], z[1, 300] = np.inf, np.nan
    weights = np.full(16, np.float32(1 / 49))
    weights[:2] = 0
    labels, zero = np.full(16, 9, np.int32), np.zeros(16, np.float32)
    spec = Softmax(codes=Codes("float8_e5m2"))
    q, _, scale = softmax.cuda_codes(SM90, spec, z, labels, zero, weights / 1e9, weights)
    q = np.asarray(q, np.float64)
    assert not q[:2].any() and (q[2:, 9] == -(2.0**14)).all()
    assert float(scale[0]) * 2.0**14 == weights[5]
    # 2^14 · 1e-9 is 1.074 of the format's least number: mostly one of them, or two.
    assert set(q[2:, :9].flat) <= {2.0**-16, 2.0**-15} and q[2:, :9].mean() < 1.2 * 2.0**-16


@pytest.mark.parametrize(
    "arch, vocabulary, dtype",
    [("sm_90", 128256, "bfloat16"), ("sm_80", 50257, "float16"), ("sm_120", 256, "float32")],
)
def test_kernels_compile_without_spilling(monkeypatch, arch, vocabulary, dtype):
    """Into registers, but for a few bytes; a row is one block's, or one cluster's where it can."""
    logs, target = [], named_target(arch)

    def launch(source, kernel, operands, results, *, target, macros, shared, grid, **sizes):
        assert shared <= target.shared_memory
        if kernel == "quantize_softmax":
            return compiled(source, macros, results)
        tile = macros["CHUNKS"] * macros["VECTOR"] * macros["ROW_THREADS"]
        assert (macros["SLICES"] - 1) * tile < vocabulary <= macros["SLICES"] * tile
        return compiled(source, macros, results)

    def compiled(source, macros, results):
        file = compiler.kernel_source(source)
        logs.append(compiler.compile_image(file, macros, target.arch, "--ptxas-options=-v")[1])
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(softmax, "launch", launch)
    own, struct = Softmax(dtype=dtype, as_with_gradient=True), jax.ShapeDtypeStruct
    z, labels = struct((4, vocabulary), dtype), struct((4,), "int32")
    row, spec = struct((4,), "float32"), dataclasses.replace(own, as_with_gradient=False)
    smoothed = dataclasses.replace(spec, smoothing=0.1, share=0.1 / vocabulary)
    examples = [(softmax.statistics, spec, [z, labels])]
    examples.append((softmax.gradient, spec, [z, labels, row, row, row]))
    examples += [(softmax.both, each, [z, labels, row]) for each in (spec, smoothed)]
    coded = dataclasses.replace(own, codes=Codes(E5M2.dtype))
    for rows in 48, 2048:
        given = [struct((rows, vocabulary), dtype), struct((rows,), "int32")]
        examples.append((softmax.statistics, own, given))
        examples.append((softmax.codes, coded, [*given, *[struct((rows,), "float32")] * 3]))
    for kernel, spec, structs in examples:
        jax.eval_shape(functools.partial(kernel.bodies["cuda"], target, spec), *structs)
    assert len(logs) == 8
    spilled = [int(n) for log in logs for n in re.findall(r"(\d+) bytes spill stores", log)]
    # The most is of the gradient alone on sm_90, which has 48 registers a thread: 104 bytes, and
    # twice as many by NVRTC 13.0.
    _, *version = compiler._nvrtc().nvrtcVersion()
    assert len(spilled) == 8 and max(spilled) <= (200 if version == [13, 0] else 104), logs
