"""``kvcal tune``: the thresholds of a recipe's key tiers, searched on a task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcal.commands.options import (
    Batch,
    Columns,
    Config,
    Context,
    Data,
    DataOptions,
    Device,
    Dtype,
    Json,
    Problems,
    Quiet,
    Samples,
    Seed,
    SeqLen,
    Split,
    load,
    tell_toy_data,
    with_data,
)
from kvcal.quantities import MAX_WORKERS

if TYPE_CHECKING:
    from kvcal.recipe import Recipe
    from kvcal.run.tune import Tuned


def tune(
    recipe: Annotated[str, typer.Argument(help="A recipe with [formats] whose key tiers have thresholds.")] = "mixkvq",
    model: Annotated[str | None, typer.Option(help="Folder, hub id or embedded name; default: the recipe's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the study and the plan; made if needed.")] = Path(
        "artifacts/tune"
    ),
    task: Annotated[
        list[str] | None, typer.Option(help="An embedded task, or lm-eval:NAME[:METRIC]; may be repeated.")
    ] = None,
    problems: Problems = None,
    trials: Annotated[int | None, typer.Option(help="Trials in all; more continue the study.", min=1)] = None,
    fit_range: Annotated[
        bool, typer.Option("--fit-range", help="Search up to the score that 1 % of the channels exceed.")
    ] = False,
    max_bits: Annotated[float | None, typer.Option(help="Cap on all-in bits per cached value.", min=0.1)] = None,
    kv_budget: Annotated[str | None, typer.Option(help="Cap on the whole cache, such as 1.5GiB.")] = None,
    batch: Batch = None,
    context: Context = None,
    data: Data = None,
    columns: Columns = None,
    split: Split = None,
    config: Config = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    workers: Annotated[
        int, typer.Option(help="Processes, and so trials drawn at once by a new study.", min=1, max=MAX_WORKERS)
    ] = 1,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search the tiers' thresholds: accuracy up, all-in bits down; write the best plan under a cap.

    Interrupted, it goes on to exactly the trials it would have come to, whatever the number of workers then.
    Example: `kvcal tune mixkvq --model Qwen/Qwen3-8B --task lm-eval:gsm8k --trials 30 --max-bits 3.4`
    """
    from kvcal import console
    from kvcal.errors import UsageError
    from kvcal.plan.plan import Workload
    from kvcal.quantities import parse_bytes
    from kvcal.recipe import TuneSpec
    from kvcal.recipe_files import load_recipe
    from kvcal.run import pipeline
    from kvcal.run.tune import tune_plan
    from kvcal.stages.tune.objective import Origin
    from kvcal.strict import changed

    base = with_data(load_recipe(recipe), DataOptions(data, columns, split, config, samples, seq_len, seed))
    given: dict[str, Any] = {"tasks": task, "num_problems": problems, "num_trials": trials}
    given |= {"max_bits": max_bits, "fit_range": fit_range or None}
    _require_formats_alone(base)
    base = replace(base, tune=changed(base.tune or TuneSpec(), given, "tune", UsageError))
    default = pipeline.DEFAULT_WORKLOAD
    workload = Workload(batch or default.batch, context or default.context)
    max_bytes = None if kv_budget is None else parse_bytes(kv_budget)
    origin = Origin(model or base.model, dtype, device)
    folder = pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(origin.source, dtype, device)
        tell_toy_data(base.data, loaded, reporter)
        plan = pipeline.formats_plan(base, loaded, workload)
        tuned = tune_plan(loaded, origin, plan, base, folder.path, reporter, workers, max_bytes)
    if json:
        console.print_json(_json(tuned))
        return
    console.print_table(*_table(tuned))
    reporter.say(f"plan: {folder.plan}\nstudy: {folder.path / 'tune.json'}\npicture: {folder.path / 'tune.png'}")


def _require_formats_alone(recipe: Recipe) -> None:
    from kvcal.errors import UsageError

    others = [name for name in ("progressive", "reparam", "predictors") if getattr(recipe, name) is not None]
    if recipe.formats is None or others:
        found = "no [formats]" if recipe.formats is None else " and ".join(f"[{name}]" for name in others)
        raise UsageError(
            f"recipe {recipe.name!r} has {found}; thresholds are searched for recipes with [formats] alone",
            hint="tune a recipe such as mixkvq",
        )


def _json(tuned: Tuned) -> dict[str, Any]:
    from kvcal.strict import dump

    return {"chosen": dump(tuned.chosen), "predicted_bytes": tuned.plan.predicted_bytes, **dump(tuned.tuning)}


def _table(tuned: Tuned) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """The Pareto front, the choice marked."""
    from kvcal.quantities import format_bytes

    names = [threshold.name for threshold in tuned.tuning.search.thresholds]
    rows = []
    for number in tuned.tuning.front:
        trial = tuned.tuning.trials[number]
        found = trial.outcome
        error = "" if found.accuracy_se is None else f" ± {100 * found.accuracy_se:.1f}"
        code_bits = found.facts.get("key_code_bits")
        rows.append(
            (
                f"{number}{' (chosen)' if number == tuned.chosen.number else ''}",
                *(f"{trial.thresholds[name]:.3f}" for name in names),
                f"{100 * found.accuracy:.1f}{error}",
                f"{found.bits_per_value:.3f}",
                "" if code_bits is None else f"{code_bits:.2f}",
                format_bytes(found.total_bytes),
            )
        )
    workload = tuned.plan.workload
    title = (
        f"Pareto front of {len(tuned.tuning.trials)} trials; bits and bytes at {workload.batch} x {workload.context}"
    )
    return title, ("trial", *names, "accuracy %", "all-in bits", "code bits of keys", "cache"), rows
