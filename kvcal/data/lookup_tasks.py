"""Texts in which something has to be found again, with what of them is an answer.

rows     orders as JSON lines, then the same as CSV, as in LongProc (arXiv 2501.05414); answers: the rows
pairs    a number for each key, then all keys in another order; answers: the numbers
late     facts in varied sentences among word problems, asked for at the end in another order
hops     as late, but two facts lead to each answer: who looks after which animal, and where that one lives
copies   words, then again in the same order; answers: eight words each
calls    requests in sentences, then a tool call in JSON for each, in the same order; answers: the calls

A form takes a generator and how many facts to write, and gives parts of text, each with whether it is an
answer. ``kvcal.data.reading`` makes texts of one length of them. Nothing is shared with the calibration texts
of ``kvcal.data.lookups``. The same ``random.Random`` state always gives the same text. Left out: answers that
are no copy of what was said.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import islice

from kvcal.data.word_problems import DAYS, PEOPLE, word_problem

# fmt: off
COLOURS = ["amber", "black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow"]
ANIMALS = ["bear", "camel", "crow", "deer", "eagle", "fox", "goat", "horse", "lion", "owl", "rabbit", "tiger", "wolf"]
CITIES = ["Lisbon", "Oslo", "Kyoto", "Quito", "Dakar", "Bergen", "Porto", "Riga", "Hanoi", "Galway", "Turin", "Cusco"]
GOODS = ["lamp", "notebook", "raincoat", "battery", "map", "candle", "pump", "blanket", "kettle", "mirror", "basket"]
FACTS = ["The {key} sleeps in box {n}.", "Box {n} belongs to the {key}.", "You will find the {key} in box {n}.",
         "Since last week box {n} is home to the {key}.", "They moved the {key} into box {n}."]
CARES = ["{who} looks after the {key}.", "The {key} is fed by {who}.", "It is {who} who walks the {key}."]
REQUESTS = ["{who} wants {count} of the {item}, to {city}, by {day}.",
            "On {day} send {who} in {city} {count} of the {item}.",
            "By {day} {count} of the {item} should reach {city}, for {who}."]
# fmt: on
GIVEN = 2  # rows and calls that show the form
COPIED = 8  # words of an answer
Part = tuple[str, bool]  # text, and whether it is an answer
Form = Callable[[random.Random, int], list[Part]]


def rows(rng: random.Random, count: int) -> list[Part]:
    orders = [
        {
            "order": rng.randint(1000, 9999),
            "name": rng.choice(PEOPLE),
            "city": rng.choice(CITIES),
            "item": f"{rng.choice(COLOURS)} {rng.choice(GOODS)}",
            "sum": f"{rng.randint(10, 999)}.{rng.randint(0, 99):02d}",
        }
        for _ in range(count)
    ]
    parts = [("Orders:\n" + "".join(json.dumps(order) + "\n" for order in orders) + "\nAs CSV:\n", False)]
    parts.append((",".join(orders[0]) + "\n", False))
    for number, order in enumerate(orders):
        parts += [(",".join(map(str, order.values())), number >= GIVEN), ("\n", False)]
    return parts


def pairs(rng: random.Random, count: int) -> list[Part]:
    numbers = dict(zip(_keys(rng, count), (str(rng.randint(1000, 9999)) for _ in range(count)), strict=True))
    parts = [("Numbers:\n" + "".join(f"{key}: {number}\n" for key, number in numbers.items()) + "\nAgain:\n", False)]
    for key in rng.sample(list(numbers), count):
        parts += [(f"{key}: ", False), (numbers[key], True), ("\n", False)]
    return parts


def late(rng: random.Random, count: int) -> list[Part]:
    boxes = {key: str(rng.randint(100, 999)) for key in _keys(rng, count)}
    told = [rng.choice(FACTS).format(key=key, n=box) for key, box in boxes.items()]
    parts = [("".join(f"{word_problem(rng)}{said}\n" for said in told) + "\n", False)]
    for key in rng.sample(list(boxes), count):
        parts += [(f"The {key} is in box ", False), (boxes[key], True), (".\n", False)]
    return parts


def hops(rng: random.Random, count: int) -> list[Part]:
    keys = _keys(rng, count)
    people = rng.sample([f"{who} {letter}." for who in PEOPLE for letter in "ABCDEFGHIJKLMNOPRSTUVW"], count)
    boxes = {who: str(rng.randint(100, 999)) for who in people}
    told = [rng.choice(CARES).format(who=who, key=key) for who, key in zip(people, keys, strict=True)]
    told += [rng.choice(FACTS).format(key=key, n=boxes[who]) for who, key in zip(people, keys, strict=True)]
    rng.shuffle(told)
    halves = zip(told[::2], told[1::2], strict=True)
    parts = [("".join(f"{one}\n{word_problem(rng)}{other}\n" for one, other in halves) + "\n", False)]
    for who in rng.sample(people, count):
        parts += [(f"The animal of {who} is in box ", False), (boxes[who], True), (".\n", False)]
    return parts


def copies(rng: random.Random, count: int) -> list[Part]:
    vocabulary = [*COLOURS, *ANIMALS, *GOODS, *map(str.lower, PEOPLE), *map(str.lower, DAYS), *map(str.lower, CITIES)]
    lines = [" ".join(rng.choice(vocabulary) for _ in range(COPIED)) for _ in range(count)]
    parts = [("Words: " + " ".join(lines) + "\nThe same words: ", False)]
    for line in lines:
        parts += [(line, True), (" ", False)]
    return parts


def calls(rng: random.Random, count: int) -> list[Part]:
    wanted = [
        {
            "item": f"{rng.choice(COLOURS)} {rng.choice(GOODS)}",
            "count": rng.randint(2, 99),
            "name": rng.choice(PEOPLE),
            "city": rng.choice(CITIES),
            "day": rng.choice(DAYS),
        }
        for _ in range(count)
    ]
    said = [rng.choice(REQUESTS).format(who=one["name"], **one) for one in wanted]
    parts = [("Requests:\n" + "".join(f"{line}\n" for line in said) + "\nCalls:\n", False)]
    for number, one in enumerate(wanted):
        parts += [(json.dumps({"tool": "send", "arguments": one}), number >= GIVEN), ("\n", False)]
    return parts


def _keys(rng: random.Random, count: int) -> list[str]:
    """Different ones, such as "red fox of Bruno"."""
    every = [f"{colour} {animal} of {who}" for colour in COLOURS for animal in ANIMALS for who in PEOPLE]
    return list(islice(rng.sample(every, count), count))


FORMS: dict[str, Form] = {
    "rows": rows, "pairs": pairs, "late": late, "hops": hops, "copies": copies, "calls": calls,
}  # fmt: skip
