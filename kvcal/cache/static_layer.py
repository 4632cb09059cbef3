"""A full-attention layer of a static cache behind the interface of transformers.

New tokens are stored by the attention, not by ``update``: only there are queries, keys and values at hand together, and
a step of decoding is then two operators a head range (``attend``), without a dense copy of the past. ``update`` hands
over what the attention needs: for a step the new keys and values alone, for a prompt, or a chunk of one, the dense past
as it is stored and the new tokens in full precision, exactly as ``PagedLayer`` does; ``extend`` stores them after the
attention was computed. A step never waits for the device, a prompt does. Between the two operators, what the kernels
cannot read as it is stored is reconstructed (``LayerForms``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcal.cache.shapes import require_shapes
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.choice import slow_reasons
from kvcal.kernels.refusals import refusals
from kvcal.kernels.variants import head_ranges
from kvcal.pages.layout import RAW_BITS
from kvcal.pages.scores import query_sum
from kvcal.plan.format import SIDES, Side
from kvcal.plan.layer import LayerPlan
from kvcal.store.layer_forms import LayerForms, form_reasons
from kvcal.store.staged_store import StagedStore
from kvcal.store.static_prompt import Store, read_past, store_tokens
from kvcal.store.static_state import NEVER, StaticState
from kvcal.store.static_store import HeadStore

DYNAMIC_HINT = "build the PlanCache without max_tokens: the dynamic cache takes every plan, in torch"


class StaticLayer(CacheLayerMixin):
    """See the module's docstring. ``allocate``: what allocates the whole cache, given batch and device. S is the number
    of all columns, but in a sliding-window layer (kvcal.cache.static_window), which keeps the last ones."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, plan: LayerPlan, state: StaticState, allocate: Callable[[int, torch.device], None]) -> None:
        super().__init__()
        self.plan = plan
        self.state = state
        self.stores: Sequence[Store] = []
        self.forms: LayerForms | None = None
        self._allocate = allocate
        self._is_first, self._is_last = plan == state.layers[0], plan == state.layers[-1]
        self.is_compileable = not self.form_reasons  # LayerForms.step says why

    @property
    def tensors(self) -> list[Tensor]:
        stored = [tensor for store in self.stores for tensor in store.tensors]
        return stored if self.forms is None else [*stored, *self.forms.tensors]

    @property
    def form_reasons(self) -> list[str]:
        """What is reconstructed in every step, before the kernels can read it; usually nothing."""
        index = self.plan.geometry.index
        return form_reasons(self.plan, [side for side in SIDES if (index, side) in self.state.shared.sources])

    @property
    def slow_reasons(self) -> list[str]:
        """Why a step takes longer than the fast kernels on CUDA; usually nothing."""
        return [*self.form_reasons, *slow_reasons(self.plan, self.state.shared.plan.cache_dtype)]

    def create_stores(self) -> None:
        """Allocate the stores, on the device of the state.

        Raises:
            UnsupportedModel: the device is CUDA and the kernels do not take this layer.
        """
        if self.state.lengths.is_cuda:
            for reason in refusals(self.plan, self.state.shared.plan.cache_dtype):
                raise UnsupportedModel(
                    f"the kernels cannot serve layer {self.plan.geometry.index}: {reason}", hint=DYNAMIC_HINT
                )
        self.stores = self._allocate_stores()
        self.is_initialized = True

    @torch.compiler.disable
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """key_states, value_states [B, N, T, D]: allocates the memory of all layers."""
        self._allocate(key_states.shape[0], key_states.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """New tokens [B, N, T, D] -> what their attention takes: for one token of every row the same, otherwise all
        tokens [B, N, S + T, D] as ``PagedLayer.update`` returns them. Nothing is stored yet.

        Raises:
            UsageError: the model is not called within ``kvcal.paged_attention``; another batch than was allocated; no
                room for these tokens.
            UnsupportedModel: the layer is on another device than the cache.
            ArtifactError: the model's heads or head sizes are not the plan's.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.state.require_served()
        if key_states.device != self.state.lengths.device:
            raise UnsupportedModel(
                f"layer {self.plan.geometry.index} is on {key_states.device}, the static cache on "
                f"{self.state.lengths.device}; allowed: a model on one device",
                hint=DYNAMIC_HINT,
            )
        require_shapes(self.plan.attention, key_states, value_states)
        if key_states.shape[0] != self.state.batch:
            raise UsageError(
                f"the cache was allocated for {self.state.batch} sequences and was given {key_states.shape[0]}",
                hint="build a new PlanCache for another batch; without max_tokens, reset() is enough",
            )
        if not self.state.is_step(key_states.shape[2]):
            return self._dense(key_states, value_states)
        if not torch.compiler.is_compiling():
            self.state.require_room(self.state.longest + 1)
        return key_states, value_states

    def attend(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        """A step: store k_new, v_new [B, N, 1, D], and attend from q [B, N G, 1, D] to all tokens.

        Returns [B, 1, N G, D] in q's dtype, as attention functions do. ``softcap`` 0 for none.
        """
        if self._is_first and self.state.pool is not None:
            self.state.pool.advance()
        q, k_new, v_new = q.squeeze(2), k_new.squeeze(2), v_new.squeeze(2)
        for store in self.stores:
            store.append(k_new, v_new, q)
        if self.forms is not None:
            self.forms.step()
        parts = [store.decode(q, s_aux, scale, softcap) for store in self.stores]
        if self._is_last:
            self.state.advance_step()
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).unsqueeze(1)

    @torch.compiler.disable
    def extend(self, q: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store what ``update`` returned last, keys and values [B, N, S + T, D], with the queries q [B, N G, T, D].

        Raises:
            NonFiniteActivations: NaN or infinity in a page.
        """
        state, tokens = self.state, q.shape[2]
        columns, rows = int(state.columns), state.rows
        heard = None
        if any(fmt.needs_queries for fmt in self.plan.k):
            heard = query_sum(q, rows.mask(columns, tokens, q.device), self.plan.attention.num_kv_heads)
        new: dict[Side, Tensor] = {"k": keys[:, :, -tokens:], "v": values[:, :, -tokens:]}
        store_tokens(self.stores, self.forms, rows, columns, new, CACHE_DTYPES[state.shared.plan.cache_dtype], heard)
        if self._is_last:
            state.set_columns(columns + tokens)
            state.check()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns that a mask covers, the first of them). A step has none: what it attends to is known by the lengths
        alone."""
        if self.state.is_step(query_length):
            return 0, 0
        columns = int(self.get_seq_length())
        past = self.past_columns(columns)
        return past + query_length, columns - past

    def past_columns(self, columns: int) -> int:
        """How many of the last of so many columns a prompt attends to."""
        return columns

    def get_seq_length(self) -> Any:
        """Columns fed: a tensor on the device, as transformers' static layers have it, or 0 before the first update.
        A copy: the original moves on with every step."""
        return self.state.columns.clone() if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.state.max_tokens

    def tokens_to_next_page(self) -> int:
        """New tokens after which a page of some row is due, or that the next stage of a schedule does not follow."""
        formats = {fmt for fmt in (*self.plan.k, *self.plan.v) if fmt.num_bits != RAW_BITS}
        lengths = set(self.state.lengths.tolist()) if self.is_initialized else {0}
        found = [fmt.tokens_to_next_event(n, NEVER) for fmt in formats for n in lengths]
        if self.state.pool is not None:
            found.append(self.state.pool.tokens_to_next_stage())
        return min(found, default=self.state.max_tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, or repeated, int64 [B]; the cache does the same to the shared state."""
        for store in self.stores:
            store.select(beam_idx.to(self.state.lengths.device))
        if self.forms is not None:
            self.forms.select(beam_idx.to(self.state.lengths.device))

    def reset(self) -> None:
        for store in self.stores:
            store.reset()

    def _allocate_stores(self) -> Sequence[Store]:
        kind, pool = HeadStore if self.state.pool is None else StagedStore, self.state.pool
        stores = [kind.allocate(self.plan, pair, self.state) for pair in head_ranges(self.plan)]
        if pool is not None:
            pool.stores += [store for store in stores if isinstance(store, StagedStore)]
        self.forms = LayerForms(self.plan, self.state, stores) if self.form_reasons else None
        return stores

    @torch.compiler.disable
    def _dense(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        state, cache_dtype = self.state, CACHE_DTYPES[self.state.shared.plan.cache_dtype]
        columns, rows, tokens = int(state.columns), state.rows, new_keys.shape[2]
        past = self.past_columns(columns)
        state.require_room(max(rows.lengths(columns + tokens)))
        state.shared.require_scheduled(state.batch, columns + tokens)
        if self._is_first and state.pool is not None:
            state.pool.prepare(tokens)
        found = []
        for side, new in zip(SIDES, (new_keys, new_values), strict=True):
            rounded = new.to(cache_dtype).to(new.dtype)
            if past:
                whole = new.new_zeros(*new.shape[:2], past + tokens, new.shape[3])
                read_past(self.stores, self.forms, side, rows, columns, whole[:, :, :past])
                whole[:, :, past:] = rounded
                rounded = whole
            found.append(rounded)
        return found[0], found[1]
