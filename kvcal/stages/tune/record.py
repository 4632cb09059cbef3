"""The record of a tuning study: its trials, their Pareto front, and the trial that a cap chooses.

``tune.json`` is JSON with sorted keys and a digest: the same trials give the same bytes. It holds no times.

A trial is one setting of the thresholds with its score and its cost, everything counted. The front holds the trials
that no other one beats or equals with as few bits. The choice is the best accuracy among the trials that fit; of equal
ones the one with fewer bits, then the earlier one. The paper chooses from the front: with a cap on bits that is the
same trial, and a cap on bytes means no other thing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.quantities import MAX_SEED, MAX_WORKERS, format_bytes
from kvcal.records import read_json, write_json
from kvcal.strict import STRICT, Amount, Count, Number, NumBytes, Positive, Share

KIND = "tuning"
SCHEMA = 2


@dataclass(frozen=True, config=STRICT)
class Threshold:
    """One searched threshold: a tier takes the channels whose score is above it. Uniform over [low, high]."""

    name: str
    low: float = 0.1
    high: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"{self.name}: expected 0 <= low < high, not {self.low:g} and {self.high:g}")


@dataclass(frozen=True, config=STRICT)
class Search:
    """The search space. ``num_trials`` may grow from run to run of one study; nothing else may change."""

    thresholds: tuple[Threshold, ...]
    num_trials: Positive = 30
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED)] = 0

    def __post_init__(self) -> None:
        names = [threshold.name for threshold in self.thresholds]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"thresholds {names}: expected at least one, each with its own name")


@dataclass(frozen=True, config=STRICT)
class Outcome:
    """The worth of one setting. ``accuracy``: higher is better; ``bits_per_value`` and ``total_bytes`` count
    everything, at the workload of the search. ``facts``: further figures, such as the shares of the tiers."""

    accuracy: Share
    accuracy_se: Amount | None
    bits_per_value: Amount
    total_bytes: NumBytes
    facts: dict[str, Number]


@dataclass(frozen=True, config=STRICT)
class Trial:
    """``number``: 0, 1, 2, ... in the order in which the search came upon its finished trials."""

    number: Count
    thresholds: dict[str, Number]
    outcome: Outcome


@dataclass(frozen=True, config=STRICT)
class Tuning:
    """A search so far. ``inputs``: what it was made with, flat; ``generation``: how many trials are drawn at once, for
    as many workers. ``front``: numbers of the trials on it, by bits."""

    inputs: dict[str, Any]
    search: Search
    generation: Annotated[int, Field(ge=1, le=MAX_WORKERS)]
    trials: tuple[Trial, ...]
    front: tuple[int, ...]

    def __post_init__(self) -> None:
        ranges = {threshold.name: threshold for threshold in self.search.thresholds}
        for trial in self.trials:
            if trial.thresholds.keys() != ranges.keys() or any(
                not ranges[name].low <= value <= ranges[name].high for name, value in trial.thresholds.items()
            ):
                raise ValueError(f"trial {trial.number} has thresholds outside of the search: {trial.thresholds}")
        if [trial.number for trial in self.trials] != list(range(len(self.trials))):
            raise ValueError("trials are not numbered 0, 1, 2, ...")
        if self.front != pareto_front(self.trials):
            raise ValueError(f"front = {self.front}, expected {pareto_front(self.trials)}")


def pareto_front(trials: Sequence[Trial]) -> tuple[int, ...]:
    """Numbers of the trials that are better than all with as few bits or fewer, from few bits to many; of equal
    trials the first."""
    front: list[Trial] = []
    by_bits = sorted(trials, key=lambda t: (t.outcome.bits_per_value, -t.outcome.accuracy, t.number))
    for trial in by_bits:
        if not front or trial.outcome.accuracy > front[-1].outcome.accuracy:
            front.append(trial)
    return tuple(trial.number for trial in front)


def choose(tuning: Tuning, max_bits: float | None = None, max_bytes: int | None = None) -> Trial:
    """The best accuracy among the trials within both caps (None: no cap).

    Raises:
        UsageError: no trial is finished.
        InfeasibleBudget: no trial fits; says the smallest.
    """
    if not tuning.trials:
        raise UsageError("no trial is finished, there is nothing to choose from")
    bits = math.inf if max_bits is None else max_bits
    nbytes = math.inf if max_bytes is None else max_bytes
    fitting = [t for t in tuning.trials if t.outcome.bits_per_value <= bits and t.outcome.total_bytes <= nbytes]
    if not fitting:
        smallest = min(tuning.trials, key=lambda t: (t.outcome.total_bytes, t.outcome.bits_per_value, t.number)).outcome
        caps = [] if max_bits is None else [f"{max_bits:g} bits"]
        caps += [] if max_bytes is None else [f"{format_bytes(max_bytes)} ({max_bytes} bytes)"]
        raise InfeasibleBudget(
            f"none of {len(tuning.trials)} trials fits {' and '.join(caps)}: the smallest takes "
            f"{smallest.bits_per_value:.4f} bits, {smallest.total_bytes} bytes",
            smallest.total_bytes,
            hint="raise the cap, or search higher thresholds",
        )
    return min(fitting, key=lambda t: (-t.outcome.accuracy, t.outcome.bits_per_value, t.number))


def save_tuning(tuning: Tuning, path: str | Path) -> None:
    """Write the JSON file whole or not at all; ArtifactError when it cannot be written."""
    write_json(path, KIND, SCHEMA, tuning)


def load_tuning(path: str | Path) -> Tuning:
    """Read what ``save_tuning`` wrote. ArtifactError as ``read_json``."""
    hint = "choose another folder, or delete the file and run kvcal tune again"
    return read_json(path, KIND, SCHEMA, Tuning, hint)
