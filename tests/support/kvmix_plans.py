"""Plans of KVmix."""

from dataclasses import replace

from cache_cases import llama_plan

from kvcal import Plan
from kvcal.recipe import CacheSpec
from kvcal.systems.kvmix.importance import kvmix_formats
from kvcal.systems.kvmix.recipe import ImportanceSpec


def kvmix_plan(window: str, **changes) -> Plan:
    """Of two layers: the first one matters for K, the other for V."""
    spec = replace(ImportanceSpec(), window=window, **changes)
    scores = {"k": {0: 0.0, 1: -1.0}, "v": {0: 0.0, 1: 1.0}}
    formats = kvmix_formats(scores, spec, CacheSpec(num_sink_tokens=0))
    base = llama_plan(*formats[0])
    layers = tuple(
        replace(layer, k=formats[layer.geometry.index][0], v=formats[layer.geometry.index][1]) for layer in base.layers
    )
    return replace(base, layers=layers)
