"""From a name (an embedded model, a local folder or a hub id) to a loaded model and its identity.

One place decides what may be loaded, in which dtype it computes, and what its identity is, so that every stage has the
same errors. transformers does the loading; remote code is never run, and a checkpoint that lacks weights is an error
(transformers would fill them with random numbers). After loading, ``model.config.dtype`` is the dtype the checkpoint is
stored in, whatever dtype the parameters compute in: the cache's unquantized dtype and the weights' bytes on the target
device follow from it.

A plan carries the identity, so that it is not used with another model: hashes of configuration, weights and tokenizer
files, and no machine path. The configuration is hashed as canonical JSON without the keys that saving it again changes;
weights and tokenizer as sorted (name, length, bytes), streamed. Left out: the chat template and generation settings,
which do not change what is cached.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from kvcal.artifact import require_file
from kvcal.embedded import model_folder
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, Geometry, ModelIdentity, StateGeometry
from kvcal.models.geometry import checkpoint_dtype, geometry_of

EMBEDDED_FOLDER = model_folder().parent
# From what config.json says: wrong types, sizes and names.
CONFIG_ERRORS = (StrictDataclassError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError)
# From files of weights, and their index.
WEIGHT_ERRORS = (
    OSError, SafetensorError, UnpicklingError, EOFError, RuntimeError, LookupError, TypeError, AttributeError,
)  # fmt: skip
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SIZES = LAYER_COUNTS + (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "num_experts", "num_local_experts",
)  # fmt: skip
MAX_LAYERS, MAX_SIZE = 10_000, 1_000_000_000
MAX_REASON = 300

_VOLATILE_KEYS = ("transformers_version", "_name_or_path")
# In the order in which transformers prefers them: one file, or an index that names the shards.
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# tokenizer.json alone defines a tokenizer; without it, the vocabulary files do.
_TOKENIZER_FILE = "tokenizer.json"
_VOCABULARY_FILES = (
    "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tekken.json", "tiktoken.model", "tokenizer.model",
    "vocab.json", "vocab.txt",
)  # fmt: skip
_CHUNK_BYTES = 1 << 24
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device; ``tokenizer`` is None only if none was needed and there is none."""

    model: PreTrainedModel
    tokenizer: Tokenizer | None
    identity: ModelIdentity
    geometry: Geometry
    source: str


@dataclass(frozen=True)
class _Location:
    """A source's id, the name that transformers is given, and the folder that holds its files (or will, once the hub
    has sent them). ``commit`` is the hub's, None for a local folder."""

    id: str
    pretrained: str
    folder: Path
    commit: str | None = None


