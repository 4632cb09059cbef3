"""Eager steps of a dynamic cache, as ``generate`` takes them: by the kernels within ``attached``, and without.

    python lab/bench_dynamic.py --out dynamic.json
    python lab/bench_dynamic.py --tiny --device cpu --shape 2x200

The shape is that of a model of 1.5B (28 layers, 12 query heads, 2 KV heads of 128) with random weights, rows are
at one phase of a page. Next to 16 bits in a DynamicCache, and to a static cache without a graph. Of every shape
the median of the steps that complete no page, the longest one, and CUDA launches of one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from shared import default_plan, print_table, random_model
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from kvcal.artifact import write_text_atomic
from kvcal.cache.attached import attached
from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import SlowPath
from kvcal.models.attention import with_cache
from kvcal.models.supported_layers import geometry_of
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.plan import Plan

SHAPE = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = SHAPE | {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 128}
CACHES = ("16 bits", "dynamic", "dynamic, attached", "static, no graph")
WARM, CHUNK = 3, 4096


@torch.inference_mode()
def row(kind: str, plan: Plan, model: PreTrainedModel, batch: int, context: int, steps: int) -> dict[str, Any]:
    cache: Any = DynamicCache(config=model.config)
    if kind != CACHES[0]:
        room = context + 2 * PAGE_TOKENS if kind.startswith("static") else None
        cache = PlanCache(plan, model.config, max_tokens=room)
    ids, is_cuda = (
        torch.randint(model.config.vocab_size, (batch, context), device=model.device),
        model.device.type == "cuda",
    )

    def step(new: Tensor) -> Tensor:
        chosen = model(input_ids=new, logits_to_keep=1, **with_cache(model, cache)).logits[:, -1:].argmax(-1)
        int(chosen[0])  # waits for the device, as generate does
        return chosen

    with attached(model) if "static" in kind or "attached" in kind else nullcontext():
        for part in ids.split(CHUNK, 1):
            new, times = step(part), []
        for number in range(WARM + steps):
            start = time.perf_counter()
            new = step(new)
            times += [1000 * (time.perf_counter() - start)] if number >= WARM else []
        launches = 0
        if is_cuda:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                step(new)
            launches = sum(one.count for one in profile.key_averages() if one.device_type.name == "CUDA")
    return {"ms": statistics.median(times), "longest_ms": max(times), "launches": launches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=float, default=3.0)
    parser.add_argument("--shape", nargs="+", default=["1x1200", "8x1200", "8x32000"], help="sequences x tokens")
    parser.add_argument("--steps", type=int, default=PAGE_TOKENS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    model = random_model(LlamaConfig(**(TINY if given.tiny else SHAPE)), torch.device(given.device))
    plan, rows = default_plan(geometry_of(model), given.bits), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)
        for shape in given.shape:
            batch, context = map(int, shape.split("x"))
            for kind in CACHES:
                found = row(kind, plan, model, batch, context, given.steps)
                rows.append({"case": shape, "cache": kind} | found)
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if given.out:
        write_text_atomic(given.out, json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    print_table(f"eager steps, {given.bits:g} bits", list(rows[0]), [list(one.values()) for one in rows])


if __name__ == "__main__":
    main()
