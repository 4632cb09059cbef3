"""The search for a plan's score thresholds: Optuna's TPE sampler, accuracy up and all-in bits down (MixKVQ, App. D).

What a setting is worth is the caller's to measure (see tune_objective): ``evaluate(thresholds) -> Outcome``. The study
lives in a folder: the journal of trials and the sampler (see tune_journal), and ``tune.json``, the record with the
Pareto front (see tune_record), brought up to date after every trial.

An interrupted study goes on to exactly the trials that it would have come to. A seed alone does not give that: a
sampler seeded anew draws its first numbers again. So the sampler is saved after every draw, before the trial is run,
and the journal says the rest, wherever the study was cut off:

- as many draws saved as trials finished: a trial in the journal that was begun was drawn by a sampler that is lost.
  It is dropped, and the saved sampler draws the same thresholds again;
- one more draw saved than trials finished: the trial that was begun is run again, with its thresholds.

With several workers (see tune_workers) the trials depend on which worker was faster, and the promise ends for the
study, also if it later goes on with one; unfinished trials are still run again with their thresholds.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import TPESampler

from kvcal.artifact import differing_input
from kvcal.errors import ArtifactError, UsageError
from kvcal.progress import Reporter
from kvcal.stages.tune_journal import (
    START_OVER,
    Journal,
    load_sampler,
    mend,
    new_sampler,
    one_trial_sampler,
    quiet_optuna,
    save_sampler,
)
from kvcal.stages.tune_record import Evaluate, Search, Tuning, pareto_front, save_tuning
from kvcal.stages.tune_workers import run_workers
from kvcal.strict import dump

LABEL = "tune: trials"


@dataclass(frozen=True)
class Files:
    """Where a study is kept."""

    folder: Path

    @property
    def journal(self) -> Path:
        return self.folder / "tune.journal"

    @property
    def sampler(self) -> Path:
        return self.folder / "tune.sampler"

    @property
    def record(self) -> Path:
        return self.folder / "tune.json"

    @property
    def lock(self) -> Path:
        return self.folder / "tune.lock"


def tune(
    search: Search,
    evaluate: Evaluate,
    inputs: dict[str, Any],
    folder: str | Path,
    reporter: Reporter,
    workers: int = 1,
) -> Tuning:
    """Run, or go on with, the study in ``folder`` until it has ``search.num_trials`` finished trials.

    ``inputs`` (flat JSON) must name everything but the thresholds that outcomes depend on: model, recipe, task. With
    ``workers`` > 1 processes, ``evaluate`` is pickled to each.

    Raises:
        ArtifactError: the folder holds a study with other inputs (names the field), or one that is broken, or cannot
            be written to.
        UsageError: ``workers`` < 1, or another process is at this study.
        Whatever ``evaluate`` raises; finished trials are kept.
    """
    if workers < 1:
        raise UsageError(f"{workers} workers, expected 1 or more")
    files = Files(Path(folder))
    with quiet_optuna(), _alone(files):
        journal = _opened(files, search, inputs, reporter)
        if workers > 1:
            journal.study.set_user_attr("is_repeatable", False)

        def save() -> Tuning:
            trials = journal.trials()
            is_repeatable = journal.attributes["is_repeatable"]
            tuning = Tuning(inputs, search, is_repeatable, trials, pareto_front(trials))
            save_tuning(tuning, files.record)
            return tuning

        try:
            if workers > 1:
                run_workers(journal, search, evaluate, workers, lambda done: reporter(done, search.num_trials, LABEL))
            else:
                _run(journal, search, evaluate, files, save, reporter)
        finally:
            tuning = save()
            if len(tuning.trials) < search.num_trials:
                reporter.say(
                    f"tune: stopped; {len(tuning.trials)} of {search.num_trials} trials are kept in {files.folder}, "
                    "the same command goes on after them"
                )
    return tuning


def _run(
    journal: Journal,
    search: Search,
    evaluate: Evaluate,
    files: Files,
    save: Callable[[], Tuning],
    reporter: Reporter,
) -> None:
    """All remaining trials, one after the other."""
    is_repeatable = journal.attributes["is_repeatable"]
    again = journal.unfinished(search)
    if is_repeatable:
        sampler, again = _resumed(journal, files, search, again)
    while (done := journal.num_finished) < search.num_trials:
        reporter(done, search.num_trials, LABEL)
        if again:
            number = again.pop(0)
        elif is_repeatable:
            number = journal.draw(sampler, search)
            save_sampler(sampler, done + 1, files.sampler)
        else:
            number = journal.draw(one_trial_sampler(search.seed, journal.num_begun), search)
        journal.finish(number, evaluate(journal.thresholds(number)))
        save()
    reporter(done, search.num_trials, LABEL)


def _resumed(journal: Journal, files: Files, search: Search, again: list[int]) -> tuple[TPESampler, list[int]]:
    """The sampler after its last saved draw, and the trial to run again; see the module's docstring."""
    done = journal.num_finished
    if done == 0 and not files.sampler.exists():
        sampler, draws = new_sampler(search.seed), 0
    else:
        sampler, draws = load_sampler(files.sampler)
    if draws == done:
        for number in again:
            journal.drop(number)
        return sampler, []
    if draws == done + 1 and len(again) == 1:
        return sampler, again
    raise ArtifactError(
        f"{files.sampler.name} and {files.journal.name} in {files.folder} do not belong together: {draws} draws, "
        f"{done} finished and {len(again)} running trials",
        START_OVER,
    )


def _opened(files: Files, search: Search, inputs: dict[str, Any], reporter: Reporter) -> Journal:
    """The study, new, or made with the same inputs and the same Optuna."""
    if files.journal.exists():
        mend(files.journal, reporter)
    journal = Journal.open(files.journal)
    wanted = inputs | {
        "search.thresholds": [dump(threshold) for threshold in search.thresholds],
        "search.seed": search.seed,
        "optuna": optuna.__version__,
    }
    if journal.num_begun == 0:
        files.sampler.unlink(missing_ok=True)
        journal.study.set_user_attr("inputs", wanted)
        journal.study.set_user_attr("is_repeatable", True)
        return journal
    difference = differing_input(wanted, journal.attributes["inputs"])
    if difference is not None:
        raise ArtifactError(f"{files.folder} holds a study of something else: {difference}", START_OVER)
    reporter.say(f"tune: goes on after {journal.num_finished} trials in {files.folder}")
    return journal


@contextmanager
def _alone(files: Files) -> Iterator[None]:
    """One command at a study: a second one would run the first one's trial again."""
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        file = files.lock.open("w")
    except OSError as error:
        raise ArtifactError(f"cannot write to {files.folder}: {error.strerror}", "check the folder") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is at the study in {files.folder}", hint="wait, or use --workers in one command"
            ) from None
        yield
