"""Whether plans that a search ships hold on texts, and kinds of text, that calibration never saw.

    python experiments/show_search.py --data 'python:docs python:code' --bits 2.8 3.5 --real DIR --work DIR --out a.json

For every --data (several sources in one argument, with spaces between) a search at every budget, smaller ones first and
in one folder, as ``kvcal search`` would. Then, on the pool *report* of every generated source and on real text where
--real names a folder of it (never committed): the plans that ship; what the least mean KL on the first texts of the
selection would have shipped (the old rule), of all plans that were measured; every system's own plan; and finalists, of
compositions with --finalists alone. Errors are over texts, differences paired by text. With --problems, the share of
generated problems that 16 bits and these plans solve. Searches are kept in --work and measured cells in --out: the same
command goes on where it was interrupted. Delete both with other --texts, --tokens or --singles.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from shared import arguments, mean_and_error, print_table

from kvcal.console import TerminalReporter
from kvcal.data.parts import INSTALLED
from kvcal.data.sequences import DataSpec, TokenDataset
from kvcal.data.tasks import TASKS
from kvcal.folder import Folder, Job, sequences
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import Workload, load_plan, save_plan
from kvcal.recipe import EvaluateSpec
from kvcal.recipe_files import load_recipe, with_knobs
from kvcal.run.formats import search_data
from kvcal.stages.divergence import deviations, kl_texts, padded_texts, unquantized_plan
from kvcal.stages.evaluate.tasks import measure_tasks
from kvcal.stages.search import compose
from kvcal.stages.search.compose import Candidate
from kvcal.stages.search.kl_meter import plan_digest
from kvcal.stages.search.stage import KL_BATCH, Search, run_search

LIMITS = ("max_steps", "max_size", "max_hops", "max_digits")


def held_out(
    given: argparse.Namespace, loaded: LoadedModel, folder: Path, kinds: Collection[str] = ()
) -> dict[str, TokenDataset]:
    """Texts that no calibration holds, of these kinds, or of all."""
    names = {source: DataSpec(source) for source in INSTALLED}
    if given.real is not None:
        pairs = [json.loads(line) for line in (given.real / "gsm8k/train.jsonl").read_text().splitlines()]
        joined = [{"text": f"{pair['question']}\n{pair['answer']}\n"} for pair in pairs]
        (folder / "gsm8k.jsonl").write_text("".join(json.dumps(record) + "\n" for record in joined))
        paths = {"books": given.real / "gutenberg", "wikitext2": given.real / "wikitext2/wiki.test.raw"}
        paths |= {"gsm8k": folder / "gsm8k.jsonl", "latex": given.real / "latex"}
        names |= {name: DataSpec(str(path)) for name, path in paths.items()}
    size = {"num_samples": given.held_out, "seq_len": given.held_out_tokens, "min_len": given.held_out_tokens}
    size["seed"] = given.seed
    chosen = {name: spec for name, spec in names.items() if not kinds or name in kinds}
    return {name: sequences(replace(spec, **size), loaded, "report") for name, spec in chosen.items()}


def searched(given: argparse.Namespace, loaded: LoadedModel, data: str, bits: float) -> dict[str, Any]:
    """One search: the files of the plans of interest by their roles, and what the search itself measured of them."""
    folder = given.work / data.replace(" ", "+").replace(":", "-")
    kept = folder / f"{bits:g}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    knobs = {
        "allocate.bits": bits, "search.kl_samples": given.texts,
        "search.kl_tokens": given.tokens, "search.refine_rounds": given.rounds,
        "reparam.num_samples": max(4, len(data.split()) + 1), "reparam.seq_len": given.tokens,
        "feedback.num_samples": given.texts, "feedback.seq_len": given.tokens,
    }  # fmt: skip
    recipe = with_knobs(load_recipe("best"), knobs)
    if given.no_rescale:
        assert recipe.search is not None
        keys = tuple(choice for choice in recipe.search.keys if not choice.rescale)
        plain = tuple(name for name in recipe.search.systems if load_recipe(name).reparam is None)
        recipe = replace(recipe, search=replace(recipe.search, keys=keys, systems=plain))
    sources = data.split()
    spec = DataSpec(
        sources[0] if len(sources) == 1 else tuple(sources),
        given.texts + 4, given.tokens, min_len=min(given.tokens, 256),
    )  # fmt: skip
    recipe, reporter = replace(recipe, data=spec), TerminalReporter()
    sequences = search_data(Job(recipe, loaded, Folder(folder), reporter))
    path, seen, composed = folder / "search.safetensors", dict[str, Candidate](), Search.composed

    def noted(self: Search, *what: object) -> Candidate:
        found = composed(self, *what)
        return seen.setdefault(plan_digest(found.plan), found)

    with mock.patch.object(Search, "composed", noted), mock.patch.object(compose, "MAX_SINGLES", given.singles):
        record = run_search(loaded, recipe, sequences, {"experiment": f"{data} {bits}"}, path, {}, reporter)
        job = Search(loaded, recipe, sequences, path, reporter)
        systems = {name: job.candidate(name, layers) for name, layers in job.systems.items()}
        fitting = [one for one in (*systems.values(), *seen.values()) if one.nbytes <= job.budget.for_cache]
        with ExitStack() as stack:
            select, validate = (job.pool(purpose, stack) for purpose in ("select", "validate"))
            means = select.pool.table(fitting, select.pool.tiers[0], "all plans").mean(1)
            old = fitting[int(means.argmin())]
            finalists = [one for one in fitting if one.name in {c.name for c in record.report.candidates}]
            pools = {"select": select, "validate": validate}
            gaps = {
                role: {name: mean_and_error(pool.meter.measure([plan], len(pool.pool.kinds), role)[0, :, 0])
                       for name, pool in pools.items()}
                for role, plan in (("shipped", record.plan), ("old rule", old.plan))
            }  # fmt: skip
    plans = {"shipped": record.plan, "old rule": old.plan}
    plans |= {f"finalist {one.name}": one.plan for one in finalists}
    plans |= {f"system {name}": one.plan for name, one in systems.items()}
    files = {}
    for role, plan in plans.items():
        files[role] = str(folder / f"{plan_digest(plan)[:16]}.plan")
        save_plan(plan, files[role])
    report = record.report
    body = {
        "plans": files,
        "shipped": report.shipped,
        "old rule": old.name,
        "num_plans": len({plan_digest(one.plan) for one in fitting}),
        "kl": gaps,
        "candidates": {c.name: (c.select, c.select_error, c.validate, c.validate_error) for c in report.candidates},
    }
    kept.write_text(json.dumps(body, indent=1))
    return body


def measure(given: argparse.Namespace, loaded: LoadedModel, files: set[str]) -> dict[str, dict[str, list[float]]]:
    """KL of every text by kind and plan file; what --out holds is not measured again."""
    kl = json.loads(given.out.read_text()) if given.out.exists() else {}
    given.work.mkdir(parents=True, exist_ok=True)
    reference, names = unquantized_plan(loaded.identity, loaded.geometry), sorted(files)
    plans = [load_plan(file) for file in names]
    for kind, data in held_out(given, loaded, given.work, given.kinds or ()).items():
        of_kind = kl.setdefault(kind, {})
        missing = [number for number, name in enumerate(names) if name not in of_kind]
        if not missing:
            continue
        texts, parts = kl_texts(data, given.held_out, given.held_out_tokens, load_recipe("best").cache), []
        size = KL_BATCH[loaded.model.device.type]
        for first in range(0, len(texts), size):
            batch = texts[first : first + size]
            found = deviations(loaded.model, reference, [plans[n] for n in missing], *padded_texts(batch))
            parts.append(found.statistics(len(batch))[..., 0])
        of_kind |= {names[n]: row for n, row in zip(missing, torch.cat(parts, 1).tolist(), strict=True)}
        given.out.write_text(json.dumps(kl))
        print(f"measured {kind}", flush=True)
    return kl


def solve(given: argparse.Namespace, loaded: LoadedModel, files: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Solved and posed problems by plan file, "" for 16 bits, and task; a file beside --out holds what is known."""
    kept = given.out.with_suffix(".solved.json")
    solved = json.loads(kept.read_text()) if kept.exists() else {}
    limits = {name: max(2, round(given.limits * getattr(EvaluateSpec(), name))) for name in LIMITS}
    spec = EvaluateSpec(num_problems=given.problems, batch=given.problems * len(TASKS), seed=given.seed, **limits)
    for file in ("", *files):
        if file not in solved:
            plan = load_plan(file) if file else unquantized_plan(loaded.identity, loaded.geometry)
            found = measure_tasks(loaded, plan, spec, TerminalReporter())
            solved[file] = {one.task: [one.num_correct, one.num_problems] for one in found}
            kept.write_text(json.dumps(solved))
    return dict(solved)


