"""The decode kernel against attention in fp64 over the decoded pages, on a GPU.

What no token lies in is poisoned: pages beyond the written ones with 0xff bytes, buffers with NaN, the parts in the
workspace too. Scores are sharp enough for the softmax to matter, and keys carry outlier channels.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.operands import PageCounts, PageTransform, StoredSide
from kvcal.kernels.variants import Variant
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.pages.scores import channel_scores
from kvcal.pages.tiered import TieredLayout
from kvcal.plan.format import RAW, SIDES, Boost, Format, Side, Tier, WindowRule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: kernels run nowhere else"),
]

KITTY = Boost("magnitude", (Tier(4, 0.125),))
MIXKVQ = Boost("magnitude", (Tier(16, 1 / 64), Tier(4, 0.25)))
EMPTY_ROOM = Boost("magnitude", (Tier(16, 1 / 32, 1e9), Tier(8, 0.25, 2.0)))
# Of a row and head, relative, against fp64 over what the pages hold; outputs in fp32 or fp16.
TOLERANCE = 1e-3
LENGTHS = (0, 1, 31, 126, 127, 128, 129, 300, 999, 1000)


def k_format(bits: int, axis: str = "channel", group: int = 128, **more: object) -> Format:
    return Format(bits, axis, group, **more)  # type: ignore[arg-type]


def v_format(bits: int, group: int = 128, **more: object) -> Format:
    return k_format(bits, "token", group, **more)


CASES = {
    **{f"{bits} bits": (k_format(bits), v_format(bits)) for bits in (1, 2, 3, 4, 8)},
    "16 bits": (RAW, RAW),
    "K 3 V 4": (k_format(3), v_format(4)),
    "K 4 V 1": (k_format(4), v_format(1)),
    "K 2 V 16": (k_format(2, num_sink_tokens=5), RAW),
    "K 16 V 2": (RAW, v_format(2, num_sink_tokens=33)),
    "groups of 32": (k_format(2, group=32), v_format(2, 32)),
    "groups of 64": (k_format(3, group=64), v_format(3, 64)),
    "K per token": (k_format(2, "token"), v_format(2)),
    "K per token, groups of 32": (k_format(4, "token", 32), v_format(4)),
    "K per token, groups of 64": (k_format(1, "token", 64), v_format(2, 64)),
    "sinks and windows": (
        k_format(2, num_sink_tokens=32, recent_window=128),
        v_format(2, num_sink_tokens=32, recent_window=128),
    ),
    "K window longer": (k_format(2, num_sink_tokens=1, recent_window=300), v_format(2, num_sink_tokens=1)),
    "V window longer": (k_format(3, num_sink_tokens=40), v_format(2, num_sink_tokens=40, recent_window=140)),
    "window rules": (
        k_format(3, window_rule=WindowRule("clamped", 0.2, 256, 32)),
        v_format(4, window_rule=WindowRule("paged", 0.4, 256)),
    ),
    "Kitty": (k_format(2, boost=KITTY), v_format(2)),
    "Kitty 25 %": (k_format(2, boost=dataclasses.replace(KITTY, tiers=(Tier(4, 0.25),))), v_format(2)),
    "odd slots": (k_format(2, boost=dataclasses.replace(KITTY, tiers=(Tier(4, 0.34),))), v_format(2)),
    "MixKVQ": (k_format(2, group=32, boost=MIXKVQ), v_format(2, 32)),
    "empty room": (k_format(2, boost=EMPTY_ROOM), v_format(2)),
    "8 over 4": (k_format(4, boost=Boost("range", (Tier(8, 0.125),))), v_format(4)),
    "bf16 params": (k_format(2, param_dtype="bfloat16"), v_format(2, param_dtype="bfloat16")),
    "fp32 params": (k_format(2, param_dtype="float32"), v_format(3, param_dtype="float32")),
}


def variant_of(k: Format, v: Format, dim: int = 128, group: int = 4, dtype: str = "bfloat16", **more: bool) -> Variant:
    flags = {"rescale": False, "offset": False} | more
    return Variant(k, v, dim, dtype, group, first_head=0, **flags)  # type: ignore[arg-type]


class Case:
    """A cache after an append: ``lengths`` tokens a row before the step, the new one in the buffer. ``seen``: keys and
    values as they are read back."""

    def __init__(self, variant: Variant, lengths: tuple[int, ...], heads: int, seed: int, outlier: float = 8.0) -> None:
        self.variant, self.heads = variant, heads
        generator = torch.Generator("cuda").manual_seed(seed)
        batch, dim, most = len(lengths), variant.head_dim, max(lengths) + 1
        dtype = CACHE_DTYPES[variant.cache_dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        self.rescale = normal(heads, dim).exp() if variant.rescale else normal(0)
        self.offset = normal(heads, dim) if variant.offset else normal(0)
        k, v = normal(batch, heads, most, dim), normal(batch, heads, most, dim)
        k = k + normal(1, heads, 1, dim)
        k[..., ::17] *= outlier
        v[..., 3] = 0.25
        self.dense = {"k": k.to(dtype), "v": v.to(dtype)}
        self.q = normal(batch, heads * variant.group_heads, dim).to(dtype).float()  # as a model has it
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.seen = {side: self.dense[side].double() for side in SIDES}
        self.stores = {side: self._store(side, lengths, most) for side in SIDES}
        self.tables = {side: self._table(side) for side in SIDES}

    def _store(self, side: Side, lengths: tuple[int, ...], most: int) -> StoredSide:
        fmt, layout, x = self.variant.format(side), self.variant.layout(side), self.dense[side]
        batch, heads, _, dim = x.shape
        sinks = x.new_full((batch, heads, fmt.num_sink_tokens, dim), math.nan)
        buffer = x.new_full((batch, heads, fmt.buffer_tokens, dim), math.nan)
        num_pages = max(1, fmt.num_pages(most) + 1)
        pages = torch.full((batch, num_pages, heads, layout.record_bytes), 255, dtype=torch.uint8, device="cuda")
        for row, length in enumerate(lengths):
            count, first = fmt.num_pages(length), fmt.num_sink_tokens
            stored = min(first, length + 1)
            sinks[row, :, :stored] = x[row, :, :stored]
            for page in range(count):
                tokens = slice(first + page * PAGE_TOKENS, first + (page + 1) * PAGE_TOKENS)
                values = x[row, :, tokens]
                if side == "k" and self.variant.offset:
                    values = values.float() - self.offset[:, None]
                if side == "k" and self.variant.rescale:
                    values = values.float() / self.rescale[:, None]
                if isinstance(layout, TieredLayout):
                    assert fmt.boost is not None
                    pages[row, page] = layout.encode(values, channel_scores(fmt.boost.score, values))
                else:
                    pages[row, page] = layout.encode(values)
                decoded = layout.decode(pages[row, page]).double()
                if side == "k" and self.variant.rescale:
                    decoded = decoded * self.rescale.double()[:, None]
                if side == "k" and self.variant.offset:
                    decoded = decoded + self.offset.double()[:, None]
                self.seen[side][row, :, tokens] = decoded
            rest = x[row, :, first + count * PAGE_TOKENS : length + 1]
            buffer[row, :, : rest.shape[1]] = rest
        return StoredSide(sinks, buffer, pages)

    def _table(self, side: Side) -> Tensor:
        fmt = self.variant.format(side)
        if fmt.window_rule is None:
            return torch.empty(0, dtype=torch.int32, device="cuda")
        counts = [fmt.num_pages(n) for n in range(4096)]
        at = [next(n for n, count in enumerate(counts) if count > page) for page in range(counts[-1])]
        return torch.tensor(at, dtype=torch.int32, device="cuda")

    def workspace(self) -> Tensor:
        """Counters of zero, and poison."""
        from kvcal.kernels.decode import workspace_bytes

        group, device = self.variant.group_heads, self.q.device
        size = workspace_bytes(len(self.lengths), self.heads, group, self.variant.head_dim, device)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        workspace[: -(-len(self.lengths) * self.heads * -(-group // 8) * 4 // 256) * 256] = 0
        return workspace

    def run(
        self,
        scale: float,
        softcap: float = 0.0,
        s_aux: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        workspace: Tensor | None = None,
    ) -> Tensor:
        from kvcal.kernels.decode import launch_decode

        workspace = self.workspace() if workspace is None else workspace
        none = self.q.new_empty(0)
        return launch_decode(
            self.q.to(dtype), *self.stores.values(),
            PageCounts(self.lengths, self.tables["k"], self.tables["v"]), PageTransform(self.rescale, self.offset),
            none if s_aux is None else s_aux, workspace, scale, softcap, self.variant,
        )  # fmt: skip

    def expected(
        self, scale: float, softcap: float = 0.0, s_aux: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        rows = []
        for row, length in enumerate(self.lengths.tolist()):
            group = self.variant.group_heads
            k = self.seen["k"][row, :, : length + 1].repeat_interleave(group, 0)
            v = self.seen["v"][row, :, : length + 1].repeat_interleave(group, 0)
            scores = (k @ self.q[row].to(dtype).double().unsqueeze(-1)).squeeze(-1) * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            if s_aux is not None:
                scores = torch.cat([scores, s_aux.double().unsqueeze(-1)], -1)
            weights = scores.softmax(-1)[:, : length + 1]
            rows.append((weights.unsqueeze(1) @ v).squeeze(1))
        return torch.stack(rows)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest over rows and heads."""
    difference = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    return float(difference.nan_to_num(math.inf).max())


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("name", CASES)
def test_every_format(name: str, dim: int) -> None:
    case = Case(variant_of(*CASES[name], dim=dim), LENGTHS, heads=2, seed=1)
    assert relative_error(case.run(0.4 * dim**-0.5), case.expected(0.4 * dim**-0.5)) <= TOLERANCE


