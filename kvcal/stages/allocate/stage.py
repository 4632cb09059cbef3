"""The allocate stage: which Format every layer's (or KV head's) K and V gets, within a byte budget (PM-KVQ
Eq. 6-8).

A unit of the integer program is one layer's K or V, or one head's, or a layer's K and V together; its options
are the profile's candidates, each with its measured loss and with the bytes that ``Format.nbytes`` predicts
for the runtime at the workload. What does not depend on the choice (bounded layers, states) is taken off the
budget first. 16 bits is always an option, with loss 0, and the only one of rotary keys of latent attention,
unless the recipe asks for more.

What every option of a layer costs (``kvcal inspect --why``) is told from the artifacts that a plan was made
from. After a search, it is of the system that ships. Nothing is measured anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvcal.artifact import read_inputs, sha256_file
from kvcal.engines.capacity import engine_bytes
from kvcal.engines.support import require_served
from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.folder import Folder
from kvcal.geometry import ModelIdentity
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import RAW, SIDES, UNIFORM, Format, Side
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors
from kvcal.recipe import AllocateSpec, Objective
from kvcal.stages.allocate.budget import infeasible, resolve_budget, workload_of
from kvcal.stages.allocate.record import BY_LAW, COMPETED, PROGRAM, Allocation, BudgetSplit, layer_bytes, load
from kvcal.stages.allocate.solver import Option, Unit, solve
from kvcal.stages.profile.record import Profile
from kvcal.stages.profile.record import load as load_profile
from kvcal.stages.search import load as load_search
from kvcal.strict import parse


def allocate(profile: Profile, spec: AllocateSpec, provenance: dict[str, Any], reserved: int = 0) -> Allocation:
    """Solve one budget, of which ``reserved`` bytes are kept for what transforms take
    (``budget.transform_bytes``)."""
    return solved(Problem(profile, spec), profile, spec, provenance, reserved)


def solved(
    problem: Problem, profile: Profile, spec: AllocateSpec, provenance: dict[str, Any], reserved: int = 0
) -> Allocation:
    """The allocation of a problem, all of whose options are the profile's. Raises as ``allocate``."""
    split = _split(problem, profile, spec, reserved)
    smallest = problem.nbytes(problem.smallest)
    setup, cache_dtype, workload = profile.setup, profile.setup.geometry.cache_dtype, problem.workload
    beyond = 0  # what options take together, and do not take alone
    while True:  # what lies next to the pages follows from the choice
        solution = solve(problem.units, max(smallest, _capacity(split) - beyond))
        split = replace(split, engine=_beside_pages(problem, spec, setup.identity, split.fixed, solution.choice))
        layers = problem.layers_of(solution.choice)
        split = replace(split, paged=layer_bytes(layers, cache_dtype, workload)[1])
        beyond = max(beyond, split.paged - solution.nbytes)
        if split.paged <= _capacity(split):
            break
    proven = solution.loss, solution.bound, solution.gap, solution.proof
    return Allocation(setup.identity, cache_dtype, layers, workload, provenance, split, *proven)


def require_feasible(profile: Profile, spec: AllocateSpec, reserved: int = 0) -> None:
    """Raises what ``allocate`` will, whatever was measured: the bytes of formats follow from
    ``profile.setup``."""
    _split(Problem(profile, spec), profile, spec, reserved)


def _split(problem: Problem, profile: Profile, spec: AllocateSpec, reserved: int) -> BudgetSplit:
    """The budget, with what an engine takes besides the smallest pages. Raises as ``allocate``."""
    if not problem.units:
        raise UnsupportedModel(
            "there is nothing to allocate: every layer of the model is a sliding window, kept at 16 bits, or a state",
            hint="a recipe with [formats], such as kivi-2, compiles a plan without choices",
        )
    setup, layers = profile.setup, problem.layers_of(problem.largest)
    sizes = setup.geometry.cache_dtype, setup.weight_bytes, setup.vocab_size
    split = resolve_budget(spec, layers, *sizes, reserved)
    split = replace(split, engine=_beside_pages(problem, spec, setup.identity, split.fixed, problem.smallest))
    if problem.nbytes(problem.smallest) > _capacity(split):
        raise infeasible(spec, split, problem.layers_of(problem.smallest), setup.geometry.cache_dtype)
    return split


