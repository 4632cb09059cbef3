"""KL divergence of plans from the 16-bit cache, measured decode-faithfully: through the packed cache itself.

A sequence is fed in chunks that end where the next page is written. Every token then reads exactly what it would
read in decoding one token at a time: old tokens back from packed pages, recent ones unquantized. (A single forward
would attend to exact keys and values, and measure nothing.)

Several caches are fed in lockstep, chunk by chunk, so that their predictions can be compared without ever holding
the logits of more than one chunk: with a large vocabulary the logits of a sequence are larger than its cache. The
16-bit reference is fed anew for every group of ``LOCKSTEP`` plans, which costs 1 / LOCKSTEP more time, and needs
neither a limit nor a second way for models whose log-probabilities would not fit.

``divergences`` is one measurement, ``kl_texts`` are the texts of one, and ``KLMeter`` makes many: each plan once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from kvcal.artifact import sha256_json, tensors_sha256
from kvcal.cache.attached import attached_for
from kvcal.cache.plan_cache import PlanCache
from kvcal.data.sequences import TokenDataset
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.geometry import Geometry, ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.plan.layer import bare_layers
from kvcal.plan.page_format import Format, Side
from kvcal.plan.plan import Plan, Workload, plan_record
from kvcal.progress import Reporter
from kvcal.recipe import CacheSpec
from kvcal.stages.checkpoint import Checkpoint, Mean, State, Statistic

# Tokens fed at once where no page ends sooner: bounds the logits and the attention's scratch.
MAX_CHUNK_TOKENS = 256
# Plans compared at once: as many caches of one sequence are held, and one more for the reference.
LOCKSTEP = 12
# Logits compared at once: bounds the fp64 scratch to 64 MiB a tensor.
MAX_COMPARED = 1 << 23


def unquantized_plan(model: ModelIdentity, geometry: Geometry) -> Plan:
    """The 16-bit reference: what the model caches by itself, in the cache's dtype."""
    return Plan(model, geometry.cache_dtype, bare_layers(geometry), Workload(1, 1), {})


def one_side_plan(reference: Plan, index: int, side: Side, fmt: Format) -> Plan:
    """``reference`` with the keys or the values of the layer of cache index ``index`` alone in ``fmt``."""
    layers = list(reference.layers)
    for position, layer in enumerate(layers):
        if layer.geometry.index == index:
            layers[position] = replace(layer, k=(fmt,)) if side == "k" else replace(layer, v=(fmt,))
    return replace(reference, layers=tuple(layers))


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
    with attached_for(model, *(cache.plan for cache in caches)):
        while start < length:
            free = min(cache.tokens_to_next_page() for cache in caches)
            stop = min(length, start + max(1, min(free, MAX_CHUNK_TOKENS)))
            for number, cache in enumerate(caches):
                with torch.no_grad():
                    logits_BTV = model(input_ids=tokens_BT[:, start:stop], past_key_values=cache, use_cache=True).logits
                yield number, start, logits_BTV
            start = stop


def divergences(
    model: PreTrainedModel, reference: Plan, plans: Sequence[Plan], tokens_BT: Tensor, loss_mask_BT: Tensor
) -> Tensor:
    """KL(reference || plan) in nats of the next-token distributions, [P, n] fp64 on the CPU: a row for each plan, a
    column for each of the n loss tokens (bool loss_mask_BT, False at position 0), by chunk, sequence and position.
    Sequences may be padded on the right, where there are no loss tokens.

    Raises:
        NonFiniteActivations: a plan's or the reference's logits are not finite.
    """
    predicting_BT = loss_mask_BT.roll(-1, dims=1)  # the position before each loss token; 0 is never one
    if not plans:
        return torch.empty(0, int(predicting_BT.sum()), dtype=torch.float64)
    chunks: list[list[Tensor]] = [[] for _ in plans]
    for first in range(0, len(plans), LOCKSTEP):
        caches = [PlanCache(plan, model.config) for plan in (reference, *plans[first : first + LOCKSTEP])]
        for number, start, logits_BTV in lockstep(model, caches, tokens_BT):
            is_predicting = predicting_BT[:, start : start + logits_BTV.shape[1]]
            logits_nV = logits_BTV[is_predicting.to(logits_BTV.device)]
            if number == 0:
                reference_nV = logits_nV
            else:
                chunks[first + number - 1].append(kl_divergence(reference_nV, logits_nV).cpu())
    kl_Pn = torch.stack([torch.cat(parts) for parts in chunks])
    if not torch.isfinite(kl_Pn).all():
        plan = int((~torch.isfinite(kl_Pn)).any(1).nonzero()[0])
        raise NonFiniteActivations(f"logits are not finite through the cache of plan {plan}, or at 16 bits")
    return kl_Pn


