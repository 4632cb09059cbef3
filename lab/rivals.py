"""The KV caches of other systems on a real model, next to kvcal's plans, on the same texts.

    python lab/rivals.py --model Qwen/Qwen3-0.6B --data texts --rivals int4,oscar --plans kivi-2,default@2.5

Options are those of real.py, ``--rivals``, and ``--long`` for texts longer than --tokens. What OUT/real.json
has of the same settings is not measured again; results go to OUT/rivals.json and rivals.png. All is written
from descriptions. No codes are stored: attention gets the keys and values that a format gives back. So every
token of a text reads in one forward what it reads in decoding: all tokens, itself too, from codes, but for
the sinks, windows and layers that stay at 16 bits.

fp8: e4m3 with scale 1, as vLLM's. int4: signs, Hadamard, fp32 scale that hides the zero (vLLM:
int4_per_token_head). tq-4, tq-k3v4, tq-3 (vLLM: turboquant_4bit_nc, _k3v4_nc, _3bit_nc): keys with fp16 norm,
Hadamard, Lloyd-Max codes and unit length restored, values with fp16 scale and minimum; two first and two last
layers at 16 bits, in -all none. oscar: a layer's rotation, by queries and by weighted values; clipped 2 bits;
64 sinks, 256 recent; scale and zero are counted at 16 bits as its paper does, its code stores 32. wush: a
head's invertible transform, by keys and queries, values and W_o; codes and windows of oscar. wush-2, wush-3:
one scale, by a token's norm (QuEST); 16 sinks, 128 recent.

Keys are those after RoPE. oscar and wush are calibrated on a basis's texts, put at all places of the model's
context as there. Bits count all but their matrices (.002).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import real
import torch
from torch import Tensor, nn

from kvcal import load_model, load_recipe
from kvcal.artifact import write_text_atomic
from kvcal.console import TerminalReporter
from kvcal.folder import sequences
from kvcal.models.attention import base_attention, layer_index, replaced_attention
from kvcal.models.load import LoadedModel
from kvcal.models.projections import output_weights
from kvcal.models.rope import rotary_maps
from kvcal.models.taps import Captured, tap
from kvcal.pages.hadamard import random_signs, rotate
from kvcal.plan.page_format import Side
from kvcal.stages.divergence import kl_divergence
from kvcal.systems.basis.hessians import output_products, over_context, query_products
from kvcal.systems.basis.stage import calibration_spec

PLANS = "kivi-4,kivi-2,default@4,default@3,default@2.5,default@2.25"
AT_ONCE = 8192  # tokens of a forward: its logits are held twice
GAUSSIAN_STEP = {2: 0.9957, 3: 0.5860}  # of the uniform quantizer of least squared error, unit variance
CLIPPED = {"k": 0.96, "v": 0.92}  # quantile of magnitudes that OSCAR clips at
DAMPING = 0.01  # WUSH's

# (x [B, N, T, D] fp32, layer, side) -> what is read back.
Codec = Callable[[Tensor, int, Side], Tensor]


@dataclass(frozen=True)
class Rival:
    """``k_bits``, ``v_bits``: of a code; ``k_params``, ``v_params``: bits of a token and head besides its
    codes. ``boundary``: first layers, and last, that stay at 16 bits. Tokens are packed ``flush`` at a
    time."""

    codec: Codec
    k_bits: int
    v_bits: int
    k_params: int = 0
    v_params: int = 0
    sinks: int = 0
    window: int = 0
    flush: int = 1
    boundary: int = 0

    def packed(self, tokens: Tensor) -> Tensor:
        """The end of what is packed, of a cache that holds so many tokens."""
        return self.sinks + (tokens - self.window - self.sinks).clamp(min=0) // self.flush * self.flush

    def bits(self, tokens: int, num_layers: int, dim: int) -> float:
        """Per cached value, of sequences of ``tokens``."""
        share = max(0, int(self.packed(torch.tensor(tokens))) - self.sinks) / tokens
        coded = (self.k_bits + self.v_bits + (self.k_params + self.v_params) / dim) / 2
        share *= 1 - min(2 * self.boundary, num_layers) / num_layers
        return 16 * (1 - share) + coded * share

    def attention(self, num_layers: int) -> Callable[..., Any]:
        """As ``replaced_attention`` takes it. Of texts without padding, in one forward."""

        def attend(base: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
            index, exact = layer_index(module), base_attention(base, module)
            assert index is not None
            if not self.boundary <= index < num_layers - self.boundary:
                return exact(module, q, k, v, mask, **more)
            read = [self.codec(x.float(), index, side).to(x.dtype) for x, side in ((k, "k"), (v, "v"))]
            if self.window:
                read = [torch.cat([decoded, x], 2) for decoded, x in zip(read, (k, v), strict=True)]
                mask = self._mask(q.shape[2], q.device)
            return exact(module, q, *read, mask, **more)

        return attend

    @cache  # noqa: B019
    def _mask(self, tokens: int, device: torch.device) -> Tensor:
        """Bool [1, 1, T, 2 T]: whether a query reads a token's codes, and whether it reads the token
        itself."""
        at = torch.arange(tokens, device=device)
        is_coded = (at >= self.sinks) & (at < self.packed(at + 1)[:, None])
        return torch.cat([is_coded, ~is_coded & (at <= at[:, None])], 1)[None, None]


def affine(x: Tensor, bits: int) -> Tensor:
    """Minimum and scale of a token in fp16."""
    low, high, top = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), 2**bits - 1
    scale = ((high - low) / top).clamp(min=1e-8)
    codes = ((x - low) / scale + 0.5).floor().clamp(0, top)
    return codes * scale.half().float() + low.half().float()


def clipped(x: Tensor, side: Side) -> Tensor:
    """2 bits between a token's extremes, after its largest magnitudes are clipped."""
    limit = x.abs().sort(-1).values[..., int(CLIPPED[side] * x.shape[-1]), None]
    return affine(x.clamp(-limit, limit), 2)


