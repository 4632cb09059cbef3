"""Commands on compiled plans: ``kvcal inspect``, ``report``, ``diff``, ``verify``, ``eval``, ``generate`` and
``pack-prefix``. The first two load no transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal import console
from kvcal.commands import options
from kvcal.errors import ArtifactError, UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import MAX_SEED, format_bytes, parse_bytes

with lazy_imports():
    from kvcal import artifact, stored_tensor, strict, tables
    from kvcal import folder as artifacts
    from kvcal import report as report_page
    from kvcal.cache import prefix_file
    from kvcal.plan import damage as damage_file
    from kvcal.plan import plan as plan_file
    from kvcal.stages import check_damage as damage_stage
    from kvcal.stages import generate as generate_stage
    from kvcal.stages import pipeline
    from kvcal.stages import verify as verify_stage
    from kvcal.stages.allocate import fixed_widths
    from kvcal.stages.allocate import stage as allocate_stage
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
        typer.Option(help="Largest cache at the plan's workload, such as 1GB.", callback=options.of_bytes),
    ] = None

    def gates(self) -> evaluate_stage.Gates:
        max_bytes = None if self.max_bytes is None else parse_bytes(self.max_bytes)
        return evaluate_stage.Gates(self.max_kl, evaluate_stage.read_accuracies(self.min_accuracy or ()), max_bytes)


@options.spread
def inspect(
    plan: options.PlanArgument,
    sizes: options.WorkloadOptions,
    given: options.OutputOptions,
    why: Annotated[
        int | None,
        typer.Option(
            metavar="LAYER",
            help="What each option would cost this layer, and what fixed widths lose, from a plan of `kvcal plan`, or "
            "its folder.",
        ),
    ] = None,
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Also show what the plan was made from: data, digests, versions.")
    ] = False,
) -> None:
    """Show a plan: how much smaller, what takes its bytes, formats and bytes of every layer; or, with --why,
    the options that a layer had.

    Example: `kvcal inspect plan.safetensors --batch 32 --context 8192`

    Example: `kvcal inspect plan.safetensors --why 7`
    """
    loaded = plan_file.load_plan(plan)
    if why is not None:
        found = allocate_stage.read_choices(plan, why)
        found = found or allocate_stage.choices_of(loaded, artifacts.Folder.of_plan(plan.parent), why)
        widths = fixed_widths.report_of(loaded)
        value = asdict(found) | ({} if widths is None else {fixed_widths.KEY: strict.dump(widths)})
        given.show(value, *([] if widths is None else [tables.widths_table(widths)]), tables.choices_table(found))
        return
    damage = damage_file.load_damage(plan, loaded)
    workload = sizes.workload(loaded.workload)
    value = tables.plan_json(loaded, workload) | {"damage": strict.dump(damage), "is_checked": damage is not None}
    layers = tables.layer_table(loaded.layers, loaded.cache_dtype, workload)
    origin = [tables.origin_table(loaded)] if provenance else []
    given.show(value, tables.plan_table(loaded, workload, damage), layers, *origin)


@options.spread
def report(folder: options.FolderArgument, given: options.OutputOptions) -> None:
    """Write report.html of what a folder of `kvcal plan`, `run`, `search`, `compare`, `tune` or `eval` holds:
    one page, which needs no network, and its figures bits.png and quality.png. These commands write them,
    too.

    Example: `kvcal report artifacts/first`
    """
    path = report_page.write_report(artifacts.Folder.of_plan(folder))
    given.show({"report": str(path)})
    given.reporter().say(f"report: {path}")


@options.spread
def diff(
    before: options.PlanArgument,
    after: Annotated[Path, typer.Argument(help="Another plan.safetensors file.", show_default=False)],
    sizes: options.WorkloadOptions,
    given: options.OutputOptions,
) -> None:
    """Compare two plans: formats and bytes of every layer that differs, tensors, model and provenance.

    Example: `kvcal diff artifacts/first/plan.safetensors artifacts/second/plan.safetensors --context 32768`
    """
    plans = plan_file.load_plan(before), plan_file.load_plan(after)
    workload = sizes.workload(plans[0].workload)
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


@options.spread
def verify(
    plan: options.PlanArgument,
    model: options.ModelOption,
    given: options.ModelOptions,
    data: Annotated[list[str] | None, typer.Option(help="Text to measure on; default: kvcal's own.")] = None,
    allow_damage: options.AllowDamage = False,
) -> None:
    """Check that a plan is sound, is this model's, that the cache allocates exactly the bytes it predicts,
    and that it does not destroy the model: exit code 7 beyond the limits of `kvcal plan`. What was measured
    is kept next to the plan, for `kvcal inspect` and engines.

    Example: `kvcal verify plan.safetensors --model Qwen/Qwen3-8B`
    """
    loaded_plan = plan_file.load_plan(plan)
    verify_stage.require_same_config(loaded_plan, model)
    recorded = damage_file.load_damage(plan, loaded_plan)
    with given.reporting() as reporter:
        loaded = given.load(model)
        checks = verify_stage.verify_plan(loaded_plan, loaded, loaded.max_context, reporter)
        damage = damage_stage.measure_damage(loaded_plan, loaded, data or (), reporter)
        if damage is not None:
            try:
                damage_file.save_damage(damage, plan)
            except ArtifactError as refused:  # a folder that is only read
                reporter.say(f"warning: the measurement is not kept: {refused.message}")
    damage_file.require_undamaged(damage, allow_damage)
    if recorded is None:
        checks.append(verify_stage.Check("unchecked", "until now no measurement of its damage lay next to the plan"))
    checks.append(verify_stage.Check("damage", "not measured" if damage is None else str(damage)))
    passed = console.View("All checks passed", ("check", "detail"), [(check.name, check.detail) for check in checks])
    given.show([asdict(check) for check in checks], passed)


@options.spread
def eval_command(
    plan: options.PlanArgument,
    model: options.ModelOption,
    given: options.RecipeOptions,
    limits: GateOptions,
    posed: options.TaskOptions,
    recipe: options.RecipeOption = "default",
    out: options.Out = Path("artifacts/eval"),
    allow_damage: options.AllowDamage = False,
) -> None:
    """Perplexity, KL to 16 bits, top-1 agreement and exact match, through the packed cache, as the recipe's
    [evaluate] says; next to the plan, 16 bits and the baselines of `--set evaluate.against` are measured. A
    model of yours is measured on installed text, or --data, and on the tasks of --tasks alone, unless
    --recipe is a file.

    With limits, such as those of a CI job, the command ends with exit code 7 when the plan is beyond one of
    them; the table is printed all the same.

    Example: `kvcal eval plan.safetensors --model reasoner-10m --set 'evaluate.against=["kivi-2"]'`

    Example: `kvcal eval plan.safetensors --model M --tasks gsm8k,arc_easy:acc_norm --limit 200`

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
    folder = artifacts.Folder.create(out)
    verify_stage.require_same_config(loaded_plan, model)
    with given.reporting() as reporter:
        loaded = given.load(model)
        verify_stage.require_same_model(loaded_plan, loaded)
        evaluation = pipeline.evaluate_plan(base, loaded, loaded_plan, folder, reporter)
        damage = damage_stage.damage_of_row(loaded_plan, loaded, evaluation.rows[-1], folder.plan, reporter)
    results = list(gates.results(evaluation.rows[-1]))
    shown = [tables.evaluation_table(evaluation), *([tables.gates_table(results)] if results else [])]
    given.show(
        strict.dump(evaluation) | {"gates": [asdict(one) for one in results], "damage": strict.dump(damage)}, *shown
    )
    report_page.write_report(folder)  # last: what is damaged there must not hide the numbers
    following = options.command_line("generate", "--model", model, "--plan", plan, "--prompt", "-")
    given.reporter().say(f"report: {folder.report}\nnext: {following} < prompt.txt")
    evaluate_stage.require_passed(plan.name, results)
    damage_file.require_undamaged(damage, allow_damage)


