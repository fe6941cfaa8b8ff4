"""The norms' kernels against their definitions: C++, and CUDA on an emulator that makes races and
missing waits visible."""

import functools
import itertools
import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from cuda_emulator import Emulator
from norm_kernels import (
    CUDA,
    EPS,
    HALVES,
    KERNELS,
    Case,
    check,
    check_cast_before,
    many_rows,
    mixes,
)

from normfuse.layers.norm import cuda
from normfuse.layers.norm.layouts import RowLayout, Rows, one_launch_layout
from normfuse.layers.norm.spec import Norm
from normfuse.native import compiler
from normfuse.native.launch import Target, column_sum

# One multiprocessor: persistent grids go round several times, also with few rows.
SM90 = Target("sm_90", multiprocessors=1)
SM80 = Target("sm_80", multiprocessors=1)
WHOLE = "forward", "backward"


@pytest.fixture
def emulated(emulator_folder, monkeypatch):
    """`emulated(target, shift=0)`: a runner of the kernels, and the launches it has made.

    The backward is that of many rows unless `few`.
    """
    pytest.importorskip("cuda.bindings", reason="the kernels' headers come with cuda-bindings")

    def make(target=SM90, shift=0, few=False):
        emulator = Emulator(emulator_folder, shift)
        monkeypatch.setattr(cuda, "launch", emulator.launch)
        if not few:
            many_rows(monkeypatch)
        given = lambda arrays: jax.tree.map(jnp.asarray, list(arrays))
        run = lambda kernel, norm, arrays: CUDA[kernel](target, norm, *given(arrays))
        return run, emulator.launches

    with jax.enable_x64(True):
        yield make


def host(kernel, norm, arrays):
    with jax.enable_x64(True):
        body = functools.partial(KERNELS[kernel].bodies["cpu"], norm)
        return jax.jit(body)(*jax.tree.map(jnp.asarray, arrays))


def macros_of(launches, kernel):
    return next(one["macros"] for one in launches if one["kernel"].endswith(kernel))


CASES = [
    Case((37, 24)),  # several rows to a warp, the last block not full
    Case((20, 1000), residual=True, bias=True, offset=0.5),  # the last vectors missing
    Case((9, 2056), "float16", "bfloat16", "float32", offset=1.0),  # a row to a block
    Case((9, 257), "float32", "float64", "float16"),  # an odd length: one element at a time
    Case((5, 128), scale=None, bias=True),
]
CENTRED = [replace(one, centred=True, bias=True, mean=3.0) for one in CASES[:2]]
EXAMPLES = [
    Case((3, 37, 24), offset=1.0, bias=True),  # several rows to a warp, the last block not full
    Case((2, 20, 1000), residual=True, bias=True, centred=True),  # several rows to a block
    Case((5, 1, 128), bias=True),  # an example a row
]


@pytest.mark.parametrize("case", [*CASES, *CENTRED], ids=str)
def test_cuda_matches_its_definition(emulated, case):
    check(emulated()[0], case, WHOLE)


@pytest.mark.parametrize("case", EXAMPLES, ids=str)
def test_cuda_examples_match_their_definition(emulated, case):
    run, launches = emulated(replace(SM90, multiprocessors=4))
    check(run, case)
    backward = next(one for one in launches if one["kernel"].endswith("norm_backward"))
    assert backward["grid"][0] % case.shape[0] == 0 and backward["macros"]["PER_EXAMPLE"] == 1


LONG = [Case((2, 70000)), Case((2, 70000), centred=True, bias=True)]


@pytest.mark.parametrize("case", [*CASES, *CENTRED, *EXAMPLES, *LONG], ids=str)
def test_host_matches_its_definition(case):
    check(host, case)


