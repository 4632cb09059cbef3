"""The report of a folder: one page of HTML that needs no network, for people who did not make the plan. First
what was gained and what was lost, then where the bytes go, the layers, what was measured, and what to do
next. A part whose artifact is missing is left out.

The page states no date and no path: equal artifacts give equal bytes. Its template is report.html. kvcal's
own plan is told from its rivals, which are the baselines, and from all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvcal import tables
from kvcal.artifact import write_text_atomic
from kvcal.console import View, command_line
from kvcal.embedded import MODEL_NAME
from kvcal.errors import ArtifactError
from kvcal.folder import Folder
from kvcal.geometry import AttentionGeometry
from kvcal.plan.damage import VERDICTS, Damage, load_damage
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import Plan, load_plan
from kvcal.quantities import format_bytes, format_kl
from kvcal.recipe import Objective
from kvcal.stages.allocate.fixed_widths import report_of
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.allocate.stage import allocation_of, choices_of
from kvcal.stages.compare import FILE as COMPARISON
from kvcal.stages.compare import Comparison, Verdict, load_comparison, verdict
from kvcal.stages.evaluate.stage import Evaluation, Row, load_evaluation, task_cell, task_header
from kvcal.stages.memory_needs import gain_of, pays_from
from kvcal.stages.profile.record import Profile
from kvcal.stages.profile.record import load as load_profile
from kvcal.stages.search import load as load_search
from kvcal.stages.tune import FILE as STUDY
from kvcal.stages.tune import load_tuning
from kvcal.strict import flat

# What takes a cache's bytes, by its name in the page, and what that is.
PARTS = {
    "codes": ("Codes", "keys and values in few bits"),
    "scales": ("Scales", "with zeros and indices, of the codes"),
    "windows": ("Recent tokens", "kept at 16 bits"),
    "open_pages": ("Open pages", "the 128 tokens that are packed next, at 16 bits"),
    "sinks": ("Sinks", "the first tokens, kept at 16 bits"),
    "query_statistics": ("Query sums", "by which channels are chosen"),
    "sliding_windows": ("Sliding layers", "read their last tokens alone, and stay at 16 bits"),
    "states": ("States", "of layers that do not grow with tokens"),
    "transforms": ("Transforms", "bases and factors, once for all sequences"),
}
# KL below this is rounding (a 16-bit cache against the model without it): the logarithmic axis ends here.
SMALLEST_KL = 1e-6
OWN_RECIPE = "default"
Role = Literal["kvcal", "rival", "other"]
SAID = {
    "fine": "Fine: it predicts as the cache at 16 bits does",
    "watch": "Watch: measure your own tasks before you serve it",
    "destroyed": "Destroyed: do not serve this plan",
    "unchecked": "Unchecked: nobody has compared this plan with 16 bits",
}


class Part(NamedTuple):
    """A part of a cache's bytes; ``share``: of all, in %."""

    key: str
    name: str
    meaning: str
    size: str
    share: float


class Unit(NamedTuple):
    """A layer in the heat map: a cell for its keys and one for its values, of (class, number, title)."""

    layer: int
    cells: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Folded:
    """Tables that are shown when they are asked for."""

    name: str
    tables: tuple[View, ...]
    is_open: bool = False
    note: str = ""


def write_report(folder: Folder) -> Path:
    """Write report.html of what ``folder`` holds, and return its path."""
    from jinja2 import Environment

    plan = load_plan(folder.plan) if folder.plan.is_file() else None
    page = _measured_parts(folder) | ({} if plan is None else _plan_parts(folder, plan))
    folded = list(_folded(folder, plan))
    if not page and not folded:
        raise ArtifactError(
            f"{folder.path}: nothing to report: no plan, evaluation, comparison or study lies there",
            hint="name the --out of `kvcal run`, `search`, `compare` or `tune`, or DIR/NAME of `kvcal plan`",
        )
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    html = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    write_text_atomic(folder.report, html.render({"verdicts": SAID, "limits": VERDICTS, **page, "folded": folded}))
    return folder.report


