"""The tensors of a plan: what the transforms of its layers need, by name, with dtypes and shapes.

    layers.{i}.k_rescale   fp32 [N, D], positive     pages hold K_post / λ                       (PM-KVQ Eq. 9)
    layers.{i}.k_offset    fp32 [N, D]               subtracted from K_post before that
    layers.{i}.rotary      fp64 [pairs, 4]           channel a, channel b, radians per position, amplitude: where keys
                                                     before RoPE are stored or predicted from
    layers.{i}.{s}_predictor.*                       see LinearPredictor                         (AQUA-KV Alg. 1)
    layers.{i}.{s}_signs   int8 [N D] of -1 and 1    random signs before the Hadamard transform  (HIGGS)
    lattice.d{d}.b{bits}   fp32 [2^(d bits), d]      the lattice's points

``i`` is the cache index, ``s`` is k or v, N the KV heads and D the side's head_dim. Exactly the needed ones are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvcal.formats import SIDES, Format, Side
from kvcal.geometry import CacheDtype
from kvcal.layer_plan import LayerPlan
from kvcal.transforms.linear_predictor import PredictorShape

Shape = tuple[int | None, ...]


def tensors_nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that they take on a device, once for all sequences."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def lattice_name(lattice_dim: int, num_bits: int) -> str:
    return f"lattice.d{lattice_dim}.b{num_bits}"


def predictor_shape(layer: LayerPlan, source: LayerPlan, side: Side, cache_dtype: CacheDtype) -> PredictorShape:
    """Shape of a layer's predictor of ``side``. ValueError for one that cannot be."""
    predictor = layer.predictor(side)
    assert predictor is not None
    heads, own = source.attention, layer.attention
    keys = own.num_kv_heads * own.k_head_dim
    if side == "k":
        inputs, outputs = heads.num_kv_heads * heads.k_head_dim, keys
    else:
        inputs, outputs = heads.num_kv_heads * heads.v_head_dim + keys, own.num_kv_heads * own.v_head_dim
    return PredictorShape(predictor.kind, inputs, outputs, cache_dtype, predictor.rank, predictor.group_size)


def needed_tensors(layers: Sequence[LayerPlan], cache_dtype: CacheDtype) -> dict[str, tuple[torch.dtype, Shape]]:
    """(dtype, shape) of every tensor that the layers need; None in a shape is any extent."""
    by_index = {layer.geometry.index: layer for layer in layers}
    needed: dict[str, tuple[torch.dtype, Shape]] = {}
    for layer in layers:
        if not layer.is_paged:
            continue
        prefix, heads = f"layers.{layer.geometry.index}", layer.attention.num_kv_heads
        for name, wanted in (("k_rescale", layer.k_rescale), ("k_offset", layer.k_offset)):
            if wanted:
                needed[f"{prefix}.{name}"] = (torch.float32, (heads, layer.attention.k_head_dim))
        for side in SIDES:
            for fmt in layer.formats(side):
                if fmt.lattice_dim is not None:
                    needed[f"{prefix}.{side}_signs"] = (torch.int8, (heads * layer.head_dim(side),))
                    points = 2 ** (fmt.lattice_dim * fmt.num_bits)
                    needed[lattice_name(fmt.lattice_dim, fmt.num_bits)] = (torch.float32, (points, fmt.lattice_dim))
            predictor = layer.predictor(side)
            if predictor is not None:
                source = by_index[predictor.source]
                tensors = predictor_shape(layer, source, side, cache_dtype).tensors()
                for name, (shape, dtype) in tensors.items():
                    needed[f"{prefix}.{side}_predictor.{name}"] = (dtype, shape)
                reads_keys_of = source if side == "k" else layer
                needed[f"layers.{reads_keys_of.geometry.index}.rotary"] = (torch.float64, (None, 4))
        if layer.k_pages == "pre":
            needed[f"{prefix}.rotary"] = (torch.float64, (None, 4))
    return needed


def needed_nbytes(layers: Sequence[LayerPlan], cache_dtype: CacheDtype) -> int:
    """Bytes of all tensors that the layers need; of rotary tables the most, which turn all channels of a head."""
    most = {f"layers.{layer.geometry.index}.rotary": layer.head_dim("k") // 2 for layer in layers if layer.is_paged}
    needed = needed_tensors(layers, cache_dtype).items()
    return sum(
        math.prod(most[name] if extent is None else extent for extent in shape) * dtype.itemsize
        for name, (dtype, shape) in needed
    )


def check_sources(layers: Sequence[LayerPlan]) -> None:
    """ValueError unless every predictor reads an earlier paged layer whose pages are of the same tokens."""
    by_index = {layer.geometry.index: layer for layer in layers}
    for layer in layers:
        for side in SIDES:
            predictor = layer.predictor(side)
            if predictor is None:
                continue
            place = f"layer {layer.geometry.index} predicts {side} from layer {predictor.source}"
            source = by_index.get(predictor.source)
            if source is None or not source.is_paged or predictor.source >= layer.geometry.index:
                raise ValueError(f"{place}, which is not an earlier layer of full attention")
            read = [source.formats(side)] + ([layer.k] if side == "v" else [])
            own = layer.formats(side)[0]
            if any(fmt.shrink_at for formats in (*read, layer.formats(side)) for fmt in formats):
                raise ValueError(f"{place}, and pages shrink: the prediction would change with them")
            for formats in read:
                if len(formats) != 1 or not _same_pages(formats[0], own):
                    raise ValueError(
                        f"{place}, whose pages are of other tokens; expected one format for all heads with the same "
                        "sinks and window"
                    )


def _same_pages(one: Format, other: Format) -> bool:
    names = ("num_sink_tokens", "recent_window", "window_rule")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def check_tensors(tensors: Mapping[str, Tensor], layers: Sequence[LayerPlan], cache_dtype: CacheDtype) -> None:
    """ValueError unless ``tensors`` are exactly the needed ones, with their dtypes, shapes and values allowed."""
    needed = needed_tensors(layers, cache_dtype)
    for name in sorted(needed.keys() ^ tensors.keys()):
        raise ValueError(f"{'missing' if name in needed else 'unknown'} tensor {name!r}")
    for name, (dtype, shape) in needed.items():
        tensor = tensors[name]
        extents = tuple(tensor.shape)
        fits = len(extents) == len(shape) and all(
            want is None or want == have for want, have in zip(shape, extents, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            raise ValueError(
                f"tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')} {list(extents)}, expected "
                f"{str(dtype).removeprefix('torch.')} {[extent or 'any' for extent in shape]}"
            )
        if name.endswith("k_rescale") and not bool((tensor > 0).all()):
            raise ValueError(f"tensor {name!r} holds a λ that is not positive")
        if name.endswith("signs") and not bool((tensor.abs() == 1).all()):
            raise ValueError(f"tensor {name!r} holds a sign that is neither -1 nor 1")
    _check_rotary(tensors, layers)


def _check_rotary(tensors: Mapping[str, Tensor], layers: Sequence[LayerPlan]) -> None:
    """Every channel is in one pair at most, and lies in the head."""
    for layer in layers:
        name = f"layers.{layer.geometry.index}.rotary"
        if name not in tensors:
            continue
        channels = tensors[name][:, :2].flatten().tolist()
        allowed = set(range(layer.attention.k_head_dim))
        if len(set(channels)) != len(channels) or not set(channels) <= allowed:
            raise ValueError(f"tensor {name!r} pairs channels {channels}, expected distinct ones of the head")
