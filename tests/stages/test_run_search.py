"""The search through the pipeline on a tiny model: every kind of composition at once, bytes, resuming, budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import ran_well, run_kvcal, save_llama
from transformers import PreTrainedTokenizerBase

from kvcal import artifact
from kvcal.data.pools import Purpose, TokenDataset
from kvcal.data.sequences import DataSpec
from kvcal.errors import ArtifactError, InfeasibleBudget, UsageError
from kvcal.folder import Folder, Job, job_sequences, sequences
from kvcal.kernels.variants import stored_form
from kvcal.models.load import LoadedModel, load
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import load_plan
from kvcal.progress import Silent
from kvcal.recipe import Recipe
from kvcal.recipe_files import load_recipe
from kvcal.run import formats, pipeline
from kvcal.stages.divergence import STATISTICS, deviations, kl_texts, unquantized_plan
from kvcal.stages.predictors import stage as fit_predictors
from kvcal.stages.predictors.stage import run_fit_predictors
from kvcal.stages.search import stage as search_stage
from kvcal.stages.search.judge import Pool
from kvcal.stages.search.kl_meter import KLMeter, plan_digest
from kvcal.stages.search.record import KIND, SCHEMA, SearchRecord
from kvcal.stages.search.record import load as load_search
from kvcal.stages.search.record import save as save_search
from kvcal.stages.verify import verify_plan
from kvcal.tables import candidates_table, pools_table, search_table

RECIPE = """
[data]
source = "tasks:times"
num_samples = 8
seq_len = 300
[cache]
num_sink_tokens = 2
k_recent_window = 0
v_recent_window = 0
[allocate]
bits = BITS
batch = 4
context = 20000
[reparam]
position_scale = 1.0
num_steps = 2
num_samples = 2
seq_len = 300
[predictors]
kind = "linear"
[search]
serve = "storage"
systems = ["kitty", "aqua-kv"]
keys = [
  { num_bits = 2, boost = { score = "query_range", tiers = [{ num_bits = 4, share = 0.25 }] } },
  { num_bits = 3, axis = "token", group_size = 32, rescale = true },
  { num_bits = 2, axis = "token", lattice_dim = 2, predicted = true },
]
values = [{ num_bits = 2, group_size = 32 }, { num_bits = 2, lattice_dim = 2, predicted = true }, { num_bits = 4 }]
kl_samples = 2
kl_tokens = 300
refine_rounds = 1
[evaluate]
tasks = []
data = { source = "tasks:times", num_samples = 1, seq_len = 300, seed = 1 }
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    folder = save_llama(tmp_path_factory.mktemp("model") / "tiny", tokenizer, dtype=torch.float32)
    return load(str(folder), device="cpu")


