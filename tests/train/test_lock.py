"""Two runs in one folder: the second is refused; the lock dies with its process."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from normfuse.train.cli import main
from normfuse.train.lock import locked
from normfuse.train.run_dir import RunDir

_HOLD = """
import pathlib, sys
from normfuse.train.lock import locked
with locked(pathlib.Path(sys.argv[1]), print):
    print("taken", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has the lock of this test's run."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "run" / ".lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def test_second_run_in_a_folder_is_refused(holder, train, tmp_path):
    code, out, err = train(steps=2)
    assert code == 2 and err.count("\n") == 1
    assert f"--out-dir {tmp_path / 'run'} is in use by another process (`fuser {tmp_path}" in err
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    holder.kill()
    holder.wait()
    assert train(steps=2)[0] == 0


def test_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    said: list[str] = []
    with locked(tmp_path / ".lock", said.append):
        assert "is on a file system without locks" in said[0]


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    path = tmp_path / ".lock"
    path.symlink_to("thesis")
    with pytest.raises(ValueError, match="cannot be written to"):
        locked(path, print).__enter__()
    assert not (tmp_path / "thesis").exists()


def test_runs_that_start_in_one_second_do_not_share_a_folder(tmp_path, monkeypatch, flags, capsys):
    """Without --out-dir, a run's folder has the time's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("normfuse.train.run.time.time", lambda: 1.8e9)
    assert [main(["train", *flags(out_dir=None, steps=2)]) for _ in range(2)] == [0, 2]
    (folder,) = (tmp_path / "runs").iterdir()
    assert RunDir(folder).has_checkpoints()
    assert (
        f"--out-dir runs/{folder.name} cannot be written to: File exists" in capsys.readouterr().err
    )
