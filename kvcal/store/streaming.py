"""Tensors in host memory that come to a device group by group, while it computes with the groups before.

A copy runs beside kernels only from pinned memory, and on a stream of its own. So a group is gathered in a pinned
buffer, unless its tensors are pinned already, and copied to a buffer on the device, of which there are ``SLOTS`` of
each: two groups are under way while one is computed with. Streams wait for one another by events; the host waits only
where it would overwrite a pinned buffer that is still being copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

SLOTS = 3
ALIGNMENT = 256  # bytes; of a tensor in a buffer

Group = Mapping[str, Tensor]


def on_device(groups: Sequence[Group], device: torch.device) -> Iterator[Group]:
    """The groups, tensors on the CPU, on ``device``, in their order. A group's memory is that of a later one: what the
    caller has enqueued on the current stream when it asks for the next group may still use it, nothing else."""
    if device.type != "cuda":
        yield from groups
        return
    room = max(map(group_bytes, groups), default=0)
    slots = [_Slot(room, device) for _ in range(min(SLOTS, len(groups)))]
    copies = torch.cuda.Stream(device)
    copies.wait_stream(torch.cuda.current_stream(device))  # whose memory the buffers may have been
    under_way: deque[tuple[_Slot, Group]] = deque()
    try:
        for number, group in enumerate(groups):
            if len(under_way) == SLOTS - 1:
                yield from _hand_over(*under_way.popleft())
            slot = slots[number % SLOTS]
            under_way.append((slot, slot.send(group, copies)))
        while under_way:
            yield from _hand_over(*under_way.popleft())
    finally:  # before others get the buffers' memory
        torch.cuda.current_stream(device).wait_stream(copies)


def pinned(tensors: Group) -> dict[str, Tensor]:
    """Copies of CPU tensors in one pinned buffer. torch rounds its size up to a power of two."""
    copied = views(torch.empty(group_bytes(tensors), dtype=torch.uint8, pin_memory=True), tensors)
    for name, tensor in tensors.items():
        copied[name].copy_(tensor)
    return copied


def views(buffer: Tensor, tensors: Group) -> dict[str, Tensor]:
    """Parts of ``buffer``, uint8, with the names, shapes and dtypes of ``tensors``, one behind the other."""
    found, start = {}, 0
    for name, tensor in tensors.items():
        found[name] = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor.nbytes)
    return found


def group_bytes(tensors: Group) -> int:
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
