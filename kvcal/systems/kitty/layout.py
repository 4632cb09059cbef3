"""``boost``: pages whose channels have different bits (kvcal.systems.kitty.tiered)."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from kvcal.pages.layout_protocol import RAW_BITS, Layout
from kvcal.pages.ways import Way
from kvcal.plan.plain_format import PlainFormat, Side
from kvcal.strict import STRICT
from kvcal.systems.kitty.boost import Boost
from kvcal.systems.kitty.scores import SCORES
from kvcal.systems.kitty.tiered import BASE_BITS, TieredLayout

TIERS = Way("pages with tiers")
TIERS_BY_QUERIES = Way(
    "pages with tiers that queries choose",
    needs=("queries",),
    refused={"drafts": "queries of rejected drafts stay counted"},
)
WAYS = (TIERS, TIERS_BY_QUERIES)


@dataclass(frozen=True, config=STRICT)
class Format(PlainFormat):
    """Tiers, where ``boost`` is given."""

    boost: Boost | None = None

    def kinds(self) -> list[str]:
        return [*super().kinds(), *(["boost"] if self.boost is not None else [])]

    def conflicts(self) -> list[str]:
        found = super().conflicts()
        if self.boost is not None:
            lowest = self.boost.tiers[-1].num_bits
            if self.num_bits not in BASE_BITS or self.axis != "channel" or lowest <= self.num_bits:
                found.append(
                    f"boost needs axis 'channel' and 2 or 4 bits below those of its tiers, found {self.axis!r} and "
                    f"{self.num_bits} against {lowest}"
                )
        return found

    def ways(self) -> list[Way]:
        if self.boost is None:
            return super().ways()
        return [TIERS_BY_QUERIES if SCORES[self.boost.score].needs_queries else TIERS]

    @property
    def kind(self) -> str:
        return super().kind if self.boost is None else "tiers"

    @property
    def label(self) -> str:
        plain = super().label
        return plain if self.boost is None else f"{plain}{''.join(map(str, self.boost.tiers))} {self.boost.score}"

    @property
    def score(self) -> str | None:
        return super().score if self.boost is None else self.boost.score

    def layout(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        if num_bits == RAW_BITS or self.boost is None:
            return super().layout(side, num_heads, head_dim, cache_dtype, num_bits)
        tiers = tuple((tier.num_bits, tier.num_channels(head_dim), tier.above) for tier in self.boost.tiers)
        return TieredLayout(num_bits, tiers, self.group_size, head_dim, self.param_dtype, cache_dtype)


def boost_of(fmt: PlainFormat) -> Boost | None:
    """The tiers of a plan's format, if it has some."""
    assert isinstance(fmt, Format)
    return fmt.boost
