"""The reasons of a plan, from the artifacts that it was made from: what each option of a layer's keys or values would
have cost, what a tenth more bytes would buy, and where the plan is at risk. Nothing is measured anew.

After a profile, a choice is one of many that compete for bytes. So an option is priced as a whole: the program is
solved once more with the option fixed, and ``total`` is how much more the best such plan loses. That is exact: part of
it falls on the layer itself, the rest on the layers that give up bytes for it (or, where it is below the layer's own
loss, get bytes from it).

After a search, an option's ``loss`` is the change of the score that its last round estimated, with the standard error
of the measurement. Options were measured beside one plan, and are taken to add up; the record does not hold which pairs
of options the decoder reads fast, so "a tenth more bytes" may pair some that a search would not.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvcal.artifact import sha256_file
from kvcal.errors import ArtifactError, InfeasibleBudget, UsageError
from kvcal.folder import Folder
from kvcal.plan.page_format import RAW, SIDES, Format, Side
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.quantities import format_bytes
from kvcal.recipe import AllocateSpec
from kvcal.stages import allocate as allocation_stage
from kvcal.stages import profile as profile_stage
from kvcal.stages import search as search_stage
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.allocate.solver import Option, Unit, solve
from kvcal.stages.profile.record import Profile
from kvcal.stages.search.record import SearchReport, UnitResult
from kvcal.strict import parse

# "The next 10 % of bytes".
MORE = 1.1
# Named at most, of layers and of heads at risk.
MOST_RISKS = 5


@dataclass(frozen=True)
class OptionCost:
    """An option of a unit. ``loss``: what was minimised, of the unit alone (after a search relative to the background
    plan, with its standard ``error``). ``kl`` in nats per token and ``sensitivity``: of the unit alone, None where they
    were not measured. ``better``: an option that is in no way worse. ``fits``: whether any plan with
    it does; ``total``: how much more the best of these loses than the plan, None where that was not solved for."""

    name: str
    nbytes: int
    loss: float
    error: float | None = None
    kl: float | None = None
    sensitivity: float | None = None
    better: str | None = None
    fits: bool = True
    total: float | None = None
    is_chosen: bool = False


@dataclass(frozen=True)
class UnitReasons:
    """A part of the cache that got one option: layer ``index``, its ``side`` ("kv": both alike), some heads or all."""

    name: str
    index: int
    side: str
    options: tuple[OptionCost, ...]
    reason: str = ""

    @property
    def chosen(self) -> OptionCost:
        return next(option for option in self.options if option.is_chosen)


class Swap(NamedTuple):
    """A unit that takes another option."""

    unit: str
    before: str
    after: str
    nbytes: int


@dataclass(frozen=True)
class MoreBytes:
    """The best plan of ``capacity`` bytes, a tenth more than the units take: its bytes and loss beside the plan's.
    ``error``: of the difference, after a search. ``kl_before`` and ``kl_after``: sums of the units' KLs alone, None
    where some were not measured."""

    capacity: int
    nbytes_before: int
    nbytes_after: int
    loss_before: float
    loss_after: float
    error: float | None
    kl_before: float | None
    kl_after: float | None
    swaps: tuple[Swap, ...]


class Risk(NamedTuple):
    """``what``: such as "layer 8 K"; ``value``: its KL, sensitivity or loss (``measure`` names it), with the standard
    ``error`` if known; ``share`` of the sum over all of its ``kind``, None where they do not add up."""

    kind: Literal["layer", "head", "text"]
    what: str
    measure: str
    value: float
    error: float | None
    share: float | None


@dataclass(frozen=True)
class Explanation:
    """``source``: what the plan was chosen from; ``measure``: what was minimised."""

    source: Literal["profile", "search"]
    measure: str
    units: tuple[UnitReasons, ...]
    more: MoreBytes | None
    risks: tuple[Risk, ...]


def explain(
    plan: Plan, folder: Folder, reporter: Reporter, layer: int | None = None, priced: bool = True
) -> Explanation:
    """The reasons of ``plan``, whose artifacts lie in ``folder``; of one ``layer`` (its cache index) alone if given.
    Without ``priced``, no option's ``total`` is solved for.

    Raises:
        ArtifactError: no allocation there, one of another plan or profile, or one that nothing was solved for; corrupt
            files. UsageError: no such layer.
    """
    allocation, inputs = allocation_of(plan, folder)
    if "search.sha256" in inputs:
        if not _is_input(folder.search, inputs, "search.sha256"):
            raise ArtifactError(f"{folder.search} is not the search that the plan was made from", "search again")
        return _of_search(search_stage.load(folder.search).report, layer)
    if allocation.loss is None:
        name = allocation.provenance.get("recipe") or "its recipe"
        raise ArtifactError(
            f"{folder.allocation}: nothing was solved for: {name} fixes the formats, or assigns them by a rule",
            hint="a recipe with [allocate], such as default, or [search], such as best, chooses for a reason",
        )
    if not _is_input(folder.profile, inputs, "profile.sha256"):
        what = "is missing" if not folder.profile.is_file() else "is not the one that the plan was made from"
        raise ArtifactError(f"{folder.profile} {what}", hint=f"kvcal allocate {folder.path} chooses from it anew")
    profile = profile_stage.load(folder.profile)
    return _of_profile(allocation, spec_of(inputs), profile, reporter, layer, priced)


def folder_of(plan: Path, folder: Path | None) -> Folder:
    """The folder of a plan's artifacts: ``folder``, or the one that the plan lies in; of a named allocation, with the
    profile one folder up."""
    path = folder or plan.parent
    has_profile = Folder(path).profile.exists() or not Folder(path.absolute().parent).profile.exists()
    return Folder(path) if has_profile else Folder(path, path.absolute().parent)


def allocation_of(plan: Plan, folder: Folder) -> tuple[Allocation, dict[str, Any]]:
    """The allocation in ``folder`` that ``plan`` was compiled from, and its inputs. ArtifactError where there is none,
    or another plan's."""
    if not folder.allocation.is_file():
        raise ArtifactError(
            f"{folder.allocation} is missing: a plan by itself does not hold why it was chosen",
            hint="give --folder, where `kvcal plan`, `run`, `search` or `allocate` left its artifacts",
        )
    allocation, inputs = allocation_stage.load(folder.allocation)
    ours, theirs = ([(p.geometry, p.k, p.v) for p in layers] for layers in (plan.layers, allocation.layers))
    if (plan.model, plan.workload, ours) != (allocation.model, allocation.workload, theirs):
        raise ArtifactError(
            f"{folder.allocation} is of another plan",
            hint=f"kvcal compile {folder.path} writes its plan; --folder names another folder",
        )
    return allocation, inputs


