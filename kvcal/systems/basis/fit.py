"""The stages basis and feedback: Hessians of what attention makes of errors in keys and values, the bases
that they ask for, and the factors of error feedback.

For keys the Hessian of a KV head is the mean of q q' over the queries after RoPE of its query heads; for
values the sum of W_o' W_o over its query heads, without data. Both are taken to the space of the pages: times
λ or turned before RoPE for keys, rotated where pages are. A key before RoPE is read at any distance; so each
query is turned back by ``DISTANCES`` positions of keys, evenly from the first token to its own. Positions are
stretched as for λ.

With [basis], rotated pages get a basis (kvcal.systems.basis.basis) from the same forwards, of queries and
keys weighted by what attention makes of an error, with each text at all places of the model's context, and
feedback works in it. The center of keys stays 0 where attention has logits without a key, or soft caps:
softmax then sees a constant.

The stage comes last, when layers have all their transforms, or first, where formats are chosen in the basis.
It keeps sums alone: memory does not grow with sequences, and an interrupted run goes on. Left out: Hessians
of the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor, nn

from kvcal import artifact
from kvcal.data.sequences import TokenDataset
from kvcal.errors import ArtifactError, NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.geometry import Index
from kvcal.models.attention import attention_modules, layer_index
from kvcal.models.load import LoadedModel
from kvcal.models.projections import output_weights
from kvcal.models.rope import RotaryMap, rotary_maps
from kvcal.models.supported_layers import attention_layers
from kvcal.models.taps import Captured, check_taps, tap
from kvcal.pages.error_feedback import factor_spec, feedback_factor
from kvcal.plan.layer import LATENTS, LayerPlan, Present
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.plan.plain_layer import BASIS, FEEDBACK
from kvcal.plan.plan import Plan
from kvcal.plan.tensors import layout_tensors, needed_tensors
from kvcal.progress import Reporter
from kvcal.records import TensorSpec, record_of, refusing, require_tensors
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.calibration import CalibrationSubject, calibration_inputs, calibration_positions, fitting_scale
from kvcal.stages.checkpoint import Batch, Checkpoint, Mean, State, for_each_batch
from kvcal.strict import STRICT, Share, dump
from kvcal.systems.basis.basis import Basis, basis_specs, fitted_basis, moved_hessian
from kvcal.systems.basis.hessians import (
    key_costs,
    mean_and_covariance,
    moments,
    output_products,
    over_context,
    query_products,
    rotated,
)
from kvcal.systems.basis.layout import ROTATED
from kvcal.systems.basis.recipe import BasisSpec, FeedbackSpec
from kvcal.systems.basis.rotated import GAINED_BITS, gain_spec, value_gains

SCHEMA = 7
SAMPLES = "samples"
# Tokens of a batch, padding included: at 32k tokens a GPU is busy, and memory holds one layer's activations
# alone.
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}

Place = tuple[int, Side]  # the layer's cache index first


@pydantic_dataclass(frozen=True, config=STRICT)
class SideFeedback:
    """One layer's keys or values. ``share``: of the weighted squared error, what is left with feedback where
    no code saturates, as a mean over KV heads. ``basis``: whether it has one, in which that share is."""

    index: Index
    side: Side
    share: Share
    basis: Present = False


@pydantic_dataclass(frozen=True, config=STRICT)
class Subject(CalibrationSubject):
    """The model, data and settings of a calibration."""

    spec: FeedbackSpec | BasisSpec  # in this order: the first that has all keys


@pydantic_dataclass(frozen=True, config=STRICT)
class _Body:
    subject: Subject
    sides: tuple[SideFeedback, ...]


@dataclass(frozen=True, eq=False)
class BasisRecord:
    """``factors``: of every layer and side in ``sides``, as a plan stores it (kvcal.pages.error_feedback);
    ``bases``: of those that have one; ``gains``: of the values among these, fp16 [N, D] by layer, for codes
    of 2 bits."""

    subject: Subject
    sides: tuple[SideFeedback, ...]
    factors: Mapping[Place, Tensor]
    bases: Mapping[Place, Basis]
    gains: Mapping[int, Tensor] = field(default_factory=dict)

    def apply(self, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """The layers with feedback. Raises ArtifactError: they are another model's."""
        if tuple(layer.geometry for layer in layers) != self.subject.geometry.layers:
            stage = self.subject.spec.stage
            raise ArtifactError(
                f"{stage} was calibrated for {self.subject.identity.id}, whose layers are not the plan's",
                hint=f"run {stage} again for this model",
            )
        fed = self.factors.keys() & feedback_places(layers)
        based = self.bases.keys() & basis_places(layers)
        changed = []
        for layer in layers:
            k, v = ((layer.geometry.index, side) for side in SIDES)
            gains = v in fed & based and layer.format("v").num_bits == GAINED_BITS
            has_basis = replace(layer, k_basis=k in based, v_basis=v in based)
            changed.append(replace(has_basis, k_feedback=k in fed, v_feedback=v in fed, v_gain=gains))
        return tuple(changed)

    def changed(self, plan: Plan) -> Plan:
        """A plan without transforms, with these."""
        layers = self.apply(plan.layers)
        tensors = layout_tensors(layers) | self.tensors()
        return replace(plan, layers=layers, tensors={name: tensors[name] for name in needed_tensors(layers, "float32")})

    def planned(self, allocation: Allocation) -> Plan:
        """The plan of an allocation in the basis, to be measured."""
        layers, tensors = allocation.layers, layout_tensors(allocation.layers)
        model, workload = allocation.model, allocation.workload
        return self.changed(Plan(model, allocation.cache_dtype, layers, workload, allocation.provenance, tensors))

    def tensors(self) -> dict[str, Tensor]:
        found = {f"layers.{index}.{side}_feedback": factor for (index, side), factor in self.factors.items()}
        for (index, side), basis in self.bases.items():
            found |= basis.tensors(f"layers.{index}.{side}")
        return found | {f"layers.{index}.v_gain": gain for index, gain in self.gains.items()}


