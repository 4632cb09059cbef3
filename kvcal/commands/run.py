"""``kvcal run``: all stages of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal.commands.options import Device, Dtype, Json, Quiet, load


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
        loaded = load(model or loaded_recipe.model, dtype, device)
        result = pipeline.run(loaded_recipe, loaded, folder, reporter)
    if json:
        console.print_json(views.run_json(result))
        return
    console.print_table(*views.budget_table(result.allocation))
    console.print_table(*views.evaluation_table(result.evaluation))
    reporter.say(f"plan: {folder.plan}\ntable: {folder.evaluation}\npicture: {folder.picture}")
