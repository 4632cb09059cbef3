"""The evaluation file: saved row by row, resumed, started anew, refused; and tasks that are read: an answer
is right where greedy decoding through the packed cache writes it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_cases import KIVI_2
from evaluation_cases import COARSE, RAW_PAIR, WORDY_CONTEXT, as_loaded, make_plan, text, tiny, wordy_llama
from listener import Listener
from transformers import PreTrainedTokenizerBase

from kvcal.cache.plan_cache import PlanCache
from kvcal.data.reading import EvaluateSpec, Reading
from kvcal.errors import ArtifactError, NonFiniteActivations, UsageError
from kvcal.models.attention import with_cache
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import SILENT, Silent
from kvcal.stages.evaluate.stage import (
    Evaluation,
    MeasuredBits,
    evaluate,
    load_evaluation,
    measured_bits,
    save_evaluation,
    task_cell,
    task_header,
)
from kvcal.stages.evaluate.tasks import measure_reading, read_answers
from kvcal.stages.evaluate.text import measure_text

SPEC = EvaluateSpec(tasks=(), batch=2)
INPUTS = {"model.weights_sha256": "b", "data.fingerprint": "f", "evaluate.batch": 2}


def plans() -> list[tuple[str, Plan]]:
    loaded = tiny()
    pairs = {"raw": RAW_PAIR, "kivi": KIVI_2, "coarse": COARSE}
    return [(name, make_plan(loaded, pair)) for name, pair in pairs.items()]


def run(path: Path, named: list[tuple[str, Plan]], notes: Listener, **changes) -> Evaluation:
    return evaluate(tiny(), named, SPEC, text(140, 140), {**INPUTS, **changes}, path, notes)


def without_time(evaluation: Evaluation) -> Evaluation:
    return replace(evaluation, rows=tuple(replace(row, seconds=0.0) for row in evaluation.rows))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    return run(tmp_path_factory.mktemp("whole") / "evaluation.json", plans(), Listener())


def test_rows_hold_what_was_measured_and_exact_bytes(whole: Evaluation) -> None:
    assert [row.name for row in whole.rows] == ["raw", "kivi", "coarse"]
    for row, (_, plan) in zip(whole.rows, plans(), strict=True):
        assert row.total_bytes == plan.nbytes([512, 512])
        assert row.bits_per_value == plan.bits_per_value()
        assert row.text == measure_text(tiny(), plan, text(140, 140), 2, Silent())
        assert row.tasks == () and row.accuracy is None and row.accuracy_se is None and row.task_bits is None
    assert (whole.data_fingerprint, whole.task_seed, whole.inputs) == ("f" * 64, 1, INPUTS)


def test_measured_bits_are_the_plan_s_bytes_at_the_measured_lengths(whole: Evaluation) -> None:
    """By hand: two KV heads, all layers paged; two texts of 140 tokens, each as a batch of two."""
    for row, (_, plan) in zip(whole.rows, plans(), strict=True):
        assert row.text_bits == MeasuredBits(8 * plan.nbytes([140, 140]) / num_values(plan, [140, 140]), 140.0)
        found = measured_bits(plan, [140, 300])
        nbytes = plan.nbytes([140, 140]) + plan.nbytes([300, 300])
        assert found.bits_per_value == pytest.approx(8 * nbytes / num_values(plan, [140, 140, 300, 300]), rel=1e-12)
        assert found.mean_tokens == 220
    kivi = dict(plans())["kivi"]
    assert measured_bits(kivi, [140]).bits_per_value > 1.5 * kivi.bits_per_value()  # one page, and the rest unpacked


def num_values(plan: Plan, lengths: list[int]) -> int:
    attention = [layer.attention for layer in plan.layers]
    return sum(a.num_kv_heads * (a.k_head_dim + a.v_head_dim) for a in attention) * sum(lengths)


def test_interrupted_run_loses_one_row_at_most(tmp_path: Path, whole: Evaluation) -> None:
    path = tmp_path / "evaluation.json"
    with pytest.raises(KeyboardInterrupt):
        run(path, plans(), Listener(at="coarse"))
    assert without_time(load_evaluation(path)).rows == without_time(whole).rows[:2]
    notes = Listener()
    assert without_time(run(path, plans(), notes)) == without_time(whole)
    assert notes.said == [
        "evaluate: raw is measured already, kept",
        "evaluate: kivi is measured already, kept",
        "evaluate: coarse (3 of 3)",
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_the_text_of_all_plans_is_shown_as_one(tmp_path: Path) -> None:
    notes = Listener()
    run(tmp_path / "evaluation.json", plans(), notes)
    steps = [(done, total) for label, done, total in notes.steps if label == "evaluate: text of all plans"]
    assert {total for _, total in steps} == {3 * 280} and [done for done, _ in steps] == sorted({d for d, _ in steps})
    assert steps[-1] == (840, 840) and not [label for label, *_ in notes.steps if label == "evaluate: text"]
    reading = [(done, total) for label, done, total in notes.steps if label == "evaluate: texts at 16 bits"]
    assert reading == [(0, 1), (1, 1)] and notes.steps[1][0] == "evaluate: texts at 16 bits"  # and closes its bar


def test_rows_follow_the_plans_and_equal_plans_are_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    (raw, kivi, coarse), notes = plans(), Listener()
    run(path, [raw, kivi], Listener())
    renamed = replace(kivi[1], provenance={"recipe": "another"})
    evaluation = run(path, [coarse, ("mine", renamed), kivi], notes)
    assert [row.name for row in evaluation.rows] == ["coarse", "mine", "kivi"]
    assert notes.said == [
        "evaluate: mine is measured already, kept",
        "evaluate: kivi is measured already, kept",
        "evaluate: coarse (1 of 3)",
    ]
    assert load_evaluation(path) == evaluation


def test_other_inputs_start_anew(tmp_path: Path, whole: Evaluation) -> None:
    path, notes = tmp_path / "evaluation.json", Listener()
    save_evaluation(whole, path)
    evaluation = run(path, plans()[:1], notes, **{"data.fingerprint": "g"})
    assert notes.said == ['evaluate: starts anew, data.fingerprint is "f", expected "g"', "evaluate: raw (1 of 1)"]
    assert load_evaluation(path) == evaluation


def test_another_model_is_refused(tmp_path: Path, whole: Evaluation) -> None:
    path = tmp_path / "evaluation.json"
    save_evaluation(whole, path)
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match="made from another model: model.weights_sha256"):
        run(path, plans(), Listener(), **{"model.weights_sha256": "z", "data.fingerprint": "g"})
    assert path.read_bytes() == before
    foreign = replace(plans()[0][1], model=replace(plans()[0][1].model, weights_sha256="z"))
    with pytest.raises(ArtifactError, match="has other weights"):
        run(path, [("foreign", foreign)], Listener())


def test_truncated_and_missing_files_are_refused(tmp_path: Path, whole: Evaluation) -> None:
    path = tmp_path / "evaluation.json"
    with pytest.raises(ArtifactError, match="does not exist"):
        load_evaluation(path)
    save_evaluation(whole, path)
    sound = path.read_bytes()
    path.write_bytes(sound[:-50])
    with pytest.raises(ArtifactError, match="truncated or not JSON"):
        load_evaluation(path)
    path.write_text("[]")
    with pytest.raises(ArtifactError, match="is not an evaluation"):
        load_evaluation(path)


@pytest.fixture(scope="module")
def wordy(tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    return as_loaded(wordy_llama(len(tokenizer)), tokenizer)


@torch.inference_mode()
def test_right_answers_are_those_that_greedy_decoding_writes(wordy: LoadedModel) -> None:
    plan = make_plan(wordy, COARSE, 640)
    tokens_T = torch.randint(5, wordy.vocab_size, (200,), generator=torch.Generator().manual_seed(1))
    dense_T = wordy.model(tokens_T[None], use_cache=False).logits[0].argmax(-1)
    cache = PlanCache(plan, wordy.model.config)
    for place in range(200):
        logits_V = wordy.model(tokens_T[place].view(1, 1), **with_cache(wordy.model, cache)).logits[0, -1]
        if 179 <= place < 199:  # what it writes by itself
            tokens_T[place + 1] = logits_V.argmax()
    assert dense_T[179] != tokens_T[180]  # the pages tell
    wrong_T = tokens_T.clone()
    wrong_T[185] = (wrong_T[185] + 1) % wordy.vocab_size
    texts = (Reading(tokens_T, ((180, 182), (182, 187), (187, 200))), Reading(wrong_T, ((180, 185), (182, 186))))
    expected = [lost(wordy, plan, read) for read in texts]
    for batch in (1, 2):
        found = read_answers(wordy, plan, texts, batch)
        assert [one.right_A.tolist() for one in found] == [[True, True, True], [True, False]]
        for one, read, lost_A in zip(found, texts, expected, strict=True):
            torch.testing.assert_close(one.lost_A, lost_A, atol=1e-4, rtol=1e-4)
            assert len(one.kl_n) == sum(stop - start for start, stop in read.answers) and bool((one.kl_n > 0).all())


def lost(loaded: LoadedModel, plan: Plan, read: Reading) -> torch.Tensor:
    """The rise of each answer's negative log-likelihood, token by token."""
    of_plans = []
    for one in (plan, make_plan(loaded, RAW_PAIR, 640)):
        cache = PlanCache(one, loaded.model.config)
        logits = [loaded.model(t.view(1, 1), **with_cache(loaded.model, cache)).logits[0, -1] for t in read.tokens_T]
        of_plans.append(torch.stack(logits).double().log_softmax(-1)[:-1].gather(1, read.tokens_T[1:, None])[:, 0])
    rise_T = of_plans[1] - of_plans[0]
    return torch.stack([rise_T[start - 1 : stop - 1].sum() for start, stop in read.answers])


