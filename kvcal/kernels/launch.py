"""A compiled kernel on one GPU: what it asks for, and launching it with little work for the host.

A decode step launches a few kernels for each of some tens of layers, so what a launch costs the host is paid a hundred
times a token wherever no CUDA graph replays the step. Hence everything that does not change from step to step is made
once: the launch configuration by its numbers, the stream's wrapper by its handle, and the permission for more than
48 KiB of shared memory, which the driver wants asked for. A launch itself allocates nothing on the device and waits for
nothing: it may be captured. Loading may not, so the code is on the device when the constructor returns.

cuda.core loads and launches. The two attributes that it spells differently from version to version are asked of the
driver itself. Left out: clusters, cooperative launches, and keeping arguments alive (pointers are plain ints).

What a kernel asks of a GPU (``resources``) is read from its cubin alone, so that a machine without a GPU can hold every
variant to a budget. A cubin is an ELF file: ``.nv.info`` holds attributes as (format, kind, size, content), of which
the per-entry ones are pairs of a symbol's index and a value; ``.text.<entry>`` holds the instructions of 16 bytes each
(all architectures since sm_70), and ``.nv.shared.<entry>`` the declared shared memory, behind 1024 bytes that the
system keeps for itself since sm_90. Left out: spills apart from arrays in local memory, which only ptxas' own log tells
apart, and attributes of functions that are called (an entry's stack already includes theirs).
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvcal.errors import KernelError
from kvcal.lazy_torch import torch

_FREE_SHARED_BYTES = 48 * 1024  # static and dynamic together; a kernel must ask for what lies above
_CONFIGS = 64  # launch configurations that are kept
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY: torch's default stream, whose handle is 0

INSTRUCTION_BYTES = 16

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_ENTRY_FLAG = 0x10  # of a symbol's st_other: declared __global__
_REGISTERS, _STACK = 0x2F, 0x12  # EIATTR_REGCOUNT and EIATTR_MIN_STACK_SIZE: (symbol, value)
_SIZED = 4  # the format of an attribute whose content has the size that follows; all others hold two bytes
_SYSTEM_SHARED = ".nv.shared.reserved.0"  # is there when every block's shared memory begins with the system's part
_SYSTEM_SHARED_BYTES = 1024


class Kernel:
    """One entry of a cubin, loaded on the GPU ``device_index``; made by ``kvcal.kernels.compile.kernel``.

    ``registers`` and ``local_bytes`` (stack and spills) are those of one thread, ``max_threads`` is the largest block.
    """

    def __init__(self, cubin: bytes, entry: str, device_index: int) -> None:
        """KernelError when the cubin has no such entry, or when the driver refuses it."""
        from cuda.bindings import driver
        from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch
        from cuda.core._utils.cuda_utils import CUDAError  # has no public name

        entries = resources(cubin)
        if entry not in entries:
            raise KernelError(f"the kernel source has no entry {entry!r}; allowed: {', '.join(sorted(entries))}")
        self.entry = entry
        self.device_index = device_index
        self.registers = entries[entry].registers
        self.local_bytes = entries[entry].local_bytes
        self._driver: Any = driver
        self._launch, self._config, self._stream = launch, LaunchConfig, Stream.from_handle
        self._configs: dict[tuple[tuple[int, int, int], int, int, bool], LaunchConfig] = {}
        self._streams: dict[int, Stream] = {}
        self._static_shared_bytes = entries[entry].static_shared_bytes
        self._allowed_shared_bytes = _FREE_SHARED_BYTES - self._static_shared_bytes  # dynamic ones
        with torch.cuda.device(device_index):
            try:
                Device(device_index).set_current()
                self._code = ObjectCode.from_cubin(cubin)  # kept: the kernel lives as long as its library
                self._kernel = self._code.get_kernel(entry)
            except CUDAError as error:
                raise KernelError(
                    f"GPU {device_index} does not load the kernel {entry!r}: {error}",
                    hint="NVRTC must be of a CUDA major version that the driver supports: nvidia-smi names it",
                ) from error
            # The driver would otherwise load the code at the first launch, which fails inside a capture.
            self._ask("load", driver.cuKernelGetFunction(self._kernel.handle))
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
            answer = driver.cuKernelGetAttribute(most, self._kernel.handle, device_index)
            self.max_threads: int = self._ask("be asked about", answer)

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared_bytes: int, *args: int | float, follows: bool = False
    ) -> None:
        """Runs ``grid`` blocks of ``threads`` threads with ``shared_bytes`` of dynamic shared memory on torch's current
        stream of the kernel's device. An int (such as a tensor's ``data_ptr()``) becomes a 64-bit parameter, a float a
        32-bit one; what the pointers point to must stay alive until the stream has come past the launch. ``follows``:
        the kernel may start before the one before it has ended, and waits by itself (csrc/follow.cuh). KernelError when
        the device has less shared memory; TypeError for an argument of another type."""
        if torch.cuda.current_device() != self.device_index:
            with torch.cuda.device(self.device_index):
                self.launch(grid, threads, shared_bytes, *args, follows=follows)
            return
        config = self._configs.get((grid, threads, shared_bytes, follows))
        if config is None:
            if len(self._configs) == _CONFIGS:  # grids that follow prompts' lengths come and go
                self._configs.clear()
            self._allow(shared_bytes)
            can_overlap = follows and torch.cuda.get_device_capability(self.device_index) >= (9, 0)
            config = self._config(
                grid=grid, block=threads, shmem_size=shared_bytes, programmatic_stream_serialization=can_overlap
            )
            self._configs[grid, threads, shared_bytes, follows] = config
        handle = torch.cuda.current_stream().cuda_stream or _LEGACY_STREAM
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self._stream(handle)
        self._launch(stream, config, self._kernel, *map(_parameter, args))

    def _allow(self, shared_bytes: int) -> None:
        """Lets the kernel be launched with this much dynamic shared memory."""
        if shared_bytes <= self._allowed_shared_bytes:
            return
        properties: Any = torch.cuda.get_device_properties(self.device_index)  # torch's stubs lack the field
        largest = properties.shared_memory_per_block_optin - self._static_shared_bytes
        if shared_bytes > largest:
            raise KernelError(
                f"the kernel {self.entry!r} was to get {shared_bytes} bytes of shared memory a block beside its own "
                f"{self._static_shared_bytes}; allowed on GPU {self.device_index}: up to {largest}"
            )
        dynamic = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        answer = self._driver.cuKernelSetAttribute(dynamic, shared_bytes, self._kernel.handle, self.device_index)
        self._ask(f"get {shared_bytes} bytes of shared memory", answer)
        self._allowed_shared_bytes = shared_bytes

    def _ask(self, what: str, answer: tuple[Any, ...]) -> Any:
        """The value in the driver's answer (status, value), or None of one without a value."""
        status, *values = answer
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"the kernel {self.entry!r} cannot {what} on GPU {self.device_index}: {status.name}")
        return values[0] if values else None


