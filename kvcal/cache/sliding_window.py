"""A sliding-window layer: 16 bits, bounded, counted to the byte, behind the interface of transformers.

``BoundedLayer`` is of a dynamic cache: transformers' own, without its hold on the whole prompt.
``StaticWindow`` is of a static one: like a full-attention layer, but for the past that it holds, the last W -
1 columns for a window of W. A prompt, or a chunk of one, is handed these and its own, under the masks that
transformers makes for its own sliding-window layers; a step takes no mask, since all that a row still holds
is in its window.

That is so where a row's tokens lie in neighbouring columns: masks count columns, and a row counts tokens. So
padding after the tokens of a row is refused, and so is attention in chunks (Llama-4), whose windows begin
anew.

A ``StaticWindow``'s memory is allocated once: the last W - 1 tokens of every row in a ring. A step is
``append_window`` (kvcal.kernels.ops), then ``decode``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcal.cache.plan_layer import PlanLayer, require_shapes
from kvcal.cache.static_layer import StaticLayer
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry
from kvcal.kernels.operands import Memory, Place
from kvcal.plan.page_format import RAW, SIDES, Side
from kvcal.store.layer_store import NewTokens
from kvcal.store.padding import Block, Padding, Rows
from kvcal.store.pool import fixed
from kvcal.store.sinks_ring_pages import Part, row_map
from kvcal.store.step import WindowedStep


class StaticWindow(StaticLayer):
    """See the module's docstring."""

    is_sliding = True

    def create(self, batch: int, device: torch.device) -> None:
        static, geometry, cache_dtype = self.static, self.plan.attention, self.state.plan.cache_dtype
        assert geometry.window is not None
        num_heads, dim, dtype = geometry.num_kv_heads, geometry.k_head_dim, CACHE_DTYPES[cache_dtype]
        self.ring_tokens = min(static.max_tokens, geometry.window - 1)
        shape = (static.batch, num_heads, self.ring_tokens, dim)
        k_ring, v_ring = (fixed(torch.zeros(shape, dtype=dtype, device=device)) for _ in SIDES)
        no_pages = torch.empty(0, num_heads, 0, dtype=torch.uint8, device=device)
        no_table, none = torch.empty(static.batch, 0, dtype=torch.int32, device=device), static.scratch.none
        k = Memory(static.evicted("k", num_heads, dim, dtype), k_ring, no_pages)
        v = Memory(static.evicted("v", num_heads, dim, dtype), v_ring, no_pages)
        self._rings: dict[Side, Part] = {"k": Part(k.sinks, k.ring, RAW), "v": Part(v.sinks, v.ring, RAW)}
        self._place = Place(static.lengths, no_table, none, none, none)
        self._windowed = WindowedStep.of(geometry, cache_dtype, k, v, static.scratch)
        self.is_initialized = True

    @property
    def tensors(self) -> list[Tensor]:
        return [part.ring for part in self._rings.values()] if self.is_initialized else []

    def step(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, s_aux: Tensor | None, scale: float, softcap: float
    ) -> Tensor:
        queries = self._windowed.append(q, k_new, v_new, self._place)
        return self._windowed.attend(queries, self._place, scale, softcap, s_aux, q.dtype)

    def past_columns(self, columns: int) -> int:
        window = self.plan.attention.window
        assert window is not None
        return min(columns, window - 1)

    def require_padding(self, prompt: Rows | None) -> None:
        require_left_padding(prompt)

    def require_croppable(self, rows: Rows, held: int, kept: int) -> None:
        for count, left in zip(rows.lengths(held), rows.lengths(kept), strict=True):
            if left < count and count > self.ring_tokens:
                raise UsageError(
                    f"cannot remove {count - left} of {count} tokens: tokens before them have left the sliding window "
                    f"of {self.ring_tokens + 1}"
                )

    def crop(self, tokens_to_remove: int) -> None:
        """The ring stays as it is: tokens to come replace those that were removed."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.require_observed()
        for tensor in self.tensors:
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def whole(self, side: Side, states: Tensor, dtype: torch.dtype, new: NewTokens) -> Tensor:
        past = self.past_columns(new.columns)
        shape = *states.shape[:2], past + states.shape[2], states.shape[3]
        whole = torch.zeros(shape, dtype=dtype, device=states.device)
        for block in new.rows.blocks if past else ():
            self._read_window(side, block, new.rows, new.columns, whole[block.rows, :, :past])
        whole[:, :, past:] = states
        return whole

    def _read_window(self, side: Side, block: Block, rows: Rows, columns: int, out: Tensor) -> None:
        """The tokens of a block's rows in the last S of so many columns, to out [b, N, S, D]."""
        base = columns - out.shape[2]
        intervals = [(start - base, stop - base) for start, stop in rows.intervals(block, base, columns)]
        count = sum(stop - start for start, stop in intervals)
        if not count:
            return
        tokens = out.new_empty(*out.shape[:2], count, out.shape[3])
        self.read_window(side, block.rows, rows.num_tokens(block, columns), tokens)
        for start, stop in intervals:
            out[:, :, start:stop], tokens = tokens[:, :, : stop - start], tokens[:, :, stop - start :]

    def store_prompt(self, new: NewTokens, query_sum: Tensor | None) -> None:
        for block in new.rows.blocks:
            intervals = new.rows.intervals(block, new.columns, new.stop)
            if not intervals:
                continue
            tokens: dict[Side, Tensor] = {}
            for side, states in zip(SIDES, (new.keys, new.values), strict=True):
                chunks = [states[block.rows, :, a - new.columns : b - new.columns] for a, b in intervals]
                tokens[side] = torch.cat(chunks, dim=2)
            self.extend_window(block.rows, new.rows.num_tokens(block, new.columns), tokens)

    def read_window(self, side: Side, rows: slice, num_tokens: int, out: Tensor) -> None:
        """Write the last T of the ``num_tokens`` tokens of each of ``rows`` to out [b, N, T, D], T as many as
        there are in the ring at most."""
        out.copy_(self._rings[side].newest(row_map(rows, out.device), num_tokens - out.shape[2], num_tokens))

    def extend_window(self, rows: slice, num_tokens: int, new: Mapping[Side, Tensor]) -> None:
        """Store T new tokens [b, N, T, D] (T 1 or more, cache dtype) after the ``num_tokens`` of each of
        ``rows``."""
        for side, x in new.items():
            self._rings[side].put_last(row_map(rows, x.device), num_tokens + x.shape[2], x)


