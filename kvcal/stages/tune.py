"""The search of a plan's score thresholds by Optuna's TPE sampler (Bergstra et al., 2011): accuracy on real
tasks, through the plan's packed cache, up, and all-in bits down (MixKVQ, App. D).

A trial is one setting of the thresholds in the key tiers, with its accuracy and its cost, everything counted
at the plan's workload; the paper's bits count key codes alone, and are kept as a fact. Trials are kept in
study.log, a journal of Optuna's (lines of JSON), as soon as they end. An interrupted study goes on after
them. The same command, started several times on one folder, shares the study: each process draws and measures
trials of its own. Each trial's sampler is seeded by the study's seed and the trial's number, so that
processes draw different trials, and one process draws the same ones again. The choice is the best accuracy
among the trials that fit, of equal ones the one with fewer bits. The paper chooses from the Pareto front:
under a cap on bits that is the same trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic.dataclasses import dataclass as pydantic_dataclass

from kvcal.artifact import differing_input, require_file
from kvcal.data.reading import EvaluateSpec, TuneSpec
from kvcal.data.sequences import DataSpec
from kvcal.distributed import gather
from kvcal.errors import ArtifactError, InfeasibleBudget, UsageError
from kvcal.folder import sequences
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import SILENT, Reporter
from kvcal.quantities import MAX_SEED
from kvcal.stages.evaluate.harness import measure_harness, require_lm_eval
from kvcal.stages.evaluate.tasks import mean_accuracy, measure_reading, measure_tasks
from kvcal.strict import STRICT, Amount, Count, Number, NumBytes, Share, dump, parse
from kvcal.systems.kitty.layout import boost_of
from kvcal.systems.mixkvq.tier_capacity import Scores, key_code_bits, measure_scores, score_quantile, with_thresholds

if TYPE_CHECKING:  # Optuna takes a second, and a choice is made without it
    from optuna import Study
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as RunningTrial

# Of all channels of calibration pages: where the search ends when the recipe does not say it.
HIGHEST_SHARE = 0.99
FILE = "study.log"
LABEL = "tune: trials"
# Of the two objectives: accuracy, bits.
DIRECTIONS: tuple[Literal["maximize"], Literal["minimize"]] = ("maximize", "minimize")


@pydantic_dataclass(frozen=True, config=STRICT)
class Outcome:
    """The worth of one setting. ``bits_per_value`` and ``total_bytes`` count everything, at the workload of
    the search. ``facts``: further figures, such as the mean bits of a key's code."""

    accuracy: Share
    accuracy_se: Amount | None
    bits_per_value: Amount
    total_bytes: NumBytes
    facts: dict[str, Number]


@dataclass(frozen=True)
class Trial:
    """``number``: 0, 1, 2, ... of the finished trials, in the order in which they were drawn."""

    number: Count
    thresholds: dict[str, float]
    outcome: Outcome


@dataclass(frozen=True)
class Tuning:
    """A study so far. ``inputs``: what it was made with, flat; ``front``: numbers of the trials on it, by
    bits."""

    inputs: dict[str, Any]
    trials: tuple[Trial, ...]
    front: tuple[int, ...]


