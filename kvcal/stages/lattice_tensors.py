"""The tensors of HIGGS layers: random signs of every layer's side, and the grid of every lattice in use.

Signs are drawn from the layer's index and side, so that the same layers give the same plan in any process. Plans share
the tensors: a search makes hundreds of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from kvcal.formats import SIDES
from kvcal.layer_plan import LayerPlan
from kvcal.plan_tensors import lattice_name
from kvcal.quantizers.gaussian_grid import gaussian_grid
from kvcal.transforms.hadamard import random_signs

_signs = functools.cache(random_signs)
_grid = functools.cache(gaussian_grid)


def lattice_tensors(layers: Sequence[LayerPlan]) -> dict[str, Tensor]:
    """By the names of kvcal.plan_tensors. UsageError for a lattice that has no grid."""
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        if not layer.is_paged:
            continue
        for number, side in enumerate(SIDES):
            for fmt in layer.formats(side):
                if fmt.lattice_dim is not None:
                    width = layer.attention.num_kv_heads * layer.head_dim(side)
                    seed = 2 * layer.geometry.index + number
                    tensors[f"layers.{layer.geometry.index}.{side}_signs"] = _signs(width, seed)
                    name = lattice_name(fmt.lattice_dim, fmt.num_bits)
                    tensors[name] = _grid(fmt.lattice_dim, 2 ** (fmt.lattice_dim * fmt.num_bits))
    return tensors
