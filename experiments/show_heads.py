"""Whether KV heads with formats of their own gain anything over layers, at equal bytes.

    python experiments/show_heads.py --plan SEARCHED.plan --bits 2.5 --real FOLDER --work FOLDER --out heads.json

The plan of a search over layers, without its error feedback, gets --rounds more over layers. From what has the least
score on *select*, the base, one round goes over layers and one over the heads of all layers, with as many single
changes each: those on the first texts of *select*, compositions by the solver, the best of them on all texts of
*select*, and whether the search would take it (``better``). On texts of the pool *report*, and on real text where
--real names a folder of it, the base and the best composition of each round are compared, whether they are taken or
not. Errors are over texts, differences paired by text. λ is left out.
"""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from shared import arguments, mean_and_error, print_table
from show_mixtures import held_out

from kvcal.console import TerminalReporter
from kvcal.data.sequences import DataSpec
from kvcal.folder import Folder, Job
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import Plan, load_plan
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe, with_knobs
from kvcal.run.formats import search_data
from kvcal.stages.divergence import deviations, kl_texts, padded_texts, unquantized_plan
from kvcal.stages.search import KL_BATCH, Search, compose
from kvcal.stages.search.compose import FINALISTS, compositions, single_changes, style_effects
from kvcal.stages.search.judge import halve, score


def recipe_of(given: Namespace, bits: float, granularity: str) -> Recipe:
    """``best`` without λ."""
    knobs = {
        "allocate.bits": bits, "allocate.granularity": granularity, "search.kl_samples": given.texts,
        "search.kl_tokens": given.tokens, "feedback.num_samples": given.texts, "feedback.seq_len": given.tokens,
    }  # fmt: skip
    recipe = with_knobs(load_recipe("best"), knobs)
    assert recipe.search is not None
    keys = tuple(choice for choice in recipe.search.keys if not choice.rescale)
    systems = tuple(name for name in recipe.search.systems if load_recipe(name).reparam is None)
    data = DataSpec(tuple(given.data.split()), given.texts + 4, given.tokens, min_len=min(given.tokens, 256))
    return replace(recipe, data=data, search=replace(recipe.search, keys=keys, systems=systems))


def one_round(
    given: Namespace, loaded: LoadedModel, start: Plan, bits: float, granularity: str
) -> tuple[dict[str, Any], Plan, Plan | None]:
    """What was measured, the start, and the composition of least score on *select*, if that is less than its own."""
    recipe, reporter = recipe_of(given, bits, granularity), TerminalReporter()
    folder = given.work / f"{bits:g}"
    folder.mkdir(parents=True, exist_ok=True)
    sequences = search_data(Job(recipe, loaded, Folder(folder), reporter))
    job = Search(loaded, recipe, sequences, folder / "search.safetensors", reporter)
    problem = job.problem
    choice = problem.choice_of(tuple(replace(one, k_feedback=False, v_feedback=False) for one in start.layers))
    if choice is None:
        raise SystemExit(f"the plan at {bits:g} bits is no composition of these options")
    with ExitStack() as stack:
        select, validate = (job.pool(purpose, stack).pool for purpose in ("select", "validate"))

        def make(name: str, choice: compose.Choice) -> compose.Candidate:
            return job.composed(name, choice, job.brought)

        background = make("start", choice)
        effects = style_effects(problem, select, make)
        with mock.patch.object(compose, "MAX_SINGLES", given.singles):
            changes = single_changes(problem, background, effects, select, make, 1)
        composed = compositions(problem, background, changes, make, 1)
        best = halve(select, [candidate for candidate, _ in composed], FINALISTS, "compositions")
        at = score(select.scores([background])[0], select.kinds)
        body = {
            "units": len(problem.units),
            "changes": [
                (str(problem.units[c.position]), problem.options[c.position][c.option].name, c.measured, c.error)
                for c in changes
            ],
            "start": (at, validate.score(background), background.nbytes),
            "compositions": [
                (one.name, gain, select.difference(one, background), validate.difference(one, background), one.nbytes,
                 compose.better(one, background, select, validate))
                for one in best for candidate, gain in composed if candidate == one
            ],
        }  # fmt: skip
        is_lower = bool(best) and select.difference(best[0], background)[0] < 0
        return body, background.plan, best[0].plan if is_lower else None


