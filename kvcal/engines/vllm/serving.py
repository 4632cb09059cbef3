"""The plan of a process of vLLM: what is checked before the model is built, and this rank's share.

Nothing that could be served wrongly is served: a plan of another model, one that the core does not take, a
vLLM feature that has not been tried with it, and ranks with unequal plans are refused, with the reason.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_world_group,
)
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.utils import extract_layer_index

from kvcal.engines.capacity import PageNumbers, VllmPool, vllm_pool
from kvcal.engines.prefill import Flash, torch_flash
from kvcal.engines.scratch import Scratch
from kvcal.engines.shard import HeadShard, rank_geometry, require_equal_plans
from kvcal.engines.support import (
    ServedModel,
    require_model,
    require_served,
    require_sinks,
    require_staged,
    require_version,
)
from kvcal.engines.vllm import BACKEND
from kvcal.engines.vllm.connectors import children, refused_connectors, require_connected
from kvcal.engines.vllm.rings import RingLayer, SinkLayer
from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.damage import concern, load_damage
from kvcal.plan.plan import load_plan

logger = logging.getLogger("vllm.kvcal")

PLAN_KEY = "kvcal_plan"
WASTEFUL = 1.5  # bytes of a block, by those of its pages
# vLLM's methods of speculative decoding that are served, and of these, those of a model.
DRAFT_MODELS = "draft_model", "eagle", "eagle3", "mtp"
DRAFTS = "ngram", *DRAFT_MODELS


class Serving:
    """A plan in a process: ``shard`` is this rank's; ``scratch`` is shared by its layers."""

    def __init__(self, config: VllmConfig, path: str) -> None:
        """
        Raises:
            ArtifactError: the plan cannot be read, is of another model, or differs from another rank's.
            UnsupportedModel: something about the plan, or about how vLLM was started, is not served.
            UsageError: an option of vLLM has to be another one.
        """
        require_version("vllm")
        self.config, self.path = config, path
        self.device = torch.device(config.device_config.device)
        plan, drafts = load_plan(path), config.speculative_config
        lookahead = 0 if drafts is None else drafts.num_speculative_tokens
        for reason in _refused_options(config):
            raise UnsupportedModel(f"vLLM was started with {reason}, which is not served with a plan")
        require_connected(plan, children(config.kv_transfer_config))
        require_served(plan, self.device.type == "cuda", lookahead=lookahead)
        has_prefixes = config.cache_config.enable_prefix_caching
        if has_prefixes:
            require_sinks(plan)
        require_model(plan, _served_model(config), "vLLM")
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        require_equal_plans(plan.sha256, get_world_group())
        stages, stage = _stages(config)
        if stages:
            require_staged(plan, stages)
        self.shard = HeadShard(plan, rank, size, 1 + lookahead, stages, stage)
        self.pool = _pool_of(self.shard, config)
        self._first_index = min(index for one in self.shard.of_stages for index in one.blocks)
        attentions = (layer.geometry for layer in plan.layers if isinstance(layer.geometry, AttentionGeometry))
        self.geometries = {one.index: rank_geometry(one, rank, size) for one in attentions}
        # vLLM's first layer with pages, and what lies besides all of them.
        self.first: Any = None
        self.ring: Any = None
        self.sinks: list[SinkLayer] = []
        self.layers: list[Any] = []  # PlanLayer
        self.begun: list[Begun] = []  # while the step runs with which they begin
        formats = (fmt for layer in plan.layers for fmt in layer.formats)
        if has_prefixes and any(fmt.kept_tokens for fmt in formats):
            note_beginnings()
        flash = flash_attention() if self.device.type == "cuda" else torch_flash
        most = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
        self.scratch = Scratch(*most, self.device, flash)
        self._unbound = set(self.shard.blocks)
        self._allocated = 0
        logger.info("serving the plan %s (%s), rank %d of %d", path, plan.sha256[:16], rank, size)
        if stages:
            logger.info("stage %d of %d: layers %d to %d", stage, len(stages), stages[stage][0], stages[stage][-1])
        if (told := concern(load_damage(Path(path), plan))) is not None:
            logger.warning("%s: %s", path, told)

    def has_window(self, name: str) -> bool:
        """Whether vLLM's layer of this name has a sliding window in the plan."""
        planned = self.geometries.get(extract_layer_index(name))
        return planned is not None and planned.window is not None

    def make_rings(self, attention: Any, config: VllmConfig) -> None:
        """Next to vLLM's first layer with pages: the layers of rings and of sinks. All stages of a pipeline give
        them the names that the first one gives: layers of one name are one group, which every stage has."""
        if self.first is None:
            self.first, name = attention, attention.layer_name
            name = name.replace(f".{extract_layer_index(name)}.", f".{self._first_index}.", 1)
            self.ring = RingLayer(f"{name}.kvcal_rings", self.pool.rings, config)
            numbers = range(self.pool.sinks.num_blocks if self.pool.sinks.block_bytes else 0)
            self.sinks = [SinkLayer(name, number, self, config) for number in numbers]
            [self.ring, *self.sinks][-1].begin = self.begin

    def note(self, groups: list[Any], step: Any) -> None:
        """Requests that begin with a step of vLLM's scheduler, after blocks of others, and so after whole
        pages: one that goes on with new input, within a page, has its ring. ``groups``: of layers, in the
        order in which a request has its blocks."""
        known = step.scheduled_cached_reqs
        begun = [(one.req_id, one.num_computed_tokens, one.block_ids) for one in step.scheduled_new_reqs]
        again = zip(known.req_ids, known.num_computed_tokens, known.new_block_ids, strict=True)
        begun += [one for one in again if one[0] in known.resumed_req_ids]
        if not begun:
            return
        places = {name: place for place, group in enumerate(groups) for name in group.layer_names}
        pages, rings, *sinks = (
            places[name] for name in (self.first.layer_name, self.ring.name, *(one.name for one in self.sinks))
        )
        self.begun = [
            Begun(past, past + step.num_scheduled_tokens[name], *(
                torch.tensor(held, dtype=torch.int32).to(self.device, non_blocking=True)
                for held in (self.pages_of(blocks[pages]), blocks[rings], [blocks[group][0] for group in sinks])
            ))
            for name, past, blocks in begun if past and past % PAGE_TOKENS == 0
        ]  # fmt: skip

    @property
    def page_numbers(self) -> PageNumbers:
        """Of vLLM's memory, as it is now."""
        return self.pool.page_numbers(self.first.kv_cache.stride(0) * self.first.kv_cache.itemsize)

    def pages_of(self, blocks: Sequence[int]) -> list[int]:
        """The numbers of these blocks' pages."""
        (_, of_block, of_page), pages = self.page_numbers, range(self.pool.pages_per_block)
        return [block * of_block + page * of_page for block in blocks for page in pages]

    def begin(self) -> None:
        """Bring windows to the rings of requests that begin."""
        for layer in self.layers if self.begun else ():
            layer.begin()

    def bound(self, index: int, blocks: Tensor) -> None:
        """Note the memory of a layer; with the last of them, log what was predicted and allocated."""
        self._allocated = max(self._allocated, blocks.stride(0))
        self._unbound.discard(index)
        if not self._unbound:
            pool, predicted = self.pool, self.pool.pages.block_bytes * self.pool.pages_per_block
            rings = sum(map(self.shard.ring_bytes, self.shard.blocks)) + len(self.sinks) * pool.sinks.block_bytes
            logger.info(
                "%d blocks of %d tokens: the plan takes %d bytes a block and %d a request, vLLM allocated %d a block",
                len(blocks), pool.block_tokens, predicted, rings, self._allocated,
            )  # fmt: skip
            if self._allocated > WASTEFUL * predicted:
                logger.warning(
                    "a ring or a state is larger than the pages of a block, and vLLM gives every block its bytes"
                )


