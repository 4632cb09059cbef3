"""Times of decode attention that are expected of GPUs on which nobody has measured: a model, no measurement.

    python lab/expected.py          # what was fitted, its errors, and a table of chips

A call takes t0 + (m^p + c^p)^(1/p). m: bytes over ``SHARE`` of the bandwidth. c: the larger of a page's
instructions over what an SM issues, and of its products over what tensor cores take. An SM issues less with
few warps, which shared memory limits. t0, p and the issued share are fitted on ``FITTED``, an H200's rows of
docs/measured/2026-11-2*; ``CHECKED``, rows of other pages there, are not seen by the fit: another card, newer
kernels. Chips are as data sheets and papers of the vendor say, B200 as chipsandcheese.com and hmc-tech.com
do; int8's dense rate is that of products.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from shared import print_table

from kvcal.kernels.decode import block_shape
from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import Format


class Chip(NamedTuple):
    capability: tuple[int, int]
    gb: float  # of memory
    gb_s: float
    sms: int
    ghz: float
    product_cycles: float  # of an m16n8k32 and scheduler


CHIPS = {
    "A100 80GB": Chip((8, 0), 80, 2039, 108, 1.41, 8),
    "H100 SXM": Chip((9, 0), 80, 3350, 132, 1.98, 6),
    "H200": Chip((9, 0), 141, 4800, 132, 1.98, 6),
    "B200": Chip((10, 0), 180, 7700, 148, 1.98, 6),
    "L40S": Chip((8, 9), 48, 864, 142, 2.52, 16),
    "RTX 4090": Chip((8, 9), 24, 1008, 128, 2.52, 16),
    "RTX 5090": Chip((12, 0), 32, 1792, 170, 2.41, 16),
    "RTX PRO 6000": Chip((12, 0), 96, 1792, 188, 2.6, 16),
}
ROTATED = "rotated "
# Bits stored; instructions of a page, counted for 2 bits, with what the code of others has more.
BITS = {"2": 2.25, "3": 3.25, "4": 4.25, "rotated 2": 2.13, "rotated 3": 3.13, "rotated 4": 4.13, "16": 16.0}
INSTRUCTIONS = {"2": 1235, "3": 1235 + 736, "4": 1235 + 280}
PRODUCTS = 88
SHARE, RAW_FIXED = 0.935, 7.4  # of 16 bits on an H200: the slope and the offset of its times over bytes
# By warps, of what 12 issue: 8 x 8 heads on an H200 took 52.7 and, with 4, 67 us; 53.9 and, with 8, 58.7;
# less t0.
ISSUED = {12: 1.0, 8: 0.91, 4: 0.76}
HEADS, DIM, PAGE = 8, 128, 128
K = 1024
# (chip, format, tokens of all sequences, microseconds)
Row = tuple[str, str, int, float]
LENGTHS = (8 * K, 32 * K, 128 * K, 64 * K, 256 * K)
H200 = {
    "2": (7.185, 11.21, 25.83, 14.95, 44.77),
    "3": (8.624, 14.5, 33.38, 20.26, 57.91),
    "4": (8.201, 14.31, 38.59, 22.26, 70.85),
}
FITTED: list[Row] = [("H200", fmt, *row) for fmt in H200 for row in zip(LENGTHS, H200[fmt], strict=True)]
H100 = {"16": 356.5, "2": 66.2, "4": 102.3, "rotated 2": 56.0, "rotated 3": 80.9, "rotated 4": 100.4}
LATER = {("2", 256 * K): 40.4, ("2", 32 * K): 11.3, ("16", 256 * K): 240.0, ("16", 32 * K): 38.3}
CHECKED: list[Row] = [("H100 SXM", fmt, 256 * K, time) for fmt, time in H100.items()]
CHECKED += [("H200", *what, time) for what, time in LATER.items()]


class Fit(NamedTuple):
    fixed: float
    power: float
    issued: float  # instructions a cycle and scheduler, of 12 warps


def warps(chip: Chip, fmt: str) -> int:
    bits = int(fmt[-1])
    k = Format(bits, quantizer="rotated") if fmt.startswith(ROTATED) else Format(bits, "channel")
    v = k if fmt.startswith(ROTATED) else Format(bits)
    return block_shape(Variant(k, v, DIM, "bfloat16", 4, False, False), chip.capability)[0]


def microseconds(chip: Chip, fmt: str, tokens: int, fit: Fit) -> float:
    """Of one layer, 8 KV heads of 128 in groups of 4."""
    nbytes = tokens * 2 * HEADS * DIM * BITS[fmt] / 8
    if fmt == "16":
        return RAW_FIXED + memory_us(chip, nbytes)
    cycles = cycles_of(INSTRUCTIONS[fmt[-1]], PRODUCTS * chip.product_cycles, warps(chip, fmt), fit)
    return decode_us(chip, nbytes, tokens / PAGE * HEADS * cycles, fit)


def memory_us(chip: Chip, nbytes: float) -> float:
    return nbytes / (1e3 * SHARE * chip.gb_s)


def cycles_of(instructions: float, product_cycles: float, num_warps: int, fit: Fit) -> float:
    """Of a scheduler of an SM with so many warps, for what one of them does."""
    return max(instructions / (fit.issued * ISSUED[num_warps]), product_cycles)


def decode_us(chip: Chip, nbytes: float, cycles: float, fit: Fit) -> float:
    """Of a launch that reads so many bytes, and keeps one scheduler busy for so long in all."""
    memory, compute = memory_us(chip, nbytes), cycles / (4e3 * chip.sms * chip.ghz)
    return fit.fixed + math.hypot(memory ** (fit.power / 2), compute ** (fit.power / 2)) ** (2 / fit.power)


def errors(rows: list[Row], fit: Fit) -> list[float]:
    """Expected over measured, less 1."""
    return [microseconds(CHIPS[chip], fmt, tokens, fit) / time - 1 for chip, fmt, tokens, time in rows]


def fitted() -> Fit:
    axes = [n / 4 for n in range(12, 33)], (2, 3, 4, 6, 8), [n / 50 for n in range(20, 51)]
    grid = (Fit(*point) for point in itertools.product(*axes))
    return min(grid, key=lambda fit: sum(error**2 for error in errors(FITTED, fit)))


def tokens_a_second(chip: Chip, fmt: str, fit: Fit, context: int = 32 * K) -> tuple[float, int]:
    """Of Llama-3.1-8B's shape, bf16 weights, and the batch that fills the memory. A step's other 3.5 ms and
    17.4 GB are an H200's (docs/measured/2026-11-21-whole-steps-earlier.md)."""
    batch = int((chip.gb - 17.4) // (4.33 * BITS[fmt] / 16))
    step = 3500 + 16.06e6 / (SHARE * chip.gb_s) + 32 * microseconds(chip, fmt, max(1, batch) * context, fit)
    return 1e6 * batch / step, batch


def main() -> None:
    fit = fitted()
    print(fit)
    for name, rows in (("fitted", FITTED), ("not fitted", CHECKED)):
        found = errors(rows, fit)
        mean = math.sqrt(sum(error**2 for error in found) / len(found))
        print(f"{name}: {', '.join(f'{100 * error:+.0f}' for error in found)} %, rms {100 * mean:.1f} %")
    table = []
    for name, chip in CHIPS.items():
        cells = [str(warps(chip, "2"))]
        for tokens, formats in ((256 * K, ("2", "rotated 2", "rotated 3", "4")), (32 * K, ("2", "4"))):
            raw = microseconds(chip, "16", tokens, fit)
            times = [microseconds(chip, fmt, tokens, fit) for fmt in formats]
            cells += [f"{raw:,.0f}", *(f"{time:.0f}, {raw / time:.1f}x" for time in times)]
        rates = [tokens_a_second(chip, fmt, fit) for fmt in ("16", "2")]
        table.append((name, *cells, *(f"{rate:,.0f} (batch {batch})" for rate, batch in rates)))
    head = ("warps", "16 bits", "2", "rotated 2", "rotated 3", "4", "16 bits", "2", "4", "16 bits", "2")
    print_table("Expected: 8 x 32K, 1 x 32K, tokens a second", ("", *head), table)


if __name__ == "__main__":
    main()
