"""Acceptance of drafts by a model whose cache is packed: what speculative decoding loses to a plan.

After every ``EVERY``-th token of a text a draft proposes ``NUM_DRAFTS`` tokens, one after the other, each the
most likely one. It reads the text at 16 bits, as a draft does in an engine. The model takes a token where it
is its own most likely one, too, after the text and the tokens before it, up to the first that is not
(speculative decoding, arXiv 2211.17192, with greedy choices):

    acceptance = accepted tokens / proposed tokens

What is proposed does not depend on the plan. So plans and 16 bits are compared at the same prefixes, and the
change from 16 bits has the standard error of paired differences over sequences. The model reads what it would
read in decoding (``divergence.feed``); rejected tokens are taken back from its cache.

A draft is another model with the same tokens, or the model's own first layers, then its norm and head
(LayerSkip, arXiv 2404.16710). A model that was not trained to exit early drafts poorly so. All of its layers
are a draft of which 16 bits accept everything: no draft that is as good as the model loses more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvcal.data.sequences import TokenDataset
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.folder import tokenizer_of
from kvcal.models.attention import with_cache
from kvcal.models.load import LoadedModel, load
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.stages.divergence import feed, unquantized_plan
from kvcal.stages.evaluate.text import TextBatch, ratio_and_error, text_batches
from kvcal.stages.measuring.cache import DecodedCache
from kvcal.strict import STRICT, Amount, Count, Number, Share

NUM_DRAFTS = 4
EVERY = 24  # tokens: pages are filled by any multiple of 8
OWN_LAYERS = "layers:"


@pydantic_dataclass(frozen=True, config=STRICT)
class DraftQuality:
    """``accepted``: the share of proposed tokens; ``change``: from 16 bits at the same prefixes;
    ``by_place``: the share of proposals whose first 1, 2, … tokens are all accepted. ``*_se`` are standard
    errors over sequences, None for a single sequence."""

    accepted: Share
    accepted_se: Amount | None
    change: Number
    change_se: Amount | None
    by_place: tuple[Share, ...]
    num_prefixes: Count


@dataclass(frozen=True, eq=False)
class Proposed:
    """Of a batch of texts: after the first ``places[i]`` tokens, ``tokens_PBk[i]``, int64. ``counts_PB``:
    where the next token is one of the loss."""

    text: TextBatch
    places: range
    tokens_PBk: Tensor
    counts_PB: Tensor


@dataclass(frozen=True, eq=False)
class Drafts:
    """All that a draft proposes, and what 16 bits accept of it: fp64 [sequences, drafts], prefixes whose
    first 1, 2, … tokens are all accepted."""

    proposed: Sequence[Proposed]
    prefixes_N: Tensor
    accepted_Nk: Tensor


@torch.inference_mode()
def propose(loaded: LoadedModel, draft: str, data: TokenDataset, batch: int, reporter: Reporter) -> Drafts:
    """``draft``: ``layers:N``, or a model.

    Raises:
        UsageError: no such model, or one of another vocabulary; more layers than the model's; texts too
        short.
        UnsupportedModel: a state, which does not take tokens back; a model that does not exit early.
    """
    proposed = []
    texts = text_batches(data, batch, loaded.model.device)
    with _drafting(loaded, draft) as model:
        for number, text in enumerate(texts):
            reporter(number, len(texts), f"evaluate: drafts of {draft}")
            if places := range(PAGE_TOKENS, text.input_ids_BT.shape[1], EVERY):
                counts_PB = text.scored_TB[torch.tensor(places) - 1]
                proposed.append(Proposed(text, places, _proposals(model, text.input_ids_BT, places), counts_PB))
    reporter(len(texts), len(texts), f"evaluate: drafts of {draft}")
    prefixes_N = torch.zeros(len(data.sequences), dtype=torch.float64)
    for one in proposed:
        prefixes_N.index_add_(0, torch.tensor(one.text.sequences), one.counts_PB.sum(0).double().cpu())
    if not prefixes_N.any():
        raise UsageError(
            f"drafts are measured after {PAGE_TOKENS} tokens and more, and no text has as many before a token that "
            "counts",
            hint="longer texts: --set evaluate.data.seq_len=1024",
        )
    plan = unquantized_plan(loaded.identity, loaded.geometry)
    return Drafts(proposed, prefixes_N, _accepted(loaded, plan, proposed, len(prefixes_N), reporter))


@torch.inference_mode()
def measure_drafts(loaded: LoadedModel, plan: Plan, drafts: Drafts, reporter: Reporter) -> DraftQuality:
    """UnsupportedModel where a layer of the plan does not take tokens back."""
    accepted_Nk = _accepted(loaded, plan, drafts.proposed, len(drafts.prefixes_N), reporter)
    has_some = drafts.prefixes_N > 0
    proposed_N = NUM_DRAFTS * drafts.prefixes_N[has_some]
    accepted, accepted_se = ratio_and_error(accepted_Nk[has_some].sum(1), proposed_N)
    change, change_se = ratio_and_error((accepted_Nk - drafts.accepted_Nk)[has_some].sum(1), proposed_N)
    num_prefixes = drafts.prefixes_N.sum()
    by_place = tuple((accepted_Nk.sum(0) / num_prefixes).tolist())
    return DraftQuality(accepted, accepted_se, change, change_se, by_place, int(num_prefixes))


@contextmanager
def _drafting(loaded: LoadedModel, draft: str) -> Iterator[PreTrainedModel]:
    """The model that drafts; of a model's own layers, the model itself, which has so many within the
    context."""
    if not draft.startswith(OWN_LAYERS):
        other = load(draft, device=str(loaded.model.device))
        if tokenizer_of(other).get_vocab() != tokenizer_of(loaded).get_vocab():
            raise UsageError(f"{draft} has other tokens than {loaded.source}", hint="a draft of the same family")
        _require_no_state(other)
        yield other.model
        return
    _require_no_state(loaded)
    config = loaded.model.config.get_text_config(decoder=True)
    number, most = draft.removeprefix(OWN_LAYERS), config.num_hidden_layers
    if not (number.isdecimal() and 1 <= int(number) <= most):
        raise UsageError(f"a draft of {draft!r}, expected {OWN_LAYERS}N with 1 to {most} of the model's layers")
    try:
        config.num_hidden_layers = int(number)
        yield loaded.model
    finally:
        config.num_hidden_layers = most


def _require_no_state(loaded: LoadedModel) -> None:
    if any(layer.state_bytes for layer in loaded.geometry.layers):
        raise UnsupportedModel(f"drafts with {loaded.source}: its states do not take tokens back")


def _proposals(model: PreTrainedModel, tokens_BT: Tensor, places: range) -> Tensor:
    """int64 [P, B, k]: greedy tokens after the first ``places[i]`` ones. UnsupportedModel for a model that
    runs other layers than it was told."""
    cache, fed, found = DynamicCache(), 0, []
    for place in places:
        given_Bt, chain = tokens_BT[:, fed:place], list[Tensor]()
        for _ in range(NUM_DRAFTS):
            logits_BtV = model(input_ids=given_Bt, use_cache=True, **with_cache(model, cache)).logits
            given_Bt = logits_BtV[:, -1:].argmax(-1)
            chain.append(given_Bt)
        cache.crop(1 - NUM_DRAFTS)
        fed = place
        found.append(torch.cat(chain, dim=1))
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(cache.layers) > wanted:
        raise UnsupportedModel(f"{type(model).__name__} runs {len(cache.layers)} layers where it is told {wanted}")
    return torch.stack(found)


def _accepted(
    loaded: LoadedModel, plan: Plan, proposed: Sequence[Proposed], num_sequences: int, reporter: Reporter
) -> Tensor:
    """Of every sequence, prefixes whose first 1, 2, … proposed tokens a plan accepts: fp64 [N, k]."""
    sums_Nk = torch.zeros(num_sequences, NUM_DRAFTS, dtype=torch.float64)
    total = sum(len(one.places) for one in proposed)
    done = 0
    for one in proposed:
        cache, fed = DecodedCache(plan, loaded.model.config, lookahead=NUM_DRAFTS - 1), 0
        cache.activate_past_recording()  # sliding windows take tokens back
        for place, tokens_Bk, counts_B in zip(one.places, one.tokens_PBk, one.counts_PB, strict=True):
            for _ in feed(loaded.model, cache, one.text.input_ids_BT[:, fed : place - 1]):
                pass
            given_Bk = torch.cat([one.text.input_ids_BT[:, place - 1 : place], tokens_Bk[:, :-1]], dim=1)
            own_Bk = torch.cat([logits.argmax(-1) for _, logits in feed(loaded.model, cache, given_Bk)], dim=1)
            cache.crop(1 - NUM_DRAFTS)
            fed = place
            are_taken_Bk = (own_Bk == tokens_Bk).cumprod(1) * counts_B[:, None]
            sums_Nk.index_add_(0, torch.tensor(one.text.sequences), are_taken_Bk.double().cpu())
            done += 1
            reporter(done, total, "evaluate: drafts")
    return sums_Nk
