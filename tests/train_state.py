"""A small state, its checkpoints, and a function that restores them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from normfuse.train.checkpoint import Checkpoints
from normfuse.train.step import State

RECORD = {"format": 3, "config": {"steps": 9}, "text": {"sha256": "f00d"}}


def make_state(step: int) -> State:
    keys = jax.random.split(jax.random.key(step), 3)
    nu = jax.random.normal(keys[1], (32, 64))
    moments = {"mu": nu.astype("bfloat16"), "nu": nu, "count": jnp.int32(step)}
    params = {
        "kernel": jax.random.normal(keys[0], (64, 32)),
        "scale": jnp.full(7, step, "bfloat16"),
    }
    return State(jnp.int32(step), params, moments, jnp.array(False))


def abstract() -> State:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), make_state(0)
    )


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def restore(folder: Path) -> tuple[State, dict, list[str]]:
    said: list[str] = []
    checkpoints = Checkpoints(folder, report=said.append)
    state, record = checkpoints.restore(abstract())
    checkpoints.close()
    return state, record, said
