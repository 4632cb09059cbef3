"""generate() with a PlanCache: every way of decoding runs, a 16-bit plan changes nothing, and bytes stay
exact; in other families, too: biases, QK-norm, sliding windows, attention sinks, linear attention,
latents."""

import functools

import pytest
import tiny_models
import torch
from cache_cases import (
    KIVI_2,
    SINKS_3,
    assert_exact_bytes,
    checked_crops,
    feed,
    llama_plan,
    model_plan,
    padded,
    random_ids,
    tiny_llama,
)
from kvmix_plans import kvmix_plan
from tier_formats import KITTY, THREE_TIERS, V
from transformers import DynamicCache, PreTrainedModel

from kvcal import PlanCache
from kvcal.errors import UsageError
from kvcal.plan.plan import RAW, Format

RAW_PLAN = llama_plan(RAW, RAW)
QUANTIZED = {"kivi": llama_plan(*KIVI_2), "sinks": llama_plan(*SINKS_3), "Kitty": llama_plan(*KITTY)}
QUANTIZED |= {"three tiers": llama_plan(THREE_TIERS, V), "KVmix": kvmix_plan("clamped")}
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


@pytest.mark.parametrize(
    ("name", "side"), [("sinks", "right"), *((name, "left") for name in ("sinks", "Kitty", "three tiers", "KVmix"))]
)
def test_generated_rows_of_a_ragged_batch_equal_rows_alone(name, side):
    """Greedy tokens under a quantized plan: row by row what a batch of one gives, where pages fill and come
    to be read at other steps in every row."""
    ids, mask = padded([random_ids(1, length, seed=length)[0] for length in RAGGED], PROMPT, side)
    inputs = {"input_ids": ids, "attention_mask": mask}
    cache = plan_cache(QUANTIZED[name], inputs)
    found = generate(cache, inputs, 40)
    assert_exact_bytes(cache, [length + 39 for length in RAGGED], PROMPT + 39)
    for row, length in enumerate(RAGGED):
        if side == "right" and length < PROMPT:
            continue  # generate itself goes on from the last column, which is padding
        ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].unsqueeze(0)
        alone = generate(plan_cache(QUANTIZED[name]), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 40)
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
    fmt = QUANTIZED["sinks"].layers[0].format("k")
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


LATENT = ("deepseek_v2", "deepseek_v3", "kimi_linear")
HYBRID = ("falcon_h1", "zamba2")
FAMILIES = ("qwen2", "qwen3", "gemma3", "mistral_all_sliding", "gpt_oss", "qwen3_next", "gemma3n", *LATENT, *HYBRID)
SLIDING = ("gemma3", "mistral_all_sliding", "gpt_oss")
# One of each kind of layers: pages, windows, states, shared pages, latents, pages with a state.
KINDS = ("qwen2", "gemma3", "qwen3_next", "gemma3n", "deepseek_v3", "falcon_h1")
TWO_BITS = (Format(2, "channel", 32, 4), Format(2, "token", 32, 0, 32))


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    return tiny_models.TINY_MODELS[name]()


@functools.cache
def raw_plan(name: str):
    return model_plan(model_of(name))


@functools.cache
def two_bit_plan(name: str):
    return model_plan(model_of(name), *TWO_BITS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_16_bit_plan_equals_the_models_own_cache(name):
    model, ids = model_of(name), random_ids(2, 200)
    cuts = (1, 4, 127, 128, 129, 170)
    cache = PlanCache(raw_plan(name), model.config)
    logits = feed(model, cache, ids, cuts)
    exact = feed(model, DynamicCache(config=model.config), ids, cuts)
    assert torch.allclose(logits, exact, atol=1e-5 * exact.abs().max().item())
    assert_exact_bytes(cache, [200, 200])


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_are_exact_at_any_token_count(name):
    model, plan = model_of(name), two_bit_plan(name)
    ids, mask = padded([random_ids(1, length)[0] for length in (129, 1, 64)], 129, "left")
    cache, start = PlanCache(plan, model.config, attention_mask=mask), 0
    for stop in (1, 5, 6, 127, 128, 129):
        feed(model, cache, ids[:, start:stop], mask=mask[:, :stop])
        assert_exact_bytes(cache, mask[:, :stop].sum(1).tolist(), stop)
        start = stop


# A code next to a boundary may differ with the shape of a product; tokens of other rows would change the
# logits more.
@pytest.mark.parametrize(
    ("name", "plan_kind", "error"),
    [*((name, raw_plan, 1e-4) for name in FAMILIES), *((name, two_bit_plan, 1e-2) for name in KINDS)],
)
def test_padded_rows_have_the_logits_of_single_ones(name, plan_kind, error):
    """Prompts of unequal lengths on the left of 4 steps."""
    model, plan, more = model_of(name), plan_kind(name), random_ids(3, 4, seed=1)
    rows = [torch.cat([random_ids(1, length)[0], steps]) for length, steps in zip((200, 70, 137), more, strict=True)]
    ids, mask = padded(rows, 204, "left")
    cache = PlanCache(plan, model.config, attention_mask=mask[:, :200])
    logits = feed(model, cache, ids, range(200, 204), mask)
    assert_exact_bytes(cache, [204, 74, 141], 204)
    for row, found in zip(rows, logits, strict=True):
        alone = feed(model, PlanCache(plan, model.config), row[None], range(len(row) - 4, len(row)))[0, -5:]
        assert torch.allclose(found[-5:], alone, atol=error * alone.abs().max().item())


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in FAMILIES if name not in KINDS), *((name, {"num_beams": 3}) for name in KINDS)],
)
def test_generate(name, options):
    model, ids = model_of(name), random_ids(2, 124)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    inputs |= {"eos_token_id": None, **options}
    cache = PlanCache(raw_plan(name), model.config)
    found = model.generate(**inputs, past_key_values=cache)
    assert torch.equal(found, model.generate(**inputs, past_key_values=DynamicCache(config=model.config)))
    quantized = PlanCache(two_bit_plan(name), model.config)
    model.generate(**inputs, past_key_values=quantized)
    for used in (cache, quantized):
        assert_exact_bytes(used, [131] * 2 * options.get("num_beams", 1))


