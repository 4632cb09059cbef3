"""The interface of a layer to ``PlanCache`` and ``kvcal.attached``, whatever it stores.

    PagedLayer, BoundedLayer, HybridLayer, StateLayer   of a dynamic cache
    StaticPages, StaticWindow                           of a static one

``AttentionLayer`` is what those with keys and values of ours share: new tokens that wait for their attention, and
steps by the kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcal.errors import ArtifactError, UsageError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Side
from kvcal.store.layer_store import LayerStore, NewTokens
from kvcal.store.padding import Padding, Rows
from kvcal.store.paged_tensor import PagedTensor
from kvcal.store.state import PlanState
from kvcal.systems.kitty.scores import query_sum

# A distance in tokens beyond any context: 16-bit pages lose nothing, whenever they are written.
NO_PAGE = 1 << 30
DYNAMIC_HINT = "build the PlanCache without max_tokens: the dynamic cache takes every plan, in torch"
ANOTHER_MODEL = "the plan was compiled for another model"


class PlanLayer(ABC):
    """A layer of a plan cache. The defaults are of one without pages, whose attention is the model's own.
    ``keeps_state``: of linear attention."""

    keeps_state = False

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Tensors that count as the plan's bytes."""

    def observe(self, q_post_BHTD: Tensor) -> None:  # noqa: B027 - mostly nothing
        """Take the queries of the last update, once its attention is computed."""

    def mask_of(self, attention_mask: Tensor | None, query_BHTD: Tensor, base: str) -> Tensor | None:
        """The mask of the last update's attention, by the implementation ``base``: mostly the model's."""
        return attention_mask

    def tokens_to_next_page(self) -> int:
        """New tokens that are stored and read together as one by one (evaluation cuts its chunks there)."""
        return NO_PAGE

    def require_padding(self, prompt: Rows | None) -> None:  # noqa: B027 - mostly nothing
        """UnsupportedModel for a prompt whose padding the layer cannot take."""

    def require_croppable(self, rows: Rows, held: int, kept: int) -> None:  # noqa: B027 - mostly nothing
        """UsageError or UnsupportedModel where the first ``kept`` of ``held`` columns cannot be gone back
        to."""

    @abstractmethod
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n columns (n negative or 0)."""

    def is_as_planned(self) -> bool:
        """Whether there is a state, and of the plan's size. ArtifactError: of another one."""
        return True

    def make_room(self, tokens: int, device: torch.device) -> None:  # noqa: B027 - mostly nothing
        """Room, in an empty layer, for one sequence of so many tokens, which the caller fills in."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of one sequence, by their names in a prefix file."""
        yield from ()


class AttentionLayer(CacheLayerMixin, PlanLayer):
    """Keys and values of a layer, stored as ``plan`` says; ``state`` is the cache's. ``pending``: new tokens
    that wait for their attention. ``parts``: of pages, once there are any. ``is_stepped``: kernels take steps of a
    dynamic cache's layer."""

    is_sliding = is_stepped = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, plan: LayerPlan, state: PlanState) -> None:
        CacheLayerMixin.__init__(self)
        self.plan, self.state = plan, state
        self.pending: NewTokens | None = None
        self._store: LayerStore | None = None

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
        return list(self.sides.values())

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.tensors]

    def new_tokens(self, key_states: Tensor, value_states: Tensor, columns: int) -> NewTokens:
        """Keys and values [B, N, T, D] after so many columns, in the cache's dtype."""
        dtype, rows = CACHE_DTYPES[self.state.plan.cache_dtype], self.padding.resolve(key_states.shape[0])
        return NewTokens(key_states.to(dtype), value_states.to(dtype), rows, columns)

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
        self.write(new, per_head)

    @abstractmethod
    def write(self, new: NewTokens, query_sum: Tensor | None) -> None:
        """Store new tokens. ``query_sum`` [B, N, D]: of their |q|, where channels are chosen by queries."""

    @abstractmethod
    def awaits_step(self, tokens: int) -> bool:
        """Whether the last update, of so many tokens, left storing and attending to ``attend``."""

    @abstractmethod
    def attend(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        """A step: store k_new, v_new [B, N, S, D], and attend from q [B, N G, S, D] to all tokens up to each
        one.

        Returns [B, S, N G, D] in q's dtype, as attention functions do. ``softcap`` 0 for none.
        """

    def require_observed(self) -> None:
        """UsageError when the attention of the last update was not observed: its tokens would be lost."""
        if self.pending is not None:
            raise UsageError(
                f"layer {self.plan.geometry.index} needs the queries of its tokens, which it was not given",
                hint="call the model within `with kvcal.attached(model):`",
            )


def tokens_to_next_event(plan: LayerPlan, rows: Rows | None, columns: int) -> int:
    """New tokens after ``columns`` that the layer stores and reads together as one by one."""
    formats = {fmt for fmt in plan.formats if fmt != RAW}
    lengths = {0} if rows is None else set(rows.lengths(columns))
    return min((fmt.tokens_to_next_event(n, columns) for fmt in formats for n in lengths), default=NO_PAGE)


def cropped_columns(held: int, tokens_to_remove: Any) -> int:
    """Columns left of ``held`` without the last -n (n negative or 0), or, as older transformers ask, of which
    the first n are kept (n positive)."""
    tokens = int(tokens_to_remove)  # older transformers hand over a tensor
    return min(held, max(0, tokens if tokens > 0 else held + tokens))


def by_token(tokens: int, *new: Tensor) -> list[Tensor]:
    """Queries, keys and values [B, n, S, D] of a step as operators take them: [B, n, D], of several tokens
    [B, S, n, D]."""
    return [x.squeeze(2) if tokens == 1 else x.transpose(1, 2) for x in new]


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
