"""Trellis codes in place of scalar ones, as an oracle: would codes nearer the bound of a Gaussian pay?

A code of b bits is read with the codes before it: the last L bits of a stream are a state, which a table turns into a
value (bit-shift trellis; QTIP, arXiv 2406.11235). Viterbi's search finds the codes that err least. Streams run along
the tokens of a page, one for each channel and head, so that error feedback goes from channel to channel as with
scalar codes. Both ends of a stream have the same state (tail-biting): a page has no bits beyond its codes. A token
has one scale in 8 bits, as rotated pages have; what feedback adds to a channel's spread is taken as known. Tables
are trained on Gaussians, by Lloyd's rule.

"no feedback" is without it, in the basis that evens out what errors cost (exponent 1/4, WUSH-KV).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from codes import ValuesCodec, by_place, coded_maker
from quality import MakeCache, maker, read_missing, texts_for
from torch import Tensor

from kvcal import Plan
from kvcal.pages.codec import PageCodec
from kvcal.pages.error_feedback import factor_row, factor_weights
from kvcal.pages.hadamard import unrotate
from kvcal.pages.layout_protocol import PAGE_TOKENS, PARAM_DTYPES
from kvcal.plan.page_format import SIDES
from kvcal.systems.basis.rotated import DISTORTION, SCALE_DTYPE

if TYPE_CHECKING:
    from choice_of_bits import Bench

STATE_BITS = {2: 8, 3: 9}
# Gaussian streams of a page's tokens that a table is trained on, and tested with; rounds of training.
STREAMS, ROUNDS = {"cpu": 128, "cuda": 8192}, {"cpu": 4, "cuda": 40}
STEPS_AT_ONCE = 16  # whose errors are computed together
VALUES = 1 << 25  # of a search at once: streams times states
REPLAYED = 1 << 14  # streams, up to which a search takes longer to launch than to run
WINDOW = 64
# Texts of each kind of text, and of each of some tasks, and their tokens: a search takes long.
PER_KIND, PER_TASK, TASKS, TOKENS = 4, 12, ("rows", "copies"), 1024


def measure_trellis(bench: Bench) -> None:
    device = bench.loaded.model.device
    found = bench.found.setdefault("trellis", {"read": {}, "against": {}, "bits": {}})
    found["squared error"] = {str(bits): _of_gaussians(bits, device) for bits in STATE_BITS}
    bench.save(f"trellis: squared errors {found['squared error']}, scalar {DISTORTION[2]:.4f} and {DISTORTION[3]:.4f}")
    plans = {"K2V2": _whole(bench.fixed(2, 2)), "K3V3": _whole(bench.fixed(3, 3))}
    config, makers = bench.loaded.model.config, dict[str, MakeCache]()
    for name, plan in plans.items():
        even = without_feedback(plan)
        makers[name] = maker(plan, bench.loaded)
        makers[f"trellis without feedback, {name}"] = coded_maker(even, config, _change(even, has_feedback=False))
    for name, plan in plans.items():  # a search for each channel
        makers[f"trellis, {name}"] = coded_maker(plan, config, _change(plan, has_feedback=True))
        for one in (name, f"trellis without feedback, {name}", f"trellis, {name}"):
            found["against"][one], found["bits"][one] = name, plan.bits_per_value()
    given = copy.copy(bench.given)
    given.texts, given.answers = min(PER_KIND, given.texts), min(PER_TASK, given.answers)
    given.tokens, given.kinds, given.tables = min(TOKENS, given.tokens), ",".join(TASKS), 0
    texts = texts_for(bench.loaded, given)
    for name, make in makers.items():
        read_missing(bench.loaded, {name: make}, texts, found["read"], 1, bench.save)


def _whole(plan: Plan) -> Plan:
    """The plan with whole pages, which streams run along, behind windows of ``WINDOW``."""
    whole = {"stripe_tokens": PAGE_TOKENS, "recent_window": WINDOW}
    layers = (
        replace(layer, **{side: replace(layer.format(side), **whole) for side in SIDES}) if layer.is_paged else layer
        for layer in plan.layers
    )
    return replace(plan, layers=tuple(layers))


def _change(plan: Plan, has_feedback: bool) -> Callable[..., PageCodec]:
    """Trellis codes for pages of 2 and 3 bits."""
    places = [(layer.geometry.index, side) for layer in plan.layers if layer.is_paged for side in SIDES]
    widths = {place: plan.layers[number // 2].format(place[1]).num_bits for number, place in enumerate(places)}
    make = partial(TrellisCodec.instead_of, has_feedback=has_feedback)
    return by_place({place: make for place in places if widths[place] in STATE_BITS})


def without_feedback(plan: Plan) -> Plan:
    """The plan in bases of exponent 1/4. Its own bases have exponent e: errors of channel i cost l_i^2e there, which
    the factors hold, with their damping; T gets l^(e - 1/4)."""
    tensors = dict(plan.tensors)
    for layer in plan.layers:
        for side in SIDES if layer.takes_transforms else ():
            prefix, dim = f"layers.{layer.geometry.index}.{side}", layer.head_dim(side)
            signs, factor = tensors[f"{prefix}_signs"], tensors[f"{prefix}_feedback"]
            costs_ND = torch.stack([_costs(row, signs, dim) for row in factor])
            share_ND = (costs_ND ** ((EXPONENT - 0.25) / (2 * EXPONENT))).to(tensors[f"{prefix}_basis"].device)
            share_ND = share_ND / share_ND.log().mean(1, keepdim=True).exp()
            tensors[f"{prefix}_basis"] = (tensors[f"{prefix}_basis"] * share_ND.unsqueeze(2)).float()
            tensors[f"{prefix}_basis_inverse"] = (tensors[f"{prefix}_basis_inverse"] / share_ND.unsqueeze(1)).float()
    return replace(plan, tensors=tensors)


EXPONENT = 0.4375  # of the default's bases


def _costs(factor: Tensor, signs: Tensor, dim: int) -> Tensor:
    """The cost of errors of each channel in the basis, fp64 [D]: the diagonal of U diag(d) U', turned back."""
    upper = torch.eye(dim, dtype=torch.float64)
    for channel in range(dim - 1):
        upper[channel, channel + 1 :] = factor_row(factor[None], channel, dim)[0].double().cpu()
    weights = factor_weights(factor[None], dim)[0].double().cpu()
    hessian = upper @ torch.diag(weights) @ upper.T
    turn = unrotate(torch.eye(dim), signs.cpu()).double()  # rows: the unit vectors of rotated space, in the basis
    return (turn.T @ hessian @ turn).diagonal().clamp_min(1e-9)


