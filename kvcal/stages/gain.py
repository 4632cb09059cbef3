"""What a finished plan gains over 16 bits: bytes, the batch and context that its budget holds, and the KL to expect.

The KL is the one that the choice was made by, on calibration text: measured for the whole plan by a search; after a
profile, the sum of what each layer's keys and values cause alone, which need not add up. `kvcal eval` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvcal.plan.page_format import RAW, SIDES
from kvcal.plan.plan import Plan
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.profile.record import Profile
from kvcal.stages.size import Fit, fit_of

KlSource = Literal["measured by the search", "sum of single layers"]


@dataclass(frozen=True)
class Gain:
    """Bytes of the cache at the plan's workload, in the plan and in the model's own; ``budget`` in bytes, and how far
    it goes with the plan and at 16 bits: None where pages shrink on a schedule for the workload alone. ``expected_kl``
    in nats per token, None where it was not measured for these formats."""

    cache_bytes: int
    raw_bytes: int
    bits_per_value: float
    budget: int
    fit: Fit | None
    raw_fit: Fit
    expected_kl: float | None
    kl_source: KlSource | None

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.cache_bytes


def gain_of(plan: Plan, allocation: Allocation, vocab_size: int, profile: Profile | None) -> Gain:
    """The gain of ``plan`` within the budget of its ``allocation``; ``profile``: what the allocation was made from;
    None after a search."""
    split = allocation.split
    fit = None if plan.is_progressive else fit_of(plan, split.budget, split.weights, vocab_size)
    kl = allocation.loss if profile is None else expected_kl(allocation, profile)
    source: KlSource = "measured by the search" if profile is None else "sum of single layers"
    return Gain(
        plan.predicted_bytes,
        plan.raw_nbytes(plan.workload.lengths),
        plan.bits_per_value(),
        split.budget,
        fit,
        fit_of(plan.unquantized(), split.budget, split.weights, vocab_size),
        kl,
        None if kl is None else source,
    )


def expected_kl(allocation: Allocation, profile: Profile) -> float | None:
    """The sum of the KL that each layer's keys and values cause alone in their formats; None where one of them was not
    measured, or a layer's heads differ."""
    found = list(_single_kls(allocation, profile))
    return None if any(kl is None for kl in found) else sum(kl for kl in found if kl is not None)


def _single_kls(allocation: Allocation, profile: Profile) -> Iterator[float | None]:
    for layer in allocation.layers:
        for side in SIDES if layer.is_paged else ():
            candidates = profile.setup.kl_candidates(side)
            formats = [profile.cache.format(side, *candidate) for candidate in candidates]
            chosen = layer.formats(side)
            if set(chosen) == {RAW}:
                yield 0.0
            elif len(chosen) == 1 and chosen[0] in formats:
                yield float(profile.kl(layer.geometry.index, side)[formats.index(chosen[0])])
            else:
                yield None
