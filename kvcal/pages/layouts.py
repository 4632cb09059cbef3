"""The family of page layouts: a new one is a file of its own and one line here (docs/adding.md)."""

from __future__ import annotations

from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.record_layout import Layout
from kvcal.pages.rotated import RotatedLayout
from kvcal.pages.tiered import TieredLayout
from kvcal.pages.uniform import PageLayout

# By the name in a format's ``quantizer``; a format's ``boost`` chooses "tiered", its ``lattice_dim`` "lattice".
LAYOUTS: dict[str, type[Layout]] = {
    "uniform": PageLayout,
    "tiered": TieredLayout,
    "lattice": LatticeLayout,
    "rotated": RotatedLayout,
}
