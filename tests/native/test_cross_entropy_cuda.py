"""The softmax of linear_cross_entropy on CUDA: run by the emulator, and compiled for real."""

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
    "layout, z_dtype, dtype, softcap, shift",
    [
        ("in one block's registers", "bfloat16", "bfloat16", None, 0),
        ("in one block's registers", "float64", "float64", 3.0, 0),
        ("in a cluster's registers", "float16", "float16", 3.0, 0),
        ("in a cluster's registers", "float32", "bfloat16", None, 1),  # not in place, unaligned
        ("read twice", "bfloat16", "bfloat16", 3.0, 0),
        ("read twice", "float32", "float32", None, 0),
        ("one at a time", "bfloat16", "bfloat16", None, 1),
        ("few words", "float32", "bfloat16", 3.0, 0),
    ],
)
def test_softmax_matches_float64(emulated, rng, layout, z_dtype, dtype, softcap, shift):
    vocabulary, layout = LAYOUTS[layout]
    emulator = emulated(layout, shift)
    z = jnp.asarray(4 * rng.standard_normal((5, vocabulary)), z_dtype)
    labels = np.array([0, vocabulary - 1, 3, -1, vocabulary], np.int32)  # the last are elsewhere
    compute = "float64" if z_dtype == "float64" else "float32"
    weights = np.array([1, 0.25, 0, 2, 1], compute)
    spec = Softmax(softcap=softcap, z_loss=0.125, dtype=dtype)
    exact = reference.Softmax(wide(z), labels, softcap)

    binary = z.dtype.itemsize == 2  # powers of two
    found = softmax.cuda_statistics(SM90, spec, z, labels)
    for result, expected in zip(found, reference.statistics(exact, binary), strict=True):
        assert result.dtype == compute
        assert_close(result, expected, compute)

    g, *again = softmax.cuda_both(SM90, spec, z, labels, weights)
    assert [a.tobytes() for a in again] == [f.tobytes() for f in found]
    a = weights * (1 + 0.25 * exact.lse)
    gradient = functools.partial(reference.gradient, exact, n=vocabulary, binary=binary)
    assert g.dtype == dtype
    assert_close(g, gradient(a, weights), compute)
    assert not g[2].any()  # its weight is 0

    a, b = (rng.standard_normal(5).astype(compute) for _ in range(2))
    most, total, _ = found
    (g,) = softmax.cuda_gradient(SM90, spec, z, labels, most, a / total, b)
    assert_close(g, gradient(a, b), compute)
    in_place = {0: 0} if z_dtype == dtype else {}
    assert [launch["aliases"] for launch in emulator.launches] == [{}, in_place, in_place]


@pytest.mark.parametrize("offset", [30, 1000, 10000, 1e6, -1e6])
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
    """As in plain JAX: an infinite maximum and NaN give NaN, and -inf is a word without a share."""
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
    for z_loss in 0.0, 0.5:
        spec = Softmax(dtype="float32", z_loss=z_loss)
        g, *_ = softmax.cuda_both(SM90, spec, z, labels, 0 * weights)
        assert not g.any()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize(
    "vocabulary, dtype", [(128256, "bfloat16"), (50257, "float16"), (256, "float32")]
)
def test_kernels_compile_without_spilling(monkeypatch, arch, vocabulary, dtype):
    """Into registers, but for a few bytes; a row is one block's, or one cluster's where it can."""
    logs, target = [], named_target(arch)

    def launch(source, kernel, operands, results, *, target, macros, shared, grid, **sizes):
        assert shared <= target.shared_memory
        tile = macros["CHUNKS"] * macros["VECTOR"] * macros["ROW_THREADS"]
        assert (macros["SLICES"] - 1) * tile < vocabulary <= macros["SLICES"] * tile
        file = compiler.kernel_source(source)
        logs.append(compiler.compile_with_log(file, macros, target.arch, "--ptxas-options=-v")[1])
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(softmax, "launch", launch)
    for kernel, spec, structs in [*softmax.examples(vocabulary, dtype, rows=4)][:3]:
        jax.eval_shape(functools.partial(kernel.bodies["cuda"], target, spec), *structs)
    assert len(logs) == 3
    spilled = [int(n) for log in logs for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert len(spilled) == 3 and max(spilled) <= 80, logs
