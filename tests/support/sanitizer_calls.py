"""The calls that test_sanitizer.py makes under compute-sanitizer: `python sanitizer_calls.py CASE`.

A layer of a static cache, two rows of unlike lengths: a prompt that is packed and read back, then steps until
each row has packed a page by itself. Small, since every access is checked: 2 KV heads, 45 steps.
"""

import sys

import torch
from form_cases import with_tensors
from transformers import LlamaConfig, MistralConfig

from kvcal import Plan, PlanCache
from kvcal.geometry import AttentionGeometry, ModelIdentity
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Boost, Format, Tier
from kvcal.plan.plan import Workload
from kvcal.store.state import Serving

KITTY = Boost("magnitude", (Tier(4, 0.125),))
MIXKVQ = Boost("query_range", (Tier(16, 0.125, 1.5), Tier(4, 0.25, 0.5)))
ROTATED = "rotated pages in a basis, error feedback"
# Formats of keys and values; None: a sliding window of 100 tokens.
CASES = {
    "Kitty": (Format(2, "channel", boost=KITTY), Format(2)),
    "sinks and windows": (Format(2, "channel", 32, 32, 128), Format(2, "token", 32, 32, 128)),
    "keys of 16 bits": (RAW, Format(2, "token", 32, 4)),
    "values of 16 bits": (Format(2, "channel", 32, 4), RAW),
    "query scores": (Format(2, "channel", 32, boost=MIXKVQ), Format(2, "token", 32)),
    "unequal sinks": (Format(2, "channel", 32, 4), Format(2, "token", 32)),
    ROTATED: (Format(2, num_sink_tokens=4, quantizer="rotated"), Format(3, quantizer="rotated")),
    "a sliding window": None,
}
LENGTHS, STEPS, GROUP, HEADS, DIM = (372, 250), 45, 4, 2, 128


def layers_of(case: str) -> list[LayerPlan]:
    formats = CASES[case]
    geometry = AttentionGeometry(0, GROUP * HEADS, HEADS, DIM, DIM, None if formats else 100)
    if formats is None:
        return [LayerPlan(geometry)]
    parts = ("k_feedback", "v_feedback", "k_basis", "v_basis") if case == ROTATED else ()
    return [LayerPlan(geometry, *formats, **dict.fromkeys(parts, True))]


def cache_of(case: str) -> PlanCache:
    layers = layers_of(case)
    kind, more = (LlamaConfig, {}) if CASES[case] else (MistralConfig, {"sliding_window": 100})
    config = kind(num_hidden_layers=len(layers), num_attention_heads=GROUP * HEADS, num_key_value_heads=HEADS, **more)
    identity = ModelIdentity("none", config.model_type, "", "", "")
    mask = torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, : max(LENGTHS) - length] = 0
    # Without the tensors that some layers need; they come with the layers.
    plain = [LayerPlan(layer.geometry, *((RAW, RAW) if CASES[case] else ())) for layer in layers]
    plan = with_tensors(Plan(identity, "bfloat16", tuple(plain), Workload(2, 512), {}), layers)
    return PlanCache(plan, config, mask, max_tokens=512)


@torch.inference_mode()
def main(case: str, device: str = "cuda") -> None:
    cache = cache_of(case)
    cache.allocate(len(LENGTHS), device)
    cache.static.serving, layers = Serving(), cache.paged_layers
    generator = torch.Generator(device).manual_seed(0)

    def states(heads: int, tokens: int) -> torch.Tensor:
        shape = (len(LENGTHS), heads, tokens, DIM)
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return states(GROUP * HEADS, count), states(HEADS, count), states(HEADS, count)

    for count in (360, max(LENGTHS) - 360):  # the second chunk reads what the first has packed
        for layer in layers:
            q, k, v = tokens(count)
            layer.update(k, v)
            layer.observe(q)
    for _ in range(STEPS):
        for layer in layers:
            found = layer.attend(*tokens(1), None, DIM**-0.5, 0.0)
    cache.check()
    assert cache.lengths == [length + STEPS for length in LENGTHS] and bool(found.isfinite().all())


if __name__ == "__main__":
    main(sys.argv[1])
    print("done")
