"""Programs of H200s for the presets' training step: the memory they take, and no copied state."""

import dataclasses
import functools
import math
import os
import re
import subprocess
import sys

import gpu_compiler
import hlo
import jax
import pytest
from jax.sharding import AxisType, Mesh

from normfuse.models import parameters
from normfuse.train import topology
from normfuse.train.config import preset_config
from normfuse.train.mesh import AXES
from normfuse.train.topology import step_on

GB = 10**9


def step(preset: str, mesh: Mesh, attention: str = "cudnn", **changes):
    """Compiles the step of a preset's recipe as `normfuse train` would; gives its state too."""
    config = preset_config(preset)
    model = dataclasses.replace(config.transformer(), attention=attention, **changes)
    return step_on(mesh, config, model)


@functools.cache
def step_of_one_block(quantization: str | None):
    """Compiles the step of a `1b` of one block, once for the tests that read it."""
    return step("1b", mesh(), num_layers=1, quantization=quantization)


def test_cudnn_serves_attention_unasked():
    program, _ = step("small", mesh(), "auto", num_layers=1, head_dim=256)
    found = re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', program.as_text())
    assert sorted(found) == ["Softmax", "SoftmaxBackward"]


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    return gpu_compiler.mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def needed(program) -> int:
    """Bytes on each device: the state, updated in place, the batch, and all temporaries."""
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def check_state_is_donated(program, state):
    """Every array of the new state has the memory of the old."""
    local = [(x.dtype, x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state)]
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in local)
    assert program.memory_analysis().alias_size_in_bytes == size


def copied(program, state) -> list[tuple[int, ...]]:
    """Shapes of a device's parameters or moments that are copied, or of copies as large."""
    local = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state)]
    arrays = {tuple(sorted(shape)) for shape in local if shape}
    copies = re.findall(r"= \(?f32\[(\d[\d,]*)\][^=]* copy(?:-start)?\(", hlo.text(program))
    shapes = (tuple(sorted(map(int, shape.split(",")))) for shape in copies)
    return [shape for shape in shapes if shape in arrays]


def test_1b_fits_one_gpu_of_80_gb_and_repeats_no_product():
    """At 16384 tokens a step, from one and two of its blocks, in place and without remat.

    In FP8 codes take the place of what products read: a third less, and 5 GiB less for all blocks.
    """
    config = preset_config("1b")
    assert config.tokens_per_step == 16384 and config.microbatches == 1
    kept, needs = {}, {}
    for quantization in None, "fp8":
        one, _ = step_of_one_block(quantization)
        two, state = step("1b", mesh(), num_layers=2, quantization=quantization)
        check_state_is_donated(two, state)
        assert copied(two, state) == []
        # Seven products with weights in a block, and one with the vocabulary for the loss's first
        # rows and for the others, each once forward and twice backward.
        assert hlo.text(two).count('custom_call_target="__cublas') <= 3 * (7 * 2 + 2)
        temporaries = [program.memory_analysis().temp_size_in_bytes for program in (one, two)]
        kept[quantization] = temporaries[1] - temporaries[0]
        blocks = config.transformer().num_layers - 1
        needs[quantization] = needed(one) + blocks * (needed(two) - needed(one))
    assert kept["fp8"] < 0.75 * kept[None], kept
    state_bytes = 12 * 1.23e9  # float32 parameters and both moments: nothing was left out
    # 35 GB, and logits would be 8 or 16 more.
    assert state_bytes < needs["fp8"] < 27.5 * 2**30 < needs[None] < 44 * GB


def test_a_block_in_fp8_quantizes_what_its_norms_write_in_their_pass():
    """Seven products with weights and their gradients; one pass for each norm in each direction."""
    program, _ = step_of_one_block("fp8")
    kernels, gemms = hlo.calls(program, "quantize_"), hlo.gemms(program)
    of_loss = {"softmax_statistics": 2, "softmax": 2}  # of the first chunk, and of the others
    # The last norm, before the logits, is the one that writes an array.
    norms = {"norm": 2, "rms_norm_forward": 1, "rms_norm_backward": 3}
    # Maxima of seven kernels, of what o reads, of five gradients and of dh; no norm's. For the
    # loss the table's, and those of x's chunks.
    quantizer = {"amax": 14 + 3, "cast": 13 + 3, "gated_amax": 1, "gated": 2}
    assert kernels == quantizer | norms | of_loss
    assert hlo.text(program).count('"__cublas$lt$matmul$f8"') == 3 * 7 + 2 * 2
    # Parts of the gradients of both norms are added in the products.
    rows = f"bf16[16384,{preset_config('1b').transformer().dim}]"
    assert [g for g in gemms if g.beta and g.result == rows] == [hlo.Gemm(rows, 1, True)] * 3


