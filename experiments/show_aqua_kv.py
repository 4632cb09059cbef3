"""AQUA-KV on real task text: what predictors are worth, on both backbones, read through the packed cache.

    python experiments/show_aqua_kv.py --model reasoner-10m --device auto --out aqua_kv.json [--quick]

1. Grids: mean squared error per dimension of the lattices on Gaussian vectors, besides what the optimum is known to be.
2. Explained variance of every layer's predictors on held-out sequences, and the error of the cache with and without.
3. Quality at equal settings but the predictors: b bits with them against b and b + 1 bits without. KL to 16 bits,
   perplexity, top-1 agreement, exact match with --problems; bytes and bits count predictors and everything else.
4. Ablations at 2 bits: one side alone, predictors fitted on exact inputs, of low rank, in 4 bits; no sinks; the first
   layer at 2 bits too.
5. Peak memory of fitting against the number of tokens, each in a process of its own.

Errors are standard errors over texts (problems, for exact match).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from shared import arguments, print_table

from kvcal.console import TerminalReporter
from kvcal.data.reading import EvaluateSpec
from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.models.load import LoadedModel, load
from kvcal.pages.lattice import GRIDS, gaussian_grid, nearest_point
from kvcal.plan.layer import LayerPlan, bare_layers, fixed_layers
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import lattice_tensors
from kvcal.recipe import PredictorSpec
from kvcal.recipe_files import load_recipe
from kvcal.stages.evaluate.tasks import measure_tasks
from kvcal.stages.evaluate.text import measure_text
from kvcal.stages.predictors.record import PredictorRecord, table_rows
from kvcal.stages.predictors.stage import run_fit_predictors
from kvcal.strict import dump

EXPECTED_ERRORS = {(2, 16): 0.107, (2, 64): 0.030, (2, 256): 0.0077, (4, 256): 0.097}
TEXT_BATCH = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One plan. ``predictors`` None: none."""

    name: str
    lattice_dim: int | None
    num_bits: int
    first_bits: int = 4
    num_sinks: int = 4
    predictors: PredictorSpec | None = None

    def layers(self, loaded: LoadedModel) -> tuple[LayerPlan, ...]:
        found, bits = [], self.first_bits
        for layer in bare_layers(loaded.geometry):
            if layer.is_paged:
                fmt = Format(bits, num_sink_tokens=self.num_sinks, lattice_dim=self.lattice_dim)
                if self.lattice_dim is None:
                    fmt = dataclasses.replace(fmt, group_size=64)
                layer, bits = LayerPlan(layer.geometry, (fmt,), (fmt,)), self.num_bits
            found.append(layer)
        return tuple(found)


def make_cases(loaded: LoadedModel, quick: bool) -> list[Case]:
    """Backbones without and with predictors, then the ablations."""
    linear, cases = PredictorSpec(), []
    for dim, backbone in ((2, "HIGGS"), (None, "uniform g64")):
        for bits in (2,) if quick else (2, 3):
            cases.append(Case(f"{backbone}, {bits} bits", dim, bits))
            cases.append(Case(f"{backbone}, {bits} bits, predicted", dim, bits, predictors=linear))
        cases.append(Case(f"{backbone}, {3 if quick else 4} bits", dim, 3 if quick else 4))
    if quick:
        return cases
    outputs = min(layer.num_kv_heads * layer.k_head_dim for layer in loaded.geometry.layers)
    ablations = {
        "keys alone predicted": PredictorSpec(sides=("k",)),
        "values alone predicted": PredictorSpec(sides=("v",)),
        "fitted on exact inputs": PredictorSpec(inputs="exact"),
        f"rank {outputs // 4}": PredictorSpec("low_rank", rank=outputs // 4),
        "int4": PredictorSpec("int4", group_size=64),
    }
    cases += [Case(f"HIGGS, 2 bits, {name}", 2, 2, predictors=spec) for name, spec in ablations.items()]
    for spec, name in ((None, ""), (linear, ", predicted")):
        cases.append(Case(f"HIGGS, 2 bits, no sinks{name}", 2, 2, num_sinks=0, predictors=spec))
        cases.append(Case(f"HIGGS, 2 bits, first layer too{name}", 2, 2, first_bits=2, predictors=spec))
    return cases


def fit(loaded: LoadedModel, case: Case, data: TokenDataset, workload: Workload) -> PredictorRecord:
    assert case.predictors is not None
    layers = case.layers(loaded)
    with tempfile.TemporaryDirectory() as folder, TerminalReporter().running() as reporter:
        path = Path(folder) / "predictors.safetensors"
        tensors = lattice_tensors(layers)
        return run_fit_predictors(loaded, layers, tensors, data, case.predictors, workload, {}, path, reporter)


def make_plan(loaded: LoadedModel, case: Case, record: PredictorRecord | None, workload: Workload) -> Plan:
    layers = case.layers(loaded)
    tensors = lattice_tensors(layers)
    if record is not None:
        layers, tensors = record.apply(layers), tensors | record.tensors()
    return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, workload, {}, tensors)


def reference_plans(loaded: LoadedModel, workload: Workload) -> dict[str, Plan]:
    """16 bits and KIVI-2."""
    found = {}
    for name in ("16-bit", "kivi-2"):
        formats = load_recipe(name).formats
        assert formats is not None
        layers = fixed_layers(formats, bare_layers(loaded.geometry))
        found[name] = Plan(loaded.identity, loaded.geometry.cache_dtype, layers, workload, {})
    return found


