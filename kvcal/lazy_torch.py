"""torch, and modules of kvcal, imported on their first use.

One file has a page's bytes and its encoder; one reads a plan and runs it. Counting bytes and reading plans
need no torch, whose import takes longer than both. So the modules on their way write

    from kvcal.lazy_torch import Tensor, torch

A function then imports torch when it computes with it, a module never. ``Tensor`` is for annotations alone.
The command line's help runs no module of a stage at all:

    with lazy_imports():
        from kvcal.stages import pipeline

binds ``pipeline`` to a stand-in, which imports the module when one of its names is first looked up. So a
block imports modules, not names. Python 3.15's ``lazy import`` (PEP 810) says both. importlib's
``LazyLoader`` is no help: it puts unfinished modules into ``sys.modules``, which torch walks through.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
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

__all__ = ["Dtypes", "Tensor", "lazy_imports", "torch"]


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


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


@contextmanager
def lazy_imports() -> Iterator[None]:
    """Within the block, ``from package import module`` binds a stand-in of the module."""
    eager = builtins.__import__

    def lazy(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if not fromlist:
            return eager(name, globals, locals, fromlist, level)
        return SimpleNamespace(**{module: _LazyModule(f"{name}.{module}") for module in fromlist})

    builtins.__import__ = lazy
    try:
        yield
    finally:
        builtins.__import__ = eager
