"""``kvcal list``: the recipes that come with kvcal, and the models that it was run on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from kvcal import console
from kvcal.commands import options, values
from kvcal.commands.decorators import spread
from kvcal.errors import UsageError
from kvcal.lazy_torch import lazy_imports

with lazy_imports():
    from kvcal import recipe as recipe_keys
    from kvcal import recipe_files, strict
    from kvcal.models import config as model_config
    from kvcal.models import files as model_files


@spread
def list_command(
    kind: Annotated[Literal["recipes", "models"], typer.Argument(help="recipes or models.")],
    given: options.OutputOptions,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Print the file of this recipe.", show_default=False, autocompletion=values.complete_recipe
        ),
    ] = None,
) -> None:
    """List the recipes that come with kvcal, or print one; or the models that it was run on.

    Models are the embedded ones, and every family of decoders in transformers, small and with random weights:
    the recipe that `kvcal plan` makes its plan with, or names; and those that are not supported, with the
    reason. Other models are measured when they are loaded.

    Example: `kvcal list recipes`

    Example: `kvcal list recipes default > mine.toml`

    Example: `kvcal list models --json`
    """
    if kind == "models":
        if name is not None:
            raise UsageError(f"{name}: only recipes are printed", hint="`kvcal size MODEL` tells about one model")
        _models(given)
    elif name is None:
        _recipes(given)
    else:
        text = recipe_files.find_recipe(name).read_text(encoding="utf-8")
        given.show(strict.dump(recipe_files.load_recipe(name)), text.removesuffix("\n"))


def _recipes(given: options.OutputOptions) -> None:
    found = [(one, recipe_files.load_recipe(one)) for one in recipe_files.recipe_names()]
    values = [{"name": one, "description": r.description, "chooses_by": chooses_by(r)} for one, r in found]
    table = [(value["name"], value["chooses_by"], value["description"]) for value in values]
    title = "Recipes: `kvcal list recipes NAME` prints one"
    given.show(values, console.View(title, ("recipe", "chooses by", "description"), table))


def chooses_by(recipe: recipe_keys.Recipe) -> str:
    """The stage that decides a recipe's formats, and those that then work on them."""
    if recipe.search is not None:
        choice = "measured KL of all systems"
    elif recipe.tune is not None:
        choice = "task accuracy, thresholds"
    elif recipe.importance is not None:
        choice = "gradient norms"
    elif recipe.allocate is not None:
        choice = f"integer program, {recipe.allocate.objective}"
    else:
        choice = "fixed formats"
    names = ["λ" if name == "reparam" else name for name in recipe.sections]
    return f"{choice}; {', '.join(names)}" if names else choice


def _models(given: options.OutputOptions) -> None:
    listed: dict[str, Any] = {"embedded": list(model_files.embedded_models()), **model_config.families()}
    of_outcome: dict[str, list[dict[str, Any]]] = {"supported": [], "refused": [], "not built": []}
    for one in listed["families"]:
        of_outcome[one["outcome"]].append(one)
    decoder = {False: "", True: ", with is_decoder"}
    supported = [
        (one["model_type"], one["model_class"], one["layers"] + decoder[one["is_decoder"]], one["recipe"])
        for one in of_outcome["supported"]
    ]
    given.show(
        listed,
        console.View("Embedded models", ("name",), [(name,) for name in listed["embedded"]]),
        console.View("Supported families", ("model type", "class", "layers", "recipe"), supported),
        console.View(
            "Families that are not supported",
            ("model type", "reason"),
            [(one["model_type"], one["reason"]) for one in of_outcome["refused"]],
        ),
    )
