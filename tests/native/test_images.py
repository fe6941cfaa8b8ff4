"""Compiled images: checked against their digest and their arrays before they are loaded."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import normfuse
from normfuse.layers.elementwise import op as elementwise_op
from normfuse.native import host_compiler

X, ROW = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)


@pytest.fixture(scope="module")
def given():
    """(operands, result types, attributes) of a call, as the operation makes it."""
    found = {}

    def keep(target, operands, results, **attributes):
        found.update(operands=[X, ROW], results=results, attributes=attributes)
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    fn = normfuse.elementwise("template <class T> T scaled(T x, T y) { return 2 * x * y; }")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise_op, "call_host", keep)
        jax.jit(fn).trace(X, ROW).lower()
    return found["operands"], found["results"], found["attributes"]


def call(operands, results, attributes, target="normfuse_elementwise"):
    return [np.asarray(a) for a in jax.ffi.ffi_call(target, list(results))(*operands, **attributes)]


def refused(match, operands, results, attributes):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"normfuse_elementwise .*{match}"):
        call(operands, results, attributes)


def test_the_call_that_the_operation_makes_works(given):
    operands, results, attributes = given
    np.testing.assert_array_equal(call(operands, results, attributes)[0], 2 * X)


@pytest.mark.parametrize("at", [0, 60, 2000, -1])
def test_an_image_with_one_flipped_bit_is_not_loaded(given, at):
    operands, results, attributes = given
    image = attributes["image"].copy()
    image[at] ^= 4
    # A digest that no test has loaded: nothing is read of an image whose digest is known.
    refused("SHA-256", operands, results, {**attributes, "image": image, "digest": f"{at:064}"})
    image = np.concatenate([attributes["image"], np.zeros(1 + at % 7, np.uint8)])
    refused("SHA-256", operands, results, {**attributes, "image": image, "digest": f"1{at:063}"})


def compiled(text: str) -> dict:
    image = host_compiler.library("foreign", text, host_compiler.PORTABLE)
    return {"image": np.frombuffer(image.data, np.uint8), "digest": image.digest}


def test_the_constructor_of_a_foreign_image_does_not_run(given, tmp_path):
    operands, results, attributes = given
    mark = tmp_path / "ran"
    text = f"""
