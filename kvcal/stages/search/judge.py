"""Statistics of a choice between plans that were measured on the same texts.

The score of a plan is its KL to the 16-bit cache over that of a reference plan, kind of text by kind of text: half the
mean over kinds and half the worst kind. The mean alone would trade one kind for another, the worst alone is the noise
of a few texts; the reference makes kinds comparable whose KLs lie a factor of a hundred apart. 1 is the reference plan.

- ``difference`` is paired: plans are hard on the same texts, and what they share cancels. Its error is over texts.
- ``better`` needs a lower score on the selection and on the validation, and a significant difference on both together.
  The least of many noisy means is no such difference (the winner's curse).
- ``shrink`` draws the estimates of one change in many places towards their mean by the share of their spread that noise
  explains (empirical Bayes with a normal prior, moments after DerSimonian and Laird, 1986).
- ``halve`` measures many plans on few texts and few plans on many (successive halving, Jamieson and Talwalkar, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

# A change must win by so many standard errors.
SIGNIFICANT = 2.0
# Of a reference's KL: kinds on which it changes nothing count no more than that.
SMALLEST = 1e-12

Plan = TypeVar("Plan")
Table = Callable[[Sequence[Plan], int, str], Tensor]


@dataclass(frozen=True, eq=False)
class Pool(Generic[Plan]):
    """Texts to judge plans on. ``kinds``: of each text, in an order in which any first few are of all kinds; ``tiers``:
    ascending numbers of texts, up to all; ``table``: KL [P, n] fp64 of plans on the first n texts (and what is
    measured, for people); ``reference``: the plan whose KL is 1."""

    kinds: tuple[str, ...]
    tiers: tuple[int, ...]
    table: Table[Plan]
    reference: Plan

    def scores(self, plans: Sequence[Plan], num_texts: int | None = None, what: str = "plans") -> Tensor:
        """[P, n] fp64: KL over the reference's mean KL on that kind of text; of all texts by default."""
        count = len(self.kinds) if num_texts is None else num_texts
        return self.table(plans, count, what) / self._reference_N[:count]

    def score(self, plan: Plan) -> float:
        """The plan's score on all texts."""
        return score(self.scores([plan])[0], self.kinds)

    def difference(self, plan: Plan, other: Plan) -> tuple[float, float]:
        """Score of ``plan`` less that of ``other`` on all texts, and its standard error."""
        a_n, b_n = self.scores([plan, other])
        return difference(a_n, b_n, self.kinds)

    @cached_property
    def _reference_N(self) -> Tensor:
        kl_N = self.table([self.reference], len(self.kinds), "the reference plan")[0]
        means = {kind: float(kl_N[_of(self.kinds, kind)].mean()) for kind in dict.fromkeys(self.kinds)}
        return torch.tensor([max(SMALLEST, means[kind]) for kind in self.kinds], dtype=torch.float64)


def _of(kinds: Sequence[str], kind: str) -> list[int]:
    return [number for number, name in enumerate(kinds) if name == kind]


def kind_means(scores_n: Tensor, kinds: Sequence[str]) -> dict[str, float]:
    """The mean of each kind among the first n texts."""
    used = kinds[: len(scores_n)]
    return {kind: float(scores_n[_of(used, kind)].mean()) for kind in dict.fromkeys(used)}


def score(scores_n: Tensor, kinds: Sequence[str]) -> float:
    """Half the mean over kinds and half the worst kind, of relative KLs [n]."""
    means = kind_means(scores_n, kinds).values()
    return (sum(means) / len(means) + max(means)) / 2


def difference(a_n: Tensor, b_n: Tensor, kinds: Sequence[str]) -> tuple[float, float]:
    """``score(a) - score(b)`` and its standard error, texts of a kind as independent: by the delta method, each score
    being linear in its texts as long as its worst kind stays. A kind of a single text errs by all of its difference."""
    used, worst = kinds[: len(a_n)], []
    names = list(dict.fromkeys(used))
    for row in (a_n, b_n):
        means = kind_means(row, kinds)
        worst.append(max(names, key=means.__getitem__))
    total = variance = 0.0
    for kind in names:
        weight_a, weight_b = (0.5 / len(names) + 0.5 * (kind == name) for name in worst)
        part = weight_a * a_n[_of(used, kind)] - weight_b * b_n[_of(used, kind)]
        total += float(part.mean())
        squares = (part - part.mean()).square().sum() / (len(part) - 1) / len(part) if len(part) > 1 else part.square()
        variance += float(squares)
    return total, math.sqrt(variance)


def log_ratio(a_n: Tensor, b_n: Tensor) -> tuple[float, float]:
    """The mean of log(a / b) over texts, and its standard error; of a single text, all of it."""
    logs_n = a_n.clamp(min=SMALLEST).log() - b_n.clamp(min=SMALLEST).log()
    mean, count = float(logs_n.mean()), len(logs_n)
    return mean, abs(mean) if count == 1 else float(logs_n.std()) / math.sqrt(count)


def better(plan: Plan, other: Plan, select: Pool[Plan], validate: Pool[Plan]) -> bool:
    """Whether ``plan`` replaces ``other``: its score is lower on both pools, and on the texts of both together
    significantly so, either in the difference or, as KL has a heavy tail over texts, in the ratio on a typical text."""
    if not (select.difference(plan, other)[0] < 0 and validate.difference(plan, other)[0] <= 0):
        return False
    kinds = (*select.kinds, *validate.kinds)
    a_n, b_n = torch.cat([pool.scores([plan, other]) for pool in (select, validate)], dim=1)
    change, error = difference(a_n, b_n, kinds)
    ratio, ratio_error = log_ratio(a_n, b_n)
    return change < -SIGNIFICANT * error or ratio < -SIGNIFICANT * ratio_error


def shrink(estimates: Sequence[float], errors: Sequence[float]) -> tuple[list[float], list[float]]:
    """Posterior means and standard deviations of what was estimated with these standard errors, in as many places. A
    single one stays as it is."""
    count = len(estimates)
    if count < 2:
        return list(estimates), list(errors)
    mean = sum(estimates) / count
    noise = sum(error**2 for error in errors) / count
    spread = sum((estimate - mean) ** 2 for estimate in estimates) / (count - 1)
    between = max(0.0, spread - noise)
    means, deviations = [], []
    for estimate, error in zip(estimates, errors, strict=True):
        kept = between / (between + error**2) if between > 0 else 0.0
        means.append(mean + kept * (estimate - mean))
        deviations.append(math.sqrt(kept * error**2 + (1 - kept) ** 2 * (between + noise) / count))
    return means, deviations


def halve(pool: Pool[Plan], plans: Sequence[Plan], num_left: int, what: str) -> list[Plan]:
    """The ``num_left`` plans of least score, best first: after each tier of texts the better half goes on."""
    alive = list(plans)
    for num_texts in pool.tiers:
        rows = pool.scores(alive, num_texts, what) if alive else torch.empty(0, 0)
        ranked = sorted(range(len(alive)), key=lambda number: score(rows[number], pool.kinds))
        is_last = num_texts == pool.tiers[-1]
        alive = [alive[number] for number in ranked[: num_left if is_last else max(num_left, -(-len(alive) // 2))]]
    return alive


def tiers_of(kinds: Sequence[str]) -> tuple[int, ...]:
    """One text of each kind, four at least, and twice as many each time."""
    tiers = [min(len(kinds), max(4, len(set(kinds))))]
    while tiers[-1] < len(kinds):
        tiers.append(min(len(kinds), 2 * tiers[-1]))
    return tuple(tiers)
