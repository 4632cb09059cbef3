"""A plan that destroys a model: it is measured, named, refused with exit code 7, and let through on demand.
Limits of `kvcal eval`, with the same exit code, its 16-bit row, and errors as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cli_cases import RECIPE, Outcome, ran_well, run_kvcal, save_llama
from transformers import PreTrainedTokenizerBase

from kvcal.errors import GateFailed, UsageError
from kvcal.models.load import LoadedModel, load
from kvcal.models.rope import rotary_maps
from kvcal.plan.damage import is_destroyed, load_damage, require_undamaged, save_damage
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Plan, Workload, load_plan, save_plan
from kvcal.progress import SILENT
from kvcal.recipe_files import load_recipe
from kvcal.stages import check_damage
from kvcal.stages.check_damage import first_positions, measure_damage
from kvcal.stages.divergence import Deviations, unquantized_plan
from kvcal.stages.evaluate.stage import Gates, read_accuracies
from kvcal.stages.formats import formats_plan

MODEL = "reasoner-10m"
COARSE = Format(1, "token", 64, 0)  # 1 bit for the keys of a token: outliers take the scale


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(MODEL)


def with_keys(loaded: LoadedModel, index: int, fmt: Format) -> Plan:
    """16 bits but for the keys of one layer."""
    plan = unquantized_plan(loaded.identity, loaded.geometry)
    layers = [replace(layer, k=fmt) if layer.geometry.index == index else layer for layer in plan.layers]
    return replace(plan, layers=tuple(layers), workload=Workload(2, 1024))


@pytest.fixture(scope="module")
def destroyed(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A plan that destroys the model by one layer's keys, and that layer's index."""
    index = loaded.geometry.layers[1].index
    path = tmp_path_factory.mktemp("destroyed") / "plan.safetensors"
    save_plan(with_keys(loaded, index, COARSE), path)
    return path, index


def test_limits() -> None:
    assert is_destroyed(0.51, 1.0) and is_destroyed(0.2, 0.7)
    assert not is_destroyed(0.5, 0.9) and not is_destroyed(0.05, 0.5)  # flat distributions flip for nothing


