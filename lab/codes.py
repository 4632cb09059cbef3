"""Codes that no format has yet, in the measuring cache: pages are encoded and decoded at once, to values.

CodedCache    a measuring cache whose layers have other codecs
HeadsCodec    scalar codes of other widths for each KV head
LevelsCodec   scalar codes of any number of levels
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvcal import Plan
from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_cache import PlanCache
from kvcal.geometry import CACHE_DTYPES
from kvcal.pages.codec import ENCODE_PAGES, PageCodec
from kvcal.pages.error_feedback import factor_gains
from kvcal.pages.hadamard import rotate, unrotate
from kvcal.pages.layout_protocol import RAW_BITS
from kvcal.plan.page_format import Side
from kvcal.stages.measuring.cache import DenseCache
from kvcal.stages.measuring.dense_layer import DenseLayer, UnreadPages
from kvcal.systems.basis.rotated import SCALE_DTYPE, STEPS, RotatedLayout

Change = Callable[[int, Side, PageCodec], PageCodec]


class CodedCache(DenseCache):
    """``change``: of a layer's index, a side and its codec makes the one that is taken."""

    def __init__(self, plan: Plan, config: PretrainedConfig, unread: UnreadPages, change: Change) -> None:
        self._change = change
        super().__init__(plan, config, unread)

    def empty_layers(self) -> list[Any]:
        return [
            _CodedLayer(layer, self._unread, self._change) if isinstance(layer, PagedLayer) else layer
            for layer in PlanCache.empty_layers(self)
        ]


class _CodedLayer(DenseLayer):
    def __init__(self, layer: PagedLayer, unread: UnreadPages, change: Change) -> None:
        super().__init__(layer, unread)
        self._change = change

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        for part in self._parts:
            part.codec = self._change(self.plan.geometry.index, part.side, part.codec)


@dataclass(frozen=True, eq=False)
class ValuesCodec(PageCodec):
    """A codec of rotated pages with factors, whose records are the values that they read as."""

    @classmethod
    def instead_of(cls, codec: PageCodec, **more: Any) -> Self:
        return cls(**{field.name: getattr(codec, field.name) for field in fields(PageCodec)}, **more)

    def encode(
        self, x: Tensor, page_index: Tensor, num_bits: int, query_mean: Tensor | None = None,
        prediction: Tensor | None = None, at_once: int = ENCODE_PAGES,
    ) -> Tensor:  # fmt: skip
        return self.coded(x)

    def decode(self, records: Tensor, num_bits: int, prediction: Tensor | None = None) -> Tensor:
        return records

    def coded(self, x: Tensor) -> Tensor:
        """x [M, n, 128, D] in the basis, in the cache's dtype -> fp32, as it is read back."""
        raise NotImplementedError

    def heads_signs(self) -> Tensor:
        """Signs of the rotation for each head, [n, 1, D]."""
        assert self.signs is not None
        return self.signs.expand(self.num_heads, 1, -1)

    def rotated(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """x as its codes are made of it, with gains [n, D] that are not the factor's own."""
        assert self.feedback is not None
        gains = factor_gains(self.feedback, self.head_dim) if gain is None else gain
        x = x.float() * gains.unsqueeze(1) if gains.numel() else x.float()
        return rotate(x, self.heads_signs()).to(CACHE_DTYPES[self.cache_dtype]).float()

    def layout_of(self, num_bits: float) -> RotatedLayout:
        """``num_bits``: the logarithm of the number of levels."""
        return RotatedLayout(
            self.side, num_bits, "token", self.format.group_size, self.head_dim, SCALE_DTYPE, self.cache_dtype
        )


def scalar(rotated: Tensor, layout: RotatedLayout, factor: Tensor) -> Tensor:
    """rotated [M, n, 128, D] as scalar codes with error feedback read it back, still rotated."""
    channels = rotated.permute(3, 1, 0, 2).contiguous()
    codes, scale_bits = layout._searched(channels, layout._scale_bits(channels, has_feedback=True), factor)
    step, start = layout._grid(scale_bits)
    return (codes.float() * step + start).permute(2, 1, 3, 0)


@dataclass(frozen=True, eq=False)
class HeadsCodec(ValuesCodec):
    """``widths``: bits of each head of a layer; 16 keep its tokens."""

    widths: tuple[int, ...] = ()

    @property
    def kind(self) -> object:
        return super().kind, self.widths

    def coded(self, x: Tensor) -> Tensor:
        assert self.feedback is not None
        found, signs = x.float(), self.heads_signs()
        rotated = self.rotated(x)
        for bits in {*self.widths} - {RAW_BITS}:
            of_layers = self.widths * (self.num_heads // len(self.widths))  # which are encoded beside each other
            heads = [head for head, width in enumerate(of_layers) if width == bits]
            decoded = scalar(rotated[:, heads], self.layout_of(bits), self.feedback[heads])
            found[:, heads] = unrotate(decoded, signs[heads])
        return found


@dataclass(frozen=True, eq=False)
class LevelsCodec(ValuesCodec):
    """``levels`` a code; of values in formats of 2 bits gains that go with them."""

    levels: int = 4

    @property
    def kind(self) -> object:
        return super().kind, self.levels

    def coded(self, x: Tensor) -> Tensor:
        assert self.feedback is not None
        gain = factor_gains(self.feedback, self.head_dim)
        slopes = (1 - distortion_of(4)) / (1 - distortion_of(self.levels))
        layout = self.layout_of(math.log2(self.levels))
        STEPS.setdefault(layout.num_bits, best_step(self.levels))
        return unrotate(scalar(self.rotated(x, gain * slopes), layout, self.feedback), self.heads_signs())


@functools.cache
def best_step(levels: int) -> float:
    """Of a uniform quantizer of a unit Gaussian."""
    return min((step / 1000 for step in range(20, 2500)), key=lambda step: _squared_error(levels, step))


@functools.cache
def distortion_of(levels: int) -> float:
    """Its squared error with the best step."""
    return _squared_error(levels, best_step(levels))


def _squared_error(levels: int, step: float) -> float:
    x = torch.linspace(-7, 7, 14001, dtype=torch.float64)
    weight = torch.exp(-x.square() / 2)
    codes = (x / step + (levels - 1) / 2).round().clamp(0, levels - 1)
    return float((weight * (x - (codes - (levels - 1) / 2) * step).square()).sum() / weight.sum())


def coded_maker(plan: Plan, config: PretrainedConfig, change: Change) -> Callable[[UnreadPages], DenseCache]:
    return lambda unread: CodedCache(plan, config, unread, change)


def by_place(found: Mapping[tuple[int, Side], Callable[[PageCodec], PageCodec]]) -> Change:
    """Codecs of some places; of the others the plan's own."""
    return lambda index, side, codec: found[index, side](codec) if (index, side) in found else codec
