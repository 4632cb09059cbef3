"""Tensors that come to a device group by group, from host memory or a file, while it computes with the groups before.

A copy runs beside kernels only from pinned memory, and on a stream of its own. So threads bring what is not pinned to
pinned buffers, ``AHEAD`` groups at a time: they read it from a file and verify it, or copy it. A group is then copied
to one of ``SLOTS`` buffers on the device, before the host enqueues what is computed with the group before. Streams and
threads wait for one another by events; the host waits only for what is still being read. Torch keeps pinned memory for
the next call.

A thread that comes back from the system waits for its turn at Python, and the one that launches kernels then waits for
it. So threads call no torch, and tensors below ``SMALL`` are brought by the caller.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

SLOTS = 3
AHEAD, THREADS = 7, 16
SMALL = 2**16  # bytes
ALIGNMENT = 256  # bytes; of a tensor in a buffer


class Unread(Protocol):
    """A tensor that is not in memory yet."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def nbytes(self) -> int: ...
    def read_into(self, memory: np.ndarray) -> None:
        """Its bytes, uint8 [nbytes], in any thread."""


Group = Mapping[str, Tensor]
Source = Mapping[str, Tensor | Unread]


def on_device(groups: Sequence[Source], device: torch.device) -> Iterator[Group]:
    """The groups, from the CPU or unread, on ``device``, in their order. A group's memory is that of a later one: what
    the caller has enqueued on the current stream when it asks for the next group may still use it, nothing else.
    Raises what ``read_into`` does, of the first tensor that cannot be read."""
    if device.type != "cuda":
        yield from _in_host(groups)
        return
    room = max(map(group_bytes, groups), default=0)
    slots = [_Slot(room, device) for _ in range(min(SLOTS, len(groups)))]
    copies, copied = torch.cuda.Stream(device), [torch.cuda.Event(blocking=True) for _ in groups]
    copies.wait_stream(torch.cuda.current_stream(device))  # whose memory the buffers may have been
    before: tuple[_Slot, Group, torch.cuda.Event] | None = None
    try:
        for number, group in enumerate(_in_host(groups, copied)):
            slot = slots[number % SLOTS]
            sent = slot.send(group, copies, copied[number])
            if before is not None:
                yield from _hand_over(*before)
            before = slot, sent, copied[number]
        if before is not None:
            yield from _hand_over(*before)
    finally:  # before others get the buffers' memory
        torch.cuda.current_stream(device).wait_stream(copies)


def _in_host(groups: Sequence[Source], copied: Sequence[torch.cuda.Event] | None = None) -> Iterator[Group]:
    """The groups in host memory, in their order. The memory of what was brought there is that of a later group: as soon
    as the next one is asked for, or, where all of it is to be pinned, once the group was ``copied`` from it, too."""
    pin = copied is not None
    wanted = [{name: one for name, one in group.items() if not _is_there(one, pin)} for group in groups]
    room, depth = max(map(group_bytes, wanted), default=0), min(AHEAD, len(groups))
    buffers = torch.empty(depth, room, dtype=torch.uint8, pin_memory=pin and room > 0)
    under_way: deque[tuple[Group, list[Callable[[], None]]]] = deque()
    threads = ThreadPoolExecutor(THREADS)
    try:
        for number, group in enumerate(groups):
            if len(under_way) == depth:
                yield _once_brought(*under_way.popleft())
            before = copied[number - depth] if copied is not None and number >= depth else None
            memory = views(buffers[number % depth], wanted[number])
            there = {name: one for name, one in group.items() if name not in memory and isinstance(one, Tensor)}
            under_way.append(({**there, **memory}, _bringing(wanted[number], memory, threads, before)))
        while under_way:
            yield _once_brought(*under_way.popleft())
    finally:
        threads.shutdown(cancel_futures=True)


def _is_there(one: Tensor | Unread, pin: bool) -> bool:
    return isinstance(one, Tensor) and (not pin or one.is_pinned() or not one.numel())


def _once_brought(group: Group, bringing: Sequence[Callable[[], None]]) -> Group:
    for call in bringing:
        call()
    return group


def in_memory(tensors: Source, pin: bool) -> dict[str, Tensor]:
    """Copies in one buffer on the CPU. Of a pinned one, torch rounds the size up to a power of two. Raises what
    ``read_into`` does."""
    copied = views(torch.empty(group_bytes(tensors), dtype=torch.uint8, pin_memory=pin), tensors)
    with ThreadPoolExecutor(THREADS) as threads:
        _once_brought(copied, _bringing(tensors, copied, threads))
    return copied


def _bringing(
    tensors: Source, memory: Group, threads: ThreadPoolExecutor, before: torch.cuda.Event | None = None
) -> list[Callable[[], None]]:
    """Calls after which the tensors are in ``memory``, which is written to once ``before`` has come."""
    calls: list[Callable[[], None]] = []
    for name, one in tensors.items():
        source, place = _bytes(one) if isinstance(one, Tensor) else one, _bytes(memory[name])
        bring = functools.partial(_bring, source, place, before)
        calls.append(bring if len(place) < SMALL else threads.submit(bring).result)
    return calls


def _bring(source: np.ndarray | Unread, memory: np.ndarray, before: torch.cuda.Event | None) -> None:
    if before is not None:
        before.synchronize()
    if isinstance(source, np.ndarray):
        np.copyto(memory, source)
    else:
        source.read_into(memory)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def views(buffer: Tensor, tensors: Source) -> dict[str, Tensor]:
    """Parts of ``buffer``, uint8, with the names, shapes and dtypes of ``tensors``, one behind the other."""
    found, start = {}, 0
    for name, tensor in tensors.items():
        found[name] = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor.nbytes)
    return found


def group_bytes(tensors: Source) -> int:
    """Bytes of a buffer for ``views``."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _hand_over(slot: _Slot, group: Group, copied: torch.cuda.Event) -> Iterator[Group]:
    stream = torch.cuda.current_stream(slot.buffer.device)
    stream.wait_event(copied)
    yield group
    slot.is_free.record(stream)


class _Slot:
    """The device's buffer of one group. ``is_free``: it is computed with no more."""

    def __init__(self, room: int, device: torch.device) -> None:
        self.buffer = torch.empty(room, dtype=torch.uint8, device=device)
        self.is_free = torch.cuda.Event()

    def send(self, group: Group, copies: torch.cuda.Stream, copied: torch.cuda.Event) -> Group:
        """The group on the device, once ``copied``."""
        sent = views(self.buffer, group)
        with torch.cuda.stream(copies):
            copies.wait_event(self.is_free)
            for name, tensor in group.items():
                sent[name].copy_(tensor, non_blocking=True)
            copied.record(copies)
        return sent
