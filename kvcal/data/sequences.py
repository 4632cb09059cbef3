"""Token sequences for calibration and evaluation: from a source to int64 tensors with a fingerprint.

Plain documents, and the pieces of a text file, are joined with the end-of-sequence token and cut into windows of
exactly ``seq_len`` tokens. Records that have a prompt and a completion (tasks, question and answer, chat messages) stay
one record per sequence, cut at ``seq_len``; their loss mask covers the completion alone, since predicting a random
prompt says nothing about how well the cache is read. Every sequence starts with what the tokenizer puts at position 0
(or with its bos token): many models park their attention there, and a window that begins in mid-text has other keys.

Sampling: the first ``CANDIDATES * num_samples`` sequences of the purpose's pool (see kvcal.data.pools) are candidates,
of which ``seed`` picks ``num_samples``, in stream order. So no more than that is ever tokenized, and the choice does
not depend on the process, the machine or the folder's listing order. Left out: shuffling inside a larger source.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
from jinja2 import TemplateError
from pydantic.dataclasses import dataclass
from torch import Tensor

from kvcal.data.pools import PURPOSES, Purpose, TokenDataset, id_bytes
from kvcal.data.sources import Chat, Record, describe_source, identify_source, read_source
from kvcal.data.tasks import TASKS, Problem, dealt, mixture
from kvcal.errors import UsageError
from kvcal.strict import STRICT, knob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CANDIDATES = 4
MAX_SAMPLES = 1_000_000
TokensAndMask = tuple[Tensor, Tensor]  # int64 [T], and whether each is a target of the loss, bool [T]
TASK_SOURCES = ("tasks", *(f"tasks:{name}" for name in TASKS))


@dataclass(frozen=True, config=STRICT)
class DataSpec:
    """Sequences to load. ``source`` is "tasks", "tasks:NAME", a file, a folder or a hub id; ``split`` and ``config``
    belong to hub ids only. ``columns`` names one column (text, or chat messages) or two (prompt, completion); empty
    means the first that exists of messages, text, content, question + answer. Sequences are cut at ``seq_len`` tokens,
    and passed over with fewer than ``min_len``: a KL over short ones says little of a cache whose pages hold 128
    tokens.

    Raises UsageError when a value is impossible whatever the data.
    """

    source: str = knob("tasks", "tasks, tasks:NAME, a text, JSONL or parquet file or folder, or a hub id.")
    num_samples: int = knob(16, "Sequences.")
    seq_len: int = knob(1024, "Tokens of each at most.")
    seed: int = knob(0, "Seed of the sample.")
    columns: tuple[str, ...] = knob((), "Column of text or messages, or of prompt and completion; default: found.")
    split: str | None = knob(None, "Split of a hub data set.")
    config: str | None = knob(None, "Configuration of a hub data set.")
    min_len: int = knob(0, "Tokens of each at least; shorter ones are passed over.")

    def __post_init__(self) -> None:
        if not self.source:
            raise UsageError("source = '' is empty", hint="give tasks, a file, a folder or a hub id")
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise UsageError(f"num_samples = {self.num_samples}", hint=f"ask for at least 1, at most {MAX_SAMPLES}")
        if self.seq_len < 2:
            raise UsageError(f"seq_len = {self.seq_len}", hint="at least 2 tokens: the first predicts the second")
        if not 0 <= self.min_len <= self.seq_len:
            raise UsageError(f"min_len = {self.min_len}", hint=f"from 0 to seq_len = {self.seq_len}")
        if len(self.columns) > 2:
            raise UsageError(f"columns = {list(self.columns)}", hint="name one column, or a prompt and a completion")
        if self.source.startswith("tasks:") and self.source not in TASK_SOURCES:
            raise UsageError(f"source = {self.source!r} is unknown", hint=f"choose one of: {', '.join(TASK_SOURCES)}")


def load_sequences(
    spec: DataSpec, tokenizer: PreTrainedTokenizerBase, max_context: int | None = None, purpose: Purpose = "fit"
) -> TokenDataset:
    """Read, tokenize and sample what is dealt to ``purpose``. ``max_context``: the model's context in tokens, None if
    it has no limit.

    Raises UsageError: ``seq_len`` beyond the context, a missing path, an unsupported or mixed kind of file, an
    unreadable or empty source, an unknown column, messages without a chat template, or fewer than ``num_samples``
    sequences in the purpose's pool (the message says how many there are).
    """
    if max_context is not None and spec.seq_len > max_context:
        raise UsageError(
            f"seq_len = {spec.seq_len} is greater than the model's context of {max_context} tokens",
            hint=f"choose a seq_len of at most {max_context}, such as --seq-len {max_context}",
        )
    if spec.source in TASK_SOURCES:
        pool = list(islice(_task_sequences(spec, tokenizer, purpose), spec.num_samples))  # drawn by the seed already
    else:
        pool = list(islice(_source_sequences(spec, tokenizer, purpose), CANDIDATES * spec.num_samples))
    if len(pool) < spec.num_samples:
        needed = len(PURPOSES) * spec.num_samples
        asked = f"seq_len = {spec.seq_len}" + (f" and min_len = {spec.min_len}" if spec.min_len else "")
        raise UsageError(
            f"{describe_source(spec.source)} holds {len(pool)} sequences of {asked} tokens in the "
            f"pool {purpose!r}, and num_samples = {spec.num_samples} were asked for",
            hint=f"each of the pools {', '.join(PURPOSES)} gets a quarter of a source: give about {needed} records, or "
            f"{needed * spec.seq_len} tokens of text; or lower num_samples, seq_len or min_len; if only the report's "
            "pool is too small, give the evaluation a larger source of its own",
        )
    picked = sorted(random.Random(f"pick:{spec.seed}").sample(range(len(pool)), spec.num_samples))
    sequences, masks = zip(*(pool[i] for i in picked), strict=True)
    least = f"{spec.min_len} to " if spec.min_len else "at most "
    least = "" if spec.min_len == spec.seq_len else least
    shape = f"{spec.num_samples} sequences of {least}{spec.seq_len} tokens, seed {spec.seed}"
    source = identify_source(spec.source, spec.split, spec.config)
    description = f"{source.name} (pool {purpose}): {shape}"
    return TokenDataset(sequences, masks, _fingerprint(sequences, masks), description, source, purpose)


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids at position 0 of every sequence: what the tokenizer adds itself, else its bos token, else none."""
    bare = _encode(tokenizer, "a")
    full = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    if start == 0 and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    return list(full[:start])


