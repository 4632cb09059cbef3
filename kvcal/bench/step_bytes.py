"""The bytes that a decode step's attention must move in one layer: what every time is held against.

Packed pages are read once, where they are. A stored form (kvcal.store.stored_form) is read, written out as pages of
16 bits, and these are read by ``decode``; what predictors read is written and read in fp32 on top. Nothing else is
counted: no temporaries of a reconstruction, no room beyond the tokens that are there, and no page that becomes due. So
the bytes are a floor, and their ratio to 16 bits is the ceiling of the path's factor.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from kvcal.bench.shape import CACHE_DTYPE, ITEM_BYTES, Heads, Pair, Point, raw_bytes
from kvcal.kernels.variants import stored_form
from kvcal.pages.layout import PAGE_TOKENS, RAW_BITS
from kvcal.plan.format import SIDES, Format, Side
from kvcal.plan.layer import LayerPlan
from kvcal.plan.tensors import predictor_shape
from kvcal.strict import STRICT

KEPT_ITEM_BYTES = 4  # predictors read fp32
# A layer that is predicted, and the next one, which is predicted from it.
MIDDLE, NEXT = 1, 2


@dataclass(frozen=True, config=STRICT)
class StepBytes:
    """Of all sequences. ``stored``: records, sinks and the filled part of the buffer, read; ``reconstructed``: pages of
    16 bits, written and read; ``kept``: pages as predictors read them, written and read; ``predictors``: weights."""

    stored: int
    reconstructed: int = 0
    kept: int = 0
    predictors: int = 0

    @property
    def total(self) -> int:
        return self.stored + self.reconstructed + self.kept + self.predictors


def step_bytes(pair: Pair, heads: Heads, point: Point) -> StepBytes:
    """Of a layer in the middle of a model, ``point.context`` tokens before the step and the new one."""
    layer, following = heads.layer(pair, MIDDLE), heads.layer(pair, NEXT)
    forms = [side for side in SIDES if stored_form(layer, side, pair.format(side)) is not None]
    paged = {side: point.batch * _page_values(pair.format(side), heads, point) for side in SIDES}
    # Pages as predictors read them: of this layer for itself and for the next one, of the one before for this layer.
    written = {side for side in SIDES if following.predictor(side) is not None}
    written |= {"k"} if layer.predictor("v") is not None else set()
    read = [side for side in SIDES if layer.predictor(side) is not None]
    read += ["k"] if layer.predictor("v") is not None else []
    return StepBytes(
        stored=point.batch * sum(_stored_bytes(side, pair.format(side), heads, point) for side in SIDES),
        reconstructed=2 * ITEM_BYTES * sum(paged[side] for side in forms),
        kept=KEPT_ITEM_BYTES * sum(paged[side] for side in (*written, *read)),
        predictors=sum(_predictor_bytes(pair, heads, layer, side) for side in SIDES),
    )


def bits_per_value(pair: Pair, heads: Heads, point: Point) -> float:
    """Bits that are stored for each cached value, scales, sinks and the filled part of the buffer included."""
    return RAW_BITS * step_bytes(pair, heads, point).stored / raw_bytes(heads, point)


def _page_values(fmt: Format, heads: Heads, point: Point) -> int:
    """Keys, or values, of the pages of one sequence."""
    return fmt.num_pages(point.context) * PAGE_TOKENS * heads.num_kv_heads * heads.head_dim


def _stored_bytes(side: Side, fmt: Format, heads: Heads, point: Point) -> int:
    """Of one sequence; a lattice has one record for all heads."""
    pages, num_heads = fmt.num_pages(point.context), heads.num_kv_heads
    records = pages * (1 if fmt.lattice_dim is not None else num_heads)
    record = fmt.layout(side, num_heads, heads.head_dim, CACHE_DTYPE, fmt.num_bits).record_bytes
    unquantized = point.context + 1 - pages * PAGE_TOKENS
    return records * record + unquantized * num_heads * heads.head_dim * ITEM_BYTES


def _predictor_bytes(pair: Pair, heads: Heads, layer: LayerPlan, side: Side) -> int:
    if layer.predictor(side) is None:
        return 0
    return predictor_shape(layer, heads.layer(pair, layer.geometry.index - 1), side, CACHE_DTYPE).nbytes