def tune(
    ranges: Mapping[str, tuple[float, float]],
    spec: TuneSpec,
    evaluate: Callable[[Mapping[str, float]], Outcome],
    inputs: dict[str, Any],
    folder: Path,
    reporter: Reporter,
) -> Tuning:
    """Run, or go on with, the study in ``folder`` until it has ``spec.num_trials`` finished trials.
    ``ranges``: [low, high] of each threshold, by name. ``inputs`` (flat JSON) must name everything else that
    outcomes depend on: model, recipe, task."""
    import optuna

    searched = {name: list(limits) for name, limits in ranges.items()}
    inputs = inputs | {"search.thresholds": searched, "search.seed": spec.seed, "optuna": optuna.__version__}
    study = _open(folder / FILE, is_new=True)
    if difference := differing_input(inputs, study.user_attrs.get("inputs", inputs)):
        raise ArtifactError(
            f"{folder} holds a study of something else: {difference}",
            hint=f"choose another folder, or delete {FILE} if its trials are not needed",
        )

    def objective(trial: RunningTrial) -> tuple[float, float]:
        seed = (1_000_003 * spec.seed + trial.number) % 2**32
        trial.study.sampler = optuna.samplers.TPESampler(seed=seed)
        thresholds = {name: trial.suggest_float(name, *limits) for name, limits in ranges.items()}
        outcome = evaluate(thresholds)
        trial.set_user_attr("outcome", dump(outcome))
        return outcome.accuracy, outcome.bits_per_value

    def report(study: Study, trial: FrozenTrial) -> None:
        done = len(_finished(study))
        reporter(min(done, spec.num_trials), spec.num_trials, LABEL)
        if done >= spec.num_trials:
            study.stop()

    if "inputs" not in study.user_attrs:
        study.set_user_attr("inputs", inputs)
    if done := len(_finished(study)):
        reporter.say(f"tune: goes on after {done} trials in {folder}")
    try:
        if done < spec.num_trials:
            reporter(done, spec.num_trials, LABEL)
            study.optimize(objective, callbacks=[report])
    finally:
        if (done := len(_finished(study))) < spec.num_trials:
            reporter.say(
                f"tune: stopped; {done} of {spec.num_trials} trials are kept in {folder}, the same command goes on "
                "after them"
            )
    gather(None)  # until all ranks have ended theirs
    return load_tuning(folder)


def load_tuning(folder: Path) -> Tuning:
    """The study in ``folder``. ArtifactError where it is missing or broken."""
    path = folder / FILE
    study = _open(path, is_new=False)
    try:
        finished, inputs = _finished(study), dict(study.user_attrs["inputs"])
        numbers = {trial.number: number for number, trial in enumerate(finished)}
        trials = tuple(
            Trial(number, trial.params, parse(Outcome, trial.user_attrs["outcome"], str(path), ArtifactError))
            for number, trial in enumerate(finished)
        )
        best = {tuple(trial.values): numbers[trial.number] for trial in reversed(study.best_trials)}
        return Tuning(inputs, trials, tuple(sorted(best.values(), key=lambda n: trials[n].outcome.bits_per_value)))
    except (KeyError, TypeError, ValueError) as fault:
        raise _broken(path, fault) from None


def choose(tuning: Tuning, max_bits: float | None = None, max_bytes: int | None = None) -> Trial:
    """The best accuracy among the trials within both caps (None: no cap)."""
    bits = math.inf if max_bits is None else max_bits
    nbytes = math.inf if max_bytes is None else max_bytes
    fitting = [t for t in tuning.trials if t.outcome.bits_per_value <= bits and t.outcome.total_bytes <= nbytes]
    if not fitting:
        smallest = min(tuning.trials, key=lambda t: (t.outcome.total_bytes, t.number)).outcome
        raise InfeasibleBudget(
            f"none of {len(tuning.trials)} trials fits {bits:g} bits and {nbytes:g} bytes: the smallest takes "
            f"{smallest.bits_per_value:.4f} bits, {smallest.total_bytes} bytes",
            smallest.total_bytes,
            hint="raise the cap, or search higher thresholds",
        )
    return min(fitting, key=lambda t: (-t.outcome.accuracy, t.outcome.bits_per_value, t.number))


