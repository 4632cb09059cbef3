"""The measurements of a threshold search, here or in several processes.

Workers are spawned, not forked: CUDA does not survive a fork. Each loads the model for itself, once, and measures one
setting after the other; its outcomes are read in the order of the settings, so that they do not depend on which worker
was faster. Whatever ends the search ends the workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection

import torch

from kvcal.errors import KvcalError, UsageError
from kvcal.stages.tune.record import Evaluate, Outcome

# Outcomes of the settings, in their order, each as soon as it is there.
Measure = Callable[[Sequence[Mapping[str, float]]], Iterator[Outcome]]


@contextmanager
def measuring(evaluate: Evaluate, workers: int) -> Iterator[Measure]:
    """``evaluate`` for many settings: in this process if ``workers`` is 1, else in as many others.

    The calls raise UsageError when a worker dies, and what ``evaluate`` raises.
    """
    if workers == 1:
        yield partial(map, evaluate)
        return
    with ExitStack() as stack:
        connections = [stack.enter_context(_worker(evaluate, workers)) for _ in range(workers)]
        yield partial(_measure, connections)


def _measure(connections: Sequence[Connection], settings: Sequence[Mapping[str, float]]) -> Iterator[Outcome]:
    for first in range(0, len(settings), len(connections)):
        busy = list(zip(connections, settings[first:]))  # noqa: B905 (a last round may have fewer settings)
        for connection, setting in busy:
            connection.send(setting)
        for connection, _ in busy:
            yield _received(connection)


def _received(connection: Connection) -> Outcome:
    """The worker's outcome; raises the error that it sent instead."""
    try:
        found = connection.recv()
    except (EOFError, ConnectionResetError):
        raise UsageError(
            "a worker ended before its trial did",
            hint="its error is above; if there is none, it may have run out of memory: use fewer --workers",
        ) from None
    if isinstance(found, KvcalError):
        raise found
    outcome: Outcome = found
    return outcome


@contextmanager
def _worker(evaluate: Evaluate, workers: int) -> Iterator[Connection]:
    """Our end of the pipe to a worker, which ends with the context."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(evaluate, workers, theirs), daemon=True)
    process.start()
    theirs.close()  # the worker's end alone: when it is gone, so is the worker
    try:
        yield ours
    finally:
        process.terminate()
        process.join()
        ours.close()


def _work(evaluate: Evaluate, workers: int, connection: Connection) -> None:
    """A worker: settings in, outcomes out, until it is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody: who started us ends us
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    while True:
        try:
            connection.send(evaluate(connection.recv()))
        except KvcalError as error:
            connection.send(error)
        except EOFError:  # nobody listens any more
            return
