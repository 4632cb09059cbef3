"""Text quality: decode-faithful, equal to independent loops, with errors where it must fail; and
accuracy by generation, and the decoded copy that it reads through."""

import itertools
import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from cache_cases import KIVI_2, tiny_llama
from evaluation_cases import COARSE, RAW_PAIR, SMALL, as_loaded, make_plan, spec, text, tiny
from listener import Listener
from static_cases import with_transforms
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvcal import PlanCache
from kvcal.data.sequences import TokenDataset, encode_problem
from kvcal.data.tasks import extract_answer, problems
from kvcal.errors import ArtifactError, NonFiniteActivations, UsageError
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import RAW, Format, Plan
from kvcal.progress import Silent
from kvcal.stages.evaluate import tasks
from kvcal.stages.evaluate.stage import task_cell, task_header
from kvcal.stages.evaluate.tasks import TaskResult, mean_interval, measure_tasks, task_result, wilson_se
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


STRIPES = Format(2, "token", 64, 3, 20, quantizer="rotated", stripe_tokens=16)


@pytest.mark.parametrize("kind", ["pages", "stripes", "stripes of values", "stripes in a basis"])
def test_equals_decoding_token_by_token(kind: str) -> None:
    """In fp64: in fp32, products of a batch round otherwise than those of a token, and codes follow."""
    loaded = tiny()
    loaded = replace(loaded, model=deepcopy(loaded.model).double())
    data = text(300, 300, 200, first_loss=30) if kind == "pages" else text(180, 150, first_loss=30)
    pairs = {"pages": COARSE, "stripes of values": (RAW, STRIPES)}
    plan = make_plan(loaded, pairs.get(kind, (STRIPES, STRIPES)))
    if kind.endswith("basis"):
        plan = with_transforms(plan, "basis", 0.2)
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


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load("reasoner-10m", device="cpu")


def independent(loaded: LoadedModel, plan, task: str, count: int) -> tuple[int, int]:
    """(correct, generated tokens): one problem at a time, plain ``generate``, the plain packed cache."""
    correct = tokens = 0
    for problem in problems(task, count, 1, **SMALL):
        prompt = encode_problem(problem, loaded.tokenizer).unsqueeze(0)
        output = loaded.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), past_key_values=PlanCache(plan, loaded.model.config),
            do_sample=False, max_new_tokens=60,
        )  # fmt: skip
        completion = [t for t in output[0, prompt.shape[1] :].tolist() if t != loaded.tokenizer.eos_token_id]
        tokens += len(completion)
        correct += extract_answer(loaded.tokenizer.decode(completion)) == problem.answer
    return correct, tokens


