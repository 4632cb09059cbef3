"""Pages of one bit width become pages of another, from their codes alone (PM-KVQ's bit-width shrinking).

Shrinking halves codes until they are narrow enough (``quantizers.shift``); only pages of 16 bits, which hold the values
themselves, are quantized, to 8 bits, with the fp32 scales and zeros that every later step needs. What a page holds then
depends on its values and on the bits it was written with, not on when it shrank or together with what.

Widening is for caches that lose tokens (``crop``), whose bytes must again be those of their token count: codes become
wider codes of the same values, so that shrinking once more gives the same codes; nothing that was lost comes back. Up
to 16 bits, values are decoded and rounded to the cache's dtype.

Records are converted in parts, so that the scratch is bounded; old and new pages of one tensor exist at the same time.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kvcal.quantizers.pages import RAW_BITS, PageLayout
from kvcal.quantizers.shift import Shift, shift, shift_params, unshift, unshift_params

# Records converted at once: bounds the scratch to a few bytes for each of their values.
RECORDS_AT_ONCE = 128


def convert(records: Tensor, old: PageLayout, new: PageLayout, kind: Shift) -> Tensor:
    """Records [..., old.record_bytes] uint8 -> [..., new.record_bytes], fewer or more bits. The layouts differ in
    ``num_bits`` alone, both a power of two, and their scales are fp32.

    Raises:
        NonFiniteActivations: NaN or infinity in pages of 16 bits that shrink.
    """
    flat = records.flatten(0, -2)
    result = flat.new_empty(len(flat), new.record_bytes)
    change = _shrunk if new.num_bits < old.num_bits else _widened
    for start in range(0, len(flat), RECORDS_AT_ONCE):
        part = slice(start, start + RECORDS_AT_ONCE)
        result[part] = change(flat[part], old, new, kind)
    return result.view(*records.shape[:-1], new.record_bytes)


def _shrunk(records: Tensor, old: PageLayout, new: PageLayout, kind: Shift) -> Tensor:
    num_bits = old.num_bits
    if num_bits == RAW_BITS:
        num_bits //= 2
        codes, scale, zero = dataclasses.replace(new, num_bits=num_bits).quantize(old.decode(records))
    else:
        codes, scale, zero = old.fields(records)
    while num_bits > new.num_bits:
        codes, (scale, zero) = shift(codes, num_bits, kind), shift_params(scale, zero, num_bits, kind)
        num_bits //= 2
    return new.pack(codes, scale, zero)


def _widened(records: Tensor, old: PageLayout, new: PageLayout, kind: Shift) -> Tensor:
    if new.num_bits == RAW_BITS:
        return new.encode(old.decode(records))
    codes, scale, zero = old.fields(records)
    num_bits = old.num_bits
    while num_bits < new.num_bits:
        num_bits *= 2
        codes, (scale, zero) = unshift(codes, num_bits, kind), unshift_params(scale, zero, num_bits, kind)
    return new.pack(codes, scale, zero)
