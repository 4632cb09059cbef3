"""Tensors as files hold them: a dtype's name, a shape and bytes. numpy checks their values, torch computes
with them.

What reads a file checks all that the file holds; only what runs it needs torch. So ``StoredTensors`` is a
mapping whose tensors become torch's when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvcal.lazy_torch import Tensor, torch


class Dtype(NamedTuple):
    """``stored``: its name in a safetensors file. ``numbers``: numpy's dtype of the values, or of their bits
    where numpy has no such numbers. ``infinite``: the bits that are all set in NaN and infinity and in no
    other number, 0 for integers."""

    stored: str
    numbers: str
    infinite: int = 0


# By torch's names.
DTYPES = {
    "float64": Dtype("F64", "<f8", 0x7FF << 52),
    "float32": Dtype("F32", "<f4", 0xFF << 23),
    "float16": Dtype("F16", "<f2", 0x1F << 10),
    "bfloat16": Dtype("BF16", "<u2", 0xFF << 7),
    "float8_e5m2": Dtype("F8_E5M2", "<u1", 0x1F << 2),
    "float8_e4m3fn": Dtype("F8_E4M3", "<u1", 0x7F),
    "int64": Dtype("I64", "<i8"),
    "int32": Dtype("I32", "<i4"),
    "int16": Dtype("I16", "<i2"),
    "int8": Dtype("I8", "<i1"),
    "uint8": Dtype("U8", "<u1"),
    "bool": Dtype("BOOL", "|b1"),
}
NAMES = {dtype.stored: name for name, dtype in DTYPES.items()}
ITEM_BYTES = {name: int(dtype.numbers[-1]) for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor. ``dtype``: a key of DTYPES; ``data``: the bytes, little-endian and row-major, in any
    buffer."""

    dtype: str
    shape: tuple[int, ...]
    data: Any

    @classmethod
    def of(cls, tensor: Tensor) -> StoredTensor:
        """The tensor's own memory where it is contiguous and on the CPU, else a copy."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy().data)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def tensor(self) -> Tensor:
        """The tensor on the CPU, in the memory of ``data``."""
        dtype = getattr(torch, self.dtype)
        if not self.nbytes:  # frombuffer takes no empty buffer
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.data, dtype=dtype).view(self.shape)

    def values(self) -> np.ndarray:
        """The numbers in the tensor's shape; bfloat16 as float32. Not for 8-bit floats, which numpy does not
        have."""
        numbers = np.frombuffer(self.data, DTYPES[self.dtype].numbers).reshape(self.shape)
        return (numbers.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bfloat16" else numbers

    @property
    def num_infinite(self) -> int:
        """Values that are NaN or infinite."""
        mask, size = DTYPES[self.dtype].infinite, ITEM_BYTES[self.dtype]
        if not mask:
            return 0
        bits = np.frombuffer(self.data, f"<u{size}")
        return int(np.count_nonzero((bits & bits.dtype.type(mask)) == mask))


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a file by name, each made by torch on its first use."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            self._made[name] = self.stored[name].tensor()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def stored(tensors: Mapping[str, Tensor]) -> Mapping[str, StoredTensor]:
    """The same tensors as a file holds them."""
    if isinstance(tensors, StoredTensors):
        return tensors.stored
    return {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}
