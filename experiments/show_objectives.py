"""Which statistic of texts orders plans as tasks do: mean KL, the tail of KL, or flips of sure tokens.

    python experiments/show_objectives.py --model reasoner-10m --out objectives.json [--problems 8] [--texts 8]

Plans: the systems' own and plain formats of 2 to 4 bits, keys and values alike or apart. Each is measured on texts of
the select pool, decode-faithfully, and solves problems of all tasks greedily. Rank correlations are Spearman's between
a statistic's mean over texts and the problems lost. Errors are standard deviations over 200 bootstrap samples of texts
and problems; the plans stay the same, so that they are no errors over plans.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from itertools import product
from statistics import stdev

import torch
from scipy.stats import spearmanr
from shared import arguments, print_table
from torch import Tensor

from kvcal.console import TerminalReporter
from kvcal.data.reading import EvaluateSpec
from kvcal.data.sequences import DataSpec, load_sequences
from kvcal.geometry import Geometry
from kvcal.models.load import load
from kvcal.plan.layer import LayerPlan, bare_layers, fixed_layers
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Plan, Workload
from kvcal.recipe import CacheSpec
from kvcal.recipe_files import load_recipe
from kvcal.stages.allocate.record import layers_in
from kvcal.stages.divergence import Deviations, deviations, kl_texts, padded_texts, unquantized_plan
from kvcal.stages.evaluate.tasks import measure_tasks

WITHOUT_FITS = ("kivi-2", "kivi-4", "kitty", "kitty-pro", "mixkvq-capped", "higgs-2")


# Of each text: mean KL and 99th percentile of KL in nats, and the share of loss tokens whose most likely token changes.
STATISTICS = ("kl", "tail", "flips")


def statistics_of(found: Deviations, sequence: int) -> Tensor:
    """[P, 3] of one sequence."""
    mine = found.sequence_n == sequence
    kl_Pm, flips_Pm = found.kl_Pn[:, mine], found.flips_Pn[:, mine].double()
    return torch.stack([kl_Pm.mean(1), kl_Pm.quantile(0.99, dim=1), flips_Pm.mean(1)], 1)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--problems", type=int, default=8, help="of each task")
    parser.add_argument("--new-tokens", type=int, default=512, help="of a problem's answer, at most")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=768)
    given = parser.parse_args()
    loaded, reporter = load(given.model, device=given.device), TerminalReporter()
    assert loaded.tokenizer is not None
    plans = {
        name: Plan(loaded.identity, loaded.geometry.cache_dtype, layers, Workload(8, 32768), {})
        for name, layers in layers_of(loaded.geometry).items()
        if not any(fmt.lattice_dim for layer in layers for fmt in layer.k)
    }
    data = load_sequences(
        DataSpec(num_samples=2 * given.texts, seq_len=given.tokens, min_len=min(300, given.tokens)),
        loaded.tokenizer,
        purpose="select",
    )
    texts = kl_texts(data, given.texts, given.tokens, CacheSpec(0, 0, 0))
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    parts = []
    for first in range(0, len(texts), 4):
        reporter(first, len(texts), "texts")
        batch = texts[first : first + 4]
        found = deviations(loaded.model, reference, list(plans.values()), *padded_texts(batch))
        parts.append(torch.stack([statistics_of(found, number) for number in range(len(batch))], 1))
    found_PNS = torch.cat(parts, dim=1)
    spec = EvaluateSpec(
        num_problems=given.problems, max_steps=16, max_size=48, max_hops=16, max_digits=3,
        max_new_tokens=given.new_tokens, batch=3 * given.problems,
    )  # fmt: skip
    solved: list[list[int]] = []
    for name, plan in plans.items():
        results = measure_tasks(loaded, plan, spec, reporter)
        solved.append([round(result.accuracy * result.num_problems) for result in results])
        reporter.say(f"{name}: {solved[-1]}, {found_PNS[len(solved) - 1].mean(0).tolist()}")
    lost = [1 - sum(row) / (len(row) * given.problems) for row in solved]
    means = {statistic: found_PNS[..., n].mean(1) for n, statistic in enumerate(STATISTICS)}
    means["worst text's kl"] = found_PNS[..., 0].amax(1)
    rows = [
        [name, share, *(float(values[p]) for values in means.values())]
        for p, (name, share) in enumerate(zip(plans, lost, strict=True))
    ]
    print_table("Plans", ["plan", "problems lost", *means], rows)
    draw, correlations = random.Random(0), []
    for statistic, number in zip(STATISTICS, range(len(STATISTICS)), strict=True):
        samples = []
        for _ in range(200):
            chosen = [draw.randrange(len(texts)) for _ in texts]
            drawn = [
                sum(draw.random() < count / given.problems for count in row for _ in range(given.problems))
                for row in solved
            ]
            values = found_PNS[:, chosen, number].mean(1).tolist()
            samples.append(correlation(values, [-share for share in drawn]))
        defined = [sample for sample in samples if not math.isnan(sample)]
        error = stdev(defined) if len(defined) > 1 else math.nan
        correlations.append([statistic, correlation(means[statistic].tolist(), lost), error])
    print_table("Rank correlation with problems lost", ["statistic", "correlation", "error"], correlations)
    given.out.write_text(json.dumps({"plans": rows, "correlations": correlations}, indent=1))


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's; nan where either is constant."""
    return float(spearmanr(first, second).statistic) if len(set(first)) > 1 and len(set(second)) > 1 else math.nan


def layers_of(geometry: Geometry) -> dict[str, tuple[LayerPlan, ...]]:
    """Of the systems that need no fits, and of plain formats."""
    fixed = {name: load_recipe(name).formats for name in WITHOUT_FITS}
    layers = {name: fixed_layers(one, bare_layers(geometry)) for name, one in fixed.items() if one is not None}
    for k, v in product((2, 3, 4), (2, 3, 4)):
        layers[f"K {k} V {v}"] = layers_in(geometry, Format(k, "channel", 128, 4), Format(v, "token", 128, 4))
    return layers


if __name__ == "__main__":
    main()
