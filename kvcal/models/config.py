"""Sizes of a model from its config.json and the headers of its weights, before anything is loaded.

A loaded model's cache is measured (``kvcal.models.supported_layers``). Beforehand, transformers builds the
model without weights, and the same measurement runs on shapes alone. Model types in ``DIRECT`` state their
layers in plain keys, which are read without transformers, whose import takes longer than the answer. Tests
compare both ways with what running the model measures.

``families.json`` lists what the contract tests measured: families that are served, and those that are not,
with the reason; and what `kvcal plan` makes of a small model of every family of transformers. ``python
docs/generate.py`` writes it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from kvcal.errors import AS_A_DECODER, UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, CacheDtype, Geometry
from kvcal.models.files import Location, locate, read_json, require_sizes, weight_files
from kvcal.models.gguf_header import read_header
from kvcal.stored_tensor import ITEM_BYTES

# Model types whose layers plain keys state, with the keys besides SHAPE_KEYS whose absence would leave
# something open.
SHAPE_KEYS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
DIRECT: dict[str, tuple[str, ...]] = {
    "gemma3_text": ("head_dim", "layer_types", "sliding_window"),
    "glm4": ("head_dim",),
    "gpt_oss": ("head_dim", "layer_types", "sliding_window"),
    "llama": (),
    "mistral": ("sliding_window",),
    "olmo2": (),
    "phi3": ("sliding_window",),
    "qwen2": ("use_sliding_window",),
    "qwen3": ("head_dim", "use_sliding_window"),
    "qwen3_moe": ("use_sliding_window",),
    "smollm3": ("use_sliding_window",),
    "stablelm": (),
}
# By key of config.json, the key of a GGUF file's header; and where types that state all have the head size.
GGUF_KEYS = {
    "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
}  # fmt: skip
GGUF_HEAD_DIM = {"llama": "rope.dimension_count", "qwen2": "attention.key_length", "qwen3": "attention.key_length"}
FULL, SLIDING = "full_attention", "sliding_attention"
EVERY_COMMAND = "every command"


@dataclass(frozen=True)
class ModelSizes:
    """``geometry``: as the configuration states it. ``weight_bytes``: of the checkpoint, None where neither
    its files nor an index are here. ``max_positions``: the context in tokens, None if it is not stated.
    ``is_tested``: whether the contract tests measure this model type. ``uncalibrated``: why it is served by
    recipes with [formats] alone, None for one that is calibrated, or not known."""

    id: str
    geometry: Geometry
    vocab_size: int
    weight_bytes: int | None
    max_positions: int | None
    is_tested: bool
    uncalibrated: str | None


@functools.cache
def families() -> dict[str, Any]:
    """The outcome of the contract tests: ``supported`` and ``refused`` families, a dict each; and
    ``families``: every one of the release ``transformers``."""
    content: dict[str, Any] = json.loads((files("kvcal.models") / "families.json").read_text("utf-8"))
    return content


def read_sizes(source: str) -> ModelSizes:
    """The sizes of ``source`` (an embedded name, a folder, a GGUF file or a hub id), without its weights."""
    location = locate(source)
    if location.gguf is None:
        content = read_json(location.folder / "config.json", location.id)
        require_sizes(content, location.id)
        weight_bytes = checkpoint_bytes(location)
    else:
        header, num_values = read_header(location.gguf)
        content, weight_bytes = _gguf_content(header), num_values * ITEM_BYTES["bfloat16"]  # as it is loaded
    if _is_direct(content):
        stated, geometry = content, _direct_geometry(content, f"{location.id}: {location.config_name}")
    else:
        from kvcal.models.load import read_config
        from kvcal.models.supported_layers import geometry_without_weights

        config = read_config(location)
        text = config.get_text_config(decoder=True)
        _uncalibrated(text.model_type, location.id, getattr(text, "is_decoder", False))
        stated = {name: getattr(text, name, None) for name in ("vocab_size", "max_position_embeddings")}
        geometry = geometry_without_weights(config)
    return ModelSizes(
        location.id,
        geometry,
        _number(stated, "vocab_size", location.id),
        weight_bytes,
        stated.get("max_position_embeddings"),
        any(one["model_type"] == geometry.model_type for one in families()["supported"]),
        _uncalibrated(geometry.model_type, location.id, is_decoder=True),
    )


def _gguf_content(header: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that a GGUF file's header states, as transformers reads them; {} for types
    whose configurations have more than these."""
    kind = header.get("general.architecture")
    if kind not in GGUF_HEAD_DIM or header.get("general.name") == "mistral":  # the one "llama" that slides
        return {}
    tokens = header.get("tokenizer.ggml.tokens", ())
    found = {ours: header.get(f"{kind}.{theirs}") for ours, theirs in GGUF_KEYS.items()}
    found["head_dim"] = header.get(f"{kind}.{GGUF_HEAD_DIM[kind]}")
    found["vocab_size"] = header.get(f"{kind}.vocab_size", len(tokens))
    return {**found, "model_type": kind, "dtype": "bfloat16", "use_sliding_window": False}


