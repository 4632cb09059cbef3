"""KVmix on real task text: do its scores find the layers that matter, what are its windows worth, and its 3-bit words?

    python experiments/show_kvmix.py --model reasoner-10m --device auto --out kvmix.json [--quick]

KL to 16 bits is read through the packed cache, decode-faithfully; errors are standard errors over texts.

1. Scores: rank correlation between two disjoint sets of 20 prompts, and with the KL of each layer's K or V alone at
   low bits; how many important layers they have in common.
2. Assignment: the important layers of either set against random ones of the same number (K and V drawn apart; paged
   windows, so that all take the same bytes), the lowest scores, the largest single KL, all low and all high.
3. Windows: paged, clamped and none, under the same bits.
4. Words: the paper's 10 x 3 + 1 x 2 bits against planes on the model's own keys and values: bytes and error.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import kvmix_3bit  # the paper's words, which no plan has
import torch
from scipy.stats import spearmanr
from shared import arguments, picked, print_table

from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.models.load import LoadedModel, load
from kvcal.models.taps import Captured, tap
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.uniform import UniformLayout
from kvcal.plan.plan import SIDES, Format, LayerPlan, Plan, Side, Workload, bare_layers
from kvcal.progress import Silent
from kvcal.recipe import CacheSpec, ImportanceSpec, ProfileSpec
from kvcal.stages.allocate.record import (
    Scores,
    important_layers,
    kvmix_formats,
    kvmix_scores,
)
from kvcal.stages.evaluate.text import measure_text
from kvcal.stages.profile.record import Profile
from kvcal.stages.profile.stage import run_profile

Rows = list[dict[str, Any]]
PARAM_DTYPE, BATCH = "float16", 8
# Half a page beyond 4,096: at a border, the last page decides which window takes most.
WORKLOAD = Workload(batch=8, context=4160)
PAPER = ImportanceSpec()
WINDOWS = {
    "paged": PAPER,
    "clamped, 32 to 128": dataclasses.replace(PAPER, window="clamped", min_window=32, max_window=128),
    "none": dataclasses.replace(PAPER, window="none"),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured; lengths in tokens."""

    prompts: int
    length: int
    texts: int
    randoms: int
    kl_samples: int


FULL, QUICK = Sizes(20, 1024, 24, 20, 6), Sizes(3, 384, 2, 2, 3)


def telling(data: TokenDataset, count: int) -> TokenDataset:
    """The sequences with most loss tokens that read pages: after two of them, about."""
    order = sorted(range(len(data.sequences)), key=lambda number: -int(data.loss_masks[number][256:].sum()))
    return picked(data, sorted(order[:count]))


def profiled(loaded: LoadedModel, data: TokenDataset, kl_samples: int) -> Profile:
    """Scores, and the KL to 16 bits of each layer's K or V alone at 2 bits."""
    spec = ProfileSpec(
        (2,),
        ("channel",),
        (32,),
        kl_num_bits=(2,),
        kl_group_size=32,
        kl_samples=kl_samples,
        kl_tokens=max(map(len, data.sequences)),
    )
    with tempfile.TemporaryDirectory() as folder:
        return run_profile(loaded, data, spec, CacheSpec(0, 0, 0), {}, Path(folder) / "profile.safetensors", Silent())


def plan_of(loaded: LoadedModel, formats: dict[int, tuple[Format, Format]]) -> Plan:
    layers = tuple(
        LayerPlan(layer.geometry, *((fmt,) for fmt in formats[layer.geometry.index])) if layer.is_paged else layer
        for layer in bare_layers(loaded.geometry)
    )
    return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, WORKLOAD, {})


class Judge:
    """Measures plans on one set of texts."""

    def __init__(self, loaded: LoadedModel, data: TokenDataset) -> None:
        self.loaded, self.data = loaded, data

    def row(self, name: str, scores: Scores, spec: ImportanceSpec) -> dict[str, Any]:
        plan = plan_of(self.loaded, kvmix_formats(scores, spec, 0, PARAM_DTYPE))
        found = measure_text(self.loaded, plan, self.data, BATCH, Silent())
        low, paged = PAPER.low_bits, [layer for layer in plan.layers if layer.is_paged]
        high = {side: [p.geometry.index for p in paged if p.formats(side)[0].num_bits > low] for side in SIDES}
        print(f"  {name}: KL {found.kl:.4f}", flush=True)
        return {
            "plan": name,
            "K high": high["k"],
            "V high": high["v"],
            "bits": plan.bits_per_value(),
            "KL": found.kl,
            "KL error": found.kl_se,
            "top-1": found.top1_agreement,
            "perplexity": found.perplexity,
        }


def show_scores(first: Scores, second: Scores, alone: Scores) -> Rows:
    rows = []
    for side in SIDES:
        indices = sorted(first[side])
        columns = [[measured[side][i] for i in indices] for measured in (first, second, alone)]
        chosen = [important_layers(measured[side], PAPER.share) for measured in (first, second, alone)]
        rows.append(
            {
                "side": side,
                "rank correlation of the sets": float(spearmanr(columns[0], columns[1]).statistic),
                "important in both": f"{len(chosen[0] & chosen[1])} of {len(chosen[0])}",
                "rank correlation with single KL": float(spearmanr(columns[0], columns[2]).statistic),
                "important by both": f"{len(chosen[0] & chosen[2])} of {len(chosen[0])}",
                "scores": columns[0],
                "single KL": columns[2],
            }
        )
    return rows


def random_scores(scores: Scores, seed: int) -> Scores:
    """For layers drawn at random, K and V apart."""
    drawn = random.Random(seed)
    return {side: {index: drawn.random() for index in scores[side]} for side in SIDES}


