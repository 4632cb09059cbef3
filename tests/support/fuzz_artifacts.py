"""Mutated artifacts, sealed with a right digest: each is refused with ArtifactError, or good for what it says.

    python tests/support/fuzz_artifacts.py --count 1000000 --seed 0 [--kind plan] [--show 3]

prints, for each kind, how many files were refused, accepted and held what they say, accepted and did not ("wrong"),
raised another kvcal error than ArtifactError ("other"), raised anything else ("raw"), or took too long ("hang").
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from artifact_mutations import content_of, mutated_artifact, mutated_side_file, sealed
from artifact_subjects import Subject, subjects

from kvcal import load_plan
from kvcal.errors import ArtifactError, InfeasibleBudget, KvcalError, NonFiniteActivations

OUTCOMES = ("refused", "accepted", "wrong", "other", "raw", "hang")
BAD = OUTCOMES[2:]
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


def mutants(subject: Subject, folder: Path, count: int, seed: int) -> Iterator[Path]:
    """``count`` files, one at a time in the same place."""
    path = folder / "file"
    subject.write(path)
    sound = path.read_bytes()
    found = outcome(subject, path)
    assert found[0] == "accepted", found
    for number in range(count):
        rng = random.Random(f"{seed} {subject.kind} {subject.name} {number}")
        if sound.startswith(b"{"):
            path.write_text(mutated_side_file(sound.decode(), rng))
        else:
            path.write_bytes(mutated_artifact(content_of(sound), rng))
            if subject.kind == "plan":
                state_predicted_bytes(path)
        yield path


def state_predicted_bytes(path: Path) -> None:
    """A plan that states other bytes than its layers take is made to state these: it has to fail by something else."""
    try:
        with limited(SECONDS):
            load_plan(path)
    except ArtifactError as error:
        taken = re.search(r"but its layers take (\d+)", error.message)
        if taken:
            head, tensors = content_of(path.read_bytes())
            path.write_bytes(sealed(head | {"body": head["body"] | {"predicted_bytes": int(taken[1])}}, tensors))
    except (Exception, TooLong):  # for ``outcome`` to tell
        return


def fuzz(subject: Subject, count: int, seed: int) -> tuple[Counter[str], list[tuple[str, str]]]:
    """How many files of each outcome, and (outcome, message) of the bad ones."""
    counts: Counter[str] = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as folder, limited_memory(SPARE_BYTES):
        for number, path in enumerate(mutants(subject, Path(folder), count, seed)):
            found, message = outcome(subject, path)
            counts[found] += 1
            if found in BAD:
                bad.append((f"{found} {number}", message))
    return counts, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="files in all, shared by the kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="this kind alone")
    parser.add_argument("--show", type=int, default=2, help="messages of each kind and outcome")
    options = parser.parse_args()
    chosen = [subject for subject in subjects() if options.kind in (None, subject.kind)]
    of_kind = Counter(subject.kind for subject in chosen)
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in of_kind}
    for subject in chosen:
        counts, bad = fuzz(subject, -(-options.count // len(of_kind) // of_kind[subject.kind]), options.seed)
        totals[subject.kind] += counts
        shown: Counter[str] = Counter()
        for found, message in bad:
            last = message.strip().splitlines()[-1][:60]
            shown[last] += 1
            if shown[last] <= 1 and len(shown) <= options.show:
                print(f"{subject.kind} {subject.name}, {found}: {message[-1500:]}", file=sys.stderr)
    print(f"{'kind':20}" + "".join(f"{name:>10}" for name in OUTCOMES))
    for kind, counts in totals.items():
        print(f"{kind:20}" + "".join(f"{counts[name]:>10}" for name in OUTCOMES))
    whole = sum(totals.values(), Counter[str]())
    print(f"{'all':20}" + "".join(f"{whole[name]:>10}" for name in OUTCOMES) + f"{whole.total():>10} files")
    return int(any(whole[name] for name in BAD))


if __name__ == "__main__":
    sys.exit(main())
