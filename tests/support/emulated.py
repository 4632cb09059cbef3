"""``decode`` on a CPU: its source compiled by g++ against ``cuda_on_cpu.h``, in place of a kernel on a GPU.

So a machine without a GPU runs the kernel as it is launched: fragments, shuffles, limbs, the merge of the
parts. What stays untested is what fibers do not have: races, and the rounding of tensor cores within a
product.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal.kernels import compile as kernels
from kvcal.kernels import decode
from kvcal.kernels.operands import DTYPE_NAMES
from kvcal.kernels.variants import Defines, Variant

SUPPORT = Path(__file__).parent
CAPABILITY, NUM_BLOCKS = (9, 0), 5
# Inline PTX of the source, and what takes its place.
PRODUCT = "const u32 a[] = {%s}, b[] = {%s}, c_[] = {%s}; u32 d_[4]; cpu::multiply<%s>(d_, a, b, c_);"
FLOATS = "for (int i = 0; i < 4; i++) d[i] = cpu::float_of(d_[i]);"
BYTES = "for (int i = 0; i < 4; i++) d[i] = (int)d_[i];"
FOUR, SUMS = "a0, a1, a2, a3", "cpu::bits_of(d[0]), cpu::bits_of(d[1]), cpu::bits_of(d[2]), cpu::bits_of(d[3])"
INTEGERS = "(u32){0}[0], (u32){0}[1], (u32){0}[2], (u32){0}[3]"
INLINE = {
    r'asm\("cvt\.rn\.f16x2.*?\);': "d = cpu::halves(lo, hi);",
    r'asm\("cvt\.rn\.bf16x2.*?\);': "d = cpu::to_bf16(lo) | (u32)cpu::to_bf16(hi) << 16;",
    r'asm\("cvt\.f32\.f16.*?\);': "y = cpu::of_half(bits);",
    r'asm\("cvt\.rn\.f16\.f32.*?\);': "y = cpu::to_half(x);",
    r'asm\("cvt\.rn\.bf16\.f32.*?\);': "y = cpu::to_bf16(x);",
    r'asm\("ex2\..*?\);': "d = cpu::exp2_(x);",
    r'asm\("min\.NaN.*?\);': "y = a != a || b != b ? NAN : fminf(a, b);",
    r'asm\("max\.NaN.*?\);': "y = a != a || b != b ? NAN : fmaxf(a, b);",
    r'asm\("mul\.rn\.f16x2.*?\);': "d = cpu::multiply_halves(a, b);",
    r'asm volatile\("movmatrix.*?\);': "d = cpu::transpose(a);",
    r'asm volatile\("redux.*?\);': "d = cpu::largest_of_warp(x);",
    r"#define MMA_BYTES.*?#undef MMA_BYTES": PRODUCT
    % (FOUR, "b0, b1", INTEGERS.format("c"), "IS_SIGNED ? cpu::SIGNED_BYTES : cpu::UNSIGNED_BYTES, 32")
    + BYTES,
    r'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.s32.*?\);': PRODUCT
    % ("a0, a1", "b0", INTEGERS.format("d"), "cpu::SIGNED_BYTES, 16")
    + BYTES,
    r"#define MMA_HALVES.*?#undef MMA_HALVES": "if (from_zero) d[0] = d[1] = d[2] = d[3] = 0.f;"
    + PRODUCT % (FOUR, "b0, b1", SUMS, "cpu::HALVES, 16")
    + FLOATS,
    r'#if DTYPE == 1\n    asm\("mma.*?#endif\n.*?\);': PRODUCT
    % (FOUR, "b0, b1", SUMS, "DTYPE == 1 ? cpu::BF16 : cpu::HALVES, 16")
    + FLOATS,
    r'u64 policy;.*?"n"\(AT\)\);': "cpu::copy16(to + AT, from + AT);",
    r'asm volatile\("prefetch.*?\);': "",
    r'int before;\n    asm volatile\("atom.*?return before;': "return (*counter)++;",
    r'asm volatile\("cp\.async\.commit_group.*?\);': "cpu::commit();",
    r'asm volatile\("cp\.async\.wait_group.*?\);': "cpu::wait_all_but(N);",
    r'asm volatile\("griddepcontrol.*?\);': "",
    r"extern __shared__ unsigned char memory\[\];": "unsigned char* memory = cpu::shared;",
    r"#pragma unroll[^\n]*": "",
}


def _source(defines: Defines) -> tuple[str, list[Any]]:
    """The C++ of a variant, and the ctypes of the arguments of ``run``, of which the first is the grid."""
    text = kernels._with_parts("decode.cu", set())
    for pattern, instead in INLINE.items():
        text, count = re.subn(pattern, lambda _, instead=instead: instead, text, flags=re.S)
        assert count, f"the source has no {pattern!r} any more"
    assert not re.search(r"\basm\b *(volatile)? *\(", text), "inline PTX that has no counterpart here"
    entry = re.search(r'extern "C" __global__ void __launch_bounds__\(.*?\) decode\((.*?)\) \{\n', text, re.S)
    assert entry is not None
    drafts = ", i64 q_token" if defines.get("QUERY_TOKENS", 1) > 1 else ""
    listed = entry[1].replace("STAGE_PARAMETERS", "").replace("QUERY_PARAMETERS", drafts)
    parameters = [re.fullmatch(r"\s*(.*?)(\w+)\s*", part, re.S).groups() for part in listed.split(",")]  # type: ignore[union-attr]
    types = [ctypes.c_float if kind.strip() == "float" else ctypes.c_longlong for kind, _ in parameters]
    text = text.replace(entry[0], f"static void decode({listed}) {{\n")
    given = "\n".join(f"static {kind} given_{name};" for kind, name in parameters)
    text = f"""#include "cuda_on_cpu.h"
{text}
{given}
extern "C" int run(i64 num_blocks, {listed}) {{
    {" ".join(f"given_{name} = {name};" for _, name in parameters)}
    cpu::allocate(SHARED_BYTES);
    cpu::grid.x = (unsigned)num_blocks;
    for (cpu::block.x = 0; cpu::block.x < cpu::grid.x; cpu::block.x++)
        cpu::run_block(WARPS * 32, [] {{ decode({", ".join(f"given_{name}" for _, name in parameters)}); }});
    free(cpu::shared);
    return cpu::misaligned;
}}
"""
    return text, [ctypes.c_longlong, *types]


class EmulatedKernel:
    """In place of ``kvcal.kernels.compile.Kernel``: one variant, compiled in ``folder``."""

    def __init__(self, defines: Defines, folder: Path) -> None:
        text, types = _source(defines)
        name = f"decode{len(list(folder.glob('*.cpp')))}"
        (folder / f"{name}.cpp").write_text(text)
        macros = [f"-D{key}={value}{'LL' if abs(value) >= 2**31 else ''}" for key, value in defines.items()]
        # Unoptimised: it runs for less time than it takes to optimise.
        flags = ["-std=c++17", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w"]
        flags += ["-fsanitize=alignment"]
        for command in (
            ["g++", "-c", *flags, *macros, f"-I{SUPPORT}", f"{name}.cpp", "-o", f"{name}.o"],
            ["g++", "-shared", f"{name}.o", "-o", f"{name}.so"],
        ):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
        self._run = ctypes.CDLL(str(folder / f"{name}.so")).run
        self._run.argtypes = types

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared_bytes: int, *args: int | float, follows: bool
    ) -> None:
        misaligned = self._run(grid[0], *args)
        assert misaligned == 0, f"{misaligned} loads or stores of misaligned addresses"


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Lets ``launch_decode`` take tensors of the CPU. Skips without g++ or an x86-64 CPU with half
    precision."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if shutil.which("g++") is None or " f16c" not in flags:
        pytest.skip("needs g++ and an x86-64 CPU with F16C")

    def launch(variant: Variant, q_dtype: torch.dtype, softcap: bool, *_: object) -> decode.Launch:
        defines = decode.decode_defines(variant, DTYPE_NAMES[q_dtype], softcap, CAPABILITY)
        heads = decode.pass_heads(variant)
        return decode.Launch(
            EmulatedKernel(defines, folder), NUM_BLOCKS, defines["WARPS"] * 32, defines["SHARED_BYTES"],  # type: ignore[arg-type]
            -(-variant.group_queries // heads), heads * (variant.head_dim + 2),
        )  # fmt: skip

    def workspace_bytes(batch: int, num_kv_heads: int, group_heads: int, head_dim: int, device: torch.device) -> int:
        heads = batch * num_kv_heads
        parts = (heads * -(-group_heads // decode.TILE_HEADS) + NUM_BLOCKS) * 2 * decode.TILE_HEADS * (head_dim + 2)
        return decode._counter_bytes(heads, group_heads) + 4 * parts

    monkeypatch.setattr(decode, "_launch", launch)
    monkeypatch.setattr(decode, "workspace_bytes", workspace_bytes)
