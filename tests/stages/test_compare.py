"""The comparison with a stand-in for the pipeline: its plans, refused recipes as rows, what a second run
keeps."""

import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cache_cases import KIVI_2
from compare_cases import BASELINE_NAMES, BUDGETED, FIXED, by_name, write_recipes
from evaluation_cases import make_plan, text, tiny
from listener import Listener
from report_cases import UNIFORM, row
from safetensors.torch import save_file

from kvcal.data.reading import EvaluateSpec
from kvcal.errors import ArtifactError, InfeasibleBudget, UsageError
from kvcal.folder import Folder
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Format, Plan, Workload
from kvcal.progress import Reporter
from kvcal.recipe import AllocateSpec, Recipe
from kvcal.recipe_files import load_recipe
from kvcal.stages.compare import (
    Build,
    Comparison,
    Entry,
    compare,
    comparison_columns,
    load_comparison,
    points_of,
    verdict,
)
from kvcal.strict import dump
from kvcal.tables import comparison_table

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
    folder: Path, names: tuple[str, ...], bits: list[float], notes: Listener | None = None, builder: Build = build,
    loaded: LoadedModel | None = None, workload: Workload = WORKLOAD,
) -> Comparison:  # fmt: skip
    points = points_of(names, bits)
    data, into = text(140, 160), Folder.create(folder)
    return compare(loaded or tiny(), points, workload, SPEC, data, into, builder, notes or Listener())


@pytest.fixture(scope="module")
def small_recipes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_recipes(tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, small_recipes: tuple[str, str]) -> tuple[Path, Comparison]:
    folder = tmp_path_factory.mktemp("first")
    return folder, run(folder, small_recipes, [1, 3])


def test_rows_and_a_refused_recipe(first: tuple[Path, Comparison]) -> None:
    folder, comparison = first
    entries = by_name(comparison)
    assert list(entries) == [*BASELINE_NAMES, "small @ 1", "small @ 3", "fixed"]
    refused = entries["small @ 1"]
    assert refused.row is None and refused.refusal is not None
    assert dump(refused.refusal) == {"stage": "build", "message": "too small", "hint": "raise it", "exit_code": 3}
    assert load_comparison(folder / "compare.json") == comparison
    columns = dict(comparison_columns(comparison))
    assert columns["plan"] == tuple(entries)
    assert comparison_table(comparison).legend == "small @ 1 is refused: too small"
    row = entries["small @ 3"].row
    assert row is not None and row.workload == WORKLOAD
    assert columns["KL to 16 bits"][3:5] == ("-", f"{row.text.kl:.5f} ± {row.text.kl_se:.5f}")
    assert columns["bits at 2 x 512"][4] == f"{row.bits_per_value:.3f}"


def test_the_verdict_names_the_best_plan_within_the_rivals_bytes() -> None:
    def found(*rows: tuple[str, int, float, float]) -> str:
        base = row("", UNIFORM, 0.0, None)
        entries = []
        for name, nbytes, kl, error in rows:
            measured = replace(base, name=name, total_bytes=nbytes, text=replace(base.text, kl=kl, kl_se=error))
            entries.append(Entry(name, name, "r", None, name in BASELINE_NAMES, None, measured))
        return str(verdict(Comparison("m", {}, "text", "f", 1, WORKLOAD, tuple(entries))))

    rivals = ("16-bit", 800, 1e-7, 0.0), ("kivi-2", 100, 0.09, 0.002), ("kivi-4", 200, 0.01, 0.002)
    assert (
        found(*rivals, ("a", 90, 0.01, 0.001), ("b", 150, 0.001, 0.0)) == "a: 1/9 of kivi-2's KL at 0.90 of its bytes"
    )
    assert found(*rivals, ("b", 200, 0.03, 0.001)) == "b: 3 times kivi-4's KL at its bytes"
    assert found(*rivals, ("a", 100, 0.088, 0.002)) == "a: the KL of kivi-2, within the errors, at its bytes"
    assert found(*rivals, ("a", 100, 0.0, 0.0)) == "a: 1/1000 of kivi-2's KL at its bytes"
    assert found(*rivals) == "None"


