"""PM-KVQ's progressive quantization on real task text: what it is worth, and which right shift.

    python experiments/show_progressive.py --model reasoner-10m --device auto --out progressive.json [--quick]

All figures are read through the packed cache, decode-faithfully: texts of one length are fed in chunks that end where a
page is written or pages shrink, so every token reads what it would read when generated one by one. The workload's
context is the length of the text: in a shorter text the budget is never used up, and nothing would shrink.

1. Schedule: the same final bits, at once or progressively, within the bytes that the final bits take at the last token.
   KL to 16 bits by quarter of the text; perplexity of the reasoning.
2. Shift: all pages written in the first half are at 16 bits and shrink together at the half; KL in the second half, and
   its difference to the equivalent shift's, text by text. With the real schedule, too, where each shift acts a little.

Errors are standard errors over texts. K and V are per token in groups of 128, 1 sink, as in the paper.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping

import torch
from shared import Pair, arguments, layers_with, print_table, ratio_and_error, texts_of_length

from kvcal import PlanCache
from kvcal.data.sequences import DataSpec
from kvcal.models.load import LoadedModel, load
from kvcal.pages.shrink import SHIFTS
from kvcal.plan.plan import Format, Plan, Workload
from kvcal.stages.allocate.schedule import NARROWER_BITS, progressive_layers
from kvcal.stages.divergence import kl_divergence, lockstep, unquantized_plan

QUARTERS = 4
FINAL_BITS = (2, 4)


@dataclasses.dataclass(frozen=True)
class Texts:
    """``tokens`` int64 [B, T]; ``is_reasoning`` bool [B, T]: tokens of the completion."""

    tokens: torch.Tensor
    is_reasoning: torch.Tensor


def load_texts(loaded: LoadedModel, num_texts: int, length: int, seed: int) -> Texts:
    """Task documents that have ``length`` tokens or more, cut there."""
    spec = DataSpec(num_samples=8 * num_texts, seq_len=length, seed=seed)
    data = texts_of_length(loaded, spec, num_texts, "report")
    return Texts(torch.stack(data.sequences), torch.stack(data.loss_masks))


def make_plans(loaded: LoadedModel, num_bits: int, workload: Workload, window: int) -> dict[str, Plan]:
    """Plans that end at the same bits and take the same bytes at the last token."""
    fmt = Format(num_bits, "token", 128, num_sink_tokens=1, recent_window=window, param_dtype="float32")
    dtype = loaded.geometry.cache_dtype
    halvings = sum(bits >= num_bits for bits in NARROWER_BITS)
    final = layers_with(loaded, fmt, fmt)
    budget = sum(layer.nbytes(dtype, workload.lengths, workload.context) for layer in final)
    layers = {"at once": final}
    for kind in SHIFTS:
        layers[f"progressive, {kind}"] = progressive_layers(final, workload, dtype, budget, shift=kind)
        at_half = (workload.context // 2,) * halvings
        late = dataclasses.replace(fmt, shrink_at=at_half, shift=kind)
        layers[f"half-way, {kind}"] = layers_with(loaded, late, late)
    return {name: Plan(loaded.identity, dtype, made, workload, {}) for name, made in layers.items()}


def measure(loaded: LoadedModel, plans: Mapping[str, Plan], texts: Texts) -> dict[str, torch.Tensor]:
    """Plan -> [2, B, T - 1] fp64: KL to 16 bits and negative log-likelihood of each next token; "16-bit" included."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    everything = {"16-bit": dataclasses.replace(reference, workload=next(iter(plans.values())).workload), **plans}
    caches = [PlanCache(plan, loaded.model.config) for plan in everything.values()]
    targets = texts.tokens[:, 1:].to(loaded.model.device)
    found: list[list[torch.Tensor]] = [[] for _ in caches]
    expected = torch.empty(0)
    for number, start, logits_BTV in lockstep(loaded.model, caches, texts.tokens):
        stop = min(start + logits_BTV.shape[1], targets.shape[1])
        logits = logits_BTV[:, : stop - start].float().flatten(0, 1)
        expected = logits if number == 0 else expected
        nll = torch.nn.functional.cross_entropy(logits, targets[:, start:stop].flatten(), reduction="none")
        both = torch.stack([kl_divergence(expected, logits), nll.double()])
        found[number].append(both.unflatten(1, (len(targets), -1)).cpu())
        if number == 0:
            print(f"\r{stop} of {targets.shape[1]} tokens", end="", file=sys.stderr)
    print(file=sys.stderr)
    return {name: torch.cat(parts, dim=2) for name, parts in zip(everything, found, strict=True)}


