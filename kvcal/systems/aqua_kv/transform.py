"""``k_predictor``, ``v_predictor``: pages hold what a prediction leaves,

    K = f_key(K of the source layer) + residual,   V = f_value([V of the source layer; K of this layer]) + residual

all of them as read back from pages, keys before RoPE, KV heads in a row (AQUA-KV, Alg. 2-4, faithful mode).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

from pydantic.dataclasses import dataclass

from kvcal.geometry import CacheDtype
from kvcal.lazy_torch import Tensor
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.rescale_and_rope import rotary_spec
from kvcal.pages.ways import NO_KERNELS, Way
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plain_layer import PlainLayer, PredictPages
from kvcal.records import TensorSpec
from kvcal.strict import STRICT
from kvcal.systems.aqua_kv.predictor import Kind, LinearPredictor, PredictorShape, require_sizes

PREDICTED = Way("residuals of a prediction", needs=("text", "RoPE", "neighbours"), refused={"static": NO_KERNELS})
WAYS = (PREDICTED,)


@dataclass(frozen=True, config=STRICT)
class Predictor:
    """AQUA-KV's predictor of a layer's keys (from the keys of layer ``source``) or values (from its values,
    then the layer's own keys), all KV heads in a row, keys before RoPE. ``rank`` is of "low_rank",
    ``group_size`` of "int4"."""

    kind: Kind
    source: int
    rank: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        require_sizes(self.kind, self.rank, self.group_size)


@dataclass(frozen=True, config=STRICT)
class LayerPlan(PlainLayer):
    """Predictions, where there are predictors."""

    k_predictor: Predictor | None = None
    v_predictor: Predictor | None = None

    def transforms(self, side: Side) -> list[Way]:
        return [*super().transforms(side), *[PREDICTED] * (predictor_of(self, side) is not None)]

    def conflicts(self) -> list[str]:
        found = super().conflicts()
        if self.k_predictor is not None and self.k_offset:
            found.append("has a k_predictor, whose bias holds the mean: expected no k_offset")
        if self.k_predictor is not None and self.k_pages != "pre":
            found.append("has a k_predictor, which predicts keys before RoPE: expected k_pages 'pre'")
        return found

    def sources(self, side: Side) -> tuple[tuple[int, Side], ...]:
        """Of values, their own layer's keys, too."""
        predictor = predictor_of(self, side)
        if predictor is None:
            return super().sources(side)
        return ((predictor.source, "k"),) if side == "k" else ((predictor.source, "v"), (self.geometry.index, "k"))

    def prediction(
        self, side: Side, others: Mapping[int, PlainLayer], dtype: CacheDtype, tensors: Mapping[str, Tensor]
    ) -> PredictPages:
        predictor = predictor_of(self, side)
        if predictor is None:
            return super().prediction(side, others, dtype, tensors)
        shape = predictor_shape(self, others[predictor.source], side, dtype)
        fitted = LinearPredictor.from_tensors(shape, tensors, f"layers.{self.geometry.index}.{side}_predictor")
        return partial(fitted.of_pages, self.attention.num_kv_heads)

    def own_tensors(self, side: Side, others: Mapping[int, PlainLayer], dtype: CacheDtype) -> dict[str, TensorSpec]:
        predictor = predictor_of(self, side)
        if predictor is None:
            return {}
        source = others[predictor.source]
        specs = predictor_shape(self, source, side, dtype).tensors()
        needed = {f"layers.{self.geometry.index}.{side}_predictor.{name}": spec for name, spec in specs.items()}
        reads = source if side == "k" else self  # keys of that layer, before RoPE
        needed[f"layers.{reads.geometry.index}.rotary"] = rotary_spec(reads.attention.k_head_dim)
        return needed

    def check_sources(self, others: Mapping[int, PlainLayer]) -> None:
        super().check_sources(others)
        for side in SIDES:
            predictor = predictor_of(self, side)
            if predictor is None:
                continue
            place = f"layer {self.geometry.index} predicts {side} from layer {predictor.source}"
            source = others.get(predictor.source)
            if source is None or not source.is_paged or predictor.source >= self.geometry.index:
                raise ValueError(f"{place}, which is not an earlier layer of full attention")
            read = (source.format(side), *self.formats) if side == "v" else (source.format("k"), self.format("k"))
            if any(fmt.changes_at for fmt in read):
                raise ValueError(f"{place}, and pages shrink: the prediction would change with them")
            if any(fmt.stripe_tokens < PAGE_TOKENS for fmt in read):
                raise ValueError(f"{place}, page by page: expected stripe_tokens = {PAGE_TOKENS}")
            if source.basis(side) or (side == "v" and self.k_basis):
                raise ValueError(f"{place}, and what it reads is held in a basis: expected none there")

    @property
    def alone(self) -> Self:
        return replace(super().alone, k_predictor=None, v_predictor=None)

    def bare_keys(self, side: Side) -> dict[str, Any]:
        return {**super().bare_keys(side), f"{side}_predictor": None}

    def label(self, side: Side) -> str:
        predictor, words = predictor_of(self, side), super().label(side)
        return words if predictor is None else f"{words}, {predictor.kind} from layer {predictor.source}"

    @property
    def kind(self) -> str:
        return super().kind if self.k_predictor is None and self.v_predictor is None else "predicted"


def predictor_of(layer: PlainLayer, side: Side) -> Predictor | None:
    """The predictor of a side of a plan's layer."""
    assert isinstance(layer, LayerPlan)
    return layer.k_predictor if side == "k" else layer.v_predictor


def predictor_shape(layer: PlainLayer, source: PlainLayer, side: Side, cache_dtype: CacheDtype) -> PredictorShape:
    """Shape of a layer's predictor of ``side``. ValueError for one that cannot be."""
    predictor = predictor_of(layer, side)
    assert predictor is not None
    heads, own = source.attention, layer.attention
    keys = own.num_kv_heads * own.k_head_dim
    if side == "k":
        inputs, outputs = heads.num_kv_heads * heads.k_head_dim, keys
    else:
        inputs, outputs = heads.num_kv_heads * heads.v_head_dim + keys, own.num_kv_heads * own.v_head_dim
    return PredictorShape(predictor.kind, inputs, outputs, cache_dtype, predictor.rank, predictor.group_size)
