"""From a kernel's source and its macros to a cubin, and to a kernel on a GPU, launched with little work for
the host.

The sources are CUDA C++ without any header, so that NVRTC, a library of 58 MB that pip installs, is all it
takes: no CUDA toolkit, and no GPU until something is to be run. A plan's formats are compiled in as macros
(``kvcal.kernels.variants``), since offsets and widths that the compiler knows cost the inner loops no
instruction. A variant therefore is compiled when it is first needed, and kept in ``kernels`` of the user's
cache folder. The file's name is the sha256 of all that the result depends on (text, macros, architecture,
NVRTC's version), and its first 32 bytes are the sha256 over that name and the rest. A file that does not
agree is made again, without a word: nothing is lost but a second or two.

Nothing here is imported with kvcal: cuda.core is an extra, and asked for by the first call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import operator
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvcal.artifact import cache_folder, keep, sha256_json
from kvcal.errors import KernelError
from kvcal.lazy_torch import torch

OLDEST = 80  # compute capability 8.0: mma.sync for bf16 and cp.async
_FORMAT = 1  # of a cached file; part of its name
_INSTALL = "pip install 'kvcal[cuda]'"
_CUDA_CORE = (1, 2)  # launches that overlap
_FREE_SHARED_BYTES = 48 * 1024  # static and dynamic together; a kernel must ask for what lies above
_CONFIGS = 64  # launch configurations that are kept
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY: torch's default stream, whose handle is 0


def kernel(source: str, entry: str, defines: Mapping[str, int], device_index: int = 0) -> Kernel:
    """The entry of ``csrc/<source>.cu`` with these macros, on a GPU: compiled for it or read from the cache,
    and there.

    Memoised, but keep the result: a call sorts the macros. The first call of a variant must not be inside a
    stream's capture. KernelError without a GPU or for one below 8.0, inside a capture, and as in ``cubin``
    and ``Kernel``.
    """
    return _kernel(source, entry, tuple(sorted(defines.items())), device_index)


def cubin(source: str, defines: Mapping[str, int], arch: str = "sm_90") -> bytes:
    """``csrc/<source>.cu`` compiled with these macros for ``arch`` ("sm_80" or newer), or from the cache.
    Needs no GPU. KernelError without cuda-core or NVRTC, for an unknown source or architecture, and, with
    NVRTC's log, for a source that does not compile."""
    folder = files("kvcal.kernels") / "csrc"
    sources = sorted(file.name.removesuffix(".cu") for file in folder.iterdir() if file.name.endswith(".cu"))
    if source not in sources:
        raise KernelError(f"unknown kernel source {source!r}; allowed: {', '.join(sources)}")
    return cubin_of_text(_with_parts(f"{source}.cu", set()), f"{source}.cu", defines, arch)


def _with_parts(name: str, seen: set[str]) -> str:
    """The text of a file of csrc, every ``#include "part.cuh"`` line replaced by that part, where it is not
    yet. With #line, messages name the file and line that one has to open."""
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((files("kvcal.kernels") / "csrc" / name).read_text("utf-8").splitlines(), start=1):
        part = re.fullmatch(r'#include "([\w/]+\.cuh)"', line)
        if part is None:
            lines.append(line)
        else:
            lines += [] if part[1] in seen else [_with_parts(part[1], seen)]
            lines.append(f'#line {number + 1} "{name}"')
    return "\n".join(lines)