def show_assignments(judge: Judge, scores: Scores, second: Scores, alone: Scores, randoms: int) -> Rows:
    lowest = {side: {index: -score for index, score in scores[side].items()} for side in SIDES}
    rows = [
        judge.row("important", scores, PAPER),
        judge.row("important, second set", second, PAPER),
        judge.row("lowest scores", lowest, PAPER),
        judge.row("largest single KL", alone, PAPER),
        judge.row("all low", scores, dataclasses.replace(PAPER, share=0.0)),
        judge.row("all high", scores, dataclasses.replace(PAPER, share=1.0)),
    ]
    drawn = [judge.row(f"random {n}", random_scores(scores, n), PAPER) for n in range(randoms)]
    kls = [row["KL"] for row in drawn]
    summary = {
        "plan": f"mean of {randoms} random",
        "bits": statistics.fmean(row["bits"] for row in drawn),
        "KL": statistics.fmean(kls),
        "KL error": statistics.stdev(kls),
        "perplexity": statistics.fmean(row["perplexity"] for row in drawn),
    }
    better = sum(kl < rows[0]["KL"] for kl in kls)
    print(
        f"\n{better} of {randoms} random assignments are better than the important layers. "
        f"The error of the random mean is the spread (standard deviation) of the assignments: "
        f"{min(kls):.4f} to {max(kls):.4f}.\n"
    )
    return [*rows, summary, *drawn]


def captured(loaded: LoadedModel, tokens_T: torch.Tensor) -> dict[Side, list[torch.Tensor]]:
    """Whole pages of the full-attention layers, [N, P, 128, D] in the cache's dtype: K after RoPE, and V."""
    seen: dict[Side, list[torch.Tensor]] = {"k": [], "v": []}
    paged = {layer.geometry.index for layer in bare_layers(loaded.geometry) if layer.is_paged}
    dtype = getattr(torch, loaded.geometry.cache_dtype)

    def take(found: Captured) -> None:
        for side, x_BNTD in (("k", found.k_post_BNTD), ("v", found.v_BNTD)):
            if found.layer in paged:
                whole = x_BNTD.shape[2] // PAGE_TOKENS * PAGE_TOKENS
                pages = x_BNTD[0, :, :whole].unflatten(1, (-1, PAGE_TOKENS))
                seen[side].append(pages.to(dtype).float())

    with torch.no_grad(), tap(loaded.model, take, loaded.geometry):
        loaded.model(input_ids=tokens_T.unsqueeze(0).to(loaded.model.device), use_cache=False)
    return seen


def layout_cost(layout: str, num_bits: int, group: int, side: Side, pages: list[torch.Tensor], dtype: str) -> list[Any]:
    """[all-in bits a value, squared error over squared values] of K per channel, V per token."""
    nbytes = values = error = square = 0.0
    for x in pages:
        if layout == "planes":
            axis = "channel" if side == "k" else "token"
            record = UniformLayout(side, num_bits, axis, group, x.shape[-1], PARAM_DTYPE, dtype)
            records = record.encode(x)
            size, back = records.numel(), record.decode(records).float()
        else:
            along = x.transpose(-1, -2) if side == "k" else x
            packed = kvmix_3bit.encode(along, group, torch.float16)
            size, back = packed.nbytes, kvmix_3bit.decode(packed, along.shape[-1], group)
            back = back.transpose(-1, -2) if side == "k" else back
        nbytes, values = nbytes + size, values + x.numel()
        error += float((back - x).double().square().sum())
        square += float(x.double().square().sum())
    return [8 * nbytes / values, error / square]


def show_words(loaded: LoadedModel, tokens_T: torch.Tensor) -> Rows:
    seen, rows = captured(loaded, tokens_T), []
    cases = [*itertools.product(("words",), (3,), (11, 32, 64)), *itertools.product(("planes",), (3, 4), (32, 64))]
    for layout, num_bits, group in cases:
        row: dict[str, Any] = {"layout": layout, "code bits": num_bits, "group": group}
        for side in SIDES:
            cost = layout_cost(layout, num_bits, group, side, seen[side], loaded.geometry.cache_dtype)
            row[f"{side.upper()} bits"], row[f"{side.upper()} error"] = cost
        rows.append(row)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: its figures mean nothing")
    given = parser.parse_args()
    sizes = QUICK if given.quick else FULL
    loaded = load(given.model, device=given.device)
    assert loaded.tokenizer is not None
    calibration = load_sequences(DataSpec(num_samples=2 * sizes.prompts, seq_len=sizes.length), loaded.tokenizer)
    halves = [picked(calibration, range(start, 2 * sizes.prompts, 2)) for start in (0, 1)]
    profile = profiled(loaded, halves[0], sizes.kl_samples)
    first, second = kvmix_scores(profile), kvmix_scores(profiled(loaded, halves[1], 0))
    alone: Scores = {side: {index: float(profile.kl(index, side)) for index in first[side]} for side in SIDES}
    spec = DataSpec(num_samples=4 * sizes.texts, seq_len=sizes.length, seed=1)
    texts = load_sequences(spec, loaded.tokenizer, purpose="report")
    judge = Judge(loaded, telling(texts, sizes.texts))
    results = {
        "scores": show_scores(first, second, alone),
        "assignment": show_assignments(judge, first, second, alone, sizes.randoms),
        "windows": [judge.row(name, first, spec) for name, spec in WINDOWS.items()],
        "words": show_words(loaded, max(judge.data.sequences, key=len)),
    }
    for title, rows in results.items():
        columns = [column for column in rows[0] if column not in ("scores", "single KL")]
        print_table(title, columns, [[row.get(column, "") for column in columns] for row in rows])
    report = {"model": loaded.identity.id, "device": str(loaded.model.device), "sizes": dataclasses.asdict(sizes)}
    given.out.write_text(json.dumps({**report, **results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