def spec_of(inputs: Mapping[str, Any]) -> AllocateSpec:
    """The [allocate] that an allocation was made by, from its inputs."""
    names = AllocateSpec.__dataclass_fields__
    given = {name: inputs[f"allocate.{name}"] for name in names if inputs.get(f"allocate.{name}") is not None}
    return parse(AllocateSpec, given, "the allocation's inputs", ArtifactError)


def _of_profile(
    allocation: Allocation, spec: AllocateSpec, profile: Profile, reporter: Reporter, layer: int | None, priced: bool
) -> Explanation:
    problem = allocation_stage.Problem(profile, spec)
    costs = _Measured(profile)
    units, layers = [], {planned.geometry.index: planned for planned in allocation.layers}
    for position, unit in enumerate(problem.units):
        formats = problem.formats(position)
        names = [next(iter(parts.values())).label for parts in formats]
        (index, _, _), sides = next(iter(formats[0])), sorted({side for _, side, _ in formats[0]})
        heads = sorted({head for _, _, head in formats[0]})
        chosen = allocation_stage.option_name(layers[index].head_formats(sides[0])[heads[0]])
        options = tuple(
            OptionCost(
                name, option.nbytes, option.loss, None, costs.kl(parts), costs.sensitivity(parts),
                _better(option, unit.options, names), is_chosen=option.key == chosen,
            )
            for name, option, parts in zip(names, unit.options, formats, strict=True)
        )  # fmt: skip
        place = f"layer {index} {' and '.join(sides).upper().replace('AND', 'and')}"
        if spec.granularity == "head":
            place += f" head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"
        units.append(UnitReasons(place, index, "".join(sides), options))
    capacity = _capacity(allocation, sum(unit.chosen.nbytes for unit in units))
    shown = _shown(units, layer)
    best = math.fsum(unit.chosen.loss for unit in units)
    explained = []
    for count, number in enumerate(shown):
        found = units[number]
        explained.append(_with_reason(_priced(found, number, problem.units, capacity, best) if priced else found))
        if priced:
            reporter(count + 1, len(shown), "explain")
    risks = (*_layer_risks(units, f"{spec.objective} loss"), *_head_risks(allocation, costs))
    return Explanation("profile", f"{spec.objective} loss", tuple(explained), _more(units), risks)


def _shown(units: Sequence[UnitReasons], layer: int | None) -> list[int]:
    """Numbers of the units of a layer, or of all."""
    shown = [number for number, unit in enumerate(units) if layer is None or unit.index == layer]
    if layer is not None and not shown:
        named = ", ".join(map(str, sorted({unit.index for unit in units})))
        raise UsageError(f"--layer {layer}: nothing was chosen there", hint=f"layers with one: {named}")
    return shown


