"""KL divergence of plans from the 16-bit cache, measured decode-faithfully: through the packed cache itself.

A sequence is fed in chunks that end where the next page is written. Every token then reads exactly what it
would read in decoding one token at a time: old tokens back from packed pages, recent ones unquantized. (A
single forward would attend to exact keys and values, and measure nothing.)

Several caches are fed in lockstep, chunk by chunk, so that their predictions can be compared without ever
holding the logits of more than one chunk: with a large vocabulary the logits of a sequence are larger than
its cache. Plans that store their first layers alike, as each other or as the reference, run these layers
once: a plan begins at its first layer that differs, with the hidden states that the other brought there
(``kvcal.models.forwards``). Shapes are those of a whole forward, so that the logits are the same bits. Hidden
states are held for one chunk, on the device. Of a streamed model the caches' forwards of a chunk run side by
side, so that a layer is loaded once for all of them (``kvcal.models.forwards``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, repeat, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from kvcal.cache.plan_cache import PlanCache
from kvcal.data.sequences import TokenDataset
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
from kvcal.models.attention import with_cache
from kvcal.models.forwards import Forward, LayerInputs, kept_inputs, side_by_side
from kvcal.models.load import LoadedModel
from kvcal.models.streamed import is_streamed
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import layout_tensors
from kvcal.progress import SILENT, Reporter
from kvcal.recipe import CacheSpec
from kvcal.stages.calibration import few_logits
from kvcal.stages.checkpoint import parameter_bytes, require_smaller
from kvcal.stages.measuring.cache import DenseCache, looking_ahead
from kvcal.stages.measuring.dense_layer import UnreadPages

# Tokens fed at once where no page ends sooner: bounds the logits and the attention's scratch.
MAX_CHUNK_TOKENS = 256
# Plans compared at once, counted by the layers that they run: so many caches are held, and one more for the
# reference.
LOCKSTEP = 12
# Texts fed at once: 1.5 times faster than one by one on a CPU; a GPU takes 32 short ones in the time of one.
KL_BATCH = {"cpu": 4, "cuda": 32}
# At 16 bits, of the reference and a plan and what attention makes of one; and the share of a device's memory
# that these and the weights take.
LEAST_CACHES, MEMORY_SHARE = 4, 0.85
# Logits compared at once: 1 MiB a tensor on a CPU, 32 MiB on a GPU.
MAX_COMPARED = {"cpu": 1 << 18, "cuda": 1 << 23}
# Of exp in fp32, with room for the sum over a vocabulary.
LARGEST_EXPONENT = 60.0


def texts_at_once(loaded: LoadedModel, num_tokens: int) -> int:
    """Texts of at most ``num_tokens`` that are fed at once: ``KL_BATCH``, and on a GPU no more than leave
    room for ``LEAST_CACHES`` at 16 bits next to the weights. Never by what is free: bytes of a profile depend
    on it."""
    device = loaded.model.device
    most = KL_BATCH.get(device.type, 4)
    if device.type != "cuda":
        return most
    room = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory - parameter_bytes(loaded.model)
    if loaded.residence is not None:
        room = MEMORY_SHARE * loaded.residence.working
    attention = (layer for layer in loaded.geometry.layers if isinstance(layer, AttentionGeometry))
    cache = num_tokens * loaded.model.dtype.itemsize * sum(layer.values_per_token for layer in attention)
    return max(1, min(most, int(room / (LEAST_CACHES * cache))))


def unquantized_plan(model: ModelIdentity, geometry: Geometry) -> Plan:
    """The 16-bit reference: what the model caches by itself, in the cache's dtype."""
    return Plan(model, geometry.cache_dtype, bare_layers(geometry), Workload(1, 1), {})


def one_side_plan(reference: Plan, index: int, side: Side, fmt: Format) -> Plan:
    """``reference`` with the keys or the values of the layer of cache index ``index`` alone in ``fmt``."""
    layers = list(reference.layers)
    for position, layer in enumerate(layers):
        if layer.geometry.index == index:
            layers[position] = replace(layer, k=fmt) if side == "k" else replace(layer, v=fmt)
    return replace(reference, layers=tuple(layers), tensors=layout_tensors(layers))