def _parameter(arg: int | float) -> int | ctypes.c_float:
    """An argument as cuda.core takes it: a plain int is 64 bits wide (a bool or numpy's would not be)."""
    return ctypes.c_float(arg) if isinstance(arg, float) else operator.index(arg)


@dataclass(frozen=True)
class Resources:
    """One entry: ``registers`` a thread, ``local_bytes`` of stack and spills a thread, ``static_shared_bytes`` a block
    (the declared ones), and ``instructions``, the padding after the last one included (less than 16)."""

    registers: int
    local_bytes: int
    static_shared_bytes: int
    instructions: int


@dataclass(frozen=True)
class _Section:
    content: bytes
    size: int  # a section of shared memory has a size and no content
    link: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """Every entry of a cubin by its name. KernelError for bytes that are no cubin."""
    if cubin[:4] != b"\x7fELF":
        raise KernelError(
            f"not a cubin: {len(cubin)} bytes that begin with {cubin[:4]!r}; allowed: an ELF file as NVRTC writes it"
        )
    sections = _sections(cubin)
    symbols = _symbols(sections)
    values: dict[int, dict[int, int]] = {_REGISTERS: {}, _STACK: {}}
    for kind, content in _attributes(sections[".nv.info"].content):
        if kind in values:
            symbol, value = struct.unpack("<II", content)
            values[kind][symbol] = value
    reserved = _SYSTEM_SHARED_BYTES if _SYSTEM_SHARED in sections else 0
    found = {}
    for index, (name, is_entry) in enumerate(symbols):
        if is_entry:
            shared = sections.get(f".nv.shared.{name}")
            found[name] = Resources(
                registers=values[_REGISTERS][index],
                local_bytes=values[_STACK].get(index, 0),
                static_shared_bytes=shared.size - reserved if shared else 0,
                instructions=sections[f".text.{name}"].size // INSTRUCTION_BYTES,
            )
    return found


def _sections(cubin: bytes) -> dict[str, _Section]:
    """The sections by name, in their order: the symbol table names its strings by a section's number."""
    header = _ELF_HEADER.unpack_from(cubin)
    table, entry_bytes, count, names = header[6], header[11], header[12], header[13]
    headers = [_SECTION.unpack_from(cubin, table + i * entry_bytes) for i in range(count)]
    return {
        _string(cubin, headers[names][4] + name): _Section(cubin[offset : offset + size], size, link)
        for name, _, _, _, offset, size, link, _, _, _ in headers
    }


def _symbols(sections: dict[str, _Section]) -> list[tuple[str, bool]]:
    """Every symbol's name and whether it is an entry, by index."""
    table = sections[".symtab"]
    strings = list(sections.values())[table.link].content
    return [
        (_string(strings, name), bool(other & _ENTRY_FLAG) and info & 0xF == 2)  # 2: a function
        for name, info, other, _, _, _ in _SYMBOL.iter_unpack(table.content)
    ]


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, content) of each attribute of a ``.nv.info`` section."""
    position = 0
    while position < len(content):
        form, kind, size = struct.unpack_from("<BBH", content, position)
        position += 4
        if form == _SIZED:
            yield kind, content[position : position + size]
            position += size


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()