def kl_divergence(reference_nV: Tensor, logits_nV: Tensor) -> Tensor:
    """KL in nats of the distributions of two logits, row by row, [n] fp64: at 4 bits it is near the rounding of
    fp32 log-probabilities."""
    rows = max(1, MAX_COMPARED // reference_nV.shape[-1])
    parts = [reference_nV.new_empty(0, dtype=torch.float64)]
    for p_nV, q_nV in zip(reference_nV.split(rows), logits_nV.split(rows), strict=True):
        log_p, log_q = p_nV.double().log_softmax(-1), q_nV.double().log_softmax(-1)
        parts.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Text:
    """A calibration sequence for the KL, cut; ``sample`` is its number in the data, ``kind`` its kind of text."""

    sample: int
    tokens_T: Tensor
    loss_mask_T: Tensor
    kind: str = ""


def kl_texts(data: TokenDataset, num_samples: int, num_tokens: int, cache: CacheSpec) -> list[Text]:
    """The first ``num_samples`` sequences, cut at ``num_tokens``, in which some loss token is predicted from a
    quantized page. UsageError if there is none."""
    if num_samples == 0:
        return []
    first = cache.first_from_page
    sequences = enumerate(zip(data.sequences, data.loss_masks, data.kinds, strict=True))
    cut = [Text(i, tokens[:num_tokens], mask[:num_tokens], kind) for i, (tokens, mask, kind) in sequences]
    texts = [text for text in cut if bool(text.loss_mask_T[first:].any())][:num_samples]
    if not texts:
        raise UsageError(
            f"none of {len(cut)} sequences has a loss token behind token {first} and within kl_tokens = "
            f"{num_tokens}: nothing would be read from a quantized page, and every KL would be 0",
            hint="give longer sequences, or set kl_samples = 0 to profile without KL",
        )
    return texts


def padded_texts(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """tokens [B, T] int64 and loss masks [B, T] bool, padded on the right."""
    tokens_BT = pad_sequence([text.tokens_T for text in texts], batch_first=True)
    return tokens_BT, pad_sequence([text.loss_mask_T for text in texts], batch_first=True)


PHASE = "groups of plans"


def declare_kls(done: Mapping[str, int], names: Collection[str]) -> dict[str, Statistic]:
    """The content of the meter's checkpoint: a mean for each plan, named by the plan's sha256."""
    for name in names:
        if not re.fullmatch("[0-9a-f]{64}", name):
            raise ValueError(f"{name[:80]!r} is no plan's sha256")
    if bool(names) != bool(done[PHASE]):
        raise ValueError(f"{len(names)} plans after {done[PHASE]} {PHASE}")
    return {name: Statistic.of((), low=0.0) for name in names}


class KLMeter:
    """Mean KL in nats per loss token of many plans, kept in a checkpoint: an interrupted search measures none twice.
    Plans are told apart by their layers and the content of their tensors, so that a plan that comes again costs
    nothing. A tensor is hashed once, however many plans share it."""

    def __init__(
        self, loaded: LoadedModel, texts: Sequence[Text], batch: int, checkpoint: Checkpoint, reporter: Reporter
    ) -> None:
        """``batch``: texts fed at once."""
        self._model = loaded.model
        self._batches = [padded_texts(texts[first : first + batch]) for first in range(0, len(texts), batch)]
        self._reference = unquantized_plan(loaded.identity, loaded.geometry)
        self._checkpoint = checkpoint
        self._reporter = reporter
        self._hashed: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()

    def kl(self, plans: Sequence[Plan], what: str) -> list[float]:
        """One for each plan; ``what`` is being measured, for the progress.

        Raises:
            NonFiniteActivations: with a plan, or at 16 bits.
        """
        digests = [self._digest(plan) for plan in plans]
        first_of = {digest: plan for digest, plan in zip(reversed(digests), reversed(plans), strict=True)}
        missing = [digest for digest in dict.fromkeys(digests) if digest not in self._checkpoint.state.means]
        for first in range(0, len(missing), LOCKSTEP):
            self._reporter(first, len(missing), f"search: {what}")
            group = missing[first : first + LOCKSTEP]
            self._measure(group, [first_of[digest] for digest in group])
        self._reporter(len(missing), len(missing), f"search: {what}")
        return [float(self._checkpoint.state.means[digest].result()) for digest in digests]

    def _digest(self, plan: Plan) -> str:
        """Hex sha256 of all that the plan does."""
        for tensor in plan.tensors.values():
            if tensor not in self._hashed:
                self._hashed[tensor] = tensors_sha256({"": tensor})
        tensors = {name: self._hashed[tensor] for name, tensor in plan.tensors.items()}
        return sha256_json({**plan_record(plan), "provenance": {}, "tensors": tensors})

    def _measure(self, digests: Sequence[str], plans: Sequence[Plan]) -> None:
        try:
            parts = [divergences(self._model, self._reference, plans, *batch) for batch in self._batches]
        except NonFiniteActivations as error:
            names = ", ".join(digest[:8] for digest in digests)
            raise NonFiniteActivations(f"search, plans {names}: {error.message}", error.hint) from error
        kl_Pn = torch.cat(parts, dim=1)
        state = self._checkpoint.state
        means = {digest: Mean.empty(()).update(row) for digest, row in zip(digests, kl_Pn, strict=True)}
        done = {**state.done, PHASE: state.done[PHASE] + 1}
        self._checkpoint.advance(State({**state.means, **means}, done))