@pytest.mark.parametrize("group", (1, 2, 3, 4, 8, 12, 16))
def test_query_groups(group: int) -> None:
    case = Case(variant_of(k_format(2, boost=KITTY), v_format(2), group=group), LENGTHS, heads=3, seed=2)
    assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE


@pytest.mark.parametrize("name", ("2 bits", "16 bits", "MixKVQ", "sinks and windows"))
def test_half_precision(name: str) -> None:
    case = Case(variant_of(*CASES[name], dtype="float16"), LENGTHS, heads=2, seed=3)
    assert relative_error(case.run(0.06, dtype=torch.float16), case.expected(0.06, dtype=torch.float16)) <= TOLERANCE
    assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE


def test_bfloat16_output_is_the_rounded_result() -> None:
    case = Case(variant_of(*CASES["2 bits"]), LENGTHS, heads=2, seed=4)
    found, expected = case.run(0.06, dtype=torch.bfloat16), case.expected(0.06, dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, expected) <= 2.0**-8


@pytest.mark.parametrize(("rescale", "offset"), ((False, True), (True, False), (True, True)))
@pytest.mark.parametrize("axis", ("channel", "token"))
@pytest.mark.parametrize("group", (4, 12))
def test_rescaled_keys(rescale: bool, offset: bool, axis: str, group: int) -> None:
    formats = k_format(3, axis, num_sink_tokens=4), v_format(3, num_sink_tokens=4)
    case = Case(variant_of(*formats, group=group, rescale=rescale, offset=offset), LENGTHS, heads=2, seed=5)
    assert relative_error(case.run(0.05), case.expected(0.05)) <= TOLERANCE


