"""The time that a decode step spends on a layer, as far as a search must know: no plan for decoding is slower than
16 bits.

- ``ByBytes``: the bytes of the layer's cache. Pages that attention does not read as they are stored, or only with a
  slower kernel than 16 bits, are left out: bytes do not tell their time.
- ``Unbounded``: for storage time does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcal.geometry import CacheDtype
from kvcal.kernels.choice import refusals, slow_reasons
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Side
from kvcal.plan.plan import Workload
from kvcal.store.dequantize import form_reasons

# Times of 16 bits differ by rounding from sums of their parts.
TOLERANCE = 1e-9


class Speed(Protocol):
    """Step times of paged layers."""

    def us(self, layer: LayerPlan) -> float | None:
        """Time of a step, in a unit that all layers share; None for a layer that the plan must not have."""

    def offers(self, layer: LayerPlan, side: Side) -> bool:
        """Whether the format of ``side``, the same in all heads, can be in a plan beside some format of the other."""


def speed_of(serve: str, cache_dtype: CacheDtype, workload: Workload) -> Speed:
    """The speed that plans for decoding or storage are held to."""
    return Unbounded() if serve == "storage" else ByBytes(cache_dtype, workload)


def unquantized(layer: LayerPlan) -> LayerPlan:
    """A layer of the same heads at 16 bits."""
    return LayerPlan(layer.geometry, (RAW,), (RAW,))


def is_no_slower(speed: Speed, layers: Sequence[LayerPlan]) -> bool:
    """Whether a step of these layers takes no longer than at 16 bits."""
    paged = [layer for layer in layers if layer.is_paged]
    times = [speed.us(layer) for layer in paged]
    known = [us for us in times if us is not None]
    raw = [speed.us(unquantized(layer)) or 0.0 for layer in paged]
    return len(known) == len(times) and sum(known) <= sum(raw) * (1 + TOLERANCE)


def slow_because(layer: LayerPlan, cache_dtype: CacheDtype) -> set[str]:
    """Why attention cannot read the layer's pages as they are stored, or only with the slower kernel."""
    forms = form_reasons(layer, ())
    return {*refusals(layer, cache_dtype), *forms, *(() if forms else slow_reasons(layer, cache_dtype))}


def reads_as_stored(layer: LayerPlan, cache_dtype: CacheDtype) -> bool:
    """Whether attention reads the layer's pages as they are stored, by a kernel as fast as that of 16 bits."""
    return slow_because(layer, cache_dtype) <= slow_because(unquantized(layer), cache_dtype)


@dataclass(frozen=True)
class Unbounded:
    """Every layer is fast enough."""

    def us(self, layer: LayerPlan) -> float | None:
        return 0.0

    def offers(self, layer: LayerPlan, side: Side) -> bool:
        return True


@dataclass(frozen=True)
class ByBytes:
    """Bytes of a layer's cache at the workload as its time."""

    cache_dtype: CacheDtype
    workload: Workload

    def us(self, layer: LayerPlan) -> float | None:
        if not reads_as_stored(layer, self.cache_dtype):
            return None
        return float(layer.nbytes(self.cache_dtype, self.workload.lengths, self.workload.context))

    def offers(self, layer: LayerPlan, side: Side) -> bool:
        return reads_as_stored(layer, self.cache_dtype)
