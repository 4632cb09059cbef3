"""The worth of each part of the choice of bits, and of finer choices or other codes, at equal bytes.

    python lab/choice_of_bits.py --model path/to/model.gguf --data texts --bits 2.5 3 4
    python lab/choice_of_bits.py --model smollm2 --quick --bits 3 --texts 1 --tokens 1024     # a CPU

levers     the integer program's choice by layer, with one part more than the one before:
           law        costs on the default's texts, which fall with bits as squared errors do
           by-layer   how they fall is measured by side
           look-ups   a quarter of the texts looks up (kvcal.data.lookups)
           long       texts have 4,096 tokens
           and default, what ships of these choices and fixed widths after their contest on texts kept apart; K3V2, K4V2
           and K3V3, next to the program's choice of their bytes
layouts    costs and caches in stripes or whole pages; fixed widths of the same bytes (costs.py)
costs      costs of texts of 4,096 tokens, ordinary ones or look-ups (costs.py)
heads      keys of two widths in a layer, by KV head (finer.py)
levels     3, 5, 6 and 7 levels as options of the choice (finer.py)
trellis    trellis codes in place of scalar ones, with error feedback and without (trellis.py)

All plans have one basis. All texts go through the measuring cache at once, next to 16 bits (quality.py). Errors are
standard errors over texts; ratios are of means, paired. What is cheap and tells most comes first: OUT/choice.json has
all figures after every group of plans, and a second run goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from costs import measure_costs, measure_layouts
from finer import measure_heads, measure_levels
from quality import Texts, maker, read_missing, texts_for
from real import PRICED, cell, find_model, machine
from shared import mean_and_error, print_table, ratio_and_error
from trellis import measure_trellis

from kvcal import Folder, Plan, Recipe, load_model, load_recipe, with_knobs
from kvcal.artifact import write_text_atomic
from kvcal.console import TerminalReporter
from kvcal.data.reading import LINES
from kvcal.folder import Job, profile_data, profile_spec, sequences, tokenizer_of
from kvcal.models.load import LoadedModel
from kvcal.stages import divergence
from kvcal.stages.allocate.fixed_widths import Contest, report_of
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.formats import formats_plan, reserved_for
from kvcal.stages.measuring import dense_layer
from kvcal.stages.profile import record as profile_record
from kvcal.stages.profile.record import Profile
from kvcal.stages.profile.stage import run_profile
from kvcal.strict import dump
from kvcal.systems.basis.fit import BasisRecord
from kvcal.systems.basis.stage import basis_folder

FIRST, DEFAULT, LAW = "by-layer", "default", "law"
LOOK_UPS: dict[str, Any] = {"data.source": ["python:docs", "python:code", "lookups", "python:chat"]}
LONG = LOOK_UPS | {"data.num_samples": 8, "data.seq_len": 4096, "profile.kl_tokens": 4096}
PAGES: dict[str, Any] = {"cache.k_recent_window": 64, "cache.v_recent_window": 64, "cache.stripe_tokens": 128}
IN_PAGES = PAGES | {"cache.k_recent_window": 56, "cache.v_recent_window": 56}  # as many tokens at 16 bits on average
IN_PAGES |= {"data.num_samples": 8, "data.seq_len": 4096, "profile.kl_tokens": 4096}
KNOBS: dict[str, dict[str, Any]] = {  # of the recipe, for a profile
    FIRST: {}, "look-ups": LOOK_UPS, "long": LONG, "in pages": PAGES,
    "long text": IN_PAGES | {"data.source": ["python:docs", "python:code"]},
    "long look-ups": IN_PAGES | {"data.source": ["lookups"], "data.min_len": 4096},
}  # fmt: skip
FIXED = {"K3V2": (3, 2), "K4V2": (4, 2), "K3V3": (3, 3)}
QUICK = {
    "data.num_samples": 4,
    "data.seq_len": 512,
    "data.min_len": 512,
    "profile.kl_samples": 2,
    "profile.kl_tokens": 512,
}
QUICK |= {"basis.num_samples": 4, "basis.seq_len": 512}
PARTS: dict[str, Callable[[Bench], None]] = {
    "levers": lambda bench: measure_levers(bench), "layouts": measure_layouts, "costs": measure_costs,
    "heads": measure_heads, "levels": measure_levels, "trellis": measure_trellis,
}  # fmt: skip


@dataclass(eq=False)
class Bench:
    """A model with its texts, and what was found so far. ``found``: "plans" by name, and what the parts have read."""

    loaded: LoadedModel
    given: argparse.Namespace
    reporter: TerminalReporter
    found: dict[str, Any]
    made: dict[str, Plan] = field(default_factory=dict)

    @cached_property
    def texts(self) -> Texts:
        return texts_for(self.loaded, self.given)

    def save(self, said: str = "") -> None:
        write_text_atomic(self.given.out / "choice.json", json.dumps(self.found, indent=1) + "\n")
        if said:
            self.reporter.say(said)

    def recipe(self, name: str, bits: float = 3.0) -> Recipe:
        knobs = dict(KNOBS[name]) | (QUICK if self.given.quick else {})
        if "python:chat" in knobs.get("data.source", ()) and not tokenizer_of(self.loaded).chat_template:
            knobs["data.source"] = knobs["data.source"][:-1]
        knobs |= {"allocate.bits": bits, "allocate.batch": PRICED.batch, "allocate.context": PRICED.context}
        return with_knobs(load_recipe("default"), knobs)

    def job(self, name: str, bits: float = 3.0) -> Job:
        folder = Folder.create(self.given.out / "plans" / name)
        return Job(self.recipe(name, bits), self.loaded, folder, self.reporter, PRICED)

    @cached_property
    def basis(self) -> BasisRecord:
        """Fitted once, on the default's texts."""
        started = time.monotonic()
        found = basis_folder(self.job(FIRST))
        self.found.setdefault("seconds", {}).setdefault("basis", time.monotonic() - started)
        return found

    def profile(self, name: str) -> Profile:
        """Measured once; what the law of squared errors starts from is part of the one by side."""
        if name == LAW:
            return self.profile(FIRST).by_law
        job = self.job(name)
        if not job.folder.profile.exists():
            started, recipe = time.monotonic(), job.recipe
            data, spec = sequences(profile_data(recipe, self.loaded), self.loaded), recipe.profile
            spec = profile_spec(spec, self.loaded)
            run_profile(self.loaded, data, spec, recipe.cache, {}, job.folder.profile, self.reporter, self.basis)
            self.found.setdefault("seconds", {})[f"profile of {name}"] = time.monotonic() - started
        return profile_record.load(job.folder.profile)

    def allocation(self, name: str, bits: float) -> Allocation:
        recipe, profile = self.recipe(FIRST, bits), self.profile(name)
        assert recipe.allocate is not None
        return allocate(profile, recipe.allocate, {}, self.reserved(recipe))

    def program(self, name: str, bits: float) -> Plan:
        """The integer program's plan."""
        return self.basis.planned(self.allocation(name, bits))

    def default(self, bits: float) -> Plan:
        """The plan of by-layer, or of another choice of its bytes."""
        job, basis = self.job(FIRST, bits), self.basis
        assert job.recipe.allocate is not None
        found = Contest.of(job).decided(
            self.allocation(FIRST, bits), self.profile(FIRST), job.recipe.allocate, self.reserved(job.recipe),
            self.reporter,
        )  # fmt: skip
        return basis.planned(found)

    def fixed(self, keys: int, values: int) -> Plan:
        recipe = with_knobs(load_recipe("k3v2"), {"formats.k.num_bits": keys, "formats.v.num_bits": values})
        return self.basis.changed(formats_plan(recipe, self.loaded, PRICED))

    def reserved(self, recipe: Recipe) -> int:
        assert recipe.allocate is not None
        return reserved_for(recipe, recipe.allocate, self.loaded.geometry, recipe.cache)

    def measure(self, plans: Mapping[str, tuple[Plan, float | str]]) -> None:
        """Each with the bits, or the fixed widths, of the by-layer plan that it is compared with, or with the name of
        another plan. Plans of the same layers are read once."""
        levers = self.found["levers"]
        for name, (plan, of) in plans.items():
            against = of if isinstance(of, str) else format(of, "g")
            self.note(name, plan, against if "@" in against else f"{FIRST}@{against}")
        alike = {
            name: next(one for one in self.made if self.made[one].layers == plan.layers)
            for name, (plan, _) in plans.items()
        }
        makers = {name: maker(self.made[name], self.loaded) for name, one in alike.items() if one == name}
        read_missing(self.loaded, makers, self.texts, levers, self.given.at_once, self.save)
        levers |= {name: levers[one] for name, one in alike.items()}
        self.save()

    def note(self, name: str, plan: Plan, against: str) -> str:
        """Note a plan, which is compared with the one of the name ``against``."""
        widths = {side: "".join(f"{layer.format(side).num_bits:x}" for layer in plan.layers) for side in ("k", "v")}
        report = report_of(plan)
        noted = {"bits": plan.bits_per_value(), "bytes": plan.predicted_bytes, "widths": widths, "against": against}
        self.found["plans"][name] = noted | ({} if report is None else {"contest": dump(report)})
        self.made[name] = plan
        return name


