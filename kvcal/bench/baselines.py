"""Decode attention over 16-bit keys and values by everybody else: what a factor is measured against.

torch's SDPA has four backends, and which of them it takes by itself is not always the fastest; each is timed alone, in
the two forms in which a GQA decode step can be put to it: with ``enable_gqa``, and with the query heads of a group as
so many rows of one head's query, which every backend takes without repeating a byte of the cache. FlexAttention has a
kernel for decoding of its own. FlashInfer reads a paged cache. A baseline that refuses is a row with its reason.

QuantizedCache of transformers holds fewer bytes but has no kernel that reads them: it dequantizes the whole cache at
every step. Only its bytes are a baseline.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvcal.bench.record import Baseline
from kvcal.bench.shape import CACHE_DTYPE, Heads, Point, raw_bytes
from kvcal.bench.timing import Call, Times, graph_times
from kvcal.geometry import CACHE_DTYPES

BACKENDS = {
    "FLASH": SDPBackend.FLASH_ATTENTION,
    "CUDNN": SDPBackend.CUDNN_ATTENTION,
    "EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
    "MATH": SDPBackend.MATH,
}
WITH_GQA, AS_ROWS = "enable_gqa", "group as rows"
# MATH repeats keys and values for every query head; beyond this it is not asked to.
REPEATED_BYTES = 4 << 30
# [B, H, 1, D], [B, N, S, D], [B, N, S, D] -> out
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
# How libraries refuse an input (asserting, too), a machine without a compiler, or an argument that another version of
# them takes. Errors of torch's and triton's own are RuntimeErrors, also those of running out of memory.
REFUSALS = (
    RuntimeError, ImportError, ValueError, TypeError, AssertionError, OSError, subprocess.SubprocessError,
)  # fmt: skip
FLASHINFER_WORKSPACE = 256 << 20
FLASHINFER_PAGES = (("HND", 128), ("NHD", 16))
# With 96, 0.6.18 compiled without a word, and an illegal memory access followed.
FLASHINFER_HEAD_DIMS = (64, 128, 256)


class Kv:
    """Queries [B, H, 1, D] and, for each of ``count`` caches, keys and values [B, N, S, D], normally distributed."""

    def __init__(self, heads: Heads, point: Point, count: int, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        dtype = CACHE_DTYPES[CACHE_DTYPE]
        shape = (point.batch, heads.num_kv_heads, point.context, heads.head_dim)

        def normal(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

        self.heads, self.point = heads, point
        self.q = normal(point.batch, heads.num_query_heads, 1, heads.head_dim)
        self.caches = [(normal(*shape), normal(*shape)) for _ in range(count)]

    @property
    def nbytes(self) -> int:
        return raw_bytes(self.heads, self.point)

    def calls(self, attention: Attention) -> list[Call]:
        return [partial(attention, self.q, k, v) for k, v in self.caches]


def sdpa_forms(backend: SDPBackend) -> dict[str, Attention]:
    """The two ways of putting a decode step to one backend."""

    def with_gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    def as_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(rows, k, v).flatten(1, 2).unsqueeze(2)

    return {WITH_GQA: with_gqa, AS_ROWS: as_rows}


def sdpa(kv: Kv, replays: int) -> Iterator[tuple[Baseline, Attention | None]]:
    """Every backend in both forms, with what computes it."""
    version = f"torch {torch.__version__}"
    for name, backend in BACKENDS.items():
        about = version if name != "CUDNN" else f"{version}, cuDNN {torch.backends.cudnn.version()}"
        for form, attention in sdpa_forms(backend).items():
            title, repeated = f"SDPA {name}, {form}", kv.nbytes * kv.heads.group
            if (name, form) == ("MATH", WITH_GQA) and repeated > REPEATED_BYTES:
                yield Baseline(kv.point, title, about, reason=f"would repeat the cache to {repeated} bytes"), None
                continue
            calls = partial(kv.calls, attention)
            found = measured(kv.point, kv.nbytes, title, about, calls, replays)
            yield found, attention if found.times is not None else None


def fastest_sdpa(
    heads: Heads, point: Point, device: torch.device, count: int, replays: int
) -> tuple[Baseline, Attention] | None:
    """The fastest backend and form at this point, over ``count`` caches; None if all refuse."""
    ran = [(found, attention) for found, attention in sdpa(Kv(heads, point, count, device), replays) if attention]
    return min(ran, key=lambda pair: pair[0].times.median_us if pair[0].times else 0.0, default=None)


def flex(kv: Kv, replays: int) -> Baseline:
    """torch.compile(flex_attention): its kernel for decoding is chosen by inductor for one query token."""

    def calls() -> list[Call]:
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()  # shapes are constants of the compiled code; a run over a grid has too many for one
        compiled = torch.compile(flex_attention, dynamic=False)
        return kv.calls(lambda q, k, v: compiled(q, k, v, enable_gqa=q.shape[1] != k.shape[1]))

    version = f"torch {torch.__version__}, triton {_version('triton')}"
    return measured(kv.point, kv.nbytes, "FlexAttention", version, calls, replays)


def flashinfer(kv: Kv, replays: int) -> list[Baseline]:
    """Batch decode over a paged cache, with tensor cores, in two layouts."""
    version = f"flashinfer {_version('flashinfer-python')}"
    return [
        measured(
            kv.point,
            kv.nbytes,
            f"FlashInfer {layout}, page {size}",
            version,
            partial(_flashinfer_calls, kv, layout, size),
            replays,
        )
        for layout, size in FLASHINFER_PAGES
    ]


def _flashinfer_calls(kv: Kv, layout: str, page_size: int) -> list[Call]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    point, heads, device = kv.point, kv.heads, kv.q.device
    if heads.head_dim not in FLASHINFER_HEAD_DIMS:
        allowed = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        raise ValueError(f"head size {heads.head_dim}; FlashInfer serves {allowed}")
    if point.context % page_size:
        raise ValueError(f"context {point.context} is no multiple of the page size {page_size}")
    pages = point.context // page_size

    def integers(values: Sequence[int] | range) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device), layout, use_tensor_cores=True
    )
    wrapper.plan(
        integers(range(0, pages * point.batch + 1, pages)),
        integers(range(pages * point.batch)),
        integers([page_size] * point.batch),
        heads.num_query_heads,
        heads.num_kv_heads,
        heads.head_dim,
        page_size,
        q_data_type=kv.q.dtype,
        kv_data_type=kv.q.dtype,
    )
    # The contents are random either way: the same memory is seen as pages of the layout.
    shape = (page_size, heads.num_kv_heads) if layout == "NHD" else (heads.num_kv_heads, page_size)
    caches = [tuple(x.view(pages * point.batch, *shape, heads.head_dim) for x in cache) for cache in kv.caches]
    q = kv.q.squeeze(2)
    return [partial(wrapper.run, q, cache) for cache in caches]


def quantized_cache(kv: Kv, num_bits: int) -> Baseline:
    """Bytes of one layer in transformers' QuantizedCache with quanto, as allocated on the device."""
    version = f"transformers {transformers.__version__}, optimum-quanto {_version('optimum-quanto')}"
    name = f"QuantizedCache, {num_bits} bits"
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=kv.heads.num_query_heads,
        num_key_value_heads=kv.heads.num_kv_heads,
        head_dim=kv.heads.head_dim,
        hidden_size=kv.heads.num_query_heads * kv.heads.head_dim,
    )
    try:
        before = torch.cuda.memory_allocated(kv.q.device)
        cache = transformers.QuantizedCache(backend="quanto", config=config, nbits=num_bits)
        cache.update(*kv.caches[0], 0)
        nbytes = torch.cuda.memory_allocated(kv.q.device) - before
    except REFUSALS as refused:
        return Baseline(kv.point, name, version, reason=first_line(refused))
    return Baseline(kv.point, name, version, nbytes, reason="bytes only: it has no kernel that reads them")


def measured(
    point: Point, nbytes: int, name: str, version: str, calls: Callable[[], list[Call]], replays: int
) -> Baseline:
    """Time what ``calls`` makes; a refusal becomes the reason."""
    with warnings.catch_warnings(record=True) as heard:  # SDPA says in warnings why a backend refuses
        warnings.simplefilter("always")
        try:
            times: Times | None = graph_times(calls(), replays)
            reason = None
        except REFUSALS as refused:
            times, reason = None, first_line(refused, [str(warning.message) for warning in heard])
    return Baseline(point, name, version, nbytes, times, reason)


def first_line(refused: BaseException, warned: Sequence[str] = ()) -> str:
    """Why, in one line: of warnings those that say more than that there are some."""
    said = [text for text in warned if not text.strip().endswith("because:") and "Triggered internally" in text]
    text = next((line for line in str(refused).splitlines() if line.strip()), "")
    reasons = [line.partition("(Triggered internally")[0].strip() for line in said if "because" not in line]
    text = "; ".join(dict.fromkeys([text.strip(), *reasons]))
    return f"{type(refused).__name__}: {text}"[:300]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
