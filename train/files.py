"""Files of a run: each is whole at every moment."""

import os
from pathlib import Path

PART = ".part"  # ends the name of a file that is being written


def write(path: Path, content: str | bytes) -> None:
    """Makes a file hold this content, or leaves it as it was, also where it is killed.

    Raises:
      OSError: it cannot be written.
    """
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a device is written to; a folder raises
        path.write_bytes(content)
    elif not path.exists() or path.read_bytes() != content:
        beside = path.with_name(path.name + PART)
        beside.unlink(missing_ok=True)  # from a run that was killed
        try:
            with beside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # some file systems tell only here that they are full
            os.replace(beside, path)
        except BaseException as error:
            if isinstance(error, OSError):  # that of a full disk names no file
                error.filename = os.fspath(path)
            beside.unlink(missing_ok=True)
            raise
