"""Models with states in the real vLLM, on a CPU, in fp32: blocks of several pages, or states. Tokens, and the
attention of every layer, are those of ``PlanCache`` for the same tokens in the same chunks. All bytes of a
block are NaN when it is handed out, so that what is read of others, or too early, shows. ``make engines`` runs
these tests."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from attention_recorder import VARIABLE
from engine_replay import assert_attended
from hybrid_shapes import SHAPES
from served_models import FORMATS, LENGTHS, VOCABULARY, Served, prompts, random_requests
from tiny_models import perturbed
from vllm_cases import TOKENS, assert_capacity, serve
from vllm_cases import version as version
from vllm_environment import run_in

from kvcal import Plan
from kvcal.engines.capacity import capacity as capacity_of
from kvcal.geometry import AttentionGeometry, CacheDtype
from kvcal.models.load import identity_of
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.plan import LayerPlan, Workload

pytestmark = pytest.mark.engines

CONVOLVED = 65  # tokens of a convolution: a state of 64 x 64 values
STATE_BYTES = 64 * 64 * 4


class Hybrid(Served):
    """A random LFM2 of 4 convolutions and 2 layers of attention in a folder, and a plan for it. ``share``: of
    what layers add to embeddings; with a small one many tokens come again, and drafts are right."""

    def __init__(
        self, folder: Path, channels: int = 64, convolved: int = CONVOLVED, cache_dtype: CacheDtype = "float32",
        share: float = 1,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        config = hf.Lfm2Config(
            hidden_size=channels, conv_dim=channels, intermediate_size=96, block_dim=channels,
            block_auto_adjust_ff_dim=False, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=32768, conv_L_cache=convolved,
            layer_types=["conv", "conv", "full_attention"] * 2,
            bos_token_id=1, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self.model = hf.Lfm2ForCausalLM(config)
        perturbed(self.model, 0.15)
        for name, weight in self.model.named_parameters():
            if name.endswith(("out_proj.weight", "w2.weight")):
                weight.data *= share
        self.folder = folder
        self.model.save_pretrained(folder)
        formats = iter(FORMATS[1:])
        layers = tuple(
            LayerPlan(layer, *next(formats)) if isinstance(layer, AttentionGeometry) else LayerPlan(layer)
            for layer in geometry_of(self.model, cache_dtype=cache_dtype).layers
        )
        self.plan = Plan(identity_of(folder, "tiny"), cache_dtype, layers, Workload(2, 700), {})

    def with_copies(self, has_sinks: bool = True) -> Plan:
        """The plan with sinks and windows, others for keys than for values."""
        more = iter(({"num_sink_tokens": 4 * has_sinks, "recent_window": 128}, {"recent_window": 64}))
        layers = [
            dataclasses.replace(layer, k=dataclasses.replace(layer.k, **next(more))) if layer.is_paged else layer
            for layer in self.plan.layers
        ]
        return dataclasses.replace(self.plan, layers=tuple(layers))


@pytest.mark.parametrize("name", SHAPES)
def test_vllms_planner_has_the_predicted_blocks(name: str, version: str, tmp_path: Path) -> None:
    """Bytes of a state by vLLM's own class methods, groups, bytes of a block, and blocks of a request, on 1 to 8
    ranks; without prefix caching, with it and sinks, and with drafts, of n-grams or of a layer of the model, whose
    keys lie behind the pages."""
    more = {"recent_window": 64, "num_sink_tokens": 0}
    sinks = more | {"num_sink_tokens": 8}
    cases = [
        [name, bits, ranks, drafts, has_prefixes, context, formats, by_mtp]
        for bits, context in ((2, 32768), (3, 8192), (4, 131072)) for ranks in (1, 2, 4, 8)
        for drafts, has_prefixes, formats, by_mtp in (
            (0, False, more, False), (0, True, sinks, False), (3, True, more, False), (3, True, sinks, True),
            (3, False, more, True),
        )
    ]  # fmt: skip
    found = run_in(version, tmp_path, "vllm_planner.py", cases)
    assert all(one["vllm"] == one["kvcal"] for one in found), list(zip(cases, found, strict=True))
    assert len(found) == 60 and max(one["pages_per_block"] for one in found) > 1


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid"))


def block_of(plan: Plan) -> int:
    """Tokens of a block."""
    return capacity_of("vllm", plan, 64 << 20, 1, 2048, state_bytes=STATE_BYTES).block_tokens


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCAL_TEST_POISON", "1")


@pytest.mark.parametrize("has_copies", [False, True], ids=["pages", "sinks and windows"])
def test_cold_and_behind_cached_prefixes(has_copies: bool, version: str, tmp_path: Path, hybrid: Hybrid) -> None:
    """vLLM keeps states at the ends of blocks, and requests begin there."""
    plan, given = hybrid.with_copies() if has_copies else hybrid.plan, prompts(*LENGTHS, 1025)
    tokens = block_of(plan)
    assert tokens > 128
    requests = [{"prompt": ids, "tokens": TOKENS, "at": at} for at in (0, TOKENS + 5) for ids in given]
    found, replay = serve(version, tmp_path, hybrid, requests, plan, block_size=tokens)
    assert sum(len(output) for _, output in found["requests"].values()) == 10 * TOKENS
    assert replay.restarts == 0 and sum(replay.cached.values()) >= tokens * (1024 // tokens), replay.cached
    assert_capacity(found, plan, state_bytes=STATE_BYTES)
    within = [tokens_ for tokens_ in replay.cached.values() if tokens_ % tokens]
    assert bool(within) == has_copies  # a group of sinks has vLLM look for hits by pages, and copy begun blocks


@pytest.mark.parametrize("has_copies", [False, True], ids=["pages", "sinks and windows"])
def test_random_requests_in_few_blocks(has_copies: bool, version: str, tmp_path: Path, hybrid: Hybrid) -> None:
    """Prompts in chunks, eviction, aborts, samples of a prompt; then requests that lose their blocks, and are
    computed again."""
    plan = hybrid.with_copies() if has_copies else hybrid.plan
    tokens = block_of(plan)
    more = {"block_size": tokens, "max_model_len": 1024, "max_num_batched_tokens": 512}
    _, replay = serve(version, tmp_path, hybrid, random_requests(100), plan, num_gpu_blocks_override=40, **more)
    assert sum(replay.cached.values()) > 1000
    requests = [{"prompt": ids, "tokens": 150} for ids in prompts(*range(tokens - 90, tokens - 50, 10))]
    needed = capacity_of("vllm", plan, 64 << 20, 1, tokens, state_bytes=STATE_BYTES).blocks_per_request
    few = {**more, "num_gpu_blocks_override": 2 + 3 * needed}  # three fit until they have grown
    _, replay = serve(version, tmp_path, hybrid, requests, plan, **few)
    assert replay.restarts > 0


def test_attention_of_every_layer(version: str, tmp_path: Path, hybrid: Hybrid) -> None:
    """From the engine's own queries, keys and values, with prompts in chunks, after prefixes, with sinks and
    windows. One bit more tells."""
    plan, file = hybrid.with_copies(), tmp_path / "attention"
    requests = [{"prompt": ids, "tokens": 60, "at": at} for at in (0, 80) for ids in prompts(*LENGTHS)]
    llm = hybrid.arguments(hybrid.write("attention.safetensors", plan), block_size=block_of(plan))
    llm["max_num_batched_tokens"] = 512
    found = run_in(version, tmp_path, "vllm_host.py", {"llm": llm, "requests": requests}, {VARIABLE: str(file)})
    assert "error" not in found, found
    replay = assert_attended(file, found["steps"], hybrid.model, plan, 400)
    assert sum(replay.cached.values()) > 0


def test_blocks_of_any_number_of_pages_answer_the_same(version: str, tmp_path: Path, hybrid: Hybrid) -> None:
    requests = [{"prompt": ids, "tokens": 60} for ids in prompts(*LENGTHS)]
    answers = []
    for pages in (1, 3):
        more = {"block_size": 128 * pages, "enable_prefix_caching": False}
        found, _ = serve(version, tmp_path / str(pages), hybrid, requests, **more)
        answers.append(found["outputs"])
        assert any(f"blocks of {128 * pages} tokens: the plan takes" in line for line in found["log"])
    assert answers[0] == answers[1]


def test_two_ranks(version: str, tmp_path: Path, hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a KV head, and half of a state."""
    monkeypatch.delenv("KVCAL_TEST_POISON")  # the scheduler is another process than its workers
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    tokens = capacity_of("vllm", hybrid.plan, 64 << 20, 2, 2048, state_bytes=STATE_BYTES // 2).block_tokens
    requests = [{"prompt": ids, "tokens": 20, "at": at} for at in (0, 25) for ids in prompts(1100, 1300)]
    _, replay = serve(version, tmp_path, hybrid, requests, block_size=tokens, **ranks)
    assert sum(replay.cached.values()) > 1000


def test_blocks_of_other_tokens_are_refused_or_told(version: str, tmp_path: Path, hybrid: Hybrid) -> None:
    tokens = block_of(hybrid.plan)
    found = run_in(version, tmp_path, "vllm_host.py", {"starts": [hybrid.arguments(block_size=n) for n in (192, 128)]})
    assert f"blocks of 192 tokens, expected {tokens}" in found["starts"][0]["message"]
    assert "error" not in found["starts"][1], found["starts"][1]
    assert re.search(f"take fewest bytes with the plan: --block-size {tokens}", (tmp_path / "log").read_text())
