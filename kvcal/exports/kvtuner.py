"""KVTuner's YAML of bits, for each layer or for each of its heads, written and read.

    0:                      0:
      nbits_key: 8            0:
      nbits_value: 4            nbits_key: 8
                                nbits_value: 4

KVTuner's cache takes the axis of keys, the group size and the length of its 16-bit rest as arguments, the same for all
layers; a comment in the first line names those of the plan. Its codes have 8 bits at most. The file is read by hand and
strictly: these keys in this shape, and none of what else YAML can say.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvcal.artifact import read_text
from kvcal.errors import UsageError
from kvcal.exports.export import CODES, GROUPS, HEADS, Bits, Export, planned_bits
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.pages.record_layout import PAGE_TOKENS, RAW_BITS
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import SIDES, Format
from kvcal.plan.plan import Plan
from kvcal.strict import findings

KEYS = ("nbits_key", "nbits_value")
AXES = {"token": 0, "channel": 1}
CODE_BITS = (1, 2, 3, 4, 8)
_LINE = re.compile(r"( *)(\w+):(?: +(\d{1,9}))?")


def kvtuner(plan: Plan) -> Export:
    """The file's content, for heads where those of any layer differ."""
    planned = planned_bits(plan)
    layers = [layer for layer in plan.layers if layer.geometry.index in planned]
    has_heads = any(len(layer.formats(side)) > 1 for layer in layers for side in SIDES)
    arguments = _arguments(layers)
    lines = [] if arguments is None else [f"# {arguments}"]
    for layer in layers:
        lines.append(f"{layer.geometry.index}:")
        if not has_heads:
            lines += _pair("  ", planned[layer.geometry.index])
            continue
        for head in range(layer.attention.num_kv_heads):
            k, v = (layer.head_formats(side)[head].num_bits if layer.is_paged else RAW_BITS for side in SIDES)
            lines += [f"  {head}:", *_pair("    ", (k, v))]
    return Export(
        text="\n".join(lines) + "\n",
        bits={index: (_stored(k), _stored(v)) for index, (k, v) in planned.items()},
        keeps=frozenset((CODES, HEADS) if arguments is None else (CODES, HEADS, GROUPS)),
        notes=(
            f"FlexibleQuantizedCacheConfig reads the file as {'per_head' if has_heads else 'per_layer'}_config_path",
        ),
    )


def _pair(indent: str, bits: Bits) -> list[str]:
    return [f"{indent}{key}: {_stored(num_bits)}" for key, num_bits in zip(KEYS, bits, strict=True)]


def _stored(num_bits: int) -> int:
    return min(num_bits, CODE_BITS[-1])


def _arguments(layers: list[LayerPlan]) -> str | None:
    """The cache's arguments, None where no single ones are right for all layers."""
    formats = {side: [fmt for layer in layers for fmt in layer.formats(side) if fmt.num_bits < RAW_BITS]
               for side in SIDES}  # fmt: skip
    axes = {fmt.axis for fmt in formats["k"]} or {"token"}
    sizes = {fmt.group_size for side in SIDES for fmt in formats[side]}
    if len(axes) != 1 or len(sizes) != 1:
        return None
    axis, size = AXES[axes.pop()], sizes.pop()
    return f"asym=True axis_key={axis} axis_value=0 q_group_size={size} residual_length={PAGE_TOKENS}"


def read_kvtuner(path: Path, geometry: Geometry, k_axis: str, group_size: int) -> tuple[LayerPlan, ...]:
    """The model's layers with the bits of a file, without sinks and windows. Sliding windows may be in the file; they
    stay at 16 bits.

    Raises:
        UsageError: a file of another shape, or of another model's layers or heads; another axis or group size.
    """
    try:
        formats = {side: {bits: Format(num_bits=bits, axis=axis, group_size=group_size)  # type: ignore[arg-type]
                          for bits in CODE_BITS}
                   for side, axis in (("k", k_axis), ("v", "token"))}  # fmt: skip
    except ValidationError as wrong:
        raise UsageError(f"of the codes, {findings(wrong)}") from None
    bits = {index: _heads(path, index, content) for index, content in _content(path).items()}
    attention = {layer.index: layer.window for layer in geometry.layers if isinstance(layer, AttentionGeometry)}
    paged = {index for index, window in attention.items() if window is None}
    _require_same(path, "layers", bits.keys() - (attention.keys() - paged), paged)
    layers = []
    for layer in bare_layers(geometry):
        if layer.is_paged:
            heads = bits[layer.geometry.index]
            if heads.keys() != {None}:
                expected = range(layer.attention.num_kv_heads)
                _require_same(path, f"heads of layer {layer.geometry.index}", heads.keys(), expected)
            pairs = [heads[head] for head in sorted(heads, key=lambda head: head or 0)]
            k, v = (tuple(formats[side][pair[n]] for pair in pairs) for n, side in enumerate(SIDES))
            layer = LayerPlan(layer.geometry, k[:1] if len(set(k)) == 1 else k, v[:1] if len(set(v)) == 1 else v)
        layers.append(layer)
    return tuple(layers)


def _require_same(path: Path, what: str, found: Collection[int | None], expected: Collection[int]) -> None:
    if set(found) != set(expected):
        wrong = ", ".join(map(str, sorted(set(found) ^ set(expected), key=lambda name: name or 0)[:8]))
        raise UsageError(f"{path}: {what}: {wrong} in the file or in the model alone", "the file is of another model")


def _heads(path: Path, index: int, content: Any) -> dict[int | None, tuple[Any, Any]]:
    """The bits of a layer's heads, or under None those of all."""
    content = {None: content} if isinstance(content, dict) and KEYS[0] in content else content
    found = {}
    for head, pair in content.items() if isinstance(content, dict) else ():
        place = f"{path}: layer {index}" + ("" if head is None else f", head {head}")
        if not isinstance(pair, dict) or set(pair) != set(KEYS):
            raise UsageError(f"{place}: expected the keys {' and '.join(KEYS)}")
        for key in KEYS:
            if pair[key] not in CODE_BITS:
                raise UsageError(f"{place}: {key} = {pair[key]!r}; allowed: {', '.join(map(str, CODE_BITS))}")
        found[head] = pair[KEYS[0]], pair[KEYS[1]]
    if not found or (None in found and len(found) > 1):
        raise UsageError(f"{path}: layer {index}: expected bits, or heads with bits")
    return found


def _content(path: Path) -> dict[int, Any]:
    """The nested keys and numbers of a file: "key:" opens a mapping, "key: number" is an entry of one."""
    lines = read_text(path).splitlines()
    opened: list[tuple[int, dict[Any, Any]]] = [(-1, {})]  # the mappings around a line, and their keys' indentation
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].rstrip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        indent = len(match[1]) if match else 0
        while opened[-1][0] >= indent:
            opened.pop()
        around = opened[-1][1]
        key = int(match[2]) if match and match[2].isdecimal() else match and match[2]
        if match is None or key in around or (len(opened) == 1 and not isinstance(key, int)):
            raise UsageError(
                f"{path}, line {number}: {line[:80]!r} is no new layer, head or number of bits",
                hint="expected a layer (and a head) with nbits_key and nbits_value, each on a line of its own",
            )
        around[key] = int(match[3]) if match[3] else {}
        if not match[3]:
            opened.append((indent, around[key]))
    return opened[0][1]
