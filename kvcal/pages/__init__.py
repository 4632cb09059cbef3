"""Pages: how 128 tokens of some KV heads become records of bytes, and back.

``codec`` is the only torch encoder and decoder of pages: transforms (``transforms``), then one of the layouts below,
which pack bits as ``packing`` defines, with codes that ``feedback`` may choose. ``scores`` choose the channels of
``tiered`` pages, ``shrink`` halves bits of ``uniform`` ones. A new layout is one file and one line here
(docs/adding.md).
"""

from __future__ import annotations

from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.layout import Layout
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
