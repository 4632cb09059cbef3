"""The allocation: which Format every layer's K and V got, for which workload, and where the budget's bytes
go.

Formats come from the solver (``stages.allocate``), from a recipe that fixes them, or from KVmix's ranking;
what follows (progressive schedule, λ, predictors, compilation) does not depend on which.

KVmix gives more bits and a longer window for the layers whose projections the loss depends on most.

A layer's score is the norm of the gradient of the ordinary next-token loss with respect to its key, or its
value, projection's weight, as a mean over prompts (Eq. 10-11; ``Profile.grad_norm``). K and V are ranked
apart. The floor(share L) layers of the highest scores, one at least when share > 0, are the important ones.
The floor is the paper's: its names k2.19 v2.38 (20 %) and k2.28 v2.56 (30 %) stand for 6 and 9 of 32 layers.
Of equal scores the lower layer comes first. Important layers get 3 bits for K, 4 for V, and 20 % of recent
tokens in full precision; the others 2 bits and 10 %, by the rule of ``WindowRule``: page by page, which is
not the paper's update by update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal import artifact
from kvcal.geometry import CacheDtype, Geometry, ModelIdentity
from kvcal.plan.layer import FormatsSpec, LayerPlan, bare_layers, fixed_layers, in_formats
from kvcal.plan.page_format import SIDES, Format, Side, WindowRule
from kvcal.plan.plan import Workload
from kvcal.recipe import ImportanceSpec, ProgressiveSpec
from kvcal.records import record_of
from kvcal.stages.allocate.schedule import progressive_layers
from kvcal.stages.profile.record import Profile
from kvcal.strict import STRICT, Number, NumBytes, dump

KIND = "allocation"
SCHEMA = 3

# Any count far after the last step of the paged rule.
_LONG = 1 << 30
Scores = Mapping[Side, Mapping[int, float]]
BudgetKind = Literal["budget", "kv_budget", "bits", "same_bytes_as"]


@dataclass(frozen=True, config=STRICT)
class BudgetSplit:
    """The bytes of a budget by what takes them. ``weights`` and ``workspace`` are None when only the cache
    was budgeted; ``fixed`` are bounded layers and states, ``paged`` the chosen formats, ``reserved`` what
    transforms will take.

    ``kind``: how the budget was stated; None where formats were fixed without one, and it is their own bytes.
    ``logits``: this much of the workspace, where it depends on the plan; None where it was stated in bytes.
    ``engine``: what a serving engine takes besides pages: rings and padding."""

    budget: Annotated[int, Field(ge=0, le=10**36)]
    weights: NumBytes | None
    workspace: NumBytes | None
    fixed: NumBytes
    paged: NumBytes
    reserved: NumBytes = 0
    kind: BudgetKind | None = None
    logits: NumBytes | None = None
    engine: Annotated[NumBytes, Field(exclude_if=lambda nbytes: nbytes == 0)] = 0

    @property
    def cache(self) -> int:
        return self.fixed + self.paged

    @property
    def overhead(self) -> int:
        """Bytes of all that is no record of keys and values."""
        return (self.weights or 0) + (self.workspace or 0) + self.engine

    @property
    def for_cache(self) -> int:
        """The bytes that the budget leaves for the cache, reserved ones included; may be negative."""
        return self.budget - self.overhead


@dataclass(frozen=True, config=STRICT)
class Allocation:
    """The chosen layers of a model. ``provenance`` says what they were chosen from; ``loss``, ``bound``,
    ``gap`` and ``proof`` are the solver's (see solver.Solution), None where a recipe fixed the formats."""

    model: ModelIdentity
    cache_dtype: CacheDtype
    layers: tuple[LayerPlan, ...]
    workload: Workload
    provenance: dict[str, Any]
    split: BudgetSplit
    loss: Number | None = None
    bound: Number | None = None
    gap: Number | None = None
    proof: str | None = None


def unbudgeted(
    layers: tuple[LayerPlan, ...],
    model: ModelIdentity,
    cache_dtype: CacheDtype,
    workload: Workload,
    provenance: dict[str, Any],
) -> Allocation:
    """Layers that nothing was solved for: their own bytes are the budget."""
    fixed, paged = layer_bytes(layers, cache_dtype, workload)
    return Allocation(
        model, cache_dtype, layers, workload, provenance, BudgetSplit(fixed + paged, None, None, fixed, paged)
    )


def fixed_allocation(
    formats: FormatsSpec, model: ModelIdentity, geometry: Geometry, workload: Workload, provenance: dict[str, Any]
) -> Allocation:
    """A recipe with [formats]: no choice, no budget but its own bytes."""
    layers = fixed_layers(formats, bare_layers(geometry))
    return unbudgeted(layers, model, geometry.cache_dtype, workload, provenance)


