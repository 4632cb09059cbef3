"""A prefix file back into a cache, as stored or reconstructed once into the pages of another plan (see ``prefix``), and
prompts that go on from it.

A prompt reads itself before it is quantized, and the tokens behind a loaded prefix read its pages. So a longer prompt
gives, token by token, what it gives when it is taken in in two parts, the prefix first. That is also what it gives in
one part when the prefix has no pages yet or its pages keep 16 bits, and when the prompt is the whole prefix; otherwise
the rest of the prompt has read coarser keys and values, and so has what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcal import artifact
from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.sliding_window import BoundedLayer
from kvcal.errors import ArtifactError, UsageError
from kvcal.geometry import CACHE_DTYPES
from kvcal.models.load import LoadedModel
from kvcal.pages.codec import ENCODE_PAGES
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side, num_pages
from kvcal.plan.plan import Plan
from kvcal.records import TensorSpec, record_of, refusing, require_tensors
from kvcal.stages.generate import completion, new_tokens, prompt_tokens
from kvcal.stages.prefix.save import (
    KIND,
    SCHEMA,
    Prefix,
    PrefixSubject,
    complete_prefix,
    named_parts,
    recent_places,
    tokens_sha256,
)
from kvcal.stages.verify import require_same_model

_PACK_AGAIN = "pack the prompt again with this plan and model"
LARGEST = 2.0**24  # of keys and values: far beyond a model's, and what attention makes of them is finite


@torch.no_grad()
def load_prefix(loaded: LoadedModel, plan: Plan, path: str | Path, into: Plan | None = None) -> Prefix:
    """Read a prefix back, as stored (``into`` None) or reconstructed once into the pages of ``into``, a plan of the
    same model.

    Raises:
        ArtifactError: missing or corrupt file; a prefix of another plan or model; missing or mis-shaped content.
        UsageError: ``into`` chooses channels by queries, which no file holds.
    """
    require_same_model(plan, loaded)
    stored = artifact.read(path, KIND, SCHEMA)
    subject = record_of(PrefixSubject, stored.body, path, hint=_PACK_AGAIN)
    if subject.model != plan.model:
        found, wanted = subject.model.id, plan.model.id
        raise ArtifactError(f"{path} is a prefix of the model {found!r}, the plan is for {wanted!r}", _PACK_AGAIN)
    if subject.plan_sha256 != plan.sha256:
        raise ArtifactError(
            f"{path} was packed with the plan {subject.plan_sha256[:16]}, this one is {plan.sha256[:16]}", _PACK_AGAIN
        )
    cache = _empty(loaded, plan, subject.num_tokens)
    with refusing(path, _PACK_AGAIN):
        vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        require_tensors(stored.tensors, _declared(cache, subject.num_tokens, vocab_size))
        tokens_T = stored.tensors["tokens"].to(torch.int64)
        if tokens_sha256(tokens_T) != subject.tokens_sha256:
            raise ValueError("its tokens are not those that its cache was made from")
        if subject.query_since.keys() != {name for name, part in named_parts(cache) if part.format.needs_queries}:
            raise ValueError(f"query_since of {list(subject.query_since)[:4]} are not those of the plan")
        _fill(cache, subject, stored.tensors, loaded.model.device)
    logits_V = stored.tensors["logits"]
    return Prefix(cache if into is None else _reconstructed(loaded, cache, into), tokens_T, logits_V)


@torch.no_grad()
def complete_after(
    loaded: LoadedModel, prefix: Prefix, prompt: str, max_new_tokens: int, temperature: float, seed: int
) -> dict[str, Any]:
    """The result of ``complete`` for a prompt that begins with the prefix, whose cache is used up; "prefix_tokens" says
    how many tokens came from it.

    Raises:
        UsageError: an empty prompt or one that begins otherwise, more tokens than the model's context, or sampling
            where the prompt is the whole prefix.
    """
    known_T = prefix.tokens_T
    tokens_T = prompt_tokens(loaded, prompt, False, max_new_tokens)
    _require_beginning(tokens_T, known_T)
    if len(tokens_T) > len(known_T):
        new_n = new_tokens(loaded, prefix.cache, tokens_T, max_new_tokens, temperature, seed)
    elif temperature > 0:
        raise UsageError(
            "the prompt is the whole prefix, whose file holds logits for a greedy first token alone",
            hint="leave out --temperature, or add text to the prompt",
        )
    else:
        new_n = complete_prefix(loaded, prefix, max_new_tokens)
    return {**completion(loaded, prefix.cache, new_n), "prefix_tokens": len(known_T)}


def _require_beginning(tokens_T: Tensor, known_T: Tensor) -> None:
    """UsageError unless the prompt's tokens begin with the prefix's."""
    shared = min(len(tokens_T), len(known_T))
    differing = (tokens_T[:shared] != known_T[:shared]).nonzero()
    same = int(differing[0]) if len(differing) else shared
    if same < len(known_T):
        raise UsageError(
            f"the prompt does not begin with the prefix: it shares {same} of the prefix's {len(known_T)} tokens",
            hint="give the packed prompt and what follows it; the packed one has to end where the next text cannot "
            "join its last word, such as at a line's end",
        )


def _empty(loaded: LoadedModel, plan: Plan, num_tokens: int) -> PlanCache:
    """The plan's cache with room for the prompt's tokens, which are not there yet."""
    cache = PlanCache(plan, loaded.model.config)
    for layer in cache.paged_layers:
        layer.create(1, loaded.model.device)
        layer.resume(num_tokens)
    return cache


def _declared(cache: PlanCache, num_tokens: int, vocab_size: int) -> dict[str, TensorSpec]:
    """Every tensor of the file of a cache of one sequence."""

    def unquantized(*shape: int) -> TensorSpec:
        return TensorSpec(CACHE_DTYPES[cache.plan.cache_dtype], shape, -LARGEST, LARGEST)

    declared = {
        "tokens": TensorSpec(torch.int32, (num_tokens,), 0, vocab_size - 1),
        "logits": TensorSpec(torch.float32, (vocab_size,)),
    }
    for name, part in named_parts(cache):
        codec, sinks = part.codec, min(part.format.num_sink_tokens, num_tokens)
        records = (num_pages(num_tokens), codec.records_per_page, codec.record_bytes(part.num_bits))
        declared[f"{name}.pages"] = TensorSpec(torch.uint8, records)
        recent = num_tokens - PAGE_TOKENS * part.format.pages_read(num_tokens)
        for place, tokens in (("sinks", sinks), ("recent", recent)):
            declared[f"{name}.{place}"] = unquantized(codec.num_heads, tokens, codec.head_dim)
        if part.format.needs_queries:
            declared[f"{name}.query_sum"] = TensorSpec(torch.float32, (codec.num_heads, codec.head_dim), low=0.0)
    for layer in cache.plan.layers:
        if not layer.is_paged:
            heads, window = layer.attention.num_kv_heads, layer.attention.window
            assert window is not None
            for side in SIDES:
                held = unquantized(heads, min(num_tokens, window - 1), layer.head_dim(side))
                declared[f"layers.{layer.geometry.index}.{side}.window"] = held
    return declared


def _fill(cache: PlanCache, subject: PrefixSubject, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """An empty cache becomes what it was after the prompt. ValueError for pages that no prompt gives."""
    for name, part in named_parts(cache):
        records = tensors[f"{name}.pages"].to(device)
        for pages in records.split(ENCODE_PAGES):
            if not bool((part.codec.decode(pages, part.num_bits).abs() <= LARGEST).all()):
                raise ValueError(f"tensor '{name}.pages' holds NaN, or values beyond {LARGEST:g}")
        part.pool.records[:] = records
        sinks, recent = (tensors[f"{name}.{place}"].to(device) for place in ("sinks", "recent"))
        part.sinks[0, :, : sinks.shape[1]] = sinks
        part.ring[0].index_copy_(1, recent_places(part, subject.num_tokens), recent)
        if part.format.needs_queries:
            part.query_sum[0] = tensors[f"{name}.query_sum"].to(device)
            part.query_since[:] = subject.query_since[name]
    for _, part in named_parts(cache):  # what the ring holds of tokens that are read from pages
        read = PAGE_TOKENS * part.format.pages_read(subject.num_tokens)
        part.refill(slice(0, 1), max(0, subject.num_tokens - part.format.ring_tokens), read)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, BoundedLayer):
            layer.update(*(tensors[f"layers.{index}.{side}.window"].unsqueeze(0).to(device) for side in SIDES))
            layer.cumulative_length = subject.num_tokens


def _reconstructed(loaded: LoadedModel, cache: PlanCache, into: Plan) -> PlanCache:
    """All tokens read back once, layer by layer, and stored as ``into`` says."""
    require_same_model(into, loaded)
    if into.needs_queries:
        raise UsageError(
            "the plan to reconstruct into chooses channels by queries, and a prefix holds none",
            hint="reconstruct into a plan without query scores, or take the prompt in again",
        )
    made = PlanCache(into, loaded.model.config)
    by_index = {layer.geometry.index: layer for layer in cache.plan.layers}
    for index, (old, new) in enumerate(zip(cache.layers, made.layers, strict=True)):
        if isinstance(old, PagedLayer) and isinstance(new, PagedLayer):
            # An update of no tokens returns all that is held.
            keys, values = old.update(*(_nothing(by_index[index], side, 0, loaded) for side in SIDES))
            new.update(keys, values)
        elif isinstance(old, BoundedLayer) and isinstance(new, BoundedLayer):
            assert old.keys is not None and old.values is not None
            new.update(old.keys, old.values)
            new.cumulative_length = old.cumulative_length
    return made


def _nothing(layer: LayerPlan, side: Side, num_tokens: int, loaded: LoadedModel) -> Tensor:
    """Zeros [1, N, num_tokens, D] in fp32: the shape of an update."""
    shape = (1, layer.attention.num_kv_heads, num_tokens, layer.head_dim(side))
    return torch.zeros(shape, device=loaded.model.device)
