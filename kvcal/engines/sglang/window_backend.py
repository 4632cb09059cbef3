"""Attention of models with sliding windows: SGLang's own of these layers, and the plan's of the others.

On CUDA it is SGLang's Triton backend. Its backend in torch, for CPUs, stores tokens of windows at their own
places, and reads them at those of other layers: here it reads them where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from kvcal.engines.sglang.backend import PlanAttentionBackend
from kvcal.errors import ArtifactError
from kvcal.geometry import AttentionGeometry


class WithWindows(AttentionBackend):
    """``paged``: of the plan's layers; ``windows``: SGLang's own, of those with a sliding window."""

    def __init__(
        self, paged: PlanAttentionBackend, windows: AttentionBackend, geometry: Mapping[int, AttentionGeometry]
    ) -> None:
        """``geometry``: of all layers, as this rank has them."""
        super().__init__()
        self._paged, self._windows, self._both = paged, windows, (paged, windows)
        self._geometry, self._checked = geometry, set[int]()
        self.token_to_kv_pool, self.req_to_token_pool = windows.token_to_kv_pool, windows.req_to_token_pool
        self.kv_index_translator = windows.kv_index_translator
        self.needs_cpu_seq_lens = windows.needs_cpu_seq_lens
        self.extend_dummy_seqs_capped_by_req_pool = windows.extend_dummy_seqs_capped_by_req_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before a step without a graph."""
        for backend in self._both:
            backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a step in a graph, or its capture."""
        for backend in self._both:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """In the graph of a step."""
        for backend in self._both:
            backend.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """State that graphs share."""
        for backend in self._both:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of rows that fill a batch up."""
        return self._paged.get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        """Between a step that warms up and its capture."""
        self._windows.on_after_cuda_graph_warmup()

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """One token a request."""
        return self._of(layer).forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """Several tokens a request."""
        return self._of(layer).forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def _of(self, layer: Any) -> AttentionBackend:
        """A layer's; ArtifactError, when a layer with a window comes first, unless its window is the plan's."""
        planned = self._geometry.get(layer.layer_id)
        if planned is None or planned.window is None:
            return self._paged
        if layer.layer_id not in self._checked:
            # SGLang counts the tokens before a token that it attends to.
            found = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, (layer.sliding_window_size or -1) + 1
            expected = planned.num_query_heads, planned.num_kv_heads, planned.k_head_dim, planned.window
            if found != expected:
                raise ArtifactError(
                    f"SGLang's layer {layer.layer_id} has heads, a size and a window of {found}; the plan has "
                    f"{expected} there"
                )
            self._checked.add(layer.layer_id)
        return self._windows


class WindowsInTorch(TorchNativeAttnBackend):
    """SGLang's backend for CPUs, of layers with a window alone."""

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, places: Tensor, *args: Any, **more: Any
    ) -> Tensor:
        own = self.token_to_kv_pool.translate_loc_from_full_to_swa(places)
        return super()._run_sdpa_forward_extend(query, output, k_cache, v_cache, own, *args, **more)

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, places: Tensor, *args: Any, **more: Any
    ) -> Tensor:
        own = self.token_to_kv_pool.translate_loc_from_full_to_swa(places)
        return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, own, *args, **more)


def backend_of(runner: Any) -> AttentionBackend:
    """The plan's attention, with SGLang's own for layers with a window where it has a pool for them."""
    paged, pool = PlanAttentionBackend(runner), runner.token_to_kv_pool
    if not isinstance(pool, SWAKVPool):
        return paged
    windows = WindowsInTorch(runner) if runner.device == "cpu" else ATTENTION_BACKENDS["triton"](runner)
    return WithWindows(paged, windows, pool.full_kv_pool.serving.shard.attention)
