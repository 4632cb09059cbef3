"""The cache of a model, layer by layer: plain facts that the plan, the runtime and the stages share.

The adapter (``kvcal.models``) reads them off a model; a plan carries them, so that the runtime can refuse
a model of another shape without loading anything else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from kvcal.lazy_torch import Dtypes
from kvcal.strict import STRICT, NumBytes, Positive

CacheDtype = Literal["bfloat16", "float16", "float32"]
CACHE_DTYPES = Dtypes("bfloat16", "float16", "float32")

Index = Annotated[int, Field(ge=0, le=2**14)]
NumHeads = Annotated[int, Field(ge=1, le=2**12)]
HeadDim = Annotated[int, Field(ge=1, le=2**14)]


@dataclass(frozen=True, config=STRICT)
class AttentionGeometry:
    """One attention layer. ``window`` is the sliding window in tokens, None for full attention."""

    index: Index
    num_query_heads: NumHeads
    num_kv_heads: NumHeads
    k_head_dim: HeadDim
    v_head_dim: HeadDim
    window: Positive | None = None

    @property
    def group_heads(self) -> int:
        """Query heads that share a KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def values_per_token(self) -> int:
        """Cached values of a token: its keys and its values."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim)


@dataclass(frozen=True, config=STRICT)
class StateGeometry:
    """A layer whose state does not grow with tokens (linear attention, convolution): constant bytes."""

    index: Index
    bytes_per_sequence: Annotated[NumBytes, Field(ge=1)]


def _kind(layer: object) -> str:
    is_state = isinstance(layer, StateGeometry) or isinstance(layer, dict) and "bytes_per_sequence" in layer
    return "state" if is_state else "attention"


# Told apart before it is checked, so that a wrong value is named and not the keys of the other kind.
LayerGeometry = Annotated[
    Annotated[AttentionGeometry, Tag("attention")] | Annotated[StateGeometry, Tag("state")], Discriminator(_kind)
]


@dataclass(frozen=True, config=STRICT)
class Geometry:
    """All caching layers of a model, in the order of their cache index; ``cache_dtype`` names the dtype of
    unquantized tokens (the checkpoint's dtype), a key of CACHE_DTYPES."""

    model_type: str
    cache_dtype: CacheDtype
    layers: tuple[LayerGeometry, ...]

    def __post_init__(self) -> None:
        indices = [layer.index for layer in self.layers]
        if indices != sorted(set(indices)):
            raise ValueError(f"layers must be unique and in order, found indices {indices[:8]}")


@dataclass(frozen=True, config=STRICT)
class ModelIdentity:
    """A model: an id without machine paths, and the sha256 of its configuration, weights and tokenizer."""

    id: str
    model_type: str
    config_sha256: str
    weights_sha256: str
    tokenizer_sha256: str