def by_norm(x: Tensor, bits: int) -> Tensor:
    """Centers of equal bins, whose width is a multiple of the token's root mean square."""
    step = (GAUSSIAN_STEP[bits] * x.square().mean(-1, keepdim=True).sqrt()).half().float().clamp(min=1e-7)
    return step * ((x / step).floor().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5)


def hadamard(x: Tensor) -> Tensor:
    """H x, orthonormal and its own inverse."""
    return rotate(x, torch.ones(x.shape[-1], dtype=torch.int8, device=x.device))


@cache
def lloyd_max(bits: int) -> Tensor:
    """The levels of least squared error of a unit Gaussian, fp32 [2^bits]."""
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    levels = torch.linspace(-2.5, 2.5, 2**bits, dtype=torch.float64)
    for _ in range(2000):
        ends = torch.cat([torch.tensor([-9.0]), (levels[1:] + levels[:-1]) / 2, torch.tensor([9.0])]).double()
        density, below = normal.log_prob(ends).exp(), normal.cdf(ends)
        levels = -density.diff() / below.diff()
    return levels.float()


def int4(x: Tensor, layer: int, side: Side) -> Tensor:
    signs = random_signs(x.shape[-1], 0).to(x.device)
    turned = hadamard(x * signs)
    low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    zero = (-low / scale).round().clamp(0, 15)
    return hadamard(scale * ((turned / scale + zero).round().clamp(0, 15) - zero)) * signs


def turboquant(k_bits: int, v_bits: int) -> Codec:
    def codec(x: Tensor, layer: int, side: Side) -> Tensor:
        if side == "v":
            return affine(x, v_bits)
        norm, levels = x.norm(dim=-1, keepdim=True), lloyd_max(k_bits).to(x.device)
        turned = hadamard(x / norm.clamp(min=1e-8)) * math.sqrt(x.shape[-1])
        read = levels[torch.bucketize(turned.contiguous(), (levels[1:] + levels[:-1]) / 2)]
        return hadamard(read / read.norm(dim=-1, keepdim=True)) * norm.half().float()

    return codec


Bases = dict[tuple[int, Side], tuple[Tensor, Tensor]]


