"""Cases of the decode kernel: formats, the memory of a layer, and attention in fp64 over the decoded pages.

What no token lies in is poisoned: slots without a page with 0xff bytes, sinks and rings with NaN, the parts
in the workspace too. Pages lie at scattered slots, heads in the middle of larger tensors. Scores are sharp
enough for the softmax to matter, and keys carry outlier channels.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable

import torch
from kernel_oracle import read_at
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.operands import Memory, PageTransform, Place
from kvcal.kernels.variants import Variant
from kvcal.pages.hadamard import random_signs
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import RAW, SIDES, Boost, Format, Side, Tier
from kvcal.systems.kitty.scores import channel_scores
from kvcal.systems.kitty.tiered import TieredLayout
from kvcal.systems.kvmix.window_rule import WindowRule

KITTY = Boost("magnitude", (Tier(4, 0.125),))
MIXKVQ = Boost("magnitude", (Tier(16, 1 / 64), Tier(4, 0.25)))
ROTATED = {"quantizer": "rotated"}
STRIPES = ROTATED | {"stripe_tokens": 16}
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
    "sinks beyond a page": (k_format(2, num_sink_tokens=130), v_format(2, num_sink_tokens=130)),
    "sinks and a longer window of V": (
        k_format(2, "token", num_sink_tokens=137),
        v_format(3, num_sink_tokens=137, recent_window=300),
    ),
    "K 16 V 2, sinks beyond a page": (RAW, v_format(2, num_sink_tokens=300)),
    "K 2 V 16, sinks beyond a page": (k_format(2, num_sink_tokens=300, recent_window=40), RAW),
    "K window longer": (k_format(2, num_sink_tokens=1, recent_window=300), v_format(2, num_sink_tokens=1)),
    "V window longer": (k_format(3, num_sink_tokens=40), v_format(2, num_sink_tokens=40, recent_window=140)),
    "window rules": (
        k_format(3, window_rule=WindowRule("clamped", 0.2, 256, 32)),
        v_format(4, window_rule=WindowRule("paged", 0.4, 256)),
    ),
    "Kitty": (k_format(2, boost=KITTY), v_format(2)),
    "Kitty 25 %": (k_format(2, boost=dataclasses.replace(KITTY, tiers=(Tier(4, 0.25),))), v_format(2)),
    "Kitty 90 %": (k_format(2, boost=dataclasses.replace(KITTY, tiers=(Tier(4, 0.9),))), v_format(2)),
    "odd slots": (k_format(2, boost=dataclasses.replace(KITTY, tiers=(Tier(4, 0.34),))), v_format(2)),
    "MixKVQ": (k_format(2, group=32, boost=MIXKVQ), v_format(2, 32)),
    "empty room": (k_format(2, boost=EMPTY_ROOM), v_format(2)),
    "8 over 4": (k_format(4, boost=Boost("range", (Tier(8, 0.125),))), v_format(4)),
    "bf16 params": (k_format(2, param_dtype="bfloat16"), v_format(2, param_dtype="bfloat16")),
    "rotated 2 bits": (k_format(2, "token", **ROTATED), v_format(2, **ROTATED)),
    "rotated V": (k_format(2, boost=KITTY), v_format(2, **ROTATED)),
    "rotated K": (k_format(4, "token", 32, **ROTATED), v_format(3)),
    "rotated K, V 16": (k_format(3, "token", num_sink_tokens=5, **ROTATED), RAW),
    "rotated, sinks and windows": (
        k_format(3, "token", 64, num_sink_tokens=37, recent_window=40, **ROTATED),
        v_format(4, 32, num_sink_tokens=37, recent_window=300, **ROTATED),
    ),
    "rotated K, groups of 32": (
        k_format(2, "token", 32, **ROTATED),
        v_format(2, 64, **ROTATED),
    ),
    "stripes": (
        k_format(2, "token", **STRIPES, num_sink_tokens=8, recent_window=112),
        v_format(2, **STRIPES, num_sink_tokens=8, recent_window=112),
    ),
    "stripes of 3 bits": (
        k_format(3, "token", **STRIPES, num_sink_tokens=8, recent_window=112),
        v_format(3, **STRIPES, num_sink_tokens=8, recent_window=112),
    ),
    "stripes of 4 bits": (
        k_format(4, "token", **STRIPES, num_sink_tokens=21, recent_window=16),
        v_format(4, **STRIPES, num_sink_tokens=21, recent_window=16),
    ),
    "stripes, 3 and 4 bits": (
        k_format(3, "token", 64, **STRIPES, num_sink_tokens=37, recent_window=7),
        v_format(4, 32, **STRIPES, num_sink_tokens=37, recent_window=7),
    ),
    "stripes, sinks beyond a page": (
        k_format(4, "token", **STRIPES, num_sink_tokens=130),
        v_format(3, **STRIPES, num_sink_tokens=130),
    ),
    "stripes of 32": (
        k_format(2, "token", **STRIPES | {"stripe_tokens": 32}, num_sink_tokens=8, recent_window=96),
        v_format(3, 64, **STRIPES | {"stripe_tokens": 32}, num_sink_tokens=8, recent_window=96),
    ),
    "fp32 params": (k_format(2, param_dtype="float32"), v_format(3, param_dtype="float32")),
}


def in_turn(names: Iterable[str], *values: int) -> list[tuple[str, int]]:
    """Every name with one of the values: compiling a kernel for each pair takes minutes."""
    return list(zip(names, itertools.cycle(values), strict=False))


def variant_of(k: Format, v: Format, dim: int = 128, group: int = 4, dtype: str = "bfloat16", **more: bool) -> Variant:
    flags = {"rescale": False, "offset": False} | more
    return Variant(k, v, dim, dtype, group, **flags)  # type: ignore[arg-type]


class Case:
    """A cache after an append: ``lengths`` tokens a row before the step, the new one stored. ``seen``: keys
    and values as they are read back. ``seed`` of the tokens; pages lie one after the other unless they are
    ``scattered``. ``alike``: channels, for the query, too; one token of a page has the largest code in all,
    another the smallest."""

    device = "cuda"

    def __init__(
        self, variant: Variant, lengths: tuple[int, ...], heads: int, seed: int, outlier: float = 8.0,
        scattered: bool = True, alike: bool = False,
    ) -> None:  # fmt: skip
        self.variant, self.heads = variant, heads
        generator = torch.Generator(self.device).manual_seed(seed)
        batch, dim, most = len(lengths), variant.head_dim, max(lengths) + 1
        dtype = CACHE_DTYPES[variant.cache_dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device, generator=generator)

        self.signs = {side: random_signs(dim, seed).to(self.device) for seed, side in enumerate(SIDES)}
        self.rescale = normal(heads, dim).exp() if variant.rescale else normal(0)
        self.offset = normal(heads, dim) if variant.offset else normal(0)
        k, v = normal(batch, heads, most, dim), normal(batch, heads, most, dim)
        k = k + normal(1, heads, 1, dim)
        k[..., ::17] *= outlier
        v[..., 3] = 0.25
        if alike:
            k = 0.9 * normal(batch, heads, most, dim).tanh()
            k[..., 5::PAGE_TOKENS, :], k[..., 6::PAGE_TOKENS, :] = 1.0, -1.0
            k[..., 5::PAGE_TOKENS, 0] = -1.0  # a range for scales per token
        self.dense = {"k": k.to(dtype), "v": v.to(dtype)}
        self.q = normal(batch, heads * variant.group_heads, dim).to(dtype).float()  # as a model has it
        if alike:
            self.q.fill_(1.0)
        self.seen = {side: self.dense[side].double() for side in SIDES}
        num_pages = most // PAGE_TOKENS + 1
        slots = torch.randperm(batch * num_pages) if scattered else torch.arange(batch * num_pages)
        self.place = Place(
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            slots.view(batch, num_pages).int().to(self.device),
            *(read_at(variant.format(side), 40).to(self.device) for side in SIDES),
        )  # fmt: skip
        self.spare = 2 if scattered else 0
        self.stores = {side: self._store(side, lengths) for side in SIDES}

    @property
    def transform(self) -> PageTransform:
        signs = {f"{side}_signs": signs for side, signs in self.signs.items()}
        return PageTransform(self.rescale, self.offset, **signs)

    @property
    def lengths(self) -> Tensor:
        return self.place.lengths

    def _store(self, side: Side, lengths: tuple[int, ...]) -> Memory:
        fmt, layout, x = self.variant.format(side), self.variant.layout(side), self.dense[side]
        (batch, heads, _, dim), all_heads = x.shape, x.shape[1] + self.spare
        own = slice(self.spare // 2, self.spare // 2 + heads)
        table = self.place.table.long()
        sinks = x.new_full((batch, all_heads, fmt.num_sink_tokens, dim), math.nan)[:, own]
        ring = x.new_full((batch, all_heads, fmt.ring_tokens(), dim), math.nan)[:, own]
        shape = (table.numel(), all_heads, layout.record_bytes)
        pages = torch.full(shape, 255, dtype=torch.uint8, device=self.device)[:, own]
        for row, length in enumerate(lengths):
            for page in range(fmt.num_pages(length + 1)):
                packed = min(PAGE_TOKENS, fmt.tokens_packed(length + 1) - PAGE_TOKENS * page)
                decoded = self._packed(side, row, page, pages[int(table[row, page])], packed)
                first = max(page * PAGE_TOKENS, fmt.num_sink_tokens)
                stop = min((page + 1) * PAGE_TOKENS, fmt.tokens_read(length))
                if first < stop:
                    self.seen[side][row, :, first:stop] = decoded[:, first % PAGE_TOKENS :][:, : stop - first]
            stored = min(fmt.num_sink_tokens, length + 1)
            sinks[row, :, :stored] = x[row, :, :stored]
            recent = torch.arange(max(0, length + 1 - fmt.ring_tokens()), length + 1, device=self.device)
            ring[row, :, recent % fmt.ring_tokens()] = x[row, :, recent]
        return Memory(sinks, ring, pages)

    def _packed(self, side: Side, row: int, page: int, record: Tensor, count: int) -> Tensor:
        """The first ``count`` of the page's tokens, as they are read back; their record is written."""
        fmt, layout = self.variant.format(side), self.variant.layout(side)
        tokens = torch.arange(page * PAGE_TOKENS, page * PAGE_TOKENS + count, device=self.device)
        last = tokens // fmt.stripe_tokens * fmt.stripe_tokens + fmt.stripe_tokens - 1
        tokens = tokens.maximum(last.clamp(max=fmt.num_sink_tokens))
        values = self.dense[side][row][:, tokens]
        if side == "k" and self.variant.offset:
            values = values.float() - self.offset[:, None]
        if side == "k" and self.variant.rescale:
            values = values.float() / self.rescale[:, None]
        if isinstance(layout, TieredLayout):
            assert fmt.boost is not None
            record.copy_(layout.encode(values, channel_scores(fmt.boost.score, values)))
            decoded = layout.decode(record).double()
        else:
            operands = {"signs": self.signs[side]}
            whole = count == PAGE_TOKENS
            record.copy_(layout.encode_pages(values, operands) if whole else layout.encode_tokens(values, operands, 0))
            decoded = layout.decode_pages(record, len(record), operands).double()[:, :count]
        if side == "k" and self.variant.rescale:
            decoded = decoded * self.rescale.double()[:, None]
        if side == "k" and self.variant.offset:
            decoded = decoded + self.offset.double()[:, None]
        return decoded

    def workspace(self) -> Tensor:
        """Counters of zero, and poison."""
        from kvcal.kernels.decode import workspace_bytes

        group, device = self.variant.group_heads, self.q.device
        size = workspace_bytes(len(self.lengths), self.heads, group, self.variant.head_dim, device)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=self.device)
        workspace[-(-(-len(self.lengths) * self.heads * -(-group // 8) * 4 // 256) * 256) :] = 0
        return workspace

    def run(
        self, scale: float, softcap: float = 0.0, s_aux: Tensor | None = None, dtype: torch.dtype = torch.float32,
        workspace: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        from kvcal.kernels.decode import launch_decode

        workspace = self.workspace() if workspace is None else workspace
        none = self.q.new_empty(0)
        return launch_decode(
            self.q.to(dtype), *self.stores.values(), self.place, self.transform,
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
