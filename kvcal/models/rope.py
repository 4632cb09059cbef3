"""Rotary embeddings: which channels of a layer RoPE turns, and how fast, measured on the model's own rotary
function.

Pairings differ between families (a channel with the one half a head away, or with its neighbour; all channels
of a head, or its first few), and so do frequencies and amplitudes (linear, llama3 and YaRN scaling, two bases
in one model). None of that is guessed from a configuration. A probe of a few tokens runs at chosen positions;
the call that turned a layer's key (``Captured.rotation``) is made once more, with unit vectors in place of
the key and with the very cos and sin of the model. The result is the matrix of the rotation at each position:
which channels mix, by which angle, times what.

PM-KVQ needs the pairs (its λ must be equal within a pair, to pass through the rotation: Eq. 9-11), a plan
that stores keys before RoPE needs the whole map. A pair's frequency is the one of the model's ``inv_freq``
buffers that explains every angle observed, near and far.

Errors: angles that are not position x frequency (dynamic and longrope scaling change frequencies with the
length, multimodal rotation takes three positions), and rotations that cannot be observed. ``rotary_pairs``
serves the former.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcal.errors import UnsupportedModel
from kvcal.geometry import Geometry
from kvcal.models.supported_layers import probe_ids
from kvcal.models.taps import Captured, tap

FP32_EPS = torch.finfo(torch.float32).eps
# For a configuration that names no context.
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, eq=False)
class Turn:
    """A layer's rotation as observed at some positions: ``matrices`` fp64 [T, D, D], out x in; ``eps`` the
    precision of its cos and sin."""

    positions: Tensor
    matrices: Tensor
    eps: float


def inputs_at(model: PreTrainedModel, tokens_BT: Tensor, positions_T: Tensor) -> dict[str, Tensor]:
    """Arguments of a forward whose tokens stand at ``positions_T`` (int64) and attend causally, in their
    order.

    The mask of ones is needed: without a mask, transformers reads positions that do not count up by one as
    several sequences packed in a row, which do not see each other. UnsupportedModel for a model that takes no
    positions.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{type(model).__name__}.forward takes no position_ids",
            hint="set position_scale to 1; leave out [reparam], [predictors] and k_pages = 'pre'",
        )
    tokens_BT = tokens_BT.to(model.device)
    positions_BT = positions_T.to(model.device).expand_as(tokens_BT)
    return {"input_ids": tokens_BT, "position_ids": positions_BT, "attention_mask": torch.ones_like(tokens_BT)}


def observe_turns(
    model: PreTrainedModel, geometry: Geometry, positions: Sequence[int] | None, indices: Collection[int] | None
) -> dict[int, Turn]:
    """The rotations of layers ``indices``, None for all, at ``positions``; None: those of an ordinary forward
    of four tokens."""
    positions_T = torch.arange(4) if positions is None else torch.tensor(positions)
    tokens_BT = probe_ids(model, 1, len(positions_T))
    inputs = {"input_ids": tokens_BT} if positions is None else inputs_at(model, tokens_BT, positions_T)
    turns: dict[int, Turn] = {}

    def measure(captured: Captured) -> None:
        if indices is not None and captured.layer not in indices:
            return
        matrices = _matrices(captured, f"layer {captured.layer} of {geometry.model_type}").cpu()
        eps = max(FP32_EPS, torch.finfo(captured.k_post_BNTD.dtype).eps)
        turns[captured.layer] = Turn(positions_T.double(), matrices, eps)

    with torch.no_grad(), tap(model, measure, geometry):
        model(**inputs, use_cache=False)
    return turns


def _matrices(captured: Captured, place: str) -> Tensor:
    """The rotation of the layer's key at every position of the probe, fp64 [T, D, D], out x in."""
    if captured.k_pre_BNTD is None:
        raise UnsupportedModel(
            f"{place} changes its keys after RoPE, or rotates by unknown means",
            hint="store keys as they are cached: leave out [reparam], [predictors] and k_pages = 'pre'",
        )
    _, _, T, D = captured.k_post_BNTD.shape
    device, rotation = captured.k_post_BNTD.device, captured.rotation
    matrices_TDD = torch.eye(D, dtype=torch.float64, device=device).repeat(T, 1, 1)
    if rotation is not None:
        _, *rest, R = rotation.k_pre.shape
        units = torch.eye(R, dtype=torch.float64, device=device)[:, None, None].expand(-1, *rest, -1)  # as a batch
        turned_RNTR = rotation.rotated(units.contiguous()).permute(*rotation.axes)
        part = slice(rotation.start, rotation.start + R)
        matrices_TDD[:, part, part] = turned_RNTR[:, 0].permute(1, 2, 0).double()
    return matrices_TDD


@dataclass(frozen=True, eq=False)
class RotaryMap:
    """A layer's rotation. ``pairs`` int64 [P, 2]: channels (a, b) of a head, of which, at position p,

        k_post_a = amplitude (k_pre_a cos(p f) - k_pre_b sin(p f)),   k_post_b = amplitude (k_pre_b cos + k_pre_a sin)

    with f in ``frequency`` fp64 [P], radians per position, positive. Channels in no pair are not rotated; a
    layer without RoPE has no pairs."""

    pairs: Tensor
    frequency: Tensor
    amplitude: float

    def tensor(self) -> Tensor:
        """fp64 [P, 4]: a, b, frequency, amplitude; what a plan stores."""
        amplitude = torch.full_like(self.frequency, self.amplitude)
        return torch.stack([*self.pairs.double().unbind(1), self.frequency, amplitude], dim=1)


