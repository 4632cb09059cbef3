"""The key and value projections of each layer, for KVmix's scores, and its output projection, for error
feedback.

KVmix scores a layer by s_k = ‖∂L/∂W_k‖₂ and s_v = ‖∂L/∂W_v‖₂. Architectures keep the weights apart
(``q_proj``, ``k_proj``, ``v_proj``) or fused in one matrix, whose channel order its name does not tell (Phi-3
and GPT-NeoX differ). For a fused matrix the order is therefore measured: its output in a tiny forward is
compared with the values that the attention receives, under each known order.

Of latent attention, the projection of what is cached takes their place: its outputs become the latent and the
rotary key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvcal.errors import WITHOUT_CALIBRATION, UnsupportedModel
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.models.attention import attention_modules, layer_index
from kvcal.models.streamed import stored
from kvcal.models.supported_layers import attention_layers, probe_ids, sharing_layers
from kvcal.models.taps import Captured, tap

Projection = nn.Linear | Conv1D
Channels = tuple[Tensor, Tensor]  # of keys and of values, int64 [N, D]: output channels of their projection

# Names of the attention module's children. Separate: (key, value). Fused: with the query in one.
SEPARATE_NAMES = (("k_proj", "v_proj"), ("key_proj", "value_proj"), ("key", "value"))
LATENT_NAME = "kv_a_proj_with_mqa"  # of latent attention: the latent before its norm, then the rotary key before RoPE
FUSED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "qkv")
# What reads the heads' outputs, all heads in a row.
OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


@dataclass(frozen=True, eq=False)
class KVProjection:
    """One layer's key or value projection: ``channels_ND[n, d]`` (int64) is the output channel of ``module``
    that makes channel d of KV head n."""

    layer: int
    side: Literal["k", "v"]
    module: Projection
    channels_ND: Tensor

    def weight_grad_norms(self, x_BTF: Tensor, g_BTO: Tensor) -> Tensor:
        """‖∂L/∂W‖₂ over all KV heads for each sequence of a batch, fp64 [B], from the module's inputs and the
        gradients of its outputs, which are zero in padding."""
        g_BTC = g_BTO[..., self.channels_ND.flatten().to(g_BTO.device)]
        return torch.linalg.vector_norm(g_BTC.transpose(1, 2) @ x_BTF, dim=(1, 2), dtype=torch.float64)


def output_dim(projection: Projection) -> int:
    """The dimension of the output channels in the weight."""
    return 1 if isinstance(projection, Conv1D) else 0


def kv_projections(model: PreTrainedModel, geometry: Geometry) -> tuple[KVProjection, ...]:
    """The key and value projections of every attention layer, (k, v) by layer, in cache order.

    Runs one forward of two tokens where weights are fused. Raises UnsupportedModel if a layer's key and value
    projections are not found, or a fused weight's order is none of the known ones.
    """
    layers = {layer.index: layer for layer in attention_layers(geometry)}
    modules = _modules_by_layer(model, tuple(layers.values()))
    children = {index: _child(module, *FUSED_NAMES) for index, module in modules.items()}
    fused = {index: child for index, child in children.items() if child is not None}
    channels = _measure_fused(model, geometry, fused) if fused else {}
    found: list[KVProjection] = []
    for index, layer in layers.items():
        if index in fused:
            k, v = ((fused[index], order) for order in channels[index])
        else:
            k, v = _latent(modules[index], layer) if layer.is_latent else _separate(modules[index], layer)
        found += [KVProjection(index, "k", *k), KVProjection(index, "v", *v)]
    return tuple(found)


def output_weights(model: PreTrainedModel, geometry: Geometry) -> dict[int, Tensor]:
    """{layer: W_o [C, H, D_v]} of every attention layer: what its output projection makes of the heads'
    outputs, C channels; in host memory where the layer is streamed. Raises UnsupportedModel where a layer's
    is not found."""
    layers = {layer.index: layer for layer in attention_layers(geometry)}
    found: dict[int, Tensor] = {}
    for index, module in _modules_by_layer(model, tuple(layers.values())).items():
        heads = layers[index].num_query_heads, layers[index].attended[2]
        child = _child(_with_output(model, module), *OUTPUT_NAMES)
        if child is None or child.weight.shape[1 - output_dim(child)] != math.prod(heads):
            raise _unknown(module, index, f"output projections of {math.prod(heads)} inputs", OUTPUT_NAMES)
        found[index] = stored(child.weight).movedim(output_dim(child), 0).unflatten(1, heads)
    return found


def _with_output(model: PreTrainedModel, attention: nn.Module) -> nn.Module:
    """The parent of an attention's output projection: itself, or, of BERT's ``self``, the module ``output``
    next to it."""
    for module in model.modules():
        children = dict(module.named_children())
        if children.get("self") is attention and "output" in children:
            return children["output"]
    return attention


def _modules_by_layer(model: PreTrainedModel, layers: tuple[AttentionGeometry, ...]) -> dict[int, nn.Module]:
    """The attention modules of ``layers`` by their ``layer_idx``, which must be the cache's indices.
    Cross-attention, which a decoder by itself does not call, carries the same ones: of two modules the one
    that is called counts."""
    attention, sharing = attention_modules(model), sharing_layers(model.config)
    numbered = [(index, module) for module in attention if (index := layer_index(module)) is not None]
    indexed = [(index, module) for index, module in numbered if index not in sharing]
    if len(numbered) < len(attention):
        raise UnsupportedModel(
            f"{type(model).__name__}: several layers call the same attention module, whose weights are no layer's own",
            hint=WITHOUT_CALIBRATION,
        )
    if len({index for index, _ in indexed}) < len(indexed):
        called = _called(model, [module for _, module in indexed])
        indexed = [(index, module) for index, module in indexed if module in called]
    modules = dict(indexed)
    if sorted(modules) != sorted(layer.index for layer in layers):
        raise UnsupportedModel(
            f"{type(model).__name__}: attention modules carry the layer indices {sorted(modules)}, the cache "
            f"{[layer.index for layer in layers]}",
            hint=WITHOUT_CALIBRATION,
        )
    return modules


def _called(model: PreTrainedModel, modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Those of ``modules`` that a forward of two tokens calls."""
    called: set[nn.Module] = set()
    with ExitStack() as hooks, torch.no_grad():
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(lambda module, args: called.add(module)).remove)
        model(input_ids=probe_ids(model, 1, 2), use_cache=False)
    return called


