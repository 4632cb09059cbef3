"""The memory of all pages of a static cache whose plan has them shrink, and the stages that it goes through.

kvcal.kernels.stages says how the memory is laid out, and what leads from stage to stage. A step moves
it on by itself, on the device, once for all layers and before the first of them (``advance``): pages have the bits of
the columns that were fed before the step, as the dynamic cache has them when it reads. Prompts, and whatever else the
host does, wait for the device.

A prompt comes to a memory that is laid out for the columns behind it (``prepare``), because there is no room for its
pages before the others shrink. So a chunk that ends beyond a stage attends to the past with fewer bits than it would
in the dynamic cache, which reads every layer before it shrinks it; what is stored is the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from kvcal.kernels.decode import require_rows
from kvcal.kernels.shrink import Shrinking, shrink, shrinkings
from kvcal.kernels.slide import new_tickets, slide
from kvcal.kernels.stages import BITS, RECORD, Region, Stages, layout_table, region_pages, stage_starts
from kvcal.kernels.variants import head_ranges, variant_of
from kvcal.plan.format import SIDES, Format, Side
from kvcal.plan.layer import LayerPlan
from kvcal.store.fixed import fixed
from kvcal.store.plan_state import PlanState

# A distance in tokens beyond any context.
NO_STAGE = 1 << 30


class Control(Protocol):
    """What the pool reads of the cache's state (kvcal.store.static_state)."""

    shared: PlanState
    max_tokens: int
    batch: int
    lengths: Tensor
    columns: Tensor
    error: Tensor

    @property
    def layers(self) -> list[LayerPlan]: ...

    def page_at(self, fmt: Format) -> Tensor: ...


class Packing(Protocol):
    """What it asks of the stores whose pages it holds."""

    def pack_all_due(self, columns: int) -> None:
        """Pack the pages that the tokens of so many columns have filled, the last one, too."""


