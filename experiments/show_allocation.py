"""PM-KVQ's allocation on real task text: 2 or 4 bits a block by integer program, against 3 bits everywhere.

    python experiments/show_allocation.py --model reasoner-10m --device auto --out allocation.json [--quick]

A page of 2 bits and one of 4 take together what two pages of 3 bits take, scales and zeros included: half of the blocks
at 4 bits and half at 2 are exactly as large as 3 bits everywhere. Both are counted, and a difference is an error. A
block is a layer's K and V, as in the paper. The program's losses come from calibration texts: gradient times error
("sensitivity"), or that and the KL of one layer's K or V alone ("combined"). Random assignments of the same bytes say
what the choice is worth, and the lowest KL among them how much an assignment can give.

Formats are PM-KVQ's: groups of 128 along the token, 1 sink, 128 recent tokens, all pages settled at their final bits,
no λ; then the same with keys per channel. KL to 16 bits of the reasoning is read through the packed cache,
decode-faithfully, on texts that calibration does not see; differences are paired text by text, errors are standard
errors over texts.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from shared import arguments, print_table
from show_progressive import cell, load_texts, measure, over_tokens

from kvcal.data.sequences import DataSpec, load_sequences
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import SIDES, Plan, Workload, bare_layers
from kvcal.progress import Silent
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages.allocate.solver import Option, Unit, solve
from kvcal.stages.profile.record import Profile
from kvcal.stages.profile.sensitivity import Candidate
from kvcal.stages.profile.stage import run_profile

Axis = Literal["token", "channel"]
AXES: tuple[Axis, ...] = ("token", "channel")
CACHE, GROUP, BITS, UNIFORM = CacheSpec(1, 128, 128), 128, (2, 4), 3
OBJECTIVES: tuple[Literal["sensitivity", "combined"], ...] = ("sensitivity", "combined")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the calibration: samples, their tokens, and how many of them the KL is measured on; random assignments."""

    samples: int
    length: int
    kl_samples: int
    randoms: int


FULL, QUICK = Sizes(12, 1024, 6, 5), Sizes(2, 320, 1, 2)


def profiled(loaded: LoadedModel, axis: Axis, sizes: Sizes) -> Profile:
    """Sensitivities and KLs of every layer's K and V at each of ``BITS``."""
    assert loaded.tokenizer is not None
    data = load_sequences(DataSpec(num_samples=sizes.samples, seq_len=sizes.length, seed=0), loaded.tokenizer)
    spec = ProfileSpec(
        BITS,
        (axis,),
        (GROUP,),
        kl_num_bits=BITS,
        kl_group_size=GROUP,
        kl_samples=sizes.kl_samples,
        kl_tokens=sizes.length,
    )
    with tempfile.TemporaryDirectory() as folder:
        return run_profile(loaded, data, spec, CACHE, {}, Path(folder) / "profile.safetensors", Silent())


def plan_of(loaded: LoadedModel, axis: Axis, bits: Sequence[int], workload: Workload) -> Plan:
    """``bits`` of every paged layer, in order."""
    given, layers = iter(bits), []
    for layer in bare_layers(loaded.geometry):
        if layer.is_paged:
            num_bits = next(given)
            k, v = CACHE.format("k", num_bits, axis, GROUP), CACHE.format("v", num_bits, "token", GROUP)
            layer = dataclasses.replace(layer, k=(k,), v=(v,))
        layers.append(layer)
    return Plan(loaded.identity, loaded.geometry.cache_dtype, tuple(layers), workload, {})


def solved(
    loaded: LoadedModel, profile: Profile, axis: Axis, objective: Literal["sensitivity", "combined"], uniform: Plan
) -> tuple[int, ...]:
    """The bits of every paged layer, by the integer program, within the bytes of ``uniform``."""
    plans = {b: plan_of(loaded, axis, [b] * num_paged(uniform), uniform.workload) for b in BITS}
    sizes = {b: [size for size, layer in layer_sizes(plan) if layer] for b, plan in plans.items()}
    units = []
    for number, layer in enumerate(layer for layer in uniform.layers if layer.is_paged):
        index = layer.geometry.index
        losses = {
            b: sum(
                sum(profile.losses(objective, index, side)[Candidate(b, axis if side == "k" else "token", GROUP)])
                for side in SIDES
            )
            for b in BITS
        }
        options = tuple(Option(f"{b} bits", sizes[b][number], losses[b]) for b in BITS)
        units.append(Unit(f"layer {index}", options))
    found = solve(units, sum(size for size, is_paged in layer_sizes(uniform) if is_paged))
    assert found.proof != "none"
    return tuple(BITS[option] for option in found.choice)


