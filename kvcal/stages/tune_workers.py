"""A threshold search in several processes, which share nothing but Optuna's journal.

Each worker takes a ticket, draws a trial with a sampler of its own, runs it and takes the next ticket, so that a slow
trial holds up nobody. Which trials a sampler has seen depends on who was faster: two parallel studies are not alike.
A worker's error ends all of them; the trials that were running are run again when the study goes on.

The workers are spawned, not forked: CUDA does not survive a fork. Each loads the model for itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch

from kvcal.errors import KvcalError, UsageError
from kvcal.stages.tune_journal import Journal, one_trial_sampler, quiet_optuna
from kvcal.stages.tune_record import Evaluate, Search

POLL_SECONDS = 1.0


def run_workers(
    journal: Journal, search: Search, evaluate: Evaluate, workers: int, on_finished: Callable[[int], None]
) -> None:
    """Run all remaining trials in ``workers`` processes; ``on_finished`` hears how many are finished, now and then.

    Raises:
        UsageError: a worker died.
        The KvcalError that a worker's ``evaluate`` raised.
    """
    num_left = max(0, search.num_trials - journal.num_finished)
    again = journal.unfinished(search)[:num_left]
    first_new = journal.num_begun - len(again)
    context = multiprocessing.get_context("spawn")
    tickets = context.Value("i", 0)
    running: list[tuple[BaseProcess, Connection]] = []
    try:
        for _ in range(min(workers, num_left)):
            receiving, sending = context.Pipe(duplex=False)
            given = (journal.path, search, evaluate, again, first_new, num_left, tickets, workers, sending)
            process = context.Process(target=_work, args=given, daemon=True)
            process.start()
            sending.close()  # ours: the worker's end is what tells us that it is gone
            running.append((process, receiving))
        while running:
            wait([process.sentinel for process, _ in running], timeout=POLL_SECONDS)
            ended = [worker for worker in running if not worker[0].is_alive()]
            running = [worker for worker in running if worker not in ended]
            for worker in ended:
                _raise_error(*worker)
            on_finished(journal.num_finished)
    finally:
        for worker in running:
            worker[0].terminate()
            worker[0].join()


def _raise_error(process: BaseProcess, receiving: Connection) -> None:
    """Raise what a worker has sent before it ended; nothing if it sent nothing and ended well."""
    with receiving:
        try:
            raise receiving.recv()
        except EOFError:  # it sent nothing
            pass
    if process.exitcode != 0:
        raise UsageError(
            f"a worker ended with exit code {process.exitcode}",
            hint="its error is above; if there is none, it may have run out of memory: use fewer --workers",
        )


def _work(
    path: Path,
    search: Search,
    evaluate: Evaluate,
    again: Sequence[int],
    first_new: int,
    num_left: int,
    tickets: Synchronized[int],
    workers: int,
    sending: Connection,
) -> None:
    """A worker: trials until the tickets run out; the first are for those to run ``again``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody: who started us ends us
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    try:
        with quiet_optuna():
            journal = Journal.open(path)
            while (ticket := _next(tickets)) < num_left:
                if ticket < len(again):
                    number = again[ticket]
                else:
                    number = journal.draw(one_trial_sampler(search.seed, first_new + ticket), search)
                journal.finish(number, evaluate(journal.thresholds(number)))
    except KvcalError as error:
        sending.send(error)


def _next(tickets: Synchronized[int]) -> int:
    with tickets.get_lock():
        ticket = tickets.value
        tickets.value = ticket + 1
        return ticket
