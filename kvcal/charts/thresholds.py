"""The trials of a threshold search as one picture: accuracy against all-in bits, the Pareto front and the choice.

Drawn as ``kvcal.charts.evaluation`` does: on matplotlib's Agg canvas without pyplot, with no date and no version in the
file, so that the same search gives the same bytes with the same matplotlib.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from kvcal.artifact import write_bytes_atomic
from kvcal.charts.labels import Label, Mark, place_labels
from kvcal.stages.tune.record import Trial, Tuning

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRONT_COLOUR, CHOICE_COLOUR, TRIAL_COLOUR = "#045a8d", "#c0392b", "#9a9a9a"
# More labels than this on the front cannot be read: those with the fewest bits are kept.
MOST_LABELS = 14


def draw_tuning(tuning: Tuning, path: str | Path, chosen: Trial | None = None, max_bits: float | None = None) -> None:
    """Write the picture, whole or not at all. ``chosen`` is marked, and ``max_bits`` drawn as a line.

    Raises:
        ArtifactError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_trials(axes, tuning, chosen)
    if max_bits is not None:
        axes.axvline(max_bits, color=CHOICE_COLOUR, linestyle=":", linewidth=1, label=f"cap: {max_bits:g} bits")
    names = ", ".join(threshold.name for threshold in tuning.search.thresholds)
    axes.set_title(f"Threshold search: {len(tuning.trials)} trials over {names} (upper left is better)")
    axes.set_xlabel("bits per cached value, everything counted")
    axes.set_ylabel("accuracy (%); bars: 1 standard error")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    figure.draw_without_rendering()
    _label_front(axes, tuning)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    write_bytes_atomic(path, picture.getvalue())


def _draw_trials(axes: Axes, tuning: Tuning, chosen: Trial | None) -> None:
    front = [tuning.trials[number] for number in tuning.front]
    others = [trial for trial in tuning.trials if trial.number not in tuning.front]
    if others:
        axes.plot(*_points(others), "o", color=TRIAL_COLOUR, markersize=5, label="trial")
    if front:
        bits, accuracy = _points(front)
        errors = [100 * (trial.outcome.accuracy_se or 0) for trial in front]
        axes.errorbar(bits, accuracy, yerr=errors, fmt="none", ecolor=FRONT_COLOUR, elinewidth=1, capsize=3)
        axes.plot(
            bits,
            accuracy,
            "o-",
            color=FRONT_COLOUR,
            drawstyle="steps-post",
            linewidth=1,
            markersize=6,
            label="Pareto front",
        )
    if chosen is not None:
        axes.plot(*_points([chosen]), "D", color=CHOICE_COLOUR, markersize=9, label=f"chosen: trial {chosen.number}")


def _label_front(axes: Axes, tuning: Tuning) -> None:
    """Write its thresholds at every point of the front, in the search's order."""
    marks = []
    for trial in tuning.trials:
        error = 100 * (trial.outcome.accuracy_se or 0) if trial.number in tuning.front else 0.0
        marks.append(Mark(trial.outcome.bits_per_value, 100 * trial.outcome.accuracy, error, error))
    names = [threshold.name for threshold in tuning.search.thresholds]
    labels = [
        Label(marks[n], ", ".join(f"{tuning.trials[n].thresholds[name]:.2f}" for name in names), FRONT_COLOUR)
        for n in tuning.front[:MOST_LABELS]
    ]
    place_labels(axes, marks, labels)


def _points(trials: list[Trial]) -> tuple[list[float], list[float]]:
    """(bits, accuracy in %)."""
    return [t.outcome.bits_per_value for t in trials], [100 * t.outcome.accuracy for t in trials]
