"""The pages that the predictor stage reads back, against a PlanCache that is fed the very same queries, keys and values
as in decoding: chunks that end where a page is packed."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cache_cases import HEAD_DIM, NUM_HEADS
from form_cases import rotary_table
from predictor_runs import fitted_llama, loaded_llama, plan_of_random_predictors, plan_with, sequences
from torch import Tensor

from kvcal import PlanCache
from kvcal.data.sequences import TokenDataset
from kvcal.models.load import LoadedModel
from kvcal.models.taps import Captured, tap
from kvcal.plan.page_format import RAW, SIDES, Boost, Format, Tier
from kvcal.plan.plan import Plan
from kvcal.stages.checkpoint import Batch
from kvcal.systems.aqua_kv import reconstruct
from kvcal.systems.aqua_kv.reconstruct import PageReader, Reconstruction, Wanted
from kvcal.systems.kvmix.window_rule import WindowRule

LENGTH, KV_HEADS = 700, 2
BOOST = Boost("query_range", (Tier(4, 0.25),))


class Replay:
    """In place of a model: a forward hands over the same random tensors, layer by layer. Channels of queries
    are loud for some tokens and quiet for others, so that pages of other queries boost other channels."""

    device = torch.device("cpu")

    def __init__(self, num_layers: int) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (1, KV_HEADS, LENGTH, HEAD_DIM)
        loud = torch.rand(LENGTH // 50 + 1, HEAD_DIM, generator=generator).pow(4).repeat_interleave(50, 0)[:LENGTH]
        self.layers = []
        for index in range(num_layers):
            q = torch.randn(1, NUM_HEADS, LENGTH, HEAD_DIM, generator=generator) * loud
            k, v = (torch.randn(shape, generator=generator) for _ in SIDES)
            self.layers.append(Captured(index, q, k, k, v))

    @contextmanager
    def tap(self, model: object, take: object, geometry: object, first: int) -> Iterator[None]:
        self.take = take
        yield

    def __call__(self, input_ids: Tensor, use_cache: bool) -> None:
        for captured in self.layers:
            self.take(captured)


def held_pages(plan: Plan, loaded: LoadedModel, replay: Replay) -> dict[tuple[int, str], Tensor]:
    """[tokens, N D] of every side as predictors read it from a PlanCache fed in chunks."""
    cache, start = PlanCache(plan, loaded.model.config), 0
    while start < LENGTH:
        stop = min(LENGTH, start + cache.tokens_to_next_page()) if start else 1
        for captured in replay.layers:
            q, k, v = (x[:, :, start:stop] for x in (captured.q_post_BHTD, captured.k_post_BNTD, captured.v_BNTD))
            layer = cache.layers[captured.layer]
            layer.update(k, v)
            layer.observe(q)
        start = stop
    found = {}
    for layer in cache.layers:
        for side in layer.store.prediction.read_sides:
            pages = layer.store.prediction.before_rope(side, [(0, 0, LENGTH // 128)])
            found[layer.plan.geometry.index, side] = pages.transpose(1, 2).flatten(2).flatten(0, 1)
    return found


WINDOWS = {
    "no window": {},
    "sinks and a window": {"num_sink_tokens": 3, "recent_window": 100},
    "a window that jumps": {"window_rule": WindowRule("paged", 0.4, 300)},
    "a window that grows": {"window_rule": WindowRule("clamped", 0.3, 300)},
}


@pytest.mark.parametrize("window", WINDOWS)
def test_pages_of_boosted_keys_are_what_decoding_packs(window: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k = Format(2, "channel", 32, boost=BOOST, **WINDOWS[window])
    compare(monkeypatch, k, Format(2, "token", 32, **WINDOWS[window]))


def test_values_behind_sinks_beside_16_bit_keys_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's values are predicted from, its keys are not: each side has pages of its own
    tokens."""
    compare(monkeypatch, Format(2, "channel", 32, 5), Format(2, "token", 32, 5), RAW)