def over_tokens(values_BT: torch.Tensor, wanted_BT: torch.Tensor) -> Pair:
    """Mean over the wanted tokens, and its standard error over texts."""
    return ratio_and_error((values_BT * wanted_BT).sum(1), wanted_BT.sum(1))


def summarize(plan: Plan | None, values: torch.Tensor, texts: Texts) -> dict[str, object]:
    """One plan's row: KL by quarter, in the second half and of the reasoning; perplexity of the reasoning."""
    (kl, nll), reasoning = values, texts.is_reasoning[:, 1:]
    position = torch.arange(1, kl.shape[1] + 1).expand_as(kl)
    length = kl.shape[1] + 1
    quarters = [over_tokens(kl, position * QUARTERS // length == quarter) for quarter in range(QUARTERS)]
    row: dict[str, object] = {
        "kl_by_quarter": quarters,
        "kl_second_half": over_tokens(kl, position * 2 >= length),
        "kl": over_tokens(kl, torch.ones_like(reasoning)),
        "kl_reasoning": over_tokens(kl, reasoning),
        "perplexity_reasoning": torch.tensor(over_tokens(nll, reasoning)[0]).exp().item(),
    }
    if plan is not None:
        counts = [length * (quarter + 1) // QUARTERS for quarter in range(QUARTERS)]
        row["bytes_by_quarter"] = [plan.nbytes((count,)) for count in counts]
        formats = [fmt for layer in plan.layers if layer.is_paged for fmt in (*layer.k, *layer.v)]
        row["bits_by_quarter"] = [sum(fmt.bits_at(count - 1) for fmt in formats) / len(formats) for count in counts]
    return row


def cell(pair: object) -> str:
    assert isinstance(pair, tuple)
    return f"{pair[0]:.4f} ± {pair[1]:.4f}"


def print_tables(num_bits: int, rows: Mapping[str, dict[str, object]]) -> None:
    progressive, half_way = [], []
    for name, row in rows.items():
        quarters, bits = row["kl_by_quarter"], row.get("bits_by_quarter", ["–"])
        assert isinstance(quarters, list) and isinstance(bits, list)
        if name.startswith("half-way"):
            late = (cell(row["kl_second_half"]), cell(row["kl_over_equivalent"]))
            half_way.append((name.removeprefix("half-way, "), *late))
        else:
            shown = ", ".join(f"{b:.1f}" if isinstance(b, float) else b for b in bits)
            reasoning = (cell(row["kl_reasoning"]), f"{row['perplexity_reasoning']:.4f}")
            progressive.append((name, *map(cell, quarters), *reasoning, shown))
    head = ("plan", "KL, 1st quarter", "2nd", "3rd", "4th", "KL of the reasoning", "perplexity", "page bits by quarter")
    print_table(f"Final bits {num_bits}: at once against progressively", head, progressive)
    head = ("shift", "KL in the second half", "more than equivalent")
    print_table(f"Final bits {num_bits}: all pages shrink at half of the text", head, half_way)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1536, help="length of every text, and the workload's context")
    parser.add_argument("--window", type=int, default=128, help="recent tokens at 16 bits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2 texts of 700 tokens, 2 bits alone")
    given = parser.parse_args()
    num_texts, length = (2, 700) if given.quick else (given.texts, given.tokens)
    loaded = load(given.model, device=given.device)
    texts = load_texts(loaded, num_texts, length, given.seed)
    results: dict[str, object] = {"model": given.model, "texts": num_texts, "tokens": length, "window": given.window}
    for num_bits in FINAL_BITS[:1] if given.quick else FINAL_BITS:
        plans = make_plans(loaded, num_bits, Workload(num_texts, length), given.window)
        values = measure(loaded, plans, texts)
        rows = {name: summarize(plans.get(name), found, texts) for name, found in values.items()}
        for kind in SHIFTS:
            kl, expected = values[f"half-way, {kind}"][0], values["half-way, equivalent"][0]
            late = torch.arange(1, length).expand_as(kl) * 2 >= length
            rows[f"half-way, {kind}"]["kl_over_equivalent"] = over_tokens(kl - expected, late)
        print_tables(num_bits, rows)
        results[f"{num_bits} bits"] = rows
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
