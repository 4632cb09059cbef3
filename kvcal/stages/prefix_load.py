"""A prefix file back into a cache, as stored or reconstructed once into the pages of another plan (see ``prefix``), and
prompts that go on from it.

A prompt reads itself before it is quantized, and the tokens behind a loaded prefix read its pages. So a longer prompt
gives, token by token, what it gives when it is taken in in two parts, the prefix first. That is also what it gives in
one part when the prefix has no pages yet or its pages keep 16 bits, and when the prompt is the whole prefix; otherwise
the rest of the prompt has read coarser keys and values, and so has what follows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcal import artifact
from kvcal.errors import ArtifactError, UsageError
from kvcal.formats import SIDES, Side
from kvcal.geometry import CACHE_DTYPES
from kvcal.layer_plan import LayerPlan
from kvcal.models.load import LoadedModel
from kvcal.plan import Plan
from kvcal.runtime.bounded_layer import BoundedLayer
from kvcal.runtime.cache import PlanCache
from kvcal.runtime.paged_layer import PagedLayer
from kvcal.runtime.paged_tensor import PagedTensor
from kvcal.stages.complete import completion, new_tokens, prompt_tokens
from kvcal.stages.prefix import KIND, SCHEMA, Prefix, PrefixSubject, complete_prefix, tokens_sha256
from kvcal.stages.verify import require_same_model
from kvcal.strict import parse

_PACK_AGAIN = "pack the prompt again with this plan and model"


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
    subject = parse(PrefixSubject, stored.body, str(path), ArtifactError, hint=_PACK_AGAIN)
    if subject.model != plan.model:
        found, wanted = subject.model.id, plan.model.id
        raise ArtifactError(f"{path} is a prefix of the model {found!r}, the plan is for {wanted!r}", _PACK_AGAIN)
    if subject.plan_sha256 != plan.sha256:
        raise ArtifactError(
            f"{path} was packed with the plan {subject.plan_sha256[:16]}, this one is {plan.sha256[:16]}", _PACK_AGAIN
        )
    content = _Content(path, stored.tensors)
    tokens_T = content.take("tokens", (subject.num_tokens,), torch.int32).to(torch.int64)
    if tokens_sha256(tokens_T) != subject.tokens_sha256:
        raise ArtifactError(f"{path}: its tokens are not those that its cache was made from", _PACK_AGAIN)
    vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
    logits_V = content.take("logits", (vocab_size,), torch.float32)
    cache = _restored(loaded, plan, subject, content)
    content.require_used()
    return Prefix(cache if into is None else _reconstructed(loaded, cache, into), tokens_T, logits_V)


@torch.no_grad()
def complete_after(
    loaded: LoadedModel, prefix: Prefix, prompt: str, max_new_tokens: int, temperature: float, seed: int
) -> dict[str, Any]:
    """What ``complete`` gives for a prompt that begins with the prefix, whose cache is used up; "prefix_tokens" says
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


class _Content:
    """The tensors of a file, each of which must be asked for once, by its name, shape and dtype."""

    def __init__(self, path: str | Path, tensors: dict[str, Tensor]) -> None:
        self._path = path
        self._left = dict(tensors)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """ArtifactError when it is missing or of another shape or dtype."""
        if name not in self._left:
            raise ArtifactError(f"{self._path}: the tensor {name!r} is missing", _PACK_AGAIN)
        tensor = self._left.pop(name)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ArtifactError(
                f"{self._path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}",
                _PACK_AGAIN,
            )
        return tensor

    def require_used(self) -> None:
        """ArtifactError for a tensor that nothing asked for."""
        if self._left:
            raise ArtifactError(f"{self._path}: unknown tensor {min(self._left)!r}", _PACK_AGAIN)


def _restored(loaded: LoadedModel, plan: Plan, subject: PrefixSubject, content: _Content) -> PlanCache:
    """The plan's cache after the prompt."""
    cache = PlanCache(plan, loaded.model.config)
    by_index = {layer.geometry.index: layer for layer in plan.layers}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PagedLayer):
            layer.lazy_initialization(*(_nothing(by_index[index], side, 1, loaded) for side in SIDES))
            layer.columns = subject.num_tokens
            for side in SIDES:
                for number, part in enumerate(layer.sides[side]):
                    _fill(part, f"layers.{index}.{side}.{number}", subject, content)
        elif isinstance(layer, BoundedLayer):
            attention = by_index[index].attention
            assert attention.window is not None
            held, dtype = min(subject.num_tokens, attention.window - 1), CACHE_DTYPES[plan.cache_dtype]
            shapes = [(attention.num_kv_heads, held, dim) for dim in (attention.k_head_dim, attention.v_head_dim)]
            names = (f"layers.{index}.k.window", f"layers.{index}.v.window")
            k, v = (content.take(name, shape, dtype) for name, shape in zip(names, shapes, strict=True))
            layer.update(k.unsqueeze(0).to(loaded.model.device), v.unsqueeze(0).to(loaded.model.device))
            layer.cumulative_length = subject.num_tokens
    return cache


def _fill(part: PagedTensor, name: str, subject: PrefixSubject, content: _Content) -> None:
    """One PagedTensor, fresh, becomes what it was after the prompt."""
    num_tokens, fmt, codec = subject.num_tokens, part.format, part.codec
    device, dtype = part.buffer.device, part.buffer.dtype
    part.num_bits = fmt.bits_at(num_tokens)
    part.num_pages = [fmt.num_pages(num_tokens)]
    records = (part.num_pages[0], codec.records_per_page, codec.record_bytes(part.num_bits))
    part.pages = content.take(f"{name}.pages", records, torch.uint8).to(device)
    sinks, held = min(fmt.num_sink_tokens, num_tokens), part.num_buffered(0, num_tokens)
    part.sinks[0, :, :sinks] = content.take(f"{name}.sinks", (codec.num_heads, sinks, codec.head_dim), dtype).to(device)
    part.buffer[0, :, :held] = content.take(f"{name}.buffer", (codec.num_heads, held, codec.head_dim), dtype).to(device)
    if fmt.needs_queries:
        sums = content.take(f"{name}.query_sum", (codec.num_heads, codec.head_dim), torch.float32)
        part.query_sum[0] = sums.to(device)
        part.query_count = [subject.query_counts.get(name, 0)]


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
