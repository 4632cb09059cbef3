"""The profile: the cost of every candidate in every layer's keys and values, measured on calibration data.

Four measures. The allocator takes the first, the second, the sum of their shares ("combined": the first
spreads over all layers and sees nothing that the loss's gradient does not; the second sees the few layers
that break a prediction alone, and nothing of what several break together), or the product of the last two
("importance"):

- sensitivity: PM-KVQ Eq. 5, per KV head and candidate, to first order in the error (``profile.sensitivity``);
- KL to the 16-bit cache when one layer's keys or values alone are quantized, through the packed cache:
  direct, but for few candidates, and per layer only (``stages.divergence``). With "sides", the KL of all layers'
  keys, and of all values, at the two lowest bits is measured, too, and a layer has its share of that. For a
  uniform quantizer of a Gaussian the squared error falls by 3.2 a bit; how fast KL does differs by side: errors
  of keys move softmax's weights, errors of values average out over tokens (RateQuant, arXiv 2605.06675: a wrong
  base is worse than equal bits). It is taken no further than a factor of 2 from that law: a token that breaks at 2
  bits and not at 3 is a rare event, and texts are few;
- KVmix's score s, the norm of the projection weight's gradient, per layer;
- the relative error ε = ‖X − Q(X)‖ / ‖X‖ of a layer's keys or values X, per candidate.

KVmix's scores do not depend on bits, and the paper gives the top 20 % of them more. The exact solver needs a
cost of every candidate: s ε. A relative change ε of W changes its projection by ε, and the loss by up to ε
‖W‖ s to first order (Cauchy-Schwarz). ‖W‖ is left out, as in the paper's ranking.

The file holds sums in fp64 and their counts, so that profiles of parts of the data could be merged. 16 bits
is no candidate here: it costs nothing, by definition. Layers with a sliding window or a state are not
profiled: they stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal import artifact
from kvcal.errors import UsageError
from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
from kvcal.plan.page_format import SIDES, Side
from kvcal.recipe import CacheSpec, Objective, ProfileSpec
from kvcal.records import record_of
from kvcal.stages.checkpoint import Mean
from kvcal.stages.profile.observers import OBSERVERS
from kvcal.stages.profile.sensitivity import Candidate, candidates
from kvcal.strict import STRICT, Count, NumBytes, Positive, dump
from kvcal.systems.basis.rotated import DISTORTION

KIND = "profile"
TOGETHER = "all"  # in place of a layer's index
MOST_APART = 2.0
TINY = 1e-300  # keeps a share defined where nothing was lost at all
SCHEMA = 2


@pydantic_dataclass(frozen=True, config=STRICT)
class ProfileSetup:
    """The model, data and settings of a profile. ``weight_bytes``: of the model in its checkpoint's dtype;
    ``num_tokens`` and ``num_loss_tokens``: of the ``num_samples`` sequences of the gradients;
    ``max_positions``: of the model, None where its config states none, or an older profile does not say;
    ``batch_tokens``: the most tokens of a batch of gradients, padding included, on which the last bits depend
    (a longer sequence is a batch of its own), or None in an older profile."""

    identity: ModelIdentity
    geometry: Geometry
    weight_bytes: NumBytes
    vocab_size: Positive
    spec: ProfileSpec
    cache: CacheSpec
    data_fingerprint: str
    data_description: str
    num_samples: Positive
    num_tokens: Count
    num_loss_tokens: Count
    max_positions: Positive | None = None
    batch_tokens: Positive | None = None

    @property
    def layers(self) -> tuple[AttentionGeometry, ...]:
        attention = (layer for layer in self.geometry.layers if isinstance(layer, AttentionGeometry))
        return tuple(layer for layer in attention if layer.window is None)

    def candidates(self, side: Side) -> tuple[Candidate, ...]:
        """The candidates whose sensitivity is measured: the columns of ``Profile.sensitivity``."""
        return candidates(side, self.spec.num_bits, self.spec.k_axes, self.spec.group_sizes, self.spec.quantizers)

    def kl_candidates(self, side: Side) -> tuple[Candidate, ...]:
        """Those of ``candidates`` that have a KL: the columns of ``Profile.kl``; none without
        ``kl_samples``."""
        if self.spec.kl_samples == 0:
            return ()
        spec = self.spec
        return candidates(side, spec.kl_bits, spec.k_axes[:1], (spec.kl_group,), spec.quantizers)

    def measured(self, side: Side) -> tuple[Candidate, ...]:
        """Those of ``kl_candidates`` whose KL is measured; that of the others is scaled."""
        if self.spec.kl_measured not in ("lowest", "sides"):
            return self.kl_candidates(side)
        return tuple(one for one in self.kl_candidates(side) if one.num_bits == min(self.spec.kl_bits))

    def together(self, side: Side) -> tuple[Candidate, ...]:
        """Those whose KL is measured in all layers at once, by rising bits: with "sides" of the two lowest
        bits."""
        if self.spec.kl_measured != "sides" or len(self.layers) < 2:
            return ()
        lowest = sorted(set(self.spec.kl_bits))[:2]
        return tuple(one for bits in lowest for one in self.kl_candidates(side) if one.num_bits == bits)

    def totals(self) -> dict[str, tuple[int, ...]]:
        """The shape of every statistic by name."""
        totals: dict[str, tuple[int, ...]] = {"loss": ()} if self.spec.gradients else {}
        for layer, side in product(self.layers, SIDES):
            for name, observer in OBSERVERS.items() if self.spec.gradients else ():
                shape = observer.shape(layer.num_kv_heads, len(self.candidates(side)))
                totals[f"{name}.{side}.{layer.index}"] = shape
            if self.measured(side):
                totals[f"kl.{side}.{layer.index}"] = (len(self.measured(side)),)
                totals[f"kl_of_texts.{side}.{layer.index}"] = (2, len(self.measured(side)))
        for side in SIDES if self.layers else ():
            if self.together(side):
                totals[f"kl.{side}.{TOGETHER}"] = (len(self.together(side)),)
                totals[f"kl_of_texts.{side}.{TOGETHER}"] = (2, len(self.together(side)))
        return totals


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured costs. ``means``: a statistic for each of ``setup.totals()``."""

    setup: ProfileSetup
    means: Mapping[str, Mean]

    @property
    def by_law(self) -> Profile:
        """With a KL that falls with bits as squared errors do, from the fewest bits of each layer alone, where how it
        falls was measured by side."""
        if self.setup.spec.kl_measured != "sides":
            return self
        spec = replace(self.setup.spec, kl_measured="lowest")
        return Profile(replace(self.setup, spec=spec), self.means)

    @property
    def loss(self) -> float:
        """The model's own next-token loss on the data, in nats per loss token, as a mean over samples."""
        return float(self.means["loss"].result())

    def sensitivity(self, index: int, side: Side) -> Tensor:
        """PM-KVQ Eq. 5, mean over samples, [N, C] fp64: KV heads x ``setup.candidates(side)``, for the layer
        of cache index ``index``."""
        return self.means[f"sensitivity.{side}.{index}"].result()

    def grad_norm(self, index: int, side: Side) -> float:
        """KVmix's score: the norm of the projection weight's gradient, mean over samples."""
        return float(self.means[f"grad_norm.{side}.{index}"].result())

    def relative_error(self, index: int, side: Side) -> Tensor:
        """‖X − Q(X)‖ / ‖X‖ over all heads, channels and tokens after the sinks, [C] fp64 for
        ``setup.candidates(side)``; 0 where X is 0."""
        energy = self.means[f"energy.{side}.{index}"].result().clamp(min=TINY)
        return (self.means[f"squared_error.{side}.{index}"].result() / energy).sqrt()

    def kl(self, index: int, side: Side) -> Tensor:
        """KL to 16 bits in nats per loss token, [C] fp64 for ``setup.kl_candidates(side)``: measured; or the
        layer's share, at the fewest bits, of what all layers lose together; or scaled from either by the
        squared error (KL is quadratic in a small error). UsageError for a profile that was made with
        kl_samples = 0."""
        if not self.setup.kl_candidates(side):
            raise UsageError(
                "the profile holds no KL: it was made with kl_samples = 0",
                hint="use objective = 'sensitivity', or profile again with kl_samples = 1 or more",
            )
        error_of = self._squared_errors(index, side)
        measured = self.setup.measured(side)
        kl_of = self._measured_kl(index, side)
        if together := self.setup.together(side):
            alone = {one: sum(self._measured_kl(i, side)[one] for i in self._profiled) for one in measured}
            of_all = dict(zip(together, self.means[f"kl.{side}.{TOGETHER}"].result().tolist(), strict=True))
            share_of = {one[1:]: kl_of[one] / max(alone[one], TINY) for one in measured}
            kl_of = {one: share_of[one[1:]] * _bounded(of_all, one, error_of) for one in of_all}
        for one in self.setup.kl_candidates(side):
            if one not in kl_of:
                nearest = max(other for other in kl_of if other[1:] == one[1:] and other in (together or measured))
                kl_of[one] = kl_of[nearest] * error_of[one] / error_of[nearest]
        return torch.tensor([kl_of[one] for one in self.setup.kl_candidates(side)], dtype=torch.float64)

    def kl_error(self, index: int, side: Side) -> Tensor | None:
        """The standard error of ``kl`` over texts, [C] fp64: that of what was measured of the layer alone, as
        a share of it. None for one text, and in a profile that does not have texts apart."""
        moments = self.means.get(f"kl_of_texts.{side}.{index}")
        if moments is None or moments.count < 2:
            return None
        mean_C, square_C = moments.result()
        share_C = ((square_C - mean_C.square()).clamp(min=0.0) / (moments.count - 1)).sqrt() / mean_C.clamp(min=TINY)
        share_of = dict(zip(self.setup.measured(side), share_C.tolist(), strict=True))
        nearest = [
            share_of.get(one, share_of[next(other for other in share_of if other[1:] == one[1:])])
            for one in self.setup.kl_candidates(side)
        ]
        return self.kl(index, side) * torch.tensor(nearest, dtype=torch.float64)

    @property
    def _profiled(self) -> list[int]:
        return [layer.index for layer in self.setup.layers]

    def _measured_kl(self, index: int, side: Side) -> dict[Candidate, float]:
        return dict(zip(self.setup.measured(side), self.means[f"kl.{side}.{index}"].result().tolist(), strict=True))

    def _squared_errors(self, index: int, side: Side) -> dict[Candidate, float]:
        """Of each candidate; without gradients that of a Gaussian in rotated pages, as a share of its
        variance."""
        if self.setup.spec.gradients:
            errors = self.means[f"squared_error.{side}.{index}"].result().clamp(min=TINY).tolist()
            return dict(zip(self.setup.candidates(side), errors, strict=True))
        return {one: DISTORTION[one.num_bits] for one in self.setup.candidates(side)}

    def losses(self, objective: Objective, index: int, side: Side) -> dict[Candidate, list[float]]:
        """Each candidate's cost: one for each KV head ("sensitivity"), or one for the layer (all others).
        UsageError for one that was not measured."""
        if objective != "kl" and not self.setup.spec.gradients:
            raise UsageError(
                f"objective = {objective!r}: the profile was made without gradients",
                hint="use objective = 'kl', or profile again with profile.gradients = true",
            )
        if objective == "sensitivity":
            values = self.sensitivity(index, side).T
            return dict(zip(self.setup.candidates(side), values.tolist(), strict=True))
        if objective == "importance":
            costs = (self.grad_norm(index, side) * self.relative_error(index, side)).tolist()
            return {candidate: [cost] for candidate, cost in zip(self.setup.candidates(side), costs, strict=True)}
        kl = dict(zip(self.setup.kl_candidates(side), self.kl(index, side).tolist(), strict=True))
        if objective == "kl":
            return {candidate: [value] for candidate, value in kl.items()}
        sensitivity = self.losses("sensitivity", index, side)
        total_sensitivity, total_kl = self._totals
        return {
            candidate: [sum(sensitivity[candidate]) / total_sensitivity + value / total_kl]
            for candidate, value in kl.items()
        }

    @cached_property
    def _totals(self) -> tuple[float, float]:
        """Sums over all layers, sides and KL candidates of (sensitivity, KL): what "combined" measures them
        by."""
        sensitivity = kl = 0.0
        for layer, side in product(self.setup.layers, SIDES):
            measured = self.losses("sensitivity", layer.index, side)
            sensitivity += sum(sum(measured[candidate]) for candidate in self.setup.kl_candidates(side))
            kl += float(self.kl(layer.index, side).sum())
        return max(sensitivity, TINY), max(kl, TINY)


def _bounded(of_all: Mapping[Candidate, float], one: Candidate, error_of: Mapping[Candidate, float]) -> float:
    """The loss of all layers together, within a factor of ``MOST_APART`` of what squared errors say from the
    fewest bits on."""
    fewest = min(other for other in of_all if other[1:] == one[1:])
    expected = of_all[fewest] * error_of[one] / error_of[fewest]
    return min(max(of_all[one], expected / MOST_APART), expected * MOST_APART)


def save(profile: Profile, inputs: dict[str, Any], path: Path) -> None:
    tensors = {name: mean.total for name, mean in profile.means.items()}
    counts = {name: mean.count for name, mean in profile.means.items()}
    body = {"subject": dump(profile.setup), "counts": counts}
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, body, tensors))


def load(path: Path) -> Profile:
    stored = artifact.read(path, KIND, SCHEMA)
    content = record_of(_ProfileBody, stored.body, path)
    means = {name: Mean(total, content.counts[name]) for name, total in stored.tensors.items()}
    return Profile(content.subject, means)


@pydantic_dataclass(frozen=True, config=STRICT)
class _ProfileBody:
    subject: ProfileSetup  # the key's name in the file
    counts: dict[str, Count]