def _plan_parts(folder: Folder, plan: Plan) -> dict[str, Any]:
    """All that a plan by itself tells, and what its allocation and profile add."""
    workload, damage = plan.workload, load_damage(folder.plan, plan)
    raw, total = plan.raw_nbytes(workload.lengths), plan.predicted_bytes
    ratio, word = (raw / total, "smaller") if total <= raw else (total / raw, "larger")
    sequences = "1 sequence" if workload.batch == 1 else f"{workload.batch} sequences"
    try:
        allocation, inputs = allocation_of(plan, folder)
    except ArtifactError:  # none, or of another plan: the plan by itself is left
        allocation, inputs = None, {}
    profile = load_profile(folder.profile) if "profile.sha256" in inputs and folder.profile.is_file() else None
    costs, of_costs = _costs(plan, profile)
    headline = f"{ratio:.1f}× {word}"
    return {
        "heading": plan.model.id,
        "title": f"{plan.model.id}: {headline}",
        "headline": headline,
        "facts": f"{plan.model.model_type}, {len(plan.layers)} layers, cache in {plan.cache_dtype}"
        + (f", recipe {plan.provenance['recipe']}" if plan.provenance.get("recipe") else ""),
        "lead": f"The cache of {sequences} of {workload.context:,} tokens takes {format_bytes(total)} "
        f"in place of {format_bytes(raw)}.",
        "level": "unchecked" if damage is None else damage.verdict,
        "lost": _lost(damage),
        "bars": [
            (name, format_bytes(nbytes), 100 * nbytes / max(raw, total))
            for name, nbytes in (("16 bits", raw), ("this plan", total))
        ],
        "parts": _bytes_parts(plan),
        "gains": _gains(plan, allocation, profile),
        "units": [_unit(layer) for layer in plan.layers],
        "costs": _cost_units(costs, plan.layers),
        "of_costs": of_costs,
        "next": _next(plan, damage),
    }


def _lost(damage: Damage | None) -> list[tuple[str, str, str]]:
    """A plan's losses: (name, value, what that is)."""
    if damage is None:
        return []
    found = [
        ("KL to 16 bits", format_kl(damage.kl, damage.kl_error), f"nats a token, over {damage.num_tokens:,} tokens"),
        ("Same next token", f"{100 * damage.top1:.1f} %", "of tokens whose most likely token stays"),
    ]
    places = [(f"layer {one.layer} {one.side.upper()}", f"KL {one.kl:.2g} alone") for one in damage.worst]
    if places:
        (most, alone), *others = places
        found.append(("Most by", most, "; ".join([alone, *(f"then {name}, {kl}" for name, kl in others)])))
    return found


def _bytes_parts(plan: Plan) -> list[Part]:
    found, total = plan.parts(plan.workload), plan.predicted_bytes
    keys = sorted((key for key in found if found[key]), key=list(PARTS).index)
    return [Part(key, *PARTS[key], format_bytes(found[key]), 100 * found[key] / total) for key in keys]


def _gains(plan: Plan, allocation: Allocation | None, profile: Profile | None) -> list[tuple[str, str, str, str]]:
    """(what, at 16 bits, with the plan, a note)."""
    workload, rows = plan.workload, []
    if allocation is not None and (allocation.split.weights is None or profile is not None):
        # The vocabulary counts where a whole device is shared with logits.
        split = allocation.split
        if split.kind is None:  # formats were fixed: their own bytes, transforms included
            split = replace(split, budget=plan.predicted_bytes)
        gain = gain_of(plan, split, 0 if profile is None else profile.setup.vocab_size)
        within = f"within {format_bytes(gain.budget)}" + ("" if allocation.split.weights is None else ", with weights")
        for what, key in (
            (f"Largest batch at {workload.context:,} tokens", "max_batch"),
            (f"Longest context at batch {workload.batch}", "max_context"),
        ):
            with_plan = "its own alone" if gain.fit is None else f"{getattr(gain.fit, key):,}"
            rows.append((what, f"{getattr(gain.raw_fit, key):,}", with_plan, within))
    if (start := pays_from(plan)) is not None:
        rows.append(("Pays from", "", f"{start:,} tokens", "of one sequence, transforms included"))
    bounded = any(not layer.is_paged for layer in plan.layers)
    of = "of the layers that grow with tokens" if bounded else "everything counted"
    return [*rows, ("Bits per cached value", "16", f"{plan.bits_per_value():.2f}", of)]


def _unit(layer: LayerPlan) -> Unit:
    if layer.is_paged:
        cells = [(layer.format(side).num_bits, tables.side_name(layer, side)) for side in SIDES]
        return Unit(layer.geometry.index, tuple((f"b{bits}", str(bits), name) for bits, name in cells))
    if isinstance(layer.geometry, AttentionGeometry):
        return Unit(layer.geometry.index, (("bounded", "16", f"window of {layer.geometry.window} tokens"),) * 2)
    return Unit(layer.geometry.index, (("bounded", "", "state"),) * 2)


