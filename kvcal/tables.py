"""Results of commands as tables (title, headers, rows of text) and as JSON.

Results of stages are imported for types alone, so that showing a plan loads no transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcal.console import View
from kvcal.plan.damage import concern
from kvcal.plan.plan import SIDES, LayerPlan, Plan, Side, Workload, plan_record
from kvcal.quantities import format_bytes, format_measured
from kvcal.strict import dump

if TYPE_CHECKING:
    from kvcal.plan.damage import Damage
    from kvcal.stages.allocate.record import Allocation
    from kvcal.stages.allocate.stage import Choices
    from kvcal.stages.compare import Comparison
    from kvcal.stages.evaluate.stage import Evaluation, GateResult
    from kvcal.stages.profile.record import Profile
    from kvcal.stages.search import SearchReport
    from kvcal.stages.tune import Tuning


_SHA256 = re.compile("^([0-9a-f]{16})[0-9a-f]{48}$")  # shown by its first digits


def side_name(layer: LayerPlan, side: Side) -> str:
    """The formats of a layer's K or V, and what is done to its pages; of latent attention, of the latent or the rotary
    key."""
    name = " | ".join(fmt.label for fmt in layer.formats(side))
    if layer.attention.is_latent:
        name = f"{'latent' if side == 'k' else 'rotary key'} {name}"
    if side == "k":
        name += (" λ" if layer.k_rescale else "") + (" offset" if layer.k_offset else "")
        name += " before RoPE" if layer.k_pages == "pre" else ""
    name += " in basis" if layer.basis(side) else ""
    name += " with feedback" if layer.feedback(side) else ""
    predictor = layer.predictor(side)
    return name if predictor is None else f"{name}, {predictor.kind} from layer {predictor.source}"


def layer_table(layers: Sequence[LayerPlan], cache_dtype: str, workload: Workload) -> View:
    """Formats and bytes of every layer; heads that differ are listed in order."""
    rows = []
    for layer in layers:
        nbytes = layer.nbytes(cache_dtype, workload.lengths, workload.context)
        if layer.is_paged:
            cells = [side_name(layer, side) for side in SIDES]
            protected = " ".join(f"{side} {_protected(layer, side)}" for side in SIDES)
        else:
            window = layer.attention.window if hasattr(layer.geometry, "window") else None
            cells = [f"16 bits, window {window}" if window else "state", ""]
            protected = ""
        per_token = nbytes / (workload.batch * workload.context)
        rows.append((str(layer.geometry.index), *cells, protected, f"{per_token:.1f}", format_bytes(nbytes)))
    title = f"Layers at batch {workload.batch} x {workload.context} tokens"
    return title, ("layer", "K bits", "V bits", "sinks + window", "bytes per token", "bytes"), rows


def _protected(layer: LayerPlan, side: Side) -> str:
    """Sinks and window of its formats."""
    windows = set()
    for fmt in layer.formats(side):
        rule, window = fmt.window_rule, str(fmt.recent_window)
        window = window if rule is None else f"{100 * rule.share:g}% {rule.kind}, at most {rule.max_tokens}"
        windows.add(f"{fmt.num_sink_tokens}+{window}")
    return " | ".join(sorted(windows))


def search_table(report: SearchReport) -> View:
    """The plans of all systems: KL to the 16-bit cache on both pools, the paired difference from the plan that ships,
    and why a system has no plan."""
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
    return title, ("system", "bits", "select", "validate", "difference", "left out"), rows


def plan_table(plan: Plan, workload: Workload, damage: Damage | None) -> View:
    """A plan's totals, what it does to the model where that was measured, and where it came from."""
    raw_bytes, total = plan.raw_nbytes(workload.lengths), plan.nbytes(workload.lengths)
    factor = f"{raw_bytes / total:.2f}x smaller" if total <= raw_bytes else f"{total / raw_bytes:.2f}x larger"
    libraries = plan.provenance.get("libraries")
    rows = [
        ("model", f"{plan.model.id} ({plan.model.model_type}, cache in {plan.cache_dtype})"),
        ("cache", f"{format_bytes(total)} ({total} bytes), {factor} than 16 bits"),
        ("per token", f"{total / (workload.batch * workload.context):.1f} bytes"),
        ("all-in bits per value", f"{plan.bits_per_value(workload):.3f}"),
        ("damage", concern(damage) or str(damage)),
        *(
            (key, _SHA256.sub(r"\1…", str(value)))
            for key, value in sorted(_origin(plan).items())
            if not isinstance(value, dict)
        ),
        *((name, str(value)) for name, value in sorted(libraries.items() if isinstance(libraries, dict) else ())),
    ]
    return f"Plan at batch {workload.batch} x {workload.context} tokens", ("", "value"), rows


