"""``shrink_at``: pages that begin with more bits and halve them at given token counts, by the right shift of
PM-KVQ's Eq. 3 (kvcal.systems.pm_kvq.shrink)."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from pydantic.dataclasses import dataclass

from kvcal.pages.layout_protocol import Layout
from kvcal.pages.ways import Way
from kvcal.plan.plain_format import Pages, PlainFormat, Side
from kvcal.strict import STRICT
from kvcal.systems.pm_kvq.shrink import ShrinkingLayout

SHRINKING = Way(
    "pages that shrink",
    refused={
        "static": "memory of a fixed size stays as it is",
        "drafts": "what they lose does not come back",
    },
)
WAYS = (SHRINKING,)


@dataclass(frozen=True, config=STRICT)
class Format(PlainFormat):
    """``shrink_at`` (ascending token counts): pages begin with ``num_bits`` x 2^len(shrink_at) bits and halve
    them at each."""

    shrink_at: tuple[int, ...] = ()
    shift: Literal["equivalent"] = "equivalent"

    def kinds(self) -> list[str]:
        return [*super().kinds(), *(["shrink_at"] if self.shrink_at else [])]

    def conflicts(self) -> list[str]:
        found = super().conflicts()
        if self.shrink_at:
            ascending = list(self.shrink_at) == sorted(self.shrink_at) and self.shrink_at[0] >= 0
            if self.start_bits not in (4, 8, 16) or not ascending or self.param_dtype != "float32":
                found.append(
                    f"shrink_at = {list(self.shrink_at)} must ascend, start from 4, 8 or 16 bits (found "
                    f"{self.start_bits}) and have param_dtype 'float32' (found {self.param_dtype!r}): the shift needs "
                    "exact ratios of scales"
                )
        return found

    def pages(self) -> Pages:
        """Without error feedback: codes are rounded again."""
        if not self.shrink_at:
            return super().pages()
        bits = ">".join(str(self.start_bits >> n) for n in range(len(self.shrink_at) + 1))
        label = f"{bits} {self.axis} g{self.group_size}"
        return Pages("shrinking", label, SHRINKING, self._shrinking, takes_feedback=False)

    @property
    def changes_at(self) -> tuple[int, ...]:
        return self.shrink_at

    @property
    def start_bits(self) -> int:
        return self.num_bits << len(self.shrink_at)

    def _shrinking(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        return ShrinkingLayout(side, num_bits, self.axis, self.group_size, head_dim, self.param_dtype, cache_dtype)

    def bits_at(self, columns: int) -> int:
        return self.start_bits >> bisect_right(self.shrink_at, columns)
