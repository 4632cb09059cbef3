"""Kernels on a CPU: their sources compiled by g++ against ``cuda_on_cpu.h``, in place of kernels on a GPU.

So a machine without a GPU runs a kernel as it is launched: fragments, shuffles, limbs, the merge of the
parts. What stays untested is what fibers do not have: races, and the rounding of tensor cores within a
product.
"""

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcal.kernels import compile as kernels
from kvcal.kernels import decode
from kvcal.kernels.choice import pass_heads
from kvcal.kernels.operands import DTYPE_NAMES
from kvcal.kernels.variants import Defines, Variant

SUPPORT = Path(__file__).parent
CAPABILITY, NUM_BLOCKS = (9, 0), 5
# Inline PTX of the sources, and what takes its place.
PRODUCT = "const u32 a_[] = {%s}, b_[] = {%s}, c_[] = {%s}; u32 d_[4]; cpu::multiply<%s>(d_, a_, b_, c_);"
FLOATS = "for (int i = 0; i < 4; i++) d[i] = cpu::float_of(d_[i]);"
BYTES = "for (int i = 0; i < 4; i++) d[i] = (int)d_[i];"
FOUR, SUMS = "a0, a1, a2, a3", "cpu::bits_of(d[0]), cpu::bits_of(d[1]), cpu::bits_of(d[2]), cpu::bits_of(d[3])"
ALL_FOUR = "a[0], a[1], a[2], a[3]"
INTEGERS = "(u32){0}[0], (u32){0}[1], (u32){0}[2], (u32){0}[3]"
KINDS = "IS_%s_SIGNED ? cpu::SIGNED_BYTES : cpu::UNSIGNED_BYTES"
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
    r"#define MMA_BYTES\(type\).*?#undef MMA_BYTES": PRODUCT
    % (FOUR, "b0, b1", INTEGERS.format("c"), f"cpu::UNSIGNED_BYTES, {KINDS.replace('_%s', '')}, 32")
    + BYTES,
    r"#define MMA_BYTES\(a_type, b_type\).*?#undef MMA_BYTES": PRODUCT
    % (ALL_FOUR, "b0, b1", INTEGERS.format("d"), f"{KINDS % 'A'}, {KINDS % 'B'}, 32")
    + BYTES,
    r'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.s32.*?\);': PRODUCT
    % ("a0, a1", "b0", INTEGERS.format("d"), "cpu::UNSIGNED_BYTES, cpu::SIGNED_BYTES, 16")
    + BYTES,
    r"#define MMA_HALVES.*?#undef MMA_HALVES": "if (from_zero) d[0] = d[1] = d[2] = d[3] = 0.f;"
    + PRODUCT % (FOUR, "b0, b1", SUMS, "cpu::HALVES, cpu::HALVES, 16")
    + FLOATS,
    r'#if DTYPE == 1\n    asm\("mma.*?#endif\n.*?\);': PRODUCT
    % (FOUR, "b0, b1", SUMS, ", ".join(["DTYPE == 1 ? cpu::BF16 : cpu::HALVES"] * 2) + ", 16")
    + FLOATS,
    r'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16.*?\);': PRODUCT
    % (ALL_FOUR, "b0, b1", SUMS, "cpu::HALVES, cpu::HALVES, 16")
    + FLOATS,
    r'u64 policy;.*?"n"\(AT\)\);': "cpu::copy16(to + AT, from + AT);",
    r'asm volatile\("prefetch.*?\);': "",
    r'int before;\n    asm volatile\("atom.*?return before;': "return (*counter)++;",
    r'asm volatile\("cp\.async\.commit_group.*?\);': "cpu::commit();",
    r'asm volatile\("cp\.async\.wait_group.*?\);': "cpu::wait_all_but(N);",
    r'asm volatile\("bar\.sync.*?\);': "cpu::barrier(id, count);",
    r'asm volatile\("griddepcontrol.*?\);': "",
    r"extern __shared__ unsigned char memory\[\];": "unsigned char* memory = cpu::shared;",
    r"#pragma unroll[^\n]*": "",
}


def translated(name: str) -> str:
    """The C++ of a file of csrc with its parts, for ``cuda_on_cpu.h``."""
    text = kernels._with_parts(name, set())
    for pattern, instead in INLINE.items():
        text = re.sub(pattern, lambda _, instead=instead: instead, text, flags=re.S)
    assert not re.search(r"\basm\b *(volatile)? *\(", text), "inline PTX that has no counterpart here"
    return text


def compiled(text: str, name: str, defines: Defines, folder: Path) -> ctypes.CDLL:
    """A library of C++ with these macros, in ``folder``."""
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
    return ctypes.CDLL(str(folder / f"{name}.so"))


