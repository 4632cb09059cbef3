"""Models with states, as their configurations say, and plans of their shapes, without weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcal.engines.states import state_bytes
from kvcal.geometry import AttentionGeometry, CacheDtype, LayerGeometry, ModelIdentity, StateGeometry
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Plan, Workload

_GDN = {
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}


class Shape(NamedTuple):
    """``config``: what tells the state; layers of ``full`` attention, ``states`` alone between them, or in the
    same layers (``both``)."""

    config: dict[str, Any]
    vllm: str
    full: int
    states: int
    query_heads: int
    kv_heads: int
    head_dim: int
    both: bool = False

    def plan(self, num_bits: int, context: int = 32768, **more: int) -> Plan:
        """With keys and values of so many bits, in bfloat16."""
        layers: list[LayerPlan] = []
        k, v = (Format(num_bits, axis, **more) for axis in ("channel", "token"))
        geometry: LayerGeometry
        every = 1 if self.both else 1 + self.states // self.full
        for index in range(self.full if self.both else self.full + self.states):
            heads = self.query_heads, self.kv_heads, self.head_dim, self.head_dim
            if index % every == 0 and index // every < self.full:
                geometry = AttentionGeometry(index, *heads, state_bytes=64 if self.both else 0)
                layers.append(LayerPlan(geometry, k, v))
            else:
                layers.append(LayerPlan(StateGeometry(index, 64)))
        model = ModelIdentity("hybrid", self.config["model_type"], "a" * 64, "b" * 64, "c" * 64)
        return Plan(model, "bfloat16", tuple(layers), Workload(1, context), {})

    def state_bytes(self, num_ranks: int, lookahead: int = 0, dtype: CacheDtype | None = None) -> int:
        """Of a layer on a rank, by the configuration."""
        return state_bytes(self.config, num_ranks, 1 + lookahead, "bfloat16", dtype)


SHAPES = {
    "qwen3-next": Shape(
        {"model_type": "qwen3_next", "linear_num_value_heads": 32, **_GDN}, "qwen3_next.Qwen3NextForCausalLM",
        12, 36, 16, 2, 256,
    ),
    "qwen3.5-27b": Shape(
        {"model_type": "qwen3_5_text", "linear_num_value_heads": 48, "mamba_ssm_dtype": "float32", **_GDN},
        "qwen3_next.Qwen3NextForCausalLM", 16, 48, 24, 4, 256,  # Qwen3.5's own, with the same method, imports images
    ),
    "nemotron-h-8b": Shape(
        {"model_type": "nemotron_h", "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
         "conv_kernel": 4, "mamba_ssm_cache_dtype": "bfloat16"}, "nemotron_h.NemotronHForCausalLM", 4, 24, 32, 8, 128,
    ),
    "granite-4-h-small": Shape(
        {"model_type": "granitemoehybrid", "mamba_d_state": 128, "hidden_size": 4096, **_MAMBA},
        "granitemoehybrid.GraniteMoeHybridForCausalLM", 4, 36, 32, 8, 128,
    ),
    "falcon-h1-7b": Shape(
        {"model_type": "falcon_h1", "mamba_d_ssm": 3072, "mamba_d_state": 256, "hidden_size": 3072, **_MAMBA,
         "mamba_n_heads": 24, "mamba_d_head": 128}, "falcon_h1.FalconH1ForCausalLM", 44, 44, 8, 2, 128, both=True,
    ),
    "jamba-mini": Shape(
        {"model_type": "jamba", "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "hidden_size": 4096},
        "jamba.JambaForCausalLM", 4, 28, 32, 8, 128,
    ),
    "lfm2-2.6b": Shape(
        {"model_type": "lfm2", "conv_dim": 2048, "conv_L_cache": 3, "hidden_size": 2048}, "lfm2.Lfm2ForCausalLM",
        8, 22, 32, 8, 64,
    ),
}  # fmt: skip
