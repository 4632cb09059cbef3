"""The static cache on a GPU, served by the kernels: the bytes and tokens of the dynamic cache, in graphs and compiled.

Where both caches are fed the same tokens, pages of a first layer are equal byte for byte: its keys, values and queries
depend on the tokens alone. Behind it attention's last bits differ, so that a code may, too, and logits differ a little:
a token may be another one only where the reference hardly prefers its own.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
import transformers as hf
from cache_cases import KIVI_2, padded, plan_of, recipe_formats
from static_cases import FORMATS, V, assert_same_pages
from torch import Tensor
from transformers import CompileConfig

from kvcal import Plan, PlanCache, paged_attention
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.formats import RAW, Format
from kvcal.models.geometry import geometry_of
from kvcal.models.load import LoadedModel, load
from kvcal.runtime.queries import serving
from kvcal.tasks import chain

pytestmark = pytest.mark.gpu

VOCABULARY = 512
RECIPES = recipe_formats()
SINKS_5 = replace(V, num_sink_tokens=5)
PAIRS = {name: pair for name, pair in FORMATS.items() if name not in ("different sinks",)} | {
    "query magnitude": (FORMATS["query magnitude"][0], SINKS_5),
    "random": (FORMATS["random"][0], SINKS_5),
    "mixkvq": RECIPES["mixkvq"],
    "per head": (
        (Format(3, "channel", 64, 4), RAW),
        (Format(1, "token", 32, 4), Format(4, "token", 64, 0, 64)),
    ),
}
# A token that differs from the reference's is worth at most this much less to it, in logits (of 4096, about 10 apart).
MARGIN = 0.5


@functools.cache
def random_llama(
    num_layers: int = 1, head_dim: int = 64, num_kv_heads: int = 2, dtype: torch.dtype = torch.bfloat16
) -> hf.LlamaForCausalLM:
    """8 query heads; keys and attention far from uniform."""
    config = hf.LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=num_layers, num_attention_heads=8,
        num_key_value_heads=num_kv_heads, head_dim=head_dim, vocab_size=VOCABULARY, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(head_dim)
    model = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to("cuda", dtype).requires_grad_(False)


@functools.cache
def reasoner(dtype: str = "bfloat16") -> LoadedModel:
    return load("reasoner-10m", dtype=dtype, device="cuda")


def plan_for(model: hf.PreTrainedModel, name: str) -> Plan:
    geometry = geometry_of(model, cache_dtype="bfloat16")
    if name != "transformed":
        return plan_of(geometry, *PAIRS[name])
    plan, generator, tensors = plan_of(geometry, *PAIRS["queries"]), torch.Generator().manual_seed(0), {}
    for index, layer in enumerate(plan.layers):
        shape = (layer.attention.num_kv_heads, layer.attention.k_head_dim)
        tensors[f"layers.{index}.k_rescale"] = torch.rand(shape, generator=generator) + 0.5
        tensors[f"layers.{index}.k_offset"] = torch.randn(shape, generator=generator)
    layers = tuple(replace(layer, k_rescale=True, k_offset=True) for layer in plan.layers)
    return replace(plan, layers=layers, tensors=tensors)


def mixed_plan(model: hf.PreTrainedModel) -> Plan:
    """Every layer another pair of formats."""
    names = ("16 bits", "kitty", "per head", "mixkvq", "kivi", "clamped window", "uniform", "literal window", "queries")
    layers = []
    for index, layer in enumerate(plan_for(model, "kivi").layers):
        other = plan_for(model, names[index % len(names)]).layers[index]
        layers.append(replace(layer, k=other.k, v=other.v))
    return replace(plan_for(model, "kivi"), layers=tuple(layers))


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).cuda()


def context(model: hf.PreTrainedModel, cache: PlanCache) -> AbstractContextManager[None]:
    return serving(model, cache.plan) if cache.static is None else paged_attention(model)


@torch.inference_mode()
def steps(
    model: hf.PreTrainedModel, cache: PlanCache, ids: Tensor, prompt: int, mask: Tensor | None = None
) -> Iterator[Tensor]:
    """Logits fp32 [B, vocabulary] behind a prompt of so many columns, then behind every later token of ids [B, T]."""
    positions = (torch.ones_like(ids) if mask is None else mask).cumsum(1).sub(1).clamp(min=0)
    for start, stop in [(0, prompt), *((column, column + 1) for column in range(prompt, ids.shape[1]))]:
        seen = None if mask is None else mask[:, :stop]
        new = slice(start, stop)
        yield model(
            ids[:, new], attention_mask=seen, position_ids=positions[:, new], past_key_values=cache, logits_to_keep=1
        ).logits[:, -1].float()  # fmt: skip


def logits_of(model, cache: PlanCache, ids: Tensor, prompt: int, mask: Tensor | None = None) -> Tensor:
    """[T, B, vocabulary]."""
    with context(model, cache):
        return torch.stack(list(steps(model, cache, ids, prompt, mask)))


def greedy(model, cache: PlanCache, prompt: Tensor, count: int) -> Tensor:
    """prompt [B, P] and the ``count`` tokens that follow."""
    ids = torch.nn.functional.pad(prompt, (0, count))
    with context(model, cache):
        for column, logits in enumerate(steps(model, cache, ids, prompt.shape[1]), prompt.shape[1]):
            if column < ids.shape[1]:
                ids[:, column] = logits.argmax(-1)
    return ids


def relative(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.parametrize("name", [*PAIRS, "transformed"])
def test_pages_of_a_ragged_batch_are_those_of_the_dynamic_cache(name: str) -> None:
    """Prompts of 300, 130 and 3 tokens, padded on the left; then 300 steps, which fill pages in every row."""
    model = random_llama()
    plan = plan_for(model, name)
    ids, mask = padded([random_ids(n, seed=n).cpu() for n in (300, 130, 3)], 300, "left")
    ids = torch.cat([ids.long().cuda(), random_ids(3, 300)], dim=1)
    mask = torch.nn.functional.pad(mask.cuda(), (0, 300), value=1)
    static = PlanCache(plan, model.config, mask[:, :300], max_tokens=640)
    static.allocate(3, "cuda")
    held = static.nbytes
    assert held == plan.nbytes([640] * 3, 640)
    found = logits_of(model, static, ids, 300, mask)
    assert static.nbytes == held and static.lengths == [600, 430, 303]
    static.check()
    dynamic = PlanCache(plan, model.config, mask[:, :300])
    expected = logits_of(model, dynamic, ids, 300, mask)
    assert torch.equal(found[0], expected[0])
    print(name, "max relative logits", relative(found, expected).max().item())
    assert relative(found, expected).max() < 0.03
    assert assert_same_pages(static, dynamic) > 0


@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(64, 1), (64, 8), (128, 1), (128, 2), (128, 8)])
def test_head_sizes_and_groups(head_dim: int, num_kv_heads: int) -> None:
    model = random_llama(head_dim=head_dim, num_kv_heads=num_kv_heads)
    for name in ("kitty", "queries"):
        plan, ids = plan_for(model, name), random_ids(2, 420)
        static, dynamic = (PlanCache(plan, model.config, max_tokens=size) for size in (420, None))
        found, expected = (logits_of(model, cache, ids, 129) for cache in (static, dynamic))
        assert relative(found, expected).max() < 0.03
        assert assert_same_pages(static, dynamic) > 0


def test_head_ranges_of_unlike_sizes_share_nothing_that_matters() -> None:
    """The scratch of ranges of 7 heads and of one, in a batch large enough for its layout to differ."""
    model = random_llama(num_kv_heads=8)
    k, v = KIVI_2
    plan = plan_of(geometry_of(model, cache_dtype="bfloat16"), (k,) * 7 + (Format(4, "channel", 64),), v)
    ids = random_ids(40, 280)
    static, dynamic = (PlanCache(plan, model.config, max_tokens=size) for size in (280, None))
    found, expected = (logits_of(model, cache, ids, 200) for cache in (static, dynamic))
    assert relative(found, expected).max() < 0.03
    assert assert_same_pages(static, dynamic) > 0


def task_prompts(count: int, length: int) -> Tensor:
    tokenizer, rng = reasoner().tokenizer, random.Random(0)
    texts = [chain(rng, max_size=60).prompt_text for _ in range(count)]
    rows = [tokenizer(text + text, add_special_tokens=False)["input_ids"][:length] for text in texts]
    return torch.tensor(rows, device="cuda")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("kivi", "bfloat16"), ("kitty", "bfloat16"), ("mixkvq", "bfloat16"), ("mixed", "bfloat16"), ("mixed", "float32")],
)
def test_a_thousand_tokens_are_the_references_but_for_near_ties(name: str, dtype: str) -> None:
    model = reasoner(dtype).model
    plan = mixed_plan(model) if name == "mixed" else plan_for(model, name)
    prompt = task_prompts(2, 150)
    static = PlanCache(plan, model.config, max_tokens=1200)
    ids = greedy(model, static, prompt, 1000)
    assert static.lengths == [1150, 1150]
    assert static.nbytes == plan.nbytes([1200] * 2)
    # The reference is fed these very tokens, so that what it would have chosen is known beyond a first difference.
    dynamic = PlanCache(plan, model.config)
    expected = logits_of(model, dynamic, ids, 150)[:-1].transpose(0, 1)  # [B, 1000, vocabulary]
    chosen = expected.gather(2, ids[:, 150:].unsqueeze(-1)).squeeze(-1)
    top = expected.topk(2).values
    differs = chosen < top[..., 0]
    print(name, dtype, "differences", differs.sum(1).tolist(), "regret", (top[..., 0] - chosen).max().item(),
          "median gap", (top[..., 0] - top[..., 1]).median().item())  # fmt: skip
    for row in range(2):
        for step in differs[row].nonzero().flatten().tolist():
            assert top[row, step, 0] - top[row, step, 1] < MARGIN
            assert top[row, step, 0] - chosen[row, step] < MARGIN
    assert differs.float().mean() < 0.02
    if dtype == "bfloat16":  # in fp32, the kernels' query sums are of rounded queries
        assert assert_same_pages(static, dynamic, num_layers=1) > 0


class Step:
    """One whole decode step of a model with fixed inputs, as a graph captures it; ``history`` [steps, B, vocabulary]
    is what it has given."""

    def __init__(self, model: hf.PreTrainedModel, cache: PlanCache, batch: int, count: int) -> None:
        self.model, self.cache = model, cache
        self.ids, self.positions = (torch.zeros(batch, 1, dtype=torch.long, device="cuda") for _ in range(2))
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=model.dtype, device="cuda")
        self.history = torch.zeros(count, *self.logits.shape, dtype=model.dtype, device="cuda")

    def __call__(self) -> None:
        logits = self.model(self.ids, position_ids=self.positions, past_key_values=self.cache).logits[:, -1]
        self.logits.copy_(logits)
        self.ids.copy_(logits.argmax(-1, keepdim=True))
        self.positions.add_(1)

    def begin(self, prompt: Tensor) -> None:
        logits = self.model(prompt, past_key_values=self.cache, logits_to_keep=1).logits[:, -1]
        self.ids.copy_(logits.argmax(-1, keepdim=True))
        self.positions.fill_(prompt.shape[1])

    def warm_up(self) -> None:
        """What lazily initialises itself must have done so before a capture, on a stream that is not the default."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self) -> torch.cuda.CUDAGraph:
        self.warm_up()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph

    def run(self, call) -> Tensor:
        for place in self.history:
            call()
            place.copy_(self.logits)
        torch.cuda.synchronize()
        return self.history


