"""Measured step times: the table, the times that it gives a layer, and searches that it constrains."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcal import artifact
from kvcal.bench.shape import PAIRS, Heads
from kvcal.errors import ArtifactError, UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import RAW, SIDES
from kvcal.plan.plan import Workload
from kvcal.recipe import CacheSpec, KeyChoice, SearchSpec, ValueChoice
from kvcal.stages.search.compositions import RAW_OPTION, OptionTensors, composed_layers, styles_of
from kvcal.stages.search.problem import Choice, Problem, problem_of
from kvcal.stages.search.speed import ByBytes, Measured, Unbounded, is_no_slower, speed_of
from kvcal.stages.search.step_times import (
    KIND,
    SCHEMA,
    StepTime,
    StepTimes,
    load,
    merged,
    save,
    timed_as,
    unquantized,
)
from kvcal.strict import dump

HEADS, WORKLOAD = Heads(2, 64, 4), Workload(2, 1024)
LATTICE = PAIRS["higgs"].layers(HEADS, 3)[1]
TWO, FOUR, UNMEASURED = (PAIRS[name].layers(HEADS, 3)[1] for name in ("2", "4", "3"))
RAW_LAYER = unquantized(TWO)
GEOMETRY = Geometry("llama", "bfloat16", tuple(AttentionGeometry(index, 8, 2, 64, 64) for index in range(3)))


def table(two: float = 4.0, four: float = 6.0, lattice: float = 12.0, raw: float = 10.0) -> StepTimes:
    times = ((TWO, two), (FOUR, four), (LATTICE, lattice), (RAW_LAYER, raw))
    return StepTimes("Test GPU", tuple(StepTime(WORKLOAD, layer, us) for layer, us in times))


def measured(times: StepTimes) -> Measured:
    return Measured(times, "bfloat16", WORKLOAD)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "step-times.safetensors"
    save(table(), {"kvcal": "0"}, path)
    assert load(path) == table()
    first = path.read_bytes()
    save(table(), {"kvcal": "0"}, path)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body["times"].append(body["times"][0]), "holds a layer twice"),
        (lambda body: body["times"].pop(), "holds no 16 bits of its heads"),
        (lambda body: body["times"][0].update(us=0.0), "us = 0.0"),
        (lambda body: body["times"][0].update(us=10**9), "us"),
        (lambda body: body["times"][0]["layer"]["geometry"].update(index=2), "placed as 1"),
        (lambda body: body["times"][0]["layer"].update(k_rescale=True), "placed as 1"),
        (lambda body: body.update(extra=1), "unknown key"),
        (lambda body: body.pop("device"), "missing key"),
    ],
)
def test_other_tables_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    path, body = tmp_path / "t.safetensors", dump(table())
    change(body)
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, {}, body, {}))
    with pytest.raises(ArtifactError, match=message):
        load(path)


def test_of_equal_layers_the_fastest_counts() -> None:
    found = merged("g", [StepTime(WORKLOAD, RAW_LAYER, us) for us in (12.0, 10.0, 11.0)])
    assert [time.us for time in found.times] == [10.0]


def test_the_nearest_workload_counts_and_other_heads_have_none() -> None:
    longer = [StepTime(Workload(8, 32768), layer, us) for layer, us in ((TWO, 40.0), (RAW_LAYER, 250.0))]
    both = StepTimes("g", (*table().times, *longer))
    assert both.at(Workload(1, 4096), TWO)[TWO] == 4.0
    assert both.at(Workload(4, 32768), TWO) == {TWO: 40.0, RAW_LAYER: 250.0}
    wide = PAIRS["2"].layers(Heads(4, 64, 4), 3)[1]
    assert both.at(WORKLOAD, wide) == {}
    geometry = Geometry("llama", "bfloat16", (AttentionGeometry(0, 16, 4, 64, 64),))
    with pytest.raises(UsageError, match="have none for 4 KV heads of 64, 4 query heads each"):
        speed_of("decode", "bfloat16", WORKLOAD, bare_layers(geometry), both)


def test_a_measured_layer_takes_its_time_wherever_it_lies_in_a_model() -> None:
    speed = measured(table())
    moved = replace(TWO, geometry=replace(TWO.attention, index=7), k_rescale=True)
    assert timed_as(moved) == TWO and speed.us(moved) == 4.0
    assert speed.us(LATTICE) == 12.0 and speed.us(unquantized(moved)) == 10.0


def test_what_was_not_measured_takes_its_bytes_at_the_slowest_rate() -> None:
    speed = measured(table())
    nbytes = [layer.nbytes("bfloat16", WORKLOAD.lengths, WORKLOAD.context) for layer in (UNMEASURED, TWO, FOUR)]
    assert speed.us(UNMEASURED) == pytest.approx(nbytes[0] * max(4.0 / nbytes[1], 6.0 / nbytes[2]))
    other = replace(LATTICE, v=TWO.v)
    assert speed.us(other) is None, "decoded first, and not in the table"


def test_heads_with_formats_of_their_own_take_their_share() -> None:
    mixed = replace(TWO, k=(TWO.k[0], FOUR.k[0]), v=(TWO.v[0], FOUR.v[0]))
    assert measured(table()).us(mixed) == pytest.approx((4.0 + 6.0) / 2)


def test_pages_that_are_decoded_first_decode_where_the_table_shows_that_it_pays() -> None:
    slow, fast = measured(table(lattice=12.0)), measured(table(lattice=8.0))
    assert not is_no_slower(slow, [LATTICE]) and is_no_slower(fast, [LATTICE])
    assert is_no_slower(slow, [LATTICE, TWO]), "16 us against 20"
    assert slow.share([LATTICE, TWO]) == pytest.approx(16 / 20)
    assert not is_no_slower(measured(table(two=10.1)), [TWO]) and is_no_slower(measured(table(two=10.0)), [TWO])
    assert not is_no_slower(ByBytes("bfloat16", WORKLOAD), [LATTICE]), "bytes do not tell"
    assert is_no_slower(ByBytes("bfloat16", WORKLOAD), [TWO, FOUR]) and is_no_slower(Unbounded(), [LATTICE])


SPEC = SearchSpec(
    "decode",
    (),
    (KeyChoice(2), KeyChoice(4), KeyChoice(2, "token", lattice_dim=2)),
    (ValueChoice(2), ValueChoice(4), ValueChoice(2, lattice_dim=2)),
)


def problem(times: StepTimes | None, per_head: bool = False, room: int = 10**9) -> Problem:
    styles = {side: styles_of(side, SPEC, CacheSpec(k_recent_window=0, v_recent_window=0), None, ()) for side in SIDES}
    speed = speed_of("decode", "bfloat16", WORKLOAD, bare_layers(GEOMETRY), times)
    return problem_of(GEOMETRY, styles, None, WORKLOAD, room, per_head, speed)


def spec_table(two: float, four: float, lattice: float, raw: float = 10.0) -> StepTimes:
    """Times of the formats of SPEC: each with itself."""
    every = problem_of(
        GEOMETRY,
        {side: styles_of(side, SPEC, CacheSpec(k_recent_window=0, v_recent_window=0), None, ()) for side in SIDES},
        None, WORKLOAD, 10**9, False, Unbounded(),
    )  # fmt: skip
    rows = []
    for number, us in enumerate((two, four, lattice, raw)):
        choice = tuple(number for _ in every.units)
        layers, _ = composed_layers(GEOMETRY, every.chosen(choice), OptionTensors({}, {}))
        rows.append(StepTime(WORKLOAD, timed_as(layers[0]), us))
    return StepTimes("Test GPU", tuple(rows))


def formats(which: Problem, choice: Choice) -> list[tuple[int, bool]]:
    chosen = [row[number].format for row, number in zip(which.options, choice, strict=True)]
    return [(fmt.num_bits, fmt.lattice_dim is not None) for fmt in chosen]


def liking(which: Problem, wanted: tuple[int, bool]) -> list[dict[int, float]]:
    """Losses that want one format everywhere."""
    return [
        {n: float((o.format.num_bits, o.format.lattice_dim is not None) != wanted) for n, o in enumerate(row)}
        for row in which.options
    ]


def test_without_a_table_lattices_are_no_option() -> None:
    assert not any(o.format.lattice_dim for row in problem(None).options for o in row)
    assert any(o.format.lattice_dim for row in problem(spec_table(4, 6, 12)).options for o in row)


@pytest.mark.parametrize("per_head", [False, True])
def test_a_solution_takes_what_is_slow_only_as_far_as_its_step_allows(per_head: bool) -> None:
    """Formats of single heads are never lattices; there 4 bits are the slow ones."""
    slow = (4, False) if per_head else (2, True)
    which = problem(spec_table(4.0, 12.0 if per_head else 6.0, 12.0), per_head)
    choice = which.solve(liking(which, slow))
    assert choice is not None and which.is_allowed(choice)
    assert which.most_us == pytest.approx(30.0) and which.step_us(choice) <= 30.0 + 1e-6
    count = formats(which, choice).count(slow)
    assert count == 2 * len(which.units) // 3, "two layers of 12 us and one of 4 or 6: 28 or 30 of 30"


def test_where_only_16_bits_are_fast_they_are_the_answer() -> None:
    which = problem(spec_table(two=11.0, four=11.0, lattice=12.0))
    choice = which.solve([{n: float(o == RAW_OPTION) for n, o in enumerate(row)} for row in which.options])
    assert choice is not None and all(row[n] == RAW_OPTION for row, n in zip(which.options, choice, strict=True))
    assert which.smallest == which.raw


def test_solutions_are_as_good_as_those_of_every_choice() -> None:
    """Against all choices: never over the time, and close to the best (the price of time is one for all layers)."""
    which = problem(spec_table(two=9.0, four=10.0, lattice=11.0))
    draw, gaps = random.Random(0), []
    for _ in range(6):
        losses = [{n: draw.random() for n in range(len(row))} for row in which.options]
        choice = which.solve(losses)
        assert choice is not None and which.is_allowed(choice)
        best = min(
            sum(loss[n] for loss, n in zip(losses, every, strict=True))
            for every in itertools.product(*(range(len(row)) for row in which.options))
            if which.is_allowed(every)
        )
        gaps.append(sum(loss[n] for loss, n in zip(losses, choice, strict=True)) - best)
    assert min(gaps) < 1e-9 and sum(gaps) / len(gaps) < 0.15


def test_16_bits_are_16_bits() -> None:
    assert LayerPlan(RAW_LAYER.geometry, (RAW,), (RAW,)) == RAW_LAYER
