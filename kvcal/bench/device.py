"""The machine that measures: its read bandwidth, and the time of work on its GPU.

Work is timed as replays of a CUDA graph that holds one call for each of several caches. One call on one small cache
would find it in L2, and on its own would be measured together with the launch from Python. A graph over caches whose
bytes exceed the L2 cache several times over has neither: its time divided by the number of calls is what a call costs
in the middle of a model's step, launch gaps of the device included. Baselines are timed by the same function.
"""

from __future__ import annotations

import gc
import importlib.metadata
import math
import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import transformers
from pydantic.dataclasses import dataclass

from kvcal.errors import KernelError, KvcalError
from kvcal.kernels.compile import nvrtc_version
from kvcal.strict import STRICT

REPLAYS, QUICK_REPLAYS = 30, 20
# Enough for the clocks to rise and for every lazy initialisation.
WARM_UP_CALLS, WARM_UP_REPLAYS = 3, 5
# The working set: at least this many L2 caches, at most this share of the device's memory.
L2_FACTOR, MEMORY_SHARE = 4, 0.25
CACHES = 32
# For the read bandwidth: some dozens of times any L2 cache, and 1 ms at the speed of the fastest memory.
CEILING_BYTES, CEILING_ROW = 4 << 30, 8192
UNKNOWN = "unknown"
OUT_OF_MEMORY = "out of memory"

Call = Callable[[], object]
Result = TypeVar("Result")


@dataclass(frozen=True, config=STRICT)
class Machine:
    """Bytes of the device's memory and of its L2 cache; versions of the driver (as nvidia-smi has it, or "unknown"), of
    libraries, and of the compiler of kvcal's kernels."""

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


@dataclass(frozen=True, config=STRICT)
class Times:
    """Microseconds of one call, over ``replays`` replays of a graph of ``calls`` calls: the median, and between which
    bounds the middle half of the replays lies."""

    median_us: float
    low_us: float
    high_us: float
    replays: int
    calls: int

    def __str__(self) -> str:
        """``14.9 (14.7 to 15.2)``."""
        median, low, high = (f"{float(f'{us:.4g}'):.10g}" for us in (self.median_us, self.low_us, self.high_us))
        return f"{median} ({low} to {high})"


def require_gpu(what: str) -> torch.device:
    """The current CUDA device. KernelError if there is none."""
    if not torch.cuda.is_available():
        raise KernelError(
            f"kvcal bench {what} needs a CUDA device, and torch {torch.__version__} sees none",
            hint="run it on a machine with an NVIDIA GPU and a CUDA build of torch",
        )
    return torch.device("cuda", torch.cuda.current_device())


def machine_of(device: torch.device) -> Machine:
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        device=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
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


def measure_read_ceiling(device: torch.device) -> ReadCeiling:
    """Read random numbers in three ways. They are fp32: torch adds half numbers in fp32 as well, and the additions of
    2-byte values could be what is measured."""
    values = torch.randn(CEILING_BYTES // 4 // CEILING_ROW, CEILING_ROW, device=device)
    target = torch.empty_like(values)

    def gb_per_s(call: Call, nbytes: int) -> float:
        return nbytes / graph_times([call]).median_us * 1e-3

    return ReadCeiling(
        sum=gb_per_s(values.sum, values.nbytes),
        row_sum=gb_per_s(lambda: values.sum(-1), values.nbytes),
        copy=gb_per_s(lambda: target.copy_(values), 2 * values.nbytes),
    )


def num_caches(nbytes: int, machine: Machine, is_quick: bool = False) -> int:
    """Number of caches of ``nbytes`` to rotate through: CACHES of them (in quick runs none for their own sake), more
    where those would nearly fit into L2, fewer where memory ends."""
    enough = math.ceil(L2_FACTOR * machine.l2_bytes / nbytes)
    wanted = enough if is_quick else max(CACHES, enough)
    return max(1, min(wanted, int(MEMORY_SHARE * machine.memory_bytes) // nbytes))


def graph_times(calls: Sequence[Call], replays: int = REPLAYS) -> Times:
    """Capture all ``calls`` in one graph and time its replays. What they return is thrown away.

    Raises whatever a call raises; such a call ran before the capture began, so that the device stays usable.
    """

    def warm_up() -> None:
        for call in (*[calls[0]] * WARM_UP_CALLS, *calls[1:]):
            call()

    def run() -> None:
        for call in calls:
            call()

    graph = captured(warm_up, run)
    try:
        event_ms([graph.replay] * WARM_UP_REPLAYS)
        milliseconds = event_ms([graph.replay] * replays)
    finally:
        graph.reset()
    return spread([1000 * total / len(calls) for total in milliseconds], len(calls))


def captured(warm_up: Call, run: Call) -> torch.cuda.CUDAGraph:
    """The graph of ``run``, after ``warm_up`` on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def event_ms(calls: Sequence[Call]) -> list[float]:
    """Milliseconds of each call, in order, by CUDA events; the host waits once, at the end."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in zip(marks, marks[1:], strict=False)]


def spread(microseconds: Sequence[float], calls: int) -> Times:
    """Median and quartiles of two measurements or more."""
    low, median, high = statistics.quantiles(microseconds, n=4, method="inclusive")
    return Times(median, low, high, len(microseconds), calls)


def context_bytes(device: torch.device) -> int:
    """Bytes that the device's memory holds beside torch's allocator."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def ran_out(failed: BaseException | None) -> bool:
    """Whether memory ran out; within a capture that is the cause of another error."""
    if failed is None or isinstance(failed, torch.OutOfMemoryError):
        return failed is not None
    return ran_out(failed.__cause__ or failed.__context__)


def attempted(measure: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """A measurement, or the reason why there is none: not compiled, not for this GPU, or OUT_OF_MEMORY. Those that
    follow go on."""
    try:
        return measure(), None
    except KvcalError as refused:
        return None, refused.message
    except RuntimeError as failed:
        if not ran_out(failed):
            raise
        return None, OUT_OF_MEMORY


def collect() -> None:
    """Give back what the last measurement held."""
    gc.collect()
    torch.cuda.empty_cache()
