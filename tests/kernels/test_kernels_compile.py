"""Compiling a kernel: every architecture without a GPU, the resources it asks for, the cache on disk, and
errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cubin_resources import resources

from kvcal.errors import KernelError
from kvcal.kernels import compile as compiling
from kvcal.kernels.compile import cubin, cubin_of_text, kernel

# `plain` keeps all in registers; `arrays` indexes 64 local floats by a value that no compiler can know.
SOURCE = """
extern "C" __global__ void plain(float* x, long long n, float by) {
  if (threadIdx.x < n) x[threadIdx.x] *= by + ADD;
}
extern "C" __global__ void arrays(float* x, long long n) {
  __shared__ float block[256];
  float own[64];
  #pragma unroll 1
  for (int i = 0; i < 64; ++i) own[i] = x[i * n];
  block[threadIdx.x] = own[n & 63];
  __syncthreads();
  float sum = 0;
  #pragma unroll 1
  for (int i = 0; i < 64; ++i) sum += own[(i * n) & 63] * block[i];
  x[threadIdx.x] = sum;
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvcal" / "kernels"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sources that NVRTC was really given."""
    names = []
    compile_ = compiling._compile

    def count(text: str, name: str, macros: list[tuple[str, str]], arch: str) -> bytes:
        names.append(name)
        return compile_(text, name, macros, arch)

    monkeypatch.setattr(compiling, "_compile", count)
    return names


def test_a_cubin_says_what_it_asks_for(cache: Path) -> None:
    found = resources(cubin_of_text(SOURCE, "tiny.cu", {"ADD": 1}, "sm_90"))
    assert set(found) == {"plain", "arrays"}
    plain, arrays = found["plain"], found["arrays"]
    assert (plain.local_bytes, plain.static_shared_bytes) == (0, 0)
    assert (arrays.local_bytes, arrays.static_shared_bytes) == (64 * 4, 256 * 4)
    assert 4 <= plain.registers <= 16 and plain.registers <= arrays.registers <= 40
    assert 8 <= plain.instructions < arrays.instructions < 200


def test_a_macro_reaches_the_code_negative_or_not(cache: Path) -> None:
    text = 'extern "C" __global__ void k(long long* x) { x[0] = 7 -N; }'  # 7 --1 would not parse
    code = {n: cubin_of_text(text, "k.cu", {"N": n}, "sm_90") for n in (-1, 1, 2)}
    assert len(set(code.values())) == 3
    assert all(resources(one).keys() == {"k"} for one in code.values())


def test_the_cache_spares_the_compiler_until_something_changes(cache: Path, compiled: list[str]) -> None:
    first = cubin_of_text(SOURCE, "tiny.cu", {"ADD": 1, "UNUSED": 2}, "sm_90")
    assert cubin_of_text(SOURCE, "tiny.cu", {"UNUSED": 2, "ADD": 1}, "sm_90") == first
    assert compiled == ["tiny.cu"] and len(list(cache.iterdir())) == 1
    for text, macros, arch in (
        (SOURCE + "\n", {"ADD": 1, "UNUSED": 2}, "sm_90"),
        (SOURCE, {"ADD": 1, "UNUSED": 3}, "sm_90"),
        (SOURCE, {"ADD": 1, "UNUSED": 2}, "sm_80"),
    ):
        compiled.clear()
        cubin_of_text(text, "tiny.cu", macros, arch)
        assert compiled == ["tiny.cu"]
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", ["flipped", "empty", "another's"])
def test_a_damaged_file_is_made_again(cache: Path, compiled: list[str], damage: str) -> None:
    good = cubin_of_text(SOURCE, "tiny.cu", {"ADD": 1}, "sm_90")
    (path,) = cache.iterdir()
    data = path.read_bytes()
    cubin_of_text(SOURCE, "tiny.cu", {"ADD": 2}, "sm_90")
    (other,) = set(cache.iterdir()) - {path}
    bad = {"flipped": data[:-1] + bytes([data[-1] ^ 1]), "empty": b"", "another's": other.read_bytes()}
    path.write_bytes(bad[damage])
    compiled.clear()
    assert cubin_of_text(SOURCE, "tiny.cu", {"ADD": 1}, "sm_90") == good
    assert compiled == ["tiny.cu"] and path.read_bytes() == data


def test_a_source_that_does_not_compile(cache: Path) -> None:
    with pytest.raises(KernelError) as caught:
        cubin_of_text(SOURCE, "tiny.cu", {"OTHER": 5, "SIGN": -1}, "sm_89")
    assert caught.value.exit_code == 6
    for part in ("tiny.cu does not compile for sm_89", "OTHER=5 SIGN=(-1)", "tiny.cu(3)", 'identifier "ADD"'):
        assert part in caught.value.message
    assert list(cache.parent.glob("**/*.cubin")) == []


def test_unknown_names(cache: Path) -> None:
    for name in ("no_such", "common", "../csrc/decode"):
        with pytest.raises(KernelError, match=rf"unknown kernel source '{name}'; allowed: .*decode") as caught:
            cubin(name, {})
        assert "common," not in caught.value.message
    for arch in ("sm_75", "compute_90", "90"):
        with pytest.raises(KernelError, match=rf"cannot compile decode\.cu for '{arch}'; allowed: sm_80 or newer"):
            cubin("decode", {}, arch)
    with pytest.raises(KernelError, match=r"for sm_999 with(.|\n)*gpu-architecture") as caught:
        cubin_of_text(SOURCE, "tiny.cu", {"ADD": 1}, "sm_999")
    assert caught.value.hint is not None and "pip install -U nvidia-cuda-nvrtc" in caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so() -> None:
    with pytest.raises(KernelError, match="need an NVIDIA GPU, and torch") as caught:
        kernel("decode", "decode", {})
    assert caught.value.hint is not None and "through torch" in caught.value.hint


def test_an_old_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    says = r"GPU 3 \(Tesla T4\) has compute capability 7\.5; .* 8\.0 or newer"
    with pytest.raises(KernelError, match=says) as caught:
        kernel("decode", "decode", {}, 3)
    assert caught.value.hint is not None and "through torch" in caught.value.hint


def test_without_cuda_core_kvcal_imports_and_a_kernel_says_what_to_install() -> None:
    code = """
import sys
sys.modules["cuda"] = None  # importing it raises ImportError
import kvcal, kvcal.kernels.compile
try:
    kvcal.kernels.compile.cubin_of_text("", "k.cu", {}, "sm_90")
except kvcal.errors.KernelError as error:
    print(error, "hint:", error.hint)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(compiling.__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "need cuda-core, which cannot be imported" in run.stdout and "pip install 'kvcal[cuda]'" in run.stdout


def test_a_cuda_core_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    monkeypatch.setattr(cuda.core, "__version__", "1.1.1")
    with pytest.raises(KernelError, match="cuda-core 1.1.1; expected 1.2 or newer") as caught:
        compiling.nvrtc_version.__wrapped__()
    assert caught.value.hint == "pip install 'kvcal[cuda]'"