@torch.inference_mode()
def calibrated(loaded: LoadedModel) -> tuple[Bases, Bases]:
    """The transforms of oscar and of wush, and back: of rows, fp32 [N or 1, D, D] on the device."""
    recipe = load_recipe("default")
    spec = calibration_spec(recipe, loaded)
    data = sequences(replace(recipe.data, num_samples=spec.num_samples, seq_len=spec.seq_len), loaded)
    sums: dict[tuple[int, str], Tensor] = {}

    def add(layer: int, **found: Tensor) -> None:
        for name, value in found.items():
            sums[layer, name] = sums.get((layer, name), 0) + value.cpu()

    def measure(one: Captured) -> None:
        q_HTD, k_NTD, v_NTD = one.q_post_BHTD[0], one.k_post_BNTD[0].double(), one.v_BNTD[0].double()
        of_q = query_products(q_HTD, len(k_NTD), torch.arange(q_HTD.shape[1]))
        weight_NT1 = ((k_NTD @ of_q) * k_NTD).sum(-1, keepdim=True)  # oscar's, by this text's queries
        weighted = v_NTD * (weight_NT1 / weight_NT1.mean(1, keepdim=True)).sqrt()
        add(one.layer, q=of_q, k=k_NTD.mT @ k_NTD, v=v_NTD.mT @ v_NTD, weighted=weighted.mT @ weighted)

    def both_ways(transform: Tensor) -> tuple[Tensor, Tensor]:
        both = transform, torch.linalg.inv(transform)
        return tuple(x.mT.float().contiguous().to(loaded.model.device) for x in both)

    with tap(loaded.model, measure, loaded.geometry):
        for tokens_T in data.sequences:
            loaded.model(input_ids=tokens_T[None].to(loaded.model.device), use_cache=False)
    rotary, longest = rotary_maps(loaded.model, loaded.geometry), max(map(len, data.sequences))
    oscar, wush = Bases(), Bases()
    for layer, weights in output_weights(loaded.model, loaded.geometry).items():
        of_q, of_k = (over_context(sums[layer, x], rotary[layer], longest, loaded.max_context or longest) for x in "qk")
        of_out = output_products(weights, len(of_q)).double()
        for side, total in (("k", of_q), ("v", sums[layer, "weighted"])):
            oscar[layer, side] = both_ways(oscar_rotation(total.mean(0)))
        for side, metric, moment in (("k", of_q, of_k), ("v", of_out, sums[layer, "v"])):
            wush[layer, side] = both_ways(wush_transform(metric, moment))
    return oscar, wush


def oscar_rotation(covariance: Tensor) -> Tensor:
    """Eigenvectors, Hadamard, and a permutation: the bit-reversed order of eigenvalues."""
    values, vectors = torch.linalg.eigh(covariance)
    width, order = len(values).bit_length() - 1, torch.empty(len(values), dtype=torch.int64)
    order[[int(f"{i:0{width}b}"[::-1], 2) for i in range(len(values))]] = values.argsort(descending=True)
    return hadamard(vectors).double()[:, order].mT


def wush_transform(metric: Tensor, moment: Tensor) -> Tensor:
    """H Lambda^(-1/4) U' L', where L L' is the damped metric, and U Lambda U' the moment in it."""
    eye = torch.eye(metric.shape[-1], dtype=torch.float64)
    damped = [x + DAMPING * x.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye for x in (metric, moment)]
    root = torch.linalg.cholesky(damped[0])
    values, vectors = torch.linalg.eigh(root.mT @ damped[1] @ root)
    whitened = values.pow(-0.25)[:, :, None] * (vectors.mT @ root.mT)
    return hadamard(eye).double() @ (whitened / whitened.abs().mean((1, 2), keepdim=True))


