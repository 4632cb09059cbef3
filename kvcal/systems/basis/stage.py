"""The stages of means, of error feedback and of bases in a folder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from kvcal.data.pools import data_inputs
from kvcal.folder import Job, compute_dtype, current_or, is_cut, job_sequences, model_inputs, sequences
from kvcal.geometry import CacheDtype
from kvcal.models.load import LoadedModel
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES
from kvcal.plan.tensors import layout_tensors, needed_nbytes
from kvcal.recipe import Recipe
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.allocate.budget import bytes_left, reserve_hint
from kvcal.stages.allocate.record import layers_in
from kvcal.stages.transform import (
    Layers,
    Transforms,
    TransformStage,
    layers_sha256,
    short_data,
    transform_inputs,
)
from kvcal.strict import dump
from kvcal.systems.basis import centre as centre_stage
from kvcal.systems.basis import fit as basis_fit
from kvcal.systems.basis.centre import Centring, takes_mean
from kvcal.systems.basis.fit import BasisRecord
from kvcal.systems.basis.layout import ROTATED
from kvcal.systems.basis.recipe import BasisSpec, FeedbackSpec

# Texts of users' models on a CPU, and tokens of each, at most.
ON_CPU = (6, 1024)


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
        folder.of_stage("centre").unlink(missing_ok=True)
        return None
    reads = recipe.allocate or any(spec.reads_text for spec in recipe.sections.values())
    data = job_sequences(job, recipe.data, "fit") if reads else sequences(centre_stage.DATA, loaded)
    inputs = {**model_inputs(loaded), "layers": layers_sha256(layers), **data_inputs(data), **compute_dtype(loaded)}
    make = partial(centre_stage.run_centre, loaded, layers, data.sequences)
    return current_or("centre", folder.of_stage("centre"), centre_stage.load, inputs, make, reporter)


def calibration_spec(recipe: Recipe, loaded: LoadedModel) -> FeedbackSpec:
    """The recipe's [basis] or [feedback], on a CPU with fewer and shorter texts for a basis, unless
    --thorough."""
    spec = recipe.basis or recipe.feedback
    assert spec is not None
    if recipe.basis is None:
        return spec
    sizes = spec.num_samples, min(spec.seq_len, loaded.max_context or spec.seq_len)
    samples, tokens = map(min, ON_CPU, sizes) if is_cut(recipe, loaded) else sizes
    return replace(spec, num_samples=samples, seq_len=tokens)


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
    layers = basis_fit.fitted_layers(layers, spec)
    data = short_data(job, spec)
    inputs = transform_inputs(spec.stage, spec, layers, tensors, data, loaded)
    make = partial(basis_fit.run_basis, loaded, layers, tensors, data, spec)
    load = partial(basis_fit.load, kind=spec.stage)
    return current_or(spec.stage, folder.of_stage(spec.stage), load, inputs, make, reporter, data.description)


def with_calibration_of(spec: FeedbackSpec, layers: Layers, cache_dtype: CacheDtype) -> Layers:
    """All layers that may have feedback, or bases with it."""
    keys: dict[str, Any] = {f"{side}_feedback": True for side in SIDES}
    if isinstance(spec, BasisSpec):
        keys |= {f"{side}_basis": True for side in SIDES} | {"v_gain": True}

    def calibrated(layer: LayerPlan) -> LayerPlan:
        formats: dict[str, Any] = {}
        if isinstance(spec, BasisSpec):
            formats = {side: replace(layer.format(side), quantizer=ROTATED) for side in SIDES}
        return replace(layer, **keys, **formats)

    return tuple(calibrated(layer) if layer.takes_transforms else layer for layer in layers)


def refitted(record: BasisRecord, layers: Layers) -> Layers:
    """The layers that a record was fitted for, where a plan has these."""
    return basis_fit.fitted_layers(layers, record.subject.spec)


def shown(record: BasisRecord) -> tuple[Any, str, Any, Any]:
    value = {"sides": [dump(side) for side in record.sides]}
    return value, f"Error feedback from {record.subject.num_tokens} tokens", *basis_fit.table_rows(record)


STAGES = (
    TransformStage("centre", 2, lambda r: not r.search, centre_stage.load, centre_folder, is_optional=True),
    TransformStage(
        "feedback", 4, lambda r: bool(r.feedback), partial(basis_fit.load, kind="feedback"), basis_folder,
        with_calibration_of, shown, fitted=refitted,
    ),
    TransformStage(
        "basis", 5, lambda r: bool(r.basis) and not r.chooses_in_a_basis, basis_fit.load, basis_folder,
        with_calibration_of, shown, fitted=refitted,
    ),
)  # fmt: skip
