"""LayerNorm's kernels, each against float64: C++ on this machine, CUDA on the emulator."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from combinations import half
from cuda_cases import EPS, Case
from cuda_emulator import Emulator
from norm_kernels import KERNELS
from reference import Expected, assert_close, wide

from normfuse.layers.norm import cuda
from normfuse.layers.norm.cuda import RowLayout
from normfuse.layers.norm.spec import Norm
from normfuse.native.launch import Target, column_sum

SM90 = Target("sm_90", multiprocessors=1)  # persistent grids go round several times
SM80 = Target("sm_80", multiprocessors=1)


@pytest.fixture
def emulated(emulator_folder, monkeypatch):
    """`emulated(target, shift=0)`: a runner of the kernels, and the launches it has made."""
    pytest.importorskip("cuda.bindings", reason="the kernels' headers come with cuda-bindings")

    def make(target, shift=0):
        emulator = Emulator(emulator_folder, shift)
        monkeypatch.setattr(cuda, "launch", emulator.launch)

        def run(kernel, operands, **params):
            operands = [jax.numpy.asarray(a) for a in operands]
            norm = Norm(op="layer_norm", centred=True, **params)
            return list(map(np.asarray, KERNELS[kernel].bodies["cuda"](target, norm, *operands)))

        return run, emulator.launches

    with jax.enable_x64(True):
        yield make


@pytest.fixture
def host():
    """A runner of the C++ kernels."""

    def run(kernel, operands, **params):
        norm = Norm(op="layer_norm", centred=True, **params)
        call = jax.jit(lambda *arrays: KERNELS[kernel].bodies["cpu"](norm, *arrays))
        return list(map(np.asarray, call(*map(jnp.asarray, operands))))

    with jax.enable_x64(True):
        yield run


def drawn(case: Case, seed: int, mean: float = 0.0):
    """x, dy, dh, and scale and bias; bias only where there is a scale."""
    x, dy, dh, scale = case.draw(seed)
    bias = (wide(scale) - 1).astype(scale.dtype)
    return (wide(x) + mean).astype(x.dtype), dy, dh, [scale, bias] if case.scale else []


def check_forward(run, case: Case, mean: float = 0.0) -> None:
    x, _, other, own = drawn(case, 1, mean)
    flags = {"has_bias": bool(own), "has_residual": case.residual, "eps": EPS}
    flags |= {"with_mean": True, "with_rstd": True, "out_dtype": jnp.dtype(case.out).name}
    operands = [x, *[other] * case.residual, *own]
    y, *h, mean, rstd = run("forward", operands, **flags, **case.flags)
    if case.residual:
        x = reference.add(x, other)
        assert_close(h[0], Expected(wide(x), np.abs(wide(x))), case.compute)
        x = h[0]
    options = {"axes": 1, "eps": EPS, "scale_offset": case.offset}
    assert y.dtype == case.out and mean.dtype == rstd.dtype == case.compute
    assert_close(y, reference.layer_forward(x, *own, **options), case.compute)
    _, exact_rstd, exact = reference.layer_normal(x, 1, EPS)
    size, n = np.abs(wide(x)).mean(1), case.shape[1]
    assert_close(mean, Expected(exact[:, 0], size, n), case.compute)
    # Squares of differences, each with the mean's error, whose relative part is small.
    assert_close(rstd, Expected(exact_rstd[:, 0], exact_rstd[:, 0], n), case.compute, slack=2)


def check_backward(run, case: Case, dscale: bool = True, dbias: bool = True) -> None:
    x, dy, dh, own = drawn(case, 2)
    _, rstd, mean = reference.layer_normal(x, 1, EPS)
    statistics = [a[:, 0].astype(case.compute) for a in (mean, rstd)]
    flags = {"has_residual": case.residual, "with_dscale": dscale, "with_dbias": dbias}
    operands = [dy, x, *own[:1], *statistics, *[dh] * case.residual]
    got = run("backward", operands, **flags, **case.flags)
    more = dh if case.residual else None
    options = {"axes": 1, "eps": EPS, "scale_offset": case.offset}
    found = reference.layer_backward(dy, x, own[0] if own else None, more, **options)
    wanted = [e for e, w in zip(found, (True, dscale, dbias)) if w]
    assert [a.dtype for a in got] == [case.x, *[case.compute] * (dscale + dbias)]
    for array, expected in zip(got, wanted, strict=True):
        assert_close(array, expected, case.compute)


def check_halves(run, case: Case) -> None:
    """`row_statistics` and `apply`, `row_dots` and `backward_apply` together equal one kernel."""
    x, dy, dh, own = drawn(case, 3, mean=100.0)
    wider = x.astype(case.compute) if case.compute == "float64" else x  # like the op
    mean, squares = run("row_statistics", [wider])
    exact = wide(x).mean(1)
    assert_close(mean, Expected(exact, np.abs(wide(x)).mean(1), case.shape[1]), mean.dtype.name)
    variance = squares / case.shape[1]
    np.testing.assert_allclose(variance, wide(x).var(1), rtol=1e-4)
    rstd = (1 / np.sqrt(variance + EPS)).astype(case.compute)
    mean = mean.astype(case.compute)
    flags = {"has_bias": bool(own), "out_dtype": jnp.dtype(case.out).name}
    (y,) = run("apply", [x, *own, mean, rstd], **flags, **case.flags)
    options = {"axes": 1, "eps": EPS, "scale_offset": case.offset}
    assert_close(y, reference.layer_forward(x, *own, **options), case.compute)

    sums = [a.astype(case.compute) for a in run("row_dots", [dy, x, *own[:1], mean], **case.flags)]
    operands = [dy, x, *own[:1], mean, rstd, *[dh] * case.residual, *sums]
    flags = {"has_residual": case.residual, "with_dscale": True, "with_dbias": True}
    got = run("backward_apply", operands, count=float(case.shape[1]), **flags, **case.flags)
    more = dh if case.residual else None
    found = reference.layer_backward(dy, x, own[0] if own else None, more, **options)
    for array, expected in zip(got, found, strict=True):
        assert_close(array, expected, case.compute)


CASES = [
    Case((37, 24, 1)),  # several rows to a warp, the last block not full
    Case((20, 1000, 1), residual=True, offset=0.5),  # several rows to a block
    Case((9, 257, 1), "float32", "float64", "float16"),  # an odd length: one element at a time
    Case((9, 20, 40), residual=True),  # strided
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_kernels_match_reference(emulated, case):
    run, _ = emulated(SM90)
    check_forward(run, case, mean=3.0)
    check_backward(run, case)


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        Case((2, 70000, 1)),
        Case((2, 9000, 9)),
        Case((9, 130, 3), "float32", None, "float32"),
    ],
    ids=str,
)
def test_host_kernels_match_reference(host, case):
    check_forward(host, case, mean=3.0)
    check_backward(host, case)
    check_halves(host, case)


@pytest.mark.parametrize("shape", [(3, 1000, 1), (3, 200, 5)], ids=["rows", "strided"])
def test_an_element_far_from_the_rest_costs_no_digits(emulated, shape):
    """Sums are of differences to one of three elements, which is not one that is far from all."""
    run, _ = emulated(SM90)
    for at in (0, shape[1] // 2, shape[1] - 1):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        x[:, at] += 1e6
        y, *_ = run("forward", [x], with_mean=True, with_rstd=True, out_dtype="float32", eps=EPS)
        assert_close(y, reference.layer_forward(x, axes=1, eps=EPS), "float32")


@pytest.mark.parametrize("dscale, dbias", [(True, False), (False, True), (False, False)])
def test_gradients_that_are_asked_for(emulated, host, dscale, dbias):
    run, _ = emulated(SM90)
    check_backward(run, Case((21, 72, 1) if dscale else (3, 9, 40)), dscale, dbias)
    for shape in ((21, 72, 1), (3, 9, 40)):
        check_backward(host, Case(shape), dscale, dbias)


@pytest.mark.parametrize(
    "layout",
    [
        RowLayout(520, 8, 2, 64, 2, thread_rows=4),
        RowLayout(1032, 8, 1, 64, 1, slices=3, thread_rows=2),  # a cluster
        RowLayout(520, 8, 2, 64, 2, thread_rows=2, persistent=True, ahead=True),
        RowLayout(1032, 8, 1, 64, 1, slices=3, hold=True, persistent=True, ahead=True),
    ],
    ids=str,
)
def test_cuda_threads_have_several_rows(emulated, monkeypatch, layout):
    monkeypatch.setattr(cuda, "timed_forward", lambda *_: None)
    monkeypatch.setattr(cuda, "forward_layout", lambda *_, **__: layout)
    monkeypatch.setattr(cuda, "eased_forward", lambda _, chosen: chosen)
    residual = layout.slices > 1 and not layout.ahead
    for shift in (0, 1) if layout.ahead else (0,):
        run, launches = emulated(SM90, shift=shift)
        check_forward(run, Case((21, layout.features, 1), residual=residual), mean=1.0)
        assert launches[0]["macros"]["THREAD_ROWS"] == layout.thread_rows
        assert launches[0]["macros"].get("AHEAD", False) == layout.ahead


@pytest.mark.parametrize(
    ("shape", "residual"),
    [
        ((3, 4, 1), False),
        ((3, 257, 1), True),  # several warps, one element at a time
        ((3, 8208, 1), False),  # a cluster, which fetches ahead
        ((2, 40, 5), True),  # strided
    ],
)
def test_a_mean_that_float32_does_not_have(emulated, host, shape, residual):
    """Means of whole numbers near 2²⁴ are rounded to one of them; y is as if they were not."""
    rng, n = np.random.default_rng(shape[1]), shape[1]
    x = (15_999_990 + rng.integers(0, 100, shape)).astype("float32")
    more = [np.full_like(x, 1000)] * residual
    params = {"eps": EPS, "out_dtype": "float32", "has_residual": residual}
    want = reference.layer_normal(x + sum(more), 1, EPS)[0]
    for run in (emulated(SM90)[0], host):
        y, *_ = run("forward", [x, *more], **params)
        # sums of n differences, which are at most sqrt(n) deviations
        tolerance = (np.sqrt(n) + 10) * np.finfo("float32").eps
        np.testing.assert_allclose(y, want, rtol=tolerance, atol=tolerance)


def test_cuda_longest_rows_come_ahead(emulated):
    run, launches = emulated(SM90)
    check_forward(run, Case((5, 8208, 1)), mean=1.0)  # whole sectors
    assert launches[0]["macros"]["AHEAD"] and launches[0]["macros"]["CLUSTER"] == 2


@pytest.mark.parametrize("case", [Case((3, 9, 5), scale=None), Case((9, 72, 1), residual=True)])
def test_cuda_halves_match_reference(emulated, case):
    check_halves(emulated(SM90)[0], case)


def test_cuda_unaligned_arrays_match_reference(emulated):
    run, _ = emulated(SM90, shift=1)
    check_forward(run, Case((3, 136, 1), residual=True))
    check_backward(run, Case((3, 136, 1), residual=True))
    check_backward(run, Case((3, 4104, 1)))  # threads that load such rows apart from copies


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


# The longest rows take more blocks than RMSNorm's, which have registers for fewer columns each.
@pytest.mark.parametrize("n, blocks", [(12296, 2), (33000, 4)])
def test_cuda_cluster_adds_its_slices(emulated, n, blocks):
    run, launches = emulated(SM90)
    check_backward(run, Case((3, n, 1)))
    assert launches[0]["macros"]["CLUSTER"] == launches[0]["grid"][1] == blocks


def test_cuda_long_rows_take_two_launches(emulated):
    """Slices of unequal lengths, whose statistics are combined."""
    run, launches = emulated(SM80)
    case = Case((2, 33000, 1), "float32", "float32", "float32")
    check_forward(run, case, mean=50.0)
    check_backward(run, case)
    kernels = [launch["kernel"].removeprefix("layer_norm_") for launch in launches]
    assert kernels == ["row_statistics", "apply", "row_dots", "backward_apply"]
    assert launches[0]["grid"][1] > 1 and launches[2]["grid"][1] > 1


@pytest.mark.parametrize(
    "arch, x", half(["sm_80", "sm_89", "sm_90", "sm_120"], ["bfloat16", "float32"])
)
def test_layouts_take_no_more_shared_memory_than_there_is(arch, x, monkeypatch):
    target, found = Target(arch, multiprocessors=100), []

    def launch(source, kernel, operands, results, *, target, shared=0, **_):
        found.append(shared)
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(cuda, "launch", launch)
    norm = Norm(op="layer_norm", centred=True, has_scale=True)
    norm = replace(norm, with_dscale=True, with_dbias=True)
    for n in (96, 1024, 4096, 8192, 16384, 32768):
        large, row = jax.ShapeDtypeStruct((9000, n, 1), x), jax.ShapeDtypeStruct((9000, 1), "f4")
        operands = large, large, jax.ShapeDtypeStruct((n,), "f4"), row, row
        body = KERNELS["backward"].bodies["cuda"]
        jax.eval_shape(lambda *arrays, body=body: body(target, norm, *arrays), *operands)
    assert found and max(found) <= target.shared_memory


def test_blocks_go_through_long_rows(emulated):
    """Fewer clusters than rows: the forward holds its parameters, the backward shares the scale."""
    run, launches = emulated(Target("sm_90", multiprocessors=2))
    case = Case((7, 20000, 1), x="bfloat16", out="bfloat16")
    check_forward(run, case, mean=20.0)
    check_backward(run, case)
    forward, backward = (launch for launch in launches if launch["kernel"] != "column_sum")
    assert forward["macros"]["HOLD"] and backward["macros"]["SHARE_WEIGHT"]
    assert all(kernel["macros"]["CLUSTER"] == 2 for kernel in (forward, backward))
    assert forward["grid"][:2] == backward["grid"][:2] == (1, 2)


def test_no_rows_launch_nothing(emulated, host):
    run, launches = emulated(SM90)
    for shape in ((0, 24, 1), (0, 24, 3)):
        for each in (run, host):
            check_backward(each, Case(shape))
    assert not launches


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        *(("sm_90", (9000, n, 1)) for n in (512, 8192, 32768)),
        ("sm_80", (300, 4096, 1)),
        ("sm_100", (9, 20, 40)),
    ],
)
def test_cuda_kernels_compile_and_spill_no_registers(spills, arch, shape):
    spilled = spills(cuda)
    target = Target(arch, multiprocessors=132)
    x, w = jax.ShapeDtypeStruct(shape, "bfloat16"), jax.ShapeDtypeStruct(shape[1:2], "float32")
    row = jax.ShapeDtypeStruct((shape[0], shape[2]), "float32")
    norm = Norm(op="layer_norm", centred=True, out_dtype="bfloat16", has_scale=True, has_bias=True)
    run = lambda name, norm, *operands: jax.eval_shape(
        lambda *arrays: KERNELS[name].bodies["cuda"](target, norm, *arrays), *operands
    )
    for used in (False, True):  # the statistics: without, registers go to other things
        run("forward", replace(norm, with_mean=used, with_rstd=used), x, w, w)
        assert spilled["layer_norm_forward"] <= 8
    gradients = replace(norm, has_bias=False, with_dscale=True, with_dbias=True)
    run("backward", gradients, x, x, w, row, row)
    assert list(spilled) == ["layer_norm_forward", "layer_norm_backward"]
    assert max(spilled.values()) <= (12 if shape[1] == 32768 else 8), spilled
