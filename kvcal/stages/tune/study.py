"""A study of a plan's score thresholds by Optuna's TPE sampler (Bergstra et al., 2011), accuracy up and
all-in bits down (MixKVQ, App. D).

Callers measure the worth of a setting (``tune.objective``): ``evaluate(thresholds) -> Outcome``. The record
(``tune.record``) in the study's folder is all that a study keeps; it is brought up to date after every trial.

Trials are drawn in generations of a fixed size: all of one generation are drawn from the finished trials of the
generations before, so that they can run in parallel. Every trial has a sampler of its own, seeded by the study's seed
and the trial's number. So a trial's thresholds are a function of the seed, its number, and the trials before its
generation, and a study that was interrupted, however often, goes on to the bytes of one that was not.

Workers are spawned, not forked: CUDA does not survive a fork. Each loads the model for itself, once, and measures one
setting after the other; its outcomes are read in the order of the settings, so that they do not depend on which worker
was faster. Whatever ends the search ends the workers. The ranks of torchrun (kvcal.distributed) are workers, too: they
measure the trials of a generation in turn.
"""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import optuna
import torch
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import TPESampler

from kvcal import distributed
from kvcal.artifact import canonical_json, differing_input
from kvcal.distributed import Parcel, in_turn
from kvcal.errors import ArtifactError, UsageError
from kvcal.progress import Reporter
from kvcal.stages.tune.record import Outcome, Search, Trial, Tuning, load_tuning, pareto_front, save_tuning
from kvcal.strict import dump, parse

# Measures the plan with these thresholds, by name.
Evaluate = Callable[[Mapping[str, float]], Outcome]
LABEL = "tune: trials"
# Of the two objectives: accuracy, bits.
DIRECTIONS: tuple[Literal["maximize"], Literal["minimize"]] = ("maximize", "minimize")
_evaluate: Evaluate  # of a worker
# Outcomes of the settings, in their order, each as soon as it is there.
Measure = Callable[[Sequence[Mapping[str, float]]], Iterator[Outcome]]


def tune(
    search: Search, evaluate: Evaluate, inputs: dict[str, Any], folder: str | Path, reporter: Reporter, workers: int = 1
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
            with _measuring(evaluate, min(workers, tuning.generation, max(1, num_left))) as measure:
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
        if distributed.size() > workers:
            reporter.say(f"tune: draws {workers} trials at once, more ranks would wait: --workers draws more")
        return Tuning(inputs, search, workers, (), ())
    tuning = load_tuning(path)
    difference = differing_input(_identity(inputs, search), _identity(tuning.inputs, tuning.search))
    if difference is not None:
        raise ArtifactError(
            f"{path.parent} holds a study of something else: {difference}",
            hint="choose another folder, or delete tune.json if its trials are not needed",
        )
    reporter.say(f"tune: goes on after {len(tuning.trials)} trials in {path.parent}")
    if max(workers, distributed.size()) > tuning.generation:
        reporter.say(f"tune: this study draws {tuning.generation} trials at once, more workers would wait")
    return replace(tuning, search=search)


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


def next_thresholds(search: Search, finished: Sequence[Trial], generation: int) -> list[dict[str, float]]:
    """Thresholds, by name, of the trials after ``finished`` up to the end of their generation of ``generation``
    trials; one or more. The first ones do not depend on how many there are."""
    space: dict[str, BaseDistribution] = {t.name: FloatDistribution(t.low, t.high) for t in search.thresholds}
    first = len(finished) // generation * generation
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # Optuna logs every study to stderr
    try:
        study = optuna.create_study(directions=DIRECTIONS)
        for trial in finished[:first]:
            values = (trial.outcome.accuracy, trial.outcome.bits_per_value)
            study.add_trial(optuna.create_trial(params=dict(trial.thresholds), distributions=space, values=values))
        drawn = []
        for number in range(first, first + generation):
            study.sampler = _sampler(search.seed, number)
            drawn.append(dict(study.ask(fixed_distributions=space).params))
    finally:
        optuna.logging.set_verbosity(verbosity)
    return drawn[len(finished) - first :]


def _sampler(seed: int, number: int) -> TPESampler:
    """TPE as Optuna sets it up: 10 random trials, then the estimators. Trials of the same generation count as bad
    ones, so that no two of them are alike."""
    digest = hashlib.sha256(canonical_json([seed, number]).encode()).digest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=int.from_bytes(digest[:4], "little"), constant_liar=True)


@contextmanager
def _measuring(evaluate: Evaluate, workers: int) -> Iterator[Measure]:
    """``evaluate`` for many settings: in this process if ``workers`` is 1, else in as many others, which end with the
    context. The calls raise UsageError when a worker dies, and what ``evaluate`` raises."""
    if distributed.size() > 1:
        yield partial(_measured_by_ranks, evaluate)
        return
    if workers == 1:
        yield partial(map, evaluate)
        return
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(workers, context, _start_worker, (evaluate, workers))
    try:
        yield partial(executor.map, _measure)
    except BrokenProcessPool:
        raise UsageError(
            "a worker ended before its trial did",
            hint="its error is above; if there is none, it may have run out of memory: use fewer --workers",
        ) from None
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        executor.shutdown(cancel_futures=True)


def _measured_by_ranks(evaluate: Evaluate, settings: Sequence[Mapping[str, float]]) -> Iterator[Outcome]:
    for parcel in in_turn(LABEL, settings, lambda setting: Parcel(dump(evaluate(setting)))):
        yield parse(Outcome, parcel.value, "a rank's trial", ArtifactError)


def _start_worker(evaluate: Evaluate, workers: int) -> None:
    global _evaluate
    _evaluate = evaluate
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the parent ends its workers
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _measure(thresholds: Mapping[str, float]) -> Outcome:
    return _evaluate(thresholds)
