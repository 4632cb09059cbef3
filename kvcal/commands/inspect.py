"""``kvcal inspect``: a plan, the options that a layer had, and what it does to its model. Only the last
imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal import console
from kvcal.commands import options, values
from kvcal.commands.decorators import spread
from kvcal.errors import ArtifactError, UsageError
from kvcal.lazy_torch import lazy_imports

with lazy_imports():
    from kvcal import folder as artifacts
    from kvcal import strict, tables
    from kvcal.plan import damage as damage_file
    from kvcal.plan import plan as plan_file
    from kvcal.stages import check_damage as damage_stage
    from kvcal.stages import verify as verify_stage
    from kvcal.stages.allocate import fixed_widths, record
    from kvcal.stages.allocate import stage as allocate_stage


@spread
def inspect(
    plan: options.PlanArgument,
    sizes: options.WorkloadOptions,
    given: options.ModelOptions,
    why: Annotated[
        int | None,
        typer.Option(
            metavar="LAYER",
            help="Instead: what each option would cost this layer, and what fixed widths lose, from the plan of `kvcal "
            "plan`, or its folder.",
        ),
    ] = None,
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Also what the plan was made from: data, digests, versions.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Also check the plan on this model, and keep what it does to it: exit code 7 where it destroys it.",
            autocompletion=values.complete_model,
        ),
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="With --model: text to measure on; default: kvcal's.")] = None,
    allow_damage: options.AllowDamage = False,
) -> None:
    """Show a plan: how much smaller, what takes its bytes, formats and bytes of every layer.

    With --model, it is checked that the plan is sound, is this model's, that the cache allocates exactly the
    bytes it predicts, and that it does not destroy the model, by the limits of `kvcal plan`. What was
    measured is kept next to the plan, for later calls and engines.

    Example: `kvcal inspect plan.safetensors --batch 32 --context 8192`

    Example: `kvcal inspect plan.safetensors --why 7`

    Example: `kvcal inspect plan.safetensors --model Qwen/Qwen3-8B`
    """
    if why is not None and (provenance or model is not None):
        raise UsageError("--why with --provenance or --model: it is an answer of its own", "leave out the others")
    loaded = plan_file.load_plan(plan)
    if why is not None:
        found = allocate_stage.read_choices(plan, why)
        found = found or allocate_stage.choices_of(loaded, artifacts.Folder.of_plan(plan.parent), why)
        widths = fixed_widths.report_of(loaded)
        reasons = asdict(found) | ({} if widths is None else {record.COMPETED: strict.dump(widths)})
        given.show(reasons, *([] if widths is None else [tables.widths_table(widths)]), tables.choices_table(found))
        return
    workload, damage = sizes.workload(loaded.workload), damage_file.load_damage(plan, loaded)
    value: dict[str, Any] = {}
    parts: list[console.View] = []
    if model is not None:
        checks, damage = _check(loaded, plan, damage, model, data or (), given)
        value["checks"] = [asdict(check) for check in checks]
        rows = [(check.name, check.detail) for check in checks]
        parts.append(console.View("All checks passed", ("check", "detail"), rows))
    value |= tables.plan_json(loaded, workload) | {"damage": strict.dump(damage), "is_checked": damage is not None}
    layers = tables.layer_table(loaded.layers, loaded.cache_dtype, workload)
    origin = [tables.origin_table(loaded)] if provenance else []
    given.show(value, tables.plan_table(loaded, workload, damage), layers, *parts, *origin)
    if model is not None:
        damage_file.require_undamaged(damage, allow_damage)


def _check(
    plan: plan_file.Plan, path: Path, recorded: damage_file.Damage | None, model: str, data: Sequence[str],
    given: options.ModelOptions,
) -> tuple[list[verify_stage.Check], damage_file.Damage | None]:  # fmt: skip
    """Checks of a plan on its model, and its damage, measured anew and kept next to the plan."""
    verify_stage.require_same_config(plan, model)
    with given.reporting() as reporter:
        loaded = given.load(model)
        checks = verify_stage.verify_plan(plan, loaded, loaded.max_context, reporter)
        damage = damage_stage.measure_damage(plan, loaded, data, reporter)
        if damage is not None:
            try:
                damage_file.save_damage(damage, path)
            except ArtifactError as refused:  # a folder that is only read
                reporter.say(f"warning: the measurement is not kept: {refused.message}")
    if recorded is None:
        checks.append(verify_stage.Check("unchecked", "until now no measurement of its damage lay next to the plan"))
    checks.append(verify_stage.Check("damage", "not measured" if damage is None else str(damage)))
    return checks, damage
