"""KVmix's assignment: more bits and a longer window for the layers whose projections the loss depends on most.

A layer's score is the norm of the gradient of the ordinary next-token loss with respect to its key, or its value,
projection's weight, as a mean over prompts (Eq. 10-11; ``Profile.grad_norm``). K and V are ranked apart. The
floor(share L) layers of the highest scores, one at least when share > 0, are the important ones. The floor is the
paper's: its names k2.19 v2.38 (20 %) and k2.28 v2.56 (30 %) stand for 6 and 9 of 32 layers. Of equal scores the lower
layer comes first. Important layers get 3 bits for K, 4 for V, and 20 % of recent tokens in full precision; the others
2 bits and 10 %, by the rule of ``plan.format.WindowRule``: page by page, which is not the paper's update by update.

A random choice of as many layers is the ablation: K and V are drawn apart too. Left out: layers with a sliding window
or a state, which stay as they are and are not counted in L; importance of single KV heads.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from kvcal.plan.page_format import SIDES, Format, Side, WindowRule
from kvcal.recipe import ImportanceSpec
from kvcal.stages.profile.record import Profile

# Any count far behind the last step of the paged rule.
_LONG = 1 << 30

Scores = Mapping[Side, Mapping[int, float]]


def importance_scores(profile: Profile) -> Scores:
    """KVmix's scores s_k, s_v of every profiled layer: {side: {cache index: score}}."""
    return {
        side: {layer.index: profile.grad_norm(layer.index, side) for layer in profile.setup.layers} for side in SIDES
    }


def importance_formats(
    scores: Scores, spec: ImportanceSpec, num_sink_tokens: int, param_dtype: str
) -> dict[int, tuple[Format, Format]]:
    """The formats of K and V of every layer in ``scores``, which holds the same layers for both sides."""
    layers, formats = sorted(scores["k"]), []
    for side in SIDES:
        if spec.random_seed is None:
            important = important_layers(scores[side], spec.share)
        else:
            important = random_layers(layers, spec.share, side, spec.random_seed)
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
    """None where nothing is to be kept but ``min_window`` tokens. A paged window that never reaches ``max_window`` is
    bounded by what it does reach, so that no plan pays for a ring that stays empty."""
    if spec.window == "none" or share == 0:
        return None
    rule = WindowRule(spec.window, share, spec.max_window, spec.min_window)
    return replace(rule, max_tokens=rule.window(_LONG)) if spec.window == "paged" else rule


def num_important(share: float, num_layers: int) -> int:
    """floor(share num_layers), at least 1 when share > 0; ``share`` is the decimal number as written, so that 0.29 of
    100 layers are 29."""
    if share == 0 or num_layers == 0:
        return 0
    return max(1, int(Fraction(repr(share)) * num_layers))


def important_layers(scores: Mapping[int, float], share: float) -> frozenset[int]:
    """The layers (cache indices) of the highest scores; ``scores`` holds one for each layer."""
    ranked = sorted(scores, key=lambda index: (-scores[index], index))
    return frozenset(ranked[: num_important(share, len(ranked))])


def random_layers(layers: Sequence[int], share: float, side: Side, seed: int) -> frozenset[int]:
    """As many layers as :func:`important_layers` would choose, drawn without their scores; equal in every process."""
    drawn = random.Random(f"importance:{side}:{seed}").sample(sorted(layers), num_important(share, len(layers)))
    return frozenset(drawn)