class Begun(NamedTuple):
    """A request that begins after ``num_past`` tokens in blocks of others, and will have ``total``. ``table``
    int32 [pages]: its pages; ``rings`` int32 [blocks]: of its rings; ``sinks`` int32 [blocks]: that it shares."""

    num_past: int
    total: int
    table: Tensor
    rings: Tensor
    sinks: Tensor


@functools.cache
def note_beginnings() -> None:
    """Wrap, once a process, the method with which a worker runs a step: the step says which requests
    begin."""
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.execute_model

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        layers, serving = self.vllm_config.compilation_config.static_forward_context, _latest
        if serving is None or layers.get(serving.ring.name) is not serving.ring:
            return original(self, scheduler_output)
        serving.note(self.model_runner.kv_cache_config.kv_cache_groups, scheduler_output)
        try:
            return original(self, scheduler_output)
        finally:
            serving.begun = []

    Worker.execute_model = execute_model


_latest: Serving | None = None


def serving_of(config: VllmConfig) -> Serving | None:
    """The plan that ``config`` names, loaded and checked once; None without one. UsageError where it chooses
    the plug-in's backend without a plan."""
    global _latest
    path = plan_path(config.additional_config)
    if path is None:
        chosen = config.attention_config.backend
        if chosen is not None and chosen.name == BACKEND:
            raise UsageError(
                f"--attention-backend {BACKEND} without a plan",
                hint=f"""--additional-config '{{"{PLAN_KEY}": "plan.safetensors"}}'""",
            )
        return None
    if _latest is None or _latest.config is not config:
        _latest = Serving(config, path)
    return _latest


