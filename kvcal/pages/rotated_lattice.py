"""Rotated pages whose codes are points of a lattice: HIGGS's grid of 16 points in 2 dimensions, for each KV head.

A token is rotated, and each group has a scale, as in a rotated page. A code is not a number but a point: two neighbours
along the columns of a plane (channels of a key, tokens of a channel of a value), divided by their scales, become the
index of the nearest point of

    the grid of kvcal.pages.grids, (2, 16), in steps of 0.0316 standard deviations: integers from 0 to 127, less 63.5.

A zero is thus -63.5 scales, and the record has none. The squared error is .1077 of the variance. Codes of 2 bits
leave .119, and the grid before it was rounded .1076.

A kernel multiplies coordinates as it does codes, and makes them of an index by byte permutes. An index has 4 bits for 2
values, and lies in their places of a plane of 2 bits. A word of such a plane, 16 columns, has the indices of pairs
0, 2, 4, 6, 1, 3, 5, 7, lowest bits first. A permute by one half of the word then gives coordinates in the order of
tensor cores' operands: of columns 4 j + e, for j = 0 to 3.

A lattice for all heads in a row (kvcal.pages.lattice) has the same points and half of the parameters, but its rotation
spans heads, so that no query can be rotated alike. Left out: 64 and 256 points, which take 8 and 32 permutes for what 2
do here (docs/kernels.md), and error feedback, which rounds one channel at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvcal.errors import UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.pages.record_layout import Knobs
from kvcal.pages.rotated import RotatedLayout

NUM_BITS = 2  # of a value
LEVELS = 127
STEP = 0.031608522
POINTS = (
    (6, 74), (8, 33), (27, 110), (37, 49), (40, 78), (41, 9), (63, 35), (64, 63),
    (64, 94), (64, 127), (83, 8), (88, 77), (90, 48), (101, 108), (118, 31), (122, 72),
)  # fmt: skip


@dataclass(frozen=True)
class RotatedLatticeLayout(RotatedLayout):
    """Shape of a page's record: that of uniform codes of 2 bits per token, without zeros."""

    takes_feedback: ClassVar[bool] = False
    has_zeros: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise UsageError(
                f"head size {self.head_dim} cannot be cut in pairs of channels; allowed: even ones",
                hint="take quantizer = 'rotated'",
            )

    @classmethod
    def conflicts(cls, fmt: Knobs) -> Iterator[str]:
        if fmt.num_bits != NUM_BITS or fmt.axis != "token":
            yield f"points of a lattice take 2 bits and axis 'token', found {fmt.num_bits} and {fmt.axis!r}"

    @classmethod
    def label(cls, fmt: Knobs) -> str:
        return f"rotated lattice g{fmt.group_size}"

    @property
    def levels(self) -> int:
        return LEVELS

    @property
    def gaussian_step(self) -> float:
        return STEP

    def _zero(self, scale: Tensor) -> Tensor:
        return scale.float() * scale.new_full((), -LEVELS / 2, dtype=torch.float32)

    def _rounded(self, steps: Tensor) -> Tensor:
        """What planes store of the nearest points; of equally near ones the first."""
        columns = self._turned(steps)
        padding = self._plane_shape[1] - columns.shape[-1]
        x, y = columns.unflatten(-1, (-1, 2)).unbind(-1)
        best, index = torch.full_like(x, torch.inf), torch.zeros_like(x, dtype=torch.uint8)
        for number, (a, b) in enumerate(POINTS):
            distance = (x - float(a)).square_() + (y - float(b)).square_()
            index = torch.where(distance < best, number, index)
            best = torch.minimum(distance, best)
        # The pairs of a word: 0, 2, 4, 6, 1, 3, 5, 7.
        index = (
            torch.nn.functional.pad(index, (0, padding // 2)).unflatten(-1, (-1, 4, 2)).transpose(-1, -2).flatten(-3)
        )
        stored = torch.stack([index & 3, index >> 2], -1).flatten(-2)
        return self._turned(stored)

    def _codes(self, stored: Tensor) -> Tensor:
        low, high = stored.unflatten(-1, (-1, 2)).unbind(-1)
        index = (low | high << 2).unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3)
        points = torch.tensor(POINTS, dtype=torch.uint8, device=stored.device)
        return points[index.int()].flatten(-2)


def coordinate_bytes(axis: int) -> tuple[int, int]:
    """A coordinate of points 0 to 7, and of 8 to 15, as the little-endian bytes of an integer."""
    bytes_of_points = bytes(point[axis] for point in POINTS)
    return int.from_bytes(bytes_of_points[:8], "little"), int.from_bytes(bytes_of_points[8:], "little")
