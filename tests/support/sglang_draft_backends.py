"""Attention of models that draft in SGLang, on a CPU: its backend in torch, which it does not let draft."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor


class Step(TorchNativeAttnBackend):
    """One of several steps that a model drafts in: a request has so many tokens more than SGLang counts."""

    def __init__(self, runner: Any, drafted: int) -> None:
        super().__init__(runner)
        self._drafted = drafted

    def _run_sdpa_forward_decode(self, *args: Any, **more: Any) -> Any:
        *before, rows, lengths, encoded = args
        return super()._run_sdpa_forward_decode(*before, rows, lengths + self._drafted + 1, encoded, **more)


class Steps:
    """All of them."""

    def __init__(self, runner: Any, count: int) -> None:
        self.attn_backends = [Step(runner, drafted) for drafted in range(count - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing is prepared."""


def decode_backend(factory: Any) -> Steps:
    """Replaces SGLang's choice for steps that draft."""
    return Steps(factory.draft_model_runner, factory.speculative_num_steps)


def extend_backend(factory: Any) -> TorchNativeAttnBackend:
    """Replaces SGLang's choice for what was accepted."""
    return TorchNativeAttnBackend(factory.draft_model_runner)


def last_places(table: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Replaces a kernel for GPUs: the place of each request's last token."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(table, rows, lengths)
