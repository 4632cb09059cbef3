"""kvcal.stages.evaluate.tasks: an answer is right where greedy decoding through the packed cache writes it."""

from __future__ import annotations

import pytest
import torch
from evaluation_cases import COARSE, WORDY_CONTEXT, as_loaded, make_plan, wordy_llama
from transformers import PreTrainedTokenizerBase

from kvcal.cache.plan_cache import PlanCache
from kvcal.data.reading import EvaluateSpec, Reading
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.models.attention import with_cache
from kvcal.models.load import LoadedModel
from kvcal.progress import SILENT
from kvcal.stages.evaluate.tasks import measure_reading, read_answers


@pytest.fixture(scope="module")
def wordy(tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    return as_loaded(wordy_llama(len(tokenizer)), tokenizer)


@torch.inference_mode()
def test_right_answers_are_those_that_greedy_decoding_writes(wordy: LoadedModel) -> None:
    plan = make_plan(wordy, COARSE, 640)
    tokens_T = torch.randint(5, wordy.vocab_size, (320,), generator=torch.Generator().manual_seed(0))
    cache, dense_T = (
        PlanCache(plan, wordy.model.config),
        wordy.model(tokens_T[None], use_cache=False).logits[0].argmax(-1),
    )
    for place in range(320):
        logits_V = wordy.model(tokens_T[place].view(1, 1), **with_cache(wordy.model, cache)).logits[0, -1]
        if 299 <= place < 319:  # what it writes by itself
            tokens_T[place + 1] = logits_V.argmax()
    assert dense_T[299] != tokens_T[300]  # the pages tell
    wrong_T = tokens_T.clone()
    wrong_T[305] = (wrong_T[305] + 1) % wordy.vocab_size
    texts = (Reading(tokens_T, ((300, 302), (302, 307), (307, 320))), Reading(wrong_T, ((300, 305), (302, 306))))
    for batch in (1, 2):
        assert read_answers(wordy, plan, texts, batch) == [[True, True, True], [True, False]]


def test_tasks_give_results_in_their_order(wordy: LoadedModel) -> None:
    spec = EvaluateSpec(tasks=("retrieval:512", "ledger", "completion:512"), num_problems=5)
    assert (spec.embedded_tasks, spec.harness_tasks) == (("ledger",), ())
    retrieval, completion = measure_reading(wordy, make_plan(wordy, COARSE, 640), spec, SILENT)
    assert (retrieval.task, retrieval.num_problems, retrieval.lengths) == ("retrieval:512", 8, (512, 512))
    assert (completion.task, completion.num_problems, completion.lengths) == ("completion:512", 8, (512,))
    assert retrieval.num_correct is not None and retrieval.accuracy == retrieval.num_correct / 8


def test_a_text_beyond_the_context_is_refused(wordy: LoadedModel) -> None:
    text = Reading(torch.ones(WORDY_CONTEXT + 1, dtype=torch.int64), ((1, 2),))
    with pytest.raises(UsageError, match=f"a text of {WORDY_CONTEXT + 1} tokens exceeds the model's context"):
        read_answers(wordy, make_plan(wordy), (text,), 1)


def test_nan_is_refused(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = as_loaded(wordy_llama(len(tokenizer)), tokenizer)
    monkeypatch.setattr(loaded.model.lm_head, "forward", lambda hidden: hidden @ torch.full((32, 9), torch.nan))
    with pytest.raises(NonFiniteActivations, match="NaN after 0 tokens"):
        read_answers(loaded, make_plan(loaded), (Reading(torch.ones(8, dtype=torch.int64), ((1, 2),)),), 1)
