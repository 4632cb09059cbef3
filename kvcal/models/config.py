"""Sizes of a model from its config.json and the headers of its weights, before anything is loaded.

A loaded model's cache is measured (``kvcal.models.geometry``). To tell beforehand what would fit, the configuration has
to do. Model types in ``DIRECT`` state their layers in plain keys, which are read without transformers, whose import
takes longer than the answer. For all others transformers reads the configuration, fills in its defaults and names the
kind of each layer. Tests compare both ways with what running the model measures.

``families.json`` lists what the contract tests measured: families that are served, and those that are not, with the
reason. ``python docs/generate.py`` writes it.

Left out: states of other layers than gated delta rules (their bytes are known once the model has run), and keys and
values of different head sizes.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import (
    CACHE_DTYPES,
    LATENT_KEYS,
    AttentionGeometry,
    CacheDtype,
    Geometry,
    LayerGeometry,
    StateGeometry,
    latent_geometry,
)
from kvcal.models.files import Location, locate, read_json, require_sizes, weight_files
from kvcal.stored_tensor import ITEM_BYTES

# Model types whose layers plain keys state, with the keys beside SHAPE_KEYS whose absence would leave something open.
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
FULL, SLIDING, STATE, HYBRID = "full_attention", "sliding_attention", "linear_attention", "hybrid"
EVERY_COMMAND = "every command"
_ONCE_RUN = "known once the model has run"
_MEASURED = "if the model is supported, `kvcal plan` with a --budget measures and counts its cache"
_MAX_HEADER_BYTES = 100_000_000  # of a safetensors file: the format's own limit


@dataclass(frozen=True)
class ModelSizes:
    """``geometry``: as the configuration states it. ``weight_bytes``: of the checkpoint, None where neither its files
    nor an index are here. ``max_positions``: the context in tokens, None if it is not stated. ``is_tested``: whether
    the contract tests measure this model type. ``uncalibrated``: why it is served by recipes with [formats] alone, None
    for one that is calibrated, or not known."""

    id: str
    geometry: Geometry
    vocab_size: int
    weight_bytes: int | None
    max_positions: int | None
    is_tested: bool
    uncalibrated: str | None


@functools.cache
def families() -> dict[str, list[dict[str, Any]]]:
    """The outcome of the contract tests: ``supported`` and ``refused`` families, a dict each."""
    content: dict[str, list[dict[str, Any]]] = json.loads((files("kvcal.models") / "families.json").read_text("utf-8"))
    return content


def read_sizes(source: str) -> ModelSizes:
    """The sizes of ``source`` (an embedded name, a folder, a GGUF file or a hub id), without its weights.

    Raises:
        UsageError: the source is not there, or config.json cannot be read or has sizes out of range.
        UnsupportedModel: a model that kvcal does not serve, or whose cache config.json does not tell.
    """
    location = locate(source)
    if location.gguf is None:
        content = read_json(location.folder / "config.json", location.id)
        require_sizes(content, location.id)
    else:
        from kvcal.models.load import read_config

        content = read_config(location).to_dict()
    uncalibrated = _uncalibrated(content.get("model_type"), location.id)
    if _is_direct(content):
        stated, kinds = content, _direct_kinds(content)
        per_layer: Sequence[Any] = [content] * len(kinds)
        dtype = content.get("dtype", content.get("torch_dtype")) or "float32"
    else:
        stated, per_layer, kinds, dtype = _with_defaults(location)
    if dtype not in get_args(CacheDtype):
        raise UnsupportedModel(f"{location.id}: checkpoint dtype {dtype}; supported: {', '.join(CACHE_DTYPES)}")
    place = f"{location.id}: {location.config_name}"
    layers = tuple(
        layer
        for index, (kind, keys) in enumerate(zip(kinds, per_layer, strict=True))
        if (layer := _layer(index, kind, keys, dtype, place)) is not None
    )
    if not layers:
        raise UnsupportedModel(f"{place}: no layer uses the cache")
    return ModelSizes(
        location.id,
        Geometry(stated["model_type"], dtype, layers),  # type: ignore[arg-type]
        _number(stated, "vocab_size", place),
        checkpoint_bytes(location),
        stated.get("max_position_embeddings"),
        any(one["model_type"] == stated["model_type"] for one in families()["supported"]),
        uncalibrated,
    )


def _uncalibrated(model_type: object, model_id: str) -> str | None:
    """The reason why a family cannot be calibrated, None if it can or is not known. UnsupportedModel for one that is
    not served at all."""
    one = next((one for one in families()["refused"] if one["model_type"] == model_type), None)
    if one is not None and one["fails_in"] == EVERY_COMMAND:
        raise UnsupportedModel(f"{model_id}: models of the type {model_type!r} are not served: {one['reason']}")
    return None if one is None else str(one["reason"])


def _is_direct(content: dict[str, Any]) -> bool:
    """Whether plain keys state all layers."""
    needed = DIRECT.get(str(content.get("model_type")))
    if needed is None or any(content.get(key) is None for key in SHAPE_KEYS) or "text_config" in content:
        return False
    given = all(key in content for key in needed)
    return given and (content.get("layer_types") is not None or not content.get("use_sliding_window"))


def _direct_kinds(content: dict[str, Any]) -> list[str]:
    """The kind of every layer, as transformers' caches derive it from the same keys."""
    kinds = content.get("layer_types")
    if isinstance(kinds, list):
        return [str(kind) for kind in kinds]
    slides = content.get("sliding_window") is not None and "use_sliding_window" not in content
    return [SLIDING if slides else FULL] * content["num_hidden_layers"]


