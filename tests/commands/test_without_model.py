"""Commands that load no model: sizes that the runtime allocates, lists that the files back, a machine's
findings."""

import json
import shlex
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from cli_cases import ran_well, run_kvcal, save_family
from transformers import FalconForCausalLM, PreTrainedTokenizerBase

from kvcal.commands import doctor
from kvcal.errors import InfeasibleBudget
from kvcal.folder import Folder, Job
from kvcal.models.config import families, read_sizes
from kvcal.models.load import load
from kvcal.plan.layer import bare_layers, fixed_layers
from kvcal.plan.plan import Plan, Workload, load_plan
from kvcal.progress import SILENT
from kvcal.recipe import AllocateSpec
from kvcal.recipe_files import find_recipe, load_recipe, recipe_names, with_knobs
from kvcal.stages.allocate.budget import resolve_budget
from kvcal.stages.formats import require_feasible
from kvcal.stages.memory_needs import RECIPES

ROOT = Path(__file__).parents[2]


def sized(*arguments: object) -> dict:
    return ran_well("size", *arguments, "--json").json


def test_size_tells_the_bytes_of_the_plan_that_the_recipe_makes(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = save_family(tmp_path / "gemma3", tokenizer, "gemma3")
    rows = {row["recipe"]: row for row in sized(model, "--batch", 8, "--context", 4096)["rows"]}
    assert tuple(rows) == RECIPES and all(row["fit"] is None for row in rows.values())
    formats = load_recipe("uniform-3").formats
    assert formats is not None
    loaded = load(str(model), device="cpu")
    layers = fixed_layers(formats, bare_layers(loaded.geometry))
    plan = Plan(loaded.identity, loaded.geometry.cache_dtype, layers, Workload(8, 4096), {})
    assert rows["uniform-3"]["cache_bytes"] == plan.predicted_bytes
    assert rows["uniform-3"]["bits_per_value"] == plan.bits_per_value()


def test_what_fits_is_what_a_budget_of_the_device_counts() -> None:
    """Weights, workspace and cache; one sequence or one token more does not fit."""
    memory, context, batch = 900_000_000, 2000, 40
    value = sized("reasoner-10m", "--memory", "900MB", "--batch", batch, "--context", context)
    facts = read_sizes("reasoner-10m")

    def needed(recipe: str, batch: int, context: int) -> int:
        layers = fixed_layers(load_recipe(recipe).formats, bare_layers(facts.geometry))
        spec = AllocateSpec(budget="900MB", batch=batch, context=context)
        budget = resolve_budget(spec, layers, "bfloat16", facts.weight_bytes or 0, facts.vocab_size)
        workload = Workload(batch, context)
        cache = sum(layer.nbytes("bfloat16", workload.lengths, context) for layer in layers)
        return memory - budget.for_cache + cache

    for row in value["rows"]:
        name, fit = row["recipe"], row["fit"]
        assert fit["total"] == needed(name, batch, context)
        assert needed(name, fit["max_batch"], context) <= memory < needed(name, fit["max_batch"] + 1, context)
        assert needed(name, batch, fit["max_context"]) <= memory < needed(name, batch, fit["max_context"] + 1)
    fitting = [row["recipe"] for row in value["rows"] if row["fit"]["total"] <= memory]
    assert value["finest_that_fits"] == (fitting[0] if fitting else None)


@pytest.mark.parametrize("family", ["reasoner-10m", "gemma3"])
def test_size_tells_the_least_bits_of_a_plan(family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Those that `kvcal plan` refuses less than, of short and long contexts, and with layers that slide."""
    model = family if family == "reasoner-10m" else save_family(tmp_path / family, tokenizer, family)
    loaded, recipe = load(str(model), device="cpu"), load_recipe("default")
    for batch, context in ((1, 100), (8, 300), (8, 4096), (2, 32768)):
        found = sized(model, "--batch", batch, "--context", context)["least_bits"]
        for bits, is_enough in ((found, True), (round(found - 0.01, 2), False)):
            knobs = {"allocate.bits": bits, "allocate.batch": batch, "allocate.context": context}
            job = Job(with_knobs(recipe, knobs), loaded, Folder(tmp_path), SILENT)
            with nullcontext() if is_enough else pytest.raises(InfeasibleBudget, match=f"{found:.2f} bits"):
                require_feasible(job)
    assert f"A plan takes {found:.2f} bits or more" in ran_well("size", model, "--batch", 2, "--context", 32768).out


def test_size_says_what_to_do_next() -> None:
    small = ran_well("size", "reasoner-10m", "--memory", "24GB")
    assert "16 bits fit already" in small.err and "weights 19.47 MB" in small.out
    tight = run_kvcal("size", "reasoner-10m", "--memory", "800MB", "--batch", 48, "--context", 4096)
    assert "kvcal plan reasoner-10m --budget 800MB --batch 48 --context 4096" in tight.err
    nothing = run_kvcal("size", "reasoner-10m", "--memory", "30MB", "--context", 5000)
    assert "nothing fits, 2 bits included" in nothing.err and "4096 positions, fewer than the context" in nothing.err
    assert "the weights alone take more than 24 B" in run_kvcal("size", "reasoner-10m", "--memory", "24B").err
    assert sized("reasoner-10m", "--context", "32k")["workload"]["context"] == 32_768
    assert not run_kvcal("size", "reasoner-10m", "--memory", "24GB", "--quiet").err


def test_devices_share_heads_and_weights() -> None:
    """Two KV heads on two devices are halved; on four, each holds a copy."""
    rows = {tp: sized("reasoner-10m", "--tp", tp, "--memory", "1GB")["rows"] for tp in (1, 2, 4)}
    for one, two, four in zip(*rows.values(), strict=True):
        assert one["cache_bytes"] == 2 * two["cache_bytes"] and two["cache_bytes"] == four["cache_bytes"]
        assert one["fit"]["total"] > two["fit"]["total"] > four["fit"]["total"]  # weights go on being shared
    done = run_kvcal("size", "reasoner-10m", "--tp", 3)
    assert done.code == 2 and "--tp 3: layer 0 has 8 query heads and 2 KV heads" in done.err


def test_weights_that_are_not_here_are_stated(tmp_path: Path) -> None:
    content = json.loads((ROOT / "kvcal/embedded/reasoner-10m/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert sized(tmp_path)["weight_bytes"] is None
    done = run_kvcal("size", tmp_path, "--memory", "1GB")
    assert done.code == 2 and "weights are not here" in done.err and "--weights 16GB" in done.err
    stated = sized(tmp_path, "--memory", "1GB", "--weights", "19474944")
    assert stated["rows"] == sized("reasoner-10m", "--memory", "1GB")["rows"]


def test_size_of_a_model_that_cannot_be_calibrated(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Its plans are made by recipes with [formats], of the bytes that are told; serve-args takes them, too."""
    model = save_family(tmp_path / "falcon", tokenizer, "falcon")
    FalconForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)  # as engines take it
    rows = {row["recipe"]: row for row in sized(model, "--memory", "1GB")["rows"]}
    done = ran_well("size", model, "--memory", rows["uniform-2"]["fit"]["total"])
    assert "bypasses transformers' AttentionInterface" in done.err and "recipe with [formats]" in done.err
    following = done.err.splitlines()[-1]
    assert f"kvcal run uniform-2 --model {model} --batch 8 --context 4096" in following and "kvcal plan" not in done.err
    given = ("--set", "evaluate.tasks=[]", "--set", "evaluate.against=[]", "--samples", 1, "--seq-len", 300)
    ran_well(*shlex.split(following.partition("its plan: kvcal ")[2]), "--out", tmp_path / "out", *given)
    plan = tmp_path / "out" / "plan.safetensors"
    assert rows["uniform-2"]["cache_bytes"] == load_plan(plan).predicted_bytes
    ran_well("serve-args", plan, "--kv-memory", "1GB", "--context", 512)


def test_a_model_that_is_refused_is_refused_by_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "recurrent_gemma"}')
    done = run_kvcal("size", tmp_path)
    assert done.code == 4 and "are not served: RecurrentGemmaForCausalLM keeps a state" in done.err and not done.out
    done = run_kvcal("size", "no/such/model/at/all")
    assert done.code == 2 and "was not found" in done.err