def _open(path: Path, is_new: bool) -> Study:
    """The study in a journal, which ``is_new`` makes if needed."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it logs every trial to stderr
    require_file(path, ArtifactError)
    try:
        if not is_new and not path.exists():
            raise ArtifactError(f"{path} is missing", hint="`kvcal tune` writes it")
        backend = JournalFileBackend(str(path))
        # A line that a full disk has cut: Optuna would append to it. An empty file is another process's, just
        # begun.
        if (content := path.read_bytes()) and not content.endswith(b"\n"):
            lock = JournalFileSymlinkLock(str(path))
            lock.acquire()  # while no other process writes
            try:
                content = path.read_bytes()
                path.write_bytes(content[: content.rfind(b"\n") + 1])
            finally:
                lock.release()
        storage = JournalStorage(backend)
        if is_new and not storage.get_all_studies():
            # Another process may have made it.
            return optuna.create_study(storage=storage, study_name="tune", directions=DIRECTIONS, load_if_exists=True)
        return optuna.load_study(study_name="tune", storage=storage)
    except OSError as refused:
        raise ArtifactError(f"cannot write to {path}: {refused.strerror}", "check the folder") from None
    except (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as fault:
        raise _broken(path, fault) from None


def _broken(path: Path, fault: Exception) -> ArtifactError:
    text = " ".join(str(fault).split())[:200]
    return ArtifactError(
        f"{path} is corrupt, no study of `kvcal tune`: {type(fault).__name__} {text}",
        hint="choose another folder, or delete the file and run kvcal tune again",
    )


def _finished(study: Study) -> list[FrozenTrial]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def tuned_bits(plan: Plan) -> tuple[int, ...]:
    """Bits of the key tiers that have a threshold, from most to fewest. UsageError where there is none, or
    where pages hold other keys than the model's."""
    paged = [layer for layer in plan.layers if layer.is_paged]
    if moved := [x.geometry.index for x in paged if x.k_pages == "pre" or x.k_rescale or x.k_offset]:
        raise UsageError(
            f"layer {moved[0]} has transforms of its keys; thresholds are searched for plain pages",
            hint="tune a recipe with [formats] alone",
        )
    boosts = (boost_of(layer.format("k")) for layer in paged)
    tiers = [tier for boost in boosts if boost is not None for tier in boost.tiers]
    bits = {tier.num_bits for tier in tiers if tier.above is not None}
    if not bits:
        raise UsageError(
            "no tier of the keys has a threshold, there is nothing to tune",
            hint="give tiers an 'above' in the recipe's k.boost, as recipes/mixkvq.toml does",
        )
    return tuple(sorted(bits, reverse=True))


@dataclass(frozen=True, eq=False)
class TaskObjective:
    """Callable as ``evaluate`` of the study. ``evaluate`` bounds the tasks' lengths and sets the batch;
    ``data``: the calibration pages. UsageError where lm-eval is asked for and not installed, or as
    ``tuned_bits``."""

    loaded: LoadedModel
    plan: Plan
    spec: TuneSpec
    evaluate: EvaluateSpec
    data: DataSpec

    def __post_init__(self) -> None:
        tuned_bits(self.plan)
        if self.tasks.harness_tasks:
            require_lm_eval()

    @property
    def tasks(self) -> EvaluateSpec:
        """The tasks of the search; never with the evaluation's seed, whose problems measure the choice."""
        evaluate, spec = self.evaluate, self.spec
        seed = (evaluate.seed + 1 + spec.seed) % (MAX_SEED + 1)
        return replace(evaluate, tasks=spec.tasks, num_problems=spec.num_problems, seed=seed)

    @cached_property
    def scores(self) -> Scores:
        return measure_scores(self.loaded, self.plan, sequences(self.data, self.loaded), SILENT)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """[low, high]: of a threshold "tau_BITS" for every tier that has one."""
        high = self.spec.high
        if self.spec.fit_range:
            # Three digits: the same on machines whose arithmetic differs.
            high = max(float(f"{score_quantile(self.scores, HIGHEST_SHARE):.3g}"), 2 * self.spec.low)
        return {f"tau_{num_bits}": (self.spec.low, high) for num_bits in tuned_bits(self.plan)}

    def plan_with(self, thresholds: Mapping[str, float]) -> Plan:
        by_bits = {num_bits: thresholds[f"tau_{num_bits}"] for num_bits in tuned_bits(self.plan)}
        return with_thresholds(self.plan, by_bits, self.scores, self.spec.page_share)

    def __call__(self, thresholds: Mapping[str, float]) -> Outcome:
        """Accuracy is the mean over the tasks. Raises what the tasks raise, such as NonFiniteActivations."""
        plan = self.plan_with(thresholds)
        facts = {"key_code_bits": key_code_bits(plan, self.scores)}
        return Outcome(*self.accuracy(plan), plan.bits_per_value(), plan.predicted_bytes, facts)

    def accuracy(self, plan: Plan) -> tuple[float, float]:
        results = measure_tasks(self.loaded, plan, self.tasks, SILENT, "select")
        results += measure_reading(self.loaded, plan, self.tasks, SILENT, "select")
        results += measure_harness(self.loaded, plan, self.tasks, SILENT)
        return mean_accuracy(results)
