"""A threshold search's memory: Optuna's journal of trials, and the sampler's state beside it.

The journal says which trials were begun, with which thresholds, and what came out; several processes may write to it.
The sampler file says how many trials the sampler has drawn and holds it pickled, written whole or not at all; only an
intact file is unpickled. Unpickling runs code: a study's folder must be one's own.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from kvcal.artifact import canonical_json, write_bytes_atomic
from kvcal.errors import ArtifactError
from kvcal.progress import Reporter
from kvcal.stages.tune_record import Outcome, Search, Trial
from kvcal.strict import dump, parse

STUDY_NAME = "tune"
# Of the two objectives: accuracy, bits.
DIRECTIONS: tuple[Literal["maximize"], Literal["minimize"]] = ("maximize", "minimize")
START_OVER = "choose another folder, or delete the study's if its trials are not needed"


@dataclass(frozen=True)
class Journal:
    """One process's view of a study's trials; Optuna numbers them in the order they were begun."""

    path: Path
    storage: JournalStorage
    study: optuna.Study

    @staticmethod
    def open(path: Path) -> Journal:
        """The study in the file, begun if there is none."""
        storage = JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(storage=storage, study_name=STUDY_NAME, directions=DIRECTIONS, load_if_exists=True)
        return Journal(path, storage, study)

    @property
    def attributes(self) -> dict[str, Any]:
        return self.study.user_attrs

    @property
    def num_begun(self) -> int:
        return len(self.study.get_trials(deepcopy=False))

    @property
    def num_finished(self) -> int:
        return len(self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))

    def draw(self, sampler: TPESampler, search: Search) -> int:
        """Begin a trial with thresholds from ``sampler``; its number."""
        self.study.sampler = sampler
        space: dict[str, BaseDistribution] = {t.name: FloatDistribution(t.low, t.high) for t in search.thresholds}
        return self.study.ask(fixed_distributions=space).number

    def thresholds(self, number: int) -> dict[str, float]:
        return dict(self.study.get_trials(deepcopy=False)[number].params)

    def finish(self, number: int, outcome: Outcome) -> None:
        study_id = self.storage.get_study_id_from_name(STUDY_NAME)
        trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
        self.storage.set_trial_user_attr(trial_id, "outcome", dump(outcome))
        self.study.tell(number, (outcome.accuracy, outcome.bits_per_value))

    def drop(self, number: int) -> None:
        """Forget a trial that was begun: samplers take no notice of it."""
        self.study.tell(number, state=TrialState.FAIL)

    def unfinished(self, search: Search) -> list[int]:
        """Numbers of the trials that were begun with all their thresholds; those without are dropped."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        for trial in running:
            if len(trial.params) < len(search.thresholds):
                self.drop(trial.number)
        return [trial.number for trial in running if len(trial.params) == len(search.thresholds)]

    def trials(self) -> tuple[Trial, ...]:
        """The finished ones. ArtifactError if one holds no outcome."""
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return tuple(
            Trial(
                number,
                dict(trial.params),
                parse(Outcome, trial.user_attrs.get("outcome", {}), f"{self.path}, trial {number}", ArtifactError),
            )
            for number, trial in enumerate(complete)
        )


def mend(journal: Path, reporter: Reporter) -> None:
    """Cut off a last line that was half-written when the machine went down: Optuna would append to it.

    Raises:
        ArtifactError: the file cannot be read, or another line is broken.
    """
    try:
        whole, _, rest = journal.read_bytes().rpartition(b"\n")
        entries = [json.loads(line) for line in whole.splitlines()]
    except OSError as error:
        raise ArtifactError(f"cannot read {journal}: {error.strerror}", "check the folder") from None
    except ValueError as error:
        raise ArtifactError(f"{journal} is corrupt: {error}", START_OVER) from None
    if rest:
        reporter.say(f"tune: a half-written entry of {journal.name}, after {len(entries)} whole ones, is cut off")
        write_bytes_atomic(journal, whole + b"\n" if whole else b"")


def new_sampler(seed: int, is_parallel: bool = False) -> TPESampler:
    """TPE as Optuna sets it up: 10 random trials, then the estimators. In parallel, running trials count as bad
    ones, so that workers do not try the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, constant_liar=is_parallel)


def one_trial_sampler(seed: int, number: int) -> TPESampler:
    """A sampler for one trial alone, for studies with several workers: its numbers depend on ``number``."""
    digest = hashlib.sha256(canonical_json([seed, number]).encode()).digest()
    return new_sampler(int.from_bytes(digest[:4], "little"), is_parallel=True)


def save_sampler(sampler: TPESampler, draws: int, path: Path) -> None:
    """Write the sampler after its ``draws``-th trial; ArtifactError when the system refuses."""
    body = pickle.dumps(sampler)
    head = {"kind": "sampler", "draws": draws, "digest": hashlib.sha256(body).hexdigest()}
    write_bytes_atomic(path, canonical_json(head).encode() + b"\n" + body)


def load_sampler(path: Path) -> tuple[TPESampler, int]:
    """The sampler, and how many trials it has drawn; ArtifactError unless the file is intact."""
    try:
        line, body = path.read_bytes().split(b"\n", 1)
        head = json.loads(line)
        is_intact = head["kind"] == "sampler" and head["digest"] == hashlib.sha256(body).hexdigest()
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}; the study cannot go on", START_OVER) from None
    except (ValueError, KeyError, TypeError):
        is_intact = False
    if not is_intact:
        raise ArtifactError(f"{path} is truncated or corrupt; the study cannot go on", START_OVER)
    return pickle.loads(body), head["draws"]


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna logs every trial to stderr; what matters is told to the reporter."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
