"""Rings and sinks of a request in vLLM's memory, of all layers, each as a layer of its own.

    rings   16-bit tokens, in a few blocks for the life of a request. vLLM allocates one such block for models that
            compress keys in groups (``CircularBufferSpec``): never hashed, never shared, freed with the
            request
    sinks   where prefixes are cached: those of the first page of a prompt. One block a request, hashed with that page.
            So vLLM hands it to each request that begins after the page, and evicts it like a page. A prompt
            whose sinks are gone is computed anew, as one whose first page is gone

Groups of layers come in the order in which their layers were made: pages, rings, sinks. When the metadata of
sinks is built, that of rings is there. Copies between them are made there, outside of a CUDA graph; and once
more by attention, in a step that also computes parts of prompts: a request may begin after a page that
another one fills in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager, FullAttentionManager
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvcal.engines.capacity import Placed
from kvcal.engines.shard import BlockLayout
from kvcal.engines.vllm.prefixes import begin_after_packed_pages
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import SIDES


@dataclass(frozen=True, kw_only=True)
class RingSpec(CircularBufferSpec):
    """A request's rings, in so many blocks."""

    num_blocks: int = 1

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.num_blocks * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        return self.num_blocks

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        return all(type(spec) is type(self) for spec in kv_cache_specs.values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a pickled one: vLLM's scheduler is another process than its workers."""
        register_managers()
        self.__dict__.update(state)


@dataclass(frozen=True, kw_only=True)
class SinkSpec(RingSpec):
    """The sinks of a prompt's first page."""

    @property
    def prefix_cacheable(self) -> bool:
        return True


def register_managers() -> None:
    """Tell vLLM who hands out blocks of rings and sinks. Its own managers come first: it registers them where
    there are none."""
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    begin_after_packed_pages()
    for spec, manager in ((RingSpec, RingManager), (SinkSpec, SinkManager)):
        KVCacheSpecRegistry.register(spec, manager, uniform_type_base_spec=spec)


class RingManager(CircularBufferManager):
    """Hands out the blocks of rings of each request, for its life."""

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        return 0 if self.req_to_blocks.get(request_id) else self.kv_cache_spec.num_blocks

    def allocate_new_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> list[Any]:
        held = self.req_to_blocks[request_id]
        if held:  # of every request in every step but its first one
            return []
        held.extend(self.block_pool.get_new_blocks(self.get_num_blocks_to_allocate(request_id)))
        return held[:]

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        self.allocate_new_blocks(request_id)


class SinkManager(RingManager):
    """Hands out a block of sinks for each request: that of its first page, where a request before it has
    filled one."""

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int = 0, new_computed_blocks: Sequence[Any] = (), *args: Any, **kwargs: Any
    ) -> int:
        if self.req_to_blocks.get(request_id):
            return 0
        return self._get_num_evictable_blocks(new_computed_blocks) if new_computed_blocks else 1

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any, kv_cache_spec: Any,
        *args: Any, **kwargs: Any,
    ) -> tuple[tuple[list[Any], ...], int]:  # fmt: skip
        """All of a prefix that has the sinks of its first page, or nothing."""
        if max_length >= PAGE_TOKENS:
            first = resolve_block_hashes(block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size)[0]
            if found := block_pool.get_cached_block(first, kv_cache_group_ids):
                return tuple([block] for block in found), max_length
        return tuple([] for _ in kv_cache_group_ids), 0

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[Any], *args: Any, **kwargs: Any
    ) -> None:
        self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id].extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(new_computed_blocks)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        if not self.num_cached_block.get(request.request_id):
            FullAttentionManager.cache_blocks(self, request, min(num_tokens, PAGE_TOKENS), *args, **kwargs)


