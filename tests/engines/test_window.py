"""Layers with a sliding window in an engine's memory against attention under a mask."""

from __future__ import annotations

import logging

import pytest
import torch
from engine_cases import POISON
from torch import Tensor

from kvcal import Plan
from kvcal.engines.prefill import Logits, attend_window
from kvcal.engines.scratch import Chunk, Decodes, Scratch
from kvcal.engines.shard import HeadShard, WindowLayout
from kvcal.engines.step import WindowStep
from kvcal.geometry import AttentionGeometry, ModelIdentity
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Workload

HEADS, KV_HEADS, DIM = 8, 4, 8
TOLERANCE = 2e-5


def reference(
    q: Tensor, k: Tensor, v: Tensor, window: int, softcap: float = 0.0, s_aux: Tensor | None = None
) -> Tensor:
    """[T, H, D]: every token attends to the last ``window`` up to its own."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * DIM**-0.5
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    number = torch.arange(len(q))
    distance = number.unsqueeze(1) - number
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(-1, 1, 1).expand(-1, len(q), 1)], dim=-1)
    return (scores.softmax(-1)[..., : len(q)] @ values).transpose(0, 1)


def layout(window: int) -> WindowLayout:
    return WindowLayout(LayerPlan(AttentionGeometry(0, HEADS, KV_HEADS, DIM, DIM, window)), "float32")


def tokens(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize("window", [2, 3, 17, 128])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (3.0, True)])
def test_chunks_and_steps_attend_to_their_window(window: int, softcap: float, with_sinks: bool) -> None:
    """Three sequences in rows of their own, in chunks that begin and end anywhere, then one by one together."""
    step = WindowStep(layout(window), Scratch(4, 4096, torch.device("cpu")))
    rings = torch.full((5, step.layout.ring_bytes + 48), POISON, dtype=torch.uint8)[:, 48:]
    step.bind(rings)
    s_aux = torch.linspace(-1, 2, HEADS) if with_sinks else None
    logits = Logits(DIM**-0.5, softcap, s_aux)
    every = [tokens(300, seed) for seed in range(3)]
    rows = torch.tensor([3, 1, 4], dtype=torch.int32)
    found: list[list[Tensor]] = [[], [], []]
    cuts = ((0, 1, 40, 41, 250), (0, 129, 131, 200), (0, window, 2 * window, 260))
    for number, (x, stops) in enumerate(zip(every, cuts, strict=True)):
        for start, stop in zip(stops, stops[1:], strict=False):
            new = [part[start:stop] for part in x]
            chunk = Chunk(start, torch.empty(0, dtype=torch.int32), rows[number : number + 1])
            tail = step.store(*new, chunk)
            found[number].append(step.attend_chunk(*new, chunk, tail, logits))
    lengths = [stops[-1] for stops in cuts]
    for _ in range(40):
        q, k, v = (torch.stack([x[part][n] for x, n in zip(every, lengths, strict=True)]) for part in range(3))
        place = Decodes(torch.tensor(lengths, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32), rows)
        step.append(q, k, v, place)
        for parts, out in zip(found, step.attend(q, place, logits).unsqueeze(1), strict=True):
            parts.append(out)
        lengths = [length + 1 for length in lengths]
    for x, parts, length in zip(every, found, lengths, strict=True):
        expected = reference(*(part[:length] for part in x), window, softcap, s_aux)
        torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert bool((rings[[0, 2]] == POISON).all()) and int(step.scratch.error) == 0


def test_a_chunk_longer_than_the_window_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcal.engines.prefill.SCORES_AT_ONCE", HEADS * 9 * 5)
    q, k, v = tokens(100, 1)
    past = tuple(x[:20].transpose(0, 1) for x in (k, v))
    found = attend_window(q[20:], k[20:], v[20:], past, 21, Logits(DIM**-0.5))
    torch.testing.assert_close(found, reference(q, k, v, 21)[20:], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_rank_has_its_heads_of_the_window_and_no_block() -> None:
    layers = (LayerPlan(AttentionGeometry(0, HEADS, KV_HEADS, DIM, DIM, 64)),)
    plan = Plan(ModelIdentity("tiny", "llama", "a" * 64, "b" * 64, "c" * 64), "bfloat16", layers, Workload(1, 256), {})
    for size in (1, 2):
        shard = HeadShard(plan, 0, size)
        assert shard.block_bytes(0) == 0 and shard.ring_bytes(0) == 2 * 64 * KV_HEADS // size * DIM * 2
    assert plan.nbytes((1000,)) == 2 * 63 * KV_HEADS * DIM * 2


def test_scratch_lies_where_it_is_asked_for() -> None:
    """Engines build a model under a default device."""
    with torch.device("meta"):
        scratch = Scratch(1, 16, torch.device("cpu"))
    scratch.report_errors(logging.getLogger("kvcal"))
