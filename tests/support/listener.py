"""A reporter that notes what it hears, and can press Ctrl-C."""

from kvcal.progress import Silent


class Listener(Silent):
    """Interrupts at the ``stop_at``-th step, at a message with ``at``, or at the step (label, number)."""

    def __init__(self, stop_at: int | None = None, at: str | tuple[str, int] | None = None) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self.said: list[str] = []
        self._stop_at, self._at = stop_at, at

    def say(self, message: str) -> None:
        self.said.append(message)
        if isinstance(self._at, str) and self._at in message:
            raise KeyboardInterrupt

    def __call__(self, done: int, total: int, label: str) -> None:
        assert 0 <= done <= total
        self.steps.append((label, done, total))
        if len(self.steps) == self._stop_at or (label, done) == self._at:
            raise KeyboardInterrupt