@options.spread
def generate(
    model: options.ModelOption,
    plan: options.PlanOption,
    prompt: Annotated[str, typer.Option(help="The prompt; - reads stdin.")],
    given: options.ModelOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", **options.TOKENS)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy; else 0.001 to 100.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=MAX_SEED)] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    prefix: Annotated[
        Path | None, typer.Option(help="A file of `kvcal pack-prefix`, made with this plan: how the prompt begins.")
    ] = None,
) -> None:
    """Generate text with a plan's packed cache.

    With --prefix, the packed pages of the prompt's beginning are taken from the file instead of computed;
    what follows reads them as every later token does.

    Example: `kvcal generate --model reasoner-10m --plan plan.safetensors --prompt "Times. 12 x 34"`

    Example: `cat manual.txt question.txt | kvcal generate --model M --plan P --prefix manual.kv --prompt -`
    """
    if chat and prefix is not None:
        raise UsageError("--chat with --prefix: a prefix is packed without a chat template", "leave out one of them")
    if not (temperature == 0 or 0.001 <= temperature <= 100):
        raise UsageError(f"--temperature {temperature}; allowed: 0 (greedy), or 0.001 to 100")
    text = _prompt_text(prompt)
    loaded_plan = plan_file.load_plan(plan)
    verify_stage.require_same_config(loaded_plan, model)
    loaded = given.load(model)
    verify_stage.require_same_model(loaded_plan, loaded)
    result = generate_stage.complete(loaded, loaded_plan, text, max_new_tokens, temperature, seed, chat, prefix)
    if (said := damage_file.concern(damage_file.load_damage(plan, loaded_plan))) is not None:
        given.reporter().say(f"warning: {said}")
    given.show(result, result["text"])
    if given.json:
        return
    reporter = given.reporter()
    if prefix is not None:
        reporter.say(f"{result['prefix_tokens']} tokens of the prompt came from {prefix}")
    taken, raw_bytes = format_bytes(result["cache_bytes"]), format_bytes(result["raw_bytes"])
    said = f"the cache of {result['cached_tokens']} tokens took {taken}, {raw_bytes} at 16 bits"
    if result["cache_bytes"] > result["raw_bytes"] and result["pays_from"] is not None:
        fixed = "transforms, sinks, windows and open pages come first"
        said += f": {fixed}, and one sequence pays from {result['pays_from']} tokens on"
    reporter.say(f"{result['new_tokens']} tokens; {said}")


