"""The worth of a change of a recipe: KL to 16 bits of the changed recipe's plan, next to that of the
recipe's own.

    python lab/ablations.py --model reasoner-10m                        # all of ABLATIONS
    python lab/ablations.py kvmix:importance.window=none "kitty:formats.k.boost.score=variance" --out
    kitty.json

A change is spelled as in ``recipe_of``: RECIPE:KEY=VALUE, several after semicolons. KL is in nats per loss
token, read through the packed cache as in decoding, on texts that no calibration sees. Errors are standard
errors over texts; differences are paired, text by text. Pages that shrink have their final bits at the end of
each text.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shared import mean_and_error, print_table, recipe_of, scheduled
from torch import Tensor

from kvcal import Folder, Plan, Workload, build_plan, load_model
from kvcal.console import TerminalReporter
from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.models.load import LoadedModel
from kvcal.stages.divergence import deviations, unquantized_plan

WORKLOAD = Workload(8, 4096)
UNIFORM = "lattice_dim=;formats.{0}.axis=token;formats.{0}.group_size=64"
ABLATIONS = (
    "default:basis.exponent=0.0",  # a basis that evens out nothing
    "default:basis.exponent=0.5",  # and one that evens out all
    "kitty:formats.k.boost=",
    "kitty:formats.k.boost.score=variance",
    "kitty:formats.k.boost.score=range",
    "kitty-feedback:feedback=",
    "mixkvq-capped:formats.k.boost.score=range",  # the paper's error-only score
    "mixkvq-capped:formats.k.boost.score=magnitude",
    "aqua-kv:predictors=",
    "aqua-kv:" + ";".join(f"formats.{side}.{UNIFORM.format(side)}" for side in ("first_k", "first_v", "k", "v")),
    "kvmix:importance.window=none",
    "kvmix:importance.window=clamped;importance.min_window=32;importance.max_window=128",
    "pm-kvq:reparam=",
    "pm-kvq:progressive=",  # all pages at their final bits from the start
)


def plans_of(loaded: LoadedModel, names: Sequence[str], quick: bool) -> dict[str, Plan]:
    """The plan of every recipe. ``quick``: from few and short calibration texts."""
    found = {}
    for name in names:
        recipe = recipe_of(name)
        if quick:
            data = replace(recipe.data, num_samples=4, seq_len=320, min_len=0)
            profile = replace(recipe.profile, kl_samples=min(1, recipe.profile.kl_samples), kl_tokens=320)
            recipe = replace(recipe, data=data, profile=profile)
        with tempfile.TemporaryDirectory() as folder, TerminalReporter().running() as reporter:
            found[name] = build_plan(loaded, Folder.create(Path(folder)), recipe, WORKLOAD, reporter)
    return found


def kl_by_text(loaded: LoadedModel, plans: Mapping[str, Plan], data: TokenDataset) -> dict[str, Tensor]:
    """Mean KL to 16 bits over the loss tokens of each text, [texts] fp64."""
    reference, columns = unquantized_plan(loaded.identity, loaded.geometry), []
    for tokens_T, mask_T in zip(data.sequences, data.loss_masks, strict=True):
        workload = Workload(1, len(tokens_T))
        read = [scheduled(plan, workload) if plan.is_progressive else plan for plan in plans.values()]
        columns.append(deviations(loaded.model, reference, read, tokens_T[None], mask_T[None]).kl_Pn.mean(1))
    return dict(zip(plans, torch.stack(columns, 1), strict=True))


def compared(names: Sequence[str], plans: Mapping[str, Plan], kl: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """A row for each change: bits and KL of both plans, and the paired difference (change - recipe)."""
    rows = []
    for name in names:
        base, _, change = name.partition(":")
        bits = (plans[base].bits_per_value(), plans[name].bits_per_value())
        row = {"recipe": base, "change": change, "bits": bits[0], "changed_bits": bits[1]}
        row |= {"kl": mean_and_error(kl[base]), "changed_kl": mean_and_error(kl[name])}
        rows.append(row | {"difference": mean_and_error(kl[name] - kl[base])})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", default=ABLATIONS, help="RECIPE:KEY=VALUE;...; default: all of ABLATIONS")
    parser.add_argument("--model", default="reasoner-10m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", default="tasks", help="a source of texts to measure on, as in a recipe's [data]")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="of a text at most")
    parser.add_argument("--quick", action="store_true", help="calibrate on few and short texts")
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    loaded = load_model(given.model, device=given.device)
    assert loaded.tokenizer is not None
    spec = DataSpec(given.data, given.texts, given.tokens, seed=1)
    data = load_sequences(spec, loaded.tokenizer, purpose="report")
    bases = [name.partition(":")[0] for name in given.changes]
    plans = plans_of(loaded, list(dict.fromkeys([*bases, *given.changes])), given.quick)
    rows = compared(given.changes, plans, kl_by_text(loaded, plans, data))
    lines = [[f"{value[0]:.5f} ± {value[1]:.5f}" if isinstance(value, tuple) else value for value in row.values()]
             for row in rows]  # fmt: skip
    head = ("recipe", "change", "bits, 8 x 4,096", "changed", "KL", "changed", "difference")
    print_table(f"Changes of recipes on {data.description}", head, lines)
    if given.out is not None:
        content = {"model": given.model, "texts": data.description, "rows": rows}
        given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
