"""Decodes with unequally many drafts as rows of equal length, and back."""

from __future__ import annotations

import pytest
import torch

from kvcal.engines.scratch import Decoded

CPU = torch.device("cpu")


@pytest.mark.parametrize("counts", [[1], [6], [1, 1, 1], [6, 6], [2], [1, 6, 3], [6, 1, 1, 2, 5], []])
def test_requests_are_filled_up_with_their_last_token_and_cut_again(counts: list[int]) -> None:
    decoded = Decoded.of_counts(torch.tensor(counts, dtype=torch.int32), 6, CPU)
    x = torch.randn(sum(counts) + 3, 2, 4)  # after the decodes, a chunk of 3 tokens
    found = decoded.of_rows(x)
    if max(counts, default=1) == 1:
        assert decoded.tokens == 1 and torch.equal(found, x[: len(counts)])
    else:
        assert found.shape == (len(counts), 6, 2, 4)
        for row, own in zip(found, x[: sum(counts)].split(counts), strict=True):
            assert torch.equal(row[: len(own)], own) and bool((row[len(own) :] == own[-1]).all())
    output = torch.zeros_like(x)
    decoded.to_rows(found, output)
    assert torch.equal(output[: sum(counts)], x[: sum(counts)]) and not output[sum(counts) :].any()


def test_equally_many_drafts_are_not_copied() -> None:
    """As CUDA graphs have them, whose tensors stay where they are."""
    x = torch.randn(12, 2, 4)
    decoded = Decoded.of_counts(torch.tensor([6, 6], dtype=torch.int32), 6, CPU)
    assert decoded.taken is None and decoded.of_rows(x).data_ptr() == x.data_ptr()