def _with_defaults(location: Location) -> tuple[dict[str, Any], list[Any], list[str], str]:
    """The language model's configuration as transformers reads it: as a whole, for each layer, and each one's kind; and
    the checkpoint's dtype. Refuses what loading refuses before it reads weights."""
    from transformers import DynamicCache
    from transformers.cache_utils import (
        CacheLayerMixin,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionCacheLayerMixin,
        LinearAttentionLayer,
    )

    from kvcal.models.geometry import checkpoint_dtype
    from kvcal.models.load import read_config

    config = read_config(location)
    text = config.get_text_config(decoder=True)
    names: dict[Any, str] = {DynamicLayer: FULL, DynamicSlidingWindowLayer: SLIDING, LinearAttentionLayer: STATE}
    names[LinearAttentionAndFullAttentionLayer] = HYBRID
    kinds, per_layer = [], []
    try:
        layers = zip(DynamicCache(config=text).layers, text.per_layer_config, strict=False)
    except AttributeError as lacking:
        raise UnsupportedModel(f"{location.id}: config.json does not tell what each layer caches: {lacking}") from None
    for index, (cache, layer) in enumerate(layers):
        keys = {name: getattr(layer, name, None) for name in (*SHAPE_KEYS, *_LAYER_KEYS)}
        if type(cache) is DynamicSlidingWindowLayer:
            keys["sliding_window"] = cache.sliding_window
        is_placeholder = not isinstance(cache, CacheLayerMixin | LinearAttentionCacheLayerMixin)
        kind = "none" if is_placeholder else names.get(type(cache))
        if kind is None:
            raise UnsupportedModel(
                f"{location.id}: layer {index} is cached by {type(cache).__name__}; supported: "
                f"{', '.join(one.__name__ for one in names)}"
            )
        kinds.append(kind)
        per_layer.append(keys)
    stated = {key: getattr(text, key, None) for key in ("model_type", "vocab_size", "max_position_embeddings")}
    return stated, per_layer, kinds, checkpoint_dtype(config)


_DELTA_RULE_KEYS = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_LAYER_KEYS = (
    "head_dim", "multi_query", "new_decoder_architecture", "sliding_window", *_DELTA_RULE_KEYS, "linear_num_heads",
    "linear_head_dim", *LATENT_KEYS,
)  # fmt: skip


