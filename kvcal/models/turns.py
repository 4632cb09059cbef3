"""Forwards side by side: each runs a layer before any goes on to the next, so that a streamed layer is loaded once.

Forwards of several plans could each run from the first layer to the last; a streamed model would load all its layers
for each. Here every call has a thread of its own, which stops where it comes to a layer. One thread runs at a time: of
those that have come to the earliest layer, the first. So a call does what it would do alone, on the same stream, with
the same shapes and so the same bits; and what an earlier call leaves at a layer, a later one finds there.

Threads rather than a forward that is cut at its layers: masks, positions, caches and hooks stay the model's own.

Left out: backwards, which autograd runs in a thread of the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class _Ended(BaseException):
    """Ends a call whose result is not asked for any more; no stage catches it."""


class _Current(threading.local):
    turn: _Turn[Any] | None = None


_CURRENT = _Current()


def reach(layer: int) -> None:
    """Wait for the turn, as a call comes to a layer. Nothing for a call that is not side by side with others."""
    if _CURRENT.turn is not None:
        _CURRENT.turn.stop_at(layer)


def side_by_side(calls: Sequence[Callable[[], Result]], device: torch.device) -> Generator[Result]:
    """The results of calls that come to layers of a model on ``device``, in their order. The next call ends when the
    next result is asked for: no more than one is held here.

    Raises:
        What a call raises. The others end where they are.
    """
    turns = [_Turn(call, device) for call in calls]
    try:
        for turn in turns:
            while not turn.is_done:
                min((other for other in turns if not other.is_done), key=lambda other: other.layer).go_on()
            yield turn.take()
    finally:
        for turn in turns:
            turn.end()


class _Turn(Generic[Result]):
    """A call in a thread that runs within ``go_on`` alone. ``layer``: where it has stopped; ``is_done``: or ended."""

    def __init__(self, call: Callable[[], Result], device: torch.device) -> None:
        self.layer, self.is_done = -1, False
        self._found: list[Result] = []
        self._errors: list[BaseException] = []
        self._is_unwanted = False
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(call, device), daemon=True)

    def go_on(self) -> None:
        """Run to the next layer, or to the end. Raises what the call raises."""
        if self._thread.ident is None:
            self._thread.start()
        self._may_run.release()
        self._has_stopped.acquire()
        if self._errors:
            raise self._errors.pop()  # kept nowhere: its traceback holds the call's tensors

    def take(self) -> Result:
        """The result of a call that is done."""
        return self._found.pop()

    def end(self) -> None:
        """Stop a call that is not done for good."""
        self._is_unwanted = True
        if self._thread.ident is not None and not self.is_done:
            self._may_run.release()
            self._thread.join()

    def stop_at(self, layer: int) -> None:
        """In the call's thread."""
        self.layer = layer
        self._has_stopped.release()
        self._may_run.acquire()
        if self._is_unwanted:
            raise _Ended

    def _run(self, call: Callable[[], Result], device: torch.device) -> None:
        _CURRENT.turn = self
        self._may_run.acquire()
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                self._found.append(call())
        except BaseException as error:  # raised again in the thread that waits
            self._errors.append(error)
        self.is_done = True
        self._has_stopped.release()
