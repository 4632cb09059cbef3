"""Geometry of a loaded model's cache, measured rather than guessed from the names in its configuration.

Three forwards of one or two tokens, through the official ``DynamicCache(config=...)`` with a subclass that
notes what the model hands to ``Cache.update``: head counts and dimensions are those of the real tensors, the
kind of each layer (full attention, sliding window, state) is the class of the official cache layer, and the
bytes of a state layer are those of the tensors that it holds.

Multi-head latent attention (DeepSeek-V2/V3, Kimi) hands over a latent and a rotary key, which are cached as
they are.

Layers that read the keys and values of an earlier one (Gemma 3n), as the forward hands them on, cache
nothing.

Not served, and named with the layer: encoder-decoders, layers that hold both a sliding window and a state,
states that modules keep besides the cache (RecurrentGemma), indexed or compressed caches (DeepSeek-V3.2/V4),
models that are not causal. Chunked attention (Llama-4) counts as bounded, as transformers itself caches it: a
window of one chunk.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvcal.errors import AS_A_DECODER, UnsupportedModel
from kvcal.geometry import (
    CACHE_DTYPES,
    AttentionGeometry,
    CacheDtype,
    ExpandedHeads,
    Geometry,
    LayerGeometry,
    StateGeometry,
)
from kvcal.models.attention import cache_argument, with_cache

# The keys of a configuration that tell the sizes of latent attention.
LATENT_KEYS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
# Layer types without any attention: transformers gives them a placeholder for a cache layer.
LAYERS_WITHOUT_ATTENTION = ("moe", "mlp")
# The official cache layers of keys and values that are served; the last one also keeps a state.
ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer)


class RecordingCache(DynamicCache):
    """The official cache, which also keeps what each layer handed to ``update``: ``new_kv[index]`` lists
    (k_post_BNTD, v_BNTD), one entry a call. For tiny forwards only: it holds every tensor."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.new_kv: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record, then do what DynamicCache does. UnsupportedModel for a layer the configuration lacks."""
        if layer_idx >= len(self.layers):
            raise UnsupportedModel(
                f"layer {layer_idx} calls Cache.update, but the configuration lists {len(self.layers)} layers"
            )
        self.new_kv.setdefault(layer_idx, []).append((key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def geometry_of(model: PreTrainedModel, cache_dtype: CacheDtype | None = None) -> Geometry:
    """Measure ``model``'s caching layers by running it on two tokens (batch 1, no gradient).

    ``cache_dtype`` (a key of CACHE_DTYPES) names the dtype of unquantized tokens; None takes the
    configuration's dtype, float32 if it has none. A state layer's ``bytes_per_sequence`` is the bytes of the
    tensors that its official cache layer holds after a forward at batch 1, in the dtypes of this run: a model
    computing in float32 holds float32 states. Raises UnsupportedModel for what the module docstring lists.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder; supported: decoder-only language models")
    require_cache(model)
    config = model.config.get_text_config(decoder=True)
    try:
        cache = RecordingCache(config)
        with torch.no_grad():
            _run_probe(model, cache)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        raise UnsupportedModel(f"{name} does not run with transformers' DynamicCache: {error}") from error
    return _geometry(config, cache, cache_dtype or checkpoint_dtype(model.config))


def geometry_without_weights(config: PreTrainedConfig) -> Geometry:
    """The geometry of a model by its configuration alone: three tokens on the device "meta", where tensors
    have shapes and no values. UnsupportedModel for a model that does not run there, or whose layers are not
    served; what only values tell, such as a missing causality, is left to ``geometry_of``."""
    config, dtype = copy.deepcopy(config), checkpoint_dtype(config)
    text = config.get_text_config(decoder=True)
    text.pad_token_id = None  # or GPT-2 looks for it among the tokens
    try:
        cache = RecordingCache(text)
        with torch.device("meta"), torch.no_grad():
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=CACHE_DTYPES[dtype], experts_implementation="batched_mm"
            )
            for num_tokens in (2, 1):
                ids = torch.zeros(1, num_tokens, dtype=torch.int64)
                model.eval()(input_ids=ids, use_cache=True, **with_cache(model, cache))
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnsupportedModel(
            f"the configuration of {text.model_type} does not tell what each layer caches: {error}",
            hint="if the model is supported, `kvcal plan` with a --budget measures and counts its cache",
        ) from error
    return _geometry(text, cache, dtype)


def _geometry(config: PreTrainedConfig, cache: RecordingCache, cache_dtype: CacheDtype) -> Geometry:
    measured = (_layer_geometry(config, cache, index) for index in range(len(cache.layers)))
    layers = tuple(layer for layer in measured if layer is not None)
    if not layers:
        raise UnsupportedModel(f"{config.model_type}: no layer uses the cache")
    return Geometry(model_type=config.model_type, cache_dtype=cache_dtype, layers=layers)


def require_cache(model: PreTrainedModel) -> None:
    """UnsupportedModel for a model without keys and values to cache, such as Mamba, whose cache holds states
    alone."""
    types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ("full_attention",))
    if cache_argument(model) is None or types <= {"linear_attention", *LAYERS_WITHOUT_ATTENTION}:
        raise UnsupportedModel(f"{type(model).__name__} has no key-value cache")


def checkpoint_dtype(config: PreTrainedConfig) -> CacheDtype:
    """The name of the dtype that the checkpoint is stored in, float32 if the configuration names none."""
    dtype = config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
    for name in get_args(CacheDtype):
        if CACHE_DTYPES[name] == dtype or name == dtype:
            return name
    raise UnsupportedModel(f"checkpoint dtype {dtype}; supported: {', '.join(CACHE_DTYPES)}")


def sharing_layers(config: PreTrainedConfig) -> list[int]:
    """Layers that read what an earlier one has cached, by the model's configuration: those that have
    attention, and in the official cache a placeholder, or no place at its end."""
    text = config.get_text_config(decoder=True)
    types, layers = getattr(text, "layer_types", None) or [], DynamicCache(config=text).layers
    kinds = CacheLayerMixin | LinearAttentionCacheLayerMixin
    return [
        index
        for index in range(text.num_hidden_layers)
        if (index >= len(layers) or not isinstance(layers[index], kinds))
        and not (index < len(types) and types[index] in LAYERS_WITHOUT_ATTENTION)
    ]


def attention_layers(geometry: Geometry) -> tuple[AttentionGeometry, ...]:
    """The attention layers, sliding-window ones included, in cache order."""
    return tuple(layer for layer in geometry.layers if isinstance(layer, AttentionGeometry))


def probe_ids(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    """Token ids (batch, length), int64, for a forward whose text does not matter: counted up from 3."""
    ids = torch.arange(3, 3 + batch * length, device=model.device) % num_embeddings(model)
    return ids.view(batch, length)


def num_embeddings(model: PreTrainedModel) -> int:
    """Token ids that the model takes: from 0 to this, exclusive."""
    return int(model.get_input_embeddings().get_parameter("weight").shape[0])


def _run_probe(model: PreTrainedModel, cache: RecordingCache) -> None:
    """Two tokens into the cache, then two more; and two tokens of which the last differs, for causality."""
    ids = probe_ids(model, 1, 3)
    ids, other_ids = ids[:, :2], ids[:, ::2]
    logits = model(input_ids=ids, use_cache=True, **with_cache(model, cache)).logits
    state_bytes = [_state_bytes(layer) for layer in cache.layers]
    kept = _module_tensors(model)
    other_logits = model(input_ids=other_ids, use_cache=False).logits
    model(input_ids=other_ids, use_cache=True, **with_cache(model, cache))

    if state_bytes != [_state_bytes(layer) for layer in cache.layers]:
        raise UnsupportedModel(f"{type(model).__name__}: a state layer's cache grows with the tokens")
    for name, tensor in _module_tensors(model).items():
        if name not in kept or not torch.equal(tensor, kept[name]):
            raise UnsupportedModel(
                f"{type(model).__name__} keeps a state in {name}, not in the cache: requests would read each other's"
            )
    # A change of the last token moves the first token's logits by O(1) of their size when attention is
    # bidirectional, and by rounding at most (grouped expert products) when it is causal.
    tolerance = 1e-3 if logits.dtype == torch.float32 else 5e-2
    change = (logits[:, 0] - other_logits[:, 0]).abs().max()
    if change > tolerance * logits[:, 0].abs().max():
        raise UnsupportedModel(
            f"{type(model).__name__} is not causal: a later token changes earlier logits",
            hint=AS_A_DECODER,
        )


def _module_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Copies of the tensors that modules hold besides parameters, by name."""
    found = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        found |= {f"{prefix}.{name}": value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _layer_geometry(config: PreTrainedConfig, cache: RecordingCache, index: int) -> LayerGeometry | None:
    """One layer's geometry; None for a layer that caches nothing: it has no attention, or reads what an
    earlier layer has cached."""
    layer = cache.layers[index]
    place = f"layer {index} of {config.model_type}"
    if not isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin):  # a placeholder
        return None
    if type(layer) is LinearAttentionLayer:
        return StateGeometry(index=index, bytes_per_sequence=_state_bytes(layer))
    if type(layer).__name__ == "DynamicIndexedLayer":  # which transformers does not export everywhere
        raise UnsupportedModel(
            f"{place} caches the keys of a sparse-attention indexer besides its latents (DynamicIndexedLayer), for "
            "which plans have no entry",
            hint="latent attention without an indexer is served: DeepSeek-V2 and V3, Kimi, GLM-4.7-Flash",
        )
    if type(layer) not in ATTENTION_LAYERS:
        supported = ", ".join(one.__name__ for one in (*ATTENTION_LAYERS, LinearAttentionLayer))
        raise UnsupportedModel(f"{place} is cached by {type(layer).__name__}; supported: {supported}")
    calls = cache.new_kv.get(index, [])
    if len(calls) != 2:
        raise UnsupportedModel(
            f"{place} called Cache.update {len(calls)} times in 2 forwards: it reads another layer's keys from the "
            "cache, or holds several caches"
        )
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    geometry = _attention_geometry(config, index, *calls[0], window)
    return dataclasses.replace(geometry, state_bytes=_state_bytes(layer))


def _attention_geometry(
    config: PreTrainedConfig, index: int, k_post_BNTD: torch.Tensor, v_BNTD: torch.Tensor, window: int | None
) -> AttentionGeometry:
    place = f"layer {index} of {config.model_type}"
    k_shape, v_shape = tuple(k_post_BNTD.shape), tuple(v_BNTD.shape)
    is_four_dim = len(k_shape) == len(v_shape) == 4
    if not is_four_dim or (k_shape[0], k_shape[2]) != (1, 2) or k_shape[:3] != v_shape[:3]:
        raise UnsupportedModel(f"{place} caches shapes {k_shape}, {v_shape}; supported: (B, N, T, D) alike")
    num_query_heads, num_kv_heads = config.num_attention_heads, k_shape[1]
    if not isinstance(num_query_heads, int) or num_query_heads % num_kv_heads:
        raise UnsupportedModel(f"{place}: {num_query_heads} query heads over {num_kv_heads} KV heads")
    measured = AttentionGeometry(index, num_query_heads, num_kv_heads, k_shape[-1], v_shape[-1], window)
    sizes = [size for name in LATENT_KEYS if isinstance(size := getattr(config, name, None), int) and size > 0]
    if len(sizes) == len(LATENT_KEYS) and (num_kv_heads, k_shape[-1], v_shape[-1]) == (1, *sizes[:2]):
        *_, plain_dim, v_dim = sizes
        return dataclasses.replace(measured, expanded=ExpandedHeads(plain_dim + sizes[1], v_dim))
    return measured


def _state_bytes(layer: object) -> int:
    """Bytes of a layer's convolution and recurrent states; 0 for a layer without any."""
    if not isinstance(layer, LinearAttentionLayer):
        return 0
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return sum(state.nbytes for state in states if state is not None)
