"""A plan and LoRA adapters in the real vLLM, on a CPU. ``make engines`` runs these tests."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_replay import Replay, assert_replayed
from safetensors.torch import save_file
from served_models import Served, prompts
from transformers import PreTrainedModel
from vllm_cases import SHORT
from vllm_cases import served as served
from vllm_cases import version as version
from vllm_environment import run_in

pytestmark = pytest.mark.engines

RANK, ALPHA, SCALE = 4, 8, 0.15
TARGETS = "q_proj", "k_proj", "v_proj"


def adapter(folder: Path, model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A random one of queries, keys and values, in a folder; the model with it."""
    torch.manual_seed(seed)
    changed, tensors = copy.deepcopy(model), {}
    for name, module in changed.named_modules():
        if not name.endswith(TARGETS):
            continue
        down = torch.randn(RANK, module.in_features) * SCALE
        up = torch.randn(module.out_features, RANK) * SCALE
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        module.weight.data += ALPHA / RANK * up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return changed


def of_requests(found: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The work of the engine for these requests."""
    steps = [[entry for entry in step if entry[0] in names] for step in found["steps"]]
    parts = {key: {name: found[key][name] for name in names} for key in ("requests", "outputs")}
    return {"steps": [step for step in steps if step], **parts}


def test_adapters_share_no_blocks(version: str, tmp_path: Path, served: Served) -> None:
    """Two adapters and the base model, interleaved, of equal prompts: cold, and then each after its own
    blocks, in chunks; tokens are those of a model with the adapter's weights, and the base model's plan."""
    # In a batch with adapters, 0.32's operators on a CPU take the base model's rows for the last adapter's.
    models = {} if version == "0.32.0" else {None: served.model}
    for seed in (1, 2):
        models[str(tmp_path / f"adapter{seed}")] = adapter(tmp_path / f"adapter{seed}", served.model, seed)
    given = prompts(130, 300)
    requests = [
        {"prompt": ids, "tokens": 30, "lora": path, "at": at + 4 * number}
        for at in (0, 80) for number, path in enumerate(models) for ids in given
    ]  # fmt: skip
    plan = served.with_copies()
    llm = served.arguments(
        served.write("adapters.safetensors", plan), enable_lora=True, max_loras=2, max_lora_rank=8,
        max_num_batched_tokens=256, **SHORT | {"num_gpu_blocks_override": 60},
    )  # fmt: skip
    found = run_in(version, tmp_path, "vllm_host.py", {"llm": llm, "requests": requests})
    assert "error" not in found, found["trace"]
    written = set()
    for path, model in models.items():
        names = {str(number) for number, one in enumerate(requests) if one["lora"] == path}
        own = of_requests(found, names)
        replay: Replay = assert_replayed(own, model, plan)
        assert sorted(replay.cached.values()) == [0, 0, 128, 256], path
        written.add(json.dumps([own["outputs"][name][0] for name in sorted(names)]))
    assert len(written) == len(models)