def _capacity(split: BudgetSplit) -> int:
    return split.for_cache - split.fixed - split.reserved


def _beside_pages(problem: Problem, spec: AllocateSpec, model: ModelIdentity, fixed: int, choice: Sequence[int]) -> int:
    """Bytes that an engine takes besides the pages of a choice and what is ``fixed``; 0 without one."""
    if spec.engine is None:
        return 0
    layers, workload = problem.layers_of(choice), Workload(spec.batch, spec.context)
    cache_dtype = problem.geometry.cache_dtype
    # An engine's bytes do not depend on what the transforms hold.
    needed = needed_tensors(layers, cache_dtype).items()
    tensors = {name: torch.ones(spec.extents, dtype=getattr(torch, spec.dtype)) for name, spec in needed}
    plan = Plan(model, cache_dtype, layers, workload, {}, tensors)
    require_served(plan, is_cuda=False, engine=spec.engine, lookahead=spec.drafts)
    taken = engine_bytes(spec.engine, plan, spec.tp, spec.drafts, spec.state_bytes)
    return max(0, taken - problem.nbytes(choice) - fixed)


class Problem:
    """``units`` of the integer program; ``formats``: of each option of each unit, by cache index and side."""

    def __init__(self, profile: Profile, spec: AllocateSpec) -> None:
        self.workload = workload_of(spec)
        self.geometry = profile.setup.geometry
        self.units: list[Unit] = []
        self.formats: list[list[dict[tuple[int, Side], Format]]] = []
        for layer in bare_layers(profile.setup.geometry):
            if layer.is_paged:
                costs = {side: self._costs(profile, spec, layer, side) for side in SIDES}
                is_block = spec.granularity == "block" and (spec.rotary or not layer.attention.is_latent)
                for sides in [SIDES] if is_block else [(side,) for side in SIDES]:
                    self._add_unit(layer.geometry.index, sides, costs)

    def _costs(
        self, profile: Profile, spec: AllocateSpec, layer: LayerPlan, side: Side
    ) -> dict[str, tuple[Format, int, float]]:
        """Formats of a layer's keys or values, their bytes, and their loss; by name, equal for keys and
        values."""
        is_fixed = side == "v" and layer.attention.is_latent and not spec.rotary
        losses = {} if is_fixed else profile.losses(spec.objective, layer.geometry.index, side)
        costs = {profile.setup.cache.format(side, *candidate): sum(loss) for candidate, loss in losses.items()}
        costs[RAW] = 0.0
        heads, dim, lengths = layer.attention.num_kv_heads, layer.head_dim(side), self.workload.lengths
        return {
            option_name(fmt): (fmt, fmt.nbytes(side, heads, dim, self.geometry.cache_dtype, lengths), loss)
            for fmt, loss in costs.items()
        }

    def _add_unit(
        self, index: int, sides: Sequence[Side], costs: Mapping[Side, Mapping[str, tuple[Format, int, float]]]
    ) -> None:
        """A unit for sides of a layer; its options are in equal formats on all of them."""
        options, formats = [], []
        for name in costs[sides[0]]:
            if all(name in costs[side] for side in sides):
                parts = {(index, side): costs[side][name] for side in sides}
                options.append(Option(name, sum(part[1] for part in parts.values()), sum(p[2] for p in parts.values())))
                formats.append({place: part[0] for place, part in parts.items()})
        self.units.append(Unit(f"layer {index} {', '.join(sides)}", tuple(options)))
        self.formats.append(formats)

    def only(self, is_allowed: Callable[[Side, Format], bool]) -> Problem:
        """The same problem with those options alone whose formats are allowed on their sides; a unit without one
        keeps all."""
        found = copy.copy(self)
        found.units, found.formats = [], []
        for unit, formats in zip(self.units, self.formats, strict=True):
            kept = [
                n for n, parts in enumerate(formats) if all(is_allowed(side, fmt) for (_, side), fmt in parts.items())
            ]
            kept = kept or list(range(len(formats)))
            found.units.append(replace(unit, options=tuple(unit.options[n] for n in kept)))
            found.formats.append([formats[n] for n in kept])
        return found

    @property
    def smallest(self) -> list[int]:
        return [min(range(len(unit.options)), key=lambda n: unit.options[n].nbytes) for unit in self.units]

    @property
    def largest(self) -> list[int]:
        return [max(range(len(unit.options)), key=lambda n: unit.options[n].nbytes) for unit in self.units]

    def nbytes(self, choice: Sequence[int]) -> int:
        return sum(unit.options[number].nbytes for unit, number in zip(self.units, choice, strict=True))

    def layers_of(self, choice: Sequence[int]) -> tuple[LayerPlan, ...]:
        """The layers that a choice (an option number per unit) stands for. Next to 16 bits, pages are packed
        whole: both sides of a layer are packed together."""
        chosen: dict[tuple[int, Side], Format] = {}
        for formats, number in zip(self.formats, choice, strict=True):
            chosen |= formats[number]
        return tuple(
            _packed_alike(layer, *(chosen[layer.geometry.index, side] for side in SIDES)) if layer.is_paged else layer
            for layer in bare_layers(self.geometry)
        )


