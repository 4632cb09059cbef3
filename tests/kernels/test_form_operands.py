"""Pages by their numbers, against loops."""

from __future__ import annotations

import pytest
import torch

from kvcal.kernels import form_operands
from kvcal.kernels.form_operands import NumberedPages

CPU = torch.device("cpu")


@pytest.mark.parametrize("pages", [range(0), range(3), range(2, 7)])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(2, 5)])
def test_pages_are_numbered_row_by_row(rows: slice, pages: range) -> None:
    expected = [(row, page) for row in range(rows.start, rows.stop) for page in pages]
    every = NumberedPages.of(rows, pages)
    for start in range(len(expected) + 1):
        places = every._replace(start=start).places(CPU)
        assert [tuple(place) for place in torch.stack(places, dim=1).tolist()] == expected[start:]


@pytest.mark.parametrize(("at_once", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (100, [7])])
def test_parts_follow_one_another(at_once: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One page at least, however wide it is."""
    pages = NumberedPages.of(slice(1, 4), range(2, 5))._replace(start=2)
    monkeypatch.setattr(form_operands, "VALUES_AT_ONCE", (at_once + 1) * 128 * 10 - 1)
    parts = pages.parts(10)
    assert [part.stop - part.start for part in parts] == sizes
    both = [torch.cat(found) for found in zip(*(part.places(CPU) for part in parts), strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(both, pages.places(CPU), strict=True))
    monkeypatch.setattr(form_operands, "VALUES_AT_ONCE", 1)
    assert len(pages.parts(10)) == 7
