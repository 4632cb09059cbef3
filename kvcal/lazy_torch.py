"""torch, imported on its first use.

One file has a page's bytes and its encoder; one reads a plan and runs it. Counting bytes and reading plans need no
torch, whose import takes longer than both (docs/measurements.md). So the modules on their way write

    from kvcal.lazy_torch import Tensor, torch

A function then imports torch when it computes with it, a module never. ``Tensor`` is for annotations alone. Python
3.15's ``lazy import torch`` (PEP 810) says the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch(ModuleType):
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch, Tensor = _Torch("torch"), Any

__all__ = ["Dtypes", "Tensor", "torch"]


class Dtypes(Mapping[str, "torch.dtype"]):
    """Some of torch's dtypes by their names. Only looking one up imports torch."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __getitem__(self, name: str) -> torch.dtype:
        if name not in self._names:
            raise KeyError(name)
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
