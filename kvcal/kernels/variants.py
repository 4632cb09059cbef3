"""Variants: all that a kernel is specialised for, and the macros that it is compiled with.

Every kernel is compiled for the formats of a layer. A ``Variant`` names one specialisation; its ``number``,
within this process, is what a torch operator can be handed.

Bit widths, groups, offsets and head sizes are constants of a kernel, so that every loop over planes, tiles
and groups unrolls. All offsets come from the layouts in ``kvcal.pages``: the bit layout is defined there and
nowhere else. Names of macros are as in ``csrc``, and so are the numbers of dtypes, axes and scores
(``csrc/common.cuh``, ``side.cuh``).

What does not fold into a query no kernel reads as it is stored, and dynamic caches alone take it: its way
(kvcal.pages.ways) says so.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import fields

from pydantic.dataclasses import dataclass as strict_dataclass

from kvcal.geometry import AttentionGeometry, CacheDtype
from kvcal.pages.layout_protocol import RAW_BITS
from kvcal.pages.uniform import UniformLayout
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Format, Side
from kvcal.strict import STRICT
from kvcal.systems.kitty.tiered import TieredLayout

AXES = {"channel": 0, "token": 1}
DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float8_e5m2": 3}
SCORES = {"magnitude": 0, "variance": 1, "range": 2, "query_magnitude": 3, "query_range": 4}

Defines = dict[str, int]


class Numbering:
    """Numbers of variants, which a torch operator cannot be handed, within a process and for any thread:
    equal variants have the same one; ``numbering[number]`` gives the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Variant, int] = {}
        self._variants: list[Variant] = []

    def number(self, variant: Variant) -> int:
        with self._lock:
            if variant not in self._numbers:
                self._numbers[variant] = len(self._variants)
                self._variants.append(variant)
            return self._numbers[variant]

    def __getitem__(self, number: int) -> Variant:
        return self._variants[number]


@strict_dataclass(frozen=True, config=STRICT)
class Variant:
    """One specialisation of the kernels. ``group_heads`` query heads share a KV head. ``rescale``,
    ``offset``: pages hold (K - offset) / rescale. ``k_feedback``, ``v_feedback``: codes are chosen with error
    feedback, of values enlarged by ``v_gain``. ``ring_tokens``: of a sliding window, whose ring has so many
    tokens, with one sink and no pages (kvcal.kernels.ops). ``plain``: ``decode`` is to be served by the plain
    kernel, also where the other one could (kvcal.kernels.choice). ``step_tokens``: the most tokens of a
    step, which rings have room for. ``query_tokens``: those of this step. ``few_heads``: the step's rows have
    few KV heads in all (kvcal.kernels.choice)."""

    k: Format
    v: Format
    head_dim: int
    cache_dtype: CacheDtype
    group_heads: int
    rescale: bool
    offset: bool
    ring_tokens: int | None = None
    plain: bool = False
    k_feedback: bool = False
    v_feedback: bool = False
    v_gain: bool = False
    step_tokens: int = 1
    query_tokens: int = 1
    few_heads: bool = False

    def __hash__(self) -> int:
        return self._hash  # kernels are looked up by it at every launch

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def format(self, side: Side) -> Format:
        return self.k if side == "k" else self.v

    @property
    def group_queries(self) -> int:
        """Query vectors of a step that share a KV head."""
        return self.group_heads * self.query_tokens

    def num_bits(self, side: Side) -> int:
        """Bits of the pages."""
        return self.format(side).num_bits

    def layout(self, side: Side) -> UniformLayout | TieredLayout:
        """The record of one page of one KV head."""
        layout = self.format(side).layout(side, 1, self.head_dim, self.cache_dtype, self.num_bits(side))
        assert isinstance(layout, UniformLayout | TieredLayout)
        return layout

    @property
    def number(self) -> int:
        """The variant as an operator is handed it; ``VARIANTS[number]`` is the variant."""
        return VARIANTS.number(self)

    @functools.cached_property
    def defines(self) -> Defines:
        found = {
            "DTYPE": DTYPES[self.cache_dtype],
            "GROUP_HEADS": self.group_queries,
            "K_RESCALE": int(self.rescale),
            "K_OFFSET": int(self.offset),
            "K_FEEDBACK": int(self.k_feedback),
            "V_FEEDBACK": int(self.v_feedback),
            "V_GAIN": int(self.v_gain),
            "WHOLE_RING": int(self.ring_tokens is not None),
        }
        if self.query_tokens > 1:
            found["QUERY_TOKENS"] = self.query_tokens
        for side in SIDES:
            has_feedback = self.k_feedback if side == "k" else self.v_feedback
            found |= side_defines(
                side, self.format(side), self.head_dim, self.cache_dtype, has_feedback, self.step_tokens
            )
            if self.ring_tokens is not None:
                found |= {f"{side.upper()}_SINKS": 1, f"{side.upper()}_RING": self.ring_tokens}
        return found


VARIANTS = Numbering()


def variant_of(plan: LayerPlan, cache_dtype: CacheDtype) -> Variant:
    """The specialisation that serves a layer, or a rank's heads of it."""
    k, v = plan.format("k"), plan.format("v")
    is_raw = k.num_bits == RAW_BITS
    return Variant(
        k, v, plan.attention.k_head_dim, cache_dtype, plan.attention.group_heads,
        rescale=plan.k_rescale and not is_raw, offset=plan.k_offset and plan.k_pages == "post" and not is_raw,
        k_feedback=plan.k_feedback, v_feedback=plan.v_feedback, v_gain=plan.v_gain,
    )  # fmt: skip


def window_variant(geometry: AttentionGeometry, ring_tokens: int, cache_dtype: CacheDtype) -> Variant:
    """The specialisation that serves all heads of a sliding-window layer, which stays at 16 bits."""
    return Variant(
        RAW, RAW, geometry.k_head_dim, cache_dtype, geometry.num_query_heads // geometry.num_kv_heads,
        rescale=False, offset=False, ring_tokens=ring_tokens,
    )  # fmt: skip


def side_defines(
    side: Side, fmt: Format, head_dim: int, cache_dtype: str, has_feedback: bool = False, step_tokens: int = 1
) -> Defines:
    """The macros of the pages, sinks and ring of one side."""
    layout = fmt.layout(side, 1, head_dim, cache_dtype, fmt.num_bits)
    found = {"TIERS": 0, "ROTATED": 0, "STEP": 0, "CANDIDATES": 1, "PARAM": DTYPES[layout.param_dtype]}
    found |= layout.macros(has_feedback)
    if fmt.score is not None and found["TIERS"]:
        found["SCORE"] = SCORES[fmt.score]
    found |= {
        "DIM": head_dim,
        "AXIS": AXES[fmt.axis],
        "GROUP": fmt.group_size,
        "SINKS": fmt.num_sink_tokens,
        "WINDOW": fmt.recent_window,
        "STRIPE": fmt.stripe_tokens,
        "RING": fmt.ring_tokens(step_tokens),
    }
    return {f"{side.upper()}_{name}": value for name, value in found.items()}