@dataclass(frozen=True, eq=False)
class TrellisCodec(ValuesCodec):
    has_feedback: bool = True

    @property
    def kind(self) -> object:
        return super().kind, self.has_feedback

    def coded(self, x: Tensor) -> Tensor:
        assert self.feedback is not None
        rotated, bits = self.rotated(x), self.format.num_bits
        rms = rotated.double().square().mean(-1).sqrt().half()  # of a token, [M, n, 128]
        scale_bits = (rms.view(torch.int16).int() + 0x80) >> 8
        scale = scale_bits.to(torch.uint8).view(PARAM_DTYPES[SCALE_DTYPE]).float().clamp_min(2.0**-16)
        if self.has_feedback:
            decoded = torch.stack(self._with_feedback(rotated, scale, bits), -1)
        else:
            streams = (rotated / scale.unsqueeze(-1)).transpose(-1, -2)  # [M, n, D, 128]
            weight = scale.square().unsqueeze(-2).expand(streams.shape)
            found = searched(streams.reshape(-1, PAGE_TOKENS), weight.reshape(-1, PAGE_TOKENS), bits)
            decoded = found.view(streams.shape).transpose(-1, -2) * scale.unsqueeze(-1)
        return unrotate(decoded, self.heads_signs())

    def _with_feedback(self, rotated: Tensor, scale: Tensor, bits: int) -> list[Tensor]:
        """Decoded channels [M, n, 128], each searched for after all before it."""
        assert self.feedback is not None
        targets, weight, found = rotated.unbind(-1), scale.square().flatten(0, 1), []
        target = torch.stack(targets)  # [D, M, n, 128]
        for channel in range(self.head_dim):
            due = target[channel] / scale
            spread = due.square().mean((0, 2), keepdim=True).sqrt().clamp_min(1e-6)  # of a channel, [1, n, 1]
            code = searched((due / spread).flatten(0, 1), weight, bits)
            decoded = code.view(due.shape) * spread * scale
            found.append(decoded)
            later = factor_row(self.feedback, channel, self.head_dim).t().float()  # [D - 1 - channel, n]
            target[channel + 1 :] += later[:, None, :, None] * (targets[channel] - decoded)
        return found


