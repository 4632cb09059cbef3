"""Decode attention of other libraries over caches of fewer than 16 bits: what a packed cache must beat.

All of them read pages [P, page, N, D] through a block table, in the order of the tokens. Keys and values are the
baselines' own random numbers (``baselines.Kv``), quantized by the library itself where it has a quantizer. Before a
time counts, the first sequence's output is compared with fp64 over the numbers before quantization: the difference is
the format's error, and a layout that was misunderstood shows as one above 1.

- FlashInfer's batch decode over e4m3, and XQA, TensorRT-LLM's kernel, in FlashInfer; both multiply by a scale of each
  tensor.
- FlashAttention 3 as vLLM ships it: queries are e4m3, too, and quantized before the time begins. At 16 bits it is one
  more baseline.
- vLLM's Triton kernels: e4m3 with a scale of each tensor; int4 with scale and zero of each token and head, rotated;
  ``turboquant_4bit_nc``, whose keys are Lloyd-Max codes. Their rotation of the query counts: it is part of every step.

A library is imported when it is measured. One that is not installed, or that refuses, is a row with the reason.

Left out: SDPA and FlexAttention of torch, which have no kernel that reads e4m3; dequantizing first is no rival.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.bench.baselines import FLASHINFER_WORKSPACE, Kv, flashinfer_calls, version_of
from kvcal.bench.device import Call
from kvcal.bench.record import Baseline

E4M3 = torch.float8_e4m3fn
# Quantizing normally distributed numbers to 4 bits changes the output by 0.1 to 0.15, a wrong layout by more than 1.
LARGEST_ERROR = 0.4
# vLLM's own: tokens of a block, segments of its split softmax, blocks beyond which it does not split, splits.
VLLM_PAGE, VLLM_SEGMENTS, VLLM_BLOCKS, TURBOQUANT_SPLITS = 16, 16, 128, 32
TURBOQUANT_PRESET = "turboquant_4bit_nc"
XQA_PAGE = 128
FLASHINFER = "flashinfer-python"
FP32_BYTES, FP16_BYTES = 4, 2

Pages = tuple[Tensor, Tensor]  # keys and values [P, page, N, D]


@dataclass(frozen=True)
class Rival:
    """Decode attention over a format of its own. ``package``: the distribution that has it; ``bits``: of a code;
    ``token_bytes``: of one token's key and value in one head, by the head size. ``calls``: a call for each of the
    caches, which returns [B, H, D] in any shape of that order; raises what the library raises: FAILURES."""

    name: str
    package: str
    bits: int
    token_bytes: Callable[[int], int]
    calls: Callable[[Kv], list[Call]]


class Scaled(NamedTuple):
    """A tensor in e4m3, and the factor that restores it."""

    values: Tensor
    scale: float


def scaled(x: Tensor) -> Scaled:
    """A tensor quantized to e4m3 by its largest value."""
    scale = float(x.abs().amax()) / torch.finfo(E4M3).max
    return Scaled((x / scale).to(E4M3), scale)


def pages_of(kv: Kv, page_size: int) -> list[Pages]:
    """The caches' memory seen as pages; their content is random either way. ValueError: a page that would be partly
    filled."""
    if kv.point.context % page_size:
        raise ValueError(f"context {kv.point.context} is no multiple of the page size {page_size}")
    shape = -1, page_size, kv.heads.num_kv_heads, kv.heads.head_dim
    return [(k.view(shape), v.view(shape)) for k, v in kv.caches]


def block_table(kv: Kv, page_size: int) -> Tensor:
    """int32 [B, pages of a sequence]: the pages in their order."""
    count = kv.point.context // page_size
    return torch.arange(kv.point.batch * count, dtype=torch.int32, device=kv.q.device).view(kv.point.batch, count)


def lengths(kv: Kv) -> Tensor:
    """int32 [B]: of every sequence."""
    return torch.full((kv.point.batch,), kv.point.context, dtype=torch.int32, device=kv.q.device)


def query_starts(kv: Kv) -> Tensor:
    """int32 [B + 1]: one query token a sequence."""
    return torch.arange(kv.point.batch + 1, dtype=torch.int32, device=kv.q.device)


def flashinfer_e4m3(kv: Kv, page_size: int) -> list[Call]:
    """Batch decode with tensor cores over e4m3, queries in bf16 (Ye et al., 2025, arXiv:2501.01005)."""
    caches = [(scaled(k), scaled(v)) for k, v in pages_of(kv, page_size)]
    pages = [(k.values, v.values) for k, v in caches]
    scales = [(k.scale, v.scale) for k, v in caches]
    return flashinfer_calls(kv, "NHD", page_size, pages, scales)


def xqa(kv: Kv) -> list[Call]:
    """TensorRT-LLM's XQA through FlashInfer: on Hopper e4m3 is multiplied as it is stored."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    q, table = kv.q.squeeze(2), block_table(kv, XQA_PAGE)
    num_tokens = lengths(kv).view(torch.uint32)
    workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=q.device)

    def attend(k: Scaled, v: Scaled) -> Tensor:
        out: Tensor = xqa_batch_decode_with_kv_cache(
            q,
            (k.values, v.values),
            workspace,
            table,
            num_tokens,
            kv.point.context,
            bmm1_scale=k.scale / math.sqrt(kv.heads.head_dim),
            bmm2_scale=v.scale,
        )
        return out

    return [partial(attend, scaled(k), scaled(v)) for k, v in pages_of(kv, XQA_PAGE)]


