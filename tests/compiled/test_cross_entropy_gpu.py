"""The program of an H200 for a loss without logits: memory, products, kernels, collectives."""

import collections
import functools
import re

import gpu_compiler
import hlo
import jax
import jax.numpy as jnp
import pytest
from hlo import Gemm
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import accumulate_gradients, linear_cross_entropy

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")

f32, bf16 = jnp.float32, jnp.bfloat16
TOKENS, DIM, VOCABULARY, CHUNK = 16384, 2048, 128256, 2048
LOGITS = 2 * CHUNK * VOCABULARY  # bytes of a chunk's
KERNEL = 4 * DIM * VOCABULARY  # bytes of its gradient in float32
SMALL = 2**25 + 2**21  # cuBLAS's workspace, and all that is a row


@functools.cache
def compiled(what, kernel_dtype=bf16, tokens=TOKENS, autotuned=False):
    mesh = gpu_compiler.mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P())
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    x, labels = struct((tokens, DIM), bf16), struct((tokens,), jnp.int32)
    kernel = struct((DIM, VOCABULARY), kernel_dtype)
    loss = linear_cross_entropy

    def accumulated(x, kernel, labels):
        return accumulate_gradients(
            lambda k, b: loss(b[0], k, b[1]), kernel, (x[None], labels[None])
        )

    if in_fp8 := what.startswith("fp8 "):
        options = {"quantization": "fp8", "contract": int("tied" in what), "chunk_rows": CHUNK}
        loss = functools.partial(loss, **options)
        kernel = struct((VOCABULARY, DIM), kernel_dtype) if "tied" in what else kernel
    rows = functools.partial(loss, reduction="none")
    run = {
        "loss": loss,
        "gradients": jax.value_and_grad(loss, (0, 1)),
        "gradients later": jax.value_and_grad(lambda *a: jnp.mean(rows(*a)), (0, 1)),
        "main gradient": accumulated,
    }[what.removeprefix("fp8 ").removeprefix("tied ") if in_fp8 else what]
    with jax.set_mesh(mesh):
        options = gpu_compiler.AUTOTUNED if autotuned else gpu_compiler.OPTIONS
        return gpu_compiler.compile(jax.jit(run), x, kernel, labels, options=options)


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "what, kernel_dtype, limit",
    [
        ("loss", bf16, LOGITS),
        # The sum of the kernel's gradient; a chunk of logits lies where the gradient will.
        ("gradients", bf16, KERNEL),
        ("gradients", f32, LOGITS + KERNEL // 2),  # the rounded kernel; the sum is the result
        ("main gradient", bf16, LOGITS),
    ],
)
def test_temporaries_are_a_chunk_and_what_must_be(what, kernel_dtype, limit):
    assert temporaries(compiled(what, kernel_dtype)) <= limit + SMALL


@pytest.mark.parametrize("kernel_dtype", [bf16, f32])
def test_the_kernels_gradient_is_added_by_its_product_in_place(kernel_dtype):
    program = compiled("gradients", kernel_dtype)
    found = sorted(hlo.gemms(program), key=lambda g: (g.result, g.beta))
    dx, z = Gemm(f"bf16[{CHUNK},{DIM}]", 0, False), Gemm(f"bf16[{CHUNK},{VOCABULARY}]", 0, False)
    dw = f"f32[{DIM},{VOCABULARY}]"
    # The first chunk's, and those of the loop over the others.
    wanted = [dx, dx, z, z, Gemm(dw, 0, False), Gemm(dw, 1, in_place=True)]
    assert found == sorted(wanted, key=lambda g: (g.result, g.beta))
    shapes = rf"\[({DIM},{VOCABULARY}|{CHUNK},{VOCABULARY})\]"
    assert not re.search(rf"= \w+{shapes}\S* (copy|add|broadcast)\(", program.as_text())


def test_one_chunk_has_the_kernels_gradient_from_its_product():
    """A sum in float32 would need no less memory here than all logits: twice a chunk's."""
    program = compiled("gradients", tokens=2 * CHUNK)
    z, dx, dw = f"{2 * CHUNK},{VOCABULARY}", f"{2 * CHUNK},{DIM}", f"{DIM},{VOCABULARY}"
    wanted = [Gemm(f"bf16[{shape}]", 0, False) for shape in (z, dx, dw)]
    by_result = lambda gemm: gemm.result
    assert sorted(hlo.gemms(program), key=by_result) == sorted(wanted, key=by_result)
    assert f"f32[{dw}]" not in program.as_text()
    assert temporaries(program) <= 2 * LOGITS + SMALL


