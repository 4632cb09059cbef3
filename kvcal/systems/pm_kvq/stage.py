"""The reparam stage in a folder: λ of every layer, for the folder's allocation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from kvcal.folder import Job, current_or
from kvcal.geometry import CacheDtype
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.transform import Layers, TransformStage, short_data, tell_beyond_budget, transform_inputs
from kvcal.strict import dump
from kvcal.systems.pm_kvq import reparam as reparam_stage
from kvcal.systems.pm_kvq.recipe import ReparamSpec
from kvcal.systems.pm_kvq.reparam import Reparam


def reparam_folder(job: Job) -> Reparam:
    """The reparam stage: λ of every layer, for the folder's allocation."""
    spec, loaded, folder, reporter = job.recipe.reparam, job.loaded, job.folder, job.reporter
    assert spec is not None
    data = short_data(job, spec)
    allocation = allocation_record.load(folder.allocation)[0]
    layers = allocation.layers
    inputs = transform_inputs("reparam", spec, layers, {}, data, loaded)
    make = partial(reparam_stage.run_reparam, loaded, layers, data, spec)
    found = current_or(
        "reparam", folder.of_stage("reparam"), reparam_stage.load, inputs, make, reporter, data.description
    )
    tell_beyond_budget("reparam", allocation, found.apply(layers), found.tensors(), reporter)
    return found


def with_lambdas(spec: ReparamSpec, layers: Layers, cache_dtype: CacheDtype) -> Layers:
    """All layers that may have λ, with it."""
    return tuple(replace(layer, k_rescale=True) if layer.takes_transforms else layer for layer in layers)


def shown(record: Reparam) -> tuple[Any, str, Any, Any]:
    subject = record.subject
    value = {"layers": [dump(layer) for layer in record.layers], "position_scale": subject.position_scale}
    title = f"λ from {subject.num_tokens} tokens at positions x {subject.position_scale:.3g}"
    return value, title, *reparam_stage.table_rows(record)


STAGES = (
    TransformStage("reparam", 1, lambda r: bool(r.reparam), reparam_stage.load, reparam_folder, with_lambdas, shown),
)