def test_second_run_keeps_plans_and_rows(first: tuple[Path, Comparison], small_recipes: tuple[str, str]) -> None:
    """Also one that is interrupted."""
    folder, comparison = first
    notes = Listener()
    content = (folder / "compare.json").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run(folder, small_recipes, [1, 3], Listener(at="compare: fixed"))
    assert (folder / "compare.json").read_bytes() == content
    assert run(folder, small_recipes, [1, 3], notes) == comparison
    assert sum("is measured already, kept" in message for message in notes.said) == 5
    assert (folder / "compare.json").read_bytes() == content


def test_a_plan_that_cannot_be_measured_is_a_row(tmp_path: Path, small_recipes: tuple[str, str]) -> None:
    """Its schedule ends before the texts do; the others are measured, one sequence at a time as for it."""
    notes = Listener()
    comparison = run(tmp_path, small_recipes, [5], notes, workload=Workload(1, 150))
    entries = by_name(comparison)
    refusal = entries["small @ 5"].refusal
    assert refusal is not None and (refusal.stage, refusal.exit_code) == ("evaluate", 2)
    assert "the plan's bits are scheduled for" in refusal.message
    assert [entry.name for entry, _ in comparison.measured] == [*BASELINE_NAMES, "fixed"]
    assert comparison.inputs["evaluate.batch"] == 1
    assert any("evaluate: 1 sequences at a time" in message for message in notes.said)


def test_a_refused_baseline_ends_the_comparison(tmp_path: Path, small_recipes: tuple[str, str]) -> None:
    refuse = Mock(side_effect=UsageError("not with this model"))
    with pytest.raises(UsageError, match="not with this model"):
        run(tmp_path, small_recipes, [3], builder=refuse)


def test_a_file_of_another_model_is_refused(
    tmp_path: Path, first: tuple[Path, Comparison], small_recipes: tuple[str, str]
) -> None:
    content = (first[0] / "compare.json").read_bytes()
    path = tmp_path / "compare.json"
    path.write_bytes(content)
    loaded = tiny()
    foreign = replace(loaded, identity=replace(loaded.identity, weights_sha256="z" * 64))
    with pytest.raises(ArtifactError, match="made from another model: model.weights_sha256"):
        run(tmp_path, small_recipes, [3], loaded=foreign)
    assert path.read_bytes() == content


@pytest.fixture
def recipes(tmp_path: Path) -> tuple[str, str]:
    return write_recipes(tmp_path)


def test_points(recipes: tuple[str, str]) -> None:
    points = points_of([*recipes, "kivi-4"], [3, 2.25])
    assert [point.name for point in points] == [*BASELINE_NAMES, "small @ 2.25", "small @ 3", "fixed"]
    assert [point.is_baseline for point in points] == [True] * 3 + [False] * 3
    assert len({point.folder(Path()) for point in points}) == len(points)
    small = load_recipe(recipes[0])
    assert small.allocate is not None and small.allocate.same_bytes_as == "kivi-2"
    for point, bits in zip(points[3:5], (2.25, 3), strict=True):
        spec = point.recipe.allocate
        assert spec == AllocateSpec(bits=bits, batch=2, context=512, objective="sensitivity") and point.bits == bits
        assert replace(point.recipe, allocate=small.allocate) == small


@pytest.mark.parametrize(
    ("names", "bits", "says"),
    [
        (["small", "no-such-recipe"], [], "no-such-recipe"),
        (["kivi-2"], [], "no recipe to compare"),
        (["other/kivi-2"], [], "two recipes are named 'kivi-2'"),
        (["a b", "a,b"], [], "punctuation"),
        (["small"], [0.05], "out of range"),
        (["small"], [math.nan], "out of range"),
        (["small"], [2.5, 3, 2.5], "2.5 is given twice"),
        (["fixed"], [2.5], r"none of \['fixed'\] has \[allocate\]"),
    ],
)
def test_bad_input(recipes: tuple[str, str], tmp_path: Path, names: list[str], bits: list[float], says: str) -> None:
    (tmp_path / "other").mkdir()
    contents = {"other/kivi-2": FIXED}
    contents |= {"a b": BUDGETED, "a,b": FIXED}
    for name, content in contents.items():
        (tmp_path / f"{name}.toml").write_text(content)
    paths = [str(path) if (path := tmp_path / f"{name}.toml").exists() else name for name in names]
    with pytest.raises(UsageError, match=says):
        points_of(paths, bits)
