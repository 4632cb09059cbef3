"""Every file kvcal writes between two stages, and the only file that touches the safetensors container.

An artifact is one safetensors file with exactly one metadata key, ``kvcal``, whose value is canonical JSON
(sorted keys, no spaces, ASCII, finite numbers): ``{"body", "digest", "inputs", "kind", "schema"}``. One key,
because safetensors orders several keys at random per process, and then equal content would give unequal
files. ``digest`` is the sha256 over that JSON without the digest, then, for every tensor in sorted name
order, the canonical JSON of [name, dtype, shape] and the tensor's bytes (little-endian, row-major): it covers
all that a reader gets, so a flipped bit is refused and never read as another plan. ``inputs`` says what the
artifact was made from; a stage is skipped when they equal what it would use now.

The finite check, the atomic rename and one error per way to be wrong follow safetensors' own rule of
validating before use. Left out: compression.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors

from kvcal import distributed
from kvcal.errors import ArtifactError, KvcalError, UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.stored_tensor import DTYPES, NAMES, StoredTensor, StoredTensors, stored


def require_file(path: str | Path, error: type[KvcalError]) -> None:
    """Raise ``error`` if there is something at ``path`` that is no regular file, or the system does not take the name.
    A path with nothing at it is left to the caller."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as refused:
        raise error(f"{path}: {refused.strerror}", "check the path") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise error(f"{path} is {kind}; expected a regular file", "check the path")


def read_text(path: Path) -> str:
    """The text of a file that a user names. UsageError where the system refuses, or it is not UTF-8."""
    require_file(path, UsageError)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as refused:
        raise UsageError(f"cannot read {path}: {refused.strerror}", "check the path") from None
    except UnicodeDecodeError as wrong:
        raise UsageError(
            f"{path} is no text in UTF-8: {wrong.reason} at byte {wrong.start}", "save it in UTF-8"
        ) from None


METADATA_KEY = "kvcal"
_FIELDS = {"kind", "schema", "inputs", "body", "digest"}
_EMPTY_SECONDS = 60.0
_MOST_LEVELS = 64  # of lists and objects within each other; what reads them may recurse
# By kind, the command that makes an artifact which others need.
COMMANDS = {
    "profile": "kvcal profile",
    "allocation": "kvcal allocate",
    "search": "kvcal search",
    "reparam": "kvcal reparam",
    "predictors": "kvcal fit-predictors",
    "feedback": "kvcal feedback",
    "kv-quantization-plan": "kvcal compile",
    "prefix": "kvcal pack-prefix",
}
_MAKE_AGAIN = "delete the file and run the stage that makes it again"


def make_again(kind: str | None) -> str:
    """The hint for a file that is refused: the command that makes one of this kind, if there is one."""
    return f"{_MAKE_AGAIN}: {COMMANDS[kind]}" if kind in COMMANDS else _MAKE_AGAIN


@dataclass(frozen=True)
class Artifact:
    """Content of a file of ``kind`` in version ``schema``. ``inputs``: a flat dict from field to JSON value of what it
    was made from; ``body``: JSON; ``tensors``: any dtypes and shapes."""

    kind: str
    schema: int
    inputs: dict[str, Any]
    body: dict[str, Any]
    tensors: Mapping[str, Tensor]


def canonical_json(obj: Any) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII. ArtifactError on NaN or infinity."""
    try:
        return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except ValueError as error:
        raise ArtifactError(f"cannot write this value as JSON: {error}; allowed: finite numbers") from error


def sha256_json(obj: Any) -> str:
    """Hex sha256 of ``canonical_json(obj)``."""
    return hashlib.sha256(canonical_json(obj).encode("ascii")).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_bytes(artifact: Artifact) -> bytes:
    """The file's bytes: the same in any process for the same content. ArtifactError on non-finite content."""
    from safetensors.torch import save

    parts = stored(artifact.tensors)
    _check_finite(parts, f"the {artifact.kind} artifact to write")
    head = {"kind": artifact.kind, "schema": artifact.schema, "inputs": artifact.inputs, "body": artifact.body}
    # Cloned: safetensors refuses tensors that share memory, and a view would otherwise depend on its base.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in artifact.tensors.items()
    }
    return save(tensors, {METADATA_KEY: canonical_json(head | {"digest": _digest(head, parts)})})


