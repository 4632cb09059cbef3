"""Which of two kernels serves ``decode`` on CUDA.

The folded one (``csrc/decode.cu``) is built around the tensor cores' operands, and takes the head sizes whose planes
lie in their order. The plain one (``csrc/decode_plain.cu``) takes everything, more slowly. So that nobody meets it
unawares, a static cache warns of the layers that it serves (``SlowPath``), and a ``Variant`` can ask for it
where both would do (``plain``): they must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvcal.errors import SlowPath
from kvcal.geometry import CacheDtype
from kvcal.kernels.variants import Variant, head_ranges, variant_of
from kvcal.pages.layout import RAW_BITS
from kvcal.plan.layer import LayerPlan

FOLDED_HEAD_DIMS = (64, 128)


def is_plain(variant: Variant) -> bool:
    """Whether the plain kernel serves the variant."""
    return variant.plain or any(plain_reasons(variant))


def plain_reasons(variant: Variant) -> Iterator[str]:
    """Why the folded kernel cannot serve the variant; nothing if it can."""
    if variant.head_dim not in FOLDED_HEAD_DIMS:
        yield f"head size {variant.head_dim}, where the fast kernel takes {' and '.join(map(str, FOLDED_HEAD_DIMS))}"
    sinks = (variant.k.num_sink_tokens, variant.v.num_sink_tokens)
    if sinks[0] != sinks[1] and RAW_BITS not in (variant.num_bits("k"), variant.num_bits("v")):
        yield f"{sinks[0]} sink tokens of keys and {sinks[1]} of values, so that their pages hold different tokens"


def slow_reasons(plan: LayerPlan, cache_dtype: CacheDtype) -> tuple[str, ...]:
    """Why the plain kernel serves some heads of a layer, every reason once; empty if none."""
    variants = (variant_of(plan, pair, cache_dtype) for pair in head_ranges(plan))
    return tuple(dict.fromkeys(reason for variant in variants for reason in plain_reasons(variant)))


def slow_path(layers: Mapping[int, Sequence[str]]) -> SlowPath:
    """What ``PlanCache.slow_layers`` says, in one sentence: layers of the same reasons together."""
    by_reasons: dict[tuple[str, ...], list[int]] = {}
    for index, reasons in layers.items():
        by_reasons.setdefault(tuple(reasons), []).append(index)
    parts = [f"layers {', '.join(map(str, found))}: {', '.join(reasons)}" for reasons, found in by_reasons.items()]
    return SlowPath(f"steps of some layers take longer than the fast kernels: {'; '.join(parts)}")
