"""Which kernel serves ``decode``, and what the plain one costs. Needs no GPU."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cubin_resources import old_compiler_bytes, resources
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcal.geometry import AttentionGeometry
from kvcal.kernels import decode
from kvcal.kernels.choice import MAX_HEAD_DIM, is_plain, is_wide, key_lift, plain_reasons, refusals
from kvcal.kernels.compile import cubin
from kvcal.kernels.decode import MAX_HEADS, plain_defines, plain_shape
from kvcal.kernels.variants import VARIANTS, Variant
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Boost, Format, Tier
from kvcal.systems.kitty.tiered import TieredLayout

K, V = Format(2, "channel"), Format(2)
K_SINKS, V_SINKS = replace(K, num_sink_tokens=4), replace(V, num_sink_tokens=9)
TOKENS = (Format(3, "token", 32), Format(3, "token", 32))
KITTY = Boost("magnitude", (Tier(4, 0.125),))
MIXKVQ = (Format(2, "channel", 32, boost=Boost("magnitude", (Tier(16, 1 / 64), Tier(4, 0.25)))), Format(2, "token", 32))
# Bytes of shared memory that a block gets on sm_89, sm_80 and sm_90.
ROOMS = (99 * 1024, 163 * 1024, 227 * 1024)


def variant(k: Format, v: Format, dim: int = 128, group: int = 4, **more) -> Variant:
    return Variant(k, v, dim, "bfloat16", group, **({"rescale": False, "offset": False} | more))


def test_the_plain_kernel_serves_what_the_folded_one_does_not() -> None:
    for dim in (64, 128):
        for pair in ((K, V), (K_SINKS, replace(V, num_sink_tokens=4)), (RAW, V_SINKS), (K_SINKS, RAW), MIXKVQ, TOKENS):
            assert not is_plain(variant(*pair, dim=dim))
    for dim in (96, 192, 256):
        boosted = (replace(K, boost=KITTY), V)  # rows of 12, 24 and 32 slots
        for pair in ((K, V), (K_SINKS, replace(V, num_sink_tokens=4)), (Format(4), V), boosted):
            assert not is_plain(variant(*pair, dim=dim))
        for pair in (
            (RAW, V),
            (K, RAW),
            MIXKVQ,
            (K, Format(2, param_dtype="float32")),
            (K_SINKS, replace(V, recent_window=9)),
        ):
            reason, *_ = plain_reasons(variant(*pair, dim=dim))
            assert reason == f"head size {dim} with these formats, where the fast kernel takes 64, 128"
    for dim in (16, 32, 72, 80, 160, 512):
        (reason,) = plain_reasons(variant(K, V, dim))
        assert reason == f"head size {dim}, where the fast kernel takes 64, 96, 128, 192, 256"
        assert is_plain(variant(K, V, dim))
    (reason,) = plain_reasons(variant(K_SINKS, V_SINKS))
    assert "4 sink tokens of keys and 9 of values" in reason
    assert len(list(plain_reasons(variant(K_SINKS, V_SINKS, 80)))) == 2
    # Pages of 16 bits are read token by token.
    assert not is_plain(variant(RAW, V_SINKS)) and not is_plain(variant(K_SINKS, RAW))
    asked = replace(variant(K, V), plain=True)
    assert is_plain(asked) and not list(plain_reasons(asked))
    assert VARIANTS[asked.number] == asked != variant(K, V)


def test_tiles_of_eight_heads_serve_larger_groups() -> None:
    """Of formats that they take; others are served by tiles of four."""
    rotated = Format(2, quantizer="rotated")
    ones = Format(3, "channel"), Format(1)
    for pair in ((K, V), (replace(K, boost=KITTY), V), (rotated, rotated), ones):
        assert [is_wide(variant(*pair, group=group)) for group in (1, 4, 5, 8, 16)] == [False, False, True, True, True]
        assert is_wide(variant(*pair, dim=64, group=8)) and is_wide(variant(*pair, dim=256, group=1))
    for k, v in (
        (replace(K, group_size=32), V), (RAW, V), (K, replace(V, param_dtype="bfloat16")),
        (K, replace(V, group_size=32)), (K, replace(V, recent_window=9)), (Format(4, "channel"), V),
    ):  # fmt: skip
        assert not is_wide(variant(k, v, group=8)) and decode.pass_heads(variant(k, v, group=8)) == 8
    assert [decode.pass_heads(variant(K, V, group=group)) for group in (1, 4, 5, 8, 16)] == [4, 4, 8, 8, 8]
    assert decode.pass_heads(variant(K, V, 256, 1)) == 8
    assert is_wide(variant(Format(4, "channel"), Format(4), 64, 8))
    assert is_plain(variant(Format(8, "channel"), Format(8), 256, 8))


@pytest.mark.parametrize("room", ROOMS)
def test_every_shape_fits(room: int) -> None:
    for dim in range(8, MAX_HEAD_DIM + 1, 8):
        for group in (*range(1, 18), 32, 48, 64, 71):
            shape = plain_shape(dim, group, room)
            passes = -(-group // shape.heads)
            assert 1 <= shape.heads <= MAX_HEADS and shape.shared_bytes <= room
            assert shape.blocks * (shape.shared_bytes + 1024) <= room + 1024
            # Both kernels find their counters in the same bytes.
            assert passes <= -(-group // (2 * decode.TILE_HEADS))
    assert plain_shape(256, 16, room).heads == 16


# K, V, head size, query heads a KV head, architecture, bytes of local memory at most; what else the variant
# has.
BUDGETS = {
    "16, one head": (K, V, 16, 1, "sm_80", 0, {}),
    "72, per token": (*TOKENS, 72, 4, "sm_89", 64, {"rescale": True}),
    "80, Kitty": (replace(K, boost=KITTY), V, 80, 4, "sm_90", 64, {}),
    "96, MixKVQ": (*MIXKVQ, 96, 3, "sm_90", 128, {"rescale": True, "offset": True}),
    "128, 8 bits in fp32": (
        Format(8, "channel", 32, param_dtype="float32"), Format(8, "token", 32, param_dtype="float32"), 128, 8,
        "sm_120", 96, {},
    ),
    "192, K 4 bits, V raw": (Format(4, "channel"), RAW, 192, 8, "sm_80", 64, {}),
    "256, 16 heads": (K, V, 256, 16, "sm_90", 120, {}),
    "512, 16 heads": (*MIXKVQ, 512, 16, "sm_120", 0, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_the_plain_kernel_stays_in_its_budget(name: str) -> None:
    """The blocks that share an SM leave each thread 80, 128 or 255 registers; the loops spill nothing to
    speak of."""
    k, v, dim, group, arch, local_bytes, more = BUDGETS[name]
    room = 1024 * decode.SHARED_KIB.get(divmod(int(arch.removeprefix("sm_")), 10), decode.OTHER_SHARED_KIB)
    defines = plain_defines(variant(k, v, dim, group, **more), "bfloat16", group == 3, room)
    found = resources(cubin("decode_plain", defines, arch))["decode"]
    assert found.registers * defines["BLOCKS"] * 256 <= 65536
    assert found.local_bytes <= local_bytes + old_compiler_bytes()
    assert found.instructions <= 7000


def test_queries_of_another_dtype_compile() -> None:
    defines = plain_defines(variant(K, V, 40), "float32", True, ROOMS[0])
    assert resources(cubin("decode_plain", defines, "sm_89"))["decode"].local_bytes <= 64


def layer(k: Format, v: Format, dim: int, index: int = 0) -> LayerPlan:
    return LayerPlan(AttentionGeometry(index, 8, 2, dim, dim), k, v)


def test_what_is_refused_for_its_head_size() -> None:
    for dim in (8, 72, 80, 512):
        assert not list(refusals(layer(K_SINKS, V_SINKS, dim), "bfloat16"))
    for dim in (4, 36, 100, 520):
        (reason,) = refusals(layer(K, V, dim), "bfloat16")
        assert reason == f"head size {dim}; the kernels take multiples of 8 up to 512"


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """Tensors on CUDA without memory; properties of an H200."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return FakeTensorMode()


