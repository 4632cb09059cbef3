"""The report of a folder: one page with what its artifacts hold, that needs no network and no other file.

Parts come in the order of a reader's questions: what the plan takes, why each layer has its bits, what another budget
would give, what was measured, how the folder came about. A part whose artifact is missing is left out. The page states
no date and no path, so that equal artifacts give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcal import tables
from kvcal.artifact import write_text_atomic
from kvcal.charts.html import (
    Heat,
    Part,
    Point,
    Series,
    bars,
    heat_map,
    page,
    scatter,
    section,
    side_by_side,
    table,
    view,
)
from kvcal.errors import ArtifactError
from kvcal.folder import Folder
from kvcal.plan.plan import Plan, load_plan
from kvcal.plan.tensors import tensors_nbytes
from kvcal.progress import Silent
from kvcal.quantities import format_bytes, format_measured
from kvcal.stages import allocate as allocation_stage
from kvcal.stages import profile as profile_stage
from kvcal.stages import search as search_stage
from kvcal.stages.allocate.record import Allocation, num_values
from kvcal.stages.compare import FILE as COMPARISON
from kvcal.stages.compare.record import Comparison, load_comparison
from kvcal.stages.evaluate import Evaluation, Row, load_evaluation
from kvcal.stages.explain import Explanation, UnitReasons, allocation_of, explain, spec_of
from kvcal.stages.search.record import KindResult, SearchReport
from kvcal.stages.tune.study import Tuning, load_tuning
from kvcal.strict import flat

TUNING = "tune.json"
# Budgets of the Pareto front where the whole front is too long.
FRONT_POINTS = 32
BITS = "bits per cached value, everything counted"
KL = "KL to 16 bits, nats per token"


def write_report(folder: Folder) -> Path:
    """Write report.html of what ``folder`` holds, whole or not at all, and return its path.

    Raises:
        ArtifactError: nothing to report, a corrupt artifact, or a file that cannot be written.
    """
    write_text_atomic(folder.report, report_html(folder))
    return folder.report


def report_html(folder: Folder) -> str:
    """The page. ArtifactError as ``write_report``."""
    parts, title = [], "kvcal"
    if folder.plan.is_file():
        plan = load_plan(folder.plan)
        title = f"{plan.model.id}: {plan.bits_per_value():.2f} bits per cached value"
        parts += list(_plan_parts(plan, folder))
    if (folder.path / COMPARISON).is_file():  # with the rows of the evaluation beside it
        comparison = load_comparison(folder.path / COMPARISON)
        title = f"{comparison.model}: {len(comparison.measured)} plans compared" if not parts else title
        parts += list(_comparison_parts(comparison))
    elif folder.evaluation.is_file() and (evaluation := load_evaluation(folder.evaluation)).rows:
        parts.append(_evaluation_part(evaluation))
    if (folder.path / TUNING).is_file():
        parts.append(_tuning_part(load_tuning(folder.path / TUNING), folder))
    if not parts:
        raise ArtifactError(
            f"{folder.path}: nothing to report: no plan, comparison or study lies there",
            hint="name the --out of `kvcal run`, `search`, `compare` or `tune`, or DIR/NAME of `kvcal plan`",
        )
    if folder.plan.is_file():
        parts.append(_provenance_part(load_plan(folder.plan)))
    return page(title, parts)


def _plan_parts(plan: Plan, folder: Folder) -> Iterator[str]:
    try:
        allocation, inputs = allocation_of(plan, folder)
    except ArtifactError:  # of another plan, or none: the plan by itself is left
        yield _memory_part(plan, None)
        yield _formats_part(plan)
        return
    yield _memory_part(plan, allocation)
    try:
        found = explain(plan, folder, Silent(), priced=False)
    except ArtifactError as refused:
        paths = (folder.allocation, folder.search, folder.profile)
        why = next(
            (refused.message.replace(str(p), p.name) for p in paths if str(p) in refused.message), refused.message
        )
        yield _formats_part(plan, f"{why}.")
    else:
        yield _choices_part(found)
        if found.source == "profile":
            yield _front_part(allocation, inputs, folder)
    if "search.sha256" in inputs and folder.search.is_file():
        yield _search_part(search_stage.load(folder.search).report)


def _memory_part(plan: Plan, allocation: Allocation | None) -> str:
    """Bytes of the plan and of 16 bits, beside the budget."""
    tensors, workload = tensors_nbytes(plan.tensors), plan.workload
    raw = plan.raw_nbytes(workload.lengths)
    split = None if allocation is None else allocation.split
    beside = {} if split is None else {"weights": split.weights or 0, "workspace": split.workspace or 0}
    budget = None if split is None or split.kind is None else split.budget
    cache = {"cache": plan.predicted_bytes - tensors, "tensors of transforms": tensors}
    left = {} if budget is None else {"left over": max(0, budget - sum(beside.values()) - plan.predicted_bytes)}
    names = list(beside | cache)
    colours = {name: number for number, name in enumerate(names)} | {"left over": None}
    rows = [
        (name, [Part(what, size, colours[what], f"{what}: {format_bytes(size)} = {size} bytes")
                for what, size in sizes.items() if size])
        for name, sizes in (("this plan", beside | cache | left), ("16 bits", beside | {"cache": raw}))
    ]  # fmt: skip
    limit = None if budget is None else (float(budget), f"budget: {format_bytes(budget)} = {budget} bytes")
    cells = [("cache of this plan", plan.predicted_bytes), ("cache at 16 bits", raw), *beside.items(), *left.items()]
    cells += [] if budget is None else [("budget", budget)]
    sizes = [(name, format_bytes(size), str(size)) for name, size in cells if size or name in left]
    about = (
        f"At batch {workload.batch} x {workload.context} tokens: {plan.bits_per_value():.3f} bits per cached value, "
        f"{raw / plan.predicted_bytes:.2f} times smaller than 16 bits."
    )
    about += "" if budget is None else " The dashed line is the budget."
    drawn = side_by_side([bars(rows, "bytes", limit), table(("", "size", "bytes"), sizes)])
    return section("memory", "Memory", [drawn], about)


def _formats_part(plan: Plan, why: str = "") -> str:
    """The bits of every layer, where no reasons are known."""
    _, headers, rows = tables.layer_table(plan.layers, plan.cache_dtype, plan.workload)
    return section("bits", "Bits", [table(headers, rows)], why)


def _choices_part(found: Explanation) -> str:
    """Heat maps of what each option costs, with the choice; what more bytes would buy; what is at risk."""
    sides = sorted({unit.side for unit in found.units})
    maps = [_costs_map([unit for unit in found.units if unit.side == side], side, found) for side in sides]
    what = {
        "profile": f"what each option would cost the layer alone ({found.measure}), from the profile",
        "search": "how each option was estimated to change the score beside the plan of the last round",
    }[found.source]
    parts = [side_by_side(maps)] if maps else []
    parts += [view(tables.more_table(found, found.more))] if found.more is not None else []
    parts += [view(tables.risks_table(found.risks))] if found.risks else []
    about = (
        f"Outlined: the choice. Colour and number: {what}; rest the pointer on a cell for bytes, KL and sensitivity."
    )
    return section("choices", "Sensitivity and bits", parts, about)


def _costs_map(units: Sequence[UnitReasons], side: str, found: Explanation) -> str:
    """Options that no unit has as a choice or as one that no other betters are left out."""
    sizes: dict[str, int] = {}
    for unit in units:
        for option in unit.options:
            if option.better is None or option.is_chosen:
                sizes[option.name] = max(sizes.get(option.name, 0), option.nbytes)
    names = sorted(sizes, key=lambda name: (sizes[name], name))
    losses = [option.loss for unit in units for option in unit.options]
    scale = _log_heat(losses) if found.source == "profile" else _linear_heat(losses)
    rows = []
    for unit in units:
        by_name = {option.name: option for option in unit.options}
        cells: list[Heat | None] = []
        for name in names:
            if name not in by_name:
                cells.append(None)
                continue
            option = by_name[name]
            facts = {"KL alone": option.kl, "sensitivity": option.sensitivity, "±": option.error}
            measured = "".join(f"; {fact} {value:.3g}" for fact, value in facts.items() if value is not None)
            hover = f"{unit.name}, {name}: {found.measure} {option.loss:.3g}{measured}; {format_bytes(option.nbytes)}"
            cells.append(Heat(f"{option.loss:.1g}", hover, scale(option.loss), option.is_chosen))
        rows.append((unit.name, cells))
    title = {"k": "keys", "v": "values"}.get(side, "keys and values")
    return heat_map((title, *names), rows)


def _log_heat(losses: Sequence[float]) -> Callable[[float], float]:
    positive = [loss for loss in losses if loss > 0]
    low, high = (math.log(min(positive)), math.log(max(positive))) if positive else (0.0, 1.0)
    return lambda loss: 0.0 if loss <= 0 else 0.1 + 0.9 * (math.log(loss) - low) / ((high - low) or 1.0)


def _linear_heat(losses: Sequence[float]) -> Callable[[float], float]:
    low, high = min(losses), max(losses)
    return lambda loss: (loss - low) / ((high - low) or 1.0)


def _front_part(allocation: Allocation, inputs: Mapping[str, Any], folder: Folder) -> str:
    """Loss against bytes for all budgets, solved from the profile, and the plan's place."""
    profile = profile_stage.load(folder.profile)
    spec = spec_of(inputs)
    rows = allocation_stage.pareto(profile, spec, FRONT_POINTS)
    points = [
        Point(row["bits_per_value"], row["loss"], 0.0,
              f"{row['bits_per_value']:.3f} bits, {format_bytes(row['cache_bytes'])}: loss {row['loss']:.4g}")
        for row in rows if row["loss"] > 0
    ]  # fmt: skip
    bits = 8 * allocation.split.paged / num_values(allocation.layers, allocation.workload)
    loss = allocation.loss or 0.0
    chosen = Point(bits, loss, 0.0, f"chosen: {bits:.3f} bits, {format_bytes(allocation.split.cache)}: loss {loss:.4g}")
    series = [Series("best for each budget", 1, points, is_joined=True)]
    series += [Series("chosen", 0, [chosen], is_large=True)] if loss > 0 else []
    about = (
        "The least loss that the profile allows, budget by budget. Formats alone: tensors of transforms come on top."
    )
    return section("front", "Pareto front", [scatter(series, BITS, f"loss ({spec.objective})", log_y=True)], about)


