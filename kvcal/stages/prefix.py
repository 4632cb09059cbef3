"""Prefix files: a prompt's cache on disk, as the plan stores it (AQUA-KV's codec mode).

Predicting pages from other layers' pages costs work in every step of a generation. Where a long prompt is used often
(or sent elsewhere), it pays to keep it in predicted form on disk alone: the file holds packed pages, sinks and the
recent tokens, and loading either takes them as they are, or reconstructs them once into the pages of another plan, by
default 16-bit ones, which need no predictor again.

    pack_prefix(loaded, plan, tokens, "prompt.safetensors")
    prefix = load_prefix(loaded, plan, "prompt.safetensors")                            # pages as stored
    prefix = load_prefix(loaded, plan, "prompt.safetensors", into=plan.unquantized())    # reconstructed once

A server that loads prefixes again and again keeps a loader, and prefixes in host memory:

    loader = PrefixLoader(loaded, plan, into=plan.unquantized())
    held = loader.read("prompt.safetensors").pinned()
    prefix = loader.load(held)                                                          # for each request

The logits behind the last token are stored, too: a prompt attends to itself before it is quantized, which a cache
alone cannot repeat. With them, generation goes on from the file token by token as it does from the prompt: for ever
from pages as stored; from reconstructed ones until the plan would have quantized its next page, which 16 bits do not,
and where the model computes in the cache's dtype (otherwise 16-bit pages round what predicted pages give in fp32).

One artifact (see kvcal.artifact), one sequence. Left out: the plan itself, without which the file says nothing, and
models with states of linear attention.

A prompt reads itself before it is quantized, and the tokens behind a loaded prefix read its pages. So a longer prompt
gives, token by token, what it gives when it is taken in in two parts, the prefix first. That is also what it gives in
one part when the prefix has no pages yet or its pages keep 16 bits, and when the prompt is the whole prefix; otherwise
the rest of the prompt has read coarser keys and values, and so has what follows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as record
from torch import Tensor

from kvcal import artifact
from kvcal.cache.attached import attached_for
from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.restored import LARGEST, CacheRestorer, require_ranges, value_range
from kvcal.cache.sliding_window import BoundedLayer
from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Plan
from kvcal.records import TensorSpec, record_of, refusing, require_tensors
from kvcal.stages.generate import PLAIN_DECODING, completion, new_tokens, prompt_tokens
from kvcal.stages.verify import require_same_model
from kvcal.store.pages_and_ring import PagedTensor
from kvcal.store.restore import StoredPart
from kvcal.store.streaming import Source, Unread, in_memory, on_device
from kvcal.stored_tensor import StoredTensors
from kvcal.strict import STRICT, Count, Positive, dump

KIND = "prefix"
CHECKED_PAGES = 64  # decoded at once
SCHEMA = 4  # also of what pages stand for: tokens from multiples of 128 on


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


@torch.no_grad()
def pack_prefix(loaded: LoadedModel, plan: Plan, tokens_T: Tensor, path: str | Path) -> PackedPrefix:
    """Take the prompt in through the plan's cache, and write that to ``path``.

    Raises:
        UsageError: no tokens, or more than the model's context.
        ArtifactError: the plan is another model's, or the file cannot be written.
        UnsupportedModel: a layer keeps a state.
    """
    require_same_model(plan, loaded)
    states = [layer.geometry.index for layer in plan.layers if layer.geometry.state_bytes]
    if states:
        raise UnsupportedModel(f"layers {states} keep a state of linear attention, which a prefix file does not hold")
    limit = loaded.max_context
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
            **PLAIN_DECODING,
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
    raw = plan.raw_nbytes([len(tokens_T)])
    bits = 8 * CACHE_DTYPES[plan.cache_dtype].itemsize * packed / raw
    return PackedPrefix(len(tokens_T), len(data), packed, raw, bits)


@torch.no_grad()
def complete_prefix(loaded: LoadedModel, prefix: Prefix, max_new_tokens: int) -> Tensor:
    """Greedy continuation, int64 [n]: what ``generate`` gives for the prompt and the same cache. The prefix's cache is
    used up."""
    first = prefix.logits_V.argmax().view(1)
    stop = loaded.model.generation_config.eos_token_id
    stops = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
    if max_new_tokens <= 1 or int(first) in stops:
        return first
    tokens_T = torch.cat([prefix.tokens_T, first])
    return torch.cat([first, new_tokens(loaded, prefix.cache, tokens_T, max_new_tokens - 1, 0.0, 0).cpu()])


def named_parts(cache: PlanCache) -> Iterator[tuple[str, PagedTensor]]:
    """Every PagedTensor of a cache by name."""
    for layer in cache.paged_layers:
        for name, part in parts_of_layer(layer):
            yield f"layers.{layer.plan.geometry.index}.{name}", part


def parts_of_layer(layer: PagedLayer) -> Iterator[tuple[str, PagedTensor]]:
    """Every PagedTensor of a layer by its name there."""
    for side in SIDES:
        for number, part in enumerate(layer.sides[side]):
            yield f"{side}.{number}", part


def held_tensors(cache: PlanCache) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a cache of one sequence, without empty places."""
    yield from parts_tensors(cache, cache.get_seq_length())
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, BoundedLayer):
            assert layer.keys is not None and layer.values is not None
            yield f"layers.{index}.k.window", layer.keys[0]
            yield f"layers.{index}.v.window", layer.values[0]


