"""Ranks: the processes that torchrun starts for one command.

Every rank runs the same command from start to end. Only the items of a long loop (sequences, batches, plans)
are dealt out: ``map_over_ranks`` gives every rank every result, in the order of the items, so that all go on
with the same state. One process takes the same way, without a group.

Rank 0 prints and writes files; the others read what it wrote, so that all ranks need one file system.
Messages are Python objects that torch.distributed moves over gloo, between processes of one command. An error
of an item is raised on all ranks. A rank that ends otherwise breaks its connections, which ends the others.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from typing import Any, TypeVar

from kvcal.errors import KvcalError, RankFailed, UsageError
from kvcal.lazy_torch import torch

# The longest wait for another rank that is at work: an item may be a whole evaluation. A dead one is noticed
# at once.
TIMEOUT = timedelta(days=1)
# Unset for the libraries: lm-eval and accelerate would otherwise shard the work a second time.
ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class _Ranks:
    """This process among ``size``. ``local``: its number among the ``on_node`` of its node; ``store``: of
    all."""

    rank: int = 0
    size: int = 1
    local: int = 0
    on_node: int = 1
    store: Any = None


_ranks = _Ranks()
_is_first_error = True
_is_measuring = False  # an item: loops within it are not dealt out again


def rank() -> int:
    """The number of this process, 0 in one that is alone."""
    return _ranks.rank


def size() -> int:
    return _ranks.size


def size_on_node() -> int:
    return _ranks.on_node


def world_size() -> int:
    """The number of processes that torchrun has started, whether or not they have joined. UsageError: no
    number."""
    return max(1, _number("WORLD_SIZE", 1))


def prints_errors() -> bool:
    """Whether this process prints the error that ends the command: of several, the first that has one."""
    return _is_first_error


def device(name: str) -> str:
    """``name`` of a device; of several ranks each takes the GPU of its number on the node for "auto" and
    "cuda"."""
    if _ranks.size == 1 or name == "cpu" or not torch.cuda.is_available():
        return name
    if name not in ("auto", "cuda"):
        raise UsageError(f"--device {name}: every rank takes a GPU of its own", hint="leave --device out, or give cuda")
    local, count = _ranks.local, torch.cuda.device_count()
    if local >= count:
        raise UsageError(
            f"rank {rank()} is number {local} on its node, which has {count} GPUs",
            hint=f"give torchrun --nproc-per-node {count} or less, or --device cpu",
        )
    torch.cuda.set_device(local)
    return f"cuda:{local}"


@contextmanager
def joined() -> Iterator[None]:
    """A process group for one command, as torchrun started its processes; nothing without torchrun."""
    global _ranks, _is_first_error
    if world_size() == 1:
        yield
        return
    _ranks = _join()
    try:
        with redirect_stdout(StringIO() if _ranks.rank > 0 else sys.stdout):
            yield
    except BaseException as error:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            _is_first_error = _ranks.store.add(f"kvcal/failed/{attempt}", 1) == 1
        except RuntimeError:  # the store has gone with its owner
            _is_first_error = False
        if isinstance(error, RankFailed):
            time.sleep(1.0)  # so that torchrun sees the other rank end first
        raise
    torch.distributed.destroy_process_group()


def _join() -> _Ranks:
    dist, number, count = torch.distributed, _number("RANK"), world_size()
    try:
        store, *_ = next(dist.rendezvous("env://", number, count, timeout=TIMEOUT))
        dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"rank {number} of {count} does not reach the others: {' '.join(str(error).split())[:200]}",
            hint="start the command by torchrun; GLOO_SOCKET_IFNAME names the network interface, such as eth0",
        ) from None
    local, on_node = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", count)
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    return _Ranks(number, count, local, on_node, store)


def _number(name: str, default: int | None = None) -> int:
    """A variable of torchrun's environment."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UsageError(f"{name} = {text!r} in the environment, expected a number", "start the command by torchrun")
    return int(text)


def gather(value: Result) -> list[Result]:
    """``value`` of every rank, in their order. Waits until all ranks are here."""
    if _is_alone():
        return [value]
    found: list[Any] = [None] * _ranks.size
    try:
        torch.distributed.all_gather_object(found, value)
    except RuntimeError as error:
        reason = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split())).partition(". ")[0]
        raise RankFailed(
            f"another of the {_ranks.size} ranks has ended, or cannot be reached: {reason[:200]}",
            hint="its own message tells why; what was finished is kept, the same command resumes",
        ) from None
    return found


def require_same(what: str, value: object) -> None:
    """Wait for all ranks. UsageError unless ``value`` is the same on all of them."""
    if any(other != value for other in gather(value)):
        raise UsageError(
            f"the ranks differ in {what}", hint="give all ranks the same command, versions, model, data and --out"
        )


def map_over_ranks(items: Sequence[Item], fn: Callable[[Item], Result]) -> Iterator[Result]:
    """Yield ``fn(item)`` for each item, in order. Items are dealt round-robin to the ranks; every rank
    receives every result, tensors on the CPU.

    Raises:
        What ``fn`` raises of KvcalError, on every rank, after the results of the items before.
        RankFailed: another rank has ended.
    """
    if _is_alone():
        yield from map(fn, items)
        return
    for first in range(0, len(items), _ranks.size):
        part = items[first : first + _ranks.size]
        mine = _outcome(fn, part[_ranks.rank]) if _ranks.rank < len(part) else None
        found: Any
        for found in gather(mine)[: len(part)]:
            if isinstance(found, KvcalError):
                raise found
            yield found


def from_first(fn: Callable[[], Result]) -> Result:
    """The result of ``fn`` on rank 0, for all ranks. Raises as ``map_over_ranks``."""
    return next(map_over_ranks([None], lambda _: fn()))


def _is_alone() -> bool:
    """Whether loops of this process are its own."""
    return _ranks.size == 1 or _is_measuring


def _outcome(fn: Callable[[Item], Result], item: Item) -> Result | KvcalError:
    """The result, or the error that all ranks raise."""
    global _is_measuring
    _is_measuring = True
    try:
        return fn(item)
    except RankFailed:
        raise
    except KvcalError as error:
        return error
    finally:
        _is_measuring = False
