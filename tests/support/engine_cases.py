"""An engine's memory without an engine: blocks and rings that are handed out at random, poisoned where nobody
wrote."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from cache_cases import HEAD_DIM, NUM_HEADS, llama_plan
from kernel_oracle import feedback_of
from static_cases import random_bases
from torch import Tensor

from kvcal import Plan, PlanCache
from kvcal.engines.prefill import Logits
from kvcal.engines.scratch import Chunk, Decodes, Scratch
from kvcal.engines.shard import HeadShard
from kvcal.engines.step import PagedStep
from kvcal.plan.page_format import RAW, Boost, Format, Side, Tier
from kvcal.systems.kvmix.window_rule import WindowRule

PAGE = 128
POISON = 255  # a NaN in every dtype


def boosted(score: str, *tiers: Tier) -> Format:
    return Format(2, "channel", 32, boost=Boost(score, tiers or (Tier(4, 0.25),)))


BY_QUERIES = ("query_magnitude", "query_range")
V2 = Format(2, "token", 32)
# Every kind of format that an engine takes: formats of K and V.
TAKEN: dict[str, tuple[Format, Format]] = {
    **{f"{bits} bits by channel": (Format(bits, "channel", 64), Format(bits, "token", 32)) for bits in (1, 2, 3, 4, 8)},
    "keys by token": (Format(3, "token", 32, param_dtype="bfloat16"), Format(4, "token", 64, param_dtype="float32")),
    "16 bits": (RAW, RAW),
    "keys of 16 bits": (RAW, V2),
    "values of 16 bits": (Format(2, "channel", 128), RAW),
    **{score: (boosted(score), V2) for score in ("magnitude", "variance", "range", *BY_QUERIES)},
    "three tiers": (boosted("magnitude", Tier(16, 0.125), Tier(8, 0.125, 0.5), Tier(4, 0.25)), V2),
    "rotated": (Format(4, "token", 64, quantizer="rotated"), Format(2, "token", 32, quantizer="rotated")),
    "rotated values": (boosted("magnitude"), Format(3, "token", 64, quantizer="rotated")),
}
# With tokens at 16 bits besides the pages: engines take them where prefixes are not cached.
UNSHARED: dict[str, tuple[Format, Format]] = {
    "sinks": (Format(2, "channel", 64, num_sink_tokens=4), Format(2, "token", 32, num_sink_tokens=130)),
    "windows": (Format(2, "channel", 32, recent_window=64), Format(2, "token", 32, recent_window=300)),
    "sinks and window": (
        replace(boosted("query_magnitude"), num_sink_tokens=5, recent_window=128),
        Format(3, "token", 32, num_sink_tokens=5, recent_window=128),
    ),
    "stripes": (
        Format(4, "token", 64, 21, 23, quantizer="rotated", stripe_tokens=16),
        Format(3, "token", 32, 21, 23, quantizer="rotated", stripe_tokens=16),
    ),
    "window rules": (
        Format(4, "channel", 32, window_rule=WindowRule("paged", 0.6, 200)),
        Format(2, "token", 64, window_rule=WindowRule("clamped", 0.5, 200), num_sink_tokens=1),
    ),
}
TRANSFORMED = ("2 bits by channel", "three tiers", "variance")


def plan_for(name: str, num_kv_heads: int = 4, cache_dtype: str = "float32", num_layers: int = 1) -> Plan:
    return llama_plan(*(TAKEN | UNSHARED)[name], num_kv_heads, cache_dtype, num_layers)


def transformed(plan: Plan) -> Plan:
    """λ, offset and error feedback on all layers."""
    heads = plan.layers[0].attention.num_kv_heads
    layers = tuple(
        replace(layer, k_rescale=True, k_offset=True, k_feedback=True, v_feedback=True) for layer in plan.layers
    )
    generator, tensors = torch.Generator().manual_seed(3), {}
    for layer in layers:
        prefix = f"layers.{layer.geometry.index}"
        tensors[f"{prefix}.k_rescale"] = torch.rand(heads, HEAD_DIM, generator=generator) + 0.5
        tensors[f"{prefix}.k_offset"] = torch.randn(heads, HEAD_DIM, generator=generator)
        tensors |= {f"{prefix}.{side}_feedback": feedback_of(heads, HEAD_DIM) for side in ("k", "v")}
    return replace(plan, layers=layers, tensors=tensors)


def based(plan: Plan) -> Plan:
    """Bases of both sides on all layers of rotated pages, and of values error feedback with gains."""
    generator, tensors = torch.Generator().manual_seed(4), dict(plan.tensors)
    for layer in plan.layers:
        prefix, heads, dim = f"layers.{layer.geometry.index}", layer.attention.num_kv_heads, layer.attention.k_head_dim
        tensors |= random_bases(prefix, heads, dim, generator)
        tensors[f"{prefix}.v_feedback"] = feedback_of(heads, dim)
        tensors[f"{prefix}.v_gain"] = (torch.rand(heads, dim, generator=generator) + 0.5).half()
    has = dict.fromkeys(("k_basis", "v_basis", "v_feedback", "v_gain"), True)
    return replace(plan, layers=tuple(replace(layer, **has) for layer in plan.layers), tensors=tensors)


class Memory:
    """One layer's blocks and rings, as an engine of ``num_blocks`` lends them; block and ring 0 are nobody's.
    They lie ``gap`` bytes apart, as those of other layers would have it."""

    def __init__(
        self, shard: HeadShard, num_blocks: int = 64, num_rings: int = 9, device: str = "cpu", gap: int = 48
    ) -> None:
        self.device = torch.device(device)
        self.scratch = Scratch(num_rings, 4096, self.device)
        self.step = PagedStep(shard, 0, self.scratch)
        sizes = (num_blocks, shard.block_bytes(0)), (num_rings, shard.ring_bytes(0))
        self.blocks, self.rings = (
            torch.full((count, size + gap), POISON, dtype=torch.uint8, device=device)[:, gap:] for count, size in sizes
        )
        self.step.bind(self.blocks, self.rings)
        self.random = random.Random(0)
        self.free_blocks, self.free_rings = list(range(1, num_blocks)), list(range(1, num_rings))
        for free in (self.free_blocks, self.free_rings):
            self.random.shuffle(free)

    def pages(self, side: Side, blocks: list[int]) -> list[Tensor]:
        """The records [P, N, record_bytes] in these blocks."""
        return [self.step.layout.pages(self.blocks, side)[blocks]]


class Sequence:
    """A sequence in an engine's memory, and the same in a dynamic ``PlanCache``. ``shared``: blocks that
    another one filled, which it begins after."""

    def __init__(self, memory: Memory, plan: Plan, shared: list[int] | None = None) -> None:
        self.memory, self.blocks = memory, list(shared or ())
        self.ring = memory.free_rings.pop()
        self.length = PAGE * len(self.blocks)

    def grow(self, tokens: int) -> None:
        while len(self.blocks) * PAGE < self.length + tokens:
            self.blocks.append(self.memory.free_blocks.pop())

    @property
    def table(self) -> Tensor:
        return torch.tensor(self.blocks, dtype=torch.int32, device=self.memory.device)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
        """A chunk: q [T, H, D], k, v [T, N, D]."""
        chunk = self.chunk(len(q))
        self.length += len(q)
        return self.memory.step.extend(q, k, v, chunk, Logits(scale))

    def chunk(self, tokens: int) -> Chunk:
        """The place of so many new tokens."""
        self.grow(tokens)
        return Chunk(self.length, self.table, torch.tensor([self.ring], dtype=torch.int32, device=self.memory.device))


def decode(
    sequences: list[Sequence], q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, kept: list[int] | None = None
) -> Tensor:
    """One token of every sequence: q [B, H, D], k, v [B, N, D]. Or S, [B, S, ...], of which the first
    ``kept`` of each stay; there is a block for the first of them."""
    for sequence in sequences:
        sequence.grow(1)
    width = max(len(sequence.blocks) for sequence in sequences)
    device = sequences[0].memory.device
    table = torch.zeros(len(sequences), width, dtype=torch.int32, device=device)
    for row, sequence in enumerate(sequences):
        table[row, : len(sequence.blocks)] = sequence.table
    lengths = torch.tensor([each.length for each in sequences], dtype=torch.int32, device=device)
    rings = torch.tensor([each.ring for each in sequences], dtype=torch.int32, device=device)
    place = Decodes(lengths, table, rings)
    for sequence, tokens in zip(sequences, kept or [1] * len(sequences), strict=True):
        sequence.length += tokens
    return sequences[0].memory.step.decode(q, k, v, place, Logits(scale))


def cache_records(cache: PlanCache, side: Side) -> list[Tensor]:
    """The records [P, N, record_bytes] of layer 0 of a cache of one sequence."""
    return [cache.layers[0].sides[side].pool.records]


def random_tokens(tokens: int, num_kv_heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D], k, v [T, N, D] that bf16 holds, channel 1 of the keys far from the others."""
    generator = torch.Generator().manual_seed(seed)
    heads = (NUM_HEADS, num_kv_heads, num_kv_heads)
    q, k, v = (torch.randn(tokens, n, HEAD_DIM, generator=generator).bfloat16().float() for n in heads)
    k[..., 1] *= 16.0
    return q * 0.3, k, v
