"""The cost of the kernels, read off the compiled code: registers, spills, instructions, shared memory. Needs no
GPU.

An inner loop that loses its unrolling, or an array that moves to local memory, makes a kernel several times
slower and changes no result: without a GPU, a budget is the only test that sees it. The numbers have some 10
% of room.

Three main variants are compiled for every chip that docs/kernels.md names; the others for one chip, as code of
two chips differs little.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
from cubin_resources import old_compiler_bytes, resources

from kvcal.errors import UsageError
from kvcal.kernels.choice import is_plain, pass_heads
from kvcal.kernels.compile import cubin
from kvcal.kernels.decode import block_shape, decode_defines, row_defines, shared_room
from kvcal.kernels.packing import append_defines, append_shape, pack_defines
from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import RAW, Boost, Format, Tier

KITTY = Boost("magnitude", (Tier(4, 0.125),))
ROTATED = Format(2, quantizer="rotated")
STRIPES = Format(2, "token", 128, 8, 112, quantizer="rotated", stripe_tokens=16)
# name: (K, V, instructions of decode at most, bytes of local memory of decode at most, instructions of append
# at most)
VARIANTS = {
    "2 bits": (Format(2, "channel"), Format(2), 4350, 0, 2150),
    "3 bits": (Format(3, "channel"), Format(3), 5450, 0, 2300),
    "4 bits": (Format(4, "channel"), Format(4), 4650, 0, 2250),
    "Kitty": (Format(2, "channel", boost=KITTY), Format(2), 4800, 0, 3200),
    "rotated 2 bits": (ROTATED, ROTATED, 5000, 0, 4700),
    "stripes": (STRIPES, STRIPES, 5400, 0, 2850),
    "rotated values": (Format(2, "channel", boost=KITTY), ROTATED, 5000, 0, 4600),
    "16 bits": (RAW, RAW, 2900, 32, 750),
}
# Head size and query heads of a group: instructions at most, of 2 bits and, where it is compiled, of Kitty.
SHAPES = {
    (64, 4): (3450,), (64, 8): (3900, 4200), (128, 1): (4400,), (128, 8): (4950, 5300),
    (96, 4): (4750,), (192, 4): (6350,), (256, 7): (7550, 8050),
}  # fmt: skip


class Chip(NamedTuple):
    """``shared_kib``: shared memory that a block may have at most, by the CUDA programming guide. ``warps``:
    of a block of 2 bits; each has a page in work, and two records in shared memory."""

    shared_kib: int
    warps: int


CHIPS = {
    (8, 0): Chip(163, 12), (8, 6): Chip(99, 4), (8, 9): Chip(99, 4), (9, 0): Chip(227, 12), (10, 0): Chip(227, 12),
    (12, 0): Chip(99, 4),
}  # fmt: skip
HOPPER = (9, 0)
MAIN = ("2 bits", "rotated 2 bits", "stripes")  # the last are the default recipe's


def variant(k: Format, v: Format, head_dim: int = 128, group_heads: int = 4, dtype: str = "bfloat16") -> Variant:
    return Variant(k, v, head_dim, dtype, group_heads, False, False)


def arch_of(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def assert_decode(
    of: Variant, instructions: int, local_bytes: int, capability: tuple[int, int] = HOPPER, has_rows: bool = False
) -> None:
    defines = decode_defines(of, of.cache_dtype, False, capability) | row_defines(has_rows)
    found = resources(cubin("decode", defines, arch_of(capability)))["decode"]
    assert found.registers * defines["WARPS"] * 32 <= 65536
    assert found.local_bytes <= local_bytes
    assert found.instructions <= instructions and found.fp64 == 0
    assert defines["SHARED_BYTES"] + found.static_shared_bytes <= 1024 * CHIPS[capability].shared_kib


def assert_append(of: Variant, instructions: int, capability: tuple[int, int] = HOPPER, has_rows: bool = False) -> None:
    defines = append_defines(of, has_rows, shared_room(capability))
    found = resources(cubin("pack", defines, arch_of(capability)))["append"]
    has_parts = "PART_TOKENS" in defines
    # Parts may save a few registers around the slow path of a square root.
    assert found.local_bytes <= (16 if has_parts else 0) and found.registers <= (168 if has_parts else 96)
    assert found.instructions <= instructions
    assert found.static_shared_bytes <= 48 * 1024  # of every chip, without asking for more
    assert defines.get("PART_BYTES", 0) <= shared_room(capability)


@pytest.mark.parametrize("name", VARIANTS)
def test_decode_and_append_stay_in_their_budgets(name: str) -> None:
    k, v, instructions, local_bytes, of_append = VARIANTS[name]
    assert_decode(variant(k, v), instructions, local_bytes)
    assert_append(variant(k, v), of_append)


@pytest.mark.parametrize("capability", CHIPS)
def test_two_blocks_that_pack_eight_tokens_have_room_on_a_multiprocessor(capability: tuple[int, int]) -> None:
    """Where they have shared memory for two. Blocks of 16 channels are looped over, not unrolled. Only norms are fp64,
    some 30 instructions a side: consumer cards have it at a 64th of the speed of fp32."""
    of = replace(variant(STRIPES, STRIPES), k_feedback=True, v_feedback=True, v_gain=True)
    assert_append(of, 5800, capability)
    shape = append_shape(of, shared_room(capability))
    found = resources(cubin("pack", append_defines(of, False, shared_room(capability)), arch_of(capability)))["append"]
    assert shape.blocks_of_sm == (2 if CHIPS[capability].shared_kib > 200 else 1)
    assert found.local_bytes == 0 and found.registers * shape.threads * shape.blocks_of_sm <= 65536
    assert 0 < found.fp64 <= 80


@pytest.mark.parametrize("capability", [capability for capability in CHIPS if capability != HOPPER])
def test_the_main_variants_fit_every_chip(capability: tuple[int, int]) -> None:
    """Also pages that a prompt packs and a prompt reads."""
    for name in MAIN:
        k, v, instructions, local_bytes, of_append = VARIANTS[name]
        assert_decode(variant(k, v), instructions, local_bytes, capability)
        if k == v:
            assert_append(variant(k, v), of_append, capability)
    for found in resources(
        cubin("pack", pack_defines(variant(k, v), "k", shared_room(capability)), arch_of(capability))
    ).values():
        assert found.local_bytes == 0 and found.registers <= 128 and found.static_shared_bytes <= 48 * 1024


# Of the other chips: K and V, head size, query heads of a group, dtype. Each format meets each chip, sm_86 as
# sm_89.
COVERING = {
    "3 bits": (*VARIANTS["3 bits"][:2], 64, 16, "float16"),
    "4 bits": (*VARIANTS["4 bits"][:2], 128, 8, "bfloat16"),
    "Kitty": (*VARIANTS["Kitty"][:2], 128, 16, "float16"),
    "rotated 3 bits": (Format(3, quantizer="rotated"), Format(3, quantizer="rotated"), 128, 1, "bfloat16"),
    "rotated 4 bits": (Format(4, quantizer="rotated"), Format(4, quantizer="rotated"), 64, 8, "float16"),
}


@pytest.mark.parametrize("capability", CHIPS)
def test_other_formats_heads_and_groups_fit_every_chip(capability: tuple[int, int]) -> None:
    """No spill, registers and shared memory of a block within the chip's: of reading, and of what packs in a
    step."""
    skipped = {HOPPER: ("3 bits", "4 bits", "Kitty"), (8, 6): ("3 bits", "Kitty", "rotated 4 bits")}
    for name in COVERING.keys() - skipped.get(capability, ()):
        spilled = 8 if (name, capability) == ("Kitty", (10, 0)) else 0  # two registers, outside of the loop over pages
        assert_decode(variant(*COVERING[name]), 5600, spilled, capability)
        if name.startswith("rotated"):
            assert_append(variant(*COVERING[name]), 4900, capability)


@pytest.mark.parametrize("capability", CHIPS)
def test_a_block_is_as_large_as_its_shared_memory_lets_it(capability: tuple[int, int]) -> None:
    warps, shared_bytes = block_shape(variant(*VARIANTS["2 bits"][:2]), capability)
    assert warps == CHIPS[capability].warps
    assert shared_bytes <= shared_room(capability) == 1024 * CHIPS[capability].shared_kib


def test_a_chip_has_room_for_all_that_the_fast_kernel_takes() -> None:
    """Also with scales in fp32 for every 32 values, which make the largest records; and else the chip is
    named."""
    keys = [RAW, *(Format(bits, "channel", 32, param_dtype="float32") for bits in (1, 2, 3, 4, 8))]
    values = [RAW, *(Format(bits, "token", size) for bits, size in itertools.product((1, 2, 3, 4, 8), (32, 128)))]
    of_chips = {room: capability for capability in CHIPS if (room := shared_room(capability))}
    for k, v, dim, group in itertools.product(keys, values, (64, 96, 128, 192, 256), (1, 4, 8)):
        one = replace(variant(k, v, dim, group), step_tokens=8, query_tokens=8)
        for room, capability in of_chips.items() if not is_plain(one) else ():
            warps, shared_bytes = block_shape(one, capability)
            assert warps >= 1 and shared_bytes <= room
    with pytest.raises(UsageError, match=r"more than the 101376 of a GPU of compute capability 8\.6"):
        block_shape(
            variant(Format(8, "token", 32, param_dtype="float32"), Format(8, param_dtype="float32"), 512), (8, 6)
        )


@pytest.mark.parametrize("name", MAIN)
def test_a_table_of_rings_costs_a_load(name: str) -> None:
    """As an engine hands it over (kvcal.engines)."""
    k, v, instructions, local_bytes, of_append = VARIANTS[name]
    assert_decode(variant(k, v), instructions + 16, local_bytes, has_rows=True)
    assert_append(variant(k, v), of_append + 16, has_rows=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_stays_in_its_budget_for_other_heads(shape: tuple[int, int]) -> None:
    for name, instructions in zip(("2 bits", "Kitty"), SHAPES[shape], strict=False):
        assert_decode(variant(*VARIANTS[name][:2], *shape), instructions, 32)


# Of stripes of heads of 256: bits, instructions of decode and of append at most.
LARGE = {2: (9200, 11600), 3: (11500, 11800), 4: (10100, 11800)}


@pytest.mark.parametrize("capability", [(8, 9), HOPPER, (12, 0)])
def test_pages_in_a_basis_of_large_heads_stay_in_their_budgets(capability: tuple[int, int]) -> None:
    """As the default plan has them. Codes of both groups of channels that were expanded at once spilled 240
    registers."""
    for bits in LARGE if capability == HOPPER else (2,):
        one = replace(STRIPES, num_bits=bits)
        of = replace(variant(one, one, 256, 8), k_feedback=True, v_feedback=True, v_gain=True, offset=True)
        assert_decode(of, LARGE[bits][0], 104, capability)
        defines = append_defines(of, False, shared_room(capability))
        found = resources(cubin("pack", defines, arch_of(capability)))["append"]
        assert found.local_bytes <= 64 and found.registers <= 168 and found.instructions <= LARGE[bits][1]
        assert defines["PART_BYTES"] <= shared_room(capability)
        for found in resources(
            cubin("pack", pack_defines(of, "v", shared_room(capability)), arch_of(capability))
        ).values():
            assert found.local_bytes <= 32 and found.registers <= 168


def test_the_largest_heads_fit_the_smallest_shared_memory() -> None:
    assert_decode(variant(*VARIANTS["2 bits"][:2], 256, 7), SHAPES[256, 7][0], 32, (8, 9))


# Query heads of a group and tokens of a step: instructions at most, of 2 bits.
STEPS = {(1, 4): 4500, (4, 2): 5250, (4, 8): 5250, (7, 2): 5250}


@pytest.mark.parametrize("shape", STEPS)
def test_steps_with_drafts_stay_in_their_budgets(shape: tuple[int, int]) -> None:
    k, v, *_, of_append = VARIANTS["2 bits"]
    of_step = replace(variant(k, v, 128, shape[0]), step_tokens=8, query_tokens=shape[1])
    assert_decode(of_step, STEPS[shape], 32)
    if shape == (4, 8):
        assert_append(of_step, of_append + 50)  # NVRTC 13.0 makes 3 % more code than 13.5


# Of stripes, passes of 16 query heads and, with few KV heads, of 8: bits, instructions at most.
TWO_TILES = {2: (7650, 5950), 3: (8800, 7150), 4: (8100, 6450)}


@pytest.mark.parametrize("bits", TWO_TILES)
def test_two_tiles_of_columns_stay_in_registers(bits: int) -> None:
    one = replace(STRIPES, num_bits=bits)
    of_step = replace(variant(one, one), step_tokens=8, query_tokens=4)
    assert pass_heads(of_step) == 16
    assert_decode(of_step, TWO_TILES[bits][0], 48)
    assert_decode(replace(of_step, few_heads=True), TWO_TILES[bits][1], 16)


def test_a_step_without_drafts_pays_nothing_for_them() -> None:
    """Which query a thread has divides by the heads of a token: with one token, 80 instructions and a
    spill."""
    assert_decode(variant(*VARIANTS["2 bits"][:2], 128, 7), 4575, old_compiler_bytes())