@options.spread
def pack_prefix(
    model: options.ModelOption,
    plan: options.PlanOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="The prefix file.", show_default=False)],
    given: options.ModelOptions,
    prompt: Annotated[str | None, typer.Option(help="The prompt; - reads stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
) -> None:
    """Take a prompt in and write its packed cache to disk, to be loaded instead of computed again.

    Example: `kvcal pack-prefix --plan plan.safetensors --model reasoner-10m --prompt-file manual.txt -o
    manual.kv`
    """
    artifact.require_output(output, prefix_file.KIND)
    text = _prompt_text(prompt, prompt_file)
    loaded_plan = plan_file.load_plan(plan)
    verify_stage.require_same_config(loaded_plan, model)
    with given.reporting() as reporter:
        loaded = given.load(model)
        verify_stage.require_same_model(loaded_plan, loaded)
        packed = generate_stage.pack(loaded, loaded_plan, text, output)
        reporter.say(f"prefix: {output}")
    size = f"{packed['file_bytes']} bytes, {packed['raw_bytes']} in 16 bits"
    given.show({**packed, "path": str(output)}, f"{output.name}: {packed['num_tokens']} tokens in {size}")


def _prompt_text(prompt: str | None, prompt_file: Path | None = None) -> str:
    """The prompt that a command was given, by itself or in a file; - reads stdin. UsageError for none or
    both, and for what is not UTF-8."""
    if (prompt is None) == (prompt_file is None):
        raise UsageError("expected exactly one of --prompt and --prompt-file")
    if prompt_file is not None:
        return artifact.read_text(prompt_file)
    assert prompt is not None
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode("utf-8")  # arguments, and a lenient stdin, have surrogates for bytes that are not text
    except UnicodeError as refused:
        raise UsageError(f"--prompt{' -: stdin' if prompt == '-' else ''} is not UTF-8: {refused}") from None
    return text
