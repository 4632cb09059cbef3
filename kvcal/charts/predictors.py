"""The predictors: what each explains, layer by layer, and what the errors of the cache became."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcal.charts import BLUE, RED, Picture
from kvcal.plan.page_format import Side
from kvcal.stages.predictors.record import PredictorRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDES: tuple[tuple[Side, str, str], ...] = (("k", "keys", BLUE), ("v", "values", RED))


def draw_predictors(record: PredictorRecord, path: str | Path) -> None:
    """Write the picture, whole or not at all. ArtifactError when it cannot be written."""
    picture = Picture(11, 4.5)
    left, right = picture.panel(1, 2, 1), picture.panel(1, 2, 2)
    for side, name, colour in SIDES:
        _draw_explained(left.axes, record, side, name, colour)
        _draw_errors(right.axes, record, side, name, colour)
    left.axes.axhline(record.subject.spec.min_explained, color="grey", linestyle=":", linewidth=1)
    left.axes.set_ylim(top=1.0)
    left.frame("What a layer's predictor explains", "layer", "explained variance, held out")
    right.frame("What the cache reads back", "layer", "squared error / variance, held out")
    for panel in (left, right):
        if panel.axes.get_legend_handles_labels()[0]:
            panel.axes.legend(frameon=False)
    picture.save(path)


def _draw_explained(axes: Axes, record: PredictorRecord, side: Side, name: str, colour: str) -> None:
    """Explained variance on held-out tokens; predictors that are left out are hollow."""
    fits = [(f.layer, f.fit.explained, f.is_kept) for f in record.findings if f.side == side and f.fit is not None]
    if fits:
        axes.plot([fit[0] for fit in fits], [fit[1] for fit in fits], "-", color=colour, linewidth=1)
    for is_kept, fill, text in ((True, colour, name), (False, "white", f"{name}, left out")):
        points = [fit[:2] for fit in fits if fit[2] == is_kept]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, markerfacecolor=fill, label=text)


def _draw_errors(axes: Axes, record: PredictorRecord, side: Side, name: str, colour: str) -> None:
    """Squared error of what the cache reads back, as a share of the variance, without predictors and with them."""
    fits = [(finding.layer, finding.fit) for finding in record.findings if finding.side == side and finding.fit]
    plain = [(layer, fit.plain_error) for layer, fit in fits if fit.plain_error is not None]
    predicted = [(layer, fit.error) for layer, fit in fits if fit.error is not None]
    if plain and predicted:
        axes.plot(*zip(*plain, strict=True), "o--", color=colour, alpha=0.5, label=f"{name}, without")
        axes.plot(*zip(*predicted, strict=True), "o-", color=colour, label=f"{name}, with predictors")
        axes.set_yscale("log")
