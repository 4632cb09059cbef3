"""Instructions of the kernels of a layer's step by class, and of their loops, which are told by what they hold:
products of bytes (pages, new tokens), of halves (tokens of 16 bits, queries, outputs), chains of fp32 (error feedback).
Needs no GPU, but nvdisasm: ``pip install nvidia-cuda-nvdisasm``."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from cuda.pathfinder import find_nvidia_binary_utility
from expected import DIM, HEADS
from shared import default_plan

from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.kernels.basis import basis_defines
from kvcal.kernels.compile import cubin
from kvcal.kernels.decode import decode_defines, shared_room
from kvcal.kernels.packing import append_defines
from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import SIDES
from kvcal.recipe_files import load_recipe
from kvcal.systems.basis.rotated import GAINED_BITS

GROUP, LAYERS = 4, 32
SPEC = load_recipe("default").cache
DEFAULT, PLAIN = "2.5 bits", "plain"  # plans: the default, and the same without bases and error feedback

KINDS = {
    "fp64": "DADD|DMUL|DFMA|DSETP", "products of bytes": "IMMA", "products of halves": "HMMA", "fp32": "FADD|FMUL|FFMA",
    "IMAD": "IMAD", "conversions": "I2F|I2FP|F2I|F2F|F2FP|MUFU", "memory": "LDG|STG|LDGSTS|ATOMG|RED",
    "shared memory": "LDS|STS|SHFL", "control": "BRA|BSSY|BSYNC|BAR|WARPSYNC|EXIT|DEPBAR|LDGDEPBAR|YIELD|NOP",
    "other integers": ".*",
}  # fmt: skip
Counts = dict[str, Any]
Code = list[tuple[str, int | None]]  # of each instruction the operation, and the number of that to which it jumps


def code_of(source: str, defines: Mapping[str, int], arch: str) -> Code:
    """Of the one entry of ``csrc/<source>.cu`` with these macros, or of all one after the other."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin(source, dict(defines), arch))
        command = [find_nvidia_binary_utility("nvdisasm") or "nvdisasm", "-c", file.name]
        return parsed(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parsed(listing: str) -> Code:
    """A listing of nvdisasm, such as ``/*00b0*/ @!P0 BRA `(.L_x_0) ;``, with labels on lines of their own."""
    labels, found = dict[str, int](), list[tuple[str, str]]()
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(found)
        elif one := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:\{ )?(?:@!?U?P\w+ )?\s*([A-Z0-9]+)(.*);", line):
            found.append((one[1], one[2]))
    jumps = [re.search(r"`\((\.L_\w+)\)", rest) if name == "BRA" else None for name, rest in found]
    return [(name, labels[jump[1]] if jump else None) for (name, _), jump in zip(found, jumps, strict=True)]


def counted(code: Code) -> Counter[str]:
    return Counter(next(kind for kind, names in KINDS.items() if re.fullmatch(names, name)) for name, _ in code)


def loops(code: Code) -> list[tuple[int, int]]:
    """From and stop of what jumps back, the shortest first."""
    return sorted(((to, end + 1) for end, (_, to) in enumerate(code) if to is not None and to < end), key=_size)


def _size(loop: tuple[int, int]) -> int:
    return loop[1] - loop[0]


def loop_with(code: Code, operation: str) -> tuple[int, int]:
    """The shortest loop that has all of these instructions."""
    number = sum(name == operation for name, _ in code)
    return next(one for one in loops(code) if sum(name == operation for name, _ in code[slice(*one)]) == number)


def chain(code: Code) -> Counter[str]:
    """Of error feedback, a warp: 128 channels of eight tokens with one scale. The longest loops of fp32 but that over
    all eights, one a side, a turn for each block of 16 channels."""
    found = Counter[str]()
    for one in (counted(code[slice(*loop)]) for loop in loops(code) if _size(loop) < 1000):
        found += Counter({kind: 4 * number for kind, number in one.items()} if one["fp32"] > 200 else {})
    return found


def bits_of_layers() -> list[tuple[int, int]]:
    """Of keys and values, in the default plan at 2.5 bits."""
    attention = tuple(AttentionGeometry(index, GROUP * HEADS, HEADS, DIM, DIM) for index in range(LAYERS))
    layers = default_plan(Geometry("llama", "bfloat16", attention), 2.5).layers
    return [(layer.format("k").num_bits, layer.format("v").num_bits) for layer in layers]


def plans(bits: Sequence[tuple[int, int]]) -> dict[str, list[Variant]]:
    """Variants of layers with these bits."""
    found: dict[str, list[Variant]] = {DEFAULT: [], PLAIN: []}
    for pair in bits:
        k, v = (SPEC.format(side, of_side, "token", 128, "rotated") for side, of_side in zip(SIDES, pair, strict=True))
        plain = Variant(k, v, DIM, "bfloat16", GROUP, False, False)
        found[PLAIN].append(plain)
        found[DEFAULT].append(replace(plain, k_feedback=True, v_feedback=True, v_gain=v.num_bits == GAINED_BITS))
    return found


def named(plan: str, one: Variant) -> str:
    return f"{plan}, K{one.k.num_bits} V{one.v.num_bits}"


def counts_of(capability: tuple[int, int], of_plans: Mapping[str, list[Variant]]) -> Counts:
    """``loops``: instructions of a turn by class, of ``decode`` by plan and bits. ``before``: those of ``enter``
    and ``leave`` before their loops. ``fp64``: in all of a kernel, of ``append`` for two sides. ``warps``: of
    ``decode``."""
    bf16 = torch.bfloat16
    arch, warps, fp64, loops = "sm_{}{}".format(*capability), {}, {"decode": 0}, {}
    for plan, variants in of_plans.items():
        for one in set(variants):
            defines = decode_defines(one, "float32" if plan == DEFAULT else "bfloat16", False, capability)
            code, name = code_of("decode", defines, arch), named(plan, one)
            warps[name], fp64["decode"] = defines["WARPS"], fp64["decode"] + counted(code)["fp64"]
            loops[f"{name}: a page"] = counted(code[slice(*loop_with(code, "IMMA"))])
            loops[f"{name}: 16 tokens"] = counted(code[slice(*loop_with(code, "HMMA"))])
    append = code_of("pack", append_defines(of_plans[DEFAULT][0], False, shared_room(capability)), arch)
    enter = code_of("basis", basis_defines("enter", DIM, GROUP, (bf16, bf16)), arch)
    leave = code_of("basis", basis_defines("leave", DIM, GROUP, (torch.float32, bf16)), arch)
    queries, tokens, outputs = loop_with(enter, "HMMA"), loop_with(enter, "IMMA"), loop_with(leave, "HMMA")
    loops |= {"enter: 8 tokens": counted(enter[slice(*tokens)]), "enter: 8 queries": counted(enter[slice(*queries)])}
    loops |= {"leave: 8 outputs": counted(leave[slice(*outputs)]), "append: 8 tokens, one scale": chain(append)}
    fp64 |= {"enter": counted(enter)["fp64"], "leave": counted(leave)["fp64"], "append": counted(append)["fp64"]}
    before = {"enter": max(queries[0], tokens[0] - queries[1]), "leave": outputs[0]}
    return {"warps": warps, "loops": {name: dict(loop) for name, loop in loops.items()}, "before": before, "fp64": fp64}
