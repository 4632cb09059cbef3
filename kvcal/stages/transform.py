"""The stages after the choice of formats in a folder, which systems declare (``STAGES`` of their stage.py),
and what they share.

Each stage works on the layers as the ones before left them, and its artifact names these layers by their
sha256: what was fitted for another allocation is never mixed into a plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from kvcal.artifact import read_inputs, sha256_json, tensors_sha256
from kvcal.data.pools import calibration, data_inputs
from kvcal.data.sequences import TokenDataset
from kvcal.folder import Folder, Job, compute_dtype, job_sequences, model_inputs
from kvcal.geometry import CacheDtype, Geometry
from kvcal.models.load import LoadedModel
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import LayerPlan, Workload
from kvcal.plan.tensors import layout_tensors, needed_nbytes, needed_tensors, tensors_nbytes
from kvcal.progress import Reporter
from kvcal.recipe import CacheSpec, Recipe
from kvcal.stages.allocate.budget import bytes_left, reserve_hint, spared_lambdas, transform_bytes, workspace_bytes
from kvcal.stages.allocate.record import Allocation, layers_in
from kvcal.strict import dump, flat_records
from kvcal.systems import Section, parts
from kvcal.systems.basis.recipe import FeedbackSpec
from kvcal.systems.pm_kvq.recipe import ReparamSpec

Layers = tuple[LayerPlan, ...]


class Record(Protocol):
    """The artifact of a stage."""

    def apply(self, layers: Layers) -> Layers:
        """The layers with its transforms."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that these need, by their names in a plan."""
        ...


@dataclass(frozen=True)
class TransformStage:
    """A stage of a system. ``name``: of its file, and of its recipe's section; ``order`` among all such
    stages; ``is_of``: whether it comes after the formats of a recipe are chosen. ``make``: its record, in the
    job's folder, or the one that is there. ``every``: the layers with all transforms that a section may lead
    to, whose bytes are kept free. ``show``: of its record, JSON, a title, a header and rows. ``is_optional``:
    it has no section, and may find nothing to do. ``fitted``: the layers that a record was fitted for, where
    a plan has these; None: these."""

    name: str
    order: int
    is_of: Callable[[Recipe], bool]
    load: Callable[[Path], Any]
    make: Callable[[Job], Any]
    every: Callable[[Any, Layers, CacheDtype], Layers] | None = None
    show: Callable[[Any], tuple[Any, str, Sequence[str], Any]] | None = None
    is_optional: bool = False
    fitted: Callable[[Any, Layers], Layers] | None = None


@functools.cache
def transform_stages() -> tuple[TransformStage, ...]:
    """Those of all systems, in order."""
    found = (stage for module in parts("stage") for stage in module.STAGES)
    return tuple(sorted(found, key=lambda stage: stage.order))


@dataclass(frozen=True)
class Transforms:
    """Records of a folder's transforms by stage, in the order in which they were made, and of the data they
    were fitted on."""

    records: tuple[Record, ...] = ()
    calibration: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Folder, recipe: Recipe, before: str | None = None) -> Transforms:
        """Those of the recipe's stages, of the ones before a stage alone. ArtifactError where one is missing
        or corrupt."""
        found = cls()
        for stage in transform_stages():
            if stage.name == before:
                break
            if stage.name in recipe.sections or (stage.is_optional and folder.of_stage(stage.name).exists()):
                found = found._with(stage.name, folder, stage.load(folder.of_stage(stage.name)))
        return found

    @classmethod
    def made_for(cls, folder: Folder, layers: Layers, reporter: Reporter) -> Transforms:
        """Those that the folder holds for an allocation's ``layers``; those of other formats are named and
        left out."""
        found = cls()
        for stage in transform_stages():
            path = folder.of_stage(stage.name)
            if not path.exists():
                continue
            record, fitted = stage.load(path), found.apply(layers)[0]
            fitted = fitted if stage.fitted is None else stage.fitted(record, fitted)
            if read_inputs(path).get("layers") == layers_sha256(fitted):
                found = found._with(stage.name, folder, record)
            else:
                reporter.say(f"compile: {path.name} is of other formats, left out")
        return found

    def apply(self, layers: Layers) -> tuple[Layers, dict[str, Tensor]]:
        tensors = layout_tensors(layers)
        for found in self.records:
            layers, tensors = found.apply(layers), tensors | found.tensors()
        needed = needed_tensors(layers, "float32")  # names alone: a predicted layer needs no mean any more
        return layers, {name: tensor for name, tensor in tensors.items() if name in needed}

    def _with(self, stage: str, folder: Folder, record: Record) -> Transforms:
        data = calibration(stage, read_inputs(folder.of_stage(stage)))
        return replace(self, records=(*self.records, record), calibration=self.calibration | data)


def reserved_bytes(
    geometry: Geometry,
    cache: CacheSpec,
    sections: Mapping[str, Section],
    device_workload: Workload | None = None,
) -> int:
    """Upper bound of the bytes that the transforms of a recipe's ``sections`` take: the tensors of all that
    their stages can lead to, and, with a ``device_workload``, the workspace of layers that read others."""
    k, v = (cache.format(side, 2, "token", 128) for side in SIDES)
    layers, dtype, total = layers_in(geometry, k, v), geometry.cache_dtype, 0
    for stage in transform_stages():
        if stage.every is None or stage.name not in sections:
            continue
        every = stage.every(sections[stage.name], layers, dtype)
        total += needed_nbytes(every, dtype)
        if device_workload is not None and any(layer.sources(side) for layer in every for side in SIDES):
            before, after = (workspace_bytes(some, dtype, device_workload) for some in (layers, every))
            total += max(0, after - before)
    return total


def tell_beyond_budget(
    stage: str, allocation: Allocation, layers: Layers, tensors: dict[str, Tensor], reporter: Reporter
) -> None:
    """Say what to do where the layers, with their transforms and these tensors, are beyond the allocation's
    budget."""
    nbytes = tensors_nbytes(tensors)
    left = bytes_left(allocation, layers, nbytes)
    if left is not None and left < 0:
        taken = transform_bytes(allocation, layers, nbytes) + spared_lambdas(layers)
        reporter.say(f"{stage}: the plan would take {-left} bytes beyond the budget; {reserve_hint(taken)}")


def short_data(job: Job, stage: ReparamSpec | FeedbackSpec) -> TokenDataset:
    """The recipe's calibration text, as many sequences of as many tokens as ``stage`` says."""
    data = job.recipe.data
    spec = replace(data, num_samples=stage.num_samples, seq_len=stage.seq_len, min_len=min(data.min_len, stage.seq_len))
    return job_sequences(job, spec, "fit")


def transform_inputs(
    name: str, spec: Any, layers: Layers, tensors: dict[str, Tensor], data: TokenDataset, loaded: LoadedModel
) -> dict[str, Any]:
    return {
        **model_inputs(loaded),
        **flat_records(**{name: spec}),
        "layers": layers_sha256(layers),
        "tensors": tensors_sha256(tensors),
        **data_inputs(data),
        **compute_dtype(loaded),
    }


def layers_sha256(layers: Layers) -> str:
    return sha256_json([dump(layer) for layer in layers])
