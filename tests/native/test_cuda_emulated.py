"""The CUDA kernels, run on the CPU by an emulator that makes races and missing waits visible."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from cuda_cases import Case, check_backward, check_forward, check_halves
from cuda_emulator import Emulator

from normfuse.native import cuda_rms_norm
from normfuse.native.device import Target

pytest.importorskip("cuda.bindings", reason="the kernels' headers come with cuda-bindings")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

# One multiprocessor: persistent grids go round several times, also with few rows.
SM90 = Target("sm_90", multiprocessors=1)
SM80 = Target("sm_80", multiprocessors=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture
def emulated(folder, monkeypatch):
    """`emulated(target, shift=0)`: a runner of the kernels, and the launches it has made."""

    def make(target, shift=0):
        emulator = Emulator(folder, shift)
        monkeypatch.setattr(cuda_rms_norm, "launch", emulator.launch)

        def run(kernel, operands, params):
            operands = [jax.numpy.asarray(a) for a in operands]
            return [
                np.asarray(r) for r in getattr(cuda_rms_norm, kernel)(target, *operands, **params)
            ]

        return run, emulator.launches

    with jax.enable_x64(True):
        yield make


@pytest.mark.parametrize(
    "case",
    [
        Case((37, 24, 1)),  # several rows to a warp, the last block not full
        Case((20, 1000, 1), residual=True),  # several rows to a block, the last vectors missing
        Case((9, 2056, 1), "float16", "bfloat16", "float32", offset=1.0),  # a row to a block
        Case((9, 257, 1), "float32", "float64", "float16"),  # an odd length: one element at a time
    ],
    ids=str,
)
def test_cuda_rows_match_reference(emulated, case):
    run, _ = emulated(SM90)
    check_forward(run, case)
    check_backward(run, case)


@pytest.mark.parametrize("residual", [False, True])
def test_cuda_few_rows_are_read_at_once(emulated, residual):
    run, launches = emulated(dataclasses.replace(SM90, multiprocessors=3))
    case = Case((3, 520, 1), residual=residual)
    check_forward(run, case)
    check_backward(run, case)
    (backward,) = [one for one in launches if one["kernel"] == "rms_norm_backward"]
    assert backward["grid"][0] == 3 and backward["macros"]["STAGES"] == 1


@pytest.mark.parametrize("case", [Case((100, 264, 1)), Case((3, 9, 5), scale=None)], ids=str)
def test_cuda_halves_match_reference(emulated, case):
    run, _ = emulated(SM90)
    check_halves(run, case)


def test_cuda_unaligned_arrays_match_reference(emulated):
    run, _ = emulated(SM90, shift=1)
    case = Case((3, 136, 1), residual=True)
    check_forward(run, case)
    check_backward(run, case)


def test_cuda_strided_rows_match_reference(emulated):
    run, _ = emulated(SM90)
    case = Case((9, 20, 40), "bfloat16", "float32", "float32", residual=True, offset=0.5)
    check_forward(run, case)
    check_backward(run, case)


@pytest.mark.parametrize("n", [12296, 28168])  # reads a row twice, or holds it
def test_cuda_cluster_adds_its_slices(emulated, n):
    run, launches = emulated(SM90)
    check_backward(run, Case((5, n, 1)))
    assert launches[0]["macros"]["CLUSTER"] == launches[0]["grid"][1] == 2
    assert launches[0]["macros"]["HOLD"] == (n > 20000)


def test_cuda_long_rows_take_two_launches(emulated):
    run, launches = emulated(SM80)
    case = Case((2, 16392, 1), "float32", "float32", "float32")
    check_backward(run, case)
    assert [launch["kernel"] for launch in launches] == [
        "rms_norm_row_dots",
        "rms_norm_backward_apply",  # by one block, whose dscale is the whole
    ]
    assert launches[0]["grid"][1] > 1


def test_cuda_no_rows_launch_nothing(emulated):
    run, launches = emulated(SM90)
    for case in (Case((0, 24, 1)), Case((0, 24, 3))):
        check_forward(run, case)
        check_backward(run, case)
        check_halves(run, case)
    assert not launches
