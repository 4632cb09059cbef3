"""The command line: parse, call one function, print. Heavy imports happen inside commands, so that --help is quick.

Exit codes: 0 ok, 2 usage, 3 infeasible budget, 4 unsupported model, 5 stale, mismatched or corrupt artifact,
130 interrupted.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcal.errors import KvcalError, UsageError

if TYPE_CHECKING:
    from kvcal.models.load import LoadedModel

app = typer.Typer(
    name="kvcal",
    help="Compile a KV-cache quantization plan for a language model, and run it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 ok, 2 usage, 3 infeasible budget, 4 unsupported model, 5 bad artifact, 130 interrupted.",
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No messages and no progress.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU, else the checkpoint's), bfloat16, float16, float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ModelOption = Annotated[str, typer.Option("--model", help="Folder, hub id, or an embedded model's name.")]
PlanArgument = Annotated[Path, typer.Argument(help="A plan.safetensors file.", show_default=False)]
Batch = Annotated[int | None, typer.Option(help="Sequences in the batch.", min=1)]
Context = Annotated[int | None, typer.Option(help="Tokens of each sequence.", min=1)]


def main() -> None:
    """Entry point of the ``kvcal`` command."""
    try:
        app()
    except KvcalError as error:
        from kvcal.console import print_error

        print_error(error)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == 130:  # typer has caught the interrupt
            print("interrupted: what was finished is kept; the same command goes on from there", file=sys.stderr)
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("kvcal"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compile a KV-cache quantization plan for a language model, and run it."""


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's path, or the name of one that comes with kvcal.")],
    model: Annotated[str | None, typer.Option(help="Folder, hub id or embedded name; default: the recipe's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the artifacts; made if needed.")] = Path("artifacts/run"),
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run all stages of a recipe, skipping those that are current, and print the table.

    Example: `kvcal run recipes/default.toml --model Qwen/Qwen3-8B --out artifacts/qwen3`
    """
    from kvcal import console, pipeline, views
    from kvcal.recipe import load_recipe

    loaded_recipe = load_recipe(recipe)
    folder = pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = _load(model or loaded_recipe.model, dtype, device)
        result = pipeline.run(loaded_recipe, loaded, folder, reporter)
    if json:
        console.print_json(views.run_json(result))
        return
    console.print_table(*views.budget_table(result.allocation))
    console.print_table(*views.evaluation_table(result.evaluation))
    reporter.say(f"plan: {folder.plan}\ntable: {folder.evaluation}\npicture: {folder.picture}")


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="Folder, hub id, or an embedded model's name.")],
    out: Annotated[Path, typer.Option(help="Folder of the artifacts; made if needed.")],
    recipe: Annotated[str, typer.Option(help="Recipe with the candidates and the data.")] = "default",
    data: Annotated[
        str | None, typer.Option(help="tasks, a text, JSONL or parquet file or folder, or a hub id.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Column of text or messages; twice: prompt, completion.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration sequences.", min=1)] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.", min=2)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sample.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how a model's keys and values bear quantization. Interrupted, it goes on where it stopped.

    Example: `kvcal profile meta-llama/Llama-3.1-8B --out artifacts/llama --data corpus.jsonl --samples 32`
    """
    from kvcal import console, pipeline, views
    from kvcal.recipe import load_recipe

    base = load_recipe(recipe)
    given: dict[str, Any] = {"source": data, "split": split, "columns": column and tuple(column)}
    given |= {"num_samples": samples, "seq_len": seq_len, "seed": seed}
    spec = replace(base.data, **{key: value for key, value in given.items() if value is not None})
    folder = pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = _load(model, dtype, device)
        result = pipeline.profile_recipe(replace(base, data=spec), loaded, folder, reporter)
    if json:
        console.print_json(views.profile_json(result))
    else:
        console.print_table(*views.profile_table(result))


@app.command()
def allocate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with a profile.")],
    budget: Annotated[str | None, typer.Option(help="Whole device, such as 24GB or 22.5GiB.")] = None,
    kv_budget: Annotated[str | None, typer.Option(help="The cache alone, such as 1.5GiB.")] = None,
    bits: Annotated[float | None, typer.Option(help="All-in bits per cached value.", min=0.1)] = None,
    same_bytes_as: Annotated[str | None, typer.Option(help="A baseline recipe, such as kivi-2.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences in the batch.", min=1)] = 8,
    context: Annotated[int, typer.Option(help="Tokens of each sequence.", min=1)] = 4096,
    workspace: Annotated[str, typer.Option(help="Bytes kept free with --budget, or auto.")] = "auto",
    granularity: Annotated[str, typer.Option(help="layer or head.")] = "layer",
    objective: Annotated[
        str | None, typer.Option(help="sensitivity, kl or combined; default: combined, for heads sensitivity.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Print the whole Pareto front instead; no budget needed.")
    ] = False,
    sweep_points: Annotated[int, typer.Option(help="Budgets to solve where the front is too long.", min=2)] = 48,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose every layer's (or head's) K and V format for a byte budget, exactly.

    GB = 10^9 bytes, GiB = 2^30. Example: `kvcal allocate artifacts/llama --budget 24GB --batch 8 --context 32768`
    """
    from kvcal import console, pipeline, views
    from kvcal.recipe import AllocateSpec
    from kvcal.strict import parse

    knobs: dict[str, Any] = {"budget": budget, "kv_budget": kv_budget, "bits": bits, "same_bytes_as": same_bytes_as}
    knobs |= {"batch": batch, "context": context, "workspace": workspace}
    knobs |= {"granularity": granularity}
    knobs |= {"objective": objective or ("sensitivity" if granularity == "head" else "combined")}
    if sweep and not any((budget, kv_budget, bits, same_bytes_as)):
        knobs["bits"] = 16.0
    spec = parse(AllocateSpec, knobs, "allocate", UsageError)
    reporter = console.TerminalReporter(quiet)
    paths = pipeline.Folder(folder)
    if sweep:
        method, rows = pipeline.sweep_folder(paths, spec, sweep_points)
        if json:
            console.print_json({"method": method, "points": rows})
        else:
            console.print_table(*views.sweep_table(method, rows))
        return
    result = pipeline.allocate_folder(paths, spec, {"recipe": None}, reporter)
    if json:
        console.print_json(views.allocation_json(result))
        return
    console.print_table(*views.budget_table(result))
    console.print_table(*views.layer_table(result.layers, result.cache_dtype, result.workload))


@app.command(name="compile")
def compile_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with an allocation.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The plan; default DIR/plan.safetensors.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the plan of an allocation.

    Example: `kvcal compile artifacts/llama -o plan.safetensors`
    """
    from kvcal import console, pipeline, views

    paths = pipeline.Folder(folder)
    path = output or paths.plan
    plan = pipeline.compile_folder(paths, path, console.TerminalReporter(quiet))
    if json:
        console.print_json(views.plan_json(plan, None) | {"path": str(path)})


