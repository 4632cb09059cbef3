"""Strict records: frozen dataclasses that refuse unknown keys, wrong types and non-finite numbers.

Recipes, plans and stage artifacts are all built from JSON or TOML through :func:`parse`; pydantic does the
checking, this file only turns its findings into our errors, with the place of each value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from kvcal.errors import KvcalError, did_you_mean
from kvcal.quantities import MAX_CONTEXT, MAX_SEED

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

# Whole numbers within what any machine holds, so that loops over them end and floats hold them.
Count = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[int, Field(ge=1, le=2**40)]
NumBytes = Annotated[int, Field(ge=0, le=2**62)]

# Numbers that can be squared and added up in fp64.
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
Amount = Annotated[float, Field(ge=0, le=1e100)]
Share = Annotated[float, Field(ge=0, le=1)]

# Knobs, in ranges that no real value leaves.
MAX_COUNT = 1_000_000
Size = Annotated[int, Field(ge=1, le=MAX_COUNT)]
SizeOrNone = Annotated[int, Field(ge=0, le=MAX_COUNT)]  # of what may be left out
Tokens = Annotated[int, Field(ge=1, le=MAX_CONTEXT)]
TextTokens = Annotated[int, Field(ge=2, le=MAX_CONTEXT)]  # the first predicts the second
GroupSize = Literal[32, 64, 128]  # values that share a scale
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
# Bits per cached value: a single token in a buffer of 128 at 16 bits has 2,048.
Bits = Annotated[float, Field(gt=0, le=4096)]

Record = TypeVar("Record")


def knob(default: Record, doc: str) -> Record:
    """A field with a default and the line that documentation prints about it."""
    field: Record = Field(default, description=doc)
    return field


def parse(
    record: type[Record], value: Mapping[str, Any], place: str, error: type[KvcalError], hint: str | None = None
) -> Record:
    """Build ``record`` from JSON-like data (lists for tuples). ``error``: the first findings, each with its
    place."""
    try:
        return TypeAdapter(record).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as found:
        raise error(f"{place}: {findings(found, record)}", hint or _suggestion(found, record)).at(place) from None
    except KvcalError as refused:  # a record's own
        raise error(f"{place}: {refused.message}", refused.hint or hint).at(place) from None


def changed(record: Record, changes: Mapping[str, Any], place: str, error: type[KvcalError]) -> Record:
    """``record`` with the fields in ``changes`` (JSON-like) that are not None, checked as :func:`parse`
    does."""
    given = {name: value for name, value in changes.items() if value is not None}
    return parse(type(record), dump(record) | given, place, error)


def dump(record: Any) -> Any:
    """JSON-like data of a record: the inverse of :func:`parse`."""
    return TypeAdapter(type(record)).dump_python(record, mode="json")


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """JSON-like data by dotted names: "p", {"a": {"b": 1}} -> {"p.a.b": 1}; without a prefix "a.b"."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    start = f"{prefix}." if prefix else ""
    return {name: leaf for key, item in value.items() for name, leaf in flat(f"{start}{key}", item).items()}


def flat_records(**records: Any) -> dict[str, Any]:
    """``flat`` of each record, or None, under its name."""
    return {name: leaf for prefix, record in records.items() for name, leaf in flat(prefix, dump(record)).items()}


def findings(found: ValidationError, record: Any = None, at_most: int = 3) -> str:
    """The first few, each with its place, the value, and what is allowed; of ``record`` also its keys."""
    lines = []
    for item in found.errors(include_url=False)[:at_most]:
        where, message = ".".join(str(part) for part in item["loc"]), item["msg"].removeprefix("Value error, ")
        if item["type"] == "unexpected_keyword_argument":
            allowed = ", ".join(_keys_beside(record, item["loc"]))
            lines.append(f"unknown key {where!r}" + (f" (allowed: {allowed})" if allowed else ""))
        elif item["type"] == "missing":
            lines.append(f"missing key {where!r}")
        elif item["type"] == "value_error" and isinstance(item["input"], dict | ArgsKwargs):
            # A record's own check names the keys.
            lines.append(f"{where}: {message}" if where else message)
        else:
            lines.append(f"{where or 'value'} = {_shown(item['input'])}: {message}")
    more = found.error_count() - at_most
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


def _suggestion(found: ValidationError, record: Any) -> str | None:
    """``did_you_mean`` of the first unknown key or word that is like an allowed one; or how a list is
    written."""
    for item in found.errors(include_url=False):
        hint = None
        if item["type"] == "unexpected_keyword_argument":
            hint = did_you_mean(str(item["loc"][-1]), _keys_beside(record, item["loc"]))
        elif item["type"] == "literal_error" and isinstance(item["input"], str):
            hint = did_you_mean(item["input"], re.findall("'([^']*)'", item["ctx"]["expected"]))
        elif item["type"] == "tuple_type":
            hint = """a list is written [2, 4] or ["a", "b"]; a shell needs it in single quotes"""
        if hint is not None:
            return hint
    return None


def _keys_beside(record: Any, place: Sequence[str | int]) -> list[str]:
    """The keys of the table of ``record`` in which the key at ``place`` stands."""
    tables = _tables(record)
    for part in place[:-1]:
        below = [table for of in tables for table in _tables(get_type_hints(of).get(str(part)))]
        tables = below or tables  # the place in a list or the tag of a choice is no key
    return [key for table in tables for key in table.__dataclass_fields__]


def _tables(kind: Any) -> list[Any]:
    """The dataclasses in an annotation: itself, or those of its list or choice."""
    return [kind] if is_dataclass(kind) else [table for part in get_args(kind) for table in _tables(part)]


def _shown(value: Any, width: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[:width]}…"
