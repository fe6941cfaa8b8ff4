"""The epilogue of a dense layer's product on CUDA: run by the emulator, and compiled for real."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_emulator import Emulator
from reference import Expected, assert_close, wide

from normfuse.layers.core.activations import SCALARS, scalar_of
from normfuse.layers.dense import epilogue
from normfuse.layers.dense.epilogue import Epilogue
from normfuse.native import compiler
from normfuse.native.compiler import Source
from normfuse.native.launch import named_target

pytest.importorskip("cuda.bindings", reason="the kernels' headers come with cuda-bindings")

# Two multiprocessors: with a bias, a block goes through several rows and several blocks are added.
SM90 = dataclasses.replace(named_target("sm_90"), multiprocessors=2)
EACH = {scalar.name: scalar for scalar in SCALARS.values()}  # swish is silu

REFERENCE = {  # value, derivative
    "silu": (lambda z: z / (1 + np.exp(-z)), None),
    "gelu_tanh": (
        lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
        None,
    ),
    "squared_relu": (lambda z: np.maximum(z, 0) ** 2, lambda z: 2 * np.maximum(z, 0)),
}


def derivative(name, z):
    value, exact = REFERENCE[name]
    if exact:
        return exact(z)
    return value(z + 1e-30j).imag / 1e-30  # a complex step


@pytest.fixture
def emulated(emulator_folder, monkeypatch):
    def make(shift=0):
        emulator = Emulator(emulator_folder, shift)
        monkeypatch.setattr(epilogue, "launch", emulator.launch)
        return emulator

    with jax.enable_x64(True):
        yield make


def draw(rng, shape, dtype):
    return jnp.asarray(2 * rng.standard_normal(shape), dtype)


@pytest.mark.parametrize(
    "name, shape, dtype, has_up, bias, shift",
    [
        ("silu", (6, 44), "bfloat16", True, None, 0),  # a gated layer
        ("gelu_tanh", (150, 300), "bfloat16", False, "float32", 0),  # several blocks, vectors of 4
        ("squared_relu", (40, 24), "float16", True, "float64", 1),  # unaligned
        ("silu", (3, 7), "float32", False, "float16", 0),  # one element at a time
        ("gelu_tanh", (1, 999), "float64", False, None, 0),
    ],
)
def test_epilogue_matches_float64(emulated, rng, name, shape, dtype, has_up, bias, shift):
    emulator = emulated(shift)
    dy, z = draw(rng, shape, dtype), draw(rng, shape, dtype)
    up = draw(rng, shape, dtype) if has_up else None
    added = draw(rng, shape[1:], bias) if bias else None
    compute = "float64" if "float64" in (dtype, bias) else "float32"

    at = wide(z) + (wide(added) if bias else 0)
    size = np.abs(wide(z)) + (np.abs(wide(added)) if bias else 0)
    times = wide(up) if has_up else 1.0
    of_up = REFERENCE[name][0](at)
    y, of_z = of_up * times, derivative(name, at) * times
    # A rounding of z + bias moves the value by the slope, which is at most 2 |z| here, and the
    # slope by at most 2; the approximate division and the exponential are a few roundings more.
    off = 4 * size + 4

    axes = (1,) if bias else ()
    spec = Epilogue(out_dtype=z.dtype.name, axes=axes, function=scalar_of(name))
    operands = [z, up, added]
    (got,) = epilogue.forward_on_cuda(SM90, spec, *operands)
    size = np.abs(times) * (np.abs(of_up) + off)
    assert_close(got, Expected(y, size), compute)

    spec = dataclasses.replace(spec, with_dbias=bool(bias), with_value=True)
    found = epilogue.backward_on_cuda(SM90, spec, dy, *operands)
    results = dict(zip(("dz", "dup", "dbias", "value"), found, strict=True))
    assert [results[name] is not None for name in ("dup", "dbias")] == [has_up, bool(bias)]
    dz = wide(dy) * of_z
    each = np.abs(wide(dy) * times) * off
    assert_close(results["dz"], Expected(dz, each), compute)
    assert_close(results["value"], Expected(y, size), compute)
    if has_up:
        assert_close(results["dup"], Expected(wide(dy) * of_up, np.abs(wide(dy)) * off), compute)
    if bias:
        assert results["dbias"].dtype == compute
        assert_close(results["dbias"], Expected(dz.sum(0), each.sum(0), shape[0]), compute)
    if name == "gelu_tanh" and bias:
        assert emulator.launches[1]["grid"] == (3, 6, 1)  # column_sum adds six rows


ALL = """
extern "C" __global__ void all(const double* x, double* values, double* slopes, long long count) {
  for (long long i = 0; i < count; ++i) {
%s
  }
}
"""


def test_every_activation_is_its_jax_function_and_its_derivative(emulator_folder):
    """In float64; the derivative's text against differences of the value's."""
    x = np.linspace(-9, 9, 61) + 1e-3  # away from the kinks at 0
    body, text = [], '#include "scalar.cuh"\n#include "vector.cuh"\n'
    for i, scalar in enumerate(EACH.values()):
        text += scalar.code(f"f{i}")
        body.append(f"    values[{i} * count + i] = f{i}(x[i]);")
        body.append(f"    slopes[{i} * count + i] = f{i}_derivative(x[i]);")
    source = Source("all.cu", text + ALL % "\n".join(body))
    shape = jax.ShapeDtypeStruct((len(EACH), x.size), np.float64)

    def run(x):
        sizes = {"target": SM90, "grid": 1, "block": 32, "ints": (x.size,)}
        sizes["macros"] = {"APPROXIMATE": 0}
        return Emulator(emulator_folder).launch(source, "all", [x], [shape, shape], **sizes)

    values, slopes = run(x)
    h = 1e-5
    differences = (run(x + h)[0] - run(x - h)[0]) / (2 * h)
    with jax.enable_x64(True):
        for i, scalar in enumerate(EACH.values()):
            expected = np.asarray(scalar(jnp.asarray(x)))
            # JAX's 1 + tanh of large negative numbers cancels: |x| / 2 times some roundings of 1.
            np.testing.assert_allclose(values[i], expected, rtol=1e-12, atol=36 * 2**-52)
    # Differences are off by h²/6 times the third derivative, at most about 4, and by roundings
    # of values up to 81, over h.
    np.testing.assert_allclose(slopes, differences, rtol=0, atol=1e-8)


NARROW = """
extern "C" __global__ void narrow(const float* x, float* values, float* slopes, long long count) {
  for (long long i = 0; i < count; ++i) {
    values[i] = activation(x[i]);
    slopes[i] = activation_derivative(x[i]);
  }
}
"""


def test_gelu_of_16_bits_has_more_digits_than_they_hold(emulator_folder):
    """Φ(-|x|) within 5e-6 of itself, as the source says, and its float32 operations."""
    x = np.linspace(-13, 13, 5201, dtype=np.float32)
    text = '#include "scalar.cuh"\n' + SCALARS["gelu"].code() + NARROW
    sizes = {"target": SM90, "grid": 1, "block": 32, "macros": {"APPROXIMATE": 1}}

    def run(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        launch = Emulator(emulator_folder).launch
        return launch(Source("n.cu", text), "narrow", [x], [shape, shape], ints=(x.size,), **sizes)

    values, slopes = run(x)
    below = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(np.float64)])
    density = np.exp(-(x.astype(np.float64) ** 2) / 2) / math.sqrt(2 * math.pi)
    # The power of two of the density is rounded, and is 122 at most.
    off = 5e-6 + (20 + 122) * 2.0**-24
    np.testing.assert_allclose(values, x * below, rtol=off, atol=1e-37)
    np.testing.assert_array_less(
        abs(slopes - (below + x * density)), off * (below + abs(x) * density) + 1e-37
    )
    ends = np.array([np.inf, -np.inf, np.nan], np.float32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(run(ends)[0], np.asarray(SCALARS["gelu"](jnp.asarray(ends))))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_epilogue_compiles_without_spilling(monkeypatch, arch):
    logs = []

    def launch(source, kernel, operands, results, *, target, macros, shared=0, **sizes):
        file = compiler.kernel_source(source) if isinstance(source, str) else source
        log = compiler.compile_image(file, macros, target.arch, "--ptxas-options=-v")[1]
        logs.append((kernel, log))
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(epilogue, "launch", launch)
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    large, bias = struct(2048, 14336), struct(14336)
    biased = Epilogue(function=SCALARS["gelu"], out_dtype="bfloat16")
    gated = Epilogue(function=SCALARS["silu"], axes=(), out_dtype="bfloat16")
    target = named_target(arch)
    shape = lambda fn, spec, *operands: jax.eval_shape(
        functools.partial(fn, target, spec), *operands
    )
    dbias = dataclasses.replace(biased, with_dbias=True)
    shape(epilogue.backward_on_cuda, dbias, large, large, None, bias)
    if arch == "sm_90":
        shape(epilogue.forward_on_cuda, biased, large, None, bias)
    value = dataclasses.replace(gated, with_value=True)
    shape(epilogue.backward_on_cuda, value, large, large, large)
    assert len(logs) == (4 if arch == "sm_90" else 3)  # a column sum, too
    for kernel, log in logs:
        assert "warning" not in log, (kernel, log)
        spilled = re.findall(r"(\d+) bytes spill stores", log)
        assert spilled and {*spilled} == {"0"}, (kernel, log)