def test_size_reads_a_large_configuration_without_torch_and_transformers(tmp_path: Path) -> None:
    content = {"model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
               "hidden_size": 8192, "vocab_size": 128256, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    code = (
        "import sys; from kvcal.__main__ import main; sys.argv = ['kvcal', *sys.argv[1:]]\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    command = ["size", str(tmp_path), "--memory", "80GB", "--weights", "40GB", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "numpy" in loaded and not {"torch", "transformers", "scipy", "cvxpy", "optuna", "matplotlib"} & loaded
    row = json.loads(done.stdout)["rows"][0]
    assert row["cache_bytes"] == 80 * 2 * 8 * 128 * 2 * 8 * (4096 + 128)  # layers, K and V, heads, channels, bytes


def test_every_recipe_is_listed_with_what_it_chooses_by() -> None:
    listed = run_kvcal("list", "recipes", "--json").json
    assert tuple(one["name"] for one in listed) == recipe_names()
    chosen = {one["name"]: one["chooses_by"] for one in listed}
    assert chosen["sensitivity"] == "integer program, combined"
    assert chosen["default"] == "integer program, kl; basis"
    assert chosen["best"] == "measured KL of all systems"
    assert chosen["mixkvq"] == "task accuracy, thresholds" and chosen["kvmix"] == "gradient norms"
    assert chosen["kivi-2"] == "fixed formats" and chosen["pm-kvq-2"] == "fixed formats; progressive, λ"
    assert all(one["description"] for one in listed)
    assert "pm-kvq-2" in run_kvcal("list", "recipes").out


def test_a_recipe_is_printed_as_its_file() -> None:
    assert run_kvcal("list", "recipes", "default").out == find_recipe("default").read_text()
    assert run_kvcal("list", "recipes", "default", "--json").json["allocate"]["batch"] == 8
    done = run_kvcal("list", "recipes", "nonsense")
    assert done.code == 2 and "'nonsense' is neither a file nor one of" in done.err


def test_models_are_those_of_the_contract_tests() -> None:
    listed = run_kvcal("list", "models", "--json").json
    assert listed == {"embedded": ["reasoner-10m"], **families()}
    table = run_kvcal("list", "models").out
    rows = {line.split("│")[1].strip(): line for line in table.splitlines() if line.startswith("│")}
    assert rows.keys() >= {one["model_type"] for one in listed["families"] if one["outcome"] != "not built"}
    assert "full and state" in rows["qwen3_5"] and "default" in rows["qwen3_5"] and "kivi-2" in rows["bloom"]
    assert "keeps a state in" in table and "is_decoder" in rows["bert"] and "is_decoder" not in rows["llama"]


def test_doctor_tells_versions_and_what_follows() -> None:
    done = run_kvcal("doctor", "--json")
    value = done.json
    found = {one["name"]: one for one in value["findings"]}
    assert done.code == 0 and value["is_usable"]
    assert found["torch"]["found"] == version("torch") and found["transformers"]["status"] == "ok"
    assert {"python", "kvcal", "NVIDIA driver", "NVRTC", "vllm", "sglang"} <= set(found)


@pytest.mark.parametrize(
    ("requirement", "status", "code"),
    [
        ("no-such-package>=1", "unusable", 2),
        ("no-such-package>=1; extra == 'compile'", "refused", 0),
        ("cuda-core<0.1; extra == 'cuda'", "refused", 0),
    ],
)
def test_doctor_compares_packages_with_the_requirements(
    requirement: str, status: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: [requirement])
    done = run_kvcal("doctor", "--json")
    name = requirement.partition(">")[0].partition("<")[0]
    found = [one for one in done.json["findings"] if one["name"] == name]
    assert done.code == code and [one["status"] for one in found] == ([] if status is None else [status])
    assert (code == 2) == ("kvcal is not usable here" in done.err)