def test_accuracy_equals_generating_one_by_one(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and segments do not change the tokens."""
    plan = make_plan(embedded, KIVI_2)
    monkeypatch.setattr(tasks, "SEGMENT_TOKENS", 7)
    (result,) = measure_tasks(embedded, plan, spec(batch=2, num_problems=2), Silent())
    assert (result.num_correct, result.generated_tokens) == independent(embedded, plan, "chain", 2)
    assert result.accuracy == result.num_correct / 2 > 0  # a trained model, easy problems
    assert (result.task, result.num_problems, result.num_unfinished) == ("chain", 2, 0)


def test_cut_at_max_new_tokens(embedded: LoadedModel) -> None:
    (result,) = measure_tasks(embedded, make_plan(embedded), spec(tasks=("ledger",), max_new_tokens=9), Silent())
    assert (result.num_correct, result.num_unfinished, result.generated_tokens) == (0, 3, 27)


def test_answer_line_ends_a_completion(tokenizer: PreTrainedTokenizerBase) -> None:
    """Also where the model writes no end-of-sequence token; a line that is not complete does not."""
    cases = {"x\nAnswer: 12": False, "x\nAnswer: 12\n": True, "the Answer: 12\n": False, "Answer: a b\n": False}
    for line, is_finished in cases.items():
        tokens = tokenizer(line, add_special_tokens=False)["input_ids"]
        sequence = tasks.Written(problems("chain", 1, 0)[0], torch.ones(1), 1)
        tasks._extend(sequence, tokens, None, tokenizer)
        assert sequence.is_finished == is_finished, line


def test_prompt_longer_than_the_context(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.model.config, "max_position_embeddings", 40)
    with pytest.raises(UsageError, match="exceeds the model's context of 40"):
        measure_tasks(embedded, make_plan(embedded), spec(tasks=("chain",)), Silent())


def test_nan_logits_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    config = tiny_llama().config.__class__(**{**tiny_llama().config.to_dict(), "vocab_size": 4096})
    loaded = as_loaded(tiny_llama().__class__(config).eval(), tokenizer)
    loaded.model.get_output_embeddings().register_forward_hook(lambda module, args, logits: logits * torch.nan)
    with pytest.raises(NonFiniteActivations, match="NaN after"):
        measure_tasks(loaded, make_plan(loaded), spec(tasks=("times",)), Silent())


def test_progress_and_bytes(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Listener()
    measure_tasks(embedded, make_plan(embedded), spec(tasks=("times",), num_problems=1), notes)
    monkeypatch.setattr(PlanCache, "nbytes", property(lambda cache: 1))
    with pytest.raises(ArtifactError, match="take 1 bytes"):
        measure_tasks(embedded, make_plan(embedded), spec(tasks=("times",), num_problems=1), notes)


def test_wilson_against_the_interval_itself() -> None:
    """The interval's ends solve |p - share| = sqrt(p (1 - p) / n)."""
    for correct, n in ((0, 8), (3, 8), (24, 24), (11, 36)):
        share, half = correct / n, wilson_se(correct, n)
        centre = (share + 1 / (2 * n)) / (1 + 1 / n)
        for p in (centre - half, centre + half):
            assert (p - share) ** 2 == pytest.approx(p * (1 - p) / n, abs=1e-12)


def test_every_segment_compares_what_was_read_with_the_packed_cache(
    embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that changes after the copy's back ends the measurement."""
    counted = tasks.require_predicted_bytes

    def flip(cache: PlanCache) -> None:
        counted(cache)
        pages = cache.paged_layers[0].sides["k"].pool.records
        assert len(pages)
        pages[0, 0, 0] ^= 1

    monkeypatch.setattr(tasks, "require_predicted_bytes", flip)
    long = spec(num_problems=1, max_size=64, max_new_tokens=40)
    with pytest.raises(ArtifactError, match="layer 0: the decoded k differ from the packed cache"):
        measure_tasks(embedded, make_plan(embedded), long, Silent())


def test_errors_of_shares_stay_within_0_and_100_percent() -> None:
    """Few problems are counted; of more, an interval is told where the error would lead out."""

    def task(correct: int, count: int) -> TaskResult:
        return task_result("t", [True] * correct + [False] * (count - correct), [9])

    assert [task_cell(task(correct, 4)) for correct in (0, 3, 4)] == ["0 of 4", "3 of 4", "4 of 4"]
    assert task_header(task(3, 4)) == "t" and task_header(task(10, 40)) == "t %"
    assert task_cell(task(10, 40)) == "25.0 ± 6.8"
    assert [task_cell(task(correct, 40)) for correct in (0, 39, 40)] == [
        "0.0 (0.0 to 2.4)", "97.5 (93.6 to 99.0)", "100.0 (97.6 to 100.0)",
    ]  # fmt: skip
    for correct, count in itertools.product((0, 1, 7, 8), (8, 64)):
        one, other = task(correct, count), task(count // 2, count)
        low, high = one.interval
        assert 0 <= low <= one.accuracy <= high <= 1 and high - low == pytest.approx(2 * one.accuracy_se, abs=1e-12)
        assert mean_interval([one]) == pytest.approx(one.interval)
        low, high = mean_interval([one, other])
        assert 0 <= low < (one.accuracy + other.accuracy) / 2 < high <= 1
