"""Commands of kvcal that write, killed (SIGKILL) at random moments and taken up again by the same line: what they leave
has the same bytes as without a kill.

    python tests/support/kill_commands.py --count 200 --seed 0 [--processes 2] [--only tune]

prints, for each command line, how often it was killed, how many of its folders were finished behind that, and how many
of them differ from that of a run without a kill. A tiny model; a line's folder may begin with what another has left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from cli_cases import RECIPE, save_llama
from transformers import AutoTokenizer
from tune_cases import RECIPE as TUNED

from kvcal import __main__ as cli
from kvcal.embedded import model_folder

# Processes start from one that has imported what commands import, and computed nothing.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["kill_commands", "kvcal.run.pipeline", "kvcal.stages.compare", "kvcal.charts.report"])
MOST_KILLS = 4  # of one folder
TRANSFORMS = """
[reparam]
position_scale = 1.0
num_steps = 2
num_samples = 2
seq_len = 200
[predictors]
drop = false
[feedback]
num_samples = 2
seq_len = 200
"""
SEARCH = """
[search]
serve = "storage"
systems = []
keys = [{ num_bits = 2, axis = "channel", group_size = 32 }, { num_bits = 4 }, { num_bits = 8 }]
values = [{ num_bits = 2, group_size = 32 }, { num_bits = 4 }, { num_bits = 8 }]
kl_samples = 2
kl_tokens = 250
refine_rounds = 1
"""
BUDGET = RECIPE.replace('same_bytes_as = "kivi-2"', "bits = 5.0")
RECIPES = {
    "small": RECIPE,
    "transforms": RECIPE + TRANSFORMS,
    "searched": BUDGET.replace("num_samples = 2", "num_samples = 4", 1) + SEARCH,
    "tuned": TUNED,
}
SIZES = "--batch 2 --context 4096"


@dataclass(frozen=True)
class Line:
    """``text`` in which {out} is the line's folder, {model} and {recipes} those of all; ``begins``: the name of the
    line whose finished folder this one's begins with."""

    text: str
    begins: str | None = None


LINES = {
    "profile": Line("profile {model} --out {out} --recipe {recipes}/transforms.toml"),
    "allocate": Line("allocate {out} --bits 6 --reserve 20KB " + SIZES, "profile"),
    "reparam": Line("reparam {out} --model {model} --recipe {recipes}/transforms.toml", "allocate"),
    "fit-predictors": Line("fit-predictors {out} --model {model} --recipe {recipes}/transforms.toml", "reparam"),
    "feedback": Line("feedback {out} --model {model} --recipe {recipes}/transforms.toml", "fit-predictors"),
    "compile": Line("compile {out}", "feedback"),
    "plan": Line("plan {model} --recipe {recipes}/small.toml --out {out} --bits 5 -o {out}/a.safetensors " + SIZES),
    "plan --search": Line("plan {model} --recipe {recipes}/searched.toml --search --out {out} --bits 5 " + SIZES),
    "search": Line("search {recipes}/searched.toml --model {model} --out {out} --bits 5 " + SIZES),
    "tune": Line("tune {recipes}/tuned.toml --model {model} --out {out}"),
    "run": Line("run {recipes}/small.toml --model {model} --out {out}"),
    "compare": Line("compare {recipes}/small.toml --model {model} --recipe {recipes}/small.toml --out {out} --bits 5"),
    "eval": Line("eval {out}/plan.safetensors --model {model} --recipe {recipes}/small.toml --out {out}", "compile"),
    "pack-prefix": Line(
        "pack-prefix --model {model} --plan {out}/plan.safetensors --prompt {text} -o {out}/prefix.safetensors",
        "compile",
    ),
    "export": Line("export {out}/plan.safetensors --to vllm-args -o {out}/vllm.args", "compile"),
    "report": Line("report {out}/small-5bits-2x4096", "plan"),
}


def furnish(place: Path) -> None:
    """The model and the recipes that all lines name."""
    save_llama(place / "model", AutoTokenizer.from_pretrained(model_folder()), dtype=torch.float32)
    for name, text in RECIPES.items():
        (place / f"{name}.toml").write_text(text)


