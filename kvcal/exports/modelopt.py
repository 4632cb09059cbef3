"""ModelOpt's ``hf_quant_config.json`` with its layer-wise KV schema, version 1 (NVIDIA/Model-Optimizer#2272).

The schema names FP8 or NVFP4 for each attention module, keys and values alike; other modules stay at 16 bits. vLLM's
reader of it is in review (vllm-project/vllm#56116). Left out: FP8 keys with NVFP4 values, which that reader refuses;
scales, which a plan does not have.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from kvcal.exports.export import Export, at_least, planned_bits
from kvcal.pages.record_layout import RAW_BITS
from kvcal.plan.plan import Plan

ALGORITHMS = {4: "NVFP4", 8: "FP8"}


def modelopt(plan: Plan) -> Export:
    """The file's content; a layer's format is that of its wider side."""
    widths = (*ALGORITHMS, RAW_BITS)
    bits = {index: at_least(max(planned), widths) for index, planned in planned_bits(plan).items()}
    layers = {
        f"model.layers.{index}.self_attn": {"quant_algo": ALGORITHMS[width]}
        for index, width in bits.items()
        if width in ALGORITHMS
    }
    algorithms = sorted({layer["quant_algo"] for layer in layers.values()})
    quantization: dict[str, Any] = {
        "quant_algo": None,
        "kv_cache_quant_algo": "MIXED_PRECISION" if len(algorithms) > 1 else next(iter(algorithms), None),
        "exclude_modules": [],
        "kv_cache_schema_version": 1,
        "kv_cache_quantized_layers": layers,
    }
    config = {"producer": {"name": "kvcal", "version": version("kvcal")}, "quantization": quantization}
    return Export(
        text=json.dumps(config, indent=2) + "\n",
        bits={index: (width, width) for index, width in bits.items()},
        notes=(
            "layers are named model.layers.N.self_attn, as Llama's, Qwen's and Mistral's are",
            "the file has no scales: engines take 1 for those of FP8 and NVFP4",
        ),
    )
