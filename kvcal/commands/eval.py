"""``kvcal eval``: a plan measured on its model, next to others, and held against limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal.commands import options, values
from kvcal.commands.decorators import spread
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import parse_bytes

with lazy_imports():
    from kvcal import folder as artifacts
    from kvcal import strict, tables
    from kvcal.plan import plan as plan_file
    from kvcal.stages import check_damage as damage_stage
    from kvcal.stages import pipeline
    from kvcal.stages import verify as verify_stage
    from kvcal.stages.evaluate import harness
    from kvcal.stages.evaluate import stage as evaluate_stage


BASELINE = "16-bit"  # always measured next to a plan


@dataclass(frozen=True)
class GateOptions:
    """Limits that an evaluation is held against."""

    max_kl: Annotated[float | None, typer.Option(help="Largest KL to 16 bits, in nats per token.")] = None
    min_accuracy: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=SHARE", help="Least accuracy of a task, or (a share alone) of all; repeatable."),
    ] = None
    max_bytes: Annotated[
        str | None,
        typer.Option(help="Largest cache at the plan's workload, such as 1GB.", callback=values.of_bytes),
    ] = None

    def gates(self) -> evaluate_stage.Gates:
        max_bytes = None if self.max_bytes is None else parse_bytes(self.max_bytes)
        return evaluate_stage.Gates(self.max_kl, evaluate_stage.read_accuracies(self.min_accuracy or ()), max_bytes)


@spread
def eval_command(
    plan: options.PlanArgument,
    model: options.ModelOption,
    given: options.RecipeOptions,
    limits: GateOptions,
    posed: options.TaskOptions,
    recipe: options.RecipeOption = "default",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; made if needed. Default: artifacts/MODEL/eval.")
    ] = None,
    allow_damage: options.AllowDamage = False,
) -> None:
    """Measure a plan on its model, next to 16 bits: KL, top-1 agreement, perplexity and tasks.

    All run through the packed cache, as the recipe's [evaluate] says; the baselines of
    `--set evaluate.against` are measured, too. A model of yours is measured on installed text, or --data, and
    on the tasks of --tasks alone, unless --recipe is a file.

    With limits, such as those of a CI job, the command ends with exit code 7 when the plan is beyond one of
    them; the table is printed all the same.

    Example: `kvcal eval plan.safetensors --model reasoner-10m --set 'evaluate.against=["kivi-2"]'`

    Example: `kvcal eval plan.safetensors --model M --tasks gsm8k,arc_easy:acc_norm --limit 200`

    Example: `kvcal eval plan.safetensors --model M --draft layers:8`

    Example: `kvcal eval plan.safetensors --model M --max-kl 0.01 --tasks gsm8k --min-accuracy gsm8k=0.6
    --json`
    """
    loaded_plan = plan_file.load_plan(plan)
    others: dict[str, Any] = {"name": plan.stem, "evaluate.against": [], "evaluate.data.num_samples": given.samples}
    base = replace(given, samples=None).recipe(recipe, others | posed.knobs(recipe, model))
    if BASELINE not in base.evaluate.against:
        base = replace(base, evaluate=replace(base.evaluate, against=(BASELINE, *base.evaluate.against)))
    gates = limits.gates()
    gates.require_measured((*base.evaluate.embedded_tasks, *base.evaluate.harness_tasks))
    if base.evaluate.harness_tasks:
        harness.require_tasks(base.evaluate)
    folder = artifacts.Folder.create(out or Path("artifacts") / loaded_plan.model.id.rpartition("/")[2] / "eval")
    verify_stage.require_same_config(loaded_plan, model)
    with given.reporting() as reporter:
        loaded = given.load(model)
        verify_stage.require_same_model(loaded_plan, loaded)
        evaluation = pipeline.evaluate_plan(base, loaded, loaded_plan, folder, reporter)
        damage = damage_stage.damage_of_row(loaded_plan, loaded, evaluation.rows[-1], folder.plan, reporter)
    results = list(gates.results(evaluation.rows[-1]))
    shown = [tables.evaluation_table(evaluation), *([tables.gates_table(results)] if results else [])]
    value = strict.dump(evaluation) | {"gates": [asdict(one) for one in results], "damage": strict.dump(damage)}
    said = {"next": options.generate_line(model, plan)}
    given.finish(folder, value, *shown, said=said, damage=damage, allow_damage=allow_damage)
    evaluate_stage.require_passed(plan.name, results)
