"""The plan of a process of SGLang: what is checked before memory is allocated, this rank's share, and its
pool.

Nothing that could be served wrongly is served: a plan of another model, one that the core does not take, and
a feature of SGLang that has not been tried with it are refused, with the reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.base_prefix_cache import zero_match_result
from sglang.srt.mem_cache.device_pool_info import DevicePoolInfo, PageRowBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from kvcal.engines.capacity import BEGINNINGS, SglangPool
from kvcal.engines.sglang import BACKEND, PLAN_VARIABLE
from kvcal.engines.sglang.windows import require_windows
from kvcal.engines.shard import BlockLayout, HeadShard, require_equal_plans
from kvcal.engines.support import (
    BOTH_WAYS,
    NO_TREE,
    WITHOUT_IMAGES,
    ServedModel,
    require_model,
    require_served,
    require_version,
)
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.damage import concern, load_damage
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import load_plan

logger = logging.getLogger("sglang.kvcal")

OPTIONS = {"attention_backend": BACKEND, "page_size": PAGE_TOKENS, "kv_cache_dtype": "auto"}
# Options that have not been tried with a plan, by the value that leaves them out.
NEUTRAL: dict[str, Any] = {
    "pp_size": 1, "dcp_size": 1, "attn_cp_size": 1, "speculative_adaptive": False, "disaggregation_mode": "null",
    "enable_hisparse": False, "enable_lmcache": False, "enable_flexkv": False, "enable_unified_memory": False,
    "enable_page_major_kv_layout": False, "enable_kv_cache_sharding": False, "enable_memory_saver": False,
    "enable_two_batch_overlap": False, "enable_pdmux": False, "kv_canary": "none", "enable_torch_compile": False,
    "radix_cache_backend": None, "enable_unified_cache_external_linker": False, "enable_streaming_session": False,
}  # fmt: skip
REASONS = {"disaggregation_mode": " (it sends the keys and values of tokens, and no rings)"}
# Of a hierarchical cache, what has been tried. In its layout page_first SGLang stages keys and values of tokens.
HIERARCHY = {
    "hicache_mem_layout": ("layer_first", "page_first_direct"),
    "hicache_storage_backend": (None, "file"),
    "hicache_host_memory_mode": ("cache",),
}

# Of drafts, likewise: chains of a model, whose layers have SGLang's own pool and attention.
DRAFTS: dict[str, tuple[Any, ...]] = {
    "speculative_algorithm": ("STANDALONE",), "speculative_eagle_topk": (1,), "enable_hierarchical_cache": (False,),
}  # fmt: skip
NO_DRAFT_BACKEND = None, BACKEND

# Functions that methods of ``Beginnings`` wrap: of the radix tree, and of the rows, which number the rings.
TREE, ROWS = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache", "sglang.srt.mem_cache.memory_pool"
WRAPPED = f"{TREE}.match_prefix", f"{TREE}.checkpoint", f"{TREE}.reset", f"{ROWS}.ReqToTokenPool.alloc"


class Serving:
    """A plan in a process; ``shard`` is this rank's. Bytes of a token in blocks, rounded up, and of rings and
    sinks."""

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
        for name, value in OPTIONS.items():
            if getattr(args, name) != value:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} {getattr(args, name)}, expected {value} with a plan", f"{option} {value}")
        if args.max_running_requests is None:
            raise UsageError("a plan needs --max-running-requests: a request has a ring from the start", "such as 64")
        for reason in _refused_options(kvc):
            raise UnsupportedModel(f"SGLang was started with {reason}, which is not served with a plan")
        drafts = args.speculative_num_draft_tokens - 1 if args.speculative_algorithm else 0
        require_served(plan, self.device.type == "cuda", "sglang", drafts)
        if kvc.model_config.is_multimodal and hasattr(kvc.model, "prepare_attn_masks"):  # for its Triton backend alone
            raise UnsupportedModel(BOTH_WAYS, hint=f"{WITHOUT_IMAGES} leave --enable-multimodal out")
        require_model(plan, _served_model(kvc.model_config), "SGLang")
        require_equal_plans(plan.sha256, get_tp_group())
        parallel = get_parallel()
        self.shard = HeadShard(plan, parallel.attn_tp_rank, parallel.attn_tp_size, 1 + drafts)
        self.draft_bytes = _draft_bytes(kvc, parallel.attn_tp_size) if drafts else 0
        require_windows(kvc, self.shard)
        if self.shard.num_states and not args.disable_radix_cache:
            raise UsageError(
                "SGLang's radix tree has states in pages of 128 tokens on some models alone, which were not tried with "
                "a plan",
                hint=NO_TREE,
            )
        formats = [fmt for layer in plan.layers for fmt in layer.formats]
        num_sinks = 0 if args.disable_radix_cache else max(fmt.sinks_left() for fmt in formats)
        has_windows = not args.disable_radix_cache and any(fmt.max_window for fmt in formats)
        places = BEGINNINGS * (args.max_running_requests + 1)
        self.beginnings = Beginnings(num_sinks, places) if num_sinks or has_windows else None
        pool = SglangPool.of(self.shard, args.max_running_requests, self.beginnings is not None)
        self.token_bytes, self.rings_bytes = pool.token_bytes, pool.fixed
        logger.info("serving the plan %s (%s)", self.path, plan.sha256[:16])
        if (told := concern(load_damage(Path(self.path), plan))) is not None:
            logger.warning("%s: %s", self.path, told)


_latest: tuple[Any, Serving] | None = None


def serving_of(kvc: Any) -> Serving:
    """The plan of SGLang's configurator of the cache, loaded and checked once."""
    global _latest
    if _latest is None or _latest[0] is not kvc.server_args:
        _latest = kvc.server_args, Serving(kvc)
    return _latest[1]


