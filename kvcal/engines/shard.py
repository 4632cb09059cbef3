"""The memory that an engine lends a layer, opaque blocks of 128 tokens and one ring a request, on each rank
of tensor parallelism.

Ranks take neighbouring KV heads, as Megatron's column-parallel projections do; where there are more ranks
than heads, ranks / heads of them hold the same one. All ranks have as many heads, and blocks of equal size.
Stages of a pipeline take neighbouring layers.

    block   the records of keys, then of values: a page of each KV head
    ring    of keys, then of values, in the cache's dtype: the first tokens [N, sinks, D], and the newest ones
            [N, 128 + window, D], token t at t modulo their number; after both, where channels are chosen by
            queries, the sums of |q| since the last page, fp32 [N, D], and the tokens at which they begin,
            int32 [N]. Where steps have up to ``step_tokens``, there are as many of the newest
            tokens more: rejected ones then push nothing out that is needed

A page is packed in the step that fills it, directly into its block. From then on the block alone holds these
tokens, but for sinks and the window, which the ring goes on to hold at 16 bits, and attention prefers. The
engine knows block and ring by their sizes. Blocks are shared between requests, rings are not.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcal.errors import ArtifactError, UnsupportedModel
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, CacheDtype, StateGeometry
from kvcal.kernels.operands import QueryStatistic
from kvcal.pages.layout_protocol import aligned_size
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import Plan
from kvcal.plan.tensors import layer_transforms


@dataclass(frozen=True)
class BlockLayout:
    """See the module's docstring. ``layer``: a paged layer that ``kvcal.engines.support`` takes, as this rank
    has it."""

    layer: LayerPlan
    cache_dtype: CacheDtype
    step_tokens: int = 1

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of 128 tokens of the layer: a multiple of 16."""
        return sum(map(self._records, SIDES))

    @functools.cached_property
    def ring_bytes(self) -> int:
        """Bytes of a request's ring: a multiple of 16."""
        # Of the token counts at which sums began: rounded up, as a multiple of 16 follows.
        since = aligned_size(4 * self.layer.attention.num_kv_heads)
        return aligned_size(self._unquantized_bytes + (self._query_sum_bytes + since if self.needs_queries else 0))

    @functools.cached_property
    def sink_bytes(self) -> int:
        """Bytes of the sinks of one request, keys and values: a multiple of 16."""
        return aligned_size(sum(self.sinks_at(side)[1] for side in SIDES))

    def sinks_at(self, side: Side) -> tuple[int, int]:
        """The first byte of a ring that holds sinks, and their bytes."""
        return (sum(self._tokens("k")) if side == "v" else 0), self._tokens(side)[0]

    @functools.cached_property
    def needs_queries(self) -> bool:
        """Whether channels are chosen by queries."""
        return self.layer.needs_queries

    def offset(self, side: Side) -> int:
        """The byte of a block at which the records of keys, or values, begin."""
        return self._records("k") if side == "v" else 0

    def record_bytes(self, side: Side) -> int:
        """Bytes of a page of one KV head."""
        fmt = self.layer.format(side)
        return fmt.layout(side, 1, self.layer.head_dim(side), self.cache_dtype, fmt.num_bits).record_bytes

    def pages(self, blocks: Tensor, side: Side) -> Tensor:
        """The records in blocks, uint8 [blocks, block_bytes or more] of any stride between blocks: a view
        uint8 [blocks, N, record_bytes]."""
        first, record = self.offset(side), self.record_bytes(side)
        return blocks[:, first : first + self._records(side)].unflatten(1, (-1, record))

    def unquantized(self, rings: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        """The sinks and the newest tokens in rings, uint8 [rings, ring_bytes or more]: views [rings, N,
        sinks, D] and [rings, N, ring_tokens, D] in the cache's dtype."""
        first = sum(self._tokens("k")) if side == "v" else 0
        heads, views = self.layer.attention.num_kv_heads, []
        for nbytes in self._tokens(side):
            views.append(rings[:, first : first + nbytes].view(CACHE_DTYPES[self.cache_dtype]))
            first += nbytes
        dim = self.layer.head_dim(side)
        sinks, newest = (
            view.unflatten(1, (heads, -1, dim)) if view.shape[1] else view.new_empty(len(rings), heads, 0, dim)
            for view in views
        )
        return sinks, newest

    def statistic(self, rings: Tensor) -> QueryStatistic:
        """The query statistic in rings that have one, views [rings, N, D] and [rings, N]."""
        first = self._unquantized_bytes
        heads, since = self.layer.attention.num_kv_heads, first + self._query_sum_bytes
        sums = rings[:, first:since].view(torch.float32).unflatten(1, (heads, -1))
        return QueryStatistic(sums, rings[:, since : since + 4 * heads].view(torch.int32))

    @property
    def _query_sum_bytes(self) -> int:
        return 4 * self.layer.attention.num_kv_heads * self.layer.head_dim("k")

    def _records(self, side: Side) -> int:
        return self.layer.attention.num_kv_heads * self.record_bytes(side)

    @property
    def _unquantized_bytes(self) -> int:
        return sum(sum(self._tokens(side)) for side in SIDES)

    def _tokens(self, side: Side) -> tuple[int, int]:
        """Bytes of the sinks, and of the newest tokens."""
        fmt, token = self.layer.format(side), self.layer.head_dim(side) * CACHE_DTYPES[self.cache_dtype].itemsize
        heads, newest = self.layer.attention.num_kv_heads, fmt.ring_tokens(self.step_tokens)
        return heads * fmt.sinks_left() * token, heads * newest * token


def rank_heads(geometry: AttentionGeometry, rank: int, size: int) -> slice:
    """KV heads of a rank."""
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
    """ArtifactError unless all ranks of an engine's group of processes (its ``world_size`` and ``cpu_group``)
    have a plan of this sha256."""
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


def stages_of(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers of every stage of a pipeline, as vLLM divides them unless it is told: of those left over, one
    each to the stages before the last one, from the back."""
    least, left = divmod(num_layers, num_stages)
    counts = [least + (num_stages - 1 - left <= stage < num_stages - 1) for stage in range(num_stages)]
    ends = list(itertools.accumulate(counts))
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


@dataclass(frozen=True)
class HeadShard:
    """A plan that ``kvcal.engines.support`` takes, as rank ``rank`` of ``size`` serves it; ``step_tokens``:
    the most tokens of a sequence in a step. ``stages``: the layers of every stage of a pipeline, of which this
    rank is in ``stage``; none: all layers are its own."""

    plan: Plan
    rank: int = 0
    size: int = 1
    step_tokens: int = 1
    stages: tuple[range, ...] = ()
    stage: int = 0

    @functools.cached_property
    def of_stages(self) -> tuple[HeadShard, ...]:
        """The rank of every stage."""
        return tuple(dataclasses.replace(self, stage=stage) for stage in range(len(self.stages))) or (self,)

    @functools.cached_property
    def _layers(self) -> list[LayerPlan]:
        own = self.stages[self.stage] if self.stages else None
        return [layer for layer in self.plan.layers if own is None or layer.geometry.index in own]

    @functools.cached_property
    def blocks(self) -> dict[int, BlockLayout]:
        """The rank's layout of every layer with pages, by the layer's index."""
        layers = [_layer_of(layer, self.rank, self.size) for layer in self._layers if layer.is_paged]
        return {layer.geometry.index: BlockLayout(layer, self.plan.cache_dtype, self.step_tokens) for layer in layers}

    @functools.cached_property
    def attention(self) -> dict[int, AttentionGeometry]:
        """The rank's heads of every layer with attention, by the layer's index."""
        layers = [one.attention for one in self._layers if not isinstance(one.geometry, StateGeometry)]
        return {layer.index: rank_geometry(layer, self.rank, self.size) for layer in layers}

    @functools.cached_property
    def num_states(self) -> int:
        """Layers that keep a state, beside their pages or without."""
        return sum(layer.geometry.state_bytes > 0 for layer in self._layers)

    @functools.cached_property
    def windows(self) -> dict[int, tuple[int, int]]:
        """Layers with a sliding window, by its tokens: how many there are, and a token's bytes in each on
        this rank. UnsupportedModel where these differ."""
        found: dict[int, tuple[int, int]] = {}
        for layer in self.attention.values():
            if layer.window is None:
                continue
            nbytes = layer.values_per_token * CACHE_DTYPES[self.plan.cache_dtype].itemsize
            count, expected = found.get(layer.window, (0, nbytes))
            if nbytes != expected:
                raise UnsupportedModel(
                    f"layer {layer.index} takes {nbytes} bytes a token on a rank, and another one with a sliding "
                    f"window of {layer.window} tokens {expected}, which are served only where they are equal"
                )
            found[layer.window] = count + 1, nbytes
        return found

    def heads(self, index: int) -> slice:
        """The rank's KV heads of a layer, as the plan counts them."""
        whole = next(layer.attention for layer in self.plan.layers if layer.geometry.index == index)
        return rank_heads(whole, self.rank, self.size)

    def block_bytes(self, index: int) -> int:
        """Bytes of a layer's block, equal on all ranks."""
        return self.blocks[index].block_bytes

    def ring_bytes(self, index: int) -> int:
        """Bytes of a request's ring of a layer, equal on all ranks."""
        return self.blocks[index].ring_bytes

    def tensors(self, index: int) -> dict[str, Tensor]:
        """The transforms of a layer's heads of this rank, [n, ...] each, by the last part of their names."""
        return layer_transforms(self.plan.tensors, index, self.heads(index))


def _layer_of(layer: LayerPlan, rank: int, size: int) -> LayerPlan:
    whole = layer.attention
    if size > whole.num_kv_heads and layer.needs_queries:
        raise UnsupportedModel(
            f"layer {whole.index} chooses channels by queries, and {size} ranks share the queries of each of its "
            f"{whole.num_kv_heads} KV heads: their pages would differ",
            hint=f"choose a tensor parallel size of at most {whole.num_kv_heads}",
        )
    return dataclasses.replace(layer, geometry=rank_geometry(whole, rank, size))


def rank_geometry(whole: AttentionGeometry, rank: int, size: int) -> AttentionGeometry:
    """A layer's heads, as a rank has them."""
    heads = rank_heads(whole, rank, size)
    return dataclasses.replace(
        whole, num_query_heads=whole.num_query_heads // size, num_kv_heads=heads.stop - heads.start
    )
