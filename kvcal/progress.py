"""Messages and progress of stages, for whoever runs them, never the terminal itself."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives what a stage has to say."""

    def say(self, message: str) -> None:
        """One line for people."""

    def __call__(self, done: int, total: int, label: str) -> None:
        """``done`` of ``total`` steps of the work named ``label``."""


class Silent:
    """A Reporter that keeps still."""

    def say(self, message: str) -> None:
        pass

    def __call__(self, done: int, total: int, label: str) -> None:
        pass


SILENT = Silent()
