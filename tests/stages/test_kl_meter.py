"""The KL meter: each plan is measured once, told apart by its content, and each tensor is hashed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from predictor_runs import loaded_llama, plan_of_random_predictors, sequences
from torch import Tensor

from kvcal.cache.attached import attached_for
from kvcal.cache.plan_cache import PlanCache
from kvcal.models.load import LoadedModel
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import lattice_tensors
from kvcal.progress import Silent
from kvcal.recipe import CacheSpec
from kvcal.stages import divergence
from kvcal.stages.checkpoint import Checkpoint, State
from kvcal.stages.divergence import Text, kl_texts, one_side_plan, unquantized_plan
from kvcal.stages.search import kl_meter
from kvcal.stages.search.kl_meter import PHASE, KLMeter, declare_plans, plan_digest


def meter_of(loaded: LoadedModel, texts: Sequence[Text], tiers: Sequence[int], checkpoint: Checkpoint) -> KLMeter:
    return KLMeter(loaded, texts, tiers, 2, checkpoint, Silent())


def checkpoint_of(folder: Path, num_texts: int) -> Checkpoint:
    start = State({}, {PHASE: 0})
    return Checkpoint(folder / "kept.safetensors", "kls", {}, start, declare_plans(num_texts), Silent(), is_kept=True)


def test_plans_are_measured_once_by_content_and_tensors_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, hashed, original = loaded_llama(), [], kl_meter.tensors_sha256

    def counted(tensors: dict[str, Tensor]) -> str:
        hashed.extend(tensors.values())
        return original(tensors)

    monkeypatch.setattr(kl_meter, "tensors_sha256", counted)
    k, v = Format(2, "channel", 32), Format(2, "token", 32)
    plan = plan_of_random_predictors(loaded, k, v)
    others = [
        replace(plan_of_random_predictors(loaded, fmt, v), tensors=plan.tensors) for fmt in (Format(3), Format(4))
    ]
    same = replace(plan, tensors={name: x.clone() for name, x in plan.tensors.items()}, provenance={"recipe": "other"})
    same = replace(same, workload=Workload(3, 999))
    name = "layers.1.v_predictor.bias"
    changed = replace(plan, tensors={**plan.tensors, name: plan.tensors[name] + 1.0})
    [tokens_T] = sequences([140]).sequences
    text = Text(0, tokens_T, torch.arange(140) > 130)
    with checkpoint_of(tmp_path, 1) as checkpoint:
        meter = meter_of(loaded, [text], (1,), checkpoint)
        kls = meter.measure([plan, *others, plan, same, changed], 1, "plans")[:, 0, 0].tolist()
        assert meter.num_plans == 4 and kls[0] == kls[3] == kls[4]
        assert len({*kls[:3], kls[5]}) == 4
        assert meter.measure([changed, plan], 1, "plans again")[:, 0, 0].tolist() == [kls[5], kls[0]]
    assert len(plan.tensors) >= 5 and len(hashed) == 2 * len(plan.tensors) + 1
    plan.tensors[name].add_(1.0)
    assert plan_digest(plan) == plan_digest(changed)  # a tensor that was changed is hashed again


def test_texts_are_measured_tier_by_tier_and_known_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the way to all texts, the statistics are the same bits, and those of each text by itself."""
    loaded, measured = loaded_llama(), []
    data = sequences([200, 150, 170, 140, 190]).sequences
    texts = [Text(n, tokens_T, torch.arange(len(tokens_T)) > 129) for n, tokens_T in enumerate(data)]
    plans = [plan_of_random_predictors(loaded, Format(bits, "channel", 32), Format(2, "token", 32)) for bits in (2, 4)]
    original = kl_meter.deviations
    monkeypatch.setattr(kl_meter, "deviations", lambda *args: measured.append(len(args[3])) or original(*args))
    with checkpoint_of(tmp_path, 5) as checkpoint:
        meter = meter_of(loaded, texts, (2, 5), checkpoint)
        few = meter.measure(plans, 2, "few")
        every = meter.measure(plans, 5, "all")
        assert torch.equal(every[:, :2], few) and measured == [2, 2, 1]
    with checkpoint_of(tmp_path, 5) as checkpoint:
        assert torch.equal(meter_of(loaded, texts, (2, 5), checkpoint).measure(plans, 5, "all"), every)
        assert measured == [2, 2, 1]
    (tmp_path / "kept.safetensors").unlink()
    with checkpoint_of(tmp_path, 5) as checkpoint:
        assert torch.equal(meter_of(loaded, texts, (2, 5), checkpoint).measure(plans, 5, "all"), every)
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    for number, text in enumerate(texts):
        found = original(loaded.model, reference, plans, text.tokens_T[None], text.loss_mask_T[None])
        for row, kl_n, flips_n in zip(every[:, number], found.kl_Pn, found.flips_Pn, strict=True):
            ordered = sorted(kl_n.tolist())
            place = 0.99 * (len(ordered) - 1)
            low, part = ordered[int(place)], place - int(place)
            tail = low + part * (ordered[min(int(place) + 1, len(ordered) - 1)] - low)
            sure = int(found.is_sure_n.sum())
            flipped = sum(a and b for a, b in zip(flips_n.tolist(), found.is_sure_n.tolist(), strict=True))
            expected = [sum(ordered) / len(ordered), tail, flipped / max(1, sure)]
            assert row.tolist() == pytest.approx(expected, rel=2e-3, abs=1e-9)


