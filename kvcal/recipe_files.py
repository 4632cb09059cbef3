"""Recipes as files: where they are, how one is read, and how `--set section.key=value` changes single knobs
of it.

The recipes that come with kvcal are found by name. Values given on the command line go through the same
strict dataclasses as the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kvcal.artifact import require_file
from kvcal.errors import UsageError, did_you_mean
from kvcal.recipe import BUDGET_KINDS, Recipe
from kvcal.strict import dump, parse

# In the wheel, and in a clone.
RECIPE_FOLDERS = (Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes")


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that come with kvcal, sorted."""
    return tuple(sorted({path.stem for folder in RECIPE_FOLDERS for path in folder.glob("*.toml")}))


def find_recipe(name: str) -> Path:
    """A path, or the name of a recipe that comes with kvcal, with or without its folder."""
    if Path(name).is_file():
        return Path(name)
    stem = Path(name).name.removesuffix(".toml") if Path(name).parent in (Path("recipes"), Path(".")) else name
    for folder in RECIPE_FOLDERS:
        path = folder / f"{stem}.toml"
        if path.is_file():
            return path
    if name:
        require_file(name, UsageError)
    raise UsageError(
        f"recipe {name!r} is neither a file nor one of {list(recipe_names())}",
        hint=did_you_mean(stem, recipe_names()) or "give the path of a TOML file or one of these names",
    )


def load_recipe(name: str) -> Recipe:
    """Read and check a recipe, and the recipes that it names.

    Raises:
        UsageError: not found, not TOML, unknown key or value out of range, with its place.
    """
    recipe = _read(name)
    _require_named(recipe, f"{name}: ")
    return recipe


def _read(name: str) -> Recipe:
    path = find_recipe(name)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as broken:
        raise UsageError(f"{path}: not TOML: {broken}") from None
    return parse(Recipe, {"name": path.stem, **content}, str(path), UsageError)


def _require_named(recipe: Recipe, place: str) -> None:
    """UsageError unless the recipes that ``recipe`` names have [formats], or, as systems of a search, one of
    [formats], [importance] and [allocate] alone."""
    require_baselines(recipe.evaluate.against, f"{place}evaluate.against")
    same = None if recipe.allocate is None else recipe.allocate.same_bytes_as
    require_baselines(() if same is None else (same,), f"{place}allocate.same_bytes_as")
    names = set()
    for name in () if recipe.search is None else recipe.search.systems:
        system = _read(name)
        others = [part for part in ("search", "tune") if getattr(system, part) is not None]
        if others or system.name in names:
            fault = f"has [{others[0]}]" if others else f"is the second one named {system.name!r}"
            hint = "name recipes such as basis, kitty or kvmix, each once"
            raise UsageError(f"{place}search.systems: recipe {name!r} {fault}", hint=hint)
        names.add(system.name)


def require_baselines(names: Iterable[str], place: str) -> None:
    """UsageError unless all are recipes with [formats], whose plans and bytes are known without a profile."""
    for name in names:
        if _read(name).formats is None:
            raise UsageError(
                f"{place}: recipe {name!r} has no [formats]",
                hint="name a recipe with fixed formats, such as kivi-2; the other one is run by itself",
            )


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Knobs by dotted name, and their values, of ``section.key=value`` texts: values are TOML, a bare word is
    a string, and no value (None) restores the default. The last of several counts."""
    known = _known_knobs()
    sections = sorted({name.partition(".")[0] for name in known})
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected section.key=value", hint="for example --set allocate.bits=2.5")
        if name not in known:
            section, key = name.rpartition(".")[::2]
            keys = [other.rpartition(".")[2] for other in known if section and other.rpartition(".")[0] == section]
            unknown = f"key {key!r} of [{section}]" if keys else f"section or key {name!r}"
            values = [other for other, is_table in known.items() if not is_table]
            near = [other for other in values if other.endswith(f".{name}")] or get_close_matches(name, values, n=1)
            raise UsageError(
                f"--set {text}: unknown {unknown}; allowed: {', '.join(keys or sections)}",
                hint=f"did you mean --set {near[0]}={value}?" if near else None,
            )
        settings[name] = _toml_value(value)
    return settings


@cache
def _known_knobs() -> dict[str, bool]:
    """Every key of a recipe file by its dotted name, and whether it is a table."""

    def below(section: str, table: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
        for key, about in table["properties"].items():
            tables = [kind["$ref"] for kind in about.get("anyOf", [about]) if "$ref" in kind]
            yield section + key, bool(tables)
            for name in tables:
                yield from below(f"{section}{key}.", schema["$defs"][name.rpartition("/")[2]])

    schema = TypeAdapter(Recipe).json_schema()
    return dict(below("", schema))


def _toml_value(text: str) -> Any:
    if not text:
        return None
    try:
        content = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return content["value"] if content.keys() == {"value"} else text


def with_knobs(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with the knobs in ``changes``: dotted names to JSON-like values, None for the default. One
    kind of budget replaces another.

    Raises:
        UsageError: a value of the wrong type or out of range, or knobs that do not go together.
    """
    budgets = {f"allocate.{kind}": None for kind in BUDGET_KINDS}
    if any(changes.get(name) is not None for name in budgets):
        changes = budgets | dict(changes)
    content = dump(recipe)
    for name, value in changes.items():
        *sections, key = name.split(".")
        table = content
        for section in sections:
            table[section] = table = {} if table.get(section) is None else table[section]
        table[key] = value
        if value is None:
            del table[key]
    changed: Recipe = parse(Recipe, content, f"recipe {recipe.name}, as changed", UsageError)
    _require_named(changed, "")
    return changed
