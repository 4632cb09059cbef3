"""The report of a folder: one page of HTML with the tables of what lies there and its two figures, bits of every layer
and quality against bits. A part whose artifact is missing is left out.

The page states no date and no path, the PNGs no date and no version: equal artifacts give equal bytes. Matplotlib is
imported when a figure is drawn, on its Agg canvas: no window.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvcal import tables
from kvcal.artifact import write_bytes_atomic, write_text_atomic
from kvcal.console import View
from kvcal.errors import ArtifactError
from kvcal.folder import Folder
from kvcal.plan.damage import load_damage
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import Plan, load_plan
from kvcal.recipe import Objective
from kvcal.stages.allocate.stage import allocation_of, choices_of
from kvcal.stages.compare import FILE as COMPARISON
from kvcal.stages.compare import load_comparison
from kvcal.stages.evaluate.stage import Row, load_evaluation
from kvcal.stages.profile.record import load as load_profile
from kvcal.stages.search import load as load_search
from kvcal.stages.tune import FILE as STUDY
from kvcal.stages.tune import load_tuning
from kvcal.strict import flat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE_NAMES: Mapping[Side, str] = {"k": "keys", "v": "values"}
BITS = "bits per cached value, everything counted"
# KL below this is rounding (a 16-bit cache against the model without it): the logarithmic axis ends here.
SMALLEST_KL = 1e-6
TICKS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 20, 24)
STYLES = [(f"C{number % 10}", "osD^vPX"[number % 7]) for number in range(70)]


class Point(NamedTuple):
    """A plan: all-in bits, and a value with its standard error."""

    bits: float
    value: float
    error: float = 0.0


class Series(NamedTuple):
    """Points of one name, joined in the order of their bits if ``is_joined``."""

    name: str
    points: Sequence[Point]
    is_joined: bool = True


def draw_bits(layers: Sequence[LayerPlan], sensitivity: Mapping[Side, Sequence[float]], path: Path) -> None:
    """Write the code bits of every paged layer, and below them its ``sensitivity`` in the worst candidate, where that
    was measured and is not 0 everywhere. Pages that shrink are shown in their final bits."""
    sensitivity = {side: values for side, values in sensitivity.items() if any(values)}
    paged = [layer for layer in layers if layer.is_paged]
    figure = _figure(max(7.0, 0.22 * len(paged)), 5.5 if sensitivity else 3.2)
    axes = figure.subplots(2 if sensitivity else 1, 1, sharex=True, squeeze=False)[:, 0]
    indices = [layer.geometry.index for layer in paged]
    for offset, side in ((-0.2, SIDES[0]), (0.2, SIDES[1])):
        bits = [sum(fmt.num_bits for fmt in layer.formats(side)) / len(layer.formats(side)) for layer in paged]
        bars = axes[0].bar([index + offset for index in indices], bits, 0.4, label=SIDE_NAMES[side])
        if len(paged) <= 48:
            axes[0].bar_label(bars, [f"{count:g}" for count in bits], fontsize=7)
        if side in sensitivity:
            axes[1].plot(indices, [value or float("nan") for value in sensitivity[side]], ".-", label=SIDE_NAMES[side])
    axes[0].set(title="Bits of a code, by layer", ylabel="bits")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    if sensitivity:
        axes[1].set(title="Sensitivity in the worst candidate (PM-KVQ, Eq. 5)", yscale="log")
    axes[-1].set_xlabel("layer")
    _save(figure, path)


def draw_quality(title: str, kl: Sequence[Series], accuracy: Sequence[Series], path: Path) -> None:
    """Write KL (nats per token, logarithmic) and accuracy (%) against bits: a panel for each that has points. Bars are
    one standard error."""
    shown = [(name, series) for name, series in (("kl", kl), ("accuracy", accuracy)) if any(s.points for s in series)]
    figure = _figure(7.0 * max(1, len(shown)), 5.5)
    figure.suptitle(title, fontsize=11)
    for axes, (name, series) in zip(figure.subplots(1, max(1, len(shown)), squeeze=False)[0], shown, strict=False):
        for (colour, marker), one in zip(STYLES, series, strict=False):
            points = sorted(one.points)
            values = [max(point.value, SMALLEST_KL) if name == "kl" else point.value for point in points]
            below = [min(p.error, 0.7 * v) if name == "kl" else p.error for p, v in zip(points, values, strict=True)]
            axes.errorbar(
                [point.bits for point in points], values, [below, [point.error for point in points]],
                color=colour, marker=marker, linestyle="-" if one.is_joined else "", capsize=3, label=one.name,
            )  # fmt: skip
        found = [point.bits for one in series for point in one.points]
        axes.set(xscale="log", xlim=(min(found) / 1.1, max(found) * 1.1), xlabel=f"{BITS} (logarithmic)")
        axes.set_xticks([tick for tick in TICKS if min(found) / 1.1 < tick < max(found) * 1.1])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        if name == "kl":
            axes.set(yscale="log", ylabel=f"KL to 16 bits (nats per token); {SMALLEST_KL:g} and less drawn there")
        else:
            axes.set(ylabel="accuracy (%), mean over tasks")
        axes.grid(alpha=0.25)
    if shown:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    _save(figure, path)


def rows_series(rows: Iterable[tuple[str, Row]]) -> tuple[list[Series], list[Series]]:
    """KL and accuracy of measured plans (for ``draw_quality``), a series for each name."""
    kl, accuracy = dict[str, list[Point]](), dict[str, list[Point]]()
    for name, row in rows:
        kl.setdefault(name, []).append(Point(row.bits_per_value, row.text.kl, row.text.kl_se or 0.0))
        points = accuracy.setdefault(name, [])
        if row.accuracy is not None:
            points.append(Point(row.bits_per_value, 100 * row.accuracy, 100 * (row.accuracy_se or 0.0)))
    return [Series(*one) for one in kl.items()], [Series(*one) for one in accuracy.items()]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    write_bytes_atomic(path, png.getvalue())


@dataclass(frozen=True)
class Section:
    """``figure``: the file of a picture, which the page holds itself."""

    name: str
    tables: tuple[View, ...]
    figure: Path | None = None
    note: str = ""

    @property
    def png(self) -> str:
        return "" if self.figure is None or not self.figure.is_file() else b64encode(self.figure.read_bytes()).decode()


def write_report(folder: Folder) -> Path:
    """Write report.html of what ``folder`` holds, with its figures bits.png and quality.png, and return its path."""
    from jinja2 import Environment

    plan = load_plan(folder.plan) if folder.plan.is_file() else None
    sections = [*(_plan_sections(folder, plan) if plan else ()), *_measured_sections(folder, plan)]
    if not sections:
        raise ArtifactError(
            f"{folder.path}: nothing to report: no plan, evaluation, comparison or study lies there",
            hint="name the --out of `kvcal run`, `search`, `compare` or `tune`, or DIR/NAME of `kvcal plan`",
        )
    template = Path(__file__).with_name("report.html").read_text()
    title = f"kvcal: {sections[0].tables[0][0]}"
    if plan is not None:
        title = f"{plan.model.id}: {plan.bits_per_value():.2f} bits per cached value"
        facts = {"plan sha256": plan.sha256, **flat("", plan.provenance)}
        rows = [(name, str(value)) for name, value in sorted(facts.items())]
        sections.append(Section("Provenance", (View("The plan was made from", ("", "value"), rows),)))
    page = Environment(autoescape=True).from_string(template).render(title=title, sections=sections)
    write_text_atomic(folder.report, page)
    return folder.report


def _plan_sections(folder: Folder, plan: Plan) -> Iterator[Section]:
    """The plan, its budget, its bits with the profile's sensitivity, what each option costs, and its search."""
    shown = [tables.plan_table(plan, plan.workload, load_damage(folder.plan, plan))]
    try:
        allocation, inputs = allocation_of(plan, folder)
        shown.append(tables.budget_table(allocation))
    except ArtifactError:  # none, or of another plan: the plan by itself is left
        inputs = {}
    yield Section("Plan", tuple(shown))

    sensitivity, choices, note = {}, [], ""
    try:
        found = choices_of(plan, folder)
        choices.append(tables.choices_table(found))
        if "profile.sha256" in inputs:
            profile, indices = load_profile(folder.profile), [p.geometry.index for p in plan.layers if p.is_paged]
            objective: Objective = "sensitivity" if profile.setup.spec.gradients else "kl"
            sensitivity = {
                side: [max(map(sum, profile.losses(objective, i, side).values())) for i in indices] for side in SIDES
            }
    except ArtifactError as refused:
        note = refused.message.replace(f"{folder.path}/", "")
    draw_bits(plan.layers, sensitivity, folder.bits)
    layers = tables.layer_table(plan.layers, plan.cache_dtype, plan.workload)
    yield Section("Bits", (layers, *choices), folder.bits, note)
    if "search.sha256" in inputs and folder.search.is_file():
        yield Section("Search", (tables.search_table(load_search(folder.search).report),))


def _measured_sections(folder: Folder, plan: Plan | None) -> Iterator[Section]:
    """A comparison, or an evaluation; and a study."""
    if (folder.path / COMPARISON).is_file():
        comparison = load_comparison(folder.path / COMPARISON)
        series = rows_series((entry.recipe, row) for entry, row in comparison.measured)
        draw_quality(f"{comparison.model}: quality against size", *series, folder.quality)
        yield Section("Comparison", (tables.comparison_table(comparison),), folder.quality)
    elif folder.evaluation.is_file() and (evaluation := load_evaluation(folder.evaluation)).rows:
        draw_quality("Quality against size", *rows_series((row.name, row) for row in evaluation.rows), folder.quality)
        yield Section("Evaluation", (tables.evaluation_table(evaluation),), folder.quality)
    if (folder.path / STUDY).is_file():
        tuning = load_tuning(folder.path)
        thresholds = None if plan is None else plan.provenance.get("thresholds")
        table = tables.tuned_table(tuning, thresholds, None if plan is None else plan.workload)
        yield Section("Study", (table,))
