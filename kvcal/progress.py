"""Messages and progress of stages, for whoever runs them, never the terminal itself; and the seconds that are left of
a whole command, from measured phases and the expected work of those to come.

Work is in tokens through the model, or what takes as long: it can be told from shapes before anything is measured. Time
comes from steps alone. The current phase goes on at the rate of its own steps, drawn towards that of the phases before
it; later phases go at the rate of all. Steps of an earlier run, and phases that are skipped, take no time and say
nothing about it.

A step that takes longer than the mean raises the estimate little by little while it lasts: by what the mean would be if
it ended now. So nothing jumps when it ends, and no phase stays at 0 seconds while a slow step goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

# The share of a phase's work after which its own rate counts as much as that of the phases before.
PRIOR_SHARE = 0.1


class Phase(NamedTuple):
    """``label``: how the labels of its progress begin; ``work``: tokens through the model; ``steps``: of all its
    labels together, at least, where it has several."""

    label: str
    work: float
    steps: int = 0


class Reporter(Protocol):
    """Receives what a stage has to say."""

    def say(self, message: str) -> None:
        """One line for people."""

    def __call__(self, done: int, total: int, label: str) -> None:
        """``done`` of ``total`` steps of the work named ``label``."""

    def expect(self, phases: Sequence[Phase]) -> None:
        """The phases of the whole command, in order, before the first of them begins."""


class Silent:
    """A Reporter that keeps still."""

    def say(self, message: str) -> None:
        pass

    def __call__(self, done: int, total: int, label: str) -> None:
        pass

    def expect(self, phases: Sequence[Phase]) -> None:
        pass


SILENT = Silent()


class Pace(NamedTuple):
    """Time and work that were measured: ``seconds`` for ``work``."""

    seconds: float = 0.0
    work: float = 0.0

    def __add__(self, other: Pace) -> Pace:  # type: ignore[override]
        return Pace(self.seconds + other.seconds, self.work + other.work)

    @property
    def rate(self) -> float | None:
        """Seconds for a unit of work; None without any."""
        return self.seconds / self.work if self.work > 0 else None


def with_step(pace: Pace, since: float, step: float) -> Pace:
    """``pace`` once the step of so much work has ended that has lasted ``since``; as it is, while that is no slower."""
    longer = pace + Pace(since, step)
    return longer if pace.rate is not None and longer.seconds * pace.work > pace.seconds * longer.work else pace


def seconds_of_steps(pace: Pace, step: float, steps_left: int, since: float) -> float | None:
    """Seconds for so many steps of ``step`` work each, the first of which has lasted ``since``; None at no pace."""
    rate = with_step(pace, since, step).rate
    if rate is None or not steps_left:
        return None if rate is None else 0.0
    return rate * step * (steps_left - 1) + max(0.0, rate * step - since)


@dataclass
class BegunPhase:
    """A phase that has begun. ``taken``: steps of this run; ``updated``: when the last of them ended (seconds);
    ``labels``: (done, total) of each label."""

    phase: Phase
    started: float
    updated: float
    taken: int = 0
    labels: dict[str, tuple[int, int]] = field(default_factory=dict)

    def step(self, done: int, total: int, label: str, now: float) -> None:
        before, _ = self.labels.get(label, (done, total))  # what is done at first was done by an earlier run
        self.labels[label] = done, total
        if done < before:  # begun again
            self.taken = max(0, self.taken - before + done)
        elif done > before:
            self.taken += done - before
            self.updated = now

    @property
    def steps_left(self) -> int:
        total = max(self.phase.steps, sum(total for _, total in self.labels.values()))
        return max(0, total - sum(done for done, _ in self.labels.values()))

    @property
    def step_work(self) -> float:
        """Of one step."""
        total = max(self.phase.steps, sum(total for _, total in self.labels.values()))
        return self.phase.work / max(1, total)

    @property
    def pace(self) -> Pace:
        return Pace(self.updated - self.started, self.taken * self.step_work)


class Forecast:
    """Takes a command's progress, as a Reporter does, and tells what is left. ``phases``: in order; ``number``: of the
    current one, -1 before the first; ``last_seconds``: of the one before it."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self.number, self.last_seconds = -1, 0.0
        self._before = Pace()
        self._current: BegunPhase | None = None

    def step(self, done: int, total: int, label: str, now: float) -> bool:
        """``done`` of ``total`` steps of ``label``, at ``now`` (seconds); whether a phase begins with it. Labels of no
        current or later phase, such as those of work within work, are left out."""
        numbers = [n for n, phase in enumerate(self.phases) if n >= self.number and label.startswith(phase.label)]
        if not numbers:
            return False
        begins = numbers[0] > self.number
        if begins:
            if self._current is not None:
                self._before += self._current.pace
                self.last_seconds = now - self._current.started
            self.number, self._current = numbers[0], BegunPhase(self.phases[numbers[0]], now, now)
        assert self._current is not None
        self._current.step(done, total, label, now)
        return begins

    def seconds_left(self, now: float) -> float | None:
        """Of all phases; None before the first measured step."""
        current = self._current
        if current is None:
            return None
        pace, since = current.pace, now - current.updated
        if self._before.rate is not None:
            weight = PRIOR_SHARE * current.phase.work
            pace += Pace(self._before.rate * weight, weight)
        left = seconds_of_steps(pace, current.step_work, current.steps_left, since)
        if left is None:
            return None
        rate = with_step(pace, since, current.step_work).rate or 0.0
        work = current.pace.work + current.step_work * current.steps_left
        rate = (self._before + Pace(rate * work, work)).rate or 0.0
        return left + rate * sum(phase.work for phase in self.phases[self.number + 1 :])
