"""vLLM's own FlashAttention, for the parts of a prompt: of a newer version than torch's, where vLLM has one."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.engines.prefill import Flash, torch_flash


def flash_attention() -> Flash:
    """The attention that vLLM has built for this GPU, else torch's. Called on CUDA alone."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    except ImportError:
        return torch_flash
    version = get_flash_attn_version()
    if version is None:
        return torch_flash

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        (tokens, past), ends = (q.shape[1], k.shape[1]), torch.arange(2, dtype=torch.int32, device=q.device)
        out, lse = flash_attn_varlen_func(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), max_seqlen_q=tokens, cu_seqlens_q=ends * tokens,
            max_seqlen_k=past, cu_seqlens_k=ends * past, softmax_scale=scale, causal=is_causal,
            return_softmax_lse=True, fa_version=version,
        )  # fmt: skip
        return out.transpose(0, 1), lse

    return attend
