"""Points of a lattice for each head, against loops in fp64: the grid, what a record's bits stand for, which points are
nearest, and their error."""

from __future__ import annotations

import pytest
import torch
from test_rotated import matrix, tokens

from kvcal.errors import UsageError
from kvcal.kernels.variants import side_defines
from kvcal.pages.grids import nearest_point
from kvcal.pages.hadamard import random_signs
from kvcal.pages.packing import unpack_plane
from kvcal.pages.rotated_lattice import LEVELS, POINTS, STEP, RotatedLatticeLayout, X, Y
from kvcal.plan.page_format import Format

SIZES = [("k", 128, 128), ("v", 32, 96), ("k", 64, 80), ("v", 128, 24), ("k", 128, 8)]


def layout_of(side: str, group_size: int, head_dim: int) -> RotatedLatticeLayout:
    return RotatedLatticeLayout(side, 2, "token", group_size, head_dim, "float16", "bfloat16")


def test_coordinates_are_the_means_of_what_is_nearest_to_them() -> None:
    """Lloyd's condition, of a coordinate that two points share: it moves by less than half a step."""
    points = (torch.tensor(POINTS) - LEVELS / 2) * STEP
    x = torch.randn(2**20, 2, generator=torch.Generator().manual_seed(1))
    index = nearest_point(x, points).int()
    for axis, shared, table in ((0, index & 7, X), (1, index >> 1, Y)):
        means = torch.zeros(8).index_add_(0, shared, x[:, axis]) / torch.bincount(shared, minlength=8)
        assert (means / STEP + LEVELS / 2 - torch.tensor(list(table))).abs().max() < 0.6


@pytest.mark.parametrize(("side", "group_size", "head_dim"), SIZES)
def test_a_page_holds_the_nearest_points_around_0(side: str, group_size: int, head_dim: int) -> None:
    layout, signs, x = layout_of(side, group_size, head_dim), random_signs(head_dim, 3), tokens(head_dim)
    records = layout.encode_pages(x, {"signs": signs})
    assert (
        records.shape[-1]
        == layout.record_bytes
        < Format(2, group_size=group_size).layout(side, 1, head_dim, "bfloat16", 2).record_bytes
    )
    found = layout.decode_pages(records, 2, {"signs": signs})
    turn, points = matrix(head_dim, signs), torch.tensor(POINTS).double() - LEVELS / 2
    rotated = (turn @ x.double().transpose(1, 2)).transpose(1, 2).bfloat16().double()
    groups = [slice(start, start + group_size) for start in range(0, head_dim, group_size)]
    scale = torch.cat(
        [
            (STEP * rotated[..., g].square().mean(-1, keepdim=True).sqrt()).half().expand_as(rotated[..., g])
            for g in groups
        ],
        dim=-1,
    ).double()
    for head, token in ((0, 0), (1, 77), (0, 126)):
        kept = torch.zeros(head_dim, dtype=torch.float64)
        for channel in range(head_dim):
            # Two neighbours: channels of a key, tokens of a value.
            first = (token, channel // 2 * 2) if side == "k" else (token // 2 * 2, channel)
            pair = [first, (first[0], first[1] + 1) if side == "k" else (first[0] + 1, first[1])]
            steps = torch.stack([rotated[head, t, c] / scale[head, t, c] for t, c in pair])
            nearest = points[(points - steps).square().sum(-1).argmin()]
            kept[channel] = nearest[pair.index((token, channel))] * scale[head, token, channel]
        difference = (turn.T @ kept - found[head, token].double()).norm()
        assert difference < 1e-5 * x[head, token].double().norm(), (head, token)


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_word_has_even_pairs_then_odd_ones(side: str) -> None:
    """Bits of a plane, of one head of random bytes: index after index, each of them two coordinates."""
    layout = layout_of(side, 128, 64)
    record = torch.randint(
        0, 256, (layout.record_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    shape = (128, 64) if side == "k" else (64, 128)
    bits, coordinates = unpack_plane(record[: sum(layout.plane_sizes)], *shape, 2), layout.fields(record)[0]
    for row in (0, 9, 63):
        for word in range(0, shape[1], 16):
            for place, pair in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                low, high = bits[row, word + 2 * place : word + 2 * place + 2].tolist()
                found = coordinates[row, word + 2 * pair : word + 2 * pair + 2].tolist()
                assert tuple(found) == POINTS[low + 4 * high]


def test_the_error_of_gaussians_is_that_of_the_lattice() -> None:
    x = torch.randn(8, 128, 128, generator=torch.Generator().manual_seed(0))
    errors = {}
    for name in ("rotated", "rotated-lattice"):
        layout = Format(2, quantizer=name).layout("v", 8, 128, "float32", 2)
        operands = {"signs": random_signs(128, 0)}
        read = layout.decode_pages(layout.encode_pages(x.unsqueeze(0), operands), 8, operands)
        errors[name] = float((read - x).square().mean())
    assert errors["rotated-lattice"] == pytest.approx(0.1109, abs=0.001) and errors["rotated"] > 0.117


def test_kernels_have_the_coordinates_byte_by_byte() -> None:
    found = side_defines("v", Format(2, quantizer="rotated-lattice"), 64, "bfloat16", 2)
    for index, (x, y) in enumerate(POINTS):
        assert (found["POINTS_X"] >> 8 * (index % 8) & 255, found["POINTS_Y"] >> 8 * (index // 2) & 255) == (x, y)
    assert {x + y for x, y in zip(sorted(X), sorted(X, reverse=True), strict=True)} == {LEVELS}  # around 0


def test_what_has_no_points_is_refused() -> None:
    for more in ({"num_bits": 3}, {"num_bits": 2, "axis": "channel"}):
        with pytest.raises(ValueError, match="points of a lattice take 2 bits and axis 'token'"):
            Format(**more, quantizer="rotated-lattice")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="head size 5"):
        layout_of("k", 128, 5)
