"""The bytes that ``append``, ``pack`` and ``unpack`` must store: the torch reference, on the CPU, for formats over the
whole range that a plan can hold; and tokens that try the quantizer."""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES, AttentionGeometry
from kvcal.kernels import ops
from kvcal.kernels.decode import workspace_bytes
from kvcal.kernels.operands import Memory, PageTransform, Place, QueryStatistic
from kvcal.kernels.variants import AXES, Variant
from kvcal.pages.codec import PageCodec
from kvcal.pages.hadamard import random_signs
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Boost, Format, Side, Tier
from kvcal.systems.kvmix.window_rule import WindowRule

PARAMS = ("float16", "bfloat16", "float32")
CACHES = ("bfloat16", "float16")
DIMS = (128, 64, 80, 96)
NUM_HEADS, HEADS = 5, slice(1, 4)  # the kernels serve the heads in the middle of a layer
GROUP_HEADS = 3


@dataclass(frozen=True)
class Case:
    """One side of a head range."""

    side: Side
    fmt: Format
    dim: int = 128
    cache: str = "bfloat16"
    rescale: bool = False
    offset: bool = False
    feedback: bool = False
    gain: bool = False

    @property
    def name(self) -> str:
        fmt = self.fmt
        parts = [self.side, f"{fmt.num_bits}b", f"{fmt.axis}{fmt.group_size}", f"D{self.dim}"]
        parts += [fmt.quantizer] if fmt.quantizer != "uniform" else []
        parts += ["stripes"] if fmt.stripe_tokens < PAGE_TOKENS else []
        parts += [fmt.param_dtype, self.cache]
        if fmt.boost is not None:
            parts += [fmt.boost.score, *(f"{tier.num_bits}b{tier.share}" for tier in fmt.boost.tiers)]
        parts += ["rescale" * self.rescale, "offset" * self.offset, "feedback" * self.feedback, "gain" * self.gain]
        return "-".join(parts).rstrip("-")

    @property
    def variant(self) -> Variant:
        """The other side has 16 bits."""
        k, v = (self.fmt, RAW) if self.side == "k" else (RAW, self.fmt)
        fed = {f"{self.side}_feedback": self.feedback, "v_gain": self.gain}
        return Variant(k, v, self.dim, self.cache, GROUP_HEADS, self.rescale, self.offset, **fed)

    def transform(self, device: str) -> PageTransform:
        codec, empty = self.codec(), torch.empty(0, self.dim)
        given = (empty if x is None else x.flatten(0, 1) for x in (codec.rescale, codec.offset))
        factor, signs = (torch.empty(0) if x is None else x for x in (codec.feedback, codec.signs))
        return PageTransform(*(x.to(device) for x in (*given, factor, factor, signs, signs)))

    def codec(self) -> PageCodec:
        """The reference; its ``rescale`` and ``offset`` [n, 1, D] or None are what a kernel is given."""
        geometry = AttentionGeometry(0, NUM_HEADS * GROUP_HEADS, NUM_HEADS, self.dim, self.dim)
        k, v = (self.fmt, Format(2)) if self.side == "k" else (Format(2), self.fmt)
        fed = {f"{self.side}_feedback": self.feedback}
        plan = LayerPlan(geometry, k, v, k_rescale=self.rescale, k_offset=self.offset, **fed)
        generator = torch.Generator().manual_seed(3)
        tensors = {
            "layers.0.k_rescale": 0.2 + 3 * torch.rand(NUM_HEADS, self.dim, generator=generator),
            "layers.0.k_offset": torch.randn(NUM_HEADS, self.dim, generator=generator),
            f"layers.0.{self.side}_feedback": feedback_of(NUM_HEADS, self.dim, self.gain),
            f"layers.0.{self.side}_signs": random_signs(self.dim, 2),
        }
        codec = PageCodec.of_layer(plan, self.side, self.cache, tensors)
        of_heads = {name: getattr(codec, name) for name in ("rescale", "offset", "feedback")}
        count = HEADS.stop - HEADS.start
        return replace(
            codec, num_heads=count, **{name: None if x is None else x[HEADS] for name, x in of_heads.items()}
        )

    def tokens(self, *shape: int) -> Tensor:
        """[*shape, D] in the cache's dtype: channels of unlike size, constant, alike, with outliers."""
        generator = torch.Generator().manual_seed(sum(shape))
        x = torch.randn(*shape, self.dim, generator=generator) * (0.1 + 5 * torch.rand(self.dim, generator=generator))
        x = x + torch.randn(self.dim, generator=generator)
        x[..., 3], x[..., 5] = 2.5, -1e-7
        x[..., 9] = x[..., 8]
        x[..., 11] *= torch.where(torch.rand(shape, generator=generator) > 0.98, 100, 1)
        return x.to(CACHE_DTYPES[self.cache])


