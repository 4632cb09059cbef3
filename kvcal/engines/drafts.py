"""The new tokens of a batch's decodes, in rows of equal length: of a token each, or of a token and its drafts.

Where any request has drafts, those with fewer than the most are filled up with their last token, so that one kernel is
compiled for all such steps. The ring takes these tokens back, as it does rejected drafts: the next step's lengths say
how many of its tokens a request has, on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Decoded(NamedTuple):
    """The first ``requests`` of a batch, its decodes, of ``tokens`` each. ``taken`` int64 [requests, tokens]: their
    rows of the batch's queries; ``kept`` int64 [rows]: the number of the token, in a row, that each of these rows is.
    Both None where no request is filled up."""

    requests: int
    tokens: int = 1
    taken: Tensor | None = None
    kept: Tensor | None = None

    @classmethod
    def of_counts(cls, counts: Tensor, most: int, device: torch.device) -> Decoded:
        """Of requests with so many new tokens each, int32 [requests] on the host, at most ``most``."""
        tokens = most if bool((counts > 1).any()) else 1
        if bool((counts == tokens).all()):
            return cls(len(counts), tokens)
        number, counts = torch.arange(tokens), counts.long().unsqueeze(1)
        taken = counts.cumsum(0) - counts + number.minimum(counts - 1)
        kept = (number < counts).flatten().nonzero().flatten()
        return cls(len(counts), tokens, taken.to(device, non_blocking=True), kept.to(device, non_blocking=True))

    def of_rows(self, x: Tensor) -> Tensor:
        """Rows x [rows, n, D] of a batch: [requests, n, D], or of several tokens [requests, tokens, n, D]."""
        if self.tokens == 1:
            return x[: self.requests]
        return (
            x[: self.requests * self.tokens].unflatten(0, (self.requests, -1)) if self.taken is None else x[self.taken]
        )

    def to_rows(self, attended: Tensor, output: Tensor) -> None:
        """The other way round, into the first rows of output [rows, H, D]."""
        rows = attended.flatten(0, -3)
        rows = rows if self.kept is None else rows[self.kept]
        output[: len(rows)] = rows