def parts_tensors(cache: PlanCache, num_tokens: int) -> Iterator[tuple[str, Tensor]]:
    """Those of paged layers, of so many tokens."""
    for name, part in named_parts(cache):
        yield f"{name}.pages", part.pool.records
        yield f"{name}.sinks", part.sinks[0, :, :num_tokens]
        yield f"{name}.recent", recent_tokens(part, num_tokens)
        if part.format.needs_queries:
            yield f"{name}.query_sum", part.query_sum[0]


def recent_tokens(part: PagedTensor, num_tokens: int) -> Tensor:
    """[n, T, D]: the tokens that no page is read for, of a sequence of ``num_tokens``. By slices, as places in the
    ring take 0.1 ms where an empty cache declares shapes."""
    ring, first = part.ring[0], PAGE_TOKENS * part.format.pages_read(num_tokens)
    start, count = first % ring.shape[1], num_tokens - first
    tokens = ring[:, start : start + count]
    rest = count - tokens.shape[1]
    return torch.cat([tokens, ring[:, :rest]], dim=1) if rest else tokens


def tokens_sha256(tokens_T: Tensor) -> str:
    """Of the ids as int64, little-endian."""
    return hashlib.sha256(tokens_T.cpu().to(torch.int64).numpy().astype("<i8").tobytes()).hexdigest()


_PACK_AGAIN = "pack the prompt again with this plan and model"


@dataclass(frozen=True, eq=False)
class HeldPrefix:
    """A prefix of a file: its tokens int32 [T], its logits [V] fp32, and the tensors of its cache, in host memory or
    still to be read."""

    path: Path
    subject: PrefixSubject
    tokens_T: Tensor
    logits_V: Tensor
    tensors: Source

    def pinned(self) -> HeldPrefix:
        """The same in pinned memory, from which loading is fastest."""
        return self._in_memory(pin=True)

    def read(self) -> HeldPrefix:
        """The same in host memory."""
        return self._in_memory(pin=False)

    def _in_memory(self, pin: bool) -> HeldPrefix:
        return replace(self, tensors=in_memory(self.tensors, pin))

    def layers(self, plan: Plan) -> list[Source]:
        """The tensors of every layer of its plan, by their names within the layer."""
        found: dict[str, dict[str, Tensor | Unread]] = {str(layer.geometry.index): {} for layer in plan.layers}
        for name, tensor in self.tensors.items():
            _, index, within = name.split(".", 2)
            found[index][within] = tensor
        return list(found.values())


