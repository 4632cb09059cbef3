"""All records of a memory of pages, from the layout of a stage to that of the next one: the operator ``kvcal::slide``.

kvcal.kernels.stages says what stages are, kvcal.kernels.shrink what goes before, and ``csrc/slide.cu`` how records are
moved in place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kvcal.kernels.compile import Kernel, kernel
from kvcal.kernels.shrink import THREADS, num_blocks
from kvcal.kernels.stages import HEADS, PAGES, RECORD, SQUEEZED, Stages, records_at, region_pages

IDLE = -1  # of a block that reads nothing: NOT_READING in csrc/slide.cu

torch.library.define(
    "kvcal::slide",
    "(Tensor(a!) pages, Tensor(b!) stage, Tensor starts, Tensor layout, Tensor columns, Tensor(c!) present, "
    "Tensor(d!) tickets, int batch, int largest) -> ()",
)


def slide(pages: Tensor, stages: Stages, present: Tensor, tickets: Tensor, batch: int, largest: int) -> None:
    """Where the present stage is over: all records of ``pages`` (uint8, one dimension) to the layout of the next one,
    which is then the present one.

    ``present`` int64 [regions, 7]: the present row of the layout. ``tickets``: see :func:`new_tickets`. ``largest``:
    bytes of the largest record of any stage.
    """
    torch.ops.kvcal.slide(pages, *stages, present, tickets, batch, largest)


def new_tickets(device: torch.device) -> Tensor:
    """int64: two counters and a place for each block of ``slide``, as they are between launches."""
    return torch.tensor([0, 0] + [IDLE] * (num_blocks(device) if device.type == "cuda" else 0), device=device)


@torch.library.impl("kvcal::slide", "CPU")
def _slide_cpu(
    pages: Tensor, stage: Tensor, starts: Tensor, layout: Tensor, columns: Tensor, present: Tensor, tickets: Tensor,
    batch: int, largest: int,
) -> None:  # fmt: skip
    stages = Stages(stage, starts, layout, columns)
    if not stages.is_over:
        return
    old, new = stages.present_and_next()
    squeezed = [
        records_at(pages, to[SQUEEZED], batch, at[PAGES], to[HEADS], to[RECORD])
        for at, to in zip(old, new, strict=True)
    ]
    for at, records in zip(old, squeezed, strict=True):
        records.copy_(region_pages(pages, at, batch)[..., : records.shape[-1]].clone())
    for to, records in reversed(list(zip(new, squeezed, strict=True))):
        region_pages(pages, to, batch)[:, : records.shape[1]] = records.clone()
    stage.add_(1)
    present.copy_(layout[int(stage)])


@torch.library.impl("kvcal::slide", "CUDA")
def _slide_cuda(
    pages: Tensor, stage: Tensor, starts: Tensor, layout: Tensor, columns: Tensor, present: Tensor, tickets: Tensor,
    batch: int, largest: int,
) -> None:  # fmt: skip
    for sweep in _sweeps(pages.get_device()):
        sweep.launch(
            (len(tickets) - 2, 1, 1), THREADS, largest,
            pages.data_ptr(), stage.data_ptr(), starts.data_ptr(), layout.data_ptr(), present.data_ptr(),
            *layout.shape[:2], columns.data_ptr(), batch, tickets.data_ptr(), tickets.data_ptr() + 16,
        )  # fmt: skip


@functools.cache
def _sweeps(device_index: int) -> tuple[Kernel, Kernel]:
    return kernel("slide", "squeeze", {}, device_index), kernel("slide", "spread", {}, device_index)


@torch.library.register_fake("kvcal::slide")
def _slide_fake(*args: Any) -> None:
    pass
