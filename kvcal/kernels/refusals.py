"""What a static cache does not take, layer by layer, each with its reason.

``storage_refusals`` hold on every device, ``refusals`` adds what the kernels alone cannot do. Nothing here is about
speed: which kernel serves a layer is kvcal.kernels.choice.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcal.kernels.macros import SCORES, page_layout
from kvcal.kernels.variants import stored_form
from kvcal.pages import LAYOUTS
from kvcal.plan.format import SIDES, Format, Side
from kvcal.plan.layer import LayerPlan

# The kernels load tokens 8 channels at a time, and keep a tile of them in shared memory.
CHANNELS_AT_ONCE, MAX_HEAD_DIM = 8, 512


def storage_refusals(plan: LayerPlan, cache_dtype: str) -> Iterator[str]:
    """Why a cache of fixed size cannot hold this layer, on any device; nothing if it can."""
    geometry = plan.attention
    if geometry.window == 1:
        yield "its sliding window of 1 token keeps nothing"
    if geometry.k_head_dim != geometry.v_head_dim:
        yield f"head sizes {geometry.k_head_dim} (K) and {geometry.v_head_dim} (V) differ"
    if any(fmt.keeps_queries for fmt in plan.k):
        yield "its channels are chosen by all queries so far; a static cache knows those since the page before"
    for side in SIDES:
        for fmt in plan.formats(side):
            if not LAYOUTS[fmt.layout_name].has_kernels:
                yield f"{side} pages are of the quantizer {fmt.quantizer!r}, which has no kernels"
            if fmt.boost is not None and fmt.boost.score not in SCORES and not fmt.keeps_queries:
                yield f"{side} channels are chosen by the score {fmt.boost.score!r}, which has no kernels"
            if not fmt.shrink_at:
                continue
            form = stored_form(plan, side, fmt)
            if form is not None:
                yield f"{side} pages {form} and shrink: only pages that the kernels read as they are can"
            else:
                yield from _growths(side, fmt, plan.head_dim(side), cache_dtype)


def _growths(side: Side, fmt: Format, head_dim: int, cache_dtype: str) -> Iterator[str]:
    """Where pages take more bytes once they have shrunk: with scales and zeros in fp32, heads far below 16 channels."""
    widths = [fmt.start_bits >> halvings for halvings in range(len(fmt.shrink_at) + 1)]
    sizes = [page_layout(side, fmt, head_dim, cache_dtype, bits).record_bytes for bits in widths]
    for wide, narrow, before, after in zip(widths, widths[1:], sizes, sizes[1:], strict=False):
        if after > before:
            yield f"{side} pages of {narrow} bits take {after} bytes, and those of {wide} that are to shrink {before}"


def refusals(plan: LayerPlan, cache_dtype: str) -> Iterator[str]:
    """Why the kernels cannot serve this layer; nothing if they can."""
    geometry = plan.attention
    if cache_dtype == "float32":
        yield "the cache holds float32; the kernels take bfloat16 and float16"
    if geometry.k_head_dim % CHANNELS_AT_ONCE or geometry.k_head_dim > MAX_HEAD_DIM:
        yield f"head size {geometry.k_head_dim}; the kernels take multiples of {CHANNELS_AT_ONCE} up to {MAX_HEAD_DIM}"
    yield from storage_refusals(plan, cache_dtype)
