"""Records in files: the JSON body of an artifact, or a JSON file with a digest, as a strict frozen dataclass.

A record is read by :func:`strict.parse`, which bounds every number that its dataclass bounds, and has one
spelling: 2.0 or true for an integer, or a key left to its default, is refused. Faults that only show when the
parts of a plan are put together are ValueErrors, which :func:`refusing` turns into the file's ArtifactError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kvcal import artifact
from kvcal.errors import ArtifactError, UsageError
from kvcal.lazy_torch import Tensor
from kvcal.stored_tensor import ITEM_BYTES, StoredTensor, stored
from kvcal.strict import dump, findings, parse


@dataclass(frozen=True)
class TensorSpec:
    """One tensor. ``dtype``: torch's name of it; ``shape``: None is any extent. ``low`` and ``high``: the
    least and the largest value allowed, one number for all, or one for each place of the last dimension;
    values are finite in any case."""

    dtype: str
    shape: tuple[int | None, ...]
    low: float | tuple[float, ...] = -math.inf
    high: float | tuple[float, ...] = math.inf

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape, 0 for any extent."""
        return tuple(extent or 0 for extent in self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.extents) * ITEM_BYTES[self.dtype]

    def fault(self, found: StoredTensor) -> str | None:
        """The fault of a tensor, as the end of a sentence; None if it has none."""
        fits = len(found.shape) == len(self.shape) and all(
            want is None or want == have for want, have in zip(self.shape, found.shape, strict=True)
        )
        if found.dtype != self.dtype or not fits:
            expected = ", ".join("any" if extent is None else str(extent) for extent in self.shape)
            return f"is {found.dtype} {list(found.shape)}, expected {self.dtype} [{expected}]"
        if not found.nbytes:
            return None
        if found.num_infinite:
            return "holds NaN or infinity; allowed: finite values"
        if (self.low, self.high) == (-math.inf, math.inf):
            return None
        by_place = isinstance(self.low, tuple) or isinstance(self.high, tuple)
        values = found.values().reshape(-1, found.shape[-1] if by_place else 1)
        for number, (least, largest) in enumerate(zip(values.min(0).tolist(), values.max(0).tolist(), strict=True)):
            low, high = (bound[number] if isinstance(bound, tuple) else bound for bound in (self.low, self.high))
            if not low <= least <= largest <= high:
                return f"holds values from {least:g} to {largest:g}, expected {low:g} to {high:g}"
        return None


def require_tensors(found: Mapping[str, Tensor], declared: Mapping[str, TensorSpec]) -> None:
    """ValueError, naming the first, unless ``found`` are exactly the declared tensors."""
    for name in sorted(declared.keys() ^ found.keys()):
        raise ValueError(f"{'missing' if name in declared else 'unknown'} tensor {name[:80]!r}")
    parts = stored(found)
    for name, spec in declared.items():
        fault = spec.fault(parts[name])
        if fault is not None:
            raise ValueError(f"tensor {name!r} {fault}")


Record = TypeVar("Record")


@contextmanager
def refusing(place: str | Path, hint: str | None = None) -> Iterator[None]:
    """ValueError and UsageError become ArtifactError: here the values come from the file ``place``, not from
    a user. Without a ``hint``, that of a path is how to make the file again."""
    try:
        yield
    except ValidationError as wrong:
        raise ArtifactError(f"{place}: {findings(wrong)}", hint or _how_to_make(place)) from None
    except (ValueError, UsageError) as wrong:
        raise ArtifactError(f"{place}: {wrong}", hint or _how_to_make(place)) from None


def _how_to_make(place: str | Path) -> str | None:
    return artifact.make_again(artifact.kind_of(place)) if isinstance(place, Path) else None


def record_of(record: type[Record], body: Mapping[str, Any], place: str | Path, hint: str | None = None) -> Record:
    """The record that ``body`` spells; ``hint`` as in ``refusing``."""
    try:
        found = parse(record, body, str(place), ArtifactError, hint)
        difference = artifact.differing_input(dump(found), dict(body))
        if difference is not None:
            raise ArtifactError(f"{place}: {difference}", hint)
    except ArtifactError as refused:
        refused.hint = hint or _how_to_make(place) or refused.hint
        raise
    return found


def write_json(path: str | Path, kind: str, schema: int, record: Any) -> None:
    """Write a JSON file whole or not at all, with sorted keys and a digest. ArtifactError when the system
    refuses."""
    body = dump(record)
    content = {"kind": kind, "schema": schema, "digest": artifact.sha256_json(body), "body": body}
    artifact.write_text_atomic(path, json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: str | Path, kind: str, schema: int, record: type[Record], hint: str) -> Record:
    """Read what :func:`write_json` wrote."""
    try:
        content = json.loads(artifact.read_bytes(path, kind).decode("utf-8"))
    except (ValueError, RecursionError) as broken:
        raise ArtifactError(f"{path} is truncated or not JSON: {broken}", hint) from None
    artifact.require_shallow(content, path)
    keys = {"kind", "schema", "digest", "body"}
    is_ours = isinstance(content, Mapping) and content.keys() == keys and isinstance(content["body"], Mapping)
    if not is_ours or (content["kind"], content["schema"]) != (kind, schema):
        article = "an" if kind[0] in "aeiou" else "a"
        raise ArtifactError(f"{path} is not {article} {kind} of version {schema}", hint)
    body = content["body"]
    if content["digest"] != artifact.sha256_json(body):
        raise ArtifactError(f"{path} is corrupt: its content does not have the digest it states", hint)
    return record_of(record, body, path, hint)
