"""The bit layout of a plane of codes: the only definition of it; the page layouts, the kernels' loads and the
tests all point here.

A plane holds ``rows`` x ``columns`` codes of 1 or 2 bits: ``columns`` is the axis that an attention product
contracts (channels for K, tokens for V), ``rows`` is the other one. Codes of b bits are split into planes,
low bits first: b // 2 planes of 2 bits, then one of 1 bit if b is odd (3 bits = 2 + 1; 4 bits = 2 + 2, so
that a page can be halved in place).

Within a row, codes are packed little-endian along the columns: code i sits at bits [w i, w i + w) of the row.
A row is cut in four segments of equal size, one for each thread of an MMA quad. When the sizes allow it, rows
are interleaved so that the 16 bytes a thread loads hold whole segments of its own rows and nothing else:

    byte order  [block][g = 0..7][quad thread = 0..3][r = 0..R-1][segment bytes],   row = (block R + r) 8 + g

with R = 16 / segment_bytes. Then a warp's 512-byte loads give the A operands of ``mma.m16n8k16`` by AND
alone: rows g and g + 8 of a tile are two of the thread's rows, and the two halves of a 32-bit register are
columns 16 / w apart. The masks are 0x00030003 << 2e for e = 0 .. 4 (2 bits) and 0x00010001 << e for e = 0 ..
9 (1 bit): the result is an fp16 subnormal, code 2^(w e - 24). One shift of the register by 10 bits brings the
rest down. Segments of 2 bytes (1 bit at 64 columns) need one byte permute a row first, so that both halves of
a word are of one row. (The order in which columns enter the contraction is free as long as the other operand
follows it.) Where the sizes do not allow it, rows follow one another.
"""

from __future__ import annotations

import functools

from kvcal.lazy_torch import Tensor, torch

LOAD_BYTES = 16
QUAD = 4
TILE_ROWS = 8


def plane_widths(num_bits: int) -> tuple[int, ...]:
    """Widths in bits of the planes that hold codes of ``num_bits``, low bits first: 3 -> (2, 1)."""
    return (2,) * (num_bits // 2) + (1,) * (num_bits % 2)


def plane_bytes(rows: int, columns: int, width: int) -> int:
    """Bytes of one plane; ``columns`` is a multiple of 8."""
    return rows * columns * width // 8


def plane_sizes(rows: int, columns: int, num_bits: int) -> tuple[int, ...]:
    """Bytes of each plane of ``rows`` x ``columns`` codes of ``num_bits``, low bits first."""
    return tuple(plane_bytes(rows, columns, width) for width in plane_widths(num_bits))


def rows_per_load(rows: int, columns: int, width: int) -> int:
    """R of the interleaved order, or 0 where rows are stored one after the other."""
    segment, rest = divmod(columns * width, 8 * QUAD)
    if rest or segment == 0 or LOAD_BYTES % segment:
        return 0
    interleaved = LOAD_BYTES // segment
    return interleaved if rows % (TILE_ROWS * interleaved) == 0 else 0


def pack_plane(codes: Tensor, width: int) -> Tensor:
    """codes [..., rows, columns] uint8 below 2^width -> [..., plane_bytes] uint8."""
    rows, columns = codes.shape[-2:]
    per_byte = 8 // width
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    packed = (codes.unflatten(-1, (columns // per_byte, per_byte)) << shifts).sum(-1, dtype=torch.uint8)
    interleaved = rows_per_load(rows, columns, width)
    if interleaved:
        packed = packed.unflatten(-1, (QUAD, -1)).unflatten(-3, (-1, interleaved, TILE_ROWS))
        packed = packed.movedim(-4, -2)  # [block, r, g, quad, seg] -> [block, g, quad, r, seg]
        return packed.flatten(-5)
    return packed.flatten(-2)


def unpack_plane(packed: Tensor, rows: int, columns: int, width: int) -> Tensor:
    """Inverse of :func:`pack_plane`: [..., plane_bytes] uint8 -> codes [..., rows, columns] uint8."""
    interleaved = rows_per_load(rows, columns, width)
    if interleaved:
        segment = columns * width // (8 * QUAD)
        packed = packed.unflatten(-1, (-1, TILE_ROWS, QUAD, interleaved, segment)).movedim(-2, -4)
    table = _byte_table(width, packed.device)
    # One gather of 4- or 8-byte entries expands a byte into its codes: several times faster than shifts on a
    # CPU.
    expanded = torch.index_select(table, 0, packed.flatten().int()).view(torch.uint8)
    return expanded.view(*packed.shape[: -5 if interleaved else -1], rows, columns)


def pack_planes(codes: Tensor, num_bits: int) -> list[Tensor]:
    """codes [..., rows, columns] uint8 below 2^num_bits -> its planes, low bits first, each [..., bytes]
    uint8."""
    planes, shift = [], 0
    for width in plane_widths(num_bits):
        planes.append(pack_plane((codes >> shift) & (2**width - 1), width))
        shift += width
    return planes


def unpack_planes(packed: Tensor, rows: int, columns: int, num_bits: int) -> Tensor:
    """Inverse of :func:`pack_planes`, the planes one after the other [..., bytes] -> codes [..., rows,
    columns]."""
    codes, offset, shift = None, 0, 0
    for width in plane_widths(num_bits):
        size = plane_bytes(rows, columns, width)
        plane = unpack_plane(packed[..., offset : offset + size], rows, columns, width)
        codes = plane if codes is None else codes.add_(plane.mul_(1 << shift))
        offset, shift = offset + size, shift + width
    assert codes is not None
    return codes


@functools.cache
def _byte_table(width: int, device: torch.device) -> Tensor:
    """[256] int32 (width 2) or int64 (width 1): entry b holds the codes of byte b, one a byte, lowest
    first."""
    shifts = torch.arange(0, 8, width)
    codes = (torch.arange(256).unsqueeze(-1) >> shifts) & (2**width - 1)
    return codes.to(torch.uint8).view(torch.int32 if width == 2 else torch.int64).flatten().to(device)
