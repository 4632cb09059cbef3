"""From a plan whose key tiers have thresholds to one with the best thresholds that fit: search, picture, plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvcal.charts.thresholds import draw_tuning
from kvcal.errors import InfeasibleBudget
from kvcal.folder import Folder, compute_dtype, flat, model_inputs
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan, save_plan
from kvcal.progress import Reporter
from kvcal.recipe import Recipe, TuneSpec
from kvcal.stages.tune import tune
from kvcal.stages.tune.objective import HIGHEST_SHARE, Origin, TaskObjective
from kvcal.stages.tune.record import Trial, Tuning, choose
from kvcal.stages.tune.tier_capacity import overflow_share, score_quantile, with_thresholds
from kvcal.strict import dump


@dataclass(frozen=True)
class Tuned:
    """The result of a search: all trials, the one chosen, and its plan."""

    tuning: Tuning
    chosen: Trial
    plan: Plan


def tune_plan(
    loaded: LoadedModel,
    origin: Origin,
    plan: Plan,
    recipe: Recipe,
    folder: str | Path,
    reporter: Reporter,
    workers: int = 1,
    max_bytes: int | None = None,
) -> Tuned:
    """Search the thresholds of ``plan`` as ``recipe.tune`` says; the best under its ``max_bits`` and ``max_bytes``
    becomes ``folder``/plan.safetensors. The study and its picture lie beside it.

    Raises:
        InfeasibleBudget: no trial fits; the study and the picture are kept.
        UsageError, ArtifactError and others: see ``TaskObjective`` and ``tune``.
    """
    spec, folder = recipe.tune or TuneSpec(), Path(folder)
    Folder(folder).require_model(model_inputs(loaded))
    objective = TaskObjective(origin, plan, spec, recipe.evaluate, recipe.data, loaded)
    search = objective.search()
    low, high = search.thresholds[0].low, search.thresholds[0].high
    middle, most = (score_quantile(objective.scores, share) for share in (0.5, HIGHEST_SHARE))
    reporter.say(
        f"tune: half of the channels score above {middle:.3g}, 1 % above {most:.3g}; searched from {low:g} to {high:g}"
    )
    if high < middle:
        reporter.say(
            "tune: no setting leaves half of the channels at the lowest bits; raise 'high', or use --set "
            "tune.fit_range=true"
        )
    # All that outcomes depend on: not how many trials there are, nor which cap the choice is made under.
    asked = {name: value for name, value in dump(spec).items() if name not in ("num_trials", "max_bits")}
    limits = {name: value for name, value in dump(recipe.evaluate).items() if name.startswith("max_")}
    inputs = {
        **model_inputs(loaded),
        **compute_dtype(loaded),
        **flat("tune", asked),
        **flat("evaluate", limits),
        "evaluate.batch": recipe.evaluate.batch,
        "evaluate.seed": recipe.evaluate.seed,
        **flat("data", dump(recipe.data)),
        "plan.sha256": plan.sha256,
    }
    tuning = tune(search, objective, inputs, folder, reporter, workers)
    picture = folder / "tune.png"
    try:
        chosen = choose(tuning, spec.max_bits, max_bytes)
    except InfeasibleBudget:
        draw_tuning(tuning, picture, max_bits=spec.max_bits)
        raise
    draw_tuning(tuning, picture, chosen, spec.max_bits)
    best = objective.plan_with(chosen.thresholds)
    by_bits = {int(name.removeprefix("tau_")): value for name, value in chosen.thresholds.items()}
    overflow = overflow_share(best, with_thresholds(plan, by_bits), objective.scores)
    details = {"thresholds": chosen.thresholds, "tune_seed": search.seed, "overflow_share": overflow}
    best = replace(best, provenance={**plan.provenance, **details})
    reporter.say(
        f"tune: trial {chosen.number} of {len(tuning.trials)} is chosen, {chosen.outcome.bits_per_value:.3f} bits a "
        f"value; {overflow:.1%} of the calibration pages have a channel above its threshold and no room for it"
    )
    save_plan(best, folder / "plan.safetensors")
    return Tuned(tuning, chosen, best)
