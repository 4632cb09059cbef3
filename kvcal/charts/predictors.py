"""The predictors as a picture: what each explains, layer by layer, and what the errors of the cache became."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal.artifact import write_bytes_atomic
from kvcal.plan.format import Side
from kvcal.stages.predictors.record import Finding, PredictorRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDES: tuple[tuple[Side, str, str], ...] = (("k", "keys", "#045a8d"), ("v", "values", "#c0392b"))


def draw_predictors(record: PredictorRecord, path: str | Path) -> None:
    """Write the picture, whole or not at all. ArtifactError when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_explained(left, record)
    _draw_errors(right, record)
    for axes in (left, right):
        axes.set_xlabel("layer")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    write_bytes_atomic(path, picture.getvalue())


def _fitted(findings: Sequence[Finding], side: Side) -> list[Finding]:
    return [finding for finding in findings if finding.side == side and finding.fit is not None]


def _draw_explained(axes: Axes, record: PredictorRecord) -> None:
    """Explained variance on held-out tokens; predictors that are left out are hollow."""
    for side, name, colour in SIDES:
        found = [(f.layer, f.fit.explained, f.is_kept) for f in _fitted(record.findings, side) if f.fit is not None]
        if not found:
            continue
        layers, explained = [item[0] for item in found], [item[1] for item in found]
        axes.plot(layers, explained, "-", color=colour, linewidth=1)
        for is_kept in (True, False):
            chosen = [(layer, value) for layer, value, kept in found if kept == is_kept]
            if chosen:
                axes.plot(
                    *zip(*chosen, strict=True),
                    "o",
                    color=colour,
                    markerfacecolor=colour if is_kept else "white",
                    label=name if is_kept else f"{name}, left out",
                )
    axes.axhline(record.subject.spec.min_explained, color="grey", linestyle=":", linewidth=1)
    axes.set_ylabel("explained variance, held out")
    axes.set_ylim(top=1.0)
    axes.set_title("What a layer's predictor explains")


def _draw_errors(axes: Axes, record: PredictorRecord) -> None:
    """Squared error of what the cache reads back, as a share of the variance, without predictors and with them."""
    for side, name, colour in SIDES:
        fits = [(f.layer, f.fit) for f in _fitted(record.findings, side) if f.fit is not None]
        plain = [(layer, fit.plain_error) for layer, fit in fits if fit.plain_error is not None]
        predicted = [(layer, fit.error) for layer, fit in fits if fit.error is not None]
        if plain and predicted:
            axes.plot(*zip(*plain, strict=True), "o--", color=colour, alpha=0.5, label=f"{name}, without")
            axes.plot(*zip(*predicted, strict=True), "o-", color=colour, label=f"{name}, with predictors")
            axes.set_yscale("log")
    axes.set_ylabel("squared error / variance, held out")
    axes.set_title("What the cache reads back")