def show_grids(num_samples: int) -> list[dict[str, float]]:
    rows = []
    for dim, num_points in GRIDS:
        grid = gaussian_grid(dim, num_points)
        vectors = torch.randn(num_samples, dim, generator=torch.Generator().manual_seed(1))
        error = (vectors - grid[nearest_point(vectors, grid).int()]).double().square().mean().item()
        rows.append({"dim": dim, "points": num_points, "error": error, "expected": EXPECTED_ERRORS[dim, num_points]})
    print_table("Grids: mean squared error per dimension", list(rows[0]), [list(row.values()) for row in rows])
    return rows


def show_quality(
    loaded: LoadedModel,
    plans: dict[str, Plan],
    predictor_bytes: dict[str, int],
    texts: TokenDataset,
    num_problems: int,
) -> list[dict[str, object]]:
    rows = []
    problems = EvaluateSpec(num_problems=max(1, num_problems))
    for name, plan in plans.items():
        with TerminalReporter().running() as reporter:
            text = measure_text(loaded, plan, texts, TEXT_BATCH, reporter)
            tasks = measure_tasks(loaded, plan, problems, reporter) if num_problems else ()
        row: dict[str, object] = {
            "plan": name,
            "bits": plan.bits_per_value(),
            "bytes": plan.predicted_bytes,
            "predictor_bytes": predictor_bytes.get(name, 0),
            **{key: value for key, value in dump(text).items()},
            **{task.task: dump(task) for task in tasks},
        }
        rows.append(row)
        print(f"{name}: KL {text.kl:.5f}, perplexity {text.perplexity:.4f}", file=sys.stderr)
    names = [key for key in rows[0] if isinstance(rows[0][key], dict)]
    head = ["plan", "all-in bits", "bytes", "of predictors", "KL", "perplexity", "top-1", *names]
    workload = next(iter(plans.values())).workload
    cells = [
        [
            row["plan"],
            f"{row['bits']:.3f}",
            row["bytes"],
            row["predictor_bytes"],
            f"{row['kl']:.5f} ± {row['kl_se'] or 0.0:.5f}",
            f"{row['perplexity']:.4f} ± {row['perplexity_se'] or 0.0:.4f}",
            f"{row['top1_agreement']:.2%}",
            *(f"{row[n]['accuracy']:.1%} ± {row[n]['accuracy_se']:.1%}" for n in names),
        ]
        for row in rows
    ]
    print_table(f"Quality; bits and bytes at {workload.batch} x {workload.context} tokens", head, cells)
    return rows


def show_memory(given: argparse.Namespace, counts: Sequence[int]) -> list[dict[str, float]]:
    """Fits once for each number of sequences, in a new process."""
    rows = []
    for count in counts:
        command = [sys.executable, __file__, "--memory-of", str(count), "--seq-len", str(given.seq_len)]
        command += ["--model", given.model, "--device", given.device, "--data", given.data]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    head = ["sequences", "tokens", "peak MiB", "MiB before fitting"]
    print_table("Peak memory of fitting", head, [[row[name] for name in head] for row in rows])
    return rows


def memory_of(given: argparse.Namespace) -> None:
    """In the new process: prints the peak of resident, or device, memory."""
    loaded = load(given.model, device=given.device)
    case = Case("memory", None, 2, predictors=PredictorSpec())
    layers_only = calibration(loaded, given, 4)
    fit(loaded, case, layers_only, Workload(8, 4096))  # what the first run of anything allocates for good
    data = calibration(loaded, given, given.memory_of)
    before = peak_mib(loaded)
    fit(loaded, case, data, Workload(8, 4096))
    row = {"sequences": given.memory_of, "tokens": data.num_tokens, "peak MiB": peak_mib(loaded)}
    print(json.dumps(row | {"MiB before fitting": before}))


def peak_mib(loaded: LoadedModel) -> float:
    if loaded.model.device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def calibration(loaded: LoadedModel, given: argparse.Namespace, num_samples: int) -> TokenDataset:
    assert loaded.tokenizer is not None
    return load_sequences(DataSpec(given.data, num_samples, given.seq_len, seed=0), loaded.tokenizer)


def main() -> None:
    parser = arguments(__doc__, is_out_required=False)
    parser.add_argument("--data", default="tasks", help="a source of text, as in a recipe's [data]")
    parser.add_argument("--samples", type=int, default=48, help="sequences to fit on")
    parser.add_argument("--texts", type=int, default=16, help="sequences to measure on")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8, help="workload of the byte counts")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--problems", type=int, default=0, help="problems of each task; 0 measures no accuracy")
    parser.add_argument("--quick", action="store_true", help="few plans, short sequences: a smoke run")
    parser.add_argument("--memory-of", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.samples, given.texts, given.seq_len = 6, 2, 400
    if given.memory_of:
        memory_of(given)
        return
    loaded, workload = load(given.model, device=given.device), Workload(given.batch, given.context)
    assert loaded.tokenizer is not None
    data = calibration(loaded, given, given.samples)
    texts = load_sequences(DataSpec(given.data, given.texts, given.seq_len, seed=1), loaded.tokenizer, purpose="report")
    result: dict[str, object] = {"model": given.model, "device": str(loaded.model.device), "data": data.description}
    result["grids"] = show_grids(2**16 if given.quick else 2**21)
    plans, predictor_bytes, fits = reference_plans(loaded, workload), {}, {}
    for case in make_cases(loaded, given.quick):
        record = None if case.predictors is None else fit(loaded, case, data, workload)
        plans[case.name] = make_plan(loaded, case, record, workload)
        if record is not None:
            predictor_bytes[case.name] = record.nbytes
            fits[case.name] = [dump(finding) for finding in record.findings]
            if case.predictors == PredictorSpec():
                print_table(f"Predictors: {case.name}", *table_rows(record))
    result["fits"] = fits
    result["quality"] = show_quality(loaded, plans, predictor_bytes, texts, given.problems)
    result["memory"] = show_memory(given, (4,) if given.quick else (8, 16, 32, 64))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
