"""The lock on a run's folder: one trainer at a time.

It is flock(2) on the file `.lock`, so the operating system releases it when the process ends,
however it ends; the file itself stays and means nothing. Over NFS, Linux makes it a lock at the
server, which other hosts see; mounts with `nolock`, `local_lock=flock` or Lustre's `localflock`
lock among the processes of one host only.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from . import UsageError, distributed

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock on a folder, a file in it; of several processes the first does.

    `report` prints a line for the user.

    Raises:
      UsageError: another process has it, or the file cannot be written.
    """
    if not distributed.is_first():
        yield
        return
    folder = path.parent
    try:  # not through a link: what it led to would be overwritten
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError(f"--out-dir {folder} cannot be written to: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(file)
            raise UsageError(
                f"--out-dir {folder} is in use by another process (`fuser {path}` finds it). Stop "
                "that one, wait for its end, or give another --out-dir."
            ) from None
        report(f"{folder} is on a file system without locks: no other run must write there")
    try:
        yield
    finally:
        os.close(file)
