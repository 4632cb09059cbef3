"""The tensors that a file must hold, as a table of names, and the one check of a file's tensors against it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """One tensor. ``shape``: None is any extent. ``low`` and ``high``: the least and the largest value allowed, one
    number for all, or one for each place of the last dimension; values are finite in any case."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    low: float | tuple[float, ...] = -math.inf
    high: float | tuple[float, ...] = math.inf

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape, 0 for any extent."""
        return tuple(extent or 0 for extent in self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.extents) * self.dtype.itemsize

    def fault(self, tensor: Tensor) -> str | None:
        """The fault of ``tensor``, as the end of a sentence; None if it has none."""
        extents = tuple(tensor.shape)
        fits = len(extents) == len(self.shape) and all(
            want is None or want == have for want, have in zip(self.shape, extents, strict=True)
        )
        if tensor.dtype != self.dtype or not fits:
            expected = ", ".join("any" if extent is None else str(extent) for extent in self.shape)
            return f"is {_name(tensor.dtype)} {list(extents)}, expected {_name(self.dtype)} [{expected}]"
        if not tensor.numel():
            return None
        by_place = isinstance(self.low, tuple) or isinstance(self.high, tuple)
        values = tensor.flatten(0, -2) if by_place else tensor.flatten()
        for number, (least, largest) in enumerate(zip(*_extremes(values), strict=True)):
            low, high = (bound[number] if isinstance(bound, tuple) else bound for bound in (self.low, self.high))
            if not (math.isfinite(least) and math.isfinite(largest)):
                return "holds NaN or infinity; allowed: finite values"
            if not low <= least <= largest <= high:
                return f"holds values from {least:g} to {largest:g}, expected {low:g} to {high:g}"
        return None


def require_tensors(found: Mapping[str, Tensor], declared: Mapping[str, TensorSpec]) -> None:
    """ValueError, naming the first, unless ``found`` are exactly the declared tensors."""
    for name in sorted(declared.keys() ^ found.keys()):
        raise ValueError(f"{'missing' if name in declared else 'unknown'} tensor {name[:80]!r}")
    for name, spec in declared.items():
        fault = spec.fault(found[name])
        if fault is not None:
            raise ValueError(f"tensor {name!r} {fault}")


def _extremes(values: Tensor) -> tuple[list[float], list[float]]:
    """The least and the largest of values [n], or of every column of [n, places]."""
    low, high = values.aminmax(dim=0)
    return low.double().reshape(-1).tolist(), high.double().reshape(-1).tolist()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
