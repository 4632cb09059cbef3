"""Compilation: the allocated layers, with their transforms and tensors, become the plan."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from torch import Tensor

from kvcal.plan.plan import LayerPlan, Plan
from kvcal.records import refusing
from kvcal.stages.allocate.budget import require_budget
from kvcal.stages.allocate.record import Allocation

# The libraries that can change what a plan does or how it was measured.
LIBRARIES = ("cvxpy", "highspy", "kvcal", "safetensors", "torch", "transformers")


def compile_plan(
    allocation: Allocation, layers: tuple[LayerPlan, ...] | None = None, tensors: Mapping[str, Tensor] | None = None
) -> Plan:
    """The plan of an allocation, or of its ``layers`` with transforms and their ``tensors``, with the versions of the
    libraries that made it (local build tags such as +cpu left out).

    Raises:
        InfeasibleBudget: the plan takes more than the allocation's budget.
    """
    libraries = {name: version(name).split("+")[0] for name in LIBRARIES}
    with refusing("the artifacts do not make a plan", hint="run the stages again that made them"):
        plan = Plan(
            model=allocation.model,
            cache_dtype=allocation.cache_dtype,
            layers=allocation.layers if layers is None else layers,
            workload=allocation.workload,
            provenance={**allocation.provenance, "libraries": libraries},
            tensors=tensors or {},
        )
    require_budget(allocation, plan)
    return plan
