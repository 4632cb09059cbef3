"""A full-attention layer of a dynamic cache behind the interface of transformers, stored as its plan says.

New tokens go through ``update``: it returns dense keys and values, as every attention implementation expects:
the past as it is stored, the new tokens unquantized (rounded to the cache's dtype). So a prompt attends to
itself at full precision, and a token becomes quantized for the tokens after the update that packs it. Reading
before writing makes a chunk that ends where a page fills see exactly what its tokens would have seen one by
one. Where channels are chosen by queries, new tokens are stored by ``observe``, once the attention of the
same update is called.

On a GPU, within ``kvcal.attached(model)``, a token for every row, or several (``PlanState.step_tokens``), is a
step: ``update`` hands over the new keys and values alone, and ``attend`` stores them and reads packed pages by
the kernels of static caches. The host knows all lengths, and makes room for a page before a step fills it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvcal.cache.plan_layer import (
    AttentionLayer,
    by_token,
    cropped_columns,
    require_shapes,
    tokens_to_next_event,
)  # fmt: skip
from kvcal.errors import SlowPath
from kvcal.kernels.choice import long_step_reasons, refusals
from kvcal.kernels.variants import variant_of
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Side
from kvcal.store.layer_store import LayerStore, NewTokens
from kvcal.store.padding import Rows
from kvcal.store.pool import GrowingPool
from kvcal.store.state import PlanState

# Types of devices on which kernels take steps.
STEPPED = {"cuda"}
DENSE_STEPS = "every step decodes all pages; within `with kvcal.attached(model):` kernels read them packed"


class PagedLayer(AttentionLayer):
    """See the module's docstring. ``columns``: fed, padding included."""

    is_compileable = False

    def __init__(self, plan: LayerPlan, state: PlanState) -> None:
        super().__init__(plan, state)
        self.columns, self._awaits_step = 0, False

    @torch.compiler.disable
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage for the rows of key_states [B, N, T, k_head_dim], on their device."""
        self.create(key_states.shape[0], key_states.device)

    def create(self, batch: int, device: torch.device) -> None:
        """Empty storage for ``batch`` rows."""
        self.padding.resolve(batch)
        self.steps = self.state.steps_on(batch, device)
        self._store = LayerStore(self.plan, self.state, self.steps)
        self.is_stepped = device.type in STEPPED and self.is_served(device)
        self.is_initialized = True

    def is_served(self, device: torch.device) -> bool:
        """Whether kernels read the layer's pages, in steps of several tokens where there may be some."""
        cache_dtype, is_cuda = self.state.plan.cache_dtype, device.type == "cuda"
        if self.state.shares_layers or any(refusals(self.plan, cache_dtype, is_cuda)):
            return False
        has_long_steps = is_cuda and self.state.step_tokens > 1
        return not (has_long_steps and any(long_step_reasons(variant_of(self.plan, cache_dtype))))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """New tokens [B, N, T, D] -> for a step the same, otherwise all tokens [B, N, S + T, D] in the dtype
        given. Padding columns of the past are zero, those of the new tokens as they came."""
        require_shapes(self.plan.attention, key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._awaits_step = self._is_step(key_states)
        return (key_states, value_states) if self._awaits_step else self._update(key_states, value_states)

    def _is_step(self, key_states: Tensor) -> bool:
        """Whether kernels store these new tokens of every row, none of them padding, and attend to all. Warns
        where they would, if the model were attached."""
        rows, (batch, _, tokens, _) = self.padding.rows, key_states.shape
        is_real = rows is not None and rows.batch == batch and 0 < self.columns >= rows.width
        if not (self.is_stepped and is_real and tokens <= self.state.step_tokens):
            return False
        if not (self.state.is_attached or torch.is_grad_enabled()):
            warnings.warn(DENSE_STEPS, SlowPath, stacklevel=2)
        return self.state.is_stepping

    @torch.compiler.disable
    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.require_observed()
        new = self.new_tokens(key_states, value_states, self.columns)
        self.state.require_scheduled(new.rows.batch, new.stop)
        if self.state.is_scheduled:
            # Every update begins by giving pages the bits of the columns after it: nothing ever takes more.
            self.store.set_bits(new.stop)
        keys = self.whole("k", new.keys, key_states.dtype, new)
        values = self.whole("v", new.values, value_states.dtype, new)
        if self.plan.needs_queries:
            self.pending = new
        else:
            self.write(new, None)
        self.columns = new.stop
        return keys, values

    def whole(self, side: Side, states: Tensor, dtype: torch.dtype, new: NewTokens) -> Tensor:
        """The past and ``states``, those of ``new``, together [B, N, S + T, D], in ``dtype``."""
        return self.store.whole(side, states, dtype, new.rows, new.columns)

    def write(self, new: NewTokens, query_sum: Tensor | None) -> None:
        self.store.write(new, query_sum)

    def awaits_step(self, tokens: int) -> bool:
        return self._awaits_step

    @torch.compiler.disable
    def attend(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        self.require_observed()
        tokens, rows, (keys, values) = q.shape[2], self.padding.rows, self.parts
        assert rows is not None and isinstance(keys.pool, GrowingPool)
        self.store.resize(rows.lengths(self.columns + tokens))
        place = self.steps.place(rows, self.columns, tokens, keys.pool, keys.format, values.format)
        q, k_new, v_new = by_token(tokens, q, k_new, v_new)
        step = self.store.step
        queries = step.append(q, k_new, v_new, place)
        attended = step.attend(queries, place, scale, softcap, s_aux, q.dtype)
        self.columns += tokens
        return attended.unsqueeze(1) if tokens == 1 else attended

    def tokens_to_next_page(self) -> int:
        return tokens_to_next_event(self.plan, self.padding.rows, self.columns)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        columns, rows = cropped_columns(self.columns, tokens_to_remove), self.padding.rows
        if rows is None or not self.is_initialized or columns == self.columns:
            return
        self.require_observed()
        self.store.crop(rows, self.columns, columns)
        self.columns = columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep, repeat or reorder sequences; the cache does the same to the shared padding."""
        self.require_observed()
        if self._store is not None:
            self._store.select(beam_idx.tolist())

    def reset(self) -> None:
        """No tokens and no memory."""
        self.columns, self.pending = 0, None
        self._store, self.is_initialized = None, False

    def make_room(self, tokens: int, device: torch.device) -> None:
        self.create(1, device)
        self.store.set_bits(tokens)
        self.store.resize(Rows.dense(1).lengths(tokens))
        for part in self.parts:  # the file does not say which tokens before these were cropped
            part.oldest = [part.format.tokens_read(tokens)]
        self.columns = tokens

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, part in enumerate(self.parts):
            names = {"pages": part.pool.records, "sinks": part.sinks, "ring": part.ring}
            names |= {"query_sum": part.query_sum, "query_since": part.query_since}
            yield from ((f"{number}.{name}", tensor) for name, tensor in names.items())
