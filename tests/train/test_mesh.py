"""Meshes: the losses of one device, and no collective that plain JAX would not need."""

import collections
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from tiny_model import CONFIG, first_devices

from normfuse.models.functional import build
from normfuse.train.checkpoint import checksum
from normfuse.train.cli import main
from normfuse.train.config import MeshConfig, OptimConfig
from normfuse.train.mesh import batch_sharding, make_mesh, make_sharding, on_devices
from normfuse.train.run import Run
from normfuse.train.step import Program, loss_and_gradient, make_optimizer, schedule

BATCH, SEQ, STEPS = 8, 16, 4
OPTIM = OptimConfig(lr=1e-2, warmup=1)
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def _mesh(*shape):
    if shape == (1, 1, 1):
        return first_devices(*shape)
    return make_mesh(MeshConfig(*shape))


def _program(
    mesh,
    framework,
    *,
    microbatches=1,
    implementation=None,
    sequence=False,
    parts=1,
    remat="none",
    keep=False,
) -> Program:
    config = dataclasses.replace(CONFIG, implementation=implementation, remat=remat)
    layout = MeshConfig(sequence=sequence, keep_gathered=keep)
    sharding = make_sharding(layout, mesh, BATCH // (microbatches * parts))
    model = build(framework, config, sharding)
    optimizer, rate = make_optimizer(OPTIM, STEPS), schedule(OPTIM, STEPS)
    return Program(model, optimizer, rate, mesh, microbatches, skip_limit=0, parts=parts)


@functools.cache
def _run(shape, framework, microbatches=1, **options) -> tuple[list[float], str]:
    """Gives the losses of a few steps on a mesh, and the compiled step's text."""
    mesh = _mesh(*shape)
    rows = np.random.default_rng(0).integers(0, 64, (BATCH, SEQ + 1)).astype(np.int32)
    with jax.set_mesh(mesh):
        program = _program(mesh, framework, microbatches=microbatches, **options)
        step = program.lower(BATCH, SEQ).compile()
        state, losses = program.init(0), []
        for _ in range(STEPS):
            state, metrics = step(state, on_devices(rows, batch_sharding(mesh)))
            losses.append(float(metrics.loss))
        return losses, step.as_text()


@pytest.mark.parametrize(
    ("shape", "framework"),
    [
        ((2, 2, 2), "nnx"),
        ((8, 1, 1), "eqx"),
        ((1, 8, 1), "nnx"),
    ],
)
def test_losses_are_those_of_one_device(eight_devices, shape, framework):
    found, _ = _run(shape, framework)
    one_device, _ = _run((1, 1, 1), "nnx")
    np.testing.assert_allclose(found, one_device, rtol=0, atol=1e-5)
    assert found[0] - found[-1] > 0.1  # updates were made that could have gone apart


@pytest.mark.parametrize(
    ("shape", "framework", "options"),
    [
        ((2, 2, 2), "eqx", {}),
        ((2, 2, 2), "nnx", {"microbatches": 2, "remat": "block", "keep": True}),
        ((4, 1, 2), "nnx", {"parts": 2}),
    ],
    ids=str,
)
def test_sequence_parallelism_and_kept_kernels_change_no_loss(
    eight_devices, shape, framework, options
):
    found, text = _run(shape, framework, sequence=True, **options)
    one_device, _ = _run((1, 1, 1), "nnx")
    np.testing.assert_allclose(found, one_device, rtol=0, atol=1e-5)
    # Tokens were split: a block's input is gathered.
    assert re.search(rf"= f32\[[\d,]+,{SEQ},\d+\]\S* all-gather", text)


def test_parts_that_are_asked_for_are_those_of_the_step(eight_devices, flags, monkeypatch):
    started = []
    monkeypatch.setattr(Run, "go", lambda run, stack: started.append(run))
    assert main(["train", *flags(**{"mesh.tensor": 2, "mesh.data": 4, "mesh.parts": 2})]) == 0
    assert started[0].program.parts == 2


def test_kept_kernels_have_the_same_gradient(eight_devices):
    """Over microbatches too, where bfloat16 kernels have float32 main gradients."""
    dtypes = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    config = dataclasses.replace(CONFIG, remat="block", **dtypes)
    mesh = _mesh(1, 8, 1)
    rows = np.random.default_rng(0).integers(0, 64, (2 * BATCH, SEQ + 1)).astype(np.int32)
    found = []
    for keep in (False, True):
        model = build("eqx", config, make_sharding(MeshConfig(keep_gathered=keep), mesh, BATCH))
        run = functools.partial(loss_and_gradient, model, microbatches=2, mesh=mesh)
        with jax.set_mesh(mesh):
            places = model.shardings(model.abstract, mesh)
            params = jax.jit(model.init, out_shardings=places)(jax.random.key(0))
            step = jax.jit(run).lower(params, on_devices(rows, batch_sharding(mesh))).compile()
            found.append(step(params, on_devices(rows, batch_sharding(mesh))))
            kernels = len(re.findall(r"all-gather(?:-start)?\(", step.as_text()))
        found[-1] = *found[-1], kernels
    (loss, gradient, twice), (kept_loss, kept, once) = found
    # In the first microbatch and in the loop, out of which XLA may take what is kept.
    assert once <= twice - 2 * 7 * config.num_layers
    assert kept_loss == loss
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(gradient), strict=True):
        assert a.dtype == b.dtype == "float32"
        # Rounded to bfloat16 on their way, they would be off by 2^-9 of their size.
        assert np.abs(a - b).max() < 1e-5 * np.abs(b).max()