def layer_sizes(plan: Plan) -> list[tuple[int, bool]]:
    """(bytes at the plan's workload, whether it has pages) of every layer."""
    lengths, context = plan.workload.lengths, plan.workload.context
    return [(layer.nbytes(plan.cache_dtype, lengths, context), layer.is_paged) for layer in plan.layers]


def num_paged(plan: Plan) -> int:
    return sum(layer.is_paged for layer in plan.layers)


def assignments(loaded: LoadedModel, axis: Axis, sizes: Sizes, workload: Workload) -> dict[str, tuple[int, ...]]:
    """Bits of every paged layer, by the name of who chose them."""
    count = sum(layer.is_paged for layer in bare_layers(loaded.geometry))
    uniform = (UNIFORM,) * count
    profile, plan = profiled(loaded, axis, sizes), plan_of(loaded, axis, uniform, workload)
    chosen = {f"uniform {UNIFORM} bits": uniform}
    for objective in OBJECTIVES:
        chosen[f"program, {objective}"] = solved(loaded, profile, axis, objective, plan)
    draw = random.Random(0)
    half = [max(BITS)] * (count // 2) + [min(BITS)] * (count - count // 2)
    for number in range(sizes.randoms):
        chosen[f"random {number + 1}"] = tuple(draw.sample(half, count))
    return chosen


def show(axis: Axis, chosen: Mapping[str, tuple[int, ...]], plans: Mapping[str, Plan], kl: Mapping[str, torch.Tensor],
         wanted: torch.Tensor) -> dict[str, object]:  # fmt: skip
    """Print the table of one axis, and return its rows."""
    first, *others = chosen
    budget, rows = plans[first].predicted_bytes, {}
    cells = []
    for name, bits in chosen.items():
        nbytes = plans[name].predicted_bytes
        assert nbytes <= budget and (nbytes == budget or len(bits) % 2), f"{name}: {nbytes} bytes, not {budget}"
        found, more = over_tokens(kl[name], wanted), over_tokens(kl[name] - kl[first], wanted)
        high = [number for number, b in enumerate(bits) if b == max(BITS)]
        cells.append((name, cell(found), cell(more) if name in others else "", nbytes, high or ""))
        rows[name] = {"kl": found, "more": more, "bytes": nbytes, "bits": bits}
    print_table(f"Keys per {axis}", ("blocks", "KL to 16 bits", f"more than {first}", "bytes", "at 4 bits"), cells)
    randoms = [kl[name] for name in others if name.startswith("random")]
    mean = torch.stack(randoms).mean(0)
    for objective in OBJECTIVES:
        print(f"\n{objective} less the mean of {len(randoms)} random ones: ", end="")
        rows[f"{objective} less random"] = less = over_tokens(kl[f"program, {objective}"] - mean, wanted)
        print(cell(less), flush=True)
    return {**rows, "random, mean": over_tokens(mean, wanted)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1024, help="length of every text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2 texts of 400 tokens, a small profile, keys per token")
    given = parser.parse_args()
    num_texts, length = (2, 400) if given.quick else (given.texts, given.tokens)
    loaded, sizes = load(given.model, device=given.device), QUICK if given.quick else FULL
    texts = load_texts(loaded, num_texts, length, given.seed)
    workload, wanted = Workload(num_texts, length), texts.is_reasoning[:, 1:]
    results: dict[str, object] = {"model": given.model, "texts": num_texts, "tokens": length}
    for axis in AXES[:1] if given.quick else AXES:
        chosen = assignments(loaded, axis, sizes, workload)
        plans = {name: plan_of(loaded, axis, bits, workload) for name, bits in chosen.items()}
        kl = {name: values[0] for name, values in measure(loaded, plans, texts).items()}
        results[axis] = show(axis, chosen, plans, kl, wanted)
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
