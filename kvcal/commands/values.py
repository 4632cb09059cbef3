"""Values of options as they are typed: read, checked and completed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from glob import escape, glob
from pathlib import Path
from typing import Any

import typer

from kvcal.embedded import MODEL_NAME
from kvcal.errors import UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import parse_bytes, parse_memory, parse_tokens

with lazy_imports():
    from kvcal import recipe_files


def complete_recipe(incomplete: str) -> list[str]:
    """A shell's completions of a recipe: kvcal's names, and paths of TOML files."""
    return _completions(recipe_files.recipe_names(), incomplete, (".toml", "/"))


def complete_model(incomplete: str) -> list[str]:
    """A shell's completions of a model: the embedded one, and folders."""
    return _completions((MODEL_NAME,), incomplete, ("/",))


def _completions(names: Iterable[str], incomplete: str, endings: tuple[str, ...]) -> list[str]:
    """Names, folders (with a slash) and files with an ending that begin so; hidden ones only if asked for."""
    paths = [f"{path}{'/' * Path(path).is_dir()}" for path in sorted(glob(f"{escape(incomplete)}*"))]
    found = [name for name in names if name.startswith(incomplete)]
    return found + [path for path in paths if path.endswith(endings)]


def of_bytes(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """A callback: the text, if it is a number of bytes. UsageError that names the option."""
    _read(parameter, text, parse_bytes)
    return text


def of_memory(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """``of_bytes`` of a device's whole memory."""
    _read(parameter, text, parse_memory)
    return text


def of_tokens(parameter: typer.CallbackParam, text: Any) -> int | None:
    """A callback: a number of tokens, such as 32k. UsageError that names the option."""
    return _read(parameter, text, parse_tokens)


def _read(parameter: typer.CallbackParam, text: Any, read: Callable[[str], int]) -> int | None:
    if text is None or isinstance(text, int):  # not given, or its default
        return text
    try:
        return read(text)
    except UsageError as refused:
        raise UsageError(f"{parameter.opts[-1]}: {refused.message}", refused.hint) from None


TOKENS: dict[str, Any] = {"metavar": "TOKENS", "parser": str, "callback": of_tokens}
