"""The lm-evaluation-harness's questions, through the packed cache: answered as one sequence at a time would be."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from cache_cases import KIVI_2
from evaluation_cases import RAW_PAIR, as_loaded, make_plan
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from kvcal import PlanCache
from kvcal.errors import UsageError
from kvcal.models.load import LoadedModel
from kvcal.plan.format import Boost, Format, Tier
from kvcal.stages.divergence import feed
from kvcal.stages.evaluate.lm_eval import PackedCacheLM, Scored, StopAt, measure_lm_eval, read_accuracy

QUERY_PAIR = (
    Format(2, "channel", 32, boost=Boost("query_range", (Tier(4, 0.25, 0.01),))),
    Format(2, "token", 32),
)
CONTEXT = 640
WORDS = "ann pays bob 12, cid earns 7, dee halves, eva copies fay, gus 31+5=36, hal 9-4=5, ivy 88/2=44\n"


@dataclass(frozen=True)
class Request:
    args: tuple[Any, ...]


@cache
def model(vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0,
        pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    built = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return built


@pytest.fixture(scope="module")
def loaded(tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    return as_loaded(model(len(tokenizer)), tokenizer)


def lm(loaded: LoadedModel, pair: tuple[Format, Format] = KIVI_2, batch: int = 3) -> PackedCacheLM:
    return PackedCacheLM(loaded, make_plan(loaded, pair), batch)


def alone(loaded: LoadedModel, pair: tuple[Format, Format], tokens: list[int], num_given: int) -> tuple[float, bool]:
    """One sequence through its own cache, chunk by chunk; sums in fp64, a token at a time."""
    cache, total, greedy = PlanCache(make_plan(loaded, pair), loaded.model.config), 0.0, True
    for start, logits in feed(loaded.model, cache, torch.tensor([tokens[:-1]])):
        for column in range(logits.shape[1]):
            target = start + column + 1
            if target >= num_given:
                row = logits[0, column].double()
                total += float(row[tokens[target]] - torch.logsumexp(row, 0))
                greedy = greedy and int(row.argmax()) == tokens[target]
    return total, greedy


PAIRS = [
    (WORDS * 6, " ned 5"),
    (WORDS * 3, "oda 4 and pam 9"),
    ("", "quin pays ray 3"),
    (WORDS * 8 + "sue ", "tom"),
    ("uma", WORDS * 4),
]


@pytest.mark.parametrize("pair", [RAW_PAIR, KIVI_2, QUERY_PAIR], ids=["raw", "kivi", "query"])
def test_likelihoods_are_those_of_single_sequences(loaded: LoadedModel, pair: tuple[Format, Format]) -> None:
    found = lm(loaded, pair).loglikelihood([Request(args) for args in PAIRS])
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    for (context, continuation), (value, greedy) in zip(PAIRS, found, strict=True):
        whole = tokenizer(context + continuation)["input_ids"]
        num_given = len(tokenizer(context.rstrip())["input_ids"])
        if not context:
            whole, num_given = [0, *tokenizer(continuation)["input_ids"]], 1
        expected, expected_greedy = alone(loaded, pair, whole, num_given)
        assert value == pytest.approx(expected, rel=2e-4) and greedy == expected_greedy
        assert value < -1
    assert max(len(tokenizer(context + more)["input_ids"]) for context, more in PAIRS) > 300  # pages were read back


def test_quantization_is_seen(loaded: LoadedModel) -> None:
    requests = [Request(args) for args in PAIRS[:2]]
    raw, quantized = (lm(loaded, pair).loglikelihood(requests) for pair in (RAW_PAIR, KIVI_2))
    assert all(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(raw, quantized, strict=True))


def test_greedy_continuations_are_recognised(loaded: LoadedModel) -> None:
    tokenizer: Any = loaded.tokenizer
    asked = lm(loaded, RAW_PAIR)
    prompt = tokenizer(WORDS)["input_ids"]
    with torch.no_grad():
        best = int(loaded.model(torch.tensor([prompt])).logits[0, -1].argmax())
    other = (best + 1) % len(tokenizer)
    scored = [Scored((*prompt, token), len(prompt)) for token in (best, other)]
    (value, greedy), (worse, not_greedy) = asked._score(scored)
    assert greedy and not not_greedy and worse < value


def test_spaces_go_to_the_continuation(loaded: LoadedModel) -> None:
    asked = lm(loaded)
    assert asked._pair("ann pays ", "bob") == asked._pair("ann pays", " bob")
    (spaces,) = asked.loglikelihood([Request(("  ", "bob"))])
    (plain,) = asked.loglikelihood([Request(("", "  bob"))])
    assert spaces == plain


def test_a_long_context_is_cut_on_the_left(loaded: LoadedModel) -> None:
    asked = lm(loaded)
    scored = asked._pair(WORDS * 30, " ned 5")
    whole = loaded.tokenizer(WORDS * 30 + " ned 5")["input_ids"]  # type: ignore[misc]
    assert len(scored.tokens) == CONTEXT + 1 and list(scored.tokens) == whole[-CONTEXT - 1 :]
    assert (
        scored.tokens[scored.num_given :]
        == asked._pair(WORDS, " ned 5").tokens[-len(scored.tokens) + scored.num_given :]
    )
    with pytest.raises(UsageError, match="leaves no room for a context in the model's 640"):
        asked._pair("a", WORDS * 30)


def test_windows_are_those_the_harness_describes(loaded: LoadedModel) -> None:
    asked = lm(loaded)
    asked.max_length = 4
    windows = list(asked._windows(list(range(10, 20))))
    assert windows == [
        Scored((0, 10, 11, 12, 13), 1),  # read: prefix, 0 1 2; predicted: 0 1 2 3
        Scored((13, 14, 15, 16, 17), 1),  # read: 3 4 5 6; predicted: 4 5 6 7
        Scored((15, 16, 17, 18, 19), 3),  # read: 5 6 7 8; predicted: 8 9
    ]
    assert list(asked._windows([])) == []
    asked.max_length = None
    assert list(asked._windows([5, 6])) == [Scored((0, 5, 6), 1)]


def test_rolling_likelihood_predicts_every_token_once(loaded: LoadedModel) -> None:
    text = WORDS * 22
    tokens = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    assert CONTEXT < len(tokens) < 2 * CONTEXT
    short, long = lm(loaded, RAW_PAIR).loglikelihood_rolling([Request((WORDS,)), Request((text,))])
    first, rest = tokens[:CONTEXT], tokens[len(tokens) - CONTEXT - 1 :]
    expected = alone(loaded, RAW_PAIR, [0, *first], 1)[0]
    expected += alone(loaded, RAW_PAIR, rest, CONTEXT - len(tokens) + CONTEXT + 1)[0]
    assert long == pytest.approx(expected, rel=1e-5)
    assert short == pytest.approx(alone(loaded, RAW_PAIR, [0, *loaded.tokenizer(WORDS)["input_ids"]], 1)[0], rel=1e-5)  # type: ignore[misc]


def completed(loaded: LoadedModel, pair: tuple[Format, Format], context: str, count: int) -> str:
    """Greedy, one sequence, one step at a time."""
    tokenizer: Any = loaded.tokenizer
    prompt = torch.tensor([tokenizer(context)["input_ids"]])
    cache: Any = PlanCache(make_plan(loaded, pair), loaded.model.config)
    model: Any = loaded.model
    ids = model.generate(prompt, past_key_values=cache, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)


def test_completions_are_those_of_single_sequences(loaded: LoadedModel) -> None:
    contexts = [WORDS * 3, "ann pays", WORDS, WORDS * 2 + "bob"]
    asked = [Request((context, {"until": [], "max_gen_toks": 12})) for context in contexts]
    asked.insert(1, Request(("cid", {"until": [], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0})))
    found = lm(loaded).generate_until(asked)
    assert found.pop(1) == completed(loaded, KIVI_2, "cid", 5)
    assert found == [completed(loaded, KIVI_2, context, 12) for context in contexts]


def test_completions_end_before_the_first_stop(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = completed(loaded, KIVI_2, "ann pays", 12)
    stop, later = whole[4:7], whole[9:12]
    expected = whole[: whole.index(stop)]
    calls: list[int] = []
    original = StopAt.__call__

    def count(self: StopAt, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StopAt, "__call__", count)
    asked = [Request(("ann pays", {"until": until, "max_gen_toks": 12})) for until in ([later, stop], stop)]
    assert lm(loaded).generate_until(asked) == [expected, expected]
    assert len(calls) < 24  # and not only cut afterwards


def test_generation_settings(loaded: LoadedModel) -> None:
    asked = lm(loaded)
    with pytest.raises(UsageError, match=r"generation settings \['beams'\]"):
        asked.generate_until([Request(("a", {"beams": 2}))])
    with pytest.raises(UsageError, match="700 new tokens fill the model's context of 640"):
        asked.generate_until([Request(("a", {"max_gen_toks": 700}))])
    sampled = [Request(("ann", {"do_sample": True, "temperature": 5.0, "max_gen_toks": 12}))]
    torch.manual_seed(1)
    first = asked.generate_until(sampled)
    torch.manual_seed(1)
    assert asked.generate_until(sampled) == first != [completed(loaded, KIVI_2, "ann", 12)]
    (long,) = asked.generate_until([Request((WORDS * 30, {"max_gen_toks": 4}))])  # cut on the left
    tokenizer: Any = loaded.tokenizer
    cut = tokenizer.decode(tokenizer(WORDS * 30)["input_ids"][4 - CONTEXT :])
    assert long == completed(loaded, KIVI_2, cut, 4)


RESULTS = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "perplexity,none": 3.0,
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.05,
            "exact_match,flexible-extract": 0.5,
            "exact_match_stderr,flexible-extract": "N/A",
        }
    },
    "higher_is_better": {"gsm8k": {"exact_match": True, "perplexity": False}},
}


def test_accuracy_is_read_from_the_harness() -> None:
    assert read_accuracy(RESULTS, "gsm8k", "") == (0.25, 0.05)
    assert read_accuracy(RESULTS, "gsm8k", "exact_match,flexible-extract") == (0.5, None)
    assert read_accuracy(RESULTS, "gsm8k", "exact_match") == (0.25, 0.05)
    with pytest.raises(UsageError, match="'perplexity,none' of 'gsm8k' is better when it is less"):
        read_accuracy(RESULTS, "gsm8k", "perplexity")
    with pytest.raises(UsageError, match="'gsm8k' has no metric acc; it has"):
        read_accuracy(RESULTS, "gsm8k", "acc")
    with pytest.raises(UsageError, match="no metric of which more is better"):
        read_accuracy(RESULTS, "arc", "")


def test_the_harness_is_missed_with_a_hint(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="which is not installed") as error:
        measure_lm_eval(loaded, make_plan(loaded), "gsm8k", 2, 2, 0)
    assert error.value.hint is not None and "pip install lm-eval" in error.value.hint
