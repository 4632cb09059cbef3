"""What the kernels cost, read off the compiled code: registers, spills, instructions. Needs no GPU.

An inner loop that loses its unrolling, or an array that moves to local memory, makes a kernel several times slower and
changes no result: without a GPU, a budget is the only test that sees it. The numbers have some 10 % of room.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from cubin_resources import resources

from kvcal.kernels.compile import cubin
from kvcal.kernels.decode import block_shape, decode_defines, row_defines
from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import RAW, Boost, Format, Tier

KITTY = Boost("magnitude", (Tier(4, 0.125),))
ROTATED = Format(2, quantizer="rotated")
# name: (K, V, instructions of decode at most, bytes of local memory of decode at most, instructions of append at most)
VARIANTS = {
    "2 bits": (Format(2, "channel"), Format(2), 4350, 0, 1800),
    "3 bits": (Format(3, "channel"), Format(3), 5450, 0, 2000),
    "4 bits": (Format(4, "channel"), Format(4), 4650, 0, 1900),
    "Kitty": (Format(2, "channel", boost=KITTY), Format(2), 4800, 0, 3200),
    "rotated 2 bits": (ROTATED, ROTATED, 5000, 0, 5700),
    "rotated values": (Format(2, "channel", boost=KITTY), ROTATED, 5000, 0, 4800),
    "16 bits": (RAW, RAW, 2900, 32, 500),
}
# Head size and query heads of a group: instructions at most, of 2 bits and, where the fast kernel takes it, of Kitty.
SHAPES = {
    (64, 4): (3450, 3750), (64, 8): (3900, 4200), (128, 1): (4400, 4850), (128, 8): (4950, 5300),
    (96, 4): (4750,), (192, 4): (6350,), (256, 7): (7550, 8050),
}  # fmt: skip
# Warps of a block, by compute capability: each has a page in work, and two records in shared memory.
WARPS = {(8, 0): 12, (8, 9): 4, (9, 0): 12, (12, 0): 4}


def variant(k: Format, v: Format, head_dim: int = 128, group_heads: int = 4) -> Variant:
    return Variant(k, v, head_dim, "bfloat16", group_heads, False, False, 0)


def assert_decode(of: Variant, capability: tuple[int, int], instructions: int, local_bytes: int) -> None:
    defines = decode_defines(of, "bfloat16", False, capability)
    found = resources(cubin("decode", defines, f"sm_{capability[0]}{capability[1]}"))["decode"]
    assert found.registers * defines["WARPS"] * 32 <= 65536
    assert found.local_bytes <= local_bytes
    assert found.instructions <= instructions


@pytest.mark.parametrize("capability", WARPS)
@pytest.mark.parametrize("name", VARIANTS)
def test_decode_and_append_stay_in_their_budgets(name: str, capability: tuple[int, int]) -> None:
    k, v, instructions, local_bytes, of_append = VARIANTS[name]
    assert_decode(variant(k, v), capability, instructions, local_bytes)
    arch = f"sm_{capability[0]}{capability[1]}"
    found = resources(cubin("pack", variant(k, v).defines, arch))["append"]
    assert found.local_bytes == 0 and found.registers <= 96 and found.instructions <= of_append


@pytest.mark.parametrize("name", VARIANTS)
def test_a_table_of_rings_costs_a_load(name: str) -> None:
    """As an engine hands it over (kvcal.engines)."""
    k, v, instructions, local_bytes, of_append = VARIANTS[name]
    defines = decode_defines(variant(k, v), "bfloat16", False, (9, 0)) | row_defines(True)
    found = resources(cubin("decode", defines, "sm_90"))["decode"]
    assert found.registers * defines["WARPS"] * 32 <= 65536
    assert found.local_bytes <= local_bytes and found.instructions <= instructions + 16
    found = resources(cubin("pack", variant(k, v).defines | row_defines(True), "sm_90"))["append"]
    assert found.local_bytes == 0 and found.registers <= 96 and found.instructions <= of_append + 16


@pytest.mark.parametrize("capability", WARPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_stays_in_its_budget_for_other_heads(shape: tuple[int, int], capability: tuple[int, int]) -> None:
    for name, instructions in zip(("2 bits", "Kitty"), SHAPES[shape], strict=False):
        assert_decode(variant(*VARIANTS[name][:2], *shape), capability, instructions, 32)


# Query heads of a group and tokens of a step: instructions at most, of 2 bits and of Kitty.
STEPS = {(1, 4): (4500, 5200), (4, 2): (5250, 5700), (4, 8): (5250, 5700), (7, 2): (5250, 5700)}


@pytest.mark.parametrize("shape", STEPS)
def test_steps_with_drafts_stay_in_their_budgets(shape: tuple[int, int]) -> None:
    for name, instructions in zip(("2 bits", "Kitty"), STEPS[shape], strict=True):
        k, v, *_, of_append = VARIANTS[name]
        of_step = replace(variant(k, v, 128, shape[0]), lookahead=7, query_tokens=shape[1])
        assert_decode(of_step, (9, 0), instructions, 32)
        found = resources(cubin("pack", of_step.defines, "sm_90"))["append"]
        assert found.local_bytes == 0 and found.registers <= 96 and found.instructions <= of_append


def test_a_step_without_drafts_pays_nothing_for_them() -> None:
    """Which query a thread has divides by the heads of a token: with one token, 80 instructions and a spill."""
    assert_decode(variant(*VARIANTS["2 bits"][:2], 128, 7), (9, 0), 4575, 0)


@pytest.mark.parametrize("capability", WARPS)
def test_a_block_is_as_large_as_its_shared_memory_lets_it(capability: tuple[int, int]) -> None:
    two_bits = variant(*VARIANTS["2 bits"][:2])
    warps, shared_bytes = block_shape(two_bits, capability)
    assert warps == WARPS[capability]
    assert decode_defines(two_bits, "bfloat16", False, capability)["SHARED_BYTES"] == shared_bytes


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (4, 2)])
@pytest.mark.parametrize("capability", WARPS)
def test_the_stages_of_pages_that_shrink_compile(capability: tuple[int, int], bits: tuple[int, int]) -> None:
    """Per token and 128, with λ: PM-KVQ. Finding out where the pages lie costs next to nothing."""
    fmt = Format(2, "token", 128, 1, 128, param_dtype="float32", shrink_at=(1000, 2000, 4000))
    stage = replace(
        Variant(fmt, fmt, 128, "bfloat16", 4, True, False, 0), k_bits=bits[0], v_bits=bits[1], rescale=bits[0] != 16
    )
    arch = f"sm_{capability[0]}{capability[1]}"
    plain, staged = (
        resources(cubin("decode", decode_defines(stage, "bfloat16", False, capability, is_staged), arch))["decode"]
        for is_staged in (False, True)
    )
    assert staged.local_bytes <= plain.local_bytes + 24 and staged.instructions <= plain.instructions + 200
    found = resources(cubin("pack", stage.defines | {"STAGED": 1}, arch))["append"]
    assert found.local_bytes <= 16 and found.registers <= 128
