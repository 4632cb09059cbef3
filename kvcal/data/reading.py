"""Problems whose answers are read from far back in a long context: codes by key, and lines of source code.

retrieval:TOKENS   RULER's multi-key needle (arXiv 2404.06654): among word problems, ``NUM_KEYS`` sentences give each
                   animal a code; ``ASKED`` of the codes are asked for, and the others distract.
completion:TOKENS  a file of an installed package or of the standard library: ``LINES`` lines of its last
half, each
                   predicted from all that is before it.

An answer counts when every token of it is the most likely one after the true tokens before it. That is the
exact match of greedy decoding, which has written the same up to its first wrong token. So a problem needs no
generation, and one text holds several. The same seed gives the same problems; those of two purposes share no
text. [evaluate] and [tune] of a recipe name tasks, these and others. Left out: RULER's other needles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from kvcal.data.pools import Purpose
from kvcal.data.sequences import DataSpec
from kvcal.data.sources import Piece, Source, read_source
from kvcal.data.tasks import MIN_DIGITS, MIN_HOPS, MIN_SIZE, MIN_STEPS, TASKS
from kvcal.errors import UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.quantities import MAX_BATCH, MAX_SEED
from kvcal.strict import STRICT, Bits, Seed, Share, Size, Tokens, knob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

LM_EVAL = "lm-eval:"  # opens the names of its tasks
NUM_KEYS, ASKED, LINES = 8, 4, 8
MIN_TOKENS, MIN_LINE = 512, 10
# fmt: off
PEOPLE = ["Amara", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kavya", "Lucia",
          "Mateo", "Nadia", "Omar", "Priya", "Rosa", "Stefan", "Tomas", "Yuki"]
# fmt: on
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_COLOURS = ["amber", "black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow"]
_ANIMALS = ["bear", "camel", "crow", "deer", "eagle", "fox", "goat", "horse", "lion", "owl", "rabbit", "tiger", "wolf"]


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
        keys = rng.sample([f"{colour} {animal}" for colour in _COLOURS for animal in _ANIMALS], NUM_KEYS)
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
    if not tokenizer.is_fast:
        raise UsageError("completion needs a fast tokenizer (tokenizer.json)", hint="choose other tasks")
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


Draw = Callable[["Tokenizer", int, int, Purpose], Iterator[Reading]]
READINGS: dict[str, Draw] = {"retrieval": retrieval, "completion": completion}


def is_reading(task: str) -> bool:
    """Whether a task is one of this module's, with a length."""
    name, _, tokens = task.partition(":")
    return name in READINGS and tokens.isdecimal() and MIN_TOKENS <= int(tokens) < 1 << 24


def readings(
    task: str, num_problems: int, seed: int, tokenizer: Tokenizer, purpose: Purpose = "report"
) -> tuple[Reading, ...]:
    """Texts with at least ``num_problems`` answers together, fewer than one text's more."""
    name, _, tokens = task.partition(":")
    count = -(-num_problems // (ASKED if name == "retrieval" else LINES))
    found = tuple(islice(READINGS[name](tokenizer, int(tokens), seed, purpose), count))
    if len(found) < count:
        raise UsageError(
            f"{task}: the installed packages hold {len(found)} files so long, {count} were asked for",
            hint="ask for fewer problems, or for fewer tokens",
        )
    return found


def word_problem(rng: random.Random) -> str:
    """A story of 3 to 9 events with numbers, a question, and a solution that restates each with its
    arithmetic."""
    who, thing = rng.choice(PEOPLE), rng.choice(["rolls", "stamps", "seedlings", "tiles", "tickets", "eggs", "bricks"])
    count = rng.randint(20, 400)
    story, steps = [f"{who} starts the week with {count} {thing}."], []
    for _ in range(rng.randint(3, 9)):
        said, step, count = _event(rng, who, thing, count)
        story.append(said)
        steps.append(step)
    price = rng.randint(2, 19)
    if rng.random() < 0.5:
        story.append(f"At the end {who} sells all of them at {price} coins each. How many coins is that?")
        steps.append(f"{count} {thing} at {price} coins are {count} * {price} = {count * price} coins.")
        count *= price
    else:
        story.append(f"How many {thing} does {who} have in the end?")
    solution = "\n".join(f"Step {i}: {step}" for i, step in enumerate(steps, 1))
    return f"Problem. {' '.join(story)}\nSolution.\n{solution}\nAnswer: {count}\n"


def _event(rng: random.Random, who: str, thing: str, count: int) -> tuple[str, str, int]:
    """One event: its sentence, its step of the solution, and the new count."""
    day, friend, n = rng.choice(DAYS), rng.choice([name for name in PEOPLE if name != who]), rng.randint(2, 60)
    divisors = [d for d in range(2, 10) if count % d == 0 and count > 20 * d]
    kind = rng.choice(["gain", "boxes", "loss", "percent", "share"])
    if kind == "share" and divisors:
        d = rng.choice(divisors)
        said = f"On {day} {who} and {d - 1} others share everything equally."
        return said, f"One share is {count} / {d} = {count // d} {thing}.", count // d
    if kind == "percent" and count % 20 == 0 and count > 20:
        p = rng.choice([5, 10, 20, 25])
        lost = count * p // 100
        said = f"On {day} {p} percent of the {thing} turn out to be spoilt."
        return said, f"{p} percent of {count} are {lost}, and {count} - {lost} = {count - lost}.", count - lost
    if kind == "loss" and count > n:
        return f"On {day} {friend} takes {n} of them.", f"{count} - {n} = {count - n} {thing}.", count - n
    if kind == "boxes":
        m = rng.randint(2, 12)
        said = f"On {day} {friend} brings {n} boxes with {m} {thing} each."
        return said, f"{n} * {m} = {n * m}, and {count} + {n * m} = {count + n * m} {thing}.", count + n * m
    return f"On {day} {who} finds {n} more.", f"{count} + {n} = {count + n} {thing}.", count + n


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
    ``tasks``."""

    data: DataSpec = knob(DataSpec(seed=1), "Texts to measure on.")
    tasks: tuple[str, ...] = knob(
        tuple(TASKS), "Embedded tasks, retrieval:TOKENS, completion:TOKENS or lm-eval:NAME[:METRIC]; [] for none."
    )
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

    tasks: tuple[str, ...] = knob(
        ("ledger", "chain", "times"), "Embedded tasks, retrieval:TOKENS, completion:TOKENS or lm-eval:NAME[:METRIC]."
    )
    num_problems: Size = knob(16, "Problems of each task.")
    num_trials: Size = knob(30, "Trials in all; a larger number continues the study.")
    low: Annotated[float, Field(gt=0)] = knob(0.1, "Lowest threshold.")
    high: float = knob(2.0, "Highest threshold.")
    fit_range: bool = knob(False, "Instead of high: the score that 1 % of the channels exceed.")
    max_bits: Bits | None = knob(None, "Cap on all-in bits per cached value.")
    fit_capacity: bool = knob(True, "A tier's capacity is what pages need, not the recipe's share.")
    page_share: Annotated[Share, Field(gt=0)] = knob(0.95, "Share of the pages whose need a capacity covers.")
    seed: Annotated[Seed, Field(lt=MAX_SEED)] = knob(0, "Seed of the search and of its problems.")

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"expected low = {self.low} < high = {self.high}")
        if not self.tasks:
            raise ValueError(f"no tasks, expected some of {sorted(TASKS)}, or {LM_EVAL}NAME of lm-eval")
        _require_tasks(self.tasks)
