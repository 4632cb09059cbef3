"""MixKVQ: what queries add to a channel's score at equal bytes, and what the threshold search finds.

    python experiments/show_mixkvq.py --model reasoner-10m --device auto --out mixkvq.json [--trials 30] [--quick]

1. Scores at equal bytes: the same rooms, always filled with the best channels by I S (MixKVQ, Eq. 8), by S alone (its
   "error-only" ablation), by magnitude, by I x magnitude, and at random. KL to 16 bits in nats per loss token,
   decode-faithfully, keys alone (values at 16 bits) and with the recipe's values; differences to I S are paired, text
   by text. With ``--problems``, exact match through the packed cache, of the plans with the recipe's values.
2. The search: ``kvcal tune``'s own stages on the recipe, each trial through the packed cache.
3. The Pareto front of the study; its picture lies next to the JSON.

Errors are standard errors over texts or problems. Texts are task documents of the report pool.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from shared import arguments, mean_and_error, print_table
from torch import Tensor

from kvcal.console import TerminalReporter
from kvcal.data.reading import TuneSpec
from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.models.load import LoadedModel, load
from kvcal.pages.scores import Score
from kvcal.pictures import Point, Series, draw_quality
from kvcal.plan.layer import bare_layers, fixed_layers
from kvcal.plan.page_format import RAW, Boost, Format, Tier
from kvcal.plan.plan import Plan, Workload
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe
from kvcal.stages.divergence import deviations, unquantized_plan
from kvcal.stages.evaluate.tasks import measure_tasks
from kvcal.stages.tune import TaskObjective, Tuning, tune

SCORES: tuple[Score, ...] = ("query_range", "range", "magnitude", "query_magnitude", "random")
# (name, tiers): the recipe's rooms, and a single tier.
ROOMS = (
    ("16 bits 1/64, 4 bits 1/4", (Tier(16, 1 / 64), Tier(4, 1 / 4))),
    ("4 bits 1/8", (Tier(4, 1 / 8),)),
)


def plan_of(loaded: LoadedModel, recipe: Recipe, boost: Boost | None, workload: Workload, v: Format) -> Plan:
    """The recipe's plan with another boost and values' format."""
    assert recipe.formats is not None
    formats = replace(recipe.formats, k=replace(recipe.formats.k, boost=boost), v=v)
    layers = fixed_layers(formats, bare_layers(loaded.geometry))
    return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, workload, {})


def kl_by_text(loaded: LoadedModel, plans: Sequence[Plan], data: TokenDataset, reporter: TerminalReporter) -> Tensor:
    """Mean KL to 16 bits over each text's loss tokens, [plans, texts] fp64."""
    reference, columns = unquantized_plan(loaded.identity, loaded.geometry), []
    for number, (tokens, mask) in enumerate(zip(data.sequences, data.loss_masks, strict=True)):
        columns.append(deviations(loaded.model, reference, plans, tokens[None], mask[None]).kl_Pn.mean(1))
        reporter(number + 1, len(data.sequences), "scores: texts")
    return torch.stack(columns, dim=1)


def compare_scores(
    loaded: LoadedModel, recipe: Recipe, data: TokenDataset, problems: int, reporter: TerminalReporter
) -> list[dict[str, Any]]:
    """A row for every (rooms, values, score); all scores of one (rooms, values) take the same bytes."""
    assert recipe.formats is not None
    workload, rows = Workload(1, max(sequence.numel() for sequence in data.sequences)), []
    for rooms, tiers in ROOMS:
        for values, v in (("16 bits", RAW), ("2 bits", recipe.formats.v)):
            plans = {score: plan_of(loaded, recipe, Boost(score, tiers), workload, v) for score in SCORES}
            plain = plan_of(loaded, recipe, None, workload, v)
            kl = dict(zip([*SCORES, "none"], kl_by_text(loaded, [*plans.values(), plain], data, reporter), strict=True))
            require_equal_pages(plans.values())
            for score, plan in {**plans, "none": plain}.items():
                row: dict[str, Any] = {"rooms": rooms, "values": values, "score": score, "bytes": plan.predicted_bytes}
                row |= {"kl": mean_and_error(kl[score]), "over_is": mean_and_error(kl[score] - kl["query_range"])}
                if problems and v != RAW:
                    spec = replace(recipe.evaluate, num_problems=problems, against=())
                    row["tasks"] = [asdict(task) for task in measure_tasks(loaded, plan, spec, reporter)]
                rows.append(row)
    return rows


def require_equal_pages(plans: Iterable[Plan]) -> None:
    """All keys' pages have the same bytes. (The running query statistic is no part of a page: 4 bytes a channel and
    sequence, however long.)"""
    found = set()
    for plan in plans:
        layer = next(layer for layer in plan.layers if layer.is_paged)
        found.add(layer.k[0].layout("k", 1, layer.head_dim("k"), plan.cache_dtype, layer.k[0].num_bits).record_bytes)
    assert len(found) == 1, found


