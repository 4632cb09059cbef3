"""Steps with drafts of a static cache on a GPU: the bytes of one token at a time, and graphs of a fixed number."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers as hf
from cache_cases import padded
from gpu_cases import plan_for, random_ids, random_llama, reasoner, relative, task_prompts
from static_cases import assert_same_pages
from torch import Tensor

from kvcal import PlanCache, attached

pytestmark = pytest.mark.gpu


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "num_kv_heads"),
    [("uniform", 1), ("uniform", 2), ("uniform", 8), ("kitty", 2), ("kivi", 1), ("rotated", 2), ("16 bits", 2)],
)
def test_pages_of_a_ragged_batch_are_those_of_single_tokens(name: str, num_kv_heads: int) -> None:
    """Rows of 300, 130 and 3 tokens; then steps of 5 tokens, of which the last 1 or 2 are taken back."""
    model = random_llama(num_kv_heads=num_kv_heads)
    plan = plan_for(model, name)
    ids, mask = padded([random_ids(n, seed=n).cpu() for n in (300, 130, 3)], 300, "left")
    ids = torch.cat([ids.long().cuda(), random_ids(3, 160)], dim=1)
    positions = torch.nn.functional.pad(mask, (0, 160), value=1).cumsum(1).sub(1).clamp(min=0).cuda()
    caches = [PlanCache(plan, model.config, mask.cuda(), max_tokens=500, lookahead=n) for n in (4, 0)]
    logits: list[list[Tensor]] = [[], []]
    with attached(model):
        for cache in caches:
            model(ids[:, :300], attention_mask=mask.cuda(), position_ids=positions[:, :300], past_key_values=cache)
        start = 300
        while start < 455:
            kept = 4 - start % 2
            drafts = torch.cat([ids[:, start : start + kept], random_ids(3, 5 - kept, seed=start)], dim=1)
            at = positions[:, start : start + 5]
            logits[0].append(model(drafts, position_ids=at, past_key_values=caches[0]).logits[:, :kept].float())
            caches[0].crop(kept - 5)
            for column in range(start, start + kept):
                one = slice(column, column + 1)
                given = model(ids[:, one], position_ids=positions[:, one], past_key_values=caches[1])
                logits[1].append(given.logits.float())
            start += kept
    assert caches[0].lengths == caches[1].lengths
    for cache in caches:
        cache.check()
    assert assert_same_pages(*caches) > 0
    assert relative(torch.cat(logits[0], 1), torch.cat(logits[1], 1)).max() < 0.03


def verify(model: hf.PreTrainedModel, cache: PlanCache, ids: Tensor, positions: Tensor, logits: Tensor) -> None:
    logits.copy_(model(ids, position_ids=positions, past_key_values=cache).logits)


@torch.inference_mode()
def test_a_captured_step_with_drafts_is_an_eager_one_bit_for_bit() -> None:
    """40 steps of 4 tokens; after each, up to 3 are taken back."""
    model = reasoner("bfloat16").model
    plan, prompt = plan_for(model, "uniform"), task_prompts(2, 100)
    found = []
    with attached(model):
        for is_captured in (False, True):
            cache = PlanCache(plan, model.config, max_tokens=320, lookahead=3)
            cache.allocate(2, "cuda")
            ids, positions = (torch.zeros(2, 4, dtype=torch.long, device="cuda") for _ in range(2))
            logits = torch.zeros(2, 4, model.config.vocab_size, dtype=model.dtype, device="cuda")
            step = call = partial(verify, model, cache, ids, positions, logits)
            if is_captured:
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step()
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                call = graph.replay
                cache.reset()
            model(prompt, past_key_values=cache, logits_to_keep=1)
            history, columns = [], 100
            for number in range(40):
                ids.copy_(random_ids(2, 4, seed=number))
                positions.copy_(torch.arange(columns, columns + 4))
                call()
                history.append(logits.clone())
                cache.crop(-(number % 4))
                columns += 4 - number % 4
            cache.check()
            found.append((torch.stack(history), cache))
    assert found[0][1].lengths == found[1][1].lengths == [200, 200]
    assert torch.equal(found[0][0], found[1][0])
    assert assert_same_pages(found[0][1], found[1][1]) > 0
