"""A compiled kernel on one GPU, launched with little work for the host.

A decode step launches a few kernels for each of some tens of layers, so what a launch costs the host is paid a hundred
times a token wherever no CUDA graph replays the step. Hence everything that does not change from step to step is made
once: the launch configuration by its numbers, the stream's wrapper by its handle, and the permission for more than
48 KiB of shared memory, which the driver wants asked for. A launch itself allocates nothing on the device and waits for
nothing: it may be captured. Loading may not, so the code is on the device when the constructor returns.

cuda.core loads and launches. Attributes, which it spells differently from version to version, are asked of the driver
itself. Left out: clusters, cooperative launches, and keeping arguments alive (pointers are plain ints).
"""

from __future__ import annotations

import ctypes
import operator
from typing import Any

from kvcal.errors import KernelError
from kvcal.lazy_torch import torch

_FREE_SHARED_BYTES = 48 * 1024  # static and dynamic together; a kernel must ask for what lies above
_CONFIGS = 64  # launch configurations that are kept
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY: torch's default stream, whose handle is 0


class Kernel:
    """One entry of a cubin, loaded on the GPU ``device_index``; made by ``kvcal.kernels.compile.kernel``. ``registers``
    are those of one thread."""

    def __init__(self, cubin: bytes, entry: str, device_index: int) -> None:
        """KernelError when the cubin has no such entry, or when the driver refuses it."""
        from cuda.bindings import driver
        from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch
        from cuda.core._utils.cuda_utils import CUDAError  # has no public name

        self.entry = entry
        self.device_index = device_index
        self._driver: Any = driver
        self._launch, self._config, self._stream = launch, LaunchConfig, Stream.from_handle
        self._configs: dict[tuple[tuple[int, int, int], int, int, bool], LaunchConfig] = {}
        self._streams: dict[int, Stream] = {}
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
            attributes = driver.CUfunction_attribute
            self.registers = self._attribute(attributes.CU_FUNC_ATTRIBUTE_NUM_REGS)
            self._static_shared_bytes = self._attribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self._allowed_shared_bytes = _FREE_SHARED_BYTES - self._static_shared_bytes  # dynamic ones

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

    def _attribute(self, attribute: Any) -> int:
        answer = self._driver.cuKernelGetAttribute(attribute, self._kernel.handle, self.device_index)
        return int(self._ask(f"be asked for {attribute.name}", answer))

    def _ask(self, what: str, answer: tuple[Any, ...]) -> Any:
        """The value in the driver's answer (status, value), or None of one without a value."""
        status, *values = answer
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"the kernel {self.entry!r} cannot {what} on GPU {self.device_index}: {status.name}")
        return values[0] if values else None


def _parameter(arg: int | float) -> int | ctypes.c_float:
    """An argument as cuda.core takes it: a plain int is 64 bits wide (a bool or numpy's would not be)."""
    return ctypes.c_float(arg) if isinstance(arg, float) else operator.index(arg)