def load(source: str, *, dtype: str = "auto", device: str = "auto", need_tokenizer: bool = True) -> LoadedModel:
    """Load ``source``: the name of an embedded model, else a local folder, else a hub id.

    ``dtype``: auto (float32 on a CPU unless the model keeps states, else the checkpoint's), or a key of CACHE_DTYPES.
    ``device``: auto (CUDA if there is one), cpu, cuda, cuda:N. Raises UsageError for a source that is not there, cannot
    be read or lacks weights or a tokenizer, and for a wrong dtype or device; UnsupportedModel for a model that is not a
    causal language model of transformers, or that ``geometry_of`` does not support.
    """
    target = _device(device)
    if dtype != "auto" and dtype not in CACHE_DTYPES:
        raise UsageError(f"dtype {dtype!r}; allowed: auto, {', '.join(CACHE_DTYPES)}")
    location = _locate(source)
    config = _config(location)
    if location.commit is None:
        weight_files(location.folder, location.id)  # fail before transformers looks elsewhere
    tokenizer = _tokenizer(location, need_tokenizer)  # before the weights: fail early
    stored_dtype = checkpoint_dtype(config)
    # States are kept in the dtype that computes them: in another one their bytes would not be the plan's.
    automatic = [stored_dtype] if target.type == "cuda" else dict.fromkeys(["float32", stored_dtype])
    for compute_dtype in automatic if dtype == "auto" else (dtype,):
        model = _model(location, config, CACHE_DTYPES[compute_dtype], target)
        model.config.dtype = CACHE_DTYPES[stored_dtype]
        geometry = geometry_of(model, stored_dtype)
        if not any(isinstance(layer, StateGeometry) for layer in geometry.layers):
            break
    return LoadedModel(model, tokenizer, identity_of(location.folder, location.id), geometry, source)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of parameters and buffers as the checkpoint's dtype stores them; a tied parameter counts once.

    Parameters that compute in another dtype than the checkpoint's (``model.config.dtype``) count at the checkpoint's;
    buffers (rotary frequencies) and integer parameters count as they are.
    """
    stored = CACHE_DTYPES[checkpoint_dtype(model.config)]
    parameters = sum(
        tensor.numel() * (stored.itemsize if tensor.dtype == model.dtype else tensor.itemsize)
        for tensor in model.parameters()
    )
    return parameters + sum(buffer.nbytes for buffer in model.buffers())


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"device {device!r}; allowed: auto, cpu, cuda, cuda:N")
    index = int(device.partition(":")[2] or 0)
    if device != "cpu" and index >= torch.cuda.device_count():
        raise UsageError(f"device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device(device)


def embedded_models() -> tuple[str, ...]:
    """Names of the models inside the package."""
    return tuple(sorted(path.parent.name for path in EMBEDDED_FOLDER.glob("*/config.json")))


def _locate(source: str) -> _Location:
    if source in embedded_models():
        folder = EMBEDDED_FOLDER / source
        return _Location(source, str(folder), folder)
    path = Path(source).expanduser()
    if not source:
        raise UsageError("model '' is empty", hint="give a folder, an embedded model's name or a hub id")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(
                f"folder {source!r} has no config.json",
                hint="give the folder that save_pretrained or a hub download wrote",
            )
        return _Location(path.resolve().name, str(path), path)
    if path.exists():
        raise UsageError(f"{source!r} is a file", hint="give the folder that holds config.json and the weights")
    looked_for = f"no folder {source!r}, no embedded model of that name ({', '.join(embedded_models())})"
    if not _HUB_ID.fullmatch(source):
        raise UsageError(
            f"model {source!r} was not found: {looked_for}, and it is no hub id",
            hint="check the path, or give a hub id such as owner/name",
        )
    try:
        config_path = Path(hf_hub_download(source, "config.json"))
    except (HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"model {source!r} was not found: {looked_for}, and the hub gives no config.json ({reason})",
            hint="check the name, the network, and HF_TOKEN for a gated model",
        ) from error
    # The snapshot's folder is named after its commit: pin it, so that every file is of one version.
    return _Location(source, source, config_path.parent, commit=config_path.parent.name)


def _config(location: _Location) -> PreTrainedConfig:
    """The configuration, of a kind that is served, from which transformers can build the model."""
    content = read_json(location.folder / "config.json", location.id)
    _require_sizes(content, location.id)
    broken = f"{location.id}: config.json: transformers cannot build a model from it:"
    hint = "copy or download the model's config.json again"
    try:
        config = AutoConfig.from_pretrained(location.pretrained, revision=location.commit or "main")
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"{location.id}: config.json: {_reason(error)}") from error
    except CONFIG_ERRORS as error:
        raise UsageError(f"{broken} {_reason(error)}", hint) from error
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{location.id}: model type {config.model_type!r} has no decoder-only causal language model in transformers"
        )
    try:
        with torch.device("meta"):  # shapes alone, so that what fails later is the weights'
            AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        raise UnsupportedModel(f"{location.id}: config.json: {_reason(error)}") from error
    except (*CONFIG_ERRORS, LookupError, RuntimeError) as error:
        raise UsageError(f"{broken} {_reason(error)}", hint) from error
    return config


def _require_sizes(content: dict[str, Any], model_id: str, place: str = "") -> None:
    """UsageError for a size in config.json that no model has: building it would take the machine's memory."""
    for key, value in content.items():
        if isinstance(value, dict):
            _require_sizes(value, model_id, f"{place}{key}.")
        largest = MAX_LAYERS if key in LAYER_COUNTS else MAX_SIZE
        if key in SIZES and isinstance(value, int) and not 1 <= value <= largest:
            raise UsageError(f"{model_id}: config.json: {place}{key} = {value}; allowed: 1 to {largest}")


def _model(location: _Location, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location.pretrained, revision=location.commit or "main", config=config, dtype=dtype,
            output_loading_info=True,
        )  # fmt: skip
    except WEIGHT_ERRORS as error:
        names = ", ".join(path.name for path in weight_files(location.folder, location.id)[:2])
        raise UsageError(
            f"{location.id}: the weights cannot be read ({names}): {_reason(error)}",
            hint="a file is missing, truncated, corrupt, or not of this config.json; copy or download the model again",
        ) from error
    except (ValueError, ImportError) as error:
        raise UnsupportedModel(f"{location.id}: {_reason(error)}") from error
    model, report = loaded
    lacking = sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])})
    if lacking:
        raise UsageError(
            f"{location.id}: the checkpoint lacks {len(lacking)} of the model's tensors, first {lacking[0]}",
            hint="the weights do not belong to this config.json, or a file is missing",
        )
    return model.to(device).eval()


def _tokenizer(location: _Location, needed: bool) -> Tokenizer | None:
    hint = "save the tokenizer next to the weights (tokenizer.json)"
    tokenizer, reason = None, "no tokenizer.json or vocabulary file"
    if location.commit is not None or tokenizer_files(location.folder):
        try:
            tokenizer = AutoTokenizer.from_pretrained(location.pretrained, revision=location.commit or "main")
        except (OSError, ValueError, LookupError, RuntimeError, ImportError, *CONFIG_ERRORS) as error:
            reason = _reason(error)
    if tokenizer_files(location.folder):  # the hub's are here once from_pretrained has asked for them
        if tokenizer is None:
            raise UsageError(f"{location.id}: the tokenizer cannot be read: {reason}", hint=hint)
        return tokenizer
    if needed:
        raise UsageError(f"{location.id} has no tokenizer: {reason}", hint=hint)
    return None


def _reason(error: Exception) -> str:
    """The message of an error of transformers, in one line."""
    if isinstance(error, UnpicklingError):  # torch advises to read the file without its guard
        return "not a file of tensors alone"
    text = " ".join(str(error).split())
    if isinstance(error, LookupError | ArithmeticError | AssertionError | TypeError | AttributeError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "…"


def identity_of(folder: Path, model_id: str) -> ModelIdentity:
    """The identity of the checkpoint in ``folder``; ``tokenizer_sha256`` is empty if there is no tokenizer.

    Raises UsageError if configuration or weights are missing or cannot be read.
    """
    config = read_json(folder / "config.json", model_id)
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)  # may hold Infinity
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