def log_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def run_line(name: str, place: Path, out: Path) -> None:
    """The command in this process, which is made the leader of a group, with its output into a log beside the folder.
    Raises SystemExit where it fails."""
    os.setsid()
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    words = {"out": str(out), "model": str(place / "model"), "recipes": str(place), "text": "Times. 12 x 34 " * 40}
    sys.argv = ["kvcal", *(word.format(**words) for word in LINES[name].text.split())]
    with log_of(out).open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        cli.main()


def content(out: Path) -> dict[str, bytes]:
    """All files of a folder, without its own name and seconds that were measured. Of a report that draws such seconds,
    its end alone."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    return {str(path.relative_to(out)): _timeless(path).replace(str(out).encode(), b"OUT") for path in files}


def _timeless(path: Path) -> bytes:
    if path.suffix == ".json":
        return json.dumps(json.loads(path.read_text(), object_pairs_hook=_without_seconds)).encode()
    draws_seconds = path.name == "report.html" and (path.parent / "evaluation.json").is_file()
    return path.read_bytes()[-8:] if draws_seconds else path.read_bytes()


def _without_seconds(pairs: list[tuple[str, object]]) -> dict[str, object]:
    return {name: value for name, value in pairs if name not in ("seconds", "stage_seconds", "digest")}


def killed(name: str, place: Path, out: Path, seconds: float | None) -> bool:
    """Whether the line's process was killed after ``seconds``, None: never. Raises RuntimeError where it failed by
    itself."""
    process = CONTEXT.Process(target=run_line, args=(name, place, out))
    process.start()
    process.join(seconds)
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # not yet the leader of a group
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{name}: exit code {process.exitcode}: {log_of(out).read_text()[-2000:]}")
    return process.exitcode == -signal.SIGKILL


class Finished:
    """Folders of lines that ran through without a kill, in ``place``, and the seconds that each took."""

    def __init__(self, place: Path) -> None:
        self.place, self.seconds = place, dict[str, float]()
        furnish(place)
        starter = CONTEXT.Process(target=os.getpid)  # the server of processes, which imports for seconds
        starter.start()
        starter.join()

    def folder(self, name: str) -> Path:
        return self.place / "finished" / name.replace(" ", "")

    def begin(self, name: str, out: Path) -> None:
        """Make the line's folder as it is before its first start."""
        before = LINES[name].begins
        if before is None:
            out.mkdir(parents=True)
        else:
            shutil.copytree(self.folder(before), out)

    def make(self, name: str) -> None:
        """Run the line, and those that it begins with, unless they have run."""
        if name in self.seconds:
            return
        before = LINES[name].begins
        if before is not None:
            self.make(before)
        self.begin(name, self.folder(name))
        started = time.monotonic()
        killed(name, self.place, self.folder(name), None)
        self.seconds[name] = time.monotonic() - started


def kill_and_compare(name: str, finished: Finished, count: int, seed: int) -> Counter[str]:
    """Counts of "kills" (at least ``count``), "finished" and "differ"."""
    rng, counts = random.Random(f"{seed} {name}"), Counter({"kills": 0, "finished": 0, "differ": 0})
    expected, place = content(finished.folder(name)), finished.place
    while counts["kills"] < count:
        out = place / "killed" / name.replace(" ", "") / str(counts["finished"])
        finished.begin(name, out)
        for _ in range(rng.randint(1, MOST_KILLS)):
            if not killed(name, place, out, rng.uniform(0, finished.seconds[name])):
                break
            counts["kills"] += 1
        killed(name, place, out, None)
        counts["finished"] += 1
        counts["differ"] += content(out) != expected
        shutil.rmtree(out)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=32, help="kills in all, shared by the lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="lines that run at a time")
    parser.add_argument("--only", choices=LINES, help="this line alone")
    options = parser.parse_args()
    names = [options.only] if options.only else list(LINES)
    total = Counter[str]()
    print(f"{'command':16}{'kills':>8}{'finished':>10}{'differ':>8}")
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.processes) as pool:
        finished = Finished(Path(place))
        for name in names:
            finished.make(name)
        each = -(-options.count // len(names))
        found = pool.map(lambda name: kill_and_compare(name, finished, each, options.seed), names)
        for name, counts in zip(names, found, strict=True):
            total += counts
            print(f"{name:16}{counts['kills']:>8}{counts['finished']:>10}{counts['differ']:>8}", flush=True)
    print(f"{'all':16}{total['kills']:>8}{total['finished']:>10}{total['differ']:>8}")
    return int(total["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
