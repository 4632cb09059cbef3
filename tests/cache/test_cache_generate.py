"""generate() with a PlanCache: every way of decoding runs, a 16-bit plan changes nothing, and bytes stay exact."""

from __future__ import annotations

import pytest
import torch
from cache_cases import (
    KIVI_2,
    SINKS_3,
    assert_exact_bytes,
    checked_crops,
    feed,
    llama_plan,
    padded,
    random_ids,
    tiny_llama,
)
from transformers import DynamicCache

from kvcal import PlanCache
from kvcal.plan.plan import RAW

RAW_PLAN = llama_plan(RAW, RAW)
QUANTIZED = {"kivi": llama_plan(*KIVI_2), "sinks": llama_plan(*SINKS_3)}
PROMPT = 244  # the next pages are full after 12 new tokens
RAGGED = (244, 180, 3)


def prompt(batch: int = 2) -> dict[str, torch.Tensor]:
    ids = random_ids(batch, PROMPT)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ragged_prompt() -> dict[str, torch.Tensor]:
    ids, mask = padded([random_ids(1, length, seed=length)[0] for length in RAGGED], PROMPT, "left")
    return {"input_ids": ids, "attention_mask": mask}


def generate(cache, inputs: dict[str, torch.Tensor], new_tokens: int = 24, seed: int = 0, **options) -> torch.Tensor:
    torch.manual_seed(seed)
    options = {"do_sample": False, **options}
    return tiny_llama().generate(**inputs, past_key_values=cache, max_new_tokens=new_tokens, **options)


def plan_cache(plan, inputs: dict[str, torch.Tensor] | None = None) -> PlanCache:
    return PlanCache(plan, tiny_llama().config, inputs["attention_mask"] if inputs else None)


def native_cache() -> DynamicCache:
    return DynamicCache(config=tiny_llama().config)


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5, "seed": 7},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True, "seed": 3},
    "several samples": {"do_sample": True, "num_return_sequences": 2, "seed": 5},
    "chunked prefill": {"prefill_chunk_size": 50},
}


@pytest.mark.parametrize(("way", "ragged"), [("greedy", False), *((way, True) for way in WAYS)])
def test_a_16_bit_plan_generates_what_the_model_does(way, ragged):
    inputs = ragged_prompt() if ragged else prompt()
    cache = plan_cache(RAW_PLAN, inputs if ragged else None)
    found = generate(cache, inputs, **WAYS[way])
    assert torch.equal(found, generate(native_cache(), inputs, **WAYS[way]))
    assert found.shape[1] == PROMPT + 24
    assert_generated_bytes(cache, inputs, found.shape[0])


@pytest.mark.parametrize(("way", "ragged"), [("greedy", True), *((way, False) for way in WAYS)])
def test_quantized_plans_generate_with_exact_bytes(way, ragged):
    inputs = ragged_prompt() if ragged else prompt()
    cache = plan_cache(QUANTIZED["kivi"], inputs if ragged else None)
    found = generate(cache, inputs, **WAYS[way])
    assert found.shape[1] == PROMPT + 24
    assert_generated_bytes(cache, inputs, found.shape[0])


def assert_generated_bytes(cache: PlanCache, inputs: dict[str, torch.Tensor], sequences: int) -> None:
    """The last token is never fed; beams of a sequence share its prompt."""
    lengths = [length + 23 for length in inputs["attention_mask"].sum(1).tolist()]
    held = len(cache.lengths)
    assert held % len(lengths) == 0 and held >= sequences
    assert_exact_bytes(cache, [length for length in lengths for _ in range(held // len(lengths))], PROMPT + 23)


@pytest.mark.parametrize("side", ["left", "right"])
def test_generated_rows_of_a_ragged_batch_equal_rows_alone(side):
    """Greedy tokens under a quantized plan: row by row what a batch of one gives."""
    inputs = ragged_prompt()
    if side == "right":
        ids, mask = padded([random_ids(1, length, seed=length)[0] for length in RAGGED], PROMPT, "right")
        inputs = {"input_ids": ids, "attention_mask": mask}
    found = generate(plan_cache(QUANTIZED["sinks"], inputs), inputs)
    for row, length in enumerate(RAGGED):
        if side == "right" and length < PROMPT:
            continue  # generate itself goes on from the last column, which is padding
        ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].unsqueeze(0)
        alone = generate(plan_cache(QUANTIZED["sinks"]), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        assert torch.equal(found[row, PROMPT:], alone[0, length:])


def repetitive_prompt() -> dict[str, torch.Tensor]:
    ids = random_ids(1, 20).repeat(1, 13)[:, :PROMPT]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_prompt_lookup_with_a_16_bit_plan_is_greedy_decoding():
    inputs, cache = repetitive_prompt(), plan_cache(RAW_PLAN)
    found = generate(cache, inputs, new_tokens=40, prompt_lookup_num_tokens=10)
    assert torch.equal(found, generate(native_cache(), inputs, new_tokens=40))
    assert_exact_bytes(cache, [cache.get_seq_length()])
    assert PROMPT + 38 <= cache.get_seq_length() <= PROMPT + 40


def test_prompt_lookup_with_a_quantized_plan(monkeypatch):
    """Tokens are rejected, before and after pages fill; bytes are exact after every crop."""
    crops = checked_crops(monkeypatch)
    cache = plan_cache(QUANTIZED["sinks"])
    found = generate(cache, repetitive_prompt(), new_tokens=90, prompt_lookup_num_tokens=5)
    assert found.shape[1] == PROMPT + 90
    assert min(crops) < 0  # some drafts were rejected
    (fmt,) = QUANTIZED["sinks"].layers[0].k
    assert fmt.pages_read(PROMPT + 89) > fmt.pages_read(PROMPT)  # and pages came to be read


def test_reset_and_reuse_generate_the_same_again():
    inputs, other = prompt(), {"input_ids": random_ids(1, 70, 9), "attention_mask": torch.ones(1, 70).long()}
    cache = plan_cache(QUANTIZED["sinks"])
    first = generate(cache, inputs)
    cache.reset()
    generate(cache, other)
    assert_exact_bytes(cache, [70 + 23])
    cache.reset()
    assert torch.equal(generate(cache, inputs), first)


def test_the_prompt_attends_to_itself_unquantized():
    """The first logits after a prompt do not depend on the plan; the next ones do."""
    model, ids = tiny_llama(), random_ids(1, 300)
    exact = feed(model, native_cache(), ids, cuts=(290,))
    logits = feed(model, plan_cache(QUANTIZED["kivi"]), ids, cuts=(290,))
    assert torch.allclose(logits[:, :290], exact[:, :290], atol=1e-4)
    assert (logits[:, 290:] - exact[:, 290:]).abs().max() > 1e-2


def test_a_conversation_goes_on_in_the_same_cache():
    """The second turn feeds only the new tokens; a 16-bit plan gives what starting again gives."""
    cache = plan_cache(RAW_PLAN)
    first = generate(cache, prompt(1))
    ids = torch.cat([first, random_ids(1, 30, seed=4)], 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(generate(cache, inputs), generate(native_cache(), inputs))
    assert_exact_bytes(cache, [ids.shape[1] + 23])
