"""Rotated pages whose codes are 16 points of a lattice in 2 dimensions, for each KV head.

A token is rotated, and each group has a scale, as in a rotated page. A code is not a number but a point: two
neighbours along the columns of a plane (channels of a key, tokens of a channel of a value), divided by their scales,
become the index of the nearest point of a grid, in steps of 0.0293 standard deviations: integers from 0 to 127, less
63.5. A zero is thus -63.5 scales, and the record has none.

An index has 4 bits: the lowest three give the first coordinate, the highest three the second. So the points are the
corners of four rectangles, and a kernel makes each coordinate by one byte permute of two registers; then it
multiplies coordinates as it does codes. Of Gaussians such a grid leaves .1109 of the variance (Lloyd's iteration,
with the means of what shares a coordinate). 16 free points leave .1076 and take twice the permutes; 2 bits a number
leave .119.

An index lies in the places of its two values in a plane of 2 bits. A word of such a plane, 16 columns, has the
indices of pairs 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first. A permute by one half of the word then gives coordinates
in the order of tensor cores' operands: of columns 4 j + e, for j = 0 to 3.

A lattice for all heads in a row (kvcal.pages.lattice) has free points, but its rotation spans heads, so that no query
can be rotated alike. Left out: 64 and 256 points, which take several times the permutes (docs/kernels.md), and error
feedback, which rounds one channel at a time.
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
STEP = 0.029332107
# Of the point with an index of 4 bits: by its lowest three bits, and by its highest three.
X = bytes((47, 123, 26, 76, 80, 4, 101, 51))
Y = bytes((89, 1, 38, 60, 31, 67, 96, 126))
POINTS = tuple((X[index & 7], Y[index >> 1]) for index in range(16))


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

    def gaussian_step(self, has_feedback: bool) -> float:
        return STEP

    def _zero(self, scale: Tensor) -> Tensor:
        return scale.float() * scale.new_full((), -LEVELS / 2, dtype=torch.float32)

    def _rounded(self, steps: Tensor) -> Tensor:
        """Indices of the nearest points, as planes store them; of equally near ones the first."""
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
