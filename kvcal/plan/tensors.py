"""The tensors of a plan: what the transforms of its layers need, by name, with dtypes and shapes.

    layers.{i}.k_rescale   fp32 [N, D], 2^-32 ... 2^32   pages hold K_post / λ                   (PM-KVQ Eq. 9)
    layers.{i}.k_offset    fp32 [N, D], up to 2^20   subtracted from K_post before that, or from K_pre
    layers.{i}.rotary      fp64 [pairs, 4]           channel a, channel b, radians per position (0 ... π), amplitude
                                                     (2^-8 ... 2^8): where keys before RoPE are stored or
                                                     read
    layers.{i}.{s}_feedback  fp16 [N, D (D + 1) / 2]   the factor of error feedback       (kvcal.pages.error_feedback)
    layers.{i}.v_gain      fp16 [N, D], 1/4 ... 4    factors of values in their basis  (kvcal.systems.basis.rotated)
    layers.{i}.{s}_basis, {s}_basis_inverse   fp32 [N, D, D], with k_center fp32 [N, D]      (kvcal.systems.basis.basis)
    layers.{i}.{s}_signs   int8 [N D] of -1 and 1    random signs before the Hadamard transform  (HIGGS)

Layouts and systems have more (``Layout.plan_tensors``, ``PlainLayer.own_tensors``).
``i`` is the cache index, ``s`` is k or v, N the KV heads and D the side's head_dim. Exactly the needed ones
are there. The ranges hold far more than any calibration gives, and keep what is read back finite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvcal.geometry import CacheDtype
from kvcal.lazy_torch import Tensor
from kvcal.pages.error_feedback import factor_spec
from kvcal.pages.rescale_and_rope import rotary_spec
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES
from kvcal.records import TensorSpec, require_tensors
from kvcal.stored_tensor import ITEM_BYTES, StoredTensors, stored
from kvcal.systems.basis.basis import CENTER, MATRICES, basis_specs
from kvcal.systems.basis.rotated import gain_spec

LARGEST_RESCALE = 2.0**32
LARGEST_OFFSET = 2.0**20
# Of a basis times its inverse, off the identity, over the norms of the row and the column: rounding leaves
# 2^-15.
INVERSE_TOLERANCE = 2.0**-12


# Tensors of a layer that its pages are encoded with: by KV heads first, or the same for all heads.
OF_BASES = (*(f"{side}_{part}" for side in SIDES for part in MATRICES), f"k_{CENTER}", "v_gain")
BY_HEAD, OF_ALL_HEADS = ("k_rescale", "k_offset", "k_feedback", "v_feedback", *OF_BASES), ("k_signs", "v_signs")


def layer_transforms(tensors: Mapping[str, Tensor], index: int, heads: slice = slice(None)) -> dict[str, Tensor]:
    """Those that layer ``index`` has, of these heads, by the last part of their names."""
    prefix = f"layers.{index}."
    found = {name: tensors[prefix + name] for name in (*BY_HEAD, *OF_ALL_HEADS) if prefix + name in tensors}
    return {name: tensor[heads] if name in BY_HEAD else tensor for name, tensor in found.items()}


def tensors_nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that they take on a device, once for all sequences."""
    held: Mapping[str, Any] = tensors.stored if isinstance(tensors, StoredTensors) else tensors
    return sum(tensor.nbytes for tensor in held.values())


def needed_tensors(layers: Sequence[LayerPlan], cache_dtype: CacheDtype) -> dict[str, TensorSpec]:
    by_index = {layer.geometry.index: layer for layer in layers}
    needed: dict[str, TensorSpec] = {}
    for layer in layers:
        if not layer.is_paged:
            continue
        prefix, heads = f"layers.{layer.geometry.index}", layer.attention.num_kv_heads
        channels = heads, layer.attention.k_head_dim
        if layer.k_rescale:
            needed[f"{prefix}.k_rescale"] = TensorSpec("float32", channels, 1 / LARGEST_RESCALE, LARGEST_RESCALE)
        if layer.k_offset:
            needed[f"{prefix}.k_offset"] = TensorSpec("float32", channels, -LARGEST_OFFSET, LARGEST_OFFSET)
        for side in SIDES:
            needed |= dict(layer.layout(side, cache_dtype).plan_tensors(f"{prefix}.{side}").values())
            if layer.feedback(side):
                needed[f"{prefix}.{side}_feedback"] = factor_spec(heads, layer.head_dim(side))
            if side == "v" and layer.v_gain:
                needed[f"{prefix}.v_gain"] = gain_spec(heads, layer.head_dim(side))
            if layer.basis(side):
                specs = basis_specs(side, heads, layer.head_dim(side))
                needed |= {f"{prefix}.{name}": spec for name, spec in specs.items()}
            needed |= layer.own_tensors(side, by_index, cache_dtype)
        if layer.k_pages == "pre":
            needed[f"{prefix}.rotary"] = rotary_spec(layer.attention.k_head_dim)
    return needed


