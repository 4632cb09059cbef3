"""Token sequences for calibration and evaluation: from sources to int64 tensors with a fingerprint.

Plain documents, and the pieces of a text file, are joined with the end-of-sequence token and cut into windows
of exactly ``seq_len`` tokens. Records that have a prompt and a completion (tasks, question and answer, chat
messages) stay one record per sequence, cut at ``seq_len``; their loss mask covers the completion, or all that
the assistant says, since predicting a random prompt says nothing about how well the cache is read. Documents
that look up (kvcal.data.lookups) fill windows that begin with one, with what can be looked up in the loss.
Every sequence starts with what the tokenizer puts at position 0, or with its bos token if conversations start
with it: many models park their attention there, and a window that begins in mid-text has other keys. Several
sources get equally many sequences, in turn.

Choice: of a source, the first ``CANDIDATES`` times as many sequences of the purpose's pool (see
kvcal.data.pools) as are needed are candidates, of which ``seed`` picks, in stream order. So no more than that
is ever tokenized, and the choice does not depend on the process, the machine or the folder's listing order;
what is generated is drawn by the seed already. Left out: shuffling inside a larger source.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from jinja2 import TemplateError
from pydantic.dataclasses import dataclass

from kvcal.artifact import sha256_json
from kvcal.data.lookups import lookup_documents
from kvcal.data.pools import PURPOSES, Purpose, SourceId, SourcePart, TokenDataset, id_bytes
from kvcal.data.sources import (
    AUTO,
    CHAT,
    LOOKUPS,
    TASK_SOURCES,
    Chat,
    Item,
    Marked,
    Pair,
    Source,
    identify_source,
    read_source,
    read_spellings,
)
from kvcal.data.tasks import TASKS, Problem, dealt, mixture, prompt_of
from kvcal.errors import UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.strict import STRICT, Size, SizeOrNone, TextTokens, dump, knob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataSpec", "TokenDataset", "encode_problem", "load_sequences", "prefix_ids"]

CANDIDATES = 4
TokensAndMask = tuple[Tensor, Tensor]  # int64 [T], and whether each is a target of the loss, bool [T]
Span = tuple[str, bool]  # text, and whether it is in the loss


@dataclass(frozen=True, config=STRICT)
class DataSpec:
    """Sequences to load. ``source``: one source, or a list of several, each a name and then options, such as
    "my.jsonl,columns=question+answer" (see the tutorial). Sequences are cut at ``seq_len`` tokens, and passed
    over with fewer than ``min_len``: a KL over short ones says little of a cache whose pages hold 128 tokens.

    Raises UsageError when a value is impossible whatever the data.
    """

    source: str | tuple[str, ...] = knob(
        AUTO,
        "A file, a folder, a hub id, tasks, python:docs …, or a list of these; auto: tasks for an embedded model, "
        "python:docs, python:code and, with a chat template, python:chat for another.",
    )
    num_samples: Size = knob(16, "Sequences.")
    seq_len: TextTokens = knob(1024, "Tokens of each at most.")
    seed: int = knob(0, "Seed of the sample.")
    min_len: SizeOrNone = knob(0, "Tokens of each at least; shorter ones are passed over.")

    def __post_init__(self) -> None:
        if self.min_len > self.seq_len:
            raise UsageError(f"min_len = {self.min_len}", hint=f"from 0 to seq_len = {self.seq_len}")
        _ = self.sources

    @property
    def sources(self) -> tuple[Source, ...]:
        """In order. UsageError as ``read_spellings``."""
        return read_spellings((self.source,) if isinstance(self.source, str) else self.source)

    @property
    def is_toy(self) -> bool:
        """Whether the embedded model's tasks are all there is."""
        return self.source != AUTO and all(source.name in TASK_SOURCES for source in self.sources)

    def for_model(self, is_embedded: bool, has_chats: bool) -> DataSpec:
        """With the source that "auto" stands for; ``has_chats``: whether the tokenizer has a chat
        template."""
        if self.source != AUTO:
            return self
        every = ("python:docs", "python:code", *([CHAT] if has_chats else []))
        return replace(self, source=TASK_SOURCES[0] if is_embedded else every[: self.num_samples])


