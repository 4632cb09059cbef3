"""Acceptance of drafts: equal to a loop of greedy decoding, and what is refused."""

import warnings
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from cache_cases import KIVI_2
from evaluation_cases import COARSE, RAW_PAIR, as_loaded, make_plan, text, wordy_llama
from tiny_models import TINY_MODELS
from torch import Tensor

from kvcal import PlanCache
from kvcal.cache import paged_layer
from kvcal.data.reading import EvaluateSpec
from kvcal.data.sequences import TokenDataset
from kvcal.errors import SlowPath, UnsupportedModel, UsageError
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Format, Plan
from kvcal.progress import SILENT
from kvcal.stages.divergence import unquantized_plan
from kvcal.stages.evaluate import drafts as stage
from kvcal.stages.evaluate.drafts import EVERY, NUM_DRAFTS, DraftQuality, measure_drafts, propose
from kvcal.stages.evaluate.stage import evaluate, table_columns


def loaded_model() -> LoadedModel:
    return as_loaded(wordy_llama(128))


def measured(loaded: LoadedModel, plan: Plan, data: TokenDataset, draft: str = "layers:1") -> DraftQuality:
    return measure_drafts(loaded, plan, propose(loaded, draft, data, 4, SILENT), SILENT)


@torch.inference_mode()
def drafted(loaded: LoadedModel, tokens_T: Tensor) -> list[int]:
    """The first layer's most likely tokens after a text, without a cache."""
    model, base, given = loaded.model, loaded.model.model, tokens_T
    for _ in range(NUM_DRAFTS):
        hidden = base.embed_tokens(given[None])
        rotary = base.rotary_emb(hidden, torch.arange(len(given))[None])
        mask = torch.full((len(given), len(given)), float("-inf")).triu(1)[None, None]
        hidden = base.layers[0](hidden, attention_mask=mask, position_embeddings=rotary)
        given = torch.cat([given, model.lm_head(base.norm(hidden))[0, -1:].argmax(-1)])
    return given[len(tokens_T) :].tolist()


@torch.inference_mode()
def written(loaded: LoadedModel, tokens_T: Tensor, plan: Plan) -> dict[int, list[int]]:
    """By place: the most likely tokens after the first ones of a text, one token at a time through a plan's
    cache."""
    cache, found = PlanCache(plan, loaded.model.config), {}

    def fed(token: Tensor, into: PlanCache) -> Tensor:
        return loaded.model(token.view(1, 1), past_key_values=into).logits[0, -1].argmax()

    for place, token in enumerate(tokens_T, 1):
        after = fed(token, cache)
        if place in range(128, len(tokens_T), EVERY):
            chain, aside = [after], deepcopy(cache)
            while len(chain) < NUM_DRAFTS:
                chain.append(fed(chain[-1], aside))
            found[place] = torch.stack(chain).tolist()
    return found


@pytest.mark.parametrize("pair", [COARSE, KIVI_2], ids=["coarse", "kivi-2"])
def test_equals_greedy_decoding(pair: tuple) -> None:
    """A plan takes of a draft the tokens that it would write itself, up to the first other one."""
    loaded, data = loaded_model(), text(260, 200, first_loss=140)
    plan, raw = make_plan(loaded, pair), make_plan(loaded, RAW_PAIR)
    found = measured(loaded, plan, data)
    taken, at_16_bits, number = torch.zeros(NUM_DRAFTS), torch.zeros(NUM_DRAFTS), 0
    for tokens, mask in zip(data.sequences, data.loss_masks, strict=True):
        ours, theirs = (written(loaded, tokens, one) for one in (plan, raw))
        for place in ours:
            if mask[place]:
                draft = torch.tensor(drafted(loaded, tokens[:place]))
                taken += (draft == torch.tensor(ours[place])).cumprod(0)
                at_16_bits += (draft == torch.tensor(theirs[place])).cumprod(0)
                number += 1
    assert found.num_prefixes == number and float(at_16_bits.sum()) > 0
    assert found.by_place == pytest.approx((taken / number).tolist())
    assert found.accepted == pytest.approx(float(taken.sum()) / number / NUM_DRAFTS)
    assert found.change == pytest.approx(float((taken - at_16_bits).sum()) / number / NUM_DRAFTS)
    assert pair == KIVI_2 or found.change < 0


STRIPES = (Format(2, "token", 32, 0, 16, quantizer="rotated", stripe_tokens=16),) * 2


