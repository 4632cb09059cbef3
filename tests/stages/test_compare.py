"""The comparison with a stand-in for the pipeline: refused recipes as rows, and what a second run keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_cases import KIVI_2
from compare_cases import BASELINE_NAMES, by_name, write_recipes
from evaluation_cases import Notes, make_plan, text, tiny
from safetensors.torch import save_file

from kvcal.errors import ArtifactError, InfeasibleBudget, KvcalError, UsageError
from kvcal.folder import Folder
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Format, Plan, Workload
from kvcal.progress import Reporter
from kvcal.recipe import EvaluateSpec, Recipe
from kvcal.stages.compare import Build, compare
from kvcal.stages.compare.record import Comparison, Share, load_comparison, points_of
from kvcal.strict import dump

SPEC = EvaluateSpec(tasks=(), batch=2)
WORKLOAD = Workload(2, 512)
SHRINKING = tuple(Format(2, fmt.axis, 32, param_dtype="float32", shrink_at=(128, 192, 256)) for fmt in KIVI_2)


def build(loaded: LoadedModel, folder: Folder, recipe: Recipe, workload: Workload, reporter: Reporter) -> Plan:
    """Formats of as many bits as the budget; no profile."""
    if recipe.allocate is None:
        assert recipe.formats is not None
        pair = (recipe.formats.k, recipe.formats.v)
    else:
        bits = recipe.allocate.bits
        if bits == 1:
            raise InfeasibleBudget("too small", 1, hint="raise it")
        pair = SHRINKING if bits == 5 else tuple(replace(fmt, num_bits=int(bits or 8)) for fmt in KIVI_2)
    if not folder.plan.exists():
        save_file({"a": torch.tensor([recipe.allocate.bits if recipe.allocate else 0.0])}, folder.plan)
    return replace(make_plan(loaded, pair), workload=workload)


def run(
    folder: Path, names: tuple[str, ...], bits: list[float], notes: Notes | None = None, builder: Build = build,
    loaded: LoadedModel | None = None, workload: Workload = WORKLOAD,
) -> Comparison:  # fmt: skip
    points = points_of(names, bits)
    data, into = text(140, 160), Folder.create(folder)
    return compare(loaded or tiny(), points, workload, SPEC, data, into, builder, notes or Notes())


@pytest.fixture(scope="module")
def small_recipes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_recipes(tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, small_recipes: tuple[str, str]) -> tuple[Path, Comparison]:
    folder = tmp_path_factory.mktemp("first")
    return folder, run(folder, small_recipes, [1, 3])


def test_rows_shares_and_a_refused_recipe(first: tuple[Path, Comparison]) -> None:
    folder, comparison = first
    entries = by_name(comparison)
    assert list(entries) == [*BASELINE_NAMES, "small @ 1", "small @ 3", "fixed"]
    refused = entries["small @ 1"]
    assert refused.row is None and refused.refusal is not None
    assert dump(refused.refusal) == {"stage": "build", "message": "too small", "hint": "raise it", "exit_code": 3}
    rows = {name: row for name, entry in entries.items() if (row := entry.row) is not None}
    assert list(rows) == [*BASELINE_NAMES, "small @ 3", "fixed"] and len(comparison.measured) == 5
    kl = {name: row.text.kl for name, row in rows.items()}
    share = entries["small @ 3"].kl_recovered
    assert share is not None and share.se is not None and share.se > 0
    assert share.value == pytest.approx((kl["kivi-2"] - kl["small @ 3"]) / (kl["kivi-2"] - kl["16-bit"]), rel=1e-12)
    assert entries["16-bit"].kl_recovered == Share(1.0, None) and entries["kivi-2"].kl_recovered == Share(0.0, None)
    assert entries["fixed"].accuracy_recovered is None  # no tasks
    assert all(row.workload == WORKLOAD for row in rows.values())
    assert load_comparison(folder / "compare.json") == comparison
    assert entries["fixed"].calibration.seconds is not None


def test_second_run_keeps_plans_rows_and_times(first: tuple[Path, Comparison], small_recipes: tuple[str, str]) -> None:
    folder, comparison = first
    notes = Notes()
    content = (folder / "compare.json").read_bytes()
    assert run(folder, small_recipes, [1, 3], notes) == comparison
    assert sum("is measured already, kept" in message for message in notes.messages) == 5
    assert (folder / "compare.json").read_bytes() == content


def test_a_recipe_left_out_and_taken_in_again_has_its_time(tmp_path: Path, small_recipes: tuple[str, str]) -> None:
    before = by_name(run(tmp_path, small_recipes, [3]))["fixed"].calibration
    assert list(by_name(run(tmp_path, small_recipes[:1], [3]))) == [*BASELINE_NAMES, "small @ 3"]
    assert by_name(run(tmp_path, small_recipes, [3]))["fixed"].calibration == before
    (tmp_path / "compare.json").unlink()
    assert by_name(run(tmp_path, small_recipes, [3]))["fixed"].calibration.seconds is None


def test_interrupted_run_goes_on(tmp_path: Path, small_recipes: tuple[str, str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, small_recipes, [3], Notes(interrupt_at="compare: fixed"))
    stored = load_comparison(tmp_path / "compare.json")
    assert list(by_name(stored)) == [*BASELINE_NAMES, "small @ 3"] and stored.measured == ()
    done = run(tmp_path, small_recipes, [3])
    assert len(done.measured) == 5
    assert by_name(done)["small @ 3"].calibration.seconds == by_name(stored)["small @ 3"].calibration.seconds


def test_an_interrupted_repetition_keeps_the_rows(
    first: tuple[Path, Comparison], small_recipes: tuple[str, str]
) -> None:
    content = (first[0] / "compare.json").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run(first[0], small_recipes, [1, 3], Notes(interrupt_at="compare: fixed"))
    assert (first[0] / "compare.json").read_bytes() == content


def test_a_plan_that_cannot_be_measured_is_a_row(tmp_path: Path, small_recipes: tuple[str, str]) -> None:
    """Its schedule ends before the texts do; the others are measured, one sequence at a time as it would need."""
    notes = Notes()
    comparison = run(tmp_path, small_recipes, [5], notes, workload=Workload(1, 150))
    entries = by_name(comparison)
    refusal = entries["small @ 5"].refusal
    assert refusal is not None and (refusal.stage, refusal.exit_code) == ("evaluate", 2)
    assert "the plan's pages shrink on a schedule" in refusal.message
    assert [entry.name for entry, _ in comparison.measured] == [*BASELINE_NAMES, "fixed"]
    assert comparison.inputs["evaluate.batch"] == 1
    assert any("evaluate: 1 sequences at a time" in message for message in notes.messages)


def test_a_refused_baseline_ends_the_comparison(tmp_path: Path, small_recipes: tuple[str, str]) -> None:
    def refuse(loaded: LoadedModel, folder: Folder, recipe: Recipe, workload: Workload, reporter: Reporter) -> Plan:
        raise UsageError("not with this model")

    with pytest.raises(KvcalError, match="not with this model"):
        run(tmp_path, small_recipes, [3], builder=refuse)


def test_plans_of_one_recipe_share_a_profile(tmp_path: Path, small_recipes: tuple[str, str]) -> None:
    """Made once, and again where it is not the current one; its time counts for every plan."""
    made: list[str] = []
    version = 1.0

    def profiling(loaded: LoadedModel, folder: Folder, recipe: Recipe, workload: Workload, reporter: Reporter) -> Plan:
        current = f"{version}".encode()
        if recipe.allocate is not None and (not folder.profile.exists() or folder.profile.read_bytes() != current):
            folder.profile.write_bytes(current)
            made.append(folder.path.name)
        return build(loaded, folder, recipe, workload, reporter)

    def refusing_one_bit(
        loaded: LoadedModel, folder: Folder, recipe: Recipe, workload: Workload, reporter: Reporter
    ) -> Plan:
        """Before anything is measured."""
        has_one = recipe.allocate is not None and recipe.allocate.bits == 1
        return (build if has_one else profiling)(loaded, folder, recipe, workload, reporter)

    entries = by_name(run(tmp_path, small_recipes, [3, 4], builder=profiling))
    assert made == ["small@3"]
    stages = [{stage.file: stage for stage in entries[f"small @ {b}"].calibration.stages} for b in (3, 4)]
    assert stages[0]["profile.safetensors"] == stages[1]["profile.safetensors"]
    assert all(entry.calibration.seconds is not None for entry in entries.values())
    run(tmp_path, small_recipes, [2], builder=profiling)  # a budget added later, before the others
    run(tmp_path, small_recipes, [1, 2.5], builder=refusing_one_bit)
    assert made == ["small@3"]
    version = 2.0
    run(tmp_path, small_recipes, [3, 4], builder=profiling)
    assert made == ["small@3", "small@3"]


def test_files_of_another_model_and_corrupt_ones_are_refused(
    tmp_path: Path, first: tuple[Path, Comparison], small_recipes: tuple[str, str]
) -> None:
    content = (first[0] / "compare.json").read_bytes()
    path = tmp_path / "compare.json"
    path.write_bytes(content)
    loaded = tiny()
    foreign = replace(loaded, identity=replace(loaded.identity, weights_sha256="z" * 64))
    with pytest.raises(ArtifactError, match="made from another model: model.weights_sha256"):
        run(tmp_path, small_recipes, [3], loaded=foreign)
    for wrong, message in (
        (content.replace(b'"task_seed": 1', b'"task_seed": 2'), "is corrupt"),
        (content[:-40], "truncated or not JSON"),
        (content.replace(b'"comparison"', b'"evaluation"'), "is not a comparison of version 3"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(ArtifactError, match=message):
            run(tmp_path, small_recipes, [3])
        assert path.read_bytes() == wrong
