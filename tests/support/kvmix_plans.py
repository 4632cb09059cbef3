"""Plans of KVmix."""

from dataclasses import replace

from cache_cases import llama_plan

from kvcal import Plan
from kvcal.recipe import CacheSpec
from kvcal.systems.kvmix.importance import kvmix_formats
from kvcal.systems.kvmix.recipe import ImportanceSpec


def kvmix_plan(window: str = "paged", num_layers: int = 2, **changes) -> Plan:
    """Layer 0 matters for K, the last one for V."""
    spec = replace(ImportanceSpec(), window=window, **changes)
    scores = {side: {i: float(i if side == "v" else -i) for i in range(num_layers)} for side in ("k", "v")}
    formats = kvmix_formats(scores, spec, CacheSpec(num_sink_tokens=0))
    base = llama_plan(*formats[0], num_layers=num_layers)
    layers = tuple(
        replace(layer, k=formats[layer.geometry.index][0], v=formats[layer.geometry.index][1]) for layer in base.layers
    )
    return replace(base, layers=layers)
