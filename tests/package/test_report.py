"""The report: the verdict, the bytes, the layers and what was measured are those of the records; it refers to
nothing outside, and hostile text stays text."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from artifact_subjects import profile, search_result
from report_cases import K3, UNIFORM, V2, attention, evaluation, plan_of, row

from kvcal.data.reading import TuneSpec
from kvcal.errors import ArtifactError
from kvcal.folder import Folder
from kvcal.geometry import StateGeometry
from kvcal.plan.damage import Damage, SideDamage, save_damage
from kvcal.plan.layer import parts_of
from kvcal.plan.plan import LayerPlan, Plan, save_plan
from kvcal.progress import SILENT
from kvcal.quantities import format_kl
from kvcal.records import write_json
from kvcal.report import _cost_units, _costs, dots_of, of_comparison, of_evaluation, write_report
from kvcal.stages import compare
from kvcal.stages.allocate.budget import compile_plan
from kvcal.stages.allocate.record import BudgetSplit, layer_bytes, unbudgeted
from kvcal.stages.allocate.record import save as save_allocation
from kvcal.stages.compare import Comparison, Entry, verdict
from kvcal.stages.evaluate.stage import save_evaluation
from kvcal.stages.search import save as save_search
from kvcal.stages.tune import Outcome, tune

HOSTILE = """</td></title><script>alert("1")</script><img src='http://x.example/a.png' onerror=alert(1)>&amp;"""
LOADS = r"<(script|link|iframe|object|embed|base|form|a|image|use)\b|\s(href|action|srcset|on\w+)=|url\(|@import"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def report(folder: Path) -> str:
    """A page that no browser would load anything for, and that runs nothing."""
    text = write_report(Folder(folder)).read_text()
    assert not re.search(LOADS, text) and POLICY in text
    assert "src=" not in text and "://" not in re.sub(r">[^<]*<", "><", text)  # in text alone, if at all
    return text


def rows_of(text: str) -> list[list[str]]:
    """Cells of all tables."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", text, re.S)
    return [[unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)] for row in rows]


def sections_of(text: str) -> list[str]:
    return re.findall(r'<section id="(\w+)">', text)


def planned(folder: Path, name: str = "m") -> Plan:
    """A plan in a folder with an allocation of fixed formats within a stated budget, and its evaluation."""
    plan = replace(
        UNIFORM, model=replace(UNIFORM.model, id=name), provenance={"recipe": name, "nested": {"key": name, name: 3}}
    )
    allocation = unbudgeted(plan.layers, plan.model, plan.cache_dtype, plan.workload, plan.provenance)
    fixed, paged = layer_bytes(plan.layers, plan.cache_dtype, plan.workload)
    split = BudgetSplit(fixed + paged + 7_000_000, 3_000_000, 1_000_000, fixed, paged, kind="budget")
    paths = Folder(folder)
    save_plan(plan, paths.plan)
    save_allocation(replace(allocation, split=split), {}, paths.allocation)
    save_evaluation(evaluation(row("16-bit", UNIFORM, 1e-7, 8), row(name, plan, 0.05, 6)), paths.evaluation)
    return plan


def searched(folder: Path) -> None:
    result = search_result()
    paths = Folder(folder)
    save_search(result, {}, paths.search)
    save_allocation(
        result.allocation, {"search.sha256": hashlib.sha256(paths.search.read_bytes()).hexdigest()}, paths.allocation
    )
    save_plan(compile_plan(result.allocation, result.allocation.layers, result.plan_tensors), paths.plan)


def compared(folder: Path, name: str = "a-model") -> None:
    entries = tuple(
        Entry(
            n, n.split(" @")[0], "r", bits, bits is None, None, row(n, UNIFORM, kl, correct, 0.01 if kl < 0.05 else 0.0)
        )
        for n, bits, kl, correct in (
            ("16-bit", None, 1e-7, 8),
            ("kivi-2", None, 0.05, 3),
            (f"{name} @ 3", 3.0, 0.01, 7),
        )
    )
    found = Comparison(name, {}, "text", "f", 1, UNIFORM.workload, entries)
    write_json(folder / "compare.json", compare.KIND, compare.SCHEMA, found)


