"""The bit layout: against a scalar oracle, and against what mma.m16n8k16 wants of it."""

import itertools

import oracles
import pytest
import torch

from kvcal.pages import packing

SHAPES = (
    [(128, dim) for dim in (16, 32, 64, 80, 96, 128, 256)]
    + [(dim, 128) for dim in (16, 32, 80, 256)]
    + [(1, 8), (3, 24)]
)


def random_codes(rows: int, columns: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randint(0, 2**width, (rows, columns), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_bytes_equal_the_scalar_oracle_and_read_back(rows, columns, width):
    codes = random_codes(rows, columns, width)
    packed = packing.pack_plane(codes, width)
    assert packed.shape == (packing.plane_bytes(rows, columns, width),) == (rows * columns * width // 8,)
    assert bytes(packed.tolist()) == oracles.packed_plane(codes.tolist(), width)
    assert torch.equal(packing.unpack_plane(packed, rows, columns, width), codes)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (128, 80)])
def test_leading_dimensions_are_packed_independently(rows, columns, width):
    codes = torch.stack([random_codes(rows, columns, width), random_codes(rows, columns, width).flip(0)])
    codes = codes.unsqueeze(1).expand(2, 3, rows, columns)
    packed = packing.pack_plane(codes, width)
    for index in range(2):
        assert torch.equal(packed[index, 1], packing.pack_plane(codes[index, 0], width))
    assert torch.equal(packing.unpack_plane(packed, rows, columns, width), codes)
    assert torch.equal(packing.unpack_plane(packed[:, 1:], rows, columns, width), codes[:, 1:])


@pytest.mark.parametrize(("num_bits", "widths"), [(1, (1,)), (2, (2,)), (3, (2, 1)), (4, (2, 2)), (8, (2, 2, 2, 2))])
def test_codes_are_cut_in_planes_low_bits_first(num_bits, widths):
    assert packing.plane_widths(num_bits) == widths
    assert sum(widths) == num_bits


# Planes that a K page (tokens x channels) or a V page (channels x tokens) of common head sizes has.
INTERLEAVED = [(128, 256, 2), (128, 128, 2), (128, 64, 2), (128, 128, 1), (128, 256, 1)]
INTERLEAVED += [(16, 128, 2), (64, 128, 2), (80, 128, 2), (256, 128, 2), (64, 128, 1), (96, 128, 1)]
# Segments of two bytes: halves of a word are different rows, until one byte permute has spread a row over a
# word.
PERMUTED = [(128, 64, 1), (128, 32, 2)]
Code = tuple[int, int]
Word = tuple[list[Code], list[Code]]  # codes of the low and of the high half, lowest bits first


@pytest.mark.parametrize(("rows", "columns", "width"), INTERLEAVED + PERMUTED)
def test_loads_hold_the_fragments_of_an_mma(rows, columns, width):
    """Lane 4 g + t loads 16 bytes; AND masks cut its words into A operands of m16n8k16.

    The fragment wants of lane (g, t): registers 0 and 2 of row g, 1 and 3 of row g + 8, two columns each;
    these columns are the same for all g. Tiles of 16 rows x 16 columns cover the plane exactly once.
    """
    code_at = {
        oracles.bit_position(row, column, rows, columns, width): (row, column)
        for row, column in itertools.product(range(rows), range(columns))
    }
    segment = columns * width // 32
    lanes = [[_words_by_row(code_at, segment, width, 4 * g + t) for t in range(4)] for g in range(8)]
    codes_per_half = len(lanes[0][0][0][0][0])
    covered: set[Code] = set()
    for upper in range(0, rows // 8, 2):  # rows upper * 8 + g and the next of the thread's rows, 8 further on
        for word in range(len(lanes[0][0][upper])):
            for e in range(0, codes_per_half, 2):  # two masks make the fragment's two register pairs
                tile = _check_fragment(lanes, upper, word, (e, e + 1))
                assert not tile & covered
                covered |= tile
    assert len(covered) == rows * columns


def _words_by_row(code_at: dict[tuple[int, int], Code], segment: int, width: int, lane: int) -> list[list[Word]]:
    """The words that a lane's loads of 16 bytes bring in, as the words of its first row, of its second, and so on."""
    half_bytes = min(segment // 2, 2)
    by_row = []
    for load in range(len(code_at) * width // 8 // 512):
        first = load * 512 + lane * 16
        for row_start in range(first, first + 16, segment):
            halves = [
                [code_at[start + bit // 8, bit % 8] for bit in range(0, 8 * half_bytes, width)]
                for start in range(row_start, row_start + segment, half_bytes)
            ]
            by_row.append(list(zip(halves[::2], halves[1::2], strict=True)))
    return by_row


def _check_fragment(lanes: list[list[list[list[Word]]]], upper: int, word: int, masks: tuple[int, int]) -> set[Code]:
    """Asserts what m16n8k16 needs of four registers a lane; returns the 256 codes of the tile."""
    columns_of: dict[tuple[int, int], tuple[int, int]] = {}
    tile = set()
    for g, quad in enumerate(lanes):
        for t, lane in enumerate(quad):
            for mask, half_row in itertools.product(masks, (0, 1)):
                (low, high) = (half[mask] for half in lane[upper + half_row][word])
                assert low[0] == high[0] == (upper + half_row) * 8 + g
                expected = columns_of.setdefault((t, mask), (low[1], high[1]))
                assert (low[1], high[1]) == expected  # the other operand has one order of columns for all rows
                tile |= {low, high}
    assert len(tile) == 256 and len({row for row, _ in tile}) == len({column for _, column in tile}) == 16
    return tile


@pytest.mark.parametrize(("width", "mask", "unshifted"), [(2, 0x00030003, 5), (1, 0x00010001, 10)])
def test_a_masked_code_is_an_fp16_subnormal(width, mask, unshifted):
    """word AND (mask << width e), read as two fp16 numbers, is code 2^(width e - 24) as long as the bits stay
    below the exponent field; one shift by 10 bits brings the others there."""
    words = packing.pack_plane(random_codes(128, 128, width), width).view(torch.int32)
    for position in range(16 // width):
        shift, e = (0, position) if position < unshifted else (10, position - unshifted)
        halves = ((words >> shift) & (mask << width * e)).view(torch.float16).double().view(-1, 2)
        codes = [(words >> (16 * half + width * position)) & (2**width - 1) for half in (0, 1)]
        assert torch.equal(halves, torch.stack(codes, 1).double() * 2.0 ** (width * e - 24))


@pytest.mark.parametrize(
    ("rows", "columns", "width", "expected"),
    [(128, 128, 2, 2), (128, 64, 2, 4), (128, 16, 2, 16), (128, 256, 2, 1), (128, 80, 2, 0), (128, 96, 1, 0)]
    + [(16, 128, 2, 2), (16, 128, 1, 0), (128, 16, 1, 0), (128, 512, 2, 0)],
)
def test_rows_per_load(rows, columns, width, expected):
    assert packing.rows_per_load(rows, columns, width) == expected
