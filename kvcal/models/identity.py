"""Which model this is: hashes of its configuration, weights and tokenizer files, and no machine path.

A plan carries the identity, so that it is refused for another model. The configuration is hashed as canonical
JSON without the keys that saving it again changes; weights and tokenizer as sorted (name, length, bytes),
streamed. Left out: the chat template and generation settings, which do not change what is cached.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvcal.artifact import require_file
from kvcal.errors import UsageError
from kvcal.geometry import ModelIdentity

_VOLATILE_KEYS = ("transformers_version", "_name_or_path")
# In the order in which transformers prefers them: one file, or an index that names the shards.
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# tokenizer.json alone defines a tokenizer; without it, the vocabulary files do.
_TOKENIZER_FILE = "tokenizer.json"
_VOCABULARY_FILES = (
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_CHUNK_BYTES = 1 << 24


def identity_of(folder: Path, model_id: str) -> ModelIdentity:
    """The identity of the checkpoint in ``folder``; ``tokenizer_sha256`` is empty if there is no tokenizer.

    Raises UsageError if configuration or weights are missing or cannot be read.
    """
    config = read_json(folder / "config.json", model_id)
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    tokenizer = tokenizer_files(folder)
    return ModelIdentity(
        id=model_id,
        model_type=str(config.get("model_type", "")),
        config_sha256=hashlib.sha256(canonical.encode()).hexdigest(),
        weights_sha256=_sha256_of_files(weight_files(folder, model_id)),
        tokenizer_sha256=_sha256_of_files(tokenizer) if tokenizer else "",
    )


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


def _sha256_of_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
