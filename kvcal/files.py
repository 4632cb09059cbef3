"""The files that a user names: regular ones alone. Reading a pipe may never end, and writing would replace it."""

from __future__ import annotations

import stat
from pathlib import Path

from kvcal.errors import KvcalError


def require_file(path: str | Path, error: type[KvcalError]) -> None:
    """Raise ``error`` if there is something at ``path`` that is no regular file, or the system does not take the name.
    A path with nothing at it is left to the caller."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as refused:
        raise error(f"{path}: {refused.strerror}", "check the path") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise error(f"{path} is {kind}; expected a regular file", "check the path")
