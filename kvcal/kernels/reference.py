"""The operators of a static cache in torch: what the kernels must give, byte for byte where they store.

Built from the layouts in ``kvcal.quantizers``, row by row and page by page, with the host in the loop: it defines the
result and makes everything around the kernels testable on a CPU. It is not meant to be fast.

Terms, for one row that held n tokens before the step: pages(n) is a function of n alone (``Format.num_pages``), and of
those pages(n - 1) are packed already. So at most one page is due at the beginning of a step: it is packed from the
first 128 tokens of the buffer, then the new token is written (``append``), then attention reads all n + 1 (``decode``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.kernels.operands import PageCounts, PageTransform, QueryStatistic, StoredSide
from kvcal.kernels.variants import Variant
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.pages.scores import channel_scores
from kvcal.pages.tiered import TieredLayout
from kvcal.plan.format import Format, Side

# Bits of the error flag: a page that cannot be stored, and one beyond the room of its tensor.
NON_FINITE, NO_ROOM = 1, 2
# Pages encoded at once: bounds the fp32 scratch of a long prefill to a few MB a head.
PAGES_AT_ONCE = 64


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
    variant: Variant,
) -> None:
    """As ``ops.append``; the tables of pages are not needed: ``Format.num_pages`` is what they tabulate."""
    for row, held in enumerate(counts.lengths.tolist()):
        query_mean = None
        if variant.k.needs_queries and variant.k.num_pages(held) > num_packed(variant.k, held):
            query_mean = query_means(queries, slice(row, row + 1), held, variant.group_heads)
            queries.sum[row] = 0
            queries.since[row] = held
        _append_side("k", row, held, k_new, k, query_mean, transform, error, variant)
        _append_side("v", row, held, v_new, v, None, transform.of_values, error, variant)
    if variant.k.needs_queries:
        queries.sum.add_(q.float().abs().unflatten(1, (k_new.shape[1], -1)).sum(2))


def _append_side(
    side: Side,
    row: int,
    held: int,
    new: Tensor,
    stored: StoredSide,
    query_mean: Tensor | None,
    transform: PageTransform,
    error: Tensor,
    variant: Variant,
) -> None:
    fmt = variant.format(side)
    written = fmt.num_pages(held)
    if written > num_packed(fmt, held):
        page = stored.buffer[row : row + 1, :, :PAGE_TOKENS]
        pack(page, stored.pages[row : row + 1], written - 1, query_mean, *transform, error, side, variant)
        kept = fmt.buffer_tokens - PAGE_TOKENS
        stored.buffer[row, :, :kept] = stored.buffer[row, :, PAGE_TOKENS:].clone()
    if held < fmt.num_sink_tokens:
        stored.sinks[row, :, held] = new[row]
    else:
        stored.buffer[row, :, held - fmt.num_sink_tokens - PAGE_TOKENS * written] = new[row]


def num_packed(fmt: Format, held: int) -> int:
    """Pages that are packed in a row of so many tokens: not the one that its last token fills."""
    return fmt.num_pages(held - 1) if held else 0


def query_means(queries: QueryStatistic, rows: slice, num_tokens: int, group_heads: int) -> Tensor:
    """fp32 [b, n, D]: mean |q| of every channel since the last page of ``rows``, which hold ``num_tokens`` each."""
    counts = (num_tokens - queries.since[rows]) * group_heads
    return queries.sum[rows] / counts.float().unsqueeze(-1)


def pack(
    x: Tensor,
    pages: Tensor,
    first_page: int,
    query_mean: Tensor | None,
    rescale: Tensor,
    offset: Tensor,
    error: Tensor,
    side: Side,
    variant: Variant,
) -> None:
    """As ``ops.pack``; ``query_mean`` None for none."""
    by_page = x.unflatten(2, (-1, PAGE_TOKENS))  # [b, n, P, 128, D]
    if first_page + by_page.shape[2] > pages.shape[1]:
        error.bitwise_or_(NO_ROOM)
        return
    for start in range(0, by_page.shape[2], PAGES_AT_ONCE):
        part = by_page[:, :, start : start + PAGES_AT_ONCE].transpose(1, 2)
        target = slice(first_page + start, first_page + start + part.shape[1])
        ordinals = torch.arange(target.start, target.stop, device=x.device)
        mean = None if query_mean is None else query_mean.unsqueeze(1)
        try:
            pages[:, target] = _encode(part, mean, ordinals, rescale, offset, side, variant)
        except NonFiniteActivations:
            error.bitwise_or_(NON_FINITE)


def _encode(
    page: Tensor,
    query_mean: Tensor | None,
    ordinals: Tensor,
    rescale: Tensor,
    offset: Tensor,
    side: Side,
    variant: Variant,
) -> Tensor:
    """[b, P, n, 128, D] -> records [b, P, n, record_bytes]; query_mean [b, 1, n, D]; ordinals [P]."""
    if side == "k" and variant.offset:
        page = page.float() - offset.unsqueeze(-2)
    if side == "k" and variant.rescale:
        page = page.float() / rescale.unsqueeze(-2)
        query_mean = None if query_mean is None else query_mean * rescale
    layout = variant.layout(side)
    if not isinstance(layout, TieredLayout):
        return layout.encode(page)
    assert variant.k.boost is not None
    heads = torch.arange(page.shape[2], device=page.device) + variant.first_head
    scores = channel_scores(variant.k.boost.score, page, query_mean, ordinals.unsqueeze(-1), heads)
    return layout.encode(page, scores)


def unpack(
    pages: Tensor, out: Tensor, first_page: int, rescale: Tensor, offset: Tensor, side: Side, variant: Variant
) -> None:
    """As ``ops.unpack``."""
    by_page = out.unflatten(2, (-1, PAGE_TOKENS))
    for start in range(0, by_page.shape[2], PAGES_AT_ONCE):
        target = by_page[:, :, start : start + PAGES_AT_ONCE]
        records = pages[:, first_page + start : first_page + start + target.shape[2]]
        values = variant.layout(side).decode(records)
        if side == "k" and variant.rescale:
            values = values * rescale.unsqueeze(-2)
        if side == "k" and variant.offset:
            values = values + offset.unsqueeze(-2)
        target.copy_(values.transpose(1, 2))


def decode(
    q: Tensor,
    k: StoredSide,
    v: StoredSide,
    counts: PageCounts,
    transform: PageTransform,
    s_aux: Tensor,
    scale: float,
    softcap: float,
    variant: Variant,
) -> Tensor:
    """As ``ops.decode``: fp32 from decoded pages, rounded to q's dtype at the end."""
    parts = []
    for row, held in enumerate(counts.lengths.tolist()):
        keys = tokens("k", *k.row(row), held, *transform, variant)
        values = tokens("v", *v.row(row), held, *transform.of_values, variant)
        grouped = q[row].float().unflatten(0, (keys.shape[1], -1))  # [n, G, D]
        scores = grouped @ keys[0].transpose(-1, -2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if s_aux.numel():
            scores = torch.cat([scores, s_aux.float().view(*scores.shape[:2], 1)], dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        parts.append((weights @ values[0]).flatten(0, 1))
    return torch.stack(parts).to(q.dtype)


def tokens(
    side: Side,
    sinks: Tensor,
    buffer: Tensor,
    pages: Tensor,
    held: int,
    rescale: Tensor,
    offset: Tensor,
    variant: Variant,
) -> Tensor:
    """fp32 [b, n, held + 1, D]: what attention of a step reads, in rows that held ``held`` tokens before it. Nothing
    beyond what was allocated, whatever ``held``: so a ring that is full is read as a whole (kvcal.kernels.window)."""
    room = sinks.shape[2] + PAGE_TOKENS * pages.shape[1] + buffer.shape[2]
    held = min(held, room - 1)
    written = min(variant.format(side).num_pages(held), pages.shape[1])
    paged = buffer.new_empty(*buffer.shape[:2], written * PAGE_TOKENS, buffer.shape[-1], dtype=torch.float32)
    unpack(pages, paged, 0, rescale, offset, side, variant)
    num_sinks = min(sinks.shape[2], held + 1)
    rest = held + 1 - num_sinks - paged.shape[2]
    return torch.cat([sinks[:, :, :num_sinks].float(), paged, buffer[:, :, :rest].float()], dim=2)
