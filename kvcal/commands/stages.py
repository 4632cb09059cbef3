"""Commands on the stages of a folder: ``kvcal profile``, ``allocate``, ``transform``, ``fit-predictors`` and
``compile``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal import console
from kvcal.commands import options
from kvcal.commands.decorators import spread
from kvcal.errors import UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import parse_bytes

with lazy_imports():
    from kvcal import artifact, recipe_files, strict, tables
    from kvcal import folder as artifacts
    from kvcal import recipe as recipe_keys
    from kvcal.plan import damage as damage_file
    from kvcal.plan import plan as plan_file
    from kvcal.stages import check_damage as damage_stage
    from kvcal.stages import formats, pipeline
    from kvcal.stages import transform as transforms
    from kvcal.stages import verify as verify_stage
    from kvcal.stages.allocate import stage as allocate_stage
    from kvcal.stages.profile import record as profile_record


@spread
def profile(
    model: options.ModelArgument,
    out: options.Out,
    given: options.RecipeOptions,
    recipe: options.RecipeOption = "default",
) -> None:
    """Measure each layer's sensitivity to KV quantization, for the recipe's candidates.

    Resumes if interrupted.

    Example: `kvcal profile meta-llama/Llama-3.1-8B --out artifacts/llama --data corpus.jsonl --samples 32`
    """
    folder = artifacts.Folder.create(out)
    with given.job(model, given.recipe(recipe), folder) as job:
        result = formats.profile_folder(job.loaded, folder, job.recipe, job.reporter)
    given.show(tables.profile_json(result), tables.profile_table(result))
    job.reporter.say(f"profile: {folder.profile}")


@spread
def allocate(
    folder: options.FolderArgument,
    given: options.OutputOptions,
    budgets: options.BudgetOptions,
    reserve: Annotated[
        str | None, typer.Option(help="Bytes kept free for what transforms will take; default none.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="allocate.KEY=VALUE",
            help="same_bytes_as (a baseline, such as kivi-2), granularity (layer, or block: K and V alike), "
            "objective (sensitivity, kl, combined or importance; default: combined, in a basis kl), workspace "
            "(bytes kept free with --budget, or auto); may be repeated.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Keep this allocation in DIR/NAME, with others; that is then the next stage's DIR."),
    ] = None,
) -> None:
    """Choose every layer's K and V format for a byte budget, exactly.

    Its bytes are those of the compiled plan: transforms, which come later, take part of them (--reserve). A
    second budget replaces the first, unless it has a --name: then `kvcal compile DIR/NAME` compiles it.

    GB = 10^9 bytes, GiB = 2^30. Example: `kvcal allocate artifacts/llama --budget 24GB --batch 8 --context
    32768`

    Example: `kvcal allocate artifacts/llama --bits 2.5 --name small`
    """
    knobs: dict[str, Any] = {}
    for dotted, value in (budgets.knobs() | recipe_files.read_settings(sets or ())).items():
        section, _, key = dotted.rpartition(".")
        if section != "allocate":
            raise UsageError(
                f"--set {dotted}: only knobs of [allocate] are used here", hint="use `kvcal run` for others"
            )
        knobs |= {} if value is None else {key: value}
    if "objective" not in knobs and not profile_record.load(artifacts.Folder(folder).profile).setup.spec.gradients:
        knobs["objective"] = "kl"
    spec = strict.parse(recipe_keys.AllocateSpec, knobs, "allocate", UsageError)
    reporter = given.reporter()
    reserved = 0 if reserve is None else parse_bytes(reserve)
    paths = artifacts.Folder(folder) if name is None else artifacts.Folder(folder).named(name)
    before = paths.allocation.read_bytes() if name is None and paths.allocation.is_file() else None
    with options.naming_what_works(budgets):
        result = formats.allocate_folder(paths, spec, reporter, reserved=reserved)
    layers = tables.layer_table(result.layers, result.cache_dtype, result.workload)
    given.show(strict.dump(result), tables.budget_table(result), layers)
    if before is not None and before != paths.allocation.read_bytes():
        reporter.say("note: the allocation that was here is replaced; --name NAME keeps several side by side")
    if name is not None:
        reporter.say(f"allocation: {paths.allocation}\nnext: {console.command_line('compile', paths.path)}")


@spread
def transform(
    folder: options.FolderArgument,
    model: options.ModelOption,
    given: options.RecipeOptions,
    recipe: options.RecipeOption,
) -> None:
    """Calibrate a recipe's transforms for the formats that were allocated: λ, predictions, error feedback.

    [reparam] has the factors λ that make keys easiest to quantize; [feedback] and [basis] let codes make up
    for each other's errors; other sections are those of systems. `kvcal compile` puts all into
    the plan. Resumes if interrupted.

    --samples and --seq-len are those of [reparam], [feedback] and [basis] themselves.

    Example: `kvcal transform artifacts/llama --model meta-llama/Llama-3.1-8B --recipe pm-kvq --data
    corpus.jsonl --samples 64`
    """
    chosen = given.recipe(recipe)
    sizes = {"num_samples": given.samples, "seq_len": given.seq_len}
    sections = [name for name in ("reparam", "feedback", "basis") if getattr(chosen, name) is not None]
    own = {f"{name}.{key}": size for name in sections for key, size in sizes.items() if size is not None}
    chosen = recipe_files.with_knobs(chosen, own | recipe_files.read_settings(given.sets or ()))
    stages = [stage for stage in transforms.transform_stages() if stage.is_of(chosen)]
    if all(stage.is_optional for stage in stages):
        names = ", ".join(f"[{stage.name}]" for stage in transforms.transform_stages() if not stage.is_optional)
        raise UsageError(
            f"recipe {chosen.name!r} transforms no chosen formats; expected one of {names}",
            hint="a recipe with one, such as pm-kvq; the basis of `default` comes with `kvcal profile`",
        )
    _run_transforms(folder, model, given, chosen, stages)


@spread
def fit_predictors(
    folder: options.FolderArgument,
    model: options.ModelOption,
    given: options.RecipeOptions,
    recipe: options.RecipeOption = "aqua-kv",
) -> None:
    """Fit predictors of each layer's keys and values from the layer before, and say which pay.

    It is the part of `kvcal transform` that the recipe's [predictors] asks for. Resumes if interrupted.

    Example: `kvcal fit-predictors artifacts/llama --model meta-llama/Llama-3.1-8B --data corpus.jsonl
    --samples 256`
    """
    chosen = given.recipe(recipe, section="predictors")
    stages = [stage for stage in transforms.transform_stages() if stage.is_of(chosen)]
    stages = [stage for stage in stages if stage.is_optional or stage.name == "predictors"]
    _run_transforms(folder, model, given, chosen, stages)


def _run_transforms(
    folder: Path,
    model: str,
    given: options.RecipeOptions,
    chosen: recipe_keys.Recipe,
    stages: Sequence[transforms.TransformStage],
) -> None:
    value: dict[str, Any] = {}
    shown: list[console.View] = []
    with given.job(model, chosen, artifacts.Folder(folder)) as job:
        for stage in stages:
            record = stage.make(job)
            if stage.show is not None:
                found, title, header, rows = stage.show(record)
                value[stage.name] = {**found, "path": str(job.folder.of_stage(stage.name))}
                shown.append(console.View(title, header, rows))
    given.show(value, *shown)
    given.reporter().say(f"next: {console.command_line('compile', folder)}")


@spread
def compile_command(
    folder: options.FolderArgument,
    given: options.ModelOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The plan; default DIR/plan.safetensors.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model to check on: folder, .gguf file, hub id or name.")
    ] = None,
    allow_damage: options.AllowDamage = False,
) -> None:
    """Write the plan of an allocation, with the transforms that DIR holds for it.

    With --model, one that destroys the model ends in exit code 7, and is not written to --output.

    Example: `kvcal compile artifacts/llama -o plan.safetensors`
    """
    paths = artifacts.Folder.of_plan(folder)
    reporter = given.reporter()
    path = output or paths.plan
    if output is not None:
        artifact.require_output(output, plan_file.KIND)
    loaded = None if model is None else given.load(model)
    plan = pipeline.compiled(paths, reporter)
    damage = None
    if loaded is not None:
        verify_stage.require_same_model(plan, loaded)
        damage = damage_stage.measure_damage(plan, loaded, (), reporter, path if output is None else None)
    reasons = None if output is None else allocate_stage.reasons_of(plan, paths)
    if damage_file.save_measured(plan, damage, path, allow_damage or output is None, reasons):
        reporter.say(f"compile: {path}")
    if loaded is None:
        check = console.command_line("inspect", path, "--model", plan.model.id)
        reporter.say(f"note: the plan was not measured next to 16 bits: {check}")
    found = strict.dump(damage)
    given.show(tables.plan_json(plan, None) | {"path": str(path), "damage": found})
    damage_file.require_undamaged(damage, allow_damage)
