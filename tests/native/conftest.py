"""Shared by the tests of the compiled handlers."""

import functools
import re
import shutil

import jax
import numpy as np
import pytest

import normfuse  # noqa: F401  registers the handlers


@pytest.fixture
def call():
    """`call(kernel, operands, results, **attributes)`: a CPU handler of the norms, through
    `jax.ffi`.

    `results` are (shape, dtype) pairs. float64 is enabled as long as the test runs.
    """

    def run(kernel, operands, results, aliases=None, **attributes):
        attributes = {"centred": False} | attributes
        if kernel == "forward":
            attributes = {"with_mean": False} | attributes
        if kernel in ("forward", "apply"):
            attributes = {"cast_before": False, "has_bias": False} | attributes
        elif kernel.startswith("backward"):
            attributes.setdefault("with_dbias", False)
        attributes = {k: np.float64(v) if type(v) is float else v for k, v in attributes.items()}
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
        target = f"normfuse_norm_{kernel}"
        fn = jax.ffi.ffi_call(target, types, input_output_aliases=aliases)
        fn = jax.jit(functools.partial(fn, **attributes), donate_argnums=tuple(aliases or ()))
        operands = [a if isinstance(a, jax.Array) else jax.numpy.array(a) for a in operands]
        return [np.asarray(a) for a in fn(*operands)]

    with jax.enable_x64(True):
        yield run


@pytest.fixture(scope="session")
def emulator_folder(tmp_path_factory):
    """The folder in which the emulator compiles its headers, once, and every kernel."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture
def spills(monkeypatch):
    """`spills(cuda)`: bytes that each kernel spills which the module launches: it is compiled."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from normfuse.native import compiler

    def watch(module):
        found = {}

        def launch(source, kernel, operands, results, *, target, macros, **sizes):
            if kernel != "column_sum":
                code = compiler.kernel_source(source)
                log = compiler.compile_image(code, macros, target.arch, "--ptxas-options=-v")[1]
                found[kernel] = sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))
                assert "Used " in log and "warning" not in log, log
            return [jax.numpy.zeros(r.shape, r.dtype) for r in results]

        monkeypatch.setattr(module, "launch", launch)
        return found

    return watch
