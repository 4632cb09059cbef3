"""Launching a kernel: its arguments, its stream, its shared memory, and that a CUDA graph can hold it."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcal.errors import KernelError
from kvcal.kernels.compile import Kernel, _parameter, cubin_of_text, kernel

PLAIN = """
extern "C" __global__ void plain(float* x, long long n, float by) {
  if (threadIdx.x < n) x[threadIdx.x] *= by + ADD;
}
"""
# Its own bytes of shared memory and those that a launch adds are all used: x gets the sum of both.
STATIC = """
extern "C" __global__ void fill(int* x, long long words) {
  __shared__ int own[OWN];
  extern __shared__ int given[];
  for (int i = threadIdx.x; i < OWN; i += blockDim.x) own[i] = 1;
  for (int i = threadIdx.x; i < words; i += blockDim.x) given[i] = 2;
  __syncthreads();
  if (threadIdx.x) return;
  int sum = 0;
  for (int i = 0; i < OWN; ++i) sum += own[i];
  for (int i = 0; i < words; ++i) sum += given[i];
  x[0] = sum;
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_arguments_are_64_bit_ints_and_32_bit_floats() -> None:
    assert _parameter(2**40) == 2**40
    assert type(_parameter(True)) is int and type(_parameter(np.int32(3))) is int
    number = _parameter(0.1)
    assert isinstance(number, ctypes.c_float) and number.value == torch.tensor(0.1).item()
    for wrong in (np.float32(0.1), "1", None, torch.tensor(0.5)):
        with pytest.raises(TypeError):
            _parameter(wrong)


def on_gpu(text: str, entry: str, macros: dict[str, int]) -> Kernel:
    major, minor = torch.cuda.get_device_capability()
    return Kernel(cubin_of_text(text, "tiny.cu", macros, f"sm_{major}{minor}"), entry, torch.cuda.current_device())


@pytest.mark.gpu
def test_a_launch_runs_on_the_current_stream_and_in_a_graph(cache: None) -> None:
    plain = on_gpu(PLAIN, "plain", {"ADD": 1})
    assert 4 <= plain.registers <= 16
    x = torch.ones(64, device="cuda")
    plain.launch((1, 1, 1), 64, 0, x.data_ptr(), 60, 1.5)
    assert x.tolist() == [2.5] * 60 + [1.0] * 4
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        x.fill_(2)  # after the sleep: a launch on another stream would come before it
        plain.launch((1, 1, 1), 64, 0, x.data_ptr(), 60, 1.5)
        assert x.tolist() == [5.0] * 60 + [2.0] * 4
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain.launch((1, 1, 1), 64, 0, x.data_ptr(), 64, 0.0)
        plain.launch((1, 1, 1), 64, 0, x.data_ptr(), 64, 1.0)
    x.fill_(3)
    for _ in range(2):
        graph.replay()
    assert x.tolist() == [12.0] * 64


@pytest.mark.gpu
@pytest.mark.parametrize("own", [256, 11 * 1024])
def test_all_that_a_kernels_own_shared_memory_leaves(cache: None, own: int) -> None:
    """To the last word, as free for all and as the device allows; a word more is refused."""
    fill, x = on_gpu(STATIC, "fill", {"OWN": own}), torch.zeros(1, dtype=torch.int32, device="cuda")
    most = torch.cuda.get_device_properties(fill.device_index).shared_memory_per_block_optin
    for words in (48 * 256 - own, most // 4 - own):
        fill.launch((1, 1, 1), 256, 4 * words, x.data_ptr(), words)
        assert x.item() == own + 2 * words
    with pytest.raises(KernelError, match=f"next to its own {4 * own}; allowed on GPU .*: up to {most - 4 * own}"):
        fill.launch((1, 1, 1), 256, most - 4 * own + 4, x.data_ptr(), words)


@pytest.mark.gpu
def test_a_first_use_inside_a_capture_is_refused() -> None:
    x = torch.ones(1, device="cuda")
    with pytest.raises(KernelError, match="inside a CUDA graph's capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)  # torch warns of an empty graph
        kernel("decode", "decode", {"NEVER_COMPILED": 1})