class PrefixLoader:
    """Prefixes of a plan, into caches of that plan (``into`` None), or reconstructed once into pages of ``into``, a
    plan of the same model. Made once for any number of prefixes: it keeps what reconstructing takes of the plan on the
    device.

    Raises:
        ArtifactError: a plan of another model.
        UsageError: ``into`` chooses channels by queries, which no file holds.
    """

    def __init__(self, loaded: LoadedModel, plan: Plan, into: Plan | None = None) -> None:
        require_same_model(plan, loaded)
        self._loaded, self._plan, self._plan_sha256, self._restorer = loaded, plan, plan.sha256, None
        if into is not None:
            require_same_model(into, loaded)
            if into.needs_queries:
                raise UsageError(
                    "the plan to reconstruct into chooses channels by queries, and a prefix holds none",
                    hint="reconstruct into a plan without query scores, or take the prompt in again",
                )
            self._restorer = CacheRestorer(plan, into, loaded.model.config, loaded.model.device)

    def read(self, path: str | Path) -> HeldPrefix:
        """A file's content in host memory, verified but for the values of its pages.

        Raises:
            ArtifactError: missing or corrupt file; a prefix of another plan or model; missing or mis-shaped content.
        """
        with self._opened(path) as held:
            return held.read()

    def load_file(self, path: str | Path) -> Prefix:
        """``load`` of ``read``, with their errors. Each tensor is read and verified while the device works on those
        before."""
        with self._opened(path) as held:
            return self.load(held)

    @contextmanager
    def _opened(self, path: str | Path) -> Iterator[HeldPrefix]:
        """A file whose tensors are still to be read."""
        with artifact.opened(path, KIND, SCHEMA) as (body, unread):
            subject = record_of(PrefixSubject, body, path, hint=_PACK_AGAIN)
            self._require_plan(path, subject)
            with refusing(path, _PACK_AGAIN):
                if "tokens" not in unread or math.prod(unread["tokens"].shape) != subject.num_tokens:
                    raise ValueError(f"num_tokens = {subject.num_tokens}, and it does not hold as many tokens")
                if max(subject.query_since.values(), default=0) > subject.num_tokens:
                    raise ValueError(f"query_since is beyond its {subject.num_tokens} tokens")
                cache = self._empty(subject.num_tokens, torch.device("meta"))
                declared = declared_tensors(cache, subject.num_tokens, self._loaded.vocab_size)
                require_tensors(StoredTensors({name: tensor.like for name, tensor in unread.items()}), declared)
                tensors = {name: replace(tensor, fault=declared[name].fault) for name, tensor in unread.items()}
                prompt = in_memory({name: tensors.pop(name) for name in ("tokens", "logits")}, pin=False)
                if tokens_sha256(prompt["tokens"]) != subject.tokens_sha256:
                    raise ValueError("its tokens are not those that its cache was made from")
                with_queries = {name for name, part in named_parts(cache) if part.format.needs_queries}
                if subject.query_since.keys() != with_queries:
                    raise ValueError(f"query_since of {list(subject.query_since)[:4]} are not those of the plan")
            yield HeldPrefix(Path(path), subject, prompt["tokens"], prompt["logits"], tensors)

    def _require_plan(self, path: str | Path, subject: PrefixSubject) -> None:
        """ArtifactError for a prefix of another plan or model."""
        if subject.model != self._plan.model:
            found, wanted = subject.model.id, self._plan.model.id
            raise ArtifactError(f"{path} is a prefix of the model {found!r}, the plan is for {wanted!r}", _PACK_AGAIN)
        if subject.plan_sha256 != self._plan_sha256:
            raise ArtifactError(
                f"{path} was packed with the plan {subject.plan_sha256[:16]}, this one is {self._plan_sha256[:16]}",
                _PACK_AGAIN,
            )

    @torch.no_grad()
    def load(self, held: HeldPrefix) -> Prefix:
        """The prefix in a cache of its own. Tensors come, by way of pinned buffers unless they are pinned, while the
        device works on those before.

        Raises:
            ArtifactError: pages that no prompt gives, or a prefix of another plan or model.
        """
        self._require_plan(held.path, held.subject)
        layers, num_tokens = held.layers(self._plan), held.subject.num_tokens
        with refusing(held.path, _PACK_AGAIN):
            if self._restorer is None:
                cache = self._empty(num_tokens, self._loaded.model.device)
                _fill(cache, held.subject, layers, self._loaded.model.device)
            else:
                cache = self._restorer.cache(layers, num_tokens)
        return Prefix(cache, held.tokens_T.to(torch.int64), held.logits_V)

    def _empty(self, num_tokens: int, device: torch.device) -> PlanCache:
        """The plan's cache with room for a prompt's tokens, which are not there yet."""
        cache = PlanCache(self._plan, self._loaded.model.config)
        for layer in cache.paged_layers:
            layer.create(1, device)
            layer.resume(num_tokens)
        return cache


