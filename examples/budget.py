"""Compiles a plan for a byte budget: profile the model, allocate bits exactly, write the plan.

    python examples/budget.py
    python examples/budget.py --kv-budget 34MB --batch 8 --context 4096 --out plan.safetensors

The recipe is that of `kvcal plan`, with less text to read: `kvcal plan reasoner-10m --kv-budget 36MB` reads more.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import kvcal
from kvcal.errors import InfeasibleBudget
from kvcal.quantities import format_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile a plan for a byte budget.")
    parser.add_argument("--model", default="reasoner-10m", help="folder, hub id or embedded name")
    parser.add_argument("--kv-budget", default="36MB", help="bytes of the whole cache, such as 36MB or 1.5GiB")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="where to write the plan")
    arguments = parser.parse_args()

    recipe = kvcal.with_knobs(
        kvcal.load_recipe("default"),
        {
            "allocate.kv_budget": arguments.kv_budget,
            "allocate.batch": arguments.batch,
            "allocate.context": arguments.context,
            "basis.num_samples": 2,
            "basis.seq_len": 512,
            "profile.kl_samples": 1,
            "profile.kl_tokens": 512,
        },
    )
    model = kvcal.load_model(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            plan = kvcal.build_plan(model, kvcal.Folder(Path(folder)), recipe)
        except InfeasibleBudget as error:
            raise SystemExit(f"{error}\nhint: {error.hint}") from None

    for layer in plan.layers:
        k, v = layer.formats
        print(f"layer {layer.geometry.index}: K {k.num_bits} bits, V {v.num_bits} bits")
    print(f"cache: {format_bytes(plan.predicted_bytes)} of {arguments.kv_budget}")
    print(f"all-in bits per value: {plan.bits_per_value():.3f}")
    if arguments.out is not None:
        kvcal.save_plan(plan, arguments.out)


if __name__ == "__main__":
    main()
