"""vLLM's own two tiers: one of its KV formats for all layers, and layers that stay at 16 bits.

Of the formats, the one is taken with which the cache has the fewest bits, if every layer that needs more than it has
stays at 16 bits. Nothing else of a plan can be said in arguments; kvcal's plug-in for vLLM takes all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvcal.exports.export import Bits, Export, planned_bits
from kvcal.plan.plan import Plan

RAW: Bits = (16, 16)
# Bits of keys and values; of equal ones the first is taken.
PRESETS: dict[str, Bits] = {
    "int4_per_token_head": (4, 4),
    "int8_per_token_head": (8, 8),
    "turboquant_3bit_nc": (3, 3),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_k8v4": (8, 4),
}
EDGE_LAYERS = 2  # with turboquant, vLLM keeps so many layers at either end at 16 bits, where none keeps a state


def vllm_args(plan: Plan) -> Export:
    """One line of arguments of `vllm serve`."""
    planned = planned_bits(plan)
    if all(bits == RAW for bits in planned.values()):
        return Export("--kv-cache-dtype auto\n", planned)
    paged = {layer.geometry.index for layer in plan.layers if layer.is_paged}
    edge = 0 if len(planned) < len(plan.layers) else min(EDGE_LAYERS, len(planned) // 2)
    edges = {index for place, index in enumerate(planned) if not edge <= place < len(planned) - edge}
    stored = {name: _stored(planned, bits, edges if "turboquant" in name else ()) for name, bits in PRESETS.items()}
    name = min(PRESETS, key=lambda name: sum(sum(stored[name][index]) for index in paged))
    skipped = [str(index) for index in sorted(paged) if stored[name][index] == RAW]
    skipped += ["sliding_window"] if len(paged) < len(planned) else []
    words = ["--kv-cache-dtype", name]
    words += ["--kv-cache-dtype-skip-layers", *skipped] if skipped else []
    return Export(" ".join(words) + "\n", stored[name])


def _stored(planned: Mapping[int, Bits], preset: Bits, edges: Collection[int]) -> dict[int, Bits]:
    """The bits of every layer with a preset: 16 at the edges, and where the preset has too few."""
    return {
        index: RAW if index in edges or bits[0] > preset[0] or bits[1] > preset[1] else preset
        for index, bits in planned.items()
    }
