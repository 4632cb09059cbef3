"""Places where forwards of the next pass of predictors can begin: hidden states, and pages of the layer before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvcal.models.streamed import is_streamed
from kvcal.stages.checkpoint import Batch
from kvcal.stages.estimate import host_bytes
from kvcal.stages.predictors.reconstruct import Start

STARTS_SHARE = 0.25  # of the device's memory that is free, or of the host's


class Starts:
    """Starts of whole shards, kept at ``place``: on the device of a model that lies there, or in host memory, up to a
    share of what there is when the stage begins."""

    def __init__(self, model: PreTrainedModel) -> None:
        on_device = model.device.type == "cuda" and not is_streamed(model)
        self.place = model.device if on_device else torch.device("cpu")
        self._free = round(STARTS_SHARE * (torch.cuda.mem_get_info(model.device)[0] if on_device else host_bytes()))
        self._found: dict[tuple[tuple[int, ...], ...], list[Start]] = {}

    def take(self, batches: Sequence[Batch]) -> list[Start]:
        """Those of a shard's batches, which are kept no longer; none, or one for each."""
        starts = self._found.pop(_numbers(batches), [])
        self._free += sum(start.nbytes for start in starts)
        return starts

    def drop(self) -> None:
        """All of them: batches to come are others."""
        for batches in self._found.values():
            self._free += sum(start.nbytes for start in batches)
        self._found = {}

    def keep(self, batches: Sequence[Batch], starts: Sequence[Start | None]) -> None:
        """Those that lie at ``place``, if each batch has one and there is room for them."""
        found = [start for start in starts if start is not None]
        nbytes = sum(start.nbytes for start in found)
        if len(found) == len(batches) and nbytes <= self._free:
            self._free -= nbytes
            self._found[_numbers(batches)] = found


def _numbers(batches: Sequence[Batch]) -> tuple[tuple[int, ...], ...]:
    return tuple(batch.numbers for batch in batches)