def load_sequences(
    spec: DataSpec, tokenizer: PreTrainedTokenizerBase, max_context: int | None = None, purpose: Purpose = "fit"
) -> TokenDataset:
    """Read, tokenize and choose from what is dealt to ``purpose``. ``max_context``: the model's context in
    tokens, None if it has no limit.

    Raises UsageError: ``seq_len`` beyond the context, a missing path, an unsupported or mixed kind of file,
    an unreadable or empty source, an unknown column, messages without a chat template, a source that gets no
    sequence, or fewer sequences in the purpose's pool than are asked for (the message says how many there
    are).
    """
    if max_context is not None and spec.seq_len > max_context:
        raise UsageError(
            f"seq_len = {spec.seq_len} is greater than the model's context of {max_context} tokens",
            hint=f"choose a seq_len of at most {max_context}, such as --seq-len {max_context}",
        )
    sources, num_sources = spec.sources, len(spec.sources)
    if spec.num_samples < num_sources:
        raise UsageError(
            f"num_samples = {spec.num_samples} leaves no sequence for {sources[spec.num_samples].name}, one of "
            f"{num_sources} sources",
            hint="raise num_samples",
        )
    counts = [len(range(first, spec.num_samples, num_sources)) for first in range(num_sources)]
    identities = [identify_source(source) for source in sources]
    pairs = zip(sources, counts, strict=True)
    chosen = [_chosen(source, count, spec, tokenizer, purpose) for source, count in pairs]
    order = [divmod(number, num_sources) for number in range(spec.num_samples)]
    sequences, masks = zip(*(chosen[place][index] for index, place in order), strict=True)
    kinds = tuple(sources[place].label for _, place in order)
    least = f"{spec.min_len} to " if spec.min_len else "at most "
    least = "" if spec.min_len == spec.seq_len else least
    shape = f"{spec.num_samples} sequences of {least}{spec.seq_len} tokens, seed {spec.seed}"
    identity, records = identities[0], tuple[SourcePart, ...]()
    if num_sources > 1:
        records = tuple(SourcePart(one.name, one.sha256, n) for one, n in zip(identities, counts, strict=True))
        name = ", ".join(f"{record.source} {record.num_sequences}" for record in records)
        identity = SourceId(name, sha256_json([dump(record) for record in records]))
    fingerprint, description = _fingerprint(sequences, masks), f"{identity.name} (pool {purpose}): {shape}"
    return TokenDataset(sequences, masks, fingerprint, description, identity, purpose, kinds, records)


def _chosen(
    source: Source, count: int, spec: DataSpec, tokenizer: PreTrainedTokenizerBase, purpose: Purpose
) -> list[TokensAndMask]:
    """``count`` sequences of one source with their masks."""
    is_drawn = source.name in (*TASK_SOURCES, LOOKUPS)  # by the seed already
    items: Iterator[Item]
    if source.name == LOOKUPS:
        items = lookup_documents(count * spec.seq_len, spec.seed, purpose)  # more than enough
    elif is_drawn:
        items = _task_records(source.name, 64 * count, spec.seed, purpose)
    else:
        items = read_source(source, spec.seed, purpose)
    num_candidates = count if is_drawn else CANDIDATES * count
    pool = list(islice(_item_sequences(items, source, tokenizer, spec), num_candidates))
    if len(pool) < count:
        needed = len(PURPOSES) * count
        asked = f"seq_len = {spec.seq_len}" + (f" and min_len = {spec.min_len}" if spec.min_len else "")
        raise UsageError(
            f"{source.label} holds {len(pool)} sequences of {asked} tokens in the pool {purpose!r}, and num_samples = "
            f"{spec.num_samples}"
            + (f", {count} of this source," if count < spec.num_samples else "")
            + " were asked for",
            hint=f"each of the {len(PURPOSES)} pools gets a quarter of a source: give about {needed} records, or "
            f"{needed * spec.seq_len} tokens of text; or lower num_samples, seq_len or min_len (--samples, --seq-len)"
            + ("" if pool else "; raise seq_len where replies begin after it")
            + ("; or give the evaluation a larger source of its own" if purpose == "report" else ""),
        )
    picked = sorted(random.Random(f"pick:{spec.seed}").sample(range(len(pool)), count))
    return [pool[i] for i in picked]


def _task_records(source: str, count: int, seed: int, purpose: Purpose) -> Iterator[Item]:
    """``count`` problems with their solutions: bounded, since a short seq_len can cut off every
    completion."""
    draw = mixture if source == "tasks" else TASKS[source.removeprefix("tasks:")]
    for problem in islice(dealt(draw, purpose, f"{source}:{seed}", prompt_of), count):
        yield Pair(problem.prompt_text, problem.completion)


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids at position 0 of every sequence: what the tokenizer adds itself, else its bos token, else
    none. A bos token with which the chat template does not begin is none that the model reads: GGUF files of
    Qwen2.5 name one."""
    bare = _encode(tokenizer, "a")
    full = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    if start == 0 and tokenizer.bos_token_id is not None and _begins_chats(tokenizer):
        return [tokenizer.bos_token_id]
    return list(full[:start])


def _begins_chats(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether conversations begin with the bos token, or there is no template of them."""
    if not tokenizer.chat_template:
        return True
    try:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateError:
        return True
    return str(chat).startswith(str(tokenizer.bos_token))