def measure(given: Namespace, loaded: LoadedModel, plans: dict[str, Plan]) -> dict[str, dict[str, list[float]]]:
    """KL of every held-out text by kind and plan."""
    reference, found = unquantized_plan(loaded.identity, loaded.geometry), dict[str, dict[str, list[float]]]()
    for kind, data in held_out(given, loaded, given.work, given.kinds or ()).items():
        texts = kl_texts(data, given.held_out, given.held_out_tokens, load_recipe("best").cache)
        size, parts = KL_BATCH[loaded.model.device.type], []
        for first in range(0, len(texts), size):
            batch = texts[first : first + size]
            moved = deviations(loaded.model, reference, list(plans.values()), *padded_texts(batch))
            parts.append(moved.statistics(len(batch))[..., 0])
        found[kind] = dict(zip(plans, torch.cat(parts, 1).tolist(), strict=True))
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--plan", type=Path, action="append", required=True, help="where rounds start, one for --bits")
    parser.add_argument("--bits", type=float, nargs="+", default=[2.5], help="budget of each plan")
    parser.add_argument("--data", default="python:docs python:code math dialogues tasks", help="calibration's sources")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is measured")
    parser.add_argument("--real", type=Path, help="folder with gutenberg, wikitext2, gsm8k and latex")
    parser.add_argument("--texts", type=int, default=10, help="of each pool of the search")
    parser.add_argument("--tokens", type=int, default=1024, help="of each")
    parser.add_argument("--rounds", type=int, default=1, help="over layers, before the two that are compared")
    parser.add_argument("--singles", type=int, default=compose.MAX_SINGLES, help="single changes of a round")
    parser.add_argument("--held-out", type=int, default=4, help="texts of a kind that plans are measured on")
    parser.add_argument("--held-out-tokens", type=int, default=2048, help="of each")
    parser.add_argument("--kinds", nargs="+", help="of held-out text; default: all")
    parser.add_argument("--seed", type=int, default=1, help="of held-out texts")
    given = parser.parse_args()
    loaded = load(given.model, device=given.device)
    results = {}
    for path, bits in zip(given.plan, given.bits, strict=True):
        body = results[f"{bits:g}"] = dict[str, Any]()
        base, plans = load_plan(path), dict[str, Plan]()
        for role in (*(f"round {number}" for number in range(1, given.rounds + 1)), "layer", "head"):
            body[role], start, found = one_round(given, loaded, base, bits, "head" if role == "head" else "layer")
            given.out.write_text(json.dumps(results, indent=1) + "\n")
            if role.startswith("round"):
                base = start if found is None else found
            else:
                plans |= {"base": start} | ({} if found is None else {role: found})
        body["held out"] = measure(given, loaded, plans)
        given.out.write_text(json.dumps(results, indent=1) + "\n")
        rows = []
        for role, plan in plans.items():
            cells = []
            for of_kind in body["held out"].values():
                mine, first = (torch.tensor(of_kind[one], dtype=torch.float64) for one in (role, "base"))
                (mean, error), (change, off) = mean_and_error(1e3 * mine), mean_and_error(1e3 * (mine - first))
                cells.append(f"{mean:.1f} ± {error:.1f}" + (f" ({change:+.1f} ± {off:.1f})" if role != "base" else ""))
            rows.append([role, f"{plan.bits_per_value():.3f}", *cells])
        print_table(f"{bits:g} bits: KL x 1,000 (less the base's)", ["plan", "bits", *body["held out"]], rows)


if __name__ == "__main__":
    main()
