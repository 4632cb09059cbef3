"""Many caches read the same texts at once: KL of text with its tails, and what answers of look-ups lose.

All texts have one length and are one batch; caches are fed side by side, chunk by chunk, next to 16 bits. A cache
reads what it would read in decoding. Results are plain numbers a text, which paired comparisons are made of.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from long_generation import tables_of
from real import texts_of
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from kvcal import Plan
from kvcal.data.reading import READINGS
from kvcal.folder import tokenizer_of
from kvcal.models.attention import with_cache
from kvcal.models.load import LoadedModel
from kvcal.stages.divergence import MAX_CHUNK_TOKENS, kl_divergence, unquantized_plan
from kvcal.stages.measuring.cache import DenseCache, looking_ahead
from kvcal.stages.measuring.dense_layer import UnreadPages

TAILS = (0.99, 0.999)
MakeCache = Callable[[UnreadPages], DenseCache]
Row = list[float]


@dataclass(frozen=True, eq=False)
class Texts:
    """B texts of T tokens. ``kinds``: of each; ``answers``: (start, stop) of the answers of those that look up, of
    the others none; ``scored_BT``: tokens that are predicted and count, bool."""

    kinds: tuple[str, ...]
    tokens_BT: Tensor
    answers: tuple[tuple[tuple[int, int], ...], ...]
    scored_BT: Tensor


def texts_for(loaded: LoadedModel, given: argparse.Namespace) -> Texts:
    """``given.texts`` of each kind of text, as in real.py, ``given.answers`` of each task in ``given.kinds``, and
    ``given.tables`` tables of long_generation.py, whose rows are read after the true ones before them."""
    kinds: list[str] = []
    tokens, answers, scored = list[Tensor](), list[tuple[tuple[int, int], ...]](), list[Tensor]()
    for text in (one for _, group in texts_of(loaded, given) for one in group if one.kind):
        kinds.append(text.kind)
        tokens.append(text.tokens_T)
        answers.append(())
        scored.append(text.loss_mask_T & (torch.arange(len(text.tokens_T)) > 0))
    for kind in filter(None, given.kinds.split(",")):
        found = looked_up(loaded, kind, given.answers, given.tokens)
        kinds += found.kinds
        tokens += found.tokens_BT
        answers += found.answers
        scored += found.scored_BT
    for one in tables_of(loaded, given) if given.tables else ():
        mask_T = torch.zeros(len(one.tokens_T), dtype=torch.bool)
        for start, stop in one.answers:
            mask_T[start:stop] = True
        kinds.append("tables")
        tokens.append(one.tokens_T)
        answers.append(one.answers)
        scored.append(mask_T)
    length = min(map(len, tokens))  # a table's
    tokens, scored = ([one[:length] for one in of] for of in (tokens, scored))
    return Texts(tuple(kinds), torch.stack(tokens), tuple(answers), torch.stack(scored))


def looked_up(loaded: LoadedModel, kind: str, count: int, num_tokens: int) -> Texts:
    """Texts of a task of kvcal.data.lookup_tasks, whose answers are scored."""
    readings = list(islice(READINGS[kind](tokenizer_of(loaded), num_tokens, 1, "report"), count))
    scored_BT = torch.zeros(count, num_tokens, dtype=torch.bool)
    for row, reading in enumerate(readings):
        for start, stop in reading.answers:
            scored_BT[row, start:stop] = True
    tokens_BT = torch.stack([reading.tokens_T for reading in readings])
    return Texts((kind,) * count, tokens_BT, tuple(reading.answers for reading in readings), scored_BT)


@torch.inference_mode()
def fed(model: PreTrainedModel, caches: Sequence[DenseCache], tokens_BT: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(number of the cache, start, logits [B, t, V]) of every chunk, of every cache in order: as
    kvcal.stages.divergence.lockstep, for caches whose plans do not say how they differ."""
    tokens_BT, start = tokens_BT.to(model.device), 0
    with looking_ahead(model, caches):
        while start < tokens_BT.shape[1]:
            free = min(cache.tokens_to_next_page() for cache in caches)
            stop = min(tokens_BT.shape[1], start + max(1, min(free, MAX_CHUNK_TOKENS)))
            for number, cache in enumerate(caches):
                yield number, start, model(tokens_BT[:, start:stop], use_cache=True, **with_cache(model, cache)).logits
            start = stop