def all_rivals(loaded: LoadedModel, names: list[str]) -> dict[str, Rival]:
    """Those of these names, or all without any; calibrated where one needs it."""
    fp8 = Rival(lambda x, layer, side: x.clamp(-448, 448).to(torch.float8_e4m3fn).float(), 8, 8)
    found = {"fp8": fp8, "int4": Rival(int4, 4, 4, 32, 32)}
    for name, k_bits, v_bits in (("tq-4", 4, 4), ("tq-k3v4", 3, 4), ("tq-3", 3, 3)):
        one = Rival(turboquant(k_bits, v_bits), k_bits, v_bits, 16, 32)
        found |= {name: replace(one, boundary=2), f"{name}-all": one}
    oscar, wush = calibrated(loaded) if not names or set(names) - set(found) else ({}, {})

    def within(bases: Bases, quantized: Callable[[Tensor, Side], Tensor]) -> Codec:
        return lambda x, layer, side: quantized(x @ bases[layer, side][0], side) @ bases[layer, side][1]

    for name, bases in (("oscar", oscar), ("wush", wush)):
        found[name] = Rival(within(bases, clipped), 2, 2, 32, 32, sinks=64, window=256, flush=8)
    for bits in GAUSSIAN_STEP:
        codec = within(wush, lambda x, side, bits=bits: by_norm(x, bits))
        found[f"wush-{bits}"] = Rival(codec, bits, bits, 16, 16, sinks=16, window=128, flush=16)
    if unknown := set(names) - set(found):
        raise SystemExit(f"unknown rivals {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    return {name: found[name] for name in names or found}


@torch.inference_mode()
def measure_rivals(loaded: LoadedModel, texts: list[real.Text], named: Mapping[str, Rival]) -> dict[str, list[Any]]:
    """Of every rival and text what real.measure_group notes of a plan, against 16 bits in one forward,
    too."""
    found: dict[str, list[Any]] = {name: [] for name in named}
    at_once, num_layers = max(1, AT_ONCE // texts[0].tokens_T.numel()), len(loaded.geometry.layers)
    for first in range(0, len(texts), at_once):
        some = texts[first : first + at_once]
        tokens_BT = torch.stack([text.tokens_T for text in some]).to(loaded.model.device)
        exact_BTV = loaded.model(input_ids=tokens_BT, use_cache=False).logits
        for name, rival in named.items():
            with replaced_attention(loaded.model, "rival_", rival.attention(num_layers)):
                read_BTV = loaded.model(input_ids=tokens_BT, use_cache=False).logits
            for text, exact_TV, read_TV in zip(some, exact_BTV, read_BTV, strict=True):
                top_T, right_T = read_TV.argmax(-1), torch.zeros(len(read_TV), dtype=torch.bool)
                right_T[1:] = top_T[:-1].cpu() == text.tokens_T[1:]
                counts_T = text.loss_mask_T.roll(-1).to(top_T.device)
                kl_n = kl_divergence(exact_TV[counts_T], read_TV[counts_T]) if text.kind else None
                same_n = (exact_TV.argmax(-1) == top_T)[counts_T]
                found[name].append(real.result(text, right_T, kl_n, same_n))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rivals", help="comma-separated; default: all")
    parser.add_argument("--long", action="store_true", help="also longer texts than --tokens: codes asked for")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest if any(one.startswith("--plans") for one in rest) else [*rest, "--plans", PLANS]
    given = real.arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    reporter, path = TerminalReporter(), given.out / "rivals.json"
    loaded = load_model(real.find_model(given.model), device=given.device, dtype=given.dtype)
    groups = real.texts_of(loaded, given)
    settings = real.settings_of(loaded, given, groups)
    found: dict[str, Any] = {"settings": settings, "name": given.name, "plans": {}, "measured": {}}
    for earlier in (given.out / "real.json", path):
        if earlier.exists():
            kept = json.loads(earlier.read_text())
            reporter.say(f"{earlier}: {'taken' if kept['settings'] == settings else 'of other settings, not taken'}")
            for key in ("plans", "measured") if kept["settings"] == settings else ():
                found[key] |= kept[key]
    found["machine"] = real.machine(loaded)
    named = all_rivals(loaded, own.rivals.split(",") if own.rivals else [])
    maker = real.Maker(loaded, given, found, reporter)
    shape = len(loaded.geometry.layers), loaded.geometry.layers[0].k_head_dim
    for name, rival in named.items():
        bits = {str(n): rival.bits(n, *shape) for n in (given.tokens, *given.retrieval)}
        found["plans"][name] = {"bits": rival.bits(real.PRICED.context, *shape), "bits_measured": bits}

    def save() -> None:
        write_text_atomic(path, json.dumps(found, indent=1) + "\n")

    with reporter.running():
        for label, texts in groups:
            if texts[0].tokens_T.numel() > given.tokens and not own.long:
                continue
            real.measure_group(loaded, label, texts, maker, found["measured"], save)
            new = {name: rival for name, rival in named.items() if label not in found["measured"].get(name, {})}
            for name, noted in measure_rivals(loaded, texts, new).items():
                found["measured"].setdefault(name, {})[label] = noted
            reporter.say(f"{len(new)} rivals: {label}, {len(texts)} texts")
            save()
    real.print_results(found)
    real.draw(found, given.out / "rivals.png")


if __name__ == "__main__":
    main()
