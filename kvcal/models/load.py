"""From a name (an embedded model, a local folder or a hub id) to a loaded model and its identity.

One place decides what may be loaded, in which dtype it computes, and what its identity is, so that every
stage has the same errors. transformers does the loading; remote code is never run, and a checkpoint that
lacks weights is an error (transformers would fill them with random numbers). After loading,
``model.config.dtype`` is the dtype the checkpoint is stored in, whatever dtype the parameters compute in: the
cache's unquantized dtype and the weights' bytes on the target device follow from it.

A plan carries the identity, so that it is not used with another model: hashes of configuration, weights and
tokenizer files, and no machine path. The configuration is hashed as canonical JSON without the keys that
saving it again changes; weights and tokenizer as sorted (name, length, bytes), streamed. A GGUF file is all
three, whatever it is called: it is dequantized, and counts as a model in bfloat16.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
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
from transformers.utils import logging

from kvcal.artifact import sha256_file
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, Geometry, ModelIdentity
from kvcal.models.files import Location, config_sha256, locate, read_json, require_sizes, tokenizer_files, weight_files
from kvcal.models.gguf_header import read_header
from kvcal.models.residence import NUM_TOKENS, Residence
from kvcal.models.streamed import stream
from kvcal.models.supported_layers import checkpoint_dtype, geometry_of, require_cache

# From what config.json says: wrong types, sizes and names.
CONFIG_ERRORS = (StrictDataclassError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError)
# From files of weights, and their index.
WEIGHT_ERRORS = (
    OSError, SafetensorError, UnpicklingError, EOFError, RuntimeError, LookupError, TypeError, AttributeError,
)  # fmt: skip
MAX_REASON = 300

_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device; ``tokenizer`` is None only if none was needed and there is none;
    ``residence`` is that of a model whose layers are streamed."""

    model: PreTrainedModel
    tokenizer: Tokenizer | None
    identity: ModelIdentity
    geometry: Geometry
    source: str
    residence: Residence | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def max_context(self) -> int | None:
        """The model's context in tokens, None where its config states none."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def load(
    source: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    need_tokenizer: bool = True,
    memory: int | None = None,
    num_tokens: int = NUM_TOKENS,
) -> LoadedModel:
    """Load ``source``: the name of an embedded model, else a local folder, else a hub id.

    ``dtype``: auto (float32 on a CPU unless the model keeps states, else the checkpoint's), or a key of
    CACHE_DTYPES. ``device``: auto (CUDA if there is one), cpu, cuda, cuda:N. ``memory``: bytes of the device
    that the model may take while it runs sequences of ``num_tokens``; layers beyond are streamed
    (``kvcal.models.streamed``). Raises UsageError for a source that is not there, cannot be read or lacks
    weights or a tokenizer, for a wrong dtype or device, and for too little memory; UnsupportedModel for a
    model that is not a causal language model of transformers, or that ``geometry_of`` does not support.
    """
    target = _device(device)
    if dtype != "auto" and dtype not in CACHE_DTYPES:
        raise UsageError(f"dtype {dtype!r}; allowed: auto, {', '.join(CACHE_DTYPES)}")
    location = locate(source)
    config = read_config(location)
    if location.commit is None and not location.gguf:
        weight_files(location.folder, location.id)  # fail before transformers looks elsewhere
    tokenizer = _tokenizer(location, need_tokenizer)  # before the weights: fail early
    stored_dtype = checkpoint_dtype(config)
    # States are kept in the dtype that computes them: in another one their bytes would not be the plan's.
    automatic = [stored_dtype] if target.type == "cuda" else dict.fromkeys(["float32", stored_dtype])
    for compute_dtype in automatic if dtype == "auto" else (dtype,):
        model: Any = _model(location, config, CACHE_DTYPES[compute_dtype])
        residence = None if memory is None else stream(model, target, memory, num_tokens)
        model.to(target)
        model.config.dtype = CACHE_DTYPES[stored_dtype]
        geometry = geometry_of(model, stored_dtype)
        if not any(layer.state_bytes for layer in geometry.layers):
            break
    # A multimodal checkpoint's config.json names its wrapper, such as gemma3; caches are those of its
    # gemma3_text.
    if location.gguf:
        digest = sha256_file(location.gguf)
        identity = ModelIdentity(location.id, geometry.model_type, digest, digest, digest)
    else:
        identity = replace(identity_of(location.folder, location.id), model_type=geometry.model_type)
    return LoadedModel(model, tokenizer, identity, geometry, source, residence)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of parameters and buffers as the checkpoint's dtype stores them; a tied parameter counts once.

    Parameters that compute in another dtype than the checkpoint's (``model.config.dtype``) count at the
    checkpoint's; buffers (rotary frequencies) and integer parameters count as they are.
    """
    stored = CACHE_DTYPES[checkpoint_dtype(model.config)]
    parameters = sum(
        tensor.numel() * (stored.itemsize if tensor.dtype == model.dtype else tensor.itemsize)
        for tensor in model.parameters()
    )
    return parameters + sum(buffer.nbytes for buffer in model.buffers())


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which transformers logs errors alone: what its tables say of a checkpoint is checked here,
    and told in one line."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"device {device!r}; allowed: auto, cpu, cuda, cuda:N")
    index = int(device.partition(":")[2] or 0)
    if device != "cpu" and index >= (count := torch.cuda.device_count()):
        hint = (
            f"cuda:0 to cuda:{count - 1}, or auto" if count else "leave it out; `kvcal doctor` tells why there is none"
        )
        raise UsageError(f"device {device!r}: this machine has {count} CUDA devices", hint)
    return torch.device(device)


def read_config(location: Location) -> PreTrainedConfig:
    """The configuration, of a kind that is served, from which transformers can build the model."""
    if not location.gguf:
        require_sizes(read_json(location.folder / "config.json", location.id), location.id)
    place = f"{location.id}: {location.config_name}"
    broken = f"{place}: transformers cannot build a model from it:"
    hint = f"copy or download the model's {location.config_name} again"
    try:
        config = AutoConfig.from_pretrained(location.pretrained, **location.options)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"{place}: {_reason(error)}") from error
    except CONFIG_ERRORS as error:
        raise UsageError(f"{broken} {_reason(error)}", hint) from error
    if location.gguf:
        require_sizes(config.to_dict(), location.id)
        config.dtype = torch.bfloat16
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{location.id}: model type {config.model_type!r} has no decoder-only causal language model in "
            "transformers",
            hint="kvcal is for models that generate text token by token: `kvcal list models` lists families",
        )
    try:
        with _quiet(), torch.device("meta"):  # shapes alone, so that what fails later is the weights'
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        raise UnsupportedModel(f"{place}: {_reason(error)}") from error
    except (*CONFIG_ERRORS, LookupError, RuntimeError) as error:
        raise UsageError(f"{broken} {_reason(error)}", hint) from error
    require_cache(model)
    return config


