"""Long stages that are killed (SIGKILL) at random moments and taken up again: their artifacts have the same bytes.

    python tests/support/kill_stages.py --count 200 --seed 0

prints, for each stage, how often it was killed, how many artifacts were finished behind that, and how many of them
differ from those of a run without a kill.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from partial_subjects import STAGES

# Processes start from one that has imported this module and computed nothing.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["partial_subjects"])
MOST_KILLS = 4  # of one artifact
# The search's meter leaves no file behind when it has finished.
NAMES = [name for name, (_, module) in STAGES.items() if module is not None]


def run(name: str, target: Path) -> None:
    """A stage, in a process of its own."""
    torch.set_num_threads(1)
    STAGES[name][0](target)


def killed(name: str, target: Path, seconds: float | None) -> bool:
    """Whether the stage was killed after ``seconds``, None: never. Raises RuntimeError where it failed by itself."""
    process = CONTEXT.Process(target=run, args=(name, target))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
    process.join()
    if process.exitcode not in (0, -9):
        raise RuntimeError(f"{name}: exit code {process.exitcode}")
    return process.exitcode == -9


def kill_and_compare(name: str, count: int, seed: int) -> Counter[str]:
    """Counts of "kills" (at least ``count``), "finished" and "differ"."""
    rng, counts = random.Random(f"{seed} {name}"), Counter({"kills": 0, "finished": 0, "differ": 0})
    with tempfile.TemporaryDirectory() as place:
        for attempt in ("cold", "warm"):  # the first starts the server of processes, too
            target = Path(place) / attempt / "x.safetensors"
            target.parent.mkdir()
            started = time.monotonic()
            killed(name, target, None)
            seconds = time.monotonic() - started
        expected = target.read_bytes()
        while counts["kills"] < count:
            target = Path(place) / str(counts["finished"]) / "x.safetensors"
            target.parent.mkdir()
            wanted = rng.randint(1, MOST_KILLS)
            for _ in range(wanted):
                if not killed(name, target, rng.uniform(0, seconds)):
                    break
                counts["kills"] += 1
            killed(name, target, None)
            counts["finished"] += 1
            counts["differ"] += target.read_bytes() != expected
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="kills in all, shared by the stages")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    total = Counter[str]()
    print(f"{'stage':12}{'kills':>8}{'finished':>10}{'differ':>8}")
    for name in NAMES:
        counts = kill_and_compare(name, -(-options.count // len(NAMES)), options.seed)
        total += counts
        print(f"{name:12}{counts['kills']:>8}{counts['finished']:>10}{counts['differ']:>8}", flush=True)
    print(f"{'all':12}{total['kills']:>8}{total['finished']:>10}{total['differ']:>8}")
    return int(total["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