def serving_with_drafts(config: VllmConfig) -> Serving | None:
    """The plan of the model for which another one drafts, whose configuration names it, too; None without a
    plan."""
    return None if plan_path(config.additional_config) is None else _latest


def latest() -> Serving | None:
    """The plan of the model that was built last, None without one."""
    return _latest


def plan_path(additional: Any) -> str | None:
    """UsageError for a value that is no path, or another key of kvcal's."""
    given = additional if isinstance(additional, dict) else {}
    unknown = [key for key in given if str(key).startswith("kvcal") and key != PLAN_KEY]
    if unknown:
        raise UsageError(f"additional_config has the key {unknown[0]!r}, expected {PLAN_KEY!r}")
    path = given.get(PLAN_KEY)
    if path is not None and not isinstance(path, str):
        raise UsageError(f"additional_config has {PLAN_KEY} = {path!r}, expected the path of a plan")
    return path


def _refused_options(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        if config.speculative_config is not None:
            yield f"drafts in {parallel.pipeline_parallel_size} stages of a pipeline"
        if config.kv_transfer_config is not None:
            yield f"a KV connector in {parallel.pipeline_parallel_size} stages of a pipeline"
    if parallel.decode_context_parallel_size > 1:
        yield f"decode context parallelism of {parallel.decode_context_parallel_size}"
    drafts = config.speculative_config
    if drafts is not None and drafts.method not in DRAFTS:
        yield f"drafts of the method {drafts.method!r} (expected one of {', '.join(DRAFTS)}; others were not tried)"
    if drafts is not None and drafts.parallel_drafting:
        yield "drafts of a model that makes all of them at once"
    if drafts is not None and drafts.num_speculative_tokens_per_batch_size is not None:
        yield "drafts whose number follows the batch"
    if drafts is not None and config.model_config.is_hybrid and drafts.method in DRAFT_MODELS:
        yield "drafts of a model beside states"
    if drafts is not None and config.model_config.is_hybrid and config.device_config.device_type == "cpu":
        yield (
            "drafts beside states on a CPU, where vLLM's short convolutions take one token a step, and prefix caching "
            "copies states of accepted tokens by Triton alone"
        )
    yield from refused_connectors(config, drafts is not None and drafts.method in DRAFT_MODELS)
    if config.cache_config.cache_dtype != "auto":
        yield f"--kv-cache-dtype {config.cache_config.cache_dtype}"


def _stages(config: VllmConfig) -> tuple[tuple[range, ...], int]:
    """The layers of every stage of a pipeline, and this process's stage; none without a pipeline."""
    size, count = config.parallel_config.pipeline_parallel_size, config.model_config.hf_text_config.num_hidden_layers
    if size == 1:
        return (), 0
    return tuple(range(*get_pp_indices(count, stage, size)) for stage in range(size)), get_pp_group().rank_in_group


def _pool_of(shard: HeadShard, config: VllmConfig) -> VllmPool:
    """UsageError for blocks of other tokens than the plan's; ArtifactError where states are the plan's or the
    model's alone."""
    given, has_prefixes = config.cache_config.block_size, config.cache_config.enable_prefix_caching
    if config.model_config.is_hybrid != (shard.num_states > 0):
        raise ArtifactError(f"{shard.num_states} layers of the plan keep a state, but vLLM's model has others")
    nbytes = state_bytes(config)
    pool = vllm_pool(shard, nbytes, has_prefixes)
    if shard.num_states and given != pool.block_tokens and given % PAGE_TOKENS == 0:
        logger.warning("blocks of %d tokens take fewest bytes with the plan: --block-size %d", *[pool.block_tokens] * 2)
        return vllm_pool(shard, nbytes, has_prefixes, given // PAGE_TOKENS)
    if given != pool.block_tokens:
        pages = f"{pool.pages_per_block} pages" if pool.pages_per_block > 1 else "a page"
        raise UsageError(
            f"blocks of {given} tokens, expected {pool.block_tokens}: {pages} of a plan",
            hint=f"--block-size {pool.block_tokens}",
        )
    return pool


def state_bytes(config: VllmConfig) -> int:
    """Bytes of the state of a layer on a rank, by vLLM's own count; 0 of a model without states. Layers of short
    convolutions keep an input for each draft, which the count of their model leaves out. UnsupportedModel where
    layers have unequal states."""
    model_config = config.model_config
    if not model_config.is_hybrid:
        return 0
    model, _ = ModelRegistry.resolve_model_cls(model_config.architecture, model_config=model_config)
    if getattr(model, "get_mamba_specs_from_config", None) is not None:
        raise UnsupportedModel("states of unequal bytes are not served with a plan")
    shapes, dtypes = model.get_mamba_state_shape_from_config(config), model.get_mamba_state_dtype_from_config(config)
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    if len(shapes) == 1:
        inputs = model_config.hf_text_config.conv_L_cache - 1
        return nbytes // inputs * (inputs + config.num_speculative_tokens)
    return nbytes


def _served_model(config: VllmConfig) -> ServedModel:
    model = config.model_config
    text = model.hf_text_config
    return ServedModel(
        model.model,
        text.model_type,
        text.num_hidden_layers,
        text.num_attention_heads,
        model.get_total_num_kv_heads(),
        model.get_head_size(),
    )


def flash_attention() -> Flash:
    """The FlashAttention that vLLM has built for this GPU, newer than torch's, for the parts of a prompt;
    torch's where there is none. Called on CUDA alone."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    except ImportError:
        return torch_flash
    version = get_flash_attn_version()
    if version is None:
        return torch_flash

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        (tokens, past), ends = (q.shape[1], k.shape[1]), torch.arange(2, dtype=torch.int32, device=q.device)
        out, lse = flash_attn_varlen_func(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), max_seqlen_q=tokens, cu_seqlens_q=ends * tokens,
            max_seqlen_k=past, cu_seqlens_k=ends * past, softmax_scale=scale, causal=is_causal,
            return_softmax_lse=True, fa_version=version,
        )  # fmt: skip
        return out.transpose(0, 1), lse

    return attend
