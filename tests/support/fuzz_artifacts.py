"""Mutated artifacts, sealed with a right digest: each is refused with ArtifactError, or good for what it says.

    python tests/support/fuzz_artifacts.py --count 1000000 --seed 0 --processes 12 [--seconds 500]
        [--record counts.jsonl] [--kind plan] [--command-every 4000] [--show 3]

prints, for each kind, how many files were refused, accepted and held what they say, accepted and did not ("wrong"),
raised another kvcal error than ArtifactError ("other"), raised anything else ("raw"), killed the process ("crash"), or
took too long ("hang"). One file in so many goes through a command of kvcal, too, in a process of its own: "command"
counts those whose exit code is not the one that the file deserves. What the record holds is not done again: the same
line goes on there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import shards
import torch
from artifact_mutations import Content, canonical, content_of, mutated_artifact, mutated_side_file, sealed
from artifact_subjects import Subject, subjects
from cli_cases import kvcal_process
from shards import Lost, Shard

from kvcal.errors import ArtifactError, InfeasibleBudget, KvcalError, NonFiniteActivations

OUTCOMES = ("refused", "accepted", "wrong", "other", "raw", "crash", "hang", "command")
BAD = OUTCOMES[2:]
SECONDS = 5
SPARE_BYTES = 4 << 30
SHARD_FILES = 500
# Command lines that read a file of a kind; {} is the folder it lies in, under its name there.
COMMANDS = {
    "plan": ("plan.safetensors", "inspect {}/plan.safetensors --json"),
    "profile": ("profile.safetensors", "allocate {} --bits 16 --batch 2 --context 512 --json"),
    "allocation": ("allocation.safetensors", "compile {} --json"),
    "comparison": ("compare.json", "report {} --json"),
    "evaluation": ("evaluation.json", "report {} --json"),
}
REFUSALS = (ArtifactError.exit_code, InfeasibleBudget.exit_code)


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


def outcome_of_command(kind: str, path: Path, known: str) -> tuple[str, str]:
    """("command", what is wrong) where the command of a kind takes the file for another than it is; else ``known``, the
    outcome of its use."""
    name, line = COMMANDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / name)
        done = kvcal_process(*line.format(folder).split())
    allowed = (0,) if known == "accepted" else (0, *REFUSALS)
    if done.code not in allowed or "Traceback" in done.err:
        return "command", f"exit code {done.code} of a file that is {known}: {done.err[-1000:]}"
    return known, ""


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


def fuzz(
    subject: Subject,
    numbers: Iterable[int],
    seed: int,
    command_every: int = 0,
    tell: Callable[[int], None] = lambda number: None,
) -> tuple[Counter[str], list[tuple[str, str]]]:
    """How many files of each outcome, and (outcome, message) of the bad ones. A file's number and the seed make it."""
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
            tell(number)
            write_mutant(sound, random.Random(f"{seed} {subject.kind} {subject.name} {number}"), path)
            found = outcome(subject, path)
            if subject.kind == "plan" and found[0] == "refused" and states_other_bytes(path, found[1]):
                found = outcome(subject, path)
            if command_every and number % command_every == 0 and subject.kind in COMMANDS:
                found = outcome_of_command(subject.kind, path, found[0])
            counts[found[0]] += 1
            if found[0] in BAD:
                bad.append((f"{found[0]} {number}", found[1]))
    return counts, bad


def key_of(subject: Subject) -> str:
    return f"{subject.kind}: {subject.name}" if subject.name else subject.kind


def fuzz_shards(seed: int, command_every: int) -> Callable[[Shard, Callable[[int], None]], Any]:
    """A worker's function. Its files lie in memory where that has a folder: a disk takes as long as a check."""
    torch.set_num_threads(1)
    if Path("/dev/shm").is_dir():
        tempfile.tempdir = "/dev/shm"
    of_key = {key_of(subject): subject for subject in subjects()}

    def work(shard: Shard, tell: Callable[[int], None]) -> tuple[Counter[str], list[tuple[str, str]]]:
        return fuzz(of_key[shard.key], range(shard.first, shard.last), seed, command_every, tell)

    return work


def left(done: list[Shard], whole: Shard) -> Iterator[Shard]:
    """Of a shard, what is in none of ``done``."""
    first = whole.first
    for one in sorted((one for one in done if one.key == whole.key), key=lambda one: one.first):
        if one.last > first and one.first < whole.last:
            if one.first > first:
                yield Shard(whole.key, first, one.first)
            first = one.last
    if first < whole.last:
        yield Shard(whole.key, first, whole.last)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="files in all, shared by the subjects")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="this kind alone")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--record", type=Path, help="JSON lines; what they count is not done again")
    parser.add_argument("--command-every", type=int, default=4000, help="one file in so many goes through a command")
    parser.add_argument("--show", type=int, default=2, help="messages of each kind and outcome")
    options = parser.parse_args()
    kinds = {key_of(one): one.kind for one in subjects() if options.kind in (None, one.kind)}
    each = -(-options.count // len(kinds))
    lines = options.record.read_text().splitlines() if options.record and options.record.exists() else []
    records = [one for one in map(json.loads, lines) if one["seed"] == options.seed and one["key"] in kinds]
    done = [Shard(one["key"], one["first"], one["last"]) for one in records]
    wanted = [
        part
        for first in range(0, each, SHARD_FILES)
        for key in kinds
        for part in left(done, Shard(key, first, min(each, first + SHARD_FILES)))
    ]
    started, start = time.monotonic(), functools.partial(fuzz_shards, options.seed, options.command_every)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(options.record.open("a")) if options.record else None
        for shard, found in shards.run(wanted, start, options.processes, options.seconds):
            if isinstance(found, Lost):
                found = Counter({found.why: 1}), [(f"{found.why} {shard.first}", f"exit code {found.code}")]
            one = {"seed": options.seed, "key": shard.key, "first": shard.first, "last": shard.last}
            records.append(one | {"counts": found[0], "bad": found[1]})
            if file:
                print(json.dumps(records[-1]), file=file, flush=True)
    show(records, kinds, options.show)
    print(f"{time.monotonic() - started:.0f} s, {options.processes} processes")
    return int(any(one["bad"] for one in records))


def show(records: list[dict[str, Any]], kinds: dict[str, str], most: int) -> None:
    """The table of counts by kind on stdout, and messages of bad files on stderr."""
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in kinds.values()}
    shown: Counter[str] = Counter()
    for one in records:
        kind = kinds[one["key"]]
        totals[kind].update(one["counts"])
        for found, message in one["bad"]:
            last = f"{kind} {message.strip().splitlines()[-1][:60]}"
            shown[last] += 1
            if shown[last] <= 1 and len([name for name in shown if name.startswith(f"{kind} ")]) <= most:
                print(f"{one['key']}, {found}: {message[-1500:]}", file=sys.stderr)
    totals["all"] = sum(totals.values(), Counter[str]())
    print(f"{'kind':20}" + "".join(f"{name:>10}" for name in (*OUTCOMES, "files")))
    for kind, counts in totals.items():
        print(f"{kind:20}" + "".join(f"{counts[name]:>10}" for name in OUTCOMES) + f"{counts.total():>10}")


if __name__ == "__main__":
    sys.exit(main())
