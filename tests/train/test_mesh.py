"""Meshes: the losses of one device, and no collective that plain JAX would not need."""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest
from tiny_model import CONFIG, first_devices

from normfuse.models.functional import build
from normfuse.train.checkpoint import checksum
from normfuse.train.config import MeshConfig, OptimConfig
from normfuse.train.mesh import batch_sharding, make_mesh, make_sharding, on_devices
from normfuse.train.step import Program, make_optimizer, schedule

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
) -> Program:
    config = dataclasses.replace(CONFIG, implementation=implementation)
    sharding = make_sharding(MeshConfig(sequence=sequence), mesh, BATCH // microbatches)
    model = build(framework, config, sharding)
    optimizer, rate = make_optimizer(OPTIM, STEPS), schedule(OPTIM, STEPS)
    return Program(model, optimizer, rate, mesh, microbatches)


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
        ((2, 2, 2), "nnx", {"microbatches": 2}),
    ],
    ids=str,
)
def test_sequence_parallelism_changes_no_loss(eight_devices, shape, framework, options):
    found, text = _run(shape, framework, sequence=True, **options)
    one_device, _ = _run((1, 1, 1), "nnx")
    np.testing.assert_allclose(found, one_device, rtol=0, atol=1e-5)
    # Tokens were split: a block's input is gathered.
    assert re.search(rf"= f32\[[\d,]+,{SEQ},\d+\]\S* all-gather", text)


def test_replicas_reduce_once_however_many_microbatches(eight_devices):
    mesh = _mesh(8, 1, 1)
    with jax.set_mesh(mesh):
        program = _program(mesh, "nnx", microbatches=3)
        text = program.lower(3 * BATCH, SEQ).compile().as_text()
    assert " while(" in text  # all but the first are a loop, and nothing in it talks
    assert not [
        line for line in text.splitlines() if _COLLECTIVE.search(line) and "while/body" in line
    ]
    # Once: together they have as many elements as the parameters, the loss and the counts of good
    # steps; a second reduction of the smallest matrix would be 24 × 16 more.
    found = [shape for shape, kind in _COLLECTIVE.findall(text) if kind == "all-reduce"]
    shapes = [dims for shape in found for dims in re.findall(r"\[([\d,]*)\]", shape)]
    reduced = sum(math.prod(map(int, filter(None, dims.split(",")))) for dims in shapes)
    parameters = sum(x.size for x in jax.tree.leaves(program.abstract().params))
    assert parameters <= reduced <= parameters + 32


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
