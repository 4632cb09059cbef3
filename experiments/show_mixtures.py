"""Which calibration data serve texts of a kind that calibration never held: mixtures, single kinds, all but one kind.

    python experiments/show_mixtures.py --out mixtures.json --real ../shared/data

For every calibration text, the KL of every layer's keys and values at 2, 3 and 4 bits alone is measured once. Each
mixture averages them over its own texts, and the solver allocates a fixed budget. The plans are measured on texts of
the pool "report" of every source, and on real text where --real names a folder of it (never committed). Errors are over
texts. The measured cells are kept beside --out: delete them with other --texts or --tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from shared import arguments, layers_with, mean_and_error, print_table
from torch import Tensor

from kvcal.data.sequences import DataSpec, TokenDataset
from kvcal.folder import sequences
from kvcal.models.load import LoadedModel, load
from kvcal.plan.page_format import RAW, SIDES, Format, Side
from kvcal.plan.plan import Plan, Workload
from kvcal.recipe import CacheSpec
from kvcal.stages.allocate.record import layer_bytes, num_values
from kvcal.stages.allocate.solver import Option, Unit, solve
from kvcal.stages.divergence import deviations, one_side_plan, unquantized_plan

SOURCES = ("samples", "python:docs", "python:code", "math", "dialogues", "tasks")
WORKLOAD = Workload(8, 4096)
Cell = tuple[int, Side, int]  # layer, side, bits


def kl_of(loaded: LoadedModel, plans: list[Plan], data: TokenDataset) -> Tensor:
    """Mean KL in nats per loss token, [texts, plans] fp64."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    texts = zip(data.sequences, data.loss_masks, strict=True)
    found = [deviations(loaded.model, reference, plans, ids[None], mask[None]).kl_Pn.mean(1) for ids, mask in texts]
    return torch.stack(found)


def cells(loaded: LoadedModel, cache: CacheSpec) -> dict[Cell, Format]:
    paged = [layer.geometry.index for layer in layers_with(loaded, RAW, RAW) if layer.is_paged]
    axes: dict[Side, str] = {"k": "channel", "v": "token"}
    keys = [(index, side, bits) for index in paged for side in SIDES for bits in (2, 3, 4)]
    return {(i, side, bits): cache.format(side, bits, axes[side], 128) for i, side, bits in keys}


def allocated(loaded: LoadedModel, formats: Mapping[Cell, Format], loss: Tensor, bits: float) -> Plan:
    """The plan of least summed loss, one for each cell, within so many bits a value."""
    base = unquantized_plan(loaded.identity, loaded.geometry)
    places = dict.fromkeys((index, side) for index, side, _ in formats)
    units, choices, total = [], [], 0

    def nbytes(plan: Plan) -> int:
        return layer_bytes(plan.layers, plan.cache_dtype, WORKLOAD)[1]

    total = nbytes(base)
    for index, side in places:
        raw = total // len(places)  # every layer alike
        options, plans = [Option(16, raw, 0.0)], [RAW]
        for number, (key, fmt) in enumerate(formats.items()):
            if key[:2] == (index, side):
                saved = total - nbytes(one_side_plan(base, index, side, fmt))
                options.append(Option(key[2], raw - saved, float(loss[number])))
                plans.append(fmt)
        units.append(Unit(f"{index} {side}", tuple(options)))
        choices.append((index, side, plans))
    capacity = int(bits * num_values(base.layers, WORKLOAD) / 8)
    for (index, side, plans), chosen in zip(choices, solve(units, capacity).choice, strict=True):
        base = one_side_plan(base, index, side, plans[chosen])
    return base


def mixtures(num_texts: int) -> dict[str, list[tuple[str, int]]]:
    """(source, number of its text) of every calibration: single sources; one text of all of them, of all but one."""
    found = {source: [(source, i) for i in range(num_texts)] for source in SOURCES}
    found["mixture"] = [(source, 0) for source in SOURCES]
    found["mixture, all texts"] = [(source, i) for source in SOURCES for i in range(num_texts)]
    for one in SOURCES:
        found[f"mixture - {one}"] = [(source, 0) for source in SOURCES if source != one]
    return found