def load_prefix(loaded: LoadedModel, plan: Plan, path: str | Path, into: Plan | None = None) -> Prefix:
    """Read a prefix back, as ``PrefixLoader`` does, with its errors."""
    return PrefixLoader(loaded, plan, into).load_file(path)


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


def declared_tensors(cache: PlanCache, num_tokens: int, vocab_size: int) -> dict[str, TensorSpec]:
    """Every tensor of the file of a cache of one sequence, which has the shapes of that in ``cache``."""
    declared = {
        "tokens": TensorSpec("int32", (num_tokens,), 0, vocab_size - 1),
        "logits": TensorSpec("float32", (vocab_size,)),
    }
    ranges = {"pages": (-math.inf, math.inf), "query_sum": (0.0, math.inf)}
    for name, tensor in parts_tensors(cache, num_tokens):
        low, high = ranges.get(name.rpartition(".")[2], (-LARGEST, LARGEST))
        declared[name] = TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), low, high)
    for layer in cache.plan.layers:
        if not layer.is_paged:
            heads, window = layer.attention.num_kv_heads, layer.attention.window
            assert window is not None
            for side in SIDES:
                shape = (heads, min(num_tokens, window - 1), layer.head_dim(side))
                name = f"layers.{layer.geometry.index}.{side}.window"
                declared[name] = TensorSpec(cache.plan.cache_dtype, shape, -LARGEST, LARGEST)
    return declared


def _fill(cache: PlanCache, subject: PrefixSubject, layers: Sequence[Source], device: torch.device) -> None:
    """An empty cache becomes what it was after the prompt. ValueError for pages that no prompt gives."""
    ranges = dict[str, Tensor]()
    for plan, given in zip(cache.plan.layers, on_device(layers, device), strict=True):
        index = plan.geometry.index
        layer = cache.layers[index]
        if isinstance(layer, BoundedLayer):
            layer.update(*(given[f"{side}.window"].clone().unsqueeze(0) for side in SIDES))
            layer.cumulative_length = subject.num_tokens
            continue
        assert isinstance(layer, PagedLayer)
        for name, part in parts_of_layer(layer):
            records, sinks, recent = (given[f"{name}.{field}"] for field in StoredPart._fields)
            decoded = [part.codec.decode(pages, part.num_bits) for pages in records.split(CHECKED_PAGES)]
            ranges[f"layers.{index}.{name}"] = value_range(torch.stack([value_range(pages) for pages in decoded]))
            part.pool.records[:] = records
            part.sinks[0, :, : sinks.shape[1]] = sinks
            part.ring[0].index_copy_(1, part.places(subject.num_tokens - recent.shape[1], subject.num_tokens), recent)
            if part.format.needs_queries:
                part.query_sum[0] = given[f"{name}.query_sum"]
                part.query_since[:] = subject.query_since[f"layers.{index}.{name}"]
    require_ranges(ranges)
    for _, part in named_parts(cache):  # what the ring holds of tokens that are read from pages
        read = PAGE_TOKENS * part.format.pages_read(subject.num_tokens)
        part.refill(slice(0, 1), max(0, subject.num_tokens - part.format.ring_tokens), read)
