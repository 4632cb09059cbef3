"""Pools of data by purpose: what a plan is fitted on, chosen on and reported on shares no text; and the guard
of that.

Every source is dealt to the pools before any window is cut, item by item: a record, a chat, a generated
problem or a document of a table by a hash of its content, what is read from an installed file by a hash of
the file's, a piece of a text file in turn. So pools stay disjoint whatever the seed, the process, the number
of samples and their length, and two copies of an item lie in one pool. A text file's pieces go to the pools
in turn, from the pool on that the first piece's content names. They are of 1 KiB at first and double after
every round, up to 16 KiB: a file of 60 KiB gives each pool 15, and windows of a large one are seldom broken.

A stage names its data among its artifact's inputs, and the plan's provenance takes them over: {"calibration":
{stage: {"purpose", "source", "source_sha256", "sequences", "windows"}}}, with 12 hex digits of sha256 for
each sequence, and "parts" where there are several sources. The guard finds what dealing cannot: a source that
repeats itself, records that are equal up to where they are cut, and an edited copy of the file that a plan
was made from.

For the last, a record holds the least ``NUM_DIGESTS`` digests of its windows of ``WINDOW`` tokens, 2.7 KB in
all. Of other text the windows with as small a digest tell the share that both have: a sample of windows by
what they hold, so that it is the same in both wherever they begin. Of installed text, 24 texts of 4,096
tokens share 0.0 (docs, code) to 1.3 % (chats) with 16 of 2,048 from another pool, files of one's own 1 to 3
%; an edited copy shares a fifth to a half. The guard refuses above ``MAX_SHARED``, after twice the sample's
own error. Windows that a quarter of a sample's sequences share are left out: a template's, or a prompt's that
all records begin with.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from kvcal.errors import ArtifactError, UsageError
from kvcal.lazy_torch import Tensor
from kvcal.strict import STRICT, Size, dump, parse

# fit: profile and transforms. select: a search's candidates, tuning. validate: a final choice. report:
# evaluation.
Purpose = Literal["fit", "select", "validate", "report"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

# A piece is cut at a line's end, so that hardly any token straddles two; a line beyond MIN_PIECE_CHARS is
# cut, too.
MIN_PIECE_CHARS, MAX_PIECE_CHARS = 1 << 10, 1 << 14

WINDOW = 20  # tokens
NUM_DIGESTS, DIGEST_BYTES = 512, 4
MAX_SHARED = 0.05


def pool_of(content: Any, turn: int = 0) -> Purpose:
    """The pool of an item by its content (JSON), or that of the item ``turn`` places after it."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()
    return PURPOSES[(digest[0] + turn) % len(PURPOSES)]


def dealt_pieces(lines: Iterator[str]) -> Iterator[tuple[Purpose, str]]:
    """A document's pieces, each with its pool; nothing is read ahead of a piece."""
    first = None
    for turn, text in enumerate(_cut(lines)):
        first = text if first is None else first
        yield pool_of(first, turn), text


