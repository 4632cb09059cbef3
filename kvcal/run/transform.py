"""What follows the choice of formats in a folder: λ (reparam), predictors, and the folding of λ into weights.

Each stage works on the layers as the ones before left them, and its artifact names these layers by their sha256: λ and
predictors of another allocation are never mixed into a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kvcal import artifact
from kvcal.artifact import sha256_json
from kvcal.data.pools import Purpose, calibration, data_inputs, with_calibration
from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.errors import UsageError
from kvcal.folder import Folder, compute_dtype, flat, is_current, model_inputs
from kvcal.models.fold import fold, save_folded
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import LayerPlan, Plan, save_plan
from kvcal.plan.tensors import lattice_tensors, tensors_nbytes
from kvcal.progress import Reporter
from kvcal.recipe import Recipe, ReparamSpec
from kvcal.stages import allocate as allocation_stage
from kvcal.stages.allocate.budget import bytes_left, reserve_hint, spared_lambdas
from kvcal.stages.compile import compile_plan
from kvcal.stages.predictors import stage as predictor_stage
from kvcal.stages.predictors.choice import Room
from kvcal.stages.reparam import stage as reparam_stage
from kvcal.strict import dump

Reload = Callable[[str], LoadedModel]


def reparam_folder(recipe: Recipe, loaded: LoadedModel, folder: Folder, reporter: Reporter) -> None:
    """The reparam stage: λ of every layer, for the folder's allocation."""
    assert recipe.reparam is not None
    allocation = allocation_stage.load(folder.allocation)[0]
    layers = allocation.layers
    data = reparam_data(recipe, loaded)
    inputs = _transform_inputs("reparam", dump(recipe.reparam), layers, {}, data, loaded)
    if not is_current("reparam", folder.reparam, reparam_stage.KIND, reparam_stage.SCHEMA, inputs, reporter):
        reporter.say(f"reparam: {data.description}")
        reparam_stage.run_reparam(loaded, layers, {}, data, recipe.reparam, inputs, folder.reparam, reporter)
    found = reparam_stage.load(folder.reparam)
    nbytes = tensors_nbytes(found.tensors())
    left = bytes_left(allocation, layers, nbytes)
    if left is not None and left < 0:
        reporter.say(
            f"reparam: λ in the plan would take {-left} bytes beyond the budget; fold it into the weights "
            f"(`kvcal compile --fold`), or {reserve_hint(nbytes + spared_lambdas(found.apply(layers)))}"
        )


def fit_predictors_folder(recipe: Recipe, loaded: LoadedModel, folder: Folder, reporter: Reporter) -> None:
    """The predictor stage, on the layers as the reparam stage left them.

    Raises:
        InfeasibleBudget: the allocation's budget leaves no room for any predictor.
    """
    assert recipe.predictors is not None
    allocation = allocation_stage.load(folder.allocation)[0]
    layers, tensors = transformed(folder, allocation.layers, recipe.reparam is not None, predictors=False)
    room = None if allocation.split.kind is None else Room(allocation, layers, recipe.predictors)
    if room is not None:
        room.require_some()
    data = sequences(recipe.data, loaded, "fit")
    inputs = _transform_inputs("predictors", dump(recipe.predictors), layers, tensors, data, loaded)
    inputs |= flat("workload", dump(allocation.workload)) | {"budget.left": None if room is None else room.left()}
    if not is_current("predictors", folder.predictors, predictor_stage.KIND, predictor_stage.SCHEMA, inputs, reporter):
        reporter.say(f"predictors: {data.description}")
        predictor_stage.run_fit_predictors(
            loaded, layers, tensors, data, recipe.predictors, allocation.workload, inputs, folder.predictors, reporter,
            room,
        )  # fmt: skip
    message = None if room is None else room.message(predictor_stage.load(folder.predictors))
    if message is not None:
        reporter.say(message)


def transformed(
    folder: Folder, layers: tuple[LayerPlan, ...], reparam: bool, predictors: bool
) -> tuple[tuple[LayerPlan, ...], dict[str, Tensor]]:
    """Layers and plan tensors with what the folder's reparam and predictor stages found."""
    tensors = lattice_tensors(layers)
    if reparam:
        found = reparam_stage.load(folder.reparam)
        layers, tensors = found.apply(layers), tensors | found.tensors()
    if predictors:
        fitted = predictor_stage.load(folder.predictors)
        layers, tensors = fitted.apply(layers), tensors | fitted.tensors()
    return layers, tensors


