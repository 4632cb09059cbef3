"""From a model to a plan in one command, plans of several budgets side by side, their difference; and what
everyone types first."""

import json
import shutil
from pathlib import Path

import pytest
from cli_cases import RECIPE, ran_well, run_kvcal, save_llama
from transformers import PreTrainedTokenizerBase

from kvcal.commands.options import BudgetOptions, RecipeOptions
from kvcal.errors import UsageError
from kvcal.folder import Folder
from kvcal.geometry import CACHE_DTYPES
from kvcal.plan.layer import bare_layers
from kvcal.plan.plan import load_plan

SIZES = ("--batch", 2, "--context", 4096)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A model, a small recipe, and its plan for 4 bits in plans/."""
    folder = tmp_path_factory.mktemp("plans")
    model = save_llama(folder / "model", tokenizer)
    (folder / "small.toml").write_text(RECIPE)
    arguments = ("--recipe", folder / "small.toml", "--out", folder / "plans", "--bits", 4, *SIZES)
    done = ran_well("plan", model, *arguments, "-o", folder / "new" / "first.safetensors", "--json")
    (folder / "first.json").write_text(done.out)
    return folder


def test_a_plan_in_one_command(made: Path) -> None:
    value = json.loads((made / "first.json").read_text())
    plan = load_plan(made / "new" / "first.safetensors")
    folder = made / "plans" / "small-4bits-2x4096"
    assert load_plan(folder / "plan.safetensors") == plan and value["folder"] == str(folder)
    assert (made / "plans" / "profile.safetensors").is_file() and not (folder / "profile.safetensors").exists()
    gain = value["gain"]
    heads = [layer.num_kv_heads * (layer.k_head_dim + layer.v_head_dim) for layer in plan.geometry.layers]
    raw = 2 * 4096 * sum(heads) * CACHE_DTYPES[plan.cache_dtype].itemsize
    assert (gain["cache_bytes"], gain["raw_bytes"]) == (plan.predicted_bytes, raw) and plan.bits_per_value() <= 4
    for fit, layers in ((gain["fit"], plan.layers), (gain["raw_fit"], bare_layers(plan.geometry))):
        for batch, context, fits in (
            (fit["max_batch"], 4096, True), (fit["max_batch"] + 1, 4096, False),
            (2, fit["max_context"], True), (2, fit["max_context"] + 1, False),
        ):  # fmt: skip
            taken = batch * sum(layer.nbytes(plan.cache_dtype, (context,), context) for layer in layers)
            assert (taken <= gain["budget"]) == fits
    assert gain["fit"]["max_batch"] >= 2 > gain["raw_fit"]["max_batch"]
    assert [check["name"] for check in value["checks"]] == ["file", "model", "bytes", "bytes", "bytes"]


def test_another_budget_leaves_the_first_and_uses_its_profile(made: Path, tmp_path: Path) -> None:
    before = (made / "plans" / "small-4bits-2x4096" / "plan.safetensors").read_bytes()
    arguments = ("plan", made / "model", "--recipe", made / "small.toml", "--out", made / "plans", *SIZES)
    done = ran_well(*arguments, "--kv-budget", "550KB")
    assert "profile: profile.safetensors is current, skipped" in done.err and "verify: 5 checks passed" in done.err
    assert "largest batch at 4096 tokens" in done.out
    small = made / "plans" / "small-kv-550KB-2x4096"
    assert f"next: kvcal eval {small}/plan.safetensors --model {made / 'model'}" in done.err
    assert load_plan(small / "plan.safetensors").predicted_bytes <= 550_000
    assert (made / "plans" / "small-4bits-2x4096" / "plan.safetensors").read_bytes() == before
    again = run_kvcal(*arguments, "--kv-budget", "550KB")
    for stage, name in (("allocate", "allocation"), ("compile", "plan")):
        assert f"{stage}: {name}.safetensors is current" in again.err


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_plan_for_an_engine_that_caches_prefixes(engine: str, made: Path, tmp_path: Path) -> None:
    """Of the default recipe, with a basis: it keeps its sinks and windows; --set counts more."""
    line = ("plan", made / "model", "--bits", 15, *SIZES, "--samples", 1, "--seq-len", 256, "--allow-damage")
    ran_well(*line, "--for-engine", engine, "-o", tmp_path / "plan.safetensors", "--out", tmp_path / "plans")
    plan = load_plan(tmp_path / "plan.safetensors")
    assert plan.tensors
    assert {(fmt.num_sink_tokens, fmt.recent_window) for fmt in [layer.format("k") for layer in plan.layers]} == {
        (8, 112)
    }
    done = run_kvcal("serve-args", tmp_path / "plan.safetensors", "--engine", engine)
    assert done.code == 0 and not {"--no-enable-prefix-caching", "--disable-radix-cache"}.intersection(done.out.split())
    fewer = ["cache.k_recent_window=32"]
    knobs = BudgetOptions(bits=3.0, engine=engine).knobs()
    with pytest.raises(UsageError, match="expected equal windows, or stripe_tokens = 128"):
        RecipeOptions(sets=fewer).recipe("default", knobs)
    kept = RecipeOptions(sets=[*fewer, "cache.stripe_tokens=128"]).recipe("default", knobs)
    assert (kept.cache.k_recent_window, kept.cache.v_recent_window) == (32, 112)


def test_a_searched_plan(made: Path, tmp_path: Path) -> None:
    search = """[search]
