"""KVmix: more bits and a longer window for the layers whose projections the loss depends on most.

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
from typing import Any

from kvcal.plan.layer import bare_layers, in_formats
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.plan.plan import Workload
from kvcal.recipe import CacheSpec
from kvcal.stages.allocate.record import Allocation, unbudgeted
from kvcal.stages.profile.record import Profile
from kvcal.systems.kvmix.recipe import ImportanceSpec
from kvcal.systems.kvmix.window_rule import WindowRule

# Any count far after the last step of the paged rule.
_LONG = 1 << 30
Scores = Mapping[Side, Mapping[int, float]]


def kvmix_allocation(
    profile: Profile, spec: ImportanceSpec, workload: Workload, provenance: dict[str, Any]
) -> Allocation:
    """KVmix: formats by the gradient norms of the profile; rotary keys stay at 16 bits."""
    formats = kvmix_formats(kvmix_scores(profile), spec, profile.setup.cache)
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


def kvmix_formats(scores: Scores, spec: ImportanceSpec, cache: CacheSpec) -> dict[int, tuple[Format, Format]]:
    """The formats of K and V of every layer in ``scores``, which holds the same layers for both sides."""
    layers, formats = sorted(scores["k"]), []
    for side in SIDES:
        important = important_layers(scores[side], spec.share)
        formats.append([layer_format(side, i in important, spec, cache) for i in layers])
    return dict(zip(layers, zip(*formats, strict=True), strict=True))


def layer_format(side: Side, is_important: bool, spec: ImportanceSpec, cache: CacheSpec) -> Format:
    """K per channel, V per token."""
    high_bits = spec.k_high_bits if side == "k" else spec.v_high_bits
    num_bits = high_bits if is_important else spec.low_bits
    rule = window_rule(spec, spec.high_window_share if is_important else spec.low_window_share)
    return Format(
        num_bits,
        axis="channel" if side == "k" else "token",
        group_size=spec.group_size,
        num_sink_tokens=cache.num_sink_tokens,
        recent_window=spec.min_window if rule is None and spec.window != "none" else 0,
        param_dtype=cache.param_dtype,
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
