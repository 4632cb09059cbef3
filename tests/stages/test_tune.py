"""The threshold search: a study that goes on, that processes share; its front, its choice, its damaged
journal."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from listener import Listener

from kvcal.data.reading import TuneSpec
from kvcal.errors import ArtifactError, InfeasibleBudget, UsageError
from kvcal.progress import SILENT
from kvcal.stages.tune import FILE, Outcome, Trial, Tuning, choose, load_tuning, tune

RANGES = {"tau_16": (0.1, 2.0), "tau_4": (0.1, 2.0)}
SPEC = TuneSpec(num_trials=6, seed=7)
INPUTS = {"model.weights_sha256": "w", "task.name": "chain"}
# The saliency of 40 channels, as it is in a model: a few are large, most are small.
SCORES = [4.0 / (1 + channel) + 0.02 * channel for channel in range(40)]


class Tiers:
    """The cost and gain of three tiers: the mean over channels of 1 - score x the step of the channel's bits.
    Counts its calls, and interrupts the ``stop_at``-th."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.calls = stop_at, 0

    def __call__(self, thresholds: Mapping[str, float]) -> Outcome:
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        bits = [16 if s > thresholds["tau_16"] else 4 if s > thresholds["tau_4"] else 2 for s in SCORES]
        kept = [1 - 0.2 * score / (2**b - 1) for score, b in zip(SCORES, bits, strict=True)]
        mean = sum(bits) / len(bits)
        return Outcome(round(math.fsum(kept) / len(kept), 3), 0.01, mean, int(1000 * mean), {"n": 1})


def refuse(thresholds: Mapping[str, float]) -> Outcome:
    raise UsageError(f"cannot measure {sorted(thresholds)}", hint="a hint")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    tune(RANGES, SPEC, Tiers(), INPUTS, folder, SILENT)
    return folder


def test_the_same_search_draws_the_same_trials(whole: Path, tmp_path: Path) -> None:
    tuning = load_tuning(whole)
    assert tune(RANGES, SPEC, Tiers(), INPUTS, tmp_path, SILENT) == tuning
    assert [trial.number for trial in tuning.trials] == list(range(6))
    assert all(trial.outcome == Tiers()(trial.thresholds) for trial in tuning.trials)
    assert all(0.1 <= value <= 2.0 for trial in tuning.trials for value in trial.thresholds.values())
    points = [(trial.outcome.bits_per_value, trial.outcome.accuracy) for trial in tuning.trials]
    beaten = {p for p in points for q in points if p != q and q[0] <= p[0] and q[1] >= p[1]}
    assert [points[number] for number in tuning.front] == sorted(set(points) - beaten)
    (tmp_path / "other").mkdir()
    other = tune(RANGES, replace(SPEC, num_trials=2, seed=8), Tiers(), INPUTS, tmp_path / "other", SILENT)
    assert other.trials[0].thresholds != tuning.trials[0].thresholds


@pytest.mark.parametrize("stop_at", [1, 4])
def test_an_interrupted_study_goes_on_after_its_trials(stop_at: int, tmp_path: Path) -> None:
    listener, rest = Listener(), Tiers()
    with pytest.raises(KeyboardInterrupt):
        tune(RANGES, SPEC, Tiers(stop_at), INPUTS, tmp_path, listener)
    assert listener.said == [
        f"tune: stopped; {stop_at - 1} of 6 trials are kept in {tmp_path}, the same command goes on after them"
    ]
    before = load_tuning(tmp_path).trials
    tuning = tune(RANGES, SPEC, rest, INPUTS, tmp_path, listener)
    assert rest.calls == 6 - (stop_at - 1) and tuning.trials[: stop_at - 1] == before
    assert listener.steps[-1] == ("tune: trials", 6, 6)
    assert stop_at == 1 or listener.said[1] == f"tune: goes on after {stop_at - 1} trials in {tmp_path}"
    assert tune(RANGES, SPEC, refuse, INPUTS, tmp_path, SILENT) == tuning  # nothing is left to do
    assert len(tune(RANGES, replace(SPEC, num_trials=7), Tiers(), INPUTS, tmp_path, SILENT).trials) == 7


def test_an_error_keeps_the_trials(tmp_path: Path) -> None:
    tune(RANGES, replace(SPEC, num_trials=2), Tiers(), INPUTS, tmp_path, SILENT)
    with pytest.raises(UsageError, match=r"cannot measure") as error:
        tune(RANGES, SPEC, refuse, INPUTS, tmp_path, SILENT)
    assert error.value.hint == "a hint" and len(load_tuning(tmp_path).trials) == 2


def test_processes_share_a_study(tmp_path: Path) -> None:
    """Threads stand for them: each opens the journal by itself."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: tune(RANGES, SPEC, Tiers(), INPUTS, tmp_path, SILENT), range(2)))
    trials = load_tuning(tmp_path).trials
    assert 6 <= len(trials) <= 7
    assert len({tuple(trial.thresholds.values()) for trial in trials}) == len(trials)  # each draws its own


def test_a_damaged_journal_is_refused(whole: Path, tmp_path: Path) -> None:
    content = (whole / FILE).read_bytes()
    path = tmp_path / FILE
    for damaged in (
        b"[]\n", b"{}\n", b"\xff\n" + content, content.replace(b'"accuracy":', b'"accuracies":'), b"1\n" * 3,
    ):  # fmt: skip
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError):
            tune(RANGES, SPEC, Tiers(), INPUTS, tmp_path, SILENT)
            load_tuning(tmp_path)
    path.write_bytes(content[:-9])  # a full disk cut the last line
    assert tune(RANGES, SPEC, Tiers(), INPUTS, tmp_path, SILENT).trials[:5] == load_tuning(whole).trials[:5]
    with pytest.raises(ArtifactError, match="is missing"):
        load_tuning(tmp_path / "none")


def tuning_of(*points: tuple[float, float]) -> Tuning:
    """(accuracy, bits) of each trial; 1,000 bytes for a bit."""
    outcomes = [Outcome(accuracy, 0.01, bits, int(1000 * bits), {}) for accuracy, bits in points]
    return Tuning({}, tuple(Trial(number, {}, outcome) for number, outcome in enumerate(outcomes)), ())


def test_the_choice_is_the_best_that_fits() -> None:
    tuning = tuning_of((0.5, 2.0), (0.9, 4.0), (0.7, 3.0), (0.7, 2.5), (0.9, 4.0))
    assert choose(tuning).number == 1
    assert choose(tuning, max_bits=3.5).number == 3 == choose(tuning, max_bytes=2500).number
    with pytest.raises(InfeasibleBudget, match="none of 5 trials fits 1 bits and 500 bytes: .* takes 2.0000"):
        choose(tuning, 1, 500)
