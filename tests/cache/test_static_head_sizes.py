"""The static cache for head sizes that the plain kernel serves: by the reference on a CPU, by the kernel on
CUDA.

With one layer, keys, values and queries depend on the tokens alone, so that both caches store the very same
bytes.
"""

import functools
from contextlib import AbstractContextManager

import pytest
import torch
import transformers as hf
from cache_cases import feed, plan_of
from static_cases import FORMATS, assert_same_pages, with_transforms
from tiny_models import perturbed
from torch import Tensor

from kvcal import Plan, PlanCache, attached
from kvcal.cache.attached import attached_for
from kvcal.errors import SlowPath
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.page_format import Format

VOCABULARY = 128
SIZES = {"llama, 72": 72, "llama, 80": 80, "gemma, 256": 256}
FORMAT_NAMES = ("kitty", "queries", "different sinks")
PROMPT, STEPS = 250, 80


@functools.cache
@torch.inference_mode(False)
def model_of(name: str, device: str, dtype: torch.dtype = torch.float32) -> hf.PreTrainedModel:
    """4 query heads on 2 of keys and values; keys and attention far from uniform."""
    kind = hf.GemmaConfig if name.startswith("gemma") else hf.LlamaConfig
    config = kind(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=SIZES[name], vocab_size=VOCABULARY, max_position_embeddings=2048, bos_token_id=1, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(SIZES[name])
    return perturbed(hf.AutoModelForCausalLM.from_config(config), 0.1).to(device, dtype).requires_grad_(False)


def plan_for(model: hf.PreTrainedModel, name: str) -> Plan:
    return plan_of(geometry_of(model, cache_dtype="bfloat16"), *FORMATS[name])


def random_batch(device: str) -> tuple[Tensor, Tensor]:
    """Tokens and mask of rows that begin with 250, 170 and 3 tokens, padded on the left, and go on for 80."""
    ids = torch.randint(3, VOCABULARY, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :80] = mask[2, : PROMPT - 3] = 0
    return (ids * mask).to(device), mask.to(device)


def context(model: hf.PreTrainedModel, cache: PlanCache) -> AbstractContextManager[None]:
    return attached_for(model, cache.plan) if cache.static is None else attached(model)


def assert_like_the_dynamic_cache(model: hf.PreTrainedModel, static: PlanCache, tolerance: float) -> None:
    """Logits of every step, and every page."""
    ids, mask = random_batch(str(model.device))
    dynamic, logits = PlanCache(static.plan, model.config, mask[:, :PROMPT]), []
    for cache in (static, dynamic):
        with context(model, cache):
            logits.append(feed(model, cache, ids, range(PROMPT, PROMPT + STEPS), mask)[:, PROMPT:].float())
    found, expected = logits
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < tolerance
    assert static.lengths == [PROMPT + STEPS, PROMPT + STEPS - 80, STEPS + 3]
    assert static.nbytes == static.plan.nbytes([400] * 3, 400)
    assert assert_same_pages(static, dynamic) > 0


@pytest.mark.parametrize("formats", FORMAT_NAMES)
@pytest.mark.parametrize("name", ["llama, 80", "gemma, 256"])
def test_on_a_cpu(name: str, formats: str) -> None:
    model = model_of(name, "cpu")
    static = PlanCache(plan_for(model, formats), model.config, random_batch("cpu")[1][:, :PROMPT], max_tokens=400)
    assert static.slow_layers.keys() == {0} and f"head size {SIZES[name]}" in static.slow_layers[0][0]
    assert_like_the_dynamic_cache(model, static, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", FORMAT_NAMES)
@pytest.mark.parametrize("name", SIZES)
def test_on_a_gpu(name: str, formats: str) -> None:
    """The kernels count queries as the cache rounds them, so that a model in fp32 would have other
    statistics."""
    dtype, tolerance = (torch.bfloat16, 0.03) if formats == "queries" else (torch.float32, 1e-4)
    model = model_of(name, "cuda", dtype)
    static = PlanCache(plan_for(model, formats), model.config, random_batch("cuda")[1][:, :PROMPT], max_tokens=400)
    with pytest.warns(SlowPath, match=rf"layers 0: head size {model.config.head_dim}\b") as caught:
        static.allocate(3, "cuda")
    assert len(caught) == 1
    assert_like_the_dynamic_cache(model, static, tolerance)
    static.check()


@pytest.mark.gpu
def test_a_basis_of_large_heads_on_a_gpu() -> None:
    """As the default plan has it: the fast kernel serves it, and the model's own attention meets the same tokens."""
    model = model_of("gemma, 256", "cuda")
    stripes = [Format(bits, "token", 128, 8, 112, quantizer="rotated", stripe_tokens=16) for bits in (3, 2)]
    plan = with_transforms(plan_of(geometry_of(model, cache_dtype="bfloat16"), *stripes), "stripes, basis", 0.2)
    ids, mask = random_batch("cuda")
    static, dynamic = (PlanCache(plan, model.config, mask[:, :PROMPT], max_tokens=size) for size in (400, None))
    assert static.slow_layers == {}
    with attached(model):
        found = feed(model, static, ids, range(PROMPT, PROMPT + STEPS), mask)[:, PROMPT:].float()
    expected = feed(model, dynamic, ids, range(PROMPT, PROMPT + STEPS), mask)[:, PROMPT:].float()
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.01
    assert assert_same_pages(static, dynamic) > 0
    static.check()
