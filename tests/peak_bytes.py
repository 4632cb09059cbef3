"""The most bytes that tensors take at a time while something runs: every storage from its first tensor to its last."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts storages that are made within the context. ``now`` and ``peak`` in bytes; scratch inside of an operator of
    torch is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in given:
                    self._known[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        self.peak = max(self.peak, self.now)
        return found

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)
