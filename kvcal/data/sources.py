"""Sources of calibration text: how one is spelled, and its items, read as a stream.

A source is spelled alike in a recipe's [data] and after --data, as its name and then options:

    auto                                 the tasks for an embedded model, installed text for a user's
    python:code, python:docs             text of the installed packages, which needs no network
    python:chat                          conversations on them, for a model with a chat template
    lookups                              generated documents that say everything twice (kvcal.data.lookups)
    my.jsonl,columns=question+answer     a file or a folder
    owner/name,config=en,split=test      a data set on the hub

Yields three kinds of item: a ``Piece`` of plain text, a ``Pair`` with a prompt and a completion, and a
``Chat`` (what is generated is a ``Pair``, too, or ``Marked``); of each, those that are dealt to one pool (see
kvcal.data.pools). Which of them is decided once per source, by the file's extension or by the columns of its
first record. Nothing is read before it is asked for, so sixteen samples of a 10 GB file cost what sixteen
samples cost. A table's document longer than 64 KiB is dealt in pieces, as a text file is.

``datasets`` is imported on first use: it takes seconds, and the embedded tasks do not need it.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvcal.artifact import require_file
from kvcal.data.installed import installed_chats, installed_sha256, installed_texts
from kvcal.data.pools import Purpose, SourceId, dealt_pieces, pool_of
from kvcal.data.tasks import TASKS
from kvcal.errors import UsageError

AUTO = "auto"
TASK_SOURCES = ("tasks", *(f"tasks:{name}" for name in TASKS))
# Sources that need neither a file nor a network. A model without data is calibrated on them.
CHAT = "python:chat"
INSTALLED = ("python:docs", "python:code", CHAT)
LOOKUPS = "lookups"
SOURCES = (AUTO, *TASK_SOURCES, *INSTALLED, LOOKUPS)
OPTIONS = ("columns", "split", "config")
_OPTION = re.compile(r",(\w+)=([^,=/\\]*)$")
EXTENSIONS = dict.fromkeys((".txt", ".text", ".md", ".tex", ".raw"), "text")
EXTENSIONS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "json") | {".parquet": "parquet"}
KNOWN_COLUMNS = (("messages",), ("text",), ("content",), ("question", "answer"))
LONG_CHARS = 1 << 16
MAX_OPEN_FILES = 16
HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class Source:
    """``name``: of one of SOURCES, a path, or a hub id. ``columns``: one of text or messages, or a prompt and
    a completion; empty: the first that exists of KNOWN_COLUMNS. ``split`` and ``config``: of a hub id."""

    name: str
    columns: tuple[str, ...] = ()
    split: str | None = None
    config: str | None = None

    @property
    def path(self) -> Path:
        return Path(self.name).expanduser()

    @property
    def is_local(self) -> bool:
        return self.name not in SOURCES and self.path.exists()

    @property
    def label(self) -> str:
        """For people and provenance: a path's last part, a hub id or "tasks" as it is."""
        return self.path.resolve().name if self.is_local else self.name


def read_spelling(text: str) -> Source:
    """A source by its spelling. UsageError for an unknown option, and for an unknown generated source."""
    name, options = text, dict[str, str]()
    while found := _OPTION.search(name):
        option, value = found.groups()
        if option not in OPTIONS:
            raise UsageError(
                f"source = {text!r}: unknown option {option!r}; allowed: {', '.join(OPTIONS)}",
                hint="for example my.jsonl,columns=question+answer",
            )
        if option in options or not value:
            reason = "given twice" if option in options else "empty"
            raise UsageError(f"source = {text!r}: {option} is {reason}", hint="give each option once, with a value")
        options[option] = value
        name = name[: found.start()]
    if not name:
        raise UsageError(f"source = {text!r} is empty", hint="give tasks, python:docs, a file, a folder or a hub id")
    family = name.partition(":")[0]
    if ":" in name and name not in SOURCES and family in {one.partition(":")[0] for one in SOURCES}:
        allowed = ", ".join(one for one in SOURCES if one.startswith(family))
        raise UsageError(f"source = {name!r} is unknown", hint=f"choose one of: {allowed}")
    if name in SOURCES and options:
        raise UsageError(f"source = {text!r}: {', '.join(OPTIONS)} are for files and data sets", "leave them out")
    columns = tuple(options["columns"].split("+")) if "columns" in options else ()
    if len(columns) > 2:
        raise UsageError(f"source = {text!r}: {len(columns)} columns", hint="name one, or a prompt and a completion")
    return Source(name, columns, options.get("split"), options.get("config"))


