"""Decode tokens a second of a whole model: a plan's static cache against transformers' StaticCache, as CUDA graphs.

    python experiments/bench_end_to_end.py --format 2 --format kitty --memory 80 --context 32768 --out end_to_end.json
    python experiments/bench_end_to_end.py --model path/to/model --plan plan.safetensors --context 8192 --out x.json

Needs a CUDA device. Without --model, the model has Llama-3.1-8B's shape and random weights. A cache is filled with
random tokens up to the context; a step's time does not depend on them. Batches are 1, 4, 16, ... and then the largest
that runs within --memory (GB of the device, weights included), found by bisection. Of 128 steps, one packs a page.
The 16-bit cache is read by the SDPA of transformers with its mask ("16, transformers"), and without a mask over the
whole buffer by the backend that torch chooses ("16, no mask"), which is what a good 16-bit server does.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_decode import FORMATS, machine, plan_of
from shared import random_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, StaticCache

from kvcal.artifact import write_text_atomic
from kvcal.bench import fill
from kvcal.cache.attached import attached
from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import SlowPath
from kvcal.models.attention import with_cache
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.plan import Plan, Workload, load_plan

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = SHAPE | {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128}  # fmt: skip
WITH_MASK, NO_MASK = "16, transformers", "16, no mask"
STEPS, ROOM = 128, 256


def unmasked(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **_: Any) -> tuple[Tensor, None]:
    """One query token to the whole buffer, the query heads of a group as rows."""
    rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
    return scaled_dot_product_attention(rows, k, v).flatten(1, 2).unsqueeze(1).contiguous(), None


@contextmanager
def cache_of(
    name: str, model: PreTrainedModel, plan: Plan | None, workload: Workload
) -> Iterator[tuple[Any, Callable]]:
    """The cache, and what fills it to the context once it is allocated; within it, the model attends to it."""
    room = workload.context + ROOM
    if plan is not None:
        cache = PlanCache(plan, model.config, max_tokens=room)
        with attached(model):
            yield cache, lambda: fill(cache, workload)
        return
    dense = StaticCache(config=model.config, max_cache_len=room)

    def filled() -> None:
        for layer in dense.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(workload.context)

    before = model.config._attn_implementation
    if name == NO_MASK:
        AttentionInterface.register("unmasked", unmasked)
        model.set_attn_implementation("unmasked")
    try:
        yield dense, filled
    finally:
        model.set_attn_implementation(before)


def step_ms(name: str, model: PreTrainedModel, plan: Plan | None, workload: Workload) -> float:
    """Mean milliseconds of a step. torch.OutOfMemoryError where the memory does not suffice."""
    ids = torch.zeros(workload.batch, 1, dtype=torch.int64, device=model.device)
    positions = torch.zeros_like(ids)
    with torch.inference_mode(), warnings.catch_warnings(), cache_of(name, model, plan, workload) as (cache, filled):
        warnings.simplefilter("ignore", SlowPath)

        def step() -> None:
            logits = model(
                input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **with_cache(model, cache)
            ).logits
            ids.copy_(logits[:, -1:].argmax(-1))
            positions.add_(1)

        step()  # allocates
        filled()
        positions.fill_(workload.context)
        return timed(step)


def timed(step: Callable[[], None]) -> float:
    """Milliseconds of one replay of the step's graph, in the mean of ``STEPS``."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    for _ in range(STEPS - 4):
        graph.replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / (STEPS - 4)


def rows_of(
    name: str, model: PreTrainedModel, plan: Plan | None, context: int, memory: int
) -> Iterator[dict[str, Any]]:
    """A row for every batch that was tried and fits."""

    def row(batch: int) -> dict[str, Any] | None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            ms = step_ms(name, model, plan, Workload(batch, context))
        except torch.OutOfMemoryError:
            return None
        peak = torch.cuda.max_memory_reserved()
        return {"cache": name, "context": context, "memory": memory, "batch": batch, "step_ms": ms,
                "tokens_per_s": 1000 * batch / ms, "peak_bytes": peak}  # fmt: skip

    torch.cuda.set_per_process_memory_fraction(min(1.0, memory / torch.cuda.get_device_properties(0).total_memory))
    fits, fails = 0, 1
    while (found := row(fails)) is not None:
        yield found
        fits, fails = fails, 4 * fails
        if fails > 4096:
            return
    while fails - fits > max(1, fits // 16):
        middle = (fits + fails) // 2
        found = row(middle)
        fits, fails = (fits, middle) if found is None else (middle, fails)
        if found is not None:
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=FORMATS, action="append")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--model", help="a folder or hub id; default: Llama-3.1-8B's shape with random weights")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--memory", type=float, action="append", help="GB; default: the whole device")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.model:
        loaded: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
        model = loaded.cuda().eval()
    else:
        model = random_model(LlamaConfig(**(TINY if given.tiny else SHAPE)), torch.device("cuda"))
    geometries, total = geometry_of(model).layers, torch.cuda.get_device_properties(0).total_memory
    rows = []
    print("| context | memory | cache | batch | tokens/s | step, ms |\n|---|---|---|---|---|---|")
    for context in given.context or (8192, 32768):
        workload = Workload(1, context + ROOM)
        plans: dict[str, Plan | None] = {WITH_MASK: None, NO_MASK: None}
        names = given.format or ([] if given.plan else ["2", "kitty", "4"])
        plans |= {name: plan_of(name, geometries, workload, model.config.model_type) for name in names}
        plans |= {given.plan.stem: load_plan(given.plan)} if given.plan else {}
        for memory in [int(1e9 * gigabytes) for gigabytes in given.memory or ()] or [total]:
            for name, plan in plans.items():
                for row in rows_of(name, model, plan, context, memory):
                    rows.append(row)
                    cells = f"{name} | {row['batch']} | {row['tokens_per_s']:.0f} | {row['step_ms']:.3f}"
                    print(f"| {context} | {memory / 1e9:.0f} GB | {cells} |", flush=True)
                    write_text_atomic(given.out, json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