def encode_problem(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """An evaluation prompt, int64 [T]: the prefix, the problem's prompt and the opening of the reasoning."""
    return torch.tensor(prefix_ids(tokenizer) + _encode(tokenizer, problem.prompt_text), dtype=torch.int64)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # verbose=False: documents are cut into windows here, so the tokenizer's length warning would mislead.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _item_sequences(
    items: Iterator[Item], source: Source, tokenizer: PreTrainedTokenizerBase, spec: DataSpec
) -> Iterator[TokensAndMask]:
    prefix, end = prefix_ids(tokenizer), [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    num_body = spec.seq_len - len(prefix)
    if num_body < 1:
        raise UsageError(
            f"seq_len = {spec.seq_len} has no room after the tokenizer's {len(prefix)} opening tokens",
            hint=f"at least {len(prefix) + 1}",
        )
    pending: list[int] = []  # tokens of plain documents that do not fill a window yet
    marked: list[tuple[int, bool]] = []  # of marked ones, and whether each is in the loss
    for item in items:
        if isinstance(item, Pair):
            spans = [(item.prompt, False), (item.completion, True)]
            yield from _sequence(_encode_spans(spans, prefix, end, tokenizer), spec)
        elif isinstance(item, Chat):
            yield from _sequence(_encode_spans(_chat_spans(item, source, tokenizer), [], [], tokenizer), spec)
        elif isinstance(item, Marked):
            marked += _encode_spans(item.spans, [] if marked else prefix, end, tokenizer)
            if len(marked) >= spec.seq_len:  # the next one begins with a document: none is without its first half
                yield from _sequence(marked, spec)
                marked = []
        else:
            pending += _encode(tokenizer, item.text) + end
            num_windows = len(pending) // num_body
            for i in range(num_windows):
                body = pending[i * num_body : (i + 1) * num_body]
                yield from _sequence([*((token, False) for token in prefix), *((token, True) for token in body)], spec)
            pending = pending[num_windows * num_body :]


def _encode_spans(
    spans: Iterable[Span], prefix: list[int], end: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, bool]]:
    """Token ids, and whether each is in the loss. Spans are tokenized apart, as they are when a model
    generates."""
    tokens = [(token, False) for token in prefix]
    for text, is_target in spans:
        tokens += [(token, is_target) for token in _encode(tokenizer, text)]
    return tokens + [(token, tokens[-1][1]) for token in end]


def _chat_spans(chat: Chat, source: Source, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """The loss covers what the assistant says if the template only appends, else all tokens."""
    if tokenizer.chat_template is None:
        raise UsageError(
            f"source = {source.name} holds chat messages, and the model's tokenizer has no chat template",
            hint="use a model with a chat template, or name a text column",
        )
    # A column of records gives every message every field; those that a message lacks are None.
    messages = [{key: x for key, x in message.items() if x is not None} for message in chat.messages]
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    spans: list[Span] = []
    done = ""
    try:
        whole = str(render(messages, add_generation_prompt=False))
        for i, message in enumerate(messages):
            if message.get("role") == "assistant":
                prompt = str(render(messages[:i], add_generation_prompt=True)) if i else ""
                answered = str(render(messages[: i + 1], add_generation_prompt=False))
                if not (prompt.startswith(done) and answered.startswith(prompt) and whole.startswith(answered)):
                    return [(whole, True)]
                spans += [(prompt[len(done) :], False), (answered[len(prompt) :], True)]
                done = answered
    except TemplateError as error:
        place = f"source = {source.name}, record {chat.index}"
        raise UsageError(
            f"{place}: the chat template does not take its messages: {error}",
            hint="a template wants role and content, and often alternating user and assistant",
        ) from error
    return [*spans, (whole[len(done) :], not spans)]


def _sequence(tokens: list[tuple[int, bool]], spec: DataSpec) -> Iterator[TokensAndMask]:
    """Nothing, when the cut at ``seq_len`` leaves no token to predict, or when there are too few tokens."""
    if not tokens:
        return
    ids, is_target = zip(*tokens[: spec.seq_len], strict=True)
    mask_T = torch.tensor(is_target)
    mask_T[0] = False
    if mask_T.any() and len(ids) >= spec.min_len:
        yield torch.tensor(ids, dtype=torch.int64), mask_T


def _fingerprint(sequences: tuple[Tensor, ...], masks: tuple[Tensor, ...]) -> str:
    """sha256 over, per sequence: its length, its ids (both int64, little-endian) and its mask (one byte a
    token)."""
    digest = hashlib.sha256()
    for tokens_T, mask_T in zip(sequences, masks, strict=True):
        digest.update(tokens_T.numel().to_bytes(8, "little"))
        digest.update(id_bytes(tokens_T))
        digest.update(mask_T.numpy().tobytes())
    return digest.hexdigest()
