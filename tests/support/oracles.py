"""Independent oracles: the quantizer, the bit layout and the record, written from their specifications with
Python loops over numbers, so that no tensor operation of the package is trusted.

A Python float is an IEEE fp64; rounding the fp64 result of one +, -, * or / to fp32 gives the fp32 operation
exactly, because 53 >= 2 * 24 + 2 bits.
"""

import math
import struct

import torch
from torch import Tensor

PAGE = 128
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def to_float32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def to_param(x: float, param_dtype: str) -> float:
    """An fp32 number rounded to nearest even in ``param_dtype``; OverflowError beyond its range."""
    if param_dtype == "float32":
        return x
    if param_dtype == "float16":
        return struct.unpack("<e", struct.pack("<e", x))[0]
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    rounded = struct.unpack("<f", struct.pack("<I", bits))[0]
    if math.isinf(rounded):
        raise OverflowError(x)
    return rounded


def quantize_group(values: list[float], num_bits: int, param_dtype: str = "float32") -> tuple[list[int], float, float]:
    """codes, scale and zero of one group of fp32 numbers."""
    levels = 2**num_bits - 1
    low, high = min(values), max(values)
    zero = to_param(low, param_dtype)
    scale = to_param(to_float32(to_float32(high - low) / levels), param_dtype)
    if scale == 0:
        return [0] * len(values), scale, zero
    # round() is half to even
    codes = [round(to_float32(to_float32(x - zero) / scale)) for x in values]
    return [min(max(code, 0), levels) for code in codes], scale, zero


def dequantize_code(code: int, scale: float, zero: float) -> float:
    return to_float32(to_float32(code * scale) + zero)


