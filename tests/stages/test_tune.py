"""The threshold search: what Optuna would do, the same after any interruption; its front, its choice, its files."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import pytest

from kvcal.artifact import canonical_json
from kvcal.errors import ArtifactError, InfeasibleBudget, UsageError
from kvcal.progress import Silent
from kvcal.stages.tune import study as tune_module
from kvcal.stages.tune.study import (
    Outcome,
    Search,
    Threshold,
    Trial,
    Tuning,
    choose,
    load_tuning,
    next_thresholds,
    pareto_front,
    save_tuning,
    tune,
)

SEARCH = Search((Threshold("tau_16"), Threshold("tau_4")), num_trials=14, seed=7)
ONE = Search((Threshold("tau"),))
INPUTS = {"model.weights_sha256": "w", "recipe.sha256": "r", "task.name": "chain"}
# The saliency of 40 channels, as it is in a model: a few are large, most are small.
SCORES = [4.0 / (1 + channel) + 0.02 * channel for channel in range(40)]


@dataclass
class Tiers:
    """What three tiers cost and keep: the mean over channels of 1 - score x the step of the channel's bits. Counts
    its calls, and interrupts the ``stop_at``-th."""

    stop_at: int | None = None
    seen: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, thresholds: Mapping[str, float]) -> Outcome:
        self.seen.append(dict(thresholds))
        if len(self.seen) == self.stop_at:
            raise KeyboardInterrupt
        bits = [16 if s > thresholds["tau_16"] else 4 if s > thresholds["tau_4"] else 2 for s in SCORES]
        kept = [1 - 0.2 * score / (2**b - 1) for score, b in zip(SCORES, bits, strict=True)]
        mean = sum(bits) / len(bits)
        accuracy = round(math.fsum(kept) / len(kept), 3)
        return Outcome(accuracy, 0.01, mean, int(1000 * mean), {"share_16": bits.count(16) / len(bits)})


def refuse(thresholds: Mapping[str, float]) -> Outcome:
    raise UsageError(f"cannot measure {sorted(thresholds)}", hint="a hint")


class Listener(Silent):
    """Keeps what is said and the steps."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[int, int, str]] = []

    def say(self, message: str) -> None:
        self.said.append(message)

    def __call__(self, done: int, total: int, label: str) -> None:
        self.steps.append((done, total, label))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    tune(SEARCH, Tiers(), INPUTS, folder, Silent())
    return folder


def test_trials_are_those_of_optuna_itself(whole: Path) -> None:
    """A study of Optuna's own that is asked and told, with a sampler for each trial."""
    study = optuna.create_study(directions=["maximize", "minimize"])
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for number in range(14):
        seed = int.from_bytes(hashlib.sha256(f"[7,{number}]".encode()).digest()[:4], "little")
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        asked = study.ask()
        outcome = Tiers()({name: asked.suggest_float(name, 0.1, 2.0) for name in ("tau_16", "tau_4")})
        study.tell(asked, (outcome.accuracy, outcome.bits_per_value))
    tuning = load_tuning(whole / "tune.json")
    assert [trial.thresholds for trial in tuning.trials] == [trial.params for trial in study.trials]
    found = [(t.outcome.accuracy, t.outcome.bits_per_value) for t in tuning.trials]
    assert found == [tuple(trial.values) for trial in study.trials]
    best = {tuple(trial.values) for trial in study.best_trials}
    assert {found[number] for number in tuning.front} == best
    assert len(set(found)) > 7 and tuning.inputs == INPUTS | {"optuna": optuna.__version__}


@pytest.mark.parametrize("generation", [1, 3])
def test_a_generation_is_drawn_from_those_before(generation: int) -> None:
    """What came out of a generation's first trials does not change its other ones."""
    for number in range(14):
        few = tuple(trial(n, 0.5 + 0.01 * n, 3 - 0.1 * n, tau_16=0.5, tau_4=0.2 + 0.1 * n) for n in range(number))
        settings = next_thresholds(SEARCH, few, generation)
        assert len(settings) == generation - number % generation
        again = (*few, trial(number, 0.1, 9.0, **settings[0]))
        if len(settings) > 1:
            assert next_thresholds(SEARCH, again, generation) == settings[1:]


