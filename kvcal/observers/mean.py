"""The mean of observations of any shape, as a sum in fp64 and a count.

Sums merge: statistics of two halves of the data, or of two machines, give the statistic of the whole, to the
rounding of fp64; summed in the same order, bit for bit. Objects are never changed: an interruption between two
updates finds a whole statistic, which is what resuming needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Mean:
    """``total``: fp64 on the CPU, the sum of ``count`` observations."""

    total: Tensor
    count: int

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Mean:
        """No observation yet."""
        return cls(torch.zeros(tuple(shape), dtype=torch.float64), 0)

    def update(self, observations: Tensor) -> Mean:
        """With n more observations: [n, *shape], any float dtype."""
        return self.merge(Mean(observations.to("cpu", torch.float64).sum(0), observations.shape[0]))

    def merge(self, other: Mean) -> Mean:
        """The statistic of both sets of observations."""
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> Tensor:
        """The mean, fp64. ValueError without an observation."""
        if self.count == 0:
            raise ValueError("the mean of no observations")
        return self.total / self.count
