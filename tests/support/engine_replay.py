"""The work of an engine, computed again with ``PlanCache``: the same tokens in the same chunks, one request at a
time.

An engine cuts prompts into chunks, begins after blocks that others filled, and drops a request's blocks to
compute them again later. All of that changes which tokens are seen packed. So the steps are replayed as they
were recorded. Drafts leave no trace: those that were right are fed as single tokens, and the others not at
all.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attention_recorder import Attended, attended_in
from torch.nn import functional
from transformers import PreTrainedModel

from kvcal import Plan, PlanCache
from kvcal.cache.attached import attached_for
from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.sliding_window import BoundedLayer
from kvcal.geometry import AttentionGeometry
from kvcal.stages.measuring.cache import DecodedCache
from kvcal.stages.measuring.decoded_layer import DecodedLayer

# Of log-probabilities, at most and in the middle of a request. Products of other shapes differ in their last
# bits, so that single codes of a long past come out one step apart; 16 bits in place of a plan are tenths to
# units away.
MOST, MEDIAN = 0.1, 0.02
PAGE = 128
# A copy from blocks of an engine to others of it; from blocks of another engine.
WITHIN, FROM_PEER = 2, 3
# Before the names of requests of an engine that computes prompts for another.
PROMPTS = "prompt of "


class Replay:
    """``steps``, ``requests``: as vllm_host records them. ``alone``: new tokens of a request, at most, that
    the engine serves as it serves a token and its drafts; ``logits``: what they are rounded to. ``cached``:
    tokens of every request that came from blocks of others; ``restarts``: how often a request was computed
    again; ``distances``: of log-probabilities, of all tokens; ``ties``: of tokens that are not the most
    likely ones, by request and place: how much less likely they are; ``loaded``: pages that came from the
    host; ``moved``: that a running request has in another block than before; ``accepted``, ``rejected``:
    drafts, and ``split``: pages whose last token was a draft that was rejected."""

    def __init__(self, model: PreTrainedModel, plan: Plan, alone: int = 1, logits: torch.dtype = torch.float32) -> None:
        self.model, self.plan, self.alone, self.logits = model, plan, alone, logits
        self._writers: dict[int, PlanCache] = {}  # by block: the cache that filled it last
        self._caches: dict[str, PlanCache] = {}
        self._blocks: dict[str, list[int]] = {}  # of each request, at its last step
        self._hosted: dict[int, PlanCache] = {}  # the same, of the host's blocks
        self._has_states = any(layer.geometry.state_bytes for layer in plan.layers)
        self._ends: dict[int, PlanCache] = {}  # by page: a copy of the cache that ended with it, with its states
        self.cached: dict[str, int] = {}
        self.restarts = self.loaded = self.moved = 0
        self.distances: list[float] = []
        self.ties: dict[tuple[str, int], float] = {}
        self.accepted = self.rejected = self.split = 0

    @torch.no_grad()
    def run(self, found: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
        """Log-probabilities [vocabulary] of every output token of every request, in order. Called again, it
        goes on with later steps, of other requests."""
        results: dict[str, list[torch.Tensor]] = {name: [] for name in found["requests"]}
        ids = {name: prompt + output for name, (prompt, output) in found["requests"].items()}
        for step in found["steps"]:
            # Those that fill blocks come before those that begin after them.
            for name, first, count, blocks, drafts, right, *begins in step:
                if name is None:
                    self._copy(blocks, drafts, right)
                    continue
                self.rejected, self.accepted = self.rejected + count - right, self.accepted + drafts - count + right
                self.split += (first + count) // PAGE > (first + right) // PAGE
                new = torch.tensor([ids[name][first : first + right]])
                if drafts:  # the request ends with its last token, maybe before the drafts that were right
                    right = min(right, new.shape[1])
                if new.shape[1] < right:  # the engine went on after the end, without a result
                    continue
                cache = self._cache_at(name, first, blocks, any(begins))
                for part in new.split(1, dim=1) if count <= self.alone else [new]:
                    logits = self.model(part, past_key_values=cache, logits_to_keep=1).logits[0, -1]
                    answered = cache.get_seq_length() - len(found["requests"][name][0])
                    if answered == len(results[name]):
                        results[name].append(logits.to(self.logits).float().log_softmax(-1))
                self._written(cache, blocks, first, right)
        return results

    def _written(self, cache: PlanCache, blocks: list[int], first: int, count: int) -> None:
        """Note who filled pages of these blocks with ``count`` tokens after ``first``."""
        self._writers |= {block: cache for block in blocks[first // PAGE : (first + count) // PAGE]}
        if self._has_states and (first + count) % PAGE == 0:
            self._ends[blocks[(first + count) // PAGE - 1]] = copy.deepcopy(cache)

    def _copy(self, blocks: list[int], is_store: int, hosted: list[int]) -> None:
        """Between an engine's blocks and the host's, within the engine's, or from another engine's; some hold no
        pages."""
        if is_store in (WITHIN, FROM_PEER):
            for own, source in zip(blocks, hosted, strict=True):
                for found in (self._writers, self._ends):
                    found.pop(own, None)
                    found |= {own: found[source]} if source in found else {}
            return
        for own, other in zip(blocks, hosted, strict=True):
            (key, to), (source, found) = (other, self._hosted), (own, self._writers)
            if not is_store:
                (key, to), (source, found) = (own, self._writers), (other, self._hosted)
            if source in found:
                to[key] = found[source]
                self.loaded += not is_store
            else:
                to.pop(key, None)

    def _cache_at(self, name: str, tokens: int, blocks: list[int], begins: bool) -> PlanCache:
        """The cache of a request with so many tokens: its own, or one of pages of those who filled these
        blocks. A page may lie in another block than before: SGLang keeps one of equal prefixes, and frees the
        others' pages."""
        own = self._caches.get(name)
        if own is not None and own.get_seq_length() == tokens and not begins:
            held = zip(self._blocks[name], blocks[: tokens // PAGE], strict=False)
            if moved := [page for page, (before, now) in enumerate(held) if before != now]:
                self._take(own, moved, blocks)
                self.moved += len(moved)
            self._blocks[name] = blocks
            return own
        self.restarts += own is not None
        found = DecodedCache(self.plan, self.model.config)
        for number, layer in enumerate(found.layers):
            if isinstance(layer, BoundedLayer):  # all tokens, as an engine has them: another may begin at earlier ones
                every = dataclasses.replace(layer.geometry, window=2**20)
                found.layers[number] = BoundedLayer(every, str(self.model.dtype).split(".")[1], layer.padding)
        if tokens % PAGE:  # within a page: it has the ring of the engine that computed its prompt
            found = copy.deepcopy(self._caches[PROMPTS + name])
            found.crop(tokens - found.get_seq_length())
            self._take(found, range(tokens // PAGE), blocks)
        elif tokens:
            last = blocks[tokens // PAGE - 1]
            found = copy.deepcopy(self._ends[last] if self._has_states else self._writers[last])
            assert found.get_seq_length() == tokens or not self._has_states
            found.crop(tokens - found.get_seq_length())
            self._take(found, range(tokens // PAGE), blocks)
            begin_sums(found, tokens)
            decode_windows(found, tokens)
        self.cached[name] = self.cached.get(name, 0) + tokens
        self._caches[name], self._blocks[name] = found, blocks
        return found

    def _take(self, cache: PlanCache, pages: Iterable[int], blocks: list[int]) -> None:
        """These pages, of those who filled their blocks."""
        for page in pages:
            for layer, theirs in zip(cache.layers, self._writers[blocks[page]].layers, strict=True):
                if isinstance(layer, BoundedLayer):
                    for mine, other in zip(layer.tensors, theirs.tensors, strict=True):
                        mine[:, :, page * PAGE : (page + 1) * PAGE] = other[:, :, page * PAGE : (page + 1) * PAGE]
                    continue
                for part, other in zip(parts_of(layer), parts_of(theirs), strict=True):
                    part.pool.records[page] = other.pool.records[page]
        for layer in cache.layers:
            if isinstance(layer, DecodedLayer):
                layer.forget()


class AttentionReplay(Replay):
    """Attention of every layer from the queries, keys and values that the engine had there, so that no layer
    adds to what another one rounded. ``errors``: of all requests and steps, the largest one of any layer's
    attention. The unit is 2^-24 (s + 1) |v|, with the largest |v|, and of a score the largest sum s of
    products without their signs: what one rounding of such a score in fp32 moves. Products of D channels
    round up to D times."""

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        super().__init__(model, plan)
        self.errors: list[float] = []
        self._calls: dict[tuple[int, int, int], list[Attended]] = collections.defaultdict(list)

    @torch.no_grad()
    def attend(self, steps: Sequence[list[Any]], kept: Sequence[list[Any]], calls: Iterable[Attended]) -> None:
        """``steps``: all later ones of the engine, as recorded; ``kept``: requests that are replayed."""
        for call in calls:
            self._calls[call.index, call.num_past, len(call.q)].append(call)
        for step, wanted in zip(steps, kept, strict=True):
            names = {one[0] for one in wanted}
            for name, first, count, blocks, is_store, others, *begins in step:
                if name is None:
                    self._copy(blocks, is_store, others)
                    continue
                paged = [layer.geometry.index for layer in self.plan.layers if layer.is_paged]
                own = [self._taken(index, first, count, blocks) for index in paged]
                if name not in names:
                    continue
                cache = self._cache_at(name, first, blocks, any(begins))
                self.errors.append(max(self._errors(cache, own, count)))
                self._written(cache, blocks, first, count)

    def _errors(self, cache: PlanCache, calls: list[Attended], count: int) -> Iterator[float]:
        """Of all layers in order. Those with a window, which are the engine's own, only count tokens."""
        by_index = {call.index: call for call in calls}
        for layer in self.plan.layers:
            if layer.geometry.index in by_index:
                yield _error(cache, by_index[layer.geometry.index])
            elif isinstance(layer.geometry, AttentionGeometry):
                none = torch.zeros(1, layer.geometry.num_kv_heads, count, layer.geometry.k_head_dim)
                cache.update(none, none, layer.geometry.index)

    def _taken(self, index: int, first: int, count: int, blocks: list[int]) -> Attended:
        """The earliest call of these tokens that was not taken."""
        calls = self._calls[index, first, count]
        place = next(place for place, call in enumerate(calls) if call.table[: len(blocks)] == blocks)
        return calls.pop(place)


def _error(cache: PlanCache, call: Attended) -> float:
    """Of a layer's attention against fp64 over what the cache reads, which gets the new tokens."""
    q, k, v, out = (torch.from_numpy(x).transpose(0, 1).unsqueeze(0) for x in call[-4:])
    keys, values = (x.double() for x in cache.update(k, v, call.index))
    seen = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - q.shape[2])
    expected = functional.scaled_dot_product_attention(
        q.double(), keys, values, attn_mask=seen, scale=call.scale, enable_gqa=True
    )
    by_group = q.double().unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    largest = call.scale * float((by_group.abs() @ keys.abs().transpose(-1, -2)).max())
    layer = cache.layers[call.index]
    assert isinstance(layer, PagedLayer)
    layer.observe(q)
    return float((out - expected).abs().max() / values.abs().max()) / (2.0**-24 * (1 + largest))


def parts_of(layer: Any) -> list[Any]:
    """Keys and values of a layer with pages; nothing of others."""
    return list(getattr(layer, "parts", ()))


def begin_sums(cache: PlanCache, tokens: int) -> None:
    """As a request that begins after so many cached tokens: it counts its own queries alone."""
    for part in itertools.chain.from_iterable(map(parts_of, cache.layers)):
        part.query_sum.zero_()
        part.query_since.fill_(tokens)


def decode_windows(cache: PlanCache, tokens: int) -> None:
    """As a request that begins after so many cached tokens: windows are what their pages have."""
    for part in itertools.chain.from_iterable(map(parts_of, cache.layers)):
        part.refill(slice(0, 1), part.format.tokens_read(tokens), tokens)


def assert_replayed(
    found: dict[str, Any],
    model: PreTrainedModel,
    plan: Plan,
    is_greedy: bool = True,
    alone: int = 1,
) -> Replay:
    """Every output token is the one that ``PlanCache`` gives: the most likely one where ``is_greedy``, or as
    likely as far as single codes decide, and, but for requests that were aborted, of the same
    log-probability. ``alone``: see ``Replay``."""
    replay = Replay(model, plan, alone)
    with attached_for(model, plan):
        results = replay.run(found)
    assert_answers(found, replay, results, is_greedy)
    return replay


def assert_attended(
    file: Path, steps: Sequence[list[Any]], model: PreTrainedModel, plan: Plan, least: int
) -> AttentionReplay:
    """Attention recorded in ``file`` is ``PlanCache``'s within eight roundings, of more than ``least`` requests of
    ``steps``. One bit more in the last layer tells."""
    calls = [call for call, _ in attended_in(file)]
    *layers, last = plan.layers
    finer = dataclasses.replace(last, v=dataclasses.replace(last.v, num_bits=4))
    replay, other = (
        AttentionReplay(model, each) for each in (plan, dataclasses.replace(plan, layers=(*layers, finer)))
    )
    for each in (replay, other):
        each.attend(steps, steps, calls)
    assert max(replay.errors) < 8 and len(replay.errors) > least, max(replay.errors)
    assert max(other.errors) > 1000
    return replay


def assert_near(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]], most: float) -> None:
    """Tokens and log-probabilities of a request in two runs: while tokens are the same, these differ by ``most``."""
    same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one[0], other[0], strict=True)))
    assert same
    assert max(abs(a - b) for (a, b), _ in zip(zip(one[1], other[1], strict=True), same, strict=False)) <= most


def assert_answers(
    found: dict[str, Any],
    replay: Replay,
    results: dict[str, list[torch.Tensor]],
    is_greedy: bool = True,
    limits: tuple[float, float] = (MOST, MEDIAN),
) -> None:
    """As :func:`assert_replayed`, of a replay's ``results``. ``limits``: how far log-probabilities may be
    apart, at most and in the middle of a request."""
    finished, (most, median) = 0, limits
    for name, (_, output) in found["requests"].items():
        answered, chances = found["outputs"].get(name, [output, [None] * len(output)])
        assert answered == output, name
        finished += name in found["outputs"]
        assert len(results[name]) >= len(output), name
        distances = []
        for position, (token, chance, row) in enumerate(zip(output, chances, results[name], strict=False)):
            behind = float(row.max() - row[token])
            assert not is_greedy or behind <= 2 * most, (name, position)
            if behind > 0:
                replay.ties[name, position] = behind
            distances.append(0.0 if chance is None else abs(float(row[token]) - chance))
        replay.distances += distances
        assert max(distances, default=0) <= most and statistics.median([0.0, *distances]) <= median, (name, distances)
    unscheduled = [ids for name, (ids, _) in found["outputs"].items() if name not in found["requests"]]
    assert finished and not any(unscheduled)  # aborted while they waited
