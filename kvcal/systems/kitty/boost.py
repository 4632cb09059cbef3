"""Tiers: which channels of a page of keys get more bits, and how many."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.strict import STRICT
from kvcal.systems.kitty.scores import SCORES


@dataclass(frozen=True, config=STRICT)
class Tier:
    """Channels of a page that get ``num_bits``: room for ``share`` of them. ``above`` None fills all of it
    with the best channels by score (Kitty); a number takes only channels whose score is above it (MixKVQ)."""

    num_bits: Literal[4, 8, 16]
    share: Annotated[float, Field(gt=0, le=1)]
    above: float | None = None

    def num_channels(self, head_dim: int) -> int:
        """Channels of a page that the tier has room for, at least one."""
        return max(1, int(self.share * head_dim + 0.5))

    def __str__(self) -> str:
        above = "" if self.above is None else f">{self.above:g}"
        return f" +{100 * self.share:g}%@{self.num_bits}{above}"


@dataclass(frozen=True, config=STRICT)
class Boost:
    """Channels of every page of keys that get more bits: the best by ``score``, tier by tier, from most bits
    to fewest; decided anew for every page."""

    score: str
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score = {self.score!r}, expected one of {list(SCORES)}")
        bits = [tier.num_bits for tier in self.tiers]
        if not bits or bits != sorted(set(bits), reverse=True):
            raise ValueError(f"tiers of {bits} bits, expected one or more, from most bits to fewest")
