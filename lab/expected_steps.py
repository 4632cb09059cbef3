"""Steps of a layer in the default plan at 2.5 bits, on cards on which nobody has measured, next to the same plan
without bases and error feedback: computed from compiled code, no measurement.

    python lab/expected_steps.py --out steps.json     # needs nvdisasm (instructions.py), and no GPU

What kvcal chooses for each card is compiled, and its loops are counted. ``decode`` is the model of expected.py, of
these counts. In ``enter`` and ``leave`` a lone warp takes ``LONE`` cycles an instruction; matrices are read from memory
once, and from L2 by every block. ``append`` packs what rows at random phases complete. Constants are an H200's of
docs/measured/2026-11-29-packing.md and -stripes.md. Rates are of the CUDA C++ Best Practices Guide ("Throughput of
Native Arithmetic Instructions") and of NVIDIA's white papers on Ada and RTX Blackwell.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from expected import CHIPS, DIM, HEADS, PAGE, cycles_of, decode_us, fitted, memory_us
from instructions import DEFAULT, GROUP, LAYERS, PLAIN, Counts, bits_of_layers, counts_of, named, plans
from shared import print_table

from kvcal.artifact import write_text_atomic
from kvcal.kernels.basis import BLOCK_CHANNELS, ROWS_AT_ONCE
from kvcal.kernels.decode import shared_room
from kvcal.kernels.packing import append_shape
from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import SIDES

SHAPES = {"H200": ("1x4096", "8x32768", "38x32768"), "RTX 4090": ("1x4096", "8x8192", "8x32768"),
          "RTX 5090": ("1x4096", "8x8192", "8x32768", "20x32768")}  # fmt: skip
WEIGHTS = {"bf16": 16.06e9 / LAYERS, "4 bits": 16.06e9 / LAYERS * 4.5 / 16}  # bytes of a layer of Llama-3.1-8B
HALVES = {"H200": 6.7, "RTX 4090": 32, "RTX 5090": 32}  # cycles of a m16n8k16 with sums in fp32, and scheduler
L2_GB_S = {"H200": 7200, "RTX 4090": 5000, "RTX 5090": 5000}  # fitted; of the cards assumed
FP64 = 16  # cycles of an instruction and SM, which has two lanes on consumer cards
# An H200's, microseconds at GHZ. START and LONE are fitted on ``enter`` and ``leave`` alone, of 1 and 8 sequences.
# IN_STEP: more in a step than alone, 1.15 to 1.4. GAP, of a launch that does not overlap, is .5 to 1.5 in
# docs/measured/2026-11-21-versions-of-decode.md. Of ``append``: no stripe, a stripe; of its feedback, cycles of an
# instruction of a chain, and code that is not in caches.
GHZ, START, LONE, IN_STEP, GAP, LATENCY = 1.98, 0.8, 3.43, 1.3, 0.75, 0.6
STORE, PACK, CHAIN, COLD = 1.75, 5.15, 1.085, 6.5


class Scenario(NamedTuple):
    """What is not known. ``in_turn``: products do not overlap with the other instructions of a lone warp."""

    gap: float = GAP
    in_step: float = IN_STEP
    in_turn: bool = False


FIT = fitted()
SCENARIOS = {"expected": Scenario(), "least": Scenario(0.5, 1.0, True), "most": Scenario(1.5, 1.5)}


def products(card: str, loop: Mapping[str, int]) -> float:
    """Cycles of a scheduler's tensor core."""
    of_bytes = loop.get("products of bytes", 0) * CHIPS[card].product_cycles
    return of_bytes + loop.get("products of halves", 0) * HALVES[card]


