"""Sources of calibration text: a file, a folder or a hub id, read as a stream through ``datasets``; or installed text.

Yields three kinds of item: a ``Piece`` of plain text, a ``Record`` with a prompt and a completion, and a ``Chat``; of
each, those that are dealt to one pool (see kvcal.data.pools). The kind is decided once per source, by the kind of file
or by the columns of its first record. Nothing is read before it is asked for, so sixteen samples of a 10 GB file cost
what sixteen samples cost. A table's document longer than 64 KiB is dealt in pieces, as a text file is.

``datasets`` is imported on first use: it takes seconds, and the embedded tasks do not need it. Left out: CSV, images,
and ShareGPT's from/value messages.
"""

from __future__ import annotations

import gzip
import hashlib
import random
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvcal.artifact import require_file
from kvcal.data.installed import installed_sha256, installed_texts
from kvcal.data.parts import INSTALLED, SOURCES, TASK_SOURCES
from kvcal.data.pools import Purpose, SourceId, dealt_pieces, pool_of
from kvcal.errors import UsageError

EXTENSIONS = dict.fromkeys((".txt", ".text", ".md", ".tex", ".raw"), "text")
EXTENSIONS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "json") | {".parquet": "parquet"}
KNOWN_COLUMNS = (("messages",), ("text",), ("content",), ("question", "answer"))
LONG_CHARS = 1 << 16
MAX_OPEN_FILES = 16
HEAD_BYTES = 1 << 16
MAX_DEPTH, CHECKED_BYTES = 100, 1 << 24  # of nested JSON
_STRINGS, _BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"'), re.compile(rb"[\[{]+|[\]}]+")


@dataclass(frozen=True)
class Piece:
    """A plain document, or a part of one that the next piece does not continue."""

    text: str


