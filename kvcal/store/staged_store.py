"""A head range whose pages lie in the pool of a plan that has them shrink (kvcal.store.page_pool).

All is as in a store of its own memory, but that pages have the bits of the present stage, and that a page that is due
when a prompt comes is packed before its stage ends, in all layers, and not when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from kvcal.kernels.operands import StoredSide
from kvcal.kernels.staged import append_staged, decode_staged
from kvcal.kernels.variants import HeadRange, Variant
from kvcal.pages.layout import RAW_BITS
from kvcal.plan.format import SIDES, Side
from kvcal.plan.layer import LayerPlan
from kvcal.store.page_pool import RegionPages
from kvcal.store.static_state import StaticState
from kvcal.store.static_store import HeadStore


@dataclass(frozen=True)
class StagedStore(HeadStore):
    """See the module's docstring. ``pages`` are views of the pool, for the host; steps are given the pool. ``keys``: of
    the variant for each pair of bits that keys and values come to have."""

    pages: RegionPages
    keys: Mapping[tuple[int, ...], str] = field(init=False)
    packs_before_prompts: ClassVar[bool] = True

    @classmethod
    def _new_pages(cls, plan: LayerPlan, pair: HeadRange, variant: Variant, state: StaticState) -> RegionPages:
        assert state.pool is not None
        return RegionPages(state.pool, plan.geometry.index, pair.heads.start)

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = {bits: with_bits(self.variant, *bits).key for bits in self.pages.widths}
        object.__setattr__(self, "keys", keys)  # all of them now: a cached property's lock is not for torch.compile

    @property
    def present_key(self) -> str:
        return self.keys[self.pages.num_bits]

    def _stored(self, side: Side) -> StoredSide:
        return StoredSide(self.sinks[side], self.buffer[side], self.pages.pool.pages)

    def append(self, k_new: Tensor, v_new: Tensor, q: Tensor) -> None:
        k, v, queries, counts, transform = self.operands
        given = self._own(k_new, v_new, q)
        append_staged(*given, k, v, queries, counts, transform, self.state.error, *self._stages)

    def decode(self, q: Tensor, s_aux: Tensor | None, scale: float, softcap: float) -> Tensor:
        (k, v, _, counts, transform), q = self.operands, q[:, self.queries]
        s_aux = self.nothing if s_aux is None else s_aux[self.queries]
        return decode_staged(q, k, v, counts, transform, s_aux, self.workspace, scale, softcap, *self._stages)

    @property
    def _stages(self) -> tuple[Tensor, list[int], list[str]]:
        return self.pages.pool.present, self.pages.numbers, list(self.keys.values())

    def pack_all_due(self, columns: int) -> None:
        """Pack the pages that the tokens of so many columns have filled, the last one, too."""
        rows = self.state.rows
        for block in rows.blocks:
            for side in SIDES:
                super().pack_due(side, block.rows, rows.num_tokens(block, columns))

    def pack_due(self, side: Side, rows: slice, num_tokens: int) -> None:
        """Nothing: ``pack_all_due`` has done it for all rows."""


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
