"""Problems whose answers are read from far back in a long context: facts, rows of tables, lines of source
code.

retrieval:TOKENS   RULER's multi-key needle (arXiv 2404.06654): among word problems, ``NUM_KEYS`` sentences give each
                   animal a code; ``ASKED`` of the codes are asked for, and the others distract.
completion:TOKENS  a file of an installed package or of the standard library: ``LINES`` lines of its last half, each
                   predicted from all that is before it.
rows:TOKENS        and pairs, late, hops, copies, calls: see kvcal.data.lookup_tasks. After word problems, as many facts
                   as there is room for.

An answer counts when every token of it is the most likely one after the true tokens before it. That is the
exact match of greedy decoding, which has written the same up to its first wrong token. So a problem needs no
generation, and one text holds several. The same seed gives the same problems; those of two purposes share no
text. [evaluate] and [tune] of a recipe name tasks, these and others. Left out: RULER's other needles.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from kvcal.data.lookup_tasks import ANIMALS, COLOURS, FORMS, Form, Part
from kvcal.data.pools import Purpose
from kvcal.data.sequences import DataSpec, prefix_ids
from kvcal.data.sources import Piece, Source, read_source
from kvcal.data.tasks import MIN_DIGITS, MIN_HOPS, MIN_SIZE, MIN_STEPS, TASKS
from kvcal.data.word_problems import word_problem
from kvcal.errors import UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.quantities import MAX_BATCH, MAX_SEED
from kvcal.strict import STRICT, Bits, Seed, Share, Size, Tokens, knob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

LM_EVAL = "lm-eval:"  # opens the names of its tasks
NUM_KEYS, ASKED, LINES = 8, 4, 8
MIN_TOKENS, MIN_LINE, MIN_FACTS = 512, 10, 2


@dataclass(frozen=True, eq=False)
class Reading:
    """``tokens_T`` int64; ``answers``: (start, stop) of each answer's tokens, of which none is the first
    one."""

    tokens_T: Tensor
    answers: tuple[tuple[int, int], ...]


def retrieval(tokenizer: Tokenizer, num_tokens: int, seed: int, purpose: Purpose) -> Iterator[Reading]:
    """Texts of exactly ``num_tokens`` tokens without end; the keys lie anywhere in them."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    start = list(tokenizer("")["input_ids"]) or encode("\n")
    rng = random.Random(f"{purpose}:retrieval:{num_tokens}:{seed}")
    while True:
        keys = rng.sample([f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS], NUM_KEYS)
        codes = {key: str(rng.randint(100, 999)) for key in keys}
        needles = [encode(f"The code of the {key} is {codes[key]}.\n") for key in keys]
        questions: list[int] = []
        answers = []  # from the first question on
        for key in rng.sample(keys, ASKED):
            questions += encode(f"Question: what is the code of the {key}?\nAnswer: the code of the {key} is")
            answer = encode(f" {codes[key]}")
            answers.append((len(questions), len(questions) + len(answer)))
            questions += answer + encode(".\n")
        room = num_tokens - len(start) - len(questions) - sum(map(len, needles))
        lines: list[list[int]] = []
        while room > 0:
            for line in word_problem(rng).splitlines(keepends=True):
                lines.append(encode(line)[:room])
                room -= len(lines[-1])
        for needle in needles:
            lines.insert(rng.randrange(len(lines)), needle)  # before the last one, which is cut
        context = start + [token for line in lines for token in line]
        spans = tuple((len(context) + first, len(context) + stop) for first, stop in answers)
        yield Reading(torch.tensor(context + questions), spans)


