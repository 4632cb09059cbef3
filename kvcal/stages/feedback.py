"""The feedback stage: Hessians of what attention makes of errors in keys and values, and the factors of error feedback.

For keys the Hessian of a KV head is the mean of q q' over the queries after RoPE, summed over its query heads, from one
forward of each sequence; for values the sum of W_o' W_o over its query heads, which needs no data. Both are taken to
the space that pages are stored in: times λ or turned before RoPE for keys, rotated where pages are. A key before
RoPE is read at any distance; so every query is turned back by ``DISTANCES`` positions of keys, evenly spread between
the first token and its own. Offsets and predictions move keys and values, not their errors. Positions are stretched as
for λ: a Hessian knows only the turns of RoPE that it has seen.

The stage comes last, when layers have all their transforms. It keeps sums alone, so memory does not grow with the
number of sequences, and an interrupted run goes on after the last batch. Left out: Hessians weighted by attention, and
of the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal import artifact
from kvcal.data.sequences import TokenDataset
from kvcal.errors import ArtifactError, NonFiniteActivations
from kvcal.folder import partial_path
from kvcal.geometry import Index
from kvcal.models.load import LoadedModel
from kvcal.models.projections import output_weights
from kvcal.models.taps import Captured, check_taps, tap
from kvcal.pages.feedback import factor_spec, feedback_factor
from kvcal.pages.hadamard import rotate as rotate_channels
from kvcal.pages.transforms import rotate as rotate_positions
from kvcal.plan.layer import LATENTS, LayerPlan, bare_layers, takes_feedback
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.tensors import lattice_tensors
from kvcal.progress import Reporter
from kvcal.recipe import FeedbackSpec
from kvcal.records import TensorSpec, record_of, refusing, require_tensors
from kvcal.stages.batches import Batch, for_each_batch, longest_first
from kvcal.stages.checkpoint import Checkpoint, Mean, State, Statistic, require_steps
from kvcal.stages.reparam.search import CalibrationSubject, calibration_inputs, calibration_positions, fitting_scale
from kvcal.strict import STRICT, Share, dump

KIND = "feedback"
SCHEMA = 1
SAMPLES = "samples"
# Tokens of a batch, padding included: at 32k tokens a GPU is busy, and memory holds one layer's activations alone.
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
DISTANCES = 8  # positions of keys that a query is turned back by, where pages hold keys before RoPE

Place = tuple[int, Side]  # the layer's cache index first


@pydantic_dataclass(frozen=True, config=STRICT)
class SideFeedback:
    """One layer's keys or values. ``share``: of the weighted squared error, what is left with feedback where no code
    saturates, as a mean over KV heads."""

    index: Index
    side: Side
    share: Share


@pydantic_dataclass(frozen=True, config=STRICT)
class Subject(CalibrationSubject):
    """The model, data and settings of a calibration."""

    spec: FeedbackSpec


@pydantic_dataclass(frozen=True, config=STRICT)
class _Body:
    subject: Subject
    sides: tuple[SideFeedback, ...]


@dataclass(frozen=True, eq=False)
class FeedbackRecord:
    """``factors``: of every layer and side in ``sides``, as a plan stores it (kvcal.pages.feedback)."""

    subject: Subject
    sides: tuple[SideFeedback, ...]
    factors: Mapping[Place, Tensor]

    def apply(self, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """The layers with feedback. Raises ArtifactError: they are another model's."""
        if tuple(layer.geometry for layer in layers) != self.subject.geometry.layers:
            raise ArtifactError(
                f"error feedback was calibrated for {self.subject.identity.id}, whose layers are not the plan's",
                hint="run feedback again for this model",
            )
        fed = [[(layer.geometry.index, side) in self.factors for side in SIDES] for layer in layers]
        return tuple(replace(layer, k_feedback=k, v_feedback=v) for layer, (k, v) in zip(layers, fed, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """The plan's tensors, for the layers as ``apply`` leaves them."""
        return {f"layers.{index}.{side}_feedback": factor for (index, side), factor in self.factors.items()}


def feedback_places(layers: tuple[LayerPlan, ...], sides: Collection[Side]) -> list[Place]:
    """Layers and sides whose codes feedback can choose."""
    return [
        (layer.geometry.index, side)
        for layer in layers
        for side in SIDES
        if side in sides
        and layer.takes_transforms
        and any(map(takes_feedback, layer.formats(side)))
        and not any(fmt.shrink_at for fmt in layer.formats(side))
    ]


def run_feedback(
    loaded: LoadedModel,
    layers: tuple[LayerPlan, ...],
    tensors: Mapping[str, Tensor],
    data: TokenDataset,
    spec: FeedbackSpec,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> FeedbackRecord:
    """Calibrate, and write the record to ``path``; an earlier run of the same ``inputs`` that was interrupted is
    continued. ``layers`` and ``tensors``: the plan's, with all transforms.

    Raises:
        UsageError: a sequence longer than the model's context.
        UnsupportedModel: the model's queries cannot be observed, or its output projections are not found.
        NonFiniteActivations: NaN or infinity in queries, naming layer and sample.
        ArtifactError: a file cannot be written; a Hessian that is none.
    """
    places = feedback_places(layers, spec.sides)
    if loaded.geometry.has_latents:
        reporter.say(f"feedback: {LATENTS}")
    elif not places:
        reporter.say("feedback: no layer has codes that could be chosen, nothing to calibrate")
    scale = fitting_scale(loaded, data.sequences, spec.position_scale, reporter, "feedback")
    calibration = _Calibration(loaded, {layer.geometry.index: layer for layer in layers}, tensors, places, scale)
    total = len(data.sequences) if calibration.key_layers else 0

    def declared(done: Mapping[str, int], _: Collection[str]) -> dict[str, Statistic]:
        require_steps(done, {SAMPLES: total})
        num_tokens = sum(len(data.sequences[number]) for number in longest_first(data)[: done[SAMPLES]])
        return calibration.declared(num_tokens)

    with Checkpoint(path, KIND, inputs, calibration.start(), declared, reporter) as checkpoint:
        if total:
            check_taps(loaded.model, loaded.geometry)
            most_tokens = BATCH_TOKENS[loaded.model.device.type]
            for_each_batch(data, most_tokens, calibration.means_of_each, SAMPLES, checkpoint, reporter, "feedback")
        factors, sides = {}, []
        for place, hessian_NDD in calibration.hessians(checkpoint.state.means).items():
            try:
                factors[place], share_N = feedback_factor(hessian_NDD, spec.damping)
            except torch.linalg.LinAlgError as error:
                raise ArtifactError(
                    f"feedback: the Hessian of layer {place[0]}'s {place[1]} is not positive definite: no sum of "
                    "squares gives it, so that the checkpoint beside this file is damaged, or the damping too small",
                    hint=f"delete {partial_path(path).name}, or raise [feedback] damping",
                ).at(path) from error
            sides.append(SideFeedback(*place, min(1.0, float(share_N.mean()))))
        about_data = (data.fingerprint, data.description, data.num_tokens)
        subject = Subject(loaded.identity, loaded.geometry, scale, *about_data, spec)
        record = FeedbackRecord(subject, tuple(sides), factors)
        save(record, inputs, path)
    return record


@dataclass(frozen=True, eq=False)
class _Calibration:
    """Hessians of ``places``. ``layers``: the plan's, by index."""

    loaded: LoadedModel
    layers: Mapping[int, LayerPlan]
    tensors: Mapping[str, Tensor]
    places: list[Place]
    position_scale: float

    @property
    def key_layers(self) -> list[int]:
        return [index for index, side in self.places if side == "k"]

    def start(self) -> State:
        """A sum [N, D, D] over the queries of each layer, without any."""
        shapes = {index: self.layers[index].attention for index in self.key_layers}
        means = {f"queries.{i}": Mean.empty((a.num_kv_heads, a.k_head_dim, a.k_head_dim)) for i, a in shapes.items()}
        return State(means, {SAMPLES: 0})

    def declared(self, num_tokens: int) -> dict[str, Statistic]:
        return {name: Statistic.of(mean.total.shape, num_tokens) for name, mean in self.start().means.items()}

    def means_of_each(self, batches: Sequence[Batch]) -> list[dict[str, Mean]]:
        """The sums of every batch."""
        return [self.query_means(batch) for batch in batches]

    def query_means(self, batch: Batch) -> dict[str, Mean]:
        """The sums over the queries of a batch.

        Raises:
            NonFiniteActivations: NaN or infinity in queries, naming layer and sample.
        """
        device, width = self.loaded.model.device, batch.tokens_BT.shape[1]
        real_n = (torch.arange(width) < torch.tensor(batch.lengths)[:, None]).flatten().nonzero().squeeze(1).to(device)
        position_n = calibration_positions(width, self.position_scale).to(device)[real_n % width]
        products: dict[int, Tensor] = {}
        finite: dict[int, Tensor] = {}

        def measure(captured: Captured) -> None:
            if captured.layer in self.key_layers:
                layer = self.layers[captured.layer]
                table = self.tensors.get(f"layers.{captured.layer}.rotary") if layer.k_pages == "pre" else None
                q_post_HnD = captured.q_post_BHTD.transpose(0, 1).flatten(1, 2)[:, real_n]
                heads = layer.attention.num_kv_heads
                products[captured.layer] = query_products(q_post_HnD, heads, position_n, table)
                finite[captured.layer] = captured.q_post_BHTD.isfinite().flatten(1).all(1)

        with torch.no_grad(), tap(self.loaded.model, measure, self.loaded.geometry):
            self.loaded.model(**calibration_inputs(self.loaded, batch.tokens_BT, self.position_scale))
        for layer, is_finite_B in finite.items():
            for number, is_finite in zip(batch.numbers, is_finite_B.tolist(), strict=True):
                if not is_finite:
                    raise NonFiniteActivations(f"sample {number}: queries of layer {layer} hold NaN or infinity")
        return {f"queries.{layer}": Mean(total.cpu(), batch.num_tokens) for layer, total in products.items()}

    def hessians(self, means: Mapping[str, Mean]) -> dict[Place, Tensor]:
        """fp64 [N, D, D] of every place, in the space that its pages are stored in."""
        signs = lattice_tensors(tuple(self.layers.values()))
        needs_weights = any(side == "v" for _, side in self.places)
        weights = output_weights(self.loaded.model, self.loaded.geometry) if needs_weights else {}
        found: dict[Place, Tensor] = {}
        for index, side in self.places:
            layer = self.layers[index]
            if side == "k":
                hessian = means[f"queries.{index}"].result()
                if layer.k_rescale:
                    lambda_ND = self.tensors[f"layers.{index}.k_rescale"].to("cpu", torch.float64)
                    hessian = lambda_ND.unsqueeze(2) * hessian * lambda_ND.unsqueeze(1)
            else:
                hessian = output_products(weights[index], layer.attention.num_kv_heads)
            for fmt, heads in layer.runs(side):
                if fmt.quantizer == "rotated":
                    hessian[heads] = rotated(hessian[heads], signs[f"layers.{index}.{side}_signs"])
            found[index, side] = hessian
        return found


def query_products(q_post_HTD: Tensor, num_kv_heads: int, position_T: Tensor, rotary: Tensor | None = None) -> Tensor:
    """Sum of q q' over tokens, at ``position_T`` int64, and the query heads of each KV head, fp64 [N, D, D]. With a
    ``rotary`` table (of kvcal.pages.transforms) queries are those that keys before RoPE meet, a mean over ``DISTANCES``
    keys."""
    if rotary is None:
        return _products(q_post_HTD, num_kv_heads)
    total = q_post_HTD.new_zeros((), dtype=torch.float64)
    for number in range(DISTANCES):
        key_T = position_T * (2 * number + 1) // (2 * DISTANCES)
        # The transpose of RoPE, amplitude included, is RoPE at the negative position.
        turned = rotate_positions(q_post_HTD, rotary.to(q_post_HTD.device), -key_T)
        total = total + _products(turned, num_kv_heads)
    return total / DISTANCES


def output_products(weight_CHD: Tensor, num_kv_heads: int) -> Tensor:
    """Sum of W_o' W_o over the query heads of each KV head, fp64 [N, D, D]; weight_CHD as of ``output_weights``."""
    return _products(weight_CHD.transpose(0, 1), num_kv_heads).cpu()


def rotated(hessian_NDD: Tensor, signs_D: Tensor) -> Tensor:
    """Of values x R', where R is the rotation of kvcal.pages.hadamard with these signs: R H R', fp64."""
    basis = rotate_channels(torch.eye(len(signs_D)), signs_D).double()  # rows: the rotated unit vectors, so it is R'
    return basis.t() @ hessian_NDD @ basis


def _products(x_HTD: Tensor, num_kv_heads: int) -> Tensor:
    """x' x summed over tokens and groups of heads, fp64 [N, D, D]."""
    x_NRD = x_HTD.double().unflatten(0, (num_kv_heads, -1)).flatten(1, 2)
    return x_NRD.transpose(1, 2) @ x_NRD


def save(record: FeedbackRecord, inputs: dict[str, Any], path: Path) -> None:
    """Write the record. ArtifactError when it cannot be written."""
    body = _Body(record.subject, record.sides)
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, dump(body), record.tensors()))


def load(path: Path) -> FeedbackRecord:
    """Read and check a record. ArtifactError: missing, corrupt or foreign file; unknown, missing or mis-shaped
    content."""
    stored = artifact.read(path, KIND, SCHEMA)
    body = record_of(_Body, stored.body, path)
    with refusing(path):
        require_tensors(stored.tensors, _declared(body))
    factors = {(s.index, s.side): stored.tensors[f"layers.{s.index}.{s.side}_feedback"] for s in body.sides}
    return FeedbackRecord(body.subject, body.sides, factors)


def _declared(body: _Body) -> dict[str, TensorSpec]:
    """The factors. ValueError for layers that are not the model's, or are given twice."""
    paged = {layer.geometry.index: layer for layer in bare_layers(body.subject.geometry) if layer.is_paged}
    declared: dict[str, TensorSpec] = {}
    for found in body.sides:
        name = f"layers.{found.index}.{found.side}_feedback"
        if found.index not in paged or name in declared:
            raise ValueError(f"{name} is given twice, or of no layer of full attention")
        layer = paged[found.index]
        declared[name] = factor_spec(layer.attention.num_kv_heads, layer.head_dim(found.side))
    return declared


def table_rows(record: FeedbackRecord) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) for people: one row a layer; the share of the weighted error that is left."""
    shares = {(found.index, found.side): f"{found.share:.0%}" for found in record.sides}
    layers = sorted({index for index, _ in shares})
    headers = ["layer", "K error left", "V error left"]
    return headers, [[str(index), *(shares.get((index, side), "–") for side in SIDES)] for index in layers]
