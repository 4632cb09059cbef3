"""vLLM's KV connectors with a plan: which are served, and with what options.

    host    ``SimpleCPUOffloadConnector`` and ``OffloadingConnector`` copy whole blocks to the host's memory, the
            second one also to tiers behind it, where they outlive the engine
    peers   ``PlanNixlConnector`` (nixl.py) reads a request's blocks from the engine that computed its prompt
    more    ``MultiConnector``, where each of its own is served alone

vLLM's own NIXL connectors are refused: they compare less than a plan's blocks need, and read a part of a ring.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig

from kvcal.engines.support import block_seed, require_peers, require_tiered
from kvcal.engines.vllm import PEERS, PEERS_MODULE
from kvcal.errors import UsageError
from kvcal.plan.plan import Plan

HOSTS = "SimpleCPUOffloadConnector", "OffloadingConnector"
SEVERAL = "MultiConnector"
IN_MEMORY = {"kv_offload_backend": "cpu", "canonical_layout": False}
# What would read blocks that do not mean the same, or has not been tried.
OF_PEERS = {"enforce_handshake_compat": True, "bidirectional_kv_xfer": False}
SPECS = "CPUOffloadingSpec", "TieringOffloadingSpec"
TIERS = ("fs",)
SEED = "PYTHONHASHSEED"


def children(transfer: KVTransferConfig | None) -> list[KVTransferConfig]:
    """The connectors that a process has, those of a ``MultiConnector`` one by one; none without a connector."""
    if transfer is None:
        return []
    if transfer.kv_connector != SEVERAL:
        return [transfer]
    given = transfer.kv_connector_extra_config.get("connectors", ())
    return [KVTransferConfig(**{"engine_id": transfer.engine_id, **own}) for own in given]


def refused_connectors(config: VllmConfig, are_drafts_a_model: bool) -> Iterator[str]:
    """Reasons against the connectors with which vLLM was started."""
    found, has_prefixes = children(config.kv_transfer_config), config.cache_config.enable_prefix_caching
    if found and (config.model_config.is_hybrid or are_drafts_a_model):
        yield "a KV connector, and blocks of states or of a model that drafts"
    for one in found:
        if one.kv_connector == PEERS and one.kv_connector_module_path == PEERS_MODULE:
            yield from _refused_peers(one, config)
        else:
            yield from _refused_host(one, has_prefixes)


def _refused_peers(transfer: Any, config: VllmConfig) -> Iterator[str]:
    device, ranks = config.device_config.device_type, config.parallel_config.tensor_parallel_size
    if ranks > 1:
        yield f"{PEERS} on {ranks} ranks (expected 1; more were not tried)"
    if config.speculative_config is not None:
        yield f"{PEERS} and drafts, which were not tried together"
    for key, expected in OF_PEERS.items():
        if (found := transfer.kv_connector_extra_config.get(key, expected)) != expected:
            yield f"{PEERS} with {key} = {found!r} (expected {expected!r})"
    if transfer.kv_buffer_device != device:
        yield f"{PEERS} with kv_buffer_device = {transfer.kv_buffer_device!r} (expected {device!r}: blocks go directly)"


def _refused_host(transfer: Any, has_prefixes: bool) -> Iterator[str]:
    """A request begins after blocks that come back from the host as it begins after cached ones."""
    name, options = transfer.kv_connector, transfer.kv_connector_extra_config
    if name not in HOSTS or transfer.kv_connector_module_path:
        others = f"{PEERS} with kv_connector_module_path = {PEERS_MODULE!r}, {SEVERAL} of these"
        yield f"the KV connector {name} (expected {', '.join(HOSTS)}, {others}; others were not tried)"
    for key, expected in IN_MEMORY.items():
        if (found := options.get(key, expected)) != expected:
            yield f"a KV connector with {key} = {found!r} (expected {expected!r}; others were not tried)"
    if (spec := options.get("spec_name", SPECS[0])) not in SPECS:
        yield f"a KV connector with spec_name = {spec!r} (expected {' or '.join(SPECS)}; others were not tried)"
    for tier in options.get("secondary_tiers", ()):
        if tier.get("type") not in TIERS:
            yield f"a tier of the type {tier.get('type')!r} (expected {' or '.join(TIERS)}; others were not tried)"
    if not has_prefixes:
        yield "a KV connector, which finds blocks by their prefixes, but without prefix caching"


def require_connected(plan: Plan, transfers: Sequence[Any]) -> None:
    """Nothing, where the connectors, which are served, take this plan's blocks.

    Raises:
        UnsupportedModel: they do not take all of a request's blocks, or not as they are.
        UsageError: blocks outlive the engine, and their names are not the plan's own.
    """
    for one in transfers:
        if one.kv_connector == PEERS:
            require_peers(plan)
        elif one.kv_connector != HOSTS[0]:
            require_tiered(plan)
        if one.kv_connector_extra_config.get("secondary_tiers"):
            _require_seed(block_seed(plan))  # other engines may read these blocks


def _require_seed(seed: int) -> None:
    """UsageError unless vLLM's names of blocks are the plan's own."""
    if (found := os.environ.get(SEED)) != str(seed):
        raise UsageError(
            f"blocks outlive the engine, and their names do not say of which plan they are: {SEED} is {found}",
            hint=f"{SEED}={seed} vllm serve …, as kvcal serve-args --store prints it",
        )
