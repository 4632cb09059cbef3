"""Results of commands as tables (title, headers, rows of text) and as JSON.

Results of stages are imported for types alone, so that showing a plan loads no transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from kvcal.console import View
from kvcal.geometry import AttentionGeometry
from kvcal.plan.damage import concern
from kvcal.plan.layer import describe_parts
from kvcal.plan.plan import SIDES, LayerPlan, Plan, Side, Workload, plan_record
from kvcal.quantities import format_bytes, format_measured
from kvcal.strict import dump

if TYPE_CHECKING:
    from kvcal.plan.damage import Damage
    from kvcal.stages.allocate.fixed_widths import WidthsReport
    from kvcal.stages.allocate.record import Allocation
    from kvcal.stages.allocate.stage import Choices
    from kvcal.stages.compare import Comparison
    from kvcal.stages.evaluate.stage import Evaluation, GateResult
    from kvcal.stages.profile.record import Profile
    from kvcal.stages.search import SearchReport
    from kvcal.stages.tune import Tuning


_SHORT = re.compile("(?<=^[0-9a-f]{8})[0-9a-f]{56}$")  # a digest is shown by its first digits


def side_name(layer: LayerPlan, side: Side) -> str:
    """The formats of a layer's K or V, and what is done to its pages; of latent attention, of the latent or
    the rotary key."""
    name = " ".join(part for part in (_bits(layer, side), _pages(layer, side)) if part)
    if layer.attention.is_latent:
        name = f"{'latent' if side == 'k' else 'rotary key'} {name}"
    return name


def _bits(layer: LayerPlan, side: Side) -> str:
    return layer.format(side).label.partition(" ")[0]


def _pages(layer: LayerPlan, side: Side) -> str:
    """All but the bits of a side, such as "rotated g128 in basis with feedback"; "" of plain 16 bits."""
    words = layer.format(side).label.partition(" ")[2], layer.label(side)
    return " ".join(filter(None, words))


def layer_table(layers: Sequence[LayerPlan], cache_dtype: str, workload: Workload) -> View:
    """Bits and bytes of every layer. The legend says what the pages are, and what all layers share."""
    rows, legend = [], _Legend()
    for layer in layers:
        cells, kept = ["", "", "state"], ""
        if layer.is_paged:
            cells, kept = [*(_bits(layer, side) for side in SIDES), legend.name(layer)], _protected(layer)
        elif isinstance(layer.geometry, AttentionGeometry):
            cells = ["16", "16", f"window {layer.geometry.window}"]
        nbytes = layer.nbytes(cache_dtype, workload.lengths, workload.context)
        per_token = f"{nbytes / (workload.batch * workload.context):.1f}"
        rows.append((str(layer.geometry.index), *cells, format_bytes(nbytes), per_token, kept))
    headers = ["layer", "K", "V", "pages", "bytes", "bytes per token", "sinks + window"]
    notes, kept_by_all = [str(legend)], {row[-1] for row in rows if row[-1]}
    if len(kept_by_all) < 2:
        headers, rows = headers[:-1], [row[:-1] for row in rows]
        notes += [f"sinks + window of all pages, at 16 bits: {kept} tokens" for kept in kept_by_all]
    if any(isinstance(one.geometry, AttentionGeometry) and one.geometry.is_latent for one in layers):
        notes.append("latent attention: K is the latent, V the rotary key")
    heat = {
        side.upper(): [layer.format(side).num_bits if layer.is_paged else None for layer in layers] for side in SIDES
    }
    title = f"Layers at batch {workload.batch} x {workload.context} tokens"
    return View(title, headers, rows, "\n".join(filter(None, notes)), heat)


class _Legend:
    """The meanings of short names of pages, such as "basis"."""

    def __init__(self) -> None:
        self._meanings: dict[str, list[str]] = {}  # of keys and values, "" while all that were seen have 16 bits

    def name(self, layer: LayerPlan) -> str:
        """The same for layers whose pages differ in bits alone."""
        sides = [_pages(layer, side) for side in SIDES]
        if not any(sides):
            return layer.kind
        for number in count(1):
            name = layer.kind if number == 1 else f"{layer.kind} {number}"
            known = self._meanings.get(name, ["", ""])
            if all(not one or not other or one == other for one, other in zip(sides, known, strict=True)):
                break
        self._meanings[name] = [one or other for one, other in zip(sides, known, strict=True)]
        return name

    def __str__(self) -> str:
        parts = []
        for name, (k, v) in self._meanings.items():
            both = [k] if k == v else [f"{side} {text}" for side, text in (("K", k), ("V", v)) if text]
            parts.append(f"{name}: {', '.join(both)}")
        return "; ".join(parts)


def _protected(layer: LayerPlan) -> str:
    """Sinks and windows, such as "8 + 64"; of keys and of values, where they differ."""
    k, v = (fmt.kept for fmt in layer.formats)
    return k if k == v else f"K {k}, V {v}"


def search_table(report: SearchReport) -> View:
    """The plans of all systems: KL to the 16-bit cache on both pools, the paired difference from the plan
    that ships, and why a system has no plan."""
    rows = []
    for one in report.systems:
        figures = (
            (one.select, one.select_error),
            (one.validate, one.validate_error),
            (one.difference, one.difference_error),
        )
        kls = ["" if kl is None else format_measured(kl, error or 0.0) for kl, error in figures]
        name = f"{one.name} (ships)" if one.name == report.shipped else one.name
        rows.append((name, "" if one.bits is None else f"{one.bits:.3f}", *kls, one.left_out or ""))
    title = f"Plans for {report.serve}, KL on {report.num_select} texts of select, {report.num_validate} of validate"
    return View(title, ("system", "bits", "select", "validate", "difference", "left out"), rows)


def widths_table(report: WidthsReport) -> View:
    """The choice by layer next to fixed widths of the same bytes: KL to the 16-bit cache on texts kept
    apart."""
    rows = []
    for one in report.plans:
        name = f"{one.name} (ships)" if one.name == report.shipped else one.name
        look_ups = "" if one.look_ups is None else f"{one.look_ups:.4g}"
        ratio = "" if one.ratio is None else format_measured(one.ratio, one.ratio * (one.log_error or 0.0))
        rows.append((name, f"{one.bits:.3f}", f"{one.kl:.4g}", look_ups, ratio))
    title = f"The choice by layer and fixed widths, on {report.num_texts} texts of select of {report.num_tokens} tokens"
    return View(title, ("plan", "bits", "KL of text", "KL of look-ups", "first plan's KL over this one's"), rows)


def plan_table(plan: Plan, workload: Workload, damage: Damage | None) -> View:
    """A plan's totals, and what it does to the model where that was measured."""
    raw_bytes, total = plan.raw_nbytes(workload.lengths), plan.nbytes(workload.lengths)
    factor = f"{raw_bytes / total:.2f}x smaller" if total <= raw_bytes else f"{total / raw_bytes:.2f}x larger"
    rows = [
        ("model", f"{plan.model.id} ({plan.model.model_type}, cache in {plan.cache_dtype})"),
        ("cache", f"{factor} than 16 bits: {format_bytes(total)} ({total} bytes)"),
        ("of which", describe_parts(plan.parts(workload))),
        ("per token", f"{total / (workload.batch * workload.context):.1f} bytes"),
        (bits_name(plan), f"{plan.bits_per_value(workload):.3f}"),
        ("damage", concern(damage) or str(damage)),
        *([("recipe", str(origin["recipe"]))] if "recipe" in (origin := _origin(plan)) else []),
    ]
    title = f"Plan at batch {workload.batch} x {workload.context} tokens"
    return View(title, ("", "value"), rows, bounded_note(plan, workload))


