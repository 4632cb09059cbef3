"""Time of decode attention over packed pages, by format and size, against torch's fastest SDPA at 16 bits.

    python experiments/bench_decode.py --out decode.json
    python experiments/bench_decode.py --format 2 --format kitty --batch 8 --context 32768 --out decode.json

Needs a CUDA device. Every format is a plan of one layer, timed as by ``kvcal bench`` (kvcal/bench.py): CUDA graphs over
copies that the L2 cache does not hold. The JSON has a row for each format and size; a format that no kernel takes is a
row with the reason.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvcal.artifact import write_text_atomic
from kvcal.bench import time_layers
from kvcal.geometry import AttentionGeometry, CacheDtype, ModelIdentity
from kvcal.pages.lattice import gaussian_grid
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Boost, Format, Tier
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors

CACHE_DTYPE: CacheDtype = "bfloat16"


def uniform(bits: int, **knobs: Any) -> tuple[Format, Format]:
    """Keys per channel and values per token, groups of 128."""
    return Format(bits, "channel", **knobs), Format(bits, "token", **knobs)


KITTY = Format(2, "channel", 128, boost=Boost("magnitude", (Tier(4, 0.125),)))
FORMATS: dict[str, tuple[Format, Format]] = {
    **{str(bits): uniform(bits) for bits in (1, 2, 3, 4, 8)},
    "2-window": uniform(2, num_sink_tokens=32, recent_window=128),
    "kitty": (KITTY, uniform(2)[1]),
    "2-uneven": (uniform(2, num_sink_tokens=32)[0], uniform(2)[1]),
    **{f"{bits}-rotated": (Format(bits, quantizer="rotated"),) * 2 for bits in (2, 3, 4)},
    "16": (RAW, RAW),
}
DEFAULT = ("2", "2-window", "kitty", "3", "4", "8", "16")


def plan_of(
    name: str, geometries: tuple[AttentionGeometry, ...], workload: Workload, model_type: str = "llama"
) -> Plan:
    """All layers in one pair of formats; tensors of transforms are random."""
    k, v = FORMATS[name]
    layers, tensors = tuple(LayerPlan(geometry, (k,), (v,)) for geometry in geometries), {}
    generator = torch.Generator().manual_seed(0)
    for tensor, spec in needed_tensors(layers, CACHE_DTYPE).items():
        if tensor.startswith("lattice."):
            values = gaussian_grid(spec.extents[1], spec.extents[0])
        elif tensor.endswith("signs"):
            values = torch.randint(0, 2, spec.extents, generator=generator) * 2 - 1
        else:
            values = torch.rand(spec.extents, generator=generator) + 0.5
        tensors[tensor] = values.to(getattr(torch, spec.dtype))
    return Plan(
        ModelIdentity(name, model_type, "0" * 64, "0" * 64, "0" * 64), CACHE_DTYPE, layers, workload, {}, tensors
    )


def machine() -> dict[str, Any]:
    """What a figure is measured on."""
    device = torch.cuda.get_device_properties(0)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    return {"device": device.name, "memory": device.total_memory} | versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=FORMATS, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    geometry = AttentionGeometry(0, given.heads * given.group, given.heads, given.head_dim, given.head_dim)
    rows = []
    print("| size | format | bytes | µs | SDPA µs | factor |\n|---|---|---|---|---|---|")
    for batch in given.batch or (1, 8, 32):
        for context in given.context or (8192, 32768):
            for name in given.format or DEFAULT:
                workload = Workload(batch, context)
                (time,) = time_layers(plan_of(name, (geometry,), workload), workload, torch.device("cuda"))
                rows.append({"format": name, "batch": batch, "context": context, **asdict(time)})
                us, dense = (f"{one:.1f}" if one else "–" for one in (time.us, time.sdpa_us))
                factor = f"{time.sdpa_us / time.us:.2f}x" if time.us and time.sdpa_us else time.reason
                print(f"| {batch} x {context} | {name} | {time.nbytes} | {us} | {dense} | {factor} |", flush=True)
                write_text_atomic(given.out, json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
