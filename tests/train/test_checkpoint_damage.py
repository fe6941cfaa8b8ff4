"""Damage to checkpoints: any is noticed, said in one line, and costs one checkpoint."""

import json
import os
import shutil
from pathlib import Path

import pytest
from train_state import RECORD, abstract, equal, make_state, restore

from normfuse.train import RunError
from normfuse.train.checkpoint import Checkpoints


def _flip(path: Path, at: float = 0.5):
    content = bytearray(path.read_bytes())
    content[min(int(at * len(content)), len(content) - 1)] ^= 0x10
    path.write_bytes(content)


_FAULTS = {
    "first byte": lambda path: _flip(path, 0.0),
    "middle byte": _flip,
    "last byte": lambda path: _flip(path, 1.0),
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_damage_to_any_file_is_harmless_or_costs_one_checkpoint(copy, tmp_path, fault):
    """Every file of the newest, in turn: its own state comes back, or the one before."""
    files = [path.relative_to(copy) for path in sorted((copy / "2").rglob("*")) if path.is_file()]
    fell_back = 0
    for i, name in enumerate(files):
        folder = Path(shutil.copytree(copy, tmp_path / str(i) / "checkpoints"))
        _FAULTS[fault](folder / name)
        state, record, said = restore(folder)
        assert equal(state, make_state(record["step"])), name
        if record["step"] == 1:
            fell_back += 1
            assert len(said) == 2 and all("\n" not in line for line in said), name
            assert said[0].startswith("checkpoint of step 2 is damaged and not used: "), name
    assert fell_back >= 5  # the arrays of both items, their indices, and the record


def test_flipped_array_names_the_array_and_the_checksum(copy):
    largest = max((copy / "2" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    _flip(largest)
    _, record, said = restore(copy)
    assert record["step"] == 1
    assert "params['kernel'] does not have the checksum it was saved with" in said[0]
    assert (copy.parent / "damaged" / "2").is_dir()


def test_step_after_a_damaged_one_can_be_saved_again(copy):
    _flip(max((copy / "2").rglob("*"), key=lambda path: path.stat().st_size))
    checkpoints = Checkpoints(copy, report=print)
    checkpoints.restore(abstract())
    checkpoints.save(make_state(2), 2, RECORD)
    checkpoints.close()
    state, record, _ = restore(copy)
    assert record["step"] == 2 and equal(state, make_state(2))


def test_altered_record_is_damage(copy):
    path = copy / "2" / "record" / "metadata"
    path.write_text(path.read_text().replace("f00d", "beef"))
    assert "beef" in json.loads(path.read_text())["text"]["sha256"]
    _, record, said = restore(copy)
    assert record["step"] == 1
    assert "its record does not have the checksum" in said[0]


def test_all_damaged_is_an_error_with_the_steps(copy):
    for step in ("1", "2"):
        _flip(max((copy / step).rglob("*"), key=lambda path: path.stat().st_size))
    with pytest.raises(RunError, match=r"damaged are steps \[1, 2\]"):
        restore(copy)
    assert (copy / "1").exists() and (copy / "2").exists()


def test_incomplete_newest_is_said_and_left_aside(copy):
    """The step lacks the files that orbax knows a complete one by."""
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (copy / "2" / name).unlink(missing_ok=True)
    for item in ("params", "rest", "record"):
        shutil.rmtree(copy / "2" / item)
    _, record, said = restore(copy)
    assert record["step"] == 1
    assert said[0].startswith("checkpoint of step 2 is damaged and not used: ")


def test_checkpoint_under_another_steps_name_is_damage(copy):
    """Else a run to step 9 would end there without having saved its state."""
    (copy / "2").rename(copy / "9")
    state, record, said = restore(copy)
    assert record["step"] == 1 and equal(state, make_state(1))
    assert said[0] == "checkpoint of step 9 is damaged and not used: its record is that of step 2"
    assert Checkpoints(copy, report=print).newest_record()[0] == 1


@pytest.mark.parametrize("name", ["02", "²", "9" * 200])
def test_folders_that_no_step_is_called_are_left_alone(copy, name):
    shutil.copytree(copy / "1", copy / name)
    state, record, said = restore(copy)
    if name == "9" * 200:  # a number, and damaged
        assert "its record is that of step 1" in said.pop(0)
        assert said.pop(0).startswith("moved it to ")
    else:
        assert (copy / name).is_dir()
    assert record["step"] == 2 and said == []
    assert Checkpoints(copy, report=print).steps() == [1, 2]
