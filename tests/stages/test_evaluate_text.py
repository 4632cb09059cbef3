"""Text quality: decode-faithful, equal to independent loops, with errors where it must fail."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from evaluation_cases import COARSE, RAW_PAIR, as_loaded, make_plan, text, tiny
from torch import Tensor

from kvcal import PlanCache
from kvcal.data.sequences import TokenDataset
from kvcal.errors import ArtifactError, NonFiniteActivations
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import Silent
from kvcal.stages.evaluate.text import TextQuality, measure_text, reference_logits, text_batches


def measure(loaded: LoadedModel, plan: Plan, data: TokenDataset, batch: int = 4) -> TextQuality:
    return measure_text(loaded, plan, data, batch, Silent())


def token_kl(reference_TV: Tensor, logits_TV: Tensor, mask_T: Tensor) -> Tensor:
    """KL at the positions that predict a loss token, [n]."""
    log_p, log_q = reference_TV.double().log_softmax(-1), logits_TV.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)[:-1][mask_T[1:]]


@torch.inference_mode()
def plain_logits(loaded: LoadedModel, tokens_T: Tensor) -> Tensor:
    return loaded.model(tokens_T.unsqueeze(0), use_cache=False).logits[0]


@torch.inference_mode()
def stepwise_logits(loaded: LoadedModel, plan: Plan, tokens_T: Tensor) -> Tensor:
    """One token at a time through the packed cache: what generation would see."""
    cache = PlanCache(plan, loaded.model.config)
    steps = [loaded.model(token.view(1, 1), past_key_values=cache).logits[0] for token in tokens_T]
    return torch.cat(steps)


def test_16_bit_plan_equals_the_model_without_it() -> None:
    loaded, data = tiny(), text(300, 300, 150)
    quality = measure(loaded, make_plan(loaded, RAW_PAIR), data)
    losses = [
        torch.nn.functional.cross_entropy(plain_logits(loaded, tokens)[:-1], tokens[1:], reduction="sum")
        for tokens in data.sequences
    ]
    assert abs(quality.kl) < 1e-9
    assert quality.top1_agreement == 1
    assert quality.perplexity == pytest.approx(math.exp(sum(losses) / data.num_loss_tokens), rel=1e-5)
    assert (quality.num_sequences, quality.num_tokens, quality.num_loss_tokens) == (3, 750, 747)


def test_equals_decoding_token_by_token() -> None:
    """In fp64: in fp32, products of a batch round otherwise than those of a token, and codes follow."""
    loaded = tiny()
    loaded = replace(loaded, model=deepcopy(loaded.model).double())
    data = text(300, 300, 200, first_loss=30)
    plan = make_plan(loaded, COARSE)
    quality = measure(loaded, plan, data)
    kls, losses, agreements = [], [], []
    for tokens, mask in zip(data.sequences, data.loss_masks, strict=True):
        reference, logits = plain_logits(loaded, tokens), stepwise_logits(loaded, plan, tokens)
        kls.append(token_kl(reference, logits, mask))
        at = mask[1:]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1][at], tokens[1:][at], reduction="none").double())
        agreements.append((reference.argmax(-1) == logits.argmax(-1))[:-1][at].double())
    assert quality.kl == pytest.approx(float(torch.cat(kls).mean()), rel=1e-4)
    assert quality.perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)
    assert quality.top1_agreement == pytest.approx(float(torch.cat(agreements).mean()), abs=0.003)
    assert quality.kl_se == pytest.approx(ratio_error(kls), rel=1e-3)
    assert quality.perplexity_se == pytest.approx(quality.perplexity * ratio_error(losses), rel=1e-3)


def ratio_error(values: list[Tensor]) -> float:
    """Delta method, written out."""
    n, count = len(values), sum(len(v) for v in values)
    mean = sum(float(v.sum()) for v in values) / count
    squares = sum((float(v.sum()) - mean * len(v)) ** 2 for v in values)
    return math.sqrt(n / (n - 1) * squares) / count


def test_is_not_the_one_shot_number() -> None:
    """A single forward attends to its own exact keys and values: it calls any plan perfect."""
    loaded, data = tiny(), text(420)
    plan = make_plan(loaded)
    tokens, mask = data.sequences[0], data.loss_masks[0]
    with torch.inference_mode():
        one_shot = loaded.model(tokens.unsqueeze(0), past_key_values=PlanCache(plan, loaded.model.config)).logits[0]
    wrong = float(token_kl(plain_logits(loaded, tokens), one_shot, mask).mean())
    quality = measure(loaded, plan, data)
    assert abs(wrong) < 1e-9
    assert quality.kl > 1e-3
    assert quality.kl_se is None and quality.perplexity_se is None and quality.top1_se is None


def test_batches_hold_equal_lengths_only_and_do_not_change_the_result() -> None:
    loaded, data = tiny(), text(200, 300, 200, 300, 200)
    shapes = [tuple(batch.input_ids_BT.shape) for batch in text_batches(data, 2, torch.device("cpu"))]
    assert shapes == [(2, 300), (2, 200), (1, 200)]
    together, alone = (measure(loaded, make_plan(loaded), data, batch) for batch in (2, 1))
    assert together.kl == pytest.approx(alone.kl, rel=1e-4)
    assert together.perplexity == pytest.approx(alone.perplexity, rel=1e-5)


def test_kept_logits_of_the_reference_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, data = tiny(), text(300, 150, 300)
    kept = reference_logits(loaded, data, 4)
    assert [len(logits) for logits in kept] == [598, 149]
    found = measure_text(loaded, make_plan(loaded, COARSE), data, 4, Silent(), kept)
    wanted = measure(loaded, make_plan(loaded, COARSE), data)
    assert found.kl == pytest.approx(wanted.kl, rel=1e-4) and found.kl > 1e-3
    assert (found.perplexity, found.top1_agreement) == pytest.approx((wanted.perplexity, wanted.top1_agreement))
    monkeypatch.setattr("kvcal.stages.evaluate.text.KEPT_BYTES", 1000)
    assert reference_logits(loaded, data, 4) == []


def test_not_finite_logits_are_refused() -> None:
    model = deepcopy(tiny().model)
    loaded = as_loaded(model)
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = torch.nan
    with pytest.raises(NonFiniteActivations, match="not finite between tokens 0 and 128"):
        measure(loaded, make_plan(loaded), text(200))


def test_wrong_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny()
    monkeypatch.setattr(PlanCache, "nbytes", property(lambda cache: 12345))
    with pytest.raises(ArtifactError, match=r"12345 bytes of cache, the plan predicts \d+"):
        measure(loaded, make_plan(loaded), text(140))
