"""The trials of a threshold search: accuracy against all-in bits, the Pareto front and the choice."""

from __future__ import annotations

from pathlib import Path

from kvcal.charts import BLUE, RED, Mark, Picture
from kvcal.stages.tune.record import Trial, Tuning

TRIAL_COLOUR = "#9a9a9a"
# More labels than this on the front cannot be read: those with the fewest bits are kept.
MOST_LABELS = 14


def draw_tuning(tuning: Tuning, path: str | Path, chosen: Trial | None = None, max_bits: float | None = None) -> None:
    """Write the picture, whole or not at all. ``chosen`` is marked, and ``max_bits`` drawn as a line.

    Raises:
        ArtifactError: the file cannot be written.
    """
    picture = Picture(9, 5.5)
    panel = picture.panel()
    axes, marks = panel.axes, []
    names = [threshold.name for threshold in tuning.search.thresholds]
    for trial in tuning.trials:
        error = 100 * (trial.outcome.accuracy_se or 0) if trial.number in tuning.front else 0.0
        marks.append(Mark(trial.outcome.bits_per_value, 100 * trial.outcome.accuracy, error, error))
    front = [marks[number] for number in tuning.front]
    others = [mark for number, mark in enumerate(marks) if number not in tuning.front]
    if others:
        axes.plot([m.x for m in others], [m.y for m in others], "o", color=TRIAL_COLOUR, markersize=5, label="trial")
        panel.marks += others
    if front:
        x, y = [mark.x for mark in front], [mark.y for mark in front]
        axes.plot(x, y, "o-", color=BLUE, drawstyle="steps-post", linewidth=1, markersize=6, label="Pareto front")
    for first, last in zip(front, front[1:], strict=False):
        corner = Mark(last.x, first.y)
        panel.lines += [(first, corner), (corner, last)]
    for count, number in enumerate(tuning.front):
        values = ", ".join(f"{tuning.trials[number].thresholds[name]:.2f}" for name in names)
        panel.point(marks[number], BLUE, "o", values if count < MOST_LABELS else "")
    if chosen is not None:
        mark = marks[chosen.number]
        axes.plot(mark.x, mark.y, "D", color=RED, markersize=9, zorder=3, label=f"chosen: trial {chosen.number}")
    if max_bits is not None:
        axes.axvline(max_bits, color=RED, linestyle=":", linewidth=1, label=f"cap: {max_bits:g} bits")
    title = f"Threshold search: {len(tuning.trials)} trials over {', '.join(names)} (upper left is better)"
    panel.frame(title, "bits per cached value, everything counted", "accuracy (%); bars: 1 standard error")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    picture.save(path)
