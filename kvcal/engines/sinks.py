"""Sinks that requests share: a copy next to the first page of a prompt, from which a request takes its own.

Attention reads sinks from a request's ring. A request that begins after blocks of another has a ring without them. So
an engine that shares blocks keeps one small block more for each first page: the sinks of all layers at 16 bits. The
request that fills a first page copies its sinks there; one that begins after it copies them back, into its ring.
"""

from __future__ import annotations

from torch import Tensor

from kvcal.engines.shard import BlockLayout
from kvcal.plan.page_format import SIDES


class SharedSinks:
    """Sinks of one layer: ``rings``, uint8 [rings, ring_bytes or more], and ``blocks``, uint8 [blocks, sink_bytes or
    more], with keys before values."""

    def __init__(self, layout: BlockLayout, rings: Tensor, blocks: Tensor) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []
        first = 0
        for side in SIDES:
            start, nbytes = layout.sinks_at(side)
            self._parts.append((rings[:, start : start + nbytes], blocks[:, first : first + nbytes]))
            first += nbytes

    def save(self, rings: Tensor, blocks: Tensor) -> None:
        """Copy the sinks of rings, int64 [n], to blocks, int64 [n]."""
        for own, shared in self._parts:
            shared[blocks] = own[rings]

    def restore(self, rings: Tensor, blocks: Tensor) -> None:
        """The other way round."""
        for own, shared in self._parts:
            own[rings] = shared[blocks]