def completion(tokenizer: Tokenizer, num_tokens: int, seed: int, purpose: Purpose) -> Iterator[Reading]:
    """Files of at least ``num_tokens`` tokens, cut there. UsageError for a tokenizer that tells no places of
    tokens."""
    _require_places(tokenizer)
    rng = random.Random(f"{purpose}:completion:{seed}")
    start = list(tokenizer("")["input_ids"])
    for piece in read_source(Source("python:code"), seed, purpose):
        if not isinstance(piece, Piece) or len(piece.text) < 2 * num_tokens:
            continue
        encoded = tokenizer(piece.text[: 16 * num_tokens], add_special_tokens=False, return_offsets_mapping=True)
        tokens = start + list(encoded["input_ids"])
        if len(tokens) < num_tokens:
            continue
        places = [(0, 0)] * len(start) + [tuple(place) for place in encoded["offset_mapping"]]
        answers, offset = [], 0
        for line in piece.text.splitlines(keepends=True):
            first, stop = offset + len(line) - len(line.lstrip()), offset + len(line.rstrip())
            offset += len(line)
            if stop - first >= MIN_LINE and places[num_tokens // 2][0] <= first and stop <= places[num_tokens - 1][1]:
                inside = [i for i in range(num_tokens // 2, num_tokens) if places[i][0] < stop and places[i][1] > first]
                answers.append((inside[0], inside[-1] + 1))
        if len(answers) >= LINES:
            yield Reading(torch.tensor(tokens[:num_tokens]), tuple(sorted(rng.sample(answers, LINES))))


def looked_up(form: Form, tokenizer: Tokenizer, num_tokens: int, seed: int, purpose: Purpose) -> Iterator[Reading]:
    """Texts of exactly ``num_tokens`` tokens without end: word problems, then as many facts of ``form`` as
    there is room for. UsageError for a tokenizer that tells no places of tokens, and where not two facts
    fit."""
    _require_places(tokenizer)
    start, rng = prefix_ids(tokenizer), random.Random(f"{purpose}:{form.__name__}:{num_tokens}:{seed}")
    room, probe = num_tokens - max(1, len(start)), 16
    while True:
        state = rng.getrandbits(64)
        count = probe * room // len(_encoded(form(random.Random(state), probe), tokenizer)[0])
        tokens, answers = _encoded(form(random.Random(state), count), tokenizer)
        while len(tokens) > room:
            count -= 1
            tokens, answers = _encoded(form(random.Random(state), count), tokenizer)
        if count < MIN_FACTS:
            raise UsageError(f"{num_tokens} tokens hold {count} facts of {form.__name__}", hint="name a longer task")
        before: list[int] = []
        while len(before) < num_tokens - len(start) - len(tokens):
            before += _encoded([(word_problem(rng), False)], tokenizer)[0]
        context = start + before[len(before) - (num_tokens - len(start) - len(tokens)) :]
        spans = tuple((len(context) + first, len(context) + stop) for first, stop in answers)
        yield Reading(torch.tensor(context + tokens), spans)


def _encoded(parts: Sequence[Part], tokenizer: Tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens of the joined parts, and (start, stop) of those of each answer."""
    encoded = tokenizer("".join(text for text, _ in parts), add_special_tokens=False, return_offsets_mapping=True)
    starts, stops = zip(*encoded["offset_mapping"], strict=True)
    ends = list(accumulate(len(text) for text, _ in parts))
    places = [(end - len(text), end) for end, (text, is_answer) in zip(ends, parts, strict=True) if is_answer]
    answers = [(bisect_right(stops, begin), bisect_left(starts, end)) for begin, end in places]
    return list(encoded["input_ids"]), answers


def _require_places(tokenizer: Tokenizer) -> None:
    if not tokenizer.is_fast:
        raise UsageError("only fast tokenizers (tokenizer.json) tell where tokens are", hint="choose other tasks")


Draw = Callable[["Tokenizer", int, int, Purpose], Iterator[Reading]]
READINGS: dict[str, Draw] = {"retrieval": retrieval, "completion": completion}
READINGS |= {name: partial(looked_up, form) for name, form in FORMS.items()}


TASK_NAMES = f"Embedded tasks, {', '.join(READINGS)} with :TOKENS, or lm-eval:NAME[:METRIC]"


def is_reading(task: str) -> bool:
    """Whether a task is one of this module's, with a length."""
    name, _, tokens = task.partition(":")
    return name in READINGS and tokens.isdecimal() and MIN_TOKENS <= int(tokens) < 1 << 24


def readings(
    task: str, num_problems: int, seed: int, tokenizer: Tokenizer, purpose: Purpose = "report"
) -> tuple[Reading, ...]:
    """Texts with at least ``num_problems`` answers together, fewer than one text's more."""
    name, _, tokens = task.partition(":")
    found: list[Reading] = []
    num_answers = 0
    for text in READINGS[name](tokenizer, int(tokens), seed, purpose):
        found.append(text)
        num_answers += len(text.answers)
        if num_answers >= num_problems:
            return tuple(found)
    raise UsageError(
        f"{task}: the installed packages hold {len(found)} such files, with {num_answers} of {num_problems} problems",
        hint="ask for fewer problems, or for fewer tokens",
    )


def is_own_task(name: str) -> bool:
    """Whether a task is generated here, and not lm-eval's."""
    return name in TASKS or is_reading(name)


def _require_tasks(tasks: tuple[str, ...]) -> None:
    """ValueError for a task that is not there, or named twice; lm-eval's are looked up when they run."""
    unknown = sorted(
        name for name in tasks if not is_own_task(name) and not name.startswith(LM_EVAL) or name == LM_EVAL
    )
    if unknown:
        own = [*sorted(TASKS), *(f"{name}:TOKENS (at least {MIN_TOKENS})" for name in READINGS)]
        raise ValueError(f"tasks {unknown} unknown, expected some of {own}, or {LM_EVAL}NAME of lm-eval")
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"tasks = {list(tasks)}, expected each one once")


@pydantic_dataclass(frozen=True, config=STRICT)
class EvaluateSpec:
    """[evaluate]: perplexity, KL and top-1 on ``data``; exact match by greedy generation on problems of
    ``tasks``; acceptance of the tokens of ``draft``."""

    data: DataSpec = knob(DataSpec(seed=1), "Texts to measure on.")
    tasks: tuple[str, ...] = knob(tuple(TASKS), f"{TASK_NAMES}; [] for none.")
    num_problems: Size = knob(16, "Problems of each task.")
    max_steps: Annotated[int, Field(ge=MIN_STEPS, le=1000)] = knob(70, "Transfers in a ledger at most.")
    max_size: Annotated[int, Field(ge=MIN_SIZE, le=5000)] = knob(160, "Words in a chain's table at most.")  # of 10,000
    max_hops: Annotated[int, Field(ge=MIN_HOPS, le=1000)] = knob(40, "Hops along a chain at most.")
    max_digits: Annotated[int, Field(ge=MIN_DIGITS, le=100)] = knob(7, "Digits of a factor at most.")
    max_new_tokens: Tokens = knob(2048, "Tokens generated for a problem at most.")
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = knob(16, "Sequences fed at once.")
    seed: Seed = knob(1, "Seed of the problems.")
    against: tuple[str, ...] = knob((), "Recipes with [formats] to measure next to the plan.")
    include_path: Annotated[str, Field(exclude_if=lambda folder: not folder)] = knob(
        "", "Folder with task files (YAML) of lm-eval, next to its own."
    )
    draft: Annotated[str, Field(exclude_if=lambda draft: not draft)] = knob(
        "", "A model whose drafts the plan's model verifies, or layers:N, its own first ones."
    )

    def __post_init__(self) -> None:
        _require_tasks(self.tasks)

    @property
    def embedded_tasks(self) -> tuple[str, ...]:
        return tuple(name for name in self.tasks if name in TASKS)

    @property
    def harness_tasks(self) -> tuple[str, ...]:
        """Tasks of the lm-evaluation-harness, NAME or NAME:METRIC."""
        return tuple(name.removeprefix(LM_EVAL) for name in self.tasks if not is_own_task(name))

    @property
    def reading_tasks(self) -> tuple[str, ...]:
        return tuple(filter(is_reading, self.tasks))


@pydantic_dataclass(frozen=True, config=STRICT)
class TuneSpec:
    """[tune], MixKVQ's threshold search: Optuna's TPE, accuracy up and all-in bits down; the best accuracy
    under ``max_bits`` is chosen."""

    tasks: tuple[str, ...] = knob(("ledger", "chain", "times"), f"{TASK_NAMES}.")
    num_problems: Size = knob(16, "Problems of each task.")
    num_trials: Size = knob(30, "Trials in all; a larger number continues the study.")
    low: Annotated[float, Field(gt=0)] = knob(0.1, "Lowest threshold.")
    high: float = knob(2.0, "Highest threshold.")
    fit_range: bool = knob(False, "Instead of high: the score that 1 % of the channels exceed.")
    max_bits: Bits | None = knob(None, "Cap on all-in bits per cached value.")
    page_share: Annotated[Share, Field(gt=0)] = knob(0.95, "Share of the pages whose need a capacity covers.")
    seed: Annotated[Seed, Field(lt=MAX_SEED)] = knob(0, "Seed of the search and of its problems.")

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"expected low = {self.low} < high = {self.high}")
        if not self.tasks:
            raise ValueError(f"no tasks, expected some of {sorted(TASKS)}, or {LM_EVAL}NAME of lm-eval")
        _require_tasks(self.tasks)