@pytest.mark.parametrize("name", SLIDING + ("qwen2",))
def test_prompt_lookup_then_plain_decoding_in_the_same_cache(name):
    """Assisted decoding makes sliding windows keep the tokens of an update until the next crop or update."""
    model, ids = model_of(name), random_ids(1, 10).repeat(1, 12)
    inputs = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 16}
    cache, native = PlanCache(raw_plan(name), model.config), DynamicCache(config=model.config)
    expected = model.generate(ids, past_key_values=native, **inputs)
    found = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, **inputs)
    assert torch.equal(found, expected)
    assert_exact_bytes(cache, [cache.get_seq_length()])
    cache.crop(min(0, 135 - cache.get_seq_length()))  # versions of transformers leave other numbers of tokens
    rest = feed(model, cache, found[:, cache.get_seq_length() :])[:, -1:]
    assert torch.equal(rest.argmax(-1), feed(model, native, found[:, 135:]).argmax(-1))
    more = random_ids(1, 20, seed=3)
    logits, exact = (feed(model, each, more, cuts=range(1, 20)) for each in (cache, native))
    assert torch.allclose(logits, exact, atol=1e-4 * exact.abs().max().item())
    cache.crop(0)  # recording is still on: the last token could have been taken back until now
    assert_exact_bytes(cache, [156])


@pytest.mark.parametrize("name", SLIDING)
def test_a_full_window_gives_back_only_what_it_still_has(name):
    model, ids = model_of(name), random_ids(1, 30)
    cache = PlanCache(raw_plan(name), model.config)
    feed(model, cache, ids[:, :20])
    with pytest.raises(UsageError, match="cannot remove 2 tokens: the window of 6 tokens is full") as caught:
        cache.crop(-2)
    assert "activate_past_recording" in caught.value.hint
    cache.reset()
    feed(model, cache, ids[:, :20])
    cache.activate_past_recording()
    feed(model, cache, ids[:, 20:])
    cache.crop(-7)
    native = DynamicCache(config=model.config)
    feed(model, native, ids[:, :23])
    assert_exact_bytes(cache, [23])
    assert torch.allclose(feed(model, cache, ids[:, 23:]), feed(model, native, ids[:, 23:]), atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_reset_takes_another_batch(name):
    """Linear-attention states too: they are as large as the batch that made them."""
    model, plan = model_of(name), two_bit_plan(name)
    used, fresh = PlanCache(plan, model.config), PlanCache(plan, model.config)
    feed(model, used, random_ids(3, 150))
    used.reset()
    assert used.nbytes == 0
    ids = random_ids(1, 140, seed=1)
    logits, expected = (feed(model, cache, ids, cuts=(130,)) for cache in (used, fresh))
    assert torch.equal(logits, expected)
    assert_exact_bytes(used, [140])


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_selected_in_every_kind_of_layer(name):
    model, plan = model_of(name), two_bit_plan(name)
    ids = random_ids(3, 150)
    cache, single = PlanCache(plan, model.config), PlanCache(plan, model.config)
    feed(model, cache, ids)
    cache.batch_select_indices(torch.tensor([2, 2, 0, 1]))
    assert_exact_bytes(cache, [150] * 4)
    feed(model, single, ids[2:])
    more = random_ids(1, 5, seed=2)
    logits, expected = feed(model, cache, more.expand(4, -1)), feed(model, single, more)
    for row in (0, 1):
        assert torch.allclose(logits[row], expected[0], atol=1e-4 * expected.abs().max().item())
    assert not torch.allclose(logits[3], expected[0], atol=1e-2 * expected.abs().max().item())