@pytest.mark.parametrize("mix", range(16))
def test_host_takes_every_mix_of_dtypes(mix):
    (x, scale, out), centred = mixes()[mix], bool(mix // 2 % 2)
    flags = {"residual": True, "offset": 0.5, "bias": True, "centred": centred}
    check(host, Case((7, 300), x, scale, out, other=scale, **flags))


@pytest.mark.parametrize(
    "case",
    [Case((100, 264)), Case((3, 9), scale=None, centred=True), Case((9, 72), "float16", bias=True)],
    ids=str,
)
def test_cuda_halves_match_their_definitions(emulated, case):
    check(emulated()[0], case, HALVES)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 136), residual=True, bias=True),
        Case((3, 136), residual=True, centred=True),
        Case((3, 5, 1032), centred=True, bias=True),
    ],
    ids=str,
)
def test_cuda_unaligned_arrays_match_their_definition(emulated, case):
    check(emulated(shift=1)[0], case, WHOLE)


@pytest.mark.parametrize("dscale, dbias", [(True, False), (False, True), (False, False)])
def test_gradients_that_are_asked_for(emulated, dscale, dbias):
    for case in (Case((21, 72), bias=True), Case((21, 72), bias=True, centred=True)):
        for run in (emulated()[0], host):
            check(run, case, ["backward"], with_dscale=dscale, with_dbias=dbias)


def test_cuda_rounds_before_the_weight(emulated):
    check_cast_before(emulated()[0], Case((20, 1000), residual=True))
    check_cast_before(emulated()[0], Case((9, 24), "bfloat16", "float32", "float32"))
    check_cast_before(host, Case((9, 24), "bfloat16", "float32", "float32"))


@pytest.mark.parametrize("centred", [False, True])
def test_no_rows(centred):
    check(host, Case((0, 24), centred=centred, bias=True))


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    "case, blocks, hold",
    [
        (Case((5, 12296), bias=True), 2, False),  # reads a row twice
        (Case((5, 28168)), 2, True),  # holds it
        # More blocks than RMSNorm's, which have registers for fewer columns each.
        (Case((3, 33000), centred=True, bias=True), 4, False),
        (Case((2, 3, 12296)), 2, False),
    ],
    ids=str,
)
def test_cuda_cluster_adds_its_slices(emulated, case, blocks, hold):
    run, launches = emulated()
    check(run, case, ["backward"])
    macros = macros_of(launches, "norm_backward")
    assert macros["CLUSTER"] == launches[0]["grid"][1] == blocks and macros["HOLD"] == hold


@pytest.mark.parametrize("centred", [False, True])
def test_cuda_long_rows_take_two_launches(emulated, centred):
    """Slices of unequal lengths, whose statistics are combined."""
    run, launches = emulated(SM80)
    case = Case((2, 33000), "float32", "float32", "float32", centred=centred, mean=50.0 * centred)
    check(run, case, WHOLE)
    names = [launch["kernel"].split("norm_")[1] for launch in launches]
    assert names == list(HALVES)
    assert launches[0]["grid"][1] > 1 and launches[2]["grid"][1] > 1
    if centred:
        check(run, replace(case, shape=(2, 2, 33000)), WHOLE)


def test_blocks_go_through_long_rows(emulated):
    """Fewer clusters than rows: the forward holds its parameters, the backward shares the scale."""
    run, launches = emulated(replace(SM90, multiprocessors=2))
    check(run, Case((7, 20000), centred=True, bias=True, mean=20.0), WHOLE)
    forward, backward = (launch for launch in launches if launch["kernel"] != "column_sum")
    assert forward["macros"]["HOLD"] and forward["macros"]["AHEAD"]
    assert backward["macros"]["SHARE_WEIGHT"]
    assert all(kernel["macros"]["CLUSTER"] == 2 for kernel in (forward, backward))
    assert forward["grid"][:2] == backward["grid"][:2] == (1, 2)


@pytest.mark.parametrize(
    "layout, case",
    [
        (RowLayout(72, 8, 1, 16, 8, thread_rows=2), Case((21, 72), residual=True)),
        (RowLayout(520, 8, 2, 64, 2, thread_rows=4), Case((21, 520))),
        (RowLayout(1032, 8, 1, 64, 1, 3, thread_rows=2, hold=True), Case((21, 1032))),
        (RowLayout(520, 8, 2, 64, 2, thread_rows=4, sums=2), Case((21, 520), centred=True)),
        (
            RowLayout(520, 8, 2, 64, 2, thread_rows=2, sums=2, persistent=True, ahead=True),
            Case((21, 520), centred=True),
        ),
        (
            RowLayout(1032, 8, 1, 64, 1, 3, sums=2, hold=True, persistent=True, ahead=True),
            Case((21, 1032), centred=True, bias=True),
        ),
    ],
    ids=str,
)
def test_cuda_threads_have_several_rows(emulated, monkeypatch, layout, case):
    monkeypatch.setattr(cuda, "forward_layout", lambda rows: layout)
    for shift in (0, 1) if layout.ahead else (0,):
        run, launches = emulated(shift=shift)
        check(run, case, ["forward"])
        assert launches[0]["macros"]["THREAD_ROWS"] == layout.thread_rows


