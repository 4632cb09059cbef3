"""Decode attention of other libraries over 16-bit keys and values: the baselines of every factor.

torch's SDPA has four backends, and which of them it takes by itself is not always the fastest; each is timed alone, in
the two forms in which a GQA decode step can be put to it: with ``enable_gqa``, and with the query heads of a group as
so many rows of one head's query, which every backend takes without repeating a byte of the cache. FlexAttention has a
kernel for decoding of its own. FlashInfer reads a paged cache. A baseline that fails is a row with its reason.

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

from kvcal.bench.device import Call, graph_times
from kvcal.bench.record import Baseline, fastest
from kvcal.bench.shape import CACHE_DTYPE, Heads, Point, raw_bytes
from kvcal.geometry import CACHE_DTYPES
from kvcal.pages.record_layout import RAW_BITS

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
# Errors of libraries for an input (assertions, too), a machine without a compiler, or an argument that another version
# of them takes. Errors of torch's and triton's own are RuntimeErrors, also those of running out of memory.
FAILURES = (
    RuntimeError, ImportError, ValueError, TypeError, AssertionError, OSError, subprocess.SubprocessError,
)  # fmt: skip
FLASHINFER_WORKSPACE = 256 << 20
FLASHINFER_PAGES = (("HND", 128), ("NHD", 16))
# With 96, 0.6.18 compiled without a word, and an illegal memory access followed.
FLASHINFER_HEAD_DIMS = (64, 128, 256)


class Kv:
    """Queries [B, H, 1, D] and, for each of ``count`` caches, keys and values [B, N, S, D], normally distributed."""

    def __init__(self, heads: Heads, point: Point, count: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
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

    def measured(
        self, name: str, version: str, calls: Callable[[], list[Call]], replays: int,
        nbytes: int | None = None, bits: int = RAW_BITS,
    ) -> Baseline:  # fmt: skip
        """The baseline of the calls that ``calls`` makes; a failure becomes its reason. ``nbytes``: of the cache, those
        of 16 bits by default."""
        times, reason = None, None
        with warnings.catch_warnings(record=True) as warned:  # SDPA warns with a backend's reasons
            warnings.simplefilter("always")
            try:
                times = graph_times(calls(), replays)
            except FAILURES as failed:
                reason = first_line(failed, [str(warning.message) for warning in warned])
        return Baseline(self.point, name, version, self.nbytes if nbytes is None else nbytes, times, reason, bits)


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
            baseline = kv.measured(title, about, partial(kv.calls, attention), replays)
            yield baseline, attention if baseline.times is not None else None


def fastest_sdpa(
    heads: Heads, point: Point, device: torch.device, count: int, replays: int
) -> tuple[Baseline, Attention] | None:
    """The fastest backend and form at this point, over ``count`` caches; None if all fail."""
    ran = [(entry, attention) for entry, attention in sdpa(Kv(heads, point, count, device), replays) if attention]
    best = fastest(entry for entry, _ in ran)
    return next(((entry, attention) for entry, attention in ran if entry is best), None)


def flex(kv: Kv, replays: int) -> Baseline:
    """torch.compile(flex_attention): its kernel for decoding is chosen by inductor for one query token."""

    def calls() -> list[Call]:
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()  # shapes are constants of the compiled code; a run over a grid has too many for one
        compiled = torch.compile(flex_attention, dynamic=False)
        return kv.calls(lambda q, k, v: compiled(q, k, v, enable_gqa=q.shape[1] != k.shape[1]))

    version = f"torch {torch.__version__}, triton {version_of('triton')}"
    return kv.measured("FlexAttention", version, calls, replays)


def flashinfer(kv: Kv, replays: int) -> list[Baseline]:
    """Batch decode over a paged cache, with tensor cores, in two layouts."""
    version = f"flashinfer {version_of('flashinfer-python')}"

    def calls(layout: str, page_size: int) -> list[Call]:
        # The contents are random either way: the same memory is seen as pages of the layout.
        num_heads = kv.heads.num_kv_heads
        shape = (page_size, num_heads) if layout == "NHD" else (num_heads, page_size)
        pages = [(k.view(-1, *shape, k.shape[-1]), v.view(-1, *shape, v.shape[-1])) for k, v in kv.caches]
        return flashinfer_calls(kv, layout, page_size, pages)

    return [
        kv.measured(f"FlashInfer {layout}, page {size}", version, partial(calls, layout, size), replays)
        for layout, size in FLASHINFER_PAGES
    ]


def flashinfer_calls(
    kv: Kv,
    layout: str,
    page_size: int,
    caches: Sequence[tuple[Tensor, Tensor]],
    scales: Sequence[tuple[float, float]] = (),
) -> list[Call]:
    """A call for each cache: pages of keys and values in the layout. ``scales``: of keys and of values, where pages are
    in e4m3. Raises what the library raises."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    point, heads, device = kv.point, kv.heads, kv.q.device
    if heads.head_dim not in FLASHINFER_HEAD_DIMS:
        allowed = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        raise ValueError(f"head size {heads.head_dim}; FlashInfer serves {allowed}")
    if point.context % page_size:
        raise ValueError(f"context {point.context} is no multiple of the page size {page_size}")
    pages = point.context // page_size

    integers = partial(torch.tensor, dtype=torch.int32, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device), layout, use_tensor_cores=True
    )
    wrapper.plan(
        integers([pages * row for row in range(point.batch + 1)]),
        integers(list(range(pages * point.batch))),
        integers([page_size] * point.batch),
        heads.num_query_heads,
        heads.num_kv_heads,
        heads.head_dim,
        page_size,
        q_data_type=kv.q.dtype,
        kv_data_type=caches[0][0].dtype,
    )
    q = kv.q.squeeze(2)
    if not scales:
        return [partial(wrapper.run, q, cache) for cache in caches]
    return [
        partial(wrapper.run, q, cache, k_scale=k_scale, v_scale=v_scale)
        for cache, (k_scale, v_scale) in zip(caches, scales, strict=True)
    ]


def quantized_cache(kv: Kv, num_bits: int) -> Baseline:
    """Bytes of one layer in transformers' QuantizedCache with quanto, as allocated on the device."""
    version = f"transformers {transformers.__version__}, optimum-quanto {version_of('optimum-quanto')}"
    name = f"QuantizedCache, {num_bits} bits"
    try:
        before = torch.cuda.memory_allocated(kv.q.device)
        cache = transformers.QuantizedCache(backend="quanto", config=kv.heads.config(1), nbits=num_bits)
        cache.update(*kv.caches[0], 0)
        nbytes = torch.cuda.memory_allocated(kv.q.device) - before
    except FAILURES as failed:
        return Baseline(kv.point, name, version, reason=first_line(failed), bits=num_bits)
    reason = "bytes only: it has no kernel that reads them"
    return Baseline(kv.point, name, version, nbytes, reason=reason, bits=num_bits)


def first_line(failed: BaseException, warned: Sequence[str] = ()) -> str:
    """The reason in one line; of warnings those of SDPA that name a reason themselves."""
    reasons = [next((line.strip() for line in str(failed).splitlines() if line.strip()), "")]
    for text in warned:
        if "Triggered internally" in text and "because" not in text:
            reasons.append(text.partition("(Triggered internally")[0].strip())
    return f"{type(failed).__name__}: {'; '.join(dict.fromkeys(reasons))}"[:300]


def version_of(package: str) -> str:
    """Of an installed distribution; "absent" without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
