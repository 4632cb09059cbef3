"""What each part of the choice of bits is worth, at equal bytes: KL of text, and what answers lose.

    python lab/choice_of_bits.py --model path/to/model.gguf --data texts --bits 2.5 3
    python lab/choice_of_bits.py --model smollm2 --quick --bits 3           # a CPU

Plans of the default recipe's profile, by layer, and with one part more than the one before:

by-layer   the integer program's choice, as the default makes it
look-ups   a quarter of the calibration texts looks up (kvcal.data.lookups)
long       costs by KL on texts of 4,096 tokens
sides      how KL falls with bits is measured by side
keys …     fixed widths of the bytes of by-layer, with its calibration (kvcal.stages.allocate.fixed_widths)
default    the recipe as it is: by-layer or fixed widths, whichever loses less on texts kept apart

All are read through the packed cache. Text: as in real.py; 1,000 x KL to 16 bits. Answers: tasks of
kvcal.data.lookup_tasks; nats that an answer's negative log-likelihood rises by over 16 bits. Errors are standard
errors over texts; ratios are to ``by-layer`` of the same bits, of means, paired. OUT/choice.json has all figures after
every step; a second run goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from real import PRICED, cell, find_model, machine, texts_of
from shared import mean_and_error, print_table, ratio_and_error

from kvcal import Folder, Plan, build_plan, load_model, load_recipe, with_knobs
from kvcal.artifact import write_text_atomic
from kvcal.console import TerminalReporter
from kvcal.data.reading import LINES, READINGS
from kvcal.folder import tokenizer_of
from kvcal.models.load import LoadedModel
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.allocate.fixed_widths import fixed_allocations, report_of
from kvcal.stages.divergence import Text, unquantized_plan
from kvcal.stages.evaluate.tasks import read_answers
from kvcal.stages.formats import reserved_for
from kvcal.stages.profile import record as profile_record
from kvcal.stages.search import measured
from kvcal.strict import dump
from kvcal.systems.basis import fit as basis_stage

RAW, FIRST = "16-bit", "by-layer"
BY_LAYER: dict[str, Any] = {"allocate.fixed_widths": False}
LOOK_UPS = BY_LAYER | {"data.source": ["python:docs", "python:code", "lookups", "python:chat"]}
LONG = LOOK_UPS | {"data.num_samples": 8, "data.seq_len": 4096, "profile.kl_tokens": 4096}
KNOBS = {
    FIRST: BY_LAYER,
    "look-ups": LOOK_UPS,
    "long": LONG,
    "sides": LONG | {"profile.kl_measured": "sides"},
    "default": {},
}
QUICK = {"data.num_samples": 4, "data.seq_len": 512, "profile.kl_samples": 2, "profile.kl_tokens": 512}


def main() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # which plans anew for every length of the past
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    path, reporter = given.out / "choice.json", TerminalReporter()
    loaded = load_model(find_model(given.model), device=given.device, dtype=given.dtype)
    found: dict[str, Any] = {"machine": machine(loaded), "plans": {}, "text": {}, "answers": {}}
    if path.exists():
        found = json.loads(path.read_text())
    with reporter.running():
        plans = {RAW: unquantized_plan(loaded.identity, loaded.geometry)}
        for name in given.plans.split(","):
            for bits in given.bits:
                plans |= plans_of(loaded, given, name, bits, found, reporter)
                write_text_atomic(path, json.dumps(found, indent=1) + "\n")
        measure_text(loaded, given, plans, found, reporter)
        write_text_atomic(path, json.dumps(found, indent=1) + "\n")
        measure_answers(loaded, given, plans, found, reporter)
        write_text_atomic(path, json.dumps(found, indent=1) + "\n")
    print_results(found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument("--out", type=Path, help="folder of results; default: artifacts/choice-NAME")
    parser.add_argument("--data", type=Path, help="folder of texts, as for real.py")
    parser.add_argument("--bits", type=float, nargs="+", default=[2.5, 3.0])
    parser.add_argument("--plans", default=",".join(KNOBS))
    parser.add_argument("--quick", action="store_true", help="plans from few texts, for a CPU")
    parser.add_argument("--kinds", default="rows,pairs,late,copies", help="tasks of kvcal.data.lookup_tasks")
    parser.add_argument("--answers", type=int, default=16, help="texts of each of these kinds")
    parser.add_argument("--texts", type=int, default=2, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--batch", type=int, default=16, help="texts at once")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    given.name = Path(given.model).stem
    given.out = given.out or Path("artifacts") / f"choice-{given.name}"
    given.retrieval, given.problems = [], LINES * given.texts  # of texts_of
    return given


def plans_of(
    loaded: LoadedModel, given: argparse.Namespace, name: str, bits: float, found: dict[str, Any], reporter: Any
) -> dict[str, Plan]:
    """The plan, by its name and bits; of ``by-layer`` those of fixed widths, too, which share its calibration."""
    place = FIRST if name == "default" else name  # whose profile it has
    folder = Folder.create(given.out / "plans" / place)
    earlier = given.out / "plans" / "look-ups" / "basis.safetensors"
    if name in ("long", "sides") and earlier.exists() and not folder.basis.exists():
        shutil.copy(earlier, folder.basis)  # fitted to the same texts
    knobs = dict(KNOBS[name])
    if "data.source" in knobs and not tokenizer_of(loaded).chat_template:
        knobs["data.source"] = knobs["data.source"][:-1]
    knobs |= QUICK if given.quick else {}
    knobs |= {"allocate.bits": bits, "allocate.batch": PRICED.batch, "allocate.context": PRICED.context}
    recipe, started = with_knobs(load_recipe("default"), knobs), time.monotonic()
    folder = Folder.create(folder.path).named(f"{name}-{bits:g}")
    Folder.create(folder.path)
    plans = {f"{name}@{bits:g}": build_plan(loaded, folder, recipe, PRICED, reporter)}
    seconds = time.monotonic() - started
    if name == FIRST:
        assert recipe.allocate is not None
        program, profile = allocation_record.load(folder.allocation)[0], profile_record.load(folder.profile)
        reserved = reserved_for(recipe, recipe.allocate, loaded.geometry, recipe.cache)
        basis = basis_stage.load(folder.basis)
        for fixed, allocation in fixed_allocations(program, profile, recipe.allocate, reserved).items():
            plans[f"{fixed}@{bits:g}"] = basis.planned(allocation)
    for key, plan in plans.items():
        widths = {side: "".join(str(layer.format(side).num_bits) for layer in plan.layers) for side in ("k", "v")}
        report = report_of(plan)
        noted = {"bits": plan.bits_per_value(), "widths": widths, "seconds": seconds}
        found["plans"][key] = noted | ({} if report is None else {"contest": dump(report)})
    return plans


def twins(plans: dict[str, Plan]) -> dict[str, str]:
    """What the default is, by its name: one of the plans that share its calibration."""
    found = {}
    for name, plan in plans.items():
        others = [one for one in plans if one.startswith((f"{FIRST}@", "keys ")) and plans[one].layers == plan.layers]
        if name.startswith("default@") and others:
            found[name] = others[0]
    return found


def measure_text(
    loaded: LoadedModel, given: argparse.Namespace, plans: dict[str, Plan], found: dict[str, Any], reporter: Any
) -> None:
    """KL of every text, of all plans that lack it."""
    every = [one for _, group in texts_of(loaded, given) for one in group if one.kind]
    texts = [Text(number, one.tokens_T, one.loss_mask_T, one.kind) for number, one in enumerate(every)]
    same = twins(plans)
    missing = {name: plan for name, plan in plans.items() if name not in {*found["text"], *same, RAW}}
    started = time.monotonic()
    if missing:
        found["text"] |= {
            name: kl_N.tolist() for name, kl_N in measured(loaded, missing, texts, reporter, "text").items()
        }
        reporter.say(f"{len(texts)} texts through {len(missing)} plans in {time.monotonic() - started:.1f} s")
    found["text"] |= {name: found["text"][other] for name, other in same.items()}


def measure_answers(
    loaded: LoadedModel, given: argparse.Namespace, plans: dict[str, Plan], found: dict[str, Any], reporter: Any
) -> None:
    """Of every kind and text: how many answers are right, the nats that they lose, how many there are, and the 99th
    percentile of KL at their tokens."""
    same = twins(plans)
    for kind in given.kinds.split(","):
        texts = list(islice(READINGS[kind](tokenizer_of(loaded), given.tokens, 1, "report"), given.answers))
        noted = found["answers"].setdefault(kind, {})
        for name, plan in plans.items():
            if name in noted or name in same:
                continue
            started = time.monotonic()
            read = read_answers(loaded, plan, texts, given.batch)
            noted[name] = [
                [int(one.right_A.sum()), float(one.lost_A.sum()), len(one.right_A), float(one.kl_n.quantile(0.99))]
                for one in read
            ]
            reporter.say(f"{name}: {len(texts)} texts of {kind} in {time.monotonic() - started:.1f} s")
        noted |= {name: noted[other] for name, other in same.items()}


def answer_cells(texts: dict[str, Any], name: str, base: str) -> list[str]:
    """Of a plan and a kind: right answers, of 16 bits'; nats lost an answer; and of those of the plan ``base``."""
    right, lost, count, _ = torch.tensor(texts[name]).double().T
    raw_right = torch.tensor(texts[RAW]).double().T[0]
    share = cell(ratio_and_error(right, raw_right), digits=3) if raw_right.any() else ""
    of_base = cell(ratio_and_error(lost, torch.tensor(texts[base]).double().T[1]), digits=2) if base in texts else ""
    return [share, cell(ratio_and_error(lost, count), digits=3), of_base]


