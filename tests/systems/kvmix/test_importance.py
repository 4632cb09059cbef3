"""KVmix's scores against transformers' own loss, its ranking, and the correlation of two rankings."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profile_cases import gqa_model
from tiny_models import as_loaded
from torch import Tensor

from kvcal.data.sequences import TokenDataset
from kvcal.plan.page_format import Format
from kvcal.progress import Silent
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.recipe_files import load_recipe, with_knobs
from kvcal.stages.profile.stage import run_profile
from kvcal.systems.kvmix.importance import important_layers, kvmix_formats, num_important, window_rule
from kvcal.systems.kvmix.recipe import ImportanceSpec
from kvcal.systems.kvmix.window_rule import WindowRule

NUM_LAYERS = 4
LENGTHS, PROMPTS = (19, 30, 24), (4, 11, 1)


def profiled(folder: Path, sequences: list[Tensor], masks: list[Tensor]) -> dict[tuple[int, str], float]:
    """Every score of a profile of these sequences."""
    loaded = as_loaded(gqa_model("llama", num_layers=NUM_LAYERS))
    data = TokenDataset(tuple(sequences), tuple(masks), "f", "random tokens")
    spec = ProfileSpec(num_bits=(2,), k_axes=("token",), group_sizes=(32,), kl_samples=0)
    found = run_profile(loaded, data, spec, CacheSpec(), {}, folder / "profile.safetensors", Silent())
    return {(layer, side): found.grad_norm(layer, side) for layer in range(NUM_LAYERS) for side in ("k", "v")}


def autograd_scores(sequences: list[Tensor], masks: list[Tensor], shift: int = 1) -> dict[tuple[int, str], float]:
    """fp64; transformers' loss, which shifts ``labels`` once by itself; one sequence at a time, one
    ``autograd.grad`` for each weight; -100 where there is no loss. ``shift`` = 2: labels shifted before they
    are given, as the paper's text says and its public code does."""
    model = gqa_model("llama", torch.float64, NUM_LAYERS)
    scores = {(layer, side): 0.0 for layer in range(NUM_LAYERS) for side in ("k", "v")}
    for tokens_T, mask_T in zip(sequences, masks, strict=True):
        labels_T = tokens_T.where(mask_T, torch.tensor(-100))
        if shift == 2:
            labels_T = torch.cat([labels_T[1:], torch.tensor([-100])])
        for (layer, side), total in scores.items():
            attention = model.model.layers[layer].self_attn
            weight = (attention.k_proj if side == "k" else attention.v_proj).weight
            loss = model(input_ids=tokens_T[None], labels=labels_T[None], use_cache=False).loss
            (gradient,) = torch.autograd.grad(loss, [weight])
            norm = math.sqrt(math.fsum(float(value) ** 2 for value in gradient.flatten()))
            scores[layer, side] = total + norm / len(sequences)
    return scores


def random_sequences() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(8)
    sequences = [torch.randint(3, 64, (length,), generator=generator) for length in LENGTHS]
    masks = [torch.arange(length) >= prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    return sequences, masks


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], float]:
    return profiled(tmp_path_factory.mktemp("profile"), *random_sequences())


def test_scores_are_mean_gradient_norms_with_labels_shifted_once(scores) -> None:
    """The loss on token t + 2 gives other scores, by far more than the tolerance."""
    sequences, masks = random_sequences()
    right, twice = (autograd_scores(sequences, masks, shift) for shift in (1, 2))
    for key, score in scores.items():
        assert score == pytest.approx(right[key], rel=1e-4)
        assert score != pytest.approx(twice[key], rel=2e-3)


def test_the_papers_shares_of_32_layers() -> None:
    """k2.19 v2.38 is 20 %, k2.28 v2.56 is 30 %: 3 and 4 bits for the important layers, 2 for the others."""
    for share, k_bits, v_bits in ((0.2, 2.19, 2.38), (0.3, 2.28, 2.56)):
        important = num_important(share, 32)
        assert round(2 + important / 32, 2) == k_bits
        assert abs(2 + 2 * important / 32 - v_bits) <= 0.005


