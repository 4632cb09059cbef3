"""The user's cache folder: files that are made again wherever they are lost, such as grids and compiled kernels.

A folder that cannot be written to costs the making at every start, and is a warning.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from kvcal.artifact import write_bytes_atomic
from kvcal.errors import ArtifactError

_warned: set[Path] = set()


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/kvcal, or ~/.cache/kvcal where the variable is unset or (as its standard asks) not absolute. The
    home of a user without one is /."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        folder = Path("/", os.path.expanduser("~").removeprefix("~"), ".cache")
    return folder / "kvcal"


def keep(path: Path, data: bytes, what: str) -> None:
    """Write a file of the cache folder whole, and its folder; where that fails, warn, once a folder, that ``what`` will
    be made again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, data, by_all_ranks=True)
    except (OSError, ArtifactError) as error:
        if path.parent not in _warned:
            _warned.add(path.parent)
            warnings.warn(
                f"{what} are not kept in {path.parent} and will be made again at every start: {error}; hint: set "
                "XDG_CACHE_HOME to a folder that can be written",
                RuntimeWarning,
                stacklevel=3,
            )
