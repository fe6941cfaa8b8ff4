"""Checkpoints: what comes back is what was saved, or the one before with a reason."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse.train.checkpoint import Checkpoints
from normfuse.train.errors import RunError
from normfuse.train.step import State

RECORD = {"format": 2, "config": {"steps": 9}, "text": {"sha256": "f00d"}}


def _state(step: int) -> State:
    keys = jax.random.split(jax.random.key(step), 3)
    moments = {"mu": jax.random.normal(keys[1], (32, 64)), "count": jnp.int32(step)}
    params = {
        "kernel": jax.random.normal(keys[0], (64, 32)),
        "scale": jnp.full(7, step, "bfloat16"),
    }
    return State(jnp.int32(step), params, moments, jnp.int32(0), jnp.float32(2.5))


def _abstract() -> State:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), _state(0))


def _equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, report=print)
    for step in (1, 2):
        checkpoints.save(_state(step), step, RECORD)
    checkpoints.close()
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def _restore(folder: Path) -> tuple[State, dict, list[str]]:
    said: list[str] = []
    checkpoints = Checkpoints(folder, report=said.append)
    state, record = checkpoints.restore(_abstract())
    checkpoints.close()
    return state, record, said


def test_restores_the_newest_exactly(copy):
    state, record, said = _restore(copy)
    assert _equal(state, _state(2))
    assert jax.tree.structure(state) == jax.tree.structure(_state(2))
    assert [x.dtype for x in jax.tree.leaves(state)] == [
        x.dtype for x in jax.tree.leaves(_state(2))
    ]
    assert {name: record[name] for name in RECORD} == RECORD
    assert (record["step"], said) == (2, [])


def test_nothing_saved_is_an_error(tmp_path):
    with pytest.raises(RunError, match="holds no checkpoint"):
        Checkpoints(tmp_path / "checkpoints", report=print).restore(_abstract())


def test_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", report=print, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(_state(step), step, RECORD)
    checkpoints.close()
    assert Checkpoints(tmp_path / "checkpoints", report=print).steps() == [3, 4]


def _flip(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def _truncate(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "fault", [_flip, _truncate, Path.unlink], ids=["flip", "truncate", "delete"]
)
def test_damage_to_any_file_is_harmless_or_costs_one_checkpoint(copy, tmp_path, fault):
    """Every file of the newest, in turn: its own state comes back, or the one before."""
    files = [path.relative_to(copy) for path in sorted((copy / "2").rglob("*")) if path.is_file()]
    if fault is not _flip:
        files = [name for name in files if "rest" not in name.parts]  # as params: the same format
    fell_back = 0
    for i, name in enumerate(files):
        folder = Path(shutil.copytree(copy, tmp_path / str(i) / "checkpoints"))
        fault(folder / name)
        state, record, said = _restore(folder)
        assert _equal(state, _state(record["step"])), name
        if record["step"] == 1:
            fell_back += 1
            assert len(said) == 2 and all("\n" not in line for line in said), name
            assert said[0].startswith("checkpoint of step 2 is damaged, not used: "), name
    assert fell_back >= 3  # arrays, their index, and the record


def test_flipped_array_names_the_array_and_the_checksum(copy):
    largest = max((copy / "2" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    _flip(largest)
    _, record, said = _restore(copy)
    assert record["step"] == 1
    assert "params['kernel'] does not have the checksum it was saved with" in said[0]
    assert (copy.parent / "damaged" / "2").is_dir()


def test_step_after_a_damaged_one_can_be_saved_again(copy):
    _flip(max((copy / "2").rglob("*"), key=lambda path: path.stat().st_size))
    checkpoints = Checkpoints(copy, report=print)
    checkpoints.restore(_abstract())
    checkpoints.save(_state(2), 2, RECORD)
    checkpoints.close()
    state, record, _ = _restore(copy)
    assert record["step"] == 2 and _equal(state, _state(2))


def test_altered_record_is_damage(copy):
    path = copy / "2" / "record" / "metadata"
    path.write_text(path.read_text().replace("f00d", "beef"))
    assert "beef" in json.loads(path.read_text())["text"]["sha256"]
    _, record, said = _restore(copy)
    assert record["step"] == 1
    assert "its record is not what was written" in said[0]


def test_all_damaged_is_an_error_with_the_steps(copy):
    for step in ("1", "2"):
        _flip(max((copy / step).rglob("*"), key=lambda path: path.stat().st_size))
    with pytest.raises(RunError, match=r"damaged are steps \[1, 2\]"):
        _restore(copy)
    assert (copy / "1").exists() and (copy / "2").exists()


def test_failed_save_fails_the_run(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    checkpoints = Checkpoints(folder, report=print)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    with pytest.raises(RunError, match="checkpoint of step 1 could not be written"):
        checkpoints.save(_state(1), 1, RECORD)
        checkpoints.close()


def test_saved_state_may_be_overwritten_at_once(tmp_path):
    """A save returns before it has written; donating the state then must not reach the file."""
    scramble = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 5, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", report=print)
    state = _state(1)
    checkpoints.save(state, 1, RECORD)
    for _ in range(5):
        state = scramble(state)
    checkpoints.close()
    restored, record, said = _restore(tmp_path / "checkpoints")
    assert _equal(restored, _state(1)) and said == []
