"""The power of two by which ``decode`` shifts codes of keys within the bytes that tensor cores multiply.

A code at the top of its byte costs the fewest right shifts (``csrc/codes.cuh``). But products with a limb of the query,
-128 to 127, become a float by the bits of their sum, which must stay below 2^22 (``csrc/instructions.cuh``). With more
than 128 channels, codes of 2 and 4 bits at the top of their bytes could add up to more. They lie lower there.
"""

from __future__ import annotations

from kvcal.kernels.variants import Variant
from kvcal.pages.record_layout import RAW_BITS
from kvcal.pages.tiered import TieredLayout

MAX_CODE_SUM = 2**22 // 128  # of a token's bytes
LIFTS = {1: 7, 2: 6, 3: 4, 4: 4}  # by the bits of the widest code


def key_lift(variant: Variant) -> int | None:
    """``K_LIFT`` of the fast kernel; None where even codes at the bottom of their bytes add up to too much."""
    layout, bits = variant.layout("k"), variant.num_bits("k")
    if bits == RAW_BITS:
        return 0
    widest, total, left = bits, 0, variant.head_dim
    if isinstance(layout, TieredLayout):
        for tier_bits, room, _ in layout.tiers:
            if tier_bits != RAW_BITS:
                widest, taken = max(widest, tier_bits), min(room, left)
                total, left = total + taken * (2**tier_bits - 1), left - taken
    total += left * (2**bits - 1)
    # Steps of a code's bits: where one code of a word needs no shift, another one needs none then.
    lifts = range(LIFTS.get(widest, 0), -1, -bits)
    return next((lift for lift in lifts if total << lift <= MAX_CODE_SUM), None)
