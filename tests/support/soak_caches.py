"""Tokens without end through two caches that are reset again and again: of ragged batches, and of pages that shrink.

    python tests/support/soak_caches.py --count 1000000 --seed 0 [--device cuda]

Each round has its own batch, padding, prompts, chunks and steps. After every chunk the logits are finite, the cache's
bytes are the predicted ones and, of the pages that shrink, within their budget; at its end a row of the ragged batch is
as it is alone. Prints tokens (of all rows, padding apart), rounds, what was wrong, and the growth of the process's
memory behind the first tenth.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator

import torch
from cache_cases import KIVI_2, feed, llama_plan, padded, random_ids, tiny_llama
from progressive_cases import K_2, V_2, scheduled

from kvcal import Plan, PlanCache

ROWS, CONTEXT = 4, 560
KINDS = ("ragged", "progressive")


def plan_and_budget(kind: str) -> tuple[Plan, int | None]:
    return (llama_plan(*KIVI_2), None) if kind == "ragged" else scheduled(K_2, V_2, ROWS, context=CONTEXT)


def soak(kind: str, num_tokens: int, seed: int, device: str = "cpu") -> Counter[str]:
    """Counts of "tokens", "rounds" and "wrong", and "grown" KiB."""
    rng, counts, grown_from = random.Random(f"{seed} {kind}"), Counter({"wrong": 0, "grown": 0}), 0
    plan, budget = plan_and_budget(kind)
    model = tiny_llama().to(device)
    cache, alone = PlanCache(plan, model.config), PlanCache(plan, model.config)
    while counts["tokens"] < num_tokens:
        rows, seed_of_round = rng.randint(1, ROWS), rng.getrandbits(31)
        prompts = [random_ids(1, rng.randint(1, CONTEXT // 2), seed_of_round + row)[0] for row in range(rows)]
        width = max(map(len, prompts))
        ids, mask = padded(prompts, width, "left")
        more = random_ids(rows, rng.randint(1, CONTEXT - width), seed_of_round)
        ids, mask = torch.cat([ids, more], 1).to(device), torch.cat([mask, torch.ones_like(more)], 1).to(device)
        cuts = list(chunk_ends(rng, width, ids.shape[1]))
        cache.reset(mask[:, :width].cpu())
        parts, start = [], 0
        for stop in cuts:
            parts.append(feed(model, cache, ids[:, start:stop], mask=mask[:, :stop]))
            start, lengths = stop, mask[:, :stop].sum(1).tolist()
            is_right = cache.lengths == lengths and cache.nbytes == plan.nbytes(lengths, stop)
            counts["wrong"] += not (is_right and bool(parts[-1].isfinite().all()))
            counts["wrong"] += budget is not None and cache.nbytes > budget
        if kind == "ragged":
            row = rng.randrange(rows)
            first = width - len(prompts[row])
            alone.reset()
            single, real = ids[row : row + 1, first:], torch.ones_like(ids[:1, first:])
            expected = feed(model, alone, single, [cut - first for cut in cuts], real)
            found = torch.cat(parts, 1)[row : row + 1, first:]
            scale = expected.abs().max()
            counts["wrong"] += bool((found - expected).abs().median() > 1e-4 * scale)
        counts["tokens"] += int(mask.sum())
        counts["rounds"] += 1
        if not grown_from and counts["tokens"] > num_tokens / 10:
            grown_from = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts["grown"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown_from
    return counts


def chunk_ends(rng: random.Random, width: int, length: int) -> Iterator[int]:
    """The prompt's, then those of single steps or of chunks of up to 64 tokens."""
    end, longest = width, rng.choice((1, 8, 64))
    yield end
    while end < length:
        end = min(length, end + rng.randint(1, longest))
        yield end


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="tokens in all, shared by the kinds of caches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    wrong = 0
    print(f"{'cache':12}{'tokens':>10}{'rounds':>8}{'wrong':>7}{'grown MiB':>11}")
    for kind in KINDS:
        counts = soak(kind, -(-options.count // len(KINDS)), options.seed, options.device)
        wrong += counts["wrong"]
        row = f"{counts['tokens']:>10}{counts['rounds']:>8}{counts['wrong']:>7}{counts['grown'] / 1024:>11.1f}"
        print(f"{kind:12}{row}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