@app.command()
def inspect(plan: PlanArgument, batch: Batch = None, context: Context = None, json: Json = False) -> None:
    """Show a plan: formats and bytes of every layer, all-in bits, where it came from.

    Example: `kvcal inspect plan.safetensors --batch 32 --context 8192`
    """
    from kvcal import console, views
    from kvcal.plan import Workload, load_plan

    loaded = load_plan(plan)
    workload = Workload(batch or loaded.workload.batch, context or loaded.workload.context)
    if json:
        console.print_json(views.plan_json(loaded, workload))
        return
    console.print_table(*views.plan_table(loaded, workload))
    console.print_table(*views.layer_table(loaded.layers, loaded.cache_dtype, workload))


@app.command()
def verify(
    plan: PlanArgument,
    model: ModelOption,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a plan is sound, is this model's, and that the cache allocates exactly the bytes it predicts.

    Example: `kvcal verify plan.safetensors --model Qwen/Qwen3-8B`
    """
    from kvcal import console, pipeline, views
    from kvcal.plan import load_plan
    from kvcal.stages.verify import verify_plan

    loaded_plan = load_plan(plan)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = _load(model, dtype, device)
        checks = verify_plan(loaded_plan, loaded, pipeline.max_context(loaded), reporter)
    if json:
        console.print_json(views.checks_json(checks))
    else:
        console.print_table(*views.checks_table(checks))


@app.command(name="eval")
def eval_command(
    plan: PlanArgument,
    model: ModelOption,
    recipe: Annotated[str, typer.Option(help="Recipe whose [evaluate] is used.")] = "default",
    against: Annotated[list[str] | None, typer.Option(help="Baseline recipe to measure too; may be repeated.")] = None,
    data: Annotated[
        str | None, typer.Option(help="tasks, a text, JSONL or parquet file or folder, or a hub id.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Tasks to generate; 'none' for no generation.")] = None,
    problems: Annotated[int | None, typer.Option(help="Problems of each task.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Folder of the table and the picture.")] = Path("artifacts/eval"),
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity, KL to 16 bits, top-1 agreement and exact match, through the packed cache.

    Example: `kvcal eval plan.safetensors --model reasoner-10m --against kivi-2`
    """
    from kvcal import console, pipeline, views
    from kvcal.plan import load_plan
    from kvcal.recipe import load_recipe
    from kvcal.stages.verify import require_same_model

    loaded_plan = load_plan(plan)
    base = load_recipe(recipe)
    spec = base.evaluate
    if data is not None:
        spec = replace(spec, data=replace(spec.data, source=data))
    if task is not None:
        spec = replace(spec, tasks=() if task == ["none"] else tuple(task))
    if problems is not None:
        spec = replace(spec, num_problems=problems)
    spec = replace(spec, against=tuple(against or ()))
    folder = pipeline.Folder.create(out)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = _load(model, dtype, device)
        require_same_model(loaded_plan, loaded)
        named = replace(base, name=plan.stem, evaluate=spec)
        evaluation = pipeline.evaluate_plan(named, loaded, loaded_plan, folder, reporter)
    if json:
        console.print_json(views.evaluation_json(evaluation))
    else:
        console.print_table(*views.evaluation_table(evaluation))


@app.command()
def generate(
    model: ModelOption,
    plan: Annotated[Path, typer.Option(help="A plan.safetensors file.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="The prompt; - reads stdin.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Generate text with a plan's packed cache.

    Example: `kvcal generate --model reasoner-10m --plan plan.safetensors --prompt "Times. 12 x 34"`
    """
    from kvcal import console
    from kvcal.plan import load_plan
    from kvcal.stages.complete import complete
    from kvcal.stages.verify import require_same_model

    loaded_plan = load_plan(plan)
    loaded = _load(model, dtype, device)
    require_same_model(loaded_plan, loaded)
    text = sys.stdin.read() if prompt == "-" else prompt
    result = complete(loaded, loaded_plan, text, max_new_tokens, temperature, seed, chat)
    if json:
        console.print_json(result)
        return
    print(result["text"])
    console.stderr.print(
        f"{result['new_tokens']} tokens; the cache of {result['cached_tokens']} tokens took {result['cache_bytes']} "
        f"bytes, {result['raw_bytes']} in 16 bits",
        highlight=False,
    )


def _load(source: str, dtype: str, device: str) -> LoadedModel:
    from transformers.utils import logging

    from kvcal.models.load import load

    logging.disable_progress_bar()  # its bar would print through ours
    return load(source, dtype=dtype, device=device)


if __name__ == "__main__":
    main()
