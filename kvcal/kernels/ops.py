"""The operators of a static cache, in torch's namespace ``kvcal``: on a CPU the reference, on CUDA the kernels.

One call serves one head range of one layer: B rows, n KV heads, G query heads for each, head size D. Arguments come in
the groups of kvcal.kernels.operands, and beside them:

    k_new, v_new   [B, n, D]     the step's token, any float dtype and strides; stored in the cache's dtype
    q              [B, n G, D]   its queries after RoPE; for the query sum, CUDA rounds them as k_new
    error          [1] int32     bits that are set, never cleared: 1 when a page cannot be stored (NaN, infinity; its
                                 record is then undefined), 2 when there is no room for it
    s_aux          [n G]         logits of attention sinks without a key (gpt-oss)
    workspace      uint8         scratch of ``decode`` on CUDA: kvcal.kernels.decode says how much. Begins with counters
                                 that are zero between calls: for one number of heads
    variant                      the key of a kvcal.kernels.variants.Variant: what the kernels are compiled for

What a variant does not have is an empty tensor. Mutated arguments are declared, so that torch.compile and CUDA graphs
can hold the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcal.kernels import pack as pack_kernels
from kvcal.kernels import reference
from kvcal.kernels.decode import launch_decode
from kvcal.kernels.operands import PageCounts, PageTransform, QueryStatistic, StoredSide, grouped
from kvcal.kernels.variants import parse_key
from kvcal.plan.format import SIDES, Side

_STORE = (
    "Tensor(a!) k_sinks, Tensor(b!) k_buffer, Tensor(c!) k_pages, "
    "Tensor(d!) v_sinks, Tensor(e!) v_buffer, Tensor(f!) v_pages"
)
_READ_STORE = "Tensor k_sinks, Tensor k_buffer, Tensor k_pages, Tensor v_sinks, Tensor v_buffer, Tensor v_pages"
_PAGES = "Tensor lengths, Tensor k_page_at, Tensor v_page_at, Tensor k_rescale, Tensor k_offset"

torch.library.define(
    "kvcal::append",
    f"(Tensor k_new, Tensor v_new, Tensor q, {_STORE}, Tensor(g!) query_sum, Tensor(h!) query_since, {_PAGES}, "
    "Tensor(i!) error, str variant) -> ()",
)
torch.library.define(
    "kvcal::decode",
    f"(Tensor q, {_READ_STORE}, {_PAGES}, Tensor s_aux, Tensor(a!) workspace, float scale, float softcap, "
    "str variant) -> Tensor",
)
torch.library.define(
    "kvcal::pack",
    "(Tensor x, Tensor(a!) pages, int first_page, Tensor query_mean, Tensor rescale, Tensor offset, "
    "Tensor(b!) error, str side, str variant) -> ()",
)
torch.library.define(
    "kvcal::unpack",
    "(Tensor pages, Tensor(a!) out, int first_page, Tensor rescale, Tensor offset, str side, str variant) -> ()",
)


def append(
    k_new: Tensor,
    v_new: Tensor,
    q: Tensor,
    k: StoredSide,
    v: StoredSide,
    queries: QueryStatistic,
    counts: PageCounts,
    transform: PageTransform,
    error: Tensor,
    variant: str,
) -> None:
    """Pack the page that is due, then store the step's token, then count its queries."""
    torch.ops.kvcal.append(k_new, v_new, q, *k, *v, *queries, *counts, *transform, error, variant)


def decode(
    q: Tensor,
    k: StoredSide,
    v: StoredSide,
    counts: PageCounts,
    transform: PageTransform,
    s_aux: Tensor,
    workspace: Tensor,
    scale: float,
    softcap: float,
    variant: str,
) -> Tensor:
    """[B, n G, D] in q's dtype: attention of the step's queries over the ``lengths`` + 1 tokens of every row, after
    ``append``. ``softcap`` 0 for none."""
    found: Tensor = torch.ops.kvcal.decode(q, *k, *v, *counts, *transform, s_aux, workspace, scale, softcap, variant)
    return found


