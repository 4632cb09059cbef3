"""Requests by several threads, each through a packed cache of its own, compared with the same ones alone.

    python tests/support/threaded_requests.py --count 1000 --threads 8 --seed 0 [--device cuda]

prints how many requests were served at once, and how many of them differ from those alone.
"""

import argparse
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
from cache_cases import feed, random_ids, tiny_llama
from static_cases import plan_for
from torch import Tensor

from kvcal import Plan, PlanCache, attached

KINDS = {"kivi, static": ("kivi", 384), "queries, static": ("queries", 384), "queries": ("queries", None)}
TOLERANCE = 1e-4


def request(model: torch.nn.Module, plan: Plan, max_tokens: int | None, seed: int) -> Tensor:
    """Logits of a prompt of 1 to 300 tokens and of 1 to 40 steps after it."""
    rng = random.Random(seed)
    prompt, steps = rng.randint(1, 300), rng.randint(1, 40)
    cache = PlanCache(plan, model.config, max_tokens=max_tokens)
    ids = random_ids(1, prompt + steps, seed).to(model.device)
    logits = feed(model, cache, ids, range(prompt, prompt + steps), torch.ones_like(ids))
    assert cache.lengths == [prompt + steps]
    return logits


def compare(kind: str, count: int, threads: int, seed: int, device: str = "cpu") -> Counter[str]:
    """Counts of "served" and "differ"."""
    name, max_tokens = KINDS[kind]
    model, plan = tiny_llama(2, 2).to(device), plan_for(name, num_layers=2)
    seeds, interval = range(seed * count, (seed + 1) * count), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns as often as they can
    try:
        with attached(model), ThreadPoolExecutor(threads) as pool:
            together = list(pool.map(lambda one: request(model, plan, max_tokens, one), seeds))
            differ = 0
            for one, found in zip(seeds, together, strict=True):
                expected = request(model, plan, max_tokens, one)
                differ += not torch.allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    finally:
        sys.setswitchinterval(interval)
    return Counter(served=len(together), differ=differ)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="requests in all, shared by the kinds of caches")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    total = Counter[str]()
    print(f"{'cache':18}{'served':>8}{'differ':>8}")
    for kind in KINDS:
        counts = compare(kind, -(-options.count // len(KINDS)), options.threads, options.seed, options.device)
        total += counts
        print(f"{kind:18}{counts['served']:>8}{counts['differ']:>8}", flush=True)
    print(f"{'all':18}{total['served']:>8}{total['differ']:>8}")
    return int(total["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
