"""The time that a decode step spends on a layer, as far as a search must know: no plan for decoding is slower than
16 bits.

- ``Measured``: from a table of one GPU (step_times.py), at its workload nearest to the plan's. A layer that the table
  does not have takes the bytes of its cache at the slowest rate of those that it has, if attention reads its pages as
  they are stored; otherwise the plan must not have it. Heads with formats of their own take their share of a layer all
  of whose heads have them. Pages that are decoded first may pay where the table shows it.
- ``ByBytes``, without a table, or for latents, which have no kernels to time: the bytes of the layer's cache. Pages
  that attention does not read as they are stored, or only with a slower kernel than 16 bits, are left out: bytes do not
  tell their time.
- ``Unbounded``: for storage time does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from kvcal.errors import UsageError
from kvcal.geometry import CacheDtype
from kvcal.kernels.choice import refusals, slow_reasons
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Side
from kvcal.plan.plan import Workload
from kvcal.stages.search.step_times import StepTimes, timed_as, unquantized
from kvcal.store.dequantize import form_reasons

# Times of 16 bits differ by rounding from sums of their parts.
TOLERANCE = 1e-9


class Speed(Protocol):
    """Step times of paged layers."""

    def us(self, layer: LayerPlan) -> float | None:
        """Time of a step, in a unit that all layers share; None for a layer that the plan must not have."""

    def offers(self, layer: LayerPlan, side: Side) -> bool:
        """Whether the format of ``side``, the same in all heads, can be in a plan beside some format of the other."""


def speed_of(
    serve: str, cache_dtype: CacheDtype, workload: Workload, layers: Sequence[LayerPlan], times: StepTimes | None
) -> Speed:
    """The speed that plans for decoding or storage are held to. UsageError: a table without times of the heads of one
    of ``layers``."""
    if serve == "storage":
        return Unbounded()
    if times is None or any(layer.is_paged and layer.attention.is_latent for layer in layers):
        return ByBytes(cache_dtype, workload)
    for layer in layers:
        if layer.is_paged and not times.at(workload, layer):
            heads = layer.attention
            raise UsageError(
                f"the step times of {times.device} have none for {heads.num_kv_heads} KV heads of {heads.k_head_dim}, "
                f"{heads.group_heads} query heads each",
                hint="measure them with `kvcal bench kernels --heads ... --head-dim ... --group ...`",
            )
    return Measured(times, cache_dtype, workload)


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


@dataclass(frozen=True, eq=False)
class Measured:
    """Microseconds by a table."""

    times: StepTimes
    cache_dtype: CacheDtype
    workload: Workload

    def us(self, layer: LayerPlan) -> float | None:
        return self._us(timed_as(layer))

    def share(self, layers: Sequence[LayerPlan]) -> float:
        """A step's time over that at 16 bits, of layers that a plan may have."""
        paged = [layer for layer in layers if layer.is_paged]
        raw = sum(self.us(unquantized(layer)) or 0.0 for layer in paged)
        return sum(self.us(layer) or 0.0 for layer in paged) / raw

    def offers(self, layer: LayerPlan, side: Side) -> bool:
        if reads_as_stored(layer, self.cache_dtype):
            return True
        alone = timed_as(layer)
        return any(
            timed.formats(side) == alone.formats(side) and timed.predictor(side) == alone.predictor(side)
            for timed in self.times.at(self.workload, layer)
        )

    @cache  # noqa: B019 - as long as the search, and layers of a model are few
    def _us(self, layer: LayerPlan) -> float | None:
        measured = self.times.at(self.workload, layer)
        if layer in measured:
            return measured[layer]
        if any(len(layer.formats(side)) > 1 for side in SIDES):
            parts = [self._us(uniform) for uniform in _of_each_head(layer)]
            known = [us for us in parts if us is not None]
            return sum(known) / len(known) if len(known) == len(parts) else None
        if not reads_as_stored(layer, self.cache_dtype):
            return None
        rates = [
            us / self._nbytes(timed)
            for timed, us in measured.items()
            if reads_as_stored(timed, self.cache_dtype) and {*timed.k, *timed.v} != {RAW}
        ]
        return self._nbytes(layer) * max(rates) if rates else None

    def _nbytes(self, layer: LayerPlan) -> int:
        return layer.nbytes(self.cache_dtype, self.workload.lengths, self.workload.context)


def _of_each_head(layer: LayerPlan) -> list[LayerPlan]:
    """For every KV head the layer all of whose heads are stored as it is."""
    pairs = zip(layer.head_formats("k"), layer.head_formats("v"), strict=True)
    return [replace(layer, k=(k,), v=(v,)) for k, v in pairs]
