"""Small random models in folders, plans for them, and prompts, which tests serve in vLLM and SGLang."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from cache_cases import model_plan
from engine_cases import based
from tiny_models import perturbed

from kvcal import Plan
from kvcal.geometry import CacheDtype
from kvcal.models.load import identity_of
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.damage import Damage
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.plan.plan import LayerPlan, Workload, save_plan

VOCABULARY = 128
LENGTHS = (5, 130, 300, 700)


def fmt(num_bits: int, axis: str = "channel", **more: Any) -> Format:
    return Format(num_bits, axis, 32, **more)


FORMATS = [
    (fmt(4), fmt(4, "token")),
    (fmt(2, boost=Boost("magnitude", (Tier(4, 0.25),))), fmt(2, "token")),
    (fmt(2, boost=Boost("query_magnitude", (Tier(8, 0.125),))), fmt(2, "token")),
    (fmt(4), fmt(3, "token")),
]


class Served:
    """A random Llama of 4 layers in a folder, and a plan for it, with λ, offset and channels by queries in
    layer 2. Or Gemma-3, whose layers have a sliding ``window`` but for ``every`` second one."""

    def __init__(
        self, folder: Path, seed: int = 0, layers: int = 4, head_dim: int = 16, cache_dtype: CacheDtype = "float32",
        window: int | None = None, every: int = 2,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        shape: dict[str, Any] = {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": head_dim, "vocab_size": VOCABULARY, "max_position_embeddings": 32768,
            "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
        }  # fmt: skip
        if window is None:
            self.model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, tie_word_embeddings=False))
        else:
            kinds = [*["sliding_attention"] * (every - 1), "full_attention"] * (layers // every)
            more = {"sliding_window": window, "layer_types": kinds, "query_pre_attn_scalar": head_dim}
            self.model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**shape, **more))
        perturbed(self.model, 0.15)
        self.folder = folder
        self.model.save_pretrained(folder)
        geometry = geometry_of(self.model, cache_dtype=cache_dtype)
        planned = [
            LayerPlan(layer, *formats) if window is None or layer.window is None else LayerPlan(layer)
            for layer, formats in zip(geometry.layers, itertools.cycle(FORMATS), strict=False)
        ]
        tensors = {}
        if planned[2:] and planned[2].is_paged:
            planned[2] = dataclasses.replace(planned[2], k_rescale=True, k_offset=True)
            tensors = {
                "layers.2.k_rescale": torch.rand(2, head_dim) + 0.5, "layers.2.k_offset": torch.randn(2, head_dim),
            }  # fmt: skip
        self.plan = Plan(identity_of(folder, "tiny"), cache_dtype, tuple(planned), Workload(2, 300), {}, tensors)

    def with_copies(self, has_sinks: bool = True) -> Plan:
        """The plan with sinks in layers 0 and 2, and windows in layers 1 to 3, others for keys than for
        values."""
        more: list[tuple[dict[str, int], dict[str, int]]] = [
            ({"num_sink_tokens": 4}, {"num_sink_tokens": 4}), ({"recent_window": 128}, {"recent_window": 200}),
            ({"num_sink_tokens": 5, "recent_window": 64}, {}), ({}, {"recent_window": 32}),
        ]  # fmt: skip
        layers = []
        for layer, (k, v) in zip(self.plan.layers, more, strict=True):
            none = {} if has_sinks else {"num_sink_tokens": 0}
            keys, values = dataclasses.replace(layer.k, **k | none), dataclasses.replace(layer.v, **v | none)
            layers.append(dataclasses.replace(layer, k=keys, v=values))
        return dataclasses.replace(self.plan, layers=tuple(layers))

    def in_bases(self) -> Plan:
        """A plan of rotated pages in random bases, of whose values codes are chosen with error feedback."""
        k, v = (Format(bits, "token", 32, 4, 64, quantizer="rotated") for bits in (3, 2))
        return dataclasses.replace(based(model_plan(self.model, k, v)), model=self.plan.model)

    def write(self, name: str, plan: Plan | None = None) -> str:
        path = self.folder / "plans" / name  # vLLM takes every file of tensors next to a configuration for weights
        path.parent.mkdir(exist_ok=True)
        save_plan(self.plan if plan is None else plan, path)
        return str(path)

    def arguments(self, plan: str | None = None, **more: Any) -> dict[str, Any]:
        """Of vLLM's LLM."""
        return {
            "model": str(self.folder), "dtype": "float32", "skip_tokenizer_init": True, "block_size": 128,
            "max_model_len": 2048, "enforce_eager": True, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": True, "compilation_config": {"custom_ops": ["none"]},
            "additional_config": {"kvcal_plan": self.write("plan.safetensors") if plan is None else plan},
        } | more  # fmt: skip


def without_queries(served: Served, plan: Plan | None = None) -> Plan:
    """The plan, but that no channels are chosen by queries, as rejected drafts would stay counted."""
    chosen = FORMATS[1][0].boost
    layers = [
        dataclasses.replace(layer, k=dataclasses.replace(layer.k, boost=chosen))
        if layer.is_paged and layer.k.needs_queries else layer for layer in (plan or served.plan).layers
    ]  # fmt: skip
    return dataclasses.replace(plan or served.plan, layers=tuple(layers))


def with_sinks(plan: Plan) -> Plan:
    """Sinks in three of four layers, others for keys than for values; in none with a sliding window."""
    numbers = [(4, 4), (5, 0), (0, 0), (8, 4)]
    layers = []
    for layer, (k, v) in zip(plan.layers, numbers, strict=True):
        if not layer.is_paged:
            layers.append(layer)
            continue
        keys, values = (dataclasses.replace(side, num_sink_tokens=n) for side, n in ((layer.k, k), (layer.v, v)))
        layers.append(dataclasses.replace(layer, k=keys, v=values))
    return dataclasses.replace(plan, layers=tuple(layers))


def damages_of(plan: Plan) -> list[Damage]:
    """Of a sound plan, and of one that destroys the model."""
    return [Damage(plan.sha256, kl, None, top1, 100, "texts", (), {}) for kl, top1 in ((0.01, 0.99), (9.0, 0.1))]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    chosen = random.Random(seed)
    return [[chosen.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def random_requests(count: int, temperature: float = 1.0) -> list[dict]:
    """Shared prefixes, aborts anywhere, two samples of some prompts."""
    chosen = random.Random(7)
    prefixes = prompts(128, 260, 400, seed=3)
    requests = []
    for number in range(count):
        prefix = chosen.choice([[], *prefixes])
        ids = prefix + prompts(chosen.randrange(1, 150), seed=100 + number)[0]
        request = {"prompt": ids, "tokens": chosen.randrange(1, 30), "at": number * 2}
        request["temperature"] = temperature
        if chosen.random() < 0.2:
            request["abort"] = request["at"] + chosen.randrange(1, 40)
        if chosen.random() < 0.1:
            request["n"] = 2
        requests.append(request)
    return requests
