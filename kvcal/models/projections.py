"""Where each layer's key and value projection weights live, for KVmix's scores.

KVmix scores a layer by s_k = ‖∂L/∂W_k‖₂ and s_v = ‖∂L/∂W_v‖₂. Architectures keep the two weights apart
(``k_proj``, ``v_proj``) or fused with the query's in one matrix, whose channel order its name does not tell
(Phi-3 and GPT-NeoX differ). For a fused matrix the order is therefore measured: its output in a tiny forward
is compared with the values that the attention receives, under each known order.

Left out: biases (the paper scores weights), latent attention, and quantized or adapter-wrapped projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvcal.errors import NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.models.attention import attention_modules, layer_index
from kvcal.models.geometry import attention_layers, probe_ids
from kvcal.models.taps import Captured, tap

Projection = nn.Linear | Conv1D

# Names of the attention module's children. Separate: (key, value). Fused: query, key and value in one.
SEPARATE_NAMES = (("k_proj", "v_proj"), ("key_proj", "value_proj"), ("key", "value"))
FUSED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "qkv")


@dataclass(frozen=True, eq=False)
class KVProjection:
    """One layer's key or value projection: ``channels_ND[n, d]`` (int64) is the index, along ``channel_dim``
    of ``parameter``, that makes channel d of KV head n. ``channel_dim`` is 0 in nn.Linear, 1 in Conv1D."""

    layer: int
    side: Literal["k", "v"]
    parameter: nn.Parameter
    channels_ND: torch.Tensor
    channel_dim: int

    def weight_grad_norms(self) -> tuple[float, ...]:
        """‖∂L/∂W‖₂ of each KV head, summed in fp64, from the gradient that a backward left on ``parameter``.

        Raises UsageError without a gradient, NonFiniteActivations if it is not finite.
        """
        gradient = self.parameter.grad
        place = f"the {self.side} projection of layer {self.layer}"
        if gradient is None:
            raise UsageError(f"{place} has no gradient", hint="call backward on a loss that depends on it")
        channels = self.channels_ND.flatten().to(gradient.device)
        selected = gradient.index_select(self.channel_dim, channels).movedim(self.channel_dim, 0)
        norms = selected.reshape(len(self.channels_ND), -1).to(torch.float64).norm(dim=1)
        if not norms.isfinite().all():
            raise NonFiniteActivations(f"{place} has a gradient that is not finite")
        return tuple(norms.tolist())

    def weight_grad_norm(self) -> float:
        """‖∂L/∂W‖₂ over all KV heads; see ``weight_grad_norms``."""
        return math.hypot(*self.weight_grad_norms())


def kv_projections(model: PreTrainedModel, geometry: Geometry) -> tuple[KVProjection, ...]:
    """The key and value projections of every attention layer, (k, v) by layer, in cache order.

    Runs one forward of two tokens where weights are fused. Raises UnsupportedModel if a layer's projections
    are not found, or a fused weight's order is none of the known ones.
    """
    layers = attention_layers(geometry)
    modules = _modules_by_layer(model, layers)
    children = {index: _child(module, *FUSED_NAMES) for index, module in modules.items()}
    fused = {index: child for index, child in children.items() if child is not None}
    channels = _measure_fused(model, geometry, fused) if fused else {}
    found: list[KVProjection] = []
    for layer in layers:
        if layer.index in fused:
            key = value = fused[layer.index]
            k_channels_ND, v_channels_ND = channels[layer.index]
        else:
            key, value = _separate_weights(modules[layer.index], layer)
            k_channels_ND = _count(layer.num_kv_heads, layer.k_head_dim)
            v_channels_ND = _count(layer.num_kv_heads, layer.v_head_dim)
        found.append(_projection(layer, "k", key, k_channels_ND))
        found.append(_projection(layer, "v", value, v_channels_ND))
    return tuple(found)


def _modules_by_layer(model: PreTrainedModel, layers: tuple[AttentionGeometry, ...]) -> dict[int, nn.Module]:
    """The attention modules by their ``layer_idx``, which must be the cache's indices."""
    indexed = ((layer_index(module), module) for module in attention_modules(model))
    modules = {index: module for index, module in indexed if index is not None}
    if sorted(modules) != sorted(layer.index for layer in layers):
        raise UnsupportedModel(
            f"{type(model).__name__}: attention modules carry the layer indices {sorted(modules)}, the cache "
            f"{[layer.index for layer in layers]}"
        )
    return modules