class Beginnings:
    """Sinks of cached prompts, and the requests that begin after cached pages. The radix tree shares pages
    alone: sinks and windows lie in a request's ring.

    A prompt's first ``num_tokens`` tokens alone decide its sinks. So these lie in a table of ``size`` places,
    by the tokens and what else names a branch of the tree (LoRA, salt). A request's sinks enter the table
    with its pages in the tree; one that begins after pages gets them into its ring. A hit of the tree counts
    where the table has its beginning; else the prompt is computed anew. The beginning that was used least
    recently leaves.

    Copies wait for the next step, and are made before it, in order, on its stream: who had a ring or a place
    before is done with it then. No pages enter the tree between a hit and the request's ring. ``begun``:
    rings of requests that begin with that step, and their tokens in the tree; plans with windows and no sinks
    need the table for it alone."""

    def __init__(self, num_tokens: int, size: int) -> None:
        self._num_tokens, self._size = num_tokens, size
        self._places: dict[tuple[Any, ...], int] = {}  # the least recent first
        self._copies: list[tuple[bool, tuple[int, int]]] = []  # whether into the table; the ring, and the place there
        self.begun: list[tuple[int, int]] = []
        self._memory: list[tuple[Tensor, Tensor]] = []  # sinks of rings, and of the table: [..., N, sinks, D]
        wrapped = WRAPPED if num_tokens else WRAPPED[-1:]
        for target in wrapped:
            HookRegistry.register(target, getattr(self, target.rpartition(".")[2]), HookType.AROUND)
        HookRegistry.apply_hooks()
        if not HookRegistry._patched.issuperset(wrapped):
            raise UnsupportedModel("this SGLang lacks functions that bring sinks along with cached pages")

    def bind(self, layout: BlockLayout, rings: Tensor) -> None:
        """Share the sinks of a layer's rings, uint8 [rings, ring_bytes]."""
        for side in SIDES:
            sinks, _ = layout.unquantized(rings, side)
            self._memory.append((sinks, sinks.new_zeros(self._size, *sinks.shape[1:])))

    def copy(self) -> None:
        """Make all copies that wait."""
        for is_kept, at in self._copies:
            for memory in self._memory:
                memory[is_kept][at[is_kept]] = memory[not is_kept][at[not is_kept]]
        self._copies.clear()

    def _beginning(self, ids: Sequence[int], of: Any) -> tuple[Any, ...]:
        return (of.extra_key, of.cache_salt, *ids[: self._num_tokens])

    def match_prefix(self, original: Any, tree: Any, params: Any) -> Any:
        """Wraps the tree's: no hit where the sinks are gone."""
        found, key = original(tree, params), params.key[: self._num_tokens]
        has_sinks = self._beginning(key.raw_token_ids(), key) in self._places
        return found if has_sinks else zero_match_result(tree, found, key.extra_key)

    def checkpoint(self, original: Any, tree: Any, req: Any, *, up_to: int, **more: Any) -> Any:
        """Wraps the tree's: so many tokens of a request enter it."""
        beginning = self._beginning(req.full_untruncated_fill_ids, req)
        if up_to >= max(PAGE_TOKENS, self._num_tokens) and beginning not in self._places:
            is_full = len(self._places) == self._size
            place = self._places.pop(next(iter(self._places))) if is_full else len(self._places)
            self._places[beginning] = place
            self._copies.append((True, (req.kv.req_pool_idx, place)))
        return original(tree, req, up_to=up_to, **more)

    def reset(self, original: Any, tree: Any) -> None:
        """Wraps the tree's, which forgets all pages, such as when weights have changed."""
        self._places.clear()
        original(tree)

    def alloc(self, original: Any, pool: Any, reqs: list[Any]) -> Any:
        """Wraps the pool's of rows: requests that begin get their rings."""
        begun = [req for req in reqs if req.prefix_len and not req.kv.holds_kv]
        if (found := original(pool, reqs)) is not None:
            self.begun += [(req.kv.req_pool_idx, req.prefix_len) for req in begun]
            for req in begun if self._num_tokens else ():
                beginning = self._beginning(req.full_untruncated_fill_ids, req)
                self._places[beginning] = place = self._places.pop(beginning)
                self._copies.append((False, (req.kv.req_pool_idx, place)))
        return found


