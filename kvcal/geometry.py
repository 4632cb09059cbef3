"""What a model caches, layer by layer: plain facts that the plan, the runtime and the stages share.

The adapter (``kvcal.models``) reads them off a model; a plan carries them, so that the runtime can refuse
a model of another shape without loading anything else.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic.dataclasses import dataclass

from kvcal.strict import STRICT

CacheDtype = Literal["bfloat16", "float16", "float32"]
CACHE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, config=STRICT)
class AttentionGeometry:
    """One attention layer. ``window`` is the sliding window in tokens, None for full attention."""

    index: int
    num_query_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None = None


@dataclass(frozen=True, config=STRICT)
class StateGeometry:
    """A layer whose state does not grow with tokens (linear attention, convolution): constant bytes."""

    index: int
    bytes_per_sequence: int


LayerGeometry = AttentionGeometry | StateGeometry


@dataclass(frozen=True, config=STRICT)
class Geometry:
    """All caching layers of a model, in the order of their cache index; ``cache_dtype`` names the dtype of
    unquantized tokens (the checkpoint's dtype), a key of CACHE_DTYPES."""

    model_type: str
    cache_dtype: CacheDtype
    layers: tuple[LayerGeometry, ...]


@dataclass(frozen=True, config=STRICT)
class ModelIdentity:
    """Which model: an id without machine paths, and the sha256 of its configuration, weights and tokenizer."""

    id: str
    model_type: str
    config_sha256: str
    weights_sha256: str
    tokenizer_sha256: str