def read_spellings(texts: Sequence[str]) -> tuple[Source, ...]:
    """The sources, in order; "auto" is the tasks as long as no model is known. UsageError as
    ``read_spelling``, and for none, for "auto" with others, and for a source that is given twice."""
    if not texts:
        raise UsageError("source = [] is empty", hint="give tasks, python:docs, a file, a folder or a hub id")
    if AUTO in texts and len(texts) > 1:
        raise UsageError("source = 'auto': auto stands for all sources", hint="name tasks or python:docs instead")
    found = tuple(read_spelling(TASK_SOURCES[0] if text == AUTO else text) for text in texts)
    seen: list[Source] = []
    for source in found:
        same = replace(source, name=str(source.path.resolve())) if source.is_local else source
        if same in seen:
            raise UsageError(f"source {source.name!r} is given twice", hint="give it once")
        seen.append(same)
    return found


@dataclass(frozen=True)
class Piece:
    """A plain document, or a part of one that the next piece does not continue."""

    text: str


@dataclass(frozen=True)
class Pair:
    """A prompt and the completion that a model should give."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """Messages for ``tokenizer.apply_chat_template``: mappings with role and content; ``index`` counts a
    source's records."""

    messages: tuple[Mapping[str, Any], ...]
    index: int


@dataclass(frozen=True)
class Marked:
    """A document in spans, each with whether it is in the loss: what can be looked up in what is before
    it."""

    spans: tuple[tuple[str, bool], ...]


Item = Piece | Pair | Chat | Marked
Dealt = tuple[Purpose, Item]


def identify_source(source: Source) -> SourceId:
    """Raises UsageError for a path without a supported file."""
    digest = hashlib.sha256()
    if not source.is_local:
        made_of = installed_sha256() if source.name in INSTALLED else f"{source.config}:{source.split}"
        digest.update(f"{source.name}:{made_of}".encode())
    elif source.path.is_file():
        with open(source.path, "rb") as file:
            digest.update(f"{source.path.stat().st_size}:".encode() + file.read(HEAD_BYTES))
    else:
        for file_path in sorted(_local_files(source.path, seed=0)[1]):
            name = file_path.relative_to(source.path).as_posix()
            digest.update(f"{name}:{file_path.stat().st_size};".encode())
    return SourceId(source.label, digest.hexdigest())


def read_source(source: Source, seed: int, purpose: Purpose) -> Iterator[Item]:
    """Stream those items of a file, folder, hub id or installed text that are in the pool of ``purpose``;
    ``seed`` orders the files of a folder.

    Raises UsageError (while iterating): missing path, unsupported or mixed extensions, ``split`` or
    ``config`` with a path, an unreachable hub id, unreadable content, an unknown column, a column of the
    wrong type, no item at all.
    """
    name = source.name
    if name == CHAT:
        yield from (Chat(tuple(talk), index) for index, talk in enumerate(installed_chats(purpose)))
        return
    if name in INSTALLED:  # which is dealt by file: of a long one the beginning, so that no file is the sample
        yield from (Piece(text[:LONG_CHARS]) for text in installed_texts(name, purpose))
        return
    items: Iterator[Dealt]
    if source.is_local:
        for option, value in (("split", source.split), ("config", source.config)):
            if value is not None:
                raise UsageError(f"{option} = {value!r} with the local source {name}", hint=f"{option} is for hub ids")
        kind, files = _local_files(source.path, seed)
        records = (record for file in files for record in _stream(kind, file))
        items = _text_pieces(files) if kind == "text" else _items(records, source)
    elif name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or _kind(name) is not None:
        raise UsageError(f"source = {name}: no such file or folder", hint="check the path")
    else:
        items = _items(_hub_records(source), source)
    is_empty = True
    for pool, item in items:
        is_empty = False
        if pool == purpose:
            yield item
    if is_empty:
        raise UsageError(f"source = {name} is empty", hint="it needs at least one text that is not blank")


def _kind(name: str | Path) -> str | None:
    suffixes = Path(name).suffixes
    if suffixes and suffixes[-1].lower() == ".gz":
        suffixes = suffixes[:-1]
    return EXTENSIONS.get(suffixes[-1].lower()) if suffixes else None


