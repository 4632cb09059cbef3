"""The shared asymmetric uniform quantizer (PM-KVQ Eq. 1-2, KIVI, KVmix, Kitty all use it), and its page
layout.

    z = min,  s = (max - min) / (2^b - 1),  q = clamp(round_half_even((x - z) / s), 0, 2^b - 1),  x' = q s + z

The codes are computed against the *stored* scale and zero (rounded to ``param_dtype``), so that decoding
picks the nearest representable value; a constant group, or one whose stored scale underflows to 0, gives q =
0 and x' = z. All arithmetic is fp32, one IEEE operation at a time: another device gets the same codes bit for
bit.

A page of one KV head is one record:

    planes, low bits first (see packing) | scale | zero

padded to 16 bytes. K planes have tokens as rows and channels as columns, V planes the reverse, so that in
both the columns are what attention contracts. Scale and zero are stored as [num_groups][the other axis],
which is the order in which a kernel folds them into the operand that is not the cache. Channels are padded
with zero codes to a multiple of 16, the tile of a tensor core; the padding is part of the record and of every
byte count. A 16-bit page holds the 128 x head_dim values themselves, token by token, in the cache's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvcal.geometry import CACHE_DTYPES
from kvcal.lazy_torch import Tensor, torch
from kvcal.pages import packing
from kvcal.pages.error_feedback import round_with_feedback
from kvcal.pages.layout_protocol import (
    PAGE_TOKENS,
    PARAM_DTYPES,
    RAW_BITS,
    Layout,
    aligned_size,
    join_fields,
    padded_channels,
    require_finite,
)
from kvcal.stored_tensor import ITEM_BYTES


def num_groups(length: int, group_size: int) -> int:
    """Groups that cover ``length`` values; the last one may be shorter."""
    return -(-length // group_size)


def quantize(
    x: Tensor, num_bits: int, group_size: int, dim: int, param_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups of ``group_size`` consecutive values along ``dim`` (negative), the last one as long as
    it is.

    Args:
        x: [..., C, ...] with C at ``dim``, any float dtype; converted to fp32.
    Returns:
        codes, uint8, shaped like x; scale and zero in ``param_dtype`` with num_groups(C) at ``dim``."""
    grouped = _grouped(x.float(), group_size, dim)
    # On the device, not a Python number: CUDA divides by a number as a product with its rounded reciprocal,
    # and the codes would differ from a CPU's.
    levels = grouped.new_full((), 2**num_bits - 1)
    minimum, maximum = torch.aminmax(grouped, dim=dim, keepdim=True)
    minimum, maximum = minimum + 0.0, maximum + 0.0  # which of -0 and 0 is the smaller differs between devices
    zero = minimum.to(param_dtype)
    scale = ((maximum - minimum) / levels).to(param_dtype)
    require_finite(
        scale.sum(dtype=torch.float64) + zero.sum(dtype=torch.float64),
        f"keys or values cannot be quantized: a group of {grouped.shape[dim]} values holds NaN, infinity, "
        f"or a range beyond {str(param_dtype).removeprefix('torch.')}",
        hint="check the model's outputs; a range too large for float16 fits with param_dtype = 'bfloat16'",
    )
    step = scale.float()
    steps = (grouped - zero.float()) / torch.where(step == 0, torch.inf, step)
    codes = steps.round_().clamp_(0.0, 2.0**num_bits - 1).to(torch.uint8)
    return codes.flatten(dim - 1, dim).narrow(dim, 0, x.shape[dim]), scale.squeeze(dim), zero.squeeze(dim)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, group_size: int, dim: int) -> Tensor:
    """Inverse of :func:`quantize`: codes of any numeric dtype, scale and zero with num_groups at ``dim`` ->
    fp32.

    x' = (q s) + z with both roundings: a fused multiply-add would differ between devices.
    """
    values = _grouped(codes.float(), group_size, dim)
    values = values.mul_(scale.float().unsqueeze(dim)).add_(zero.float().unsqueeze(dim))
    return values.flatten(dim - 1, dim).narrow(dim, 0, codes.shape[dim])


def expand_groups(params: Tensor, group_size: int, dim: int, length: int) -> Tensor:
    """Scale or zero of groups along ``dim`` (negative) -> fp32, one for each of the ``length`` values
    there."""
    return params.float().repeat_interleave(min(group_size, length), dim).narrow(dim, 0, length)


def _grouped(x: Tensor, group_size: int, dim: int) -> Tensor:
    """x [..., C, ...] -> [..., G, g, ...], the members g at ``dim``. A shorter last group is filled up with
    its own last value, which moves neither minimum nor maximum."""
    size = min(group_size, x.shape[dim])
    missing = -x.shape[dim] % size
    if missing:
        x = torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1).repeat_interleave(missing, dim)], dim)
    return x.unflatten(dim, (-1, size))