def _model(location: Location, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """On the CPU, where its parameters are maps of the files, unless they are converted."""
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                location.pretrained, **location.options, config=config, dtype=dtype, output_loading_info=True
            )
    except WEIGHT_ERRORS as error:
        paths = [location.gguf] if location.gguf else weight_files(location.folder, location.id)
        names = ", ".join(path.name for path in paths[:2])
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
    if location.gguf:  # its dequantized tensors, without transformers' marks of a quantized model
        model = type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), dtype=dtype)
    settings = model.generation_config
    if settings is not None:  # of ``generate``, which is to use the caches that it is given, as they are
        settings.use_cache, settings.cache_implementation = True, None
        settings.prefill_chunk_size, settings.return_dict_in_generate = None, False
    return model.eval()


def _tokenizer(location: Location, needed: bool) -> Tokenizer | None:
    hint = "save the tokenizer next to the weights (tokenizer.json)"
    tokenizer, reason = None, "no tokenizer.json or vocabulary file"
    if location.commit is not None or location.gguf or tokenizer_files(location.folder):
        try:
            tokenizer = AutoTokenizer.from_pretrained(location.pretrained, **location.options)
            if location.gguf:
                _mark_ends(tokenizer, location.gguf)
        except (OSError, ValueError, LookupError, RuntimeError, ImportError, *CONFIG_ERRORS) as error:
            reason = _reason(error)
    # The hub's files are here once from_pretrained has asked for them.
    if location.gguf or tokenizer_files(location.folder):
        if tokenizer is None:
            raise UsageError(f"{location.id}: the tokenizer cannot be read: {reason}", hint=hint)
        return tokenizer
    if needed:
        raise UsageError(f"{location.id} has no tokenizer: {reason}", hint=hint)
    return None


def _mark_ends(tokenizer: Tokenizer, path: Path) -> None:
    """Take the bos and eos tokens that a GGUF file names: transformers 5.17 reads others from it than 5.23
    does, and texts that begin and end with others have another KL."""
    header, _ = read_header(path)
    for name in ("bos_token", "eos_token"):
        if (index := header.get(f"tokenizer.ggml.{name}_id")) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))


def _reason(error: Exception) -> str:
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
    tokenizer = tokenizer_files(folder)
    return ModelIdentity(
        id=model_id,
        model_type=str(config.get("model_type", "")),
        config_sha256=config_sha256(folder, model_id),
        weights_sha256=_sha256_of_files(weight_files(folder, model_id)),
        tokenizer_sha256=_sha256_of_files(tokenizer) if tokenizer else "",
    )


def _sha256_of_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
