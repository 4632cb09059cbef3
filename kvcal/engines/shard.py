"""The heads of one rank of tensor parallelism: its layers, tensors, and the bytes that all ranks give a block.

Ranks take neighbouring KV heads, as Megatron's column-parallel projections do; where there are more ranks than heads,
ranks / heads of them hold the same one. All ranks have as many heads, and blocks of equal size.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcal.engines.block import BlockLayout
from kvcal.engines.window import WindowLayout
from kvcal.errors import ArtifactError, UnsupportedModel
from kvcal.geometry import AttentionGeometry
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Plan
from kvcal.plan.tensors import layer_transforms


def rank_heads(geometry: AttentionGeometry, rank: int, size: int) -> slice:
    """KV heads of a rank.

    Raises:
        UnsupportedModel: neither of ``size`` and the KV heads divides the other, or ``size`` does not divide the query
            heads.
    """
    heads = geometry.num_kv_heads
    if (heads % size and size % heads) or geometry.num_query_heads % size:
        raise UnsupportedModel(
            f"layer {geometry.index} has {geometry.num_query_heads} query heads and {heads} KV heads, which {size} "
            "ranks cannot share equally",
            hint="choose a tensor parallel size that divides the KV heads, or a multiple of them",
        )
    first = rank * heads // size
    return slice(first, first + max(1, heads // size))


def require_equal_plans(digest: str, group: Any) -> None:
    """ArtifactError unless all ranks of an engine's group of processes (its ``world_size`` and ``cpu_group``) have a
    plan of this sha256."""
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(group.world_size)]
    if group.world_size > 1:
        torch.distributed.all_gather(found, mine, group=group.cpu_group)
        digests = {bytes(each.tolist()).hex() for each in found}
        if digests != {digest}:
            raise ArtifactError(
                f"the ranks have unequal plans: {', '.join(sorted(each[:16] for each in digests))}",
                hint="give every node the same file",
            )


@dataclass(frozen=True)
class HeadShard:
    """A plan that ``kvcal.engines.support`` takes, as rank ``rank`` of ``size`` serves it; ``lookahead``: drafts that
    are verified beside a token."""

    plan: Plan
    rank: int = 0
    size: int = 1
    lookahead: int = 0

    @functools.cached_property
    def blocks(self) -> dict[int, BlockLayout | WindowLayout]:
        """The rank's layout of every layer, by the layer's index."""
        layers = [_layer_of(layer, self.rank, self.size) for layer in self.plan.layers]
        layouts: dict[int, BlockLayout | WindowLayout] = {}
        for layer in layers:
            layouts[layer.geometry.index] = (
                BlockLayout(layer, self.plan.cache_dtype, self.lookahead)
                if layer.is_paged
                else WindowLayout(layer, self.plan.cache_dtype)
            )
        return layouts

    def heads(self, index: int) -> slice:
        """The rank's KV heads of a layer, as the plan counts them."""
        return rank_heads(self._whole(index).attention, self.rank, self.size)

    def block_bytes(self, index: int) -> int:
        """Bytes of a layer's block, equal on all ranks; 0 of a sliding window, which has none."""
        return self.blocks[index].block_bytes

    def ring_bytes(self, index: int) -> int:
        """Bytes of a request's ring of a layer, equal on all ranks."""
        return self.blocks[index].ring_bytes

    @functools.cached_property
    def largest_ring_bytes(self) -> int:
        """Bytes of a request's largest ring, equal on all ranks: vLLM packs rings best that are equal in all layers."""
        return max(map(self.ring_bytes, self.blocks))

    def tensors(self, index: int) -> dict[str, Tensor]:
        """The transforms of a layer's heads of this rank, [n, ...] each, by the last part of their names."""
        return layer_transforms(self.plan.tensors, index, self.heads(index))

    def _whole(self, index: int) -> LayerPlan:
        return next(layer for layer in self.plan.layers if layer.geometry.index == index)


def _layer_of(layer: LayerPlan, rank: int, size: int) -> LayerPlan:
    whole = layer.attention
    heads = rank_heads(whole, rank, size)
    if size > whole.num_kv_heads and any(fmt.needs_queries for fmt in layer.k):
        raise UnsupportedModel(
            f"layer {whole.index} chooses channels by queries, and {size} ranks share the queries of each of its "
            f"{whole.num_kv_heads} KV heads: their pages would differ",
            hint=f"choose a tensor parallel size of at most {whole.num_kv_heads}",
        )
    geometry = dataclasses.replace(
        whole, num_query_heads=whole.num_query_heads // size, num_kv_heads=heads.stop - heads.start
    )
    return dataclasses.replace(layer, geometry=geometry)
