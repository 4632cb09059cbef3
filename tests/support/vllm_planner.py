"""A program of vLLM's environment: its own planner on the specs of plans of hybrid shapes, and its own bytes of
their states.

    [[name, bits, ranks, drafts, has prefixes, context, formats' other keys, whether a layer of the model
    drafts], ...]
    -> [{"vllm": [bytes of a state, groups of states, bytes of a block, blocks of a request of the context, the byte
         of a block where keys of the layer that drafts begin],
         "kvcal": [the same, as predicted, and where its pages end], "pages_per_block": of the prediction}, ...]
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import torch
from hybrid_shapes import SHAPES, Shape

from kvcal.engines.capacity import VllmPool, vllm_pool
from kvcal.engines.shard import HeadShard
from kvcal.engines.states import DTYPE_KEYS
from kvcal.pages.layout_protocol import PAGE_TOKENS


def config_of(shape: Shape, ranks: int, drafts: int, has_prefixes: bool, context: int) -> Any:
    """The settings that the planner and the models' class methods read of vLLM's configuration."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    model = SimpleNamespace(**shape.config)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=model, hf_text_config=model, dtype=torch.bfloat16, max_model_len=context,
            supports_kv_cache_grouping=False, original_max_model_len=context,
        ),
        cache_config=SimpleNamespace(
            mamba_cache_dtype="auto", use_replayssm=False,
            mamba_ssm_cache_dtype=next((shape.config[key] for key in DTYPE_KEYS if key in shape.config), "auto"),
            mamba_cache_mode="align" if has_prefixes else "none", num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0, enable_prefix_caching=has_prefixes,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, decode_context_parallel_size=1, prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=8192, max_num_seqs=64,
        ),
        attention_config=SimpleNamespace(hisparse_config=None), kv_transfer_config=None, max_in_flight_tokens=8192,
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts, use_eagle=lambda: False, use_eagle_block_drop=lambda: False,
        ) if drafts else None,
        num_speculative_tokens=drafts, mamba_config=SimpleNamespace(backend=None), num_prefill_lookahead_tokens=0,
    )  # fmt: skip


def specs_of(shape: Shape, pool: VllmPool, config: Any, shapes: Any, dtypes: Any, drafts: bool) -> dict[str, Any]:
    """As the plug-in and vLLM's layers answer, in the order in which a model makes them; one that drafts comes
    last."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    from kvcal.engines.vllm.rings import RingSpec, SinkSpec

    tokens, shard = pool.block_tokens, pool.shard
    attention = FullAttentionSpec(
        block_size=tokens, num_kv_heads=1, head_size=1, dtype=torch.uint8, num_head_slots=1,
        tokens_per_state=PAGE_TOKENS, state_content_bytes=pool.share_bytes,
    )  # fmt: skip
    mode = config.cache_config.mamba_cache_mode
    state = MambaSpec(
        block_size=tokens if mode == "align" else config.model_config.max_model_len, shapes=shapes, dtypes=dtypes,
        page_size_padded=pool.state_bytes, mamba_cache_mode=mode, num_speculative_blocks=shard.step_tokens - 1,
    )  # fmt: skip

    def beside(kind: Any, placed: Any) -> Any:
        return kind(
            block_size=PAGE_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.uint8, num_head_slots=1,
            tokens_per_state=PAGE_TOKENS, state_content_bytes=placed.block_bytes, num_blocks=placed.num_blocks,
        )  # fmt: skip

    found: dict[str, Any] = {}
    for layer in shard.plan.layers:
        if layer.geometry.state_bytes:
            found[f"layers.{layer.geometry.index}.mamba"] = state
        if layer.is_paged:
            found[f"layers.{layer.geometry.index}.attn"] = attention
            found.setdefault("rings", beside(RingSpec, pool.rings))
    if pool.sinks.block_bytes:
        found["sinks"] = beside(SinkSpec, pool.sinks)
    if drafts:
        heads = max(1, shape.kv_heads // config.parallel_config.tensor_parallel_size)
        found["mtp.layers.0.attn"] = FullAttentionSpec(
            block_size=tokens, num_kv_heads=heads, head_size=shape.head_dim, dtype=torch.bfloat16
        )
    return found


def shapes_of(model: Any, config: Any) -> Any:
    """Of a layer's state, by its model's class method; a short convolution's by the layer, which keeps an input for
    each draft."""
    from vllm.model_executor.layers.mamba import short_conv

    shapes = model.get_mamba_state_shape_from_config(config)
    if len(shapes) > 1:
        return shapes
    own, ranks = config.model_config.hf_config, config.parallel_config.tensor_parallel_size
    short_conv.get_tensor_model_parallel_world_size = lambda: ranks
    layer = SimpleNamespace(conv_dim=own.conv_dim, L_cache=own.conv_L_cache, num_spec=config.num_speculative_tokens)
    return short_conv.ShortConv.get_state_shape(layer)


def planned(
    name: str, bits: int, ranks: int, drafts: int, has_prefixes: bool, context: int, more: dict[str, int], by_mtp: bool
) -> dict[str, Any]:
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import MambaSpec

    from kvcal.engines.vllm.rings import register_managers

    try:
        planner: Any = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:  # 0.32
        planner = kv_cache_utils
    register_managers()
    shape = SHAPES[name]
    config = config_of(shape, ranks, drafts, has_prefixes, context)
    module, class_name = shape.vllm.split(".")
    model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), class_name)
    shapes, dtypes = shapes_of(model, config), model.get_mamba_state_dtype_from_config(config)
    nbytes = sum(math.prod(size) * dtype.itemsize for size, dtype in zip(shapes, dtypes, strict=True))
    own = shape.state_bytes(ranks, drafts)
    draft_bytes = 2 * max(1, shape.kv_heads // ranks) * shape.head_dim * 2 if by_mtp else 0
    shard = HeadShard(shape.plan(bits, context, **more), 0, ranks, 1 + drafts)
    pool = vllm_pool(shard, own, has_prefixes, draft_bytes=draft_bytes)
    groups = planner.get_kv_cache_groups(config, specs_of(shape, pool, config, shapes, dtypes, by_mtp))
    layout = config.cache_config.get_resolved_kv_cache_layout()
    block_bytes = planner._get_kv_cache_bytes_per_block(groups, layout)
    needed = sum(
        -(-group.kv_cache_spec.max_memory_usage_bytes(config) // group.kv_cache_spec.page_size_bytes)
        for group in groups
    )
    tensors = planner.get_kv_cache_config_from_groups(config, groups, 1 << 30).kv_cache_tensors
    behind = next((one.offset for one in tensors if one.layers[0].startswith("mtp.")), 0)
    unit, _, of_page = pool.page_numbers(block_bytes)
    last, page = unit * of_page * (pool.pages_per_block - 1), pool.share_bytes * len(shard.blocks)
    firsts = [next(iter(group.kv_cache_spec.kv_cache_specs.values())) if hasattr(group.kv_cache_spec, "kv_cache_specs")
              else group.kv_cache_spec for group in groups]  # fmt: skip
    of_states = sum(isinstance(spec, MambaSpec) for spec in firsts)
    return {
        "vllm": [nbytes, of_states, block_bytes, needed, behind],
        "kvcal": [own, pool.state_groups, pool.block_bytes, pool.blocks(context), last + page if by_mtp else 0],
        "pages_per_block": pool.pages_per_block,
    }  # fmt: skip


if __name__ == "__main__":
    print("RESULT " + json.dumps([planned(*case) for case in json.load(sys.stdin)]), flush=True)