def allocations() -> list[int]:
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return [stats[key] for key in ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.current")]


@torch.inference_mode()
def test_a_captured_step_is_an_eager_one_bit_for_bit_and_allocates_nothing() -> None:
    model = reasoner().model
    plan, prompt = mixed_plan(model), task_prompts(2, 100)
    found = []
    with paged_attention(model):
        for is_captured in (False, True):
            step = Step(model, PlanCache(plan, model.config, max_tokens=500), 2, 300)
            if is_captured:
                step.cache.allocate(2, "cuda")
                call = step.capture().replay  # before the prompt, which may begin anew
                step.cache.reset()
            else:
                call = step
            step.begin(prompt)
            before = allocations()
            step.run(call)
            assert allocations() == before or not is_captured
            step.cache.check()
            found.append(step)
    eager, captured = found
    assert torch.equal(eager.history, captured.history)
    assert captured.cache.lengths == [400, 400]
    for ours, theirs in zip(captured.cache.static_layers, eager.cache.static_layers, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours.tensors, theirs.tensors, strict=True))


@torch.inference_mode()
def test_a_soak_of_20000_replays() -> None:
    """Twenty rounds of a thousand steps, each from an empty cache on: all rounds alike, and nothing grows."""
    model = random_llama()
    plan = plan_for(model, "kitty")
    with paged_attention(model):
        step = Step(model, PlanCache(plan, model.config, max_tokens=1000), 2, 1000)
        graph = step.capture()
        first, before = None, None
        for _ in range(20):
            step.cache.reset()  # raises what the kernels met
            step.ids.fill_(7)
            step.positions.zero_()
            step.run(graph.replay)
            assert step.cache.lengths == [1000, 1000]
            if first is None:
                first = step.history.clone()
                step.cache.reset()
                before = [*allocations(), step.cache.nbytes]
                continue
            assert torch.equal(step.history, first)
        step.cache.reset()
    after = [*allocations(), step.cache.nbytes]
    print("soak", before, after)
    assert after[1:] == before[1:]
    assert len(first.argmax(-1).unique()) > 1


