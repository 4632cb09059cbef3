"""Plans whose pages shrink: on the schedule of a workload, or at given token counts."""

import dataclasses

import torch
from cache_cases import llama_plan, plan_of

from kvcal.geometry import Geometry
from kvcal.plan.plan import Format, Plan, Workload
from kvcal.systems.pm_kvq.schedule import progressive_layers

CONTEXT = 560
K_2 = Format(2, "channel", 32, 3, 20)
V_2 = Format(2, "token", 32)


def scheduled(
    k: Format, v: Format, batch: int, num_layers: int = 2, dtype: str = "float32", context: int = CONTEXT,
    geometry: Geometry | None = None,
) -> tuple[Plan, int]:  # fmt: skip
    """A plan and its budget, of its final formats at the workload. For ``tiny_llama`` or a ``geometry``."""

    def made(*formats: Format) -> Plan:
        return (
            llama_plan(*formats, cache_dtype=dtype, num_layers=num_layers)
            if geometry is None
            else plan_of(geometry, *formats)
        )

    plan = made(k, v)
    budget = made(*(dataclasses.replace(fmt, param_dtype="float32") for fmt in (k, v))).nbytes((context,) * batch)
    workload = Workload(batch, context)
    layers = progressive_layers(plan.layers, workload, plan.cache_dtype, budget)
    return dataclasses.replace(plan, layers=layers, workload=workload), budget


def fixed(k_at: tuple[int, ...], v_at: tuple[int, ...], num_layers: int = 1, **changes) -> Plan:
    """2 KV heads, K per channel and V per token, shrinking at given counts."""
    k = Format(16 >> len(k_at), "channel", 32, 3, param_dtype="float32", shrink_at=k_at, **changes)
    v = Format(16 >> len(v_at), "token", 32, param_dtype="float32", shrink_at=v_at, **changes)
    return dataclasses.replace(llama_plan(k, v, num_layers=num_layers), workload=Workload(8, 4096))


def transformed(plan: Plan) -> Plan:
    """With random λ and offsets of keys."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in plan.layers:
        index, shape = layer.geometry.index, (layer.attention.num_kv_heads, layer.attention.k_head_dim)
        tensors[f"layers.{index}.k_rescale"] = torch.rand(shape, generator=generator) + 0.5
        tensors[f"layers.{index}.k_offset"] = torch.randn(shape, generator=generator)
    layers = tuple(dataclasses.replace(layer, k_rescale=True, k_offset=True) for layer in plan.layers)
    return dataclasses.replace(plan, layers=layers, tensors=tensors)
