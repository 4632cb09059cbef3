"""The pipeline: profile -> allocate -> compile -> evaluate, each stage an artifact in one folder.

A stage whose artifact was made from the same inputs is skipped; when they differ, the first differing field is
named and the stage runs again. A folder made from another model is left alone. Reparameterization and predictor
fitting will stand between allocate and compile, with artifacts of their own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcal import artifact
from kvcal.artifact import differing_input, sha256_json
from kvcal.data import DataSpec, TokenDataset, load_sequences
from kvcal.errors import ArtifactError, UsageError
from kvcal.models.load import LoadedModel
from kvcal.plan import Plan, Workload, plan_bytes, save_plan
from kvcal.progress import Reporter
from kvcal.quantities import format_bytes
from kvcal.recipe import AllocateSpec, Recipe, load_recipe
from kvcal.stages import allocate as allocation_stage
from kvcal.stages import profile as profile_stage
from kvcal.stages.allocate import Allocation
from kvcal.stages.compile import compile_plan
from kvcal.stages.evaluate import Evaluation, evaluate
from kvcal.stages.profile import Profile
from kvcal.stages.report import draw
from kvcal.strict import dump

DEFAULT_WORKLOAD = Workload(batch=8, context=4096)


@dataclass(frozen=True)
class Folder:
    """Where the stages' artifacts lie."""

    path: Path

    @classmethod
    def create(cls, path: str | Path) -> Folder:
        """Make the folder if needed. UsageError when that is impossible."""
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            raise UsageError(f"--out {path}: cannot make this folder: {refused.strerror}") from None
        return cls(Path(path))

    @property
    def profile(self) -> Path:
        return self.path / "profile.safetensors"

    @property
    def allocation(self) -> Path:
        return self.path / "allocation.safetensors"

    @property
    def plan(self) -> Path:
        return self.path / "plan.safetensors"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def picture(self) -> Path:
        return self.path / "evaluation.png"


@dataclass(frozen=True)
class Result:
    """What a run made."""

    folder: Folder
    allocation: Allocation
    plan: Plan
    evaluation: Evaluation


def run(recipe: Recipe, loaded: LoadedModel, folder: Folder, reporter: Reporter) -> Result:
    """All stages. Raises what the stages raise; whatever was finished stays and is reused by the next run."""
    if recipe.allocate is None:
        allocation = _fixed(recipe, loaded, folder, reporter)
    else:
        profile_recipe(recipe, loaded, folder, reporter)
        allocation = allocate_folder(folder, recipe.allocate, provenance_of(recipe), reporter)
    plan = compile_folder(folder, folder.plan, reporter)
    evaluation = evaluate_plan(recipe, loaded, plan, folder, reporter)
    return Result(folder, allocation, plan, evaluation)


def profile_recipe(recipe: Recipe, loaded: LoadedModel, folder: Folder, reporter: Reporter) -> Profile:
    """The profile stage of a recipe."""
    data = _sequences(recipe.data, loaded)
    inputs = {
        **model_inputs(loaded),
        **_flat("profile", dump(recipe.profile)),
        **_flat("cache", dump(recipe.cache)),
        "data.fingerprint": data.fingerprint,
        "compute_dtype": str(loaded.model.dtype).removeprefix("torch."),
    }
    kind, schema = profile_stage.KIND, profile_stage.SCHEMA
    if _is_current("profile", folder.profile, kind, schema, inputs, reporter):
        return profile_stage.load(folder.profile)
    reporter.say(f"profile: {data.description}")
    return profile_stage.run_profile(loaded, data, recipe.profile, recipe.cache, inputs, folder.profile, reporter)


def allocate_folder(folder: Folder, spec: AllocateSpec, provenance: dict[str, Any], reporter: Reporter) -> Allocation:
    """The allocate stage, from the folder's profile."""
    profile = profile_stage.load(folder.profile)
    inputs = {
        **_flat("allocate", dump(spec)),
        **_flat("cache", dump(profile.cache)),
        "profile.sha256": hashlib.sha256(folder.profile.read_bytes()).hexdigest(),
        "provenance": sha256_json(provenance),
    }
    if spec.same_bytes_as is not None:
        inputs["allocate.same_bytes_as.sha256"] = load_recipe(spec.same_bytes_as).sha256
    kind, schema = allocation_stage.KIND, allocation_stage.SCHEMA
    if _is_current("allocate", folder.allocation, kind, schema, inputs, reporter):
        return allocation_stage.load(folder.allocation)[0]
    details = {"objective": spec.objective, "granularity": spec.granularity, "data": profile.data_fingerprint}
    allocation = allocation_stage.allocate(profile, spec, profile.cache, {**provenance, **details})
    allocation_stage.save(allocation, inputs, folder.allocation)
    reporter.say(
        f"allocate: {format_bytes(allocation.split.cache)} of cache, loss {allocation.loss:.6g}, "
        f"gap {allocation.gap:.2g} ({allocation.proof} proof)"
    )
    return allocation