def _source(source: str, entry: str, defines: Defines) -> tuple[str, list[Any]]:
    """The C++ of an entry of a source, and the ctypes of the arguments of ``run``, of which the first are the
    grid, threads and bytes of shared memory."""
    text = translated(f"{source}.cu")
    head = rf'extern "C" __global__ void __launch_bounds__\([^)]*\) {entry}\((.*?)\) \{{\n'
    found = re.search(head, text, re.S)
    assert found is not None
    drafts = ", i64 q_token" if defines.get("QUERY_TOKENS", 1) > 1 else ""
    strides = ", long long k_token_stride, long long v_token_stride" if drafts else ""
    listed = found[1].replace("STAGE_PARAMETERS", "").replace("QUERY_PARAMETERS", drafts)
    listed = listed.replace(" TOKEN_PARAMETERS", strides)
    parameters = [re.fullmatch(r"\s*(.*?)(\w+)\s*", part, re.S).groups() for part in listed.split(",")]  # type: ignore[union-attr]
    types = [ctypes.c_float if kind.strip() == "float" else ctypes.c_longlong for kind, _ in parameters]
    text = text.replace(found[0], f"static void {entry}({listed}) {{\n")
    text = re.sub(r'extern "C" __global__ void __launch_bounds__\([^)]*\)', "static void", text)
    given = "\n".join(f"static {kind} given_{name};" for kind, name in parameters)
    text = f"""#include "cuda_on_cpu.h"
typedef unsigned u32;
typedef long long i64;
{text}
{given}
extern "C" int run(i64 grid_x, i64 grid_y, i64 grid_z, i64 num_threads, i64 bytes, {listed}) {{
    {" ".join(f"given_{name} = {name};" for _, name in parameters)}
    cpu::allocate(bytes);
    cpu::grid = {{(unsigned)grid_x, (unsigned)grid_y, (unsigned)grid_z}};
    cpu::Dim& at = cpu::block;
    for (at.z = 0; at.z < grid_z; at.z++)
        for (at.y = 0; at.y < grid_y; at.y++)
            for (at.x = 0; at.x < grid_x; at.x++)
                cpu::run_block(num_threads, [] {{ {entry}({", ".join(f"given_{name}" for _, name in parameters)}); }});
    free(cpu::shared);
    return cpu::misaligned;
}}
"""
    return text, [ctypes.c_longlong] * 5 + types


class EmulatedKernel:
    """In place of ``kvcal.kernels.compile.Kernel``: an entry with these macros, compiled in ``folder``."""

    def __init__(self, source: str, entry: str, defines: Defines, folder: Path) -> None:
        self.defines = defines
        text, types = _source(source, entry, defines)
        name = f"{entry}{len(list(folder.glob('*.cpp')))}"
        self._run = compiled(text, name, defines, folder).run
        self._run.argtypes = types

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared_bytes: int, *args: int | float, follows: bool = False
    ) -> None:
        misaligned = self._run(*grid, threads, shared_bytes, *args)
        assert misaligned == 0, f"{misaligned} loads or stores of misaligned addresses"


def require_compiler() -> None:
    """Skips without g++ or an x86-64 CPU with half precision."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if shutil.which("g++") is None or " f16c" not in flags:
        pytest.skip("needs g++ and an x86-64 CPU with F16C")


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Lets ``launch_decode`` take tensors of the CPU."""
    require_compiler()

    kernels_of: dict[tuple[tuple[str, int], ...], EmulatedKernel] = {}

    def launch(variant: Variant, q_dtype: torch.dtype, softcap: bool) -> decode.Launch:
        defines = decode.decode_defines(variant, DTYPE_NAMES[q_dtype], softcap, CAPABILITY)
        heads = pass_heads(variant)
        key = tuple(defines.items())
        if key not in kernels_of:
            kernels_of[key] = EmulatedKernel("decode", "decode", defines, folder)
        emulated: Any = kernels_of[key]
        return decode.Launch(
            emulated, NUM_BLOCKS, defines["WARPS"] * 32, defines["SHARED_BYTES"],
            -(-variant.group_queries // heads), heads * (variant.head_dim + 2),
        )  # fmt: skip

    def launches(variant: Variant, q_dtype: torch.dtype, softcap: bool, *_: object) -> tuple[decode.Launch, ...]:
        many, few = (launch(one, q_dtype, softcap) for one in (variant, replace(variant, few_heads=True)))
        return many, few

    def workspace_bytes(batch: int, num_kv_heads: int, group_heads: int, head_dim: int, device: torch.device) -> int:
        heads = batch * num_kv_heads
        parts = (heads * -(-group_heads // decode.TILE_HEADS) + NUM_BLOCKS) * 4 * decode.TILE_HEADS * (head_dim + 2)
        return decode._counter_bytes(heads, group_heads) + 4 * parts

    monkeypatch.setattr(decode, "_launches", launches)
    monkeypatch.setattr(decode, "workspace_bytes", workspace_bytes)
