"""Wrappers of commands: options out of dataclasses, a check of installed packages, and ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from inspect import Parameter
from typing import Any, get_type_hints

from kvcal import distributed
from kvcal.errors import UsageError

KEYWORD_ONLY = Parameter.KEYWORD_ONLY
# Packages of kvcal[compile], by their import names.
COMPILE_PACKAGES = ("cvxpy", "datasets", "highspy", "huggingface_hub", "jinja2", "optuna")


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, for typer: its parameters that are dataclasses become the options that are their
    fields."""
    given = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {one.name: one.annotation for one in given if is_dataclass(one.annotation)}
    parameters = [parameter.replace(kind=KEYWORD_ONLY) for parameter in given if parameter.name not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        for name in (name for base in group.__mro__ for name in vars(base).get("__annotations__", ())):
            parameters.append(Parameter(name, KEYWORD_ONLY, default=getattr(group, name), annotation=hints[name]))

    @wraps(command)
    def spread_command(**values: Any) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread_command


def needs_compile(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, after a check that the packages of kvcal[compile] are there: hours before they are
    used."""

    @wraps(command)
    def checked(*args: Any, **kwargs: Any) -> None:
        missing = [name for name in COMPILE_PACKAGES if not _is_installed(name)]
        if missing:
            raise UsageError(
                f"this command needs packages that are not installed: {', '.join(missing)}",
                hint="run: pip install 'kvcal[compile]'",
            )
        command(*args, **kwargs)

    return checked


def for_ranks(command: Callable[..., None], is_ranked: bool) -> Callable[..., None]:
    """``command``, run by all processes that torchrun has started; UsageError where several are, and it is
    for one."""

    @wraps(command)
    def ranked(*args: Any, **kwargs: Any) -> None:
        if not is_ranked and distributed.world_size() > 1:
            raise UsageError(
                f"this command runs in one process, and torchrun has started {distributed.world_size()}",
                hint="leave torchrun out; it is for commands that calibrate, search or evaluate",
            )
        with distributed.joined():
            command(*args, **kwargs)

    return ranked


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
