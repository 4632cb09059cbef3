"""Verifiable long chain-of-thought tasks, generated: prompt -> reasoning -> answer.

A quantized cache errs a little at every step, and a long chain of thought reads its own errors back. So the
honest end measure is exact-match accuracy on problems whose every step needs exact facts from far back:

ledger  apply a list of numbered transfers to named accounts, restating each step and the new balances;
chain   follow a pointer chain through a shuffled table far back in the prompt;
times   long multiplication with a digit-by-digit scratchpad.

The embedded model was trained on these with the default limits; lower limits give shorter generations of the
same kind. The same ``random.Random`` state always gives the same problem, in every process.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from kvcal.data.pools import Purpose, pool_of

# fmt: off
NAMES = [
    "ann", "bob", "cid", "dee", "eva", "fay", "gus", "hal", "ivy", "jon", "kim", "leo", "mia", "ned",
    "oda", "pam", "quin", "ray", "sue", "tom", "uma", "vic", "wes", "xan", "yan", "zoe",
]
# fmt: on
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
MIN_STEPS, MIN_SIZE, MIN_HOPS, MIN_DIGITS = 6, 20, 4, 2
THINK = "<think>\n"
Drawn = TypeVar("Drawn")
ANSWER = re.compile(r"^Answer: (\S+)[^\S\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class Problem:
    """One problem. ``prompt`` ends before the reasoning; ``answer`` is compared as an exact string."""

    task: str
    prompt: str
    reasoning: str
    answer: str

    @property
    def prompt_text(self) -> str:
        """The prompt and the opening of the reasoning, which a model is given."""
        return self.prompt + THINK

    @property
    def completion(self) -> str:
        """The text that a model which reasons perfectly writes after ``prompt_text``."""
        return f"{self.reasoning}</think>\nAnswer: {self.answer}\n"

    @property
    def text(self) -> str:
        """The whole training document, without the document separator."""
        return self.prompt_text + self.completion


def ledger(rng: random.Random, max_steps: int = 70) -> Problem:
    """3 to 8 accounts and ``MIN_STEPS`` to ``max_steps`` transfers; the final balance of one is asked."""
    people = rng.sample(NAMES, rng.randint(3, 8))
    balance = {person: rng.randint(10, 99) for person in people}
    num_steps = rng.randint(MIN_STEPS, max_steps)
    opening = "Ledger. " + " ".join(f"{person} {value}" for person, value in balance.items()) + "\n"
    lines, thoughts = [], []
    for i in range(1, num_steps + 1):
        line, thought = _ledger_step(rng, people, balance)
        if max(balance.values()) > 999:
            richest = max(balance, key=lambda person: balance[person])
            balance[richest] %= 100
            line += f", {richest} keeps last two"
            thought += f", {richest} {balance[richest]}"
        lines.append(f"{i}. {line}\n")
        thoughts.append(f"{i}. {line}: {thought}\n")
    asked = rng.choice(people)
    prompt = opening + "".join(lines) + f"Question: {asked}?\n"
    return Problem("ledger", prompt, "".join(thoughts), str(balance[asked]))


def _ledger_step(rng: random.Random, people: list[str], balance: dict[str, int]) -> tuple[str, str]:
    """One transfer, applied to ``balance`` in place: (its line, the line's arithmetic)."""
    a, b = rng.sample(people, 2)
    kind = rng.random()
    old_a, old_b = balance[a], balance[b]
    if kind < 0.5 and old_a > 0:
        x = rng.randint(1, min(old_a, 99))
        balance[a], balance[b] = old_a - x, old_b + x
        return f"{a} pays {b} {x}", f"{a} {old_a}-{x}={old_a - x}, {b} {old_b}+{x}={old_b + x}"
    if kind < 0.75:
        x = rng.randint(1, 99)
        balance[a] = old_a + x
        return f"{a} earns {x}", f"{a} {old_a}+{x}={old_a + x}"
    if kind < 0.9 or old_a == 0:
        balance[a] = old_b
        return f"{a} copies {b}", f"{b} {old_b}, {a} {old_b}"
    balance[a] = old_a // 2
    return f"{a} halves", f"{a} {old_a}/2={old_a // 2}"


def chain(rng: random.Random, max_size: int = 160, max_hops: int = 40) -> Problem:
    """A table of ``MIN_SIZE`` to ``max_size`` words, each pointing to another in one cycle, and ``MIN_HOPS``
    to ``max_hops`` hops from a word."""
    size = rng.randint(MIN_SIZE, max_size)
    hops = rng.randint(MIN_HOPS, max_hops)
    keys: list[str] = []
    seen: set[str] = set()
    while len(keys) < size:
        word = "".join(rng.choice(letters) for letters in (CONSONANTS, VOWELS, CONSONANTS, VOWELS))
        if word not in seen:
            seen.add(word)
            keys.append(word)
    for _ in keys:  # the training generator drew a target for each word first, then overwrote it by the cycle
        rng.choice(keys)
    cycle = keys.copy()
    rng.shuffle(cycle)
    target = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    table = [(key, target[key]) for key in keys]
    rng.shuffle(table)
    current = rng.choice(keys)
    pairs = ", ".join(f"{a} to {b}" for a, b in table)
    prompt, thoughts = f"Map. {pairs}\nQuestion: {current}, {hops} hops?\n", []
    for i in range(1, hops + 1):
        thoughts.append(f"{i}. {current} to {target[current]}\n")
        current = target[current]
    return Problem("chain", prompt, "".join(thoughts), current)


def times(rng: random.Random, max_digits: int = 7) -> Problem:
    """The product of two numbers of ``MIN_DIGITS`` to ``max_digits`` digits each."""
    num_digits_a, num_digits_b = rng.randint(MIN_DIGITS, max_digits), rng.randint(MIN_DIGITS, max_digits)
    a = rng.randint(10 ** (num_digits_a - 1), 10**num_digits_a - 1)
    b = rng.randint(10 ** (num_digits_b - 1), 10**num_digits_b - 1)
    thoughts, total = [], 0
    for shift, digit in enumerate(reversed(str(b))):
        carry, row = 0, []
        for e in reversed(str(a)):
            value = int(digit) * int(e) + carry
            row.append(f"{digit}x{e}+{carry}={value}")
            carry = value // 10
        product = int(digit) * a
        thoughts.append(f"row {digit}: {' '.join(row)} gives {product}\n")
        term = product * 10**shift
        thoughts.append(f"add {' '.join(_column_sums(total, term))} sum {total + term}\n")
        total += term
    return Problem("times", f"Times. {a} x {b}\nQuestion: product?\n", "".join(thoughts), str(total))


def _column_sums(a: int, b: int) -> list[str]:
    """Column addition of a and b from the last digit on, each column as ``digit+digit+carry=sum``."""
    width = max(len(str(a)), len(str(b)))
    columns, carry = [], 0
    for p, r in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        value = int(p) + int(r) + carry
        columns.append(f"{p}+{r}+{carry}={value}")
        carry = value // 10
    return columns


TASKS: dict[str, Callable[[random.Random], Problem]] = {"ledger": ledger, "chain": chain, "times": times}


def mixture(rng: random.Random) -> Problem:
    """A problem of the embedded model's training mixture: ledger 50 %, chain 30 %, times 20 %."""
    name = rng.choices(list(TASKS), weights=(5, 3, 2))[0]
    rng.random()  # the training run's curriculum draw: without effect here, kept so that streams agree
    return TASKS[name](rng)


def dealt(
    draw: Callable[[random.Random], Drawn], purpose: Purpose, name: str, content: Callable[[Drawn], Any]
) -> Iterator[Drawn]:
    """The items that ``draw`` makes without end, of one purpose's pool by its ``content`` (JSON), from the
    generator called ``name`` of that purpose."""
    rng = random.Random(f"{purpose}:{name}")  # a string seed: hashed by sha512, equal in every process
    while True:
        drawn = draw(rng)
        if pool_of(content(drawn)) == purpose:
            yield drawn


def prompt_of(problem: Problem) -> str:
    """The content that tells a problem from others."""
    return problem.prompt


def problems(
    task: str,
    count: int,
    seed: int,
    purpose: Purpose = "report",
    *,
    max_steps: int = 70,
    max_size: int = 160,
    max_hops: int = 40,
    max_digits: int = 7,
) -> tuple[Problem, ...]:
    """``count`` problems of one task. ``max_steps`` bounds a ledger, ``max_size`` and ``max_hops`` a chain,
    ``max_digits`` a multiplication; the defaults are the training distribution. The first n of a longer list
    are the shorter list. Never a problem that is drawn for another purpose, here or in
    kvcal.data.sequences."""
    draws: dict[str, Callable[[random.Random], Problem]] = {
        "ledger": partial(ledger, max_steps=max_steps),
        "chain": partial(chain, max_size=max_size, max_hops=max_hops),
        "times": partial(times, max_digits=max_digits),
    }
    return tuple(islice(dealt(draws[task], purpose, f"{task}:{seed}", prompt_of), count))


def extract_answer(text: str) -> str | None:
    """The X of the first line ``Answer: X`` in ``text`` (a completion, or a prompt and its completion), or
    None."""
    found = ANSWER.search(text)
    return found.group(1) if found else None
