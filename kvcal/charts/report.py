"""The report of a folder: one page of HTML with the tables and figures of what lies there, that needs no other file.

A part whose artifact is missing is left out. The page states no date and no path: equal artifacts give equal bytes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcal import tables
from kvcal.artifact import write_text_atomic
from kvcal.charts.figures import draw_bits, draw_quality, rows_series, trials_series
from kvcal.console import View
from kvcal.errors import ArtifactError
from kvcal.folder import Folder
from kvcal.plan.damage import load_damage
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Plan, load_plan
from kvcal.recipe import Objective
from kvcal.stages.choices import allocation_of, choices_of
from kvcal.stages.compare import FILE as COMPARISON
from kvcal.stages.compare import load_comparison
from kvcal.stages.evaluate.record import load_evaluation
from kvcal.stages.profile.record import load as load_profile
from kvcal.stages.search.record import load as load_search
from kvcal.stages.tune.study import FILE as STUDY
from kvcal.stages.tune.study import load_tuning
from kvcal.strict import flat


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
    """Write report.html of what ``folder`` holds, with its figures bits.png and quality.png, and return its path.

    Raises:
        ArtifactError: nothing to report, a corrupt artifact, or a file that cannot be written.
    """
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
        sections.append(Section("Provenance", (("The plan was made from", ("", "value"), rows),)))
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
        is_drawn = not folder.evaluation.is_file()  # of a tuned plan that was evaluated, the evaluation is drawn
        if is_drawn:
            draw_quality("Search of thresholds", [], trials_series(tuning, thresholds), folder.quality)
        yield Section("Study", (table,), folder.quality if is_drawn else None)
