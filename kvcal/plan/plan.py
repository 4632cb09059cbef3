"""The KV quantization plan: per layer, how keys and values are stored, and the exact bytes that takes.

``nbytes`` is the one cost function: the allocator optimises it, ``inspect`` prints it, and the runtime's
tensors obey it (the runtime sizes its tensors with the same ``Format`` methods). The file format is specified
in docs/plan-format.md, the tensors that transforms need in ``kvcal.plan.tensors``. What a plan does to a
model's predictions (``kvcal.plan.damage``) lies in a file next to it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal import artifact
from kvcal.errors import ArtifactError, UsageError
from kvcal.geometry import CacheDtype, Geometry, ModelIdentity
from kvcal.lazy_torch import Tensor
from kvcal.pages.layout_protocol import RAW_BITS
from kvcal.plan.layer import LayerPlan, bare_layers, parts_of
from kvcal.plan.page_format import RAW, SIDES, Boost, Format, Side, Tier
from kvcal.plan.tensors import check_bases, check_layers, check_tensors, tensors_nbytes
from kvcal.quantities import MAX_BATCH
from kvcal.records import record_of, refusing
from kvcal.stored_tensor import ITEM_BYTES
from kvcal.strict import STRICT, Tokens, dump

__all__ = [
    "DEFAULT_WORKLOAD", "RAW", "SIDES", "Boost", "Format", "LayerPlan", "Plan", "Side", "Tier",
    "Workload", "bare_layers", "load_plan", "plan_bytes", "plan_record", "save_plan",
]  # fmt: skip

KIND = "kv-quantization-plan"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.safetensors)")
SCHEMA = 3  # pages hold tokens from multiples of 128 on; up to 2, from after the sinks


@dataclass(frozen=True, config=STRICT)
class Workload:
    """The load that a budget is for: ``batch`` sequences of ``context`` tokens each."""

    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)]
    context: Tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.context,) * self.batch


DEFAULT_WORKLOAD = Workload(batch=8, context=4096)


@dataclass(frozen=True, config=STRICT)
class _Body:
    """The JSON part of a plan."""

    model: ModelIdentity
    cache_dtype: CacheDtype
    layers: tuple[LayerPlan, ...]
    workload: Workload
    provenance: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A validated plan. ``provenance``: its recipe, seeds, data and library versions.
    ``tensors`` are those of the layers' transforms (see kvcal.plan.tensors); they count as bytes, too."""

    model: ModelIdentity
    cache_dtype: CacheDtype
    layers: tuple[LayerPlan, ...]
    workload: Workload
    provenance: dict[str, Any]
    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        check_layers(self.layers)
        check_tensors(self.tensors, self.layers, self.cache_dtype)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.model.model_type, self.cache_dtype, tuple(layer.geometry for layer in self.layers))

    def unquantized(self) -> Plan:
        """The same model with every layer at 16 bits, without transforms."""
        return dataclasses.replace(self, layers=bare_layers(self.geometry), tensors={})

    def nbytes(self, lengths: Sequence[int], columns: int | None = None) -> int:
        """Exact bytes of the cache for sequences of these lengths (tokens), padded to ``columns`` (default:
        the longest), with the tensors of the transforms. Equals ``PlanCache.nbytes`` at every length and
        batch."""
        columns = max(lengths) if columns is None else columns
        stored = sum(
            count * layer.nbytes(self.cache_dtype, (length,), columns)
            for length, count in Counter(lengths).items()
            for layer in self.layers
        )
        return stored + tensors_nbytes(self.tensors)

    def parts(self, workload: Workload) -> dict[str, int]:
        """The bytes at ``workload`` by what takes them."""
        found = parts_of(self.layers, self.cache_dtype, workload.lengths, workload.context)
        transforms = tensors_nbytes(self.tensors)
        return {**found, **({"transforms": transforms} if transforms else {})}

    def raw_nbytes(self, lengths: Sequence[int]) -> int:
        """Bytes that the model's own cache takes for sequences of these lengths: their keys and values in the
        cache's dtype and nothing else, states of linear attention as they are. ``unquantized`` takes more:
        its ring."""
        columns, itemsize = max(lengths), ITEM_BYTES[self.cache_dtype]
        paged = sum(layer.attention.values_per_token for layer in self.layers if layer.is_paged)
        others = (
            layer.state_nbytes(len(lengths)) if layer.is_paged else layer.nbytes(self.cache_dtype, lengths, columns)
            for layer in self.layers
        )
        return sum(lengths) * paged * itemsize + sum(others)

    @property
    def predicted_bytes(self) -> int:
        return self.nbytes(self.workload.lengths)

    @property
    def needs_queries(self) -> bool:
        """Whether the cache needs the model's queries (``kvcal.attached``)."""
        return any(layer.needs_queries for layer in self.layers)

    @property
    def is_progressive(self) -> bool:
        """Whether pages change their bits, on a schedule that holds for the workload alone."""
        return any(fmt.changes_at for layer in self.layers for fmt in layer.formats)

    def bits_per_value(self, workload: Workload | None = None) -> float:
        """Bits per cached value of the paged layers, everything included (scales, zeros, indices, sinks,
        windows, rings, padding and all tensors), at ``workload`` (default: the plan's)."""
        workload = workload or self.workload
        paged = [layer for layer in self.layers if layer.is_paged]
        values = sum(layer.attention.values_per_token for layer in paged)
        nbytes = sum(layer.nbytes(self.cache_dtype, workload.lengths, workload.context) for layer in paged)
        nbytes -= sum(layer.state_nbytes(workload.batch) for layer in paged)
        nbytes += tensors_nbytes(self.tensors)
        return 8 * nbytes / (values * workload.batch * workload.context) if values else float(RAW_BITS)

    @property
    def sha256(self) -> str:
        """Identifies what the plan does: everything but its provenance."""
        empty = dataclasses.replace(self, provenance={})
        return hashlib.sha256(plan_bytes(empty)).hexdigest()


