"""A prompt's cache on disk: what follows the loaded cache is what follows the saved one; other files are
refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_cases import feed, random_ids
from predictor_runs import BOOSTED, aqua_layers, as_loaded, fitted_llama, loaded_llama, plan_with, prompt
from tiny_models import built
from torch import Tensor

from kvcal import PlanCache, artifact
from kvcal.cache.attached import attached_for
from kvcal.cache.prefix_file import KIND, SCHEMA
from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan


def aqua() -> tuple[LoadedModel, Plan]:
    layers, record = fitted_llama()
    return loaded_llama(), plan_with(loaded_llama(), layers, record)


def hearing() -> tuple[LoadedModel, Plan]:
    loaded = loaded_llama(2)
    return loaded, plan_with(loaded, tuple(replace(layer, k=BOOSTED) for layer in aqua_layers(loaded)))


def windowed() -> tuple[LoadedModel, Plan]:
    loaded = as_loaded(built("gemma3"), cache_dtype="bfloat16")
    return loaded, plan_with(loaded, aqua_layers(loaded))


def saved(loaded: LoadedModel, plan: Plan, tokens_T: Tensor, path: Path) -> PlanCache:
    cache = PlanCache(plan, loaded.model.config)
    with attached_for(loaded.model, plan):
        feed(loaded.model, cache, tokens_T.unsqueeze(0))
    cache.save(path, tokens_T)
    return cache


def aqua_file(folder: Path) -> tuple[LoadedModel, Plan, Path]:
    loaded, plan = aqua()
    saved(loaded, plan, prompt(300), folder / "p.kv")
    return loaded, plan, folder / "p.kv"


@pytest.mark.parametrize(
    "case, length", [(aqua, 1), (aqua, 127), (aqua, 390), (hearing, 250), (windowed, 3), (windowed, 40)]
)
def test_what_follows_a_loaded_cache_is_what_follows_the_saved_one(case: Callable, length: int, tmp_path: Path) -> None:
    """Through new pages, by steps and chunks; at the end both hold the same bits, in the plan's bytes."""
    loaded, plan = case()
    tokens_T, path = prompt(length), tmp_path / "p.kv"
    cache = saved(loaded, plan, tokens_T, path)
    again, found_T = PlanCache.load(path, plan, loaded.model.config)
    assert torch.equal(found_T, tokens_T) and again.lengths == [length]
    assert again.nbytes == cache.nbytes == plan.nbytes([length])
    ids = random_ids(1, 150, seed=4)
    with attached_for(loaded.model, plan):
        logits = [feed(loaded.model, each, ids, (1, 2, 40, 139)) for each in (cache, again)]
    assert torch.equal(*logits)
    cache.save(path, torch.cat([tokens_T, ids[0]]))
    again.save(tmp_path / "q.kv", torch.cat([tokens_T, ids[0]]))
    assert path.read_bytes() == (tmp_path / "q.kv").read_bytes()


def test_a_loaded_cache_is_cropped_as_one_that_was_never_longer(tmp_path: Path) -> None:
    """The saved one was cropped, so that its ring lacks tokens which one that was fed as many would have."""
    loaded, plan = aqua()
    tokens_T, path, reads = prompt(640), tmp_path / "p.kv", []
    cache, plain = (PlanCache(plan, loaded.model.config) for _ in range(2))
    for each in (cache, plain):
        feed(loaded.model, each, tokens_T.unsqueeze(0))
    cache.crop(-100)
    cache.save(path, tokens_T[:540])
    cache = PlanCache.load(path, plan, loaded.model.config)[0]
    for each in (cache, plain):
        each.crop(500 - each.get_seq_length())
        reads.append(feed(loaded.model, each, tokens_T[None, 500:501]))
    torch.testing.assert_close(*reads, atol=1e-4, rtol=1e-4)


def test_bytes_on_disk(tmp_path: Path) -> None:
    _, plan, path = aqua_file(tmp_path)
    held = plan.nbytes([300]) - sum(tensor.nbytes for tensor in plan.tensors.values())
    assert held + 300 * 8 < path.stat().st_size < held + 300 * 8 + 8000


