"""Calibration text that looks up: records that are written twice, in two forms and often in another order.

A token that has to be found again is where few bits hurt first, and ordinary text has few of them. So a
quarter of the default calibration texts are documents that say everything twice: sheets of records as TOML,
YAML, XML, HTML, LaTeX, SQL or calls of a constructor, and then the same in another of these forms, in the
same order, reversed, shuffled, or sorted by a field as a ledger is by its accounts; listings that are copied;
glossaries whose terms are used. The loss covers what can be looked up: the second writing, but for the
opening that shows its form.

They are drawn for any tokenizer and language model. Nothing is shared with what is measured
(kvcal.data.reading, kvcal.data.tasks and the scripts of ``lab``): no form (neither JSON nor CSV, no
questions), no list of words, no shape of numbers. The same ``random.Random`` state always gives the same
document. Left out: other languages than English and forms that are nested deeper than two levels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvcal.data.pools import Purpose
from kvcal.data.sources import Marked
from kvcal.data.tasks import dealt

# fmt: off
MATERIALS = ["basalt", "copper", "linen", "cedar", "quartz", "felt", "pewter", "cork", "slate", "wicker", "nickel",
             "marble", "hemp", "enamel", "bronze", "walnut", "plaster", "zinc", "velvet", "granite"]
OBJECTS = ["hinge", "valve", "gasket", "bracket", "lantern", "pulley", "spindle", "bearing", "socket", "buckle",
           "funnel", "anvil", "ratchet", "nozzle", "piston", "shutter", "grommet", "toggle", "clamp", "rivet"]
STATES = ["sealed", "pending", "returned", "archived", "on loan", "recast", "withdrawn", "approved", "split"]
SYLLABLES = ["bra", "vel", "tor", "min", "sar", "quo", "lith", "pen", "dra", "hul", "ost", "kem", "nar", "fen", "gol",
             "tush", "wick", "plo", "zer", "mab", "cry", "dun", "eth", "rol"]
TITLES = ["Stock of the north depot", "Inspection sheet", "Register of deliveries", "Workshop inventory",
          "Extract from the accounts", "Loans of the collection", "Spare parts by shelf", "Transfers of the quarter"]
BRIDGES = ["The same entries, rewritten:", "Converted for the archive:", "Second copy, checked against the first:",
           "As the other office keeps them:", "Sheet 2, from sheet 1:"]
# fmt: on
GIVEN = 2  # records of the second writing that show its form
FEWEST, MOST = 5, 40  # records of a sheet, entries of a glossary, lines of a listing
MOST_COPIES = 3  # writings of a listing after the first
Record = dict[str, str]


def lookup_documents(count: int, seed: int, purpose: Purpose) -> Iterator[Marked]:
    """``count`` documents of a purpose's pool, some hundred to some thousand tokens each."""
    return islice(dealt(document, purpose, f"lookups:{seed}", lambda drawn: list(drawn.spans)), count)


def document(rng: random.Random) -> Marked:
    """One document: a sheet of records in most cases."""
    kind = rng.choices([sheet, listing, glossary], weights=[6, 2, 2])[0]
    return kind(rng, round(FEWEST * (MOST / FEWEST) ** rng.random()))


def sheet(rng: random.Random, count: int) -> Marked:
    """``count`` records in one form, and then in another form and order."""
    fields = rng.sample(list(FIELDS), rng.randint(2, 5))
    records = [{"id": _mark(rng)} | {field: FIELDS[field](rng) for field in fields} for _ in range(count)]
    first, second = rng.sample(list(FORMS), 2)
    before, after = (
        [FORMS[form](one) for one in of] for form, of in ((first, records), (second, _again(rng, records)))
    )
    opening = "\n".join([rng.choice(TITLES), "", *before, "", rng.choice(BRIDGES), *after[:GIVEN], ""])
    return Marked(((opening, False), ("\n".join([*after[GIVEN:], ""]), True)))


def listing(rng: random.Random, count: int) -> Marked:
    """Lines of paths, digits and made-up words, then one to ``MOST_COPIES`` copies with other marks before
    each line."""
    lines = [rng.choice([_path, _dump, _phrase])(rng) for _ in range(count)]
    marks = rng.sample(["> ", "    ", "* ", "; ", "% ", "+"], rng.randint(1, MOST_COPIES))
    copies = [f"\nCopy {number}\n" + "".join(f"{mark}{line}\n" for line in lines) for number, mark in enumerate(marks)]
    return Marked((("Listing\n" + "\n".join([*lines, ""]), False), *((copy, True) for copy in copies)))