@pytest.mark.parametrize(
    ("n", "residual"), [(1408, True), (2048, False), (2880, True), (3200, False), (5120, True)]
)
def test_cuda_backward_of_many_rows_has_a_few_blocks(emulated, n, residual):
    """Rows of dy and x, and of dh, are on their way to each: all of their layouts."""
    run, launches = emulated(replace(SM90, multiprocessors=2))
    check(run, Case((23, n), residual=residual), ["backward"])
    macros, (blocks, *_) = launches[0]["macros"], launches[0]["grid"]
    assert macros["STAGES"] in (2, 3) and blocks * macros["SLICES"] == 2 * macros["MIN_BLOCKS"]


@pytest.mark.parametrize(
    ("n", "grid", "stages", "residual"), [(520, (3, 1, 1), 1, False), (2056, (3, 3, 1), 2, True)]
)
def test_cuda_few_rows_are_read_at_once(emulated, n, grid, stages, residual):
    run, launches = emulated(replace(SM90, multiprocessors=16))
    check(run, Case((3, n), residual=residual), WHOLE)
    (backward,) = [one for one in launches if one["kernel"] == "rms_norm_backward"]
    assert macros_of(launches, "norm_forward")["HOLD"] == 1
    assert backward["grid"] == grid and backward["macros"]["STAGES"] == stages


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "case", [*CASES[:4], Case((3, 8200)), Case((67, 4104), "float16")], ids=str
)
def test_cuda_few_rows_have_both_gradients_from_one_launch(emulated, case, shift):
    if shift and case.shape[1] != 1000:
        return
    run, launches = emulated(replace(SM90, multiprocessors=64), shift, few=True)
    check(run, replace(case, bias=False), ["backward"])
    (launch,) = launches
    assert launch["macros"]["COLUMN_BLOCKS"] > 0


def test_cuda_few_rows_are_those_that_stay_in_the_cache():
    target = replace(SM90, multiprocessors=132)
    of = lambda n, rows: one_launch_layout(Rows(features=n, itemsize=2, target=target, rows=rows))
    assert of(4096, 1024) is not None
    assert of(4096, 1025) is None and of(16392, 1) is None  # 2049 vectors


def launched(monkeypatch) -> list[str]:
    """Kernel, architecture, rows, features, and the layout of what is launched for these."""
    shown = "CHUNKS ROW_THREADS BLOCK_ROWS SLICES MIN_BLOCKS HOLD".split()
    found = []

    def launch(source, kernel, operands, results, *, macros, grid, target, **_):
        numbers = [macros.get(name, "-") for name in shown]
        numbers += [macros.get("THREAD_ROWS", macros.get("STAGES", "-"))]
        found.append(" ".join(map(str, (kernel, target.arch, *operands[0].shape, *numbers))))
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda, "column_sum", lambda launch, target, partial: partial[0])
    targets = Target("sm_80", 108), Target("sm_90", 132)
    features = 64, 128, 256, 768, 1024, 2048, 4096, 5120, 8192, 12288, 16384, 32768
    for n, centred, target in itertools.product(features, (False, True), targets):
        case = Case((16384, n), centred=centred, bias=centred)
        for kernel in WHOLE:
            body = functools.partial(CUDA[kernel], target, case.norm)
            jax.eval_shape(body, *case.types(kernel, case.norm))
    return found


def test_measured_layouts_are_those_that_are_launched(monkeypatch):
    """`norm_layouts.txt` has what was measured; a layout that changes is measured again."""
    text = pathlib.Path(__file__).with_name("norm_layouts.txt").read_text()
    assert launched(monkeypatch) == text.splitlines()[2:]


