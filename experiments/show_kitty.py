"""What boosted key channels cost and bring: Kitty's page, its share of channels, and its score against others.

    python experiments/show_kitty.py --model reasoner-10m --device auto --out kitty.json [--problems 24] [--quick]

KL to 16 bits in nats per loss token, decode-faithfully through the packed cache, with the recipe's sinks and windows.
Errors are standard errors over sequences; differences are paired, sequence by sequence. Two sweeps of the share of
channels at 4 bits: keys alone (values at 16 bits), and the recipe, whose values of 2 bits are a floor. Scores are
compared at equal pages, keys alone. ``--problems`` adds exact match on as many problems of each task to the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from shared import arguments, print_table, ratio_and_error
from torch import Tensor

from kvcal.console import TerminalReporter
from kvcal.data.reading import EvaluateSpec
from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.models.load import LoadedModel, load
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.scores import Score
from kvcal.pages.tiered import MAX_SLOTS, TieredLayout
from kvcal.plan.layer import FormatsSpec, bare_layers, fixed_layers
from kvcal.plan.page_format import RAW, Boost, Format, Tier
from kvcal.plan.plan import Plan, Workload
from kvcal.recipe_files import load_recipe
from kvcal.stages.divergence import deviations, unquantized_plan
from kvcal.stages.evaluate.tasks import TaskResult, measure_tasks

SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
SCORES: tuple[Score, ...] = ("magnitude", "variance", "range", "query_magnitude", "query_range", "random")
SCORE_SHARES = (0.125, 0.25)


@dataclass(frozen=True)
class Case:
    """One plan: ``sweep`` says which table it is a row of."""

    sweep: str
    score: Score
    share: float
    k: Format
    v: Format


@dataclass(frozen=True)
class Result:
    """``page_bits``: bits a value of pages, scales, zeros and indices included, of K and V, or of K where V has 16;
    ``change``: KL against the row above (shares) or against random channels (scores), with its paired error."""

    sweep: str
    score: str
    share: float
    k_page_bytes: int
    page_bits: float
    kl: float
    kl_se: float
    change: float | None
    change_se: float | None
    tasks: tuple[TaskResult, ...]


def cases_of(head_dim: int, quick: bool) -> list[Case]:
    formats = load_recipe("kitty").formats
    assert formats is not None
    shares = [share for share in SHARES if share * head_dim <= MAX_SLOTS]
    cases = []
    for sweep, v in (("keys", RAW), ("recipe", formats.v)):
        for share in (0.0, 0.125, 1.0) if quick else shares:
            cases.append(Case(sweep, "magnitude", share, boosted(formats.k, "magnitude", share), v))
    for share in SCORE_SHARES[:1] if quick else SCORE_SHARES:
        for score in SCORES:
            cases.append(Case("scores", score, share, boosted(formats.k, score, share), RAW))
    return cases


def boosted(k: Format, score: Score, share: float) -> Format:
    """The recipe's keys with another score and share; 0 is no boost at all."""
    return replace(k, boost=Boost(score, (Tier(4, share),)) if share else None)


def plan_of(loaded: LoadedModel, k: Format, v: Format) -> Plan:
    layers = fixed_layers(FormatsSpec(k, v), bare_layers(loaded.geometry))
    return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, Workload(1, 4096), {})


def kl_sums(loaded: LoadedModel, plans: Sequence[Plan], data: TokenDataset, reporter: TerminalReporter) -> Tensor:
    """[P, sequences] fp64: the sum of KL over each sequence's loss tokens."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    columns = []
    for number, (tokens_T, mask_T) in enumerate(zip(data.sequences, data.loss_masks, strict=True)):
        found_Pn = deviations(loaded.model, reference, plans, tokens_T.unsqueeze(0), mask_T.unsqueeze(0)).kl_Pn
        columns.append(found_Pn.sum(1))
        reporter(number + 1, len(data.sequences), "KL of sequences")
    return torch.stack(columns, 1)


def compared_with(case: Case, cases: Sequence[Case]) -> int | None:
    """The row that ``case`` is compared with: the next smaller share, or random channels at equal bytes."""
    if case.sweep == "scores":
        wanted = [c for c in cases if c.sweep == "scores" and (c.score, c.share) == ("random", case.share)]
        return cases.index(wanted[0]) if case.score != "random" else None
    smaller = [c for c in cases if c.sweep == case.sweep and c.share < case.share]
    return cases.index(max(smaller, key=lambda c: c.share)) if smaller else None


def page_bits(case: Case, head_dim: int, cache_dtype: str) -> tuple[int, float]:
    """Bytes of a K page, and ``Result.page_bits``."""
    sizes = [case.k.layout("k", 1, head_dim, cache_dtype, case.k.num_bits).record_bytes]
    if case.v != RAW:
        sizes.append(case.v.layout("v", 1, head_dim, cache_dtype, case.v.num_bits).record_bytes)
    return sizes[0], 8 * sum(sizes) / (len(sizes) * PAGE_TOKENS * head_dim)


def page_table(head_dims: Sequence[int]) -> list[dict[str, int]]:
    """Bytes of a page by field, for Kitty's shares."""
    rows = []
    for head_dim in head_dims:
        for share in (0.125, 0.25):
            tiers = ((4, max(1, int(share * head_dim + 0.5)), None),)
            layout = TieredLayout(2, tiers, 128, head_dim, "float16", "bfloat16")
            rows.append(
                {
                    "head_dim": head_dim,
                    "boosted": layout.num_slots,
                    "base": sum(layout.plane_sizes),
                    "high": sum(map(sum, layout.high_sizes)),
                    "scales and zeros": 2 * layout.param_size,
                    "index": layout.head_dim,
                    "page": layout.record_bytes,
                }
            )
    return rows


