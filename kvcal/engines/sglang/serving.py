"""The plan of a process of SGLang: what is checked before memory is allocated, this rank's share, and its pool.

Nothing that could be served wrongly is served: a plan of another model, one that the core does not take, and a feature
of SGLang that has not been tried with it are refused, with the reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from kvcal.engines.sglang import BACKEND, PLAN_VARIABLE
from kvcal.engines.shard import HeadShard, require_equal_plans
from kvcal.engines.support import ServedModel, require_model, require_no_prefixes, require_served, require_version
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.plan import load_plan

logger = logging.getLogger("sglang.kvcal")

OPTIONS = {"attention_backend": BACKEND, "page_size": PAGE_TOKENS, "kv_cache_dtype": "auto"}
# Options that have not been tried with a plan, by the value that leaves them out.
NEUTRAL: dict[str, Any] = {
    "pp_size": 1, "dcp_size": 1, "attn_cp_size": 1, "speculative_algorithm": None, "disaggregation_mode": "null",
    "enable_hierarchical_cache": False, "enable_hisparse": False, "enable_lmcache": False, "enable_flexkv": False,
    "enable_unified_memory": False, "enable_page_major_kv_layout": False, "enable_kv_cache_sharding": False,
    "enable_memory_saver": False, "enable_two_batch_overlap": False, "enable_pdmux": False, "kv_canary": "none",
    "enable_torch_compile": False,
}  # fmt: skip
# Why, of those that move blocks: SGLang describes its memory by the rows of tokens.
REASONS = {
    "enable_hierarchical_cache": " (its memory on the host has tokens by heads and channels, and a page is only bytes)",
    "disaggregation_mode": " (it sends the keys and values of tokens, and no rings)",
}


class Serving:
    """A plan in a process; ``shard`` is this rank's."""

    def __init__(self, kvc: Any) -> None:
        """
        Raises:
            ArtifactError: the plan cannot be read, is of another model, or differs from another rank's.
            UnsupportedModel: something about the plan, or about how SGLang was started, is not served.
            UsageError: an option of SGLang has to be another one.
        """
        require_version("sglang")
        args = kvc.server_args
        self.path, self.device = os.environ[PLAN_VARIABLE], torch.device(kvc.device)
        plan = load_plan(self.path)
        require_served(plan, self.device.type == "cuda", "sglang")
        if not args.disable_radix_cache:
            require_no_prefixes(plan, "sglang")
        for name, value in OPTIONS.items():
            if getattr(args, name) != value:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} {getattr(args, name)}, expected {value} with a plan", f"{option} {value}")
        if args.max_running_requests is None:
            raise UsageError(
                "a plan needs --max-running-requests: every request that may run has a ring from the start",
                hint="such as --max-running-requests 64",
            )
        for reason in _refused_options(kvc):
            raise UnsupportedModel(f"SGLang was started with {reason}, which is not served with a plan")
        require_model(plan, _served_model(kvc.model_config), "SGLang")
        require_equal_plans(plan.sha256, get_tp_group())
        parallel = get_parallel()
        self.shard = HeadShard(plan, parallel.attn_tp_rank, parallel.attn_tp_size)
        self.max_requests: int = args.max_running_requests
        logger.info("serving the plan %s (%s)", self.path, plan.sha256[:16])

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in blocks, rounded up."""
        return -(-sum(map(self.shard.block_bytes, self.shard.blocks)) // PAGE_TOKENS)

    @property
    def rings_bytes(self) -> int:
        """Bytes of all rings; SGLang has one place more than requests, for padding."""
        return (self.max_requests + 1) * sum(map(self.shard.ring_bytes, self.shard.blocks))


_latest: tuple[Any, Serving] | None = None


def serving_of(kvc: Any) -> Serving:
    """The plan of SGLang's configurator of the cache, loaded and checked once."""
    global _latest
    if _latest is None or _latest[0] is not kvc.server_args:
        _latest = kvc.server_args, Serving(kvc)
    return _latest[1]


def current() -> Serving:
    """The plan of this process."""
    assert _latest is not None, "SGLang sizes its pool before it makes it"
    return _latest[1]


class PlanPool(MHATokenToKVPool):
    """SGLang's pool of tokens. It hands out places in pages of 128, each of one request: page p of the pool is block p
    of every layer; page 0 is nobody's. The radix tree shares full pages. What would read single tokens is refused.
    ``blocks``: of every layer, by index, uint8 [pages, block_bytes]."""

    blocks: dict[int, Tensor]
    k_buffer: list[Tensor]
    v_buffer: list[Tensor]

    def _create_buffers(self) -> None:
        self.serving = current()
        shard, pages = self.serving.shard, self.size // PAGE_TOKENS + 1
        self.blocks = {
            index: torch.zeros(pages, shard.block_bytes(index), dtype=torch.uint8, device=self.device)
            for index in shard.blocks
        }
        self.k_buffer, self.v_buffer = list(self.blocks.values()), []
        self._kv_buffer_descs: list[Any] = []
        self._init_data_ptrs_and_strides()

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return sum(blocks.nbytes for blocks in self.blocks.values()), 0

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedModel("a part of SGLang reads or moves single tokens, which a plan packs in pages")

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _refuse
    move_kv_cache = get_contiguous_buf_infos = get_device_pool_infos = get_cpu_copy = load_cpu_copy = _refuse


def _refused_options(kvc: Any) -> Iterator[str]:
    args = kvc.server_args
    for name, neutral in NEUTRAL.items():
        if (value := getattr(args, name)) != neutral:
            yield f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") + REASONS.get(name, "")
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        if getattr(args, name) not in (None, OPTIONS["attention_backend"]):
            yield f"--{name.replace('_', '-')} {getattr(args, name)}"
    if not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED):
        yield "CUDA graphs of prompts (give --disable-prefill-cuda-graph)"
    if check_cuda_graph_backend(Phase.DECODE, Backend.BREAKABLE):
        yield "CUDA graphs of decoding in parts (give --cuda-graph-backend-decode full)"
    if kvc.use_mla_backend:
        yield "multi-head latent attention"


def _served_model(config: Any) -> ServedModel:
    text = config.hf_text_config
    return ServedModel(
        config.model_path,
        text.model_type,
        text.num_hidden_layers,
        text.num_attention_heads,
        config.get_total_num_kv_heads(),
        None,
    )
