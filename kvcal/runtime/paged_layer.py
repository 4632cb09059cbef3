"""A full-attention layer behind the interface of transformers, stored as its plan says.

A layer's ``update`` returns dense keys and values, as every attention implementation expects: the past as it is
stored, the new tokens unquantized (rounded to the cache's dtype). So a prompt attends to itself at full precision,
and a token becomes quantized for the tokens after the update that packs it. Reading before writing makes a chunk
that ends where a page fills see exactly what its tokens would have seen one by one.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcal.errors import ArtifactError
from kvcal.geometry import CACHE_DTYPES
from kvcal.plan import RAW, LayerPlan, Side
from kvcal.runtime.paged_tensor import PagedTensor
from kvcal.runtime.rows import Block, Padding, Rows

# A distance in tokens beyond any context: 16-bit pages lose nothing, whenever they are written.
NO_PAGE = 1 << 30


def side_tensors(layer: LayerPlan, side: Side, cache_dtype: str, batch: int, device: torch.device) -> list[PagedTensor]:
    """One PagedTensor for each run of neighbouring heads with the same format."""
    tensors, first = [], 0
    for fmt, run in itertools.groupby(layer.head_formats(side)):
        heads = slice(first, first + len(list(run)))
        tensors.append(PagedTensor(fmt, side, heads, layer.head_dim(side), cache_dtype, batch, device))
        first = heads.stop
    return tensors


class PagedLayer(CacheLayerMixin):
    """A full-attention layer stored as its plan says."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, plan: LayerPlan, cache_dtype: str, padding: Padding) -> None:
        super().__init__()
        self.plan = plan
        self.cache_dtype = cache_dtype
        self.padding = padding
        self.columns = 0
        self.sides: dict[Side, list[PagedTensor]] = {"k": [], "v": []}

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for paged in self.sides.values() for part in paged for tensor in part.tensors]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """key_states [B, N, T, k_head_dim], value_states [B, N, T, v_head_dim].

        Raises:
            ArtifactError: the model's heads or head sizes are not the plan's.
        """
        geometry = self.plan.attention
        expected = (geometry.num_kv_heads, geometry.k_head_dim, geometry.v_head_dim)
        found = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        if found != expected:
            raise ArtifactError(
                f"layer {geometry.index} caches {found[0]} KV heads of size {found[1]} (K) and {found[2]} (V), but the "
                f"plan is for {expected[0]} of {expected[1]} and {expected[2]}",
                hint="the plan was compiled for another model",
            )
        batch, device = key_states.shape[0], key_states.device
        self.padding.resolve(batch)
        for side in self.sides:
            self.sides[side] = side_tensors(self.plan, side, self.cache_dtype, batch, device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens [B, N, T, D]; return all of them [B, N, S + T, D] in the dtype given. Padding columns of the
        past are zero, those of the new tokens as they came."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self.padding.resolve(key_states.shape[0])
        keys = self._update_side("k", key_states, rows)
        values = self._update_side("v", value_states, rows)
        self.columns += key_states.shape[2]
        return keys, values

    def _update_side(self, side: Side, states: Tensor, rows: Rows) -> Tensor:
        new = states.to(CACHE_DTYPES[self.cache_dtype])
        result = new.to(states.dtype)
        if self.columns:
            past = self._read_side(side, rows, states)
            past[:, :, self.columns :] = result
            result = past
        self._store_side(side, new, rows)
        return result

    def _store_side(self, side: Side, new: Tensor, rows: Rows) -> None:
        """Append new [B, N, T, D], in the cache's dtype, behind what every row holds."""
        if new.shape[2] == 1 and self.columns >= rows.width:
            num_tokens = rows.lengths(self.columns)
            ragged = [part for part in self.sides[side] if not part.append_step(num_tokens, new[:, part.heads])]
        else:
            ragged = self.sides[side]
        for paged, block in itertools.product(ragged, rows.blocks):
            held = rows.num_tokens(block, self.columns)
            for start, stop in rows.intervals(block, self.columns, self.columns + new.shape[2]):
                chunk = new[block.rows, paged.heads, start - self.columns : stop - self.columns]
                paged.append(block.rows, held, chunk)
                held += stop - start

    def _read_side(self, side: Side, rows: Rows, states: Tensor) -> Tensor:
        """[B, N, S + T, D]: the past at its columns, zero at padding; the last T columns are left to the caller."""
        batch, heads, new, dim = states.shape
        padded = any(block.start or block.stop < rows.width for block in rows.blocks)
        allocate = torch.zeros if padded else torch.empty
        out = allocate(batch, heads, self.columns + new, dim, dtype=states.dtype, device=states.device)
        for paged in self.sides[side]:
            decoded = paged.layout.decode(paged.pages)
            for block in rows.blocks:
                self._read_block(paged, block, rows, decoded[paged.page_range(block.rows)], out)
        return out

    def _read_block(self, paged: PagedTensor, block: Block, rows: Rows, decoded: Tensor, out: Tensor) -> None:
        """Write the past of one block's rows to its columns of out [B, N, columns, D]; ``decoded``: their pages."""
        view = out[block.rows, paged.heads]
        intervals = rows.intervals(block, 0, self.columns)
        if len(intervals) == 1:
            (start, stop) = intervals[0]
            paged.read(block.rows, stop - start, decoded, view[:, :, start:stop])
        elif intervals:
            tokens = view.new_empty(*view.shape[:2], rows.num_tokens(block, self.columns), view.shape[3])
            paged.read(block.rows, tokens.shape[2], decoded, tokens)
            for start, stop in intervals:
                view[:, :, start:stop], tokens = tokens[:, :, : stop - start], tokens[:, :, stop - start :]

    def tokens_to_next_page(self) -> int:
        """New tokens after which a page of some row is quantized (evaluation cuts its chunks there)."""
        rows = self.padding.rows
        if rows is None:
            formats = [fmt for fmt in (*self.plan.k, *self.plan.v) if fmt != RAW]
            return min((fmt.num_sink_tokens + fmt.buffer_tokens for fmt in formats), default=NO_PAGE)
        distances = [NO_PAGE]
        quantized = [paged for paged in (*self.sides["k"], *self.sides["v"]) if paged.format != RAW]
        for paged, block in itertools.product(quantized, rows.blocks):
            num_tokens = rows.num_tokens(block, self.columns)
            missing_sinks = max(0, paged.format.num_sink_tokens - num_tokens)
            free = paged.format.buffer_tokens - paged.num_buffered(block.rows.start, num_tokens)
            distances.append(missing_sinks + free)
        return min(distances)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n columns (n negative), or, as older transformers ask, keep the first n (n positive)."""
        tokens_to_remove = int(tokens_to_remove)  # older transformers hand over a tensor
        columns = tokens_to_remove if tokens_to_remove > 0 else self.columns + tokens_to_remove
        if not self.is_initialized or columns >= self.columns:
            return
        rows = self.padding.rows
        assert rows is not None
        self.columns = max(0, columns)
        for paged, block in itertools.product([*self.sides["k"], *self.sides["v"]], rows.blocks):
            paged.crop(block.rows, rows.num_tokens(block, self.columns))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep, repeat or reorder sequences; the cache does the same to the shared padding."""
        for paged in [*self.sides["k"], *self.sides["v"]]:
            paged.select(beam_idx.tolist())

    def reset(self) -> None:
        self.columns = 0
        self.sides = {"k": [], "v": []}
        self.is_initialized = False