def _packed_alike(layer: LayerPlan, k: Format, v: Format) -> LayerPlan:
    """The layer in these formats, whose sides pack as many tokens together."""
    most = max(k.stripe_tokens, v.stripe_tokens)
    return replace(layer, k=replace(k, stripe_tokens=most), v=replace(v, stripe_tokens=most))


def option_name(fmt: Format) -> str:
    """The name of a format among a unit's options; of pages on a schedule, that of their final bits."""
    quantizer = "" if fmt.quantizer == UNIFORM else f"-{fmt.quantizer}"
    return f"{fmt.num_bits}-{fmt.axis}-{fmt.group_size}{quantizer}"


@dataclass(frozen=True)
class OptionCost:
    """An option of a ``place`` ("layer 0 K"). ``kl`` (nats per token), its standard error over texts, and
    ``sensitivity`` (PM-KVQ, Eq. 5): of the place alone; None where they were not measured."""

    place: str
    option: str
    nbytes: int
    loss: float
    kl: float | None
    sensitivity: float | None
    is_chosen: bool
    kl_error: float | None = None


@dataclass(frozen=True)
class Choices:
    """``measure``: what ``loss`` is; ``ships``: where plans competed, the one that these costs led to."""

    measure: str
    options: tuple[OptionCost, ...]
    ships: str | None = None

    @property
    def led_to(self) -> str:
        """For people, what ships by these costs; "" where nothing competed."""
        if self.ships is None:
            return ""
        costs = "costs that fall with bits as squared errors do" if self.ships == BY_LAW else "the profile's costs"
        among = "" if self.ships in (PROGRAM, BY_LAW) else ", of these widths alone"
        return f"The plan that ships ({self.ships}) was chosen by {costs}{among}."

    def of_layer(self, layer: int | None) -> Choices:
        """Those of the layer with this cache index; of all of them, if None. UsageError for one without
        options."""
        shown = [one for one in self.options if layer is None or one.place.startswith(f"layer {layer} ")]
        if layer is not None and not shown:
            places = dict.fromkeys(one.place.split()[1] for one in self.options)
            raise UsageError(
                f"layer {layer}: nothing was chosen there", hint=f"layers with options: {', '.join(places)}"
            )
        return replace(self, options=tuple(shown))


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
    profile, ships = load_profile(folder.profile), allocation.provenance.get(COMPETED, {}).get("shipped")
    options = tuple(_profiled(allocation, spec, profile.by_law if ships == BY_LAW else profile))
    return Choices(f"{spec.objective} loss", options, ships).of_layer(layer)


