"""Commands from a model to a plan, and from a plan to the next: ``kvcal plan`` and ``kvcal diff``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcal import console, distributed
from kvcal.commands import options
from kvcal.errors import UsageError
from kvcal.quantities import format_bytes

if TYPE_CHECKING:
    from kvcal.plan.diff import PlanDiff
    from kvcal.plan.plan import Plan, Workload
    from kvcal.recipe import AllocateSpec
    from kvcal.stages.evaluate import Row
    from kvcal.stages.gain import Gain


@options.spread
def plan(
    model: options.ModelArgument,
    given: options.RecipeOptions,
    budgets: options.BudgetOptions,
    served: options.ServeOptions,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="A recipe with [allocate]; default: default, with --search: best.",
            autocompletion=options.complete_recipe,
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Choose among compositions of all systems, on measured KL: hours.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the results; default: artifacts/ and the model's name.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this plan's folder in --out; default: recipe, budget and workload.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the plan here.")] = None,
    dry_run: options.DryRun = False,
) -> None:
    """Make a plan for a budget, from the model: profile, allocate (or search), compile, verify. Tells what was gained
    and what to do next.

    Resumes if interrupted. The profile is kept for all budgets; each of them has a folder of its own.

    Example: `kvcal plan Qwen/Qwen3-8B --budget 24GB --batch 8 --context 32768 --data corpus.jsonl -o plan.safetensors`

    Example: `kvcal plan reasoner-10m --bits 3 --batch 8 --context 4096`
    """
    from dataclasses import asdict

    from kvcal import tables as views
    from kvcal.charts.report import write_report
    from kvcal.folder import Folder, Job, max_context
    from kvcal.heat_map import heat_map
    from kvcal.plan.plan import save_plan
    from kvcal.recipe_files import load_recipe
    from kvcal.run import pipeline
    from kvcal.stages import allocate as allocation_stage
    from kvcal.stages import profile as profile_stage
    from kvcal.stages.gain import gain_of
    from kvcal.stages.verify import verify_plan

    if not budgets.kinds():
        raise UsageError(
            "no budget given; expected one of --budget, --kv-budget and --bits",
            hint=f"such as --budget 24GB; `kvcal size {model} --memory 24GB` tells what fits",
        )
    base = load_recipe(recipe or ("best" if search else "default"))
    if base.allocate is None or (search and base.search is None):
        lacking = "allocate" if base.allocate is None else "search"
        raise UsageError(f"recipe {base.name!r} has no [{lacking}]", hint="`kvcal recipes` lists what each chooses by")
    chosen = given.change(base, budgets.knobs() | served.knobs(base))
    assert chosen.allocate is not None
    with given.reporting() as reporter:
        loaded = given.load(model, chosen.data, reporter)
        out = out or Path("artifacts") / loaded.identity.id.rpartition("/")[2]
        folder = Folder.create(distributed.own_folder(out, "*"))
        folder = folder.named(name or f"{chosen.name}-{budget_name(chosen.allocate)}")
        Folder.create(folder.path)
        if dry_run:
            given.show_estimates(Job(chosen, loaded, folder, reporter))
            return
        made = pipeline.build_plan(loaded, folder, chosen, reporter=reporter)
        checks = verify_plan(made, loaded, max_context(loaded), reporter)
        reporter.say(f"verify: {len(checks)} checks passed")
        allocation = allocation_stage.load(folder.allocation)[0]
        profile = None if chosen.search else profile_stage.load(folder.profile)
        vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        gain = gain_of(made, allocation, vocab_size, profile)
        path = output or folder.plan
        if output is not None and distributed.rank() == 0:
            save_plan(made, output)
        write_report(folder)
    value = {
        "plan": str(path),
        "folder": str(folder.path),
        "report": str(folder.report),
        "gain": asdict(gain),
        "checks": views.checks_json(checks),
    }
    layers = views.layer_table(made.layers, made.cache_dtype, made.workload)
    picture = heat_map(made.layers)
    given.show(value, layers, picture, views.budget_table(allocation), gain_table(gain, made.workload))
    reporter.say(f"plan: {path}\nreport: {folder.report}\nnext: kvcal eval {path} --model {model} --out {folder.path}")


def budget_name(spec: AllocateSpec) -> str:
    """A folder's name for a budget and its workload, such as "24GB-8x32768"."""
    size = f"{spec.bits:g}bits" if spec.bits is not None else spec.budget or f"kv-{spec.kv_budget}"
    return f"{size.replace(' ', '')}-{spec.batch}x{spec.context}"


