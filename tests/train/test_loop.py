"""The loop's speed: one compilation, nothing copied, and a host that does not wait."""

import dataclasses
import re
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_model import CONFIG, first_devices

from normfuse.models.functional import build
from normfuse.train.config import OptimConfig, preset_config
from normfuse.train.loop import Loop
from normfuse.train.step import Metrics, Program, make_optimizer, schedule


class _Metric:
    """A number on a device, which says when the host waits for it."""

    def __init__(self, step: int, happened: list):
        self.step, self.happened = step, happened

    def __array__(self, dtype=None, copy=None):
        self.happened.append(("waited for", self.step))
        return np.zeros((), dtype)


def test_host_waits_for_a_step_only_after_it_has_started_the_next():
    happened = []

    def step(state, batch):
        happened.append(("started", batch))
        return state, Metrics(*[_Metric(batch, happened)] * 4)

    config = preset_config("tiny")
    config = type(config)(**{**vars(config), "steps": 6})
    loop = Loop(
        config=config,
        step=step,
        batches=iter(range(1, 7)),
        evaluate=lambda *_: None,
        save=lambda state, done: None,
        write=lambda line: None,
        display=SimpleNamespace(step=lambda step, figures: None),
        stopping=lambda: False,
    )
    assert loop.run("state", 0) == ("state", 6)
    first = {event: happened.index(event) for event in happened}
    for k in range(1, 6):
        assert first["started", k + 1] < first["waited for", k]
    for k in range(1, 5):  # nor does it run ahead: at most two steps are under way
        assert first["waited for", k] < first["started", k + 2]


def test_the_times_of_steps_do_not_overlap():
    """A step starts before the one before it has ended: what it waits for is not its own time."""
    lines, display = [], SimpleNamespace(step=lambda step, figures: None)
    began = time.perf_counter()
    unused = [None] * 4
    loop = Loop(preset_config("tiny"), *unused, lines.append, display, stopping=lambda: False)
    time.sleep(0.05)
    for step in (1, 2):
        loop.log(step, Metrics(*[np.float32(0)] * 4), began)
    assert sum(line["step_time_s"] for line in lines) <= time.perf_counter() - began


def test_run_compiles_its_step_and_its_validation_once(options, train, compilations):
    """Also where the last batch of a validation is not full: here of 12 windows, 8 at once."""
    assert train(**options | {"eval.tokens": 12 * 16})[0] == 0
    names = {re.sub(r"^jit\(?|\)$", "", name): count for name, count in compilations.items()}
    assert names["_step"] == 1
    assert names["loss_sum"] == 1


def _program(mesh) -> Program:
    config = dataclasses.replace(CONFIG, vocab_size=96, mlp_dim=40, tie_embeddings=False)
    optim = OptimConfig(lr=1e-2)
    model = build("nnx", config)
    return Program(model, make_optimizer(optim, 9), schedule(optim, 9), mesh, 1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_compiled_step_updates_its_state_in_place(shape):
    """Every array of the state is donated."""
    if len(jax.devices()) < np.prod(shape):
        pytest.skip("needs more devices")
    mesh = first_devices(*shape)
    with jax.set_mesh(mesh):
        program = _program(mesh)
        step = program.lower(8, 16).compile()
        state = program.abstract()
    local = lambda x: x.sharding.shard_shape(x.shape)
    leaves = jax.tree.leaves(state)
    size = sum(int(np.prod(local(x))) * x.dtype.itemsize for x in leaves)
    assert step.memory_analysis().alias_size_in_bytes == size
