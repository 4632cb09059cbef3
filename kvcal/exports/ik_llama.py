"""Arguments of ik_llama.cpp for the cache's types, with other types for the first and the last layers
(ikawrakow/ik_llama.cpp#1599).

Keys and values each have one type in the middle, one in the first and one in the last layers. Of all ways to give every
layer at least its bits, the one with the fewest bits in all is taken. llama.cpp itself has the middle's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcal.exports.export import Export, at_least, planned_bits
from kvcal.geometry import CacheDtype
from kvcal.plan.plan import Plan

TYPES = {4: "q4_0", 8: "q8_0"}  # blocks of 32 values with a scale in float16
WIDTHS = (4, 8, 16)
RAW_TYPES: dict[CacheDtype, str] = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def ik_llama(plan: Plan) -> Export:
    """One line of arguments."""
    names = {**TYPES, 16: RAW_TYPES[plan.cache_dtype]}
    planned = planned_bits(plan)
    words: list[str] = []
    stored: list[list[int]] = []
    for side, number in (("k", 0), ("v", 1)):
        needed = [at_least(bits[number], WIDTHS) for bits in planned.values()]
        widths, (first, middle, last) = min(_splits(needed), key=lambda split: sum(split[0]))
        words += [f"-ct{side}", names[middle]]
        words += [f"-ct{side}-first", f"{names[widths[0]]},{first}"] if first else []
        words += [f"-ct{side}-last", f"{names[widths[-1]]},{last}"] if last else []
        stored.append(widths)
    return Export(
        text=" ".join(words) + "\n",
        bits={index: (k, v) for index, k, v in zip(planned, *stored, strict=True)},
        notes=("llama-server counts attention layers from the first; quantized values need its flash attention",),
    )


def _splits(needed: Sequence[int]) -> Iterator[tuple[list[int], tuple[int, int, int]]]:
    """The bits of every layer, and (first layers, the middle's bits, last layers), for every middle that is needed and
    every place between which the layers that need more are the first or the last ones; fewest special layers first."""
    count = len(needed)
    for middle in sorted(set(needed), reverse=True):
        wide = [place for place, bits in enumerate(needed) if bits > middle]
        for cut in range(len(wide) + 1):
            first = wide[cut - 1] + 1 if cut else 0
            last = count - wide[cut] if cut < len(wide) else 0
            if first + last <= count:
                head = [max(needed[:first], default=middle)] * first
                tail = [max(needed[count - last :], default=middle) if last else middle] * last
                yield head + [middle] * (count - first - last) + tail, (first, middle, last)
