"""The threshold search: what Optuna would do, the same after any interruption; its front, its choice, its files."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import optuna
import pytest

from kvcal.errors import ArtifactError, InfeasibleBudget, UsageError
from kvcal.progress import Silent
from kvcal.stages import tune as tune_module
from kvcal.stages import tune_journal
from kvcal.stages.tune import Files, tune
from kvcal.stages.tune_chart import draw_tuning
from kvcal.stages.tune_record import (
    Outcome,
    Search,
    Threshold,
    Trial,
    Tuning,
    choose,
    load_tuning,
    pareto_front,
    save_tuning,
)

SEARCH = Search((Threshold("tau_16"), Threshold("tau_4")), num_trials=14, seed=7)
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
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=optuna.samplers.TPESampler(seed=7))

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        outcome = Tiers()({name: trial.suggest_float(name, 0.1, 2.0) for name in ("tau_16", "tau_4")})
        return outcome.accuracy, outcome.bits_per_value

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study.optimize(objective, n_trials=14)
    tuning = load_tuning(whole / "tune.json")
    assert [trial.thresholds for trial in tuning.trials] == [trial.params for trial in study.trials]
    found = [(t.outcome.accuracy, t.outcome.bits_per_value) for t in tuning.trials]
    assert found == [tuple(trial.values) for trial in study.trials]
    best = {tuple(trial.values) for trial in study.best_trials}
    assert {found[number] for number in tuning.front} == best
    assert tuning.is_repeatable and tuning.inputs == INPUTS


def interrupt_in_trial(stop_at: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def interrupt(folder: Path, patch: pytest.MonkeyPatch) -> None:
        tune(SEARCH, Tiers(stop_at=stop_at), INPUTS, folder, Silent())

    return interrupt


def interrupt_at(module: object, name: str, nth: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Ctrl-C instead of the ``nth`` call of a function: all before it is on the disk, nothing after."""

    def interrupt(folder: Path, patch: pytest.MonkeyPatch) -> None:
        original, calls = getattr(module, name), []

        def stop(*args: object, **kwargs: object) -> object:
            calls.append(name)
            if len(calls) == nth:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        patch.setattr(module, name, stop)
        tune(SEARCH, Tiers(), INPUTS, folder, Silent())

    return interrupt


WRITES = tune_journal.JournalFileBackend
INTERRUPTIONS = {
    "in the first trial": interrupt_in_trial(1),
    "in a random trial": interrupt_in_trial(4),
    "in a trial of the estimator": interrupt_in_trial(12),
    "before the first sampler is saved": interrupt_at(tune_module, "save_sampler", 1),
    "before a sampler is saved": interrupt_at(tune_module, "save_sampler", 12),
    "before the record is saved": interrupt_at(tune_module, "save_tuning", 11),
    # The journal's writes: 1 study, 2 attributes, and 5 for each trial: begun, 2 thresholds, outcome, finished.
    "between the thresholds of a trial": interrupt_at(WRITES, "append_logs", 3 + 5 * 10 + 3),
    "between begun and drawn": interrupt_at(WRITES, "append_logs", 3 + 5 * 11 + 2),
    "between outcome and end": interrupt_at(WRITES, "append_logs", 3 + 5 * 12 + 5),
    "between the study and its attributes": interrupt_at(WRITES, "append_logs", 3),
}


