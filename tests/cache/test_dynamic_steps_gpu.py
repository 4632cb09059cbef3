"""Steps of a dynamic cache by the kernels: the bytes and tokens of the static cache, in memory that grows."""

import pytest
import torch
from gpu_cases import PAIRS, logits_of, plan_for, ragged_ids, random_ids, random_llama, reasoner, relative, steps
from static_cases import TRANSFORMED, assert_same_pages
from transformers import DynamicCache

from kvcal import PlanCache, attached
from kvcal.stages.generate import complete
from kvcal.store.layer_store import LayerStore
from kvcal.store.step import LayerStep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*PAIRS, *TRANSFORMED])
def test_steps_give_the_logits_and_pages_of_the_static_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 300, 130 and 3 tokens, padded on the left; then 300 steps, which fill pages in every row. After
    the prompt nothing is read as a dense copy."""
    model = random_llama()
    plan, (ids, mask) = plan_for(model, name), ragged_ids((300, 130, 3), 300)
    static, dynamic = (PlanCache(plan, model.config, mask[:, :300], max_tokens=size) for size in (640, None))
    expected = logits_of(model, static, ids, 300, mask)
    with attached(model):
        later = steps(model, dynamic, ids, 300, mask)
        found = [next(later)]
        monkeypatch.setattr(LayerStore, "read", None)
        found += later
    dynamic.check()
    assert dynamic.nbytes == plan.nbytes([600, 430, 303], 600)
    assert relative(torch.stack(found), expected).max() < 0.01
    assert assert_same_pages(static, dynamic) > 0


@pytest.mark.parametrize("sizes", [(200,), (150, 130, 3)])
def test_generate_gives_the_tokens_of_the_static_cache(sizes: tuple[int, ...]) -> None:
    model = random_llama(num_layers=2, dtype=torch.float32)
    plan, (ids, mask) = plan_for(model, "basis"), ragged_ids(sizes, 0)
    options = {"max_new_tokens": 150, "do_sample": False, "attention_mask": mask, "disable_compile": True}
    with attached(model):
        caches = [PlanCache(plan, model.config, mask, max_tokens=size) for size in (None, 360)]
        found, expected = (model.generate(ids, past_key_values=cache, **options) for cache in caches)
    assert torch.equal(found, expected)


def test_the_command_generates_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, taken, attend = reasoner("float32"), list[int](), LayerStep.attend
    monkeypatch.setattr(LayerStep, "attend", lambda step, q, *given: taken.append(1) or attend(step, q, *given))
    answer = complete(loaded, plan_for(loaded.model, "basis"), "Times. 12 x 34" * 20, 12, 0.0, 0, chat=False)
    assert len(taken) == (answer["new_tokens"] - 1) * loaded.model.config.num_hidden_layers > 0


def test_beams_and_drafts() -> None:
    loaded = reasoner("float32")
    model = loaded.model
    plan, ids = plan_for(model, "rotated, feedback"), random_ids(1, 200) % 60 + 3
    options = {"max_new_tokens": 60, "do_sample": False, "disable_compile": True}
    with attached(model):
        plain = model.generate(ids, past_key_values=PlanCache(plan, model.config), **options)
        drafted = PlanCache(plan, model.config, lookahead=5)
        found = model.generate(ids, past_key_values=drafted, prompt_lookup_num_tokens=5, **options)
        beams = model.generate(ids, past_key_values=PlanCache(plan, model.config), num_beams=3, **options)
    assert torch.equal(found, plain) and beams.shape[1] > ids.shape[1]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_step_takes_few_launches() -> None:
    """Of 4 layers: no more than a 16-bit cache's step and 8 launches a layer."""
    model = random_llama(num_layers=4)
    ids = random_ids(8, 600)

    def launches(cache: object) -> int:
        with attached(model):
            for tokens in (ids[:, :590], *ids[:, 590:599].split(1, 1)):
                model(tokens, past_key_values=cache)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                model(ids[:, 599:], past_key_values=cache)
                torch.cuda.synchronize()
        return sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")

    packed = launches(PlanCache(plan_for(model, "rotated"), model.config))
    assert packed <= launches(DynamicCache(config=model.config)) + 8 * 4