def test_a_good_plan_passes_and_is_measured_once(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = formats_plan(load_recipe("kivi-4"), loaded, Workload(2, 1024))
    path = tmp_path / "plan.safetensors"
    damage = measure_damage(plan, loaded, (), SILENT, path)
    assert damage is not None and 0 < damage.kl < 0.01 and damage.top1 > 0.95 and damage.num_tokens > 50
    assert damage.worst == () and not damage.is_destroyed
    assert load_damage(path, plan) == damage and load_damage(path, with_keys(loaded, 0, COARSE)) is None
    kept = replace(damage, kl=0.25)  # the file is what is taken the next time
    save_damage(kept, path)
    assert measure_damage(plan, loaded, (), SILENT, path) == kept
    save_damage(replace(kept, inputs={**kept.inputs, "num_tokens": 1}), path)  # of other texts
    assert measure_damage(plan, loaded, (), SILENT, path) == damage
    require_undamaged(damage, is_allowed=False)


def test_tokens_count_once_they_read_a_packed_page_of_every_layer(loaded: LoadedModel) -> None:
    wide = with_keys(loaded, 0, Format(4, "token", 64, 0, 60))
    texts = check_damage._texts(wide, loaded, (), SILENT)
    assert texts is not None and texts.mask_BT.any(1).all()
    first = texts.mask_BT.any(0).nonzero()[0].item()
    assert 128 + 60 <= first < 2 * 128 and texts.tokens_BT.shape[1] >= first + 64
    shrinking = Format(2, "token", 128, param_dtype="float32", shrink_at=(200,))  # on a schedule for no more than this
    texts = check_damage._texts(replace(with_keys(loaded, 0, shrinking), workload=Workload(1, 300)), loaded, (), SILENT)
    assert texts is not None and texts.tokens_BT.shape == (1, 300)


def test_the_error_is_that_of_texts_and_the_agreement_that_of_tokens(loaded: LoadedModel, monkeypatch) -> None:
    found = Deviations(torch.tensor([[1.0, 1.0, 3.0, 3.0]]), torch.tensor([[True] + 3 * [False]]), torch.arange(4) // 2)
    monkeypatch.setattr(check_damage, "deviations", lambda *_, **__: found)
    texts = check_damage.Texts(torch.zeros(2, 4).long(), torch.ones(2, 4).bool(), None, "", "")
    assert check_damage._against_16_bits(loaded, [Mock()], texts) == [(2.0, pytest.approx(1.0), 0.75)]


def test_each_side_is_measured_alone_on_the_farthest_text(loaded: LoadedModel, monkeypatch) -> None:
    """One side of five layers destroys the model; of the others, none is named before it."""
    plan, seen = with_keys(loaded, 1, COARSE), []
    layers = [replace(layer, v=Format(4, "token", 64)) if i < 5 else layer for i, layer in enumerate(plan.layers)]
    texts = check_damage._texts(plan, loaded, (), SILENT)
    assert texts is not None and texts.first_B is not None
    against = check_damage._against_16_bits
    monkeypatch.setattr(check_damage, "_against_16_bits", lambda *given: seen.append(given) or against(*given))
    worst = check_damage._worst(replace(plan, layers=tuple(layers)), loaded, texts, SILENT)
    assert (worst[0].layer, worst[0].side) == (1, "k") and worst[0].kl > 0.5
    assert 0.1 > worst[1].kl > worst[2].kl > 0
    assert [len(plans) for _, plans, _ in seen] == [5, 4]  # of five layers, then the sides of the worst three
    for *_, one in seen:
        assert torch.equal(one.tokens_BT, texts.tokens_BT[-1:]) and one.first_B.tolist() == texts.first_B[-1:].tolist()


def test_texts_stand_at_both_ends_of_the_context(loaded: LoadedModel) -> None:
    positions: set[int] = set()
    plan = formats_plan(load_recipe("kivi-4"), loaded, Workload(2, 2048))

    def note(_module: object, _args: object, given: dict[str, Any]) -> None:
        positions.update(given["position_ids"].flatten().tolist())

    with loaded.model.register_forward_pre_hook(note, with_kwargs=True):
        measure_damage(plan, loaded, (), SILENT)
    assert min(positions) == 0 and max(positions) == 2047
    # Keys that are stored before RoPE get that of their place in the cache.
    maps = rotary_maps(loaded.model, loaded.geometry, {layer.geometry.index for layer in plan.layers})
    tensors = {f"layers.{index}.rotary": found.tensor() for index, found in maps.items()}
    layers = tuple(replace(layer, k_pages="pre") for layer in plan.layers)
    pre = replace(plan, layers=layers, tensors=plan.tensors | tensors)
    assert first_positions(pre, loaded, torch.zeros(2, 512)) is None


def test_a_destroyed_plan_names_the_layer_and_side(destroyed: tuple[Path, int], tmp_path: Path) -> None:
    path, index = destroyed
    done = run_kvcal("inspect", path, "--model", MODEL)
    assert done.code == 7 and "the plan destroys the model" in done.err and f"layer {index} K" in done.err
    assert "--allow-damage" in done.err
    allowed = ran_well("inspect", path, "--model", MODEL, "--allow-damage", "--json")
    assert "warning: the plan destroys the model" in allowed.err
    assert [check["name"] for check in allowed.json["checks"]] == ["file", "model", "bytes", "bytes", "bytes", "damage"]
    assert f"layer {index} K" in allowed.json["checks"][-1]["detail"]


def test_a_plan_is_marked_before_its_layers_are_named(
    destroyed: tuple[Path, int], loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = load_plan(destroyed[0]), tmp_path / "plan.safetensors"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(check_damage, "_worst", Mock(side_effect=KeyboardInterrupt))
        measure_damage(plan, loaded, (), SILENT, path)
    marked = load_damage(path, plan)
    assert marked is not None and marked.is_destroyed and marked.worst == ()
    named = measure_damage(plan, loaded, (), SILENT, path)
    assert named is not None and replace(named, worst=()) == marked and len(named.worst) == 1
    assert load_damage(path, plan) == named


def test_an_evaluation_refuses_it_after_its_table(destroyed: tuple[Path, int], tmp_path: Path) -> None:
    path, index = destroyed
    arguments = ("eval", path, "--model", MODEL, "--out", tmp_path, "--tasks", "", "--samples", 1, "--seq-len", 400)
    arguments += ("--json",)
    done = run_kvcal(*arguments)
    assert done.code == 7 and done.json["damage"]["worst"][0]["layer"] == index
    assert done.json["damage"]["worst"][0]["side"] == "k" and done.json["damage"]["kl"] > 0.5
    assert ran_well(*arguments, "--allow-damage").json["damage"] == done.json["damage"]


def test_evaluations_of_each_model_have_a_folder(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --out, so that a second model does not meet the artifacts of the first."""
    monkeypatch.chdir(tmp_path)
    save_plan(unquantized_plan(loaded.identity, loaded.geometry), tmp_path / "plan.safetensors")
    ran_well("eval", "plan.safetensors", "--model", MODEL, "--tasks", "", "--samples", 1, "--seq-len", 400)
    assert (tmp_path / "artifacts" / MODEL / "eval/evaluation.json").is_file()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A model, and a plan of 2 bits for it."""
    folder = tmp_path_factory.mktemp("gates")
    model = save_llama(folder / "model", tokenizer)
    (folder / "small.toml").write_text(RECIPE)
    ran_well("run", "uniform-2", "--model", model, "--out", folder / "run", "--set", "evaluate.tasks=[]",
             "--set", "evaluate.against=[]", "--samples", 1, "--seq-len", 200)  # fmt: skip
    return folder


def evaluated(made: Path, *arguments: object) -> Outcome:
    """`kvcal eval` of the plan; what one call measured, the next one keeps."""
    plan = made / "run" / "plan.safetensors"
    return run_kvcal(
        "eval", plan, "--model", made / "model", "--recipe", made / "small.toml", "--out", made / "eval",
        "--set", "evaluate.against=[]", *arguments,
    )  # fmt: skip


def test_a_row_of_16_bits_is_always_there(made: Path) -> None:
    done = evaluated(made, "--json")
    assert done.code == 0, done.err
    value = done.json
    assert [row["name"] for row in value["rows"]] == ["16-bit", "plan"] and value["gates"] == []


def test_gates_that_pass_and_gates_that_fail(made: Path) -> None:
    row = json.loads(evaluated(made, "--json").out)["rows"][-1]
    kl, nbytes = row["text"]["kl"], row["total_bytes"]
    assert kl > 0 and nbytes == load_plan(made / "run" / "plan.safetensors").predicted_bytes
    wide = ("--max-kl", 2 * kl, "--min-accuracy", "chain=0", "--min-accuracy", "0", "--max-bytes", nbytes)
    done = evaluated(made, *wide, "--json")
    assert done.code == 0, done.err
    gates = done.json["gates"]
    assert [one["gate"] for one in gates] == ["max_kl", "min_accuracy chain", "min_accuracy all", "max_bytes"]
    assert all(one["passed"] for one in gates) and gates[0]["measured"] == kl
    assert gates[0]["standard_error"] == row["text"]["kl_se"]

    narrow = ("--max-kl", kl / 2, "--min-accuracy", "chain=0", "--max-bytes", nbytes - 1)
    done = evaluated(made, *narrow, "--json")
    assert done.code == 7
    assert [one["passed"] for one in done.json["gates"]] == [False, True, False]
    error = json.loads(done.err.splitlines()[-1])["error"]
    assert error["kind"] == "GateFailed" and error["exit_code"] == 7
    assert "plan.safetensors fails 2 of 3 gates: max_kl:" in error["message"] and "max_bytes:" in error["message"]

    done = evaluated(made, *narrow)
    assert done.code == 7 and "16-bit" in done.out and "FAILED" in done.out and "passed" in done.out
    assert "error: plan.safetensors fails 2 of 3 gates" in done.err


def test_limits_are_read_by_task() -> None:
    assert read_accuracies(["chain=0.9", "0.5"]) == {"chain": 0.9, "all": 0.5}
    with pytest.raises(UsageError):
        Gates(max_kl=float("inf")).require_measured(("chain",))
    assert GateFailed.exit_code == 7


@pytest.mark.parametrize(
    ("command", "code", "kind", "place", "says"),
    [
        (("inspect", "{tmp}/none"), 5, "ArtifactError", "{tmp}/none", "does not exist"),
        (("run", "{tmp}/wrong.toml"), 2, "UsageError", "{tmp}/wrong.toml", "unknown key 'zap'"),
        (("size", "reasoner-10m", "--context", "0"), 2, "UsageError", None, "--context"),
        (("zap",), 2, "UsageError", None, "No such command"),
    ],
)
def test_errors_are_json_where_results_are(
    command: tuple[str, ...], code: int, kind: str, place: str | None, says: str, made: Path, tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "wrong.toml").write_text("zap = 1\n[allocate]\nbits = 3\n")
    places = {"tmp": tmp_path, "made": made}
    done = run_kvcal(*(word.format(**places) for word in command), "--json")
    assert done.code == code and not done.out
    (line,) = done.err.splitlines()
    error = json.loads(line)["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code) and says in error["message"]
    assert error["place"] == (None if place is None else place.format(**places))
    assert error["hint"] is None or isinstance(error["hint"], str)