class RingLayer(nn.Module, AttentionLayerBase):
    """Rings of all layers, ``placed`` in blocks. ``kv_cache``: vLLM's memory of blocks, once allocated, uint8
    [blocks, ..., bytes]. ``begin``: of the last one, brings windows to the rings of requests that begin."""

    kind: ClassVar[type[RingSpec]] = RingSpec

    def __init__(self, name: str, placed: Placed, config: VllmConfig) -> None:
        super().__init__()
        self.name, self.placed = name, placed
        self.begin: Callable[[], None] | None = None
        self.kv_cache = torch.tensor([])
        config.compilation_config.static_forward_context[self.name] = self
        register_managers()

    def get_attn_backend(self) -> type[AttentionBackend]:
        return SinkBackend if self.kind is SinkSpec else RingBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> RingSpec:
        _, num_blocks, nbytes = self.placed
        return self.kind(
            block_size=PAGE_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.uint8, num_head_slots=1,
            tokens_per_state=PAGE_TOKENS, state_content_bytes=nbytes, num_blocks=num_blocks,
        )  # fmt: skip


class SinkLayer(RingLayer):
    """Sinks of the layers that have them in block ``number``, of a
    :class:`~kvcal.engines.vllm.serving.Serving`."""

    kind = SinkSpec

    def __init__(self, prefix: str, number: int, serving: Any, config: VllmConfig) -> None:
        sinks: Placed = serving.pool.sinks
        own = {index: at for index, at in sinks.at.items() if at[0] == number}
        super().__init__(f"{prefix}.kvcal_sinks{number}", Placed(own, 1, sinks.block_bytes), config)
        self.number = number
        self.layouts: dict[int, BlockLayout] = serving.shard.blocks
        self.ring: RingLayer = serving.ring
        self.serving = serving
        self._bound: tuple[Tensor, Tensor, dict[int, SharedSinks]] | None = None

    @property
    def copies(self) -> dict[int, SharedSinks]:
        """By layer; of vLLM's memory, as it is now."""
        if self._bound is None or self._bound[0] is not self.kv_cache or self._bound[1] is not self.ring.kv_cache:
            rings, blocks = as_bytes(self.ring.kv_cache), as_bytes(self.kv_cache)
            found = {
                index: SharedSinks(self.layouts[index], rings[:, self.ring.placed.at[index][1] :], blocks[:, first:])
                for index, (_, first) in self.placed.at.items()
            }
            self._bound = self.kv_cache, self.ring.kv_cache, found
        return self._bound[2]


def as_bytes(cache: Tensor) -> Tensor:
    """vLLM's view of a layer's memory, [blocks, 1, 1, bytes]: uint8 [blocks, bytes]."""
    return cache.view(torch.uint8).flatten(1)


@dataclass
class RingMetadata(AttentionMetadata):
    """``rings`` int32 [blocks, B]: those of every request of the batch, 0 (nobody's) for padding."""

    rings: Tensor


@dataclass
class SinkMetadata(RingMetadata):
    """``rings`` [1, B]: the blocks of sinks of ``layer``. ``ending``: requests, by their places in the batch,
    int64, whose first page may end with this step; ``to``: the blocks of their sinks, int64."""

    layer: SinkLayer
    ending: Tensor
    to: Tensor

    def copy(self, index: int, rings: Tensor) -> None:
        """Sinks of first pages in a layer of the plan from rings, int32 [B], to their blocks; then back, of
        requests that begin after pages of others."""
        copies, ring_block = self.layer.copies[index], self.layer.ring.placed.at[index][0]
        if len(self.ending):
            copies.save(rings.long()[self.ending], self.to)
        for one in self.layer.serving.begun:
            sinks = one.sinks[self.layer.number : self.layer.number + 1]
            copies.copy_back(one.rings[ring_block : ring_block + 1].long(), sinks.long())


def rings_of(given: CommonAttentionMetadata, fixed: Tensor) -> Tensor:
    """The blocks of each request, int32 [blocks, B], at the beginning of the rows of ``fixed``."""
    rings = fixed[:, : given.num_reqs]
    rings.copy_(given.block_table_tensor[: given.num_reqs, : len(fixed)].T)
    return rings.mul_(given.seq_lens[: given.num_reqs] > 0)


