"""metrics.jsonl holds each step once, whatever interrupted the run."""

import json
from pathlib import Path

import pytest

from normfuse.train import RunError, metrics
from normfuse.train.display import duration, short
from normfuse.train.metrics import MetricsLog


def _step(step: int, loss: float = 1.0) -> dict:
    return {"step": step, "loss": loss}


def _validation(step: int) -> dict:
    return {"step": step, "val_loss": 1.0}


def _resumed(path, **options) -> list[dict]:
    log = MetricsLog(path, **options)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1].pop("time") > 0
    return lines


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = [_step(1), _step(2), _validation(2), _step(3)]
    later = [_step(4), _validation(4), {"event": "not finite", "step": 5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept + later) + '{"step": 5, "lo')
    assert _resumed(path, from_step=3) == [*kept, {"event": "resume", "from_step": 3}]


def test_earlier_resumes_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    resume = {"event": "resume", "from_step": 1}
    path.write_text("".join(json.dumps(x) + "\n" for x in [_step(1), resume, _step(2)]))
    lines = _resumed(path, from_step=2)
    assert lines == [_step(1), resume, _step(2), {"event": "resume", "from_step": 2}]


def test_validation_at_the_end_is_made_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = [_step(1), _validation(1), _step(2), _validation(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in before))
    assert _validation(2) not in _resumed(path, from_step=2, final=2)
    path.write_text("".join(json.dumps(line) + "\n" for line in before))
    assert _validation(2) in _resumed(path, from_step=2, final=3)


def test_new_run_starts_a_new_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(_step(1)) + "\n")
    MetricsLog(path).close()
    assert path.read_text() == ""


def test_full_disk_is_one_message():
    """/dev/full takes no byte."""
    log = MetricsLog.__new__(MetricsLog)
    log._path, log._file = Path("run/metrics.jsonl"), Path("/dev/full").open("w", buffering=1)
    for write in (lambda: log.write(_step(1)), log.sync, log.close):
        with pytest.raises(RunError, match="run/metrics.jsonl could not be written: No space left"):
            write()


def test_lines_are_json_even_of_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(_step(1, float("nan")))
    assert metrics.read(path) == [{"step": 1, "loss": None}]  # on disk before the log is closed
    log.close()


def test_numbers_are_written_for_people():
    assert [short(x) for x in (5, 999, 1000, 1_234_567, 8e9)] == ["5", "999", "1k", "1.23M", "8B"]
    assert [short(x) for x in (999.9e6, 2e12)] == ["1B", "2T"]
    assert [duration(x) for x in (0, 61, 3600, float("inf"))] == ["0:00", "1:01", "1:00:00", "-:--"]
