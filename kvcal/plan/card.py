"""The card of a plan on a hub: what it is, how it is loaded, what it takes, what was measured, where it came from."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES
from kvcal.quantities import format_bytes

# Headers and cells, as kvcal.stages.evaluate.table_columns makes them.
Columns = Sequence[tuple[str, Sequence[str]]]


def plan_card(repository: str, record: Mapping[str, Any], layers: Sequence[LayerPlan], sizes: Mapping[str, Any],
              measured: Columns) -> str:  # fmt: skip
    """README.md, in Markdown. ``record``: the plan's JSON; ``sizes``: its ``total_bytes``, ``raw_bytes`` (of 16 bits),
    ``bits_per_value`` and ``sha256``; ``measured``: a table of an evaluation, empty for none."""
    model, workload = record["model"], record["workload"]
    header = {"library_name": "kvcal", "tags": ["kv-cache", "quantization", model["model_type"]]}
    if model["id"].count("/") == 1:
        header["base_model"] = model["id"]
    place = f"batch {workload['batch']} x {workload['context']} tokens"
    facts = {
        "model": f"{model['id']} ({model['model_type']}, cache in {record['cache_dtype']})",
        "weights sha256": model["weights_sha256"],
        f"cache at {place}": f"{format_bytes(sizes['total_bytes'])} ({sizes['total_bytes']} bytes)",
        "at 16 bits": f"{format_bytes(sizes['raw_bytes'])}, {sizes['raw_bytes'] / sizes['total_bytes']:.2f}x",
        "bits per cached value, everything included": f"{sizes['bits_per_value']:.3f}",
        "code bits, keys and values of each layer": _code_bits(layers),
        "plan sha256, without provenance": sizes["sha256"],
    }
    parts = [
        "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in header.items()) + "---",
        f"# A KV-cache quantization plan for {_plain(model['id'])}",
        f"Made by kvcal. A plan says how each layer's keys and values are stored; it holds no weights. At {place}, the "
        "cache takes exactly the bytes below.",
        "```python\nfrom kvcal import PlanCache, load_plan\n\n"
        f'plan = load_plan("{repository}", revision="...")  # a commit\'s id pins it\n'
        "cache = PlanCache(plan, model.config)\nmodel.generate(**inputs, past_key_values=cache)\n```",
        "## Size\n\n" + _table(["", "value"], facts.items()),
    ]
    if measured:
        headers, cells = zip(*measured, strict=True)
        note = "Through the packed cache; ± standard errors."
        parts.append(f"## Measured\n\n{note}\n\n" + _table(headers, zip(*cells, strict=True)))
    else:
        parts.append("## Measured\n\nNothing was measured for this card.")
    parts.append("## Provenance\n\n" + _table(["", "value"], _flat("", record["provenance"])))
    return "\n\n".join(parts) + "\n"


def _code_bits(layers: Sequence[LayerPlan]) -> str:
    """Such as "4/2 2/2": K/V, and where heads differ, "4,2/2"."""

    def of(layer: LayerPlan) -> str:
        if not layer.is_paged:
            return "bounded"
        sides = ([fmt.num_bits for fmt in layer.formats(side)] for side in SIDES)
        return "/".join(",".join(map(str, bits if len(set(bits)) > 1 else bits[:1])) for bits in sides)

    return " ".join(of(layer) for layer in layers)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """JSON as (dotted name, text) pairs; of a list of more than eight items, their number."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _flat(f"{name}.{key}" if name else key, value[key])
    elif isinstance(value, list) and len(value) > 8:
        yield name, f"{len(value)} items"
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _table(headers: Sequence[str], rows: Any) -> str:
    lines = [headers, ["---"] * len(headers), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown shows as it stands, in one line."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("`", "&#96;")