def flash_attention_3(kv: Kv, bits: int, page_size: int | None = None) -> list[Call]:
    """FlashAttention 3 (Shah et al., 2024, arXiv:2407.08608) of vLLM, planned once as vLLM does for a step. Without
    ``page_size``: over one block of memory a sequence, which it reads by TMA."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    heads, point, num_tokens, starts = kv.heads, kv.point, lengths(kv), query_starts(kv)
    dtype = E4M3 if bits == 8 else kv.q.dtype
    plan = get_scheduler_metadata(
        point.batch,
        1,
        point.context,
        heads.num_query_heads,
        heads.num_kv_heads,
        heads.head_dim,
        num_tokens,
        qkv_dtype=dtype,
        cu_seqlens_q=starts,
        page_size=page_size,
        causal=True,
    )
    table = None if page_size is None else block_table(kv, page_size)
    q = kv.q.squeeze(2)

    def attend(k: Scaled, v: Scaled, q: Scaled) -> Call:
        per_head = partial(torch.full, (point.batch, heads.num_kv_heads), device=num_tokens.device)
        descale = [per_head(x.scale) for x in (q, k, v)] if bits == 8 else [None] * 3
        return partial(
            flash_attn_varlen_func,
            q.values,
            k.values,
            v.values,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=point.context,
            seqused_k=num_tokens,
            softmax_scale=1 / math.sqrt(heads.head_dim),
            causal=True,
            block_table=table,
            scheduler_metadata=plan,
            q_descale=descale[0],
            k_descale=descale[1],
            v_descale=descale[2],
            fa_version=3,
        )

    def stored(x: Tensor) -> Scaled:
        return scaled(x) if bits == 8 else Scaled(x, 1.0)

    pages = pages_of(kv, page_size or point.context)
    return [attend(stored(k), stored(v), stored(q)) for k, v in pages]


def vllm_triton(kv: Kv, bits: int) -> list[Call]:
    """vLLM's ``unified_attention``: e4m3 with a scale of each tensor, or int4 with scale and zero of each token and
    head behind its codes, as vLLM's own blocks have them."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    heads, point, device = kv.heads, kv.point, kv.q.device
    segments = torch.empty(
        (point.batch, heads.num_query_heads, VLLM_SEGMENTS, 1 << (heads.head_dim - 1).bit_length()), device=device
    )
    q, out = kv.q.squeeze(2), torch.empty_like(kv.q.squeeze(2))
    attend = partial(
        unified_attention,
        q=q,
        out=out,
        cu_seqlens_q=query_starts(kv),
        max_seqlen_q=1,
        seqused_k=lengths(kv),
        max_seqlen_k=point.context,
        softmax_scale=1 / math.sqrt(heads.head_dim),
        causal=True,
        window_size=(-1, -1),
        block_table=block_table(kv, VLLM_PAGE),
        softcap=0.0,
        q_descale=None,
        seq_threshold_3D=VLLM_BLOCKS // heads.num_kv_heads,
        num_par_softmax_segments=VLLM_SEGMENTS,
        softmax_segm_output=segments,
        softmax_segm_max=segments[..., 0].contiguous(),
        softmax_segm_expsum=segments[..., 0].contiguous(),
    )

    def run(attend: Callable[[], object]) -> Tensor:
        attend()
        return out

    def in_e4m3(k: Tensor, v: Tensor) -> Call:
        stored = scaled(k), scaled(v)
        scales = [torch.tensor([x.scale], device=device) for x in stored]
        return partial(
            run,
            partial(
                attend,
                k=stored[0].values,
                v=stored[1].values,
                k_descale=scales[0],
                v_descale=scales[1],
                kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
            ),
        )

    def in_int4(k: Tensor, v: Tensor) -> Call:
        codes, scales = _int4_pages(k, v)
        return partial(
            run,
            partial(
                attend,
                k=codes[0],
                v=codes[1],
                k_descale=None,
                v_descale=None,
                kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD,
                k_scale_cache=scales[0],
                v_scale_cache=scales[1],
            ),
        )

    return [(in_e4m3 if bits == 8 else in_int4)(k, v) for k, v in pages_of(kv, VLLM_PAGE)]


