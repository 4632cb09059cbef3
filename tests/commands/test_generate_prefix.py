"""``kvcal generate --prefix``: a prompt that begins with a packed prefix gives what it gives in two parts,
and another prompt, plan or model is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import Outcome, run_kvcal, save_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from kvcal import PlanCache, save_plan
from kvcal.cache.attached import attached_for
from kvcal.data.reading import EvaluateSpec
from kvcal.models.load import LoadedModel, load
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.plan.plan import Plan, Workload
from kvcal.progress import SILENT
from kvcal.stages.evaluate.tasks import measure_tasks
from kvcal.stages.generate import prompt_tokens
from kvcal.stages.memory_needs import pays_from

MANUAL = "Times. 12 x 34 = 408\n" * 30
QUESTION = "Times. 56 x 78 = ?\n" * 3
COARSE = Format(2, "channel", 32, num_sink_tokens=4)
HEARING = replace(COARSE, boost=Boost("query_magnitude", (Tier(4, 0.5),)))
VALUES = Format(2, "token", 32, num_sink_tokens=4)


def attentive(folder: Path) -> Path:
    """The random model with weights so large that what it says depends on what its cache holds."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weights in (weights for weights in model.model.layers.parameters() if weights.dim() == 2):
            weights *= 16
    model.save_pretrained(folder)
    return folder


class Case:
    """A random model, a plan and a packed prefix in a folder, and the command on them."""

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, k: Format = COARSE, v: Format = VALUES,
        prefix: str = MANUAL,
    ) -> None:  # fmt: skip
        self.plan_file, self.prefix_file = folder / "plan.safetensors", folder / "p.kv"
        self.model = attentive(save_llama(folder / "model", tokenizer))
        self.loaded: LoadedModel = load(str(self.model), device="cpu")
        layers = tuple(LayerPlan(layer.geometry, k, v) for layer in bare_layers(self.loaded.geometry))
        self.plan = Plan(self.loaded.identity, self.loaded.geometry.cache_dtype, layers, Workload(1, 1024), {})
        save_plan(self.plan, self.plan_file)
        packed = self.run("generate", "--prompt", prefix, "--pack", self.prefix_file, "--quiet")
        assert packed.code == 0, packed.err

    def run(self, command: str, *arguments: object) -> Outcome:
        where = ("--model", self.model, "--plan", self.plan_file, "--device", "cpu")
        return run_kvcal(command, *where, *arguments)

    def generate(self, prompt: str, *arguments: object, with_prefix: bool = True) -> dict[str, object]:
        prefix = ("--prefix", self.prefix_file) if with_prefix else ()
        done = self.run("generate", "--prompt", prompt, *prefix, "--max-new-tokens", 24, "--json", *arguments)
        assert done.code == 0, done.err
        found: dict[str, object] = done.json
        assert found.pop("prefix_tokens", 0) == (
            len(prompt_tokens(self.loaded, MANUAL, False, 0)) if with_prefix else 0
        )
        return found

    def in_two_parts(self, **sampling: float) -> str:
        """The completions of both texts, the first taken in by itself."""
        known, tokens = (
            prompt_tokens(self.loaded, text, False, 0).unsqueeze(0) for text in (MANUAL, MANUAL + QUESTION)
        )
        cache = PlanCache(self.plan, self.loaded.model.config)
        with torch.no_grad(), attached_for(self.loaded.model, self.plan):
            self.loaded.model(known, past_key_values=cache)
            torch.manual_seed(3)
            new = self.loaded.model.generate(
                tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, max_new_tokens=24,
                do_sample=bool(sampling), **sampling,
            )[0, tokens.shape[1] :]  # fmt: skip
        return str(self.loaded.tokenizer.decode(new, skip_special_tokens=True))


@pytest.fixture
def case(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Case:
    return Case(tmp_path, tokenizer)


def test_a_cache_larger_than_16_bits_says_from_how_many_tokens_on_it_pays(case: Case) -> None:
    found = case.generate(QUESTION, with_prefix=False)
    (pays,) = {found["pays_from"], pays_from(case.plan)}
    assert isinstance(pays, int) and int(str(found["cached_tokens"])) < pays
    said = case.run("generate", "--prompt", QUESTION, "--max-new-tokens", 2).err
    assert f"one sequence pays from {pays} tokens on" in said and "at 16 bits: transforms, sinks" in said
    prompt = MANUAL * 2
    assert len(prompt_tokens(case.loaded, prompt, False, 2)) > pays
    longer = case.run("generate", "--prompt", prompt, "--max-new-tokens", 2).err
    assert "at 16 bits" in longer and "pays from" not in longer


def test_settings_of_the_checkpoint_change_neither_caches_nor_greedy_decoding(case: Case) -> None:
    """Those of generation_config.json, as of models that were trained without a cache."""
    expected = case.generate(MANUAL, with_prefix=False)
    own = case.model / "generation_config.json"
    settings = {"use_cache": False, "return_dict_in_generate": True, "num_beams": 2, "repetition_penalty": 1.5}
    for more in (settings, {"cache_implementation": "static", "prefill_chunk_size": 64}):
        own.write_text(json.dumps(json.loads(own.read_text()) | more))
        assert case.generate(MANUAL, with_prefix=False) == expected
    spec = EvaluateSpec(tasks=("chain",), num_problems=2, batch=2, max_new_tokens=8)
    results = [measure_tasks(loaded, case.plan, spec, SILENT) for loaded in (case.loaded, load(str(case.model)))]
    assert results[0] == results[1]


@pytest.mark.parametrize("k", [COARSE, HEARING], ids=["coarse", "hearing queries"])
def test_a_longer_prompt_gives_what_it_gives_in_two_parts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, k: Format
) -> None:
    case = Case(tmp_path, tokenizer, k)
    greedy = case.generate(MANUAL + QUESTION)
    assert greedy["text"] == case.in_two_parts()
    whole = case.generate(MANUAL + QUESTION, with_prefix=False)
    if k is COARSE:  # the question has read the manual unquantized
        assert whole["text"] != greedy["text"]
    assert all(greedy[name] == whole[name] for name in greedy if name != "text")
    sampled = case.generate(MANUAL + QUESTION, "--temperature", 5, "--seed", 3)
    assert sampled["text"] == case.in_two_parts(temperature=5.0) != greedy["text"]


@pytest.mark.parametrize(
    "prompt, arguments, message",
    [
        ("Chain. " + MANUAL, (), "the prompt does not begin with the "),
        (MANUAL, (), "or has none beyond them"),
        (MANUAL + "a", ("--chat",), "packed without a chat template"),
        (MANUAL + "a", ("--pack", "x.kv"), "--pack with --prefix"),
        (MANUAL + "a", ("--max-new-tokens", 1024), "exceed the model's context of 1024"),
    ],
)
def test_prompts_that_are_refused(case: Case, prompt: str, arguments: tuple[object, ...], message: str) -> None:
    done = case.run("generate", "--prompt", prompt, "--prefix", case.prefix_file, *arguments)
    assert done.code == 2 and message in done.err, done.err


def test_a_prefix_whose_last_word_goes_on_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The text begins with the prefix's, its tokens do not: "Times" is one, "Timestep" begins otherwise."""
    case = Case(tmp_path, tokenizer, prefix="3 + 4 Times")
    done = case.run("generate", "--prompt", "3 + 4 Timestep", "--prefix", case.prefix_file)
    assert done.code == 2 and "does not begin with the" in done.err and "cannot join its last word" in done.err
