"""The ``kv_cache_scheme`` of compressed-tensors, as vLLM reads it from ``quantization_config`` of config.json.

vLLM takes one scheme for all layers, 8-bit floats with a scale for each layer, and refuses any other width or type.
"""

from __future__ import annotations

import json
from typing import Any

from kvcal.exports.export import Export, planned_bits
from kvcal.plan.plan import Plan

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def compressed_tensors(plan: Plan) -> Export:
    """A JSON file whose one key belongs into the model's config.json. A plan of 16 bits has no scheme."""
    planned = planned_bits(plan)
    is_quantized = any(width < 16 for bits in planned.values() for width in bits)
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": SCHEME if is_quantized else None,
    }
    return Export(
        text=json.dumps({"quantization_config": config}, indent=2) + "\n",
        bits={index: (8, 8) if is_quantized else bits for index, bits in planned.items()},
        notes=(
            "add the key quantization_config to the model's config.json; it is for models with unquantized weights",
            "a plan has no scales of FP8: vLLM takes 1 unless the checkpoint has tensors k_scale and v_scale",
        ),
    )