def cubin_of_text(text: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
    """``cubin`` for a source given as text; messages call it ``name``."""
    number = re.fullmatch(r"sm_(\d+)", arch)
    if number is None or int(number[1]) < OLDEST:
        raise KernelError(f"cannot compile {name} for {arch!r}; allowed: sm_{OLDEST} or newer, such as sm_90")
    macros = [(key, f"({value})" if value < 0 else f"{value:d}") for key, value in sorted(defines.items())]
    path = cache_folder() / "kernels" / f"{sha256_json([_FORMAT, text, name, macros, arch, nvrtc_version()])}.cubin"
    code = _read(path)
    if code is None:
        code = _compile(text, name, macros, arch)
        keep(path, _digest(path, code) + code, "compiled kernels")
    return code


@functools.cache
def nvrtc_version() -> str:
    """Such as "13.0". KernelError where cuda-core, its bindings or NVRTC are not installed, or cuda-core is
    too old."""
    try:
        import cuda.core  # what all later imports of it rest on
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise KernelError(f"the CUDA kernels need cuda-core, which cannot be imported: {error}", _INSTALL) from error
    if tuple(map(int, cuda.core.__version__.split(".")[:2])) < _CUDA_CORE:
        oldest = ".".join(map(str, _CUDA_CORE))
        raise KernelError(f"cuda-core {cuda.core.__version__}; expected {oldest} or newer", _INSTALL)
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # of cuda.pathfinder: no such library
        raise KernelError(f"the CUDA kernels need NVRTC, which cannot be loaded: {error}", _INSTALL) from error
    return f"{major}.{minor}"


@functools.cache
def _kernel(source: str, entry: str, defines: tuple[tuple[str, int], ...], device_index: int) -> Kernel:
    through_torch = "attention here runs through torch: make the cache without max_tokens"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise KernelError(
            f"the CUDA kernels need an NVIDIA GPU, and torch {torch.__version__} sees none", through_torch
        )
    major, minor = torch.cuda.get_device_capability(device_index)
    if 10 * major + minor < OLDEST:
        raise KernelError(
            f"GPU {device_index} ({torch.cuda.get_device_name(device_index)}) has compute capability {major}.{minor}; "
            f"allowed for the CUDA kernels: {OLDEST // 10}.{OLDEST % 10} or newer",
            through_torch,
        )
    if torch.cuda.is_current_stream_capturing():
        raise KernelError(
            f"the kernel {entry!r} of {source}.cu was first asked for inside a CUDA graph's capture",
            hint="run one step before capturing it",
        )
    return Kernel(cubin(source, dict(defines), f"sm_{major}{minor}"), entry, device_index)


def _compile(text: str, name: str, macros: list[tuple[str, str]], arch: str) -> bytes:
    """NVRTC's answer; ``nvrtc_version`` has shown that it is there."""
    from cuda.core import Program, ProgramOptions
    from cuda.core._utils.cuda_utils import CUDAError  # has no public name

    options = ProgramOptions(name=name, arch=arch, define_macro=macros or None)
    try:
        return bytes(Program(text, "c++", options).compile("cubin").code)
    except CUDAError as error:
        defines = " ".join(f"{key}={value}" for key, value in macros) or "none"
        raise KernelError(
            f"{name} does not compile for {arch} with the macros {defines}: {str(error).strip()}",
            hint=f"for a GPU newer than NVRTC {nvrtc_version()}: pip install -U nvidia-cuda-nvrtc",
        ) from error


def _read(path: Path) -> bytes | None:
    """The cubin in the file, or None when there is none or it is not what was written."""
    try:
        data = path.read_bytes() if path.is_file() else b""  # a pipe would be waited for
    except OSError:  # a folder that cannot be used at all is told when it comes to writing
        return None
    code = data[hashlib.sha256().digest_size :]
    return code if data == _digest(path, code) + code else None


def _digest(path: Path, code: bytes) -> bytes:
    """Covers the name, so that one variant's file is never taken for another's."""
    return hashlib.sha256(path.name.encode() + code).digest()


class Kernel:
    """One entry of a cubin, loaded on the GPU ``device_index``; made by :func:`kernel`. ``registers`` are
    those of one thread.

    A decode step launches a few kernels for each of some tens of layers. So all that does not change from
    step to step is made once: configurations, streams, and the permission for more than 48 KiB of shared
    memory. A launch allocates nothing on the device and waits for nothing: it may be captured. Loading may
    not, so the code is on the device when the constructor returns. Attributes, which cuda.core spells
    differently from version to version, are asked of the driver itself."""

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
        """Runs ``grid`` blocks of ``threads`` threads with ``shared_bytes`` of dynamic shared memory on
        torch's current stream of the kernel's device. An int (such as a tensor's ``data_ptr()``) becomes a
        64-bit parameter, a float a 32-bit one; what the pointers point to must stay alive until the stream
        has come past the launch. ``follows``: the kernel may start before the one before it has ended, and
        waits by itself (csrc/follow.cuh). KernelError when the device has less shared memory; TypeError for
        an argument of another type."""
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
                f"the kernel {self.entry!r} was to get {shared_bytes} bytes of shared memory a block next to its own "
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