def gain_table(gain: Gain, workload: Workload) -> console.View:
    """The plan beside 16 bits."""
    batch, context = workload.batch, workload.context
    rows = [
        ("cache", format_bytes(gain.raw_bytes), f"{format_bytes(gain.cache_bytes)}, {gain.ratio:.2f}x smaller"),
        ("all-in bits per value", "", f"{gain.bits_per_value:.3f}"),
        (f"largest batch at {context} tokens", str(gain.raw_fit.max_batch), _fit(gain, "max_batch")),
        (f"largest context at batch {batch}", str(gain.raw_fit.max_context), _fit(gain, "max_context")),
    ]
    if gain.expected_kl is not None:
        rows.append(("expected KL", "0", f"{gain.expected_kl:.3g} nats per token ({gain.kl_source})"))
    return f"Gain within {format_bytes(gain.budget)}, at {batch} x {context}", ("", "16 bits", "plan"), rows


def _fit(gain: Gain, name: str) -> str:
    return "the plan's alone" if gain.fit is None else str(getattr(gain.fit, name))


@options.spread
def diff(
    before: options.PlanArgument,
    after: Annotated[Path, typer.Argument(help="Another plan.safetensors file.", show_default=False)],
    sizes: options.WorkloadOptions,
    given: options.OutputOptions,
) -> None:
    """Compare two plans: formats and bytes of every layer that differs, tensors, model and provenance; and what was
    measured, where an evaluation.json lies beside both.

    Example: `kvcal diff artifacts/first/plan.safetensors artifacts/second/plan.safetensors --context 32768`
    """
    from kvcal.plan.diff import diff_plans
    from kvcal.plan.plan import load_plan
    from kvcal.strict import dump

    plans = load_plan(before), load_plan(after)
    workload = sizes.workload(plans[0].workload)
    found = diff_plans(*plans, workload)
    measured = [_measured(path, one) for path, one in zip((before, after), plans, strict=True)]
    totals = [(one.nbytes(workload.lengths), one.bits_per_value(workload)) for one in plans]
    layers = [
        {
            "layer": one.index,
            "before": None if one.before is None else dump(one.before),
            "after": None if one.after is None else dump(one.after),
            "bytes": [one.bytes_before, one.bytes_after],
        }
        for one in found.layers
    ]
    value = {
        "is_same": found.is_same,
        "workload": dump(workload),
        "bytes": [nbytes for nbytes, _ in totals],
        "bits_per_value": [bits for _, bits in totals],
        "facts": found.facts,
        "layers": layers,
        "tensors": found.tensors,
        "provenance": found.provenance,
        "measured": [None if row is None else dump(row) for row in measured],
    }
    tables = [_totals_table(totals, measured, workload), _layers_table(found), _values_table(found)]
    given.show(value, *(table for table in tables if table[2]))
    given.reporter().say("the plans do the same" if found.is_same else "the plans differ")


def _measured(path: Path, plan: Plan) -> Row | None:
    """The row of the plan in the evaluation beside it; None where there is none."""
    evaluation = path.with_name("evaluation.json")
    if not evaluation.is_file():
        return None
    from kvcal.stages.evaluate import load_evaluation

    return next((row for row in load_evaluation(evaluation).rows if row.plan_sha256 == plan.sha256), None)


def _totals_table(totals: list[tuple[int, float]], measured: list[Row | None], workload: Workload) -> console.View:
    rows = [
        ("cache", *(f"{format_bytes(nbytes)} ({nbytes})" for nbytes, _ in totals), f"{totals[1][0] - totals[0][0]:+d}"),
        ("bits per value", *(f"{bits:.3f}" for _, bits in totals), f"{totals[1][1] - totals[0][1]:+.3f}"),
    ]
    if None not in measured:
        columns: dict[str, Any] = {"KL": lambda row: row.text.kl, "top-1": lambda row: row.text.top1_agreement}
        columns |= {"accuracy": lambda row: row.accuracy}
        for name, read in columns.items():
            values = [read(row) for row in measured]
            if None not in values:
                rows.append((name, *(f"{one:.5g}" for one in values), f"{values[1] - values[0]:+.3g}"))
    return f"Plans at batch {workload.batch} x {workload.context} tokens", ("", "before", "after", "change"), rows


def _layers_table(found: PlanDiff) -> console.View:
    from kvcal.plan.plan import SIDES
    from kvcal.tables import side_name

    rows = []
    for one in found.layers:
        cells = []
        for side in SIDES:
            names = [
                "none" if layer is None or not layer.is_paged else side_name(layer, side)
                for layer in (one.before, one.after)
            ]
            cells.append(names[0] if names[0] == names[1] else " -> ".join(names))
        rows.append((str(one.index), *cells, f"{one.bytes_after - one.bytes_before:+d}"))
    return "Layers that differ", ("layer", "K", "V", "bytes"), rows


def _values_table(found: PlanDiff) -> console.View:
    rows = [(name, str(pair[0]), str(pair[1])) for name, pair in (found.facts | found.provenance).items()]
    rows += [(f"tensor {name}", *_presence(change)) for name, change in found.tensors.items()]
    return "Model, tensors and provenance", ("", "before", "after"), rows


def _presence(change: str) -> tuple[str, str]:
    return {"added": ("absent", "there"), "removed": ("there", "absent"), "changed": ("there", "other values")}[change]