def _search_part(report: SearchReport) -> str:
    """The plans that saw every text, and the KL of the one that ships on each pool, kind by kind."""
    pools = {"select": report.select, "validate": report.validate}
    kinds = list(dict.fromkeys(kind.kind for pool in pools.values() for kind in pool.kinds))
    rows = []
    for kind in kinds:
        for number, (name, pool) in enumerate(pools.items()):
            rows += [_kl_bar(f"{kind}, {name}", one, name, number) for one in pool.kinds if one.kind == kind]
    by_kind = side_by_side([bars(rows, KL), view(tables.pools_table(report))])
    ships, others = list[Point](), list[Point]()
    for one in report.candidates:
        hover = f"{one.name}: {format_bytes(one.nbytes)}, score {one.select:.4g} ± {one.select_error:.2g}"
        (ships if one.name == report.shipped else others).append(Point(one.nbytes, one.select, one.select_error, hover))
    chart = scatter(
        [Series("measured on all texts", 1, others), Series("ships", 0, ships, is_large=True)],
        "bytes of the cache", "score (1 is plain 2 bits)",
    )  # fmt: skip
    plans = side_by_side([chart, view(tables.candidates_table(report))])
    about = "The plan that ships, on the texts that it was chosen by (select) and on others (validate)."
    return section("kinds", "KL by kind of text", [by_kind, plans], about)


