"""Mutated artifacts, sealed with a right digest: each is refused with ArtifactError, or good for what it says.

    python tests/support/fuzz_artifacts.py --count 1000000 --seed 0 [--kind plan]

prints, for each kind, how many files were refused, accepted and held what they say, accepted and did not ("wrong"),
raised another kvcal error than ArtifactError ("other"), raised anything else ("raw"), or took too long ("hang").
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from artifact_mutations import Content, canonical, content_of, mutated_artifact, mutated_side_file, sealed
from artifact_subjects import Subject, subjects

from kvcal.errors import ArtifactError, InfeasibleBudget, KvcalError, NonFiniteActivations

OUTCOMES = ("refused", "accepted", "wrong", "other", "raw", "hang")
SECONDS = 5
SPARE_BYTES = 4 << 30


class TooLong(BaseException):
    """Not to be caught by what is tested."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TooLong after so many seconds of CPU time."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def limited_memory(spare_bytes: int) -> Iterator[None]:
    """MemoryError beyond what the process has now and so much more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(subject: Subject, path: Path) -> tuple[str, str]:
    """(one of OUTCOMES, the message)."""
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            subject.use(path)
    except ArtifactError as error:
        return "refused", error.message
    except (NonFiniteActivations, InfeasibleBudget) as error:  # numbers that a sound file may hold, found out in use
        return "refused", error.message
    except AssertionError as error:
        if error.args:
            return "wrong", str(error)
        return "raw", traceback.format_exc(limit=-4)
    except KvcalError as error:
        return "other", f"{type(error).__name__}: {error.message}"
    except TooLong:
        return "hang", "".join(traceback.format_exc(limit=-6))
    except Exception:  # noqa: BLE001
        return "raw", traceback.format_exc(limit=-4)
    return "accepted", ""


def write_mutant(sound: bytes | Content, rng: random.Random, path: Path) -> None:
    if isinstance(sound, bytes):
        path.write_text(mutated_side_file(sound.decode(), rng))
    else:
        path.write_bytes(mutated_artifact(sound, rng))


def states_other_bytes(path: Path, message: str) -> bool:
    """Whether a plan was refused for stating other bytes than its layers take. It is made to state these: the mutation
    has to fail by something else."""
    taken = re.search(r"but its layers take (\d+)", message)
    if taken:
        content = content_of(path.read_bytes())
        body = json.loads(content.body) | {"predicted_bytes": int(taken[1])}
        path.write_bytes(sealed(replace(content, body=canonical(body))))
    return bool(taken)


def fuzz(subject: Subject, numbers: Iterable[int], seed: int) -> tuple[Counter[str], list[str]]:
    """How many files of each outcome, and what is wrong with the bad ones. A file's number and the seed make it."""
    counts: Counter[str] = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as folder, limited_memory(SPARE_BYTES):
        path = Path(folder) / "file"
        subject.write(path)
        found = outcome(subject, path)
        assert found[0] == "accepted", found
        written = path.read_bytes()
        sound = written if written.startswith(b"{") else content_of(written)
        for number in numbers:
            write_mutant(sound, random.Random(f"{seed} {subject.kind} {subject.name} {number}"), path)
            found = outcome(subject, path)
            if subject.kind == "plan" and found[0] == "refused" and states_other_bytes(path, found[1]):
                found = outcome(subject, path)
            counts[found[0]] += 1
            if found[0] not in ("refused", "accepted"):
                bad.append(f"{found[0]}, {subject.kind} {subject.name} {number}: {found[1]}")
    return counts, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="files in all, shared by the subjects")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="this kind alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [one for one in subjects() if options.kind in (None, one.kind)]
    totals: dict[str, Counter[str]] = {}
    is_bad = False
    for subject in chosen:
        counts, bad = fuzz(subject, range(-(-options.count // len(chosen))), options.seed)
        totals.setdefault(subject.kind, Counter()).update(counts)
        print(*bad[:2], sep="\n", file=sys.stderr)
        is_bad |= bool(bad)
    totals["all"] = sum(totals.values(), Counter[str]())
    print(f"{'kind':20}" + "".join(f"{name:>10}" for name in (*OUTCOMES, "files")))
    for kind, counts in totals.items():
        print(f"{kind:20}" + "".join(f"{counts[name]:>10}" for name in OUTCOMES) + f"{counts.total():>10}")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
