"""The cost of a basis in a step of a layer and in a prompt, in the shape of Llama-3.1-8B.

    python lab/bench_basis.py
    python lab/bench_basis.py --shape 8x4096 --bits 3

Needs a CUDA device. Tables are microseconds: of the operators ``enter`` and ``leave`` alone, in one CUDA graph
over bases that no L2 cache holds; of ``enter`` of a side of a prompt; and of a layer's step with the default
recipe's plan at --bits, next to the same plan without bases, as ``step_times`` has them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import step_times
import torch
from shared import default_plan, print_table
from torch import Tensor

from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.kernels import ops
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors

HEADS, QUERY_HEADS, DIM, LAYERS = 8, 32, 128, 8
COPIES = 64  # of the bases of a layer: 2 MB each
BATCHES = ((1,), (8,), (38,), (8, 4), (512,))  # sequences, and tokens of a step with drafts
PROMPT = 32768


def operators(device: torch.device) -> list[tuple[object, ...]]:
    made = partial(torch.randn, device=device)
    bases = [[made(HEADS, DIM, DIM) for _ in range(4)] + [made(HEADS, DIM)] for _ in range(COPIES)]
    error, nothing = torch.zeros(1, dtype=torch.int32, device=device), torch.empty(0, device=device)
    rows: list[tuple[object, ...]] = []

    def us(call: Callable[[list[Tensor]], object], count: int = COPIES) -> float:
        found = step_times.replay_us(
            lambda: [call(basis) for basis in bases[:count]], [lambda: None] * step_times.REPLAYS
        )
        return statistics.median(found) / count

    for batch in BATCHES:
        k, v = (made(*batch, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
        q = made(*batch, QUERY_HEADS, DIM, dtype=torch.bfloat16)
        entering = us(partial(_enter, k, v, q, error))
        rows.append(("x".join(map(str, batch)), entering, us(partial(_leave, q.float()))))
    x = made(1, PROMPT, HEADS, DIM, dtype=torch.bfloat16)
    rows.append((f"a side of {PROMPT} tokens", us(partial(_enter, x, nothing, nothing, error), 4), ""))
    return rows


def _enter(k: Tensor, v: Tensor, q: Tensor, error: Tensor, basis: list[Tensor]) -> object:
    return ops.enter(k, v, q, [*basis[:2], basis[4]], basis[2:4] if v.numel() else [], error)


def _leave(attention: Tensor, basis: list[Tensor]) -> Tensor:
    return ops.leave(attention, basis[2:4], torch.bfloat16)


def without_bases(plan: Plan) -> Plan:
    layers = tuple(replace(layer, k_basis=False, v_basis=False, v_gain=False) for layer in plan.layers)
    needed = needed_tensors(layers, plan.cache_dtype)
    return replace(plan, layers=layers, tensors={name: plan.tensors[name] for name in needed})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["1x4096", "8x32768", "38x32768"], help="sequences x tokens")
    parser.add_argument("--bits", type=float, default=2.5)
    given, device = parser.parse_args(), torch.device("cuda")
    name = torch.cuda.get_device_name()
    print_table(f"the operators alone on {name}", ("sequences", "enter", "leave"), operators(device))
    attention = (AttentionGeometry(index, QUERY_HEADS, HEADS, DIM, DIM) for index in range(LAYERS))
    plan = default_plan(Geometry("llama", "bfloat16", tuple(attention)), given.bits)
    plans = {f"{given.bits:g} bits": plan, "the same without bases": without_bases(plan)}
    rows = []
    for shape, (kind, one) in itertools.product(given.shape, plans.items()):
        workload = Workload(*map(int, shape.split("x")))
        found = step_times.layers_times(step_times.filled_layers(one, one.layers, workload, device), workload)
        rows.append((shape, kind, found.us, found.mean_us, found.us_99, found.packing))
        gc.collect()  # layers of a cache know each other
        torch.cuda.empty_cache()
    print_table(f"a step of a layer on {name}", ("shape", "plan", "us", "mean_us", "us_99", "packing"), rows)


if __name__ == "__main__":
    main()