def _cut(lines: Iterator[str]) -> Iterator[str]:
    parts: list[str] = []
    num_chars = number = 0
    for line in lines:
        for start in range(0, len(line), MIN_PIECE_CHARS):
            parts.append(line[start : start + MIN_PIECE_CHARS])
            num_chars += len(parts[-1])
            if num_chars >= min(MIN_PIECE_CHARS << min(number // len(PURPOSES), 16), MAX_PIECE_CHARS):
                yield "".join(parts)
                parts, num_chars, number = [], 0, number + 1
    if "".join(parts).strip():
        yield "".join(parts)


@dataclass(frozen=True)
class SourceId:
    """A source's ``name`` for people, without its folder, and a digest of what it is: of a file the size and
    the first 64 KiB, of a folder the names and sizes, else of the name, config and split."""

    name: str
    sha256: str


@pydantic_dataclass(frozen=True, config=STRICT)
class SourcePart:
    """One of several sources of a data set, and how many of its sequences are of it."""

    source: str
    source_sha256: str
    num_sequences: Size


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """``sequences``: int64 [T] each, T <= seq_len, no padding. ``loss_masks``: bool [T] each, True where the
    token is a target of the next-token loss (never at position 0, at least one per sequence).
    ``fingerprint``: sha256 over both; ``description``: one line for people, without machine paths;
    ``source``: where they come from, None if they were made up; ``purpose``: of which pool; ``kinds``: the
    source of each sequence, such as "python:code"; ``parts``: of several sources, which ``source`` then
    stands for together. All counts are tokens."""

    sequences: tuple[Tensor, ...]
    loss_masks: tuple[Tensor, ...]
    fingerprint: str
    description: str
    source: SourceId | None = None
    purpose: Purpose = "fit"
    kinds: tuple[str, ...] = ()
    parts: tuple[SourcePart, ...] = ()

    def __post_init__(self) -> None:
        if not self.kinds:
            object.__setattr__(self, "kinds", (self.description,) * len(self.sequences))

    @property
    def digests(self) -> tuple[str, ...]:
        """Of each sequence's ids, int64 little-endian, the first 12 hex digits of their sha256."""
        return tuple(hashlib.sha256(id_bytes(tokens_T)).hexdigest()[:12] for tokens_T in self.sequences)

    @property
    def windows(self) -> set[bytes]:
        """Digests of all windows of WINDOW tokens, but of those that more than a quarter of the sequences
        have."""
        counts = Counter[bytes]()
        for ids in map(id_bytes, self.sequences):
            parts = (ids[at : at + 8 * WINDOW] for at in range(0, len(ids) - 8 * WINDOW + 1, 8))
            counts.update({hashlib.blake2b(part, digest_size=DIGEST_BYTES).digest() for part in parts})
        return {window for window, count in counts.items() if count <= max(1, len(self.sequences) / 4)}

    @property
    def num_tokens(self) -> int:
        return sum(sequence.numel() for sequence in self.sequences)

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(mask.sum()) for mask in self.loss_masks)


def id_bytes(tokens_T: Tensor) -> bytes:
    """Token ids as int64, little-endian."""
    return tokens_T.numpy().astype("<i8").tobytes()


KEY = "calibration"
_SUFFIX = ".record"


@pydantic_dataclass(frozen=True, config=STRICT)
class DataRecord:
    """One stage's data. ``source``, its name, and ``source_sha256`` are None for made-up data; ``parts``: of
    several sources."""

    purpose: Purpose
    source: str | None
    source_sha256: str | None
    sequences: tuple[str, ...]
    # Left out of JSON for one source.
    parts: Annotated[tuple[SourcePart, ...], Field(exclude_if=lambda parts: parts == ())] = ()
    # The least digests of windows, in order, URL-safe base64. Empty in older plans, and where no sequence is
    # as long.
    windows: Annotated[str, Field(exclude_if=lambda windows: windows == "")] = ""

    def __post_init__(self) -> None:
        _ = self.kept_windows

    @property
    def kept_windows(self) -> list[bytes]:
        """The digests in ``windows``. ValueError where it is not as written."""
        held = base64.b64decode(self.windows, b"-_", validate=True)
        if len(held) % DIGEST_BYTES:
            raise ValueError(f"windows: {len(held)} bytes, expected digests of {DIGEST_BYTES}")
        return [held[at : at + DIGEST_BYTES] for at in range(0, len(held), DIGEST_BYTES)]

    def shared(self, windows: set[bytes]) -> float:
        """The share of ``windows`` that this data has too, less twice its standard error; at least 0."""
        kept = self.kept_windows
        if len(kept) == NUM_DIGESTS:
            windows = {window for window in windows if window <= kept[-1]}
        num_shared = len(windows.intersection(kept))
        return max(0.0, num_shared - 2 * num_shared**0.5) / max(1, len(windows))

    @property
    def sources(self) -> set[str | None]:
        """sha256 of every source."""
        return {self.source_sha256} | {part.source_sha256 for part in self.parts}


def data_inputs(data: TokenDataset, name: str = "data") -> dict[str, Any]:
    """Fields of an artifact's inputs that name its data."""
    source, sha256 = (None, None) if data.source is None else (data.source.name, data.source.sha256)
    windows = base64.urlsafe_b64encode(b"".join(sorted(data.windows)[:NUM_DIGESTS])).decode()
    record = DataRecord(data.purpose, source, sha256, data.digests, data.parts, windows)
    return {f"{name}.fingerprint": data.fingerprint, f"{name}{_SUFFIX}": dump(record)}


def calibration(stage: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The data of an artifact with these inputs, by stage: {"profile": ..., "search.fit_data": ...}."""
    names = [key.removesuffix(_SUFFIX) for key in inputs if key.endswith(_SUFFIX)]
    return {stage if name == "data" else f"{stage}.{name}": inputs[name + _SUFFIX] for name in sorted(names)}


def with_calibration(provenance: Mapping[str, Any], records: Mapping[str, Any]) -> dict[str, Any]:
    return {**provenance, KEY: {**provenance.get(KEY, {}), **records}} if records else dict(provenance)


def require_unseen(provenance: Mapping[str, Any], data: TokenDataset) -> None:
    """Raises: UsageError: a sequence of ``data``, or more than MAX_SHARED of its windows, is among those of
    another purpose that a plan was made from. ArtifactError: the provenance's record of them is not one.
    """
    windows = data.windows
    for stage, record in _records(provenance).items():
        if record.purpose == data.purpose:
            continue
        used = f"that {stage} used (pool {record.purpose} of {record.source})"
        num_shared = sum(digest in record.sequences for digest in data.digests)
        if num_shared:
            raise UsageError(
                f"{num_shared} of {len(data.digests)} sequences of {data.description} are among those {used}",
                hint="the source repeats itself, or its records are equal up to seq_len: remove copies, raise seq_len, "
                "or evaluate on another source",
            )
        share = record.shared(windows)
        if share > MAX_SHARED:
            raise UsageError(
                f"at least {share:.0%} of {data.description} is text {used}, compared by {WINDOW} tokens at a time; "
                f"allowed: {MAX_SHARED:.0%}",
                hint="the source repeats itself, or is a changed copy of the one that the plan was made from: evaluate "
                "on that one, whose pools are apart, or on another source",
            )


def shared_sources(provenance: Mapping[str, Any], data: TokenDataset) -> list[str]:
    """Stages that used a source of ``data``, in order of their names."""
    if data.source is None:
        return []
    own = {data.source.sha256} | {part.source_sha256 for part in data.parts}
    return sorted(stage for stage, record in _records(provenance).items() if record.sources & own)


def _records(provenance: Mapping[str, Any]) -> dict[str, DataRecord]:
    place, hint = f"the plan's provenance.{KEY}", "compile the plan again with this version of kvcal"
    return parse(dict[str, DataRecord], provenance.get(KEY, {}), place, ArtifactError, hint)
