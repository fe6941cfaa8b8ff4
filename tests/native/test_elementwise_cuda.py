"""The CUDA kernels around users' functions: compiled for every architecture, and emulated."""

import functools

import elementwise_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_emulator import Emulator

from normfuse import elementwise as make
from normfuse.layers.elementwise import code
from normfuse.layers.elementwise import op as elementwise
from normfuse.layers.elementwise.op import Loop
from normfuse.native import cache, compiler
from normfuse.native.compiler import CompileError
from normfuse.native.launch import named_target

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")


def source_of(op, dtype, shape=(64,), placed=None, function=None):
    """The kernel of `op` on inputs of one dtype and scalars in what these are computed in."""
    function = function or op._function
    placed = placed or tuple((0,) if n in op.inputs else () for n in op._function.names)
    placed += ((0,),) * (len(function.operands) - len(placed))
    bound = (("T", dtype),)
    scalar = elementwise.compute_dtype("T", bound)
    operands = [
        jax.ShapeDtypeStruct(tuple(shape[d] for d in have), dtype if have else scalar)
        for have in placed
    ]
    out = tuple(code.resolve(t, dict(bound)) for t, _ in function.results)
    layout, _ = elementwise.layout_of(Loop(function, placed, bound, out), operands)
    return code.cuda_source(function, layout)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_compile_for_every_dtype(arch):
    compile_ = functools.partial(compiler.compile_image, macros={}, arch=arch)
    with jax.enable_x64(True):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            compile_(source_of(cases.gated, dtype))
        for dtype in ("int8", "uint8", "int16", "int32", "uint64"):
            compile_(source_of(cases.gcd, dtype))
    gradient = cases.gated._function.derived("gradient", (0, 1, 2))
    compile_(source_of(cases.gated, "bfloat16", function=gradient))


@pytest.mark.parametrize("name", ["cstdio", "cmath", "heads in branches", "guard", "crlf"])
def test_hostile_text_compiles(name):
    compiler.compile_image(source_of(make(cases.HOSTILE[name]), "float32"), {}, "compute_90")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_thread_moves_16_bytes_at_once(dtype):
    image, _ = compiler.compile_image(source_of(cases.gated, dtype), {}, "compute_90")
    text = image.data.decode()
    assert text.count("ld.global.nc.v4.u32") == 2 and text.count("st.global.v4.") == 1
    assert ".local" not in text  # elements held in registers


def test_an_error_names_the_line_of_the_users_text(monkeypatch, tmp_path):
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    bad = make("template <class T>\nT bad(T x) {\n  T y = x;\n  return cube_of(y);\n}")
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(CompileError, match=r"(?s)<elementwise bad>\(4\).*cube_of"):
        jax.jit(bad).trace(x).lower(lowering_platforms=("cuda",))


def test_the_cache_holds_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_memory", {})
    x = jax.ShapeDtypeStruct((16,), jnp.float32)
    lower = jax.jit(cases.gated).trace(x, x).lower
    lower(lowering_platforms=("cuda",))
    assert len(cache.sizes()) == 1
    monkeypatch.setattr(cache, "_memory", {})  # another process would find it empty
    before = cache.compilations()
    jax.clear_caches()
    lower(lowering_platforms=("cuda",))
    assert cache.compilations() == before


# ---------------------------------------------------------------- values


@pytest.fixture
def emulated(emulator_folder, monkeypatch):
    """`emulated(op, shift=0)`: what runs the op on emulated CUDA, and its launches."""

    def make(op, shift=0):
        emulator = Emulator(emulator_folder, shift)
        monkeypatch.setattr(elementwise, "launch", emulator.launch)

        def run(operands, placed, dtype, out):
            loop = Loop(getattr(op, "_function", op), placed, (("T", dtype),), out)
            results = elementwise._on_cuda(named_target("sm_90"), loop, *operands)
            return [np.asarray(r) for r in results]

        return run, emulator.launches

    return make


def numbers(rng, shape, dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)


def close(actual, expected, dtype):
    # one multiplication in float32, rounded once to dtype: half a unit in the last place each
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.float64(actual), expected, rtol=eps, atol=1e-30)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("n", [2048, 2050, 7])
def test_emulated_tail_and_unaligned_arrays(emulated, rng, n, shift):
    run, launches = emulated(cases.gated, shift)
    x, g = numbers(rng, (n,), "bfloat16"), numbers(rng, (n,), "bfloat16")
    limit = jnp.float32(0.5)
    (y,) = run([x, g, limit], ((0,), (0,), ()), "bfloat16", ("bfloat16",))
    close(y, cases.reference(x, g, 0.5), "bfloat16")
    assert launches[0]["grid"][0] == -(-n // 2048)


def test_emulated_mixed_dtypes_and_broadcast_rows(emulated, rng):
    run, _ = emulated(cases.gated)
    # More than a tile, and rows that are no multiple of the 8 elements that a thread could move.
    x, row = numbers(rng, (3, 5, 172), "bfloat16"), numbers(rng, (5, 172), "float32")
    (y,) = run([x, row, jnp.float32(1)], ((0, 1, 2), (1, 2), ()), "float32", ("float32",))
    close(y, cases.reference(x, row), "float32")


def test_emulated_broadcast_columns_and_several_launch_dimensions(emulated, rng):
    run, _ = emulated(cases.gated)
    column, g = numbers(rng, (5,), "float32"), numbers(rng, (3, 5, 1028), "float32")
    (y,) = run([column, g, jnp.float32(1)], ((1,), (0, 1, 2), ()), "float32", ("float32",))
    close(y, cases.reference(np.asarray(column)[:, None], g), "float32")


def test_an_emulated_gradient_has_several_results(emulated, rng):
    run, _ = emulated(cases.gated._function.derived("gradient", (0, 1)))
    x, g, ct = (numbers(rng, (1500,), "float32") for _ in range(3))
    placed = (0,), (0,), (), (0,)
    dx, dg = run([x, g, jnp.float32(1), ct], placed, "float32", ("float32",) * 2)
    close(dx, np.where(x < 1, np.float64(g) * np.float64(ct), 0), "float32")
    close(dg, np.minimum(np.float64(x), 1) * np.float64(ct), "float32")


def test_emulated_integers(emulated, rng):
    run, _ = emulated(cases.gcd)
    a, b = rng.integers(1, 100, (2, 4500)).astype(np.int8)
    (y,) = run([jnp.asarray(a), jnp.asarray(b)], ((0,), (0,)), "int8", ("int8",))
    np.testing.assert_array_equal(y, np.gcd(a, b))


def test_more_than_2_to_the_31_elements_take_wide_indices():
    shape = (1 << 21, 1 << 11)
    narrow, wide = (
        elementwise.layout_of(
            Loop(cases.squared._function, ((0, 1),), (("T", "int8"),), ("int8",)),
            [jax.ShapeDtypeStruct((rows, shape[1]), "int8")],
        )[0]
        for rows in (shape[0] - 3, shape[0])
    )
    assert wide.wide and not narrow.wide
    assert "using Index = long long" in code.cuda_source(cases.squared._function, wide).text
