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
class ExpandedHeads:
    """Sizes of the key and the value that multi-head latent attention makes of a latent for every query
    head."""

    k_head_dim: HeadDim
    v_head_dim: HeadDim


@dataclass(frozen=True, config=STRICT)
class AttentionGeometry:
    """One attention layer. ``window`` is the sliding window in tokens, None for full attention.
    ``state_bytes``: of the state that it keeps besides keys and values, of a sequence (Falcon-H1, Zamba2).

    Multi-head latent attention (``expanded`` is not None) caches one latent and one rotary key for all query
    heads. The latent takes the place of the keys, the rotary key that of the values: ``k_head_dim`` is the
    latent's size, ``v_head_dim`` the rotary key's.
    """

    index: Index
    num_query_heads: NumHeads
    num_kv_heads: NumHeads
    k_head_dim: HeadDim
    v_head_dim: HeadDim
    window: Positive | None = None
    # Left out of JSON where there is none: plans of other attention stay the same bytes.
    expanded: Annotated[ExpandedHeads | None, Field(exclude_if=lambda heads: heads is None)] = None
    state_bytes: Annotated[NumBytes, Field(exclude_if=lambda num_bytes: num_bytes == 0)] = 0

    def __post_init__(self) -> None:
        if self.expanded is not None and self.num_kv_heads != 1:
            raise ValueError(f"layer {self.index} caches {self.num_kv_heads} latents, expected one for all query heads")

    @property
    def is_latent(self) -> bool:
        return self.expanded is not None

    @property
    def attended(self) -> tuple[int, int, int]:
        """KV heads of the attention call, and their key and value head sizes: expanded ones of a latent."""
        if self.expanded is None:
            return self.num_kv_heads, self.k_head_dim, self.v_head_dim
        return self.num_query_heads, self.expanded.k_head_dim, self.expanded.v_head_dim

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

    @property
    def state_bytes(self) -> int:
        return self.bytes_per_sequence


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

    @property
    def has_latents(self) -> bool:
        return any(isinstance(layer, AttentionGeometry) and layer.is_latent for layer in self.layers)

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
