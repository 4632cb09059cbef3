"""The choice between two kernels that serve ``decode`` on CUDA, and what neither of them takes.

The fast kernel (``csrc/decode.cu``) is built around the tensor cores' operands, and takes the head sizes
whose planes lie in their order. The plain one (``csrc/decode_plain.cu``) takes everything, more slowly: a
static cache warns of the layers that it serves (``SlowPath``), and a ``Variant`` can ask for it where both
would do (``plain``): they must agree.

``not_served`` says by a layer's ways (kvcal.pages.ways) why a place does not serve it; ``refusals`` are those
of a cache of fixed size, and sizes beyond the kernels. ``long_step_reasons`` are why one launch cannot
take several tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvcal.errors import SlowPath
from kvcal.geometry import CacheDtype
from kvcal.kernels.variants import SCORES, Variant, variant_of
from kvcal.pages.layout_protocol import PAGE_TOKENS, RAW_BITS
from kvcal.pages.ways import Place
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Format
from kvcal.systems.kitty.tiered import TieredLayout

NARROW_HEAD_DIMS = (64, 128)
# The fast kernel's passes of 8 query heads a tile (csrc/decode/wide_keys.cuh) take more of them.
WIDE_HEAD_DIMS = (64, 96, 128, 192, 256)
WORD_CHANNELS = 64  # sixteen for each lane of a quad
TILE_HEADS, WIDE_HEADS = 4, 8  # query heads of a tile of the tensor core: otherwise, and if wide
MANY_HEADS = 16  # KV heads of all rows, from which on two tiles of columns pay: 8 take up to 5 us longer with them
MAX_LARGE_BITS = 4  # of more than 128 channels: shared memory of 99 KiB has room for one page of a head
MAX_WIDE_BITS = 3  # of 128 channels: more of them wait for memory
MAX_WIDE_GROUPS = 3  # of channels, of values: rows of a tile
# The kernels load tokens 8 channels at a time, and keep a tile of them in shared memory.
CHANNELS_AT_ONCE, MAX_HEAD_DIM = 8, 512
MAX_STEP_TOKENS = 8  # of a sequence in one launch
MAX_CODE_SUM = 2**22 // 128  # of a token's bytes
LIFTS = {1: 7, 2: 6, 3: 4, 4: 4}  # by the bits of the widest code
MAX_STAGED_DIM = 128  # of tokens of a whole page in shared memory, which make room there for their codes
MAX_ROTATED_DIM = 256  # of a token whose channels a block rounds one after the other (csrc/feedback_large.cuh)


def is_plain(variant: Variant) -> bool:
    return variant.plain or any(plain_reasons(variant))


def is_wide(variant: Variant) -> bool:
    """``WIDE`` of the fast kernel: tiles of 8 query heads, whose codes are expanded once, in place of tiles
    of 4.

    Heads of 96, 192 and 256 have no other tiles. Others keep tiles of 4 for groups of up to 4, and 128
    channels for pages of 4 bits and more, which wait for memory in one pass. Wide tiles do not take windows
    that differ, groups of fewer than 128 tokens, scales of values that are no halves, and keys whose codes
    can add up to too much (``key_lift``)."""
    k, v, dim = variant.k, variant.v, variant.head_dim
    bits = variant.num_bits("k"), variant.num_bits("v")
    is_able = (
        dim in WIDE_HEAD_DIMS
        and RAW_BITS not in bits
        and k.window_rule is None and v.window_rule is None and k.recent_window == v.recent_window
        and v.param_dtype == "float16" and -(-dim // v.group_size) <= MAX_WIDE_GROUPS
        and (k.group_size >= PAGE_TOKENS if k.axis == "channel" else dim % WORD_CHANNELS == 0 or k.group_size >= dim)
        and (bits[0] % 2 == 0 or dim % WORD_CHANNELS == 0) and (dim <= MAX_STAGED_DIM or max(bits) <= MAX_LARGE_BITS)
        and key_lift(variant) is not None
    )  # fmt: skip
    waits = dim == MAX_STAGED_DIM and max(bits) > (MAX_LARGE_BITS if _has_two_tiles(variant) else MAX_WIDE_BITS)
    has_others = dim in NARROW_HEAD_DIMS and (variant.group_queries <= TILE_HEADS or waits)
    return is_able and not has_others


def pass_heads(variant: Variant) -> int:
    """Query heads of a group that one pass of the fast kernel over the cache serves (``HEADS``)."""
    if is_wide(variant):
        return 2 * WIDE_HEADS if _has_two_tiles(variant) else WIDE_HEADS
    return TILE_HEADS if variant.group_queries <= TILE_HEADS else 2 * TILE_HEADS


def _has_two_tiles(variant: Variant) -> bool:
    """Whether a wide pass has two tiles of columns, for which codes are expanded once. Larger heads, and
    scales of keys that change the query with every page, leave no registers for a second one. A step with few
    KV heads waits for each of them, and not for the expansion of codes."""
    is_long = variant.k.axis == "token" and variant.head_dim <= MAX_STAGED_DIM
    return is_long and variant.group_queries > WIDE_HEADS and not variant.few_heads


def plain_reasons(variant: Variant) -> Iterator[str]:
    """Why the fast kernel cannot serve the variant; nothing if it can."""
    if variant.head_dim not in NARROW_HEAD_DIMS and not is_wide(variant):
        of_formats = " with these formats" if variant.head_dim in WIDE_HEAD_DIMS else ""
        sizes = NARROW_HEAD_DIMS if of_formats else WIDE_HEAD_DIMS
        yield f"head size {variant.head_dim}{of_formats}, where the fast kernel takes {', '.join(map(str, sizes))}"
    sinks = (variant.k.num_sink_tokens, variant.v.num_sink_tokens)
    if sinks[0] != sinks[1] and RAW_BITS not in (variant.num_bits("k"), variant.num_bits("v")):
        yield f"{sinks[0]} sink tokens of keys and {sinks[1]} of values, whose 16-bit copies cover different tokens"


def slow_reasons(plan: LayerPlan, cache_dtype: CacheDtype) -> tuple[str, ...]:
    """Why the plain kernel serves a layer; empty if it does not, or no kernel reads its pages as they are
    stored."""
    is_served = plan.is_paged and not any(not_served(plan, "static"))
    return tuple(plain_reasons(variant_of(plan, cache_dtype))) if is_served else ()


def slow_path(layers: Mapping[int, Sequence[str]]) -> SlowPath:
    """``PlanCache.slow_layers`` in one sentence: layers of the same reasons together."""
    by_reasons: dict[tuple[str, ...], list[int]] = {}
    for index, reasons in layers.items():
        by_reasons.setdefault(tuple(reasons), []).append(index)
    parts = [f"layers {', '.join(map(str, found))}: {', '.join(reasons)}" for reasons, found in by_reasons.items()]
    return SlowPath(f"steps of some layers take longer than the fast kernels: {'; '.join(parts)}")


def refusals(plan: LayerPlan, cache_dtype: str, is_cuda: bool = True) -> Iterator[str]:
    """Why the kernels cannot serve this layer, or on a CPU why a cache of fixed size cannot hold it; nothing
    if it can."""
    reasons = list(not_served(plan, "static"))
    yield from reasons
    if not reasons or not plan.attention.is_latent:
        yield from limits(plan, cache_dtype, is_cuda)


def limits(plan: LayerPlan, cache_dtype: str, is_cuda: bool) -> Iterator[str]:
    """Sizes and dtypes beyond those of the kernels, or of caches of fixed size; nothing within them."""
    geometry, dim = plan.attention, plan.attention.k_head_dim
    if is_cuda and cache_dtype == "float32":
        yield "the cache holds float32; the kernels take bfloat16 and float16"
    if is_cuda and (dim % CHANNELS_AT_ONCE or dim > MAX_HEAD_DIM):
        yield f"head size {dim}; the kernels take multiples of {CHANNELS_AT_ONCE} up to {MAX_HEAD_DIM}"
    has_feedback = zip(plan.formats, (plan.k_feedback, plan.v_feedback), strict=False)
    if is_cuda and dim > MAX_STAGED_DIM and any(has and fmt.kind != "rotated" for fmt, has in has_feedback):
        rotated = f"{MAX_STAGED_DIM}, or {MAX_ROTATED_DIM} rotated"
        yield f"head size {dim}; with error feedback the kernels take up to {rotated}"
    if is_cuda and dim > MAX_ROTATED_DIM and any(fmt.kind == "rotated" for fmt in plan.formats):
        yield f"head size {dim}; of rotated pages the kernels take up to {MAX_ROTATED_DIM}"
    if geometry.window == 1:
        yield "its sliding window of 1 token keeps nothing"
    if geometry.k_head_dim != geometry.v_head_dim:
        yield f"head sizes {geometry.k_head_dim} (K) and {geometry.v_head_dim} (V) differ"
    if plan.is_paged and (alike := _of_stripes(plan.format("k"))) != (others := _of_stripes(plan.format("v"))):
        yield f"keys and values are packed and kept in different ways: {alike} and {others}"
    for side in SIDES if plan.is_paged else ():
        fmt = plan.format(side)
        if fmt.score is not None and fmt.score not in SCORES:
            yield f"{side} channels are chosen by the score {fmt.score!r}, which has no kernels"


def _of_stripes(fmt: Format) -> str | None:
    """The part that the formats of both sides share where stripes are packed; None where pages are."""
    if fmt.stripe_tokens == PAGE_TOKENS:
        return None
    return f"stripes of {fmt.stripe_tokens} tokens, {fmt.num_sink_tokens} sinks and a window of {fmt.recent_window}"


def not_served(plan: LayerPlan, place: Place) -> Iterator[str]:
    """Why ``place`` does not serve the ways in which a layer is stored; nothing where it does."""
    for way in plan.geometry_ways():
        if (reason := way.reason(place)) is not None:
            yield f"{way.name}: {reason}"
    for side in SIDES if plan.is_paged else ():
        for way in plan.ways(side):
            if (reason := way.reason(place)) is not None:
                yield f"{side} {way.name}: {reason}"


def long_step_reasons(variant: Variant) -> Iterator[str]:
    """Why one launch cannot take several tokens of a sequence in the variant; nothing if it can."""
    yield from plain_reasons(variant)
    k, v = variant.k, variant.v
    if k.window_rule is not None or v.window_rule is not None:
        yield "its recent windows follow a rule"
    elif v.num_bits != RAW_BITS and k.num_bits == RAW_BITS:
        yield "keys of 16 bits with packed values"
    elif v.num_bits != RAW_BITS and k.recent_window > v.recent_window:
        yield f"{k.recent_window} recent tokens of keys, more than {v.recent_window} of values"


def key_lift(variant: Variant) -> int | None:
    """``K_LIFT`` of the fast kernel, the power of two by which codes of keys are shifted within the bytes
    that tensor cores multiply; None where even codes at the bottom of their bytes add up to too much.

    A code at the top of its byte costs the fewest right shifts (``csrc/decode/codes.cuh``). But products with
    a limb of the query, -128 to 127, become a float by the bits of their sum, which must stay below 2^22
    (``csrc/decode/instructions.cuh``). With more than 128 channels, codes of 2 and 4 bits lie lower there."""
    layout, bits = variant.layout("k"), variant.num_bits("k")
    if bits == RAW_BITS:
        return 0
    widest, total, left = bits, 0, variant.head_dim
    if isinstance(layout, TieredLayout):
        for tier_bits, room, _ in layout.tiers:
            if tier_bits != RAW_BITS:
                widest, taken = max(widest, tier_bits), min(room, left)
                total, left = total + taken * (2**tier_bits - 1), left - taken
    total += left * (2**bits - 1)
    # Steps of a code's bits: where one code of a word needs no shift, another one needs none then.
    lifts = range(LIFTS.get(widest, 0), -1, -bits)
    return next((lift for lift in lifts if total << lift <= MAX_CODE_SUM), None)
