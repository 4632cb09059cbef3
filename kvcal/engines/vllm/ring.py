"""A layer of vLLM's that owns the rings: one block of 16-bit tokens a request, for the life of the request.

vLLM allocates such blocks for models that compress keys in groups (``CircularBufferSpec``): never hashed, never shared,
freed with the request. Each full-attention layer of a plan has one such layer beside it; one with a sliding window has
a ring and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheLayout

from kvcal.pages.record_layout import PAGE_TOKENS

SUFFIX = ".kvcal_ring"


def ring_spec(ring_bytes: int) -> CircularBufferSpec:
    """One ring of so many bytes for each request."""
    return CircularBufferSpec(
        block_size=PAGE_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.uint8, num_head_slots=1,
        tokens_per_state=PAGE_TOKENS, state_content_bytes=ring_bytes,
    )  # fmt: skip


class RingLayer(nn.Module, AttentionLayerBase):
    """The rings of the attention layer ``prefix``, of ``ring_bytes`` each. ``kv_cache``: vLLM's memory of them, once
    allocated, uint8 [rings, ..., ring_bytes]."""

    def __init__(self, prefix: str, ring_bytes: int, config: VllmConfig) -> None:
        super().__init__()
        self.name, self.ring_bytes = prefix + SUFFIX, ring_bytes
        self.kv_cache = torch.tensor([])
        config.compilation_config.static_forward_context[self.name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RingBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CircularBufferSpec:
        return ring_spec(self.ring_bytes)


@dataclass
class RingMetadata(AttentionMetadata):
    """``rings`` int32 [B]: the ring of every request of the batch, 0 (nobody's) for padding."""

    rings: Tensor


def rings_of(given: CommonAttentionMetadata, fixed: Tensor) -> Tensor:
    """``RingMetadata.rings`` of a batch, written to ``fixed``, int32 of one dimension."""
    rings = fixed[: given.num_reqs]
    rings.copy_(given.block_table_tensor[: given.num_reqs, 0])
    return rings.mul_(given.seq_lens[: given.num_reqs] > 0)


class RingMetadataBuilder(AttentionMetadataBuilder[RingMetadata]):
    """Rings lie in a tensor of a fixed address, for CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        most = vllm_config.scheduler_config.max_num_seqs
        self._rings = torch.zeros(most, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RingMetadata:
        return RingMetadata(rings_of(common_attn_metadata, self._rings))


class RingBackend(AttentionBackend):
    """A layer with a cache, as vLLM asks for it; it computes nothing."""

    @staticmethod
    def get_name() -> str:
        return "KVCAL_RING"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("rings are read and written by the layer beside them")

    @staticmethod
    def get_builder_cls() -> type[RingMetadataBuilder]:
        return RingMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [PAGE_TOKENS]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)