@pytest.mark.parametrize("name", ("2 bits", "sinks and windows", "16 bits"))
def test_softcap_and_sink_logits(name: str) -> None:
    case = Case(variant_of(*CASES[name]), LENGTHS, heads=2, seed=6)
    s_aux = torch.linspace(-2, 3, 8, device="cuda")
    for softcap, aux in ((2.0, None), (30.0, s_aux), (0.0, s_aux)):
        assert relative_error(case.run(0.1, softcap, aux), case.expected(0.1, softcap, aux)) <= TOLERANCE


@pytest.mark.parametrize("outlier", (1.0, 100.0, 1000.0))
@pytest.mark.parametrize("name", ("2 bits", "4 bits", "K per token", "Kitty"))
def test_outliers_and_sharp_or_flat_attention(name: str, outlier: float) -> None:
    case = Case(variant_of(*CASES[name]), (5, 600, 1300), heads=2, seed=7, outlier=outlier)
    for scale in (0.0, 1e-3, 0.02 / outlier, 0.5 / outlier):
        assert relative_error(case.run(scale), case.expected(scale)) <= TOLERANCE


@pytest.mark.parametrize(
    ("batch", "heads", "length"), ((1, 1, 5000), (1, 8, 20000), (70, 3, 200), (300, 2, 40), (3, 8, 4095))
)
def test_many_and_long_rows(batch: int, heads: int, length: int) -> None:
    lengths = tuple((length * (row + 1)) // batch for row in range(batch))
    case = Case(variant_of(*CASES["2 bits"]), lengths, heads=heads, seed=8)
    assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE


def test_repeats_bit_for_bit_and_leaves_counters_at_zero() -> None:
    case = Case(variant_of(*CASES["Kitty"]), LENGTHS, heads=2, seed=9)
    first = case.run(0.06)
    assert all(torch.equal(first, case.run(0.06)) for _ in range(20))


@pytest.mark.parametrize("name", ("2 bits", "sinks and windows", "16 bits"))
@pytest.mark.parametrize("batch", (513, 1100))
def test_rows_beyond_one_launch(batch: int, name: str) -> None:
    lengths = tuple(row * 37 % 300 for row in range(batch))
    case = Case(variant_of(*CASES[name]), lengths, heads=1, seed=10)
    workspace = case.workspace()
    first = case.run(0.06, workspace=workspace)
    assert relative_error(first, case.expected(0.06)) <= TOLERANCE
    assert all(torch.equal(case.run(0.06, workspace=workspace), first) for _ in range(3))


@pytest.mark.parametrize("name", ("2 bits", "4 bits", "Kitty", "sinks and windows", "16 bits"))
def test_the_sum_that_is_divided_by(name: str) -> None:
    """A sink logit as large as the log-sum-exp of a head's scores takes half of the weight."""
    case, scale = Case(variant_of(*CASES[name]), (1000,), heads=2, seed=14), 0.1
    keys = case.seen["k"][0].repeat_interleave(case.variant.group_heads, 0)
    log_sum = ((keys @ case.q[0].double().unsqueeze(-1)).squeeze(-1) * scale).logsumexp(-1)
    for shift in (0.0, -3.0, 3.0):
        found = case.run(scale, s_aux=(log_sum + shift).float())
        expected = case.expected(scale) / (1 + math.exp(shift))
        assert relative_error(found, expected) <= TOLERANCE


def test_lengths_beyond_the_room_read_nothing_outside() -> None:
    """A replayed graph knows no end: it must stay inside what was allocated (``append`` reports it)."""
    case = Case(variant_of(*CASES["sinks and windows"]), (700, 300), heads=2, seed=11)
    case.lengths += 100_000
    assert case.run(0.06).shape == case.q.shape
    torch.cuda.synchronize()