def _layer(index: int, kind: str, keys: dict[str, Any], dtype: str, place: str) -> LayerGeometry | None:
    """One layer's geometry; None for a layer that caches nothing."""
    if kind == "none":
        return None
    if kind == HYBRID:
        raise _unknown_state(index, place)
    if kind == STATE:
        return StateGeometry(index, _delta_rule_bytes(index, keys, dtype, place))
    if kind not in (FULL, SLIDING):
        raise UnsupportedModel(f"{place}: layer {index} is of the type {kind!r}; supported: {FULL}, {SLIDING}")
    heads = _number(keys, "num_attention_heads", place)
    window = _number(keys, "sliding_window", place) if kind == SLIDING else None
    if (latent := latent_geometry(index, heads, window, keys)) is not None:
        return latent
    if keys.get("new_decoder_architecture") is not None:  # Falcon, which caches one head, or a copy for each query's
        is_one = keys["multi_query"] and not keys["new_decoder_architecture"]
        keys = keys | {"num_key_value_heads": 1 if is_one else heads}
    elif keys.get("multi_query"):
        raise UnsupportedModel(f"{place}: multi_query: how many heads are cached is {_ONCE_RUN}", hint=_MEASURED)
    kv_heads = heads if keys.get("num_key_value_heads") is None else _number(keys, "num_key_value_heads", place)
    if heads % kv_heads:
        raise UnsupportedModel(f"{place}: {heads} query heads over {kv_heads} KV heads")
    hidden = _number(keys, "hidden_size", place)
    head_dim = hidden // heads if keys.get("head_dim") is None else _number(keys, "head_dim", place)
    return AttentionGeometry(index, heads, kv_heads, head_dim, head_dim, window)


def _delta_rule_bytes(index: int, keys: dict[str, Any], dtype: str, place: str) -> int:
    """Bytes of the convolution's state, in the cache's dtype, and of the recurrent one, in fp32, of a gated delta
    rule (Qwen3-Next; Kimi Linear, whose keys and values have the same heads)."""
    names = list(_DELTA_RULE_KEYS)
    if keys.get("linear_num_heads") is not None:
        names = [*["linear_num_heads"] * 2, *["linear_head_dim"] * 2, names[-1]]
    if any(keys.get(name) is None for name in names):
        raise _unknown_state(index, place)
    k_heads, v_heads, k_dim, v_dim, kernel = (_number(keys, name, place) for name in names)
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    return kernel * channels * ITEM_BYTES[dtype] + 4 * v_heads * k_dim * v_dim


def _unknown_state(index: int, place: str) -> UnsupportedModel:
    return UnsupportedModel(f"{place}: layer {index} keeps a state, whose bytes are {_ONCE_RUN}", hint=_MEASURED)


def _number(keys: dict[str, Any], name: str, place: str) -> int:
    value = keys.get(name)
    if type(value) is not int or value < 1:
        raise UsageError(f"{place}: {name} = {value!r}; expected a positive integer")
    return value


def checkpoint_bytes(location: Location) -> int | None:
    """Bytes of the checkpoint's tensors, by the headers of its safetensors files, or by an index where those are not
    here; None where neither is. A GGUF file's count as they are loaded, in bfloat16.

    Raises:
        UsageError: a header that cannot be read.
    """
    folder = location.folder
    if location.gguf is not None:
        from gguf import GGUFReader

        return sum(int(tensor.n_elements) for tensor in GGUFReader(location.gguf).tensors) * ITEM_BYTES["bfloat16"]
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
    """Bytes of the tensors of a safetensors file, by its header alone."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        tensors = [about for name, about in header.items() if name != "__metadata__"]
        return sum(end - begin for begin, end in (about["data_offsets"] for about in tensors))
    except (OSError, ValueError, struct.error, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{model_id}: the header of {path.name} cannot be read: {error}", "copy or download the file again"
        ) from None
