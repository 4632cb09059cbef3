"""Commands that run a whole recipe: ``kvcal run``, ``search`` and ``tune``."""

from __future__ import annotations

from pathlib import Path

from kvcal.commands import options
from kvcal.commands.decorators import spread
from kvcal.errors import UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import parse_bytes

with lazy_imports():
    from kvcal import folder as artifacts
    from kvcal import recipe_files, strict, tables
    from kvcal.plan import plan as plan_file
    from kvcal.stages import check_damage as damage_stage
    from kvcal.stages import formats, pipeline
    from kvcal.stages import search as search_stage
    from kvcal.stages import tune as tune_stage


@spread
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
            hint="use a recipe with [allocate], such as default; `kvcal list recipes` tells what each chooses by",
        )
    measured = options.users_evaluation(recipe, model or base.model)
    others = measured if is_fixed else measured | budgets.knobs()
    chosen = given.change(base, others)
    workload = budgets.workload(plan_file.DEFAULT_WORKLOAD) if is_fixed else None
    folder = artifacts.Folder.create(out)
    with options.naming_what_works(budgets), given.job(model or chosen.model, chosen, folder, others) as job:
        result = pipeline.run(job.loaded, folder, job.recipe, workload, job.reporter)
        row = result.evaluation.rows[-1]
        damage = damage_stage.damage_of_row(result.plan, job.loaded, row, folder.plan, job.reporter)
    shown = [tables.budget_table(result.allocation), tables.evaluation_table(result.evaluation)]
    if job.recipe.search is not None:
        shown.append(tables.search_table(search_stage.load(folder.search).report))
    value = {
        "allocation": strict.dump(result.allocation),
        "evaluation": strict.dump(result.evaluation),
        "damage": strict.dump(damage),
        "files": {name: str(getattr(folder, name)) for name in ("plan", "evaluation", "report")},
    }
    said = {"plan": folder.plan, "table": folder.evaluation}
    given.finish(folder, value, *shown, said=said, damage=damage, allow_damage=allow_damage)


@spread
def search(
    given: options.RecipeOptions,
    budgets: options.BudgetOptions,
    recipe: options.RecipeArgument = "best",
    model: options.OtherModel = None,
    out: options.Out = Path("artifacts/search"),
    allow_damage: options.AllowDamage = False,
) -> None:
    """Build the plan of every system within the budget, measure the KL of all, and write the best one.

    The recipe needs [search]. Resumes after the last finished stage if interrupted; profiles serve
    another budget in the same folder, too.

    Example: `kvcal search best --model Qwen/Qwen3-8B --bits 2.5 --batch 8 --context 32768 --data
    corpus.jsonl`

    Example: `kvcal search best --model Qwen/Qwen3-8B --set search.serve=storage`
    """
    base = recipe_files.load_recipe(recipe)
    if base.search is None:
        raise UsageError(f"recipe {base.name!r} has no [search]", hint="use `kvcal run`, or the recipe best")
    base = given.change(base, budgets.knobs())
    folder = artifacts.Folder.create(out)
    with given.job(model or base.model, base, folder) as job:
        plan = pipeline.build_plan(job.loaded, folder, base, reporter=job.reporter)
        damage = damage_stage.measure_damage(plan, job.loaded, given.data or (), job.reporter, folder.plan)
    searched = search_stage.load(folder.search)
    value = {"report": strict.dump(searched.report), "plan": tables.plan_json(plan, None)}
    value["damage"] = strict.dump(damage)
    shown = tables.search_table(searched.report), tables.budget_table(searched.allocation)
    given.finish(folder, value, *shown, said={"plan": folder.plan}, damage=damage, allow_damage=allow_damage)


@spread
def tune(
    given: options.RecipeOptions,
    sizes: options.WorkloadOptions,
    recipe: options.RecipeArgument = "mixkvq",
    model: options.OtherModel = None,
    out: options.Out = Path("artifacts/tune"),
    kv_budget: options.KvBudget = None,
) -> None:
    """Search the thresholds of a recipe's key tiers: accuracy up, bits down.

    Writes the best plan under a cap (tune.max_bits, --kv-budget). The recipe needs [formats] alone.
    Interrupted, it resumes after its finished trials. Started several times on one --out, a GPU each, the
    processes share the trials of one study.

    Example: `kvcal tune mixkvq --model Qwen/Qwen3-8B --set 'tune.tasks=["lm-eval:gsm8k"]' --set
    tune.max_bits=3.4`
    """
    base = recipe_files.load_recipe(recipe)
    base = given.change(base, section="tune")
    max_bytes = None if kv_budget is None else parse_bytes(kv_budget)
    folder = artifacts.Folder.create(out)
    with given.job(model or base.model, base, folder) as job:
        plan = formats.formats_plan(base, job.loaded, sizes.workload(plan_file.DEFAULT_WORKLOAD))
        tuned = formats.tune_plan(job.loaded, plan, base, folder.path, job.reporter, max_bytes)
    table = tables.tuned_table(tuned.tuning, tuned.chosen.thresholds, tuned.plan.workload)
    value = {"chosen": strict.dump(tuned.chosen), "predicted_bytes": tuned.plan.predicted_bytes}
    value |= strict.dump(tuned.tuning)
    given.finish(folder, value, table, said={"plan": folder.plan, "study": folder.path / tune_stage.FILE})
