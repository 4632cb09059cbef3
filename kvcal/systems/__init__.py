"""Systems, each in a folder of its own.

    basis     rotated pages in a basis of each head, with error feedback; means of keys        (the default recipe)
    kitty     tiers: channels of keys that get more bits, by a score                           (Kitty)
    mixkvq    tiers by scores of queries, whose rooms are fitted                               (MixKVQ)
    pm_kvq    pages that shrink on a schedule, and λ, which evens out key channels             (PM-KVQ)
    aqua_kv   pages that hold what a prediction from an earlier layer leaves; HIGGS's lattices (AQUA-KV)
    kvmix     bits and windows by importance of layers                                         (KVmix)
    fp8       pages of e4m3 values                                                             (a baseline)

What several systems share, and what kernels read, stands in ``kvcal.pages`` and ``kvcal.plan``. A folder here
is found by its files, each of which may be left out:

    recipe.py      class Recipe: the sections that it adds to recipes
    layout.py      class Format: the keys that it adds to formats, and the pages that these stand for
    transform.py   class LayerPlan: the keys that it adds to layers, and what they do to pages
    stage.py       STAGES: what is fitted once formats are chosen (kvcal.stages.transform)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import ClassVar, TypeVar

from pydantic.dataclasses import dataclass

from kvcal.strict import STRICT

Record = TypeVar("Record")


class Section:
    """A section of recipes that works on chosen formats, such as [reparam]. ``excludes``: other sections
    that it does not go with, each with the reason; ``reads_text``: calibration data; ``in_engines``: whether
    engines serve what it makes."""

    excludes: ClassVar[Mapping[str, str]] = {}
    reads_text: ClassVar[bool] = True
    in_engines: ClassVar[bool] = True


def parts(name: str) -> list[ModuleType]:
    """The module ``name`` of every system that has it."""
    found = sorted(Path(__file__).parent.glob(f"*/{name}.py"))
    return [importlib.import_module(f"{__name__}.{path.parent.name}.{name}") for path in found]


def extended(part: str) -> Callable[[type[Record]], type[Record]]:
    """A decorator: the record with the keys, and the methods, that systems add to it. Theirs are classes of
    its name in their modules ``part``; their methods come before its own."""

    def extend(record: type[Record]) -> type[Record]:
        found = (vars(module).get(record.__name__) for module in parts(part))
        added = tuple(kind for kind in found if kind is not None)
        body = {"__doc__": record.__doc__, "__module__": record.__module__}
        whole: type[Record] = type(record.__name__, (*added, record), body)
        return dataclass(frozen=True, config=STRICT)(whole)  # type: ignore[return-value]

    return extend
