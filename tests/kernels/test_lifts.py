"""Products of keys with limbs of the query have room in their sums, for every head size and format. Needs no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from kvcal.kernels.choice import is_plain, key_lift
from kvcal.kernels.variants import Variant
from kvcal.pages.tiered import TieredLayout
from kvcal.plan.page_format import Boost, Format, Tier

MAGIC, ZERO = 0x4B400000, 12582912.0  # csrc/instructions.cuh
LARGEST = 32512  # of a query in fixed point, csrc/limbs.cuh
ROTATED = {"quantizer": "rotated"}
KEYS = {
    **{f"{bits} bits": Format(bits, "channel") for bits in (1, 2, 3, 4, 8)},
    "per token": Format(2, "token"),
    "rotated": Format(2, **ROTATED),
    "Kitty": Format(2, "channel", boost=Boost("magnitude", (Tier(4, 0.125),))),
    "Kitty 90 %": Format(2, "channel", boost=Boost("magnitude", (Tier(4, 0.9),))),
    "8 over 4": Format(4, "channel", boost=Boost("magnitude", (Tier(8, 0.125),))),
    "MixKVQ": Format(2, "channel", boost=Boost("magnitude", (Tier(16, 1 / 64), Tier(4, 0.25)))),
}


def variant_of(key: Format, dim: int) -> Variant:
    return Variant(key, Format(2), dim, "bfloat16", 4, False, False, 0)


def largest_codes(variant: Variant) -> np.ndarray:
    """int64 [head_dim]: of a token whose codes are the largest in all channels."""
    layout = variant.layout("k")
    codes = np.full(variant.head_dim, 2**variant.k.num_bits - 1)
    if isinstance(layout, TieredLayout):
        for (bits, *_), slots in zip(layout.tiers, layout.slots, strict=True):
            codes[slots] = 2**bits - 1 if bits < 16 else 0
    return codes


def product(codes: np.ndarray, fixed: np.ndarray, lift: int) -> float:
    """The kernel's sum of codes times numbers in fixed point: of both limbs, by the bits of floats."""
    low = (fixed + 128) % 256 - 128
    high = (fixed - low) // 256
    sums = [int((codes << lift) @ limb) + MAGIC for limb in (high, low)]
    high_sum, low_sum = (np.array(sums, dtype=np.int64).astype(np.uint32).view(np.float32).astype(np.float64)) - ZERO
    return float(256 * high_sum + low_sum) / 2**lift


@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("name", KEYS)
def test_the_largest_codes_have_room(name: str, dim: int) -> None:
    """Queries whose high limbs, or low limbs, are the largest or the smallest in all channels."""
    variant = variant_of(KEYS[name], dim)
    if is_plain(variant):
        pytest.skip("the plain kernel serves it")
    lift, codes = key_lift(variant), largest_codes(variant)
    assert lift is not None and codes.max() << lift < 256  # a byte holds the code
    for number in (LARGEST, LARGEST - 128, 127 * 256 + 127, -LARGEST, -LARGEST - 128, 127, -128, 1):
        fixed = np.full(dim, number)
        assert product(codes, fixed, lift) == codes @ fixed, number


def test_codes_at_the_top_of_their_bytes_would_not_have_it() -> None:
    fixed = np.full(256, LARGEST)
    for bits, top in ((2, 6), (4, 4)):
        codes = np.full(256, 2**bits - 1)
        assert product(codes, fixed, top) > 1.2 * (codes @ fixed)


def test_the_plain_kernel_serves_codes_that_add_up_to_too_much() -> None:
    boosted = Format(4, "channel", boost=Boost("magnitude", (Tier(8, 0.5),)))
    assert key_lift(variant_of(boosted, 192)) == 0
    assert key_lift(variant_of(boosted, 256)) is None
    assert is_plain(variant_of(boosted, 256)) and not is_plain(variant_of(boosted, 192))
