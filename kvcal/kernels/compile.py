"""From a kernel's source and its macros to a cubin, and to a kernel on a GPU.

The sources are CUDA C++ without any header, so that NVRTC, a library of 58 MB that pip installs, is all it takes: no
CUDA toolkit, and no GPU until something is to be run. A plan's formats are compiled in as macros
(``kvcal.kernels.variants``), since offsets and widths that the compiler knows cost the inner loops no instruction.
A variant therefore is compiled when it is first needed, and kept in ``kernels`` of the user's cache folder. The file's
name is the sha256 of all that the result depends on (text, macros, architecture, NVRTC's version), and its first 32
bytes are the sha256 over that name and the rest. A file that does not agree is made again, without a word: nothing is
lost but a second or two.

Nothing here is imported with kvcal: cuda.core is an extra, and asked for by the first call. Left out: evicting old
files (tens of KB each), and PTX for GPUs that are newer than NVRTC.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from kvcal.artifact import cache_folder, keep, sha256_json
from kvcal.errors import KernelError
from kvcal.kernels.launch import Kernel
from kvcal.lazy_torch import torch

__all__ = ["Kernel", "cubin", "kernel"]

OLDEST = 80  # compute capability 8.0: mma.sync for bf16 and cp.async
_FORMAT = 1  # of a cached file; part of its name
_INSTALL = "pip install 'kvcal[cuda]'"
_CUDA_CORE = (1, 2)  # launches that overlap


def kernel(source: str, entry: str, defines: Mapping[str, int], device_index: int = 0) -> Kernel:
    """The entry of ``csrc/<source>.cu`` with these macros, on a GPU: compiled for it or read from the cache, and there.

    Memoised, but keep the result: a call sorts the macros. The first call of a variant must not be inside a stream's
    capture. KernelError without a GPU or for one below 8.0, inside a capture, and as in ``cubin`` and ``Kernel``.
    """
    return _kernel(source, entry, tuple(sorted(defines.items())), device_index)


def cubin(source: str, defines: Mapping[str, int], arch: str = "sm_90") -> bytes:
    """``csrc/<source>.cu`` compiled with these macros for ``arch`` ("sm_80" or newer), or from the cache.
    Needs no GPU. KernelError without cuda-core or NVRTC, for an unknown source or architecture, and, with NVRTC's log,
    for a source that does not compile."""
    folder = files("kvcal.kernels") / "csrc"
    sources = sorted(file.name.removesuffix(".cu") for file in folder.iterdir() if file.name.endswith(".cu"))
    if source not in sources:
        raise KernelError(f"unknown kernel source {source!r}; allowed: {', '.join(sources)}")
    return cubin_of_text(_with_parts(f"{source}.cu", set()), f"{source}.cu", defines, arch)


def _with_parts(name: str, seen: set[str]) -> str:
    """The text of a file of csrc, every ``#include "part.cuh"`` line replaced by that part, where it is not yet. With
    #line, messages name the file and line that one has to open."""
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((files("kvcal.kernels") / "csrc" / name).read_text("utf-8").splitlines(), start=1):
        part = re.fullmatch(r'#include "(\w+\.cuh)"', line)
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
    """Such as "13.0". KernelError where cuda-core, its bindings or NVRTC are not installed, or cuda-core is too old."""
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
    if not torch.cuda.is_available():
        raise KernelError(
            "the CUDA kernels need a GPU, and torch sees none",
            hint="attention on this machine runs through torch: make the cache without max_tokens",
        )
    if torch.version.hip is not None:
        raise KernelError(
            f"the CUDA kernels need an NVIDIA GPU, and torch was built for ROCm {torch.version.hip}",
            hint="attention on this GPU runs through torch: make the cache without max_tokens",
        )
    major, minor = torch.cuda.get_device_capability(device_index)
    if 10 * major + minor < OLDEST:
        raise KernelError(
            f"GPU {device_index} ({torch.cuda.get_device_name(device_index)}) has compute capability {major}.{minor}; "
            f"allowed for the CUDA kernels: {OLDEST // 10}.{OLDEST % 10} or newer",
            hint="attention on this GPU runs through torch: make the cache without max_tokens",
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
