"""Where each layer's query and key projections live, channel by channel: what λ is folded into.

The key's come from ``kvcal.models.projections``, which measures the order of fused weights; the query's follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvcal.attention import attention_modules, layer_index
from kvcal.errors import UnsupportedModel
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.models.geometry import attention_layers
from kvcal.models.projections import FUSED_NAMES, Projection, kv_projections

# The query's name by the key's, among the children of an attention module.
QUERY_NAMES = {"k_proj": "q_proj", "key_proj": "query_proj", "key": "query"} | {name: name for name in FUSED_NAMES}
# (query, key) norms between projection and RoPE.
NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))


@dataclass(frozen=True, eq=False)
class QueryKeyProjections:
    """One layer's query and key projections, the same module where they are fused. ``q_channels_HD``,
    ``k_channels_ND``: the output channel that makes channel d of head h, n; None for queries in no known order."""

    query: Projection
    key: Projection
    q_channels_HD: Tensor | None
    k_channels_ND: Tensor


def query_key_projections(model: PreTrainedModel, geometry: Geometry) -> dict[int, QueryKeyProjections]:
    """Of every attention layer, by cache index. UnsupportedModel as ``kv_projections``, or without a query's."""
    modules = {layer_index(module): module for module in attention_modules(model)}
    keys = {found.layer: found for found in kv_projections(model, geometry) if found.side == "k"}
    found = {}
    for layer in attention_layers(geometry):
        key, module = keys[layer.index], modules[layer.index]
        children = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear | Conv1D)}
        name = next(name for name in QUERY_NAMES if name in children and children[name].weight is key.parameter)
        query = children.get(QUERY_NAMES[name])
        if query is None:
            raise UnsupportedModel(f"layer {layer.index}: {type(module).__name__} has no child {QUERY_NAMES[name]}")
        num_channels = query.weight.shape[key.channel_dim]
        channels = _query_channels(layer, key.channels_ND, num_channels, query is children[name])
        found[layer.index] = QueryKeyProjections(query, children[name], channels, key.channels_ND)
    return found


def _query_channels(layer: AttentionGeometry, k_channels_ND: Tensor, num_channels: int, fused: bool) -> Tensor | None:
    """[H, D] in the query's projection. A fused weight holds all queries, then the keys, or for each KV head its
    queries, then its key: where the keys lie tells which."""
    H, N, D = layer.num_query_heads, layer.num_kv_heads, layer.k_head_dim
    in_one_block = torch.arange(H * D).view(H, D)
    if not fused:
        return in_one_block if num_channels == H * D else None
    if int(k_channels_ND[0, 0]) == H * D:
        return in_one_block
    before_key = k_channels_ND[:, :1] - H // N * D
    return (before_key + torch.arange(H // N * D)).view(H, D)


def query_key_norms(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The (query, key) norms of an attention module; None without."""
    children = dict(module.named_children())
    return next(((children[q], children[k]) for q, k in NORM_NAMES if q in children and k in children), None)


def key_biases(model: PreTrainedModel, geometry: Geometry) -> dict[int, Tensor]:
    """{layer: the bias that is added to its keys before RoPE, [N, D]}, of the layers that have one and no QK-norm
    after it. UnsupportedModel for a model whose projections are in no known order."""
    projections = query_key_projections(model, geometry)
    normed = {layer_index(module) for module in attention_modules(model) if query_key_norms(module) is not None}
    return {
        index: found.key.bias.detach()[found.k_channels_ND.to(found.key.bias.device)]
        for index, found in projections.items()
        if found.key.bias is not None and index not in normed
    }
