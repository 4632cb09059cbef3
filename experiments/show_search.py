"""A search by the least mean KL against one that wants proof, on texts of kinds that neither saw.

    python experiments/show_search.py --model reasoner-10m --real FOLDER_OR_FILE --out search.json [--bits 2.5]

Both rules choose among the same measured plans: all that one search measures within the budget. The old rule ships the
plan of least mean KL on the texts that all plans saw (the first tier); the new one is ``kvcal search``. Both, and every
system's own plan within the budget, are then measured on the select, the validate and the report pool of the recipe's
data, and on ``--real``: text of another kind, which calibration never saw. Errors are standard errors over texts;
differences are from the plan that ships, paired by text.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from shared import arguments, mean_and_error, print_table

from kvcal.console import TerminalReporter
from kvcal.data.sequences import DataSpec, load_sequences
from kvcal.folder import Folder, Job
from kvcal.models.load import load
from kvcal.recipe_files import load_recipe, with_knobs
from kvcal.run.formats import search_data
from kvcal.stages.divergence import deviations, kl_texts, padded_texts, unquantized_plan
from kvcal.stages.search import Search
from kvcal.stages.search.compose import Candidate, search


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--real", required=True, help="text of a kind that calibration never sees")
    parser.add_argument("--bits", type=float, default=2.5)
    parser.add_argument("--texts", type=int, default=8, help="of each pool")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    loaded, reporter = load(given.model, device=given.device), TerminalReporter()
    assert loaded.tokenizer is not None
    knobs = {
        "allocate.bits": given.bits,
        "data.num_samples": 2 * given.texts, "data.seq_len": given.tokens, "data.min_len": given.tokens // 2,
        "search.kl_samples": given.texts, "search.kl_tokens": given.tokens, "search.refine_rounds": given.rounds,
        "reparam.num_samples": 4, "reparam.seq_len": given.tokens,
    }  # fmt: skip
    recipe = with_knobs(load_recipe("best"), knobs)
    seen: dict[object, Candidate] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        data = search_data(Job(recipe, loaded, Folder(Path(folder)), reporter))
        job = Search(loaded, recipe, data, Path(folder) / "search.safetensors", reporter)
        select, validate = (job.pool(purpose, stack).pool for purpose in ("select", "validate"))
        systems = [job.candidate(name, layers) for name, layers in job.systems.items()]
        systems = [one for one in systems if one.nbytes <= job.budget.cache]

        def make(name: str, choice: tuple[int, ...]) -> Candidate:
            found = job.composed(name, choice, job.brought)
            return seen.setdefault(choice, found) if found.nbytes <= job.budget.cache else found

        outcome = search(job.problem, job.spec.refine_rounds, select, validate, systems, [], make)
        candidates = [*systems, *seen.values()]
        few = select.table(candidates, select.tiers[0], "all plans").mean(1)
        old = candidates[int(few.argmin())]
    shown = {f"new rule: {outcome.champion.name}": outcome.champion, f"old rule: {old.name}": old}
    shown |= {one.name: one for one in systems if one not in shown.values()}
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    tables = {}
    for pool, spec, purpose in (
        ("select", recipe.data, "select"),
        ("validate", recipe.data, "validate"),
        ("report", recipe.data, "report"),
        ("other text", DataSpec(given.real, given.texts, given.tokens), "report"),
    ):
        texts = kl_texts(
            load_sequences(spec, loaded.tokenizer, purpose=purpose), given.texts, given.tokens, recipe.cache
        )
        parts = []
        for first in range(0, len(texts), 4):
            batch = texts[first : first + 4]
            found = deviations(loaded.model, reference, [one.plan for one in shown.values()], *padded_texts(batch))
            parts.append(found.statistics(len(batch))[..., 0])
        tables[pool] = torch.cat(parts, 1)
    rows = []
    for number, (name, one) in enumerate(shown.items()):
        cells = []
        for table in tables.values():
            (mean, error), (change, off) = mean_and_error(table[number]), mean_and_error(table[number] - table[0])
            cells.append(f"{mean:.4f} ± {error:.4f}" + (f" ({change:+.4f} ± {off:.4f})" if number else ""))
        rows.append([name, f"{one.plan.bits_per_value():.3f}", *cells])
    print_table(f"{len(candidates)} plans within {given.bits:g} bits", ["plan", "bits", *tables], rows)
    given.out.write_text(json.dumps({"rows": rows, "tables": {k: v.tolist() for k, v in tables.items()}}, indent=1))


if __name__ == "__main__":
    main()