def sweep_folder(folder: Folder, spec: AllocateSpec, num_points: int) -> tuple[str, list[dict[str, Any]]]:
    """The Pareto front of the folder's profile, also kept as sweep.json: ("front" or "grid", a row per point)."""
    profile = profile_stage.load(folder.profile)
    found, rows = allocation_stage.pareto(profile, spec, profile.cache, num_points)
    text = json.dumps({"method": found.method, "points": rows}, indent=2, sort_keys=True)
    artifact.write_text_atomic(folder.path / "sweep.json", text + "\n")
    return found.method, rows


def compile_folder(folder: Folder, path: Path, reporter: Reporter) -> Plan:
    """The compile stage: writes the plan unless the same one lies there."""
    plan = compile_plan(allocation_stage.load(folder.allocation)[0])
    if path.exists() and path.read_bytes() == plan_bytes(plan):
        reporter.say(f"compile: {path.name} is current, skipped")
        return plan
    save_plan(plan, path)
    reporter.say(f"compile: {path}")
    return plan


def evaluate_plan(recipe: Recipe, loaded: LoadedModel, plan: Plan, folder: Folder, reporter: Reporter) -> Evaluation:
    """The evaluate stage: the plan beside the recipe's baselines, as JSON and as a picture."""
    plans = [(name, baseline_plan(load_recipe(name), loaded, plan.workload)) for name in recipe.evaluate.against]
    data = _sequences(recipe.evaluate.data, loaded)
    inputs = {
        **model_inputs(loaded),
        **_flat("evaluate", dump(replace(recipe.evaluate, against=()))),  # rows are kept one by one
        "data.fingerprint": data.fingerprint,
        "compute_dtype": str(loaded.model.dtype).removeprefix("torch."),
    }
    evaluation = evaluate(
        loaded, [*plans, (recipe.name, plan)], recipe.evaluate, data, inputs, folder.evaluation, reporter
    )
    draw(evaluation, plan, folder.picture)
    return evaluation


def baseline_plan(recipe: Recipe, loaded: LoadedModel, workload: Workload) -> Plan:
    """The plan of a recipe with [formats], without a folder. UsageError for a recipe that needs a profile."""
    if recipe.formats is None:
        raise UsageError(
            f"recipe {recipe.name!r} in evaluate.against has no [formats]",
            hint="baselines are recipes with fixed formats; run the other one by itself",
        )
    provenance = provenance_of(recipe)
    return compile_plan(
        allocation_stage.fixed_allocation(recipe.formats, loaded.identity, loaded.geometry, workload, provenance)
    )


def provenance_of(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe a plan carries."""
    return {"recipe": recipe.name, "recipe_sha256": recipe.sha256, "seed": recipe.data.seed}


def model_inputs(loaded: LoadedModel) -> dict[str, Any]:
    """The fingerprints that tie an artifact to its model."""
    identity = loaded.identity
    return {
        "model.config_sha256": identity.config_sha256,
        "model.weights_sha256": identity.weights_sha256,
        "model.tokenizer_sha256": identity.tokenizer_sha256,
    }


def max_context(loaded: LoadedModel) -> int | None:
    """The model's context in tokens, None where its config states none."""
    config = loaded.model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def _fixed(recipe: Recipe, loaded: LoadedModel, folder: Folder, reporter: Reporter) -> Allocation:
    assert recipe.formats is not None
    inputs = {**model_inputs(loaded), **_flat("formats", dump(recipe.formats))}
    kind, schema = allocation_stage.KIND, allocation_stage.SCHEMA
    if _is_current("allocate", folder.allocation, kind, schema, inputs, reporter):
        return allocation_stage.load(folder.allocation)[0]
    allocation = allocation_stage.fixed_allocation(
        recipe.formats, loaded.identity, loaded.geometry, DEFAULT_WORKLOAD, provenance_of(recipe)
    )
    allocation_stage.save(allocation, inputs, folder.allocation)
    return allocation


def _sequences(spec: DataSpec, loaded: LoadedModel) -> TokenDataset:
    if loaded.tokenizer is None:
        raise UsageError(f"{loaded.source}: no tokenizer", hint="data cannot be tokenized without one")
    return load_sequences(spec, loaded.tokenizer, max_context(loaded))


def _is_current(stage: str, path: Path, kind: str, schema: int, inputs: dict[str, Any], reporter: Reporter) -> bool:
    """Whether ``path`` was made from ``inputs``; says so, or which field differs.

    Raises:
        ArtifactError: the artifact is corrupt, or was made from another model.
    """
    if not path.exists():
        return False
    found = artifact.read(path, kind, schema).inputs
    difference = differing_input(inputs, found)
    if difference is None:
        reporter.say(f"{stage}: {path.name} is current, skipped")
        return True
    if difference.startswith("model."):
        raise ArtifactError(
            f"{path} was made from another model: {difference}",
            hint="choose another --out, or delete the folder if its artifacts are not needed",
        )
    reporter.say(f"{stage}: runs again, {difference}")
    return False


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"prefix.a.b": 1}."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: leaf for key, item in value.items() for name, leaf in _flat(f"{prefix}.{key}", item).items()}
