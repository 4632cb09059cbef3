"""One page: 128 tokens of the keys or values of one KV head, as one contiguous record of bytes.

    planes, low bits first (see packing) | scale | zero

padded to 16 bytes. K planes have tokens as rows and channels as columns, V planes the reverse, so that in both
the columns are what attention contracts. Scale and zero are stored as [num_groups][the other axis], which is the
order in which a kernel folds them into the operand that is not the cache. Channels are padded with zero codes to
a multiple of 16, the tile of a tensor core; the padding is part of the record and of every byte count.
A 16-bit page holds the 128 x head_dim values themselves, token by token, in the cache's dtype.

K and V pages are separate records, because windows differ between K and V (Kitty, KVmix): each side has its own
pages and its own count of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.pages import packing, uniform

PAGE_TOKENS = 128
CHANNEL_TILE = 16
RECORD_ALIGNMENT = 16
RAW_BITS = 16
NUM_BITS = (1, 2, 3, 4, 8, RAW_BITS)
GROUP_SIZES = (32, 64, 128)
AXES = {"k": ("channel", "token"), "v": ("token",)}
PARAM_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def padded_channels(head_dim: int) -> int:
    """Channels that a record has room for: ``head_dim`` rounded up to the tile of a tensor core."""
    return -(-head_dim // CHANNEL_TILE) * CHANNEL_TILE


def page_positions(num_sink_tokens: int, ordinals: Tensor) -> Tensor:
    """Where the tokens of pages number ``ordinals`` of their rows lie in these: int64 [M] -> [M, 1, 128]."""
    within = torch.arange(PAGE_TOKENS, device=ordinals.device)
    return (num_sink_tokens + PAGE_TOKENS * ordinals)[:, None, None] + within


def plane_sizes(rows: int, columns: int, num_bits: int) -> tuple[int, ...]:
    """Bytes of each plane of ``rows`` x ``columns`` codes of ``num_bits``, low bits first."""
    return tuple(packing.plane_bytes(rows, columns, width) for width in packing.plane_widths(num_bits))


def pack_planes(codes: Tensor, num_bits: int) -> list[Tensor]:
    """codes [..., rows, columns] uint8 below 2^num_bits -> its planes, low bits first, each [..., bytes] uint8."""
    planes, shift = [], 0
    for width in packing.plane_widths(num_bits):
        planes.append(packing.pack_plane((codes >> shift) & (2**width - 1), width))
        shift += width
    return planes


def unpack_planes(packed: Tensor, rows: int, columns: int, num_bits: int) -> Tensor:
    """Inverse of :func:`pack_planes`, the planes one after the other [..., bytes] -> codes [..., rows, columns]."""
    codes, offset, shift = None, 0, 0
    for width in packing.plane_widths(num_bits):
        size = packing.plane_bytes(rows, columns, width)
        plane = packing.unpack_plane(packed[..., offset : offset + size], rows, columns, width)
        codes = plane if codes is None else codes.add_(plane.mul_(1 << shift))
        offset, shift = offset + size, shift + width
    assert codes is not None
    return codes


def aligned_size(size: int) -> int:
    """``size`` bytes rounded up to whole loads of 16 bytes."""
    return -(-size // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def join_fields(fields: list[Tensor]) -> Tensor:
    """Fields [..., bytes] uint8 of a record, in order -> the record, padded with zeros to 16 bytes."""
    record = torch.cat(fields, dim=-1)
    return torch.nn.functional.pad(record, (0, aligned_size(record.shape[-1]) - record.shape[-1]))


@dataclass(frozen=True)
class PageLayout:
    """Shape of a page's record. ``side`` is "k" or "v"; ``axis`` is what shares no scale with its neighbour:
    "channel" groups run along tokens, "token" groups run along channels."""

    side: str
    num_bits: int
    axis: str
    group_size: int
    head_dim: int
    param_dtype: str
    cache_dtype: str

    @property
    def _plane_shape(self) -> tuple[int, int]:
        shape = (PAGE_TOKENS, padded_channels(self.head_dim))
        return shape if self.side == "k" else shape[::-1]

    @property
    def _group_dim(self) -> int:
        """The dimension of the plane along which groups run: -2 rows, -1 columns."""
        along_tokens = self.axis == "channel"
        return -2 if along_tokens == (self.side == "k") else -1

    @property
    def _param_shape(self) -> tuple[int, int]:
        """[num_groups, other axis] of scale and of zero."""
        if self.axis == "channel":
            return uniform.num_groups(PAGE_TOKENS, self.group_size), padded_channels(self.head_dim)
        return uniform.num_groups(self.head_dim, self.group_size), PAGE_TOKENS

    @property
    def plane_sizes(self) -> tuple[int, ...]:
        """Bytes of each plane."""
        return plane_sizes(*self._plane_shape, self.num_bits)

    @property
    def param_size(self) -> int:
        """Bytes of the scales; the zeros take as many."""
        groups, others = self._param_shape
        return groups * others * PARAM_DTYPES[self.param_dtype].itemsize

    @property
    def record_bytes(self) -> int:
        """Bytes of one page of one KV head, everything included."""
        if self.num_bits == RAW_BITS:
            size = PAGE_TOKENS * self.head_dim * CACHE_DTYPES[self.cache_dtype].itemsize
        else:
            size = sum(self.plane_sizes) + 2 * self.param_size
        return aligned_size(size)

    def encode(self, x: Tensor) -> Tensor:
        """[..., 128, head_dim] -> records [..., record_bytes] uint8.

        Raises:
            NonFiniteActivations: NaN or infinity, or a range that ``param_dtype`` cannot hold.
        """
        if self.num_bits == RAW_BITS:
            values = x.to(CACHE_DTYPES[self.cache_dtype]).contiguous()
            return join_fields([values.view(torch.uint8).flatten(-2)])
        return self.pack(*self.quantize(x))

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., 128, head_dim] -> codes [..., rows, columns] uint8 in the order of the planes, without padded channels;
        scale and zero as ``uniform.dequantize`` wants them. Not for 16 bits, which have none.

        Raises:
            NonFiniteActivations: NaN or infinity, or a range that ``param_dtype`` cannot hold.
        """
        plane_order = x if self.side == "k" else x.transpose(-1, -2)
        param_dtype = PARAM_DTYPES[self.param_dtype]
        return uniform.quantize(plane_order, self.num_bits, self.group_size, self._group_dim, param_dtype)

    def pack(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Fields as :meth:`quantize` gives them -> records [..., record_bytes]."""
        rows, columns = self._plane_shape
        codes = torch.nn.functional.pad(codes, (0, columns - codes.shape[-1], 0, rows - codes.shape[-2]))
        return join_fields([*pack_planes(codes, self.num_bits), self._param_bytes(scale), self._param_bytes(zero)])

    def decode(self, records: Tensor) -> Tensor:
        """Records [..., record_bytes] -> [..., 128, head_dim]: fp32 from codes, the cache's dtype from 16-bit pages."""
        if self.num_bits == RAW_BITS:
            dtype = CACHE_DTYPES[self.cache_dtype]
            values = records[..., : PAGE_TOKENS * self.head_dim * dtype.itemsize].contiguous().view(dtype)
            return values.unflatten(-1, (PAGE_TOKENS, self.head_dim))
        codes, scale, zero = self.fields(records)
        values = uniform.dequantize(codes, scale, zero, self.group_size, self._group_dim)
        return values if self.side == "k" else values.transpose(-1, -2)

    def fields(self, records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inverse of :meth:`pack`: codes, scale and zero of records [..., record_bytes]."""
        offset = sum(self.plane_sizes)
        codes = unpack_planes(records[..., :offset], *self._plane_shape, self.num_bits)
        codes = codes[..., : self.head_dim] if self.side == "k" else codes[..., : self.head_dim, :]
        params = records[..., offset : offset + 2 * self.param_size].contiguous()
        scale, zero = params.view(PARAM_DTYPES[self.param_dtype]).unflatten(-1, (2, *self._param_shape)).unbind(-3)
        if self.axis == "channel":
            scale, zero = scale[..., : self.head_dim], zero[..., : self.head_dim]
        if self._group_dim == -1:
            scale, zero = scale.transpose(-1, -2), zero.transpose(-1, -2)
        return codes, scale, zero

    def _param_bytes(self, params: Tensor) -> Tensor:
        if self._group_dim == -1:
            params = params.transpose(-1, -2)
        params = torch.nn.functional.pad(params, (0, self._param_shape[1] - params.shape[-1]))
        return params.contiguous().view(torch.uint8).flatten(-2)
