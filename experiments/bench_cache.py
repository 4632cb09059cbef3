"""Decode steps and text through the packed cache: milliseconds, beside transformers' own cache.

    make bench          or          python -m pytest experiments/bench_cache.py -m bench -s

Prints one line a measurement; asserts only that what is timed is right. Two machines' figures are not comparable.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from transformers import Cache, DynamicCache

from kvcal import Plan, PlanCache
from kvcal.models.load import LoadedModel, load
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.plan import Workload
from kvcal.recipe import fixed_layers
from kvcal.recipe_files import load_recipe
from kvcal.stages.divergence import feed

pytestmark = pytest.mark.bench
BATCH, PROMPT, STEPS = 24, 600, 12


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("reasoner-10m", device="cpu")


def plan_of(loaded: LoadedModel, recipe: str) -> Plan:
    formats = load_recipe(recipe).formats
    assert formats is not None
    layers: tuple[LayerPlan, ...] = fixed_layers(formats, bare_layers(loaded.geometry))
    return Plan(loaded.identity, "bfloat16", layers, Workload(BATCH, PROMPT), {})


CACHES: dict[str, Callable[[LoadedModel, torch.Tensor], Cache]] = {
    "transformers": lambda loaded, mask: DynamicCache(config=loaded.model.config),
    "packed 16-bit": lambda loaded, mask: PlanCache(plan_of(loaded, "16-bit"), loaded.model.config, mask),
    "packed kivi-2": lambda loaded, mask: PlanCache(plan_of(loaded, "kivi-2"), loaded.model.config, mask),
    "mirrored kivi-2": lambda loaded, mask: PlanCache(
        plan_of(loaded, "kivi-2"), loaded.model.config, mask, keep_decoded=True
    ),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("ragged", [False, True])
@torch.inference_mode()
def test_decode_step(loaded: LoadedModel, name: str, ragged: bool) -> None:
    mask = torch.ones(BATCH, PROMPT, dtype=torch.long)
    if ragged:
        for row in range(BATCH):
            mask[row, : 7 * row] = 0
    cache = CACHES[name](loaded, mask)
    tokens = torch.randint(5, 4000, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    started = time.perf_counter()
    loaded.model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    prefill, seconds = time.perf_counter() - started, []
    for _ in range(STEPS):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        position = mask.sum(-1, keepdim=True) - 1
        started = time.perf_counter()
        loaded.model(tokens[:, :1], attention_mask=mask, position_ids=position, past_key_values=cache)
        seconds.append(time.perf_counter() - started)
    assert cache.get_seq_length() == PROMPT + STEPS
    median = sorted(seconds)[STEPS // 2]
    kind = "ragged" if ragged else "dense"
    print(f"\n{name:16s} {kind:6s} {BATCH} x {PROMPT}: prefill {prefill:.2f} s, step {1e3 * median:.1f} ms")


@pytest.mark.parametrize("recipe", ["16-bit", "kivi-2", "uniform-3"])
@torch.inference_mode()
def test_text(loaded: LoadedModel, recipe: str) -> None:
    cache = PlanCache(plan_of(loaded, recipe), loaded.model.config)
    tokens = torch.randint(5, 4000, (1, 2048), generator=torch.Generator().manual_seed(0))
    started = time.perf_counter()
    chunks = sum(1 for _ in feed(loaded.model, cache, tokens))
    seconds = time.perf_counter() - started
    assert cache.get_seq_length() == 2048
    print(f"\ntext, {recipe}: 2048 tokens in {chunks} chunks, {2048 / seconds:.0f} tokens/s")
