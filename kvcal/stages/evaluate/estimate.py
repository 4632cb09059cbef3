"""The time that the plans of an evaluation take: told when the first part of each one's text is through.

A plan's seconds are those of that part times its share of the text, or those of the slowest plan before it,
which were spent on tasks, too. The first plan is often 16 bits, and the fastest one: so each plan tells anew.
"""

from __future__ import annotations

import time

from kvcal.progress import Reporter
from kvcal.quantities import format_seconds

# Of a plan's text: the share, and the seconds, after which it is told.
SHARE, SECONDS = 1 / 8, 5.0
TEXT = "evaluate: text"


class AllPlans:
    """A Reporter for ``num_plans`` measurements of one text after the other, whose progress it shows as
    one."""

    def __init__(self, reporter: Reporter, num_plans: int, has_tasks: bool) -> None:
        self._reporter, self._num_plans, self._has_tasks = reporter, num_plans, has_tasks
        self._begun, self._slowest, self._is_told = 0, 0.0, False
        self._started = time.monotonic()

    def begin(self) -> None:
        """The next plan begins."""
        now = time.monotonic()
        if self._begun:
            self._slowest = max(self._slowest, now - self._started)
        self._begun, self._started, self._is_told = self._begun + 1, now, False

    def say(self, message: str) -> None:
        self._reporter.say(message)

    def __call__(self, done: int, total: int, label: str) -> None:
        if label != TEXT:
            self._reporter(done, total, label)
            return
        before = (self._begun - 1) * total
        self._reporter(before + done, self._num_plans * total, f"{TEXT} of all plans")
        seconds, share = time.monotonic() - self._started, done / total
        if not self._is_told and share >= SHARE and seconds >= SECONDS:
            self._is_told = True
            self._tell(seconds, share)

    def _tell(self, seconds: float, share: float) -> None:
        others = self._num_plans - self._begun
        left = seconds / share - seconds + others * max(seconds / share, self._slowest)
        tasks = ", and the tasks" if self._has_tasks and self._begun == 1 else ""
        plans = f"this plan and {others} more" if others else "this plan"
        self.say(f"evaluate: about {format_seconds(left)} left, for {plans}{tasks}")
