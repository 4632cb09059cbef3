"""Strict records: frozen dataclasses that refuse unknown keys, wrong types and non-finite numbers.

Recipes, plans and stage artifacts are all built from JSON or TOML through :func:`parse`; pydantic does the
checking, this file only turns its findings into our errors, with the place of each value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from kvcal.errors import KvcalError

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Record = TypeVar("Record")


def parse(
    record: type[Record],
    value: Mapping[str, Any],
    place: str,
    error: type[KvcalError],
    hint: str | None = None,
) -> Record:
    """Build ``record`` from JSON-like data (lists for tuples).

    Raises:
        error: the first few findings, each with its place inside ``place``, the value, and what is allowed.
    """
    try:
        return TypeAdapter(record).validate_json(json.dumps(value), strict=True)
    except ValidationError as found:
        raise error(f"{place}: {_findings(found)}", hint) from None


def dump(record: Any) -> Any:
    """JSON-like data of a record: the inverse of :func:`parse`."""
    return TypeAdapter(type(record)).dump_python(record, mode="json")


def _findings(found: ValidationError, at_most: int = 3) -> str:
    lines = []
    for item in found.errors(include_url=False)[:at_most]:
        where, message = ".".join(str(part) for part in item["loc"]), item["msg"].removeprefix("Value error, ")
        if item["type"] == "unexpected_keyword_argument":
            lines.append(f"unknown key {where!r}")
        elif item["type"] == "missing":
            lines.append(f"missing key {where!r}")
        elif item["type"] == "value_error" and isinstance(item["input"], dict):  # a record's own check names the keys
            lines.append(f"{where}: {message}" if where else message)
        else:
            lines.append(f"{where or 'value'} = {item['input']!r}: {message}")
    more = found.error_count() - at_most
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
