"""Statistics of a choice between plans against fp64 loops, and what they protect from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from kvcal.stages.search.judge import Pool, better, difference, halve, kind_means, log_ratio, score, shrink, tiers_of

KINDS = ("prose", "code", "maths") * 5 + ("prose",) * 3


def rows(seed: int, count: int = len(KINDS)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.rand(count, generator=generator, dtype=torch.float64)
    return tuple(shared + torch.rand(count, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def pool(table: Callable[..., Tensor], kinds: Sequence[str] = KINDS, reference: object = "reference") -> Pool:
    return Pool(tuple(kinds), tiers_of(kinds), table, reference)


@pytest.mark.parametrize("count", [5, 12, 18])
def test_the_score_is_half_the_mean_over_kinds_and_half_the_worst(count: int) -> None:
    a, _ = rows(count, count)
    means = {}
    for kind in dict.fromkeys(KINDS[:count]):
        values = [float(x) for x, name in zip(a, KINDS, strict=False) if name == kind]
        means[kind] = math.fsum(values) / len(values)
    assert kind_means(a, KINDS) == pytest.approx(means, abs=1e-12)
    worst = max(means.values())
    assert score(a, KINDS) == pytest.approx((math.fsum(means.values()) / len(means) + worst) / 2, abs=1e-12)
    assert score(a, ("one",) * count) == pytest.approx(float(a.mean()), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_error_of_a_difference_is_that_of_its_influences(seed: int) -> None:
    """By loops: what each text adds to the difference of the two scores, and the spread of that within its kind."""
    a, b = rows(seed)
    names = list(dict.fromkeys(KINDS))
    worst = [max(names, key=kind_means(row, KINDS).__getitem__) for row in (a, b)]
    total = variance = 0.0
    for kind in names:
        weights = [(1 / len(names) + (kind == name)) / 2 for name in worst]
        mine = [n for n, name in enumerate(KINDS) if name == kind]
        parts = [weights[0] * float(a[n]) - weights[1] * float(b[n]) for n in mine]
        mean = math.fsum(parts) / len(parts)
        total += mean
        variance += math.fsum((part - mean) ** 2 for part in parts) / (len(parts) - 1) / len(parts)
    change, error = difference(a, b, KINDS)
    assert change == pytest.approx(total, abs=1e-12) == pytest.approx(score(a, KINDS) - score(b, KINDS), abs=1e-12)
    assert error == pytest.approx(math.sqrt(variance), rel=1e-9)
    assert difference(b, a, KINDS) == pytest.approx((-change, error))
    assert difference(a, a, KINDS) == (0.0, 0.0)


def test_a_paired_difference_is_surer_than_two_scores_and_covers_the_truth() -> None:
    """Texts differ by more than plans do: the paired error is small, and right in 95 of 100 samples."""
    covered, errors = 0, []
    for seed in range(400):
        a, b = rows(seed, 12)
        change, error = difference(a + 0.1, b, ("one",) * 12)
        covered += abs(change - 0.1) <= 2.2 * error  # the t distribution's 95 % with 11 degrees of freedom
        errors.append(error)
    assert 0.92 <= covered / 400 <= 0.98
    spread = torch.stack([rows(seed, 12)[0].mean() for seed in range(400)]).std() * math.sqrt(2)
    assert sum(errors) / 400 < 0.85 * float(spread)


def test_a_kind_of_one_text_errs_by_all_of_its_difference() -> None:
    a, b = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.5, 2.0], dtype=torch.float64)
    assert difference(a, b, ("x", "y")) == (pytest.approx(-0.125), pytest.approx(0.125))


def shrunk(estimates: Sequence[float], errors: Sequence[float]) -> tuple[list[float], list[float]]:
    """By loops, from the formulas of DerSimonian and Laird and of the normal posterior."""
    count, mean = len(estimates), math.fsum(estimates) / len(estimates)
    noise = math.fsum(e * e for e in errors) / count
    tau2 = max(0.0, math.fsum((x - mean) ** 2 for x in estimates) / (count - 1) - noise)
    means, deviations = [], []
    for x, e in zip(estimates, errors, strict=True):
        weight = 0.0 if tau2 == 0 else 1 / (1 + e * e / tau2)
        means.append(weight * x + (1 - weight) * mean)
        deviations.append(math.sqrt(weight * e * e + (1 - weight) ** 2 * (tau2 + noise) / count))
    return means, deviations


@pytest.mark.parametrize("seed", range(4))
def test_estimates_are_shrunk_by_the_share_of_noise(seed: int) -> None:
    draw = random.Random(seed)
    errors = [draw.uniform(0.1, 1.0) for _ in range(30)]
    truths = [draw.gauss(2.0, 0.5) for _ in errors]
    estimates = [draw.gauss(truth, error) for truth, error in zip(truths, errors, strict=True)]
    means, deviations = shrink(estimates, errors)
    expected = shrunk(estimates, errors)
    assert means == pytest.approx(expected[0], abs=1e-12) and deviations == pytest.approx(expected[1], abs=1e-12)
    lost = [sum((x - truth) ** 2 for x, truth in zip(row, truths, strict=True)) for row in (means, estimates)]
    assert lost[0] < lost[1]  # what shrinkage is for
    assert shrink(estimates, [0.0] * 30)[0] == pytest.approx(estimates)
    assert set(shrink([1.0, 2.0, 3.0], [9.0] * 3)[0]) == {2.0}
    assert shrink([0.5], [2.0]) == ([0.5], [2.0])


def test_many_plans_are_measured_on_few_texts_and_few_on_many() -> None:
    asked: list[tuple[int, int]] = []

    def table(plans: Sequence[object], num_texts: int, what: str) -> Tensor:
        if what == "halved":
            asked.append((len(plans), num_texts))
        values = [0.5 if plan == "reference" else float(plan) for plan in plans]  # type: ignore[arg-type]
        return torch.tensor(values, dtype=torch.float64)[:, None].expand(-1, num_texts)

    found = halve(pool(table), [7, 3, 9, 1, 8, 2, 6, 5, 4], 2, "halved")
    assert found == [1, 2] and asked == [(9, 4), (5, 8), (3, 16), (2, 18)]
    assert halve(pool(table), [], 2, "halved") == []
    assert tiers_of(KINDS) == (4, 8, 16, 18) and tiers_of(("a",) * 3) == (3,) and tiers_of("abcdefg") == (7,)


def test_scores_are_relative_to_the_reference_kind_by_kind() -> None:
    kl = {"reference": [0.001, 1.0, 0.003, 3.0], "half": [0.001, 1.0, 0.001, 1.0]}
    kinds = ("easy", "hard") * 2

    def table(plans: Sequence[object], num_texts: int, what: str) -> Tensor:
        return torch.tensor([kl[str(plan)][:num_texts] for plan in plans], dtype=torch.float64)

    judged = pool(table, kinds)
    assert judged.score("reference") == pytest.approx(1.0) and judged.score("half") == pytest.approx(0.5)
    assert judged.scores(["half"], 2)[0].tolist() == pytest.approx([0.5, 0.5])


def noisy(
    truth: Callable[[object], float], spread: float, name: str, plans: Sequence[object], num_texts: int, what: str
) -> Tensor:
    """KL of each plan on each text: the truth times noise of mean 1 of its own."""
    out = []
    for plan in plans:
        draw = random.Random(f"{name}:{plan}")
        out.append([truth(plan) * draw.lognormvariate(-(spread**2) / 2, spread) for _ in range(num_texts)])
    return torch.tensor(out, dtype=torch.float64)


def test_the_least_of_many_noisy_means_is_no_better_plan() -> None:
    """The winner's curse: 300 compositions, all of them worse than the simple plan, on a few texts."""

    def truth(plan: object) -> float:
        return 1.0 if plan in ("simple", "reference") else 1.25

    fooled = 0
    for seed in range(8):
        select, validate = (pool(partial(noisy, truth, 0.6, f"{name}{seed}"), ("a", "b") * 4) for name in ("s", "v"))
        plans = ["simple", *(f"composition {n}" for n in range(300))]
        least = min(plans, key=select.score)
        fooled += truth(least) > 1 and select.score(least) < 0.8 * select.score("simple")
        taken = [plan for plan in plans[1:] if better(plan, "simple", select, validate)]
        assert len(taken) <= 6  # 2 % of all, of which a search tries a handful
    assert fooled >= 5  # the old rule: looks far better, and is worse