def measure(loaded: LoadedModel, cases: Sequence[Case], data: TokenDataset, problems: int) -> list[Result]:
    reporter = TerminalReporter()
    plans = [plan_of(loaded, case.k, case.v) for case in cases]
    sums = kl_sums(loaded, plans, data, reporter)
    counts = torch.tensor([int(mask.sum()) for mask in data.loss_masks], dtype=torch.float64)
    head_dim, results = head_dim_of(loaded), []
    for number, (case, plan) in enumerate(zip(cases, plans, strict=True)):
        other = compared_with(case, cases)
        change, change_se = (None, None) if other is None else ratio_and_error(sums[number] - sums[other], counts)
        kl, kl_se = ratio_and_error(sums[number], counts)
        k_page_bytes, bits = page_bits(case, head_dim, loaded.geometry.cache_dtype)
        asked = problems and case.sweep == "recipe"
        results.append(
            Result(
                case.sweep,
                case.score,
                case.share,
                k_page_bytes,
                bits,
                kl,
                kl_se,
                change,
                change_se,
                measure_tasks(loaded, plan, EvaluateSpec(num_problems=problems), reporter) if asked else (),
            )
        )
    return results


def head_dim_of(loaded: LoadedModel) -> int:
    """Of the keys of the first layer that grows with tokens."""
    return next(layer.attention.k_head_dim for layer in bare_layers(loaded.geometry) if layer.is_paged)


def is_monotone(results: Sequence[Result], sweep: str) -> bool:
    """No share is worse than the smaller one by more than two standard errors."""
    steps = [(r.change or 0.0, r.change_se or 0.0) for r in results if r.sweep == sweep]
    return all(change <= 2 * error for change, error in steps)


def print_results(results: Sequence[Result]) -> None:
    titles = {
        "keys": "Share of channels at 4 bits, keys alone (change: against the row above)",
        "recipe": "Share of channels at 4 bits, values at 2 bits (change: against the row above)",
        "scores": "Scores at equal pages, keys alone (change: against random channels)",
    }
    for sweep, title in titles.items():
        rows = [result for result in results if result.sweep == sweep]
        head = ["share", "score", "K page, bytes", "bits a value", "KL", "change of KL"]
        head += [task.task for task in rows[0].tasks]
        lines = []
        for r in rows:
            change = "" if r.change is None else f"{r.change:+.5f} ± {r.change_se:.5f}"
            score = r.score if r.share else "–"
            cells = [f"{r.share:.1%}", score, str(r.k_page_bytes), f"{r.page_bits:.3f}", f"{r.kl:.5f} ± {r.kl_se:.5f}"]
            accuracy = [f"{task.accuracy:.1%} ± {task.accuracy_se:.1%}" for task in r.tasks]
            lines.append([*cells, change, *accuracy])
        print_table(title, head, lines)
        if sweep != "scores":
            verdict = "yes" if is_monotone(results, sweep) else "NO"
            print(f"\nMore boosted channels are never worse by more than two standard errors: {verdict}.")


def main() -> None:
    parser = arguments(__doc__, is_out_required=False)
    parser.add_argument("--data", default="tasks", help="a source of text, as in a recipe's [data]")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--problems", type=int, default=0, help="problems of each task; 0 measures no accuracy")
    parser.add_argument("--quick", action="store_true", help="few plans on two short sequences")
    given = parser.parse_args()
    if given.samples < 2:
        parser.error("--samples: errors need two sequences or more")
    loaded = load(given.model, device=given.device)
    samples, seq_len = (2, 512) if given.quick else (given.samples, given.seq_len)
    assert loaded.tokenizer is not None
    data = load_sequences(DataSpec(given.data, samples, seq_len, seed=1), loaded.tokenizer, purpose="report")
    head_dim = head_dim_of(loaded)
    pages = page_table(sorted({64, 128, head_dim}))
    print_table("Bytes of a page of keys, one KV head", list(pages[0]), [list(row.values()) for row in pages])
    results = measure(loaded, cases_of(head_dim, given.quick), data, given.problems)
    print_results(results)
    exact = unquantized_plan(loaded.identity, loaded.geometry)
    spec = EvaluateSpec(num_problems=max(1, given.problems))
    at_16_bits = measure_tasks(loaded, exact, spec, TerminalReporter()) if given.problems else ()
    for task in at_16_bits:
        print(f"\n{task.task} at 16 bits: {task.accuracy:.1%} ± {task.accuracy_se:.1%}")
    if given.out is not None:
        content = {
            "model": given.model,
            "device": str(loaded.model.device),
            "data": data.description,
            "num_loss_tokens": data.num_loss_tokens,
            "pages": pages,
            "results": [asdict(result) for result in results],
            "tasks_at_16_bits": [asdict(task) for task in at_16_bits],
            "monotone": {sweep: is_monotone(results, sweep) for sweep in ("keys", "recipe")},
        }
        given.out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
