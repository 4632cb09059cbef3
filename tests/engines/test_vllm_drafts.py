"""Models that draft, in the real vLLM on a CPU, in fp32: their layers are vLLM's own, next to a plan's; and
drafts together with sinks that requests share. Tokens are those that ``PlanCache`` gives without drafts.
``make engines`` runs these tests."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from served_models import (
    FORMATS,
    LENGTHS,
    VOCABULARY,
    Served,
    prompts,
    random_requests,
    with_sinks,
    without_queries,
)
from test_vllm_hybrids import Hybrid
from test_vllm_hybrids import hybrid as hybrid
from tiny_models import perturbed
from vllm_cases import ALONE, DRAFTS, SHORT, assert_capacity, serve
from vllm_cases import served as served
from vllm_cases import version as version
from vllm_environment import run_in

from kvcal import Plan
from kvcal.engines.capacity import capacity as capacity_of
from kvcal.engines.capacity import draft_token_bytes
from kvcal.models.load import identity_of
from kvcal.models.supported_layers import attention_layers, geometry_of
from kvcal.plan.plan import LayerPlan, Workload

pytestmark = pytest.mark.engines

ONCE = 3  # drafts a step


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model of two layers, whose drafts are mostly wrong."""
    return Served(tmp_path_factory.mktemp("draft"), seed=5, layers=2)


def by(model: Served, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model.folder), "num_speculative_tokens": ONCE} | more


def drafted_bytes(model: Served) -> int:
    return draft_token_bytes(attention_layers(geometry_of(model.model, cache_dtype="float32")), "float32", 1)


@pytest.mark.parametrize("is_own", [True, False], ids=["the model itself", "another model"])
def test_a_model_that_drafts(is_own: bool, version: str, tmp_path: Path, served: Served, drafting: Served) -> None:
    """Drafts are right where codes decide nothing, or hardly ever; cold and after cached prefixes, with windows
    and sinks, in the blocks that kvcal predicts."""
    plan, draft = without_queries(served, served.with_copies()), served if is_own else drafting
    requests = [{"prompt": ids, "tokens": 60, "at": at} for at in (0, 70) for ids in prompts(*LENGTHS)]
    found, replay = serve(version, tmp_path, served, requests, plan, speculative_config=by(draft))
    assert sorted(replay.cached.values())[-3:] == [128, 256, 640]
    assert (replay.accepted > 100) == is_own and replay.rejected > 100, vars(replay)
    assert_capacity(found, plan, ONCE, draft_bytes=drafted_bytes(draft))


