"""A page layout: the record of bytes of 128 tokens of some KV heads, and what all layouts (uniform.py, …)
share.

K and V pages are separate records, because windows differ between K and V (Kitty, KVmix): each side has its
own pages and its own count of them. Records are padded with zeros to 16 bytes, one load of a GPU thread.

NaN and infinity are refused, never stored (``require_finite``). To raise, the host waits for the device.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, Protocol

from kvcal.errors import NonFiniteActivations
from kvcal.lazy_torch import Dtypes, Tensor, torch
from kvcal.pages.rescale_and_rope import Transform
from kvcal.records import TensorSpec

PAGE_TOKENS: Final = 128
CHANNEL_TILE = 16
RECORD_ALIGNMENT = 16
RAW_BITS = 16
RECORDS_AT_ONCE = 128  # converted at once: bounds the scratch to a few bytes for each of their values
AXES = {"k": ("channel", "token"), "v": ("token",)}
PARAM_DTYPES = Dtypes("float16", "bfloat16", "float32", "float8_e5m2")


class Layout(Protocol):
    """The record of one page: a frozen dataclass that inherits from this one; ``Format.layout`` makes them.

    M pages of n KV heads are encoded at once; r is ``records_per_page(n)``. ``operands``: the plan's tensors
    that ``plan_tensors`` names, for tiers "scores" [M, n, D] fp64 (kvcal.systems.kitty.scores), and with error
    feedback "feedback", the factor of the n heads (kvcal.pages.error_feedback).
    """

    num_bits: int
    param_dtype: str

    @property
    def record_bytes(self) -> int: ...

    @property
    def code_bytes(self) -> int:
        """Bytes of a record that hold codes, or values at 16 bits; the others are scales, zeros, indices,
        padding."""
        ...

    def records_per_page(self, num_heads: int) -> int:
        """One record for each head, or one for all heads in a row."""
        return num_heads

    def macros(self, has_feedback: bool = False) -> dict[str, int]:
        """Macros of kernels that read these records (csrc/side.cuh): where what lies in one."""
        return {}

    def plan_tensors(self, prefix: str) -> dict[str, tuple[str, TensorSpec]]:
        """By the operand's name: the tensor's name in the plan, where ``prefix`` is layers.{i}.{side}, and
        its spec."""
        return {}

    def make_tensor(self, operand: str, seed: int) -> Tensor:
        """A tensor of ``plan_tensors``; ``seed`` is another one for every layer and side."""
        raise KeyError(operand)

    def converted(self, records: Tensor, new: Layout, transform: Transform) -> Tensor:
        """Records [..., n, record_bytes] as those of ``new``, which differs in bits alone; of layouts whose
        formats change bits. ``transform``: that of the n heads' codes."""
        raise ValueError(f"pages of {type(self).__name__} keep their bits")

    def encode_pages(self, x: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
        """x [M, n, 128, D], any float dtype -> records [M, r, record_bytes] uint8."""
        ...

    def encode_tokens(self, x: Tensor, operands: Mapping[str, Tensor], first: int) -> Tensor:
        """As :meth:`encode_pages`, of x [M, n, T, D], the tokens of a page from ``first`` on: records that are 0
        besides. Of layouts that pack by token."""
        raise ValueError(f"pages of {type(self).__name__} are packed whole")

    def token_bytes(self, first: int, stop: int) -> Tensor:
        """bool [record_bytes]: the bytes of a record that the tokens ``first`` ... ``stop`` - 1 have for
        themselves, of layouts that pack by token; both are multiples of 16."""
        raise ValueError(f"pages of {type(self).__name__} are packed whole")

    def decode_pages(self, records: Tensor, num_heads: int, operands: Mapping[str, Tensor]) -> Tensor:
        """Inverse of :meth:`encode_pages`: [M, r, record_bytes] -> [M, n, 128, D], fp32 or the cache's
        dtype."""
        ...


def padded_channels(head_dim: int) -> int:
    """Channels that a record has room for: ``head_dim`` rounded up to the tile of a tensor core."""
    return -(-head_dim // CHANNEL_TILE) * CHANNEL_TILE


def page_positions(page_index: Tensor) -> Tensor:
    """Positions of the tokens of pages ``page_index`` of their sequences: int64 [M] -> [M, 1, 128]."""
    within = torch.arange(PAGE_TOKENS, device=page_index.device)
    return (PAGE_TOKENS * page_index)[:, None, None] + within


def without_sinks(tokens: Tensor, num_sinks: int, first: int = 0, stripe_tokens: int = PAGE_TOKENS) -> Tensor:
    """tokens [..., T, D] of whole stripes, of which the first is number ``first``, as they are packed: sinks,
    which are kept next to the pages, must not stretch their ranges. So each is replaced by the first token
    after the sinks in its stripe (by the last one of the stripe, where all are sinks)."""
    if first >= num_sinks:
        return tokens
    number = torch.arange(first, first + tokens.shape[-2], device=tokens.device)
    last = number // stripe_tokens * stripe_tokens + stripe_tokens - 1
    return tokens.index_select(-2, number.maximum(last.clamp(max=num_sinks)) - first)


def aligned_size(size: int) -> int:
    """``size`` bytes rounded up to whole loads of 16 bytes."""
    return -(-size // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def double_bits(value: float) -> int:
    """An fp64 as the integer (int64) of its bits: what decides a byte is fp64, and decimals would not all be
    exact."""
    return int(struct.unpack("<q", struct.pack("<d", value + 0.0))[0])  # 0 for -0, which is no int64 literal


def join_fields(fields: list[Tensor]) -> Tensor:
    """Fields [..., bytes] uint8 of a record, in order -> the record, padded with zeros to 16 bytes."""
    record = torch.cat(fields, dim=-1)
    return torch.nn.functional.pad(record, (0, aligned_size(record.shape[-1]) - record.shape[-1]))


def sum_by_halves(x: Tensor, dim: int) -> Tensor:
    """Sum of x along ``dim``, whose size is a power of two, without it: halves are added to each other until
    one number is left, so that every device rounds alike."""
    while x.shape[dim] > 1:
        first, second = x.chunk(2, dim)
        x = first + second
    return x.squeeze(dim)


def require_finite(values: Tensor, message: str, hint: str) -> None:
    """NonFiniteActivations unless all of ``values`` are finite; of any float dtype (fp64
    far from the end of its range, as all that comes from fp32)."""
    # One sum instead of an isfinite map: a sum of finite values is finite in fp64.
    if not torch.isfinite(values.sum(dtype=torch.float64)):
        raise NonFiniteActivations(message, hint=hint)
