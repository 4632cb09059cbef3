"""The machine that measures, and how fast it can read: the ceiling that every kernel is held against."""

from __future__ import annotations

import importlib.metadata
import math
import subprocess

import torch
import transformers
from pydantic.dataclasses import dataclass

from kvcal.bench.timing import graph_times
from kvcal.errors import KernelError
from kvcal.kernels.compile import nvrtc_version
from kvcal.strict import STRICT

# A few GB: some dozens of times any L2 cache, and 1 ms at the speed of the fastest memory.
CEILING_BYTES = 4 << 30
ROW = 8192
UNKNOWN = "unknown"


@dataclass(frozen=True, config=STRICT)
class Machine:
    """What was measured on. Bytes of the device's memory and of its L2 cache; versions of the driver (as nvidia-smi has
    it, or "unknown"), of libraries, and of the compiler of kvcal's kernels."""

    device: str
    compute_capability: str
    num_sms: int
    memory_bytes: int
    l2_bytes: int
    torch: str
    cuda: str
    transformers: str
    driver: str
    nvrtc: str
    kvcal: str


@dataclass(frozen=True, config=STRICT)
class ReadCeiling:
    """GB/s (10^9 bytes) by how it was read: ``sum`` and ``row_sum`` read 4 GiB, ``copy`` reads and writes them, both
    counted."""

    sum: float
    row_sum: float
    copy: float

    @property
    def gb_per_s(self) -> float:
        """The fastest of them: no share of it can look better than it is."""
        return max(self.sum, self.row_sum, self.copy)


def require_gpu(what: str) -> torch.device:
    """The current CUDA device.

    Raises:
        KernelError: there is none.
    """
    if not torch.cuda.is_available():
        raise KernelError(
            f"kvcal bench {what} needs a CUDA device, and torch {torch.__version__} sees none",
            hint="run it on a machine with an NVIDIA GPU and a CUDA build of torch",
        )
    return torch.device("cuda", torch.cuda.current_device())


def machine(device: torch.device) -> Machine:
    found = torch.cuda.get_device_properties(device)
    return Machine(
        device=found.name,
        compute_capability=f"{found.major}.{found.minor}",
        num_sms=found.multi_processor_count,
        memory_bytes=found.total_memory,
        l2_bytes=found.L2_cache_size,
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        transformers=transformers.__version__,
        driver=driver_version(),
        nvrtc=nvrtc_version(),
        kvcal=importlib.metadata.version("kvcal"),
    )


def driver_version() -> str:
    """Such as "580.65.06": one driver serves all GPUs of a machine."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return answer[0] if answer else UNKNOWN


def measure_read_ceiling(device: torch.device, nbytes: int = CEILING_BYTES) -> ReadCeiling:
    """Read ``nbytes`` of random numbers in three ways. They are fp32: torch adds half numbers in fp32 as well, and
    the additions of 2-byte values could be what is measured."""
    values = torch.randn(math.ceil(nbytes / 4 / ROW), ROW, device=device)
    target = torch.empty_like(values)
    read = values.numel() * values.element_size()
    seconds = {
        "sum": graph_times([lambda: values.sum()]).median_us * 1e-6,
        "row_sum": graph_times([lambda: values.sum(-1)]).median_us * 1e-6,
        "copy": graph_times([lambda: target.copy_(values)]).median_us * 1e-6,
    }
    return ReadCeiling(
        sum=read / seconds["sum"] * 1e-9,
        row_sum=read / seconds["row_sum"] * 1e-9,
        copy=2 * read / seconds["copy"] * 1e-9,
    )
