"""Numbered steps of work in shards, on processes that may crash or hang.

A worker states each step before it takes it. One that dies, or that stays at a step for too long, is replaced: its step
is lost, and the other steps of its shard are done by others.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Shard:
    """Steps ``first`` to ``last`` - 1 of what ``key`` names."""

    key: str
    first: int
    last: int


@dataclass(frozen=True)
class Lost:
    """Why the one step of a shard has no result: "crash" or "hang", and the exit code."""

    why: str
    code: int | None


Work = Callable[[Shard, Callable[[int], None]], Any]


class _Worker:
    def __init__(self, start: Callable[[], Work]) -> None:
        self.at = CONTEXT.Value("q", -1, lock=False)
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(start, theirs, self.at), daemon=True)
        self.process.start()
        theirs.close()
        self.shard: Shard | None = None
        self.seen, self.since = -1, time.monotonic()

    def give(self, shard: Shard) -> None:
        self.shard, self.at.value = shard, -1
        self.seen, self.since = -1, time.monotonic()
        self.connection.send(shard)

    def seconds_at_step(self) -> float:
        """0 before the first: what imports and begins may take its time."""
        if self.at.value != self.seen:
            self.seen, self.since = self.at.value, time.monotonic()
        return time.monotonic() - self.since if self.seen >= 0 else 0.0


def _serve(start: Callable[[], Work], connection: Connection, at: Any) -> None:
    work = start()

    def tell(step: int) -> None:
        at.value = step

    while True:
        connection.send(work(connection.recv(), tell))


def run(
    shards: Iterable[Shard], start: Callable[[], Work], processes: int, seconds: float, patience: float = 120
) -> Iterator[tuple[Shard, Any]]:
    """Each shard with what the worker's function, made by ``start``, returns for it, as they finish; (a shard of one
    step, Lost) for a lost step. After ``seconds`` no shard is begun. ``patience``: seconds for a step.

    Raises:
        RuntimeError: a worker died outside of a step.
    """
    queue, deadline = deque(shards), time.monotonic() + seconds
    workers = [_Worker(start) for _ in range(min(processes, len(queue)))]
    for worker in workers:
        worker.give(queue.popleft())
    while workers:
        wait([worker.connection for worker in workers], timeout=1)
        for place, worker in enumerate(workers):
            assert worker.shard is not None
            shard, result = worker.shard, None
            if worker.connection.poll():
                try:
                    result = worker.connection.recv()
                except EOFError:
                    worker.process.join()
                    result = Lost("crash", worker.process.exitcode)
            elif worker.seconds_at_step() > patience:
                worker.process.kill()
                worker.process.join()
                result = Lost("hang", None)
            else:
                continue
            if isinstance(result, Lost):
                step = worker.at.value
                if not shard.first <= step < shard.last:
                    raise RuntimeError(f"{shard}: the worker is lost outside of a step: {result}")
                rest = [replace(shard, last=step), replace(shard, first=step + 1)]
                queue.extendleft(part for part in rest if part.first < part.last)
                shard = Shard(shard.key, step, step + 1)
                workers[place] = worker = _Worker(start)
            yield shard, result
            worker.shard = None
            if queue and time.monotonic() < deadline:
                worker.give(queue.popleft())
            else:
                worker.process.kill()
        workers = [worker for worker in workers if worker.shard is not None]