def encode_problem(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """An evaluation prompt, int64 [T]: the prefix, the problem's prompt and the opening of the reasoning."""
    return torch.tensor(prefix_ids(tokenizer) + _encode(tokenizer, problem.prompt_text), dtype=torch.int64)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # verbose=False: documents are cut into windows here, so the tokenizer's length warning would mislead.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _task_sequences(spec: DataSpec, tokenizer: PreTrainedTokenizerBase, purpose: Purpose) -> Iterator[TokensAndMask]:
    draw = mixture if spec.source == "tasks" else TASKS[spec.source.removeprefix("tasks:")]
    drawn = dealt(draw, purpose, f"{spec.source}:{spec.seed}")
    for problem in islice(drawn, 64 * spec.num_samples):  # bounded: a short seq_len can cut off every completion
        yield from _record_sequence(Record(problem.prompt_text, problem.completion), tokenizer, spec)


def _source_sequences(spec: DataSpec, tokenizer: PreTrainedTokenizerBase, purpose: Purpose) -> Iterator[TokensAndMask]:
    prefix, end = prefix_ids(tokenizer), _end_ids(tokenizer)
    num_body = spec.seq_len - len(prefix)
    if num_body < 1:
        raise UsageError(
            f"seq_len = {spec.seq_len} has no room after the tokenizer's {len(prefix)} opening tokens",
            hint=f"at least {len(prefix) + 1}",
        )
    pending: list[int] = []  # tokens of plain documents that do not fill a window yet
    for item in read_source(spec.source, spec.columns, spec.split, spec.config, spec.seed, purpose):
        if isinstance(item, Record):
            yield from _record_sequence(item, tokenizer, spec)
        elif isinstance(item, Chat):
            yield from _chat_sequence(item, tokenizer, spec)
        else:
            pending += _encode(tokenizer, item.text) + end
            num_windows = len(pending) // num_body
            for i in range(num_windows):
                body = pending[i * num_body : (i + 1) * num_body]
                yield from _sequence(prefix + body, len(prefix), spec)
            pending = pending[num_windows * num_body :]


def _record_sequence(record: Record, tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> Iterator[TokensAndMask]:
    """Prompt and completion are tokenized apart, as they are when a model generates."""
    prompt = prefix_ids(tokenizer) + _encode(tokenizer, record.prompt)
    completion = _encode(tokenizer, record.completion) + _end_ids(tokenizer)
    yield from _sequence(prompt + completion, len(prompt), spec)


def _chat_sequence(chat: Chat, tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> Iterator[TokensAndMask]:
    """The loss covers the last message if it is the assistant's and the template only appends, else all tokens."""
    if tokenizer.chat_template is None:
        raise UsageError(
            f"source = {spec.source} holds chat messages, and the model's tokenizer has no chat template",
            hint="use a model with a chat template, or name a text column",
        )
    # A column of records gives every message every field; those that a message lacks are None.
    messages = [{key: x for key, x in message.items() if x is not None} for message in chat.messages]
    opening = messages[:-1] if messages[-1].get("role") == "assistant" else []
    try:
        render = partial(tokenizer.apply_chat_template, tokenize=False)
        text = str(render(messages, add_generation_prompt=False))
        prompt = str(render(opening, add_generation_prompt=True)) if opening else ""
    except TemplateError as error:
        raise UsageError(
            f"source = {spec.source}, record {chat.index}: the chat template does not take its messages: {error}",
            hint="a template wants role and content, and often alternating user and assistant",
        ) from error
    if not text.startswith(prompt):
        prompt = ""
    prompt_ids = _encode(tokenizer, prompt)
    reply_ids = _encode(tokenizer, text.removeprefix(prompt))
    yield from _sequence(prompt_ids + reply_ids, len(prompt_ids), spec)


def _sequence(tokens: list[int], num_prompt: int, spec: DataSpec) -> Iterator[TokensAndMask]:
    """Nothing, when the cut at ``seq_len`` leaves no token to predict, or when there are too few tokens."""
    tokens_T = torch.tensor(tokens[: spec.seq_len], dtype=torch.int64)
    if tokens_T.numel() > max(num_prompt, 1) and tokens_T.numel() >= spec.min_len:
        yield tokens_T, torch.arange(tokens_T.numel()) >= max(num_prompt, 1)


def _fingerprint(sequences: tuple[Tensor, ...], masks: tuple[Tensor, ...]) -> str:
    """sha256 over, per sequence: its length, its ids (both int64, little-endian) and its mask (one byte a token)."""
    digest = hashlib.sha256()
    for tokens_T, mask_T in zip(sequences, masks, strict=True):
        digest.update(tokens_T.numel().to_bytes(8, "little"))
        digest.update(id_bytes(tokens_T))
        digest.update(mask_T.numpy().tobytes())
    return digest.hexdigest()
