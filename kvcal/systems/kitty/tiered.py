"""One page of keys whose channels have different bits: Kitty's channel boost and MixKVQ's three tiers.

Channels are ordered by score. Each tier, from most bits to fewest, takes the best channels that are left: all
that it has room for (Kitty: top D_boost), or only those above its threshold (MixKVQ: BF16, then UINT4); what
no tier takes stays at the base bits. So an inverted pair of thresholds empties the middle tier. Room is
fixed, so every page of a format has the same bytes, whatever its scores; room that is not used holds zeros.

A code of b bits is cut: its low bits lie in dense planes of all channels, as on a plain page of keys; the
high bits of boosted channels lie in narrow planes, slot by slot (Kitty, Sec. 4.1, the dense and the sparse
matrix). The record:

    base planes | high planes, tier by tier | values of the 16-bit tier | scale | zero | index

- base planes: as on a uniform page, 128 tokens x channels padded to 16; low ``num_bits`` of every code.
- high planes of a tier: 128 tokens x its slots, padded so that a row is whole bytes; the other bits of its
  codes.
- 16-bit values: [slots][128] in the cache's dtype. Such channels have code, scale and zero 0.
- scale, zero: [128 / group_size][padded channels]. Every channel has the levels of its own bits.
- index: uint8 [head_dim], the slot of every channel, 255 for none. Slots are numbered through all tiers in
  order.

Every field begins at a multiple of 16 bytes, and zeros fill the last 16. At head_dim 128, 16 channels of 4
bits, groups of 128 (Kitty, 12.5 %): 4096 + 512 + 2 x 256 + 128 bytes. Slots are computed in int64: the
paper's public kernel multiplies uint8 slots and overflows. Left out: keys per token, whose groups would mix
channels of unlike bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from kvcal.errors import UsageError
from kvcal.geometry import CACHE_DTYPES
from kvcal.lazy_torch import Tensor, torch
from kvcal.pages import packing, uniform
from kvcal.pages.error_feedback import round_with_feedback
from kvcal.pages.layout_protocol import (
    PAGE_TOKENS,
    PARAM_DTYPES,
    RAW_BITS,
    Layout,
    aligned_size,
    double_bits,
    join_fields,
    padded_channels,
    require_finite,
)
from kvcal.pages.packing import pack_planes, plane_sizes, unpack_planes
from kvcal.stored_tensor import ITEM_BYTES

NO_SLOT = 255
MAX_SLOTS = 254
BASE_BITS = (2, 4)


@dataclass(frozen=True)
class TieredLayout(Layout):
    """Shape of the record of one page of keys, channel groups along tokens. ``num_bits`` is the base;
    ``tiers``, from most bits to fewest, are (num_bits, room in channels, score that a channel must exceed or
    None)."""

    num_bits: int
    tiers: tuple[tuple[int, int, float | None], ...]
    group_size: int
    head_dim: int
    param_dtype: str
    cache_dtype: str

    def __post_init__(self) -> None:
        if self.num_slots > MAX_SLOTS:
            raise UsageError(
                f"{self.num_slots} boosted channels of a head, but a page can name at most {MAX_SLOTS}",
                hint="lower the shares of the tiers",
            )

    @property
    def num_slots(self) -> int:
        """Channels that all tiers together have room for."""
        return sum(room for _, room, _ in self.tiers)

    @property
    def slots(self) -> tuple[slice, ...]:
        """The slots of each tier."""
        ends = itertools.accumulate(room for _, room, _ in self.tiers)
        return tuple(slice(end - room, end) for end, (_, room, _) in zip(ends, self.tiers, strict=True))

    @property
    def plane_sizes(self) -> tuple[int, ...]:
        return plane_sizes(PAGE_TOKENS, padded_channels(self.head_dim), self.num_bits)

    @property
    def high_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of each high plane of each tier; none for 16 bits."""
        return tuple(
            plane_sizes(PAGE_TOKENS, self.padded_slots(bits, room), bits - self.num_bits) if bits != RAW_BITS else ()
            for bits, room, _ in self.tiers
        )

    @property
    def raw_size(self) -> int:
        """Bytes of the values of the 16-bit tier, if there is one."""
        rooms = sum(room for bits, room, _ in self.tiers if bits == RAW_BITS)
        return rooms * PAGE_TOKENS * ITEM_BYTES[self.cache_dtype]

    @property
    def param_size(self) -> int:
        """Bytes of the scales; the zeros take as many."""
        groups = uniform.num_groups(PAGE_TOKENS, self.group_size)
        return groups * padded_channels(self.head_dim) * ITEM_BYTES[self.param_dtype]

    @property
    def record_bytes(self) -> int:
        return aligned_size(sum(self._field_sizes))

    @property
    def code_bytes(self) -> int:
        return sum(self._field_sizes[:-3])

    @property
    def _field_sizes(self) -> tuple[int, ...]:
        """Base planes, high planes of each tier, 16-bit values, scale, zero, index."""
        high = (sum(sizes) for sizes in self.high_sizes)
        return sum(self.plane_sizes), *high, self.raw_size, self.param_size, self.param_size, self.head_dim

    def macros(self, has_feedback: bool = False) -> dict[str, int]:
        offset, found = sum(self.plane_sizes), {"TIERS": len(self.tiers), "SLOTS": self.num_slots, "RAW_SLOTS": 0}
        for number, ((bits, room, above), slots, sizes) in enumerate(
            zip(self.tiers, self.slots, self.high_sizes, strict=True)
        ):
            found |= {
                f"TIER{number}_BITS": bits,
                f"TIER{number}_ROOM": room,
                f"TIER{number}_SLOT": slots.start,
                f"TIER{number}_HIGH": offset,
                f"TIER{number}_COLUMNS": 0 if bits == RAW_BITS else self.padded_slots(bits, room),
                f"TIER{number}_HAS_ABOVE": int(above is not None),
                f"TIER{number}_ABOVE": double_bits(above or 0.0),
            }
            if bits == RAW_BITS:
                found["RAW_SLOTS"] = room
            offset += sum(sizes)
        scale = offset + self.raw_size
        ends = {"RAW": offset, "SCALE": scale, "ZERO": scale + self.param_size, "INDEX": scale + 2 * self.param_size}
        return found | ends | {"BITS": self.num_bits, "RECORD": self.record_bytes}

    def encode_pages(self, x: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
        return self.encode(x, operands["scores"], operands.get("feedback"))

    def decode_pages(self, records: Tensor, num_heads: int, operands: Mapping[str, Tensor]) -> Tensor:
        return self.decode(records)

    def encode(self, x: Tensor, scores: Tensor, feedback: Tensor | None = None) -> Tensor:
        """Keys x [..., 128, head_dim] and their scores [..., head_dim] -> records [..., record_bytes] uint8.
        ``feedback``: the factor of the heads n of x [..., n, 128, head_dim] (kvcal.pages.error_feedback), or
        None."""
        index, channels = self._select(scores)
        parts = [self._quantize(x.masked_fill((index != NO_SLOT).unsqueeze(-2), 0.0), self.num_bits)]
        for (bits, _, _), slots in zip(self.tiers, self.slots, strict=True):
            values = _take(x, channels[..., slots])
            if bits == RAW_BITS:
                parts.append(self._quantize(torch.zeros_like(values), self.num_bits))  # code, scale and zero of 0
            else:
                parts.append(self._quantize(values, bits))
        every = torch.arange(self.head_dim, device=x.device)
        source = torch.where(index == NO_SLOT, every, self.head_dim + index)
        codes, scale, zero = (_gather(torch.cat(tensors, dim=-1), source) for tensors in zip(*parts, strict=True))
        if feedback is not None:
            step, start = (uniform.expand_groups(params, self.group_size, -2, PAGE_TOKENS) for params in (scale, zero))
            levels = self._levels(index).unsqueeze(-2)
            codes, x = round_with_feedback(x, step, start, levels, feedback, CACHE_DTYPES[self.cache_dtype])
        high, raw = [], []
        for (bits, _, _), slots in zip(self.tiers, self.slots, strict=True):
            if bits == RAW_BITS:
                raw.append(self._raw_bytes(_take(x, channels[..., slots])))
            else:
                above = _take(codes, channels[..., slots]) >> self.num_bits
                padded = (0, self.padded_slots(bits, above.shape[-1]) - above.shape[-1])
                high += pack_planes(torch.nn.functional.pad(above, padded), bits - self.num_bits)
        padding = (0, padded_channels(self.head_dim) - self.head_dim)
        low = torch.nn.functional.pad(codes & (2**self.num_bits - 1), padding)
        params = [torch.nn.functional.pad(p, padding).view(torch.uint8).flatten(-2) for p in (scale, zero)]
        return join_fields([*pack_planes(low, self.num_bits), *high, *raw, *params, index.to(torch.uint8)])

    def decode(self, records: Tensor) -> Tensor:
        """Records [..., record_bytes] -> keys [..., 128, head_dim] fp32."""
        planes, *high, raw, scale, zero, index, _ = self._split(records)
        codes = unpack_planes(planes, PAGE_TOKENS, padded_channels(self.head_dim), self.num_bits)[..., : self.head_dim]
        slot_of = index.to(torch.int64)
        boosted = [self._high_codes(*tier[:2], packed) for tier, packed in zip(self.tiers, high, strict=True)]
        nothing = codes.new_zeros(*codes.shape[:-1], 1)
        above = _gather(torch.cat([*boosted, nothing], dim=-1), slot_of.clamp(max=self.num_slots))
        codes = codes + (above << self.num_bits)
        scale, zero = (
            field.contiguous().view(PARAM_DTYPES[self.param_dtype]).unflatten(-1, (-1, padded_channels(self.head_dim)))
            for field in (scale, zero)
        )
        values = uniform.dequantize(codes, scale[..., : self.head_dim], zero[..., : self.head_dim], self.group_size, -2)
        if not self.raw_size:
            return values
        stored = raw.contiguous().view(CACHE_DTYPES[self.cache_dtype]).unflatten(-1, (-1, PAGE_TOKENS))
        every = torch.arange(self.head_dim, device=records.device)
        # Tiers run from most bits to fewest, so 16-bit slots are the first ones.
        source = torch.where(slot_of < stored.shape[-2], self.head_dim + slot_of, every)
        return _gather(torch.cat([values, stored.float().transpose(-1, -2)], dim=-1), source)

    def _bits(self, index: Tensor) -> Tensor:
        """Slots of channels int64 -> their bits."""
        bits = index.new_full((NO_SLOT + 1,), self.num_bits)
        for (tier_bits, _, _), slots in zip(self.tiers, self.slots, strict=True):
            bits[slots] = tier_bits
        return bits[index]

    def _levels(self, index: Tensor) -> Tensor:
        """Slots of channels int64 -> the largest code of each, fp32; 0 for 16 bits, which have none."""
        bits = self._bits(index)
        return torch.where(bits == RAW_BITS, 0.0, 2.0**bits - 1)

    def _split(self, records: Tensor) -> tuple[Tensor, ...]:
        """The fields of ``_field_sizes``, then the padding."""
        return records.split([*self._field_sizes, self.record_bytes - sum(self._field_sizes)], dim=-1)

    def _select(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [..., D] -> slot of every channel [..., D], NO_SLOT for none, and channel of every slot
        [..., num_slots], -1 where it stays empty; both int64."""
        require_finite(
            scores,
            "keys cannot be quantized: the score of a channel is NaN or infinite",
            hint="check the model's outputs: keys, or queries, are not finite",
        )
        # The lower channel first on ties. Taken channels are always the first ones in this order.
        order = torch.argsort(scores, dim=-1, descending=True, stable=True)
        rank = torch.arange(self.head_dim, device=scores.device)
        taken = order.new_zeros(*order.shape[:-1], 1)
        slot_at = order.new_full(order.shape, NO_SLOT)
        for (_, room, above), slots in zip(self.tiers, self.slots, strict=True):
            eligible = self.head_dim if above is None else (scores > above).sum(-1, keepdim=True)
            count = (eligible - taken).clamp(0, room)
            inside = (rank >= taken) & (rank < taken + count)
            slot_at = torch.where(inside, rank - taken + slots.start, slot_at)
            taken = taken + count
        index = torch.empty_like(order).scatter_(-1, order, slot_at)
        channels = order.new_full((*order.shape[:-1], self.num_slots + 1), -1)
        channels.scatter_(-1, slot_at.clamp(max=self.num_slots), order)  # the last place gathers the rest
        return index, channels[..., : self.num_slots]

    def _quantize(self, x: Tensor, num_bits: int) -> tuple[Tensor, Tensor, Tensor]:
        return uniform.quantize(x, num_bits, self.group_size, -2, PARAM_DTYPES[self.param_dtype])

    def padded_slots(self, num_bits: int, room: int) -> int:
        """Columns of the tier's high planes: whole bytes in every row of each."""
        per_byte = 8 // min(packing.plane_widths(num_bits - self.num_bits))
        return -(-room // per_byte) * per_byte

    def _high_codes(self, num_bits: int, room: int, packed: Tensor) -> Tensor:
        """High planes of a tier -> [..., 128, room]; zeros for 16 bits, whose ``packed`` is empty."""
        if num_bits == RAW_BITS:
            return packed.new_zeros(*packed.shape[:-1], PAGE_TOKENS, room)
        columns = self.padded_slots(num_bits, room)
        return unpack_planes(packed, PAGE_TOKENS, columns, num_bits - self.num_bits)[..., :room]

    def _raw_bytes(self, values: Tensor) -> Tensor:
        """Values [..., 128, room] of the 16-bit tier, any float dtype -> [..., raw_size] uint8."""
        stored = values.to(CACHE_DTYPES[self.cache_dtype])
        require_finite(
            stored,
            f"keys cannot be stored: a 16-bit channel holds NaN, infinity, or a value beyond {self.cache_dtype}",
            hint="check the model's outputs",
        )
        by_slot = stored.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
        return by_slot.view(torch.uint8).flatten(-2)


def _take(x: Tensor, channels: Tensor) -> Tensor:
    """Channels [..., n] of x [..., 128, D] -> [..., 128, n], zero where the channel is -1."""
    return _gather(x, channels.clamp(min=0)).masked_fill((channels < 0).unsqueeze(-2), 0.0)


def _gather(x: Tensor, columns: Tensor) -> Tensor:
    """Columns [..., n] of x [..., rows, columns], the same for every row -> [..., rows, n]."""
    return x.gather(-1, columns.unsqueeze(-2).expand(*x.shape[:-1], columns.shape[-1]))
