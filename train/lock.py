"""The lock on a run's folder: one trainer at a time.

It is flock(2) on the file `.lock`, so the operating system releases it when the process ends,
however it ends; the file itself stays and means nothing. Over NFS, Linux makes it a lock at the
server (version 3 with lockd, and 4), which other hosts see. After the death of a whole host, a
server of version 4 releases it when the host's lease runs out, 90 seconds by default; one of
version 3 when that host is up again. Mounts with `nolock` or `local_lock=flock`, and Lustre's with
`localflock`, lock among the processes of one host only.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from . import UsageError, distributed
from .arguments import one_line

_POLL = 0.25  # seconds between two attempts
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_TAKEN, _WAITING, _BUSY = range(3)


class FolderLock:
    """The lock on one folder, a file in it; `report` prints a line for the user."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._path, self._report = path, report
        self._file: int | None = None

    def take(self, seconds: int, stopping: Callable[[], bool], waiting: Callable[[], None]) -> bool:
        """Takes the lock; of several processes the first does, and all return the same.

        Waits for another process that has it, for so many seconds, and calls `waiting` before each
        further attempt. Returns False if `stopping` before that.

        Raises:
          UsageError: another process still has it, or the file cannot be written.
        """
        began, said = time.monotonic(), False
        while True:
            holder = self._try() if distributed.is_first() else None
            late = time.monotonic() - began >= seconds
            state = distributed.agree(_TAKEN if holder is None else _BUSY if late else _WAITING)
            if state == _TAKEN:
                return True
            used = f"--out-dir {self._path.parent} is in use by {holder or 'another run'}"
            if state == _BUSY:
                raise UsageError(
                    f"{used}, after --lock-timeout {seconds} s. Stop that one, or give another "
                    "--out-dir."
                )
            if not said:
                self._report(f"{used}; waiting for its end, at most --lock-timeout {seconds} s")
                said = True
            if distributed.anywhere(stopping()):
                return False
            waiting()
            time.sleep(_POLL)

    def release(self) -> None:
        """Releases the lock, if this process has it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _try(self) -> str | None:
        """Tries to take the lock; returns who has it instead, or None."""
        folder, file = self._path.parent, None
        try:  # not through a link: what it led to would be overwritten
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = error.strerror
            if file is None:
                raise UsageError(f"--out-dir {folder} cannot be written to: {why}") from None
            if error.errno not in _NO_LOCKS:
                holder = one_line(os.pread(file, 400, 0).decode(errors="replace"))
                os.close(file)
                return holder or "another process"
            self._report(
                f"{folder} is on a file system without locks ({why}): take care that no other run "
                "writes there"
            )
        job = os.environ.get("SLURM_JOB_ID")
        name = f"process {os.getpid()} on {socket.gethostname()}{f' (Slurm job {job})' * bool(job)}"
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its description
            os.ftruncate(file, 0)
            os.pwrite(file, f"{name} since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode(), 0)
        self._file = file
        return None
