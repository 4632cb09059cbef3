"""The stages after the choice of formats in a folder: λ (reparam), predictors, error feedback, bases.

Each stage works on the layers as the ones before left them, and its artifact names these layers by their
sha256: λ and predictors of another allocation are never mixed into a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kvcal.artifact import read_inputs, sha256_json, tensors_sha256
from kvcal.data.pools import calibration, data_inputs
from kvcal.data.sequences import TokenDataset
from kvcal.folder import (
    Folder,
    Job,
    calibration_spec,
    compute_dtype,
    current_or,
    job_sequences,
    model_inputs,
    sequences,
)
from kvcal.models.load import LoadedModel
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import LayerPlan
from kvcal.plan.tensors import layout_tensors, needed_nbytes, needed_tensors, tensors_nbytes
from kvcal.progress import Reporter
from kvcal.recipe import Recipe
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.allocate.budget import bytes_left, reserve_hint, spared_lambdas, transform_bytes
from kvcal.stages.allocate.record import Allocation, layers_in
from kvcal.strict import dump, flat_records
from kvcal.systems.aqua_kv import record as predictor_record
from kvcal.systems.aqua_kv.record import PredictorRecord
from kvcal.systems.aqua_kv.stage import run_fit_predictors
from kvcal.systems.basis import centre as centre_stage
from kvcal.systems.basis import stage as basis_stage
from kvcal.systems.basis.centre import Centring, takes_mean
from kvcal.systems.basis.recipe import FeedbackSpec
from kvcal.systems.basis.stage import BasisRecord
from kvcal.systems.pm_kvq import reparam as reparam_stage
from kvcal.systems.pm_kvq.recipe import ReparamSpec
from kvcal.systems.pm_kvq.reparam import Reparam

Layers = tuple[LayerPlan, ...]
Record = Reparam | Centring | PredictorRecord | BasisRecord


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
        has = {
            "reparam": recipe.reparam is not None,
            "centre": folder.centre.exists(),
            "predictors": recipe.predictors is not None,
            "feedback": recipe.feedback is not None,
            "basis": recipe.basis is not None,
        }
        for stage, load in LOADS.items():
            if stage == before:
                break
            if has[stage]:
                found = found._with(stage, folder, load(getattr(folder, stage)))
        return found

    @classmethod
    def made_for(cls, folder: Folder, layers: Layers, reporter: Reporter) -> Transforms:
        """Those that the folder holds for an allocation's ``layers``; those of other formats are named and
        left out."""
        found = cls()
        for stage, load in LOADS.items():
            path = getattr(folder, stage)
            if not path.exists():
                continue
            record = load(path)
            applied = found.apply(layers)[0]
            if isinstance(record, BasisRecord):
                applied = basis_stage.fitted_layers(applied, record.subject.spec)
            if read_inputs(path).get("layers") == _layers_sha256(applied):
                found = found._with(stage, folder, record)
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
        data = calibration(stage, read_inputs(getattr(folder, stage)))
        return replace(self, records=(*self.records, record), calibration=self.calibration | data)


# In order; the names are those of a folder's files.
LOADS: dict[str, Callable[[Path], Record]] = {
    "reparam": reparam_stage.load,
    "centre": centre_stage.load,
    "predictors": predictor_record.load,
    "feedback": partial(basis_stage.load, kind="feedback"),
    "basis": basis_stage.load,
}


def reparam_folder(job: Job) -> Reparam:
    """The reparam stage: λ of every layer, for the folder's allocation."""
    spec, loaded, folder, reporter = job.recipe.reparam, job.loaded, job.folder, job.reporter
    assert spec is not None
    data = short_data(job, spec)
    allocation = allocation_record.load(folder.allocation)[0]
    layers = allocation.layers
    inputs = _transform_inputs("reparam", spec, layers, {}, data, loaded)
    make = partial(reparam_stage.run_reparam, loaded, layers, data, spec)
    found = current_or("reparam", folder.reparam, reparam_stage.load, inputs, make, reporter, data.description)
    _tell_beyond_budget("reparam", allocation, found.apply(layers), found.tensors(), reporter)
    return found