def feedback_of(num_heads: int, dim: int, has_gain: bool = False) -> Tensor:
    """A factor of error feedback: [n, D (D + 1) / 2] fp16; with gains of the channels, [n, D] more."""
    generator = torch.Generator().manual_seed(5)
    factor = torch.randn(num_heads, dim * (dim + 1) // 2, generator=generator) * 0.2
    gains = 0.8 + torch.rand(num_heads, dim * has_gain, generator=generator)
    return torch.cat([factor, gains], 1).half()


def _every_uniform_format() -> list[Case]:
    """All bits, axes and groups; head sizes and dtypes take turns."""
    combinations = [("k", axis) for axis in AXES] + [("v", "token")]
    found = []
    for i, ((side, axis), bits, group) in enumerate(itertools.product(combinations, (1, 2, 3, 4, 8), (32, 64, 128))):
        fmt = Format(bits, axis, group, 5, param_dtype=PARAMS[i // 4 % 3])
        found.append(Case(side, fmt, DIMS[i % 4], CACHES[i // 2 % 2], rescale=side == "k" and i % 5 == 0))
    return found


def boosted(score: str, *tiers: Tier, num_bits: int = 2, group: int = 128, param: str = "float16") -> Format:
    return Format(num_bits, "channel", group, 5, boost=Boost(score, tiers), param_dtype=param)


KITTY = boosted("magnitude", Tier(4, 0.125))
MIXKVQ = boosted("query_range", Tier(16, 0.0625, 8.5), Tier(4, 0.25, 3.5), param="bfloat16")

UNIFORM = [
    *_every_uniform_format(),
    *(Case(side, Format(16), dim, cache) for side, dim, cache in [("k", 128, "bfloat16"), ("v", 80, "float16")]),
    # Heads whose planes have rows one after the other, segments of 1 or 2 bytes, padding, or more than 128
    # channels.
    Case("k", Format(3, "channel", 64), 16),
    Case("k", Format(3, "token", 32), 32, "float16"),
    Case("k", Format(2, "channel", 32), 72, offset=True),
    Case("k", Format(3, "channel", 128), 256, rescale=True),
    Case("v", Format(3, "token", 32), 88),
    Case("v", Format(1, "token", 64), 256, "float16"),
]
TIERED = [
    Case("k", KITTY),
    Case("k", boosted("magnitude", Tier(4, 0.25)), rescale=True, offset=True),
    Case("k", boosted("magnitude", Tier(4, 0.25), group=32, param="float32"), 64, "float16", offset=True),
    Case("k", boosted("variance", Tier(8, 0.25), num_bits=4, group=64), 128),
    Case("k", boosted("variance", Tier(8, 0.1), param="bfloat16"), 80, rescale=True),
    Case("k", boosted("magnitude", Tier(4, 0.125)), 96, "float16"),
    Case("k", boosted("range", Tier(16, 0.25, 2.0), Tier(4, 0.5, 0.9), group=32), 64),
    Case("k", boosted("range", Tier(16, 0.05), Tier(8, 0.1), Tier(4, 0.2)), 72, offset=True),
    Case("k", boosted("range", Tier(8, 0.3, 1e9), Tier(4, 0.1, -1.0)), 128, "float16"),
    Case("k", boosted("query_magnitude", Tier(4, 0.125)), 256),
    Case("k", MIXKVQ, rescale=True),
    Case("k", MIXKVQ, 64, "float16"),
]
FED = [
    Case("k", Format(2, "channel", 128, 5), feedback=True),
    Case("k", Format(3, "channel", 32), 80, "float16", rescale=True, offset=True, feedback=True),
    Case("k", Format(1, "token", 64), 64, feedback=True),
    Case("v", Format(2, "token", 128), feedback=True),
    Case("v", Format(3, "token", 32, param_dtype="float32"), 96, "float16", feedback=True),
    Case("v", Format(8, "token", 64), 16, feedback=True),
    Case("k", KITTY, feedback=True),
    Case("k", MIXKVQ, 64, "float16", rescale=True, feedback=True),
    Case("k", boosted("range", Tier(16, 0.05), Tier(8, 0.1), Tier(4, 0.2)), 72, offset=True, feedback=True),
]
ROTATED = [
    Case(side, Format(bits, "token", size, 5, quantizer="rotated"), dim, cache, **more)
    for side, bits, size, dim, cache, more in [
        ("k", 2, 128, 128, "bfloat16", {"rescale": True, "offset": True}),
        ("k", 3, 64, 64, "float16", {"feedback": True}),
        ("k", 1, 32, 80, "bfloat16", {"rescale": True}),
        ("k", 8, 128, 96, "float16", {}),
        ("v", 2, 128, 128, "bfloat16", {"feedback": True}),
        ("v", 4, 64, 96, "bfloat16", {}),
        ("v", 3, 32, 72, "float16", {}),
        ("v", 2, 128, 24, "bfloat16", {"feedback": True}),
        ("v", 2, 64, 80, "float16", {"feedback": True, "gain": True}),
        # Tokens of more than 128 channels, also of blocks that not all warps of a team have.
        ("k", 2, 128, 256, "bfloat16", {"rescale": True, "offset": True, "feedback": True}),
        ("v", 3, 128, 256, "float16", {"feedback": True, "gain": True}),
        ("v", 4, 64, 136, "bfloat16", {"feedback": True}),
        ("k", 8, 32, 192, "float16", {}),
    ]
]
PACKED = UNIFORM + TIERED + FED + ROTATED


def reference_pages(case: Case, codec: PageCodec, x: Tensor, query_mean: Tensor | None) -> Tensor:
    """x [n, 128 P, D]: pages of one row -> records [P, n, record_bytes]; query_mean [n, D]."""
    by_page = x.unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
    mean = None if query_mean is None else query_mean.expand(len(by_page), -1, -1)
    return codec.encode(by_page, torch.arange(len(by_page)), case.fmt.num_bits, mean)


def read_at(fmt: Format, max_pages: int) -> Tensor:
    """int32 [max_pages]: with how many tokens each page begins to be read; nothing without a window rule."""
    found: list[int] = []
    tokens = 0
    while fmt.window_rule is not None and len(found) < max_pages:
        found += [tokens] * (fmt.pages_read(tokens) - len(found))
        tokens += 1
    return torch.tensor(found[:max_pages], dtype=torch.int32)


RULE = WindowRule("clamped", 0.3, 150, 10)
PAGED = WindowRule("paged", 0.6, 200)


POISON = 77


class Paged:
    """A head range with memory of its own, fed through the operators: ``step`` by step. Everything that
    nobody wrote is poison. ``seed`` shuffles the slots of pages; ``is_slice``: the heads lie in the middle of
    larger tensors."""

    def __init__(
        self, variant: Variant, batch: int, max_pages: int, device: str = "cpu", heads: int = 2,
        seed: int | None = None, is_slice: bool = False,
    ) -> None:  # fmt: skip
        self.variant, self.device, self.heads = variant, device, heads
        dtype, dim = CACHE_DTYPES[variant.cache_dtype], variant.head_dim
        taken, all_heads = (slice(1, 1 + heads), heads + 2) if is_slice else (slice(0, heads), heads)
        slots = batch * max_pages + 3 * is_slice

        def poisoned(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.full(shape, POISON, dtype=dtype, device=device)[:, taken]

        self.memory = {}
        for side in SIDES:
            fmt, record = variant.format(side), variant.layout(side).record_bytes
            self.memory[side] = Memory(
                poisoned(batch, all_heads, fmt.num_sink_tokens, dim),
                poisoned(batch, all_heads, fmt.ring_tokens(variant.step_tokens), dim),
                poisoned(slots, all_heads, record, dtype=torch.uint8),
            )
        order = torch.arange(slots)
        if seed is not None:
            order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))
        table = order[: batch * max_pages].view(batch, max_pages).int().to(device)
        lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        rules = (read_at(variant.format(side), max_pages).to(device) for side in SIDES)
        self.place = Place(lengths, table, *rules)
        needs_queries = variant.k.needs_queries
        self.queries = QueryStatistic(
            torch.zeros(batch, heads, dim if needs_queries else 0, device=device),
            torch.zeros(batch, heads, dtype=torch.int32, device=device),
        )
        generator = torch.Generator().manual_seed(7)
        shape = (heads, dim)
        rescale, offset = torch.rand(shape, generator=generator) + 0.5, torch.randn(shape, generator=generator)
        self.transform = PageTransform(
            (rescale if variant.rescale else rescale[:0]).to(device),
            (offset if variant.offset else offset[:0]).to(device),
            self._factor(variant.k_feedback),
            self._factor(variant.v_feedback, variant.v_gain),
            *(random_signs(dim, seed).to(device) for seed in (0, 1)),
        )
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        self.nothing = torch.empty(0, device=device)

    def _factor(self, has_feedback: bool, has_gain: bool = False) -> Tensor:
        factor = feedback_of(self.heads, self.variant.head_dim, has_gain)
        return (factor if has_feedback else factor[:0]).to(self.device)

    def append(self, rows: slice, k_new: Tensor, v_new: Tensor, q: Tensor) -> None:
        """Tokens [b, n, D] and queries [b, n G, D] of some rows, whose lengths stay as they are."""
        k, v = (self._of_rows(side, rows) for side in SIDES)
        queries = [part[rows] for part in self.queries]
        ops.append(
            k_new, v_new, q, k, v, queries, self._place(rows), list(self.transform), self.error, self.variant.number,
        )  # fmt: skip

    def decode(self, rows: slice, q: Tensor, scale: float, softcap: float = 0.0, s_aux: Tensor | None = None) -> Tensor:
        """[b, n G, D] of some rows, after ``append``."""
        k, v = (self._of_rows(side, rows) for side in SIDES)
        return ops.decode(
            q, k, v, self._place(rows), list(self.transform), self.nothing if s_aux is None else s_aux,
            self._workspace(), scale, softcap, self.variant.number,
        )  # fmt: skip

    def step(self, rows: slice, k_new: Tensor, v_new: Tensor, q: Tensor) -> None:
        """``append``, and the step is over."""
        self.append(rows, k_new, v_new, q)
        self.place.lengths[rows] += 1

    def records(self, side: Side, row: int) -> Tensor:
        """[P, n, record_bytes] on the CPU: all pages of a row in order, written or not."""
        return self.memory[side].pages[self.place.table[row].long()].cpu()

    def _of_rows(self, side: Side, rows: slice) -> list[Tensor]:
        memory = self.memory[side]
        return [memory.sinks[rows], memory.ring[rows], memory.pages]

    def _place(self, rows: slice) -> list[Tensor]:
        return [self.place.lengths[rows], self.place.table[rows], *self.place[2:]]

    def _workspace(self) -> Tensor:
        if self.device == "cpu":
            return self.nothing
        group, batch = self.variant.group_heads, len(self.place.lengths)
        size = workspace_bytes(batch, self.heads, group, self.variant.head_dim, torch.device(self.device))
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


# Pairs of formats whose steps are compared: alignment, sinks within a page and beyond one, windows, rings
# that wrap.
PAIRS = {
    "2 bits": (Format(2, "channel", 32), Format(2, "token", 32)),
    "sinks": (Format(3, "channel", 64, 4), Format(4, "token", 32, 4)),
    "sinks beyond a page": (Format(2, "channel", 32, 130), Format(2, "token", 32, 130)),
    "windows": (Format(2, "channel", 32, 4, 32), Format(3, "token", 32, 4, 32)),
    "windows of a page": (Format(2, "token", 32, 0, 128), Format(2, "token", 32, 0, 128)),
    "unequal sinks": (Format(2, "channel", 32, 4), Format(2, "token", 32, 130)),
    "unequal windows": (Format(2, "channel", 32, 4, 32), Format(2, "token", 32, 4, 128)),
    "keys of a longer window": (Format(4, "channel", 32, 130, 128), Format(2, "token", 32, 130)),
    "window rules": (Format(3, "channel", 32, 4, window_rule=RULE), Format(4, "token", 32, 4, window_rule=PAGED)),
    "rotated": (Format(2, "token", 32, 4, 32, quantizer="rotated"), Format(3, "token", 128, 4, quantizer="rotated")),
    "stripes": (
        Format(2, "token", 32, 4, 32, quantizer="rotated", stripe_tokens=16),
        Format(3, "token", 128, 4, 32, quantizer="rotated", stripe_tokens=16),
    ),
    "stripes of sinks": (
        Format(4, "token", 64, 37, 7, quantizer="rotated", stripe_tokens=16),
        Format(2, "token", 32, 37, 7, quantizer="rotated", stripe_tokens=16),
    ),
    "rotated values": (Format(2, "channel", 32), Format(2, "token", 32, quantizer="rotated")),
    "keys of 16 bits": (RAW, Format(2, "token", 32, 33)),
    "values of 16 bits": (Format(2, "channel", 32, 33, 32), RAW),
    "16 bits": (RAW, RAW),
    "query scores": (boosted("query_magnitude", Tier(4, 0.25), group=32), Format(2, "token", 32, 5)),
    "queries and a window": (
        Format(2, "channel", 32, 5, 32, boost=Boost("query_range", (Tier(16, 0.125, 1.5), Tier(4, 0.25)))),
        Format(3, "token", 32, 5),
    ),
}


def pair_variant(name: str, dim: int = 16, group: int = 2, cache: str = "bfloat16", **more: bool) -> Variant:
    flags = {"rescale": False, "offset": False} | more
    return Variant(*PAIRS[name], dim, cache, group, **flags)


def states(batch: int, tokens: int, heads: int, dim: int, seed: int = 0) -> Tensor:
    """[B, T, heads, D] in bf16, with an outlier channel."""
    x = torch.randn(batch, tokens, heads, dim, generator=torch.Generator().manual_seed(seed))
    x[..., 1] *= 5
    return x.bfloat16()
