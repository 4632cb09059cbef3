"""The kernels in an engine's memory against the torch reference in the same blocks, on a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import warnings

import pytest
import torch
from cache_cases import plan_of
from engine_cases import TAKEN, UNSHARED, Memory, Sequence, based, decode, random_tokens, transformed
from torch import Tensor

from kvcal import Plan
from kvcal.engines.prefill import Logits, attend_part, torch_flash
from kvcal.engines.scratch import Decodes
from kvcal.engines.shard import HeadShard
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.plan.page_format import SIDES, Format

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS = 8, 4
TOLERANCE = 2e-2  # bf16 outputs


def plan_for(name: str, dim: int) -> Plan:
    geometry = Geometry("llama", "bfloat16", (AttentionGeometry(0, HEADS, KV_HEADS, dim, dim),))
    return plan_of(geometry, *(TAKEN | UNSHARED)[name])


def tokens(count: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, 8, D], k, v [T, 4, D] in bf16."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(count, heads, dim, generator=generator).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    k[..., 1] *= 16
    return q, k, v


@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize("name", TAKEN | UNSHARED)
def test_steps_are_those_of_the_reference(name: str, dim: int) -> None:
    assert_steps_are_those_of_the_reference(plan_for(name, dim), dim)


def test_steps_in_a_basis_of_large_heads_are_those_of_the_reference() -> None:
    geometry = Geometry("llama", "bfloat16", (AttentionGeometry(0, HEADS, KV_HEADS, 256, 256),))
    stripes = [Format(bits, "token", 128, 8, 112, quantizer="rotated", stripe_tokens=16) for bits in (3, 2)]
    assert_steps_are_those_of_the_reference(based(plan_of(geometry, *stripes)), 256)


def assert_steps_are_those_of_the_reference(plan: Plan, dim: int) -> None:
    """Ragged sequences in shuffled blocks and rings, poisoned where nobody wrote; batches of falling size in
    the same scratch. Pages are the same bytes."""
    memories = [Memory(HeadShard(plan), device=device) for device in ("cpu", "cuda")]
    x = [tokens(800, dim, seed) for seed in range(4)]
    served = [[Sequence(memory, plan) for _ in range(4)] for memory in memories]
    for prompt, *both in zip((1, 127, 128, 500), *served, strict=True):
        at = served[0].index(both[0])
        results = [s.extend(*(t[:prompt].to(s.memory.device) for t in x[at]), scale=0.1).cpu() for s in both]
        torch.testing.assert_close(*results, atol=TOLERANCE, rtol=TOLERANCE)
    for step in range(140):
        rows = range(4) if step < 130 else range(2)
        new = [torch.stack([x[row][part][served[0][row].length] for row in rows]) for part in range(3)]
        results = [
            decode([s[row] for row in rows], *(t.to(s[0].memory.device) for t in new), scale=0.1).cpu() for s in served
        ]
        torch.testing.assert_close(*results, atol=TOLERANCE, rtol=TOLERANCE)
    for row in range(4):
        ours, theirs = (s[row] for s in served)
        assert ours.blocks == theirs.blocks
        full = ours.blocks[: ours.length // 128]
        for side in SIDES:
            for a, b in zip(memories[0].pages(side, full), memories[1].pages(side, full), strict=True):
                assert torch.equal(a, b.cpu())
    assert int(memories[1].scratch.error) == 0


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "name", ["2 bits by channel", "keys of 16 bits", "three tiers", "sinks", "windows", "window rules"]
)
def test_drafts_are_those_of_the_reference(name: str, dim: int) -> None:
    """Up to 7 drafts after a token, of which any number is right, over the ends of pages; single tokens in
    between. Pages are the same bytes."""
    plan, draw = plan_for(name, dim), random.Random(len(name))
    memories = [Memory(HeadShard(plan, step_tokens=8), device=device) for device in ("cpu", "cuda")]
    x, wrong = [tokens(800, dim, seed) for seed in range(3)], tokens(800, dim, 9)
    served = [[Sequence(memory, plan) for _ in range(3)] for memory in memories]
    for row, prompt in enumerate((1, 120, 377)):
        for every in served:
            every[row].extend(*(t[:prompt].to(every[row].memory.device) for t in x[row]), scale=0.1)
    for step in range(40):
        drafts = (0, 7, 7, 7)[step % 4]
        kept = [draw.randint(1, 1 + drafts) for _ in x]
        new = [
            torch.stack([torch.cat([t[part][n : n + count], wrong[part][7 * step : 7 * step + 1 + drafts - count]])
                         for t, n, count in zip(x, [s.length for s in served[0]], kept, strict=True)])
            for part in range(3)
        ]  # fmt: skip
        new = new if drafts else [t.squeeze(1) for t in new]
        results = [decode(s, *(t.to(s[0].memory.device) for t in new), scale=0.1, kept=kept).cpu() for s in served]
        torch.testing.assert_close(*results, atol=TOLERANCE, rtol=TOLERANCE)
    for ours, theirs in zip(*served, strict=True):
        assert ours.blocks == theirs.blocks and ours.length == theirs.length
        full = ours.blocks[: ours.length // 128]
        for side in SIDES:
            for a, b in zip(memories[0].pages(side, full), memories[1].pages(side, full), strict=True):
                assert torch.equal(a, b.cpu())
    assert int(memories[1].scratch.error) == 0


def test_decodes_may_be_captured_in_a_graph() -> None:
    """With rows of length 0 in nobody's ring after the sequences; replayed over the end of a page.

    Parts of a batch's rows are cut by all of its lengths: equal bits are those of the same batch."""
    plan = plan_for("2 bits by channel", 128)
    memory = Memory(HeadShard(plan), device="cuda")
    eager = Memory(HeadShard(plan), device="cuda")
    x = tokens(300, 128, 0)
    sequences = [Sequence(each, plan) for each in (memory, eager)]
    for sequence in sequences:
        sequence.grow(300)
        sequence.extend(*(t[:120].cuda() for t in x), scale=0.1)
    assert sequences[0].blocks == sequences[1].blocks and sequences[0].ring == sequences[1].ring
    lengths, rings = (torch.tensor([first, 0], dtype=torch.int32, device="cuda") for first in (120, sequences[0].ring))
    table = torch.zeros(2, len(sequences[0].blocks), dtype=torch.int32, device="cuda")
    table[0] = sequences[0].table
    given = [torch.zeros(2, *t.shape[1:], dtype=t.dtype, device="cuda") for t in x]
    place, stream = Decodes(lengths, table, rings), torch.cuda.Stream()
    with torch.cuda.stream(stream):  # kernels are compiled before; what is stored is stored again
        for buffer, t in zip(given, x, strict=True):
            buffer[0] = t[120]
        memory.step.decode(*given, place, Logits(0.1))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = memory.step.decode(*given, place, Logits(0.1))
    for token in range(120, 300):
        for buffer, t in zip(given, x, strict=True):
            buffer[0] = t[token]
        lengths[0] = token
        graph.replay()
        assert torch.equal(out[:1], eager.step.decode(*given, place, Logits(0.1))[:1]), token


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [2, 3, 4, 7])
@pytest.mark.parametrize("count", [48, 200, 560, 700])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_attention_and_products_agree(is_causal: bool, count: int, group: int, dim: int) -> None:
    """torch's, and, where vLLM is installed, the one that it serves with: within two roundings to bf16 on
    average."""
    flashes = [torch_flash]
    if importlib.util.find_spec("vllm"):
        with warnings.catch_warnings(action="ignore"):
            from kvcal.engines.vllm.serving import flash_attention
        flashes.append(flash_attention())
    q, k, v = (t.transpose(0, 1).cuda() for t in tokens(count, dim, 1))
    q = q.repeat(4, 1, 1)[: group * KV_HEADS]
    exact = attend_part(q.float(), k.float(), v.float(), is_causal, Logits(0.1))
    for flash in flashes:
        fast = attend_part(q, k, v, is_causal, Logits(0.1), flash)
        out = fast.out.float()
        torch.testing.assert_close(out, exact.out, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(fast.lse, exact.lse, atol=TOLERANCE, rtol=TOLERANCE)
        assert float((out - exact.out).norm() / exact.out.norm()) < 2**-8


def test_transformed_pages_are_the_same_bytes_from_chunks() -> None:
    plan = transformed(dataclasses.replace(plan_for("three tiers", 8)))
    memories = [Memory(HeadShard(plan), device=device) for device in ("cpu", "cuda")]
    x = random_tokens(400, KV_HEADS, 3)
    sequences = [Sequence(memory, plan) for memory in memories]
    for first, stop in ((0, 100), (100, 300), (300, 400)):
        results = [s.extend(*(t[first:stop].to(s.memory.device) for t in x)).cpu() for s in sequences]
        torch.testing.assert_close(*results, atol=TOLERANCE, rtol=TOLERANCE)
    for side in SIDES:
        for a, b in zip(*(m.pages(side, s.blocks[:3]) for m, s in zip(memories, sequences, strict=True)), strict=True):
            assert torch.equal(a, b.cpu())