class Tokens(NamedTuple):
    """Of P caches at the scored tokens [P, B, T], on the CPU, 0 elsewhere: KL, and nats that are lost, fp64; whether
    the token is the most likely one, of 16 bits first, [1 + P, B, T]."""

    kl_PBT: Tensor
    lost_PBT: Tensor
    right_PBT: Tensor


@torch.inference_mode()
def read_tokens(loaded: LoadedModel, makers: Sequence[MakeCache], texts: Texts) -> Tokens:
    device, unread, count = loaded.model.device, UnreadPages(), len(makers)
    raw = DenseCache(unquantized_plan(loaded.identity, loaded.geometry), loaded.model.config)
    caches = [raw, *(make(unread) for make in makers)]
    tokens_BT, shape = texts.tokens_BT.to(device), texts.tokens_BT.shape
    kl_PBT, lost_PBT = (torch.zeros(count, *shape, dtype=torch.float64, device=device) for _ in range(2))
    right_PBT = torch.zeros(1 + count, *shape, dtype=torch.bool, device=device)
    for number, start, logits_BTV in fed(loaded.model, caches, tokens_BT):
        row_n, place_n = texts.scored_BT[:, start + 1 : start + 1 + logits_BTV.shape[1]].nonzero().to(device).unbind(1)
        logits_nV, to = logits_BTV[row_n, place_n], (row_n, place_n + start + 1)
        del logits_BTV
        nll_n = _losses(logits_nV, tokens_BT[to])
        right_PBT[(number, *to)] = logits_nV.argmax(-1) == tokens_BT[to]
        if number == 0:
            raw_nV, raw_n = logits_nV, nll_n
            continue
        kl_PBT[(number - 1, *to)], lost_PBT[(number - 1, *to)] = kl_divergence(raw_nV, logits_nV), nll_n - raw_n
    return Tokens(kl_PBT.cpu(), lost_PBT.cpu(), right_PBT.cpu())


def read(loaded: LoadedModel, makers: Mapping[str, MakeCache], texts: Texts) -> dict[str, dict[str, list[Row]]]:
    """Of every cache, by name and kind, a row for each text. Of text: mean KL, ``TAILS`` of KL, tokens. Of answers:
    how many are right, and at 16 bits, nats that they lose, how many there are, mean KL and ``TAILS`` at their
    tokens."""
    kl_PBT, lost_PBT, right_PBT = read_tokens(loaded, list(makers.values()), texts)
    found: dict[str, dict[str, list[Row]]] = {}
    for number, name in enumerate(makers):
        rows: dict[str, list[Row]] = {}
        for row, (kind, answers) in enumerate(zip(texts.kinds, texts.answers, strict=True)):
            kl_n = kl_PBT[number, row][texts.scored_BT[row]]
            tails = kl_n.quantile(torch.tensor(TAILS, dtype=torch.float64)).tolist()
            of_text = [float(kl_n.mean()), *tails]
            if not answers:
                rows.setdefault(kind, []).append([*of_text, len(kl_n)])
                continue
            right, exact = (
                sum(bool(right_PBT[cache, row, slice(*answer)].all()) for answer in answers)
                for cache in (1 + number, 0)
            )
            lost = sum(float(lost_PBT[number, row, slice(*answer)].sum()) for answer in answers)
            rows.setdefault(kind, []).append([right, exact, lost, len(answers), *of_text])
        found[name] = rows
    return found


def _losses(logits_nV: Tensor, expected_n: Tensor) -> Tensor:
    """Negative log-likelihoods, fp64 [n], some rows at a time."""
    parts = zip(logits_nV.split(1024), expected_n.split(1024), strict=True)
    return torch.cat([cross_entropy(part.float(), of, reduction="none").double() for part, of in parts])


def read_missing(
    loaded: LoadedModel, makers: Mapping[str, MakeCache], texts: Texts, noted: dict[str, Any], at_once: int, save: Any
) -> None:
    """Results of all caches that ``noted`` lacks, ``at_once`` side by side; ``save`` is called after each group."""
    missing = [name for name in makers if name not in noted]
    for first in range(0, len(missing), at_once):
        names, started = missing[first : first + at_once], time.monotonic()
        noted |= read(loaded, {name: makers[name] for name in names}, texts)
        save(f"{', '.join(names)}: {len(texts.kinds)} texts in {time.monotonic() - started:.1f} s")


def maker(plan: Plan, loaded: LoadedModel) -> MakeCache:
    return lambda unread: DenseCache(plan, loaded.model.config, unread)
