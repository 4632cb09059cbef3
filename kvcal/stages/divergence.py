"""What quantization does to a model's predictions, measured decode-faithfully: through the packed cache itself.

A sequence is fed in chunks that end where the next page is written. Every token then reads exactly what it would
read in decoding one token at a time: old tokens back from packed pages, recent ones unquantized. (A single forward
would attend to exact keys and values, and measure nothing.)

Several caches are fed in lockstep, chunk by chunk, so that their predictions can be compared without ever holding
the logits of more than one chunk: with a large vocabulary the logits of a sequence are larger than its cache. The
16-bit reference is fed anew for every group of ``LOCKSTEP`` plans, which costs 1 / LOCKSTEP more time, and needs
neither a limit nor a second way for models whose log-probabilities would not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcal.errors import NonFiniteActivations
from kvcal.geometry import Geometry, ModelIdentity
from kvcal.plan import Format, LayerPlan, Plan, Side, Workload, bare_layers
from kvcal.runtime.cache import PlanCache
from kvcal.runtime.queries import serving

# Tokens fed at once where no page ends sooner: bounds the logits and the attention's scratch.
MAX_CHUNK_TOKENS = 256
# Plans compared at once: as many caches of one sequence are held, and one more for the reference.
LOCKSTEP = 12
# Logits compared at once: bounds the fp64 scratch to 64 MiB a tensor.
MAX_COMPARED = 1 << 23


def unquantized_plan(model: ModelIdentity, geometry: Geometry) -> Plan:
    """The 16-bit reference: what the model caches by itself, in the cache's dtype."""
    layers = bare_layers(geometry)
    return Plan(model, geometry.cache_dtype, layers, Workload(1, 1), {})


def one_side_plan(reference: Plan, index: int, side: Side, fmt: Format) -> Plan:
    """``reference`` with the keys or the values of the layer of cache index ``index`` alone in ``fmt``."""
    layers = tuple(
        LayerPlan(layer.geometry, (fmt,), layer.v)
        if layer.geometry.index == index and side == "k"
        else LayerPlan(layer.geometry, layer.k, (fmt,))
        if layer.geometry.index == index
        else layer
        for layer in reference.layers
    )
    return Plan(reference.model, reference.cache_dtype, layers, reference.workload, reference.provenance)


def feed(model: PreTrainedModel, cache: PlanCache, tokens_BT: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(start, logits [B, t, V] of tokens [start, start + t)) chunk by chunk, in the model's dtype. See lockstep."""
    return ((start, logits_BTV) for _, start, logits_BTV in lockstep(model, [cache], tokens_BT))


def lockstep(
    model: PreTrainedModel, caches: Sequence[PlanCache], tokens_BT: Tensor
) -> Iterator[tuple[int, int, Tensor]]:
    """Feed the same tokens to each of ``caches`` (empty ones): (number of the cache, start, logits [B, t, V]), for
    every chunk, for every cache in order. No gradients.

    Sequences of different lengths may be padded on the right: a page that holds padding is written after the last
    real token, so that real tokens see and group real tokens only.
    """
    tokens_BT = tokens_BT.to(model.device)
    start, length = 0, tokens_BT.shape[1]
    with serving(model, *(cache.plan for cache in caches)):
        while start < length:
            free = min(cache.tokens_to_next_page() for cache in caches)
            stop = min(length, start + max(1, min(free, MAX_CHUNK_TOKENS)))
            for number, cache in enumerate(caches):
                with torch.no_grad():
                    logits_BTV = model(input_ids=tokens_BT[:, start:stop], past_key_values=cache, use_cache=True).logits
                yield number, start, logits_BTV
            start = stop


def divergences(
    model: PreTrainedModel,
    reference: Plan,
    plans: Sequence[Plan],
    tokens_BT: Tensor,
    loss_mask_BT: Tensor,
) -> Tensor:
    """KL(reference || plan) in nats of the next-token distributions, [P, n] fp64 on the CPU: a row for each plan, a
    column for each of the n loss tokens (bool loss_mask_BT, False at position 0), by chunk, sequence and position.
    Sequences may be padded on the right, where there are no loss tokens.

    Raises:
        NonFiniteActivations: a plan's or the reference's logits are not finite.
    """
    predicting_BT = loss_mask_BT.roll(-1, dims=1)  # the position before each loss token; 0 is never one
    found: list[list[Tensor]] = [[] for _ in plans]
    for first in range(0, len(plans), LOCKSTEP):
        group = plans[first : first + LOCKSTEP]
        caches = [PlanCache(plan, model.config) for plan in (reference, *group)]
        for number, start, logits_BTV in lockstep(model, caches, tokens_BT):
            wanted = predicting_BT[:, start : start + logits_BTV.shape[1]]
            logits_nV = logits_BTV[wanted.to(logits_BTV.device)]
            if number == 0:
                reference_nV = logits_nV
            else:
                found[first + number - 1].append(kl_divergence(reference_nV, logits_nV).cpu())
    if not plans:
        return torch.empty(0, int(predicting_BT.sum()), dtype=torch.float64)
    result_Pn = torch.stack([torch.cat(chunks) for chunks in found])
    if not torch.isfinite(result_Pn).all():
        plan = int((~torch.isfinite(result_Pn)).any(1).nonzero()[0])
        raise NonFiniteActivations(f"logits are not finite through the cache of plan {plan}, or at 16 bits")
    return result_Pn


def kl_divergence(reference_nV: Tensor, logits_nV: Tensor) -> Tensor:
    """KL in nats of the distributions of two logits, row by row, [n] fp64: at 4 bits it is near the rounding of
    fp32 log-probabilities."""
    rows = max(1, MAX_COMPARED // reference_nV.shape[-1])
    parts = [reference_nV.new_empty(0, dtype=torch.float64)]
    for expected, found in zip(reference_nV.split(rows), logits_nV.split(rows), strict=True):
        log_p, log_q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
        parts.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(parts)
