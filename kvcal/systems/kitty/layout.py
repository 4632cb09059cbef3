"""``boost``: pages whose channels have different bits (kvcal.systems.kitty.tiered)."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from kvcal.pages.layout_protocol import Layout
from kvcal.pages.ways import Way
from kvcal.plan.plain_format import Pages, PlainFormat, Side
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

    def pages(self) -> Pages:
        if self.boost is None:
            return super().pages()
        label = f"{super().pages().label}{''.join(map(str, self.boost.tiers))} {self.boost.score}"
        way = TIERS_BY_QUERIES if SCORES[self.boost.score].needs_queries else TIERS
        return Pages("tiers", label, way, self._tiered)

    @property
    def score(self) -> str | None:
        return super().score if self.boost is None else self.boost.score

    def _tiered(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        assert self.boost is not None
        tiers = tuple((tier.num_bits, tier.num_channels(head_dim), tier.above) for tier in self.boost.tiers)
        return TieredLayout(num_bits, tiers, self.group_size, head_dim, self.param_dtype, cache_dtype)


def boost_of(fmt: PlainFormat) -> Boost | None:
    """The tiers of a plan's format, if it has some."""
    assert isinstance(fmt, Format)
    return fmt.boost
