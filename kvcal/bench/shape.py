"""What a measurement is taken at: heads, batch and context, and how keys and values are stored."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, CacheDtype
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import RAW, Format, Side
from kvcal.plan.layer import LayerPlan
from kvcal.specs import PredictorSpec
from kvcal.stages.predictors.record import with_predictor
from kvcal.strict import STRICT

CACHE_DTYPE: CacheDtype = "bfloat16"
ITEM_BYTES = CACHE_DTYPES[CACHE_DTYPE].itemsize


@dataclass(frozen=True, config=STRICT)
class Point:
    """``batch`` sequences that hold ``context`` tokens each."""

    batch: int
    context: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.context < PAGE_TOKENS:
            raise ValueError(f"batch = {self.batch} must be 1 or more, context = {self.context} {PAGE_TOKENS} or more")

    @property
    def name(self) -> str:
        """``8 x 32K``."""
        whole, rest = divmod(self.context, 1024)
        return f"{self.batch} x {self.context if rest else f'{whole}K'}"


@dataclass(frozen=True, config=STRICT)
class Heads:
    """``num_kv_heads`` KV heads of ``head_dim``, each read by ``group`` query heads."""

    num_kv_heads: int = 8
    head_dim: int = 128
    group: int = 4

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group

    def layer(self, pair: Pair, index: int) -> LayerPlan:
        """Layer ``index`` of a model all of whose layers have these heads and are stored as ``pair`` says."""
        geometry = AttentionGeometry(
            index, self.num_query_heads, self.num_kv_heads, self.head_dim, self.head_dim, window=None
        )
        k, v = pair.first if index == 0 and pair.first is not None else (pair.k, pair.v)
        layer = LayerPlan(geometry, (k,), (v,), k_pages=pair.k_pages)
        if index and pair.predictors is not None:
            for side in pair.predictors.sides:
                layer = with_predictor(layer, side, index - 1, pair.predictors)
        return layer


@dataclass(frozen=True, config=STRICT)
class Pair:
    """How keys and values are stored, under one name. ``k_pages`` "pre": pages hold keys before RoPE. ``predictors``:
    every layer but the first holds the residual of what the one before predicts, keys before RoPE. ``first``: formats
    of the first layer, where it has its own."""

    name: str
    k: Format
    v: Format
    k_pages: Literal["post", "pre"] = "post"
    predictors: PredictorSpec | None = None
    first: tuple[Format, Format] | None = None

    def format(self, side: Side) -> Format:
        return self.k if side == "k" else self.v

    @property
    def num_ends(self) -> int:
        """Layers at either end of a model that are not like those between them: the first predicts without being
        predicted, the last is predicted without predicting."""
        return 0 if self.predictors is None and self.first is None else 1


RAW_PAIR = Pair("16", RAW, RAW)


def raw_bytes(heads: Heads, point: Point) -> int:
    """Bytes of the keys and values of ``point.context`` tokens in 16 bits: what the baselines read."""
    return 2 * point.batch * heads.num_kv_heads * point.context * heads.head_dim * ITEM_BYTES
