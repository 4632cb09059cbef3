"""What ``append``, ``pack`` and ``unpack`` must store: the torch reference, on the CPU, for formats over the whole
range that a plan can hold; and tokens that try the quantizer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES, AttentionGeometry
from kvcal.kernels.macros import AXES, DTYPES, side_defines
from kvcal.pages.codec import PageCodec
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import Boost, Format, Side, Tier, WindowRule
from kvcal.plan.layer import LayerPlan

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

    @property
    def name(self) -> str:
        fmt = self.fmt
        parts = [self.side, f"{fmt.num_bits}b", f"{fmt.axis}{fmt.group_size}", f"D{self.dim}"]
        parts += [fmt.param_dtype, self.cache]
        if fmt.boost is not None:
            parts += [fmt.boost.score, *(f"{tier.num_bits}b{tier.share}" for tier in fmt.boost.tiers)]
        return "-".join([*parts, "rescale" * self.rescale, "offset" * self.offset]).rstrip("-")

    @property
    def defines(self) -> dict[str, int]:
        return side_defines(self.side, self.fmt, self.dim, self.cache, self.fmt.num_bits) | {
            "DTYPE": DTYPES[self.cache],
            "K_RESCALE": int(self.rescale),
            "K_OFFSET": int(self.offset),
            "GROUP_HEADS": GROUP_HEADS,
        }

    def codec(self) -> PageCodec:
        """The reference; its ``rescale`` and ``offset`` [n, 1, D] or None are what a kernel is given."""
        geometry = AttentionGeometry(0, NUM_HEADS * GROUP_HEADS, NUM_HEADS, self.dim, self.dim)
        k, v = (self.fmt, Format(2)) if self.side == "k" else (Format(2), self.fmt)
        plan = LayerPlan(geometry, (k,), (v,), k_rescale=self.rescale, k_offset=self.offset)
        generator = torch.Generator().manual_seed(3)
        tensors = {
            "layers.0.k_rescale": 0.2 + 3 * torch.rand(NUM_HEADS, self.dim, generator=generator),
            "layers.0.k_offset": torch.randn(NUM_HEADS, self.dim, generator=generator),
        }
        return PageCodec.of_layer(plan, self.side, self.fmt, HEADS, self.cache, tensors)

    def tokens(self, *shape: int) -> Tensor:
        """[*shape, D] in the cache's dtype: channels of unlike size, some constant, some alike, some with outliers."""
        generator = torch.Generator().manual_seed(sum(shape))
        x = torch.randn(*shape, self.dim, generator=generator) * (0.1 + 5 * torch.rand(self.dim, generator=generator))
        x = x + torch.randn(self.dim, generator=generator)
        x[..., 3], x[..., 5] = 2.5, -1e-7
        x[..., 9] = x[..., 8]
        x[..., 11] *= torch.where(torch.rand(shape, generator=generator) > 0.98, 100, 1)
        return x.to(CACHE_DTYPES[self.cache])


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
    # Heads whose planes have rows one after the other, segments of 1 or 2 bytes, padding, or more than 128 channels.
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
    Case("k", boosted("random", Tier(4, 0.125)), 96, "float16"),
    Case("k", boosted("range", Tier(16, 0.25, 2.0), Tier(4, 0.5, 0.9), group=32), 64),
    Case("k", boosted("range", Tier(16, 0.05), Tier(8, 0.1), Tier(4, 0.2)), 72, offset=True),
    Case("k", boosted("range", Tier(8, 0.3, 1e9), Tier(4, 0.1, -1.0)), 128, "float16"),
    Case("k", boosted("query_magnitude", Tier(4, 0.125)), 256),
    Case("k", MIXKVQ, rescale=True),
    Case("k", MIXKVQ, 64, "float16"),
]
PACKED = UNIFORM + TIERED


def reference_pages(case: Case, codec: PageCodec, x: Tensor, first_page: int, query_mean: Tensor | None) -> Tensor:
    """x [n, 128 P, D]: pages first_page ... of one row -> records [P, n, record_bytes]; query_mean [n, D]."""
    by_page = x.unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
    mean = None if query_mean is None else query_mean.expand(len(by_page), -1, -1)
    return codec.encode(by_page, torch.arange(first_page, first_page + len(by_page)), case.fmt.num_bits, mean)


def page_table(fmt: Format, max_pages: int) -> Tensor | None:
    """int32 [max_pages]: with how many tokens each page is due; None without a window rule."""
    if fmt.window_rule is None:
        return None
    found = []
    for tokens in itertools.count():
        while fmt.num_pages(tokens) > len(found):
            found.append(tokens)
        if len(found) >= max_pages:
            return torch.tensor(found[:max_pages], dtype=torch.int32)


RULE = WindowRule("clamped", 0.3, 150, 10)
PAGED = WindowRule("paged", 0.6, 200)