def glossary(rng: random.Random, count: int) -> Marked:
    """Made-up terms with what they stand for, then sentences that use each term and say it again."""
    terms = {_word(rng).capitalize(): f"{rng.choice(STATES)} {_thing(rng)} {_mark(rng)}" for _ in range(count)}
    head = "".join(f"{term} stands for the {thing}.\n" for term, thing in terms.items())
    uses = rng.sample(list(terms.items()), len(terms))
    text = "".join(f"The {term}, which is the {thing}, was seen.\n" for term, thing in uses)
    return Marked(((f"Terms\n{head}\nUses\n", False), (text, True)))


def _again(rng: random.Random, records: Sequence[Record]) -> list[Record]:
    """The records in the order of the second writing."""
    order = rng.choice(["same", "same", "reversed", "shuffled", "sorted"])
    if order == "same":
        return list(records)
    if order == "reversed":
        return list(reversed(records))
    if order == "shuffled":
        return rng.sample(list(records), len(records))
    field = rng.choice(list(records[0]))
    return sorted(records, key=lambda record: record[field])


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def _thing(rng: random.Random) -> str:
    return f"{rng.choice(MATERIALS)} {rng.choice(OBJECTS)}"


def _mark(rng: random.Random) -> str:
    return f"{rng.choice('BDFHKMQTVX')}{rng.choice('BDFHKMQTVX')}-{rng.randint(10_000, 99_999)}"


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1871, 1964)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _path(rng: random.Random) -> str:
    return "/".join([_word(rng) for _ in range(rng.randint(2, 4))]) + rng.choice([".tar", ".bin", ".log", ".map"])


def _dump(rng: random.Random) -> str:
    return " ".join(f"{rng.randrange(1 << 16):04x}" for _ in range(rng.randint(3, 6)))


def _phrase(rng: random.Random) -> str:
    return " ".join(_word(rng) for _ in range(rng.randint(4, 9))) + "."


FIELDS: dict[str, Callable[[random.Random], str]] = {
    "part": _thing,
    "maker": lambda rng: f"{_word(rng).capitalize()} & {_word(rng).capitalize()}",
    "state": lambda rng: rng.choice(STATES),
    "received": _date,
    "hour": lambda rng: f"{rng.randrange(24):02d}h{rng.randrange(60):02d}",
    "weight": lambda rng: f"{rng.randint(1, 99)},{rng.randrange(1000):03d} kg",
    "checksum": lambda rng: f"{rng.randrange(1 << 32):08x}",
    "release": lambda rng: f"{rng.randint(0, 9)}.{rng.randint(0, 30)}.{rng.randint(0, 30)}",
    "account": lambda rng: f"{rng.randint(20, 79)}/{rng.randint(100, 999)}/{rng.randint(0, 9)}",
    "place": _path,
}
FORMS: dict[str, Callable[[Record], str]] = {
    "toml": lambda record: "[[entry]]\n" + "".join(f"{key} = '{value}'\n" for key, value in record.items()),
    "yaml": lambda record: "- " + "\n  ".join(f"{key}: {value}" for key, value in record.items()),
    "attributes": lambda record: "<entry " + " ".join(f'{key}="{value}"' for key, value in record.items()) + "/>",
    "elements": lambda record: "<e>" + "".join(f"<{key}>{value}</{key}>" for key, value in record.items()) + "</e>",
    "html": lambda record: "<tr>" + "".join(f"<td>{value}</td>" for value in record.values()) + "</tr>",
    "latex": lambda record: " & ".join(record.values()) + r" \\",
    "sql": lambda record: "INSERT INTO entries VALUES (" + ", ".join(f"'{value}'" for value in record.values()) + ");",
    "calls": lambda record: "Entry(" + ", ".join(f"{key}='{value}'" for key, value in record.items()) + ")",
    "prose": lambda record: "Its " + "; its ".join(f"{key} is {value}" for key, value in record.items()) + ".",
}
