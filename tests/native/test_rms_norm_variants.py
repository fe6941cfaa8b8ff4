"""Variants of the norms' kernels, against float64: C++ on this machine, CUDA emulated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from combinations import half
from cuda_cases import EPS, Case
from cuda_emulator import Emulator
from norm_kernels import KERNELS, norm_of
from reference import assert_close

from normfuse.layers.norm import cuda
from normfuse.native import compiler
from normfuse.native.launch import Target

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
            operands = [jnp.asarray(a) for a in operands]
            body = KERNELS[kernel].bodies["cuda"]
            return list(map(np.asarray, body(target, norm_of(params), *operands)))

        return run, emulator.launches

    with jax.enable_x64(True):
        yield make


@pytest.fixture
def host():
    """A runner of the C++ kernels."""

    def run(kernel, operands, **params):
        call = jax.jit(lambda *arrays: KERNELS[kernel].bodies["cpu"](norm_of(params), *arrays))
        return list(map(np.asarray, call(*map(jnp.asarray, operands))))

    with jax.enable_x64(True):
        yield run


# ---------------------------------------------------------------- bias


def check_bias(run, case: Case, heads: int = 1) -> None:
    """All kernels that a bias is for, of each head alone against the reference."""
    outer, n, inner = case.shape
    whole = dataclasses.replace(case, shape=(outer, heads * n, inner))
    x, dy, dh, _ = whole.draw(7)
    own = np.random.default_rng(n).standard_normal((2, heads, n))
    scale, bias = own.astype(jnp.dtype(case.scale or "float32"))
    flags = dict(case.flags, eps=EPS, out_dtype=case.out, has_residual=case.residual)
    if heads > 1:
        x, dy, dh = (a.reshape(outer, heads, n) for a in (x, dy, dh))
        flags |= {"axes": (2,), "heads": (1,)}
    else:
        scale, bias = scale[0], bias[0]
    more, scales = [dh] * case.residual, [scale] * (case.scale is not None)
    known = flags | {"has_bias": True}
    y, *h, rstd = run("forward", [x, *more, *scales, bias], **known, with_rstd=True)
    h = h[0] if h else x
    (again,) = run("apply", [h, *scales, bias, rstd], **known)
    assert again.tobytes() == y.tobytes()
    asked = {"with_dscale": True, "with_dbias": True}
    operands = [dy, h, *scales, rstd, *more]
    found = run("backward", operands, **flags, **asked)
    (dots,) = run("row_dots", operands[: 2 + len(scales)], **flags)
    halves = run("backward_apply", [*operands, dots], **flags, **asked, count=float(n))
    alone = run("backward", operands, **flags, with_dbias=True)
    assert [a.tobytes() for a in alone] == [a.tobytes() for a in (found[0], found[2])]
    options = {"eps": EPS, "axes": 1, "scale_offset": case.offset}
    for i in range(heads):
        pick = (lambda a, i=i: a[:, i, :, None]) if heads > 1 else lambda a: a
        mine = (lambda a, i=i: a[i]) if heads > 1 else lambda a: a
        weight = mine(scale) if scales else None
        of_y = reference.forward(pick(h), weight, **options)[0]
        assert_close(pick(y), reference.plus(of_y, mine(bias), (1,)), case.compute)
        gradient = pick(dh) if case.residual else None
        dx, dscale = reference.backward(pick(dy), pick(h), weight, gradient, **options)
        dbias = reference.sum_of_rows(pick(dy), (1,))
        for got in (found, halves):
            assert_close(pick(got[0]), dx, case.compute)
            assert_close(mine(got[1]), dscale, case.compute)
            assert_close(mine(got[2]), dbias, case.compute)


BIASED = [
    (Case((37, 24, 1)), 1),  # several rows to a warp, the last block not full
    (Case((20, 1000, 1), residual=True, offset=0.5), 1),  # several rows to a block
    (Case((9, 257, 1), "float32", "float64", "float16"), 1),  # one element at a time
    (Case((9, 20, 40), residual=True), 1),  # strided
    (Case((5, 128, 1), scale=None), 1),
    (Case((7, 64, 1), residual=True), 6),
]


@pytest.mark.parametrize("case, heads", BIASED[1::2], ids=str)
def test_cuda_bias_matches_reference(emulated, case, heads):
    check_bias(emulated(SM90)[0], case, heads)


@pytest.mark.parametrize(
    "case, heads", [*BIASED, (Case((2, 70000, 1)), 1), (Case((2, 9000, 9)), 1)], ids=str
)
def test_host_bias_matches_reference(host, case, heads):
    check_bias(host, case, heads)


def test_cuda_bias_of_unaligned_and_of_long_rows(emulated):
    check_bias(emulated(SM90, shift=1)[0], Case((3, 136, 1)))
    run, launches = emulated(SM80)
    check_bias(run, Case((2, 16392, 1), "float32", "float32", "float32"))
    assert "rms_norm_backward" not in {launch["kernel"] for launch in launches}
    run, launches = emulated(SM90)
    check_bias(run, Case((3, 12296, 1)))
    assert {"rms_norm_forward", "rms_norm_backward"} <= {one["kernel"] for one in launches}


# ---------------------------------------------------------------- parameters of each example


def check_examples(run, case: Case, examples: int, op: str) -> None:
    """All kernels on (examples, tokens, n), of each example alone against the reference."""
    tokens, n, _ = case.shape
    x, dy, dh, _ = dataclasses.replace(case, shape=(examples, tokens, n)).draw(9)
    own = np.random.default_rng(n).standard_normal((2, examples, n))
    scale, bias = own.astype(jnp.dtype(case.scale))
    flags = dict(case.flags, eps=EPS, out_dtype=case.out, has_residual=case.residual)
    flags |= {"axes": (2,), "heads": (0,), "per_example": True}
    centred = op == "layer_norm"
    flags |= {"centred": centred}
    more, known = [dh] * case.residual, flags | {"has_bias": True}
    statistics = {"with_mean": centred, "with_rstd": True}
    y, *h = run("forward", [x, *more, scale, bias], **known, **statistics)
    h, statistics = h[: case.residual], h[case.residual :]
    h = h[0] if h else x
    ys = [y, *run("apply", [h, scale, bias, *statistics], **known)]
    asked = {"with_dscale": True, "with_dbias": True}
    operands = [dy, h, scale, *statistics, *more]
    found = run("backward", operands, **flags, **asked)
    alone = run("backward", operands, **flags, with_dscale=True)  # without a bias
    sums = run("row_dots", operands[: 3 + centred], **flags, **asked)
    halves = run("backward_apply", [*operands, *sums], **flags, **asked, count=float(n))
    if centred:
        wider = h.astype(case.compute) if case.compute == "float64" else h  # like the op
        mean, squares = run("row_statistics", [wider], **flags)
        rstd = (1 / np.sqrt(squares / n + EPS)).astype(case.compute)
        ys += run("apply", [h, scale, bias, mean, rstd], **known)
    options = {"eps": EPS, "axes": 1, "scale_offset": case.offset}
    for i in range(examples):
        gradient = dh[i] if case.residual else None
        given = dy[i], h[i], scale[i], gradient
        if centred:
            of_y = reference.layer_forward(h[i], scale[i], bias[i], **options)
            expected = reference.layer_backward(*given, **options)
        else:
            of_y = reference.forward(h[i], scale[i], **options)[0]
            of_y = reference.plus(of_y, bias[i], (1,))
            sums = reference.sum_of_rows(dy[i], (1,))
            expected = *reference.backward(*given, **options), sums
        for one in ys:
            assert_close(one[i], of_y, case.compute)
        for got in (found, halves, alone):
            for one, want in zip(got, expected[: len(got)], strict=True):
                assert_close(one[i], want, case.compute)


EXAMPLES = [
    (Case((37, 24, 1), offset=1.0), 3),  # several rows to a warp, the last block not full
    (Case((20, 1000, 1), residual=True), 2),  # several rows to a block
    (Case((5, 257, 1), "float32", "float64", "float16"), 4),  # one element at a time
    (Case((1, 128, 1)), 5),  # an example a row
]


NORMS = ["rms_norm", "layer_norm"]


@pytest.mark.parametrize("op, example", half(NORMS, EXAMPLES), ids=str)
def test_cuda_examples_match_reference(emulated, op, example):
    case, examples = example
    run, launches = emulated(dataclasses.replace(SM90, multiprocessors=4))
    check_examples(run, case, examples, op)
    backward = next(one for one in launches if one["kernel"] == f"{op}_backward")
    assert backward["grid"][0] % examples == 0 and backward["macros"]["PER_EXAMPLE"] == 1


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("case, examples", EXAMPLES[::2], ids=str)
def test_host_examples_match_reference(host, case, examples, op):
    check_examples(host, case, examples, op)


@pytest.mark.parametrize("op", NORMS)
def test_cuda_examples_of_unaligned_and_of_long_rows(emulated, op):
    n = {"rms_norm": 2056, "layer_norm": 1032}[op]
    run, launches = emulated(dataclasses.replace(SM90, multiprocessors=1), shift=1)
    check_examples(run, Case((5, n, 1)), 3, op)
    assert launches[0]["macros"]["THREAD_ROWS"] == 2  # and the last row of an example is alone
    case = Case((2, 33000, 1), "float32", "float32", "float32")
    check_examples(emulated(SM80)[0], case, 2, op)
    run, launches = emulated(SM90)
    check_examples(run, Case((3, 12296, 1)), 2, op)
    backward, _ = [one for one in launches if one["kernel"] == f"{op}_backward"]
    assert backward["macros"]["CLUSTER"] > 1


# ---------------------------------------------------------------- compiled code


@pytest.fixture
def spilled(spills):
    return spills(cuda)


ARCHS = [
    *(("sm_90", (9000, n, 1)) for n in (512, 8192, 12288)),
    ("sm_80", (300, 4096, 1)),
    ("sm_100", (9, 20, 40)),
]


def compiled(name, arch, params, *operands):
    target, body = Target(arch, multiprocessors=132), KERNELS[name].bodies["cuda"]
    jax.eval_shape(lambda *arrays: body(target, norm_of(params), *arrays), *operands)


@pytest.mark.parametrize("arch, shape", ARCHS)
def test_cuda_bias_compiles_and_spills_no_registers(spilled, arch, shape):
    x, w = jax.ShapeDtypeStruct(shape, "bfloat16"), jax.ShapeDtypeStruct(shape[1:2], "float32")
    row = jax.ShapeDtypeStruct((shape[0], shape[2]), "float32")
    forward = {"out_dtype": "bfloat16", "has_scale": True, "has_bias": True}
    compiled("forward", arch, forward, x, w, w)
    sums = {"has_scale": True, "with_dscale": True, "with_dbias": True}
    compiled("backward", arch, sums, x, x, w, row)
    assert list(spilled) == ["rms_norm_forward", "rms_norm_backward"]
    assert max(spilled.values()) <= 8, spilled


@pytest.mark.parametrize("op, where", half(NORMS, ARCHS[:-1]), ids=str)
def test_cuda_examples_compile_and_spill_no_registers(spilled, op, where):
    arch, shape = where
    x = jax.ShapeDtypeStruct((4, *shape[:2]), "bfloat16")
    w = jax.ShapeDtypeStruct((4, shape[1]), "float32")
    row = jax.ShapeDtypeStruct((4, shape[0]), "float32")
    flags = {"axes": (2,), "heads": (0,), "per_example": True, "has_scale": True}
    flags["centred"] = centred = op == "layer_norm"
    forward = {**flags, "out_dtype": "bfloat16", "has_bias": True, "with_rstd": True}
    compiled("forward", arch, {**forward, "with_mean": centred}, x, w, w)
    sums, rows = {"with_dscale": True, "with_dbias": True}, [row] * (1 + centred)
    compiled("backward", arch, {**flags, **sums}, x, x, w, *rows)
    assert max(spilled.values()) <= 8, spilled


@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(9000, 8, 64), (9000, 512)])
def test_short_rows_are_stored_by_16_bytes(monkeypatch, shape, kernel):
    """The compiler would make four stores of a thread's first vector, one for each word."""
    pytest.importorskip("cuda.bindings.nvrtc")
    texts = []

    def launch(source, kernel, operands, results, *, macros, **sizes):
        if kernel != "column_sum":
            code = compiler.kernel_source(source)
            texts.append(compiler.compile_image(code, macros, "compute_90").data)
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(cuda, "launch", launch)
    heads = shape[1:-1]
    outer = shape if heads else (*shape, 1)
    x, w = jax.ShapeDtypeStruct(outer, "bfloat16"), jax.ShapeDtypeStruct(shape[1:], "float32")
    row = jax.ShapeDtypeStruct(shape[:-1] if heads else (shape[0], 1), "float32")
    flags = {"has_scale": True, "heads": (1,) if heads else ()}
    if kernel == "forward":
        compiled("forward", "sm_90", {**flags, "out_dtype": "bfloat16"}, x, w)
    else:
        compiled("backward", "sm_90", {**flags, "with_dscale": True}, x, x, w, row)
    (text,) = texts
    assert b"st.global.wb.v4.u32" in text and b"st.global.u32" not in text