@pytest.mark.parametrize("where", INTERRUPTIONS)
def test_a_resumed_study_equals_an_uninterrupted_one(where: str, whole: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        INTERRUPTIONS[where](tmp_path, patch)
    evaluate = Tiers()
    tune(SEARCH, evaluate, INPUTS, tmp_path, Silent())
    assert (tmp_path / "tune.json").read_bytes() == (whole / "tune.json").read_bytes()
    assert len(evaluate.seen) <= 14 and (len(evaluate.seen) < 14 or "first" in where or "attributes" in where)


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


def test_a_sampler_seeded_anew_would_diverge(whole: Path, tmp_path: Path) -> None:
    """Why the sampler is kept: with its file replaced by a fresh one of the same seed, other trials follow."""
    with pytest.raises(KeyboardInterrupt):
        tune(SEARCH, Tiers(stop_at=5), INPUTS, tmp_path, Silent())
    tune_journal.save_sampler(tune_journal.new_sampler(SEARCH.seed), 5, tmp_path / "tune.sampler")
    again = tune(SEARCH, Tiers(), INPUTS, tmp_path, Silent())
    expected = load_tuning(whole / "tune.json")
    assert again.trials[:5] == expected.trials[:5]
    assert again.trials[5].thresholds == expected.trials[0].thresholds != expected.trials[5].thresholds


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


def stopped(folder: Path) -> Files:
    with pytest.raises(KeyboardInterrupt):
        tune(SEARCH, Tiers(stop_at=3), INPUTS, folder, Silent())
    return Files(folder)


class Bomb:
    def __reduce__(self) -> tuple:
        return pytest.fail, ("unpickled",)


def test_a_broken_sampler_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    files = stopped(tmp_path)
    data = files.sampler.read_bytes()
    for broken in (
        data[:-1],
        data[:20],
        b"",
        pickle.dumps(Bomb()),
        data.split(b"\n")[0] + b"\n" + pickle.dumps(Bomb()),
    ):
        files.sampler.write_bytes(broken)
        with pytest.raises(ArtifactError, match="tune.sampler is truncated or corrupt"):
            tune(SEARCH, refuse, INPUTS, tmp_path, Silent())
    files.sampler.unlink()
    with pytest.raises(ArtifactError, match="cannot read .*tune.sampler: No such file"):
        tune(SEARCH, refuse, INPUTS, tmp_path, Silent())
    tune_journal.save_sampler(tune_journal.new_sampler(7), 9, files.sampler)
    with pytest.raises(ArtifactError, match="do not belong together: 9 draws, 2 finished and 1 running"):
        tune(SEARCH, refuse, INPUTS, tmp_path, Silent())


def test_a_half_written_entry_is_cut_off(whole: Path, tmp_path: Path) -> None:
    files = stopped(tmp_path)
    with files.journal.open("ab") as journal:
        journal.write(b'{"op_code":6,"trial_id":2,"sta')
    listener = Listener()
    tune(SEARCH, Tiers(), INPUTS, tmp_path, listener)
    assert listener.said[0].startswith("tune: a half-written entry of tune.journal, after ")
    assert (tmp_path / "tune.json").read_bytes() == (whole / "tune.json").read_bytes()


def test_a_broken_journal_is_refused(tmp_path: Path) -> None:
    files = stopped(tmp_path)
    lines = files.journal.read_bytes().splitlines(keepends=True)
    files.journal.write_bytes(b"".join([*lines[:3], b"{nonsense}\n", *lines[3:]]))
    with pytest.raises(ArtifactError, match="tune.journal is corrupt"):
        tune(SEARCH, refuse, INPUTS, tmp_path, Silent())


def test_one_command_at_a_study(tmp_path: Path) -> None:
    def second(thresholds: Mapping[str, float]) -> Outcome:
        with pytest.raises(UsageError, match="another process is at the study"):
            tune(SEARCH, refuse, INPUTS, tmp_path, Silent())
        return Tiers()(thresholds)

    tune(Search(SEARCH.thresholds, 1, 7), second, INPUTS, tmp_path, Silent())
    tune(Search(SEARCH.thresholds, 2, 7), Tiers(), INPUTS, tmp_path, Silent())


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
    """First a serial study that stops in a trial; then workers that fail; then workers that end it; then one more."""
    first = Tiers(stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        tune(SEARCH, first, INPUTS, tmp_path, Silent())
    with pytest.raises(UsageError, match=r"cannot measure \['tau_16', 'tau_4'\]") as error:
        tune(Search(SEARCH.thresholds, 3, 7), refuse, INPUTS, tmp_path, Silent(), workers=2)
    assert error.value.hint == "a hint"
    listener = Listener()
    tuning = tune(SEARCH, Tiers(), INPUTS, tmp_path, listener, workers=2)
    assert listener.steps[-1] == (14, 14, "tune: trials")
    assert not tuning.is_repeatable and len(tuning.trials) == 14
    thresholds = [tuple(trial.thresholds.values()) for trial in tuning.trials]
    assert len(set(thresholds)) == 14  # no two samplers draw the same
    assert thresholds[:3] == [tuple(seen.values()) for seen in first.seen]  # the running one again
    assert all(trial.outcome == Tiers()(trial.thresholds) for trial in tuning.trials)
    one_more = Search(SEARCH.thresholds, 15, 7)
    assert tune(one_more, Tiers(), INPUTS, tmp_path, Silent()).trials[:14] == tuning.trials


def trial(number: int, accuracy: float, bits: float) -> Trial:
    return Trial(number, {"tau": 1.0}, Outcome(accuracy, None, bits, int(100 * bits), {}))


def tuning_of(*values: tuple[float, float]) -> Tuning:
    trials = tuple(trial(number, *value) for number, value in enumerate(values))
    return Tuning(INPUTS, Search((Threshold("tau"),)), True, trials, pareto_front(trials))


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
        lambda: Tuning({}, SEARCH, True, (trial(1, 0.5, 2.0),), (1,)),
        lambda: Tuning({}, SEARCH, True, (trial(0, 0.5, 2.0),), ()),
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
        ('"kind": "tuning"', '"kind": "other"', "is not a tuning of version 1"),
        ("}", "", "truncated or not JSON"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ArtifactError, match=reason):
            load_tuning(path)
    content = json.loads(text)
    content["body"]["front"] = [0]
    content["digest"] = tune_journal.hashlib.sha256(tune_journal.canonical_json(content["body"]).encode()).hexdigest()
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="front = "):
        load_tuning(path)
    with pytest.raises(ArtifactError, match="does not exist"):
        load_tuning(tmp_path / "none.json")


def test_picture(tmp_path: Path) -> None:
    tuning = tuning_of((0.5, 2.2), (0.9, 3.5), (0.7, 2.6), (0.4, 2.9))
    draw_tuning(tuning, tmp_path / "a.png", choose(tuning, max_bits=3), max_bits=3)
    draw_tuning(tuning, tmp_path / "b.png", choose(tuning, max_bits=3), max_bits=3)
    data = (tmp_path / "a.png").read_bytes()
    assert data == (tmp_path / "b.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and width > 800 and height > 400
    draw_tuning(tuning, tmp_path / "b.png")
    assert data != (tmp_path / "b.png").read_bytes()
    draw_tuning(tuning_of(), tmp_path / "empty.png")
    draw_tuning(tuning_of(*((n / 40, 2 + n / 40) for n in range(40))), tmp_path / "many.png")
    assert sorted(os.listdir(tmp_path)) == ["a.png", "b.png", "empty.png", "many.png"]
