"""The header of a GGUF file: its keys and the shapes of its tensors, read without the package gguf, which
reads all tokens of the vocabulary one by one, and without transformers.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: "GGUF", uint32 version,
uint64 tensors, uint64 keys; of each key a string, a uint32 type and the value; of each tensor a string, a
uint32 number of dimensions, uint64 sizes, a uint32 type and a uint64 offset. A string is a uint64 length and
bytes; an array is a uint32 type, a uint64 length and values.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from kvcal.errors import UsageError

# By type: its letter in struct.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Values by key, of an array ``range`` of its length alone; and the number of values of all tensors.

    Raises:
        UsageError: another format or version, or a file that ends within its header.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF" or _number(file, "I") not in VERSIONS:
                raise UsageError(f"{path} is no GGUF file of version 2 or 3", "copy or download the file again")
            num_tensors, num_keys = _number(file, "Q"), _number(file, "Q")
            values = {}
            for _ in range(num_keys):
                key = _string(file)
                values[key] = _value(file, _number(file, "I"))
            num_values = 0
            for _ in range(num_tensors):
                _string(file)
                sizes = [_number(file, "Q") for _ in range(_number(file, "I"))]
                num_values += math.prod(sizes)
                _number(file, "I"), _number(file, "Q")
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError):
        raise UsageError(f"{path} ends within its header, or is damaged", "copy or download the file again") from None
    return values, num_values


def _number(file: BinaryIO, letter: str) -> Any:
    layout = struct.Struct(f"<{letter}")
    return layout.unpack(file.read(layout.size))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_number(file, "Q")).decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind != ARRAY:
        return _number(file, NUMBERS[kind])
    of, length = _number(file, "I"), _number(file, "Q")
    if of in NUMBERS:
        file.seek(length * struct.calcsize(NUMBERS[of]), 1)
    else:
        for _ in range(length):
            _value(file, of) if of == ARRAY else file.seek(_number(file, "Q"), 1)
    return range(length)
