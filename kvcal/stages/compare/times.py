"""What each artifact of a folder took to make, without asking the stages that make them.

Stages run one after the other and each writes one file when it is done, so a stage's time is from the end of the one
before (at first: the start) to the writing of its file. Times belong to the bytes made: they are kept by sha256, and a
file that lies there unchanged, or is copied into another folder, still has its time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def artifacts(folder: Path) -> dict[str, str]:
    """The sha256 of every finished artifact in ``folder``, by file name, the oldest first."""
    files = [path for path in folder.glob("*.safetensors") if ".partial." not in path.name]
    files.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextmanager
def timed(folder: Path, seconds: dict[str, float]) -> Iterator[list[str]]:
    """Note in ``seconds``, by sha256, what every artifact took that is made within; their names are in the list
    afterwards. Also when it is left by an error: what was finished until then has its time."""
    before, previous, made = artifacts(folder), time.time(), list[str]()
    try:
        yield made
    finally:
        for name, digest in artifacts(folder).items():
            if before.get(name) != digest:
                written = (folder / name).stat().st_mtime
                # The first time stays. Clocks of files are coarse, and may be behind.
                seconds.setdefault(digest, round(max(0.0, written - previous), 3))
                previous = max(previous, written)
                made.append(name)


def total(stages: Mapping[str, str], seconds: Mapping[str, float]) -> float | None:
    """Seconds of all ``stages`` (sha256 by file name) together; None where one of them is not known."""
    if any(digest not in seconds for digest in stages.values()):
        return None
    return round(sum(seconds[digest] for digest in stages.values()), 3)
