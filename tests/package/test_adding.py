"""docs/adding.md runs as it is written: a new quantizer goes from its profile to generated text, inspected, by its file
and its line alone; a new score chooses channels."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cli_cases import save_llama
from transformers import PreTrainedTokenizerBase

from kvcal import PlanCache, load_plan
from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.folder import Folder
from kvcal.models.load import LoadedModel, load
from kvcal.pages import scores
from kvcal.pages.layouts import LAYOUTS
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.plan.plan import plan_record, save_plan
from kvcal.progress import Silent
from kvcal.recipe import Recipe
from kvcal.run.pipeline import build_plan
from kvcal.stages import profile as profile_stage
from kvcal.stages.verify import verify_plan
from kvcal.strict import dump, parse
from kvcal.tables import layer_table, profile_table

PAGE = (Path(__file__).parents[2] / "docs" / "adding.md").read_text(encoding="utf-8")
FILE, LINE, SCORE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FIXED, MEASURED = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def absmax(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The page's file as a module of its own, and its line."""
    path = tmp_path_factory.mktemp("adding") / "absmax.py"
    path.write_text(FILE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("absmax", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "absmax", module)
        spec.loader.exec_module(module)
        exec(LINE, {"LAYOUTS": LAYOUTS, "AbsmaxLayout": module.AbsmaxLayout})
        yield module
        LAYOUTS.pop("absmax")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    folder = save_llama(tmp_path_factory.mktemp("model") / "tiny", tokenizer, num_layers=2, head_dim=64)
    return load(str(folder), dtype="float32", device="cpu")


def recipe_of(toml: str) -> Recipe:
    return parse(Recipe, {"name": "added", **tomllib.loads(toml)}, "added", UsageError)


def test_the_name_is_unknown_without_its_line() -> None:
    names = r"\['uniform', 'rotated'\]"
    with pytest.raises(ValueError, match=rf"quantizer = 'absmax', expected one of {names}"):
        Format(4, quantizer="absmax")


def test_a_new_quantizer_is_measured_chosen_compiled_read_and_inspected(
    absmax: ModuleType, model: LoadedModel, tmp_path: Path
) -> None:
    folder = Folder.create(tmp_path)
    plan = build_plan(model, folder, recipe_of(MEASURED))
    profile = profile_stage.load(folder.profile)
    costs = zip(profile.setup.candidates("k"), profile.sensitivity(0, "k").sum(0).tolist(), strict=True)
    by_name = {(candidate.quantizer, candidate.num_bits): cost for candidate, cost in costs}
    # No zero to fit a range that is off centre: worse than the uniform quantizer at equal bits, better than at half.
    assert by_name["uniform", 4] < by_name["absmax", 4] < by_name["uniform", 2] < by_name["absmax", 2]
    assert profile_table(profile)[2]
    again = load_plan(folder.plan)
    assert again == plan and again.predicted_bytes == plan.predicted_bytes


def test_bytes_of_the_new_quantizer_are_counted_without_torch(tmp_path: Path) -> None:
    (tmp_path / "absmax.py").write_text(FILE, encoding="utf-8")
    layout = "absmax.AbsmaxLayout(4, 64, 'float16')"
    code = f"import sys; sys.modules['torch'] = None; import absmax; print({layout}.record_bytes)"
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 128 * 64 * 4 // 8 + 128 * 2


ALLOCATED = MEASURED.replace('"uniform", "absmax"', '"absmax"')


@pytest.mark.parametrize("toml", [FIXED, ALLOCATED], ids=["formats", "allocated"])
def test_a_plan_of_the_new_quantizer_generates(
    toml: str, absmax: ModuleType, model: LoadedModel, tmp_path: Path
) -> None:
    plan = build_plan(model, Folder.create(tmp_path), recipe_of(toml))
    save_plan(plan, tmp_path / "plan.safetensors")
    assert load_plan(tmp_path / "plan.safetensors") == plan
    layer = json.loads(json.dumps(plan_record(plan)))["layers"][0]
    assert layer["k"][0]["quantizer"] == layer["v"][0]["quantizer"] == "absmax"
    names = {fmt.num_bits: f"{fmt.num_bits} absmax token g128" for fmt in plan.layers[0].k + plan.layers[0].v}
    _, _, rows = layer_table(plan.layers, plan.cache_dtype, plan.workload)
    assert rows[0][1:3] == tuple(names[fmt.num_bits] for fmt in plan.layers[0].k + plan.layers[0].v)
    assert verify_plan(plan, model, None, Silent())  # bytes are the predicted ones, at every count

    cache = PlanCache(plan, model.model.config)
    ids = torch.randint(0, model.model.config.vocab_size, (2, 300), generator=torch.Generator().manual_seed(0))
    out = model.model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 304) and cache.nbytes == plan.nbytes([303, 303])
    bits = plan.layers[0].k[0].num_bits
    assert plan.layers[0].k[0].layout("k", 1, 64, "float32", bits).record_bytes == 128 * 64 * bits // 8 + 128 * 2
    with pytest.raises(UnsupportedModel, match="layer 0: k pages are of the quantizer 'absmax', which has no kernels"):
        PlanCache(plan, model.model.config, max_tokens=512)


def test_a_file_with_a_quantizer_that_is_not_there_is_refused(
    absmax: ModuleType, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build_plan(model, Folder.create(tmp_path), recipe_of(FIXED))
    save_plan(plan, tmp_path / "plan.safetensors")
    monkeypatch.delitem(LAYOUTS, "absmax")
    with pytest.raises(ArtifactError, match="quantizer = 'absmax', expected one of"):
        load_plan(tmp_path / "plan.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 1}, "absmax takes 2, 3, 4 or 8 bits"),
        ({"num_bits": 16}, "quantizer = 'absmax' does not go with num_bits = 16"),
        ({"lattice_dim": 2}, "quantizer = 'absmax' does not go with lattice_dim"),
        ({"shrink_at": (300,), "param_dtype": "float32"}, "quantizer = 'absmax' does not go with shrink_at"),
        ({"quantizer": "lattice"}, "quantizer = 'lattice', expected one of"),
    ],
)
def test_knobs_of_other_quantizers_are_refused(absmax: ModuleType, changes: dict, message: str) -> None:
    assert "quantizer" not in dump(Format(2)) and dump(Format(2, quantizer="absmax"))["quantizer"] == "absmax"
    with pytest.raises(ValueError, match=message):
        Format(**{"num_bits": 2, "quantizer": "absmax", **changes})


def test_a_new_score_chooses_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "SCORES", scores.SCORES)
    for name in ("peak", "query_peak"):
        monkeypatch.setitem(scores.SCORES, name, scores.SCORES["random"])  # undone when the test ends
    exec(SCORE, vars(scores) | {})
    fmt = Format(2, "channel", boost=Boost("peak", (Tier(4, 0.125),)))
    assert fmt.label == "2 channel g128 +12.5%@4 peak" and not fmt.needs_queries
    assert Format(2, "channel", boost=Boost("query_peak", (Tier(4, 0.125),))).needs_queries
    keys = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    keys[5, 3] = 40.0
    assert scores.channel_scores("peak", keys).argmax() == 3