class Told(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def say(self, message: str) -> None:
        self.messages.append(message)


def recipe_of(folder: Path, bits: float, *changes: tuple[str, str]) -> Recipe:
    text = RECIPE.replace("BITS", str(bits))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "small.toml"
    path.write_text(text)
    return load_recipe(str(path))


def built(recipe: Recipe, loaded: LoadedModel, folder: Path, reporter: Silent | None = None) -> SearchRecord:
    made = Folder.create(folder)
    pipeline.build_plan(loaded, made, recipe, reporter=reporter or Silent())
    return load_search(made.search)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    built(recipe_of(folder, 4.0), loaded, folder)
    return folder


def test_every_system_in_one_search(whole: Path, loaded: LoadedModel) -> None:
    record, plan = load_search(whole / "search.safetensors"), load_plan(whole / "plan.safetensors")
    report = record.report
    names = {candidate.name for candidate in report.candidates}
    assert report.shipped in names and report.num_plans >= 30
    assert any("aqua-kv" in name or "predicted" in name for name in names)
    values = sum(2 * layer.attention.num_kv_heads * layer.head_dim("k") for layer in plan.layers) * 4 * 20000
    assert plan.predicted_bytes <= 4.0 * values / 8
    verify_plan(plan, loaded, 400, Silent())
    data = plan.provenance["calibration"]
    assert {stage: entry["purpose"] for stage, entry in data.items()} == {
        "search.fit_data": "fit",
        "search.reparam_data": "fit",
        "search.select_data": "select",
        "search.validate_data": "validate",
    }
    for one, other in (("fit", "select"), ("fit", "validate"), ("select", "validate")):
        mine, theirs = (set(data[f"search.{name}_data"]["sequences"]) for name in (one, other))
        assert mine and not mine & theirs
    for table in (search_table(report), candidates_table(report), pools_table(report)):
        assert all(len(row) == len(table[1]) for row in table[2])


def test_the_plan_that_ships_is_the_plan_that_was_measured(whole: Path, loaded: LoadedModel) -> None:
    """Byte for byte: both pools' files hold its digest, and its KL there is that of a measurement by hand."""
    record, plan = load_search(whole / "search.safetensors"), load_plan(whole / "plan.safetensors")
    assert plan_digest(plan) == plan_digest(record.plan)
    recipe = recipe_of(whole, 4.0)
    for purpose, found in (("select", record.report.select), ("validate", record.report.validate)):
        stored = artifact.read(whole / f"search.{purpose}.safetensors", f"{KIND}-partial", 1)
        table_NS = stored.tensors[plan_digest(plan)]
        data = sequences(recipe.data, loaded, purpose)  # type: ignore[arg-type]
        texts = kl_texts(data, 2, 300, recipe.cache)
        reference = unquantized_plan(loaded.identity, loaded.geometry)
        for text, row_S in zip(texts, table_NS, strict=True):
            one = deviations(loaded.model, reference, [plan], text.tokens_T[None], text.loss_mask_T[None])
            assert one.statistics(1)[0, 0].tolist() == pytest.approx(row_S.tolist(), rel=1e-3, abs=1e-9)
            assert len(row_S) == len(STATISTICS) and float(one.kl_Pn.mean()) == pytest.approx(float(row_S[0]), rel=1e-3)
        assert found.kl == pytest.approx(float(table_NS[:, 0].mean()), rel=1e-12)
        assert record.allocation.loss == record.report.select.kl


def test_an_interrupted_search_writes_the_same_bytes(
    whole: Path, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, calls = KLMeter._keep, []

    def stops(self: KLMeter, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        kept(self, *args)

    recipe = recipe_of(whole, 4.0)
    monkeypatch.setattr(KLMeter, "_keep", stops)
    with pytest.raises(KeyboardInterrupt):
        built(recipe, loaded, tmp_path)
    assert (tmp_path / "search.select.safetensors").exists() and not (tmp_path / "search.safetensors").exists()
    built(recipe, loaded, tmp_path)
    for name in ("search.safetensors", "plan.safetensors"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    assert not list(tmp_path.glob("*.partial*"))


def test_a_larger_budget_starts_from_what_is_known_and_is_never_worse(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, calls = KLMeter._keep, list[tuple[object, ...]]()

    def counted(self: KLMeter, digests: Any, start: int, stop: int, found: Any) -> None:
        calls.extend((digest, start, self.texts[start].tokens_T.tolist()[:50].__repr__()) for digest in digests)
        kept(self, digests, start, stop, found)

    monkeypatch.setattr(KLMeter, "_keep", counted)
    fits: list[object] = []
    monkeypatch.setattr(fit_predictors, "run_fit_predictors", lambda *a: fits.append(a) or run_fit_predictors(*a))
    small = built(recipe_of(tmp_path, 3.5), loaded, tmp_path)
    num_fits = len(fits)
    large = built(recipe_of(tmp_path, 5.0), loaded, tmp_path)
    assert len(set(calls)) == len(calls)  # nothing was measured twice
    assert len(fits) - num_fits <= 1  # the shipped plan's own predictors at most
    assert large.report.validate.score <= small.report.validate.score
    assert [path.name.startswith("search.earlier-") for path in tmp_path.glob("search.earlier-*")] == [True]
    known = len(calls)
    again = built(recipe_of(tmp_path, 3.5), loaded, tmp_path)
    assert len(calls) == known and again.report.validate.score <= small.report.validate.score
    assert plan_digest(again.plan) == plan_digest(small.plan)


def predicted_recipe(folder: Path, bits: float) -> Recipe:
    """Keys and values are predicted, or have 8 bits."""
    start, stop = RECIPE.index("keys ="), RECIPE.index("kl_samples")
    lattice = "{ num_bits = 2, lattice_dim = 2, predicted = true"
    chosen = f"keys = [{lattice}, axis = 'token' }}, {{ num_bits = 8 }}]\nvalues = [{lattice} }}, {{ num_bits = 8 }}]\n"
    return recipe_of(folder, bits, (RECIPE[start:stop], chosen), ('"kitty", "aqua-kv"', ""))


@pytest.mark.parametrize("is_better", [False, True])
def test_refitted_predictors_ship_if_they_are_better(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_better: bool
) -> None:
    fitted: list[Any] = []
    monkeypatch.setattr(
        fit_predictors, "run_fit_predictors", lambda *a: fitted.append(run_fit_predictors(*a)) or fitted[-1]
    )
    monkeypatch.setattr(search_stage, "better", lambda *a: is_better)
    difference = Pool.difference
    monkeypatch.setattr(Pool, "difference", lambda *a: (0.0, difference(*a)[1]))
    record = built(predicted_recipe(tmp_path, 6.5), loaded, tmp_path)
    assert record.report.refitted == is_better == record.report.shipped.endswith("refitted")
    assert len(fitted) in (1, 2)  # one, if the plan that ships is the one of the first fit
    shipped = fitted[-1 if is_better else 0].tensors()
    names = [name for name in record.plan_tensors if "_predictor." in name]
    assert names and all(torch.equal(record.plan_tensors[name], shipped[name]) for name in names)


FEEDBACK = "[feedback]\nnum_samples = 2\nseq_len = 300\n[search]"


@pytest.mark.parametrize("serve", ["decode", "storage"])
@pytest.mark.parametrize("is_better", [False, True])
def test_error_feedback_ships_if_it_is_better(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_better: bool, serve: str
) -> None:
    monkeypatch.setattr(search_stage, "better", lambda plan, *_: is_better and "feedback" in plan.name)
    difference = Pool.difference
    monkeypatch.setattr(Pool, "difference", lambda *a: (0.0, difference(*a)[1]))
    recipe = recipe_of(tmp_path, 4.0, ("[search]", FEEDBACK), ('"storage"', f'"{serve}"'))
    record = built(recipe, loaded, tmp_path)
    fed = {(layer.geometry.index, side) for layer in record.layers for side in SIDES if layer.feedback(side)}
    assert bool(fed) == is_better == (", feedback" in record.report.shipped)
    tried = {c.name.rpartition(" ")[2] for c in record.report.candidates if ", feedback" in c.name}
    assert tried == ({"K+V"} if is_better else {"K+V", "K", "V"}) or serve == "storage"
    assert record.report.units and any("_feedback" in name for name in record.plan_tensors) == is_better
    plan = load_plan(tmp_path / "plan.safetensors")
    assert plan.predicted_bytes <= 4.0 * 2 * 4 * 20000 * sum(
        layer.attention.num_kv_heads * layer.head_dim("k") for layer in plan.layers
    ) / 8  # fmt: skip
    assert plan.provenance["calibration"]["search.feedback_data"]["purpose"] == "fit"
    for layer in plan.layers:  # what is reconstructed before it is read has no kernels for feedback
        for side in SIDES:
            assert not layer.feedback(side) or not stored_form(layer, side)
    for purpose in ("select", "validate"):
        stored = artifact.read(tmp_path / f"search.{purpose}.safetensors", f"{KIND}-partial", 1)
        assert plan_digest(plan) in stored.tensors
    assert len(list(tmp_path.glob("search.feedback-*"))) == 1
    again = built(recipe, loaded, tmp_path)  # is read, whatever it holds
    assert plan_digest(again.plan) == plan_digest(plan)


def test_the_bytes_of_feedback_are_kept_free(loaded: LoadedModel, tmp_path: Path) -> None:
    capacities = []
    for changes in ((), (("[search]", FEEDBACK),)):
        job = Job(recipe_of(tmp_path, 4.0, *changes), loaded, Folder.create(tmp_path), Silent())
        data, path = formats.search_data(job), tmp_path / "search.safetensors"
        search = search_stage.Search(loaded, job.recipe, data, path, Silent())
        capacities.append(search.problem.capacity)
    # 2 layers, K and V, 2 heads of 16 channels in fp16.
    assert capacities[0] - capacities[1] == search.reserved == 2 * 2 * 2 * (16 * 15 // 2) * 2


def test_factors_that_would_take_much_of_the_cache_are_not_tried(loaded: LoadedModel, tmp_path: Path) -> None:
    told = Told()
    small = ("batch = 4\ncontext = 20000", "batch = 1\ncontext = 400")
    changes = (("[search]", FEEDBACK), small, ('"storage"', '"decode"'))
    record = built(recipe_of(tmp_path, 20.0, *changes), loaded, tmp_path, told)
    assert any("no error feedback: its factors would take" in message for message in told.messages)
    assert not any(layer.feedback(side) for layer in record.layers for side in SIDES)


def test_texts_too_short_for_lambda_leave_out_what_needs_it(loaded: LoadedModel, tmp_path: Path) -> None:
    told, systems = Told(), ('"kitty", "aqua-kv"', '"kitty", "pm-kvq-2"')
    short = ("num_steps = 2\nnum_samples = 2\nseq_len = 300", "num_steps = 2\nnum_samples = 2\nseq_len = 120")
    record = built(recipe_of(tmp_path, 5.0, short, systems, ('"storage"', '"decode"')), loaded, tmp_path, told)
    assert any("too short to read a page of pm-kvq-2: left out" in message for message in told.messages)
    assert any("too short to read a page of keys '3 token g32 λ" in message for message in told.messages)
    assert not any(layer.k_rescale for layer in record.layers) and not list(tmp_path.glob("search.lambda-*"))


def test_a_search_for_decoding_needs_no_fits_and_stores_what_attention_reads(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_predictors, "run_fit_predictors", lambda *a: pytest.fail("predictors were fitted"))
    told, recipe = Told(), recipe_of(tmp_path, 5.0, ('"storage"', '"decode"'))
    record = built(recipe, loaded, tmp_path, told)
    assert all(f.lattice_dim is None for layer in record.layers for side in SIDES for f in layer.formats(side))
    assert any("left out: aqua-kv" in message for message in told.messages)
    assert any("at most" in message and "plans" in message for message in told.messages)


def test_pools_that_meet_are_refused(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that repeats itself: the same sequence to select and to validate on."""

    def meeting(job: Job, spec: DataSpec, purpose: Purpose) -> TokenDataset:
        if purpose != "validate":
            return job_sequences(job, spec, purpose)
        found, other = job_sequences(job, spec, purpose), job_sequences(job, spec, "select")
        return replace(found, sequences=(other.sequences[0], *found.sequences[1:]))

    monkeypatch.setattr(formats, "job_sequences", meeting)
    with pytest.raises(UsageError, match="1 of 8 sequences of .* are among those that search"):
        built(recipe_of(tmp_path, 4.0), loaded, tmp_path)


def test_a_dry_run_says_the_size_of_a_search_and_measures_nothing(
    loaded: LoadedModel, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_predictors, "run_fit_predictors", lambda *a: pytest.fail("predictors were fitted"))
    monkeypatch.setattr(KLMeter, "measure", lambda *a: pytest.fail("a plan was measured"))
    recipe, folder = recipe_of(tmp_path, 4.0), Folder.create(tmp_path / "out")
    data = formats.search_data(Job(recipe, loaded, folder, Silent()))
    estimate = search_stage.dry_run(loaded, recipe, data, folder.search, Silent())
    measured = load_search(whole / "search.safetensors").report.num_plans
    assert measured <= estimate.steps["plans"] + 2  # the reference, and refitted predictors
    assert estimate.steps["plans times texts"] >= estimate.steps["plans"] and estimate.steps["texts"] == 2
    assert estimate.seconds > 0 and estimate.nbytes > 10**6
    assert not list((tmp_path / "out").iterdir())


def test_the_commands_take_what_a_plan_is_for_and_print_every_pool(
    whole: Path, tmp_path: Path, loaded: LoadedModel
) -> None:
    recipe_of(tmp_path, 4.0)
    command = ("search", str(tmp_path / "small.toml"), "--model", loaded.source)
    found = run_kvcal(*command, "--for", "decode", "--bits", "6", "--out", str(tmp_path), "--dry-run", "--json")
    [estimate] = found.json["stages"]
    assert found.code == 0 and estimate["steps"]["plans"] > 10 and estimate["steps"]["texts"] == 2
    found = ran_well("run", str(tmp_path / "small.toml"), "--model", loaded.source, "--out", str(whole))
    assert "search.safetensors is current" in found.err
    for line in ("Plans by score", "by pool", "select", "validate", "report"):
        assert line in found.out


def test_a_record_whose_loss_is_not_its_kl_is_refused(whole: Path, tmp_path: Path) -> None:
    found = load_search(whole / "search.safetensors")
    path = tmp_path / "wrong.safetensors"
    save_search(replace(found, allocation=replace(found.allocation, loss=found.report.select.kl + 1.0)), {}, path)
    with pytest.raises(ArtifactError, match="the allocation's loss is"):
        load_search(path)
    inputs = artifact.read(whole / "search.safetensors", KIND, SCHEMA).inputs
    assert inputs["validate_data.fingerprint"] != inputs["select_data.fingerprint"]


def test_a_budget_below_the_smallest_compositions(tmp_path: Path, loaded: LoadedModel) -> None:
    with pytest.raises(InfeasibleBudget, match="smallest compositions"):
        built(recipe_of(tmp_path, 1.0), loaded, tmp_path)