def print_results(found: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in found["machine"].items()))
    order = sorted(found["plans"], key=lambda name: (name.partition("@")[2], list(found["plans"]).index(name)))
    rows = []
    for name in order:
        noted, base = found["plans"][name], f"{FIRST}@{name.partition('@')[2]}"
        cells = [name, f"{noted['bits']:.3f}", f"{noted['seconds']:.0f}"]
        kl, of_base = (torch.tensor(found["text"].get(one, [])).double() for one in (name, base))
        cells.append(cell(mean_and_error(kl), 1000) if len(kl) else "")
        cells.append(cell(ratio_and_error(kl, of_base), digits=3) if len(kl) and len(of_base) else "")
        for texts in found["answers"].values():
            cells += answer_cells(texts, name, base) if name in texts else [""] * 3
        rows.append(cells)
    head = ["plan", "bits", "seconds", "1,000 KL", "of earlier's"]
    for kind in found["answers"]:
        head += [f"{kind}, of 16 bits'", "nats lost", "of earlier's"]
    print_table("Plans of equal bytes", head, rows)
    widths = [(name, *found["plans"][name]["widths"].values()) for name in order]
    print_table("Bits of keys and values, layer by layer", ("plan", "keys", "values"), widths)
    contests = [(name, one["contest"]) for name, one in found["plans"].items() if "contest" in one]
    shown = [
        (
            name,
            contest["shipped"],
            plan["name"],
            plan["kl"],
            plan["look_ups"],
            plan["ratio"] or 1.0,
            plan["log_error"] or 0.0,
        )
        for name, contest in contests
        for plan in contest["plans"]
    ]
    titles = ("plan", "ships", "measured", "KL of text", "of look-ups", "by layer's KL of this one's", "log error")
    print_table("What the default chose by", titles, shown)


if __name__ == "__main__":
    main()