def _child(module: nn.Module, *names: str) -> Projection | None:
    """The first child of those names that is an unquantized projection."""
    for name, child in module.named_children():
        if name in names and isinstance(child, nn.Linear | Conv1D):
            return child
    return None


def _channel_dim(projection: Projection) -> int:
    return 1 if isinstance(projection, Conv1D) else 0


def _projection(
    layer: AttentionGeometry, side: Literal["k", "v"], weight: Projection, channels_ND: torch.Tensor
) -> KVProjection:
    return KVProjection(layer.index, side, weight.get_parameter("weight"), channels_ND, _channel_dim(weight))


def _count(num_heads: int, head_dim: int) -> torch.Tensor:
    return torch.arange(num_heads * head_dim).view(num_heads, head_dim)


def _separate_weights(module: nn.Module, layer: AttentionGeometry) -> tuple[Projection, Projection]:
    expected = [layer.num_kv_heads * layer.k_head_dim, layer.num_kv_heads * layer.v_head_dim]
    for key_name, value_name in SEPARATE_NAMES:
        key, value = _child(module, key_name), _child(module, value_name)
        if key is None or value is None:
            continue
        if [child.weight.shape[_channel_dim(child)] for child in (key, value)] == expected:
            return key, value
    known = [*("+".join(names) for names in SEPARATE_NAMES), *FUSED_NAMES]
    raise UnsupportedModel(
        f"layer {layer.index}: {type(module).__name__} has the children "
        f"{', '.join(name for name, _ in module.named_children())}; known projections: {', '.join(known)}"
    )


def _measure_fused(
    model: PreTrainedModel, geometry: Geometry, fused: dict[int, Projection]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """{layer: (k, v) channels (N, D) in its fused weight}, from a forward of two tokens."""
    outputs: dict[int, torch.Tensor] = {}
    channels: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    layers = {layer.index: layer for layer in attention_layers(geometry)}

    def keep(index: int, module: nn.Module, args: tuple, output_BTC: torch.Tensor) -> None:
        outputs[index] = output_BTC

    def compare(captured: Captured) -> None:
        if captured.layer in fused:
            output_BTC = outputs.pop(captured.layer)
            channels[captured.layer] = _fused_channels(layers[captured.layer], output_BTC, captured.v_BNTD)

    with ExitStack() as hooks, torch.no_grad(), tap(model, compare, geometry):
        for index, projection in fused.items():
            hooks.callback(projection.register_forward_hook(partial(keep, index)).remove)
        model(input_ids=probe_ids(model, 1, 2), use_cache=False)
    return channels


def _fused_channels(
    layer: AttentionGeometry, output_BTC: torch.Tensor, v_BNTD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and value channels under the one order that reproduces the values. The keys' follow from the
    order: keys may be normalised before RoPE, so they are no evidence."""
    num_channels = output_BTC.shape[-1]
    for k_channels_ND, v_channels_ND in _fused_orders(layer):
        in_range = max(int(k_channels_ND.max()), int(v_channels_ND.max())) < num_channels
        if in_range and torch.equal(output_BTC[..., v_channels_ND].transpose(1, 2), v_BNTD):
            return k_channels_ND, v_channels_ND
    raise UnsupportedModel(
        f"layer {layer.index}: the values are no known part of its fused projection's {num_channels} "
        "channels; known orders: [q | k | v], and [queries, k, v] per KV head"
    )


def _fused_orders(layer: AttentionGeometry) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(k, v) channels (N, D): one block each (Phi-3, GPT-2), or its queries, k, v for each KV head (GPT-NeoX
    with one query a head, InternLM-2 with several)."""
    H, N, K, V = layer.num_query_heads, layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim
    yield H * K + _count(N, K), H * K + N * K + _count(N, V)
    k_start_N1 = torch.arange(N)[:, None] * (H // N * K + K + V) + H // N * K
    yield k_start_N1 + torch.arange(K), k_start_N1 + K + torch.arange(V)


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
