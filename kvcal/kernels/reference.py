"""The operators of a step in torch: what the kernels must give, byte for byte where they store.

Row by row and page by page, with the host in the loop: it defines the result and makes everything around the
kernels testable on a CPU. It is not meant to be fast.

A sequence held n tokens before the step. ``append`` writes token n to the ring (and to the sinks, if it is
one of them), and packs the stripe, or page, that the token completes. Then attention (``decode``) reads the n +
1 tokens: sinks, the first ``Format.tokens_read(n)`` from pages, and the ring after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.kernels.operands import Memory, PageTransform, Place, QueryStatistic, ring_slot
from kvcal.kernels.variants import Variant
from kvcal.pages.codec import PageCodec
from kvcal.pages.layout_protocol import PAGE_TOKENS, RAW_BITS
from kvcal.plan.page_format import RAW, Side
from kvcal.systems.basis.basis import Basis

# Bits of the error flag: a page that cannot be stored, and one beyond the room of the table.
NON_FINITE, NO_ROOM = 1, 2
# Pages encoded at once: bounds the fp32 scratch of a long prefill to a few MB a head.
PAGES_AT_ONCE = 64


def enter(
    k_new: Tensor, v_new: Tensor, q: Tensor, k_basis: Sequence[Tensor], v_basis: Sequence[Tensor], error: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``ops.enter``."""
    keys, values = (
        Basis(*basis).enter(x).contiguous() if x.numel() else torch.empty_like(x)
        for x, basis in ((k_new, k_basis), (v_new, v_basis))
    )
    for x in (keys, values):
        if x.dtype == torch.float16 and not bool(x.isfinite().all()):
            error.bitwise_or_(NON_FINITE)
    return (
        keys,
        values,
        Basis(*k_basis).turned_queries(q).contiguous() if q.numel() else q.new_empty(0, dtype=torch.float32),
    )


def append(
    k_new: Tensor, v_new: Tensor, q: Tensor, k: Memory, v: Memory, queries: QueryStatistic, place: Place,
    transform: PageTransform, error: Tensor, variant: Variant,
) -> None:  # fmt: skip
    """As ``ops.append``: of several tokens, one after the other."""
    if k_new.dim() == 4:
        for number, (k_token, v_token) in enumerate(zip(k_new.unbind(1), v_new.unbind(1), strict=True)):
            append(k_token, v_token, q, k, v, queries, _later(place, number), transform, error, variant)
        return
    needs_queries = variant.k.needs_queries
    if needs_queries:
        summed = q.float().abs().unflatten(1, (k_new.shape[1], -1)).sum(2)
        queries.sum.index_add_(0, torch.tensor([place.row(n) for n in range(len(q))]), summed)
    sides: tuple[tuple[Side, Tensor, Memory, PageTransform], ...] = (
        ("k", k_new, k, transform), ("v", v_new, v, transform.of_values),
    )  # fmt: skip
    for sequence, held in enumerate(place.lengths.tolist()):
        row = place.row(sequence)
        page = held // PAGE_TOKENS
        for side, new, memory, of_side in sides:
            stripe = variant.format(side).stripe_tokens
            is_complete, first = (held + 1) % stripe == 0, held + 1 - stripe
            memory.ring[row, :, ring_slot(held, memory.ring)] = new[sequence]
            if held < memory.sinks.shape[2]:
                memory.sinks[row, :, held] = new[sequence]
            if is_complete and page < place.table.shape[1]:
                rows = slice(row, row + 1)
                is_scored = side == "k" and needs_queries
                mean = queries.mean(rows, held + 1, variant.group_heads) if is_scored else None
                slots, tokens = (
                    place.table[sequence : sequence + 1, page : page + 1],
                    memory.stripe_in_ring(row, first, held + 1),
                )
                pack(tokens, memory.pages, slots, first % PAGE_TOKENS, mean, of_side, error, side, variant)
            if is_complete and page >= place.table.shape[1]:
                error.bitwise_or_(NO_ROOM)
        if (held + 1) % PAGE_TOKENS == 0 and needs_queries:
            queries.begin(slice(row, row + 1), held + 1)


def pack(
    x: Tensor, pages: Tensor, slots: Tensor, begin: int, query_mean: Tensor | None, transform: PageTransform,
    error: Tensor, side: Side, variant: Variant,
) -> None:  # fmt: skip
    """As ``ops.pack``; ``query_mean`` None for none."""
    codec, num_bits = _codec(x.shape[1], transform, side, variant), variant.num_bits(side)
    page_index = torch.zeros_like(slots, dtype=torch.int64)  # keys come after RoPE
    for page in range(0, slots.shape[1], PAGES_AT_ONCE):
        part, start = slice(page, page + PAGES_AT_ONCE), max(0, PAGE_TOKENS * page - begin)
        tokens = x[:, :, start : PAGE_TOKENS * (page + PAGES_AT_ONCE) - begin]
        places, at = [(pages, slots[:, part].long())], begin if page == 0 else 0
        try:
            codec.put(places, at, tokens, num_bits, page_index[:, part], query_mean)
        except NonFiniteActivations:
            error.bitwise_or_(NON_FINITE)