def bits_name(plan: Plan) -> str:
    """The row of all-in bits: of the layers that are quantized, where others are bounded."""
    paged = sum(layer.is_paged for layer in plan.layers)
    return "all-in bits per value" + ("" if paged == len(plan.layers) else f" of {paged} layers")


def bounded_note(plan: Plan, workload: Workload) -> str:
    """Bytes of layers that a plan leaves as they are, and that bits per value do not count; "" without
    any."""
    parts, others = plan.parts(workload), sum(not layer.is_paged for layer in plan.layers)
    nbytes = parts.get("sliding_windows", 0) + parts.get("states", 0)
    if not nbytes:
        return ""
    named = " and ".join(name.replace("_", " ") for name in ("sliding_windows", "states") if parts.get(name))
    return (
        f"{named}: {others} of {len(plan.layers)} layers stay as the model has them, {format_bytes(nbytes)} of "
        f"{format_bytes(sum(parts.values()))}; bits per value do not count them"
    )


def origin_table(plan: Plan) -> View:
    """The origin of a plan: its recipe, data and libraries."""
    origin = _origin(plan)
    libraries = origin.get("libraries")
    facts = [(key, value) for key, value in sorted(origin.items()) if not isinstance(value, dict | list)]
    facts += sorted(libraries.items()) if isinstance(libraries, dict) else []
    return View("Made from", ("", "value"), [(key, _SHORT.sub("…", str(value))) for key, value in facts])


