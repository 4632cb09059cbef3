"""The thresholds of a study's next trials, drawn by Optuna's TPE sampler (Bergstra et al., 2011).

Trials are drawn in generations of a fixed size: all of one generation are drawn from the finished trials of the
generations before, so that they can run in parallel. Every trial has a sampler of its own, seeded by the study's seed
and the trial's number. So nothing of a sampler has to be stored: the finished trials say everything.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import TPESampler

from kvcal.artifact import canonical_json
from kvcal.stages.tune.record import Search, Trial

# Of the two objectives: accuracy, bits.
DIRECTIONS: tuple[Literal["maximize"], Literal["minimize"]] = ("maximize", "minimize")


def next_thresholds(search: Search, finished: Sequence[Trial], generation: int) -> list[dict[str, float]]:
    """Thresholds, by name, of the trials after ``finished`` up to the end of their generation of ``generation``
    trials; one or more. The first ones do not depend on how many there are."""
    space: dict[str, BaseDistribution] = {t.name: FloatDistribution(t.low, t.high) for t in search.thresholds}
    first = len(finished) // generation * generation
    with _quiet_optuna():
        study = optuna.create_study(directions=DIRECTIONS)
        for trial in finished[:first]:
            values = (trial.outcome.accuracy, trial.outcome.bits_per_value)
            study.add_trial(optuna.create_trial(params=dict(trial.thresholds), distributions=space, values=values))
        drawn = []
        for number in range(first, first + generation):
            study.sampler = _sampler(search.seed, number)
            drawn.append(dict(study.ask(fixed_distributions=space).params))
    return drawn[len(finished) - first :]


def _sampler(seed: int, number: int) -> TPESampler:
    """TPE as Optuna sets it up: 10 random trials, then the estimators. Trials of the same generation count as bad
    ones, so that no two of them are alike."""
    digest = hashlib.sha256(canonical_json([seed, number]).encode()).digest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=int.from_bytes(digest[:4], "little"), constant_liar=True)


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna logs every study to stderr."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