Costs = Mapping[Side, Mapping[int, float]]


def _costs(plan: Plan, profile: Profile | None) -> tuple[Costs, str]:
    """Costs of the worst candidate of every layer, by side and index, and the name of their measure."""
    if profile is None:
        return {}, ""
    objective: Objective = "sensitivity" if profile.setup.spec.gradients else "kl"
    indices = [layer.geometry.index for layer in plan.layers if layer.is_paged]
    costs = {side: {i: max(map(sum, profile.losses(objective, i, side).values())) for i in indices} for side in SIDES}
    if objective == "sensitivity":
        return costs, "Sensitivity of each layer in its worst candidate (PM-KVQ, Eq. 5)"
    return costs, f"KL of each layer's keys or values alone, at {min(profile.setup.spec.kl_bits)} bits"


def _cost_units(costs: Costs, layers: Sequence[LayerPlan]) -> list[Unit]:
    """A second heat map, over three decades below the largest cost. None where nothing costs anything."""
    largest = max((cost for of_side in costs.values() for cost in of_side.values()), default=0.0)
    if largest <= 0:
        return []
    units = []
    for layer in layers:
        index, cells = layer.geometry.index, []
        for side in SIDES:
            cost = costs[side].get(index)
            decades = 9.0 if not cost else math.log10(largest / cost)
            shade = "bounded" if cost is None else f"c{max(0, 5 - int(decades * 2))}"
            cells.append((shade, "" if cost is None else f"{cost:.0e}".replace("e-0", "e-"), f"{side.upper()} {cost}"))
        units.append(Unit(index, tuple(cells)))
    return units


def _next(plan: Plan, damage: Damage | None) -> list[tuple[str, str]]:
    """(purpose, command line), for a shell in the plan's folder."""
    model, file, workload = plan.model.id, "plan.safetensors", plan.workload
    widest = max(plan.layers, key=lambda layer: layer.format("k").num_bits if layer.is_paged else 0)
    sizes = f"--bits {math.ceil(plan.bits_per_value()) + 1} --batch {workload.batch} --context {workload.context}"
    why = "Ask why a layer has its bits", command_line("inspect", file, "--why", widest.geometry.index)
    if damage is not None and damage.is_destroyed:
        return [("Make a larger plan", command_line("plan", model, *sizes.split())), why]
    tasks = [] if model == MODEL_NAME else ["--tasks", "retrieval:4096"]
    return [
        ("Measure it next to 16 bits", command_line("eval", file, "--model", model, *tasks)),
        ("Generate with it", _generate(model, file)),
        ("Serve it", command_line("serve-args", file, "--engine", "vllm", "--model", model)),
        why,
    ]


def _generate(model: str, plan: str) -> str:
    return command_line("generate", "--model", model, "--plan", plan, "--prompt", "Once upon a time")


def _folded(folder: Folder, plan: Plan | None) -> Iterator[Folded]:
    """All tables of what lies there."""
    if (folder.path / COMPARISON).is_file():
        yield Folded("All that was measured", (tables.comparison_table(load_comparison(folder.path / COMPARISON)),))
    elif folder.evaluation.is_file() and (evaluation := load_evaluation(folder.evaluation)).rows:
        yield Folded("All that was measured", (tables.evaluation_table(evaluation),))
    if (folder.path / STUDY).is_file():
        tuning = load_tuning(folder.path)
        thresholds = None if plan is None else plan.provenance.get("thresholds")
        table = tables.tuned_table(tuning, thresholds, None if plan is None else plan.workload)
        yield Folded("Study", (table,), is_open=True)
    if plan is None:
        return
    yield Folded(
        "Formats and bytes of every layer", (tables.layer_table(plan.layers, plan.cache_dtype, plan.workload),)
    )
    shown, note = [tables.plan_table(plan, plan.workload, load_damage(folder.plan, plan))], ""
    try:
        allocation, inputs = allocation_of(plan, folder)
        shown.append(tables.budget_table(allocation))
        if "search.sha256" in inputs and folder.search.is_file():
            yield Folded("Search", (tables.search_table(load_search(folder.search).report),), is_open=True)
        if (widths := report_of(plan)) is not None:
            yield Folded("Fixed widths", (tables.widths_table(widths),), is_open=True)
        yield Folded("What each option would cost", (tables.choices_table(choices_of(plan, folder)),))
    except ArtifactError as refused:
        note = refused.message.replace(f"{folder.path}/", "")
    yield Folded("The plan and its budget", tuple(shown), note=note)
    facts = {"plan sha256": plan.sha256, **flat("", plan.provenance)}
    hashes = (".windows", ".sequences")  # of texts: kilobytes that compare themselves
    rows = [(name, str(value)) for name, value in sorted(facts.items()) if not name.endswith(hashes)]
    yield Folded("Provenance", (View("The plan was made from", ("", "value"), rows),))