def fitted_layers(layers: tuple[LayerPlan, ...], spec: FeedbackSpec) -> tuple[LayerPlan, ...]:
    """The layers that feedback is calibrated for. A basis does not depend on bits, so that these are chosen
    after it: all layers have rotated pages of 2 bits, of the sinks and windows of those that are rotated."""
    if not isinstance(spec, BasisSpec):
        return layers
    found: dict[Side, Format] = {}
    for side in SIDES:
        every = (layer.format(side) for layer in layers if layer.is_paged)
        if first := next((fmt for fmt in every if fmt.kind == ROTATED), None):
            found[side] = replace(first, num_bits=2)
    return tuple(replace(x, k=found.get("k", x.k), v=found.get("v", x.v)) if x.takes_transforms else x for x in layers)


def feedback_places(layers: tuple[LayerPlan, ...]) -> list[Place]:
    """Layers and sides whose codes feedback can choose."""
    return [
        (layer.geometry.index, side)
        for layer in layers
        for side in SIDES
        if layer.takes_transforms and layer.format(side).takes_feedback
    ]


def basis_places(layers: tuple[LayerPlan, ...]) -> list[Place]:
    """Layers and sides whose pages take a basis: rotated ones, without other transforms."""
    found = []
    for place in feedback_places(layers):
        layer, side = next(one for one in layers if one.geometry.index == place[0]), place[1]
        is_moved = not {*layer.transforms(side)} <= {FEEDBACK, BASIS}
        if layer.format(side).kind == ROTATED and not is_moved:
            found.append(place)
    return found


