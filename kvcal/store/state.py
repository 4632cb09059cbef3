"""State that the layers of one cache share: the plan and its tensors on the device, padding, predictions;
and, of a static cache, how far it is, where its pages lie, and the scratch of its kernels (``StepState``).

The latter is control state, not stored keys and values: a few numbers a sequence, tables, and workspace. It
is counted apart (``nbytes``) and no part of a plan's bytes. What a step changes lies in tensors of fixed
addresses, so that a captured graph, replayed, goes on where it stands. The host keeps two things of its own,
neither of them needed by a replay: whether the prompt's padding is past (``in_prompt``), and a lower bound of
the longest sequence, which lets an eager step beyond ``max_tokens`` fail before it is computed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from kvcal.errors import UsageError
from kvcal.geometry import AttentionGeometry
from kvcal.kernels.operands import Place
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.plan.plan import Plan
from kvcal.store.growing_steps import GrowingSteps
from kvcal.store.padding import Padding, Rows
from kvcal.store.pool import Span, TablePool, fixed
from kvcal.store.step import StepScratch, require_no_error


class Source(Protocol):
    """A layer as others see it that are predicted from it (kvcal.store.prediction)."""

    plan: LayerPlan

    def before_rope(self, side: Side, spans: Sequence[Span]) -> Tensor:
        """[M, n, 128, D] fp32: these pages as predictions read them."""

    def forget(self) -> None:
        """Drop what was kept for readers."""


class PlanState:
    """``sources``: (layer, side) of the pages that something is predicted from; ``later_sources``: layers
    that a later one is predicted from; ``predictions``: every layer's, by its index; ``step_tokens``:
    the most of a step, which rings have room for; ``shares_layers``: a layer of the model reads another one's keys and
    values. Of a dynamic cache ``steps``, by device, ``is_attached``: whether a forward pass runs within
    ``kvcal.attached``, and ``is_stepping``: whether that one may take steps by the kernels."""

    def __init__(self, plan: Plan, attention_mask: Tensor | None, step_tokens: int = 1) -> None:
        self.plan, self.step_tokens = plan, step_tokens
        self.padding = Padding(attention_mask)
        self.tensors: Mapping[str, Tensor] = plan.tensors
        self.sources: set[tuple[int, Side]] = set()
        self.later_sources: set[int] = set()
        for layer, side in itertools.product(plan.layers, SIDES):
            sources = layer.sources(side)
            self.sources |= {*sources}
            self.later_sources |= {index for index, _ in sources} - {layer.geometry.index}
        self.predictions: dict[int, Source] = {}
        self.is_scheduled = plan.is_progressive
        self.shares_layers = self.is_attached = self.is_stepping = False
        self.steps: dict[torch.device, GrowingSteps] = {}

    def tensors_on(self, device: torch.device) -> Mapping[str, Tensor]:
        """The plan's tensors on ``device``, moved there once."""
        if any(tensor.device != device for tensor in self.tensors.values()):
            self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return self.tensors

    def steps_on(self, batch: int, device: torch.device) -> GrowingSteps:
        """Those of a dynamic cache's layers on ``device``, for so many rows."""
        found = self.steps.get(device)
        if found is None or found.batch != batch:
            found = self.steps[device] = GrowingSteps(batch, device)
        return found

    def require_scheduled(self, batch: int, columns: int) -> None:
        """UsageError beyond the workload of a plan that schedules bits: nothing is known to fit there."""
        workload = self.plan.workload
        if self.is_scheduled and (batch > workload.batch or columns > workload.context):
            raise UsageError(
                f"{batch} sequences of {columns} tokens: the plan's bits are scheduled for at most "
                f"{workload.batch} of {workload.context}",
                hint="allocate again with the batch and context you need",
            )


@dataclass
class Serving:
    """The context that computes the attention of the caches of a model (kvcal.cache.attached)."""

    is_active: bool = True