def _origin(plan: Plan) -> dict[str, Any]:
    """A plan's provenance; for one without a recipe, the stages that measured a model for it."""
    origin, measured = plan.provenance, plan.provenance.get("calibration")
    if origin.get("recipe", "") is not None:
        return origin
    stages = sorted(measured, key=lambda name: name != "profile") if isinstance(measured, dict) else []
    return {**origin, "recipe": f"none, made stage by stage: {', '.join([*stages[:1], 'allocate', *stages[1:]])}"}


def budget_table(allocation: Allocation) -> View:
    """The parts of the budget, in bytes."""
    split, workload = allocation.split, allocation.workload
    device = split.weights is not None and split.workspace is not None
    parts = [
        ("budget", split.budget, True),
        ("weights", split.weights or 0, device),
        ("workspace", split.workspace or 0, device),
        ("sliding layers and states", split.fixed, split.fixed),
        ("cache, chosen formats", split.paged, True),
        ("reserved for transforms", split.reserved, split.reserved),
        ("rings and padding of the engine", split.engine, split.engine),
        ("left over", split.budget - split.cache - split.overhead - split.reserved, True),
    ]
    rows = [(name, format_bytes(nbytes), str(nbytes)) for name, nbytes, is_shown in parts if is_shown]
    if allocation.loss is not None:
        proof = "measured KL" if allocation.gap is None else f"gap {allocation.gap:.2g}, proven by HiGHS"
        rows.append(("loss", f"{allocation.loss:.6g}", proof))
    return View(f"Budget at batch {workload.batch} x {workload.context} tokens", ("", "size", "bytes"), rows)


def evaluation_table(evaluation: Evaluation) -> View:
    """A row for each plan."""
    from kvcal.stages.evaluate.stage import table_columns

    workload = evaluation.rows[0].workload
    title = f"{evaluation.data}; bytes at batch {workload.batch} x {workload.context} tokens; ± standard errors"
    return _of_columns(title, table_columns(evaluation.rows))


def comparison_table(comparison: Comparison) -> View:
    """A row for each plan, refused ones included; below it the reasons of these."""
    from kvcal.stages.compare import comparison_columns

    sizes = f"bytes at batch {comparison.workload.batch} x {comparison.workload.context} tokens"
    refused = [f"{one.name} is refused: {one.refusal.message}" for one in comparison.entries if one.refusal]
    title = f"{comparison.model} on {comparison.data}; {sizes}; ± standard errors"
    return _of_columns(title, comparison_columns(comparison), "\n".join(refused))


def _of_columns(title: str, columns: Sequence[tuple[str, Sequence[str]]], legend: str = "") -> View:
    rows = list(zip(*(cells for _, cells in columns), strict=True))
    return View(title, [header for header, _ in columns], rows, legend)


def gates_table(results: Sequence[GateResult]) -> View:
    """A row for each limit."""
    rows = []
    for one in results:
        measured = format_measured(one.measured, one.standard_error, 6)
        rows.append((one.gate, f"{one.limit:.6g}", measured, "passed" if one.passed else "FAILED"))
    return View("Gates", ("gate", "limit", "measured", ""), rows)


def profile_table(profile: Profile) -> View:
    """Each layer's KL, its cost of the cheapest and finest measured keys and values, and KVmix's scores."""
    subject, layers = profile.setup, [layer.index for layer in profile.setup.layers]
    bits = "/".join(str(bits) for bits in sorted(set(subject.spec.kl_bits)))
    columns: list[tuple[str, list[str]]] = [("layer", [str(layer) for layer in layers])]
    for side in SIDES:
        if subject.kl_candidates(side):
            kls = [" ".join(f"{kl:.2g}" for kl in profile.kl(layer, side).tolist()) for layer in layers]
            columns.append((f"{side.upper()} KL at {bits} bits", kls))
    for name, choose in (("worst", max), ("best", min)) if subject.spec.gradients else ():
        for side in SIDES:
            costs = [choose(profile.sensitivity(layer, side).sum(0).tolist()) for layer in layers]
            columns.append((f"{side.upper()} {name} sensitivity", [f"{cost:.4g}" for cost in costs]))
    for side in SIDES if subject.spec.gradients else ():
        columns.append((f"{side.upper()} |dL/dW|", [f"{profile.grad_norm(layer, side):.4g}" for layer in layers]))
    tokens = f"{subject.num_samples} samples, {subject.num_tokens} tokens"
    tokens += f", loss {profile.loss:.4f}" if subject.spec.gradients else ""
    return _of_columns(f"{subject.identity.id}: {subject.data_description}; {tokens}", columns)


