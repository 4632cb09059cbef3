"""Records in files: the JSON body of an artifact, or a JSON file with a digest, as a strict frozen dataclass.

A file whose digest is right may still hold what no stage writes. So a record is read by :func:`strict.parse`, which
bounds every number that its dataclass bounds, and has one spelling: 2.0 or true for an integer, or a key left to its
default, is refused. Faults that only show when parts are put together are ValueErrors, which :func:`refusing` turns
into the file's ArtifactError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kvcal.artifact import differing_input, require_shallow, sha256_json, write_text_atomic
from kvcal.errors import ArtifactError, UsageError
from kvcal.files import require_file
from kvcal.strict import dump, findings, parse

Record = TypeVar("Record")


@contextmanager
def refusing(place: str | Path, hint: str | None = None) -> Iterator[None]:
    """ValueError and UsageError become ArtifactError: here the values come from the file ``place``, not from a user."""
    try:
        yield
    except ValidationError as wrong:
        raise ArtifactError(f"{place}: {findings(wrong)}", hint) from None
    except (ValueError, UsageError) as wrong:
        raise ArtifactError(f"{place}: {wrong}", hint) from None


def record_of(record: type[Record], body: Mapping[str, Any], place: str | Path, hint: str | None = None) -> Record:
    """The record that ``body`` spells.

    Raises:
        ArtifactError: unknown or missing keys, values out of range, or another spelling than ``dump``'s.
    """
    found = parse(record, body, str(place), ArtifactError, hint)
    difference = differing_input(dump(found), dict(body))
    if difference is not None:
        raise ArtifactError(f"{place}: {difference}", hint)
    return found


def write_json(path: str | Path, kind: str, schema: int, record: Any) -> None:
    """Write a JSON file whole or not at all, with sorted keys and a digest. ArtifactError when the system refuses."""
    body = dump(record)
    content = {"kind": kind, "schema": schema, "digest": sha256_json(body), "body": body}
    write_text_atomic(path, json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: str | Path, kind: str, schema: int, record: type[Record], hint: str) -> Record:
    """Read what :func:`write_json` wrote.

    Raises:
        ArtifactError: missing, unreadable, not JSON, of another kind or version, corrupt, or as ``record_of``.
    """
    require_file(path, ArtifactError)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise ArtifactError(f"no {kind} at {path}: the file does not exist", "run the stage that makes it") from None
    except OSError as refused:
        raise ArtifactError(f"cannot read {path}: {refused.strerror}", "check the path") from None
    except (ValueError, RecursionError) as broken:
        raise ArtifactError(f"{path} is truncated or not JSON: {broken}", hint) from None
    require_shallow(content, path)
    keys = {"kind", "schema", "digest", "body"}
    is_ours = isinstance(content, Mapping) and content.keys() == keys and isinstance(content["body"], Mapping)
    if not is_ours or (content["kind"], content["schema"]) != (kind, schema):
        article = "an" if kind[0] in "aeiou" else "a"
        raise ArtifactError(f"{path} is not {article} {kind} of version {schema}", hint)
    body = content["body"]
    if content["digest"] != sha256_json(body):
        raise ArtifactError(f"{path} is corrupt: its content does not have the digest it states", hint)
    return record_of(record, body, path, hint)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
