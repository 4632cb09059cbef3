"""Scores of calibration pages, and the capacity that the tiers of boosted keys need there at given
thresholds.

A page is scored as the cache will score it in decoding (MixKVQ, Eq. 6-8): when it is written, with the
queries since the page before it. Scores hardly depend on the plan: they are measured once, on the model at 16
bits, and each setting of the thresholds then only counts channels.

A tier's capacity is what a given share of a layer's calibration pages need, one KV head's page at a time; a
tier that needs none is left out. A page that needs more keeps the best channels there, and the rest fall to
the next tier. Unused capacity still takes bytes, and few pages need much: on the embedded model, capacity for
95 % of the pages instead of all costs 0.3 to 0.5 bits a value less, and boosts almost the same channels (2.65
code bits instead of 2.67). With capacities from the recipe's shares all trials cost the same, and the search
is for accuracy alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcal.data.sequences import TokenDataset
from kvcal.errors import UsageError
from kvcal.geometry import CACHE_DTYPES
from kvcal.models.load import LoadedModel
from kvcal.models.taps import Captured, tap
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.systems.kitty.layout import boost_of
from kvcal.systems.kitty.scores import channel_scores
from kvcal.systems.kitty.tiered import MAX_SLOTS

# {layer index: [pages, N, D]}: a score for every channel of a page of keys.
Scores = Mapping[int, Tensor]


@torch.no_grad()
def measure_scores(loaded: LoadedModel, plan: Plan, data: TokenDataset, reporter: Reporter) -> Scores:
    """{layer index: [pages, N, D] fp64 on the CPU} for every layer of ``plan`` whose keys are boosted, over
    all sequences of ``data``."""
    boosted = {layer.geometry.index: fmt for layer in plan.layers if (fmt := layer.k) is not None and boost_of(fmt)}
    pages: dict[int, list[Tensor]] = {index: [] for index in boosted}

    def observe(captured: Captured) -> None:
        if captured.layer in boosted:
            k_post_BNTD = captured.k_post_BNTD.to(CACHE_DTYPES[plan.cache_dtype])
            pages[captured.layer].append(
                page_scores(boosted[captured.layer], captured.q_post_BHTD[0], k_post_BNTD[0]).cpu()
            )

    with tap(loaded.model, observe, loaded.geometry):
        for number, tokens_T in enumerate(data.sequences):
            loaded.model(input_ids=tokens_T[None].to(loaded.model.device), use_cache=False)
            reporter(number + 1, len(data.sequences), "tune: scores of calibration pages")
    if boosted and (longest := max(map(len, data.sequences))) < PAGE_TOKENS:
        raise UsageError(
            f"calibration sequences of at most {longest} tokens fill no page",
            hint="raise seq_len in the recipe's [data]",
        )
    return {index: torch.cat(parts) for index, parts in pages.items()}


def page_scores(fmt: Format, q_post_HTD: Tensor, k_post_NTD: Tensor) -> Tensor:
    """Scores [P, N, D] fp64 of the P pages that a sequence of T tokens fills."""
    score = fmt.score
    assert score is not None
    N, T, D = k_post_NTD.shape
    P = T // PAGE_TOKENS
    keys_NTD = fmt.packed(k_post_NTD[:, : P * PAGE_TOKENS])
    pages_PNtD = keys_NTD.unflatten(1, (P, PAGE_TOKENS)).transpose(0, 1)
    magnitude_NTD = q_post_HTD[:, : P * PAGE_TOKENS].double().abs().unflatten(0, (N, -1)).mean(1)
    queries_PND = magnitude_NTD.unflatten(1, (P, PAGE_TOKENS)).mean(2).transpose(0, 1)
    return channel_scores(score, pages_PNtD, queries_PND)


def taken_channels(tiers: Sequence[Tier], scores_PND: Tensor, is_limited: bool = True) -> list[Tensor]:
    """Channels that each tier takes, [P, N] int64 a tier; what one does not take is left to the next. Unless
    ``is_limited``, a tier with a threshold takes all that are above it."""
    head_dim = scores_PND.shape[-1]
    taken = torch.zeros(scores_PND.shape[:-1], dtype=torch.int64, device=scores_PND.device)
    counts = []
    for tier in tiers:
        eligible = torch.full_like(taken, head_dim) if tier.above is None else (scores_PND > tier.above).sum(-1)
        capacity = head_dim if tier.above is not None and not is_limited else tier.num_channels(head_dim)
        counts.append((eligible - taken).clamp(0, capacity))
        taken = taken + counts[-1]
    return counts


def fitted_boost(boost: Boost, scores_PND: Tensor, page_share: float = 1.0) -> Boost | None:
    """``boost`` with the capacity that ``page_share`` of these pages need; None if no tier needs any."""
    head_dim, free = scores_PND.shape[-1], MAX_SLOTS
    tiers = []
    for tier, count in zip(boost.tiers, taken_channels(boost.tiers, scores_PND, is_limited=False), strict=True):
        needs = count.flatten().sort().values
        capacity = min(int(needs[math.ceil(page_share * len(needs)) - 1]), free)
        free -= capacity
        if capacity:
            tiers.append(replace(tier, share=capacity / head_dim))
    return Boost(boost.score, tuple(tiers)) if tiers else None


def with_thresholds(plan: Plan, thresholds: Mapping[int, float], scores: Scores, page_share: float = 1.0) -> Plan:
    """``plan`` with the threshold ``thresholds[num_bits]`` in every tier that has one, and capacities that
    are fitted to ``page_share`` of the pages of ``scores``."""
    layers = list(plan.layers)
    for position, layer in enumerate(layers):
        if layer.is_paged and (old := boost_of(layer.format("k"))) is not None:
            tiers = (t if t.above is None else replace(t, above=thresholds[t.num_bits]) for t in old.tiers)
            boost = Boost(old.score, tuple(tiers))
            keys: dict[str, Any] = {"boost": fitted_boost(boost, scores[layer.geometry.index], page_share)}
            layers[position] = replace(layer, k=replace(layer.format("k"), **keys))
    return replace(plan, layers=tuple(layers))


def score_quantile(scores: Scores, share: float) -> float:
    """The score that ``share`` of all channels of calibration pages are at or below; exact, for any number of
    them."""
    every = torch.cat([values.flatten() for values in scores.values()]).sort().values
    return float(every[min(int(share * len(every)), len(every) - 1)])


def key_code_bits(plan: Plan, scores: Scores) -> float:
    """Mean bits of a key's code over all calibration pages and boosted layers of ``plan``, parameters and
    index not counted: the figure that MixKVQ calls effective bits (Eq. 17)."""
    total, channels = 0.0, 0
    for layer in plan.layers:
        index = layer.geometry.index
        if index not in scores:
            continue
        fmt, pages = layer.format("k"), scores[index]
        channels += pages.numel()
        total += fmt.num_bits * pages.numel()
        boost = boost_of(fmt)
        tiers = () if boost is None else boost.tiers
        for tier, count in zip(tiers, taken_channels(tiers, pages), strict=True):
            total += (tier.num_bits - fmt.num_bits) * int(count.sum())
    return total / channels
