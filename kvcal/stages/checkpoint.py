"""A long stage's unfinished statistics, kept in a file beside its target, so that an interrupted run goes on.

The file is written about every ``SAVE_SECONDS`` and when the stage is left by any error, Ctrl-C included, whole or
not at all. It is taken up again only by a run with the same inputs, which declares what it must hold after the steps
that it counts; anything else is discarded. Statistics are sums in fp64, and steps come in a fixed order: a resumed run
gives the same bits as one that was not interrupted. Of several processes (kvcal.distributed) rank 0 keeps the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as record
from torch import Tensor

from kvcal import artifact
from kvcal.distributed import from_first, map_over_ranks, rank, require_same
from kvcal.errors import ArtifactError
from kvcal.folder import partial_path
from kvcal.progress import Reporter
from kvcal.records import TensorSpec, record_of, refusing, require_tensors
from kvcal.strict import STRICT, Count, dump


@dataclass(frozen=True, eq=False)
class Mean:
    """``total``: fp64 on the CPU, the sum of ``count`` observations."""

    total: Tensor
    count: int

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Mean:
        """No observation yet."""
        return cls(torch.zeros(tuple(shape), dtype=torch.float64), 0)

    @classmethod
    def of(cls, observations: Tensor) -> Mean:
        """Of n observations: [n, *shape], any float dtype."""
        return cls(observations.to("cpu", torch.float64).sum(0), observations.shape[0])

    def update(self, observations: Tensor) -> Mean:
        """With n more observations."""
        return self.merge(Mean.of(observations))

    def merge(self, other: Mean) -> Mean:
        """The statistic of both sets of observations."""
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> Tensor:
        """The mean, fp64. ValueError without an observation."""
        if self.count == 0:
            raise ValueError("the mean of no observations")
        return self.total / self.count


SCHEMA = 1
SAVE_SECONDS = 20.0
LARGEST = 1e30  # of a total: sums of such are finite


@dataclass(frozen=True, eq=False)
class State:
    """Statistics by name, and how many steps of each phase of the stage are in them."""

    means: Mapping[str, Mean]
    done: Mapping[str, int]


@dataclass(frozen=True)
class Statistic:
    """A mean that a checkpoint must hold: its total, and how many observations are in it; None is 1 or more."""

    total: TensorSpec
    count: int | None = None

    @classmethod
    def of(cls, shape: Sequence[int], count: int | None = None, low: float = -LARGEST) -> Statistic:
        """Of an fp64 total within ``low`` and ``LARGEST``."""
        return cls(TensorSpec("float64", tuple(shape), low, LARGEST), count)


# Statistics so far, and more: those that change, of both.
Merge = Callable[[Mapping[str, Mean], Mapping[str, Mean]], Mapping[str, Mean]]


def added(means: Mapping[str, Mean], observed: Mapping[str, Mean]) -> Mapping[str, Mean]:
    """The statistics of both; what is new joins as it is."""
    return {name: means[name].merge(mean) if name in means else mean for name, mean in observed.items()}


# Runs of a pass: as many processes have work, and statistics are sent and merged as often.
MAX_SHARDS = 64


def shards(count: int, most: int = MAX_SHARDS) -> list[range]:
    """The numbers below ``count`` in up to ``most`` runs of one length, the last of what is left. They do not
    depend on the number of processes."""
    length = max(1, -(-count // most))
    return [range(first, min(first + length, count)) for first in range(0, count, length)]


def summed(measure: Callable[[int], Mapping[str, Mean]], merge: Merge = added) -> Callable[[range], dict[str, Mean]]:
    """``measure`` of one item, for a run of items: their statistics, merged in order."""

    def measure_run(run: range) -> dict[str, Mean]:
        means: dict[str, Mean] = {}
        for number in run:
            means |= merge(means, measure(number))
        return means

    return measure_run


# The content of a stage's checkpoint, by name, after ``done`` steps of each phase, when it holds these names.
# ValueError for counts of steps that the stage does not have.
Declare = Callable[[Mapping[str, int], Collection[str]], Mapping[str, Statistic]]


@record(frozen=True, config=STRICT)
class _StateBody:
    counts: dict[str, Count]
    done: dict[str, Count]


def require_steps(done: Mapping[str, int], most: Mapping[str, int]) -> None:
    """ValueError where more steps of a phase are done than there are."""
    for phase, count in done.items():
        if count > most[phase]:
            raise ValueError(f"done.{phase} = {count}, expected at most {most[phase]}")


class Checkpoint:
    """A context: ``state`` is the newest, ``advance`` replaces it, leaving by an error saves it, by success removes the
    file."""

    def __init__(
        self,
        target: Path,
        kind: str,
        inputs: dict[str, Any],
        start: State,
        declare: Declare,
        reporter: Reporter,
    ) -> None:
        """``start``: the first state, unless an earlier run for the same ``target`` left one that is as declared."""
        self.path = partial_path(target)
        self._kind = f"{kind}-partial"
        self._inputs = inputs
        self._declare = declare
        require_same(f"what {self.path.name} is made from", inputs)
        self.state = from_first(lambda: self._resumed(start, reporter))
        self._saved = self.state
        self._saved_at = time.monotonic()

    def advance(self, state: State) -> None:
        """ArtifactError when it is time to write the file and it cannot be written."""
        self.state = state
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self._save()

    def run(
        self,
        phase: str,
        runs: Sequence[range],
        measure: Callable[[range], Mapping[str, Mean] | None],
        reporter: Reporter,
        label: str,
        merge: Merge = added,
    ) -> range | None:
        """A pass over the steps of ``phase``, from where it is. ``runs``: all steps by number, in runs that one process
        measures at once; rank 0's count, whose device may have more memory. All ranks merge what ``measure`` returns of
        each run, in their order. The pass ends early with a run of which
        ``measure`` returns None, and returns that run.

        Raises:
            What ``measure`` raises, on all ranks.
        """
        done = self.state.done[phase]
        total = runs[-1].stop if runs else done
        left = from_first(lambda: [range(max(done, run.start), run.stop) for run in runs if run.stop > done])

        def step(run: range) -> Mapping[str, Mean] | None:
            reporter(run.start, total, label)
            return measure(run)

        for run, found in zip(left, map_over_ranks(left, step), strict=False):
            if found is None:
                return run
            means = {**self.state.means, **merge(self.state.means, found)}
            self.advance(State(means, {**self.state.done, phase: run.stop}))
        reporter(total, total, label)
        return None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.path.unlink(missing_ok=True)
        elif self.state is not self._saved and not (kind and issubclass(kind, ArtifactError)):  # such as a full disk
            self._save()

    def _save(self) -> None:
        if rank() > 0:
            return
        means = self.state.means
        body = dump(_StateBody({name: mean.count for name, mean in means.items()}, dict(self.state.done)))
        totals = {name: mean.total for name, mean in means.items()}
        artifact.write(self.path, artifact.Artifact(self._kind, SCHEMA, self._inputs, body, totals))
        self._saved, self._saved_at = self.state, time.monotonic()

    def _resumed(self, start: State, reporter: Reporter) -> State:
        if not self.path.exists():
            return start
        try:
            stored = artifact.read(self.path, self._kind, SCHEMA)
            difference = artifact.differing_input(self._inputs, stored.inputs)
            if difference is not None:
                raise ArtifactError(difference)
            state = self._checked(start, stored)
        except ArtifactError as error:
            reporter.say(f"{self.path.name} is discarded: {error.message}")
            return start
        steps = ", ".join(f"{count} {phase}" for phase, count in state.done.items())
        reporter.say(f"{self.path.name}: goes on after {steps}")
        return state

    def _checked(self, start: State, stored: artifact.Artifact) -> State:
        """ArtifactError unless the file holds what is declared."""
        body = record_of(_StateBody, stored.body, self.path)
        with refusing(self.path):
            if body.done.keys() != start.done.keys() or body.counts.keys() != stored.tensors.keys():
                raise ValueError(f"phases {list(body.done)[:4]} and counts {list(body.counts)[:4]} are not the stage's")
            declared = self._declare(body.done, body.counts.keys())
            require_tensors(stored.tensors, {name: statistic.total for name, statistic in declared.items()})
            for name, statistic in declared.items():
                count, expected = body.counts[name], statistic.count
                if not (count > 0 if expected is None else count == expected):
                    allowed = "1 or more" if expected is None else expected
                    raise ValueError(f"counts.{name} = {count}, expected {allowed}")
        means = {name: Mean(total, body.counts[name]) for name, total in stored.tensors.items()}
        return State(means, {phase: body.done[phase] for phase in start.done})
