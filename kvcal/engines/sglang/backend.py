"""The attention backend: SGLang's batch, as the core's decodes and chunks; and the rings.

A request keeps its row of ``req_to_token`` as long as it runs, so that row is its ring, too. Row 0 is for
padding. A request's pages are every 128th entry of its row.

A batch of decodes may be captured in a CUDA graph. Its lengths, blocks and rings are computed in the graph,
from tensors of SGLang that keep their addresses. Rows that fill a batch up have a length of 0, and the ring
of row 0.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from kvcal.engines.prefill import Logits
from kvcal.engines.scratch import Chunk, Decodes, Scratch
from kvcal.engines.sglang.serving import PlanPool, logger
from kvcal.engines.step import PagedStep
from kvcal.engines.support import require_version
from kvcal.errors import ArtifactError, UsageError
from kvcal.pages.layout_protocol import PAGE_TOKENS


class PlanAttentionBackend(AttentionBackend):
    """See the module's docstring. Of ``needs_cpu_seq_lens``: SGLang copies no lengths of decodes to the
    host."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        # Of SGLang's wrapper, which gives layers with a state to a backend of theirs.
        self.token_to_kv_pool, self.req_to_token_pool = pool, runner.req_to_token_pool
        pool = pool.full_kv_pool if isinstance(pool, HybridLinearKVPool | SWAKVPool) else pool
        if not isinstance(pool, PlanPool):
            require_version("sglang")
            raise UsageError("the attention backend kvcal needs a plan", hint="set KVCAL_PLAN=plan.safetensors")
        self._pool = pool
        rows: Tensor = self.req_to_token_pool.req_to_token
        self.max_context_len = rows.shape[1]  # by which SGLang sizes masks of drafts, without lengths on the host
        self._pages = rows[:, ::PAGE_TOKENS]
        self._scratch = Scratch(len(rows), rows.shape[1], pool.serving.device)
        shard = pool.serving.shard
        self._steps = {index: PagedStep(shard, index, self._scratch) for index in shard.blocks}
        self._beginnings = pool.serving.beginnings
        for index, step in self._steps.items():
            rings = torch.zeros(len(rows), shard.ring_bytes(index), dtype=torch.uint8, device=pool.device)
            step.bind(pool.blocks[index], rings)
            if self._beginnings is not None:
                self._beginnings.bind(step.layout, rings)
        self._checked: set[int] = set()
        self._decodes: Decodes | None = None
        self._chunks: list[tuple[slice, Chunk]] = []  # rows of the queries, and places of one request each

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Requests with more than one new token: their sizes come from the host. Sinks and windows of those
        that begin come into rings before."""
        self._scratch.report_errors(logger)
        if (loaded := self._pool.layer_transfer_counter) is not None:
            loaded.wait_until(0)
        if self._beginnings is not None:
            self._beginnings.copy()
            for row, num_past in self._beginnings.begun:
                ring = torch.tensor([row], dtype=torch.int32, device=self._pages.device)
                begun = Chunk(num_past, self._pages[row, : num_past // PAGE_TOKENS] // PAGE_TOKENS, ring)
                for step in self._steps.values():
                    step.begin(begun, num_past)
            self._beginnings.begun.clear()
        self._chunks = []
        if forward_batch.forward_mode.is_idle() or _num_known(forward_batch.forward_mode) is not None:
            return
        table, rings = self._places(forward_batch)
        start = 0
        counts = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
        for row, (num_past, count) in enumerate(counts):
            width = -(-(num_past + count) // PAGE_TOKENS)
            if count:
                chunk = Chunk(int(num_past), table[row, :width], rings[row : row + 1])
                self._chunks.append((slice(start, start + int(count)), chunk))
            start += int(count)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Lengths, blocks and rings of a batch of decodes, once for all layers."""
        if (new := _num_known(forward_batch.forward_mode)) is not None:
            self._decodes = Decodes((forward_batch.seq_lens - new).int(), *self._places(forward_batch))

    def _places(self, forward_batch: Any) -> tuple[Tensor, Tensor]:
        """int32 [B, pages], [B]: blocks and rings of all requests."""
        rows = forward_batch.req_pool_indices
        return self._pages[rows] // PAGE_TOKENS, rows.int()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing is shared by graphs but what all steps share."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of rows that fill a batch up, their new token included."""
        return 1

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """q [B, H D], k, v [B, N D], one token a request -> [B, H D]."""
        assert self._decodes is not None
        q, k, v = _by_head(layer, q, k, v)
        return self._step(layer).decode(q, k, v, self._decodes, _logits(layer, more)).flatten(1)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """q [T, H D], k, v [T, N D] of all requests in a row -> [T, H D]; rows of padding are 0. Of a step that
        verifies drafts all requests have as many tokens."""
        step, (q, k, v) = self._step(layer), _by_head(layer, q, k, v)
        if forward_batch.forward_mode.is_target_verify():
            assert self._decodes is not None
            q, k, v = (x.unflatten(0, (len(self._decodes.lengths), -1)) for x in (q, k, v))
            return step.decode(q, k, v, self._decodes, _logits(layer, more)).flatten(0, 1).flatten(1)
        out = torch.zeros_like(q)
        for tokens, chunk in self._chunks:
            out[tokens] = step.extend(q[tokens], k[tokens], v[tokens], chunk, _logits(layer, more))
        return out.flatten(1)

    def _step(self, layer: Any) -> PagedStep:
        """A layer's step; when it comes first, ArtifactError or UsageError unless the layer is the plan's."""
        index = layer.layer_id
        if index in self._checked:
            return self._steps[index]
        if index not in self._steps:
            raise ArtifactError(f"SGLang's attention layer {index} is not in the plan")
        planned = self._steps[index].layout.layer.attention
        expected = (planned.num_query_heads, planned.num_kv_heads, planned.k_head_dim, planned.v_head_dim)
        found = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
        if found != expected:
            raise ArtifactError(f"SGLang's layer {index} has heads and sizes {found}; the plan has {expected} there")
        if layer.is_cross_attention or (layer.sliding_window_size or -1) > -1 or layer.attn_type.value != "decoder":
            raise UsageError(f"layer {index} has a window or is no decoder's, which is not served with a plan")
        self._checked.add(index)
        return self._steps[index]


def _num_known(mode: Any) -> int | None:
    """Of the new tokens of a request, in a step of decodes: how many SGLang counts in its length. With drafts
    these are none. None of other steps."""
    return 1 if mode.is_decode() else 0 if mode.is_target_verify() else None


def _by_head(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
        k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim),
        v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim),
    )


def _logits(layer: Any, more: dict[str, Any]) -> Logits:
    return Logits(float(layer.scaling), float(layer.logit_cap or 0.0), more.get("sinks"))
