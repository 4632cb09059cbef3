"""A full-attention layer behind the interface of transformers, stored as its plan says.

A prompt, or any chunk, goes through ``update``: it returns dense keys and values, as every attention
implementation expects: the past as it is stored, the new tokens unquantized (rounded to the cache's dtype).
So a prompt attends to itself at full precision, and a token becomes quantized for the tokens after the update
that packs it. Reading before writing makes a chunk that ends where a page fills see exactly what its tokens
would have seen one by one.

Where attention is needed for storing (query scores; a static cache, whose context checks the padding), new
tokens are stored by ``observe``, once the attention of the same update is called.

One token for every row of a static cache is a step: ``update`` hands over the new keys and values alone, and
``attend`` stores them and reads packed pages, without a dense copy of the past. A step never waits for the
device. A token with up to ``lookahead`` drafts after it is a step, too: each attends as if it came alone, and
``crop`` takes back rejected ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry
from kvcal.kernels.choice import draft_reasons, refusals, slow_reasons
from kvcal.kernels.variants import variant_of
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.scores import query_sum
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Side
from kvcal.store.layer_store import DecodedCopy, LayerStore, NewTokens
from kvcal.store.padding import Padding, Rows
from kvcal.store.sinks_ring_pages import PagedTensor
from kvcal.store.state import PlanState, StepState

# A distance in tokens beyond any context: 16-bit pages lose nothing, whenever they are written.
NO_PAGE = 1 << 30
DYNAMIC_HINT = "build the PlanCache without max_tokens: the dynamic cache takes every plan, in torch"

ANOTHER_MODEL = "the plan was compiled for another model"

Allocate = Callable[[int, torch.device], None]


class PagedLayer(CacheLayerMixin):
    """See the module's docstring. ``state`` is the cache's; ``static`` and ``allocate`` (what allocates the
    whole cache, given batch and device) are a static cache's. ``pending``: new tokens that wait for their
    attention."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        plan: LayerPlan,
        state: PlanState,
        static: StepState | None = None,
        allocate: Allocate | None = None,
        keep_decoded: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.state, self.static = plan, state, static
        self.pending: NewTokens | None = None
        self.decoded = DecodedCopy() if keep_decoded else None
        self._store: LayerStore | None = None
        self._allocate, self._columns = allocate, 0
        self._is_last = static is not None and plan == static.layers[-1]
        self.is_compileable = static is not None

    @property
    def padding(self) -> Padding:
        return self.state.padding

    @property
    def store(self) -> LayerStore:
        assert self._store is not None
        return self._store

    @property
    def sides(self) -> dict[Side, PagedTensor]:
        return {} if self._store is None else self._store.sides

    @property
    def parts(self) -> list[PagedTensor]:
        return [] if self._store is None else self._store.parts

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that count as the plan's bytes."""
        return [tensor for part in self.parts for tensor in part.tensors]

    @property
    def control(self) -> list[Tensor]:
        """Tensors that a step changes besides, no part of the plan's bytes."""
        return [part.query_since for part in self.parts]

    @property
    def columns(self) -> int:
        """Columns that were fed, padding included. Waits for the device in a static cache."""
        if self.static is None:
            return self._columns
        return int(self.static.columns) if self.is_initialized else 0

    @property
    def slow_reasons(self) -> list[str]:
        """Why the plain kernel serves a step on CUDA; usually nothing."""
        return list(slow_reasons(self.plan, self.state.plan.cache_dtype))

    @torch.compiler.disable
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage for the rows of key_states [B, N, T, k_head_dim], on their device; of a static cache, for
        all layers."""
        create = self.create if self._allocate is None else self._allocate
        create(key_states.shape[0], key_states.device)

    def create(self, batch: int, device: torch.device) -> None:
        """Empty storage for ``batch`` rows. UnsupportedModel where the kernels do not take a static cache's
        layer."""
        self.padding.resolve(batch)
        if self.static is not None and device.type == "cuda":
            cache_dtype = self.state.plan.cache_dtype
            drafts = draft_reasons(variant_of(self.plan, cache_dtype)) if self.state.lookahead else ()
            for reason in itertools.chain(refusals(self.plan, cache_dtype), drafts):
                raise UnsupportedModel(
                    f"the kernels cannot serve layer {self.plan.geometry.index}: {reason}", hint=DYNAMIC_HINT
                )
        self._store = LayerStore(self.plan, self.state, self.static, batch, device)
        self.is_initialized = True

    def resume(self, columns: int) -> None:
        """Room, in an empty dynamic cache, for so many columns whose contents are filled in by the caller."""
        rows = self.padding.rows
        assert rows is not None and self.static is None
        self.store.set_bits(columns)
        self.store.resize(rows.lengths(columns))
        for part in self.parts:  # the file does not say which tokens before these were cropped
            part.oldest = [PAGE_TOKENS * part.format.pages_read(columns)]
        self._columns = columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """New tokens [B, N, T, D] -> what their attention takes: for a step of a static cache the same,
        otherwise all tokens [B, N, S + T, D] in the dtype given. Padding columns of the past are zero, those
        of the new tokens as they came."""
        require_shapes(self.plan.attention, key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.static is not None:
            self._require_served(self.static, key_states)
            if self.static.is_step(key_states.shape[2]):
                if not torch.compiler.is_compiling():
                    self.static.require_room(self.static.longest + key_states.shape[2])
                return key_states, value_states
        return self._update(key_states, value_states)

    @torch.compiler.disable
    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.require_observed()
        batch, tokens, columns = key_states.shape[0], key_states.shape[2], self.columns
        rows = self.padding.resolve(batch)
        self.state.require_scheduled(batch, columns + tokens)
        if self.static is not None:
            self.static.require_room(max(rows.lengths(columns + tokens)))
        # Every update begins by shrinking pages to the bits of the columns after it: nothing ever takes more.
        if self.static is None:
            self.store.set_bits(columns + tokens)
        cache_dtype = CACHE_DTYPES[self.state.plan.cache_dtype]
        new = NewTokens(key_states.to(cache_dtype), value_states.to(cache_dtype), rows, columns)
        keys = self._whole("k", new.keys, key_states.dtype, rows, columns)
        values = self._whole("v", new.values, value_states.dtype, rows, columns)
        if self.static is not None or self.plan.needs_queries:
            self.pending = new
        else:
            self._write(new, None)
        self._columns += tokens
        return keys, values

    def skip(self, tokens: int) -> None:
        """Count columns that are never stored nor read, in a dynamic cache that is fed none here."""
        self._columns += tokens

    def _whole(self, side: Side, new: Tensor, dtype: torch.dtype, rows: Rows, columns: int) -> Tensor:
        """The past and new [B, N, T, D] together: new tokens as they are read until they are packed."""
        new = self.sides[side].kept(new, dtype)
        if self.decoded is not None:
            return self.decoded.whole(self.sides[side], side, new, rows, columns)
        if not columns:
            return new
        whole = self.store.read(side, rows, columns, new.shape[2], dtype)
        whole[:, :, columns:] = new
        return whole

    def verify_decoded(self, rows: Rows) -> None:
        if self.decoded is None or not self.decoded.dense:  # or nothing was read since a crop
            return
        for side, dense in self.decoded.dense.items():
            fresh = self.store.read(side, rows, self.columns, 0, dense.dtype)
            difference = self.decoded.difference(self.sides[side], side, rows, fresh)
            # Products with a basis round by the number of tokens that are read at once.
            allowed = 1e-6 * float(fresh.abs().max()) if self.plan.basis(side) else 0.0
            if not difference <= allowed:
                raise ArtifactError(
                    f"layer {self.plan.geometry.index}: the decoded {side} differ from the packed cache by "
                    f"{difference:g}, expected {allowed:g}",
                    hint="the packed cache changed under the evaluation: please report this",
                )

    @torch.compiler.disable
    def observe(self, q_post_BHTD: Tensor) -> None:
        """Store the tokens of the last update that waits for its attention, whose queries these are."""
        if self.pending is None:
            return
        new, self.pending = self.pending, None
        per_head = None
        if self.plan.needs_queries:
            real_BT = new.rows.mask(new.columns, new.keys.shape[2], q_post_BHTD.device)
            per_head = query_sum(q_post_BHTD, real_BT, new.keys.shape[1])
        self._write(new, per_head)

    def _write(self, new: NewTokens, query_sum: Tensor | None) -> None:
        """After the last layer, a static cache is as far as these tokens, and says what its kernels found."""
        self._store_tokens(new, query_sum)
        if self.static is not None and self._is_last:
            self.static.set_columns(new.stop)
            self.static.check()

    def _store_tokens(self, new: NewTokens, query_sum: Tensor | None) -> None:
        self.store.write(new, query_sum)

    def require_observed(self) -> None:
        """UsageError when the attention of the last update was not observed: its tokens would be lost."""
        if self.pending is not None:
            raise UsageError(
                f"layer {self.plan.geometry.index} needs the queries of its tokens, which it was not given",
                hint="call the model within `with kvcal.attached(model):`",
            )

    def _require_served(self, static: StepState, key_states: Tensor) -> None:
        static.require_served()
        if key_states.device != static.lengths.device:
            raise UnsupportedModel(
                f"layer {self.plan.geometry.index} is on {key_states.device}, the static cache on "
                f"{static.lengths.device}; allowed: a model on one device",
                hint=DYNAMIC_HINT,
            )
        if key_states.shape[0] != static.batch:
            raise UsageError(
                f"the cache was allocated for {static.batch} sequences and was given {key_states.shape[0]}",
                hint="build a new PlanCache for another batch; without max_tokens, reset() is enough",
            )

    def attend(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        """A step: store k_new, v_new [B, N, S, D], and attend from q [B, N G, S, D] to all tokens up to each
        one.

        Returns [B, S, N G, D] in q's dtype, as attention functions do. ``softcap`` 0 for none.
        """
        assert self.static is not None
        tokens = q.shape[2]
        q, k_new, v_new = (x.squeeze(2) if tokens == 1 else x.transpose(1, 2) for x in (q, k_new, v_new))
        attended = self._step(q, k_new, v_new, s_aux, scale, softcap)
        if self._is_last:
            self.static.advance_step(tokens)
        return attended.unsqueeze(1) if tokens == 1 else attended

    def _step(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        return self.store.attend(q, k_new, v_new, s_aux, scale, softcap)

    def tokens_to_next_page(self) -> int:
        """New tokens that are stored and read together as one by one (evaluation cuts its chunks there)."""
        return tokens_to_next_event(self.plan, self.padding.rows, self.columns)

    def past_columns(self, columns: int) -> int:
        """Number of the last of so many columns that a prompt attends to."""
        return columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns that a mask covers, the first of them). A step has none: what it attends to is known by
        the lengths alone."""
        if self.static is not None and self.static.is_step(query_length):
            return 0, 0
        columns = self.columns
        past = self.past_columns(columns)
        return past + query_length, columns - past

    def get_seq_length(self) -> Any:
        """Columns fed. Of a static cache a tensor on the device, as transformers' static layers have it: a
        copy, as the original moves on with every step; 0 before the first update."""
        if self.static is None:
            return self._columns
        return self.static.columns.clone() if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1 if self.static is None else self.static.max_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n columns (n negative), or, as older transformers ask, keep the first n (n
        positive)."""
        tokens_to_remove = int(tokens_to_remove)  # older transformers hand over a tensor
        held, rows = self.columns, self.padding.rows
        columns = max(0, tokens_to_remove if tokens_to_remove > 0 else held + tokens_to_remove)
        if rows is None or not self.is_initialized or columns >= held:
            return
        self.require_observed()
        self.store.crop(rows, held, columns)
        self._columns = columns
        self._forget_decoded()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep, repeat or reorder sequences; the cache does the same to the shared padding."""
        self.require_observed()
        if self._store is not None:
            self._store.select(beam_idx.tolist())
        self._forget_decoded()

    def reset(self) -> None:
        """No tokens. A static cache keeps its memory."""
        self._columns, self.pending = 0, None
        self._forget_decoded()
        if self.static is None:
            self._store, self.is_initialized = None, False
        for part in self.parts:
            part.reset()

    def _forget_decoded(self) -> None:
        if self.decoded is not None:
            self.decoded = DecodedCopy()