def held_out(
    given: argparse.Namespace, loaded: LoadedModel, folder: Path, kinds: Collection[str] = ()
) -> dict[str, TokenDataset]:
    """Texts that no calibration holds, of these kinds, or of all."""
    names = {source: DataSpec(source) for source in SOURCES}
    if given.real is not None:
        pairs = [json.loads(line) for line in (given.real / "gsm8k/train.jsonl").read_text().splitlines()]
        joined = [{"text": f"{pair['question']}\n{pair['answer']}\n"} for pair in pairs]
        (folder / "gsm8k.jsonl").write_text("".join(json.dumps(record) + "\n" for record in joined))
        paths = {"books": given.real / "gutenberg", "wikitext2": given.real / "wikitext2/wiki.test.raw"}
        paths |= {"gsm8k": folder / "gsm8k.jsonl", "latex": given.real / "latex"}
        names |= {name: DataSpec(str(path)) for name, path in paths.items()}
    size = {"num_samples": given.held_out, "seq_len": given.held_out_tokens, "min_len": given.held_out_tokens}
    size["seed"] = given.seed
    chosen = {name: spec for name, spec in names.items() if not kinds or name in kinds}
    return {name: sequences(replace(spec, **size), loaded, "report") for name, spec in chosen.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--real", type=Path, help="folder with gutenberg, wikitext2, gsm8k and latex")
    parser.add_argument("--texts", type=int, default=2, help="calibration texts of a source")
    parser.add_argument("--tokens", type=int, default=400, help="of each")
    parser.add_argument("--held-out", type=int, default=8, help="texts of a kind that plans are measured on")
    parser.add_argument("--held-out-tokens", type=int, default=400, help="of each")
    parser.add_argument("--seed", type=int, default=0, help="of the texts that plans are measured on")
    parser.add_argument("--bits", type=float, nargs="+", default=[3.5])
    given = parser.parse_args()
    loaded = load(given.model, device=given.device)
    formats = cells(loaded, CacheSpec())
    alone = unquantized_plan(loaded.identity, loaded.geometry)
    plans = [one_side_plan(alone, index, side, fmt) for (index, side, _), fmt in formats.items()]
    kl: dict[tuple[str, int], Tensor] = {}
    kept = given.out.with_suffix(".cells.json")  # the costly part: measured once
    known = json.loads(kept.read_text()) if kept.exists() else {}
    for source in SOURCES:
        if source not in known:
            spec = DataSpec(source, given.texts, given.tokens, min_len=given.tokens)
            known[source] = kl_of(loaded, plans, sequences(spec, loaded, "fit")).tolist()
            kept.write_text(json.dumps(known))
            print(f"measured {source}", flush=True)
        kl |= {(source, i): torch.tensor(row, dtype=torch.float64) for i, row in enumerate(known[source])}
    chosen = {
        (name, bits): allocated(loaded, formats, torch.stack([kl[text] for text in texts]).mean(0), bits)
        for name, texts in mixtures(given.texts).items()
        for bits in given.bits
    }
    unique = {plan.sha256: plan for plan in chosen.values()}
    measured: dict[str, dict[str, list[float]]] = {sha: {} for sha in unique}
    with tempfile.TemporaryDirectory() as folder:
        texts = held_out(given, loaded, Path(folder))
    for name, data in texts.items():
        for sha, row in zip(unique, kl_of(loaded, list(unique.values()), data).T, strict=True):
            measured[sha][name] = row.tolist()
        print(f"held out: {name}", flush=True)
        rows = [
            {"calibration": who, "bits": bits, "plan": plan.sha256[:12], "kl": measured[plan.sha256]}
            for (who, bits), plan in chosen.items()
        ]
        given.out.write_text(json.dumps(rows, indent=1))
    for bits in given.bits:
        table = []
        for (who, budget), plan in chosen.items():
            if budget == bits:
                pairs = [mean_and_error(values) for values in measured[plan.sha256].values()]
                shown = [f"{mean:.4f} ± {error:.4f}" for mean, error in pairs]
                table.append([who, plan.sha256[:6], *shown, f"{max(mean for mean, _ in pairs):.4f}"])
        print_table(f"KL at {bits} bits", ["calibrated on", "plan", *texts, "worst"], table)


if __name__ == "__main__":
    main()