def _origin(plan: Plan) -> dict[str, Any]:
    """A plan's provenance; for one without a recipe, the stages that measured a model for it."""
    origin, measured = plan.provenance, plan.provenance.get("calibration")
    if origin.get("recipe", "") is not None:
        return origin
    stages = [name for name in ("profile", "reparam", "predictors") if isinstance(measured, dict) and name in measured]
    return {**origin, "recipe": f"none, made stage by stage: {', '.join([*stages[:1], 'allocate', *stages[1:]])}"}


def budget_table(allocation: Allocation) -> View:
    """The parts of the budget, in bytes."""
    split, workload = allocation.split, allocation.workload
    device = split.weights is not None and split.workspace is not None
    parts = [
        ("budget", split.budget, True),
        ("weights", split.weights or 0, device),
        ("workspace", split.workspace or 0, device),
        ("bounded layers and states", split.fixed, split.fixed),
        ("cache, chosen formats", split.paged, True),
        ("reserved for transforms", split.reserved, split.reserved),
        ("rings and padding of the engine", split.engine, split.engine),
        ("left over", split.budget - split.cache - split.overhead - split.reserved, True),
    ]
    rows = [(name, format_bytes(nbytes), str(nbytes)) for name, nbytes, is_shown in parts if is_shown]
    if allocation.loss is not None:
        proof = "measured KL" if allocation.gap is None else f"gap {allocation.gap:.2g}, proven by HiGHS"
        rows.append(("loss", f"{allocation.loss:.6g}", proof))
    return f"Budget at batch {workload.batch} x {workload.context} tokens", ("", "size", "bytes"), rows


def evaluation_table(evaluation: Evaluation) -> View:
    """A row for each plan."""
    from kvcal.stages.evaluate.stage import table_columns

    workload = evaluation.rows[0].workload
    title = f"{evaluation.data}; bytes at batch {workload.batch} x {workload.context} tokens; ± standard errors"
    return _of_columns(title, table_columns(evaluation.rows))


def comparison_table(comparison: Comparison) -> View:
    """A row for each plan, refused ones included."""
    from kvcal.stages.compare import comparison_columns

    sizes = f"bytes at batch {comparison.workload.batch} x {comparison.workload.context} tokens"
    return _of_columns(f"{comparison.data}; {sizes}; ± standard errors", comparison_columns(comparison))


def _of_columns(title: str, columns: Sequence[tuple[str, Sequence[str]]]) -> View:
    return title, [header for header, _ in columns], list(zip(*(cells for _, cells in columns), strict=True))


def gates_table(results: Sequence[GateResult]) -> View:
    """A row for each limit."""
    rows = []
    for one in results:
        measured = format_measured(one.measured, one.standard_error, 6)
        rows.append((one.gate, f"{one.limit:.6g}", measured, "passed" if one.passed else "FAILED"))
    return "Gates", ("gate", "limit", "measured", ""), rows


def profile_table(profile: Profile) -> View:
    """Each layer's cost of its cheapest and finest measured keys and values, and KVmix's scores."""
    subject = profile.setup
    bits = "/".join(str(bits) for bits in sorted(set(subject.spec.kl_bits)))
    columns: list[tuple[str, list[str]]] = [("layer", [str(layer.index) for layer in subject.layers])]
    for side in SIDES:
        name, layers = side.upper(), [layer.index for layer in subject.layers]
        if subject.spec.gradients:
            sums = [profile.sensitivity(layer, side).sum(0) for layer in layers]
            columns.append((f"{name} sensitivity, worst", [f"{one.max():.4g}" for one in sums]))
            columns.append(("best", [f"{one.min():.4g}" for one in sums]))
        if subject.kl_candidates(side):
            kls = [" ".join(f"{kl:.2g}" for kl in profile.kl(layer, side).tolist()) for layer in layers]
            columns.append((f"{name} KL at {bits} bits", kls))
        if subject.spec.gradients:
            columns.append((f"{name} |dL/dW|", [f"{profile.grad_norm(layer, side):.4g}" for layer in layers]))
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
        cells += [f"{trial.thresholds[name]:.3f}" for name in names]
        cells += [f"{100 * outcome.accuracy:.1f}{error}", f"{outcome.bits_per_value:.3f}"]
        rows.append((*cells, "" if code_bits is None else f"{code_bits:.2f}", format_bytes(outcome.total_bytes)))
    title = f"Pareto front of {len(tuning.trials)} trials"
    title += "" if workload is None else f"; bits and bytes at {workload.batch} x {workload.context}"
    return title, ("trial", *names, "accuracy %", "all-in bits", "code bits of keys", "cache"), rows


def choices_table(found: Choices) -> View:
    """What every option costs its layer's keys or values."""
    rows = [
        (
            one.place, f"{one.option}{' (chosen)' if one.is_chosen else ''}", format_bytes(one.nbytes),
            f"{one.loss:.4g}", "" if one.kl is None else f"{one.kl:.3g}",
            "" if one.sensitivity is None else f"{one.sensitivity:.3g}",
        )
        for one in found.options
    ]  # fmt: skip
    return "What each option costs", ("place", "option", "bytes", found.measure, "KL alone", "sensitivity"), rows