def test_products_add_the_gradients_of_one_x(monkeypatch):
    """Those of q, k and v, and of gate and up, where users' XLA may choose Triton for products."""
    monkeypatch.delitem(topology.OPTIONS, "xla_gpu_enable_triton_gemm")
    program, _ = step("1b", mesh(), num_layers=1)
    rows = f"bf16[16384,{preset_config('1b').transformer().dim}]"
    found = [g for g in hlo.gemms(program) if g.beta and g.result == rows]
    assert found == [hlo.Gemm(rows, 1, in_place=True)] * 3
    assert rows not in hlo.additions(program)


@pytest.mark.parametrize(
    ("preset", "axes"),
    [("small", {}), ("medium", {}), ("8b", {"fsdp": 8})],
    ids=str,
)
@pytest.mark.slow
def test_other_presets_fit_gpus_of_80_gb(preset, axes):
    program, state = step(preset, mesh(**axes))
    check_state_is_donated(program, state)
    assert copied(program, state) == []
    assert needed(program) < 80 * GB


def test_sharded_state_is_updated_in_place():
    program, state = step("tiny", mesh(2, 2, 2), attention="xla")
    check_state_is_donated(program, state)
    assert copied(program, state) == []


def test_8b_in_fp8_over_eight_gpus_fits_without_recomputation():
    """One sequence of 8192 on each GPU: what each of its 32 blocks takes, from one and two."""
    config = dataclasses.replace(preset_config("8b"), batch_size=8, seq_len=8192)
    changes = {"attention": "cudnn", "quantization": "fp8", "remat": "none"}
    model = dataclasses.replace(config.transformer(), **changes)
    (one, state), (two, _) = (
        step_on(mesh(fsdp=8), config, dataclasses.replace(model, num_layers=n)) for n in (1, 2)
    )
    # The gradients are reduced as the parameters lie: none is turned in the update's kernel.
    check_state_is_donated(one, state)
    assert copied(one, state) == []
    sizes = parameters.shapes(dataclasses.replace(model, num_layers=1)).items()
    kernels, table = (
        sum(math.prod(shape) for name, shape in sizes if re.search(of, name))
        for of in ("layers.*kernel", "embed|head")
    )
    found = hlo.communicated(one)
    codes = [key for key in found if key[0] == "all-gather" and key[1] in ("u8", "s8")]
    assert sum(found.pop(key) for key in codes) == kernels  # once for both ways
    assert found.pop(("all-reduce", "s32")) == 7  # maxima of kernels
    assert found.pop(("all-reduce", "f32")) < 6 * model.dim + 100  # gradients of scales, maxima
    head, rows = table // 2, 8 * 8192  # fewer than words: they move, not the embedding
    assert found == {
        ("all-gather", "s32"): rows,
        ("reduce-scatter", "bf16"): rows * model.dim // 8,
        ("all-gather", "bf16"): head + rows * model.dim,
        ("reduce-scatter", "f32"): (kernels + head) // 8,
    }
    needs = needed(one) + (model.num_layers - 1) * (needed(two) - needed(one))
    assert 12 * 8.03e9 / 8 < needs < 0.75 * 85 * GB  # parameters, moments; JAX's share of a H100


def plan(path: str | None, *flags: str) -> subprocess.CompletedProcess:
    """Runs `normfuse plan` where JAX finds the plugin in `path`, or finds none."""
    env = os.environ | {"PYTHONPATH": path or ""}
    command = [sys.executable, "-m", "normfuse.train.cli", "plan", "--preset", "tiny", *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_a_plan_is_what_xla_says_of_the_step():
    gpu_compiler.mesh((1,), ("x",))  # skips where there is no compiler
    flags = ["--gpus=2", "--batch-size=8", "--mesh.fsdp=2", "--precision=bfloat16"]
    done = plan(os.environ["NORMFUSE_GPU_COMPILER"], *flags)
    assert (done.returncode, done.stderr) == (0, "")
    head, memory, *rest = done.stdout.splitlines()
    on = "parameters on 2 H200, data 1 x fsdp 2 x tensor 1, 8 sequences of 128 a step"
    assert head.split(" ", 1)[1] == on
    found = re.fullmatch(r"memory of a device: ([\d.]+) GiB, of 104.8 that JAX takes", memory)
    assert found and float(found[1]) < 2
    assert all(re.fullmatch(r" +\d+ [a-z-]+, \d\.\d\d GB into a device", line) for line in rest)
    assert any("all-gather" in line for line in rest)  # and "no kernel" in none


def test_plan_says_how_to_install_a_compiler():
    done = plan(None, "--gpus=1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "plan needs JAX's CUDA plugin, though no GPU: pip install" in done.stderr
