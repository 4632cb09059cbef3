"""A dynamic cache of one sequence, made from the stored pages of another plan: reconstructed once, layer by layer.

Records come from host memory while the device works on the layers before (kvcal.store.streaming). Into layers of plain
16-bit heads the kernels write pages where they stay; other formats are packed from reconstructed tokens, in torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.sliding_window import BoundedLayer
from kvcal.geometry import CACHE_DTYPES
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Side
from kvcal.plan.plan import Plan
from kvcal.store.restore import RestoredSide, Restorer, SequenceRestorer, StoredPart
from kvcal.store.streaming import Source, on_device

LARGEST = 2.0**24  # of keys and values: far beyond a model's, and what attention makes of them is finite


class CacheRestorer:
    """Sequences stored as ``plan`` says, into pages of ``into``, for a model with this ``config`` on ``device``. Keeps
    the plan's codecs and predictors there."""

    def __init__(self, plan: Plan, into: Plan, config: PretrainedConfig, device: torch.device) -> None:
        self._plan, self._into, self._config, self._device = plan, into, config, device
        self._restorer = Restorer(plan, device)

    def cache(self, layers: Sequence[Source], num_tokens: int) -> PlanCache:
        """The cache that holds a sequence of ``num_tokens``. ``layers``: of every layer of the plan, tensors on the
        CPU or unread, by side, number of the part, and field of ``StoredPart``: "k.0.pages"; of a sliding window
        "k.window" and "v.window" [N, T, D].

        Raises:
            ValueError: pages that no prompt gives.
        """
        made, ranges = PlanCache(self._into, self._config), dict[str, Tensor]()
        sequence = self._restorer.sequence(num_tokens)
        for plan, given in zip(self._plan.layers, on_device(layers, self._device), strict=True):
            index = plan.geometry.index
            layer = made.layers[index]
            if isinstance(layer, PagedLayer):
                restored = self._layer(layer, plan, given, sequence)
                ranges |= {f"layers.{index}.{side}": value_range(restored[side].pages) for side in SIDES}
                if not _is_plain(layer):
                    require_ranges(ranges)
                    layer.update(*(restored[side].tokens.unsqueeze(0) for side in SIDES))
            elif isinstance(layer, BoundedLayer):
                layer.update(*(given[f"{side}.window"].clone().unsqueeze(0) for side in SIDES))
                layer.cumulative_length = num_tokens
        require_ranges(ranges)
        return made

    def _layer(
        self, layer: PagedLayer, plan: LayerPlan, given: Mapping[str, Tensor], sequence: SequenceRestorer
    ) -> dict[Side, RestoredSide]:
        """Keys and values of one layer; those of a plain layer lie where its cache has them."""
        if _is_plain(layer):
            layer.create(1, self._device)
            layer.resume(sequence.num_tokens)
        restored: dict[Side, RestoredSide] = {}
        for side in SIDES:
            count = sum(name.startswith(f"{side}.") and name.endswith(".pages") for name in given)
            names = [[f"{side}.{number}.{field}" for field in StoredPart._fields] for number in range(count)]
            parts = [StoredPart(*(given[name] for name in of_part)) for of_part in names]
            if not _is_plain(layer):
                restored[side] = sequence.restore(plan, side, parts, sequence.empty_pages(plan, side))
                continue
            (part,) = layer.sides[side]
            pages = part.pool.records.view(CACHE_DTYPES[self._into.cache_dtype]).unflatten(-1, (PAGE_TOKENS, -1))
            restored[side] = sequence.restore(plan, side, parts, pages)
            if len(pages):
                part.ring[0] = pages[-1]
            part.ring[0, :, : restored[side].rest.shape[1]] = restored[side].rest
        return restored


def _is_plain(layer: PagedLayer) -> bool:
    """Whether all heads hold 16-bit pages, which are the tokens themselves: not keys before RoPE, nor residuals."""
    plan = layer.plan
    return {*plan.k, *plan.v} == {RAW} and plan.k_pages == "post" and plan.v_predictor is None


def value_range(x: Tensor) -> Tensor:
    """[2]: the least and the largest value, NaN if there is one; 0 of nothing. Waits for nothing."""
    return torch.stack(torch.aminmax(x)) if x.numel() else x.new_zeros(2)


def require_ranges(ranges: Mapping[str, Tensor]) -> None:
    """ValueError unless all are finite and within ``LARGEST``. Waits for the device, once."""
    if not ranges:
        return
    is_within = (torch.stack(list(ranges.values())).abs() <= LARGEST).all(dim=1)
    for name, fits in zip(ranges, is_within.tolist(), strict=True):
        if not fits:
            raise ValueError(f"tensor '{name}.pages' holds NaN, or values beyond {LARGEST:g}")
