"""``kvcal inspect``: a plan, the options that a layer had, what differs from another plan, and what it does to its
model. Without the last no torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal import console
from kvcal.commands import options, values
from kvcal.commands.decorators import spread
from kvcal.errors import ArtifactError, UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import format_bytes

with lazy_imports():
    from kvcal import folder as artifacts
    from kvcal import stored_tensor, strict, tables
    from kvcal.plan import damage as damage_file
    from kvcal.plan import plan as plan_file
    from kvcal.stages import check_damage as damage_stage
    from kvcal.stages import verify as verify_stage
    from kvcal.stages.allocate import fixed_widths
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
    against: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Instead: what differs from this plan, layer by layer.")
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

    Example: `kvcal inspect new.safetensors --against old.safetensors`

    Example: `kvcal inspect plan.safetensors --model Qwen/Qwen3-8B`
    """
    asked = {
        "--why": why is not None,
        "--against": against is not None,
        "--provenance": provenance,
        "--model": model is not None,
    }
    together = [name for name, is_asked in asked.items() if is_asked]
    if len(together) > 1 and (why is not None or against is not None):
        raise UsageError(f"{' with '.join(together)}: --why and --against are answers of their own", "leave out one")
    loaded = plan_file.load_plan(plan)
    if why is not None:
        found = allocate_stage.read_choices(plan, why)
        found = found or allocate_stage.choices_of(loaded, artifacts.Folder.of_plan(plan.parent), why)
        widths = fixed_widths.report_of(loaded)
        reasons = asdict(found) | ({} if widths is None else {fixed_widths.KEY: strict.dump(widths)})
        given.show(reasons, *([] if widths is None else [tables.widths_table(widths)]), tables.choices_table(found))
        return
    if against is not None:
        _show_differences(plan_file.load_plan(against), loaded, sizes, given)
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


def _show_differences(
    before: plan_file.Plan, after: plan_file.Plan, sizes: options.WorkloadOptions, given: options.OutputOptions
) -> None:
    """Formats and bytes of every layer that differs, tensors, model and provenance."""
    plans = (before, after)
    workload = sizes.workload(before.workload)
    provenance = _changes(*(strict.flat("", one.provenance) for one in plans))
    kept = ("model", "cache_dtype", "workload")
    records = [strict.flat("", plan_file.plan_record(one)) for one in plans]
    facts = _changes(*({k: v for k, v in record.items() if k.startswith(kept)} for record in records))
    words = {(False, True): "added", (True, False): "removed", (True, True): "changed"}
    held = [stored_tensor.stored(one.tensors) for one in plans]
    tensors = {name: words[name in held[0], name in held[1]] for name in _changes(*held)}
    changed = _changes(*({layer.geometry.index: layer for layer in one.layers} for one in plans))
    layers, rows = [], []
    shown = [tables.layer_cells(one.layers, one.cache_dtype, workload) for one in plans]
    for index, pair in changed.items():
        sizes_of = [
            0 if layer is None else layer.nbytes(one.cache_dtype, workload.lengths, workload.context)
            for layer, one in zip(pair, plans, strict=True)
        ]
        ends = [None if layer is None else strict.dump(layer) for layer in pair]
        layers.append({"layer": index, "before": ends[0], "after": ends[1], "bytes": sizes_of})
        cells = zip(*(side.get(index, ("none",) * 5) for side in shown), strict=True)
        rows.append((str(index), *(" -> ".join(dict.fromkeys(both)) for both in cells)))
    totals = [(one.nbytes(workload.lengths), one.bits_per_value(workload)) for one in plans]
    is_same = not (facts or layers or tensors)
    value = {
        "is_same": is_same,
        "workload": strict.dump(workload),
        "bytes": [nbytes for nbytes, _ in totals],
        "bits_per_value": [bits for _, bits in totals],
        "facts": facts,
        "layers": layers,
        "tensors": tensors,
        "provenance": provenance,
    }
    headers = ("layer", "K", "V", "sinks + window", "bytes per token", "bytes")
    readable = {name: pair for name, pair in provenance.items() if not name.endswith(".windows")}
    others = [(name, *map(str, pair)) for name, pair in (facts | readable).items()]
    others += [(f"tensor {name}", "", word) for name, word in tensors.items()]
    parts = [_totals_table(totals, workload), console.View("Layers that differ", headers, rows)]
    parts += [console.View("Model, tensors and provenance", ("", "before", "after"), others)]
    given.show(value, *(part for part in parts if part.rows))
    given.reporter().say("the plans do the same" if is_same else "the plans differ")


def _changes(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """By name, both values where they differ; None for an absent one."""
    pairs = {name: (before.get(name), after.get(name)) for name in sorted(before.keys() | after.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _totals_table(totals: list[tuple[int, float]], workload: plan_file.Workload) -> console.View:
    rows = [
        ("cache", *(f"{format_bytes(nbytes)} ({nbytes})" for nbytes, _ in totals), f"{totals[1][0] - totals[0][0]:+d}"),
        ("bits per value", *(f"{bits:.3f}" for _, bits in totals), f"{totals[1][1] - totals[0][1]:+.3f}"),
    ]
    title = f"Plans at batch {workload.batch} x {workload.context} tokens"
    return console.View(title, ("", "before", "after", "change"), rows)