def test_one_kernel_a_chunk_in_the_logits_place():
    program = compiled("gradients")
    assert hlo.calls(program) == {"softmax_statistics_and_gradient": 2}
    calls = [line for line in program.as_text().splitlines() if '"normfuse_launch"' in line]
    assert all("output_to_operand_aliasing={{0}: (0, {})}" in line for line in calls), calls
    assert hlo.calls(compiled("loss")) == {"softmax_statistics": 2}
    assert hlo.calls(compiled("gradients later")) == {
        "softmax_gradient": 2,
        "softmax_statistics": 2,
    }


@pytest.mark.parametrize("what", ["fp8 tied gradients", "fp8 gradients later", "fp8 main gradient"])
def test_both_products_of_a_gradient_in_fp8_are_calls_of_codes_and_nothing_beside(what):
    """The logits stay in bfloat16, and their gradient is there as codes alone."""
    program = compiled(what, bf16 if what.endswith("main gradient") else f32)
    call = r'custom_call_target="(__cublas[^"]*)".*?"beta":([\d.]+)'
    targets = collections.Counter(re.findall(call, hlo.text(program)))
    of_x = not what.endswith("main gradient")  # its gradient is wanted too
    assert targets == {
        ("__cublas$lt$matmul", "0"): 3 if "later" in what else 2,  # XLA sees the first chunk twice
        ("__cublas$lt$matmul$f8", "0"): 1 + 2 * of_x,
        ("__cublas$lt$matmul$f8", "1"): 1,
    }
    stored = (VOCABULARY, DIM) if "tied" in what else (DIM, VOCABULARY)
    added = Gemm("f32[{},{}]".format(*stored), 1, in_place=True)
    assert [g for g in hlo.gemms(program) if g.beta] == [added]
    # The kernel's codes once, x's for each chunk: the first, and those of the loop.
    assert hlo.calls(program, "") == {
        "quantize_amax": 2 + of_x,
        "quantize_cast": 2 + of_x,
        "quantize_softmax": 2,
        "softmax_statistics": 2,
    }
    size = rf"({CHUNK},{VOCABULARY}|{VOCABULARY},{CHUNK}|{DIM},{VOCABULARY}|{VOCABULARY},{DIM})"
    passes = rf"= (\w+)\[{size}\]\S* (?:copy|transpose|add|broadcast|convert)\("
    rounding = {"bf16"}  # the kernel's, to the products' dtype
    assert {of for of, _ in re.findall(passes, hlo.text(program))} <= rounding
    codes = 2 * CHUNK * VOCABULARY + DIM * VOCABULARY
    assert temporaries(program) <= LOGITS + codes + KERNEL // 2 + SMALL


@pytest.mark.parametrize("what", ["fp8 gradients", "fp8 tied gradients"])
def test_the_kernels_gradient_in_fp8_is_added_in_place_whatever_xla_may_choose(what):
    """FP8 products that XLA's autotuner gives back to cuBLAS add out of place, and are copied."""
    program = compiled(what, f32, autotuned=True)
    rows, columns = (VOCABULARY, DIM) if "tied" in what else (DIM, VOCABULARY)
    added = [g for g in hlo.gemms(program) if g.beta]
    assert added == [Gemm(f"f32[{rows},{columns}]", 1, in_place=True)]
    copied = rf"= \w32\[({rows},{columns}|{rows * columns})\]\S* copy\("
    assert not re.search(copied, hlo.text(program))
    codes = 2 * CHUNK * VOCABULARY + DIM * VOCABULARY
    assert temporaries(program) <= LOGITS + codes + KERNEL // 2 + SMALL


def test_collectives_on_eight_gpus():
    """The kernel is gathered once, in bfloat16; its gradient is reduced once, in float32."""
    mesh = gpu_compiler.mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    rows, stored = P(("data", "fsdp")), P("fsdp", "tensor")
    n, words, tokens = 512, 16384, 8192
    place = lambda spec: NamedSharding(mesh, spec)
    struct = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=place(spec))
    operands = (
        struct((tokens, n), bf16, rows),
        struct((n, words), f32, stored),
        struct((tokens,), jnp.int32, rows),
    )
    auto = {"out_shardings": (None, (place(rows), place(stored)))}
    run = jax.value_and_grad(linear_cross_entropy, (0, 1))
    with jax.set_mesh(mesh):
        program = gpu_compiler.compile(jax.jit(run, **auto), *operands)
    seen = hlo.communicated(program)
    assert seen["all-gather", "bf16"] == n * words // 2
    local = tokens // 4
    dw = seen.pop(("reduce-scatter", "f32"), 0) + seen.get(("all-reduce", "f32"), 0)
    assert n * words // 4 <= dw <= n * words // 2 + 3 * local + 1
    assert seen["all-reduce", "bf16"] == local * n  # sums x's gradient over the vocabulary's parts
    assert set(seen) <= {("all-gather", "bf16")} | {
        ("all-reduce", d) for d in ("f32", "s32", "bf16")
    }
