"""The folder of a run's artifacts, what ties one to its model, and the one way to reuse one:
``current_or``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from kvcal import artifact, distributed
from kvcal.artifact import differing_input, read_inputs
from kvcal.data.pools import Purpose
from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.errors import ArtifactError, UsageError
from kvcal.geometry import ModelIdentity
from kvcal.models.files import embedded_models
from kvcal.models.load import LoadedModel
from kvcal.models.supported_layers import num_embeddings
from kvcal.plan.plan import DEFAULT_WORKLOAD, Workload
from kvcal.progress import Reporter
from kvcal.recipe import ProfileSpec, Recipe, SearchSpec

Made = TypeVar("Made")
# Texts of users' models on a CPU, and tokens of each, at most: of those that KL of the profile and of whole
# plans is measured on.
CPU_KL, CPU_PLANS = (2, 512), (6, 1024)


class _File:
    """The path of a file by its name in a folder, as an attribute of the folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Folder, owner: type[Folder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class Folder:
    """The stages' artifacts in ``path``; of a named allocation, all but the profile and its basis, which lie
    in ``profiled``."""

    path: Path
    profiled: Path | None = None

    allocation = _File("allocation.safetensors")
    search = _File("search.safetensors")
    plan = _File("plan.safetensors")
    evaluation = _File("evaluation.json")
    report = _File("report.html")

    @property
    def profile(self) -> Path:
        return (self.profiled or self.path) / "profile.safetensors"

    @property
    def basis(self) -> Path:
        """Of the profile, for all allocations."""
        return (self.profiled or self.path) / "basis.safetensors"

    def of_stage(self, name: str) -> Path:
        """The artifact of a stage by its name."""
        return self.basis if name == "basis" else self.path / f"{name}.safetensors"

    @classmethod
    def create(cls, path: str | Path) -> Folder:
        """Make the folder if needed, and remove what killed processes left in it. UsageError when it cannot
        be made."""
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            raise UsageError(
                f"--out {path}: cannot make this folder: {refused.strerror}", "choose one where you may write"
            ) from None
        artifact.remove_stale(Path(path))
        return cls(Path(path))

    @classmethod
    def of_plan(cls, path: Path) -> Folder:
        """The folder of a plan's artifacts; of a named allocation, with the profile one folder up."""
        above = path.absolute().parent
        return cls(path) if cls(path).profile.exists() or not cls(above).profile.exists() else cls(path, above)

    def named(self, name: str) -> Folder:
        """A folder below, for one allocation of the profile here; it is not made yet. UsageError for a wrong
        name."""
        if not re.fullmatch(r"[\w+-][\w.+-]*", name):
            raise UsageError(f"--name {name!r}; allowed: letters, digits and . _ + -, no . first")
        return Folder(self.path / name, self.path)

    def of_system(self, name: str) -> Folder:
        """Of the artifacts of a search's system; not made yet. Where this folder is a named allocation's, the
        system's profile is that of all of them."""
        safe = re.sub(r"^\.+|[^\w.+-]", "_", name)
        above = None if self.profiled is None else self.profiled / "systems" / safe
        return Folder(self.path / "systems" / safe, above)

    def require_model(self, inputs: Mapping[str, Any]) -> None:
        """ArtifactError when a stage's artifact in the folder, finished or not, was made from another model
        than the one in ``inputs``. A damaged file is left to the stage that reads it."""
        names = {field.name: None for field in fields(Recipe)}  # sections, whose stages have files of their names
        for one in (self.profile, self.search, self.allocation, self.of_stage("centre"), *map(self.of_stage, names)):
            for path in (one, partial_path(one)):
                try:
                    earlier = read_inputs(path)
                except ArtifactError:
                    continue
                require_model(path, inputs, earlier)


def partial_path(target: Path) -> Path:
    """The file of an unfinished stage (kvcal.stages.checkpoint), next to its ``target``."""
    return target.with_name(f"{target.stem}.partial{target.suffix}")


def require_model(path: Path, inputs: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """ArtifactError when ``earlier``, what ``path`` was made from, names another model than ``inputs``."""
    ours, theirs = ({key: given[key] for key in given if key.startswith("model.")} for given in (inputs, earlier))
    difference = differing_input(ours, theirs) if ours and theirs else None
    if difference is not None:
        raise ArtifactError(
            f"{path} was made from another model: {difference}",
            hint="choose another --out, or delete the folder if its artifacts are not needed",
        )


def current_or(
    stage: str,
    path: Path,
    load: Callable[[Path], Made],
    inputs: dict[str, Any],
    make: Callable[[dict[str, Any], Path, Reporter], Made],
    reporter: Reporter,
    made_on: str | None = None,
) -> Made:
    """The content of ``path`` if it was made from ``inputs``, else what ``make`` makes of them and writes
    there. Says which of the two, and on which data (``made_on``). The file is read and verified once."""
    Folder(path.parent).require_model(inputs)
    found = load(path) if path.exists() else None
    difference = None if found is None else differing_input(inputs, read_inputs(path))
    distributed.require_same(f"what {stage} is made from", (inputs, difference, found is None))
    if found is not None:
        if difference is None:
            reporter.say(f"{stage}: {path.name} is current, skipped")
            return found
        reporter.say(f"{stage}: runs again, {difference}")
    if made_on is not None:
        reporter.say(f"{stage}: {made_on}")
    made = make(inputs, path, reporter)
    distributed.gather(None)  # until rank 0 has written the file
    return load(path) if distributed.rank() > 0 else made


@dataclass(frozen=True)
class Job:
    """A recipe to run on a model, in a folder. ``workload``: for formats that come without one."""

    recipe: Recipe
    loaded: LoadedModel
    folder: Folder
    reporter: Reporter
    workload: Workload = DEFAULT_WORKLOAD


def model_inputs(loaded: LoadedModel) -> dict[str, Any]:
    """The fingerprints that tie an artifact to its model."""
    return identity_inputs(loaded.identity)


def identity_inputs(identity: ModelIdentity) -> dict[str, Any]:
    """``model_inputs`` of a model that is not loaded."""
    return {
        "model.config_sha256": identity.config_sha256,
        "model.weights_sha256": identity.weights_sha256,
        "model.tokenizer_sha256": identity.tokenizer_sha256,
    }


def compute_dtype(loaded: LoadedModel) -> dict[str, Any]:
    """The dtype that a model computes in, on which every measurement depends."""
    return {"compute_dtype": str(loaded.model.dtype).removeprefix("torch.")}


def sequences(
    spec: DataSpec, loaded: LoadedModel, purpose: Purpose = "fit", folder: Folder | None = None
) -> TokenDataset:
    """The sequences of a purpose's pool for this model; raises what kvcal.data.sequences.load_sequences
    raises, and ArtifactError for a ``folder`` of another model."""
    if folder is not None:
        folder.require_model(model_inputs(loaded))
    tokenizer = tokenizer_of(loaded)
    spec = spec.for_model(loaded.source in embedded_models(), bool(tokenizer.chat_template))
    return load_sequences(spec, tokenizer, loaded.max_context, purpose)


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    """The model's tokenizer. UsageError where it has none, or one with more tokens than the model has
    embeddings."""
    if loaded.tokenizer is None:
        raise UsageError(f"{loaded.source}: no tokenizer", hint="neither text nor tasks can be tokenized without one")
    num_embedded, num_tokens = num_embeddings(loaded.model), loaded.tokenizer.vocab_size
    if num_tokens > num_embedded:
        raise UsageError(
            f"{loaded.source}: the tokenizer has {num_tokens} tokens, and the model embeddings for {num_embedded}",
            hint="the tokenizer is another model's: copy or download both again",
        )
    return loaded.tokenizer


def job_sequences(job: Job, spec: DataSpec, purpose: Purpose) -> TokenDataset:
    return sequences(spec, job.loaded, purpose, job.folder)


def profile_spec(spec: ProfileSpec, loaded: LoadedModel) -> ProfileSpec:
    """``spec`` with the ``kl_measured`` that None stands for; on a CPU, where KL is not measured at all bits,
    on fewer and shorter texts, of an embedded model on shorter ones."""
    if spec.kl_measured == "all":
        return spec
    is_embedded = loaded.source in embedded_models()
    samples, tokens = CPU_KL if loaded.model.device.type == "cpu" else (spec.kl_samples, spec.kl_tokens)
    spec = replace(spec, kl_tokens=min(tokens, spec.kl_tokens))
    if is_embedded:
        return spec
    return replace(spec, kl_measured=spec.kl_measured or "lowest", kl_samples=min(samples, spec.kl_samples))


def profile_data(recipe: Recipe, loaded: LoadedModel) -> DataSpec:
    """The recipe's [data]; where KL alone is measured, no longer than it reads texts, nor than the
    context."""
    if recipe.profile.gradients:
        return recipe.data
    longest = min(recipe.data.seq_len, profile_spec(recipe.profile, loaded).kl_tokens)
    longest = min(longest, loaded.max_context or longest)
    return replace(recipe.data, seq_len=longest, min_len=min(recipe.data.min_len, longest))


def search_spec(recipe: Recipe, loaded: LoadedModel) -> SearchSpec:
    """The recipe's [search], on a CPU with fewer and shorter texts, unless --thorough."""
    spec = recipe.search
    assert spec is not None
    if not is_cut(recipe, loaded):
        return spec
    samples, tokens = map(min, CPU_PLANS, (spec.kl_samples, spec.kl_tokens))
    return replace(spec, kl_samples=samples, kl_tokens=tokens)


def is_cut(recipe: Recipe, loaded: LoadedModel) -> bool:
    """Whether less text is read than the recipe says: on a CPU."""
    return loaded.model.device.type == "cpu" and recipe.profile.kl_measured != "all"