def test_steps_tell_check_what_they_met() -> None:
    model = random_llama()
    cache = PlanCache(plan_for(model, "uniform"), model.config, max_tokens=130)
    cache.allocate(1, "cuda")
    layer = cache.static_layers[0]

    def feed(count: int, value: float) -> None:
        q, k = torch.randn(1, 8, 1, 64, device="cuda"), torch.full((1, 2, 1, 64), value, device="cuda")
        for _ in range(count):
            layer.attend(q, k, k, None, 0.1, 0.0)

    feed(129, 1.0)
    cache.check()
    feed(128, 1.0)
    with pytest.raises(UsageError, match="does not fit"):
        cache.check()
    cache.reset()
    feed(129, torch.nan)
    with pytest.raises(NonFiniteActivations):
        cache.reset()
    cache.check()


@pytest.mark.parametrize("sizes", [(200,), (150, 130, 3)])
def test_generate_gives_the_tokens_of_the_dynamic_cache(sizes: Sequence[int]) -> None:
    model = random_llama(num_layers=2, dtype=torch.float32)
    plan, width = plan_for(model, "kitty"), max(sizes)
    ids, mask = padded([random_ids(n, seed=n).cpu() for n in sizes], width, "left")
    ids, mask = ids.long().cuda(), mask.cuda()
    options = {"max_new_tokens": 150, "do_sample": False, "attention_mask": mask, "disable_compile": True}
    expected = model.generate(ids, past_key_values=PlanCache(plan, model.config, mask), **options)
    static = PlanCache(plan, model.config, mask, max_tokens=360)
    with paged_attention(model):
        found = model.generate(ids, past_key_values=static, **options)
    print("generate agrees on", (found == expected).float().mean().item())
    assert (found[:, : width + 10] == expected[:, : width + 10]).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_generate_compiles_the_step_by_itself(mode: str) -> None:
    from torch._dynamo.utils import counters

    model = random_llama(num_layers=2, dtype=torch.float32)
    plan, ids = plan_for(model, "per head"), random_ids(2, 120)
    cache = PlanCache(plan, model.config, max_tokens=400)
    options = {"max_new_tokens": 200, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    torch.compiler.reset()
    counters.clear()
    with paged_attention(model):
        expected = model.generate(ids, past_key_values=cache, disable_compile=True, **options)
        cache.reset()
        held = torch.cuda.memory_allocated()
        config = CompileConfig(mode=mode)
        found = model.generate(ids, past_key_values=cache, compile_config=config, **options)
    print(mode, {key: dict(counters[key]) for key in ("graph_break", "inductor", "stats")}, "equal",
          (found == expected).float().mean().item(), "memory", torch.cuda.memory_allocated() - held)  # fmt: skip
    del model._compiled_call, model._last_compile_config
    cache.check()
    assert cache.lengths == [319, 319]
    assert not counters["graph_break"] and not counters["inductor"]["cudagraph_skips"]
    assert (found == expected).float().mean() > 0.9
