"""The allocation: which Format every layer's K and V got, for which workload, and where the budget's bytes
go.

Formats come from the solver (``stages.allocate``), from a recipe that fixes them, or from KVmix's ranking;
what follows (a schedule, transforms, compilation) does not depend on which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal import artifact
from kvcal.geometry import CacheDtype, Geometry, ModelIdentity
from kvcal.plan.layer import FormatsSpec, LayerPlan, bare_layers, fixed_layers, in_formats
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Workload
from kvcal.records import record_of
from kvcal.strict import STRICT, Number, NumBytes, dump

KIND = "allocation"
SCHEMA = 3
# Of the provenance: the plans that competed (fixed_widths.WidthsReport), and the names of the integer program's.
COMPETED = "fixed_widths"
PROGRAM, BY_LAW = "by layer", "by layer, costs as squared errors"

BudgetKind = Literal["budget", "kv_budget", "bits", "same_bytes_as"]


@dataclass(frozen=True, config=STRICT)
class BudgetSplit:
    """The bytes of a budget by what takes them. ``weights`` and ``workspace`` are None when only the cache
    was budgeted; ``fixed`` are bounded layers and states, ``paged`` the chosen formats, ``reserved`` what
    transforms will take.

    ``kind``: how the budget was stated; None where formats were fixed without one, and it is their own bytes.
    ``logits``: this much of the workspace, where it depends on the plan; None where it was stated in bytes.
    ``engine``: what a serving engine takes besides pages: rings and padding."""

    budget: Annotated[int, Field(ge=0, le=10**36)]
    weights: NumBytes | None
    workspace: NumBytes | None
    fixed: NumBytes
    paged: NumBytes
    reserved: NumBytes = 0
    kind: BudgetKind | None = None
    logits: NumBytes | None = None
    engine: Annotated[NumBytes, Field(exclude_if=lambda nbytes: nbytes == 0)] = 0

    @property
    def cache(self) -> int:
        return self.fixed + self.paged

    @property
    def overhead(self) -> int:
        """Bytes of all that is no record of keys and values."""
        return (self.weights or 0) + (self.workspace or 0) + self.engine

    @property
    def for_cache(self) -> int:
        """The bytes that the budget leaves for the cache, reserved ones included; may be negative."""
        return self.budget - self.overhead


@dataclass(frozen=True, config=STRICT)
class Allocation:
    """The chosen layers of a model. ``provenance`` says what they were chosen from; ``loss``, ``bound``,
    ``gap`` and ``proof`` are the solver's (see solver.Solution), None where a recipe fixed the formats."""

    model: ModelIdentity
    cache_dtype: CacheDtype
    layers: tuple[LayerPlan, ...]
    workload: Workload
    provenance: dict[str, Any]
    split: BudgetSplit
    loss: Number | None = None
    bound: Number | None = None
    gap: Number | None = None
    proof: str | None = None


def unbudgeted(
    layers: tuple[LayerPlan, ...],
    model: ModelIdentity,
    cache_dtype: CacheDtype,
    workload: Workload,
    provenance: dict[str, Any],
) -> Allocation:
    """Layers that nothing was solved for: their own bytes are the budget."""
    fixed, paged = layer_bytes(layers, cache_dtype, workload)
    return Allocation(
        model, cache_dtype, layers, workload, provenance, BudgetSplit(fixed + paged, None, None, fixed, paged)
    )


def fixed_allocation(
    formats: FormatsSpec, model: ModelIdentity, geometry: Geometry, workload: Workload, provenance: dict[str, Any]
) -> Allocation:
    """A recipe with [formats]: no choice, no budget but its own bytes."""
    layers = fixed_layers(formats, bare_layers(geometry))
    return unbudgeted(layers, model, geometry.cache_dtype, workload, provenance)


def layer_bytes(layers: tuple[LayerPlan, ...], cache_dtype: str, workload: Workload) -> tuple[int, int]:
    """Bytes of (windows and states, pages)."""
    sizes = {True: 0, False: 0}
    for layer in layers:
        state = layer.state_nbytes(workload.batch)
        sizes[layer.is_paged] += layer.nbytes(cache_dtype, workload.lengths, workload.context) - state
        sizes[False] += state
    return sizes[False], sizes[True]


def num_values(layers: tuple[LayerPlan, ...], workload: Workload) -> int:
    """Values that the paged layers cache at the workload."""
    per_token = sum(layer.attention.values_per_token for layer in layers if layer.is_paged)
    return per_token * workload.batch * workload.context


def layers_in(geometry: Geometry, k: Format, v: Format) -> tuple[LayerPlan, ...]:
    """All layers, the paged ones in the formats ``k`` and ``v``, rotary keys at 16 bits. UnsupportedModel as
    ``in_formats``."""
    return tuple(in_formats(layer, k, v) if layer.is_paged else layer for layer in bare_layers(geometry))


def save(allocation: Allocation, inputs: dict[str, Any], path: Path) -> None:
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, dump(allocation), {}))


def load(path: Path) -> tuple[Allocation, dict[str, Any]]:
    """The allocation and its inputs. ArtifactError when missing, corrupt or foreign."""
    stored = artifact.read(path, KIND, SCHEMA)
    return record_of(Allocation, stored.body, path), stored.inputs