def _collectives(text: str) -> collections.Counter:
    """Counts a program's collectives by kind and by the size of their results, ids left out."""
    return collections.Counter(
        (kind, re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape))
        for shape, kind in _COLLECTIVE.findall(text)
    )


def test_step_gathers_no_activations_that_plain_jax_does_not(eight_devices):
    mesh = _mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        program = _program(mesh, "nnx", implementation="xla")
        plain = _collectives(program.lower(BATCH, SEQ).compile().as_text())
    text = _run((2, 2, 2), "nnx")[1]
    assert "normfuse_norm_forward" in text and "normfuse_norm_backward" in text
    ours = _collectives(text)
    gathers = lambda counts: {key: n for key, n in counts.items() if key[0] != "all-reduce"}
    extra = collections.Counter(gathers(ours)) - collections.Counter(gathers(plain))
    assert not extra, f"collectives that implementation='xla' does not have: {extra}"
    activation = re.compile(rf"\[\d+,{SEQ},\d+")
    assert not [key for key in ours if key[0] == "all-gather" and activation.search(key[1])]


def test_replicas_reduce_once_however_many_microbatches(eight_devices):
    mesh = _mesh(8, 1, 1)
    with jax.set_mesh(mesh):
        program = _program(mesh, "nnx", microbatches=3)
        text = program.lower(3 * BATCH, SEQ).compile().as_text()
    assert " while(" in text  # all but the first are a loop, and nothing in it talks
    assert not [
        line for line in text.splitlines() if _COLLECTIVE.search(line) and "while/body" in line
    ]
    assert _collectives(text)


def test_checksum_does_not_depend_on_the_mesh(eight_devices, rng):
    values = {
        "float32": rng.normal(size=(8, 16)).astype(np.float32),
        "int32": rng.integers(0, 99, (8, 16)).astype(np.int32),
    }
    for x in values.values():
        sums = set()
        for shape in ((1, 1, 1), (2, 2, 2), (8, 1, 1)):
            sharding = jax.sharding.NamedSharding(
                _mesh(*shape), jax.sharding.PartitionSpec(("data", "fsdp"), "tensor")
            )
            sums.add(int(checksum(jax.device_put(x, sharding))))
        assert len(sums) == 1


def test_checksum_shows_every_single_bit_and_every_move(rng):
    x = rng.normal(size=37).astype(np.float32)
    right = int(checksum(x))
    for bit in range(37 * 32):
        flipped = x.view(np.uint32).copy()
        flipped[bit // 32] ^= np.uint32(1 << bit % 32)
        assert int(checksum(flipped.view(np.float32))) != right
    assert right not in {int(checksum(np.roll(x, k))) for k in range(1, 37)}


def test_checksum_takes_every_dtype(rng):
    for dtype in ("bfloat16", "float16", "float32", "int8", "uint32", "int32", "bool"):
        x = jax.numpy.asarray(rng.integers(0, 2, (3, 5))).astype(dtype)
        y = x.at[2, 4].set(~x[2, 4] if dtype == "bool" else x[2, 4] + 1)
        assert int(checksum(x)) != int(checksum(y)), dtype
    assert int(checksum(np.zeros((0, 4), np.float32))) == 0
