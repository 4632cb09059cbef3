"""Commands from a model to plans, by whole recipes: ``kvcal plan``, ``run``, ``search``, ``tune`` and
``compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from kvcal import console
from kvcal.commands import options
from kvcal.errors import UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import format_bytes, parse_bytes

with lazy_imports():
    from kvcal import artifact, recipe_files, strict, tables
    from kvcal import folder as artifacts
    from kvcal import recipe as recipe_keys
    from kvcal import report as report_page
    from kvcal.plan import damage as damage_file
    from kvcal.plan import plan as plan_file
    from kvcal.stages import check_damage as damage_stage
    from kvcal.stages import compare as compare_stage
    from kvcal.stages import fit_budget, formats, memory_needs, pipeline
    from kvcal.stages import search as search_stage
    from kvcal.stages import tune as tune_stage
    from kvcal.stages import verify as verify_stage
    from kvcal.stages.allocate import record as allocation_record
    from kvcal.stages.allocate import stage as allocate_stage
    from kvcal.stages.evaluate import harness


@options.spread
def plan(
    model: options.ModelArgument,
    given: options.RecipeOptions,
    budgets: options.BudgetOptions,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="A recipe with [allocate]; default: default (sensitivity for latent attention), with --search: best.",
            autocompletion=options.complete_recipe,
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Choose among the plans of all systems, on measured KL.")
    ] = False,
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
    """Make a plan for a budget, from the model: profile, allocate (or search), compile, verify. Tells what
    was gained and what to do next. A budget that 16 bits fit needs no plan: that is told, and nothing is
    written.

    Resumes if interrupted. The profile is kept for all budgets; each of them has a folder of its own. A plan
    whose KL to 16 bits is above .5 nats a token, or above .1 with a top-1 agreement below 80 %, ends in exit
    code 7 with the layers that did it, and is not written to --output.

    Example: `kvcal plan Qwen/Qwen3-8B --budget 24GB --batch 8 --context 32768 --data corpus.jsonl -o
    plan.safetensors`

    Example: `kvcal plan reasoner-10m --bits 3.5 --batch 8 --context 4096`
    """
    base = _base_of_plan(recipe, model, search, budgets)
    if search and closest:
        raise UsageError("--closest with --search: a search leaves out what does not fit", "leave out one of them")
    chosen = given.change(base, budgets.whole_plan())
    if output is not None:
        artifact.require_output(output, plan_file.KIND)
    if out is not None:
        artifacts.Folder.create(out)
    besides = " makes the smallest plan, and so does --closest"
    with given.reporting() as reporter, options.naming_what_works(budgets, besides):
        loaded = given.load(model, chosen.data, reporter)
        chosen = given.for_model(chosen, loaded, budgets.whole_plan(), reporter)
        job = artifacts.Job(chosen, loaded, artifacts.Folder(Path()), reporter)
        is_stated = budgets.context or "allocate.context" in recipe_files.read_settings(given.sets or ())
        if not is_stated and recipe in (None, *recipe_files.recipe_names()):
            job = fit_budget.in_own_context(job)
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
        report_page.write_report(folder)
    value = {
        "verdict": verdict,
        "plan": str(path),
        "folder": str(folder.path),
        "report": str(folder.report),
        "gain": asdict(gain),
        "checks": [asdict(check) for check in checks],
        "damage": strict.dump(damage),
    }
    layers = tables.layer_table(made.layers, made.cache_dtype, made.workload)
    given.show(value, layers, tables.budget_table(allocation), gain_table(gain, made))
    following = options.command_line("eval", path, "--model", model, "--out", folder.path)
    reporter.say(f"plan: {path}\nfolder: {folder.path}\nreport: {folder.report}\nnext: {following}")
    damage_file.require_undamaged(damage, allow_damage)


def _base_of_plan(name: str | None, model: str, search: bool, budgets: options.BudgetOptions) -> recipe_keys.Recipe:
    """The recipe of a plan, unchanged. UsageError for one that does not choose, and without a budget."""
    base = recipe_files.load_recipe(name or ("best" if search else "default"))
    if base.allocate is None or (search and base.search is None):
        lacking = "allocate" if base.allocate is None else "search"
        raise UsageError(f"recipe {base.name!r} has no [{lacking}]", hint="`kvcal recipes` lists what each chooses by")
    if not budgets.kinds():
        raise UsageError(
            "no budget given; expected one of --budget, --kv-budget and --bits",
            hint=f"such as --budget 24GB; `kvcal size {model} --memory 24GB` tells what fits",
        )
    return base


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


@options.spread
def run(
    recipe: options.RecipeArgument,
    given: options.RecipeOptions,
    budgets: options.BudgetOptions,
    model: options.OtherModel = None,
    out: options.Out = Path("artifacts/run"),
    allow_damage: options.AllowDamage = False,
) -> None:
    """Run all stages of a recipe, skipping those that are current, and print the table.

    One source serves both calibration and evaluation: they draw from different pools of it. A model of yours
    is measured on installed text, or --data, and on the tasks of `--set evaluate.tasks` alone.

    Example: `kvcal run default --model Qwen/Qwen3-8B --data corpus.jsonl --out artifacts/qwen3`

    Example: `kvcal run default --budget 24GB --batch 8 --context 32768 --set evaluate.tasks=[]`
    """
    if options.is_model(recipe):
        raise UsageError(
            f"kvcal run {recipe}: a model, where a recipe's name or path is expected",
            hint=f"kvcal plan {recipe} --budget 24GB, or kvcal run default --model {recipe}",
        )
    base = recipe_files.load_recipe(recipe)
    is_fixed = base.allocate is None
    if is_fixed and budgets.kinds():
        raise UsageError(
            f"--{budgets.kinds()[0].replace('_', '-')}: recipe {base.name!r} has no [allocate]: no budget "
            "chooses its formats",
            hint="use a recipe with [allocate], such as default; `kvcal recipes` lists what each chooses by",
        )
    measured = options.users_evaluation(recipe, model or base.model)
    others = measured if is_fixed else measured | budgets.whole_plan()
    chosen = given.change(base, others)
    workload = budgets.workload(plan_file.DEFAULT_WORKLOAD) if is_fixed else None
    folder = artifacts.Folder.create(out)
    with given.reporting() as reporter, options.naming_what_works(budgets):
        loaded = given.load(model or chosen.model, chosen.data if chosen.calibrates else None, reporter)
        chosen = given.for_model(chosen, loaded, others, reporter)
        result = pipeline.run(loaded, folder, chosen, workload, reporter)
        damage = damage_stage.damage_of_row(result.plan, loaded, result.evaluation.rows[-1], folder.plan, reporter)
        report_page.write_report(folder)
    shown = [tables.budget_table(result.allocation), tables.evaluation_table(result.evaluation)]
    if chosen.search is not None:
        shown.append(tables.search_table(search_stage.load(folder.search).report))
    value = {
        "allocation": strict.dump(result.allocation),
        "evaluation": strict.dump(result.evaluation),
        "damage": strict.dump(damage),
        "files": {name: str(getattr(folder, name)) for name in ("plan", "evaluation", "bits", "quality", "report")},
    }
    given.show(value, *shown)
    reporter.say(f"plan: {folder.plan}\ntable: {folder.evaluation}\nreport: {folder.report}")
    damage_file.require_undamaged(damage, allow_damage)


@options.spread
def search(
    given: options.RecipeOptions,
    budgets: options.BudgetOptions,
    recipe: options.RecipeArgument = "best",
    model: options.OtherModel = None,
    out: options.Out = Path("artifacts/search"),
    allow_damage: options.AllowDamage = False,
) -> None:
    """Build the plan of every system within the budget, measure the KL of all of them, and write the best
    one. The recipe needs [search]. Resumes after the last finished stage if interrupted; profiles serve
    another budget in the same folder, too.

    Example: `kvcal search best --model Qwen/Qwen3-8B --bits 2.5 --batch 8 --context 32768 --data
    corpus.jsonl`

    Example: `kvcal search best --model Qwen/Qwen3-8B --set search.serve=storage`
    """
    base = recipe_files.load_recipe(recipe)
    if base.search is None:
        raise UsageError(f"recipe {base.name!r} has no [search]", hint="use `kvcal run`, or the recipe best")
    base = given.change(base, budgets.whole_plan())
    folder = artifacts.Folder.create(out)
    with given.reporting() as reporter:
        loaded = given.load(model or base.model, base.data, reporter)
        plan = pipeline.build_plan(loaded, folder, base, reporter=reporter)
        damage = damage_stage.measure_damage(plan, loaded, given.data or (), reporter, folder.plan)
        report_page.write_report(folder)
    searched = search_stage.load(folder.search)
    value = {"report": strict.dump(searched.report), "plan": tables.plan_json(plan, None)}
    value["damage"] = strict.dump(damage)
    given.show(value, tables.search_table(searched.report), tables.budget_table(searched.allocation))
    reporter.say(f"plan: {folder.plan}\nreport: {folder.report}")
    damage_file.require_undamaged(damage, allow_damage)


@options.spread
def tune(
    given: options.RecipeOptions,
    sizes: options.WorkloadOptions,
    recipe: options.RecipeArgument = "mixkvq",
    model: options.OtherModel = None,
    out: options.Out = Path("artifacts/tune"),
    kv_budget: options.KvBudget = None,
) -> None:
    """Search the thresholds of the recipe's key tiers: accuracy up, all-in bits down; write the best plan
    under a cap (tune.max_bits, --kv-budget). The recipe needs [formats] alone.

    Interrupted, it resumes after its finished trials. Started several times on one --out, a GPU each, the
    processes share the trials of one study.

    Example: `kvcal tune mixkvq --model Qwen/Qwen3-8B --set 'tune.tasks=["lm-eval:gsm8k"]' --set
    tune.max_bits=3.4`
    """
    base = recipe_files.load_recipe(recipe)
    base = given.change(base, section="tune")
    max_bytes = None if kv_budget is None else parse_bytes(kv_budget)
    folder = artifacts.Folder.create(out)
    with given.reporting() as reporter:
        loaded = given.load(model or base.model, base.data, reporter)
        plan = formats.formats_plan(base, loaded, sizes.workload(plan_file.DEFAULT_WORKLOAD))
        tuned = formats.tune_plan(loaded, plan, base, folder.path, reporter, max_bytes)
        report_page.write_report(folder)
    table = tables.tuned_table(tuned.tuning, tuned.chosen.thresholds, tuned.plan.workload)
    value = {"chosen": strict.dump(tuned.chosen), "predicted_bytes": tuned.plan.predicted_bytes}
    value |= strict.dump(tuned.tuning)
    given.show(value, table)
    reporter.say(f"plan: {folder.plan}\nstudy: {folder.path / tune_stage.FILE}")
    reporter.say(f"report: {folder.report}")


@options.spread
def compare(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="Recipes: paths, or names of those that come with kvcal.")
    ],
    model: options.ModelOption,
    given: options.RecipeOptions,
    sizes: options.WorkloadOptions,
    posed: options.TaskOptions,
    bits: Annotated[
        list[float] | None,
        typer.Option(help="All-in bits per cached value for the recipes with [allocate]; may be repeated."),
    ] = None,
    recipe: options.RecipeOption = "default",
    out: options.Out = Path("artifacts/compare"),
) -> None:
    """Build and measure several recipes on one model, next to 16 bits, KIVI-2 and KIVI-4.

    Recipes with [allocate] are built once for each --bits, others once. A recipe that fails is a row with the
    reason. All are measured by the [evaluate] of --recipe. What is finished is kept in --out: the same
    command resumes there, and --bits or recipes may be added. `--set evaluate.KEY` changes what is measured,
    any other the recipes that have its section.

    Example: `kvcal compare pm-kvq kitty best --model reasoner-10m --bits 2.25 --bits 2.5 --bits 3`

    Example: `kvcal compare mine.toml --model Qwen/Qwen3-8B --bits 2.5 --batch 16 --context 32768 --json`

    Example: `kvcal compare best kitty --model M --bits 2.5 --data texts.jsonl --tasks gsm8k,arc_easy --limit
    200`
    """
    evaluating = [text for text in given.sets or () if text.startswith(("evaluate.", "data."))]
    spec = replace(given, sets=evaluating, samples=None).recipe(recipe, posed.knobs(recipe, model)).evaluate
    if spec.harness_tasks:
        harness.require_tasks(spec)
    points = _changed(compare_stage.points_of(recipes, bits or ()), given)
    workload = sizes.workload(plan_file.DEFAULT_WORKLOAD)
    folder = artifacts.Folder.create(out)
    calibrations = [point.recipe.data for point in points if point.recipe.calibrates]
    toy = next((data for data in calibrations if data.is_toy or data.source == "auto"), None)
    with given.reporting() as reporter:
        loaded = given.load(model, toy, reporter)
        texts = artifacts.sequences(spec.data, loaded, "report", folder)
        comparison = compare_stage.compare(loaded, points, workload, spec, texts, folder, pipeline.build_plan, reporter)
        report_page.write_report(folder)
    found = compare_stage.verdict(comparison)
    given.show(strict.dump(comparison), tables.comparison_table(comparison), *([] if found is None else [str(found)]))
    reporter.say(f"table: {folder.path / compare_stage.FILE}\nreport: {folder.report}")
    if found is not None:
        winner = found.winner.folder(folder.path / "plans").plan
        following = options.command_line("generate", "--model", model, "--plan", winner, "--prompt", "-")
        reporter.say(f"next: {following} < prompt.txt")
    refusals = [entry.refusal for entry in comparison.entries if entry.refusal is not None]
    if refusals and not any(not entry.is_baseline for entry, _ in comparison.measured):
        raise typer.Exit(refusals[0].exit_code)


def _changed(points: Sequence[compare_stage.Point], given: options.RecipeOptions) -> tuple[compare_stage.Point, ...]:
    """The plans to compare, with the knobs of --set in those sections that their recipes have. UsageError for
    a section that none has, and for budgets and workloads, which are the same for all."""
    sets = [text for text in given.sets or () if not text.startswith("evaluate.")]
    common = {f"allocate.{key}" for key in (*recipe_keys.BUDGET_KINDS, "batch", "context")}
    for name in recipe_files.read_settings(sets):
        section = name.partition(".")[0]
        if name in common:
            raise UsageError(f"--set {name}: the same for all recipes", hint="use --bits, --batch and --context")
        if all(getattr(point.recipe, section) is None for point in points):
            raise UsageError(f"--set {name}: none of the recipes has [{section}]", hint="leave it out")
    changed = []
    for point in points:
        own = [text for text in sets if getattr(point.recipe, text.partition("=")[0].partition(".")[0]) is not None]
        changed.append(replace(point, recipe=replace(given, sets=own).change(point.recipe)))
    return tuple(changed)
