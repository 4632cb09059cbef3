"""Modules of kvcal that are imported on their first use, for the command line: ``kvcal --help`` runs none of them.

    with lazy_imports():
        from kvcal.run import pipeline

binds ``pipeline`` to a stand-in, which imports the module when one of its names is first looked up. So a block imports
modules, not names. Python 3.15's ``lazy from kvcal.run import pipeline`` (PEP 810) says the same. importlib's
``LazyLoader`` is no help: it puts unfinished modules into ``sys.modules``, which torch walks through.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


@contextmanager
def lazy_imports() -> Iterator[None]:
    """Within the block, ``from package import module`` of packages of kvcal binds stand-ins."""
    eager = builtins.__import__

    def lazy(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name.partition(".")[0] != "kvcal":
            return eager(name, globals, locals, fromlist, level)
        return SimpleNamespace(**{module: _LazyModule(f"{name}.{module}") for module in fromlist})

    builtins.__import__ = lazy
    try:
        yield
    finally:
        builtins.__import__ = eager