def test_shares_are_floored_as_written_and_never_to_nothing() -> None:
    assert [num_important(0.2, layers) for layers in (0, 1, 4, 5, 9, 10, 28, 32)] == [0, 1, 1, 1, 1, 2, 5, 6]
    assert num_important(0.29, 100) == 29  # 28.999999999999996 as a product of floats
    assert [num_important(share, 10) for share in (0, 0.0, 1e-9, 0.1, 0.3, 0.7, 1, 1.0)] == [0, 0, 1, 1, 3, 7, 10, 10]


def test_the_highest_scores_win_and_ties_go_to_the_lower_layer() -> None:
    scores = {3: 1.0, 5: 4.0, 7: 4.0, 11: 0.5, 12: 4.0}
    assert important_layers(scores, 0.2) == {5}
    assert important_layers(scores, 0.4) == {5, 7}
    assert important_layers(dict(reversed(scores.items())), 0.4) == {5, 7}
    assert important_layers(scores, 0.8) == {3, 5, 7, 12}
    assert important_layers(scores, 0.0) == frozenset()
    assert important_layers(scores, 1.0) == scores.keys()


def random_scores(layers: list[int], seed: int) -> dict[str, dict[int, float]]:
    values = torch.rand(2, len(layers), generator=torch.Generator().manual_seed(seed)).tolist()
    return {side: dict(zip(layers, row, strict=True)) for side, row in zip(("k", "v"), values, strict=True)}


def test_formats_are_the_papers() -> None:
    """20 % of the layers at 3 (K) and 4 (V) bits with windows of 20 %, the others at 2 bits with 10 %."""
    layers = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12]
    scores = random_scores(layers, 3)
    formats = kvmix_formats(scores, ImportanceSpec(), CacheSpec(num_sink_tokens=0))
    assert list(formats) == layers
    for number, side in enumerate(("k", "v")):
        best = sorted(layers, key=lambda index: scores[side][index])[-2:]
        for index in layers:
            bits = (3, 4)[number] if index in best else 2
            rule = WindowRule("paged", 0.2, 31) if index in best else WindowRule("paged", 0.1, 14)
            axis = ("channel", "token")[number]
            assert formats[index][number] == Format(bits, axis, 32, 0, 0, "float16", window_rule=rule)
    assert {index for index in layers if formats[index][0].num_bits == 3} != {
        index for index in layers if formats[index][1].num_bits == 4
    }


def test_a_paged_window_is_charged_for_what_it_reaches() -> None:
    for share in (0.05, 0.2, 0.5, 0.9):
        rule = window_rule(ImportanceSpec(max_window=512), share)
        assert rule.max_tokens == max(WindowRule("paged", share, 512).window(count) for count in range(0, 9000, 64))
    assert window_rule(ImportanceSpec(max_window=20, min_window=3), 0.2) == WindowRule("paged", 0.2, 20, 3)
    assert window_rule(ImportanceSpec(max_window=90, min_window=40), 0.2) == WindowRule("paged", 0.2, 40, 40)


def test_the_recipes_are_the_paper_and_its_windows() -> None:
    """Its ablations differ in the window alone; nothing else is measured than what the scores need."""
    clamped = {"importance.window": "clamped", "importance.min_window": 32, "importance.max_window": 128}
    changes: list[tuple[dict[str, Any], int]] = [({}, 31), (clamped, 128), ({"importance.window": "none"}, 0)]
    for change, window in changes:
        recipe = with_knobs(load_recipe("kvmix"), change)
        assert recipe.importance is not None and recipe.cache.num_sink_tokens == 0
        assert recipe.data.num_samples == 20 and recipe.profile.kl_samples == 0
        same = replace(recipe.importance, window="paged", min_window=0, max_window=512)
        assert same == ImportanceSpec()
        scores = {"k": {0: 2.0, 1: 1.0}, "v": {0: 2.0, 1: 1.0}}
        (k, v), _ = kvmix_formats(scores, recipe.importance, recipe.cache).values()
        assert (k.max_window, v.max_window) == (window, window)