class BoundedLayer(DynamicSlidingWindowLayer, PlanLayer):
    """A sliding-window layer at 16 bits: the parent's behaviour, in the cache's dtype, without the parent's
    hold on the whole prompt."""

    def __init__(self, geometry: AttentionGeometry, cache_dtype: str, padding: Padding) -> None:
        assert geometry.window is not None
        super().__init__(sliding_window=geometry.window)
        self.geometry = geometry
        self.cache_dtype = CACHE_DTYPES[cache_dtype]
        self.padding = padding

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.keys, self.values) if tensor is not None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the parent's; refused as by ``PagedLayer.update``."""
        require_shapes(self.geometry, key_states, value_states)
        dtype = key_states.dtype
        self.padding.resolve(key_states.shape[0])
        if self.record_past:
            self.crop(0)  # what the last update kept for a crop is not needed any more
        keys, values = super().update(key_states.to(self.cache_dtype), value_states.to(self.cache_dtype))
        self._own()
        return keys.to(dtype), values.to(dtype)

    def crop(self, tokens_to_remove: int) -> None:
        if self.keys is None:
            return
        tokens_to_remove = int(tokens_to_remove)  # older transformers hand over a tensor
        self._require_removable(-tokens_to_remove)
        if self.record_past or tokens_to_remove:
            super().crop(tokens_to_remove)
            self._own()

    def require_croppable(self, rows: Rows, held: int, kept: int) -> None:
        self._require_removable(held - kept)

    def _require_removable(self, tokens: int) -> None:
        """UsageError where so many of the last tokens cannot be removed: see ``crop``."""
        if self.keys is None:
            return
        spare = max(0, self.keys.shape[2] - self.sliding_window + 1)
        if self.cumulative_length >= self.sliding_window and tokens > spare:
            raise UsageError(
                f"cannot remove {tokens} tokens: the window of {self.sliding_window} tokens is full, with {spare} "
                "tokens beyond it",
                hint="call activate_past_recording() before the update, or reset() and start again",
            )

    def make_room(self, tokens: int, device: torch.device) -> None:
        geometry, count = self.geometry, min(tokens, self.sliding_window - 1)
        shapes = [(1, geometry.num_kv_heads, count, dim) for dim in (geometry.k_head_dim, geometry.v_head_dim)]
        self.update(*(torch.empty(shape, dtype=self.cache_dtype, device=device) for shape in shapes))
        self.cumulative_length = tokens

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        assert self.keys is not None and self.values is not None
        yield from (("keys", self.keys), ("values", self.values))

    def _own(self) -> None:
        """Copy what is kept out of the larger tensors that the parent's slices keep alive."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys.clone(), self.values.clone()


def require_left_padding(rows: Rows | None) -> None:
    """UnsupportedModel for a prompt with padding after the tokens of a row."""
    if rows is None:
        return
    for row, (start, stop) in enumerate(rows.runs):
        if start < stop < rows.width:
            raise UnsupportedModel(
                f"row {row} of the prompt is padded after its tokens (columns {stop} to {rows.width - 1}), which a "
                "static sliding window would count as tokens",
                hint="pad on the left: tokenizer.padding_side = 'left'",
            )


def window_refusals(config: PretrainedConfig, index: int) -> Iterator[str]:
    """Why the window of layer ``index`` is not one of a row's last tokens; nothing if it is."""
    decoder = config.get_text_config(decoder=True)
    layer_types = getattr(decoder, "layer_types", None)
    is_chunked = getattr(decoder, "sliding_window", None) is None
    if layer_types is not None:
        is_chunked = layer_types[index] == "chunked_attention"
    if is_chunked:
        yield "it attends in chunks, which begin anew"
