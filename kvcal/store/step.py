"""One decoding step of one head range of a layer, by the kernels: store the token, then attend to all of them.

A head range is a run of KV heads whose formats, of keys and of values, stay the same (kvcal.kernels.variants). A step
waits for nothing and knows no lengths on the host, so that it may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcal.kernels import ops
from kvcal.kernels.operands import Memory, PageTransform, Place, QueryStatistic
from kvcal.kernels.variants import Variant
from kvcal.pages.layout import RAW_BITS
from kvcal.store.shrinking import RegionPool
from kvcal.store.state import StepState


@dataclass(frozen=True)
class HeadStep:
    """KV heads ``heads`` of a layer; ``queries`` are theirs. ``variants``: one, or where pages shrink, one for each
    pair of bits that keys and values come to have; ``regions``: where those pages lie, else empty."""

    heads: slice
    queries: slice
    state: StepState
    k: Memory
    v: Memory
    statistic: QueryStatistic
    place: Place
    transform: PageTransform
    workspace: Tensor
    variants: tuple[int, ...]
    present: Tensor
    regions: tuple[int, ...]
    needs_queries: bool

    def append(self, k_new: Tensor, v_new: Tensor, q: Tensor) -> None:
        """Store one token of every row: k_new, v_new [B, N, D] and queries q [B, N G, D] of all heads of the layer."""
        scored = q[:, self.queries] if self.needs_queries else self.state.nothing
        ops.append(
            k_new[:, self.heads], v_new[:, self.heads], scored, list(self.k), list(self.v), list(self.statistic),
            list(self.place), list(self.transform), self.state.error, list(self.variants), self.present,
            list(self.regions),
        )  # fmt: skip

    def decode(self, q: Tensor, s_aux: Tensor | None, scale: float, softcap: float) -> Tensor:
        """Attention [B, n G, D] of these heads' queries, of q [B, N G, D] and s_aux [N G] of all heads."""
        sinks = self.state.nothing if s_aux is None else s_aux[self.queries]
        attended: Tensor = ops.decode(
            q[:, self.queries], list(self.k), list(self.v), list(self.place), list(self.transform), sinks,
            self.workspace, scale, softcap, list(self.variants), self.present, list(self.regions),
        )  # fmt: skip
        return attended


def phased_variants(variant: Variant, pools: Sequence[RegionPool]) -> list[Variant]:
    """One for each pair of bits that pages in these regions, of keys and of values, come to have."""
    phases = pools[0].phases
    return [with_bits(variant, *bits) for bits in phases.widths([pool.number for pool in pools])]


def with_bits(variant: Variant, k_bits: int, v_bits: int) -> Variant:
    """The variant for pages of these bits. Those of 16 hold K as the model made them."""
    is_plain = k_bits == RAW_BITS
    return replace(
        variant,
        k_bits=k_bits,
        v_bits=v_bits,
        rescale=variant.rescale and not is_plain,
        offset=variant.offset and not is_plain,
    )


def no_transform(device: torch.device) -> PageTransform:
    nothing = torch.empty(0, dtype=torch.float32, device=device)
    return PageTransform(nothing, nothing, nothing, nothing)
