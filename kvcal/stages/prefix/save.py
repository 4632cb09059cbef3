"""A prompt's cache on disk, as the plan stores it: AQUA-KV's codec mode.

Predicting pages from other layers' pages costs work in every step of a generation. Where a long prompt is used often
(or sent elsewhere), it pays to keep it in predicted form on disk alone: the file holds packed pages, sinks and the
recent tokens, and loading either takes them as they are, or reconstructs them once into the pages of another plan, by
default 16-bit ones, which need no predictor again.

    pack_prefix(loaded, plan, tokens, "prompt.safetensors")
    prefix = load_prefix(loaded, plan, "prompt.safetensors")                            # pages as stored
    prefix = load_prefix(loaded, plan, "prompt.safetensors", into=unpredicted(plan))    # reconstructed once

(``load_prefix`` is in ``prefix.load``.)

The logits behind the last token are stored, too: a prompt attends to itself before it is quantized, which a cache
alone cannot repeat. With them, generation goes on from the file token by token as it does from the prompt: for ever
from pages as stored; from reconstructed ones until the plan would have quantized its next page, which 16 bits do not,
and where the model computes in the cache's dtype (otherwise 16-bit pages round what predicted pages give in fp32).

One artifact (see kvcal.artifact), one sequence. Left out: the plan itself, without which the file says nothing, and
models with states of linear attention.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as record
from torch import Tensor

from kvcal import artifact
from kvcal.cache.attached import attached_for
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.sliding_window import BoundedLayer
from kvcal.data.sequences import prefix_ids
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, ModelIdentity, StateGeometry
from kvcal.models.load import LoadedModel
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.layer import bare_layers
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Plan
from kvcal.stages.verify import require_same_model
from kvcal.store.paged_tensor import PagedTensor
from kvcal.strict import STRICT, Count, Positive, dump

KIND = "prefix"
SCHEMA = 3  # also of what pages stand for: tokens from multiples of 128 on


@record(frozen=True, config=STRICT)
class PrefixSubject:
    """The model and the plan of a prefix. ``compute_dtype``: in which the model took the prompt in; ``query_since``:
    the tokens at which query statistics begin, by the name of their part of the cache."""

    model: ModelIdentity
    plan_sha256: str
    compute_dtype: str
    num_tokens: Positive
    tokens_sha256: str
    query_since: dict[str, Count]


@record(frozen=True, config=STRICT)
class PackedPrefix:
    """Sizes in bytes: ``file_bytes`` on disk, ``packed_bytes`` of the cache's part of it, ``raw_bytes`` of the same
    tokens at 16 bits. ``bits_per_value`` counts ``packed_bytes``."""

    num_tokens: int
    file_bytes: int
    packed_bytes: int
    raw_bytes: int
    bits_per_value: float


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prompt that was taken in: its cache, its tokens int64 [T], and the logits [V] fp32 that follow it."""

    cache: PlanCache
    tokens_T: Tensor
    logits_V: Tensor


def encode_prompt(loaded: LoadedModel, prompt: str) -> Tensor:
    """Token ids int64 [T], beginning as the model's sequences do. UsageError without text or tokenizer."""
    if loaded.tokenizer is None:
        raise UsageError(f"{loaded.source}: no tokenizer", hint="a prompt cannot be tokenized without one")
    if not prompt.strip():
        raise UsageError("the prompt is empty", hint="give --prompt TEXT or --prompt-file FILE")
    body = loaded.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(prefix_ids(loaded.tokenizer) + list(body), dtype=torch.int64)


def unpredicted(plan: Plan) -> Plan:
    """The plan that a prefix is reconstructed into: every layer at 16 bits."""
    return replace(plan, layers=bare_layers(plan.geometry), tensors={})