def needed_nbytes(layers: Sequence[LayerPlan], cache_dtype: CacheDtype) -> int:
    """Bytes of all tensors that the layers need; of rotary tables the most, which turn all channels of a
    head."""
    most = {f"layers.{layer.geometry.index}.rotary": layer.head_dim("k") // 2 for layer in layers if layer.is_paged}
    return sum(
        math.prod(most[name] if extent is None else extent for extent in spec.shape) * ITEM_BYTES[spec.dtype]
        for name, spec in needed_tensors(layers, cache_dtype).items()
    )


def check_layers(layers: Sequence[LayerPlan]) -> None:
    """ValueError unless the layers are unique and in order, and those that others read are there. Sinks
    and windows may differ: page p holds the same tokens in every layer."""
    indices = [layer.geometry.index for layer in layers]
    if not indices or indices != sorted(set(indices)):
        raise ValueError(f"layers must be present, unique and in order, found indices {indices[:8]}")
    by_index = {layer.geometry.index: layer for layer in layers}
    for layer in layers:
        layer.check_sources(by_index)


def check_tensors(tensors: Mapping[str, Tensor], layers: Sequence[LayerPlan], cache_dtype: CacheDtype) -> None:
    """ValueError unless ``tensors`` are exactly the needed ones, with their dtypes, shapes and values
    allowed."""
    require_tensors(tensors, needed_tensors(layers, cache_dtype))
    for name, tensor in stored(tensors).items():
        if name.endswith("_signs") and not tensor.values().all():
            raise ValueError(f"tensor {name!r} holds a sign that is neither -1 nor 1")
        if name.endswith(".rotary"):
            channels = tensor.values()[:, :2].flatten().tolist()
            if len(set(channels)) != len(channels) or not all(channel.is_integer() for channel in channels):
                raise ValueError(
                    f"tensor {name!r} pairs channels {channels[:8]} ..., expected distinct ones of the head"
                )


def check_bases(tensors: Mapping[str, Tensor], layers: Sequence[LayerPlan]) -> None:
    """ValueError unless the stored inverse of every basis is its inverse: one product a head, so of files
    alone."""
    parts = stored(tensors)
    for layer, side in itertools.product(layers, SIDES):
        if not layer.basis(side):
            continue
        name = f"layers.{layer.geometry.index}.{side}_{MATRICES[0]}"
        matrix, inverse = (parts[f"layers.{layer.geometry.index}.{side}_{part}"].values() for part in MATRICES)
        errors = np.abs(matrix @ inverse - np.eye(layer.head_dim(side), dtype=matrix.dtype))
        allowed = np.linalg.norm(matrix, axis=2)[:, :, None] * np.linalg.norm(inverse, axis=1)[:, None]
        for head in np.flatnonzero((errors > INVERSE_TOLERANCE * allowed).any((1, 2))).tolist():
            raise ValueError(
                f"tensor {name!r}: its product with {side}_{MATRICES[1]} is not the identity, but "
                f"{errors[head].max():.3g} off for head {head}"
            )


def layout_tensors(layers: Sequence[LayerPlan]) -> dict[str, Tensor]:
    """The tensors that page layouts read, such as signs, made anew."""
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        for number, side in enumerate(SIDES if layer.is_paged else ()):
            seed = 2 * layer.geometry.index + number
            # Tensors of layouts depend on shapes alone, not on the dtype of unquantized tokens.
            layout = layer.layout(side, "float32")
            for operand, (name, _) in layout.plan_tensors(f"layers.{layer.geometry.index}.{side}").items():
                tensors[name] = layout.make_tensor(operand, seed)
    return tensors
