"""Every file kvcal writes between two stages, and the only file that touches the safetensors container.

An artifact is one safetensors file with exactly one metadata key, ``kvcal`` (safetensors orders several at
random), whose value is canonical JSON (sorted keys, no spaces, ASCII, finite numbers): ``{"body", "digest",
"inputs", "kind", "schema"}``. ``digest`` is the sha256 over that JSON without the digest, then, for every
tensor in order of the names, the canonical JSON of [name, dtype, shape] and the tensor's bytes
(little-endian, row-major): a flipped bit is refused. ``inputs`` says what the artifact was made from; a stage
is skipped when they equal what it would use now. Other files are written by the same atomic rename; compiled
kernels lie in the user's cache folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import stat
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors

from kvcal import distributed
from kvcal.errors import ArtifactError, KvcalError, UsageError
from kvcal.lazy_torch import Tensor, torch
from kvcal.stored_tensor import NAMES, StoredTensor, StoredTensors, stored


def require_file(path: str | Path, error: type[KvcalError]) -> None:
    """Raise ``error`` if there is something at ``path`` that is no regular file, or the system does not take
    the name. A path with nothing at it is left to the caller."""
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
_warned: set[Path] = set()
_FIELDS = {"kind", "schema", "inputs", "body", "digest"}
_STALE_SECONDS = 3600.0
_MOST_LEVELS = 64  # of lists and objects within each other; what reads them may recurse
# By kind, the command that makes an artifact which others need.
COMMANDS = {
    "profile": "kvcal profile",
    "allocation": "kvcal allocate",
    "search": "kvcal search",
    "reparam": "kvcal transform",
    "predictors": "kvcal transform",
    "basis": "kvcal plan",
    "feedback": "kvcal transform",
    "kv-quantization-plan": "kvcal compile",
    "prefix": "kvcal generate --pack",
}


def make_again(kind: str | None) -> str:
    """The hint for a file that is refused: the command that makes one of this kind, if there is one."""
    hint = "delete the file and run the stage that makes it again"
    return f"{hint}: {COMMANDS[kind]}" if kind in COMMANDS else hint


@dataclass(frozen=True)
class Artifact:
    """Content of a file of ``kind`` in version ``schema``. ``inputs``: a flat dict from field to JSON value
    of what it was made from; ``body``: JSON; ``tensors``: any dtypes and shapes."""

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
    """Writes the artifact whole or not at all. ArtifactError on non-finite content or when the system
    refuses."""
    write_bytes_atomic(path, to_bytes(artifact))


def write_text_atomic(path: str | Path, text: str) -> None:
    write_bytes_atomic(path, text.encode("utf-8"))


def write_bytes_atomic(path: str | Path, data: bytes, by_all_ranks: bool = False) -> None:
    """Writes a temporary file next to ``path``, syncs it and renames it over ``path``; on any failure, Ctrl-C
    included, the temporary file is removed. A file with these bytes stays as it is, so that a finished run
    can be repeated where nothing can be written. Of several ranks the first alone writes, unless
    ``by_all_ranks``."""
    if distributed.rank() > 0 and not by_all_ranks:
        return
    path = Path(path)
    require_file(path, ArtifactError)
    temporary = path.parent / f".kvcal-{secrets.token_hex(8)}.tmp"
    try:
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # already gone once it was renamed
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise ArtifactError(
            f"cannot write {path} ({len(data)} bytes): {error.strerror}; nothing was left half-written",
            hint="free some space" if full else "check that the folder exists and can be written to",
        ) from error


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/kvcal, or ~/.cache/kvcal where the variable is unset or (as its standard asks) not
    absolute. The home of a user without one is /."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        folder = Path("/", os.path.expanduser("~").removeprefix("~"), ".cache")
    return folder / "kvcal"


def keep(path: Path, data: bytes, what: str) -> None:
    """Write a file of the cache folder whole, and its folder; where that fails, warn, once a folder, that
    ``what`` will be made again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, data, by_all_ranks=True)
    except (OSError, ArtifactError) as error:
        if path.parent not in _warned:
            _warned.add(path.parent)
            warnings.warn(
                f"{what} are not kept in {path.parent} and will be made again at every start: {error}; hint: set "
                "XDG_CACHE_HOME to a folder that can be written",
                RuntimeWarning,
                stacklevel=3,
            )


