"""Fixed widths next to the choice by layer: which are measured, and which plan ships."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import save_llama
from listener import Listener
from transformers import PreTrainedTokenizerBase

from kvcal import Folder, build_plan, load_plan, load_recipe, with_knobs
from kvcal.data.pools import require_unseen
from kvcal.data.sequences import DataSpec
from kvcal.errors import ArtifactError, UsageError
from kvcal.folder import Job, sequences
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import Plan, save_plan
from kvcal.progress import SILENT
from kvcal.recipe import Recipe
from kvcal.stages.allocate import fixed_widths
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.allocate.fixed_widths import (
    Contest,
    compared,
    contest_data,
    fixed_allocations,
    other_allocations,
    report_of,
    width_pairs,
)
from kvcal.stages.allocate.record import BY_LAW, COMPETED, PROGRAM, Allocation, layer_bytes
from kvcal.stages.allocate.stage import choices_of, read_choices, reasons_of
from kvcal.stages.divergence import Text
from kvcal.stages.profile import record as profile_record
from kvcal.systems.basis.rotated import DISTORTION


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    folder = save_llama(tmp_path_factory.mktemp("widths") / "tiny", tokenizer, num_layers=3, head_dim=64)
    return load(str(folder), dtype="float32", device="cpu")


def short(bits: float, **knobs: object) -> Recipe:
    texts = {"data.source": "tasks", "data.num_samples": 4, "data.seq_len": 400, "data.min_len": 0}
    texts |= {"profile.kl_samples": 2, "profile.kl_tokens": 400}
    texts |= {"basis.num_samples": 2, "basis.seq_len": 400, "allocate.bits": bits}
    return with_knobs(load_recipe("default"), texts | knobs)


@pytest.fixture(scope="module")
def made(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, Plan]:
    folder = Folder.create(tmp_path_factory.mktemp("made"))
    return folder, build_plan(model, folder, short(3.5))


def test_one_side_has_one_width_and_the_other_two_neighbours() -> None:
    pairs = [(one["k"], one["v"]) for one in width_pairs((1, 2, 3, 4, 8, 16))]
    assert ((2, 3), (2,)) in pairs and ((3,), (2, 3)) in pairs and ((3, 4), (2,)) in pairs and ((4,), (2, 3)) in pairs
    assert len(set(pairs)) == len(pairs)
    for k, v in pairs:
        assert {len(k), len(v)} == {1, 2} and max(v) <= min(k) and max(k) - min(v) <= 2


def widths(layers: tuple, side: str) -> set[int]:
    return {layer.format(side).num_bits for layer in layers}


def test_plans_of_fixed_widths_take_the_bytes_of_the_budget(model: LoadedModel, made: tuple[Folder, Plan]) -> None:
    folder, _ = made
    program, profile = allocation_record.load(folder.allocation)[0], profile_record.load(folder.profile)
    spec = short(3.5).allocate
    assert spec is not None
    found = fixed_allocations(program, profile, spec, program.split.reserved)
    assert found and PROGRAM not in found
    allowed = {f"keys {' or '.join(map(str, one['k']))}, values {' or '.join(map(str, one['v']))}": one
               for one in width_pairs((2, 3, 4, 8))}  # fmt: skip
    for name, allocation in found.items():
        assert widths(allocation.layers, "k") <= set(allowed[name]["k"])
        assert widths(allocation.layers, "v") <= set(allowed[name]["v"])
        assert allocation.split.cache <= allocation.split.for_cache - allocation.split.reserved
        wider = max(allocation.split.paged, program.split.paged)
        assert allocation.split.paged > 0.8 * wider  # three layers: a step is a sixth of a bit
        most = {side: max(widths) for side, widths in allowed[name].items()}
        assert in_bits(program, most).split.paged > program.split.paged
    choices = [program.layers, *(one.layers for one in found.values())]
    assert all(one not in choices[:number] for number, one in enumerate(choices))


def in_bits(allocation: Allocation, bits: dict[str, int]) -> Allocation:
    """With keys and values of so many bits in all layers."""
    layers = tuple(
        replace(layer, **{side: replace(layer.format(side), num_bits=bits[side]) for side in ("k", "v")})
        for layer in allocation.layers
    )
    paged = layer_bytes(layers, allocation.cache_dtype, allocation.workload)[1]
    return replace(allocation, layers=layers, split=replace(allocation.split, paged=paged))


def test_a_choice_that_two_pairs_of_widths_lead_to_is_measured_once(made: tuple[Folder, Plan]) -> None:
    """Bytes of K3V2 in all layers: keys 3 and values 2 or 3, and keys 3 or 4 and values 2."""
    folder, _ = made
    program, profile = allocation_record.load(folder.allocation)[0], profile_record.load(folder.profile)
    of_both = in_bits(program, {"k": 3, "v": 2})
    spec = short(3.5, **{"allocate.bits": None, "allocate.kv_budget": f"{of_both.split.cache}B"}).allocate
    assert spec is not None
    found = fixed_allocations(replace(program, split=of_both.split), profile, spec, 0)
    assert [one.layers for one in found.values()].count(of_both.layers) == 1


def test_the_texts_are_those_of_the_recipe_and_as_many_that_look_up(
    model: LoadedModel, made: tuple[Folder, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fixed_widths, "job_sequences",
        lambda job, spec, purpose: (*spec.sources, spec.num_samples, spec.seq_len, spec.min_len, purpose),
    )  # fmt: skip

    def read(loaded: LoadedModel, *sources: str, **knobs: object) -> list[tuple[object, ...]]:
        job = Job(short(3.5, **{"data.source": list(sources)} | knobs), loaded, made[0], SILENT)
        return [tuple(getattr(one, "name", one) for one in data) for data in Contest.of(job).data]

    many: dict[str, object] = {"data.num_samples": 16, "data.seq_len": 1024, "data.min_len": 512}
    on_a_cpu = ("lookups", 6, 1024, 1024, "select")
    assert read(model, "python:docs", "lookups", **many) == [("python:docs", 3, 1024, 512, "select"), on_a_cpu]
    assert read(model, "lookups", **many) == [on_a_cpu]
    thorough = many | {"profile.kl_measured": "all"}
    long = ("lookups", 16, 4096, 4096, "select")
    monkeypatch.setattr(LoadedModel, "max_context", None)
    assert read(model, "python:docs", "lookups", **thorough) == [("python:docs", 8, 4096, 512, "select"), long]
    monkeypatch.setattr(LoadedModel, "max_context", 2048)
    assert read(model, "lookups", **thorough) == [("lookups", 16, 2048, 2048, "select")]
    assert read(replace(model, source="reasoner-10m"), "tasks") == [("tasks", 2, 400, 0, "select")]


def test_the_texts_hold_no_more_of_the_recipes_sources_than_a_basis_takes() -> None:
    recipe = load_recipe("default")
    assert recipe.basis is not None
    tokens = recipe.data.num_samples // 2 * fixed_widths.LONGER * recipe.data.seq_len
    assert tokens <= recipe.basis.num_samples * recipe.basis.seq_len


def test_widths_are_compared_in_whole_pages_with_as_many_tokens_at_16_bits(made: tuple[Folder, Plan]) -> None:
    _, plan = made
    for before, after in zip(plan.layers, fixed_widths.in_pages(plan).layers, strict=True):
        for one, other in ((before.k, after.k), (before.v, after.v)):
            assert (one.num_bits, other.stripe_tokens) == (other.num_bits, 128) and one.stripe_tokens == 16
            assert 2 * one.recent_window + one.stripe_tokens == 2 * other.recent_window + other.stripe_tokens


def test_without_fixed_widths_of_as_many_bytes_the_program_ships_unmeasured(
    made: tuple[Folder, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_widths, "other_allocations", lambda *_: {})
    program = allocation_record.load(made[0].allocation)[0]
    assert Contest(None, None, ()).decided(program, None, None, 0, SILENT) is program  # type: ignore[arg-type]


def test_where_no_text_reads_from_a_page_the_program_ships_and_it_is_said(
    model: LoadedModel, made: tuple[Folder, Plan]
) -> None:
    folder, listener = made[0], Listener()
    program, profile = allocation_record.load(folder.allocation)[0], profile_record.load(folder.profile)
    spec = short(3.5).allocate
    assert spec is not None
    short_texts = sequences(DataSpec("tasks", 2, 128), model, "select")
    contest = replace(Contest.of(Job(short(3.5), model, folder, SILENT)), data=(short_texts,))
    assert contest.decided(program, profile, spec, 0, listener) is program
    assert ["no text of select reads a quantized page" in said for said in listener.said] == [True]


def texts(count: int, num_tokens: int) -> list[Text]:
    return [
        Text(i, torch.ones(num_tokens, dtype=torch.int64), torch.ones(num_tokens, dtype=torch.bool))
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("of_fixed", "ships"),
    [
        ([[2.0, 2.2, 1.8], [2.0, 2.1, 1.9]], PROGRAM),  # half the KL, far beyond the error
        ([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], PROGRAM),  # no difference
        ([[0.5, 0.6, 0.4], [2.0, 2.1, 1.8]], "fixed"),  # what text gains, look-ups lose
        ([[1.2, 0.5, 2.5], [1.3, 0.4, 2.6]], PROGRAM),  # less, within the error
        ([[0.9, 0.5, 2.0], [0.8, 0.4, 2.6]], "fixed"),  # more, within the error
    ],
)
def test_the_plan_that_is_estimated_to_lose_least_ships_without_a_margin(
    made: tuple[Folder, Plan], of_fixed: list[list[float]], ships: str
) -> None:
    plans = {PROGRAM: made[1], "fixed": made[1]}
    kls = [{PROGRAM: torch.ones(3).double(), "fixed": torch.tensor(kl, dtype=torch.float64)} for kl in of_fixed]
    report = compared(kls, [texts(3, 400), texts(3, 300)], plans)
    assert (report.shipped, report.num_texts, report.num_tokens) == (ships, 6, 400)
    program, fixed = report.plans
    logs = [[-math.log(kl) for kl in part] for part in of_fixed]
    means = [sum(part) / 3 for part in logs]
    errors = [math.sqrt(sum((x - m) ** 2 for x in part) / 2 / 3) for part, m in zip(logs, means, strict=True)]
    assert fixed.ratio == pytest.approx(math.exp(sum(means) / 2))
    assert fixed.log_error == pytest.approx(math.hypot(*errors) / 2, abs=1e-12)
    assert (program.ratio, program.kl, fixed.look_ups) == (None, 1.0, pytest.approx(sum(of_fixed[1]) / 3))


def test_a_plan_without_a_loss_has_a_ratio(made: tuple[Folder, Plan]) -> None:
    kls = [{PROGRAM: torch.ones(2).double(), "fixed": torch.zeros(2).double()}]
    report = compared(kls, [texts(2, 300)], dict.fromkeys((PROGRAM, "fixed"), made[1]))
    assert report.shipped == "fixed" and report.plans[1].ratio == pytest.approx(1 / fixed_widths.LEAST_KL)


def test_of_two_that_the_choice_by_layer_does_not_beat_the_better_one_ships(made: tuple[Folder, Plan]) -> None:
    plans = dict.fromkeys((PROGRAM, "a", "b"), made[1])
    kls = [{PROGRAM: torch.ones(2).double(), "a": torch.full((2,), 0.9).double(), "b": torch.full((2,), 0.8).double()}]
    assert compared(kls, [texts(2, 300)], plans).shipped == "b"


@pytest.mark.parametrize(("by_law", "fixed", "first", "ships"), [
    (0.8, 1.5, BY_LAW, BY_LAW), (1.2, 1.5, PROGRAM, PROGRAM), (0.8, 0.9, BY_LAW, BY_LAW), (0.8, 0.7, BY_LAW, "fixed"),
])  # fmt: skip
def test_the_better_choice_by_layer_meets_fixed_widths(
    made: tuple[Folder, Plan], by_law: float, fixed: float, first: str, ships: str
) -> None:
    kl_of = {PROGRAM: 1.0, BY_LAW: by_law, "fixed": fixed}
    kls = [{name: torch.full((2,), kl).double() for name, kl in kl_of.items()}]
    report = compared(kls, [texts(2, 300)], dict.fromkeys(kl_of, made[1]))
    assert (report.plans[0].name, report.plans[0].ratio, report.shipped) == (first, None, ships)
    assert {one.name for one in report.plans} == set(kl_of)
    assert all(one.ratio == pytest.approx(kl_of[first] / kl_of[one.name]) for one in report.plans[1:])


def test_the_law_of_squared_errors_is_a_choice_of_its_own(made: tuple[Folder, Plan]) -> None:
    folder, _ = made
    program, profile = allocation_record.load(folder.allocation)[0], profile_record.load(folder.profile)
    spec = short(3.5).allocate
    assert spec is not None and profile.setup.spec.kl_measured == "sides"
    lowest = [float(profile.means[f"kl.k.{index}"].result()[0]) for index in range(3)]
    for index in range(3):
        kl = profile.by_law.kl(index, "k")
        torch.testing.assert_close(
            kl, lowest[index] * torch.tensor([DISTORTION[b] / DISTORTION[2] for b in (2, 3, 4, 8)]).double()
        )
    found = other_allocations(program, profile, spec, program.split.reserved)
    choices = [program.layers, *(one.layers for one in found.values())]
    assert all(one not in choices[:number] for number, one in enumerate(choices))


def test_the_plan_says_what_was_measured_on_texts_that_nothing_was_fitted_on(
    model: LoadedModel, made: tuple[Folder, Plan]
) -> None:
    folder, plan = made
    report = report_of(plan)
    assert report is not None and report.plans[0].name in (PROGRAM, BY_LAW) and len(report.plans) > 1
    assert all(one.look_ups is not None and one.look_ups > 0 for one in report.plans)
    assert report_of(load_plan(folder.plan)) == report
    stages = plan.provenance["calibration"]
    assert {"profile", "basis", "allocate.select_0", "allocate.select_1"} <= stages.keys()
    assert stages["allocate.select_1"]["source"] == "lookups" and stages["allocate.select_0"]["purpose"] == "select"
    require_unseen(plan.provenance, sequences(DataSpec("lookups", 2, 400), model, "report"))
    with pytest.raises(UsageError, match="are among those that allocate.select_1 used"):
        selected = sequences(contest_data(short(3.5), model)[1], model, "select")
        require_unseen(plan.provenance, type(selected)(**{**vars(selected), "purpose": "report"}))


def test_fixed_widths_that_win_are_the_plan(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_favour(loaded, plans, texts, reporter, label):
        return {name: torch.full((len(texts),), 1.0 + (name == PROGRAM)).double() for name in plans}

    monkeypatch.setattr(fixed_widths, "measured", in_favour)
    listener = Listener()
    plan = build_plan(model, Folder.create(tmp_path), short(3.5), reporter=listener)
    report = report_of(plan)
    assert report is not None and report.shipped != PROGRAM
    assert any(f"'{report.shipped}' ships" in said for said in listener.said)
    assert [one.bits for one in report.plans if one.name == report.shipped] == [plan.bits_per_value()]
    assert plan.bits_per_value() <= 3.5 and len(widths(plan.layers, "k")) + len(widths(plan.layers, "v")) <= 3
    again = build_plan(model, Folder.create(tmp_path), short(3.5), reporter=listener)
    assert again.sha256 == plan.sha256 and "allocate: allocation.safetensors is current, skipped" in listener.said


@pytest.mark.parametrize("ships", [PROGRAM, BY_LAW, "fixed"])
def test_the_reasons_are_the_costs_that_led_to_the_plan_that_ships(
    ships: str, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_favour(loaded, plans, texts, reporter, label):
        names = {name if name in (PROGRAM, BY_LAW) else "fixed": name for name in plans}
        return {name: torch.full((len(texts),), 1.0 + (name != names[ships])).double() for name in plans}

    def as_by_law(*given):  # of three layers the law chooses alike
        return {BY_LAW: next(iter(fixed_allocations(*given).values()))}

    monkeypatch.setattr(fixed_widths, "measured", in_favour)
    if ships == BY_LAW:
        monkeypatch.setattr(fixed_widths, "other_allocations", as_by_law)
    folder = Folder.create(tmp_path)
    plan = build_plan(model, folder, short(3.2))
    found, profile = choices_of(plan, folder), profile_record.load(folder.profile)
    costs = profile.by_law if ships == BY_LAW else profile
    for index, side in ((0, "K"), (2, "V")):
        told = [one.loss for one in found.options if one.place == f"layer {index} {side}" and one.option != "16"]
        expected = costs.kl(index, "k" if side == "K" else "v").tolist()
        assert [one for one in told if one] == pytest.approx(expected)
    assert found.ships == report_of(plan).shipped and found.of_layer(0).ships == found.ships  # type: ignore[union-attr]
    assert ("as squared errors do" in found.led_to) == (ships == BY_LAW)
    assert ("these widths alone" in found.led_to) == (ships == "fixed")
    file = tmp_path / "kept.safetensors"
    save_plan(plan, file, reasons_of(plan, folder))
    kept = read_choices(file)
    assert kept is not None and (kept.ships, kept.led_to) == (found.ships, found.led_to)


def test_without_the_knob_nothing_is_measured(model: LoadedModel, tmp_path: Path) -> None:
    plan = build_plan(model, Folder.create(tmp_path), short(3.5, **{"allocate.fixed_widths": False}))
    assert report_of(plan) is None
    with pytest.raises(UsageError, match="expected .basis., and no .search."):
        with_knobs(load_recipe("sensitivity"), {"allocate.fixed_widths": True})
    broken = Plan(plan.model, plan.cache_dtype, plan.layers, plan.workload, {COMPETED: {}}, plan.tensors)
    with pytest.raises(ArtifactError, match="fixed_widths"):
        report_of(broken)