def _capacity(allocation: Allocation, taken: int) -> int:
    """Bytes that the formats could take: a choice that is the best of them is the best of what it takes itself, too."""
    split = allocation.split
    return max(taken, split.for_cache - split.fixed - split.reserved)


def _better(option: Option, options: Sequence[Option], names: Sequence[str]) -> str | None:
    """Of equal options, the solver and this take the first."""
    before = True
    for name, other in zip(names, options, strict=True):
        before = before and other is not option
        is_equal = (other.nbytes, other.loss) == (option.nbytes, option.loss)
        if other.nbytes <= option.nbytes and other.loss <= option.loss and (before or not is_equal):
            return name
    return None


def _priced(unit: UnitReasons, number: int, units: Sequence[Unit], capacity: int, best: float) -> UnitReasons:
    """With the ``total`` of every option that no other betters."""
    options = []
    for option, solvable in zip(unit.options, units[number].options, strict=True):
        if option.is_chosen:
            option = replace(option, total=0.0)
        elif option.better is None:
            fixed = [*units[:number], Unit(unit.name, (solvable,)), *units[number + 1 :]]
            try:
                loss = solve(fixed, capacity).loss
                option = replace(option, total=max(0.0, loss - best))
            except InfeasibleBudget:
                option = replace(option, fits=False)
        options.append(option)
    return replace(unit, options=tuple(options))


def _with_reason(unit: UnitReasons) -> UnitReasons:
    """With why the chosen option won, against the next smaller and the next larger one that no other betters."""
    chosen = unit.chosen
    rivals = sorted((o for o in unit.options if o.better is None and not o.is_chosen), key=lambda option: option.nbytes)
    smaller = [rival for rival in rivals if rival.nbytes < chosen.nbytes][-1:]
    larger = [rival for rival in rivals if rival.nbytes > chosen.nbytes][:1]
    parts = [_against(rival, chosen) for rival in (*smaller, *larger)]
    return replace(unit, reason="; ".join(parts) or "every other option is larger, and no better")


def _against(rival: OptionCost, chosen: OptionCost) -> str:
    more, error = rival.nbytes - chosen.nbytes, "" if rival.error is None else f" ± {rival.error:.1g}"
    moved = f"takes {format_bytes(more)} more" if more > 0 else f"frees {format_bytes(-more)}"
    here = f"{rival.name} {moved}: {rival.loss - chosen.loss:+.2g}{error} here"
    if not rival.fits:
        return f"{here}, and nothing fits beside it"
    return here if rival.total is None else f"{here}, {rival.total - rival.loss + chosen.loss:+.2g} elsewhere"


class _Measured:
    """The measurements of single formats in a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._losses = profile, functools.cache(self._read)

    def _read(self, measure: Literal["kl", "sensitivity"], index: int, side: Side) -> dict[str, list[float]]:
        """Of every option's name: one value for each KV head (sensitivity), or one in all."""
        profile = self._profile
        is_there = measure == "sensitivity" or profile.setup.kl_candidates(side)
        losses = profile.losses(measure, index, side) if is_there else {}
        name = allocation_stage.option_name
        return {name(profile.cache.format(side, *candidate)): loss for candidate, loss in losses.items()}

    def kl(self, parts: Mapping[tuple[int, Side, int], Format]) -> float | None:
        """Of layers' sides whose heads are all in ``parts``: the sum of their KLs."""
        total, num_heads = 0.0, {layer.index: layer.num_kv_heads for layer in self._profile.setup.layers}
        for index, side in dict.fromkeys((index, side) for index, side, _ in parts):
            heads = [fmt for (i, s, _), fmt in parts.items() if (i, s) == (index, side)]
            if heads[0].num_bits == RAW.num_bits:
                continue
            measured = self._losses("kl", index, side).get(allocation_stage.option_name(heads[0]))
            if measured is None or len(heads) < num_heads[index]:
                return None
            total += measured[0]
        return total

    def sensitivity(self, parts: Mapping[tuple[int, Side, int], Format]) -> float:
        return sum(self.of_head(index, side, head, fmt) for (index, side, head), fmt in parts.items())

    def of_head(self, index: int, side: Side, head: int, fmt: Format) -> float:
        """The sensitivity of one head in a format, 0 at 16 bits."""
        if fmt.num_bits == RAW.num_bits:
            return 0.0
        return self._losses("sensitivity", index, side)[allocation_stage.option_name(fmt)][head]


