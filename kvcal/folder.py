"""The folder of a run's artifacts, and whether one of them is current: made from what would be used now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcal import artifact
from kvcal.artifact import differing_input
from kvcal.errors import ArtifactError, UsageError
from kvcal.models.load import LoadedModel
from kvcal.progress import Reporter


@dataclass(frozen=True)
class Folder:
    """Where the stages' artifacts lie."""

    path: Path

    @classmethod
    def create(cls, path: str | Path) -> Folder:
        """Make the folder if needed, and remove what killed processes left in it. UsageError when it cannot be made."""
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            raise UsageError(f"--out {path}: cannot make this folder: {refused.strerror}") from None
        artifact.remove_stale(Path(path))
        return cls(Path(path))

    @property
    def profile(self) -> Path:
        return self.path / "profile.safetensors"

    @property
    def allocation(self) -> Path:
        return self.path / "allocation.safetensors"

    @property
    def search(self) -> Path:
        return self.path / "search.safetensors"

    @property
    def reparam(self) -> Path:
        return self.path / "reparam.safetensors"

    @property
    def predictors(self) -> Path:
        return self.path / "predictors.safetensors"

    @property
    def plan(self) -> Path:
        return self.path / "plan.safetensors"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def picture(self) -> Path:
        return self.path / "evaluation.png"


def model_inputs(loaded: LoadedModel) -> dict[str, Any]:
    """The fingerprints that tie an artifact to its model, and what it computes in."""
    identity = loaded.identity
    return {
        "model.config_sha256": identity.config_sha256,
        "model.weights_sha256": identity.weights_sha256,
        "model.tokenizer_sha256": identity.tokenizer_sha256,
    }


def compute_dtype(loaded: LoadedModel) -> dict[str, Any]:
    """What every measurement depends on, beside the model."""
    return {"compute_dtype": str(loaded.model.dtype).removeprefix("torch.")}


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"prefix.a.b": 1}."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: leaf for key, item in value.items() for name, leaf in flat(f"{prefix}.{key}", item).items()}


def is_current(stage: str, path: Path, kind: str, schema: int, inputs: dict[str, Any], reporter: Reporter) -> bool:
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
