"""Messages and progress of stages, for whoever runs them; never the terminal itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcal.forecast import Phase


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
