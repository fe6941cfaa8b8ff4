"""Checkpoints: what comes back is what was saved, or the one before with a reason."""

import shutil

import jax
import pytest
from train_state import RECORD, abstract, equal, make_state, restore

from normfuse.train import RunError
from normfuse.train.checkpoint import Checkpoints


def test_restores_the_newest_exactly(copy):
    state, record, said = restore(copy)
    assert equal(state, make_state(2))
    assert jax.tree.structure(state) == jax.tree.structure(make_state(2))
    assert [x.dtype for x in jax.tree.leaves(state)] == [
        x.dtype for x in jax.tree.leaves(make_state(2))
    ]
    assert {name: record[name] for name in RECORD} == RECORD
    assert (record["step"], said) == (2, [])


def test_nothing_saved_is_an_error(tmp_path):
    with pytest.raises(RunError, match="holds no undamaged checkpoint"):
        Checkpoints(tmp_path / "checkpoints", report=print).restore(abstract())


def test_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", report=print, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(make_state(step), step, RECORD)
    checkpoints.close()
    assert Checkpoints(tmp_path / "checkpoints", report=print).steps() == [3, 4]


def test_failed_save_fails_the_run(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    checkpoints = Checkpoints(folder, report=print)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    with pytest.raises(RunError, match="checkpoint of step 1 could not be written"):
        checkpoints.save(make_state(1), 1, RECORD)
        checkpoints.close()


def test_failed_save_says_its_cause(tmp_path, monkeypatch):
    """TensorStore's errors begin with long paths and end with a specification, longer still."""
    cause = f'OUT_OF_RANGE: Error writing "{"w" * 200}": Failed to write 9 bytes: File too large'
    checkpoints = Checkpoints(tmp_path / "checkpoints", report=print)

    def save(*_, **__):
        raise ValueError(f"{cause} [spec='{{{'x' * 300}}}'] [os_error_code='27']")

    monkeypatch.setattr(checkpoints._manager, "save", save)
    with pytest.raises(RunError, match="ValueError: OUT_OF_RANGE: .*: File too large$"):
        checkpoints.save(make_state(1), 1, RECORD)


def test_saved_state_may_be_overwritten_at_once(tmp_path):
    """A save returns before it has written; donating the state then must not reach the file."""
    scramble = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 5, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", report=print)
    state = make_state(1)
    checkpoints.save(state, 1, RECORD)
    for _ in range(5):
        state = scramble(state)
    checkpoints.close()
    restored, record, said = restore(tmp_path / "checkpoints")
    assert equal(restored, make_state(1)) and said == []