def feed(model: PreTrainedModel, cache: PlanCache, tokens_BT: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(start, logits [B, t, V] of tokens [start, start + t)) chunk by chunk, in the model's dtype. See
    lockstep."""
    return ((start, logits_BTV) for _, start, logits_BTV in lockstep(model, [cache], tokens_BT))


def lockstep(
    model: PreTrainedModel,
    caches: Sequence[PlanCache],
    tokens_BT: Tensor,
    first_B: Tensor | None = None,
    wanted_M: Tensor | None = None,
) -> Generator[tuple[int, int, Tensor]]:
    """Feed the same tokens to each of ``caches`` (empty ones): (number of the cache, start, logits [B, t,
    V]), for every chunk, for every cache in order. No gradients. ``first_B``: the position of each sequence's
    first token, int64; without it, 0. ``wanted_M``: the columns whose logits are made, rising; without it, all.

    Sequences of different lengths may be padded on the right: a page that holds padding is written after the
    last real token, so that real tokens see and group real tokens only.
    """
    tokens_BT = tokens_BT.to(model.device)
    begins = _begins([cache.plan for cache in caches])
    start, length, numbers = 0, tokens_BT.shape[1], range(len(caches))
    is_shared = set(begins) != {WHOLE}
    with (
        looking_ahead(model, caches),
        kept_inputs(model) if is_shared else nullcontext(LayerInputs(can_begin_later=False)) as inputs,
    ):
        while start < length:
            free = min(cache.tokens_to_next_page() for cache in caches)
            stop = min(length, start + max(1, min(free, MAX_CHUNK_TOKENS)))
            given = {"input_ids": tokens_BT[:, start:stop]}
            if first_B is not None:
                given["position_ids"] = (first_B[:, None] + torch.arange(start, stop)).to(model.device)
            if wanted_M is not None:
                given["logits_to_keep"] = wanted_M[(wanted_M >= start) & (wanted_M < stop)].to(model.device) - start
            forwards = [Forward(wanted={later.layer for later in begins if later.parent == n}) for n in numbers]
            # The first forward of all shows whether others may begin later.
            for together in (numbers[:1], numbers[1:]) if is_shared and not start else (numbers,):
                for number in together if inputs.can_begin_later else ():
                    forwards[number].begin(begins[number].layer, forwards[begins[number].parent])
                calls = [partial(_fed, model, caches[n], inputs, forwards[n], given) for n in together]
                logits = side_by_side(calls, model.device) if is_streamed(model) else (call() for call in calls)
                yield from zip(together, repeat(start), logits, strict=False)
            start = stop


def _fed(
    model: PreTrainedModel, cache: PlanCache, inputs: LayerInputs, forward: Forward, given: dict[str, Tensor]
) -> Tensor:
    inputs.forward, wanted = forward, given
    if not few_logits(model):
        given = {name: value for name, value in given.items() if name != "logits_to_keep"}
    with torch.no_grad():
        logits_BTV = model(**given, use_cache=True, **with_cache(model, cache)).logits
    if wanted is not given:
        logits_BTV = logits_BTV[:, wanted.get("logits_to_keep", slice(None))]
    if forward.first:
        assert isinstance(cache, DenseCache)
        cache.skip(forward.first, *given["input_ids"].shape)
    return logits_BTV


class Begin(NamedTuple):
    """The layer at which a cache's forward begins, and the number of the cache whose hidden states it
    takes."""

    layer: int
    parent: int


WHOLE = Begin(0, -1)


def _begins(plans: Sequence[Plan]) -> list[Begin]:
    """Of each plan: as late as an earlier plan allows."""
    begins = []
    for number, plan in enumerate(plans):
        found = (Begin(first_difference(plans[parent], plan), parent) for parent in range(number))
        latest = max(found, key=lambda begin: begin.layer, default=WHOLE)
        begins.append(latest if latest.layer else WHOLE)
    return begins


def first_difference(one: Plan, other: Plan) -> int:
    """The cache index of the first layer that ``other`` stores in another way than ``one``, or that its later
    layers are predicted from; of the last layer where there is none."""
    if one.cache_dtype != other.cache_dtype:
        return 0
    pairs = zip(one.layers, other.layers, strict=True)
    differing = (b.geometry.index for a, b in pairs if a != b or _tensors_of(one, a) != _tensors_of(other, b))
    first = next(differing, other.layers[-1].geometry.index)
    sources = [
        (layer.geometry.index, source)
        for layer in other.layers
        for side in SIDES
        for source, _ in layer.sources(side)
        if source != layer.geometry.index
    ]
    while earlier := [source for index, source in sources if source < first <= index]:
        first = min(earlier)
    return first


def _tensors_of(plan: Plan, layer: LayerPlan) -> dict[str, int]:
    """Identities of a layer's tensors, by name."""
    prefix = f"layers.{layer.geometry.index}."
    return {name: id(tensor) for name, tensor in plan.tensors.items() if name.startswith(prefix)}


class Deviations(NamedTuple):
    """Of P plans at n loss tokens, on the CPU. ``kl_Pn``: KL(reference || plan) of the next-token
    distributions, fp64, nats; ``flips_Pn``: whether the most likely token is another than at 16 bits;
    ``sequence_n``: which sequence of the batch the token is in."""

    kl_Pn: Tensor
    flips_Pn: Tensor
    sequence_n: Tensor

    def kl_of_sequences(self, num_sequences: int) -> Tensor:
        """The mean KL of each sequence, [P, B] fp64; 0 where it has no loss token."""
        count_B = self.sequence_n.bincount(minlength=num_sequences)
        total_PB = self.kl_Pn.new_zeros(len(self.kl_Pn), num_sequences).index_add_(1, self.sequence_n, self.kl_Pn)
        return total_PB / count_B.clamp_min(1)


class Room:
    """Plans that are fed at once: as many as hold ``most`` whole caches, not counting layers that are not
    run. Halved for good, and ``reporter`` told, when the device runs out of memory."""

    def __init__(self, most: float, reporter: Reporter = SILENT) -> None:
        self.most, self._reporter = most, reporter

    def groups(self, reference: Plan, plans: Sequence[Plan], feed_group: Callable[[Sequence[Plan]], None]) -> None:
        """Feed all plans in groups; one that does not fit into memory is fed again, in halves."""
        shares = [cache_share(reference, plan) for plan in plans]
        first = 0
        while first < len(plans):
            stop = first + max(1, bisect_right(list(accumulate(shares[first:])), self.most))
            try:
                feed_group(plans[first:stop])
                first = stop
                continue
            except torch.OutOfMemoryError:  # whose traceback holds the group's tensors until here
                pass
            self.most = sum(shares[first:stop]) / 2
            require_smaller((stop - first) // 2, "one plan's cache of these texts")
            self._reporter.say(f"out of memory, goes on with {self.most:.3g} caches at once")


def cache_share(reference: Plan, plan: Plan) -> float:
    """The share of its layers that a plan fed next to the reference runs, and holds a cache of."""
    return 1 - first_difference(reference, plan) / (1 + plan.layers[-1].geometry.index)


def deviations(
    model: PreTrainedModel,
    reference: Plan,
    plans: Sequence[Plan],
    tokens_BT: Tensor,
    loss_mask_BT: Tensor,
    room: Room | None = None,
    first_B: Tensor | None = None,
    is_flip_wanted: bool = True,
) -> Deviations:
    """Changes by P plans at the n loss tokens (bool loss_mask_BT, False at position 0), sequence by sequence.
    Sequences may be padded on the right, where there are no loss tokens. ``room``: of earlier calls, which it
    limits. ``first_B``: as for ``lockstep``. ``is_flip_wanted``: or flips are all False."""
    scored_BT = loss_mask_BT.roll(-1, dims=1).cpu()  # the position before each loss token; 0 is never one
    wanted_M = scored_BT.any(0).nonzero().squeeze(1)
    scored_BM = scored_BT[:, wanted_M]
    columns: list[list[Tensor]] = []

    def feed_group(group: Sequence[Plan]) -> None:
        unread = UnreadPages()
        caches = [DenseCache(plan, model.config, unread) for plan in (reference, *group)]
        chunks: list[list[tuple[Tensor, ...]]] = [[] for _ in group]
        with closing(lockstep(model, caches, tokens_BT, first_B, wanted_M)) as fed:
            for number, start, logits_BmV in fed:
                first = int(torch.searchsorted(wanted_M, start))
                scored_Bm = scored_BM[:, first : first + logits_BmV.shape[1]]
                is_all, sequence_n = bool(scored_Bm.all()), scored_Bm.nonzero()[:, 0]
                logits_nV = logits_BmV.flatten(0, 1) if is_all else logits_BmV[scored_Bm.to(logits_BmV.device)]
                top_n = logits_nV.argmax(-1) if is_flip_wanted else sequence_n
                if number == 0:
                    reference_nV, reference_n = logits_nV, top_n
                else:
                    kl_n = kl_divergence(reference_nV, logits_nV)
                    chunks[number - 1].append((kl_n, top_n != reference_n, sequence_n))
        for plan in chunks:  # plans whose pages end elsewhere are fed in other chunks: in the order of the sequences
            parts = [torch.cat(parts).cpu() for parts in zip(*plan, strict=True)]
            order_n = parts[-1].argsort(stable=True)
            columns.append([part_n[order_n] for part_n in parts])

    (room or Room(LOCKSTEP)).groups(reference, plans, feed_group)
    if not plans:
        none = torch.empty(0, int(scored_BT.sum()), dtype=torch.float64)
        return Deviations(none, none.bool(), none.new_zeros(none.shape[1]).long())
    kl_Pn, flips_Pn = (torch.stack([of_plan[part] for of_plan in columns]) for part in (0, 1))
    if not torch.isfinite(kl_Pn).all():
        plan = int((~torch.isfinite(kl_Pn)).any(1).nonzero()[0])
        raise NonFiniteActivations(f"logits are not finite through the cache of plan {plan}, or at 16 bits")
    return Deviations(kl_Pn, flips_Pn, columns[0][2])


def kl_divergence(reference_nV: Tensor, logits_nV: Tensor) -> Tensor:
    """KL in nats of the distributions of two logits, row by row, [n] fp64.

    With p the reference's probabilities and d the centred differences of logits, KL = log(1 + E_p[exp(d) -
    1]) - E_p[d]. That holds to fp32's precision for nearly equal distributions, whose log-probabilities in
    fp32 differ by less than their rounding. Rows with a term beyond fp32, as of a destroyed model, are taken
    in fp64.
    """
    rows = max(1, MAX_COMPARED[reference_nV.device.type] // reference_nV.shape[-1])
    parts = [reference_nV.new_empty(0, dtype=torch.float64)]
    for p_nV, q_nV in zip(reference_nV.split(rows), logits_nV.split(rows), strict=True):
        probability_nV = p_nV.float().softmax(-1)
        d_nV = q_nV.float() - p_nV.float()
        d_nV -= (probability_nV * d_nV).sum(-1, keepdim=True)
        is_small_n = d_nV.amax(-1) < LARGEST_EXPONENT
        mean_n = (probability_nV * d_nV).sum(-1).double()
        excess_n = d_nV.expm1().sub_(d_nV).mul_(probability_nV).sum(-1).double()
        kl_n = ((mean_n + excess_n).log1p() - mean_n).clamp(min=0.0)
        if not bool(is_small_n.all()):
            log_p, log_q = p_nV.double().log_softmax(-1), q_nV.double().log_softmax(-1)
            kl_n = torch.where(is_small_n, kl_n, (log_p.exp() * (log_p - log_q)).sum(-1))
        parts.append(kl_n)
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Text:
    """A calibration sequence for the KL, cut; ``sample`` is its number in the data, ``kind`` its kind of
    text."""

    sample: int
    tokens_T: Tensor
    loss_mask_T: Tensor
    kind: str = ""


def kl_texts(data: TokenDataset, num_samples: int, num_tokens: int, cache: CacheSpec) -> list[Text]:
    """As :func:`paged_texts`; UsageError if there is none."""
    texts = paged_texts(data, num_samples, num_tokens, cache)
    if num_samples and not texts:
        raise UsageError(
            f"none of {len(data.sequences)} sequences has a loss token after token {cache.first_from_page} and within "
            f"kl_tokens = {num_tokens}: nothing would be read from a quantized page, and every KL would be 0",
            hint="give longer sequences, or set kl_samples = 0 to profile without KL",
        )
    return texts


def paged_texts(data: TokenDataset, num_samples: int, num_tokens: int, cache: CacheSpec) -> list[Text]:
    """The first ``num_samples`` sequences, cut at ``num_tokens``, in which some loss token is predicted from
    a quantized page, the kinds of text in turn: any first few are of all kinds."""
    by_kind: dict[str, list[Text]] = {}
    for sample, (tokens, mask, kind) in enumerate(zip(data.sequences, data.loss_masks, data.kinds, strict=True)):
        text = Text(sample, tokens[:num_tokens], mask[:num_tokens], kind)
        if bool(text.loss_mask_T[cache.first_from_page :].any()):
            by_kind.setdefault(text.kind, []).append(text)
    return [text for turn in zip_longest(*by_kind.values()) for text in turn if text is not None][:num_samples]


def padded_texts(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """tokens [B, T] int64 and loss masks [B, T] bool, padded on the right."""
    tokens_BT = pad_sequence([text.tokens_T for text in texts], batch_first=True)
    return tokens_BT, pad_sequence([text.loss_mask_T for text in texts], batch_first=True)
