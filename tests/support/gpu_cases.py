"""Shared by the tests of the static cache on a GPU: models, plans for them, and ways to feed a cache."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
import transformers as hf
from cache_cases import padded, plan_of, recipe_formats
from static_cases import FORMATS, TRANSFORMED, V, with_transforms
from tiny_models import perturbed
from torch import Tensor
from torch.nn.functional import pad

from kvcal import Plan, PlanCache, attached
from kvcal.cache.attached import attached_for
from kvcal.data.tasks import chain
from kvcal.models.load import LoadedModel, load
from kvcal.models.supported_layers import geometry_of

VOCABULARY = 512
RECIPES = recipe_formats()
SINKS_5 = replace(V, num_sink_tokens=5)
PAIRS = {name: pair for name, pair in FORMATS.items() if name != "different sinks"} | {
    "query magnitude": (FORMATS["query magnitude"][0], SINKS_5),
    "variance": (FORMATS["variance"][0], SINKS_5),
    "mixkvq": RECIPES["mixkvq-capped"],
}


@functools.cache
@torch.inference_mode(False)
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
    return perturbed(hf.LlamaForCausalLM(config), 0.1).to("cuda", dtype).requires_grad_(False)


@functools.cache
@torch.inference_mode(False)
def reasoner(dtype: str) -> LoadedModel:
    """The embedded model; its cache is bf16."""
    return load("reasoner-10m", dtype=dtype, device="cuda")


def plan_for(model: hf.PreTrainedModel, name: str) -> Plan:
    geometry = geometry_of(model, cache_dtype="bfloat16")
    if name not in TRANSFORMED:
        return plan_of(geometry, *PAIRS[name])
    return with_transforms(plan_of(geometry, *PAIRS[TRANSFORMED[name]]), name, 0.2)


def mixed_plan(model: hf.PreTrainedModel) -> Plan:
    """Every layer another pair of formats."""
    names = ("16 bits", "kitty", "mixkvq", "kivi", "clamped window", "uniform", "paged window", "queries")
    layers = []
    for index, layer in enumerate(plan_for(model, "kivi").layers):
        other = plan_for(model, names[index % len(names)]).layers[index]
        layers.append(replace(layer, k=other.k, v=other.v))
    return replace(plan_for(model, "kivi"), layers=tuple(layers))


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).cuda()


def ragged_ids(lengths: tuple[int, ...], more: int) -> tuple[Tensor, Tensor]:
    """ids and mask [B, columns]: prompts of these lengths, padded on the left, then ``more`` tokens each."""
    ids, mask = padded([random_ids(n, seed=n).cpu() for n in lengths], max(lengths), "left")
    return torch.cat([ids.cuda(), random_ids(len(lengths), more)], 1), pad(mask.cuda(), (0, more), value=1)


def graph_of(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A captured graph of ``step``, after warm-up steps on a stream that is not the default."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def context(model: hf.PreTrainedModel, cache: PlanCache) -> AbstractContextManager[None]:
    return attached_for(model, cache.plan) if cache.static is None else attached(model)


@torch.inference_mode()
def steps(
    model: hf.PreTrainedModel, cache: PlanCache, ids: Tensor, prompt: int, mask: Tensor | None = None
) -> Iterator[Tensor]:
    """Logits fp32 [B, vocabulary] after a prompt of so many columns, then after every later token."""
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


def relative(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def task_prompts(count: int, length: int) -> Tensor:
    tokenizer, rng = reasoner("float32").tokenizer, random.Random(0)
    texts = [chain(rng, max_size=60).prompt_text for _ in range(count)]
    rows = [tokenizer(text + text, add_special_tokens=False)["input_ids"][:length] for text in texts]
    return torch.tensor(rows, device="cuda")
