"""Compilation: an allocation becomes the plan. Reparameterization and predictors will join here."""

from __future__ import annotations

from importlib.metadata import version

from kvcal.plan import Plan
from kvcal.stages.allocate import Allocation

# The libraries that can change what a plan does or how it was measured.
LIBRARIES = ("cvxpy", "highspy", "kvcal", "safetensors", "torch", "transformers")


def compile_plan(allocation: Allocation) -> Plan:
    """The plan, with the versions of the libraries that made it (local build tags such as +cpu left out)."""
    libraries = {name: version(name).split("+")[0] for name in LIBRARIES}
    return Plan(
        model=allocation.model,
        cache_dtype=allocation.cache_dtype,
        layers=allocation.layers,
        workload=allocation.workload,
        provenance={**allocation.provenance, "libraries": libraries},
    )