def main() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # which plans anew for every length of the past
    dense_layer.VALUES_AT_ONCE["cuda"] = divergence.MAX_COMPARED["cuda"] = 1 << 26  # few launches
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    path, reporter = given.out / "choice.json", TerminalReporter()
    loaded = load_model(find_model(given.model), device=given.device, dtype=given.dtype)
    found: dict[str, Any] = {"machine": machine(loaded), "plans": {}, "levers": {}}
    found |= json.loads(path.read_text()) if path.exists() else {}
    bench = Bench(loaded, given, reporter, found)
    with reporter.running():
        for part in given.parts:
            started = time.monotonic()
            PARTS[part](bench)
            bench.save(f"{part}: {time.monotonic() - started:.0f} s")
    print_results(found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument("--out", type=Path, help="folder of results; default: artifacts/choice-NAME")
    parser.add_argument("--data", type=Path, help="folder of texts, as for real.py")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["levers"])
    parser.add_argument("--bits", type=float, nargs="+", default=[2.5, 3.0])
    parser.add_argument("--quick", action="store_true", help="plans from few texts, for a CPU")
    parser.add_argument("--kinds", default="rows,copies,late,calls", help="of kvcal.data.lookup_tasks")
    parser.add_argument("--answers", type=int, default=12, help="texts of each of these kinds")
    parser.add_argument(
        "--tables", type=int, default=0, help="tables of long_generation.py, which all texts are as long as"
    )
    parser.add_argument("--rows", type=int, default=60, help="of a table")
    parser.add_argument("--texts", type=int, default=3, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--at-once", type=int, default=6, help="plans read side by side")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    if given.tables and given.kinds:
        parser.error("--tables with --kinds: texts are cut at a table's length; give --kinds ''")
    given.name = Path(given.model).stem
    given.out = given.out or Path("artifacts") / f"choice-{given.name}"
    given.retrieval, given.problems, given.batch = [], LINES * given.texts, 1 << 20  # of texts_of
    return given


def measure_levers(bench: Bench) -> None:
    """All plans of all bits, the most telling first. Plans of the same layers are read once."""
    every = bench.given.bits
    bench.measure({f"{name}@{bits:g}": (bench.program(name, bits), bits) for bits in every for name in (FIRST, LAW)})
    fixed = {name: bench.fixed(*widths) for name, widths in FIXED.items()}
    bits_of = {name: plan.bits_per_value() * (1 + 1e-6) for name, plan in fixed.items()}  # budgets are rounded down
    by_layer = {f"{FIRST}@{name}": (bench.program(FIRST, bits), name) for name, bits in bits_of.items()}
    bench.measure(by_layer | {name: (plan, name) for name, plan in fixed.items()})
    bench.measure({f"{DEFAULT}@{bits:g}": (bench.default(bits), bits) for bits in every})
    for lever in ("look-ups", "long"):
        bench.measure({f"{lever}@{bits:g}": (bench.program(lever, bits), bits) for bits in every})
    bench.measure({f"long@{name}": (bench.program("long", bits), name) for name, bits in bits_of.items()})


def read_cells(rows: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """KL of all text, over the base's, and its tails; of each task the nats lost an answer, and over the base's."""
    text, of_base = (
        torch.tensor([row for kind in one.values() for row in kind if len(row) == 4]) for one in (rows, base)
    )
    cells = [cell(mean_and_error(text[:, 0]), 1000), cell(ratio_and_error(text[:, 0], of_base[:, 0]), digits=3)]
    cells += [f"{1000 * float(text[:, part].mean()):.0f}" for part in (1, 2)]
    for kind, found in rows.items():
        if len(found[0]) > 4:
            right, exact, lost, count = torch.tensor(found).double()[:, :4].T
            of_base, share = torch.tensor(base[kind]).double()[:, 2], float(right.sum() / exact.sum().clamp_min(1))
            cells += [f"{share:.3f}", cell(ratio_and_error(lost, count), digits=3)]
            cells.append(cell(ratio_and_error(lost, of_base), digits=2))
    return cells


def read_table(title: str, read: dict[str, Any], against: dict[str, str], bits: dict[str, float]) -> None:
    """Each of ``read`` next to the one that ``against`` names."""
    if not read:
        return
    head = ["plan", "bits", "1,000 KL", "of base's", "99 %", "99.9 %"]
    for kind, rows in next(iter(read.values())).items():
        head += [f"{kind}, of 16 bits'", "nats lost", "of base's"] if len(rows[0]) > 4 else []
    rows = [
        [name, f"{bits.get(name, 0):.3f}", *read_cells(found, read[against[name]])]
        for name, found in read.items()
        if against.get(name) in read
    ]
    print_table(title, head, rows)


def print_results(found: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in found["machine"].items()))
    plans = found["plans"]
    against, bits = ({name: one[key] for name, one in plans.items()} for key in ("against", "bits"))
    read_table("Plans of equal bytes", found["levers"], against, bits)
    for part in ("heads", "levels", "trellis"):
        of_part = found.get(part, {})
        bases = of_part.get("against", {})
        read_table(f"Other choices: {part}", of_part.get("read", {}), bases, of_part.get("bits", {}))
    widths = [(name, *one["widths"].values()) for name, one in plans.items()]
    print_table("Bits of keys and values, layer by layer", ("plan", "keys", "values"), widths)
    contests = [(name, one["contest"]) for name, one in plans.items() if "contest" in one]
    shown = [
        (name, contest["shipped"], *(row[key] for key in ("name", "kl", "look_ups", "ratio", "log_error")))
        for name, contest in contests
        for row in contest["plans"]
    ]
    titles = ("plan", "ships", "measured", "KL of text", "of look-ups", "by layer's KL of this one's", "log error")
    print_table("What the default chose by", titles, shown)


if __name__ == "__main__":
    main()