def run_basis(
    loaded: LoadedModel,
    layers: tuple[LayerPlan, ...],
    tensors: Mapping[str, Tensor],
    data: TokenDataset,
    spec: FeedbackSpec,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> BasisRecord:
    """Calibrate, and write the record to ``path``; an earlier run of the same ``inputs`` that was interrupted
    is continued. ``layers`` and ``tensors``: the plan's, with all transforms."""
    kind, places = spec.stage, feedback_places(layers)
    if loaded.geometry.has_latents:
        reporter.say(f"{kind}: {LATENTS}")
    elif not places:
        reporter.say(f"{kind}: no layer has codes that could be chosen, nothing to calibrate")
    scale = fitting_scale(loaded, data.sequences, spec.position_scale, reporter, kind)
    based = basis_places(layers) if isinstance(spec, BasisSpec) else []
    by_index = {layer.geometry.index: layer for layer in layers}
    longest = max(map(len, data.sequences))
    _require_packed_tokens(based, by_index, longest)
    rotary = _rotary(loaded, based, longest, reporter)
    calibration = _Calibration(loaded, by_index, tensors, places, based, spec, scale, rotary, longest)
    start = calibration.start()
    with Checkpoint(path, kind, inputs, start, reporter) as checkpoint:
        if start.means:
            check_taps(loaded.model, loaded.geometry)
            most_tokens = BATCH_TOKENS[loaded.model.device.type]
            measure = calibration.batch_means
            for_each_batch(data, most_tokens, lambda batches: list(map(measure, batches)), SAMPLES, checkpoint, kind)
        factors, sides, bases, gains = {}, [], {}, {}
        for place in places:
            try:
                hessian_NDD, basis = calibration.hessian(place, checkpoint.state.means)
                factors[place], share_N = feedback_factor(hessian_NDD, spec.damping)
            except torch.linalg.LinAlgError as error:
                raise UsageError(
                    f"the Hessian of layer {place[0]}'s {place[1]} is not positive definite",
                    hint=f"raise [{kind}] damping",
                ) from error
            sides.append(SideFeedback(*place, min(1.0, float(share_N.mean())), basis is not None))
            if basis is not None:
                bases[place] = basis
                if place[1] == "v":
                    cost_ND = torch.linalg.eigvalsh(hessian_NDD)  # rising, as the channels of a basis are
                    gains[place[0]] = value_gains(cost_ND + spec.damping * cost_ND.mean(1, keepdim=True))
        about_data = (data.fingerprint, data.description, data.num_tokens)
        subject = Subject(loaded.identity, loaded.geometry, scale, *about_data, spec)
        record = BasisRecord(subject, tuple(sides), factors, bases, gains)
        save(record, inputs, path)
    return record


@dataclass(frozen=True, eq=False)
class _Calibration:
    """Hessians of ``places``, of which ``based`` get a basis. ``layers``: the plan's, by index; ``rotary``:
    RoPE of those whose keys get a basis, for all places of the context; ``longest``: tokens of the longest
    text."""

    loaded: LoadedModel
    layers: Mapping[int, LayerPlan]
    tensors: Mapping[str, Tensor]
    places: list[Place]
    based: list[Place]
    spec: FeedbackSpec
    position_scale: float
    rotary: Mapping[int, RotaryMap] = field(default_factory=dict)
    longest: int = 1

    def start(self) -> State:
        """The sums over the tokens of each layer, without any: ``queries`` [N, D, D], and the ``moments`` of
        what gets a basis [N, D + 1, D + 1]."""
        means: dict[str, Mean] = {}
        for index, side in self.places:
            heads, dim = self.layers[index].attention.num_kv_heads, self.layers[index].head_dim(side)
            if side == "k":
                means[f"queries.{index}"] = Mean.empty((heads, dim, dim))
            if (index, side) in self.based:
                means[f"moments.{index}.{side}"] = Mean.empty((heads, dim + 1, dim + 1))
        return State(means, {SAMPLES: 0})

    def batch_means(self, batch: Batch) -> dict[str, Mean]:
        """The sums over the tokens of a batch. NonFiniteActivations: as ``run_basis``."""
        position_T = calibration_positions(batch.tokens_BT.shape[1], self.position_scale)
        sums: dict[str, Tensor] = {}
        finite: dict[int, Tensor] = {}

        def measure(captured: Captured) -> None:
            if any((captured.layer, side) in self.places for side in SIDES):
                finite[captured.layer] = captured.q_post_BHTD.isfinite().flatten(1).all(1)
            for row, length in enumerate(batch.lengths):
                for name, found in self._sequence_sums(captured, row, length, position_T).items():
                    sums[name] = sums[name] + found if name in sums else found

        if self.based:
            _ = self._output_weights  # finding them can take a forward, which must not be tapped
        with torch.no_grad(), tap(self.loaded.model, measure, self.loaded.geometry):
            self.loaded.model(**calibration_inputs(self.loaded, batch.tokens_BT, self.position_scale))
        for layer, is_finite_B in finite.items():
            for number, is_finite in zip(batch.numbers, is_finite_B.tolist(), strict=True):
                if not is_finite:
                    raise NonFiniteActivations(f"sample {number}: queries of layer {layer} hold NaN or infinity")
        return {name: Mean(total.cpu(), batch.num_tokens) for name, total in sums.items()}

    def _sequence_sums(self, captured: Captured, row: int, length: int, position_T: Tensor) -> dict[str, Tensor]:
        """The sums over the tokens of one sequence of a batch and layer."""
        index, found = captured.layer, dict[str, Tensor]()
        q_HTD = captured.q_post_BHTD[row, :, :length]
        of_sides = {"k": captured.k_post_BNTD[row, :, :length], "v": captured.v_BNTD[row, :, :length]}
        layer = self.layers.get(index)
        if layer is None or ((index, "k") not in self.places and (index, "v") not in self.places):
            return {}
        if (index, "k") in self.based:
            fmt, scale = layer.format("k"), getattr(self._modules[index], "scaling", q_HTD.shape[-1] ** -0.5)
            limits = fmt.num_sink_tokens, fmt.max_window
            sums, weight_NT = key_costs(q_HTD, of_sides["k"], of_sides["v"], self._output_costs[index], scale, *limits)
            found[f"queries.{index}"] = sums
            found[f"moments.{index}.k"] = moments(of_sides["k"], weight_NT)
        elif (index, "k") in self.places:
            table = self.tensors.get(f"layers.{index}.rotary") if layer.k_pages == "pre" else None
            positions = position_T[:length].to(q_HTD.device)
            found[f"queries.{index}"] = query_products(q_HTD, layer.attention.num_kv_heads, positions, table)
        if (index, "v") in self.based:
            found[f"moments.{index}.v"] = moments(of_sides["v"][:, layer.format("v").num_sink_tokens :])
        return found

    def hessian(self, place: Place, means: Mapping[str, Mean]) -> tuple[Tensor, Basis | None]:
        """fp64 [N, D, D] of a place, in the space that its pages are stored in, and the basis that this
        has."""
        index, side = place
        layer, basis = self.layers[index], None
        if side == "k":
            hessian = self._over_context(means[f"queries.{index}"].result(), index)
            if layer.k_rescale:
                lambda_ND = self.tensors[f"layers.{index}.k_rescale"].to("cpu", torch.float64)
                hessian = lambda_ND.unsqueeze(2) * hessian * lambda_ND.unsqueeze(1)
        else:
            hessian = output_products(self._output_weights[index], layer.attention.num_kv_heads)
        if place in self.based and isinstance(self.spec, BasisSpec):
            sums = means[f"moments.{index}.{side}"].total
            sums = self._over_context(sums, index) if side == "k" else sums
            center, covariance = mean_and_covariance(sums, side == "k" and self._is_blind(index))
            basis = fitted_basis(hessian, covariance, self.spec.exponent, center if side == "k" else None)
            hessian = moved_hessian(hessian, basis)
        if layer.format(side).kind == ROTATED:
            signs = layout_tensors((layer,))[f"layers.{index}.{side}_signs"]
            hessian = rotated(hessian, signs)
        return hessian, basis

    def _over_context(self, sums_NEE: Tensor, index: int) -> Tensor:
        """Of a layer's keys, or queries, after RoPE: those of the texts at all places of the context."""
        rotary, context = self.rotary.get(index), self.loaded.max_context
        if rotary is None or context is None:
            return sums_NEE
        return over_context(sums_NEE, rotary, self.longest, context)

    @functools.cached_property
    def _modules(self) -> dict[int | None, nn.Module]:
        return {layer_index(module): module for module in attention_modules(self.loaded.model)}

    @functools.cached_property
    def _output_weights(self) -> Mapping[int, Tensor]:
        return output_weights(self.loaded.model, self.loaded.geometry)

    @functools.cached_property
    def _output_costs(self) -> dict[int, Tensor]:
        """W_o' W_o of each query head [H, D, D], of the layers whose keys get a basis."""
        costs = {}
        for index in (index for index, side in self.based if side == "k"):
            weight_HCD = self._output_weights[index].to(self.loaded.model.device).transpose(0, 1).float()
            costs[index] = weight_HCD.mT @ weight_HCD
        return costs

    def _is_blind(self, index: int) -> bool:
        """Whether softmax does not see a constant added to all logits."""
        config = self.loaded.model.config.get_text_config(decoder=True).to_dict()
        has_sinks = "sinks" in dict(self._modules[index].named_parameters(recurse=False))
        return not has_sinks and not config.get("attn_logit_softcapping")


def _require_packed_tokens(based: list[Place], layers: Mapping[int, LayerPlan], longest: int) -> None:
    """UsageError where no token of the longest text is packed and read: a basis would be fitted to
    nothing."""
    for index, side in based:
        fmt = layers[index].format(side)
        least = fmt.num_sink_tokens + max(fmt.max_window, 1) + 1
        if longest < least:
            raise UsageError(
                f"a basis of layer {index}'s {side} is fitted to tokens after {fmt.num_sink_tokens} sinks, once they "
                f"have left a window of {fmt.max_window}, and the longest text has {longest}; expected {least} or more",
                hint="raise [basis] seq_len, or give longer texts",
            )


def _rotary(loaded: LoadedModel, based: list[Place], longest: int, reporter: Reporter) -> Mapping[int, RotaryMap]:
    """RoPE of the layers whose keys get a basis; where it is not known, the reporter is told."""
    indices = {index for index, side in based if side == "k"}
    try:
        return rotary_maps(loaded.model, loaded.geometry, indices) if indices else {}
    except UnsupportedModel as unknown:
        reporter.say(f"basis: bases are fitted to the first {longest} positions alone: {unknown.message}")
        return {}


def save(record: BasisRecord, inputs: dict[str, Any], path: Path) -> None:
    body = _Body(record.subject, record.sides)
    artifact.write(path, artifact.Artifact(record.subject.spec.stage, SCHEMA, inputs, dump(body), record.tensors()))


def _needed_tensors(body: _Body) -> dict[str, TensorSpec]:
    """The tensors of a record by name. ValueError for a side of no layer that takes them."""
    layers = {layer.index: layer for layer in attention_layers(body.subject.geometry)}
    needed: dict[str, TensorSpec] = {}
    for found in body.sides:
        if found.index not in layers:
            raise ValueError(f"layer {found.index} has error feedback, expected one of {list(layers)}")
        layer, prefix = layers[found.index], f"layers.{found.index}"
        sizes = layer.num_kv_heads, layer.k_head_dim if found.side == "k" else layer.v_head_dim
        needed[f"{prefix}.{found.side}_feedback"] = factor_spec(*sizes)
        if found.basis:
            needed |= {f"{prefix}.{name}": spec for name, spec in basis_specs(found.side, *sizes).items()}
            needed |= {f"{prefix}.v_gain": gain_spec(*sizes)} if found.side == "v" else {}
    return needed


def load(path: Path, kind: str = "basis") -> BasisRecord:
    stored = artifact.read(path, kind, SCHEMA)
    body = record_of(_Body, stored.body, path)
    with refusing(path):
        require_tensors(stored.tensors, _needed_tensors(body))
    factors = {(s.index, s.side): stored.tensors[f"layers.{s.index}.{s.side}_feedback"] for s in body.sides}
    found = {(s.index, s.side): Basis.of(stored.tensors, f"layers.{s.index}.{s.side}") for s in body.sides}
    bases = {place: basis for place, basis in found.items() if basis is not None}
    gains = {index: stored.tensors[f"layers.{index}.v_gain"] for index, side in bases if side == "v"}
    return BasisRecord(body.subject, body.sides, factors, bases, gains)


def table_rows(record: BasisRecord) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) for people: one row a layer; the share of the weighted error that is left."""
    shares = {(found.index, found.side): f"{found.share:.0%}" for found in record.sides}
    layers = sorted({index for index, _ in shares})
    headers = ["layer", "K error left", "V error left"]
    return headers, [[str(index), *(shares.get((index, side), "–") for side in SIDES)] for index in layers]