def _kl_bar(label: str, kind: KindResult, pool: str, colour: int) -> tuple[str, list[Part]]:
    hover = f"{label}: {format_measured(kind.kl, kind.kl_error)} over {kind.num_texts} texts"
    return label, [Part(pool, max(0.0, kind.kl), colour, hover, kind.kl_error)]


def _evaluation_part(evaluation: Evaluation) -> str:
    """The table of an evaluation, KL and accuracy as bars, and the time each row took."""
    rows = evaluation.rows
    title, headers, cells = tables.evaluation_table(evaluation)
    charts = [
        bars(
            [_bar(row.name, row.text.kl, row.text.kl_se, number, "nats per token") for number, row in enumerate(rows)],
            KL,
        )
    ]
    charts += [_accuracy_bars([(row.name, row) for row in rows])] if rows[0].tasks else []
    seconds = bars([_bar(row.name, row.seconds, None, 1, "s") for row in rows], "seconds to measure")
    parts = [table(headers, cells), side_by_side([*charts, seconds])]
    by_part = [chart for chart in (_kl_by_position(rows), _kl_by_kind(rows)) if chart]
    if by_part:
        parts += ["<h3>KL by position and by kind of text</h3>", side_by_side(by_part)]
    return section("evaluation", "Evaluation", parts, f"{title}.")


def _kl_by_position(rows: Sequence[Row]) -> str:
    """A line for each row, over the positions of its texts; nothing for rows that did not note them."""
    series = [
        Series(row.name, number, [
            Point((part.start + part.stop) / 2, part.kl, part.kl_se or 0.0,
                  f"{row.name}, tokens {part.start} to {part.stop - 1}: {format_measured(part.kl, part.kl_se)}")
            for part in row.text.kl_by_position
        ], is_joined=True)
        for number, row in enumerate(rows)
    ]  # fmt: skip
    return scatter(series, "position in the text, tokens", KL)


def _kl_by_kind(rows: Sequence[Row]) -> str:
    """A bar for each row and kind; nothing for texts of one kind."""
    found = [
        _bar(f"{row.name}: {part.kind}", part.kl, part.kl_se, number, "nats per token")
        for number, row in enumerate(rows)
        for part in row.text.kl_by_kind
    ]
    return bars(found, KL) if found else ""


def _bar(name: str, value: float, error: float | None, colour: int, unit: str) -> tuple[str, list[Part]]:
    return name, [Part("", max(0.0, value), colour, f"{name}: {format_measured(value, error)} {unit}", error or 0.0)]


