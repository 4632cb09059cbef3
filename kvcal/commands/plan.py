"""``kvcal plan``: from a model and a budget to a verified plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvcal import console
from kvcal.commands import options, values
from kvcal.commands.decorators import spread
from kvcal.errors import UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import format_bytes

with lazy_imports():
    from kvcal import artifact, recipe_files, strict, tables
    from kvcal import folder as artifacts
    from kvcal import recipe as recipe_keys
    from kvcal.plan import damage as damage_file
    from kvcal.plan import plan as plan_file
    from kvcal.stages import check_damage as damage_stage
    from kvcal.stages import fit_budget, memory_needs, pipeline
    from kvcal.stages import verify as verify_stage
    from kvcal.stages.allocate import record as allocation_record
    from kvcal.stages.allocate import stage as allocate_stage


@spread
def plan(
    model: options.ModelArgument,
    given: options.RecipeOptions,
    budgets: options.BudgetOptions,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="A recipe with [allocate]; default: default (sensitivity for latent attention).",
            autocompletion=values.complete_recipe,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the results; default: artifacts/ and the model's name.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this plan's folder in --out; default: recipe, budget and workload.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the plan here.")] = None,
    closest: Annotated[
        bool, typer.Option("--closest", help="Where the budget is too small, take the smallest that is feasible.")
    ] = False,
    allow_damage: options.AllowDamage = False,
) -> None:
    """Make a plan for a budget, from the model: profile, allocate (or search), compile, verify.

    Tells what was gained and what to do next. A budget that 16 bits fit needs no plan: that is told, and
    nothing is written.

    Resumes if interrupted. The profile is kept for all budgets; each of them has a folder of its own. A plan
    whose KL to 16 bits is above .5 nats a token, or above .1 with a top-1 agreement below 80 %, ends in exit
    code 7 with the layers that did it, and is not written to --output.

    Example: `kvcal plan Qwen/Qwen3-8B --budget 24GB --batch 8 --context 32768 --data corpus.jsonl -o
    plan.safetensors`

    Example: `kvcal plan reasoner-10m --bits 3.5 --batch 8 --context 4096`
    """
    base = recipe_files.load_recipe(recipe or "default")
    if base.allocate is None:
        raise UsageError(f"recipe {base.name!r} has no [allocate]", "`kvcal list recipes` tells what each chooses by")
    if not budgets.kinds():
        raise UsageError(
            "no budget given; expected one of --budget, --kv-budget and --bits",
            hint=f"such as --budget 24GB; `kvcal size {model} --memory 24GB` tells what fits",
        )
    if base.search is not None and closest:
        raise UsageError("--closest with [search], which leaves out what does not fit", "leave out one of them")
    chosen = given.change(base, budgets.knobs())
    if output is not None:
        artifact.require_output(output, plan_file.KIND)
    if out is not None:
        artifacts.Folder.create(out)
    besides = " makes the smallest plan, and so does --closest"
    with options.naming_what_works(budgets, besides), given.job(model, chosen, None, budgets.knobs()) as job:
        loaded, reporter = job.loaded, job.reporter
        is_stated = budgets.context or "allocate.context" in recipe_files.read_settings(given.sets or ())
        if not is_stated and recipe in (None, *recipe_files.recipe_names()):
            job = fit_budget.in_own_context(job)
        job = fit_budget.with_states(job)
        if (need := fit_budget.need_of_16_bits(job)).fits:
            given.show({"verdict": "16-bit-fits", "plan": None, "folder": None, **asdict(need)})
            reporter.say(f"plan: 16 bits fit: {need}; nothing to quantize, and nothing was written")
            return
        chosen = fit_budget.closest_recipe(job) if closest else job.recipe
        verdict = "made" if chosen == job.recipe else "closest"
        assert chosen.allocate is not None
        out = out or Path("artifacts") / loaded.identity.id.rpartition("/")[2]
        folder = artifacts.Folder.create(out)
        folder = folder.named(name or f"{chosen.name}-{budget_name(chosen.allocate)}")
        made = pipeline.build_plan(loaded, folder, chosen, reporter=reporter)
        checks = verify_stage.verify_plan(made, loaded, loaded.max_context, reporter)
        reporter.say(f"verify: {len(checks)} checks passed")
        allocation = allocation_record.load(folder.allocation)[0]
        gain = memory_needs.gain_of(made, allocation.split, loaded.vocab_size)
        damage = damage_stage.measure_damage(made, loaded, given.data or (), reporter, folder.plan)
        path = folder.plan
        reasons = allocate_stage.reasons_of(made, folder)
        if output is not None and damage_file.save_measured(made, damage, output, allow_damage, reasons):
            path = output
    value = {
        "verdict": verdict,
        "plan": str(path),
        "folder": str(folder.path),
        "report": str(folder.report),
        "gain": asdict(gain),
        "checks": [asdict(check) for check in checks],
        "damage": strict.dump(damage),
    }
    shown = (
        tables.layer_table(made.layers, made.cache_dtype, made.workload),
        tables.budget_table(allocation),
        gain_table(gain, made),
    )
    following = console.command_line("eval", path, "--model", model, "--out", folder.path)
    said = {"plan": path, "folder": folder.path, "next": following}
    given.finish(folder, value, *shown, said=said, damage=damage, allow_damage=allow_damage)


def budget_name(spec: recipe_keys.AllocateSpec) -> str:
    """A folder's name for a budget and its workload, such as "24GB-8x32768"."""
    size = f"{spec.bits:g}bits" if spec.bits is not None else spec.budget or f"kv-{spec.kv_budget}"
    return f"{size.replace(' ', '')}-{spec.batch}x{spec.context}"


def gain_table(gain: memory_needs.Gain, plan: plan_file.Plan) -> console.View:
    """The plan next to 16 bits."""
    workload = plan.workload
    rows = [
        ("cache", format_bytes(gain.raw_bytes), f"{gain.ratio:.2f}x smaller: {format_bytes(gain.cache_bytes)}"),
        (tables.bits_name(plan), "", f"{gain.bits_per_value:.3f}"),
        (f"largest batch at {workload.context} tokens", str(gain.raw_fit.max_batch), _fit(gain, "max_batch")),
        (f"largest context at batch {workload.batch}", str(gain.raw_fit.max_context), _fit(gain, "max_context")),
    ]
    title = f"Gain within {format_bytes(gain.budget)}, at {workload.batch} x {workload.context}"
    return console.View(title, ("", "16 bits", "plan"), rows, tables.bounded_note(plan, workload))


def _fit(gain: memory_needs.Gain, name: str) -> str:
    return "the plan's alone" if gain.fit is None else str(getattr(gain.fit, name))
