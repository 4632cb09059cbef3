"""A study of a plan's score thresholds by Optuna's TPE sampler (Bergstra et al., 2011), accuracy up and
all-in bits down (MixKVQ, App. D).

Callers measure the worth of a setting (``tune.objective``): ``evaluate(thresholds) -> Outcome``. The record
``tune.json`` in the study's folder is all that a study keeps; it is brought up to date after every trial. It is JSON
with sorted keys and a digest, and holds no times: the same trials give the same bytes.

A trial is one setting of the thresholds with its score and its cost, everything counted. The front holds the trials
that no other one beats or equals with as few bits. The choice is the best accuracy among the trials that fit; of equal
ones the one with fewer bits, then the earlier one. The paper chooses from the front: with a cap on bits that is the
same trial, and a cap on bytes means no other thing here.

Trials are drawn in generations of a fixed size: all of one generation are drawn from the finished trials of the
generations before, so that they can run in parallel. Every trial has a sampler of its own, seeded by the study's seed
and the trial's number. So a trial's thresholds are a function of the seed, its number, and the trials before its
generation, and a study that was interrupted, however often, goes on to the bytes of one that was not.

Workers are forked from a server that has imported what they need and used no device: CUDA does not survive a fork, and
a process that imports it all anew takes seconds. Each loads the model for itself, once, and measures one setting after
the other; its outcomes are read in the order of the settings, so that they do not depend on which worker was faster.
Whatever ends the search ends the workers. The ranks of torchrun (kvcal.distributed), on one node or more, are workers,
too: they measure the trials of a generation in turn.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal import distributed
from kvcal.artifact import canonical_json, differing_input
from kvcal.distributed import map_over_ranks
from kvcal.errors import ArtifactError, InfeasibleBudget, UsageError
from kvcal.progress import Reporter
from kvcal.quantities import MAX_SEED, MAX_WORKERS, format_bytes
from kvcal.records import read_json, write_json
from kvcal.strict import STRICT, Amount, Count, Number, NumBytes, Positive, Share, dump

if TYPE_CHECKING:  # Optuna is imported where trials are drawn: a record is read without it
    from optuna.distributions import BaseDistribution
    from optuna.samplers import TPESampler

KIND = "tuning"
SCHEMA = 2


@dataclass(frozen=True, config=STRICT)
class Threshold:
    """One searched threshold: a tier takes the channels whose score is above it. Uniform over [low, high]."""

    name: str
    low: float = 0.1
    high: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"{self.name}: expected 0 <= low < high, not {self.low:g} and {self.high:g}")


@dataclass(frozen=True, config=STRICT)
class Search:
    """The search space. ``num_trials`` may grow from run to run of one study; nothing else may change."""

    thresholds: tuple[Threshold, ...]
    num_trials: Positive = 30
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED)] = 0

    def __post_init__(self) -> None:
        names = [threshold.name for threshold in self.thresholds]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"thresholds {names}: expected at least one, each with its own name")


@dataclass(frozen=True, config=STRICT)
class Outcome:
    """The worth of one setting. ``accuracy``: higher is better; ``bits_per_value`` and ``total_bytes`` count
    everything, at the workload of the search. ``facts``: further figures, such as the shares of the tiers."""

    accuracy: Share
    accuracy_se: Amount | None
    bits_per_value: Amount
    total_bytes: NumBytes
    facts: dict[str, Number]


@dataclass(frozen=True, config=STRICT)
class Trial:
    """``number``: 0, 1, 2, ... in the order in which the search came upon its finished trials."""

    number: Count
    thresholds: dict[str, Number]
    outcome: Outcome


@dataclass(frozen=True, config=STRICT)
class Tuning:
    """A search so far. ``inputs``: what it was made with, flat; ``generation``: how many trials are drawn at once, for
    as many workers. ``front``: numbers of the trials on it, by bits."""

    inputs: dict[str, Any]
    search: Search
    generation: Annotated[int, Field(ge=1, le=MAX_WORKERS)]
    trials: tuple[Trial, ...]
    front: tuple[int, ...]

    def __post_init__(self) -> None:
        ranges = {threshold.name: threshold for threshold in self.search.thresholds}
        for trial in self.trials:
            if trial.thresholds.keys() != ranges.keys() or any(
                not ranges[name].low <= value <= ranges[name].high for name, value in trial.thresholds.items()
            ):
                raise ValueError(f"trial {trial.number} has thresholds outside of the search: {trial.thresholds}")
        if [trial.number for trial in self.trials] != list(range(len(self.trials))):
            raise ValueError("trials are not numbered 0, 1, 2, ...")
        if self.front != pareto_front(self.trials):
            raise ValueError(f"front = {self.front}, expected {pareto_front(self.trials)}")


def pareto_front(trials: Sequence[Trial]) -> tuple[int, ...]:
    """Numbers of the trials that are better than all with as few bits or fewer, from few bits to many; of equal
    trials the first."""
    front: list[Trial] = []
    by_bits = sorted(trials, key=lambda t: (t.outcome.bits_per_value, -t.outcome.accuracy, t.number))
    for trial in by_bits:
        if not front or trial.outcome.accuracy > front[-1].outcome.accuracy:
            front.append(trial)
    return tuple(trial.number for trial in front)


def choose(tuning: Tuning, max_bits: float | None = None, max_bytes: int | None = None) -> Trial:
    """The best accuracy among the trials within both caps (None: no cap).

    Raises:
        UsageError: no trial is finished.
        InfeasibleBudget: no trial fits; says the smallest.
    """
    if not tuning.trials:
        raise UsageError("no trial is finished, there is nothing to choose from")
    bits = math.inf if max_bits is None else max_bits
    nbytes = math.inf if max_bytes is None else max_bytes
    fitting = [t for t in tuning.trials if t.outcome.bits_per_value <= bits and t.outcome.total_bytes <= nbytes]
    if not fitting:
        smallest = min(tuning.trials, key=lambda t: (t.outcome.total_bytes, t.outcome.bits_per_value, t.number)).outcome
        caps = [] if max_bits is None else [f"{max_bits:g} bits"]
        caps += [] if max_bytes is None else [f"{format_bytes(max_bytes)} ({max_bytes} bytes)"]
        raise InfeasibleBudget(
            f"none of {len(tuning.trials)} trials fits {' and '.join(caps)}: the smallest takes "
            f"{smallest.bits_per_value:.4f} bits, {smallest.total_bytes} bytes",
            smallest.total_bytes,
            hint="raise the cap, or search higher thresholds",
        )
    return min(fitting, key=lambda t: (-t.outcome.accuracy, t.outcome.bits_per_value, t.number))


def save_tuning(tuning: Tuning, path: str | Path) -> None:
    """Write the JSON file whole or not at all; ArtifactError when it cannot be written."""
    write_json(path, KIND, SCHEMA, tuning)


def load_tuning(path: str | Path) -> Tuning:
    """Read what ``save_tuning`` wrote. ArtifactError as ``read_json``."""
    hint = "choose another folder, or delete the file and run kvcal tune again"
    return read_json(path, KIND, SCHEMA, Tuning, hint)


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
    import optuna

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
    if distributed.rank() > 0:
        yield
        return
    lock = folder / "tune.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Open for writing, as network drives demand; a finished study may lie where nothing can be written.
        file = lock.open("r" if lock.exists() and not os.access(lock, os.W_OK) else "w")
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
    import optuna
    from optuna.distributions import FloatDistribution

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
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import TPESampler

    digest = hashlib.sha256(canonical_json([seed, number]).encode()).digest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=int.from_bytes(digest[:4], "little"), constant_liar=True)


@contextmanager
def _measuring(evaluate: Evaluate, workers: int) -> Iterator[Measure]:
    """``evaluate`` for many settings: in this process if ``workers`` is 1, else in as many others, which end with the
    context. The calls raise UsageError when a worker dies, and what ``evaluate`` raises."""
    if distributed.size() > 1:
        yield lambda settings: map_over_ranks(settings, evaluate)
        return
    if workers == 1:
        yield partial(map, evaluate)
        return
    context, others = multiprocessing.get_context("forkserver"), set(multiprocessing.active_children())
    context.set_forkserver_preload(["kvcal.stages.tune.objective"])
    with _without_interrupts():
        forkserver.ensure_running()
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


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that begin here ignore Ctrl-C, which reaches all processes, from their first import on: the parent ends
    them. Only a main thread can say so; workers of another one ignore it once they have imported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)


def _start_worker(evaluate: Evaluate, workers: int) -> None:
    global _evaluate
    _evaluate = evaluate
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _end_with_parent() -> None:
    """Ends this worker when its parent has ended, which may have been killed: an idle worker would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _measure(thresholds: Mapping[str, float]) -> Outcome:
    return _evaluate(thresholds)
