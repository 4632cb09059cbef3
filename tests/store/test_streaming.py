"""Groups of tensors that come from memory or from a file, in their order, through a few buffers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcal.errors import ArtifactError
from kvcal.store import streaming
from kvcal.store.streaming import AHEAD, ALIGNMENT, SMALL, in_memory, on_device

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["by threads", "by the caller"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads bring all that these tests have, or nothing of it."""
    monkeypatch.setattr(streaming, "SMALL", 0 if request.param == "by threads" else SMALL)


@dataclass
class Late:
    """A tensor that is read from another one. ``reads``: names of those that were read, of all groups."""

    value: Tensor
    name: str = ""
    reads: list[str] = field(default_factory=list)
    is_broken: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def nbytes(self) -> int:
        return self.value.nbytes

    def read_into(self, memory: np.ndarray) -> None:
        self.reads.append(self.name)
        if self.is_broken:
            raise ArtifactError(f"{self.name} is corrupt")
        memory[:] = self.value.contiguous().view(-1).view(torch.uint8).numpy()


def groups_of(count: int) -> list[dict[str, Tensor]]:
    sizes = [(1 + 37 * number % 23, number % 5) for number in range(count)]
    return [
        {"a": torch.full((n, 3), number, dtype=torch.uint8), "b": torch.randn(m, 7)}
        for number, (n, m) in enumerate(sizes)
    ]


@pytest.mark.parametrize("count", [0, 1, AHEAD, 4 * AHEAD + 1])
def test_unread_groups_come_in_order_through_few_buffers(count: int) -> None:
    groups, places = groups_of(count), set()
    late = [{"a": Late(group["a"]), "b": group["b"]} for group in groups]
    with torch.inference_mode():
        for given, expected in zip(on_device(late, CPU), groups, strict=True):
            assert torch.equal(given["a"], expected["a"]) and given["b"] is expected["b"]
            places.add(given["a"].data_ptr())
    assert len(places) == min(count, AHEAD)


def test_no_group_is_read_into_memory_that_is_in_use() -> None:
    reads: list[str] = []
    late = [{"a": Late(torch.zeros(4), str(number), reads)} for number in range(3 * AHEAD)]
    for number, _ in enumerate(on_device(late, CPU)):
        assert set(reads) <= {str(other) for other in range(number + AHEAD)}


def test_the_first_group_that_cannot_be_read_is_the_error() -> None:
    late = [{"a": Late(torch.zeros(4), f"group {number}", is_broken=number in (5, 6))} for number in range(20)]
    arrived, before = [], threading.active_count()
    with pytest.raises(ArtifactError, match="group 5 is corrupt"):
        arrived += on_device(late, CPU)
    assert threading.active_count() == before
    with pytest.raises(ArtifactError, match="group 5 is corrupt"):
        in_memory({group["a"].name: group["a"] for group in late}, pin=False)


def test_copies_in_memory_are_aligned_and_equal() -> None:
    group = groups_of(2)[1]
    copied = in_memory({**group, "late": Late(torch.arange(5)), "none": torch.zeros(0, 4)}, pin=False)
    assert torch.equal(copied["late"], torch.arange(5)) and copied["none"].shape == (0, 4)
    for name, tensor in group.items():
        assert torch.equal(copied[name], tensor) and copied[name].data_ptr() != tensor.data_ptr()
        assert (copied[name].data_ptr() - copied["a"].data_ptr()) % ALIGNMENT == 0