def _more(units: Sequence[UnitReasons]) -> MoreBytes:
    """Solved anew, exactly, for ``MORE`` times the bytes that the units take."""
    before = sum(unit.chosen.nbytes for unit in units)
    capacity = int(MORE * before)
    lowest = [min(option.loss for option in unit.options) for unit in units]  # the solver's losses are not negative
    program = [
        Unit(unit.name, tuple(Option(option.name, option.nbytes, option.loss - low) for option in unit.options))
        for unit, low in zip(units, lowest, strict=True)
    ]
    choice = solve(program, capacity).choice
    after = [unit.options[number] for unit, number in zip(units, choice, strict=True)]
    changed = [(unit, option) for unit, option in zip(units, after, strict=True) if not option.is_chosen]
    errors = [option.error for _, option in changed if option.error is not None]
    return MoreBytes(
        capacity, before, sum(option.nbytes for option in after),
        math.fsum(unit.chosen.loss for unit in units), math.fsum(option.loss for option in after),
        math.hypot(*errors) if errors else None, _sum([unit.chosen for unit in units]), _sum(after),
        tuple(Swap(u.name, u.chosen.name, option.name, option.nbytes - u.chosen.nbytes) for u, option in changed),
    )  # fmt: skip


def _sum(options: Sequence[OptionCost]) -> float | None:
    kls = [option.kl for option in options]
    return None if None in kls else math.fsum(kl for kl in kls if kl is not None)


def _layer_risks(units: Sequence[UnitReasons], minimised: str) -> Iterator[Risk]:
    """The places where the plan loses most: by KL if that was measured for all, else by what was minimised."""
    has_kl = _sum([unit.chosen for unit in units]) is not None
    costs = {unit.name: (unit.chosen.kl or 0.0) if has_kl else unit.chosen.loss for unit in units}
    measure = "KL alone, nats per token" if has_kl else minimised
    return _largest("layer", costs, measure)


def _head_risks(allocation: Allocation, costs: _Measured) -> Iterator[Risk]:
    heads = {
        f"layer {layer.geometry.index} {side.upper()} head {head}": costs.of_head(layer.geometry.index, side, head, fmt)
        for layer in allocation.layers
        for side in (SIDES if layer.is_paged else ())
        for head, fmt in enumerate(layer.head_formats(side))
    }
    return _largest("head", heads, "sensitivity")


def _largest(kind: Literal["layer", "head"], costs: Mapping[str, float], measure: str) -> Iterator[Risk]:
    total = math.fsum(costs.values())
    for what in sorted(costs, key=lambda name: -costs[name])[:MOST_RISKS]:
        if costs[what] > 0:
            yield Risk(kind, what, measure, costs[what], None, costs[what] / total)


def _of_search(report: SearchReport, layer: int | None) -> Explanation:
    units = [_searched(unit) for unit in report.units]
    explained = tuple(_with_reason(units[number]) for number in _shown(units, layer))
    risks = tuple(_searched_risks(report, units))
    return Explanation("search", "score", explained, _more(units) if units else None, risks)


def _searched(unit: UnitResult) -> UnitReasons:
    """The options that the last round tried, and the chosen one, which it did not where the plan began with it."""
    found = re.match(r"layer (\d+) ([KV])", unit.unit)
    if found is None:
        raise ArtifactError(f"the search has a unit {unit.unit!r}, expected one such as 'layer 0 K'", "search again")
    tried = [OptionCost(o.name, o.nbytes, o.estimate, o.error, is_chosen=o.name == unit.chosen) for o in unit.options]
    if not any(option.is_chosen for option in tried):
        tried.append(OptionCost(unit.chosen, unit.nbytes, 0.0, is_chosen=True))
    tried.sort(key=lambda option: option.nbytes)
    return UnitReasons(unit.unit, int(found[1]), found[2].lower(), tuple(tried))


def _searched_risks(report: SearchReport, units: Sequence[UnitReasons]) -> Iterator[Risk]:
    for name, pool in (("select", report.select), ("validate", report.validate)):
        for kind in sorted(pool.kinds, key=lambda kind: -kind.kl):
            yield Risk("text", f"{kind.kind} ({name})", "KL, nats per token", kind.kl, kind.kl_error, None)
    gains = [
        Risk("layer", unit.name, "score above 16 bits there", unit.chosen.loss - raw.loss, raw.error, None)
        for unit in units
        for raw in unit.options
        if raw.name == RAW.label and raw.loss < unit.chosen.loss
    ]
    yield from sorted(gains, key=lambda risk: -risk.value)[:MOST_RISKS]


def _is_input(path: Path, inputs: Mapping[str, Any], name: str) -> bool:
    return path.is_file() and inputs.get(name) == sha256_file(path)
