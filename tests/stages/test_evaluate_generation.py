"""Accuracy by generation, and the decoded copy it reads through: the packed cache's values bit for bit."""

from __future__ import annotations

import pytest
import torch
from cache_cases import HEAD_DIM, KIVI_2, SINKS_3, tiny_llama
from evaluation_cases import COARSE, SMALL, Notes, as_loaded, make_plan, spec, tiny
from transformers import PreTrainedTokenizerBase

from kvcal import PlanCache
from kvcal.data.sequences import encode_problem
from kvcal.data.tasks import extract_answer, problems
from kvcal.errors import ArtifactError, NonFiniteActivations, UsageError
from kvcal.models.load import LoadedModel, load
from kvcal.progress import Silent
from kvcal.stages.evaluate import tasks
from kvcal.stages.evaluate.tasks import measure_tasks, wilson_se


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load("reasoner-10m", device="cpu")


def independent(loaded: LoadedModel, plan, task: str, count: int) -> tuple[int, int]:
    """(correct, generated tokens): one problem at a time, plain ``generate``, the plain packed cache."""
    correct = tokens = 0
    for problem in problems(task, count, 1, **SMALL):
        prompt = encode_problem(problem, loaded.tokenizer).unsqueeze(0)
        output = loaded.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=PlanCache(plan, loaded.model.config),
            do_sample=False,
            max_new_tokens=60,
        )
        completion = [t for t in output[0, prompt.shape[1] :].tolist() if t != loaded.tokenizer.eos_token_id]
        tokens += len(completion)
        correct += extract_answer(loaded.tokenizer.decode(completion)) == problem.answer
    return correct, tokens


def test_accuracy_equals_generating_one_by_one(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and segments do not change the tokens."""
    plan = make_plan(embedded, KIVI_2)
    monkeypatch.setattr(tasks, "SEGMENT_TOKENS", 7)
    (result,) = measure_tasks(embedded, plan, spec(batch=2), Silent())
    assert (result.num_correct, result.generated_tokens) == independent(embedded, plan, "chain", 3)
    assert result.accuracy == result.num_correct / 3 > 0  # a trained model, easy problems
    assert (result.task, result.num_problems, result.num_unfinished) == ("chain", 3, 0)


def test_cut_at_max_new_tokens(embedded: LoadedModel) -> None:
    (result,) = measure_tasks(embedded, make_plan(embedded), spec(tasks=("ledger",), max_new_tokens=9), Silent())
    assert (result.num_correct, result.num_unfinished, result.generated_tokens) == (0, 3, 27)


def test_answer_line_ends_a_completion(tokenizer: PreTrainedTokenizerBase) -> None:
    """Also where the model writes no end-of-sequence token; a line that is not complete does not."""
    cases = {"x\nAnswer: 12": False, "x\nAnswer: 12\n": True, "the Answer: 12\n": False, "Answer: a b\n": False}
    for text, is_finished in cases.items():
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        sequence = tasks.Sequence(problems("chain", 1, 0)[0], torch.ones(1), 1)
        tasks._extend(sequence, tokens, None, tokenizer)
        assert sequence.is_finished == is_finished, text


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
    notes = Notes()
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


# ---- the decoded copy


def run_both(pair, mask, steps, act=None):
    """The same random tokens through caches without and with a decoded copy: what both return must be equal, always."""
    loaded = tiny()
    plan = make_plan(loaded, pair)
    caches = [PlanCache(plan, loaded.model.config, mask, keep_decoded=keeps) for keeps in (False, True)]
    generator = torch.Generator().manual_seed(1)
    batch = mask.shape[0]
    for number, new in enumerate(steps):
        if act is not None:
            batch = act(number, caches, batch)
        for index in range(len(plan.layers)):
            k, v = (torch.randn(batch, 2, new, HEAD_DIM, generator=generator) for _ in range(2))
            if k.shape[2] == mask.shape[1] and not caches[1].layers[index].columns:  # the prompt
                k, v = (x * mask.bool()[:, None, :, None] for x in (k, v))
            plain, copied = (cache.update(k, v, index) for cache in caches)
            assert torch.equal(plain[0], copied[0]) and torch.equal(plain[1], copied[1]), number
    caches[1].verify_decoded()
    assert caches[0].nbytes == caches[1].nbytes == plan.nbytes(caches[1].lengths, caches[1].get_seq_length())
    return caches


def ragged_mask(*lengths: int, left: bool = True) -> torch.Tensor:
    width = max(lengths)
    rows = [[0] * (width - n) + [1] * n if left else [1] * n + [0] * (width - n) for n in lengths]
    return torch.tensor(rows)


@pytest.mark.parametrize(("pair", "left"), [(KIVI_2, True), (SINKS_3, False), (COARSE, True)])
def test_the_decoded_copy_returns_what_the_packed_cache_returns(pair, left: bool) -> None:
    run_both(pair, ragged_mask(170, 170, 90, 1, left=left), [170, 100, *[1] * 150, 7, 260, *[1] * 20])


def test_the_decoded_copy_when_rows_leave_and_when_tokens_are_taken_back() -> None:
    def act(number: int, caches, batch: int) -> int:
        if number == 40:
            for cache in caches:
                cache.batch_select_indices(torch.tensor([0, 2]))
            return 2
        if number == 60:
            for cache in caches:
                cache.reorder_cache(torch.tensor([1, 1]))
        if number in (45, 46, 130):
            for cache in caches:
                cache.crop(-3)
        return batch

    run_both(KIVI_2, ragged_mask(200, 150, 120), [200, *[1] * 160], act)


def test_the_decoded_copy_after_reset() -> None:
    def act(number: int, caches, batch: int) -> int:
        if number == 5:
            for cache in caches:
                cache.reset()
        return batch

    run_both(KIVI_2, ragged_mask(140, 100), [140, 120, 9, 1, 1, 140, 130, *[1] * 5], act)


def test_verify_finds_a_page_that_changed() -> None:
    _, cache = run_both(KIVI_2, ragged_mask(300, 280), [300, 1, 1])
    pages = cache.paged_layers[1].sides["v"].pool.records
    pages[0, 0, 0] ^= 1
    with pytest.raises(ArtifactError, match="layer 1: the decoded v differ from the packed cache"):
        cache.verify_decoded()


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