# In the inputs of a plan's file that is written outside of its folder.
MEASURE, OPTIONS, SHIPS = "choices.measure", "choices.options", "choices.ships"


def reasons_of(plan: Plan, folder: Folder) -> dict[str, Any]:
    """The options of all layers for the plan's own file, numbers to six digits; nothing where none was
    chosen."""
    try:
        found = choices_of(plan, folder)
    except ArtifactError:
        return {}
    rows = [[float(f"{x:.6g}") if isinstance(x, float) else x for x in astuple(one)] for one in found.options]
    return {MEASURE: found.measure, OPTIONS: rows} | ({} if found.ships is None else {SHIPS: found.ships})


def read_choices(path: Path, layer: int | None = None) -> Choices | None:
    """Those that a plan's own file has. None where it has none: it lies in its folder, or is of an earlier
    kvcal."""
    inputs = read_inputs(path)
    if OPTIONS not in inputs:
        return None
    options = tuple(OptionCost(*row) for row in inputs[OPTIONS])
    return Choices(inputs[MEASURE], options, inputs.get(SHIPS)).of_layer(layer)


def allocation_of(plan: Plan, folder: Folder) -> tuple[Allocation, dict[str, Any]]:
    """The allocation in ``folder`` that ``plan`` was compiled from, and its inputs. ArtifactError where there
    is none, or another plan's."""
    if not folder.allocation.is_file():
        raise ArtifactError(
            f"{folder.allocation} is missing: a plan by itself does not hold why it was chosen",
            hint="name the plan in the folder where `kvcal plan`, `run`, `search` or `allocate` left its artifacts, or "
            "write the plan again with -o of `kvcal plan` or `compile`, which keeps the reasons in the file",
        )
    allocation, inputs = load(folder.allocation)
    ours, theirs = ([(p.geometry, p.k, p.v) for p in layers] for layers in (plan.layers, allocation.layers))
    if (plan.model, plan.workload, ours) != (allocation.model, allocation.workload, theirs):
        raise ArtifactError(f"{folder.allocation} is of another plan", f"kvcal compile {folder.path} writes its plan")
    return allocation, inputs


def _profiled(allocation: Allocation, spec: AllocateSpec, profile: Profile) -> Iterator[OptionCost]:
    problem, layers = Problem(profile, spec), {layer.geometry.index: layer for layer in allocation.layers}
    for unit, formats in zip(problem.units, problem.formats, strict=True):
        places = list(formats[0])  # (cache index, side)
        index, side = places[0]
        chosen = option_name(layers[index].format(side))
        for option, parts in zip(unit.options, formats, strict=True):
            kl = _alone(profile, "kl", places, str(option.key))
            sensitivity = _alone(profile, "sensitivity", places, str(option.key))
            name = f"layer {index} {' and '.join(side.upper() for _, side in places)}"
            label, is_chosen = next(iter(parts.values())).label, option.key == chosen
            error = _kl_error(profile, places, str(option.key))
            yield OptionCost(name, label, option.nbytes, option.loss, kl, sensitivity, is_chosen, error)


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


def _kl_error(profile: Profile, places: list[tuple[int, Side]], key: str) -> float | None:
    """Of the KL of an option, summed over sides as independent errors; None where it is not known."""
    squares = 0.0
    for index, side in places if key != option_name(RAW) else ():
        error_C = profile.kl_error(index, side) if profile.setup.kl_candidates(side) else None
        names = [option_name(profile.setup.cache.format(side, *one)) for one in profile.setup.kl_candidates(side)]
        if error_C is None or key not in names:
            return None
        squares += float(error_C[names.index(key)]) ** 2
    return squares**0.5


def _require_input(path: Path, inputs: Mapping[str, Any]) -> None:
    if not path.is_file() or inputs.get(f"{path.stem}.sha256") != sha256_file(path):
        what = "not the one that the plan was made from" if path.is_file() else "missing: the plan was made from it"
        raise ArtifactError(f"{path} is {what}", "make the plan again in this folder")
