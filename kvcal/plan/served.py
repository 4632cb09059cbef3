"""The table of what is served where: all ways to store keys and values, as systems and the plan declare them.

``kvcal doctor`` prints it, and docs/engines.md has it. Caches and engines refuse by the same declarations
(``kvcal.kernels.choice.not_served``).
"""

from __future__ import annotations

from kvcal.pages.ways import GEOMETRIES, PLACES, RAW_PAGES, UNIFORM_PAGES, Way
from kvcal.plan import plain_layer
from kvcal.systems import parts

HEADER = ("way", "needs", *PLACES.values())


def all_ways() -> list[Way]:
    """Those of formats, of transforms, and of whole layers."""
    layouts = [way for module in parts("layout") for way in module.WAYS]
    transforms = [way for module in parts("transform") for way in module.WAYS]
    return [RAW_PAGES, UNIFORM_PAGES, *layouts, *plain_layer.WAYS, *transforms, *GEOMETRIES]


def table() -> list[tuple[str, ...]]:
    """Its rows, under ``HEADER``: "yes", or why not."""
    return [(way.name, ", ".join(way.needs), *(way.reason(place) or "yes" for place in PLACES)) for way in all_ways()]