def test_a_prefix_of_another_plan_or_model_is_refused(tmp_path: Path) -> None:
    loaded, plan, path = aqua_file(tmp_path)
    config = loaded.model.config
    nudged = dict(plan.tensors)
    nudged["layers.1.k_predictor.bias"] = nudged["layers.1.k_predictor.bias"] + 1.0
    for other in (plan_with(loaded, aqua_layers(loaded)), replace(plan, tensors=nudged)):
        with pytest.raises(ArtifactError, match="was packed with the plan"):
            PlanCache.load(path, other, config)
    with pytest.raises(ArtifactError, match="was packed with the model"):
        PlanCache.load(path, replace(plan, model=replace(plan.model, id="other", weights_sha256="9")), config)
    assert PlanCache.load(path, replace(plan, provenance={"recipe": "other"}), config)[0].lengths == [300]


@pytest.mark.parametrize("place", [0.0, 0.02, 0.2, 0.5, 0.99])
def test_a_damaged_file_is_refused(tmp_path: Path, place: float) -> None:
    loaded, plan, path = aqua_file(tmp_path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[int(place * len(whole))] ^= 4
    for data in (flipped, whole[: int(place * len(whole))]):
        path.write_bytes(data)
        with pytest.raises(ArtifactError):
            PlanCache.load(path, plan, loaded.model.config)
    with pytest.raises(ArtifactError, match="does not exist"):
        PlanCache.load(tmp_path / "none.kv", plan, loaded.model.config)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda tensors: tensors.pop("layers.1.0.pages"), "missing tensor 'layers.1.0.pages'"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "unknown tensor 'extra'"),
        (lambda tensors: tensors.update({"layers.0.1.ring": torch.ones(3)}), r"0.1.ring' is torch.float32 \[3\]"),
        (lambda tensors: tensors.pop("tokens"), "no token ids"),
        (lambda tensors: tensors.update(tokens=torch.arange(100)), "pages' is torch.uint8"),
    ],
)
def test_content_that_does_not_fit_is_refused(tmp_path: Path, spoil: Callable, message: str) -> None:
    loaded, plan, path = aqua_file(tmp_path)
    stored = artifact.read(path, KIND, SCHEMA)
    tensors = dict(stored.tensors)
    spoil(tensors)
    artifact.write(path, replace(stored, tensors=tensors))
    with pytest.raises(ArtifactError, match=message):
        PlanCache.load(path, plan, loaded.model.config)


def test_caches_that_are_no_prefix(tmp_path: Path) -> None:
    loaded, plan = aqua()
    config, path = loaded.model.config, tmp_path / "p.kv"
    two, empty = PlanCache(plan, config), PlanCache(plan, config)
    static = PlanCache(plan_with(loaded, aqua_layers(loaded)), config, max_tokens=20)
    feed(loaded.model, two, random_ids(2, 9))
    for cache in (two, empty, static, PlanCache(plan, config, lookahead=2)):
        with pytest.raises(UsageError, match="one sequence without padding, in a dynamic cache"):
            cache.save(path, prompt(9))
    one = PlanCache(plan, config)
    feed(loaded.model, one, random_ids(1, 9))
    with pytest.raises(UsageError, match="8 token ids, and the cache holds 9 tokens"):
        one.save(path, prompt(8))
    with pytest.raises(ArtifactError, match="cannot write"):
        one.save(tmp_path / "nowhere" / "p.kv", prompt(9))
    states = as_loaded(built("qwen3_next"))
    cache = PlanCache(plan_with(states, aqua_layers(states)), states.model.config)
    feed(states.model, cache, random_ids(1, 9))
    with pytest.raises(UnsupportedModel, match="keep a state of linear attention"):
        cache.save(path, prompt(9))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("length", [3, 40])
def test_raw_bytes_are_those_in_the_window(length: int) -> None:
    """Three layers with a window of 6 tokens, of which 5 stay, and a full one; a KV head of 16 each, bf16."""
    assert windowed()[1].raw_nbytes([length]) == (3 * min(length, 5) + length) * 2 * 16 * 2