systems = ["kivi-2"]
kl_samples = 1
kl_tokens = 256
"""
    (tmp_path / "searched.toml").write_text(RECIPE + search)
    done = ran_well("plan", made / "model", "--recipe", tmp_path / "searched.toml", "--bits", 5,
                    *SIZES, "--out", tmp_path / "out", "--name", "one", "--json")  # fmt: skip
    gain = done.json["gain"]
    assert gain["cache_bytes"] <= gain["budget"] and not (tmp_path / "out" / "profile.safetensors").exists()


def test_a_plan_whose_pages_shrink_is_for_its_workload_alone(made: Path, tmp_path: Path) -> None:
    few = ("--samples", 1, "--seq-len", 512, "--set", "reparam.num_samples=1", "--set", "reparam.num_steps=2")
    arguments = ("plan", made / "model", "--recipe", "pm-kvq", "--bits", 9, "--out", tmp_path)
    done = ran_well(*arguments, *few, "--set", "data.min_len=1", "--set", "reparam.seq_len=512", *SIZES)
    assert "the plan's alone" in done.out
    path = next(tmp_path.glob("pm-kvq-*/plan.safetensors"))
    verified = ran_well("inspect", path, "--model", made / "model")  # for batches of 2, not of 3
    assert "batch 2: allocated = predicted" in verified.out
    assert "ragged batch of 64, 129 tokens" in verified.out


def test_named_allocations_lie_side_by_side_and_differ(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "plans" / "profile.safetensors", tmp_path)
    for name, bits in (("a", 4), ("b", 9)):
        done = ran_well("allocate", tmp_path, "--bits", bits, "--name", name, *SIZES)
        assert f"next: kvcal compile {tmp_path / name}" in done.err
        ran_well("compile", tmp_path / name)
    assert not Folder(tmp_path).allocation.exists()
    notes = [run_kvcal("allocate", tmp_path, "--bits", bits, *SIZES).err.count("--name NAME keeps") for bits in (4, 9)]
    assert notes == [0, 1]
    paths = [tmp_path / name / "plan.safetensors" for name in ("a", "b")]
    plans = [load_plan(path) for path in paths]
    assert plans[0].bits_per_value() <= 4 < plans[1].bits_per_value() <= 9


FIRST = [  # what is typed, exit code, what is said
    (("run", "{model}"), 2, "kvcal plan {model} --budget 24GB, or kvcal run default --model {model}"),
    (("run", "kivi-2", "--budget", "24GB"), 2, "--budget: recipe 'kivi-2' has no [allocate]: no budget chooses its"),
]


@pytest.mark.parametrize(("typed", "code", "says"), FIRST)
def test_what_everyone_types_first_is_answered(typed: tuple[str, ...], code: int, says: str, made: Path) -> None:
    places = {"model": made / "model"}
    done = run_kvcal(*(word.format(**places) for word in typed))
    assert done.code == code and says.format(**places) in done.err and "No such option" not in done.err


def test_run_takes_a_budget_and_a_workload(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "plans" / "profile.safetensors", tmp_path)
    few = ("--set", "evaluate.tasks=[]", "--set", "evaluate.against=[]")
    done = ran_well("run", made / "small.toml", "--model", made / "model", "--out", tmp_path, *few,
                    "--kv-budget", "550KB", "--context", 300)  # fmt: skip
    assert "profile: profile.safetensors is current" in done.err
    plan = load_plan(tmp_path / "plan.safetensors")
    assert plan.predicted_bytes <= 550_000 and (plan.workload.batch, plan.workload.context) == (2, 300)