def pack(
    x: Tensor,
    pages: Tensor,
    first_page: int,
    query_mean: Tensor,
    rescale: Tensor,
    offset: Tensor,
    error: Tensor,
    side: Side,
    variant: str,
) -> None:
    """Tokens x [b, n, 128 P, D], P 1 or more, any strides -> pages[:, first_page : first_page + P].
    ``query_mean`` [b, n, D] fp32, for query scores."""
    torch.ops.kvcal.pack(x, pages, first_page, query_mean, rescale, offset, error, side, variant)


def unpack(
    pages: Tensor, out: Tensor, first_page: int, rescale: Tensor, offset: Tensor, side: Side, variant: str
) -> None:
    """pages[:, first_page : first_page + P] -> out [b, n, 128 P, D], any float dtype, channels side by side."""
    torch.ops.kvcal.unpack(pages, out, first_page, rescale, offset, side, variant)


@torch.library.impl("kvcal::append", "CPU")
def _append_cpu(*flat: Any) -> None:
    reference.append(*_append_groups(*flat))


@torch.library.impl("kvcal::append", "CUDA")
def _append_cuda(*flat: Any) -> None:
    pack_kernels.launch_append(*_append_groups(*flat))


def _append_groups(k_new: Tensor, v_new: Tensor, q: Tensor, *flat: Any) -> tuple[Any, ...]:
    """The arguments of ``append`` in their groups, with the variant that the key names."""
    *groups, variant = grouped(flat, StoredSide, StoredSide, QueryStatistic, PageCounts, PageTransform)
    return k_new, v_new, q, *groups, parse_key(variant)


@torch.library.impl("kvcal::decode", "CPU")
def _decode_cpu(*flat: Any) -> Tensor:
    q, k, v, counts, transform, s_aux, _, scale, softcap, variant = _decode_groups(*flat)
    return reference.decode(q, k, v, counts, transform, s_aux, scale, softcap, variant)


@torch.library.impl("kvcal::decode", "CUDA")
def _decode_cuda(*flat: Any) -> Tensor:
    return launch_decode(*_decode_groups(*flat))


def _decode_groups(q: Tensor, *flat: Any) -> tuple[Any, ...]:
    """As ``_append_groups``."""
    *groups, variant = grouped(flat, StoredSide, StoredSide, PageCounts, PageTransform)
    return q, *groups, parse_key(variant)


@torch.library.impl("kvcal::pack", "CPU")
def _pack_cpu(
    x: Tensor, pages: Tensor, first_page: int, query_mean: Tensor, rescale: Tensor, offset: Tensor, error: Tensor,
    side: str, variant: str,
) -> None:  # fmt: skip
    mean = query_mean if query_mean.numel() else None
    reference.pack(x, pages, first_page, mean, rescale, offset, error, _side(side), parse_key(variant))


@torch.library.impl("kvcal::pack", "CUDA")
def _pack_cuda(*args: Any) -> None:
    pack_kernels.launch_pack(*_named(*args))


@torch.library.impl("kvcal::unpack", "CPU")
def _unpack_cpu(*args: Any) -> None:
    reference.unpack(*_named(*args))


@torch.library.impl("kvcal::unpack", "CUDA")
def _unpack_cuda(*args: Any) -> None:
    pack_kernels.launch_unpack(*_named(*args))


def _named(*args: Any) -> tuple[Any, ...]:
    """The arguments of ``pack`` or ``unpack``, with the side and the variant that the last two name."""
    *given, side, variant = args
    return *given, _side(side), parse_key(variant)


def _side(name: str) -> Side:
    return SIDES[("k", "v").index(name)]


@torch.library.register_fake("kvcal::append")
def _append_fake(*args: Any) -> None:
    pass


@torch.library.register_fake("kvcal::decode")
def _decode_fake(q: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.register_fake("kvcal::pack")
def _pack_fake(*args: Any) -> None:
    pass


@torch.library.register_fake("kvcal::unpack")
def _unpack_fake(*args: Any) -> None:
    pass