def test_the_texts_of_both_pools_prove_a_plan_together() -> None:
    """Lower on either pool, and beyond the error on neither: together they show it, unless they disagree."""
    logs = {"select": [-0.5, 0.2, -0.6, 0.1, -0.4, -0.1], "validate": [-0.7, 0.1, -0.3, 0.2, -0.5, -0.1]}

    def judged(name: str, sign: float = 1.0) -> Pool:
        def table(plans: Sequence[object], num_texts: int, what: str) -> Tensor:
            kl = {"other": [1.0] * 6, "reference": [1.0] * 6, "good": [math.exp(sign * x) for x in logs[name]]}
            return torch.tensor([kl[str(plan)][:num_texts] for plan in plans], dtype=torch.float64)

        return pool(table, ("x",) * 6)

    select, validate = judged("select"), judged("validate")
    for one in (select, validate):
        change, error = one.difference("good", "other")
        ratio, ratio_error = log_ratio(*one.scores(["good", "other"]))
        assert -2 * error < change < 0 and -2 * ratio_error < ratio < 0
    assert better("good", "other", select, validate) and not better("other", "good", select, validate)
    assert not better("good", "other", select, judged("validate", -1.0))


def test_a_plan_that_is_better_on_every_text_is_taken_whatever_the_tail() -> None:
    """KLs of texts differ by a factor of a thousand: their difference is one text's, their ratio is everyone's."""
    kl = {"reference": [1.0] * 6, "other": [0.01, 0.02, 0.01, 0.03, 0.02, 9.0]}
    kl["tenth"] = [x / 10 * (1 + 0.1 * n) for n, x in enumerate(kl["other"])]

    def table(plans: Sequence[object], num_texts: int, what: str) -> Tensor:
        return torch.tensor([kl[str(plan)][:num_texts] for plan in plans], dtype=torch.float64)

    judged = pool(table, ("x",) * 6)
    change, error = judged.difference("tenth", "other")
    assert -2 * error < change < 0
    logs = [math.log((1 + 0.1 * n) / 10) for n in range(6)]
    mean = sum(logs) / 6
    expected = mean, math.sqrt(sum((x - mean) ** 2 for x in logs) / 5 / 6)
    assert log_ratio(*judged.scores(["tenth", "other"]).unbind()) == pytest.approx(expected)
    assert better("tenth", "other", judged, judged) and not better("other", "tenth", judged, judged)
    assert log_ratio(torch.tensor([2.0]), torch.tensor([1.0])) == pytest.approx((math.log(2), math.log(2)))


def test_a_plan_that_is_better_is_taken_and_one_that_the_validation_refutes_is_not() -> None:
    truth = {"simple": 1.0, "good": 0.5, "reference": 1.0}
    select, validate = (pool(partial(noisy, lambda p: truth[str(p)], 0.3, name)) for name in ("s", "v"))
    assert better("good", "simple", select, validate) and not better("simple", "good", select, validate)
    for level in (2.0, 1.2):  # the latter is no loss on the texts of both pools together
        turned = pool(partial(noisy, lambda p, level=level: level if p == "good" else 1.0, 0.3, "v"))
        assert not better("good", "simple", select, turned)