def test_tasks_give_results_in_their_order(wordy: LoadedModel) -> None:
    spec = EvaluateSpec(tasks=("retrieval:512", "ledger", "completion:512"), num_problems=5)
    assert (spec.embedded_tasks, spec.harness_tasks) == (("ledger",), ())
    retrieval, completion = measure_reading(wordy, make_plan(wordy, COARSE, 640), spec, SILENT)
    assert (retrieval.task, retrieval.num_problems, retrieval.lengths) == ("retrieval:512", 8, (512, 512))
    assert (completion.task, completion.num_problems, completion.lengths) == ("completion:512", 8, (512,))
    assert retrieval.num_correct is not None and retrieval.accuracy == retrieval.num_correct / 8
    assert retrieval.lost is not None and retrieval.lost_se is not None and completion.lost_se is None
    assert 0 < (retrieval.kl_99 or 0) <= (retrieval.kl_999 or 0)
    assert "nats lost" in task_header(retrieval) and f"; {retrieval.lost:.3f} ± " in task_cell(retrieval)


def test_a_text_beyond_the_context_is_refused(wordy: LoadedModel) -> None:
    text = Reading(torch.ones(WORDY_CONTEXT + 1, dtype=torch.int64), ((1, 2),))
    with pytest.raises(UsageError, match=f"a text of {WORDY_CONTEXT + 1} tokens exceeds the model's context"):
        read_answers(wordy, make_plan(wordy), (text,), 1)


def test_nan_is_refused(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = as_loaded(wordy_llama(len(tokenizer)), tokenizer)
    monkeypatch.setattr(loaded.model.lm_head, "forward", lambda hidden: hidden @ torch.full((32, 9), torch.nan))
    with pytest.raises(NonFiniteActivations, match="NaN after 0 tokens"):
        read_answers(loaded, make_plan(loaded), (Reading(torch.ones(8, dtype=torch.int64), ((1, 2),)),), 1)