@pytest.mark.parametrize("pair", [COARSE, STRIPES], ids=["coarse", "stripes"])
def test_a_copy_is_read_as_the_pages_would_be(pair: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels would take steps, which is told of pages that are decoded at every one."""
    monkeypatch.setattr(paged_layer, "STEPPED", {"cpu"})
    loaded, data = loaded_model(), text(260, 200, 200)
    plan = make_plan(loaded, pair)
    with warnings.catch_warnings(action="error", category=SlowPath):
        found = measured(loaded, plan, data, "layers:2")
    monkeypatch.setattr(stage, "DecodedCache", PlanCache)
    with pytest.warns(SlowPath):
        assert measured(loaded, plan, data, "layers:2") == found
    assert found.change < 0


def test_errors_are_those_of_pairs() -> None:
    """Of n texts of equally many prefixes: the deviation of their own changes, by the root of n."""
    loaded, data = loaded_model(), text(*[180] * 4)
    proposed = propose(loaded, "layers:2", data, 4, SILENT)
    plan = make_plan(loaded, COARSE)
    found = measure_drafts(loaded, plan, proposed, SILENT)
    each = [
        measured(loaded, plan, replace(data, sequences=(tokens,), loss_masks=(mask,)), "layers:2")
        for tokens, mask in zip(data.sequences, data.loss_masks, strict=True)
    ]
    assert all(one.change_se is None and one.accepted_se is None for one in each)
    changes, shares = (torch.tensor([getattr(one, name) for one in each]) for name in ("change", "accepted"))
    assert found.change == pytest.approx(float(changes.mean()), abs=1e-7)
    assert found.change_se == pytest.approx(float(changes.std() / 4**0.5)) and found.change_se > 0
    assert found.accepted_se == pytest.approx(float(shares.std() / 4**0.5))


def test_model_keeps_all_of_its_layers() -> None:
    loaded, data = loaded_model(), text(150)
    before = loaded.model(data.sequences[0][None]).logits
    propose(loaded, "layers:1", data, 4, SILENT)
    assert torch.equal(loaded.model(data.sequences[0][None]).logits, before)


def test_sliding_windows_take_drafts_back() -> None:
    loaded = as_loaded(TINY_MODELS["gemma3"]())
    plan = unquantized_plan(loaded.identity, loaded.geometry)
    found = measured(loaded, plan, text(200, 200))
    assert found.change == 0 and found.num_prefixes == 6


def test_all_layers_draft_what_16_bits_take() -> None:
    loaded, data = loaded_model(), text(200, 200)
    found = measured(loaded, make_plan(loaded, COARSE), data, "layers:2")
    assert measured(loaded, make_plan(loaded, RAW_PAIR), data, "layers:2").accepted == 1
    assert found.accepted < 1 and found.change == found.accepted - 1


def test_another_model_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model itself, by name: all it drafts it takes."""
    loaded, data = loaded_model(), text(200, 200)
    monkeypatch.setattr(stage, "load", lambda source, device: as_loaded(wordy_llama(128)))
    monkeypatch.setattr(stage, "tokenizer_of", lambda one: SameTokens())
    found = measured(loaded, make_plan(loaded, RAW_PAIR), data, "itself")
    assert found.accepted == 1 and found.by_place == (1,) * NUM_DRAFTS and found.change == 0
    coarse = measured(loaded, make_plan(loaded, COARSE), data, "itself")
    assert coarse.accepted < 1 and coarse.change == coarse.accepted - 1


class SameTokens:
    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


def test_other_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, vocabularies = loaded_model(), iter(({"a": 0}, {"b": 0}))
    monkeypatch.setattr(stage, "load", lambda source, device: loaded)
    tokenizers = iter([type("Tokens", (), {"get_vocab": lambda self, one=one: one})() for one in vocabularies])
    monkeypatch.setattr(stage, "tokenizer_of", lambda one: next(tokenizers))
    with pytest.raises(UsageError, match="has other tokens"):
        propose(loaded, "other", text(200), 4, SILENT)


@pytest.mark.parametrize("draft", ["layers:0", "layers:3", "layers:", "layers:x"])
def test_layers_that_are_not_there_are_refused(draft: str) -> None:
    with pytest.raises(UsageError, match="expected layers:N with 1 to 2 of the model's layers"):
        propose(loaded_model(), draft, text(200), 4, SILENT)


def test_short_texts_and_states_are_refused() -> None:
    with pytest.raises(UsageError, match="no text has as many"):
        propose(loaded_model(), "layers:1", text(128), 4, SILENT)
    with pytest.raises(UnsupportedModel, match="do not take tokens back"):
        propose(as_loaded(TINY_MODELS["falcon_h1"]()), "layers:1", text(200), 4, SILENT)


def test_model_that_runs_all_of_its_layers_is_refused() -> None:
    loaded = as_loaded(TINY_MODELS["gpt2"]())
    with pytest.raises(UnsupportedModel, match="runs 2 layers where it is told 1"):
        propose(loaded, "layers:1", text(200), 4, SILENT)


def test_a_row_has_them_next_to_kl(tmp_path) -> None:
    loaded, data = loaded_model(), text(200, 200)
    spec = EvaluateSpec(tasks=(), batch=2, draft="layers:1")
    named = [(name, make_plan(loaded, pair)) for name, pair in (("16-bit", RAW_PAIR), ("coarse", COARSE))]
    found = evaluate(loaded, named, spec, data, {"model.weights_sha256": "b"}, tmp_path / "evaluation.json", SILENT)
    assert [row.drafts for row in found.rows] == [measured(loaded, plan, data) for _, plan in named]
    columns = dict(table_columns(found.rows))
    assert columns["change from 16 bits"][0] == "0.0 ± 0.0" and len(columns["drafts accepted %"]) == 2
    plain = evaluate(loaded, named, replace(spec, draft=""), data, {}, tmp_path / "plain.json", SILENT)
    assert all(row.drafts is None for row in plain.rows)
    assert "drafts accepted %" not in dict(table_columns(plain.rows))
