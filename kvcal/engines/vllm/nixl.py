"""Prompts and answers in engines of their own: the second one reads a request's blocks from the first one's memory,
through NIXL, and goes on with the prompt's last token.

vLLM's own connector reads ("pulls") layers of heads. With a plan it would compare too little: two plans may have
blocks of equal bytes, and ranks of another number hold other heads in as many. And it would read one layer's share of
a ring. So here a block is one piece of bytes, whatever it holds, and what both engines have to have in common is
part of what they compare before the first read.

A request's blocks of pages, of its ring and of its sinks are read. Its ring has the tokens of the page that is not
full and its windows at 16 bits, so that a request goes on within a page as it would where it began; after whole
pages alone it begins as after cached ones (``Serving.note``).

vLLM loads this class by ``kv_connector_module_path``, which is public, in the scheduler and in its workers. What it
takes of the connector besides is not: groups of layers, the hash that a handshake compares, the requests of a step.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from torch import Tensor
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvcal.engines.vllm import PEERS
from kvcal.engines.vllm.rings import RingSpec
from kvcal.engines.vllm.serving import PLAN_KEY, Serving, latest, plan_path
from kvcal.errors import UsageError


class PlanNixlConnector(NixlPullConnector):
    """vLLM's NIXL connector, which reads whole blocks of the same plan."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """UsageError where vLLM was started without a plan."""
        if plan_path(vllm_config.additional_config) is None:
            raise UsageError(
                f"the KV connector {PEERS} without a plan",
                hint=f"""--additional-config '{{"{PLAN_KEY}": "plan.safetensors"}}', or vLLM's own NixlConnector""",
            )
        super().__init__(vllm_config, role, of_whole_blocks(kv_cache_config))
        self._have_pages = [not isinstance(group.kv_cache_spec, RingSpec) for group in kv_cache_config.kv_cache_groups]

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A request's pages and sinks are cached together, or not at all."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> None:
        """The plan's backend has one layout."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return False

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """All of vLLM's blocks, once, under the name of each group."""
        serving, worker = latest(), self.connector_worker
        assert serving is not None and worker is not None
        first = kv_caches[serving.first.layer_name]
        nbytes = first.stride(0) * first.element_size()
        rows = torch.empty(0, dtype=torch.uint8, device=first.device).set_(
            first.untyped_storage(), 0, (self.kv_cache_config.num_blocks, 1, 1, nbytes), (nbytes, nbytes, nbytes, 1)
        )
        groups = self.kv_cache_config.kv_cache_groups
        super().register_kv_caches({name: rows for group in groups for name in group.layer_names})
        worker.compat_hash = compared(worker.compat_hash, serving, len(groups))
        worker.xfer_handshake_metadata.compatibility_hash = worker.compat_hash

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """With all blocks of rings: vLLM hands over one for every 128 tokens of a request."""
        held = self._kv_cache_manager.get_block_ids(request.request_id)
        groups = zip(self._have_pages, block_ids, held, strict=True)
        return super().request_finished_all_groups(
            request, tuple(own if pages else all_ for pages, own, all_ in groups)
        )

    def build_connector_meta(self, scheduler_output: Any) -> NixlConnectorMetadata:
        """Of groups whose blocks are all cached here, nothing is read: of the peer's blocks vLLM takes as many of the
        last ones as are missing, and all where none is."""
        found = super().build_connector_meta(scheduler_output)
        for request in found.reqs_to_recv.values():
            if request.local_block_ids:
                pairs = zip(request.local_block_ids, request.remote.block_ids, strict=True)
                request.remote.block_ids = tuple(list(theirs) if own else [] for own, theirs in pairs)
        return found

    def get_block_ids_with_load_errors(self) -> set[int]:
        """None: a block's number is the same in several groups. vLLM knows by their names which requests have
        failed."""
        super().get_block_ids_with_load_errors()
        return set()


def of_whole_blocks(config: KVCacheConfig) -> KVCacheConfig:
    """vLLM's groups, each of one layer whose page is a whole block."""
    nbytes = config.kv_cache_tensors[0].block_stride
    groups = []
    for number, group in enumerate(config.kv_cache_groups):
        tokens = group.kv_cache_spec.block_size
        spec = FullAttentionSpec(
            block_size=tokens, num_kv_heads=1, head_size=1, dtype=torch.uint8, num_head_slots=1,
            tokens_per_state=tokens, state_content_bytes=nbytes,
        )  # fmt: skip
        groups.append(dataclasses.replace(group, layer_names=[f"kvcal.blocks.{number}"], kv_cache_spec=spec))
    return dataclasses.replace(config, kv_cache_groups=groups)


def compared(own: str, serving: Serving, num_groups: int) -> str:
    """Hash that two engines compare before the first read: of vLLM's ``own``, and of what blocks mean: the plan,
    the ranks that share its heads, tokens that a ring has room for, and groups, with shared sinks or without."""
    shard = serving.shard
    parts = own, shard.plan.sha256, shard.size, shard.step_tokens, serving.pool.pages_per_block, num_groups
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()
