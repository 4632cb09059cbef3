"""Formats whose keys have channels with more bits, and values next to them."""

from dataclasses import replace

from cache_cases import recipe_formats

from kvcal.plan.page_format import Boost, Format, Tier


def boosted(score: str, *tiers: Tier, **changes) -> Format:
    return replace(Format(2, "channel", 32, 5, boost=Boost(score, tiers)), **changes)


KITTY = recipe_formats()["kitty"]
THREE_TIERS = boosted("range", Tier(16, 0.25, 2.0), Tier(4, 0.5, 0.9), recent_window=17, num_sink_tokens=0)
BASE_4 = boosted("variance", Tier(8, 0.375), num_bits=4, param_dtype="bfloat16")
QUERY = boosted("query_range", Tier(16, 0.25, 1.5), Tier(4, 0.25, 0.5))
V = Format(2, "token", 32, recent_window=33)