def test_16_bits_are_predicted_from_where_no_side_has_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, Format(2, "channel", 32), Format(2, "token", 32), RAW, RAW)


def compare(monkeypatch: pytest.MonkeyPatch, *formats: Format) -> None:
    """Every page that the cache holds, bit for bit."""
    loaded, replay = loaded_llama(), Replay(3)
    plan = plan_of_random_predictors(loaded, *formats)
    expected, found = held_pages(plan, loaded, replay), {}

    def receive(index, exact, read_back) -> None:
        found[index, "k"], found[index, "v"] = read_back[0]["k"], read_back[0]["v"]

    monkeypatch.setattr(reconstruct, "tap", replay.tap)
    data = TokenDataset((torch.ones(LENGTH, dtype=torch.int64),), (torch.ones(LENGTH, dtype=torch.bool),), "f", "ones")
    tables = {index: rotary_table(HEAD_DIM, HEAD_DIM // 2) for index in range(3)}
    wanted = [Wanted(layer, SIDES) for layer in plan.layers]
    way = Reconstruction(plan.layers, {**plan.tensors, "layers.0.rotary": tables[0]}, "float32")
    PageReader(replay, loaded.geometry, wanted, [way], tables).read(Batch.of(data, (0,)), receive)
    assert {(0, "v"), (1, "k"), (1, "v"), (2, "k")} == expected.keys()
    for key, pages in expected.items():
        assert len(pages) == 5 * 128 and torch.equal(found[key], pages), key


def test_pages_are_scored_with_the_queries_of_their_own_tokens() -> None:
    """The tokens after the last page, and those of the pages before, do not count."""
    q = torch.zeros(1, NUM_HEADS, 300, HEAD_DIM)
    for page, token in enumerate((0, 127, 128, 255, 256)):
        q[0, :, token, page] = -128.0 * torch.arange(1, NUM_HEADS + 1)
    [found] = reconstruct._query_means(q, KV_HEADS, 2).transpose(1, 2)
    of_groups = torch.tensor([2.5, 6.5])  # the means of 1, 2, 3, 4 and of 5, 6, 7, 8
    expected = torch.zeros(2, KV_HEADS, HEAD_DIM)
    for page, channels in enumerate((slice(0, 2), slice(2, 4))):
        expected[page, :, channels] = of_groups[:, None]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("k_pages", ["post", "pre"])
def test_pages_are_read_back_as_the_cache_reads_them(k_pages: str) -> None:
    """Bit for bit what Prediction hands on in a PlanCache that was given the same keys and values."""
    loaded, (layers, record) = loaded_llama(), fitted_llama(k_pages)
    plan = plan_with(loaded, layers, record)
    data = sequences([300], seed=5)
    cache, expected = PlanCache(plan, loaded.model.config), {}

    def store(captured: Captured) -> None:
        layer = cache.layers[captured.layer]
        layer.update(captured.k_post_BNTD, captured.v_BNTD)
        for side in ("k", "v"):
            pages = layer.store.prediction.before_rope(side, [(0, 0, 2)])
            expected[captured.layer, side] = pages.transpose(1, 2).flatten(2).flatten(0, 1)

    with torch.no_grad(), tap(loaded.model, store, loaded.geometry):
        loaded.model(input_ids=data.sequences[0].unsqueeze(0), use_cache=False)
    found = {}

    def receive(index, exact, read_back) -> None:
        found[index, "k"], found[index, "v"] = read_back[0]["k"], read_back[0]["v"]
        assert exact["k"].shape == read_back[0]["k"].shape == (256, 16)

    tables = {i: record.stored[f"layers.{i}.rotary"] for i in range(3)}
    way = Reconstruction(plan.layers, plan.tensors, "float32")
    wanted = [Wanted(layer, ("k", "v")) for layer in plan.layers]
    PageReader(loaded.model, loaded.geometry, wanted, [way], tables).read(Batch.of(data, (0,)), receive)
    assert found.keys() == expected.keys() and len(found) == 6
    for key, pages in expected.items():
        assert torch.equal(found[key], pages), key