def tuned(folder: Path) -> None:
    outcomes = iter([(0.5, 2.5), (0.75, 3.0), (0.6, 3.5)])

    def measured(thresholds: Mapping[str, float]) -> Outcome:
        accuracy, bits = next(outcomes)
        return Outcome(accuracy, 0.05, bits, int(1e6 * bits), {})

    tuning = tune({"tau_4": (0.1, 9.0)}, TuneSpec(num_trials=3), measured, {}, folder, SILENT)
    save_plan(replace(UNIFORM, provenance={"thresholds": tuning.trials[1].thresholds}), folder / "plan.safetensors")


MAKERS = {"planned": planned, "searched": searched, "compared": compared, "tuned": tuned}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_records_give_equal_bytes_that_stand_alone(name: str, tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        MAKERS[name](folder)
    first, second = (report(tmp_path / one) for one in "ab")
    assert first == second and str(tmp_path) not in first


def test_plan_budget_and_evaluation_state_the_records_figures(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    found = report(tmp_path)
    assert sections_of(found) == ["gain", "lost", "measured", "bytes", "layers", "next", "details"]
    cells = {cells[0]: cells[1:] for cells in rows_of(found)}
    assert cells["budget"][1] == str(plan.predicted_bytes + 7_000_000)
    assert [cells[name][1] for name in ("weights", "workspace", "left over")] == ["3000000", "1000000", "3000000"]
    assert cells["0"][:3] == ["3", "2", "uniform"]
    assert "0.05000 ± 0.01000" in cells["m"] and "6 of 8" in cells["m"]
    assert cells["nested.key"] == ["m"] and cells["plan sha256"] == [plan.sha256]
    assert "allocation.safetensors: nothing was chosen" in found


def test_a_search_has_the_plans_of_all_systems(tmp_path: Path) -> None:
    searched(tmp_path)
    found = report(tmp_path)
    assert "<summary>Search</summary>" in found
    assert ["kitty (ships)", "2.500", "0.2 ± 0.01", "0.25 ± 0.02", "0 ± 0", ""] in rows_of(found)
    assert ["kivi-2", "3.100", "0.4 ± 0.03", "", "", ""] in rows_of(found)
    assert ["b", "", "", "", "", "too slow"] in rows_of(found)


def test_a_comparison_stands_for_its_evaluation(tmp_path: Path) -> None:
    compared(tmp_path)
    save_evaluation(evaluation(row("16-bit", UNIFORM, 1e-7, 8)), Folder(tmp_path).evaluation)
    found = report(tmp_path)
    assert sections_of(found) == ["measured", "next", "details"]
    shown, cells = (cells for cells in rows_of(found) if cells[0] == "a-model @ 3")
    assert cells[1] == "3.750" and "0.01000 ± 0.01000" in cells
    assert shown[1] == "3.75" and "0.010 ± 0.010" in shown and "7 of 8" in shown
    winner = "a-model @ 3: 1/5 of kivi-2's KL at its bytes"
    assert f"<title>a-model: {winner}</title>" in unescape(found) and f">{winner}</h1>" in unescape(found)
    assert "--plan plans/a-model/3/plan.safetensors" in found


def test_a_study_marks_the_chosen_trial(tmp_path: Path) -> None:
    tuned(tmp_path)
    [cells] = [cells for cells in rows_of(report(tmp_path)) if "(chosen)" in cells[0]]
    assert cells[0] == "1 (chosen)" and cells[1:4] == ["75.0 ± 5.0", "3.000", "3 MB"]


@pytest.mark.parametrize("make", [planned, compared])
def test_hostile_names_stay_text(make, tmp_path: Path) -> None:
    make(tmp_path, HOSTILE)
    text = write_report(Folder(tmp_path)).read_text()
    assert HOSTILE in unescape(text) and "<script" not in text and "<img src='http" not in text


def test_an_empty_folder_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nothing to report"):
        write_report(Folder(tmp_path))
    assert not list(tmp_path.iterdir())


MIXED = plan_of(
    LayerPlan(attention(0, window=512)),
    LayerPlan(attention(1), K3, V2),
    LayerPlan(attention(5), replace(K3, num_bits=16, axis="token", group_size=128), V2),
    LayerPlan(StateGeometry(6, 4096)),
)


def damaged(plan: Plan, kl: float, top1: float, worst: tuple[SideDamage, ...] = ()) -> Damage:
    return Damage(plan.sha256, kl, 0.0003, top1, 1024, "tasks: all of them", worst, {})


@pytest.mark.parametrize(
    ("kl", "top1", "level"),
    [
        (0.0025, 0.973, "fine"),
        (0.02, 0.93, "watch"),
        (0.03, 0.99, "watch"),
        (0.2, 0.7, "destroyed"),
        (None, 1, "unchecked"),
    ],
)
def test_the_verdict_and_the_factor_come_first(kl: float | None, top1: float, level: str, tmp_path: Path) -> None:
    """And a plan that destroys the model is not recommended."""
    save_plan(MIXED, Folder(tmp_path).plan)
    if kl is not None:
        worst = (SideDamage(1, "k", 0.15), SideDamage(5, "v", 0.05)) if level == "destroyed" else ()
        save_damage(damaged(MIXED, kl, top1, worst), Folder(tmp_path).plan)
    text = report(tmp_path)
    factor = f"{MIXED.raw_nbytes(MIXED.workload.lengths) / MIXED.predicted_bytes:.1f}× smaller"
    assert f"<title>m: {factor}</title>" in text and f"<h1>{factor}</h1>" in text
    header = text[text.index("<header>") : text.index("</header>")]
    assert re.findall(r'class="verdict (\w+)"', header) == [level] and f"{MIXED.bits_per_value():.2f}" not in header
    assert ("kvcal serve-args" in text) == (level != "destroyed") == ("kvcal plan" not in text)
    assert ("Most by</dt><dd><b>layer 1 K</b><small>KL 0.15 alone; then layer 5 V, KL 0.05 alone" in text) == (
        level == "destroyed"
    )
    assert ("Nothing was measured" in text) == (level == "unchecked")
    assert (">0.0025 ± 0.0003</b>" in text and ">97.3 %</b>" in text) == (level == "fine")


def test_bars_and_parts_are_the_bytes(tmp_path: Path) -> None:
    save_plan(MIXED, Folder(tmp_path).plan)
    text = report(tmp_path)
    raw, total = MIXED.raw_nbytes(MIXED.workload.lengths), MIXED.predicted_bytes
    assert re.findall(r'class="(raw|ours)" style="width:([\d.]+)%', text) == [
        ("raw", "100.00"), ("ours", f"{100 * total / raw:.2f}")
    ]  # fmt: skip
    parts = parts_of(MIXED.layers, "bfloat16", MIXED.workload.lengths, MIXED.workload.context)
    assert sum(parts.values()) == total and {"sliding_windows", "states", "codes"} <= parts.keys()
    stack = dict(re.findall(r'<i class="(\w+)" style="width:([\d.]+)%" title', text))
    assert stack == {name: f"{100 * nbytes / total:.2f}" for name, nbytes in parts.items()}
    assert sum(map(float, stack.values())) == pytest.approx(100, abs=0.1)


def test_every_layer_has_a_cell_for_keys_and_one_for_values(tmp_path: Path) -> None:
    """Sliding layers, 16 bits and states, too; names of formats are told where one points at them."""
    save_plan(MIXED, Folder(tmp_path).plan)
    text = report(tmp_path)
    heat = text[text.index('<div class="layers bits">') : text.index('<section id="next">')]
    cells = re.findall(r'<span class="(\w+)" title="([^"]*)">(\d*)</span>', heat)
    assert [(shade, bits) for shade, _, bits in cells] == [
        ("bounded", "16"), ("bounded", "16"), ("b3", "3"), ("b2", "2"), ("b16", "16"), ("b2", "2"), ("bounded", ""),
        ("bounded", ""),
    ]  # fmt: skip
    assert cells[0][1] == "window of 512 tokens" and cells[2][1] == "3 channel g64" and cells[-1][1] == "state"
    assert re.findall(r"<small>(\d+)</small>", heat) == ["0", "1", "5", "6"]
    styles = text[: text.index("</style>")]
    assert all(f".{shade}" in styles and f"--{shade}:" in styles for shade in ("b1", "b2", "b3", "b4", "b8", "b16"))


def test_the_reach_within_the_budget_is_told_with_weights(tmp_path: Path) -> None:
    """Only with the profile, which knows the vocabulary, where a device holds weights as well."""
    plan = planned(tmp_path)
    assert "Largest batch" not in report(tmp_path)
    allocation = unbudgeted(plan.layers, plan.model, plan.cache_dtype, plan.workload, plan.provenance)
    save_allocation(allocation, {}, Folder(tmp_path).allocation)
    [found] = re.findall(r"Largest batch at 4,096 tokens</dt><dd><s>(\d+) → </s><b>(\d+)</b>", report(tmp_path))
    assert int(found[0]) < int(found[1]) == plan.workload.batch
    [start] = map(int, re.findall(r"Pays from</dt><dd><b>(\d+) tokens", report(tmp_path)))
    takes_less = [plan.nbytes((n,)) < plan.raw_nbytes((n,)) for n in (start - 1, start)]
    assert takes_less == [False, True]


@pytest.mark.parametrize("gradients", [True, False])
def test_costs_are_named_by_what_was_measured(gradients: bool, tmp_path: Path) -> None:
    measured = profile()
    spec = replace(measured.setup.spec, gradients=gradients)
    found = replace(measured, setup=replace(measured.setup, spec=spec))
    plan = plan_of(*(LayerPlan(layer, K3, V2) for layer in measured.setup.layers))
    costs, title = _costs(plan, found)
    lowest = min(spec.kl_bits)
    assert title == (
        "Sensitivity of each layer in its worst candidate (PM-KVQ, Eq. 5)" if gradients
        else f"KL of each layer's keys or values alone, at {lowest} bits"
    )  # fmt: skip
    first = measured.setup.layers[0].index
    kl = max(found.kl(first, "k").tolist()), float(measured.sensitivity(first, "k").sum(0).max())
    assert costs["k"][first] == pytest.approx(kl[gradients])
    units = _cost_units(costs, plan.layers)
    assert len(units) == len(plan.layers) and any(shade == "c5" for unit in units for shade, _, _ in unit.cells)
    nothing = {side: dict.fromkeys(of_side, 0.0) for side, of_side in costs.items()}
    assert _cost_units(nothing, plan.layers) == []


def test_points_lie_on_one_axis_of_kl() -> None:
    rows = [row("16-bit", MIXED, 1e-8, 8), row("kivi-2", UNIFORM, 0.1, None), row("plan", UNIFORM, 0.01, None)]
    found = dots_of(of_evaluation(evaluation(*[replace(one, tasks=()) for one in rows])))
    assert found["ends"] == ["0.01", "1"] and found["columns"] == ["same next token"]
    places = {dot.name: (dot.role, dot.at, dot.low) for dot in found["dots"]}
    assert places == {
        "16-bit": ("rival", 0, 0), "kivi-2": ("rival", pytest.approx(50), pytest.approx(47.7, abs=0.1)),
        "plan": ("kvcal", 0, 0),
    }  # fmt: skip
    assert [format_kl(kl, error) for kl, error in ((0.81, 0.002), (0.0078, 0.01), (5e-5, 1e-5), (0.25, None))] == [
        "0.810 ± 0.002", "0.0078 ± 0.0100", "below 0.0001", "0.25"
    ]  # fmt: skip


def test_plans_of_the_recipe_of_kvcal_plan_are_kvcals_own() -> None:
    entries = tuple(
        Entry(name, name.partition(" @")[0], "r", None, name == "kivi-2", None, row(name, UNIFORM, 0.1, 4))
        for name in ("kivi-2", "default @ 2.5", "default @ 3", "kitty")
    )
    comparison = Comparison("m", {}, "text", "f", 1, UNIFORM.workload, entries)
    roles = {one.name: one.role for one in of_comparison(comparison, verdict(comparison))}
    assert roles == {"kivi-2": "rival", "default @ 2.5": "kvcal", "default @ 3": "kvcal", "kitty": "other"}