def _int4_pages(k: Tensor, v: Tensor) -> tuple[Pages, Pages]:
    """Codes [P, page, N, D / 2] uint8 and scales [P, page, N] fp32 of keys and values, views of one buffer: a token and
    head is key, its scale, value, its scale."""
    from vllm.v1.attention.ops.int4_per_token_head import reshape_and_cache_int4

    pages, page_size, num_heads, head_dim = k.shape
    half = head_dim // 2
    raw = torch.empty((pages, page_size, num_heads, head_dim + 2 * FP32_BYTES), dtype=torch.uint8, device=k.device)
    words = raw.view(torch.float32)
    codes = raw[..., :half], raw[..., half + FP32_BYTES : -FP32_BYTES]
    scales = words[..., half // FP32_BYTES], words[..., -1]
    slots = torch.arange(pages * page_size, device=k.device)
    reshape_and_cache_int4(
        k.flatten(0, 1), v.flatten(0, 1), *codes, slots, k_scale_cache=scales[0], v_scale_cache=scales[1]
    )
    return codes, scales


def turboquant_bytes(head_dim: int) -> int:
    """Bytes of one token's key and value in one head."""
    return head_dim + 3 * FP16_BYTES


def turboquant(kv: Kv) -> list[Call]:
    """vLLM's ``turboquant_4bit_nc``: rotated keys as Lloyd-Max codes of 4 bits with their norm, values in 4 bits with
    scale and zero of each token and head."""
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention
    from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

    heads, point, device = kv.heads, kv.point, kv.q.device
    config = TurboQuantConfig.from_cache_dtype(TURBOQUANT_PRESET, heads.head_dim)
    centroids = get_centroids(heads.head_dim, config.centroid_bits).to(device, torch.float32)
    ordered = centroids.sort().values
    rotation = torch.ones(1, 1)
    while rotation.shape[0] < heads.head_dim:
        rotation = torch.kron(rotation, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    rotation = (rotation / math.sqrt(heads.head_dim)).to(device)
    q, table, num_tokens = kv.q.squeeze(2), block_table(kv, VLLM_PAGE), lengths(kv)
    per_query = partial(torch.empty, device=device)
    partials = per_query((point.batch, heads.num_query_heads, TURBOQUANT_SPLITS, heads.head_dim + 1))
    lse, out = per_query((point.batch, heads.num_query_heads)), torch.empty_like(q)

    def attend(k: Tensor, v: Tensor) -> Call:
        pages, page_size, num_heads, head_dim = k.shape
        slots = torch.arange(pages * page_size, device=device, dtype=torch.int32)
        shape = (pages, page_size, num_heads, turboquant_bytes(head_dim))
        raw = torch.empty(shape, dtype=torch.uint8, device=device)
        triton_turboquant_store(
            k.flatten(0, 1),
            v.flatten(0, 1),
            raw,
            slots,
            rotation,
            (ordered[:-1] + ordered[1:]) / 2,
            mse_bits=config.key_mse_bits,
            key_packed_size=config.key_packed_size,
            value_quant_bits=config.effective_value_quant_bits,
        )
        return partial(
            triton_turboquant_decode_attention,
            q,
            raw,
            table,
            num_tokens,
            rotation,
            centroids,
            1 / math.sqrt(head_dim),
            mse_bits=config.key_mse_bits,
            key_packed_size=config.key_packed_size,
            value_quant_bits=config.effective_value_quant_bits,
            norm_correction=config.norm_correction,
            PiT=rotation,
            mid_o_buf=partials,
            output_buf=out,
            lse_buf=lse,
            max_num_kv_splits=TURBOQUANT_SPLITS,
        )

    return [attend(k, v) for k, v in pages_of(kv, VLLM_PAGE)]


def _in_vllm(name: str, bits: int, token_bytes: Callable[[int], int], calls: Callable[[Kv], list[Call]]) -> Rival:
    return Rival(name, "vllm", bits, token_bytes, calls)


RIVALS = (
    Rival("FlashInfer e4m3, page 16", FLASHINFER, 8, lambda dim: 2 * dim, partial(flashinfer_e4m3, page_size=16)),
    Rival(f"XQA (FlashInfer) e4m3, page {XQA_PAGE}", FLASHINFER, 8, lambda dim: 2 * dim, xqa),
    _in_vllm("FlashAttention 3 (vLLM) 16 bits, no pages", 16, lambda dim: 4 * dim, partial(flash_attention_3, bits=16)),
    _in_vllm("FlashAttention 3 (vLLM) e4m3, no pages", 8, lambda dim: 2 * dim, partial(flash_attention_3, bits=8)),
    _in_vllm(
        f"FlashAttention 3 (vLLM) e4m3, page {VLLM_PAGE}", 8, lambda dim: 2 * dim,
        partial(flash_attention_3, bits=8, page_size=VLLM_PAGE),
    ),
    _in_vllm("vLLM Triton e4m3", 8, lambda dim: 2 * dim, partial(vllm_triton, bits=8)),
    _in_vllm("vLLM Triton int4_per_token_head", 4, lambda dim: dim + 2 * FP32_BYTES, partial(vllm_triton, bits=4)),
    _in_vllm(f"vLLM {TURBOQUANT_PRESET}", 4, turboquant_bytes, turboquant),
)  # fmt: skip


def measured_rivals(kv: Kv, replays: int, rivals: Sequence[Rival] = RIVALS) -> list[Baseline]:
    """Every rival on the same keys and values; a row with the reason where it did not run."""
    expected, entries = None, []
    for rival in rivals:
        version = f"{rival.package} {version_of(rival.package)}"
        nbytes = kv.point.batch * kv.point.context * kv.heads.num_kv_heads * rival.token_bytes(kv.heads.head_dim)
        if importlib.util.find_spec(rival.package.partition("-")[0]) is None:
            reason = f"{rival.package} is not installed"
            entries.append(Baseline(kv.point, rival.name, version, bits=rival.bits, reason=reason))
            continue
        expected = expected_output(kv) if expected is None else expected
        calls = partial(checked, rival, kv, expected)
        entries.append(kv.measured(rival.name, version, calls, replays, nbytes, rival.bits))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return entries


def checked(rival: Rival, kv: Kv, expected: Tensor) -> list[Call]:
    """The calls of a rival whose output is right. ValueError: it is not."""
    calls = rival.calls(kv)
    output = calls[0]()
    assert isinstance(output, Tensor)
    first = output.flatten()[: expected.numel()].view_as(expected).double()
    error = float((first - expected).norm() / expected.norm())
    if not error <= LARGEST_ERROR:  # NaN is wrong, too
        raise ValueError(f"wrong result: relative error {error:.2g}, at most {LARGEST_ERROR} allowed")
    return calls


def expected_output(kv: Kv) -> Tensor:
    """fp64 [H, D]: the first sequence's output over the first cache, seen as ``pages_of`` sees it."""
    k_SND, v_SND = (x.view(kv.point.batch, kv.point.context, *x.shape[1::2])[0] for x in kv.caches[0])
    q_NGD = kv.q[0, :, 0].double().unflatten(0, (kv.heads.num_kv_heads, -1))
    rows = []
    for head, q_GD in enumerate(q_NGD):  # one head at a time: fp64 is four times the cache
        weights_GS = (q_GD @ k_SND[:, head].double().T / math.sqrt(kv.heads.head_dim)).softmax(-1)
        rows.append(weights_GS @ v_SND[:, head].double())
    return torch.cat(rows)
