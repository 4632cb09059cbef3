"""The torch reference on a CUDA device: the same bytes, the same tokens, the same byte counts as on a CPU."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from cache_cases import KIVI_2, VOCAB_SIZE, tiny_llama
from evaluation_cases import as_loaded, make_plan

from kvcal.cache.plan_cache import PlanCache
from kvcal.pages.record_layout import AXES
from kvcal.pages.uniform import PageLayout
from kvcal.plan.plan import Format
from kvcal.stages.divergence import feed

pytestmark = pytest.mark.gpu

MIXED = (Format(3, "channel", 64, 4, 32), Format(4, "token", 32, 4, 16))


@pytest.mark.parametrize(
    ("side", "num_bits", "head_dim"), list(itertools.product(("k", "v"), (1, 2, 3, 4, 8, 16), (20, 64, 80, 128)))
)
def test_packed_bytes_agree(side: str, num_bits: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(num_bits)
    pages = torch.randn(3, 128, head_dim, generator=generator) * torch.rand(head_dim, generator=generator) * 30
    pages[1, :, 3] = 2.5  # a constant channel
    for axis, group_size, params in itertools.product(AXES[side], (32, 64, 128), ("float16", "bfloat16", "float32")):
        layout = PageLayout(side, num_bits, axis, group_size, head_dim, params, "bfloat16")
        for dtype in (torch.float32, torch.bfloat16):
            on_cpu = layout.encode(pages.to(dtype))
            on_gpu = layout.encode(pages.to(dtype).cuda())
            assert torch.equal(on_cpu, on_gpu.cpu())
            assert torch.equal(layout.decode(on_cpu), layout.decode(on_gpu).cpu())


@pytest.mark.parametrize("pair", [KIVI_2, MIXED])
def test_a_cache_on_the_gpu_holds_the_same_pages(pair: tuple[Format, Format]) -> None:
    loaded = as_loaded(tiny_llama())
    plan = make_plan(loaded, pair)
    keys = torch.randn(2, 2, 500, plan.layers[0].attention.k_head_dim, generator=torch.Generator().manual_seed(1))
    caches = {}
    for device in ("cpu", "cuda"):
        cache = caches[device] = PlanCache(plan, loaded.model.config)
        heads = plan.layers[0].attention.num_kv_heads
        states = keys[:, :1].expand(-1, heads, -1, -1).to(device)
        for start, stop in ((0, 300), (300, 301), (301, 500)):
            for index in range(len(plan.layers)):
                cache.update((index + 1) * states[:, :, start:stop], -states[:, :, start:stop], index)
    for ours, theirs in zip(caches["cpu"].layers, caches["cuda"].layers, strict=True):
        for on_cpu, on_gpu in zip(ours.tensors, theirs.tensors, strict=True):
            assert on_gpu.is_cuda and torch.equal(on_cpu, on_gpu.cpu())
    assert caches["cuda"].nbytes == caches["cpu"].nbytes > 0


@pytest.mark.parametrize("pair", [KIVI_2, MIXED])
def test_bytes_and_logits(pair: tuple[Format, Format]) -> None:
    loaded = as_loaded(tiny_llama())
    plan = make_plan(loaded, pair)
    tokens = torch.randint(VOCAB_SIZE, (2, 400), generator=torch.Generator().manual_seed(0))
    logits = {}
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(loaded.model).to(device)
        cache = PlanCache(plan, model.config)
        logits[device] = torch.cat([part.cpu() for _, part in feed(model, cache, tokens)], dim=1)
        assert cache.nbytes == plan.nbytes(cache.lengths)
    # Rounding in the model may move a value across a code's boundary, so a few logits differ by a quantization step.
    difference = (logits["cpu"] - logits["cuda"]).abs()
    assert difference.median() < 1e-4 and difference.mean() < 1e-2 * logits["cpu"].abs().mean()
