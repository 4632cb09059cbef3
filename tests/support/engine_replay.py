"""What an engine did, computed again with ``PlanCache``: the same tokens in the same chunks, one request at a time.

An engine cuts prompts into chunks, begins behind blocks that others filled, and drops a request's blocks to compute
them again later. All of that changes which tokens are seen packed. So the steps are replayed as they were recorded.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcal import Plan, PlanCache

TOLERANCE = 2e-3  # of log-probabilities: products of other shapes differ in their last bits, and codes flip


class Replay:
    """``steps``, ``requests``: as vllm_host records them. ``cached``: tokens of every request that came from blocks of
    others; ``restarts``: how often a request was computed again."""

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self._ids: dict[str, list[int]] = {}
        self._caches: dict[str, PlanCache] = {}
        self.cached: dict[str, int] = {}
        self.restarts = 0

    @torch.no_grad()
    def run(self, found: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
        """Log-probabilities [vocabulary] of every output token of every request, in order."""
        results: dict[str, list[torch.Tensor]] = {name: [] for name in found["requests"]}
        self._ids = {name: prompt + output for name, (prompt, output) in found["requests"].items()}
        for step in found["steps"]:
            for name, first, count in step:
                cache = self._cache_at(name, first)
                ids = torch.tensor([self._ids[name][first : first + count]])
                if ids.shape[1] < count:  # the engine went on behind the end, without a result
                    continue
                logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
                answered = first + count - len(found["requests"][name][0])
                if answered == len(results[name]):
                    results[name].append(logits.log_softmax(-1))
        return results

    def _cache_at(self, name: str, tokens: int) -> PlanCache:
        """The cache of a request with so many tokens: its own, or that of one who computed the same tokens."""
        own = self._caches.get(name)
        if own is not None and own.get_seq_length() == tokens:
            return own
        self.restarts += own is not None
        if not tokens:
            found = PlanCache(self.plan, self.model.config)
        else:
            found = copy.deepcopy(self._donor(self._ids[name][:tokens]))
            found.crop(tokens - found.get_seq_length())
        self.cached[name] = self.cached.get(name, 0) + tokens
        self._caches[name] = found
        return found

    def _donor(self, ids: list[int]) -> PlanCache:
        for name, cache in self._caches.items():
            if cache.get_seq_length() >= len(ids) and self._ids[name][: len(ids)] == ids:
                return cache
        raise AssertionError(f"nobody computed these {len(ids)} tokens")


def assert_replayed(found: dict[str, Any], model: PreTrainedModel, plan: Plan, is_greedy: bool = True) -> Replay:
    """Every output token is the one that ``PlanCache`` gives: the most likely one where ``is_greedy``, and, but for
    requests that were aborted, of the same log-probability."""
    replay = Replay(model, plan)
    results = replay.run(found)
    finished = 0
    for name, (_, output) in found["requests"].items():
        answered, chances = found["outputs"].get(name, [output, [None] * len(output)])
        assert answered == output, name
        finished += name in found["outputs"]
        assert len(results[name]) >= len(output), name
        for position, (token, chance, row) in enumerate(zip(output, chances, results[name], strict=False)):
            assert not is_greedy or int(row.argmax()) == token, (name, position)
            assert chance is None or abs(float(row[token]) - chance) <= TOLERANCE, (name, position, chance)
    assert finished == len(found["outputs"])
    return replay