def remove_stale(folder: Path) -> None:
    """Remove what killed processes left: temporary files that nothing was written to for an hour."""
    for path in folder.glob(".kvcal-*.tmp"):
        with suppress(OSError):  # another process may be as fast
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def require_output(path: Path, kind: str) -> None:
    """Before the work: make the folder of ``path``. ArtifactError where a file of the kind could not be
    written there, or would replace a safetensors file of another kind: a model's weights, a profile."""
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
    """Make the folder that ``path`` is to lie in. ArtifactError where that, or a new file in it, is
    refused."""
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
    """Reads and verifies an artifact of this ``kind`` and ``schema``, without torch; tensors come on the CPU,
    in own memory, each made on its first use. ArtifactError for a file that is missing, damaged or another
    one, or that holds NaN or infinity.
    """
    path = Path(path)
    try:
        data = read_bytes(path, f"{kind} artifact")
        try:
            parts = safetensors.deserialize(data)
        except (safetensors.SafetensorError, ValueError) as error:
            raise ArtifactError(
                f"{path} is truncated or is not a safetensors file ({len(data)} bytes): {error}",
                hint=f"check the path; if it is the right one, {make_again(kind)}",
            ) from error
        head = _read_head(path, data)
        _check_head(path, head, kind, schema)
        tensors = {}
        for name, about in parts:
            if about["dtype"] not in NAMES:
                raise ArtifactError(f"{path}: the tensor '{name}' has the dtype {about['dtype']}")
            tensors[name] = StoredTensor(NAMES[about["dtype"]], tuple(about["shape"]), about["data"])
        stated, found = head.pop("digest"), _digest(head, tensors)
        if found != stated:
            found, stated = (_shorten(canonical_json(digest).strip('"'), 0) for digest in (found, stated))
            raise ArtifactError(f"{path} is corrupt: its content has the digest {found}, expected {stated}")
        _check_finite(tensors, str(path))
    except ArtifactError as refused:
        refused.hint = refused.hint or make_again(kind)
        raise refused.at(path) from refused.__cause__
    return Artifact(head["kind"], head["schema"], head["inputs"], head["body"], StoredTensors(tensors))


def read_inputs(path: Path) -> dict[str, Any]:
    """An artifact's ``inputs``, by its header alone, whose digest is not checked. ArtifactError when there is
    none."""
    inputs = _unverified_head(path).get("inputs")
    if not isinstance(inputs, dict):
        raise ArtifactError(f"{path} has no artifact's header: inputs are no object", make_again(None))
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
            size = file.read(8)
            length = min(int.from_bytes(size, "little"), os.fstat(file.fileno()).st_size)
            return _read_head(path, size + file.read(length))
    except (OSError, ValueError, LookupError, AttributeError, RecursionError, OverflowError) as wrong:
        raise ArtifactError(f"{path} has no artifact's header: {wrong}", make_again(None)) from None


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
        found = f"its metadata keys are {sorted(metadata)}, expected exactly ['{METADATA_KEY}']"
        hint = "was it written by another program, such as a model's checkpoint?"
        raise ArtifactError(f"{path} is not a kvcal artifact: {found}", hint)
    text = metadata[METADATA_KEY]
    try:
        head = json.loads(text)
        is_sound = canonical_json(head) == text and head.keys() == _FIELDS
        is_sound = is_sound and isinstance(head["inputs"], dict) and isinstance(head["body"], dict)
    except (ValueError, AttributeError, RecursionError, ArtifactError):
        is_sound = False
    if not is_sound:
        wrong = f"({_shorten(text, 0)}) is not canonical JSON with the fields {sorted(_FIELDS)}"
        raise ArtifactError(f"{path} is corrupt: its '{METADATA_KEY}' metadata {wrong}")
    require_shallow(head, path)
    return cast(dict[str, Any], head)


def require_shallow(value: Any, path: str | Path, levels: int = _MOST_LEVELS) -> None:
    """ArtifactError when JSON from ``path`` holds lists and objects within each other beyond so many
    levels."""
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise ArtifactError(f"{path}: more than {_MOST_LEVELS} lists and objects within each other")
    for item in value.values() if isinstance(value, dict) else value:
        require_shallow(item, path, levels - 1)


def _check_head(path: Path, head: dict[str, Any], kind: str, schema: int) -> None:
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