def search_arguments(text: str | None) -> argparse.ArgumentParser:
    """Options of a search that is measured; ``text`` describes the script."""
    parser = arguments(text)
    parser.add_argument("--data", action="append", required=True, help="calibration's sources; may be given again")
    parser.add_argument("--bits", type=float, nargs="+", default=[2.8, 3.1, 3.5])
    parser.add_argument("--work", type=Path, required=True, help="folder for searches")
    parser.add_argument("--real", type=Path, help="folder with gutenberg, wikitext2, gsm8k and latex")
    parser.add_argument("--texts", type=int, default=10, help="of each pool of the search")
    parser.add_argument("--tokens", type=int, default=512, help="of each")
    parser.add_argument("--held-out", type=int, default=4, help="texts of a kind that plans are measured on")
    parser.add_argument("--held-out-tokens", type=int, default=512, help="of each")
    parser.add_argument("--problems", type=int, default=0, help="of each task that plans solve")
    parser.add_argument("--limits", type=float, default=0.35, help="hardest problems, a share of the default lengths")
    parser.add_argument("--seed", type=int, default=0, help="of held-out texts and problems")
    parser.add_argument("--finalists", action="store_true", help="measure compositions that lost in the end, too")
    parser.add_argument("--roles", nargs="+", help="plans that are measured, by how their roles begin; default: all")
    parser.add_argument("--kinds", nargs="+", help="of held-out text; default: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--no-rescale", action="store_true", help="without λ, whose fits take a CPU longest")
    parser.add_argument("--singles", type=int, default=compose.MAX_SINGLES, help="single changes measured in a round")
    return parser


