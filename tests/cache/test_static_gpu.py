"""The static cache on a GPU, served by the kernels: the bytes of the dynamic cache.

Where both are fed the same tokens, the pages of a first layer are equal byte for byte: its keys, values and
queries depend on the tokens alone. After it attention's last bits differ, so that a code may, too
(test_static_tokens).
"""

from collections.abc import Sequence

import pytest
import torch
from cache_cases import KIVI_2, llama_plan, random_states, tiny_llama
from gpu_cases import PAIRS, logits_of, plan_for, ragged_ids, random_ids, random_llama, relative
from static_cases import TRANSFORMED, assert_same_pages, pages_of

from kvcal import PlanCache, attached
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.plan.page_format import Format

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*PAIRS, *TRANSFORMED])
def test_pages_of_a_ragged_batch_are_those_of_the_dynamic_cache(name: str) -> None:
    """Prompts of 300, 130 and 3 tokens, padded on the left; then 300 steps, which fill pages in every row."""
    model = random_llama()
    plan = plan_for(model, name)
    ids, mask = ragged_ids((300, 130, 3), 300)
    static = PlanCache(plan, model.config, mask[:, :300], max_tokens=640)
    static.allocate(3, "cuda")
    held = static.nbytes
    assert held == plan.nbytes([640] * 3, 640)
    found = logits_of(model, static, ids, 300, mask)
    assert static.nbytes == held and static.lengths == [600, 430, 303]
    static.check()
    dynamic = PlanCache(plan, model.config, mask[:, :300])
    expected = logits_of(model, dynamic, ids, 300, mask)
    assert torch.equal(found[0], expected[0])
    assert relative(found, expected).max() < 0.03
    assert assert_same_pages(static, dynamic) > 0


def test_a_dynamic_cache_chooses_codes_as_on_a_cpu() -> None:
    model = random_llama()
    plan, pages = plan_for(model, "rotated, feedback"), {}
    k, v = (torch.randn(2, 2, 300, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(2))
    for device in ("cpu", "cuda"):
        layer = PlanCache(plan, model.config).paged_layers[0]
        layer.update(k.to(device), v.to(device))
        pages[device] = [pages_of(part, row, 300).cpu() for part in layer.parts for row in range(2)]
    assert all(len(ours) == 2 and torch.equal(ours, theirs) for ours, theirs in zip(*pages.values(), strict=True))
    k[0, 0, 5, 3] = torch.nan
    with pytest.raises(NonFiniteActivations, match="cannot be quantized"):
        PlanCache(plan, model.config).paged_layers[0].update(k.cuda(), v.cuda())


@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(64, 1), (64, 8), (128, 1), (128, 2), (128, 8)])
def test_head_sizes_and_groups(head_dim: int, num_kv_heads: int) -> None:
    model = random_llama(head_dim=head_dim, num_kv_heads=num_kv_heads)
    for name in ("kitty", "queries"):
        plan, ids = plan_for(model, name), random_ids(2, 420)
        static, dynamic = (PlanCache(plan, model.config, max_tokens=size) for size in (420, None))
        found, expected = (logits_of(model, cache, ids, 129) for cache in (static, dynamic))
        assert relative(found, expected).max() < 0.03
        assert assert_same_pages(static, dynamic) > 0


def test_steps_tell_check_what_they_met() -> None:
    model = random_llama()
    cache = PlanCache(plan_for(model, "uniform"), model.config, max_tokens=130)
    cache.allocate(1, "cuda")
    layer = cache.paged_layers[0]

    def feed(count: int, value: float) -> None:
        q, k = torch.randn(1, 8, 1, 64, device="cuda"), torch.full((1, 2, 1, 64), value, device="cuda")
        for _ in range(count):
            layer.attend(q, k, k, None, 0.1, 0.0)

    feed(129, 1.0)
    cache.check()
    feed(128, 1.0)
    with pytest.raises(UsageError, match="does not fit"):
        cache.check()
    cache.reset()
    feed(129, torch.nan)
    with pytest.raises(NonFiniteActivations):
        cache.reset()
    cache.check()


@pytest.mark.parametrize("sizes", [(200,), (150, 130, 3)])
def test_generate_gives_the_tokens_of_the_dynamic_cache(sizes: Sequence[int]) -> None:
    model = random_llama(num_layers=2, dtype=torch.float32)
    plan, (ids, mask) = plan_for(model, "kitty"), ragged_ids(tuple(sizes), 0)
    options = {"max_new_tokens": 150, "do_sample": False, "attention_mask": mask, "disable_compile": True}
    expected = model.generate(ids, past_key_values=PlanCache(plan, model.config, mask), **options)
    static = PlanCache(plan, model.config, mask, max_tokens=360)
    with attached(model):
        found = model.generate(ids, past_key_values=static, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("pair", [KIVI_2, (Format(3, "channel", 64, 4, 32), Format(4, "token", 32, 4, 16))])
def test_a_dynamic_cache_on_the_gpu_holds_the_same_pages(pair: tuple[Format, Format]) -> None:
    plan, config, caches = llama_plan(*pair), tiny_llama().config, {}
    states = random_states(2, 2, 500)
    for device in ("cpu", "cuda"):
        cache = caches[device] = PlanCache(plan, config)
        for part in states.to(device).split([300, 1, 199], dim=2):
            for index in range(len(plan.layers)):
                cache.update((index + 1) * part, -part, index)
    for ours, theirs in zip(caches["cpu"].layers, caches["cuda"].layers, strict=True):
        for on_cpu, on_gpu in zip(ours.tensors, theirs.tensors, strict=True):
            assert on_gpu.is_cuda and torch.equal(on_cpu, on_gpu.cpu())
    assert caches["cuda"].nbytes == caches["cpu"].nbytes > 0