def _uncalibrated(model_type: object, model_id: str, is_decoder: bool) -> str | None:
    """The reason why a family cannot be calibrated, None if it can or is not known. UnsupportedModel for one
    that is not served at all; one that is served as a decoder alone needs a configuration that says so
    (``is_decoder``)."""
    refused, every = (
        next((one for one in families()[part] if one["model_type"] == model_type), None)
        for part in ("refused", "families")
    )
    if every is not None and every["is_decoder"]:
        if not is_decoder:
            raise UnsupportedModel(f"{model_id}: a model of the type {model_type!r} is not causal", hint=AS_A_DECODER)
        return every["reason"] or None
    if refused is not None and refused["fails_in"] == EVERY_COMMAND:
        raise UnsupportedModel(f"{model_id}: models of the type {model_type!r} are not served: {refused['reason']}")
    if refused is None and every is not None and every["outcome"] == "supported":
        return every["reason"] or None
    return None if refused is None else str(refused["reason"])


def _is_direct(content: dict[str, Any]) -> bool:
    needed = DIRECT.get(str(content.get("model_type")))
    if needed is None or any(content.get(key) is None for key in SHAPE_KEYS) or "text_config" in content:
        return False
    given = all(key in content for key in needed)
    return given and (content.get("layer_types") is not None or not content.get("use_sliding_window"))


def _direct_geometry(content: dict[str, Any], place: str) -> Geometry:
    """The geometry that plain keys state, with the kind of every layer as transformers' caches derive it."""
    dtype = content.get("dtype", content.get("torch_dtype")) or "float32"
    if dtype not in get_args(CacheDtype):
        raise UnsupportedModel(f"{place}: checkpoint dtype {dtype}; supported: {', '.join(CACHE_DTYPES)}")
    kinds = content.get("layer_types")
    if not isinstance(kinds, list):
        slides = content.get("sliding_window") is not None and "use_sliding_window" not in content
        kinds = [SLIDING if slides else FULL] * content["num_hidden_layers"]
    heads, kv_heads = (_number(content, name, place) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads % kv_heads:
        raise UnsupportedModel(f"{place}: {heads} query heads over {kv_heads} KV heads")
    hidden = _number(content, "hidden_size", place)
    dim = hidden // heads if content.get("head_dim") is None else _number(content, "head_dim", place)
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING):
            raise UnsupportedModel(f"{place}: layer {index} is of the type {kind!r}; supported: {FULL}, {SLIDING}")
        window = _number(content, "sliding_window", place) if kind == SLIDING else None
        layers.append(AttentionGeometry(index, heads, kv_heads, dim, dim, window))
    return Geometry(content["model_type"], dtype, tuple(layers))  # type: ignore[arg-type]


def _number(keys: dict[str, Any], name: str, place: str) -> int:
    value = keys.get(name)
    if type(value) is not int or value < 1:
        raise UsageError(f"{place}: {name} = {value!r}; expected a positive integer")
    return value


def checkpoint_bytes(location: Location) -> int | None:
    """Bytes of the checkpoint's tensors, by the headers of its safetensors files, or by an index where those
    are not here; None where neither is."""
    folder = location.folder
    try:
        paths = weight_files(folder, location.id)
    except UsageError:
        paths = []
    if paths and all(path.suffix == ".safetensors" for path in paths):
        return sum(_tensor_bytes(path, location.id) for path in paths)
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            size = (read_json(folder / name, location.id).get("metadata") or {}).get("total_size")
            if isinstance(size, int | float) and size > 0:
                return int(size)
    return None


def _tensor_bytes(path: Path, model_id: str) -> int:
    """Bytes of the tensors of a safetensors file: what follows its header, whose length it begins with."""
    with path.open("rb") as file:
        length = file.read(8)
    num_bytes = path.stat().st_size - 8 - int.from_bytes(length, "little")
    if num_bytes < 0:
        raise UsageError(f"{model_id}: {path.name} ends within its header", "copy or download the file again")
    return num_bytes