def kvmix_allocation(
    profile: Profile, spec: ImportanceSpec, workload: Workload, provenance: dict[str, Any]
) -> Allocation:
    """KVmix: formats by the gradient norms of the profile; rotary keys stay at 16 bits."""
    cache = profile.setup.cache
    formats = kvmix_formats(kvmix_scores(profile), spec, cache.num_sink_tokens, cache.param_dtype)
    layers = tuple(
        in_formats(layer, *formats[layer.geometry.index]) if layer.is_paged else layer
        for layer in bare_layers(profile.setup.geometry)
    )
    return unbudgeted(layers, profile.setup.identity, profile.setup.geometry.cache_dtype, workload, provenance)


def kvmix_scores(profile: Profile) -> Scores:
    """KVmix's scores s_k, s_v of every profiled layer: {side: {cache index: score}}."""
    return {
        side: {layer.index: profile.grad_norm(layer.index, side) for layer in profile.setup.layers} for side in SIDES
    }


def kvmix_formats(
    scores: Scores, spec: ImportanceSpec, num_sink_tokens: int, param_dtype: str
) -> dict[int, tuple[Format, Format]]:
    """The formats of K and V of every layer in ``scores``, which holds the same layers for both sides."""
    layers, formats = sorted(scores["k"]), []
    for side in SIDES:
        important = important_layers(scores[side], spec.share)
        formats.append([layer_format(side, i in important, spec, num_sink_tokens, param_dtype) for i in layers])
    return dict(zip(layers, zip(*formats, strict=True), strict=True))


def layer_format(
    side: Side, is_important: bool, spec: ImportanceSpec, num_sink_tokens: int, param_dtype: str
) -> Format:
    """K per channel, V per token."""
    high_bits = spec.k_high_bits if side == "k" else spec.v_high_bits
    num_bits = high_bits if is_important else spec.low_bits
    rule = window_rule(spec, spec.high_window_share if is_important else spec.low_window_share)
    return Format(
        num_bits,
        axis="channel" if side == "k" else "token",
        group_size=spec.group_size,
        num_sink_tokens=num_sink_tokens,
        recent_window=spec.min_window if rule is None and spec.window != "none" else 0,
        param_dtype=param_dtype,  # type: ignore[arg-type]
        window_rule=rule,
    )


def window_rule(spec: ImportanceSpec, share: float) -> WindowRule | None:
    """None where nothing is to be kept but ``min_window`` tokens. A paged window that never reaches
    ``max_window`` is bounded by what it does reach, so that no plan pays for a ring that stays empty."""
    if spec.window == "none" or share == 0:
        return None
    rule = WindowRule(spec.window, share, spec.max_window, spec.min_window)
    return replace(rule, max_tokens=rule.window(_LONG)) if spec.window == "paged" else rule


def num_important(share: float, num_layers: int) -> int:
    """floor(share num_layers), at least 1 when share > 0; ``share`` is the decimal number as written, so that
    0.29 of 100 layers are 29."""
    if share == 0 or num_layers == 0:
        return 0
    return max(1, int(Fraction(repr(share)) * num_layers))


def important_layers(scores: Mapping[int, float], share: float) -> frozenset[int]:
    """The layers (cache indices) of the highest scores; ``scores`` holds one for each layer."""
    ranked = sorted(scores, key=lambda index: (-scores[index], index))
    return frozenset(ranked[: num_important(share, len(ranked))])


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


def layer_bytes(layers: tuple[LayerPlan, ...], cache_dtype: str, workload: Workload) -> tuple[int, int]:
    """Bytes of (windows and states, pages)."""
    sizes = {True: 0, False: 0}
    for layer in layers:
        state = layer.state_nbytes(workload.batch)
        sizes[layer.is_paged] += layer.nbytes(cache_dtype, workload.lengths, workload.context) - state
        sizes[False] += state
    return sizes[False], sizes[True]


def num_values(layers: tuple[LayerPlan, ...], workload: Workload) -> int:
    """Values that the paged layers cache at the workload."""
    per_token = sum(layer.attention.values_per_token for layer in layers if layer.is_paged)
    return per_token * workload.batch * workload.context


def layers_in(geometry: Geometry, k: Format, v: Format) -> tuple[LayerPlan, ...]:
    """All layers, the paged ones in the formats ``k`` and ``v``, rotary keys at 16 bits. UnsupportedModel as
    ``in_formats``."""
    return tuple(in_formats(layer, k, v) if layer.is_paged else layer for layer in bare_layers(geometry))


def save(allocation: Allocation, inputs: dict[str, Any], path: Path) -> None:
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, dump(allocation), {}))


def load(path: Path) -> tuple[Allocation, dict[str, Any]]:
    """The allocation and its inputs. ArtifactError when missing, corrupt or foreign."""
    stored = artifact.read(path, KIND, SCHEMA)
    return record_of(Allocation, stored.body, path), stored.inputs
