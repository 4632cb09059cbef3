"""SGLang's hierarchical cache (HiCache) with a plan: its pages on the host, and in files.

SGLang copies rows of bytes, one a page, between its pool and the host (``PageRowBufferInfo``; its own kernels
and streams). A row is the blocks of all layers. Files are named by the plan's digest besides model, tokens and
rank, so that no plan reads another one's.

Rings, sinks among them, stay on the device: a page that comes back is a hit as any other, and needs the sinks
of its prompt in the table (``Beginnings``). Not copied layer by layer: a step waits for all layers.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    HostPoolGroup,
    StackBuildResult,
    StackStrategy,
    build_pool_entry,
    register_stack_strategy,
)
from sglang.srt.mem_cache.pool_host.common import get_allocator_type
from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4MainKVPoolHost
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_memory

from kvcal.engines.sglang.serving import PlanPool


class PlanPoolHost(MiniMaxM3Nvfp4MainKVPoolHost):
    """Pages on the host. SGLang's class for rows of bytes, of whatever is in them."""

    storage_objects_per_page = 1

    def __init__(self, pool: PlanPool, allocator: str) -> None:
        memory, is_pinned = get_memory(), pool.serving.device.type == "cuda"
        self.storage_format_tag = f"kvcal-{pool.serving.shard.plan.sha256}"
        (info,) = pool.get_device_pool_infos()
        super().__init__(
            info.buffer_info, memory.hicache_ratio, memory.hicache_size, pool.page_size, memory.hicache_mem_layout,
            is_pinned, allocator_type=allocator, device_capacity_tokens=pool.size, start_layer=0, end_layer=1,
        )  # fmt: skip


class PlanStrategy(StackStrategy):
    """SGLang asks which of its strategies takes a pool."""

    def matches(self, kvcache: Any, components: set[ComponentType]) -> bool:
        return isinstance(kvcache, PlanPool) and components == {ComponentType.FULL}

    def build(
        self,
        *,
        cache: Any,
        kvcache: PlanPool,
        params: Any,
        server_args: Any,
        load_cache_event: Any,
        storage_backend: str | None = None,
        storage_backend_extra_config: dict[str, Any] | None = None,
        prefetch_threshold: int = 256,
        model_name: str | None = None,
        enable_storage_metrics: bool = False,
    ) -> StackBuildResult:
        memory, host = get_memory(), PlanPoolHost(kvcache, get_allocator_type())
        entry = build_pool_entry(
            name=PoolName.KV, host_pool=host, device_pool=kvcache, layer_mapping={0: 0}, transfer_layer_id_max=1,
            is_anchor=True,
        )  # fmt: skip
        group = HostPoolGroup([entry])
        controller = HybridCacheController(
            params.token_to_kv_pool_allocator, group, params.page_size, params.tp_cache_group,
            load_cache_event=load_cache_event, attn_cp_group=params.attn_cp_cache_group,
            attn_tp_group=params.attn_tp_cache_group, pp_group=params.pp_cache_group,
            write_policy=memory.hicache_write_policy, io_backend=memory.hicache_io_backend,
            storage_backend=storage_backend, prefetch_threshold=prefetch_threshold, model_name=model_name,
            storage_backend_extra_config=storage_backend_extra_config, transfer_layer_id_max=1,
            enable_storage_metrics=enable_storage_metrics, host_memory_mode=memory.hicache_host_memory_mode,
        )  # fmt: skip
        pools = {ComponentType.FULL: host}
        return StackBuildResult(group, controller, pools, pools_desc="pages of a plan")


def register() -> None:
    """Let SGLang know the strategy."""
    register_stack_strategy(PlanStrategy())