def _local_files(path: Path, seed: int) -> tuple[str, list[Path]]:
    """The kind and the files of a path; hidden files, READMEs and unknown extensions in a folder are passed
    over."""
    allowed = f"supported: {', '.join(EXTENSIONS)} (also with .gz)"
    if not path.is_dir():
        require_file(path, UsageError)
        kind = _kind(path)
        if kind is None:
            raise UsageError(f"source = {path}: extension {path.suffix!r} is not supported", hint=allowed)
        return kind, [path]
    relative = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    visible = [file for file in relative if not any(part.startswith(".") for part in file.parts)]
    data = sorted(f.as_posix() for f in visible if _kind(f) is not None and f.stem.lower() != "readme")
    kinds = Counter(str(_kind(name)) for name in data)
    if not data:
        raise UsageError(f"source = {path}: the folder holds no supported file", hint=allowed)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise UsageError(f"source = {path} mixes kinds of files: {counts}", hint="name one file or a subfolder")
    random.Random(f"files:{seed}").shuffle(data)
    return next(iter(kinds)), [path / name for name in data]


def _stream(kind: str, file: Path) -> Iterator[dict[str, Any]]:
    """The records of one file; what ``datasets`` cannot read becomes a UsageError that names the file."""
    from datasets import load_dataset

    if file.stat().st_size == 0:
        return
    try:
        if kind == "text":
            yield from load_dataset(kind, data_files=str(file), split="train", streaming=True, keep_linebreaks=True)
        else:
            yield from load_dataset(kind, data_files=str(file), split="train", streaming=True)
    except (ValueError, OSError, RecursionError) as error:  # pyarrow's and unicode's errors are ValueErrors
        raise UsageError(f"source = {file} cannot be read as {kind}: {error}", hint="check the file") from error


def _text_pieces(files: list[Path]) -> Iterator[Dealt]:
    """Pieces of the files in turn, so that a folder's first book does not make up the whole sample."""
    waiting = iter(files)
    active: deque[Iterator[tuple[Purpose, str]]] = deque()
    while True:
        active.extend(
            dealt_pieces(line["text"] for line in _stream("text", file))
            for file in islice(waiting, MAX_OPEN_FILES - len(active))
        )
        if not active:
            return
        pieces = active.popleft()
        dealt = next(pieces, None)
        if dealt is not None:
            active.append(pieces)
            yield dealt[0], Piece(dealt[1])


def _hub_records(source: Source) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        # Offline, a stream cannot be opened, but a data set that is in the local cache can.
        is_streamed = not datasets.config.HF_HUB_OFFLINE
        yield from datasets.load_dataset(
            source.name, name=source.config, split=source.split or "train", streaming=is_streamed
        )
    except (ValueError, OSError) as error:  # not found, no such split or config, no connection
        raise UsageError(
            f"source = {source.name} is no file or folder here, and as a hub id it cannot be opened: {error}",
            hint="check the name, its config and split, and the network",
        ) from error


def _items(records: Iterator[dict[str, Any]], source: Source) -> Iterator[Dealt]:
    columns: tuple[str, ...] = ()
    for index, record in enumerate(records):
        columns = columns or _choose_columns(record, source)
        values = [record.get(column) for column in columns]
        if any(value in (None, []) or (isinstance(value, str) and not value.strip()) for value in values):
            continue
        match values:
            case [list() as messages] if all(isinstance(message, dict) for message in messages):
                yield pool_of(messages), Chat(tuple(messages), index)
            case [str() as text] if len(text) <= LONG_CHARS:
                yield pool_of(text), Piece(text)
            case [str() as text]:
                pieces = dealt_pieces(iter(text.splitlines(keepends=True)))
                yield from ((pool, Piece(piece)) for pool, piece in pieces)
            case [str() as prompt, str() as completion]:
                yield pool_of([prompt, completion]), Pair(prompt + "\n", completion)
            case _:
                kinds = zip(columns, values, strict=True)
                found = " and ".join(f"column {name!r} holds {type(value).__name__}" for name, value in kinds)
                raise UsageError(
                    f"source = {source.name}, record {index}: {found}; expected text, or a list of messages",
                    hint="name other columns, such as FILE,columns=prompt+reply",
                )


def _choose_columns(record: dict[str, Any], source: Source) -> tuple[str, ...]:
    present = ", ".join(record)
    missing = [column for column in source.columns if column not in record]
    if missing:
        raise UsageError(f"source = {source.name} has no column {missing[0]!r}", hint=f"its columns: {present}")
    for names in (source.columns,) if source.columns else KNOWN_COLUMNS:
        if all(name in record for name in names):
            return names
    expected = ", ".join(" + ".join(names) for names in KNOWN_COLUMNS)
    raise UsageError(
        f"source = {source.name}: none of the known columns ({expected}) is among its columns: {present}",
        hint="name the column (text or messages) or two (prompt, completion)",
    )