@pytest.mark.parametrize("stop_at", range(1, 15))
def test_interrupted_in_any_trial(stop_at: int, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tune(SEARCH, Tiers(stop_at=stop_at), INPUTS, tmp_path, Silent())
    evaluate = Tiers()
    tune(SEARCH, evaluate, INPUTS, tmp_path, Silent())
    assert (tmp_path / "tune.json").read_bytes() == (whole / "tune.json").read_bytes()
    assert len(evaluate.seen) == 14 - (stop_at - 1)


def test_interrupted_before_a_trial_is_saved(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(tuning: Tuning, path: Path) -> None:
        if len(tuning.trials) == 11:
            raise KeyboardInterrupt
        save_tuning(tuning, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tune_module, "save_tuning", interrupt)
        tune(SEARCH, Tiers(), INPUTS, tmp_path, Silent())
    assert len(load_tuning(tmp_path / "tune.json").trials) == 10
    tune(SEARCH, Tiers(), INPUTS, tmp_path, Silent())
    assert (tmp_path / "tune.json").read_bytes() == (whole / "tune.json").read_bytes()


def test_interrupted_many_times(whole: Path, tmp_path: Path) -> None:
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            tune(SEARCH, Tiers(stop_at=3), INPUTS, tmp_path, Silent())
    tune(SEARCH, Tiers(), INPUTS, tmp_path, Silent())
    assert (tmp_path / "tune.json").read_bytes() == (whole / "tune.json").read_bytes()


def test_the_trial_that_was_running_is_run_again_with_its_thresholds(tmp_path: Path) -> None:
    first, second = Tiers(stop_at=5), Tiers()
    listener = Listener()
    with pytest.raises(KeyboardInterrupt):
        tune(SEARCH, first, INPUTS, tmp_path, listener)
    assert listener.said == [
        f"tune: stopped; 4 of 14 trials are kept in {tmp_path}, the same command goes on after them"
    ]
    assert [trial.thresholds for trial in load_tuning(tmp_path / "tune.json").trials] == first.seen[:4]
    tune(SEARCH, second, INPUTS, tmp_path, listener)
    assert second.seen[0] == first.seen[4] and len(second.seen) == 10
    assert listener.said[1] == f"tune: goes on after 4 trials in {tmp_path}"
    assert listener.steps[-1] == (14, 14, "tune: trials")


def test_more_trials_are_those_of_a_longer_study(whole: Path, tmp_path: Path) -> None:
    few = Search(SEARCH.thresholds, num_trials=6, seed=7)
    assert len(tune(few, Tiers(), INPUTS, tmp_path, Silent()).trials) == 6
    evaluate = Tiers()
    tune(SEARCH, evaluate, INPUTS, tmp_path, Silent())
    assert len(evaluate.seen) == 8
    assert (tmp_path / "tune.json").read_bytes() == (whole / "tune.json").read_bytes()
    fewer = tune(few, refuse, INPUTS, tmp_path, Silent())
    assert len(fewer.trials) == 14


def test_another_seed_gives_other_trials(whole: Path, tmp_path: Path) -> None:
    other = tune(Search(SEARCH.thresholds, num_trials=2, seed=8), Tiers(), INPUTS, tmp_path, Silent())
    assert other.trials[0].thresholds != load_tuning(whole / "tune.json").trials[0].thresholds


@pytest.mark.parametrize(
    ("search", "inputs", "field"),
    [
        (SEARCH, INPUTS | {"model.weights_sha256": "x"}, 'model.weights_sha256 is "w", expected "x"'),
        (SEARCH, INPUTS | {"recipe.sha256": "x"}, 'recipe.sha256 is "r", expected "x"'),
        (SEARCH, INPUTS | {"task.name": "times"}, 'task.name is "chain", expected "times"'),
        (Search(SEARCH.thresholds, 14, seed=8), INPUTS, "search.seed is 7, expected 8"),
        (Search((Threshold("tau_16", 0.2), Threshold("tau_4")), 14, 7), INPUTS, "search.thresholds is"),
    ],
)
def test_a_study_of_something_else_is_refused(search: Search, inputs: dict, field: str, whole: Path) -> None:
    with pytest.raises(ArtifactError, match="holds a study of something else") as error:
        tune(search, refuse, inputs, whole, Silent())
    assert field in error.value.message


def test_another_optuna_is_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optuna, "__version__", "99.0.0")
    with pytest.raises(ArtifactError, match="optuna is .*, expected .*99.0.0"):
        tune(SEARCH, refuse, INPUTS, whole, Silent())


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("exploded",)


def test_nothing_in_a_folder_is_ever_unpickled(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as somebody else may have made it, with a pickled sampler that is intact."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        tune(SEARCH, Tiers(stop_at=3), INPUTS, tmp_path, Silent())
    body = pickle.dumps(Bomb())
    digest = hashlib.sha256(body).hexdigest()
    head = f'{{"digest":"{digest}","draws":2,"kind":"sampler"}}\n'
    for path in list(tmp_path.iterdir()):
        if path.name not in ("tune.json", "tune.lock"):
            path.write_bytes(head.encode() + body)
    (tmp_path / "tune.sampler").write_bytes(head.encode() + body)
    tune(SEARCH, Tiers(), INPUTS, tmp_path, Silent())
    assert not (tmp_path / "exploded").exists()
    assert (tmp_path / "tune.json").read_bytes() == (whole / "tune.json").read_bytes()
    for data in (body, head.encode() + body):
        (tmp_path / "tune.json").write_bytes(data)
        with pytest.raises(ArtifactError, match="not JSON"):
            tune(SEARCH, refuse, INPUTS, tmp_path, Silent())
    assert not (tmp_path / "exploded").exists()


def test_one_command_at_a_study(tmp_path: Path) -> None:
    def second(thresholds: Mapping[str, float]) -> Outcome:
        with pytest.raises(UsageError, match="another process is at the study"):
            tune(SEARCH, refuse, INPUTS, tmp_path, Silent())
        return Tiers()(thresholds)

    tune(Search(SEARCH.thresholds, 1, 7), second, INPUTS, tmp_path, Silent())
    tune(Search(SEARCH.thresholds, 2, 7), Tiers(), INPUTS, tmp_path, Silent())


def test_a_finished_study_is_read_where_nothing_can_be_written(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_read_only_disk(path: Path, mode: str = "r", **options: Any) -> Any:
        if set(mode) & set("wax"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, mode, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open", on_a_read_only_disk)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert tune(SEARCH, refuse, INPUTS, whole, Silent()) == load_tuning(whole / "tune.json")
    with pytest.raises(ArtifactError, match="cannot write to .*Read-only file system"):
        tune(SEARCH, refuse, INPUTS, tmp_path, Silent())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write to"):
        tune(SEARCH, refuse, INPUTS, tmp_path / "file", Silent())
    with pytest.raises(UsageError, match="0 workers"):
        tune(SEARCH, refuse, INPUTS, tmp_path, Silent(), workers=0)


def test_optuna_keeps_still(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    tune(Search(SEARCH.thresholds, 2, 7), Tiers(), INPUTS, tmp_path, Silent())
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == optuna.logging.INFO


def test_workers_share_a_study(tmp_path: Path) -> None:
    """Workers that fail, then workers that are stopped, then one process: as in one go by two workers, to the byte."""
    at_once, stopped = tmp_path / "at_once", tmp_path / "stopped"
    listener = Listener()
    tuning = tune(SEARCH, Tiers(), INPUTS, at_once, listener, workers=2)
    assert listener.steps[-1] == (14, 14, "tune: trials")
    thresholds = [tuple(trial.thresholds.values()) for trial in tuning.trials]
    assert tuning.generation == 2 and len(set(thresholds)) == 14  # no two samplers draw the same
    assert all(trial.outcome == Tiers()(trial.thresholds) for trial in tuning.trials)

    with pytest.raises(UsageError, match=r"cannot measure \['tau_16', 'tau_4'\]") as error:
        tune(SEARCH, refuse, INPUTS, stopped, Silent(), workers=2)
    assert error.value.hint == "a hint"
    tune(Search(SEARCH.thresholds, 3, 7), Tiers(), INPUTS, stopped, Silent(), workers=2)
    with pytest.raises(KeyboardInterrupt):
        tune(SEARCH, Tiers(stop_at=3), INPUTS, stopped, Silent())
    with ThreadPoolExecutor(1) as beside:  # which may set no signal's handler
        beside.submit(tune, SEARCH, Tiers(), INPUTS, stopped, listener, workers=4).result()
    assert (stopped / "tune.json").read_bytes() == (at_once / "tune.json").read_bytes()
    assert listener.said[-1] == "tune: this study draws 2 trials at once, more workers would wait"


def die(thresholds: Mapping[str, float]) -> Outcome:
    os._exit(9)


def test_a_worker_that_dies_ends_the_search(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a worker ended before its trial did"):
        tune(SEARCH, die, INPUTS, tmp_path, Silent(), workers=2)


STUDY = """
import sys, time
from kvcal.progress import Silent
from kvcal.stages.tune.study import Search, Threshold, tune

def wait(thresholds=None, seconds=600):
    print("waiting", flush=True)
    time.sleep(seconds)

if __name__ != "__main__":
    if sys.argv[1] == "import":
        wait(seconds=15)  # a worker whose start is interrupted ends when it has imported
else:
    try:
        tune(Search((Threshold("tau"),)), wait, {}, sys.argv[2], Silent(), workers=2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize(("moment", "number"), [("import", signal.SIGINT), ("trial", signal.SIGKILL)])
def test_workers_end_with_the_search(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C while workers import, and a search that is killed while they measure."""
    (tmp_path / "study.py").write_text(STUDY)
    command = [sys.executable, str(tmp_path / "study.py"), moment, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(tune_module.__file__).parents[3])}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as search:
        try:
            assert search.stdout is not None
            assert search.stdout.read(16).count("waiting") == 2  # both workers
            if number == signal.SIGINT:  # as a terminal sends it: to all processes
                os.killpg(search.pid, number)
            else:
                search.send_signal(number)
            errors = search.communicate(timeout=120)[1]  # every process that lives keeps the pipes open
        finally:
            with suppress(ProcessLookupError):
                os.killpg(search.pid, signal.SIGKILL)
    assert search.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in errors


def trial(number: int, accuracy: float, bits: float, **thresholds: float) -> Trial:
    return Trial(number, thresholds or {"tau": 1.0}, Outcome(accuracy, None, bits, int(100 * bits), {}))


def tuning_of(*values: tuple[float, float]) -> Tuning:
    trials = tuple(trial(number, *value) for number, value in enumerate(values))
    return Tuning(INPUTS, Search((Threshold("tau"),)), 1, trials, pareto_front(trials))


def front_by_hand(values: list[tuple[float, float]]) -> list[int]:
    """Not beaten by any other, and not equal to an earlier one; by bits."""
    front = []
    for number, (accuracy, bits) in enumerate(values):
        beaten = any(a >= accuracy and b <= bits and (a, b) != (accuracy, bits) for a, b in values)
        if not beaten and (accuracy, bits) not in values[:number]:
            front.append(number)
    return sorted(front, key=lambda number: values[number][1])


def test_front_against_the_definition() -> None:
    state = 12345
    for _ in range(300):
        values = []
        for _ in range(9):
            state = (1103515245 * state + 12345) % 2**31
            values.append(((state >> 16) % 5 / 4, 2 + (state >> 20) % 4))
        assert list(tuning_of(*values).front) == front_by_hand(values)
    assert pareto_front(()) == ()


def test_choice_is_the_best_that_fits() -> None:
    tuning = tuning_of((0.5, 2.2), (0.9, 3.5), (0.7, 2.6), (0.7, 2.5), (0.6, 2.4), (0.7, 2.5))
    assert choose(tuning).number == 1
    assert choose(tuning, max_bits=3.5).number == 1  # the cap itself fits
    assert choose(tuning, max_bits=3.49).number == 3  # of equals the fewer bits, then the earlier
    assert choose(tuning, max_bytes=245).number == 4
    assert choose(tuning, max_bits=3.5, max_bytes=230).number == 0
    with pytest.raises(
        InfeasibleBudget, match=r"none of 6 trials fits 2 bits and 210 B \(210 bytes\).*2.2000 bits"
    ) as no:
        choose(tuning, max_bits=2, max_bytes=210)
    assert no.value.smallest_bytes == 220
    with pytest.raises(InfeasibleBudget):
        choose(tuning, max_bits=0)
    with pytest.raises(UsageError, match="no trial is finished"):
        choose(tuning_of())


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Threshold("tau", 2.0, 0.1),
        lambda: Threshold("tau", -1.0, 0.1),
        lambda: Search(()),
        lambda: Search((Threshold("tau"), Threshold("tau"))),
        lambda: Search((Threshold("tau"),), num_trials=0),
        lambda: Outcome(math.nan, None, 2.0, 200, {}),
        lambda: Tuning({}, ONE, 1, (trial(1, 0.5, 2.0),), (1,)),
        lambda: Tuning({}, ONE, 1, (trial(0, 0.5, 2.0),), ()),
        lambda: Tuning({}, ONE, 0, (), ()),
        lambda: Tuning({}, ONE, 10**9, (), ()),
        lambda: Tuning({}, ONE, 1, (trial(0, 0.5, 2.0, tau=2.5),), (0,)),
        lambda: Tuning({}, ONE, 1, (trial(0, 0.5, 2.0, sigma=1.0),), (0,)),
        lambda: Search((Threshold("tau"),), seed=2**32 - 1),
    ],
)
def test_impossible_records_are_refused(broken: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        broken()


def test_record_is_read_back_and_refused_when_changed(tmp_path: Path) -> None:
    path, tuning = tmp_path / "tune.json", tuning_of((0.5, 2.25), (0.75, 3.5))
    save_tuning(tuning, path)
    assert load_tuning(path) == tuning
    text = path.read_text()
    for old, new, reason in (
        ("0.75", "0.76", "does not have the digest"),
        ('"kind": "tuning"', '"kind": "other"', "is not a tuning of version 2"),
        ("}", "", "truncated or not JSON"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ArtifactError, match=reason):
            load_tuning(path)
    content = json.loads(text)
    content["body"]["front"] = [0]
    content["digest"] = hashlib.sha256(canonical_json(content["body"]).encode()).hexdigest()
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="front = "):
        load_tuning(path)
    with pytest.raises(ArtifactError, match="does not exist"):
        load_tuning(tmp_path / "none.json")
