"""Sources of calibration text: how one is spelled, and how sequences are shared out among several by weight.

A source is spelled alike in a recipe's [data] and after --data, as its name and then options:

    auto                                          the tasks for an embedded model, installed text for a user's
    python:code, python:docs                      text of the installed packages, which needs no network
    my.jsonl,weight=2,kind=dialogue               a path, of any system
    owner/name,config=en,split=test,columns=q+a   a data set on the hub

Sequences are apportioned to the sources by weight (largest remainder; of equal remainders the first source's counts).
A source without a kind of its own is of the kind of its name, so that no guess is made about a user's text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvcal.data.tasks import TASKS
from kvcal.errors import UsageError

KINDS = ("prose", "math", "code", "dialogue", "reasoning")
AUTO = "auto"
TASK_SOURCES = ("tasks", *(f"tasks:{name}" for name in TASKS))
# Sources that need neither a file nor a network, and their kind. A model without data is calibrated on INSTALLED.
INSTALLED = {"python:docs": "prose", "python:code": "code"}
SOURCES = (AUTO, *TASK_SOURCES, *INSTALLED)
_OPTION = re.compile(r",(\w+)=([^,=/\\]*)$")


@dataclass(frozen=True)
class Part:
    """One source of a calibration. ``kind`` is None where the source's own is meant; ``columns``, ``split`` and
    ``config`` as in DataSpec."""

    source: str
    weight: float = 1.0
    kind: str | None = None
    columns: tuple[str, ...] = ()
    split: str | None = None
    config: str | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """The key by which two parts are the same source."""
        path = Path(self.source).expanduser()
        name = str(path.resolve()) if self.source not in SOURCES and path.exists() else self.source
        return name, self.columns, self.split, self.config


# Well-known public sets by a short name, for those with a network; a path of that name comes first.
PUBLIC = {
    "wikitext": Part("Salesforce/wikitext", 1.0, "prose", ("text",), "train", "wikitext-103-raw-v1"),
    "codeparrot": Part("codeparrot/codeparrot-clean-valid", 1.0, "code", ("content",), "train"),
    "gsm8k": Part("openai/gsm8k", 1.0, "math", ("question", "answer"), "train", "main"),
    "ultrachat": Part("HuggingFaceH4/ultrachat_200k", 1.0, "dialogue", ("messages",), "train_sft"),
    "openr1": Part("open-r1/OpenR1-Math-220k", 1.0, "reasoning", ("messages",), "train", "default"),
}


def read_part(text: str) -> Part:
    """A source by its spelling. UsageError for an unknown option, kind or generated source, and a weight that is not
    from 1e-6 to 1e6."""
    source, options = text, dict[str, str]()
    while found := _OPTION.search(source):
        name, value = found.groups()
        if name not in ("weight", "kind", "columns", "split", "config"):
            raise UsageError(
                f"source = {text!r}: unknown option {name!r}; allowed: weight, kind, columns, split, config",
                hint="for example my.jsonl,weight=2,kind=dialogue",
            )
        if name in options or not value:
            reason = "given twice" if name in options else "empty"
            raise UsageError(f"source = {text!r}: {name} is {reason}", hint="give each option once, with a value")
        options[name] = value
        source = source[: found.start()]
    if not source:
        raise UsageError(f"source = {text!r} is empty", hint="give tasks, python:docs, a file, a folder or a hub id")
    family = source.partition(":")[0]
    if ":" in source and source not in SOURCES and family in {name.partition(":")[0] for name in SOURCES}:
        allowed = ", ".join(name for name in SOURCES if name.startswith(family))
        raise UsageError(f"source = {source!r} is unknown", hint=f"choose one of: {allowed}")
    weight, kind = _weight(text, options.get("weight", "1")), options.get("kind")
    if kind is not None and kind not in KINDS:
        raise UsageError(f"source = {text!r}: unknown kind {kind!r}", hint=f"choose one of: {', '.join(KINDS)}")
    columns = tuple(options["columns"].split("+")) if "columns" in options else ()
    part = Part(source, weight, kind, columns, options.get("split"), options.get("config"))
    if source in SOURCES and (columns or part.split or part.config):
        raise UsageError(f"source = {text!r}: columns, split and config are for files and data sets", "leave them out")
    return part


def _weight(text: str, value: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not 1e-6 <= weight <= 1e6:  # so that no sum or share of them overflows
        raise UsageError(f"source = {text!r}: weight = {value}; allowed: 1e-6 to 1e6", hint="such as weight=2")
    return weight


def read_parts(texts: Sequence[str]) -> tuple[Part, ...]:
    """The sources, in order, with public sets by their ids; "auto" is the tasks as long as no model is known.
    UsageError as ``read_part``, and for a source that is given twice."""
    if not texts:
        raise UsageError("source = [] is empty", hint="give tasks, python:docs, a file, a folder or a hub id")
    parts: list[Part] = []
    for text in texts:
        part = read_part(text)
        if part.source == AUTO:
            if text != AUTO or len(texts) > 1:
                raise UsageError(
                    f"source = {text!r}: auto stands for all sources", hint="name tasks or python:docs instead"
                )
            parts.append(Part(TASK_SOURCES[0]))
        else:
            parts.append(_public(part))
    seen: set[tuple[object, ...]] = set()
    for part in parts:
        if part.identity in seen:
            raise UsageError(
                f"source {part.source!r} is given twice",
                hint="give it once; a weight, such as weight=2, makes it count for more",
            )
        seen.add(part.identity)
    return tuple(parts)


def _public(part: Part) -> Part:
    public = None if Path(part.source).expanduser().exists() else PUBLIC.get(part.source)
    if public is None:
        return part
    given = {name: value for name in ("kind", "columns", "split", "config") if (value := getattr(part, name))}
    return replace(public, weight=part.weight, **given)


def apportion(parts: Sequence[Part], num_samples: int) -> list[int]:
    """Sequences of each part, in all ``num_samples``. UsageError where a part gets none."""
    total = sum(part.weight for part in parts)
    shares = [num_samples * part.weight / total for part in parts]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: (round(counts[i] - shares[i], 9), i))
    for i in by_remainder[: num_samples - sum(counts)]:
        counts[i] += 1
    empty = [part.source for part, count in zip(parts, counts, strict=True) if not count]
    if empty:
        raise UsageError(
            f"num_samples = {num_samples} leaves no sequence for {empty[0]}, one of {len(parts)} sources by weight",
            hint="raise num_samples, or the weight of this source",
        )
    return counts


def interleaved(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(part, index in it) of all sequences, so that the first n hold about the same shares as all of them."""
    places = [((index + 0.5) / count, part, index) for part, count in enumerate(counts) for index in range(count)]
    return [(part, index) for _, part, index in sorted(places)]
