"""Layers of a static cache, whose memory is allocated once, behind the interface of transformers.

A prompt, or any chunk, goes through ``update`` as in a dynamic cache, and is stored by ``observe``, once its
attention is called, whose mask then shows the padding. One token for every row is a step: ``update`` hands
over the new keys and values alone, and ``attend`` stores them and reads packed pages, without a dense copy of
the past. A step never waits for the device. Several tokens of a row, up to ``PlanState.step_tokens``, are a step, too:
each attends as if it came alone, and ``crop`` takes back rejected ones.

    StaticPages    full attention, in pages
    StaticWindow   a sliding window at 16 bits (kvcal.cache.sliding_window)
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcal.cache.plan_layer import (
    DYNAMIC_HINT,
    AttentionLayer,
    by_token,
    cropped_columns,
    require_shapes,
    tokens_to_next_event,
)  # fmt: skip
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.kernels.choice import long_step_reasons, refusals, slow_reasons
from kvcal.kernels.variants import variant_of
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Side
from kvcal.store.layer_store import LayerStore, NewTokens
from kvcal.store.state import PlanState, StepState

# Allocates a whole cache, given batch and device.
Allocate = Callable[[int, torch.device], None]


class StaticLayer(AttentionLayer):
    """The part that both share: when a step is one, and why it is refused. ``static``: the cache's state."""

    is_compileable = True

    def __init__(self, plan: LayerPlan, state: PlanState, static: StepState, allocate: Allocate) -> None:
        super().__init__(plan, state)
        self.static, self._allocate = static, allocate
        self._is_last = plan == static.layers[-1]

    @property
    def control(self) -> list[Tensor]:
        """Tensors that a step changes besides, no part of the plan's bytes."""
        return [part.query_since for part in self.parts]

    @property
    def slow_reasons(self) -> list[str]:
        """Why the plain kernel serves a step on CUDA; usually nothing."""
        return list(slow_reasons(self.plan, self.state.plan.cache_dtype))

    @property
    def columns(self) -> int:
        """Columns that were fed, padding included. Waits for the device."""
        return int(self.static.columns) if self.is_initialized else 0

    @torch.compiler.disable
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage of all layers for the rows of key_states [B, N, T, k_head_dim], on their device."""
        self._allocate(key_states.shape[0], key_states.device)

    @abstractmethod
    def create(self, batch: int, device: torch.device) -> None:
        """Empty storage. UnsupportedModel where the kernels do not take the layer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """New tokens [B, N, T, D] -> for a step the same, otherwise what their attention takes: past tokens
        and these, in the dtype given. Padding columns of the past are zero, those of the new tokens as they
        came."""
        require_shapes(self.plan.attention, key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._require_served(key_states)
        if self.static.is_step(key_states.shape[2]):
            if not torch.compiler.is_compiling():
                self.static.require_room(self.static.longest + key_states.shape[2])
            return key_states, value_states
        return self._update(key_states, value_states)

    @torch.compiler.disable
    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.require_observed()
        new = self.new_tokens(key_states, value_states, self.columns)
        self.static.require_room(max(new.rows.lengths(new.stop)))
        keys = self.whole("k", new.keys, key_states.dtype, new)
        values = self.whole("v", new.values, value_states.dtype, new)
        self.pending = new
        return keys, values

    @abstractmethod
    def whole(self, side: Side, states: Tensor, dtype: torch.dtype, new: NewTokens) -> Tensor:
        """The past that a prompt attends to and ``states``, those of ``new``, together, in ``dtype``."""

    def _require_served(self, key_states: Tensor) -> None:
        self.static.require_served()
        if key_states.device != self.static.lengths.device:
            raise UnsupportedModel(
                f"layer {self.plan.geometry.index} is on {key_states.device}, the static cache on "
                f"{self.static.lengths.device}; allowed: a model on one device",
                hint=DYNAMIC_HINT,
            )
        if key_states.shape[0] != self.static.batch:
            raise UsageError(
                f"the cache was allocated for {self.static.batch} sequences and was given {key_states.shape[0]}",
                hint="build a new PlanCache for another batch; without max_tokens, reset() is enough",
            )

    def write(self, new: NewTokens, query_sum: Tensor | None) -> None:
        """After the last layer, the cache is as far as these tokens, and says what its kernels found."""
        self.store_prompt(new, query_sum)
        if self._is_last:
            self.static.set_columns(new.stop)
            self.static.check()

    @abstractmethod
    def store_prompt(self, new: NewTokens, query_sum: Tensor | None) -> None:
        """Store new tokens of a prompt, as ``write``."""

    def awaits_step(self, tokens: int) -> bool:
        return self.static.is_step(tokens)

    def attend(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        tokens = q.shape[2]
        q, k_new, v_new = by_token(tokens, q, k_new, v_new)
        attended = self.step(q, k_new, v_new, s_aux, scale, softcap)
        if self._is_last:
            self.static.advance_step(tokens)
        return attended.unsqueeze(1) if tokens == 1 else attended

    @abstractmethod
    def step(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        """``attend`` of tokens as operators take them."""

    def past_columns(self, columns: int) -> int:
        """Number of the last of so many columns that a prompt attends to."""
        return columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns that a mask covers, the first of them). A step has none: what it attends to is known by
        the lengths alone."""
        if self.static.is_step(query_length):
            return 0, 0
        columns = self.columns
        past = self.past_columns(columns)
        return past + query_length, columns - past

    def get_seq_length(self) -> Any:
        """Columns fed, a tensor on the device, as transformers' static layers have it: a copy, as the
        original moves on with every step; 0 before the first update."""
        return self.static.columns.clone() if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.static.max_tokens

    def reset(self) -> None:
        """No tokens. The memory stays: tokens to come replace what it holds."""
        self.pending = None


class StaticPages(StaticLayer):
    """Full attention, in pages of a fixed number."""

    def create(self, batch: int, device: torch.device) -> None:
        cache_dtype = self.state.plan.cache_dtype
        if device.type == "cuda":
            several = long_step_reasons(variant_of(self.plan, cache_dtype)) if self.state.step_tokens > 1 else ()
            for reason in itertools.chain(refusals(self.plan, cache_dtype), several):
                raise UnsupportedModel(
                    f"the kernels cannot serve layer {self.plan.geometry.index}: {reason}", hint=DYNAMIC_HINT
                )
        self.padding.resolve(batch)
        self._store = LayerStore(self.plan, self.state, self.static)
        self.place = self.static.place(self.plan.format("k"), self.plan.format("v"))
        self._calls = self._store.step  # made now: a step that is compiled makes nothing
        self.is_initialized = True

    def whole(self, side: Side, states: Tensor, dtype: torch.dtype, new: NewTokens) -> Tensor:
        return self.store.whole(side, states, dtype, new.rows, new.columns)

    def store_prompt(self, new: NewTokens, query_sum: Tensor | None) -> None:
        self.store.write(new, query_sum)

    def step(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        queries = self._calls.append(q, k_new, v_new, self.place)
        return self._calls.attend(queries, self.place, scale, softcap, s_aux, q.dtype)

    def tokens_to_next_page(self) -> int:
        return tokens_to_next_event(self.plan, self.padding.rows, self.columns)

    def crop(self, tokens_to_remove: int) -> None:
        held, rows = self.columns, self.padding.rows
        columns = cropped_columns(held, tokens_to_remove)
        if rows is not None and self.is_initialized and columns < held:
            self.require_observed()
            self.store.crop(rows, held, columns)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep, repeat or reorder sequences; the cache does the same to the shared padding."""
        self.require_observed()
        if self._store is not None:
            self._store.select(beam_idx.tolist())

    def reset(self) -> None:
        super().reset()
        for part in self.parts:
            part.reset()
