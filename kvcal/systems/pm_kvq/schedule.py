"""Progressive quantization (PM-KVQ Sec. 3.1): at which token counts pages shrink 16 -> 8 -> 4 -> 2 bits, for
a budget.

Pages are written with 16 bits, and a layer halves its bits when the budget for the tokens so far is used up:
at the first token count for which the layers as they are would take more bytes than the budget. The order is
fixed: all layers at 16 bits go to 8 before the first goes to 4, and so on; within a round they follow each
other in layer order, K and V and all heads of a layer together, until each format has its final bits. So a
state is a prefix of one list of steps, and the schedule that keeps every page as wide as possible for as long
as possible is found step by step: by bisection, because the bytes of a state never fall as tokens come.

A step that its layer's record sizes make useless or worse (head sizes far below 16) is taken together with
the next ones. Where the budget is more than the final formats take at the workload's context, the last steps
lie beyond it.

Other than the paper: there, every block has a budget of its own, and code bits alone are counted. Here layers
share one budget, and every byte counts (``LayerPlan.nbytes``): sinks, windows, rings, fp32 scales and zeros,
layers that cannot shrink. Those are 16-bit and 3-bit formats (3 is not half of anything), lattices and
boosted channels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from kvcal.errors import InfeasibleBudget
from kvcal.geometry import CacheDtype
from kvcal.pages.layout_protocol import RAW_BITS
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Workload
from kvcal.quantities import format_bytes
from kvcal.stages.allocate.record import Allocation, layer_bytes, num_values
from kvcal.systems.pm_kvq.recipe import ProgressiveSpec

# Bits that pages pass through.
NARROWER_BITS = (8, 4, 2, 1)
# A token count beyond any text: pages of a state that never shrink again.
NEVER = 1 << 40


def can_shrink(fmt: Format) -> bool:
    """Whether pages of this format may begin with 16 bits."""
    return fmt.num_bits in NARROWER_BITS and set(fmt.kinds()) <= {"shrink_at"}


def progressive_layers(
    layers: Sequence[LayerPlan],
    workload: Workload,
    cache_dtype: CacheDtype,
    budget_bytes: int,
) -> tuple[LayerPlan, ...]:
    """``layers`` with ``shrink_at`` (and fp32 scales and zeros, which shrinking needs) in every format that
    can shrink.

    For ``workload.batch`` sequences, at every number of tokens up to ``workload.context``, the bytes of the
    layers (without a plan's tensors) are at most ``budget_bytes``. Sequences of different lengths never take
    more."""
    bits, reached = [RAW_BITS] * len(layers), 1
    final = _Cost(layers, [min(NARROWER_BITS)] * len(layers), workload.batch, cache_dtype).nbytes(workload.context)
    if final > budget_bytes:
        raise InfeasibleBudget(
            f"a budget of {format_bytes(budget_bytes)} is too small for batch {workload.batch} x {workload.context} "
            f"tokens, even when all pages have shrunk: the smallest feasible one is {format_bytes(final)} = {final} "
            "bytes, fp32 scales and zeros included",
            final,
            hint="raise the budget, lower --batch or --context, or take fewer final bits or larger groups",
        )
    counts: list[dict[int, int]] = [{} for _ in layers]
    for position, narrower in _steps(layers):
        cost = _Cost(layers, bits, workload.batch, cache_dtype)
        reached = counts[position][narrower] = cost.first_above(budget_bytes, reached, workload.context)
        bits[position] = narrower
    return tuple(_shrinking(layer, at) for layer, at in zip(layers, counts, strict=True))


def _steps(layers: Sequence[LayerPlan]) -> list[tuple[int, int]]:
    """(position of the layer, bits its pages then have at most), in the order of shrinking."""
    lowest = {
        position: min(final)
        for position, layer in enumerate(layers)
        if (final := [fmt.num_bits for fmt in layer.formats if can_shrink(fmt)])
    }
    return [(position, bits) for bits in NARROWER_BITS for position, least in lowest.items() if bits >= least]


def _shrinking(layer: LayerPlan, counts: Mapping[int, int]) -> LayerPlan:
    """The layer with pages of at most ``bits`` bits from ``counts[bits]`` tokens on, down to each format's
    own."""

    def shrinking(fmt: Format | None) -> Format | None:
        if fmt is None or not can_shrink(fmt):
            return fmt
        shrink_at = tuple(counts[bits] for bits in NARROWER_BITS if bits >= fmt.num_bits)
        keys: dict[str, Any] = {"shrink_at": shrink_at}
        return replace(fmt, param_dtype="float32", **keys)

    return replace(layer, k=shrinking(layer.k), v=shrinking(layer.v))


class _Cost:
    """Bytes of all layers, each at a number of bits of its own. Layers alike are computed once."""

    def __init__(self, layers: Sequence[LayerPlan], bits: Sequence[int], batch: int, cache_dtype: str) -> None:
        """Pages of layer i have at most ``bits[i]`` bits at any time."""
        self._batch, self._cache_dtype = batch, cache_dtype
        alike = (replace(layer, geometry=replace(layer.geometry, index=0)) for layer in layers)
        self._counts = Counter(_at_most(*pair) for pair in zip(alike, bits, strict=True))

    def nbytes(self, num_tokens: int) -> int:
        lengths = (num_tokens,) * self._batch
        return sum(n * layer.nbytes(self._cache_dtype, lengths, num_tokens) for layer, n in self._counts.items())

    def first_above(self, budget_bytes: int, start: int, context: int) -> int:
        """The first token count from ``start`` on at which the bytes exceed the budget; ``NEVER`` at most."""
        if self.nbytes(NEVER) <= budget_bytes:
            return NEVER
        stop = max(start, context)
        while self.nbytes(stop) <= budget_bytes:
            start, stop = stop + 1, 2 * stop
        return start + bisect_right(range(start, stop), budget_bytes, key=self.nbytes)


@cache
def _at_most(layer: LayerPlan, bits: int) -> LayerPlan:
    return _shrinking(layer, {narrower: 0 if narrower >= bits else NEVER for narrower in NARROWER_BITS})


def made_progressive(allocation: Allocation, spec: ProgressiveSpec, reserved: int) -> Allocation:
    """The allocation with pages that begin at 16 bits and shrink when the budget for the tokens so far is
    used up; ``reserved`` bytes of it, if there is one, are kept for what transforms take."""
    layers, split = allocation.layers, allocation.split
    budget, kind = split.for_cache, split.kind
    if spec.bits is not None:
        all_in = int(spec.bits * num_values(layers, allocation.workload) / 8) + split.fixed
        budget, kind = all_in if kind is None else min(budget, all_in), kind or "bits"
    kept = 0 if kind is None else reserved
    layers = progressive_layers(layers, allocation.workload, allocation.cache_dtype, budget - kept)
    fixed, paged = layer_bytes(layers, allocation.cache_dtype, allocation.workload)
    split = replace(split, budget=budget + split.overhead, fixed=fixed, paged=paged, reserved=kept, kind=kind)
    return replace(allocation, layers=layers, split=split)