def group_members(page: Tensor, axis: str, group_size: int) -> list[tuple[list[tuple[int, int]], int, int]]:
    """Groups of a page [tokens, channels]: ((token, channel) of members, group number, other index)."""
    num_tokens, num_channels = page.shape
    along, others = (num_tokens, num_channels) if axis == "channel" else (num_channels, num_tokens)
    groups = []
    for start in range(0, along, group_size):
        inside = range(start, min(start + group_size, along))
        for other in range(others):
            members = [(i, other) if axis == "channel" else (other, i) for i in inside]
            groups.append((members, start // group_size, other))
    return groups


def quantized_page(page: Tensor, num_bits: int, axis: str, group_size: int, param_dtype: str) -> Tensor:
    """page [tokens, channels] as it reads back after being quantized once, fp32."""
    values = page.float().tolist()
    out = [[0.0] * page.shape[1] for _ in values]
    for members, _, _ in group_members(page, axis, group_size):
        codes, scale, zero = quantize_group([values[t][c] for t, c in members], num_bits, param_dtype)
        for (token, channel), code in zip(members, codes, strict=True):
            out[token][channel] = dequantize_code(code, scale, zero)
    return torch.tensor(out, dtype=torch.float32)


def widths(num_bits: int) -> list[int]:
    """Plane widths, low bits first."""
    return {1: [1], 2: [2], 3: [2, 1], 4: [2, 2], 8: [2, 2, 2, 2]}[num_bits]


def bit_position(row: int, column: int, rows: int, columns: int, width: int) -> tuple[int, int]:
    """(byte, lowest bit) of code (row, column) in a plane.

    A row is columns * width bits, little-endian, cut in four segments. Where R whole segments make 16 bytes
    and 8 R divides the rows, the byte order is [block][g][quad thread][r][segment bytes] with row = (block R
    + r) 8 + g.
    """
    row_bytes = columns * width // 8
    byte_in_row, bit = column * width // 8, column * width % 8
    if row_bytes % 4 == 0 and row_bytes // 4 > 0 and 16 % (row_bytes // 4) == 0:
        segment = row_bytes // 4
        per_load = 16 // segment
        if rows % (8 * per_load) == 0:
            g, block_r = row % 8, row // 8
            r, block = block_r % per_load, block_r // per_load
            thread, within = divmod(byte_in_row, segment)
            return (((block * 8 + g) * 4 + thread) * per_load + r) * segment + within, bit
    return row * row_bytes + byte_in_row, bit


def packed_plane(codes: list[list[int]], width: int) -> bytes:
    rows, columns = len(codes), len(codes[0])
    packed = bytearray(rows * columns * width // 8)
    for row in range(rows):
        for column in range(columns):
            byte, bit = bit_position(row, column, rows, columns, width)
            packed[byte] |= codes[row][column] << bit
    return bytes(packed)


def param_bytes(value: float, param_dtype: str) -> bytes:
    if param_dtype == "bfloat16":
        return struct.pack("<f", value)[2:]
    return struct.pack("<e" if param_dtype == "float16" else "<f", value)


def page_record(
    page: Tensor, side: str, num_bits: int, axis: str, group_size: int, param_dtype: str, cache_dtype: str
) -> bytes:
    """The record of one page [128, D] of one head, byte by byte."""
    dim = page.shape[1]
    if num_bits == 16:
        item = [param_bytes(value, cache_dtype) for token in page.float().tolist() for value in token]
        return _aligned(b"".join(item))
    padded, values = -(-dim // 16) * 16, page.float().tolist()
    codes = [[0] * padded for _ in range(PAGE)]
    num_groups = -(-(PAGE if axis == "channel" else dim) // group_size)
    others = padded if axis == "channel" else PAGE
    scales, zeros = ([[0.0] * others for _ in range(num_groups)] for _ in range(2))
    for members, group, other in group_members(page, axis, group_size):
        found, scale, zero = quantize_group([values[t][c] for t, c in members], num_bits, param_dtype)
        scales[group][other], zeros[group][other] = scale, zero
        for (token, channel), code in zip(members, found, strict=True):
            codes[token][channel] = code
    if side == "v":
        codes = [list(column) for column in zip(*codes, strict=True)]
    record, shift = b"", 0
    for width in widths(num_bits):
        record += packed_plane([[code >> shift & 2**width - 1 for code in row] for row in codes], width)
        shift += width
    for params in (scales, zeros):
        record += b"".join(param_bytes(value, param_dtype) for row in params for value in row)
    return _aligned(record)


def record_bytes(
    num_bits: int, side: str, axis: str, group_size: int, dim: int, param_dtype: str, cache_dtype: str
) -> int:
    """Bytes of a page's record, as docs/plan-format.md gives them (``side`` does not matter)."""
    if num_bits == 16:
        size = PAGE * dim * ITEM_BYTES[cache_dtype]
    else:
        padded = 16 * math.ceil(dim / 16)
        params = math.ceil(PAGE / group_size) * padded if axis == "channel" else math.ceil(dim / group_size) * PAGE
        size = PAGE * padded * num_bits // 8 + 2 * params * ITEM_BYTES[param_dtype]
    return 16 * math.ceil(size / 16)


def _aligned(record: bytes) -> bytes:
    return record + b"\0" * (-len(record) % 16)


def pages_read(num_tokens: int, recent_window: int) -> int:
    """Pages that are read after ``num_tokens``: each once all of its tokens have left the window."""
    pages = 0
    for count in range(num_tokens + 1):
        if count - recent_window >= PAGE * (pages + 1):
            pages += 1
    return pages


class StoredHead:
    """The tokens that one head must read back: ``original`` [T, D] in the cache's dtype, ``fmt`` a Format."""

    def __init__(self, original: Tensor, fmt) -> None:
        self.original, self.fmt = original, fmt
        self.pages: dict[int, Tensor] = {}

    def page_tokens(self, page: int) -> Tensor:
        """[128, D]: tokens 128 p ... 128 p + 127; the first one after the sinks stands for them."""
        tokens = []
        for token in range(PAGE * page, PAGE * (page + 1)):
            while token < self.fmt.num_sink_tokens and token % PAGE < PAGE - 1:
                token += 1
            tokens.append(self.original[token])
        return torch.stack(tokens)

    def decoded(self, page: int) -> Tensor:
        """[128, D] fp32: the page as it reads back."""
        fmt, values = self.fmt, self.page_tokens(page)
        if fmt.num_bits == 16:
            return values.float()
        return quantized_page(values, fmt.num_bits, fmt.axis, fmt.group_size, fmt.param_dtype)

    def record(self, page: int, side: str) -> bytes:
        fmt, cache_dtype = self.fmt, str(self.original.dtype).removeprefix("torch.")
        values = self.page_tokens(page)
        return page_record(values, side, fmt.num_bits, fmt.axis, fmt.group_size, fmt.param_dtype, cache_dtype)

    def after(self, num_tokens: int, read: int | None = None) -> Tensor:
        """[num_tokens, D] fp32: sinks raw, pages quantized once from the original values, recent tokens raw.
        ``read``: the pages that are read, where the window is not a fixed one."""
        fmt, found = self.fmt, self.original[:num_tokens].float().clone()
        for page in range(pages_read(num_tokens, fmt.recent_window) if read is None else read):
            if page not in self.pages:
                self.pages[page] = self.decoded(page)
            first = max(fmt.num_sink_tokens, PAGE * page)
            if first < PAGE * (page + 1):
                found[first : PAGE * (page + 1)] = self.pages[page][first - PAGE * page :]
        return found
