"""The rotation of every layer's keys at chosen positions, as matrices, by the model's own rotary function.

During a forward of a few tokens the model file's ``apply_rotary*`` function is wrapped, as in ``kvcal.models.rope``.
The call whose output is the layer's key is then made once more, with the model's cos and sin, and unit vectors in place
of the key. ``kvcal.models.rotary`` reads pairs, frequencies and amplitude off the matrices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcal.attention import attention_modules, forward_of
from kvcal.errors import UnsupportedModel
from kvcal.geometry import Geometry
from kvcal.models.geometry import attention_layers, probe_ids
from kvcal.models.rope import rotary_functions
from kvcal.models.taps import Captured, tap

FP32_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True, eq=False)
class Turn:
    """A layer's rotation as observed at some positions: ``matrices`` fp64 [T, D, D], out x in; ``eps`` the precision
    of its cos and sin."""

    positions: Tensor
    matrices: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a rotary function: outputs pair with the leading arguments."""

    rotary: Callable
    bound: inspect.BoundArguments
    outputs: tuple[Tensor, ...]


def inputs_at(model: PreTrainedModel, tokens_BT: Tensor, positions_T: Tensor) -> dict[str, Tensor]:
    """Arguments of a forward whose tokens stand at ``positions_T`` (int64) and attend causally, in their order.

    The mask of ones is needed: without a mask, transformers reads positions that do not count up by one as several
    sequences packed in a row, which do not see each other. UnsupportedModel for a model that takes no positions.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{type(model).__name__}.forward takes no position_ids")
    tokens_BT = tokens_BT.to(model.device)
    positions_BT = positions_T.to(model.device).expand_as(tokens_BT)
    return {"input_ids": tokens_BT, "position_ids": positions_BT, "attention_mask": torch.ones_like(tokens_BT)}


def observe_turns(model: PreTrainedModel, geometry: Geometry, positions: Sequence[int] | None) -> dict[int, Turn]:
    """Every layer's rotation at ``positions``; None: those of an ordinary forward of four tokens."""
    positions_T = torch.arange(4) if positions is None else torch.tensor(positions)
    tokens_BT = probe_ids(model, 1, len(positions_T))
    inputs = {"input_ids": tokens_BT} if positions is None else inputs_at(model, tokens_BT, positions_T)
    calls: list[_Call] = []
    turns: dict[int, Turn] = {}

    def measure(captured: Captured) -> None:
        place = f"layer {captured.layer} of {geometry.model_type}"
        matrices = _matrices(calls, captured, place).cpu()
        eps = max(FP32_EPS, torch.finfo(captured.k_post_BNTD.dtype).eps)
        turns[captured.layer] = Turn(positions_T.double(), matrices, eps)
        calls.clear()

    with torch.no_grad(), _noting(model, calls), tap(model, measure, geometry):
        model(**inputs, use_cache=False)
    assert len(turns) == len(attention_layers(geometry))
    return turns


@contextmanager
def _noting(model: PreTrainedModel, calls: list[_Call]) -> Iterator[None]:
    """Within the context, the calls of the rotary functions in the model file are appended to ``calls``."""
    with ExitStack() as restore:
        for namespace, name in rotary_functions(forward_of(module) for module in attention_modules(model)):
            restore.callback(namespace.__setitem__, name, namespace[name])
            namespace[name] = _noted(namespace[name], calls)
        yield


def _noted(rotary: Callable, calls: list[_Call]) -> Callable:
    signature = inspect.signature(rotary)

    @wraps(rotary)
    def noted(*args: Any, **kwargs: Any) -> Any:
        after = rotary(*args, **kwargs)
        outputs = after if isinstance(after, tuple) else (after,)
        calls.append(_Call(rotary, signature.bind(*args, **kwargs), outputs))
        return after

    return noted


def _matrices(calls: Sequence[_Call], captured: Captured, place: str) -> Tensor:
    """The rotation of the layer's key at every position of the probe, fp64 [T, D, D], out x in."""
    k_post_BNTD = captured.k_post_BNTD
    identity = torch.eye(k_post_BNTD.shape[-1], dtype=torch.float64, device=k_post_BNTD.device)
    matrices_TDD = identity.repeat(k_post_BNTD.shape[2], 1, 1)
    if captured.k_pre_BNTD is k_post_BNTD:
        return matrices_TDD
    if captured.k_pre_BNTD is None:
        raise UnsupportedModel(f"{place} changes its keys after RoPE, or rotates by unknown means")
    for call in calls:
        for number, after in enumerate(call.outputs):
            for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
                start = _place_in(after.permute(order), k_post_BNTD) if after.ndim == 4 else None
                if start is not None:
                    turned = slice(start, start + after.shape[-1])
                    matrices_TDD[:, turned, turned] = _turned_units(call, number, order)
                    return matrices_TDD
    raise UnsupportedModel(f"{place} rotates its keys by unknown means")


def _place_in(after_BNTR: Tensor, k_post_BNTD: Tensor) -> int | None:
    """The first channel of the key's part that is ``after_BNTR``; None if it is no part of the key."""
    width = after_BNTR.shape[-1]
    rest = k_post_BNTD.shape[-1] - width
    if rest < 0 or after_BNTR.shape[:3] != k_post_BNTD.shape[:3]:
        return None
    for start in (0, rest):
        part = k_post_BNTD.narrow(-1, start, width)
        if torch.allclose(after_BNTR, part, rtol=0, atol=0, equal_nan=True):  # NaN is left to who can name the sample
            return start
    return None


def _turned_units(call: _Call, number: int, order: Sequence[int]) -> Tensor:
    """fp64 [T, R, R]: what the call makes of each unit vector, as columns."""
    name = list(call.bound.arguments)[number]
    shape = call.outputs[number].shape
    units = torch.eye(shape[-1], dtype=torch.float64, device=call.outputs[number].device)
    units = units[:, None, None].expand(-1, *shape[1:]).contiguous()  # unit vectors as a batch
    bound = inspect.BoundArguments(call.bound.signature, {**call.bound.arguments, name: units})
    after = call.rotary(*bound.args, **bound.kwargs)
    turned = after[number] if isinstance(after, tuple) else after
    return turned.permute(*order)[:, 0].permute(1, 2, 0).double()