def eagle(folder: Path, served: Served) -> dict[str, Any]:
    """A head of one layer, the model's first one, which reads the model's hidden states through random weights."""
    config = copy.deepcopy(served.model.config)
    config.num_hidden_layers, config.architectures = 1, ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    names = {name: name.removeprefix("model.") for name in served.model.state_dict() if ".layers.0." in name}
    weights = {own: served.model.state_dict()[name].clone() for name, own in names.items() if "input_layer" not in name}
    torch.manual_seed(0)
    weights["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * 0.1
    save_file(weights, folder / "model.safetensors")
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": ONCE}


def test_an_eagle_head_drafts(version: str, tmp_path: Path, served: Served) -> None:
    assert_a_layer_drafts(version, tmp_path, served, eagle(tmp_path / "eagle", served))


def assert_a_layer_drafts(version: str, folder: Path, served: Served, drafts: dict[str, Any]) -> None:
    """In chunks, with windows and sinks, cold and after cached prefixes, whose last block older versions compute
    anew; in the blocks that kvcal predicts."""
    plan = without_queries(served, served.with_copies())
    requests = [{"prompt": ids, "tokens": 60, "at": at} for at in (0, 70) for ids in prompts(*LENGTHS)]
    more = {"max_num_batched_tokens": 256, "speculative_config": drafts}
    found, replay = serve(version, folder, served, requests, plan, **more)
    assert replay.rejected > 100 and sum(replay.cached.values()) >= 128 + 512, vars(replay)
    assert_capacity(found, plan, ONCE, draft_bytes=drafted_bytes(served) // len(served.plan.layers))


class WithMtp(Served):
    """A random MiMo, Qwen2 with a layer that drafts, which is in no plan: random, too."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = hf.Qwen2Config(
            hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=32768, bos_token_id=1, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self.model, self.folder = hf.Qwen2ForCausalLM(config), folder
        perturbed(self.model, 0.15)
        self.model.save_pretrained(folder)
        path = folder / "config.json"
        more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
        weights = load_file(folder / "model.safetensors")
        first = {name: weights[name].clone() for name in weights if ".layers.0." in name}
        weights |= {name.replace(".layers.0.", ".mtp_layers.0."): tensor for name, tensor in first.items()}
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            weights[f"model.mtp_layers.0.{name}.weight"] = torch.ones(64)
        weights["model.mtp_layers.0.input_proj.weight"] = torch.randn(64, 128) * 0.1
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        layers = attention_layers(geometry_of(self.model, cache_dtype="float32"))
        planned = tuple(LayerPlan(layer, *formats) for layer, formats in zip(layers, FORMATS, strict=True))
        self.plan = Plan(identity_of(folder, "tiny"), "float32", planned, Workload(2, 300), {})


def test_a_layer_of_the_model_drafts(version: str, tmp_path: Path) -> None:
    """MTP."""
    drafts = {"method": "mtp", "num_speculative_tokens": ONCE}
    assert_a_layer_drafts(version, tmp_path, WithMtp(tmp_path / "mimo"), drafts)


def test_random_requests_with_a_model_that_drafts(version: str, tmp_path: Path, served: Served) -> None:
    """Prompts in chunks, few blocks, aborts; then requests that lose their blocks, and are computed again."""
    plan = without_queries(served, served.with_copies())
    more = {**SHORT, "max_num_batched_tokens": 256, "speculative_config": by(served)}
    requests = [request for request in random_requests(60, temperature=0.0) if "n" not in request]
    _, replay = serve(version, tmp_path, served, requests, plan, **more)
    assert replay.accepted > 20 and replay.rejected > 100 and sum(replay.cached.values()) > 1000, vars(replay)
    requests = [{"prompt": ids, "tokens": 150} for ids in prompts(300, 310, 320, 330)]
    needed = capacity_of("vllm", plan, 64 << 20, 1, 384, ONCE, draft_bytes=drafted_bytes(served)).blocks_per_request
    more |= {"num_gpu_blocks_override": 2 + 3 * needed}  # three fit until they have grown
    _, replay = serve(version, tmp_path, served, requests, plan, **more)
    assert replay.restarts > 0 and replay.split > 0, vars(replay)


def test_sinks_are_shared_where_there_are_drafts(version: str, tmp_path: Path, served: Served) -> None:
    """Of n-grams. First pages that a prompt fills, or drafts; others' rings hold other sinks in between."""
    plan = without_queries(served, most_sinks(served))
    given = [*prompts(*LENGTHS, 120, 129), prompts(9, seed=5)[0] * 13]
    requests = [
        {"prompt": ids, "tokens": 60, "at": at}
        for at, all_ in ((0, given), (110, prompts(*LENGTHS, seed=9)), (220, given)) for ids in all_
    ]  # fmt: skip
    requests += [{"after": n, "prompt": prompts(3)[0], "tokens": 40, "at": 330} for n in (4, 6)]
    found, replay = serve(version, tmp_path, served, requests, plan, speculative_config=DRAFTS)
    assert replay.accepted > 50 and replay.rejected > 100 and sum(replay.cached.values()) > 1400, vars(replay)
    capacity = capacity_of("vllm", plan, 64 << 20, 1, 2048, ALONE - 1)
    assert capacity.ring_blocks > capacity_of("vllm", without_queries(served), 64 << 20, 1, 2048, ALONE - 1).ring_blocks
    assert_capacity(found, plan, ALONE - 1)


def most_sinks(served: Served) -> Plan:
    """As many as a first page has but one, in the last layer."""
    *layers, last = with_sinks(served.plan).layers
    values = dataclasses.replace(last.v, num_sink_tokens=127)
    return dataclasses.replace(served.plan, layers=(*layers, dataclasses.replace(last, v=values)))


def test_drafts_beside_states_are_refused_on_a_cpu(version: str, tmp_path: Path, hybrid: Hybrid) -> None:
    """Those of a model anywhere."""
    starts = [hybrid.arguments(block_size=256, speculative_config=drafts) for drafts in (DRAFTS, by(hybrid))]
    alone, model = run_in(version, tmp_path, "vllm_host.py", {"starts": starts})["starts"]
    assert "drafts beside states on a CPU, where vLLM's short convolutions take" in alone["message"], alone
    assert "drafts of a model beside states, which is not served" in model["message"], model
