"""Tensors that come to a device group by group, from host memory or a file, while it computes with the groups before.

A copy runs beside kernels only from pinned memory, and on a stream of its own. So a group is gathered in a pinned
buffer, unless its tensors are pinned already, and copied to a buffer on the device, of which there are ``SLOTS`` of
each: two groups are under way while one is computed with. Streams wait for one another by events; the host waits only
where it would overwrite a pinned buffer that is still being copied, and for what is still being read. Threads read
``AHEAD`` groups of a file at a time, and verify them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

SLOTS = 3
AHEAD, THREADS = 4, 8
ALIGNMENT = 256  # bytes; of a tensor in a buffer


class Unread(Protocol):
    """A tensor that is not in memory yet."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def nbytes(self) -> int: ...
    def read_into(self, memory: Tensor) -> None:
        """Into a tensor of its dtype and shape on the CPU, in any thread."""


Group = Mapping[str, Tensor]
Source = Mapping[str, Tensor | Unread]


def on_device(groups: Sequence[Source], device: torch.device) -> Iterator[Group]:
    """The groups, from the CPU or unread, on ``device``, in their order. A group's memory is that of a later one: what
    the caller has enqueued on the current stream when it asks for the next group may still use it, nothing else.
    Raises what ``read_into`` does, of the first tensor that cannot be read."""
    if device.type != "cuda":
        yield from _read_ahead(groups)
        return
    room = max(map(group_bytes, groups), default=0)
    slots = [_Slot(room, device) for _ in range(min(SLOTS, len(groups)))]
    copies = torch.cuda.Stream(device)
    copies.wait_stream(torch.cuda.current_stream(device))  # whose memory the buffers may have been
    under_way: deque[tuple[_Slot, Group]] = deque()
    try:
        for number, group in enumerate(_read_ahead(groups)):
            if len(under_way) == SLOTS - 1:
                yield from _hand_over(*under_way.popleft())
            slot = slots[number % SLOTS]
            under_way.append((slot, slot.send(group, copies)))
        while under_way:
            yield from _hand_over(*under_way.popleft())
    finally:  # before others get the buffers' memory
        torch.cuda.current_stream(device).wait_stream(copies)


def _read_ahead(groups: Sequence[Source]) -> Iterator[Group]:
    """The groups in host memory, in their order. The memory of what was read is that of a later group, as soon as the
    next one is asked for."""
    unread = [{name: one for name, one in group.items() if not isinstance(one, Tensor)} for group in groups]
    room = max(map(group_bytes, unread), default=0)
    buffers = [torch.empty(room, dtype=torch.uint8) for _ in range(min(AHEAD, len(groups)))]
    under_way: deque[tuple[Group, list[Future[None]]]] = deque()
    threads = ThreadPoolExecutor(THREADS)
    try:
        for number, group in enumerate(groups):
            if len(under_way) == AHEAD:
                yield _once_read(*under_way.popleft())
            memory = views(buffers[number % AHEAD], unread[number])
            reading = [threads.submit(_put, one, memory[name]) for name, one in unread[number].items()]
            in_host = {name: one for name, one in group.items() if isinstance(one, Tensor)}
            under_way.append(({**in_host, **memory}, reading))
        while under_way:
            yield _once_read(*under_way.popleft())
    finally:
        threads.shutdown(cancel_futures=True)


def _once_read(group: Group, reading: Sequence[Future[None]]) -> Group:
    for one in reading:
        one.result()
    return group


def in_memory(tensors: Source, pin: bool) -> dict[str, Tensor]:
    """Copies in one buffer on the CPU. Of a pinned one, torch rounds the size up to a power of two. Raises what
    ``read_into`` does."""
    copied = views(torch.empty(group_bytes(tensors), dtype=torch.uint8, pin_memory=pin), tensors)
    with ThreadPoolExecutor(THREADS) as threads:
        _once_read(copied, [threads.submit(_put, tensor, copied[name]) for name, tensor in tensors.items()])
    return copied


@torch.inference_mode()  # of the thread: the memory may be its caller's
def _put(source: Tensor | Unread, memory: Tensor) -> None:
    if isinstance(source, Tensor):
        memory.copy_(source)
    else:
        source.read_into(memory)


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


def _hand_over(slot: _Slot, group: Group) -> Iterator[Group]:
    stream = torch.cuda.current_stream(slot.on_device.device)
    stream.wait_event(slot.copied)
    yield group
    slot.is_free.record(stream)


class _Slot:
    """Buffers of one group. ``copied``: it is on the device; ``is_free``: it is computed with no more."""

    def __init__(self, room: int, device: torch.device) -> None:
        self.room = room
        self.in_host: Tensor | None = None  # only where something is not pinned
        self.on_device = torch.empty(room, dtype=torch.uint8, device=device)
        self.copied, self.is_free = torch.cuda.Event(), torch.cuda.Event()

    def send(self, group: Group, copies: torch.cuda.Stream) -> Group:
        """The group on the device, once ``copied``."""
        if not all(tensor.is_pinned() for tensor in group.values() if tensor.numel()):
            group = self._gathered(group)
        sent = views(self.on_device, group)
        with torch.cuda.stream(copies):
            copies.wait_event(self.is_free)
            for name, tensor in group.items():
                sent[name].copy_(tensor, non_blocking=True)
            self.copied.record(copies)
        return sent

    def _gathered(self, group: Group) -> Group:
        if self.in_host is None:
            self.in_host = torch.empty(self.room, dtype=torch.uint8, pin_memory=True)
        self.copied.synchronize()
        gathered = views(self.in_host, group)
        for name, tensor in group.items():
            gathered[name].copy_(tensor)
        return gathered