# ---------------------------------------------------------------- large means


@pytest.mark.parametrize("n", [1000, 200])
def test_an_element_far_from_the_rest_costs_no_digits(emulated, n):
    """Sums are of differences to one of three elements, which is not one that is far from all."""
    run, _ = emulated()
    norm = Norm(op="layer_norm", centred=True, out_dtype="float32", eps=EPS)
    for at in (0, n // 2, n - 1):
        x = np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)
        x[:, at] += 1e6
        y, *_ = run("forward", norm, [x])
        centred = x - x.astype("float64").mean(1, keepdims=True)
        want = centred / np.sqrt((centred**2).mean(1, keepdims=True) + EPS)
        limit = np.finfo("float32").eps * (np.abs(x) + 1e6 / n) / centred.std(1, keepdims=True)
        assert np.all(np.abs(np.asarray(y) - want) <= (8 + np.sqrt(n)) / 2 * limit)


@pytest.mark.parametrize(("n", "residual"), [(4, False), (257, True), (8208, False)])
def test_a_mean_that_float32_does_not_have(emulated, n, residual):
    """Means of whole numbers near 2²⁴ are rounded to one of them; y is as if they were not."""
    rng = np.random.default_rng(n)
    x = (15_999_990 + rng.integers(0, 100, (3, n))).astype("float32")
    more = [np.full_like(x, 1000)] * residual
    norm = Norm(op="layer_norm", centred=True, out_dtype="float32", eps=EPS)
    exact = x.astype("float64") + 1000 * residual
    centred = exact - exact.mean(1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(1, keepdims=True) + EPS)
    for run in (emulated()[0], host):
        y, *_ = run("forward", norm, [x, *more])
        # sums of n differences, which are at most sqrt(n) deviations
        tolerance = (np.sqrt(n) + 10) * np.finfo("float32").eps
        np.testing.assert_allclose(y, want, rtol=tolerance, atol=tolerance)


# Few columns take a block per 32 of them; many, four at a time; and some no whole vectors.
@pytest.mark.parametrize(
    "shape, dtype", half([(70, 96), (133, 1024), (9, 1028), (40, 1027)], ["float32", "float64"])
)
def test_column_sums(emulator_folder, shape, dtype, rng):
    pytest.importorskip("cuda.bindings", reason="the kernels' headers come with cuda-bindings")
    with jax.enable_x64(True):
        partial, emulator = rng.normal(size=shape).astype(dtype), Emulator(emulator_folder, 0)
        target = Target("sm_90", multiprocessors=8)
        sums = column_sum(emulator.launch, target, jnp.asarray(partial))
    vector = 16 // partial.itemsize if shape[1] in (1024, 1028) else 1
    assert emulator.launches[0]["macros"]["VECTOR"] == vector
    exact = partial.astype("float64").sum(0)
    slack = shape[0] * np.finfo(dtype).eps * np.abs(partial).sum(0)
    assert sums.dtype == dtype and np.all(np.abs(np.asarray(sums) - exact) <= slack)


# ---------------------------------------------------------------- compiled code


@pytest.mark.parametrize("kernel", WHOLE)
def test_short_rows_are_stored_by_16_bytes(monkeypatch, kernel):
    """The compiler would make four stores of a thread's first vector, one for each word."""
    pytest.importorskip("cuda.bindings.nvrtc")
    texts = []

    def launch(source, kernel, operands, results, *, macros, **sizes):
        if kernel != "column_sum":
            code = compiler.kernel_source(source)
            texts.append(compiler.compile_image(code, macros, "compute_90")[0].data)
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(cuda, "launch", launch)
    x, w = jax.ShapeDtypeStruct((9000, 512), "bfloat16"), jax.ShapeDtypeStruct((512,), "float32")
    row = jax.ShapeDtypeStruct((9000,), "float32")
    norm = Norm(with_dscale=True, out_dtype="bfloat16")
    operands = [x, None, w] if kernel == "forward" else [x, x, w, None, row]
    jax.eval_shape(functools.partial(CUDA[kernel], Target("sm_90", 132), norm), *operands)
    (text,) = texts
    assert b"st.global.wb.v4.u32" in text and b"st.global.u32" not in text
