"""Bytes kept free, workloads, seeds, digests and errors of means, from stage to stage."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_cases import KIVI_2
from cli_cases import save_llama
from evaluation_cases import SMALL, make_plan, spec, tiny
from listener import Listener
from report_cases import UNIFORM, row
from transformers import PreTrainedTokenizerBase

from kvcal import PlanCache
from kvcal.data.sequences import encode_problem
from kvcal.errors import ArtifactError, InfeasibleBudget
from kvcal.folder import Folder, Job
from kvcal.models.load import LoadedModel, load
from kvcal.plan.plan import Workload
from kvcal.plan.tensors import tensors_nbytes
from kvcal.progress import Silent
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe
from kvcal.stages import formats, pipeline
from kvcal.stages.evaluate import tasks
from kvcal.stages.evaluate.tasks import TaskResult, measure_tasks
from kvcal.stages.profile import record as profile_record
from kvcal.stages.transform import reserved_bytes
from kvcal.stages.verify import verify_plan
from kvcal.systems.pm_kvq.recipe import ProgressiveSpec

RECIPE = """
data = { source = "tasks:times", num_samples = 2, seq_len = 256 }
profile = { num_bits = [2, 4], k_axes = ["token"], group_sizes = [64], kl_samples = 0 }
cache = { num_sink_tokens = 1, k_recent_window = 0, v_recent_window = 0 }
allocate = { kv_budget = "1B", objective = "sensitivity", batch = 2, context = 512 }
reparam = { position_scale = 1.0, num_steps = 1, num_samples = 1, seq_len = 200 }
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    folder = save_llama(tmp_path_factory.mktemp("model") / "tiny", tokenizer, dtype=torch.float32)
    return load(str(folder), device="cpu")


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load("reasoner-10m", device="cpu")


def recipe_of(folder: Path, budget: str, old: str = "", new: str = "") -> Recipe:
    path = folder / "small.toml"
    path.write_text(RECIPE.replace('"1B"', budget).replace(old, new))
    return load_recipe(str(path))


def test_the_smallest_budget_that_is_named_has_room_for_lambda(tmp_path: Path, loaded: LoadedModel) -> None:
    """Also for what the search then leaves at 1, which takes no bytes."""
    folder = Folder.create(tmp_path / "out")
    with pytest.raises(InfeasibleBudget) as refused:
        pipeline.build_plan(loaded, folder, recipe_of(tmp_path, '"1B"'))
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    recipe = recipe_of(tmp_path, f'"{smallest}B"')
    plan = pipeline.build_plan(loaded, folder, recipe)
    unused = reserved_bytes(loaded.geometry, recipe.cache, recipe.sections) - tensors_nbytes(plan.tensors)
    assert plan.predicted_bytes + unused == smallest


def test_formats_that_shrink_leave_room_for_lambda(tmp_path: Path, loaded: LoadedModel) -> None:
    """Also where the recipe fixes them, and the bits are those of [progressive]."""
    folder, recipe = Folder.create(tmp_path / "out"), load_recipe("pm-kvq-2")
    recipe = replace(recipe, progressive=ProgressiveSpec(bits=9.0))
    allocation = formats.fix_folder(Job(recipe, loaded, folder, Silent(), Workload(2, 4000)))
    assert allocation.split.reserved == reserved_bytes(loaded.geometry, recipe.cache, recipe.sections) > 0


def test_an_evaluation_feeds_no_more_sequences_than_the_schedule_has(tmp_path: Path, loaded: LoadedModel) -> None:
    shrinking = (replace(fmt, param_dtype="float32", shrink_at=(128, 192, 256)) for fmt in KIVI_2)
    plan = replace(make_plan(loaded, tuple(shrinking)), workload=Workload(1, 512))
    recipe, folder = recipe_of(tmp_path, '"9MB"'), Folder.create(tmp_path / "out")
    data = replace(recipe.data, seq_len=200)
    recipe = replace(recipe, evaluate=replace(recipe.evaluate, against=(), tasks=(), data=data, batch=2))
    found = pipeline.evaluate_plan(recipe, loaded, plan, folder, Silent())
    assert found.inputs["evaluate.batch"] == 1


def test_a_profile_of_other_settings_or_in_another_dtype_is_made_again(tmp_path: Path, loaded: LoadedModel) -> None:
    folder, notes = Folder.create(tmp_path / "out"), Listener()
    formats.profile_folder(loaded, folder, recipe_of(tmp_path, '"9MB"'))
    recipe = recipe_of(tmp_path, '"9MB"', "num_bits = [2, 4]", "num_bits = [2, 3]")
    formats.profile_folder(loaded, folder, recipe)
    assert profile_record.load(folder.profile).setup.spec.num_bits == (2, 3)
    formats.profile_folder(load(loaded.source, device="cpu", dtype="bfloat16"), folder, recipe, notes)
    assert 'profile: runs again, compute_dtype is "float32", expected "bfloat16"' in notes.said


def test_the_digest_of_a_recipe_is_of_every_knob_but_its_name() -> None:
    recipe = load_recipe("pm-kvq")
    assert recipe.allocate is not None and recipe.reparam is not None
    changed = [
        replace(recipe, model="other"), replace(recipe, data=replace(recipe.data, seed=9)),
        replace(recipe, profile=replace(recipe.profile, kl_tokens=9)),
        replace(recipe, cache=replace(recipe.cache, num_sink_tokens=9)),
        replace(recipe, allocate=replace(recipe.allocate, batch=9)), replace(recipe, progressive=None),
        replace(recipe, reparam=replace(recipe.reparam, num_steps=9)),
        replace(recipe, evaluate=replace(recipe.evaluate, seed=9)),
    ]  # fmt: skip
    assert len({recipe.sha256, *(one.sha256 for one in changed)}) == 1 + len(changed)
    assert replace(recipe, name="other", description="other").sha256 == recipe.sha256


@pytest.mark.parametrize("is_ragged", [False, True])
def test_verify_finds_bytes_that_were_not_predicted(monkeypatch: pytest.MonkeyPatch, is_ragged: bool) -> None:
    small, measured = tiny(), PlanCache.nbytes.fget
    assert measured is not None
    wrong = property(lambda cache: measured(cache) + ((len(set(cache.lengths)) > 1) is is_ragged))
    plan = make_plan(small)
    verify_plan(plan, small, 400, Silent())
    monkeypatch.setattr(PlanCache, "nbytes", wrong)
    with pytest.raises(ArtifactError, match=r"sequences of \[.* bytes of cache, the plan predicts \d+"):
        verify_plan(plan, small, 400, Silent())


def test_the_error_of_a_mean_over_tasks() -> None:
    errors = {"a": 0.1, "b": 0.2, "c": 0.2}
    tasks = tuple(TaskResult(name, 0.5, error, 8, 4, 0, 9, (9,) * 8) for name, error in errors.items())
    one = replace(row("x", UNIFORM, 0.1, None), tasks=tasks)
    assert one.accuracy == 0.5 and one.accuracy_se == pytest.approx(math.sqrt(0.01 + 0.04 + 0.04) / 3)


def test_a_generation_ends_with_the_models_context(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = tasks.problems("times", 1, 1, **SMALL)
    length = len(encode_problem(problem, embedded.tokenizer))
    monkeypatch.setattr(embedded.model.config, "max_position_embeddings", length + 7)
    wanted = spec(tasks=("times",), num_problems=1, max_new_tokens=20)
    (result,) = measure_tasks(embedded, make_plan(embedded), wanted, Silent())
    assert (result.generated_tokens, result.num_unfinished) == (7, 1)
