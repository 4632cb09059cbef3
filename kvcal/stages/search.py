"""Choose one of several plans by their KL to the 16-bit cache, out of sample, with errors.

All plans are measured on the texts of the pool *select*, the best three on *validate*, where nothing was
chosen yet. There the plan of least KL wins, unless a simpler one is within one standard error of the paired
difference over texts: then the simplest of these (fewest ways to store keys or values, then fewest bytes).
The artifact, which the plan is compiled from, holds the chosen layers, their tensors, and a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal import artifact
from kvcal.distributed import map_over_ranks
from kvcal.errors import naming
from kvcal.geometry import CacheDtype
from kvcal.kernels.choice import refusals, slow_reasons
from kvcal.models.load import LoadedModel
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES
from kvcal.plan.plan import Plan, Workload
from kvcal.progress import Reporter
from kvcal.records import record_of
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.divergence import LOCKSTEP, Room, Text, deviations, padded_texts, texts_at_once, unquantized_plan
from kvcal.strict import STRICT, Amount, Number, Positive, dump

KIND = "search"
SCHEMA = 4
FINALISTS = 3


@pydantic_dataclass(frozen=True, config=STRICT)
class SystemResult:
    """The plan of one system. KL to the 16-bit cache in nats per loss token: means over the texts of a pool,
    with their standard errors.

    ``bits``: all-in, per cached value. ``validate``: of the finalists alone. ``difference``: of its KL on
    *validate* from that of the plan that ships, with the paired error. ``left_out``: why there is no plan,
    and no figures."""

    name: str
    bits: Amount | None = None
    select: Number | None = None
    select_error: Amount | None = None
    validate: Number | None = None
    validate_error: Amount | None = None
    difference: Number | None = None
    difference_error: Amount | None = None
    left_out: str | None = None


@pydantic_dataclass(frozen=True, config=STRICT)
class SearchReport:
    """``shipped``: the name of the system whose plan ships; ``serve``: decode or storage; ``num_select`` and
    ``num_validate``: texts. ``systems``: least KL on *select* first, those without a plan last."""

    shipped: str
    serve: str
    num_select: Positive
    num_validate: Positive
    systems: tuple[SystemResult, ...]

    @property
    def kl(self) -> float:
        """Of the plan that ships, on *validate*."""
        return next(one.validate for one in self.systems if one.name == self.shipped and one.validate is not None)


@dataclass(frozen=True, eq=False)
class SearchRecord:
    """The chosen layers with their transforms, and the tensors that these need."""

    allocation: Allocation
    report: SearchReport
    plan_tensors: Mapping[str, Tensor]


def choose_plan(
    loaded: LoadedModel,
    plans: Mapping[str, Plan],
    left_out: Mapping[str, str],
    select: Sequence[Text],
    validate: Sequence[Text],
    serve: str,
    reporter: Reporter,
) -> SearchReport:
    """Measure ``plans`` by name, and choose one. ``left_out``: why other systems have no plan here, by
    name."""
    of_select = measured(loaded, plans, select, reporter, "search: select")
    ranked = sorted(plans, key=lambda name: float(of_select[name].mean()))
    finalists = {name: plans[name] for name in ranked[:FINALISTS]}
    of_validate = measured(loaded, finalists, validate, reporter, "search: validate")
    costs = {name: (num_ways(plan.layers), plan.predicted_bytes) for name, plan in finalists.items()}
    shipped = chosen(of_validate, costs)
    rows = []
    for name in ranked:
        row = SystemResult(name, plans[name].bits_per_value(), *mean_and_error(of_select[name]))
        if name in finalists:
            kl, error = mean_and_error(of_validate[name])
            row = replace(row, validate=kl, validate_error=error)
            kl, error = mean_and_error(of_validate[name] - of_validate[shipped])
            row = replace(row, difference=kl, difference_error=error)
        rows.append(row)
    rows += [SystemResult(name, left_out=reason) for name, reason in left_out.items()]
    return SearchReport(shipped, serve, len(select), len(validate), tuple(rows))


def measured(
    loaded: LoadedModel, plans: Mapping[str, Plan], texts: Sequence[Text], reporter: Reporter, label: str
) -> dict[str, Tensor]:
    """KL(16 bits || plan) of every plan, fp64 [N]: the mean over a text's loss tokens, in nats, for each of N
    texts."""
    reference, room = unquantized_plan(loaded.identity, loaded.geometry), Room(LOCKSTEP, reporter)
    batch = texts_at_once(loaded, max(len(text.tokens_T) for text in texts))
    starts = range(0, len(texts), batch)

    def step(start: int) -> Tensor:
        reporter(start, len(texts), label)
        part = texts[start : start + batch]
        with naming(f"search, plans {', '.join(plans)}"):
            given = reference, list(plans.values()), *padded_texts(part)
            found = deviations(loaded.model, *given, room, is_flip_wanted=False)
        return found.kl_of_sequences(len(part))

    kl_PN = torch.cat(list(map_over_ranks(starts, step)), dim=1)
    reporter(len(texts), len(texts), label)
    return dict(zip(plans, kl_PN, strict=True))


def mean_and_error(values_N: Tensor) -> tuple[float, float]:
    """The mean over texts and its standard error; 0 for a single text."""
    count = len(values_N)
    return float(values_N.mean()), float(values_N.std() / count**0.5) if count > 1 else 0.0


def chosen(kls: Mapping[str, Tensor], costs: Mapping[str, tuple[int, int]]) -> str:
    """The name of the plan to ship. ``kls``: KL of each plan on the same texts [N]; ``costs``: ascending by
    what is preferred among plans that cannot be told apart."""
    least = min(kls, key=lambda name: float(kls[name].mean()))
    differences = {name: mean_and_error(kl_N - kls[least]) for name, kl_N in kls.items()}
    equal = [name for name, (mean, error) in differences.items() if mean <= error]
    return min(equal, key=lambda name: costs[name])


def num_ways(layers: Iterable[LayerPlan]) -> int:
    """Different ways in which a plan stores keys, and values: 2 for one of each."""
    ways = set()
    for layer in layers:
        for side, fmt in zip(SIDES, (layer.k, layer.v), strict=True):
            ways.add((side, fmt, *layer.transforms(side)))
    return len(ways)


def not_for_decoding(layers: Iterable[LayerPlan], cache_dtype: CacheDtype, workload: Workload) -> str | None:
    """Why decoding may be slower than at 16 bits: pages that kernels do not read as they are stored, or only
    with a slower kernel than 16 bits, or more bytes. None where it is not."""
    taken = raw_taken = 0
    for layer in layers:
        if layer.is_paged:
            raw = LayerPlan(layer.geometry, RAW, RAW)
            taken += layer.nbytes(cache_dtype, workload.lengths, workload.context)
            raw_taken += raw.nbytes(cache_dtype, workload.lengths, workload.context)
            of_raw = _slow_reasons(raw, cache_dtype)
            slow = [reason for reason in _slow_reasons(layer, cache_dtype) if reason not in of_raw]
            if slow:
                return f"slower than 16 bits to decode: {slow[0]} in layer {layer.geometry.index}"
    return "slower than 16 bits to decode: it takes more bytes" if taken > raw_taken else None


def _slow_reasons(layer: LayerPlan, cache_dtype: CacheDtype) -> list[str]:
    return [*refusals(layer, cache_dtype), *slow_reasons(layer, cache_dtype)]


@pydantic_dataclass(frozen=True, config=STRICT)
class _SearchBody:
    allocation: Allocation
    report: SearchReport


def save(searched: SearchRecord, inputs: dict[str, Any], path: Path) -> None:
    body = dump(_SearchBody(searched.allocation, searched.report))
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, body, searched.plan_tensors))


def load(path: Path) -> SearchRecord:
    stored = artifact.read(path, KIND, SCHEMA)
    body = record_of(_SearchBody, stored.body, path, hint="delete the file and search again")
    return SearchRecord(body.allocation, body.report, stored.tensors)