def tokens_to_next_event(plan: LayerPlan, rows: Rows | None, columns: int) -> int:
    """New tokens after ``columns`` that the layer stores and reads together as one by one."""
    formats = {fmt for fmt in plan.formats if fmt != RAW}
    lengths = {0} if rows is None else set(rows.lengths(columns))
    return min((fmt.tokens_to_next_event(n, columns) for fmt in formats for n in lengths), default=NO_PAGE)


def require_shapes(geometry: AttentionGeometry, key_states: Tensor, value_states: Tensor) -> None:
    """ArtifactError unless key_states [B, N, T, k_head_dim] and value_states [B, N, T, v_head_dim] have the
    heads and head sizes of the plan; UsageError for values of other sequences, heads or tokens than the
    keys."""
    expected = (geometry.num_kv_heads, geometry.k_head_dim, geometry.v_head_dim)
    found = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
    if found != expected:
        raise ArtifactError(
            f"layer {geometry.index} caches {found[0]} KV heads of size {found[1]} (K) and {found[2]} (V), but the "
            f"plan is for {expected[0]} of {expected[1]} and {expected[2]}",
            hint=ANOTHER_MODEL,
        )
    if value_states.shape[:-1] != key_states.shape[:-1]:
        raise UsageError(
            f"layer {geometry.index} is given keys {list(key_states.shape)} and values {list(value_states.shape)}, "
            "expected the same sequences, heads and tokens"
        )