def test_the_workspace_covers_both_kernels(fake_gpu: FakeTensorMode) -> None:
    device = torch.device("cuda")
    # The most query heads of a pass of the fast kernel.
    for dim, group, heads in (
        (64, 1, 4), (128, 4, 4), (128, 7, 8), (128, 16, 16), (128, 28, 16), (80, 4, 0), (256, 2, 8), (512, 16, 0),
    ):  # fmt: skip
        shape = plain_shape(dim, group, ROOMS[2])
        held = decode.workspace_bytes(3, 2, group, dim, device)
        counters = -(-6 * -(-group // 8) * 4 // 256) * 256
        plain = 4 * (6 * -(-group // shape.heads) + 132 * shape.blocks) * shape.heads * (dim + 4)
        folded = 4 * (6 * -(-group // heads) + 132) * heads * (dim + 2) if heads else 0
        assert held == counters + max(plain, folded)


# Products of keys with limbs of the query have room in their sums.
MAGIC, ZERO = 0x4B400000, 12582912.0  # csrc/decode/instructions.cuh
LARGEST = 32512  # of a query in fixed point, csrc/decode/limbs.cuh
KEYS = {
    **{f"{bits} bits": Format(bits, "channel") for bits in (1, 2, 3, 4, 8)},
    "per token": Format(2, "token"),
    "rotated": Format(2, quantizer="rotated"),
    "Kitty": Format(2, "channel", boost=Boost("magnitude", (Tier(4, 0.125),))),
    "Kitty 90 %": Format(2, "channel", boost=Boost("magnitude", (Tier(4, 0.9),))),
    "8 over 4": Format(4, "channel", boost=Boost("magnitude", (Tier(8, 0.125),))),
    "MixKVQ": Format(2, "channel", boost=Boost("magnitude", (Tier(16, 1 / 64), Tier(4, 0.25)))),
}


def of_keys(key: Format, dim: int) -> Variant:
    return Variant(key, Format(2), dim, "bfloat16", 4, False, False)


def largest_codes(variant: Variant) -> np.ndarray:
    """int64 [head_dim]: of a token whose codes are the largest in all channels."""
    layout = variant.layout("k")
    codes = np.full(variant.head_dim, 2**variant.k.num_bits - 1)
    if isinstance(layout, TieredLayout):
        for (bits, *_), slots in zip(layout.tiers, layout.slots, strict=True):
            codes[slots] = 2**bits - 1 if bits < 16 else 0
    return codes


def product(codes: np.ndarray, fixed: np.ndarray, lift: int) -> float:
    """The kernel's sum of codes times numbers in fixed point: of both limbs, by the bits of floats."""
    low = (fixed + 128) % 256 - 128
    high = (fixed - low) // 256
    sums = [int((codes << lift) @ limb) + MAGIC for limb in (high, low)]
    high_sum, low_sum = (np.array(sums, dtype=np.int64).astype(np.uint32).view(np.float32).astype(np.float64)) - ZERO
    return float(256 * high_sum + low_sum) / 2**lift


@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("name", KEYS)
def test_the_largest_codes_have_room(name: str, dim: int) -> None:
    """Queries whose high limbs, or low limbs, are the largest or the smallest in all channels."""
    variant = of_keys(KEYS[name], dim)
    if is_plain(variant):
        pytest.skip("the plain kernel serves it")
    lift, codes = key_lift(variant), largest_codes(variant)
    assert lift is not None and codes.max() << lift < 256  # a byte holds the code
    for number in (LARGEST, LARGEST - 128, 127 * 256 + 127, -LARGEST, -LARGEST - 128, 127, -128, 1):
        fixed = np.full(dim, number)
        assert product(codes, fixed, lift) == codes @ fixed, number


def test_the_plain_kernel_serves_codes_that_add_up_to_too_much() -> None:
    boosted = Format(4, "channel", boost=Boost("magnitude", (Tier(8, 0.5),)))
    assert key_lift(of_keys(boosted, 192)) == 0
    assert key_lift(of_keys(boosted, 256)) is None
    assert is_plain(of_keys(boosted, 256)) and not is_plain(of_keys(boosted, 192))