class RingMetadataBuilder(AttentionMetadataBuilder[RingMetadata]):
    """Rings lie in a tensor of a fixed address, for CUDA graphs. ``latest``, by layer of rings: the lengths
    of the step whose metadata was built last, and its rings."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    latest: ClassVar[dict[str, tuple[Tensor, Tensor]]] = {}

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        (self._layer,) = (vllm_config.compilation_config.static_forward_context[name] for name in layer_names)
        shape = self._layer.placed.num_blocks, vllm_config.scheduler_config.max_num_seqs
        self._rings = torch.zeros(shape, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RingMetadata:
        rings = rings_of(common_attn_metadata, self._rings)
        self.latest[self._layer.name] = common_attn_metadata.seq_lens, rings
        if self._layer.begin is not None:
            self._layer.begin()
        return RingMetadata(rings)


class SinkMetadataBuilder(RingMetadataBuilder):
    """Copies sinks before a step, from and to the rings that the step has.

    Where steps have several tokens the host knows the most that a request may have, and steps are scheduled ahead:
    two of them may have tokens that it does not know to be rejected. So sinks are saved in every step that may be
    the one. They do not change once as many tokens are accepted, and a page is shared after all of its tokens
    are: the last copy before that is right."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SinkMetadata:
        given, serving = common_attn_metadata, self._layer.serving
        blocks = rings_of(given, self._rings)
        assert given.seq_lens_cpu_upper_bound is not None, "vLLM gives bounds of lengths"
        starts = given.query_start_loc_cpu[: given.num_reqs + 1].numpy()
        counts = starts[1:] - starts[:-1]
        totals = given.seq_lens_cpu_upper_bound[: given.num_reqs].numpy()
        most = serving.shard.step_tokens
        past = totals - counts - (2 * most if most > 1 else 0)
        (numbers,) = ((counts > 0) & (past < PAGE_TOKENS) & (totals >= PAGE_TOKENS)).nonzero()
        lengths, rings = self.latest[self._layer.ring.name]
        assert lengths is given.seq_lens, "vLLM builds metadata of rings before that of sinks"
        if not len(numbers) and not serving.begun:  # most steps
            return SinkMetadata(blocks, self._layer, self._none, self._none)
        ending = torch.from_numpy(numbers).to(blocks.device, non_blocking=True)
        to = blocks[0].long()[ending]
        for one in serving.begun if most > 1 else ():  # which have no sinks yet: to nobody's block
            to = to.masked_fill(rings[0][ending] == one.rings[0], 0)
        found = SinkMetadata(blocks, self._layer, ending, to)
        for index in self._layer.copies:
            found.copy(index, rings[self._layer.ring.placed.at[index][0]])
        if self._layer.begin is not None:
            self._layer.begin()
        return found

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> SinkMetadata:
        """Of requests without a past: nothing is copied."""
        return SinkMetadata(rings_of(common_attn_metadata, self._rings), self._layer, self._none, self._none)


class RingBackend(AttentionBackend):
    """A layer with a cache, as vLLM asks for it; it computes nothing."""

    @staticmethod
    def get_name() -> str:
        return "KVCAL_RING"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("rings are read and written by the layer next to them")

    @staticmethod
    def get_builder_cls() -> type[RingMetadataBuilder]:
        return RingMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [PAGE_TOKENS]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)


class SinkBackend(RingBackend):
    """The same, whose metadata copies sinks."""

    @staticmethod
    def get_name() -> str:
        return "KVCAL_SINKS"

    @staticmethod
    def get_builder_cls() -> type[SinkMetadataBuilder]:
        return SinkMetadataBuilder


class SharedSinks:
    """Sinks of one layer that requests share: ``rings``, uint8 [rings, ring_bytes or more], and ``blocks``,
    uint8 [blocks, sink_bytes or more], with keys before values.

    Attention reads sinks from a request's ring. A request that begins after blocks of another has a ring
    without them. So there is one small block more for each first page of a prompt: the sinks of all layers at
    16 bits. The request that fills a first page copies its sinks there; one that begins after it copies them
    back, into its ring."""

    def __init__(self, layout: BlockLayout, rings: Tensor, blocks: Tensor) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []
        first = 0
        for side in SIDES:
            start, nbytes = layout.sinks_at(side)
            self._parts.append((rings[:, start : start + nbytes], blocks[:, first : first + nbytes]))
            first += nbytes

    def save(self, rings: Tensor, blocks: Tensor) -> None:
        """Copy the sinks of rings, int64 [n], to blocks, int64 [n]."""
        for own, shared in self._parts:
            shared[blocks] = own[rings]

    def copy_back(self, rings: Tensor, blocks: Tensor) -> None:
        """The other way round."""
        for own, shared in self._parts:
            own[rings] = shared[blocks]