def _child(module: nn.Module, *names: str) -> Projection | None:
    """The first child of those names that is an unquantized projection."""
    for name, child in module.named_children():
        if name in names and isinstance(child, nn.Linear | Conv1D):
            return child
    return None


def _count(num_heads: int, head_dim: int) -> Tensor:
    return torch.arange(num_heads * head_dim).view(num_heads, head_dim)


def _separate(module: nn.Module, layer: AttentionGeometry) -> list[tuple[Projection, Tensor]]:
    channels = [_count(layer.num_kv_heads, dim) for dim in (layer.k_head_dim, layer.v_head_dim)]
    for names in SEPARATE_NAMES:
        found = [child for name in names if (child := _child(module, name)) is not None]
        sizes = [child.weight.shape[output_dim(child)] for child in found]
        if sizes == [order.numel() for order in channels]:
            return list(zip(found, channels, strict=True))
    known = [*("+".join(names) for names in SEPARATE_NAMES), *FUSED_NAMES]
    raise _unknown(module, layer.index, "projections", known)


def _latent(module: nn.Module, layer: AttentionGeometry) -> list[tuple[Projection, Tensor]]:
    child = _child(module, LATENT_NAME)
    latent, rotary = _count(1, layer.k_head_dim), layer.k_head_dim + _count(1, layer.v_head_dim)
    if child is None or child.weight.shape[output_dim(child)] != latent.numel() + rotary.numel():
        raise _unknown(module, layer.index, "projection of a latent", [LATENT_NAME])
    return [(child, latent), (child, rotary)]


def _unknown(module: nn.Module, index: int, what: str, known: Sequence[str]) -> UnsupportedModel:
    """The refusal of a layer without a child of the known names."""
    children = ", ".join(name for name, _ in module.named_children())
    text = f"layer {index}: {type(module).__name__} has the children {children}; known {what}: {', '.join(known)}"
    return UnsupportedModel(text, hint=WITHOUT_CALIBRATION)


def _measure_fused(model: PreTrainedModel, geometry: Geometry, fused: Mapping[int, Projection]) -> dict[int, Channels]:
    """{layer: channels of (k, v) in its fused weight}, from a forward of two tokens."""
    outputs: dict[int, Tensor] = {}
    channels: dict[int, Channels] = {}
    layers = {layer.index: layer for layer in attention_layers(geometry)}

    def keep(index: int, module: nn.Module, args: tuple, output_BTC: Tensor) -> None:
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


def _fused_channels(layer: AttentionGeometry, output_BTC: Tensor, v_BNTD: Tensor) -> Channels:
    """The channels under the one order that reproduces the values. Keys follow from the order: they may be
    normalised before RoPE, so they are no evidence."""
    num_channels = output_BTC.shape[-1]
    for channels in _fused_orders(layer):
        in_range = max(int(order.max()) for order in channels) < num_channels
        if in_range and torch.equal(output_BTC[..., channels[1]].transpose(1, 2), v_BNTD):
            return channels
    raise UnsupportedModel(
        f"layer {layer.index}: the values are no known part of its fused projection's {num_channels} "
        "channels; known orders: [q | k | v], and [queries, k, v] per KV head"
    )


def _fused_orders(layer: AttentionGeometry) -> Iterator[Channels]:
    """(k, v) channels [heads, D]: one block each (Phi-3, GPT-2), or its queries, k, v for each KV head
    (GPT-NeoX with one query a head, InternLM-2 with several)."""
    H, N, K, V = layer.num_query_heads, layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim
    yield H * K + _count(N, K), H * K + N * K + _count(N, V)
    Q = H // N * K
    start_N1 = torch.arange(N)[:, None] * (Q + K + V)
    yield start_N1 + Q + torch.arange(K), start_N1 + Q + K + torch.arange(V)