def decode_of(card: str, counts: Counts, plan: str, one: Variant, batch: int, context: int, at: Scenario) -> float:
    read, name = one.k.tokens_read(context - 1), named(plan, one)
    pages, rest, cycles = -(-read // PAGE), context - read, 0.0
    for part, times in (("a page", pages), ("16 tokens", 1 + -(-rest // 16))):
        loop, warps = counts["loops"][f"{name}: {part}"], counts["warps"][name]
        others, own = cycles_of(sum(loop.values()), 0, warps, FIT), products(card, loop)
        cycles += times * (others + own if at.in_turn and warps == 4 else max(others, own))
    nbytes = pages * sum(one.layout(side).record_bytes for side in SIDES) + 4 * DIM * rest
    return decode_us(CHIPS[card], batch * HEADS * nbytes, batch * HEADS * cycles, FIT)


def append_of(card: str, counts: Counts, one: Variant, batch: int) -> float:
    """Mean of steps whose rows are at random phases."""
    chip, has = CHIPS[card], one.k_feedback
    shape = append_shape(one, shared_room(chip.capability))
    blocks = shape.append_blocks(len(SIDES) * batch * HEADS, chip.sms)
    units, share = len(SIDES) * HEADS * shape.stripe_tokens // shape.part_tokens, 1 / shape.stripe_tokens
    norms = 0 if card == "H200" else counts["fp64"]["append"] * FP64 / (1e3 * chip.ghz)  # two warps, one side
    cycles = CHAIN * has * sum(counts["loops"]["append: 8 tokens, one scale"].values())
    found, turn = STORE, (1e3 * PACK * GHZ + cycles) / (1e3 * chip.ghz) + norms
    for done in range(1, batch + 1):
        chance = math.comb(batch, done) * share**done * (1 - share) ** (batch - done)
        found += chance * (-(-done * units // blocks) * turn + COLD * has)
    return found


def basis_of(card: str, counts: Counts, name: str, batch: int, at: Scenario) -> float:
    """Of ``enter`` or ``leave``, whose blocks take eight rows each."""
    chip, is_enter = CHIPS[card], name == "enter"
    loops = [loop for of, loop in counts["loops"].items() if of.startswith(f"{name}:")]
    cycles = max(LONE * sum(loop.values()) + products(card, loop) - products("H200", loop) for loop in loops)
    waits = 0.0 if chip.capability >= (9, 0) else LATENCY
    cycles += LONE * counts["before"][name] if waits else 0
    blocks = -(-batch * GROUP // ROWS_AT_ONCE) + is_enter * 2 * -(-batch // ROWS_AT_ONCE)
    blocks *= HEADS * DIM // BLOCK_CHANNELS
    from_l2 = blocks * 4 * BLOCK_CHANNELS * DIM / (1e3 * L2_GB_S[card])
    from_memory = memory_us(chip, 4 * HEADS * DIM * DIM * (3 if is_enter else 1))
    return at.in_step * (START + waits + cycles / (1e3 * chip.ghz) + from_memory + from_l2)


def step_of(card: str, counts: Counts, plan: str, every: list[Variant], shape: str, at: Scenario) -> dict[str, float]:
    """Microseconds by kernel, mean of the layers."""
    batch, context = map(int, shape.split("x"))
    decodes = {one: decode_of(card, counts, plan, one, batch, context, at) for one in set(every)}
    found = {
        "decode": sum(decodes[one] for one in every) / len(every),
        "append": append_of(card, counts, every[0], batch),
    }
    if plan == DEFAULT:
        found |= {name: basis_of(card, counts, name, batch, at) for name in ("enter", "leave")}
    gap = at.gap if CHIPS[card].capability < (9, 0) else 0.0
    return {name: round(us + gap, 2) for name, us in found.items()}


def rows_of(counts: Mapping[str, Counts], of_plans: Mapping[str, list[Variant]]) -> list[dict[str, Any]]:
    """Of each card and shape: microseconds by kernel, and what the default takes over plain; also with weights."""
    found = []
    for card, shape in [(name, shape) for name in counts for shape in SHAPES[name]]:
        us = [{plan: step_of(card, counts[card], plan, every, shape, at) for plan, every in of_plans.items()}
              for at in SCENARIOS.values()]  # fmt: skip
        sums = [[sum(times[plan].values()) for plan in (DEFAULT, PLAIN)] for times in us]
        more, less = sums[0]
        over = [more / less - 1 for more, less in sums]
        over += [(more - less) / (less + memory_us(CHIPS[card], nbytes)) for nbytes in WEIGHTS.values()]
        shares = {name: round(one, 4) for name, one in zip((*SCENARIOS, *WEIGHTS), over, strict=True)}
        found.append({"card": card, "shape": shape, "us": us[0], "over": shares})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given, bits = parser.parse_args(), bits_of_layers()
    counts = {card: counts_of(CHIPS[card].capability, plans(bits)) for card in SHAPES}
    rows = rows_of(counts, plans(bits))
    if given.out:
        write_text_atomic(given.out, json.dumps({"bits": bits, "counts": counts, "rows": rows}, sort_keys=True) + "\n")
    table = [(row["card"], row["shape"], *(sum(one.values()) for one in row["us"].values()), *row["over"].values())
             for row in rows]  # fmt: skip
    print_table("Computed microseconds of a layer's step", ("", "", DEFAULT, PLAIN, *SCENARIOS, *WEIGHTS), table)


if __name__ == "__main__":
    main()