def rotary_pairs(
    model: PreTrainedModel, geometry: Geometry, indices: Collection[int] | None = None
) -> dict[int, Tensor]:
    """{layer: pairs int64 [P, 2]}, first channel below the second, for attention layers ``indices``, None for
    all; see ``RotaryMap``. Raises UnsupportedModel: the rotation of one cannot be observed, or mixes channels
    otherwise than in pairs."""
    turns = observe_turns(model, geometry, None, indices)
    return {index: _pairs(turn, f"layer {index} of {geometry.model_type}") for index, turn in turns.items()}


def rotary_maps(
    model: PreTrainedModel, geometry: Geometry, indices: Collection[int] | None = None
) -> dict[int, RotaryMap]:
    """The rotations of attention layers ``indices``, None for all, by cache index. Raises UnsupportedModel:
    as ``rotary_pairs``; or angles are not position x a frequency of the model's buffers."""
    small = observe_turns(model, geometry, None, indices)
    if all(not _pairs(turn, f"layer {index}").numel() for index, turn in small.items()):
        nothing = torch.empty(0, dtype=torch.float64)
        return {index: RotaryMap(torch.empty(0, 2, dtype=torch.int64), nothing, 1.0) for index in small}
    config = model.config.get_text_config(decoder=True).to_dict()
    if "mrope_section" in (config.get("rope_parameters") or {}):
        raise UnsupportedModel(f"{geometry.model_type} rotates by three positions a token (mrope_section)")
    context = config.get("max_position_embeddings") or DEFAULT_CONTEXT
    try:
        # Far positions first, small ones last: frequencies that grow with the length then show, and narrow
        # back.
        far = observe_turns(model, geometry, [0, 1, 3, context + 1, 2 * context], indices)
        near = observe_turns(model, geometry, sorted({0, 1, 2, 3, 7, 61, context // 3, context - 1}), indices)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError) as error:
        raise UnsupportedModel(f"{geometry.model_type} does not run at chosen positions: {error}") from error
    finally:
        small = observe_turns(model, geometry, None, indices)
    buffers = [buffer.double().cpu() for name, buffer in model.named_buffers() if "inv_freq" in name.split(".")[-1]]
    own = torch.cat([torch.empty(0, dtype=torch.float64), *(buffer.flatten() for buffer in buffers)]).unique()
    return {
        index: _map([near[index], small[index], far[index]], own, f"layer {index} of {geometry.model_type}")
        for index in small
    }


def _pairs(turn: Turn, place: str) -> Tensor:
    """int64 [P, 2], ascending. UnsupportedModel for any other matrix than a rotation of pairs."""
    diagonal_TD = turn.matrices.diagonal(dim1=1, dim2=2)
    linked_DD = (turn.matrices - diagonal_TD.diag_embed() != 0).any(0)
    in_pairs = bool((linked_DD.sum(0) <= 1).all()) and torch.equal(linked_DD, linked_DD.T)
    pairs = linked_DD.triu().nonzero()
    a, b = pairs.unbind(1)
    tolerance = 8 * turn.eps * float(turn.matrices.abs().max())
    equal = (diagonal_TD[:, a] - diagonal_TD[:, b]).abs() <= tolerance
    opposite = (turn.matrices[:, a, b] + turn.matrices[:, b, a]).abs() <= tolerance
    alone = diagonal_TD[:, ~linked_DD.any(0)]
    if not (in_pairs and bool(equal.all()) and bool(opposite.all()) and bool(((alone - 1).abs() <= tolerance).all())):
        raise UnsupportedModel(f"{place}: its rotary function is not a rotation of pairs of channels")
    return pairs


def _map(turns: Sequence[Turn], own: Tensor, place: str) -> RotaryMap:
    """From all observations, with the frequencies ``own`` of the model's buffers."""
    pairs = _pairs(turns[0], place)
    if not pairs.numel():
        return RotaryMap(pairs, torch.empty(0, dtype=torch.float64), 1.0)
    a, b = pairs.unbind(1)
    amplitude, candidates = _amplitude(turns, pairs, place), torch.cat([own, -own])
    errors = torch.zeros(len(pairs), len(candidates), dtype=torch.float64)  # the largest, over what rounding explains
    for turn in turns:
        found_TP1 = torch.atan2(turn.matrices[:, b, a], turn.matrices[:, a, a]).unsqueeze(2)  # -π to π
        expected_T1C = (turn.positions[:, None] * candidates).unsqueeze(1)
        wrapped = torch.remainder(found_TP1 - expected_T1C + math.pi, 2 * math.pi) - math.pi
        # An fp32 angle is rounded, and so are cos and sin.
        errors = errors.maximum((wrapped.abs() / (8 * turn.eps + 4 * FP32_EPS * expected_T1C.abs())).amax(0))
    if not len(candidates) or bool((errors.amin(1) > 1).any()):
        raise UnsupportedModel(
            f"{place}: its rotary angles are not position x a frequency of its inv_freq buffers (dynamic or longrope "
            "scaling change them with the length)",
            hint="store keys after RoPE: leave out [predictors] and k_pages = 'pre'; λ needs no angles",
        )
    frequency = candidates[errors.argmin(1)]
    return RotaryMap(torch.where(frequency[:, None] < 0, pairs.flip(1), pairs), frequency.abs(), amplitude)


def _amplitude(turns: Sequence[Turn], pairs: Tensor, place: str) -> float:
    a, b = pairs.unbind(1)
    found = torch.cat([torch.hypot(turn.matrices[:, a, a], turn.matrices[:, b, a]) for turn in turns])
    amplitude = float(turns[0].matrices[0, a[0], a[0]])  # at position 0, where cos is 1
    if not bool(((found - amplitude).abs() <= 8 * turns[0].eps * amplitude).all()):
        raise UnsupportedModel(f"{place}: its rotation scales keys by {float(found.min())} to {float(found.max())}")
    return amplitude