def searched(x_NT: Tensor, weight_NT: Tensor, bits: int) -> Tensor:
    """x [N, T], nearly unit Gaussians, as codes read it back: the weighted squared error is least."""
    at_once = max(1, VALUES // len(_table(bits, x_NT.device)))
    if x_NT.is_cuda and len(x_NT) <= min(at_once, REPLAYED):
        graph, graph_x_NT, graph_weight_NT, found_NT = _graph(x_NT.shape, bits, x_NT.device)
        graph_x_NT.copy_(x_NT)
        graph_weight_NT.copy_(weight_NT)
        graph.replay()
        return found_NT.clone()
    parts = zip(x_NT.split(at_once), weight_NT.split(at_once), strict=True)
    return torch.cat([_searched(x, weight, bits) for x, weight in parts])


def _searched(x_NT: Tensor, weight_NT: Tensor, bits: int) -> Tensor:
    table_S = _table(bits, x_NT.device)
    return table_S[_path(x_NT, weight_NT, table_S, bits)]


@functools.lru_cache(maxsize=2)
def _graph(shape: torch.Size, bits: int, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]:
    """The thousand small kernels of a search as one launch, with its operands and what it finds."""
    x_NT, weight_NT = torch.zeros(shape, device=device), torch.ones(shape, device=device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _searched(x_NT, weight_NT, bits)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found_NT = _searched(x_NT, weight_NT, bits)
    return graph, x_NT, weight_NT, found_NT


def _path(x_NT: Tensor, weight_NT: Tensor, table_S: Tensor, bits: int) -> Tensor:
    """States [N, T] of a stream that begins and ends in one state: the one at the seam of a search that began half a
    stream later."""
    middle = x_NT.shape[1] // 2
    free = _viterbi(x_NT.roll(middle, 1), weight_NT.roll(middle, 1), table_S, bits, None)
    return _viterbi(x_NT, weight_NT, table_S, bits, free[:, middle - 1])


def _viterbi(x_NT: Tensor, weight_NT: Tensor, table_S: Tensor, bits: int, ends_N: Tensor | None) -> Tensor:
    """States [N, T] of least weighted squared error; of streams whose ends have the states ``ends_N``."""
    count, length, states = *x_NT.shape, len(table_S)
    fan, rest = 2**bits, states >> bits  # state s = (earlier state * fan + code) mod states
    weight_NT = weight_NT / weight_NT.mean(1, keepdim=True).clamp_min(1e-30)
    cost_NS = x_NT.new_zeros(count, states)
    if ends_N is not None:
        cost_NS.fill_(torch.inf).scatter_(1, ends_N[:, None], 0.0)
    earlier = torch.empty(length, count, rest, dtype=torch.int16, device=x_NT.device)  # state, by s // fan
    for first in range(0, length, STEPS_AT_ONCE):
        some = slice(first, first + STEPS_AT_ONCE)
        error_TNS = (x_NT[:, some].t()[..., None] - table_S).square_().mul_(weight_NT[:, some].t()[..., None])
        for step, error_NS in enumerate(error_TNS):
            best, earlier[first + step] = cost_NS.view(count, fan, rest).min(1)
            cost_NS = (error_NS.view(count, rest, fan) + best[..., None]).view(count, states)
    earlier.mul_(rest).add_(torch.arange(rest, device=x_NT.device))
    state_N = cost_NS.argmin(1) if ends_N is None else ends_N
    path = [state_N]
    for step in range(length - 1, 0, -1):
        state_N = earlier[step].gather(1, (state_N >> bits)[:, None])[:, 0].long()
        path.append(state_N)
    return torch.stack(path[::-1], 1)


@functools.cache
def _table(bits: int, device: torch.device) -> Tensor:
    """Values of the states: Lloyd's rule from random Gaussians, on streams that are searched with them."""
    generator = torch.Generator().manual_seed(bits)
    states = 2 ** STATE_BITS[bits]
    quantiles = torch.special.ndtri((torch.arange(states) + 0.5) / states)
    table_S = quantiles[torch.randperm(states, generator=generator)].to(device)
    x_NT = torch.randn(STREAMS[device.type], PAGE_TOKENS, generator=generator).to(device)
    for _ in range(ROUNDS[device.type]):
        path_NT = _path(x_NT, torch.ones_like(x_NT), table_S, bits).flatten()
        sums_S = torch.zeros_like(table_S).index_add_(0, path_NT, x_NT.flatten())
        counts_S = path_NT.bincount(minlength=states)
        table_S = torch.where(counts_S > 0, sums_S / counts_S.clamp_min(1), table_S)
    return table_S


def _of_gaussians(bits: int, device: torch.device) -> float:
    """The squared error of unit Gaussians that the table was not trained on."""
    x_NT = torch.randn(STREAMS[device.type], PAGE_TOKENS, generator=torch.Generator().manual_seed(7)).to(device)
    return float((searched(x_NT, torch.ones_like(x_NT), bits) - x_NT).square().mean())
