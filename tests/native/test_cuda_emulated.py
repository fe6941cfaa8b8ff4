"""The CUDA kernels, run on the CPU by an emulator that makes races and missing waits visible."""

import dataclasses

import jax
import numpy as np
import pytest
from cuda_cases import (
    Case,
    check_backward,
    check_cast_before,
    check_forward,
    check_halves,
    check_heads,
    many_rows,
)
from cuda_emulator import Emulator
from norm_kernels import CUDA, norm_of

from normfuse.layers.norm import cuda
from normfuse.layers.norm.cuda import RowLayout
from normfuse.native.launch import Target

pytest.importorskip("cuda.bindings", reason="the kernels' headers come with cuda-bindings")

# One multiprocessor: persistent grids go round several times, also with few rows.
SM90 = Target("sm_90", multiprocessors=1)
SM80 = Target("sm_80", multiprocessors=1)


@pytest.fixture
def emulated(emulator_folder, monkeypatch):
    """`emulated(target, shift=0)`: a runner of the kernels, and the launches it has made.

    The backward is that of many rows unless `few`.
    """

    def make(target, shift=0, few=False):
        emulator = Emulator(emulator_folder, shift)
        monkeypatch.setattr(cuda, "launch", emulator.launch)
        if not few:
            many_rows(monkeypatch)

        def run(kernel, operands, params):
            operands = [jax.numpy.asarray(a) for a in operands]
            return [np.asarray(r) for r in CUDA[kernel](target, norm_of(params), *operands)]

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


@pytest.mark.parametrize(
    ("n", "rows", "chunks", "hold", "stages"),
    [
        (256, 41, 1, True, 2),
        (2048, 9, 3, True, 3),
        (5112, 4, 1, False, 3),
        (32768, 3, 5, False, 2),
    ],
)
def test_cuda_rows_on_an_h100_match_reference(emulated, n, rows, chunks, hold, stages):
    run, launches = emulated(dataclasses.replace(SM90, name="NVIDIA H100 80GB HBM3"))
    check_backward(run, Case((rows, n, 1)))
    macros = launches[0]["macros"]
    assert (macros["CHUNKS"], macros["HOLD"], macros["STAGES"]) == (chunks, hold, stages)


@pytest.mark.parametrize(
    ("n", "grid", "stages", "residual"), [(520, (3, 1, 1), 1, False), (2056, (3, 3, 1), 2, True)]
)
def test_cuda_few_rows_are_read_at_once(emulated, n, grid, stages, residual):
    run, launches = emulated(dataclasses.replace(SM90, multiprocessors=16))
    case = Case((3, n, 1), residual=residual)
    check_forward(run, case)
    check_backward(run, case)
    (forward,) = [one for one in launches if one["kernel"] == "rms_norm_forward"]
    (backward,) = [one for one in launches if one["kernel"] == "rms_norm_backward"]
    assert forward["macros"]["HOLD"] == 1
    assert backward["grid"] == grid and backward["macros"]["STAGES"] == stages


@pytest.mark.parametrize(
    "case",
    [
        Case((37, 24, 1)),  # several rows to a warp, the last block not full
        Case((20, 1000, 1), residual=True, offset=0.5),  # the last block of columns not full
        Case((67, 4104, 1), "float16", "bfloat16", "float32"),
        Case((9, 257, 1), "float32", "float64", "float16"),  # one element at a time
        Case((3, 8200, 1), scale=None),
    ],
    ids=str,
)
def test_cuda_few_rows_have_both_gradients_from_one_launch(emulated, case):
    for shift in (0, 1) if case.shape[1] == 1000 else (0,):
        run, launches = emulated(dataclasses.replace(SM90, multiprocessors=64), shift, few=True)
        check_backward(run, case)
        (launch,) = launches
        assert launch["macros"]["COLUMN_BLOCKS"] > 0


def test_cuda_few_rows_are_those_that_stay_in_the_cache():
    target = dataclasses.replace(SM90, multiprocessors=132)
    sizes = {"read_bytes": 4, "residual": False}
    assert cuda.one_launch_layout(4096, 2, target, rows=1024, **sizes) is not None
    assert cuda.one_launch_layout(4096, 2, target, rows=1025, **sizes) is None
    assert cuda.one_launch_layout(16392, 2, target, rows=1, **sizes) is None  # 2049 vectors


@pytest.mark.parametrize(
    ("layout", "residual"),
    [
        (RowLayout(72, 8, 1, 16, 8, thread_rows=2), True),  # no shared memory
        (RowLayout(520, 8, 2, 64, 2, thread_rows=4), False),
        (RowLayout(1032, 8, 1, 64, 1, slices=3, thread_rows=2, hold=True), True),
    ],
    ids=str,
)
def test_cuda_threads_have_several_rows(emulated, monkeypatch, layout, residual):
    monkeypatch.setattr(cuda, "forward_layout", lambda *_, **__: layout)
    run, launches = emulated(SM90)
    check_forward(run, Case((21, layout.features, 1), residual=residual))
    assert launches[0]["macros"]["THREAD_ROWS"] == layout.thread_rows


@pytest.mark.parametrize(
    "case",
    [
        Case((20, 1000, 1), residual=True),
        Case((9, 20, 40), "bfloat16", "float32", "float32", "float16"),
    ],
    ids=str,
)
def test_cuda_rounds_before_the_weight(emulated, case):
    run, _ = emulated(SM90)
    check_cast_before(run, case)


@pytest.mark.parametrize(
    ("case", "heads", "shift"),
    [
        (Case((29, 64, 1)), 3, 0),  # a group of threads has every third row
        (Case((5, 128, 1), residual=True, offset=0.5), 16, 0),  # more heads than rows of a block
        (Case((7, 256, 1), scale="bfloat16"), 6, 1),  # unaligned
        (Case((3, 2056, 1), "float16", "bfloat16", "float32"), 5, 0),  # a row to a block
    ],
    ids=str,
)
def test_cuda_heads_match_reference(emulated, case, heads, shift):
    run, launches = emulated(dataclasses.replace(SM90, multiprocessors=2), shift)
    check_heads(run, case, heads)
    backward = next(one for one in launches if one["kernel"] == "rms_norm_backward")
    macros = backward["macros"]
    assert macros["HEADS"] == heads and backward["grid"][0] * macros["BLOCK_ROWS"] % heads == 0


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


@pytest.mark.parametrize(
    ("n", "residual"), [(1408, True), (2048, False), (2880, True), (3200, False), (5120, True)]
)
def test_cuda_backward_of_many_rows_has_a_few_blocks(emulated, n, residual):
    """Rows of dy and x, and of dh, are on their way to each: all of their layouts."""
    run, launches = emulated(dataclasses.replace(SM90, multiprocessors=2))
    check_backward(run, Case((23, n, 1), residual=residual))
    macros, (blocks, *_) = launches[0]["macros"], launches[0]["grid"]
    assert macros["STAGES"] in (2, 3) and blocks * macros["SLICES"] == 2 * macros["MIN_BLOCKS"]


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
