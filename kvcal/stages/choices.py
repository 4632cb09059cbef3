"""What every option of a layer costs, from the artifacts that a plan was made from: ``kvcal inspect --why``.

``loss`` is what the solver minimised, of the layer's keys or values alone: after a search, the solver of the system
that ships. Nothing is measured anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcal.artifact import sha256_file
from kvcal.errors import ArtifactError, UsageError
from kvcal.folder import Folder
from kvcal.plan.page_format import RAW, Side
from kvcal.plan.plan import Plan
from kvcal.recipe import AllocateSpec, Objective
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.allocate.record import load as load_allocation
from kvcal.stages.allocate.stage import Problem, option_name
from kvcal.stages.profile.record import Profile
from kvcal.stages.profile.record import load as load_profile
from kvcal.stages.search import load as load_search
from kvcal.strict import parse


@dataclass(frozen=True)
class OptionCost:
    """An option of a ``place`` ("layer 0 K"). ``kl`` (nats per token) and ``sensitivity`` (PM-KVQ, Eq. 5): of the place
    alone; None where they were not measured."""

    place: str
    option: str
    nbytes: int
    loss: float
    kl: float | None
    sensitivity: float | None
    is_chosen: bool


@dataclass(frozen=True)
class Choices:
    """``measure``: what ``loss`` is."""

    measure: str
    options: tuple[OptionCost, ...]


def choices_of(plan: Plan, folder: Folder, layer: int | None = None) -> Choices:
    """The options of all layers, or of the one with this cache index, from the artifacts in ``folder``."""
    allocation, inputs = allocation_of(plan, folder)
    if "search.sha256" in inputs:
        _require_input(folder.search, inputs)
        shipped = load_search(folder.search).report.shipped
        systems = [Folder(folder.path, above).of_system(shipped) for above in (None, folder.path.absolute().parent)]
        return choices_of(plan, next((one for one in systems if one.profile.is_file()), systems[0]), layer)
    if allocation.loss is None:
        raise ArtifactError(
            f"{folder.allocation}: nothing was chosen: the recipe fixes the formats, or assigns them by a rule",
            hint="recipes with [allocate], such as default, choose by costs",
        )
    _require_input(folder.profile, inputs)
    names = AllocateSpec.__dataclass_fields__
    asked = {name: inputs[f"allocate.{name}"] for name in names if inputs.get(f"allocate.{name}") is not None}
    spec = parse(AllocateSpec, asked, "the allocation's inputs", ArtifactError)
    measure, options = f"{spec.objective} loss", [*_profiled(allocation, spec, load_profile(folder.profile))]
    shown = [one for one in options if layer is None or one.place.startswith(f"layer {layer} ")]
    if layer is not None and not shown:
        places = dict.fromkeys(one.place.split()[1] for one in options)
        raise UsageError(f"layer {layer}: nothing was chosen there", hint=f"layers with options: {', '.join(places)}")
    return Choices(measure, tuple(shown))


def allocation_of(plan: Plan, folder: Folder) -> tuple[Allocation, dict[str, Any]]:
    """The allocation in ``folder`` that ``plan`` was compiled from, and its inputs. ArtifactError where there is none,
    or another plan's."""
    if not folder.allocation.is_file():
        raise ArtifactError(
            f"{folder.allocation} is missing: a plan by itself does not hold why it was chosen",
            hint="name the plan in the folder where `kvcal plan`, `run`, `search` or `allocate` left its artifacts",
        )
    allocation, inputs = load_allocation(folder.allocation)
    ours, theirs = ([(p.geometry, p.k, p.v) for p in layers] for layers in (plan.layers, allocation.layers))
    if (plan.model, plan.workload, ours) != (allocation.model, allocation.workload, theirs):
        raise ArtifactError(f"{folder.allocation} is of another plan", f"kvcal compile {folder.path} writes its plan")
    return allocation, inputs


def _profiled(allocation: Allocation, spec: AllocateSpec, profile: Profile) -> Iterator[OptionCost]:
    problem, layers = Problem(profile, spec), {layer.geometry.index: layer for layer in allocation.layers}
    for number, unit in enumerate(problem.units):
        formats = problem.formats(number)
        places = list(formats[0])  # (cache index, side)
        index, side = places[0]
        chosen = option_name(layers[index].formats(side)[0])
        for option, parts in zip(unit.options, formats, strict=True):
            kl = _alone(profile, "kl", places, str(option.key))
            sensitivity = _alone(profile, "sensitivity", places, str(option.key))
            name = f"layer {index} {' and '.join(side.upper() for _, side in places)}"
            label, is_chosen = next(iter(parts.values())).label, option.key == chosen
            yield OptionCost(name, label, option.nbytes, option.loss, kl, sensitivity, is_chosen)


def _alone(profile: Profile, measure: Objective, places: list[tuple[int, Side]], key: str) -> float | None:
    """The measure of an option, summed over heads and sides; None where one was not measured."""
    total = 0.0
    for index, side in places if key != option_name(RAW) else ():
        if not (profile.setup.kl_candidates(side) if measure == "kl" else profile.setup.spec.gradients):
            return None
        losses = profile.losses(measure, index, side)
        found = [
            sum(loss) for one, loss in losses.items() if option_name(profile.setup.cache.format(side, *one)) == key
        ]
        if not found:
            return None
        total += found[0]
    return total


def _require_input(path: Path, inputs: Mapping[str, Any]) -> None:
    if not path.is_file() or inputs.get(f"{path.stem}.sha256") != sha256_file(path):
        what = "not the one that the plan was made from" if path.is_file() else "missing: the plan was made from it"
        raise ArtifactError(f"{path} is {what}", "make the plan again in this folder")
