"""A cache names the layers that the plain kernel serves. Needs no GPU."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cache_cases import plan_of, tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcal import PlanCache
from kvcal.errors import SlowPath, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.plan.page_format import Format

K, V = Format(2, "channel"), Format(2)
K_SINKS = replace(K, num_sink_tokens=4)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """Tensors on CUDA without memory, of which a CPU build cannot make views: layers stay empty. Properties of an
    H200."""
    monkeypatch.setattr("kvcal.cache.paged_layer.LayerStore", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return FakeTensorMode()


def two_layers(dims: tuple[int, int], k: Format = K) -> PlanCache:
    """Of the model's two layers, one by one; only the plan knows their head sizes."""
    attention = tuple(AttentionGeometry(index, 8, 2, dim, dim) for index, dim in enumerate(dims))
    return PlanCache(plan_of(Geometry("llama", "bfloat16", attention), k, V), tiny_llama().config, max_tokens=300)


def test_a_cache_names_its_slow_layers_when_it_is_allocated_on_cuda(fake_gpu: FakeTensorMode) -> None:
    cache = two_layers((128, 80))
    assert cache.slow_layers == {1: ["head size 80, where the fast kernel takes 64, 96, 128, 192, 256"]}
    with fake_gpu, pytest.warns(SlowPath, match=r"layers 1: head size 80, ") as caught:
        cache.allocate(2, "cuda")
    assert len(caught) == 1 and caught[0].filename == __file__
    both = two_layers((128, 64), K_SINKS)
    with fake_gpu, pytest.warns(SlowPath, match=r"layers 0, 1: 4 sink tokens of keys and 0 of values"):
        both.allocate(2, "cuda")


def test_a_refused_allocation_leaves_the_cache_unallocated(fake_gpu: FakeTensorMode) -> None:
    """Layer 1 is refused behind layer 0 and the control tensors; the CPU, which takes it, may then have the cache."""
    cache = two_layers((128, 20))
    for _ in range(2):
        with fake_gpu, pytest.raises(UnsupportedModel, match="the kernels cannot serve layer 1: head size 20"):
            cache.allocate(2, "cuda")
        assert cache.static is not None and not cache.static.is_allocated
        assert cache.padding.rows is None and not any(layer.is_initialized for layer in cache.layers)
        assert cache.workspace_nbytes == 0
    cache.allocate(3, "cpu")
    assert cache.static is not None and cache.static.lengths.tolist() == [0, 0, 0]
    with pytest.raises(UsageError, match="is allocated already"):
        cache.allocate(3, "cpu")


def test_a_cache_without_slow_layers_is_silent(fake_gpu: FakeTensorMode) -> None:
    fast = two_layers((128, 64))
    assert fast.slow_layers == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fake_gpu:
            fast.allocate(2, "cuda")
        two_layers((80, 80)).allocate(2, "cpu")  # the reference has one path