@dataclass(frozen=True)
class UniformLayout(Layout):
    """Shape of a page's record. ``side`` is "k" or "v"; ``axis`` is what shares no scale with its neighbour:
    "channel" groups run along tokens, "token" groups run along channels."""

    side: str
    num_bits: int
    axis: str
    group_size: int
    head_dim: int
    param_dtype: str
    cache_dtype: str
    has_zeros: ClassVar[bool] = True  # or they follow from the scales, and a record has none

    def macros(self, has_feedback: bool = False) -> dict[str, int]:
        scale, size = (0, 0) if self.num_bits == RAW_BITS else (sum(self.plane_sizes), self.param_size)
        return {"BITS": self.num_bits, "RECORD": self.record_bytes, "SCALE": scale, "ZERO": scale + size}

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
            return num_groups(PAGE_TOKENS, self.group_size), padded_channels(self.head_dim)
        return num_groups(self.head_dim, self.group_size), PAGE_TOKENS

    @property
    def plane_sizes(self) -> tuple[int, ...]:
        return packing.plane_sizes(*self._plane_shape, self.num_bits)

    @property
    def param_size(self) -> int:
        """Bytes of the scales; zeros take as many."""
        groups, others = self._param_shape
        return groups * others * ITEM_BYTES[self.param_dtype]

    @property
    def record_bytes(self) -> int:
        params = 0 if self.num_bits == RAW_BITS else (1 + self.has_zeros) * self.param_size
        return aligned_size(self.code_bytes + params)

    @property
    def code_bytes(self) -> int:
        if self.num_bits == RAW_BITS:
            return PAGE_TOKENS * self.head_dim * ITEM_BYTES[self.cache_dtype]
        return sum(self.plane_sizes)

    def encode_pages(self, x: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
        return self.encode(x, operands.get("feedback"))

    def decode_pages(self, records: Tensor, num_heads: int, operands: Mapping[str, Tensor]) -> Tensor:
        return self.decode(records)

    def encode(self, x: Tensor, feedback: Tensor | None = None) -> Tensor:
        """[..., 128, head_dim] -> records [..., record_bytes] uint8. ``feedback``: as :meth:`quantize` takes
        it."""
        if self.num_bits == RAW_BITS:
            values = x.to(CACHE_DTYPES[self.cache_dtype]).contiguous()
            return join_fields([values.view(torch.uint8).flatten(-2)])
        return self.pack(*self.quantize(x, feedback))

    def quantize(self, x: Tensor, feedback: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[..., 128, head_dim] -> codes [..., rows, columns] uint8 in the order of the planes, without padded
        channels; scale and zero as :func:`dequantize` takes them. Not for 16 bits, which have none.
        ``feedback``: the factor of the heads n of x [..., n, 128, head_dim] (kvcal.pages.error_feedback),
        None to round each value by itself."""
        param_dtype = PARAM_DTYPES[self.param_dtype]
        codes, scale, zero = quantize(self._turned(x), self.num_bits, self.group_size, self._group_dim, param_dtype)
        return (codes if feedback is None else self._feed_back(x, scale, zero, feedback)), scale, zero

    def _feed_back(self, x: Tensor, scale: Tensor, zero: Tensor, feedback: Tensor) -> Tensor:
        dim, length = self._group_dim, PAGE_TOKENS if self.axis == "channel" else self.head_dim
        step, start = (self._turned(expand_groups(params, self.group_size, dim, length)) for params in (scale, zero))
        levels = x.new_full((), 2**self.num_bits - 1, dtype=torch.float32)
        return self._turned(round_with_feedback(x, step, start, levels, feedback)[0])

    def _turned(self, x: Tensor) -> Tensor:
        """[..., 128, channels] -> in the order of the planes, and back."""
        return x if self.side == "k" else x.transpose(-1, -2)

    def pack(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Fields as :meth:`quantize` gives them -> records [..., record_bytes]."""
        rows, columns = self._plane_shape
        codes = torch.nn.functional.pad(codes, (0, columns - codes.shape[-1], 0, rows - codes.shape[-2]))
        params = [self._param_bytes(param) for param in ([scale, zero] if self.has_zeros else [scale])]
        return join_fields([*packing.pack_planes(codes, self.num_bits), *params])

    def decode(self, records: Tensor) -> Tensor:
        """Records [..., record_bytes] -> [..., 128, head_dim]: fp32 from codes, the cache's dtype from 16-bit
        pages."""
        if self.num_bits == RAW_BITS:
            dtype = CACHE_DTYPES[self.cache_dtype]
            values = records[..., : PAGE_TOKENS * self.head_dim * dtype.itemsize].contiguous().view(dtype)
            return values.unflatten(-1, (PAGE_TOKENS, self.head_dim))
        codes, scale, zero = self.fields(records)
        values = dequantize(codes, scale, zero, self.group_size, self._group_dim)
        return values if self.side == "k" else values.transpose(-1, -2)

    def fields(self, records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inverse of :meth:`pack`: codes, scale and zero of records [..., record_bytes]."""
        offset = sum(self.plane_sizes)
        codes = packing.unpack_planes(records[..., :offset], *self._plane_shape, self.num_bits)
        codes = codes[..., : self.head_dim] if self.side == "k" else codes[..., : self.head_dim, :]
        params = records[..., offset : offset + (1 + self.has_zeros) * self.param_size].contiguous()
        params = params.view(PARAM_DTYPES[self.param_dtype]).unflatten(-1, (-1, *self._param_shape))
        scale, zero = params.unbind(-3) if self.has_zeros else (params.squeeze(-3), self._zero(params.squeeze(-3)))
        if self.axis == "channel":
            scale, zero = scale[..., : self.head_dim], zero[..., : self.head_dim]
        if self._group_dim == -1:
            scale, zero = scale.transpose(-1, -2), zero.transpose(-1, -2)
        return codes, scale, zero

    def _zero(self, scale: Tensor) -> Tensor:
        """The zeros of these scales, fp32, where a record has none: codes lie around 0."""
        return scale.float() * scale.new_full((), -(2**self.num_bits - 1) / 2, dtype=torch.float32)

    def _param_bytes(self, params: Tensor) -> Tensor:
        if self._group_dim == -1:
            params = params.transpose(-1, -2)
        params = torch.nn.functional.pad(params, (0, self._param_shape[1] - params.shape[-1]))
        return params.clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten(-2)