class StepState:
    """Tensors, once allocated: ``lengths`` int32 [B], tokens of every row; ``columns`` int64 [], columns fed,
    padding included; ``tables`` of pages' slots, by their number of pages; ``scratch`` of steps. ``shared`` is
    the plan's state; ``in_prompt``: a prompt with padding is to come, or has not ended."""

    is_awaited = False  # a step's errors: ``check`` tells

    def __init__(self, shared: PlanState, max_tokens: int, in_prompt: bool = False) -> None:
        self.shared = shared
        self.max_tokens = max_tokens
        self.batch = 0
        self.in_prompt = in_prompt
        self.longest = 0
        self.serving: Serving | None = None
        self.lengths = self.columns = torch.empty(0)
        self.tables: dict[int, Tensor] = {}
        self.scratch = StepScratch(0, max_tokens, torch.device("cpu"))
        self._evicted: dict[tuple[Side, int, int], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """UsageError: pickle would give every layer scratch of its own, and kernels have their numbers in a
        process."""
        raise UsageError(
            "a static cache cannot be pickled: its layers share memory",
            hint="copy.deepcopy keeps it together; PlanCache.save stores a prompt of a dynamic cache",
        )

    @property
    def is_allocated(self) -> bool:
        return self.batch > 0

    @property
    def device(self) -> torch.device:
        return self.scratch.device

    @property
    def error(self) -> Tensor:
        """int32 [1], of the operators."""
        return self.scratch.error

    @property
    def plan(self) -> Plan:
        return self.shared.plan

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The plan's, on the cache's device."""
        return self.shared.tensors_on(self.lengths.device)

    @property
    def layers(self) -> list[LayerPlan]:
        """Those that attention stores, in the order in which a step comes to them."""
        return [layer for layer in self.shared.plan.layers if isinstance(layer.geometry, AttentionGeometry)]

    @property
    def rows(self) -> Rows:
        return self.shared.padding.resolve(self.batch)

    def allocate(self, batch: int, device: torch.device) -> None:
        """The control tensors, for ``batch`` rows."""
        rows = self.shared.padding.resolve(batch)
        self.batch = batch
        self.in_prompt = rows.width > 0
        self.lengths = fixed(torch.zeros(batch, dtype=torch.int32, device=device))
        self.columns = fixed(torch.zeros((), dtype=torch.int64, device=device))
        self.scratch = StepScratch(batch, self.max_tokens, device)
        self.tables = {}

    def table(self, fmt: Format) -> Tensor:
        """int32 [B, pages]: the slot of every page; one for all formats of as many pages."""
        pages = fmt.num_pages(self.max_tokens)
        if pages not in self.tables:
            slots = torch.arange(self.batch * pages, dtype=torch.int32, device=self.device)
            self.tables[pages] = fixed(slots.view(self.batch, pages))
        return self.tables[pages]

    def place(self, k: Format, v: Format) -> Place:
        """As the operators are given it, for pages of these formats, which are as many."""
        scratch = self.scratch
        return Place(self.lengths, self.table(k), scratch.read_at(k), scratch.read_at(v), scratch.none)

    def pool(self, record: tuple[int, int], fmt: Format) -> TablePool:
        return TablePool(self.table(fmt), record)

    def evicted(self, side: Side, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """[B, N, 1, D]: the token that a sliding window attends to for the last time (kvcal.kernels.ops).
        Scratch of one layer at a time."""
        shape = (num_kv_heads, head_dim)
        if (side, *shape) not in self._evicted:
            tokens = torch.zeros(self.batch, num_kv_heads, 1, head_dim, dtype=dtype, device=self.lengths.device)
            self._evicted[side, *shape] = fixed(tokens)
        return self._evicted[side, *shape]

    @property
    def nbytes(self) -> int:
        """Bytes of the control state."""
        held = [self.lengths, self.columns, *self.tables.values(), *self.scratch.tensors, *self._evicted.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def is_step(self, tokens: int) -> bool:
        """Whether an update of so many columns is a step of the kernels, of all rows."""
        return tokens <= self.shared.step_tokens and not self.in_prompt

    def require_served(self) -> None:
        """UsageError outside ``kvcal.attached``: new tokens are stored by the attention."""
        if self.serving is None or not self.serving.is_active:
            raise UsageError(
                "a static cache (max_tokens=...) must be used inside `kvcal.attached(model)`",
                hint="with kvcal.attached(model): model.generate(..., past_key_values=cache)",
            )

    def require_room(self, longest: int) -> None:
        """UsageError where a row would get more tokens than were allocated."""
        if longest > self.max_tokens:
            raise UsageError(
                f"a sequence of {longest} tokens does not fit: the cache was allocated for max_tokens = "
                f"{self.max_tokens}",
                hint="build the PlanCache with more max_tokens, or without it: a dynamic cache grows",
            )

    def advance_step(self, tokens: int) -> None:
        """So many more tokens in every row: at the end of a step. Nothing here waits for the device."""
        self.lengths.add_(tokens)
        self.columns.add_(tokens)
        if torch.compiler.is_compiling() or (self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self.longest += tokens

    def set_columns(self, columns: int) -> None:
        """So many columns have been fed: after a prompt or a crop."""
        lengths = self.rows.lengths(columns)
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.columns.fill_(columns)
        self.longest = max(lengths)
        self.in_prompt = columns < self.rows.width

    def check(self) -> None:
        """Wait for the device, and raise what its kernels found."""
        require_no_error(self.error)
        if int(self.error):
            self.error.zero_()
            self.require_room(max(self.max_tokens + 1, int(self.lengths.max())))