def profile_json(profile: Profile) -> dict[str, Any]:
    subject, layers = profile.setup, []
    for index in (layer.index for layer in subject.layers):
        sides: dict[str, Any] = {"layer": index}
        for side in SIDES:
            sides[side] = {"kl": profile.kl(index, side).tolist() if subject.kl_candidates(side) else None}
            if subject.spec.gradients:
                sides[side]["sensitivity"] = profile.sensitivity(index, side).tolist()
                sides[side]["grad_norm"] = profile.grad_norm(index, side)
                sides[side]["relative_error"] = profile.relative_error(index, side).tolist()
        layers.append(sides)
    names = {side: [list(candidate) for candidate in subject.candidates(side)] for side in SIDES}
    kl_names = {side: [list(candidate) for candidate in subject.kl_candidates(side)] for side in SIDES}
    return {"subject": dump(subject), "candidates": names, "kl_candidates": kl_names, "layers": layers}


def plan_json(plan: Plan, workload: Workload | None) -> dict[str, Any]:
    workload = workload or plan.workload
    return {
        **plan_record(plan),
        "predicted_bytes": plan.predicted_bytes,
        "workload": dump(workload),
        "bytes": plan.nbytes(workload.lengths),
        "bits_per_value": plan.bits_per_value(workload),
        "parts": plan.parts(workload),
        "layer_bytes": [p.nbytes(plan.cache_dtype, workload.lengths, workload.context) for p in plan.layers],
    }


def tuned_table(tuning: Tuning, chosen: Mapping[str, float] | None, workload: Workload | None) -> View:
    """The Pareto front, and the trial with the ``chosen`` thresholds, by bits."""
    names = list(tuning.inputs["search.thresholds"])
    numbers = {*tuning.front, *(trial.number for trial in tuning.trials if trial.thresholds == chosen)}
    rows = []
    for trial in sorted((tuning.trials[number] for number in numbers), key=lambda one: one.outcome.bits_per_value):
        outcome = trial.outcome
        error = "" if outcome.accuracy_se is None else f" ± {100 * outcome.accuracy_se:.1f}"
        code_bits = outcome.facts.get("key_code_bits")
        cells = [f"{trial.number}{' (chosen)' if trial.thresholds == chosen else ''}"]
        cells += [f"{100 * outcome.accuracy:.1f}{error}", f"{outcome.bits_per_value:.3f}"]
        cells += [format_bytes(outcome.total_bytes), *(f"{trial.thresholds[name]:.3f}" for name in names)]
        rows.append((*cells, "" if code_bits is None else f"{code_bits:.2f}"))
    title = f"Pareto front of {len(tuning.trials)} trials"
    title += "" if workload is None else f"; bits and bytes at {workload.batch} x {workload.context}"
    return View(title, ("trial", "accuracy %", "all-in bits", "cache", *names, "code bits of keys"), rows)


def choices_table(found: Choices) -> View:
    """Costs of every option of a layer's keys or values."""
    columns = {
        "place": [one.place for one in found.options],
        "option": [f"{one.option}{' (chosen)' if one.is_chosen else ''}" for one in found.options],
        "bytes": [format_bytes(one.nbytes) for one in found.options],
        found.measure: [f"{one.loss:.4g}" for one in found.options],
        "KL alone": [
            "" if one.kl is None else f"{one.kl:.4g}" + (f" ± {one.kl_error:.2g}" if one.kl_error else "")
            for one in found.options
        ],
        "sensitivity": ["" if one.sensitivity is None else f"{one.sensitivity:.4g}" for one in found.options],
    }
    said = columns[found.measure]  # not twice, and no empty column
    shown = [
        (name, cells) for name, cells in columns.items() if cells is said or (cells != said and set(cells) - {"", "0"})
    ]
    return _of_columns("What each option costs", shown, found.led_to)