def test_plans_that_are_fed_in_other_chunks_are_told_apart_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plans a lockstep, whose pages end at other tokens: every text of a batch has its own statistics."""
    monkeypatch.setattr(divergence, "LOCKSTEP", 2)
    loaded, reference = loaded_llama(), unquantized_plan(loaded_llama().identity, loaded_llama().geometry)
    formats = [Format(2, "channel", 32, recent_window=window) for window in (0, 0, 20, 50)]
    plans = [plan_of_random_predictors(loaded, k, replace(k, axis="token")) for k in formats]
    texts = [
        Text(n, tokens_T, torch.arange(len(tokens_T)) > 60)
        for n, tokens_T in enumerate(sequences([400, 260]).sequences)
    ]
    together = divergence.deviations(loaded.model, reference, plans, *divergence.padded_texts(texts)).statistics(2)
    for number, text in enumerate(texts):
        alone = divergence.deviations(loaded.model, reference, plans, text.tokens_T[None], text.loss_mask_T[None])
        torch.testing.assert_close(together[:, number, 0], alone.kl_Pn.mean(1), rtol=1e-3, atol=1e-9)


def test_sure_tokens_and_flips_are_those_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of made-up logits, chunk by chunk: a row of each kind."""
    loaded = loaded_llama()
    sure, unsure = torch.tensor([9.0, 0.0, 0.0]), torch.tensor([1.0, 0.9, 0.8])
    wanted = torch.stack([sure, sure, unsure, unsure])[None]
    found = torch.stack([sure, sure.flip(0), unsure.flip(0), unsure])[None]

    def lockstep(*args: object) -> Iterator[tuple[int, int, Tensor]]:
        yield 0, 0, wanted
        yield 1, 0, found

    monkeypatch.setattr(divergence, "lockstep", lockstep)
    plan = unquantized_plan(loaded.identity, loaded.geometry)
    seen = divergence.deviations(loaded.model, plan, [plan], torch.zeros(1, 5).long(), torch.arange(5)[None] > 0)
    assert seen.is_sure_n.tolist() == [True, True, False, False]
    assert seen.flips_Pn.tolist() == [[False, True, True, False]]
    assert seen.statistics(1)[0, 0, 2] == 0.5


def test_any_first_few_texts_are_of_all_kinds() -> None:
    data = replace(sequences([200] * 6), kinds=("a", "a", "a", "b", "b", "c"))
    texts = kl_texts(data, 5, 200, CacheSpec(0, 0, 0))
    assert [text.kind for text in texts] == ["a", "b", "c", "a", "b"] and [t.sample for t in texts] == [0, 3, 5, 1, 4]


def test_plans_share_the_tensors_of_their_lattices() -> None:
    layers = plan_of_random_predictors(loaded_llama(), Format(2), Format(2)).layers
    layers = tuple(replace(layer, k=(Format(2, lattice_dim=2),), v=(Format(2, lattice_dim=2),)) for layer in layers)
    one, other = lattice_tensors(layers), lattice_tensors(layers[:2])
    assert other.keys() < one.keys() and all(one[name] is other[name] for name in other)


def test_every_layers_side_has_random_signs_of_its_own() -> None:
    """Without signs, a row of equal values becomes a spike; with the same ones, layers err alike."""
    layers = plan_of_random_predictors(loaded_llama(), Format(2), Format(2)).layers
    layers = tuple(replace(layer, k=(Format(2, lattice_dim=2),), v=(Format(2, lattice_dim=2),)) for layer in layers)
    signs = {name: tuple(x.tolist()) for name, x in lattice_tensors(layers).items() if name.endswith("_signs")}
    assert sorted(signs) == [f"layers.{index}.{side}_signs" for index in range(3) for side in "kv"]
    assert len(set(signs.values())) == 6 and all(set(row) == {-1, 1} and len(row) == 16 for row in signs.values())


def test_plans_whose_chunks_end_alike_are_fed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is not fed in the smaller chunks of another one's window."""
    loaded, groups, original = loaded_llama(), list[list[list[int]]](), kl_meter.deviations

    def noted(model: object, reference: object, plans: Sequence[Plan], *others: object) -> object:
        groups.append([kl_meter.chunk_ends(plan) for plan in plans])
        return original(model, reference, plans, *others)

    monkeypatch.setattr(kl_meter, "deviations", noted)
    monkeypatch.setattr(kl_meter, "LOCKSTEP", 2)
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    plans = [one_side_plan(reference, layer, "v", Format(2, "token", 32, 0, window))
             for layer in range(2) for window in (14, 0)]  # fmt: skip
    [tokens_T] = sequences([300]).sequences
    with checkpoint_of(tmp_path, 1) as checkpoint:
        meter = meter_of(loaded, [Text(0, tokens_T, torch.arange(300) > 130)], (1,), checkpoint)
        together = meter.measure(plans, 1, "plans")
        assert groups == [[[0], [0]], [[14], [14]]]
        for plan, found in zip(plans, together, strict=True):
            assert torch.equal(meter.measure([plan], 1, "one")[0], found)


def test_chunks_end_where_pages_are_read_and_where_queries_pack_them() -> None:
    boost = Boost("query_range", (Tier(4, 0.5),))
    reference = unquantized_plan(loaded_llama().identity, loaded_llama().geometry)
    formats = [Format(2, "channel", 32, 0, 33), Format(2, "channel", 32, 0, 161, boost=boost)]
    plans = [reference, *(one_side_plan(reference, 1, "k", fmt) for fmt in formats)]
    assert [kl_meter.chunk_ends(plan) for plan in plans] == [[], [33], [0, 33]]
    cache, ends = PlanCache(plans[2], loaded_llama().model.config), set[int]()
    with attached_for(loaded_llama().model, plans[2]):
        for _ in range(6):
            stop = cache.get_seq_length() + cache.tokens_to_next_page()
            loaded_llama().model(torch.full((1, stop - cache.get_seq_length()), 5), past_key_values=cache)
            ends.add(stop % 128)
    assert sorted(ends) == [0, 33]