def print_scores(rows: Sequence[Mapping[str, Any]]) -> None:
    names = [task["task"] for task in next((row["tasks"] for row in rows if "tasks" in row), [])]
    lines = []
    shown = {
        "query_range": "I S",
        "range": "S alone",
        "query_magnitude": "I x magnitude",
        "none": "no boost (fewer bytes)",
    }
    for row in rows:
        tasks = row.get("tasks", [])
        cells = [f"{100 * task['accuracy']:.1f} ± {100 * task['accuracy_se']:.1f}" for task in tasks]
        (kl, error), (over, over_error) = row["kl"], row["over_is"]
        place = (row["rooms"], row["values"], shown.get(row["score"], row["score"]))
        found = (f"{kl:.5f} ± {error:.5f}", f"{over:+.5f} ± {over_error:.5f}", row["bytes"])
        lines.append((*place, *found, *(cells or [""] * len(names))))
    head = ("rooms", "values", "score", "KL to 16 bits", "more than I S", "bytes", *(f"{name} %" for name in names))
    print_table("Scores of key channels at equal bytes", head, lines)


def search(objective: TaskObjective, reporter: TerminalReporter) -> Tuning:
    with tempfile.TemporaryDirectory() as folder:
        return tune(objective.ranges(), objective.spec, objective, {}, Path(folder), reporter)


def print_front(tuning: Tuning) -> None:
    ranges = tuning.inputs["search.thresholds"]
    names, (low, high) = list(ranges), next(iter(ranges.values()))
    lines = []
    for number in tuning.front:
        trial, found = tuning.trials[number], tuning.trials[number].outcome
        error = "" if found.accuracy_se is None else f" ± {100 * found.accuracy_se:.1f}"
        lines.append(
            (
                number,
                *(f"{trial.thresholds[name]:.3f}" for name in names),
                f"{100 * found.accuracy:.1f}{error}",
                f"{found.bits_per_value:.3f}",
                f"{found.facts['key_code_bits']:.2f}",
                found.total_bytes,
            )
        )
    head = ("trial", *names, "accuracy %", "all-in bits", "code bits of keys", "bytes")
    print_table(f"Threshold search: {len(tuning.trials)} trials over [{low:g}, {high:g}]", head, lines)


def main() -> None:
    parser = arguments(__doc__, "JSON file; the picture lies next to it, as .png")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1024, help="length of a text at most")
    parser.add_argument("--problems", type=int, default=24, help="of each task, for scores and trials; 0: no tasks")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--batch", type=int, default=72, help="problems at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2 texts, 3 trials of 1 short problem")
    given = parser.parse_args()
    loaded, recipe = load(given.model, device=given.device), load_recipe("mixkvq-capped")
    limits: dict[str, Any] = {"batch": given.batch}
    tasks = TuneSpec().tasks
    if given.quick:
        given.texts, given.tokens, given.trials = 2, 400, 3
        given.problems, tasks = min(given.problems, 1), ("chain",)
        limits |= {"max_size": 30, "max_hops": 4, "max_new_tokens": 40, "tasks": tasks}
    recipe = replace(recipe, evaluate=replace(recipe.evaluate, **limits))
    assert loaded.tokenizer is not None and recipe.formats is not None
    spec = DataSpec(num_samples=given.texts, seq_len=given.tokens, seed=given.seed)
    data = load_sequences(spec, loaded.tokenizer, purpose="report")
    results: dict[str, Any] = {"model": given.model, "texts": data.description, "text_tokens": data.num_tokens}
    with TerminalReporter().running() as reporter:
        results["scores"] = compare_scores(loaded, recipe, data, given.problems, reporter)
        print_scores(results["scores"])
        if given.problems:
            spec = TuneSpec(tasks=tasks, num_problems=given.problems, num_trials=given.trials, fit_range=True)
            plan = plan_of(loaded, recipe, recipe.formats.k.boost, Workload(8, 4096), recipe.formats.v)
            objective = TaskObjective(loaded, plan, spec, recipe.evaluate, recipe.data)
            tuning = search(objective, reporter)
            print_front(tuning)
            points = {
                one.number: Point(one.outcome.bits_per_value, 100 * one.outcome.accuracy) for one in tuning.trials
            }
            front = Series("Pareto front", [points[number] for number in tuning.front], "kvcal")
            trials = Series("trials", list(points.values()), is_joined=False)
            draw_quality("Search of thresholds", [], [trials, front], given.out.with_suffix(".png"))
            results["search"] = {"front": tuning.front}
            results["search"]["trials"] = [{**trial.thresholds, **asdict(trial.outcome)} for trial in tuning.trials]
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