def found_transforms(folder: Folder, reporter: Reporter) -> tuple[bool, bool]:
    """Whether the folder holds λ, and predictors, of its allocation; those of another are named and left out."""
    allocation, made_from = allocation_stage.load(folder.allocation)
    if "search.sha256" in made_from:
        return False, False
    layers, found = allocation.layers, []
    for path, stage in ((folder.reparam, reparam_stage), (folder.predictors, predictor_stage)):
        is_its = False
        if path.exists():
            made_for = artifact.read(path, stage.KIND, stage.SCHEMA).inputs.get("layers")
            is_its = made_for == _layers_sha256(layers)
            if not is_its:
                reporter.say(f"compile: {path.name} is of other formats, left out")
        if is_its and path == folder.reparam:
            layers = reparam_stage.load(path).apply(layers)
        found.append(is_its)
    return found[0], found[1]


def fold_folder(
    folder: Folder, path: Path, loaded: LoadedModel, out_model: Path, reload: Reload, reporter: Reporter
) -> Plan:
    """Fold the folder's λ into ``loaded``'s weights, write that model to ``out_model``, and compile the plan for it to
    ``path``, without a runtime λ. ``reload``: loads the written model, whose fingerprints the plan carries.

    Raises:
        UsageError: no λ in the folder, or ``out_model`` exists.
        UnsupportedModel, ArtifactError: λ cannot be folded into this model.
    """
    allocation = allocation_stage.load(folder.allocation)[0]
    reparam, predictors = found_transforms(folder, reporter)
    layers, tensors = transformed(folder, allocation.layers, reparam, predictors)
    lambdas = {
        layer.geometry.index: tensors.pop(f"layers.{layer.geometry.index}.k_rescale")
        for layer in layers
        if layer.k_rescale
    }
    if not lambdas:
        raise UsageError(f"{folder.path} holds no λ to fold", hint="run `kvcal reparam` first")
    if out_model.exists():
        raise UsageError(f"--fold {out_model} exists already", hint="name a folder that does not exist")
    fold(loaded.model, lambdas, loaded.geometry)
    save_folded(loaded, out_model)
    reporter.say(f"compile: λ of {len(lambdas)} layers folded into {out_model}")
    identity = reload(str(out_model)).identity
    layers = tuple(replace(layer, k_rescale=False) for layer in layers)
    provenance = with_transform_data(allocation.provenance, folder, reparam, predictors)
    plan = compile_plan(replace(allocation, model=identity, provenance=provenance), layers, tensors)
    save_plan(plan, path)
    return plan


def with_transform_data(provenance: dict[str, Any], folder: Folder, reparam: bool, predictors: bool) -> dict[str, Any]:
    """The provenance with the data of the folder's λ and predictors, where they are used."""
    stages = (
        ("reparam", reparam, folder.reparam, reparam_stage),
        ("predictors", predictors, folder.predictors, predictor_stage),
    )
    for name, is_used, path, stage in stages:
        if is_used:
            inputs = artifact.read(path, stage.KIND, stage.SCHEMA).inputs
            provenance = with_calibration(provenance, calibration(name, inputs))
    return provenance


def reparam_data(recipe: Recipe, loaded: LoadedModel) -> TokenDataset:
    """Calibration text for λ."""
    reparam = recipe.reparam or ReparamSpec()
    min_len = min(recipe.data.min_len, reparam.seq_len)
    spec = replace(recipe.data, num_samples=reparam.num_samples, seq_len=reparam.seq_len, min_len=min_len)
    return sequences(spec, loaded, "fit")


def sequences(spec: DataSpec, loaded: LoadedModel, purpose: Purpose = "fit") -> TokenDataset:
    """The sequences of a purpose's pool for this model; raises what kvcal.data.sequences.load_sequences raises."""
    if loaded.tokenizer is None:
        raise UsageError(f"{loaded.source}: no tokenizer", hint="data cannot be tokenized without one")
    return load_sequences(spec, loaded.tokenizer, max_context(loaded), purpose)


def max_context(loaded: LoadedModel) -> int | None:
    """The model's context in tokens, None where its config states none."""
    config = loaded.model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def _transform_inputs(
    name: str,
    spec: dict[str, Any],
    layers: tuple[LayerPlan, ...],
    tensors: dict[str, Tensor],
    data: TokenDataset,
    loaded: LoadedModel,
) -> dict[str, Any]:
    return {
        **model_inputs(loaded),
        **flat(name, spec),
        "layers": _layers_sha256(layers),
        "tensors": artifact.tensors_sha256(tensors),
        **data_inputs(data),
        **compute_dtype(loaded),
    }


def _layers_sha256(layers: tuple[LayerPlan, ...]) -> str:
    return sha256_json([dump(layer) for layer in layers])