def _accuracy_bars(rows: Sequence[tuple[str, Row]]) -> str:
    drawn = [
        _bar(f"{name}, {task.task}", 100 * task.accuracy, 100 * task.accuracy_se, number, "%")
        for number, (name, row) in enumerate(rows) for task in row.tasks
    ]  # fmt: skip
    return bars(drawn, "exact match, %")


def _comparison_parts(comparison: Comparison) -> Iterator[str]:
    title, headers, rows = tables.comparison_table(comparison)
    names = list(dict.fromkeys(entry.recipe for entry in comparison.entries))
    kl, accuracy = [], []
    for number, name in enumerate(names):
        measured = sorted(
            ((entry, row) for entry, row in comparison.measured if entry.recipe == name),
            key=lambda p: p[1].bits_per_value,
        )
        kl.append(Series(name, number, [_measured(e.name, row, row.text.kl, row.text.kl_se) for e, row in measured
                                        if row.text.kl > 0], is_joined=True))  # fmt: skip
        accuracy.append(Series(name, number, [
            _measured(e.name, row, 100 * row.accuracy, 100 * (row.accuracy_se or 0.0)) for e, row in measured
            if row.accuracy is not None
        ], is_joined=True))  # fmt: skip
    charts = [scatter(kl, BITS, KL, log_y=True), scatter(accuracy, BITS, "exact match, mean over tasks, %")]
    refused, last = "refused" in headers, len(headers) - 1
    yield section(
        "comparison", "Comparison",
        [side_by_side([chart for chart in charts if chart]), table(headers, rows, last if refused else None)],
        f"{title}. Rows without KL have none to draw on a logarithmic axis.",
    )  # fmt: skip
    times, colours = [], dict[str, int]()
    for entry in comparison.entries:
        stages = [stage for stage in entry.calibration.stages if stage.seconds is not None]
        files = [Path(stage.file).name.removesuffix(".safetensors") for stage in stages]
        parts = [
            Part(
                file,
                stage.seconds or 0.0,
                colours.setdefault(file, len(colours)),
                f"{entry.name}, {file}: {stage.seconds:.1f} s",
            )
            for file, stage in zip(files, stages, strict=True)
        ]
        times += [(entry.name, parts)] if parts else []
    chart = bars(times, "seconds")
    if chart:
        yield section("time", "Time by stage", [chart], "As the comparison saw each artifact made, on this machine.")


def _measured(name: str, row: Row, value: float, error: float | None) -> Point:
    hover = f"{name}: {row.bits_per_value:.3f} bits, {format_measured(value, error)}"
    return Point(row.bits_per_value, value, error or 0.0, hover)


def _tuning_part(tuning: Tuning, folder: Folder) -> str:
    """Trials, their front, and the one that the plan in the folder has."""
    plan = load_plan(folder.plan) if folder.plan.is_file() else None
    thresholds = None if plan is None else plan.provenance.get("thresholds")
    series: dict[str, list[Point]] = {"trial": [], "Pareto front": [], "chosen": []}
    for trial in tuning.trials:
        outcome, values = trial.outcome, ", ".join(f"{n} {value:.3f}" for n, value in sorted(trial.thresholds.items()))
        error = 100 * (outcome.accuracy_se or 0.0)
        hover = f"trial {trial.number}: {outcome.bits_per_value:.3f} bits, {100 * outcome.accuracy:.1f} ± {error:.1f} %"
        is_best = trial.number in tuning.front
        point = Point(outcome.bits_per_value, 100 * outcome.accuracy, error if is_best else 0.0, f"{hover}; {values}")
        series["Pareto front" if is_best else "trial"].append(point)
        series["chosen"] += [point] if trial.thresholds == thresholds else []
    drawn = [
        Series(name, colour, sorted(series[name]), name == "Pareto front", name == "chosen")
        for name, colour in (("trial", 7), ("Pareto front", 1), ("chosen", 0)) if series[name]
    ]  # fmt: skip
    front = view(tables.tuned_table(tuning, thresholds, None if plan is None else plan.workload))
    return section(
        "trials", "Threshold search", [side_by_side([scatter(drawn, BITS, "accuracy, %"), front])],
        f"{len(tuning.trials)} trials; bars are one standard error.",
    )  # fmt: skip


def _provenance_part(plan: Plan) -> str:
    model = {"model": plan.model.id, "family": plan.model.model_type, "config sha256": plan.model.config_sha256,
             "weights sha256": plan.model.weights_sha256, "tokenizer sha256": plan.model.tokenizer_sha256}  # fmt: skip
    facts = {**model, "cache dtype": plan.cache_dtype, "plan sha256": plan.sha256}
    rows = [*facts.items(), *((name, str(value)) for name, value in sorted(flat("", plan.provenance).items()))]
    return section("provenance", "Provenance", [table(("", "value"), rows, text_column=1)])
