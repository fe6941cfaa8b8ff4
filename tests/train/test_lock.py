"""Two runs in one folder: the second waits, and says for whom; the lock dies with its process."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest
import signalled

from normfuse.train import lock as lock_module
from normfuse.train.cli import main
from normfuse.train.lock import FolderLock
from normfuse.train.run_dir import RunDir

_HOLD = """
import pathlib, sys
from normfuse.train.lock import FolderLock
FolderLock(pathlib.Path(sys.argv[1]), print).take(0, lambda: False, lambda: None)
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


@pytest.fixture
def while_waiting(monkeypatch):
    """Has something happen between the first and the second attempt."""

    def do(action):
        polled = []

        def sleep(seconds):
            if not polled:
                action()
            polled.append(seconds)

        monkeypatch.setattr(lock_module.time, "sleep", sleep)

    return do


def test_second_run_in_a_folder_is_told_who_is_there(holder, train, tmp_path):
    code, out, err = train(lock_timeout=0)
    assert code == 2 and err.count("\n") == 1
    assert f"--out-dir {tmp_path / 'run'} is in use by process {holder.pid}" in err
    assert f" on {socket.gethostname()} since " in err and "--lock-timeout 0 s" in err
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_requeued_run_waits_for_its_predecessor_and_its_lock_dies_with_it(
    holder, train, while_waiting, tmp_path
):
    def end():
        holder.kill()
        holder.wait()

    while_waiting(end)
    code, out, err = train(steps=2)
    assert (code, err) == (0, "")
    waits = f"is in use by process {holder.pid} on {socket.gethostname()} since "
    assert waits in out and "; waiting for its end, at most --lock-timeout 120 s" in out
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


def test_signal_ends_the_waiting(holder, train, while_waiting, monkeypatch):
    real = signalled.time.sleep
    monkeypatch.setattr(signalled, "time", type("time", (), {"sleep": staticmethod(real)}))
    while_waiting(lambda: signalled.send(signal.SIGTERM))
    code, out, err = train()
    assert (code, err) == (0, "")
    assert "stopped by SIGTERM while waiting for --out-dir" in out


def test_finished_run_leaves_its_folder_to_the_next(train, tmp_path):
    assert train(steps=2)[0] == 0
    lock = FolderLock(tmp_path / "run" / ".lock", print)
    assert lock.take(0, lambda: False, lambda: None)
    lock.release()
    assert train(steps=4, lock_timeout=0)[0] == 0


def test_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    said: list[str] = []
    assert FolderLock(tmp_path / ".lock", said.append).take(0, lambda: False, lambda: None)
    assert "is on a file system without locks (No locks available)" in said[0]


def test_lock_of_anything_else_is_described_safely(tmp_path):
    path = tmp_path / ".lock"
    path.write_bytes(b"\xff\x1b[2J")
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"is in use by \S+x1b\[2J, after"):
            FolderLock(path, print).take(0, lambda: False, lambda: None)
    path.unlink()
    path.symlink_to("thesis")  # is not followed
    with pytest.raises(ValueError, match="cannot be written to"):
        FolderLock(path, print).take(0, lambda: False, lambda: None)
    assert not (tmp_path / "thesis").exists()


def test_runs_that_start_in_one_second_get_folders_of_their_own(tmp_path, monkeypatch, flags):
    """Without --out-dir, a run's folder has the time's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("normfuse.train.run.time.time", lambda: 1.8e9)
    for _ in range(2):
        assert main(["train", *flags(out_dir=None, steps=2)]) == 0
    first, second = sorted((tmp_path / "runs").iterdir())
    assert second.name == f"{first.name}-2"
    assert RunDir(first).has_checkpoints() and RunDir(second).has_checkpoints()
