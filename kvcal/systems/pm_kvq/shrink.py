"""Pages of one bit width become pages of another, from their codes alone (PM-KVQ's bit-width shrinking).

Shrinking halves codes until they are narrow enough (``shift``); only pages of 16 bits, which hold what the
model made, are transformed (keys: offset and λ) and quantized, to 8 bits, with the fp32 scales and zeros that
every later step needs. What a page holds then depends on its values and on the bits it was written with, not
on when it shrank or together with what.

Widening is for caches that lose tokens (``crop``), whose bytes must again be those of their token count:
codes become wider codes of the same values, so that shrinking once more gives the same codes; nothing that
was lost comes back. Up to 16 bits, values are decoded, their transform is undone, and they are rounded to the
cache's dtype.

Functions of codes raise ValueError for bits that have no half. Records are converted in parts, so that the
scratch is bounded; old and new pages of one tensor exist at the same time.
"""

from __future__ import annotations

import dataclasses

from kvcal.lazy_torch import Tensor, torch
from kvcal.pages.layout_protocol import RAW_BITS, RECORDS_AT_ONCE, Layout
from kvcal.pages.rescale_and_rope import Transform
from kvcal.pages.uniform import UniformLayout


def shift(codes: Tensor, from_bits: int) -> Tensor:
    """Codes of ``from_bits`` (16, 8, 4 or 2) bits, of any integer dtype -> uint8 codes of half as many bits,
    rounded half up (the equivalent right shift, PM-KVQ Eq. 3)."""
    b = from_bits // 2
    # The product stays below 2^16 for b = 4 and passes 2^31 for b = 8.
    wide = codes.to(torch.int64 if b == 8 else torch.int32)
    return wide.add(1 << (b - 1)).mul_((1 << 2 * b) - (1 << b) + 1).bitwise_right_shift_(3 * b).to(torch.uint8)


def shift_scale(scale: Tensor, from_bits: int) -> Tensor:
    """Scale, fp32, of codes that :func:`shift` halves from ``from_bits`` -> that of the result. Zeros
    stay."""
    return scale * (2.0 ** (from_bits // 2) + 1.0)


def unshift(codes: Tensor, to_bits: int) -> Tensor:
    """Codes of half of ``to_bits`` (16, 8, 4 or 2) bits -> codes of ``to_bits`` bits that stand for the same
    values, uint8 (16 bits: int32). :func:`shift` takes them back to ``codes`` exactly."""
    b = to_bits // 2
    return codes.to(torch.int32 if b == 8 else torch.uint8) * ((1 << b) + 1)


def unshift_scale(scale: Tensor, to_bits: int) -> Tensor:
    """Scale, fp32, for the codes of :func:`unshift`. The shift of it gives ``scale`` back: bit for bit where
    it came out of :func:`shift_scale`, else within one unit in the last place (15 % of all fp32 numbers are 5
    times no other), subnormal numbers aside."""
    divisor = scale.new_full((), (1 << to_bits // 2) + 1)  # on the device: CUDA multiplies by 1 / a Python number
    return scale / divisor


PLAIN = Transform()


@dataclasses.dataclass(frozen=True)
class ShrinkingLayout(UniformLayout):
    """Uniform pages whose records become those of other bits."""

    def converted(self, records: Tensor, new: Layout, transform: Transform) -> Tensor:
        assert isinstance(new, UniformLayout)
        return convert(records, self, new, transform)


def convert(records: Tensor, old: UniformLayout, new: UniformLayout, transform: Transform = PLAIN) -> Tensor:
    """Records [..., n, old.record_bytes] uint8 -> [..., n, new.record_bytes], fewer or more bits. The layouts
    differ in ``num_bits`` alone, both a power of two, and their scales are fp32. ``transform``: that of the n
    heads' codes."""
    by_page = records.flatten(0, -3) if records.dim() > 2 else records.unsqueeze(0)
    result = by_page.new_empty(*by_page.shape[:2], new.record_bytes)
    change = _shrunk if new.num_bits < old.num_bits else _widened
    pages_at_once = max(1, RECORDS_AT_ONCE // max(1, by_page.shape[1]))
    for start in range(0, len(by_page), pages_at_once):
        part = slice(start, start + pages_at_once)
        result[part] = change(by_page[part], old, new, transform)
    return result.view(*records.shape[:-1], new.record_bytes)


def _shrunk(records: Tensor, old: UniformLayout, new: UniformLayout, transform: Transform) -> Tensor:
    num_bits = old.num_bits
    if num_bits == RAW_BITS:
        num_bits //= 2
        codes, scale, zero = dataclasses.replace(new, num_bits=num_bits).quantize(transform.apply(old.decode(records)))
    else:
        codes, scale, zero = old.fields(records)
    while num_bits > new.num_bits:
        codes, scale = shift(codes, num_bits), shift_scale(scale, num_bits)
        num_bits //= 2
    return new.pack(codes, scale, zero)


def _widened(records: Tensor, old: UniformLayout, new: UniformLayout, transform: Transform) -> Tensor:
    if new.num_bits == RAW_BITS:
        return new.encode(transform.undo(old.decode(records)))
    codes, scale, zero = old.fields(records)
    num_bits = old.num_bits
    while num_bits < new.num_bits:
        num_bits *= 2
        codes, scale = unshift(codes, num_bits), unshift_scale(scale, num_bits)
    return new.pack(codes, scale, zero)