@torch.no_grad()
def pack_prefix(loaded: LoadedModel, plan: Plan, tokens_T: Tensor, path: str | Path) -> PackedPrefix:
    """Take the prompt in through the plan's cache, and write that to ``path``.

    Raises:
        UsageError: no tokens, or more than the model's context.
        ArtifactError: the plan is another model's, or the file cannot be written.
        UnsupportedModel: a layer keeps a state.
    """
    require_same_model(plan, loaded)
    states = [layer.geometry.index for layer in plan.layers if isinstance(layer.geometry, StateGeometry)]
    if states:
        raise UnsupportedModel(f"layers {states} keep a state of linear attention, which a prefix file does not hold")
    limit = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not 0 < len(tokens_T) <= (limit or len(tokens_T)):
        raise UsageError(f"a prompt of {len(tokens_T)} tokens, expected 1 to {limit}, the model's context")
    cache = PlanCache(plan, loaded.model.config)
    model: Any = loaded.model  # transformers declares no type for generate
    with attached_for(loaded.model, plan):
        output = model.generate(
            tokens_T.unsqueeze(0).to(loaded.model.device),
            attention_mask=torch.ones(1, len(tokens_T), dtype=torch.int64, device=loaded.model.device),
            past_key_values=cache,
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    held = dict(held_tensors(cache))
    tensors = {**held, "tokens": tokens_T.to(torch.int32), "logits": output.logits[0][0].float()}
    subject = PrefixSubject(
        plan.model,
        plan.sha256,
        str(loaded.model.dtype).removeprefix("torch."),
        len(tokens_T),
        tokens_sha256(tokens_T),
        {name: int(part.query_since[0, 0]) for name, part in named_parts(cache) if part.format.needs_queries},
    )
    data = artifact.to_bytes(artifact.Artifact(KIND, SCHEMA, {}, dump(subject), tensors))
    artifact.write_bytes_atomic(path, data)
    packed = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    num_values = _num_values(plan, len(tokens_T))
    raw = num_values * CACHE_DTYPES[plan.cache_dtype].itemsize
    return PackedPrefix(len(tokens_T), len(data), packed, raw, 8 * packed / num_values)


@torch.no_grad()
def complete_prefix(loaded: LoadedModel, prefix: Prefix, max_new_tokens: int) -> Tensor:
    """Greedy continuation, int64 [n]: what ``generate`` gives for the prompt and the same cache. The prefix's cache is
    used up."""
    first = prefix.logits_V.argmax().view(1)
    new_tokens = first
    stop = loaded.model.generation_config.eos_token_id
    stops = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
    if max_new_tokens > 1 and int(first) not in stops:
        input_ids = torch.cat([prefix.tokens_T, first]).unsqueeze(0).to(loaded.model.device)
        model: Any = loaded.model
        with attached_for(loaded.model, prefix.cache.plan):
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                past_key_values=prefix.cache,
                max_new_tokens=max_new_tokens - 1,
                do_sample=False,
            )
        new_tokens = output[0, len(prefix.tokens_T) :].cpu()
    return new_tokens


def named_parts(cache: PlanCache) -> Iterator[tuple[str, PagedTensor]]:
    """Every PagedTensor of a cache by name."""
    for layer in cache.paged_layers:
        for side in SIDES:
            for number, part in enumerate(layer.sides[side]):
                yield f"layers.{layer.plan.geometry.index}.{side}.{number}", part


def held_tensors(cache: PlanCache) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a cache of one sequence, without empty places."""
    num_tokens = cache.get_seq_length()
    for name, part in named_parts(cache):
        yield f"{name}.pages", part.pool.records
        yield f"{name}.sinks", part.sinks[0, :, :num_tokens]
        yield f"{name}.recent", part.ring[0].index_select(1, recent_places(part, num_tokens))
        if part.format.needs_queries:
            yield f"{name}.query_sum", part.query_sum[0]
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, BoundedLayer):
            assert layer.keys is not None and layer.values is not None
            yield f"layers.{index}.k.window", layer.keys[0]
            yield f"layers.{index}.v.window", layer.values[0]


def recent_places(part: PagedTensor, num_tokens: int) -> Tensor:
    """Places in the ring of the tokens that no page is read for, of a sequence of ``num_tokens``."""
    return part.places(PAGE_TOKENS * part.format.pages_read(num_tokens), num_tokens)


def tokens_sha256(tokens_T: Tensor) -> str:
    """Of the ids as int64, little-endian."""
    return hashlib.sha256(tokens_T.cpu().to(torch.int64).numpy().astype("<i8").tobytes()).hexdigest()


def _num_values(plan: Plan, num_tokens: int) -> int:
    """Keys and values of so many tokens, a number each; of a sliding window those in it."""
    total = 0
    for layer in plan.geometry.layers:
        assert isinstance(layer, AttentionGeometry)
        held = num_tokens if layer.window is None else min(num_tokens, layer.window - 1)
        total += held * layer.num_kv_heads * (layer.k_head_dim + layer.v_head_dim)
    return total
