"""The predictor stage in a folder."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcal.folder import Job, current_or, job_sequences
from kvcal.geometry import CacheDtype
from kvcal.recipe import Recipe
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.transform import Layers, Transforms, TransformStage, tell_beyond_budget, transform_inputs
from kvcal.strict import dump, flat_records
from kvcal.systems.aqua_kv.fit import run_fit_predictors
from kvcal.systems.aqua_kv.recipe import PredictorSpec
from kvcal.systems.aqua_kv.record import PredictorRecord, every_finding, load, table_rows, with_predictors

NAME = "predictors"


def spec_of(recipe: Recipe) -> PredictorSpec | None:
    """The recipe's [predictors]."""
    spec = recipe.sections.get(NAME)
    assert spec is None or isinstance(spec, PredictorSpec)
    return spec


def predictors_folder(job: Job) -> PredictorRecord:
    """The predictor stage, on the layers as the reparam stage left them, centred."""
    recipe, loaded, folder, reporter = job.recipe, job.loaded, job.folder, job.reporter
    spec = spec_of(recipe)
    assert spec is not None
    allocation = allocation_record.load(folder.allocation)[0]
    layers, tensors = Transforms.of(folder, recipe, before=NAME).apply(allocation.layers)
    data = job_sequences(job, recipe.data, "fit")
    inputs = transform_inputs(NAME, spec, layers, tensors, data, loaded)
    inputs |= flat_records(workload=allocation.workload)
    make = partial(run_fit_predictors, loaded, layers, tensors, data, spec, allocation.workload)
    found = current_or(NAME, folder.of_stage(NAME), load, inputs, make, reporter, data.description)
    tell_beyond_budget(NAME, allocation, found.apply(layers), tensors | found.tensors(), reporter)
    return found


def with_every_predictor(spec: PredictorSpec, layers: Layers, cache_dtype: CacheDtype) -> Layers:
    """All predictors that can be."""
    return with_predictors(layers, every_finding(layers, spec, cache_dtype), spec)


def shown(record: PredictorRecord) -> tuple[Any, str, Any, Any]:
    value = {"findings": [dump(finding) for finding in record.findings], "nbytes": record.nbytes}
    kept, tokens = f"{len(record.kept)} of {len(record.findings)} kept", record.subject.num_held_out_tokens
    return value, f"Predictors: {kept}, on {tokens} held-out tokens", *table_rows(record)


STAGES = (
    TransformStage(NAME, 3, lambda r: spec_of(r) is not None, load, predictors_folder, with_every_predictor, shown),
)
