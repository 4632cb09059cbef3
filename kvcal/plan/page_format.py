"""The formats of plans: of the keys, or the values, of KV heads. The unit of choice of every allocation."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from kvcal.plan.plain_format import NEVER, SIDES, UNIFORM, PlainFormat, Side, Stripe, num_pages
from kvcal.strict import STRICT
from kvcal.systems import extended
from kvcal.systems.kitty.boost import Boost, Tier

__all__ = ["NEVER", "RAW", "SIDES", "UNIFORM", "Boost", "Format", "Side", "Stripe", "Tier", "num_pages"]


@extended("layout")
@dataclass(frozen=True, config=STRICT)
class Format(PlainFormat):
    """The form in which keys or values are stored. 16-bit heads store pages in the cache's dtype and take
    nothing else.

    ``num_bits`` are the final ones. Keys of systems ask for pages of another kind than uniform ones, of which
    a format takes one.
    """


RAW = Format(num_bits=16)