@dataclass(frozen=True)
class Record:
    """A prompt and the completion that a model should give."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """Messages for ``tokenizer.apply_chat_template``: mappings with role and content; ``index`` counts a source's
    records, None for a generated one, which may be rendered as plain text."""

    messages: tuple[Mapping[str, Any], ...]
    index: int


Item = Piece | Record | Chat
Dealt = tuple[Purpose, Item]


def identify_source(source: str, split: str | None = None, config: str | None = None) -> SourceId:
    """Raises UsageError for a path without a supported file."""
    path = Path(source).expanduser()
    digest = hashlib.sha256()
    if source in INSTALLED:
        digest.update(f"{source}:{installed_sha256()}".encode())
    elif source in TASK_SOURCES:
        digest.update(f"{source}:{config}:{split}".encode())
    elif path.is_file():
        with open(path, "rb") as file:
            digest.update(f"{path.stat().st_size}:".encode() + file.read(HEAD_BYTES))
    elif path.exists():
        for file_path in sorted(_local_files(path, seed=0)[1]):
            digest.update(f"{file_path.relative_to(path).as_posix()}:{file_path.stat().st_size};".encode())
    else:
        digest.update(f"{source}:{config}:{split}".encode())
    return SourceId(describe_source(source), digest.hexdigest())


def describe_source(source: str) -> str:
    """The source's name for people and provenance: a path's last part, a hub id or "tasks" as it is."""
    path = Path(source).expanduser()
    return path.resolve().name if source not in SOURCES and path.exists() else source


def read_source(
    source: str, columns: tuple[str, ...], split: str | None, config: str | None, seed: int, purpose: Purpose
) -> Iterator[Item]:
    """Stream those items of a file, folder, hub id or installed text that are in the pool of ``purpose``; ``seed``
    orders the files of a folder.

    Raises UsageError (while iterating): missing path, unsupported or mixed extensions, ``split`` or ``config`` with a
    path, an unreachable hub id, unreadable content, an unknown column, a column of the wrong type, no item at all.
    """
    path = Path(source).expanduser()
    if source in INSTALLED:
        items = _texts(installed_texts(source))
    elif path.exists():
        for name, value in (("split", split), ("config", config)):
            if value is not None:
                raise UsageError(f"{name} = {value!r} with the local source {source}", hint=f"{name} is for hub ids")
        kind, files = _local_files(path, seed)
        records = (record for file in files for record in _stream(kind, file))
        items = _text_pieces(files) if kind == "text" else _items(records, source, columns)
    elif source.startswith((".", "/", "~")) or "\\" in source or source.count("/") > 1 or _kind(source) is not None:
        raise UsageError(f"source = {source}: no such file or folder", hint="check the path")
    else:
        items = _items(_hub_records(source, split, config), source, columns)
    is_empty = True
    for pool, item in items:
        is_empty = False
        if pool == purpose:
            yield item
    if is_empty:
        raise UsageError(f"source = {source} is empty", hint="it needs at least one text that is not blank")


def _kind(name: str | Path) -> str | None:
    suffixes = Path(name).suffixes
    if suffixes and suffixes[-1].lower() == ".gz":
        suffixes = suffixes[:-1]
    return EXTENSIONS.get(suffixes[-1].lower()) if suffixes else None


def _local_files(path: Path, seed: int) -> tuple[str, list[Path]]:
    """The kind and the files of a path; hidden files, READMEs and unknown extensions in a folder are passed over."""
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
        if kind == "json":
            _require_shallow(file)
        if kind == "text":
            yield from load_dataset(kind, data_files=str(file), split="train", streaming=True, keep_linebreaks=True)
        else:
            yield from load_dataset(kind, data_files=str(file), split="train", streaming=True)
    except (ValueError, OSError, RecursionError) as error:  # pyarrow's and unicode's errors are ValueErrors
        raise UsageError(f"source = {file} cannot be read as {kind}: {error}", hint="check the file") from error


def _require_shallow(file: Path) -> None:
    """ValueError where the beginning of a JSON file nests deeper than any record: ``datasets`` would run out of stack,
    and the process would die."""
    opener = gzip.open if file.suffix.lower() == ".gz" else open
    with opener(file, "rb") as lines:
        depth, num_left = 0, CHECKED_BYTES
        while num_left > 0 and (line := lines.readline(num_left)):
            num_left -= len(line)
            for run in _BRACKETS.findall(_STRINGS.sub(b"", line)):
                depth = max(0, depth + (len(run) if run[:1] in b"[{" else -len(run)))
                if depth > MAX_DEPTH:
                    raise ValueError(f"nested more than {MAX_DEPTH} deep")
            if ".json" not in file.suffixes:  # a record a line
                depth = 0


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


def _hub_records(source: str, split: str | None, config: str | None) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        # Offline, a stream cannot be opened, but a data set that is in the local cache can.
        yield from datasets.load_dataset(
            source, name=config, split=split or "train", streaming=not datasets.config.HF_HUB_OFFLINE
        )
    except (ValueError, OSError) as error:  # not found, no such split or config, no connection
        raise UsageError(
            f"source = {source} is no file or folder here, and as a hub id it cannot be opened: {error}",
            hint="check the name, its config and split, and the network",
        ) from error


def _items(records: Iterator[dict[str, Any]], source: str, columns: tuple[str, ...]) -> Iterator[Dealt]:
    for index, record in enumerate(records):
        if index == 0:
            columns = _choose_columns(record, source, columns)
        values = [record.get(column) for column in columns]
        if any(value in (None, []) or (isinstance(value, str) and not value.strip()) for value in values):
            continue
        match values:
            case [list() as messages] if all(isinstance(message, dict) for message in messages):
                yield pool_of(messages), Chat(tuple(messages), index)
            case [str() as text]:
                yield from _texts([text])
            case [str() as prompt, str() as completion]:
                yield pool_of([prompt, completion]), Record(prompt + "\n", completion)
            case _:
                kinds = zip(columns, values, strict=True)
                found = " and ".join(f"column {name!r} holds {type(value).__name__}" for name, value in kinds)
                raise UsageError(
                    f"source = {source}, record {index}: {found}; expected text, or a list of messages",
                    hint="name other columns, such as FILE,columns=prompt+reply",
                )


def _texts(documents: Iterable[str]) -> Iterator[Dealt]:
    for text in documents:
        if len(text) <= LONG_CHARS:
            yield pool_of(text), Piece(text)
        else:
            yield from ((pool, Piece(piece)) for pool, piece in dealt_pieces(iter(text.splitlines(keepends=True))))


def _choose_columns(record: dict[str, Any], source: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    present = ", ".join(record)
    missing = [column for column in columns if column not in record]
    if missing:
        raise UsageError(f"source = {source} has no column {missing[0]!r}", hint=f"its columns: {present}")
    candidates = (columns,) if columns else KNOWN_COLUMNS
    for names in candidates:
        if all(name in record for name in names):
            return names
    expected = ", ".join(" + ".join(names) for names in KNOWN_COLUMNS)
    raise UsageError(
        f"source = {source}: none of the known columns ({expected}) is among its columns: {present}",
        hint="name the column (text or messages) or two (prompt, completion)",
    )