#include <stdio.h>
__attribute__((constructor)) static void run() {{ fclose(fopen("{mark}", "w")); }}
extern "C" void normfuse_elementwise(void* const*, const long*, long, long) {{}}
"""
    foreign = {**attributes, "image": compiled(text)["image"], "digest": "2" * 64}
    refused("SHA-256", operands, results, foreign)
    assert not mark.exists()


@pytest.mark.parametrize(
    "text, match",
    [
        ("int f() { return 1; }", "cannot be loaded"),
        (
            'extern "C" void normfuse_elementwise(void* const*, const long*, long, long) {}',
            "cannot be loaded",
        ),
        (
            'extern "C" const char normfuse_layout[] = "float32 -> float32; 3; 2";\n'
            'extern "C" void normfuse_elementwise(void* const*, const long*, long, long) {}',
            "compiled for other arrays: float32 -> float32",
        ),
    ],
)
def test_an_image_of_another_function_is_not_run(given, text, match):
    operands, results, attributes = given
    refused(match, operands, results, {**attributes, **compiled(text)})


F32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
F2 = "float32 float32 -> float32"


@pytest.mark.parametrize(
    "operands, results, changed, match",
    [
        ([X], None, {}, "takes 2 operands and 1 results; got 1 and 1"),
        (None, [F32(2, 3), F32(2, 3)], {}, "got 2 and 2"),
        ([X, ROW[:2]], None, {}, "operand 1 must be 3 of float32; got 2 of float32"),
        (None, [F32(20, 30)], {}, "result 0 must be 6 of float32; got 600"),
        ([X.astype(np.int32), ROW], None, {}, "operand 0 must be 6 of float32; got 6 of int32"),
        (None, [jax.ShapeDtypeStruct((2, 3), jnp.float16)], {}, "result 0 .* got 6 of float16"),
        (None, None, {"sizes": [2]}, "has 2 dimensions; got 1 sizes"),
        (None, None, {"sizes": [1 << 40, 1 << 40]}, "impossible sizes"),
        (None, None, {"sizes": [-2, -3]}, "impossible sizes"),
        (None, None, {"sizes": [2, 4]}, "operand 0 must be 8"),
        (None, None, {"layout": f"{F2}; 3 3; 2"}, "compiled for other arrays: .*; 3 1; 2"),
        (None, None, {"layout": "bfloat16 float32 -> float32; 3 1; 2"}, "other arrays"),
    ],
)
def test_arrays_that_are_not_those_of_the_image_are_refused(
    given, operands, results, changed, match
):
    own_operands, own_results, attributes = given
    call(*given)  # a loaded image is checked against its own layout, in any order of the tests
    changed = {k: np.array(v, np.int64) if type(v) is list else v for k, v in changed.items()}
    operands = own_operands if operands is None else operands
    results = own_results if results is None else results
    refused(match, operands, results, {**attributes, **changed})


@pytest.mark.parametrize(
    "layout",
    ["", "float32;3;2", f"{F2}; 3 1 0; 2", f"{F2}; 3 -1; 2", f"{F2}; 3 4; 2", f"{F2}; 3 1; 63"]
    + [f"{F2}; 3 1; 2x", "float32 float31 -> float32; 3 1; 2", "-> float32 ->; ; 2"]
    + [f"{F2}; 3 1; {2**70}", f"{F2} -> float32; 3 1; 2"],
)
def test_a_layout_that_cannot_be_read_is_refused(given, layout):
    """The image is not loaded: a loaded one has its own."""
    operands, results, attributes = given
    changed = {"layout": layout, "digest": "3" * 64}
    refused("cannot be read", operands, results, {**attributes, **changed})


def test_codes_of_another_shape_are_refused():
    x, maxima = np.ones((4, 6), np.float32), np.ones(1, np.float32)
    scale, codes = F32(1), lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
    flags = {"has_q": True, "has_qt": True}
    target = "normfuse_quantize_cast"
    assert len(call([x, maxima], [codes(4, 6), codes(6, 4), scale], flags, target)) == 3
    for wrong, match in [
        ([codes(6, 4), codes(6, 4)], "q must have x's shape"),
        ([codes(4, 6), codes(4, 6)], "qt must be x's transpose"),
        ([codes(24), codes(6, 4)], "q must have x's shape"),
    ]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            call([x, maxima], [*wrong, scale], flags, target)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no maxima"):
        call([x, maxima[:0]], [codes(4, 6), codes(6, 4), scale], flags, target)


# ---------------------------------------------------------------- exported programs


@pytest.fixture(scope="module")
def exported() -> bytes:
    fn = normfuse.elementwise("template <class T> T exported(T x, T y) { return 3 * x * y; }")
    norm = lambda x, y: normfuse.rms_norm(fn(x, y), implementation="native")
    checks = [
        export.DisabledSafetyCheck.custom_call(f"normfuse_{name}")
        for name in ("elementwise", "norm_forward")
    ]
    return export.export(jax.jit(norm), disabled_checks=checks)(X, ROW).serialize()


RUN = """
import pathlib, sys
{imports}
run = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes())).call
x = jax.numpy.arange(6, dtype="float32").reshape(2, 3)
print(run(x, jax.numpy.ones(3)).tolist())
"""
IMPORTS = ["import jax\nimport normfuse", "import normfuse\nimport jax"]


@pytest.mark.parametrize("imports", IMPORTS, ids=["after", "before"])
def test_importing_normfuse_is_enough_to_run_an_export(exported, imports, tmp_path):
    path = tmp_path / "exported"
    path.write_bytes(exported)
    imports += "\nimport jax.export"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN.format(imports=imports), path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = 3 * X / np.sqrt(np.mean(np.square(3 * X), -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(eval(done.stdout), expected, rtol=1e-6)


def test_a_damaged_export_is_refused(exported):
    start = exported.index(b"\x7fELF")
    damaged = bytearray(exported)
    damaged[start + 3000] ^= 1
    run = export.deserialize(damaged).call
    with pytest.raises(jax.errors.JaxRuntimeError, match="damaged: its SHA-256"):
        np.asarray(run(X, ROW))
