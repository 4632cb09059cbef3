"""The record of a plan's calibration data, and the guard that the plan is not measured on them.

A stage names its data among its artifact's inputs, and the plan's provenance takes them over: {"calibration":
{stage: {"purpose", "source", "source_sha256", "sequences"}}}, with 12 hex digits of sha256 for each sequence.
Pools are disjoint by construction (see kvcal.data.pools). The guard finds what construction cannot: a source that
repeats itself, and records that are equal up to where they are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.dataclasses import dataclass

from kvcal.data.pools import Purpose
from kvcal.data.sequences import TokenDataset
from kvcal.errors import ArtifactError, UsageError
from kvcal.strict import STRICT, dump, parse

KEY = "calibration"
_SUFFIX = ".record"


@dataclass(frozen=True, config=STRICT)
class DataRecord:
    """One stage's data. ``source``, its name, and ``source_sha256`` are None for made-up data."""

    purpose: Purpose
    source: str | None
    source_sha256: str | None
    sequences: tuple[str, ...]


@dataclass(frozen=True, config=STRICT)
class _Calibration:
    stages: dict[str, DataRecord]


def data_inputs(data: TokenDataset, name: str = "data") -> dict[str, Any]:
    """Fields of an artifact's inputs that name its data."""
    source, sha256 = (None, None) if data.source is None else (data.source.name, data.source.sha256)
    record = DataRecord(data.purpose, source, sha256, data.digests)
    return {f"{name}.fingerprint": data.fingerprint, f"{name}{_SUFFIX}": dump(record)}


def calibration(stage: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The data of an artifact with these inputs, by stage: {"profile": ..., "search.fit_data": ...}."""
    names = [key.removesuffix(_SUFFIX) for key in inputs if key.endswith(_SUFFIX)]
    return {stage if name == "data" else f"{stage}.{name}": inputs[name + _SUFFIX] for name in sorted(names)}


def with_calibration(provenance: Mapping[str, Any], records: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance with more data."""
    return {**provenance, KEY: {**provenance.get(KEY, {}), **records}} if records else dict(provenance)


def require_unseen(provenance: Mapping[str, Any], data: TokenDataset) -> None:
    """Raises:
    UsageError: a sequence of ``data`` is among those of another purpose that a plan was made from.
    ArtifactError: the provenance's record of them is not one.
    """
    for stage, record in _records(provenance).items():
        num_shared = sum(digest in record.sequences for digest in data.digests)
        if num_shared and record.purpose != data.purpose:
            raise UsageError(
                f"{num_shared} of {len(data.digests)} sequences of {data.description} are among those that {stage} "
                f"used (pool {record.purpose} of {record.source})",
                hint="the source repeats itself, or its records are equal up to seq_len: remove copies, raise seq_len, "
                "or evaluate on another source",
            )


def shared_sources(provenance: Mapping[str, Any], data: TokenDataset) -> list[str]:
    """Stages that used the source of ``data``, in order of their names."""
    if data.source is None:
        return []
    records = _records(provenance).items()
    return sorted(stage for stage, record in records if record.source_sha256 == data.source.sha256)


def _records(provenance: Mapping[str, Any]) -> dict[str, DataRecord]:
    place, hint = f"the plan's provenance.{KEY}", "compile the plan again with this version of kvcal"
    return parse(_Calibration, {"stages": provenance.get(KEY, {})}, place, ArtifactError, hint).stages
