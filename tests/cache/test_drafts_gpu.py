"""Steps with drafts of a static cache on a GPU: the bytes of one token at a time, and graphs of a fixed
number."""

from functools import partial

import pytest
import torch
import transformers as hf
from gpu_cases import graph_of, plan_for, random_ids, reasoner, task_prompts
from static_cases import assert_same_pages
from torch import Tensor

from kvcal import PlanCache, attached

pytestmark = pytest.mark.gpu


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
                call = graph_of(step).replay
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