def write(path: str | Path, artifact: Artifact) -> None:
    """Writes the artifact whole or not at all. ArtifactError on non-finite content or when the system refuses
    (full disk, no permission, no such folder); the file that was there before then stays as it was."""
    write_bytes_atomic(path, to_bytes(artifact))


def write_text_atomic(path: str | Path, text: str) -> None:
    """``write_bytes_atomic`` of the text in UTF-8."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_bytes_atomic(path: str | Path, data: bytes, by_all_ranks: bool = False) -> None:
    """Writes a temporary file beside ``path``, syncs it and renames it over ``path``; on any failure, Ctrl-C included,
    the temporary file is removed. What killed processes left there is removed, too. A file with these bytes stays as it
    is, so that a finished run can be repeated where nothing can be written. Of several ranks the first alone writes,
    unless ``by_all_ranks``. ArtifactError with the path and the system's reason."""
    if distributed.rank() > 0 and not by_all_ranks:
        return
    path = Path(path)
    require_file(path, ArtifactError)
    temporary = path.parent / f".kvcal-{secrets.token_hex(8)}.tmp"
    try:
        remove_stale(path.parent)
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return
        try:
            with open(temporary, "xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)  # while it is locked: unlocked, it is a killed process's
        finally:
            temporary.unlink(missing_ok=True)  # already gone once it was renamed
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise ArtifactError(
            f"cannot write {path} ({len(data)} bytes): {error.strerror}; nothing was left half-written",
            hint="free some space" if full else "check that the folder exists and can be written to",
        ) from error


def remove_stale(folder: Path) -> None:
    """Removes temporary files of killed processes. A living process holds a lock on its own, from before it writes its
    first byte; an empty file may be about to be locked for a while."""
    for path in folder.glob(".kvcal-*.tmp"):
        with suppress(OSError), open(path, "rb") as file:  # another process may be as fast, or own it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(file.fileno())
            if status.st_size or time.time() - status.st_mtime > _EMPTY_SECONDS:
                path.unlink()


def require_output(path: Path, kind: str) -> None:
    """Before the work: make the folder of ``path``. ArtifactError where a file of the kind could not be written there,
    or would replace a safetensors file of another kind: a model's weights, a profile."""
    require_file(path, ArtifactError)
    require_parent(path)
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        there = json.loads(metadata.get(METADATA_KEY, "{}")).get("kind", "safetensors file of another program")
    except (OSError, safetensors.SafetensorError, ValueError, AttributeError, RecursionError):
        return  # nothing, or nothing whole
    if there != kind:
        raise ArtifactError(
            f"{path} is a {there}, which a {kind} would replace",
            hint="give another path; if the file is not needed, delete it first",
        )


def require_parent(path: Path) -> None:
    """Make the folder that ``path`` is to lie in. ArtifactError where that, or a new file in it, is refused."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise ArtifactError(
            f"cannot write {path}: cannot make the folder {path.parent}: {refused.strerror}", hint="give another path"
        ) from None
    if not path.exists() and not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArtifactError(f"cannot write {path}: no files can be made in {path.parent}", hint="give another path")


def read_bytes(path: str | Path, kind: str) -> bytes:
    """The bytes of a regular file. ArtifactError when there is none, or the system refuses."""
    require_file(path, ArtifactError)
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        command = COMMANDS.get(kind.removesuffix(" artifact"))
        hint = f"check the path, or make it first: {command}" if command else "check the path"
        raise ArtifactError(f"no {kind} at {path}: the file does not exist", hint) from None
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}", "check the path") from error


def read(path: str | Path, kind: str, schema: int) -> Artifact:
    """Reads and verifies an artifact of this ``kind`` and ``schema``, without torch; tensors come on the CPU, in own
    memory, each made on its first use.

    ArtifactError, each with its own message, when the file is missing or unreadable, is not safetensors,
    has other metadata than the one key, its JSON is not canonical, its kind, schema version or digest
    differs, or a tensor holds NaN or infinity.
    """
    path = Path(path)
    with _refused_as(path, kind):
        data = read_bytes(path, f"{kind} artifact")
        try:
            parts = safetensors.deserialize(data)
        except (safetensors.SafetensorError, ValueError) as error:
            raise ArtifactError(
                f"{path} is truncated or is not a safetensors file ({len(data)} bytes): {error}",
                hint=f"check the path; if it is the right one, {_MAKE_AGAIN}",
            ) from error
        head = _read_head(path, data)
        _check_head(path, head, kind, schema)
        tensors = {name: _stored(path, name, about) for name, about in parts}
        stated, found = head.pop("digest"), _digest(head, tensors)
        if found != stated:
            found, stated = (_shorten(canonical_json(digest), 0) for digest in (found, stated))
            raise ArtifactError(
                f"{path} is corrupt: its content has the digest {found}, expected {stated}", hint=_MAKE_AGAIN
            )
        _check_finite(tensors, str(path))
    return Artifact(head["kind"], head["schema"], head["inputs"], head["body"], StoredTensors(tensors))


@contextmanager
def _refused_as(path: Path, kind: str) -> Iterator[None]:
    """Gives an ArtifactError the path of an artifact of this kind, and its hint the command that makes one."""
    try:
        yield
    except ArtifactError as refused:
        if refused.hint and refused.hint.endswith(_MAKE_AGAIN):
            refused.hint = refused.hint.replace(_MAKE_AGAIN, make_again(kind))
        refused.at(path)
        raise


def _stored(path: Path, name: str, about: Mapping[str, Any]) -> StoredTensor:
    """A tensor as safetensors has read it."""
    dtype = NAMES.get(about["dtype"])
    if dtype is None:
        raise ArtifactError(
            f"{path}: the tensor '{name}' has the dtype {about['dtype']}; allowed: {', '.join(DTYPES)}",
            hint=_MAKE_AGAIN,
        )
    return StoredTensor(dtype, tuple(about["shape"]), about["data"])


def read_inputs(path: Path) -> dict[str, Any]:
    """An artifact's ``inputs``, by its header alone, whose digest is not checked. ArtifactError when there is none, or
    the system refuses."""
    inputs = _unverified_head(path).get("inputs")
    if not isinstance(inputs, dict):
        raise ArtifactError(f"{path} has no artifact's header: inputs are no object", hint=_MAKE_AGAIN)
    return inputs


def kind_of(path: Path) -> str | None:
    """An artifact's kind as its header states it; None where there is none."""
    try:
        kind = _unverified_head(path).get("kind")
    except ArtifactError:
        return None
    return kind if isinstance(kind, str) else None


def _unverified_head(path: Path) -> dict[str, Any]:
    require_file(path, ArtifactError)
    try:
        with open(path, "rb") as file:
            return _read_head(path, _header(file))
    except (OSError, ValueError, LookupError, AttributeError, RecursionError, OverflowError) as wrong:
        raise ArtifactError(f"{path} has no artifact's header: {wrong}", hint=_MAKE_AGAIN) from None


def _header(file: BinaryIO) -> bytes:
    """A file's bytes up to its tensors'."""
    size = file.read(8)
    return size + file.read(min(int.from_bytes(size, "little"), os.fstat(file.fileno()).st_size))


def differing_input(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first field, in sorted order, in which two ``inputs`` differ, with both values shortened to where
    they part, such as ``seq_len is 512, expected 2048``; None when they are the same JSON."""
    for field in sorted(expected.keys() | found.keys()):
        want = canonical_json(expected[field]) if field in expected else "absent"
        have = canonical_json(found[field]) if field in found else "absent"
        if want != have:
            start = len(os.path.commonprefix([want, have]))
            return f"{field} is {_shorten(have, start)}, expected {_shorten(want, start)}"
    return None


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hex sha256 over names, dtypes, shapes and bytes, in order of the names."""
    return _digest({}, stored(tensors))


def _digest(head: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    digest = hashlib.sha256(canonical_json(head).encode("ascii"))
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(canonical_json([name, tensor.dtype, list(tensor.shape)]).encode("ascii"))
        digest.update(tensor.data)
    return digest.hexdigest()


def _read_head(path: Path, data: bytes) -> dict[str, Any]:
    """The metadata's JSON; the container around it was validated, so its header is sound."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__") or {}  # safetensors takes null for none
    if set(metadata) != {METADATA_KEY}:
        raise ArtifactError(
            f"{path} is not a kvcal artifact: its metadata keys are {sorted(metadata)}, "
            f"expected exactly ['{METADATA_KEY}']",
            hint="was it written by another program, such as a model's checkpoint?",
        )
    text = metadata[METADATA_KEY]
    try:
        head = json.loads(text)
        canonical = isinstance(head, dict) and canonical_json(head) == text
    except (ValueError, RecursionError, ArtifactError):
        canonical = False
    if not canonical:
        raise ArtifactError(
            f"{path} is corrupt: its '{METADATA_KEY}' metadata ({_shorten(text, 0)}) is not canonical JSON "
            "of an object (sorted keys, no spaces, ASCII, finite numbers)",
            hint=_MAKE_AGAIN,
        )
    require_shallow(head, path)
    return head


def require_shallow(value: Any, path: str | Path, levels: int = _MOST_LEVELS) -> None:
    """ArtifactError when JSON from ``path`` holds lists and objects within each other beyond so many levels."""
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise ArtifactError(f"{path}: more than {_MOST_LEVELS} lists and objects within each other", hint=_MAKE_AGAIN)
    for item in value.values() if isinstance(value, dict) else value:
        require_shallow(item, path, levels - 1)


def _check_head(path: Path, head: dict[str, Any], kind: str, schema: int) -> None:
    mappings = all(isinstance(head.get(field), dict) for field in ("inputs", "body"))
    if set(head) != _FIELDS or not mappings:
        raise ArtifactError(
            f"{path} is corrupt: its metadata has the fields {sorted(head)}, expected {sorted(_FIELDS)} with "
            "objects for 'inputs' and 'body'",
            hint=_MAKE_AGAIN,
        )
    if head["kind"] != kind:
        found = _shorten(canonical_json(head["kind"]), 0)
        raise ArtifactError(
            f'{path} is an artifact of the kind {found}, expected "{kind}"', hint="was another file given?"
        )
    if canonical_json(head["schema"]) != canonical_json(schema):
        found = _shorten(canonical_json(head["schema"]), 0)
        raise ArtifactError(
            f"{path} has the {kind} schema version {found}; this kvcal reads version {schema} only",
            hint="make it again with this version of kvcal"
            + (f" ({COMMANDS[kind]})" if kind in COMMANDS else "")
            + ", or use the version that wrote it",
        )


def _check_finite(tensors: Mapping[str, StoredTensor], where: str) -> None:
    for name in sorted(tensors):
        count = tensors[name].num_infinite
        if count:
            raise ArtifactError(
                f"{where}: the tensor '{name}' holds NaN or infinity in {count} of "
                f"{math.prod(tensors[name].shape)} values; allowed: finite values",
                hint="find the stage that produced them: the statistics or the model overflowed",
            )


def _shorten(text: str, start: int, width: int = 40) -> str:
    """At most ``width`` characters of ``text``, around position ``start``."""
    if len(text) <= width:
        return text
    begin = max(0, min(start - width // 4, len(text) - width))
    end = begin + width
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")
