"""The files of a model, by its name: an embedded model, a local folder, a GGUF file or a hub id; found
without transformers.

One place decides what a name means and which files belong to a checkpoint, for loading and for reading sizes
alike.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from kvcal.artifact import require_file
from kvcal.embedded import model_folder
from kvcal.errors import UsageError

# Also OSError, and the error of the HTTP client that the hub's library has: it differs between releases.
HUB_ERRORS: Any = (HFValidationError, *HfHubHTTPError.__bases__)
EMBEDDED_FOLDER = model_folder().parent
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SIZES = LAYER_COUNTS + (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "num_experts", "num_local_experts",
)  # fmt: skip
MAX_LAYERS, MAX_SIZE = 10_000, 1_000_000_000
# In the order in which transformers prefers them: one file, or an index that names the shards.
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# tokenizer.json alone defines a tokenizer; without it, the vocabulary files do.
_TOKENIZER_FILE = "tokenizer.json"
_VOCABULARY_FILES = (
    "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tekken.json", "tiktoken.model", "tokenizer.model",
    "vocab.json", "vocab.txt",
)  # fmt: skip
# Of config.json: saving changes them.
_VOLATILE_KEYS = ("transformers_version", "_name_or_path")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Location:
    """A source's id, the name that transformers is given, and the folder that holds its files (or will, once
    the hub has sent them). ``commit`` is the hub's, None for a local folder; ``gguf`` is the file of the
    folder that holds configuration, weights and tokenizer, None for a folder of transformers' files."""

    id: str
    pretrained: str
    folder: Path
    commit: str | None = None
    gguf: Path | None = None

    @property
    def options(self) -> dict[str, str]:
        """Of transformers' ``from_pretrained``, besides the name."""
        return {"gguf_file": self.gguf.name} if self.gguf else {"revision": self.commit or "main"}

    @property
    def config_name(self) -> str:
        """The file that errors of the configuration name."""
        return self.gguf.name if self.gguf else "config.json"


def embedded_models() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in EMBEDDED_FOLDER.glob("*/config.json")))


def locate(source: str) -> Location:
    """The folder of the files of ``source``; the hub is asked for config.json alone, and only for what is not
    local."""
    if source in embedded_models():
        folder = EMBEDDED_FOLDER / source
        return Location(source, str(folder), folder)
    path = Path(source).expanduser()
    if not source:
        raise UsageError("model '' is empty", hint="give a folder, an embedded model's name or a hub id")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(
                f"folder {source!r} has no config.json",
                hint="give the folder that save_pretrained or a hub download wrote",
            )
        return Location(path.resolve().name, str(path), path)
    if path.suffix == ".gguf" and path.is_file():
        missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
        if missing:
            raise UsageError(
                f"{source!r}: to read a GGUF file, transformers needs {' and '.join(missing)}",
                hint=f"pip install {' '.join(missing)}",
            )
        path = path.resolve()
        return Location(path.stem, str(path.parent), path.parent, gguf=path)
    if path.exists():
        raise UsageError(
            f"{source!r} is a file", hint="give the folder that holds config.json and the weights, or a .gguf file"
        )
    looked_for = f"no folder {source!r}, no embedded model of that name ({', '.join(embedded_models())})"
    if not _HUB_ID.fullmatch(source) or path.suffix == ".gguf":
        raise UsageError(
            f"model {source!r} was not found: {looked_for}, and it is no hub id",
            hint="check the path, or give a hub id such as owner/name",
        )
    try:
        if not isinstance(try_to_load_from_cache(source, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(source, "config.json"))  # once: the download asks for half a minute
        config_path = Path(hf_hub_download(source, "config.json"))
    except HUB_ERRORS as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"model {source!r} was not found: {looked_for}, and the hub gives no config.json ({reason})",
            hint="check the name, the network, and HF_TOKEN for a gated model",
        ) from error
    # The snapshot's folder is named after its commit: pin it, so that every file is of one version.
    return Location(source, source, config_path.parent, commit=config_path.parent.name)


def require_sizes(content: dict[str, Any], model_id: str, place: str = "") -> None:
    """UsageError for a size in config.json that no model has: building it would take the machine's memory."""
    for key, value in content.items():
        if isinstance(value, dict):
            require_sizes(value, model_id, f"{place}{key}.")
        largest = MAX_LAYERS if key in LAYER_COUNTS else MAX_SIZE
        if key in SIZES and isinstance(value, int) and not 1 <= value <= largest:
            raise UsageError(f"{model_id}: config.json: {place}{key} = {value}; allowed: 1 to {largest}")


def weight_files(folder: Path, model_id: str) -> list[Path]:
    """The files that hold the checkpoint's weights; raises UsageError naming what is missing."""
    for name in _WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            shards = read_json(index, model_id).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
                raise UsageError(
                    f"{model_id}: {index.name} has the weight_map {str(shards)[:60]}; expected an object of names of "
                    "tensors and of files"
                )
            names = sorted(set(shards.values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing or not names:
                raise UsageError(f"{model_id}: {index.name} names {len(missing)} missing files: {missing[:3]}")
            return [folder / name for name in names]
    raise UsageError(
        f"{model_id} has no weights: looked for {', '.join(_WEIGHT_FILES)} and their .index.json",
        hint="copy or download the weights next to config.json",
    )


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that define the tokenizer; empty if there is none."""
    if (folder / _TOKENIZER_FILE).is_file():
        return [folder / _TOKENIZER_FILE]
    return [folder / name for name in _VOCABULARY_FILES if (folder / name).is_file()]


def read_json(path: Path, model_id: str) -> dict:
    """A JSON object from a file; raises UsageError if it is missing or none."""
    require_file(path, UsageError)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{model_id}: {path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{model_id}: {path.name} holds a {type(value).__name__}; expected a JSON object")
    return value


def config_sha256(folder: Path, model_id: str) -> str:
    """Of ``config.json``, without the keys that saving changes. UsageError if it cannot be read."""
    config = read_json(folder / "config.json", model_id)
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)  # may hold Infinity
    return hashlib.sha256(canonical.encode()).hexdigest()