def plan_record(plan: Plan) -> dict[str, Any]:
    """All of a plan that is JSON."""
    body: dict[str, Any] = dump(_Body(plan.model, plan.cache_dtype, plan.layers, plan.workload, plan.provenance))
    return body | {"predicted_bytes": plan.predicted_bytes}


def plan_bytes(plan: Plan, reasons: Mapping[str, Any] | None = None) -> bytes:
    """The plan's file, the same in any process. ``reasons``: what its formats were chosen from, as the file's
    inputs, which change neither the plan nor its digest; a plan in the folder of its artifacts needs none."""
    body = plan_record(plan)
    return artifact.to_bytes(artifact.Artifact(KIND, SCHEMA, dict(reasons or {}), body, plan.tensors))


def save_plan(plan: Plan, path: str | Path, reasons: Mapping[str, Any] | None = None) -> None:
    """Write the plan atomically, as ``plan_bytes``. ArtifactError when the file cannot be written."""
    artifact.write_bytes_atomic(path, plan_bytes(plan, reasons))


def _downloaded(repository: str, revision: str | None) -> Path:
    """The plan.safetensors of a repository on the Hugging Face hub, from the local cache where it is
    there."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "plan.safetensors", revision=revision, library_name="kvcal"))
    except (OSError, ValueError) as error:  # also the hub's own errors, which are OSErrors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "no such file here; on the hub check the name, the revision, the network, and HF_TOKEN for a private one"
        raise UsageError(f"plan {repository} at revision {revision or 'main'!r}: {reason}", hint) from error


def load_plan(path: str | Path, revision: str | None = None) -> Plan:
    """Read and validate a plan: a file, or the plan of a repository on the Hugging Face hub, "owner/name", at
    ``revision`` (a commit's id, a tag or a branch; default: the newest).

    Raises:
        UsageError: no such repository or revision, no network, or a revision of a file.
        ArtifactError: missing, truncated, corrupt or foreign file; unknown version, key or tensor; missing or
            mis-shaped content; predicted bytes that are not what the layers take.
    """
    if isinstance(path, str) and _REPOSITORY.fullmatch(path) and not Path(path).exists():
        path = _downloaded(path, revision)
    elif revision is not None:
        raise UsageError(f"revision {revision!r} of {path}: a file has none", "give a repository, owner/name")
    stored = artifact.read(path, KIND, SCHEMA)
    content = dict(stored.body)
    predicted = content.pop("predicted_bytes", None)
    again = "compile the plan again with this version of kvcal"
    body = record_of(_Body, content, path, again)
    with refusing(path, again):
        plan = Plan(body.model, body.cache_dtype, body.layers, body.workload, body.provenance, stored.tensors)
        check_bases(plan.tensors, plan.layers)
        taken = plan.predicted_bytes
    if type(predicted) is not int or predicted != taken:
        raise ArtifactError(f"{path}: predicted_bytes = {predicted!r}, but its layers take {taken}")
    return plan
