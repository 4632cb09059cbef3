"""A full-attention layer behind the interface of transformers, stored as its plan says.

A layer's ``update`` returns dense keys and values, as every attention implementation expects: the past as it is
stored, the new tokens unquantized (rounded to the cache's dtype). So a prompt attends to itself at full precision,
and a token becomes quantized for the tokens after the update that packs it. Reading before writing makes a chunk
that ends where a page fills see exactly what its tokens would have seen one by one.

Where pages are chosen with the help of queries, new tokens are stored once the attention of the same update has been
heard (``observe_queries``): the queries of a chunk's tokens count for the pages that the chunk fills.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcal.cache.shapes import require_shapes
from kvcal.errors import UsageError
from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.pages.codec import PageCodec
from kvcal.pages.scores import query_sum
from kvcal.plan.format import RAW, SIDES, Side
from kvcal.plan.layer import LayerPlan
from kvcal.store.paged_tensor import PagedTensor
from kvcal.store.plan_state import PlanState
from kvcal.store.prediction import Prediction
from kvcal.store.rows import Block, Padding, Rows

# A distance in tokens beyond any context: 16-bit pages lose nothing, whenever they are written.
NO_PAGE = 1 << 30


class PagedLayer(CacheLayerMixin):
    """A full-attention layer stored as its plan says. ``state`` is the cache's: the plan, its tensors, the padding."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, plan: LayerPlan, state: PlanState) -> None:
        super().__init__()
        self.plan = plan
        self.state = state
        self.columns = 0
        self.sides: dict[Side, list[PagedTensor]] = {"k": [], "v": []}
        self.prediction = Prediction(plan, state)
        self.unheard: tuple[Tensor, Tensor, Rows] | None = None

    @property
    def padding(self) -> Padding:
        return self.state.padding

    @property
    def cache_dtype(self) -> CacheDtype:
        return self.state.plan.cache_dtype

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for paged in self.sides.values() for part in paged for tensor in part.tensors]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty storage for the rows of key_states [B, N, T, k_head_dim], on their device."""
        batch, device = key_states.shape[0], key_states.device
        self.padding.resolve(batch)
        tensors = self.state.tensors_on(device)
        for side in SIDES:
            predict = self.prediction.of(side)
            codecs = [
                PageCodec.of_layer(self.plan, side, fmt, heads, self.cache_dtype, tensors)
                for fmt, heads in self.plan.runs(side)
            ]
            self.sides[side] = [PagedTensor(codec, batch, device, predict) for codec in codecs]
        self.prediction.attach(self.sides)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens [B, N, T, D]; return all of them [B, N, S + T, D] in the dtype given. Padding columns of the
        past are zero, those of the new tokens as they came.

        Raises:
            ArtifactError: the model's heads or head sizes are not the plan's.
            UsageError: another batch than before, beyond what the plan's schedule was made for, or queries of the last
                update were not heard.
            NonFiniteActivations: NaN or infinity in a page that is due.
        """
        require_shapes(self.plan.attention, key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.require_heard()
        rows = self.padding.resolve(key_states.shape[0])
        self.state.require_scheduled(key_states.shape[0], self.columns + key_states.shape[2])
        cache_dtype = CACHE_DTYPES[self.cache_dtype]
        new_keys, new_values = key_states.to(cache_dtype), value_states.to(cache_dtype)
        keys = self._whole("k", new_keys, key_states.dtype, rows)
        values = self._whole("v", new_values, value_states.dtype, rows)
        if any(fmt.needs_queries for fmt in self.plan.k):
            self.unheard = (new_keys, new_values, rows)
        else:
            self._store(new_keys, new_values, rows)
        self.columns += key_states.shape[2]
        return keys, values

    def _store(self, new_keys: Tensor, new_values: Tensor, rows: Rows) -> None:
        """Keys first: values may be predicted from them."""
        self._store_side("k", new_keys, rows)
        self._store_side("v", new_values, rows)
        self.prediction.release()

    def observe_queries(self, q_post_BHTD: Tensor) -> None:
        """Hear the queries of the last update, and store its keys and values."""
        if self.unheard is None:
            return
        (new, new_values, rows), self.unheard = self.unheard, None
        self.columns -= new.shape[2]
        real_BT = rows.mask(self.columns, new.shape[2], q_post_BHTD.device)
        per_head = query_sum(q_post_BHTD, real_BT, new.shape[1])
        group = q_post_BHTD.shape[1] // new.shape[1]
        counts = [group * count for count in real_BT.sum(1).tolist()]
        for paged in self.sides["k"]:
            if paged.format.needs_queries:
                paged.observe(per_head[:, paged.heads], counts)
        self._store(new, new_values, rows)
        self.columns += new.shape[2]

    def require_heard(self) -> None:
        """UsageError when the last update's queries were not heard: its keys would be lost."""
        if self.unheard is not None:
            raise UsageError(
                f"layer {self.plan.geometry.index} chooses channels by queries, and hears none",
                hint="call the model within `with kvcal.hear_queries(model):`",
            )

    def _whole(self, side: Side, new: Tensor, dtype: torch.dtype, rows: Rows) -> Tensor:
        """The past and new [B, N, T, D] together."""
        if not self.columns:
            return new.to(dtype)
        whole = self._read_side(side, rows, new.shape[2], dtype)
        whole[:, :, self.columns :] = new
        return whole

    def _store_side(self, side: Side, new: Tensor, rows: Rows) -> None:
        """Append new [B, N, T, D], in the cache's dtype, behind what every row holds. Pages shrink before: those of a
        long prompt are written with the bits that they are to have, and never take more than they will."""
        for paged in self.sides[side]:
            paged.set_bits(paged.format.bits_at(self.columns + new.shape[2]))
        if new.shape[2] == 1 and self.columns >= rows.width:
            num_tokens = rows.lengths(self.columns)
            ragged = [part for part in self.sides[side] if not part.append_step(num_tokens, new[:, part.heads])]
        else:
            ragged = self.sides[side]
        for paged, block in itertools.product(ragged, rows.blocks):
            held = rows.num_tokens(block, self.columns)
            for start, stop in rows.intervals(block, self.columns, self.columns + new.shape[2]):
                chunk = new[block.rows, paged.heads, start - self.columns : stop - self.columns]
                self.prediction.written(side, paged.append(block.rows, held, chunk))
                held += stop - start

    def _read_side(self, side: Side, rows: Rows, new: int, dtype: torch.dtype) -> Tensor:
        """[B, N, S + new, D]: the past at its columns, zero at padding; the last columns are left to the caller."""
        heads = self.plan.attention.num_kv_heads
        padded = any(block.start or block.stop < rows.width for block in rows.blocks)
        allocate = torch.zeros if padded else torch.empty
        shape = (rows.batch, heads, self.columns + new, self.plan.head_dim(side))
        out = allocate(*shape, dtype=dtype, device=self.sides[side][0].pages.device)
        for paged in self.sides[side]:
            decoded = paged.decode(paged.spans(slice(0, rows.batch)), dtype)
            parts = decoded.split([sum(paged.num_pages[block.rows]) for block in rows.blocks])
            for block, part in zip(rows.blocks, parts, strict=True):
                self._read_block(paged, block, rows, part, out)
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
        """New tokens after which a page of some row is written, or pages shrink (evaluation cuts its chunks there)."""
        rows = self.padding.rows
        formats = {fmt for fmt in (*self.plan.k, *self.plan.v) if fmt != RAW}
        if rows is None:
            return min((fmt.tokens_to_next_event(0, 0) for fmt in formats), default=NO_PAGE)
        lengths = set(rows.lengths(self.columns))
        found = (fmt.tokens_to_next_event(n, self.columns) for fmt, n in itertools.product(formats, lengths))
        return min(found, default=NO_PAGE)

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
        self.require_heard()
        rows = self.padding.rows
        assert rows is not None
        self.columns = max(0, columns)
        for side in reversed(SIDES):  # predicted values are decoded with the help of the keys
            for paged, block in itertools.product(self.sides[side], rows.blocks):
                paged.crop(block.rows, rows.num_tokens(block, self.columns))
        for paged in itertools.chain(*self.sides.values()):
            paged.set_bits(paged.format.bits_at(self.columns))
        self.prediction.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep, repeat or reorder sequences; the cache does the same to the shared padding."""
        self.require_heard()
        for paged in [*self.sides["k"], *self.sides["v"]]:
            paged.select(beam_idx.tolist())
        self.prediction.forget()

    def reset(self) -> None:
        self.columns = 0
        self.sides = {"k": [], "v": []}
        self.unheard = None
        self.prediction = Prediction(self.plan, self.state)
        self.is_initialized = False