def _measured_parts(folder: Folder) -> dict[str, Any]:
    """A comparison, or an evaluation."""
    if (folder.path / COMPARISON).is_file():
        comparison = load_comparison(folder.path / COMPARISON)
        found = verdict(comparison)
        rows = of_comparison(comparison, found)
        winner = "" if found is None else found.winner.folder(Path("plans")).plan.as_posix()
        return {
            "heading": comparison.model,
            "title": f"{comparison.model}: {found or 'plans side by side'}",
            "headline": str(found or "Plans side by side"),
            "facts": f"priced at {comparison.workload.batch} × {comparison.workload.context:,} tokens",
            **dots_of(rows),
            "texts": comparison.data,
            "refused": [(e.name, e.refusal.message) for e in comparison.entries if e.refusal is not None],
            "next": [] if found is None else [("Generate with it", _generate(comparison.model, winner))],
        }
    if folder.evaluation.is_file() and (evaluation := load_evaluation(folder.evaluation)).rows:
        rows, ours = of_evaluation(evaluation), evaluation.rows[-1]
        return {
            "heading": ours.name,
            "title": f"{ours.name}: next to 16 bits",
            "headline": f"KL {format_kl(ours.text.kl, ours.text.kl_se)}",
            **dots_of(rows),
            "texts": evaluation.data,
        }
    return {}


class Measured(NamedTuple):
    """A measured plan's row."""

    name: str
    role: Role
    row: Row


def of_comparison(comparison: Comparison, found: Verdict | None) -> list[Measured]:
    """All measured plans. kvcal's are those of its own recipe, without one those of the recipe that does
    best."""
    recipes = {entry.recipe for entry, _ in comparison.measured}
    ours = OWN_RECIPE if OWN_RECIPE in recipes or found is None else found.winner.recipe
    roles: dict[str, Role] = {entry.name: "kvcal" if entry.recipe == ours else "other" for entry in comparison.entries}
    roles |= {entry.name: "rival" for entry in comparison.entries if entry.is_baseline}
    return [Measured(entry.name, roles[entry.name], row) for entry, row in comparison.measured]


def of_evaluation(evaluation: Evaluation) -> list[Measured]:
    """The last row is the plan's, which the others are measured next to."""
    *others, ours = evaluation.rows
    rivals = [Measured(row.name, "rival", row) for row in others]
    return [*rivals, Measured(ours.name, "kvcal", ours)]


class Dot(NamedTuple):
    """A row of measured plans: KL at ``at`` % of a logarithmic axis, its error from ``low`` to ``high`` %."""

    name: str
    role: Role
    bits: str
    kl: str
    at: float
    low: float
    high: float
    others: tuple[str, ...]


def dots_of(rows: Sequence[Measured]) -> dict[str, Any]:
    """Rows by bits, most first, on one logarithmic axis of KL, its ends, and the headers of the others'
    columns. 16 bits lie at its left end, however little they lose."""
    kls = [row.text.kl for *_, row in rows if row.text.kl > 10 * SMALLEST_KL] or [SMALLEST_KL]
    low, high = math.floor(math.log10(min(kls))), math.ceil(math.log10(max(kls)) + 1e-9)

    def place(kl: float) -> float:
        at = (math.log10(max(kl, SMALLEST_KL)) - low) / max(1, high - low)
        return 100 * min(1.0, max(0.0, at))

    dots = []
    for name, role, row in sorted(rows, key=lambda one: -one.row.bits_per_value):
        kl, error = row.text.kl, row.text.kl_se or 0.0
        cells = f"{100 * row.text.top1_agreement:.1f} %", *(task_cell(task) for task in row.tasks)
        ends = place(kl), place(kl - error), place(kl + error)
        dots.append(Dot(name, role, f"{row.bits_per_value:.2f}", format_kl(kl, row.text.kl_se), *ends, cells))
    headers = ["same next token", *map(task_header, rows[0].row.tasks)]
    return {"dots": dots, "columns": headers, "ends": [f"{10.0**end:g}" for end in (low, high)]}
