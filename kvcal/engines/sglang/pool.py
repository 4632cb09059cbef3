"""SGLang's pool of tokens, as a tensor of blocks for each layer.

SGLang hands out places of tokens in pages of 128, each of one request: page p of the pool is block p of every layer.
Page 0 is nobody's. The radix tree shares full pages. What would read single tokens from the pool is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from kvcal.engines.sglang.serving import current
from kvcal.errors import UnsupportedModel
from kvcal.pages.record_layout import PAGE_TOKENS


class PlanPool(MHATokenToKVPool):
    """``blocks``: of every layer, by index, uint8 [pages, block_bytes]."""

    blocks: dict[int, Tensor]
    k_buffer: list[Tensor]
    v_buffer: list[Tensor]

    def _create_buffers(self) -> None:
        self.serving = current()
        shard, pages = self.serving.shard, self.size // PAGE_TOKENS + 1
        self.blocks = {
            index: torch.zeros(pages, shard.block_bytes(index), dtype=torch.uint8, device=self.device)
            for index in shard.blocks
        }
        self.k_buffer, self.v_buffer = list(self.blocks.values()), []
        self._kv_buffer_descs: list[Any] = []
        self._init_data_ptrs_and_strides()

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return sum(blocks.nbytes for blocks in self.blocks.values()), 0

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedModel("a part of SGLang reads or moves single tokens, which a plan packs in pages")

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _refuse
    move_kv_cache = get_contiguous_buf_infos = get_device_pool_infos = get_cpu_copy = load_cpu_copy = _refuse
