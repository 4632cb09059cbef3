"""Tokens without end through caches that are reset again and again: of ragged batches, and of pages that
shrink.

    python tests/support/soak_caches.py --count 1000000 --seed 0 [--device cuda] [--rows 384]

Each round has its own padding, prompts of up to eight lengths, chunks and steps. Free memory is poisoned
before it: all of a static cache, and what a dynamic one takes anew, holds NaN. After every chunk the logits
are finite, the cache's bytes are the predicted ones and, of the pages that shrink, within their budget; at
its end a row of the ragged batch is as it is alone. Prints tokens (of all rows, padding apart), rounds, what
was wrong, and how much the most memory after the first tenth is above the most in it: of the process, or of
the GPU.
"""

import argparse
import contextlib
import random
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers as hf
from cache_cases import KIVI_2, feed, padded, plan_of, random_ids, tiny_llama
from gpu_cases import random_llama
from progressive_cases import K_2, V_2, scheduled
from torch import Tensor

from kvcal import Plan, PlanCache, attached
from kvcal.errors import SlowPath
from kvcal.models.supported_layers import geometry_of

ROWS, CONTEXT = 4, 560
MOST_LENGTHS = 8  # of prompts in a batch, beyond which rows share them
KINDS = ("ragged", "progressive", "ragged, static")


@dataclass(frozen=True)
class Case:
    """``budget_bytes``: of a cache whose pages shrink. ``tolerance``: of logits, relative to the largest."""

    model: hf.PreTrainedModel
    plan: Plan
    budget_bytes: int | None
    tolerance: float


def case_of(kind: str, device: str, most_rows: int) -> Case:
    """A tiny model in fp32; on a GPU one in bf16, with heads that the kernels take."""
    model, dtype, tolerance = tiny_llama(), "float32", 1e-4
    if device == "cuda":
        model, dtype, tolerance = random_llama(num_layers=2), "bfloat16", 0.02
    geometry = geometry_of(model, cache_dtype=dtype)
    if kind.startswith("ragged"):
        return Case(model, plan_of(geometry, *KIVI_2), None, tolerance)
    return Case(model, *scheduled(K_2, V_2, most_rows, context=CONTEXT, geometry=geometry), tolerance)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty and its like give NaN, or the largest integer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it cannot make deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def poison(cache: PlanCache) -> None:
    """Of a static cache without tokens: everything."""
    for layer in cache.plan_layers.values():
        for tensor in layer.tensors:
            tensor.view(torch.uint8).fill_(255)


def soak(kind: str, num_tokens: int, seed: int, device: str = "cpu", most_rows: int = ROWS) -> Counter[str]:
    """Counts of "tokens", "rounds" and "wrong", and "grown" KiB."""
    rng, counts, grown_from = random.Random(f"{seed} {kind}"), Counter({"wrong": 0, "grown": 0}), 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    case = case_of(kind, device, most_rows)
    model, plan, budget, is_static = case.model, case.plan, case.budget_bytes, kind.endswith("static")
    cache = PlanCache(plan, model.config, max_tokens=CONTEXT if is_static else None)
    alone = PlanCache(plan, model.config)
    with warnings.catch_warnings():  # a slow path is as right as a fast one
        warnings.simplefilter("ignore", SlowPath)
        if is_static:
            cache.allocate(most_rows, device)
    held = cache.nbytes
    with attached(model) if is_static else contextlib.nullcontext(), poisoned():
        while counts["tokens"] < num_tokens:
            rows, seed_of_round = most_rows if is_static else rng.randint(1, most_rows), rng.getrandbits(31)
            some = [rng.randint(1, CONTEXT // 2) for _ in range(min(rows, MOST_LENGTHS))]
            numbers = [*range(len(some)), *rng.choices(range(len(some)), k=rows - len(some))]
            lengths = [some[number] for number in sorted(numbers)]
            prompts = [random_ids(1, length, seed_of_round + row)[0] for row, length in enumerate(lengths)]
            width = max(map(len, prompts))
            ids, mask = padded(prompts, width, "left")
            more = random_ids(rows, rng.randint(1, CONTEXT - width), seed_of_round)
            ids, mask = torch.cat([ids, more], 1).to(device), torch.cat([mask, torch.ones_like(more)], 1)
            cuts = list(chunk_ends(rng, width, ids.shape[1]))
            cache.reset(mask[:, :width])
            if is_static:
                poison(cache)
            parts, start = [], 0
            for stop in cuts:
                held_tokens = mask[:, :stop].sum(1).tolist()
                parts.append(feed(model, cache, ids[:, start:stop], mask=mask[:, :stop].to(device)))
                start = stop
                is_right = cache.lengths == held_tokens
                is_right &= cache.nbytes == (held if is_static else plan.nbytes(held_tokens, stop))
                counts["wrong"] += not is_right
                counts["wrong"] += budget is not None and cache.nbytes > budget
            logits = torch.cat(parts, 1)
            counts["wrong"] += not bool(logits[mask.bool().to(device)].isfinite().all())
            if kind.startswith("ragged"):
                row = rng.randrange(rows)
                first = width - len(prompts[row])
                alone.reset()
                expected = feed(model, alone, ids[row : row + 1, first:], [cut - first for cut in cuts])
                counts["wrong"] += differs(logits[row : row + 1, first:], expected, case.tolerance)
            counts["tokens"] += int(mask.sum())
            counts["rounds"] += 1
            if not grown_from and counts["tokens"] > num_tokens / 10:
                grown_from = most_memory(device)
    counts["grown"] = (most_memory(device) - grown_from) // 1024
    return counts


def differs(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether logits are other ones: a value at the border of two codes may differ in a token or two."""
    return bool((found - expected).abs().median() > tolerance * expected.abs().max())


def most_memory(device: str) -> int:
    """The most bytes so far that the process took, or on a GPU its tensors."""
    return (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


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
    parser.add_argument("--rows", type=int, default=ROWS, help="of the largest batch")
    options = parser.parse_args()
    wrong = 0
    print(f"{'cache':20}{'tokens':>10}{'rounds':>8}{'wrong':>7}{'grown MiB':>11}", flush=True)
    for kind in KINDS:
        counts = soak(kind, -(-options.count // len(KINDS)), options.seed, options.device, options.rows)
        wrong += counts["wrong"]
        row = f"{counts['tokens']:>10}{counts['rounds']:>8}{counts['wrong']:>7}{counts['grown'] / 1024:>11.1f}"
        print(f"{kind:20}{row}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
