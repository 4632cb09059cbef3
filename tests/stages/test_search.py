"""The search among systems' plans, through the pipeline on a tiny model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import save_llama
from listener import Listener
from transformers import PreTrainedTokenizerBase

from kvcal.data.sequences import DataSpec
from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.folder import Folder, sequences
from kvcal.models.load import LoadedModel, load
from kvcal.plan.layer import bare_layers, fixed_layers
from kvcal.plan.page_format import RAW, Format
from kvcal.plan.plan import DEFAULT_WORKLOAD, Plan, Workload, load_plan, plan_record
from kvcal.progress import Silent
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe
from kvcal.stages import pipeline
from kvcal.stages import search as choose
from kvcal.stages.allocate.record import load as load_allocation
from kvcal.stages.divergence import deviations, kl_texts, unquantized_plan
from kvcal.stages.pipeline import system_recipes
from kvcal.stages.search import SearchRecord
from kvcal.stages.search import load as load_search
from kvcal.stages.search import save as save_search
from kvcal.stages.verify import verify_plan
from kvcal.tables import search_table

SOLVED = """
allocate = { bits = 16, objective = "kl" }
feedback = { num_samples = 2, seq_len = 300 }
[profile]
num_bits = [2, 4]
k_axes = ["channel"]
group_sizes = [64]
kl_samples = 1
kl_tokens = 300
gradients = false
"""
RECIPE = """
data = { source = "tasks:times", num_samples = 4, seq_len = 300 }
allocate = { bits = BITS, batch = 4, context = 20000 }
search = { serve = "decode", systems = SYSTEMS, kl_samples = 3, kl_tokens = 300 }
evaluate = { tasks = [], data = { source = "tasks:times", num_samples = 1, seq_len = 300, seed = 1 } }
"""
SYSTEMS = ("kivi-2", "kitty", "kvmix", "aqua-kv")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    folder = save_llama(tmp_path_factory.mktemp("model") / "tiny", tokenizer, dtype=torch.float32)
    return load(str(folder), device="cpu")


def recipe_of(folder: Path, bits: float, systems: tuple[str, ...] = SYSTEMS, serve: str = "decode") -> Recipe:
    """A search of these systems and, first, of one that solves for the budget."""
    (folder / "solved.toml").write_text(SOLVED)
    names = [str(folder / "solved.toml"), *systems]
    text = RECIPE.replace("BITS", str(bits)).replace("SYSTEMS", str(names)).replace('"decode"', f'"{serve}"')
    (folder / "small.toml").write_text(text)
    return load_recipe(str(folder / "small.toml"))


def built(recipe: Recipe, loaded: LoadedModel, folder: Path, reporter: Silent | None = None) -> SearchRecord:
    made = Folder.create(folder)
    pipeline.build_plan(loaded, made, recipe, reporter=reporter or Silent())
    return load_search(made.search)


def content(plan: Plan) -> tuple[object, dict[str, Any]]:
    """The content of a plan, without its provenance."""
    return plan_record(replace(plan, provenance={})), {name: t.tolist() for name, t in plan.tensors.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    built(recipe_of(folder, 5.0), loaded, folder)
    return folder


def test_the_plan_that_ships_is_the_plan_that_was_measured(whole: Path, loaded: LoadedModel) -> None:
    """It is a system's own plan, its figures are those of a measurement by hand, and it has the least KL or
    is simpler than one that cannot be told from it."""
    report, plan = load_search(whole / "search.safetensors").report, load_plan(whole / "plan.safetensors")
    recipe, rows = recipe_of(whole, 5.0), {one.name: one for one in report.systems}
    assert rows.keys() == {"solved", *SYSTEMS}
    assert content(plan) == content(load_plan(whole / "systems" / report.shipped / "plan.safetensors"))
    values = sum(2 * layer.attention.num_kv_heads * layer.head_dim("k") for layer in plan.layers) * 4 * 20000
    assert plan.predicted_bytes <= 5.0 * values / 8 and plan.workload == Workload(4, 20000)
    verify_plan(plan, loaded, 400, Silent())
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    for purpose, kl in (("select", rows[report.shipped].select), ("validate", report.kl)):
        texts = kl_texts(sequences(recipe.data, loaded, purpose), 3, 300, recipe.cache)  # type: ignore[arg-type]
        each = [deviations(loaded.model, reference, [plan], t.tokens_T[None], t.loss_mask_T[None]) for t in texts]
        assert kl == pytest.approx(sum(float(one.kl_Pn.mean()) for one in each) / len(each), rel=1e-3)
    finalists = [one for one in report.systems if one.validate is not None]
    measured = [one.select for one in report.systems if one.select is not None]
    assert measured == sorted(measured) and [one.name for one in finalists] == [*rows][: choose.FINALISTS]
    least = min(finalists, key=lambda one: one.validate or 0.0)
    assert report.kl == least.validate or rows[least.name].difference_error >= report.kl - least.validate
    assert load_allocation(whole / "allocation.safetensors")[0].loss == report.kl
    assert all(len(row) == len(search_table(report)[1]) for row in search_table(report)[2])


def test_no_text_is_in_two_pools(whole: Path) -> None:
    plan = load_plan(whole / "plan.safetensors")
    data = {stage: (entry["purpose"], {*entry["sequences"]}) for stage, entry in plan.provenance["calibration"].items()}
    assert {"search.select_data", "search.validate_data"} <= data.keys()
    for stage, (purpose, texts) in data.items():
        others = set().union(*(found for other, found in data.values() if other != purpose))
        assert texts and not texts & others, stage
    report = load_search(whole / "search.safetensors").report
    assert (plan.provenance["recipe"], plan.provenance["system"]) == ("small", report.shipped)


def test_for_decoding_slow_formats_are_left_out_before_anything_is_fitted(whole: Path) -> None:
    rows = {one.name: one for one in load_search(whole / "search.safetensors").report.systems}
    assert [name for name, one in rows.items() if one.left_out] == ["aqua-kv"]
    assert "slower than 16 bits to decode: k pages" in str(rows["aqua-kv"].left_out)
    assert rows["aqua-kv"].select is None and not list((whole / "systems" / "aqua-kv").iterdir())


def test_for_storage_lattices_and_predictions_are_measured(loaded: LoadedModel, tmp_path: Path) -> None:
    report = built(recipe_of(tmp_path, 4.0, ("aqua-kv",), "storage"), loaded, tmp_path).report
    assert all(one.left_out is None and one.select is not None for one in report.systems)
    aqua = load_plan(tmp_path / "systems" / "aqua-kv" / "plan.safetensors")
    assert any(layer.k_predictor for layer in aqua.layers) and report.serve == "storage"


def test_an_interrupted_search_writes_the_same_bytes(
    whole: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = choose.measured

    def stops(*args: Any) -> Any:
        if "validate" in args[-1]:
            raise KeyboardInterrupt
        return measured(*args)

    with monkeypatch.context() as patched:
        patched.setattr(choose, "measured", stops)
        with pytest.raises(KeyboardInterrupt):
            built(recipe_of(whole, 5.0), loaded, tmp_path)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert len(made) >= 2 * (len(SYSTEMS) - 1) and not (tmp_path / "search.safetensors").exists()
    built(recipe_of(whole, 5.0), loaded, tmp_path)
    assert all(path.stat().st_mtime_ns == time for path, time in made.items())
    for name in ("search.safetensors", "plan.safetensors"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    reporter = Listener()
    built(recipe_of(whole, 5.0), loaded, tmp_path, reporter)
    assert any("search.safetensors is current" in line for line in reporter.said)
    assert not any("of 5)" in line for line in reporter.said)  # no system is looked at again


def test_plans_beyond_the_budget_are_left_out(whole: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    """A system that solves finds one for less; its profile is that of the other budget."""
    folder = Folder(tmp_path / "less", tmp_path)
    Folder.create(folder.path)
    profile = folder.of_system("solved").profile
    profile.parent.mkdir(parents=True)
    profile.write_bytes((whole / "systems" / "solved" / "profile.safetensors").read_bytes())
    stamp, reporter = profile.stat().st_mtime_ns, Listener()
    pipeline.build_plan(loaded, folder, recipe_of(whole, 3.7, ("kivi-2",)), reporter=reporter)
    rows = {one.name: one for one in load_search(folder.search).report.systems}
    assert "it takes" in str(rows["kivi-2"].left_out) and "the budget is" in str(rows["kivi-2"].left_out)
    assert any("kivi-2 is left out: it takes" in line for line in reporter.said)
    assert load_search(folder.search).report.shipped == "solved" and 3.5 < (rows["solved"].bits or 0) <= 3.7
    assert profile.stat().st_mtime_ns == stamp
    says = "no system has a plan to ship: solved: .* too small.*kivi-2: it takes"
    with pytest.raises(InfeasibleBudget, match=says) as e:
        built(recipe_of(whole, 1.5, ("kivi-2",)), loaded, tmp_path / "least")
    smallest = e.value.smallest_bytes
    kivi = load_plan(whole / "systems" / "kivi-2" / "plan.safetensors")
    assert 0 < smallest <= kivi.predicted_bytes


@pytest.mark.parametrize(
    ("kls", "costs", "expected"),
    [
        ({"a": [1.0, 2.0, 3.0], "b": [1.1, 2.1, 3.1]}, {"a": (9, 9), "b": (2, 1)}, "a"),  # always worse by as much
        ({"a": [1.0, 2.0, 3.0], "b": [1.5, 1.6, 3.1]}, {"a": (9, 9), "b": (2, 1)}, "b"),  # within the error, simpler
        ({"a": [1.0, 2.0, 3.0], "b": [1.5, 1.6, 3.1]}, {"a": (2, 1), "b": (2, 2)}, "a"),  # within, and no smaller
        ({"a": [1.0], "b": [1.1]}, {"a": (9, 9), "b": (2, 1)}, "a"),  # a single text has no error
    ],
)
def test_a_simpler_plan_ships_within_the_error(
    kls: dict[str, list[float]], costs: dict[str, tuple[int, int]], expected: str
) -> None:
    """The three differences of the second case, .5, -.4 and .1, have a mean of .067 and an error of .26."""
    assert choose.chosen({name: torch.tensor(kl).double() for name, kl in kls.items()}, costs) == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [("kitty", None), ("kivi-2", None), ("mixkvq-capped", None), ("16-bit", None), ("higgs-2", "k pages")],
)
def test_what_decodes_as_fast_as_16_bits(loaded: LoadedModel, name: str, reason: str | None) -> None:
    formats = load_recipe(name).formats
    assert formats is not None
    layers = fixed_layers(formats, bare_layers(loaded.geometry))
    found = choose.not_for_decoding(layers, "bfloat16", DEFAULT_WORKLOAD)
    assert found is None if reason is None else reason in str(found)
    short = choose.not_for_decoding(layers, "bfloat16", Workload(1, 1))  # where windows have more room than tokens
    assert short is not None or layers[0].k == RAW or layers[0].k.max_window == 0


def test_pages_that_shrink_are_not_for_decoding(loaded: LoadedModel) -> None:
    """No static cache and no engine serves them."""
    shrinking = Format(2, param_dtype="float32", shrink_at=(100,))
    layers = [replace(layer, k=shrinking, v=shrinking) for layer in bare_layers(loaded.geometry)]
    found = choose.not_for_decoding(layers, "bfloat16", DEFAULT_WORKLOAD)
    assert str(found).startswith("slower than 16 bits to decode: k pages that shrink: ")


def test_systems_read_the_text_of_the_search(tmp_path: Path) -> None:
    """No more of it than either recipe says; and have its budget."""
    recipe = replace(recipe_of(tmp_path, 3.0), data=DataSpec("a.txt", 20, 600, seed=5, min_len=100))
    found = system_recipes(recipe)
    assert found["kvmix"].data == DataSpec("a.txt", 20, 600, seed=5)
    assert found["aqua-kv"].data.num_samples == 20 and found["kitty"].allocate is None
    solved = found["solved"].allocate
    assert solved is not None and (solved.bits, solved.batch, solved.context, solved.objective) == (3, 4, 20000, "kl")
    in_bytes = replace(recipe, allocate=replace(recipe.allocate, bits=None, kv_budget="1MB"))  # type: ignore[type-var]
    solved = system_recipes(in_bytes)["solved"].allocate
    assert solved is not None and (solved.bits, solved.kv_budget) == (None, "1MB")


def test_wrong_systems_are_refused(tmp_path: Path) -> None:
    for systems, message in (
        (("best",), r"recipe 'best' has \[search\]"),
        (("mixkvq",), r"recipe 'mixkvq' has \[tune\]"),
        (("kitty", "recipes/kitty.toml"), "is the second one named 'kitty'"),
    ):
        with pytest.raises(UsageError, match=message):
            recipe_of(tmp_path, 3.0, systems)


def test_a_record_comes_back_as_it_was(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "search.safetensors"
    record = load_search(whole / "search.safetensors")
    save_search(record, {"a": 1}, path)
    again = load_search(path)
    assert again.report == record.report and again.allocation == record.allocation
    ours, theirs = ({name: t.tolist() for name, t in one.plan_tensors.items()} for one in (record, again))
    assert ours == theirs != {}
