"""The tune stage of a folder: a recipe's fixed formats with the thresholds, and the rooms, that its [tune] finds."""

from __future__ import annotations

from kvcal.artifact import sha256_json
from kvcal.data.record import calibration, data_inputs, with_calibration
from kvcal.folder import Folder, compute_dtype, flat, is_current, model_inputs
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.recipe import Recipe
from kvcal.run.transform import sequences
from kvcal.stages.allocate import stage as allocation_stage
from kvcal.stages.allocate.stage import Allocation
from kvcal.stages.tune.objective import Origin
from kvcal.stages.tune.plan import tune_plan
from kvcal.strict import dump


def tune_folder(recipe: Recipe, loaded: LoadedModel, plan: Plan, folder: Folder, reporter: Reporter) -> Allocation:
    """Search the thresholds of ``plan``, or go on with the folder's study; its choice becomes the allocation.

    Raises:
        What ``tune_plan`` raises; finished trials are kept.
    """
    data = sequences(recipe.data, loaded)
    inputs = {
        **model_inputs(loaded),
        "plan.sha256": plan.sha256,
        **flat("tune", dump(recipe.tune)),
        **data_inputs(data),
        "provenance": sha256_json(plan.provenance),
        **compute_dtype(loaded),
    }
    if is_current("tune", folder.allocation, allocation_stage.KIND, allocation_stage.SCHEMA, inputs, reporter):
        return allocation_stage.load(folder.allocation)[0]
    reporter.say(f"tune: {data.description}")
    origin = Origin(loaded.source, str(loaded.model.dtype).removeprefix("torch."), str(loaded.model.device))
    best = tune_plan(loaded, origin, plan, recipe, folder.path, reporter).plan
    provenance = with_calibration(best.provenance, calibration("tune", inputs))
    allocation = allocation_stage.unbudgeted(best.layers, best.model, best.cache_dtype, best.workload, provenance)
    allocation_stage.save(allocation, inputs, folder.allocation)
    return allocation
