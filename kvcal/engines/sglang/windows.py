"""SGLang's pool for layers with a sliding window, which keeps their newest tokens at 16 bits, beside a plan's.

SGLang has such a pool for some models (GPT-OSS), and keeps all tokens of others (Gemma-3). With a plan every
model that has windows gets it: which layers these are, the plan says. Each of the two pools has places of its
own. Of layers with full attention it is the plan's.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from kvcal.engines.sglang import PLAN_VARIABLE
from kvcal.engines.shard import HeadShard
from kvcal.errors import UnsupportedModel
from kvcal.geometry import StateGeometry
from kvcal.plan.plan import load_plan


@functools.cache
def _planned(path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers of a plan with a sliding window, and with full attention."""
    layers = [layer.attention for layer in load_plan(path).layers if not isinstance(layer.geometry, StateGeometry)]
    with_window = tuple(layer.index for layer in layers if layer.window is not None)
    return with_window, tuple(layer.index for layer in layers if layer.window is None)


def hybrid_model(original: Any, config: Any) -> None:
    """Wraps what SGLang says of a model's pools: those of a plan with windows are two."""
    original(config)
    with_window, others = _planned(os.environ[PLAN_VARIABLE])
    if with_window and not config.is_hybrid_swa and not config.is_draft_model:
        config.is_hybrid_swa, config.is_deepseek_v4_arch = True, False
        config.swa_attention_layer_ids, config.full_attention_layer_ids = list(with_window), list(others)


def require_windows(kvc: Any, shard: HeadShard) -> None:
    """UnsupportedModel unless the layers with a window in a plan are those that SGLang's pool of windows is for."""
    if not shard.windows:
        return
    (with_window, _), found = _planned(os.environ[PLAN_VARIABLE]), kvc.layer_info.swa_attention_layer_ids
    if not kvc.is_hybrid_swa or tuple(found) != with_window:
        raise UnsupportedModel(f"SGLang keeps layers {found} in its pool of windows; the plan's are {with_window}")
    if kvc.server_args.enable_hierarchical_cache:
        raise UnsupportedModel(
            "SGLang was started with --enable-hierarchical-cache, which was not tried with sliding windows and a plan",
            hint="leave --enable-hierarchical-cache out",
        )