class PlanPool(MHATokenToKVPool):
    """SGLang's pool of tokens. It hands out places in pages of 128, each of one request: page p of the pool
    is block p of every layer; page 0 is nobody's. The radix tree shares full pages. What would read single
    tokens is refused. ``blocks``: of every layer, by index, uint8 [pages, block_bytes]; those of a page lie side
    by side."""

    def _create_buffers(self) -> None:
        assert _latest is not None, "SGLang sizes its pool before it makes it"
        self.serving = _latest[1]
        shard, pages = self.serving.shard, self.size // PAGE_TOKENS + 1
        row_bytes = self.serving.token_bytes * PAGE_TOKENS
        self._slab = torch.zeros(1, pages, row_bytes, dtype=torch.uint8, device=self.device)
        sizes = {index: shard.block_bytes(index) for index in shard.blocks}
        parts = self._slab[0].split([*sizes.values(), row_bytes - sum(sizes.values())], dim=1)
        self.blocks = dict(zip(sizes, parts, strict=False))
        self.k_buffer, self.v_buffer = list(self.blocks.values()), list[Tensor]()
        self._kv_buffer_descs: list[Any] = []
        self._init_data_ptrs_and_strides()

    def _init_kv_copy_and_warmup(self) -> None:
        """For trees of drafts, whose tokens it would move."""

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return self._slab.nbytes, 0

    def get_device_pool_infos(self) -> tuple[DevicePoolInfo, ...]:
        """Its pages, for copies to the host."""
        _, pages, row_bytes = self._slab.shape
        rows = PageRowBufferInfo(
            slab=self._slab, rows=(self._slab[0],), row_bytes=row_bytes, page_size=PAGE_TOKENS, num_pages=pages
        )
        kv = PoolName.KV
        return (DevicePoolInfo(pool_name=kv, indices_from_pool=kv, layer_ids=(0,), buffer_info=rows),)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedModel("a part of SGLang reads or moves single tokens, which a plan packs in pages")

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _refuse
    move_kv_cache = get_contiguous_buf_infos = get_cpu_copy = load_cpu_copy = _refuse


def _refused_options(kvc: Any) -> Iterator[str]:
    args = kvc.server_args
    for name, neutral in NEUTRAL.items():
        if (value := getattr(args, name)) != neutral:
            yield f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") + REASONS.get(name, "")
    for name, allowed in HIERARCHY.items() if args.enable_hierarchical_cache else ():
        if (value := getattr(args, name)) not in allowed:
            yield f"--{name.replace('_', '-')} {value}, expected {' or '.join(map(str, allowed))}"
    for name, allowed in DRAFTS.items() if args.speculative_algorithm else ():
        if (value := getattr(args, name)) not in allowed:
            yield f"drafts and --{name.replace('_', '-')} {value}, expected {' or '.join(map(str, allowed))}"
    if args.speculative_algorithm and args.speculative_draft_attention_backend in NO_DRAFT_BACKEND:
        yield "drafts without --speculative-draft-attention-backend, such as triton"
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        if getattr(args, name) not in (None, OPTIONS["attention_backend"]):
            yield f"--{name.replace('_', '-')} {getattr(args, name)}"
    if not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED):
        yield "CUDA graphs of prompts (give --disable-prefill-cuda-graph)"
    if check_cuda_graph_backend(Phase.DECODE, Backend.BREAKABLE):
        yield "CUDA graphs of decoding in parts (give --cuda-graph-backend-decode full)"
    if kvc.use_mla_backend:
        yield "multi-head latent attention"


def _draft_bytes(kvc: Any, num_ranks: int) -> int:
    """Of a token in the layers of the model that drafts, which SGLang keeps at 16 bits."""
    config, count = kvc.spec_aux_config.draft_model_config, kvc.spec_aux_config.draft_kv_num_layers
    values = config.get_num_kv_heads(num_ranks) * (config.head_dim + config.v_head_dim)
    return int(count * values * kvc.kv_cache_dtype.itemsize)


def _served_model(config: Any) -> ServedModel:
    text = config.hf_text_config
    sizes = text.num_hidden_layers, text.num_attention_heads, config.get_total_num_kv_heads()
    return ServedModel(config.model_path, text.model_type, *sizes, None)
