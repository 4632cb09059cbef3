"""The lm-evaluation-harness's model, through the packed cache: its calls of the model by themselves, and the
harness's questions."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cache_cases import KIVI_2
from evaluation_cases import as_loaded, make_plan, wordy_llama
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from kvcal import PlanCache
from kvcal.errors import ArtifactError, NonFiniteActivations
from kvcal.models.load import LoadedModel
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.stages.divergence import feed

pytest.importorskip("lm_eval.models.huggingface", reason="needs kvcal[lm-eval]")
from kvcal.stages.evaluate.packed_lm import PackedCacheLM  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own

QUERY_PAIR = (Format(2, "channel", 32, boost=Boost("query_range", (Tier(4, 0.25, 0.01),))), Format(2, "token", 32))
WORDS = "ann pays bob 12, cid earns 7, dee halves, eva copies fay, gus 31+5=36, hal 9-4=5, ivy 88/2=44\n"


@dataclass(frozen=True)
class Request:
    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def loaded(tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    return as_loaded(wordy_llama(len(tokenizer)), tokenizer)


def lm(loaded: LoadedModel, pair: tuple[Format, Format] = KIVI_2) -> Any:
    return PackedCacheLM(loaded, make_plan(loaded, pair), batch_size=3)


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


def completed(loaded: LoadedModel, pair: tuple[Format, Format], context: str, count: int) -> str:
    """Greedy, one sequence, one step at a time."""
    tokenizer: Any = loaded.tokenizer
    prompt = torch.tensor([tokenizer(context)["input_ids"]])
    cache: Any = PlanCache(make_plan(loaded, pair), loaded.model.config)
    model: Any = loaded.model
    ids = model.generate(prompt, past_key_values=cache, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)


def test_completions_of_the_model_are_those_of_single_sequences(loaded: LoadedModel) -> None:
    contexts = [WORDS * 3, "ann pays", WORDS * 2 + "bob"]
    tokenizer: Any = loaded.tokenizer
    prompts = [torch.tensor(tokenizer(context)["input_ids"]) for context in contexts]
    input_ids = pad_sequence(prompts, True, 1, "left")
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, 0, "left")
    width = input_ids.shape[1]
    settings: dict[str, Any] = {"attention_mask": mask, "max_length": width + 12, "stop": []}
    found = lm(loaded)._model_generate(input_ids, **settings)
    texts = tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
    assert texts == [completed(loaded, KIVI_2, context, 12) for context in contexts]
    torch.manual_seed(1)
    assert not torch.equal(lm(loaded)._model_generate(input_ids, do_sample=True, temperature=5.0, **settings), found)


def test_bytes_and_logits_are_checked(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = as_loaded(wordy_llama.__wrapped__(len(tokenizer)), tokenizer)
    input_ids = torch.tensor([broken.tokenizer(WORDS)["input_ids"]])  # type: ignore[misc]
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(input_ids), "max_length": 150, "stop": []}
    with monkeypatch.context() as patched:
        patched.setattr(PlanCache, "nbytes", property(lambda cache: 1))
        with pytest.raises(ArtifactError, match="take 1 bytes"):
            lm(broken)._model_call(input_ids)
        with pytest.raises(ArtifactError, match="take 1 bytes"):
            lm(broken)._model_generate(input_ids, **settings)
    broken.model.get_output_embeddings().register_forward_hook(lambda module, args, logits: logits * torch.nan)
    with pytest.raises(NonFiniteActivations, match="the logits hold NaN"):
        lm(broken)._model_call(input_ids)
    with pytest.raises(NonFiniteActivations, match="NaN after"):
        lm(broken)._model_generate(input_ids, **settings)


@pytest.mark.parametrize("pair", [KIVI_2, QUERY_PAIR], ids=["kivi", "query"])
def test_likelihoods_are_those_of_single_sequences(loaded: LoadedModel, pair: tuple[Format, Format]) -> None:
    found = lm(loaded, pair).loglikelihood([Request(args) for args in PAIRS], disable_tqdm=True)
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