class PagePool:
    """``pages`` uint8: all pages of all rows and layers; its bytes are those of the plan's pages at the token count up
    to ``max_tokens`` at which they are most. ``present`` int64 [regions, 7]: where they are now. ``number``: the region
    of a side of the head range that begins with a head of a layer, (layer, head, side)."""

    def __init__(self, control: Control) -> None:
        """On the device of ``control``, whose batch is known.

        Raises:
            UsageError: on CUDA, more rows than a launch takes.
        """
        if control.lengths.is_cuda:
            require_rows(control.batch)
        self._control = control
        self.stores: list[Packing] = []
        self.number: dict[tuple[int, int, Side], int] = {}
        regions, transforms = self._regions()
        self._starts = stage_starts(regions, max(control.shared.plan.workload.context, control.max_tokens))
        table, room = layout_table(regions, self._starts, control.batch, control.max_tokens)
        self._largest = max(at[RECORD] for rows in table for at in rows)
        self.pages = fixed(torch.zeros(room, dtype=torch.uint8, device=control.lengths.device))
        self.stage = self._tensor(torch.tensor([0]))
        self.present = self._tensor(torch.tensor(table[0]))
        self._layout = self._tensor(torch.tensor(table))
        self._start_columns = self._tensor(torch.tensor(self._starts))
        self._transforms = self._tensor(transforms)
        self._tickets = fixed(new_tickets(control.lengths.device))
        self._shrinking = self._shrinkings(regions)

    def _tensor(self, tensor: Tensor) -> Tensor:
        """On the device, where it stays."""
        return fixed(tensor.to(self._control.lengths.device))

    def _regions(self) -> tuple[list[Region], Tensor]:
        """All regions, keys before values, and the transforms of their pages."""
        plan, tensors = self._control.shared.plan, self._control.shared.tensors_on(self._control.lengths.device)
        regions: list[Region] = []
        transforms, elements = [torch.empty(0, device=self._control.lengths.device)], 0
        for layer in filter(lambda layer: layer.is_paged, self._control.layers):
            for pair in head_ranges(layer):
                variant = variant_of(layer, pair, plan.cache_dtype)
                for side in SIDES:
                    given = (side == "k" and variant.rescale, side == "k" and variant.offset)
                    self.number[layer.geometry.index, pair.heads.start, side] = len(regions)
                    shape = (pair.format(side), pair.num_heads, variant.head_dim, plan.cache_dtype)
                    regions.append(Region(side, *shape, *given, elements))
                    for name, is_given in zip(("k_rescale", "k_offset"), given, strict=True):
                        if any(given):  # both have their place where one is there
                            found = tensors[f"layers.{layer.geometry.index}.{name}"][pair.heads] if is_given else None
                            blank = torch.zeros(pair.num_heads, variant.head_dim, device=transforms[0].device)
                            transforms.append((blank if found is None else found).flatten())
                            elements += len(transforms[-1])
        return regions, torch.cat(transforms)

    def _shrinkings(self, regions: list[Region]) -> list[tuple[str, Tensor, Tensor]]:
        """What shrinks alike at any time: its key, the regions (int64), and when their pages are due."""
        members: dict[Shrinking, list[int]] = {}
        for number, region in enumerate(regions):
            for shrinking in shrinkings(region):
                members.setdefault(shrinking, []).append(number)
        return [
            (shrinking.key, self._tensor(torch.tensor(numbers)), self._control.page_at(shrinking.format))
            for shrinking, numbers in members.items()
        ]

    @property
    def control_tensors(self) -> list[Tensor]:
        """What is neither keys nor values."""
        tables = (self.stage, self.present, self._layout, self._start_columns, self._transforms, self._tickets)
        return [*tables, *(members for _, members, _ in self._shrinking)]

    def region(self, number: int) -> Tensor:
        """[B, pages, heads, record]: the pages of a region, where they are now."""
        return region_pages(self.pages, self.present[number].tolist(), self._control.batch)

    def widths(self, numbers: list[int]) -> list[tuple[int, ...]]:
        """The bits that regions have together, stage by stage, each once."""
        return list(dict.fromkeys(map(tuple, self._layout[:, numbers, BITS].tolist())))

    def advance(self) -> None:
        """On to the stage of the columns that were fed, before a step stores the next token. On a GPU nothing waits."""
        self._advance(self._control.columns, due=0)

    def prepare(self, tokens: int) -> None:
        """On to the stage of the columns that were fed, and from there, once the pages are packed that are due with the
        last of them, to that of the columns behind ``tokens`` more."""
        columns = int(self._control.columns)
        self._settle(columns, due=0)
        for store in self.stores:
            store.pack_all_due(columns)
        self._settle(columns + tokens, due=1)

    def tokens_to_next_stage(self) -> int:
        """New tokens, 1 or more, that meet pages of the same bits together as one by one."""
        columns = int(self._control.columns)
        later = [start for start in self._starts if start > columns]
        return max(1, later[0] - 1 - columns) if later else NO_STAGE

    def has_shrunk(self, columns: int) -> bool:
        """Whether pages have fewer bits than those of so many columns."""
        return int(self.stage) > self._stage_of(columns)

    def reset(self) -> None:
        """No pages."""
        self._enter(0)

    def _stage_of(self, columns: int) -> int:
        return bisect_right(self._starts, columns) - 1

    def _enter(self, stage: int) -> None:
        """Into a stage without pages to take along."""
        self.stage.fill_(stage)
        self.present.copy_(self._layout[stage])

    def _settle(self, columns: int, due: int) -> None:
        if not int(self._control.columns):
            self._enter(self._stage_of(columns))
        for _ in range(self._stage_of(columns) - int(self.stage)):
            self._advance(self._start_columns.new_tensor([columns]), due)

    def _advance(self, columns: Tensor, due: int) -> None:
        """To the next stage, if it begins with ``columns`` (int64, one) or fewer."""
        control = self._control
        stages = Stages(self.stage, self._start_columns, self._layout, columns)
        for key, members, page_at in self._shrinking:
            shrink(self.pages, stages, members, control.lengths, due, page_at, self._transforms, control.error, key)
        slide(self.pages, stages, self.present, self._tickets, control.batch, self._largest)


class RegionPages(Mapping[Side, Tensor]):
    """The pages of both sides of a head range, where they are now: what a store of its own memory has as a dict.
    ``numbers``: the regions; ``widths``: the bits of keys and of values that they have together, stage by stage."""

    def __init__(self, pool: PagePool, layer: int, first_head: int) -> None:
        self.pool = pool
        self.numbers = [pool.number[layer, first_head, side] for side in SIDES]
        self.widths = pool.widths(self.numbers)

    @property
    def num_bits(self) -> tuple[int, ...]:
        return tuple(self.pool.present[self.numbers, BITS].tolist())

    def __getitem__(self, side: Side) -> Tensor:
        return self.pool.region(self.numbers[SIDES.index(side)])

    def __iter__(self) -> Iterator[Side]:
        return iter(SIDES)

    def __len__(self) -> int:
        return len(SIDES)