def unpack(pages: Tensor, slots: Tensor, out: Tensor, transform: PageTransform, side: Side, variant: Variant) -> None:
    by_page = out.unflatten(2, (-1, PAGE_TOKENS))
    codec, num_bits = _codec(out.shape[1], transform, side, variant), variant.num_bits(side)
    for start in range(0, by_page.shape[2], PAGES_AT_ONCE):
        target = by_page[:, :, start : start + PAGES_AT_ONCE]
        chosen = slots[:, start : start + target.shape[2]].flatten().long()
        values = codec.restore(codec.decode(pages[chosen], num_bits), chosen, num_bits)
        target.copy_(values.unflatten(0, (len(out), -1)).transpose(1, 2))


def _codec(num_heads: int, transform: PageTransform, side: Side, variant: Variant) -> PageCodec:
    """Of the pages of a layer as the kernels read them."""
    is_k, num_bits = side == "k", variant.num_bits(side)
    return PageCodec(
        side,
        RAW if num_bits == RAW_BITS else variant.format(side),
        num_heads,
        variant.head_dim,
        variant.cache_dtype,
        rescale=transform.rescale.unsqueeze(-2) if is_k and variant.rescale else None,
        offset=transform.offset.unsqueeze(-2) if is_k and variant.offset else None,
        feedback=None if num_bits == RAW_BITS else transform.feedback(side),
        operands={"signs": transform.signs(side)},
    )


def decode(
    q: Tensor, k: Memory, v: Memory, place: Place, transform: PageTransform, s_aux: Tensor, scale: float,
    softcap: float, variant: Variant,
) -> Tensor:  # fmt: skip
    """As ``ops.decode``: fp32 from decoded pages, rounded to q's dtype at the end."""
    if q.dim() == 4:
        rows = (
            decode(queries, k, v, _later(place, number), transform, s_aux, scale, softcap, variant)
            for number, queries in enumerate(q.unbind(1))
        )
        return torch.stack(list(rows), dim=1)
    parts = []
    for sequence, held in enumerate(place.lengths.tolist()):
        keys = tokens("k", k, place, sequence, held, transform, variant)
        values = tokens("v", v, place, sequence, held, transform.of_values, variant)
        by_group = q[sequence].float().unflatten(0, (keys.shape[0], -1))  # [n, G, D]
        scores = by_group @ keys.transpose(-1, -2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if s_aux.numel():
            scores = torch.cat([scores, s_aux.float().view(*scores.shape[:2], 1)], dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        parts.append((weights @ values).flatten(0, 1))
    return torch.stack(parts).to(q.dtype)


def _later(place: Place, tokens: int) -> Place:
    return place._replace(lengths=place.lengths + tokens)


def tokens(
    side: Side, memory: Memory, place: Place, sequence: int, held: int, transform: PageTransform, variant: Variant
) -> Tensor:
    """fp32 [n, held + 1, D]: what attention of a step reads, in a sequence that held ``held`` tokens before
    it. Nothing beyond what was allocated, whatever ``held``."""
    (sinks, ring, pages), table, row = memory, place.table, place.row(sequence)
    if variant.ring_tokens is not None:  # of a sliding window: the token that leaves it, then the ring
        return torch.cat([sinks[row], ring[row, :, : min(held, ring.shape[2])]], dim=1).float()
    held = min(held, PAGE_TOKENS * table.shape[1] + ring.shape[2] - 1)
    read = min(variant.format(side).tokens_read(held), PAGE_TOKENS * table.shape[1])
    slots = table[sequence : sequence + 1, : -(-read // PAGE_TOKENS)]
    paged = ring.new_empty(1, ring.shape[1], PAGE_TOKENS * slots.shape[1], ring.shape[3], dtype=torch.float32)
    unpack(pages, slots, paged, transform, side, variant)
    recent = ring_slot(torch.arange(read, held + 1, device=ring.device), ring)
    found = torch.cat([paged[0, :, :read], ring[row][:, recent].float()], dim=1)
    num_sinks = min(sinks.shape[2], held + 1)
    found[:, :num_sinks] = sinks[row, :, :num_sinks].float()
    return found
