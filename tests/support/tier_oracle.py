"""An independent oracle of pages whose channels have different bits: selection, values and record, by Python
loops."""

import functools
from dataclasses import dataclass

import oracles
import torch
from torch import Tensor

from kvcal.plan.page_format import Format
from kvcal.systems.kitty.scores import channel_scores
from kvcal.systems.kitty.tiered import TieredLayout

NO_SLOT = 255
Tiers = tuple[tuple[int, int, float | None], ...]


def slots_by_tier(scores: list[float], tiers: Tiers) -> list[dict[int, int]]:
    """For each tier, slot -> channel. The best channel left goes first, the lower one on ties."""
    left = sorted(range(len(scores)), key=lambda channel: (-scores[channel], channel))
    found, first = [], 0
    for _, room, above in tiers:
        fit = [channel for channel in left if above is None or scores[channel] > above][:room]
        left = [channel for channel in left if channel not in fit]
        found.append({first + i: channel for i, channel in enumerate(fit)})
        first += room
    return found


@dataclass
class OraclePage:
    """One page [128, D] of keys, as it must be stored and read back."""

    page: Tensor
    scores: list[float]
    base_bits: int
    tiers: Tiers
    group_size: int
    param_dtype: str = "float16"
    cache_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self.values = self.page.float().tolist()
        self.head_dim = self.page.shape[1]
        self.slots = slots_by_tier(self.scores, self.tiers)
        self.bits = [self.base_bits] * self.head_dim
        self.index = [NO_SLOT] * self.head_dim
        for (bits, _, _), slots in zip(self.tiers, self.slots, strict=True):
            for slot, channel in slots.items():
                self.bits[channel], self.index[channel] = bits, slot
        groups = oracles.PAGE // self.group_size
        self.codes = [[0] * self.head_dim for _ in range(oracles.PAGE)]
        self.scales, self.zeros = ([[0.0] * self.head_dim for _ in range(groups)] for _ in range(2))
        for channel in range(self.head_dim):
            if self.bits[channel] < 16:
                for group in range(groups):
                    self._quantize(group, channel)

    def _quantize(self, group: int, channel: int) -> None:
        tokens = range(group * self.group_size, (group + 1) * self.group_size)
        members = [self.values[token][channel] for token in tokens]
        codes, scale, zero = oracles.quantize_group(members, self.bits[channel], self.param_dtype)
        self.scales[group][channel], self.zeros[group][channel] = scale, zero
        for token, code in zip(tokens, codes, strict=True):
            self.codes[token][channel] = code

    @property
    def decoded(self) -> Tensor:
        """[128, D] fp32."""
        out = [
            [
                value
                if self.bits[channel] == 16
                else oracles.dequantize_code(
                    self.codes[token][channel],
                    self.scales[token // self.group_size][channel],
                    self.zeros[token // self.group_size][channel],
                )
                for channel, value in enumerate(row)
            ]
            for token, row in enumerate(self.values)
        ]
        return torch.tensor(out, dtype=torch.float32)

    @property
    def record(self) -> bytes:
        """base planes | high planes | 16-bit values | scale | zero | index | padding."""
        padded = -(-self.head_dim // 16) * 16
        base = [row + [0] * (padded - self.head_dim) for row in self.codes]
        record = _planes(base, 0, self.base_bits)
        raw, first = b"", 0
        for (bits, room, _), slots in zip(self.tiers, self.slots, strict=True):
            if bits == 16:
                for slot in range(first, first + room):
                    column = [row[slots[slot]] if slot in slots else 0.0 for row in self.values]
                    raw += b"".join(oracles.param_bytes(value, self.cache_dtype) for value in column)
            else:
                columns = range(first, first + -(-room // 4) * 4)
                codes = [[row[slots[slot]] if slot in slots else 0 for slot in columns] for row in self.codes]
                record += _planes(codes, self.base_bits, bits)
            first += room
        record += raw
        for params in (self.scales, self.zeros):
            for row in params:
                padding = [0.0] * (padded - self.head_dim)
                record += b"".join(oracles.param_bytes(value, self.param_dtype) for value in row + padding)
        record += bytes(self.index)
        return record + b"\0" * (-len(record) % 16)


class BoostedHead(oracles.StoredHead):
    """One head of keys whose pages have channels of different bits, chosen by the keys alone."""

    @functools.cache  # noqa: B019
    def page(self, number: int) -> OraclePage:
        fmt, tokens = self.fmt, self.page_tokens(number)
        scores, cache_dtype = channel_scores(fmt.boost.score, tokens), str(tokens.dtype).removeprefix("torch.")
        tiers = tiers_of(fmt, tokens.shape[1])
        return OraclePage(tokens, scores.tolist(), fmt.num_bits, tiers, fmt.group_size, fmt.param_dtype, cache_dtype)

    def decoded(self, page: int) -> Tensor:
        return self.page(page).decoded

    def record(self, page: int, side: str) -> bytes:
        return self.page(page).record


def tiers_of(fmt: Format, head_dim: int) -> Tiers:
    return tuple((tier.num_bits, max(1, round(tier.share * head_dim)), tier.above) for tier in fmt.boost.tiers)


def _planes(codes: list[list[int]], low: int, high: int) -> bytes:
    """Bits low ... high - 1 of the codes, two bits a plane."""
    return b"".join(
        oracles.packed_plane([[code >> shift & 3 for code in row] for row in codes], 2) for shift in range(low, high, 2)
    )


def record_bytes(
    base_bits: int, tiers: Tiers, group_size: int, head_dim: int, param_dtype: str, cache_dtype: str
) -> int:
    """Bytes of a record, by arithmetic."""
    padded = -(-head_dim // 16) * 16
    size = 128 * padded * base_bits // 8 + head_dim
    size += 2 * (128 // group_size) * padded * oracles.ITEM_BYTES[param_dtype]
    for bits, room, _ in tiers:
        if bits == 16:
            size += room * 128 * oracles.ITEM_BYTES[cache_dtype]
        else:
            size += 128 * (-(-room // 4) * 4) * (bits - base_bits) // 8
    return -(-size // 16) * 16


def channel_bits(layout: TieredLayout, records: torch.Tensor) -> torch.Tensor:
    """Records [..., record_bytes] -> bits of channels [..., head_dim] int64, by the index at their ends."""
    start = sum(layout.plane_sizes) + sum(map(sum, layout.high_sizes)) + layout.raw_size + 2 * layout.param_size
    bits = torch.full((NO_SLOT + 1,), layout.num_bits)
    for (tier_bits, _, _), slots in zip(layout.tiers, layout.slots, strict=True):
        bits[slots] = tier_bits
    return bits[records[..., start : start + layout.head_dim].long()]