def main() -> None:
    given = search_arguments(__doc__).parse_args()
    loaded = load(given.model, device=given.device)
    found = {(data, bits): searched(given, loaded, data, bits) for data in given.data for bits in sorted(given.bits)}
    wanted = {
        file
        for body in found.values()
        for role, file in body["plans"].items()
        if role.startswith(tuple(given.roles or [""])) and (given.finalists or "composition" not in role)
    }
    kl = measure(given, loaded, wanted)
    small = {file for file in wanted if load_plan(file).bits_per_value() <= max(given.bits)}
    small |= {body["plans"]["system kivi-2"] for body in found.values()}
    first = {body["plans"][role] for body in found.values() for role in ("shipped", "system kivi-2")}
    solved = solve(given, loaded, sorted(small, key=lambda file: (file not in first, file))) if given.problems else {}
    for (data, bits), body in found.items():
        files = body["plans"]
        plans = {file: load_plan(file) for file in files.values()}
        size = {file: plan.bits_per_value() for file, plan in plans.items()}
        measured_size = {
            file: replace(plan, workload=Workload(1, given.held_out_tokens)).bits_per_value()
            for file, plan in plans.items()
        }
        shown = dict.fromkeys(file for file in files.values() if all(file in of_kind for of_kind in kl.values()))
        rows = []
        for file in shown:
            roles = ", ".join(role for role, one in files.items() if one == file)
            if roles.startswith("system") and size[file] > bits and roles != "system kivi-2":
                continue
            cells = []
            for of_kind in kl.values():
                mine, shipped = (torch.tensor(of_kind[one], dtype=torch.float64) for one in (file, files["shipped"]))
                (mean, error), (change, off) = mean_and_error(1e3 * mine), mean_and_error(1e3 * (shipped - mine))
                cells.append(f"{mean:.1f} ± {error:.1f}" + (f" ({change:+.1f} ± {off:.1f})" if change else ""))
            cells += [f"{right} of {asked}" for right, asked in solved.get(file, {}).values()]
            rows.append([roles, f"{size[file]:.3f}", f"{measured_size[file]:.3f}", *cells])
        head = ["plan", "bits", f"at {given.held_out_tokens}", *kl, *solved.get("", {})]
        if solved:
            full = [f"{right} of {asked}" for right, asked in solved[""].values()]
            rows.append(["16 bits", "16", "16", *("0" for _ in kl), *full])
        print_table(f"{data}, {bits:g} bits: KL x 1,000 (shipped less this)", head, rows)
        for role, pools in body["kl"].items():
            shown_kl = ", ".join(f"{k} {1e3 * a:.1f} ± {1e3 * e:.1f}" for k, (a, e) in pools.items())
            print(f"{role}: {body[role]}; {shown_kl}")


if __name__ == "__main__":
    main()