def centre_folder(job: Job) -> Centring | None:
    """The centre stage, on the layers as the reparam stage left them; nothing where no keys are scaled by
    token. Reads the recipe's text where another stage does."""
    recipe, loaded, folder, reporter = job.recipe, job.loaded, job.folder, job.reporter
    allocation = allocation_record.load(folder.allocation)[0]
    layers, _ = Transforms.of(folder, recipe, before="centre").apply(allocation.layers)
    # Keys with λ keep their mean; a basis has a center.
    is_moved = recipe.reparam is not None or recipe.basis is not None
    wanted = tuple(replace(x, k_offset=True, k_pages="pre") if takes_mean(x) and not is_moved else x for x in layers)
    left = bytes_left(allocation, wanted, needed_nbytes(wanted, allocation.cache_dtype))
    if left is not None and left < 0 and wanted != layers:
        reporter.say(f"centre: keys keep their mean, {-left} bytes beyond the budget; {reserve_hint(-left)}")
    if wanted == layers or (left is not None and left < 0):
        folder.centre.unlink(missing_ok=True)
        return None
    reads = recipe.allocate or recipe.predictors or recipe.calibration
    data = job_sequences(job, recipe.data, "fit") if reads else sequences(centre_stage.DATA, loaded)
    inputs = {**model_inputs(loaded), "layers": _layers_sha256(layers), **data_inputs(data), **compute_dtype(loaded)}
    make = partial(centre_stage.run_centre, loaded, layers, data.sequences)
    return current_or("centre", folder.centre, centre_stage.load, inputs, make, reporter)


def fit_predictors_folder(job: Job) -> PredictorRecord:
    """The predictor stage, on the layers as the reparam stage left them, centred."""
    recipe, loaded, folder, reporter = job.recipe, job.loaded, job.folder, job.reporter
    spec = recipe.predictors
    assert spec is not None
    centre_folder(job)
    allocation = allocation_record.load(folder.allocation)[0]
    layers, tensors = Transforms.of(folder, recipe, before="predictors").apply(allocation.layers)
    data = job_sequences(job, recipe.data, "fit")
    inputs = _transform_inputs("predictors", spec, layers, tensors, data, loaded)
    inputs |= flat_records(workload=allocation.workload)
    make = partial(run_fit_predictors, loaded, layers, tensors, data, spec, allocation.workload)
    found = current_or("predictors", folder.predictors, predictor_record.load, inputs, make, reporter, data.description)
    _tell_beyond_budget("predictors", allocation, found.apply(layers), tensors | found.tensors(), reporter)
    return found


def basis_folder(job: Job) -> BasisRecord:
    """The stage of [basis] or [feedback], on the layers as the stages before left them; a basis comes before
    the profile, if there is one, for layers whose bits are not chosen yet."""
    recipe, loaded, folder, reporter = job.recipe, job.loaded, job.folder, job.reporter
    spec = calibration_spec(recipe, loaded)
    if recipe.chooses_in_a_basis:
        k, v = (recipe.cache.format(side, 2, "token", recipe.profile.kl_group, "rotated") for side in SIDES)
        layers = layers_in(loaded.geometry, k, v)
        tensors = layout_tensors(layers)
    else:
        allocation = allocation_record.load(folder.allocation)[0]
        layers, tensors = Transforms.of(folder, recipe, before=spec.stage).apply(allocation.layers)
    layers = basis_stage.fitted_layers(layers, spec)
    data = short_data(job, spec)
    inputs = _transform_inputs(spec.stage, spec, layers, tensors, data, loaded)
    make = partial(basis_stage.run_basis, loaded, layers, tensors, data, spec)
    load = partial(basis_stage.load, kind=spec.stage)
    return current_or(spec.stage, getattr(folder, spec.stage), load, inputs, make, reporter, data.description)


def _tell_beyond_budget(
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


def _transform_inputs(
    name: str, spec: Any, layers: Layers, tensors: dict[str, Tensor], data: TokenDataset, loaded: LoadedModel
) -> dict[str, Any]:
    return {
        **model_inputs(loaded),
        **flat_records(**{name: spec}),
        "layers": _layers_sha256(layers),
        "tensors": tensors_sha256(tensors),
        **data_inputs(data),
        **compute_dtype(loaded),
    }


def _layers_sha256(layers: Layers) -> str:
    return sha256_json([dump(layer) for layer in layers])
