"""The search for a plan's score thresholds: Optuna's TPE sampler, accuracy up and all-in bits down (MixKVQ, App. D).

Callers measure what a setting is worth (see tune_objective): ``evaluate(thresholds) -> Outcome``. ``tune.json`` in the
study's folder (see tune_record) is all that a study keeps; it is brought up to date after every trial.

A trial's thresholds are a function of the seed, the trial's number, and the trials before its generation (see
tune_sampler). So a study that was interrupted, however often, goes on to the bytes of one that was not.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna

from kvcal.artifact import differing_input
from kvcal.errors import ArtifactError, UsageError
from kvcal.progress import Reporter
from kvcal.stages.tune.record import Evaluate, Search, Trial, Tuning, load_tuning, pareto_front, save_tuning
from kvcal.stages.tune.sampler import next_thresholds
from kvcal.stages.tune.workers import measuring
from kvcal.strict import dump

LABEL = "tune: trials"
START_OVER = "choose another folder, or delete tune.json if its trials are not needed"


def tune(
    search: Search,
    evaluate: Evaluate,
    inputs: dict[str, Any],
    folder: str | Path,
    reporter: Reporter,
    workers: int = 1,
) -> Tuning:
    """Run, or go on with, the study in ``folder`` until it has ``search.num_trials`` finished trials.

    ``inputs`` (flat JSON) must name everything but the thresholds that outcomes depend on: model, recipe, task. A new
    study draws ``workers`` trials at once, a generation; an old one keeps its own number. With ``workers`` > 1,
    ``evaluate`` is sent to each process.

    Raises:
        ArtifactError: the folder holds a study with other inputs (names the field), or one that is broken, or cannot
            be written to.
        UsageError: ``workers`` < 1, a worker died, or another process is at this study.
        Whatever ``evaluate`` raises; the trials before it are kept.
    """
    if workers < 1:
        raise UsageError(f"{workers} workers, expected 1 or more")
    path = Path(folder) / "tune.json"
    with _alone(path.parent):
        tuning = _opened(path, search, inputs, workers, reporter)
        num_left = search.num_trials - len(tuning.trials)
        try:
            with measuring(evaluate, min(workers, tuning.generation, max(1, num_left))) as measure:
                while (done := len(tuning.trials)) < search.num_trials:
                    reporter(done, search.num_trials, LABEL)
                    settings = next_thresholds(search, tuning.trials, tuning.generation)
                    settings = settings[: search.num_trials - done]
                    for setting, outcome in zip(settings, measure(settings), strict=True):
                        trials = (*tuning.trials, Trial(len(tuning.trials), setting, outcome))
                        tuning = replace(tuning, trials=trials, front=pareto_front(trials))
                        save_tuning(tuning, path)
                reporter(done, search.num_trials, LABEL)
        finally:
            if len(tuning.trials) < search.num_trials:
                reporter.say(
                    f"tune: stopped; {len(tuning.trials)} of {search.num_trials} trials are kept in {folder}, "
                    "the same command goes on after them"
                )
    return tuning


def _opened(path: Path, search: Search, inputs: dict[str, Any], workers: int, reporter: Reporter) -> Tuning:
    """The study, new, or made with the same inputs and the same Optuna."""
    inputs = inputs | {"optuna": optuna.__version__}
    if not path.exists():
        return Tuning(inputs, search, workers, (), ())
    found = load_tuning(path)
    difference = differing_input(_identity(inputs, search), _identity(found.inputs, found.search))
    if difference is not None:
        raise ArtifactError(f"{path.parent} holds a study of something else: {difference}", START_OVER)
    reporter.say(f"tune: goes on after {len(found.trials)} trials in {path.parent}")
    if workers > found.generation:
        reporter.say(f"tune: this study draws {found.generation} trials at once, more workers would wait")
    return replace(found, search=search)


def _identity(inputs: dict[str, Any], search: Search) -> dict[str, Any]:
    """The inputs that must be alike for a study to go on."""
    thresholds = [dump(threshold) for threshold in search.thresholds]
    return inputs | {"search.thresholds": thresholds, "search.seed": search.seed}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One command at a study: a second one would run the first one's trial again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "tune.lock").open("w")
    except OSError as error:
        raise ArtifactError(f"cannot write to {folder}: {error.strerror}", "check the folder") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is at the study in {folder}", hint="wait, or use --workers in one command"
            ) from None
        yield
