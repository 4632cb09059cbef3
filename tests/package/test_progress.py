"""The time that is left of a command, over phases, slow steps, resumed and skipped work."""

from __future__ import annotations

import pytest

from kvcal.progress import Forecast, Pace, Phase, seconds_of_steps

PHASES = [Phase("a", 100.0), Phase("b: ", 50.0, steps=10), Phase("c", 200.0)]


def test_steps_of_one_phase_tell_of_all() -> None:
    forecast = Forecast(PHASES)
    assert forecast.seconds_left(0.0) is None
    assert forecast.step(0, 4, "a", 0.0) and forecast.seconds_left(0.0) is None
    assert not forecast.step(1, 4, "a", 10.0)
    assert forecast.seconds_left(10.0) == pytest.approx(30 + 0.4 * 250)
    assert forecast.seconds_left(15.0) == pytest.approx(25 + 0.4 * 250)  # it counts down


def test_a_slow_step_raises_it_little_by_little_and_its_end_changes_nothing() -> None:
    forecast = Forecast(PHASES)
    forecast.step(0, 4, "a", 0.0)
    forecast.step(1, 4, "a", 10.0)
    told = [forecast.seconds_left(10.0 + since) for since in range(0, 200)]
    steps = [later - before for before, later in zip(told, told[1:], strict=False)]
    assert steps[:9] == pytest.approx([-1.0] * 9)  # as long as the first one took
    assert all(0 < step < 7 for step in steps[11:])
    before = forecast.seconds_left(210.0)
    forecast.step(2, 4, "a", 210.0)
    assert forecast.seconds_left(210.0) == pytest.approx(before)


def test_a_later_phase_goes_at_its_own_rate_from_its_first_steps_on() -> None:
    forecast = Forecast(PHASES)
    forecast.step(0, 4, "a", 0.0)
    forecast.step(4, 4, "a", 100.0)
    assert forecast.seconds_left(100.0) == pytest.approx(250.0)
    assert forecast.step(0, 3, "b: one", 130.0) and forecast.last_seconds == 130.0
    assert forecast.seconds_left(130.0) == pytest.approx(250.0)  # what is between phases is nobody's rate
    told = []
    for done in range(1, 4):  # ten times as slow as expected
        forecast.step(done, 3, "b: one", 130.0 + 50 * done)
        told.append(forecast.seconds_left(130.0 + 50 * done))
    forecast.step(0, 7, "b: two", 280.0)
    assert forecast.seconds_left(280.0) == pytest.approx(told[-1])  # of ten steps, three were taken
    assert told[-1] - 200 * 1.0 > 350 and told[0] < 1.3 * told[-1]
    for done in range(1, 8):
        forecast.step(done, 7, "b: two", 280.0 + 50 * done)
    rate = (100 + 50 * 10 * 0.95) / 150  # about: of both phases
    assert forecast.seconds_left(630.0) == pytest.approx(200 * rate, rel=0.1)


def test_work_of_an_earlier_run_and_skipped_phases_take_no_time() -> None:
    forecast = Forecast(PHASES)
    assert forecast.step(8, 10, "b: one", 0.0)  # "a" is current, and 8 steps were done
    assert forecast.number == 1 and forecast.seconds_left(5.0) is None
    forecast.step(9, 10, "b: one", 5.0)
    assert forecast.seconds_left(5.0) == pytest.approx(5 + 200 * 1.0)
    assert not forecast.step(0, 3, "other work", 6.0) and not forecast.step(0, 4, "a", 6.0)
    assert forecast.number == 1
    forecast.step(0, 2, "c", 10.0)
    forecast.step(2, 2, "c", 210.0)
    assert forecast.seconds_left(300.0) == 0.0


def test_a_label_that_begins_again_takes_its_steps_back() -> None:
    forecast = Forecast([Phase("a", 10.0)])
    forecast.step(0, 10, "a", 0.0)
    forecast.step(5, 10, "a", 5.0)
    forecast.step(0, 10, "a", 6.0)
    assert forecast.seconds_left(6.0) is None
    forecast.step(2, 10, "a", 16.0)
    assert forecast.seconds_left(16.0) == pytest.approx(8 * 8.0)


@pytest.mark.parametrize(("left", "since", "seconds"), [(3, 0, 30), (3, 4, 26), (1, 8, 2), (1, 80, 0), (0, 5, 0)])
def test_the_seconds_of_steps(left: int, since: float, seconds: float) -> None:
    assert seconds_of_steps(Pace(20, 2), 1, left, since) == pytest.approx(seconds)
    assert seconds_of_steps(Pace(), 1, left, since) is None
